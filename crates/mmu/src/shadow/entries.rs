//! Making and dropping entries: links to other shadow pages, and leaves.
//!
//! Whatever makes or drops an entry here keeps its lists: the leaves of each guest frame, the parents
//! of each page, and which links lead to pages that may differ from the guest's tables.

use core::sync::atomic::Ordering;

use x86::Gfn;

use super::State;
use super::arena::{MOST_PARENTS, Node, PageId, ShadowPage, Standing, index_of, node, page_of};
use super::counters::{add, count};
use super::frames::Chunk;
use super::tables::frame_of;
use crate::role::Role;

impl State {
    /// Links page `kid` below entry `index` of page `id`, which is empty. `copy`: the guest's entry.
    pub(super) fn link(&self, id: PageId, index: usize, kid: PageId, copy: u64) {
        let (page, below) = (self.arena.page(id), self.arena.page(kid));
        debug_assert!(!page.present.has(index) && kid != 0);
        // As a paging-structure cache that is full: the link is made again by a fault.
        if below.parent_count.get() >= MOST_PARENTS {
            self.drop_node(below.parents.get());
        }
        below.parent_count.set(below.parent_count.get() + 1);
        let node = node(id, index);
        self.arena.push(page, node, below.parents.replace(node));
        page.set_kid(index, kid);
        page.set_copy(index, copy);
        page.present.set(index);
        page.linked.set(index);
        // Or a flush that goes by the bits of the upper levels would pass the page by.
        if below.is_doubtful() {
            self.doubt_link(page, id, index);
        }
        // Last, and with release order: a CPU that follows the link finds the page as it is kept here.
        let spte = below.hpa().0 | self.format.table_bits();
        page.spte(index).store(spte, Ordering::Release);
    }

    /// Makes entry `index` of page `id`, of the lowest level, a leaf for frame `gfn`, which lies in
    /// `chunk`. A leaf for the same frame is replaced.
    #[inline]
    pub(super) fn put_leaf(
        &self,
        id: PageId,
        index: usize,
        gfn: Gfn,
        chunk: &Chunk,
        spte: u64,
        copy: u64,
    ) {
        let page = self.arena.page(id);
        if page.present.has(index) && self.is_for(page, id, index, gfn) {
            page.set_copy(index, copy);
            // Release, though the CPU is the only other reader: what the lists say stands before
            // the entry.
            page.spte(index).store(spte, Ordering::Release);
        } else {
            self.put_new(id, index, gfn, chunk, spte, copy);
        }
    }

    /// Puts an entry where nothing is yet.
    #[inline]
    pub(super) fn put_new(
        &self,
        id: PageId,
        index: usize,
        gfn: Gfn,
        chunk: &Chunk,
        spte: u64,
        copy: u64,
    ) {
        let (page, node) = (self.arena.page(id), node(id, index));
        self.arena.push(page, node, chunk.replace_head(gfn, node));
        page.present.set(index);
        page.set_copy(index, copy);
        page.spte(index).store(spte, Ordering::Release);
    }

    /// Puts an entry at the second level, for the large page that begins with frame `gfn`.
    pub(super) fn put_large_leaf(
        &self,
        id: PageId,
        index: usize,
        gfn: Gfn,
        chunk: &Chunk,
        spte: u64,
        copy: u64,
    ) {
        let page = self.arena.page(id);
        // A leaf for the same frames keeps its place in the list; only its rights change.
        if !page.present.has(index) || !self.is_for(page, id, index, gfn) {
            let node = node(id, index);
            self.arena.push(page, node, chunk.large.replace(node));
            page.present.set(index);
        }
        page.set_copy(index, copy);
        page.spte(index).store(spte, Ordering::Release);
    }

    /// Whether an entry that is there is a leaf for `gfn`. If not, it is dropped.
    #[inline(never)]
    fn is_for(&self, page: &ShadowPage, id: PageId, index: usize, gfn: Gfn) -> bool {
        let same = !page.is_link(index) && frame_of(page, index) == gfn;
        if !same {
            self.drop_entry(id, index);
        }
        same
    }

    /// Drops entry `index` of page `id`, if it is there.
    #[inline]
    pub(super) fn drop_entry(&self, id: PageId, index: usize) {
        let page = self.arena.page(id);
        if page.present.has(index) {
            self.drop_present(page, index);
        }
    }

    pub(super) fn drop_present(&self, page: &ShadowPage, index: usize) {
        // The hardware's entry first: from here on no CPU that walks anew finds what the lists are about to forget.
        page.spte(index).store(0, Ordering::Release);
        // A link and a leaf share the node's place, so what kind it was decides which list ends
        // here.
        page.present.clear(index);
        let next = self.arena.unlink(page, index);
        let level = page.role.get().level();
        if level > 1 && page.is_link(index) {
            page.linked.clear(index);
            page.below.clear(index);
            let kid = self.arena.page(page.kid(index));
            kid.parent_count.set(kid.parent_count.get().saturating_sub(1));
            if let Some(next) = next {
                kid.parents.set(next);
            }
            page.set_kid(index, 0);
        } else if let Some(next) = next {
            let gfn = frame_of(page, index);
            match self.frames.chunk(gfn) {
                // Two kinds of lists: a withdrawal of one frame has to find a large leaf that
                // begins with another.
                Some(chunk) if level == 1 => chunk.set_head(gfn, next),
                Some(chunk) => chunk.large.set(next),
                // A leaf is made only where there is a chunk. Without one the list is lost, and no
                // memory with it: the entry is gone already.
                None => debug_assert!(false, "a leaf without a chunk"),
            }
        }
    }

