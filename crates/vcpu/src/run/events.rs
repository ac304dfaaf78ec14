//! Events on their way into the guest: what waits, in which order it goes, what it becomes when
//! two meet.
//!
//! An entry can inject one event. More than one may wait, so there is an order (APM vol. 2 §8.5):
//!
//! 1. `again`: an event whose delivery an exit interrupted, by a page fault on the guest's stack, say.
//!    The guest has begun to take it, so it goes before anything else. INT n is no such event: RIP still
//!    points at it, and it is executed again. Where user space gives an interrupt and a fault, the fault has come in its delivery.
//! 2. `exception`: a fault that a handler raised. It belongs to the instruction at RIP, which would
//!    otherwise be executed without it.
//! 3. An NMI, then an interrupt: these come between instructions and can wait.
//!
//! Why two exceptions have to be combined here: the CPU makes #DF of a fault in the delivery of another
//! one by itself, but if the first was injected by us and the second is raised by us, no CPU has seen
//! both. The table is the manual's (APM vol. 2 table 8-4).
//!
//! Why an interrupt is offered and not injected: it may have to wait for RFLAGS.IF or the task priority,
//! and waiting for an exit that says "now" costs that exit. The hardware holds the offer and delivers it
//! at the first moment (docs/adr/0016). The price is a second look after each exit with an offer out
//! ([`Vcpu::note_taken`]), and that the local APIC does not show its whole state meanwhile: who looks at
//! it withdraws the offer first. The 8259A cannot be offered from, because it gives its vector only when
//! it is acknowledged, which cannot be undone.
//!
//! Why NMIs need a window: the CPU blocks them until IRET, and a second one may wait. Backends find the
//! end of that in different ways ([`NmiWindow`]).
//!
//! What the outer loop has to do with the guest stopped is in [`Outer`], a bit each.

use backend::{Backend, Chosen, Event, Gate, Nested, NmiWindow, Waiting};
use irqchip::lapic::Lapic;
use mmu::Section;
use stats::VcpuCount;
use vm::vcpu_shared::VcpuShared;
use x86::{Exception, Rflags, Vector};

use crate::{
    Vcpu,
    apic::{apic_is_served, served_interrupt_waits, stop_serving_apic},
    nested::gate::{gate_of, interrupt_goes_somewhere},
    run::outcome::Next,
};

/// What waits for the next entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// An event whose delivery an exit interrupted: goes first.
    pub again: Option<Event>,
    /// An exception that a handler raised.
    pub exception: Option<Exception>,
    /// The interrupt that a VMM with its own PIC gave (KVM_INTERRUPT). With a local APIC of ours that
    /// has to take it, and it is no part of the saved state until it did.
    pub external: Option<Vector>,
    /// What is for the outer loop.
    pub outer: Outer,
}

/// What becomes of an interrupt that was prepared for an entry which does not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// The VMM gave it, with a local APIC of its own: it waits again.
    Anew,
    /// It is taken already, or may be L1's for L2, whose entry is not made undone: it goes before all others.
    First,
}

/// What is for the outer loop, or to be told of by [`crate::observe`]: a bit each, so that nothing, which
/// is usual, is one comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outer(u8);

impl Outer {
    /// Two faults met a third: the guest is to be shut down.
    pub const TRIPLE_FAULT: Self = Self(1 << 0);
    /// An instruction that the VMM single-steps has retired.
    pub const STEPPED: Self = Self(1 << 1);
    /// A system-management interrupt waits, and nothing masks it.
    pub const SMI: Self = Self(1 << 2);
    /// The vCPU is observed: something is to be told before the next entry.
    pub const OBSERVED: Self = Self(1 << 3);
    /// The VMM's I/O APIC is to hear of an end of interrupt.
    pub const EOI: Self = Self(1 << 4);
    /// The guest has lowered the task priority, and the local APIC is the VMM's.
    pub const SET_TPR: Self = Self(1 << 5);
    /// Irqfds wait to be told of an end of interrupt.
    pub const OWING: Self = Self(1 << 6);
    /// The run of a guest's guest is to end for an event, and its hypervisor's memory has to be had first.
    pub const NESTED: Self = Self(1 << 7);

    /// Whether there is anything.
    #[inline(always)]
    pub fn any(self) -> bool {
        self.0 != 0
    }

