//! A guest that runs a guest of its own by SVM: system-management mode while that runs, and #GP that the CPU makes in
//! place of an exit.

mod rig;

use backend::RAX;
use gannet_vcpu::{By, UserExit, state::registers::GivenEvents};
use rig::nested::{BLOCK, Hypervisor, KEPT, L1_RIP, L1_ROOT, L2_RIP, SMBASE, vmrun};
use rig::{exit, shutdown};
use x86::vmcb::{ExitCode, SEG_CS, event};
use x86::{Cr0, Efer};

const THIRD: u64 = BLOCK + 0x08;
const CPUID: u64 = 1 << 18;
const EXIT_CODE: u64 = BLOCK + 0x70;
const BEHIND: u64 = L1_RIP + 3;
const GP: u32 = 1 << 13;
const NMI: u64 = 1 << 1;
/// Of the fourth word.
const VMLOAD: u64 = 1 << 2;

fn hypervisor() -> Hypervisor {
    let machine = Hypervisor::new(false).with_smram();
    machine.put(THIRD, CPUID << 32);
    machine
}

/// L2 runs, and the handler of an SMI that came meanwhile.
fn in_handler() -> Hypervisor {
    let mut machine = hypervisor();
    machine.stop_in_l2();
    machine.vcpu.queue_smi();
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.segments[SEG_CS].base), (0x8000, SMBASE));
        assert_eq!((vmcb.save.cr3, vmcb.save.cr0 & Cr0::PG.bits()), (L1_ROOT, 0));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    machine
}

#[test]
fn an_smi_that_l1_does_not_intercept_leaves_l2_and_rsm_enters_it() {
    let mut machine = in_handler();
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Software.0);
    assert_eq!((machine.smram(0xfed8), machine.smram(0xfee0)), (1, BLOCK));
    assert_eq!(machine.smram(0xfed0) & Efer::SVME.bits(), Efer::SVME.bits());
    // L1's own: CR3, CR0, RIP.
    let kept = |at: u64| machine.get(KEPT + 0x400 + at);
    assert_eq!((kept(0x150), kept(0x158), kept(0x178)), (L1_ROOT, 0x8001_0033, BEHIND));
    let l2 = machine.smram(0xff78);
    assert!(l2 > L2_RIP && l2 < L2_RIP + 0x10);
    machine.then(exit(ExitCode::Rsm));
    machine.then(move |vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.cr3), (l2, 0x2000));
        assert_ne!(vmcb.save.efer & Efer::LMA.bits(), 0);
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.cr3), (BEHIND, L1_ROOT));
        assert_eq!((vmcb.save.cr0, vmcb.save.efer & 0xffff), (0x8001_0033, 0x1500));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!((machine.get(EXIT_CODE), machine.get(BLOCK + 0x578)), (ExitCode::Cpuid.0, l2));
}

#[test]
fn rsm_into_what_is_no_state_of_l1s_or_no_block_is_a_shutdown() {
    let bad: [(u64, u64); 7] = [
        // Of L1: EFER without SVME, CR0 without PE, CR4 and CR0 with bits that do not exist, RFLAGS.VM.
        (KEPT + 0x4d0, 0x500),
        (KEPT + 0x558, 0x10),
        (KEPT + 0x548, 1 << 40),
        (KEPT + 0x558, 1 << 32 | 0x8001_0033),
        (KEPT + 0x570, 1 << 17),
        // Of the block: no intercept of VMRUN, ASID 0.
        (BLOCK + 0x10, 0),
        (BLOCK + 0x58, 0),
    ];
    for (at, value) in bad {
        let mut machine = in_handler();
        machine.put(at, value);
        machine.then(exit(ExitCode::Rsm));
        assert_eq!(machine.run(), UserExit::Shutdown, "{at:#x}");
    }
}

#[test]
fn an_smi_waits_for_the_entry_that_is_due() {
    let mut machine = hypervisor();
    machine.put(BLOCK + 0xa8, event::VALID | event::EXCEPTION | 6);
    machine.then(exit(ExitCode::Clgi));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    machine.vcpu.queue_smi();
    machine.then(vmrun);
    machine.vcpu.backend().cpu().inner().injects(event::VALID | event::EXCEPTION | 6);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP);
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, 0x8000);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.smram(0xff78), L2_RIP);
}

#[test]
fn without_memory_for_l1s_state_nothing_runs_on() {
    let mut machine = hypervisor();
    machine.vcpu.write_msr(x86::msr::VM_HSAVE_PA, 0x8000_0000, By::Vmm).unwrap();
    machine.stop_in_l2();
    machine.vcpu.queue_smi();
    assert_eq!(machine.run(), UserExit::Dead);
}

