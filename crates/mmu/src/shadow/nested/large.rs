//! Large pages of L1's tables for L2.

use super::super::State;
use super::super::arena::PageId;
use super::super::tables::frame_of;
use super::fault::Target;
use crate::grant::Grant;
use crate::source::{PS, index_at};
use crate::table::View;
use crate::tdp::LEVEL_2M;
use x86::Gfn;

impl State {
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
            if level == LEVEL_2M && whole {
                let same = !page.is_link(index) && frame_of(page, index) == base;
                replaced |= page.present.has(index) && !same;
                let within = (target.gfn.0 & 511) << 12;
                let leaf = self.leaf(target.known, target.grant) & !within;
                let spte = leaf | self.format.accessed() | PS;
                self.put_large_leaf(id, index, base, target.chunk, spte, target.copy);
                return Some(replaced);
            }
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
                replaced |= page.present.has(index);
                self.drop_entry(id, index);
                let kid = self.obtain(base, wanted)?;
                self.link(id, index, kid, target.copy);
                id = kid;
            }
            index = index_at(target.gfn.0 << 12, level - 1);
        }
    }
}
