//! The timer of the local APIC: when its next deadline is, and who watches it.
//!
//! A guest writes its timer far more often than the timer expires. Linux sets a deadline for every clock
//! event and replaces most of them by later ones. So what a write costs matters more than what an expiry
//! costs, and three ways of watching a deadline exist, of which a write may find any:
//!
//! - **The CPU** (hv timer). An Intel CPU ends the guest's run by itself when the VMX-preemption timer is
//!   at 0. A write then compares with the TSC and stores; no kernel call is made. This works while the
//!   vCPU runs, polls, waits for a CPU or is in user space, for a time that passes while the guest does
//!   not run is found at the next entry (docs/adr/0033).
//! - **The kernel** (sw timer). A one-shot host timer interrupts, on AMD always, on Intel while the thread
//!   sleeps in HLT: a sleeping thread has to be woken. It may fire early and never late. A deadline that
//!   moves away leaves it as it is, and when it fires early it is armed again; so most writes make no
//!   kernel call here either.
//! - **The guest** (lazy TSC deadline). The guest stores a later deadline in a page that it shares with
//!   the host, and makes no exit. The host has promised to look there when the deadline comes that it
//!   knows of ([`lazy_deadline`], docs/adr/0020).
//!
//! When the next deadline is, and whether the CPU or the kernel watches it, is known in one place:
//! [`irqchip::lapic`]'s timer ([`Expiry`], [`hv_timer_in_use`](irqchip::lapic::Lapic::hv_timer_in_use)). It
//! lies in the shared half of the vCPU, because the host timer's interrupt reads it on any CPU. Here is
//! what the vCPU's own thread does with it, in three verbs: a timer is *armed*, *expires* or is
//! *cancelled*. At the two ends of a sleep the deadline *switches* from one timer to the other.
//!
//! Two clocks are compared, and they are not the same. A TSC deadline is a time of the guest's TSC; the
//! CPU watches it as it is, and it is converted to host time for the host timer alone. A countdown is host
//! time. The CPU watches it by the TSC as well, but host time says whether it is over: a guest that sets
//! its TSC, or a host that disciplines its clock, makes it neither longer nor shorter.

pub(crate) mod lazy_deadline;
pub(crate) mod tsc;

use backend::{Backend, DeadlineWatch};
use host::irq;
use irqchip::lapic::{Expiry, Lapic, TimerChange, TimerClock, TimerOp};
use mmu::Section;
use msr::By;
use pv::LazyDeadline;
use stats::VcpuCount;
use vm::{time::ScaledTsc, vcpu_shared::Request};

use self::tsc::Tsc;
use crate::{
    Vcpu,
    run::{events::Turn, outcome::Next},
};

/// What two conversions between TSC and nanoseconds may differ by.
const ROUNDING_NS: u64 = 100;

/// What a vCPU's thread knows of time beside the timer itself.
#[derive(Debug, Default)]
pub(crate) struct Time {
    clock: LoopClock,
    /// The page in which the guest may store later deadlines.
    pub lazy: LazyDeadline,
    /// The memory's generation when that page was last put right.
    lazy_generation: u64,
}

impl Time {
    /// The loop was left: the kernel may have adjusted its clock.
    #[inline]
    pub(crate) fn forget_clock(&mut self) {
        self.clock.base = None;
    }
}

/// Host time inside the loop, derived from the TSC: one call of the kernel's clock serves all handlers
/// until the loop is left.
#[derive(Clone, Copy, Debug, Default)]
struct LoopClock {
    base: Option<Base>,
}

#[derive(Clone, Copy, Debug)]
struct Base {
    tsc: u64,
    ns: u64,
    /// Nanoseconds in a tick, 32.32 fixed point.
    mult: u64,
}

