//! Local APICs in the kernel with PIC and I/O APIC in the VMM, on the model CPUs: what leaves for the
//! VMM, and what the hardware is told.

mod rig;

use backend::{RAX, RCX, RDX};
use gannet_vcpu::{By, RunInput, UserExit};
use irqchip::{Msi, Route, Target};
use mmu::Format;
use rig::vmx::VmxVcpu;
use rig::{Machine, TestVcpu, UNKNOWN, add_vcpu, exit, shutdown, unknown, vm};
use vm::VmRef;
use vm::irq::Source;
use x86::Vector;
use x86::vmcb::{ExitCode, vintr};
use x86::vmcs::{ExitReason, ProcControls, event, field};

const X2APIC: u64 = 0xfee0_0d00;
const LINT0: u32 = 0x835;
const LEVEL: u32 = 1 << 15;

fn msi(gsi: u32, data: u32) -> Route {
    Route { gsi, target: Target::Msi(Msi { address_lo: 0xfee0_0000, address_hi: 0, data }) }
}

/// A vCPU whose APIC is on, and its VM.
fn svm() -> (TestVcpu, VmRef) {
    let vm = vm(&Machine { irqchip: false, ..Machine::default() });
    vm.irq().create_split(24).unwrap();
    let mut v = add_vcpu(&Machine::default(), &vm, 0);
    v.write_msr(0x1b, X2APIC, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    (v, vm)
}

fn vmx(apicv: bool) -> (VmxVcpu, VmRef) {
    let features = vmx::Features { apicv, ..rig::vmx::features() };
    let (mut v, vm) = rig::vmx::split_vcpu_of(features, Format::npt(4, 0));
    v.write_msr(0x1b, X2APIC, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    (v, vm)
}

/// The guest takes what it is offered, and ends it.
fn serve_and_end(v: &mut TestVcpu, vector: u8) {
    v.backend().cpu().inner().then(move |vmcb, gprs| {
        assert_eq!(vmcb.control.int_vector, u32::from(vector));
        assert!(vmcb.control.int_ctl & vintr::IRQ != 0);
        vmcb.control.int_ctl &= !vintr::IRQ;
        (gprs.0[RCX], gprs.0[RDX]) = (0x80b, 0);
        vmcb.save.rax = 0;
        exit(ExitCode::Msr)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1;
    });
}

#[test]
fn the_end_of_a_level_pins_message_leaves_and_that_of_others_does_not() {
    let (mut v, vm) = svm();
    vm.irq().set_routes(&[msi(5, LEVEL | 0x50), msi(6, 0x60), msi(24, LEVEL | 0x70)]).unwrap();
    for (gsi, vector) in [(6, 0x60), (24, 0x70), (5, 0x50)] {
        vm.irq().set_irq_line(gsi, Source::User, true);
        serve_and_end(&mut v, vector);
        v.backend().cpu().inner().then(unknown);
        let run = v.run(&RunInput::default());
        if vector == 0x50 {
            assert_eq!(run, UserExit::IoapicEoi { vector });
            // It has left before the next entry.
            assert_eq!(v.backend().cpu().inner().steps_left(), 1);
        } else {
            assert_eq!(run, UNKNOWN);
        }
    }
    assert_eq!(v.run(&RunInput::default()), UNKNOWN);
}

#[test]
fn the_cpu_that_serves_the_apic_is_told_which_ends_to_report() {
    let (mut v, vm) = vmx(true);
    let expect = |v: &mut VmxVcpu, bitmap: u64| {
        v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
            assert_eq!(vmcs.get(field::EOI_EXIT_1), bitmap);
            vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
            rig::vmx::exit(ExitReason::VirtualizedEoi)(vmcs, gprs);
            vmcs.set(field::EXIT_QUALIFICATION, 0x50);
        });
    };
    vm.irq().set_routes(&[msi(5, LEVEL | 0x50)]).unwrap();
    expect(&mut v, 1 << 0x10);
    assert_eq!(v.run(&RunInput::default()), UserExit::IoapicEoi { vector: 0x50 });
    // Other routes: the set is another at the next entry, and an old vector's end is nobody's.
    vm.irq().set_routes(&[msi(5, LEVEL | 0x51), msi(6, 0x52)]).unwrap();
    expect(&mut v, 1 << 0x11);
    v.backend().cpu().inner().vmx.then(rig::vmx::shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn an_interrupt_of_the_vmms_pic_is_injected_when_lint0_takes_it() {
    for apicv in [false, true] {
        let (mut v, _vm) = vmx(apicv);
        v.write_msr(LINT0, 0x1_0700, By::Vmm).unwrap();
        v.queue_interrupt(Vector(0x33)).unwrap();
        assert!(v.queue_interrupt(Vector(0x34)).is_err());
        assert_eq!(v.interrupt_in_injection(), None);
        let entry = |v: &mut VmxVcpu, expected: u32| {
            v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
                let info = vmcs.get(field::ENTRY_INTERRUPTION);
                let injected = info & event::VALID != 0;
                assert_eq!(if injected { info } else { 0 }, expected);
                vmcs.set(field::ENTRY_INTERRUPTION, info & !event::VALID);
                vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
                vmcs.set(field::IDT_VECTORING, 0);
                rig::vmx::shutdown(vmcs, gprs);
            });
            assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        };
        entry(&mut v, 0);
        assert!(!v.run_output().ready_for_interrupt_injection);
        v.write_msr(LINT0, 0x700, By::Vmm).unwrap();
        entry(&mut v, event::VALID | event::INTR | 0x33);
        assert!(v.run_output().ready_for_interrupt_injection);
        entry(&mut v, 0);
        v.queue_interrupt(Vector(0x34)).unwrap();
    }
}

#[test]
fn the_window_that_the_vmm_asks_for_opens_on_either_cpu() {
    let input = RunInput { request_interrupt_window: true, ..RunInput::default() };
    let (mut v, _vm) = svm();
    v.backend().cpu().inner().then(|vmcb, _| {
        assert!(vmcb.control.int_ctl & vintr::IRQ != 0);
        vmcb.save.rflags = x86::Rflags::IF.bits() | 2;
        vmcb.control.exit_code = ExitCode::Vintr.0;
    });
    assert_eq!(v.run(&input), UserExit::IrqWindowOpen);
    for apicv in [false, true] {
        let (mut v, _vm) = vmx(apicv);
        v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
            let controls = ProcControls::from_bits_retain(vmcs.get(field::PROC_CONTROLS));
            assert!(controls.contains(ProcControls::INTERRUPT_WINDOW));
            vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
            gprs.0[RAX] = 0;
            rig::vmx::exit(ExitReason::InterruptWindow)(vmcs, gprs);
        });
        assert_eq!(v.run(&input), UserExit::IrqWindowOpen);
    }
}

#[test]
fn without_a_taker_no_window_opens() {
    let (mut v, _vm) = svm();
    v.write_msr(LINT0, 0x1_0700, By::Vmm).unwrap();
    v.backend().cpu().inner().then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & vintr::IRQ, 0);
        vmcb.save.rflags = x86::Rflags::IF.bits() | 2;
        shutdown(vmcb, gprs);
    });
    let input = RunInput { request_interrupt_window: true, ..RunInput::default() };
    assert_eq!(v.run(&input), UserExit::Shutdown);
}
