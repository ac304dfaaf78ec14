//! The VMX capability MSRs and IA32_FEATURE_CONTROL (SDM vol. 3C appendix A, §24.7).

/// The MSR IA32_FEATURE_CONTROL (SDM vol. 4 table 2-2).
pub const FEATURE_CONTROL: u32 = 0x3a;
/// The MSR IA32_VMX_BASIC (SDM vol. 3C §A.1).
pub const VMX_BASIC: u32 = 0x480;
/// The MSR IA32_VMX_PINBASED_CTLS (SDM vol. 3C §A.3.1).
pub const VMX_PINBASED_CTLS: u32 = 0x481;
/// The MSR IA32_VMX_PROCBASED_CTLS (SDM vol. 3C §A.3.2).
pub const VMX_PROCBASED_CTLS: u32 = 0x482;
/// The MSR IA32_VMX_EXIT_CTLS (SDM vol. 3C §A.4).
pub const VMX_EXIT_CTLS: u32 = 0x483;
/// The MSR IA32_VMX_ENTRY_CTLS (SDM vol. 3C §A.5).
pub const VMX_ENTRY_CTLS: u32 = 0x484;
/// The MSR IA32_VMX_MISC (SDM vol. 3C §A.6).
pub const VMX_MISC: u32 = 0x485;
/// The MSR IA32_VMX_CR0_FIXED0 (SDM vol. 3C §A.7).
pub const VMX_CR0_FIXED0: u32 = 0x486;
/// The MSR IA32_VMX_CR0_FIXED1 (SDM vol. 3C §A.7).
pub const VMX_CR0_FIXED1: u32 = 0x487;
/// The MSR IA32_VMX_CR4_FIXED0 (SDM vol. 3C §A.8).
pub const VMX_CR4_FIXED0: u32 = 0x488;
/// The MSR IA32_VMX_CR4_FIXED1 (SDM vol. 3C §A.8).
pub const VMX_CR4_FIXED1: u32 = 0x489;
/// The MSR IA32_VMX_VMCS_ENUM (SDM vol. 3C §A.9).
pub const VMX_VMCS_ENUM: u32 = 0x48a;
/// The MSR IA32_VMX_PROCBASED_CTLS2 (SDM vol. 3C §A.3.3).
pub const VMX_PROCBASED_CTLS2: u32 = 0x48b;
/// The MSR IA32_VMX_EPT_VPID_CAP (SDM vol. 3C §A.10).
pub const VMX_EPT_VPID_CAP: u32 = 0x48c;
// The "true" ones exist because the first four demand bits that later CPUs can do without, and must
// go on demanding them (SDM vol. 3C §A.2).
/// The MSR IA32_VMX_TRUE_PINBASED_CTLS (SDM vol. 3C §A.3.1).
pub const VMX_TRUE_PINBASED_CTLS: u32 = 0x48d;
/// The MSR IA32_VMX_TRUE_PROCBASED_CTLS (SDM vol. 3C §A.3.2).
pub const VMX_TRUE_PROCBASED_CTLS: u32 = 0x48e;
/// The MSR IA32_VMX_TRUE_EXIT_CTLS (SDM vol. 3C §A.4).
pub const VMX_TRUE_EXIT_CTLS: u32 = 0x48f;
/// The MSR IA32_VMX_TRUE_ENTRY_CTLS (SDM vol. 3C §A.5).
pub const VMX_TRUE_ENTRY_CTLS: u32 = 0x490;

/// The MSR IA32_VMX_VMFUNC (SDM vol. 3C §A.11).
pub const VMX_VMFUNC: u32 = 0x491;

/// Bits of IA32_FEATURE_CONTROL.
pub mod feature_control {
    /// No write until reset.
    pub const LOCKED: u64 = 1 << 0;
    /// VMXON inside SMX.
    pub const VMX_IN_SMX: u64 = 1 << 1;
    /// VMXON outside SMX.
    pub const VMX_OUTSIDE_SMX: u64 = 1 << 2;
}

/// IA32_VMX_BASIC (SDM vol. 3C §A.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmxBasic(pub u64);

