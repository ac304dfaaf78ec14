//! The timer and the host timer behind it. SDM vol. 3A §10.5.4.

use core::cell::Cell;
use std::thread;

use super::*;

const MASKED: u32 = 1 << 16;
const PERIODIC: u32 = 1 << 17;
const DEADLINE: u32 = 1 << 18;
const VECTOR: u32 = 0xec;

fn change(effect: LapicEffect) -> TimerChange {
    match effect {
        LapicEffect::TimerChanged(change) => change,
        other => panic!("{other:?}"),
    }
}

fn count(lapic: &Lapic, counts: u32, now: u64) -> TimerOp {
    lapic.timer_update(change(lapic.write(TMICT, counts)), now)
}

fn current(lapic: &Lapic, now: u64) -> u32 {
    lapic.read(TMCCT, || now)
}

fn clock(now_ns: u64) -> TimerClock {
    // A TSC of 2 GHz that started with the host.
    TimerClock { now_ns, guest_tsc: now_ns * 2, tsc_khz: 2_000_000 }
}

fn fired_with(accepted: Accepted, rearm: Option<u64>) -> SwTimerExpired {
    SwTimerExpired { accepted, rearm, ask_owner: false }
}

fn deadline_apic() -> Lapic {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, DEADLINE | VECTOR);
    lapic
}

#[test]
fn one_shot_counts_down_and_fires_once() {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, VECTOR);
    let _ = lapic.write(TDCR, 0b1011);
    assert_eq!(count(&lapic, 1_000_000, NOW), TimerOp::Arm { ns: NOW + 1_000_000 });
    assert_eq!(current(&lapic, NOW), 1_000_000);
    assert_eq!(current(&lapic, NOW + 400_000), 600_000);
    let fired = lapic.sw_timer_expired(NOW + 1_000_000);
    assert_eq!(fired, fired_with(Accepted::Pending, None));
    assert_eq!(current(&lapic, NOW + 1_000_000), 0);
    assert_eq!(take(&lapic), Some(VECTOR as u8));
    assert_eq!(lapic.sw_timer_expired(NOW + 9_000_000).accepted, Accepted::Ignored);
}

#[test]
fn the_divide_register_stretches_the_count() {
    for (register, divisor) in
        [(0, 2), (1, 4), (2, 8), (3, 16), (8, 32), (9, 64), (10, 128), (11, 1)]
    {
        let lapic = xapic(0);
        let _ = lapic.write(TDCR, register);
        assert_eq!(count(&lapic, 1_000_000, NOW), TimerOp::Arm { ns: NOW + 1_000_000 * divisor });
    }
}

#[test]
fn a_new_divisor_keeps_the_count_and_changes_its_pace() {
    let lapic = xapic(0);
    let _ = lapic.write(TDCR, 0b1011);
    let _ = count(&lapic, 1_000_000, NOW);
    let later = NOW + 250_000;
    let op = lapic.timer_update(change(lapic.write(TDCR, 0)), later);
    assert_eq!(current(&lapic, later), 750_000);
    // The host timer fires too early and is armed anew then.
    assert_eq!(op, TimerOp::Leave);
    let fired = lapic.sw_timer_expired(NOW + 1_000_000);
    assert_eq!(fired.rearm, Some(later + 1_500_000));
}

#[test]
fn periodic_keeps_its_phase_when_the_host_timer_is_late() {
    let lapic = xapic(0);
    let _ = lapic.write(TDCR, 0b1011);
    let _ = lapic.write(LVT_TIMER, PERIODIC | VECTOR);
    let _ = count(&lapic, 1_000_000, NOW);
    let fired = lapic.sw_timer_expired(NOW + 1_000_300);
    assert_eq!(fired, fired_with(Accepted::Pending, Some(NOW + 2_000_000)));
    let fired = lapic.sw_timer_expired(NOW + 5_600_000);
    assert_eq!(fired, fired_with(Accepted::Coalesced, Some(NOW + 6_000_000)));
    assert_eq!(current(&lapic, NOW + 5_700_000), 300_000);
    // The host timer is late: the count has begun anew.
    assert_eq!(current(&lapic, NOW + 6_100_000), 900_000);
}

#[test]
fn short_periods_are_stretched() {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, PERIODIC | VECTOR);
    assert_eq!(count(&lapic, 1, NOW), TimerOp::Arm { ns: NOW + 200_000 });
}

