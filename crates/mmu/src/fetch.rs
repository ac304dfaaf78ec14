//! Instruction bytes at RIP on the exit path, for CPUs without NRIP save or decode assists.
//!
//! An exit's handler wants the bytes without user copies, locks or a page walk. [`CodeFetch`]
//! remembers for the last few code pages what the walk read; a hit loads the same paging entries
//! again (at most five) and compares, so that a guest that changes its tables is honoured, with
//! or without INVLPG. Withdrawals on the host's side change the generation. Interrupts are off.
//!
//! Why a remembered walk is verified and not invalidated: a hypervisor with TDP does not see INVLPG or loads of CR3 any
//! more, and intercepting them to keep this cache would cost more than the cache saves. Loading the entries again is
//! one load a level.

use core::cell::RefCell;

use x86::{Cr0, Cr4, Efer, Gpa};

use crate::role::PagingContext;
use crate::table::{Trail, View};
use crate::tdp::page_of;
use crate::walk::{Access, GuestMemory, Swap, translate};

/// Bytes from RIP on. `len` of them count: fewer than 15 when the page ends before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeBytes {
    /// The bytes, and what follows them.
    pub bytes: [u8; 16],
    /// How many count, 1 to 16.
    pub len: usize,
}

/// Pages remembered, in pairs. A loop that exits touches one or two, wherever they lie.
const WAYS: usize = 8;

/// What decides how a fetch is translated. A change of any of it means another walk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeMode {
    /// The guest's CR0.
    pub cr0: Cr0,
    /// The guest's CR3.
    pub cr3: u64,
    /// The guest's CR4.
    pub cr4: Cr4,
    /// The guest's EFER.
    pub efer: Efer,
    /// CPL. Only whether it is 3 matters, but compared as it is it costs less.
    pub cpl: u8,
}

