//! Event injection, virtual interrupts, the interrupt and NMI windows, and NMI masking without virtual NMIs.
//!
//! APM vol. 2 §15.20 (EVENTINJ), §15.21 (virtual interrupts), §15.7.2 (EXITINTINFO).

use backend::{Absent, Chosen, Event, Injection, Level, NmiWindow, Registers};
use cpu::Cpu;
use host::KBox;
use nested_svm::reflect;
use x86::{
    Cr0, Dr6, Dr7, Exception, Rflags, Vector,
    exception::vector,
    vmcb::{Clean, ExitCode, Intercept3, InterceptCr, event, vintr},
};

use crate::{
    l2::{Injected, State, is_by_instruction},
    state::{Step, Svm, Virq},
};

/// EVENTINJ for an event.
pub fn encode(event: Event) -> u64 {
    match event {
        Event::Interrupt(v) => event::VALID | event::INTR | u64::from(v.0),
        // The vector means nothing for an NMI.
        Event::Nmi => event::VALID | event::NMI | 2,
        Event::Software(v) => event::VALID | event::SOFT | u64::from(v.0),
        Event::Exception(e) => {
            let code = match e.error_code {
                Some(code) => event::ERROR_VALID | (u64::from(code) << 32),
                None => 0,
            };
            event::VALID | event::EXCEPTION | u64::from(e.vector.0) | code
        }
    }
}

/// The event in EXITINTINFO or EVENTINJ, if it is valid.
pub fn decode(bits: u64) -> Option<Event> {
    if bits & event::VALID == 0 {
        return None;
    }
    let vector = Vector((bits & event::VECTOR) as u8);
    Some(match bits & event::TYPE {
        event::INTR => Event::Interrupt(vector),
        event::NMI => Event::Nmi,
        event::SOFT => Event::Software(vector),
        // QEMU's emulation reports an interrupted delivery of an interrupt as an exception's.
        _ if vector.0 >= 32 => Event::Interrupt(vector),
        _ => Event::Exception(Exception {
            vector,
            error_code: (bits & event::ERROR_VALID != 0).then_some((bits >> 32) as u32),
            payload: None,
        }),
    })
}

impl<C: Cpu> Svm<C> {
    /// Sets what V_IRQ stands for. It ignores V_TPR: the task priority was looked at, and a write
    /// of CR8 is intercepted while V_IRQ is set.
    #[inline(always)]
    pub(crate) fn set_virq(&mut self, want: Virq) {
        const BITS: u32 = vintr::IRQ | vintr::IGN_TPR | (0xf << vintr::PRIO_SHIFT);
        // The virtual interrupt of L2's block is L1's to use.
        if self.level == Level::L2 {
            return self.set_window_of_l2(want == Virq::Window);
        }
        let set = self.vmcb().control.int_ctl & vintr::IRQ != 0;
        // The hardware clears V_IRQ when the guest takes the interrupt, so what was asked for does not tell alone.
        if self.virq == want && set == (want != Virq::Off) {
            return;
        }
        let window = Intercept3::VINTR.bits();
        let was_window = self.virq == Virq::Window;
        // An offer is taken without an exit: only a window has the intercept.
        if was_window != (want == Virq::Window) {
            self.change_intercepts(|[_, _, _, word, ..]| {
                *word = if was_window { *word & !window } else { *word | window };
            });
        }
        self.virq = want;
        let control = &mut self.vmcb_mut(Clean::INTR).control;
        match want {
            Virq::Off => control.int_ctl &= !BITS,
            // The highest priority: which one goes first was decided already.
            Virq::Window => control.int_ctl |= BITS,
            Virq::Offer(vector) => {
                control.int_ctl |= BITS;
                control.int_vector = vector.0.into();
            }
        }
    }

    fn intercept_iret(&mut self, on: bool) {
        let iret = Intercept3::IRET.bits();
        self.change_intercepts(|[_, _, _, word, ..]| {
            *word = if on { *word | iret } else { *word & !iret };
        });
    }

