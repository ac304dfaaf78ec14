//! Waiting: MONITOR and MWAIT, and exits that a VMM switches off for a guest that has its CPUs to itself
//! (KVM API §7.13).

use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, CpuidTable, System};
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::machine::code::{done, guarded, guest_code};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::Memory;
use crate::machine::tables;
use crate::machine::threads::{Target, eventually};
use crate::oracle::{is_stock, kernel};
use crate::outcome::{Answer, Errno, Outcome, Reply, equal, fail, holds, skip};
use crate::runner::tests;

tests!("idle":
    monitor_and_mwait_do_nothing,
    monitor_in_cpuid_is_the_vmms,
    misc_enable_decides_on_monitor_without_the_quirk,
    mwait_is_undefined_without_the_quirk,
    exits_that_can_be_switched_off_are_told,
    exits_are_switched_off_before_there_are_vcpus,
    a_halt_in_the_guest_is_no_exit,
    an_interrupt_ends_a_halt_in_the_guest,
    an_exception_ends_a_halt_in_the_guest,
    unhalt_is_hidden_where_the_guest_halts_itself,
    mwait_in_the_guest_is_no_exit,
    a_guest_that_never_exits_for_pause_can_be_interrupted,
);

const MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_MWAIT: u64 = 1 << 18;
const CPUID_MONITOR: u32 = 1 << 3;
const QUIRK_MISC_ENABLE: u64 = 1 << 4;
const QUIRK_NEVER_UD: u64 = 1 << 6;
const MWAIT: u64 = 1;
const HLT: u64 = 2;
const PAUSE: u64 = 4;
const CSTATE: u64 = 8;

guest_code!(
    monitor_mwait,
    64,
    "mov $FREE, %eax",
    "xor %ecx, %ecx",
    "xor %edx, %edx",
    guarded!("monitor"),
    "xor %eax, %eax",
    guarded!("mwait"),
    "mov $1, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "mov %rcx, RESULT",
    done!()
);

fn monitor_and_mwait_do_nothing() -> Outcome {
    let guest = Guest::new(Chip::Kernel, monitor_mwait())?;
    guest.finish()?;
    equal("exceptions", guest.faults().0, 0)
}

/// Sets or clears MONITOR in the vCPU's CPUID.
fn offer_monitor(guest: &Guest, on: bool) -> Outcome {
    let mut table = CpuidTable::empty();
    guest.vcpu().exchange(ioctl::GET_CPUID2, &mut *table).granted("KVM_GET_CPUID2")?;
    if let Some(entry) = table.find(1, 0) {
        entry.ecx = entry.ecx & !CPUID_MONITOR | if on { CPUID_MONITOR } else { 0 };
    }
    guest.vcpu().set_cpuid(&table)
}

fn enable(guest: &Guest, cap: u32, value: u64) -> Reply {
    let mut cap = kvm_enable_cap { cap, ..Default::default() };
    cap.args[0] = value;
    guest.vm.send(ioctl::ENABLE_CAP, &cap)
}

/// Switches quirks off, where they can be.
fn without_quirk(guest: &Guest, quirk: u64) -> Outcome {
    let known = guest.system.extension(KVM_CAP_DISABLE_QUIRKS2) as u64;
    if known & quirk == 0 {
        return skip("the quirk cannot be switched off");
    }
    enable(guest, KVM_CAP_DISABLE_QUIRKS2, quirk).granted("KVM_CAP_DISABLE_QUIRKS2").map(drop)
}

fn monitor_in_cpuid_is_the_vmms() -> Outcome {
    for (offered, misc_enable) in [(true, 0), (false, MISC_ENABLE_MWAIT), (true, MISC_ENABLE_MWAIT)]
    {
        let guest = Guest::new(Chip::Kernel, monitor_mwait())?;
        offer_monitor(&guest, offered)?;
        let value = guest.vcpu().msr(MISC_ENABLE)?.unwrap_or(0) & !MISC_ENABLE_MWAIT;
        // There and back, so that it was written in any case.
        let other = value | misc_enable ^ MISC_ENABLE_MWAIT;
        equal("MISC_ENABLE", guest.vcpu().set_msr(MISC_ENABLE, other)?, true)?;
        equal("MISC_ENABLE", guest.vcpu().set_msr(MISC_ENABLE, value | misc_enable)?, true)?;
        guest.finish()?;
        let shown = guest.result(0) as u32 & CPUID_MONITOR != 0;
        equal(&format!("MONITOR with MISC_ENABLE {misc_enable:#x}"), shown, offered)?;
        equal("exceptions", guest.faults().0, 0)?;
    }
    Ok(())
}

