//! The APIC timer: one-shot, periodic and TSC-deadline. SDM vol. 3A §10.5.4.
//!
//! Time is host nanoseconds. The timer's truth is `expiry_ns`. What interrupts at that time is one of two,
//! and the owner, the thread of the vCPU, says which:
//!
//! - The **sw timer**, a timer of the kernel's, which only has to fire early enough. When the guest moves
//!   its deadline further away, or gives it up, the host timer is left alone, and when it fires before the
//!   expiry it is armed again. So most writes of a deadline cost no timer work.
//! - The **hv timer**, where the CPU ends a guest's run at a time of the hypervisor's choosing
//!   ([`Lapic::switch_to_hv_timer`]). The owner looks at the time itself while it does not sleep: no host
//!   timer is armed, and one that still fires from before does nothing. A TSC deadline then needs no host
//!   time at all, and `expiry_ns` is [`BY_TSC`]. Before it sleeps the owner switches back
//!   ([`Lapic::switch_to_sw_timer`]).
//!
//! `armed_ns` says when the host timer will fire and is the token that decides who arms it: zero means
//! nobody has. The owner stores the expiry and then looks at the token; the host timer's handler takes the
//! token first and then looks at the expiry; so one of the two sees the other's store, and the
//! compare-and-swap from zero lets only one of them arm.

mod countdown;

use x86::apic::lvt;

use super::{Accepted, FEATURE_TSC_DEADLINE, Lapic, LocalVector};
use crate::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::*};
use countdown::MIN_PERIOD_NS;

/// How long before a guarded deadline the host timer fires: what the owner needs to look whether there is a
/// later one. It waits for the rest of that time.
pub const GUARD_ADVANCE_NS: u64 = 1_000;

/// In the place of an expiry: the timer runs for its TSC deadline, by the hv timer.
const BY_TSC: u64 = u64::MAX;

#[repr(C, align(64))]
pub(super) struct Timer {
    /// When the timer expires next; zero when it does not run, [`BY_TSC`] when that is not known in
    /// nanoseconds.
    // Atomic though the owner writes it: the host timer's handler reads and takes it on whatever
    // CPU it fires.
    expiry_ns: AtomicU64,
    /// When the host timer fires; zero when it does not.
    // Kept apart from the expiry: the host timer may be armed for an earlier time than the guest
    // asks for now.
    armed_ns: AtomicU64,
    /// Length of one countdown.
    period_ns: AtomicU64,
    /// What the guest wrote to IA32_TSC_DEADLINE; means something while the timer runs.
    deadline_tsc: AtomicU64,
    initial: AtomicU32,
    divide: AtomicU32,
    bus_cycle_ns: AtomicU32,
    /// The host timer leaves an expired deadline to the owner, see [`Lapic::guard_deadline`].
    guarded: AtomicU8,
    /// The hv timer is in use: the host timer is not armed and does nothing.
    hv: AtomicU8,
}

/// The present, in the clocks that the timer needs.
#[derive(Clone, Copy, Debug)]
pub struct TimerClock {
    /// Host monotonic time.
    pub now_ns: u64,
    /// The guest's time-stamp counter at that time.
    pub guest_tsc: u64,
    /// Frequency of the guest's time-stamp counter.
    pub tsc_khz: u32,
}

/// Which write made the timer change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimerChange {
    /// Initial count written: a new countdown.
    Count,
    /// Divide configuration written; the count goes on at another pace.
    Divide {
        /// The register before.
        old: u32,
    },
    /// Timer mode in the LVT changed.
    Mode {
        /// The LVT entry before.
        old: u32,
    },
    /// The timer's entry was masked or unmasked. The count goes on.
    Mask,
}

/// What to do with the host timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum TimerOp {
    /// Nothing: the host timer fires in time, or is not needed.
    Leave,
    /// The host timer does not run: start it at this host time.
    Arm {
        /// Absolute host time.
        ns: u64,
    },
    /// The host timer runs but would fire too late: stop it, wait for its handler, then start it at this time.
    Rearm {
        /// Absolute host time.
        ns: u64,
    },
    /// The time had come already: the interrupt is pending (unless its entry is masked).
    Expired(Accepted),
    /// The hv timer is in use, and is to be armed for [`Lapic::next_expiry`].
    ArmHv,
}

