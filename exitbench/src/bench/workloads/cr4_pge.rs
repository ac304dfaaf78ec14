//! `cr4_pge`: CR4.PGE cleared and set again. A pair per operation. Both flush the guest's TLB.

use super::paged::{populate, touch};
use crate::bench::layout::FRESH_MEMORY;
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "cr4_pge",
    setup: [
        "mov %cr4, %rsi",
        "mov %rsi, %rdi",
        "or $1 << 7, %rsi",
        "and $~(1 << 7), %rdi"
    ],
    operation: [
        "mov %rdi, %cr4",
        "mov %rsi, %cr4"
    ]
);

guest_program!(
    paged,
    "cr4_pge_paged",
    setup: [
        populate!(),
        "mov %cr4, %rsi",
        "mov %rsi, %rdi",
        "or $1 << 7, %rsi",
        "and $~(1 << 7), %rdi"
    ],
    operation: [
        "mov %rdi, %cr4",
        touch!(),
        "mov %rsi, %cr4",
        touch!()
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "cr4_pge",
    about: "CR4.PGE cleared and set (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};

pub const PAGED: Workload = Workload {
    about: "CR4.PGE cleared and set (pair), pages written to after each switch",
    plan: |_| Ok(Plan { argument: FRESH_MEMORY, ..Plan::of(paged()) }),
    ..WORKLOAD
};
