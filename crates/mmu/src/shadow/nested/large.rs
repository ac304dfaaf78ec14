//! Large pages of L1's tables for L2, and an L2 without any tables of L1's: its memory is one page as large as can be.

use super::super::State;
use super::super::arena::PageId;
use super::super::counters::count;
use super::super::tables::frame_of;
use super::fault::Target;
use super::{NestedFault, NestedFrame};
use crate::grant::Grant;
use crate::nested::NestedAccess;
use crate::source::{PS, index_at};
use crate::table::View;
use crate::tdp::LEVEL_2M;
use x86::{Gfn, Gpa};

impl State {
    /// A fault of an L2 whose physical addresses are L1's. `top`: the root, which is made from no table.
    #[inline(never)]
    pub(super) fn nested_flat(
        &self,
        view: &View<'_>,
        top: PageId,
        access: &NestedAccess,
    ) -> NestedFault {
        let role = self.arena.page(top).role.get();
        let gfn = Gpa(access.gpa).gfn();
        if access.gpa >> role.reach() != 0 {
            // Nothing of the hardware's leads there.
            return NestedFault::NeedFrame(NestedFrame {
                gpa: Gpa(access.gpa),
                write: access.write,
                exec: access.fetch,
                dirties: false,
                table: None,
            });
        }
        let found = match self.frame_at(view, gfn, role, access) {
            Ok(found) => found,
            Err(wanted) => return wanted,
        };
        // One for each level below, counted first: a fault that is given up half way would be for
        // nothing.
        let needed = usize::from(role.level().saturating_sub(1));
        if self.arena.free_count() < needed {
            return NestedFault::NeedPages(needed);
        }
        let (known, chunk) = (found.known, found.chunk);
        let target = Target { gfn, known, chunk, grant: Grant::ALL, copy: 0 };
        match self.nested_put_large(view, top, index_at(access.gpa, role.level()), &target) {
            Some(replaced) => {
                count(&self.counters.fixed);
                NestedFault::Fixed { replaced }
            }
            None => NestedFault::NeedPages(needed),
        }
    }

    /// A large page of L1's at entry `index` of page `id`, of level 2 or 3: large here too where the frames
    /// allow, else a page of small ones. Whether something else stood there; `None`: pages ran out.
    pub(super) fn nested_put_large(
        &self,
        view: &View<'_>,
        mut id: PageId,
        mut index: usize,
        target: &Target<'_>,
    ) -> Option<bool> {
        // Where large pages are not fetched from, a fetch makes them small; and what L2 may fetch from is
        // small from the start.
        let fetched = self.format.splits_at_fetch() && target.grant.has(Grant::X);
        let whole = target.known & PS != 0 && !fetched;
        let mut replaced = false;
        loop {
            let page = self.arena.page(id);
            let role = page.role.get();
            let level = role.level();
            if level <= 1 {
                replaced |= self.nested_put(id, index, target);
                self.map_frames_ahead(view, id, index, target.grant);
                return Some(replaced);
            }
            let shift = 9 * (u32::from(level) - 1);
            let base = Gfn(target.gfn.0 >> shift << shift);
            if level == LEVEL_2M && whole && !role.leaves_out_of_large(base) {
                // The same large page with other rights is no other translation: what a TLB has of
                // it is as stale as it may be.
                let same = !page.is_link(index) && frame_of(page, index) == base;
                replaced |= page.present.has(index) && !same;
                let within = (target.gfn.0 & 511) << 12;
                let leaf = self.leaf(target.known, target.grant) & !within;
                let spte = leaf | self.format.accessed() | PS;
                self.put_large_leaf(id, index, base, target.chunk, spte, target.copy);
                return Some(replaced);
            }
            // The rights are in the role: the same frames under other rights are other pages.
            let wanted = role.direct_below(target.grant);
            let kid = page.kid(index);
            let fits = page.is_link(index) && {
                let kid = self.arena.page(kid);
                (kid.gfn.get(), kid.role.get()) == (base, wanted)
            };
            if fits {
                page.set_copy(index, target.copy);
                id = kid;
            } else {
                // First what may be refused: nothing has gone then of which the caller does not hear.
                let kid = self.obtain(base, wanted)?;
                replaced |= page.present.has(index);
                self.drop_entry(id, index);
                self.link(id, index, kid, target.copy);
                id = kid;
            }
            index = index_at(target.gfn.0 << 12, level - 1);
        }
    }
}
