//! What runs while a guest is moved: `--count` and `--clocks`.
//!
//! `labtests --count` is a guest that counts for ever and looks after itself. It is meant to run in a guest that is moved meanwhile from
//! VMM to VMM, from one module under it to another. Each round it checks the marks that it left in its memory the round before, its
//! registers, that its clock did not go back and that its timer comes; the console has one line of it.
//!
//! `labtests --clocks` runs in a guest as a program of its own, and has a line for each tenth of a second.

use std::time::Duration;

use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::{FREE, MEMORY_BYTES, PORT_DONE};
use crate::outcome::{Outcome, equal, fail};

/// What the guest says went wrong, from 1 on.
const REASONS: [&str; 4] = [
    "a page is not as the last round left it",
    "a register changed",
    "XMM changed",
    "TSC went back",
];

/// The pages that the guest marks are its own.
const _: () = assert!(FREE + 200 * 0x1000 <= MEMORY_BYTES);

guest_code!(
    counts,
    64,
    x2apic!(),
    "mov $0x83e, %ecx; mov $3, %eax; xor %edx, %edx; wrmsr",
    "mov $0x832, %ecx; mov $0x40, %eax; wrmsr",
    // Where all registers have their part, R15 has the round; the last time is behind the results.
    "mov $1, %r15d",
    "10: mov COUNTS + 0x40 * 8, %r12",
    "mov $0x838, %ecx; mov $200000, %eax; xor %edx, %edx; wrmsr",
    "sti",
    // 200 pages, each with marks of its own for each round; at first they are empty.
    "mov $FREE, %edi",
    "lea -1(%r15), %r8",
    "2: mov %r8, %rax; imul %rdi, %rax",
    "mov %r15, %rbx; imul %rdi, %rbx",
    "mov $1, %ebp",
    ".irp at, 0, 0x7f8, 0xff8",
    "cmp %rax, \\at(%rdi); jne 20f; mov %rbx, \\at(%rdi)",
    ".endr",
    "add $0x1000, %rdi",
    "cmp $FREE + 200 * 0x1000, %edi",
    "jne 2b",
    // Every register holds something while the time passes, with an exit of the hypervisor's now and then.
    "mov %r15, %rsi; not %rsi",
    "lea 3(%r15), %r8; lea 5(%r15), %r9; lea 7(%r15), %r10; lea 11(%r15), %r11; lea 13(%r15), %r13",
    "movq %r15, %xmm0; movq %rsi, %xmm1; movq %r8, %xmm7; movq %r9, %xmm15",
    "punpcklqdq %xmm1, %xmm0",
    "mov $20, %r14d",
    "3: xor %eax, %eax; cpuid",
    "mov $10000, %ecx",
    "4: pause; dec %ecx; jnz 4b",
    "dec %r14d; jnz 3b",
    "mov $2, %ebp",
    "mov %r15, %rax; not %rax; cmp %rsi, %rax; jne 20f",
    "lea 3(%r15), %rax; cmp %rax, %r8; jne 20f",
    "lea 5(%r15), %rax; cmp %rax, %r9; jne 20f",
    "lea 7(%r15), %rax; cmp %rax, %r10; jne 20f",
    "lea 11(%r15), %rax; cmp %rax, %r11; jne 20f",
    "lea 13(%r15), %rax; cmp %rax, %r13; jne 20f",
    "cmp $FREE + 200 * 0x1000, %rdi; jne 20f",
    "mov $3, %ebp",
    "movq %xmm0, %rax; cmp %rax, %r15; jne 20f",
    "psrldq $8, %xmm0; movq %xmm0, %rax; cmp %rax, %rsi; jne 20f",
    "movq %xmm7, %rax; cmp %rax, %r8; jne 20f",
    "movq %xmm15, %rax; cmp %rax, %r9; jne 20f",
    "mov $4, %ebp",
    "rdtsc; shl $32, %rdx; or %rdx, %rax",
    "cmp RESULT + 16, %rax; jb 20f",
    "mov %rax, RESULT + 16",
    // The timer comes, be it long ago.
    "5: cli; cmp COUNTS + 0x40 * 8, %r12; jne 6f",
    "sti; hlt; jmp 5b",
    "6: sti",
    "mov %r15, RESULT",
    "out %al, $PORT_MARK",
    "inc %r15",
    "jmp 10b",
    "20: mov %rbp, RESULT + 8",
    "mov %rax, RESULT + 24",
    "mov %rdi, RESULT + 32",
    done!(),
);