    /// Whether there is anything but `what`.
    #[inline]
    pub fn any_but(self, what: Self) -> bool {
        self.0 & !what.0 != 0
    }

    /// Whether there is this.
    #[inline]
    pub fn has(self, what: Self) -> bool {
        self.0 & what.0 != 0
    }

    /// Sets or clears one.
    #[inline]
    pub fn set(&mut self, what: Self, on: bool) {
        self.0 = (self.0 & !what.0) | if on { what.0 } else { 0 };
    }

    /// What an INIT does not end: what happened before it is told all the same.
    #[must_use]
    pub fn survivors(self) -> Self {
        Self(self.0 & (Self::EOI.0 | Self::OWING.0))
    }

    /// Takes one: whether it was there.
    pub fn take(&mut self, what: Self) -> bool {
        let had = self.has(what);
        self.set(what, false);
        had
    }
}

/// Turns of the inner loop after which the guest may not have reached the boundary of an instruction at
/// which a pending interrupt of the host would have ended its run: an event whose delivery an exit
/// interrupts is delivered first, and so is an instruction in the shadow of STI that faults. A
/// guest that made such turns without end would keep the host's interrupts off for ever; so they
/// are bounded between two entries of the loop, in whose place interrupts are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stalls(u16);

/// A turn after which the guest may have got nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The exit interrupted the delivery of an event.
    Delivering,
    /// Any other.
    Other,
}

impl Turn {
    #[inline(always)]
    pub(crate) fn delivering_if(delivering: bool) -> Self {
        if delivering { Self::Delivering } else { Self::Other }
    }
}

impl Stalls {
    /// So many faults, or a sixty-fourth of it interrupted deliveries.
    const MOST: u16 = 1024;
    const OF_DELIVERY: u16 = 64;

    /// One more: whether the loop may go on.
    #[inline]
    pub(crate) fn count(&mut self, turn: Turn) -> Next {
        let weight = if turn == Turn::Delivering { Self::OF_DELIVERY } else { 1 };
        self.0 = self.0.saturating_add(weight);
        if self.0 < Self::MOST { Next::Again } else { Next::Done }
    }

    /// The loop is entered.
    #[inline]
    pub(crate) fn forget(&mut self) {
        self.0 = 0;
    }
}

/// Whether functions of the kernel may be called: inside the loop the segments are the guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelCalls {
    /// Outside the loop.
    Allowed,
    /// Inside it.
    Forbidden,
}

impl KernelCalls {
    #[inline(always)]
    pub(crate) fn are_allowed(self) -> bool {
        self == Self::Allowed
    }
}

/// What raising a second exception makes (APM vol. 2 table 8-4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combined {
    /// The second alone.
    Second,
    /// #DF.
    Double,
    /// Shutdown.
    Triple,
}

fn contributory(vector: u8) -> bool {
    // #CP would be one as well. No guest is offered CET.
    // #DE, #TS, #NP, #SS and #GP are the class that both manuals call contributory.
    matches!(vector, 0 | 10..=13)
}

/// Combines an exception being delivered with one that its delivery raised.
pub fn combine(first: u8, second: u8) -> Combined {
    let page_fault = 14;
    // Stock KVM shuts down for any exception behind #DF, the manual for these alone.
    if first == 8 {
        return if contributory(second) || second == page_fault {
            Combined::Triple
        } else {
            Combined::Second
        };
    }
    // Not the other way round: a page fault in the delivery of a contributory one is served first,
    // since the handler's page may just be out.
    let double = (contributory(first) && contributory(second))
        || (first == page_fault && (contributory(second) || second == page_fault));
    if double { Combined::Double } else { Combined::Second }
}

impl Events {
    /// Whether nothing goes before an interrupt of a VMM with its own PIC, beside what the guest masks.
    #[inline(always)]
    pub(crate) fn has_room_for_external(&self, shared: &VcpuShared) -> bool {
        self.again.is_none()
            && self.exception.is_none()
            && self.external.is_none()
            && (!shared.in_kernel_apic || shared.lapic.accepts_pic())
    }

