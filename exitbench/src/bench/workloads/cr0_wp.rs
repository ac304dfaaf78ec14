//! `cr0_wp`: CR0.WP cleared and set again. A pair per operation. The bit belongs to the role of the
//! guest's page tables; under nested paging a hypervisor may leave it to the guest.

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

pub const WORKLOAD: Workload = Workload {
    name: "cr0_wp",
    about: "CR0.WP cleared and set (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
