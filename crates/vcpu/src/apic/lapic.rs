//! The local APIC as an exit reaches it, by MSR or by its page: what a write of a register asks for is done
//! here. Its timer: [`crate::time`].

use backend::Backend;
use irqchip::{Trigger, lapic::LapicEffect};
use vm::{
    VmRef,
    irq::{Ended, Irqchip, Owing},
    vcpu_shared::Request,
};
use x86::Vector;

use crate::{
    Vcpu,
    run::{
        events::{Events, Outer},
        outcome::Next,
        pending::Pending,
    },
};

impl Events {
    /// Irqfds may wait to hear of an end of interrupt that this vCPU's guest has made: it tells them before
    /// it enters the guest again, sleeps or returns to user space.
    #[inline]
    pub(crate) fn note_owing(&mut self, pending: &mut Pending, owing: Owing) {
        if owing.any() {
            self.owe(pending);
        }
    }

    #[cold]
    #[inline(never)]
    fn owe(&mut self, pending: &mut Pending) {
        self.outer.set(Outer::OWING, true);
        pending.raise();
    }

    /// Tells the irqfds that wait for an end of interrupt that it has come.
    #[cold]
    #[inline(never)]
    pub(crate) fn tell_resamplers(&mut self, vm: &VmRef) {
        self.outer.set(Outer::OWING, false);
        vm.irq().signal_owed();
    }
}

impl<B: Backend> Vcpu<B> {
    /// Follows a register write inside the loop.
    #[inline]
    pub(crate) fn effect_in_loop(&mut self, effect: LapicEffect) -> Next {
        match effect {
            // Nothing but, perhaps, an error, which may have an interrupt of its own.
            LapicEffect::None | LapicEffect::Eoi { level: false, .. } => {
                self.pending.raise_if(self.shared.lapic.maybe_pending());
                Next::Again
            }
            LapicEffect::TprChanged => {
                self.publish_priority();
                self.pending.raise();
                Next::Again
            }
            LapicEffect::SelfIpi(vector) => {
                // No IPI to oneself: the request is seen before the next entry.
                let accepted = self.shared.lapic.accept_fixed(vector, Trigger::Edge);
                self.pending.raise_if(accepted.kick());
                Next::Again
            }
            effect => {
                let next = self.with_kernel(|v| v.effect(effect)).1;
                // The lazy deadline's page is put right outside, and there an INIT or SMI to oneself
                // is taken, and many resamplers or the VMM hear of an end.
                let outside = self.time.lazy.in_doubt()
                    || self.shared.has_requests()
                    || self.events.outer.any_but(Outer::OBSERVED);
                if outside { Next::Done } else { next }
            }
        }
    }

    /// Follows a register write; the kernel may be called.
    pub(crate) fn effect(&mut self, effect: LapicEffect) {
        // A write may raise, end or unmask an interrupt: looked for once, here for all.
        self.pending.raise();
        match effect {
            LapicEffect::None => {}
            LapicEffect::Eoi { vector, level } => {
                if level {
                    self.has_ended(vector);
                }
            }
            LapicEffect::TprChanged => self.publish_priority(),
            LapicEffect::SelfIpi(vector) => {
                let _ = self.shared.lapic.accept_fixed(vector, Trigger::Edge);
            }
            LapicEffect::SendIpi(message) => {
                self.vm.irq().send_ipi(&self.shared, &message);
            }
            LapicEffect::TimerChanged(change) => self.timer_changed(change),
            LapicEffect::EnableChanged | LapicEffect::Lint0Changed => {
                // A disabled APIC has no timer: what the guest was promised in its page is to be taken back.
                self.time.lazy.doubt();
                self.vm.irq().apic_changed();
                self.address_changed();
            }
            LapicEffect::AddressChanged => self.address_changed(),
        }
    }

    fn has_ended(&mut self, vector: Vector) {
        match self.vm.irq().eoi(&self.shared, vector) {
            Ended::Here(owing) => self.events.note_owing(&mut self.pending, owing),
            // One place is enough: KVM_RUN returns for it before the guest can end another one.
            Ended::ForVmm => {
                self.rare.ended = vector;
                self.events.outer.set(Outer::EOI, true);
            }
        }
    }

    /// Other interrupts than before may be addressed to the local APIC.
    pub(crate) fn address_changed(&self) {
        if self.vm.irq().kind() == Irqchip::Split {
            // Not kicked: only the own thread asks, and it looks at requests before its next entry.
            self.shared.request(Request::Routes);
        }
    }

    /// Follows the routes of the VMM's I/O APIC.
    #[cold]
    #[inline(never)]
    pub(crate) fn follow_routes(&mut self) {
        if self.vm.irq().kind() == Irqchip::Split {
            // Which vectors are in service decides which ends are still to be reported.
            self.gather_interrupts();
            self.vm.irq().follow_routes(&self.shared);
        }
    }
}