#[test]
fn writing_zero_stops_the_count() {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, VECTOR);
    let _ = count(&lapic, 1_000, NOW);
    assert_eq!(count(&lapic, 0, NOW), TimerOp::Leave);
    let fired = lapic.sw_timer_expired(NOW + 1_000_000);
    assert_eq!(fired, fired_with(Accepted::Ignored, None));
}

#[test]
fn a_masked_timer_runs_but_does_not_interrupt() {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, MASKED | PERIODIC | VECTOR);
    let _ = lapic.write(TDCR, 0b1011);
    let _ = count(&lapic, 1_000_000, NOW);
    let fired = lapic.sw_timer_expired(NOW + 1_000_000);
    assert_eq!(fired, fired_with(Accepted::Ignored, Some(NOW + 2_000_000)));
}

#[test]
fn a_deadline_fires_at_its_tsc_and_reads_zero_after() {
    let lapic = deadline_apic();
    let at = (NOW + 500) * 2;
    assert_eq!(lapic.set_tsc_deadline(at, &clock(NOW)), TimerOp::Arm { ns: NOW + 500 });
    assert_eq!(lapic.tsc_deadline(), at);
    assert_eq!(lapic.sw_timer_expired(NOW + 500).accepted, Accepted::Pending);
    assert_eq!(lapic.tsc_deadline(), 0);
}

#[test]
fn a_past_deadline_interrupts_at_once() {
    let lapic = deadline_apic();
    let op = lapic.set_tsc_deadline(5, &clock(NOW));
    assert_eq!(op, TimerOp::Expired(Accepted::Pending));
    assert_eq!(take(&lapic), Some(VECTOR as u8));
    assert_eq!(lapic.tsc_deadline(), 0);
}

#[test]
fn a_later_deadline_leaves_the_host_timer_alone_and_an_earlier_one_does_not() {
    let lapic = deadline_apic();
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    assert_eq!(lapic.set_tsc_deadline((NOW + 900) * 2, &clock(NOW)), TimerOp::Leave);
    let fired = lapic.sw_timer_expired(NOW + 500);
    assert_eq!(fired, fired_with(Accepted::Ignored, Some(NOW + 900)));
    let op = lapic.set_tsc_deadline((NOW + 700) * 2, &clock(NOW + 600));
    assert_eq!(op, TimerOp::Rearm { ns: NOW + 700 });
    assert_eq!(lapic.set_tsc_deadline(0, &clock(NOW + 600)), TimerOp::Leave);
    assert_eq!(lapic.tsc_deadline(), 0);
}

#[test]
fn a_deadline_needs_its_mode_and_a_count_needs_the_other() {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, VECTOR);
    assert_eq!(lapic.set_tsc_deadline(u64::MAX, &clock(NOW)), TimerOp::Leave);
    assert_eq!(lapic.tsc_deadline(), 0);
    let _ = count(&lapic, 1_000, NOW);
    let to_deadline = lapic.write(LVT_TIMER, DEADLINE | VECTOR);
    assert_eq!(lapic.timer_update(change(to_deadline), NOW), TimerOp::Leave);
    assert_eq!(lapic.timer_expiry(), None, "changing the mode disarms");
    assert_eq!(lapic.write(TMICT, 1_000), LapicEffect::None);
    lapic.set_features(Features::default());
    let _ = lapic.write(LVT_TIMER, DEADLINE | VECTOR);
    assert_eq!(read(&lapic, LVT_TIMER), VECTOR, "not offered, not settable");
}

#[test]
fn a_deadline_goes_with_its_mode_when_cpuid_takes_that() {
    let lapic = xapic(0);
    let _ = lapic.write(LVT_TIMER, DEADLINE | VECTOR);
    let _ = lapic.switch_to_hv_timer();
    let op = lapic.set_tsc_deadline((NOW + 700) * 2, &clock(NOW));
    assert_eq!(op, TimerOp::ArmHv);
    lapic.set_features(Features::default());
    assert_eq!((lapic.tsc_deadline(), lapic.next_expiry()), (0, Expiry::Never));
}

