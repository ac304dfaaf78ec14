//! A debugger in user space, beside a guest that runs a guest of its own (KVM API §4.87).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::guest::Guest;
use crate::oracle::is_stock;
use crate::outcome::{Answer, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

use super::{
    nested_state::{computes, hypervisor, is_amd, rewind},
    nested_svm::L2_CODE,
};

tests!("nested_debugger":
    a_breakpoint_of_the_vmm_stops_l2,
    a_breakpoint_of_the_vmm_stops_l1_behind_an_exit,
    single_steps_go_from_level_to_level,
);

/// DR7 with DR0 as a breakpoint for execution.
const EXECUTION: u64 = 0x402;

fn debug(guest: &Guest, control: u32, breakpoint: u64) -> Outcome {
    let mut debug = kvm_guest_debug { control, ..Default::default() };
    debug.arch.debugreg[0] = breakpoint;
    debug.arch.debugreg[7] = if breakpoint != 0 { EXECUTION } else { 0x400 };
    guest.vcpu().send(ioctl::SET_GUEST_DEBUG, &debug).granted("KVM_SET_GUEST_DEBUG").map(drop)
}

const BREAKPOINT: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
const STEP: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;

fn stops(guest: &Guest) -> Outcome<u64> {
    match guest.exit()? {
        Exit::Debug { exception: 1, pc, .. } => Ok(pc),
        other => fail(format!("expected the debugger's stop got {other:x?}")),
    }
}

/// L1 at its mark, behind a first run of L2.
fn at_the_mark() -> Outcome<Guest> {
    let guest = hypervisor()?;
    computes(&guest, 1)?;
    rewind(&guest);
    Ok(guest)
}

fn a_breakpoint_of_the_vmm_stops_l2() -> Outcome {
    if is_stock() && is_amd() {
        return skip("stock KVM loses the VMM's DR7 at VMRUN");
    }
    let guest = at_the_mark()?;
    debug(&guest, BREAKPOINT, L2_CODE)?;
    equal("where it stopped", stops(&guest)?, L2_CODE)?;
    debug(&guest, 0, 0)?;
    computes(&guest, 1)
}

fn a_breakpoint_of_the_vmm_stops_l1_behind_an_exit() -> Outcome {
    if is_stock() {
        return skip("stock KVM loses the VMM's DR7 at an exit of L2");
    }
    let guest = at_the_mark()?;
    // L1's mark, which it comes to again when L2 has left.
    let before = guest.vcpu().regs()?.rip;
    guest.reach_mark()?;
    debug(&guest, BREAKPOINT, before)?;
    for number in 2..=10 {
        guest.reach_mark()?;
        equal("the sum", guest.result(8), number * (number + 1) / 2)?;
    }
    equal("where it stopped", stops(&guest)?, before)?;
    debug(&guest, 0, 0)?;
    guest.reach_mark()?;
    rewind(&guest);
    computes(&guest, 1)
}

fn single_steps_go_from_level_to_level() -> Outcome {
    if !is_amd() {
        return skip("the emulated CPU gives no single step behind an entry");
    }
    if is_stock() {
        return skip("stock KVM loses the VMM's step at VMRUN");
    }
    let guest = at_the_mark()?;
    let l1 = guest.vcpu().regs()?.rip;
    debug(&guest, STEP, 0)?;
    let (mut of_l1, mut of_l2) = (0, 0);
    while of_l2 < 3 {
        let pc = stops(&guest)?;
        if (L2_CODE..L2_CODE + 64).contains(&pc) {
            of_l2 += 1;
        } else {
            holds("L1's code", pc > l1 && pc < l1 + 64, pc)?;
            of_l1 += 1;
        }
        holds("steps", of_l1 < 20, of_l1)?;
    }
    debug(&guest, 0, 0)?;
    computes(&guest, 1)
}
