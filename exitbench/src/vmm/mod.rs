//! A small virtual machine monitor on the rust-vmm crates: just enough of one for the measuring
//! guests of `run` and the Linux guest of `boot`. Set-up calls come in the order in which real
//! monitors make them, and only ioctls that every one of them uses.

pub mod cpuid;
pub mod descriptors;
pub mod failure;
pub mod hypervisor;
pub mod long_mode;
pub mod memory;
pub mod page_tables;
pub mod signal;
pub mod statistics;
pub mod vm;
