//! The timer whose time the owner watches.

use std::thread;

use super::*;

const DEADLINE: u32 = 1 << 18;
const PERIODIC: u32 = 1 << 17;
const VECTOR: u32 = 0xec;
const NOTHING: TimerFired =
    TimerFired { accepted: Accepted::Ignored, rearm: None, ask_owner: false };

fn clock(now_ns: u64) -> TimerClock {
    TimerClock { now_ns, guest_tsc: now_ns * 2, tsc_khz: 2_000_000 }
}

fn watched(lvt: u32) -> Lapic {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, lvt | VECTOR);
    lapic.watch_timer();
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
    assert_eq!(lapic.set_tsc_deadline(at, &no_time), TimerOp::Watch);
    assert_eq!((lapic.watched_time(), lapic.tsc_deadline()), (WatchedTime::Tsc(at), at));
    assert!(lapic.timer_expiry().is_none() && !lapic.timer_due(u64::MAX));
    assert_eq!(lapic.timer_poll(u64::MAX), Accepted::Ignored);
    assert_eq!(lapic.watched_deadline_came(), Accepted::Pending);
    assert_eq!((lapic.watched_time(), lapic.tsc_deadline()), (WatchedTime::Never, 0));
    assert_eq!(lapic.watched_deadline_came(), Accepted::Ignored, "once");
    let _ = lapic.set_tsc_deadline(at, &no_time);
    assert_eq!(lapic.set_tsc_deadline(0, &no_time), TimerOp::Watch);
    assert_eq!(lapic.watched_time(), WatchedTime::Never);
    assert_eq!(lapic.set_tsc_deadline(5, &no_time), TimerOp::Expired(Accepted::Coalesced));
}

#[test]
fn a_sleeper_winds_the_alarm_and_takes_the_watch_back() {
    let lapic = watched(DEADLINE);
    let at = (NOW + 500) * 2;
    let _ = lapic.set_tsc_deadline(at, &clock(NOW));
    assert_eq!(lapic.wind_alarm(&clock(NOW + 100)), TimerOp::Arm { ns: NOW + 500 });
    assert!(!lapic.timer_watched());
    lapic.watch_timer();
    assert_eq!(lapic.watched_time(), WatchedTime::Tsc(at));
    // The alarm that is still wound does nothing, and the next sleep winds it anew.
    assert_eq!(lapic.timer_fired(NOW + 500), NOTHING);
    assert_eq!(lapic.tsc_deadline(), at);
    let later = (NOW + 900) * 2;
    let _ = lapic.set_tsc_deadline(later, &clock(NOW + 100));
    assert_eq!(lapic.wind_alarm(&clock(NOW + 100)), TimerOp::Arm { ns: NOW + 900 });
    // Asleep, it is what it always was.
    assert_eq!(lapic.timer_fired(NOW + 900).accepted, Accepted::Pending);
    lapic.watch_timer();
    assert_eq!((lapic.watched_time(), lapic.tsc_deadline()), (WatchedTime::Never, 0));
    assert_eq!(lapic.wind_alarm(&clock(NOW)), TimerOp::Leave);
}

#[test]
fn an_alarm_that_is_wound_early_enough_is_left_alone_at_the_next_sleep() {
    let lapic = watched(DEADLINE);
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    let _ = lapic.wind_alarm(&clock(NOW));
    lapic.watch_timer();
    let _ = lapic.set_tsc_deadline((NOW + 900) * 2, &clock(NOW));
    assert_eq!(lapic.wind_alarm(&clock(NOW)), TimerOp::Leave);
    assert_eq!(lapic.timer_fired(NOW + 500).rearm, Some(NOW + 900));
    lapic.watch_timer();
    let _ = lapic.set_tsc_deadline((NOW + 600) * 2, &clock(NOW));
    assert_eq!(lapic.wind_alarm(&clock(NOW)), TimerOp::Rearm { ns: NOW + 600 });
}

#[test]
fn a_deadline_that_has_passed_rings_at_once_when_its_vcpu_sleeps() {
    let lapic = watched(DEADLINE);
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    let late = clock(NOW + 800);
    assert_eq!(lapic.wind_alarm(&late), TimerOp::Arm { ns: NOW + 800 });
    assert_eq!(lapic.timer_fired(NOW + 800).accepted, Accepted::Pending);
}

