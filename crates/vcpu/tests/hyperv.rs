//! A guest that is a hypervisor and uses an enlightened VMCS, and what of Hyper-V's interface goes with it.

mod rig;

use backend::{RAX, RCX, RDX};
use cpuid::{ENLIGHTENED_VERSIONS, HyperV};
use gannet_vcpu::{By, RunInput, UserExit};
use irqchip::lapic::Accepted;
use nested_vmx::Vmcs12;
use rig::nested_vmx::{Hypervisor, L1_RIP, L2_RIP, features, offered, vmcs12};
use rig::vmx::{exit, shutdown};
use stats::Reason;
use x86::msr::*;
use x86::vmcs::enlightened::{self, READ_LINES, at};
use x86::vmcs::{ExitReason, field, place};

const PAGE: u64 = 0xa000;
const ASSIST: u64 = 0xb000;
const PARTITION: u64 = 0xc000;
const CODE: u64 = 0xd000;

fn put(machine: &Hypervisor, at: u64, bytes: usize, value: u64) {
    let (shift, mask) = (at % 8 * 8, u64::MAX >> (64 - 8 * bytes));
    let old = machine.get(at & !7) & !(mask << shift);
    machine.put(at & !7, old | (value & mask) << shift);
}

fn get(machine: &Hypervisor, encoding: u32) -> u64 {
    let (offset, bytes) = enlightened::find(encoding.into()).unwrap();
    let at = PAGE + u64::from(offset);
    machine.get(at & !7) >> (at % 8 * 8) & u64::MAX >> (64 - 8 * bytes)
}

fn show(machine: &mut Hypervisor) {
    let hyperv = HyperV { enlightened: ENLIGHTENED_VERSIONS, vcpus: 4096, no_smt: false };
    let mut table = offered().cpuid.entries().to_vec();
    table.retain(|entry| entry.leaf & 0xffff_0000 != 0x4000_0000);
    table.extend(hyperv.entries());
    machine.vcpu.set_cpuid(&table).unwrap();
}

/// L1 with an enlightened VMCS that says what the VMCS12 does.
fn enlightened(v: &Vmcs12) -> Hypervisor {
    let mut machine = Hypervisor::on(features(), v);
    show(&mut machine);
    assert_eq!(machine.vcpu.enlightened_versions(), 0);
    assert_eq!(machine.vcpu.enable_enlightened_vmcs(), 0x101);
    put(&machine, PAGE, 4, 1);
    for line in &READ_LINES {
        let encoding = u64::from(line.field.encoding);
        let (offset, bytes) = enlightened::find(encoding).unwrap();
        let value = v.read(place::find(encoding).unwrap());
        put(&machine, PAGE + u64::from(offset), bytes, value);
    }
    put(&machine, ASSIST, 8, u64::MAX);
    put(&machine, ASSIST + 32, 4, 1);
    put(&machine, ASSIST + 40, 1, 1);
    put(&machine, ASSIST + 48, 8, PAGE);
    machine.vcpu.write_msr(HV_VP_ASSIST_PAGE, ASSIST | 1, By::Vmm).unwrap();
    assert_eq!(machine.get(ASSIST), 0xffff_ffff_0000_0000, "its first word alone");
    machine
}

#[test]
fn l1_enters_and_is_told_by_its_page() {
    let mut machine = enlightened(&vmcs12());
    machine.vmlaunch();
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        // It had no launch state to have.
        exit(ExitReason::Vmresume)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(get(&machine, field::EXIT_REASON.encoding()), 10);
    assert_eq!(get(&machine, field::GUEST_RIP.encoding()), L2_RIP);
    let clean = machine.get(PAGE + at::CLEAN as u64) & 0xffff;
    assert_eq!(clean, enlightened::ALL_CLEAN.into());
}

