//! L1's preemption timer over the model CPU.

use super::*;
use crate::features::Features;
use crate::nested::round_trip_tests::{Rig, features, good};
use backend::{Asleep as _, Claim, DeadlineWatch, Executed, Nested as _, NestedState as _};
use nested_vmx::Vmcs12;
use x86::vmcs::{ExitReason, PinControls, field};

const SAVE: u32 = 1 << 22;

fn with_timer() -> Features {
    let mut f = features();
    f.preemption_timer = Some(5);
    f.pin.base |= PinControls::PREEMPTION_TIMER;
    f
}

fn vmcs12(value: u32, exit: u32) -> Vmcs12 {
    let mut v = good();
    v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) | 1 << 6);
    v.set(field::EXIT_CONTROLS, v.get(field::EXIT_CONTROLS) | exit);
    v.set(field::PREEMPTION_TIMER, value);
    v
}

fn running(v: &Vmcs12) -> Rig {
    let mut r = Rig::on(with_timer(), v, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r
}

/// L2 runs until the CPU's timer ends it, which was set to less than `below`.
fn rings(r: &mut Rig, below: u32) -> Result<Claim, backend::Outside> {
    r.enter(ExitReason::PreemptionTimer, move |v| {
        assert!(v.get(field::PREEMPTION_TIMER) < below, "{}", v.get(field::PREEMPTION_TIMER));
    });
    r.v.claims(&r.g, &r.m)
}

fn reason(r: &Rig) -> u32 {
    r.v.nested.as_ref().unwrap().machine.vmcs12().get(field::EXIT_REASON)
}

#[test]
fn a_timer_of_nothing_is_the_hardwares_and_ends_the_run_at_once() {
    let mut v = vmcs12(0, 0);
    v.set(field::ENTRY_INTERRUPTION, 0x8000_0202);
    let mut r = running(&v);
    // What is injected is injected first, by the entry.
    r.enter(ExitReason::PreemptionTimer, |v| {
        assert_eq!(v.get(field::PREEMPTION_TIMER), 0);
        assert_eq!(v.get(field::ENTRY_INTERRUPTION), 0x8000_0202);
    });
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::L1));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(reason(&r), 52);
    // L1 runs without it.
    r.enter(ExitReason::Hlt, |v| assert_eq!(v.get(field::PREEMPTION_TIMER), u32::MAX));
}

#[test]
fn a_timer_ends_the_run_when_it_has_run_down_on_l1s_tsc() {
    let mut r = running(&vmcs12(1000, 0));
    assert_eq!(rings(&mut r, 1001), Ok(Claim::L0), "too soon");
    r.v.cpu().inner().tsc += 500 << 5;
    assert_eq!(rings(&mut r, 502), Ok(Claim::L0));
    r.v.cpu().inner().tsc += 501 << 5;
    assert_eq!(rings(&mut r, 1), Ok(Claim::L1));
    assert_eq!(r.v.wakes_at().map(|at| at >> 5), Some(1000));
}

#[test]
fn what_is_left_is_saved_if_l1_asks() {
    for (exit, left) in [(0, 1000), (SAVE, 600)] {
        let mut r = running(&vmcs12(1000, exit));
        r.v.cpu().inner().tsc += 400 << 5;
        r.enter(ExitReason::Cpuid, |_| {});
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!(v.get(field::PREEMPTION_TIMER), left);
        assert_eq!(r.v.wakes_at(), None);
        // The next entry begins with it.
        let before = r.v.cpu().inner().tsc >> 5;
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
        let deadline = r.v.nested.as_ref().unwrap().timer.unwrap().0;
        assert!((0..=1).contains(&(deadline - before - u64::from(left))));
    }
}

/// The local APIC's deadline comes first: L2 is entered all the same, and left at once.
#[test]
fn a_deadline_of_the_vcpus_is_not_l1s_timer() {
    let mut r = running(&vmcs12(1000, 0));
    DeadlineWatch::watch(&mut r.v, 1);
    assert_eq!(rings(&mut r, 1), Ok(Claim::L0));
    assert!(DeadlineWatch::is_due(&mut r.v));
    DeadlineWatch::watch(&mut r.v, 0);
    assert!(!DeadlineWatch::is_due(&mut r.v));
    r.v.cpu().inner().tsc += 1001 << 5;
    assert_eq!(rings(&mut r, 1), Ok(Claim::L1));
    assert!(!DeadlineWatch::is_due(&mut r.v));
}

