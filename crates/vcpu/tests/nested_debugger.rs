//! A VMM that debugs a guest which runs a guest of its own: breakpoints and single steps hold whichever level runs, and
//! neither level finds what is the debugger's in its own registers.

mod rig;

use gannet_vcpu::UserExit;
use rig::exit;
use rig::nested::{BLOCK, Hypervisor, L1_RIP, L2_RIP};
use x86::Rflags;
use x86::vmcb::{ExitCode, Vmcb};

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
