//! A VMM with a local APIC of its own saves a guest that is a hypervisor while an interrupt waits, and restores it on a vCPU that has seen
//! nothing of it: what waited for L1 waits for L1 still, and is not forced in where nobody takes it.

mod rig;

use ::nested_vmx::Vmcs12;
use gannet_vcpu::{
    RunInput, UserExit,
    state::{
        registers::{GivenEvents, SavedEvents},
        smm::SavedSmi,
    },
};
use host::std_port::test as surroundings;
use rig::{
    exit as svm_exit,
    nested::{BLOCK, Hypervisor, L1_RIP, L2_RIP, SMBASE},
    nested_vmx::{self, features, vmcs12},
    shutdown, unknown, vmx,
};
use x86::{
    Rflags, Vector,
    vmcb::{ExitCode, Intercept3, event},
    vmcs::{self, ExitReason, ProcControls2, field},
};

/// The third word of intercepts is the upper half of what lies there.
const THIRD: u64 = BLOCK + 0x08;
const GIVEN: Vector = Vector(0x40);
const ALL: GivenEvents =
    GivenEvents { interrupt_shadow: true, nmi_pending: true, triple_fault: true };

/// L1's block asks for these exits, of the third word.
fn asking(exits: Intercept3) -> Hypervisor {
    let machine = Hypervisor::new(false);
    machine.put(THIRD, u64::from(exits.bits()) << 32);
    machine
}

/// All of it, on another host.
fn moved(from: &mut Hypervisor) -> Hypervisor {
    let mut to = Hypervisor::new(false);
    for at in (0..0x4_0000).step_by(8) {
        to.put(at, from.get(at));
    }
    let mut state = vec![0; from.vcpu.nested_state_size().unwrap()];
    from.vcpu.nested_state(&mut state).unwrap();
    let (sregs, regs) = (from.vcpu.sregs(), from.vcpu.regs());
    let events = from.vcpu.saved_events();
    assert_eq!(events.interrupt, Some(GIVEN), "told as one that is injected");
    to.vcpu.set_sregs(&sregs, None).unwrap();
    to.vcpu.set_nested_state(&state).unwrap();
    to.vcpu.set_regs(&regs);
    to.vcpu.restore_events(&events, ALL);
    to
}

/// It waits, and the next entry injects nothing, at `rip`.
fn injects_nothing(machine: &mut Hypervisor, rip: u64) {
    machine.then(move |vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.control.event_inj & event::VALID), (rip, 0));
        unknown(vmcb, gprs);
    });
    assert_eq!(machine.run(), rig::UNKNOWN);
}

#[test]
fn an_interrupt_that_waits_for_l1_is_not_injected_into_l2_on_another_host() {
    let mut machine = asking(Intercept3::INTR);
    // L2's own flag, which without V_INTR_MASKING lets them in.
    machine.put(BLOCK + 0x570, 0x202);
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(GIVEN).unwrap();
    let mut machine = moved(&mut machine);
    // L2's run ends for it.
    injects_nothing(&mut machine, L1_RIP + 3);
    // L1 has the exit, and the interrupt as soon as it sets GIF.
    assert_eq!(machine.vcpu.saved_events().interrupt, Some(GIVEN));
}

/// One that L1 injects, and whose delivery is interrupted, comes with the state, too.
#[test]
fn an_interrupt_that_l1_injects_is_injected_into_l2_on_another_host() {
    let mut machine = asking(Intercept3::INTR);
    machine.put(BLOCK + 0xa8, event::VALID | event::INTR | u64::from(GIVEN.0));
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        svm_exit(ExitCode::Npf)(vmcb, gprs);
        (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (1 << 32 | 2, 0x5000);
        vmcb.control.exit_int_info = event::VALID | event::INTR | u64::from(GIVEN.0);
        // Between the fault and the next entry.
        surroundings::set_signal_pending(true);
    });
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    let mut machine = moved(&mut machine);
    machine.then(|vmcb, gprs| {
        let injected = event::VALID | event::INTR | u64::from(GIVEN.0);
        assert_eq!((vmcb.save.rip, vmcb.control.event_inj), (L2_RIP, injected));
        unknown(vmcb, gprs);
    });
    assert_eq!(machine.run(), rig::UNKNOWN);
}

