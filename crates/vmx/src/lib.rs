//! The VMX backend: VMCS, controls, address-space ids, world switch, exit decoding.
//!
//! SDM vol. 3 chapters 24 to 29 and appendix A. The page that the hardware shares is never looked into:
//! all access to a VMCS is by VMREAD and VMWRITE.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod apicv;
mod controls;
pub mod enter;
mod errata;
pub mod exits;
pub mod features;
mod fields;
mod host_state;
pub mod inject;
mod live;
pub mod mitigations;
pub mod page_log;
mod paging;
pub mod percpu;
pub mod permission;
mod preemption_timer;
pub mod segments;
mod speculation;
mod state;
mod vmcs;

pub use enter::Vmx;
pub use features::{Controls, Features, Unusable};
