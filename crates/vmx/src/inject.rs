//! Event injection, offered interrupts, the interrupt and NMI windows.
//!
//! VMX has no pending virtual interrupt that the hardware would deliver by itself. An offered one is
//! injected at the first entry at which the guest can take it; until then the interrupt window is
//! open.
//!
//! SDM vol. 3C §25.8.3 (injection), §27.6.1 (interruptibility), §27.2.1.3 and §27.3.1.5 (checks).

use backend::{Chosen, ControlRegisters, Event, Injection, NmiWindow, Registers, ShadowBy};
use cpu::Cpu;
use x86::{
    Cr0, Dr6, Exception, Rflags, Vector,
    exception::vector,
    msr::debugctl,
    vmcs::{ExitReason, ProcControls, event, interruptibility},
};

use crate::{
    fields,
    state::{NmiBehind, Offer, Vmx, attention},
};

/// BS in the pending debug exceptions, at its place in DR6.
const PENDING_STEP: u64 = Dr6::BS;
const SHADOW: u32 = interruptibility::STI | interruptibility::MOV_SS;

/// Whether a vector pushes an error code in protected mode: the entry refuses an injection that says
/// otherwise.
fn pushes_error_code(vector: u8) -> bool {
    // #DF, #TS to #PF, #AC. #CP is not among them: no guest has shadow stacks.
    matches!(vector, 8 | 10..=14 | 17)
}

/// The error code with which an exception is delivered: an entry takes 16 bits, and an exit tells no more.
pub(crate) fn error_code(e: &Exception) -> u32 {
    // Bits 31:16 of the field have to be zero; a VMM gives any 32 (KVM_SET_VCPU_EVENTS).
    e.error_code.unwrap_or(0) & 0xffff
}

/// The entry-interruption information for an event, for a guest with this CR0: outside protected mode nothing pushes an
/// error code.
pub fn encode(event: Event, cr0: Cr0) -> u32 {
    match event {
        Event::Interrupt(v) => event::VALID | event::INTR | u32::from(v.0),
        // An NMI's vector is checked by the entry: no other is taken.
        Event::Nmi => event::VALID | event::NMI | 2,
        Event::Software(v) => event::VALID | event::SOFT | u32::from(v.0),
        Event::Exception(e) => {
            let vector = e.vector.0;
            let kind =
                // INT3 and INTO are instructions: their handler returns behind them (SDM vol. 3C §25.8.3).
                if matches!(vector, 3 | 4) { event::SOFT_EXCEPTION } else { event::EXCEPTION };
            // An entry with an error code in real mode is refused (SDM vol. 3C §27.2.1.3).
            let pushes = cr0.contains(Cr0::PE) && pushes_error_code(vector);
            let code = if pushes { event::ERROR_VALID } else { 0 };
            event::VALID | kind | code | u32::from(vector)
        }
    }
}

/// The event in IDT-vectoring or entry-interruption information, if it is valid.
pub fn decode(info: u32, error_code: u32) -> Option<Event> {
    if info & event::VALID == 0 {
        return None;
    }
    let vector = Vector((info & event::VECTOR) as u8);
    Some(match info & event::TYPE {
        event::INTR => Event::Interrupt(vector),
        event::NMI => Event::Nmi,
        event::SOFT | event::PRIVILEGED_SOFT_EXCEPTION => Event::Software(vector),
        // A type that no exit tells is taken for an exception: the entry that injects it checks it.
        _ => Event::Exception(Exception {
            vector,
            error_code: (info & event::ERROR_VALID != 0).then_some(error_code),
            // DR6 and CR2 were changed when the event was first raised.
            payload: None,
        }),
    })
}

/// Whether a word names this event, but for what it carries.
pub(crate) fn is_of(info: u32, event: Event) -> bool {
    match (decode(info, 0), event) {
        (Some(Event::Exception(named)), Event::Exception(e)) => named.vector == e.vector,
        (named, event) => named == Some(event),
    }
}

