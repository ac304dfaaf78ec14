//! The lazy TSC deadline, and guests and VMMs that do not keep to it. Skipped where it is not
//! offered. docs/adr/0020-lazy-tsc-deadline.md describes the interface.

use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::Memory;
use crate::machine::threads::{Target, within};
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, equal, fail, holds, one_of, skip};
use crate::runner::tests;

tests!("lazy_deadline":
    the_msr_is_listed_where_the_feature_is_offered,
    without_the_feature_the_msr_is_a_general_protection_fault,
    impossible_addresses_are_general_protection_faults,
    a_read_only_page_is_a_general_protection_fault,
    armed_follows_the_timer_and_is_zero_when_it_has_rung,
    a_later_deadline_without_an_exit_interrupts_once_and_not_early,
    deadlines_in_the_past_and_zero_arm_nothing,
    a_mode_switch_disarms_and_forgets_what_was_pending,
    a_mode_switch_ends_the_use_of_the_page,
    a_reset_by_the_vmm_ends_the_use_of_the_page,
    a_masked_timer_keeps_the_newest_deadline,
    a_disabled_apic_promises_nothing,
    switching_off_keeps_the_newest_deadline,
    wild_values_in_the_page_do_not_stop_the_timer,
    a_page_whose_slot_is_gone_costs_no_interrupt,
    a_slot_that_returns_with_a_stale_promise_is_put_right,
    a_slot_that_moves_leaves_its_page_behind,
    a_page_that_is_taken_from_the_vmm_is_survived,
    a_saved_deadline_is_the_newest_one,
    a_restored_vcpu_keeps_its_deadline_whatever_memory_comes_when,
    init_withdraws_the_promise_and_forgets_the_page,
    enabling_again_elsewhere_moves_the_promise,
    a_halt_for_a_deadline_whose_mode_cpuid_takes_hears_signals,
);

pub(super) const LAZY: u32 = 0x4b56_4d09;
const DEADLINE: u32 = 0x6e0;
const LVT_TIMER: u32 = 0x832;
const VECTOR: u64 = 0x40;
const DEADLINE_MODE: u64 = 1 << 18;
const MASKED: u64 = 1 << 16;
/// Where the page is: in the guest's memory, or in a slot of its own.
const PAGE: u64 = FREE + 0x40;
const OWN: u64 = 0x40_0000;
const OWN_SLOT: u32 = 1;
/// So long that nothing of it passes by chance, and a wait for it does not last. The lab's Intel machine
/// is never away from its guest, and its TSC counts instructions.
fn soon() -> u64 {
    if oracle::vendor() == Vendor::Intel { 3_000_000 } else { 20_000_000 }
}

fn farther() -> u64 {
    3 * soon()
}

const NEVER: u64 = 1 << 50;

const WRMSR: u64 = 1;
const RDMSR: u64 = 2;
const SET: u64 = 3;
const WAIT: u64 = 4;
const LOAD: u64 = 5;
const HALT: u64 = 6;

