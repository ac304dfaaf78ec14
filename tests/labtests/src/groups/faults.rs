//! What a guest does wrong, and the exception or exit that it gets (APM vol. 2 §8).

use crate::kvm::exit::Exit;
use crate::machine::code::{done, guarded, guest_code};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::tables;
use crate::oracle;
use crate::outcome::{Outcome, equal, fail, holds, one_of, skip};
use crate::runner::tests;

tests!("faults":
    a_triple_fault_shuts_down,
    a_triple_fault_in_real_mode_shuts_down,
    a_vcpu_that_shut_down_can_start_again,
    reading_an_unknown_msr_is_a_general_protection_fault,
    writing_an_unknown_msr_is_a_general_protection_fault,
    impossible_values_of_msrs_are_general_protection_faults,
    reserved_bits_of_cr0_are_general_protection_faults,
    reserved_bits_of_cr4_are_general_protection_faults,
    impossible_values_of_xcr0_are_general_protection_faults,
    xgetbv_without_osxsave_is_an_invalid_opcode,
    an_invalid_opcode_is_raised,
    instructions_of_a_hypervisor_are_invalid_opcodes,
    a_breakpoint_continues_behind_it,
    a_division_by_zero_is_a_divide_error,
    a_non_canonical_address_is_a_general_protection_fault,
    the_fpu_is_not_available_while_ts_is_set,
    a_page_fault_tells_reads_from_writes,
    a_page_fault_at_a_reserved_bit_says_so,
    a_page_fault_of_a_fetch_says_so,
    a_page_fault_of_user_mode_says_so,
    user_mode_may_not_use_ports_or_msrs,
    smep_and_smap_hold_the_guests_kernel_back,
    a_jump_to_nowhere_leaves_with_an_error,
    a_store_by_an_unknown_instruction_leaves_with_its_bytes,
    a_load_by_an_unknown_instruction_leaves_with_its_bytes,
    an_error_of_emulation_can_be_repaired_by_user_space,
    page_tables_where_no_memory_is_end_the_run,
);

const BP: u64 = 3;
const DE: u64 = 0;
const UD: u64 = 6;
const NM: u64 = 7;
const GP: u64 = 13;
const PF: u64 = 14;

guest_code!(triple_fault, 64, "movq $0, FREE", "movq $0, FREE + 8", "lidt FREE", "ud2");

fn a_triple_fault_shuts_down() -> Outcome {
    let guest = Guest::new(Chip::None, triple_fault())?;
    guest.expect("exit", Exit::Shutdown)?;
    let guest = Guest::new(Chip::Kernel, triple_fault())?;
    guest.expect("exit with irqchip", Exit::Shutdown)
}

guest_code!(triple_fault_16, 16, "movw $0, 0x8000", "lidt 0x8000", "int $3");

fn a_triple_fault_in_real_mode_shuts_down() -> Outcome {
    let guest = Guest::real(triple_fault_16())?;
    guest.expect("exit", Exit::Shutdown)
}

guest_code!(is_done, 64, done!());

fn a_vcpu_that_shut_down_can_start_again() -> Outcome {
    let guest = Guest::new(Chip::None, triple_fault())?;
    guest.expect("exit", Exit::Shutdown)?;
    guest.memory.write_bytes(PROGRAM, is_done());
    guest.place(0, Mode::Long)?;
    guest.finish()
}

/// Runs guarded instructions that each raise `vector`: RESULT counts what came so far, and
/// `guarded` leaves the last one's frame.
fn each_faults(code: &[u8], faults: u64, vector: u64, error: u64) -> Outcome {
    let guest = Guest::new(Chip::Kernel, code)?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (faults, vector, error))?;
    equal("all of that vector", guest.count(vector as u8), faults)
}

guest_code!(
    read_unknown,
    64,
    "mov $0xdead0000, %ecx",
    "lea 1f(%rip), %rbx",
    "mov %rbx, RESULT",
    "mov $0x1234, %eax",
    guarded!("1: rdmsr"),
    "mov %rax, RESULT + 8",
    done!()
);

fn reading_an_unknown_msr_is_a_general_protection_fault() -> Outcome {
    let guest = Guest::new(Chip::None, read_unknown())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (1, GP, 0))?;
    equal("rip of the frame", guest.memory.read(FRAME_RIP), guest.result(0))?;
    equal("rax", guest.result(1), 0x1234)
}

