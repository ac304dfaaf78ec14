//! `cpuid`: CPUID leaf 0. The one instruction that every hypervisor intercepts and answers itself.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "cpuid",
    setup: [],
    operation: [
        "xor %eax, %eax",
        "xor %ecx, %ecx",
        "cpuid"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "cpuid",
    about: "CPUID leaf 0",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
