//! The local APIC as an exit reaches it: by MSR, by its page, by the deadline MSR. What a write
//! asks for is done here.

use backend::Backend;
use irqchip::{
    IrqMessage,
    lapic::{HostTimer, LapicEffect, TimerChange, TimerClock, TimerOp},
};
use mmu::Section;
use vm::{
    irq::{Ended, Irqchip, Owing},
    vcpu_shared::Request,
};
use x86::Vector;

use crate::{Vcpu, run::events::Outer, run::inner::Next};

/// Host time inside the loop, derived from the TSC: one call of the kernel's clock serves all
/// handlers until the loop is left.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopClock {
    base: Option<Base>,
}

#[derive(Clone, Copy, Debug)]
struct Base {
    tsc: u64,
    ns: u64,
    /// Nanoseconds in a tick, 32.32 fixed point.
    mult: u64,
}

impl LoopClock {
    /// The loop was left: the kernel may have adjusted its clock.
    #[inline]
    pub fn forget(&mut self) {
        self.base = None;
    }
}

struct HostAlarm<'a>(&'a vm::vcpu_shared::SharedVcpu);

impl HostTimer for HostAlarm<'_> {
    fn start(&self, ns: u64) {
        self.0.start(ns);
    }
    fn cancel(&self) {
        self.0.cancel();
    }
}

/// Whether the timer's LVT entry says TSC-deadline mode.
const fn is_deadline_mode(entry: u32) -> bool {
    entry >> 17 & 3 == 2
}

impl<B: Backend> Vcpu<B> {
    /// The present, outside the loop or with the host's segments loaded.
    pub(crate) fn clock_now(&mut self) -> TimerClock {
        let now_ns = host::clock::monotonic_ns();
        let tsc = self.b.host_tsc();
        let mult = (1_000_000u64 << 32) / u64::from(host::clock::tsc_khz().max(1));
        self.loop_clock.base = Some(Base { tsc, ns: now_ns, mult });
        TimerClock { now_ns, guest_tsc: self.b.guest_tsc(tsc), tsc_khz: self.tsc_khz }
    }

    /// The present inside the loop, if the base is known: no kernel call.
    #[inline]
    pub(crate) fn clock_in_loop(&mut self) -> Option<TimerClock> {
        let base = self.loop_clock.base?;
        let tsc = self.b.host_tsc();
        let ticks = u128::from(tsc.wrapping_sub(base.tsc));
        let now_ns = base.ns.wrapping_add(((ticks * u128::from(base.mult)) >> 32) as u64);
        Some(TimerClock { now_ns, guest_tsc: self.b.guest_tsc(tsc), tsc_khz: self.tsc_khz })
    }

    /// Does a timer operation; the kernel may be called.
    pub(crate) fn do_timer(&mut self, op: TimerOp) {
        if let TimerOp::Expired(accepted) = op
            && accepted.kick()
        {
            self.recheck = true;
        }
        if matches!(op, TimerOp::Watch | TimerOp::Expired(_)) && self.watches_time() {
            self.watch_time();
        }
        op.apply(&self.shared.lapic, &HostAlarm(&self.shared));
    }

    /// WRMSR IA32_TSC_DEADLINE inside the loop.
    #[inline]
    pub(crate) fn deadline_in_loop(&mut self, s: Section<'_>, value: u64) -> Next {
        // A deadline that has passed, or is watched, needs no host time at all.
        let tsc = self.b.host_tsc();
        let guest_tsc = self.b.guest_tsc(tsc);
        if self.watches_time() {
            self.set_deadline_to_watch(value, guest_tsc);
            return self.deadline_was_set(s, Next::Again);
        }
        let past = value <= guest_tsc;
        let clock = if past {
            TimerClock { now_ns: 0, guest_tsc, tsc_khz: self.tsc_khz }
        } else {
            match self.clock_in_loop() {
                Some(clock) => clock,
                None => {
                    let (clock, next) = self.with_kernel(Self::clock_now);
                    if next != Next::Again {
                        self.set_deadline_with_kernel(s, value, &clock);
                        return next;
                    }
                    clock
                }
            }
        };
        let next = match self.shared.lapic.set_tsc_deadline(value, &clock) {
            TimerOp::Leave => Next::Again,
            TimerOp::Expired(accepted) => {
                self.recheck |= accepted.kick();
                Next::Again
            }
            op => self.with_kernel(|v| v.do_timer(op)).1,
        };
        self.deadline_was_set(s, next)
    }

    #[inline]
    fn set_deadline_to_watch(&mut self, value: u64, guest_tsc: u64) {
        match self.shared.lapic.set_watched_deadline(value, guest_tsc) {
            TimerOp::Watch if value != 0 => self.b.watch_deadline_from(value, guest_tsc),
            TimerOp::Watch => self.b.watch_deadline(0),
            TimerOp::Expired(accepted) => {
                self.b.watch_deadline(0);
                self.recheck |= accepted.kick();
            }
            _ => {}
        }
    }

