//! The entries of L1's tables for L2 as a role reads them: what an entry means, and which are broken.
//!
//! The walk in software and the shadow pages read entries by these rules and no others. EPT: SDM vol. 3C
//! §29.3.2, §29.3.3.1. NPT: entries of long mode (APM vol. 2 §15.25.3), by [`Role::reserved`].

use x86::Gfn;
use x86::paging::{ept, pte};

use crate::grant::Grant;
use crate::role::Role;
use crate::source::PS;

/// What an entry of L1's says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Nothing: not present.
    Absent,
    /// A reserved bit of NPT's is set; or EPT's entry is misconfigured.
    Broken,
    /// Here the page is, and this is what the entry allows.
    Leaf(Grant),
    /// Here the next table is.
    Table(Grant),
}

/// Memory types that no EPT leaf may have: 2, 3 and 7 (SDM vol. 3C §29.3.3.1).
const NO_TYPE: u8 = 1 << 2 | 1 << 3 | 1 << 7;
/// Reserved in an EPT entry that points to a table, where it could not map a page, or could.
const EPT_UPPER: u64 = 0xf8;
const EPT_TABLE: u64 = 0x78;
/// Address bits of a large EPT page below its size.
const BELOW_2M: u64 = 0x001f_f000;
const BELOW_1G: u64 = 0x3fff_f000;

impl Role {
    /// What an entry at this role's level says.
    #[inline]
    pub(crate) fn read(self, entry: u64) -> Reading {
        if self.is_ept() { self.read_ept(entry) } else { self.read_npt(entry) }
    }

    fn read_npt(self, entry: u64) -> Reading {
        if entry & pte::PRESENT == 0 {
            return Reading::Absent;
        }
        let leaf = self.is_leaf(entry);
        // Which bits are reserved depends on whether the entry is a leaf, so that comes first.
        if entry & self.reserved(leaf) != 0 {
            return Reading::Broken;
        }
        // A PDPTE of PAE paging allows all.
        let grant = if self.is_of_pdptes() { Grant::ALL } else { Grant::of(entry) };
        if leaf { Reading::Leaf(grant) } else { Reading::Table(grant) }
    }

    fn read_ept(self, entry: u64) -> Reading {
        let rights = entry & (ept::READ | ept::WRITE | ept::EXECUTE);
        if rights == 0 {
            return Reading::Absent;
        }
        // Writing without reading is broken on every CPU; fetching alone where the capability MSR
        // does not offer it (SDM vol. 3C §29.3.3.1).
        let unreadable =
            rights & ept::READ == 0 && (rights & ept::WRITE != 0 || !self.has_execute_only());
        let level = self.level();
        // At other levels bit 7 is not "large": ignored in a leaf of 4 KiB, reserved above level 3.
        let large = matches!(level, 2 | 3) && entry & PS != 0;
        let reserved = self.beyond()
            | match level {
                1 => 0,
                2 if large => BELOW_2M,
                3 if large => BELOW_1G,
                2 | 3 => EPT_TABLE,
                _ => EPT_UPPER,
            };
        let leaf = level == 1 || large;
        // Links have no memory type: bits 5:3 are reserved there, and tested as such.
        let bad_type = leaf && NO_TYPE >> (entry >> ept::MEMORY_TYPE_SHIFT & 7) & 1 != 0;
        if unreadable || entry & reserved != 0 || (large && !self.has_large_ept()) || bad_type {
            return Reading::Broken;
        }
        let grant = Grant::of_ept(entry);
        if leaf { Reading::Leaf(grant) } else { Reading::Table(grant) }
    }

    /// The bit that says that an entry was used, in L1's tables; 0 where they have none.
    #[inline]
    pub(crate) const fn accessed(self) -> u64 {
        if !self.is_ept() {
            if self.is_of_pdptes() { 0 } else { pte::ACCESSED }
        } else if self.tracks() {
            ept::ACCESSED
        } else {
            0
        }
    }