/// Whether the event comes from an instruction, whose length tells where its handler returns to.
pub(crate) fn has_length(info: u32) -> bool {
    matches!(
        info & event::TYPE,
        event::SOFT | event::PRIVILEGED_SOFT_EXCEPTION | event::SOFT_EXCEPTION
    )
}

impl<C: Cpu> Vmx<C> {
    /// What an exception leaves in CR2 or in the debug registers.
    fn deliver_payload(&mut self, raised: u8, bits: u64) {
        // CR2 before the entry: the handler of #PF reads it first.
        if raised == vector::PF {
            self.replace_cr2(bits);
        } else if raised == vector::DB {
            let before = self.dr6();
            self.set_dr6(before.after_db(bits));
            // GD is cleared by the delivery of #DB, lest its handler fault at its first access (SDM vol. 3B §18.2.4).
            self.set_dr7(self.dr7().without_general_detect());
        }
    }

    /// The word with which L1 has injected this event, which is to be injected again, and its length: its neutral form does not have all types,
    /// and no length.
    #[cold]
    #[inline(never)]
    fn take_repeated(&mut self, event: Event) -> Option<(u32, u32)> {
        let of_l1 = &mut self.cold.of_l1;
        let (word, length) =
            (core::mem::take(&mut of_l1.repeated), core::mem::take(&mut of_l1.length));
        is_of(word, event).then_some((word, length))
    }

    /// The last exit was an INT1, behind which its handler returns.
    fn exited_at_int1(&self) -> bool {
        // By the exit that is answered now: INT1 has no vector of its own, it is #DB.
        self.get(fields::EXIT_REASON) == u32::from(ExitReason::ExceptionOrNmi.0)
            && self.get(fields::EXIT_INTERRUPTION) & (event::VALID | event::TYPE)
                == event::VALID | event::PRIVILEGED_SOFT_EXCEPTION
    }

    /// The length of the instruction at RIP that makes the event `info`, which is injected.
    fn length_at(&self, info: u32) -> u32 {
        const WHAT: u32 = event::VALID | event::TYPE | event::VECTOR;
        // It is given back by a debugger that the exit was for.
        let is_exits = self.get(fields::EXIT_REASON) == u32::from(ExitReason::ExceptionOrNmi.0)
            && (self.get(fields::EXIT_INTERRUPTION) ^ info) & WHAT == 0;
        if is_exits {
            return self.event_length();
        }
        // The VMM's: the last exit was another's. INT n has two bytes, and INT3, INTO and INT1 have one.
        if info & event::TYPE == event::SOFT { 2 } else { 1 }
    }

    /// The length of the instruction that made an event: that of the last exit where it is one,
    /// else a byte, as INT3 and INTO have.
    pub(crate) fn event_length(&self) -> u32 {
        // An entry is refused with any other length (SDM vol. 3C §27.2.1.3).
        match self.get(fields::INSTRUCTION_LENGTH) {
            length @ 1..=15 => length,
            _ => 1,
        }
    }

    /// Whether STI holds interrupts off, which are enabled behind it.
    pub(crate) fn is_behind_sti(&self) -> bool {
        // What is known to be over is not read.
        !self.shadow_over.get()
            && self.get(fields::GUEST_INTERRUPTIBILITY) & interruptibility::STI != 0
    }

    /// Whether STI or MOV SS holds interrupts off.
    pub(crate) fn is_shadowed(&self) -> bool {
        !self.shadow_over.get() && self.get(fields::GUEST_INTERRUPTIBILITY) & SHADOW != 0
    }

    /// Brings the VMCS up to what is known: that an instruction has retired since STI or MOV SS.
    pub(crate) fn clear_ended_shadow(&self) {
        // Both shadows at once: one instruction ends either.
        // Once: the field says it from here on.
        if self.shadow_over.replace(false) {
            let state = self.get(fields::GUEST_INTERRUPTIBILITY);
            self.set(fields::GUEST_INTERRUPTIBILITY, state & !SHADOW);
            self.end_step_in(state);
        }
    }

