//! The commands of the three kinds of files: /dev/kvm, a VM, a vCPU.
//!
//! Each entry takes the command and its argument as user space gave them, copies in, checks, calls
//! one of the traits of [`ops`], and copies out. The order of the checks is that of stock KVM,
//! since a VMM may meet two errors at once. A command that fails leaves everything as it was, but
//! for KVM_SET_MSRS, which by contract stops at the first MSR that is refused.
//!
//! A command that a file does not know is `ENOTTY`, on all three. (Stock KVM says `EINVAL` on
//! /dev/kvm and on a vCPU, and `ENOTTY` on a VM; the KVM API names neither.)

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
mod vcpu;
mod vm;

pub use ops::{
    Irqchip, MemoryRegion, MsrRefused, Setting, SlotId, SystemOps, VcpuFile, VcpuOps, VmOps,
};
pub use system::system;
pub use vcpu::vcpu;
pub use vm::{vm, vm_compat};

use crate::errno::Errno;

/// What a command returns: 0, a count, a frequency or a file descriptor.
pub type Reply = Result<i32, Errno>;

/// What an unknown command gets.
const UNKNOWN: Errno = Errno::ENOTTY;

/// A reply as the kernel's ioctl returns it.
pub const fn code(reply: Reply) -> i64 {
    match reply {
        Ok(value) => value as i64,
        Err(errno) => errno.code(),
    }
}
