//! Instructions that are emulated: fetched, decoded, done, and completed when user space has answered.
//!
//! Few are: strings to a device or a port, read-modify-writes of a device, what the CPU gives up (INVLPG
//! under shadow paging, LMSW, descriptor tables), and whatever faults in a way that tells too little. A
//! plain load, store, IN or OUT is not ([`super::device`]).
//!
//! The emulator commits at the end (docs/adr/0010). Registers, RIP and flags change when an instruction,
//! or one iteration of a string, is complete, and not before. So an access that needs user space needs no
//! state in the middle of an instruction, which would have to be kept, saved and migrated for each of
//! them: KVM_RUN returns, and the next one emulates the instruction from its beginning. Accesses that
//! were answered are answered from the log, in the same order; what the kernel's devices answered is
//! there too, for reading some of them twice is not reading them once.
//!
//! What is emulated is what made the exit (docs/adr/0041). The bytes at RIP are read after the exit, and
//! another CPU of the guest may have changed them. So an instruction is emulated only if it can have
//! caused this exit, and all permissions are checked for it as if nothing had been checked before. If it
//! cannot, nothing is done and the guest goes on: the CPU executes what is there now. What was begun is
//! completed with the bytes that it was begun with.
//!
//! What cannot be emulated is told to the VMM, never tried again in silence: a guest that stands still
//! and a CPU that spins would be all that anybody sees.

use core::sync::atomic::Ordering::Relaxed;

use backend::{Backend, RDX, ShadowBy};
use emulate::{Cause, Decoded, Fetched, Stop};
use host::task;
use stats::VcpuCount;
use x86::{Dr6, Exception, Rflags};

use super::device::user_io::{Begun, Completion, Execution};
use crate::{
    Vcpu,
    exits::code::CodeState as _,
    run::events::Outer,
    run::outcome::{Break, Outcome},
    run::user_exit::{ERROR_EMULATION, ErrorData, UserExit},
};

/// How often an instruction that has written is emulated before the guest makes all of it again.
const SETTLED_TRIES: u32 = 8;

/// Whether an instruction may be emulated for L2. L1 was asked about the exit, and not about the instruction: where
/// the exit tells no more than that memory was accessed, an instruction that L1 may intercept would get past it.
fn is_for_l2(cause: Cause, decoded: &Decoded) -> bool {
    match cause {
        Cause::Any | Cause::Memory { .. } => decoded.is_data_access(),
        Cause::Port { .. }
        | Cause::Control { .. }
        | Cause::Debug { .. }
        | Cause::Invlpg
        | Cause::Invpcid
        | Cause::GdtrIdtr
        | Cause::LdtrTr => true,
    }
}

impl<B: Backend> Vcpu<B> {
    /// Emulates the instruction at RIP, if it can be the one that made the exit. Else its bytes have
    /// changed since: the guest goes on, and the CPU executes what is there now.
    pub(crate) fn emulate_here(&mut self, cause: Cause) -> Outcome {
        let (fetched, decoded) = self.slow_decode()?;
        self.emulate_decoded(cause, fetched, &decoded)
    }

    /// Emulates an instruction that is decoded already.
    pub(crate) fn emulate_decoded(
        &mut self,
        cause: Cause,
        fetched: Fetched,
        decoded: &Decoded,
    ) -> Outcome {
        // Begun before anything is asked, so that accesses answered for other bytes are not taken
        // for these.
        let begun = self.begun(fetched);
        self.device.user_io.log.begin(begun, Execution::Emulated);
        let is_nested = self.pending.after_exit.is_nested();
        // L1 intercepts control registers one by one, and was asked about the one that the exit names.
        let is_other = matches!(cause, Cause::Control { cr, .. } if is_nested && !decoded.accesses_control(cr));
        if is_other || !decoded.can_cause(cause, self.gprs.0[RDX] as u16) {
            self.device.user_io.log.forget();
            return Ok(());
        }
        if is_nested && !is_for_l2(cause, decoded) {
            self.device.user_io.log.forget();
            return Err(self.emulation_failed());
        }
        self.execute(decoded)
    }

