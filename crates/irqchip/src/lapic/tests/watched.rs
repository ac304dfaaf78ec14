//! The timer whose time the owner watches.

use std::thread;

use super::*;

const DEADLINE: u32 = 1 << 18;
const PERIODIC: u32 = 1 << 17;
const VECTOR: u32 = 0xec;
const NOTHING: SwTimerExpired =
    SwTimerExpired { accepted: Accepted::Ignored, rearm: None, ask_owner: false };

fn clock(now_ns: u64) -> TimerClock {
    TimerClock { now_ns, guest_tsc: now_ns * 2, tsc_khz: 2_000_000 }
}

fn watched(lvt: u32) -> Lapic {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, lvt | VECTOR);
    lapic.switch_to_hv_timer();
    lapic
}

fn count(lapic: &Lapic, counts: u32) -> TimerOp {
    let LapicEffect::TimerChanged(change) = lapic.write(TMICT, counts) else { panic!() };
    lapic.timer_update(change, NOW)
}

#[test]
fn a_watched_deadline_needs_no_host_time_and_no_host_timer() {
    let lapic = watched(DEADLINE);
    let at = (NOW + 500) * 2;
    let no_time = TimerClock { now_ns: 0, ..clock(NOW) };
    assert_eq!(lapic.set_tsc_deadline(at, &no_time), TimerOp::ArmHv);
    assert_eq!((lapic.next_expiry(), lapic.tsc_deadline()), (Expiry::Tsc(at), at));
    assert!(lapic.timer_expiry().is_none() && !lapic.timer_due(u64::MAX));
    assert_eq!(lapic.expire_due(u64::MAX), Accepted::Ignored);
    assert_eq!(lapic.expire_deadline(), Accepted::Pending);
    assert_eq!((lapic.next_expiry(), lapic.tsc_deadline()), (Expiry::Never, 0));
    assert_eq!(lapic.expire_deadline(), Accepted::Ignored, "once");
    let _ = lapic.set_tsc_deadline(at, &no_time);
    assert_eq!(lapic.set_tsc_deadline(0, &no_time), TimerOp::ArmHv);
    assert_eq!(lapic.next_expiry(), Expiry::Never);
    assert_eq!(lapic.set_tsc_deadline(5, &no_time), TimerOp::Expired(Accepted::Coalesced));
}

#[test]
fn a_sleeper_switches_to_the_host_timer_and_back() {
    let lapic = watched(DEADLINE);
    let at = (NOW + 500) * 2;
    let _ = lapic.set_tsc_deadline(at, &clock(NOW));
    assert_eq!(lapic.switch_to_sw_timer(&clock(NOW + 100)), TimerOp::Arm { ns: NOW + 500 });
    assert!(!lapic.hv_timer_in_use());
    lapic.switch_to_hv_timer();
    assert_eq!(lapic.next_expiry(), Expiry::Tsc(at));
    // The host timer that is still armed does nothing, and the next sleep arms it anew.
    assert_eq!(lapic.sw_timer_expired(NOW + 500), NOTHING);
    assert_eq!(lapic.tsc_deadline(), at);
    let later = (NOW + 900) * 2;
    let _ = lapic.set_tsc_deadline(later, &clock(NOW + 100));
    assert_eq!(lapic.switch_to_sw_timer(&clock(NOW + 100)), TimerOp::Arm { ns: NOW + 900 });
    // Asleep, it is what it always was.
    assert_eq!(lapic.sw_timer_expired(NOW + 900).accepted, Accepted::Pending);
    lapic.switch_to_hv_timer();
    assert_eq!((lapic.next_expiry(), lapic.tsc_deadline()), (Expiry::Never, 0));
    assert_eq!(lapic.switch_to_sw_timer(&clock(NOW)), TimerOp::Leave);
}

#[test]
fn a_host_timer_that_is_armed_early_enough_is_left_alone_at_the_next_sleep() {
    let lapic = watched(DEADLINE);
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    let _ = lapic.switch_to_sw_timer(&clock(NOW));
    lapic.switch_to_hv_timer();
    let _ = lapic.set_tsc_deadline((NOW + 900) * 2, &clock(NOW));
    assert_eq!(lapic.switch_to_sw_timer(&clock(NOW)), TimerOp::Leave);
    assert_eq!(lapic.sw_timer_expired(NOW + 500).rearm, Some(NOW + 900));
    lapic.switch_to_hv_timer();
    let _ = lapic.set_tsc_deadline((NOW + 600) * 2, &clock(NOW));
    assert_eq!(lapic.switch_to_sw_timer(&clock(NOW)), TimerOp::Rearm { ns: NOW + 600 });
}

#[test]
fn a_deadline_that_has_passed_rings_at_once_when_its_vcpu_sleeps() {
    let lapic = watched(DEADLINE);
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    let late = clock(NOW + 800);
    assert_eq!(lapic.switch_to_sw_timer(&late), TimerOp::Arm { ns: NOW + 800 });
    assert_eq!(lapic.sw_timer_expired(NOW + 800).accepted, Accepted::Pending);
}

