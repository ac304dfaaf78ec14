//! The task switch that the hardware leaves to the hypervisor: which event or instruction asked for it,
//! and what of the vCPU it changes beside the registers ([`emulate::switch_task`]).
//!
//! SDM vol. 3C §26.4.2, APM vol. 2 §15.14.1.

use backend::{Backend, Event, TaskSource, TaskSwitchExit};
use emulate::{Source, Stop, Switched, TaskSwitch};

use x86::Dr7;

use crate::{
    Vcpu,
    run::events::Outer,
    run::outcome::Outcome,
    run::user_exit::{ERROR_EMULATION, ErrorData},
};

impl<B: Backend> Vcpu<B> {
    /// Switches tasks. An event that asked for it is delivered with that.
    pub(crate) fn task_switch(&mut self, exit: TaskSwitchExit) -> Outcome {
        // It was taken out of the exit's information before. INT n was not: it is executed, and counts as an
        // instruction.
        let event = match exit.source {
            TaskSource::Gate => self.events.again,
            _ => None,
        };
        // Without an event it was an instruction, INT n among them: the old task goes on behind it.
        let return_to = if event.is_some() { self.b.rip() } else { self.slow_next_rip()? };
        let error_code = match event {
            Some(Event::Exception(e)) => e.error_code,
            _ => None,
        };
        let switch = TaskSwitch {
            selector: exit.selector,
            source: match exit.source {
                TaskSource::Call => Source::Call,
                TaskSource::Iret => Source::Iret,
                TaskSource::Jmp => Source::Jmp,
                TaskSource::Gate => Source::Gate,
            },
            return_to,
            restarts: is_fault(event),
            error_code,
            external: event.is_some(),
        };
        let stepping = self.b.rflags();
        if self.rare.debug.single_step {
            // The VMM's step is none of the old task's flags.
            self.b.set_rflags(self.rare.debug.rflags(&self.b));
        }
        let switched = emulate::switch_task(self, &switch);
        // What it has accessed is of no instruction.
        self.device.user_io.log.forget();
        if self.rare.debug.single_step && switched.is_err() {
            self.b.set_rflags(stepping);
        }
        match switched {
            Ok(switched) => self.begin_task(&switch, event, switched),
            // An interrupt or NMI that was to begin the task waits again.
            Err(Stop::Fault(exception)) => self.raise_in_delivery(exception),
            Err(Stop::Retry) => {}
            Err(_) => {
                let raw = self.b.exit_raw();
                let data = ErrorData::emulation(self.b.insn_bytes(), &raw);
                return Err(self.rare.internal_error(ERROR_EMULATION, data));
            }
        }
        Ok(())
    }

    fn begin_task(&mut self, switch: &TaskSwitch, event: Option<Event>, task: Switched) {
        self.events.again = None;
        match event {
            // The handler of an NMI runs until its IRET, be it in a task of its own.
            Some(Event::Nmi) => self.b.nmi_delivered(),
            _ if switch.source == Source::Iret => self.b.set_nmi_masked(false),
            _ => {}
        }
        self.rare.debug.set_rflags(&mut self.b, task.rflags);
        self.b.set_rip(task.rip);
        self.b.set_interrupt_shadow(false);
        let [a, b, c, d, dr6, dr7] = self.debug_regs();
        // A task switch clears the local breakpoints (SDM vol. 3B §18.2.4).
        if dr7 & Dr7::LOCAL != 0 {
            let regs = [a, b, c, d, dr6, dr7 & !Dr7::LOCAL];
            self.rare.debug.set_regs(&mut self.b, regs);
        }
        if let Some(exception) = task.exception {
            self.raise(exception);
        }
        if self.rare.debug.single_step {
            self.events.outer.set(Outer::STEPPED, true);
        }
        self.pending.raise();
    }
}

/// Whether the instruction at RIP did not complete for it.
fn is_fault(event: Option<Event>) -> bool {
    const DB: u8 = 1;
    const DF: u8 = 8;
    const MC: u8 = 18;
    matches!(event, Some(Event::Exception(e)) if !matches!(e.vector.0, DB | DF | MC))
}
