//! Events whose delivery is interrupted: the guest's memory is taken from it and given back, so that its
//! descriptor tables, its stack and its handler are all absent for the hypervisor when the event is
//! delivered. The event has to come once, with its frame as if nothing had been (SDM vol. 3C §27.2.4,
//! APM vol. 2 §15.7.2).

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::outcome::{Answer, Outcome, equal, fail};
use crate::runner::tests;

tests!("delivery":
    a_software_interrupt_is_delivered_once,
    a_breakpoint_is_delivered_once,
    an_invalid_opcode_is_delivered_once,
    a_division_error_is_delivered_once,
    a_page_fault_keeps_its_error_code_and_address,
    a_general_protection_fault_keeps_its_error_code,
    an_interrupt_of_the_local_apic_is_delivered_once,
    an_nmi_is_delivered_once,
    an_nmi_handler_whose_return_is_interrupted_ends_once,
    an_overflow_trap_is_delivered_once,
    a_software_interrupt_of_real_mode_is_delivered_once,
    a_software_interrupt_of_user_mode_is_delivered_once,
);

/// Times that each event comes.
const TIMES: u64 = 4;

/// Takes all memory from the guest and gives it back: nothing is mapped for it any more.
fn unmap_all(guest: &Guest) -> Outcome {
    let (bytes, hva) = (guest.memory.bytes(), guest.memory.hva());
    guest.vm.set_slot(0, 0, 0, 0, 0).granted("the slot goes")?;
    guest.vm.set_slot(0, 0, 0, bytes, hva).granted("the slot comes back").map(drop)
}

/// Runs to the end; at each mark everything is unmapped, and `act` has its turn.
fn run(guest: &Guest, act: impl Fn() -> Outcome) -> Outcome<u64> {
    let mut marks = 0;
    loop {
        match guest.exit()? {
            exit if exit.is_out(PORT_DONE) => return Ok(marks),
            exit if exit.is_out(PORT_MARK) => {
                marks += 1;
                unmap_all(guest)?;
                act()?;
            }
            exit => return fail(format!("expected a mark or the end got {exit:x?}")),
        }
    }
}

/// The hook of a vector: counts itself by the common handler, and writes down RIP of the frame at
/// RESULT + 8 and the error code at RESULT + 16. Goes on at the address in RESULT + 24, if there is one.
macro_rules! hook {
    () => {
        "6: mov 40(%rsp), %rax
         mov %rax, RESULT + 8
         mov 32(%rsp), %rax
         mov %rax, RESULT + 16
         mov RESULT + 24, %rax
         test %rax, %rax
         jz 5f
         mov %rax, 40(%rsp)
      5: pop %rdx
         pop %rcx
         pop %rax
         add $16, %rsp
         iretq"
    };
}

/// A guest that does `$event` four times, each after a mark; `1:` is where the frame has to point.
macro_rules! events {
    ($name:ident, $vector:literal, $($line:expr),+) => {
        guest_code!(
            $name,
            64,
            concat!("lea 6f(%rip), %rax; mov %rax, HOOKS + 8 * ", $vector),
            "lea 1f(%rip), %rax",
            "mov %rax, RESULT",
            "lea 2f(%rip), %rax",
            "mov %rax, RESULT + 24",
            "mov $4, %ebp",
            "0: out %al, $PORT_MARK",
            $($line,)+
            "2: dec %ebp",
            "jnz 0b",
            done!(),
            hook!()
        );
    };
}

events!(software_interrupt, 0x80, "int $0x80", "1: nop");
events!(breakpoint, 3, "int3", "1: nop");
events!(invalid_opcode, 6, "1: ud2");
events!(division, 0, "xor %ecx, %ecx", "xor %edx, %edx", "1: div %ecx");
events!(page_fault, 14, "mov $0x7fff00001234, %rbx", "1: movb $1, (%rbx)");
events!(protection, 13, "mov $0x4b, %eax", "1: mov %eax, %es");
events!(
    local_apic,
    0x40,
    "movq $0, RESULT + 24",
    x2apic!(),
    "mov $0x83f, %ecx",
    "mov $0x40, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "out %al, $PORT_MARK",
    "sti",
    "nop",
    "1: nop",
    "cli",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "wrmsr"
);

