//! Services that a guest asks for knowing that it is one: clock, steal time, ends of interrupt,
//! interrupts to many (KVM documentation, "MSRs" and "hypercalls").

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::clock::tsc_rate_is_right;
use crate::machine::code::{done, guarded, guest_code, hypercall, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::threads::{Target, eventually, within};
use crate::oracle::{apic_is_served, is_stock};
use crate::outcome::{Answer, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

tests!("paravirtual":
    the_clock_agrees_with_the_vms,
    the_clock_goes_forward_over_exits,
    the_old_clock_msr_works_too,
    the_clock_is_marked_stable_and_its_version_even,
    the_clock_can_be_switched_off,
    the_wall_clock_is_the_hosts,
    a_paused_guest_is_told_once,
    steal_time_grows_while_another_runs,
    impossible_addresses_of_steal_time_are_general_protection_faults,
    an_end_of_interrupt_without_exit_counts,
    an_end_of_interrupt_the_old_way_counts_too,
    one_hypercall_interrupts_many,
    a_kick_ends_a_halt_that_lets_no_interrupt_in,
    what_steal_time_has_from_another_host_is_taken,
);

const SYSTEM_TIME: u32 = 0x4b56_4d01;
const STEAL_TIME: u32 = 0x4b56_4d03;

guest_code!(
    // Writes ARGUMENT + 0 to the MSR in ARGUMENT + 8, then notes the TSC.
    clock,
    64,
    "mov ARGUMENT + 8, %ecx",
    "mov ARGUMENT, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $50, %ebx",
    "mov $RESULT, %esi",
    "0: out %al, $PORT_MARK",
    "rdtsc",
    "mov %eax, (%rsi)",
    "mov %edx, 4(%rsi)",
    "dec %ebx",
    "jnz 0b",
    done!()
);

/// Where the guests here have their structures.
const PLACE: u64 = FREE + 0x40;

fn clock_guest(msr: u32) -> Outcome<Guest> {
    tsc_rate_is_right()?;
    let guest = Guest::new(Chip::Kernel, clock())?;
    guest.memory.write(ARGUMENT, PLACE | 1);
    guest.memory.write(ARGUMENT + 8, msr.into());
    guest.reach_mark()?;
    Ok(guest)
}

/// `struct pvclock_vcpu_time_info` as a guest sees it.
#[derive(Debug)]
struct TimeInfo {
    version: u32,
    tsc_timestamp: u64,
    system_time: u64,
    mul: u32,
    shift: i8,
    flags: u8,
}

fn time_info(guest: &Guest) -> TimeInfo {
    let [first, tsc_timestamp, system_time, scale] =
        [0, 8, 16, 24].map(|offset| guest.memory.read(PLACE + offset));
    TimeInfo {
        version: first as u32,
        tsc_timestamp,
        system_time,
        mul: scale as u32,
        shift: (scale >> 32) as i8,
        flags: (scale >> 40) as u8,
    }
}

impl TimeInfo {
    /// Nanoseconds at this TSC.
    fn at(&self, tsc: u64) -> u64 {
        let delta = tsc.wrapping_sub(self.tsc_timestamp);
        let delta = match self.shift {
            0.. => delta << self.shift,
            _ => delta >> -self.shift,
        };
        self.system_time + ((u128::from(delta) * u128::from(self.mul)) >> 32) as u64
    }
}

fn vm_clock(guest: &Guest) -> Outcome<u64> {
    let data: kvm_clock_data = guest.vm.receive(ioctl::GET_CLOCK).granted("KVM_GET_CLOCK")?;
    Ok(data.clock)
}

fn the_clock_agrees_with_the_vms() -> Outcome {
    let guest = clock_guest(SYSTEM_TIME)?;
    for _ in 0..10 {
        let before = vm_clock(&guest)?;
        guest.reach_mark()?;
        let after = vm_clock(&guest)?;
        let time = time_info(&guest).at(guest.result(0));
        // The two are computed from different readings of one clock; a millisecond between them is
        // a host that measures its TSC while it runs.
        let range = before.saturating_sub(1_000_000)..after + 1_000_000;
        holds(&format!("{range:?}"), range.contains(&time), time)?;
    }
    Ok(())
}

fn the_clock_goes_forward_over_exits() -> Outcome {
    let guest = clock_guest(SYSTEM_TIME)?;
    let mut last = 0;
    for _ in 0..40 {
        guest.reach_mark()?;
        let time = time_info(&guest).at(guest.result(0));
        holds(&format!("{last} or later"), time >= last, time)?;
        last = time;
    }
    guest.vcpu().call(ioctl::KVMCLOCK_CTRL, 0).granted("KVM_KVMCLOCK_CTRL").map(drop)
}

fn the_old_clock_msr_works_too() -> Outcome {
    let guest = clock_guest(0x12)?;
    guest.reach_mark()?;
    let time = time_info(&guest).at(guest.result(0));
    let now = vm_clock(&guest)?;
    holds(&format!("{now} within a second"), now.abs_diff(time) < 1_000_000_000, time)?;
    equal("the MSR from outside", guest.vcpu().msr(0x12)?, Some(PLACE | 1))
}

fn the_clock_is_marked_stable_and_its_version_even() -> Outcome {
    let guest = clock_guest(SYSTEM_TIME)?;
    guest.reach_mark()?;
    let info = time_info(&guest);
    equal("version's lowest bit", info.version & 1, 0)?;
    holds("a version", info.version > 0, &info)?;
    equal("stable flag", info.flags & 1, 1)?;
    holds("a multiplier", info.mul > 0, &info)
}

fn the_clock_can_be_switched_off() -> Outcome {
    let guest = clock_guest(SYSTEM_TIME)?;
    guest.reach_mark()?;
    equal("off", guest.vcpu().set_msr(SYSTEM_TIME, 0)?, true)?;
    for offset in [0, 8, 16, 24] {
        guest.memory.write(PLACE + offset, 0);
    }
    guest.reach_mark()?;
    guest.reach_mark()?;
    let info = time_info(&guest);
    equal("what is written then", (info.version, info.system_time), (0, 0))
}

guest_code!(
    wall_clock,
    64,
    "mov $0x4b564d00, %ecx",
    "mov $0x20080, %eax",
    "xor %edx, %edx",
    "wrmsr",
    done!()
);

fn the_wall_clock_is_the_hosts() -> Outcome {
    let guest = Guest::new(Chip::Kernel, wall_clock())?;
    guest.finish()?;
    let (first, nanoseconds) = (guest.memory.read(FREE + 0x80), guest.memory.read(FREE + 0x88));
    let (version, seconds) = (first as u32, first >> 32);
    equal("version's lowest bit", version & 1, 0)?;
    holds("nanoseconds", (nanoseconds as u32) < 1_000_000_000, nanoseconds as u32)?;
    // When the VM's clock was 0.
    let host = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let boot = host.saturating_sub(Duration::from_nanos(vm_clock(&guest)?)).as_secs();
    holds(&format!("{boot} within 2 s"), seconds.abs_diff(boot) <= 2, seconds)
}

fn a_paused_guest_is_told_once() -> Outcome {
    let guest = clock_guest(SYSTEM_TIME)?;
    guest.reach_mark()?;
    equal("flag before", time_info(&guest).flags & 2, 0)?;
    guest.vcpu().call(ioctl::KVMCLOCK_CTRL, 0).granted("KVM_KVMCLOCK_CTRL")?;
    guest.reach_mark()?;
    equal("flag after", time_info(&guest).flags & 2, 2)?;
    let without = Guest::new(Chip::Kernel, clock())?;
    without.vcpu().call(ioctl::KVMCLOCK_CTRL, 0).refused("without a clock", libc::EINVAL)
}

guest_code!(
    stolen,
    64,
    "mov $0x4b564d03, %ecx",
    "mov $0x20041, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "0: incq RESULT",
    "pause",
    "jmp 0b",
);

/// Keeps this thread on the first CPU.
fn stay_on_the_first_cpu() {
    // SAFETY: a set of our own.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(0, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

fn steal_time_grows_while_another_runs() -> Outcome {
    let guest = Guest::new(Chip::Kernel, stolen())?;
    guest.system.require(KVM_CAP_STEAL_TIME, "KVM_CAP_STEAL_TIME")?;
    let target = Target::new();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let stolen = || guest.memory.read(PLACE);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            stay_on_the_first_cpu();
            target.is_me();
            guest.vcpu().run()
        });
        eventually("the guest runs", || guest.result(0) > 100)?;
        let before = stolen();
        scope.spawn(|| {
            stay_on_the_first_cpu();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        // 10 ms of another's time.
        let grown = within(Duration::from_secs(5), || stolen() > before + 10_000_000);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        target.kick();
        let _ = run.join();
        holds("10 ms more", grown, (before, stolen()))
    })?;
    let version = guest.memory.read(PLACE + 8) as u32;
    equal("version's lowest bit", version & 1, 0)?;
    equal("the MSR from outside", guest.vcpu().msr(STEAL_TIME)?, Some(PLACE | 1))
}

guest_code!(
    bad_steal_time,
    64,
    "mov $0x4b564d03, %ecx",
    "mov $0x20043, %eax",
    "xor %edx, %edx",
    guarded!("wrmsr"),
    "mov $0x20061, %eax",
    guarded!("wrmsr"),
    done!()
);

fn impossible_addresses_of_steal_time_are_general_protection_faults() -> Outcome {
    let guest = Guest::new(Chip::Kernel, bad_steal_time())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (2, 13, 0))
}

