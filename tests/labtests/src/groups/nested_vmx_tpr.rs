//! L2's task priority in L1's virtual-APIC page: the TPR shadow.
//!
//! SDM vol. 3C §25.6.8, §27.2.1.1, §30.3.

use super::nested_vmx::{
    EXIT_CPUID, EXITED, Fields, L2_CODE, L2_CPUID, ZERO, fails, launch, must, program, with,
};
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::{ARGUMENT, FREE, NOWHERE};
use crate::machine::memory::Memory;
use crate::machine::saved::Saved;
use crate::oracle::is_stock;
use crate::outcome::{Answer, Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx_tpr":
    l2_has_its_priority_in_l1s_page,
    below_the_threshold_l1_sees_an_exit,
    a_step_below_the_threshold_is_told_along,
    reserved_bits_of_cr8_are_a_fault,
    an_entry_checks_page_and_threshold,
    exits_of_cr8_are_l1s_where_it_asks,
    the_priority_is_an_msr_of_the_x2apic_too,
    a_page_that_is_no_memory_fails_the_entry,
    the_page_is_changed_while_l2_runs,
    the_page_is_taken_away_while_l2_runs,
    the_priority_travels,
);

const PAGE: u64 = FREE + 0xa000;
const VTPR: u64 = PAGE + 0x80;
/// Another memslot.
const ELSEWHERE: u64 = 0x100_0000;

const SHADOW: u64 = 1 << 21;
const LOAD: u64 = 1 << 19;
const STORE: u64 = 1 << 20;

const EXIT_EXCEPTION: u64 = 0;
const EXIT_CR: u64 = 28;
const EXIT_RDMSR: u64 = 31;
const EXIT_BELOW: u64 = 43;
const GUEST_RIP: u64 = 3;
const PENDING_DEBUG: u64 = 4;
const PRIORITY: u64 = 5;

guest_code!(
    // CR8 to RESULT[5], ARGUMENT into CR8, CPUID.
    moves,
    64,
    "mov %cr8, %rax",
    "mov %rax, RESULT + 40",
    "mov ARGUMENT, %rax",
    "mov %rax, %cr8",
    "cpuid",
    "hlt",
);
/// Where the MOV to CR8 begins and ends.
const MOV: u64 = 4 + 8 + 8;
const MOV_BYTES: u64 = 4;

guest_code!(
    // The same behind a mark, and another one between the two.
    moves_slowly,
    64,
    "out %al, $PORT_MARK",
    "mov %cr8, %rax",
    "mov %rax, RESULT + 40",
    "out %al, $PORT_MARK",
    "mov ARGUMENT, %rax",
    "mov %rax, %cr8",
    "cpuid",
    "hlt",
);

guest_code!(
    // Moves R8 into CR8 in a single step.
    steps,
    64,
    "pushf",
    "orl $0x100, (%rsp)",
    "popf",
    "mov %r8, %cr8",
    "cpuid",
    "hlt",
);
/// Where that MOV ends.
const STEPPED: u64 = 9 + 4;

guest_code!(
    // MSR 0x808 to RESULT[5], ARGUMENT into it, CPUID.
    moves_by_msr,
    64,
    "mov $0x808, %ecx",
    "rdmsr",
    "mov %eax, RESULT + 40",
    "mov %edx, RESULT + 44",
    "mov ARGUMENT, %eax",
    "mov ARGUMENT + 4, %edx",
    "wrmsr",
    "cpuid",
    "hlt",
);
/// Where the WRMSR begins.
const WRMSR: u64 = 5 + 2 + 4 * 7;

/// A guest whose L2 is this program, and that has come to its mark; its primary controls with a TPR shadow.
fn ready(l2: &[u8]) -> Outcome<(Guest, u64)> {
    let guest = with(program(), l2)?;
    guest.reach_mark()?;
    if guest.vcpu().msr(0x482)?.unwrap_or(0) >> 32 & SHADOW == 0 {
        return skip("no TPR shadow in VMX_PROCBASED_CTLS");
    }
    let primary = must(&guest, 0x482)? | SHADOW;
    Ok((guest, primary & !(LOAD | STORE)))
}

/// L2 moves `value` to CR8, where the page has `vtpr`.
fn moved(guest: &Guest, vtpr: u64, value: u64, fields: Fields<'_>) -> Outcome<u64> {
    guest.memory.write(VTPR, vtpr);
    guest.memory.write(ARGUMENT, value);
    launch(guest, fields)?;
    equal("an exit", guest.result(0), EXITED)?;
    Ok(guest.result(1))
}

fn l2_has_its_priority_in_l1s_page() -> Outcome {
    let (guest, primary) = ready(moves())?;
    let fields = [(0x4002, primary), (0x2012, PAGE), (0x401c, 0)];
    let junk = 0x1234_5678_9abc_de00;
    for (before, after) in [(7, 3), (3, 15), (15, 0), (0, 9)] {
        let vtpr = junk | before << 4 | 5;
        equal("exit", moved(&guest, vtpr, after, &fields)?, EXIT_CPUID)?;
        equal("MOV from CR8", guest.result(PRIORITY), before)?;
        equal("the page", guest.memory.read(VTPR), 0x1234_5678_0000_0000 | after << 4)?;
        equal("L1's own", guest.vcpu().sregs()?.cr8, 0)?;
    }
    Ok(())
}

