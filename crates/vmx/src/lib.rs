//! The VMX backend: VMCS, controls, address-space ids, world switch, exit decoding.
//!
//! SDM vol. 3 chapters 24 to 29 and appendix A. The page that the hardware shares is never looked into:
//! all access to a VMCS is by VMREAD and VMWRITE.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod apic_page;
mod apicv;
mod clock;
mod controls;
mod cpus;
mod enter;
mod errata;
pub mod exits;
pub mod features;
mod fields;
mod host_registers;
mod host_state;
mod host_words;
pub mod inject;
mod live;
pub mod mitigations;
mod msrs;
mod nested;
mod owned;
pub mod page_log;
mod paging;
mod passed;
pub mod percpu;
pub mod permission;
mod preemption_timer;
mod registers;
pub mod segments;
mod shadow_vmcs;
mod speculation;
pub mod state;
mod table_access;
mod vmcs;

pub use features::{Controls, Features, Unusable};
pub use state::Vmx;