/// #GP(0), as a CPU makes it.
fn fault(machine: &mut Hypervisor, rax: u64) {
    machine.then(move |vmcb, gprs| {
        assert_ne!(vmcb.control.intercepts[2] & GP, 0);
        exit(ExitCode::ExcpGp)(vmcb, gprs);
        vmcb.control.exit_info_1 = 0;
        vmcb.control.next_rip = 0;
        (vmcb.save.rax, gprs.0[RAX]) = (rax, rax);
    });
}

/// L1's tables: the first 2 MiB at their own addresses.
fn map(machine: &Hypervisor) {
    for root in [L1_ROOT, 0x2000] {
        machine.put(root, 0x3027);
    }
    for (at, entry) in [(0x3000, 0x4027), (0x4000, 0xe7)] {
        machine.put(at, entry);
    }
}

#[test]
fn a_fault_in_place_of_vmrun_is_vmrun() {
    let mut machine = hypervisor();
    map(&machine);
    machine.put(L1_RIP, 0xd8_010f);
    fault(&mut machine, BLOCK);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP);
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

#[test]
fn a_fault_of_another_instruction_or_for_a_bad_address_stays_one() {
    for (code, rax) in [(0xd8_010f, BLOCK + 8), (0xd8_010f, 1 << 60), (0x300f, BLOCK)] {
        let mut machine = hypervisor();
        map(&machine);
        machine.put(L1_RIP, code);
        fault(&mut machine, rax);
        let injected = event::VALID | event::EXCEPTION | event::ERROR_VALID | 13;
        machine.vcpu.backend().cpu().inner().injects(injected);
        machine.then(shutdown);
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
}

#[test]
fn vmload_of_l2_behind_such_a_fault_is_l1s_to_hear_of() {
    let mut machine = hypervisor();
    map(&machine);
    machine.put(BLOCK + 0x10, 1 | VMLOAD);
    machine.put(L2_RIP, 0xda_010f);
    machine.vmrun();
    fault(&mut machine, BLOCK);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Vmload.0);
}

/// L1 that intercepts #GP hears of the instruction all the same, as from a CPU that looks for the intercept first, and of any
/// other #GP of L2's.
#[test]
fn an_instruction_of_l2_behind_such_a_fault_is_no_fault_for_l1() {
    let gp = ExitCode::Excp0.0 + 13;
    let cases = [
        (0xd8_010f, BLOCK, ExitCode::Vmrun.0),
        (0xda_010f, BLOCK, ExitCode::Vmload.0),
        (0xdb_010f, BLOCK, ExitCode::Vmsave.0),
        (0xdb_010f, BLOCK + 8, gp),
        (0x300f, BLOCK, gp),
    ];
    for (code, rax, told) in cases {
        let mut machine = hypervisor();
        map(&machine);
        machine.put(BLOCK + 0x08, CPUID << 32 | u64::from(GP));
        machine.put(BLOCK + 0x10, 0xd);
        machine.put(L2_RIP, code);
        machine.vmrun();
        fault(&mut machine, rax);
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.save.rip, BEHIND);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(
            (machine.get(EXIT_CODE), machine.get(BLOCK + 0x578)),
            (told, L2_RIP),
            "{code:x}"
        );
        assert_eq!((machine.get(BLOCK + 0x78), machine.get(BLOCK + 0x88)), (0, 0));
    }
}

#[test]
fn a_fault_in_the_delivery_of_a_fault_is_a_double_fault_that_l1_hears_of() {
    let mut machine = hypervisor();
    machine.put(BLOCK + 0x08, CPUID << 32 | 1 << 8);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        exit(ExitCode::ExcpGp)(vmcb, gprs);
        vmcb.control.exit_int_info = event::VALID | event::EXCEPTION | event::ERROR_VALID | 12;
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Excp0.0 + 8);
}

