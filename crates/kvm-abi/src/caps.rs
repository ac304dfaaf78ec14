//! What KVM_CHECK_EXTENSION answers (KVM API §4.4), on /dev/kvm and on a VM file alike.
//!
//! An [`Offer`] says what this host and the floors below can do; everything else is fixed. The answers
//! stand in `table.rs`.

use crate::uapi::capability::*;
use crate::uapi::clock::CLOCK_VALID_FLAGS;
use crate::uapi::irqchip::MAX_IRQ_ROUTES;
use crate::uapi::memory::{ADDRESS_SPACES, USER_MEM_SLOTS};
use crate::uapi::run::{COALESCED_MMIO_PAGE_OFFSET, SYNC_X86_VALID_FIELDS};
use crate::uapi::vcpu_state::NESTED_FORMAT_SVM;

/// The only version of the interface there ever was (KVM API §4.1).
pub const API_VERSION: i32 = 12;

/// What this host and the floors below can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
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
    /// There is KVM_GET_EMULATED_CPUID.
    pub emulated_cpuid: bool,
    /// Whose nested state it would be: KVM_STATE_NESTED_FORMAT_*.
    pub nested_format: u16,
    /// Highest guest-physical address plus one, in bits.
    pub gpa_bits: u32,
    /// Guests may have a smaller MAXPHYADDR than the host: their tables are walked in software.
    pub smaller_maxphyaddr: bool,
    /// Guests may be hypervisors that use an enlightened VMCS, and find as much of Hyper-V's interface.
    pub hyperv: bool,
    /// Hardware threads never share a core.
    pub no_smt: bool,
}

impl Offer {
    /// Fractional bits of a ratio that the CPU scales the TSC by, if it does (APM vol. 2 §15.30.5, SDM vol. 3C §26.3.3).
    pub fn tsc_ratio_bits(&self) -> Option<u32> {
        let bits = if self.nested_format == NESTED_FORMAT_SVM { 32 } else { 48 };
        self.tsc_scaling.then_some(bits)
    }
}

macro_rules! answers {
    (($offer:ident) $($cap:ident $number:literal => $answer:expr, $note:literal;)*) => {
        /// What KVM_CHECK_EXTENSION answers for `capability`.
        pub fn check_extension($offer: &Offer, capability: u64) -> i32 {
            let Ok(capability) = u32::try_from(capability) else {
                // Cut to 32 bits, such a number would name a capability that was not asked for.
                return 0;
            };
            let value: u32 = match capability {
                $($cap => $answer,)*
                // What nobody knows is not there, as the API has it: a VMM asks for newer ones than
                // these.
                _ => 0,
            };
            // A negative answer would be an errno to the VMM.
            value.min(i32::MAX as u32) as i32
        }
    };
}

capabilities!(answers);

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Offer =
        Offer { max_vcpus: 4, max_vcpu_id: 16, xsave: true, xsave_bytes: 832, ..EMPTY };
    const EMPTY: Offer = Offer {
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
        hyperv: false,
        no_smt: false,
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
        for capability in [CAP_DIRTY_LOG_RING, CAP_XEN_HVM, 9999] {
            assert_eq!(check_extension(&SMALL, capability.into()), 0);
        }
        assert_eq!(check_extension(&SMALL, u64::from(CAP_IRQCHIP) | 1 << 32), 0);
        assert_eq!(check_extension(&SMALL, u64::MAX), 0);
        assert_eq!(check_extension(&EMPTY, CAP_XCRS.into()), 0);
        let of_hyperv = [CAP_HYPERV, CAP_HYPERV_ENLIGHTENED_VMCS, CAP_HYPERV_CPUID];
        let hyperv = Offer { hyperv: true, ..SMALL };
        for capability in of_hyperv {
            assert_eq!(check_extension(&SMALL, capability.into()), 0);
            assert_eq!(check_extension(&hyperv, capability.into()), 1);
        }
        for capability in [CAP_HYPERV_SPIN, CAP_HYPERV_SYNIC2, CAP_HYPERV_ENFORCE_CPUID] {
            assert_eq!(check_extension(&hyperv, capability.into()), 0);
        }
    }

    #[test]
    fn numbers_follow_the_offer() {
        let few = Offer { max_vcpus: 2, ..SMALL };
        assert_eq!(check_extension(&few, CAP_NR_VCPUS.into()), 2);
        let many = Offer { max_vcpus: 4096, ..SMALL };
        let online = host::smp::online_cpus();
        assert!(online < host::smp::max_cpus() as u32);
        assert_eq!(check_extension(&many, CAP_NR_VCPUS.into()), online as i32);
        assert_eq!(check_extension(&SMALL, CAP_MAX_VCPUS.into()), 4);
        assert_eq!(check_extension(&SMALL, CAP_NESTED_STATE.into()), 8320);
        let svm = Offer { nested_format: 1, ..SMALL };
        assert_eq!(check_extension(&svm, CAP_NESTED_STATE.into()), 4224);
        assert_eq!(check_extension(&SMALL, CAP_XSAVE2.into()), 4096);
        let big = Offer { xsave_bytes: 11008, ..SMALL };
        assert_eq!(check_extension(&big, CAP_XSAVE2.into()), 11008);
        assert_eq!(check_extension(&SMALL, CAP_ADJUST_CLOCK.into()), 0xe);
        assert_eq!(check_extension(&SMALL, CAP_COALESCED_MMIO.into()), 2);
    }
}
