//! A guest that runs a guest of its own by SVM, and what its interrupts wait for while that runs: the task priority, or a
//! window.

mod rig;

use backend::{Gprs, RCX};
use gannet_vcpu::{RunInput, UserExit};
use irqchip::lapic::{BaseRules, base};
use rig::nested::{BLOCK, Hypervisor, L1_RIP, L2_RIP};
use rig::{UNKNOWN, exit, unknown};
use vm::vcpu_shared::Request;
use x86::vmcb::{ExitCode, Vmcb, event, vintr};
use x86::{Rflags, Vector};

/// The spurious-interrupt vector register, as an x2APIC names it.
const SVR: u32 = 0x80f;
/// That of the pin of the PIC.
const LINT0: u32 = 0x835;

/// The third intercept word, and where the others lie.
const THIRD: u64 = BLOCK + 0x08;
const INTR: u64 = 1;
const VINTR: u32 = 1 << 4;
/// Of the first.
const WRITE_CR8: u32 = 1 << 24;

const EXIT_CODE: u64 = BLOCK + 0x70;
const BEHIND: u64 = L1_RIP + 3;
const WAITING: Vector = Vector(0x41);

/// L1's local APIC is on, and its priority keeps what waits away; its block intercepts this of the third word.
fn machine(intercepts: u64, int_ctl: u32, rflags: Rflags) -> Hypervisor {
    let mut machine = Hypervisor::new(true);
    machine.put(THIRD, intercepts << 32);
    machine.put(BLOCK + 0x60, int_ctl.into());
    machine.put(BLOCK + 0x570, (rflags | Rflags::FIXED).bits());
    let lapic = &machine.vcpu.shared().lapic;
    let rules = BaseRules { maxphyaddr: 48, x2apic: true, host: true };
    lapic.set_base(lapic.base() | base::EXTD, rules).unwrap();
    assert!(lapic.write_x2(SVR, 0x1ff).is_ok());
    let mut sregs = machine.vcpu.sregs();
    sregs.cr8 = 5;
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    let mut regs = machine.vcpu.regs();
    regs.rflags = Rflags::FIXED | Rflags::IF;
    machine.vcpu.set_regs(&regs);
    machine
}

/// L2 runs, an interrupt of L1's comes, and L2 runs on.
fn interrupted_in_l2(machine: &mut Hypervisor) {
    machine.vmrun();
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP);
        assert_eq!(vmcb.control.intercepts[0] & WRITE_CR8, 0, "nothing waits");
        shared.lapic.set_irr(WAITING);
        shared.request(Request::Event);
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    machine.vcpu.backend().cpu().inner().injects(0);
}

/// MOV to CR8 of 0, from RCX, where it exits.
fn lowers(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    assert_ne!(vmcb.control.intercepts[0] & WRITE_CR8, 0, "L2 would lower it unseen");
    assert_eq!(vmcb.control.intercepts[3] & VINTR, 0, "the window would be left for nothing");
    assert_eq!(vmcb.control.int_ctl & vintr::TPR_MASK, 5);
    exit(ExitCode::WriteCr8)(vmcb, gprs);
    // Which register it is says the CPU.
    vmcb.control.exit_info_1 = 1 << 63 | RCX as u64;
    gprs.0[RCX] = 0;
}

/// An L2 without V_INTR_MASKING has L1's task priority. When that falls below an interrupt of L1's, L1 hears of it behind the MOV.
#[test]
fn a_priority_that_l2_lowers_lets_l1s_interrupt_end_its_run() {
    let mut machine = machine(INTR, 0, Rflags::IF);
    interrupted_in_l2(&mut machine);
    machine.then(lowers);
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.control.int_ctl & vintr::TPR_MASK), (BEHIND, 0));
        unknown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UNKNOWN);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Intr.0);
    // Behind the MOV.
    assert_eq!(machine.get(BLOCK + 0x578), L2_RIP + 2);
}

