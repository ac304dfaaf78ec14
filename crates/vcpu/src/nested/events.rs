//! Where an event goes while L2 runs, or while L1 holds events back.
//!
//! An event that L1 intercepts is no event of L2's: it ends L2's run, and L1 takes it by its own rules later. What
//! L2 is to take anyway, because its delivery was interrupted or because L1 injected it, goes first.

use backend::{
    Asleep, Backend, Chosen, Event, Executed, Gate, MonitorTrap, Nested, ServedApic, Sleep, Waiting,
};
use irqchip::lapic::LapicEffect;
use mmu::Section;
use stats::VcpuCount;
use vm::vcpu_shared::{MpState, VcpuShared};
use x86::{Dr6, Exception, Vector, exception::vector};

use super::gate::{gate_of, passes};
use super::memory::{Mapped, Whole};
use super::transition::{owes_first, owes_trap};
use crate::{
    Vcpu,
    run::events::{Events, KernelCalls, Outer, interrupts_open, update_cr8_intercept},
    run::pending::Pending,
};

/// What [`Vcpu::end_l2_for_event`] comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// L2's run goes on, or L1 runs anyway.
    No,
    /// L1 runs now.
    Yes,
    /// L2's run goes on: it was the notification of posted interrupts. Others may wait behind it.
    Posted,
    /// It is to end, once it was entered.
    AfterEntry,
    /// It is to end, once L1's memory can be had.
    Outside,
}

/// An interrupt that ends L2's run, taken from where it waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Acknowledged {
    vector: Option<Vector>,
    /// It was the local APIC's, where it is in service from then on.
    of_apic: bool,
}

impl Acknowledged {
    /// L2's run has ended for an interrupt: it is L1's.
    fn acknowledge(self, shared: &VcpuShared, events: &mut Events) {
        match self.vector {
            Some(vector) if self.of_apic => shared.lapic.set_isr(vector),
            // What a VMM with controllers of its own gave has waited there until now: it must not come once more. What
            // our PIC gave was taken from there.
            Some(_) => events.external = None,
            None => {}
        }
    }

    /// L2 goes on: nothing was told to anybody, and the interrupt waits again as before.
    fn give_back(self, shared: &VcpuShared, events: &mut Events) {
        let Some(vector) = self.vector else { return };
        if self.of_apic {
            shared.lapic.set_irr(vector);
        } else {
            // The PIC gives its vector once: it waits where the next delivery looks first.
            events.external = Some(vector);
        }
    }
}

impl Pending {
    /// Whether a virtual interrupt of L1's waits for L2. What is noted of it may be of a run of L2's that is over.
    fn is_offered_by_l1(&mut self, b: &impl Backend) -> bool {
        self.offered_by_l1 &= b.nested().is_some_and(Nested::offers_interrupt);
        self.offered_by_l1
    }
}

impl Events {
    /// Whether L2 takes an interrupt at the next entry: nothing goes before it.
    fn takes_virtual(&self, b: &impl Backend) -> bool {
        interrupts_open(b) && self.again.is_none() && self.exception.is_none()
    }
}

/// Says to the instruction set what L2 does: whether the vCPU, in this state, sleeps for it.
pub(crate) fn tell_activity(b: &mut impl Backend, state: MpState) {
    let sleeps = match state {
        MpState::Halted => Some(Sleep::Halt),
        MpState::InitReceived => Some(Sleep::WaitForSipi),
        _ => None,
    };
    if let Some(asleep) = b.nested_mut().and_then(Nested::asleep_mut) {
        asleep.set_activity(sleeps);
    }
}

