//! Two vCPUs: start by INIT and SIPI, interrupts between them, halts and wake-ups
//! (APM vol. 2 §16.5, §16.6).

use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic, xapic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::threads::{Target, eventually, within};
use crate::outcome::{Answer, Errno, Outcome, equal, fail, holds};
use crate::runner::tests;

tests!("smp":
    init_and_sipi_start_a_second_vcpu,
    a_vcpu_that_waits_for_sipi_does_not_run,
    a_second_sipi_is_ignored,
    init_stops_a_running_vcpu_and_sipi_starts_it_anew,
    interrupts_go_to_and_fro,
    interrupts_go_to_and_fro_in_xapic_mode,
    a_broadcast_reaches_the_others,
    an_nmi_of_another_vcpu_arrives,
    a_logical_destination_is_followed,
    both_vcpus_count_in_one_word,
    a_spinning_vcpu_sees_what_the_other_writes,
    a_mapping_taken_away_is_gone_on_both,
);

/// Runs both vCPUs in threads: the first to its end, the second until it is kicked. `meanwhile`
/// looks on.
fn both(guest: &Guest, meanwhile: impl FnOnce() -> Outcome) -> Outcome {
    let targets = [Target::new(), Target::new()];
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            targets[1].is_me();
            // A vCPU that waits for SIPI comes back with EAGAIN whenever something arrived.
            while guest.vcpus[1].run() == Err(Errno(libc::EAGAIN)) {}
        });
        let first = scope.spawn(|| {
            targets[0].is_me();
            guest.finish()
        });
        let seen = meanwhile();
        let ended = within(Duration::from_secs(10), || first.is_finished());
        targets[0].kick();
        // A kick before KVM_RUN would be lost.
        eventually("the second vCPU stops", || {
            guest.vcpus[1].set_immediate_exit(1);
            targets[1].kick();
            second.is_finished()
        })?;
        guest.vcpus[1].set_immediate_exit(0);
        let outcome = first.join().unwrap_or_else(|_| fail("the thread died"));
        seen?;
        holds("an end of the first vCPU", ended, "none")?;
        outcome
    })
}

fn two_vcpus(code: &[u8]) -> Outcome<Guest> {
    Guest::with_vcpus(Chip::Kernel, Mode::Long, 2, code)
}

/// The second vCPU at the first byte of the program, too, with RDI 1 and its own stack.
fn two_running(code: &[u8]) -> Outcome<Guest> {
    let guest = two_vcpus(code)?;
    let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    guest.vcpus[1].send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
    let mut regs = guest.vcpus[1].regs()?;
    regs.rdi = 1;
    guest.vcpus[1].set_regs(&regs)?;
    Ok(guest)
}

fn state(guest: &Guest, index: usize) -> Outcome<u32> {
    let state: kvm_mp_state =
        guest.vcpus[index].receive(ioctl::GET_MP_STATE).granted("KVM_GET_MP_STATE")?;
    Ok(state.mp_state)
}

/// INIT to vCPU 1.
macro_rules! init {
    () => {
        "mov $0x830, %ecx; mov $1, %edx; mov $0x4500, %eax; wrmsr"
    };
}

/// SIPI to vCPU 1, which then starts at 0x30000.
macro_rules! sipi {
    () => {
        "mov $0x830, %ecx; mov $1, %edx; mov $0x4630, %eax; wrmsr"
    };
}

/// Waits until a word of memory has a value.
macro_rules! await_word {
    ($at:literal, $value:literal) => {
        concat!("4: pause; cmpq $", $value, ", ", $at, "; jne 4b")
    };
}

guest_code!(starter, 64, x2apic!(), init!(), sipi!(), await_word!("FREE", "0x1234"), done!());
guest_code!(
    // At 0x30000: says what it is, and halts.
    started,
    16,
    "xor %ax, %ax",
    "mov $0x2000, %bx",
    "mov %bx, %ds",
    "mov %cs, %cx",
    "mov %cx, 0x10",
    "mov %eax, %cr2",
    "mov %cr0, %eax",
    "mov %eax, 0x18",
    "addw $1, 0x20",
    "movw $0x1234, 0",
    "0: cli",
    "hlt",
    "jmp 0b",
);

/// Where SIPI 0x30 leads.
const TRAMPOLINE: u64 = 0x3_0000;

fn init_and_sipi_start_a_second_vcpu() -> Outcome {
    let guest = two_vcpus(starter())?;
    guest.memory.write_bytes(TRAMPOLINE, started());
    equal("state before", state(&guest, 1)?, KVM_MP_STATE_UNINITIALIZED)?;
    both(&guest, || eventually("vCPU 1 runs", || guest.memory.read(FREE) == 0x1234))?;
    equal("CS", guest.memory.read(FREE + 0x10) as u16, 0x3000)?;
    // INIT leaves CD and NW as they were: clear, as the vCPU was set up.
    equal("CR0", guest.memory.read(FREE + 0x18) as u32, 0x10)?;
    equal("starts", guest.memory.read(FREE + 0x20) as u16, 1)?;
    let after = state(&guest, 1)?;
    holds(
        "halted or runnable",
        [KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE].contains(&after),
        after,
    )
}