guest_code!(
    // Marks for ever with interrupts enabled; the handler takes the flag away instead of writing EOI, and writes
    // EOI when there was none. RESULT counts those without, RESULT + 8 all.
    pv_eoi,
    64,
    "mov $0xff, %al; out %al, $0x21; out %al, $0xa1",
    x2apic!(),
    // The handlers must not look at the APIC: the flag is withdrawn at every exit.
    "movq $0, EOI_MODE",
    "mov $0x4b564d04, %ecx",
    "mov $0x20041, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 0x40 * 8",
    "sti",
    "0: out %al, $PORT_MARK",
    "nop",
    "jmp 0b",
    "1: lock btrl $0, 0x20040",
    "jnc 2f",
    "incq RESULT",
    "jmp 3f",
    "2: mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "3: incq RESULT + 8",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn an_end_of_interrupt_without_exit_counts() -> Outcome {
    let guest = Guest::new(Chip::Kernel, pv_eoi())?;
    guest.reach_mark()?;
    let msi = kvm_msi { address_lo: 0xfee0_0000, data: 0x40, ..Default::default() };
    for count in 1..=20 {
        equal("deliveries", guest.vm.send(ioctl::SIGNAL_MSI, &msi), Ok(1))?;
        guest.reach_mark()?;
        guest.reach_mark()?;
        holds(&format!("{count} interrupts"), guest.result(1) >= count, guest.result(1))?;
    }
    let (without, all) = (guest.result(0), guest.result(1));
    holds("20 interrupts, and perhaps copies of them", (20..40).contains(&all), all)?;
    // Where the CPU ends interrupts without an exit there is nothing to gain.
    holds("some ends without EOI, or none", (without >= 1) != apic_is_served(), without)
}

