//! Numbers of the capabilities that KVM_CHECK_EXTENSION and KVM_ENABLE_CAP know on x86-64 (KVM API
//! §4.4, §4.37, §6–8).
//!
//! What we answer to each stands in `caps`.

pub const CAP_IRQCHIP: u32 = 0;
pub const CAP_HLT: u32 = 1;
pub const CAP_MMU_SHADOW_CACHE_CONTROL: u32 = 2;
pub const CAP_USER_MEMORY: u32 = 3;
pub const CAP_SET_TSS_ADDR: u32 = 4;
pub const CAP_VAPIC: u32 = 6;
pub const CAP_EXT_CPUID: u32 = 7;
pub const CAP_CLOCKSOURCE: u32 = 8;
pub const CAP_NR_VCPUS: u32 = 9;
pub const CAP_NR_MEMSLOTS: u32 = 10;
pub const CAP_PIT: u32 = 11;
pub const CAP_NOP_IO_DELAY: u32 = 12;
pub const CAP_MP_STATE: u32 = 14;
pub const CAP_COALESCED_MMIO: u32 = 15;
pub const CAP_SYNC_MMU: u32 = 16;
pub const CAP_DESTROY_MEMORY_REGION_WORKS: u32 = 21;
pub const CAP_USER_NMI: u32 = 22;
pub const CAP_SET_GUEST_DEBUG: u32 = 23;
pub const CAP_REINJECT_CONTROL: u32 = 24;
pub const CAP_IRQ_ROUTING: u32 = 25;
pub const CAP_IRQ_INJECT_STATUS: u32 = 26;
pub const CAP_JOIN_MEMORY_REGIONS_WORKS: u32 = 30;
pub const CAP_MCE: u32 = 31;
pub const CAP_IRQFD: u32 = 32;
pub const CAP_PIT2: u32 = 33;
pub const CAP_SET_BOOT_CPU_ID: u32 = 34;
pub const CAP_PIT_STATE2: u32 = 35;
pub const CAP_IOEVENTFD: u32 = 36;
pub const CAP_SET_IDENTITY_MAP_ADDR: u32 = 37;
pub const CAP_XEN_HVM: u32 = 38;
pub const CAP_ADJUST_CLOCK: u32 = 39;
pub const CAP_INTERNAL_ERROR_DATA: u32 = 40;
pub const CAP_VCPU_EVENTS: u32 = 41;
pub const CAP_HYPERV: u32 = 44;
pub const CAP_HYPERV_VAPIC: u32 = 45;
pub const CAP_HYPERV_SPIN: u32 = 46;
pub const CAP_INTR_SHADOW: u32 = 49;
pub const CAP_DEBUGREGS: u32 = 50;
pub const CAP_X86_ROBUST_SINGLESTEP: u32 = 51;
pub const CAP_ENABLE_CAP: u32 = 54;
pub const CAP_XSAVE: u32 = 55;
pub const CAP_XCRS: u32 = 56;
pub const CAP_ASYNC_PF: u32 = 59;
pub const CAP_TSC_CONTROL: u32 = 60;
pub const CAP_GET_TSC_KHZ: u32 = 61;
pub const CAP_MAX_VCPUS: u32 = 66;
pub const CAP_ONE_REG: u32 = 70;
pub const CAP_TSC_DEADLINE_TIMER: u32 = 72;
pub const CAP_SYNC_REGS: u32 = 74;
pub const CAP_PCI_2_3: u32 = 75;
pub const CAP_KVMCLOCK_CTRL: u32 = 76;
pub const CAP_SIGNAL_MSI: u32 = 77;
pub const CAP_READONLY_MEM: u32 = 81;
pub const CAP_IRQFD_RESAMPLE: u32 = 82;
pub const CAP_DEVICE_CTRL: u32 = 89;
pub const CAP_EXT_EMUL_CPUID: u32 = 95;
pub const CAP_HYPERV_TIME: u32 = 96;
pub const CAP_IOAPIC_POLARITY_IGNORED: u32 = 97;
pub const CAP_ENABLE_CAP_VM: u32 = 98;
pub const CAP_IOEVENTFD_NO_LENGTH: u32 = 100;
pub const CAP_VM_ATTRIBUTES: u32 = 101;
pub const CAP_CHECK_EXTENSION_VM: u32 = 105;
pub const CAP_DISABLE_QUIRKS: u32 = 116;
pub const CAP_X86_SMM: u32 = 117;
pub const CAP_MULTI_ADDRESS_SPACE: u32 = 118;
pub const CAP_GUEST_DEBUG_HW_BPS: u32 = 119;
pub const CAP_GUEST_DEBUG_HW_WPS: u32 = 120;
pub const CAP_SPLIT_IRQCHIP: u32 = 121;
pub const CAP_IOEVENTFD_ANY_LENGTH: u32 = 122;
pub const CAP_HYPERV_SYNIC: u32 = 123;
pub const CAP_VCPU_ATTRIBUTES: u32 = 127;
pub const CAP_MAX_VCPU_ID: u32 = 128;
pub const CAP_X2APIC_API: u32 = 129;
pub const CAP_MSI_DEVID: u32 = 131;
pub const CAP_IMMEDIATE_EXIT: u32 = 136;
pub const CAP_X86_DISABLE_EXITS: u32 = 143;
pub const CAP_HYPERV_SYNIC2: u32 = 148;
pub const CAP_HYPERV_VP_INDEX: u32 = 149;
pub const CAP_GET_MSR_FEATURES: u32 = 153;
pub const CAP_HYPERV_EVENTFD: u32 = 154;
pub const CAP_HYPERV_TLBFLUSH: u32 = 155;
pub const CAP_NESTED_STATE: u32 = 157;
pub const CAP_MSR_PLATFORM_INFO: u32 = 159;
pub const CAP_HYPERV_SEND_IPI: u32 = 161;
pub const CAP_COALESCED_PIO: u32 = 162;
pub const CAP_HYPERV_ENLIGHTENED_VMCS: u32 = 163;
pub const CAP_EXCEPTION_PAYLOAD: u32 = 164;
pub const CAP_MANUAL_DIRTY_LOG_PROTECT: u32 = 166;
pub const CAP_HYPERV_CPUID: u32 = 167;
pub const CAP_MANUAL_DIRTY_LOG_PROTECT2: u32 = 168;
pub const CAP_PMU_EVENT_FILTER: u32 = 173;
pub const CAP_HYPERV_DIRECT_TLBFLUSH: u32 = 175;
pub const CAP_HALT_POLL: u32 = 182;
pub const CAP_ASYNC_PF_INT: u32 = 183;
pub const CAP_LAST_CPU: u32 = 184;
pub const CAP_SMALLER_MAXPHYADDR: u32 = 185;
pub const CAP_STEAL_TIME: u32 = 187;
pub const CAP_X86_USER_SPACE_MSR: u32 = 188;
pub const CAP_X86_MSR_FILTER: u32 = 189;
pub const CAP_ENFORCE_PV_FEATURE_CPUID: u32 = 190;
pub const CAP_SYS_HYPERV_CPUID: u32 = 191;
pub const CAP_DIRTY_LOG_RING: u32 = 192;
pub const CAP_X86_BUS_LOCK_EXIT: u32 = 193;
pub const CAP_SET_GUEST_DEBUG2: u32 = 195;
pub const CAP_SGX_ATTRIBUTE: u32 = 196;
pub const CAP_VM_COPY_ENC_CONTEXT_FROM: u32 = 197;
pub const CAP_HYPERV_ENFORCE_CPUID: u32 = 199;
pub const CAP_SREGS2: u32 = 200;
pub const CAP_EXIT_HYPERCALL: u32 = 201;
pub const CAP_BINARY_STATS_FD: u32 = 203;
pub const CAP_EXIT_ON_EMULATION_FAILURE: u32 = 204;
pub const CAP_VM_MOVE_ENC_CONTEXT_FROM: u32 = 206;
pub const CAP_VM_GPA_BITS: u32 = 207;
pub const CAP_XSAVE2: u32 = 208;
pub const CAP_SYS_ATTRIBUTES: u32 = 209;
pub const CAP_PMU_CAPABILITY: u32 = 212;
pub const CAP_DISABLE_QUIRKS2: u32 = 213;
pub const CAP_VM_TSC_CONTROL: u32 = 214;
pub const CAP_SYSTEM_EVENT_DATA: u32 = 215;
pub const CAP_X86_TRIPLE_FAULT_EVENT: u32 = 218;
pub const CAP_X86_NOTIFY_VMEXIT: u32 = 219;
pub const CAP_VM_DISABLE_NX_HUGE_PAGES: u32 = 220;
pub const CAP_DIRTY_LOG_RING_ACQ_REL: u32 = 223;
pub const CAP_DIRTY_LOG_RING_WITH_BITMAP: u32 = 225;
pub const CAP_PMU_EVENT_MASKED_EVENTS: u32 = 226;
pub const CAP_USER_MEMORY2: u32 = 231;
pub const CAP_MEMORY_FAULT_INFO: u32 = 232;
pub const CAP_MEMORY_ATTRIBUTES: u32 = 233;
pub const CAP_GUEST_MEMFD: u32 = 234;
pub const CAP_VM_TYPES: u32 = 235;
pub const CAP_PRE_FAULT_MEMORY: u32 = 236;
pub const CAP_X86_APIC_BUS_CYCLES_NS: u32 = 237;
pub const CAP_X86_GUEST_MODE: u32 = 238;

