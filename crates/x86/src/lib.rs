//! The architecture's facts as types: registers, MSRs, CPUID leaves, descriptors, page-table
//! bits, exceptions, control-block layouts. No state and no I/O lives here.
#![no_std]
#![forbid(unsafe_code)]

pub mod addr;
pub mod apic;
pub mod cpuid;
pub mod debug;
pub mod direction;
pub mod exception;
pub mod msr;
pub mod paging;
pub mod reg;
pub mod segment;
pub mod vmcb;
pub mod vmcs;

pub use addr::{ApicId, Asid, Gfn, Gpa, Gva, Hpa, Hva, Pfn, Tsc, Vector};
pub use debug::{Dr6, Dr7};
pub use direction::{Direction, Directions};
pub use exception::Exception;
pub use reg::{Cr0, Cr0Write, Cr4, Efer, Gpr, Reset, Rflags, Xcr0};
pub use segment::{DescriptorTable, Segment};
