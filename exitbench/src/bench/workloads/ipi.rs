//! `ipi`: an interrupt to another vCPU, which answers with one. Both halt while they wait, so the
//! figure is a whole round trip: two IPIs, two wake-ups, two handlers with EOI. Halting, rather than
//! spinning, lets it run on a host with a single CPU as well.

use crate::bench::interrupts::{x2apic_enable, xapic_enable};
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

/// vCPU 1 says in its mailbox that its APIC is on, then answers every interrupt with one to vCPU 0.
macro_rules! answer {
    ($enable:expr, $send:expr) => {
        concat!(
            $enable,
            "
            movl $1, 8(%rbp)
        0:  cmpq $0, (%rbp)
            jne 1f
            sti
            hlt
            cli
            jmp 0b
        1:  movq $0, (%rbp)
            ",
            $send,
            "
            jmp 0b"
        )
    };
}

/// vCPU 0 waits until the other's mailbox, one page above its own, says that it is ready.
macro_rules! await_other {
    () => {
        "0: pause; cmpl $0, 0x1008(%rbp); je 0b"
    };
}

/// Halts until the answer has come. STI takes effect after HLT: no wake-up is lost.
macro_rules! await_answer {
    () => {
        "0: sti; hlt; cli; cmpq $0, (%rbp); je 0b"
    };
}

guest_program!(
    x2apic,
    "ipi_x2apic",
    setup: [x2apic_enable!(), await_other!()],
    operation: [
        "movq $0, (%rbp)",
        "mov $0x830, %ecx",
        "mov $(0x4000 + exitbench_vector), %eax",
        "mov $1, %edx",
        "wrmsr",
        await_answer!()
    ],
    secondary: [answer!(
        x2apic_enable!(),
        "mov $0x830, %ecx; mov $(0x4000 + exitbench_vector), %eax; xor %edx, %edx; wrmsr"
    )]
);

guest_program!(
    xapic,
    "ipi_xapic",
    setup: [xapic_enable!(), "mov $0xfee00300, %esi", await_other!()],
    operation: [
        "movq $0, (%rbp)",
        "movl $1 << 24, 0x10(%rsi)",
        "movl $(0x4000 + exitbench_vector), (%rsi)",
        await_answer!()
    ],
    secondary: [answer!(
        xapic_enable!(),
        "mov $0xfee00300, %esi; movl $0, 0x10(%rsi); movl $(0x4000 + exitbench_vector), (%rsi)"
    )]
);

pub const WORKLOAD: Workload = Workload {
    name: "ipi",
    about: "interrupt to another, halted vCPU and its answer (round trip)",
    irqchip: Irqchip::Kernel,
    vcpus: 2,
    plan: |guest| Ok(Plan::by_apic_mode(guest, x2apic(), xapic())),
};