    /// A shadow in `state` is over. A debugger hears of the step that was pending in it by itself: no entry delivers that, be it to
    /// the debugger or, once that has gone, to the guest. A step of the guest's own is injected, and pends no more then.
    fn end_step_in(&self, state: u32) {
        // Without a debugger the pending step is the guest's own, and comes behind the shadow.
        if state & SHADOW != 0 && self.cold.debugger_steps {
            let pending = self.get(fields::GUEST_PENDING_DEBUG) & !PENDING_STEP;
            self.set(fields::GUEST_PENDING_DEBUG, pending);
        }
    }

    /// Whether an NMI is prepared for the next entry, ours or L1's.
    #[inline]
    fn injects_nmi(&self) -> bool {
        self.injecting() && self.get(fields::ENTRY_INTERRUPTION) & event::TYPE == event::NMI
    }

    pub(crate) fn set_shadow(&mut self, on: bool) {
        if on { self.set_shadow_by(ShadowBy::Unknown) } else { self.replace_shadow(0) }
    }

    pub(crate) fn set_shadow_by(&mut self, by: ShadowBy) {
        // By STI unless it is known to be MOV SS: STI's holds off less.
        // Blocking by STI with interrupts off is refused; that of MOV SS is not.
        let given = by != ShadowBy::MovSs;
        let sti = given && self.rflags().contains(Rflags::IF);
        self.replace_shadow(if sti { interruptibility::STI } else { interruptibility::MOV_SS });
        if given && !sti {
            // A VMM may set RFLAGS behind it.
            self.attention |= attention::STI_GIVEN;
        }
    }

    /// What the shadow that there is stands for.
    pub(crate) fn shadow_kind(&self) -> ShadowBy {
        if !self.is_shadowed() {
            ShadowBy::Unknown
        } else if self.is_behind_sti() || self.attention & attention::STI_GIVEN != 0 {
            ShadowBy::Sti
        } else {
            ShadowBy::MovSs
        }
    }

    fn replace_shadow(&mut self, bit: u32) {
        self.shadow_over.set(false);
        self.attention &= !attention::STI_GIVEN;
        // The field before: what was pending in it decides what becomes of a step.
        let before = self.get(fields::GUEST_INTERRUPTIBILITY);
        let state = before & !SHADOW;
        self.set(fields::GUEST_INTERRUPTIBILITY, state | bit);
        if bit == 0 {
            self.end_step_in(before);
        }
        // An entry with a shadow and TF wants BS pending, and without TF not (SDM vol. 3C §27.3.1.5).
        self.match_pending_step();
    }

    /// Makes a single step pending exactly if the guest steps, as an entry with a shadow demands. A debugger's step is
    /// yet to be made: in place of the pending one the shadow ends.
    pub(crate) fn match_pending_step(&mut self) {
        let state = self.get(fields::GUEST_INTERRUPTIBILITY);
        if state & SHADOW == 0 {
            return;
        }
        // The debugger's step is made by TF: a shadow would hold it off by an instruction.
        if self.cold.debugger_steps {
            self.set(fields::GUEST_INTERRUPTIBILITY, state & !SHADOW);
            self.end_step_in(state);
            return;
        }
        let steps = self.rflags().contains(Rflags::TF)
            // With BTF it is not each instruction that traps.
            && self.get(fields::GUEST_DEBUGCTL) & debugctl::BTF == 0;
        let pending = self.get(fields::GUEST_PENDING_DEBUG) & !PENDING_STEP;
        // Both ways: an entry refuses a pending step too many as it refuses one that is missing.
        self.set(fields::GUEST_PENDING_DEBUG, pending | if steps { PENDING_STEP } else { 0 });
    }

