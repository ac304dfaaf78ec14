//! A guest's guest that is entered halted, or waiting for a startup IPI; INIT in VMX operation.
//!
//! SDM vol. 3C §24.8, §25.2 (INIT and SIPI), §25.4.2, §27.7.2 (activity states).

use super::nested_vmx::{
    EXIT_CPUID, EXITED, Fields, L2_CODE, L2_CPUID, cleared, failure, filled, launch, launched,
    must, operation, set_fields, told,
};
use crate::kvm::exit::Exit;
use crate::kvm::{file::Commands, ioctl};
use crate::machine::code::{guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::{ARGUMENT, FREE, PORT_MARK, RESUME, VECTOR};
use crate::machine::threads::Target;
use crate::oracle::is_stock;
use crate::outcome::{Answer, Outcome, equal, holds, skip};
use crate::runner::tests;

tests!("nested_vmx_activity":
    an_entry_into_hlt_waits_for_the_timer,
    an_entry_into_hlt_waits_for_an_interrupt,
    an_entry_into_hlt_is_the_vmms_where_it_has_the_local_apic,
    what_an_entry_injects_wakes_it_from_hlt,
    an_open_window_wakes_it_from_hlt,
    activity_states_that_are_not_offered_fail_the_entry,
    l2_waits_for_a_startup_ipi,
    an_init_waits_while_l1_runs_and_ends_l2s_run,
    an_init_waits_for_the_end_of_vmx_operation,
);

const ACTIVITY: u64 = 0x4826;
const ACTIVE: u64 = 0;
const HLT: u64 = 1;
const SHUTDOWN: u64 = 2;
const WAIT_FOR_SIPI: u64 = 3;

const EXIT_INTERRUPT: u64 = 1;
const EXIT_INIT: u64 = 3;
const EXIT_SIPI: u64 = 4;
const EXIT_WINDOW: u64 = 7;
const EXIT_TIMER: u64 = 52;
const FAILED_ENTRY: u64 = 1 << 31;

const QUALIFICATION: u64 = 2;
const GUEST_RIP: u64 = 3;
const LEFT: u64 = 7;

/// RFLAGS with IF: else the emulated CPU does not leave L2 for the host's interrupts.
const OPEN: (u64, u64) = (0x6820, 0x202);

/// Of vCPU 1.
const SENDER: u64 = FREE + 0x1_1000;
/// What the x2APIC is told to send to vCPU 0.
const SEND_INIT: u64 = 0x4500;
const SEND_SIPI: u64 = 0x4600;
const SEND_FIXED: u64 = 0x4000;

guest_code!(
    // For ever: marks, fills a clear VMCS, launches it, tells what became of it.
    launches,
    64,
    x2apic!(),
    operation!(),
    "0: out %al, $PORT_MARK",
    cleared!(),
    filled!(),
    launched!(0x681e => 24, 0x4826 => 56),
    "jmp 0b",
);

guest_code!(
    // The same without a local APIC.
    launches_without_apic,
    64,
    operation!(),
    "0: out %al, $PORT_MARK",
    cleared!(),
    filled!(),
    launched!(0x681e => 24, 0x4826 => 56),
    "jmp 0b",
);

guest_code!(
    // The same, and sends what the test says to itself before it launches, or leaves VMX operation for 0.
    inits,
    64,
    x2apic!(),
    operation!(),
    "0: out %al, $PORT_MARK",
    cleared!(),
    filled!(),
    "mov $0x830, %ecx",
    "xor %edx, %edx",
    "mov $0x4500, %eax",
    "wrmsr",
    "out %al, $PORT_MARK",
    "cmpq $0, ARGUMENT",
    "jne 1f",
    "vmxoff",
    "1:",
    launched!(0x681e => 24, 0x4826 => 56),
    "jmp 0b",
);

guest_code!(
    // For ever: marks, sends what the test says to vCPU 0.
    sends,
    64,
    x2apic!(),
    "0: out %al, $PORT_MARK",
    "mov $0x830, %ecx",
    "xor %edx, %edx",
    "mov ARGUMENT, %eax",
    "wrmsr",
    "jmp 0b",
);

/// The program of L1 that launches for ever.
pub(super) fn program() -> &'static [u8] {
    launches()
}

/// A hypervisor with this program, that has come to its mark. With a second vCPU, which can send to it.
pub(super) fn ready(code: &[u8]) -> Outcome<Guest> {
    let guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, 2, code)?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if cpuid.find(1, 0).is_none_or(|entry| entry.ecx & 1 << 5 == 0) {
        return skip("no VMX in KVM_GET_SUPPORTED_CPUID");
    }
    guest.memory.write_bytes(L2_CODE, &L2_CPUID);
    guest.memory.write_bytes(SENDER, sends());
    guest.reach_mark()?;
    let wanted = 1 << 6 | 1 << 8;
    if guest.vcpu().msr(0x485)?.unwrap_or(0) & wanted != wanted {
        return skip("no activity states in VMX_MISC");
    }
    Ok(guest)
}

fn exited(guest: &Guest, what: &str, reason: u64, activity: u64) -> Outcome {
    equal(what, (guest.result(0), guest.result(1)), (EXITED, reason))?;
    equal(&format!("{what}: RIP"), guest.result(GUEST_RIP), L2_CODE)?;
    equal(&format!("{what}: activity"), guest.result(LEFT), activity)
}

/// The activity that an exit tells for what waited at the entry already: stock KVM's L2 does not halt then.
fn awake_on_stock(activity: u64) -> u64 {
    if is_stock() { ACTIVE } else { activity }
}

