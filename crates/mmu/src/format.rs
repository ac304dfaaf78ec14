//! How an entry of a nested page table spells what the tree means by it.
//!
//! [`Npt`] is AMD's: the regular long-mode format (APM vol. 2 §15.25.5), where a nested walk is a
//! user access, so that every entry has the user bit. EPT will be a second implementation.
//! Bits 52 to 58 are software's in both formats.

use x86::Hpa;

/// Bits 51:12 of an entry: a physical address.
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The entry points to a table that the tree owns. Set and read by `table` alone.
pub(crate) const TABLE: u64 = 1 << 52;
/// The entry pointed to a table that waits for a flush to be freed.
pub(crate) const REMOVED: u64 = 1 << 53;
/// The host's page table lets the page be written; only the dirty log forbids it here.
pub(crate) const HOST_WRITABLE: u64 = 1 << 54;
/// The page is not in the kernel's direct map: device memory or the like.
pub(crate) const NO_DIRECT_MAP: u64 = 1 << 55;

/// Permissions and state of a leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeafBits {
    /// The guest may write.
    pub writable: bool,
    /// The guest may fetch instructions.
    pub exec: bool,
    /// Born accessed.
    pub accessed: bool,
    /// Born dirty.
    pub dirty: bool,
}

/// The spelling of entries.
pub trait PteFormat: Copy + Send + Sync + 'static {
    /// Bit that lets the guest write.
    const WRITABLE: u64;
    /// Bit that the CPU sets on access; 0 where it does not.
    const ACCESSED: u64;
    /// Bit that the CPU sets on writing; 0 where it does not.
    const DIRTY: u64;

    /// A leaf at `level` (1 = 4 KiB, 2 = 2 MiB, 3 = 1 GiB).
    fn leaf(hpa: Hpa, level: u8, bits: LeafBits) -> u64;
    /// The permission bits of an entry that points to a table, without the address.
    fn table_bits() -> u64;
    /// Whether hardware takes the entry as present.
    fn is_present(entry: u64) -> bool;
    /// Whether the guest may fetch instructions through this leaf.
    fn is_exec(entry: u64) -> bool;
    /// The same leaf, of page size `level`, from one of page size `level + 1`: only bits that mark
    /// the size change.
    fn shrink(entry: u64, level: u8) -> u64;
}

/// AMD nested paging.
#[derive(Clone, Copy, Debug)]
pub struct Npt;

const P: u64 = 1 << 0;
const W: u64 = 1 << 1;
const U: u64 = 1 << 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;

const fn when(condition: bool, bits: u64) -> u64 {
    if condition { bits } else { 0 }
}

impl PteFormat for Npt {
    const WRITABLE: u64 = W;
    const ACCESSED: u64 = A;
    const DIRTY: u64 = D;

    #[inline]
    fn leaf(hpa: Hpa, level: u8, bits: LeafBits) -> u64 {
        (hpa.0 & ADDRESS)
            | (P | U)
            | when(bits.writable, W)
            | when(bits.accessed, A)
            | when(bits.dirty, D)
            | when(level > 1, PS)
            | when(!bits.exec, NX)
    }

    #[inline]
    fn table_bits() -> u64 {
        // Accessed from the start: the walker need not come back to set it.
        P | W | U | A
    }

    #[inline]
    fn is_present(entry: u64) -> bool {
        entry & P != 0
    }

    #[inline]
    fn is_exec(entry: u64) -> bool {
        entry & NX == 0
    }

    #[inline]
    fn shrink(entry: u64, level: u8) -> u64 {
        if level == 1 { entry & !PS } else { entry }
    }
}
