//! `cr3_switch`: to another root of the same map and back. A pair per operation. Under TDP it
//! costs nothing but the TLB; under shadow paging two roots are looked up. CR3 is not read: the lab's
//! emulator lets a guest read the root that is really loaded, which is the hypervisor's own.

use super::paged::{populate, touch};
use crate::bench::layout::{FRESH_MEMORY, SECOND_ROOT};
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "cr3_switch",
    setup: [
        "mov $exitbench_root, %esi"
    ],
    operation: [
        "mov %rbx, %cr3",
        "mov %rsi, %cr3"
    ]
);

guest_program!(
    paged,
    "cr3_switch_paged",
    setup: [
        populate!(),
        "mov $exitbench_root, %esi",
        "mov $exitbench_second_root, %edi"
    ],
    operation: [
        "mov %rdi, %cr3",
        touch!(),
        "mov %rsi, %cr3",
        touch!()
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "cr3_switch",
    about: "CR3 to another root and back (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan { argument: SECOND_ROOT, ..Plan::of(program()) }),
};

pub const PAGED: Workload = Workload {
    about: "CR3 to another root and back (pair), pages written to after each switch",
    plan: |_| Ok(Plan { argument: FRESH_MEMORY, ..Plan::of(paged()) }),
    ..WORKLOAD
};
