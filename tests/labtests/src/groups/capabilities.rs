//! Small capabilities: each is switched on with KVM_ENABLE_CAP and changes one thing (KVM API §6, §7).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, CpuidTable, System};
use crate::kvm::ioctl;
use crate::machine::code::{done, guarded, guest_code, hypercall};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::tables;
use crate::oracle::changed;
use crate::outcome::{Answer, Outcome, Reply, equal, fail, holds, one_of};
use crate::runner::tests;

tests!("capabilities":
    they_are_told,
    platform_info_can_be_kept_from_the_guest,
    features_of_the_hypervisor_are_not_enforced_at_first,
    a_vcpu_that_enforces_them_refuses_the_others,
    a_vcpu_that_enforces_them_serves_what_was_offered,
    enforcing_is_a_vcpus_setting,
    a_failed_emulation_is_an_exit_at_level_0,
    a_failed_emulation_is_an_exit_at_level_3_if_that_was_asked_for,
    a_failed_emulation_may_be_skipped,
    emulation_failures_have_one_switch,
    a_triple_fault_can_be_given,
    a_triple_fault_can_be_taken_back,
    a_triple_fault_is_told_of_where_it_was_asked_for,
);

fn they_are_told() -> Outcome {
    let system = System::open()?;
    for (name, cap) in [
        // Of a vCPU, which has one to be switched on.
        ("ENABLE_CAP", KVM_CAP_ENABLE_CAP),
        ("MSR_PLATFORM_INFO", KVM_CAP_MSR_PLATFORM_INFO),
        ("ENFORCE_PV_FEATURE_CPUID", KVM_CAP_ENFORCE_PV_FEATURE_CPUID),
        ("EXIT_ON_EMULATION_FAILURE", KVM_CAP_EXIT_ON_EMULATION_FAILURE),
        ("X86_TRIPLE_FAULT_EVENT", KVM_CAP_X86_TRIPLE_FAULT_EVENT),
    ] {
        equal(name, system.extension(cap), 1)?;
    }
    Ok(())
}

fn enable(to: &impl Commands, cap: u32, value: u64) -> Reply {
    let mut cap = kvm_enable_cap { cap, ..Default::default() };
    cap.args[0] = value;
    to.send(ioctl::ENABLE_CAP, &cap)
}

guest_code!(
    // Reads the MSR of ARGUMENT into RESULT.
    reads,
    64,
    "0: mov ARGUMENT, %ecx",
    guarded!("rdmsr"),
    "mov %eax, RESULT",
    "out %al, $PORT_MARK",
    "jmp 0b",
);

fn platform_info_can_be_kept_from_the_guest() -> Outcome {
    const PLATFORM_INFO: u32 = 0xce;
    let guest = Guest::new(Chip::Kernel, reads())?;
    guest.memory.write(ARGUMENT, PLATFORM_INFO.into());
    guest.reach_mark()?;
    equal("faults at first", guest.faults().0, 0)?;
    // At any time, and by any value.
    for (value, faults) in [(0, 1), (1, 1), (0, 2), (5, 2)] {
        enable(&guest.vm, KVM_CAP_MSR_PLATFORM_INFO, value).granted("KVM_ENABLE_CAP")?;
        guest.reach_mark()?;
        equal(&format!("faults with {value}"), guest.faults().0, faults)?;
        let outside = guest.vcpu().msr(PLATFORM_INFO)?;
        holds("a value from outside", outside.is_some(), outside)?;
    }
    Ok(())
}

const WALL_CLOCK: u32 = 0x11;
const SYSTEM_TIME: u32 = 0x12;
const WALL_CLOCK_NEW: u32 = 0x4b56_4d00;
const SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;
const STEAL_TIME: u32 = 0x4b56_4d03;
const PV_EOI: u32 = 0x4b56_4d04;
const POLL_CONTROL: u32 = 0x4b56_4d05;

/// MSRs and the bit of the feature that each comes with.
const PV_MSRS: [(u32, u32); 7] = [
    (WALL_CLOCK, 0),
    (SYSTEM_TIME, 0),
    (WALL_CLOCK_NEW, 3),
    (SYSTEM_TIME_NEW, 3),
    (STEAL_TIME, 5),
    (PV_EOI, 6),
    (POLL_CONTROL, 12),
];

