//! L2 in other activity states than the active one, and INIT, over the model CPU.

extern crate std;
use backend::{Asleep as _, Executed, Gate, Nested as _, Sleep, Waiting};
use nested_vmx::Vmcs12;
use x86::Vector;
use x86::vmcs::{ExitReason, field};

use super::round_trip_tests::{Rig, good};
use crate::fields;

fn in_state(activity: u32) -> Vmcs12 {
    let mut v = good();
    v.set(field::GUEST_ACTIVITY, activity);
    v
}

/// Reason, qualification and activity that L1 has seen last.
fn seen(r: &Rig) -> (u32, u64, u32) {
    let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
    let qualification = v.get(field::EXIT_QUALIFICATION);
    (v.get(field::EXIT_REASON), qualification, v.get(field::GUEST_ACTIVITY))
}

#[test]
fn an_l2_that_is_entered_halted_sleeps_until_an_event_ends_its_run() {
    let mut r = Rig::new(&in_state(1), 0xd01);
    for first in [true, false] {
        let by = if first { ExitReason::Vmlaunch } else { ExitReason::Vmresume };
        assert_eq!(r.go(by), Executed::Asleep(Sleep::Halt));
        assert_eq!(r.v.get(fields::GUEST_ACTIVITY), 0, "the CPU's own guest is active");
        let waiting = Waiting::Interrupt(None);
        assert_eq!(r.v.gate(&waiting), Gate::ExitToL1, "no entry is pending");
        r.v.set_activity(Some(Sleep::Halt));
        assert_eq!(r.v.exit_to_l1(&mut r.g, &waiting, None, &r.m), Executed::Left);
        assert_eq!(seen(&r), (1, 0, 1));
    }
    // What wakes it and is its own makes it an active one.
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Asleep(Sleep::Halt));
    r.v.set_activity(None);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(seen(&r), (10, 0, 0));
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
}

#[test]
fn an_event_that_is_injected_wakes_it() {
    let mut v = in_state(1);
    v.set(field::ENTRY_INTERRUPTION, 0x8000_0202);
    let mut r = Rig::new(&v, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(seen(&r), (10, 0, 0));
}

#[test]
fn an_l2_that_waits_for_a_startup_ipi_takes_no_init() {
    let mut r = Rig::new(&in_state(3), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Asleep(Sleep::WaitForSipi));
    assert_eq!(r.v.gate(&Waiting::Init), Gate::Hold);
    r.v.set_activity(Some(Sleep::WaitForSipi));
    assert_eq!(r.v.exit_for_sipi(&mut r.g, Vector(0x30), &r.m), Executed::Left);
    assert_eq!(seen(&r), (4, 0x30, 3));
}

#[test]
fn an_init_waits_in_root_operation_and_ends_l2s_run() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.v.gate(&Waiting::Init), Gate::Hold);
    assert_eq!(r.v.gate(&Waiting::Nmi), Gate::Deliver);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    assert_eq!(r.v.gate(&Waiting::Init), Gate::ExitToL1);
    assert_eq!(r.v.gate(&Waiting::Nmi), Gate::AfterEntry);
    r.enter(ExitReason::Cpuid, |_| {});
    let _ = r.v.claims(&r.g, &r.m);
    assert_eq!(r.v.gate(&Waiting::Init), Gate::ExitToL1);
    r.v.leave_operation();
    assert_eq!(r.v.gate(&Waiting::Init), Gate::Deliver);
}

#[test]
fn an_init_waits_for_what_the_entry_injects() {
    let mut v12 = good();
    v12.set(field::ENTRY_INTERRUPTION, 0x8000_0202);
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    assert_eq!(r.v.gate(&Waiting::Init), Gate::AfterEntry);
    r.enter(ExitReason::Cpuid, |vmcs| vmcs.set(field::ENTRY_INTERRUPTION, 0x202));
    let _ = r.v.claims(&r.g, &r.m);
    assert_eq!(r.v.gate(&Waiting::Init), Gate::ExitToL1);
}

#[test]
fn other_states_fail_the_entry() {
    for activity in [2, 4, u32::MAX] {
        let mut r = Rig::new(&in_state(activity), 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Left);
        assert_eq!(seen(&r).0, 1 << 31 | 33);
    }
    // An interrupt shadow, or a program that may not halt.
    let mut shadowed = in_state(1);
    shadowed.set(field::GUEST_INTERRUPTIBILITY, 1);
    let mut program = in_state(1);
    program.set(field::GUEST_SS_RIGHTS, 0xc0f3);
    for v in [shadowed, program] {
        let mut r = Rig::new(&v, 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Left);
        assert_eq!(seen(&r).0, 1 << 31 | 33);
    }
}

