//! The roots that a vCPU holds: the current one, and previous ones by base and role.
//!
//! A root in long mode is a shadow page. Otherwise it is four of the second level below PDPTEs, which
//! lie in a page of the vCPU's own below 4 GiB. Pages that a root leads to directly are counted, and
//! not taken out of use while they are.

use core::cell::Cell;

use host::error::NoMemory;
use host::page::Page;
use x86::{Gfn, Hpa};

use super::arena::PageId;
use super::counters::count;
use super::roms::Roms;
use super::{RootOutcome, State, Tlb};
use crate::format::ADDRESS;
use crate::role::Role;
use crate::role::{AddressSpace, PagingContext};
use crate::roots::{RootCache, RootKey};
use crate::source::P;
use crate::table::View;

/// A root that is current.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Root {
    /// What the hardware's CR3 holds (encryption bit included). Below 4 GiB outside long mode.
    pub cr3: Hpa,
    /// Hardware tables of 4 or 5 levels like the guest's, or 3: PAE, also for a guest with 32-bit
    /// paging or without paging. The PDPTEs lie behind `cr3` and are complete.
    pub levels: u8,
    /// The root's role.
    pub role: Role,
}

/// A root as it is kept.
#[derive(Debug)]
struct Held {
    root: Root,
    /// The root's page, or those behind the four PDPTEs (0 for a PDPTE that is not present).
    pages: [PageId; 4],
    /// The guest's PDPTEs, in PAE paging.
    pdptes: [u64; 4],
    /// The place of its own PDPTEs.
    place: Option<u8>,
    /// [`ShadowRoots::flushes`] when its pages were in order last.
    fresh: Cell<u64>,
}

/// Places for PDPTEs: more than there are roots.
const PLACES: u8 = 8;

/// The roots of a vCPU. Released with [`super::ShadowGuard::release`] before it is dropped.
#[derive(Debug)]
pub struct ShadowRoots {
    cache: RootCache<Held>,
    /// PDPTEs of the roots that need some: 32 bytes for each place.
    low: Page,
    /// Places in use, a bit each.
    places: u8,
    /// Counts the vCPU's flushes.
    flushes: u64,
    pub(super) roms: Roms,
}

impl ShadowRoots {
    /// A vCPU's roots before the first switch: it holds nothing.
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self::on(Page::zeroed_low()?))
    }

    /// Holds nothing, with a page below 4 GiB for PDPTEs.
    #[inline]
    pub fn on(low: Page) -> Self {
        Self { cache: RootCache::new(), low, places: 0, flushes: 0, roms: Roms::NONE }
    }

    /// The current root.
    #[inline]
    pub fn current(&self) -> Option<Root> {
        self.cache.current().map(|held| held.root)
    }

    /// Notes that a guest table lies in memory that the guest cannot write: its accessed and dirty
    /// bits stay as they are. `generation`: the tree's, before that was found out.
    pub fn note_rom(&mut self, gfn: Gfn, generation: u64) {
        self.roms.note(gfn, generation);
    }

    /// The page that the walk of `va` begins with, and its role. Page 0: a PDPTE is not present.
    #[inline]
    pub(super) fn start(&self, va: u64) -> Option<(PageId, Role)> {
        let held = self.cache.current()?;
        let n = if held.root.levels == 3 { (va >> 30) as usize & 3 } else { 0 };
        Some((held.pages.get(n).copied().unwrap_or(0), held.root.role))
    }
}

/// The tables that a root begins with, by frame and role; at most four.
fn tables(key: RootKey, pdptes: &[u64; 4]) -> impl Iterator<Item = Option<(Gfn, Role)>> {
    let RootKey { base, role } = key;
    let pdptes = *pdptes;
    let count = if role.is_long() { 1 } else { 4 };
    (0..4u64).map(move |n| {
        if n >= count {
            None
        } else if role.is_direct() {
            Some((Gfn(n << 18), role))
        } else if role.is_long() {
            Some((Gfn(base >> 12), role))
        } else if role.is_narrow() {
            Some((Gfn(base >> 12), role.in_quadrant(n as usize)))
        } else {
            // A PDPTE without P has no table; its place in the hardware's PDPTEs is 0 too.
            let pdpte = pdptes.get(n as usize).copied().unwrap_or(0);
            (pdpte & P != 0).then_some((Gfn((pdpte & ADDRESS) >> 12), role))
        }
    })
}

impl State {
    /// Does what [`super::ShadowGuard::switch`] tells.
    pub(super) fn switch(
        &self,
        view: &View<'_>,
        roots: &mut ShadowRoots,
        context: &PagingContext,
        pdptes: &[u64; 4],
        space: AddressSpace,
        tlb: Tlb,
    ) -> RootOutcome {
        let role = Role::of(context, space);
        let key = RootKey { base: role.base(context.cr3), role };
        if tlb == Tlb::Flushed {
            // Counted, and each root is brought in order when it is used next: a flush does no more
            // than it must.
            roots.flushes = roots.flushes.wrapping_add(1);
        }
        if let Some(held) = roots.cache.switch(key) {
            // PAE paging alone has PDPTEs that are no part of the key: the guest can change them
            // below the same CR3.
            let paged = held.root.levels == 3 && !held.root.role.is_direct();
            if !paged || held.root.role.is_narrow() || held.pdptes == *pdptes {
                count(&self.counters.roots_kept);
                self.freshen(view, roots);
                return roots.current().map_or(RootOutcome::NeedPages(1), RootOutcome::Ready);
            }
        }
        self.make_root(view, roots, key, pdptes)
    }

