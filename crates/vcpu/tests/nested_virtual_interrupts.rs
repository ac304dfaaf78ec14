//! Virtual interrupts that a guest's hypervisor has delivered to its guest, and posted ones, over the whole vCPU.

mod rig;

use std::time::Duration;

use gannet_vcpu::UserExit;
use irqchip::lapic::{BaseRules, base};
use nested_vmx::Vmcs12;
use rig::nested_vmx::{Hypervisor, L1_RIP, L2_RIP, features, vmcs12};
use rig::vmx::{exit, shutdown};
use vm::vcpu_shared::{Request, SharedVcpu};
use x86::Vector;
use x86::vmcs::{ExitReason, ProcControls2, event, field};
use zerocopy::FromBytes;

const PAGE: u64 = 0xb000;
const DESCRIPTOR: u64 = 0xc000;
const BITMAP: u64 = 0xd000;
const NOTIFICATION: Vector = Vector(0xf2);
const SVR: u32 = 0x80f;
const HLT: u32 = 1 << 7;
const WINDOW: u32 = 1 << 2;
const IF: u64 = 1 << 9;

/// L1 has virtual interrupts, posted ones, and hears of NMIs as every KVM does.
fn delivering() -> Vmcs12 {
    let mut v = vmcs12();
    let first = v.get(field::PROC_CONTROLS) & !HLT | 1 << 21 | 1 << 28;
    v.set(field::PROC_CONTROLS, first);
    // All MSRs are L2's own.
    v.set(field::MSR_BITMAP, BITMAP);
    let second = ProcControls2::VPID
        | ProcControls2::VIRTUAL_INTERRUPTS
        | ProcControls2::VIRTUALIZE_X2APIC
        | ProcControls2::APIC_REGISTERS;
    v.set(field::PROC_CONTROLS2, second.bits());
    v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) | 1 << 7);
    v.set(field::EXIT_CONTROLS, v.get(field::EXIT_CONTROLS) | 1 << 15);
    v.set(field::VIRTUAL_APIC_ADDR, PAGE);
    v.set(field::POSTED_INTR_DESC, DESCRIPTOR);
    v.set(field::POSTED_INTR_VECTOR, NOTIFICATION.0.into());
    v.set(field::GUEST_RFLAGS, 2 | IF);
    v
}

/// Such an L1, which has this vector requested for L2 and is about to execute VMLAUNCH. All that it happens by is in the VM's
/// tables, so that it happens inside the loop.
fn requesting(v: &mut Vmcs12, vector: u8) -> Hypervisor {
    v.set(field::GUEST_INTERRUPT_STATUS, vector.into());
    let mut machine = Hypervisor::on(features(), v);
    machine.put(PAGE + 0x200 + u64::from(vector >> 5) * 16, 1 << (vector & 31));
    let lapic = &machine.vcpu.shared().lapic;
    let rules = BaseRules { maxphyaddr: 48, x2apic: true, host: true };
    lapic.set_base(lapic.base() | base::EXTD, rules).unwrap();
    assert!(lapic.write_x2(SVR, 0x1ff).is_ok());
    for page in [PAGE, DESCRIPTOR, BITMAP, 0x1000, 0x2000, 0x7000] {
        machine.then(move |vmcs, gprs| {
            exit(ExitReason::EptViolation)(vmcs, gprs);
            // A write.
            vmcs.set(field::EXIT_QUALIFICATION, 2);
            vmcs.set(field::GUEST_PHYSICAL_ADDRESS, page);
        });
    }
    machine.vmlaunch();
    machine
}

fn injects(vector: u8) -> u32 {
    event::VALID | u32::from(vector)
}

/// What L1 is told of the end of L2's run.
fn told(machine: &mut Hypervisor) -> Vmcs12 {
    let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
    machine.vcpu.nested_state(&mut state).unwrap();
    Vmcs12::read_from_prefix(&state[nested_vmx::saved::HEADER..]).unwrap().0
}

/// L1 runs, and the test is over.
fn ends_in_l1(machine: &mut Hypervisor) {
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
}

#[test]
fn what_waits_at_the_entry_is_injected() {
    let mut machine = requesting(&mut delivering(), 0x41);
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), injects(0x41));
        vmcs.set(field::ENTRY_INTERRUPTION, 0x41);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    ends_in_l1(&mut machine);
    assert_eq!(told(&mut machine).get(field::GUEST_INTERRUPT_STATUS), 0x4100);
}

