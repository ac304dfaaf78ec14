//! More irqfds than are told of an end of interrupt inside the loop: whatever way the guest ends it, they
//! are told before the vCPU enters it again or returns to user space.

mod rig;

use core::sync::atomic::Ordering::Relaxed;

use ::vm::VmRef;
use backend::{Gprs, RCX, RDX, RSI};
use gannet_vcpu::{By, RunInput, UserExit};
use host::page::Page;
use host::std_port::test::{
    self as surroundings, eventfd, eventfd_read, eventfd_signal, on_another_cpu,
};
use irqchip::lapic::Accepted;
use mmu::Region;
use rig::{Machine, TestVcpu, UNKNOWN, add_vcpu, exit, shutdown, unknown, vm};
use x86::vmcb::{ExitCode, Vmcb, vintr};

const X2APIC_ON: u64 = 0xfee0_0d00;
const IOAPIC: u64 = 0xfec0_0000;
const LEVEL: u32 = 1 << 15;
const GSI: u32 = 5;
/// One more than are told at once.
const MANY: u64 = 9;
/// Nobody's port.
const PORT: u16 = 0x99;
/// Where OUTSB lies and, behind it, what it writes.
const CODE: u64 = 0xf000;
const DATA: u64 = 0xf100;

struct Many {
    v: TestVcpu,
    vm: VmRef,
    event: i32,
    told: i32,
}

impl Many {
    fn new() -> Self {
        let machine = Machine::default();
        let vm = vm(&machine);
        let page = Box::leak(Box::new(Page::zeroed().unwrap()));
        page.bytes()[0].store(0x6e, Relaxed);
        page.bytes()[0x100].store(0x20, Relaxed);
        let region = Region { slot: 0, gpa: CODE, size: 4096, hva: page.hpa().0, flags: 0 };
        vm.memory().set_region(&region, &**vm).unwrap();
        let mut v = add_vcpu(&machine, &vm, 0);
        v.write_msr(0x1b, X2APIC_ON, By::Vmm).unwrap();
        v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
        let (mut event, told) = (0, eventfd());
        for _ in 0..MANY {
            event = eventfd();
            vm.irq().assign_irqfd(event, GSI, Some(told)).unwrap();
        }
        let _ = surroundings::take_kicks();
        Self { v, vm, event, told }
    }

    /// By the I/O APIC, which is programmed for it; the guest takes it at its first entry.
    fn by_apic() -> Self {
        let many = Self::new();
        assert!(many.vm.irq().pio_write(0x21, 1, 0xff).is_some());
        for (register, value) in [(0x11 + GSI * 2, 0), (0x10 + GSI * 2, LEVEL | 0x50)] {
            assert!(many.vm.irq().mmio_write(IOAPIC, &register.to_le_bytes()).is_some());
            assert!(many.vm.irq().mmio_write(IOAPIC + 0x10, &value.to_le_bytes()).is_some());
        }
        eventfd_signal(many.event, 1);
        many
    }

    /// By the 8259A, which ends it by itself or waits for it.
    fn by_pic(automatic: bool) -> Self {
        let mut many = Self::new();
        // LINT0 is the 8259A's.
        many.v.write_msr(0x835, 0x700, By::Vmm).unwrap();
        let icw4 = if automatic { 3 } else { 1 };
        for (port, value) in [(0x20, 0x11), (0x21, 0x20), (0x21, 4), (0x21, icw4), (0x21, 0)] {
            assert!(many.vm.irq().pio_write(port, 1, value).is_some());
        }
        eventfd_signal(many.event, 1);
        many
    }

    /// The guest goes on: all have been told by then.
    fn all_are_told_before_the_next_entry(&mut self) {
        let told = self.told;
        self.v.backend().cpu().inner().then(move |vmcb, gprs| {
            assert_eq!(eventfd_read(told), MANY, "at the next entry");
            shutdown(vmcb, gprs);
        });
        assert_eq!(self.v.run(&RunInput::default()), UserExit::Shutdown);
        assert_eq!(self.v.backend().cpu().inner().steps_left(), 0);
        assert_eq!(eventfd_read(told), 0, "they are told once");
    }
}

