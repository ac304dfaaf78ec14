//! `self_ipi`: an interrupt that the vCPU sends to itself and takes, with the handler's EOI. By the
//! self-IPI register in x2APIC mode where the guest has that, else by the command register's "self"
//! shorthand in xAPIC mode. Interrupts stay enabled, so it arrives with the next entry.

use crate::bench::interrupts::{x2apic_enable, xapic_enable};
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    x2apic,
    "self_ipi_x2apic",
    setup: [x2apic_enable!(), "sti"],
    operation: [
        "movq $0, (%rbp)",
        "mov $0x83f, %ecx",
        "mov $exitbench_vector, %eax",
        "xor %edx, %edx",
        "wrmsr",
        "0: cmpq $0, (%rbp)",
        "je 0b"
    ]
);

guest_program!(
    xapic,
    "self_ipi_xapic",
    setup: [xapic_enable!(), "mov $0xfee00300, %esi", "sti"],
    operation: [
        "movq $0, (%rbp)",
        "movl $(0x44000 + exitbench_vector), (%rsi)",
        "0: cmpq $0, (%rbp)",
        "je 0b"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "self_ipi",
    about: "interrupt to itself, with handler and EOI (x2APIC where there is one)",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| Ok(Plan::by_apic_mode(guest, x2apic(), xapic())),
};