guest_code!(
    // Reads the MSRs of FREE, up to 0, and writes 0 to each; then makes hypercalls 5 (wakes), 10 (sends
    // interrupts to nobody) and 11 (yields), with their answers from RESULT on.
    pv,
    64,
    "mov $FREE, %esi",
    "0: mov (%rsi), %ecx",
    "test %ecx, %ecx",
    "jz 1f",
    guarded!("rdmsr"),
    "xor %eax, %eax",
    "xor %edx, %edx",
    guarded!("wrmsr"),
    "mov FAULTS, %rax",
    "mov %rax, 8(%rsi)",
    "add $16, %rsi",
    "jmp 0b",
    "1: mov $5, %eax",
    "xor %ebx, %ebx",
    "xor %ecx, %ecx",
    hypercall!(),
    "mov %rax, RESULT",
    "mov $10, %eax",
    "xor %ebx, %ebx",
    "xor %ecx, %ecx",
    "xor %edx, %edx",
    "mov $0x40, %esi",
    hypercall!(),
    "mov %rax, RESULT + 8",
    "mov $11, %eax",
    "xor %ebx, %ebx",
    hypercall!(),
    "mov %rax, RESULT + 16",
    done!()
);

/// Faults for each of [`PV_MSRS`], and the answers of the hypercalls, of a guest that was offered
/// `features`.
fn pv_guest(features: u32, enforce: bool) -> Outcome<(Vec<u64>, [i64; 3])> {
    let guest = Guest::new(Chip::Kernel, pv())?;
    let mut table = guest.system.supported_cpuid()?;
    if let Some(entry) = table.find(0x4000_0001, 0) {
        entry.eax = features;
    }
    if enforce {
        let done = enable(guest.vcpu(), KVM_CAP_ENFORCE_PV_FEATURE_CPUID, 1);
        done.granted("KVM_ENABLE_CAP")?;
    }
    guest.vcpu().set_cpuid(&table)?;
    for (at, (msr, _)) in (FREE..).step_by(16).zip(PV_MSRS) {
        guest.memory.write(at, msr.into());
    }
    guest.finish()?;
    let mut before = 0;
    let mut faults = Vec::new();
    for (at, _) in (FREE + 8..).step_by(16).zip(PV_MSRS) {
        let now = guest.memory.read(at);
        faults.push(now - before);
        before = now;
    }
    Ok((faults, [0, 1, 2].map(|n| guest.result(n) as i64)))
}

const ENOSYS: i64 = -1000;

fn features_of_the_hypervisor_are_not_enforced_at_first() -> Outcome {
    equal("faults, answers", pv_guest(0, false)?, (vec![0; 7], [0; 3]))
}

fn a_vcpu_that_enforces_them_refuses_the_others() -> Outcome {
    equal("faults, answers", pv_guest(0, true)?, (vec![2; 7], [ENOSYS; 3]))
}

fn a_vcpu_that_enforces_them_serves_what_was_offered() -> Outcome {
    const UNHALT: u32 = 1 << 7;
    const SEND_IPI: u32 = 1 << 11;
    const SCHED_YIELD: u32 = 1 << 13;
    for (msr, bit) in PV_MSRS {
        let expected = PV_MSRS.map(|(_, other)| if other == bit { 0 } else { 2 }).to_vec();
        let (faults, answers) = pv_guest(1 << bit, true)?;
        equal(&format!("faults with the feature of {msr:#x}"), faults, expected)?;
        equal("answers", answers, [ENOSYS; 3])?;
    }
    equal("KICK_CPU", pv_guest(UNHALT, true)?.1, [0, ENOSYS, ENOSYS])?;
    equal("SEND_IPI", pv_guest(SEND_IPI, true)?.1, [ENOSYS, 0, ENOSYS])?;
    equal("SCHED_YIELD", pv_guest(SCHED_YIELD, true)?.1, [ENOSYS, ENOSYS, 0])
}

