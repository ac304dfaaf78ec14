//! `timer_rearm`: moves the APIC timer's deadline further away before it comes, as an operating
//! system does with nearly every deadline it sets. By a write of IA32_TSC_DEADLINE each time; or,
//! with `--lazy-timer` where the guest's CPUID offers it, by the lazy TSC deadline
//! (docs/adr/0020-lazy-tsc-deadline.md): one store, a fence, and a look whether a write is needed.

use crate::bench::interrupts::{x2apic_enable, xapic_enable};
use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload, require};
use crate::vmm::vm::Irqchip;

use super::tscdeadline::{timer_by_memory, timer_by_msr};

/// RDX:RAX is 67 million ticks ahead, and ECX the MSR: far enough that no interrupt comes.
macro_rules! deadline {
    () => {
        "rdtsc; add $0x4000000, %eax; adc $0, %edx; mov $0x6e0, %ecx"
    };
}

/// Tells the host where the page is: in the mailbox.
macro_rules! share_page {
    () => {
        "lea 0x81(%rbp), %rax; xor %edx, %edx; mov $0x4b564d09, %ecx; wrmsr"
    };
}

/// The guest's half of the protocol (`pv::lazy_deadline::guest_sets`).
macro_rules! set_lazily {
    () => {
        "mov %rdx, %rdi
         shl $32, %rdi
         or %rax, %rdi
         mov %rdi, 0x88(%rbp)
         mfence
         mov 0x80(%rbp), %rsi
         test %rsi, %rsi
         jz 0f
         cmp %rsi, %rdi
         jae 1f
      0: wrmsr
      1:"
    };
}

guest_program!(
    x2apic,
    "timer_rearm_x2apic",
    setup: [x2apic_enable!(), timer_by_msr!()],
    operation: [deadline!(), "wrmsr"]
);

guest_program!(
    xapic,
    "timer_rearm_xapic",
    setup: [xapic_enable!(), timer_by_memory!()],
    operation: [deadline!(), "wrmsr"]
);

guest_program!(
    lazy_x2apic,
    "timer_rearm_lazy_x2apic",
    setup: [x2apic_enable!(), timer_by_msr!(), share_page!()],
    operation: [deadline!(), set_lazily!()]
);

guest_program!(
    lazy_xapic,
    "timer_rearm_lazy_xapic",
    setup: [xapic_enable!(), timer_by_memory!(), share_page!()],
    operation: [deadline!(), set_lazily!()]
);

pub const WORKLOAD: Workload = Workload {
    name: "timer_rearm",
    about: "TSC deadline moved away before it comes; see --lazy-timer",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        require(guest.features.tsc_deadline, "the hypervisor offers no TSC deadline timer")?;
        Ok(match guest.lazy_timer && guest.features.lazy_deadline {
            true => Plan::by_apic_mode(guest, lazy_x2apic(), lazy_xapic()),
            false => Plan::by_apic_mode(guest, x2apic(), xapic()),
        })
    },
};
