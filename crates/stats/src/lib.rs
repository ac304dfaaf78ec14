//! What is counted, and how it is described to whoever reads it.
//!
//! [`VcpuStats`] and [`VmStats`] are the counters themselves: shared by reference, atomic, never
//! locked. A vCPU's are written by its thread alone, so that counting is a load, an addition and a
//! store of one word; a VM's are added to from any CPU. [`table`] names every statistic, with the
//! names, order and meaning of KVM where KVM has it, and says where its words come from; the binary
//! statistics file and debugfs are both made from it.
#![no_std]
#![forbid(unsafe_code)]

pub mod counter;
pub mod histogram;
pub mod reason;
pub mod table;
pub mod vcpu;
pub mod vm;

pub use counter::{Counter, SharedCounter};
pub use histogram::{BUCKETS, Histogram};
pub use reason::{REASONS, Reason};
pub use table::{Desc, Kind, Unit};
pub use vcpu::{VcpuCount, VcpuStats};
pub use vm::{VmCount, VmStats};