guest_code!(
    // Does what ARGUMENT says, again and again. The TSC at the first interrupt since the last
    // order goes to RESULT + 24.
    scripted,
    64,
    "mov $0xff, %al; out %al, $0x21; out %al, $0xa1",
    x2apic!(),
    "lea 6f(%rip), %rax",
    "mov %rax, HOOKS + 0x40 * 8",
    "0: out %al, $PORT_MARK",
    "movq $0, RESULT",
    "movq $0, RESULT + 8",
    "mov ARGUMENT, %rbx",
    "mov ARGUMENT + 8, %rsi",
    "mov ARGUMENT + 16, %rdi",
    "cmp $1, %ebx",
    "jne 1f",
    "mov %esi, %ecx",
    "mov %edi, %eax",
    "mov %rdi, %rdx",
    "shr $32, %rdx",
    guarded!("wrmsr"),
    "jmp 0b",
    "1: cmp $2, %ebx",
    "jne 1f",
    "mov %esi, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    guarded!("rdmsr"),
    "mov %eax, RESULT",
    "mov %edx, RESULT + 4",
    "jmp 0b",
    // A deadline so far ahead, as the protocol has it. RESULT: when; RESULT + 8: by WRMSR.
    "1: cmp $3, %ebx",
    "jne 1f",
    "movq $0, RESULT + 24",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "add %rsi, %rax",
    "mov %rax, RESULT",
    "mov %rax, 8(%rdi)",
    "mfence",
    "mov (%rdi), %rcx",
    "test %rcx, %rcx",
    "jz 2f",
    "cmp %rcx, %rax",
    "jae 0b",
    "2: mov %rax, %rdx",
    "shr $32, %rdx",
    "mov $0x6e0, %ecx",
    "wrmsr",
    "movq $1, RESULT + 8",
    "jmp 0b",
    // With interrupts enabled until the vector has come so often, or for so long.
    "1: cmp $4, %ebx",
    "jne 1f",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "add %rax, %rsi",
    "2: sti",
    "pause",
    "cli",
    "cmp %rdi, COUNTS + 0x40 * 8",
    "jae 0b",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "cmp %rsi, %rax",
    "jb 2b",
    "jmp 0b",
    "1: cmp $5, %ebx",
    "jne 1f",
    "mov (%rsi), %rax",
    "mov %rax, RESULT",
    "jmp 0b",
    "1: sti",
    "hlt",
    "cli",
    "jmp 0b",
    "6: cmpq $0, RESULT + 24",
    "jne 5f",
    "rdtsc",
    "mov %eax, RESULT + 24",
    "mov %edx, RESULT + 28",
    "5: mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

/// A guest that does what it is told, and where its page is.
struct Script {
    guest: Guest,
    page: u64,
    /// The memory of the slot that the page has to itself, if it has one.
    own: Option<Memory>,
}

pub(super) fn is_offered(guest: &Guest) -> Outcome {
    let mut table = guest.system.supported_cpuid()?;
    match table.find(0x4000_0001, 0).is_some_and(|leaf| leaf.eax & (1 << 18) != 0) {
        true => Ok(()),
        false => skip("no lazy TSC deadline"),
    }
}

impl Script {
    fn start() -> Outcome<Self> {
        let guest = Guest::new(Chip::Kernel, scripted())?;
        is_offered(&guest)?;
        guest.reach_mark()?;
        Ok(Self { guest, page: PAGE, own: None })
    }

    /// Deadline mode, the page in use.
    fn with(page: u64, own: Option<Memory>) -> Outcome<Self> {
        let mut script = Self::start()?;
        if let Some(memory) = &own {
            let vm = &script.guest.vm;
            vm.set_slot(OWN_SLOT, 0, OWN, memory.bytes(), memory.hva()).granted("own slot")?;
        }
        (script.page, script.own) = (page, own);
        script.wrmsr(LVT_TIMER, DEADLINE_MODE | VECTOR)?;
        script.wrmsr(LAZY, page | 1)?;
        Ok(script)
    }

    fn enabled() -> Outcome<Self> {
        Self::with(PAGE, None)
    }

    fn with_own_slot() -> Outcome<Self> {
        Self::with(OWN, Some(Memory::new(0x1000)?))
    }

    fn order(&self, what: u64, first: u64, second: u64) -> Outcome {
        for (n, word) in [what, first, second].into_iter().enumerate() {
            self.guest.memory.write(ARGUMENT + n as u64 * 8, word);
        }
        self.guest.reach_mark()
    }

    fn wrmsr(&self, msr: u32, value: u64) -> Outcome {
        self.order(WRMSR, msr.into(), value)
    }

    fn rdmsr(&self, msr: u32) -> Outcome<u64> {
        self.order(RDMSR, msr.into(), 0)?;
        Ok(self.guest.result(0))
    }

    /// Sets a deadline; when, and whether it took an exit.
    fn set(&self, ahead: u64) -> Outcome<(u64, bool)> {
        self.order(SET, ahead, self.page)?;
        Ok((self.guest.result(0), self.guest.result(1) == 1))
    }

    /// Sets a deadline and moves it away without an exit; when each is, and how many interrupts had
    /// come by then. A machine that stood still until the first had come tries again.
    fn set_and_move(&self, first: u64, later: u64) -> Outcome<(u64, u64, u64)> {
        for _ in 0..20 {
            let (first, _) = self.set(first)?;
            let (moved, exit) = self.set(later)?;
            if !exit {
                return Ok((first, moved, self.interrupts()));
            }
            self.order(WAIT, 2 * later, u64::MAX)?;
        }
        fail("expected a deadline to be moved without an exit got none in 20 attempts")
    }

    /// Waits for the nth interrupt; the TSC at the first since the last deadline was set.
    fn wait(&self, count: u64) -> Outcome<u64> {
        self.order(WAIT, 100 * farther(), count)?;
        equal("interrupts", self.interrupts(), count)?;
        Ok(self.guest.result(3))
    }

    /// Waits `ticks`, in which no more interrupt comes.
    fn quiet(&self, ticks: u64) -> Outcome {
        let before = self.interrupts();
        self.order(WAIT, ticks, u64::MAX)?;
        equal("interrupts that nobody asked for", self.interrupts() - before, 0)
    }

    fn interrupts(&self) -> u64 {
        self.guest.count(VECTOR as u8)
    }

    fn at(&self, offset: u64) -> u64 {
        match &self.own {
            Some(memory) => memory.read(offset),
            None => self.guest.memory.read(self.page + offset),
        }
    }

    fn armed(&self) -> u64 {
        self.at(0)
    }

    fn faults(&self) -> u64 {
        self.guest.faults().0
    }
}

fn the_msr_is_listed_where_the_feature_is_offered() -> Outcome {
    let script = Script::start()?;
    let vcpu = script.guest.vcpu();
    equal("at first", vcpu.msr(LAZY)?, Some(0))?;
    equal("set from outside", vcpu.set_msr(LAZY, PAGE | 1)?, true)?;
    equal("and read", vcpu.msr(LAZY)?, Some(PAGE | 1))?;
    equal("a reserved bit from outside", vcpu.set_msr(LAZY, PAGE | 3)?, false)?;
    equal("still", vcpu.msr(LAZY)?, Some(PAGE | 1))?;
    equal("off", vcpu.set_msr(LAZY, 0)?, true)?;
    #[repr(C)]
    struct List {
        count: u32,
        indices: [u32; 512],
    }
    let mut list = List { count: 512, indices: [0; 512] };
    let request = ioctl::GET_MSR_INDEX_LIST;
    script.guest.system.exchange(request, &mut list).granted("KVM_GET_MSR_INDEX_LIST")?;
    let listed = list.indices.iter().take(list.count as usize).any(|index| *index == LAZY);
    equal("in the list", listed, true)
}

fn without_the_feature_the_msr_is_a_general_protection_fault() -> Outcome {
    let guest = Guest::new(Chip::Kernel, scripted())?;
    is_offered(&guest)?;
    let mut table = guest.system.supported_cpuid()?;
    if let Some(leaf) = table.find(0x4000_0001, 0) {
        leaf.eax &= !(1 << 18);
    }
    guest.vcpu().set_cpuid(&table)?;
    guest.reach_mark()?;
    let script = Script { guest, page: PAGE, own: None };
    script.wrmsr(LAZY, PAGE | 1)?;
    equal("write", script.guest.faults(), (1, 13, 0))?;
    script.rdmsr(LAZY)?;
    equal("read", script.guest.faults(), (2, 13, 0))?;
    equal("from outside", script.guest.vcpu().msr(LAZY)?, Some(0))
}

fn impossible_addresses_are_general_protection_faults() -> Outcome {
    let script = Script::start()?;
    let values = [PAGE | 3, PAGE | 0x21, NOWHERE | 1, (MEMORY_BYTES) | 1, (1 << 52) | 1, !0x3e];
    for (n, value) in values.into_iter().enumerate() {
        script.wrmsr(LAZY, value)?;
        equal(&format!("faults after {value:#x}"), script.faults(), n as u64 + 1)?;
        equal("the MSR", script.rdmsr(LAZY)?, 0)?;
    }
    // The last place in memory is one: a page of 64 bytes crosses no frame.
    script.wrmsr(LAZY, (MEMORY_BYTES - 64) | 1)?;
    equal("faults", script.faults(), values.len() as u64)?;
    equal("the MSR", script.rdmsr(LAZY)?, (MEMORY_BYTES - 64) | 1)
}

fn a_read_only_page_is_a_general_protection_fault() -> Outcome {
    let script = Script::start()?;
    script.guest.system.require(KVM_CAP_READONLY_MEM, "KVM_CAP_READONLY_MEM")?;
    let memory = Memory::new(0x1000)?;
    let vm = &script.guest.vm;
    vm.set_slot(OWN_SLOT, KVM_MEM_READONLY, OWN, 0x1000, memory.hva()).granted("slot")?;
    script.wrmsr(LAZY, OWN | 1)?;
    equal("faults", script.faults(), 1)
}

fn armed_follows_the_timer_and_is_zero_when_it_has_rung() -> Outcome {
    let script = Script::start()?;
    script.guest.memory.write(PAGE, 0x1234);
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | VECTOR)?;
    script.wrmsr(LAZY, PAGE | 1)?;
    equal("armed after enabling", script.armed(), 0)?;
    for count in 1..=5 {
        let (deadline, exit) = script.set(10 * soon())?;
        equal("by WRMSR", exit, true)?;
        equal("armed", script.armed(), deadline)?;
        let at = script.wait(count)?;
        holds(&format!("not before {deadline:#x}"), at >= deadline, at)?;
        equal("armed then", script.armed(), 0)?;
    }
    // An earlier one takes an exit and arms anew.
    let (first, _) = script.set(NEVER)?;
    equal("armed", script.armed(), first)?;
    let (second, exit) = script.set(10 * soon())?;
    equal("by WRMSR, armed", (exit, script.armed()), (true, second))?;
    script.wait(6)?;
    script.quiet(farther())
}