fn misc_enable_decides_on_monitor_without_the_quirk() -> Outcome {
    for (offered, misc_enable) in [(true, 0), (false, MISC_ENABLE_MWAIT)] {
        let guest = Guest::new(Chip::Kernel, monitor_mwait())?;
        without_quirk(&guest, QUIRK_MISC_ENABLE)?;
        offer_monitor(&guest, offered)?;
        let value = guest.vcpu().msr(MISC_ENABLE)?.unwrap_or(0) & !MISC_ENABLE_MWAIT;
        let other = value | misc_enable ^ MISC_ENABLE_MWAIT;
        equal("MISC_ENABLE", guest.vcpu().set_msr(MISC_ENABLE, other)?, true)?;
        equal("MISC_ENABLE", guest.vcpu().set_msr(MISC_ENABLE, value | misc_enable)?, true)?;
        guest.finish()?;
        let shown = guest.result(0) as u32 & CPUID_MONITOR != 0;
        equal("MONITOR", shown, misc_enable != 0)?;
    }
    Ok(())
}

fn mwait_is_undefined_without_the_quirk() -> Outcome {
    for offered in [true, false] {
        let guest = Guest::new(Chip::Kernel, monitor_mwait())?;
        without_quirk(&guest, QUIRK_NEVER_UD)?;
        offer_monitor(&guest, offered)?;
        guest.finish()?;
        let (count, vector, _) = guest.faults();
        match offered {
            true => equal("exceptions", count, 0)?,
            false => equal("exceptions, vector", (count, vector), (2, 6))?,
        }
    }
    Ok(())
}

fn exits_that_can_be_switched_off_are_told() -> Outcome {
    let system = System::open()?;
    let told = system.extension(KVM_CAP_X86_DISABLE_EXITS) as u64;
    equal("HLT, PAUSE, CSTATE", told & !MWAIT, HLT | PAUSE | CSTATE)
}

fn exits_are_switched_off_before_there_are_vcpus() -> Outcome {
    let system = System::open()?;
    system.require(KVM_CAP_X86_DISABLE_EXITS, "KVM_CAP_X86_DISABLE_EXITS")?;
    let vm = system.create_vm()?;
    let disable = |value| {
        let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_DISABLE_EXITS, ..Default::default() };
        cap.args[0] = value;
        vm.send(ioctl::ENABLE_CAP, &cap)
    };
    disable(16).refused("an unknown exit", libc::EINVAL)?;
    disable(1 << 32).refused("an unknown exit", libc::EINVAL)?;
    // One that the host cannot do without is taken and means nothing.
    disable(MWAIT | HLT).granted("MWAIT and HLT")?;
    disable(PAUSE | CSTATE).granted("more of them")?;
    // Old versions take it later as well, for vCPUs that are made then.
    let _vcpu = vm.create_vcpu(0)?;
    match is_stock() && kernel() < (6, 17) {
        true => disable(HLT).granted("with a vCPU").map(drop),
        false => disable(HLT).refused("with a vCPU", libc::EINVAL),
    }
}

/// A vCPU in 64-bit mode that exits less.
struct Quiet {
    vcpu: Vcpu,
    guest: Guest,
}

fn quiet(exits: u64, chip: Chip, code: &[u8], pv: u32) -> Outcome<Quiet> {
    let guest = Guest::over(Memory::new(MEMORY_BYTES)?, chip, Mode::Long, 0, code)?;
    guest.system.require(KVM_CAP_X86_DISABLE_EXITS, "KVM_CAP_X86_DISABLE_EXITS")?;
    enable(&guest, KVM_CAP_X86_DISABLE_EXITS, exits).granted("KVM_CAP_X86_DISABLE_EXITS")?;
    let vcpu = guest.vm.create_vcpu(0)?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if let Some(entry) = cpuid.find(0x4000_0001, 0) {
        entry.eax |= pv;
    }
    vcpu.set_cpuid(&cpuid)?;
    vcpu.set_sregs(&tables::long_mode(vcpu.sregs()?))?;
    let start = kvm_regs { rip: PROGRAM, rsp: STACKS + 0x1000, rflags: 2, ..Default::default() };
    vcpu.set_regs(&start)?;
    Ok(Quiet { vcpu, guest })
}

/// Runs until the guest counts in RESULT, and a little longer; what KVM_RUN answers to a signal.
fn run_a_while(quiet: &Quiet) -> Outcome<Result<Exit, Errno>> {
    let target = Target::new();
    let before = quiet.guest.result(0);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            quiet.vcpu.run()
        });
        eventually("the guest runs", || quiet.guest.result(0) > before || run.is_finished())?;
        std::thread::sleep(Duration::from_millis(20));
        // It may be between two entries when a signal comes.
        eventually("KVM_RUN returns", || {
            target.kick();
            run.is_finished()
        })?;
        run.join().or_else(|_| fail("the thread died"))
    })
}

