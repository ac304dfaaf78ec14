//! Events that user space gives, before the first entry behind them.
//!
//! KVM_SET_VCPU_EVENTS has one word for what is injected, KVM_SET_SREGS a bitmap, the nested state what L1 injects. What they name may have
//! begun or wait: KVM_GET_VCPU_EVENTS tells an interrupt that a VMM's own controller gave, and that the guest has not taken, as one that is
//! injected. They may also name more than an entry has room for, or what the guest cannot take at all: an entry with an interrupt and
//! RFLAGS.IF clear is refused by VMX (SDM vol. 3C §27.3.1.4), and on SVM comes between CLI and STI. So before the entry each is put where it
//! belongs by one rule, when nothing can keep the entry back any more. `crates/vcpu/tests/event_order` has these calls in any order,
//! and `event_order_nested` with a guest that is a hypervisor.

use backend::{Backend, Event, Nested, Waiting};

use crate::{
    Vcpu,
    run::events::{Outer, interrupts_open},
};

/// Which events that wait for the next entry user space has given: no guest was entered since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given {
    /// [`Events::again`](super::events::Events::again).
    pub again: bool,
    /// [`Events::exception`](super::events::Events::exception).
    pub exception: bool,
    /// All of them: what was there before is replaced.
    pub all: bool,
}

impl Given {
    /// Whether it has given anything, be it that there is nothing.
    #[inline]
    pub fn any(self) -> bool {
        self.again || self.exception || self.all
    }
}

/// What comes behind [`Vcpu::settle_given`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an SMI would wait for the next exit"]
pub(crate) enum Settled {
    /// The entry.
    Entry,
    /// An SMI, which has waited for what was to go in first and does not.
    SmiIsNext,
}

impl<B: Backend> Vcpu<B> {
    /// Puts each event that user space has given where it belongs.
    #[cold]
    #[inline(never)]
    pub(crate) fn settle_given(&mut self) -> Settled {
        let had = self.events.again.is_some();
        self.settle();
        // Once: what is taken away is not there when this is asked again.
        let taken = had && self.events.again.is_none();
        if taken && self.events.outer.has(Outer::SMI) { Settled::SmiIsNext } else { Settled::Entry }
    }

    fn settle(&mut self) {
        self.pending.raise();
        self.settle_waiting();
        self.settle_injection();
        let Some(event) = self.events.again else { return };
        if !self.may_be_of_l1(event) && (self.is_for_l1(event) || self.has_to_wait(event)) {
            match event {
                Event::Interrupt(vector) if !self.shared.in_kernel_apic => {
                    (self.events.again, self.events.external) = (None, Some(vector));
                }
                _ => self.put_back_again(),
            }
        }
    }

    /// An interrupt of the VMM's that is told of beside what L1's entry injects is none of two that this has room for: it waits.
    fn settle_waiting(&mut self) {
        let Some(event @ Event::Interrupt(vector)) = self.events.again else { return };
        if self.shared.in_kernel_apic || !self.b.injecting() || self.may_be_of_l1(event) {
            return;
        }
        if self.is_for_l1(event) || self.b.nested().is_some_and(Nested::injects_for_l1) {
            (self.events.again, self.events.external) = (None, Some(vector));
        }
    }

    /// An entry has room for one event, and a state of stock KVM's names that of an entry of L2 that has not run twice, in the
    /// nested state and among the vCPU's events. As there, what is among the events goes in; where L1's says more than they, kind
    /// and length, it is that. Not when either of the two is given: the other may be the one of before, which is still to be replaced.
    fn settle_injection(&mut self) {
        let b = &mut self.b;
        // User space may have taken the event away that was to be injected again.
        if self.events.again.is_none()
            && let Some(nested) = b.nested_mut()
        {
            nested.forget_repeated();
        }
        if !b.injecting() {
            return;
        }
        if self.events.again.is_none() {
            // VMMs set RIP behind the state which has the event.
            if let Some(nested) = b.nested_mut() {
                nested.settle_rip();
            }
        } else if b.nested().is_some_and(Nested::injects_for_l1) {
            self.events.again = None;
        } else {
            let _ = b.cancel_injection();
        }
    }

    /// Whether what is to go in first is not to: the guest has not begun to take it.
    fn has_to_wait(&self, event: Event) -> bool {
        match event {
            // An exception goes first, as on stock KVM, which has forgotten the interrupt by then.
            Event::Interrupt(_) if self.events.exception.is_some() => true,
            Event::Interrupt(_) if self.rare.given.again && !self.shared.in_kernel_apic => {
                !self.takes_interrupts() || self.rare.debug.blocks_events()
            }
            // Where a shadow is, no delivery of an NMI has begun.
            Event::Nmi => self.rare.given.again && self.b.interrupt_shadow(),
            _ => false,
        }
    }

    /// Whether the level that runs takes external interrupts now.
    fn takes_interrupts(&self) -> bool {
        if !self.pending.gated {
            return interrupts_open(&self.b);
        }
        // Where L1's flag decides, L2's says nothing; and L1's nothing while GIF is clear.
        self.is_delivered(Waiting::Interrupt(None))
            && !self.b.interrupt_shadow()
            && !self.b.injecting()
    }

    /// Whether L1 may have given L2 this event, which is L2's then, whatever holds it back.
    fn may_be_of_l1(&self, event: Event) -> bool {
        let Some(nested) = self.b.nested().filter(|_| self.pending.after_exit.is_nested()) else {
            return false;
        };
        match event {
            // With a local APIC of ours none that waits is told of.
            Event::Interrupt(_) if self.shared.in_kernel_apic => nested.hears_interrupts(),
            Event::Interrupt(vector) => nested.may_have_injected(vector),
            event => self.is_l1s_for_l2(event),
        }
    }

    /// Whether an interrupt is one of L1's machine, which L2 takes none of: it waits for L1.
    fn is_for_l1(&self, event: Event) -> bool {
        matches!(event, Event::Interrupt(_))
            && self.pending.after_exit.is_nested()
            && self.b.nested().is_some_and(Nested::hears_interrupts)
    }
}
