//! Loads and stores where no memory is: what user space sees of each, and what the guest gets back
//! (KVM API §5, `KVM_EXIT_MMIO`).

use crate::kvm::exit::Exit;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::memory::Memory;
use crate::outcome::{Answer, Outcome, equal, fail};
use crate::runner::tests;

tests!("mmio":
    stores_of_every_size,
    stores_of_immediates,
    loads_of_every_size,
    loads_that_extend,
    read_modify_write_reads_then_writes,
    exchanges_read_then_write,
    compare_and_exchange_reads_then_writes,
    comparisons_only_read,
    pushes_and_pops_of_device_memory,
    string_stores_go_one_by_one,
    string_moves_to_the_device,
    string_moves_from_the_device,
    string_loads_and_compares,
    strings_go_backwards_when_told_so,
    addressing_forms_lead_to_the_same_place,
    a_segment_base_counts,
    an_access_over_a_page_border_comes_in_two_parts,
    an_access_from_memory_into_nothing_is_split,
    vector_stores_and_loads,
    flags_follow_the_devices_answer,
    a_guest_page_fault_comes_before_the_device,
    real_mode_reaches_devices,
    the_device_may_become_memory_between_accesses,
);

/// What user space expects, and answers if it is a read.
enum Step {
    Write(u64, Vec<u8>),
    Read(u64, Vec<u8>),
}

fn write(offset: u64, bytes: &[u8]) -> Step {
    Step::Write(NOWHERE + offset, bytes.to_vec())
}

fn read(offset: u64, answer: &[u8]) -> Step {
    Step::Read(NOWHERE + offset, answer.to_vec())
}

/// Runs the guest through exactly these accesses to its end.
fn play(guest: &Guest, steps: &[Step]) -> Outcome {
    for (number, step) in steps.iter().enumerate() {
        let (expected, answer) = match step {
            Step::Write(address, bytes) => (Exit::mmio(true, *address, bytes), None),
            Step::Read(address, bytes) => {
                (Exit::mmio(false, *address, &vec![0; bytes.len()]), Some(bytes))
            }
        };
        equal(&format!("access {number}"), guest.exit()?, expected)?;
        if let Some(bytes) = answer {
            guest.vcpu().answer(bytes);
        }
    }
    guest.finish()
}

fn played(code: &[u8], steps: &[Step]) -> Outcome<Guest> {
    let guest = Guest::new(Chip::None, code)?;
    play(&guest, steps)?;
    Ok(guest)
}

fn results(guest: &Guest, expected: &[u64]) -> Outcome {
    let got: Vec<u64> = (0..expected.len() as u64).map(|index| guest.result(index)).collect();
    equal("what the guest got", got.as_slice(), expected)
}

guest_code!(
    stores,
    64,
    "mov $NOWHERE, %ebx",
    "movabs $0x1122334455667788, %rax",
    "mov %al, (%rbx)",
    "mov %ah, 1(%rbx)",
    "mov %ax, 2(%rbx)",
    "mov %eax, 4(%rbx)",
    "mov %rax, 8(%rbx)",
    "mov %rax, %r9",
    "mov %r9, 0x10(%rbx)",
    "mov %r9b, 0x18(%rbx)",
    done!()
);

fn stores_of_every_size() -> Outcome {
    let all = [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];
    played(
        stores(),
        &[
            write(0, &all[..1]),
            write(1, &[0x77]),
            write(2, &all[..2]),
            write(4, &all[..4]),
            write(8, &all),
            write(0x10, &all),
            write(0x18, &all[..1]),
        ],
    )
    .map(drop)
}

guest_code!(
    immediates,
    64,
    "mov $NOWHERE, %ebx",
    "movb $0x5a, (%rbx)",
    "movw $0x1234, (%rbx)",
    "movl $0x12345678, (%rbx)",
    "movq $-2, (%rbx)",
    "movabs %al, 0xd0000040",
    "movabs %rax, 0xd0000040",
    done!()
);

