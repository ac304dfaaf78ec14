//! Deliveries of events that fault again and again, without end: KVM_RUN is ended by a signal all the
//! same, and the CPU is the host's meanwhile, for the signal comes from another thread of this machine
//! (SDM vol. 3A §7.15; a hypervisor that delivers the event anew inside of one entry must not do so
//! for ever).

use std::time::Duration;

use super::modes::protected;
use crate::kvm::exit::Exit;
use crate::machine::code::{guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::tables::{small_entry, split_first_large_page};
use crate::machine::threads::{Target, eventually};
use crate::oracle::{self, Vendor};
use crate::outcome::{Errno, Outcome, equal, fail, holds};
use crate::runner::tests;

tests!("endless":
    a_software_interrupt_without_its_gate_is_ended_by_a_signal,
    an_interrupt_without_its_gate_is_ended_by_a_signal,
    task_switches_without_end_are_ended_by_a_signal,
    double_faults_without_end_are_ended_by_a_signal,
);

/// Runs the first vCPU until signals end it, which has to be soon.
fn run_until_signalled(guest: &Guest) -> Outcome<Result<Exit, Errno>> {
    let target = Target::new();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            guest.vcpu().run()
        });
        let _ = target.id();
        std::thread::sleep(Duration::from_millis(50));
        eventually("KVM_RUN returns", || {
            target.kick();
            run.is_finished()
        })?;
        run.join().or_else(|_| fail("the thread died"))
    })
}

/// Where the table of gates is to lie: the gates of exceptions in one page, the others in the next.
const TABLE: u64 = FREE + 0x1e00;

/// A guest whose gates from vector 32 on lie in pages that are not there.
fn without_gates(code: &[u8]) -> Outcome<Guest> {
    let guest = Guest::new(Chip::Kernel, code)?;
    split_first_large_page(&guest.memory);
    guest.memory.write_bytes(TABLE, &guest.memory.read_bytes(IDT, 0x1000));
    for page in [FREE + 0x2000, FREE + 0x3000] {
        guest.memory.write(small_entry(page), 0);
    }
    let mut sregs = guest.vcpu().sregs()?;
    sregs.idt.base = TABLE;
    guest.vcpu().set_sregs(&sregs)?;
    Ok(guest)
}

/// The hook of #PF: returns to where it came from.
macro_rules! return_from_fault {
    () => {
        "5: pop %rdx
         pop %rcx
         pop %rax
         add $16, %rsp
         iretq"
    };
}

guest_code!(
    software_interrupts,
    64,
    "lea 5f(%rip), %rax",
    "mov %rax, HOOKS + 8 * 14",
    "sti",
    "0: int $0x80",
    "jmp 0b",
    return_from_fault!(),
);

guest_code!(
    interrupts,
    64,
    "lea 5f(%rip), %rax",
    "mov %rax, HOOKS + 8 * 14",
    x2apic!(),
    "sti",
    // To itself, and the end of what was taken into service without being delivered.
    "0: mov $0x83f, %ecx",
    "mov $0x40, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "pause",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "wrmsr",
    "jmp 0b",
    return_from_fault!(),
);

fn faults_until_signalled(code: &[u8]) -> Outcome {
    let guest = without_gates(code)?;
    for _ in 0..3 {
        let before = guest.count(14);
        equal("KVM_RUN", run_until_signalled(&guest)?, Err(Errno(libc::EINTR)))?;
        let faults = guest.count(14) - before;
        holds("page faults of deliveries", faults > 3, faults)?;
    }
    Ok(())
}

fn a_software_interrupt_without_its_gate_is_ended_by_a_signal() -> Outcome {
    faults_until_signalled(software_interrupts())
}

fn an_interrupt_without_its_gate_is_ended_by_a_signal() -> Outcome {
    faults_until_signalled(interrupts())
}

/// Two tasks: ours, and another that counts at 0x8104.
macro_rules! two_tasks {
    () => {
        "movl $0x85000067, 0x8018
         movl $0x00008900, 0x801c
         movl $0x86000067, 0x8020
         movl $0x00008900, 0x8024
         movl $3f - 0b, 0x8620
         movl $0x202, 0x8624
         movl $0x6800, 0x8638
         movl $0x10, 0x8648
         movl $8, 0x864c
         movl $0x10, 0x8650
         movl $0x10, 0x8654
         ljmp $8, $1f - 0b
         .code32
      1: mov $0x10, %ax
         mov %ax, %ds
         mov %ax, %ss
         mov $0x7000, %esp
         mov $0x18, %ax
         ltr %ax
         movw $0x7ff, 0x80f8
         movl $0x9000, 0x80fa
         lidt 0x80f8"
    };
}

guest_code!(
    task_switches,
    16,
    "0:",
    protected!(),
    two_tasks!(),
    "movl $0x200000, 0x9400",
    "movl $0x8500, 0x9404",
    "sti",
    "2: int $0x80",
    "jmp 2b",
    "3: incl 0x8104",
    "iret",
    "jmp 3b",
);

guest_code!(
    double_faults,
    16,
    "0:",
    protected!(),
    two_tasks!(),
    // There is a gate of #DF and no other.
    "movl $0x200000, 0x9040",
    "movl $0x8500, 0x9044",
    "sti",
    "2: int $0x80",
    "jmp 2b",
    "3: add $4, %esp",
    "incl 0x8104",
    "iret",
    "jmp 3b",
);

fn switches_until_signalled(code: &[u8]) -> Outcome {
    let guest = Guest::real(code)?;
    for _ in 0..3 {
        let ended = run_until_signalled(&guest)?;
        equal("KVM_RUN", ended, Err(Errno(libc::EINTR)))?;
    }
    if oracle::vendor() == Vendor::Amd && (!oracle::tdp() || oracle::kernel() < (6, 12)) {
        // With shadow paging the lab's CPU never switches the task, with either module; under a 6.1 host it
        // is not asked, as in the group `modes`.
        return Ok(());
    }
    let switches = guest.memory.read(0x8104) as u32;
    holds("task switches", switches > 3, switches)
}

fn task_switches_without_end_are_ended_by_a_signal() -> Outcome {
    switches_until_signalled(task_switches())
}

fn double_faults_without_end_are_ended_by_a_signal() -> Outcome {
    switches_until_signalled(double_faults())
}