/// Runs one of these; it has to come so often, with this error code, its frame at label 1.
fn comes(code: &[u8], vector: u8, error: u64) -> Outcome<Guest> {
    let guest = Guest::new(Chip::Kernel, code)?;
    run(&guest, || Ok(()))?;
    equal("how often it came", guest.count(vector), TIMES)?;
    equal("rip of the frame", guest.result(1), guest.result(0))?;
    equal("error code", guest.result(2), error)?;
    Ok(guest)
}

fn a_software_interrupt_is_delivered_once() -> Outcome {
    comes(software_interrupt(), 0x80, 0).map(drop)
}

fn a_breakpoint_is_delivered_once() -> Outcome {
    comes(breakpoint(), 3, 0).map(drop)
}

fn an_invalid_opcode_is_delivered_once() -> Outcome {
    comes(invalid_opcode(), 6, 0).map(drop)
}

fn a_division_error_is_delivered_once() -> Outcome {
    comes(division(), 0, 0).map(drop)
}

fn a_page_fault_keeps_its_error_code_and_address() -> Outcome {
    let guest = comes(page_fault(), 14, 2)?;
    equal("cr2", guest.vcpu().sregs()?.cr2, 0x7fff_0000_1234)
}

fn a_general_protection_fault_keeps_its_error_code() -> Outcome {
    comes(protection(), 13, 0x48).map(drop)
}

fn an_interrupt_of_the_local_apic_is_delivered_once() -> Outcome {
    comes(local_apic(), 0x40, 0).map(drop)
}

guest_code!(
    nmis,
    64,
    "lea 6f(%rip), %rax",
    "mov %rax, HOOKS + 16",
    "mov $4, %ebp",
    "0: out %al, $PORT_MARK",
    "dec %ebp",
    "jnz 0b",
    "nop",
    done!(),
    hook!()
);

fn nmi(guest: &Guest) -> Outcome {
    guest.vcpu().call(ioctl::NMI, 0).granted("KVM_NMI").map(drop)
}

fn an_nmi_is_delivered_once() -> Outcome {
    let guest = Guest::new(Chip::Kernel, nmis())?;
    equal("marks", run(&guest, || nmi(&guest))?, TIMES)?;
    equal("NMIs", guest.count(2), TIMES)
}

