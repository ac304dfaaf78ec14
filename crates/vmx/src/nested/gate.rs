//! Events that wait while L2 runs.

use backend::{Event, Executed, Gate, Gprs, Injection, L1Memory, Waiting};
use cpu::Cpu;
use nested_vmx::events::{self, Injection as Undelivered, State};
use nested_vmx::leave::Report;
use nested_vmx::reflect;
use x86::Rflags;
use x86::vmcs::{ExitReason, event, field};

use super::{
    access::{Memory, qualification},
    kept::Nested,
};
use crate::{fields, inject, state::Vmx};

impl<C: Cpu> Vmx<C> {
    pub(super) fn gate_of(&self, n: &Nested, waiting: &Waiting) -> Gate {
        let v = n.machine.vmcs12();
        let which = match waiting {
            Waiting::Exception(e) => {
                // A fault of L2's own: its filter says whose it is, and nothing holds it back.
                let exits = reflect::exception_exits(v, e.vector.0, e.error_code.unwrap_or(0));
                return if exits { Gate::ExitToL1 } else { Gate::Deliver };
            }
            Waiting::Interrupt(_) => events::Event::Interrupt,
            Waiting::Nmi => events::Event::Nmi,
            Waiting::Smi => events::Event::Smi,
            Waiting::Init => events::Event::Init,
            // L1 always hears of it: no control keeps a shutdown for L0 (§26.2).
            Waiting::TripleFault => return Gate::ExitToL1,
            Waiting::MonitorTrap => {
                // An exit behind an instruction cannot come before the entry whose event is the first thing that
                // happens.
                let now = !n.machine.run_pending && !self.injecting();
                return if now { Gate::ExitToL1 } else { Gate::AfterEntry };
            }
        };
        let state = State {
            entry_pending: n.machine.run_pending,
            injecting: self.injecting(),
            interrupts_blocked: self.get(fields::GUEST_RFLAGS) & Rflags::IF.bits() == 0
                || self.is_shadowed(),
            // L0 opens a window of its own for NMIs: whether they are blocked is asked there.
            nmis_blocked: false,
            // In SMM L2 does not run.
            smm: false,
        };
        match events::gate(v, which, &state) {
            events::Gate::Deliver => Gate::Deliver,
            // An NMI finds its window as it does with L1.
            events::Gate::Window if which == events::Event::Nmi => Gate::Deliver,
            events::Gate::Window => Gate::Window,
            events::Gate::ExitToL1 => Gate::ExitToL1,
            events::Gate::Hold => Gate::AfterEntry,
            // Neither delivered nor lost for good: the vCPU asks again when something changes.
            events::Gate::Drop => Gate::Hold,
        }
    }

    /// Ends L2's run with an exit for an event.
    pub(super) fn exit_for_event<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        waiting: &Waiting,
        undelivered: Option<Event>,
        l1: &M,
    ) -> Executed {
        let mut report = match waiting {
            // The vector is there if L1 has it acknowledged.
            Waiting::Interrupt(vector) => {
                events::report(events::Event::Interrupt, vector.map(|v| v.0))
            }
            Waiting::Nmi => events::report(events::Event::Nmi, None),
            Waiting::Smi => events::report(events::Event::Smi, None),
            Waiting::Init => events::report(events::Event::Init, None),
            Waiting::Exception(e) => {
                // As an exit of the hardware's would say it: by the mode of L2.
                let information = inject::encode(Event::Exception(*e), self.cr0);
                let mut report =
                    Report::event(information, inject::error_code(e), qualification(e));
                // #BP and #OF of an instruction, which an L1 injects again by its length (SDM vol. 3C §28.2.5).
                if information & event::TYPE == event::SOFT_EXCEPTION {
                    report.length = self.event_length();
                }
                report
            }
            // An entry owes one of two exits; what it injected has been delivered by now.
            Waiting::MonitorTrap if n.machine.fall_pending => {
                Report::plain(ExitReason::TprBelowThreshold, 0)
            }
            Waiting::MonitorTrap => Report::plain(ExitReason::MonitorTrap, 0),
            Waiting::TripleFault => Report::plain(ExitReason::TripleFault, 0),
        };
        // An event that wakes a sleeping L2 finds it asleep: L1 reads that.
        report.activity = n.machine.vmcs12().get(field::GUEST_ACTIVITY);
        // It has ended the delivery: nothing is left of the event to be told.
        if *waiting != Waiting::TripleFault {
            self.tell_undelivered(n, &mut report, undelivered);
        }
        self.leave_l2(n, gprs, &report, &Memory::new(l1))
    }

    /// Ends the run of an L2 that sleeps, with what wakes it.
    #[cold]
    pub(super) fn exit_asleep<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        mut report: Report,
        l1: &M,
    ) -> Executed {
        report.activity = n.machine.vmcs12().get(field::GUEST_ACTIVITY);
        self.leave_l2(n, gprs, &report, &Memory::new(l1))
    }

    /// Tells L1 of an event that L2 was to take first.
    pub(super) fn tell_undelivered(
        &self,
        n: &Nested,
        report: &mut Report,
        undelivered: Option<Event>,
    ) {
        if let Some(event) = undelivered {
            let v = n.machine.vmcs12();
            let asked = v.get(field::ENTRY_INTERRUPTION);
            // That of an entry which has not run yet, whose kind and length an event does not tell.
            if n.machine.run_pending && asked & event::VALID != 0 {
                let error_code = v.get(field::ENTRY_ERROR_CODE);
                let length = v.get(field::ENTRY_INSTRUCTION_LENGTH);
                let own = Undelivered { information: asked, error_code, length };
                return events::tell_interrupted(report, own);
            }
            // As it was made: INT1 is no INT 1, and an exception of vector 3 no INT3. The event does not tell.
            let told = [self.get(fields::IDT_VECTORING), self.cold.of_l1.repeated];
            let information = match told.into_iter().find(|word| inject::is_of(*word, event)) {
                Some(word) => word & event::WHOLE,
                // By L2's mode, as when it would have been injected.
                None => inject::encode(event, self.cr0),
            };
            let error_code = match event {
                Event::Exception(e) if information & event::ERROR_VALID != 0 => {
                    inject::error_code(&e)
                }
                _ => 0,
            };
            // Of the last exit: for events that an instruction made it is the length of that.
            let length = match self.cold.of_l1.length {
                0 => self.get(fields::INSTRUCTION_LENGTH),
                kept => kept,
            };
            events::tell_interrupted(report, Undelivered { information, error_code, length });
        }
    }
}
