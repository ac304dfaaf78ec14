//! User space sets a nested state while L2 runs: the registers that it sees, and the events that it has given, are there behind
//! that, as those of whoever runs then.

mod rig;

use std::sync::atomic::Ordering;

use backend::RCX;
use gannet_vcpu::state::registers::{GivenEvents, SavedEvents};
use gannet_vcpu::{By, RunInput, UserExit, Vcpu};
use host::std_port::test as surroundings;
use rig::nested_vmx::{self, vmcs12};
use rig::{exit, nested};
use svm::Features;
use x86::Vector;
use x86::msr::{
    DEBUGCTL, LAST_BRANCH_FROM, LAST_BRANCH_TO, LAST_INT_FROM, LAST_INT_TO, PAT, PAT_RESET,
    SYSENTER_CS, SYSENTER_EIP, SYSENTER_ESP,
};
use x86::vmcb::ExitCode;
use x86::vmcs::{ExitReason, field};

/// All that is cached is written through.
const PAT_OF_L2: u64 = 0x0404_0404_0404_0404;
/// DR0 is watched, and DR6 says so.
const DEBUG: [u64; 6] = [0x1000, 0x2000, 0x3000, 0x4000, 0xffff_0ff1, 0x402];

fn state<B: backend::Backend>(vcpu: &mut Vcpu<B>) -> Vec<u8> {
    let mut state = vec![0; vcpu.nested_state_size().unwrap()];
    vcpu.nested_state(&mut state).unwrap();
    state
}

/// Gives L2, which runs, its registers, and sets the state that `first` was read before L2 ran, or that of now.
fn replace<B: backend::Backend>(vcpu: &mut Vcpu<B>, first: Option<&[u8]>, msrs: &[(u32, u64)]) {
    let untouched: Vec<_> =
        msrs.iter().map(|&(index, _)| vcpu.read_msr(index, By::Vmm).unwrap()).collect();
    for &(index, value) in msrs {
        vcpu.write_msr(index, value, By::Vmm).unwrap();
    }
    vcpu.set_debug_regs(DEBUG);
    let now = state(vcpu);
    vcpu.set_nested_state(first.unwrap_or(&now)).unwrap();
    for (&(index, value), was) in msrs.iter().zip(untouched) {
        assert_ne!(value, was, "{index:#x}");
        assert_eq!(vcpu.read_msr(index, By::Vmm), Ok(value), "{index:#x}");
    }
    assert_eq!(vcpu.debug_regs(), DEBUG);
}

