//! `pio_kernel`: IN from port 0x21, the interrupt mask of the PIC, which the kernel emulates.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "pio_kernel",
    setup: [],
    operation: [
        "in $0x21, %al"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "pio_kernel",
    about: "IN from a device in the kernel (PIC, port 0x21)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
