//! `cr3_switch`: to another root of the same map and back. A pair per operation. Under nested paging it
//! costs nothing but the TLB; under shadow paging two roots are looked up.

use crate::bench::layout::SECOND_ROOT;
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "cr3_switch",
    setup: [
        "mov %cr3, %rsi"
    ],
    operation: [
        "mov %rbx, %cr3",
        "mov %rsi, %cr3"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "cr3_switch",
    about: "CR3 to another root and back (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan { argument: SECOND_ROOT, ..Plan::of(program()) }),
};