impl<B: Backend> Vcpu<B> {
    /// [`inject_pending`](Self::inject_pending) for a guest whose events are asked where they go.
    #[cold]
    #[inline(never)]
    pub(crate) fn inject_gated(&mut self, s: Section<'_>, kernel: KernelCalls) -> bool {
        // The way of nearly each entry and exit of L2: eight comparisons in place of all that follows.
        if self.pending.after_exit.is_nested() && self.is_quiet() && !self.pending.offered_by_l1 {
            self.inject_own(kernel);
            // Whatever a block has of an offer or a watch is of its last run, and nothing waits for
            // either.
            self.b.offer_interrupt(None);
            self.b.watch_priority(Chosen::None, None);
            return true;
        }
        match self.end_l2_for_event(Some(s)) {
            // More notifications than are taken at once.
            Ended::Posted if self.interrupt_waits_for_l1() => {
                if !kernel.are_allowed() {
                    return false;
                }
                host::smp::kick(host::smp::cpu_id());
            }
            Ended::No | Ended::Yes | Ended::Posted => {}
            // L2 has to be entered first: an entry and the event that it injects are one step.
            Ended::AfterEntry => {
                self.inject_own(kernel);
                // What L1 was offered is L1's: the entry would inject it into L2.
                self.b.offer_interrupt(None);
                // The kick ends L2's run at its first instruction.
                self.pending.raise();
                if kernel.are_allowed() {
                    host::smp::kick(host::smp::cpu_id());
                }
                return kernel.are_allowed();
            }
            Ended::Outside => {
                self.events.outer.set(Outer::NESTED, true);
                self.pending.raise();
                return false;
            }
        }
        // With a PIC of the VMM's KVM_RUN has to return: only the VMM has the vector.
        if self.pending.awaits_window(&self.shared) && self.ready_for_injection() {
            // KVM_RUN returns for it.
            self.pending.raise();
            return false;
        }
        self.inject_own(kernel);
        if self.rare.debug.blocks_events() {
            self.hold_back();
            return true;
        }
        // One that L1 wants to hear of ends L2's run, and holds nothing else back.
        if self.shared.nmis() != 0 && passes(&self.b, Waiting::Nmi) && !self.inject_nmi(kernel) {
            return false;
        }
        // In place of the gate below: with virtual interrupts on, every interrupt of L1's has ended L2's run above.
        if self.pending.is_offered_by_l1(&self.b) {
            return self.inject_virtual(s);
        }
        // Behind NMIs, which go before interrupts and may be L2's while interrupts are held.
        let gate = gate_of(&self.b, Waiting::Interrupt(None));
        if gate != Gate::Deliver {
            self.hold_back();
            let waits = self.pending.awaits_window(&self.shared) || self.interrupt_waits_for_l1();
            // Only where something waits: the window costs an exit.
            if gate == Gate::Window && waits {
                self.b.set_interrupt_window(true);
            }
            let is_open = matches!(gate, Gate::ExitToL1 | Gate::AfterEntry);
            if is_open && self.pending.awaits_window(&self.shared) {
                // Behind what goes in now the VMM may give one, which ends L2's run: no window of L2's tells of that.
                self.pending.raise();
                if kernel.are_allowed() {
                    host::smp::kick(host::smp::cpu_id());
                }
                return kernel.are_allowed();
            }
            return true;
        }
        if self.pending.after_exit.is_nested() {
            return self.inject_into_l2(kernel);
        }
        self.inject_interrupt(kernel)
    }

