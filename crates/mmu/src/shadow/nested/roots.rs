//! The roots of L2's that a vCPU holds, by L1's tables.

use core::cell::Cell;

use x86::{Gfn, Hpa};

use super::super::State;
use super::super::arena::PageId;
use super::super::counters::count;
use super::super::roms::Roms;
use super::{NestedRoot, NestedSwitch};
use crate::nested::{NestedAccess, Tables};
use crate::role::Role;
use crate::roots::{RootCache, RootKey};
use crate::table::View;

/// A root as it is kept.
#[derive(Debug)]
struct Held {
    root: NestedRoot,
    tables: Tables,
    /// The page of L1's root.
    page: PageId,
    /// The pages above it, lowest first, where the hardware's tables have more levels; else 0.
    above: [PageId; 2],
    /// [`NestedRoots::flushes`] when its pages were in order last.
    fresh: Cell<u64>,
}

/// The roots of L2's that a vCPU holds, of one memory. Released with
/// [`super::super::ShadowGuard::nested_release`] before it is dropped.
#[derive(Debug)]
pub struct NestedRoots {
    cache: RootCache<Held>,
    /// Whose pages these are; 0: nobody's.
    owner: u64,
    /// Counts flushes, from 1 on.
    flushes: u64,
    pub(super) roms: Roms,
    /// What L1 was told to be absent last.
    awaited: Cell<Option<Awaited>>,
}

/// An access that L1's tables refused for an entry that was not there: L1 is about to make it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    /// The page of the root that it was under.
    pub(super) page: PageId,
    pub(super) access: NestedAccess,
}

impl Default for NestedRoots {
    fn default() -> Self {
        Self::new()
    }
}

impl NestedRoots {
    /// A vCPU's roots for L2 before the first switch: it holds nothing.
    pub const fn new() -> Self {
        let awaited = Cell::new(None);
        Self { cache: RootCache::new(), owner: 0, flushes: 1, roms: Roms::NONE, awaited }
    }

    /// The current root.
    #[inline]
    pub fn current(&self) -> Option<NestedRoot> {
        self.cache.current().map(|held| held.root)
    }

    /// Whether nothing is held: only then may it be dropped.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.owner == 0
    }

    /// All of L2's translations are flushed: INVEPT of all, TLB_CONTROL. Takes effect with the next
    /// [`super::super::ShadowGuard::nested_switch`] of each root.
    #[inline]
    pub fn flush(&mut self) {
        // Never 0, which stands for a root that is not fresh.
        self.flushes = self.flushes.wrapping_add(1).max(1);
        self.forget_awaited();
    }

    /// The translations through one EPT pointer are flushed: INVEPT of a single context.
    pub fn flush_of(&mut self, pointer: u64) {
        // Whichever pointer it is: an L1 that flushes is not one that has made a new entry.
        self.forget_awaited();
        for held in self.cache.current().into_iter().chain(self.cache.previous()) {
            if held.tables.has_root(pointer) {
                held.fresh.set(0);
            }
        }
    }

    /// Notes that a table of L1's lies in memory that L1 cannot write: its accessed and dirty bits stay as
    /// they are. `generation`: the tree's, before that was found out.
    pub fn note_rom(&mut self, gfn: Gfn, generation: u64) {
        self.roms.note(gfn, generation);
    }

    /// Whether L1 was told of an absent entry, and L2 was not entered since.
    #[inline]
    pub fn awaits(&self) -> bool {
        self.awaited.get().is_some()
    }

    /// L1 is told that the entry for `access`, below the root's page, is absent.
    #[inline]
    pub(super) fn await_entry(&self, page: PageId, access: &NestedAccess) {
        self.awaited.set(Some(Awaited { page, access: *access }));
    }

    /// What was awaited, once.
    pub(super) fn take_awaited(&self) -> Option<Awaited> {
        self.awaited.take()
    }

    /// Nothing is awaited any more.
    #[inline]
    pub fn forget_awaited(&self) {
        self.awaited.set(None);
    }

    /// The current root, if it is that of `tables`, held in the pages of that number, and as fresh as it has to be.
    #[inline]
    pub(in super::super) fn settled(&self, owner: u64, tables: &Tables) -> Option<NestedRoot> {
        let held = self.cache.current()?;
        let same = held.tables.are(tables) && self.owner == owner;
        (same && held.fresh.get() == self.flushes).then_some(held.root)
    }

    /// The page that the walk begins with, if the roots are of the pages of that number.
    #[inline]
    pub(super) fn start(&self, owner: u64) -> Option<PageId> {
        self.cache.current().filter(|_| self.owner == owner).map(|held| held.page)
    }
}