#[test]
fn an_l2_that_has_its_own_interrupts_and_keeps_them_off_has_none_forced_in() {
    let mut machine = asking(Intercept3::empty());
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(GIVEN).unwrap();
    let mut machine = moved(&mut machine);
    let rip = machine.vcpu.regs().rip;
    injects_nothing(&mut machine, rip);
    assert_eq!(machine.vcpu.saved_events().interrupt, Some(GIVEN));
}

#[test]
fn an_l1_with_gif_clear_has_none_forced_in() {
    let mut machine = asking(Intercept3::empty());
    machine.then(|vmcb, gprs| {
        svm_exit(ExitCode::Clgi)(vmcb, gprs);
        vmcb.control.next_rip = vmcb.save.rip + 3;
    });
    machine.then(svm_exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    let mut regs = machine.vcpu.regs();
    regs.rflags |= Rflags::IF;
    machine.vcpu.set_regs(&regs);
    machine.vcpu.queue_interrupt(GIVEN).unwrap();
    let mut machine = moved(&mut machine);
    injects_nothing(&mut machine, regs.rip);
    assert_eq!(machine.vcpu.saved_events().interrupt, Some(GIVEN));
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// L1's flag decides, and not L2's.
#[test]
fn an_l1_with_a_flag_of_its_own_that_is_clear_has_none_forced_into_l2() {
    const INTR_MASKING: u64 = 1 << 24;
    let mut machine = asking(Intercept3::empty());
    machine.put(BLOCK + 0x60, INTR_MASKING);
    machine.put(BLOCK + 0x570, 0x202);
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(GIVEN).unwrap();
    let mut machine = moved(&mut machine);
    let rip = machine.vcpu.regs().rip;
    injects_nothing(&mut machine, rip);
    assert_eq!(machine.vcpu.saved_events().interrupt, Some(GIVEN));
}

/// A KVM_RUN that enters nobody settles nothing: the state into which the event goes comes behind it.
#[test]
fn a_signal_between_two_calls_of_a_restore_decides_nothing() {
    let mut machine = asking(Intercept3::empty());
    let mut regs = machine.vcpu.regs();
    regs.rflags |= Rflags::IF;
    machine.vcpu.set_regs(&regs);
    let waits = SavedEvents { interrupt: Some(GIVEN), ..SavedEvents::default() };
    machine.vcpu.restore_events(&waits, ALL);
    surroundings::set_signal_pending(true);
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    regs.rflags -= Rflags::IF;
    machine.vcpu.set_regs(&regs);
    injects_nothing(&mut machine, regs.rip);
    assert_eq!(machine.vcpu.saved_events().interrupt, Some(GIVEN));
}

/// A signal keeps back an entry of L2 that L1 has given an interrupt: that is L2's, whatever L1 hears of.
#[test]
fn what_l1_injects_is_not_its_own_behind_a_signal() {
    let mut machine = asking(Intercept3::INTR);
    machine.put(BLOCK + 0x570, 0x202);
    machine.put(BLOCK + 0xa8, event::VALID | event::INTR | u64::from(GIVEN.0));
    machine.then(|vmcb, gprs| {
        surroundings::set_signal_pending(true);
        rig::nested::vmrun(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    machine.then(|vmcb, gprs| {
        let injected = event::VALID | event::INTR | u64::from(GIVEN.0);
        assert_eq!((vmcb.save.rip, vmcb.control.event_inj), (L2_RIP, injected));
        unknown(vmcb, gprs);
    });
    assert_eq!(machine.run(), rig::UNKNOWN);
}

/// What L1 injected before is no name of what waits: L1 and its guest have one vector for their timers.
#[test]
fn an_interrupt_that_l1_has_injected_once_is_its_own_the_next_time() {
    let mut machine = asking(Intercept3::INTR);
    machine.put(BLOCK + 0x60, 1 << 24);
    machine.put(BLOCK + 0xa8, event::VALID | event::INTR | u64::from(GIVEN.0));
    let mut regs = machine.vcpu.regs();
    regs.rflags |= Rflags::IF;
    machine.vcpu.set_regs(&regs);
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(GIVEN).unwrap();
    let mut machine = moved(&mut machine);
    injects_nothing(&mut machine, L1_RIP + 3);
    assert_eq!(machine.vcpu.saved_events().interrupt, Some(GIVEN));
}

/// An SMI waits behind what goes in first. What does not go in holds it no more.
#[test]
fn an_smi_does_not_wait_for_an_interrupt_that_waits_itself() {
    let mut machine = Hypervisor::new(false).with_smram();
    let events = SavedEvents {
        interrupt: Some(GIVEN),
        smi: SavedSmi { pending: true, ..SavedSmi::default() },
        ..SavedEvents::default()
    };
    machine.vcpu.restore_events(&events, ALL);
    machine.vcpu.restore_smi(&events.smi);
    machine.then(|vmcb, gprs| {
        let [_, cs, ..] = vmcb.save.segments;
        assert_eq!((vmcb.save.rip, cs.base), (0x8000, SMBASE), "the handler");
        unknown(vmcb, gprs);
    });
    assert_eq!(machine.run(), rig::UNKNOWN);
    assert_eq!(machine.vcpu.saved_events().interrupt, Some(GIVEN));
}

/// KVM_RUN does not end for a window with an event prepared that no call tells of.
#[test]
fn what_l1_injects_goes_in_before_the_vmm_hears_of_its_window() {
    let injected = event::VALID | event::INTR | u64::from(GIVEN.0);
    let mut machine = asking(Intercept3::INTR);
    machine.put(BLOCK + 0x570, 0x202);
    machine.put(BLOCK + 0xa8, injected);
    machine.vmrun();
    machine.then(move |vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.control.event_inj), (L2_RIP, injected));
        svm_exit(ExitCode::Intr)(vmcb, gprs);
    });
    let input = RunInput { request_interrupt_window: true, ..RunInput::default() };
    assert_eq!(machine.vcpu.run(&input), UserExit::IrqWindowOpen);
    assert_eq!(machine.vcpu.backend().cpu().inner().steps_left(), 0);
}

/// Virtual interrupts of L1's for L2, in software.
fn deliver_virtual_interrupts(v: &mut Vmcs12) {
    const TPR_SHADOW: u32 = 1 << 21;
    const MSR_BITMAPS: u32 = 1 << 28;
    v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) | TPR_SHADOW | MSR_BITMAPS);
    v.set(field::MSR_BITMAP, 0x1_0000);
    let second = ProcControls2::VPID
        | ProcControls2::VIRTUAL_INTERRUPTS
        | ProcControls2::VIRTUALIZE_X2APIC
        | ProcControls2::APIC_REGISTERS;
    v.set(field::PROC_CONTROLS2, second.bits());
    v.set(field::VIRTUAL_APIC_ADDR, 0x1_1000);
}

