//! The instruction behind STI and MOV SS, which no interrupt may precede, when the hypervisor has to answer
//! that instruction; and which of several events comes first (SDM vol. 3A §6.8.3, §6.9, APM vol. 2 §8.5).

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, equal, one_of};
use crate::runner::tests;

tests!("shadows":
    an_interrupt_comes_behind_cpuid_behind_sti,
    an_interrupt_comes_behind_rdmsr_behind_sti,
    an_interrupt_comes_behind_a_hypercall_behind_sti,
    an_interrupt_comes_behind_a_port_of_the_kernel_behind_sti,
    an_interrupt_comes_behind_a_port_of_user_space_behind_sti,
    an_interrupt_comes_behind_a_device_behind_sti,
    an_interrupt_ends_a_halt_behind_sti,
    an_interrupt_comes_behind_the_register_write_that_sends_it,
    an_nmi_comes_behind_the_register_write_that_sends_it,
    an_interrupt_comes_behind_what_follows_two_shadows,
    a_step_over_mov_ss_ends_behind_the_next_instruction,
    a_step_over_sti_ends_behind_it,
    a_step_over_mov_ss_ends_with_int1,
    an_nmi_comes_before_an_interrupt,
    a_shadow_set_by_user_space_holds_for_one_instruction,
    popf_opens_for_an_interrupt_at_once,
);

/// The hook writes RIP of the frame to the next place at RESULT + 8 and acknowledges.
macro_rules! hook {
    () => {
        "6: mov ARGUMENT, %rcx
         mov 40(%rsp), %rax
         mov %rax, (%rcx)
         addq $8, ARGUMENT
         cmpb $2, 24(%rsp)
         je 5f
         cmpb $1, 24(%rsp)
         je 5f
         mov $0x80b, %ecx
         xor %eax, %eax
         xor %edx, %edx
         wrmsr
      5: pop %rdx
         pop %rcx
         pop %rax
         add $16, %rsp
         iretq"
    };
}

macro_rules! set_up {
    () => {
        concat!(
            x2apic!(),
            "
            lea 6f(%rip), %rax
            mov %rax, HOOKS + 8 * 0x40
            mov %rax, HOOKS + 8 * 2
            mov %rax, HOOKS + 8 * 1
            lea 1f(%rip), %rax
            mov %rax, RESULT
            movq $RESULT + 8, ARGUMENT"
        )
    };
}

/// Interrupt 0x40 waits when STI comes, then this instruction; the frame has to lie behind it.
macro_rules! behind_sti {
    ($name:ident, $($line:expr),+) => {
        guest_code!(
            $name,
            64,
            set_up!(),
            "mov $0x83f, %ecx",
            "mov $0x40, %eax",
            "xor %edx, %edx",
            "wrmsr",
            "mov $0x1b, %ecx",
            "mov $NOWHERE, %ebx",
            "xor %eax, %eax",
            $($line,)+
            "1: nop",
            "nop",
            "cli",
            done!(),
            hook!()
        );
    };
}

behind_sti!(cpuid, "sti", "cpuid");
behind_sti!(rdmsr, "sti", "rdmsr");
behind_sti!(kernel_port, "sti", "in $0x21, %al");
behind_sti!(user_port, "sti", "in $PORT_MARK, %al");
behind_sti!(device, "sti", "mov (%rbx), %eax");
behind_sti!(halt, "sti", "hlt");
behind_sti!(intels_call, "sti", "vmcall");
behind_sti!(amds_call, "sti", "vmmcall");
behind_sti!(popf, "pushq $0x202", "popfq");
behind_sti!(two_shadows, "mov %ss, %eax", "sti", "mov %eax, %ss", "2: cpuid");

/// Runs one of these; RIP of the only frame has to be at label 1.
fn behind(code: &[u8]) -> Outcome {
    let guest = Guest::new(Chip::Kernel, code)?;
    loop {
        let exit = guest.exit()?;
        if exit.is_out(PORT_DONE) {
            break;
        }
        guest.vcpu().answer(&[0; 4]);
    }
    equal("interrupts", guest.count(0x40), 1)?;
    equal("rip of the frame", guest.result(1), guest.result(0))
}