/// The frame by which the page above a root is found: of no slot, so that it goes with none.
fn frame_above(gfn: Gfn) -> Gfn {
    Gfn(gfn.0 | 1 << 60)
}

impl State {
    /// Does what [`super::super::ShadowGuard::nested_switch`] tells.
    pub(super) fn nested_switch(
        &self,
        view: &View<'_>,
        roots: &mut NestedRoots,
        tables: &Tables,
    ) -> NestedSwitch {
        let key = RootKey { base: tables.base, role: tables.role };
        // The hardware's tables have at least the levels of L1's, or L1's upper addresses could not
        // be walked.
        let above = match self.format.levels().checked_sub(tables.role.level()) {
            Some(more @ 0..=2) if roots.owner == self.counters.number() || roots.owner == 0 => {
                usize::from(more)
            }
            _ => return NestedSwitch::Refused,
        };
        if roots.cache.switch(key).is_some() {
            count(&self.counters.roots_kept);
        } else if let Err(needed) = self.make_nested_root(roots, tables, above) {
            return NestedSwitch::NeedPages(needed);
        }
        self.freshen_nested(view, roots);
        roots.current().map_or(NestedSwitch::Refused, NestedSwitch::Ready)
    }

    /// Brings the current root's pages in order, if L2's translations were flushed since they were.
    fn freshen_nested(&self, view: &View<'_>, roots: &NestedRoots) {
        let Some(held) = roots.cache.current() else { return };
        if held.fresh.replace(roots.flushes) != roots.flushes {
            self.sync(view, held.page);
        }
    }

    #[inline(never)]
    fn make_nested_root(
        &self,
        roots: &mut NestedRoots,
        tables: &Tables,
        above: usize,
    ) -> Result<(), usize> {
        let (role, gfn) = (tables.role, Gfn(tables.base >> 12));
        let upper = [role.above(), role.above().above()].map(|role| (frame_above(gfn), role));
        let lacks = |(gfn, role): &(Gfn, Role)| self.arena.find(*gfn, *role).is_none();
        let needed = usize::from(lacks(&(gfn, role)))
            + upper.iter().take(above).filter(|page| lacks(page)).count();
        if self.arena.free_count() < needed {
            return Err(needed);
        }
        let page = self.obtain(gfn, role).ok_or(needed)?;
        let (mut pages, mut top) = ([0; 2], page);
        for (place, (gfn, role)) in pages.iter_mut().zip(upper).take(above) {
            *place = self.obtain(gfn, role).ok_or(needed)?;
        }
        // Only when all are there: what fails half way must leave no counts behind.
        self.hold(page);
        for id in pages.into_iter().filter(|id| *id != 0) {
            self.hold(id);
            // A page above that is found may have lost its link: the page below was given up since.
            if self.arena.page(id).kid(0) != top {
                self.drop_entry(id, 0);
                self.link(id, 0, top, 0);
            }
            top = id;
        }
        let top = self.arena.page(top);
        let root = NestedRoot { hpa: Hpa(top.hpa().0 | self.format.encryption()), role };
        // Never fresh: it may be another vCPU's page.
        let held = Held { root, tables: *tables, page, above: pages, fresh: Cell::new(0) };
        count(&self.counters.roots_made);
        roots.owner = self.counters.number();
        let key = RootKey { base: tables.base, role };
        if let Some(old) = roots.cache.insert(key, held) {
            self.let_go_nested(&old);
        }
        Ok(())
    }

    /// A page that a root refers to from now on.
    fn hold(&self, id: PageId) {
        let page = self.arena.page(id);
        page.roots.set(page.roots.get().saturating_add(1));
        self.arena.renew(id);
    }

    fn let_go_nested(&self, held: &Held) {
        for id in [held.page].into_iter().chain(held.above).filter(|id| *id != 0) {
            let page = self.arena.page(id);
            page.roots.set(page.roots.get().saturating_sub(1));
        }
    }

    /// Does what [`super::super::ShadowGuard::nested_release`] tells.
    pub(super) fn nested_release(&self, roots: &mut NestedRoots) -> bool {
        if roots.owner != self.counters.number() {
            // Numbers of pages mean something else here.
            return roots.is_empty();
        }
        while let Some(old) = roots.cache.take() {
            self.let_go_nested(&old);
        }
        roots.forget_awaited();
        roots.owner = 0;
        true
    }
}