fn a_later_deadline_without_an_exit_interrupts_once_and_not_early() -> Outcome {
    let script = Script::enabled()?;
    for _ in 0..5 {
        let (first, later, count) = script.set_and_move(soon(), farther())?;
        one_of("armed", script.armed(), &[first, later])?;
        let at = script.wait(count + 1)?;
        holds(&format!("not before {later:#x}"), at >= later, at)?;
        equal("armed then", script.armed(), 0)?;
    }
    // Asleep meanwhile.
    let (_, later, _) = script.set_and_move(soon(), farther())?;
    script.order(HALT, 0, 0)?;
    let at = script.guest.result(3);
    holds(&format!("asleep until {later:#x}"), at >= later, at)?;
    script.quiet(farther())
}

fn deadlines_in_the_past_and_zero_arm_nothing() -> Outcome {
    let script = Script::enabled()?;
    script.wrmsr(DEADLINE, 1)?;
    equal("armed", script.armed(), 0)?;
    script.wait(1)?;
    script.set(soon())?;
    script.wrmsr(DEADLINE, 0)?;
    equal("armed after zero", script.armed(), 0)?;
    script.quiet(2 * soon())?;
    // Later deadlines that were only stored go with it.
    script.set_and_move(soon(), farther())?;
    script.wrmsr(DEADLINE, 0)?;
    equal("armed after zero", script.armed(), 0)?;
    script.quiet(2 * farther())?;
    script.set(soon())?;
    script.wrmsr(DEADLINE, 1)?;
    equal("armed after the past", script.armed(), 0)?;
    script.wait(2)?;
    script.quiet(2 * soon())
}

