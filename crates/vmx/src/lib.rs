//! The VMX backend: VMCS, controls, address-space ids, world switch, exit decoding.
//!
//! SDM vol. 3 chapters 24 to 29 and appendix A.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;

pub mod features;
pub mod mitigations;
pub mod page_log;
pub mod percpu;

pub use features::{Controls, Features, Unusable};
