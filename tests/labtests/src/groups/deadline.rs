//! The local APIC's timer in a guest that runs, halts or waits for user space meanwhile, whatever the
//! hypervisor keeps the time by (SDM vol. 3A §10.5.4).

use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::clock::{tsc, tsc_rate_is_right};
use crate::machine::code::{done, guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::threads::{Target, prepare};
use crate::outcome::{Answer, Outcome, equal, fail, holds};
use crate::runner::tests;

tests!("deadline":
    a_guest_that_never_exits_gets_its_interrupt,
    exits_put_a_deadline_off_by_nothing,
    the_last_of_many_deadlines_counts,
    a_deadline_beyond_32_bits_waits_and_can_be_taken_back,
    the_farthest_deadline_does_not_come,
    without_the_timer_in_cpuid_the_msr_is_ignored,
    a_halt_shorter_than_the_polling_ends_in_time,
    a_kicked_halt_goes_on_and_ends_in_time,
    a_deadline_that_passes_in_user_space_comes_with_the_next_run,
    a_deadline_that_passed_in_user_space_is_saved_with_the_vcpu,
    the_vmm_reads_zero_after_the_interrupt,
    the_vmm_can_set_a_deadline,
    a_countdown_interrupts_a_guest_that_does_not_halt,
    a_masked_deadline_passes_without_an_interrupt,
);

const DEADLINE: u32 = 0x6e0;
const VECTOR: u8 = 0x40;
/// An emulated machine may be away for so long.
const LATE: Duration = Duration::from_millis(500);

/// TSC-deadline mode with vector 0x40.
macro_rules! deadline_mode {
    () => {
        "mov $0x832, %ecx; mov $0x40040, %eax; xor %edx, %edx; wrmsr"
    };
}

/// The TSC in RAX; RDX is lost.
macro_rules! tsc_now {
    () => {
        "rdtsc; shl $32, %rdx; or %rdx, %rax"
    };
}

/// A deadline that is in RAX; RCX and RDX are lost.
macro_rules! set_deadline {
    () => {
        "mov %rax, %rdx; shr $32, %rdx; mov $0x6e0, %ecx; wrmsr"
    };
}

/// Milliseconds that do not pass between two steps of guest or VMM, however busy the machine is.
const NOT_BY_CHANCE: u64 = 300;

fn run(code: &[u8]) -> Outcome<Guest> {
    run_for(code, 0)
}

/// Runs a guest whose argument is a time in ticks.
fn run_for(code: &[u8], milliseconds: u64) -> Outcome<Guest> {
    tsc_rate_is_right()?;
    let guest = Guest::new(Chip::Kernel, code)?;
    guest.memory.write(ARGUMENT, milliseconds * khz(&guest)?);
    guest.finish()?;
    Ok(guest)
}

fn khz(guest: &Guest) -> Outcome<u64> {
    Ok(guest.vcpu().call(ioctl::GET_TSC_KHZ, 0).granted("KVM_GET_TSC_KHZ")? as u64)
}

/// What a guest wrote of how late its interrupt was, in ticks: not early, and not by too much.
fn in_time(guest: &Guest, late: u64) -> Outcome {
    let (late, most) = (late as i64, (khz(guest)? * LATE.as_millis() as u64) as i64);
    holds("a TSC beyond the deadline", (0..most).contains(&late), late)
}

guest_code!(
    without_exits,
    64,
    x2apic!(),
    deadline_mode!(),
    tsc_now!(),
    "add $400000, %rax",
    "mov %rax, %rbx",
    set_deadline!(),
    "sti",
    // No instruction of it exits.
    "0: cmpq $0, COUNTS + 0x40 * 8",
    "je 0b",
    "cli",
    tsc_now!(),
    "sub %rbx, %rax",
    "mov %rax, RESULT",
    done!()
);

fn a_guest_that_never_exits_gets_its_interrupt() -> Outcome {
    let guest = run(without_exits())?;
    equal("interrupts", guest.count(VECTOR), 1)?;
    in_time(&guest, guest.result(0))
}

guest_code!(
    with_exits,
    64,
    x2apic!(),
    deadline_mode!(),
    tsc_now!(),
    "add ARGUMENT, %rax",
    "mov %rax, %r8",
    set_deadline!(),
    "sti",
    "0: xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "incq RESULT + 8",
    "cmpq $0, COUNTS + 0x40 * 8",
    "je 0b",
    "cli",
    tsc_now!(),
    "sub %r8, %rax",
    "mov %rax, RESULT",
    done!()
);

fn exits_put_a_deadline_off_by_nothing() -> Outcome {
    let guest = run_for(with_exits(), NOT_BY_CHANCE)?;
    equal("interrupts", guest.count(VECTOR), 1)?;
    holds("exits meanwhile", guest.result(1) > 2, guest.result(1))?;
    in_time(&guest, guest.result(0))
}

guest_code!(
    many,
    64,
    x2apic!(),
    deadline_mode!(),
    tsc_now!(),
    "mov %rax, %r8",
    "sti",
    // Farther and nearer by turns, with an exit of another kind in between; then the last.
    "mov $40, %r9d",
    "0: mov %r9, %rax",
    "and $3, %eax",
    "imul $3000000, %rax, %rax",
    "add ARGUMENT, %rax",
    "add %r8, %rax",
    set_deadline!(),
    "xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "dec %r9d",
    "jnz 0b",
    "mov ARGUMENT, %rax",
    "lea 12000000(%rax, %r8), %rax",
    "mov %rax, %r8",
    set_deadline!(),
    "mov $0x6e0, %ecx",
    "rdmsr",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "sub %r8, %rax",
    "mov %rax, RESULT + 8",
    "0: xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "cmpq $0, COUNTS + 0x40 * 8",
    "je 0b",
    "cli",
    tsc_now!(),
    "sub %r8, %rax",
    "mov %rax, RESULT",
    done!()
);

fn the_last_of_many_deadlines_counts() -> Outcome {
    let guest = run_for(many(), NOT_BY_CHANCE)?;
    equal("interrupts", guest.count(VECTOR), 1)?;
    equal("the MSR less the last", guest.result(1), 0)?;
    in_time(&guest, guest.result(0))
}

guest_code!(
    far,
    64,
    x2apic!(),
    deadline_mode!(),
    tsc_now!(),
    "mov %rax, %r8",
    "add ARGUMENT, %rax",
    "mov %rax, %r10",
    "sti",
    set_deadline!(),
    "mov $2000, %r9d",
    "0: xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "dec %r9d",
    "jnz 0b",
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT",
    "mov $0x6e0, %ecx",
    "rdmsr",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "sub %r10, %rax",
    "mov %rax, RESULT + 8",
    tsc_now!(),
    "add $100000, %rax",
    set_deadline!(),
    "0: cmpq $0, COUNTS + 0x40 * 8",
    "je 0b",
    "cli",
    done!()
);

fn far_away(ticks: u64) -> Outcome {
    let guest = Guest::new(Chip::Kernel, far())?;
    guest.memory.write(ARGUMENT, ticks);
    guest.finish()?;
    equal("interrupts before it was brought near", guest.result(0), 0)?;
    equal("the MSR less what was written", guest.result(1), 0)?;
    equal("interrupts", guest.count(VECTOR), 1)
}

fn a_deadline_beyond_32_bits_waits_and_can_be_taken_back() -> Outcome {
    // The nearest is over a minute away: a lab machine may stand still for seconds.
    for bits in [36, 38, 40, 45, 63] {
        far_away(1 << bits)?;
    }
    Ok(())
}

guest_code!(
    farthest,
    64,
    x2apic!(),
    deadline_mode!(),
    "sti",
    "mov $-1, %rax",
    set_deadline!(),
    "mov $2000, %r9d",
    "0: xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "dec %r9d",
    "jnz 0b",
    "cli",
    "mov $0x6e0, %ecx",
    "rdmsr",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "mov %rax, RESULT",
    done!()
);

fn the_farthest_deadline_does_not_come() -> Outcome {
    let guest = Guest::new(Chip::Kernel, farthest())?;
    guest.finish()?;
    equal("interrupts", guest.count(VECTOR), 0)?;
    equal("the MSR", guest.result(0), u64::MAX)
}

guest_code!(
    without_the_timer,
    64,
    x2apic!(),
    tsc_now!(),
    "mov %rax, %rdx; shr $32, %rdx; mov $0x6e0, %ecx",
    guarded!("wrmsr"),
    "xor %eax, %eax",
    "mov $0x6e0, %ecx",
    guarded!("rdmsr"),
    "shl $32, %rdx",
    "or %rdx, %rax",
    "mov %rax, RESULT",
    done!()
);

/// The table of KVM_GET_SUPPORTED_CPUID, which has no bit of this kind before 6.14, is what the kernel's own tests give.
fn without_the_timer_in_cpuid_the_msr_is_ignored() -> Outcome {
    let guest = Guest::new(Chip::Kernel, without_the_timer())?;
    let mut table = guest.system.supported_cpuid()?;
    if let Some(leaf) = table.find(1, 0) {
        leaf.ecx = leaf.ecx & !(1 << 24) | 1 << 21;
    }
    guest.vcpu().set_cpuid(&table)?;
    guest.finish()?;
    equal("the MSR, exceptions", (guest.result(0), guest.faults().0), (0, 0))
}

guest_code!(
    short_halts,
    64,
    x2apic!(),
    deadline_mode!(),
    "mov $200, %r9d",
    "0: cli",
    tsc_now!(),
    "add $10000, %rax",
    "mov %rax, %rbx",
    set_deadline!(),
    "sti",
    "hlt",
    "cli",
    tsc_now!(),
    "cmp %rbx, %rax",
    "jae 1f",
    "incq RESULT",
    "1: dec %r9d",
    "jnz 0b",
    done!()
);

fn a_halt_shorter_than_the_polling_ends_in_time() -> Outcome {
    let guest = run(short_halts())?;
    equal("interrupts", guest.count(VECTOR), 200)?;
    equal("early ones", guest.result(0), 0)
}

guest_code!(
    long_halt,
    64,
    x2apic!(),
    deadline_mode!(),
    tsc_now!(),
    "add ARGUMENT, %rax",
    "mov %rax, %rbx",
    set_deadline!(),
    "sti",
    "hlt",
    "cli",
    tsc_now!(),
    "sub %rbx, %rax",
    "mov %rax, RESULT",
    done!()
);

fn a_kicked_halt_goes_on_and_ends_in_time() -> Outcome {
    tsc_rate_is_right()?;
    prepare();
    let guest = Guest::new(Chip::Kernel, long_halt())?;
    guest.memory.write(ARGUMENT, 100 * khz(&guest)?);
    let target = Target::new();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            let mut kicks = 0;
            loop {
                match guest.vcpu().run() {
                    Ok(exit) => break (kicks, exit.is_out(PORT_DONE)),
                    Err(_) => kicks += 1,
                }
            }
        });
        for _ in 0..3 {
            if target.sleeps() {
                target.kick();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let Ok((kicks, done)) = run.join() else { return fail("the vCPU's thread panicked") };
        holds("kicks, and then the end", kicks > 0 && done, (kicks, done))?;
        equal("interrupts", guest.count(VECTOR), 1)?;
        in_time(&guest, guest.result(0))
    })
}

