//! The entry of L1's whose absence L2's fault was told for: it is followed when L1 resumes L2, and not by a second fault.

mod rig;

use std::sync::atomic::Ordering;

use backend::{RAX, RCX};
use gannet_vcpu::UserExit;
use rig::nested_vmx::{Hypervisor, L1_RIP, L2_RIP, features, vmcs12};
use rig::vmx::{exit, shutdown};
use x86::vmcs::{ExitReason, ProcControls2, field};

const TABLES: u64 = 0x1_0000;
const LEAVES: u64 = TABLES + 0x3000;
/// An entry with all rights, used and written, write-back.
const ALL: u64 = 0x337;
/// Mapped from the beginning, and where L1 maps the same frame later.
const THERE: u64 = 20;
const LATER: u64 = 33;

/// L2 runs with tables of L1's, and has used the page [`THERE`].
fn hypervisor() -> Hypervisor {
    let mut v = vmcs12();
    v.set(field::PROC_CONTROLS2, (ProcControls2::VPID | ProcControls2::EPT).bits());
    v.set(field::EPT_POINTER, TABLES | 0x5e);
    let mut machine = Hypervisor::on(features(), &v);
    for level in 0..3 {
        machine.put(TABLES + level * 0x1000, (TABLES + (level + 1) * 0x1000) | 0x107);
    }
    machine.put(LEAVES + THERE * 8, THERE << 12 | ALL);
    machine.vmlaunch();
    faults(&mut machine, THERE);
    machine
}

fn faults(machine: &mut Hypervisor, page: u64) {
    machine.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        exit(ExitReason::EptViolation)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, 0x182);
        vmcs.set(field::GUEST_LINEAR_ADDRESS, page << 12);
        vmcs.set(field::GUEST_PHYSICAL_ADDRESS, page << 12);
    });
}

/// L1 asks user space for something: the test looks on.
fn l1_pauses(machine: &mut Hypervisor) {
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        exit(ExitReason::Io)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, 0x60 << 16);
    });
    assert!(matches!(machine.run(), UserExit::Io { .. }));
}

/// L1 resumes L2, which goes on without a fault: how many entries that has made.
fn made_at_entry(machine: &mut Hypervisor) -> u64 {
    let ahead = |machine: &Hypervisor| {
        let memory = machine.vm.memory();
        memory.nested().unwrap().counters().ahead.load(Ordering::Relaxed)
    };
    let before = ahead(machine);
    machine.then(exit(ExitReason::Vmresume));
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        shutdown(vmcs, gprs);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
    ahead(machine) - before
}

#[test]
fn what_l1_has_made_is_there_when_l2_goes_on() {
    let mut machine = hypervisor();
    faults(&mut machine, LATER);
    l1_pauses(&mut machine);
    machine.put(LEAVES + LATER * 8, THERE << 12 | ALL);
    assert_eq!(made_at_entry(&mut machine), 1);
}

#[test]
fn what_l1_has_not_made_is_not_there() {
    let mut machine = hypervisor();
    faults(&mut machine, LATER);
    l1_pauses(&mut machine);
    assert_eq!(made_at_entry(&mut machine), 0);
}

#[test]
fn a_round_trip_that_no_fault_began_looks_for_nothing() {
    let mut machine = hypervisor();
    machine.then(exit(ExitReason::Cpuid));
    l1_pauses(&mut machine);
    machine.put(LEAVES + LATER * 8, THERE << 12 | ALL);
    assert_eq!(made_at_entry(&mut machine), 0);
}

/// L1 writes its EPT pointer: the value in RAX, the encoding in RCX.
fn writes_ept_pointer(machine: &mut Hypervisor, pointer: u64) {
    machine.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP) & !0xff, L1_RIP & !0xff);
        exit(ExitReason::Vmwrite)(vmcs, gprs);
        vmcs.set(field::INSTRUCTION_INFO, 1 << 10 | 1 << 28);
        (gprs.0[RAX], gprs.0[RCX]) = (pointer, field::EPT_POINTER.encoding().into());
    });
}

/// The fault was under the first tables; L2 has run with others since, and behind those with the first, once.
#[test]
fn an_entry_with_other_tables_puts_the_look_off() {
    const OTHERS: u64 = 0x1_8000;
    let mut machine = hypervisor();
    machine.put(OTHERS, (TABLES + 0x1000) | 0x107);
    let enters_by = |machine: &mut Hypervisor, pointer: u64| {
        writes_ept_pointer(machine, pointer | 0x5e);
        machine.then(exit(ExitReason::Vmresume));
        machine.then(exit(ExitReason::Cpuid));
    };
    // Both roots are there.
    machine.then(exit(ExitReason::Cpuid));
    enters_by(&mut machine, OTHERS);
    enters_by(&mut machine, TABLES);
    writes_ept_pointer(&mut machine, TABLES | 0x5e);
    machine.then(exit(ExitReason::Vmresume));
    faults(&mut machine, LATER);
    enters_by(&mut machine, OTHERS);
    l1_pauses(&mut machine);
    machine.put(LEAVES + LATER * 8, THERE << 12 | ALL);
    writes_ept_pointer(&mut machine, TABLES | 0x5e);
    assert_eq!(made_at_entry(&mut machine), 1);
}
