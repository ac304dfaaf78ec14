//! What a vCPU is between two runs: registers, MSRs, CPUID, extended state, debugging, and the mode of
//! system management; and how a VMM reads and sets it.

pub(crate) mod cpuid_state;
pub(crate) mod debug;
pub(crate) mod extended;
pub(crate) mod msrs;
pub mod registers;
pub(crate) mod settings;
pub mod smm;
