//! Port I/O: single, and by strings (KVM API §5, `KVM_EXIT_IO`).

use crate::kvm::exit::Exit;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::outcome::{Outcome, equal, fail};
use crate::runner::tests;

tests!("ports":
    writes_of_every_size,
    reads_of_every_size,
    ports_by_register_have_16_bits,
    string_writes_bring_every_element,
    string_writes_of_words_backwards,
    string_reads_take_every_element,
    string_reads_of_more_than_a_page,
    string_reads_are_few_exits_and_writes_one_each,
    a_counter_that_changes_in_a_string,
    a_string_of_no_elements_does_nothing,
    a_string_write_from_device_memory,
    real_mode_uses_ports,
);

guest_code!(
    writes,
    64,
    "movabs $0x1122334455667788, %rax",
    "out %al, $0x10",
    "out %ax, $0x11",
    "out %eax, $0x12",
    done!()
);

fn out(size: u8, port: u16, data: &[u8]) -> Exit {
    Exit::Io { write: true, size, port, count: 1, data: data.to_vec() }
}

fn writes_of_every_size() -> Outcome {
    let guest = Guest::new(Chip::None, writes())?;
    guest.expect("byte", out(1, 0x10, &[0x88]))?;
    guest.expect("word", out(2, 0x11, &[0x88, 0x77]))?;
    guest.expect("double word", out(4, 0x12, &[0x88, 0x77, 0x66, 0x55]))?;
    guest.finish()
}

guest_code!(
    reads,
    64,
    "mov $-1, %rax",
    "in $0x10, %al",
    "mov %rax, RESULT",
    "mov $-1, %rax",
    "in $0x11, %ax",
    "mov %rax, RESULT + 8",
    "mov $-1, %rax",
    "in $0x12, %eax",
    "mov %rax, RESULT + 16",
    done!()
);

fn reads_of_every_size() -> Outcome {
    let guest = Guest::new(Chip::None, reads())?;
    for (size, port) in [(1, 0x10), (2, 0x11), (4, 0x12)] {
        let expected = Exit::Io { write: false, size, port, count: 1, data: vec![] };
        guest.expect("read", expected)?;
        guest.vcpu().answer(&[1, 2, 3, 4][..usize::from(size)]);
    }
    guest.finish()?;
    equal("byte", guest.result(0), 0xffff_ffff_ffff_ff01)?;
    equal("word", guest.result(1), 0xffff_ffff_ffff_0201)?;
    equal("double word", guest.result(2), 0x0403_0201)
}

guest_code!(
    by_register,
    64,
    "mov $0x11234, %edx",
    "mov $7, %eax",
    "out %al, %dx",
    "mov $0xffff, %edx",
    "out %al, %dx",
    done!()
);

fn ports_by_register_have_16_bits() -> Outcome {
    let guest = Guest::new(Chip::None, by_register())?;
    guest.expect("write", out(1, 0x1234, &[7]))?;
    guest.expect("write", out(1, 0xffff, &[7]))?;
    guest.finish()
}

/// Takes port writes of `size` to `port`, however they are bundled, up to the guest's end.
fn collected(guest: &Guest, size: u8, port: u16) -> Outcome<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        match guest.exit()? {
            exit if exit.is_out(PORT_DONE) => return Ok(bytes),
            Exit::Io { write: true, size: its, port: to, data, .. }
                if (its, to) == (size, port) =>
            {
                bytes.extend(data);
            }
            exit => return fail(format!("expected writes to {port:#x} got {exit:x?}")),
        }
    }
}

/// Answers port reads of `size` from `port` with the numbers from 0, up to the guest's end.
fn fed(guest: &Guest, wanted_size: u8, wanted_port: u16) -> Outcome {
    let mut next = 0_u8;
    loop {
        match guest.exit()? {
            exit if exit.is_out(PORT_DONE) => return Ok(()),
            Exit::Io { write: false, size, port, count, .. }
                if (size, port) == (wanted_size, wanted_port) =>
            {
                let bytes: Vec<u8> = (0..u32::from(size) * count)
                    .map(|_| {
                        next = next.wrapping_add(1);
                        next.wrapping_sub(1)
                    })
                    .collect();
                guest.vcpu().answer(&bytes);
            }
            exit => return fail(format!("expected reads of {wanted_port:#x} got {exit:x?}")),
        }
    }
}

