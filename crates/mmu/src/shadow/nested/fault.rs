//! A fault of L2's: the walk of L1's tables, and then the entries that were missing.
//!
//! As for a guest's own tables ([`super::super::fault`]): the first half changes nothing; when it knows that the
//! access is allowed and has all that it needs, the second sets accessed and dirty bits in L1's tables and
//! makes the entries.
//!
//! Most faults are on a way that the pages have already, but for its end. There L1's entries need not be understood again:
//! they are those that the links were made from.

use x86::{Direction, Gfn, Gpa};

use super::super::State;
use super::super::ahead::{GROUP, missing_around};
use super::super::arena::PageId;
use super::super::counters::count;
use super::super::fault::{Step, Walk};
use super::super::frames::Chunk;
use super::super::tables::{entry_gpa, frame_of};
use super::roots::NestedRoots;
use super::told::End;
use super::{NestedFault, NestedFrame};
use crate::grant::Grant;
use crate::nested::rules::Reading;
use crate::nested::{L1Fault, NestedAccess, Refusal};
use crate::role::Role;
use crate::source::index_at;
use crate::table::{GuestPage, View};

/// A leaf to be made.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) gfn: Gfn,
    /// What the tree says of the frame.
    pub(super) known: u64,
    pub(super) chunk: &'a Chunk,
    pub(super) grant: Grant,
    /// L1's entry, as it was read.
    pub(super) copy: u64,
}

impl<'a> Target<'a> {
    /// What an entry of L1's, the last of its walk, has mapped.
    fn of(last: &Step, grant: Grant, found: &Found<'a>, access: &NestedAccess) -> Self {
        let dirty = last.role.dirty();
        // Clean: read-only until the write that sets the bit, unless the bit cannot be set.
        let clean = last.entry & dirty != dirty && !access.write;
        let grant = if clean { grant.without(Grant::W) } else { grant };
        let &Found { gfn, known, chunk } = found;
        Self { gfn, known, chunk, grant, copy: last.entry }
    }
}

/// The frame that an access goes to, as the tree has it.
pub(super) struct Found<'a> {
    pub(super) gfn: Gfn,
    pub(super) known: u64,
    pub(super) chunk: &'a Chunk,
}

impl State {
    /// Does what [`super::super::ShadowGuard::nested_fault`] tells.
    pub(super) fn nested_fault(
        &self,
        view: &View<'_>,
        roots: &NestedRoots,
        access: &NestedAccess,
    ) -> NestedFault {
        let Some(top) = roots.start(self.counters.number()) else {
            debug_assert!(false, "a fault without a root");
            return NestedFault::Fixed { replaced: true };
        };
        // Without tables of L1's there is nothing to walk.
        if self.arena.page(top).role.get().is_direct() {
            return self.nested_flat(view, top, access);
        }
        match self.nested_known(view, roots, top, access) {
            Some(fault) => fault,
            None => self.nested_unknown(view, roots, top, access),
        }
    }

    /// A fault where each link is what L1's entry says now, down to a page of the lowest level. `None`: it is not
    /// so, or L1 is to hear more than that nothing is mapped.
    fn nested_known(
        &self,
        view: &View<'_>,
        roots: &NestedRoots,
        top: PageId,
        access: &NestedAccess,
    ) -> Option<NestedFault> {
        let id = self.nested_way(view, top, access.gpa)?;
        let page = self.arena.page(id);
        let role = page.role.get();
        let (index, table) = (index_at(access.gpa, 1), self.table_of(view, id)?);
        let entry = view.load_u64(&table, index << 3)?;
        // L1's entry decides, read now: the hardware would walk now, and a copy may be stale.
        let grant = match role.read(entry) {
            Reading::Leaf(grant) => role.grant().and(grant),
            Reading::Absent => {
                // As behind any refusal: what stands there is of an entry that is gone.
                self.drop_entry(id, index);
                roots.tell_of_fault(access);
                return Some(self.refuse(access, role, Refusal::Absent));
            }
            Reading::Broken | Reading::Table(_) => return None,
        };
        // Which rights are lacking needs those of all levels, which the long way collects.
        if !access.passes(role, grant) {
            return None;
        }
        let mut step = Step { entry, table: Some(table), gfn: page.gfn.get(), id, role };
        // The frame first: a fault that is given up for want of it must have set no flag.
        let found = match self.nested_frame(view, &step, grant, access) {
            Ok(found) => found,
            Err(wanted) => return Some(wanted),
        };
        if let Some(fault) =
            self.settle_step(view, roots, &mut step, index << 3, (access, access.write))
        {
            return Some(fault);
        }
        let replaced = self.nested_small(view, id, &step, grant, &found, access);
        count(&self.counters.fixed);
        Some(NestedFault::Fixed { replaced })
    }

