//! The local APIC and its timer (APM vol. 2 §16).

use std::time::{Duration, Instant};

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::clock::tsc_rate_is_right;
use crate::machine::code::{done, guarded, guest_code, x2apic, xapic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::threads::{Target, within};
use crate::outcome::{Answer, Outcome, equal, holds};
use crate::runner::tests;

tests!("lapic":
    an_interrupt_to_self_arrives_in_x2apic_mode,
    an_interrupt_to_self_arrives_in_xapic_mode,
    interrupts_wait_while_they_are_disabled,
    the_higher_vector_comes_first,
    a_higher_vector_interrupts_the_handler_of_a_lower_one,
    the_task_priority_holds_lower_vectors_back,
    cr8_is_the_task_priority,
    a_disabled_apic_takes_no_interrupts,
    the_id_and_version_are_the_same_in_both_modes,
    x2apic_registers_are_not_there_in_xapic_mode,
    reserved_x2apic_registers_are_general_protection_faults,
    the_in_service_and_request_registers_follow_an_interrupt,
    a_one_shot_timer_fires_once,
    a_one_shot_timer_fires_in_time,
    the_current_count_goes_down,
    a_periodic_timer_fires_again_and_again,
    a_masked_timer_does_not_fire,
    a_tsc_deadline_fires_in_time,
    a_tsc_deadline_in_the_past_fires_at_once,
    a_tsc_deadline_of_zero_disarms,
    a_tsc_deadline_can_be_moved,
    the_timer_wakes_a_halted_guest_again_and_again,
);

fn run(code: &[u8]) -> Outcome<Guest> {
    let guest = Guest::new(Chip::Kernel, code)?;
    guest.finish()?;
    Ok(guest)
}

/// Sends the calling CPU an interrupt by the x2APIC's self-IPI register. ECX, EAX, EDX are lost.
macro_rules! self_ipi {
    ($vector:literal) => {
        concat!("mov $0x83f, %ecx; mov $", $vector, ", %eax; xor %edx, %edx; wrmsr")
    };
}

guest_code!(
    to_self_x2apic,
    64,
    x2apic!(),
    "sti",
    self_ipi!("0x40"),
    "nop",
    self_ipi!("0x40"),
    self_ipi!("0xf0"),
    // By the command register, to itself.
    "mov $0x830, %ecx",
    "mov $0x44041, %eax",
    "wrmsr",
    "nop",
    done!()
);

fn an_interrupt_to_self_arrives_in_x2apic_mode() -> Outcome {
    let guest = run(to_self_x2apic())?;
    let got = [0x40, 0xf0, 0x41].map(|vector| guest.count(vector));
    equal("interrupts 0x40, 0xf0, 0x41", got, [2, 1, 1])
}

guest_code!(
    to_self_xapic,
    64,
    xapic!(),
    "sti",
    "mov $0xfee00300, %ebx",
    "movl $0x44040, (%rbx)",
    "nop",
    "movl $0x44040, (%rbx)",
    "nop",
    // To its id.
    "movl $0, 0x10(%rbx)",
    "movl $0x4041, (%rbx)",
    "nop",
    "mov (%rbx), %eax",
    "mov %rax, RESULT",
    done!()
);

fn an_interrupt_to_self_arrives_in_xapic_mode() -> Outcome {
    let guest = run(to_self_xapic())?;
    equal("interrupts 0x40, 0x41", [0x40, 0x41].map(|v| guest.count(v)), [2, 1])?;
    equal("delivery status", guest.result(0) >> 12 & 1, 0)
}

guest_code!(
    while_disabled,
    64,
    x2apic!(),
    self_ipi!("0x40"),
    self_ipi!("0x40"),
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT",
    "sti",
    "nop",
    "nop",
    "cli",
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT + 8",
    done!()
);

fn interrupts_wait_while_they_are_disabled() -> Outcome {
    let guest = run(while_disabled())?;
    equal("before and after sti", (guest.result(0), guest.result(1)), (0, 1))
}

guest_code!(
    // Every interrupt notes its vector.
    in_order,
    64,
    x2apic!(),
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 0x40 * 8",
    "mov %rax, HOOKS + 0x60 * 8",
    "mov %rax, HOOKS + 0x50 * 8",
    "mov $RESULT, %edi",
    self_ipi!("0x40"),
    self_ipi!("0x60"),
    self_ipi!("0x50"),
    "sti",
    "nop",
    "nop",
    done!(),
    "1: mov 24(%rsp), %rax",
    "movzbl %al, %eax",
    "mov %rax, (%rdi)",
    "add $8, %rdi",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn the_higher_vector_comes_first() -> Outcome {
    let guest = run(in_order())?;
    let got = [0, 1, 2].map(|index| guest.result(index));
    equal("vectors in order", got, [0x60, 0x50, 0x40])
}

guest_code!(
    nested,
    64,
    x2apic!(),
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 0x50 * 8",
    "sti",
    self_ipi!("0x50"),
    "nop",
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT + 16",
    done!(),
    "1: sti",
    self_ipi!("0x40"),
    self_ipi!("0x70"),
    "nop",
    "nop",
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT",
    "mov COUNTS + 0x70 * 8, %rax",
    "mov %rax, RESULT + 8",
    "cli",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn a_higher_vector_interrupts_the_handler_of_a_lower_one() -> Outcome {
    let guest = run(nested())?;
    let got = [0, 1, 2].map(|index| guest.result(index));
    equal("0x40 and 0x70 inside of 0x50, 0x40 after it", got, [0, 1, 1])
}

guest_code!(
    task_priority,
    64,
    x2apic!(),
    "sti",
    "mov $0x808, %ecx",
    "mov $0x50, %eax",
    "xor %edx, %edx",
    "wrmsr",
    self_ipi!("0x40"),
    self_ipi!("0x5f"),
    self_ipi!("0x60"),
    "nop",
    "mov COUNTS + 0x40 * 8, %rax",
    "add COUNTS + 0x5f * 8, %rax",
    "mov %rax, RESULT",
    "mov COUNTS + 0x60 * 8, %rax",
    "mov %rax, RESULT + 8",
    "mov $0x808, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "nop",
    "nop",
    "mov COUNTS + 0x40 * 8, %rax",
    "add COUNTS + 0x5f * 8, %rax",
    "mov %rax, RESULT + 16",
    done!()
);

fn the_task_priority_holds_lower_vectors_back() -> Outcome {
    let guest = run(task_priority())?;
    let got = [0, 1, 2].map(|index| guest.result(index));
    equal("lower held, higher taken, lower after", got, [0, 1, 2])
}

guest_code!(
    by_cr8,
    64,
    x2apic!(),
    "sti",
    "mov $7, %eax",
    "mov %rax, %cr8",
    "mov $0x808, %ecx",
    "rdmsr",
    "mov %rax, RESULT",
    self_ipi!("0x40"),
    "nop",
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT + 8",
    "xor %eax, %eax",
    "mov %rax, %cr8",
    "nop",
    "nop",
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT + 16",
    // And the other way round.
    "mov $0x808, %ecx",
    "mov $0xa0, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov %cr8, %rax",
    "mov %rax, RESULT + 24",
    done!()
);

fn cr8_is_the_task_priority() -> Outcome {
    let guest = run(by_cr8())?;
    let got = [0, 1, 2, 3].map(|index| guest.result(index));
    equal("TPR, held, taken, CR8", got, [0x70, 0, 1, 0xa])
}

guest_code!(
    software_disabled,
    64,
    x2apic!(),
    "mov $0x80f, %ecx",
    "mov $0xff, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "sti",
    self_ipi!("0x40"),
    "nop",
    "nop",
    done!()
);

fn a_disabled_apic_takes_no_interrupts() -> Outcome {
    equal("interrupts", run(software_disabled())?.count(0x40), 0)
}

guest_code!(
    both_modes,
    64,
    xapic!(),
    "mov $0xfee00020, %ebx",
    "mov (%rbx), %eax",
    "shr $24, %eax",
    "mov %rax, RESULT",
    "mov 0x10(%rbx), %eax",
    "mov %rax, RESULT + 8",
    x2apic!(),
    "mov $0x802, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 16",
    "mov $0x803, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 24",
    done!()
);

fn the_id_and_version_are_the_same_in_both_modes() -> Outcome {
    let guest = run(both_modes())?;
    equal("id", (guest.result(0), guest.result(2)), (0, 0))?;
    equal("version", guest.result(1), guest.result(3))?;
    equal("version's low byte", guest.result(1) & 0xff, 0x14)
}

guest_code!(
    x2apic_registers,
    64,
    "mov $0x802, %ecx",
    guarded!("rdmsr"),
    "mov $0x80b, %ecx",
    guarded!("wrmsr"),
    done!()
);

fn x2apic_registers_are_not_there_in_xapic_mode() -> Outcome {
    equal("exceptions, vector, error code", run(x2apic_registers())?.faults(), (2, 13, 0))
}

guest_code!(
    reserved_registers,
    64,
    x2apic!(),
    // A hole; the destination format register; the version.
    "xor %edx, %edx",
    "mov $1, %eax",
    "mov $0x801, %ecx",
    guarded!("rdmsr"),
    "mov $0x80e, %ecx",
    guarded!("rdmsr"),
    "mov $0x803, %ecx",
    guarded!("wrmsr"),
    done!()
);

fn reserved_x2apic_registers_are_general_protection_faults() -> Outcome {
    equal("exceptions, vector, error code", run(reserved_registers())?.faults(), (3, 13, 0))
}

guest_code!(
    in_service,
    64,
    x2apic!(),
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 0x40 * 8",
    self_ipi!("0x40"),
    "mov $0x822, %ecx",
    "rdmsr",
    "mov %rax, RESULT",
    "sti",
    "nop",
    "cli",
    "mov $0x812, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 24",
    done!(),
    // Request, service, processor priority.
    "1: mov $0x822, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 8",
    "mov $0x812, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 16",
    "mov $0x80a, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 32",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn the_in_service_and_request_registers_follow_an_interrupt() -> Outcome {
    let guest = run(in_service())?;
    let got = [0, 1, 2, 3, 4].map(|index| guest.result(index));
    equal("IRR before, IRR and ISR inside, ISR after, PPR inside", got, [1, 0, 1, 0, 0x40])
}

/// Sets up the timer: divider 1, the vector and mode, then the count.
macro_rules! timer {
    ($mode_and_vector:literal, $count:literal) => {
        concat!(
            "xor %edx, %edx; mov $0x83e, %ecx; mov $0xb, %eax; wrmsr; ",
            "mov $0x832, %ecx; mov $",
            $mode_and_vector,
            ", %eax; wrmsr; mov $0x838, %ecx; mov $",
            $count,
            ", %eax; wrmsr"
        )
    };
}

guest_code!(
    one_shot,
    64,
    x2apic!(),
    timer!("0x40", "1000000"),
    "sti",
    "hlt",
    "cli",
    "mov $0x839, %ecx",
    "rdmsr",
    "mov %rax, RESULT",
    done!()
);

fn a_one_shot_timer_fires_once() -> Outcome {
    let guest = run(one_shot())?;
    equal("interrupts", guest.count(0x40), 1)?;
    equal("count that is left", guest.result(0), 0)
}

guest_code!(
    // 20 ms: the APIC's timer counts nanoseconds.
    twenty_ms,
    64,
    x2apic!(),
    timer!("0x40", "20000000"),
    "sti",
    "hlt",
    done!()
);

fn a_one_shot_timer_fires_in_time() -> Outcome {
    let guest = Guest::new(Chip::Kernel, twenty_ms())?;
    let start = Instant::now();
    guest.finish()?;
    let time = start.elapsed();
    equal("interrupts", guest.count(0x40), 1)?;
    in_time(time, Duration::from_millis(20))
}

/// Not early; and not by much too late for an emulated machine.
fn in_time(time: Duration, wanted: Duration) -> Outcome {
    let late = Duration::from_millis(500);
    holds(&format!("{wanted:?} to {late:?} more"), time >= wanted && time < wanted + late, time)
}

guest_code!(
    count_down,
    64,
    x2apic!(),
    timer!("0x10040", "0xffffffff"),
    "mov $0x839, %ecx",
    "rdmsr",
    "mov %rax, RESULT",
    "mov $1000, %ebx",
    "0: dec %ebx",
    "jnz 0b",
    "rdmsr",
    "mov %rax, RESULT + 8",
    "mov $0x838, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $0x839, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 16",
    done!()
);

fn the_current_count_goes_down() -> Outcome {
    let guest = run(count_down())?;
    let (first, second) = (guest.result(0), guest.result(1));
    holds("a count that goes down", first > second && second > 0, (first, second))?;
    equal("count when stopped", guest.result(2), 0)
}

guest_code!(
    periodic,
    64,
    x2apic!(),
    timer!("0x20040", "2000000"),
    "sti",
    "0: hlt",
    "cmpq $5, COUNTS + 0x40 * 8",
    "jb 0b",
    "cli",
    "mov $0x832, %ecx",
    "mov $0x10040, %eax",
    "xor %edx, %edx",
    "wrmsr",
    done!()
);

fn a_periodic_timer_fires_again_and_again() -> Outcome {
    let guest = Guest::new(Chip::Kernel, periodic())?;
    let start = Instant::now();
    guest.finish()?;
    equal("interrupts", guest.count(0x40), 5)?;
    in_time(start.elapsed(), Duration::from_millis(10))
}

guest_code!(
    masked,
    64,
    x2apic!(),
    timer!("0x10040", "1000"),
    "sti",
    "mov $100000, %ebx",
    "0: dec %ebx",
    "jnz 0b",
    "cli",
    done!()
);

fn a_masked_timer_does_not_fire() -> Outcome {
    equal("interrupts", run(masked())?.count(0x40), 0)
}

/// TSC-deadline mode with vector 0x40.
macro_rules! deadline_mode {
    () => {
        "mov $0x832, %ecx; mov $0x40040, %eax; xor %edx, %edx; wrmsr"
    };
}

guest_code!(
    deadline,
    64,
    x2apic!(),
    deadline_mode!(),
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "add ARGUMENT, %rax",
    "mov %rax, %rbx",
    "mov %rax, %rdx",
    "shr $32, %rdx",
    "mov $0x6e0, %ecx",
    "wrmsr",
    "rdmsr",
    "mov %eax, RESULT + 8",
    "mov %edx, RESULT + 12",
    "mov %rbx, RESULT + 16",
    "sti",
    "hlt",
    "cli",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "sub %rbx, %rax",
    "mov %rax, RESULT",
    "mov $0x6e0, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 24",
    done!()
);

fn a_tsc_deadline_fires_in_time() -> Outcome {
    tsc_rate_is_right()?;
    let guest = Guest::new(Chip::Kernel, deadline())?;
    let khz = guest.vcpu().call(ioctl::GET_TSC_KHZ, 0).granted("KVM_GET_TSC_KHZ")? as u64;
    guest.memory.write(ARGUMENT, 20 * khz);
    let start = Instant::now();
    guest.finish()?;
    equal("interrupts", guest.count(0x40), 1)?;
    in_time(start.elapsed(), Duration::from_millis(20))?;
    let late = guest.result(0) as i64;
    holds("a TSC beyond the deadline", (0..500 * khz as i64).contains(&late), late)?;
    equal("the MSR while armed", guest.result(1), guest.result(2))?;
    equal("the MSR after", guest.result(3), 0)
}

guest_code!(
    past_deadline,
    64,
    x2apic!(),
    deadline_mode!(),
    "sti",
    "mov $0x6e0, %ecx",
    "mov $1, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "nop",
    "nop",
    "mov COUNTS + 0x40 * 8, %rax",
    "mov %rax, RESULT",
    "mov $1, %eax",
    "wrmsr",
    "hlt",
    done!()
);

fn a_tsc_deadline_in_the_past_fires_at_once() -> Outcome {
    // The second may be taken before the halt, which then goes on until the kick.
    let guest = Guest::new(Chip::Kernel, past_deadline())?;
    let target = Target::new();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            guest.vcpu().run()
        });
        let came = within(Duration::from_secs(2), || guest.count(0x40) == 2);
        target.kick();
        let _ = run.join();
        holds("two interrupts", came, guest.count(0x40))?;
        equal("interrupts at once", guest.result(0), 1)
    })
}