    /// An entry that was prepared does not happen: takes the event back. What L1 injects stays with the entry, which
    /// a saved state has as well.
    pub(crate) fn take_back_injection(&mut self, b: &mut impl Backend, waits: Waits) {
        // Its neutral form would lose kind and length of what L1 has asked for. Beside what user space has given, and nobody has settled
        // yet, there is no room for it.
        if b.nested().is_some_and(Nested::injects_for_l1) || self.again.is_some() {
            return;
        }
        match b.cancel_injection() {
            // The VMM's own waits where it waited: user space may close the guest to it before the next entry.
            Some(Event::Interrupt(vector)) if waits == Waits::Anew && self.external.is_none() => {
                self.external = Some(vector);
            }
            // It goes before all others at the next entry, as it would have at this one.
            Some(event) => {
                self.again = Some(event);
                if event == Event::Nmi {
                    b.nmi_not_delivered();
                }
            }
            None => {}
        }
    }
}

/// Whether the guest takes external interrupts now.
#[inline]
pub(crate) fn interrupts_open(b: &impl Backend) -> bool {
    // With an event prepared an interrupt has to wait for the entry after this one.
    b.rflags().contains(Rflags::IF) && !b.interrupt_shadow() && !b.injecting()
}

fn inject_exception(b: &mut impl Backend, exception: Exception) {
    // Faults push RF set, so that a breakpoint on the instruction does not hit again. Traps, aborts and
    // #DB, which may be either, do not (SDM vol. 3B §18.3.1.1).
    const DB_BP_OF_DF_MC: u32 = 1 << 1 | 1 << 3 | 1 << 4 | 1 << 8 | 1 << 18;
    if DB_BP_OF_DF_MC & 1u32.checked_shl(exception.vector.0.into()).unwrap_or(0) == 0 {
        b.set_rflags(b.rflags() | Rflags::RF);
    }
    b.inject(Event::Exception(exception));
}

/// The hardware holds no offer any more. Out of line, for the place where one is made.
#[inline(never)]
pub(crate) fn offer_nothing(b: &mut impl Backend) {
    b.offer_interrupt(None);
}

/// The guest lowers its priority without an exit, unless something waits for just that. CR8 is
/// watched as well while a virtual interrupt is pending, which was chosen for the priority of
/// now.
pub(crate) fn update_cr8_intercept(b: &mut impl Backend, lapic: &Lapic, chosen: Chosen) {
    let held_back = lapic.highest_requested().filter(|v| v.0 >> 4 <= lapic.tpr() >> 4);
    // In all other cases CR8 is the guest's own.
    b.watch_priority(chosen, held_back);
}

impl<B: Backend> Vcpu<B> {
    /// Raises an exception that user space gives.
    pub(crate) fn raise_given(&mut self, exception: Exception) {
        self.raise(exception);
        self.rare.given.exception = true;
    }

    /// Raises an exception at the current instruction.
    pub(crate) fn raise(&mut self, exception: Exception) {
        self.pending.raise();
        // Whatever it is combined with: what comes of it is the guest's.
        self.rare.given.exception = false;
        // What is delivered again is the older of the two: the new one has come in its delivery.
        let first = match (self.events.again, self.events.exception) {
            (Some(Event::Exception(e)), _) | (_, Some(e)) => Some(e.vector.0),
            _ => None,
        };
        let combined = first.map_or(Combined::Second, |f| combine(f, exception.vector.0));
        match combined {
            Combined::Second => {
                // One entry delivers one event. As on stock KVM the first is dropped: a fault comes again with its
                // instruction.
                if first.is_some() {
                    self.events.again = None;
                }
                self.events.exception = Some(exception);
            }
            Combined::Double => {
                // #DF stands for both. Delivered again, the older one would come behind it a second
                // time.
                self.events.again = None;
                self.events.exception = Some(Exception::df());
            }
            Combined::Triple => {
                // The guest shuts down, or its hypervisor hears of it: nothing of both is to be
                // delivered any more.
                self.events.again = None;
                self.events.exception = None;
                self.events.outer.set(Outer::TRIPLE_FAULT, true);
            }
        }
    }

    /// Where L1 has a say in it: one that ends L2's run is taken whatever L2 masks.
    #[cold]
    #[inline(never)]
    fn interrupts_open_gated(&self) -> bool {
        match gate_of(&self.b, Waiting::Interrupt(None)) {
            Gate::Deliver => !self.b.interrupt_shadow() && !self.b.injecting(),
            // KVM_RUN ends for it, and nobody tells of what is prepared: that goes in first.
            Gate::ExitToL1 | Gate::AfterEntry => !self.b.injecting(),
            Gate::Hold | Gate::Window => false,
        }
    }

