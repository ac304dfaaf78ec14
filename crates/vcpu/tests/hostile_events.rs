//! Events, debug registers and MSRs as a hostile VMM gives them: whatever the words, the CPU is never
//! handed one that it faults on. The model CPU refuses those by itself: see `cpu::legal`.

mod rig;

use gannet_vcpu::{
    RunInput, UserExit,
    state::registers::{GivenEvents, SavedEvents},
};
use proptest::prelude::*;
use rig::{Machine, vcpu_of, vmx};
use x86::{Dr7, Exception, Vector};

/// An event as KVM_SET_VCPU_EVENTS gives it once KVM_CAP_EXCEPTION_PAYLOAD is on.
fn with_payload(vector: u8, payload: u64) -> SavedEvents {
    let exception = Exception { vector: Vector(vector), error_code: None, payload: Some(payload) };
    SavedEvents { exception: Some(exception), ..SavedEvents::default() }
}

/// DR6 and DR7 as a VMM finds them afterwards.
fn on_intel(events: &SavedEvents, dr6: u64, dr7: u64) -> [u64; 2] {
    let mut v = vmx::vcpu();
    v.set_debug_regs([1, 2, 3, 4, dr6, dr7]);
    v.restore_events(events, GivenEvents::default());
    for _ in 0..2 {
        v.backend().cpu().inner().vmx.then(vmx::shutdown);
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    }
    let [.., dr6, dr7] = v.debug_regs();
    [dr6, dr7]
}

fn on_amd(events: &SavedEvents, dr6: u64, dr7: u64) {
    let mut v = vcpu_of(&Machine::default());
    v.set_debug_regs([1, 2, 3, 4, dr6, dr7]);
    v.restore_events(events, GivenEvents::default());
    v.backend().cpu().inner().then(rig::shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn a_debug_exceptions_payload_never_reaches_dr6_as_it_is() {
    let events = with_payload(1, 1 << 40 | 1 << 14);
    on_amd(&events, 0xffff_0ff0, 0x402);
    assert_eq!(on_intel(&events, 0xffff_0ff0, 0x402), [0xffff_4ff0, 0x402]);
}

#[test]
fn bits_that_are_active_low_come_out_clear() {
    // A transaction was active (SDM vol. 3B §18.2.3): bit 16 of DR6 is clear then.
    assert_eq!(on_intel(&with_payload(1, 1 << 16 | 1), 0xffff_0ff0, 0x400)[0], 0xfffe_0ff1);
}

proptest! {
    #[test]
    fn no_payload_and_no_debug_register_is_one_that_the_cpu_faults_on(
        vector in prop_oneof![Just(1u8), Just(14), (0..32u8).prop_filter("NMI", |v| *v != 2)],
        payload in prop_oneof![any::<u64>(), (0..64u32).prop_map(|bit| 1 << bit)],
        dr6 in any::<u32>(),
        dr7 in any::<u32>(),
        upper in prop_oneof![3 => Just(0u64), 1 => any::<u64>()],
    ) {
        // The system call refuses upper halves; the registers do so once more by their types.
        let (dr6, dr7) = (u64::from(dr6) | upper << 32, u64::from(dr7) | upper << 32);
        let events = with_payload(vector, payload);
        on_amd(&events, dr6, dr7);
        let [dr6, dr7] = on_intel(&events, dr6, dr7);
        prop_assert_eq!((dr6 | dr7) >> 32, 0);
    }

    /// Saved without payloads, the exception leaves its bits in the registers before it is taken.
    #[test]
    fn a_payload_that_is_delivered_early_does_as_little(payload in any::<u64>(), dr7 in any::<u32>()) {
        let mut v = vmx::vcpu();
        v.set_debug_regs([1, 2, 3, 4, 0, dr7.into()]);
        v.restore_events(&with_payload(1, payload), GivenEvents::default());
        v.deliver_exception_payload();
        v.backend().cpu().inner().vmx.then(vmx::shutdown);
        prop_assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        prop_assert_eq!(v.debug_regs()[4] >> 32, 0);
    }
}

/// A CPU may take the exit of the NMI window while STI blocks, before anything else, and again.
#[test]
fn an_nmi_behind_the_shadow_of_sti_waits_for_the_interrupt_window() {
    use x86::vmcs::{ExitReason, ProcControls, event, field, interruptibility};
    let mut v = vmx::vcpu();
    let mut regs = v.regs();
    regs.rflags = x86::Rflags::IF | x86::Rflags::FIXED;
    v.set_regs(&regs);
    let waits = SavedEvents { interrupt_shadow: true, nmi_pending: 1, ..SavedEvents::default() };
    v.restore_events(
        &waits,
        GivenEvents { interrupt_shadow: true, nmi_pending: true, triple_fault: false },
    );
    let script = &mut v.backend().cpu().inner().vmx;
    script.then(|vmcs, gprs| {
        let controls = ProcControls::from_bits_retain(vmcs.get(field::PROC_CONTROLS));
        assert!(!controls.contains(ProcControls::NMI_WINDOW), "an exit without end");
        assert!(controls.contains(ProcControls::INTERRUPT_WINDOW));
        vmcs.set(field::GUEST_INTERRUPTIBILITY, 0);
        vmx::exit(ExitReason::InterruptWindow)(vmcs, gprs);
    });
    script.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), event::VALID | event::NMI | 2);
        let controls = ProcControls::from_bits_retain(vmcs.get(field::PROC_CONTROLS));
        assert!(!controls.contains(ProcControls::INTERRUPT_WINDOW), "that was it");
        assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY) & interruptibility::STI, 0);
        vmx::shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

/// #DB clears GD when it is delivered, whatever it carries; one that was injected before has done so already.
#[test]
fn a_debug_exception_without_payload_ends_general_detect() {
    const DR7: u64 = 0x400;
    for (injected, payload) in [(false, None), (false, Some(0x2000)), (true, None)] {
        let exception = Exception { vector: Vector(1), error_code: None, payload };
        let events = SavedEvents {
            exception: Some(exception),
            exception_injected: injected,
            ..SavedEvents::default()
        };
        let left = if injected { DR7 | Dr7::GD } else { DR7 };
        let before = [1, 2, 3, 4, 0xffff_0ff0, DR7 | Dr7::GD];

        let mut v = vmx::vcpu();
        v.set_debug_regs(before);
        v.restore_events(&events, GivenEvents::default());
        v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
            assert_eq!(vmcs.get(x86::vmcs::field::GUEST_DR7), left);
            vmx::shutdown(vmcs, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);

        let mut v = vcpu_of(&Machine::default());
        v.set_debug_regs(before);
        v.restore_events(&events, GivenEvents::default());
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            assert_eq!(vmcb.save.dr7, left);
            rig::shutdown(vmcb, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    }
}
