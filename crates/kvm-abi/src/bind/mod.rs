//! What the commands of [`crate::dispatch`] do to real VMs and vCPUs: the files that user space
//! holds, and the calls into the floors below.
//!
//! The module finds out once what its host can do and keeps it in a [`Host`]; every file refers to
//! that. A file is generic over how a hardware backend is made ([`MakeBackend`]), so that the run
//! loop behind it stays monomorphic.

pub mod convert;
mod stats;
mod system;
mod vcpu;
mod vm;

pub use self::system::SystemHandle;
pub use self::vcpu::{BoundVcpu, VcpuFile};
pub use self::vm::VmFile;

use ::vcpu::Offered;
use ::vm::{VmRef, vm::HostLimits};
use backend::Backend;
use host::NoMemory;

use crate::caps::Offer;

/// How the module makes the hardware half of a vCPU.
pub trait MakeBackend: Send + Sync + 'static {
    /// The hardware half.
    type B: Backend + 'static;
    /// One in its power-up state.
    fn make() -> Result<Self::B, NoMemory>;
}

/// What was found out about this host at load. Lives as long as any file.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// What KVM_CHECK_EXTENSION answers from.
    pub offer: Offer,
    /// What a new VM needs to know.
    pub limits: HostLimits,
    /// CPUID and MSRs.
    pub offered: Offered,
}

/// Whether the caller's address space is the VM's and still has its memory.
fn belongs_to_caller(vm: &VmRef) -> bool {
    // Guest memory is reached by the VMM's own addresses: in a forked child they lead elsewhere.
    // Stock KVM asks for both at every command, too (KVM API §1).
    vm.is_current_mm() && !vm.is_dead()
}