guest_code!(
    slow_nmi,
    64,
    "lea 6f(%rip), %rax",
    "mov %rax, HOOKS + 16",
    "mov $100, %ebp",
    "0: out %al, $PORT_MARK",
    "cmpq $5, COUNTS + 16",
    "jae 1f",
    "dec %ebp",
    "jnz 0b",
    "1:",
    done!(),
    // How deep they lie, at most.
    "6: incq RESULT",
    "mov RESULT, %rax",
    "cmp RESULT + 8, %rax",
    "jbe 2f",
    "mov %rax, RESULT + 8",
    "2: cmpq $5, COUNTS + 16",
    "jae 3f",
    "out %al, $PORT_MARK",
    "3: decq RESULT",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn an_nmi_handler_whose_return_is_interrupted_ends_once() -> Outcome {
    // The next NMI is asked for inside of the handler, whose stack and code are then gone.
    let guest = Guest::new(Chip::Kernel, slow_nmi())?;
    run(&guest, || match guest.count(2) {
        0..5 => nmi(&guest),
        _ => Ok(()),
    })?;
    equal("NMIs", guest.count(2), 5)?;
    equal("how many at a time", guest.result(1), 1)
}

/// A GDT at 0x8000 for 32-bit code: flat code based at the program and flat data; an IDT at 0x9000.
macro_rules! to_32_bits {
    () => {
        "movl $0, 0x8000
         movl $0, 0x8004
         movl $0x0000ffff, 0x8008
         movl $0x00cf9b01, 0x800c
         movl $0x0000ffff, 0x8010
         movl $0x00cf9300, 0x8014
         movw $0x17, 0x8020
         movl $0x8000, 0x8022
         lgdt 0x8020
         movw $0x7ff, 0x8028
         movl $0x9000, 0x802a
         lidt 0x8028
         mov %cr0, %eax
         or $1, %eax
         mov %eax, %cr0"
    };
}

guest_code!(
    overflow,
    16,
    "0:",
    to_32_bits!(),
    "ljmp $8, $1f - 0b",
    ".code32",
    "1: mov $0x10, %ax",
    "mov %ax, %ds",
    "mov %ax, %ss",
    "mov $0x7000, %esp",
    // The gate of #OF.
    "movl $(3f - 0b) + 0x80000, 0x9020",
    "movl $0x8e00, 0x9024",
    "mov $4, %ebp",
    "4: out %al, $PORT_MARK",
    "mov $0x7fffffff, %eax",
    "add $1, %eax",
    "into",
    "5: dec %ebp",
    "jnz 4b",
    "out %al, $PORT_DONE",
    "3: incl 0x8030",
    "mov (%esp), %eax",
    "sub $5b - 0b, %eax",
    "mov %eax, 0x8034",
    "iret",
);

fn an_overflow_trap_is_delivered_once() -> Outcome {
    let guest = Guest::real(overflow())?;
    equal("marks", run(&guest, || Ok(()))?, TIMES)?;
    let (count, rip) = (guest.memory.read(0x8030) as u32, guest.memory.read(0x8034) as u32);
    equal("how often it came, and rip of the frame behind it", (count, rip), (TIMES as u32, 0))
}

guest_code!(
    in_real_mode,
    16,
    "0:",
    // The vector's place in the table at 0: the handler in the program's segment.
    "movw $3f - 0b, 0x200",
    "movw %cs, 0x202",
    "mov $4, %cx",
    "4: out %al, $PORT_MARK",
    "int $0x80",
    "5: dec %cx",
    "jnz 4b",
    "out %al, $PORT_DONE",
    "3: mov %sp, %bp",
    "mov (%bp), %ax",
    "sub $5b - 0b, %ax",
    "mov %ax, 0x8034",
    "incw 0x8030",
    "iretw",
);

fn a_software_interrupt_of_real_mode_is_delivered_once() -> Outcome {
    let guest = Guest::real(in_real_mode())?;
    equal("marks", run(&guest, || Ok(()))?, TIMES)?;
    let (count, rip) = (guest.memory.read(0x8030) as u16, guest.memory.read(0x8034) as u16);
    equal("how often it came, and rip of the frame behind it", (count, rip), (TIMES as u16, 0))
}

guest_code!(
    from_user_mode,
    64,
    "lea 6f(%rip), %rax",
    "mov %rax, HOOKS + 8 * 0x80",
    // The gate is open to user mode; port I/O, too, by IOPL 3.
    "orb $0x60, 0x2000 + 0x80 * 16 + 5",
    "mov $0x20, %eax",
    "ltr %ax",
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    "push $0x3b",
    "push $0x1bf00",
    "push $0x3002",
    "push $0x33",
    "lea 3f(%rip), %rax",
    "push %rax",
    "mov $4, %ebp",
    "iretq",
    "3: out %al, $PORT_MARK",
    "int $0x80",
    "1: dec %ebp",
    "jnz 3b",
    "out %al, $PORT_DONE",
    hook!()
);

fn a_software_interrupt_of_user_mode_is_delivered_once() -> Outcome {
    let guest = Guest::new(Chip::None, from_user_mode())?;
    crate::machine::tables::split_first_large_page(&guest.memory);
    for index in 0..512 {
        let at = SMALL_TABLE + index * 8;
        guest.memory.write(at, guest.memory.read(at) | 4);
    }
    // LTR wants a task segment that is not busy.
    let descriptor = guest.memory.read(GDT + 0x20);
    guest.memory.write(GDT + 0x20, descriptor & !(2 << 40));
    equal("marks", run(&guest, || Ok(()))?, TIMES)?;
    equal("how often it came", guest.count(0x80), TIMES)?;
    equal("rip of the frame", guest.result(1), guest.result(0))
}
