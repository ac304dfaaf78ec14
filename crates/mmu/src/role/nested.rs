//! The roles of tables by which a hypervisor in the guest (L1) translates for its own guest (L2): NPT tables,
//! which are of the ordinary format, and EPT tables.

use x86::vmcs::eptp;
use x86::{Cr0, Cr4, Efer, Gfn};

use super::{AddressSpace, PagingContext, Role, Source};
use crate::grant::Grant;

/// What L1's CPU has of EPT (IA32_VMX_EPT_VPID_CAP as L1 reads it, SDM vol. 3 appendix A.10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EptOffer {
    /// L1's physical address width; 0 is taken for 52.
    pub maxphyaddr: u8,
    /// Execute-only translations are offered.
    pub execute_only: bool,
    /// Pages of 2 MiB.
    pub pages_2m: bool,
    /// Pages of 1 GiB.
    pub pages_1g: bool,
}

/// The level of PDPTEs.
const PDPTES: u8 = 3;

const fn when(condition: bool, bits: u64) -> u64 {
    if condition { bits } else { 0 }
}

impl Role {
    /// The role of L1's root of NPT tables at `ncr3`, which are tables of the paging mode that L1 itself is in (APM vol.
    /// 2 §15.25.3): long mode or PAE. `None`: that is neither.
    pub(crate) fn npt(ncr3: u64, l1: &PagingContext) -> Option<Self> {
        if !l1.is_paging() || !l1.cr4.contains(Cr4::PAE) {
            return None;
        }
        if !l1.is_long_mode() {
            let context = PagingContext {
                cr0: Cr0::PG | Cr0::WP,
                cr4: Cr4::PAE,
                efer: l1.efer & Efer::NXE,
                // PAE paging has no pages of 1 GiB, and AMD's rule about bit 8 is long mode's.
                gbpages: false,
                amd: false,
                ..*l1
            };
            let role = Self(Self::of(&context, AddressSpace::Main).0 | Self::NPT).at_level(PDPTES);
            return Some(role.with_pdptes_at(ncr3));
        }
        // Every access is a user's: what forbids or allows the supervisor something has no meaning.
        let context = PagingContext {
            cr0: Cr0::PG | Cr0::WP,
            cr4: Cr4::PAE | l1.cr4 & Cr4::LA57,
            efer: Efer::LMA | l1.efer & Efer::NXE,
            ..*l1
        };
        Some(Self(Self::of(&context, AddressSpace::Main).0 | Self::NPT))
    }

    /// The four PDPTEs of PAE paging are no page: where they begin within theirs is part of the role, in bits that mean
    /// nothing in NPT's tables of this mode. Four tables may lie side by side.
    fn with_pdptes_at(self, ncr3: u64) -> Self {
        // Aligned to 32 bytes within 4 KiB: 128 places, seven bits.
        let n = ncr3 >> 5 & 127;
        let bits = (n & 3) << Self::QUADRANT_SHIFT
            | (n >> 2 & 3) << Self::SMEP.trailing_zeros()
            | (n >> 4) << Self::EPT_TRACKS.trailing_zeros();
        Self(self.0 & !Self::PDPTES_AT | bits)
    }

    /// Whether the page is made from PDPTEs of NPT.
    #[inline]
    pub(crate) const fn is_of_pdptes(self) -> bool {
        const ALL: u64 = Role::NPT | Role::LONG | Role::DIRECT | Role::LEVEL;
        self.0 & ALL == Self::NPT | PDPTES as u64
    }

    /// Byte offset within L1's table of the entry behind the entry `index`.
    #[inline]
    pub(crate) const fn nested_offset(self, index: usize) -> usize {
        if self.is_of_pdptes() { self.pdpte_offset(index) } else { index << 3 }
    }

    #[cold]
    const fn pdpte_offset(self, index: usize) -> usize {
        let n = (self.0 >> Self::QUADRANT_SHIFT & 3)
            | (self.0 >> Self::SMEP.trailing_zeros() & 3) << 2
            | (self.0 >> Self::EPT_TRACKS.trailing_zeros() & 7) << 4;
        (n << 5) as usize | (index & 3) << 3
    }

    /// The role of the page below, for an entry of L1's that points to a table.
    #[inline]
    pub(crate) fn nested_below(self, index: usize, grant: Grant) -> Self {
        let child = self.below(index, grant);
        // The place is that of the four PDPTEs alone. Below them it would keep equal pages apart.
        if self.is_of_pdptes() { Self(child.0 & !Self::PDPTES_AT) } else { child }
    }

