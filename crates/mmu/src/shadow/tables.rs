//! The guest's tables behind shadow pages: where they lie, and what the VM's tree says of a frame.

use x86::{Direction, Gfn, Gpa};

use super::State;
use super::arena::{PageId, ShadowPage};
use super::frames::Chunk;
use crate::grant::Grant;
use crate::role::{Role, Source};
use crate::source::{P, PS, W};
use crate::table::{GuestPage, View};
use crate::tdp::{LEVEL_2M, Leaf, lookup};

/// The frame that the entry `index` of a page maps, if it is a leaf.
#[inline]
pub(super) fn frame_of(page: &ShadowPage, index: usize) -> Gfn {
    let role = page.role.get();
    match role.source() {
        Source::Frames => {
            let shift = 9 * (u32::from(role.level()).saturating_sub(1));
            Gfn(page.gfn.get().0.wrapping_add((index as u64) << shift))
        }
        _ => role.leaf_frame(page.copy(index), index),
    }
}

/// The guest's entry at a byte offset of its table.
#[inline]
pub(super) fn load(view: &View<'_>, table: &GuestPage, role: Role, offset: usize) -> Option<u64> {
    // A read of 8 bytes would take the neighbour's entry along.
    match role.source() {
        Source::Narrow => view.load_u32(table, offset).map(u64::from),
        _ => view.load_u64(table, offset),
    }
}

/// Replaces a guest entry, as the hardware does to set bits. `None`: the table cannot be written.
pub(super) fn update(
    view: &View<'_>,
    table: &GuestPage,
    role: Role,
    offset: usize,
    old: u64,
    new: u64,
) -> Option<bool> {
    match role.source() {
        Source::Narrow => view.swap_u32(table, offset, old as u32, new as u32),
        _ => view.swap_u64(table, offset, old, new),
    }
}

impl State {
    /// The guest table's page behind a shadow page. `None`: not in the tree now, or nothing could
    /// be noted about it.
    #[inline]
    pub(super) fn table_of(&self, view: &View<'_>, id: PageId) -> Option<GuestPage> {
        let page = self.arena.page(id);
        let table = page.guest.get();
        // Of this generation: nothing was withdrawn since it was found.
        if view.is_current(&table) {
            return Some(table);
        }
        // Another generation: the frame may have gone to somebody else. The tree is asked anew.
        let table = self.find_table(view, page.gfn.get())?;
        page.guest.set(table);
        Some(table)
    }

    /// The guest table's page in a frame without a shadow page.
    #[inline(never)]
    pub(super) fn find_table(&self, view: &View<'_>, gfn: Gfn) -> Option<GuestPage> {
        let leaf = lookup(view, gfn).filter(|leaf| leaf.direct)?;
        // Without a chunk nothing could be noted of the table: not its protection, nor that it was
        // withdrawn.
        self.frames.chunk(gfn)?;
        Some(view.page(leaf.pfn.hpa(), self.may_write(&leaf)))
    }
}

/// What of a frame's known entry is not the hardware's: see [`State::leaf`].
const NOT_OF_LEAF: u64 = P | W | PS;

impl State {
    /// What the tree says of a frame that lies in `chunk`: see [`Chunk::known`]. 0: not there, or not
    /// to be written though it is wanted for that.
    #[inline]
    pub(super) fn frame(
        &self,
        view: &View<'_>,
        gfn: Gfn,
        chunk: &Chunk,
        direction: Direction,
    ) -> u64 {
        let wanted = match direction {
            Direction::Read => P,
            Direction::Write => P | W,
        };
        let known = chunk.known(gfn);
        if known & wanted == wanted { known } else { self.ask(view, gfn, chunk, wanted) }
    }

    #[inline(never)]
    fn ask(&self, view: &View<'_>, gfn: Gfn, chunk: &Chunk, wanted: u64) -> u64 {
        let Some(leaf) = lookup(view, gfn) else { return 0 };
        // What was learnt serves writes only if it was found writable; else the tree is asked
        // again.
        let mut entry = leaf.pfn.hpa().0 | P;
        entry |= if self.may_write(&leaf) { W } else { 0 };
        entry |= if leaf.level >= LEVEL_2M { PS } else { 0 };
        entry |= self.format.memory(leaf.direct);
        // Learnt even if it does not serve this access: the next read of the frame finds it.
        chunk.learn(gfn, entry);
        if entry & wanted == wanted { entry } else { 0 }
    }

    /// Whether a frame may be written without the tree's knowledge. A log that lives by dirty bits hears
    /// nothing of writes through leaves that are not the tree's own.
    #[inline]
    fn may_write(&self, leaf: &Leaf) -> bool {
        leaf.writable && (leaf.dirty || !self.format.logs())
    }

    /// The hardware's entry for a frame, small and not accessed. `known`: what the tree says of it.
    #[inline]
    pub(super) fn leaf(&self, known: u64, grant: Grant) -> u64 {
        known & !NOT_OF_LEAF | self.format.granted(grant.within_writable(known))
    }
}

/// Where an entry of a table lies.
pub(super) fn entry_gpa(gfn: Gfn, offset: usize) -> Gpa {
    Gpa(gfn.gpa().0 | (offset as u64 & 0xfff))
}
