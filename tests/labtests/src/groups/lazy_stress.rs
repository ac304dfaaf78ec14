//! Deadlines moved again and again against their expiry, with the lazy TSC deadline and without:
//! nothing is lost, nothing early, nothing unasked. `LABTESTS_REARMS` says how often per vCPU.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvm_bindings::*;

use super::lazy_deadline::is_offered;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::clock::tsc_rate_is_right;
use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::memory::Memory;
use crate::machine::threads::Target;
use crate::outcome::{Answer, Outcome, equal, fail, holds};
use crate::runner::{slowness, tests};

tests!("lazy_stress":
    rearms_against_random_expiries_lose_nothing_and_nothing_is_early,
    rearms_without_the_feature_lose_nothing,
    a_guest_that_scribbles_into_anothers_page_stops_nobody,
    a_page_under_dirty_logging_loses_no_deadline,
);

/// Each vCPU's page, with what it notes behind it.
const STATES: u64 = 0x40_0000;
const STATE_BYTES: u64 = 0x4000;
const SLOT: u32 = 1;

// Offsets in a state, as the assembly has them.
const EARLY: u64 = 0x110;
const UNASKED: u64 = 0x118;
const LOST: u64 = 0x120;
const TAKEN: u64 = 0x128;
const OVERTAKEN: u64 = 0x130;
const LATEST: u64 = 0x138;
const LEFT: u64 = 0x140;
const WRITES: u64 = 0x148;
const SEED: u64 = 0x150;
const LAZY_MSR: u64 = 0x158;
const TOGGLES: u64 = 0x160;
/// Another interrupt may come for a deadline that had come when it was replaced.
const MAY_COME: u64 = 0x190;
/// The last early interrupt: TSC, deadline, the one before if it had come, RIP and RFLAGS.
const LAST_EARLY: [u64; 5] = [0x168, 0x170, 0x178, 0x180, 0x188];
/// Interrupts by how late they were: 1024 counts, 256 ticks each, the last for all beyond.
const LATENESS: u64 = 0x1000;
const LATENESS_TICKS: u64 = 256;

