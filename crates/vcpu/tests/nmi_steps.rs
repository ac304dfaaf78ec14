//! The single step by which SVM without virtual NMIs finds the moment for one, and the flags that
//! exceptions push: nobody but the hypervisor sees the step.

mod rig;

use backend::Gprs;
use gannet_vcpu::{
    RunInput, UserExit,
    state::registers::{GivenEvents, SavedEvents},
};
use rig::{Machine, TestVcpu, exit, shutdown, vcpu_of};
use x86::vmcb::{ExitCode, Vmcb, event};
use x86::{Exception, Vector};

const TF: u64 = x86::Rflags::TF.bits();
const RF: u64 = x86::Rflags::RF.bits();
const BS: u64 = 1 << 14;
const NMI: u64 = event::VALID | event::NMI | 2;
const DB_EXIT: ExitCode = ExitCode(0x41);

/// What an entry injects, as the hardware finds it: the model clears it before it plays a step.
fn entered(vmcb: &Vmcb) -> u64 {
    vmcb.save.rflags & (TF | RF)
}

/// A guest in the shadow of STI, with an NMI that waits.
fn waiting() -> TestVcpu {
    let mut v = vcpu_of(&Machine::default());
    let events = SavedEvents { interrupt_shadow: true, nmi_pending: 1, ..Default::default() };
    v.restore_events(
        &events,
        GivenEvents { interrupt_shadow: true, nmi_pending: true, triple_fault: false },
    );
    v
}

fn run(v: &mut TestVcpu) {
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn an_instruction_that_exits_under_the_step_raises_no_debug_exception() {
    let mut v = waiting();
    let script = v.backend().cpu().inner();
    script.then(|vmcb, gprs| {
        assert_eq!(entered(vmcb), TF | RF, "the step");
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    script.injects(NMI);
    script.then(|vmcb, gprs| {
        assert_eq!(entered(vmcb), 0);
        shutdown(vmcb, gprs);
    });
    run(&mut v);
}

#[test]
fn an_exception_does_not_push_the_steps_flags() {
    let mut v = waiting();
    let script = v.backend().cpu().inner();
    script.then(|vmcb, gprs| {
        assert_eq!(entered(vmcb), TF | RF, "the step");
        exit(ExitCode::Rdpmc)(vmcb, gprs);
    });
    script.then(|vmcb, gprs| {
        // The #GP goes first; RF is its own, as a fault's.
        assert_eq!(entered(vmcb), RF);
        vmcb.save.rflags &= !RF;
        vmcb.control.int_state = 0;
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    script.injects(NMI);
    script.then(shutdown);
    run(&mut v);
}

#[test]
fn the_trap_of_the_step_leaves_nothing_behind() {
    let mut v = waiting();
    let script = v.backend().cpu().inner();
    script.then(|vmcb, _| {
        vmcb.control.exit_code = DB_EXIT.0;
        vmcb.control.int_state = 0;
        vmcb.save.rip += 1;
        vmcb.save.rflags &= !RF;
        vmcb.save.dr6 |= BS;
    });
    script.injects(NMI);
    script.then(|vmcb, gprs| {
        assert_eq!((entered(vmcb), vmcb.save.dr6 & BS), (0, 0));
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    script.then(shutdown);
    run(&mut v);
    assert_eq!(v.debug_regs()[4], 0xffff_0ff0);
}

/// No processor clears BS: it may be there from a step that the guest made long before.
#[test]
fn the_guests_own_bs_outlives_the_step() {
    let mut v = waiting();
    v.set_debug_regs([0, 0, 0, 0, 0xffff_0ff0 | BS, 0x400]);
    let script = v.backend().cpu().inner();
    script.then(|vmcb, gprs| {
        assert_eq!((entered(vmcb), vmcb.save.dr6 & BS), (TF | RF, BS));
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    script.injects(NMI);
    script.then(|vmcb, gprs| {
        assert_eq!((entered(vmcb), vmcb.save.dr6 & BS), (0, BS));
        shutdown(vmcb, gprs);
    });
    run(&mut v);
}

#[test]
fn user_space_does_not_see_the_step() {
    let mut v = waiting();
    v.backend().cpu().inner().then(|vmcb: &mut Vmcb, gprs: &mut Gprs| {
        assert_eq!(entered(vmcb), TF | RF, "the step");
        exit(ExitCode::Ioio)(vmcb, gprs);
        vmcb.control.exit_info_1 = (0x80 << 16) | (1 << 4);
        vmcb.control.exit_info_2 = vmcb.save.rip + 2;
    });
    assert!(matches!(v.run(&RunInput::default()), UserExit::Io { port: 0x80, .. }));
    assert!(!v.regs().rflags.intersects(x86::Rflags::TF | x86::Rflags::RF));
}

#[test]
fn faults_push_rf_and_traps_and_aborts_do_not() {
    for vector in (0..32u8).filter(|v| *v != 2) {
        let mut v = vcpu_of(&Machine::default());
        let exception = Exception { vector: Vector(vector), error_code: None, payload: None };
        let events = SavedEvents { exception: Some(exception), ..Default::default() };
        v.restore_events(&events, GivenEvents::default());
        let pushes = !matches!(vector, 1 | 3 | 4 | 8 | 18);
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            assert_eq!(vmcb.save.rflags & RF != 0, pushes, "vector {vector}");
            shutdown(vmcb, gprs);
        });
        run(&mut v);
    }
}
