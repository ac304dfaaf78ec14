//! A virtual machine: its memory, its vCPUs as others see them, its interrupt controllers, its
//! time. What runs a vCPU lives one crate above.
//!
//! The module [`mode`] alone has `unsafe`: two promises to `mmu`, side by side with what keeps them.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;

/// The words that CPUs share. The models of `tests/models` compile files of this crate with others in their place.
mod atomic {
    pub(crate) use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
}

pub mod debug;
pub mod device_reach;
pub mod irq;
pub mod kick;
pub mod memory;
pub mod mode;
pub mod msr_filter;
pub mod settings;
pub mod statistics;
pub mod time;
pub mod vcpu_shared;
pub mod vcpus;
pub mod vm;

pub use vm::{Vm, VmRef};
