//! The handlers of exits outside the inner loop, with interrupts on: whatever allocates, sleeps,
//! emulates or ends in user space. Which exit is whose is in [`table`](crate::exits::table).

use backend::{Backend, CrAccess, DrAccess};
use emulate::Cause;
use host::task;
use mmu::walk;
use stats::VcpuCount;
use vm::{settings::quirk, vcpu_shared::MpState};
use x86::{Cr0, Dr6, Exception, Gva, Rflags, cpuid::feature};

use crate::{
    Vcpu,
    exits::code::CodeState as _,
    run::outcome::Outcome,
    run::user_exit::{ERROR_UNEXPECTED_EXIT, ErrorData, UserExit},
    state::debug::guestdbg,
};

use super::syscall::SYSCALL;

const DB: u8 = 1;
const BP: u8 = 3;
const UD: u8 = 6;
const GP: u8 = 13;
const AC: u8 = 17;

/// Whether the guest asked for #AC: the access need not have been a split lock then.
fn checks_alignment(b: &impl Backend) -> bool {
    b.cpl() == 3 && b.cr0().contains(Cr0::AM) && b.rflags().contains(Rflags::AC)
}

/// A locked access at `rip` of two cache lines, of which this host makes a fault. It is none of the guest's:
/// the kernel warns and slows the task down, after which the access is done again, or it sends the
/// task a signal.
#[cold]
#[inline(never)]
fn split_lock(rip: u64, e: Exception) -> Outcome {
    if host::hostcpu::guest_split_lock(rip) {
        return Ok(());
    }
    let (vector, error_code) = (e.vector.0.into(), e.error_code.unwrap_or(0));
    Err(UserExit::Exception { vector, error_code }.into())
}

impl<B: Backend> Vcpu<B> {
    /// CPUID, whose length could not be had inside the loop.
    pub(crate) fn slow_cpuid(&mut self) -> Outcome {
        self.slow_instruction(|v| {
            v.do_cpuid();
            Ok(())
        })
    }

    /// A hypercall, because of its length or because it needs the kernel.
    pub(crate) fn slow_hypercall(&mut self) -> Outcome {
        self.slow_instruction(Self::do_hypercall)
    }

    /// A loop of PAUSE.
    pub(crate) fn pause(&mut self) -> Outcome {
        // The guest spins for what another vCPU holds, which may wait for this very CPU.
        task::cond_resched();
        self.skip()
    }

    /// An access of a control register that is no plain MOV.
    pub(crate) fn emulate_cr(&mut self, access: CrAccess) -> Outcome {
        self.emulate_here(Cause::Control { cr: access.cr, write: access.write })
    }

    /// Emulates INVPCID, whose operand is in memory.
    pub(crate) fn slow_invpcid(&mut self) -> Outcome {
        if self.cpuid.has(feature::INVPCID) {
            return self.emulate_here(Cause::Invpcid);
        }
        self.raise(Exception::ud());
        Ok(())
    }

    /// An access of a debug register while the VMM debugs the guest.
    pub(crate) fn slow_debug_reg(&mut self, access: DrAccess) -> Outcome {
        // Before the debugger's own registers: the fault goes before the access (SDM vol. 3B,
        // DR7.GD).
        if let Some(dr7) = self.rare.debug.general_detect(&self.b, access.dr) {
            let (pc, dr6) = (self.b.linear_rip(), Dr6::ACTIVE_LOW | Dr6::BD);
            return Err(UserExit::Debug { exception: 1, pc, dr6, dr7 }.into());
        }
        if self.rare.debug.borrows_regs() {
            return self.emulate_here(Cause::Debug { dr: access.dr, write: access.write });
        }
        self.b.own_debug_regs();
        Ok(())
    }

    /// Handles an RSM exit: the end of system-management mode.
    pub(crate) fn slow_rsm(&mut self) -> Outcome {
        self.resume_from_smm();
        Ok(())
    }