    /// RFLAGS was set: blocking by STI goes with IF, and a pending step with TF.
    pub(crate) fn flags_changed(&mut self, rflags: Rflags) {
        // Before the field is looked at, which may say what is over.
        self.clear_ended_shadow();
        let state = self.get(fields::GUEST_INTERRUPTIBILITY);
        // A shadow of MOV SS goes with no flag.
        if state & SHADOW == 0 {
            return;
        }
        if !rflags.contains(Rflags::IF) {
            // Refused with IF clear (SDM vol. 3C §27.3.1.5).
            self.set(fields::GUEST_INTERRUPTIBILITY, state & !interruptibility::STI);
        } else if self.attention & attention::STI_GIVEN != 0 {
            self.attention &= !attention::STI_GIVEN;
            self.set(fields::GUEST_INTERRUPTIBILITY, (state & !SHADOW) | interruptibility::STI);
        }
        self.match_pending_step();
    }

    /// Asks for an exit when an interrupt can be taken.
    pub(crate) fn open_window(&mut self, on: bool) {
        // The NMI's window is this one while STI blocks.
        self.change_proc(ProcControls::INTERRUPT_WINDOW, on || self.nmi_behind == NmiBehind::Sti);
    }

    /// Asks for an exit when an NMI can be taken.
    pub(crate) fn open_nmi_window(&mut self, on: bool) {
        self.change_proc(ProcControls::NMI_WINDOW, on);
    }
}

impl<C: Cpu> Injection for Vmx<C> {
    type ServedApic = Self;

    fn inject(&mut self, event: Event) {
        // An entry refuses an interrupt in a shadow, and an NMI behind MOV SS (SDM vol. 3C §27.3.1.5).
        self.clear_ended_shadow();
        let mut info = encode(event, self.cr0);
        let mut kept = None;
        if self.cold.of_l1.repeated != 0
            && let Some((word, length)) = self.take_repeated(event)
        {
            (info, kept) = (word, Some(length));
        }
        if let Event::Exception(e) = event {
            self.end_halt();
            if let Some(bits) = e.payload {
                // Once, at the injection: an event that is injected again comes without a payload.
                // CR2 and DR6 are not loaded by the injection.
                self.deliver_payload(e.vector.0, bits);
            }
            if info & event::ERROR_VALID != 0 {
                self.set(fields::ENTRY_ERROR_CODE, error_code(&e));
            }
            if e.vector.0 == vector::DB {
                if self.exited_at_int1() {
                    info = (info & !event::TYPE) | event::PRIVILEGED_SOFT_EXCEPTION;
                    // It has retired.
                    self.set_shadow(false);
                }
                // An exit by #DB leaves no step pending, but maybe a shadow.
                self.match_pending_step();
            }
        } else if event == Event::Nmi {
            // Whatever user space says is blocked: an entry refuses to inject one there, and its delivery blocks anew.
            self.set_nmi_masked(false);
            self.nmi_behind = NmiBehind::Nothing;
        }
        if has_length(info) {
            if event == Event::Software(Vector(vector::DB)) && self.injects_int1_for_l1() {
                // INT1, whose gate does not ask for CPL.
                info = (info & !event::TYPE) | event::PRIVILEGED_SOFT_EXCEPTION;
            }
            // Where the handler returns to: RIP and this.
            let length = match kept {
                None => self.length_at(info),
                // Its delivery was interrupted by the last exit.
                Some(0) => self.event_length(),
                Some(length) => length,
            };
            self.set(fields::ENTRY_INSTRUCTION_LENGTH, length);
        }
        if self.cold.of_l1.runs {
            self.cold.of_l1.injected = info & event::WHOLE;
        }
        // Last: with the valid bit all else is in place.
        self.set(fields::ENTRY_INTERRUPTION, info);
        self.attention |= attention::INJECT;
    }

    #[inline]
    fn injecting(&self) -> bool {
        self.attention & attention::INJECT != 0
    }

