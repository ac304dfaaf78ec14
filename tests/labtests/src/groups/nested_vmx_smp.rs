//! Hypervisors on several vCPUs that mean harm, or whose VMM does: VMCSs, and the pages that they name, which change or
//! go while L2 is entered and runs; one VMCS on two vCPUs; tables that two vCPUs share.
//!
//! SDM vol. 3C §24.11.4 (software must not touch a VMCS in memory: what comes of it is not said), §27.2, §27.7 (aborts).

use super::nested_vmx::{EXIT_CPUID, EXITED, L2_CODE, ZERO, filled, must, operation, set_fields};
use super::nested_vmx_ept::TABLE;
use crate::machine::code::{guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::{Memory, PAGE};
use crate::machine::storm::drives::{COPIES_TEMPLATE, GOES, Going, Kind, ORDERS, POINTER};
use crate::machine::storm::shootdown::shoots_down;
use crate::machine::storm::{Scribble, words_of};
use crate::outcome::{Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx_smp":
    a_vmcs_that_another_vcpu_rewrites_is_entered_or_refused,
    pages_of_a_vmcs_that_another_vcpu_rewrites_are_used_or_refused,
    one_vmcs_is_current_on_two_vcpus,
    a_vmcs_whose_slot_goes_and_comes_while_l2_runs,
    an_msr_bitmap_whose_slot_goes_and_comes_while_l2_runs,
    ept_tables_whose_slot_goes_and_comes_while_l2_runs,
    both_l2s_read_by_an_entry_that_one_changes,
);

/// The VMCS, and what is copied over it before each round: by pages.
const VMCS: u64 = FREE + 0x1000;
const TEMPLATE: u64 = FREE + 0x2000;
const MSR_BITMAP: u64 = FREE + 0x4000;
const PORT_BITMAPS: u64 = FREE + 0x5000;
const VIRTUAL_APIC: u64 = FREE + 0x7000;
/// Three lists of two MSRs each, 1 KiB apart.
const LISTS: u64 = FREE + 0x9000;
/// The tables of [`super::nested_vmx_ept`].
const TOP: u64 = FREE + 0xa000;
const POINTERS: u64 = FREE + 0xb000;
const DIRECTORY: u64 = FREE + 0xc000;
const LEAF: u64 = 0x37;
/// What is right in pages that are rewritten.
const COPIES: u64 = FREE + 0x6_0000;
/// The program of a vCPU that finds all prepared.
const JOIN: u64 = FREE + 0x7_0000;

const L1: Kind = Kind { join: JOIN, good: (EXITED, EXIT_CPUID), words: in_words };

/// For ever: clears the VMCS, marks, has translations dropped if it is to, makes the VMCS current, launches it and resumes
/// it seven times, unless that fails. R15 is the page of the vCPU's stack, whose first words it uses.
macro_rules! entering {
    () => {
        "0: mov %rsp, %r15; and $-0x1000, %r15; lock incq 48(%r15); mov (%r15), %rdi; mov %rdi, (%rsp); \
         vmclear (%rsp); testq $1, 8(%r15); jz 1f; mov $FREE + 0x2000, %esi; mov $512, %ecx; rep movsq; \
         1: out %al, $PORT_MARK; testq $2, 8(%r15); jz 1f; \
         movq $0, 8(%rsp); movq $0, 16(%rsp); mov $2, %eax; invept 8(%rsp), %rax; \
         1: vmptrld (%rsp); jbe 6f; \
         mov $0x6c14, %edx; vmwrite %rsp, %rdx; mov $0x6c16, %edx; lea 5f(%rip), %rax; vmwrite %rax, %rdx; \
         movq $8, 40(%r15); vmlaunch; jmp 6f; \
         5: mov %rsp, %r15; and $-0x1000, %r15; lock incq 56(%r15); movq $0x200, 16(%r15); \
         mov $0x4402, %edx; vmread %rdx, %rax; mov %rax, 24(%r15); bt $31, %eax; jc 0b; \
         decq 40(%r15); jz 0b; testq $1, 40(%r15); jz 1f; \
         mov $0x681e, %edx; mov $FREE + 0x8000, %eax; vmwrite %rax, %rdx; 1: vmresume; \
         6: pushf; pop %rax; and $0x41, %eax; mov %rsp, %r15; and $-0x1000, %r15; mov %rax, 16(%r15); \
         mov $0x4400, %edx; xor %eax, %eax; vmread %rdx, %rax; mov %rax, 24(%r15); jmp 0b"
    };
}

guest_code!(
    // Makes the template, then as above.
    enters,
    64,
    operation!(),
    "out %al, $PORT_MARK",
    filled!(),
    "movq $FREE + 0x1000, (%rsp); vmclear (%rsp)",
    "mov $FREE + 0x1000, %esi; mov $FREE + 0x2000, %edi; mov $512, %ecx; rep movsq",
    entering!(),
);

guest_code!(
    // In a VMXON region that is there, then as above.
    joins,
    64,
    "mov %cr0, %rax; or $0x20, %rax; mov %rax, %cr0; mov %cr4, %rax; or $1 << 13, %rax; mov %rax, %cr4",
    "mov $0x3a, %ecx; rdmsr; test $1, %al; jnz 2f; mov $5, %eax; xor %edx, %edx; wrmsr; 2:",
    "sub $32, %rsp; movq $FREE, (%rsp); vmxon (%rsp)",
    entering!(),
);

guest_code!(
    // What L2 does: an MSR, CR8, memory, a port, some time, CPUID.
    of_l2,
    64,
    "mov $0xc0000102, %ecx; rdmsr",
    "mov %cr8, %rax; mov %rax, %cr8",
    "mov FREE + 0xe000, %rax",
    "mov %rax, FREE + 0xe008",
    "out %al, $0x80",
    "mov $40, %ecx",
    "1: pause; dec %ecx; jnz 1b",
    "cpuid",
    "hlt",
);

/// What L1 may set in controls of which `msr` tells.
fn offered(guest: &Guest, msr: u32, bits: u64) -> Outcome<u64> {
    let allowed = guest.vcpu().msr(msr)?.unwrap_or(0) >> 32;
    Ok(must(guest, msr)? | bits & allowed)
}

/// A guest whose hypervisor has made the template of a VMCS that names all pages, before its first launch.
fn prepared(chip: Chip, vcpus: u32, tables: [u64; 4], bitmap: u64) -> Outcome<Guest> {
    let guest = Guest::with_vcpus(chip, Mode::Long, vcpus, enters())?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if cpuid.find(1, 0).is_none_or(|entry| entry.ecx & 1 << 5 == 0) {
        return skip("no VMX in KVM_GET_SUPPORTED_CPUID");
    }
    if guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 33 & 1 == 0 {
        return skip("no EPT for hypervisors in the guest");
    }
    guest.memory.write_bytes(L2_CODE, of_l2());
    guest.memory.write_bytes(JOIN, joins());
    write_tables(&guest.memory, 0, IN_MEMORY, 0);
    for list in (LISTS..).step_by(0x400).take(3) {
        guest.memory.write(list, 0xc000_0102);
        guest.memory.write(list + 16, 0x176);
    }
    // MSR and port bitmaps, a TPR shadow, secondary controls with EPT.
    let primary = offered(&guest, 0x482, 1 << 31 | 1 << 28 | 1 << 25 | 1 << 21)?;
    guest.memory.write(words_of(0) + POINTER, VMCS);
    guest.reach_mark()?;
    set_fields(
        &guest,
        &[
            (0x4002, primary),
            (0x401e, 2),
            (0x201a, tables[0] | 0x1e),
            (0x2000, PORT_BITMAPS),
            (0x2002, PORT_BITMAPS + PAGE),
            (0x2004, bitmap),
            (0x2012, VIRTUAL_APIC),
            (0x4014, 2),
            (0x200a, LISTS),
            (0x400e, 2),
            (0x2006, LISTS + 0x400),
            (0x4010, 2),
            (0x2008, LISTS + 0x800),
            // Interrupts enabled: else the emulated CPU does not leave L2 for the host's.
            (0x6820, 0x202),
        ],
    );
    // The template is there.
    guest.reach_mark()?;
    Ok(guest)
}

/// Tables at these addresses, in `memory` that begins at `base`, that lead all of the first 2 MiB to itself, but for one
/// page that leads `beyond` its own.
fn write_tables(memory: &Memory, base: u64, at: [u64; 4], beyond: u64) {
    for level in 0..3 {
        memory.write(at[level] - base, at[level + 1] | 7);
    }
    for page in 0..512 {
        memory.write(at[3] - base + 8 * page, page << 12 | LEAF);
    }
    let data = FREE + 0xe000;
    memory.write(at[3] - base + (data >> 12) * 8, (data + beyond) | LEAF);
}

const IN_MEMORY: [u64; 4] = [TOP, POINTERS, DIRECTORY, TABLE];

/// What came of an entry, if it is something that the manual knows.
fn in_words(result: (u64, u64)) -> Option<String> {
    match result {
        (EXITED, reason @ 0..70) => Some(format!("exit {reason}")),
        (EXITED, reason @ 0x8000_0000..0x8000_0046) => {
            Some(format!("failed entry {}", reason & 0x7f))
        }
        (0 | 1, _) => Some("no VMCS".into()),
        (ZERO, error @ 1..=28) => Some(format!("error {error}")),
        _ => None,
    }
}

/// Rounds of the first vCPU while the second rewrites `pages`, which are well now.
fn rewritten(pages: [Scribble; 8], seed: u64) -> Outcome {
    let guest = prepared(Chip::None, 2, IN_MEMORY, MSR_BITMAP)?;
    for (page, right, _) in pages {
        let aligned = |at: u64| at & !(PAGE - 1);
        if right >= COPIES {
            let bytes = guest.memory.read_bytes(aligned(page), PAGE as usize);
            guest.memory.write_bytes(aligned(right), &bytes);
        }
    }
    L1.is_rewritten(&guest, pages, seed)
}

fn a_vmcs_that_another_vcpu_rewrites_is_entered_or_refused() -> Outcome {
    // All that has a meaning lies in the page's first kilobyte.
    for seed in [0x1234_5678_9abc_def1, 0x0bad_cafe_0bad_cafe] {
        rewritten([(VMCS, TEMPLATE, 0x3f8); 8], seed)?;
    }
    Ok(())
}

fn pages_of_a_vmcs_that_another_vcpu_rewrites_are_used_or_refused() -> Outcome {
    let copy = |n: u64| COPIES + n * PAGE;
    let pages = [
        (MSR_BITMAP + 0x400, copy(0) + 0x400, 0x38),
        (PORT_BITMAPS, copy(1), 0x38),
        (VIRTUAL_APIC, copy(2), 0x3f8),
        (LISTS, copy(3), 0xc18),
        (LISTS, copy(3), 0xc18),
        (TABLE, copy(4), 0x1f8),
        (DIRECTORY, copy(5), 0x38),
        (TOP, copy(6), 0x38),
    ];
    rewritten(pages, 0xfeed_beef_dead_f00d)
}

fn one_vmcs_is_current_on_two_vcpus() -> Outcome {
    let guest = prepared(Chip::None, 2, IN_MEMORY, MSR_BITMAP)?;
    guest.memory.write(words_of(1) + POINTER, VMCS);
    // The other one has launched it: what it wrote there last says so.
    L1.on_two_vcpus(&guest, &[L1.good, (ZERO, 4), (0, 0)])
}

fn a_vmcs_whose_slot_goes_and_comes_while_l2_runs() -> Outcome {
    let guest = prepared(Chip::None, 1, IN_MEMORY, MSR_BITMAP)?;
    let template = guest.memory.read_bytes(TEMPLATE, PAGE as usize);
    guest.memory.write(words_of(0) + POINTER, GOES);
    guest.memory.write(words_of(0) + ORDERS, 0);
    let write = |memory: &Memory, _| memory.write_bytes(0, &template);
    L1.goes_and_comes(&guest, &Going { pages: 1, write: &write, check: &|_, _| Ok(()) })
}

fn an_msr_bitmap_whose_slot_goes_and_comes_while_l2_runs() -> Outcome {
    let guest = prepared(Chip::None, 1, IN_MEMORY, GOES)?;
    guest.memory.write(words_of(0) + ORDERS, COPIES_TEMPLATE);
    let write = |memory: &Memory, _| memory.write_bytes(0, &[0; PAGE as usize]);
    L1.goes_and_comes(&guest, &Going { pages: 1, write: &write, check: &|_, _| Ok(()) })
}

fn ept_tables_whose_slot_goes_and_comes_while_l2_runs() -> Outcome {
    let at: [u64; 4] = std::array::from_fn(|level| GOES + level as u64 * PAGE);
    let guest = prepared(Chip::None, 1, at, MSR_BITMAP)?;
    guest.memory.write(words_of(0) + ORDERS, COPIES_TEMPLATE);
    // Where L2 loads from, and where it stores to.
    let frame = |index: usize| FREE + 0xe000 + index as u64 * PAGE;
    (0..2).for_each(|index| guest.memory.write(frame(index), 0x1111 * (index as u64 + 1)));
    let write = |memory: &Memory, index| write_tables(memory, GOES, at, index as u64 * PAGE);
    let check = |guest: &Guest, index: usize| {
        let stored = guest.memory.read(frame(index) + 8);
        (0..2).for_each(|index| guest.memory.write(frame(index) + 8, 0));
        equal("what L2 stored", stored, 0x1111 * (index as u64 + 1))
    };
    L1.goes_and_comes(&guest, &Going { pages: 4, write: &write, check: &check })
}

/// Code of the vCPU that changes a table and of the one that is told, and of their guests.
const CHANGER: u64 = FREE + 0x7_1000;
const TOLD: u64 = FREE + 0x7_2000;
const L2_OF_CHANGER: u64 = FREE + 0x7_3000;
const L2_OF_TOLD: u64 = FREE + 0x7_4000;
/// The VMCS of the second, a table beside the last one, and the data.
const SECOND_VMCS: u64 = FREE + 0x6_5000;
const OTHER_TABLE: u64 = FREE + 0x6_6000;
const DATA: u64 = FREE + 0xe000;

guest_code!(
    // Each round changes the entry, drops what it leads to, has its own L2 read through it, tells the other vCPU by an
    // interrupt, waits until that has dropped it too, and looks at what L2 reads there. R12 is the round, R13 whether the
    // VMCS is launched, RBP leads to the words that both share.
    changes,
    64,
    "xor %r12d, %r12d; xor %r13d, %r13d",
    x2apic!(),
    "vmptrld (%rsp)",
    "mov $0x6c14, %edx; vmwrite %rsp, %rdx; mov $0x6c16, %edx; lea 5f(%rip), %rax; vmwrite %rax, %rdx",
    "mov $FREE + 0x64000, %ebp",
    // The other's local APIC is on when its L2 runs.
    "0: pause; cmpq $0, 24(%rbp); je 0b",
    "1: inc %r12; mov %r12d, %ebx; and $1, %ebx",
    "mov 48(%rbp), %rdi; mov 56(%rbp,%rbx,8), %rax; mov %rax, (%rdi)",
    "movq $0, 8(%rsp); movq $0, 16(%rsp); mov $2, %eax; invept 8(%rsp), %rax",
    "mov $0x681e, %edx; mov $FREE + 0x73000, %eax; vmwrite %rax, %rdx",
    "test %r13d, %r13d; jnz 2f; inc %r13d; vmlaunch; jmp 7f; 2: vmresume; jmp 7f",
    "5: mov $0x4402, %edx; vmread %rdx, %rax; cmp $10, %eax; jne 7f",
    "mov 32(%rbp), %rax; cmp 72(%rbp,%rbx,8), %rax; jne 7f",
    "mov %r12, (%rbp)",
    "mov $0x830, %ecx; mov $0x4058, %eax; mov $1, %edx; wrmsr",
    "3: pause; cmp %r12, 8(%rbp); jne 3b",
    "mov 24(%rbp), %rdi; add $2, %rdi",
    "4: pause; cmp %rdi, 24(%rbp); jb 4b",
    "mov 16(%rbp), %rax; cmp 72(%rbp,%rbx,8), %rax; jne 7f",
    "cmp 40(%rbp), %r12; jb 1b",
    "xor %eax, %eax; mov %rax, 88(%rbp); out %al, $PORT_DONE",
    "7: mov %rax, 88(%rbp); mov %r12, 96(%rbp); out %al, $PORT_DONE; hlt",
);

guest_code!(
    // Lets its L2 run; an interrupt ends that, is taken, has all translations dropped and is answered.
    is_told,
    64,
    x2apic!(),
    "mov %cr0, %rax; or $0x20, %rax; mov %rax, %cr0; mov %cr4, %rax; or $1 << 13, %rax; mov %rax, %cr4",
    "mov $0x3a, %ecx; rdmsr; test $1, %al; jnz 2f; mov $5, %eax; xor %edx, %edx; wrmsr; 2:",
    "sub $32, %rsp; movq $FREE, (%rsp); vmxon (%rsp); movq $FREE + 0x65000, (%rsp); vmptrld (%rsp)",
    "mov $0x6c14, %edx; vmwrite %rsp, %rdx; mov $0x6c16, %edx; lea 5f(%rip), %rax; vmwrite %rax, %rdx",
    "mov $0x681e, %edx; mov $FREE + 0x74000, %eax; vmwrite %rax, %rdx",
    "mov $0x681c, %edx; lea -512(%rsp), %rax; vmwrite %rax, %rdx",
    "mov $0x4000, %edx; vmread %rdx, %rax; or $1, %eax; vmwrite %rax, %rdx",
    "vmlaunch; jmp 7f",
    "5: mov $FREE + 0x64000, %ebp",
    "mov $0x4402, %edx; vmread %rdx, %rax; cmp $1, %eax; jne 7f",
    "sti; nop; nop; cli",
    "movq $0, 8(%rsp); movq $0, 16(%rsp); mov $2, %eax; invept 8(%rsp), %rax",
    "mov (%rbp), %rax; mov %rax, 8(%rbp)",
    "vmresume",
    "7: mov $FREE + 0x64000, %ebp; or $0x1000, %eax; mov %rax, 104(%rbp); out %al, $PORT_DONE; hlt",
);

guest_code!(l2_of_changer, 64, "mov FREE + 0xe000, %rax; mov %rax, FREE + 0x64020; cpuid; hlt");

guest_code!(
    l2_of_told,
    64,
    "1: mov FREE + 0xe000, %rax; mov %rax, FREE + 0x64010; lock incq FREE + 0x64018; pause; jmp 1b",
);

/// Both vCPUs' L2s read `DATA` through the same tables, of which the first changes `entry` to and fro.
fn shot_down(entry: u64, values: [u64; 2]) -> Outcome {
    let guest = &prepared(Chip::Kernel, 2, IN_MEMORY, MSR_BITMAP)?;
    let memory = &guest.memory;
    write_tables(memory, 0, [FREE + 0x6_7000, FREE + 0x6_8000, FREE + 0x6_9000, OTHER_TABLE], PAGE);
    memory.write_bytes(SECOND_VMCS, &memory.read_bytes(TEMPLATE, PAGE as usize));
    for (at, code) in [
        (CHANGER, changes()),
        (TOLD, is_told()),
        (L2_OF_CHANGER, l2_of_changer()),
        (L2_OF_TOLD, l2_of_told()),
    ] {
        memory.write_bytes(at, code);
    }
    shoots_down(guest, [CHANGER, TOLD], (entry, values), [DATA, DATA + PAGE])
}

fn both_l2s_read_by_an_entry_that_one_changes() -> Outcome {
    shot_down(TABLE + (DATA >> 12) * 8, [DATA | LEAF, (DATA + PAGE) | LEAF])?;
    shot_down(DIRECTORY, [TABLE | 7, OTHER_TABLE | 7])
}