    /// An instruction here, of the level that runs.
    fn begun(&self, fetched: Fetched) -> Begun {
        Begun { rip: self.b.rip(), fetched, nested: self.pending.after_exit.is_nested() }
    }

    /// Goes on with the instruction that user space has answered an access of. Its bytes are those that
    /// it began with. If the VMM has set RIP meanwhile, the guest goes on there.
    pub(crate) fn emulate_again(&mut self) -> Outcome {
        let decoded = match self.device.user_io.log.begun() {
            // The width too: a VMM that sets CS makes another instruction of the same bytes.
            Some(begun)
                if begun == self.begun(begun.fetched)
                    && begun.fetched.size() == self.b.code_size() =>
            {
                self.code.decode.get(begun.fetched)
            }
            _ => {
                self.device.user_io.log.forget();
                return Ok(());
            }
        };
        match decoded {
            Ok(decoded) if self.device.user_io.log.is_interpreted() => {
                self.interpret_again(&decoded)
            }
            Ok(decoded) => self.execute(&decoded),
            Err(_) => Err(self.emulation_failed()),
        }
    }

    fn execute(&mut self, decoded: &Decoded) -> Outcome {
        self.stats.count(VcpuCount::InsnEmulation);
        let result = self.attempt(decoded);
        self.complete_emulation(result, decoded)
    }

    /// Emulates an instruction from its beginning. One that has written is tried again here: most reasons pass by that, and
    /// a VMM that set `immediate_exit` may save the state next, with a part of the instruction.
    fn attempt(&mut self, decoded: &Decoded) -> Result<emulate::Completion, Stop> {
        let mut tries = SETTLED_TRIES;
        loop {
            self.device.user_io.log.rewind();
            let result = match self.device.user_io.log.is_interpreted() {
                true => emulate::interpret(self, decoded),
                false => emulate::emulate(self, decoded),
            };
            tries = tries.wrapping_sub(1);
            let again = matches!(result, Err(Stop::Retry))
                && self.device.user_io.log.is_settled()
                && !self.mmu.has_refused()
                && !task::signal_pending();
            if !again || tries == 0 {
                return result;
            }
        }
    }

    /// Like [`Vcpu::execute`], of a guest that the CPU cannot run: any instruction, and not counted.
    pub(crate) fn interpret_decoded(&mut self, fetched: Fetched, decoded: &Decoded) -> Outcome {
        let begun = self.begun(fetched);
        self.device.user_io.log.begin(begun, Execution::Interpreted);
        self.interpret_again(decoded)
    }

    fn interpret_again(&mut self, decoded: &Decoded) -> Outcome {
        let result = self.attempt(decoded);
        let done = matches!(&result, Ok(done) if done.outcome == emulate::Outcome::Done);
        self.complete_emulation(result, decoded)?;
        // No exit tells of an IRET that is executed here.
        if done && decoded.is_iret() {
            self.b.set_nmi_masked(false);
        }
        Ok(())
    }

