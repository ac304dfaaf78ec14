//! Control, flag and extended-control registers as bit sets; debug registers are in [`crate::debug`].
//!
//! SDM vol. 3A §2.3, §2.5 and §2.6; APM vol. 2 §3.1. Every bit that the manuals
//! name is here, whether or not this hypervisor offers it: unknown bits survive `from_bits_retain`.

use bitflags::bitflags;

bitflags! {
    /// CR0 (SDM vol. 3A §2.5).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Cr0: u64 {
        /// CR0.PE: protection enable.
        const PE = 1 << 0;
        /// CR0.MP: monitor coprocessor.
        const MP = 1 << 1;
        /// Emulation: no x87.
        const EM = 1 << 2;
        /// Task switched: the next x87/SSE instruction raises #NM.
        const TS = 1 << 3;
        /// Extension type, always one.
        const ET = 1 << 4;
        /// Numeric error: x87 errors raise #MF.
        const NE = 1 << 5;
        /// Write protect: supervisor writes honour read-only pages.
        const WP = 1 << 16;
        /// CR0.AM: alignment mask.
        const AM = 1 << 18;
        /// CR0.NW: not write-through.
        const NW = 1 << 29;
        /// CR0.CD: cache disable.
        const CD = 1 << 30;
        /// CR0.PG: paging is on.
        const PG = 1 << 31;
    }

    /// CR4 (SDM vol. 3A §2.5, APM vol. 2 §3.1.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Cr4: u64 {
        /// Virtual-8086 mode extensions.
        const VME = 1 << 0;
        /// Protected-mode virtual interrupts.
        const PVI = 1 << 1;
        /// Time-stamp disable: RDTSC needs CPL 0.
        const TSD = 1 << 2;
        /// CR4.DE: debugging extensions.
        const DE = 1 << 3;
        /// 4 MiB pages.
        const PSE = 1 << 4;
        /// CR4.PAE: physical-address extension.
        const PAE = 1 << 5;
        /// CR4.MCE: machine-check enable.
        const MCE = 1 << 6;
        /// CR4.PGE: global pages.
        const PGE = 1 << 7;
        /// RDPMC at any CPL.
        const PCE = 1 << 8;
        /// The operating system uses FXSAVE.
        const OSFXSR = 1 << 9;
        /// Unmasked SSE exceptions raise #XM.
        const OSXMMEXCPT = 1 << 10;
        /// SGDT, SIDT, SLDT, SMSW and STR need CPL 0.
        const UMIP = 1 << 11;
        /// CR4.LA57: five-level paging.
        const LA57 = 1 << 12;
        /// CR4.VMXE: VMX enable.
        const VMXE = 1 << 13;
        /// CR4.SMXE: SMX enable.
        const SMXE = 1 << 14;
        /// RDFSBASE and its kin at any CPL.
        const FSGSBASE = 1 << 16;
        /// CR4.PCIDE: process-context identifiers.
        const PCIDE = 1 << 17;
        /// XSAVE, XSETBV and XGETBV enabled.
        const OSXSAVE = 1 << 18;
        /// CR4.KL: Key Locker.
        const KL = 1 << 19;
        /// Supervisor-mode execution prevention.
        const SMEP = 1 << 20;
        /// Supervisor-mode access prevention.
        const SMAP = 1 << 21;
        /// Protection keys for user pages.
        const PKE = 1 << 22;
        /// CR4.CET: control-flow enforcement.
        const CET = 1 << 23;
        /// Protection keys for supervisor pages.
        const PKS = 1 << 24;
        /// CR4.UINTR: user interrupts.
        const UINTR = 1 << 25;
        /// CR4.LASS: linear-address-space separation.
        const LASS = 1 << 27;
        /// Linear-address masking for supervisor addresses.
        const LAM_SUP = 1 << 28;
        /// Flexible return and event delivery.
        const FRED = 1 << 32;
    }

    /// EFER (APM vol. 2 §3.1.7, SDM vol. 3A §2.2.1).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Efer: u64 {
        /// EFER.SCE: SYSCALL enable.
        const SCE = 1 << 0;
        /// EFER.LME: long-mode enable.
        const LME = 1 << 8;
        /// Long mode active (LME and CR0.PG).
        const LMA = 1 << 10;
        /// EFER.NXE: no-execute enable.
        const NXE = 1 << 11;
        /// EFER.SVME: SVM enable.
        const SVME = 1 << 12;
        /// Long-mode segment limit enable.
        const LMSLE = 1 << 13;
        /// EFER.FFXSR: fast FXSAVE/FXRSTOR.
        const FFXSR = 1 << 14;
        /// EFER.TCE: translation-cache extension.
        const TCE = 1 << 15;
        /// EFER.MCOMMIT: MCOMMIT enable.
        const MCOMMIT = 1 << 17;
        /// EFER.INTWB: interruptible WBINVD.
        const INTWB = 1 << 18;
        /// EFER.UAIE: upper-address ignore.
        const UAIE = 1 << 20;
        /// EFER.AUTOIBRS: automatic IBRS.
        const AUTOIBRS = 1 << 21;
    }

    /// RFLAGS (SDM vol. 1 §3.4.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Rflags: u64 {
        /// RFLAGS.CF: the carry.
        const CF = 1 << 0;
        /// Bit 1, which is always one.
        // Written as one in each RFLAGS that is made here: an entry with a zero there is refused by
        // VMX.
        const FIXED = 1 << 1;
        /// RFLAGS.PF: the parity.
        const PF = 1 << 2;
        /// RFLAGS.AF: auxiliary carry.
        const AF = 1 << 4;
        /// RFLAGS.ZF: the result is zero.
        const ZF = 1 << 6;
        /// RFLAGS.SF: the sign.
        const SF = 1 << 7;
        /// Trap: single step.
        const TF = 1 << 8;
        /// RFLAGS.IF: interrupts enabled.
        const IF = 1 << 9;
        /// Direction of string instructions.
        const DF = 1 << 10;
        /// RFLAGS.OF: the overflow.
        const OF = 1 << 11;
        /// I/O privilege level, low bit.
        // Two flags for one number, since a set of bits has no fields; iopl() joins them.
        const IOPL0 = 1 << 12;
        /// I/O privilege level, high bit.
        const IOPL1 = 1 << 13;
        /// RFLAGS.NT: nested task.
        const NT = 1 << 14;
        /// Resume: instruction breakpoints ignored once.
        const RF = 1 << 16;
        /// RFLAGS.VM: virtual-8086 mode.
        const VM = 1 << 17;
        /// Alignment check, or access control under SMAP.
        const AC = 1 << 18;
        /// Virtual interrupt flag.
        const VIF = 1 << 19;
        /// Virtual interrupt pending.
        const VIP = 1 << 20;
        /// RFLAGS.ID: CPUID available.
        const ID = 1 << 21;
    }

    /// XCR0 and IA32_XSS: XSAVE state components (SDM vol. 1 §13.1).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Xcr0: u64 {
        /// x87 state; always one in XCR0.
        const X87 = 1 << 0;
        /// XMM registers and MXCSR.
        const SSE = 1 << 1;
        /// Upper halves of the YMM registers.
        const AVX = 1 << 2;
        /// MPX bound registers.
        const BNDREGS = 1 << 3;
        /// MPX configuration and status.
        const BNDCSR = 1 << 4;
        /// AVX-512 mask registers.
        const OPMASK = 1 << 5;
        /// Upper halves of ZMM0 to ZMM15.
        const ZMM_HI256 = 1 << 6;
        /// ZMM16 to ZMM31.
        const HI16_ZMM = 1 << 7;
        /// Processor trace (XSS).
        const PT = 1 << 8;
        /// The PKRU register.
        const PKRU = 1 << 9;
        /// The PASID (a component of XSS).
        const PASID = 1 << 10;
        /// CET user state (XSS).
        const CET_U = 1 << 11;
        /// CET supervisor state (XSS).
        const CET_S = 1 << 12;
        /// Hardware duty cycling (XSS).
        const HDC = 1 << 13;
        /// User interrupts (XSS).
        const UINTR = 1 << 14;
        /// Last-branch records (XSS).
        const LBR = 1 << 15;
        /// Hardware P-states (XSS).
        const HWP = 1 << 16;
        /// AMX tile configuration.
        const TILE_CFG = 1 << 17;
        /// AMX tile data.
        const TILE_DATA = 1 << 18;
        /// Extended general registers.
        const APX = 1 << 19;
        /// AMD lightweight profiling.
        const LWP = 1 << 62;
    }
}

