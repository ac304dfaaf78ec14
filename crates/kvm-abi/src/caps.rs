//! What KVM_CHECK_EXTENSION answers (KVM API §4.4), on /dev/kvm and on a VM file alike.
//!
//! An [`Offer`] says what this host and the floors below can do; everything else is fixed. A
//! capability stands at 0 unless all of its commands work: a VMM then takes its other path.
//!
//! | capability | stock 6.12 | here |
//! |---|---|---|
//! | USER_MEMORY, USER_MEMORY2, DESTROY_MEMORY_REGION_WORKS, JOIN_MEMORY_REGIONS_WORKS | 1 | 1 |
//! | SYNC_MMU, READONLY_MEM | 1 | 1 |
//! | NR_MEMSLOTS | 32764 | 32764 |
//! | MULTI_ADDRESS_SPACE, X86_SMM | 2, 1 | 2, 1 |
//! | NR_VCPUS, MAX_VCPUS, MAX_VCPU_ID | online CPUs, 4096, 16384 | as the offer says |
//! | HLT, MP_STATE, VCPU_EVENTS, DEBUGREGS, EXT_CPUID, GET_MSR_FEATURES, SREGS2 | 1 | 1 |
//! | IMMEDIATE_EXIT, INTERNAL_ERROR_DATA, ENABLE_CAP, ENABLE_CAP_VM, CHECK_EXTENSION_VM | 1 | 1 |
//! | BINARY_STATS_FD | 1 | 1 |
//! | SYSTEM_EVENT_DATA, X86_ROBUST_SINGLESTEP, USER_NMI, NOP_IO_DELAY, SET_TSS_ADDR | 1 | 1 |
//! | SET_IDENTITY_MAP_ADDR, SET_BOOT_CPU_ID | 1 | 1 |
//! | SYNC_REGS | 7 | 7 |
//! | XSAVE, XCRS | 1 | 1 with XSAVE, XCRS 0 without |
//! | XSAVE2 | bytes of the area, at least 4096 | the same |
//! | IRQCHIP, PIT, PIT2, PIT_STATE2, REINJECT_CONTROL, IRQ_INJECT_STATUS, IRQFD | 1 | 1 |
//! | IRQFD_RESAMPLE, IOEVENTFD, IOEVENTFD_NO_LENGTH, IOEVENTFD_ANY_LENGTH, SIGNAL_MSI | 1 | 1 |
//! | IOAPIC_POLARITY_IGNORED | 1 | 1 |
//! | IRQ_ROUTING | 4096 | 4096 |
//! | SPLIT_IRQCHIP | 1 | as the offer says: 1 |
//! | X2APIC_API | 3 | as the offer says |
//! | CLOCKSOURCE, KVMCLOCK_CTRL, GET_TSC_KHZ, TSC_DEADLINE_TIMER | 1 | 1 |
//! | ADJUST_CLOCK | 0xe | 0xe |
//! | TSC_CONTROL, VM_TSC_CONTROL | with TSC scaling | with TSC scaling |
//! | STEAL_TIME, HALT_POLL | 1 | as the offer says |
//! | MCE | 32 | as the offer says; QEMU from 8.2 on refuses to start at 0 |
//! | DISABLE_QUIRKS, DISABLE_QUIRKS2 | 1, mask | 1, mask of the offer |
//! | X86_DISABLE_EXITS | mask | mask of the offer |
//! | SET_GUEST_DEBUG, SET_GUEST_DEBUG2 | 1, 0x1f0003 | by the mask of the offer |
//! | EXCEPTION_PAYLOAD, X86_TRIPLE_FAULT_EVENT | 1 | as the offer says |
//! | MSR_PLATFORM_INFO, ENFORCE_PV_FEATURE_CPUID, EXIT_ON_EMULATION_FAILURE | 1 | 1 |
//! | MANUAL_DIRTY_LOG_PROTECT2 | 3 | mask of the offer |
//! | SYS_ATTRIBUTES | 1 | 1 |
//! | VCPU_ATTRIBUTES | 1 | as the offer says |
//! | X86_APIC_BUS_CYCLES_NS | 1 | 1 |
//! | VM_GPA_BITS | – (s390 only) | 0 |
//! | VM_TYPES | 1, more with TDX and SEV | 1 |
//! | COALESCED_MMIO, COALESCED_PIO | 2, 1 | 2, 1 |
//! | X86_USER_SPACE_MSR, X86_MSR_FILTER | 1 | 1 |
//! | DIRTY_LOG_RING | 1 or more | 0: later |
//! | EXIT_HYPERCALL, MEMORY_FAULT_INFO, PRE_FAULT_MEMORY | 1 or more | 0: later |
//! | NESTED_STATE, HYPERV*, XEN_HVM, ASYNC_PF*, PMU_*, VAPIC, DEVICE_CTRL | mostly 1 | 0 |
//! | X86_BUS_LOCK_EXIT, X86_NOTIFY_VMEXIT | mostly 1 | 0 |