    /// Whether a halted vCPU has a reason to go on.
    pub(crate) fn ends_halt(&self) -> bool {
        // With our local APIC the VMM's vector counts as a PIC's, which LINT0 may mask: that is
        // asked below.
        (self.events.external.is_some() && !self.shared.in_kernel_apic)
            || self.events.again.is_some()
            || self.events.exception.is_some()
            || if self.pending.gated {
                self.ends_halt_gated()
            } else {
                // One that waits behind the handler of another cannot end a HLT of that handler.
                (self.shared.nmis() != 0 && !self.b.nmi_masked())
                    || self.events.outer.has(Outer::SMI)
                    || self.b.rflags().contains(Rflags::IF) && self.interrupt_waits()
            }
    }

    /// Where L1 has a say in it.
    #[cold]
    #[inline(never)]
    fn ends_halt_gated(&self) -> bool {
        self.init_ends_l2()
            || self.nmi_ends_l2()
            || self.shared.nmis() != 0
                && !self.b.nmi_masked()
                && gate_of(&self.b, Waiting::Nmi) == Gate::Deliver
            || self.events.outer.has(Outer::SMI) && gate_of(&self.b, Waiting::Smi) != Gate::Hold
            || interrupt_goes_somewhere(&self.b) && self.interrupt_waits()
            || self.l2_stays_awake()
    }

    /// Whether an interrupt could be injected now by a VMM with its own PIC.
    #[inline(always)]
    pub fn ready_for_injection(&self) -> bool {
        let gated = self.pending.gated;
        let open = if gated { self.interrupts_open_gated() } else { interrupts_open(&self.b) };
        open && self.events.has_room_for_external(&self.shared)
    }

    /// Brings the task priority from the hardware, which the guest writes without an exit, to the
    /// local APIC.
    #[inline]
    pub(crate) fn sync_priority(&mut self) {
        let cr8 = self.b.cr8();
        // Nothing is told where nothing changed: the APIC's priority is a shared line.
        if cr8 != self.pending.cr8_seen && !self.has_own_priority() {
            self.pending.cr8_seen = cr8;
            self.shared.lapic.set_cr8(cr8);
        }
    }

    /// Brings the local APIC's task priority, which has changed, to the hardware.
    #[inline]
    pub(crate) fn publish_priority(&mut self) {
        let cr8 = self.shared.lapic.cr8();
        self.pending.cr8_seen = cr8;
        if self.has_own_priority()
            && let Some(nested) = self.b.nested_mut()
        {
            // The block that runs holds L2's own CR8.
            return nested.set_l1_priority(cr8);
        }
        self.b.set_cr8(cr8);
    }

    /// Whether the task priority in the hardware is a guest's guest's, of which the local APIC knows nothing.
    #[inline]
    pub(crate) fn has_own_priority(&self) -> bool {
        self.pending.after_exit.is_nested()
            && self.b.nested().is_some_and(|nested| nested.has_own_priority())
    }

    /// The task priority that user space sees: that of L1, whoever runs.
    #[inline]
    pub(crate) fn priority_shown(&self) -> u8 {
        if self.has_own_priority() { self.shared.lapic.cr8() } else { self.b.cr8() }
    }

    /// Sets the task priority of L1, whoever runs.
    #[inline(always)]
    pub(crate) fn set_priority_shown(&mut self, cr8: u8) {
        if self.has_own_priority() {
            return self.set_priority_of_l1(cr8);
        }
        self.b.set_cr8(cr8);
        self.sync_priority();
    }

    #[cold]
    #[inline(never)]
    fn set_priority_of_l1(&mut self, cr8: u8) {
        self.shared.lapic.set_cr8(cr8);
        self.publish_priority();
    }

    /// Whether the 8259A, ours or the VMM's, has an interrupt for this vCPU.
    pub(crate) fn pic_pending(&self) -> bool {
        self.shared.in_kernel_apic
            && (self.vm.irq().extint_pending() || self.events.external.is_some())
            && self.shared.lapic.accepts_pic()
    }