fn below_the_threshold_l1_sees_an_exit() -> Outcome {
    let (guest, primary) = ready(moves())?;
    let fields = [(0x4002, primary), (0x2012, PAGE), (0x401c, 6)];
    for (value, reason) in [(7, EXIT_CPUID), (6, EXIT_CPUID), (5, EXIT_BELOW), (0, EXIT_BELOW)] {
        equal("exit", moved(&guest, 0x60, value, &fields)?, reason)?;
        equal("the page", guest.memory.read(VTPR), value << 4)?;
        equal("RIP", guest.result(GUEST_RIP), L2_CODE + MOV + MOV_BYTES)?;
    }
    Ok(())
}

fn a_step_below_the_threshold_is_told_along() -> Outcome {
    const STEP: u64 = 1 << 14;
    let (guest, primary) = ready(steps())?;
    let fields = [(0x4002, primary), (0x2012, PAGE), (0x401c, 6), (0x4004, 1 << 1)];
    for (value, reason) in [(7, EXIT_EXCEPTION), (5, EXIT_BELOW)] {
        guest.memory.write(VTPR, 0x60);
        // L1 leaves the register to its guest.
        let mut regs = guest.vcpu().regs()?;
        regs.r8 = value;
        guest.vcpu().set_regs(&regs)?;
        launch(&guest, &fields)?;
        equal("exit", (guest.result(0), guest.result(1)), (EXITED, reason))?;
        equal("RIP", guest.result(GUEST_RIP), L2_CODE + STEPPED)?;
    }
    equal("pending debug exceptions", guest.result(PENDING_DEBUG), STEP)
}

fn reserved_bits_of_cr8_are_a_fault() -> Outcome {
    let (guest, primary) = ready(moves())?;
    let fields = [(0x4002, primary), (0x2012, PAGE), (0x401c, 6), (0x4004, 1 << 13)];
    for value in [16, 1 << 8, 1 << 63] {
        equal("exit", moved(&guest, 0x60, value, &fields)?, EXIT_EXCEPTION)?;
        equal("the page", guest.memory.read(VTPR), 0x60)?;
        equal("RIP", guest.result(GUEST_RIP), L2_CODE + MOV)?;
    }
    Ok(())
}

fn an_entry_checks_page_and_threshold() -> Outcome {
    let (guest, primary) = ready(&L2_CPUID)?;
    guest.memory.write(VTPR, 0x5f);
    let shadow = (0x4002, primary);
    let cases = [
        ("a threshold above the priority", PAGE, 6),
        ("a threshold with reserved bits", PAGE, 0x10),
        ("a page that is none", PAGE + 8, 0),
        ("a page beyond physical addresses", 1 << 60, 0),
    ];
    for (what, page, threshold) in cases {
        fails(&guest, what, &[shadow, (0x2012, page), (0x401c, threshold)], 7)?;
    }
    launch(&guest, &[shadow, (0x2012, PAGE), (0x401c, 5)])?;
    equal("the priority itself", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))?;
    // Without the control the fields mean nothing.
    let plain = (0x4002, primary & !SHADOW | LOAD | STORE);
    launch(&guest, &[plain, (0x2012, PAGE + 8), (0x401c, 0x10)])?;
    equal("no shadow", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))
}

fn exits_of_cr8_are_l1s_where_it_asks() -> Outcome {
    let (guest, primary) = ready(moves())?;
    for (exits, at) in [(STORE, 0), (LOAD, MOV)] {
        let fields = [(0x4002, primary | exits), (0x2012, PAGE), (0x401c, 6)];
        equal("exit", moved(&guest, 0x60, 5, &fields)?, EXIT_CR)?;
        equal("RIP", guest.result(GUEST_RIP), L2_CODE + at)?;
        equal("the page", guest.memory.read(VTPR), 0x60)?;
    }
    Ok(())
}

fn a_page_that_is_no_memory_fails_the_entry() -> Outcome {
    let (guest, primary) = ready(&L2_CPUID)?;
    // Stock KVM has memory of its own there.
    let local_apic = (!is_stock()).then_some(0xfee0_0000);
    for page in [NOWHERE].into_iter().chain(local_apic) {
        for threshold in [0, 6] {
            let shadow = [(0x4002, primary), (0x2012, page), (0x401c, threshold)];
            launch(&guest, &shadow)?;
            equal("fails", (guest.result(0), guest.result(1)), (ZERO, 7))?;
        }
        // L2 reaches no register then.
        let both = [(0x4002, primary | LOAD | STORE), (0x2012, page), (0x401c, 0)];
        launch(&guest, &both)?;
        equal("both exits", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))?;
    }
    Ok(())
}

