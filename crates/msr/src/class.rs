//! Which floor owns an MSR.
//!
//! On the exit path of RDMSR and WRMSR: a compare for the x2APIC range, the usual self-IPI and EOI,
//! then a search over sorted constants. The kernel is built without jump tables, so the order of
//! the arms costs nothing.

use x86::msr::*;

/// The owner of an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// In the control block or in hardware: the backend keeps it.
    Backend,
    /// Of the local APIC, outside the x2APIC range: APIC_BASE and TSC_DEADLINE.
    Apic,
    /// The x2APIC range, 0x800 to 0x8ff.
    X2Apic,
    /// Paravirtual, KVM's own.
    Pv,
    /// Kept by [`crate::MsrStore`].
    Store,
    /// Kept by [`crate::MsrStore`] too; a write takes effect where the kernel can be called.
    Outside,
    /// Nobody's: refused.
    Unknown,
}

/// The owner of MSR `index`.
#[inline]
pub fn classify(index: u32) -> Class {
    if index.wrapping_sub(X2APIC_BASE) <= X2APIC_LAST - X2APIC_BASE {
        return Class::X2Apic;
    }
    match index {
        TSC | SPEC_CTRL | SYSENTER_CS | SYSENTER_ESP | SYSENTER_EIP | DEBUGCTL | PAT | XSS
        | EFER | STAR | LSTAR | CSTAR | SYSCALL_MASK | FS_BASE | GS_BASE | KERNEL_GS_BASE
        | TSC_AUX => Class::Backend,
        APIC_BASE | TSC_DEADLINE => Class::Apic,
        KVM_WALL_CLOCK | KVM_SYSTEM_TIME | KVM_FIRST..=KVM_LAZY_TSC_DEADLINE => Class::Pv,
        _ => classify_rare(index),
    }
}

fn classify_rare(index: u32) -> Class {
    match index {
        // Machine checks.
        P5_MC_ADDR | P5_MC_TYPE | MCG_CAP | MCG_STATUS | MCG_CTL | MCG_EXT_CTL => Class::Store,
        MC0_CTL2..=0x29f | MC0_CTL..=0x47f => Class::Store,
        // Memory types.
        MTRR_CAP
        | MTRR_PHYSBASE0..=0x20f
        | MTRR_FIX64K_00000
        | MTRR_FIX16K_80000
        | MTRR_FIX16K_A0000
        | MTRR_FIX4K_C0000..=MTRR_FIX4K_F8000
        | MTRR_DEF_TYPE => Class::Store,
        // Speculation commands and facts.
        PRED_CMD | FLUSH_CMD | ARCH_CAPABILITIES | UCODE_REV | UCODE_WRITE | DE_CFG => Class::Store,
        // Settings that are kept, and identification.
        PLATFORM_ID
        | EBL_CR_POWERON
        | EBC_FREQUENCY_ID
        | SMI_COUNT
        | FEATURE_CONTROL
        | TSC_ADJUST
        | SMBASE
        | FSB_FREQ
        | PLATFORM_INFO
        | BBL_CR_CTL3
        | MISC_FEATURES_ENABLES
        | PERF_STATUS
        | PERF_CTL
        | MISC_ENABLE
        | LAST_BRANCH_FROM..=LAST_INT_TO
        | POWER_CTL
        | PERF_CAPABILITIES
        | RAPL_POWER_UNIT
        | PKG_ENERGY_STATUS
        | DRAM_ENERGY_STATUS
        | PP0_ENERGY_STATUS
        | PP1_ENERGY_STATUS => Class::Store,
        // Performance counters of the oldest generation: read as zero, so that a guest finds none.
        PERFCTR0 | 0xc2 | PERFEVTSEL0 | 0x187 | K7_EVNTSEL0..=K7_PERFCTR3 => Class::Store,
        // AMD.
        TSC_RATIO
        | SYSCFG
        | HWCR
        | K7_CLK_CTL
        | NB_CFG
        | PATCH_LOADER
        | HSMP_STATUS
        | FAM10H_MMIO_CONF_BASE
        | SMM_TSEG_ADDR
        | SMM_TSEG_MASK
        | VM_CR
        | VM_IGNNE
        | VM_HSAVE_PA
        | OSVW_ID_LENGTH
        | OSVW_STATUS
        | IC_CFG
        | DC_CFG
        | TW_CFG
        | BU_CFG2
        | F15H_EX_CFG => Class::Store,
        VIRT_SPEC_CTRL => Class::Outside,
        _ => Class::Unknown,
    }
}
