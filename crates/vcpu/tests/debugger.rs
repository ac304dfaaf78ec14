//! KVM_SET_GUEST_DEBUG: a VMM's breakpoints borrow the debug registers, and interrupts wait when it
//! says so.

mod rig;

use backend::{Gprs, LiveRegisters, RAX, RCX, RDX};
use cpu::ModelVmcs;
use gannet_vcpu::state::registers::{GivenEvents, SavedEvents};
use gannet_vcpu::{By, RunInput, UserExit};
use mmu::Format;
use rig::vmx::{VmxVcpu, exit, features, shutdown, vcpu, vcpu_of};
use vmx::Features;
use x86::vmcb::ExitCode;
use x86::vmcs::{ExitReason, ProcControls, event, field};

const ENABLE: u32 = 1;
const STEP: u32 = 2;
const HARDWARE: u32 = 0x2_0000;
const BLOCKED: u32 = 0x10_0000;
const TF: u64 = 1 << 8;
const RESET: u64 = 0xffff_0ff0;
const BS: u64 = 1 << 14;
const OWN: [u64; 6] = [1, 2, 3, 4, 0xffff_0ff0, 0x400];
/// DR0 to DR7 as the VMM gives them: execution at 0x1000.
const THEIRS: [u64; 8] = [0x1000, 0, 0, 0, 0, 0, 0, 0x402];

