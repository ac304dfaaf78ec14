//! A guest that gives its own guest nested paging (NPT): what its tables say holds for that one.

use crate::kvm::exit::Exit;
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::{FREE, NOWHERE, PORT_MARK, ROOT};
use crate::oracle::is_stock;
use crate::outcome::{Outcome, equal, fail, skip};
use crate::runner::tests;

use super::nested_svm::{BLOCK, EXIT_CPUID, EXIT_INVALID, L2_CODE, L2_CPUID, RIP, program, with};

tests!("nested_npt":
    l2_runs_on_tables_of_l1,
    l2_runs_the_code_that_its_tables_lead_to,
    what_l1_does_not_map_is_told_to_l1,
    accessed_and_dirty_bits_are_set_in_the_tables_of_l1,
    changed_tables_count_after_a_flush,
    an_emulated_access_goes_through_both_translations,
    an_emulated_access_that_l1_does_not_map_is_told_to_l1,
    a_device_of_l1_is_reached_through_its_tables,
    a_root_that_is_no_address_is_refused,
    an_l1_in_pae_paging_has_tables_of_that_mode,
    an_l1_without_pae_has_none,
);

const EXIT_NPF: u64 = 0x400;
const NPF_FINAL: u64 = 1 << 32;
const NPF_TABLE: u64 = 1 << 33;
const NP_CTL: u64 = 0x90;
const NCR3: u64 = 0xb0;
const TLB_CTL: u64 = 0x58;
const EXIT_INFO_1: u64 = 0x78;
const EXIT_INFO_2: u64 = 0x80;

/// The tables: root, two levels, and the leaves of the first 2 MiB.
const TABLES: u64 = FREE + 0x1_0000;
const LEAVES: u64 = TABLES + 0x3000;
/// A page of data, and one that addresses are led to.
const DATA: u64 = FREE + 0x2_1000;
const OTHER: u64 = FREE + 0x2_2000;
const ALL_RIGHTS: u64 = 7;

/// A guest whose hypervisor has run once, on tables that lead each address to itself.
pub(super) fn prepared(l2: &[u8]) -> Outcome<Guest> {
    let guest = with(program(), l2)?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if cpuid.find(0x8000_000a, 0).is_none_or(|entry| entry.edx & 1 == 0) {
        return skip("no nested paging in KVM_GET_SUPPORTED_CPUID");
    }
    guest.reach_mark()?;
    for level in 0..3 {
        guest.memory.write(TABLES + level * 0x1000, (TABLES + (level + 1) * 0x1000) | ALL_RIGHTS);
    }
    for page in 0..512 {
        guest.memory.write(LEAVES + page * 8, page << 12 | ALL_RIGHTS);
    }
    guest.memory.write(BLOCK + NP_CTL, 1);
    guest.memory.write(BLOCK + NCR3, TABLES);
    Ok(guest)
}

/// Skips where the test rewrites tables that are in use.
fn rewrites_tables() -> Outcome {
    // The VMM does it here. Stock KVM hears of a guest's own stores only, and keeps what it had.
    if is_stock() {
        return skip("stock KVM does not see what a VMM writes to NPT tables in use");
    }
    Ok(())
}

/// Where the leaf of an address is.
const fn leaf(address: u64) -> u64 {
    LEAVES + (address >> 12) * 8
}

/// VMRUN with a flush of everything.
fn flush(guest: &Guest) {
    guest.memory.write(BLOCK + TLB_CTL, 1 | 1 << 32);
}

fn told(guest: &Guest) -> (u64, u64, u64) {
    let word = |at| guest.memory.read(BLOCK + at);
    (guest.result(0), word(EXIT_INFO_1), word(EXIT_INFO_2))
}

fn l2_runs_on_tables_of_l1() -> Outcome {
    let guest = prepared(&L2_CPUID)?;
    for round in 0..6 {
        if round % 2 == 0 {
            flush(&guest);
        }
        guest.reach_mark()?;
        equal("exit code", guest.result(0), EXIT_CPUID)?;
        equal("RIP", guest.memory.read(BLOCK + RIP), L2_CODE)?;
    }
    Ok(())
}

fn l2_runs_the_code_that_its_tables_lead_to() -> Outcome {
    // HLT where the address leads in L1's memory, CPUID where it leads by the tables.
    let guest = prepared(&[0xf4; 8])?;
    guest.memory.write_bytes(OTHER, &L2_CPUID);
    guest.memory.write(leaf(L2_CODE), OTHER | ALL_RIGHTS);
    flush(&guest);
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_CPUID)
}

