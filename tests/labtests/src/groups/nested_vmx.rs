//! A guest that runs a guest of its own by VMX: what it sees of good VMCSs and of bad ones.
//!
//! SDM vol. 3C §27 (VM entries), §31.3 (the instructions).

use crate::machine::code::{done, guarded, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::{ARGUMENT, FREE, NOWHERE};
use crate::outcome::{Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx":
    vmx_l2_runs_and_leaves,
    bad_controls_fail_the_instruction,
    a_bad_host_state_fails_the_instruction,
    a_bad_guest_state_fails_the_entry,
    a_pointer_that_names_no_vmcs_is_refused,
    a_vmcs_is_launched_once,
    control_registers_hold_their_bits_in_vmx_operation,
    the_vmcs_is_private_while_l2_runs,
    vmx_operation_is_taken_from_under_l2,
    without_vmxe_the_instructions_are_undefined,
);

/// The VMXON region, the VMCS, a page that is neither, and the fields that a test wants otherwise, by pages.
const REGION: u64 = FREE;
const VMCS: u64 = FREE + 0x1000;
const PLAIN: u64 = FREE + 0x2000;
pub(super) const FIELDS: u64 = FREE + 0x3000;
pub(super) const L2_CODE: u64 = FREE + 0x8000;

/// RESULT of an instruction that failed: CF or ZF. Of one that did not: an exit.
const CARRY: u64 = 1;
pub(super) const ZERO: u64 = 1 << 6;
pub(super) const EXITED: u64 = 0x200;

pub(super) const EXIT_CPUID: u64 = 10;
const FAILED_ENTRY: u64 = 1 << 31;
const GUEST_RIP: u64 = 3;

/// Enters VMX operation.
macro_rules! operation {
    () => {
        "mov %cr0, %rax; or $0x20, %rax; mov %rax, %cr0; mov %cr4, %rax; or $1 << 13, %rax; mov %rax, %cr4; \
         mov $0x3a, %ecx; rdmsr; test $1, %al; jnz 2f; mov $5, %eax; xor %edx, %edx; wrmsr; 2: \
         mov $FREE, %edi; mov $0x3000 / 8, %ecx; xor %eax, %eax; rep stosq; \
         mov $0x480, %ecx; rdmsr; and $0x7fffffff, %eax; mov %eax, FREE; mov %eax, FREE + 0x1000; \
         sub $32, %rsp; movq $FREE, (%rsp); vmxon (%rsp); \
         movq $FREE + 0x1000, (%rsp); vmclear (%rsp); vmptrld (%rsp)"
    };
}

/// Fills the current VMCS with a guest that has L1's registers and runs at `L2_CODE`, then with what the test wants
/// otherwise; an exit comes to the label 5.
macro_rules! filled {
    () => {
        "lea 3f(%rip), %rsi; 2: mov (%rsi), %ecx; jecxz 2f; rdmsr; or 4(%rsi), %eax; and %edx, %eax; \
         mov 8(%rsi), %edx; vmwrite %rax, %rdx; add $12, %rsi; jmp 2b; 2: \
         lea 4f(%rip), %rsi; 2: mov (%rsi), %edx; test %edx, %edx; jz 2f; movslq 4(%rsi), %rax; \
         vmwrite %rax, %rdx; add $8, %rsi; jmp 2b; 2: \
         mov %cr0, %rax; mov $0x6800, %edx; vmwrite %rax, %rdx; mov $0x6c00, %edx; vmwrite %rax, %rdx; \
         mov %cr3, %rax; mov $0x6802, %edx; vmwrite %rax, %rdx; mov $0x6c02, %edx; vmwrite %rax, %rdx; \
         mov %cr4, %rax; mov $0x6804, %edx; vmwrite %rax, %rdx; mov $0x6c04, %edx; vmwrite %rax, %rdx; \
         sgdt (%rsp); movzwl (%rsp), %eax; mov $0x4810, %edx; vmwrite %rax, %rdx; \
         mov 2(%rsp), %rax; mov $0x6816, %edx; vmwrite %rax, %rdx; mov $0x6c0c, %edx; vmwrite %rax, %rdx; \
         sidt (%rsp); movzwl (%rsp), %eax; mov $0x4812, %edx; vmwrite %rax, %rdx; \
         mov 2(%rsp), %rax; mov $0x6818, %edx; vmwrite %rax, %rdx; mov $0x6c0e, %edx; vmwrite %rax, %rdx; \
         mov %cs, %eax; mov $0x802, %edx; vmwrite %rax, %rdx; mov $0xc02, %edx; vmwrite %rax, %rdx; \
         mov %ss, %eax; mov $0x804, %edx; vmwrite %rax, %rdx; mov $0xc04, %edx; vmwrite %rax, %rdx; \
         mov $0x6c14, %edx; vmwrite %rsp, %rdx; lea -512(%rsp), %rax; mov $0x681c, %edx; vmwrite %rax, %rdx; \
         lea 5f(%rip), %rax; mov $0x6c16, %edx; vmwrite %rax, %rdx; \
         mov $FREE + 0x3000, %esi; 2: mov (%rsi), %rdx; test %rdx, %rdx; jz 2f; mov 8(%rsi), %rax; \
         vmwrite %rax, %rdx; add $16, %rsi; jmp 2b; \
         .balign 4; 3: .long 0x481, 0, 0x4000, 0x482, 0, 0x4002, 0x483, 1 << 9, 0x400c; \
         .long 0x484, 1 << 9, 0x4012, 0; \
         4: .long 0x2800, -1, 0xc0c, 0x20, 0x80e, 0x20; \
         .long 0x4800, -1, 0x4802, -1, 0x4804, -1, 0x4806, -1, 0x4808, -1, 0x480a, -1, 0x480e, 0x67; \
         .long 0x4814, 0xc093, 0x4816, 0xa09b, 0x4818, 0xc093, 0x481a, 0xc093, 0x481c, 0xc093; \
         .long 0x481e, 0xc093, 0x4820, 0x10000, 0x4822, 0x8b; \
         .long 0x681a, 0x400, 0x6820, 2, 0x681e, FREE + 0x8000, 0; 2:"
    };
}

/// What became of the instruction before, for the test.
macro_rules! failure {
    () => {
        "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT; mov $0x4400, %edx; xor %eax, %eax; \
         vmread %rdx, %rax; mov %rax, RESULT + 8"
    };
}

/// A clear VMCS, current, with nothing of what a test has set besides.
macro_rules! cleared {
    () => {
        "movq $FREE + 0x1000, (%rsp); vmclear (%rsp); mov $FREE + 0x1000, %edi; mov $512, %ecx; \
         xor %eax, %eax; rep stosq; mov FREE, %eax; mov %eax, FREE + 0x1000; vmptrld (%rsp)"
    };
}

/// Puts fields of the current VMCS into RESULT: `field => offset`.
macro_rules! told {
    ($($field:literal => $at:literal),+) => {
        concat!($("mov $", $field, ", %edx; vmread %rdx, %rax; mov %rax, RESULT + ", $at, "; "),+)
    };
}

/// Launches and tells what became of it: back at the label 0 a failure; behind it, at the label 5, an exit with its reason, its
/// qualification and the fields that are named.
macro_rules! launched {
    ($($field:literal => $at:literal),+) => {
        concat!(
            "vmlaunch; ",
            failure!(),
            "; jmp 0b; 5: movq $0x200, RESULT; ",
            told!(0x4402 => 8, 0x6400 => 16, $($field => $at),+)
        )
    };
}

pub(super) use {cleared, failure, filled, launched, operation, told};

guest_code!(
    // For ever: marks, fills a clear VMCS, launches it, tells what became of it.
    launches,
    64,
    operation!(),
    "0: out %al, $PORT_MARK",
    cleared!(),
    filled!(),
    launched!(0x681e => 24, 0x6822 => 32, 0x482e => 48, 0x4408 => 56, 0x440c => 72),
    "jmp 0b",
);

/// The program that launches the VMCS for ever.
pub(super) fn program() -> &'static [u8] {
    launches()
}