guest_code!(
    write_unknown,
    64,
    "mov $0xdead0000, %ecx",
    guarded!("wrmsr"),
    "mov $0xc0012345, %ecx",
    guarded!("wrmsr"),
    "mov $0x12345678, %ecx",
    guarded!("wrmsr"),
    done!()
);

fn writing_an_unknown_msr_is_a_general_protection_fault() -> Outcome {
    each_faults(write_unknown(), 3, GP, 0)
}

guest_code!(
    bad_msr_values,
    64,
    // EFER: a reserved bit; LME while paging.
    "mov $0xc0000080, %ecx",
    "rdmsr",
    "or $0x80, %eax",
    guarded!("wrmsr"),
    "rdmsr",
    "btr $8, %eax",
    guarded!("wrmsr"),
    // PAT: a reserved type.
    "mov $0x277, %ecx",
    "mov $2, %eax",
    "xor %edx, %edx",
    guarded!("wrmsr"),
    // APIC_BASE: reserved bits.
    "mov $0x1b, %ecx",
    "rdmsr",
    "or $0x80000000, %edx",
    guarded!("wrmsr"),
    done!()
);

fn impossible_values_of_msrs_are_general_protection_faults() -> Outcome {
    each_faults(bad_msr_values(), 4, GP, 0)
}

/// Three faults; but where the stock module has to emulate the instruction, for want of decode
/// assists, it cuts off the upper half of what the guest writes, and the first is not one.
fn upper_half_and_two_more(code: &[u8]) -> Outcome {
    let guest = Guest::new(Chip::Kernel, code)?;
    guest.finish()?;
    let (faults, vector, error) = guest.faults();
    equal("vector, error code", (vector, error), (GP, 0))?;
    one_of("exceptions", faults, oracle::documented(&[3], &[3, 2]))
}

guest_code!(
    bad_cr0,
    64,
    "mov %cr0, %rax",
    "mov %rax, %r12",
    "mov %rax, %rbx",
    "bts $40, %rbx",
    guarded!("mov %rbx, %cr0"),
    // PG without PE, NW without CD.
    "mov %r12, %rbx",
    "btr $0, %rbx",
    guarded!("mov %rbx, %cr0"),
    "mov %r12, %rbx",
    "bts $29, %rbx",
    guarded!("mov %rbx, %cr0"),
    "mov %cr0, %rax",
    "cmp %r12, %rax",
    "je 1f",
    "ud2",
    "1:",
    done!()
);

fn reserved_bits_of_cr0_are_general_protection_faults() -> Outcome {
    upper_half_and_two_more(bad_cr0())
}

guest_code!(
    bad_cr4,
    64,
    "mov %cr4, %r12",
    "mov %r12, %rbx",
    "bts $40, %rbx",
    guarded!("mov %rbx, %cr4"),
    "mov %r12, %rbx",
    "bts $15, %rbx",
    guarded!("mov %rbx, %cr4"),
    // No PAE in 64-bit mode.
    "mov %r12, %rbx",
    "btr $5, %rbx",
    guarded!("mov %rbx, %cr4"),
    "mov %cr4, %rax",
    "cmp %r12, %rax",
    "je 1f",
    "ud2",
    "1:",
    done!()
);

fn reserved_bits_of_cr4_are_general_protection_faults() -> Outcome {
    upper_half_and_two_more(bad_cr4())
}

guest_code!(
    bad_xcr0,
    64,
    "mov %cr4, %rax",
    "bts $18, %rax",
    "mov %rax, %cr4",
    "xor %ecx, %ecx",
    "xor %edx, %edx",
    "mov $3, %eax",
    "xsetbv",
    "xgetbv",
    "mov %rax, RESULT",
    // No x87; AVX without SSE; an unknown component.
    "mov $2, %eax",
    guarded!("xsetbv"),
    "mov $5, %eax",
    guarded!("xsetbv"),
    "mov $3, %eax",
    "mov $0x40000000, %edx",
    guarded!("xsetbv"),
    // No such register.
    "xor %edx, %edx",
    "mov $1, %ecx",
    guarded!("xsetbv"),
    "xor %ecx, %ecx",
    "xgetbv",
    "mov %rax, RESULT + 8",
    done!()
);