fn run(v: &mut VmxVcpu) {
    v.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

fn watches_debug_registers(v: &mut VmxVcpu) -> bool {
    run(v);
    let vmcs = v.backend().cpu().inner().vmx.current().unwrap();
    ProcControls::from_bits_retain(vmcs.get(field::PROC_CONTROLS)).contains(ProcControls::MOV_DR)
}

#[test]
fn the_guest_keeps_its_debug_registers() {
    let mut v = vcpu();
    v.set_debug_regs(OWN);
    for at in [0x1000, 0x2000] {
        let mut theirs = THEIRS;
        theirs[0] = at;
        v.set_guest_debug(ENABLE | HARDWARE, theirs);
        assert_eq!(v.debug_regs(), OWN);
        assert_eq!(v.backend().debug_regs(), [at, 0, 0, 0, 0xffff_0ff0, 0x402]);
        assert!(watches_debug_registers(&mut v));
        assert_eq!(v.debug_regs(), OWN);
    }
    // What the VMM restores meanwhile is the guest's.
    let restored = [5, 6, 7, 8, 0xffff_0ff0, 0x400];
    v.set_debug_regs(restored);
    assert_eq!(v.backend().debug_regs()[0], 0x2000);
    v.set_guest_debug(0, [0; 8]);
    assert_eq!((v.debug_regs(), v.backend().debug_regs()), (restored, restored));
}

#[test]
fn breakpoints_of_the_guest_are_back_when_those_of_the_vmm_are_gone() {
    let mut v = vcpu();
    let own = [0x5000, 0, 0, 0, 0xffff_0ff0, 0x402];
    v.set_debug_regs(own);
    assert!(!watches_debug_registers(&mut v), "it has them to itself");
    // The VMM's upper half of DR7 would make the entry fail.
    v.set_guest_debug(ENABLE | HARDWARE, [0, 0, 0, 0, 0, 0, 0, 0xffff_ffff_0000_0000]);
    assert_eq!(v.backend().debug_regs(), [0, 0, 0, 0, 0xffff_0ff0, 0x400]);
    assert!(watches_debug_registers(&mut v));
    v.set_guest_debug(ENABLE, [0; 8]);
    assert_eq!(v.backend().debug_regs(), own);
    assert!(!watches_debug_registers(&mut v));
}

#[test]
fn without_breakpoints_nothing_is_borrowed() {
    let mut v = vcpu();
    v.set_debug_regs(OWN);
    v.set_guest_debug(ENABLE, THEIRS);
    assert_eq!((v.debug_regs(), v.backend().debug_regs()), (OWN, OWN));
    // And without the bit that enables it all, the others mean nothing.
    v.set_guest_debug(HARDWARE | BLOCKED, THEIRS);
    assert_eq!((v.debug_regs(), v.backend().debug_regs()), (OWN, OWN));
}

/// An interrupt to oneself by the x2APIC's ICR.
fn sends_itself_one(vmcs: &mut ModelVmcs, gprs: &mut Gprs) {
    const ICR: u64 = 0x830;
    (gprs.0[RAX], gprs.0[RCX], gprs.0[RDX]) = (0x4_0051, ICR, 0);
    vmcs.set(field::GUEST_RFLAGS, 1 << 9 | 2);
    exit(ExitReason::Wrmsr)(vmcs, gprs);
}

/// What of an interrupt an entry has: the one that is injected, or that the CPU is to deliver.
fn waits_in_hardware(v: &mut VmxVcpu) -> bool {
    let vmcs = v.backend().cpu().inner().vmx.current().unwrap();
    let injected = vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID != 0;
    let window = ProcControls::from_bits_retain(vmcs.get(field::PROC_CONTROLS))
        .contains(ProcControls::INTERRUPT_WINDOW);
    injected || window || vmcs.get(field::GUEST_INTERRUPT_STATUS) & 0xff == 0x51
}

#[test]
fn a_blocked_interrupt_is_not_lost() {
    for apicv in [false, true] {
        let (mut v, _) = vcpu_of(Features { apicv, ..features() }, Format::npt(4, 0));
        v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
        v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
        v.set_guest_debug(ENABLE | BLOCKED, [0; 8]);
        v.backend().cpu().inner().vmx.then(sends_itself_one);
        run(&mut v);
        assert!(!waits_in_hardware(&mut v), "apicv {apicv}");
        run(&mut v);
        assert!(!waits_in_hardware(&mut v), "apicv {apicv}");
        v.set_guest_debug(0, [0; 8]);
        let seen = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let at_entry = seen.clone();
        v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
            let injected = vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID != 0;
            let status = vmcs.get(field::GUEST_INTERRUPT_STATUS) & 0xff == 0x51;
            at_entry.store(injected || status, std::sync::atomic::Ordering::Relaxed);
            shutdown(vmcs, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        assert!(seen.load(std::sync::atomic::Ordering::Relaxed), "apicv {apicv}");
    }
}

/// The guest steps itself over an instruction that exits.
#[test]
fn a_trap_of_the_guests_is_told_in_its_own_dr6() {
    let own = [1, 2, 3, 4, RESET | 3, 0x2400];
    let left = [1, 2, 3, 4, RESET | BS, 0x400];
    let theirs = [0x1000, 0, 0, 0, RESET, 0x402];
    let mut v = vcpu();
    v.set_debug_regs(own);
    v.set_guest_debug(ENABLE | HARDWARE, THEIRS);
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        exit(ExitReason::Cpuid)(vmcs, gprs);
        vmcs.set(field::GUEST_RFLAGS, TF | 2);
    });
    run(&mut v);
    assert_eq!((v.debug_regs(), v.backend().debug_regs()), (left, theirs));

    let mut v = rig::vcpu();
    v.set_debug_regs(own);
    v.set_guest_debug(ENABLE | HARDWARE, THEIRS);
    v.backend().cpu().inner().then(|vmcb, gprs| {
        rig::exit(ExitCode::Cpuid)(vmcb, gprs);
        vmcb.save.rflags |= TF;
    });
    v.backend().cpu().inner().then(rig::unknown);
    assert_eq!(v.run(&RunInput::default()), rig::UNKNOWN);
    assert_eq!((v.debug_regs(), v.backend().debug_regs()), (left, theirs));
}