/// Ticks of a TSC of `khz` in `ns` nanoseconds, rounded up. Saturates.
fn ns_to_ticks(ns: u64, khz: u32) -> u64 {
    const NS_PER_MS: u64 = 1_000_000;
    let khz = u64::from(khz);
    let (whole, rest) = (ns / NS_PER_MS, ns % NS_PER_MS);
    // The rest is below 2^52.
    // Apart, because ns times kHz has more than 64 bits.
    whole.saturating_mul(khz).saturating_add((rest * khz).div_ceil(NS_PER_MS))
}

/// Whether the timer's LVT entry says TSC-deadline mode.
const fn is_deadline_mode(entry: u32) -> bool {
    entry >> 17 & 3 == 2
}

/// The clocks that a vCPU shows its guest.
impl<B: Backend> Vcpu<B> {
    /// The present, outside the loop or with the host's segments loaded.
    pub(crate) fn clock_now(&mut self) -> TimerClock {
        // The TSC right behind the clock, with no interrupt between: what lies between them is an error of all that
        // is derived, and a deadline would come early by it.
        let (now_ns, tsc) = irq::undisturbed(|| (host::clock::monotonic_ns(), self.b.host_tsc()));
        // One division for all later readings.
        let mult = (1_000_000u64 << 32) / u64::from(host::clock::tsc_khz().max(1));
        self.time.clock.base = Some(Base { tsc, ns: now_ns, mult });
        TimerClock { now_ns, guest_tsc: self.b.guest_tsc(tsc), tsc_khz: self.rare.tsc.khz }
    }

    /// The guest's TSC is what `rare.tsc` says from now on, also for who reads debugfs.
    pub(crate) fn put_tsc(&mut self) {
        let Tsc { offset, ratio, .. } = self.rare.tsc;
        self.b.set_tsc(offset, ratio);
        self.stats.set(VcpuCount::TscOffset, offset);
        self.stats.set(VcpuCount::TscRatio, ratio);
    }

    /// The host's TSC at this frequency, without the guest's offset.
    pub(crate) fn scaled_tsc(&self, host: u64) -> ScaledTsc {
        let scaled = |ticks| self.b.guest_tsc(ticks).wrapping_sub(self.rare.tsc.offset);
        ScaledTsc { now: scaled(host), lost: scaled(self.rare.tsc.lost) }
    }

    /// Before a command of the VMM's, KVM_RUN among them: the host may have slept, or keep time by another clock. While it
    /// sleeps no command is under way, for each task is frozen on its way to user space.
    #[inline]
    pub fn follow_host_clock(&mut self) {
        let source = host::clock::source_generation();
        if source != self.rare.clock_source {
            self.follow_other_clock(source);
        }
    }

    #[cold]
    #[inline(never)]
    fn follow_other_clock(&mut self, source: u32) {
        self.rare.clock_source = source;
        // Both in all, and scaled then: one that looks after each sleep comes to the same as one that looks after two.
        let before = self.scaled_tsc(0).lost;
        self.rare.tsc.lost = host::clock::tsc_lost();
        let lost = self.scaled_tsc(0).lost.wrapping_sub(before);
        if lost != 0 {
            // The guest's TSC goes on from where it was, and what is a time of it comes as it would have: its
            // deadlines, and those of a guest's guest, stay as they are.
            let offset = self.rare.tsc.offset.wrapping_add(lost);
            self.rare.tsc.offset = offset;
            self.put_tsc();
            self.tsc_changed();
        }
        self.shared.request(Request::Clock);
    }

    /// The present inside the loop, if the base is known: no kernel call.
    #[inline]
    fn clock_in_loop(&mut self) -> Option<TimerClock> {
        let base = self.time.clock.base?;
        let tsc = self.b.host_tsc();
        let ticks = u128::from(tsc.wrapping_sub(base.tsc));
        // A loop may last for seconds, and the product has 32 bits more.
        let now_ns = base.ns.wrapping_add(((ticks * u128::from(base.mult)) >> 32) as u64);
        Some(TimerClock { now_ns, guest_tsc: self.b.guest_tsc(tsc), tsc_khz: self.rare.tsc.khz })
    }
}

