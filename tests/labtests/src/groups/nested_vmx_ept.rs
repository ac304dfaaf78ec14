//! A guest that runs a guest of its own by VMX with EPT tables of its own.
//!
//! SDM vol. 3C §29.3 (EPT), table 28-7 (the qualification of an EPT violation), §31.3 (INVEPT, INVVPID).

use super::nested_vmx::{
    EXIT_CPUID, EXITED, FIELDS, Fields, L2_CODE, L2_CPUID, ZERO, fails, failure, filled, launch,
    launched, must, operation, set_fields, told, with,
};
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::{ARGUMENT, FREE};
use crate::outcome::{Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx_ept":
    l2_runs_on_tables_of_its_hypervisor,
    what_those_tables_refuse_is_the_hypervisors,
    a_bad_ept_pointer_fails_the_instruction,
    invept_and_invvpid_refuse_what_the_manual_refuses,
);

/// The tables that lead from L2's physical addresses to L1's, one of each level, and the pointer to them.
const TOP: u64 = FREE + 0xa000;
const POINTERS: u64 = FREE + 0xb000;
const DIRECTORY: u64 = FREE + 0xc000;
pub(super) const TABLE: u64 = FREE + 0xd000;
const EPT_POINTER: u64 = TOP | 0x1e;
/// The address of an entry and its value.
const CHANGE: u64 = FIELDS + 0xf00;
/// Everything is allowed; memory is write-back.
const LEAF: u64 = 0x37;
const VIOLATION: u64 = 48;
const MISCONFIGURATION: u64 = 49;

guest_code!(
    // For ever: marks, writes the entry that the test wants, forgets all translations by EPT, launches, tells of the exit.
    launches,
    64,
    operation!(),
    "0: out %al, $PORT_MARK",
    "mov FREE + 0x3f00, %rdx",
    "mov FREE + 0x3f08, %rax",
    "test %rdx, %rdx",
    "jz 1f",
    "mov %rax, (%rdx)",
    "1: movq $0, 8(%rsp)",
    "movq $0, 16(%rsp)",
    "mov $2, %eax",
    "invept 8(%rsp), %rax",
    "movq $FREE + 0x1000, (%rsp)",
    "vmclear (%rsp)",
    "vmptrld (%rsp)",
    filled!(),
    launched!(0x2400 => 24, 0x640a => 32),
    "jmp 0b",
);

/// The program that forgets all translations and launches, for ever.
pub(super) fn program() -> &'static [u8] {
    launches()
}

/// A hypervisor with such tables, before it launches.
pub(super) fn ready(l2: &[u8]) -> Outcome<Guest> {
    let (guest, fields) = prepared(launches())?;
    guest.memory.write_bytes(L2_CODE, l2);
    set_fields(&guest, &fields);
    Ok(guest)
}

/// A hypervisor whose tables map all of its memory where it is, and the fields with which it launches.
pub(super) fn prepared(code: &[u8]) -> Outcome<(Guest, [(u64, u64); 3])> {
    let guest = with(code, &L2_CPUID)?;
    // Secondary controls, and EPT among them.
    let secondary = guest.vcpu().msr(0x48b)?.unwrap_or(0);
    if secondary >> 33 & 1 == 0 {
        return skip("no EPT for hypervisors in the guest");
    }
    guest.memory.write(TOP, POINTERS | 7);
    guest.memory.write(POINTERS, DIRECTORY | 7);
    guest.memory.write(DIRECTORY, TABLE | 7);
    for page in 0..512 {
        guest.memory.write(TABLE + 8 * page, page << 12 | LEAF);
    }
    let primary = must(&guest, 0x482)? | 1 << 31;
    guest.reach_mark()?;
    Ok((guest, [(0x4002, primary), (0x401e, 2), (0x201a, EPT_POINTER)]))
}

/// Has L1 write an entry before it launches: what a VMM writes no hypervisor below has to see.
fn change(guest: &Guest, entry: u64, value: u64) {
    guest.memory.write(CHANGE, entry);
    guest.memory.write(CHANGE + 8, value);
}

fn runs(guest: &Guest, fields: Fields<'_>) -> Outcome {
    launch(guest, fields)?;
    equal("exit", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))
}

fn l2_runs_on_tables_of_its_hypervisor() -> Outcome {
    let (guest, fields) = prepared(launches())?;
    runs(&guest, &fields)?;
    // A large page, and small ones again.
    change(&guest, DIRECTORY, LEAF | 1 << 7);
    runs(&guest, &fields)?;
    change(&guest, DIRECTORY, TABLE | 7);
    runs(&guest, &fields)?;
    // The page of L2's code is another of L1's, where CPUID comes later.
    let other = FREE + 0xe000;
    guest.memory.write_bytes(other, &[0x90, 0x0f, 0xa2, 0xf4]);
    change(&guest, TABLE + (L2_CODE >> 12) * 8, other | LEAF);
    runs(&guest, &fields)
}