fn enforcing_is_a_vcpus_setting() -> Outcome {
    let guest = Guest::new(Chip::Kernel, pv())?;
    let cap = KVM_CAP_ENFORCE_PV_FEATURE_CPUID;
    enable(&guest.vm, cap, 1).refused("of a VM", libc::EINVAL)?;
    let flagged = kvm_enable_cap { cap, flags: 1, ..Default::default() };
    guest.vcpu().send(ioctl::ENABLE_CAP, &flagged).refused("flags", libc::EINVAL)?;
    enable(guest.vcpu(), KVM_CAP_MSR_PLATFORM_INFO, 1).refused("a VM's setting", libc::EINVAL)?;
    let mut table = CpuidTable::empty();
    guest.vcpu().exchange(ioctl::GET_CPUID2, &mut *table).granted("KVM_GET_CPUID2")?;
    if let Some(entry) = table.find(0x4000_0001, 0) {
        entry.eax = 0;
    }
    guest.vcpu().set_cpuid(&table)?;
    let value = FREE | 1;
    equal("set before", guest.vcpu().set_msr(STEAL_TIME, value)?, true)?;
    enable(guest.vcpu(), cap, 1).granted("on")?;
    // As of any MSR of the list that is not there: zero, and nothing but zero is taken. Old versions
    // of the stock module refuse it altogether.
    let read = guest.vcpu().msr(STEAL_TIME)?;
    one_of("from outside, while it is on", read, &changed((6, 12), None, Some(0)))?;
    equal("a value, while it is on", guest.vcpu().set_msr(STEAL_TIME, value)?, false)?;
    let zero = guest.vcpu().set_msr(STEAL_TIME, 0)?;
    one_of("zero, while it is on", zero, &changed((6, 12), false, true))?;
    enable(guest.vcpu(), cap, 0).granted("off")?;
    equal("from outside, while it is off", guest.vcpu().msr(STEAL_TIME)?, Some(value))
}

guest_code!(
    // FLD of device memory, which nobody emulates.
    flds,
    64,
    "mov $NOWHERE, %eax",
    "flds (%rax)",
    done!()
);

guest_code!(
    // The same at level 3; IOPL 3 lets it end.
    flds_in_user_mode,
    64,
    "mov $0x20, %eax",
    "ltr %ax",
    "push $0x3b",
    "push $0x1bf00",
    "push $0x3002",
    "push $0x33",
    "lea 3f(%rip), %rax",
    "push %rax",
    "iretq",
    "3: lea 7f(%rip), %rax",
    "mov %rax, RESUME",
    "mov $NOWHERE, %eax",
    "flds (%rax)",
    "7: out %al, $PORT_DONE",
);

fn in_user_mode() -> Outcome<Guest> {
    let guest = Guest::new(Chip::Kernel, flds_in_user_mode())?;
    tables::split_first_large_page(&guest.memory);
    for index in 0..512 {
        let at = SMALL_TABLE + index * 8;
        guest.memory.write(at, guest.memory.read(at) | 4);
    }
    // The page of NOWHERE is the user's too.
    let entry = ROOT + 0x5000 + (NOWHERE >> 21 & 0x1ff) * 8;
    guest.memory.write(entry, guest.memory.read(entry) | 4);
    // LTR wants a task segment that is not busy.
    let descriptor = guest.memory.read(GDT + 0x20);
    guest.memory.write(GDT + 0x20, descriptor & !(2 << 40));
    Ok(guest)
}

/// The exit has to be a failed emulation that shows the bytes of `flds (%rax)`.
fn failed(exit: Exit) -> Outcome {
    let Exit::Internal { suberror, data } = exit else {
        return fail(format!("expected an internal error got {exit:x?}"));
    };
    equal("suberror", suberror, KVM_INTERNAL_ERROR_EMULATION)?;
    holds("three words or more", data.len() >= 3, &data)?;
    equal("flags", data[0] & 1, 1)?;
    let bytes: Vec<u8> = data[1..3].iter().flat_map(|word| word.to_le_bytes()).collect();
    holds("two bytes or more", bytes[0] >= 2, bytes[0])?;
    equal("the instruction", &bytes[1..3], &[0xd9, 0x00][..])
}

fn exception_waits(guest: &Guest) -> Outcome<(u8, u8)> {
    let events: kvm_vcpu_events =
        guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")?;
    Ok((events.exception.injected, events.exception.nr))
}

fn a_failed_emulation_is_an_exit_at_level_0() -> Outcome {
    let guest = Guest::new(Chip::Kernel, flds())?;
    failed(guest.exit()?)?;
    // Who goes on has the guest see that it could not be done.
    equal("#UD waits", exception_waits(&guest)?, (1, 6))
}

