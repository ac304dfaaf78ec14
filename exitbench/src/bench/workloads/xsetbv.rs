//! `xsetbv`: XCR0 to x87 alone, then to x87 and SSE. A pair per operation, and both change the size
//! that CPUID leaf 0xD reports.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "xsetbv",
    setup: [
        "mov %cr4, %rax",
        "or $1 << 18, %rax",
        "mov %rax, %cr4"
    ],
    operation: [
        "xor %ecx, %ecx",
        "xor %edx, %edx",
        "mov $1, %eax",
        "xsetbv",
        "mov $3, %eax",
        "xsetbv"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "xsetbv",
    about: "XSETBV of x87 alone, then x87 and SSE (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.xsave, "the guest's CPUID lacks XSAVE")?;
        Ok(Plan::of(program()))
    },
};