guest_code!(
    eoi_despite_flag,
    64,
    "mov $0xff, %al; out %al, $0x21; out %al, $0xa1",
    x2apic!(),
    "mov $0x4b564d04, %ecx",
    "mov $0x20041, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "sti",
    "mov $10, %ebx",
    "0: mov COUNTS + 0x40 * 8, %rsi",
    "mov $0x83f, %ecx",
    "mov $0x40, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "4: pause",
    "cmp COUNTS + 0x40 * 8, %rsi",
    "je 4b",
    "dec %ebx",
    "jnz 0b",
    done!()
);

fn an_end_of_interrupt_the_old_way_counts_too() -> Outcome {
    let guest = Guest::new(Chip::Kernel, eoi_despite_flag())?;
    guest.finish()?;
    equal("interrupts", guest.count(0x40), 10)
}

guest_code!(
    // KVM_HC_SEND_IPI to vCPUs 0 and 1.
    many,
    64,
    x2apic!(),
    "sti",
    "test %edi, %edi",
    "jnz 1f",
    "4: pause",
    "cmpq $1, FREE",
    "jne 4b",
    "mov $10, %eax",
    "mov $3, %ebx",
    "xor %ecx, %ecx",
    "xor %edx, %edx",
    "mov $0x40, %esi",
    hypercall!(),
    "mov %rax, RESULT",
    "4: pause",
    "cmpq $2, COUNTS + 0x40 * 8",
    "jb 4b",
    // A minimum beyond all.
    "mov $10, %eax",
    "mov $200, %edx",
    hypercall!(),
    "mov %rax, RESULT + 8",
    done!(),
    "1: movq $1, FREE",
    "0: pause",
    "jmp 0b",
);