    fn cancel_injection(&mut self) -> Option<Event> {
        if !self.injecting() {
            return None;
        }
        self.attention &= !attention::INJECT;
        let info = self.get(fields::ENTRY_INTERRUPTION);
        self.set(fields::ENTRY_INTERRUPTION, info & !event::VALID);
        let taken = decode(info, self.get(fields::ENTRY_ERROR_CODE));
        if self.cold.of_l1.runs {
            // It may be injected again, and its neutral form does not have all types. What it has follows from the mode of then.
            let loses =
                |event| has_length(info) || (encode(event, self.cr0) ^ info) & event::TYPE != 0;
            let kept = if taken.is_some_and(loses) { info & event::WHOLE } else { 0 };
            let length =
                if has_length(kept) { self.get(fields::ENTRY_INSTRUCTION_LENGTH) } else { 0 };
            (self.cold.of_l1.repeated, self.cold.of_l1.length) = (kept, length);
        }
        taken
    }

    fn drop_pending_debug(&mut self) {
        self.set_rarely(fields::GUEST_PENDING_DEBUG, 0);
        // A step in a shadow has to be pending, whoever drops the rest.
        self.match_pending_step();
    }

    fn put_debug_aside(&mut self) {
        self.cold.debug_aside = self.get(fields::GUEST_PENDING_DEBUG);
        self.drop_pending_debug();
    }

    fn take_debug_back(&mut self) {
        self.set_rarely(fields::GUEST_PENDING_DEBUG, self.cold.debug_aside);
    }

    fn offer_interrupt(&mut self, vector: Option<Vector>) {
        // An offer replaces the one before: the local APIC has taken that back.
        self.offer = Offer { vector, taken: false };
        if vector.is_some() {
            // Whether the guest can take it is asked at the entry itself, behind all that this answer may still change.
            self.attention |= attention::OFFER;
        } else {
            self.attention &= !attention::OFFER;
            // The window was open for what is withdrawn.
            self.open_window(false);
        }
    }

    /// Whether the guest took the offered interrupt.
    #[inline]
    fn offer_taken(&mut self) -> bool {
        core::mem::take(&mut self.offer.taken)
    }

    fn set_interrupt_window(&mut self, on: bool) {
        // By the exit's reason: an interrupt window that came may have been opened for an NMI.
        if self.get(fields::EXIT_REASON) == u32::from(ExitReason::InterruptWindow.0) {
            // This was it.
            self.nmi_behind = NmiBehind::Nothing;
        }
        // Nothing of an offer is left: who asks for a window has nothing that could be injected.
        self.offer_interrupt(None);
        self.open_window(on);
    }

    /// The priority is looked at when an interrupt is offered, and an offer does not outlive a look:
    /// only its fall below what waits has to be seen.
    fn watch_priority(&mut self, _: Chosen, waiting: Option<Vector>) {
        // An entry refuses a threshold above the priority (SDM vol. 3C §27.2.1.1).
        let threshold = waiting.map_or(0, |v| v.0 >> 4).min(self.cr8());
        self.set(fields::TPR_THRESHOLD, threshold.into());
    }

    fn exit_on_cr8_writes(&mut self) {
        self.change_proc(ProcControls::CR8_LOAD, true);
    }

    fn nmi_allowed(&self) -> bool {
        // Behind STI, too: some CPUs refuse an NMI there (SDM vol. 3C §27.3.1.5).
        !self.nmi_masked() && !self.is_shadowed()
    }

    fn set_nmi_window(&mut self) -> NmiWindow {
        // While STI blocks, a CPU may take the exit at once, before any instruction and any interrupt of
        // the host's, and at the next entry again (SDM vol. 3C §26.2). Interrupts are enabled behind it.
        self.nmi_behind = match self.nmi_masked() {
            false if self.is_behind_sti() => NmiBehind::Sti,
            false if self.is_shadowed() => NmiBehind::MovSs,
            _ => NmiBehind::Nothing,
        };
        if self.nmi_behind == NmiBehind::Sti {
            self.open_window(true);
        } else {
            self.open_nmi_window(true);
        }
        NmiWindow::Exit
    }

    /// Where it is L1's own: L2's blocking was the answer while it ran.
    fn nmi_masked_behind_l2(&self, _: bool) -> bool {
        self.nmi_masked()
    }