    /// The bit that says that a page was written; 0 where L1's tables have none.
    #[inline]
    pub(crate) const fn dirty(self) -> u64 {
        if !self.is_ept() {
            pte::DIRTY
        } else if self.tracks() {
            ept::DIRTY
        } else {
            0
        }
    }

    /// The frame of 4 KiB that a leaf entry at this role's level maps for `gpa`.
    #[inline]
    pub(crate) fn frame_for(self, entry: u64, gpa: u64) -> Gfn {
        let within = (1u64 << (9 * (u32::from(self.level()).saturating_sub(1)))) - 1;
        Gfn(self.leaf_frame(entry, 0).0 | gpa >> 12 & within)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::role::EptOffer;

    fn role(offer: EptOffer) -> Role {
        Role::ept(0, &offer)
    }

    /// The manual's list of misconfigurations, one entry each: (level, entry).
    #[test]
    fn ept_entries_are_misconfigured_as_the_manual_says() {
        let offer =
            EptOffer { maxphyaddr: 40, pages_2m: true, pages_1g: true, execute_only: false };
        let wb = 6 << 3;
        let good = [
            (4, 0x1007),
            (3, 0x1007),
            (3, 1 << 30 | PS | wb | 7),
            (2, 1 << 21 | PS | wb | 1),
            (1, 0x1000 | wb | 3),
            // Bits that hardware ignores: 11:8 without flags, 62:52, and 7 in the last level.
            (1, 0x7ff0_0000_0000_1f80 | wb | 5),
            // Types 0, 1, 4 and 5.
            (1, 0x1001),
            (1, 0x1001 | 1 << 3),
            (1, 0x1001 | 4 << 3),
            (1, 0x1001 | 5 << 3),
        ];
        for (level, entry) in good {
            let reading = role(offer).at_level(level).read(entry);
            assert!(matches!(reading, Reading::Leaf(_) | Reading::Table(_)), "{level} {entry:#x}");
        }
        let bad = [
            // Writable and not readable; executable alone.
            (4, 0x1002),
            (1, 0x1006 | wb),
            (1, 0x1004 | wb),
            // Reserved bits of tables.
            (4, 0x1007 | PS),
            (4, 0x1007 | 1 << 3),
            (3, 0x1007 | 1 << 6),
            (2, 0x1007 | 1 << 3),
            // Pages that are not aligned.
            (3, 1 << 29 | PS | wb | 7),
            (2, 1 << 12 | PS | wb | 7),
            // Beyond the width.
            (1, 1 << 40 | wb | 7),
            // Types 2, 3 and 7.
            (1, 0x1001 | 2 << 3),
            (2, PS | 3 << 3 | 1),
            (3, PS | 7 << 3 | 1),
        ];
        for (level, entry) in bad {
            let reading = role(offer).at_level(level).read(entry);
            assert_eq!(reading, Reading::Broken, "{level} {entry:#x}");
        }
        // Without a right an entry is absent, whatever else it says.
        for level in 1..=4 {
            assert_eq!(role(offer).at_level(level).read(!7), Reading::Absent);
        }
    }

    #[test]
    fn what_l1_was_not_offered_is_misconfigured() {
        let wb = 6 << 3;
        type Give = fn(&mut EptOffer);
        let cases: [(Give, u8, u64); 3] = [
            (|o| o.execute_only = true, 1, 4 | wb),
            (|o| o.pages_2m = true, 2, PS | 7 | wb),
            (|o| o.pages_1g = true, 3, PS | 7 | wb),
        ];
        for (give, level, entry) in cases {
            let mut offer = EptOffer { maxphyaddr: 40, ..EptOffer::default() };
            assert_eq!(role(offer).at_level(level).read(entry), Reading::Broken);
            give(&mut offer);
            assert!(matches!(role(offer).at_level(level).read(entry), Reading::Leaf(_)));
        }
    }
}