impl VmxBasic {
    /// The revision that a VMCS and a VMXON region begin with.
    pub const fn revision(self) -> u32 {
        // Bit 31 of the region's first word is the shadow VMCS's mark, and always 0 here (SDM vol.
        // 3C §A.1).
        self.0 as u32 & 0x7fff_ffff
    }

    /// Bytes of a VMCS or VMXON region, at most 4096.
    pub const fn region_size(self) -> u32 {
        (self.0 >> 32) as u32 & 0x1fff
    }

    /// Whether those regions must lie below 4 GiB.
    pub const fn is_32_bit(self) -> bool {
        self.0 & (1 << 48) != 0
    }

    /// Memory type for those regions: 6 is write-back.
    pub const fn memory_type(self) -> u8 {
        (self.0 >> 50) as u8 & 0xf
    }

    /// Whether the "true" control MSRs exist.
    pub const fn has_true_controls(self) -> bool {
        self.0 & (1 << 55) != 0
    }
}

/// A control MSR: which bits must be 1, which may be (SDM vol. 3C §A.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowed(pub u64);

impl Allowed {
    /// Bits that must be 1.
    pub const fn must(self) -> u32 {
        self.0 as u32
    }

    /// Bits that may be 1.
    pub const fn may(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// `required` and what of `wanted` there is, with the bits that must be 1. `Err`: the required
    /// bits that are missing.
    pub const fn choose(self, required: u32, wanted: u32) -> Result<u32, u32> {
        // Told by bits: the log then names what the CPU lacks.
        let missing = required & !self.may();
        if missing != 0 {
            return Err(missing);
        }
        // What the CPU demands comes last: it is set whether anybody wants it or not.
        Ok((required | wanted) & self.may() | self.must())
    }
}

/// IA32_VMX_MISC (SDM vol. 3C §A.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmxMisc(pub u64);

impl VmxMisc {
    /// The preemption timer counts down by one whenever this bit of the TSC changes.
    pub const fn timer_shift(self) -> u8 {
        // The timer counts down at the TSC's rate divided by two to this power.
        self.0 as u8 & 0x1f
    }
}

/// IA32_VMX_EPT_VPID_CAP (SDM vol. 3C §A.10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EptVpidCap(pub u64);

impl EptVpidCap {
    const fn bit(self, n: u32) -> bool {
        self.0 & (1 << n) != 0
    }

    /// Whether EPT entries may be execute-only.
    pub const fn execute_only(self) -> bool {
        self.bit(0)
    }

    /// Tables of four levels.
    pub const fn levels_4(self) -> bool {
        self.bit(6)
    }

    /// Whether EPT's tables may be write-back memory.
    pub const fn write_back(self) -> bool {
        self.bit(14)
    }

    /// Pages of 2 MiB.
    pub const fn large_2m(self) -> bool {
        self.bit(16)
    }

    /// Pages of 1 GiB.
    pub const fn large_1g(self) -> bool {
        self.bit(17)
    }

    /// Whether there is INVEPT.
    pub const fn invept(self) -> bool {
        self.bit(20)
    }

    /// Accessed and dirty flags.
    pub const fn accessed_dirty(self) -> bool {
        self.bit(21)
    }

    /// INVEPT of one EPT pointer.
    pub const fn invept_single(self) -> bool {
        self.bit(25)
    }

    /// INVEPT of all.
    pub const fn invept_all(self) -> bool {
        self.bit(26)
    }

    /// Whether there is INVVPID.
    pub const fn invvpid(self) -> bool {
        self.bit(32)
    }

    /// INVVPID of one VPID.
    pub const fn invvpid_single(self) -> bool {
        self.bit(41)
    }

    /// INVVPID of all.
    pub const fn invvpid_all(self) -> bool {
        self.bit(42)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_are_chosen_within_what_the_cpu_allows() {
        let allowed = Allowed((0xff << 32) | 0x16);
        assert_eq!(allowed.choose(1 << 7, 1 << 0), Ok(0x97));
        assert_eq!(allowed.choose(1 << 8 | 1, 0), Err(1 << 8));
        assert_eq!(allowed.choose(0, 1 << 9), Ok(0x16));
    }
}
