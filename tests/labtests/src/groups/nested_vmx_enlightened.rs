//! A guest that runs a guest of its own by an enlightened VMCS: a page in its memory in place of VMREAD and VMWRITE.
//!
//! Hypervisor Top-Level Functional Specification, "Nested virtualization".

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use kvm_bindings::{
    KVM_CAP_HYPERV_CPUID, KVM_CAP_HYPERV_ENLIGHTENED_VMCS, KVM_CAP_SYS_HYPERV_CPUID,
};

use super::nested_state::{computes, sums};
use super::nested_vmx::{
    EXIT_CPUID, EXITED, L2_CODE, L2_CPUID, ZERO, cleared, failure, filled, operation, set_fields,
    told,
};
use crate::kvm::file::{Commands, CpuidTable};
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::machine::code::{done, guarded, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::{ARGUMENT, FREE, NOWHERE};
use crate::machine::saved::{HEADER, Saved, nested, set_nested};
use crate::machine::storm::{Tally, Turn, Watched, look_after, turn};
use crate::outcome::{Answer, Errno, Outcome, equal, holds, skip};
use crate::runner::tests;

tests!("nested_vmx_enlightened":
    hypervs_leaves_say_what_there_is,
    hypervs_msrs_are_there_if_cpuid_names_the_interface,
    an_unknown_hypercall_is_no_call,
    a_guest_runs_by_its_page,
    what_l1_says_is_clean_may_be_taken_for_that,
    a_clean_msr_bitmap_is_not_read_again,
    a_page_that_is_none_is_undefined,
    an_unknown_revision_fails_the_instruction,
    the_page_is_private_while_l2_runs,
    what_a_page_does_not_carry_is_not_offered,
    vmwrite_has_no_vmcs,
    without_the_vmms_word_a_page_is_nothing,
    a_state_with_a_page_is_saved_and_goes_on_elsewhere,
    a_state_with_a_page_needs_the_vmms_word,
    a_page_that_another_thread_rewrites_is_entered_or_refused,
);

/// Where the program finds its fields, its page, and the VP assist page.
const TABLE: u64 = FREE + 0x4000;
const PAGE: u64 = FREE + 0x5000;
const ASSIST: u64 = FREE + 0x6000;
const ENLIGHTENS: u64 = ASSIST + 40;
const POINTER: u64 = ASSIST + 48;

const GUEST_OS_ID: u32 = 0x4000_0000;
const HYPERCALL: u32 = 0x4000_0001;
const VP_INDEX: u32 = 0x4000_0002;
const VP_ASSIST_PAGE: u32 = 0x4000_0073;

/// What the program is told: to fill the page anew, to resume and not to launch.
const FILL: u64 = 1;
const RESUME: u64 = 2;

const CARRY: u64 = 1;
const RIP: u64 = 3;

/// Bytes of the page.
const EXIT_REASON_AT: u64 = 692;
const INSTRUCTION_ERROR_AT: u64 = 688;
const GUEST_RIP_AT: u64 = 816;
const HOST_RIP_AT: u64 = 80;
const TSC_OFFSET_AT: u64 = 400;
const CLEAN_AT: u64 = 824;
const CONTROL_AT: u64 = 836;

/// Fields that L1 writes, by their encodings, and the bytes of the page at which they lie.
#[rustfmt::skip] // A table.
const FIELDS_AT: &[(u16, u16)] = &[
    (0xc00, 8), (0xc02, 10), (0xc04, 12), (0xc06, 14), (0xc08, 16), (0xc0a, 18), (0xc0c, 20), (0x2c00, 24),
    (0x2c02, 32), (0x6c00, 40), (0x6c02, 48), (0x6c04, 56), (0x6c10, 64), (0x6c12, 72), (0x6c16, 80), (0x4c00, 88),
    (0x4000, 92), (0x400c, 96), (0x401e, 100), (0x2000, 104), (0x2002, 112), (0x2004, 120), (0x800, 128),
    (0x802, 130), (0x804, 132), (0x806, 134), (0x808, 136), (0x80a, 138), (0x80c, 140), (0x80e, 142), (0x4800, 144),
    (0x4802, 148), (0x4804, 152), (0x4806, 156), (0x4808, 160), (0x480a, 164), (0x480c, 168), (0x480e, 172),
    (0x4810, 176), (0x4812, 180), (0x4814, 184), (0x4816, 188), (0x4818, 192), (0x481a, 196), (0x481c, 200),
    (0x481e, 204), (0x4820, 208), (0x4822, 212), (0x6806, 216), (0x6808, 224), (0x680a, 232), (0x680c, 240),
    (0x680e, 248), (0x6810, 256), (0x6812, 264), (0x6814, 272), (0x6816, 280), (0x6818, 288), (0x2010, 400),
    (0x2012, 408), (0x2800, 416), (0x2802, 424), (0x2804, 432), (0x2806, 440), (0x280a, 448), (0x280c, 456),
    (0x280e, 464), (0x2810, 472), (0x6822, 480), (0x6824, 488), (0x6826, 496), (0x4826, 504), (0x482a, 508),
    (0x6000, 512), (0x6002, 520), (0x6004, 528), (0x6006, 536), (0x6800, 544), (0x6802, 552), (0x6804, 560),
    (0x681a, 568), (0x6c06, 576), (0x6c08, 584), (0x6c0a, 592), (0x6c0c, 600), (0x6c0e, 608), (0x6c14, 616),
    (0x201a, 624), (0x0, 632), (0x681c, 768), (0x6820, 776), (0x4824, 784), (0x4002, 788), (0x4004, 792),
    (0x4012, 796), (0x4016, 800), (0x4018, 804), (0x401a, 808), (0x401c, 812), (0x681e, 816), (0x2812, 896),
    (0x2808, 904), (0x202c, 960), (0x202e, 968), (0x2c04, 976), (0x2032, 984),
];

guest_code!(
    // For ever: marks, fills a VMCS and copies it into the page if told to, enters, tells what became of it.
    enters,
    64,
    operation!(),
    "0: out %al, $PORT_MARK",
    "testb $1, ARGUMENT",
    "jz 7f",
    // Nothing is to be current but the VMCS that is copied from.
    "movq $FREE + 0x5000, (%rsp)",
    "vmclear (%rsp)",
    "movb $0, FREE + 0x6000 + 40",
    cleared!(),
    filled!(),
    "mov $FREE + 0x5000, %edi",
    "mov $512, %ecx",
    "xor %eax, %eax",
    "rep stosq",
    "mov $FREE + 0x4000, %esi",
    "6: mov (%rsi), %edx",
    "cmp $-1, %edx",
    "je 6f",
    "xor %eax, %eax",
    "vmread %rdx, %rax",
    "mov %rax, 8(%rsp)",
    "mov 4(%rsi), %edi",
    "mov 8(%rsi), %ecx",
    "push %rsi",
    "lea 16(%rsp), %rsi",
    "rep movsb",
    "pop %rsi",
    "add $12, %rsi",
    "jmp 6b",
    // With it stock KVM leaves what serves VMREAD in the hardware.
    "6: movq $FREE + 0x1000, (%rsp)",
    "vmclear (%rsp)",
    "movl $1, FREE + 0x5000",
    "movb $1, FREE + 0x6000 + 40",
    "7: testb $2, ARGUMENT",
    "jnz 8f",
    "vmlaunch",
    "jmp 9f",
    "8: vmresume",
    "9:",
    failure!(),
    "jmp 0b",
    "5: movq $0x200, RESULT",
    told!(0x4402 => 8, 0x6400 => 16, 0x681e => 24),
    "jmp 0b",
);

/// What the guest's CPUID has, and Hyper-V's leaves in place of KVM's.
fn shown(system: &crate::kvm::file::System, vcpu: &Vcpu) -> Outcome<Box<CpuidTable>> {
    let mut table = system.supported_cpuid()?;
    let mut leaves = CpuidTable::empty();
    vcpu.exchange(ioctl::GET_SUPPORTED_HV_CPUID, &mut *leaves)
        .granted("KVM_GET_SUPPORTED_HV_CPUID")?;
    let kept: Vec<_> =
        table.used().iter().copied().filter(|e| e.function & 0xffff_0000 != 0x4000_0000).collect();
    let mut new = CpuidTable::empty();
    new.nent = 0;
    for entry in kept.iter().chain(leaves.used().iter()) {
        new.entries[new.nent as usize] = *entry;
        new.nent += 1;
    }
    Ok(new)
}

/// A guest whose CPUID names the interface.
fn named(code: &[u8]) -> Outcome<Guest> {
    let guest = Guest::new(Chip::Kernel, code)?;
    if guest.system.extension(KVM_CAP_HYPERV_ENLIGHTENED_VMCS) == 0 {
        return skip("no enlightened VMCS");
    }
    let table = shown(&guest.system, guest.vcpu())?;
    guest.vcpu().set_cpuid(&table)?;
    Ok(guest)
}

/// A guest that may use enlightened VMCSs, with a VP assist page that names one.
fn with(code: &[u8], l2: &[u8]) -> Outcome<Guest> {
    let guest = named(code)?;
    if guest.system.supported_cpuid()?.find(1, 0).is_none_or(|entry| entry.ecx & 1 << 5 == 0) {
        return skip("no VMX in KVM_GET_SUPPORTED_CPUID");
    }
    equal("versions", guest.vcpu().enable_enlightened_vmcs().granted("KVM_ENABLE_CAP")?, 0x101)?;
    let table = shown(&guest.system, guest.vcpu())?;
    guest.vcpu().set_cpuid(&table)?;
    guest.memory.write_bytes(L2_CODE, l2);
    guest.memory.write(POINTER, PAGE);
    equal("HV_VP_ASSIST_PAGE", guest.vcpu().set_msr(VP_ASSIST_PAGE, ASSIST | 1)?, true)?;
    for (slot, (encoding, offset)) in (TABLE..).step_by(12).zip(FIELDS_AT) {
        let bytes = [2u32, 8, 4, 8][usize::from(encoding >> 13 & 3)];
        let line = [u32::from(*encoding), PAGE as u32 + u32::from(*offset), bytes];
        let line: Vec<u8> = line.into_iter().flat_map(u32::to_le_bytes).collect();
        guest.memory.write_bytes(slot, &line);
    }
    guest.memory.write_bytes(TABLE + 12 * FIELDS_AT.len() as u64, &[0xff; 4]);
    Ok(guest)
}

fn enter(guest: &Guest, how: u64) -> Outcome {
    guest.memory.write(ARGUMENT, how);
    guest.reach_mark()
}

fn word(guest: &Guest, at: u64) -> u64 {
    let bytes = guest.memory.read_bytes(PAGE + at, 4);
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn exits(guest: &Guest, how: u64) -> Outcome {
    enter(guest, how)?;
    equal("an exit", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))?;
    equal("reason in the page", word(guest, EXIT_REASON_AT), EXIT_CPUID)?;
    equal("RIP", guest.result(RIP), L2_CODE)
}

fn hypervs_leaves_say_what_there_is() -> Outcome {
    let guest = named(enters())?;
    for capability in [KVM_CAP_HYPERV_CPUID, KVM_CAP_SYS_HYPERV_CPUID] {
        equal("capability", guest.system.extension(capability), 1)?;
    }
    let system = |nent| {
        let mut table = CpuidTable::empty();
        table.nent = nent;
        let got = guest.system.exchange(ioctl::GET_SUPPORTED_HV_CPUID, &mut *table);
        (got, table)
    };
    equal("no room", system(9).0, Err(Errno(libc::E2BIG)))?;
    let (got, mut table) = system(40);
    got.granted("KVM_GET_SUPPORTED_HV_CPUID")?;
    equal("leaves", table.nent, 10)?;
    let eax = |table: &mut CpuidTable, leaf| table.find(leaf, 0).map_or(0, |entry| entry.eax);
    equal("the last", eax(&mut table, 0x4000_0000), 0x4000_0082)?;
    equal("interface", eax(&mut table, 0x4000_0001), 0x3123_7648)?;
    let msrs = eax(&mut table, 0x4000_0003);
    equal("MSRs", msrs & 0x70, 0x70)?;
    equal("nesting", eax(&mut table, 0x4000_000a), 0x101 | 1 << 17 | 1 << 19)?;
    let mut of_vcpu = shown(&guest.system, guest.vcpu())?;
    equal("versions before", eax(&mut of_vcpu, 0x4000_000a) & 0xffff, 0)?;
    equal("recommended before", eax(&mut of_vcpu, 0x4000_0004) & 1 << 14, 0)?;
    guest.vcpu().enable_enlightened_vmcs().granted("KVM_ENABLE_CAP")?;
    let mut of_vcpu = shown(&guest.system, guest.vcpu())?;
    equal("versions behind", eax(&mut of_vcpu, 0x4000_000a) & 0xffff, 0x101)?;
    equal("recommended behind", eax(&mut of_vcpu, 0x4000_0004) & 1 << 14, 1 << 14)
}

guest_code!(
    asks_msrs,
    64,
    "mov $0x40000001, %ecx; xor %edx, %edx; mov $FREE + 1, %eax",
    guarded!("wrmsr"),
    "mov FREE, %rax; mov %rax, RESULT",
    "mov $0x40000000, %ecx; mov $0x8100, %edx; xor %eax, %eax",
    guarded!("wrmsr"),
    "mov $0x40000001, %ecx; xor %edx, %edx; mov $FREE + 1, %eax",
    guarded!("wrmsr"),
    "mov FREE, %eax; mov %rax, RESULT + 8",
    "mov $0x40000002, %ecx",
    guarded!("rdmsr"),
    "mov %rax, RESULT + 16; mov FAULTS, %rax; mov %rax, RESULT + 24",
    "mov $0x40000002, %ecx; xor %eax, %eax; xor %edx, %edx",
    guarded!("wrmsr"),
    "mov $0x40000073, %ecx; xor %edx, %edx; mov $NOWHERE + 1, %eax",
    guarded!("wrmsr"),
    "mov FAULTS, %rax; mov %rax, RESULT + 32",
    "movq $-1, FREE + 0x1000; mov $0x40000073, %ecx; xor %edx, %edx; mov $FREE + 0x1001, %eax",
    guarded!("wrmsr"),
    "mov FREE + 0x1000, %rax; mov %rax, RESULT + 40; mov FAULTS, %rax; mov %rax, RESULT + 48",
    "mov $0x40000000, %ecx; xor %edx, %edx; xor %eax, %eax",
    guarded!("wrmsr"),
    "mov $0x40000001, %ecx; mov $-1, %eax",
    guarded!("rdmsr"),
    "mov %rax, RESULT + 56",
    done!()
);

fn hypervs_msrs_are_there_if_cpuid_names_the_interface() -> Outcome {
    let guest = named(asks_msrs())?;
    equal("VP_INDEX by the VMM", guest.vcpu().set_msr(VP_INDEX, 7)?, true)?;
    equal("one too many", guest.vcpu().set_msr(VP_INDEX, 1 << 20)?, false)?;
    guest.finish()?;
    equal("no page without an operating system", guest.result(0), 0)?;
    equal("VMCALL and RET", guest.result(1), 0xc3c1_010f)?;
    equal("VP_INDEX", guest.result(2), 7)?;
    equal("faults", guest.result(3), 0)?;
    equal("VP_INDEX is the VMM's, a page is memory", guest.result(4), 2)?;
    equal("the first word of the page", guest.result(5), 0xffff_ffff_0000_0000)?;
    equal("faults", guest.result(6), 2)?;
    equal("off without an operating system", guest.result(7) & 1, 0)?;
    equal("vector", guest.faults().1, 13)?;
    equal("kept", guest.vcpu().msr(VP_ASSIST_PAGE)?, Some(FREE + 0x1001))?;
    let other = Guest::new(Chip::Kernel, asks_msrs())?;
    other.finish()?;
    equal("faults where CPUID says nothing", other.faults().0, 9)?;
    for index in [GUEST_OS_ID, HYPERCALL, VP_INDEX, VP_ASSIST_PAGE] {
        equal("the VMM's", other.vcpu().msr(index)?, Some(0))?;
    }
    Ok(())
}

guest_code!(
    calls,
    64,
    "mov $0x40000000, %ecx; mov $0x8100, %edx; xor %eax, %eax; wrmsr",
    "mov $0x40000001, %ecx; xor %edx, %edx; mov $FREE + 1, %eax; wrmsr",
    "mov $0xbeef, %ecx; xor %edx, %edx; xor %r8d, %r8d; mov $FREE, %eax; call *%rax; mov %rax, RESULT",
    "mov $0xbeef, %ecx; bts $45, %rcx; mov $FREE, %eax; call *%rax; mov %rax, RESULT + 8",
    done!()
);

fn an_unknown_hypercall_is_no_call() -> Outcome {
    let guest = named(calls())?;
    guest.finish()?;
    equal("HV_STATUS_INVALID_HYPERCALL_CODE", guest.result(0), 2)?;
    equal("HV_STATUS_INVALID_HYPERCALL_INPUT", guest.result(1), 3)
}

fn a_guest_runs_by_its_page() -> Outcome {
    let guest = with(enters(), &L2_CPUID)?;
    guest.reach_mark()?;
    exits(&guest, FILL)?;
    // It has no launch state.
    exits(&guest, RESUME)?;
    exits(&guest, 0)?;
    exits(&guest, FILL | RESUME)?;
    // RIP is never clean.
    guest.memory.write(PAGE + GUEST_RIP_AT, L2_CODE + 0x100);
    guest.memory.write_bytes(L2_CODE + 0x100, &L2_CPUID);
    enter(&guest, RESUME)?;
    equal("RIP", guest.result(RIP), L2_CODE + 0x100)
}

fn what_l1_says_is_clean_may_be_taken_for_that() -> Outcome {
    let guest = with(enters(), &L2_CPUID)?;
    guest.reach_mark()?;
    exits(&guest, FILL)?;
    equal("all is clean behind an exit", word(&guest, CLEAN_AT) & 0xffff, 0xffff)?;
    let good = guest.memory.read(PAGE + HOST_RIP_AT);
    guest.memory.write(PAGE + HOST_RIP_AT, 1 << 60);
    exits(&guest, RESUME)?;
    guest.memory.write_bytes(PAGE + CLEAN_AT, &(0xffff_u32 & !(1 << 14)).to_le_bytes());
    enter(&guest, RESUME)?;
    equal("a bad host state", (guest.result(0), guest.result(1)), (ZERO, 8))?;
    equal("error in the page", word(&guest, INSTRUCTION_ERROR_AT), 8)?;
    guest.memory.write(PAGE + HOST_RIP_AT, good);
    exits(&guest, RESUME)?;
    // A launch takes nothing for clean.
    guest.memory.write(PAGE + HOST_RIP_AT, 1 << 60);
    guest.memory.write_bytes(PAGE + CLEAN_AT, &0xffff_u32.to_le_bytes());
    enter(&guest, 0)?;
    equal("a bad host state", (guest.result(0), guest.result(1)), (ZERO, 8))?;
    guest.memory.write(PAGE + HOST_RIP_AT, good);
    exits(&guest, 0)?;
    // What L1 alone writes an exit leaves as it is.
    guest.memory.write(PAGE + TSC_OFFSET_AT, 0x1234);
    exits(&guest, RESUME)?;
    equal("TSC offset", guest.memory.read(PAGE + TSC_OFFSET_AT), 0x1234)
}

/// RDMSR of GS_BASE, then CPUID.
const L2_READS: [u8; 10] = [0xb9, 0x01, 0x01, 0x00, 0xc0, 0x0f, 0x32, 0x0f, 0xa2, 0xf4];
const EXIT_RDMSR: u64 = 31;

fn a_clean_msr_bitmap_is_not_read_again() -> Outcome {
    const BITMAP: u64 = FREE + 0xb000;
    const OF_GS_BASE: u64 = BITMAP + 0x400 + 0x20;
    let guest = with(enters(), &L2_READS)?;
    guest.reach_mark()?;
    let primary = guest.vcpu().msr(0x482)?.unwrap_or(0) & 0xffff_ffff;
    guest.memory.write_bytes(BITMAP, &[0; 4096]);
    set_fields(&guest, &[(0x4002, primary | 1 << 28), (0x2004, BITMAP)]);
    let runs = |what, how, reason| {
        guest.memory.write(PAGE + GUEST_RIP_AT, L2_CODE);
        enter(&guest, how)?;
        equal(what, (guest.result(0), guest.result(1)), (EXITED, reason))
    };
    runs("nothing exits", FILL, EXIT_CPUID)?;
    guest.memory.write_bytes(OF_GS_BASE, &[2]);
    runs("L1 has not asked for it", RESUME, EXIT_RDMSR)?;
    guest.memory.write_bytes(OF_GS_BASE, &[0]);
    runs("nothing exits", RESUME, EXIT_CPUID)?;
    guest.memory.write_bytes(PAGE + CONTROL_AT, &[2]);
    runs("nothing exits", RESUME, EXIT_CPUID)?;
    guest.memory.write_bytes(OF_GS_BASE, &[2]);
    runs("it is told to be clean", RESUME, EXIT_CPUID)?;
    guest.memory.write_bytes(PAGE + CLEAN_AT, &(0xffff_u32 & !2).to_le_bytes());
    runs("it is told to be another", RESUME, EXIT_RDMSR)
}

guest_code!(
    // For ever: marks, and tries to enter.
    tries,
    64,
    operation!(),
    "movb $1, FREE + 0x6000 + 40",
    "0: out %al, $PORT_MARK",
    guarded!("vmlaunch"),
    "jmp 0b",
);

fn a_page_that_is_none_is_undefined() -> Outcome {
    let guest = with(tries(), &L2_CPUID)?;
    guest.reach_mark()?;
    for (times, pointer) in (1..).zip([NOWHERE, 0xdead_beef, 1 << 60]) {
        guest.memory.write(POINTER, pointer);
        guest.reach_mark()?;
        equal("faults", guest.faults().0, times)?;
        equal("vector", guest.faults().1, 6)?;
    }
    Ok(())
}

fn an_unknown_revision_fails_the_instruction() -> Outcome {
    let guest = with(enters(), &L2_CPUID)?;
    guest.reach_mark()?;
    exits(&guest, FILL)?;
    let copy = guest.memory.read_bytes(PAGE, 4096);
    let other = FREE + 0xa000;
    guest.memory.write_bytes(other, &copy);
    for revision in [0u32, 2, u32::MAX] {
        guest.memory.write_bytes(other, &revision.to_le_bytes());
        guest.memory.write(POINTER, other);
        enter(&guest, 0)?;
        equal("VMfailInvalid", guest.result(0), CARRY)?;
    }
    guest.memory.write(POINTER, PAGE);
    exits(&guest, 0)?;
    // The revision of an ordinary region is taken too.
    let region = guest.memory.read_bytes(FREE + 0x1000, 4);
    guest.memory.write_bytes(other, &region);
    guest.memory.write(POINTER, other);
    enter(&guest, RESUME)?;
    equal("an exit", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))
}