/// L2 sleeps with these fields until vCPU 1 has sent these words, one after the other.
pub(super) fn sent(guest: &Guest, fields: Fields<'_>, words: &[u64]) -> Outcome {
    let sender = &guest.vcpus[1];
    let runnable = kvm_bindings::kvm_mp_state { mp_state: kvm_bindings::KVM_MP_STATE_RUNNABLE };
    sender.send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
    let mut regs = sender.regs()?;
    regs.rip = SENDER;
    sender.set_regs(&regs)?;
    let send = |word: u64| -> Outcome {
        guest.memory.write(ARGUMENT, word);
        let exit = guest.exit_of(1)?;
        holds("vCPU 1's mark", exit.is_out(PORT_MARK), exit)
    };
    set_fields(guest, fields);
    let target = Target::new();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            target.is_me();
            guest.reach_mark()
        });
        let sent = (|| {
            send(0)?;
            for word in words {
                holds("L2 sleeps", target.sleeps(), target.state())?;
                send(*word)?;
            }
            Ok(())
        })();
        if sent.is_err() {
            target.kick();
        }
        let slept = sleeper.join().unwrap_or(Ok(()));
        sent.and(slept)
    })
}

fn an_entry_into_hlt_waits_for_the_timer() -> Outcome {
    let guest = ready(launches())?;
    if guest.vcpu().msr(0x481)?.unwrap_or(0) >> 38 & 1 == 0 {
        return skip("no preemption timer in VMX_PINBASED_CTLS");
    }
    let pin = (0x4000, must(&guest, 0x481)? | 1 << 6);
    for _ in 0..3 {
        launch(&guest, &[pin, (0x482e, 20_000), (ACTIVITY, HLT)])?;
        exited(&guest, "halted", EXIT_TIMER, HLT)?;
        launch(&guest, &[])?;
        exited(&guest, "active", EXIT_CPUID, ACTIVE)?;
    }
    Ok(())
}

fn an_entry_into_hlt_waits_for_an_interrupt() -> Outcome {
    let guest = ready(launches())?;
    let pin = (0x4000, must(&guest, 0x481)? | 1);
    sent(&guest, &[pin, (ACTIVITY, HLT)], &[SEND_FIXED | 0x40])?;
    exited(&guest, "an interrupt", EXIT_INTERRUPT, HLT)?;
    // It is pending still.
    launch(&guest, &[pin, (ACTIVITY, HLT)])?;
    exited(&guest, "the interrupt", EXIT_INTERRUPT, awake_on_stock(HLT))
}

fn an_entry_into_hlt_is_the_vmms_where_it_has_the_local_apic() -> Outcome {
    let guest = super::nested_vmx::with_chip(Chip::None, launches_without_apic(), &L2_CPUID)?;
    guest.reach_mark()?;
    set_fields(&guest, &[(ACTIVITY, HLT)]);
    equal("KVM_RUN", guest.exit()?, Exit::Hlt)?;
    guest.reach_mark()?;
    equal("exit", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))
}

fn what_an_entry_injects_wakes_it_from_hlt() -> Outcome {
    let guest = ready(launches())?;
    guest.memory.write(RESUME, L2_CODE);
    launch(&guest, &[(ACTIVITY, HLT), (0x4016, 0x8000_0301)])?;
    exited(&guest, "#DB", EXIT_CPUID, ACTIVE)?;
    equal("vector", guest.memory.read(VECTOR), 1)
}

fn an_open_window_wakes_it_from_hlt() -> Outcome {
    let guest = ready(launches())?;
    let window = (0x4002, must(&guest, 0x482)? | 1 << 2);
    launch(&guest, &[window, (ACTIVITY, HLT), (0x6820, 0x202)])?;
    exited(&guest, "a window", EXIT_WINDOW, ACTIVE)
}

fn activity_states_that_are_not_offered_fail_the_entry() -> Outcome {
    let guest = ready(launches())?;
    for state in [SHUTDOWN, 4, 0xffff_ffff] {
        launch(&guest, &[(ACTIVITY, state)])?;
        let what = format!("activity {state}");
        equal(&what, (guest.result(0), guest.result(1)), (EXITED, FAILED_ENTRY | 33))?;
        launch(&guest, &[])?;
        exited(&guest, "active", EXIT_CPUID, ACTIVE)?;
    }
    Ok(())
}

fn l2_waits_for_a_startup_ipi() -> Outcome {
    let guest = ready(launches())?;
    // Nothing but a startup IPI ends that.
    sent(&guest, &[(ACTIVITY, WAIT_FOR_SIPI)], &[SEND_INIT, SEND_SIPI | 0x30])?;
    exited(&guest, "a startup IPI", EXIT_SIPI, WAIT_FOR_SIPI)?;
    equal("its vector", guest.result(QUALIFICATION), 0x30)?;
    // The INIT is gone.
    launch(&guest, &[])?;
    exited(&guest, "active", EXIT_CPUID, ACTIVE)
}

fn an_init_waits_while_l1_runs_and_ends_l2s_run() -> Outcome {
    let guest = ready(inits())?;
    guest.memory.write(ARGUMENT, 1);
    for state in [ACTIVE, HLT] {
        launch(&guest, &[(ACTIVITY, state), OPEN])?;
        // L1 goes on behind its INIT.
        guest.reach_mark()?;
        exited(&guest, "INIT", EXIT_INIT, awake_on_stock(state))?;
    }
    Ok(())
}

fn an_init_waits_for_the_end_of_vmx_operation() -> Outcome {
    let guest = ready(inits())?;
    guest.memory.write(ARGUMENT, 0);
    launch(&guest, &[])?;
    // Nothing is at the reset vector.
    let exit = guest.vcpu().run();
    let cs = guest.vcpu().sregs()?.cs;
    holds("at the reset vector", (cs.selector, cs.base) == (0xf000, 0xffff_0000), (exit, cs))
}