    /// A triple fault.
    pub(crate) fn shut_down(&mut self) -> Outcome {
        // SVM's control block is undefined now (APM vol. 2 §15.14.3).
        if !B::KEEPS_STATE_AT_SHUTDOWN {
            // As on stock KVM the local APIC goes with the registers.
            self.reset_by_init();
        }
        Err(UserExit::Shutdown.into())
    }

    /// The hardware refused the control block: what it cannot run is executed in software.
    pub(crate) fn entry_refused(&mut self) -> Outcome {
        if self.b.is_interpreted() {
            return self.interpret();
        }
        self.b.distrust_refused();
        let [code, ..] = self.b.exit_raw();
        Err(UserExit::FailEntry { reason: code, cpu: host::smp::cpu_id() as u32 }.into())
    }

    /// An exit that nobody knows, or that means a bug of ours.
    pub(crate) fn unexpected_exit(&mut self) -> Outcome {
        // Never tried again in silence: the guest would stand still and the CPU spin, without a trace.
        let data = ErrorData::new(&self.b.exit_raw());
        Err(self.rare.internal_error(ERROR_UNEXPECTED_EXIT, data))
    }

    /// Retires the current instruction without doing anything.
    pub(crate) fn skip(&mut self) -> Outcome {
        self.slow_instruction(|_| Ok(()))
    }

    /// Does an instruction whose length could not be had inside the loop, because its page has to
    /// be read through user space.
    pub(crate) fn slow_instruction(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<(), Exception>,
    ) -> Outcome {
        let next = self.slow_next_rip()?;
        match f(self) {
            Ok(()) => self.retire(next),
            Err(exception) => self.raise(exception),
        }
        Ok(())
    }

    /// HLT: the vCPU sleeps before its next entry, or user space has it sleep.
    #[inline(always)]
    pub(crate) fn halt(&mut self) -> Outcome {
        // Inside the loop it was retired already; a second time would skip an instruction.
        if !core::mem::take(&mut self.pending.hlt_retired) {
            let next = self.slow_next_rip()?;
            self.retire(next);
        }
        if !self.shared.in_kernel_apic {
            // Without a local APIC of ours nothing here could end the halt.
            return Err(UserExit::Hlt.into());
        }
        self.shared.set_mp_state(MpState::Halted);
        Ok(())
    }

    /// Whether an exception is the VMM's debugger's, or a split lock that this host takes for a fault: none that the
    /// guest is to hear of.
    pub(crate) fn is_for_us(&self, e: Exception) -> bool {
        let debugs = |bits| self.rare.debug.control & bits != 0;
        match e.vector.0 {
            DB => debugs(guestdbg::SINGLESTEP | guestdbg::USE_HW_BP),
            BP => debugs(guestdbg::USE_SW_BP),
            // A guest that asked for alignment checks gets its own #AC, split lock or not.
            AC => !checks_alignment(&self.b) && self.rare.detects_split_locks,
            _ => false,
        }
    }