guest_code!(
    string_writes,
    64,
    "cld",
    "mov $FREE, %esi",
    "mov $0x3f8, %edx",
    "mov $5, %ecx",
    "rep outsb",
    "mov %rsi, RESULT",
    "mov %rcx, RESULT + 8",
    done!()
);

fn string_writes_bring_every_element() -> Outcome {
    let guest = Guest::new(Chip::None, string_writes())?;
    guest.memory.write_bytes(FREE, b"hello");
    equal("bytes", collected(&guest, 1, 0x3f8)?, b"hello".to_vec())?;
    equal("rsi, rcx", (guest.result(0), guest.result(1)), (FREE + 5, 0))
}

guest_code!(
    string_writes_back,
    64,
    "std",
    "mov $FREE + 4, %esi",
    "mov $0x500, %edx",
    "mov $3, %ecx",
    "rep outsw",
    "cld",
    "mov %rsi, RESULT",
    done!()
);

fn string_writes_of_words_backwards() -> Outcome {
    let guest = Guest::new(Chip::None, string_writes_back())?;
    guest.memory.write_bytes(FREE, &[1, 2, 3, 4, 5, 6]);
    equal("bytes", collected(&guest, 2, 0x500)?, vec![5, 6, 3, 4, 1, 2])?;
    equal("rsi", guest.result(0), FREE - 2)
}

guest_code!(
    string_reads,
    64,
    "cld",
    "mov $FREE, %edi",
    "mov $0x1f0, %edx",
    "mov $4, %ecx",
    "rep insw",
    "insb",
    "insl",
    "mov %rdi, RESULT",
    "mov %rcx, RESULT + 8",
    done!()
);

fn string_reads_take_every_element() -> Outcome {
    let guest = Guest::new(Chip::None, string_reads())?;
    let mut next = 0_u8;
    let mut sizes = vec![];
    loop {
        match guest.exit()? {
            exit if exit.is_out(PORT_DONE) => break,
            Exit::Io { write: false, size, port: 0x1f0, count, .. } => {
                let bytes: Vec<u8> =
                    (0..size * count as u8).map(|index| next.wrapping_add(index)).collect();
                next += bytes.len() as u8;
                sizes.extend(vec![size; count as usize]);
                guest.vcpu().answer(&bytes);
            }
            exit => return fail(format!("expected reads got {exit:x?}")),
        }
    }
    equal("sizes", sizes, vec![2, 2, 2, 2, 1, 4])?;
    equal("memory", guest.memory.read_bytes(FREE, 13), (0..13).collect::<Vec<u8>>())?;
    equal("rdi, rcx", (guest.result(0), guest.result(1)), (FREE + 13, 0))
}

guest_code!(
    long_string_reads,
    64,
    "cld",
    "mov $FREE + 0xff0, %edi",
    "mov $0x1f0, %edx",
    "mov $0x1800, %ecx",
    "rep insb",
    "mov %rdi, RESULT",
    done!()
);

fn string_reads_of_more_than_a_page() -> Outcome {
    let guest = Guest::new(Chip::None, long_string_reads())?;
    fed(&guest, 1, 0x1f0)?;
    let expected: Vec<u8> = (0..0x1800_u32).map(|index| index as u8).collect();
    equal("rdi", guest.result(0), FREE + 0xff0 + 0x1800)?;
    equal("memory", guest.memory.read_bytes(FREE + 0xff0, 0x1800) == expected, true)
}

guest_code!(
    block_reads_and_writes,
    64,
    "cld",
    "mov $FREE, %edi",
    "mov $0x1f0, %edx",
    "mov $512, %ecx",
    "rep insb",
    "mov $FREE, %esi",
    "mov $3, %ecx",
    "rep outsb",
    done!()
);