/// Writes of the timer.
impl<B: Backend> Vcpu<B> {
    /// WRMSR IA32_TSC_DEADLINE inside the loop.
    #[inline]
    pub(crate) fn write_deadline_in_loop(&mut self, s: Section<'_>, value: u64) -> Next {
        // A deadline that has passed, or that the CPU watches, needs no host time at all.
        let tsc = self.b.host_tsc();
        let guest_tsc = self.b.guest_tsc(tsc);
        // The CPU compares the guest's TSC: nothing is converted.
        if hv_timer_in_use(&self.b, &self.shared.lapic) {
            self.write_hv_deadline(value, guest_tsc);
            return self.promise_in_loop(s, Next::Again);
        }
        let past = value <= guest_tsc;
        let clock = if past {
            TimerClock { now_ns: 0, guest_tsc, tsc_khz: self.rare.tsc.khz }
        } else {
            match self.clock_in_loop() {
                Some(clock) => clock,
                None => {
                    let (clock, next) = self.with_kernel(Self::clock_now);
                    if next != Next::Again {
                        self.write_deadline_and_leave(s, value, &clock);
                        return next;
                    }
                    clock
                }
            }
        };
        let next = match self.shared.lapic.set_tsc_deadline(value, &clock) {
            TimerOp::Leave => Next::Again,
            TimerOp::Expired(accepted) => {
                // To oneself: no IPI, for the loop looks before its next entry.
                self.pending.raise_if(accepted.kick());
                Next::Again
            }
            op => self.with_kernel(|v| v.arm_timer(op)).1,
        };
        self.promise_in_loop(s, next)
    }

    #[inline]
    fn write_hv_deadline(&mut self, value: u64, guest_tsc: u64) {
        match self.shared.lapic.set_hv_deadline(value, guest_tsc) {
            TimerOp::ArmHv if value != 0 => set_hv_timer_from(&mut self.b, value, guest_tsc),
            // 0 is no deadline: the guest has stopped its timer (SDM vol. 3A, TSC-deadline mode).
            TimerOp::ArmHv => set_hv_timer(&mut self.b, 0),
            TimerOp::Expired(accepted) => {
                // It has come: the next entry must not end for it again.
                set_hv_timer(&mut self.b, 0);
                self.pending.raise_if(accepted.kick());
            }
            // In another mode the write does nothing; the host timer is not in use.
            TimerOp::Leave | TimerOp::Arm { .. } | TimerOp::Rearm { .. } => {}
        }
    }

    /// A guest with the lazy TSC deadline is promised that its page will be looked at.
    #[inline]
    fn promise_in_loop(&mut self, s: Section<'_>, next: Next) -> Next {
        if self.time.lazy.enabled() { self.arm_lazy_deadline_in_loop(s, next) } else { next }
    }

    #[cold]
    #[inline(never)]
    fn write_deadline_and_leave(&mut self, s: Section<'_>, value: u64, clock: &TimerClock) {
        let op = self.shared.lapic.set_tsc_deadline(value, clock);
        let _ = self.with_kernel(|v| v.arm_timer(op));
        // The loop is left whatever comes of it.
        let _ = self.promise_in_loop(s, Next::Done);
    }

    /// Writes the TSC deadline outside the loop; `by` the VMM: for KVM_SET_MSRS, when the guest's memory may not be
    /// restored yet.
    pub(crate) fn write_deadline(&mut self, value: u64, by: By) {
        self.arm_deadline(value);
        if by == By::Vmm {
            // The page may be memory that is not restored yet: nothing is stored to it.
            self.time.lazy.forget_promise();
        } else {
            self.arm_lazy_deadline();
        }
    }

    /// Arms the timer for a deadline, and does nothing else.
    fn arm_deadline(&mut self, deadline: u64) {
        let clock = self.clock_now();
        let op = self.shared.lapic.set_tsc_deadline(deadline, &clock);
        self.arm_timer(op);
    }