    pub(crate) fn exception(&mut self, e: Exception) -> Outcome {
        let is_for_us = self.is_for_us(e);
        match e.vector.0 {
            DB => {
                // Before DR6 is looked at, which shows a step of ours as it shows one of the guest's.
                if self.b.own_single_step() {
                    self.pending.raise();
                    return Ok(());
                }
                let regs = self.b.debug_regs();
                let [.., dr6, dr7] = regs;
                // VMX tells apart from DR6 what happened, which of INT1 is nothing; SVM by it.
                let bits = e.payload.unwrap_or(dr6 ^ Dr6::ACTIVE_LOW);
                if is_for_us {
                    // User space hears of it and not the guest: no entry may deliver it once more.
                    self.b.pass_debug(bits, self.rare.debug.dr6_before(dr6));
                    let pc = self.b.linear_rip();
                    let dr6 = bits ^ Dr6::ACTIVE_LOW;
                    return Err(UserExit::Debug { exception: 1, pc, dr6, dr7 }.into());
                }
                self.raise(Exception::db(bits));
                Ok(())
            }
            UD => self.invalid_opcode(),
            // In a delivery the fault is that one's, whatever lies at RIP. What was delivered is in `again`
            // by now, unless an instruction of its own made it.
            GP if self.events.again.is_none() && self.is_for_instruction() => {
                self.virtualization_behind_fault()
            }
            AC if is_for_us => split_lock(self.b.rip(), e),
            BP if is_for_us => {
                let [.., dr6, dr7] = self.b.debug_regs();
                let pc = self.b.linear_rip();
                Err(UserExit::Debug { exception: 3, pc, dr6, dr7 }.into())
            }
            _ => {
                // It may have come in the delivery of an interrupt, which is no second fault.
                self.raise_in_delivery(e);
                Ok(())
            }
        }
    }

    /// #UD. A guest that took this host for the other vendor's makes its hypercalls with that one's
    /// instruction; it is a hypercall as well, and is rewritten for the next time. RSM in the mode that is
    /// made in software exits on SVM alone.
    fn invalid_opcode(&mut self) -> Outcome {
        const VMCALL: [u8; 3] = [0x0f, 0x01, 0xc1];
        const VMMCALL: [u8; 3] = [0x0f, 0x01, 0xd9];
        const RSM: [u8; 2] = [0x0f, 0xaa];
        let mut bytes = [0; 15];
        // Bytes that cannot be had are no hypercall: the guest gets its #UD.
        let len = self.read_code(&mut bytes).unwrap_or(0);
        let bytes = bytes.get(..len).unwrap_or(&[]);
        let hypercall = bytes.starts_with(&VMCALL) || bytes.starts_with(&VMMCALL);
        // Without the quirk the other vendor's instruction is #UD, as on hardware.
        let hypercall = hypercall && self.vm.settings.has_quirk(quirk::FIX_HYPERCALL_INSN);
        // Both vendors' instructions have three bytes: which one it is makes no difference to RIP.
        let next = self.b.wrap_rip(self.b.rip().wrapping_add(VMCALL.len() as u64));
        // A guest's guest makes its hypercalls to its own hypervisor.
        if self.pending.after_exit.is_nested() {
            if !(hypercall && self.gives_hypercall_to_l1(next)) {
                self.raise(Exception::ud());
            }
        } else if hypercall {
            self.stats.count(VcpuCount::HypercallsByUd);
            // Rewritten before the call: the next time it exits by itself and is not decoded.
            self.rewrite_hypercall(bytes.get(2).copied().unwrap_or(0));
            match self.do_hypercall() {
                Ok(()) => self.retire(next),
                Err(exception) => self.raise(exception),
            }
        } else if bytes.starts_with(&RSM) && self.smm.active {
            self.resume_from_smm();
        } else if B::HAS_LEGACY_SYSCALL || !bytes.starts_with(&SYSCALL) || !self.do_syscall() {
            self.raise(Exception::ud());
        }
        Ok(())
    }

    /// Makes the hypercall at RIP this CPU's own, as stock KVM does. Code that the guest may not write stays as it is, and
    /// so does what stands there in place of the `old` byte by now.
    fn rewrite_hypercall(&mut self, old: u8) {
        let last = self.b.wrap_rip(self.b.linear_rip().wrapping_add(2));
        // With the rights of the code itself: a program must not change a page that it cannot
        // write.
        if let Ok(gpa) = self.translate(Gva(last), walk::Access::WRITE) {
            let mut now = [0];
            // Read and written apart: another CPU that writes between loses one byte to this, in
            // memory of its own guest.
            if self.mmu.memory.read(gpa, &mut now).is_ok() && now == [old] {
                let _ = self.mmu.memory.write(gpa, &[B::HYPERCALL]);
            }
        }
    }
}