/// VMMs hand what is written to a device's code as it comes: a serial port's takes one byte.
fn string_reads_are_few_exits_and_writes_one_each() -> Outcome {
    let guest = Guest::new(Chip::None, block_reads_and_writes())?;
    let mut left = 512;
    let mut exits = 0;
    while left > 0 {
        match guest.exit()? {
            Exit::Io { write: false, size: 1, port: 0x1f0, count, .. } if count <= left => {
                guest.vcpu().answer(&vec![7; count as usize]);
                (left, exits) = (left - count, exits + 1);
            }
            exit => return fail(format!("expected reads got {exit:x?}")),
        }
    }
    equal("few exits", exits <= 2, true)?;
    for _ in 0..3 {
        guest.expect("write", out(1, 0x1f0, &[7]))?;
    }
    guest.finish()
}

guest_code!(
    counted,
    64,
    "cld",
    "mov $FREE, %edi",
    "mov $0x80, %edx",
    "mov $2, %ecx",
    "rep insb",
    "mov %rdi, RESULT",
    "mov $FREE, %edi",
    "mov $3, %ecx",
    "rep insb",
    "mov %rdi, RESULT + 8",
    "mov %rcx, RESULT + 16",
    done!()
);

/// The VMM sets RCX between the exit and the answer: of items that came too many go, and too few are asked for anew.
/// What memory holds then is nobody's promise: stock KVM leaves some of it out.
fn a_counter_that_changes_in_a_string() -> Outcome {
    let guest = Guest::new(Chip::None, counted())?;
    loop {
        let exit = guest.exit()?;
        if exit.is_out(PORT_DONE) {
            break;
        }
        let Exit::Io { write: false, size: 1, port: 0x80, count, .. } = exit else {
            return fail(format!("expected reads got {exit:x?}"));
        };
        equal("items", count > 0, true)?;
        guest.vcpu().answer(&[0xaa; 4096]);
        let mut regs = guest.vcpu().regs()?;
        match regs.rcx {
            2 => regs.rcx = 1,
            3 => regs.rcx = 8192,
            _ => continue,
        }
        guest.vcpu().set_regs(&regs)?;
    }
    equal("rdi of the short one", guest.result(0), FREE + 1)?;
    equal("rdi and rcx of the long one", (guest.result(1), guest.result(2)), (FREE + 8192, 0))
}

guest_code!(
    no_elements,
    64,
    "mov $FREE, %esi",
    "mov $FREE, %edi",
    "mov $0x1f0, %edx",
    "xor %ecx, %ecx",
    "rep insb",
    "rep outsl",
    done!()
);

fn a_string_of_no_elements_does_nothing() -> Outcome {
    Guest::new(Chip::None, no_elements())?.finish()
}

guest_code!(from_device, 64, "cld", "mov $NOWHERE, %esi", "mov $0x80, %edx", "outsl", done!());

fn a_string_write_from_device_memory() -> Outcome {
    let guest = Guest::new(Chip::None, from_device())?;
    guest.expect("read", Exit::mmio(false, NOWHERE, &[0; 4]))?;
    guest.vcpu().answer(&[1, 2, 3, 4]);
    guest.expect("write", out(4, 0x80, &[1, 2, 3, 4]))?;
    guest.finish()
}

guest_code!(
    in_real_mode,
    16,
    "mov $0x5a, %al",
    "out %al, $0x80",
    "in $0x81, %ax",
    "mov %ax, 0x8000",
    "mov $0x8000, %si",
    "mov $0x82, %dx",
    "mov $2, %cx",
    "cld",
    "rep outsb",
    "out %al, $PORT_DONE",
);

fn real_mode_uses_ports() -> Outcome {
    let guest = Guest::real(in_real_mode())?;
    guest.expect("write", out(1, 0x80, &[0x5a]))?;
    guest.expect("read", Exit::Io { write: false, size: 2, port: 0x81, count: 1, data: vec![] })?;
    guest.vcpu().answer(&[0xcd, 0xab]);
    equal("string", collected(&guest, 1, 0x82)?, vec![0xcd, 0xab])
}