    #[inline]
    fn deadline_was_set(&mut self, s: Section<'_>, next: Next) -> Next {
        if self.lazy.enabled() { self.publish_deadline_in_loop(s, next) } else { next }
    }

    #[cold]
    #[inline(never)]
    fn set_deadline_with_kernel(&mut self, s: Section<'_>, value: u64, clock: &TimerClock) {
        let op = self.shared.lapic.set_tsc_deadline(value, clock);
        let _ = self.with_kernel(|v| v.do_timer(op));
        if self.lazy.enabled() {
            // The loop is left whatever comes of it.
            let _ = self.publish_deadline_in_loop(s, Next::Done);
        }
    }

    /// Sets the deadline outside the loop; `host`: for KVM_SET_MSRS, when the guest's memory may
    /// not be restored yet.
    pub(crate) fn set_deadline(&mut self, value: u64, host: bool) {
        let clock = self.clock_now();
        let op = self.shared.lapic.set_tsc_deadline(value, &clock);
        self.do_timer(op);
        if host {
            self.lazy.forget_promise();
        } else {
            self.publish_deadline();
        }
    }

    /// Follows a register write inside the loop.
    #[inline]
    pub(crate) fn effect_in_loop(&mut self, effect: LapicEffect) -> Next {
        match effect {
            // Nothing but, perhaps, an error, which may have an interrupt of its own.
            LapicEffect::None | LapicEffect::Eoi { level: false, .. } => {
                self.recheck |= self.shared.lapic.maybe_pending();
                Next::Again
            }
            LapicEffect::TprChanged => {
                self.publish_priority();
                self.recheck = true;
                Next::Again
            }
            LapicEffect::SelfIpi(vector) => {
                let accepted = self.shared.lapic.accept_fixed(vector, false);
                self.recheck |= accepted.kick();
                Next::Again
            }
            effect => {
                let next = self.with_kernel(|v| v.effect(effect)).1;
                // The lazy deadline's page is put right outside, and there an INIT or SMI to oneself
                // is taken, and many resamplers or the VMM hear of an end.
                let outside = self.lazy.in_doubt()
                    || self.shared.has_requests()
                    || self.events.outer.any_but(Outer::OBSERVED);
                if outside { Next::Done } else { next }
            }
        }
    }

    /// Follows a register write; the kernel may be called.
    pub(crate) fn effect(&mut self, effect: LapicEffect) {
        self.recheck = true;
        match effect {
            LapicEffect::None => {}
            LapicEffect::Eoi { vector, level } => {
                if level {
                    self.has_ended(vector);
                }
            }
            LapicEffect::TprChanged => self.publish_priority(),
            LapicEffect::SelfIpi(vector) => {
                let _ = self.shared.lapic.accept_fixed(vector, false);
            }
            LapicEffect::SendIpi(message) => self.send_ipi(&message),
            LapicEffect::TimerChanged(change) => {
                let clock = self.clock_now();
                let op = self.shared.lapic.timer_update(change, clock.now_ns);
                self.do_timer(op);
                if matches!(change, TimerChange::Mode { old } if is_deadline_mode(old)) {
                    self.lazy.leave();
                } else {
                    self.lazy.doubt();
                }
            }
            LapicEffect::EnableChanged | LapicEffect::Lint0Changed => {
                self.lazy.doubt();
                self.vm.irq().apic_changed();
                self.address_changed();
            }
            LapicEffect::AddressChanged => self.address_changed(),
        }
    }

    fn has_ended(&mut self, vector: Vector) {
        match self.vm.irq().eoi(&self.shared, vector) {
            Ended::Here(owing) => self.note_owing(owing),
            Ended::ForVmm => {
                self.rare.ended = vector;
                self.events.outer.set(Outer::EOI, true);
            }
        }
    }

    /// Irqfds may wait to hear of an end of interrupt that this vCPU's guest has made: it tells them before
    /// it enters the guest again, sleeps or returns to user space.
    #[inline]
    pub(crate) fn note_owing(&mut self, owing: Owing) {
        if owing.any() {
            self.owe();
        }
    }

    #[cold]
    #[inline(never)]
    fn owe(&mut self) {
        self.events.outer.set(Outer::OWING, true);
        self.recheck = true;
    }

    /// Tells them.
    #[cold]
    #[inline(never)]
    pub(crate) fn tell_resamplers(&mut self) {
        self.events.outer.set(Outer::OWING, false);
        self.vm.irq().signal_owed();
    }

    /// Other interrupts than before may be addressed to the local APIC.
    pub(crate) fn address_changed(&self) {
        if self.vm.irq().kind() == Irqchip::Split {
            self.shared.request(Request::Routes);
        }
    }

    /// Follows the routes of the VMM's I/O APIC.
    #[cold]
    #[inline(never)]
    pub(crate) fn follow_routes(&mut self) {
        if self.vm.irq().kind() == Irqchip::Split {
            self.settle_apic();
            self.vm.irq().follow_routes(&self.shared);
        }
    }

    /// Delivers an IPI.
    pub(crate) fn send_ipi(&mut self, message: &IrqMessage) {
        self.vm.irq().send_ipi(&self.shared, message);
    }
}