    /// The page of the lowest level on an address's way, where each link is what L1's entry says now.
    #[inline(always)]
    pub(super) fn nested_way(&self, view: &View<'_>, top: PageId, gpa: u64) -> Option<PageId> {
        let (mut id, mut page) = (top, self.arena.page(top));
        let role = page.role.get();
        // Indices are taken modulo 512: an address beyond the tables would find the entry of a
        // lower one.
        if gpa >> role.reach() != 0 || role.is_of_pdptes() {
            return None;
        }
        // The same at all levels: whether L1 has such flags is said for all of its tables.
        let accessed = role.accessed();
        for level in (2..=role.level()).rev() {
            let index = index_at(gpa, level);
            let kid = page.kid(index);
            if kid == 0 {
                return None;
            }
            let entry = match view.load_u64(&page.guest.get(), index << 3) {
                Some(entry) => entry,
                None => view.load_u64(&self.table_of(view, id)?, index << 3)?,
            };
            // An entry without A was not used yet, or L1 has cleared it: the flag has to be set,
            // which is the other way's work.
            if entry != page.copy(index) || entry & accessed != accessed {
                return None;
            }
            (id, page) = (kid, self.arena.page(kid));
            // Below a large page of L1's there is no table.
            if page.role.get().is_direct() {
                return None;
            }
        }
        Some(id)
    }

    /// Fixes any other fault, or finds that it is L1's.
    #[inline(never)]
    fn nested_unknown(
        &self,
        view: &View<'_>,
        roots: &NestedRoots,
        top: PageId,
        access: &NestedAccess,
    ) -> NestedFault {
        let mut walk = Walk { steps: [Step::NONE; 5], top: 0, leaf: 0, grant: Grant::ALL };
        let fault = match self.nested_walk(view, top, access, &mut walk) {
            Ok(()) => self.nested_fix(view, roots, &mut walk, access),
            Err(fault) => fault,
        };
        use L1Fault::{Misconfiguration, Npf, Violation};
        // Not where a table has to be brought first: the fault is taken again, and tells then what it has replaced.
        if matches!(fault, NestedFault::L1(Npf { .. } | Violation { .. } | Misconfiguration)) {
            self.drop_way(view, top, access.gpa, End::Goes);
            roots.tell_of_fault(access);
        }
        fault
    }

    #[cold]
    fn refuse(&self, access: &NestedAccess, role: Role, why: Refusal) -> NestedFault {
        count(&self.counters.reflected);
        NestedFault::L1(access.refused(role, why))
    }

    /// The walk of L1's tables. `top`: the page to begin with.
    fn nested_walk(
        &self,
        view: &View<'_>,
        top: PageId,
        access: &NestedAccess,
        walk: &mut Walk,
    ) -> Result<(), NestedFault> {
        let first = self.arena.page(top);
        let (mut role, mut gfn, mut id) = (first.role.get(), first.gfn.get(), top);
        let level = role.level();
        // As in nested_known(): beyond the reach of its tables L1's hardware would find nothing.
        if access.gpa >> role.reach() != 0 {
            return Err(self.refuse(access, role, Refusal::Absent));
        }
        walk.top = level;
        for step in walk.steps.iter_mut().take(level.into()).rev() {
            let index = index_at(access.gpa, role.level());
            let offset = role.nested_offset(index);
            let table = match id {
                0 => self.find_table(view, gfn),
                id => self.table_of(view, id),
            };
            let entry = table.and_then(|table| view.load_u64(&table, offset));
            // The table is not in the tree: it is brought first, and nothing was changed by then.
            let (Some(entry), Some(_)) = (entry, table) else {
                return Err(NestedFault::NeedFrame(NestedFrame {
                    gpa: entry_gpa(gfn, offset),
                    write: false,
                    exec: false,
                    dirties: false,
                    table: Some(access.refused(role, Refusal::Absent)),
                }));
            };
            *step = Step { entry, table, gfn, id, role };
            let grant = match role.read(entry) {
                Reading::Absent => return Err(self.refuse(access, role, Refusal::Absent)),
                Reading::Broken => return Err(self.refuse(access, role, Refusal::Broken)),
                Reading::Leaf(grant) => {
                    walk.grant = walk.grant.and(grant);
                    walk.leaf = role.level();
                    break;
                }
                Reading::Table(grant) => grant,
            };
            walk.grant = walk.grant.and(grant);
            gfn = role.table_frame(entry);
            role = role.nested_below(index, grant);
            id = self.page_below(id, index, entry, gfn, role);
        }
        Ok(())
    }