/// The guest takes what it is offered and ends it.
fn take_and_end(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    assert_eq!(vmcb.control.int_vector, 0x50);
    assert!(vmcb.control.int_ctl & vintr::IRQ != 0);
    vmcb.control.int_ctl &= !vintr::IRQ;
    (gprs.0[RCX], gprs.0[RDX]) = (0x80b, 0);
    vmcb.save.rax = 0;
    exit(ExitCode::Msr)(vmcb, gprs);
    vmcb.control.exit_info_1 = 1;
}

/// One byte to a port.
fn out(port: u16, value: u64, string: bool) -> impl FnMut(&mut Vmcb, &mut Gprs) + Send {
    move |vmcb, gprs| {
        vmcb.save.efer |= (1 << 8) | (1 << 10);
        vmcb.save.segments[x86::vmcb::SEG_CS].attrib |= 0x200;
        vmcb.save.rip = CODE;
        vmcb.save.rax = value;
        (gprs.0[RDX], gprs.0[RSI]) = (port.into(), DATA);
        exit(ExitCode::Ioio)(vmcb, gprs);
        vmcb.control.exit_info_1 = u64::from(port) << 16 | (1 << 4) | u64::from(string) << 2;
        vmcb.control.exit_info_2 = vmcb.save.rip + if string { 1 } else { 2 };
    }
}

#[test]
fn after_an_end_at_the_local_apic() {
    let mut many = Many::by_apic();
    many.v.backend().cpu().inner().then(take_and_end);
    many.all_are_told_before_the_next_entry();
}

#[test]
fn after_an_end_by_the_vmm_that_does_not_run_the_vcpu() {
    let mut many = Many::by_apic();
    many.v.backend().cpu().inner().then(|vmcb, gprs| {
        vmcb.control.int_ctl &= !vintr::IRQ;
        unknown(vmcb, gprs);
    });
    assert_eq!(many.v.run(&RunInput::default()), UNKNOWN);
    assert_eq!(eventfd_read(many.told), 0);
    many.v.write_msr(0x80b, 0, By::Vmm).unwrap();
    assert_eq!(eventfd_read(many.told), MANY);
}

#[test]
fn after_an_end_that_comes_with_an_init() {
    let mut many = Many::by_apic();
    let shared = many.v.shared().clone();
    many.v.backend().cpu().inner().then(move |vmcb, gprs| {
        on_another_cpu(|| shared.deliver(Accepted::Init));
        take_and_end(vmcb, gprs);
    });
    many.all_are_told_before_the_next_entry();
}

#[test]
fn after_an_end_at_the_8259a() {
    for string in [false, true] {
        let mut many = Many::by_pic(false);
        assert!(many.vm.irq().extint_ack().is_some_and(|(_, owing)| !owing.any()));
        many.v.backend().cpu().inner().then(out(0x20, 0x20, string));
        many.all_are_told_before_the_next_entry();
    }
}

#[test]
fn after_an_end_that_the_8259a_makes_by_itself() {
    let mut many = Many::by_pic(true);
    many.v.backend().cpu().inner().then(|vmcb, gprs| {
        vmcb.save.rflags |= x86::Rflags::IF.bits();
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    let cpu = host::smp::cpu_id();
    many.v.backend().cpu().inner().then(move |vmcb, gprs| {
        // The guest may make no exit of its own for long.
        assert!(surroundings::take_kicks().contains(&cpu), "nothing ends the guest's run");
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    many.all_are_told_before_the_next_entry();
}

#[test]
fn before_the_return_to_user_space() {
    let mut many = Many::by_pic(true);
    many.v.backend().cpu().inner().then(|vmcb, gprs| {
        vmcb.save.rflags |= x86::Rflags::IF.bits();
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    many.v.backend().cpu().inner().then(out(PORT, 7, false));
    assert!(matches!(many.v.run(&RunInput::default()), UserExit::Io { port: PORT, .. }));
    assert_eq!(eventfd_read(many.told), MANY);
}
