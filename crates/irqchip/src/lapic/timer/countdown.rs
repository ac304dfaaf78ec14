//! The counting registers of the APIC timer, one-shot and periodic: initial count, current count and
//! divide configuration. SDM vol. 3A §10.5.4.

use x86::apic::lvt;

use super::{BY_TSC, Timer, TimerChange, TimerOp};
use crate::atomic::Ordering::*;
use crate::lapic::{Lapic, LocalVector};

/// The shortest period that a guest gets, so that it cannot drown the host in timer interrupts.
pub(super) const MIN_PERIOD_NS: u64 = 200_000;

/// What the divide configuration register divides by (SDM vol. 3A figure 10-10).
const fn divisor(register: u32) -> u32 {
    match register & 3 | (register & 8) >> 1 {
        7 => 1,
        n => 2 << n,
    }
}

impl Timer {
    pub(in crate::lapic) fn initial(&self) -> u32 {
        self.initial.load(Relaxed)
    }

    pub(in crate::lapic) fn set_initial(&self, value: u32) {
        self.initial.store(value, Relaxed);
    }

    pub(in crate::lapic) fn divide_register(&self) -> u32 {
        self.divide.load(Relaxed)
    }

    pub(in crate::lapic) fn set_divide_register(&self, value: u32) -> u32 {
        self.divide.swap(value, Relaxed)
    }

    /// Nanoseconds in one count.
    fn count_ns(&self, divide: u32) -> u64 {
        // At most 2^7 times 2^32, and never 0: it is divided by.
        u64::from(divisor(divide)) * u64::from(self.bus_cycle_ns.load(Relaxed).max(1))
    }

    /// Nanoseconds in `count` counts. At most 2^32 × 128 × 2^32: saturates.
    fn counts_ns(&self, count: u32, divide: u32) -> u64 {
        u64::from(count).saturating_mul(self.count_ns(divide))
    }
}

impl Lapic {
    /// The length of a cycle of the timer's input clock (KVM_CAP_X86_APIC_BUS_CYCLES_NS); 1 is the
    /// default.
    pub fn set_bus_cycle_ns(&self, ns: u32) {
        self.timer.bus_cycle_ns.store(ns.max(1), Relaxed);
    }

    /// Follows a write that answered [`LapicEffect::TimerChanged`](super::super::LapicEffect).
    pub fn timer_update(&self, change: TimerChange, now_ns: u64) -> TimerOp {
        match change {
            TimerChange::Count => self.start_countdown(now_ns),
            TimerChange::Divide { old } => self.change_pace(old, now_ns),
            TimerChange::Mode { old } => {
                // Between one-shot and periodic the count goes on; to and from TSC-deadline mode
                // it is disarmed.
                // The whole mode: the reserved one is no deadline's either.
                let was_deadline = old & lvt::TIMER_MODE == lvt::TIMER_DEADLINE;
                if was_deadline != self.tsc_deadline_mode() {
                    self.timer.stop();
                }
                // What a one-shot counted may be as short as it liked.
                let period = self.timer.period_ns.load(Relaxed);
                if self.periodic() && period != 0 {
                    self.timer.period_ns.store(period.max(MIN_PERIOD_NS), Relaxed);
                }
                TimerOp::Leave
            }
            // A count goes on under the mask; only its interrupt is dropped when it ends.
            TimerChange::Mask => TimerOp::Leave,
        }
    }

    fn start_countdown(&self, now_ns: u64) -> TimerOp {
        let timer = &self.timer;
        // Read back and not passed on: the register is what a saved state has as well.
        let counts = timer.initial();
        // Writing 0 stops the timer (SDM vol. 3A §10.5.4).
        if counts == 0 {
            timer.expiry_ns.store(0, SeqCst);
            timer.period_ns.store(0, Relaxed);
            return TimerOp::Leave;
        }
        let mut period = timer.counts_ns(counts, timer.divide_register());
        // A one-shot may be as short as it likes: the guest has to arm it each time.
        if self.periodic() {
            period = period.max(MIN_PERIOD_NS);
        }
        timer.period_ns.store(period, Relaxed);
        // Saturating: the VMM may make a cycle as long as it likes.
        timer.arm(now_ns.saturating_add(period))
    }

