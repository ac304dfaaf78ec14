//! Why KVM_RUN returned, in neutral form, and what the VMM asked when it called. `kvm-abi` writes
//! the one into the shared page and reads the other from it (KVM API §5).

use stats::VcpuCount;

/// First word of a failed emulation's data: instruction bytes follow.
const INSTRUCTION_BYTES_FOLLOW: u64 = 1;

/// KVM_INTERNAL_ERROR_EMULATION.
pub const ERROR_EMULATION: u32 = 1;
/// KVM_INTERNAL_ERROR_DELIVERY_EV.
pub const ERROR_DELIVERY: u32 = 3;
/// KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON.
pub const ERROR_UNEXPECTED_EXIT: u32 = 4;

/// What user space wrote into the page before KVM_RUN. Each word was read once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunInput {
    /// Return as soon as an interrupt could be injected (VMs whose PIC is the VMM's).
    pub request_interrupt_window: bool,
    /// Complete what the last exit left open, then return with EINTR.
    pub immediate_exit: bool,
    /// CR8 for VMs without in-kernel irqchip: 0 to 15. `None` where the local APIC is ours.
    pub cr8: Option<u8>,
    /// The VMM's answer to an MMIO read, in guest byte order. Garbage after any other exit.
    pub mmio_data: [u8; 8],
}

/// What a return from KVM_RUN shows beside the reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOutput {
    /// An interrupt could be injected now; always so with an in-kernel PIC.
    pub ready_for_interrupt_injection: bool,
    /// RFLAGS.IF.
    pub if_flag: bool,
    /// CR8.
    pub cr8: u64,
    /// The APIC base MSR.
    pub apic_base: u64,
    /// The vCPU is in system-management mode.
    pub smm: bool,
}

/// Words that accompany an internal error. They are no part of [`UserExit`], which every return from KVM_RUN
/// moves about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorData {
    words: [u64; Self::CAPACITY],
    count: u8,
}

impl ErrorData {
    /// Words that fit.
    pub const CAPACITY: usize = 8;

    /// The first [`Self::CAPACITY`] of `words`.
    pub fn new(words: &[u64]) -> Self {
        let mut data = Self::default();
        for (to, from) in data.words.iter_mut().zip(words) {
            *to = *from;
            data.count = data.count.wrapping_add(1);
        }
        data
    }

    /// The data of a failed emulation: that bytes follow, their number, the bytes themselves (KVM API §5,
    /// `emulation_failure`), then up to five words on the exit.
    pub fn emulation(insn: &[u8], exit: &[u64]) -> Self {
        // An instruction has at most 15 bytes. With their number before them they fill two words.
        let mut bytes = [0u8; 16];
        let mut len = 0u8;
        let mut rest = bytes.iter_mut();
        let _size = rest.next();
        for (to, from) in rest.zip(insn) {
            *to = *from;
            len = len.wrapping_add(1);
        }
        let [size, ..] = &mut bytes;
        *size = len;
        let packed = u128::from_le_bytes(bytes);
        let mut data = Self::default();
        let head = [INSTRUCTION_BYTES_FOLLOW, packed as u64, (packed >> 64) as u64];
        for (to, from) in data.words.iter_mut().zip(head.iter().chain(exit)) {
            *to = *from;
            data.count = data.count.wrapping_add(1);
        }
        data
    }

    /// The words that accompany the error, as many as there are.
    pub fn words(&self) -> &[u64] {
        self.words.get(..usize::from(self.count)).unwrap_or(&[])
    }
}

/// Why the vCPU left for user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserExit {
    /// Port I/O; the data lies in the port I/O page, `count` items of `size` bytes.
    Io {
        /// The guest writes.
        write: bool,
        /// 1, 2 or 4 bytes.
        size: u8,
        /// First port.
        port: u16,
        /// Items: more than one for a string instruction.
        count: u32,
    },
    /// A memory access where no slot is.
    Mmio {
        /// Guest-physical address.
        gpa: u64,
        /// 1 to 8 bytes.
        len: u8,
        /// The guest writes `data`.
        write: bool,
        /// What it writes.
        data: [u8; 8],
    },
    /// HLT in a VM without in-kernel irqchip.
    Hlt,
    /// An access to an MSR that the guest may not do, or that does nothing here.
    Msr {
        /// WRMSR.
        write: bool,
        /// `KVM_MSR_EXIT_REASON_*`.
        reason: u32,
        /// The MSR.
        index: u32,
        /// What is written.
        data: u64,
    },
    /// Triple fault.
    Shutdown,
    /// The hardware refused to run the state.
    FailEntry {
        /// The hardware's reason.
        reason: u64,
        /// The physical CPU.
        cpu: u32,
    },
    /// We cannot go on; the vCPU has the details ([`crate::Vcpu::error_data`]).
    InternalError {
        /// `INTERNAL_ERROR_*`.
        suberror: u32,
    },
    /// The interrupt window that was asked for is open.
    IrqWindowOpen,
    /// The guest lowered CR8 in a VM without in-kernel irqchip.
    SetTpr,
    /// An exception that the host made of what the guest did, and that is not the guest's.
    Exception {
        /// Its vector.
        vector: u32,
        /// Its error code.
        error_code: u32,
    },
    /// A debug event that KVM_SET_GUEST_DEBUG asked for.
    Debug {
        /// Vector: 1 or 3.
        exception: u32,
        /// Linear address of the instruction.
        pc: u64,
        /// DR6.
        dr6: u64,
        /// DR7.
        dr7: u64,
    },
    /// EOI of a level-triggered vector whose I/O APIC is the VMM's.
    IoapicEoi {
        /// The vector.
        vector: u8,
    },
    /// An access to memory that has no mapping in the VMM; KVM_RUN fails with EFAULT.
    MemoryFault {
        /// What was special about the access.
        flags: u64,
        /// Guest-physical address.
        gpa: u64,
        /// Bytes.
        size: u64,
    },
    /// A signal is pending; KVM_RUN fails with EINTR.
    Intr,
    /// Immediate exit was asked for; KVM_RUN fails with EINTR and the reason of the last exit stays.
    Immediate,
    /// The VM is dead; KVM_RUN fails with EIO.
    Dead,
    /// An application processor was started: call again. KVM_RUN fails with EAGAIN.
    Again,
}

impl UserExit {
    /// What a return for this is counted as, beside all of them.
    #[inline(always)]
    pub(crate) const fn counted_as(&self) -> Option<VcpuCount> {
        match self {
            Self::Mmio { .. } => Some(VcpuCount::MmioExits),
            Self::Intr => Some(VcpuCount::SignalExits),
            Self::IrqWindowOpen => Some(VcpuCount::RequestIrqExits),
            // Of the others only their sum is counted.
            _ => None,
        }
    }
}