fn impossible_values_of_xcr0_are_general_protection_faults() -> Outcome {
    let guest = Guest::new(Chip::None, bad_xcr0())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (4, GP, 0))?;
    equal("XCR0 before and after", (guest.result(0), guest.result(1)), (3, 3))
}

guest_code!(no_osxsave, 64, "xor %ecx, %ecx", guarded!("xgetbv"), done!());

fn xgetbv_without_osxsave_is_an_invalid_opcode() -> Outcome {
    each_faults(no_osxsave(), 1, UD, 0)
}

guest_code!(invalid, 64, guarded!("ud2"), guarded!(".byte 0x0f, 0xff, 0xc0"), done!());

fn an_invalid_opcode_is_raised() -> Outcome {
    each_faults(invalid(), 2, UD, 0)
}

guest_code!(
    of_a_hypervisor,
    64,
    "mov $FREE, %eax",
    guarded!("vmrun"),
    guarded!("vmload"),
    guarded!("vmsave"),
    guarded!("stgi"),
    guarded!("clgi"),
    guarded!("vmxoff"),
    done!()
);

fn instructions_of_a_hypervisor_are_invalid_opcodes() -> Outcome {
    each_faults(of_a_hypervisor(), 6, UD, 0)
}

guest_code!(
    breakpoint,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    guarded!("int3; 1:"),
    done!()
);

fn a_breakpoint_continues_behind_it() -> Outcome {
    let guest = Guest::new(Chip::None, breakpoint())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (1, BP, 0))?;
    equal("rip of the frame", guest.memory.read(FRAME_RIP), guest.result(0))
}

guest_code!(divide, 64, "xor %ecx, %ecx", "mov $1, %eax", "cdq", guarded!("div %ecx"), done!());

fn a_division_by_zero_is_a_divide_error() -> Outcome {
    each_faults(divide(), 1, DE, 0)
}

guest_code!(
    non_canonical,
    64,
    "mov $1, %ebx",
    "shl $63, %rbx",
    guarded!("mov (%rbx), %rax"),
    guarded!("mov %rax, (%rbx)"),
    "mov %rsp, %r12",
    done!()
);
fn a_non_canonical_address_is_a_general_protection_fault() -> Outcome {
    each_faults(non_canonical(), 2, GP, 0)
}

guest_code!(
    task_switched,
    64,
    "mov %cr0, %rax",
    "bts $3, %rax",
    "mov %rax, %cr0",
    guarded!("fninit"),
    guarded!("movups %xmm0, FREE"),
    "clts",
    "fninit",
    "movups %xmm0, FREE",
    done!()
);

fn the_fpu_is_not_available_while_ts_is_set() -> Outcome {
    each_faults(task_switched(), 2, NM, 0)
}

/// The page whose entry the tests change.
const PAGE_AT: u64 = 0x3_0000;

/// Runs `code` with the entry of [`PAGE_AT`] as given; vector, error code and address.
fn page_fault(code: &[u8], entry: u64, change: impl Fn(&Guest) -> Outcome) -> Outcome<[u64; 3]> {
    let guest = Guest::new(Chip::None, code)?;
    tables::split_first_large_page(&guest.memory);
    guest.memory.write(tables::small_entry(PAGE_AT), entry);
    // A place for code that returns.
    guest.memory.write(PAGE_AT, 0xc3);
    change(&guest)?;
    guest.finish()?;
    let (faults, vector, error) = guest.faults();
    equal("exceptions", faults, 1)?;
    Ok([vector, error, guest.memory.read(FRAME_CR2)])
}

guest_code!(load_page, 64, "mov $0x30010, %ebx", guarded!("mov (%rbx), %rax"), done!());
guest_code!(store_page, 64, "mov $0x30018, %ebx", guarded!("mov %rax, (%rbx)"), done!());
guest_code!(
    fetch_page,
    64,
    "mov $0x30000, %ebx",
    "mov %rsp, %rbp",
    guarded!("jmp *%rbx"),
    "mov %rbp, %rsp",
    done!()
);