impl CodeMode {
    #[inline]
    fn of(context: &PagingContext) -> Self {
        Self {
            cr0: context.cr0,
            cr3: context.cr3,
            cr4: context.cr4,
            efer: context.efer,
            cpl: context.cpl,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Way {
    /// The linear page that the walk is of.
    page: u64,
    mode: CodeMode,
    trail: Trail,
}

impl Way {
    const EMPTY: Self = Self {
        page: u64::MAX,
        mode: CodeMode {
            cr0: Cr0::empty(),
            cr3: 0,
            cr4: Cr4::empty(),
            efer: Efer::empty(),
            cpl: 0,
        },
        trail: Trail::EMPTY,
    };

    /// One branch for all of it.
    #[inline(always)]
    fn is_for(&self, mode: &CodeMode, rip: u64) -> bool {
        // One branch, nearly always predicted, instead of six on every exit that decodes.
        let changed = (self.page ^ (rip >> 12))
            | (self.mode.cr0 ^ mode.cr0).bits()
            | (self.mode.cr3 ^ mode.cr3)
            | (self.mode.cr4 ^ mode.cr4).bits()
            | (self.mode.efer ^ mode.efer).bits()
            | u64::from(self.mode.cpl ^ mode.cpl);
        changed == 0
    }
}

/// Odd, and such that each of the bits which guests toggle (CR0.WP, CR4.PGE, CR4.OSXSAVE, CR4.SMEP,
/// CR4.SMAP, EFER.NXE) and the low bits of a page's number move the product's top three bits, whatever the
/// other bits are. A test looks at that.
const SPREAD: u64 = 0x612e_7696_a6ce_cc1b;

/// Where a page is looked for first. The bits that guests toggle and the base go in, so that the two
/// halves of a toggle do not drive each other out.
#[inline(always)]
fn slot(mode: &CodeMode, rip: u64) -> usize {
    let mixed = ((rip ^ mode.cr3) >> 12)
        .wrapping_add(mode.cr0.bits())
        .wrapping_add(mode.cr4.bits())
        .wrapping_add(mode.efer.bits());
    (mixed.wrapping_mul(SPREAD) >> 61) as usize
}

/// Where a page is remembered that lost the first place to another.
#[inline]
fn second(slot: usize) -> usize {
    slot ^ 1
}

/// A vCPU's memory of where its code is.
#[derive(Clone, Debug)]
pub struct CodeFetch {
    ways: [Way; WAYS],
    /// Turns with every page that is remembered: which of its two places it takes.
    turn: bool,
}

impl Default for CodeFetch {
    fn default() -> Self {
        Self::new()
    }
}

impl CodeFetch {
    /// A cache that remembers nothing.
    pub const fn new() -> Self {
        Self { ways: [Way::EMPTY; WAYS], turn: false }
    }

    /// Forgets all: what a walk refuses depends on more than [`CodeMode`] (the guest's CPUID: its address
    /// width, its large pages), and that has changed.
    pub fn forget(&mut self) {
        for way in &mut self.ways {
            // The page alone is enough: no RIP has this one, so nothing else of the way is looked at again.
            way.page = Way::EMPTY.page;
        }
    }

    /// The bytes at linear address `rip` (CS base included), as the guest would fetch them.
    ///
    /// `None`: not to be had without sleeping or without writing to guest memory. Then the ordinary
    /// walk says what is to be done, a #PF included.
    pub fn fetch(
        &mut self,
        context: &PagingContext,
        rip: u64,
        view: &View<'_>,
    ) -> Option<CodeBytes> {
        let mode = CodeMode::of(context);
        match self.way(&mode, rip).and_then(|way| way.trail.bytes(view, rip as usize)) {
            Some((bytes, len)) => Some(CodeBytes { bytes, len }),
            None => self.miss(context, rip, view),
        }
    }

    /// Sixteen bytes, on the conditions of [`CodeFetch::first_bytes`].
    #[inline(always)]
    pub fn hit(&self, mode: &CodeMode, rip: u64, view: &View<'_>) -> Option<CodeBytes> {
        // The product's top three bits, so the index is below WAYS.
        let way = &self.ways[slot(mode, rip)];
        if !way.is_for(mode, rip) {
            return None;
        }
        let bytes = way.trail.bytes_plain(view, rip as usize)?;
        Some(CodeBytes { bytes, len: 16 })
    }

    /// The first eight bytes, if the page was fetched from before and has its first place: what
    /// nearly every exit finds. `None` means to ask [`CodeFetch::fetch`].
    #[inline(always)]
    pub fn first_bytes(&self, mode: &CodeMode, rip: u64, view: &View<'_>) -> Option<u64> {
        let way = &self.ways[slot(mode, rip)];
        if !way.is_for(mode, rip) {
            return None;
        }
        way.trail.first_bytes(view, rip as usize)
    }

    fn way(&self, mode: &CodeMode, rip: u64) -> Option<&Way> {
        let slot = slot(mode, rip);
        // At most two places are looked at: a longer search would cost the exit more than the walk
        // that it spares.
        [slot, second(slot)].map(|n| &self.ways[n]).into_iter().find(|way| way.is_for(mode, rip))
    }

    /// Where to remember a page: where it was, or in place of either neighbour by turns.
    fn place(&mut self, mode: &CodeMode, rip: u64) -> usize {
        let slot = slot(mode, rip);
        if self.ways[slot].is_for(mode, rip) {
            return slot;
        }
        if self.ways[second(slot)].is_for(mode, rip) {
            return second(slot);
        }
        // Its own place is the faster one to find.
        for free in [slot, second(slot)] {
            if self.ways[free].page == Way::EMPTY.page {
                self.turn = free & 1 != 0;
                return free;
            }
        }
        // By turns of the pair, not of the page: two that miss in turn then take one each.
        self.turn = !self.turn;
        (slot & !1) | usize::from(self.turn)
    }

    fn miss(&mut self, context: &PagingContext, rip: u64, view: &View<'_>) -> Option<CodeBytes> {
        let tracer = Tracer { view, trail: RefCell::new(view.trail()) };
        // A walk that has to write, or finds memory that is not mapped, is not for here: interrupts are off.
        let found = translate(&tracer, context, rip, Access::FETCH).ok()?;
        let code = page_of(view, found.gpa)?;
        let mut trail = tracer.trail.into_inner();
        // Only now do the steps hold: a walk that was given up half way must leave no trail that
        // matches.
        trail.arrive(view, &code);
        // The page of RIP, not that of the fetch's end: bytes behind it are asked for by another
        // RIP.
        let page = rip >> 12;
        // What was read goes by the trail as well, so that the first fetch and all later ones see
        // the same page.
        let (bytes, len) = trail.bytes(view, rip as usize)?;
        let mode = CodeMode::of(context);
        self.ways[self.place(&mode, rip)] = Way { page, mode, trail };
        Some(CodeBytes { bytes, len })
    }
}

/// The lock-free view as a walk's memory; notes every entry read. Writes are refused: an
/// instruction that ran has its accessed bits set.
struct Tracer<'a> {
    view: &'a View<'a>,
    trail: RefCell<Trail>,
}

impl GuestMemory for Tracer<'_> {
    type Error = ();

    fn read_u64(&self, gpa: Gpa) -> Result<u64, ()> {
        let page = page_of(self.view, gpa).ok_or(())?;
        // Tried, though a walk does not nest: nothing here may panic.
        let mut trail = self.trail.try_borrow_mut().map_err(|_| ())?;
        trail.step_u64(self.view, &page, gpa.page_offset()).ok_or(())
    }

    fn read_u32(&self, gpa: Gpa) -> Result<u32, ()> {
        let page = page_of(self.view, gpa).ok_or(())?;
        let mut trail = self.trail.try_borrow_mut().map_err(|_| ())?;
        trail.step_u32(self.view, &page, gpa.page_offset()).ok_or(())
    }

    fn cmpxchg_u64(&self, _: Gpa, _: u64, _: u64) -> Result<Swap, ()> {
        Err(())
    }

    fn cmpxchg_u32(&self, _: Gpa, _: u32, _: u32) -> Result<Swap, ()> {
        Err(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: CodeMode = CodeMode {
        cr0: Cr0::from_bits_retain(0x8001_0033),
        cr3: 0x1000,
        cr4: Cr4::from_bits_retain(0xa0),
        efer: Efer::from_bits_retain(0xd00),
        cpl: 0,
    };

    fn remember(fetch: &mut CodeFetch, rip: u64) {
        let place = fetch.place(&MODE, rip);
        fetch.ways[place] = Way { page: rip >> 12, mode: MODE, trail: Trail::EMPTY };
    }

    #[test]
    fn what_guests_toggle_moves_the_place_whatever_else_is_set() {
        // The low bits of a page's number, and WP, PGE, OSXSAVE, SMEP, SMAP, NXE.
        for bit in [0, 1, 2, 16, 7, 18, 20, 21, 11] {
            let moved = SPREAD << bit;
            assert!((1 << 61..=7 << 61).contains(&moved), "{bit}");
        }
        let toggled = CodeMode { cr0: MODE.cr0 ^ Cr0::WP, ..MODE };
        assert_ne!(slot(&MODE, 0x1000), slot(&toggled, 0x1000));
    }

    #[test]
    fn pages_of_one_place_stand_side_by_side_and_a_third_drives_out_the_oldest() {
        let place = |page: &u64| slot(&MODE, page << 12);
        let mut alike = (1..).filter(|page| place(page) == place(&1)).map(|page| page << 12);
        let [a, b, c] = core::array::from_fn(|_| alike.next().unwrap());
        let mut fetch = CodeFetch::new();
        remember(&mut fetch, a);
        remember(&mut fetch, b);
        assert!(fetch.way(&MODE, a).is_some() && fetch.way(&MODE, b).is_some());
        remember(&mut fetch, c);
        let found = [a, b, c].map(|rip| fetch.way(&MODE, rip).is_some());
        assert_eq!(found, [false, true, true]);
    }
}
