//! L2 halts while a timer of L1's runs: the thread sleeps no longer than that.

use core::fmt;

use backend::{Asleep, Backend, Nested};
use host::{
    Arc,
    timer::{TimerHandler, WithTimer},
};
use vm::vcpu_shared::{Request, SharedVcpu};

use crate::{Rare, Vcpu};

/// Wakes a vCPU.
pub(crate) struct Wake(SharedVcpu);

/// The host timer that does so.
pub(crate) struct WakeTimer(Arc<WithTimer<Wake>>);

impl fmt::Debug for WakeTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WakeTimer")
    }
}

impl TimerHandler for Wake {
    fn expired(&self) -> Option<u64> {
        self.0.request_and_kick(Request::Event);
        None
    }
}

impl Rare {
    /// The thread sleeps no more.
    pub(crate) fn disarm_nested_wake(&self) {
        if let Some(timer) = &self.nested_wake {
            timer.0.cancel();
        }
    }
}

impl<B: Backend> Vcpu<B> {
    fn nested_wakes_at(&self) -> Option<u64> {
        let nested = self.b.nested().filter(|_| self.pending.after_exit.is_nested());
        nested.and_then(Nested::asleep).and_then(Asleep::wakes_at)
    }

    /// Whether L2, which halts, is to be entered again since its run ends at once.
    pub(crate) fn nested_timer_is_due(&mut self) -> bool {
        // L2 does not run, so no CPU counts for it.
        let Some(deadline) = self.nested_wakes_at() else { return false };
        let host = self.b.host_tsc();
        self.b.guest_tsc(host) >= deadline
    }

    /// The thread is about to sleep in a halt.
    pub(crate) fn arm_nested_wake(&mut self) {
        let Some(deadline) = self.nested_wakes_at() else { return };
        // From here on it is a time of the TSC as it is.
        self.rare.nested_restored = false;
        let clock = self.clock_now();
        // A deadline in the past is no difference: the timer fires at once.
        let ticks = u128::from(deadline.saturating_sub(clock.guest_tsc));
        // Rounded up: a timer that fires too soon costs a turn.
        let ns = (ticks * 1_000_000).div_ceil(u128::from(clock.tsc_khz.max(1)));
        let at = clock.now_ns.saturating_add(u64::try_from(ns).unwrap_or(u64::MAX));
        if self.rare.nested_wake.is_none() {
            self.rare.nested_wake = WithTimer::new(Wake(self.shared.clone())).map(WakeTimer).ok();
        }
        match &self.rare.nested_wake {
            // One that fires too soon, since the clocks differ, is armed anew.
            Some(timer) => timer.0.start(at.min(i64::MAX as u64)),
            // Without memory the thread looks again and again.
            // Rather a thread that does not sleep than an L2 that is never woken.
            None => self.shared.request(Request::Event),
        }
    }
}
