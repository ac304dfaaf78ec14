//! A VMM that debugs a guest which runs a guest of its own: breakpoints and single steps hold whichever level runs, and
//! neither level finds what is the debugger's in its own registers.

mod rig;

use gannet_vcpu::UserExit;
use rig::exit;
use rig::nested::{BLOCK, Hypervisor, L1_RIP, L2_RIP};
use x86::Rflags;
use x86::vmcb::{ExitCode, Vmcb, event};

const ENABLE: u32 = 1;
const STEP: u32 = 2;
const HARDWARE: u32 = 0x2_0000;
/// DR0 to DR7 as the VMM gives them: execution at 0x1000.
const THEIRS: [u64; 8] = [0x1000, 0, 0, 0, 0, 0, 0, 0x402];
const CPUID: u64 = 1 << 18;
const BEHIND: u64 = L1_RIP + 3;
const DR7: u64 = BLOCK + 0x560;
const DR6: u64 = BLOCK + 0x568;
const RFLAGS: u64 = BLOCK + 0x570;
const TF: u64 = Rflags::TF.bits();

fn hypervisor() -> Hypervisor {
    let machine = Hypervisor::new(false);
    machine.put(BLOCK + 0x08, CPUID << 32);
    machine
}

fn steps(vmcb: &Vmcb) -> bool {
    vmcb.save.rflags & TF != 0
}

#[test]
fn breakpoints_of_the_vmm_hold_for_both_levels() {
    let mut machine = hypervisor();
    // L2's own.
    machine.put(DR7, 0x700);
    machine.put(DR6, 0xffff_0ff1);
    machine.vcpu.set_guest_debug(ENABLE | HARDWARE, THEIRS);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.dr7, vmcb.save.dr6), (L2_RIP, 0x402, 0xffff_0ff0));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    let [.., dr6, dr7] = machine.vcpu.debug_regs();
    assert_eq!((dr6, dr7), (0xffff_0ff1, 0x700), "L2's own");
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.dr7), (BEHIND, 0x402));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!((machine.get(DR6), machine.get(DR7)), (0xffff_0ff1, 0x700), "in L1's block");
    assert_eq!(machine.vcpu.debug_regs()[5], 0x400, "L1's own behind an exit");
    machine.vcpu.set_guest_debug(0, [0; 8]);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.dr7, 0x400);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