    /// Puts what is deliverable into the entry, highest priority first, and opens windows for what
    /// has to wait. False: a function of the kernel has to be called, and may not be.
    pub(crate) fn inject_pending(&mut self, s: Section<'_>, kernel: KernelCalls) -> bool {
        self.pending.take();
        // What is chosen below is chosen by the priority that the guest has now, perhaps set without an exit.
        self.sync_priority();
        if self.pending.gated {
            return self.inject_gated(s, kernel);
        }
        // Before the debugger is asked: the guest has begun to take these, or stands at the instruction that made them.
        self.inject_own(kernel);
        if self.rare.debug.blocks_events() {
            self.hold_back();
            return true;
        }
        if self.shared.nmis() != 0 && !self.inject_nmi(kernel) {
            return false;
        }
        // Also behind an NMI that goes in now: an offer may wait beside an injected event.
        self.inject_interrupt(kernel)
    }

    /// An exception that user space has given waits behind an event that goes in: has the vCPU leave the guest as soon as
    /// that is delivered. Inside the loop, where the kernel may not be called, it is looked for at the next exit.
    #[inline]
    fn hurry_exception(&mut self, kernel: KernelCalls) {
        if self.events.exception.is_some() {
            self.pending.raise();
            if kernel.are_allowed() {
                host::smp::kick(host::smp::cpu_id());
            }
        }
    }

    /// Injects what belongs to the current instruction, before anything else that waits.
    #[inline(always)]
    pub(crate) fn inject_own(&mut self, kernel: KernelCalls) {
        if self.b.injecting() {
            // Prepared already, for an entry that did not happen.
            self.events.hurry_smi();
            self.hurry_exception(kernel);
        } else if let Some(event) = self.events.again.take() {
            // It masks: one more is latched behind it, and no third.
            if event == Event::Nmi {
                self.shared.limit_nmis();
            }
            self.b.inject(event);
            self.events.hurry_smi();
            self.hurry_exception(kernel);
        } else if let Some(exception) = self.events.exception.take() {
            let exception = self.rare.debug.deliver(&mut self.b, exception);
            inject_exception(&mut self.b, exception);
            self.events.hurry_smi();
        }
    }

    /// The VMM keeps interrupts from the guest: what was offered is withdrawn, and waits.
    #[cold]
    #[inline(never)]
    pub(crate) fn hold_back(&mut self) {
        // An NMI or SMI that waits for the next exit is looked for then.
        let raised = self.pending.is_raised();
        if self.b.served_apic().is_some() {
            // The CPU would deliver by itself what lies in the page that it serves.
            self.gather_interrupts();
            stop_serving_apic(&mut self.b);
        }
        if self.shared.in_kernel_apic {
            self.pending.put_back_offer(&self.shared);
        }
        self.pending.after_exit.set_offered(None);
        offer_nothing(&mut self.b);
        self.watch_priority_held_back();
        self.pending.take();
        self.pending.raise_if(raised);
    }

    pub(crate) fn inject_nmi(&mut self, kernel: KernelCalls) -> bool {
        // As a CPU does: while one is handled one more is latched, and no third.
        if self.b.nmi_masked() {
            self.shared.limit_nmis();
        }
        // The NMI is taken last of all, so that none is taken that cannot go in: an entry has room
        // for one event.
        if !self.b.injecting() && self.b.nmi_allowed() && self.shared.take_nmi() {
            self.b.inject(Event::Nmi);
            self.stats.count(VcpuCount::NmiInjections);
        }
        // None waits behind it: a window would cost an exit for nothing.
        if self.shared.nmis() == 0 {
            return true;
        }
        match self.b.set_nmi_window() {
            NmiWindow::Exit => {}
            NmiWindow::Step => self.pending.after_exit.set_stepping(),
            NmiWindow::Kick => {
                // Held until the guest runs, whose run it ends.
                self.pending.raise();
                if kernel.are_allowed() {
                    host::smp::kick(host::smp::cpu_id());
                }
                return kernel.are_allowed();
            }
        }
        true
    }