    /// Drops the entry of a node.
    pub(super) fn drop_node(&self, node: Node) {
        self.drop_entry(page_of(node), index_of(node));
    }

    /// Drops all entries of a page.
    pub(super) fn clear(&self, id: PageId) {
        let page = self.arena.page(id);
        // By words, since a page is mostly empty or mostly full.
        for n in 0..8 {
            let mut rest = page.present.word(n);
            while rest != 0 {
                self.drop_present(page, n << 6 | rest.trailing_zeros() as usize);
                rest &= rest.wrapping_sub(1);
            }
        }
    }

    /// A page for a frame in a role, made if there is none. `None`: no page is free, of which the caller has seen to it
    /// before it changed anything, with the lock held since: what it has replaced by then would be told to nobody.
    pub(super) fn obtain(&self, gfn: Gfn, role: Role) -> Option<PageId> {
        // Looked for first: another vCPU may have made the page while this one reserved.
        if let Some(id) = self.arena.find(gfn, role) {
            return Some(id);
        }
        debug_assert!(self.arena.free_count() != 0, "a page that was not counted");
        let id = self.arena.create(gfn, role)?;
        count(&self.counters.created);
        add(&self.counters.pages, 1);
        if role.is_direct() {
            return Some(id);
        }
        add(&self.counters.unsync, 1);
        Some(id)
    }

    /// Takes a page out of use that no vCPU refers to. It can be used again after a flush.
    pub(super) fn zap(&self, id: PageId) {
        self.clear(id);
        let page = self.arena.page(id);
        while page.parents.get() != 0 {
            // A link that is left would lead to whatever the page becomes next.
            self.drop_node(page.parents.get());
        }
        let (gfn, standing) = (page.gfn.get(), page.standing.get());
        let direct = page.role.get().is_direct();
        self.arena.retire(id);
        count(&self.counters.zapped);
        add(&self.counters.pages, -1);
        // A page that was not in doubt relied on the protection. With the last of them gone it
        // would only cost a fault.
        if standing == Standing::Unsync {
            add(&self.counters.unsync, -1);
        } else if !direct {
            // The protection may go only with the last page that may rely on it, in another role.
            let mut others = false;
            self.arena.for_table(gfn, |_, _| others = true);
            if let Some(chunk) = self.frames.chunk(gfn)
                && !others
            {
                chunk.set_protected(gfn, false);
            }
        }
    }

    /// Tells the pages above that page `id` may differ from the guest's tables from now on.
    pub(super) fn doubt(&self, id: PageId) {
        let mut node = self.arena.page(id).parents.get();
        while node != 0 {
            let above = page_of(node);
            self.doubt_link(self.arena.page(above), above, index_of(node));
            node = self.arena.next(node);
        }
    }

    /// A link leads to a doubtful page. As deep as there are levels at most: a page that was
    /// doubtful before has told so.
    fn doubt_link(&self, page: &ShadowPage, id: PageId, index: usize) {
        if !page.below.has(index) {
            let known = page.is_doubtful();
            page.below.set(index);
            if !known {
                self.doubt(id);
            }
        }
    }

    /// The guest may write the table in a frame from now on: flushes look at it.
    pub(super) fn unsync_table(&self, gfn: Gfn) {
        let Some(chunk) = self.frames.chunk(gfn).filter(|chunk| chunk.is_protected(gfn)) else {
            return;
        };
        chunk.set_protected(gfn, false);
        count(&self.counters.unsynced);
        self.arena.for_table(gfn, |id, page| {
            if page.standing.get() == Standing::Unsync {
                return;
            }
            // Asked before the change: what was doubtful has told the pages above, and they need
            // not be told again.
            let known = page.is_doubtful();
            page.standing.set(Standing::Unsync);
            add(&self.counters.unsync, 1);
            page.calm.set(0);
            // Protecting it has cost a fault for nothing. Next time it must have been still for twice as long.
            page.patience.set((page.patience.get() + 1).min(MOST_PATIENCE));
            if !known {
                self.doubt(id);
            }
        });
    }

    /// Does what [`super::ShadowGuard::note_writes`] tells.
    pub(super) fn unsync_all(&self) {
        // All numbers, since a page in use does not tell whether its table is protected.
        for id in 0..self.arena.numbers() {
            if let Some(page) = self.arena.used_page(id)
                && !page.role.get().is_direct()
            {
                self.unsync_table(page.gfn.get());
            }
        }
    }
}

/// A table that was protected in vain so often is left alone 2^6 times as long as at first.
const MOST_PATIENCE: u8 = 6;