/// After a restore nothing but entries looks at the VP assist page, so that no fault of L1's ever maps it: an entry does.
#[test]
fn the_assist_page_is_mapped_by_the_entry_that_misses_it() {
    let mut machine = enlightened(&vmcs12());
    // L1 touches its enlightened VMCS.
    machine.then(|vmcs, gprs| {
        exit(ExitReason::EptViolation)(vmcs, gprs);
        vmcs.set(field::GUEST_PHYSICAL_ADDRESS, PAGE);
        vmcs.set(field::EXIT_QUALIFICATION, 2);
    });
    machine.vmlaunch();
    for _ in 0..5 {
        machine.then(exit(ExitReason::Vmcall));
        machine.then(exit(ExitReason::Vmresume));
    }
    machine.then(shutdown);
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
    let stats = &machine.vcpu.shared().stats;
    let entries =
        (stats.exits_by(Reason::Virtualization), stats.answered_by(Reason::Virtualization));
    // VMLAUNCH went outside with the VMCS that it gave up, the first VMRESUME for the page.
    assert_eq!(entries, (6, 4));
}

#[test]
fn a_page_that_is_none_is_undefined() {
    for nowhere in [PAGE + 8, 1 << 30, 1 << 50] {
        let mut machine = enlightened(&vmcs12());
        put(&machine, ASSIST + 48, 8, nowhere);
        machine.vmlaunch();
        machine.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), 0x8000_0306);
            shutdown(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
}

#[test]
fn a_flush_of_l2s_is_carried_out_and_told_if_l1_asks() {
    for (allowed, locks) in [(1, 0), (1, 1), (0, 0)] {
        let mut machine = enlightened(&vmcs12());
        put(&machine, PAGE + at::CONTROL as u64, 4, allowed);
        put(&machine, PAGE + at::PARTITION_ASSIST as u64, 8, PARTITION);
        put(&machine, PARTITION, 4, locks);
        machine.vmlaunch();
        machine.then(|vmcs, gprs| {
            (gprs.0[RCX], gprs.0[RAX]) = (2 | 1 << 16, 0x77);
            exit(ExitReason::Vmcall)(vmcs, gprs);
        });
        machine.then(move |vmcs, gprs| {
            let expected = match (allowed, locks) {
                (1, 0) => L2_RIP + 2,
                _ => L1_RIP,
            };
            assert_eq!(vmcs.get(field::GUEST_RIP), expected);
            assert_eq!(gprs.0[RAX], if allowed == 1 { 0 } else { 0x77 });
            shutdown(vmcs, gprs);
        });
        machine.then(shutdown);
        assert_eq!(machine.run(), UserExit::Shutdown);
        let reason = get(&machine, field::EXIT_REASON.encoding());
        match (allowed, locks) {
            (1, 0) => assert_eq!(reason, 2, "its shutdown"),
            (1, _) => assert_eq!(reason, 0x1000_0031),
            _ => assert_eq!(reason, 18),
        }
    }
}

