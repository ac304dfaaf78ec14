//! Intel's extended page tables as the hypervisor names them: the pointer to them, what the CPU can
//! do with them and with VPIDs, and the descriptors of INVEPT and INVVPID. Their entries' bits are
//! in [`crate::paging::ept`].
//!
//! SDM vol. 3 §25.6.11 (EPTP), §29.3 (EPT), §29.4 (what is cached), appendix A.10 (capabilities);
//! vol. 3 chapter 31 (INVEPT, INVVPID).

use crate::addr::Hpa;
use crate::paging::ept;

/// A pointer to extended page tables: what the VMCS and INVEPT are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Eptp(u64);

impl Eptp {
    /// Accessed and dirty flags are in use.
    const ACCESSED_DIRTY: u64 = 1 << 6;
    const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

    /// The tables below `root`, of `levels` levels, themselves read as write-back memory.
    /// `accessed_dirty`: the CPU sets accessed and dirty flags in them.
    #[inline]
    pub const fn new(root: Hpa, levels: u8, accessed_dirty: bool) -> Self {
        let walk = (levels.wrapping_sub(1) as u64 & 7) << 3;
        let flags = if accessed_dirty { Self::ACCESSED_DIRTY } else { 0 };
        Self((root.0 & Self::ADDRESS) | ept::WRITE_BACK | walk | flags)
    }

    /// As the VMCS field has it.
    #[inline]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The root table.
    #[inline]
    pub const fn root(self) -> Hpa {
        Hpa(self.0 & Self::ADDRESS)
    }
}

/// IA32_VMX_EPT_VPID_CAP: what of EPT and VPIDs the CPU has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EptVpidCap(pub u64);

impl EptVpidCap {
    const fn has(self, bit: u32) -> bool {
        self.0 & (1 << bit) != 0
    }

    /// Tables of four levels.
    pub const fn four_levels(self) -> bool {
        self.has(6)
    }

    /// Tables of five levels.
    pub const fn five_levels(self) -> bool {
        self.has(7)
    }

    /// The tables themselves may be write-back memory.
    pub const fn write_back(self) -> bool {
        self.has(14)
    }

    /// Leaves of 2 MiB.
    pub const fn pages_2m(self) -> bool {
        self.has(16)
    }

    /// Leaves of 1 GiB.
    pub const fn pages_1g(self) -> bool {
        self.has(17)
    }

    /// Accessed and dirty flags.
    pub const fn accessed_dirty(self) -> bool {
        self.has(21)
    }

    /// INVEPT, and which: of one EPTP.
    pub const fn invept_single(self) -> bool {
        self.has(20) && self.has(25)
    }

    /// INVEPT of all EPTPs.
    pub const fn invept_all(self) -> bool {
        self.has(20) && self.has(26)
    }

    /// INVVPID of one address.
    pub const fn invvpid_address(self) -> bool {
        self.has(32) && self.has(40)
    }

    /// INVVPID of one VPID.
    pub const fn invvpid_single(self) -> bool {
        self.has(32) && self.has(41)
    }

    /// INVVPID of all VPIDs.
    pub const fn invvpid_all(self) -> bool {
        self.has(32) && self.has(42)
    }
}

/// What INVEPT invalidates: guest-physical mappings, and combined mappings of every VPID and PCID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invept {
    /// Those made with this EPTP.
    Single(Eptp),
    /// Those of all EPTPs.
    All,
}

impl Invept {
    /// The instruction's register operand, and the descriptor in memory.
    #[inline]
    pub const fn operands(self) -> (u64, [u64; 2]) {
        match self {
            Self::Single(eptp) => (1, [eptp.bits(), 0]),
            Self::All => (2, [0, 0]),
        }
    }
}

/// What INVVPID invalidates: linear and combined mappings, of every EPTP and PCID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invvpid {
    /// Those of one linear address under this VPID.
    Address(u16, u64),
    /// Those of this VPID.
    Single(u16),
    /// Those of all VPIDs but 0.
    All,
}

impl Invvpid {
    /// The instruction's register operand, and the descriptor in memory.
    #[inline]
    pub const fn operands(self) -> (u64, [u64; 2]) {
        match self {
            Self::Address(vpid, address) => (0, [vpid as u64, address]),
            Self::Single(vpid) => (1, [vpid as u64, 0]),
            Self::All => (2, [0, 0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_names_memory_type_walk_length_and_flags() {
        let eptp = Eptp::new(Hpa(0x12_3456_7000), 4, true);
        // Write-back, four levels (3), accessed and dirty flags.
        assert_eq!(eptp.bits(), 0x12_3456_7000 | 6 | 3 << 3 | 1 << 6);
        assert_eq!(eptp.root(), Hpa(0x12_3456_7000));
        assert_eq!(Eptp::new(Hpa(0x1000), 5, false).bits(), 0x1000 | 6 | 4 << 3);
    }

    #[test]
    fn reserved_bits_of_a_pointer_stay_clear_whatever_the_root() {
        let eptp = Eptp::new(Hpa(u64::MAX), 4, false);
        // Bits 11:7 and 63:52.
        assert_eq!(eptp.bits() & 0xfff0_0000_0000_0f80, 0);
    }

    #[test]
    fn an_instruction_counts_with_its_kind_only() {
        // Single-context INVEPT without the instruction itself.
        assert!(!EptVpidCap(1 << 25).invept_single());
        assert!(EptVpidCap(1 << 25 | 1 << 20).invept_single());
        assert!(!EptVpidCap(1 << 25 | 1 << 20).invept_all());
        assert!(EptVpidCap(1 << 32 | 1 << 41).invvpid_single());
        assert!(!EptVpidCap(1 << 41).invvpid_single());
    }

    #[test]
    fn descriptors_hold_what_is_to_be_invalidated() {
        let eptp = Eptp::new(Hpa(0x1000), 4, true);
        assert_eq!(Invept::Single(eptp).operands(), (1, [0x105e, 0]));
        assert_eq!(Invept::All.operands(), (2, [0, 0]));
        assert_eq!(Invvpid::Address(3, 0x7000).operands(), (0, [3, 0x7000]));
        assert_eq!(Invvpid::Single(u16::MAX).operands(), (1, [0xffff, 0]));
    }
}