guest_code!(only_waits, 64, done!());

fn a_vcpu_that_waits_for_sipi_does_not_run() -> Outcome {
    let guest = two_vcpus(only_waits())?;
    guest.memory.write_bytes(TRAMPOLINE, started());
    both(&guest, || {
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    })?;
    equal("starts", guest.memory.read(FREE + 0x20) as u16, 0)?;
    equal("state", state(&guest, 1)?, KVM_MP_STATE_UNINITIALIZED)
}

guest_code!(
    second_sipi,
    64,
    x2apic!(),
    init!(),
    sipi!(),
    await_word!("FREE", "0x1234"),
    sipi!(),
    sipi!(),
    "mov $100000, %ebx",
    "0: dec %ebx",
    "jnz 0b",
    done!()
);

fn a_second_sipi_is_ignored() -> Outcome {
    let guest = two_vcpus(second_sipi())?;
    guest.memory.write_bytes(TRAMPOLINE, started());
    both(&guest, || Ok(()))?;
    equal("starts", guest.memory.read(FREE + 0x20) as u16, 1)
}

guest_code!(
    init_again,
    64,
    x2apic!(),
    init!(),
    sipi!(),
    "4: pause",
    "cmpw $1, FREE + 0x20",
    "jne 4b",
    init!(),
    sipi!(),
    "4: pause",
    "cmpw $2, FREE + 0x20",
    "jne 4b",
    done!()
);
guest_code!(
    // Counts its starts and spins.
    started_spinning,
    16,
    "mov $0x2000, %bx",
    "mov %bx, %ds",
    "lock addw $1, 0x20",
    "0: pause",
    "jmp 0b",
);

fn init_stops_a_running_vcpu_and_sipi_starts_it_anew() -> Outcome {
    let guest = two_vcpus(init_again())?;
    guest.memory.write_bytes(TRAMPOLINE, started_spinning());
    both(&guest, || Ok(()))?;
    equal("starts", guest.memory.read(FREE + 0x20) as u16, 2)
}

guest_code!(
    // Each waits for an interrupt and then sends one to the other; the first begins.
    ping_pong,
    64,
    x2apic!(),
    "mov $0x830, %ecx",
    "test %edi, %edi",
    "jnz 1f",
    // The first: tells when the other is ready, then 30 rounds.
    "4: pause",
    "cmpq $1, FREE",
    "jne 4b",
    "mov $30, %ebx",
    "0: cli",
    "mov $1, %edx",
    "mov $0x4041, %eax",
    "mov COUNTS + 0x40 * 8, %rsi",
    "wrmsr",
    "2: cmp COUNTS + 0x40 * 8, %rsi",
    "jne 3f",
    "sti",
    "hlt",
    "cli",
    "jmp 2b",
    "3: dec %ebx",
    "jnz 0b",
    done!(),
    // The second.
    "1: movq $1, FREE",
    "xor %esi, %esi",
    "0: cli",
    "2: cmp COUNTS + 0x41 * 8, %rsi",
    "jne 3f",
    "sti",
    "hlt",
    "cli",
    "jmp 2b",
    "3: inc %rsi",
    "xor %edx, %edx",
    "mov $0x4040, %eax",
    "wrmsr",
    "jmp 0b",
);

fn interrupts_go_to_and_fro() -> Outcome {
    let guest = two_running(ping_pong())?;
    both(&guest, || Ok(()))?;
    equal("interrupts", [0x40, 0x41].map(|v| guest.count(v)), [30, 30])
}

guest_code!(
    ping_pong_xapic,
    64,
    xapic!(),
    "mov $0xfee00300, %ebp",
    "test %edi, %edi",
    "jnz 1f",
    "4: pause",
    "cmpq $1, FREE",
    "jne 4b",
    "mov $20, %ebx",
    "0: cli",
    "mov COUNTS + 0x40 * 8, %rsi",
    "movl $0x01000000, 0x10(%rbp)",
    "movl $0x4041, (%rbp)",
    "2: cmp COUNTS + 0x40 * 8, %rsi",
    "jne 3f",
    "sti",
    "hlt",
    "cli",
    "jmp 2b",
    "3: dec %ebx",
    "jnz 0b",
    done!(),
    "1: movq $1, FREE",
    "xor %esi, %esi",
    "0: cli",
    "2: cmp COUNTS + 0x41 * 8, %rsi",
    "jne 3f",
    "sti",
    "hlt",
    "cli",
    "jmp 2b",
    "3: inc %rsi",
    "movl $0, 0x10(%rbp)",
    "movl $0x4040, (%rbp)",
    "jmp 0b",
);