/// L2 has halted with its interrupts off, and the entry injects: it runs for that, and what waits waits for the window.
#[test]
fn what_waits_for_a_halted_l2_that_an_injected_event_wakes_is_not_lost() {
    let nmi = event::VALID | event::NMI | 2;
    let mut v = delivering();
    v.set(field::GUEST_ACTIVITY, 1);
    v.set(field::GUEST_RFLAGS, 2);
    v.set(field::ENTRY_INTERRUPTION, nmi);
    let mut machine = requesting(&mut v, 0x41);
    machine.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), nmi);
        assert_ne!(vmcs.get(field::PROC_CONTROLS) & WINDOW, 0, "what waits has a window");
        vmcs.set(field::ENTRY_INTERRUPTION, 2);
        vmcs.set(field::GUEST_RFLAGS, 2 | IF);
        exit(ExitReason::InterruptWindow)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), injects(0x41));
        vmcs.set(field::ENTRY_INTERRUPTION, 0x41);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    ends_in_l1(&mut machine);
}

/// An L1 that has posted this vector below 64 for L2, and has not notified it yet.
fn posting(vector: u8) -> Hypervisor {
    let machine = requesting(&mut delivering(), 0);
    machine.put(DESCRIPTOR, 1 << vector);
    machine.put(DESCRIPTOR + 32, 1);
    machine
}

/// The vector is posted, and the notification waits at L1's local APIC.
fn notifies(shared: &SharedVcpu) {
    let _ = shared.lapic.accept_fixed(NOTIFICATION, irqchip::Trigger::Edge);
}

#[test]
fn an_interrupt_of_l1s_behind_a_notification_ends_the_run_at_once() {
    let mut machine = posting(0x31);
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcs, gprs| {
        notifies(&shared);
        let _ = shared.lapic.accept_fixed(Vector(0x51), irqchip::Trigger::Edge);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    ends_in_l1(&mut machine);
    let v = told(&mut machine);
    assert_eq!(v.get(field::EXIT_REASON), 1);
    assert_eq!(v.get(field::EXIT_INTERRUPTION), injects(0x51));
    assert_eq!(v.get(field::GUEST_INTERRUPT_STATUS), 0x31, "posted all the same");
}

#[test]
fn a_notification_wakes_no_l2_that_takes_nothing() {
    let mut machine = posting(0x31);
    // L2's priority.
    machine.put(PAGE + 0x80, 0x40);
    let shared = machine.vcpu.shared().clone();
    let at_once = shared.clone();
    machine.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
        notifies(&at_once);
        exit(ExitReason::Hlt)(vmcs, gprs);
    });
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        let _ = shared.lapic.accept_fixed(Vector(0x51), irqchip::Trigger::Edge);
        shared.request_and_kick(Request::Event);
    });
    // Woken by the notification L2 would run.
    ends_in_l1(&mut machine);
    later.join().unwrap();
    let v = told(&mut machine);
    assert_eq!(v.get(field::EXIT_REASON), 1, "an interrupt of L1's woke it");
    assert_eq!(v.get(field::GUEST_ACTIVITY), 1);
}

#[test]
fn a_posted_interrupt_wakes_an_l2_that_takes_it() {
    let mut machine = posting(0x31);
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcs, gprs| {
        notifies(&shared);
        exit(ExitReason::Hlt)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP + 2);
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), injects(0x31));
        vmcs.set(field::ENTRY_INTERRUPTION, 0x31);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    ends_in_l1(&mut machine);
}

/// The notification is level-triggered: its end, which the CPU makes by itself, is told to who sent it.
#[test]
fn the_end_of_a_notification_is_told() {
    const LEVEL: u64 = 1 << 15;
    const OUTSTANDING: u64 = 1 << 14;
    let mut machine = requesting(&mut delivering(), 0);
    machine.put(DESCRIPTOR + 32, 1);
    let vm = machine.vm.clone();
    let mut ioapic = vm.irq().ioapic();
    ioapic.redirtbl[5] = u64::from(NOTIFICATION.0) | LEVEL | OUTSTANDING;
    vm.irq().set_ioapic(&ioapic);
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcs, gprs| {
        let _ = shared.lapic.accept_fixed(NOTIFICATION, irqchip::Trigger::Level);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    machine.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        let ioapic = host::std_port::test::on_another_cpu(|| vm.irq().ioapic());
        assert_eq!(ioapic.redirtbl[5] & OUTSTANDING, 0);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    ends_in_l1(&mut machine);
}
