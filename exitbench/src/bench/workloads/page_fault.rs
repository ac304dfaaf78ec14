//! `page_fault`: the first write to a page of memory that neither guest nor host has touched. Host
//! memory is advised against huge pages, so each operation faults in one page of 4 KiB: the host's own
//! fault, with a page zeroed, is part of the figure, as it is of any guest's first touch.

use crate::bench::layout::FRESH_MEMORY;
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "page_fault",
    setup: [],
    operation: [
        "movb $1, (%rbx)",
        "add $4096, %rbx"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "page_fault",
    about: "first write to a fresh page (4 KiB)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan { argument: FRESH_MEMORY, fresh_pages: true, ..Plan::of(program()) }),
};
