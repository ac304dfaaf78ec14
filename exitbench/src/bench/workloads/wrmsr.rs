//! `wrmsr`: IA32_TSC_ADJUST, with the value it has (0). Hypervisors emulate it with Intel and AMD
//! alike, because it is an offset to their own; that the value stays keeps the guest's TSC steady.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "wrmsr",
    setup: [],
    operation: [
        "mov $0x3b, %ecx",
        "xor %eax, %eax",
        "xor %edx, %edx",
        "wrmsr"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "wrmsr",
    about: "WRMSR of IA32_TSC_ADJUST",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.tsc_adjust, "the guest's CPUID lacks TSC_ADJUST")?;
        Ok(Plan::of(program()))
    },
};
