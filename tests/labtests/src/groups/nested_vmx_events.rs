//! What a guest that runs a guest by VMX hears of instructions that its own hypervisor carries out.

use super::nested_vmx::{EXITED, L2_CODE, launch, must, program, with};
use crate::machine::guest::Guest;
use crate::machine::layout::FREE;
use crate::outcome::{Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx_events":
    each_instruction_traps_whoever_carries_it_out,
);

/// A page of zeroes: under it no MSR exits to L1.
const NO_MSR: u64 = FREE + 0x2000;
const GUEST_RIP: u64 = 3;

/// RDMSR of IA32_MISC_ENABLE, whose reads exit to whoever is below; then CPUID, which exits to L1.
const READS: [u8; 9] = [0xb9, 0xa0, 0x01, 0, 0, 0x0f, 0x32, 0x0f, 0xa2];

/// SDM vol. 3C §26.5.2: a monitor-trap exit behind each instruction, be it executed by the CPU or by L0.
fn each_instruction_traps_whoever_carries_it_out() -> Outcome {
    const MONITOR_TRAP: u64 = 37;
    let guest: Guest = with(program(), &READS)?;
    guest.reach_mark()?;
    let wanted = 1 << 27 | 1 << 28;
    let may = guest.vcpu().msr(0x482)?.unwrap_or(0) >> 32;
    if may & wanted != wanted {
        return skip("no monitor trap flag on this CPU");
    }
    let primary = must(&guest, 0x482)? | wanted;
    for (at, behind) in [(0, 5), (5, 7)] {
        launch(&guest, &[(0x4002, primary), (0x2004, NO_MSR), (0x681e, L2_CODE + at)])?;
        equal("an exit", (guest.result(0), guest.result(1)), (EXITED, MONITOR_TRAP))?;
        equal("behind one instruction", guest.result(GUEST_RIP), L2_CODE + behind)?;
    }
    Ok(())
}