/// CPUID, and HLT if it goes on.
pub(super) const L2_CPUID: [u8; 3] = [0x0f, 0xa2, 0xf4];
/// Writes to the port of marks, then CPUID.
pub(super) const L2_MARKS: [u8; 5] = [0xe6, 0xf6, 0x0f, 0xa2, 0xf4];

pub(super) fn with(code: &[u8], l2: &[u8]) -> Outcome<Guest> {
    with_chip(Chip::Kernel, code, l2)
}

pub(super) fn with_chip(chip: Chip, code: &[u8], l2: &[u8]) -> Outcome<Guest> {
    let guest = Guest::new(chip, code)?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if cpuid.find(1, 0).is_none_or(|entry| entry.ecx & 1 << 5 == 0) {
        return skip("no VMX in KVM_GET_SUPPORTED_CPUID");
    }
    guest.memory.write_bytes(L2_CODE, l2);
    Ok(guest)
}

/// Fields by their encodings, with values.
pub(super) type Fields<'a> = &'a [(u64, u64)];

/// What the next launches have otherwise.
pub(super) fn set_fields(guest: &Guest, fields: Fields<'_>) {
    for (slot, (encoding, value)) in (FIELDS..).step_by(16).zip(fields) {
        guest.memory.write(slot, *encoding);
        guest.memory.write(slot + 8, *value);
    }
    guest.memory.write(FIELDS + 16 * fields.len() as u64, 0);
}

