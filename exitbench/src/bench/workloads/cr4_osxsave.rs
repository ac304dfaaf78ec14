//! `cr4_osxsave`: CR4.OSXSAVE cleared and set again while XCR0 holds all that the guest's CPUID offers. A
//! pair per operation. CPUID shows the bit, so what a hypervisor keeps of the guest's CPUID changes.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "cr4_osxsave",
    setup: [
        "mov %cr4, %rsi",
        "mov %rsi, %rdi",
        "or $1 << 18, %rsi",
        "and $~(1 << 18), %rdi",
        "mov %rsi, %cr4",
        "mov $0xd, %eax",
        "xor %ecx, %ecx",
        "cpuid",
        "xor %ecx, %ecx",
        "xor %edx, %edx",
        "xsetbv"
    ],
    operation: [
        "mov %rdi, %cr4",
        "mov %rsi, %cr4"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "cr4_osxsave",
    about: "CR4.OSXSAVE cleared and set (pair)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.xsave, "the guest's CPUID lacks XSAVE")?;
        Ok(Plan::of(program()))
    },
};
