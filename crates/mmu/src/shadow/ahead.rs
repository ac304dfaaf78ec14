//! Entries made ahead of their use: neighbours of the one that faulted, where the guest's table and the
//! VM's tree have them ready. A fault costs as much as some dozens of these.

use core::sync::atomic::Ordering;

use x86::{Direction, Gfn};

use super::State;
use super::arena::{PageId, ShadowPage, index_of, page_of};
use super::tables::load;
use crate::grant::Grant;
use crate::source::{A, D, P};
use crate::table::{GuestPage, View};
use crate::tdp::Marks;

/// Entries of an aligned group, of which one faulted.
pub(super) const GROUP: usize = 8;

/// Entries of the group around `index` that are not there, as bits from the group's first on.
#[inline]
pub(super) fn missing_around(page: &ShadowPage, index: usize) -> u64 {
    // Eight entries of 8 bytes are one line of the guest's table, which the fault has just read.
    let first = index & !(GROUP - 1);
    !page.present.word(first >> 6) >> (first & 63) & ((1 << GROUP) - 1)
}

impl State {
    /// The neighbours of entry `index` of a page of the lowest level, as far as the guest has used
    /// them before. Their accessed bits are left to the hardware, the guest's are set already.
    #[inline]
    pub(super) fn map_ahead(&self, view: &View<'_>, id: PageId, index: usize, table: &GuestPage) {
        let page = self.arena.page(id);
        let missing = missing_around(page, index);
        if missing != 0 {
            self.map_missing(view, id, index & !(GROUP - 1), missing, table);
        }
    }

    #[inline(never)]
    fn map_missing(
        &self,
        view: &View<'_>,
        id: PageId,
        first: usize,
        mut missing: u64,
        table: &GuestPage,
    ) {
        let role = self.arena.page(id).role.get();
        let (reserved, mut made) = (role.reserved_in_leaf(), 0);
        while missing != 0 {
            let index = first + missing.trailing_zeros() as usize;
            missing &= missing - 1;
            // Read once, and kept as the copy: a second read could differ, for the guest writes
            // beside us.
            let Some(entry) = load(view, table, role, role.offset(index)) else { return };
            // Without A the entry has to fault: the CPU would set A in ours, and nobody in the
            // guest's.
            if entry & (P | A) != P | A || entry & reserved != 0 {
                continue;
            }
            let mut grant = role.grant().and(Grant::of(entry));
            // A write through our entry would set D in ours alone, so the first write has to fault.
            if entry & D == 0 {
                grant = grant.without(Grant::W);
            }
            let gfn = role.leaf_frame(entry, index);
            made += u32::from(self.put_ahead(view, id, index, gfn, grant, entry));
        }
        self.count_ahead(made);
    }

    /// Maps ahead around `index` in a page of consecutive frames.
    pub(super) fn map_frames_ahead(&self, view: &View<'_>, id: PageId, index: usize, grant: Grant) {
        let page = self.arena.page(id);
        let (mut missing, first) = (missing_around(page, index), index & !(GROUP - 1));
        // What was granted for one access alone is not granted for the neighbours.
        let role = page.role.get();
        let (grant, mut made) = (grant.and(role.grant()), 0);
        while missing != 0 {
            let index = first + missing.trailing_zeros() as usize;
            missing &= missing - 1;
            let gfn = Gfn(page.gfn.get().0.wrapping_add(index as u64));
            if role.leaves_out(gfn) {
                continue;
            }
            // No copy: pages of consecutive frames are made from no entry and never compared.
            made += u32::from(self.put_ahead(view, id, index, gfn, grant, 0));
        }
        self.count_ahead(made);
    }

    /// One of them, where nothing is yet. Whether it was made.
    #[inline]
    pub(super) fn put_ahead(
        &self,
        view: &View<'_>,
        id: PageId,
        index: usize,
        gfn: Gfn,
        grant: Grant,
        copy: u64,
    ) -> bool {
        let Some(chunk) = self.frames.chunk(gfn) else { return false };
        // Not asked for writing: a frame that is read-only in the tree is worth mapping too, and
        // its first write faults.
        let known = self.frame(view, gfn, chunk, Direction::Read);
        if known == 0 {
            return false;
        }
        // The first write to a protected table has to fault, or nobody would learn of it.
        let grant = if chunk.is_protected(gfn) { grant.without(Grant::W) } else { grant };
        self.put_new(id, index, gfn, chunk, self.leaf(known, grant), copy);
        true
    }

    /// Whether the hardware has used any of the frames' leaves since that was last forgotten.
    pub(super) fn is_young(&self, head: u32, marks: Marks) -> bool {
        let (mut node, mut young) = (head, false);
        while node != 0 {
            // Read before anything is dropped, which would take the node out of the list.
            let (page, next) = (self.arena.page(page_of(node)), self.arena.next(node));
            let spte = page.spte(index_of(node));
            if page.role.get().is_blind() {
                // The hardware notes nothing there. What is dropped is made again when it is used.
                young = true;
                if marks == Marks::Cleared {
                    self.drop_node(node);
                }
            } else if spte.load(Ordering::Relaxed) & self.format.accessed() != 0 {
                young = true;
                if marks == Marks::Cleared {
                    // No flush follows. A TLB that still has the translation only makes the page
                    // look older than it is.
                    spte.fetch_and(!self.format.accessed(), Ordering::Relaxed);
                }
            }
            node = next;
        }
        young
    }
}
