//! The guest's paging entries as a role reads them: which entry stands behind which, what it means, and
//! which of its bits are reserved.
//!
//! The walk in software ([`crate::walk`]) and the shadow pages read entries by these rules and no others.

use x86::Gfn;
use x86::paging::pte;

use crate::format::ADDRESS;
use crate::role::Role;

pub(crate) const P: u64 = pte::PRESENT;
pub(crate) const W: u64 = pte::WRITABLE;
pub(crate) const U: u64 = pte::USER;
pub(crate) const A: u64 = pte::ACCESSED;
pub(crate) const D: u64 = pte::DIRTY;
pub(crate) const PS: u64 = pte::LARGE;
pub(crate) const NX: u64 = pte::NX;

/// Bits 62:52, which PAE paging has no use for.
const PAE_HIGH: u64 = 0x7ff0_0000_0000_0000;
/// A PDPTE of PAE paging: only P, PWT, PCD and the address mean something (SDM vol. 3A §4.4.1). Bit 5 is let
/// pass: some CPUs set it as the accessed bit, and the guest's own accesses go on.
const PDPTE: u64 = NX | 0x1c6;
/// Address bits of a large page below its size, but for bit 12, which is PAT.
const BELOW_2M: u64 = 0x001f_e000;
const BELOW_1G: u64 = 0x3fff_e000;
/// Of a 4 MiB page: bits 20:13 are address bits 39:32 as far as the guest has them; bit 21 is reserved
/// (SDM vol. 3A §4.3).
const PSE36_OR_RESERVED: u64 = 0x003f_e000;
/// AMD's rule: bit 8 of the upper levels' table pointers is reserved (APM vol. 2 §5.3.3).
const AMD_UPPER: u64 = 1 << 8;

/// Bits of a PDPTE that must be 0 where MOV to CR3 loads it, for a physical address width of `width`. Without
/// regard to EFER.NXE.
#[inline]
pub fn reserved_in_pdpte(width: u8) -> u64 {
    PAE_HIGH | PDPTE | x86::paging::above_maxphyaddr(width.max(32))
}

/// The index of the shadow entry for `va` in a page of `level`.
#[inline]
pub(crate) fn index_at(va: u64, level: u8) -> usize {
    (va >> (3 + 9 * u32::from(level)) & 511) as usize
}

/// What a role says about guest entries.
impl Role {
    /// Byte offset within the guest's table of the entry behind the shadow entry `index`.
    #[inline]
    pub(crate) fn offset(self, index: usize) -> usize {
        if !self.is_narrow() {
            self.nested_offset(index)
        } else if self.level() == 1 {
            // A table of 1,024 entries has two shadow pages of 512.
            (self.quadrant() << 9 | index) << 2
        } else {
            // One entry of 4 MiB stands behind two shadow entries of 2 MiB.
            (self.quadrant() << 8 | index >> 1) << 2
        }
    }

    /// Whether a present guest entry at this role's level ends the walk.
    #[inline]
    pub(crate) fn is_leaf(self, entry: u64) -> bool {
        let level = self.level();
        // At the last level bit 7 is PAT; above level 3 it is reserved and not a size.
        level == 1
            || (entry & PS != 0 && level <= 3 && (!self.is_narrow() || self.has_large_narrow()))
    }

    /// Bits of a present guest entry that ends the walk at this role's level that must be 0: the one table of them, by
    /// paging mode, level and what the guest's CPU has (SDM vol. 3A §4.3 to §4.5, APM vol. 2 §5.3).
    #[inline]
    pub(crate) fn reserved_in_leaf(self) -> u64 {
        self.reserved(true)
    }

    /// As [`reserved_in_leaf`](Self::reserved_in_leaf), of an entry that ends the walk (`leaf`) or
    /// leads to a table.
    #[inline]
    pub(crate) fn reserved(self, leaf: bool) -> u64 {
        let level = self.level();
        if self.is_narrow() {
            // Bit 21 is always reserved; the address bits above 31 only beyond the guest's width.
            return if leaf && level == 2 { PSE36_OR_RESERVED & !self.pse36() } else { 0 };
        }
        let mut bits = self.always_reserved();
        match level {
            1 => {}
            2 => bits |= if leaf { BELOW_2M } else { 0 },
            // PDPTEs of PAE paging have rules of their own, also about bit 7.
            3 if !self.is_long() => bits |= PDPTE,
            3 if leaf => bits |= BELOW_1G | if self.has_gbpages() { 0 } else { PS },
            3 => bits |= if self.is_amd() { AMD_UPPER } else { 0 },
            _ => bits |= PS | if self.is_amd() { AMD_UPPER } else { 0 },
        }
        bits
    }

    /// The bits reserved in every entry of 8 bytes.
    #[inline]
    fn always_reserved(self) -> u64 {
        let mut bits = self.beyond();
        // Long mode leaves bits 62:52 to software and protection keys.
        if !self.is_long() {
            bits |= PAE_HIGH;
        }
        // Without EFER.NXE bit 63 is reserved and not ignored.
        if !self.nx() {
            bits |= NX;
        }
        bits
    }

    /// Address bits above the guest's physical address width.
    #[inline]
    pub(crate) fn beyond(self) -> u64 {
        match self.width() {
            width @ 32..=51 => ADDRESS & (u64::MAX << width),
            _ => 0,
        }
    }