fn a_mode_switch_disarms_and_forgets_what_was_pending() -> Outcome {
    let script = Script::enabled()?;
    let (_, _, count) = script.set_and_move(10 * soon(), 10 * farther())?;
    script.wrmsr(LVT_TIMER, VECTOR)?;
    equal("armed in one-shot mode", script.armed(), 0)?;
    script.quiet(12 * farther())?;
    // The page means nothing to the other modes.
    script.wrmsr(0x83e, 0xb)?;
    script.wrmsr(0x838, 1000)?;
    script.wait(count + 1)?;
    equal("armed in one-shot mode", script.armed(), 0)?;
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | VECTOR)?;
    equal("armed", script.armed(), 0)?;
    equal("by WRMSR", script.set(soon())?.1, true)?;
    script.wait(count + 2)?;
    script.quiet(farther())
}

/// The next kernel, which kexec has started or a reset, sets deadlines and knows of no page: what lies
/// there is its own.
fn nothing_is_written(script: &Script, count: u64) -> Outcome {
    equal("the MSR", script.guest.vcpu().msr(LAZY)?, Some(0))?;
    const OF_THE_NEXT: u64 = 0x1122_3344_5566_7788;
    script.guest.memory.write(PAGE, OF_THE_NEXT);
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | VECTOR)?;
    equal("by WRMSR", script.set(soon())?.1, true)?;
    script.wait(count + 1)?;
    equal("what lies there", script.guest.memory.read(PAGE), OF_THE_NEXT)
}

