//! A guest that runs a guest of its own by VMX: what becomes of its exits, and what a round trip costs.

mod rig;

use backend::{Gprs, RAX, RCX};
use cpu::{Counts, ModelVmcs, Op};
use gannet_vcpu::{
    By, UserExit,
    state::registers::{GivenEvents, SavedEvents},
};
use host::std_port::test as surroundings;
use irqchip::lapic::{BaseRules, base};
use nested_vmx::saved::flag;
use rig::nested_vmx::{Hypervisor, L1_RIP, L2_RIP, features, vmcs12};
use rig::vmx::{exit, shutdown};
use x86::vmcs::{ExitReason, ProcControls2, event, field};
use x86::{Vector, msr};

const MONITOR_TRAP: u32 = 1 << 27;
const NMI_WINDOW: u32 = 1 << 22;
const NMI_EXITING: u32 = 1 << 3;

/// L1 hears of each instruction of L2's, or the VMM debugs the guest. What is none is answered all the same: a fault
/// instead of one reaches L2, and a window that has come is closed.
#[test]
fn what_is_no_instruction_is_answered_whoever_hears_of_instructions() {
    for (traps, debugging) in [(MONITOR_TRAP, 0), (0, 0x2_0001), (MONITOR_TRAP, 0x2_0001)] {
        what_is_no_instruction_is_answered(traps, debugging);
    }
}

fn what_is_no_instruction_is_answered(traps: u32, debugging: u32) {
    let mut v = vmcs12();
    v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) | traps);
    // NMIs are L2's.
    v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) & !NMI_EXITING);
    let mut machine = Hypervisor::on(features(), &v);
    machine.vcpu.set_guest_debug(debugging, [0x1000, 0, 0, 0, 0, 0, 0, 0x402]);
    machine.vmlaunch();
    let shared = machine.vcpu.shared().clone();
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        exit(ExitReason::Rdpmc)(vmcs, gprs);
    });
    machine.then(move |vmcs, gprs| {
        let info = event::VALID | event::EXCEPTION | event::ERROR_VALID | 13;
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), info);
        // It was delivered, and two NMIs come.
        vmcs.set(field::ENTRY_INTERRUPTION, 13);
        shared.add_nmi();
        shared.add_nmi();
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    let nmi = event::VALID | event::NMI | 2;
    machine.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), nmi);
        assert_ne!(vmcs.get(field::PROC_CONTROLS) & NMI_WINDOW, 0);
        vmcs.set(field::ENTRY_INTERRUPTION, 2);
        exit(ExitReason::NmiWindow)(vmcs, gprs);
    });
    machine.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), nmi);
        assert_eq!(vmcs.get(field::PROC_CONTROLS) & NMI_WINDOW, 0);
        shutdown(vmcs, gprs);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// A CPU writes parts of an active VMCS back whenever it likes (SDM vol. 3C §25.11.1); the pages are somebody else's when
/// the vCPU is gone.
#[test]
fn a_vcpu_that_goes_has_each_of_its_vmcss_cleared_where_it_is_active() {
    let mut machine = Hypervisor::on(features(), &vmcs12());
    machine.vmlaunch();
    machine.then(exit(ExitReason::Cpuid));
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        surroundings::set_signal_pending(true);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    // Each is cleared before it is used for the first time: L1's, L2's, and the one that L1 reads and writes unseen.
    let cpu = host::smp::cpu_id();
    let made = machine.vcpu.backend().cpu().inner().vmx.cleared.take();
    let mut made: Vec<_> = made.iter().map(|vmcs| (cpu, vmcs.0)).collect();
    assert_eq!(made.len(), 3);
    surroundings::take_asked();
    drop(machine);
    let mut asked = surroundings::take_asked();
    made.sort_unstable();
    asked.sort_unstable();
    assert_eq!(asked, made);
}

