//! Bits of page-table entries, of ordinary and of TDP tables, and the arithmetic of levels.
//!
//! SDM vol. 3A §4.5, APM vol. 2 §5.3 and §15.25. NPT's tables use the ordinary format;
//! Intel's EPT has its own (SDM vol. 3C §28.3), in [`ept`].

/// Bits of an ordinary page-table entry (PAE, 4-level and 5-level paging).
pub mod pte {
    /// P: the entry is present.
    pub const PRESENT: u64 = 1 << 0;
    /// R/W: writes are allowed.
    pub const WRITABLE: u64 = 1 << 1;
    /// Accessible at CPL 3.
    pub const USER: u64 = 1 << 2;
    /// PWT: write-through, or a bit of the PAT's index.
    pub const PWT: u64 = 1 << 3;
    /// PCD: not cached, or a bit of the PAT's index.
    pub const PCD: u64 = 1 << 4;
    /// A: the entry was used.
    // Set by the CPU's walk, and by ours: the guest's own aging of pages depends on it.
    pub const ACCESSED: u64 = 1 << 5;
    /// Dirty (leaf entries).
    pub const DIRTY: u64 = 1 << 6;
    /// Large page (levels 2 to 4).
    pub const LARGE: u64 = 1 << 7;
    /// PAT selector of a 4 KiB leaf.
    // The same bit as LARGE: a leaf of level 1 needs none that says so, and has the PAT's third bit
    // there.
    pub const PAT_4K: u64 = 1 << 7;
    /// Global (leaf entries).
    // Kept in the TLB over a MOV to CR3 (with CR4.PGE).
    pub const GLOBAL: u64 = 1 << 8;
    /// Bits 9 to 11, ignored by hardware.
    pub const IGNORED_LOW: u64 = 7 << 9;
    /// PAT selector of a large leaf.
    pub const PAT_LARGE: u64 = 1 << 12;
    /// Bits 52 to 58, ignored by hardware in long mode.
    pub const IGNORED_HIGH: u64 = 0x7f << 52;
    /// Position of the protection key.
    pub const PKEY_SHIFT: u32 = 59;
    /// Protection key (leaf entries, with CR4.PKE or PKS).
    pub const PKEY: u64 = 0xf << PKEY_SHIFT;
    /// No execute (with EFER.NXE, else reserved).
    pub const NX: u64 = 1 << 63;
    /// Address bits 12 to 51.
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
}

/// Bits of an entry of 32-bit (two-level) paging.
pub mod pte32 {
    /// Address of a table or 4 KiB page.
    pub const ADDRESS: u32 = 0xffff_f000;
    /// Address bits 31:22 of a 4 MiB page.
    pub const LARGE_ADDRESS: u32 = 0xffc0_0000;
    /// Address bits 39:32 of a 4 MiB page (PSE-36), at bits 20:13.
    pub const PSE36: u32 = 0x001f_e000;
}

/// Bits of an EPT entry.
pub mod ept {
    /// Reads are allowed.
    pub const READ: u64 = 1 << 0;
    /// Writes are allowed.
    pub const WRITE: u64 = 1 << 1;
    /// Executable (supervisor, with mode-based execute control).
    // Unlike in ordinary tables all three rights are granted by a set bit.
    pub const EXECUTE: u64 = 1 << 2;
    /// Position of the memory type (leaf entries).
    pub const MEMORY_TYPE_SHIFT: u32 = 3;
    /// Memory type: uncacheable.
    pub const UNCACHEABLE: u64 = 0;
    /// Memory type: write-back.
    pub const WRITE_BACK: u64 = 6;
    /// Ignore the guest's PAT.
    // Else a guest could map the host's write-back memory uncached beside the host's own mapping.
    pub const IGNORE_PAT: u64 = 1 << 6;
    /// The entry is a large page.
    pub const LARGE: u64 = 1 << 7;
    /// A: the entry was used.
    pub const ACCESSED: u64 = 1 << 8;
    /// D: the page was written.
    pub const DIRTY: u64 = 1 << 9;
    /// Executable at CPL 3, with mode-based execute control.
    pub const USER_EXECUTE: u64 = 1 << 10;
    /// Violations make no #VE.
    // Means something only where the CPU makes #VE, which is not asked of it here.
    pub const SUPPRESS_VE: u64 = 1 << 63;
}

