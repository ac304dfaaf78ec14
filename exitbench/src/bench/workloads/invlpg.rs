//! `invlpg`: one page. Under TDP it need not exit at all.

use crate::bench::layout::RESULTS;
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "invlpg",
    setup: [],
    operation: [
        "invlpg (%rbx)"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "invlpg",
    about: "INVLPG",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan { argument: RESULTS, ..Plan::of(program()) }),
};
