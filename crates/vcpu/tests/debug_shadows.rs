//! #DB in the shadow of STI or MOV SS on Intel: behind it an entry asks for a pending step exactly if the
//! guest steps, which the model CPU checks.

mod rig;

use backend::{Registers, ShadowBy};
use cpu::ModelVmcs;
use gannet_vcpu::state::registers::{GivenEvents, SavedEvents};
use gannet_vcpu::{RunInput, UserExit};
use host::std_port::test as surroundings;
use rig::vmx::{VmxVcpu, exit, shutdown, step, vcpu};
use x86::vmcs::{ExitReason, event, field, interruptibility};

const ENABLE: u32 = 1;
const SINGLESTEP: u32 = 2;
const HARDWARE: u32 = 0x2_0000;
const TF: u64 = 1 << 8;
const IF: u64 = 1 << 9;
const BS: u64 = 1 << 14;

/// A #DB of this type, for this, in a shadow.
fn debug_exit(vmcs: &mut ModelVmcs, kind: u32, why: u64, shadow: u32, flags: u64) {
    exit(ExitReason::ExceptionOrNmi)(vmcs, &mut Default::default());
    vmcs.set(field::INSTRUCTION_LENGTH, 1);
    vmcs.set(field::EXIT_INTERRUPTION, event::VALID | kind | 1);
    vmcs.set(field::EXIT_QUALIFICATION, why);
    vmcs.set(field::GUEST_INTERRUPTIBILITY, shadow);
    vmcs.set(field::GUEST_PENDING_DEBUG, 0);
    vmcs.set(field::GUEST_RFLAGS, 2 | flags);
}

/// Has the guest make one, and looks at the entry behind it.
fn behind(v: &mut VmxVcpu, kind: u32, shadow: u32, look: impl Fn(&ModelVmcs) + Send + 'static) {
    let model = &mut v.backend().cpu().inner().vmx;
    model.then(move |vmcs, _| debug_exit(vmcs, kind, BS, shadow, TF | IF));
    model.then(move |vmcs, gprs| {
        look(vmcs);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn a_step_of_the_guests_in_a_shadow_is_delivered() {
    for shadow in [interruptibility::STI, interruptibility::MOV_SS] {
        behind(&mut vcpu(), event::EXCEPTION, shadow, |vmcs| {
            let injected = vmcs.get(field::ENTRY_INTERRUPTION);
            assert_eq!(injected, event::VALID | event::EXCEPTION | 1);
        });
    }
}

/// User space takes the exception away before it was delivered, and leaves the shadow.
#[test]
fn a_step_that_is_taken_away_pends_again() {
    for shadow in [interruptibility::STI, interruptibility::MOV_SS] {
        let mut v = vcpu();
        v.backend().cpu().inner().vmx.then(move |vmcs, _| {
            debug_exit(vmcs, event::EXCEPTION, BS, shadow, TF | IF);
            surroundings::set_signal_pending(true);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Intr);
        surroundings::set_signal_pending(false);
        assert!(v.saved_events().exception.is_some());
        v.restore_events(&SavedEvents::default(), GivenEvents::default());
        v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
            assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
            assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY) & 3, shadow);
            assert_eq!(vmcs.get(field::GUEST_PENDING_DEBUG) & BS, BS);
            shutdown(vmcs, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    }
}

#[test]
fn a_delivery_that_is_interrupted_is_begun_again() {
    let mut v = vcpu();
    v.backend().cpu().inner().vmx.then(|vmcs, _| {
        debug_exit(vmcs, event::EXCEPTION, BS, interruptibility::STI, TF | IF);
    });
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        // Any exit will do. The pending step went with the delivery.
        exit(ExitReason::Pause)(vmcs, gprs);
        vmcs.set(field::IDT_VECTORING, event::VALID | event::EXCEPTION | 1);
        vmcs.set(field::GUEST_PENDING_DEBUG, 0);
    });
    v.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn int1_ends_the_shadow() {
    let mov_ss = interruptibility::MOV_SS;
    behind(&mut vcpu(), event::PRIVILEGED_SOFT_EXCEPTION, mov_ss, |vmcs| {
        let injected = vmcs.get(field::ENTRY_INTERRUPTION);
        assert_eq!(injected, event::VALID | event::PRIVILEGED_SOFT_EXCEPTION | 1);
        assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY), 0);
    });
}

