//! `rdmsr`: IA32_APIC_BASE, which every hypervisor keeps for itself, with Intel and AMD alike.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "rdmsr",
    setup: [],
    operation: [
        "mov $0x1b, %ecx",
        "rdmsr"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "rdmsr",
    about: "RDMSR of IA32_APIC_BASE",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
