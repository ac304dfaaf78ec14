//! MSR policy: which floor owns an MSR, which values it takes, and the state of those that need
//! neither hardware nor another part of the hypervisor.
//!
//! All of it follows from one table, `table.rs`: [`classify`] sends an index to its owner, [`MsrStore`]
//! serves [`Class::Store`] and [`Class::Outside`], [`lists`] names what a VMM saves and restores, and
//! [`rows`] is the table as values.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[macro_use]
mod table;

mod class;
mod effect;
mod facts;
pub mod lists;
mod mce;
mod mtrr;
pub mod rows;
mod store;
mod validity;

pub use class::{Class, classify, holds_address};
pub use effect::Effect;
pub use facts::{Flaws, GuestFacts, HostMsrs, VMX_COUNT};
pub use mce::{MAX_BANKS, McReport, McVerdict};
pub use store::MsrStore;
pub use validity::{pat_is_valid, spec_ctrl_is_valid};

/// The MSR does not exist for this guest, or does not take the value: #GP(0) for a guest, "not
/// processed" for KVM_GET_MSRS and KVM_SET_MSRS. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Who accesses an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The guest, by RDMSR or WRMSR: what its CPUID lacks does not exist.
    Guest,
    /// The VMM, by KVM_GET_MSRS or KVM_SET_MSRS, which ask no questions of the guest's CPUID.
    Vmm,
}

/// Out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory;
