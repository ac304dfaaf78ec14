//! KVM_RUN (KVM API §4.10, §5, §6 on KVM_CAP_SYNC_REGS): what the VMM asks in the page, the run, and why it
//! returns.

use super::Reply;
use super::ops::{VcpuOps, has_lapic};
use super::state;
use crate::errno::Errno;
use crate::exit::{ErrorData, RunInput, RunOutput, UserExit};
use crate::run_page::{RunPage, SYNC_EVENTS, SYNC_REGS, SYNC_SREGS};
use crate::uapi::registers::{KvmRegs, KvmSregs};
use crate::uapi::run::*;
use crate::uapi::vcpu_state::KvmVcpuEvents;

// Words of `struct kvm_run`, eight bytes each (KVM API §5).
/// Word with request_interrupt_window and immediate_exit: user space's.
const REQUEST: usize = 0;
/// Word with exit_reason, ready_for_interrupt_injection, if_flag and flags: ours.
const STATUS: usize = 1;
const CR8: usize = 2;
const APIC_BASE: usize = 3;
/// First word of the union.
const EXIT: usize = 4;

/// Runs the guest and shows in the page why it stopped.
pub fn run<V: VcpuOps>(vcpu: &mut V, page: RunPage<'_>, io_page: RunPage<'_>, arg: u64) -> Reply {
    // There is no argument (KVM API §4.10), and stock KVM refuses one.
    if arg != 0 {
        return Err(Errno::EINVAL);
    }
    // Loaded once: the VMM's other threads may write there while the registers are taken.
    let (wanted, changed) = page.shared_registers();
    // Before the pending I/O is completed: a VMM whose registers are refused can mend them and call
    // again.
    if wanted | changed != 0 {
        take_registers(vcpu, page, wanted, changed)?;
    }
    // With a local APIC of ours the task priority is the guest's; what lies in the page then is left from earlier.
    let own_cr8 = !has_lapic(vcpu.irqchip());
    let Some(input) = page.input(own_cr8) else {
        return Err(Errno::EINVAL);
    };
    // Once, before the run: user space goes on writing to the page while the guest runs.
    *vcpu.io_data() = io_page.first();
    vcpu.answer_rare(|| page.msr_answer(), |data| io_page.read_bytes(data));
    let exit = vcpu.run(&input);
    // For IN the page is the VMM's to fill, and nothing of ours is put there.
    if let UserExit::Io { write: true, .. } = exit {
        io_page.set_first(*vcpu.io_data());
    }
    // On EINTR as well: stock KVM shows the registers on every way out.
    if wanted != 0 {
        show_registers(vcpu, page, wanted);
    }
    // Also where the command fails: with EFAULT the VMM reads the memory fault from the page (KVM
    // API §5).
    page.show(&exit, &vcpu.run_output(), vcpu.error_data());
    match exit {
        UserExit::Intr | UserExit::Immediate => Err(Errno::EINTR),
        UserExit::Again => Err(Errno::EAGAIN),
        UserExit::MemoryFault { .. } => Err(Errno::EFAULT),
        UserExit::Dead => Err(Errno::EIO),
        UserExit::Io { .. }
        | UserExit::Mmio { .. }
        | UserExit::Hlt
        | UserExit::Msr { .. }
        | UserExit::Shutdown
        | UserExit::FailEntry { .. }
        | UserExit::InternalError { .. }
        | UserExit::IrqWindowOpen
        | UserExit::SetTpr
        | UserExit::Exception { .. }
        | UserExit::Debug { .. }
        | UserExit::IoapicEoi { .. } => Ok(0),
    }
}