fn an_interrupt_comes_behind_cpuid_behind_sti() -> Outcome {
    behind(cpuid())
}

fn an_interrupt_comes_behind_rdmsr_behind_sti() -> Outcome {
    behind(rdmsr())
}

fn an_interrupt_comes_behind_a_hypercall_behind_sti() -> Outcome {
    match oracle::vendor() {
        Vendor::Intel => behind(intels_call()),
        Vendor::Amd => behind(amds_call()),
    }
}

fn an_interrupt_comes_behind_a_port_of_the_kernel_behind_sti() -> Outcome {
    behind(kernel_port())
}

fn an_interrupt_comes_behind_a_port_of_user_space_behind_sti() -> Outcome {
    behind(user_port())
}

fn an_interrupt_comes_behind_a_device_behind_sti() -> Outcome {
    behind(device())
}

fn an_interrupt_ends_a_halt_behind_sti() -> Outcome {
    behind(halt())
}

fn popf_opens_for_an_interrupt_at_once() -> Outcome {
    behind(popf())
}

fn an_interrupt_comes_behind_what_follows_two_shadows() -> Outcome {
    // Whether the second of two shadows in a row counts is left to the CPU.
    let guest = Guest::new(Chip::Kernel, two_shadows())?;
    guest.finish()?;
    equal("interrupts", guest.count(0x40), 1)?;
    let end = guest.result(0);
    one_of("rip of the frame", guest.result(1), &[end, end - 2])
}

/// Interrupts are enabled; behind MOV SS the guest sends itself something by a register that the
/// hypervisor emulates, so that it is due at once, in the shadow's last moment.
macro_rules! behind_mov_ss {
    ($name:ident, $register:literal, $value:literal) => {
        guest_code!(
            $name,
            64,
            set_up!(),
            concat!("mov $", $register, ", %ecx"),
            concat!("mov $", $value, ", %eax"),
            "xor %edx, %edx",
            "mov %ss, %ebx",
            "sti",
            "nop",
            "mov %ebx, %ss",
            "wrmsr",
            "1: nop",
            "nop",
            "cli",
            done!(),
            hook!()
        );
    };
}

behind_mov_ss!(send_interrupt, "0x83f", "0x40");
behind_mov_ss!(send_nmi, "0x830", "0x44400");

fn an_interrupt_comes_behind_the_register_write_that_sends_it() -> Outcome {
    behind(send_interrupt())
}

fn an_nmi_comes_behind_the_register_write_that_sends_it() -> Outcome {
    let guest = Guest::new(Chip::Kernel, send_nmi())?;
    guest.finish()?;
    equal("NMIs", guest.count(2), 1)?;
    equal("rip of the frame", guest.result(1), guest.result(0))
}

guest_code!(
    step_over_mov_ss,
    64,
    set_up!(),
    "mov %ss, %ebx",
    // Once without a step, so that no fault of TDP comes between the steps (`Guest::steps`).
    "mov %ebx, %ss",
    "xor %eax, %eax",
    "xor %ecx, %ecx",
    "pushfq",
    "pop %rdi",
    "mov %rdi, %rsi",
    "or $0x100, %rdi",
    "push %rsi",
    "push %rdi",
    "popfq",
    // The trap behind MOV SS is held back, and comes with the one behind CPUID.
    "mov %ebx, %ss",
    "mov $0, %eax",
    "1: mov %ebx, %ss",
    "cpuid",
    "2: popfq",
    done!(),
    hook!()
);