use crate::uapi::capability::*;
use crate::uapi::clock::CLOCK_VALID_FLAGS;
use crate::uapi::irqchip::MAX_IRQ_ROUTES;
use crate::uapi::memory::{ADDRESS_SPACES, USER_MEM_SLOTS};
use crate::uapi::run::{COALESCED_MMIO_PAGE_OFFSET, SYNC_X86_VALID_FIELDS};

/// The only version of the interface there ever was (KVM API §4.1).
pub const API_VERSION: i32 = 12;

/// What this host and the floors below can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// CPUs that are online: how many vCPUs are recommended.
    pub online_cpus: u32,
    /// Most vCPUs in a VM.
    pub max_vcpus: u32,
    /// vCPU ids are below this.
    pub max_vcpu_id: u32,
    /// Guests can have XSAVE.
    pub xsave: bool,
    /// Bytes of the largest XSAVE area (standard format) that a guest can have.
    pub xsave_bytes: u32,
    /// XSAVE components that a guest can have.
    pub xcr0: u64,
    /// The hardware can scale the TSC.
    pub tsc_scaling: bool,
    /// Highest guest TSC frequency in kHz, exclusive, with scaling.
    pub max_tsc_khz: u32,
    /// The host's TSC frequency in kHz.
    pub tsc_khz: u32,
    /// The local APIC can be ours while the I/O APIC is the VMM's.
    pub split_irqchip: bool,
    /// Bits of KVM_CAP_X2APIC_API.
    pub x2apic_api: u64,
    /// The guest's steal time can be accounted.
    pub steal_time: bool,
    /// Halt polling can be set per VM.
    pub halt_poll: bool,
    /// Banks of the machine-check architecture; 0: not offered.
    pub mce_banks: u32,
    /// What KVM_X86_GET_MCE_CAP_SUPPORTED answers.
    pub mce_cap: u64,
    /// Quirks that can be switched off.
    pub quirks: u64,
    /// Exits that can be switched off.
    pub disable_exits: u64,
    /// Bits of `kvm_guest_debug.control`; 0: no debugging from outside.
    pub guest_debug: u32,
    /// Exceptions can carry their payload.
    pub exception_payload: bool,
    /// A pending triple fault can be saved.
    pub triple_fault_event: bool,
    /// Bits of KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.
    pub manual_dirty_log: u64,
    /// The TSC offset of a vCPU can be read and set.
    pub tsc_offset: bool,
    /// KVM_GET_EMULATED_CPUID.
    pub emulated_cpuid: bool,
    /// Whose nested state it would be: KVM_STATE_NESTED_FORMAT_*.
    pub nested_format: u16,
    /// Highest guest-physical address plus one, in bits.
    pub gpa_bits: u32,
    /// Guests may have a smaller MAXPHYADDR than the host: their tables are walked in software.
    pub smaller_maxphyaddr: bool,
}