    fn change_pace(&self, old_divide: u32, now_ns: u64) -> TimerOp {
        let timer = &self.timer;
        let expiry = timer.expiry_ns.load(SeqCst);
        // Nothing counts down: the new pace is that of the next count.
        if expiry == 0 || expiry == BY_TSC || self.tsc_deadline_mode() {
            return TimerOp::Leave;
        }
        let divide = timer.divide_register();
        let mut period = timer.counts_ns(timer.initial(), divide);
        if self.periodic() {
            period = period.max(MIN_PERIOD_NS);
        }
        timer.period_ns.store(period, Relaxed);
        // In counts and not in time: the count that the guest reads goes on from where it stood.
        let left_counts = expiry.saturating_sub(now_ns) / timer.count_ns(old_divide);
        let left = left_counts.saturating_mul(timer.count_ns(divide));
        timer.arm(now_ns.saturating_add(left.max(1)))
    }

    /// The current-count register, from the time.
    pub(in crate::lapic) fn timer_current(&self, now_ns: impl FnOnce() -> u64) -> u32 {
        let timer = &self.timer;
        // The clock is read only behind these looks: a timer that stands needs none.
        let expiry = timer.expiry_ns.load(Relaxed);
        let period = timer.period_ns.load(Relaxed);
        // In TSC-deadline mode the register reads 0 (SDM vol. 3A §10.5.4.1).
        if expiry == 0 || period == 0 || timer.initial() == 0 || self.tsc_deadline_mode() {
            return 0;
        }
        let now = now_ns();
        let mut left = expiry.saturating_sub(now);
        if left == 0 && self.periodic() {
            // The host timer is late; the count has wrapped already.
            left = period - now.saturating_sub(expiry) % period;
        }
        let counts = left.div_ceil(timer.count_ns(timer.divide_register()));
        // Rounded up above: without the limit a guest could read more than it wrote.
        u32::try_from(counts).unwrap_or(u32::MAX).min(timer.initial())
    }

    /// For a restored state in the mode of the TSC deadline that the timer runs for: it goes on.
    pub(in crate::lapic) fn timer_keep(&self, initial: u32, divide: u32) -> TimerOp {
        let timer = &self.timer;
        timer.set_divide_register(divide & 0xb);
        timer.set_initial(initial);
        match timer.expiry_ns.load(SeqCst) {
            // It has come meanwhile, and the page may have overwritten its request.
            0 => TimerOp::Expired(self.deliver_local(LocalVector::Timer)),
            _ => TimerOp::Leave,
        }
    }

    /// For a restored state: the timer as saved registers say, `current` counts before the expiry.
    pub(in crate::lapic) fn timer_restore(
        &self,
        initial: u32,
        current: u32,
        divide: u32,
        now_ns: u64,
    ) -> TimerOp {
        let timer = &self.timer;
        timer.stop();
        timer.set_divide_register(divide & 0xb);
        timer.set_initial(initial);
        let mut period = timer.counts_ns(initial, divide);
        if self.periodic() {
            period = period.max(MIN_PERIOD_NS);
        }
        // The deadline is no register of the page: its MSR is restored later.
        if initial == 0 || self.tsc_deadline_mode() {
            return TimerOp::Leave;
        }
        timer.period_ns.store(period, Relaxed);
        // The VMM's count may exceed the initial one, and a timer never counts more.
        let left = match timer.counts_ns(current.min(initial), divide) {
            0 if self.periodic() => period,
            // A one-shot that has run out stays so.
            0 => return TimerOp::Leave,
            left => left,
        };
        timer.arm(now_ns.saturating_add(left))
    }
}
