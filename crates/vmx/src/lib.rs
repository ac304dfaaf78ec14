//! The VMX backend: VMCS, controls, address-space ids, world switch, exit decoding.
//!
//! SDM vol. 3 chapters 24 to 29 and appendix A. The page that the hardware shares is never looked into:
//! all access to a VMCS is by VMREAD and VMWRITE.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod controls;
mod current;
pub mod enter;
pub mod exits;
pub mod features;
mod fields;
mod host_state;
pub mod inject;
mod live;
pub mod mitigations;
pub mod page_log;
pub mod percpu;
pub mod permission;
pub mod segments;
mod state;

pub use enter::Vmx;
pub use features::{Controls, Features, Unusable};