#[test]
fn going_from_one_shot_to_periodic_lets_the_count_go_on() {
    let lapic = xapic(0);
    let _ = lapic.write(TDCR, 0b1011);
    let _ = lapic.write(LVT_TIMER, VECTOR);
    let _ = count(&lapic, 1_000_000, NOW);
    let op = lapic.timer_update(change(lapic.write(LVT_TIMER, PERIODIC | VECTOR)), NOW + 1);
    assert_eq!(op, TimerOp::Leave);
    assert_eq!(lapic.sw_timer_expired(NOW + 1_000_000).rearm, Some(NOW + 2_000_000));
}

/// A one-shot is as short as its guest likes, a period is not, however the timer came to it.
#[test]
fn no_way_to_a_period_is_shorter_than_the_shortest() {
    let lapic = xapic(0);
    let _ = lapic.write(TDCR, 0b1011);
    let _ = lapic.write(LVT_TIMER, VECTOR);
    let _ = count(&lapic, 1_000, NOW);
    let _ = lapic.timer_update(change(lapic.write(LVT_TIMER, PERIODIC | VECTOR)), NOW + 1);
    assert_eq!(lapic.sw_timer_expired(NOW + 2_000).rearm, Some(NOW + 201_000));
    assert_eq!(lapic.sw_timer_expired(NOW + 201_000).rearm, Some(NOW + 401_000));
}

/// The fourth mode is none: a deadline ends with its mode, and no count becomes one.
#[test]
fn the_reserved_mode_has_no_deadline() {
    let lapic = deadline_apic();
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    let _ = lapic.timer_update(change(lapic.write(LVT_TIMER, 3 << 17 | VECTOR)), NOW);
    assert_eq!(lapic.next_expiry(), Expiry::Never);
    let _ = count(&lapic, 1_000, NOW);
    let _ = lapic.timer_update(change(lapic.write(LVT_TIMER, 2 << 17 | VECTOR)), NOW);
    assert_eq!(lapic.next_expiry(), Expiry::Never);
}

#[test]
fn a_changed_tsc_moves_an_armed_deadline() {
    let lapic = deadline_apic();
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    let moved = TimerClock { guest_tsc: (NOW + 400) * 2, ..clock(NOW) };
    assert_eq!(lapic.tsc_changed(&moved), TimerOp::Rearm { ns: NOW + 100 });
}

#[test]
fn far_deadlines_and_slow_clocks_do_not_overflow() {
    let lapic = deadline_apic();
    let slow = TimerClock { tsc_khz: 1, ..clock(NOW) };
    let TimerOp::Arm { ns } = lapic.set_tsc_deadline(u64::MAX, &slow) else { panic!() };
    assert_eq!(ns, u64::MAX);
    let none = TimerClock { tsc_khz: 0, ..clock(NOW) };
    let _ = lapic.set_tsc_deadline(u64::MAX - 1, &none);
    lapic.set_bus_cycle_ns(u32::MAX);
    let lapic = xapic(0);
    lapic.set_bus_cycle_ns(u32::MAX);
    let _ = lapic.write(TDCR, 0b1010);
    let _ = count(&lapic, u32::MAX, u64::MAX - 5);
    let _ = current(&lapic, 0);
    // The longest period there is, and a host that has been up for a while: no deadline of the TSC's.
    let lapic = xapic(0);
    lapic.set_bus_cycle_ns(1 << 25);
    let _ = lapic.write(TDCR, 0b1010);
    let _ = lapic.write(LVT_TIMER, PERIODIC | VECTOR);
    let _ = lapic.timer_restore(u32::MAX, 1, 0b1010, 1 << 40);
    let Expiry::Ns(first) = lapic.next_expiry() else { panic!() };
    let _ = lapic.sw_timer_expired(first);
    assert!(matches!(lapic.next_expiry(), Expiry::Ns(_)));
}

#[test]
fn polling_delivers_without_the_host_timer() {
    let lapic = deadline_apic();
    let _ = lapic.set_tsc_deadline((NOW + 500) * 2, &clock(NOW));
    assert_eq!(lapic.expire_due(NOW + 499), Accepted::Ignored);
    assert!(lapic.timer_due(NOW + 500));
    assert_eq!(lapic.expire_due(NOW + 500), Accepted::Pending);
    // The host timer fires for nothing.
    assert_eq!(lapic.sw_timer_expired(NOW + 500).accepted, Accepted::Ignored);
}