    /// Offers the highest interrupt to the hardware, which delivers it as soon as the guest can take
    /// it: no exit to wait for that moment. It is out of the IRR while it is offered, so that the
    /// next one of the same vector is not lost, and in service once it was taken.
    #[inline(always)]
    pub(crate) fn inject_interrupt(&mut self, kernel: KernelCalls) -> bool {
        // No priority is compared. The VMM's APIC did that before it gave the vector.
        if !self.shared.in_kernel_apic {
            if self.pending.window_wanted {
                return self.inject_beside_window(kernel);
            }
            let external = self.events.external;
            self.pending.after_exit.set_offered(external);
            self.b.offer_interrupt(external);
            return true;
        }
        if apic_is_served(&self.b) || self.serve_apic_if_possible() {
            return self.inject_served(kernel);
        }
        // The choice is made anew: a higher one may have been requested.
        self.pending.put_back_offer(&self.shared);
        if self.pic_pending() {
            // The vector is back in the IRR. Left with the hardware as well it would be delivered twice.
            offer_nothing(&mut self.b);
            if kernel.are_allowed() {
                self.inject_from_pic();
            }
            return kernel.are_allowed();
        }
        if self.pending.awaits_window(&self.shared) {
            // The VMM's PIC goes before the local APIC.
            offer_nothing(&mut self.b);
            self.b.set_interrupt_window(true);
            update_cr8_intercept(&mut self.b, &self.shared.lapic, Chosen::None);
            return true;
        }
        // Above the task priority of now, at which the hardware does not look for an offer.
        let pending = self.shared.lapic.highest_pending();
        // Later requests of the same vector are a second interrupt, as they would be once it is in
        // service.
        if let Some(vector) = pending {
            self.shared.lapic.clear_irr(vector);
        }
        self.pending.after_exit.set_offered(pending);
        self.b.offer_interrupt(pending);
        update_cr8_intercept(&mut self.b, &self.shared.lapic, Chosen::one_if(pending.is_some()));
        true
    }

    /// The VMM has a next interrupt to give when the guest can take it. An offer takes the window's place and is taken without an exit:
    /// that one would wait for whatever exit comes. So what the VMM has given goes in as soon as it can, with the window open behind it.
    fn inject_beside_window(&mut self, kernel: KernelCalls) -> bool {
        self.pending.after_exit.set_offered(None);
        offer_nothing(&mut self.b);
        if interrupts_open(&self.b)
            && let Some(vector) = self.events.external
        {
            if !kernel.are_allowed() {
                return false;
            }
            self.events.external = None;
            self.inject_told(vector);
        }
        self.b.set_interrupt_window(true);
        true
    }

    /// Injects an interrupt of a PIC's, and says so.
    fn inject_told(&mut self, vector: Vector) {
        self.b.inject(Event::Interrupt(vector));
        if host::trace::observed().inj_virq() {
            host::trace::inj_virq(vector.0);
        }
        self.stats.count(VcpuCount::IrqInjections);
    }

    /// Withdraws an offered interrupt, so that the local APIC shows its whole state: before its
    /// registers are looked at, and before user space may.
    #[inline]
    pub(crate) fn withdraw_offer(&mut self) {
        if self.pending.after_exit.offered().is_some() && self.shared.in_kernel_apic {
            self.pending.put_back_offer(&self.shared);
            offer_nothing(&mut self.b);
            self.pending.raise();
        }
    }

    /// Whether an interrupt waits that the task priority lets through.
    pub(crate) fn interrupt_waits(&self) -> bool {
        if apic_is_served(&self.b) {
            return served_interrupt_waits(&self.b, &self.shared.lapic) || self.pic_pending();
        }
        self.pending.after_exit.offered().is_some()
            || self.shared.lapic.highest_pending().is_some()
            || self.pic_pending()
    }

    /// The 8259A gives its vector only when it is acknowledged, so the guest must be able to take
    /// it at this entry.
    pub(crate) fn inject_from_pic(&mut self) {
        if interrupts_open(&self.b)
            && let Some(vector) = self.take_from_pic()
        {
            self.inject_told(vector);
        }
        // The local APIC's interrupt needs the window as well: no offer is out, because the PIC
        // went first.
        let waiting = self.pic_pending()
            || self.pending.window_wanted
            || self.shared.lapic.highest_pending().is_some();
        self.b.set_interrupt_window(waiting);
        update_cr8_intercept(&mut self.b, &self.shared.lapic, Chosen::one_if(waiting));
    }

    /// The vector of the PIC, ours or the VMM's, which has one.
    pub(crate) fn take_from_pic(&mut self) -> Option<Vector> {
        self.events.external.take().or_else(|| self.acknowledge_pic())
    }