    /// Whether nothing waits but what L2 is to take first: nothing is asked where it goes then. That no interrupt is
    /// offered, and no window open, is all that there is to do.
    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        let interrupts = self.shared.in_kernel_apic
            && (self.shared.lapic.maybe_pending() || self.vm.irq().extint_pending());
        !interrupts
            && self.shared.nmis() == 0
            && self.events.external.is_none()
            && self.events.exception.is_none()
            && !self.events.outer.any()
            && !self.smm.latched_init
            && !self.pending.window_wanted
            && self.pending.after_exit.offered().is_none()
            && self.b.served_apic().is_none_or(ServedApic::is_stopped)
    }

    /// Injects the virtual interrupt that L1 has waiting for L2, or waits for the moment at which L2 takes it. All other
    /// interrupts end L2's run.
    #[cold]
    #[inline(never)]
    fn inject_virtual(&mut self, s: Section<'_>) -> bool {
        if !self.events.takes_virtual(&self.b) {
            self.b.set_interrupt_window(true);
            return true;
        }
        let Self { b, mmu, rare, .. } = self;
        let l1 = Mapped::new(&mmu.memory, &rare.last_pages, s);
        // Its request leaves L1's page with that, so it must be injected now, or nobody has it.
        let taken = b.nested_mut().map_or(Ok(None), |nested| nested.take_interrupt(&l1));
        let Ok(vector) = taken else {
            self.events.outer.set(Outer::NESTED, true);
            self.pending.raise();
            return false;
        };
        // Asked for again only when L1 offers another: what was taken is not in its page any more.
        self.pending.offered_by_l1 = false;
        // L2 has taken what the window was open for.
        self.b.offer_interrupt(None);
        if let Some(vector) = vector {
            self.b.inject(Event::Interrupt(vector));
            self.stats.count(VcpuCount::IrqInjections);
        }
        true
    }

    /// Takes the virtual interrupt of L1's for L2 outside, where all of L1's memory can be had: it is injected with the next entry.
    fn take_virtual_outside(&mut self) {
        if !self.pending.is_offered_by_l1(&self.b)
            || !self.events.takes_virtual(&self.b)
            || self.l2_waits_for_sipi()
        {
            return;
        }
        let Self { b, mmu, .. } = self;
        let memory = &mmu.memory;
        let l1 = Whole::new(memory, None);
        let taken = b.nested_mut().map_or(Ok(None), |nested| nested.take_interrupt(&l1));
        // Also where the page could not be read: it would be asked for before every entry.
        self.pending.offered_by_l1 = false;
        if let Ok(Some(vector)) = taken {
            // By the way of an interrupted delivery, which goes first at the next entry: the
            // request is out of L1's page.
            self.events.again = Some(Event::Interrupt(vector));
        }
    }

    /// Whether an interrupt of the local APIC that was acknowledged is a notification of interrupts that L1 has posted for
    /// L2. It is over then, and its end is told to who waits for that. An error: outside alone.
    #[inline(never)]
    fn posts(&mut self, vector: Vector, s: Option<Section<'_>>) -> Result<bool, ()> {
        let Self { b, mmu, rare, .. } = self;
        let Some(nested) = b.nested_mut() else { return Ok(false) };
        let posted = match s {
            Some(s) => nested.posts(vector, &Mapped::new(&mmu.memory, &rare.last_pages, s)),
            None => nested.posts(vector, &Whole::new(&mmu.memory, None)),
        };
        let posted = posted.map_err(|_| ())?;
        if posted {
            // As a CPU does, which dismisses the notification by an end of its own (SDM vol. 3C §30.6).
            let end = self.shared.lapic.ended(vector);
            if matches!(end, LapicEffect::Eoi { level: true, .. }) {
                if s.is_some() {
                    // It calls the kernel. Done again, nothing is posted any more.
                    return Err(());
                }
                self.effect(end);
            }
            self.pending.offered_by_l1 = self.b.nested().is_some_and(Nested::offers_interrupt);
            self.pending.raise();
        }
        Ok(posted)
    }

    /// Injects the highest interrupt of L1's into L2, as L1 has it: the virtual interrupt that would be offered is
    /// L1's to use.
    fn inject_into_l2(&mut self, kernel: KernelCalls) -> bool {
        if !self.interrupt_waits_for_l1() {
            if self.pending.awaits_window(&self.shared) {
                self.b.set_interrupt_window(true);
            }
            self.watch_priority_held_back();
            return true;
        }
        // V_IRQ, which would wait by itself, belongs to L1: L2 is entered and asked again at once.
        if self.b.injecting()
            || self.b.interrupt_shadow()
            // The PIC's acknowledge cycle is a call of the kernel's, which the loop may not make.
            || (self.pic_pending() && !kernel.are_allowed())
        {
            self.pending.raise();
            if kernel.are_allowed() {
                host::smp::kick(host::smp::cpu_id());
            }
            return kernel.are_allowed();
        }
        // The PIC goes before the local APIC, as in L1 itself.
        let vector = if !self.shared.in_kernel_apic || self.pic_pending() {
            self.events.external.take().or_else(|| self.acknowledge_pic())
        } else {
            let vector = self.shared.lapic.highest_pending();
            if let Some(vector) = vector {
                self.shared.lapic.clear_irr(vector);
                self.shared.lapic.set_isr(vector);
            }
            vector
        };
        if let Some(vector) = vector {
            self.b.inject(Event::Interrupt(vector));
            self.stats.count(VcpuCount::IrqInjections);
        }
        // What waits behind it is not offered: the local APIC's behind the PIC's, or what a VMM has still to give.
        if self.interrupt_waits_for_l1() || self.pending.awaits_window(&self.shared) {
            self.b.set_interrupt_window(true);
        }
        self.watch_priority_held_back();
        true
    }

    /// Where nothing is offered: has a fall of the priority exit that an interrupt of L1's waits for. An L2 without a priority
    /// of its own writes L1's. All else that is held back waits for no priority.
    pub(crate) fn watch_priority_held_back(&mut self) {
        if self.pending.after_exit.is_nested()
            && self.shared.in_kernel_apic
            && !self.has_own_priority()
        {
            return update_cr8_intercept(&mut self.b, &self.shared.lapic, Chosen::None);
        }
        self.b.watch_priority(Chosen::None, None);
    }

    /// Outside the loop: ends L2's run for what could not do so where it arose.
    pub(crate) fn end_l2_outside(&mut self) {
        // An entry that fails for its list has run nothing, so it comes first. What an access was refused for comes
        // before events.
        if !self.fail_at_list() && !self.refuse_noted() {
            let ended = self.end_l2_for_event(None);
            // Else nobody would look for it once L2 was entered.
            if ended == Ended::AfterEntry && owes_trap(&self.b) {
                self.events.outer.set(Outer::NESTED, true);
            }
            if matches!(ended, Ended::No | Ended::Posted) {
                self.take_virtual_outside();
            }
        }
        self.pending.raise();
    }

    /// A triple fault of L2's that was found outside the CPU: L1 hears of it. False: it is the vCPU's.
    pub(crate) fn gives_triple_fault_to_l1(&mut self) -> bool {
        // L2's triple fault is an exit that L1 may ask for, and no shutdown of the machine then.
        self.pending.after_exit.is_nested()
            && gate_of(&self.b, Waiting::TripleFault) == Gate::ExitToL1
            && self.end_l2(Waiting::TripleFault, None) == Ended::Yes
            // It could not be told either: the shutdown is the vCPU's.
            && !self.events.outer.take(Outer::TRIPLE_FAULT)
    }

    /// Whether an interrupt or NMI that L2 was taking is one that L1 has injected: those of L1's machine do not come to L2.
    pub(crate) fn is_l1s_for_l2(&self, event: Event) -> bool {
        let kind = match event {
            Event::Interrupt(_) => Waiting::Interrupt(None),
            Event::Nmi => Waiting::Nmi,
            Event::Software(_) | Event::Exception(_) => return false,
        };
        self.pending.after_exit.is_nested() && !passes(&self.b, kind)
    }

    /// Whether an event goes to the level that runs.
    pub(crate) fn is_delivered(&self, waiting: Waiting) -> bool {
        passes(&self.b, waiting)
    }

    /// Whether the event whose delivery the last exit interrupted is one that L1 injected into L2, which is
    /// injected again, though an instruction makes such events.
    pub(crate) fn repeats_injection(&mut self) -> bool {
        self.pending.after_exit.is_nested()
            && self.b.nested_mut().is_some_and(Nested::repeats_injection)
    }

    /// Whether an INIT waits: L1 holds it back, or it is to end L2's run.
    pub(crate) fn holds_init(&mut self) -> bool {
        let holds = !passes(&self.b, Waiting::Init);
        self.pending.raise_if(holds);
        holds
    }

    /// Whether an INIT that was held back ends L2's run.
    pub(crate) fn init_ends_l2(&self) -> bool {
        self.smm.latched_init && gate_of(&self.b, Waiting::Init) == Gate::ExitToL1
    }

    /// Whether an NMI waits that L1 intercepts: that L2 blocks its own does not hold it back.
    pub(crate) fn nmi_ends_l2(&self) -> bool {
        self.shared.nmis() != 0
            && matches!(gate_of(&self.b, Waiting::Nmi), Gate::ExitToL1 | Gate::AfterEntry)
    }

    /// Whether L2's HLT ends at once, for what L1 has given it.
    pub(crate) fn l2_stays_awake(&self) -> bool {
        self.pending.after_exit.is_nested() && self.b.nested().is_some_and(Nested::keeps_awake)
    }

    /// An INIT that was held back is taken, if nothing holds it any more. True: outside the loop.
    pub(crate) fn release_init(&mut self) -> bool {
        let released = self.smm.latched_init && !self.smm.active && passes(&self.b, Waiting::Init);
        if released {
            // As a new INIT, so that there is one way by which one is taken.
            self.smm.latched_init = false;
            self.shared.set_init(true);
        }
        released
    }

    /// The vCPU's halt ends. If L2 has halted, an event that is L1's ends its run as that of a halted one. False: it was a
    /// notification of posted interrupts, of which L2 takes none now, and L2 sleeps on.
    #[cold]
    #[inline(never)]
    pub(crate) fn wake_l2(&mut self) -> bool {
        // An event that is L1's ends L2's run before the vCPU counts as awake, so that the exit tells of a halted L2.
        self.end_l2_outside();
        let first = self.events.again.is_none() && !self.b.injecting();
        // Behind events: what ends L2's run already needs no timer.
        if first && self.pending.after_exit.is_nested() && self.nested_timer_is_due() {
            tell_activity(&mut self.b, self.shared.mp_state());
            let done = self.across_levels(|v| {
                let asleep = v.b.nested_mut().and_then(Nested::asleep_mut)?;
                Some(asleep.exit_for_timer(&mut v.gprs, &Whole::new(&v.mmu.memory, None)))
            });
            // Nothing retires: the time has come while L2 was halted, behind its HLT.
            if let Some(done) = done {
                let _ = self.executed(done, 0);
            }
        }
        if self.pending.after_exit.is_nested() && !self.ends_halt() && !self.nested_timer_is_due() {
            return false;
        }
        if self.pending.after_exit.is_nested()
            && let Some(asleep) = self.b.nested_mut().and_then(Nested::asleep_mut)
        {
            asleep.set_activity(None);
        }
        true
    }

    /// INIT and startup IPIs while L2 waits for one: the first is lost, L1 hears of the second.
    #[cold]
    pub(crate) fn start_l2(&mut self, page: Option<Vector>) {
        // A CPU blocks INIT in that state: the one that comes with a SIPI changes nothing.
        let Some(page) = page else { return };
        tell_activity(&mut self.b, self.shared.mp_state());
        let done = self.across_levels(|v| {
            let asleep = v.b.nested_mut().and_then(Nested::asleep_mut)?;
            Some(asleep.exit_for_sipi(&mut v.gprs, page, &Whole::new(&v.mmu.memory, None)))
        });
        if let Some(done) = done {
            let _ = self.executed(done, 0);
        }
    }

    /// Whether L2 is what the vCPU is, and waits for a startup IPI.
    pub(crate) fn l2_waits_for_sipi(&self) -> bool {
        self.pending.after_exit.is_nested() && self.shared.mp_state() == MpState::InitReceived
    }

    /// Ends L2's run, if something waits that L1 intercepts. `s`: inside a section, where nothing sleeps.
    fn end_l2_for_event(&mut self, s: Option<Section<'_>>) -> Ended {
        if !self.pending.after_exit.is_nested() {
            return Ended::No;
        }
        // What is in delivery belongs to L2 already, and an entry is the only place where it can
        // go.
        let first = !self.b.injecting() && self.events.again.is_none();
        let exception = self.events.exception.filter(|_| first).map(Waiting::Exception);
        let held = self.smm.latched_init && !self.smm.active;
        let init = held.then_some(Waiting::Init);
        let smi = self.events.outer.has(Outer::SMI).then_some(Waiting::Smi);
        let nmi = (self.shared.nmis() != 0).then_some(Waiting::Nmi);
        let interrupt = self.interrupt_waits_for_l1().then_some(Waiting::Interrupt(None));
        // What waits for a startup IPI executes nothing that an exit could follow.
        let owes = owes_trap(&self.b) && !self.l2_waits_for_sipi();
        // A fault comes first: the CPU itself exits behind its delivery.
        let alone = self.events.exception.is_none_or(|e| e.vector.0 == vector::DB);
        let trap = (owes && first && alone).then_some(Waiting::MonitorTrap);
        let first_of_all = trap.filter(|_| owes_first(&self.b));
        // It belongs to the instruction at RIP: what comes between instructions waits until L2 has it.
        let mut gives_exception = false;
        for waiting in
            [first_of_all, init, trap, exception, smi, nmi, interrupt].into_iter().flatten()
        {
            let Some(nested) = self.b.nested() else { return Ended::No };
            match nested.gate(&waiting) {
                Gate::Deliver if matches!(waiting, Waiting::Exception(_)) => gives_exception = true,
                Gate::Deliver | Gate::Hold | Gate::Window => {}
                // None behind may overtake it: the entry itself comes first.
                Gate::AfterEntry => return Ended::AfterEntry,
                Gate::ExitToL1 if gives_exception => return Ended::AfterEntry,
                // Between two instructions, and L2 is within one: no CPU makes such an exit with an event in
                // IDT-vectoring information, and hypervisors take it for impossible.
                Gate::ExitToL1 if !first && !matches!(waiting, Waiting::Exception(_)) => {
                    return Ended::AfterEntry;
                }
                Gate::ExitToL1 => return self.end_l2_or_post(waiting, s),
            }
        }
        // Behind what L2 takes first.
        if owes && trap.is_none() { Ended::AfterEntry } else { Ended::No }
    }

    /// [`end_l2`](Self::end_l2), until no interrupt of L1's waits behind a notification: the kick of such a one is spent.
    fn end_l2_or_post(&mut self, waiting: Waiting, s: Option<Section<'_>>) -> Ended {
        /// Notifications that may come one behind the other.
        const MOST: u32 = 4;
        // Bounded: another vCPU can post as fast as this one takes, and in the loop the host's
        // interrupts are off.
        for _ in 0..MOST {
            let ended = self.end_l2(waiting, s);
            if ended != Ended::Posted || !self.interrupt_waits_for_l1() {
                return ended;
            }
        }
        // L2 is not kept from what waits for it, nor from running. The next one is looked for behind an instruction of its.
        self.pending.raise();
        Ended::Posted
    }

    fn interrupt_waits_for_l1(&self) -> bool {
        if !self.shared.in_kernel_apic {
            return self.events.external.is_some();
        }
        self.interrupt_waits()
    }

    /// The vector with which an interrupt ends L2's run, where L1 wants it acknowledged. An error: outside alone.
    fn vector_for_l1(&mut self, s: Option<Section<'_>>) -> Result<Acknowledged, ()> {
        let asks = |n: &B::Nested| n.acknowledges(&Waiting::Interrupt(None));
        if !self.b.nested().is_some_and(asks) {
            // Without acknowledge-on-exit L1 takes it after the exit, from where it waits.
            return Ok(Acknowledged::default());
        }
        if !self.shared.in_kernel_apic {
            return Ok(Acknowledged { vector: self.events.external, of_apic: false });
        }
        // What the hardware has must be here: the highest one counts.
        self.gather_interrupts();
        if self.pic_pending() {
            // The PIC gives its vector once, and the kernel has to be called for it.
            if s.is_some() {
                return Err(());
            }
            return Ok(Acknowledged { vector: self.take_from_pic(), of_apic: false });
        }
        let vector = self.shared.lapic.highest_pending();
        if let Some(vector) = vector {
            // Out of the IRR at once: a second one of the same vector is a new request.
            self.shared.lapic.clear_irr(vector);
        }
        Ok(Acknowledged { vector, of_apic: true })
    }

    /// A waiting exception with what it carries. KVM_GET_VCPU_EVENTS has moved that to CR2 or DR6 for a VMM that saves no
    /// payloads (KVM API §4.31): L1 would be told of address 0, or of no reason.
    fn with_payload(&self, e: Exception) -> Exception {
        let payload = e.payload.or_else(|| match e.vector.0 {
            vector::PF => Some(self.b.control().cr2),
            vector::DB => {
                let [.., dr6, _] = self.debug_regs();
                Some(Dr6::new(dr6).payload())
            }
            _ => None,
        });
        Exception { payload, ..e }
    }

    fn end_l2(&mut self, mut waiting: Waiting, s: Option<Section<'_>>) -> Ended {
        if s.is_some() && self.rare.debug.is_in_hardware() {
            return Ended::Outside;
        }
        let mut taken = Acknowledged::default();
        if waiting == Waiting::Interrupt(None) {
            let Ok(found) = self.vector_for_l1(s) else { return Ended::Outside };
            if found.of_apic
                && let Some(vector) = found.vector
            {
                match self.posts(vector, s) {
                    Ok(true) => return Ended::Posted,
                    Ok(false) => {}
                    Err(()) => {
                        found.give_back(&self.shared, &mut self.events);
                        return Ended::Outside;
                    }
                }
            }
            taken = found;
            waiting = Waiting::Interrupt(taken.vector);
        }
        if let Waiting::Exception(e) = waiting {
            waiting = Waiting::Exception(self.with_payload(e));
        }
        if waiting == Waiting::MonitorTrap
            && let Some(e) = self.events.exception.take()
        {
            let e = self.with_payload(e);
            if let Some(trap) = self.b.nested_mut().and_then(Nested::monitor_trap_mut) {
                trap.keep_debug_trap(e.payload.unwrap_or(0));
            }
        }
        // Before the exit, which tells L1 in what state L2 was when the event came.
        tell_activity(&mut self.b, self.shared.mp_state());
        // What is prepared for L2 is told to L1 as not delivered, or L1 could not inject it again.
        let prepared = self.b.cancel_injection();
        let undelivered = prepared.or(self.events.again);
        let done = self.across_levels(|v| {
            let nested = v.b.nested_mut()?;
            let (gprs, mmu, rare) = (&mut v.gprs, &v.mmu, &v.rare);
            Some(match s {
                Some(s) => nested.exit_to_l1(
                    gprs,
                    &waiting,
                    undelivered,
                    &Mapped::new(&mmu.memory, &rare.last_pages, s),
                ),
                None => {
                    let l1 = Whole::new(&mmu.memory, None);
                    nested.exit_to_l1(gprs, &waiting, undelivered, &l1)
                }
            })
        });
        let Some(done) = done else { return Ended::No };
        if done == Executed::Outside {
            taken.give_back(&self.shared, &mut self.events);
            // The attempt has changed nothing: what was prepared is prepared again.
            if let Some(event) = prepared {
                self.b.inject(event);
            }
            return Ended::Outside;
        }
        // L1 has it in its information on the exit.
        self.events.again = None;
        taken.acknowledge(&self.shared, &mut self.events);
        // Without an acknowledgment the event is still L1's to take, from where it waits.
        if self.b.nested().is_some_and(|n| n.acknowledges(&waiting)) {
            match waiting {
                Waiting::Nmi => {
                    let _ = self.shared.take_nmi();
                }
                Waiting::Init => self.smm.latched_init = false,
                Waiting::Interrupt(_)
                | Waiting::Smi
                | Waiting::Exception(_)
                | Waiting::MonitorTrap
                | Waiting::TripleFault => {}
            }
        }
        // It was the exit.
        if matches!(waiting, Waiting::Exception(_)) {
            self.events.exception = None;
        }
        let _ = self.executed(done, 0);
        Ended::Yes
    }
}