/// Launches with these fields.
pub(super) fn launch(guest: &Guest, fields: Fields<'_>) -> Outcome {
    set_fields(guest, fields);
    guest.reach_mark()
}

/// Launches a good VMCS: what was bad before has left nothing.
pub(super) fn launch_good(guest: &Guest) -> Outcome {
    launch(guest, &[])?;
    equal("a good VMCS exits", guest.result(0), EXITED)?;
    equal("exit reason", guest.result(1), EXIT_CPUID)
}

pub(super) fn fails(guest: &Guest, what: &str, fields: Fields<'_>, error: u64) -> Outcome {
    launch(guest, fields)?;
    equal(what, (guest.result(0), guest.result(1)), (ZERO, error))?;
    launch_good(guest)
}

/// Low half of a capability MSR: what has to be set.
pub(super) fn must(guest: &Guest, msr: u32) -> Outcome<u64> {
    Ok(guest.vcpu().msr(msr)?.unwrap_or(0) & 0xffff_ffff)
}

fn vmx_l2_runs_and_leaves() -> Outcome {
    let guest = with(launches(), &L2_CPUID)?;
    guest.reach_mark()?;
    for _ in 0..3 {
        launch_good(&guest)?;
        equal("RIP", guest.result(GUEST_RIP), L2_CODE)?;
    }
    Ok(())
}