    /// Takes the flags of a step back. True: there was one, and the guest made none of its own.
    pub(crate) fn disarm_step(&mut self) -> bool {
        let Step::Armed { tf, rf, bs } = self.cold.nmi.step else { return false };
        self.cold.nmi.step = Step::Off;
        // An IRET that has retired has popped the guest's own flags.
        let popped = self.cold.nmi.iret_at.is_some_and(|at| at != self.vmcb().save.rip);
        let save = &mut self.vmcb_mut(Clean::DR).save;
        if !popped {
            let own = |flag: Rflags, had: bool| if had { 0 } else { flag.bits() };
            save.rflags &= !(own(Rflags::TF, tf) | own(Rflags::RF, rf));
        }
        // Of a guest that steps itself BS is its own too, and so is one of before.
        if !tf && !bs {
            save.dr6 &= !Dr6::BS;
        }
        !tf
    }

    /// Whether an NMI that the running guest takes is one that L1 injects into L2. VMRUN masks none with it, and L1 looks for
    /// the IRET by itself. With virtual NMIs in L2's block the CPU masks also that one.
    fn nmi_is_l1s_for_l2(&self) -> bool {
        if self.features.vnmi {
            return self.l2_has_no_nmi_mask();
        }
        self.level == Level::L2
            && self.nested.as_ref().is_some_and(|state| {
                // Of an L1 that intercepts NMIs, whatever a restored state tells of the one on its way.
                state.injected.is_some_and(Injected::is_nmi)
                    || reflect::keeps_nmi_mask(state.v12.control())
            })
    }

    /// Another level is about to run, whose RIP tells nothing of an IRET that has begun: what became of that is settled. Where
    /// it has not retired, it exits once more.
    pub(crate) fn settle_iret(&mut self) {
        if !self.features.vnmi && self.cold.nmi.iret_at.is_some() {
            self.set_nmi_masked(self.nmi_masked());
        }
    }

    fn intercept_cr8_writes(&mut self, on: bool) {
        self.intercept_cr(InterceptCr::WRITE_CR8, on || self.cr8_exits);
    }
}

impl<C: Cpu> Svm<C> {
    /// The guest is to take `event`, which an instruction makes: the CPU pushes what NEXT_RIP says (APM vol. 2 §15.20). RIP is at the
    /// instruction, for the VMM gives what was under way where the guest was saved, or a breakpoint that was its debugger's.
    #[cold]
    #[inline(never)]
    fn return_behind_instruction(&mut self, event: u64) {
        // INT n has two bytes; INT3 and INTO have one.
        let len = if event & event::TYPE == event::SOFT { 2 } else { 1 };
        // The field has where the instruction of an exit ends, or nothing yet.
        let block = self.vmcb_mut(Clean::empty());
        block.control.next_rip = block.save.rip.wrapping_add(len);
    }

    /// L2 is to take `event`. If it is what L1 injected, what repeats it is known by the place of now, and the CPU pushes the
    /// place that L1 means: whether it was so.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_injection(&mut self, event: u64) -> bool {
        let rip = self.vmcb().save.rip;
        let Some(state) = &mut self.nested else { return false };
        let entry_pending = state.entry_pending;
        let Some(of_l1) = &mut state.injected else { return false };
        // With a saved state comes no RIP: the VMM sets it, before the state or behind it.
        if of_l1.rip.is_none() || entry_pending {
            of_l1.rip = Some(rip);
        }
        if !of_l1.is(event) || !is_by_instruction(event) {
            return false;
        }
        // An L1 that is not told of the field has RIP itself behind the instruction, as `merge::enter` has it.
        if !self.cold.offered.nrip_save {
            of_l1.next_rip = rip;
        }
        // Block 02 has that of an exit, or of nothing yet behind a restored state.
        let next_rip = of_l1.next_rip;
        self.vmcb_mut(Clean::empty()).control.next_rip = next_rip;
        true
    }

    /// What a debug exception leaves in DR6 and DR7.
    pub(crate) fn after_debug_exception(&mut self, bits: u64) {
        let save = &mut self.vmcb_mut(Clean::DR).save;
        save.dr6 = Dr6::new(save.dr6).after_db(bits).bits();
        save.dr7 = Dr7::new(save.dr7).without_general_detect().bits();
    }
}

impl<C: Cpu> Injection for Svm<C> {
    type ServedApic = Absent;