guest_code!(
    disarmed,
    64,
    x2apic!(),
    deadline_mode!(),
    "rdtsc",
    "add $0x1000000, %rax",
    "mov $0x6e0, %ecx",
    "wrmsr",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "sti",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "lea 0x2000000(%rax), %rbx",
    "0: rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "cmp %rbx, %rax",
    "jb 0b",
    "cli",
    done!()
);

fn a_tsc_deadline_of_zero_disarms() -> Outcome {
    tsc_rate_is_right()?;
    equal("interrupts", run(disarmed())?.count(0x40), 0)
}

guest_code!(
    moved,
    64,
    x2apic!(),
    deadline_mode!(),
    // Soon; then later; then soon again: only the last counts.
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "mov %rax, %rbx",
    "mov $0x6e0, %ecx",
    "add $0x1000000, %rax",
    "mov %rax, %rdx",
    "shr $32, %rdx",
    "wrmsr",
    "lea 0x6000000(%rbx), %rax",
    "mov %rax, %rsi",
    "mov %rax, %rdx",
    "shr $32, %rdx",
    "wrmsr",
    "sti",
    "hlt",
    "cli",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "sub %rsi, %rax",
    "mov %rax, RESULT",
    done!()
);

fn a_tsc_deadline_can_be_moved() -> Outcome {
    tsc_rate_is_right()?;
    let guest = run(moved())?;
    equal("interrupts", guest.count(0x40), 1)?;
    holds("a TSC beyond the later deadline", guest.result(0) as i64 >= 0, guest.result(0) as i64)
}

guest_code!(
    many_deadlines,
    64,
    x2apic!(),
    deadline_mode!(),
    "mov $50, %ebx",
    "0: rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "add $200000, %rax",
    "mov %rax, %rdx",
    "shr $32, %rdx",
    "mov $0x6e0, %ecx",
    "cli",
    "wrmsr",
    "sti",
    "hlt",
    "dec %ebx",
    "jnz 0b",
    done!()
);

fn the_timer_wakes_a_halted_guest_again_and_again() -> Outcome {
    tsc_rate_is_right()?;
    let guest = run(many_deadlines())?;
    equal("interrupts", guest.count(0x40), 50)?;
    let apic: kvm_lapic_state = guest.vcpu().receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    equal("mode of the timer", apic.regs[0x322] as u8 & 7, 4)
}