#[test]
fn an_entry_without_it_is_ended_by_no_timer_of_before() {
    let mut r = running(&vmcs12(3, 0));
    r.enter(ExitReason::Cpuid, |v| assert!(v.get(field::PREEMPTION_TIMER) <= 4));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    let n = r.v.nested.as_mut().unwrap();
    let v = n.machine.vmcs12_mut();
    v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) & !(1 << 6));
    n.machine.touch_all();
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.enter(ExitReason::Cpuid, |v| assert_eq!(v.get(field::PREEMPTION_TIMER), u32::MAX));
}

#[test]
fn the_deadline_travels() {
    let mut r = running(&vmcs12(1000, SAVE));
    let deadline = r.v.nested.as_ref().unwrap().timer.unwrap().0;
    r.v.cpu().inner().tsc += 400 << 5;
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::L0));
    r.leave_loop();
    let mut bytes = std::vec![0; r.v.state_size()];
    let g = r.g;
    r.v.save_state(&g, &mut bytes, &r.m).unwrap();
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!((word(24) >> 32, word(32)), (1, deadline));
    r.v.abandon(&mut r.g);
    assert_eq!(r.v.wakes_at(), None);
    r.restore(&bytes, false);
    assert_eq!(r.v.nested.as_ref().unwrap().timer, Some(Deadline(deadline)));
    // A state that has none begins anew, with what was left.
    bytes[28] = 0;
    r.v.abandon(&mut r.g);
    let now = r.v.cpu().inner().tsc >> 5;
    r.restore(&bytes, false);
    let anew = r.v.nested.as_ref().unwrap().timer.unwrap().0;
    assert!((599..=602).contains(&(anew - now)), "{}", anew - now);
    // Whatever it says, nothing overflows.
    for value in [0, u64::MAX] {
        bytes[28] = 1;
        bytes[32..40].copy_from_slice(&value.to_le_bytes());
        r.v.abandon(&mut r.g);
        r.restore(&bytes, false);
        r.come_to(0);
        let below = if value == 0 { 1 } else { u32::MAX };
        let whose = if value == 0 { Claim::L1 } else { Claim::L0 };
        r.enter(ExitReason::PreemptionTimer, move |v| {
            let set = v.get(field::PREEMPTION_TIMER);
            assert!(set < below || set == u32::MAX && value != 0, "{set}");
        });
        assert_eq!(r.v.claims(&r.g, &r.m), Ok(whose));
        r.leave_loop();
    }
}

#[test]
fn it_is_offered_where_the_cpu_counts() {
    for (features, offered) in [(with_timer(), true), (features(), false)] {
        let [_, pin, _, exit] = [0, 1, 2, 3].map(|at| features.nested_capabilities()[at] >> 32);
        assert_eq!((pin >> 6 & 1 != 0, exit >> 22 & 1 != 0), (offered, offered));
    }
}

/// System-management mode has put L2 aside, whose timer counts on: the state that is saved meanwhile has its end.
#[test]
fn the_deadline_of_an_l2_that_is_put_aside_travels() {
    let mut r = running(&vmcs12(1000, SAVE));
    let deadline = r.v.nested.as_ref().unwrap().timer;
    assert!(r.v.enter_smm(&mut r.g, x86::Gpa(0), &r.m).is_ok());
    let mut bytes = std::vec![0; r.v.state_size()];
    let g = r.g;
    r.v.save_state(&g, &mut bytes, &r.m).unwrap();
    r.v.abandon(&mut r.g);
    r.restore(&bytes, true);
    assert_eq!(r.v.nested.as_ref().unwrap().timer, deadline);
    assert!(r.v.leave_smm(&mut r.g, x86::Gpa(0), None, &r.m));
    assert_eq!(r.v.nested.as_ref().unwrap().timer, deadline);
}