/// As the test before, where L1 leaves its interrupts to L2.
#[test]
fn a_priority_that_l2_lowers_lets_an_interrupt_in() {
    let mut machine = machine(0, 0, Rflags::IF);
    interrupted_in_l2(&mut machine);
    machine.then(lowers);
    machine.vcpu.backend().cpu().inner().injects(event::VALID | u64::from(WAITING.0));
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP + 2);
        assert_eq!(vmcb.control.intercepts[0] & WRITE_CR8, 0, "nothing waits any more");
        unknown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UNKNOWN);
}

/// With IF clear, too, it is the window that waits from the MOV on.
#[test]
fn a_priority_that_l2_lowers_with_interrupts_off_opens_a_window() {
    for intercepts in [0, INTR] {
        let mut machine = machine(intercepts, 0, Rflags::empty());
        interrupted_in_l2(&mut machine);
        machine.then(lowers);
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.save.rip, L2_RIP + 2);
            assert_ne!(vmcb.control.intercepts[3] & VINTR, 0);
            assert_ne!(vmcb.control.int_ctl & vintr::IRQ, 0);
            unknown(vmcb, gprs);
        });
        assert_eq!(machine.run(), UNKNOWN);
    }
}

/// With V_INTR_MASKING CR8 is L2's own, and says nothing of L1's interrupts.
#[test]
fn a_priority_of_l2s_own_is_not_watched() {
    let mut machine = machine(INTR, vintr::INTR_MASKING, Rflags::IF);
    interrupted_in_l2(&mut machine);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP);
        assert_eq!(vmcb.control.intercepts[0] & WRITE_CR8, 0);
        unknown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UNKNOWN);
}

/// An entry takes the PIC's interrupt, and the local APIC's waits behind it: with a window, and not for the next exit.
#[test]
fn an_interrupt_behind_the_pics_opens_a_window() {
    const OF_PIC: Vector = Vector(0x30);
    const BEHIND_IT: Vector = Vector(0x61);
    let mut machine = machine(0, 0, Rflags::IF);
    machine.vmrun();
    machine.then(unknown);
    assert_eq!(machine.run(), UNKNOWN);
    // The VMM has the PIC, and LINT0 is ExtINT.
    assert!(machine.vcpu.shared().lapic.write_x2(LINT0, 0x700).is_ok());
    machine.vcpu.queue_interrupt(OF_PIC).unwrap();
    machine.vcpu.shared().lapic.set_irr(BEHIND_IT);
    machine.vcpu.backend().cpu().inner().injects(event::VALID | u64::from(OF_PIC.0));
    machine.then(window_comes);
    machine.vcpu.backend().cpu().inner().injects(event::VALID | u64::from(BEHIND_IT.0));
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.intercepts[3] & VINTR, 0, "nothing waits any more");
        unknown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UNKNOWN);
}

/// A VMM with its own controllers gives one interrupt, and has another to give behind it.
#[test]
fn a_window_that_the_vmm_waits_for_is_open_behind_its_interrupt() {
    let mut machine = Hypervisor::new(false);
    machine.put(BLOCK + 0x570, (Rflags::IF | Rflags::FIXED).bits());
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(WAITING).unwrap();
    machine.vcpu.backend().cpu().inner().injects(event::VALID | u64::from(WAITING.0));
    machine.then(window_comes);
    let input = RunInput { request_interrupt_window: true, ..RunInput::default() };
    assert_eq!(machine.vcpu.run(&input), UserExit::IrqWindowOpen);
}

/// The interrupt window of L2's opens.
fn window_comes(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    assert_ne!(vmcb.control.intercepts[3] & VINTR, 0);
    assert_ne!(vmcb.control.int_ctl & vintr::IRQ, 0);
    exit(ExitCode::Vintr)(vmcb, gprs);
    vmcb.control.event_inj = 0;
}
