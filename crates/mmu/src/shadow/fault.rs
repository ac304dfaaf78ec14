//! A #PF on the shadow tables: the guest's walk, and then the entries that were missing.
//!
//! The first half walks the guest's tables beside the shadow pages that exist and changes nothing. When
//! it knows that the access is allowed and has all that it needs, the second half sets accessed and
//! dirty bits in the guest's tables and makes the entries.
//!
//! Why in two halves: a fault is often given up in its middle, for want of a frame in the tree or of a page for a
//! table. If accessed bits were set on the way down, a guest would find them set for accesses that it never made, as
//! the CPU sets them for what it completes. So nothing is changed before everything is at hand.
//!
//! Why there is a way of its own for a missing leaf: most faults are those of a process that touches its next page.
//! All tables above are shadowed and as they were. Then one load a level compares them, and nothing is derived anew.
//!
//! Why the guest's entries are read again though copies of them are at hand: tables may be written unseen (see the
//! module above). A fault is the moment at which the CPU itself would walk, so what it finds has to be what a walk
//! now would find, and a copy that differs is not followed.

use x86::exception::pf;
use x86::{Cr4, Direction, Exception, Gfn, Gpa};

use super::State;
use super::arena::PageId;
use super::counters::count;
use super::frames::Chunk;
use super::roots::ShadowRoots;
use super::tables::{entry_gpa, load, update};
use super::{FrameWanted, ShadowFault};
use crate::format::ADDRESS;
use crate::grant::Grant;
use crate::role::PagingContext;
use crate::role::Role;
use crate::source::{A, D, P, PS, index_at, same_link};
use crate::table::{GuestPage, View};
use crate::tdp::LEVEL_2M;

/// The access that faulted.
#[derive(Clone, Copy)]
pub(super) struct Access<'a> {
    pub(super) context: &'a PagingContext,
    pub(super) va: u64,
    pub(super) write: bool,
    pub(super) user: bool,
    pub(super) fetch: bool,
}

impl<'a> Access<'a> {
    fn new(context: &'a PagingContext, va: u64, code: u32) -> Self {
        Self {
            context,
            va: if context.is_long_mode() { va } else { va & 0xffff_ffff },
            // Only the access's bits. P and RSVD are those of our entries, and tell nothing of the
            // guest's.
            write: code & pf::WRITE != 0,
            user: code & pf::USER != 0,
            fetch: code & pf::FETCH != 0,
        }
    }

    /// The guest's own #PF. `bits`: what its walk found out.
    #[cold]
    fn refused(&self, role: Role, bits: u32) -> Exception {
        let mut code = bits;
        code |= if self.write { pf::WRITE } else { 0 };
        code |= if self.user { pf::USER } else { 0 };
        // The fetch bit exists only where something can forbid fetching.
        let forbids = role.nx() || self.context.cr4.contains(Cr4::SMEP);
        code |= if self.fetch && forbids { pf::FETCH } else { 0 };
        Exception::pf(self.va, code)
    }

    /// Whether a page of such a grant allows the access (SDM vol. 3A §4.6). Protection keys are
    /// not offered to guests on shadow pages.
    #[inline]
    fn is_allowed(&self, grant: Grant, role: Role) -> bool {
        let context = self.context;
        let user_page = grant.has(Grant::U);
        // U/S, R/W, XD, then SMEP and SMAP (SDM vol. 3A §4.6). All give the same error code, so the
        // order shows in nothing.
        if self.user && !user_page {
            return false;
        }
        // With CR0.WP clear the supervisor writes to what is read-only.
        if self.write && !grant.has(Grant::W) && (self.user || role.wp()) {
            return false;
        }
        if self.fetch && !grant.has(Grant::X) {
            return false;
        }
        if !self.user && user_page {
            if self.fetch {
                return !context.cr4.contains(Cr4::SMEP);
            }
            // An access of the CPU's own at CPL 3, to a descriptor table, is not excused by AC.
            let excused = context.rflags_ac && context.cpl != 3;
            return !context.cr4.contains(Cr4::SMAP) || excused;
        }
        true
    }
}

/// What the walk read at one level.
#[derive(Clone, Copy)]
pub(super) struct Step {
    /// The guest's entry.
    pub(super) entry: u64,
    /// The entry's table, where the shadow page does not know it.
    pub(super) table: Option<GuestPage>,
    /// The table's frame.
    pub(super) gfn: Gfn,
    /// The shadow page of this level, or 0.
    pub(super) id: PageId,
    /// The role of that page, or of the one to be made.
    pub(super) role: Role,
}