    /// A register of the timer was written.
    pub(crate) fn timer_changed(&mut self, change: TimerChange) {
        let clock = self.clock_now();
        let op = self.shared.lapic.timer_update(change, clock.now_ns);
        // Before the page is looked at, which is told what the timer runs for.
        self.arm_timer(op);
        if matches!(change, TimerChange::Mode { old } if is_deadline_mode(old)) {
            self.time.lazy.leave();
        } else {
            self.time.lazy.doubt();
        }
    }

    /// KVM_SET_LAPIC has set the timer. `ran_for_deadlines`: it was in TSC-deadline mode before.
    pub(crate) fn timer_restored(&mut self, op: TimerOp, ran_for_deadlines: bool) {
        self.arm_timer(op);
        // A VMM restores: what the page holds is of the machine that was saved.
        self.time.lazy.forget_promise();
        if ran_for_deadlines && !self.shared.lapic.tsc_deadline_mode() {
            self.time.reset_lazy_deadline(&self.shared);
        }
    }

    /// The guest's TSC runs otherwise than before. A deadline that the CPU watches is one of that TSC, and
    /// needs nothing; how much of a countdown is left is looked at anew, before the next entry.
    #[cold]
    #[inline(never)]
    pub(crate) fn tsc_changed(&mut self) {
        // A countdown was converted by the TSC of before.
        if hv_timer_in_use(&self.b, &self.shared.lapic)
            && matches!(self.shared.lapic.next_expiry(), Expiry::Ns(_))
        {
            // 1 is long past: the next entry ends at once, and the countdown is looked at by the
            // new TSC.
            set_hv_timer(&mut self.b, 1);
        }
    }
}

/// Has the guest's run end when its TSC has reached `deadline`; 0: at no time.
#[inline(always)]
fn set_hv_timer(b: &mut impl Backend, deadline: u64) {
    if let Some(timer) = b.deadline_mut() {
        timer.watch(deadline);
    }
}

/// Sets the hv timer inside the loop, to a deadline ahead of `now`, the guest's TSC.
#[inline(always)]
fn set_hv_timer_from(b: &mut impl Backend, deadline: u64, now: u64) {
    if let Some(timer) = b.deadline_mut() {
        timer.watch_from(deadline, now);
    }
}

/// Whether the deadline that the CPU watches has come.
#[inline(always)]
fn hv_timer_is_due(b: &mut impl Backend) -> bool {
    b.deadline_mut().is_some_and(DeadlineWatch::is_due)
}

/// Whether the CPU watches the deadline now.
#[inline(always)]
fn hv_timer_in_use(b: &impl Backend, lapic: &Lapic) -> bool {
    b.deadline().is_some() && lapic.hv_timer_in_use()
}

/// A new vCPU: the CPU watches, if it can.
pub(crate) fn init_timer(b: &impl Backend, lapic: &Lapic) {
    if b.deadline().is_some_and(DeadlineWatch::can_watch) {
        let _ = lapic.switch_to_hv_timer();
    }
}

/// The timers that end a vCPU's run or its sleep.
impl<B: Backend> Vcpu<B> {
    /// Does what a change of the timer asks for; the kernel may be called.
    fn arm_timer(&mut self, op: TimerOp) {
        if let TimerOp::Expired(accepted) = op
            && accepted.kick()
        {
            self.pending.raise();
        }
        // An expiry too: a periodic timer runs on, and a spent deadline must not be watched.
        if matches!(op, TimerOp::ArmHv | TimerOp::Expired(_))
            && hv_timer_in_use(&self.b, &self.shared.lapic)
        {
            self.arm_hv_timer(self.shared.lapic.next_expiry(), None);
        }
        let timer = &self.shared;
        op.apply(
            &timer.lapic,
            |ns| timer.start(ns),
            || {
                timer.cancel();
            },
        );
    }