fn the_page_is_private_while_l2_runs() -> Outcome {
    let guest = with(enters(), &super::nested_vmx::L2_MARKS)?;
    guest.reach_mark()?;
    enter(&guest, FILL)?;
    let rip = guest.vcpu().regs()?.rip;
    equal("L2 runs", (L2_CODE..L2_CODE + 3).contains(&rip), true)?;
    let before = guest.memory.read_bytes(PAGE, 1024);
    // Host state and controls: what of them there is counts as it was read.
    guest.memory.write_bytes(PAGE + 8, &[0xff; 120]);
    guest.memory.write_bytes(PAGE + 512, &[0xff; 32]);
    guest.reach_mark()?;
    equal("an exit", (guest.result(0), guest.result(1)), (EXITED, EXIT_CPUID))?;
    equal("RIP", guest.result(RIP), L2_CODE + 2)?;
    equal("L1's part", guest.memory.read_bytes(PAGE + 8, 120), vec![0xff; 120])?;
    guest.memory.write_bytes(PAGE + 8, &before[8..128]);
    Ok(())
}

guest_code!(
    reads_capabilities,
    64,
    "mov $0x48d, %ecx; rdmsr; mov %rdx, RESULT",
    "mov $0x48b, %ecx; rdmsr; mov %rdx, RESULT + 8",
    "mov $0x48f, %ecx; rdmsr; mov %rdx, RESULT + 16",
    "mov $0x481, %ecx; rdmsr; mov %rdx, RESULT + 24",
    done!()
);

