//! `mov_cr8`: the task priority raised to 1 and lowered to 0 again by CR8. A pair per operation. No
//! interrupt waits, so nothing is unmasked.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "mov_cr8",
    setup: [
        "mov $1, %esi",
        "xor %edi, %edi"
    ],
    operation: [
        "mov %rsi, %cr8",
        "mov %rdi, %cr8"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "mov_cr8",
    about: "CR8 raised and lowered (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
