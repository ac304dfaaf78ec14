//! What a workload is: an operation, the VM it needs, and whether it can run here.

use crate::vmm::cpuid::Features;
use crate::vmm::hypervisor::Vendor;
use crate::vmm::vm::Irqchip;

use super::interrupts::ApicMode;
use super::layout::WORKING_SET;
use super::program::Program;
use crate::vmm::memory::PAGE;

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
    /// Whether it is to use the lazy TSC deadline where it is offered.
    pub lazy_timer: bool,
}

/// How to run a workload on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub program: Program,
    /// RBX at entry.
    pub argument: u64,
    /// Which handler acknowledges the workload's interrupts.
    pub apic: ApicMode,
    /// Whether each operation touches a page of memory of its own, from `argument` on.
    pub fresh_pages: bool,
    /// Whether the host has that memory before the first operation, so that its own faults are not among what is measured.
    pub host_has_them: bool,
    /// Pages that the guest maps one by one and touches before the first operation.
    pub mapped: Option<Mapped>,
}

/// The memory of a paged workload: pages of 4 KiB, each with an entry of its own in the guest's page
/// tables, all written once before the first operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// How many there are.
    pub pages: u64,
    /// How many of them are written again after each switch, spread evenly: [`WORKING_SET`] or all.
    pub touched: u64,
}

impl Mapped {
    /// `pages` pages, of which all are touched after each switch or a small, fixed number.
    pub fn new(pages: u64, all: bool) -> Self {
        Self { pages, touched: if all { pages } else { pages.min(WORKING_SET) } }
    }

    /// Bytes from one touched page to the next.
    pub fn stride(self) -> u64 {
        (self.pages / self.touched.max(1)).max(1) * PAGE
    }
}

/// Why a workload cannot run on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsupported(pub &'static str);

impl Plan {
    /// A program without argument, interrupts or memory of its own.
    pub fn of(program: Program) -> Self {
        let apic = ApicMode::Xapic;
        Self { program, argument: 0, apic, fresh_pages: false, host_has_them: false, mapped: None }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_are_spread_over_all_of_them() {
        for pages in [1, 7, 8, 9, 100, 10_000] {
            for all in [false, true] {
                let mapped = Mapped::new(pages, all);
                let last = (mapped.touched - 1) * mapped.stride() / PAGE;
                assert!(last < pages, "{mapped:?}");
                assert!(mapped.touched == WORKING_SET || mapped.touched == pages);
            }
        }
        assert_eq!(Mapped::new(10_000, false).stride(), 1250 * PAGE);
    }
}