/// Runs the guest; a line for each round, from 1 on. Comes back if something is wrong, and else never.
pub fn count() -> Outcome {
    let guest = Guest::new(Chip::Kernel, counts())?;
    let mut round = 0;
    loop {
        let exit = guest.exit()?;
        if exit.is_out(PORT_DONE) {
            let reason = (guest.result(1) as usize).checked_sub(1).and_then(|at| REASONS.get(at));
            return fail(format!(
                "in round {}: {}: {:#x}, {:#x}",
                round + 1,
                reason.unwrap_or(&"?"),
                guest.result(3),
                guest.result(4)
            ));
        }
        round += 1;
        equal("the round", guest.result(0), round)?;
        println!("guest: tick {round}");
    }
}

/// The three clocks of a guest's programs: the time-stamp counter, and nanoseconds since boot and of the day.
#[derive(Clone, Copy)]
struct Clocks {
    tsc: u64,
    boot: u64,
    day: u64,
}

impl Clocks {
    fn now() -> Self {
        // SAFETY: every x86-64 CPU has the instruction, and Linux lets programs use it.
        let tsc = unsafe { std::arch::x86_64::_rdtsc() };
        Self { tsc, boot: clock(libc::CLOCK_MONOTONIC), day: clock(libc::CLOCK_REALTIME) }
    }

    /// The first clock of which `later` is less than this.
    fn back(&self, later: &Self) -> Option<&'static str> {
        let pairs = [
            ("TSC", self.tsc, later.tsc),
            ("boot", self.boot, later.boot),
            ("day", self.day, later.day),
        ];
        pairs.into_iter().find(|(_, before, after)| after < before).map(|(name, ..)| name)
    }
}

/// One of the kernel's clocks in nanoseconds.
fn clock(which: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours.
    unsafe { libc::clock_gettime(which, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Moves this thread to another of the CPUs that there are.
fn go_to(cpu: usize) {
    // SAFETY: an empty set is all zeroes; CPU_SET stays inside of it.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu % libc::CPU_SETSIZE as usize, &mut set);
        set
    };
    // SAFETY: the set is ours. A CPU that is not there is refused, and the thread stays.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
}

/// Looks at the clocks, on one CPU after the other, in order, and prints them; the longest time between two looks goes with each line,
/// in microseconds. Comes back when one has gone back, and else never.
pub fn clocks() -> Outcome {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut last = Clocks::now();
    for tick in 1_usize.. {
        let (until, mut longest) = (last.boot + 30_000_000, 0);
        while last.boot < until {
            let now = Clocks::now();
            if let Some(name) = last.back(&now) {
                return fail(format!(
                    "{name} went back: {} {} {} after {} {} {}",
                    now.tsc, now.boot, now.day, last.tsc, last.boot, last.day
                ));
            }
            longest = longest.max((now.boot - last.boot) / 1000);
            last = now;
        }
        let (boot, day) = (last.boot / 1_000_000, last.day / 1_000_000);
        println!("guest: clocks {tick} tsc {} boot {boot} day {day} longest {longest}", last.tsc);
        go_to(tick % cpus);
        std::thread::sleep(Duration::from_millis(70));
        // Across the sleep and to the next CPU the clocks are in order as well; the time slept is no stop.
        let now = Clocks::now();
        if let Some(name) = last.back(&now) {
            return fail(format!("{name} went back behind tick {tick}"));
        }
        last = now;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_goes_back_is_named() {
        let before = Clocks { tsc: 5, boot: 5, day: 5 };
        assert_eq!(before.back(&before), None);
        assert_eq!(before.back(&Clocks { day: 4, ..before }), Some("day"));
        assert_eq!(before.back(&Clocks { tsc: 4, boot: 9, day: 9 }), Some("TSC"));
    }
}
