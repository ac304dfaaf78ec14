//! The MSRs that KVM_GET_MSR_INDEX_LIST and KVM_GET_MSR_FEATURE_INDEX_LIST name (KVM API §4.3).
//!
//! | MSRs | saved because |
//! |---|---|
//! | SYSENTER_*, STAR, LSTAR, CSTAR, SYSCALL_MASK, KERNEL_GS_BASE | no other ioctl carries them |
//! | TSC, TSC_ADJUST, TSC_DEADLINE, TSC_AUX, TSC_RATIO | the guest's time |
//! | PAT, MTRR_* | memory types |
//! | SPEC_CTRL, VIRT_SPEC_CTRL, ARCH_CAPABILITIES, UCODE_REV | what the guest knows of speculation flaws |
//! | XSS, DEBUGCTL, MISC_ENABLE, MISC_FEATURES_ENABLES, PLATFORM_INFO, POWER_CTL, PERF_CAPABILITIES | settings |
//! | MCG_STATUS, MCG_CTL | machine checks; the banks come with KVM_X86_SETUP_MCE and are read by number |
//! | SMBASE, SMI_COUNT | system-management mode |
//! | HWCR, VM_HSAVE_PA | AMD |
//! | FEATURE_CONTROL | Intel: local machine checks |
//! | KVM_* | the paravirtual clock, steal time, end of interrupt, halt polling and lazy TSC deadline |
//!
//! EFER, FS_BASE, GS_BASE and APIC_BASE travel with KVM_GET_SREGS, the x2APIC registers with
//! KVM_GET_LAPIC.

use crate::HostMsrs;
use x86::msr::*;

/// Every MSR that a VMM should save, on any host. A VMM may write 0 to any of them even where the
/// host lacks it.
pub const SAVED: &[u32] = &[
    SYSENTER_CS,
    SYSENTER_ESP,
    SYSENTER_EIP,
    STAR,
    CSTAR,
    KERNEL_GS_BASE,
    SYSCALL_MASK,
    LSTAR,
    TSC,
    PAT,
    VM_HSAVE_PA,
    TSC_AUX,
    SPEC_CTRL,
    VIRT_SPEC_CTRL,
    XSS,
    DEBUGCTL,
    KVM_WALL_CLOCK,
    KVM_SYSTEM_TIME,
    KVM_WALL_CLOCK_NEW,
    KVM_SYSTEM_TIME_NEW,
    KVM_STEAL_TIME,
    KVM_PV_EOI_EN,
    KVM_POLL_CONTROL,
    KVM_LAZY_TSC_DEADLINE,
    TSC_ADJUST,
    TSC_DEADLINE,
    ARCH_CAPABILITIES,
    PERF_CAPABILITIES,
    MISC_ENABLE,
    MCG_STATUS,
    MCG_CTL,
    FEATURE_CONTROL,
    SMBASE,
    SMI_COUNT,
    PLATFORM_INFO,
    MISC_FEATURES_ENABLES,
    POWER_CTL,
    UCODE_REV,
    TSC_RATIO,
    HWCR,
    MTRR_DEF_TYPE,
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
    0x200,
    0x201,
    0x202,
    0x203,
    0x204,
    0x205,
    0x206,
    0x207,
    0x208,
    0x209,
    0x20a,
    0x20b,
    0x20c,
    0x20d,
    0x20e,
    0x20f,
];

/// MSRs by which a VMM learns what the host can offer.
pub const FEATURES: &[u32] = &[DE_CFG, UCODE_REV, ARCH_CAPABILITIES, PERF_CAPABILITIES];

/// KVM_GET_MSR_INDEX_LIST on this host.
pub fn saved(host: &HostMsrs) -> impl Iterator<Item = u32> + use<> {
    let host = *host;
    SAVED.iter().copied().filter(move |index| match *index {
        SPEC_CTRL => host.spec_ctrl,
        TSC_AUX => host.tsc_aux,
        KVM_LAZY_TSC_DEADLINE => host.lazy_deadline,
        VM_HSAVE_PA | TSC_RATIO | VIRT_SPEC_CTRL => host.amd,
        FEATURE_CONTROL => !host.amd,
        _ => true,
    })
}

/// KVM_GET_MSR_FEATURE_INDEX_LIST on this host.
pub fn features(host: &HostMsrs) -> impl Iterator<Item = u32> + use<> {
    let host = *host;
    FEATURES.iter().copied().filter(move |index| host.feature(*index).is_some())
}