    fn nmi_masked(&self) -> bool {
        // Virtual NMIs: the field says whether the guest handles one.
        self.get(fields::GUEST_INTERRUPTIBILITY) & interruptibility::NMI != 0
    }

    fn set_nmi_masked(&mut self, on: bool) {
        // Not before one that is prepared: see `inject`.
        let on = on && !self.injects_nmi();
        let state = self.get(fields::GUEST_INTERRUPTIBILITY) & !interruptibility::NMI;
        let bit = if on { interruptibility::NMI } else { 0 };
        self.set(fields::GUEST_INTERRUPTIBILITY, state | bit);
    }

    /// The window is open.
    fn iret_begun(&mut self) {
        self.nmi_behind = NmiBehind::Nothing;
        self.open_nmi_window(false);
    }

    /// No window is opened by a step.
    fn end_step(&mut self) {}

    fn own_single_step(&mut self) -> bool {
        false
    }

    fn pass_debug(&mut self, bits: u64, _before: u64) {
        // A step behind the shadow's instruction: what held it back is over.
        if bits & Dr6::BS != 0 {
            self.set_shadow(false);
        } else {
            // A breakpoint before an instruction that the shadow is for: HLT behind STI.
            self.match_pending_step();
        }
    }

    #[inline(always)]
    fn served_apic(&self) -> Option<&Self> {
        Some(self)
    }

    #[inline(always)]
    fn served_apic_mut(&mut self) -> Option<&mut Self> {
        Some(self)
    }
}

impl<C: Cpu> Vmx<C> {
    /// What this VMCS was to inject is lost. An entry that fails leaves the bit that makes it valid (SDM vol. 3C
    /// §27.8), and the next entry would inject it.
    #[cold]
    pub(crate) fn drop_injection(&mut self) {
        self.attention &= !attention::INJECT;
        let info = self.get(fields::ENTRY_INTERRUPTION);
        // Whatever is believed of it, it is written.
        self.vmcs.fields.learn(fields::ENTRY_INTERRUPTION, u64::from(info | event::VALID));
        self.set(fields::ENTRY_INTERRUPTION, info & !event::VALID);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_event_survives_encoding() {
        for event in [
            Event::Interrupt(Vector(0x31)),
            Event::Nmi,
            Event::Software(Vector(0x80)),
            Event::Exception(Exception::ud()),
            Event::Exception(Exception::gp(0x18)),
        ] {
            assert_eq!(decode(encode(event, Cr0::PE), 0x18), Some(event));
        }
        assert_eq!(decode(0x30, 0), None);
    }

    #[test]
    fn outside_protected_mode_nothing_pushes_an_error_code() {
        let gp = Event::Exception(Exception::gp(0x18));
        assert_eq!(encode(gp, Cr0::empty()), event::VALID | event::EXCEPTION | 13);
        assert_eq!(encode(gp, Cr0::PE), event::VALID | event::EXCEPTION | event::ERROR_VALID | 13);
    }

    #[test]
    fn an_error_code_has_sixteen_bits() {
        let code = |bits| error_code(&Exception { error_code: bits, ..Exception::gp(0) });
        assert_eq!((code(Some(0xdead_beef)), code(None)), (0xbeef, 0));
    }

    proptest! {
        /// SDM vol. 3C §27.2.1.3: what an entry checks of the injected event.
        #[test]
        fn an_entry_accepts_every_exception(vector in 0u8..32, code: Option<u32>, protected: bool) {
            let exception = Exception { vector: Vector(vector), error_code: code, payload: None };
            let cr0 = if protected { Cr0::PE } else { Cr0::empty() };
            let info = encode(Event::Exception(exception), cr0);
            let hardware = info & event::TYPE == event::EXCEPTION;
            let pushes = protected && matches!(vector, 8 | 10 | 11 | 12 | 13 | 14 | 17);
            prop_assert_eq!(info & event::ERROR_VALID != 0, pushes && hardware);
            prop_assert_eq!(info & 0x7fff_f000, 0);
        }
    }
}