fn a_failed_emulation_is_an_exit_at_level_3_if_that_was_asked_for() -> Outcome {
    let guest = in_user_mode()?;
    guest.finish()?;
    equal("exceptions, vector", (guest.faults().0, guest.faults().1), (1, 6))?;
    let guest = in_user_mode()?;
    enable(&guest.vm, KVM_CAP_EXIT_ON_EMULATION_FAILURE, 1).granted("KVM_ENABLE_CAP")?;
    failed(guest.exit()?)?;
    equal("an exception waits", exception_waits(&guest)?.0, 0)?;
    equal("exceptions", guest.faults().0, 0)
}

fn a_failed_emulation_may_be_skipped() -> Outcome {
    let guest = Guest::new(Chip::Kernel, flds())?;
    enable(&guest.vm, KVM_CAP_EXIT_ON_EMULATION_FAILURE, 1).granted("KVM_ENABLE_CAP")?;
    failed(guest.exit()?)?;
    let mut regs = guest.vcpu().regs()?;
    regs.rip += 2;
    guest.vcpu().set_regs(&regs)?;
    guest.finish()?;
    equal("exceptions", guest.faults().0, 0)
}

fn emulation_failures_have_one_switch() -> Outcome {
    let guest = Guest::new(Chip::Kernel, flds())?;
    let cap = KVM_CAP_EXIT_ON_EMULATION_FAILURE;
    enable(&guest.vm, cap, 2).refused("another bit", libc::EINVAL)?;
    enable(&guest.vm, cap, 1 << 32 | 1).refused("another bit", libc::EINVAL)?;
    enable(&guest.vm, cap, 1).granted("on")?;
    enable(&guest.vm, cap, 0).granted("off")?;
    failed(guest.exit()?)?;
    equal("#UD waits", exception_waits(&guest)?, (1, 6))
}

const TRIPLE_FAULT: u32 = 0x20;

fn events_of(guest: &Guest) -> Outcome<kvm_vcpu_events> {
    guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")
}

pub(super) fn give_triple_fault(guest: &Guest, pending: u8) -> Outcome<Reply> {
    let mut events = events_of(guest)?;
    events.flags |= TRIPLE_FAULT;
    events.triple_fault.pending = pending;
    Ok(guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events))
}

/// User space may give this guest a triple fault.
pub(super) fn let_give_triple_faults(guest: &Guest) -> Outcome {
    enable(&guest.vm, KVM_CAP_X86_TRIPLE_FAULT_EVENT, 1).granted("KVM_ENABLE_CAP").map(drop)
}

fn with_triple_faults() -> Outcome<Guest> {
    let guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, 1, reads())?;
    guest.memory.write(ARGUMENT, 0x10);
    let_give_triple_faults(&guest)?;
    Ok(guest)
}

fn a_triple_fault_can_be_given() -> Outcome {
    let guest = with_triple_faults()?;
    guest.reach_mark()?;
    give_triple_fault(&guest, 1)?.granted("KVM_SET_VCPU_EVENTS")?;
    let events = events_of(&guest)?;
    equal(
        "pending",
        (events.flags & TRIPLE_FAULT, events.triple_fault.pending),
        (TRIPLE_FAULT, 1),
    )?;
    guest.expect("KVM_RUN", Exit::Shutdown)?;
    equal("pending after", events_of(&guest)?.triple_fault.pending, 0)
}

fn a_triple_fault_can_be_taken_back() -> Outcome {
    let guest = with_triple_faults()?;
    guest.reach_mark()?;
    give_triple_fault(&guest, 1)?.granted("KVM_SET_VCPU_EVENTS")?;
    give_triple_fault(&guest, 0)?.granted("KVM_SET_VCPU_EVENTS")?;
    guest.reach_mark()
}

fn a_triple_fault_is_told_of_where_it_was_asked_for() -> Outcome {
    let guest = Guest::new(Chip::Kernel, reads())?;
    equal("flag", events_of(&guest)?.flags & TRIPLE_FAULT, 0)?;
    give_triple_fault(&guest, 1)?.refused("KVM_SET_VCPU_EVENTS", libc::EINVAL)?;
    enable(&guest.vm, KVM_CAP_X86_TRIPLE_FAULT_EVENT, 1).granted("on")?;
    let events = events_of(&guest)?;
    equal("flag", (events.flags & TRIPLE_FAULT, events.triple_fault.pending), (TRIPLE_FAULT, 0))?;
    enable(&guest.vm, KVM_CAP_X86_TRIPLE_FAULT_EVENT, 0).granted("off")?;
    equal("flag", events_of(&guest)?.flags & TRIPLE_FAULT, 0)
}
