//! Who observes the guests: the kernel's tracepoints with the names of KVM's, and the histograms of
//! cycles.
//!
//! One word says what is observed. A change of it interrupts every CPU, so a vCPU that reads it
//! with interrupts off before it enters the inner loop need not read it again inside.

use crate::sys;
use x86::Direction;

/// What is observed at the moment, and which time round: two values are equal only if nothing was
/// switched off and on between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observed(u32);

macro_rules! asks {
    ($($(#[$doc:meta])* $name:ident = $bit:literal,)*) => {
        impl Observed {
            $($(#[$doc])*
            #[inline]
            pub fn $name(self) -> bool {
                self.0 & (1 << $bit) != 0
            })*
        }
    };
}

asks! {
    /// The tracepoint kvm_entry: before each entry.
    entry = 0,
    /// The tracepoint kvm_exit: after each exit.
    exit = 1,
    /// The tracepoint kvm_pio: an access of a port.
    pio = 2,
    /// The tracepoint kvm_mmio: an access of device memory.
    mmio = 3,
    /// The tracepoint kvm_msr: RDMSR or WRMSR.
    msr = 4,
    /// The tracepoint kvm_cpuid: a CPUID and its answer.
    cpuid = 5,
    /// The tracepoint kvm_hypercall: a hypercall's number and arguments.
    hypercall = 6,
    /// The tracepoint kvm_inj_virq: an interrupt on its way in.
    inj_virq = 7,
    /// The tracepoint kvm_page_fault: a fault of TDP or of shadow tables.
    page_fault = 8,
    /// Cycles from exit to entry, in histograms.
    cycles = 9,
}

impl Observed {
    /// Whether anything is.
    #[inline]
    pub fn any(self) -> bool {
        // The upper half says which time round it is.
        self.0 & 0xffff != 0
    }

    /// Whether a tracepoint is listened to that tells of what an exit asked for.
    #[inline]
    pub fn details(self) -> bool {
        // Bits 6:2. The others tell of entries, exits, interrupts and faults, and not of what was
        // asked.
        const DETAILS: u32 = 0b0111_1100;
        self.0 & DETAILS != 0
    }
}

/// What is observed now.
#[inline]
pub fn observed() -> Observed {
    Observed(sys::observed())
}

/// What kvm_exit shows; `struct gnt_trace_exit` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitRecord {
    /// RIP of the guest.
    pub rip: u64,
    /// Information on the exit: EXITINFO1.
    pub info1: u64,
    /// More information on the exit: EXITINFO2.
    pub info2: u64,
    /// The hardware's exit code.
    pub code: u32,
    /// The event whose delivery the exit interrupted: EXITINTINFO.
    pub event: u32,
    /// The error code of the event that was being delivered.
    pub event_error: u32,
    /// The id of the vCPU that exited.
    pub vcpu_id: u32,
}
const _: () = assert!(size_of::<ExitRecord>() == 40);

/// What became of a device access in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mmio {
    /// A read that user space has to answer.
    Unsatisfied = 0,
    /// A read, answered.
    Read = 1,
    /// A write by the guest.
    Write = 2,
}

/// An RDMSR or WRMSR of the guest, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrAccess {
    /// RDMSR or WRMSR.
    pub direction: Direction,
    /// Which MSR it is.
    pub index: u32,
    /// What was read or written.
    pub value: u64,
    /// It ended with #GP.
    pub faulted: bool,
}

/// A CPUID of the guest, and what it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidAnswer {
    /// EAX of the question.
    pub leaf: u32,
    /// ECX of the question.
    pub subleaf: u32,
    /// EAX to EDX of the answer.
    pub answer: [u32; 4],
    /// The guest's table has the leaf.
    pub found: bool,
}

// Each function below says something if somebody listens, and may be called in any context in
// which the host's segment state is loaded.

/// The guest is about to be entered.
pub fn entry(vcpu_id: u32, rip: u64) {
    sys::gnt_trace_entry(vcpu_id, rip);
}

/// The guest has left.
pub fn exit(record: &ExitRecord) {
    sys::gnt_trace_exit(record)
}

/// A port access of `count` items of `size` bytes; `value` is the first.
pub fn pio(direction: Direction, port: u16, size: u8, count: u32, value: u32) {
    sys::gnt_trace_pio(direction as u32, port.into(), size.into(), count, value);
}

/// A device access in memory.
pub fn mmio(kind: Mmio, len: usize, gpa: u64, value: u64) {
    sys::gnt_trace_mmio(kind as u32, len as u32, gpa, value);
}

/// RDMSR or WRMSR.
pub fn msr(access: &MsrAccess) {
    let MsrAccess { direction, index, value, faulted } = *access;
    sys::gnt_trace_msr(direction as u32, index, value, faulted.into());
}

/// The guest executed CPUID.
pub fn cpuid(told: &CpuidAnswer) {
    let CpuidAnswer { leaf, subleaf, answer, found } = told;
    sys::gnt_trace_cpuid(*leaf, *subleaf, answer, (*found).into())
}

/// A hypercall: its number and four arguments.
pub fn hypercall(call: &[u64; 5]) {
    sys::gnt_trace_hypercall(call)
}

/// The guest takes an interrupt.
pub fn inj_virq(vector: u8) {
    sys::gnt_trace_inj_virq(vector.into());
}

/// A page fault of the guest that is ours to look at, with the hardware's error code.
pub fn page_fault(vcpu_id: u32, rip: u64, address: u64, error: u64) {
    sys::gnt_trace_page_fault(vcpu_id, rip, address, error);
}