#[test]
fn a_guarded_deadline_asks_the_owner_when_it_sleeps() {
    let lapic = watched(DEADLINE);
    lapic.guard_deadline(true);
    let at = (NOW + 5_000) * 2;
    let _ = lapic.set_tsc_deadline(at, &clock(NOW));
    let fires = NOW + 5_000 - GUARD_ADVANCE_NS;
    assert_eq!(lapic.switch_to_sw_timer(&clock(NOW)), TimerOp::Arm { ns: fires });
    assert!(lapic.sw_timer_expired(fires).ask_owner);
    lapic.switch_to_hv_timer();
    assert_eq!(lapic.next_expiry(), Expiry::Tsc(at), "nothing was decided");
    assert_eq!(lapic.expire_deadline(), Accepted::Pending);
}

#[test]
fn a_countdown_is_watched_in_host_time_and_keeps_its_phase() {
    let lapic = watched(PERIODIC);
    let _ = lapic.write(TDCR, 0b1011);
    assert_eq!(count(&lapic, 1_000_000), TimerOp::ArmHv);
    assert_eq!(lapic.next_expiry(), Expiry::Ns(NOW + 1_000_000));
    assert_eq!(lapic.sw_timer_expired(NOW + 1_000_000), NOTHING);
    assert_eq!(lapic.expire_due(NOW + 999_999), Accepted::Ignored);
    assert_eq!(lapic.expire_due(NOW + 3_000_100), Accepted::Pending);
    assert_eq!(lapic.next_expiry(), Expiry::Ns(NOW + 4_000_000));
    assert_eq!(lapic.switch_to_sw_timer(&clock(NOW)), TimerOp::Arm { ns: NOW + 4_000_000 });
    lapic.switch_to_hv_timer();
    assert_eq!(lapic.next_expiry(), Expiry::Ns(NOW + 4_000_000));
    // The longest there is does not read as a deadline.
    lapic.set_bus_cycle_ns(u32::MAX);
    let _ = lapic.write(TDCR, 0b1010);
    assert_eq!(count(&lapic, u32::MAX), TimerOp::ArmHv);
    assert_eq!(lapic.next_expiry(), Expiry::Ns(u64::MAX - 1));
}

#[test]
fn a_reset_or_another_mode_leaves_nothing_to_watch() {
    let lapic = watched(DEADLINE);
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    let LapicEffect::TimerChanged(change) = lapic.write(LVT_TIMER, VECTOR) else { panic!() };
    let _ = lapic.timer_update(change, NOW);
    assert_eq!(lapic.next_expiry(), Expiry::Never);
    let _ = count(&lapic, 1_000);
    lapic.reset(CpuRole::Bootstrap, Lint0::Masked);
    assert_eq!((lapic.next_expiry(), lapic.hv_timer_in_use()), (Expiry::Never, true));
}

#[test]
fn of_an_owner_that_wakes_and_a_host_timer_that_fires_one_delivers() {
    for _ in 0..2_000 {
        let lapic = watched(DEADLINE);
        let _ = lapic.set_tsc_deadline((NOW + 100) * 2, &clock(NOW));
        let _ = lapic.switch_to_sw_timer(&clock(NOW));
        let (fired, came) = thread::scope(|scope| {
            let timer = scope.spawn(|| lapic.sw_timer_expired(NOW + 100));
            lapic.switch_to_hv_timer();
            let came = match lapic.next_expiry() {
                Expiry::Never => Accepted::Ignored,
                _ => lapic.expire_deadline(),
            };
            (timer.join().unwrap(), came)
        });
        assert_eq!(fired.rearm, None);
        let delivered = [fired.accepted, came].iter().filter(|a| **a == Accepted::Pending).count();
        assert_eq!(delivered, 1, "{fired:?} {came:?}");
        assert_eq!(lapic.next_expiry(), Expiry::Never);
    }
}

#[test]
fn of_an_owner_that_falls_asleep_and_an_old_host_timer_one_arms() {
    for _ in 0..2_000 {
        let lapic = watched(DEADLINE);
        let _ = lapic.set_tsc_deadline((NOW + 100) * 2, &clock(NOW));
        let _ = lapic.switch_to_sw_timer(&clock(NOW));
        lapic.switch_to_hv_timer();
        let _ = lapic.set_tsc_deadline((NOW + 900) * 2, &clock(NOW));
        let (rearm, op) = thread::scope(|scope| {
            let timer = scope.spawn(|| lapic.sw_timer_expired(NOW + 100).rearm);
            let op = lapic.switch_to_sw_timer(&clock(NOW));
            (timer.join().unwrap(), op)
        });
        // Whoever is last, or the host timer, that finds itself still armed, arms it again.
        let armed = usize::from(rearm.is_some()) + usize::from(matches!(op, TimerOp::Arm { .. }));
        assert_eq!(armed, 1, "{rearm:?} {op:?}");
    }
}