    /// The page made from table `gfn` in `role`, which L1's entry `index` behind page `id` leads to; or 0.
    fn page_below(&self, id: PageId, index: usize, entry: u64, gfn: Gfn, role: Role) -> PageId {
        if id != 0 {
            let page = self.arena.page(id);
            let kid = page.kid(index);
            if kid != 0 && page.copy(index) == entry {
                return kid;
            }
        }
        self.arena.find(gfn, role).unwrap_or(0)
    }

    /// The second half.
    fn nested_fix(
        &self,
        view: &View<'_>,
        roots: &NestedRoots,
        walk: &mut Walk,
        access: &NestedAccess,
    ) -> NestedFault {
        let last = *walk.step(walk.leaf);
        if !access.passes(last.role, walk.grant) {
            return self.refuse(access, last.role, Refusal::Rights(walk.grant));
        }
        let found = match self.nested_frame(view, &last, walk.grant, access) {
            Ok(found) => found,
            Err(wanted) => return wanted,
        };
        // Counted before anything is changed; the large page's own levels below come on top.
        let missing = (1..walk.top).filter(|&n| n >= walk.leaf && walk.step(n).id == 0).count();
        let needed = missing + usize::from(walk.leaf.saturating_sub(1));
        if self.arena.free_count() < needed {
            return NestedFault::NeedPages(needed);
        }
        if let Some(fault) = self.nested_settle(view, roots, walk, access) {
            return fault;
        }
        let Some((page, mut replaced)) = self.nested_build(view, walk, access.gpa) else {
            return NestedFault::NeedPages(needed);
        };
        let last = *walk.step(walk.leaf);
        if walk.leaf == 1 {
            replaced |= self.nested_small(view, page, &last, walk.grant, &found, access);
        } else {
            let target = Target::of(&last, walk.grant, &found, access);
            match self.nested_put_large(view, page, index_at(access.gpa, walk.leaf), &target) {
                Some(other) => replaced |= other,
                None => return NestedFault::NeedPages(needed),
            }
        }
        count(&self.counters.fixed);
        NestedFault::Fixed { replaced }
    }

