//! The page shared with a vCPU's VMM, word by word.
//!
//! User space may write to it at any moment. So nothing is ever borrowed from it: each word is
//! loaded once, and stored whole. No word of ours holds a byte that is user space's to write, hence
//! no store of ours can undo one of theirs (KVM API §5).

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::exit::{ErrorData, RunInput, RunOutput, UserExit};
use crate::uapi::run::*;

/// Word with request_interrupt_window and immediate_exit: user space's.
const REQUEST: usize = 0;
/// Word with exit_reason, ready_for_interrupt_injection, if_flag and flags: ours.
const STATUS: usize = 1;
const CR8: usize = 2;
const APIC_BASE: usize = 3;
/// First word of the union.
const EXIT: usize = 4;
const VALID_REGS: usize = 36;
const DIRTY_REGS: usize = 37;

/// First word of the shared general registers.
pub const SYNC_REGS: usize = 38;
/// First word of the shared system registers.
pub const SYNC_SREGS: usize = 56;
/// First word of the shared events.
pub const SYNC_EVENTS: usize = 95;

/// Accessor of a page of a vCPU's mapping: the first, with [`KvmRun`], or the second, with the data
/// of port I/O.
#[derive(Clone, Copy)]
pub struct RunPage<'a>(&'a [AtomicU64; 512]);

impl core::fmt::Debug for RunPage<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "RunPage({:p})", self.0)
    }
}

impl<'a> RunPage<'a> {
    /// The page with these words.
    pub const fn new(words: &'a [AtomicU64; 512]) -> Self {
        Self(words)
    }

    #[inline]
    fn load(&self, index: usize) -> u64 {
        self.0.get(index).map_or(0, |word| word.load(Relaxed))
    }

    #[inline]
    fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.0.get(index) {
            word.store(value, Relaxed);
        }
    }

    /// What the VMM asks. `own_cr8`: the VM has no in-kernel local APIC, so that CR8 is the VMM's.
    /// `None` where that CR8 has a reserved bit set.
    #[inline]
    pub fn input(&self, own_cr8: bool) -> Option<RunInput> {
        let [request_interrupt_window, immediate_exit, ..] = self.load(REQUEST).to_le_bytes();
        let cr8 = if own_cr8 {
            let cr8 = self.load(CR8);
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
            mmio_data: self.load(EXIT + 1).to_le_bytes(),
        })
    }

    /// The answer to an MSR exit: whether the access is refused, and the value read.
    pub fn msr_answer(&self) -> (bool, u64) {
        let [error, ..] = self.load(EXIT).to_le_bytes();
        (error != 0, self.load(EXIT + 2))
    }

    /// The first 8 bytes of the page, where the data of port I/O lies.
    #[inline]
    pub fn first(&self) -> [u8; 8] {
        self.load(0).to_le_bytes()
    }

    /// Sets them.
    #[inline]
    pub fn set_first(&self, bytes: [u8; 8]) {
        self.store(0, u64::from_le_bytes(bytes));
    }

    /// Register classes that the VMM wants to see and those it changed (KVM_CAP_SYNC_REGS).
    #[inline]
    pub fn shared_registers(&self) -> (u64, u64) {
        (self.load(VALID_REGS), self.load(DIRTY_REGS))
    }

    /// Tells that the changed registers were taken.
    pub fn clear_dirty_registers(&self) {
        self.store(DIRTY_REGS, 0);
    }

    /// The structure at word `index`, for the shared registers.
    pub fn read<T: FromBytes + IntoBytes>(&self, index: usize) -> T {
        let mut value = T::new_zeroed();
        for (offset, bytes) in value.as_mut_bytes().chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&self.load(index.wrapping_add(offset)).to_le_bytes());
        }
        value
    }

    /// Puts a structure at word `index`, for the shared registers.
    pub fn write<T: IntoBytes + Immutable>(&self, index: usize, value: &T) {
        for (offset, bytes) in value.as_bytes().chunks_exact(8).enumerate() {
            if let Ok(bytes) = bytes.try_into() {
                self.store(index.wrapping_add(offset), u64::from_le_bytes(bytes));
            }
        }
    }

    /// Shows why KVM_RUN returns.
    #[inline(always)]
    pub fn show(&self, exit: &UserExit, output: &RunOutput, error: &ErrorData) {
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
        self.store(EXIT, u64::from(number) | (words.len() as u64) << 32);
        for (offset, word) in words.iter().enumerate() {
            self.store((EXIT + 1).wrapping_add(offset), *word);
        }
    }
}