/// L2 stands before its first MOV, with a threshold of 6.
fn before_moves(page: u64) -> Outcome<(Guest, Memory)> {
    let (guest, primary) = ready(moves_slowly())?;
    let memory = Memory::new(0x1000)?;
    guest.vm.set_slot(7, 0, ELSEWHERE, 0x1000, memory.hva()).granted("slot")?;
    memory.write(0x80, 0x70);
    guest.memory.write(VTPR, 0x70);
    launch(&guest, &[(0x4002, primary), (0x2012, page), (0x401c, 6)])?;
    Ok((guest, memory))
}

/// Not below the threshold: stock KVM's hardware looks at it with each entry of L0's own, which is none of L1's.
fn the_page_is_changed_while_l2_runs() -> Outcome {
    let (guest, memory) = before_moves(ELSEWHERE)?;
    for (priority, value, reason) in [(8, 9, EXIT_CPUID), (15, 5, EXIT_BELOW)] {
        memory.write(0x80, priority << 4);
        guest.memory.write(ARGUMENT, value);
        guest.reach_mark()?;
        equal("MOV from CR8", guest.result(PRIORITY), priority)?;
        memory.write(0x80, u64::MAX);
        guest.reach_mark()?;
        equal("exit", (guest.result(0), guest.result(1)), (EXITED, reason))?;
        equal("the page", memory.read(0x80), !0 << 32 | value << 4)?;
        memory.write(0x80, 0x60);
        guest.reach_mark()?;
    }
    Ok(())
}

/// Stock KVM has pinned the page, and L2 goes on with it.
fn the_page_is_taken_away_while_l2_runs() -> Outcome {
    for value in [9, 5] {
        let (guest, memory) = before_moves(ELSEWHERE)?;
        guest.vm.set_slot(7, 0, ELSEWHERE, 0, memory.hva()).granted("deletion")?;
        memory.write(0x80, 0x90);
        guest.memory.write(ARGUMENT, value);
        guest.reach_mark()?;
        if !is_stock() {
            equal("MOV from CR8", guest.result(PRIORITY), 15)?;
        }
        guest.reach_mark()?;
        let reason = if value < 6 { EXIT_BELOW } else { EXIT_CPUID };
        equal("exit", (guest.result(0), guest.result(1)), (EXITED, reason))?;
        if !is_stock() {
            equal("the page", memory.read(0x80), 0x90)?;
        }
        // The next entry finds no page.
        guest.reach_mark()?;
        equal("fails", (guest.result(0), guest.result(1)), (ZERO, 7))?;
    }
    Ok(())
}

fn the_priority_travels() -> Outcome {
    let (guest, _memory) = before_moves(PAGE)?;
    for value in [9u64, 5] {
        guest.memory.write(ARGUMENT, value);
        let saved = Saved::of(&guest)?;
        for memory_last in [false, true] {
            let other = saved.restored(memory_last)?;
            other.reach_mark()?;
            equal("MOV from CR8", other.result(PRIORITY), 7)?;
            other.reach_mark()?;
            let reason = if value < 6 { EXIT_BELOW } else { EXIT_CPUID };
            equal("exit", (other.result(0), other.result(1)), (EXITED, reason))?;
            equal("the page", other.memory.read(VTPR), value << 4)?;
        }
    }
    Ok(())
}

fn the_priority_is_an_msr_of_the_x2apic_too() -> Outcome {
    const X2APIC: u64 = 1 << 4;
    // A page of zeroes: no MSR exits to L1.
    const NO_MSR: u64 = FREE + 0x2000;
    let (guest, primary) = ready(moves_by_msr())?;
    if guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 32 & X2APIC == 0 {
        return skip("no virtual x2APIC mode in VMX_PROCBASED_CTLS2");
    }
    let primary = primary | 1 << 28 | 1 << 31;
    let fields = [
        (0x4002, primary),
        (0x401e, X2APIC),
        (0x2004, NO_MSR),
        (0x2012, PAGE),
        (0x401c, 6),
        (0x4004, 1 << 13),
    ];
    for (before, after, reason) in [(0x75, 0x61, EXIT_CPUID), (0x61, 0x5f, EXIT_BELOW)] {
        equal("exit", moved(&guest, before, after, &fields)?, reason)?;
        equal("RDMSR", guest.result(PRIORITY), before)?;
        equal("the page", guest.memory.read(VTPR), after)?;
        equal("L1's own", guest.vcpu().sregs()?.cr8, 0)?;
    }
    equal("reserved bits", moved(&guest, 0x60, 0x160, &fields)?, EXIT_EXCEPTION)?;
    equal("RIP", guest.result(GUEST_RIP), L2_CODE + WRMSR)?;
    equal("the page", guest.memory.read(VTPR), 0x60)?;
    // An access that L1's map has exit is L1's; without the map all are.
    let [_, second, _, page, threshold, _] = fields;
    let no_map = [(0x4002, primary & !(1 << 28)), second, page, threshold];
    equal("RDMSR exits", moved(&guest, 0x60, 0x60, &no_map)?, EXIT_RDMSR)?;
    let no_page = [(0x4002, primary & !SHADOW), second];
    launch(&guest, &no_page)?;
    equal("no TPR shadow", (guest.result(0), guest.result(1)), (ZERO, 7))
}