fn a_step_over_mov_ss_ends_behind_the_next_instruction() -> Outcome {
    let guest = Guest::new(Chip::Kernel, step_over_mov_ss())?;
    guest.finish()?;
    // Behind MOV to EAX, behind CPUID, and behind the POPF that ends it.
    let (got, first) = (guest.steps(1), guest.result(0));
    let before_last = got.get(..got.len().saturating_sub(1));
    equal("rips of the frames", before_last, Some(&[first, first + 4][..]))
}

macro_rules! stepping {
    ($name:ident, $($line:expr),+) => {
        guest_code!(
            $name,
            64,
            set_up!(),
            "mov %ss, %ebx",
            // Once without a step, so that no fault of TDP comes between the steps (`Guest::steps`).
            "mov %ebx, %ss",
            "pushfq",
            "pop %rdi",
            "mov %rdi, %rsi",
            "or $0x100, %rdi",
            "push %rsi",
            "push %rdi",
            "popfq",
            $($line,)+
            "2: popfq",
            "cli",
            done!(),
            hook!()
        );
    };
}

stepping!(step_over_sti, "sti", "1: nop", "nop");
stepping!(step_over_int1, "mov %ebx, %ss", ".byte 0xf1", "1: nop", "nop");

/// Behind label 1, behind the two NOPs, and behind the POPF that ends it.
fn three_steps(code: &[u8]) -> Outcome {
    let guest = Guest::new(Chip::Kernel, code)?;
    guest.finish()?;
    let (got, first) = (guest.steps(1), guest.result(0));
    let before_last = got.get(..got.len().saturating_sub(1));
    equal("rips of the frames", before_last, Some(&[first, first + 1, first + 2][..]))
}

fn a_step_over_sti_ends_behind_it() -> Outcome {
    three_steps(step_over_sti())
}

fn a_step_over_mov_ss_ends_with_int1() -> Outcome {
    three_steps(step_over_int1())
}

guest_code!(
    two_events,
    64,
    set_up!(),
    "sti",
    "1: out %al, $PORT_MARK",
    "nop",
    "nop",
    done!(),
    hook!()
);

fn an_nmi_comes_before_an_interrupt() -> Outcome {
    let guest = Guest::new(Chip::Kernel, two_events())?;
    guest.reach_mark()?;
    let msi = kvm_msi { address_lo: 0xfee0_0000, data: 0x40, ..Default::default() };
    guest.vm.send(ioctl::SIGNAL_MSI, &msi).granted("KVM_SIGNAL_MSI")?;
    guest.vcpu().call(ioctl::NMI, 0).granted("KVM_NMI")?;
    guest.finish()?;
    equal("NMIs and interrupts", (guest.count(2), guest.count(0x40)), (1, 1))?;
    // The gate of the NMI closes the guest for the interrupt, which comes behind its IRET.
    let behind = guest.result(0) + 2;
    equal("rips of the frames", (guest.result(1), guest.result(2)), (behind, behind))
}

guest_code!(
    shadow,
    64,
    set_up!(),
    "mov $0x83f, %ecx",
    "mov $0x40, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "out %al, $PORT_MARK",
    "nop",
    "1: nop",
    "nop",
    "cli",
    done!(),
    hook!()
);

fn a_shadow_set_by_user_space_holds_for_one_instruction() -> Outcome {
    let guest = Guest::new(Chip::Kernel, shadow())?;
    guest.reach_mark()?;
    // Completes the OUT first.
    guest.vcpu().set_immediate_exit(1);
    guest.vcpu().run().refused("KVM_RUN", libc::EINTR)?;
    guest.vcpu().set_immediate_exit(0);
    let mut regs = guest.vcpu().regs()?;
    regs.rflags |= 0x200;
    guest.vcpu().set_regs(&regs)?;
    let mut events: kvm_vcpu_events =
        guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")?;
    events.flags = KVM_VCPUEVENT_VALID_SHADOW;
    events.interrupt.shadow = KVM_X86_SHADOW_INT_STI as u8;
    guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
    guest.finish()?;
    equal("interrupts", guest.count(0x40), 1)?;
    equal("rip of the frame", guest.result(1), guest.result(0))
}