    /// The CPU watches `next` from now on. The kernel is asked for the time where `clock` does not say.
    pub(crate) fn arm_hv_timer(&mut self, next: Expiry, clock: Option<&TimerClock>) {
        let deadline = match next {
            Expiry::Never => 0,
            Expiry::Tsc(deadline) => deadline,
            Expiry::Ns(ns) => {
                let TimerClock { now_ns, guest_tsc, tsc_khz } =
                    clock.copied().unwrap_or_else(|| self.clock_now());
                // 0 would be no deadline.
                guest_tsc.saturating_add(ns_to_ticks(ns.saturating_sub(now_ns), tsc_khz)).max(1)
            }
        };
        set_hv_timer(&mut self.b, deadline);
    }

    /// The CPU has ended the guest's run at the deadline that it watches, or for nothing.
    pub(crate) fn expire_hv_timer(&mut self, s: Section<'_>) -> Next {
        if !hv_timer_is_due(&mut self.b) {
            // Sooner, for the time is further away than the CPU counts. A timer that is spent at the entry comes
            // before the host's interrupts: that a run ends so again and again must not keep the loop.
            return self.rare.stalls.count(Turn::Other);
        }
        match self.shared.lapic.next_expiry() {
            Expiry::Tsc(_) if self.time.lazy.enabled() => self.expire_lazy_deadline_in_loop(s),
            Expiry::Tsc(_) => self.expire_deadline(),
            Expiry::Never => {
                // A deadline that is gone must not end a second run.
                set_hv_timer(&mut self.b, 0);
                Next::Again
            }
            Expiry::Ns(_) => match self.clock_in_loop() {
                Some(clock) => {
                    self.expire_countdown(&clock);
                    Next::Again
                }
                None => {
                    let ((), next) = self.with_kernel(|v| {
                        let clock = v.clock_now();
                        v.expire_countdown(&clock);
                    });
                    next
                }
            },
        }
    }

    /// The TSC deadline that the CPU watches has come, and is the guest's newest.
    fn expire_deadline(&mut self) -> Next {
        // A guest that does not set another one is not to be left again for this one.
        set_hv_timer(&mut self.b, 0);
        self.pending.raise_if(self.shared.lapic.expire_deadline().kick());
        Next::Again
    }

    /// The countdown that the CPU watches is over, or what was watched for it; a periodic one begins anew.
    fn expire_countdown(&mut self, clock: &TimerClock) {
        // Host time is computed from the TSC here: a countdown must not be found one tick short, and end the run again.
        let now_ns = clock.now_ns.saturating_add(ROUNDING_NS);
        self.pending.raise_if(self.shared.lapic.expire_due(now_ns).kick());
        self.arm_hv_timer(self.shared.lapic.next_expiry(), Some(clock));
    }

    /// Looks at the deadline that the CPU watches while the vCPU is halted and polls. If it has come its
    /// interrupt is pending now, or the vCPU has a request to look at the lazy deadline's page.
    pub(crate) fn expire_while_polling(&mut self) {
        if !hv_timer_in_use(&self.b, &self.shared.lapic) || !hv_timer_is_due(&mut self.b) {
            return;
        }
        match self.shared.lapic.next_expiry() {
            Expiry::Never => set_hv_timer(&mut self.b, 0),
            // The page is looked at by the thread, with the way out of the halt behind it.
            Expiry::Tsc(_) if self.time.lazy.enabled() => self.shared.request(Request::Deadline),
            Expiry::Tsc(_) => {
                let _ = self.expire_deadline();
            }
            Expiry::Ns(_) => {
                let clock = self.clock_now();
                self.expire_countdown(&clock);
            }
        }
    }

    /// The thread is about to sleep: the host timer wakes it from now on, and the CPU watches nothing. True:
    /// it did before. When the thread wakes the CPU watches again ([`Waiting`](crate::run)); a host timer
    /// that still fires does nothing.
    pub(crate) fn switch_to_sw_timer(&mut self) -> bool {
        if !hv_timer_in_use(&self.b, &self.shared.lapic) {
            return false;
        }
        let clock = self.clock_now();
        // Off first: the same deadline must not be watched twice and expire twice.
        set_hv_timer(&mut self.b, 0);
        let op = self.shared.lapic.switch_to_sw_timer(&clock);
        self.arm_timer(op);
        true
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