guest_code!(
    halts,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 0x40 * 8",
    "sti",
    "0: incq RESULT",
    "hlt",
    "jmp 0b",
    "1: out %al, $PORT_MARK",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn a_halt_in_the_guest_is_no_exit() -> Outcome {
    let guest = Guest::new(Chip::None, halts())?;
    guest.expect("with the exit", Exit::Hlt)?;
    let quiet = quiet(HLT, Chip::None, halts(), 0)?;
    equal("KVM_RUN", run_a_while(&quiet)?, Err(Errno(libc::EINTR)))
}

fn an_interrupt_ends_a_halt_in_the_guest() -> Outcome {
    let quiet = quiet(HLT, Chip::None, halts(), 0)?;
    for _ in 0..3 {
        equal("KVM_RUN", run_a_while(&quiet)?, Err(Errno(libc::EINTR)))?;
        let interrupt = kvm_interrupt { irq: 0x40 };
        quiet.vcpu.send(ioctl::INTERRUPT, &interrupt).granted("KVM_INTERRUPT")?;
        let exit = quiet.vcpu.run().granted("KVM_RUN")?;
        holds("the handler's mark", exit.is_out(PORT_MARK), &exit)?;
    }
    Ok(())
}

fn an_exception_ends_a_halt_in_the_guest() -> Outcome {
    let quiet = quiet(HLT, Chip::None, halts(), 0)?;
    equal("KVM_RUN", run_a_while(&quiet)?, Err(Errno(libc::EINTR)))?;
    // #GP, which nobody has raised there, and which no CPU takes while it is halted.
    let mut events: kvm_vcpu_events =
        quiet.vcpu.receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")?;
    events.exception.injected = 1;
    events.exception.nr = 13;
    events.exception.has_error_code = 1;
    quiet.vcpu.send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
    let exit = quiet.vcpu.run().granted("KVM_RUN")?;
    holds("the handler of exceptions", exit.is_out(PORT_FAULT), &exit)?;
    equal("exceptions, vector", (quiet.guest.faults().0, quiet.guest.faults().1), (1, 13))
}

guest_code!(
    pv_features,
    64,
    "mov $0x40000001, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "mov %rax, RESULT",
    done!()
);

fn unhalt_is_hidden_where_the_guest_halts_itself() -> Outcome {
    const UNHALT: u32 = 1 << 7;
    // Old versions of the stock module see the bit only when CPUID is set again.
    let hidden = if is_stock() && kernel() < (6, 12) { UNHALT } else { 0 };
    for (exits, shown) in [(PAUSE, UNHALT), (HLT, hidden)] {
        let quiet = quiet(exits, Chip::Kernel, pv_features(), UNHALT)?;
        let exit = quiet.vcpu.run().granted("KVM_RUN")?;
        holds("the guest's end", exit.is_out(PORT_DONE), &exit)?;
        equal("PV_UNHALT", quiet.guest.result(0) as u32 & UNHALT, shown)?;
        let mut table = CpuidTable::empty();
        quiet.vcpu.exchange(ioctl::GET_CPUID2, &mut *table).granted("KVM_GET_CPUID2")?;
        let told = table.find(0x4000_0001, 0).map_or(0, |entry| entry.eax);
        equal("PV_UNHALT in KVM_GET_CPUID2", told & UNHALT, shown)?;
    }
    Ok(())
}

guest_code!(
    waits,
    64,
    "sti",
    "0: incq RESULT",
    "mov $FREE, %eax",
    "xor %ecx, %ecx",
    "xor %edx, %edx",
    "monitor",
    "xor %eax, %eax",
    "mwait",
    "jmp 0b",
);

fn mwait_in_the_guest_is_no_exit() -> Outcome {
    let system = System::open()?;
    if system.extension(KVM_CAP_X86_DISABLE_EXITS) as u64 & MWAIT == 0 {
        return skip("the host has no MWAIT that can be given away");
    }
    let quiet = quiet(MWAIT, Chip::None, waits(), 0)?;
    equal("KVM_RUN", run_a_while(&quiet)?, Err(Errno(libc::EINTR)))
}

guest_code!(pauses, 64, "sti", "0: incq RESULT", "pause", "jmp 0b");

fn a_guest_that_never_exits_for_pause_can_be_interrupted() -> Outcome {
    let quiet = quiet(PAUSE, Chip::Kernel, pauses(), 0)?;
    equal("KVM_RUN", run_a_while(&quiet)?, Err(Errno(libc::EINTR)))
}
