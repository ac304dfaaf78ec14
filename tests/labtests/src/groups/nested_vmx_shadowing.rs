//! A guest's guest that is given VMREAD and VMWRITE: VMCS shadowing, as a hypervisor is offered it.
//!
//! SDM vol. 3C §25.6.15 (the bitmaps), §25.10 (shadow VMCSs), §27.3.1.5 (the link pointer).

use super::nested_vmx::{
    EXIT_CPUID, EXITED, Fields, L2_CODE, ZERO, failure, filled, launch, launched, must, operation,
    told, with,
};
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::{ARGUMENT, FREE, RESULT};
use crate::outcome::{Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx_shadowing":
    a_shadow_vmcs_is_loaded_and_not_entered,
    l2_reads_and_writes_the_shadow_vmcs,
    the_bitmaps_say_which_accesses_exit,
    without_a_link_l2s_accesses_fail,
    an_entry_looks_at_the_link,
);

const SHADOW: u64 = FREE + 0xa000;
const READS: u64 = FREE + 0xb000;
const WRITES: u64 = FREE + 0xc000;
const SHADOWING: u64 = 1 << 14;
const IS_SHADOW: u64 = 1 << 31;

const EXIT_VMREAD: u64 = 23;
const EXIT_VMWRITE: u64 = 25;
const FAILED_ENTRY: u64 = 1 << 31;

/// GUEST_RSP, a field that does not exist, and one that no bitmap covers.
const FIELD: u64 = 0x681c;
const NO_FIELD: u64 = 0x683e;
const BEYOND: u64 = 1 << 15 | FIELD;

/// RESULT of what L1 finds in the shadow VMCS: whether VMPTRLD failed, and the field.
const LOADED: u64 = 8;
const FOUND: u64 = 9;
/// RESULT of L2's.
const WROTE: u64 = 10;
const READ: u64 = 11;
const VALUE: u64 = 12;
const IN_MEMORY: u64 = 13;

guest_code!(
    // For ever: marks, fills a clear VMCS, launches it, tells what became of it, and what the shadow VMCS holds then.
    launches,
    64,
    operation!(),
    "0: out %al, $PORT_MARK",
    "movq $FREE + 0x1000, (%rsp)",
    "vmclear (%rsp)",
    "vmptrld (%rsp)",
    filled!(),
    launched!(0x681e => 24),
    "movq $FREE + 0xa000, (%rsp)",
    "vmptrld (%rsp)",
    "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 64",
    "mov $0x681c, %edx",
    "xor %eax, %eax",
    "vmread %rdx, %rax",
    "mov %rax, RESULT + 72",
    "vmclear (%rsp)",
    "jmp 0b",
);

guest_code!(
    // Writes 0x1234 to the field that the test names, reads it into a register and into memory; CPUID.
    accesses,
    64,
    "mov ARGUMENT, %rdx",
    "mov $0x1234, %eax",
    "vmwrite %rax, %rdx",
    "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 80",
    "xor %eax, %eax",
    "vmread %rdx, %rax",
    "mov %rax, RESULT + 96",
    "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 88",
    "vmread %rdx, RESULT + 104",
    "cpuid",
    "hlt",
);
/// Where VMWRITE and VMREAD begin.
const VMWRITE: u64 = 8 + 5;
const VMREAD: u64 = VMWRITE + 3 + 1 + 1 + 3 + 8 + 2;

guest_code!(
    // For ever: marks, clears and loads the region, tells whether that failed, launches and tells of it.
    loads,
    64,
    operation!(),
    "0: out %al, $PORT_MARK",
    "movq $FREE + 0xa000, (%rsp)",
    "vmclear (%rsp)",
    "vmptrld (%rsp)",
    "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 64",
    "mov $0x681c, %edx",
    "mov $0x77, %eax",
    "vmwrite %rax, %rdx",
    "vmread %rdx, %rax",
    "mov %rax, RESULT + 72",
    "vmlaunch",
    failure!(),
    "jmp 0b",
);

/// A hypervisor that runs this program, has come to its mark, and is offered VMCS shadowing.
fn offered(code: &[u8], l2: &[u8]) -> Outcome<Guest> {
    let guest = with(code, l2)?;
    guest.memory.write(SHADOW, guest.vcpu().msr(0x480)?.unwrap_or(0) & 0x7fff_ffff | IS_SHADOW);
    guest.reach_mark()?;
    if guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 32 & SHADOWING == 0 {
        return skip("no VMCS shadowing in VMX_PROCBASED_CTLS2");
    }
    Ok(guest)
}