    /// The acknowledge cycle. An end that comes with it (automatic EOI) is told as soon as the interrupt is
    /// delivered.
    pub(crate) fn acknowledge_pic(&mut self) -> Option<Vector> {
        let (vector, owing) = self.vm.irq().extint_ack()?;
        self.events.note_owing(&mut self.pending, owing);
        // Who waits for that end is told outside. The IPI ends the run that is about to begin.
        if owing.any() {
            host::smp::kick(host::smp::cpu_id());
        }
        Some(vector)
    }

    /// After an exit with an interrupt offered, or with a step of ours: whether the guest has taken the
    /// one, and the end of the other.
    #[inline]
    pub(crate) fn note_taken(&mut self) {
        // First: TF and RF in RFLAGS are the step's until then.
        if self.pending.after_exit.take_stepping() {
            self.b.end_step();
            self.pending.raise();
        }
        if !self.b.offer_taken() {
            return;
        }
        let Some(vector) = self.pending.after_exit.take_offered() else { return };
        self.stats.count(VcpuCount::IrqInjections);
        if self.shared.in_kernel_apic {
            self.shared.lapic.set_isr(vector);
            // The next one has not been offered, and its arrival told of itself long ago.
            self.pending.raise_if(self.shared.lapic.maybe_pending());
        } else {
            self.events.external = None;
        }
    }

    /// After an exit that may have interrupted a delivery: keeps the event for the next entry. Whoever
    /// answers the exit inside the loop goes on as this says: see [`Stalls`].
    #[inline]
    #[must_use = "the loop is left when it says so"]
    pub(crate) fn keep_interrupted_delivery(&mut self) -> Next {
        let delivering = self.b.was_delivering();
        if delivering {
            self.keep_delivery();
        }
        self.rare.stalls.count(Turn::delivering_if(delivering))
    }

    #[inline(never)]
    fn keep_delivery(&mut self) {
        if let Some(event) = self.b.interrupted_delivery() {
            // INT n, INT3 and INTO: RIP is still at the instruction, which is executed again.
            let by_instruction = match event {
                Event::Software(_) => true,
                Event::Exception(e) => matches!(e.vector.0, 3 | 4),
                _ => false,
            };
            // An event that L1 injects looks the same, but no instruction at RIP stands for it.
            let is_executed_again = by_instruction && !self.repeats_injection();
            // Once: the exit may be looked at again outside.
            self.b.forget_interrupted_delivery();
            // An NMI that has waited behind it goes before the interrupt that is offered.
            self.pending.raise();
            if is_executed_again {
                return;
            }
            self.events.again = Some(event);
            if let Event::Interrupt(vector) = event
                && self.pending.after_exit.offered() == Some(vector)
            {
                // The delivery of the offered one was interrupted, and V_IRQ may still be set: it
                // has left the offer for the event.
                self.pending.after_exit.set_offered(None);
                offer_nothing(&mut self.b);
                if self.shared.in_kernel_apic {
                    self.shared.lapic.set_isr(vector);
                } else {
                    self.events.external = None;
                }
            }
            if event == Event::Nmi {
                self.b.nmi_not_delivered();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_is_left_after_so_many_turns_that_may_have_got_nowhere() {
        for (turn, most) in [(Turn::Delivering, 16), (Turn::Other, 1024)] {
            let mut stalls = Stalls::default();
            for _ in 0..2 {
                let turns = (1..).find(|_| stalls.count(turn) == Next::Done);
                assert_eq!(turns, Some(most));
                assert_eq!(stalls.count(Turn::Other), Next::Done);
                stalls.forget();
            }
        }
    }

    #[test]
    fn faults_combine_as_the_manual_says() {
        const PF: u8 = 14;
        const GP: u8 = 13;
        assert_eq!(combine(GP, GP), Combined::Double);
        assert_eq!(combine(PF, PF), Combined::Double);
        assert_eq!(combine(PF, GP), Combined::Double);
        assert_eq!(combine(GP, PF), Combined::Second);
        assert_eq!(combine(6, GP), Combined::Second);
        assert_eq!(combine(8, GP), Combined::Triple);
        assert_eq!(combine(8, PF), Combined::Triple);
    }
}
