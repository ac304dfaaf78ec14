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
    /// What L1 was told of since L2 was entered by this root last.
    told: Cell<Option<Told>>,
}

/// An access that L1's tables refused, of which L1 was told.
#[derive(Clone, Copy, Debug)]
struct Told {
    access: NestedAccess,
    /// It was under another root of the same tables: the CPU has what it keeps under this one.
    elsewhere: bool,
}

impl Held {
    /// L1 is told of an access, whose address is looked at before L2 is entered by this root.
    fn tell(&self, access: &NestedAccess, elsewhere: bool) {
        let had = self.told.get();
        // One is noted: for two addresses all is looked at.
        if had.is_some_and(|had| had.access.gpa >> 12 != access.gpa >> 12) {
            self.fresh.set(0);
        }
        let elsewhere = elsewhere || self.owes_flush();
        self.told.set(Some(Told { access: *access, elsewhere }));
    }

    /// Whether the CPU has to forget what it keeps under this root before it is used.
    fn owes_flush(&self) -> bool {
        self.told.get().is_some_and(|told| told.elsewhere)
    }
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
}

impl Default for NestedRoots {
    fn default() -> Self {
        Self::new()
    }
}

impl NestedRoots {
    /// A vCPU's roots for L2 before the first switch: it holds nothing.
    pub const fn new() -> Self {
        Self { cache: RootCache::new(), owner: 0, flushes: 1, roms: Roms::NONE }
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
    }

    /// The translations through one EPT pointer are flushed: INVEPT of a single context.
    pub fn flush_of(&mut self, pointer: u64) {
        for held in self.all() {
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

    fn all(&self) -> impl Iterator<Item = &Held> {
        self.cache.current().into_iter().chain(self.cache.previous())
    }

    /// L1 is told that its `tables` refuse an access of L2's in software. The hardware's TLB is the caller's.
    ///
    /// The next switch to a root of these tables looks at the address.
    pub fn tell(&self, tables: &Tables, access: &NestedAccess) {
        // Under each role: the CPU that L1 sees knows none.
        for held in self.all().filter(|held| held.tables.have_root_of(tables)) {
            held.tell(access, !held.tables.are(tables));
        }
    }

    /// L1 is told of a fault on the current root, other than by [`NestedFault::L1`](super::NestedFault): for want of a table.
    pub fn tell_of_fault(&self, access: &NestedAccess) {
        if let Some(held) = self.cache.current() {
            self.tell(&held.tables, access);
        }
    }

    /// The current root, if it is that of `tables`, held in the pages of that number, and as fresh as it has to be.
    #[inline]
    pub(in super::super) fn settled(&self, owner: u64, tables: &Tables) -> Option<NestedRoot> {
        let held = self.cache.current()?;
        let same = held.tables.are(tables) && self.owner == owner;
        let fresh = held.fresh.get() == self.flushes && held.told.get().is_none();
        (same && fresh).then_some(held.root)
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
        let mut replaced = false;
        if roots.cache.switch(key).is_some() {
            count(&self.counters.roots_kept);
        } else {
            match self.make_nested_root(roots, tables, above) {
                Ok(owed) => replaced = owed,
                Err(needed) => return NestedSwitch::NeedPages(needed),
            }
        }
        let Some(held) = roots.cache.current() else { return NestedSwitch::Refused };
        replaced |= self.freshen_nested(view, held, roots.flushes);
        NestedSwitch::Ready { root: held.root, replaced }
    }

    /// Brings a root's pages in order, if L2's translations were flushed since they were; else what L1 was told of. Whether
    /// something went that the CPU may have.
    fn freshen_nested(&self, view: &View<'_>, held: &Held, flushes: u64) -> bool {
        let owed = held.owes_flush();
        let told = held.told.take();
        if held.fresh.replace(flushes) != flushes {
            // Whoever flushes has the CPU forget, too; and what was told ended what it kept.
            self.sync(view, held.page);
            return owed;
        }
        told.is_some_and(|told| self.nested_told(view, held.page, &told.access)) || owed
    }

    /// Makes a root current. Whether that which had to go for it owed a flush, or how many pages are needed.
    #[inline(never)]
    fn make_nested_root(
        &self,
        roots: &mut NestedRoots,
        tables: &Tables,
        above: usize,
    ) -> Result<bool, usize> {
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
        let (fresh, told) = (Cell::new(0), Cell::new(None));
        let held = Held { root, tables: *tables, page, above: pages, fresh, told };
        count(&self.counters.roots_made);
        roots.owner = self.counters.number();
        let key = RootKey { base: tables.base, role };
        let Some(old) = roots.cache.insert(key, held) else { return Ok(false) };
        self.let_go_nested(&old);
        Ok(old.owes_flush())
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
        roots.owner = 0;
        true
    }
}