impl Step {
    pub(super) const NONE: Self =
        Self { entry: 0, table: None, gfn: Gfn(0), id: 0, role: Role::NONE };
}

/// The guest's walk.
pub(super) struct Walk {
    /// By level less one.
    pub(super) steps: [Step; 5],
    pub(super) top: u8,
    /// Where it ended.
    pub(super) leaf: u8,
    /// What all entries together allow.
    pub(super) grant: Grant,
}

impl Walk {
    #[inline]
    pub(super) fn step(&self, level: u8) -> &Step {
        const NONE: &Step = &Step::NONE;
        self.steps.get(usize::from(level.wrapping_sub(1))).unwrap_or(NONE)
    }
}

/// A leaf to be made.
#[derive(Clone, Copy)]
struct Target<'a> {
    gfn: Gfn,
    /// What the tree says of the frame.
    known: u64,
    chunk: &'a Chunk,
    grant: Grant,
    /// What a page of small leaves grants in place of a large one.
    below: Grant,
    /// The guest's entry.
    copy: u64,
}

impl State {
    /// Does what [`super::ShadowGuard::fault`] tells.
    pub(super) fn fault(
        &self,
        view: &View<'_>,
        roots: &ShadowRoots,
        context: &PagingContext,
        va: u64,
        code: u32,
    ) -> ShadowFault {
        let access = Access::new(context, va, code);
        let Some((top, role)) = roots.start(access.va) else {
            debug_assert!(false, "a fault without a root");
            return ShadowFault::Fixed;
        };
        // A PDPTE that is not present: there is no table to be walked.
        if top == 0 {
            return self.reflect(&access, role, 0);
        }
        if role.is_direct() {
            return self.fault_unpaged(view, top, &access);
        }
        if let Some(fault) = self.fault_in_table(view, top, &access) {
            return fault;
        }
        match self.walk(view, top, &access) {
            Ok(mut walk) => self.fix(view, roots, &mut walk, &access),
            Err(fault) => fault,
        }
    }

    /// The common fault: the shadow pages are there, down to the lowest level, as the guest's tables
    /// are, and no accessed or dirty bit has to be set. `None`: something else.
    #[inline]
    fn fault_in_table(
        &self,
        view: &View<'_>,
        top: PageId,
        access: &Access<'_>,
    ) -> Option<ShadowFault> {
        let mut id = top;
        let mut page = self.arena.page(id);
        let mut role = page.role.get();
        // 32-bit paging is rare enough to take the long way always.
        if role.is_narrow() {
            return None;
        }
        while role.level() > 1 {
            let index = index_at(access.va, role.level());
            // A page found under an older generation is not read: the frame may be somebody else's
            // by now.
            let entry = view.load_u64(&page.guest.get(), index << 3)?;
            let kid = page.kid(index);
            if kid == 0 || entry != page.copy(index) {
                return None;
            }
            id = kid;
            page = self.arena.page(id);
            role = page.role.get();
            // Below a large entry the leaf comes from frames, not from a table.
            if role.is_direct() {
                return None;
            }
        }
        let index = index_at(access.va, 1);
        let table = page.guest.get();
        let entry = view.load_u64(&table, index << 3)?;
        if entry & P == 0 {
            return Some(self.reflect(access, role, 0));
        }
        // What has to set bits, or has an error code of its own, takes the long way.
        if entry & A == 0
            || (access.write && entry & D == 0)
            || entry & role.reserved_in_leaf() != 0
        {
            return None;
        }
        let mut grant = role.grant().and(Grant::of(entry));
        if !access.is_allowed(grant, role) {
            return Some(self.reflect(access, role, pf::PRESENT));
        }
        // Only CR0.WP=0 comes here, which needs a leaf that is the supervisor's alone.
        if access.write && !grant.has(Grant::W) {
            return None;
        }
        // A write through our entry would set no D in the guest's, so it has to fault.
        if entry & D == 0 {
            grant = grant.without(Grant::W);
        }
        let gpa = Gpa(entry & ADDRESS | access.va & 0xfff);
        let target = match self.target(view, access, gpa, grant) {
            Ok(target) => Target { copy: entry, ..target },
            Err(fault) => return Some(fault),
        };
        self.put_page(id, index, &target, access);
        self.map_ahead(view, id, index, &table);
        count(&self.counters.fixed);
        Some(ShadowFault::Fixed)
    }

    #[cold]
    fn reflect(&self, access: &Access<'_>, role: Role, bits: u32) -> ShadowFault {
        count(&self.counters.reflected);
        ShadowFault::Guest(access.refused(role, bits))
    }