fn what_those_tables_refuse_is_the_hypervisors() -> Outcome {
    let (guest, fields) = prepared(launches())?;
    let entry = TABLE + (L2_CODE >> 12) * 8;
    let good = L2_CODE | LEAF;
    // A fetch, by a linear address, of the page itself.
    let fetch = 0x184;
    let cases = [
        ("absent", 0, VIOLATION, fetch),
        ("read-only", good & !6, VIOLATION, fetch | 1 << 3),
        ("readable and writable", good & !4, VIOLATION, fetch | 3 << 3),
        ("writable and not readable", good & !1, MISCONFIGURATION, 0),
        ("no memory type", good & !0x38 | 2 << 3, MISCONFIGURATION, 0),
    ];
    for (what, value, reason, qualification) in cases {
        change(&guest, entry, value);
        launch(&guest, &fields)?;
        equal(what, (guest.result(0), guest.result(1)), (EXITED, reason))?;
        equal("address", guest.result(3) & !0xfff, L2_CODE)?;
        if reason == VIOLATION {
            // Not told here: whether NMIs are unblocked, and bits that need features.
            equal(what, guest.result(2) & 0x1bf, qualification)?;
            equal("linear address", guest.result(4), L2_CODE)?;
        }
        change(&guest, entry, good);
        runs(&guest, &fields)?;
    }
    // A table of L2's own, which the processor walks.
    let root = guest.vcpu().sregs()?.cr3;
    let of_root = TABLE + (root >> 12) * 8;
    change(&guest, of_root, 0);
    launch(&guest, &fields)?;
    equal("the root", (guest.result(0), guest.result(1)), (EXITED, VIOLATION))?;
    equal("not the page itself", guest.result(2) & 0x180, 0x80)?;
    change(&guest, of_root, root & !0xfff | LEAF);
    runs(&guest, &fields)
}

fn a_bad_ept_pointer_fails_the_instruction() -> Outcome {
    let (guest, fields) = prepared(launches())?;
    let [primary, secondary, _] = fields;
    let cases = [
        ("memory type", TOP | 0x19),
        ("three levels", TOP | 0x16),
        ("a reserved bit", EPT_POINTER | 1 << 8),
        ("beyond physical addresses", 1 << 60 | 0x1e),
    ];
    for (what, pointer) in cases {
        fails(&guest, what, &[primary, secondary, (0x201a, pointer)], 7)?;
    }
    // Unrestricted guests need EPT.
    fails(&guest, "unrestricted without EPT", &[primary, (0x401e, 1 << 7)], 7)
}

guest_code!(
    // For ever: marks, INVEPT and INVVPID of the kind that the test gives, with its descriptor.
    invalidates,
    64,
    operation!(),
    "0: out %al, $PORT_MARK",
    "mov ARGUMENT, %rax",
    "mov $FREE + 0x3000, %edx",
    "invept (%rdx), %rax",
    failure!(),
    "mov ARGUMENT, %rax",
    "mov $FREE + 0x3000, %edx",
    "invvpid (%rdx), %rax",
    "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 16; mov $0x4400, %edx; vmread %rdx, %rax",
    "mov %rax, RESULT + 24",
    "jmp 0b",
);

fn invept_and_invvpid_refuse_what_the_manual_refuses() -> Outcome {
    const BAD: (u64, u64) = (ZERO, 28);
    let (guest, _) = prepared(invalidates())?;
    let cases = [
        // Kind, descriptor; whether INVEPT takes it, and INVVPID.
        (0, EPT_POINTER, 0, false, false),
        (0, 5, 0, false, true),
        (0, 5, 1 << 60, false, false),
        (1, EPT_POINTER, 0, true, false),
        (1, 5, 0, false, true),
        (2, 0, 0, true, true),
        (2, 1 << 16, 0, true, false),
        (3, 0, 0, false, false),
        (3, 5, 0, false, true),
        (4, 5, 0, false, false),
        (1 << 32, 5, 0, false, false),
    ];
    for (kind, first, second, ept, vpid) in cases {
        guest.memory.write(ARGUMENT, kind);
        guest.memory.write(FIELDS, first);
        guest.memory.write(FIELDS + 8, second);
        guest.reach_mark()?;
        let what = format!("kind {kind:#x} of {first:#x}, {second:#x}");
        let told = |at: u64| (guest.result(at), guest.result(at + 1));
        equal(&format!("INVEPT {what}"), told(0) == BAD, !ept)?;
        equal(&format!("INVVPID {what}"), told(2) == BAD, !vpid)?;
    }
    Ok(())
}