/// L1 hears of each iteration of a string instruction that is carried out below it.
#[test]
fn under_a_monitor_trap_each_iteration_of_a_string_is_told() {
    let mut v = vmcs12();
    v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) | MONITOR_TRAP);
    let mut machine = Hypervisor::on(features(), &v);
    // L2's tables: the first 2 MiB at their own addresses. Its code: REP OUTSB.
    for (at, entry) in [(0x2000, 0x3027), (0x3000, 0x4027), (0x4000, 0xe7), (L2_RIP, 0x6ef3)] {
        machine.put(at, entry);
    }
    machine.put(0xa000, 0x4241);
    machine.vmlaunch();
    let outs = |left: u64| {
        move |vmcs: &mut cpu::ModelVmcs, gprs: &mut backend::Gprs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
            (gprs.0[1], gprs.0[2], gprs.0[6]) = (left, 0x60, 0xa002 - left);
            exit(ExitReason::Io)(vmcs, gprs);
            // A string, repeated, out of one byte.
            vmcs.set(field::EXIT_QUALIFICATION, 1 << 4 | 1 << 5 | 0x60 << 16);
        }
    };
    let resumes = |left: u64| {
        move |vmcs: &mut cpu::ModelVmcs, gprs: &mut backend::Gprs| {
            assert_eq!((vmcs.get(field::GUEST_RIP), gprs.0[1]), (L1_RIP, left));
            exit(ExitReason::Vmresume)(vmcs, gprs);
        }
    };
    machine.then(outs(2));
    assert!(matches!(machine.run(), UserExit::Io { .. }));
    machine.then(resumes(1));
    machine.then(outs(1));
    assert!(matches!(machine.run(), UserExit::Io { .. }));
    machine.then(|vmcs, gprs| {
        assert_eq!((vmcs.get(field::GUEST_RIP), gprs.0[1]), (L1_RIP, 0));
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// A state that was saved with an entry that is due and with an exit that L1 is owed behind it: both are given.
#[test]
fn an_exit_that_is_owed_comes_behind_the_entry_that_is_due() {
    let mut v = vmcs12();
    v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) | MONITOR_TRAP);
    let flags = flag::GUEST_MODE | flag::RUN_PENDING | flag::MTF_PENDING;
    let mut machine = Hypervisor::restored(features(), &v, flags);
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// An L2 that is entered halted does not run: what ends its halt and is L1's ends its run.
#[test]
fn an_nmi_ends_the_run_of_an_l2_that_is_entered_halted() {
    let mut v = vmcs12();
    v.set(field::GUEST_ACTIVITY, 1);
    let mut machine = Hypervisor::on(features(), &v);
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcs, gprs| {
        // Right behind VMLAUNCH nothing waits yet.
        shared.add_nmi();
        exit(ExitReason::Vmlaunch)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// What ten round trips of L2's exits by `reason` cost: L1 hears of each, and resumes L2.
fn ten_trips(reason: ExitReason) -> Counts {
    let run = |trips: usize| {
        let mut machine = Hypervisor::on(features(), &vmcs12());
        machine.vmlaunch();
        for _ in 0..trips {
            machine.then(move |vmcs, gprs| {
                assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
                exit(reason)(vmcs, gprs);
            });
            machine.then(|vmcs, gprs| {
                assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
                exit(ExitReason::Vmresume)(vmcs, gprs);
            });
        }
        machine.then(shutdown);
        // L1 has no handler for that.
        machine.then(shutdown);
        let before = machine.vcpu.backend().cpu().counts();
        assert_eq!(machine.run(), UserExit::Shutdown);
        machine.vcpu.backend().cpu().counts().since(&before)
    };
    let (some, more) = (run(5), run(15));
    more.since(&some)
}

/// Two entries, what L1 may change without an exit read, what an exit loads written, each VMCS current once, and
/// nothing else that is privileged.
#[test]
fn a_round_trip_writes_what_an_exit_loads_and_no_more() {
    for reason in [ExitReason::Cpuid, ExitReason::Vmcall, ExitReason::Hlt] {
        let ten = ten_trips(reason);
        assert_eq!(ten.of(Op::VmxEnter), 20);
        for (op, most) in [(Op::Vmread, 21), (Op::Vmwrite, 37), (Op::Vmptrld, 4)] {
            assert!(ten.of(op) <= 10 * most, "{op:?} {} in ten", ten.of(op));
        }
        for op in [
            Op::Rdmsr,
            Op::Wrmsr,
            Op::Cpuid,
            Op::Xsetbv,
            Op::Xgetbv,
            Op::DebugReg,
            Op::MovCr,
            Op::Vmclear,
            Op::Invept,
            Op::Invvpid,
        ] {
            assert_eq!(ten.of(op), 0, "{op:?}");
        }
    }
}

/// VMX root operation blocks INIT: a VMM cannot have the vCPU wait for what follows one (EINVAL), as on stock KVM.
#[test]
fn a_vmm_asks_for_no_wait_for_a_sipi_while_init_is_blocked() {
    assert!(!rig::vmx::vcpu().holds_init_back());
    let mut machine = Hypervisor::on(features(), &vmcs12());
    assert!(machine.vcpu.holds_init_back());
}

/// VMFUNC of L2's is no #UD because a debugger looks on: L0 carries it out, outside.
#[test]
fn a_vm_function_of_a_debugged_l2_is_carried_out() {
    const LIST: u64 = 0xa000;
    const TABLES: u64 = 0x3000 | 3 << 3 | 6;
    let mut v = vmcs12();
    let second = ProcControls2::VPID | ProcControls2::EPT | ProcControls2::VMFUNC;
    v.set(field::PROC_CONTROLS2, second.bits());
    v.set(field::EPT_POINTER, TABLES);
    v.set(field::VM_FUNCTION_CONTROLS, 1);
    v.set(field::EPTP_LIST, LIST);
    let mut machine = Hypervisor::on(features(), &v);
    machine.put(LIST, TABLES);
    machine.vcpu.set_guest_debug(0x2_0001, [0x1000, 0, 0, 0, 0, 0, 0, 0x402]);
    machine.vmlaunch();
    machine.then(|vmcs, gprs| {
        (gprs.0[RAX], gprs.0[RCX]) = (0, 0);
        exit(ExitReason::Vmfunc)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP + 2);
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
        shutdown(vmcs, gprs);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// L2 is entered with a priority below L1's threshold and with an event: the exit for it comes behind the event, before L2's
/// first instruction, and before an INIT.
#[test]
fn a_priority_below_the_threshold_is_told_behind_what_the_entry_injects() {
    const PAGE: u64 = 0xb000;
    const ACCESSES: u64 = 0xc000;
    const BELOW: u64 = 43;
    let injected = event::VALID | 0x40;
    for injects in [true, false] {
        let mut v = vmcs12();
        v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) | 1 << 21);
        let second = ProcControls2::VPID | ProcControls2::VIRTUALIZE_APIC_ACCESSES;
        v.set(field::PROC_CONTROLS2, second.bits());
        v.set(field::VIRTUAL_APIC_ADDR, PAGE);
        v.set(field::APIC_ACCESS_ADDR, ACCESSES);
        v.set(field::TPR_THRESHOLD, 5);
        v.set(field::ENTRY_INTERRUPTION, if injects { injected } else { 0 });
        let mut machine = Hypervisor::on(features(), &v);
        let shared = machine.vcpu.shared().clone();
        machine.then(move |vmcs, gprs| {
            shared.set_init(true);
            shared.request(vm::vcpu_shared::Request::Event);
            exit(ExitReason::Vmlaunch)(vmcs, gprs);
        });
        if injects {
            machine.then(move |vmcs, gprs| {
                assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
                assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), injected);
                // It was delivered, and the CPU interrupts itself.
                vmcs.set(field::ENTRY_INTERRUPTION, 0x40);
                exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
            });
        }
        machine.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
            shutdown(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Shutdown);
        // Root operation holds it back.
        assert!(machine.vcpu.saved_events().smi.latched_init);
        let found = machine.vmcs12();
        assert_eq!(u64::from(found.get(field::EXIT_REASON)), BELOW);
    }
}

/// An INIT that root operation has held back goes before a debug exception that the entry finds pending: L2 does not run.
#[test]
fn an_init_goes_before_a_pending_debug_exception() {
    let mut v = vmcs12();
    v.set(field::GUEST_PENDING_DEBUG, 1 << 14);
    let mut machine = Hypervisor::on(features(), &v);
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcs, gprs| {
        shared.set_init(true);
        shared.request(vm::vcpu_shared::Request::Event);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    machine.vmlaunch();
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
    let found = machine.vmcs12();
    let told = (found.get(field::EXIT_REASON), found.get(field::GUEST_PENDING_DEBUG));
    assert_eq!(told, (3, 1 << 14));
}

/// L2 writes the TSC, which L1 lets it do, while L1's preemption timer runs: the timer runs on as if nothing had been.
#[test]
fn a_write_of_the_tsc_moves_no_end_of_a_timer() {
    let mut v = vmcs12();
    v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) | 1 << 6);
    v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) | 1 << 28);
    v.set(field::MSR_BITMAP, 0xd000);
    v.set(field::PREEMPTION_TIMER, 1000);
    let f = vmx::Features {
        preemption_timer: Some(5),
        pin: vmx::Controls {
            base: features().pin.base | x86::vmcs::PinControls::PREEMPTION_TIMER,
            ..features().pin
        },
        ..features()
    };
    let mut machine = Hypervisor::on(f, &v);
    machine.vmlaunch();
    for delta in [0x100_0000u64, 0x10_0000u64.wrapping_neg()] {
        machine.then(move |vmcs, gprs| {
            let now = vmcs.get(field::TSC_OFFSET).wrapping_add(delta);
            let left = vmcs.get(field::PREEMPTION_TIMER);
            assert!((900..=1000).contains(&left), "{left}");
            (gprs.0[RAX], gprs.0[RCX], gprs.0[2]) = (now & 0xffff_ffff, 0x10, now >> 32);
            exit(ExitReason::Wrmsr)(vmcs, gprs);
        });
    }
    machine.then(|vmcs, gprs| {
        let left = vmcs.get(field::PREEMPTION_TIMER);
        assert!((900..=1000).contains(&left), "{left}");
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// Lists of MSRs name what the vCPU has, and not the instruction set: an entry loads it, an exit stores what L2 has and loads
/// what L1 gets. An entry whose list has a value that WRMSR refuses, or an MSR that there is not, fails at it.
#[test]
fn lists_name_msrs_of_the_vcpu() {
    const MTRRS: u64 = 0x2ff;
    const LISTS: u64 = 0xe000;
    let (of_l2, of_l1) = (0xc06, 0x806);
    for (loaded, failed) in [
        ([(MTRRS, of_l2), (0xc000_0102, 1)], 0),
        ([(MTRRS, 2), (0xc000_0102, 1)], 1),
        ([(0xc000_0102, 1), (0x1234_5678, 0)], 2),
        ([(MTRRS, of_l2), (0x830, 0)], 2),
    ] {
        let mut v = vmcs12();
        for (count, at, lengths) in [
            (field::ENTRY_MSR_LOAD_COUNT, field::ENTRY_MSR_LOAD_ADDR, (2, LISTS)),
            (field::EXIT_MSR_STORE_COUNT, field::EXIT_MSR_STORE_ADDR, (1, LISTS + 0x100)),
            (field::EXIT_MSR_LOAD_COUNT, field::EXIT_MSR_LOAD_ADDR, (1, LISTS + 0x200)),
        ] {
            v.set(count, lengths.0);
            v.set(at, lengths.1);
        }
        let mut machine = Hypervisor::on(features(), &v);
        for (n, (index, value)) in (0..).zip(loaded) {
            machine.put(LISTS + 16 * n, index);
            machine.put(LISTS + 16 * n + 8, value);
        }
        machine.put(LISTS + 0x100, MTRRS);
        machine.put(LISTS + 0x200, MTRRS);
        machine.put(LISTS + 0x208, of_l1);
        machine.vmlaunch();
        if failed == 0 {
            machine.then(|vmcs, gprs| {
                assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
                exit(ExitReason::Cpuid)(vmcs, gprs);
            });
        }
        machine.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
            shutdown(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Shutdown);
        assert_eq!(machine.vcpu.read_msr(MTRRS as u32, By::Vmm), Ok(of_l1), "L1's host state");
        let stored = if failed == 0 { of_l2 } else { 0 };
        assert_eq!(machine.get(LISTS + 0x108), stored);
        let found = machine.vmcs12();
        let told = (found.get(field::EXIT_REASON), found.get(field::EXIT_QUALIFICATION));
        assert_eq!(told, if failed == 0 { (10, 0) } else { (0x8000_0022, failed) });
    }
}

/// A startup IPI comes while an entry is made that would wait for one, and whose list is refused: the entry fails, and L1 gets
/// no exit for the IPI.
#[test]
fn a_startup_ipi_does_not_go_before_the_failure_of_the_entry() {
    const LIST: u64 = 0xe000;
    for refused in [false, true] {
        let mut v = vmcs12();
        v.set(field::GUEST_ACTIVITY, 3);
        v.set(field::ENTRY_MSR_LOAD_COUNT, 1);
        v.set(field::ENTRY_MSR_LOAD_ADDR, LIST);
        let mut machine = Hypervisor::on(features(), &v);
        machine.put(LIST, 0x2ff);
        machine.put(LIST + 8, if refused { 2 } else { 0xc06 });
        let vm = machine.vm.clone();
        machine.then(move |vmcs, gprs| {
            let startup = irqchip::Msi { address_lo: 0xfee0_0000, address_hi: 0, data: 0x630 };
            let _ = host::std_port::test::on_another_cpu(|| vm.irq().signal_msi(&startup));
            exit(ExitReason::Vmlaunch)(vmcs, gprs);
        });
        machine.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
            shutdown(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Shutdown);
        let found = machine.vmcs12();
        let told = (found.get(field::EXIT_REASON), found.get(field::EXIT_QUALIFICATION));
        assert_eq!(told, if refused { (0x8000_0022, 1) } else { (4, 0x30) });
    }
}

/// What an exit's list asks for and is not to be had is a VMX abort.
#[test]
fn an_exit_whose_list_cannot_be_done_shuts_the_vcpu_down() {
    // No CPU has the first; the CPUID of this guest is without the second.
    for (store, load) in [(0x1234_5678, 0x2ff), (msr::SPEC_CTRL, 0x2ff), (0x2ff, 0x1234_5678)] {
        let mut v = vmcs12();
        v.set(field::EXIT_MSR_STORE_COUNT, 1);
        v.set(field::EXIT_MSR_STORE_ADDR, 0xe100);
        v.set(field::EXIT_MSR_LOAD_COUNT, 1);
        v.set(field::EXIT_MSR_LOAD_ADDR, 0xe200);
        let mut machine = Hypervisor::on(features(), &v);
        machine.put(0xe100, u64::from(store));
        machine.put(0xe200, load);
        machine.put(0xe208, 0x806);
        machine.vmlaunch();
        machine.then(exit(ExitReason::Cpuid));
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
}

/// L1 was offered an interrupt that it could not take, and enters an L2 that could: the interrupt is L1's, and ends the run.
#[test]
fn an_interrupt_that_l1_was_offered_is_not_injected_into_l2() {
    const IF: u64 = 1 << 9;
    let mut v = vmcs12();
    v.set(field::GUEST_RFLAGS, 2 | IF);
    v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) | 1);
    let mut machine = Hypervisor::on(features(), &v);
    let shared = machine.vcpu.shared().clone();
    let rules = BaseRules { maxphyaddr: 48, x2apic: true, host: true };
    shared.lapic.set_base(shared.lapic.base() | base::EXTD, rules).unwrap();
    assert!(shared.lapic.write_x2(0x80f, 0x1ff).is_ok());
    // All that an entry looks at is in the VM's tables, so that it happens inside the loop.
    for page in [0x1000, 0x2000, 0x7000] {
        machine.then(move |vmcs, gprs| {
            exit(ExitReason::EptViolation)(vmcs, gprs);
            // A write.
            vmcs.set(field::EXIT_QUALIFICATION, 2);
            vmcs.set(field::GUEST_PHYSICAL_ADDRESS, page);
        });
    }
    machine.then(move |vmcs, gprs| {
        vmcs.set(field::GUEST_RFLAGS, 2);
        let _ = shared.lapic.accept_fixed(Vector(0x40), irqchip::Trigger::Edge);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_ne!(vmcs.get(field::PROC_CONTROLS) & (1 << 2), 0, "L1 is offered it");
        exit(ExitReason::Vmlaunch)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0, "L1's, in L2");
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L1_RIP);
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// The half of a store that a device has is done, and what is left makes a page dirty that L1 has noted first. KVM_RUN ends
/// for none of it: it is noted and stored, or L1 hears that its log is full.
#[test]
fn a_page_that_l1_has_noted_holds_no_answered_store_up() {
    const TABLES: u64 = 0x1_0000;
    const LEAVES: u64 = TABLES + 0x3000;
    const AT: u64 = 0x2_0ffc;
    const LOG: u64 = 0x3_0000;
    const ALL: u64 = 0x337;
    for (index, noted) in [(511, true), (0xffff, false)] {
        let mut v = vmcs12();
        v.set(field::PROC_CONTROLS2, 1 << 5 | 1 << 1 | 1 << 17);
        v.set(field::EPT_POINTER, TABLES | 0x5e);
        v.set(field::PML_ADDRESS, LOG);
        v.set(field::PML_INDEX, index);
        let mut machine = Hypervisor::on(features(), &v);
        for level in 0..3 {
            machine.put(TABLES + level * 0x1000, (TABLES + (level + 1) * 0x1000) | 0x107);
        }
        for page in 0..64 {
            machine.put(LEAVES + page * 8, page << 12 | ALL);
        }
        machine.put(LEAVES + (AT >> 12) * 8, 0xd000_0000 | ALL);
        // L2's own: 2 MiB at their own addresses.
        for (at, entry) in [(0x2000, 0x3027), (0x3000, 0x4027), (0x4000, 0xe7)] {
            machine.put(at, entry);
        }
        machine.put(L2_RIP, 0x50); // push rax
        machine.vmlaunch();
        machine.then(|vmcs, gprs| {
            exit(ExitReason::EptViolation)(vmcs, gprs);
            vmcs.set(field::EXIT_QUALIFICATION, 0x182);
            vmcs.set(field::GUEST_LINEAR_ADDRESS, AT);
            vmcs.set(field::GUEST_PHYSICAL_ADDRESS, AT);
            vmcs.set(field::GUEST_RSP, AT + 8);
            gprs.0[RAX] = 0x1234_5678_9abc_def0;
        });
        let asked = machine.run();
        assert!(matches!(asked, UserExit::Mmio { gpa: 0xd000_0ffc, len: 4, .. }), "{asked:?}");
        let behind = (AT >> 12) + 1;
        machine.put(LEAVES + behind * 8, behind << 12 | ALL & !0x200);
        machine.then(move |vmcs, gprs| {
            let rip = vmcs.get(field::GUEST_RIP);
            assert_eq!(rip, if noted { L2_RIP + 1 } else { L1_RIP });
            shutdown(vmcs, gprs);
        });
        if noted {
            machine.then(shutdown);
        }
        assert_eq!(machine.run(), UserExit::Shutdown);
        let (stored, logged) = (machine.get(behind << 12), machine.get(LOG + 511 * 8));
        let wanted = if noted { (0x1234_5678, behind << 12) } else { (0, 0) };
        assert_eq!((stored, logged), wanted);
    }
}

/// An SMI comes while L2 is in its NMI handler, and L1 in none, or the other way round: it is L1's blocking that the mode keeps.
#[test]
fn an_smi_keeps_the_blocking_of_l1() {
    const NMI: u32 = 8;
    const SMBASE: u64 = 0x3_0000;
    for of_l1 in [false, true] {
        let mut v = vmcs12();
        v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) | 1 << 5);
        v.set(field::GUEST_INTERRUPTIBILITY, if of_l1 { 0 } else { NMI });
        let mut machine = Hypervisor::on(features(), &v);
        let smram = host::page::Pages::zeroed(4).unwrap();
        let region =
            mmu::Region { slot: 0, flags: 0, gpa: SMBASE, size: 16 << 12, hva: smram.hpa().0 };
        let space = machine.vm.memory_in(mmu::AddressSpace::Smm);
        space.set_region(&region, &**machine.vm).unwrap();
        let events = SavedEvents { nmi_masked: of_l1, ..SavedEvents::default() };
        machine.vcpu.restore_events(&events, GivenEvents::default());
        let interrupted = |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
            exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
            host::std_port::test::set_signal_pending(true);
        };
        machine.vmlaunch();
        machine.then(move |vmcs, gprs| {
            let blocked = vmcs.get(field::GUEST_INTERRUPTIBILITY) & NMI != 0;
            assert_eq!((vmcs.get(field::GUEST_RIP), blocked), (L2_RIP, !of_l1));
            interrupted(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Intr);
        host::std_port::test::set_signal_pending(false);
        machine.vcpu.queue_smi();
        machine.then(move |vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), 0x8000, "the handler runs");
            assert_ne!(vmcs.get(field::GUEST_INTERRUPTIBILITY) & NMI, 0);
            interrupted(vmcs, gprs);
        });
        assert_eq!(machine.run(), UserExit::Intr);
        host::std_port::test::set_signal_pending(false);
        let smi = machine.vcpu.saved_events().smi;
        assert_eq!((smi.smm, smi.inside_nmi), (true, of_l1));
    }
}