guest_code!(
    // r15: the state. 0x100 is the deadline that an interrupt is due for, 0x108 one that had come
    // when it was replaced, so that its interrupt may have been on its way. Where both have come, the
    // first interrupt is taken for the newer one, and 0x190 says that another may come.
    rearming,
    64,
    "mov $0xff, %al; out %al, $0x21; out %al, $0xa1",
    "mov %rdi, %r15",
    x2apic!(),
    "lea 6f(%rip), %rax",
    "mov %rax, HOOKS + 0x40 * 8",
    "mov $0x832, %ecx",
    "mov $0x40040, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "movq $0, 0x100(%r15)",
    "movq $-1, 0x108(%r15)",
    "mov 0x150(%r15), %rbx",
    "mov 0x140(%r15), %r14",
    "call 10f",
    "1:",
    // xorshift.
    "mov %rbx, %rax; shl $13, %rax; xor %rax, %rbx",
    "mov %rbx, %rax; shr $7, %rax; xor %rax, %rbx",
    "mov %rbx, %rax; shl $17, %rax; xor %rax, %rbx",
    "sti; nop; cli",
    // What has come is waited for.
    "mov 0x100(%r15), %r8",
    "test %r8, %r8",
    "jz 2f",
    "rdtsc; shl $32, %rdx; or %rdx, %rax",
    "cmp %r8, %rax",
    "jb 2f",
    "call 20f",
    "jmp 1b",
    // A deadline 300 to 524 thousand ticks ahead, short ones more often.
    "2: rdtsc; shl $32, %rdx; or %rdx, %rax",
    "mov %rbx, %rcx; shr $40, %rcx; and $7, %ecx",
    "mov %rbx, %rsi; and $0xfff, %esi; shl %cl, %rsi",
    "lea 300(%rax,%rsi), %rax",
    "movq $-1, 0x108(%r15)",
    "mov %rax, 0x100(%r15)",
    "cmpq $0, 0x158(%r15)",
    "je 3f",
    "mov %rax, 8(%r15)",
    "mfence",
    "mov (%r15), %rcx",
    "test %rcx, %rcx",
    "jz 3f",
    "cmp %rcx, %rax",
    "jae 4f",
    "3: mov %rax, %rdx; shr $32, %rdx",
    "mov $0x6e0, %ecx",
    "wrmsr",
    "incq 0x148(%r15)",
    "4: test %r8, %r8",
    "jz 5f",
    "rdtsc; shl $32, %rdx; or %rdx, %rax",
    "cmp %r8, %rax",
    "jb 5f",
    "mov %r8, 0x108(%r15)",
    "5:",
    // Sometimes the deadline is waited for, awake or asleep, or given up, or the page is.
    "mov %rbx, %rcx; shr $48, %rcx",
    "test $0x1f, %cl",
    "jnz 5f",
    "test $0x20, %cl",
    "jnz 4f",
    "call 20f",
    "jmp 5f",
    "4: cmpq $0, 0x100(%r15)",
    "je 5f",
    "sti; hlt; cli",
    "jmp 4b",
    "5: test $0x1ff, %cx",
    "jnz 5f",
    "mov 0x100(%r15), %r8",
    "test %r8, %r8",
    "jz 5f",
    "movq $0, 0x100(%r15)",
    "mov $0x6e0, %ecx; xor %eax, %eax; xor %edx, %edx; wrmsr",
    "rdtsc; shl $32, %rdx; or %rdx, %rax",
    "movq $-1, 0x108(%r15)",
    "cmp %r8, %rax",
    "jb 5f",
    "mov %r8, 0x108(%r15)",
    "5: mov %rbx, %rcx; shr $37, %rcx",
    "test $0x3ff, %ecx",
    "jnz 5f",
    "call 10f",
    "5: dec %r14",
    "mov %r14, 0x140(%r15)",
    "jnz 1b",
    "call 20f",
    "mov $0x4b564d09, %ecx; xor %eax, %eax; xor %edx, %edx",
    "cmpq $0, 0x158(%r15)",
    "je 5f",
    "wrmsr",
    "5:",
    done!(),
    // Switches the feature off and on.
    "10: cmpq $0, 0x158(%r15)",
    "je 5f",
    "mov $0x4b564d09, %ecx; xor %eax, %eax; xor %edx, %edx; wrmsr",
    "mov 0x158(%r15), %rax; xor %edx, %edx; wrmsr",
    "incq 0x160(%r15)",
    "5: ret",
    // Waits until the deadline's interrupt was taken, for 2^33 ticks beyond it at most.
    "20: mov 0x100(%r15), %r8",
    "test %r8, %r8",
    "jz 5f",
    "mov $1, %r9d; shl $33, %r9; add %r8, %r9",
    "4: sti; pause; cli",
    "cmpq $0, 0x100(%r15)",
    "je 5f",
    "rdtsc; shl $32, %rdx; or %rdx, %rax",
    "cmp %r9, %rax",
    "jb 4b",
    "incq 0x120(%r15)",
    "movq $0, 0x100(%r15)",
    "5: ret",
    // The interrupt.
    "6: rdtsc; shl $32, %rdx; or %rdx, %rax",
    "mov 0x100(%r15), %rcx",
    "test %rcx, %rcx",
    "jz 3f",
    "cmp %rcx, %rax",
    "jb 2f",
    "movq $0, 0x100(%r15)",
    "incq 0x128(%r15)",
    "xor %edx, %edx",
    "cmpq $-1, 0x108(%r15)",
    "setne %dl",
    "mov %rdx, 0x190(%r15)",
    "movq $-1, 0x108(%r15)",
    "sub %rcx, %rax",
    "cmp 0x138(%r15), %rax",
    "jbe 1f",
    "mov %rax, 0x138(%r15)",
    "1: shr $8, %rax",
    "mov $1023, %ecx",
    "cmp %rcx, %rax",
    "cmova %rcx, %rax",
    "incq 0x1000(%r15,%rax,8)",
    "jmp 4f",
    "2: cmp 0x108(%r15), %rax",
    "jae 1f",
    "cmpq $0, 0x190(%r15)",
    "jne 1f",
    "incq 0x110(%r15)",
    "mov %rax, 0x168(%r15)",
    "mov %rcx, 0x170(%r15)",
    "mov 0x108(%r15), %rax",
    "mov %rax, 0x178(%r15)",
    "mov 40(%rsp), %rax",
    "mov %rax, 0x180(%r15)",
    "mov 56(%rsp), %rax",
    "mov %rax, 0x188(%r15)",
    "jmp 4f",
    "3: cmp 0x108(%r15), %rax",
    "jae 1f",
    "cmpq $0, 0x190(%r15)",
    "jne 1f",
    "incq 0x118(%r15)",
    "jmp 4f",
    "1: incq 0x130(%r15)",
    "movq $-1, 0x108(%r15)",
    "movq $0, 0x190(%r15)",
    "4: mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

/// How often each vCPU moves its deadline.
fn rearms() -> u64 {
    let asked = std::env::var("LABTESTS_REARMS").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(5_000)
}

struct Stress {
    guest: Guest,
    states: Memory,
}

impl Stress {
    fn new(vcpus: u32, lazy: bool, rearms: u64) -> Outcome<Self> {
        tsc_rate_is_right()?;
        let guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, vcpus, rearming())?;
        if lazy {
            is_offered(&guest)?;
        }
        let states = Memory::new(u64::from(vcpus) * STATE_BYTES)?;
        guest.vm.set_slot(SLOT, 0, STATES, states.bytes(), states.hva()).granted("slot")?;
        for (n, vcpu) in guest.vcpus.iter().enumerate() {
            let state = n as u64 * STATE_BYTES;
            states.write(state + LEFT, rearms);
            states.write(state + SEED, 0x9e37_79b9_7f4a_7c15 ^ (n as u64 + 1));
            states.write(state + LAZY_MSR, if lazy { STATES + state + 1 } else { 0 });
            let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
            vcpu.send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
            let mut regs = vcpu.regs()?;
            regs.rdi = STATES + state;
            vcpu.set_regs(&regs)?;
        }
        Ok(Self { guest, states })
    }

    fn noted(&self, vcpu: usize, what: u64) -> u64 {
        self.states.read(vcpu as u64 * STATE_BYTES + what)
    }

    /// Runs all vCPUs to their end, `beside` meanwhile. A vCPU that does not come forward for ten
    /// seconds is stuck.
    fn run(&self, beside: impl Fn(&AtomicBool) + Sync) -> Outcome {
        let over = AtomicBool::new(false);
        let most_looks = 500 * slowness();
        let targets: Vec<Target> = self.guest.vcpus.iter().map(|_| Target::new()).collect();
        std::thread::scope(|scope| {
            let running: Vec<_> = targets
                .iter()
                .enumerate()
                .map(|(n, target)| {
                    scope.spawn(move || {
                        target.is_me();
                        self.guest.finish_of(n)
                    })
                })
                .collect();
            scope.spawn(|| beside(&over));
            let left = || (0..targets.len()).map(|n| self.noted(n, LEFT)).collect::<Vec<_>>();
            let (mut seen, mut looks, mut stuck) = (left(), 0, None);
            while !running.iter().all(|thread| thread.is_finished()) {
                std::thread::sleep(Duration::from_millis(20));
                if left() != seen {
                    (seen, looks) = (left(), 0);
                    continue;
                }
                // Looks are counted and not time: of a machine that stood still nobody is stuck.
                looks += 1;
                if looks > most_looks {
                    stuck = Some(seen.clone());
                    for (vcpu, target) in self.guest.vcpus.iter().zip(&targets) {
                        vcpu.set_immediate_exit(1);
                        target.kick();
                    }
                }
            }
            over.store(true, Relaxed);
            if let Some(left) = stuck {
                return fail(format!("expected progress got none, with {left:?} rearms left"));
            }
            running.into_iter().try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(_) => fail("a vCPU's thread died"),
            })
        })
    }

    /// By how many ticks so many of a thousand interrupts came late at most.
    fn lateness(&self, vcpu: usize, thousandths: u64) -> u64 {
        let counts: Vec<u64> = (0..1024).map(|n| self.noted(vcpu, LATENESS + n * 8)).collect();
        let wanted = counts.iter().sum::<u64>() * thousandths / 1000;
        let mut seen = 0;
        let within = counts.iter().take_while(|count| {
            seen += **count;
            seen <= wanted
        });
        (within.count() as u64 + 1) * LATENESS_TICKS
    }

    /// Nothing lost, early or unasked; what was taken is told.
    fn verdict(&self, what: &str, rearms: u64) -> Outcome {
        for vcpu in 0..self.guest.vcpus.len() {
            let n = |what| self.noted(vcpu, what);
            if std::env::var_os("LABTESTS_REARMS").is_some() {
                println!(
                    "# {what}, vCPU {vcpu}: {rearms} rearms, {} writes of the MSR, {} interrupts and \
                     {} of deadlines overtaken on their way, {} lost, {} early, {} unasked, late \
                     by {} ticks at the median, {} at the 99.9th percentile, {} at most, the page \
                     given up {} times",
                    n(WRITES),
                    n(TAKEN),
                    n(OVERTAKEN),
                    n(LOST),
                    n(EARLY),
                    n(UNASKED),
                    self.lateness(vcpu, 500),
                    self.lateness(vcpu, 999),
                    n(LATEST),
                    n(TOGGLES)
                );
            }
            equal("lost", n(LOST), 0)?;
            let last = LAST_EARLY.map(n);
            equal("early, and the last of them", (n(EARLY), last), (0, [0; 5]))?;
            equal("unasked", n(UNASKED), 0)?;
            let rate = rearms / 100;
            holds(&format!("at least {rate} interrupts"), n(TAKEN) >= rate, n(TAKEN))?;
        }
        Ok(())
    }
}