/// The fields of an L2 that a shadow VMCS serves.
fn serving(guest: &Guest, link: u64) -> Outcome<[(u64, u64); 5]> {
    let primary = must(guest, 0x482)? | 1 << 31;
    Ok([(0x4002, primary), (0x401e, SHADOWING), (0x2026, READS), (0x2028, WRITES), (0x2800, link)])
}

/// L2 accesses this field.
fn accessed(guest: &Guest, field: u64, fields: Fields<'_>) -> Outcome<u64> {
    guest.memory.write(ARGUMENT, field);
    for slot in [LOADED, FOUND, WROTE, READ, VALUE, IN_MEMORY] {
        guest.memory.write(RESULT + 8 * slot, u64::MAX);
    }
    launch(guest, fields)?;
    equal("an exit", guest.result(0), EXITED)?;
    Ok(guest.result(1))
}

fn a_shadow_vmcs_is_loaded_and_not_entered() -> Outcome {
    let guest = offered(loads(), &[])?;
    guest.reach_mark()?;
    equal("VMPTRLD", guest.result(LOADED), 0)?;
    equal("a field", guest.result(FOUND), 0x77)?;
    // VMfailInvalid.
    equal("VMLAUNCH", guest.result(0), 1)
}

fn l2_reads_and_writes_the_shadow_vmcs() -> Outcome {
    let guest = offered(launches(), accesses())?;
    let fields = serving(&guest, SHADOW)?;
    equal("exit", accessed(&guest, FIELD, &fields)?, EXIT_CPUID)?;
    equal("flags", (guest.result(WROTE), guest.result(READ)), (0, 0))?;
    equal("VMREAD", guest.result(VALUE), 0x1234)?;
    equal("VMREAD into memory", guest.result(IN_MEMORY), 0x1234)?;
    equal("VMPTRLD by L1", guest.result(LOADED), 0)?;
    equal("what L1 finds there", guest.result(FOUND), 0x1234)?;
    equal("exit", accessed(&guest, NO_FIELD, &fields)?, EXIT_CPUID)?;
    equal("no such field", (guest.result(WROTE), guest.result(READ)), (ZERO, ZERO))?;
    equal("what L1 finds there", guest.result(FOUND), 0x1234)
}

fn the_bitmaps_say_which_accesses_exit() -> Outcome {
    let guest = offered(launches(), accesses())?;
    let fields = serving(&guest, SHADOW)?;
    let bit = |page: u64, on: u64| guest.memory.write(page + FIELD / 64 * 8, on << (FIELD % 64));
    bit(READS, 1);
    equal("VMREAD exits", accessed(&guest, FIELD, &fields)?, EXIT_VMREAD)?;
    equal("RIP", guest.result(3), L2_CODE + VMREAD)?;
    equal("VMWRITE did not", guest.result(FOUND), 0x1234)?;
    bit(WRITES, 1);
    equal("VMWRITE exits", accessed(&guest, FIELD, &fields)?, EXIT_VMWRITE)?;
    equal("RIP", guest.result(3), L2_CODE + VMWRITE)?;
    bit(READS, 0);
    bit(WRITES, 0);
    equal("a field beyond", accessed(&guest, BEYOND, &fields)?, EXIT_VMWRITE)?;
    let [primary, ..] = fields;
    let without = [primary, (0x401e, 0)];
    equal("no shadowing", accessed(&guest, FIELD, &without)?, EXIT_VMWRITE)
}

fn without_a_link_l2s_accesses_fail() -> Outcome {
    let guest = offered(launches(), accesses())?;
    let fields = serving(&guest, u64::MAX)?;
    equal("exit", accessed(&guest, FIELD, &fields)?, EXIT_CPUID)?;
    equal("VMfailInvalid", (guest.result(WROTE), guest.result(READ)), (1, 1))
}

fn an_entry_looks_at_the_link() -> Outcome {
    let guest = offered(launches(), accesses())?;
    let fields = serving(&guest, SHADOW)?;
    let bad_link = |fields: Fields<'_>, what: &str| -> Outcome {
        launch(&guest, fields)?;
        equal(what, (guest.result(0), guest.result(1)), (EXITED, FAILED_ENTRY | 33))?;
        equal("qualification", guest.result(2), 4)
    };
    let [primary, .., link] = fields;
    bad_link(&[primary, (0x401e, 0), link], "a shadow VMCS without shadowing")?;
    bad_link(&serving(&guest, FREE + 0x1000)?, "the VMCS itself")?;
    bad_link(&serving(&guest, FREE + 0x2000)?, "a page of zeroes")?;
    bad_link(&serving(&guest, SHADOW + 8)?, "no page")?;
    equal("exit", accessed(&guest, FIELD, &fields)?, EXIT_CPUID)
}