fn what_a_page_does_not_carry_is_not_offered() -> Outcome {
    let guest = with(reads_capabilities(), &L2_CPUID)?;
    let high = |index| Ok(guest.vcpu().msr(index)?.unwrap_or(0) >> 32);
    guest.finish()?;
    let pin = 1 << 6 | 1 << 7;
    let secondary = 1 | 1 << 8 | 1 << 9 | 1 << 13 | 1 << 14 | 1 << 17 | 1 << 25;
    equal("pin controls", guest.result(0), high(0x48d)? & !pin)?;
    equal("secondary controls", guest.result(1), high(0x48b)? & !secondary)?;
    equal("exit controls", guest.result(2) & 1 << 22, 0)?;
    equal("pin controls without true ones", guest.result(3) & pin, 0)?;
    let entering = with(enters(), &L2_CPUID)?;
    entering.reach_mark()?;
    let pin = entering.vcpu().msr(0x48d)?.unwrap_or(0);
    let must = entering.vcpu().msr(0x481)?.unwrap_or(0) & 0xffff_ffff;
    if pin >> 32 & 1 << 6 == 0 {
        return Ok(());
    }
    set_fields(&entering, &[(0x4000, must | 1 << 6)]);
    enter(&entering, FILL)?;
    equal("a preemption timer", (entering.result(0), entering.result(1)), (ZERO, 7))?;
    set_fields(&entering, &[]);
    exits(&entering, FILL)
}

