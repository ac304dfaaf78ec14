//! Instruction bytes at RIP on the exit path, for CPUs without NRIP save or decode assists.
//!
//! An exit's handler wants the bytes without user copies, locks or a page walk. [`CodeFetch`]
//! remembers for the last few code pages what the walk read; a hit loads the same paging entries
//! again (at most five) and compares, so that a guest that changes its tables is honoured, with
//! or without INVLPG. Withdrawals on the host's side change the generation. Interrupts are off.

use core::cell::RefCell;

use x86::Gpa;

use crate::table::{Trail, View};
use crate::tdp::page_of;
use crate::walk::{Access, GuestMemory, PagingContext, Swap, translate};

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
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER.
    pub efer: u64,
    /// CPL is 3.
    pub user: bool,
}

impl CodeMode {
    #[inline]
    fn of(context: &PagingContext) -> Self {
        Self {
            cr0: context.cr0,
            cr3: context.cr3,
            cr4: context.cr4,
            efer: context.efer,
            user: context.cpl == 3,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Way {
    /// Linear page.
    page: u64,
    mode: CodeMode,
    trail: Trail,
}

impl Way {
    const EMPTY: Self = Self {
        page: u64::MAX,
        mode: CodeMode { cr0: 0, cr3: 0, cr4: 0, efer: 0, user: false },
        trail: Trail::EMPTY,
    };

    /// One branch for all of it.
    #[inline]
    fn is_for(&self, mode: &CodeMode, rip: u64) -> bool {
        let changed = (self.page ^ (rip >> 12))
            | (self.mode.cr0 ^ mode.cr0)
            | (self.mode.cr3 ^ mode.cr3)
            | (self.mode.cr4 ^ mode.cr4)
            | (self.mode.efer ^ mode.efer)
            | u64::from(self.mode.user ^ mode.user);
        changed == 0
    }
}

/// Where a page is looked for first. The bits that guests toggle (CR0.WP, CR4.PGE, CR4.OSXSAVE,
/// CR4.SMEP, EFER.NXE) and the base go in, so that the two halves of a toggle do not drive each other
/// out.
#[inline]
fn slot(mode: &CodeMode, rip: u64) -> usize {
    let mixed = ((rip ^ mode.cr3) >> 12)
        ^ (mode.cr0 >> 15)
        ^ (mode.cr4 >> 7)
        ^ (mode.cr4 >> 18)
        ^ (mode.efer >> 10);
    mixed as usize % WAYS
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
    /// Remembers nothing.
    pub const fn new() -> Self {
        Self { ways: [Way::EMPTY; WAYS], turn: false }
    }

    /// The bytes at linear address `rip` (CS base included), as the guest would fetch them.
    ///
    /// `None`: not to be had without sleeping or without writing to guest memory. Then the ordinary
    /// walk says what is to be done, a #PF included.
    #[inline]
    pub fn fetch(
        &mut self,
        context: &PagingContext,
        rip: u64,
        view: &View<'_>,
    ) -> Option<CodeBytes> {
        let mode = CodeMode::of(context);
        match self.hit(&mode, rip, view) {
            Some(found) => Some(found),
            None => self.uncommon(context, rip, view),
        }
    }

    /// The remembered half of [`CodeFetch::fetch`] alone, which needs less of the guest's state:
    /// `None` means to ask that.
    #[inline(always)]
    pub fn hit(&self, mode: &CodeMode, rip: u64, view: &View<'_>) -> Option<CodeBytes> {
        let slot = slot(mode, rip);
        let way = &self.ways[slot];
        if !way.is_for(mode, rip) {
            return self.second_hit(mode, rip, view);
        }
        let bytes = way.trail.bytes_plain(view, rip as usize)?;
        Some(CodeBytes { bytes, len: 16 })
    }

    #[inline(never)]
    fn second_hit(&self, mode: &CodeMode, rip: u64, view: &View<'_>) -> Option<CodeBytes> {
        let way = &self.ways[second(slot(mode, rip))];
        if !way.is_for(mode, rip) {
            return None;
        }
        let bytes = way.trail.bytes_plain(view, rip as usize)?;
        Some(CodeBytes { bytes, len: 16 })
    }

    fn way(&self, mode: &CodeMode, rip: u64) -> Option<&Way> {
        let slot = slot(mode, rip);
        [slot, second(slot)].map(|n| &self.ways[n]).into_iter().find(|way| way.is_for(mode, rip))
    }

    #[inline(never)]
    fn uncommon(
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
        let found = translate(&tracer, context, rip, Access::FETCH).ok()?;
        let code = page_of(view, found.gpa)?;
        let mut trail = tracer.trail.into_inner();
        trail.arrive(view, &code);
        let page = rip >> 12;
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