fn a_mode_switch_ends_the_use_of_the_page() -> Outcome {
    let script = Script::enabled()?;
    let (_, _, count) = script.set_and_move(10 * soon(), 10 * farther())?;
    // As Linux does on its way out (clear_local_APIC()).
    script.wrmsr(LVT_TIMER, MASKED)?;
    nothing_is_written(&script, count)
}

fn a_reset_by_the_vmm_ends_the_use_of_the_page() -> Outcome {
    let script = Script::enabled()?;
    let (_, _, count) = script.set_and_move(10 * soon(), 10 * farther())?;
    let vcpu = script.guest.vcpu();
    let mut apic: kvm_lapic_state = vcpu.receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    for (to, from) in apic.regs[0x320..].iter_mut().zip((MASKED as u32).to_le_bytes()) {
        *to = from as i8;
    }
    let before = script.guest.memory.read(PAGE);
    vcpu.send(ioctl::SET_LAPIC, &apic).granted("KVM_SET_LAPIC")?;
    equal("the page", script.guest.memory.read(PAGE), before)?;
    nothing_is_written(&script, count)
}

fn a_masked_timer_keeps_the_newest_deadline() -> Outcome {
    let script = Script::enabled()?;
    let (_, later, count) = script.set_and_move(soon(), 20 * farther())?;
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | MASKED | VECTOR)?;
    equal("armed", script.armed(), 0)?;
    equal("the deadline", script.rdmsr(DEADLINE)?, later)?;
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | VECTOR)?;
    let at = script.wait(count + 1)?;
    holds(&format!("not before {later:#x}"), at >= later, at)?;
    // One that comes while masked is lost, as it is without all this.
    script.set(10 * soon())?;
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | MASKED | VECTOR)?;
    script.quiet(10 * farther())?;
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | VECTOR)?;
    script.quiet(soon())?;
    equal("by WRMSR", script.set(soon())?.1, true)?;
    script.wait(count + 2)?;
    Ok(())
}

fn a_disabled_apic_promises_nothing() -> Outcome {
    let script = Script::enabled()?;
    script.set(10 * soon())?;
    script.wrmsr(0x80f, 0xff)?;
    equal("armed when disabled by software", script.armed(), 0)?;
    script.wrmsr(0x80f, 0x1ff)?;
    script.quiet(10 * farther())?;
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | VECTOR)?;
    script.set(NEVER)?;
    holds("armed again", script.armed() != 0, script.armed())?;
    let base = script.rdmsr(0x1b)?;
    script.wrmsr(0x1b, base & !0xc00)?;
    equal("armed when disabled for good", script.armed(), 0)?;
    script.wrmsr(0x1b, base & !0x400 | 0x800)?;
    script.wrmsr(0x1b, base)?;
    script.wrmsr(0x80f, 0x1ff)?;
    script.wrmsr(LVT_TIMER, DEADLINE_MODE | VECTOR)?;
    let before = script.interrupts();
    let (deadline, _) = script.set(farther())?;
    let at = script.wait(before + 1)?;
    holds(&format!("not before {deadline:#x}"), at >= deadline, at)
}

