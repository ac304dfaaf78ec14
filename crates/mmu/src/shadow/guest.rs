//! The guest's tables as a shadow page sees them: which entry stands behind which, what an entry means
//! in a role, and where the table lies.
//!
//! The same rules as in [`crate::walk`], told from a role instead of the registers.

use x86::{Gfn, Gpa};

use super::State;
use super::arena::{PageId, ShadowPage};
use super::frames::Chunk;
use super::role::{Grant, Role};
use crate::format::ADDRESS;
use crate::table::{GuestPage, View};
use crate::tdp::{LEVEL_2M, lookup};

pub(super) const P: u64 = 1 << 0;
pub(super) const W: u64 = 1 << 1;
pub(super) const U: u64 = 1 << 2;
pub(super) const A: u64 = 1 << 5;
pub(super) const D: u64 = 1 << 6;
pub(super) const PS: u64 = 1 << 7;
pub(super) const NX: u64 = 1 << 63;

/// The index of the shadow entry for `va` in a page of `level`.
#[inline]
pub(super) fn index_at(va: u64, level: u8) -> usize {
    (va >> (3 + 9 * u32::from(level)) & 511) as usize
}

/// What a role says about guest entries.
impl Role {
    /// Byte offset within the guest's table of the entry behind the shadow entry `index`.
    #[inline]
    pub(super) fn offset(self, index: usize) -> usize {
        if !self.is_narrow() {
            index << 3
        } else if self.level() == 1 {
            (self.quadrant() << 9 | index) << 2
        } else {
            // One entry of 4 MiB stands behind two shadow entries of 2 MiB.
            (self.quadrant() << 8 | index >> 1) << 2
        }
    }

    /// Whether a present guest entry at this role's level ends the walk.
    #[inline]
    pub(super) fn is_leaf(self, entry: u64) -> bool {
        let level = self.level();
        level == 1
            || (entry & PS != 0 && level <= 3 && (!self.is_narrow() || self.has_large_narrow()))
    }

    /// Bits of a present guest entry at this role's level that must be 0 (SDM vol. 3A §4.3 to
    /// §4.5, APM vol. 2 §5.3).
    #[inline]
    pub(super) fn reserved(self, leaf: bool) -> u64 {
        let level = self.level();
        if self.is_narrow() {
            return if leaf && level == 2 { 0x003f_e000 & !self.pse36() } else { 0 };
        }
        let mut bits = self.always_reserved();
        match level {
            1 => {}
            2 => bits |= if leaf { 0x001f_e000 } else { 0 },
            3 if leaf => bits |= 0x3fff_e000 | if self.has_gbpages() { 0 } else { PS },
            3 => bits |= if self.is_amd() { 1 << 8 } else { 0 },
            _ => bits |= PS | if self.is_amd() { 1 << 8 } else { 0 },
        }
        bits
    }

    #[inline]
    fn always_reserved(self) -> u64 {
        let mut bits = match self.width() {
            width @ 32..=51 => ADDRESS & (u64::MAX << width),
            _ => 0,
        };
        if !self.is_long() {
            bits |= 0x7ff0_0000_0000_0000;
        }
        if !self.nx() {
            bits |= NX;
        }
        bits
    }

    /// Bits 20:13 of a 4 MiB entry that are address bits 39:32.
    fn pse36(self) -> u64 {
        let width = match self.width() {
            width @ 32..=39 => width,
            _ => 40,
        };
        ((1u64 << (width - 32)) - 1) << 13
    }

    /// The first frame of what a leaf entry at this role's level, of index `index`, maps.
    #[inline]
    pub(super) fn leaf_frame(self, entry: u64, index: usize) -> Gfn {
        match self.level() {
            1 if self.is_narrow() => Gfn((entry & 0xffff_f000) >> 12),
            1 => Gfn((entry & ADDRESS) >> 12),
            _ if self.is_narrow() => {
                let page = (entry & 0xffc0_0000) | (entry & self.pse36()) >> 13 << 32;
                Gfn(page >> 12 | (index as u64 & 1) << 9)
            }
            level => {
                let within = (1u64 << (9 * (u32::from(level) - 1))) - 1;
                Gfn((entry & ADDRESS) >> 12 & !within)
            }
        }
    }