#[test]
fn single_steps_go_from_level_to_level() {
    let mut machine = hypervisor();
    machine.vcpu.set_guest_debug(ENABLE | STEP, [0; 8]);
    machine.then(|vmcb, gprs| {
        assert!(steps(vmcb));
        rig::nested::vmrun(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert!(steps(vmcb) && vmcb.save.rip == L2_RIP);
        exit(ExitCode::ExcpDb)(vmcb, gprs);
        vmcb.save.dr6 = 0xffff_4ff0;
    });
    assert!(matches!(machine.run(), UserExit::Debug { exception: 1, pc: L2_RIP, .. }));
    machine.then(|vmcb, gprs| {
        assert!(steps(vmcb));
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert!(steps(vmcb) && vmcb.save.rip == BEHIND);
        exit(ExitCode::ExcpDb)(vmcb, gprs);
        vmcb.save.dr6 = 0xffff_4ff0;
    });
    assert!(matches!(machine.run(), UserExit::Debug { exception: 1, pc: BEHIND, .. }));
    assert_eq!(machine.get(RFLAGS) & TF, 0, "L2's own");
    assert_eq!((machine.get(DR6), machine.vcpu.debug_regs()[4]), (0xffff_0ff0, 0xffff_0ff0));
    // L1's is its own again.
    machine.vcpu.set_guest_debug(0, [0; 8]);
    machine.then(|vmcb, gprs| {
        assert!(!steps(vmcb));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

#[test]
fn an_instruction_of_l1s_that_stays_in_it_is_one_step() {
    let mut machine = hypervisor();
    machine.vcpu.set_guest_debug(ENABLE | STEP, [0; 8]);
    machine.then(exit(ExitCode::Stgi));
    assert!(matches!(machine.run(), UserExit::Debug { exception: 1, .. }));
}

/// An event that ends L2's run while the VMM debugs the guest.
#[test]
fn a_debugged_l2_is_left_for_an_interrupt() {
    let mut machine = hypervisor();
    machine.put(BLOCK + 0x08, (CPUID | 1) << 32);
    machine.put(RFLAGS, Rflags::IF.bits() | 2);
    machine.put(DR7, 0x700);
    machine.stop_in_l2();
    machine.vcpu.set_guest_debug(ENABLE | HARDWARE | STEP, THEIRS);
    machine.vcpu.queue_interrupt(x86::Vector(0x40)).unwrap();
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.dr7), (BEHIND, 0x402));
        assert!(steps(vmcb));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    machine.run();
    assert_eq!((machine.get(BLOCK + 0x70), machine.get(DR7)), (ExitCode::Intr.0, 0x700));
    assert_eq!(machine.get(RFLAGS) & TF, 0);
}

/// An exception of L2's goes through a task gate, and L1 asks for no task switch: it is told from CALL by the event, which
/// the new task is given.
#[test]
fn a_task_gate_of_a_debugged_l2_is_none_of_an_instruction() {
    const TASKS: u64 = 1 << 29;
    const OLD: u64 = 0x4000;
    const NEW: u64 = 0x4100;
    const GDT: u64 = 0x4200;
    let mut machine = hypervisor();
    assert_eq!(machine.get(BLOCK + 0x08) >> 32 & TASKS, 0);
    // Protected mode without paging, flat segments.
    machine.put(BLOCK + 0x558, 0x33);
    machine.put(BLOCK + 0x548, 0);
    machine.put(BLOCK + 0x4d0, 1 << 12);
    for (at, kind, selector) in
        [(0x400, 0xc93, 0x10), (0x410, 0xc9b, 8), (0x420, 0xc93, 0x10), (0x430, 0xc93, 0x10)]
    {
        machine.put(BLOCK + at, 0xffff_ffff << 32 | kind << 16 | selector);
    }
    machine.put(BLOCK + 0x460, 0x27 << 32);
    machine.put(BLOCK + 0x468, GDT);
    let limit = |kind: u64| 0x67 | kind << 40;
    for (n, descriptor) in [
        (1, 0x00cf_9b00_0000_ffff),
        (2, 0x00cf_9300_0000_ffff),
        (3, limit(0x8b) | OLD << 16),
        (4, limit(0x89) | NEW << 16),
    ] {
        machine.put(GDT + n * 8, descriptor);
    }
    let pair = |low: u64, high: u64| low | high << 32;
    // EIP and EFLAGS, ESP, and the segments.
    machine.put(NEW + 0x20, pair(0x5000, 2));
    machine.put(NEW + 0x38, pair(0x3f00, 0));
    machine.put(NEW + 0x48, pair(0x10, 8));
    machine.put(NEW + 0x50, pair(0x10, 0x10));
    machine.put(NEW + 0x58, pair(0x10, 0x10));
    machine.vcpu.set_guest_debug(ENABLE | HARDWARE, THEIRS);
    let mut sregs = machine.vcpu.sregs();
    (sregs.tr.base, sregs.tr.limit, sregs.tr.selector) = (OLD, 0x67, 0x18);
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        exit(ExitCode::TaskSwitch)(vmcb, gprs);
        (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (0x20, 1 << 44 | 0x18);
        vmcb.control.next_rip = 0;
        vmcb.control.exit_int_info =
            event::VALID | event::EXCEPTION | event::ERROR_VALID | 0x18 << 32 | 13;
    });
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.rsp), (0x5000, 0x3efc), "with the error code");
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    machine.vcpu.backend().cpu().inner().injects(0);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    // The old task goes on at the instruction, and the new one is nested in it.
    assert_eq!(machine.get(OLD + 0x20) as u32, L2_RIP as u32);
    assert_eq!(machine.get(NEW) as u32 & 0xffff, 0x18);
}