/// L2's kernel gives a vector a handler at no address, and has VMRUN where RIP is: its #GP is that of the delivery. What was
/// to be delivered is nothing of L1's, nor an exit.
#[test]
fn a_fault_in_a_delivery_is_no_instruction_whatever_lies_at_rip() {
    let gp = event::VALID | event::EXCEPTION | event::ERROR_VALID | 13;
    for met in [event::EXCEPTION | 1, event::EXCEPTION | 6, 0x31, event::NMI | 2] {
        for code in [0xd8_010f, 0xda_010f] {
            let mut machine = hypervisor();
            map(&machine);
            machine.put(BLOCK + 0x08, (CPUID | NMI) << 32);
            machine.put(BLOCK + 0x10, 1 | VMLOAD);
            machine.put(L2_RIP, code);
            machine.vmrun();
            machine.then(move |vmcb, gprs| {
                exit(ExitCode::ExcpGp)(vmcb, gprs);
                vmcb.control.exit_int_info = event::VALID | met;
                (vmcb.save.rax, gprs.0[RAX]) = (BLOCK, BLOCK);
            });
            machine.vcpu.backend().cpu().inner().injects(gp);
            machine.then(|vmcb, gprs| {
                assert_eq!(vmcb.save.rip, L2_RIP);
                exit(ExitCode::Cpuid)(vmcb, gprs);
            });
            machine.vcpu.backend().cpu().inner().injects(0);
            machine.then(|vmcb, gprs| {
                assert_eq!(vmcb.save.rip, BEHIND);
                exit(ExitCode::Hlt)(vmcb, gprs);
            });
            assert_eq!(machine.run(), UserExit::Hlt);
            assert_eq!(machine.get(EXIT_CODE), ExitCode::Cpuid.0);
        }
    }
}

/// In the handler there is no L2, as on stock KVM; nor without a page for L1's state.
#[test]
fn an_entry_in_the_handler_is_undefined_and_one_without_a_save_area_is_a_fault() {
    let mut machine = in_handler();
    let mut sregs = machine.vcpu.sregs();
    sregs.efer |= Efer::SVME;
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.then(vmrun);
    machine.vcpu.backend().cpu().inner().injects(event::VALID | event::EXCEPTION | 6);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);

    let mut machine = hypervisor();
    machine.vcpu.write_msr(x86::msr::VM_HSAVE_PA, 0, By::Vmm).unwrap();
    let fault = event::VALID | event::EXCEPTION | event::ERROR_VALID | 13;
    machine.then(vmrun);
    machine.vcpu.backend().cpu().inner().injects(fault);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// The save area of a CPU without long mode has no place for the block: L2's registers are not L1's behind RSM.
#[test]
fn without_long_mode_an_smi_in_l2_ends_the_vm() {
    let mut machine = hypervisor();
    let mut cpuid = machine.vcpu.cpuid_entries().to_vec();
    for entry in cpuid.iter_mut().filter(|entry| entry.leaf == 0x8000_0001) {
        entry.edx &= !(1 << 29);
    }
    machine.vcpu.set_cpuid(&cpuid).unwrap();
    // L2 is in real mode's successor without paging, with no EFER but SVM's.
    machine.put(BLOCK + 0x4d0, Efer::SVME.bits());
    machine.put(BLOCK + 0x558, (Cr0::PE | Cr0::ET).bits());
    machine.stop_in_l2();
    machine.vcpu.queue_smi();
    assert_eq!(machine.run(), UserExit::Dead);
}

/// VMRUN does not ask for paging: an L1 without is found again by RSM.
#[test]
fn rsm_goes_on_in_an_l2_whose_l1_does_not_page() {
    let mut machine = in_handler();
    machine.put(KEPT + 0x558, (Cr0::PE | Cr0::ET).bits());
    // Nor is it in long mode then.
    machine.put(KEPT + 0x4d0, Efer::SVME.bits());
    machine.then(exit(ExitCode::Rsm));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// Another vCPU sends an SMI between KVM_GET_VCPU_EVENTS and KVM_SET_VCPU_EVENTS: it is none of what is set.
#[test]
fn an_smi_that_came_behind_the_get_outlasts_the_set() {
    let mut machine = Hypervisor::new(false).with_smram();
    let events = machine.vcpu.saved_events();
    assert!(!events.smi.pending);
    machine.vcpu.queue_smi();
    machine.vcpu.restore_events(&events, GivenEvents::default());
    machine.vcpu.restore_smi(&events.smi);
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.segments[SEG_CS].base), (0x8000, SMBASE));
        shutdown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);

    // One that was told of as pending is replaced.
    let mut machine = Hypervisor::new(false).with_smram();
    machine.vcpu.queue_smi();
    let mut events = machine.vcpu.saved_events();
    assert!(core::mem::take(&mut events.smi.pending));
    machine.vcpu.restore_smi(&events.smi);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L1_RIP);
        assert_ne!(vmcb.save.segments[SEG_CS].base, SMBASE);
        shutdown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
}
