//! `efer_nx`: EFER.NXE cleared and set again. A pair per operation. The guest's page tables use no NX
//! bit, which would be reserved in between.

use super::paged::{populate, touch};
use crate::bench::layout::FRESH_MEMORY;
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "efer_nx",
    setup: [
        "mov $0xc0000080, %ecx",
        "rdmsr",
        "mov %eax, %esi",
        "mov %eax, %edi",
        "or $1 << 11, %esi",
        "and $~(1 << 11), %edi"
    ],
    operation: [
        "mov $0xc0000080, %ecx",
        "mov %edi, %eax",
        "wrmsr",
        "mov %esi, %eax",
        "wrmsr"
    ]
);

guest_program!(
    paged,
    "efer_nx_paged",
    setup: [
        populate!(),
        "mov $0xc0000080, %ecx",
        "rdmsr",
        "mov %eax, %esi",
        "mov %eax, %edi",
        "or $1 << 11, %esi",
        "and $~(1 << 11), %edi"
    ],
    operation: [
        "mov $0xc0000080, %ecx",
        "mov %edi, %eax",
        "xor %edx, %edx",
        "wrmsr",
        touch!(),
        "mov $0xc0000080, %ecx",
        "mov %esi, %eax",
        "xor %edx, %edx",
        "wrmsr",
        touch!()
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "efer_nx",
    about: "EFER.NXE cleared and set (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.no_execute, "the guest's CPUID lacks NX")?;
        Ok(Plan::of(program()))
    },
};

pub const PAGED: Workload = Workload {
    about: "EFER.NXE cleared and set (pair), pages written to after each switch",
    plan: |guest| {
        require(guest.features.no_execute, "the guest's CPUID lacks NX")?;
        Ok(Plan { argument: FRESH_MEMORY, ..Plan::of(paged()) })
    },
    ..WORKLOAD
};