guest_code!(
    through_user_space,
    64,
    x2apic!(),
    deadline_mode!(),
    tsc_now!(),
    "add ARGUMENT, %rax",
    set_deadline!(),
    "mov %al, RESULT",
    "out %al, $PORT_MARK",
    "sti",
    "nop",
    "nop",
    "cli",
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT",
    done!()
);

/// A guest in user space, whose deadline has come there.
fn overdue() -> Outcome<Guest> {
    tsc_rate_is_right()?;
    let guest = Guest::new(Chip::Kernel, through_user_space())?;
    let ticks = 5 * khz(&guest)?;
    guest.memory.write(ARGUMENT, ticks);
    guest.reach_mark()?;
    let start = tsc();
    while tsc() - start < 2 * ticks {
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(guest)
}

fn a_deadline_that_passes_in_user_space_comes_with_the_next_run() -> Outcome {
    let guest = overdue()?;
    guest.finish()?;
    equal("interrupts at once", guest.result(0), 1)?;
    equal("interrupts", guest.count(VECTOR), 1)?;
    equal("the MSR", guest.vcpu().msr(DEADLINE)?, Some(0))
}

fn a_deadline_that_passed_in_user_space_is_saved_with_the_vcpu() -> Outcome {
    let guest = overdue()?;
    let vcpu = guest.vcpu();
    let deadline = vcpu.msr(DEADLINE)?.unwrap_or(0);
    let apic: kvm_lapic_state = vcpu.receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    // As on another host: first nothing of it is left.
    vcpu.set_msr(DEADLINE, 0)?;
    let mut none = apic;
    none.regs[0x200..0x280].fill(0);
    vcpu.send(ioctl::SET_LAPIC, &none).granted("KVM_SET_LAPIC")?;
    vcpu.send(ioctl::SET_LAPIC, &apic).granted("KVM_SET_LAPIC")?;
    equal("the deadline's MSR is taken", vcpu.set_msr(DEADLINE, deadline)?, true)?;
    guest.finish()?;
    equal("interrupts at once", guest.result(0), 1)?;
    equal("interrupts", guest.count(VECTOR), 1)
}

fn the_vmm_reads_zero_after_the_interrupt() -> Outcome {
    let guest = run(without_exits())?;
    equal("the MSR", guest.vcpu().msr(DEADLINE)?, Some(0))
}

guest_code!(
    by_the_vmm,
    64,
    x2apic!(),
    deadline_mode!(),
    "out %al, $PORT_MARK",
    "sti",
    "0: cmpq $0, COUNTS + 0x40 * 8",
    "je 0b",
    "cli",
    tsc_now!(),
    "sub ARGUMENT, %rax",
    "mov %rax, RESULT",
    done!()
);

fn the_vmm_can_set_a_deadline() -> Outcome {
    tsc_rate_is_right()?;
    let guest = Guest::new(Chip::Kernel, by_the_vmm())?;
    guest.reach_mark()?;
    let now = guest.vcpu().msr(0x10)?.unwrap_or(0);
    let deadline = now + NOT_BY_CHANCE * khz(&guest)?;
    guest.memory.write(ARGUMENT, deadline);
    equal("the deadline is taken", guest.vcpu().set_msr(DEADLINE, deadline)?, true)?;
    equal("the MSR", guest.vcpu().msr(DEADLINE)?, Some(deadline))?;
    guest.finish()?;
    equal("interrupts", guest.count(VECTOR), 1)?;
    in_time(&guest, guest.result(0))
}

guest_code!(
    countdown,
    64,
    x2apic!(),
    // By 1; periodic; 20 ms.
    "mov $0x83e, %ecx; mov $0xb, %eax; xor %edx, %edx; wrmsr",
    "mov $0x832, %ecx; mov $0x20040, %eax; wrmsr",
    tsc_now!(),
    "mov %rax, %r8",
    "mov $0x838, %ecx; mov $20000000, %eax; xor %edx, %edx; wrmsr",
    "sti",
    "0: cmpq $3, COUNTS + 0x40 * 8",
    "jb 0b",
    "0: xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "cmpq $6, COUNTS + 0x40 * 8",
    "jb 0b",
    "cli",
    tsc_now!(),
    "sub %r8, %rax",
    "mov %rax, RESULT",
    // Once, now.
    "mov $0x832, %ecx; mov $0x40, %eax; xor %edx, %edx; wrmsr",
    "mov $0x838, %ecx; mov $20000000, %eax; wrmsr",
    "sti",
    "0: cmpq $7, COUNTS + 0x40 * 8",
    "jb 0b",
    tsc_now!(),
    "mov %rax, %r8",
    "0: xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    tsc_now!(),
    "sub %r8, %rax",
    "cmp ARGUMENT, %rax",
    "jb 0b",
    "cli",
    done!()
);

fn a_countdown_interrupts_a_guest_that_does_not_halt() -> Outcome {
    tsc_rate_is_right()?;
    let guest = Guest::new(Chip::Kernel, countdown())?;
    let khz = khz(&guest)?;
    guest.memory.write(ARGUMENT, 50 * khz);
    guest.finish()?;
    equal("interrupts", guest.count(VECTOR), 7)?;
    let (took, six) = (guest.result(0), 120 * khz);
    // The host measures its TSC no better than to a tenth here.
    let range = six - six / 10..six + khz * LATE.as_millis() as u64;
    holds("six periods of 20 ms", range.contains(&took), took)
}

guest_code!(
    masked,
    64,
    x2apic!(),
    deadline_mode!(),
    tsc_now!(),
    "add ARGUMENT, %rax",
    set_deadline!(),
    "mov $0x832, %ecx; mov $0x50040, %eax; xor %edx, %edx; wrmsr",
    "sti",
    tsc_now!(),
    "mov %rax, %r8",
    "0: ",
    tsc_now!(),
    "sub %r8, %rax",
    "shr $1, %rax",
    "cmp ARGUMENT, %rax",
    "jb 0b",
    "cli",
    "mov $0x6e0, %ecx",
    "rdmsr",
    "mov %rax, RESULT",
    done!()
);

fn a_masked_deadline_passes_without_an_interrupt() -> Outcome {
    let guest = run_for(masked(), NOT_BY_CHANCE)?;
    // The MSR is 0 then (SDM vol. 3A §10.5.4.1); where the host's timer is used, stock KVM and Gannet keep
    // the deadline in it while the interrupt is masked.
    equal("interrupts", guest.count(VECTOR), 0)
}