    /// How many bits of an address L1's tables translate.
    #[inline]
    pub(crate) const fn reach(self) -> u32 {
        if self.is_of_pdptes() { 32 } else { 12 + 9 * (self.0 & Self::LEVEL) as u32 }
    }

    /// The role of L1's root of EPT tables: four levels.
    pub(crate) fn ept(pointer: u64, offer: &EptOffer) -> Self {
        // LONG, so that the pointer is masked as CR3 of long mode is. No NX: bit 63 is no right in
        // EPT.
        Self(
            4 | Self::EPT
                | Self::GRANT
                | Self::LONG
                | u64::from(offer.maxphyaddr & 63) << Self::WIDTH_SHIFT
                | when(pointer & eptp::ACCESSED_DIRTY != 0, Self::EPT_TRACKS)
                | when(offer.execute_only, Self::EPT_EXECUTE_ONLY)
                | when(offer.pages_2m, Self::EPT_2M)
                | when(offer.pages_1g, Self::GBPAGES),
        )
    }

    /// The role of a root that leads to all of L1's frames, each at its own address: of an L2 that L1 gives no tables of
    /// its own. Its flags are those of tables without any.
    pub(crate) const FLAT: Self = Self(4 | Self::DIRECT | Self::EPT | Self::GRANT);

    /// The role of the same table where no entry leads to one of L1's frames. `None`: the frame lies too far up.
    pub(crate) fn without_frame(self, hole: Gfn) -> Option<Self> {
        // One more, so that 0 can say that there is no hole.
        let number = u32::try_from(hole.0).ok()?.checked_add(1)?;
        Some(Self(self.0 & !Self::HOLE | u64::from(number) << Self::HOLE_SHIFT))
    }

    /// Whether no entry leads to that frame, whatever L1's tables say.
    #[inline]
    pub(crate) const fn leaves_out(self, gfn: Gfn) -> bool {
        // No frame has the number before 0.
        self.0 >> Self::HOLE_SHIFT == gfn.0.wrapping_add(1)
    }

    /// Whether that frame is one of the 512 from `base` on.
    pub(crate) const fn leaves_out_of_large(self, base: Gfn) -> bool {
        let hole = self.0 >> Self::HOLE_SHIFT;
        // Wrapping: a frame below the page becomes a huge number, which is not below 512.
        hole != 0 && hole.wrapping_sub(1).wrapping_sub(base.0) < 512
    }

    /// The role of the page above a root, made from no table: the hardware's tables have a level more than
    /// L1's, and its first entry leads to the root.
    pub(crate) fn above(self) -> Self {
        let level = self.level().saturating_add(1);
        Self(self.at_level(level).0 | Self::DIRECT | Self::ABOVE)
    }

    /// Whether the page is made from EPT tables, or from frames that they lead to.
    #[inline]
    pub(crate) const fn is_ept(self) -> bool {
        self.0 & Self::EPT != 0
    }

    /// Whether L1's tables have accessed and dirty bits. NPT's always do.
    #[inline]
    pub(crate) const fn tracks(self) -> bool {
        self.0 & Self::EPT == 0 || self.0 & Self::EPT_TRACKS != 0
    }

    /// Whether the hardware sets no accessed bits in the page: L1's EPT pointer turns them off, and so does that
    /// of the hardware's tables made for it.
    #[inline]
    pub(crate) const fn is_blind(self) -> bool {
        self.0 & (Self::EPT | Self::EPT_TRACKS) == Self::EPT
    }

    /// Whether an EPT entry may allow fetching alone.
    #[inline]
    pub(crate) const fn has_execute_only(self) -> bool {
        self.0 & Self::EPT_EXECUTE_ONLY != 0
    }

    /// Whether an EPT entry of this role's level may map a large page.
    #[inline]
    pub(crate) const fn has_large_ept(self) -> bool {
        match self.0 & Self::LEVEL {
            2 => self.0 & Self::EPT_2M != 0,
            3 => self.0 & Self::GBPAGES != 0,
            _ => false,
        }
    }
}

