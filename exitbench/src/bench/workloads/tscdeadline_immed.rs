//! `tscdeadline_immed`: a TSC deadline in the past. Its interrupt is due at once; interrupts are
//! enabled, so it comes with the next entry.

use super::tscdeadline::{timer_by_memory, timer_by_msr};
use crate::bench::interrupts::{x2apic_enable, xapic_enable};
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

/// Deadline 1: 0 would disarm.
macro_rules! arm_and_take {
    () => {
        "movq $0, (%rbp)
         mov $1, %eax
         xor %edx, %edx
         mov $0x6e0, %ecx
         wrmsr
      0: cmpq $0, (%rbp)
         je 0b"
    };
}

guest_program!(
    x2apic,
    "tscdeadline_immed_x2apic",
    setup: [x2apic_enable!(), timer_by_msr!(), "sti"],
    operation: [arm_and_take!()]
);

guest_program!(
    xapic,
    "tscdeadline_immed_xapic",
    setup: [xapic_enable!(), timer_by_memory!(), "sti"],
    operation: [arm_and_take!()]
);

pub const WORKLOAD: Workload = Workload {
    name: "tscdeadline_immed",
    about: "TSC deadline in the past, with its interrupt",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.tsc_deadline, "the hypervisor offers no TSC deadline timer")?;
        Ok(Plan::by_apic_mode(guest, x2apic(), xapic()))
    },
};
