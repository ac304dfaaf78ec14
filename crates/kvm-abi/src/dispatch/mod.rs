//! The commands of the three kinds of files: /dev/kvm, a VM, a vCPU.
//!
//! `commands` picks the handler by the table of the interface. A handler takes the argument as user
//! space gave it, copies in, checks, calls one of the traits of [`ops`], and copies out. The order of the
//! checks is that of stock KVM, since a VMM may meet two errors at once. A command that fails leaves
//! everything as it was, but for KVM_SET_MSRS, which by contract stops at the first MSR that is refused.
//!
//! A command that a file does not know is `ENOTTY`, on all three. (Stock KVM says `EINVAL` on
//! /dev/kvm and on a vCPU, and `ENOTTY` on a VM; the KVM API names neither.)
//!
//! Why an argument is copied in once, whole, and only the copy is looked at: other threads of the VMM write to it
//! while we read. What was checked in user memory and read again is something else by then. The length of an array
//! comes from the copied head, too.
//!
//! Why large structures are in boxes: the kernel's stack is 16 KiB, all frames above count, and a `struct
//! kvm_xsave` by value would be a quarter of it.
//!
//! Why the traits and not the vCPU itself: errno and layout are decided here and can be tested with a mock, without
//! memory, tables or a CPU (`tests/dispatch`).

mod commands;
mod interrupts;
mod lists;
mod memory;
mod msr_filter;
mod nested;
pub mod ops;
mod run;
mod setting;
mod state;
mod system;
mod vm;

pub use commands::{system, vcpu, vm, vm_compat};
pub use ops::{
    Irqchip, MemoryRegion, MsrRefused, Setting, SlotId, SystemOps, VcpuFile, VcpuOps, VmOps,
};

use crate::errno::Errno;

/// What a command returns: 0, a count, a frequency or a file descriptor.
pub type Reply = Result<i32, Errno>;

/// What a command that returns 0 ends with.
pub type Done = Result<(), Errno>;

/// A reply as the kernel's ioctl returns it.
pub const fn code(reply: Reply) -> i64 {
    match reply {
        // Never negative: that would be an errno.
        Ok(value) => value as i64,
        Err(errno) => errno.code(),
    }
}