/// When the timer expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// The timer does not run.
    Never,
    /// A time of the guest's TSC.
    Tsc(u64),
    /// Host monotonic time in nanoseconds.
    Ns(u64),
}

/// What the host timer's handler has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct SwTimerExpired {
    /// What became of the interrupt, if the timer expired.
    pub accepted: Accepted,
    /// Restart the host timer at this time.
    pub rearm: Option<u64>,
    /// A guarded deadline has expired: the owner is to decide what becomes of it.
    pub ask_owner: bool,
}

/// Who looks whether the timer has expired.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ByWhom {
    Owner,
    SwTimer,
}

/// What has become of an expiry.
struct Expired {
    accepted: Accepted,
    /// When the timer expires next.
    next: Option<u64>,
    /// A guarded deadline is left to the owner.
    ask_owner: bool,
}

impl TimerOp {
    /// Does with the host timer what is asked for: `start` starts the stopped timer at an absolute host
    /// time, `cancel` stops it and waits until its handler is through. Owner only.
    #[inline]
    pub fn apply(self, lapic: &Lapic, start: impl FnOnce(u64), cancel: impl FnOnce()) {
        match self {
            Self::Leave | Self::Expired(_) | Self::ArmHv => {}
            Self::Arm { ns } => start(ns),
            Self::Rearm { ns } => {
                // The handler takes the token. Stored before it is through, the new time would be taken away by it.
                cancel();
                // No exchange: the handler is through, and none comes before the timer is started.
                lapic.timer.armed_ns.store(ns, SeqCst);
                start(ns);
            }
        }
    }
}

impl Timer {
    pub(super) fn new() -> Self {
        Self {
            expiry_ns: AtomicU64::new(0),
            armed_ns: AtomicU64::new(0),
            period_ns: AtomicU64::new(0),
            deadline_tsc: AtomicU64::new(0),
            initial: AtomicU32::new(0),
            divide: AtomicU32::new(0),
            bus_cycle_ns: AtomicU32::new(1),
            guarded: AtomicU8::new(0),
            hv: AtomicU8::new(0),
        }
    }

    /// Stops the countdown. The host timer is left alone and will find nothing to do.
    pub(super) fn reset(&self) {
        self.stop();
        // The pace is kept by stop(), which a change of the timer's mode uses as well.
        self.divide.store(0, Relaxed);
    }

    pub(super) fn stop(&self) {
        // The expiry alone stops it: a host timer that fires later finds nothing to do.
        self.expiry_ns.store(0, SeqCst);
        self.period_ns.store(0, Relaxed);
        self.deadline_tsc.store(0, Relaxed);
        self.initial.store(0, Relaxed);
    }

    /// When the host timer fires for a deadline `ticks` of the guest's TSC ahead.
    #[inline]
    fn sw_time_of(&self, ticks: u64, clock: &TimerClock) -> u64 {
        let ns = clock.now_ns.saturating_add(ticks_to_ns(ticks, clock.tsc_khz));
        match self.guarded.load(Relaxed) {
            0 => ns,
            _ => ns.saturating_sub(GUARD_ADVANCE_NS),
        }
    }

    /// Only the owner changes it, so for the owner a plain load will do.
    #[inline]
    fn hv_in_use(&self) -> bool {
        self.hv.load(Relaxed) != 0
    }

    /// Sets the expiry of a countdown.
    fn arm(&self, ns: u64) -> TimerOp {
        // The greatest value stands for "by TSC", so that a time must not be it.
        let ns = ns.min(BY_TSC - 1);
        if self.hv_in_use() {
            self.expiry_ns.store(ns.max(1), SeqCst);
            return TimerOp::ArmHv;
        }
        self.arm_sw_timer(ns)
    }