fn a_page_fault_tells_reads_from_writes() -> Outcome {
    let fault = |code: &[u8], entry| page_fault(code, entry, |_| Ok(()));
    equal("load, absent", fault(load_page(), 0)?, [PF, 0, PAGE_AT + 0x10])?;
    equal("store, absent", fault(store_page(), 0)?, [PF, 2, PAGE_AT + 0x18])?;
    equal("store, read-only", fault(store_page(), PAGE_AT | 0x61)?, [PF, 3, PAGE_AT + 0x18])
}

fn a_page_fault_at_a_reserved_bit_says_so() -> Outcome {
    let fault = |code: &[u8], entry| page_fault(code, entry, |_| Ok(()));
    let entry = PAGE_AT | 0x63 | 1 << 51;
    // The emulated CPU of the lab leaves the present bit of the error code out.
    let [vector, error, address] = fault(load_page(), entry)?;
    equal("load", [vector, error | 1, address], [PF, 9, PAGE_AT + 0x10])?;
    let [vector, error, address] = fault(store_page(), entry)?;
    equal("store", [vector, error | 1, address], [PF, 11, PAGE_AT + 0x18])
}

fn a_page_fault_of_a_fetch_says_so() -> Outcome {
    let fault = |entry| page_fault(fetch_page(), entry, |_| Ok(()));
    equal("no execute", fault(PAGE_AT | 0x63 | 1 << 63)?, [PF, 0x11, PAGE_AT])?;
    equal("absent", fault(0)?, [PF, 0x10, PAGE_AT])
}

guest_code!(
    // Goes to privilege level 3, does there what RDI says, and ends with the exception of that.
    user_mode,
    64,
    "lea 2f(%rip), %rax",
    "mov %rax, RESUME",
    "push $0x3b",
    "push $0x1bff0",
    "push $0x3002",
    "andq $~0x3000, (%rsp)",
    "push $0x33",
    "lea 1f(%rip), %rax",
    "push %rax",
    "iretq",
    "1:",
    "mov $0x30010, %ebx",
    "cmp $1, %edi",
    "jb 3f",
    "je 4f",
    "cmp $3, %edi",
    "jb 5f",
    "je 6f",
    "rdmsr",
    "3: mov (%rbx), %rax",
    "4: mov %rax, (%rbx)",
    "5: jmp *%rbx",
    "6: out %al, $PORT_MARK",
    // Back in user mode; the exit of a guest that may not use ports is the next exception.
    "2:",
    "lea 7f(%rip), %rax",
    "mov %rax, HOOKS + 13 * 8",
    "hlt",
    "7:",
    done!()
);

fn in_user_mode(action: u64, entry: u64) -> Outcome<[u64; 3]> {
    page_fault(user_mode(), entry, |guest| {
        // All is the user's, but for what the test says.
        for index in 0..512 {
            let at = SMALL_TABLE + index * 8;
            if at != tables::small_entry(PAGE_AT) {
                guest.memory.write(at, guest.memory.read(at) | 4);
            }
        }
        let mut regs = guest.vcpu().regs()?;
        regs.rdi = action;
        guest.vcpu().set_regs(&regs)
    })
}

fn a_page_fault_of_user_mode_says_so() -> Outcome {
    let address = PAGE_AT + 0x10;
    equal("load, absent", in_user_mode(0, 0)?, [PF, 4, address])?;
    equal("load, the kernel's", in_user_mode(0, PAGE_AT | 0x63)?, [PF, 5, address])?;
    equal("store, absent", in_user_mode(1, 0)?, [PF, 6, address])?;
    equal("store, read-only", in_user_mode(1, PAGE_AT | 0x65)?, [PF, 7, address])?;
    let fetched = in_user_mode(2, PAGE_AT | 0x67 | 1 << 63)?;
    equal("fetch, no execute", fetched, [PF, 0x15, address])
}

fn user_mode_may_not_use_ports_or_msrs() -> Outcome {
    equal("port", in_user_mode(3, PAGE_AT | 0x67)?[..2].to_vec(), vec![GP, 0])?;
    equal("MSR", in_user_mode(4, PAGE_AT | 0x67)?[..2].to_vec(), vec![GP, 0])
}

