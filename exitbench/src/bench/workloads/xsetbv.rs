//! `xsetbv`: XCR0 to x87 alone, then to all that the guest's CPUID offers. A pair per operation, and
//! both change the size that CPUID leaf 0xD reports.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "xsetbv",
    setup: [
        "mov %cr4, %rax",
        "or $1 << 18, %rax",
        "mov %rax, %cr4",
        "mov $0xd, %eax",
        "xor %ecx, %ecx",
        "cpuid",
        "mov %eax, %esi"
    ],
    operation: [
        "xor %ecx, %ecx",
        "xor %edx, %edx",
        "mov $1, %eax",
        "xsetbv",
        "mov %esi, %eax",
        "xsetbv"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "xsetbv",
    about: "XSETBV of x87 alone, then of all that CPUID offers (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.xsave, "the guest's CPUID lacks XSAVE")?;
        Ok(Plan::of(program()))
    },
};