/// How a CPU is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// At power-up: everything is.
    PowerUp,
    /// By an INIT, which most MSRs and the FPU outlast (APM vol. 2 table 14-1, SDM vol. 3A table 10-1).
    Init,
}

/// What a write of CR0 is by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cr0Write {
    /// LMSW, which an SVM hypervisor that asked for some writes alone hears of whatever it changes (APM vol. 2 table 15-7).
    Lmsw,
    /// MOV or CLTS.
    Other,
}

impl Cr0 {
    /// Value after power-up and INIT, except that INIT keeps CD and NW (SDM vol. 3A table 9-1).
    pub const RESET: Self = Self::ET.union(Self::CD_NW);

    /// Paging and protection.
    pub const PG_PE: Self = Self::PG.union(Self::PE);
    /// The two bits that disable caching.
    pub const CD_NW: Self = Self::CD.union(Self::NW);

    /// Bits 63:32 must be zero: a MOV with one of them set raises #GP.
    pub const HIGH: u64 = 0xffff_ffff_0000_0000;

    /// Whether the combination may be loaded: PG needs PE, NW needs CD (SDM vol. 3A §2.5).
    #[inline]
    pub const fn is_consistent(self) -> bool {
        // Both are #GP for a MOV, and an entry with such a CR0 fails.
        (!self.contains(Self::PG) || self.contains(Self::PE))
            && (!self.contains(Self::NW) || self.contains(Self::CD))
    }
}

