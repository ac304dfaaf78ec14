//! Entries made ahead of their use: neighbours of the one that faulted, where the guest's table and the
//! VM's tree have them ready. A fault costs as much as some dozens of these.

use core::sync::atomic::Ordering;

use x86::Gfn;

use super::State;
use super::arena::PageId;
use super::guest::{A, D, P, load};
use super::role::Grant;
use crate::format::PteFormat;
use crate::table::{GuestPage, View};
use crate::tdp::lookup;

/// Entries of an aligned group, of which one faulted.
const GROUP: usize = 8;

impl State {
    /// The neighbours of entry `index` of a page of the lowest level, as far as the guest has used
    /// them before. Their accessed bits are left to the hardware, the guest's are set already.
    pub(super) fn map_ahead<F: PteFormat>(
        &self,
        view: &View<'_>,
        id: PageId,
        index: usize,
        table: &GuestPage,
    ) {
        let (page, first) = (self.arena.page(id), index & !(GROUP - 1) & 511);
        let (role, mut made) = (page.role.get(), 0);
        let reserved = role.reserved(true);
        let taken = page.present.word(first >> 6) >> (first & 63);
        for n in 0..GROUP {
            if taken & (1 << n) != 0 {
                continue;
            }
            let index = first + n;
            let Some(entry) = load(view, table, role, role.offset(index)) else { return };
            if entry & (P | A) != P | A || entry & reserved != 0 {
                continue;
            }
            let mut grant = role.grant().and(Grant::of(entry));
            if entry & D == 0 {
                grant = grant.without(Grant::W);
            }
            made += u32::from(self.put_ahead::<F>(
                view,
                id,
                index,
                role.leaf_frame(entry, index),
                grant,
                entry,
            ));
        }
        self.count_ahead(made);
    }

    /// The same for a page of consecutive frames.
    pub(super) fn map_frames_ahead<F: PteFormat>(
        &self,
        view: &View<'_>,
        id: PageId,
        index: usize,
        grant: Grant,
    ) {
        let (page, first) = (self.arena.page(id), index & !(GROUP - 1) & 511);
        // What was granted for one access alone is not granted for the neighbours.
        let (grant, mut made) = (grant.and(page.role.get().grant()), 0);
        let taken = page.present.word(first >> 6) >> (first & 63);
        for n in 0..GROUP {
            if taken & (1 << n) == 0 {
                let index = first + n;
                let gfn = Gfn(page.gfn.get().0.wrapping_add(index as u64));
                made += u32::from(self.put_ahead::<F>(view, id, index, gfn, grant, 0));
            }
        }
        self.count_ahead(made);
    }

    /// One of them. Whether it was made.
    #[inline]
    fn put_ahead<F: PteFormat>(
        &self,
        view: &View<'_>,
        id: PageId,
        index: usize,
        gfn: Gfn,
        grant: Grant,
        copy: u64,
    ) -> bool {
        let (Some(frame), Some(chunk)) = (lookup::<F>(view, gfn), self.frames.chunk(gfn)) else {
            return false;
        };
        let grant = if chunk.is_protected(gfn) { grant.without(Grant::W) } else { grant };
        let spte = self.leaf(&frame, frame.pfn.hpa().0, grant);
        self.put_leaf(id, index, gfn, chunk, spte, copy);
        true
    }

    /// Whether the hardware has used any of the frames' leaves since that was last forgotten.
    pub(super) fn is_young(&self, head: u32, clear: bool) -> bool {
        let (mut node, mut young) = (head, false);
        while node != 0 {
            let page = self.arena.page(super::arena::page_of(node));
            let spte = page.spte(super::arena::index_of(node));
            if spte.load(Ordering::Relaxed) & A != 0 {
                young = true;
                if clear {
                    spte.fetch_and(!A, Ordering::Relaxed);
                }
            }
            node = self.arena.next(node);
        }
        young
    }
}