/// What KVM_CHECK_EXTENSION answers for `capability`.
pub fn check_extension(offer: &Offer, capability: u64) -> i32 {
    let Ok(capability) = u32::try_from(capability) else {
        return 0;
    };
    let value = match capability {
        CAP_USER_MEMORY
        | CAP_USER_MEMORY2
        | CAP_DESTROY_MEMORY_REGION_WORKS
        | CAP_JOIN_MEMORY_REGIONS_WORKS
        | CAP_SYNC_MMU
        | CAP_READONLY_MEM
        | CAP_MMU_SHADOW_CACHE_CONTROL => 1,
        CAP_MULTI_ADDRESS_SPACE => ADDRESS_SPACES,
        CAP_NR_MEMSLOTS => USER_MEM_SLOTS,

        CAP_NR_VCPUS => offer.online_cpus.min(offer.max_vcpus),
        CAP_MAX_VCPUS => offer.max_vcpus,
        CAP_MAX_VCPU_ID => offer.max_vcpu_id,

        CAP_HLT
        | CAP_MP_STATE
        | CAP_VCPU_EVENTS
        | CAP_INTR_SHADOW
        | CAP_DEBUGREGS
        | CAP_EXT_CPUID
        | CAP_GET_MSR_FEATURES
        | CAP_SREGS2
        | CAP_XSAVE
        | CAP_IMMEDIATE_EXIT
        | CAP_INTERNAL_ERROR_DATA
        | CAP_ENABLE_CAP
        | CAP_ENABLE_CAP_VM
        | CAP_CHECK_EXTENSION_VM
        | CAP_SYSTEM_EVENT_DATA
        | CAP_X86_ROBUST_SINGLESTEP
        | CAP_USER_NMI
        | CAP_NOP_IO_DELAY
        | CAP_SET_TSS_ADDR
        | CAP_SET_IDENTITY_MAP_ADDR
        | CAP_SET_BOOT_CPU_ID
        | CAP_SYS_ATTRIBUTES
        | CAP_BINARY_STATS_FD
        | CAP_X86_SMM
        | CAP_X86_USER_SPACE_MSR
        | CAP_X86_MSR_FILTER
        | CAP_MSR_PLATFORM_INFO
        | CAP_ENFORCE_PV_FEATURE_CPUID
        | CAP_EXIT_ON_EMULATION_FAILURE
        // Nanoseconds in a cycle unless it is set.
        | CAP_X86_APIC_BUS_CYCLES_NS
        | CAP_VM_TYPES => 1,
        CAP_XCRS => offer.xsave.into(),
        CAP_XSAVE2 => offer.xsave_bytes.max(4096),
        CAP_SYNC_REGS => SYNC_X86_VALID_FIELDS as u32,

        CAP_IRQCHIP
        | CAP_PIT
        | CAP_PIT2
        | CAP_PIT_STATE2
        | CAP_REINJECT_CONTROL
        | CAP_IRQ_INJECT_STATUS
        | CAP_IRQFD
        | CAP_IRQFD_RESAMPLE
        | CAP_IOEVENTFD
        | CAP_IOEVENTFD_NO_LENGTH
        | CAP_IOEVENTFD_ANY_LENGTH
        | CAP_SIGNAL_MSI
        | CAP_IOAPIC_POLARITY_IGNORED
        | CAP_COALESCED_PIO => 1,
        CAP_COALESCED_MMIO => COALESCED_MMIO_PAGE_OFFSET as u32,
        CAP_IRQ_ROUTING => MAX_IRQ_ROUTES,
        CAP_SPLIT_IRQCHIP => offer.split_irqchip.into(),
        CAP_X2APIC_API => offer.x2apic_api as u32,

        CAP_CLOCKSOURCE | CAP_KVMCLOCK_CTRL | CAP_GET_TSC_KHZ | CAP_TSC_DEADLINE_TIMER => 1,
        CAP_ADJUST_CLOCK => CLOCK_VALID_FLAGS,
        CAP_TSC_CONTROL | CAP_VM_TSC_CONTROL => offer.tsc_scaling.into(),
        CAP_STEAL_TIME => offer.steal_time.into(),
        CAP_HALT_POLL => offer.halt_poll.into(),

        CAP_MCE => offer.mce_banks,
        CAP_DISABLE_QUIRKS => (offer.quirks != 0).into(),
        CAP_DISABLE_QUIRKS2 => offer.quirks as u32,
        CAP_X86_DISABLE_EXITS => offer.disable_exits as u32,
        CAP_SET_GUEST_DEBUG => (offer.guest_debug != 0).into(),
        CAP_SET_GUEST_DEBUG2 => offer.guest_debug,
        CAP_EXCEPTION_PAYLOAD => offer.exception_payload.into(),
        CAP_X86_TRIPLE_FAULT_EVENT => offer.triple_fault_event.into(),
        CAP_MANUAL_DIRTY_LOG_PROTECT2 => offer.manual_dirty_log as u32,
        CAP_VCPU_ATTRIBUTES => offer.tsc_offset.into(),
        CAP_SMALLER_MAXPHYADDR => offer.smaller_maxphyaddr.into(),
        CAP_EXT_EMUL_CPUID => offer.emulated_cpuid.into(),
        _ => 0,
    };
    value.min(i32::MAX as u32) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Offer = Offer {
        online_cpus: 8,
        max_vcpus: 4,
        max_vcpu_id: 16,
        xsave: true,
        xsave_bytes: 832,
        ..EMPTY
    };
    const EMPTY: Offer = Offer {
        online_cpus: 1,
        max_vcpus: 1,
        max_vcpu_id: 1,
        xsave: false,
        xsave_bytes: 0,
        xcr0: 0,
        tsc_scaling: false,
        max_tsc_khz: 0,
        tsc_khz: 0,
        split_irqchip: false,
        x2apic_api: 0,
        steal_time: false,
        halt_poll: false,
        mce_banks: 0,
        mce_cap: 0,
        quirks: 0,
        disable_exits: 0,
        guest_debug: 0,
        exception_payload: false,
        triple_fault_event: false,
        manual_dirty_log: 0,
        tsc_offset: false,
        emulated_cpuid: false,
        nested_format: 0,
        gpa_bits: 48,
        smaller_maxphyaddr: false,
    };

    #[test]
    fn what_firecracker_requires_is_there_whatever_the_host() {
        for capability in [
            CAP_IRQCHIP,
            CAP_IOEVENTFD,
            CAP_IRQFD,
            CAP_USER_MEMORY,
            CAP_SET_TSS_ADDR,
            CAP_PIT2,
            CAP_PIT_STATE2,
            CAP_ADJUST_CLOCK,
            CAP_DEBUGREGS,
            CAP_MP_STATE,
            CAP_VCPU_EVENTS,
            CAP_XCRS,
            CAP_XSAVE,
            CAP_EXT_CPUID,
            CAP_IMMEDIATE_EXIT,
        ] {
            assert!(check_extension(&SMALL, capability.into()) > 0, "{capability}");
        }
    }

    #[test]
    fn what_is_not_there_is_zero() {
        for capability in [CAP_NESTED_STATE, CAP_DIRTY_LOG_RING, CAP_XEN_HVM, 9999] {
            assert_eq!(check_extension(&SMALL, capability.into()), 0);
        }
        assert_eq!(check_extension(&SMALL, u64::from(CAP_IRQCHIP) | 1 << 32), 0);
        assert_eq!(check_extension(&SMALL, u64::MAX), 0);
        assert_eq!(check_extension(&EMPTY, CAP_XCRS.into()), 0);
    }

    #[test]
    fn numbers_follow_the_offer() {
        assert_eq!(check_extension(&SMALL, CAP_NR_VCPUS.into()), 4);
        assert_eq!(check_extension(&SMALL, CAP_MAX_VCPUS.into()), 4);
        assert_eq!(check_extension(&SMALL, CAP_XSAVE2.into()), 4096);
        let big = Offer { xsave_bytes: 11008, ..SMALL };
        assert_eq!(check_extension(&big, CAP_XSAVE2.into()), 11008);
        assert_eq!(check_extension(&SMALL, CAP_ADJUST_CLOCK.into()), 0xe);
        assert_eq!(check_extension(&SMALL, CAP_COALESCED_MMIO.into()), 2);
    }
}