    /// Sets the expiry and says what that asks of the host timer.
    #[inline]
    fn arm_sw_timer(&self, ns: u64) -> TimerOp {
        // 0 says that the timer does not run.
        let ns = ns.max(1);
        // Before the token is looked at: the handler takes the token first and looks at the time
        // after.
        self.expiry_ns.store(ns, SeqCst);
        // The handler may be between its two steps: who wins the exchange arms, and the other
        // leaves it.
        let armed = match self.armed_ns.load(SeqCst) {
            0 => match self.armed_ns.compare_exchange(0, ns, SeqCst, SeqCst) {
                Ok(_) => return TimerOp::Arm { ns },
                Err(armed) => armed,
            },
            armed => armed,
        };
        // Firing early costs one interrupt of the host's; stopping and starting a timer costs that at each of the guest's writes.
        if armed <= ns { TimerOp::Leave } else { TimerOp::Rearm { ns } }
    }
}

/// Nanoseconds that `ticks` take at `khz`, rounded up, so that nothing expires early. Saturates.
#[inline]
pub(super) fn ticks_to_ns(ticks: u64, khz: u32) -> u64 {
    // A frequency of 0 would be a division by zero.
    let khz = u64::from(khz.max(1));
    // Split, so that nothing overflows: the guest chooses the ticks, and 64 bits of them times 10^6
    // are too many.
    let (whole, rest) = (ticks / khz, ticks % khz);
    whole.saturating_mul(1_000_000).saturating_add((rest * 1_000_000).div_ceil(khz))
}

impl Lapic {
    /// The timer is in TSC-deadline mode.
    #[inline]
    pub fn tsc_deadline_mode(&self) -> bool {
        // Both: a VMM may restore the bit into an APIC that does not have the mode.
        self.lvt(LocalVector::Timer) & lvt::TIMER_MODE == lvt::TIMER_DEADLINE
            && self.has(FEATURE_TSC_DEADLINE)
    }

    fn periodic(&self) -> bool {
        self.lvt(LocalVector::Timer) & lvt::TIMER_MODE == lvt::TIMER_PERIODIC
    }

    /// IA32_TSC_DEADLINE: zero when the timer is not armed or not in that mode.
    #[inline]
    pub fn tsc_deadline(&self) -> u64 {
        if self.tsc_deadline_mode() && self.timer.expiry_ns.load(Relaxed) != 0 {
            self.timer.deadline_tsc.load(Relaxed)
        } else {
            0
        }
    }

    /// WRMSR IA32_TSC_DEADLINE (SDM vol. 3A §10.5.4.1): ignored in the other modes, disarms with
    /// zero, expires at once when the time is past.
    #[inline]
    pub fn set_tsc_deadline(&self, deadline: u64, clock: &TimerClock) -> TimerOp {
        if self.timer.hv_in_use() {
            return self.set_hv_deadline(deadline, clock.guest_tsc);
        }
        // In another mode the MSR reads 0 and writes are ignored (SDM vol. 3A §10.5.4.1).
        if !self.tsc_deadline_mode() || !self.enabled() {
            return TimerOp::Leave;
        }
        self.timer.deadline_tsc.store(deadline, Relaxed);
        if deadline == 0 {
            self.timer.expiry_ns.store(0, Release);
            return TimerOp::Leave;
        }
        // The guest chooses the deadline: one that is past must not become a huge distance.
        match deadline.checked_sub(clock.guest_tsc) {
            None | Some(0) => {
                self.timer.expiry_ns.store(0, Release);
                TimerOp::Expired(self.deliver_local(LocalVector::Timer))
            }
            Some(ticks) => self.timer.arm_sw_timer(self.timer.sw_time_of(ticks, clock)),
        }
    }

    /// Sets the deadline while the hv timer watches it: no host time is needed.
    #[inline(always)]
    pub fn set_hv_deadline(&self, deadline: u64, guest_tsc: u64) -> TimerOp {
        if !self.tsc_deadline_mode() || !self.enabled() {
            return TimerOp::Leave;
        }
        // Nobody but the owner looks at these.
        self.timer.deadline_tsc.store(deadline, Relaxed);
        // No subtraction: the CPU compares TSCs, and no time has to be computed.
        if deadline > guest_tsc {
            self.timer.expiry_ns.store(BY_TSC, Release);
            return TimerOp::ArmHv;
        }
        self.timer.expiry_ns.store(0, Release);
        // The hv timer may still be armed for a deadline that is given up; it has to be told.
        if deadline == 0 {
            return TimerOp::ArmHv;
        }
        TimerOp::Expired(self.deliver_local(LocalVector::Timer))
    }