    /// Brings the current root's pages in order, if the vCPU flushed since they were.
    fn freshen(&self, view: &View<'_>, roots: &ShadowRoots) {
        let Some(held) = roots.cache.current() else { return };
        if held.fresh.replace(roots.flushes) != roots.flushes {
            for &id in held.pages.iter().filter(|id| **id != 0) {
                self.sync(view, id);
            }
        }
    }

    #[inline(never)]
    fn make_root(
        &self,
        view: &View<'_>,
        roots: &mut ShadowRoots,
        key: RootKey,
        pdptes: &[u64; 4],
    ) -> RootOutcome {
        let role = key.role;
        let wanted = || tables(key, pdptes);
        let lacking = |table: &(Gfn, Role)| self.arena.find(table.0, table.1).is_none();
        let needed = wanted().flatten().filter(lacking).count();
        // Before anything is changed: the caller comes again with more pages.
        if self.arena.free_count() < needed {
            return RootOutcome::NeedPages(needed);
        }
        // The same key with other PDPTEs.
        if roots.cache.key() == Some(key)
            && let Some(old) = roots.cache.take_if(|known, _| *known == key)
        {
            self.let_go(&mut roots.places, &old);
        }
        let mut pages = [0; 4];
        for (place, table) in pages.iter_mut().zip(wanted()) {
            let Some((gfn, role)) = table else { continue };
            let Some(id) = self.obtain(gfn, role) else { continue };
            let page = self.arena.page(id);
            page.roots.set(page.roots.get().saturating_add(1));
            self.arena.renew(id);
            *place = id;
        }
        let [first, ..] = pages;
        let (cr3, place) = if role.is_long() {
            (Hpa(self.arena.page(first).hpa().0 | self.format.encryption()), None)
        } else {
            let place = (!roots.places).trailing_zeros() as u8 % PLACES;
            // A place of its own for each root: one that is switched back to finds its PDPTEs as
            // they were.
            roots.places |= 1 << place;
            for (n, id) in (usize::from(place) * 4..).zip(pages) {
                // Only P: PDPTEs have no rights, and other bits are reserved in them (SDM vol. 3A
                // §4.4.1).
                let pdpte = if id == 0 { 0 } else { self.arena.page(id).hpa().0 | P };
                if let Some(word) = roots.low.table().get(n) {
                    word.store(pdpte, core::sync::atomic::Ordering::Release);
                }
            }
            (Hpa(roots.low.hpa().0 + u64::from(place) * 32), Some(place))
        };
        let levels = if role.is_long() { role.level() } else { 3 };
        let root = Root { cr3, levels, role };
        // Never fresh: a page of another vCPU's may be among them.
        let fresh = Cell::new(roots.flushes.wrapping_sub(1));
        let held = Held { root, pages, pdptes: *pdptes, place, fresh };
        count(&self.counters.roots_made);
        if let Some(old) = roots.cache.insert(key, held) {
            self.let_go(&mut roots.places, &old);
        }
        self.freshen(view, roots);
        RootOutcome::Ready(root)
    }

    fn let_go(&self, places: &mut u8, held: &Held) {
        if let Some(place) = held.place {
            *places &= !(1 << place);
        }
        for &id in held.pages.iter().filter(|id| **id != 0) {
            let page = self.arena.page(id);
            page.roots.set(page.roots.get().saturating_sub(1));
        }
    }

    /// Does what [`super::ShadowGuard::flush`] tells.
    pub(super) fn flush(&self, view: &View<'_>, roots: &mut ShadowRoots) {
        roots.flushes = roots.flushes.wrapping_add(1);
        self.freshen(view, roots);
    }

    /// Does what [`super::ShadowGuard::invlpg`] tells.
    pub(super) fn invlpg(&self, view: &View<'_>, roots: &mut ShadowRoots, va: u64) {
        let before = roots.flushes;
        roots.flushes = before.wrapping_add(1);
        let Some(held) = roots.cache.current() else { return };
        // The others are looked at whole before they are used again.
        if held.fresh.get() == before {
            held.fresh.set(roots.flushes);
        }
        let va = if held.root.role.is_long() { va } else { va & 0xffff_ffff };
        match roots.start(va) {
            Some((id, role)) if id != 0 && !role.is_direct() => {
                self.sync_address(view, id, va);
            }
            _ => {}
        }
    }

    /// Does what [`super::ShadowGuard::forget_previous`] tells.
    pub(super) fn forget_previous(&self, roots: &mut ShadowRoots) {
        // The current one stays: the vCPU enters on it.
        let current = roots.cache.key();
        while let Some(old) = roots.cache.take_if(|key, _| Some(*key) != current) {
            self.let_go(&mut roots.places, &old);
        }
    }

    /// Does what [`super::ShadowGuard::release`] tells.
    pub(super) fn release(&self, roots: &mut ShadowRoots) {
        while let Some(old) = roots.cache.take() {
            self.let_go(&mut roots.places, &old);
        }
    }
}