guest_code!(
    // Enters once by the page, then what VMREAD, VMWRITE, VMPTRST and VMRESUME say.
    accesses,
    64,
    operation!(),
    filled!(),
    "mov $FREE + 0x4000, %esi",
    "6: mov (%rsi), %edx; cmp $-1, %edx; je 6f; xor %eax, %eax; vmread %rdx, %rax; mov %rax, 8(%rsp)",
    "mov 4(%rsi), %edi; mov 8(%rsi), %ecx; push %rsi; lea 16(%rsp), %rsi; rep movsb; pop %rsi",
    "add $12, %rsi; jmp 6b",
    // With it stock KVM leaves what serves VMREAD in the hardware.
    "6: movq $FREE + 0x1000, (%rsp)",
    "vmclear (%rsp)",
    "movl $1, FREE + 0x5000",
    "movb $1, FREE + 0x6000 + 40",
    "vmlaunch",
    "ud2",
    "5: mov $0x681e, %edx; xor %eax, %eax; vmread %rdx, %rax; mov %rax, RESULT",
    "mov $0x681e, %edx; vmwrite %rdx, %rdx; pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 8",
    "mov $0x200e, %edx; vmread %rdx, %rax; pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 16",
    // Given up, nothing is current.
    "movq $FREE + 0x5000, (%rsp); vmclear (%rsp); mov FREE + 0x5000 + 8, %rax; mov %rax, RESULT + 24",
    "mov $0x681e, %edx; vmread %rdx, %rax; pushf; pop %rax; and $0x41, %eax; mov %rax, RESULT + 32",
    done!()
);

