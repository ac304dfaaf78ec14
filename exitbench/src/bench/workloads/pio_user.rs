//! `pio_user`: IN from port 0xf6, which nothing in the kernel serves. Each leaves to user space with
//! KVM_EXIT_IO and completes at the next entry.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "pio_user",
    setup: [],
    operation: [
        "in $0xf6, %al"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "pio_user",
    about: "IN that leaves to user space (port 0xf6)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