/// The guest makes a #DB that user space hears of.
fn stops(v: &mut VmxVcpu, why: u64, flags: u64) {
    let sti = interruptibility::STI;
    v.backend()
        .cpu()
        .inner()
        .vmx
        .then(move |vmcs, _| debug_exit(vmcs, event::EXCEPTION, why, sti, flags));
    let ended = v.run(&RunInput::default());
    assert!(matches!(ended, UserExit::Debug { exception: 1, .. }), "{ended:?}");
}

/// The next entry has neither a shadow nor a step that waits.
fn goes_on(v: &mut VmxVcpu) {
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY) & 3, 0);
        assert_eq!(vmcs.get(field::GUEST_PENDING_DEBUG), 0);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn a_debuggers_step_over_sti_is_the_last_of_it() {
    for again in [false, true] {
        let mut v = vcpu();
        v.set_guest_debug(ENABLE | SINGLESTEP, [0; 8]);
        stops(&mut v, BS, TF | IF);
        if again {
            v.set_guest_debug(ENABLE | SINGLESTEP, [0; 8]);
        }
        goes_on(&mut v);
    }
}

/// The instruction behind MOV SS is done by the hypervisor: the debugger hears of that step once, and the guest never.
#[test]
fn a_step_that_the_debugger_has_heard_of_is_no_guests() {
    let mut v = vcpu();
    v.set_guest_debug(ENABLE | SINGLESTEP, [0; 8]);
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        exit(ExitReason::Cpuid)(vmcs, gprs);
        vmcs.set(field::INSTRUCTION_LENGTH, 2);
        vmcs.set(field::GUEST_INTERRUPTIBILITY, interruptibility::MOV_SS);
        vmcs.set(field::GUEST_PENDING_DEBUG, BS);
        vmcs.set(field::GUEST_RFLAGS, 2 | TF);
    });
    let ended = v.run(&RunInput::default());
    assert!(matches!(ended, UserExit::Debug { exception: 1, .. }), "{ended:?}");
    v.set_guest_debug(0, [0; 8]);
    goes_on(&mut v);
}

/// A breakpoint on HLT behind STI: the interrupt that is to wake it is not taken before it.
#[test]
fn a_breakpoint_before_an_instruction_ends_no_shadow() {
    let mut v = vcpu();
    v.set_guest_debug(ENABLE | HARDWARE, [0, 0, 0, 0, 0, 0, 0, 0x402]);
    stops(&mut v, 1, IF);
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY) & 3, interruptibility::STI);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn a_shadow_that_a_debugger_meets_or_sets_is_over() {
    let mut v = vcpu();
    let b = v.backend();
    b.set_rflags(b.rflags() | x86::Rflags::IF);
    b.set_interrupt_shadow(true);
    v.set_guest_debug(ENABLE | SINGLESTEP, [0; 8]);
    goes_on(&mut v);
    v.backend().set_interrupt_shadow(true);
    goes_on(&mut v);
}

#[test]
fn behind_a_debugger_there_are_shadows_again() {
    let mut v = vcpu();
    v.set_guest_debug(ENABLE | SINGLESTEP, [0; 8]);
    v.set_guest_debug(0, [0; 8]);
    let b = v.backend();
    b.set_rflags(b.rflags() | x86::Rflags::IF);
    b.set_interrupt_shadow(true);
    assert!(b.interrupt_shadow());
}

#[test]
fn a_step_of_the_guests_that_a_debugger_hears_of_does_not_end_the_vm() {
    let mut v = vcpu();
    v.set_guest_debug(ENABLE | HARDWARE, [0; 8]);
    stops(&mut v, BS, TF | IF);
    goes_on(&mut v);
}

