//! What a VMM sets once for a whole VM, mostly before it makes vCPUs.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Settings of a VM. Each is read and written whole.
#[derive(Debug, Default)]
pub struct Settings {
    /// TSC frequency of new vCPUs, kHz.
    pub tsc_khz: AtomicU32,
    /// Longest halt polling, ns.
    pub halt_poll_ns: AtomicU64,
    /// The vCPU that boots (KVM_SET_BOOT_CPU_ID).
    pub boot_cpu_id: AtomicU32,
    /// vCPU ids are below this (KVM_CAP_MAX_VCPU_ID).
    pub max_vcpu_id: AtomicU32,
    /// KVM_SET_IDENTITY_MAP_ADDR.
    pub identity_map: AtomicU64,
    /// KVM_SET_TSS_ADDR.
    pub tss_addr: AtomicU32,
    /// KVM_CAP_X2APIC_API flags.
    pub x2apic_api: AtomicU64,
    /// Quirks that are switched off.
    pub quirks_off: AtomicU64,
    /// KVM_CAP_EXCEPTION_PAYLOAD.
    pub exception_payload: AtomicBool,
    /// KVM_CAP_X86_TRIPLE_FAULT_EVENT.
    pub triple_fault_event: AtomicBool,
    /// KVM_CAP_X86_USER_SPACE_MSR: `KVM_MSR_EXIT_REASON_*` bits.
    pub user_space_msr: AtomicU32,
    /// KVM_CAP_X86_DISABLE_EXITS flags; new vCPUs follow them.
    pub disable_exits: AtomicU64,
    /// The guest's reads of MSR_PLATFORM_INFO are refused (KVM_CAP_MSR_PLATFORM_INFO).
    pub platform_info_hidden: AtomicBool,
    /// KVM_CAP_EXIT_ON_EMULATION_FAILURE.
    pub exit_on_emulation_failure: AtomicBool,
    /// KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 flags.
    pub manual_dirty_log: AtomicU64,
}

/// KVM_X86_QUIRK_OUT_7E_INC_RIP.
const QUIRK_OUT_7E: u64 = 1 << 3;
/// KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT.
const QUIRK_MISC_ENABLE_NO_MWAIT: u64 = 1 << 4;
/// KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS.
const QUIRK_MWAIT_NEVER_FAULTS: u64 = 1 << 6;

impl Settings {
    /// Whether OUT to port 0x7E retires before user space sees it.
    pub fn advances_before_7e(&self) -> bool {
        self.quirks_off.load(Relaxed) & QUIRK_OUT_7E == 0
    }

    /// Whether CPUID's MONITOR bit follows MISC_ENABLE. Else it is the VMM's.
    pub fn monitor_follows_misc_enable(&self) -> bool {
        self.quirks_off.load(Relaxed) & QUIRK_MISC_ENABLE_NO_MWAIT != 0
    }

    /// Whether MONITOR and MWAIT are instructions even for a guest without them in its CPUID.
    pub fn mwait_never_faults(&self) -> bool {
        self.quirks_off.load(Relaxed) & QUIRK_MWAIT_NEVER_FAULTS == 0
    }
}
