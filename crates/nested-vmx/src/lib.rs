//! VMX as a guest's hypervisor (L1) sees it: the VMCS12, capabilities, operands of instructions.
//!
//! Pure: no CPU and no kernel. Guest memory is behind [`GuestMemory`]. What L1 wrote into memory is read once,
//! into a private copy ([`Vmcs12`]), and checked there.
//!
//! L0 is this hypervisor, L1 its guest, L2 a guest of L1's. SDM vol. 3C chapters 24 to 31.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod capabilities;
mod memory;
pub mod operand;
mod vmcs12;

pub use capabilities::Capabilities;
pub use memory::{GuestMemory, Outside};
pub use vmcs12::Vmcs12;
