//! Exits that a VMM gives up, what a guest that waits by itself needs then, and waits that do nothing.

mod rig;

use core::sync::atomic::Ordering::Relaxed;

use backend::Gprs;
use cpu::ModelVmcs;
use gannet_vcpu::state::registers::{GivenEvents, SavedEvents};
use gannet_vcpu::{By, RunInput, UserExit};
use host::std_port::test;
use rig::vmx::step;
use vm::vm::Format;
use x86::vmcb::{ExitCode, Vmcb};
use x86::vmcs::{ExitReason, ProcControls, ProcControls2, field};
use x86::{Exception, Vector};

const MWAIT: u64 = 1;
const HLT: u64 = 2;
const PAUSE: u64 = 4;
const CSTATE: u64 = 8;

const SVM_PAUSE: u32 = 1 << 23;
const SVM_HLT: u32 = 1 << 24;
const SVM_MONITOR_MWAIT: u32 = 3 << 10;

/// The intercepts that a guest under SVM runs with.
fn svm_intercepts(exits: u64) -> [u32; 2] {
    let machine = rig::Machine {
        features: svm::Features { pause_filter: true, ..rig::features() },
        ..Default::default()
    };
    let vm = rig::vm(&machine);
    vm.settings.disable_exits.store(exits, Relaxed);
    let mut v = rig::add_vcpu(&machine, &vm, 0);
    let (to_me, from_guest) = std::sync::mpsc::channel();
    v.backend().cpu().inner().then(move |vmcb: &mut Vmcb, gprs: &mut Gprs| {
        to_me.send([vmcb.control.intercepts[3], vmcb.control.intercepts[4]]).unwrap();
        rig::shutdown(vmcb, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    from_guest.recv().unwrap()
}

#[test]
fn each_exit_under_svm_is_given_up_by_itself() {
    let all = svm_intercepts(0);
    assert_eq!(all[0] & (SVM_PAUSE | SVM_HLT), SVM_PAUSE | SVM_HLT);
    assert_eq!(all[1] & SVM_MONITOR_MWAIT, SVM_MONITOR_MWAIT);
    for (exits, gone) in [
        (MWAIT, [0, SVM_MONITOR_MWAIT]),
        (HLT, [SVM_HLT, 0]),
        (PAUSE, [SVM_PAUSE, 0]),
        (CSTATE, [0, 0]),
        (15, [SVM_HLT | SVM_PAUSE, SVM_MONITOR_MWAIT]),
    ] {
        let left = svm_intercepts(exits);
        assert_eq!(left, [all[0] & !gone[0], all[1] & !gone[1]], "{exits:#x}");
    }
}

fn vmx_features() -> vmx::Features {
    let mut features = rig::vmx::features_with_timer();
    features.primary.base |= ProcControls::MWAIT | ProcControls::MONITOR;
    features.secondary.base |= ProcControls2::PAUSE_LOOP;
    features
}

fn vmx_vcpu(exits: u64) -> rig::vmx::VmxVcpu {
    rig::vmx::vcpu_with(vmx_features(), Format::npt(4, 0), |vm| {
        vm.settings.disable_exits.store(exits, Relaxed);
    })
}

fn vmx_controls(exits: u64) -> (u32, u32) {
    let mut v = vmx_vcpu(exits);
    let (to_me, from_guest) = std::sync::mpsc::channel();
    let look = step(move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        to_me.send((vmcs.get(field::PROC_CONTROLS), vmcs.get(field::PROC_CONTROLS2))).unwrap();
        rig::vmx::exit(ExitReason::Wbinvd)(vmcs, gprs);
    });
    rig::vmx::play(&mut v, [look]);
    from_guest.recv().unwrap()
}

#[test]
fn each_exit_under_vmx_is_given_up_by_itself() {
    let all = vmx_controls(0);
    let waits = (ProcControls::MWAIT | ProcControls::MONITOR).bits();
    let (hlt, pause) = (ProcControls::HLT.bits(), ProcControls2::PAUSE_LOOP.bits());
    assert_eq!((all.0 & (waits | hlt), all.1 & pause), (waits | hlt, pause));
    for (exits, gone) in [
        (MWAIT, (waits, 0)),
        (HLT, (hlt, 0)),
        (PAUSE, (0, pause)),
        (CSTATE, (0, 0)),
        (15, (waits | hlt, pause)),
    ] {
        assert_eq!(vmx_controls(exits), (all.0 & !gone.0, all.1 & !gone.1), "{exits:#x}");
    }
}

#[test]
fn a_guest_that_waits_by_mwait_is_not_watched_by_a_timer_that_may_stand() {
    use backend::DeadlineWatch;
    for (exits, watches) in [(0, true), (HLT | PAUSE | CSTATE, true), (MWAIT, false)] {
        assert_eq!(vmx_vcpu(exits).backend().can_watch(), watches, "{exits:#x}");
    }
}

/// The guest halts and an interrupt of the host's comes; then `change` is made, and what the next entry
/// finds is the answer.
fn activity_after(change: impl FnOnce(&mut rig::vmx::VmxVcpu)) -> u32 {
    let mut v = vmx_vcpu(HLT);
    rig::vmx::play(
        &mut v,
        [step(|vmcs, gprs| {
            vmcs.set(field::GUEST_ACTIVITY, 1);
            rig::vmx::exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
        })],
    );
    change(&mut v);
    let (to_me, from_guest) = std::sync::mpsc::channel();
    let look = step(move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        to_me.send(vmcs.get(field::GUEST_ACTIVITY)).unwrap();
        rig::vmx::exit(ExitReason::Wbinvd)(vmcs, gprs);
    });
    rig::vmx::play(&mut v, [look]);
    from_guest.recv().unwrap()
}

/// An entry with an exception, or with a shadow, is refused while the guest halts.
#[test]
fn what_is_no_interrupt_ends_a_halt_before_the_entry() {
    assert_eq!(activity_after(|_| {}), 1, "nothing came: it goes on halting");
    let raised = activity_after(|v| {
        let exception = Exception { vector: Vector(13), error_code: Some(0), payload: None };
        let events = SavedEvents {
            exception: Some(exception),
            exception_injected: true,
            ..SavedEvents::default()
        };
        v.restore_events(&events, GivenEvents::default());
    });
    assert_eq!(raised, 0, "an exception");
    let shadowed = activity_after(|v| {
        let events = SavedEvents { interrupt_shadow: true, ..SavedEvents::default() };
        v.restore_events(&events, GivenEvents { interrupt_shadow: true, ..GivenEvents::default() });
    });
    assert_eq!(shadowed, 0, "a shadow");
    let moved = activity_after(|v| {
        let mut regs = v.regs();
        regs.rip = 0x1000;
        v.set_regs(&regs);
    });
    assert_eq!(moved, 0, "another RIP");
}

#[test]
fn monitor_and_mwait_cost_one_vmrun_and_do_nothing() {
    for code in [ExitCode::Monitor, ExitCode::Mwait, ExitCode::MwaitConditional] {
        let ten = rig::cost_of(move |vmcb, gprs| rig::exit(code)(vmcb, gprs));
        rig::assert_only_vmrun(&ten);
    }
    let ten = rig::vmx::cost_of(|vmcs, gprs| rig::vmx::exit(ExitReason::Mwait)(vmcs, gprs));
    // RSP too, as at any exit that is not one of the frequent ones.
    assert_eq!(rig::vmx::reads_and_writes(&ten), (5, 1));
}

#[test]
fn the_kernel_is_told_around_each_run_of_a_guest_without_store_bypass() {
    const VIRT_SPEC_CTRL: u32 = 0xc001_011f;
    let mut v = rig::vcpu();
    let run = |v: &mut rig::TestVcpu| {
        let before = test::guest_ssbd_changes();
        let (to_me, from_guest) = std::sync::mpsc::channel();
        v.backend().cpu().inner().then(move |vmcb: &mut Vmcb, gprs: &mut Gprs| {
            to_me.send(test::guest_ssbd_changes() - before).unwrap();
            rig::shutdown(vmcb, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        (from_guest.recv().unwrap(), test::guest_ssbd_changes() - before)
    };
    assert_eq!(run(&mut v), (0, 0));
    v.write_msr(VIRT_SPEC_CTRL, 4, By::Vmm).unwrap();
    assert_eq!(run(&mut v), (1, 2));
    v.write_msr(VIRT_SPEC_CTRL, 0, By::Vmm).unwrap();
    assert_eq!(run(&mut v), (0, 0));
}
