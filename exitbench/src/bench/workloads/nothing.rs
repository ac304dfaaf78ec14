//! `nothing`: an empty operation. Its figure is the cost of the measuring frame, which every other
//! figure contains.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "nothing",
    setup: [],
    operation: []
);

pub const WORKLOAD: Workload = Workload {
    name: "nothing",
    about: "no operation: what the measuring itself costs",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
