//! The host takes frames back, or write access to them: the leaves of these frames follow.
//!
//! Called after the tree's own leaves have changed and before the flush. Who makes a leaf looks at the
//! tree with the shadow lock held, so nothing comes back.

use core::sync::atomic::Ordering;

use x86::Gfn;

use super::State;
use super::arena::{Node, PageId, index_of, page_of};
use super::frames::Chunk;
use crate::source::W;
use crate::tdp::Marks;

/// Pages looked at with the lock held once: dropping one costs up to 512 entries and as many parents.
const STRETCH: PageId = 64;

impl State {
    /// Drops all leaves of the frames `first..end`, and stops relying on what tables lie in them.
    pub(super) fn withdraw(&self, first: Gfn, end: Gfn) {
        self.frames.for_chunks(first, end, |chunk, from, to| {
            chunk.unlearn(from, to);
            // A large leaf goes whole: what the range leaves of it is made again, small or large,
            // by faults.
            while chunk.large.get() != 0 {
                self.drop_node(chunk.large.get());
            }
            for gfn in (from..to).map(Gfn) {
                // Most frames of a range have no leaf and hold no table.
                if chunk.is_blank(gfn) {
                    continue;
                }
                while chunk.head(gfn) != 0 {
                    self.drop_node(chunk.head(gfn));
                }
                // What comes in the frame's place may say something else.
                self.unsync_table(gfn);
            }
        });
    }

    /// Takes write access from all leaves of the frames `first..end`. Whether any had it.
    pub(super) fn write_protect(&self, first: Gfn, end: Gfn) -> bool {
        let mut any = false;
        self.frames.for_chunks(first, end, |chunk, from, to| {
            // What was learnt says that the frame may be written, and the next leaf would go by it.
            chunk.unlearn(from, to);
            any |= self.protect_list(chunk.large.get());
            for gfn in (from..to).map(Gfn) {
                any |= self.protect_list(chunk.head(gfn));
            }
        });
        any
    }

    /// Takes write access from the leaves of a list. Whether any had it.
    pub(super) fn protect_list(&self, head: Node) -> bool {
        let (mut node, mut any) = (head, false);
        while node != 0 {
            let spte = self.arena.page(page_of(node)).spte(index_of(node));
            // The CPU may set A and D at the same time, so W goes by one locked operation.
            any |= spte.fetch_and(!W, Ordering::AcqRel) & W != 0;
            node = self.arena.next(node);
        }
        any
    }

    /// Whether leaves of the frames `first..end` were used.
    pub(super) fn age(&self, first: Gfn, end: Gfn, marks: Marks) -> bool {
        let mut young = false;
        let mut each = |chunk: &Chunk, from: u64, to: u64| {
            young |= self.is_young(chunk.large.get(), marks);
            for gfn in (from..to).map(Gfn) {
                young |= self.is_young(chunk.head(gfn), marks);
            }
        };
        self.frames.for_chunks(first, end, &mut each);
        young
    }

    /// A slot is gone, its leaves are withdrawn: so go the pages made from tables in it, of [`STRETCH`] pages
    /// from `from` on. Where to go on; `None`: that was all.
    pub(super) fn forget(&self, first: Gfn, end: Gfn, from: PageId) -> Option<PageId> {
        let numbers = self.arena.numbers();
        let till = from.saturating_add(STRETCH).min(numbers);
        for id in from..till {
            let Some(page) = self.arena.used_page(id) else { continue };
            let gfn = page.gfn.get();
            if gfn < first || gfn >= end {
                continue;
            }
            // A root's page is what a CPU's CR3 may hold, so it stays, and is emptied.
            if page.roots.get() == 0 {
                self.zap(id);
            } else {
                self.unsync_table(gfn);
                self.clear(id);
            }
        }
        (till < numbers).then_some(till)
    }
}
