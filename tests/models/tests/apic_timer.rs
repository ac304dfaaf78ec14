//! The APIC timer's token between its owner, who sets and gives up deadlines, and the handler of the host timer: a
//! deadline that is set has a host timer that fires for it, and not after it.

use std::mem;

use gannet_models::{
    Lapic,
    atomic::weakened,
    explore, fails_with,
    lapic::{Accepted, CpuRole, TimerClock, TimerOp},
};
use loom::{
    sync::{Arc, Mutex},
    thread,
};

const SVR: u32 = 0xf0;
const LVT_TIMER: u32 = 0x320;
const DEADLINE_MODE: u32 = 2 << 17;

struct Model {
    lapic: Lapic,
    /// When the host timer fires; 0: it does not. Under the lock of the kernel's timers.
    host: Mutex<u64>,
    /// Held by the handler while it runs: who cancels waits for it.
    handler: Mutex<()>,
}

/// A tick of the guest's TSC is a nanosecond.
const fn at(now: u64) -> TimerClock {
    TimerClock { now_ns: now, guest_tsc: now, tsc_khz: 1_000_000 }
}

impl Model {
    fn new() -> Arc<Self> {
        let lapic = Lapic::new(0, CpuRole::Bootstrap);
        let _ = lapic.write(SVR, 0x1ff);
        let _ = lapic.write(LVT_TIMER, DEADLINE_MODE | 0x40);
        Arc::new(Self { lapic, host: Mutex::new(0), handler: Mutex::new(()) })
    }

    fn apply(&self, op: TimerOp) {
        let cancel = || {
            *self.host.lock().unwrap() = 0;
            drop(self.handler.lock().unwrap());
        };
        op.apply(&self.lapic, |ns| *self.host.lock().unwrap() = ns, cancel);
    }

    fn set(&self, deadline: u64, now: u64) {
        self.apply(self.lapic.set_tsc_deadline(deadline, &at(now)));
    }

    /// The host timer fires, if it is armed.
    fn ring(&self) {
        let _handler = self.handler.lock().unwrap();
        let now = mem::take(&mut *self.host.lock().unwrap());
        if now != 0 {
            let expired = self.lapic.sw_timer_expired(now);
            if let Some(ns) = expired.rearm {
                *self.host.lock().unwrap() = ns;
            }
        }
    }

    /// Nothing runs beside this.
    fn check(&self) {
        let (expiry, host) = (self.lapic.timer_expiry(), *self.host.lock().unwrap());
        let in_time = |expiry| host != 0 && host <= expiry;
        assert!(expiry.is_none_or(in_time), "late: to expire at {expiry:?}, fires at {host}");
    }
}

/// The host timer fires while the owner does `work`; `before` that deadlines are set.
fn rings_beside(before: &'static [u64], work: fn(&Model)) {
    explore(3, move || {
        let model = Model::new();
        for deadline in before {
            model.set(*deadline, 1);
        }
        let ringing = model.clone();
        let ringing = thread::spawn(move || {
            ringing.ring();
            ringing.ring();
        });
        work(&model);
        ringing.join().unwrap();
        model.check();
    });
}

/// A deadline given up leaves the host timer armed, so that the next finds the token.
fn set_again(model: &Model) {
    model.set(20, 2);
}

#[test]
fn a_deadline_set_while_the_host_timer_fires_has_one_that_fires_for_it() {
    rings_beside(&[10], set_again);
    rings_beside(&[10, 0], set_again);
    rings_beside(&[10, 0], |model| {
        model.set(20, 2);
        model.set(0, 2);
        model.set(15, 2);
    });
    // Earlier than what the host timer is armed for: it is stopped.
    rings_beside(&[30], |model| model.set(20, 2));
    rings_beside(&[30, 0], |model| {
        model.set(20, 2);
        model.set(25, 2);
    });
}

#[test]
fn without_barriers_between_the_token_and_the_time_a_deadline_is_lost() {
    assert!(fails_with("late", || weakened(|| rings_beside(&[10, 0], set_again))));
}

/// The owner watches the deadline itself, and gives it back before it sleeps.
fn there_and_back(model: &Model) {
    let _ = model.lapic.switch_to_hv_timer();
    model.apply(model.lapic.switch_to_sw_timer(&at(2)));
}

#[test]
fn a_deadline_given_back_while_the_host_timer_fires_has_one_that_fires_for_it() {
    rings_beside(&[10], there_and_back);
    rings_beside(&[10, 20], there_and_back);
    rings_beside(&[10], |model| {
        let _ = model.lapic.switch_to_hv_timer();
        let _ = model.lapic.set_hv_deadline(20, 2);
        model.apply(model.lapic.switch_to_sw_timer(&at(2)));
    });
}

#[test]
fn a_deadline_given_back_without_barriers_is_lost() {
    assert!(fails_with("late", || weakened(|| rings_beside(&[10], there_and_back))));
}

/// The owner has promised its guest to look for a later deadline: a host timer that fires late, from before, must
/// not take the deadline that is set meanwhile.
#[test]
fn a_guarded_deadline_is_left_to_its_owner_by_whatever_host_timer_fires() {
    explore(3, || {
        let model = Model::new();
        model.lapic.guard_deadline(true);
        model.set(10, 1);
        let ringing = model.clone();
        let ringing = thread::spawn(move || {
            let fired = ringing.lapic.sw_timer_expired(1_000_000);
            assert_eq!(fired.accepted, Accepted::Ignored, "delivered without a look");
        });
        let _ = model.lapic.switch_to_hv_timer();
        let _ = model.lapic.switch_to_sw_timer(&at(2));
        ringing.join().unwrap();
    });
}