fn interrupts_go_to_and_fro_in_xapic_mode() -> Outcome {
    let guest = two_running(ping_pong_xapic())?;
    both(&guest, || Ok(()))?;
    equal("interrupts", [0x40, 0x41].map(|v| guest.count(v)), [20, 20])
}

guest_code!(
    // The second waits with interrupts enabled; the first sends what ARGUMENT says and awaits the
    // count of the vector in ARGUMENT + 16 to become 1.
    sender,
    64,
    x2apic!(),
    "test %edi, %edi",
    "jnz 1f",
    "4: pause",
    "cmpq $1, FREE",
    "jne 4b",
    "mov $0x830, %ecx",
    "mov ARGUMENT, %eax",
    "mov ARGUMENT + 8, %edx",
    "wrmsr",
    "mov ARGUMENT + 16, %ebx",
    "4: pause",
    "cmpq $1, COUNTS(,%rbx,8)",
    "jb 4b",
    "mov $10000, %ebx",
    "0: dec %ebx",
    "jnz 0b",
    done!(),
    "1: sti",
    "movq $1, FREE",
    "0: pause",
    "jmp 0b",
);

fn sent(command: u32, destination: u32, vector: u8) -> Outcome<Guest> {
    let guest = two_running(sender())?;
    guest.memory.write(ARGUMENT, command.into());
    guest.memory.write(ARGUMENT + 8, destination.into());
    guest.memory.write(ARGUMENT + 16, vector.into());
    both(&guest, || Ok(()))?;
    Ok(guest)
}

fn a_broadcast_reaches_the_others() -> Outcome {
    // All but the sender.
    equal("interrupts", sent(0xc_4040, 0, 0x40)?.count(0x40), 1)?;
    // All, by destination; the sender itself has its interrupts disabled.
    equal("interrupts", sent(0x4040, u32::MAX, 0x40)?.count(0x40), 1)
}

fn an_nmi_of_another_vcpu_arrives() -> Outcome {
    equal("NMIs", sent(0x4400, 1, 2)?.count(2), 1)
}

fn a_logical_destination_is_followed() -> Outcome {
    // Cluster 0, the second of it.
    equal("interrupts", sent(0x4840, 2, 0x40)?.count(0x40), 1)?;
    // Lowest priority of both, which the stock module may give to either: the logical id 2 alone.
    equal("interrupts", sent(0x4940, 2, 0x40)?.count(0x40), 1)
}

guest_code!(
    count_together,
    64,
    "mov $20000, %ebx",
    "0: lock incq FREE",
    "dec %ebx",
    "jnz 0b",
    "lock incq FREE + 0x1000",
    "test %edi, %edi",
    "jnz 1f",
    "4: pause",
    "cmpq $2, FREE + 0x1000",
    "jne 4b",
    done!(),
    "1: pause",
    "jmp 1b",
);

fn both_vcpus_count_in_one_word() -> Outcome {
    let guest = two_running(count_together())?;
    both(&guest, || Ok(()))?;
    equal("count", guest.memory.read(FREE), 40_000)
}

guest_code!(
    hand_over,
    64,
    "xor %ebx, %ebx",
    "test %edi, %edi",
    "jnz 1f",
    "0: inc %rbx",
    "mov %rbx, FREE",
    "4: pause",
    "cmp %rbx, FREE + 8",
    "jne 4b",
    "cmp $200, %ebx",
    "jne 0b",
    done!(),
    "1: inc %rbx",
    "4: pause",
    "cmp %rbx, FREE",
    "jne 4b",
    "mov %rbx, FREE + 8",
    "jmp 1b",
);

fn a_spinning_vcpu_sees_what_the_other_writes() -> Outcome {
    let guest = two_running(hand_over())?;
    both(&guest, || Ok(()))?;
    equal("rounds", guest.memory.read(FREE + 8), 200)
}

guest_code!(
    // Both read a page of their host all the time, until it is zero.
    watch_page,
    64,
    "sti",
    "lock incq FREE + 0x1000",
    "0: incq RESULT(,%rdi,8)",
    "cmpq $1, FREE",
    "je 0b",
    "lock incq FREE + 0x2000",
    "test %edi, %edi",
    "jnz 1f",
    "4: pause",
    "cmpq $2, FREE + 0x2000",
    "jne 4b",
    done!(),
    "1: pause",
    "jmp 1b",
);

fn a_mapping_taken_away_is_gone_on_both() -> Outcome {
    let guest = two_running(watch_page())?;
    guest.memory.write(FREE, 1);
    both(&guest, || {
        eventually("both run", || (0..2).all(|index| guest.result(index) > 100))?;
        guest.memory.advise(FREE, 4096, libc::MADV_DONTNEED).granted("madvise").map(drop)
    })?;
    equal("vCPUs that saw it", guest.memory.read(FREE + 0x2000), 2)
}
