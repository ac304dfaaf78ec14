//! The neutral form of an exit, and of an event to be injected.

use x86::{Exception, Gpa, Gva, Vector};

use crate::SegmentName;

/// An access of a table register by 64-bit code at CPL 0, with its operand as the CPU tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableAccess {
    /// LGDT of the ten bytes at this linear address.
    Gdtr(Gva),
    /// LIDT of them.
    Idtr(Gva),
    /// LLDT of this selector.
    Ldtr(u16),
    /// LLDT of the selector at this linear address.
    LdtrFrom(Gva),
    /// SLDT or STR into a general register. The CPU does not tell how much of that is written.
    Stored {
        /// LDTR or TR.
        of: SegmentName,
        /// The register's number.
        register: u8,
    },
}

/// Why the guest stopped running. Payloads are those that both backends can give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Exit {
    /// A physical interrupt is pending on this CPU.
    Interrupt,
    /// The time of [`DeadlineWatch::watch`](crate::DeadlineWatch::watch) has come, or the CPU
    /// could not count further.
    Deadline,
    /// A physical NMI was pending.
    Nmi,
    /// A machine check hit while the guest ran.
    MachineCheck,
    /// CPUID.
    Cpuid,
    /// RDMSR.
    Rdmsr,
    /// WRMSR.
    Wrmsr,
    /// VMMCALL or VMCALL.
    Hypercall,
    /// HLT.
    Hlt,
    /// PAUSE filter or PLE.
    Pause,
    /// WBINVD, WBNOINVD or INVD: nothing to be done for a guest with coherent memory.
    CacheFlush,
    /// A port access.
    Io(IoExit),
    /// TDP fault or EPT violation.
    TdpFault(TdpFault),
    /// A page fault on shadow tables.
    PageFault(PageFault),
    /// A control-register access.
    Cr(CrAccess),
    /// A debug-register access.
    DebugReg(DrAccess),
    /// XSETBV.
    Xsetbv,
    /// RDPMC.
    Rdpmc,
    /// The guest can now take an interrupt.
    InterruptWindow,
    /// The guest has lowered its task priority below what an interrupt waits for
    /// ([`Injection::watch_priority`](crate::Injection::watch_priority)).
    PriorityLowered,
    /// The guest has ended this interrupt, which is reported
    /// ([`ServedApic::serve`](crate::ServedApic::serve)).
    Eoi(Vector),
    /// The guest has sent itself an interrupt with a vector that is none.
    IllegalSelfIpi,
    /// The guest begins an IRET while an NMI was being handled.
    Iret,
    /// The guest can now take an NMI.
    NmiWindow,
    /// RSM.
    Rsm,
    /// An intercepted exception.
    Exception(Exception),
    /// MONITOR or MWAIT, of a guest that is not to stop the CPU.
    Mwait,
    /// An instruction that this guest does not have: #UD.
    Undefined,
    /// An instruction for hypervisors, of a guest that may be one.
    Virtualization,
    /// INVLPG, with its linear address where the CPU tells it; `None`: decode.
    Invlpg(Option<Gva>),
    /// INVPCID.
    Invpcid,
    /// LGDT, LIDT, SGDT or SIDT, of a guest whose CR4.UMIP is made by exits.
    GdtrIdtr,
    /// LLDT, LTR, SLDT or STR of such a guest.
    LdtrTr,
    /// A task switch through a task gate or TSS.
    TaskSwitch(TaskSwitchExit),
    /// Triple fault.
    Shutdown,
    /// An INIT or SMI signal hit this CPU; the host handles it.
    HostSignal,
    /// The log of written pages is full ([`PageLog::set_logging`](crate::PageLog::set_logging)).
    PageLogFull,
    /// The hardware refused the control block.
    Refused,
    /// Anything else, with the raw code.
    Unknown(u64),
}

/// A port access (APM vol. 2 §15.10.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoExit {
    /// The port.
    pub port: u16,
    /// 1, 2 or 4 bytes.
    pub size: u8,
    /// IN rather than OUT.
    pub input: bool,
    /// INS or OUTS.
    pub string: bool,
    /// Has a REP prefix.
    pub rep: bool,
    /// RIP of the next instruction where the CPU gives it (0 otherwise).
    pub next_rip: u64,
}

/// A TDP fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TdpFault {
    /// The guest-physical address.
    pub gpa: Gpa,
    /// A write.
    pub write: bool,
    /// An instruction fetch.
    pub fetch: bool,
    /// The TDP entry was present: a permission was missing.
    pub present: bool,
    /// A reserved bit was set in a TDP entry.
    pub reserved: bool,
    /// The fault was on the access itself and not on the guest's page tables.
    pub final_access: bool,
}

/// A page fault that the hardware took on shadow tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// The linear address.
    pub address: Gva,
    /// The error code, as the hardware makes it for the shadow tables.
    pub code: u32,
}

/// A control-register access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrAccess {
    /// 0, 3, 4 or 8.
    pub cr: u8,
    /// A write.
    pub write: bool,
    /// Index of the general register where the CPU tells it; `None`: decode.
    pub gpr: Option<u8>,
}

/// A debug-register access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrAccess {
    /// 0 to 7; 4 and 5 may stand for 6 and 7.
    pub dr: u8,
    /// A write.
    pub write: bool,
}

/// A task switch that the hardware leaves to the hypervisor, after its checks of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskSwitchExit {
    /// Selector of the new task's TSS.
    pub selector: u16,
    /// What asked for it.
    pub source: TaskSource,
}

/// What asks for a task switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TaskSource {
    Call,
    Iret,
    Jmp,
    /// An event through a task gate of the IDT.
    Gate,
}

/// An event to be injected into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// External interrupt.
    Interrupt(Vector),
    /// NMI.
    Nmi,
    /// Hardware exception.
    Exception(Exception),
    /// INT n, with the address of the next instruction where known.
    Software(Vector),
}
