//! The guest's CPUID: what the host can offer, what the VMM chose of it, and the answer to a
//! CPUID exit.
//!
//! [`Supported`] is made once at load and answers KVM_GET_SUPPORTED_CPUID. [`GuestCpuid`] belongs
//! to a vCPU: it holds what KVM_SET_CPUID2 set, the facts that follow from it, and the lookup of
//! the exit path, which executes no CPUID on the host.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod derived;
mod dynamic;
mod entry;
mod guest;
mod hyperv;
mod lines;
mod lookup;
mod masks;
mod supported;
mod words;

pub use dynamic::DynamicInputs;
pub use entry::{Entry, Error, MAX_ENTRIES};
pub use guest::GuestCpuid;
pub use hyperv::{ENLIGHTENED_VERSIONS, HyperV, Shown};
pub use masks::PV_FEATURES;
pub use supported::{EMULATED, HostFacts, Supported};
pub use words::FeatureWords;