fn switching_off_keeps_the_newest_deadline() -> Outcome {
    let script = Script::enabled()?;
    let (_, later, count) = script.set_and_move(soon(), 20 * farther())?;
    script.wrmsr(LAZY, 0)?;
    equal("armed", script.armed(), 0)?;
    equal("the deadline", script.rdmsr(DEADLINE)?, later)?;
    // Nobody looks at the page any more.
    script.guest.memory.write(PAGE, 0x77);
    let at = script.wait(count + 1)?;
    holds(&format!("not before {later:#x}"), at >= later, at)?;
    script.quiet(farther())?;
    equal("the page", script.armed(), 0x77)
}

fn wild_values_in_the_page_do_not_stop_the_timer() -> Outcome {
    let script = Script::enabled()?;
    let memory = &script.guest.memory;
    let mut count = 0;
    for wild in [0, 1, u64::MAX, u64::MAX - 1, 1 << 63, 0x4000_0000_0000_0000] {
        script.set(10 * soon())?;
        memory.write(PAGE + 8, wild);
        memory.write(PAGE, wild);
        script.order(WAIT, 10 * farther(), count + 1)?;
        // What is stored later than the deadline puts it off, however far.
        count += u64::from(wild < soon());
        equal(&format!("interrupts with {wild:#x}"), script.interrupts(), count)?;
        // What the page says is armed is the host's truth again once it has looked.
        let armed = if wild < soon() { 0 } else { wild };
        equal(&format!("armed with {wild:#x}"), script.armed(), armed)?;
        script.wrmsr(DEADLINE, 0)?;
        equal("armed after zero", script.armed(), 0)?;
        let (deadline, exit) = script.set(soon())?;
        count += 1;
        let at = script.wait(count)?;
        holds("by WRMSR, in time", exit && at >= deadline, (exit, at, deadline))?;
    }
    Ok(())
}

fn a_page_whose_slot_is_gone_costs_no_interrupt() -> Outcome {
    let script = Script::with_own_slot()?;
    script.set(soon())?;
    script.guest.vm.set_slot(OWN_SLOT, 0, OWN, 0, 0).granted("delete")?;
    script.wait(1)?;
    // Deadlines by MSR go on.
    for count in 2..5 {
        let deadline = crate::machine::clock::tsc();
        script.wrmsr(DEADLINE, 1)?;
        script.wait(count)?;
        holds("time", deadline != 0, deadline)?;
    }
    script.wrmsr(LAZY, 0)?;
    equal("faults", script.faults(), 0)?;
    script.wrmsr(LAZY, OWN | 1)?;
    equal("faults when it is to be used again", script.faults(), 1)
}

fn a_slot_that_returns_with_a_stale_promise_is_put_right() -> Outcome {
    let script = Script::with_own_slot()?;
    let Some(own) = &script.own else { return Ok(()) };
    script.set(10 * soon())?;
    let stale = script.armed();
    let vm = &script.guest.vm;
    vm.set_slot(OWN_SLOT, 0, OWN, 0, 0).granted("delete")?;
    script.wait(1)?;
    equal("the promise that nobody could take back", own.read(0), stale)?;
    vm.set_slot(OWN_SLOT, 0, OWN, 0x1000, own.hva()).granted("create")?;
    let (deadline, exit) = script.set(soon())?;
    let at = script.wait(2)?;
    holds("by WRMSR, in time", exit && at >= deadline, (exit, at, deadline))?;
    // Other memory, full of lies, in its place.
    let other = Memory::new(0x1000)?;
    for at in (0..0x1000).step_by(8) {
        other.write(at, 1);
    }
    script.set(soon())?;
    vm.set_slot(OWN_SLOT, 0, OWN, 0, 0).granted("delete")?;
    vm.set_slot(OWN_SLOT, 0, OWN, 0x1000, other.hva()).granted("create")?;
    script.wait(3)?;
    equal("armed there", other.read(0), 0)?;
    let (deadline, exit) = script.set(soon())?;
    let at = script.wait(4)?;
    holds("by WRMSR, in time", exit && at >= deadline, (exit, at, deadline))
}