    fn complete_emulation(
        &mut self,
        result: Result<emulate::Completion, Stop>,
        decoded: &Decoded,
    ) -> Outcome {
        match result {
            Ok(done) => {
                // What was answered is of what is complete now, and must not answer the next
                // instruction.
                self.device.user_io.log.forget();
                let complete = done.outcome == emulate::Outcome::Done;
                // A trap goes by the flags that the instruction began with (SDM vol. 3B §18.3.1.4).
                let before = self.b.rflags();
                self.b.set_rflags(done.rflags);
                if complete {
                    self.b.retire(done.rip);
                    // Behind `retire`, which ends every shadow.
                    match done.interrupt_shadow {
                        false => self.b.set_interrupt_shadow(false),
                        // That of a load of SS holds debug exceptions back too, where the CPU tells them apart.
                        true if decoded.is_sti() => self.b.set_interrupt_shadow_by(ShadowBy::Sti),
                        true => self.b.set_interrupt_shadow_by(ShadowBy::MovSs),
                    }
                    // A load of SS holds the trap back (SDM vol. 3A §6.8.3), and INT n takes the guest's own away.
                    let held = done.interrupt_shadow && !decoded.is_sti();
                    let taken = decoded.is_software_interrupt() && !self.rare.debug.single_step;
                    if !held && !taken {
                        self.trap_iteration(before);
                    }
                } else {
                    self.b.set_rip(done.rip);
                    self.trap_iteration(done.rflags);
                    if self.traps_each() {
                        self.owe_trap();
                    }
                }
                self.pending.raise();
                Ok(())
            }
            Err(Stop::Fault(exception)) => {
                // A fault is the end of it, too: the guest may come back to this instruction anew.
                self.device.user_io.log.forget();
                self.raise(exception);
                Ok(())
            }
            // L1's tables have refused. L1 hears of it before the next entry: the end of it, as a fault.
            Err(Stop::Retry) if self.mmu.has_refused() => {
                self.device.user_io.log.forget();
                Ok(())
            }
            // What devices have answered stays: the same instruction asks for it again.
            Err(Stop::Retry) if self.device.user_io.log.retry() => Ok(()),
            // A part is written, and a signal waits. It is begun again as after an answer.
            Err(Stop::Retry) if task::signal_pending() => {
                self.device.user_io.completion = Completion::Emulation;
                Err(UserExit::Intr.into())
            }
            // Nothing of ours makes it pass: the vCPU would be told of no event, and of no end of its VM, for ever.
            Err(Stop::Retry) => {
                self.device.user_io.log.forget();
                Ok(())
            }
            Err(Stop::NeedUser) => match self.device.user_io.log.asked() {
                Some((access, 1)) => Err(self.device.ask(&access, Completion::Emulation)),
                Some((access, count)) => Err(self.device.ask_items(&access, count)),
                None => Err(self.emulation_failed()),
            },
            Err(Stop::Unsupported) => {
                // Given up for good: a VMM that goes on begins it, if at all, without these
                // answers.
                self.device.user_io.log.forget();
                Err(self.emulation_failed())
            }
        }
    }

    /// An instruction traps under TF, and a REP string instruction that is not at its end after each iteration, as in
    /// hardware (SDM vol. 3B §18.3.1.4).
    fn trap_iteration(&mut self, rflags: Rflags) {
        if !rflags.contains(Rflags::TF) {
            return;
        }
        if self.rare.debug.single_step {
            self.events.outer.set(Outer::STEPPED, true);
        } else {
            self.raise(Exception::db(Dr6::BS));
        }
    }

    /// KVM_EXIT_INTERNAL_ERROR with the bytes at RIP, after which the guest gets #UD. Outside CPL 0 it
    /// gets that alone, so that its user programs cannot stop it, as does a guest's guest; but a VMM may ask for the exit in
    /// any case, and does with the guest what it likes then.
    pub(super) fn emulation_failed(&mut self) -> Break {
        self.stats.count(VcpuCount::InsnEmulationFail);
        if !self.vm.settings.exit_on_emulation_failure.load(Relaxed) {
            let program = self.b.cpl() != 0;
            // As on stock KVM #UD waits as well: a VMM that simply goes on does not meet the instruction again.
            self.raise(Exception::ud());
            if program || self.pending.after_exit.is_nested() {
                return Break::ToGuest;
            }
        }
        let mut bytes = [0; 15];
        // Behind #UD, which has not moved RIP. Bytes that cannot be had leave the report without them.
        let len = self.read_code(&mut bytes).unwrap_or(0);
        let raw = self.b.exit_raw();
        let data = ErrorData::emulation(bytes.get(..len).unwrap_or(&[]), &raw);
        self.rare.internal_error(ERROR_EMULATION, data)
    }
}