/// Bits of CR3.
pub mod cr3 {
    /// Process-context identifier (with CR4.PCIDE).
    pub const PCID: u64 = 0xfff;
    /// On a MOV to CR3 with PCIDE: do not flush the PCID's translations. Never stored.
    // It asks something of the MOV and is no part of the register: kept, it would be a reserved
    // bit.
    pub const NO_FLUSH: u64 = 1 << 63;
    /// Table address in 32-bit and long-mode paging.
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    /// Table address in PAE paging: the four PDPTEs are 32-byte aligned.
    pub const PAE_ADDRESS: u64 = 0xffff_ffe0;
    /// Linear-address masking for user addresses, 57 bits.
    pub const LAM_U57: u64 = 1 << 61;
    /// Linear-address masking for user addresses, 48 bits.
    pub const LAM_U48: u64 = 1 << 62;
}

/// Memory types as MTRR, PAT and EPT encode them (SDM vol. 3A table 11-2).
pub mod memory_type {
    /// UC: the memory is not cached.
    pub const UC: u8 = 0;
    /// WC: writes are combined.
    pub const WC: u8 = 1;
    /// WT: writes go through the cache.
    pub const WT: u8 = 4;
    /// WP: writes are not cached.
    pub const WP: u8 = 5;
    /// WB: writes stay in the cache.
    pub const WB: u8 = 6;
    /// Uncacheable unless the MTRR says WC (PAT only).
    pub const UC_MINUS: u8 = 7;
}

/// Entries in a table of 8-byte entries.
pub const ENTRIES: usize = 512;

/// log2 of the bytes that an entry of `level` maps, level 1 being the 4 KiB leaf: 12, 21, 30, 39,
/// 48 for long mode and PAE.
#[inline]
pub const fn level_shift(level: u8) -> u32 {
    // The mask bounds the shift, whatever level is asked for.
    3 + 9 * (level as u32 & 7)
}

/// Bytes that an entry of `level` maps: 4 KiB, 2 MiB, 1 GiB, …
#[inline]
pub const fn level_bytes(level: u8) -> u64 {
    // Wrapping, so that no level makes it panic.
    1u64.wrapping_shl(level_shift(level))
}

/// 4 KiB frames that an entry of `level` maps: 1, 512, 262144, …
#[inline]
pub const fn level_frames(level: u8) -> u64 {
    level_bytes(level) >> 12
}

/// Index into the table of `level` for `addr`.
#[inline]
pub const fn level_index(addr: u64, level: u8) -> usize {
    // Nine bits: the index is within a table of 512 whatever the address is.
    (addr.wrapping_shr(level_shift(level)) & 0x1ff) as usize
}

/// Bits that are reserved in every entry because they lie above the physical-address width
/// (`maxphyaddr` 32 to 52): bits maxphyaddr to 51.
#[inline]
pub const fn above_maxphyaddr(maxphyaddr: u8) -> u64 {
    // Bits 52 and above never are address, whatever CPUID says.
    if maxphyaddr >= 52 {
        return 0;
    }
    // Up to bit 51: what lies above has meanings of its own (NX, keys, ignored bits).
    pte::ADDRESS & (u64::MAX << maxphyaddr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_map_what_the_manual_says() {
        assert_eq!(level_bytes(1), 4096);
        assert_eq!(level_bytes(2), 2 << 20);
        assert_eq!(level_bytes(3), 1 << 30);
        assert_eq!(level_frames(2), 512);
        assert_eq!(level_index(0xffff_8000_0000_0000, 4), 256);
        assert_eq!(level_index(0x20_3000, 1), 3);
        assert_eq!(level_index(0x20_3000, 2), 1);
    }

    #[test]
    fn address_bits_above_the_width_are_reserved() {
        assert_eq!(above_maxphyaddr(52), 0);
        assert_eq!(above_maxphyaddr(51), 1 << 51);
        assert_eq!(above_maxphyaddr(40), 0x000f_ff00_0000_0000);
    }
}