/// Under VMX: with and without exits of L1's for interrupts.
#[test]
fn an_interrupt_that_waits_is_not_injected_into_l2_by_vmx() {
    for (hears, delivers) in [(false, false), (true, false), (true, true)] {
        let mut v = vmcs12();
        if delivers {
            deliver_virtual_interrupts(&mut v);
        }
        let pin = v.get(field::PIN_CONTROLS) & !1;
        v.set(field::PIN_CONTROLS, pin | u32::from(hears));
        v.set(field::GUEST_RFLAGS, 2);
        let mut machine = nested_vmx::Hypervisor::without_apic(features(), &v);
        machine.vmlaunch();
        machine.then(|vmcs, gprs| {
            surroundings::set_signal_pending(true);
            vmx::exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Intr);
        surroundings::set_signal_pending(false);
        machine.vcpu.queue_interrupt(GIVEN).unwrap();
        let events = machine.vcpu.saved_events();
        let regs = machine.vcpu.regs();
        let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
        machine.vcpu.nested_state(&mut state).unwrap();
        let sregs = machine.vcpu.sregs();
        let mut machine = nested_vmx::Hypervisor::without_apic(features(), &v);
        machine.vcpu.set_sregs(&sregs, None).unwrap();
        machine.vcpu.set_nested_state(&state).unwrap();
        machine.vcpu.set_regs(&regs);
        machine.vcpu.restore_events(&events, ALL);
        let rip = if hears { nested_vmx::L1_RIP } else { regs.rip };
        machine.then(move |vmcs, gprs| {
            let injected = vmcs.get(field::ENTRY_INTERRUPTION) & vmcs::event::VALID;
            assert_eq!(
                (vmcs.get(field::GUEST_RIP), injected),
                (rip, 0),
                "L1 hears: {hears}, {delivers}"
            );
            surroundings::set_signal_pending(true);
            vmx::exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Intr);
        surroundings::set_signal_pending(false);
        assert_eq!(machine.vcpu.saved_events().interrupt, Some(GIVEN));
    }
}
