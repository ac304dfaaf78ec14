//! The time of the local APIC's timer where the backend ends the guest's run at it: the VMX-preemption
//! timer.
//!
//! The vCPU watches the time itself while it runs, polls, waits for a CPU or is in user space: no host
//! timer is wound, and the exit at that time is answered in the inner loop. An interrupt of the timer
//! concerns nobody but its vCPU, so a time that passes while the guest does not run is found at the
//! next entry. Only a thread that sleeps in HLT has to be woken: it winds the host's timer before and
//! takes the watch back after ([`Vcpu::hand_over_time`], [`Vcpu::take_time_back`]). What still rings
//! from then does nothing.
//!
//! A TSC deadline is compared with the guest's TSC and not converted to host time until the thread
//! sleeps. A countdown is one of host time: it is watched by the TSC as well, but it is host time that
//! says whether it is over, so that neither a discipline of the host's clock nor a guest that sets its
//! TSC makes it longer or shorter.

use backend::Backend;
use irqchip::lapic::{TimerClock, WatchedTime};
use mmu::Section;
use vm::vcpu_shared::Request;

use crate::{Vcpu, run::inner::Next};

/// What two conversions between TSC and nanoseconds may differ by.
const ROUNDING_NS: u64 = 100;

/// Ticks of a TSC of `khz` in `ns` nanoseconds, rounded up. Saturates.
fn ns_to_ticks(ns: u64, khz: u32) -> u64 {
    const NS_PER_MS: u64 = 1_000_000;
    let khz = u64::from(khz);
    let (whole, rest) = (ns / NS_PER_MS, ns % NS_PER_MS);
    // The rest is below 2^52.
    whole.saturating_mul(khz).saturating_add((rest * khz).div_ceil(NS_PER_MS))
}

impl<B: Backend> Vcpu<B> {
    /// Whether the vCPU watches the time now.
    #[inline(always)]
    pub(crate) fn watches_time(&self) -> bool {
        B::WATCHES_DEADLINES && self.shared.lapic.timer_watched()
    }

    /// Begins to, where the CPU can.
    pub(crate) fn begin_to_watch(&mut self) {
        if B::WATCHES_DEADLINES && self.b.watches_deadlines() {
            self.shared.lapic.watch_timer();
        }
    }

    /// The time to be watched may be another. The kernel may be called.
    pub(crate) fn watch_time(&mut self) {
        match self.shared.lapic.watched_time() {
            WatchedTime::Ns(_) => {
                let clock = self.clock_now();
                self.watch_time_by(&clock);
            }
            WatchedTime::Never => self.b.watch_deadline(0),
            WatchedTime::Tsc(deadline) => self.b.watch_deadline(deadline),
        }
    }

    /// The same, at a time that is known.
    fn watch_time_by(&mut self, clock: &TimerClock) {
        let deadline = match self.shared.lapic.watched_time() {
            WatchedTime::Never => 0,
            WatchedTime::Tsc(deadline) => deadline,
            WatchedTime::Ns(ns) => {
                let ticks = ns_to_ticks(ns.saturating_sub(clock.now_ns), clock.tsc_khz);
                clock.guest_tsc.saturating_add(ticks).max(1)
            }
        };
        self.b.watch_deadline(deadline);
    }

    /// The guest's TSC runs otherwise than before. A watched deadline is one of that TSC, and needs
    /// nothing; how much of a countdown is left is looked at anew, before the next entry.
    #[cold]
    #[inline(never)]
    pub(crate) fn tsc_moved(&mut self) {
        if self.watches_time() && matches!(self.shared.lapic.watched_time(), WatchedTime::Ns(_)) {
            self.b.watch_deadline(1);
        }
    }

    /// The backend has ended the guest's run at the time that is watched, or for nothing.
    pub(crate) fn answer_deadline(&mut self, s: Section<'_>) -> Next {
        if !self.b.deadline_due() {
            // Sooner, for the time is further away than the CPU counts.
            return Next::Again;
        }
        match self.shared.lapic.watched_time() {
            WatchedTime::Tsc(_) if self.lazy.enabled() => self.lazy_deadline_in_loop(s),
            WatchedTime::Tsc(_) => self.interrupt_for_deadline(),
            WatchedTime::Never => {
                self.b.watch_deadline(0);
                Next::Again
            }
            WatchedTime::Ns(_) => self.count_came_in_loop(),
        }
    }

    /// The watched TSC deadline has come, and is the guest's newest.
    pub(crate) fn interrupt_for_deadline(&mut self) -> Next {
        self.b.watch_deadline(0);
        self.recheck |= self.shared.lapic.watched_deadline_came().kick();
        Next::Again
    }

    fn count_came_in_loop(&mut self) -> Next {
        match self.clock_in_loop() {
            Some(clock) => {
                self.count_came(&clock);
                Next::Again
            }
            None => {
                let ((), next) = self.with_kernel(|v| {
                    let clock = v.clock_now();
                    v.count_came(&clock);
                });
                next
            }
        }
    }

    /// The watched countdown is over, or what was watched for it; a periodic one begins anew.
    fn count_came(&mut self, clock: &TimerClock) {
        let now_ns = clock.now_ns.saturating_add(ROUNDING_NS);
        self.recheck |= self.shared.lapic.timer_poll(now_ns).kick();
        self.watch_time_by(clock);
    }

    /// Looks at the watched time while the vCPU is halted and polls. If it has come its interrupt is
    /// pending now, or the vCPU has a request to look at the lazy deadline's page.
    pub(crate) fn poll_time(&mut self) {
        if !self.watches_time() || !self.b.deadline_due() {
            return;
        }
        match self.shared.lapic.watched_time() {
            WatchedTime::Never => self.b.watch_deadline(0),
            WatchedTime::Tsc(_) if self.lazy.enabled() => self.shared.request(Request::Deadline),
            WatchedTime::Tsc(_) => {
                let _ = self.interrupt_for_deadline();
            }
            WatchedTime::Ns(_) => {
                let clock = self.clock_now();
                self.count_came(&clock);
            }
        }
    }

    /// The thread is about to sleep: the host's timer wakes it from now on. True: it was watching.
    pub(crate) fn hand_over_time(&mut self) -> bool {
        if !self.watches_time() {
            return false;
        }
        let clock = self.clock_now();
        let op = self.shared.lapic.wind_alarm(&clock);
        self.do_timer(op);
        true
    }

    /// The thread sleeps no more.
    pub(crate) fn take_time_back(&mut self) {
        self.shared.lapic.watch_timer();
        self.watch_time();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanoseconds_are_ticks_rounded_up() {
        assert_eq!(ns_to_ticks(1_000_000, 3_000_000), 3_000_000);
        assert_eq!(ns_to_ticks(1, 3_000_000), 3);
        assert_eq!(ns_to_ticks(1, 1), 1);
        assert_eq!(ns_to_ticks(0, 3_000_000), 0);
        assert_eq!(ns_to_ticks(u64::MAX, u32::MAX), u64::MAX);
        assert_eq!(ns_to_ticks(5, 0), 0);
    }
}
