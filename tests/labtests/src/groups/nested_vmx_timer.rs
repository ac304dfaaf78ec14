//! L1's preemption timer, which ends L2's run.
//!
//! SDM vol. 3C §26.5.1, §27.7.4.

use super::nested_vmx::{
    EXIT_CPUID, EXITED, Fields, L2_CODE, L2_CPUID, L2_MARKS, fails, launch, must, program, with,
};
use crate::machine::guest::Guest;
use crate::machine::saved::{Saved, nested};
use crate::oracle::is_stock;
use crate::outcome::{Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx_timer":
    a_timer_of_nothing_ends_the_run_before_it_begins,
    a_timer_ends_a_run_without_exits,
    a_timer_ends_the_run_of_an_l2_that_halts,
    what_is_left_is_saved_if_l1_asks,
    saving_needs_a_timer,
    a_timer_that_was_used_before_ends_nothing,
    the_deadline_travels,
);

const TIMER: u64 = 1 << 6;
const SAVE: u64 = 1 << 22;
const RATE: u32 = 5;

const EXIT_TIMER: u64 = 52;
const GUEST_RIP: u64 = 3;
const LEFT: u64 = 6;

/// RFLAGS with IF: else the emulated CPU does not leave a loop of stock KVM's for the host's interrupts.
const OPEN: (u64, u64) = (0x6820, 0x202);
/// PAUSE, for ever.
const L2_LOOPS: [u8; 4] = [0xf3, 0x90, 0xeb, 0xfc];
/// HLT, and CPUID behind it.
const L2_HALTS: [u8; 3] = [0xf4, 0x0f, 0xa2];

/// A guest with this L2, and its pin and exit controls with a timer that is saved.
fn ready(l2: &[u8]) -> Outcome<(Guest, [(u64, u64); 2])> {
    let guest = with(program(), l2)?;
    guest.reach_mark()?;
    if guest.vcpu().msr(0x481)?.unwrap_or(0) >> 32 & TIMER == 0 {
        return skip("no preemption timer in VMX_PINBASED_CTLS");
    }
    equal("rate", guest.vcpu().msr(0x485)?.unwrap_or(0) as u32 & 0x1f, RATE)?;
    let pin = must(&guest, 0x481)? | TIMER;
    // Long mode, as the program has it.
    let exit = must(&guest, 0x483)? | 1 << 9;
    Ok((guest, [(0x4000, pin), (0x400c, exit)]))
}

fn expect(guest: &Guest, what: &str, reason: u64, rip: u64) -> Outcome {
    equal(what, (guest.result(0), guest.result(1)), (EXITED, reason))?;
    equal(&format!("{what}: RIP"), guest.result(GUEST_RIP), rip)
}

fn a_timer_of_nothing_ends_the_run_before_it_begins() -> Outcome {
    let (guest, [pin, exit]) = ready(&L2_CPUID)?;
    for _ in 0..3 {
        launch(&guest, &[pin, exit, (0x482e, 0)])?;
        expect(&guest, "0", EXIT_TIMER, L2_CODE)?;
        launch(&guest, &[pin, exit, (0x482e, 0xffff_ffff)])?;
        expect(&guest, "a long time", EXIT_CPUID, L2_CODE)?;
    }
    Ok(())
}

fn a_timer_ends_a_run_without_exits() -> Outcome {
    let (guest, [pin, exit]) = ready(&L2_LOOPS)?;
    for value in [1, 100, 10_000] {
        let before = guest.vcpu().msr(0x10)?.unwrap_or(0);
        launch(&guest, &[pin, exit, (0x482e, value), OPEN])?;
        let after = guest.vcpu().msr(0x10)?.unwrap_or(0);
        equal("exit", (guest.result(0), guest.result(1)), (EXITED, EXIT_TIMER))?;
        let rip = guest.result(GUEST_RIP);
        equal("in the loop", (L2_CODE..L2_CODE + 4).contains(&rip), true)?;
        equal("not too soon", (after >> RATE) - (before >> RATE) >= value, true)?;
    }
    Ok(())
}