fn a_slot_that_moves_leaves_its_page_behind() -> Outcome {
    let script = Script::with_own_slot()?;
    let Some(own) = &script.own else { return Ok(()) };
    script.set(soon())?;
    let vm = &script.guest.vm;
    vm.set_slot(OWN_SLOT, 0, OWN + 0x10_0000, 0x1000, own.hva()).granted("move")?;
    own.write(0, 0x55);
    script.wait(1)?;
    script.wrmsr(DEADLINE, 1)?;
    script.wait(2)?;
    equal("the page", own.read(0), 0x55)
}

fn a_page_that_is_taken_from_the_vmm_is_survived() -> Outcome {
    let script = Script::with_own_slot()?;
    let Some(own) = &script.own else { return Ok(()) };
    script.set(soon())?;
    own.protect(0, 0x1000, libc::PROT_READ).granted("mprotect")?;
    script.wait(1)?;
    own.protect(0, 0x1000, libc::PROT_NONE).granted("mprotect")?;
    script.wrmsr(DEADLINE, 1)?;
    script.wait(2)?;
    own.protect(0, 0x1000, libc::PROT_READ | libc::PROT_WRITE).granted("mprotect")?;
    let (deadline, exit) = script.set(soon())?;
    let at = script.wait(3)?;
    holds("by WRMSR, in time", exit && at >= deadline, (exit, at, deadline))?;
    // Thrown away by the host: it comes back as zeroes.
    script.set(soon())?;
    own.advise(0, 0x1000, libc::MADV_DONTNEED).granted("madvise")?;
    script.wait(4)?;
    own.unmap(0, 0x1000);
    script.wrmsr(DEADLINE, 1)?;
    script.wait(5)?;
    Ok(())
}

fn a_saved_deadline_is_the_newest_one() -> Outcome {
    let script = Script::enabled()?;
    let (first, _) = script.set(NEVER)?;
    let vcpu = script.guest.vcpu();
    equal("saved", vcpu.msr(DEADLINE)?, Some(first))?;
    let (later, _) = script.set(NEVER + farther())?;
    equal("saved", vcpu.msr(DEADLINE)?, Some(later))?;
    equal("armed, still", script.armed(), first)?;
    // Rung, but not looked at: user space has the vCPU.
    script.wrmsr(DEADLINE, 0)?;
    let (first, _) = script.set(10 * soon())?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    equal("saved when it is over", vcpu.msr(DEADLINE)?, Some(first))?;
    script.wait(1)?;
    equal("saved when it was taken", vcpu.msr(DEADLINE)?, Some(0))
}

fn a_restored_vcpu_keeps_its_deadline_whatever_memory_comes_when() -> Outcome {
    for memory_first in [false, true] {
        let script = Script::enabled()?;
        let (_, later, _) = script.set_and_move(soon(), farther())?;
        let from = script.guest.vcpu();
        let saved = from.msr(DEADLINE)?.unwrap_or(0);
        let page: Vec<u64> = (0..8).map(|n| script.guest.memory.read(PAGE + n * 8)).collect();
        let lapic: kvm_lapic_state = from.receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
        let tsc = from.msr(0x10)?.unwrap_or(0);

        let to = Script::start()?;
        let vcpu = to.guest.vcpu();
        let restore_memory = |with: &[u64]| {
            for (n, word) in with.iter().enumerate() {
                to.guest.memory.write(PAGE + n as u64 * 8, *word);
            }
        };
        if memory_first {
            restore_memory(&page);
        } else {
            restore_memory(&[u64::MAX; 8]);
        }
        vcpu.send(ioctl::SET_LAPIC, &lapic).granted("KVM_SET_LAPIC")?;
        for (msr, value) in [(0x10, tsc), (LAZY, PAGE | 1), (DEADLINE, saved)] {
            equal(&format!("MSR {msr:#x}"), vcpu.set_msr(msr, value)?, true)?;
        }
        restore_memory(&page);
        let at = to.wait(1)?;
        holds(&format!("not before {later:#x}"), at >= later, at)?;
        equal("armed", to.armed(), 0)?;
        let (deadline, exit) = to.set(soon())?;
        let at = to.wait(2)?;
        holds("by WRMSR, in time", exit && at >= deadline, (exit, at, deadline))?;
    }
    Ok(())
}

