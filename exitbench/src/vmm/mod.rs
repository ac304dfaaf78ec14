//! A small virtual machine monitor on the rust-vmm crates: just enough of one for the measuring
//! guests of `run` and the Linux guest of `boot`. Set-up calls come in the order in which real
//! monitors make them, and only ioctls that every one of them uses. What a guest starts in is the
//! crate `guest_machine`, which labtests has as well.

pub mod affinity;
pub mod cpuid;
pub mod failure;
pub mod hypervisor;
pub mod long_mode;
pub mod memory;
pub mod signal;
pub mod statistics;
pub mod vm;