    /// Whether the hv timer is in use, see the module. Owner only.
    #[inline]
    pub fn hv_timer_in_use(&self) -> bool {
        self.timer.hv_in_use()
    }

    /// The hv timer is used from now on, until [`switch_to_sw_timer`](Self::switch_to_sw_timer). What it is
    /// to be armed for: a host timer that fires at the same time may have moved it. Owner only.
    pub fn switch_to_hv_timer(&self) -> Expiry {
        let timer = &self.timer;
        // Before the expiry changes: a handler that fires from here on leaves the timer to the
        // owner.
        timer.hv.store(1, SeqCst);
        if self.tsc_deadline_mode() {
            // Unless it has expired, or does so now.
            let _ = timer.expiry_ns.fetch_update(SeqCst, SeqCst, |ns| (ns != 0).then_some(BY_TSC));
        }
        self.next_expiry()
    }

    /// The owner is about to sleep: the host timer is used from now on. Owner only.
    pub fn switch_to_sw_timer(&self, clock: &TimerClock) -> TimerOp {
        let timer = &self.timer;
        // Before the expiry is read: a handler that fires from here on acts on it.
        timer.hv.store(0, SeqCst);
        match timer.expiry_ns.load(SeqCst) {
            0 => TimerOp::Leave,
            BY_TSC => {
                // A deadline that is past gives 0, which expires at once.
                let ticks = timer.deadline_tsc.load(Relaxed).saturating_sub(clock.guest_tsc);
                timer.arm_sw_timer(timer.sw_time_of(ticks, clock))
            }
            ns => timer.arm_sw_timer(ns),
        }
    }

    /// The TSC deadline has come, the owner says: interrupts. Owner only.
    pub fn expire_deadline(&self) -> Accepted {
        // Exchanged: whoever takes the expiry delivers, and nobody else does.
        // The mode first: the expiry of a countdown is a time, and is not the owner's to end here.
        if !self.tsc_deadline_mode() || self.timer.expiry_ns.swap(0, SeqCst) == 0 {
            return Accepted::Ignored;
        }
        self.deliver_local(LocalVector::Timer)
    }

    /// When the timer expires next.
    #[inline]
    pub fn next_expiry(&self) -> Expiry {
        match self.timer.expiry_ns.load(SeqCst) {
            0 => Expiry::Never,
            BY_TSC => Expiry::Tsc(self.timer.deadline_tsc.load(Relaxed)),
            ns => Expiry::Ns(ns),
        }
    }

    /// Whether an expired TSC deadline is left to the owner, who may know of a later one
    /// (the lazy TSC deadline), instead of interrupting at once. The host timer fires
    /// [`GUARD_ADVANCE_NS`] before it. A deadline that runs is to be set anew after this. Owner only.
    pub fn guard_deadline(&self, guarded: bool) {
        self.timer.guarded.store(u8::from(guarded), SeqCst);
    }

    /// The deadline for which the timer runs and will interrupt; 0 when there is none, or when it
    /// is masked.
    #[inline]
    pub fn deadline_live(&self) -> u64 {
        // A masked deadline interrupts nobody, so that nobody has to be ready for it.
        if self.lvt(LocalVector::Timer) & lvt::MASKED != 0 || !self.enabled() {
            return 0;
        }
        self.tsc_deadline()
    }

    /// After the guest's TSC or its frequency was changed by the VMM: computes the expiry of an
    /// armed TSC deadline anew.
    pub fn tsc_changed(&self, clock: &TimerClock) -> TimerOp {
        match self.tsc_deadline() {
            0 => TimerOp::Leave,
            // The deadline is a time of the guest's TSC and stays; what it is in host time has
            // changed.
            deadline => self.set_tsc_deadline(deadline, clock),
        }
    }

