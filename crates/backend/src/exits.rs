//! What ended the guest's run, and what it tells.

use crate::{Event, Exit, Gprs, TableAccess};

/// The exit that ended the last [`enter`](crate::Turn::enter).
pub trait Exits: Sized {
    /// The exit as the hardware names it.
    type Raw: Copy;

    /// Whether the registers after a triple fault are what they were before it.
    const KEEPS_STATE_AT_SHUTDOWN: bool;

    /// The last byte of the CPU's hypercall: in it alone VMMCALL and VMCALL differ.
    const HYPERCALL: u8;

    /// The CPU has SYSCALL outside of 64-bit code, too.
    const HAS_LEGACY_SYSCALL: bool;

    /// The exit before it has a neutral form. Whether an exit of a guest's guest is the guest hypervisor's is
    /// to be asked of this, and of the control block: the neutral form is our own hypervisor's.
    fn raw(&self) -> Self::Raw;
    /// The exit in its neutral form.
    fn exit(&self) -> Exit;
    /// Raw exit code and information, for reports.
    fn exit_raw(&self) -> [u64; 3];
    /// What the hardware says of the exit, for tracing: code, two words of information, the
    /// event whose delivery it interrupted and that event's error code.
    fn exit_record(&self) -> (u64, [u64; 2], u32, u32);

    /// The access that made [`Exit::GdtrIdtr`] or [`Exit::LdtrTr`], with these registers. `None`: it is another
    /// instruction, the guest is not in 64-bit mode at CPL 0, or the operand's address faults: the instruction is to be
    /// decoded.
    fn table_access(&self, gprs: &Gprs) -> Option<TableAccess>;

    /// Whether the exit interrupted the delivery of an event.
    fn was_delivering(&self) -> bool;
    /// The event whose delivery the exit interrupted; it must be injected again.
    fn interrupted_delivery(&self) -> Option<Event>;
    /// The interrupted delivery was dealt with: there is none any more.
    fn forget_interrupted_delivery(&mut self);

    /// [`Exit::Refused`] is about to be told to user space, which may have the guest run on: nothing counts as loaded by that
    /// entry.
    fn distrust_refused(&mut self) {}

    /// After [`Exit::Refused`]: whether the guest is in a state that the CPU cannot run, and is to be executed in
    /// software until an entry is possible.
    fn is_interpreted(&self) -> bool;
}
