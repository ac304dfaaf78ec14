//! `cr0_wp`: CR0.WP cleared and set again. A pair per operation. The bit belongs to the role of the
//! guest's page tables; under TDP a hypervisor may leave it to the guest.

use super::paged::{populate, touch};
use crate::bench::layout::FRESH_MEMORY;
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "cr0_wp",
    setup: [
        "mov %cr0, %rsi",
        "mov %rsi, %rdi",
        "or $1 << 16, %rsi",
        "and $~(1 << 16), %rdi"
    ],
    operation: [
        "mov %rdi, %cr0",
        "mov %rsi, %cr0"
    ]
);

guest_program!(
    paged,
    "cr0_wp_paged",
    setup: [
        populate!(),
        "mov %cr0, %rsi",
        "mov %rsi, %rdi",
        "or $1 << 16, %rsi",
        "and $~(1 << 16), %rdi"
    ],
    operation: [
        "mov %rdi, %cr0",
        touch!(),
        "mov %rsi, %cr0",
        touch!()
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "cr0_wp",
    about: "CR0.WP cleared and set (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};

pub const PAGED: Workload = Workload {
    about: "CR0.WP cleared and set (pair), pages written to after each switch",
    plan: |_| Ok(Plan { argument: FRESH_MEMORY, ..Plan::of(paged()) }),
    ..WORKLOAD
};