#[test]
fn a_call_of_16_bit_or_32_bit_code_is_one_by_eax_in_long_mode_too() {
    let mut machine = enlightened(&vmcs12());
    put(&machine, PAGE + at::CONTROL as u64, 4, 1);
    put(&machine, PAGE + at::PARTITION_ASSIST as u64, 8, PARTITION);
    machine.vmlaunch();
    machine.then(|vmcs, gprs| {
        // Compatibility mode: CS.L is clear. RCX would be a flush, EAX is none.
        vmcs.set(field::GUEST_CS_RIGHTS, vmcs.get(field::GUEST_CS_RIGHTS) & !(1 << 13) | 1 << 14);
        (gprs.0[RCX], gprs.0[RAX]) = (2, 0x77);
        exit(ExitReason::Vmcall)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP, "L1 hears of it");
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(get(&machine, field::EXIT_REASON.encoding()), 18);
}

#[test]
fn behind_a_flush_l1_has_the_exit_of_its_monitor_trap_flag() {
    let mut v = vmcs12();
    let controls = v.get(field::PROC_CONTROLS) | x86::vmcs::ProcControls::MONITOR_TRAP.bits();
    v.set(field::PROC_CONTROLS, controls);
    let mut machine = enlightened(&v);
    put(&machine, PAGE + at::CONTROL as u64, 4, 1);
    put(&machine, PAGE + at::PARTITION_ASSIST as u64, 8, PARTITION);
    machine.vmlaunch();
    machine.then(|vmcs, gprs| {
        (gprs.0[RCX], gprs.0[RAX]) = (2 | 1 << 16, 0x77);
        exit(ExitReason::Vmcall)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP, "before L2's next instruction");
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(get(&machine, field::EXIT_REASON.encoding()), 37);
    assert_eq!(get(&machine, field::GUEST_RIP.encoding()), L2_RIP + 2);
}

/// L2 writes to a port of the VMM's, which its hypervisor leaves to it.
fn out(vmcs: &mut cpu::ModelVmcs, gprs: &mut backend::Gprs) {
    exit(ExitReason::Io)(vmcs, gprs);
    vmcs.set(field::EXIT_QUALIFICATION, 0x80 << 16);
}

/// The nested state, and the page that goes with it, on another vCPU. The VMM restores the state before the MSR that leads to
/// the page.
fn travels(from: &mut Hypervisor) -> Hypervisor {
    let mut state = vec![0; from.vcpu.nested_state_size().unwrap()];
    from.vcpu.nested_state(&mut state).unwrap();
    assert_eq!(state[0] & 4, 4, "an enlightened VMCS");
    let mut to = enlightened(&vmcs12());
    for at in (PAGE..PAGE + 4096).step_by(8) {
        to.put(at, from.get(at));
    }
    to.vcpu.write_msr(HV_VP_ASSIST_PAGE, 0, By::Vmm).unwrap();
    to.vcpu.set_nested_state(&state).unwrap();
    to.vcpu.write_msr(HV_VP_ASSIST_PAGE, ASSIST | 1, By::Vmm).unwrap();
    to
}

/// L2 runs, and user space is asked for its port.
fn stopped_in_l2() -> Hypervisor {
    let mut machine = enlightened(&vmcs12());
    machine.vmlaunch();
    machine.then(out);
    assert!(matches!(machine.run(), UserExit::Io { .. }));
    machine
}

/// L2's hypercall ends its run, and L1 finds the exit in its page; then user space is asked.
fn l2_calls(machine: &mut Hypervisor) {
    machine.then(exit(ExitReason::Vmcall));
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        out(vmcs, gprs);
    });
    assert!(matches!(machine.run(), UserExit::Io { .. }));
    assert_eq!(get(machine, field::EXIT_REASON.encoding()), 18);
}

#[test]
fn a_restored_page_is_found_when_the_vcpu_runs() {
    let mut machine = stopped_in_l2();
    // Twice, without a run between.
    let mut machine = travels(&mut travels(&mut machine));
    l2_calls(&mut machine);
    let mut machine = travels(&mut machine);
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(get(&machine, field::EXIT_REASON.encoding()), 18);
}

/// L2 was restored, and L1's page names no VMCS: user space hears of it, as on stock KVM, as often as it tries, and L2 goes on
/// when the page does.
#[test]
fn a_restored_l2_waits_for_its_page() {
    let mut machine = stopped_in_l2();
    let mut machine = travels(&mut machine);
    machine.vcpu.write_msr(HV_VP_ASSIST_PAGE, 0, By::Vmm).unwrap();
    for _ in 0..2 {
        assert_eq!(machine.run(), UserExit::InternalError { suberror: 1 });
    }
    // Nothing is lost, be it here or behind another move.
    let mut machine = travels(&mut machine);
    l2_calls(&mut machine);
}