fn bad_controls_fail_the_instruction() -> Outcome {
    let guest = with(launches(), &L2_CPUID)?;
    guest.reach_mark()?;
    let primary = must(&guest, 0x482)?;
    let cases: [(&str, Fields<'_>); 13] = [
        ("pin controls", &[(0x4000, 0)]),
        ("primary controls", &[(0x4002, 0)]),
        ("a primary control that does not exist", &[(0x4002, primary | 1)]),
        ("exit controls", &[(0x400c, 0)]),
        ("entry controls", &[(0x4012, 0)]),
        ("CR3 targets", &[(0x400a, 5)]),
        ("I/O bitmaps", &[(0x4002, primary | 1 << 25), (0x2000, 1)]),
        ("an MSR bitmap beyond memory", &[(0x4002, primary | 1 << 28), (0x2004, 1 << 60)]),
        ("virtual NMIs without NMI exits", &[(0x4000, must(&guest, 0x481)? | 1 << 5)]),
        ("a list of MSRs", &[(0x400e, 1), (0x2006, 8)]),
        ("an event of no type", &[(0x4016, 0x8000_0100)]),
        ("#PF without its error code", &[(0x4016, 0x8000_030e)]),
        ("exception 33", &[(0x4016, 0x8000_0321)]),
    ];
    for (what, fields) in cases {
        fails(&guest, what, fields, 7)?;
    }
    Ok(())
}

fn a_bad_host_state_fails_the_instruction() -> Outcome {
    let guest = with(launches(), &L2_CPUID)?;
    guest.reach_mark()?;
    let cases = [
        ("CR0", 0x6c00, 0),
        ("CR4", 0x6c04, 0),
        ("CR3", 0x6c02, 1 << 60),
        ("CS", 0xc02, 0),
        ("TR", 0xc0c, 0),
        ("TR with a privilege", 0xc0c, 0x23),
        ("RIP", 0x6c16, 1 << 60),
        ("FS base", 0x6c06, 1 << 60),
        ("SYSENTER_EIP", 0x6c12, 1 << 60),
    ];
    for (what, encoding, value) in cases {
        fails(&guest, what, &[(encoding, value)], 8)?;
    }
    Ok(())
}

fn a_bad_guest_state_fails_the_entry() -> Outcome {
    let guest = with(launches(), &L2_CPUID)?;
    guest.reach_mark()?;
    let (state, msr) = (FAILED_ENTRY | 33, FAILED_ENTRY | 34);
    let list = FREE + 0x9000;
    guest.memory.write(list, 0xc000_0100);
    let cases: [(&str, Fields<'_>, u64); 11] = [
        ("RFLAGS", &[(0x6820, 0)], state),
        ("RFLAGS.VM in long mode", &[(0x6820, 1 << 17 | 2)], state),
        ("CR0", &[(0x6800, 0)], state),
        ("CR3", &[(0x6802, 1 << 60)], state),
        ("CR4", &[(0x6804, 0)], state),
        ("CS", &[(0x4816, 0x10000)], state),
        ("TR", &[(0x4822, 0x10000)], state),
        ("activity", &[(0x4826, 4)], state),
        ("interruptibility", &[(0x4824, 0x10)], state),
        ("the link pointer", &[(0x2800, 8)], state),
        ("a list that loads FS_BASE", &[(0x4014, 1), (0x200a, list)], msr),
    ];
    for (what, fields, reason) in cases {
        launch(&guest, fields)?;
        equal(what, (guest.result(0), guest.result(1)), (EXITED, reason))?;
        launch_good(&guest)?;
    }
    Ok(())
}

guest_code!(
    // For ever: marks, then VMPTRLD and VMCLEAR of the address that the test gives.
    points,
    64,
    operation!(),
    "0: out %al, $PORT_MARK",
    "mov ARGUMENT, %rax",
    "mov %rax, 8(%rsp)",
    "vmptrld 8(%rsp)",
    failure!(),
    "vmclear 8(%rsp)",
    "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 16; mov $0x4400, %edx; vmread %rdx, %rax",
    "mov %rax, RESULT + 24",
    "movq $FREE + 0x1000, (%rsp)",
    "vmptrld (%rsp)",
    "jmp 0b",
);

fn a_pointer_that_names_no_vmcs_is_refused() -> Outcome {
    let guest = with(points(), &L2_CPUID)?;
    guest.reach_mark()?;
    let cases = [
        ("unaligned", VMCS + 8, 9, 2),
        ("beyond physical addresses", 1 << 60, 9, 2),
        ("the VMXON region", REGION, 10, 3),
    ];
    for (what, pointer, load, clear) in cases {
        guest.memory.write(ARGUMENT, pointer);
        guest.reach_mark()?;
        equal(what, (guest.result(0), guest.result(1)), (ZERO, load))?;
        equal(what, (guest.result(2), guest.result(3)), (ZERO, clear))?;
    }
    for (what, pointer) in [("a page of zeroes", PLAIN), ("no memory", NOWHERE)] {
        guest.memory.write(ARGUMENT, pointer);
        guest.reach_mark()?;
        equal(what, (guest.result(0), guest.result(1)), (ZERO, 11))?;
    }
    Ok(())
}

guest_code!(
    launches_twice,
    64,
    operation!(),
    filled!(),
    "vmresume",
    failure!(),
    "mov $0x6c16, %edx",
    "lea 6f(%rip), %rax",
    "vmwrite %rax, %rdx",
    "vmlaunch",
    "5: ud2",
    "6: vmlaunch",
    "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 16; mov $0x4400, %edx; vmread %rdx, %rax",
    "mov %rax, RESULT + 24",
    "movq $FREE + 0x1000, (%rsp)",
    // Without a current VMCS there is no place for an error.
    "vmclear (%rsp)",
    "vmlaunch",
    "pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 32",
    done!()
);

fn a_vmcs_is_launched_once() -> Outcome {
    let guest = with(launches_twice(), &L2_CPUID)?;
    guest.finish()?;
    equal("VMRESUME of a clear one", (guest.result(0), guest.result(1)), (ZERO, 5))?;
    equal("VMLAUNCH of a launched one", (guest.result(2), guest.result(3)), (ZERO, 4))?;
    equal("VMLAUNCH of none", guest.result(4), CARRY)
}

guest_code!(
    moves_bits,
    64,
    operation!(),
    "mov %cr4, %rax",
    "and $~(1 << 13), %rax",
    guarded!("mov %rax, %cr4"),
    "mov FAULTS, %rbx",
    "mov %rbx, RESULT",
    "mov %cr0, %rax",
    "and $~0x20, %rax",
    guarded!("mov %rax, %cr0"),
    "mov FAULTS, %rbx",
    "mov %rbx, RESULT + 8",
    // The other bits are L1's.
    "mov %cr4, %rax",
    "xor $1 << 2, %rax",
    guarded!("mov %rax, %cr4"),
    "mov %cr0, %rax",
    "xor $1 << 16, %rax",
    guarded!("mov %rax, %cr0"),
    "mov FAULTS, %rbx",
    "mov %rbx, RESULT + 16",
    "vmxoff",
    "mov %cr4, %rax",
    "and $~(1 << 13), %rax",
    guarded!("mov %rax, %cr4"),
    "mov FAULTS, %rbx",
    "mov %rbx, RESULT + 24",
    done!()
);

fn control_registers_hold_their_bits_in_vmx_operation() -> Outcome {
    let guest = with(moves_bits(), &L2_CPUID)?;
    guest.finish()?;
    equal("VMXE", guest.result(0), 1)?;
    equal("NE", guest.result(1), 2)?;
    equal("vector", guest.faults().1, 13)?;
    equal("TSD and WP", guest.result(2), 2)?;
    equal("VMXE behind VMXOFF", guest.result(3), 2)
}

fn the_vmcs_is_private_while_l2_runs() -> Outcome {
    let guest = with(launches(), &L2_MARKS)?;
    guest.reach_mark()?;
    for page in [VMCS, REGION] {
        let before = guest.memory.read_bytes(page, 4096);
        guest.reach_mark()?;
        let rip = guest.vcpu().regs()?.rip;
        equal("L2 runs", (L2_CODE..L2_CODE + 3).contains(&rip), true)?;
        guest.memory.write_bytes(page, &[0xff; 4096]);
        guest.reach_mark()?;
        equal("exit", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))?;
        equal("RIP", guest.result(GUEST_RIP), L2_CODE + 2)?;
        guest.memory.write_bytes(page, &before);
    }
    Ok(())
}

/// What a VMM does that resets its machine.
fn vmx_operation_is_taken_from_under_l2() -> Outcome {
    let guest = with(launches(), &L2_MARKS)?;
    guest.reach_mark()?;
    let mut sregs = guest.vcpu().sregs()?;
    let mut regs = guest.vcpu().regs()?;
    guest.reach_mark()?;
    let rip = guest.vcpu().regs()?.rip;
    equal("L2 runs", (L2_CODE..L2_CODE + 3).contains(&rip), true)?;
    equal("FEATURE_CONTROL", guest.vcpu().set_msr(0x3a, 0)?, true)?;
    sregs.cr4 &= !(1 << 13);
    regs.rip = crate::machine::layout::PROGRAM;
    guest.vcpu().set_sregs(&sregs)?;
    guest.vcpu().set_regs(&regs)?;
    guest.reach_mark()?;
    // It enters VMX operation anew.
    guest.memory.write_bytes(L2_CODE, &L2_CPUID);
    launch_good(&guest)
}

guest_code!(
    undefined,
    64,
    "sub $32, %rsp",
    guarded!("vmxon (%rsp)"),
    guarded!("vmptrld (%rsp)"),
    guarded!("vmclear (%rsp)"),
    guarded!("vmptrst (%rsp)"),
    guarded!("vmlaunch"),
    guarded!("vmresume"),
    guarded!("vmread %rax, %rdx"),
    guarded!("vmwrite %rax, %rdx"),
    guarded!("vmxoff"),
    done!()
);

fn without_vmxe_the_instructions_are_undefined() -> Outcome {
    let guest = with(undefined(), &L2_CPUID)?;
    guest.finish()?;
    equal("faults", guest.faults().0, 9)?;
    equal("vector", guest.faults().1, 6)
}
