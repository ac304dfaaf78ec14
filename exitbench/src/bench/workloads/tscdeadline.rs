//! `tscdeadline`: arms the APIC timer 10,000 ticks ahead and halts until its interrupt is taken.
//! The figure contains the wait; what exceeds it is the cost of arming, halting, waking and EOI
//! that did not fit into the wait.

use crate::bench::interrupts::{x2apic_enable, xapic_enable};
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

/// IA32_TSC_DEADLINE (SDM vol. 3A §10.5.4.1), then HLT. STI takes effect after it.
macro_rules! arm_and_halt {
    () => {
        "movq $0, (%rbp)
         rdtsc
         add $10000, %eax
         adc $0, %edx
         mov $0x6e0, %ecx
         wrmsr
      0: sti
         hlt
         cli
         cmpq $0, (%rbp)
         je 0b"
    };
}

/// The timer's vector, in TSC-deadline mode.
macro_rules! timer_by_msr {
    () => {
        "mov $0x832, %ecx; mov $(0x40000 + exitbench_vector), %eax; xor %edx, %edx; wrmsr"
    };
}

/// The same by memory. The fence keeps the first deadline behind it.
macro_rules! timer_by_memory {
    () => {
        "mov $0xfee00320, %esi; movl $(0x40000 + exitbench_vector), (%rsi); mfence"
    };
}

guest_program!(
    x2apic,
    "tscdeadline_x2apic",
    setup: [x2apic_enable!(), timer_by_msr!()],
    operation: [arm_and_halt!()]
);

guest_program!(
    xapic,
    "tscdeadline_xapic",
    setup: [xapic_enable!(), timer_by_memory!()],
    operation: [arm_and_halt!()]
);

pub const WORKLOAD: Workload = Workload {
    name: "tscdeadline",
    about: "TSC deadline 10,000 ticks ahead, HLT until its interrupt",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.tsc_deadline, "the hypervisor offers no TSC deadline timer")?;
        Ok(Plan::by_apic_mode(guest, x2apic(), xapic()))
    },
};

pub(super) use {timer_by_memory, timer_by_msr};
