//! The CPUs of a VMCS: the one that may hold parts of it, and the one whose words are in it.

use core::cell::Cell;

/// Where a VMCS is active, and where it ran.
#[derive(Debug)]
pub(crate) struct Cpus {
    /// The CPU on which it is active, and the generation of that CPU's VMX operation.
    pub(crate) active_on: Cell<Option<usize>>,
    pub(crate) active_in: Cell<u64>,
    /// The CPU on which it ran last, and the generation of its VMX operation then: its host-state fields and its
    /// VPID are that one's.
    pub(crate) last_cpu: usize,
    pub(crate) last_in: u64,
    /// The generation of that CPU's VPIDs in which it got its own.
    pub(crate) vpid_generation: u64,
}

impl Cpus {
    /// It is active nowhere, and did not run.
    #[allow(clippy::declare_interior_mutable_const)] // A copy of it is what is wanted.
    pub(crate) const NONE: Self = Self {
        active_on: Cell::new(None),
        active_in: Cell::new(0),
        last_cpu: usize::MAX,
        last_in: 0,
        vpid_generation: 0,
    };
}
