//! The architecture's facts as types: registers, MSRs, CPUID leaves, descriptors, page-table
//! bits, exceptions, control-block layouts. No state and no I/O lives here.
#![no_std]
#![forbid(unsafe_code)]

pub mod addr;
pub mod exception;

pub use addr::{ApicId, Asid, Gfn, Gpa, Gva, Hpa, Hva, Pfn, Tsc, Vector};
pub use exception::Exception;
