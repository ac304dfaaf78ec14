//! Lists of MSRs that an entry of L2 loads, and that its exit stores and loads (SDM vol. 3C §27.4, §28.4, §28.6).

use super::nested_vmx::{EXIT_CPUID, EXITED, L2_CPUID, launch, launch_good, must, program, with};
use crate::machine::guest::Guest;
use crate::machine::layout::FREE;
use crate::oracle::is_stock;
use crate::outcome::{Outcome, equal, holds};
use crate::runner::tests;

tests!("nested_vmx_lists":
    the_tsc_in_a_list_is_l1s,
    lists_may_be_as_long_as_the_cpu_says,
    a_list_fails_the_entry_at_its_bad_entry,
    what_a_list_loads_l2_has,
    a_list_names_any_msr_that_l1_writes,
    lists_are_done_in_their_order,
);

/// Three lists, 8 KiB each.
const LOADED: u64 = FREE + 0x1_0000;
const STORED: u64 = FREE + 0x1_2000;
const HOST: u64 = FREE + 0x1_4000;

const TSC: u64 = 0x10;
const SYSENTER_EIP: u64 = 0x176;
const KERNEL_GS_BASE: u64 = 0xc000_0102;
const FS_BASE: u64 = 0xc000_0100;

const FAILED_IN_A_LIST: u64 = 1 << 31 | 34;
const QUALIFICATION: u64 = 2;

/// Writes the entries of a list.
fn put(guest: &Guest, at: u64, list: &[(u64, u64)]) {
    for (slot, (msr, value)) in (at..).step_by(16).zip(list) {
        guest.memory.write(slot, *msr);
        guest.memory.write(slot + 8, *value);
    }
}

/// The fields that name the three lists, with so many entries.
const fn lists(load: u64, store: u64, host: u64) -> [(u64, u64); 6] {
    [
        (0x4014, load),
        (0x200a, LOADED),
        (0x400e, store),
        (0x2006, STORED),
        (0x4010, host),
        (0x2008, HOST),
    ]
}

fn exits(guest: &Guest, fields: &[(u64, u64)]) -> Outcome {
    launch(guest, fields)?;
    equal("exits", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))
}

fn the_tsc_in_a_list_is_l1s() -> Outcome {
    const OFFSETS: u64 = 1 << 3;
    const ENTRY: u64 = 1 << 50;
    const EXIT: u64 = 1 << 52;
    const SOON: u64 = 1 << 38;
    let guest = with(program(), &L2_CPUID)?;
    guest.reach_mark()?;
    put(&guest, LOADED, &[(TSC, ENTRY)]);
    put(&guest, STORED, &[(TSC, 0)]);
    put(&guest, HOST, &[(TSC, EXIT)]);
    let controls = must(&guest, 0x482)? | OFFSETS;
    let mut fields = lists(1, 1, 1).to_vec();
    fields.extend([(0x4002, controls), (0x2010, 1 << 40)]);
    exits(&guest, &fields)?;
    let stored = guest.memory.read(STORED + 8);
    // Stock KVM has the CPU store it, and Bochs stores what L2 reads, which KVM adds L1's offset to once more.
    if !is_stock() {
        holds("the TSC that was loaded goes on", (ENTRY..ENTRY + SOON).contains(&stored), stored)?;
    }
    let now = guest.vcpu().msr(TSC as u32)?.unwrap_or(0);
    holds("the TSC of L1 is the one that was loaded last", (EXIT..EXIT + SOON).contains(&now), now)
}

fn lists_may_be_as_long_as_the_cpu_says() -> Outcome {
    const MOST: u64 = 512;
    let guest = with(program(), &L2_CPUID)?;
    guest.reach_mark()?;
    for at in [LOADED, STORED, HOST] {
        put(&guest, at, &[(TSC, 1 << 40); MOST as usize]);
    }
    exits(&guest, &lists(MOST, MOST, MOST))?;
    launch_good(&guest)
}