/// Takes the registers that the VMM changed in the page.
#[cold]
#[inline(never)]
fn take_registers<V: VcpuOps>(
    vcpu: &mut V,
    page: RunPage<'_>,
    wanted: u64,
    changed: u64,
) -> Result<(), Errno> {
    // Before any is taken: a class that nobody knows changes nothing.
    if (wanted | changed) & !SYNC_X86_VALID_FIELDS != 0 {
        return Err(Errno::EINVAL);
    }
    if changed & SYNC_X86_REGS != 0 {
        // General registers first: setting them drops an exception that the events below may bring.
        vcpu.set_regs(&page.read::<KvmRegs>(SYNC_REGS))?;
        // Class by class: a VMM that gets an error sees by the bits left which class it was.
        page.clear_dirty_registers(SYNC_X86_REGS);
    }
    // By the commands' own checks. The page is another way to them and none around.
    if changed & SYNC_X86_SREGS != 0 {
        let sregs = page.read::<KvmSregs>(SYNC_SREGS);
        state::set_sregs(vcpu, &sregs)?;
        page.clear_dirty_registers(SYNC_X86_SREGS);
    }
    // Last: setting the general registers drops a pending exception.
    if changed & SYNC_X86_EVENTS != 0 {
        state::set_events(vcpu, page.read::<KvmVcpuEvents>(SYNC_EVENTS))?;
        page.clear_dirty_registers(SYNC_X86_EVENTS);
    }
    Ok(())
}

/// Puts the registers that the VMM wants to see into the page.
#[cold]
#[inline(never)]
fn show_registers<V: VcpuOps>(vcpu: &mut V, page: RunPage<'_>, wanted: u64) {
    if wanted & SYNC_X86_REGS != 0 {
        page.write(SYNC_REGS, &vcpu.regs());
    }
    if wanted & SYNC_X86_SREGS != 0 {
        page.write(SYNC_SREGS, &state::sregs(vcpu));
    }
    if wanted & SYNC_X86_EVENTS != 0 {
        page.write(SYNC_EVENTS, &vcpu.events());
    }
}