    /// The guest's walk. `top`: the page to begin with.
    fn walk(&self, view: &View<'_>, top: PageId, access: &Access<'_>) -> Result<Walk, ShadowFault> {
        let first = self.arena.page(top);
        let mut role = first.role.get();
        let mut gfn = first.gfn.get();
        let mut id = top;
        let level = role.level();
        let mut walk = Walk { steps: [Step::NONE; 5], top: level, leaf: 0, grant: Grant::ALL };
        for step in walk.steps.iter_mut().take(level.into()).rev() {
            let index = index_at(access.va, role.level());
            let offset = role.offset(index);
            let table = match id {
                0 => self.find_table(view, gfn),
                id => self.table_of(view, id),
            };
            let entry = table.and_then(|table| load(view, &table, role, offset));
            let (Some(entry), Some(table)) = (entry, table) else {
                return Err(ShadowFault::NeedFrame(FrameWanted {
                    gpa: entry_gpa(gfn, offset),
                    write: false,
                    // What the guest gets if the table lies in no slot: an entry that cannot be
                    // read counts as not present.
                    exec: false,
                    table: Some(access.refused(role, 0)),
                }));
            };
            if entry & P == 0 {
                return Err(self.reflect(access, role, 0));
            }
            if let Some(page) = self.arena_page(id) {
                let kid = page.kid(index);
                // Not with PS: below a large entry the page stands for frames, and its role is made
                // in another way.
                if kid != 0 && entry == page.copy(index) && entry & PS == 0 {
                    // As it was when the link was made: nothing is to be found out again.
                    *step = Step { entry, table: Some(table), gfn, id, role };
                    let below = self.arena.page(kid);
                    (id, role, gfn) = (kid, below.role.get(), below.gfn.get());
                    walk.grant = role.grant();
                    continue;
                }
            }
            let leaf = role.is_leaf(entry);
            // After P and before rights: a reserved bit faults whatever the access is, and the
            // error code says so (SDM vol. 3A §4.7).
            if entry & role.reserved(leaf) != 0 {
                return Err(self.reflect(access, role, pf::PRESENT | pf::RSVD));
            }
            *step = Step { entry, table: Some(table), gfn, id, role };
            let grant = Grant::of(entry);
            walk.grant = walk.grant.and(grant);
            walk.leaf = role.level();
            if leaf {
                break;
            }
            gfn = role.table_frame(entry);
            let page = self.arena_page(id);
            // A link survives a change of A or D: it leads to the same table with the same rights.
            let linked = page.filter(|p| p.is_link(index) && same_link(p.copy(index), entry));
            role = role.below(index, grant);
            id = match linked {
                Some(page) => page.kid(index),
                None => self.arena.find(gfn, role).unwrap_or(0),
            };
        }
        Ok(walk)
    }

    #[inline]
    fn arena_page(&self, id: PageId) -> Option<&super::arena::ShadowPage> {
        (id != 0).then(|| self.arena.page(id))
    }

    /// The second half.
    fn fix(
        &self,
        view: &View<'_>,
        roots: &ShadowRoots,
        walk: &mut Walk,
        access: &Access<'_>,
    ) -> ShadowFault {
        let last = walk.step(walk.leaf);
        if !access.is_allowed(walk.grant, last.role) {
            return self.reflect(access, last.role, pf::PRESENT);
        }
        let index = index_at(access.va, walk.leaf);
        let span = 12 + 9 * u32::from(walk.leaf - 1);
        let within = access.va >> 12 & ((1u64 << (span - 12)) - 1);
        let base = last.role.leaf_frame(last.entry, index);
        let gfn = Gfn(base.0 | within);
        let gpa = Gpa(gfn.gpa().0 | access.va & 0xfff);
        let mut grant = walk.grant;
        if access.write && !grant.has(Grant::W) {
            // A supervisor's write to what is read-only, with CR0.WP clear: such a page is the
            // supervisor's alone as long as it is writable, and not executable for it under SMEP.
            if grant.has(Grant::U) {
                if last.role.smap_not_wp() {
                    return ShadowFault::Emulate { gpa };
                }
                if last.role.smep_not_wp() {
                    grant = grant.without(Grant::X);
                }
            }
            grant = grant.with(Grant::W).without(Grant::U);
        }
        let target = match self.target(view, access, gpa, grant) {
            Ok(target) => target,
            Err(fault) => return fault,
        };
        // Pages of the levels above the leaf that are still to be made, and those that take a large
        // leaf's place if the frames are not large here.
        let missing = (1..walk.top).filter(|&n| n >= walk.leaf && walk.step(n).id == 0).count();
        let needed = missing + usize::from(walk.leaf - 1);
        if self.arena.free_count() < needed {
            return ShadowFault::NeedPages(needed);
        }
        // From here on guest memory changes. What still fails is begun anew, finds the bits set,
        // and does no harm.
        if let Some(fault) = self.mark_used(view, roots, walk, access) {
            return fault;
        }
        let Some(page) = self.build(view, walk, access.va) else {
            return ShadowFault::NeedPages(needed);
        };
        let last = *walk.step(walk.leaf);
        // Clean: read-only until the write that sets the bit, unless the bit cannot be set.
        let dirty = last.entry & D != 0 || access.write;
        let mut target = Target { copy: last.entry, below: walk.grant, ..target };
        if !dirty {
            target.grant = target.grant.without(Grant::W);
            target.below = target.below.without(Grant::W);
        }
        if walk.leaf == 1 {
            self.put_page(page, index, &target, access);
            if let Some(table) = &last.table {
                self.map_ahead(view, page, index, table);
            }
        } else if !self.put_large(view, page, index, &target, access) {
            return ShadowFault::NeedPages(needed);
        }
        count(&self.counters.fixed);
        ShadowFault::Fixed
    }

