//! MSR numbers, and the bits of the MSRs whose bits the hypervisor looks at.
//!
//! SDM vol. 4 ch. 2, APM vol. 2 appendix A, and `Documentation/virt/kvm/x86/msr.rst` for the
//! paravirtual ones. Names follow the manuals, without the `IA32_` prefix.

macro_rules! msrs {
    ($($(#[$meta:meta])* $name:ident = $number:literal, $doc:literal;)*) => {
        $(#[doc = $doc] $(#[$meta])* pub const $name: u32 = $number;)*

        /// Every named MSR, for logs and statistics.
        // From the same tokens: a number cannot be without a name.
        const NAMES: &[(u32, &str)] = &[$(($number, stringify!($name)),)*];
    };
}

msrs! {
    // Architectural, Intel and AMD.
    P5_MC_ADDR = 0x0, "Pentium machine-check address.";
    P5_MC_TYPE = 0x1, "Pentium machine-check type.";
    TSC = 0x10, "Time-stamp counter.";
    PLATFORM_ID = 0x17, "Platform id (Intel).";
    APIC_BASE = 0x1b, "Local APIC base and mode.";
    EBL_CR_POWERON = 0x2a, "Power-on configuration (Intel).";
    EBC_FREQUENCY_ID = 0x2c, "Bus clock and ratio (old Intel).";
    FEATURE_CONTROL = 0x3a, "Feature control (Intel): VMX and SGX enables.";
    TSC_ADJUST = 0x3b, "Per-CPU TSC adjustment.";
    SPEC_CTRL = 0x48, "Speculation control.";
    PRED_CMD = 0x49, "Prediction command, write-only.";
    UCODE_WRITE = 0x79, "Microcode update trigger (Intel).";
    UCODE_REV = 0x8b, "Microcode revision (Intel), patch level (AMD).";
    PERFCTR0 = 0xc1, "First general performance counter.";
    FSB_FREQ = 0xcd, "Front-side-bus frequency (old Intel).";
    PLATFORM_INFO = 0xce, "Platform information (Intel).";
    CORE_CAPABILITIES = 0xcf, "Core capabilities (Intel).";
    UMWAIT_CONTROL = 0xe1, "UMWAIT control.";
    MPERF = 0xe7, "Maximum-frequency clock count.";
    APERF = 0xe8, "Actual-frequency clock count.";
    MTRR_CAP = 0xfe, "MTRR capabilities.";
    ARCH_CAPABILITIES = 0x10a, "Which speculation flaws the part does not have.";
    FLUSH_CMD = 0x10b, "L1D flush command, write-only.";
    BBL_CR_CTL3 = 0x11e, "L2 cache control (old Intel).";
    TSX_CTRL = 0x122, "Transactional-memory control (Intel).";
    MCU_OPT_CTRL = 0x123, "Microcode mitigation control (Intel).";
    MISC_FEATURES_ENABLES = 0x140, "CPUID faulting and ring-3 MWAIT (Intel).";
    SYSENTER_CS = 0x174, "SYSENTER code selector.";
    SYSENTER_ESP = 0x175, "SYSENTER stack pointer.";
    SYSENTER_EIP = 0x176, "SYSENTER instruction pointer.";
    MCG_CAP = 0x179, "Machine-check capabilities.";
    MCG_STATUS = 0x17a, "Machine-check status.";
    MCG_CTL = 0x17b, "Machine-check control.";
    MCG_EXT_CTL = 0x4d0, "Local machine checks on (Intel).";
    PERFEVTSEL0 = 0x186, "First performance event select.";
    PERF_STATUS = 0x198, "Performance status (Intel).";
    PERF_CTL = 0x199, "Performance control (Intel).";
    THERM_CONTROL = 0x19a, "Thermal clock modulation.";
    THERM_INTERRUPT = 0x19b, "Thermal interrupt enables.";
    THERM_STATUS = 0x19c, "Thermal status.";
    MISC_ENABLE = 0x1a0, "Miscellaneous feature enables (Intel).";
    TEMPERATURE_TARGET = 0x1a2, "Temperature target (Intel).";
    LBR_SELECT = 0x1c8, "Last-branch filter (Intel).";
    DEBUGCTL = 0x1d9, "Debug control.";
    LAST_BRANCH_FROM = 0x1db, "Source of the last branch.";
    LAST_BRANCH_TO = 0x1dc, "Target of the last branch.";
    LAST_INT_FROM = 0x1dd, "Source of the last interrupt.";
    LAST_INT_TO = 0x1de, "Target of the last interrupt.";
    POWER_CTL = 0x1fc, "Power control (Intel).";
    MTRR_PHYSBASE0 = 0x200, "First variable MTRR's base; masks interleave.";
    MTRR_PHYSMASK0 = 0x201, "First variable MTRR's mask.";
    MTRR_FIX64K_00000 = 0x250, "Fixed MTRR of 0 to 512 KiB.";
    MTRR_FIX16K_80000 = 0x258, "Fixed MTRR of 512 to 640 KiB.";
    MTRR_FIX16K_A0000 = 0x259, "Fixed MTRR of 640 to 768 KiB.";
    MTRR_FIX4K_C0000 = 0x268, "Fixed MTRR of C0000.";
    MTRR_FIX4K_C8000 = 0x269, "Fixed MTRR of C8000.";
    MTRR_FIX4K_D0000 = 0x26a, "Fixed MTRR of D0000.";
    MTRR_FIX4K_D8000 = 0x26b, "Fixed MTRR of D8000.";
    MTRR_FIX4K_E0000 = 0x26c, "Fixed MTRR of E0000.";
    MTRR_FIX4K_E8000 = 0x26d, "Fixed MTRR of E8000.";
    MTRR_FIX4K_F0000 = 0x26e, "Fixed MTRR of F0000.";
    MTRR_FIX4K_F8000 = 0x26f, "Fixed MTRR of F8000.";
    PAT = 0x277, "Page attribute table.";
    MC0_CTL2 = 0x280, "First bank's corrected-error interrupt control.";
    MTRR_DEF_TYPE = 0x2ff, "MTRR enables and default type.";
    FIXED_CTR0 = 0x309, "First fixed performance counter.";
    PERF_CAPABILITIES = 0x345, "Performance-monitoring capabilities.";
    FIXED_CTR_CTRL = 0x38d, "Fixed performance-counter control.";
    PERF_GLOBAL_STATUS = 0x38e, "Performance-counter overflow status.";
    PERF_GLOBAL_CTRL = 0x38f, "Performance-counter enables.";
    PERF_GLOBAL_OVF_CTRL = 0x390, "Performance-counter overflow clear.";
    MC0_CTL = 0x400, "First machine-check bank: control, status, address, misc, four per bank.";
    VMX_BASIC = 0x480, "First VMX capability MSR.";
    VMX_VMFUNC = 0x491, "Last VMX capability MSR that KVM knows.";
    PMC0 = 0x4c1, "First full-width performance counter.";
    RTIT_CTL = 0x570, "Processor-trace control; 0x560 to 0x587 belong to it.";
    DS_AREA = 0x600, "Debug-store area.";
    TSC_DEADLINE = 0x6e0, "Local APIC timer deadline, in guest TSC ticks.";
    RAPL_POWER_UNIT = 0x606, "Energy units (Intel).";
    PKG_ENERGY_STATUS = 0x611, "Energy of the package (Intel).";
    DRAM_ENERGY_STATUS = 0x619, "Energy of the memory (Intel).";
    PP0_ENERGY_STATUS = 0x639, "Energy of the cores (Intel).";
    PP1_ENERGY_STATUS = 0x641, "Energy of the graphics (Intel).";
    U_CET = 0x6a0, "CET control for user mode.";
    S_CET = 0x6a2, "CET control for supervisor mode.";
    PL0_SSP = 0x6a4, "Shadow-stack pointer for CPL 0.";
    PL3_SSP = 0x6a7, "Shadow-stack pointer for CPL 3.";
    INT_SSP_TABLE = 0x6a8, "Interrupt shadow-stack table.";
    SMI_COUNT = 0x34, "System-management interrupts taken.";
    SMBASE = 0x9e, "System-management base.";
    X2APIC_BASE = 0x800, "First x2APIC MSR.";
    XFD = 0x1c4, "Extended feature disable.";
    XFD_ERR = 0x1c5, "Extended feature disable, error.";
    XSS = 0xda0, "Supervisor XSAVE components.";

    // AMD, in the C000 and C001 ranges.
    EFER = 0xc000_0080, "Extended features.";
    STAR = 0xc000_0081, "SYSCALL segment selectors.";
    LSTAR = 0xc000_0082, "SYSCALL target in long mode.";
    CSTAR = 0xc000_0083, "SYSCALL target in compatibility mode.";
    SYSCALL_MASK = 0xc000_0084, "RFLAGS that SYSCALL clears.";
    FS_BASE = 0xc000_0100, "Base of FS.";
    GS_BASE = 0xc000_0101, "Base of GS.";
    KERNEL_GS_BASE = 0xc000_0102, "Base that SWAPGS exchanges with GS.";
    TSC_AUX = 0xc000_0103, "What RDTSCP and RDPID return.";
    TSC_RATIO = 0xc000_0104, "TSC ratio for guests (AMD).";
    AMD_PERF_CNTR_GLOBAL_STATUS = 0xc000_0300, "Performance-counter overflow status (AMD).";
    AMD_PERF_CNTR_GLOBAL_CTL = 0xc000_0301, "Performance-counter enables (AMD).";
    AMD_PERF_CNTR_GLOBAL_STATUS_CLR = 0xc000_0302, "Performance-counter overflow clear (AMD).";
    K7_EVNTSEL0 = 0xc001_0000, "First performance event select (AMD).";
    K7_EVNTSEL3 = 0xc001_0003, "Last performance event select (AMD).";
    K7_PERFCTR0 = 0xc001_0004, "First performance counter (AMD).";
    K7_PERFCTR3 = 0xc001_0007, "Last performance counter (AMD).";
    SYSCFG = 0xc001_0010, "System configuration (AMD).";
    HWCR = 0xc001_0015, "Hardware configuration (AMD).";
    IORR_BASE0 = 0xc001_0016, "First I/O range register (AMD).";
    TOP_MEM = 0xc001_001a, "Top of memory below 4 GiB (AMD).";
    K7_CLK_CTL = 0xc001_001b, "Clock control (AMD K7).";
    TOP_MEM2 = 0xc001_001d, "Top of memory above 4 GiB (AMD).";
    NB_CFG = 0xc001_001f, "Northbridge configuration (AMD).";
    PATCH_LOADER = 0xc001_0020, "Microcode update trigger (AMD).";
    HSMP_STATUS = 0xc001_0055, "Interrupt pending message (AMD).";
    PSTATE_LIMIT = 0xc001_0061, "P-state limit (AMD).";
    PSTATE_CTL = 0xc001_0062, "P-state control (AMD).";
    PSTATE_STATUS = 0xc001_0063, "P-state status (AMD).";
    PSTATE_DEF0 = 0xc001_0064, "First P-state definition (AMD).";
    SMM_TSEG_ADDR = 0xc001_0112, "SMM segment address (AMD).";
    SMM_TSEG_MASK = 0xc001_0113, "SMM segment mask (AMD).";
    VM_CR = 0xc001_0114, "SVM control (AMD).";
    VM_IGNNE = 0xc001_0115, "IGNNE (AMD).";
    SMM_CTL = 0xc001_0116, "SMM control (AMD).";
    VM_HSAVE_PA = 0xc001_0117, "Host save area of VMRUN (AMD).";
    VIRT_SPEC_CTRL = 0xc001_011f, "Speculation control offered by a hypervisor (AMD).";
    SEV_ES_GHCB = 0xc001_0130, "Guest-hypervisor communication block (AMD).";
    SEV_STATUS = 0xc001_0131, "Which encrypted-virtualization features are on (AMD).";
    OSVW_ID_LENGTH = 0xc001_0140, "Number of valid OS-visible-workaround bits (AMD).";
    OSVW_STATUS = 0xc001_0141, "OS-visible-workaround bits (AMD).";
    F15H_PERF_CTL0 = 0xc001_0200, "First extended event select (AMD); counters interleave.";
    F15H_PERF_CTR5 = 0xc001_020b, "Last extended counter (AMD).";
    FAM10H_MMIO_CONF_BASE = 0xc001_0058, "MMIO configuration base (AMD).";
    IC_CFG = 0xc001_1021, "Instruction-cache configuration (AMD).";
    DC_CFG = 0xc001_1022, "Data-cache configuration (AMD).";
    TW_CFG = 0xc001_1023, "Table-walker configuration (AMD).";
    BU_CFG2 = 0xc001_102a, "Bus-unit configuration 2 (AMD).";
    DE_CFG = 0xc001_1029, "Decode configuration (AMD); bit 1 makes LFENCE serialize.";
    F15H_EX_CFG = 0xc001_102c, "Execution configuration (AMD family 15h).";
    IBS_FETCH_CTL = 0xc001_1030, "Instruction-based sampling, fetch control (AMD).";

    // Paravirtual, KVM's own.
    // The first two lie outside of the range for such MSRs, and are deprecated for that (msr.rst).
    KVM_WALL_CLOCK = 0x11, "Wall clock, first numbering.";
    KVM_SYSTEM_TIME = 0x12, "System time, first numbering.";
    KVM_WALL_CLOCK_NEW = 0x4b56_4d00, "Wall clock.";
    KVM_SYSTEM_TIME_NEW = 0x4b56_4d01, "System time.";
    KVM_ASYNC_PF_EN = 0x4b56_4d02, "Asynchronous page faults: enable.";
    KVM_STEAL_TIME = 0x4b56_4d03, "Steal time.";
    KVM_PV_EOI_EN = 0x4b56_4d04, "Paravirtual end of interrupt.";
    KVM_POLL_CONTROL = 0x4b56_4d05, "Host-side halt polling on or off.";
    KVM_ASYNC_PF_INT = 0x4b56_4d06, "Asynchronous page faults: vector.";
    KVM_ASYNC_PF_ACK = 0x4b56_4d07, "Asynchronous page faults: acknowledgement.";
    KVM_MIGRATION_CONTROL = 0x4b56_4d08, "Whether migration is allowed (SEV).";
    KVM_LAZY_TSC_DEADLINE = 0x4b56_4d09, "Lazy TSC deadline (RFC of July 2023).";

    // Synthetic, Hyper-V's.
    HV_GUEST_OS_ID = 0x4000_0000, "Hyper-V: guest operating system.";
    HV_HYPERCALL = 0x4000_0001, "Hyper-V: page with the code of a hypercall.";
    HV_VP_INDEX = 0x4000_0002, "Hyper-V: number of the virtual processor.";
    HV_EOI = 0x4000_0070, "Hyper-V: end of interrupt.";
    HV_ICR = 0x4000_0071, "Hyper-V: interrupt command.";
    HV_TPR = 0x4000_0072, "Hyper-V: task priority.";
    HV_VP_ASSIST_PAGE = 0x4000_0073, "Hyper-V: page that guest and hypervisor share.";
    HV_VP_RUNTIME = 0x4000_0010, "Hyper-V: time that the virtual processor ran; only refused.";
}

/// Last x2APIC MSR.
pub const X2APIC_LAST: u32 = 0x8ff;
/// First MSR of KVM's own range.
pub const KVM_FIRST: u32 = KVM_WALL_CLOCK_NEW;
/// Last MSR reserved for KVM's own range.
pub const KVM_LAST: u32 = 0x4b56_4dff;
/// Last VMX capability MSR.
pub const VMX_LAST: u32 = VMX_VMFUNC;
/// Microcode revision as AMD names it.
pub const PATCH_LEVEL: u32 = UCODE_REV;
/// Variable MTRR pairs that KVM offers.
// The number is told to guests in MTRR_CAP, and saved states depend on it.
pub const MTRR_VARIABLE: usize = 8;
/// The eleven fixed-range MTRRs, ascending.
pub const MTRR_FIXED: [u32; 11] = [
    MTRR_FIX64K_00000,
    MTRR_FIX16K_80000,
    MTRR_FIX16K_A0000,
    MTRR_FIX4K_C0000,
    MTRR_FIX4K_C8000,
    MTRR_FIX4K_D0000,
    MTRR_FIX4K_D8000,
    MTRR_FIX4K_E0000,
    MTRR_FIX4K_E8000,
    MTRR_FIX4K_F0000,
    MTRR_FIX4K_F8000,
];
/// PAT after reset: WB, WT, UC-, UC, twice.
pub const PAT_RESET: u64 = 0x0007_0406_0007_0406;

/// The name of an MSR, for logs.
pub fn name(index: u32) -> Option<&'static str> {
    // Searched: names are for logs.
    NAMES.iter().find(|(number, _)| *number == index).map(|(_, name)| *name)
}

/// The x2APIC MSR of the register at `offset` of the xAPIC page.
#[inline]
pub const fn x2apic(offset: u32) -> u32 {
    // Registers lie sixteen bytes apart in the page, and side by side as MSRs (SDM vol. 3A
    // §10.12.1.2).
    X2APIC_BASE + (offset >> 4)
}

/// Bits of SPEC_CTRL (SDM vol. 4 table 2-2, AMD "Speculative store bypass disable" white paper).
pub mod spec_ctrl {
    /// Indirect-branch restricted speculation.
    pub const IBRS: u64 = 1 << 0;
    /// Single-thread indirect-branch predictors.
    pub const STIBP: u64 = 1 << 1;
    /// Speculative store bypass is disabled.
    pub const SSBD: u64 = 1 << 2;
    /// IPRED disable for user mode (Intel).
    pub const IPRED_DIS_U: u64 = 1 << 3;
    /// RRSBA disable for supervisor mode (Intel).
    pub const RRSBA_DIS_S: u64 = 1 << 6;
    /// Predictive-store-forwarding disable (AMD).
    pub const PSFD: u64 = 1 << 7;
    /// BHI disable for supervisor mode (Intel).
    pub const BHI_DIS_S: u64 = 1 << 10;
}

/// Bits of PRED_CMD.
pub mod pred_cmd {
    /// Indirect-branch prediction barrier.
    // A command: nothing is kept, and a read is #GP.
    pub const IBPB: u64 = 1 << 0;
    /// Selective branch-predictor barrier (AMD).
    pub const SBPB: u64 = 1 << 7;
}

/// Bits of FLUSH_CMD.
pub mod flush_cmd {
    /// Write back and invalidate the L1 data cache.
    pub const L1D: u64 = 1 << 0;
}

/// Bits of VM_CR (APM vol. 2 §15.30.1).
pub mod vm_cr {
    /// A20 is not masked while INIT is redirected.
    pub const DPD: u64 = 1 << 0;
    /// INIT becomes #SX.
    pub const R_INIT: u64 = 1 << 1;
    /// A20 masking off.
    pub const DIS_A20M: u64 = 1 << 2;
    /// SVM_DISABLE cannot be cleared.
    pub const LOCK: u64 = 1 << 3;
    /// EFER.SVME cannot be set.
    // By firmware, as a rule: then EFER.SVME is #GP, and the module refuses to load.
    pub const SVMDIS: u64 = 1 << 4;
}

/// Bits of HWCR (APM vol. 2 §3.2.10, family BKDGs).
pub mod hwcr {
    /// No interlock between FERR and IGNNE (ignored by KVM).
    pub const IGNNE_EM: u64 = 1 << 8;
    /// TLB flush filter off (ignored by KVM).
    pub const FFDIS: u64 = 1 << 6;
    /// HLT has no special bus cycle (ignored by KVM, with TLBCACHEDIS).
    pub const TLB_CACHE_DIS: u64 = 1 << 3;
    /// Machine-check status registers may be written.
    pub const MC_STATUS_WR_EN: u64 = 1 << 18;
    /// The TSC counts at the P0 frequency.
    pub const TSC_FREQ_SEL: u64 = 1 << 24;
}

/// Bits of DE_CFG.
pub mod de_cfg {
    /// LFENCE serializes dispatch.
    pub const LFENCE_SERIALIZE: u64 = 1 << 1;
}

/// Bits of MISC_ENABLE (SDM vol. 4 table 2-2).
pub mod misc_enable {
    /// Fast string operations.
    pub const FAST_STRING: u64 = 1 << 0;
    /// Performance monitoring available, read-only.
    pub const PERFMON: u64 = 1 << 7;
    /// Branch-trace storage not available, read-only.
    pub const BTS_UNAVAILABLE: u64 = 1 << 11;
    /// Precise event sampling not available, read-only.
    pub const PEBS_UNAVAILABLE: u64 = 1 << 12;
    /// MONITOR and MWAIT offered in CPUID.
    pub const MWAIT: u64 = 1 << 18;
    /// CPUID leaves limited to 3.
    pub const LIMIT_CPUID: u64 = 1 << 22;
}

/// Bits of PLATFORM_INFO and MISC_FEATURES_ENABLES (SDM vol. 4 table 2-2 and following).
pub mod cpuid_faulting {
    /// PLATFORM_INFO: CPUID faulting exists.
    pub const PLATFORM_INFO: u64 = 1 << 31;
    /// MISC_FEATURES_ENABLES: CPUID outside CPL 0 raises #GP.
    pub const ENABLE: u64 = 1 << 0;
}

/// Bits of FEATURE_CONTROL (SDM vol. 4 table 2-2).
pub mod feature_control {
    /// No further write is accepted.
    // Set by firmware on real machines; a guest's firmware has to do it as well, before VMXON
    // works.
    pub const LOCK: u64 = 1 << 0;
    /// VMX outside SMX.
    pub const VMX_OUTSIDE_SMX: u64 = 1 << 2;
    /// Local machine checks on.
    pub const LMCE: u64 = 1 << 20;
    /// What a VMM may restore: the above, VMX inside and outside SMX, SGX and its launch control.
    // More than a guest may set: a state saved on another host must be taken whole.
    pub const KNOWN: u64 = LOCK | LMCE | 1 << 1 | 1 << 2 | 1 << 17 | 1 << 18;
}

/// Bits of MTRR_CAP and MTRR_DEF_TYPE (SDM vol. 3A §11.11).
pub mod mtrr {
    /// MTRR_CAP: fixed-range registers exist.
    pub const CAP_FIXED: u64 = 1 << 8;
    /// MTRR_CAP: write combining exists.
    pub const CAP_WC: u64 = 1 << 10;
    /// MTRR_DEF_TYPE: fixed ranges enabled.
    pub const FIXED_ENABLE: u64 = 1 << 10;
    /// MTRR_DEF_TYPE: MTRRs enabled.
    pub const ENABLE: u64 = 1 << 11;
    /// MTRR_PHYSMASK: the pair is valid.
    pub const MASK_VALID: u64 = 1 << 11;
}

/// Bits of MCG_CAP, MCG_STATUS and MCi_STATUS (SDM vol. 3B §15.3).
pub mod mce {
    /// MCG_CAP: number of banks.
    pub const CAP_BANKS: u64 = 0xff;
    /// MCG_CAP: MCG_CTL exists.
    pub const CAP_CTL: u64 = 1 << 8;
    /// MCG_CAP: corrected-error interrupts.
    pub const CAP_CMCI: u64 = 1 << 10;
    /// MCG_CAP: software error recovery.
    pub const CAP_SER: u64 = 1 << 24;
    /// MCG_CAP: local machine checks.
    pub const CAP_LMCE: u64 = 1 << 27;
    /// MCG_STATUS: a machine check is in progress.
    // The handler clears it when it is done; a second machine check before that is a shutdown.
    pub const STATUS_MCIP: u64 = 1 << 2;
    /// MCi_STATUS: the register is valid.
    pub const BANK_VALID: u64 = 1 << 63;
    /// MCi_STATUS: an earlier error was overwritten.
    pub const BANK_OVERFLOW: u64 = 1 << 62;
    /// MCi_STATUS: the error was not corrected.
    pub const BANK_UC: u64 = 1 << 61;
    /// MCi_STATUS: the processor's context is corrupt; the error was signalled by #MC; software has
    /// to act. Without any of them an uncorrected error asks for nothing (SDM vol. 3B §16.6.3).
    pub const BANK_PCC_S_AR: u64 = 1 << 57 | 1 << 56 | 1 << 55;
    /// MCi_STATUS: reporting enabled.
    pub const BANK_ENABLED: u64 = 1 << 60;
    /// MCi_CTL2: corrected-error interrupt on.
    pub const CTL2_CMCI_ENABLE: u64 = 1 << 30;
    /// MCi_CTL2: threshold of corrected errors.
    pub const CTL2_THRESHOLD: u64 = 0x7fff;
    /// MCG_EXT_CTL: machine checks go to the CPU concerned alone.
    pub const EXT_CTL_LMCE: u64 = 1 << 0;
}

/// Bits of DEBUGCTL (SDM vol. 3B §17.4.1, APM vol. 2 §13.1.1.6).
pub mod debugctl {
    /// Branches are recorded (last-branch records).
    pub const LBR: u64 = 1 << 0;
    /// Single-step on branches.
    pub const BTF: u64 = 1 << 1;
    /// Transactional regions are debugged (Intel, with RTM).
    pub const RTM: u64 = 1 << 15;
    /// Bus-lock detection (Intel, newer AMD).
    pub const BUS_LOCK_DETECT: u64 = 1 << 2;
    /// Which events the pins for performance monitoring show (AMD).
    pub const PINS: u64 = 0xf << 2;
}

/// Bits of ARCH_CAPABILITIES (SDM vol. 4 table 2-2).
pub mod arch_capabilities {
    /// Not vulnerable to Meltdown.
    pub const RDCL_NO: u64 = 1 << 0;
    /// IBRS is the enhanced one: set once.
    pub const IBRS_ALL: u64 = 1 << 1;
    /// RSBA: underflow may use alternate predictors.
    // A bit that says a flaw is there: cleared, it would be a promise.
    pub const RSBA: u64 = 1 << 2;
    /// The hypervisor need not flush L1D on entry.
    // For hypervisors in a guest: the flush is made below them.
    pub const SKIP_L1DFL_VMENTRY: u64 = 1 << 3;
    /// Not vulnerable to speculative store bypass.
    pub const SSB_NO: u64 = 1 << 4;
    /// Not vulnerable to MDS.
    pub const MDS_NO: u64 = 1 << 5;
    /// Not vulnerable to the page-size-change machine check.
    pub const PSCHANGE_MC_NO: u64 = 1 << 6;
    /// The MSR TSX_CTRL exists.
    // Named to be left out: the MSR is not offered.
    pub const TSX_CTRL: u64 = 1 << 7;
    /// Not vulnerable to TAA.
    pub const TAA_NO: u64 = 1 << 8;
    /// Not vulnerable to SBDR and SSDP.
    pub const SBDR_SSDP_NO: u64 = 1 << 13;
    /// Not vulnerable to FBSDP.
    pub const FBSDP_NO: u64 = 1 << 14;
    /// Not vulnerable to PSDP.
    pub const PSDP_NO: u64 = 1 << 15;
    /// VERW clears fill buffers.
    pub const FB_CLEAR: u64 = 1 << 17;
    /// RRSBA: returns may use restricted alternate predictors.
    pub const RRSBA: u64 = 1 << 19;
    /// Not vulnerable to branch-history injection.
    pub const BHI_NO: u64 = 1 << 20;
    /// Not vulnerable to post-barrier RSB.
    pub const PBRSB_NO: u64 = 1 << 24;
    /// Not vulnerable to gather data sampling.
    pub const GDS_NO: u64 = 1 << 26;
    /// Not vulnerable to register-file data sampling.
    pub const RFDS_NO: u64 = 1 << 27;
    /// VERW clears register files.
    pub const RFDS_CLEAR: u64 = 1 << 28;
    /// Not vulnerable to indirect target selection.
    pub const ITS_NO: u64 = 1 << 62;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_has_two_names() {
        for (i, (number, name)) in NAMES.iter().enumerate() {
            let twin = NAMES.iter().skip(i + 1).find(|(other, _)| other == number);
            assert!(twin.is_none(), "{name} and {twin:?}");
        }
    }

    #[test]
    fn names_are_found() {
        assert_eq!(name(0xc000_0080), Some("EFER"));
        assert_eq!(name(0x4b56_4d03), Some("KVM_STEAL_TIME"));
        assert_eq!(name(0xdead_beef), None);
        assert_eq!(x2apic(crate::apic::reg::ICR), 0x830);
    }
}