    /// The frame of the table that an entry points to.
    #[inline]
    pub(super) fn table_frame(self, entry: u64) -> Gfn {
        let mask = if self.is_narrow() { 0xffff_f000 } else { ADDRESS };
        Gfn((entry & mask) >> 12)
    }
}

/// The frame that the entry `index` of a page maps, if it is a leaf.
#[inline]
pub(super) fn frame_of(page: &ShadowPage, index: usize) -> Gfn {
    let role = page.role.get();
    if role.is_direct() {
        let shift = 9 * (u32::from(role.level()).saturating_sub(1));
        Gfn(page.gfn.get().0.wrapping_add((index as u64) << shift))
    } else {
        role.leaf_frame(page.copy(index), index)
    }
}

/// Whether two guest entries lead to the same page below with the same permissions.
#[inline]
pub(super) fn same_link(old: u64, new: u64) -> bool {
    // Below a large entry that is not dirty nothing is writable.
    let dirty = if new & PS != 0 { D } else { 0 };
    (old ^ new) & (P | W | U | NX | PS | ADDRESS | dirty) == 0
}

/// The guest's entry at a byte offset of its table.
#[inline]
pub(super) fn load(view: &View<'_>, table: &GuestPage, role: Role, offset: usize) -> Option<u64> {
    if role.is_narrow() {
        view.load_u32(table, offset).map(u64::from)
    } else {
        view.load_u64(table, offset)
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
    if role.is_narrow() {
        view.swap_u32(table, offset, old as u32, new as u32)
    } else {
        view.swap_u64(table, offset, old, new)
    }
}

impl State {
    /// The guest table's page behind a shadow page. `None`: not in the tree now, or nothing could
    /// be noted about it.
    #[inline]
    pub(super) fn table_of(&self, view: &View<'_>, id: PageId) -> Option<GuestPage> {
        let page = self.arena.page(id);
        let table = page.guest.get();
        if view.is_current(&table) {
            return Some(table);
        }
        let table = self.find_table(view, page.gfn.get())?;
        page.guest.set(table);
        Some(table)
    }

    /// The same for a frame without a shadow page.
    #[inline(never)]
    pub(super) fn find_table(&self, view: &View<'_>, gfn: Gfn) -> Option<GuestPage> {
        let leaf = lookup(view, gfn).filter(|leaf| leaf.direct)?;
        self.frames.chunk(gfn)?;
        Some(view.page(leaf.pfn.hpa(), leaf.writable))
    }
}

/// What of a frame's known entry is not the hardware's: see [`State::leaf`].
const NOT_OF_LEAF: u64 = W | PS;

impl State {
    /// What the tree says of a frame that lies in `chunk`: see [`Chunk::known`]. 0: not there, or not
    /// to be written though `write` wants to.
    #[inline]
    pub(super) fn frame(&self, view: &View<'_>, gfn: Gfn, chunk: &Chunk, write: bool) -> u64 {
        let (known, wanted) = (chunk.known(gfn), if write { P | W } else { P });
        if known & wanted == wanted { known } else { self.ask(view, gfn, chunk, wanted) }
    }

    #[inline(never)]
    fn ask(&self, view: &View<'_>, gfn: Gfn, chunk: &Chunk, wanted: u64) -> u64 {
        let Some(leaf) = lookup(view, gfn) else { return 0 };
        let mut entry = leaf.pfn.hpa().0 | P;
        entry |= if leaf.writable { W } else { 0 };
        entry |= if leaf.level >= LEVEL_2M { PS } else { 0 };
        entry |= if leaf.direct { self.encryption } else { 0 };
        chunk.learn(gfn, entry);
        if entry & wanted == wanted { entry } else { 0 }
    }

    /// The hardware's entry for a frame, small and not accessed. `known`: what the tree says of it.
    #[inline]
    pub(super) fn leaf(&self, known: u64, grant: Grant) -> u64 {
        let bits = grant.bits() & (known & W | U | NX);
        // Born dirty where it may be written: nobody looks, and the hardware need not set it.
        known & !NOT_OF_LEAF | bits | (bits & W) << DIRTY_ABOVE_W
    }
}

/// From W to D.
const DIRTY_ABOVE_W: u32 = 5;
const _: () = assert!(W << DIRTY_ABOVE_W == D);

/// Where an entry of a table lies.
pub(super) fn entry_gpa(gfn: Gfn, offset: usize) -> Gpa {
    Gpa(gfn.gpa().0 | (offset as u64 & 0xfff))
}