fn a_list_fails_the_entry_at_its_bad_entry() -> Outcome {
    let guest = with(program(), &L2_CPUID)?;
    guest.reach_mark()?;
    for (bad, number) in
        [((FS_BASE, 0), 2), ((0x8b, 0), 2), ((TSC | 1 << 32, 0), 2), ((0x9b, 0), 2)]
    {
        put(&guest, LOADED, &[(KERNEL_GS_BASE, 0x1234), bad]);
        launch(&guest, &lists(2, 0, 0))?;
        let found = (guest.result(0), guest.result(1), guest.result(QUALIFICATION));
        equal("fails", found, (EXITED, FAILED_IN_A_LIST, number))?;
        launch_good(&guest)?;
    }
    Ok(())
}

fn what_a_list_loads_l2_has() -> Outcome {
    let guest = with(program(), &L2_CPUID)?;
    guest.reach_mark()?;
    put(&guest, LOADED, &[(SYSENTER_EIP, 0x4321), (KERNEL_GS_BASE, 0x1234)]);
    put(&guest, STORED, &[(SYSENTER_EIP, 0), (KERNEL_GS_BASE, 0)]);
    put(&guest, HOST, &[(KERNEL_GS_BASE, 0x5678)]);
    exits(&guest, &lists(2, 2, 1))?;
    let found = (guest.memory.read(STORED + 8), guest.memory.read(STORED + 24));
    equal("what L2 has left", found, (0x4321, 0x1234))?;
    equal("what L1 has", guest.vcpu().msr(KERNEL_GS_BASE as u32)?, Some(0x5678))
}

/// TSC_ADJUST moves the TSC that was there before, and not the one that is loaded behind it. An exit loads what it has stored,
/// where both lists lie in one place.
fn lists_are_done_in_their_order() -> Outcome {
    const TSC_ADJUST: u64 = 0x3b;
    const MTRR_DEF_TYPE: u64 = 0x2ff;
    const OF_L2: u64 = 0xc06;
    const EXIT: u64 = 1 << 52;
    const SOON: u64 = 1 << 38;
    let guest = with(program(), &L2_CPUID)?;
    guest.reach_mark()?;
    put(&guest, HOST, &[(TSC_ADJUST, 1 << 40), (TSC, EXIT)]);
    exits(&guest, &lists(0, 0, 2))?;
    let now = guest.vcpu().msr(TSC as u32)?.unwrap_or(0);
    holds("the TSC that was loaded last", (EXIT..EXIT + SOON).contains(&now), now)?;
    put(&guest, LOADED, &[(MTRR_DEF_TYPE, OF_L2)]);
    put(&guest, STORED, &[(MTRR_DEF_TYPE, 0x806)]);
    let mut fields = lists(1, 1, 1).to_vec();
    fields.push((0x2008, STORED));
    exits(&guest, &fields)?;
    equal("what was stored", guest.vcpu().msr(MTRR_DEF_TYPE as u32)?, Some(OF_L2))
}

/// MTRRs, which are the vCPU's: an entry loads one, an exit stores what L2 has of it and gives L1 another. What WRMSR of L1's
/// refuses fails the entry.
fn a_list_names_any_msr_that_l1_writes() -> Outcome {
    const MTRR_DEF_TYPE: u64 = 0x2ff;
    const OF_L2: u64 = 0xc06;
    const OF_L1: u64 = 0x806;
    let guest = with(program(), &L2_CPUID)?;
    guest.reach_mark()?;
    put(&guest, LOADED, &[(KERNEL_GS_BASE, 0x1234), (MTRR_DEF_TYPE, OF_L2)]);
    put(&guest, STORED, &[(MTRR_DEF_TYPE, 0)]);
    put(&guest, HOST, &[(MTRR_DEF_TYPE, OF_L1)]);
    exits(&guest, &lists(2, 1, 1))?;
    equal("what L2 has left", guest.memory.read(STORED + 8), OF_L2)?;
    equal("what L1 has", guest.vcpu().msr(MTRR_DEF_TYPE as u32)?, Some(OF_L1))?;
    for bad in [(MTRR_DEF_TYPE, 2), (0x1234_5678, 0)] {
        put(&guest, LOADED, &[(KERNEL_GS_BASE, 0x1234), bad]);
        launch(&guest, &lists(2, 0, 0))?;
        let found = (guest.result(0), guest.result(1), guest.result(QUALIFICATION));
        equal("fails", found, (EXITED, FAILED_IN_A_LIST, 2))?;
        launch_good(&guest)?;
    }
    Ok(())
}