fn vmwrite_has_no_vmcs() -> Outcome {
    let guest = with(accesses(), &L2_CPUID)?;
    guest.finish()?;
    equal("VMREAD reads the page", guest.result(0), L2_CODE)?;
    equal("VMWRITE", guest.result(1), CARRY)?;
    equal("VMREAD of what it does not carry", guest.result(2), ZERO)?;
    let selectors = guest.memory.read(PAGE + 8);
    equal("VMCLEAR writes nothing", guest.result(3), selectors)?;
    holds("selectors", selectors != 0, selectors)?;
    equal("VMREAD of nothing", guest.result(4), CARRY)
}

fn without_the_vmms_word_a_page_is_nothing() -> Outcome {
    let guest = named(tries())?;
    guest.memory.write(POINTER, PAGE);
    guest.vcpu().set_msr(VP_ASSIST_PAGE, ASSIST | 1)?;
    guest.reach_mark()?;
    guest.memory.write(POINTER, NOWHERE);
    guest.memory.write(ENLIGHTENS, 1);
    guest.reach_mark()?;
    equal("faults", guest.faults().0, 0)
}

fn a_state_with_a_page_is_saved_and_goes_on_elsewhere() -> Outcome {
    for number in [1, 4] {
        let guest = with(enters(), sums())?;
        guest.reach_mark()?;
        guest.memory.write(ARGUMENT, FILL);
        for _ in 0..number {
            guest.reach_mark()?;
        }
        let saved = Saved::of(&guest)?.enlightened();
        let state = saved.nested();
        equal("L2 runs, and the VMCS is a page", state.flags(), 1 | 4)?;
        equal("size", state.size(), HEADER as u32 + 4096)?;
        equal("no address", state.0[2], u64::MAX)?;
        let other = saved.restored(false)?;
        equal("again", nested(other.vcpu())?.0[..3].to_vec(), state.0[..3].to_vec())?;
        computes(&other, number + 1)?;
        equal("reason in the page", word(&other, EXIT_REASON_AT), EXIT_CPUID)?;
        computes(&guest, number + 1)?;
        // L1 runs, and enters anew, and changes the page before it does again.
        let saved = Saved::of(&other)?.enlightened();
        equal("the VMCS is a page", saved.nested().flags(), 4)?;
        let third = saved.restored(false)?;
        third.memory.write(ARGUMENT, RESUME);
        third.reach_mark()?;
        equal("an exit", (third.result(0), third.result(1)), (EXITED, EXIT_CPUID))?;
        third.memory.write(PAGE + GUEST_RIP_AT, L2_CODE);
        computes(&third, 1)?;
    }
    Ok(())
}

