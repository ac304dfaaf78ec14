//! What a VMM sets once for a whole VM, mostly before it makes vCPUs.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Settings of a VM. Each is read and written whole.
#[derive(Debug, Default)]
pub struct Settings {
    // Atomics and no lock: the run loop reads them. What must not change under a vCPU is set with
    // `Vm::making` held.
    /// TSC frequency of new vCPUs, kHz.
    pub tsc_khz: AtomicU32,
    /// Longest halt polling, ns.
    pub halt_poll_ns: AtomicU64,
    /// The vCPU that boots (KVM_SET_BOOT_CPU_ID).
    pub boot_cpu_id: AtomicU32,
    /// vCPU ids are below this (KVM_CAP_MAX_VCPU_ID).
    pub max_vcpu_id: AtomicU32,
    /// The page of KVM_SET_IDENTITY_MAP_ADDR (KVM API §4.40).
    pub identity_map: AtomicU64,
    /// The pages of KVM_SET_TSS_ADDR (KVM API §4.36).
    pub tss_addr: AtomicU32,
    /// The flags of KVM_CAP_X2APIC_API (KVM API §7).
    pub x2apic_api: AtomicU64,
    /// Nanoseconds in a cycle of the local APIC timers' clock; 0: one (KVM_CAP_X86_APIC_BUS_CYCLES_NS).
    pub apic_bus_cycle_ns: AtomicU32,
    /// Quirks that are switched off.
    pub quirks_off: AtomicU64,
    /// KVM_CAP_EXCEPTION_PAYLOAD is on (KVM API §7).
    pub exception_payload: AtomicBool,
    /// KVM_CAP_X86_TRIPLE_FAULT_EVENT is on (KVM API §7).
    pub triple_fault_event: AtomicBool,
    /// KVM_CAP_X86_USER_SPACE_MSR: `KVM_MSR_EXIT_REASON_*` bits.
    pub user_space_msr: AtomicU32,
    /// KVM_CAP_X86_DISABLE_EXITS flags; new vCPUs follow them.
    pub disable_exits: AtomicU64,
    /// The guest's reads of MSR_PLATFORM_INFO are refused (KVM_CAP_MSR_PLATFORM_INFO).
    pub platform_info_hidden: AtomicBool,
    /// KVM_CAP_EXIT_ON_EMULATION_FAILURE is on (KVM API §7).
    pub exit_on_emulation_failure: AtomicBool,
    /// The flags of KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 (KVM API §7).
    pub manual_dirty_log: AtomicU64,
    /// The operating system that the guest has named to Hyper-V; 0: none, and there are no hypercalls of Hyper-V.
    pub hyperv_guest: AtomicU64,
    /// The MSR of the page with the code of those hypercalls.
    pub hyperv_hypercall: AtomicU64,
}

/// What KVM does in another way than hardware, unless the VMM switches it off (KVM_X86_QUIRK_*).
pub mod quirk {
    /// LINT0 of the boot processor comes up unmasked, for the 8259A.
    pub const LINT0_REENABLED: u64 = 1 << 0;
    /// The hardware does not see CR0.CD and CR0.NW.
    pub const CD_NW_CLEARED: u64 = 1 << 1;
    /// The APIC's page is all ones while the APIC is disabled or in x2APIC mode.
    pub const LAPIC_MMIO_HOLE: u64 = 1 << 2;
    /// OUT to port 0x7E retires before user space sees it.
    pub const OUT_7E_INC_RIP: u64 = 1 << 3;
    /// MISC_ENABLE does not change what CPUID says of MONITOR.
    pub const MISC_ENABLE_NO_MWAIT: u64 = 1 << 4;
    /// The hypercall instruction of the other maker works.
    pub const FIX_HYPERCALL_INSN: u64 = 1 << 5;
    /// MONITOR and MWAIT are never undefined.
    pub const MWAIT_NEVER_UD_FAULTS: u64 = 1 << 6;
    /// What a VMM may see of a slot's removal: more translations may go than the slot's. Here they never do.
    pub const SLOT_ZAP_ALL: u64 = 1 << 7;
    /// All that there are here.
    pub const ALL: u64 = LINT0_REENABLED
        | CD_NW_CLEARED
        | LAPIC_MMIO_HOLE
        | OUT_7E_INC_RIP
        | MISC_ENABLE_NO_MWAIT
        | FIX_HYPERCALL_INSN
        | MWAIT_NEVER_UD_FAULTS
        // Nothing follows from it here; it is known so that a VMM may switch it off.
        | SLOT_ZAP_ALL;
}

impl Settings {
    /// Whether a quirk of [`quirk`] is on.
    #[inline]
    pub fn has_quirk(&self, quirk: u64) -> bool {
        // On unless switched off: a VMM that knows of no quirks gets what KVM always did.
        self.quirks_off.load(Relaxed) & quirk == 0
    }

    /// Whether HLT does not exit, for vCPUs that are made from now on (KVM_CAP_X86_DISABLE_EXITS).
    pub fn gives_up_hlt_exits(&self) -> bool {
        // KVM_X86_DISABLE_EXITS_HLT.
        self.disable_exits.load(Relaxed) & 2 != 0
    }

    /// Whether CPUID's MONITOR bit follows MISC_ENABLE. Else it is the VMM's.
    pub fn monitor_follows_misc_enable(&self) -> bool {
        !self.has_quirk(quirk::MISC_ENABLE_NO_MWAIT)
    }

    /// Whether MONITOR and MWAIT are instructions even for a guest without them in its CPUID.
    pub fn mwait_never_faults(&self) -> bool {
        self.has_quirk(quirk::MWAIT_NEVER_UD_FAULTS)
    }

    /// Whether the guest does not see PLATFORM_INFO (KVM_CAP_MSR_PLATFORM_INFO).
    #[cold]
    #[inline(never)]
    pub fn hides_platform_info(&self) -> bool {
        self.platform_info_hidden.load(Relaxed)
    }

    /// Whether APIC ids in saved register pages have 32 bits (KVM_CAP_X2APIC_API).
    pub fn has_wide_apic_ids(&self) -> bool {
        self.x2apic_api.load(Relaxed) & 1 != 0
    }
}
