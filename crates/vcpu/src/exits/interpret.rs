//! Guests in a state that the CPU cannot run: under VMX without EPT real mode, and protected mode as long as
//! segment registers are still those of real mode.
//!
//! Instruction by instruction through the emulator, events through the interrupt table of real mode. There
//! is no VM86 mode and no task state in the guest's memory for it, as other hypervisors have: this needs
//! nothing of the VMM, and code in real mode is short-lived. Protected mode with such segments ends after
//! a few instructions; an exception there is reported to user space, an interrupt waits.

use backend::{Backend, Event, RAX, RDX};
use emulate::{Decoded, Outside, Stop};
use host::task;
use vm::vcpu_shared::MpState;
use x86::{Cr0, Cr4, Direction, Exception};

use crate::{
    Vcpu,
    exits::code::CodeState as _,
    run::events::{interrupts_open, offer_nothing},
    run::outcome::Outcome,
    run::user_exit::{ERROR_DELIVERY, ErrorData},
};

/// Instructions executed before somebody else has a look.
const MOST: u32 = 64;
const NMI: u8 = 2;

/// Whether the guest is in protected mode.
fn is_protected(b: &impl Backend) -> bool {
    b.cr0().contains(Cr0::PE)
}

impl<B: Backend> Vcpu<B> {
    /// Executes the guest in software until the CPU may be able to, or something else waits.
    #[cold]
    #[inline(never)]
    pub(crate) fn interpret(&mut self) -> Outcome {
        self.pending.raise();
        // Its handler may be code that the CPU can run.
        if self.interpret_event()? {
            return Ok(());
        }
        for _ in 0..MOST {
            self.interpret_here()?;
            // Whatever ends a run of the CPU's ends this one as well, at the boundary of an instruction.
            let waits = self.events.exception.is_some()
                || self.events.outer.any()
                || self.mmu.roots.is_due()
                || self.shared.has_requests()
                || self.shared.mp_state() != MpState::Runnable
                || task::work_pending()
                || (interrupts_open(&self.b) && self.interrupt_may_wait());
            // The CPU may be able to go on: only an entry tells.
            if waits || is_protected(&self.b) {
                break;
            }
        }
        self.pending.raise();
        Ok(())
    }

    fn interrupt_may_wait(&self) -> bool {
        self.pending.after_exit.offered().is_some()
            || self.events.external.is_some()
            || self.shared.lapic.maybe_pending()
            || self.vm.irq().extint_pending()
    }

    /// Delivers what was prepared for the entry that did not take place. Whether there was something.
    fn interpret_event(&mut self) -> Outcome<bool> {
        // The entry was refused, so nobody has delivered it.
        if let Some(event) = self.b.cancel_injection() {
            self.deliver_in_software(event)?;
            return Ok(true);
        }
        // The table of real mode is of no use in protected mode.
        // The offer stays out until then: it is not lost, the hardware has it.
        if is_protected(&self.b) || !interrupts_open(&self.b) {
            return Ok(false);
        }
        // The hardware was given it for an entry that did not take place.
        let Some(vector) = self.pending.after_exit.take_offered() else { return Ok(false) };
        offer_nothing(&mut self.b);
        self.stats.count(stats::VcpuCount::IrqInjections);
        if self.shared.in_kernel_apic {
            self.shared.lapic.set_isr(vector);
        } else {
            self.events.external = None;
        }
        self.deliver_in_software(Event::Interrupt(vector))?;
        Ok(true)
    }