    fn inject(&mut self, event: Event) {
        // With the injection, as the CPU does it when it delivers one.
        if event == Event::Nmi {
            self.nmi_delivered();
        }
        if let Event::Exception(e) = event
            && e.vector.0 == vector::PF
            && let Some(address) = e.payload
        {
            self.vmcb_mut(Clean::CR2).save.cr2 = address;
        }
        if let Event::Exception(e) = event
            && e.vector.0 == vector::DB
            && let Some(bits) = e.payload
        {
            self.after_debug_exception(bits);
        }
        let mut bits = encode(event);
        let is_l1s = self.level == Level::L2 && self.note_injection(bits);
        if !is_l1s && is_by_instruction(bits) {
            self.return_behind_instruction(bits);
        }
        // Nothing pushes an error code in real mode.
        if self.vmcb().save.cr0 & Cr0::PE.bits() == 0 {
            bits &= u64::from(u32::MAX) & !event::ERROR_VALID;
        }
        self.vmcb_mut(Clean::empty()).control.event_inj = bits;
    }

    #[inline]
    fn injecting(&self) -> bool {
        self.vmcb().control.event_inj & event::VALID != 0
    }

    fn nmi_delivered(&mut self) {
        if !self.nmi_is_l1s_for_l2() {
            self.set_nmi_masked(true);
        }
    }

    fn nmi_not_delivered(&mut self) {
        if !self.nmi_is_l1s_for_l2() {
            // One that L1 injects into an L2 which shares its mask ends none that L1 has had: L2 has executed nothing since VMRUN.
            let injects = |s: &KBox<State>| s.injected.is_some_and(Injected::is_nmi);
            let is_l1s = self.level == Level::L2 && self.nested.as_ref().is_some_and(injects);
            let masked = is_l1s && self.control_of_l1().int_ctl & vintr::NMI_MASK != 0;
            self.set_nmi_masked(masked);
        }
    }

    fn cancel_injection(&mut self) -> Option<Event> {
        let control = &mut self.vmcb_mut(Clean::empty()).control;
        let event = decode(control.event_inj);
        // Taken out, so that the next entry does not inject it twice.
        control.event_inj = 0;
        event
    }

    #[inline(always)]
    fn offer_interrupt(&mut self, vector: Option<Vector>) {
        self.set_virq(vector.map_or(Virq::Off, Virq::Offer));
    }

    /// Whether the guest took the offered interrupt: the hardware then cleared V_IRQ.
    #[inline]
    fn offer_taken(&mut self) -> bool {
        if self.vmcb().control.int_ctl & vintr::IRQ != 0 || !matches!(self.virq, Virq::Offer(_)) {
            return false;
        }
        self.virq = Virq::Off;
        true
    }

    fn set_interrupt_window(&mut self, on: bool) {
        self.set_virq(if on { Virq::Window } else { Virq::Off });
    }

    fn watch_priority(&mut self, chosen: Chosen, waiting: Option<Vector>) {
        self.intercept_cr8_writes(chosen == Chosen::One || waiting.is_some());
    }

    fn exit_on_cr8_writes(&mut self) {
        self.cr8_exits = true;
        self.intercept_cr8_writes(true);
    }

    fn nmi_allowed(&self) -> bool {
        !self.nmi_masked() && !self.interrupt_shadow()
    }

    /// Asks for an exit when an NMI can be taken. While one is handled the IRET intercept serves;
    /// after the IRET has begun, or in an interrupt shadow, a single step does.
    fn set_nmi_window(&mut self) -> NmiWindow {
        // With virtual NMIs the CPU delivers and masks; the step serves where it cannot tell the end of the mask.
        if self.features.vnmi {
            let rip = self.vmcb().save.rip;
            let begun = self.cold.nmi.iret_at == Some(rip);
            if self.nmi_masked() && !begun {
                // The CPU takes its mask away with the IRET, without a word.
                self.cold.nmi.iret_at = None;
                self.intercept_iret(true);
                return NmiWindow::Exit;
            }
            if !begun {
                self.cold.nmi.iret_at = None;
            }
        } else if self.cold.nmi.masked && self.cold.nmi.iret_at.is_none() {
            // IRET is intercepted since the mask was set.
            return NmiWindow::Exit;
        } else if !self.nmi_masked() {
            // An IRET of before has retired. What the step below finds is not popped by it.
            self.cold.nmi.iret_at = None;
            self.cold.nmi.masked = false;
        }
        // The event would push a TF that is not the guest's.
        if self.vmcb().control.event_inj & event::VALID != 0 {
            return NmiWindow::Kick;
        }
        if !matches!(self.cold.nmi.step, Step::Armed { .. }) {
            let rflags = self.rflags();
            let (tf, rf) = (rflags.contains(Rflags::TF), rflags.contains(Rflags::RF));
            let bs = self.vmcb().save.dr6 & Dr6::BS != 0;
            self.cold.nmi.step = Step::Armed { tf, rf, bs };
            // RF with it: else an instruction breakpoint at RIP would fire in place of the step.
            self.set_rflags(rflags | Rflags::TF | Rflags::RF);
        }
        NmiWindow::Step
    }

