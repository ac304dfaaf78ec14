//! What a workload is: an operation, the VM it needs, and whether it can run here.

use crate::vmm::cpuid::Features;
use crate::vmm::hypervisor::Vendor;
use crate::vmm::vm::Irqchip;

use super::interrupts::ApicMode;
use super::program::Program;

/// One operation to be measured.
pub struct Workload {
    /// The name in reports and on the command line.
    pub name: &'static str,
    /// What one operation is, in one line.
    pub about: &'static str,
    /// The interrupt controllers its VM has.
    pub irqchip: Irqchip,
    /// 1, or 2 with a second vCPU that starts at the program's secondary entry.
    pub vcpus: u32,
    /// Chooses the program for a machine, or says why there is none.
    pub plan: fn(&Guest) -> Result<Plan, Unsupported>,
}

/// The machine as the guest will see it.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    pub vendor: Vendor,
    pub features: Features,
}

/// How to run a workload on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub program: Program,
    /// RBX at entry.
    pub argument: u64,
    /// Which handler acknowledges the workload's interrupts.
    pub apic: ApicMode,
    /// Whether each operation touches a page of memory of its own.
    pub fresh_pages: bool,
}

/// Why a workload cannot run on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsupported(pub &'static str);

impl Plan {
    /// A program without argument, interrupts or memory of its own.
    pub fn of(program: Program) -> Self {
        Self { program, argument: 0, apic: ApicMode::Xapic, fresh_pages: false }
    }

    /// The program for the better of the APIC's modes that the guest has.
    pub fn by_apic_mode(guest: &Guest, x2apic: Program, xapic: Program) -> Self {
        if guest.features.x2apic {
            Self { apic: ApicMode::X2apic, ..Self::of(x2apic) }
        } else {
            Self::of(xapic)
        }
    }
}

/// `Ok` when the guest has what the workload needs.
pub fn require(present: bool, reason: &'static str) -> Result<(), Unsupported> {
    if present { Ok(()) } else { Err(Unsupported(reason)) }
}