    fn deliver_in_software(&mut self, event: Event) -> Outcome {
        let vector = match event {
            Event::Interrupt(vector) | Event::Software(vector) => vector.0,
            Event::Exception(exception) => exception.vector.0,
            Event::Nmi => NMI,
        };
        if is_protected(&self.b) {
            return self.wait_for_valid_state(event);
        }
        let delivered = emulate::deliver(self, vector);
        // What it has accessed is of no instruction.
        self.device.user_io.log.forget();
        match delivered {
            Ok(done) => {
                // Not before all was pushed: a fault leaves the guest where it was.
                self.b.set_rip(done.rip);
                self.b.set_rflags(done.rflags);
                self.b.set_interrupt_shadow(false);
                if event == Event::Nmi {
                    self.b.set_nmi_masked(true);
                }
                Ok(())
            }
            Err(Stop::Fault(exception)) => {
                // Where it goes back to depends on what it is.
                self.events.again = Some(event);
                self.raise_in_delivery(exception);
                Ok(())
            }
            Err(Stop::Retry) => {
                self.events.again = Some(event);
                Ok(())
            }
            Err(_) => Err(self.delivery_failed()),
        }
    }

    /// An event in protected mode with segments of real mode: what is not due to the instruction waits until
    /// they are loaded.
    fn wait_for_valid_state(&mut self, event: Event) -> Outcome {
        match event {
            // A fault of the instruction that waits already is not to meet a second one of it.
            Event::Interrupt(_) | Event::Nmi if self.events.exception.is_none() => {
                if event == Event::Nmi {
                    self.b.set_nmi_masked(false);
                }
                self.events.again = Some(event);
                self.interpret_here()
            }
            _ => Err(self.delivery_failed()),
        }
    }

    fn delivery_failed(&mut self) -> crate::run::outcome::Break {
        let data = ErrorData::new(&self.b.exit_raw());
        self.rare.internal_error(ERROR_DELIVERY, data)
    }

    /// Executes the instruction at RIP.
    fn interpret_here(&mut self) -> Outcome {
        let (fetched, decoded) = self.slow_decode()?;
        match decoded.outside() {
            Some(what) => self.execute_outside(what, &decoded),
            None => self.interpret_decoded(fetched, &decoded),
        }
    }

    /// Whether an instruction is #GP outside of CPL 0.
    fn is_privileged(&self, what: Outside) -> bool {
        match what {
            Outside::Cpuid => self.msrs.cpuid_faults,
            Outside::Rdtsc => self.b.cr4().contains(Cr4::TSD),
            // RSM is #UD outside of its mode, and asks for no privilege in it.
            Outside::Hypercall | Outside::Undefined | Outside::Pause | Outside::Rsm => false,
            Outside::Rdmsr | Outside::Wrmsr | Outside::Hlt | Outside::Nothing | Outside::Xsetbv => {
                true
            }
        }
    }

    /// Instructions that exit elsewhere.
    fn execute_outside(&mut self, what: Outside, decoded: &Decoded) -> Outcome {
        let next = self.b.wrap_rip(self.b.rip().wrapping_add(u64::from(decoded.len())));
        if self.b.cpl() != 0 && self.is_privileged(what) {
            self.raise(Exception::gp(0));
            return Ok(());
        }
        match what {
            Outside::Cpuid => self.do_cpuid(),
            Outside::Hypercall => {
                if let Err(exception) = self.do_hypercall() {
                    self.raise(exception);
                    return Ok(());
                }
            }
            Outside::Nothing | Outside::Pause => {}
            Outside::Undefined => {
                self.raise(Exception::ud());
                return Ok(());
            }
            Outside::Rdtsc => {
                let host = self.b.host_tsc();
                let tsc = self.b.guest_tsc(host);
                self.gprs.0[RAX] = tsc & 0xffff_ffff;
                self.gprs.0[RDX] = tsc >> 32;
            }
            // As inside the loop: retired first, then asleep.
            Outside::Hlt => {
                self.retire(next);
                self.pending.hlt_retired = true;
                return self.halt();
            }
            Outside::Rdmsr => return self.msr_to(Direction::Read, next),
            Outside::Wrmsr => return self.msr_to(Direction::Write, next),
            Outside::Xsetbv => {
                if let Err(exception) = self.do_xsetbv() {
                    self.raise(exception);
                    return Ok(());
                }
            }
            Outside::Rsm => {
                if self.smm.active {
                    self.resume_from_smm();
                } else {
                    self.raise(Exception::ud());
                }
                return Ok(());
            }
        }
        self.retire(next);
        Ok(())
    }
}
