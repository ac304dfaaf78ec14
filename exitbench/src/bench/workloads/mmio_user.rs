//! `mmio_user`: a 32-bit read where no memslot is. Each is emulated, leaves to user space with
//! KVM_EXIT_MMIO and completes at the next entry.

use crate::bench::layout::NOTHING;
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "mmio_user",
    setup: [],
    operation: [
        "mov (%rbx), %eax"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "mmio_user",
    about: "read of memory that leaves to user space",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan { argument: NOTHING, ..Plan::of(program()) }),
};