#[test]
fn a_guarded_deadline_is_left_to_the_owner_when_it_expires() {
    let lapic = deadline_apic();
    lapic.guard_deadline(true);
    let at = (NOW + 5_000) * 2;
    let _ = lapic.set_tsc_deadline(at, &clock(NOW));
    let fires = NOW + 5_000 - GUARD_ADVANCE_NS;
    let early = lapic.sw_timer_expired(fires - 1);
    assert_eq!(early, fired_with(Accepted::Ignored, Some(fires)));
    let fired = lapic.sw_timer_expired(fires);
    assert_eq!(fired, SwTimerExpired { ask_owner: true, ..fired_with(Accepted::Ignored, None) });
    assert_eq!((lapic.tsc_deadline(), take(&lapic)), (at, None), "nothing was decided");
    assert_eq!(lapic.expire_deadline(), Accepted::Pending);
    assert_eq!((lapic.tsc_deadline(), take(&lapic)), (0, Some(VECTOR as u8)));
    assert_eq!(lapic.expire_deadline(), Accepted::Ignored, "once");
}

#[test]
fn a_guard_means_nothing_in_the_other_modes() {
    let lapic = xapic(0);
    lapic.guard_deadline(true);
    let _ = lapic.write(LVT_TIMER, VECTOR);
    let _ = count(&lapic, 1_000, NOW);
    let fired = lapic.sw_timer_expired(NOW + 1_000_000);
    assert_eq!(fired, fired_with(Accepted::Pending, None));
}

#[test]
fn a_masked_or_stopped_deadline_is_not_live() {
    let lapic = deadline_apic();
    assert_eq!(lapic.deadline_live(), 0);
    let at = (NOW + 500) * 2;
    let _ = lapic.set_tsc_deadline(at, &clock(NOW));
    assert_eq!(lapic.deadline_live(), at);
    let masked = lapic.write(LVT_TIMER, MASKED | DEADLINE | VECTOR);
    assert_eq!(masked, LapicEffect::TimerChanged(TimerChange::Mask));
    assert_eq!((lapic.deadline_live(), lapic.tsc_deadline()), (0, at));
    let _ = lapic.write(LVT_TIMER, DEADLINE | VECTOR);
    assert_eq!(lapic.deadline_live(), at);
    let _ = lapic.set_tsc_deadline(0, &clock(NOW));
    assert_eq!(lapic.deadline_live(), 0);
}

#[test]
fn the_host_timer_never_fires_after_the_expiry() {
    let lapic = deadline_apic();
    let armed = Cell::new(None::<u64>);
    let mut now = NOW;
    let mut random = 12345u64;
    for _ in 0..10_000 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        now += random >> 54;
        if let Some(at) = armed.get().filter(|at| *at <= now) {
            armed.set(None);
            if let Some(again) = lapic.sw_timer_expired(at.max(now)).rearm {
                armed.set(Some(again));
            }
        }
        if random >> 20 & 3 == 0 {
            let deadline =
                if random >> 22 & 7 == 0 { 0 } else { (now + (random >> 30 & 0xfff)) * 2 };
            lapic.set_tsc_deadline(deadline, &clock(now)).apply(
                &lapic,
                |ns| armed.set(Some(ns)),
                || armed.set(None),
            );
        }
        if let Some(expiry) = lapic.timer_expiry() {
            assert!(armed.get().is_some_and(|at| at <= expiry), "would be missed");
        }
    }
}

#[test]
fn owner_and_host_timer_never_both_forget_to_arm() {
    // The owner moves the deadline while the host timer fires on another CPU; whoever is last, the
    // host timer ends up armed for an expiry that is set.
    for round in 0..2_000u64 {
        let lapic = deadline_apic();
        let _ = lapic.set_tsc_deadline((NOW + 100) * 2, &clock(NOW));
        let (rearm, op) = thread::scope(|scope| {
            let timer = scope.spawn(|| lapic.sw_timer_expired(NOW + 100).rearm);
            let at = NOW + 200 + round % 50;
            let op = lapic.set_tsc_deadline(at * 2, &clock(NOW + 99));
            (timer.join().unwrap(), op)
        });
        let expiry = lapic.timer_expiry();
        let armed = usize::from(rearm.is_some()) + usize::from(matches!(op, TimerOp::Arm { .. }));
        // Either one of the two arms it, or the new deadline was itself what expired... which
        // cannot be: it lies beyond the time at which the host timer fired.
        assert!(expiry.is_some());
        assert_eq!(armed, 1, "{rearm:?} {op:?}");
    }
}