fn one_hypercall_interrupts_many() -> Outcome {
    let guest = with_a_second(many())?;
    equal("answers", (guest.result(0), guest.result(1) as i64 <= 0), (2, true))?;
    equal("interrupts", guest.count(0x40), 2)
}

/// A guest of two vCPUs, the second of which has 1 in RDI, that has come to its end.
fn with_a_second(code: &[u8]) -> Outcome<Guest> {
    let guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, 2, code)?;
    let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    guest.vcpus[1].send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
    let mut regs = guest.vcpus[1].regs()?;
    regs.rdi = 1;
    guest.vcpus[1].set_regs(&regs)?;
    let target = Target::new();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            target.is_me();
            guest.vcpus[1].run()
        });
        let outcome = guest.finish();
        eventually("the second vCPU stops", || {
            guest.vcpus[1].set_immediate_exit(1);
            target.kick();
            second.is_finished()
        })?;
        match second.join() {
            Ok(_) => outcome,
            Err(_) => fail("the thread died"),
        }
    })?;
    Ok(guest)
}

guest_code!(
    // Who waits for a lock halts with interrupts off, and whoever gives it back kicks: KVM_HC_KICK_CPU of vCPU 1.
    kicks,
    64,
    "test %edi, %edi",
    "jnz 1f",
    "2: pause",
    "cmpq $0, FREE",
    "je 2b",
    // It sleeps by then, or nearly.
    "mov $300000, %edx",
    "3: dec %edx",
    "jnz 3b",
    "movq $-1, RESULT",
    "mov $5, %eax",
    "xor %ebx, %ebx",
    "mov $1, %ecx",
    hypercall!(),
    "mov %rax, RESULT",
    "4: pause",
    "cmpq $2, FREE",
    "jne 4b",
    // One that comes before the halt spares it.
    "movq $3, FREE",
    "mov $5, %eax",
    hypercall!(),
    "movq $4, FREE",
    "4: pause",
    "cmpq $5, FREE",
    "jne 4b",
    done!(),
    "1: cli",
    "movq $1, FREE",
    "hlt",
    "movq $2, FREE",
    "5: pause",
    "cmpq $4, FREE",
    "jne 5b",
    "hlt",
    "movq $5, FREE",
    "0: pause",
    "jmp 0b",
);

fn a_kick_ends_a_halt_that_lets_no_interrupt_in() -> Outcome {
    if is_stock() {
        return skip(
            "stock KVM answers 0 and the vCPU stays halted on the emulated CPU; why is not known",
        );
    }
    let guest = with_a_second(kicks())?;
    equal("answer", guest.result(0), 0)
}

guest_code!(ends, 64, done!());

/// A guest's vCPU was preempted when it was saved, and another one has left the flush of its TLB to the host.
fn what_steal_time_has_from_another_host_is_taken() -> Outcome {
    const PREEMPTED: u64 = 16;
    for left in [1, 3] {
        let guest = Guest::new(Chip::Kernel, ends())?;
        guest.memory.write(FREE + PREEMPTED, left);
        equal("the MSR", guest.vcpu().set_msr(STEAL_TIME, FREE | 1)?, true)?;
        equal("before it runs", guest.memory.read(FREE + PREEMPTED), left)?;
        guest.finish()?;
        equal("it runs", guest.memory.read(FREE + PREEMPTED) & 0xff, 0)?;
    }
    Ok(())
}
