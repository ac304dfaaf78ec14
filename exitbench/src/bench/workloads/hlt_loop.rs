//! `hlt_loop`: HLT in a VM without interrupt controllers in the kernel. Each one leaves to user space
//! with KVM_EXIT_HLT, and the VMM enters again: the whole way of the run ioctl, with vCPU load and put.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "hlt_loop",
    setup: [],
    operation: [
        "hlt"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "hlt_loop",
    about: "HLT that leaves to user space (no irqchip in the kernel)",
    irqchip: Irqchip::None,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