#[test]
fn what_is_l2s_own_stays_on_amd() {
    const LBR: u64 = 1;
    let msrs = [
        (PAT, PAT_OF_L2),
        (DEBUGCTL, LBR),
        (LAST_BRANCH_FROM, 0x11),
        (LAST_BRANCH_TO, 0x12),
        (LAST_INT_FROM, 0x13),
        (LAST_INT_TO, 0x14),
        (SYSENTER_EIP, 0x15),
    ];
    for goes_on in [false, true] {
        let features = Features { lbr: true, ..rig::features() };
        let mut machine = nested::Hypervisor::on(features, false);
        let first = state(&mut machine.vcpu);
        // CPUID exits, L2's tables are L1's, and so are its branch records.
        machine.put(nested::BLOCK + 0x08, 1 << (18 + 32));
        machine.put(nested::BLOCK + 0x90, 1);
        machine.put(nested::BLOCK + 0xb0, nested::L1_ROOT);
        machine.put(nested::BLOCK + 0xb8, 1);
        machine.stop_in_l2();
        replace(&mut machine.vcpu, (!goes_on).then_some(&first), &msrs);
        if !goes_on {
            continue;
        }
        machine.then(|vmcb, gprs| {
            let save = &vmcb.save;
            assert_eq!((save.g_pat, save.dbgctl), (PAT_OF_L2, LBR));
            assert_eq!([save.dr6, save.dr7], [DEBUG[4], DEBUG[5]]);
            assert_eq!([save.br_from, save.br_to], [0x11, 0x12]);
            exit(ExitCode::Cpuid)(vmcb, gprs);
        });
        machine.then(|vmcb, gprs| {
            let save = &vmcb.save;
            assert_eq!((save.g_pat, save.dr7, save.dbgctl), (PAT_RESET, 0x400, 0));
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
    }
}

#[test]
fn what_is_l2s_own_stays_on_intel() {
    const RTM: u64 = 1 << 15;
    let msrs = [
        (PAT, PAT_OF_L2),
        (DEBUGCTL, RTM),
        (SYSENTER_CS, 0x10),
        (SYSENTER_ESP, 0x11),
        (SYSENTER_EIP, 0x12),
    ];
    for goes_on in [false, true] {
        let mut machine = nested_vmx::Hypervisor::with_rtm(nested_vmx::features(), &vmcs12());
        let first = state(&mut machine.vcpu);
        machine.vmlaunch();
        machine.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), nested_vmx::L2_RIP);
            surroundings::set_signal_pending(true);
            rig::vmx::exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Intr);
        surroundings::set_signal_pending(false);
        replace(&mut machine.vcpu, (!goes_on).then_some(&first), &msrs);
        if !goes_on {
            continue;
        }
        machine.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_PAT), PAT_OF_L2);
            assert_eq!(vmcs.get(field::GUEST_DEBUGCTL), RTM);
            assert_eq!(vmcs.get(field::GUEST_DR7), DEBUG[5]);
            assert_eq!(vmcs.get(field::GUEST_SYSENTER_EIP), 0x12);
            rig::vmx::shutdown(vmcs, gprs);
        });
        machine.then(|vmcs, gprs| {
            assert_eq!((vmcs.get(field::GUEST_DR7), vmcs.get(field::GUEST_DEBUGCTL)), (0x400, 0));
            rig::vmx::shutdown(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
}

/// L2 runs, the VMM has the local APIC, and this is a state without L2.
fn in_l2() -> (nested::Hypervisor, Vec<u8>) {
    let mut machine = nested::Hypervisor::new(false);
    let first = state(&mut machine.vcpu);
    machine.stop_in_l2();
    (machine, first)
}

/// RDMSR by L2 of an MSR that nobody knows, which user space refuses: KVM_RUN with `immediate_exit` makes #GP of it.
fn faults(machine: &mut nested::Hypervisor, before_it: impl FnOnce(&mut nested::Hypervisor)) {
    machine.vm.settings.user_space_msr.store(7, Ordering::Relaxed);
    machine.then(|vmcb, gprs| {
        exit(ExitCode::Msr)(vmcb, gprs);
        gprs.0[RCX] = 0x1234_5678;
    });
    assert!(matches!(machine.run(), UserExit::Msr { .. }));
    before_it(machine);
    machine.vcpu.answer_rare(|| (true, 0), |_| {});
    let completes = RunInput { immediate_exit: true, ..RunInput::default() };
    assert_eq!(machine.vcpu.run(&completes), UserExit::Immediate);
    assert_eq!(machine.vcpu.saved_events().exception.map(|e| e.vector), Some(Vector(13)));
}

/// By whatever call user space gives an event, it is for whoever runs behind the state.
#[test]
fn an_event_that_user_space_gives_stays_by_whatever_call() {
    let (mut machine, first) = in_l2();
    let sregs = machine.vcpu.sregs();
    machine.vcpu.set_sregs(&sregs, Some(Vector(0x40))).unwrap();
    machine.vcpu.set_nested_state(&first).unwrap();
    assert_eq!(machine.vcpu.interrupt_in_injection(), Some(Vector(0x40)));

    let (mut machine, first) = in_l2();
    machine.vcpu.inject_debug(true);
    machine.vcpu.set_nested_state(&first).unwrap();
    assert_eq!(machine.vcpu.saved_events().exception.map(|e| e.vector), Some(Vector(3)));

    // A KVM_RUN that a signal ends before it enters a guest is none.
    let (mut machine, first) = in_l2();
    machine.vcpu.inject_debug(true);
    surroundings::set_signal_pending(true);
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    machine.vcpu.set_nested_state(&first).unwrap();
    assert_eq!(machine.vcpu.saved_events().exception.map(|e| e.vector), Some(Vector(3)));
}

/// A fault of L2's is not L1's, also where user space has given events before it, or gives one beside it.
#[test]
fn a_fault_of_l2s_goes_with_it() {
    let given = SavedEvents { interrupt: Some(Vector(0x40)), ..SavedEvents::default() };
    let (mut machine, first) = in_l2();
    faults(&mut machine, |m| m.vcpu.restore_events(&given, GivenEvents::default()));
    machine.vcpu.set_nested_state(&first).unwrap();
    let events = machine.vcpu.saved_events();
    assert_eq!((events.exception, events.interrupt), (None, given.interrupt));

    let (mut machine, first) = in_l2();
    faults(&mut machine, |_| {});
    let sregs = machine.vcpu.sregs();
    machine.vcpu.set_sregs(&sregs, Some(Vector(0x40))).unwrap();
    machine.vcpu.set_nested_state(&first).unwrap();
    let events = machine.vcpu.saved_events();
    assert_eq!((events.exception, events.interrupt), (None, given.interrupt));
}