    /// The frame that an entry of L1's leads the access to. An error: it must be found first.
    fn nested_frame(
        &self,
        view: &View<'_>,
        last: &Step,
        grant: Grant,
        access: &NestedAccess,
    ) -> Result<Found<'_>, NestedFault> {
        let gfn = last.role.frame_for(last.entry, access.gpa);
        self.frame_at(view, gfn, last.role, access).map_err(|wanted| match wanted {
            NestedFault::NeedFrame(frame) => {
                // Where D is set already, L2 will write without another fault, so the log has to
                // count the page now.
                let dirties = grant.has(Grant::W) && !last.entry & last.role.dirty() == 0;
                NestedFault::NeedFrame(NestedFrame { dirties, ..frame })
            }
            other => other,
        })
    }

    /// Frame `gfn`, which an access in `role` leads to, with rights that are all there.
    #[inline]
    pub(super) fn frame_at(
        &self,
        view: &View<'_>,
        gfn: Gfn,
        role: Role,
        access: &NestedAccess,
    ) -> Result<Found<'_>, NestedFault> {
        // Before the frame is looked for: the page may not even exist in L1's memory.
        if role.leaves_out(gfn) {
            return Err(NestedFault::L1(access.to_left_out()));
        }
        let chunk = self.frames.chunk(gfn);
        let known = chunk
            .map_or(0, |chunk| self.frame(view, gfn, chunk, Direction::write_if(access.write)));
        match chunk.filter(|_| known != 0) {
            Some(chunk) => Ok(Found { gfn, known, chunk }),
            None => Err(NestedFault::NeedFrame(NestedFrame {
                gpa: Gpa(gfn.gpa().0 | access.gpa & 0xfff),
                write: access.write,
                exec: access.fetch,
                dirties: true,
                table: None,
            })),
        }
    }

    /// Sets accessed and dirty bits. `Some`: the fault is taken again, or a table must be writable
    /// first.
    fn nested_settle(
        &self,
        view: &View<'_>,
        roots: &NestedRoots,
        walk: &mut Walk,
        access: &NestedAccess,
    ) -> Option<NestedFault> {
        let (top, leaf) = (walk.top, walk.leaf);
        // From the top down, as the CPU sets them.
        for level in (leaf..=top).rev() {
            let step = walk.steps.get_mut(usize::from(level.wrapping_sub(1)))?;
            let offset = step.role.nested_offset(index_at(access.gpa, level));
            let written = level == leaf && access.write;
            let fault = self.settle_step(view, roots, step, offset, (access, written));
            if fault.is_some() {
                return fault;
            }
        }
        None
    }

    /// Sets accessed and dirty bits in one entry, at `offset` of its table. `Some`: as for all of them.
    #[inline]
    fn settle_step(
        &self,
        view: &View<'_>,
        roots: &NestedRoots,
        step: &mut Step,
        offset: usize,
        access: (&NestedAccess, bool),
    ) -> Option<NestedFault> {
        let (access, written) = access;
        let role = step.role;
        let dirty = if written { role.dirty() } else { 0 };
        let wanted = step.entry | role.accessed() | dirty;
        if wanted == step.entry {
            return None;
        }
        // In ROM no flag is set, and nothing is to be logged.
        // The log entry comes before the flag: in the other order a page could be dirty and in no
        // log, if L2 never gets on.
        let logs = access.logs && dirty & !step.entry != 0;
        let logs = logs && !roots.roms.has(view.generation(), step.gfn);
        // A flag that cannot be set is in no log, so that is tried before.
        let to = if logs { step.entry } else { wanted };
        match self.set_bits(view, step, offset, to) {
            Some(true) if logs => return Some(NestedFault::L1(L1Fault::Unlogged)),
            Some(true) => step.entry = wanted,
            // L1 changed the entry meanwhile. Entering again lets the hardware walk what is there
            // now.
            Some(false) => return Some(NestedFault::Fixed { replaced: false }),
            // In ROM the bits stay as they are.
            None if roots.roms.has(view.generation(), step.gfn) => {}
            None => {
                return Some(NestedFault::NeedFrame(NestedFrame {
                    gpa: entry_gpa(step.gfn, offset),
                    write: true,
                    exec: false,
                    dirties: false,
                    table: Some(access.refused(role, Refusal::Absent)),
                }));
            }
        }
        None
    }

    /// Makes the pages and links down to the level of the leaf. The page of that level, and whether a link
    /// led elsewhere before; `None`: pages ran out.
    fn nested_build(&self, view: &View<'_>, walk: &Walk, gpa: u64) -> Option<(PageId, bool)> {
        let (mut id, mut replaced) = (walk.step(walk.top).id, false);
        for level in (walk.leaf.saturating_add(1)..=walk.top).rev() {
            let (step, below) = (walk.step(level), walk.step(level - 1));
            let index = index_at(gpa, level);
            let page = self.arena.page(id);
            let kid = page.kid(index);
            if kid != 0 && kid == below.id {
                page.set_copy(index, step.entry);
                id = kid;
            } else {
                // Only an entry that stood there can be in a TLB. A new one needs no flush: what is
                // not present is not cached.
                replaced |= page.present.has(index);
                id = self.relink(view, id, index, step, below)?;
            }
        }
        Some((id, replaced))
    }

    /// The page that an entry of L1's lowest level maps, in page `id`, and its neighbours. Whether another stood there.
    fn nested_small(
        &self,
        view: &View<'_>,
        id: PageId,
        last: &Step,
        grant: Grant,
        found: &Found<'_>,
        access: &NestedAccess,
    ) -> bool {
        let index = index_at(access.gpa, 1);
        let replaced = self.nested_put(id, index, &Target::of(last, grant, found, access));
        if let Some(table) = &last.table {
            self.nested_ahead(view, id, index, table);
        }
        replaced
    }

    /// A page of 4 KiB at `index` of a page of the lowest level. Whether another stood there.
    pub(super) fn nested_put(&self, id: PageId, index: usize, target: &Target<'_>) -> bool {
        let page = self.arena.page(id);
        let replaced = page.present.has(index) && frame_of(page, index) != target.gfn;
        let spte = self.leaf(target.known, target.grant) | self.format.accessed();
        self.put_leaf(id, index, target.gfn, target.chunk, spte, target.copy);
        replaced
    }

    /// The neighbours of entry `index` of a page of the lowest level, as far as L2 has used them before.
    fn nested_ahead(&self, view: &View<'_>, id: PageId, index: usize, table: &GuestPage) {
        let page = self.arena.page(id);
        let (role, first) = (page.role.get(), index & !(GROUP - 1));
        let (mut missing, mut made) = (missing_around(page, index), 0);
        while missing != 0 {
            let index = first + missing.trailing_zeros() as usize;
            missing &= missing - 1;
            // Read once and kept as the copy, for L1 may write meanwhile.
            let Some(entry) = view.load_u64(table, index << 3) else { return };
            let Reading::Leaf(grant) = role.read(entry) else { continue };
            let mut grant = role.grant().and(grant);
            if entry & role.dirty() != role.dirty() {
                grant = grant.without(Grant::W);
            }
            // An entry that allows nothing is not there, in EPT.
            // Without A, nothing is made ahead: L1 would take the page for unused while L2 uses it.
            let used = entry & role.accessed() == role.accessed();
            let gfn = role.leaf_frame(entry, index);
            if used && (grant.has(Grant::U) || grant.has(Grant::X)) && !role.leaves_out(gfn) {
                made += u32::from(self.put_ahead(view, id, index, gfn, grant, entry));
            }
        }
        self.count_ahead(made);
    }
}