    /// The frame that the access leads to, if the tree has it as it must be.
    #[inline]
    fn target(
        &self,
        view: &View<'_>,
        access: &Access<'_>,
        gpa: Gpa,
        grant: Grant,
    ) -> Result<Target<'_>, ShadowFault> {
        let gfn = gpa.gfn();
        if let Some(chunk) = self.frames.chunk(gfn) {
            let known = self.frame(view, gfn, chunk, Direction::write_if(access.write));
            if known != 0 {
                return Ok(Target { gfn, known, chunk, grant, below: grant, copy: 0 });
            }
        }
        let (write, exec) = (access.write, access.fetch);
        Err(ShadowFault::NeedFrame(FrameWanted { gpa, write, exec, table: None }))
    }

    /// Sets accessed and dirty bits. `Some`: the fault is taken again, or a table must be writable
    /// first.
    fn mark_used(
        &self,
        view: &View<'_>,
        roots: &ShadowRoots,
        walk: &mut Walk,
        access: &Access<'_>,
    ) -> Option<ShadowFault> {
        let (top, leaf) = (walk.top, walk.leaf);
        // From the top down, as the CPU does it: who sees a leaf accessed finds the way to it
        // accessed.
        for level in (leaf..=top).rev() {
            let step = walk.steps.get_mut(usize::from(level.wrapping_sub(1)))?;
            let dirty = if level == leaf && access.write { D } else { 0 };
            let wanted = step.entry | A | dirty;
            if wanted == step.entry {
                continue;
            }
            let offset = step.role.offset(index_at(access.va, level));
            // An exchange: L0 must not bring back what the guest's other CPUs took away.
            match self.set_bits(view, step, offset, wanted) {
                Some(true) => step.entry = wanted,
                // The guest changed its entry under us. "Fixed" lets the CPU try again, which walks what is there now.
                Some(false) => return Some(ShadowFault::Fixed),
                // In ROM the bits stay as they are.
                None if roots.roms.has(view.generation(), step.gfn) => {}
                None => {
                    return Some(ShadowFault::NeedFrame(FrameWanted {
                        gpa: entry_gpa(step.gfn, offset),
                        write: true,
                        exec: false,
                        table: Some(access.refused(step.role, 0)),
                    }));
                }
            }
        }
        None
    }

    /// Replaces the entry of a step. Whether it was as read; `None`: its table cannot be written.
    #[inline(never)]
    pub(super) fn set_bits(
        &self,
        view: &View<'_>,
        step: &Step,
        offset: usize,
        wanted: u64,
    ) -> Option<bool> {
        let done = update(view, step.table.as_ref()?, step.role, offset, step.entry, wanted);
        if done.is_some() {
            return done;
        }
        // The table may have become writable since it was found.
        let table = self.find_table(view, step.gfn)?;
        if step.id != 0 {
            self.arena.page(step.id).guest.set(table);
        }
        update(view, &table, step.role, offset, step.entry, wanted)
    }

    /// Makes the pages and links down to the level of the leaf. The page of that level comes back;
    /// `None`: pages ran out.
    #[inline]
    fn build(&self, view: &View<'_>, walk: &Walk, va: u64) -> Option<PageId> {
        let mut id = walk.step(walk.top).id;
        let mut level = walk.top;
        while level > walk.leaf {
            let (step, below) = (walk.step(level), walk.step(level - 1));
            let index = index_at(va, level);
            let page = self.arena.page(id);
            let kid = page.kid(index);
            // The link is as it was made. The copy follows the guest's A bit, which was set a
            // moment ago.
            if kid != 0 && kid == below.id && page.is_link(index) {
                if page.copy(index) != step.entry {
                    page.set_copy(index, step.entry);
                }
                id = kid;
            } else {
                id = self.relink(view, id, index, step, below)?;
            }
            level -= 1;
        }
        Some(id)
    }

    #[inline(never)]
    pub(super) fn relink(
        &self,
        view: &View<'_>,
        id: PageId,
        index: usize,
        step: &Step,
        below: &Step,
    ) -> Option<PageId> {
        // What may fail comes first: the old link stays until there is another.
        let kid = self.obtain(below.gfn, below.role)?;
        self.drop_entry(id, index);
        // What was made under another root may be stale for this one.
        self.sync(view, kid);
        self.link(id, index, kid, step.entry);
        Some(kid)
    }

    /// A page of 4 KiB at `index` of a page of the lowest level.
    #[inline]
    fn put_page(&self, id: PageId, index: usize, target: &Target<'_>, access: &Access<'_>) {
        let mut grant = target.grant;
        if grant.has(Grant::W) && target.chunk.is_protected(target.gfn) {
            if access.write {
                // The table becomes doubtful before the write can happen, with the lock held: no
                // flush passes it by in between.
                self.unsync_table(target.gfn);
            } else {
                grant = grant.without(Grant::W);
            }
        }
        // Accessed from birth: the fault is an access, and the CPU need not come back to set the
        // bit.
        let spte = self.leaf(target.known, grant) | self.format.accessed();
        self.put_leaf(id, index, target.gfn, target.chunk, spte, target.copy);
    }

    /// A large guest page at entry `index` of page `id`, of level 2 or 3: large here too where the
    /// frames allow, else a page of small ones. `false`: pages ran out.
    #[inline(never)]
    fn put_large(
        &self,
        view: &View<'_>,
        mut id: PageId,
        mut index: usize,
        target: &Target<'_>,
        access: &Access<'_>,
    ) -> bool {
        loop {
            let page = self.arena.page(id);
            let role = page.role.get();
            let level = role.level();
            // One protected table among the 512 frames keeps the page small, or its writes would be
            // let through with the rest.
            let whole = target.known & PS != 0 && target.chunk.protected.get() == 0;
            if level == LEVEL_2M && whole {
                let within = (target.gfn.0 & 511) << 12;
                let spte =
                    (self.leaf(target.known, target.grant) & !within) | self.format.accessed() | PS;
                let first = Gfn(target.gfn.0 & !511);
                self.put_large_leaf(id, index, first, target.chunk, spte, target.copy);
                return true;
            }
            if level <= 1 {
                self.put_page(id, index, target, access);
                self.map_frames_ahead(view, id, index, target.grant);
                return true;
            }
            let shift = 9 * (u32::from(level) - 1);
            let base = Gfn(target.gfn.0 >> shift << shift);
            // Not the one access's grant: what CR0.WP=0 lets the supervisor write is not granted to
            // the neighbours.
            let wanted = role.direct_below(target.below);
            let kid = page.kid(index);
            let fits = page.is_link(index) && {
                let kid = self.arena.page(kid);
                (kid.gfn.get(), kid.role.get()) == (base, wanted)
            };
            if fits {
                page.set_copy(index, target.copy);
                id = kid;
            } else {
                // Dropped first: where no page is free the fault is taken again, and finds the
                // entry empty.
                self.drop_entry(id, index);
                let Some(kid) = self.obtain(base, wanted) else { return false };
                self.link(id, index, kid, target.copy);
                id = kid;
            }
            index = index_at(target.gfn.0 << 12, level - 1);
        }
    }

    /// A fault of a guest that does not page: `top` is the page of its gigabyte.
    fn fault_unpaged(&self, view: &View<'_>, top: PageId, access: &Access<'_>) -> ShadowFault {
        let target = match self.target(view, access, Gpa(access.va), Grant::ALL) {
            Ok(target) => target,
            Err(fault) => return fault,
        };
        // One at most: below the page of a gigabyte there is one level.
        if self.arena.free_count() == 0 {
            return ShadowFault::NeedPages(1);
        }
        let index = index_at(access.va, 2);
        if !self.put_large(view, top, index, &target, access) {
            return ShadowFault::NeedPages(1);
        }
        count(&self.counters.fixed);
        ShadowFault::Fixed
    }
}
