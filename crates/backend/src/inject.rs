//! Events for the guest: injection, offered interrupts, windows, NMIs, and the APIC that hardware serves.

use x86::Vector;

use crate::{Event, ability::ServedApic};

/// How the moment is found at which a guest can take an NMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum NmiWindow {
    /// The CPU exits then.
    Exit,
    /// The guest's next instruction is stepped over: [`Injection::end_step`] has to be called after the
    /// exit, whichever it is.
    Step,
    /// An event is injected first, which would push the flags of a step. An interrupt to this CPU
    /// ends the guest's run as soon as the event is delivered; then it is asked again.
    Kick,
}

/// Whether an interrupt was chosen for the guest's priority of now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// None was.
    None,
    /// One was, and is offered.
    One,
}

impl Chosen {
    /// One on a condition; none otherwise.
    #[inline]
    pub const fn one_if(condition: bool) -> Self {
        if condition { Self::One } else { Self::None }
    }
}

/// Events for the guest.
pub trait Injection {
    /// What serves a local APIC in the run loop's place.
    type ServedApic: ServedApic;

    /// Injects an event at the next entry.
    fn inject(&mut self, event: Event);
    /// Whether an event waits for the next entry.
    fn injecting(&self) -> bool;
    /// An NMI was delivered in software: its handler runs.
    fn nmi_delivered(&mut self) {
        self.set_nmi_masked(true);
    }
    /// An NMI that was injected, or was to be, was not delivered: its handler does not run.
    fn nmi_not_delivered(&mut self) {
        self.set_nmi_masked(false);
    }
    /// Takes back an event that was to be injected at an entry that did not happen.
    fn cancel_injection(&mut self) -> Option<Event>;

    /// Drops what of a debug exception the CPU keeps for the next instruction boundary. Who asks sets RFLAGS and the shadow
    /// behind.
    fn drop_pending_debug(&mut self) {
        // SVM has no such state: a trap is there with its exit.
    }
    /// Puts the pending debug exception aside while a handler runs.
    fn put_debug_aside(&mut self) {}
    /// Has what was put aside pending again, in the place of the handler's own. RFLAGS and the shadow are set behind.
    fn take_debug_back(&mut self) {}

    /// Makes `vector` a virtual interrupt that the guest takes as soon as it can, without an exit;
    /// `None` withdraws it. Replaces a window and an earlier offer.
    fn offer_interrupt(&mut self, vector: Option<Vector>);
    /// After an exit: whether the guest has taken the offered interrupt. True once per offer.
    fn offer_taken(&mut self) -> bool;
    /// Asks for an exit as soon as the guest can take an interrupt. Replaces an offer.
    fn set_interrupt_window(&mut self, on: bool);
    /// Asks for an exit when the guest changes its priority in a way that matters: an interrupt was chosen for the
    /// priority of now, or one is `waiting` for a lower one.
    fn watch_priority(&mut self, chosen: Chosen, waiting: Option<Vector>);
    /// Has every write of CR8 exit from now on: the local APIC is the VMM's.
    fn exit_on_cr8_writes(&mut self);

    /// Whether an NMI can be taken now.
    fn nmi_allowed(&self) -> bool;
    /// Asks for an exit as soon as the guest can take an NMI.
    fn set_nmi_window(&mut self) -> NmiWindow;
    /// Whether NMIs are masked: one is being handled.
    fn nmi_masked(&self) -> bool;
    /// Masks NMIs, or not.
    fn set_nmi_masked(&mut self, on: bool);
    /// Whether NMIs are masked for L1, as user space saves it: L2 may run with a mask of its own.
    fn nmi_masked_for_l1(&self) -> bool {
        self.nmi_masked()
    }
    /// Whether NMIs are masked for L1, asked once L2 was put aside; `told` is what
    /// [`nmi_masked_for_l1`](Self::nmi_masked_for_l1) said while L2 ran.
    fn nmi_masked_behind_l2(&self, told: bool) -> bool {
        told
    }
    /// Masks NMIs for L1, or not, as user space has saved it.
    fn set_nmi_masked_for_l1(&mut self, on: bool) {
        self.set_nmi_masked(on);
    }
    /// What [`set_nmi_window`](Self::set_nmi_window) asked for has come: [`Exit::Iret`](crate::Exit::Iret) or
    /// [`Exit::NmiWindow`](crate::Exit::NmiWindow).
    fn iret_begun(&mut self);
    /// After the exit behind an entry that [`NmiWindow::Step`] was said for: the guest's flags are its own
    /// again.
    fn end_step(&mut self);
    /// Whether a #DB exit was our own single step.
    fn own_single_step(&mut self) -> bool;
    /// After a #DB exit of which user space hears and not the guest: the next entry goes on behind it. `bits`: what DR6 says of
    /// it; `before`: what that is to be again, where the exit has left it written.
    fn pass_debug(&mut self, bits: u64, before: u64);

    /// What serves a local APIC, where CPUs of this kind may.
    fn served_apic(&self) -> Option<&Self::ServedApic>;
    /// What serves a local APIC, to be given its state.
    fn served_apic_mut(&mut self) -> Option<&mut Self::ServedApic>;
}
