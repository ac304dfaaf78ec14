//! `mmio_kernel`: a 32-bit read of the version register of the local APIC, in xAPIC mode: an
//! instruction is emulated unless the CPU virtualizes the APIC page.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "mmio_kernel",
    setup: [
        "mov $0xfee00030, %esi"
    ],
    operation: [
        "mov (%rsi), %eax"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "mmio_kernel",
    about: "read of memory served in the kernel (xAPIC version)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
