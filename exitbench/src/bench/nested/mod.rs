//! Workloads of nested virtualization: the guest is a small hypervisor of its own (L1), and one operation is a round
//! trip from its guest (L2), which does one instruction that L1 intercepts, and back.
//!
//! L1 shares its page tables with L2 and answers an exit by moving RIP past the instruction, so that what is
//! measured is the hypervisor below.

use super::program::Program;
use super::workload::{Guest, Plan, Unsupported, Workload, require};
use crate::vmm::hypervisor::Vendor;
use crate::vmm::vm::Irqchip;

mod svm;
mod vmx;

/// The programs for one instruction set.
struct Programs {
    cpuid: fn() -> Program,
    hypercall: fn() -> Program,
    hlt: fn() -> Program,
    wrmsr: fn() -> Program,
    pio: fn() -> Program,
    entry: fn() -> Program,
}

/// Every nested workload, in the order in which they run.
pub const ALL: &[Workload] = &[
    workload("nested_cpuid", "CPUID of a guest's guest", |guest| plan(guest, |of| of.cpuid)),
    workload("nested_vmcall", "hypercall of a guest's guest", |guest| {
        plan(guest, |of| of.hypercall)
    }),
    workload("nested_hlt", "HLT of a guest's guest", |guest| plan(guest, |of| of.hlt)),
    workload("nested_wrmsr", "WRMSR of a guest's guest", |guest| plan(guest, |of| of.wrmsr)),
    workload("nested_pio", "OUT of a guest's guest", |guest| plan(guest, |of| of.pio)),
    workload("nested_entry", "entry of a guest's guest that leaves at once", |guest| {
        plan(guest, |of| of.entry)
    }),
];

const fn workload(
    name: &'static str,
    about: &'static str,
    plan: fn(&Guest) -> Result<Plan, Unsupported>,
) -> Workload {
    Workload { name, about, irqchip: Irqchip::Kernel, vcpus: 1, plan }
}

/// The program that `choose` names, for the instruction set that the guest is offered.
fn plan(guest: &Guest, choose: fn(&Programs) -> fn() -> Program) -> Result<Plan, Unsupported> {
    let programs = match guest.vendor {
        Vendor::Amd => {
            require(guest.features.svm, "the guest's CPUID lacks SVM")?;
            svm::PROGRAMS
        }
        Vendor::Intel => {
            require(guest.features.vmx, "the guest's CPUID lacks VMX")?;
            vmx::PROGRAMS
        }
    };
    Ok(Plan::of(choose(&programs)()))
}