/// Loads from `DATA`, then stores there, then CPUID.
fn touches() -> Vec<u8> {
    let mut code = vec![0x48, 0x8b, 0x04, 0x25];
    code.extend_from_slice(&(DATA as u32 + 8).to_le_bytes());
    code.extend_from_slice(&[0x48, 0x89, 0x04, 0x25]);
    code.extend_from_slice(&(DATA as u32 + 16).to_le_bytes());
    code.extend_from_slice(&L2_CPUID);
    code
}

fn what_l1_does_not_map_is_told_to_l1() -> Outcome {
    rewrites_tables()?;
    let guest = prepared(&touches())?;
    guest.memory.write(leaf(DATA), 0);
    flush(&guest);
    guest.reach_mark()?;
    equal("a load that is not mapped", told(&guest), (EXIT_NPF, NPF_FINAL | 4, DATA + 8))?;
    equal("RIP", guest.memory.read(BLOCK + RIP), L2_CODE)?;
    guest.memory.write(leaf(DATA), DATA | 5);
    guest.reach_mark()?;
    equal("a store that is not allowed", told(&guest), (EXIT_NPF, NPF_FINAL | 7, DATA + 16))?;
    equal("RIP", guest.memory.read(BLOCK + RIP), L2_CODE + 8)?;
    guest.memory.write(leaf(DATA), DATA | ALL_RIGHTS);
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_CPUID)?;
    // L2's own tables.
    guest.memory.write(leaf(ROOT), 0);
    guest.memory.write(BLOCK + RIP, L2_CODE);
    flush(&guest);
    guest.reach_mark()?;
    let (code, info, at) = told(&guest);
    equal("exit code", (code, at & !0xfff), (EXIT_NPF, ROOT))?;
    equal("on a table", info & (NPF_TABLE | NPF_FINAL), NPF_TABLE)
}

fn accessed_and_dirty_bits_are_set_in_the_tables_of_l1() -> Outcome {
    const ACCESSED: u64 = 1 << 5;
    const DIRTY: u64 = 1 << 6;
    let guest = prepared(&touches())?;
    flush(&guest);
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_CPUID)?;
    let bits = |at| guest.memory.read(at) & (ACCESSED | DIRTY);
    equal("a page that is written", bits(leaf(DATA)), ACCESSED | DIRTY)?;
    equal("a page that is fetched", bits(leaf(L2_CODE)), ACCESSED)?;
    equal("a page that is not touched", bits(leaf(OTHER)), 0)?;
    equal("a table", bits(TABLES), ACCESSED)
}

fn changed_tables_count_after_a_flush() -> Outcome {
    rewrites_tables()?;
    let guest = prepared(&touches())?;
    guest.memory.write(DATA + 8, 0x1111);
    guest.memory.write(OTHER + 8, 0x2222);
    for (to, value) in [(DATA, 0x1111), (OTHER, 0x2222), (DATA, 0x1111)] {
        guest.memory.write(leaf(DATA), to | ALL_RIGHTS);
        guest.memory.write(BLOCK + RIP, L2_CODE);
        flush(&guest);
        guest.reach_mark()?;
        equal("exit code", guest.result(0), EXIT_CPUID)?;
        equal("what was stored", guest.memory.read(to + 16), value)?;
        guest.memory.write(to + 16, 0);
    }
    Ok(())
}

/// RSI = DATA, RCX = 2; REP OUTSB to the port of marks; CPUID.
fn writes_a_string() -> Vec<u8> {
    let mut code = vec![0xbe];
    code.extend_from_slice(&(DATA as u32).to_le_bytes());
    code.extend_from_slice(&[0xb9, 2, 0, 0, 0, 0x66, 0xba, PORT_MARK as u8, 0, 0xfc, 0xf3, 0x6e]);
    code.extend_from_slice(&L2_CPUID);
    code
}

fn an_emulated_access_goes_through_both_translations() -> Outcome {
    let guest = prepared(&writes_a_string())?;
    guest.memory.write(DATA, 0x1111);
    guest.memory.write(OTHER, 0x6655);
    guest.memory.write(leaf(DATA), OTHER | ALL_RIGHTS);
    flush(&guest);
    let mut bytes = Vec::new();
    while bytes.len() < 2 {
        match guest.exit()? {
            Exit::Io { write: true, port: PORT_MARK, data, .. } => bytes.extend_from_slice(&data),
            exit => return fail(format!("{exit:?}")),
        }
    }
    equal("bytes", bytes, vec![0x55, 0x66])?;
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_CPUID)
}