impl Cr4 {
    /// The bits whose change flushes translations or alters how the guest's tables are read.
    pub const PAGING: Self = Self::PSE
        .union(Self::PAE)
        .union(Self::PGE)
        .union(Self::LA57)
        // PCIDs do not change how tables are read, but what a MOV to CR3 flushes.
        .union(Self::PCIDE)
        .union(Self::SMEP)
        .union(Self::SMAP)
        // PKS, LAM and CET would belong here; guests are not offered them.
        .union(Self::PKE);
}

impl Efer {
    /// Whether the CPU runs in long mode, either of its sub-modes.
    #[inline]
    pub const fn is_long(self) -> bool {
        self.contains(Self::LMA)
    }
}

impl Rflags {
    /// The two IOPL bits.
    pub const IOPL: Self = Self::IOPL0.union(Self::IOPL1);
    /// Value after reset.
    pub const RESET: Self = Self::FIXED;
    /// The six status flags: what arithmetic sets.
    pub const STATUS: Self =
        Self::CF.union(Self::PF).union(Self::AF).union(Self::ZF).union(Self::SF).union(Self::OF);

    /// I/O privilege level, 0 to 3.
    #[inline]
    pub const fn iopl(self) -> u8 {
        ((self.bits() >> 12) & 3) as u8
    }
}

impl Xcr0 {
    /// The three AVX-512 components, which are enabled together.
    pub const AVX512: Self = Self::OPMASK.union(Self::ZMM_HI256).union(Self::HI16_ZMM);
    /// The two MPX components, which are enabled together.
    pub const MPX: Self = Self::BNDREGS.union(Self::BNDCSR);
    /// The two AMX components, which are enabled together.
    pub const AMX: Self = Self::TILE_CFG.union(Self::TILE_DATA);
    /// Components in the legacy 512-byte region.
    pub const LEGACY: Self = Self::X87.union(Self::SSE);
}

impl From<Xcr0> for u64 {
    fn from(value: Xcr0) -> Self {
        value.bits()
    }
}

/// Index of a general register as ModRM and the KVM API's tables number them (SDM vol. 2A
/// table 2-2): RAX 0, RCX 1, RDX 2, RBX 3, RSP 4, RBP 5, RSI 6, RDI 7, R8 to R15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)] // The names say it.
pub enum Gpr {
    Rax = 0,
    Rcx = 1,
    Rdx = 2,
    Rbx = 3,
    Rsp = 4,
    Rbp = 5,
    Rsi = 6,
    Rdi = 7,
    R8 = 8,
    R9 = 9,
    R10 = 10,
    R11 = 11,
    R12 = 12,
    R13 = 13,
    R14 = 14,
    R15 = 15,
}

/// Whether `addr` is canonical for `bits` of linear address (48, or 57 with CR4.LA57).
#[inline]
pub const fn is_canonical(addr: u64, bits: u32) -> bool {
    // Cut, so that no width makes the shift overflow.
    let shift = 64u32.saturating_sub(bits) & 63;
    (((addr << shift) as i64) >> shift) as u64 == addr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paging_without_protection_is_refused() {
        assert!(!Cr0::PG.is_consistent());
        assert!(!Cr0::NW.is_consistent());
        assert!(Cr0::RESET.is_consistent());
        assert!((Cr0::PG | Cr0::PE).is_consistent());
    }

    #[test]
    fn reset_values_are_those_of_the_manual() {
        assert_eq!(Cr0::RESET.bits(), 0x6000_0010);
        assert_eq!(Rflags::RESET.bits(), 2);
    }

    #[test]
    fn the_canonical_hole_moves_with_the_address_width() {
        assert!(is_canonical(0x7fff_ffff_ffff, 48));
        assert!(!is_canonical(0x8000_0000_0000, 48));
        assert!(is_canonical(0x8000_0000_0000, 57));
        assert!(is_canonical(0xffff_8000_0000_0000, 48));
        assert!(!is_canonical(0xffff_0000_0000_0000, 48));
    }
}
