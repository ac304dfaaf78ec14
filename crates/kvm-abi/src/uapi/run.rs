//! `struct kvm_run`, the page that a vCPU shares with its VMM (KVM API §5).
//!
//! The page is never viewed as a structure, since user space writes to it while we read: `run_page`
//! reads and writes its words. What stands here are offsets, exit reasons and the structure as
//! documentation and for the layout test.

use super::registers::{KvmRegs, KvmSregs};
use super::vcpu_state::KvmVcpuEvents;

uapi! {
    /// The head of the shared page. `exit` is the union over the exit reasons.
    struct KvmRun {
        request_interrupt_window: u8,
        immediate_exit: u8,
        padding1: [u8; 6],
        // The word before is user space's to write, this one ours: no word has bytes of both.
        exit_reason: u32,
        ready_for_interrupt_injection: u8,
        if_flag: u8,
        flags: u16,
        cr8: u64,
        apic_base: u64,
        // The union as words: what lies where is said by whoever shows the exit.
        exit: [u64; 32],
        kvm_valid_regs: u64,
        kvm_dirty_regs: u64,
        sync: KvmSyncRegs,
        // Two KiB by the API, whatever is used of it: what is behind must not move when classes are
        // added.
        sync_padding: [u8; 2048 - size_of::<KvmSyncRegs>()],
    }

    /// Registers shared through the page (KVM_CAP_SYNC_REGS).
    struct KvmSyncRegs {
        regs: KvmRegs,
        sregs: KvmSregs,
        events: KvmVcpuEvents,
    }
}

/// Bytes of the union in `struct kvm_irqchip`.
pub const KVM_IRQCHIP_BYTES: usize = 512;

/// Where the port I/O data page lies in the mapping of a vCPU file, in pages.
// Pages of the mapping of a vCPU, behind kvm_run.
pub const PIO_PAGE_OFFSET: u64 = 1;
/// Where the ring of coalesced MMIO lies there, in pages: the same page for all vCPUs of a VM.
pub const COALESCED_MMIO_PAGE_OFFSET: u64 = 2;
/// What KVM_GET_VCPU_MMAP_SIZE answers, in bytes: the run page, the port I/O page, the ring of
/// coalesced MMIO.
pub const VCPU_MMAP_SIZE: u64 = 3 * 4096;

// The header's numbers, of exits that are never made here as well.
pub const EXIT_UNKNOWN: u32 = 0;
pub const EXIT_EXCEPTION: u32 = 1;
pub const EXIT_IO: u32 = 2;
pub const EXIT_HYPERCALL: u32 = 3;
pub const EXIT_DEBUG: u32 = 4;
pub const EXIT_HLT: u32 = 5;
pub const EXIT_MMIO: u32 = 6;
pub const EXIT_IRQ_WINDOW_OPEN: u32 = 7;
pub const EXIT_SHUTDOWN: u32 = 8;
pub const EXIT_FAIL_ENTRY: u32 = 9;
pub const EXIT_INTR: u32 = 10;
pub const EXIT_SET_TPR: u32 = 11;
pub const EXIT_TPR_ACCESS: u32 = 12;
pub const EXIT_NMI: u32 = 16;
pub const EXIT_INTERNAL_ERROR: u32 = 17;
pub const EXIT_SYSTEM_EVENT: u32 = 24;
pub const EXIT_IOAPIC_EOI: u32 = 26;
pub const EXIT_X86_RDMSR: u32 = 29;
pub const EXIT_X86_WRMSR: u32 = 30;
pub const EXIT_X86_BUS_LOCK: u32 = 33;
pub const EXIT_MEMORY_FAULT: u32 = 39;

/// Direction of KVM_EXIT_IO: the guest reads.
pub const EXIT_IO_IN: u8 = 0;
/// Direction of KVM_EXIT_IO: the guest writes.
pub const EXIT_IO_OUT: u8 = 1;

pub const INTERNAL_ERROR_EMULATION: u32 = 1;
pub const INTERNAL_ERROR_SIMUL_EX: u32 = 2;
pub const INTERNAL_ERROR_DELIVERY_EV: u32 = 3;
pub const INTERNAL_ERROR_UNEXPECTED_EXIT_REASON: u32 = 4;
/// Flag in word 0 of an emulation failure: instruction bytes follow.
pub const INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES: u64 = 1;

pub const SYSTEM_EVENT_SHUTDOWN: u32 = 1;
pub const SYSTEM_EVENT_RESET: u32 = 2;
pub const SYSTEM_EVENT_CRASH: u32 = 3;

pub const MSR_EXIT_REASON_INVAL: u32 = 1;
pub const MSR_EXIT_REASON_UNKNOWN: u32 = 2;
pub const MSR_EXIT_REASON_FILTER: u32 = 4;
/// All of them.
pub const MSR_EXIT_REASONS: u64 = 7;

/// `kvm_run.flags`: the vCPU is in system-management mode.
pub const RUN_X86_SMM: u16 = 1;

/// `kvm_valid_regs`, `kvm_dirty_regs`: general registers.
pub const SYNC_X86_REGS: u64 = 1;
/// `kvm_valid_regs`: the system registers.
pub const SYNC_X86_SREGS: u64 = 2;
/// `kvm_valid_regs`: the events, as KVM_GET_VCPU_EVENTS has them.
pub const SYNC_X86_EVENTS: u64 = 4;
/// Every class that we share.
pub const SYNC_X86_VALID_FIELDS: u64 = 7;