#[test]
fn no_hypercall_is_there_for_l1() {
    let mut machine = Hypervisor::on(features(), &vmcs12());
    show(&mut machine);
    machine.vcpu.write_msr(HV_HYPERCALL, CODE | 1, By::Vmm).unwrap();
    assert_eq!(machine.get(CODE), 0, "no operating system");
    machine.vcpu.write_msr(HV_GUEST_OS_ID, 1 << 40, By::Vmm).unwrap();
    assert!(machine.vcpu.write_msr(HV_HYPERCALL, 1 << 40 | 1, By::Vmm).is_err());
    machine.vcpu.write_msr(HV_HYPERCALL, CODE | 1, By::Vmm).unwrap();
    assert_eq!(machine.get(CODE), 0xc3c1_010f);
    for (control, status) in [(0xbeef, 2), (2, 2), (1 << 63, 3)] {
        machine.then(move |vmcs, gprs| {
            (gprs.0[RCX], gprs.0[RDX]) = (control, 0);
            exit(ExitReason::Vmcall)(vmcs, gprs);
        });
        machine.then(move |vmcs, gprs| {
            assert_eq!(gprs.0[RAX], status, "{control:#x}");
            shutdown(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
    machine.vcpu.write_msr(HV_GUEST_OS_ID, 0, By::Vmm).unwrap();
    assert_eq!(machine.vcpu.read_msr(HV_HYPERCALL, By::Vmm), Ok(CODE));
}

#[test]
fn the_msrs_are_there_if_cpuid_names_the_interface() {
    let mut machine = Hypervisor::on(features(), &vmcs12());
    let all = [HV_GUEST_OS_ID, HV_HYPERCALL, HV_VP_INDEX, HV_VP_ASSIST_PAGE];
    for index in all {
        assert!(machine.vcpu.read_msr(index, By::Guest).is_err());
        assert!(machine.vcpu.write_msr(index, 0, By::Guest).is_err());
        assert_eq!(machine.vcpu.read_msr(index, By::Vmm), Ok(0));
    }
    show(&mut machine);
    for index in all {
        assert_eq!(machine.vcpu.read_msr(index, By::Guest), Ok(0));
    }
    assert!(machine.vcpu.write_msr(HV_VP_INDEX, 1, By::Guest).is_err());
    assert!(machine.vcpu.write_msr(HV_VP_INDEX, 4096, By::Vmm).is_err());
    machine.vcpu.write_msr(HV_VP_INDEX, 4095, By::Vmm).unwrap();
    assert_eq!(machine.vcpu.read_msr(HV_VP_INDEX, By::Guest), Ok(4095));
    assert!(machine.vcpu.write_msr(HV_VP_ASSIST_PAGE, 1 << 40 | 1, By::Guest).is_err());
    machine.vcpu.write_msr(HV_VP_ASSIST_PAGE, 1 << 40, By::Guest).unwrap();
    assert!(machine.vcpu.read_msr(HV_VP_RUNTIME, By::Guest).is_err());
}

/// What the page does not carry L1 does not find, and the VMM does.
#[test]
fn l1_reads_other_capabilities_than_the_vmm() {
    let mut machine = enlightened(&vmcs12());
    let index = x86::vmcs::capability::VMX_PROCBASED_CTLS2;
    let of_vmm = machine.vcpu.read_msr(index, By::Vmm).unwrap();
    let of_l1 = machine.vcpu.read_msr(index, By::Guest).unwrap();
    assert_ne!(of_vmm & 1 << (32 + 14), 0);
    assert_eq!(of_l1 & 1 << (32 + 14), 0);
    assert_eq!(of_l1 & !of_vmm, 0);
}

/// They are no pages that a kernel has given for the host to write to, and what the VMM has switched on is the VMM's.
#[test]
fn an_init_leaves_them() {
    let (mut vcpu, _vm) = rig::vmx::vcpu_offered(features(), offered());
    assert_eq!(vcpu.enable_enlightened_vmcs(), 0x101);
    vcpu.write_msr(HV_VP_INDEX, 7, By::Vmm).unwrap();
    vcpu.write_msr(HV_VP_ASSIST_PAGE, ASSIST, By::Vmm).unwrap();
    vcpu.shared().deliver(Accepted::Init);
    vcpu.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(vcpu.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(vcpu.enlightened_versions(), ENLIGHTENED_VERSIONS);
    assert_eq!(vcpu.read_msr(HV_VP_INDEX, By::Vmm), Ok(7));
    assert_eq!(vcpu.read_msr(HV_VP_ASSIST_PAGE, By::Vmm), Ok(ASSIST));
}