fn a_timer_ends_the_run_of_an_l2_that_halts() -> Outcome {
    let (guest, [pin, exit]) = ready(&L2_HALTS)?;
    // Some of them are over before the HLT, which is a long way off for an emulated CPU.
    for value in [100, 100_000, 1_000_000] {
        let before = guest.vcpu().msr(0x10)?.unwrap_or(0);
        launch(&guest, &[pin, exit, (0x482e, value)])?;
        let after = guest.vcpu().msr(0x10)?.unwrap_or(0);
        equal("exit", (guest.result(0), guest.result(1)), (EXITED, EXIT_TIMER))?;
        let rip = guest.result(GUEST_RIP);
        equal("at the HLT or behind it", (L2_CODE..=L2_CODE + 1).contains(&rip), true)?;
        equal("not too soon", (after >> RATE) - (before >> RATE) >= value, true)?;
    }
    equal("behind the HLT", guest.result(GUEST_RIP), L2_CODE + 1)
}

fn what_is_left_is_saved_if_l1_asks() -> Outcome {
    const VALUE: u64 = 100_000_000;
    let (guest, [pin, exit]) = ready(&L2_CPUID)?;
    launch(&guest, &[pin, exit, (0x482e, VALUE)])?;
    expect(&guest, "not saved", EXIT_CPUID, L2_CODE)?;
    equal("as it was", guest.result(LEFT), VALUE)?;
    launch(&guest, &[pin, (0x400c, exit.1 | SAVE), (0x482e, VALUE)])?;
    expect(&guest, "saved", EXIT_CPUID, L2_CODE)?;
    let left = guest.result(LEFT);
    equal("less, but not by much", (VALUE / 2..VALUE).contains(&left), true)?;
    launch(&guest, &[pin, (0x400c, exit.1 | SAVE), (0x482e, 0)])?;
    expect(&guest, "run down", EXIT_TIMER, L2_CODE)?;
    // Stock KVM starts no timer then, and saves what is left of the one before.
    equal("nothing", if is_stock() { 0 } else { guest.result(LEFT) }, 0)
}

fn saving_needs_a_timer() -> Outcome {
    let (guest, [pin, exit]) = ready(&L2_CPUID)?;
    let save = (0x400c, exit.1 | SAVE);
    fails(&guest, "saved, but not there", &[(0x4000, pin.1 & !TIMER), save], 7)
}

fn a_timer_that_was_used_before_ends_nothing() -> Outcome {
    let (guest, [pin, exit]) = ready(&L2_MARKS)?;
    let without: Fields<'_> = &[(0x4000, pin.1 & !TIMER), exit, (0x482e, 0)];
    for fields in [&[pin, exit, (0x482e, 0xffff_ffff)], without] {
        // L2's own mark comes first.
        launch(&guest, fields)?;
        guest.reach_mark()?;
        expect(&guest, "CPUID", EXIT_CPUID, L2_CODE + 2)?;
    }
    Ok(())
}

fn the_deadline_travels() -> Outcome {
    const VALID: u64 = 1 << 32;
    let code = [&[0xe6, 0xf6], &L2_LOOPS[..]].concat();
    let (guest, [pin, exit]) = ready(&code)?;
    launch(&guest, &[pin, exit, (0x482e, 500_000), OPEN])?;
    let saved = Saved::of(&guest)?;
    let state = saved.nested();
    equal("the flag", state.0[3] & VALID, VALID)?;
    for memory_last in [false, true] {
        let other = saved.restored(memory_last)?;
        let again = nested(other.vcpu())?;
        equal("header", &again.0[..5], &state.0[..5])?;
        other.reach_mark()?;
        equal("exit", (other.result(0), other.result(1)), (EXITED, EXIT_TIMER))?;
        let now = other.vcpu().msr(0x10)?.unwrap_or(0) >> RATE;
        equal("not too soon", now >= state.0[4], true)?;
    }
    // One that has run down meanwhile, for which stock KVM waits nearly for ever, and one of a state that says
    // nothing of it.
    let mut saved = saved;
    for flag in [1, 0].into_iter().skip(usize::from(is_stock())) {
        saved.set_nested(&state.with(32, &[0; 8]).with(28, &[flag]));
        let other = saved.restored(false)?;
        other.reach_mark()?;
        equal("exit", (other.result(0), other.result(1)), (EXITED, EXIT_TIMER))?;
    }
    Ok(())
}
