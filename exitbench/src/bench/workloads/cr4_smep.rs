//! `cr4_smep`: CR4.SMEP set and cleared again. A pair per operation. Setting it flushes the guest's
//! TLB. The guest's own pages are supervisor pages, hence executable all the while.

use super::paged::{populate, touch};
use crate::bench::layout::FRESH_MEMORY;
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "cr4_smep",
    setup: [
        "mov %cr4, %rsi",
        "mov %rsi, %rdi",
        "or $1 << 20, %rsi",
        "and $~(1 << 20), %rdi"
    ],
    operation: [
        "mov %rsi, %cr4",
        "mov %rdi, %cr4"
    ]
);

guest_program!(
    paged,
    "cr4_smep_paged",
    setup: [
        populate!(),
        "mov %cr4, %rsi",
        "mov %rsi, %rdi",
        "or $1 << 20, %rsi",
        "and $~(1 << 20), %rdi"
    ],
    operation: [
        "mov %rsi, %cr4",
        touch!(),
        "mov %rdi, %cr4",
        touch!()
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "cr4_smep",
    about: "CR4.SMEP set and cleared (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.smep, "the guest's CPUID lacks SMEP")?;
        Ok(Plan::of(program()))
    },
};

pub const PAGED: Workload = Workload {
    about: "CR4.SMEP set and cleared (pair), pages written to after each switch",
    plan: |guest| {
        require(guest.features.smep, "the guest's CPUID lacks SMEP")?;
        Ok(Plan { argument: FRESH_MEMORY, ..Plan::of(paged()) })
    },
    ..WORKLOAD
};
