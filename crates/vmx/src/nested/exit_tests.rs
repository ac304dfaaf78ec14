//! What L1 hears of L2's exits, and of what L0 carries out for L2, over the model CPU.

use backend::{Executed, Nested as _, Permissions as _};
use x86::vmcs::{ExitReason, ProcControls2, field};

use super::round_trip_tests::{Rig, good};
use super::*;

/// The hardware refuses what the checks here let pass: L1 mends it, and its VMLAUNCH is still the right instruction.
#[test]
fn an_entry_that_the_hardware_refuses_launches_nothing() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::InvalidGuestState, |v| {
        v.set(field::EXIT_REASON, 1 << 31 | u32::from(ExitReason::InvalidGuestState.0));
    });
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(backend::Claim::L1));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Retired, "VMfail: not launched");
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
}

/// An INT 80h that L1 injects meets a fault of L0's in its delivery: there need be no INT at RIP.
#[test]
fn a_software_interrupt_of_l1s_is_injected_again() {
    let mut v12 = good();
    let injects = x86::vmcs::event::VALID | x86::vmcs::event::SOFT | 0x80;
    v12.set(field::ENTRY_INTERRUPTION, injects);
    v12.set(field::ENTRY_INSTRUCTION_LENGTH, 2);
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::EptViolation, move |v| v.set(field::IDT_VECTORING, injects));
    assert!(r.v.repeats_injection());
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.enter(ExitReason::EptViolation, move |v| v.set(field::IDT_VECTORING, injects));
    assert!(!r.v.repeats_injection(), "this one is L2's own");
}

/// A VMM takes abilities from the capability MSRs, and sets CPUID again.
#[test]
fn what_the_vmm_has_taken_away_stays_away() {
    let mut r = Rig::new(&good(), 0xd01);
    r.v.nested.as_mut().unwrap().machine.reset();
    let msr = x86::vmcs::capability::VMX_PROCBASED_CTLS2;
    let all = r.v.nested_msr_value(msr).unwrap();
    let fewer = all & !(u64::from(ProcControls2::EPT.bits()) << 32);
    assert_ne!(fewer, all);
    r.v.set_nested_msr_value(msr, fewer).unwrap();
    let mut limits = r.v.cold.limits;
    limits.cr4_allowed |= Cr4::from_bits_retain(1 << 16);
    r.v.set_limits(limits);
    assert_eq!(r.v.nested_msr_value(msr), Some(fewer));
    let fixed = r.v.nested_msr_value(x86::vmcs::capability::VMX_CR4_FIXED1).unwrap();
    assert_ne!(fixed & 1 << 16, 0, "this one follows from CPUID");
}

/// L1 waits for the moment at which L2 takes an interrupt. An L2 that halts with interrupts on is entered, so that the
/// window ends its run at once.
#[test]
fn an_open_window_of_l1s_keeps_l2_awake() {
    let mut v12 = good();
    v12.set(field::PROC_CONTROLS, v12.get(field::PROC_CONTROLS) | 1 << 2);
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Hlt, |v| v.set(field::GUEST_RFLAGS, 0x202));
    assert!(r.v.keeps_awake());
    r.enter(ExitReason::Hlt, |v| v.set(field::GUEST_RFLAGS, 2));
    assert!(!r.v.keeps_awake());
}

/// The exit behind an instruction that L0 has carried out, and what of a breakpoint L2 takes later.
#[test]
fn a_trap_that_is_owed_ends_l2s_run() {
    let mut v12 = good();
    v12.set(field::PROC_CONTROLS, v12.get(field::PROC_CONTROLS) | 1 << 27);
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Rdmsr, |_| {});
    assert!(r.v.traps_each() && !r.v.owes_trap());
    assert_eq!(r.v.gate(&backend::Waiting::MonitorTrap), backend::Gate::AfterEntry);
    r.v.claims(&r.g, &r.m).unwrap();
    r.v.owe_trap();
    assert_eq!(r.v.gate(&backend::Waiting::MonitorTrap), backend::Gate::ExitToL1);
    r.v.keep_debug_trap(1 << 14);
    assert_eq!(
        r.v.exit_to_l1(&mut r.g, &backend::Waiting::MonitorTrap, None, &r.m),
        Executed::Left
    );
    assert!(!r.v.owes_trap());
    let v12 = r.v.nested.as_ref().unwrap().machine.vmcs12();
    assert_eq!(v12.get(field::EXIT_REASON), u32::from(ExitReason::MonitorTrap.0));
    assert_eq!(v12.get(field::GUEST_PENDING_DEBUG), 1 << 14);
}