fn a_state_with_a_page_needs_the_vmms_word() -> Outcome {
    let guest = with(enters(), &L2_CPUID)?;
    guest.reach_mark()?;
    exits(&guest, FILL)?;
    let saved = Saved::of(&guest)?;
    let state = saved.nested();
    let other = Guest::new(Chip::Kernel, enters())?;
    equal("not switched on", set_nested(other.vcpu(), &state), Err(Errno(libc::EINVAL)))?;
    other.vcpu().enable_enlightened_vmcs().granted("KVM_ENABLE_CAP")?;
    // Its flag without a VMCS.
    let short = state.with(4, &(HEADER as u32).to_le_bytes());
    equal("no VMCS", set_nested(other.vcpu(), &short), Err(Errno(libc::EINVAL)))
}

/// Turns of one guest while another thread makes words of its page wrong and right again, or until it dies.
fn runs_while_the_page_changes(guest: &Guest, dice: &mut u64, tally: &mut Tally) -> Outcome {
    const WORDS: u64 = 125;
    let good = guest.memory.read_bytes(PAGE, 4096);
    let (stop, watched) = (&AtomicBool::new(false), &Watched::new());
    let roll = move |seed: &mut u64| {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    };
    let mut seed = roll(dice);
    thread::scope(|scope| {
        scope.spawn(move || {
            while !stop.load(Ordering::SeqCst) {
                let at = 8 + roll(&mut seed) % (WORDS - 1) * 8;
                let right =
                    u64::from_le_bytes(good[at as usize..][..8].try_into().unwrap_or_default());
                let wrong = match seed >> 32 & 3 {
                    0 => seed,
                    1 => 0,
                    _ => right ^ 1 << (seed >> 40 & 63),
                };
                guest.memory.write(PAGE + at, wrong);
                thread::yield_now();
                guest.memory.write(PAGE + at, right);
            }
        });
        scope.spawn(|| look_after(&[watched]));
        watched.is_me();
        let mut turns = || {
            for round in 0..40 {
                guest.memory.write(ARGUMENT, if round % 8 == 0 { FILL } else { 0 });
                let end = turn(guest.vcpu())?;
                watched.turned();
                match end {
                    Turn::Mark => {
                        tally.count(format!("{:x} {:x}", guest.result(0), guest.result(1)));
                    }
                    Turn::Passing => tally.count("passing"),
                    Turn::Dies(how) => {
                        tally.count(how);
                        break;
                    }
                }
                thread::yield_now();
            }
            Ok(())
        };
        let outcome = turns();
        watched.end();
        stop.store(true, Ordering::SeqCst);
        outcome
    })
}

fn a_page_that_another_thread_rewrites_is_entered_or_refused() -> Outcome {
    let (mut tally, mut dice) = (Tally::default(), 0x1234_5678_9abc_def1);
    for _ in 0..20 {
        let guest = with(enters(), &L2_CPUID)?;
        guest.reach_mark()?;
        exits(&guest, FILL)?;
        runs_while_the_page_changes(&guest, &mut dice, &mut tally)?;
    }
    tally.tell("entries");
    let good = tally.of(&format!("{EXITED:x} {EXIT_CPUID:x}"));
    holds("entries that exit", good > 10, &tally)
}
