//! Workloads of nested virtualization: the guest is a small hypervisor of its own (L1), and one operation is a round
//! trip from its guest (L2), which does one instruction that L1 intercepts, and back.
//!
//! L1 shares its page tables with L2 and answers an exit by moving RIP past the instruction, so that what is
//! measured is the hypervisor below.

use super::workload::Workload;

mod svm;

/// Every nested workload, in the order in which they run.
pub const ALL: &[Workload] = &[svm::CPUID, svm::VMMCALL, svm::HLT, svm::WRMSR, svm::PIO];