/// KVM_CAP_X2APIC_API: routes and messages carry 32-bit APIC ids.
pub const X2APIC_API_USE_32BIT_IDS: u64 = 1 << 0;
/// KVM_CAP_X2APIC_API: id 0xff is no broadcast in x2APIC mode.
pub const X2APIC_API_DISABLE_BROADCAST_QUIRK: u64 = 1 << 1;
/// Every bit of KVM_CAP_X2APIC_API.
pub const X2APIC_API_VALID_FLAGS: u64 =
    X2APIC_API_USE_32BIT_IDS | X2APIC_API_DISABLE_BROADCAST_QUIRK;

/// KVM_CAP_X86_DISABLE_EXITS: MWAIT and MONITOR.
pub const X86_DISABLE_EXITS_MWAIT: u64 = 1 << 0;
/// HLT.
pub const X86_DISABLE_EXITS_HLT: u64 = 1 << 1;
/// PAUSE.
pub const X86_DISABLE_EXITS_PAUSE: u64 = 1 << 2;
/// C-states.
pub const X86_DISABLE_EXITS_CSTATE: u64 = 1 << 3;
/// Every bit of KVM_CAP_X86_DISABLE_EXITS.
pub const X86_DISABLE_EXITS_VALID: u64 = 0xf;

/// KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: the log is cleared by KVM_CLEAR_DIRTY_LOG alone.
pub const DIRTY_LOG_MANUAL_PROTECT_ENABLE: u64 = 1 << 0;
/// All pages of a slot start dirty.
pub const DIRTY_LOG_INITIALLY_SET: u64 = 1 << 1;