guest_code!(
    supervisor_protection,
    64,
    "mov %cr4, %rax",
    "or %rdi, %rax",
    "mov %rax, %cr4",
    "mov $0x30000, %ebx",
    "mov %rsp, %rbp",
    "cmp $0x100000, %edi",
    "jne 1f",
    guarded!("jmp *%rbx"),
    "jmp 2f",
    "1:",
    guarded!("mov (%rbx), %rax"),
    "2: mov %rbp, %rsp",
    done!()
);

fn smep_and_smap_hold_the_guests_kernel_back() -> Outcome {
    let with_bit = |bit: u64| {
        page_fault(supervisor_protection(), PAGE_AT | 0x67, |guest| {
            let mut regs = guest.vcpu().regs()?;
            regs.rdi = 1 << bit;
            guest.vcpu().set_regs(&regs)
        })
    };
    equal("SMEP, fetch", with_bit(20)?, [PF, 0x11, PAGE_AT])?;
    equal("SMAP, load", with_bit(21)?, [PF, 1, PAGE_AT])
}

guest_code!(jump_nowhere, 64, "mov $NOWHERE, %eax", "jmp *%rax");

fn a_jump_to_nowhere_leaves_with_an_error() -> Outcome {
    let guest = Guest::new(Chip::None, jump_nowhere())?;
    match guest.exit()? {
        Exit::Internal { suberror: 1, .. } => equal("rip", guest.vcpu().regs()?.rip, NOWHERE),
        other => fail(format!("expected an error of emulation got {other:x?}")),
    }
}

guest_code!(store_unknown, 64, "mov $NOWHERE, %ebx", "movlps %xmm0, 8(%rbx)", done!());
guest_code!(load_unknown, 64, "mov $NOWHERE, %ebx", "movlps 8(%rbx), %xmm0", done!());

/// The exit has the bytes of the instruction (KVM API §5, `emulation_failure`).
fn leaves_with_bytes(code: &[u8], bytes: [u8; 4]) -> Outcome {
    let guest = Guest::new(Chip::None, code)?;
    let data = match guest.exit()? {
        Exit::Internal { suberror: 1, data } => data,
        other => return fail(format!("expected an error of emulation got {other:x?}")),
    };
    // Words: flags (bit 0: bytes follow); their number and the bytes themselves.
    holds("flags, and two words of bytes", data.len() >= 4 && data[0] & 1 == 1, &data)?;
    let packed: Vec<u8> = data[1..4].iter().flat_map(|word| word.to_le_bytes()).collect();
    let size = usize::from(packed[0]);
    holds("4 to 15 bytes", (4..=15).contains(&size), size)?;
    equal("the first bytes", &packed[1..5], bytes.as_slice())?;
    equal("rip", guest.vcpu().regs()?.rip, PROGRAM + 5)
}

fn a_store_by_an_unknown_instruction_leaves_with_its_bytes() -> Outcome {
    leaves_with_bytes(store_unknown(), [0x0f, 0x13, 0x43, 0x08])
}

fn a_load_by_an_unknown_instruction_leaves_with_its_bytes() -> Outcome {
    leaves_with_bytes(load_unknown(), [0x0f, 0x12, 0x43, 0x08])
}

fn an_error_of_emulation_can_be_repaired_by_user_space() -> Outcome {
    let guest = Guest::new(Chip::None, store_unknown())?;
    let exit = guest.exit()?;
    holds("an error of emulation", matches!(exit, Exit::Internal { suberror: 1, .. }), &exit)?;
    let mut regs = guest.vcpu().regs()?;
    regs.rip += 4;
    guest.vcpu().set_regs(&regs)?;
    guest.finish()
}

guest_code!(
    // Its own page tables become device memory.
    tables_nowhere,
    64,
    "mov $NOWHERE, %eax",
    "mov %rax, %cr3",
    done!()
);

fn page_tables_where_no_memory_is_end_the_run() -> Outcome {
    if oracle::is_stock() {
        return skip("the stock module raises the same fault for ever");
    }
    let guest = Guest::new(Chip::None, tables_nowhere())?;
    match guest.exit()? {
        // The walk reads all ones or zeroes from nowhere, or is given up.
        Exit::Internal { suberror: 1, .. } | Exit::Shutdown => Ok(()),
        other => fail(format!("expected an error of emulation or a shutdown got {other:x?}")),
    }
}