    /// When the timer expires, as absolute host time, where that is known.
    #[inline]
    pub fn timer_expiry(&self) -> Option<u64> {
        match self.timer.expiry_ns.load(Relaxed) {
            0 | BY_TSC => None,
            ns => Some(ns),
        }
    }

    /// Whether the timer's time has come though the host timer has not fired: for halt polling.
    #[inline]
    pub fn timer_due(&self, now_ns: u64) -> bool {
        self.timer_expiry().is_some_and(|expiry| expiry <= now_ns)
    }

    /// The host timer fired. Callable on any CPU, in interrupt context. Makes the interrupt pending
    /// if the time has come; the vCPU is then to be kicked.
    #[inline]
    pub fn sw_timer_expired(&self, now_ns: u64) -> SwTimerExpired {
        let timer = &self.timer;
        // The token first, the time after: the owner does the two in the other order, so one of
        // them sees the other.
        timer.armed_ns.swap(0, SeqCst);
        // Armed before: the owner looks at the time itself, and when it is about to sleep it finds
        // the token gone and arms anew.
        // After the token: the owner clears this word before it looks at the token.
        if timer.hv.load(SeqCst) != 0 {
            return SwTimerExpired { accepted: Accepted::Ignored, rearm: None, ask_owner: false };
        }
        let Expired { accepted, next, ask_owner } = self.expire(now_ns, ByWhom::SwTimer);
        // Armed for the rest: what fired was too early, or the timer is periodic.
        let rearm = next.filter(|ns| {
            // The owner may have switched to the hv timer meanwhile.
            *ns != BY_TSC && timer.armed_ns.compare_exchange(0, *ns, SeqCst, SeqCst).is_ok()
        });
        SwTimerExpired { accepted, rearm, ask_owner }
    }

    /// Delivers if the time has come, without touching the host timer: lets the owner, who knows
    /// the time, not wait for the host timer.
    pub fn expire_due(&self, now_ns: u64) -> Accepted {
        if self.timer_due(now_ns) {
            self.expire(now_ns, ByWhom::Owner).accepted
        } else {
            Accepted::Ignored
        }
    }

    /// Delivers what has expired by `now_ns`. The host timer's handler leaves a guarded deadline to the owner, who alone
    /// knows whether it is the newest.
    fn expire(&self, now_ns: u64, by: ByWhom) -> Expired {
        let timer = &self.timer;
        let mut accepted = Accepted::Ignored;
        // The owner and the handler may both be here: whoever exchanges the expiry delivers.
        let mut expiry = timer.expiry_ns.load(SeqCst);
        loop {
            if expiry == 0 {
                return Expired { accepted, next: None, ask_owner: false };
            }
            if expiry > now_ns {
                // Not yet: the host timer fired early, or the owner has moved the expiry away.
                return Expired { accepted, next: Some(expiry), ask_owner: false };
            }
            // Asked of the very expiry that would be exchanged: the owner may have set another one meanwhile. The guest
            // may have stored a later deadline in memory that no interrupt handler may touch.
            if by == ByWhom::SwTimer && timer.guarded.load(SeqCst) != 0 && self.tsc_deadline_mode()
            {
                return Expired { accepted, next: None, ask_owner: true };
            }
            let period = timer.period_ns.load(Relaxed);
            let next = if self.periodic() && period != 0 {
                // Keeps the phase. Periods that passed unheard are one interrupt, as one IRR bit
                // would have made them.
                // Never shorter than a guest gets, whoever wrote it, and never the mark of a deadline.
                let period = period.max(MIN_PERIOD_NS);
                let periods = (now_ns - expiry) / period + 1;
                expiry.saturating_add(periods.saturating_mul(period)).min(BY_TSC - 1)
            } else {
                0
            };
            match timer.expiry_ns.compare_exchange(expiry, next, SeqCst, SeqCst) {
                Ok(_) => {
                    let this = self.deliver_local(LocalVector::Timer);
                    // A kick of an earlier round must not be forgotten for a coalesced one.
                    if this.kick() || !accepted.kick() {
                        accepted = this;
                    }
                    expiry = next;
                }
                // The owner has written meanwhile.
                Err(current) => expiry = current,
            }
        }
    }
}