/// What DR6 is in the block, which an AMD CPU has written when it exits, and what the VMM is told.
fn met(v: &mut rig::TestVcpu, bits: u64) -> u64 {
    v.backend().cpu().inner().then(move |vmcb, gprs| {
        rig::exit(ExitCode::ExcpDb)(vmcb, gprs);
        vmcb.save.dr6 |= bits;
    });
    match v.run(&RunInput::default()) {
        UserExit::Debug { exception: 1, dr6, .. } => dr6,
        other => panic!("{other:?}"),
    }
}

#[test]
fn on_amd_a_step_of_the_vmms_is_not_told_twice() {
    let mut v = rig::vcpu();
    v.set_guest_debug(ENABLE | HARDWARE | STEP, THEIRS);
    assert_eq!(met(&mut v, BS), RESET | BS);
    v.set_guest_debug(ENABLE | HARDWARE, THEIRS);
    assert_eq!([met(&mut v, 1), met(&mut v, 2)], [RESET | 1, RESET | 2]);
    assert_eq!(v.debug_regs()[4], RESET);
    // With a step alone the registers are the guest's.
    for own in [RESET, RESET | BS | 2] {
        v.set_guest_debug(0, [0; 8]);
        v.set_debug_regs([0, 0, 0, 0, own, 0x400]);
        v.set_guest_debug(ENABLE | STEP, [0; 8]);
        for _ in 0..2 {
            assert_eq!(met(&mut v, BS), own | BS);
            assert_eq!(v.debug_regs()[4], own);
        }
    }
}

/// OUT to a port of the VMM's under a step of its.
fn steps_over_out(port: u64) -> rig::TestVcpu {
    let mut v = rig::vcpu();
    v.set_guest_debug(ENABLE | STEP, [0; 8]);
    v.backend().cpu().inner().then(move |vmcb, _| {
        vmcb.control.exit_code = ExitCode::Ioio.0;
        vmcb.control.exit_info_1 = port << 16 | 1 << 4;
        vmcb.control.exit_info_2 = vmcb.save.rip + 2;
    });
    assert!(matches!(v.run(&RunInput::default()), UserExit::Io { write: true, .. }));
    v
}

#[test]
fn a_step_over_what_user_space_completes_is_told_at_once() {
    let completes = RunInput { immediate_exit: true, ..RunInput::default() };
    let mut v = steps_over_out(0x99);
    assert!(matches!(v.run(&completes), UserExit::Debug { exception: 1, dr6: 0xffff_4ff0, .. }));
    assert_eq!(v.run(&completes), UserExit::Immediate);
    // This port's has retired before user space hears of it.
    for goes_on in [true, false] {
        let mut v = steps_over_out(0x7e);
        v.set_guest_debug(if goes_on { ENABLE | STEP } else { ENABLE }, [0; 8]);
        let told = v.run(&completes);
        assert_eq!(matches!(told, UserExit::Debug { .. }), goes_on, "{told:?}");
    }
}

/// What user space gives that an instruction makes returns behind that instruction, whatever the last exit was.
#[test]
fn an_event_of_an_instruction_has_the_length_of_that_and_not_of_the_last_exit() {
    let int = SavedEvents {
        interrupt: Some(x86::Vector(0x80)),
        interrupt_soft: true,
        ..SavedEvents::default()
    };
    let breakpoint = SavedEvents {
        exception: Some(x86::Exception { vector: x86::Vector(3), ..x86::Exception::ud() }),
        exception_injected: true,
        ..SavedEvents::default()
    };
    for (events, length) in [(int, 2), (breakpoint, 1)] {
        for before in [false, true] {
            let mut v = vcpu();
            if before {
                v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
                    exit(ExitReason::Cpuid)(vmcs, gprs);
                    vmcs.set(field::INSTRUCTION_LENGTH, 3);
                });
                run(&mut v);
            }
            v.restore_events(&events, GivenEvents::default());
            v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
                assert_ne!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
                assert_eq!(vmcs.get(field::ENTRY_INSTRUCTION_LENGTH), length, "{before}");
                shutdown(vmcs, gprs);
            });
            assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        }
    }
}