impl Source {
    /// Whether the page is one of L1's tables for L2.
    pub const fn is_nested(self) -> bool {
        matches!(self, Self::Npt | Self::Ept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn l1() -> PagingContext {
        PagingContext {
            cr0: Cr0::PG | Cr0::PE | Cr0::WP,
            cr4: Cr4::PAE,
            efer: Efer::LMA | Efer::LME | Efer::NXE,
            maxphyaddr: 40,
            gbpages: true,
            amd: true,
            ..PagingContext::default()
        }
    }

    #[test]
    fn l1s_tables_share_no_role_with_a_guests_and_each_rule_makes_another() {
        let with = |change: fn(&mut PagingContext)| {
            let mut context = l1();
            change(&mut context);
            Role::npt(0, &context).unwrap()
        };
        let plain = EptOffer { maxphyaddr: 40, ..EptOffer::default() };
        let tracks = eptp::ACCESSED_DIRTY;
        let roles = [
            Role::of(&l1(), AddressSpace::Main),
            with(|_| ()),
            with(|c| c.efer -= Efer::NXE),
            with(|c| c.cr4 |= Cr4::LA57),
            with(|c| c.maxphyaddr = 39),
            with(|c| c.gbpages = false),
            with(|c| c.amd = false),
            Role::ept(0, &plain),
            Role::ept(tracks, &plain),
            Role::ept(0, &EptOffer { maxphyaddr: 39, ..plain }),
            Role::ept(0, &EptOffer { execute_only: true, ..plain }),
            Role::ept(0, &EptOffer { pages_2m: true, ..plain }),
            Role::ept(0, &EptOffer { pages_1g: true, ..plain }),
            Role::ept(0, &plain).without_frame(Gfn(0)).unwrap(),
            Role::ept(0, &plain).without_frame(Gfn(7)).unwrap(),
        ];
        for (n, a) in roles.iter().enumerate() {
            assert!(roles[n + 1..].iter().all(|b| a != b), "{n}: {a:?}");
            for b in &roles[..n] {
                let direct = |role: &Role| role.direct_below(Grant::ALL);
                if a.source() != b.source() {
                    assert!(direct(a).source() == Source::Frames && direct(a) != direct(b));
                }
            }
            assert_eq!(a.source().is_nested(), n > 0);
            assert_ne!(a.above(), *a);
        }
    }

    #[test]
    fn a_frame_that_is_left_out_is_left_out_all_the_way_down() {
        let root = Role::ept(0, &EptOffer::default());
        let none = Role::FLAT;
        for frame in [0, 1, 511, 512, 0xfee00, u64::from(u32::MAX) - 1] {
            let frame = Gfn(frame);
            let large = Gfn(frame.0 & !511);
            for role in [root, none].map(|role| role.without_frame(frame).unwrap()) {
                let below = role.below(3, Grant::ALL).below(4, Grant::U);
                for role in [role, below, below.direct_below(Grant::ALL), role.at_level(1)] {
                    assert!(role.leaves_out(frame) && role.leaves_out_of_large(large));
                    assert!(!role.leaves_out(Gfn(frame.0 + 1)));
                    assert!(!role.leaves_out_of_large(Gfn(large.0 + 512)));
                    assert!(!role.leaves_out_of_large(Gfn(large.0.wrapping_sub(512))));
                }
            }
            assert!(!root.leaves_out(frame) && !root.leaves_out_of_large(large));
        }
        assert_eq!(root.without_frame(Gfn(u32::MAX.into())), None);
    }

    #[test]
    fn what_is_the_supervisors_alone_makes_no_other_role() {
        let plain = Role::npt(0, &l1()).unwrap();
        let other = PagingContext {
            cr0: Cr0::PG,
            cr4: Cr4::PAE | Cr4::SMEP | Cr4::SMAP | Cr4::PSE,
            cr3: 0x5000,
            cpl: 3,
            ..l1()
        };
        assert_eq!(Role::npt(0, &other), Some(plain));
        let narrow = PagingContext { efer: Efer::empty(), cr4: Cr4::empty(), ..l1() };
        assert_eq!(Role::npt(0, &narrow), None);
        assert_eq!(Role::npt(0, &PagingContext { cr0: Cr0::PE, ..l1() }), None);
    }

    #[test]
    fn pdptes_have_a_place_within_their_page() {
        let pae = PagingContext { efer: Efer::NXE, ..l1() };
        let at = |ncr3| Role::npt(ncr3, &pae).unwrap();
        for n in 0..128 {
            let root = at(n << 5 | 0x1234_5000);
            assert_eq!(root.nested_offset(3), (n as usize) << 5 | 24);
            assert_eq!((root.level(), root.reach(), root.source()), (3, 32, Source::Npt));
            // What is below is the same for all of them.
            assert_eq!(root.nested_below(1, Grant::ALL), at(0).nested_below(2, Grant::ALL));
            assert_eq!(root == at(0), n == 0);
        }
        let below = at(0xfe0).nested_below(0, Grant::ALL);
        assert_eq!((below.nested_offset(5), below.accessed()), (40, x86::paging::pte::ACCESSED));
        assert_ne!(below, Role::npt(0, &l1()).unwrap().at_level(2));
    }
}