#[test]
fn a_guarded_deadline_asks_the_owner_when_it_sleeps() {
    let lapic = watched(DEADLINE);
    lapic.guard_deadline(true);
    let at = (NOW + 5_000) * 2;
    let _ = lapic.set_tsc_deadline(at, &clock(NOW));
    let rings = NOW + 5_000 - GUARD_ADVANCE_NS;
    assert_eq!(lapic.wind_alarm(&clock(NOW)), TimerOp::Arm { ns: rings });
    assert!(lapic.timer_fired(rings).ask_owner);
    lapic.watch_timer();
    assert_eq!(lapic.watched_time(), WatchedTime::Tsc(at), "nothing was decided");
    assert_eq!(lapic.deadline_expired(), Accepted::Pending);
}

#[test]
fn a_countdown_is_watched_in_host_time_and_keeps_its_phase() {
    let lapic = watched(PERIODIC);
    let _ = lapic.write(TDCR, 0b1011);
    assert_eq!(count(&lapic, 1_000_000), TimerOp::Watch);
    assert_eq!(lapic.watched_time(), WatchedTime::Ns(NOW + 1_000_000));
    assert_eq!(lapic.timer_fired(NOW + 1_000_000), NOTHING);
    assert_eq!(lapic.timer_poll(NOW + 999_999), Accepted::Ignored);
    assert_eq!(lapic.timer_poll(NOW + 3_000_100), Accepted::Pending);
    assert_eq!(lapic.watched_time(), WatchedTime::Ns(NOW + 4_000_000));
    assert_eq!(lapic.wind_alarm(&clock(NOW)), TimerOp::Arm { ns: NOW + 4_000_000 });
    lapic.watch_timer();
    assert_eq!(lapic.watched_time(), WatchedTime::Ns(NOW + 4_000_000));
    // The longest there is does not read as a deadline.
    lapic.set_bus_cycle_ns(u32::MAX);
    let _ = lapic.write(TDCR, 0b1010);
    assert_eq!(count(&lapic, u32::MAX), TimerOp::Watch);
    assert_eq!(lapic.watched_time(), WatchedTime::Ns(u64::MAX - 1));
}

#[test]
fn a_reset_or_another_mode_leaves_nothing_to_watch() {
    let lapic = watched(DEADLINE);
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    let LapicEffect::TimerChanged(change) = lapic.write(LVT_TIMER, VECTOR) else { panic!() };
    let _ = lapic.timer_update(change, NOW);
    assert_eq!(lapic.watched_time(), WatchedTime::Never);
    let _ = count(&lapic, 1_000);
    lapic.reset(true, false);
    assert_eq!((lapic.watched_time(), lapic.timer_watched()), (WatchedTime::Never, true));
}

#[test]
fn of_an_owner_that_wakes_and_an_alarm_that_rings_one_delivers() {
    for _ in 0..2_000 {
        let lapic = watched(DEADLINE);
        let _ = lapic.set_tsc_deadline((NOW + 100) * 2, &clock(NOW));
        let _ = lapic.wind_alarm(&clock(NOW));
        let (fired, came) = thread::scope(|scope| {
            let alarm = scope.spawn(|| lapic.timer_fired(NOW + 100));
            lapic.watch_timer();
            let came = match lapic.watched_time() {
                WatchedTime::Never => Accepted::Ignored,
                _ => lapic.watched_deadline_came(),
            };
            (alarm.join().unwrap(), came)
        });
        assert_eq!(fired.rearm, None);
        let delivered = [fired.accepted, came].iter().filter(|a| **a == Accepted::Pending).count();
        assert_eq!(delivered, 1, "{fired:?} {came:?}");
        assert_eq!(lapic.watched_time(), WatchedTime::Never);
    }
}

#[test]
fn of_an_owner_that_falls_asleep_and_an_old_alarm_one_winds() {
    for _ in 0..2_000 {
        let lapic = watched(DEADLINE);
        let _ = lapic.set_tsc_deadline((NOW + 100) * 2, &clock(NOW));
        let _ = lapic.wind_alarm(&clock(NOW));
        lapic.watch_timer();
        let _ = lapic.set_tsc_deadline((NOW + 900) * 2, &clock(NOW));
        let (rearm, op) = thread::scope(|scope| {
            let alarm = scope.spawn(|| lapic.timer_fired(NOW + 100).rearm);
            let op = lapic.wind_alarm(&clock(NOW));
            (alarm.join().unwrap(), op)
        });
        // Whoever is last, or the alarm, that finds itself still wound, winds it again.
        let wound = usize::from(rearm.is_some()) + usize::from(matches!(op, TimerOp::Arm { .. }));
        assert_eq!(wound, 1, "{rearm:?} {op:?}");
    }
}