/// The VMM has given up exits of HLT, and L1 asks for none: the CPU halts L2, and a saved state says so.
#[test]
fn an_l2_that_the_cpu_has_halted_is_saved_so() {
    use backend::{FewerExits, NestedState as _, Permissions as _};
    use nested_vmx::saved::HEADER;
    use zerocopy::FromBytes as _;
    for halted in [1, 0] {
        let mut v12 = good();
        v12.set(field::PROC_CONTROLS, v12.get(field::PROC_CONTROLS) & !(1 << 7));
        let mut r = Rig::new(&v12, 0xd01);
        r.v.give_up_exits(FewerExits { hlt: true, ..FewerExits::default() });
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(ExitReason::ExternalInterrupt, move |v| v.set(field::GUEST_ACTIVITY, halted));
        assert_eq!(r.v.claims(&r.g, &r.m), Ok(backend::Claim::L0));
        r.leave_loop();
        r.v.set_activity(None);
        let mut bytes = std::vec![0; r.v.state_size()];
        r.v.save_state(&r.g, &mut bytes, &r.m).unwrap();
        let saved = Vmcs12::read_from_prefix(&bytes[HEADER..]).unwrap().0;
        assert_eq!(saved.get(field::GUEST_ACTIVITY), halted);
        // It goes on here as it was, and elsewhere behind its HLT, as an L1 does.
        let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!((v.get(field::GUEST_ACTIVITY), r.v.get(fields::GUEST_ACTIVITY)), (0, halted));
        r.restore(&bytes, false);
        assert_eq!(r.v.get(fields::GUEST_ACTIVITY), 0);
    }
}

/// L1 single-steps VMLAUNCH behind STI, where the step is pending: nothing pends behind an exit (SDM vol. 3C §28.5.5).
#[test]
fn what_pends_at_an_entry_does_not_pend_behind_the_exit() {
    const STI: u32 = 1;
    const STEP: u64 = 1 << 14;
    for (fails, by) in [(false, ExitReason::Vmlaunch), (true, ExitReason::Vmlaunch)] {
        let mut r = Rig::new(&in_state(if fails { 4 } else { 0 }), 0xd01);
        r.enter(by, |vmcs| {
            vmcs.set(field::GUEST_RFLAGS, 2 | 1 << 8 | 1 << 9);
            vmcs.set(field::GUEST_INTERRUPTIBILITY, STI);
            vmcs.set(field::GUEST_PENDING_DEBUG, STEP);
        });
        let done = r.v.execute(&mut r.g, 0, &r.m);
        if !fails {
            assert_eq!(done, Executed::Entered);
            r.enter(ExitReason::Cpuid, |_| {});
            assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        }
        assert_eq!(seen(&r).0, if fails { 1 << 31 | 33 } else { 10 });
        r.enter(ExitReason::ExternalInterrupt, |vmcs| {
            assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY), 0);
            assert_eq!(vmcs.get(field::GUEST_PENDING_DEBUG), 0);
        });
    }
}

/// L1 without virtual NMIs injects an NMI into a guest that blocks them. User space restores the entry, and the blocking
/// behind it: the NMI is delivered, and blocks anew.
#[test]
fn what_user_space_blocks_does_not_refuse_an_nmi_that_is_injected() {
    use backend::Injection as _;
    const BLOCKED: u32 = 8;
    let mut v = good();
    v.set(field::ENTRY_INTERRUPTION, 0x8000_0202);
    v.set(field::GUEST_INTERRUPTIBILITY, BLOCKED);
    let mut r = Rig::new(&v, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.v.set_nmi_masked_for_l1(true);
    r.enter(ExitReason::ExternalInterrupt, |vmcs| {
        assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY), 0);
        vmcs.set(field::GUEST_INTERRUPTIBILITY, BLOCKED);
    });
    // Once it is delivered the word is user space's again.
    r.v.set_nmi_masked_for_l1(false);
    assert_eq!(r.v.get(fields::GUEST_INTERRUPTIBILITY), 0);
    r.v.set_nmi_masked_for_l1(true);
    assert_eq!(r.v.get(fields::GUEST_INTERRUPTIBILITY), BLOCKED);
    // One of the vCPU's own, given with the blocking.
    r.v.inject(backend::Event::Nmi);
    r.enter(ExitReason::ExternalInterrupt, |vmcs| {
        assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY), 0);
    });
}