fn stores_of_immediates() -> Outcome {
    played(
        immediates(),
        &[
            write(0, &[0x5a]),
            write(0, &[0x34, 0x12]),
            write(0, &[0x78, 0x56, 0x34, 0x12]),
            write(0, &[0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
            write(0x40, &[0]),
            write(0x40, &[0; 8]),
        ],
    )
    .map(drop)
}

guest_code!(
    loads,
    64,
    "mov $NOWHERE, %ebx",
    "mov $-1, %rax",
    "mov (%rbx), %al",
    "mov %rax, RESULT",
    "mov $-1, %rax",
    "mov (%rbx), %ah",
    "mov %rax, RESULT + 8",
    "mov $-1, %rax",
    "mov (%rbx), %ax",
    "mov %rax, RESULT + 16",
    "mov $-1, %rax",
    "mov (%rbx), %eax",
    "mov %rax, RESULT + 24",
    "mov $-1, %r10",
    "mov (%rbx), %r10",
    "mov %r10, RESULT + 32",
    "movabs 0xd0000040, %eax",
    "mov %rax, RESULT + 40",
    done!()
);

fn loads_of_every_size() -> Outcome {
    let all = [1, 2, 3, 4, 5, 6, 7, 8];
    let guest = played(
        loads(),
        &[
            read(0, &all[..1]),
            read(0, &all[..1]),
            read(0, &all[..2]),
            read(0, &all[..4]),
            read(0, &all),
            read(0x40, &all[..4]),
        ],
    )?;
    results(
        &guest,
        &[
            0xffff_ffff_ffff_ff01,
            0xffff_ffff_ffff_01ff,
            0xffff_ffff_ffff_0201,
            0x0403_0201,
            0x0807_0605_0403_0201,
            0x0403_0201,
        ],
    )
}

guest_code!(
    extending,
    64,
    "mov $NOWHERE, %ebx",
    "movzbl (%rbx), %eax",
    "mov %rax, RESULT",
    "movzwl (%rbx), %eax",
    "mov %rax, RESULT + 8",
    "movsbq (%rbx), %rax",
    "mov %rax, RESULT + 16",
    "movswl (%rbx), %eax",
    "mov %rax, RESULT + 24",
    "movslq (%rbx), %rax",
    "mov %rax, RESULT + 32",
    "mov $-1, %rax",
    "movsbw (%rbx), %ax",
    "mov %rax, RESULT + 40",
    done!()
);

fn loads_that_extend() -> Outcome {
    let guest = played(
        extending(),
        &[
            read(0, &[0x80]),
            read(0, &[0, 0x80]),
            read(0, &[0x80]),
            read(0, &[0, 0x80]),
            read(0, &[0, 0, 0, 0x80]),
            read(0, &[0x7f]),
        ],
    )?;
    results(
        &guest,
        &[
            0x80,
            0x8000,
            0xffff_ffff_ffff_ff80,
            0xffff_8000,
            0xffff_ffff_8000_0000,
            0xffff_ffff_ffff_007f,
        ],
    )
}

guest_code!(
    read_modify_write,
    64,
    "mov $NOWHERE, %ebx",
    "addl $5, (%rbx)",
    "orb $0x80, 1(%rbx)",
    "andw $0xf0f, 2(%rbx)",
    "incq 8(%rbx)",
    "notl (%rbx)",
    "negb (%rbx)",
    "xorl %ebx, (%rbx)",
    "subq $1, (%rbx)",
    "lock addl $1, (%rbx)",
    "btsl $4, (%rbx)",
    "shll $4, (%rbx)",
    done!()
);

fn read_modify_write_reads_then_writes() -> Outcome {
    played(
        read_modify_write(),
        &[
            read(0, &[1, 0, 0, 0]),
            write(0, &[6, 0, 0, 0]),
            read(1, &[0x01]),
            write(1, &[0x81]),
            read(2, &[0xff, 0xff]),
            write(2, &[0x0f, 0x0f]),
            read(8, &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]),
            write(8, &[0, 0, 0, 0, 1, 0, 0, 0]),
            read(0, &[0x0f, 0, 0xff, 0]),
            write(0, &[0xf0, 0xff, 0, 0xff]),
            read(0, &[1]),
            write(0, &[0xff]),
            read(0, &[0, 0, 0, 0xff]),
            write(0, &[0, 0, 0, 0x2f]),
            read(0, &[0, 0, 0, 0, 0, 0, 0, 0]),
            write(0, &[0xff; 8]),
            read(0, &[7, 0, 0, 0]),
            write(0, &[8, 0, 0, 0]),
            read(0, &[1, 0, 0, 0]),
            write(0, &[0x11, 0, 0, 0]),
            read(0, &[0x21, 0x43, 0, 0]),
            write(0, &[0x10, 0x32, 4, 0]),
        ],
    )
    .map(drop)
}

guest_code!(
    exchanges,
    64,
    "mov $NOWHERE, %ebx",
    "mov $0x11223344, %eax",
    "xchg %eax, (%rbx)",
    "mov %rax, RESULT",
    "mov $0x55, %ecx",
    "xchg %cl, 4(%rbx)",
    "mov %rcx, RESULT + 8",
    "mov $2, %edx",
    "lock xadd %edx, (%rbx)",
    "mov %rdx, RESULT + 16",
    done!()
);

fn exchanges_read_then_write() -> Outcome {
    let guest = played(
        exchanges(),
        &[
            read(0, &[0xaa, 0xbb, 0xcc, 0xdd]),
            write(0, &[0x44, 0x33, 0x22, 0x11]),
            read(4, &[0x66]),
            write(4, &[0x55]),
            read(0, &[40, 0, 0, 0]),
            write(0, &[42, 0, 0, 0]),
        ],
    )?;
    results(&guest, &[0xddcc_bbaa, 0x66, 40])
}

guest_code!(
    compare_exchange,
    64,
    "mov $NOWHERE, %ebx",
    "mov $5, %eax",
    "mov $9, %ecx",
    "lock cmpxchg %ecx, (%rbx)",
    "setz %dl",
    "movzbl %dl, %edx",
    "mov %rdx, RESULT",
    "mov $5, %eax",
    "lock cmpxchg %ecx, (%rbx)",
    "setz %dl",
    "movzbl %dl, %edx",
    "mov %rdx, RESULT + 8",
    "mov %rax, RESULT + 16",
    done!()
);

fn compare_and_exchange_reads_then_writes() -> Outcome {
    let guest = Guest::new(Chip::None, compare_exchange())?;
    equal("read", guest.exit()?, Exit::mmio(false, NOWHERE, &[0; 4]))?;
    guest.vcpu().answer(&[5, 0, 0, 0]);
    equal("write", guest.exit()?, Exit::mmio(true, NOWHERE, &[9, 0, 0, 0]))?;
    equal("read again", guest.exit()?, Exit::mmio(false, NOWHERE, &[0; 4]))?;
    guest.vcpu().answer(&[6, 0, 0, 0]);
    // The CPU writes back what it has read when the comparison fails; an emulator may spare it.
    match guest.exit()? {
        exit if exit.is_out(PORT_DONE) => {}
        exit if exit == Exit::mmio(true, NOWHERE, &[6, 0, 0, 0]) => guest.finish()?,
        exit => return fail(format!("expected the end or what was read got {exit:x?}")),
    }
    results(&guest, &[1, 0, 6])
}

guest_code!(
    comparisons,
    64,
    "mov $NOWHERE, %ebx",
    "xor %eax, %eax",
    "cmpl $7, (%rbx)",
    "sete %al",
    "mov %rax, RESULT",
    "testb $0x20, 4(%rbx)",
    "setnz %al",
    "mov %rax, RESULT + 8",
    "mov $3, %ecx",
    "cmp %cx, 8(%rbx)",
    "setb %al",
    "mov %rax, RESULT + 16",
    "cmp 8(%rbx), %rcx",
    "seta %al",
    "mov %rax, RESULT + 24",
    "btl $9, (%rbx)",
    "setc %al",
    "mov %rax, RESULT + 32",
    done!()
);

fn comparisons_only_read() -> Outcome {
    let guest = played(
        comparisons(),
        &[
            read(0, &[7, 0, 0, 0]),
            read(4, &[0x20]),
            read(8, &[2, 0]),
            read(8, &[4, 0, 0, 0, 0, 0, 0, 0]),
            read(0, &[0, 2, 0, 0]),
        ],
    )?;
    results(&guest, &[1, 1, 1, 0, 1])
}

guest_code!(
    pushes,
    64,
    "mov $NOWHERE, %ebx",
    "push (%rbx)",
    "pop %rax",
    "mov %rax, RESULT",
    "push $0x77",
    "pop 8(%rbx)",
    done!()
);

fn pushes_and_pops_of_device_memory() -> Outcome {
    let guest = played(
        pushes(),
        &[read(0, &[1, 0, 0, 0, 0, 0, 0, 2]), write(8, &[0x77, 0, 0, 0, 0, 0, 0, 0])],
    )?;
    results(&guest, &[0x0200_0000_0000_0001])
}

guest_code!(
    string_stores,
    64,
    "cld",
    "mov $NOWHERE, %edi",
    "mov $0x11223344, %eax",
    "stosb",
    "stosw",
    "stosl",
    "stosq",
    "mov %rdi, RESULT",
    "mov $3, %ecx",
    "rep stosl",
    "mov %rdi, RESULT + 8",
    "mov %rcx, RESULT + 16",
    done!()
);

fn string_stores_go_one_by_one() -> Outcome {
    let word = [0x44, 0x33, 0x22, 0x11];
    let guest = played(
        string_stores(),
        &[
            write(0, &word[..1]),
            write(1, &word[..2]),
            write(3, &word),
            write(7, &[0x44, 0x33, 0x22, 0x11, 0, 0, 0, 0]),
            write(15, &word),
            write(19, &word),
            write(23, &word),
        ],
    )?;
    results(&guest, &[NOWHERE + 15, NOWHERE + 27, 0])
}

guest_code!(
    to_device,
    64,
    "cld",
    "movabs $0x0807060504030201, %rax",
    "mov %rax, FREE",
    "mov %rax, FREE + 8",
    "mov $FREE, %esi",
    "mov $NOWHERE, %edi",
    "mov $3, %ecx",
    "rep movsb",
    "movsl",
    "mov $FREE, %esi",
    "movsq",
    "mov %rsi, RESULT",
    "mov %rdi, RESULT + 8",
    done!()
);

fn string_moves_to_the_device() -> Outcome {
    let guest = played(
        to_device(),
        &[
            write(0, &[1]),
            write(1, &[2]),
            write(2, &[3]),
            write(3, &[4, 5, 6, 7]),
            write(7, &[1, 2, 3, 4, 5, 6, 7, 8]),
        ],
    )?;
    results(&guest, &[FREE + 8, NOWHERE + 15])
}

guest_code!(
    from_device,
    64,
    "cld",
    "mov $NOWHERE, %esi",
    "mov $FREE, %edi",
    "mov $4, %ecx",
    "rep movsw",
    "mov FREE, %rax",
    "mov %rax, RESULT",
    "mov %rsi, RESULT + 8",
    "mov %rdi, RESULT + 16",
    // From device to device.
    "mov $NOWHERE, %esi",
    "mov $NOWHERE + 0x100, %edi",
    "movsl",
    done!()
);

fn string_moves_from_the_device() -> Outcome {
    let guest = played(
        from_device(),
        &[
            read(0, &[1, 2]),
            read(2, &[3, 4]),
            read(4, &[5, 6]),
            read(6, &[7, 8]),
            read(0, &[0xa, 0xb, 0xc, 0xd]),
            write(0x100, &[0xa, 0xb, 0xc, 0xd]),
        ],
    )?;
    results(&guest, &[0x0807_0605_0403_0201, NOWHERE + 8, FREE + 8])
}

guest_code!(
    string_loads,
    64,
    "cld",
    "mov $NOWHERE, %esi",
    "lodsl",
    "mov %rax, RESULT",
    "lodsb",
    "mov %rax, RESULT + 8",
    "mov %rsi, RESULT + 16",
    // Looks for 3.
    "mov $NOWHERE, %edi",
    "mov $3, %eax",
    "mov $9, %ecx",
    "repne scasb",
    "mov %rcx, RESULT + 24",
    done!()
);

fn string_loads_and_compares() -> Outcome {
    let guest = played(
        string_loads(),
        &[read(0, &[4, 3, 2, 1]), read(4, &[9]), read(0, &[1]), read(1, &[2]), read(2, &[3])],
    )?;
    results(&guest, &[0x0102_0304, 0x0102_0309, NOWHERE + 5, 6])
}

guest_code!(
    backwards,
    64,
    "std",
    "mov $NOWHERE + 0x10, %edi",
    "mov $0x55, %eax",
    "mov $2, %ecx",
    "rep stosl",
    "cld",
    "mov %rdi, RESULT",
    done!()
);

fn strings_go_backwards_when_told_so() -> Outcome {
    let word = [0x55, 0, 0, 0];
    let guest = played(backwards(), &[write(0x10, &word), write(0xc, &word)])?;
    results(&guest, &[NOWHERE + 8])
}

guest_code!(
    addressing,
    64,
    "mov $NOWHERE, %ebx",
    "mov $0x10, %ecx",
    "mov %eax, 4(%rbx,%rcx,4)",
    "mov %eax, -4(%rbx,%rcx)",
    "mov %rbx, %r12",
    "mov %rbx, %r13",
    "mov %eax, (%r12)",
    "mov %eax, (%r13)",
    "mov %eax, (%r13,%rcx,8)",
    "mov %eax, 0x100(%ebx)",
    "mov %rbx, %rbp",
    "mov %eax, (%rbp)",
    done!()
);

fn addressing_forms_lead_to_the_same_place() -> Outcome {
    let zero = [0; 4];
    played(addressing(), &[0x44, 0xc, 0, 0, 0x80, 0x100, 0].map(|offset| write(offset, &zero)))
        .map(drop)
}

guest_code!(
    segments,
    64,
    "mov $0xc0000100, %ecx",
    "mov $NOWHERE, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "movl $1, %fs:0x20",
    "mov $8, %ebx",
    "movb $2, %fs:(%rbx)",
    done!()
);

fn a_segment_base_counts() -> Outcome {
    played(segments(), &[write(0x20, &[1, 0, 0, 0]), write(8, &[2])]).map(drop)
}

guest_code!(
    crossing,
    64,
    "mov $NOWHERE + 0xffc, %ebx",
    "movabs $0x0807060504030201, %rax",
    "mov %rax, (%rbx)",
    "mov (%rbx), %rcx",
    "mov %rcx, RESULT",
    "mov %ax, 3(%rbx)",
    done!()
);

fn an_access_over_a_page_border_comes_in_two_parts() -> Outcome {
    let guest = played(
        crossing(),
        &[
            write(0xffc, &[1, 2, 3, 4]),
            write(0x1000, &[5, 6, 7, 8]),
            read(0xffc, &[0xa, 0xb, 0xc, 0xd]),
            read(0x1000, &[0xe, 0xf, 0x10, 0x11]),
            write(0xfff, &[1]),
            write(0x1000, &[2]),
        ],
    )?;
    results(&guest, &[0x1110_0f0e_0d0c_0b0a])
}

guest_code!(
    half_memory,
    64,
    "mov $0x1ffffc, %ebx",
    "movabs $0x0807060504030201, %rax",
    "mov %rax, (%rbx)",
    "mov (%rbx), %rcx",
    "mov %rcx, RESULT",
    done!()
);

fn an_access_from_memory_into_nothing_is_split() -> Outcome {
    let end = MEMORY_BYTES;
    let guest = played(
        half_memory(),
        &[Step::Write(end, vec![5, 6, 7, 8]), Step::Read(end, vec![0xe, 0xf, 0x10, 0x11])],
    )?;
    results(&guest, &[0x1110_0f0e_0403_0201])?;
    equal("memory", guest.memory.read_bytes(end - 4, 4), vec![1, 2, 3, 4])
}

guest_code!(
    vectors,
    64,
    "mov $NOWHERE, %ebx",
    "movabs $0x0807060504030201, %rax",
    "mov %rax, FREE",
    "mov %rax, FREE + 8",
    "movups FREE, %xmm0",
    "movups %xmm0, (%rbx)",
    "movdqu (%rbx), %xmm1",
    "movups %xmm1, RESULT",
    done!()
);

fn vector_stores_and_loads() -> Outcome {
    let eight = [1, 2, 3, 4, 5, 6, 7, 8];
    let guest = played(
        vectors(),
        &[write(0, &eight), write(8, &eight), read(0, &[0x11; 8]), read(8, &[0x22; 8])],
    )?;
    results(&guest, &[0x1111_1111_1111_1111, 0x2222_2222_2222_2222])
}

guest_code!(
    flags,
    64,
    "mov $NOWHERE, %ebx",
    "mov $0xff, %eax",
    "add (%rbx), %al",
    "pushfq",
    "pop RESULT",
    "mov %rax, RESULT + 8",
    "mov $1, %eax",
    "sub (%rbx), %eax",
    "pushfq",
    "pop RESULT + 16",
    "mov %rax, RESULT + 24",
    "stc",
    "mov $1, %eax",
    "adc (%rbx), %eax",
    "mov %rax, RESULT + 32",
    done!()
);

fn flags_follow_the_devices_answer() -> Outcome {
    let guest = played(flags(), &[read(0, &[1]), read(0, &[2, 0, 0, 0]), read(0, &[3, 0, 0, 0])])?;
    // Carry, parity, auxiliary, zero; then carry, parity, auxiliary, sign.
    results(&guest, &[0x57, 0, 0x97, 0xffff_ffff, 5])
}

guest_code!(
    faults_first,
    64,
    "cld",
    "lea 1f(%rip), %rax",
    "mov %rax, RESUME",
    "mov $NOWHERE, %esi",
    "mov $1, %edi",
    "shl $46, %rdi",
    "movsl",
    "ud2",
    "1:",
    done!()
);

fn a_guest_page_fault_comes_before_the_device() -> Outcome {
    let guest = Guest::new(Chip::None, faults_first())?;
    // The device may be read before the fault is found; it must not be written.
    match guest.exit()? {
        exit if exit.is_out(PORT_DONE) => {}
        Exit::Mmio { write: false, .. } => {
            guest.vcpu().answer(&[0; 4]);
            guest.finish()?;
        }
        exit => return fail(format!("expected the guest's end got {exit:x?}")),
    }
    equal("exceptions, vector, error code", guest.faults(), (1, 14, 2))?;
    equal("cr2", guest.memory.read(FRAME_CR2), 1 << 46)
}

guest_code!(
    from_real_mode,
    16,
    "mov $0xa000, %ax",
    "mov %ax, %ds",
    "movb $0x41, 0x10",
    "movw 0x20, %cx",
    "xor %ax, %ax",
    "mov %ax, %ds",
    "movw %cx, 0x8000",
    "out %al, $PORT_DONE",
);

fn real_mode_reaches_devices() -> Outcome {
    let guest = Guest::real(from_real_mode())?;
    // Memory with the hole of a video card.
    guest.vm.set_slot(0, 0, 0, 0, 0).granted("delete")?;
    let hva = guest.memory.hva();
    guest.vm.set_slot(0, 0, 0, 0xa0000, hva).granted("below")?;
    guest.vm.set_slot(1, 0, 0x10_0000, 0x10_0000, hva + 0x10_0000).granted("above")?;
    guest.expect("write", Exit::mmio(true, 0xa0010, &[0x41]))?;
    guest.expect("read", Exit::mmio(false, 0xa0020, &[0; 2]))?;
    guest.vcpu().answer(&[0x34, 0x12]);
    guest.finish()?;
    equal("what was read", guest.memory.read(0x8000) & 0xffff, 0x1234)
}

guest_code!(
    twice,
    64,
    "mov $NOWHERE, %ebx",
    "movl $1, (%rbx)",
    "movl $2, 4(%rbx)",
    "mov (%rbx), %rax",
    "mov %rax, RESULT",
    done!()
);

fn the_device_may_become_memory_between_accesses() -> Outcome {
    let guest = Guest::new(Chip::None, twice())?;
    guest.expect("write", Exit::mmio(true, NOWHERE, &[1, 0, 0, 0]))?;
    let memory = Memory::new(4096)?;
    guest.vm.set_slot(1, 0, NOWHERE, 4096, memory.hva()).granted("slot")?;
    guest.finish()?;
    results(&guest, &[2 << 32])
}
