//! VMX as a guest's hypervisor (L1) sees it: the VMCS12, the instructions, the checks of a VM entry, what
//! the hardware's VMCS (vmcs02) must hold while L1's guest (L2) runs, and whose an exit of L2 is.
//!
//! Pure: no CPU and no kernel. Guest memory is behind [`GuestMemory`], the hardware's VMCS behind
//! [`merge::Fields`] and [`leave::Exit`]. What L1 wrote into memory is read once, into a private copy
//! ([`Vmcs12`]), and checked there.
//!
//! L0 is this hypervisor, vmcs01 the VMCS with which it runs L1. SDM vol. 3C chapters 24 to 31.
#![no_std]
#![forbid(unsafe_code)]

// What the tests beside the crate share with those within it names the crate as they do.
#[cfg(any(test, feature = "testing"))]
extern crate self as gannet_nested_vmx;
#[cfg(test)]
extern crate std;

pub mod apic_page;
pub mod capabilities;
pub mod checks;
pub mod events;
#[cfg(any(test, feature = "testing"))]
pub mod example;
pub mod leave;
pub mod machine;
mod memory;
pub mod merge;
pub mod operand;
pub mod outcome;
pub mod page_log;
pub mod priority;
pub mod reflect;
pub mod saved;
#[cfg(test)]
mod testing;
pub mod virtual_interrupts;
mod vmcs12;

pub use capabilities::Capabilities;
pub use machine::Machine;
pub use memory::{GuestMemory, Outside};
pub use outcome::{EntryFailure, Fail};
pub use vmcs12::Vmcs12;