    fn nmi_masked(&self) -> bool {
        if self.features.vnmi {
            return self.vmcb().control.int_ctl & vintr::NMI_MASK != 0;
        }
        match self.cold.nmi.iret_at {
            // The IRET has retired once RIP has moved.
            Some(at) => self.cold.nmi.masked && self.vmcb().save.rip == at,
            None => self.cold.nmi.masked,
        }
    }

    fn set_nmi_masked(&mut self, on: bool) {
        if self.features.vnmi {
            let control = &mut self.vmcb_mut(Clean::INTR).control;
            control.int_ctl =
                (control.int_ctl & !vintr::NMI_MASK) | if on { vintr::NMI_MASK } else { 0 };
            return;
        }
        // A new NMI: where the last one's IRET was says nothing of it.
        self.cold.nmi.masked = on;
        self.cold.nmi.iret_at = None;
        self.intercept_iret(on);
    }

    fn nmi_masked_for_l1(&self) -> bool {
        if self.l1_keeps_its_nmi_mask() {
            return self.control_of_l1().int_ctl & vintr::NMI_MASK != 0;
        }
        self.nmi_masked()
    }

    fn set_nmi_masked_for_l1(&mut self, on: bool) {
        // L2's own is in its block, which L1 sees at an exit, or with L1 alone.
        if !self.l1_keeps_its_nmi_mask() {
            return self.set_nmi_masked(on);
        }
        let control = &mut self.block_of_l1().vmcb_mut(Clean::INTR).control;
        control.int_ctl =
            (control.int_ctl & !vintr::NMI_MASK) | if on { vintr::NMI_MASK } else { 0 };
    }

    /// The guest begins an IRET while an NMI is handled: the mask falls after it.
    fn iret_begun(&mut self) {
        self.cold.nmi.iret_at = Some(self.vmcb().save.rip);
        // What has become of it is asked when the level changes.
        self.carries = true;
        // Else the same IRET would exit again, and for ever.
        self.intercept_iret(false);
    }

    /// The exit behind an entry with a single step of ours: the flags are the guest's again.
    fn end_step(&mut self) {
        if self.disarm_step()
            && self.vmcb().control.exit_code == ExitCode::ExcpDb.0
            // A breakpoint or the guest's own step came with ours: that #DB is the guest's.
            && self.vmcb().save.dr6 & Dr6::TRAPS == 0
        {
            self.cold.nmi.step = Step::Trapped;
        }
    }

    fn own_single_step(&mut self) -> bool {
        core::mem::take(&mut self.cold.nmi.step) == Step::Trapped
    }

    /// VMRUN asks for nothing. But the CPU has written DR6 before it has looked at the intercept.
    fn pass_debug(&mut self, _bits: u64, before: u64) {
        self.vmcb_mut(Clean::DR).save.dr6 = before;
    }

    #[inline(always)]
    fn served_apic(&self) -> Option<&Absent> {
        None
    }

    #[inline(always)]
    fn served_apic_mut(&mut self) -> Option<&mut Absent> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_survives_encoding() {
        for event in [
            Event::Interrupt(Vector(0x31)),
            Event::Nmi,
            Event::Software(Vector(0x80)),
            Event::Exception(Exception::ud()),
            Event::Exception(Exception::gp(0x18)),
        ] {
            assert_eq!(decode(encode(event)), Some(event));
        }
        assert_eq!(decode(0x30), None);
        assert_eq!(
            decode(event::VALID | event::EXCEPTION | 0xec),
            Some(Event::Interrupt(Vector(0xec)))
        );
    }
}