#[test]
fn int1_says_nothing_in_dr6() {
    let mut v = vcpu();
    // A transaction was met, and a step made, some time ago.
    let old = 0xffff_4ff0 & !(1 << 16);
    v.set_debug_regs([0, 0, 0, 0, old, 0x400]);
    let model = &mut v.backend().cpu().inner().vmx;
    model.then(|vmcs, _| debug_exit(vmcs, event::PRIVILEGED_SOFT_EXCEPTION, 0, 0, 0));
    model.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.debug_regs()[4], 0xffff_4ff0);
    v.set_guest_debug(ENABLE | HARDWARE, [0; 8]);
    let model = &mut v.backend().cpu().inner().vmx;
    model.then(|vmcs, _| debug_exit(vmcs, event::PRIVILEGED_SOFT_EXCEPTION, 0, 0, 0));
    let ended = v.run(&RunInput::default());
    assert!(matches!(ended, UserExit::Debug { dr6: 0xffff_0ff0, .. }), "{ended:?}");
}

/// The debug registers are the guest's for the run: what it wrote to DR6 without an exit is what a step in the same run adds to.
#[test]
fn a_step_over_what_the_loop_answers_adds_to_the_guests_own_dr6() {
    const BD: u64 = 1 << 13;
    const RESET: u64 = 0xffff_0ff0;
    for (had, written) in [(RESET | 0xf, RESET), (RESET, RESET | BD)] {
        let mut v = vcpu();
        v.set_debug_regs([0, 0, 0, 0, had, 0x401]);
        let model = &mut v.backend().cpu().inner().vmx;
        model.guest_writes_dr6 = Some(written);
        model.then(|vmcs, gprs| {
            exit(ExitReason::Cpuid)(vmcs, gprs);
            vmcs.set(field::GUEST_RFLAGS, 2 | TF);
        });
        model.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), event::VALID | event::EXCEPTION | 1);
            shutdown(vmcs, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        assert_eq!(v.debug_regs()[4], written | BS);
    }
}

#[test]
fn a_debuggers_general_detect_stops_before_the_access() {
    let mut v = vcpu();
    v.set_guest_debug(ENABLE | HARDWARE, [0, 0, 0, 0, 0, 0, 0, 1 << 13 | 0x400]);
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        exit(ExitReason::DrAccess)(vmcs, gprs);
        vmcs.set(field::GUEST_RIP, 0x2000);
    });
    let pc = v.backend().segment(backend::SegmentName::Cs).base + 0x2000;
    let stopped = UserExit::Debug { exception: 1, pc, dr6: 0xffff_2ff0, dr7: 0x2400 };
    assert_eq!(v.run(&RunInput::default()), stopped);
    assert_eq!(v.debug_regs()[4..], [0xffff_0ff0, 0x400], "the guest's own");
}

#[test]
fn a_plain_step_needs_nothing() {
    rig::vmx::play(&mut vcpu(), [step(|vmcs, _| debug_exit(vmcs, event::EXCEPTION, BS, 0, TF))]);
}

/// KVM_GET_VCPU_EVENTS tells which of the two instructions it was, and KVM_SET_VCPU_EVENTS makes its shadow again: that of MOV SS
/// holds off more.
#[test]
fn a_shadow_is_saved_and_restored_by_its_instruction() {
    let cases = [
        (interruptibility::STI, IF, ShadowBy::Sti),
        (interruptibility::MOV_SS, IF, ShadowBy::MovSs),
        (interruptibility::MOV_SS, 0, ShadowBy::MovSs),
    ];
    for (shadow, flags, by) in cases {
        let mut v = vcpu();
        v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
            shutdown(vmcs, gprs);
            vmcs.set(field::GUEST_RFLAGS, 2 | flags);
            vmcs.set(field::GUEST_INTERRUPTIBILITY, shadow);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        let saved = v.saved_events();
        assert_eq!((saved.interrupt_shadow, saved.shadow_by), (true, by));
        let given = GivenEvents { interrupt_shadow: true, ..GivenEvents::default() };
        v.restore_events(&SavedEvents { interrupt_shadow: false, ..saved }, given);
        assert!(!v.saved_events().interrupt_shadow);
        v.restore_events(&saved, given);
        assert_eq!(v.saved_events(), saved);
        v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY) & 3, shadow);
            shutdown(vmcs, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    }
}