    /// CR3 without what is no part of the address. 0 for a guest that does not page.
    #[inline]
    pub(crate) fn base(self, cr3: u64) -> u64 {
        if self.is_direct() {
            0
        } else if self.is_long() {
            cr3 & ADDRESS & !self.beyond()
        } else if self.is_narrow() {
            cr3 & 0xffff_f000
        } else if self.is_of_pdptes() {
            // VMCB12 has 64 bits for nCR3, though CR3 of L1's mode has 32.
            cr3 & (ADDRESS | 0xfe0) & !self.beyond()
        } else {
            // A table of PDPTEs is aligned to 32 bytes and no page.
            cr3 & 0xffff_ffe0
        }
    }

    /// Bits 20:13 of a 4 MiB entry that are address bits 39:32.
    #[inline]
    fn pse36(self) -> u64 {
        // PSE-36 has no more than 40 bits, however wide the guest's addresses are.
        let width = match self.width() {
            width @ 32..=39 => width,
            _ => 40,
        };
        ((1u64 << (width - 32)) - 1) << 13
    }

    /// The first frame of what a leaf entry at this role's level, of index `index`, maps.
    #[inline]
    pub(crate) fn leaf_frame(self, entry: u64, index: usize) -> Gfn {
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
    pub(crate) fn table_frame(self, entry: u64) -> Gfn {
        let mask = if self.is_narrow() { 0xffff_f000 } else { ADDRESS };
        Gfn((entry & mask) >> 12)
    }
}

/// Whether two guest entries lead to the same page below with the same permissions.
#[inline]
pub(crate) fn same_link(old: u64, new: u64) -> bool {
    // Below a large entry that is not dirty nothing is writable.
    let dirty = if new & PS != 0 { D } else { 0 };
    (old ^ new) & (P | W | U | NX | PS | ADDRESS | dirty) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::role::{AddressSpace, PagingContext};
    use x86::{Cr0, Cr4, Efer};

    const LARGE_2M: u64 = 0x1f_e000;
    const LARGE_1G: u64 = 0x3fff_e000;

    /// The manual's tables once more, mode by mode: (CR4, LMA, level, leaf, bits reserved beside those above
    /// the width and NX).
    const BOOK: [(Cr4, bool, u8, bool, u64); 14] = [
        (Cr4::PSE, false, 1, true, 0),
        (Cr4::PSE, false, 2, false, 0),
        (Cr4::PAE, false, 1, true, 0x7ff << 52),
        (Cr4::PAE, false, 2, false, 0x7ff << 52),
        (Cr4::PAE, false, 2, true, 0x7ff << 52 | LARGE_2M),
        (Cr4::PAE, false, 3, false, 0xfff << 52 | 0x1c6),
        (Cr4::PAE, true, 1, true, 0),
        (Cr4::PAE, true, 2, false, 0),
        (Cr4::PAE, true, 2, true, LARGE_2M),
        (Cr4::PAE, true, 3, true, LARGE_1G),
        (Cr4::PAE, true, 3, false, 0),
        (Cr4::PAE, true, 4, false, PS),
        (Cr4::PAE.union(Cr4::LA57), true, 4, false, PS),
        (Cr4::PAE.union(Cr4::LA57), true, 5, false, PS),
    ];

    fn role(cr4: Cr4, long: bool, nx: bool, amd: bool, width: u8) -> Role {
        let efer = if long { Efer::LMA } else { Efer::empty() };
        let efer = if nx { efer | Efer::NXE } else { efer };
        let context = PagingContext {
            cr0: Cr0::PG | Cr0::PE,
            cr4,
            efer,
            maxphyaddr: width,
            gbpages: true,
            amd,
            ..PagingContext::default()
        };
        Role::of(&context, AddressSpace::Main)
    }

    #[test]
    fn reserved_bits_are_those_of_the_manual() {
        for (cr4, long, level, leaf, bits) in BOOK {
            for (nx, amd, width) in
                (0..4).map(|n| (n & 1 != 0, n & 2 != 0, [36, 40, 48, 52][n as usize]))
            {
                let wide = cr4.contains(Cr4::PAE);
                let mut wanted = bits;
                if wide {
                    wanted |= x86::paging::above_maxphyaddr(width) | if nx { 0 } else { NX };
                }
                if amd && long && (level >= 4 || (level == 3 && !leaf)) {
                    wanted |= 1 << 8;
                }
                let role = role(cr4, long, nx, amd, width).at_level(level);
                assert_eq!(role.reserved(leaf), wanted, "{role:?} {level} {leaf}");
            }
        }
    }

    #[test]
    fn what_the_guests_cpu_lacks_is_reserved() {
        let long = role(Cr4::PAE, true, true, false, 52).at_level(3);
        assert_eq!(long.reserved(true) & PS, 0);
        let without = PagingContext {
            cr0: Cr0::PG,
            cr4: Cr4::PAE,
            efer: Efer::LMA,
            ..PagingContext::default()
        };
        assert_ne!(Role::of(&without, AddressSpace::Main).at_level(3).reserved(true) & PS, 0);
        // PSE-36: as many address bits as the guest has, at most eight.
        for (width, bits) in [(32, 0x3f_e000), (36, 0x3e_0000), (40, 0x20_0000), (52, 0x20_0000)] {
            assert_eq!(role(Cr4::PSE, false, false, true, width).reserved(true), bits, "{width}");
        }
    }
}