fn rearms_against_random_expiries_lose_nothing_and_nothing_is_early() -> Outcome {
    let rearms = rearms();
    let stress = Stress::new(2, true, rearms)?;
    stress.run(|_| {})?;
    stress.verdict("lazy", rearms)?;
    for vcpu in 0..2 {
        let (writes, toggles) = (stress.noted(vcpu, WRITES), stress.noted(vcpu, TOGGLES));
        holds("fewer writes than rearms", writes < rearms, writes)?;
        holds("the feature switched off and on", toggles > 1, toggles)?;
    }
    Ok(())
}

fn rearms_without_the_feature_lose_nothing() -> Outcome {
    let rearms = rearms();
    let stress = Stress::new(2, false, rearms)?;
    stress.run(|_| {})?;
    stress.verdict("plain", rearms)
}

fn a_guest_that_scribbles_into_anothers_page_stops_nobody() -> Outcome {
    let stress = Stress::new(1, true, rearms())?;
    // Whatever stands there, the host comes through; the guest may well wait for nothing.
    let memory = &stress.states;
    let vcpu = stress.guest.vcpu();
    let lapic: kvm_lapic_state = vcpu.receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    let events: kvm_vcpu_events = vcpu.receive(ioctl::GET_VCPU_EVENTS).granted("events")?;
    let target = Target::new();
    let outcome = std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            target.is_me();
            vcpu.run()
        });
        let mut random = 1u64;
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) && !running.is_finished() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let value = random >> (random & 63);
            memory.write(random >> 8 & 8, value);
        }
        vcpu.set_immediate_exit(1);
        while !running.is_finished() {
            target.kick();
            std::thread::sleep(Duration::from_millis(1));
        }
        running.join()
    });
    holds("KVM_RUN returns", outcome.is_ok(), ())?;
    // And the vCPU is as good as new, wherever it was stopped.
    vcpu.set_immediate_exit(0);
    vcpu.send(ioctl::SET_LAPIC, &lapic).granted("KVM_SET_LAPIC")?;
    vcpu.send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
    let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    vcpu.send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
    equal("off", vcpu.set_msr(super::lazy_deadline::LAZY, 0)?, true)?;
    equal("disarmed", vcpu.set_msr(0x6e0, 0)?, true)?;
    stress.guest.place(0, Mode::Long)?;
    let mut regs = vcpu.regs()?;
    regs.rdi = STATES;
    vcpu.set_regs(&regs)?;
    // What the lies led to is no fault, and excuses none: of an early interrupt its place was noted as well.
    for what in [EARLY, UNASKED, LOST, TAKEN, MAY_COME].into_iter().chain(LAST_EARLY) {
        memory.write(what, 0);
    }
    memory.write(LEFT, 1000);
    memory.write(SEED, 77);
    memory.write(LAZY_MSR, STATES + 1);
    stress.run(|_| {})?;
    stress.verdict("afterwards", 1000)
}

fn a_page_under_dirty_logging_loses_no_deadline() -> Outcome {
    let rearms = rearms();
    let stress = Stress::new(2, true, rearms)?;
    let unlogged = (SLOT, 0, STATES, stress.states.bytes(), stress.states.hva());
    stress.run(|over| {
        // The dirty log withdraws and protects what the page is reached by.
        let (slot, _, gpa, bytes, hva) = unlogged;
        while !over.load(Relaxed) {
            for flags in [KVM_MEM_LOG_DIRTY_PAGES, 0] {
                let _ = stress.guest.vm.set_slot(slot, flags, gpa, bytes, hva);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    })?;
    stress.verdict("logged", rearms)
}
