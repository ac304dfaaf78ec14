//! Hypervisors on several vCPUs that mean harm, or whose VMM does: control blocks, and the pages that they name, which
//! change or go while L2 is entered and runs; one block on two vCPUs.
//!
//! APM vol. 2 §15.5 (a VMCB in use must not be changed: what comes of it is not said).

use super::nested_svm::{BLOCK, EXIT_CPUID, EXIT_INVALID, L2_CODE, prepared};
use crate::machine::code::{guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::{Memory, PAGE};
use crate::machine::storm::drives::{COPIES_TEMPLATE, GOES, Going, Kind, ORDERS, POINTER};
use crate::machine::storm::shootdown::shoots_down;
use crate::machine::storm::{Scribble, words_of};
use crate::oracle::{is_stock, kernel};
use crate::outcome::{Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_svm_smp":
    a_block_that_another_vcpu_rewrites_at_random_is_run_or_refused,
    pages_of_a_block_that_another_vcpu_rewrites_are_used_or_refused,
    one_block_is_run_by_two_vcpus,
    a_block_whose_slot_goes_and_comes_while_l2_runs,
    an_msr_map_whose_slot_goes_and_comes_while_l2_runs,
    nested_tables_whose_slot_goes_and_comes_while_l2_runs,
    both_l2s_of_svm_read_by_an_entry_that_one_changes,
);

/// The host's save area, the maps of MSRs and ports, and what is copied over the block before each round: by pages.
const SAVE_AREA: u64 = FREE + 0x1000;
const MAPS: u64 = FREE + 0x2000;
const TEMPLATE: u64 = FREE + 0x5000;
/// The nested tables, one of each level, and the pages that L2 loads from and stores to.
const IN_MEMORY: [u64; 4] = [FREE + 0xa000, FREE + 0xb000, FREE + 0xc000, FREE + 0xd000];
const DATA: u64 = FREE + 0xe000;
/// What is right in pages that are rewritten.
const COPIES: u64 = FREE + 0x6_8000;
/// The program of a vCPU that finds all prepared.
const JOIN: u64 = FREE + 0x7_0000;

/// The result of an entry that has come back, as [`drives`](crate::machine::storm::drives) has it.
const CAME_BACK: u64 = 0x200;
const L1: Kind = Kind { join: JOIN, good: (CAME_BACK, EXIT_CPUID), words: in_words };

/// For ever: marks, runs the block and runs it again seven times. R15 is the page of the vCPU's stack, whose first words
/// it uses.
macro_rules! entering {
    () => {
        "0: mov %rsp, %r15; and $-0x1000, %r15; lock incq 48(%r15); mov (%r15), %rdi; \
         testq $1, 8(%r15); jz 1f; mov $FREE + 0x5000, %esi; mov $512, %ecx; rep movsq; \
         1: out %al, $PORT_MARK; movq $8, 40(%r15); \
         2: mov (%r15), %rax; vmrun; \
         mov %rsp, %r15; and $-0x1000, %r15; lock incq 56(%r15); movq $0x200, 16(%r15); \
         mov (%r15), %rdx; mov 0x70(%rdx), %rax; mov %rax, 24(%r15); \
         decq 40(%r15); jz 0b; testq $1, 40(%r15); jz 2b; \
         movq $FREE + 0x8000, 0x578(%rdx); jmp 2b"
    };
}

guest_code!(
    // Makes the template, then as above.
    enters,
    64,
    prepared!(),
    "out %al, $PORT_MARK",
    "mov $FREE, %esi; mov $FREE + 0x5000, %edi; mov $512, %ecx; rep movsq",
    "sub $32, %rsp",
    entering!(),
);

guest_code!(
    // With SVM on and a save area of its own, as above.
    joins,
    64,
    "mov $0xc0000080, %ecx; rdmsr; or $1 << 12, %eax; wrmsr",
    "sub $32, %rsp; mov %rsp, %rax; and $-0x1000, %rax; add $FREE + 0x60000 - 0x1c000, %eax",
    "mov $0xc0010117, %ecx; xor %edx, %edx; wrmsr",
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

/// What came of an entry, if it is something that the manual knows.
fn in_words(result: (u64, u64)) -> Option<String> {
    match result {
        (CAME_BACK, EXIT_INVALID) => Some("refused".into()),
        // The emulated CPU tells a refusal with 32 bits; Gannet does not leave it to that.
        (CAME_BACK, 0xffff_ffff) if is_stock() => Some("refused by the CPU".into()),
        (CAME_BACK, code @ 0..=0x403) => Some(format!("exit {code:#x}")),
        (0, 0) => Some("nothing".into()),
        _ => None,
    }
}

/// Tables at these addresses, in `memory` that begins at `base`, that lead all of the first 2 MiB to itself, but for one
/// page that leads `beyond` its own.
fn write_tables(memory: &Memory, base: u64, at: [u64; 4], beyond: u64) {
    for level in 0..3 {
        memory.write(at[level] - base, at[level + 1] | 7);
    }
    for page in 0..512 {
        memory.write(at[3] - base + 8 * page, page << 12 | 7);
    }
    memory.write(at[3] - base + (DATA >> 12) * 8, (DATA + beyond) | 7);
}

/// A guest whose hypervisor has made the template of a block that names all pages, before its first VMRUN.
fn ready(chip: Chip, vcpus: u32, tables: [u64; 4], map: u64) -> Outcome<Guest> {
    // Those that mean harm are the ones without an interrupt controller.
    if chip == Chip::None && is_stock() && kernel() < (6, 12) {
        return skip("stock KVM 6.1 has a warning in the host's log (nested_svm_vmexit)");
    }
    let guest = Guest::with_vcpus(chip, Mode::Long, vcpus, enters())?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if cpuid.find(0x8000_0001, 0).is_none_or(|entry| entry.ecx & 1 << 2 == 0) {
        return skip("no SVM in KVM_GET_SUPPORTED_CPUID");
    }
    let nested_paging = cpuid.find(0x8000_000a, 0).is_some_and(|entry| entry.edx & 1 != 0);
    guest.memory.write_bytes(L2_CODE, of_l2());
    guest.memory.write_bytes(JOIN, joins());
    write_tables(&guest.memory, 0, IN_MEMORY, 0);
    guest.memory.write(words_of(0) + POINTER, BLOCK);
    guest.reach_mark()?;
    // CPUID, what the maps say of ports and MSRs, shutdown.
    let intercepts: u32 = 1 << 18 | 1 << 27 | 1 << 28 | 1 << 31;
    guest.memory.write_bytes(BLOCK + 0xc, &intercepts.to_le_bytes());
    guest.memory.write(BLOCK + 0x48, map);
    if nested_paging {
        guest.memory.write(BLOCK + 0x90, 1);
        guest.memory.write(BLOCK + 0xb0, tables[0]);
    } else if tables != IN_MEMORY {
        return skip("no nested paging in KVM_GET_SUPPORTED_CPUID");
    }
    // The template is there.
    guest.reach_mark()?;
    Ok(guest)
}

/// Rounds of the first vCPU while the second rewrites `pages`, which are well now.
fn rewritten(pages: [Scribble; 8], seed: u64) -> Outcome {
    let guest = ready(Chip::None, 2, IN_MEMORY, MAPS)?;
    // Each VMRUN drops all translations.
    guest.memory.write(TEMPLATE + 0x58, 1 | 1 << 32);
    for (page, right, _) in pages {
        let aligned = |at: u64| at & !(PAGE - 1);
        if right >= COPIES {
            let bytes = guest.memory.read_bytes(aligned(page), PAGE as usize);
            guest.memory.write_bytes(aligned(right), &bytes);
        }
    }
    L1.is_rewritten(&guest, pages, seed)
}

fn a_block_that_another_vcpu_rewrites_at_random_is_run_or_refused() -> Outcome {
    let (control, saved, all) = (0xf8, 0x2f8, 0x7f8);
    let (at, right) = (BLOCK + 0x400, TEMPLATE + 0x400);
    let pages = [
        (BLOCK, TEMPLATE, control),
        (BLOCK, TEMPLATE, control),
        (BLOCK, TEMPLATE, control),
        (at, right, saved),
        (at, right, saved),
        (at, right, saved),
        (BLOCK, TEMPLATE, all),
        (BLOCK, TEMPLATE, all),
    ];
    for seed in [0x1234_5678_9abc_def1, 0x0bad_cafe_0bad_cafe] {
        rewritten(pages, seed)?;
    }
    Ok(())
}

fn pages_of_a_block_that_another_vcpu_rewrites_are_used_or_refused() -> Outcome {
    let copy = |n: u64| COPIES + n * PAGE;
    let [top, pointers, directory, leaves] = IN_MEMORY;
    let pages = [
        (MAPS, copy(0), 0x38),
        (MAPS + 0x800, copy(0) + 0x800, 0x78),
        (MAPS + PAGE, copy(1), 0xff8),
        (SAVE_AREA, copy(2), 0xff8),
        (leaves, copy(3), 0x1f8),
        (directory, copy(4), 0x38),
        (pointers, copy(5), 0x38),
        (top, copy(6), 0x38),
    ];
    rewritten(pages, 0xfeed_beef_dead_f00d)
}

fn one_block_is_run_by_two_vcpus() -> Outcome {
    let guest = ready(Chip::None, 2, IN_MEMORY, MAPS)?;
    guest.memory.write(words_of(1) + POINTER, BLOCK);
    L1.on_two_vcpus(&guest, &[L1.good, (0, 0)])
}

fn a_block_whose_slot_goes_and_comes_while_l2_runs() -> Outcome {
    let guest = ready(Chip::None, 1, IN_MEMORY, MAPS)?;
    let template = guest.memory.read_bytes(TEMPLATE, PAGE as usize);
    guest.memory.write(words_of(0) + POINTER, GOES);
    let write = |memory: &Memory, _| memory.write_bytes(0, &template);
    L1.goes_and_comes(&guest, &Going { pages: 1, write: &write, check: &|_, _| Ok(()) })
}

fn an_msr_map_whose_slot_goes_and_comes_while_l2_runs() -> Outcome {
    let guest = ready(Chip::None, 1, IN_MEMORY, GOES)?;
    guest.memory.write(words_of(0) + ORDERS, COPIES_TEMPLATE);
    let write = |memory: &Memory, _| memory.write_bytes(0, &[0; 2 * PAGE as usize]);
    L1.goes_and_comes(&guest, &Going { pages: 2, write: &write, check: &|_, _| Ok(()) })
}

fn nested_tables_whose_slot_goes_and_comes_while_l2_runs() -> Outcome {
    let at: [u64; 4] = std::array::from_fn(|level| GOES + level as u64 * PAGE);
    let guest = ready(Chip::None, 1, at, MAPS)?;
    guest.memory.write(words_of(0) + ORDERS, COPIES_TEMPLATE);
    // Where L2 loads from, and where it stores to.
    let frame = |index: usize| DATA + index as u64 * PAGE;
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
/// The block of the second, and a table beside the last one.
const SECOND_BLOCK: u64 = FREE + 0x6_5000;
const OTHER_TABLE: u64 = FREE + 0x6_6000;

guest_code!(
    // Each round changes the entry, drops what it leads to, has its own L2 read through it, tells the other vCPU by an
    // interrupt, waits until that has dropped it too, and looks at what L2 reads there. R12 is the round, RBP leads to the
    // words that both share.
    changes,
    64,
    "xor %r12d, %r12d",
    x2apic!(),
    "mov $FREE + 0x64000, %ebp",
    // The other's local APIC is on when its L2 runs.
    "0: pause; cmpq $0, 24(%rbp); je 0b",
    "1: inc %r12; mov %r12d, %ebx; and $1, %ebx",
    "mov 48(%rbp), %rdi; mov 56(%rbp,%rbx,8), %rax; mov %rax, (%rdi)",
    "mov $FREE + 0xe000, %eax; mov $1, %ecx; invlpga",
    "movq $FREE + 0x73000, FREE + 0x578; mov $FREE, %eax; vmrun",
    "mov FREE + 0x70, %rax; cmp $0x72, %rax; jne 7f",
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
    // Lets its L2 run; an interrupt ends that, is taken, has the translation dropped and is answered.
    is_told,
    64,
    x2apic!(),
    "mov $0xc0000080, %ecx; rdmsr; or $1 << 12, %eax; wrmsr",
    "mov $0xc0010117, %ecx; mov $FREE + 0x60000, %eax; xor %edx, %edx; wrmsr",
    "mov $FREE + 0x64000, %ebp",
    "lea -512(%rsp), %rax; mov %rax, FREE + 0x65000 + 0x5d8",
    "clgi; sti",
    "1: mov $FREE + 0x65000, %eax; vmrun",
    "mov FREE + 0x65000 + 0x70, %rax; cmp $0x60, %rax; jne 7f",
    "stgi; nop; nop; clgi",
    "mov $FREE + 0xe000, %eax; mov $1, %ecx; invlpga",
    "mov (%rbp), %rax; mov %rax, 8(%rbp)",
    "jmp 1b",
    "7: or $0x1000, %rax; mov %rax, 104(%rbp); out %al, $PORT_DONE; hlt",
);

guest_code!(l2_of_changer, 64, "mov FREE + 0xe000, %rax; mov %rax, FREE + 0x64020; cpuid; hlt");

guest_code!(
    l2_of_told,
    64,
    "1: mov FREE + 0xe000, %rax; mov %rax, FREE + 0x64010; lock incq FREE + 0x64018; pause; jmp 1b",
);

/// Both vCPUs' L2s read `DATA` through the same tables, of which the first changes `entry` to and fro. `flush`: what each
/// VMRUN drops besides.
fn shot_down(entry: u64, values: [u64; 2], flush: u64) -> Outcome {
    let guest = &ready(Chip::Kernel, 2, IN_MEMORY, MAPS)?;
    let memory = &guest.memory;
    if memory.read(BLOCK + 0x90) == 0 {
        return skip("no nested paging in KVM_GET_SUPPORTED_CPUID");
    }
    let levels = [FREE + 0x6_7000, FREE + 0x6_8000, FREE + 0x6_9000, OTHER_TABLE];
    write_tables(memory, 0, levels, PAGE);
    memory.write(BLOCK + 0x58, 1 | flush << 32);
    memory.write_bytes(SECOND_BLOCK, &memory.read_bytes(BLOCK, PAGE as usize));
    memory.write(SECOND_BLOCK + 0x578, L2_OF_TOLD);
    memory.write_bytes(SECOND_BLOCK + 0xc, &(1_u32 << 18 | 1).to_le_bytes());
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

fn both_l2s_of_svm_read_by_an_entry_that_one_changes() -> Outcome {
    const ALL: u64 = 1;
    let [_, _, directory, leaves] = IN_MEMORY;
    let leaf = leaves + (DATA >> 12) * 8;
    shot_down(leaf, [DATA | 7, (DATA + PAGE) | 7], 0)?;
    shot_down(leaf, [DATA | 7, (DATA + PAGE) | 7], ALL)?;
    shot_down(directory, [leaves | 7, OTHER_TABLE | 7], ALL)
}