impl RunPage<'_> {
    /// What the VMM asks. `own_cr8`: the VM has no in-kernel local APIC, so that CR8 is the VMM's.
    /// `None` where that CR8 has a reserved bit set.
    #[inline]
    pub fn input(&self, own_cr8: bool) -> Option<RunInput> {
        // One load for both bytes.
        let [request_interrupt_window, immediate_exit, ..] = self.load(REQUEST).to_le_bytes();
        let cr8 = if own_cr8 {
            let cr8 = self.load(CR8);
            // CR8 has four bits. Stock KVM has EINVAL here, too.
            if cr8 > 15 {
                return None;
            }
            Some(cr8 as u8)
        } else {
            None
        };
        Some(RunInput {
            request_interrupt_window: request_interrupt_window != 0,
            immediate_exit: immediate_exit != 0,
            cr8,
            // Whatever the last exit was: who finishes it knows whether it means anything.
            mmio_data: self.load(EXIT + 1).to_le_bytes(),
        })
    }

    /// The answer to an MSR exit: whether the access is refused, and the value read.
    pub fn msr_answer(&self) -> (bool, u64) {
        let [error, ..] = self.load(EXIT).to_le_bytes();
        (error != 0, self.load(EXIT + 2))
    }

    /// Shows why KVM_RUN returns.
    #[inline(always)]
    pub fn show(&self, exit: &UserExit, output: &RunOutput, error: &ErrorData) {
        // The union before the reason, which says what of the union means anything.
        let reason = match *exit {
            UserExit::Io { write, size, port, count } => {
                let direction = if write { EXIT_IO_OUT } else { EXIT_IO_IN };
                self.store(
                    EXIT,
                    u64::from(direction)
                        | u64::from(size) << 8
                        | u64::from(port) << 16
                        | u64::from(count) << 32,
                );
                // Port data has a page of its own, since a string instruction can move more than fits beside the exit's words.
                self.store(EXIT + 1, PIO_PAGE_OFFSET * 4096);
                EXIT_IO
            }
            UserExit::Mmio { gpa, len, write, data } => {
                self.store(EXIT, gpa);
                self.store(EXIT + 1, u64::from_le_bytes(data));
                self.store(EXIT + 2, u64::from(len) | u64::from(write) << 32);
                EXIT_MMIO
            }
            UserExit::Hlt => EXIT_HLT,
            UserExit::IrqWindowOpen => EXIT_IRQ_WINDOW_OPEN,
            UserExit::Intr => EXIT_INTR,
            UserExit::Msr { .. }
            | UserExit::Shutdown
            | UserExit::FailEntry { .. }
            | UserExit::InternalError { .. }
            | UserExit::SetTpr
            | UserExit::Exception { .. }
            | UserExit::Debug { .. }
            | UserExit::IoapicEoi { .. }
            | UserExit::MemoryFault { .. }
            | UserExit::Immediate
            | UserExit::Dead
            | UserExit::Again => self.show_rare(exit, error),
        };
        // For every exit (KVM API §5): a VMM with a local APIC of its own works by these.
        self.store(CR8, output.cr8);
        self.store(APIC_BASE, output.apic_base);
        self.store(
            STATUS,
            u64::from(reason)
                | u64::from(output.ready_for_interrupt_injection) << 32
                | u64::from(output.if_flag) << 40
                | u64::from(output.smm) << 48,
        );
    }

    /// The union for exits that are no part of normal work. Returns the reason.
    #[cold]
    fn show_rare(&self, exit: &UserExit, error: &ErrorData) -> u32 {
        match *exit {
            UserExit::FailEntry { reason, cpu } => {
                self.store(EXIT, reason);
                self.store(EXIT + 1, u64::from(cpu));
                EXIT_FAIL_ENTRY
            }
            UserExit::InternalError { suberror } => {
                self.show_words(suberror, error.words());
                EXIT_INTERNAL_ERROR
            }
            UserExit::Exception { vector, error_code } => {
                self.store(EXIT, u64::from(error_code) << 32 | u64::from(vector));
                EXIT_EXCEPTION
            }
            UserExit::Debug { exception, pc, dr6, dr7 } => {
                self.store(EXIT, u64::from(exception));
                self.store(EXIT + 1, pc);
                self.store(EXIT + 2, dr6);
                self.store(EXIT + 3, dr7);
                EXIT_DEBUG
            }
            UserExit::IoapicEoi { vector } => {
                self.store(EXIT, u64::from(vector));
                EXIT_IOAPIC_EOI
            }
            UserExit::MemoryFault { flags, gpa, size } => {
                self.store(EXIT, flags);
                self.store(EXIT + 1, gpa);
                self.store(EXIT + 2, size);
                EXIT_MEMORY_FAULT
            }
            UserExit::Msr { write, reason, index, data } => {
                // `error`, which the VMM sets to have the access refused. Cleared: what it leaves
                // alone is granted.
                self.store(EXIT, 0);
                self.store(EXIT + 1, u64::from(reason) | u64::from(index) << 32);
                self.store(EXIT + 2, data);
                if write { EXIT_X86_WRMSR } else { EXIT_X86_RDMSR }
            }
            UserExit::Shutdown => EXIT_SHUTDOWN,
            UserExit::SetTpr => EXIT_SET_TPR,
            UserExit::Again | UserExit::Dead => EXIT_INTR,
            // Nothing happened that could be told: what the VMM looked at last is still there.
            UserExit::Immediate => self.load(STATUS) as u32,
            UserExit::Io { .. } => EXIT_IO,
            UserExit::Mmio { .. } => EXIT_MMIO,
            UserExit::Hlt => EXIT_HLT,
            UserExit::IrqWindowOpen => EXIT_IRQ_WINDOW_OPEN,
            UserExit::Intr => EXIT_INTR,
        }
    }

    /// A number, how many words follow, the words.
    fn show_words(&self, number: u32, words: &[u64]) {
        // `ndata` beside the suberror: a VMM prints so many words.
        self.store(EXIT, u64::from(number) | (words.len() as u64) << 32);
        for (offset, word) in words.iter().enumerate() {
            self.store((EXIT + 1).wrapping_add(offset), *word);
        }
    }
}