fn init_withdraws_the_promise_and_forgets_the_page() -> Outcome {
    let guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, 2, scripted())?;
    is_offered(&guest)?;
    let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    guest.vcpus[1].send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
    let second = |what: u64, first: u64, value: u64| -> Outcome {
        for (n, word) in [what, first, value].into_iter().enumerate() {
            guest.memory.write(ARGUMENT + n as u64 * 8, word);
        }
        let exit = guest.exit_of(1)?;
        holds("a mark", exit.is_out(PORT_MARK), exit)
    };
    second(0, 0, 0)?;
    second(WRMSR, LVT_TIMER.into(), DEADLINE_MODE | VECTOR)?;
    second(WRMSR, LAZY.into(), PAGE | 1)?;
    second(SET, NEVER, PAGE)?;
    holds("armed", guest.memory.read(PAGE) != 0, guest.memory.read(PAGE))?;
    // The first vCPU sends INIT.
    guest.reach_mark()?;
    for (n, word) in [WRMSR, 0x830, 1 << 32 | 0x4500].into_iter().enumerate() {
        guest.memory.write(ARGUMENT + n as u64 * 8, word);
    }
    guest.reach_mark()?;
    let state: kvm_mp_state = guest.vcpus[1].receive(ioctl::GET_MP_STATE).granted("state")?;
    equal("state", state.mp_state, KVM_MP_STATE_INIT_RECEIVED)?;
    equal("armed", guest.memory.read(PAGE), 0)?;
    equal("the MSR", guest.vcpus[1].msr(LAZY)?, Some(0))
}

fn enabling_again_elsewhere_moves_the_promise() -> Outcome {
    let mut script = Script::enabled()?;
    let (_, later, count) = script.set_and_move(soon(), 20 * farther())?;
    let elsewhere = PAGE + 0x1000;
    script.guest.memory.write(elsewhere, u64::MAX);
    script.wrmsr(LAZY, elsewhere | 1)?;
    equal("armed here", script.armed(), 0)?;
    script.page = elsewhere;
    equal("armed there", script.armed(), 0)?;
    equal("the deadline", script.rdmsr(DEADLINE)?, later)?;
    let at = script.wait(count + 1)?;
    holds(&format!("not before {later:#x}"), at >= later, at)?;
    let (deadline, exit) = script.set(NEVER)?;
    equal("by WRMSR, armed", (exit, script.armed()), (true, deadline))?;
    script.order(LOAD, PAGE, 0)?;
    equal("the old page", script.guest.result(0), 0)
}

/// A thread that no signal ends is one that nobody can kill.
fn a_halt_for_a_deadline_whose_mode_cpuid_takes_hears_signals() -> Outcome {
    let guest = Guest::new(Chip::Kernel, scripted())?;
    is_offered(&guest)?;
    let vcpu = guest.vcpu();
    // All by the VMM: the guest has not run yet, so that its CPUID may change.
    let mut sregs = vcpu.sregs()?;
    sregs.apic_base |= 0xc00;
    vcpu.set_sregs(&sregs)?;
    for (msr, value) in [
        (0x80f, 0x1ff),
        (LVT_TIMER, DEADLINE_MODE | VECTOR),
        (LAZY, PAGE | 1),
        (DEADLINE, vcpu.msr(0x10)?.unwrap_or(0) + 1000),
    ] {
        equal("KVM_SET_MSRS", vcpu.set_msr(msr, value)?, true)?;
    }
    let mut table = guest.system.supported_cpuid()?;
    if let Some(leaf) = table.find(1, 0) {
        leaf.ecx &= !(1 << 24);
    }
    vcpu.set_cpuid(&table)?;
    let halted = kvm_mp_state { mp_state: KVM_MP_STATE_HALTED };
    vcpu.send(ioctl::SET_MP_STATE, &halted).granted("KVM_SET_MP_STATE")?;
    let target = Target::new();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            target.is_me();
            vcpu.run().map(drop)
        });
        // Behind the deadline.
        std::thread::sleep(Duration::from_millis(20));
        let heard = within(Duration::from_secs(5), || {
            target.kick();
            running.is_finished()
        });
        holds("KVM_RUN returns at a signal", heard, ())
    })
}