fn an_emulated_access_that_l1_does_not_map_is_told_to_l1() -> Outcome {
    let guest = prepared(&writes_a_string())?;
    guest.memory.write(leaf(DATA), 0);
    flush(&guest);
    guest.reach_mark()?;
    let (code, info, at) = told(&guest);
    equal("exit", (code, at), (EXIT_NPF, DATA))?;
    equal("a read that is not mapped", info & 0xff, 4)
}

fn a_device_of_l1_is_reached_through_its_tables() -> Outcome {
    let guest = prepared(&touches())?;
    guest.memory.write(leaf(DATA), NOWHERE | ALL_RIGHTS);
    flush(&guest);
    let load = guest.exit()?;
    let Exit::Mmio { write: false, address, len: 8, .. } = load else {
        return fail(format!("{load:?}"));
    };
    equal("loaded from", address, NOWHERE + 8)?;
    guest.vcpu().answer(&0x77_u64.to_le_bytes());
    equal("stored to", guest.exit()?, Exit::mmio(true, NOWHERE + 16, &0x77_u64.to_le_bytes()))?;
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_CPUID)
}

fn a_root_that_is_no_address_is_refused() -> Outcome {
    let guest = prepared(&L2_CPUID)?;
    if is_stock() {
        return skip("stock KVM runs it, and shuts L1 down");
    }
    guest.memory.write(BLOCK + NCR3, 1 << 60);
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_INVALID)
}

guest_code!(
    // By 32-bit code, for ever: marks, runs the block, keeps the exit code.
    runs_blocks_outside_long_mode,
    32,
    "0: out %al, $PORT_MARK",
    "movl $0x55, RESULT",
    "mov $FREE, %eax",
    "vmrun",
    "mov FREE + 0x70, %eax",
    "mov %eax, RESULT",
    "jmp 0b",
);

/// L1's code outside of long mode, and its own tables: PDPTEs and a page directory; without PAE the directory alone.
const CODE_32: u64 = FREE + 0xc000;
const PDPTES_OF_L1: u64 = FREE + 0xd000;
const DIRECTORY_OF_L1: u64 = FREE + 0xe000;
/// The PDPTEs of its tables for L2, the last ones of their page.
const PDPTES: u64 = FREE + 0xf000 + 0xfe0;

/// L1 leaves long mode. `pae`: for PAE paging, else for 32-bit paging.
fn leave_long_mode(guest: &Guest, pae: bool) -> Outcome {
    const SVME: u64 = 1 << 12;
    const PSE_OR_PAE: u64 = 1 << 4 | 1 << 5;
    guest.memory.write_bytes(CODE_32, runs_blocks_outside_long_mode());
    guest.memory.write(PDPTES_OF_L1, DIRECTORY_OF_L1 | 1);
    // A page of 2 MiB, or of 4: all of the guest's memory.
    guest.memory.write(DIRECTORY_OF_L1, 0x83);
    let vcpu = guest.vcpu();
    let mut sregs = vcpu.sregs()?;
    sregs.efer = SVME;
    sregs.cr4 = if pae { PSE_OR_PAE } else { 1 << 4 };
    sregs.cr3 = if pae { PDPTES_OF_L1 } else { DIRECTORY_OF_L1 };
    (sregs.cs.l, sregs.cs.db) = (0, 1);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.regs()?;
    regs.rip = CODE_32;
    vcpu.set_regs(&regs)
}

fn an_l1_in_pae_paging_has_tables_of_that_mode() -> Outcome {
    let guest = prepared(&touches())?;
    if is_stock() {
        return skip("stock KVM 6.12 shuts the guest down");
    }
    guest.memory.write(PDPTES, (TABLES + 0x2000) | 1);
    guest.memory.write(BLOCK + NCR3, PDPTES);
    // What L2 stores shows where it was led.
    guest.memory.write(DATA + 8, 0x1111);
    guest.memory.write(OTHER + 8, 0x2222);
    guest.memory.write(leaf(DATA), OTHER | ALL_RIGHTS);
    flush(&guest);
    leave_long_mode(&guest, true)?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    equal("exit code", guest.result(0) as u32, EXIT_CPUID as u32)?;
    equal("what was stored", guest.memory.read(OTHER + 16), 0x2222)?;
    equal("not there", guest.memory.read(DATA + 16), 0)
}

fn an_l1_without_pae_has_none() -> Outcome {
    let guest = prepared(&L2_CPUID)?;
    if is_stock() {
        return skip("stock KVM serves tables of 32-bit paging, too");
    }
    leave_long_mode(&guest, false)?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    equal("exit code", guest.result(0) as u32, EXIT_INVALID as u32)
}
