//! Memory, registers, instructions from numbers, and a hardware VMCS.

use gannet_nested_vmx::machine::{Cpu, Instruction, Place};
use gannet_nested_vmx::{GuestMemory, Vmcs12};
use x86::vmcs::field;
use x86::{Exception, Gpa};
use zerocopy::IntoBytes;

pub use super::rig::{CPU, KNOWN, L0, LIMITS, Memory, Vmcs02, capabilities};

/// Bytes of memory; regions lie in its first pages, operands in the last.
const SIZE: usize = 0x10000;
/// Where an operand in memory lies.
pub const OPERAND: u64 = 0xf000;

impl Memory {
    /// Pages 1 to 5 are regions with a VMCS that can be entered; page 6 has a wrong revision.
    pub fn new() -> Self {
        let memory = Self::of(SIZE);
        for page in 1..=5u64 {
            memory.put(page << 12, good().as_bytes());
        }
        memory.put(0x6000, &[1, 2, 3, 4]);
        memory
    }
}

/// The fields of a VMCS that can be entered, with their values.
#[rustfmt::skip] // A table.
pub const GOOD: &[(u16, u64)] = &[
    (0x4000, 0x1f), (0x4002, 0x8400_61f2), (0x401e, 0x80 | 0x22), (0x400c, 0x23_6ffb),
    (0x4012, 0x93fb), (0x2800, u64::MAX), (0x0000, 1), (0x201a, 0x501e),
    (0x6c00, 0x8005_0033), (0x6c02, 0x1000), (0x6c04, 0x2020), (0x0c02, 8), (0x0c0c, 0x40),
    (0x0c04, 16), (0x2c02, 0xd01), (0x6c16, 0x8000), (0x6c14, 0x9000),
    (0x6800, 0x8005_0033), (0x6802, 0x2000), (0x6804, 0x2020), (0x2806, 0xd01), (0x681a, 0x400),
    (0x681e, 0x4000), (0x681c, 0x5000), (0x6820, 0x202),
    (0x0802, 8), (0x4802, 0xffff_ffff), (0x4816, 0xa09b),
    (0x0804, 16), (0x4804, 0xffff_ffff), (0x4818, 0xc093),
    (0x481a, 0x1_0000), (0x4814, 0x1_0000), (0x481c, 0x1_0000), (0x481e, 0x1_0000),
    (0x4820, 0x1_0000), (0x080e, 0x40), (0x480e, 0x67), (0x4822, 0x8b),
    (0x4810, 0x7f), (0x4812, 0xfff),
];

pub fn good() -> Vmcs12 {
    let mut image = Vmcs12::new();
    for (encoding, value) in GOOD {
        let at = u64::from(*encoding);
        image.write(at, x86::vmcs::place::find(at).unwrap(), *value);
    }
    image
}

/// Encodings that a run of L2 changes, with the bits that it may set.
pub const CHANGED_BY_L2: &[(u16, u64)] = &[
    (0x681e, 0xffff_ffff),
    (0x681c, 0xffff_fff0),
    (0x6802, 0xffff_f000),
    (0x680e, 0xffff_ffff),
    (0x6824, 0xffff),
    (0x482a, 0xffff),
];

/// L2 runs and exits.
pub fn run_l2(vmcs: &mut Vmcs02, number: u64) {
    vmcs.written.clear();
    for (n, (encoding, mask)) in CHANGED_BY_L2.iter().enumerate() {
        if number >> (40 + n) & 1 != 0 {
            vmcs.values[usize::from(*encoding)] = number.rotate_left(n as u32 * 7) & mask;
        }
    }
    // TS is L2's own where L1 does not own it: L0's mask leaves it.
    let own = 8 & !vmcs.values[0x6000];
    if number >> 50 & 1 != 0 {
        vmcs.values[0x6800] ^= own;
    }
    let reason = [10, 12, 18, 30, 48, 1][(number >> 20) as usize % 6];
    vmcs.values[field::EXIT_REASON.encoding() as usize] = reason;
    vmcs.values[field::EXIT_QUALIFICATION.encoding() as usize] = number >> 8 & 0xffff;
    vmcs.values[field::INSTRUCTION_LENGTH.encoding() as usize] = number >> 3 & 7;
    vmcs.values[field::GUEST_PHYSICAL_ADDRESS.encoding() as usize] = number >> 12 & 0xffff_f000;
    vmcs.values[field::GUEST_LINEAR_ADDRESS.encoding() as usize] = number >> 16 & 0xffff_f000;
    vmcs.values[field::INSTRUCTION_INFO.encoding() as usize] = number >> 5 & 0xffff;
    // The hardware makes an injected event invalid.
    vmcs.values[field::ENTRY_INTERRUPTION.encoding() as usize] &= 0x7fff_ffff;
}

/// Pointers that instructions get.
const POINTERS: [u64; 12] = [
    0x1000,
    0x2000,
    0x3000,
    0x4000,
    0x2000,
    0x3000,
    0x5000,
    0x6000,
    0x2008,
    1 << 40,
    0x8_0000,
    0x1000,
];

/// Fields that VMWRITE gets, and values that leave the VMCS good or break one rule.
const WRITES: &[(u64, [u64; 4])] = &[
    (0x681e, [0x1111, 0x2222, 0x3333, 1 << 50]),
    (0x681c, [1, 2, 3, 4]),
    (0x6820, [0x202, 0x2, 0x246, 0]),
    (0x4000, [0x1f, 0x1f, 0x3f, 0]),
    (0x4004, [0, 1, 0x4000, 6]),
    (0x2010, [0, 5, u64::MAX, 7]),
    (0x2011, [0, 1, 2, 3]),
    (0x6c02, [0x1000, 0x5000, 0x7000, 1 << 41]),
    (0x6c14, [1, 2, 3, 4]),
    (0x2800, [u64::MAX, u64::MAX, u64::MAX, 0x3001]),
    (0x680e, [0, 1, 2, 1 << 60]),
    (0x6000, [0, 8, 1, 9]),
    (0x6004, [0, 8, 1, 9]),
    (0x4816, [0xa09b, 0xa09b, 0xffff_a09b, 0x9b]),
    (0x4402, [1, 2, 3, 4]),
    (0x4406, [1, 2, 3, 4]),
    (0x4016, [0, 0x8000_0202, 0x202, 0x8000_0100]),
    (0x681a, [0x400, 0x401, 0x402, 0x403]),
    (0x4012, [0x93fb, 0x93ff, 0x93fb, 0x13fb]),
    (0x400c, [0x23_6ffb, 0x23_6fff, 0x37_6fff, 0x23_6ffb]),
    (0x0001, [0; 4]),
    (0x7fff, [0; 4]),
    (0x1_681e, [0; 4]),
    (0x200c, [0; 4]),
];

fn cpu(number: u64) -> Cpu {
    match number >> 56 & 63 {
        0 => Cpu { cpl: 3, ..CPU },
        1 => Cpu { is_64_bit: false, ..CPU },
        2 => Cpu { vm86: true, long_mode: false, is_64_bit: false, ..CPU },
        3 => Cpu { cr4: 0x20, ..CPU },
        4 => Cpu { cr0: 0x32, ..CPU },
        5 => Cpu { feature_control: 1, ..CPU },
        6 => Cpu { cr0: 0x8005_0013, ..CPU },
        7 => Cpu { blocked_by_mov_ss: true, ..CPU },
        8 => Cpu { long_mode: false, is_64_bit: false, ..CPU },
        _ => CPU,
    }
}

/// A field and a value for it. Those that break a rule are rare, since they stay.
pub fn write_of(number: u64) -> (u64, u64) {
    let (field, values) = WRITES[(number >> 8) as usize % WRITES.len()];
    let at = (number >> 16) as usize & 3;
    (field, values[if at == 3 && number >> 26 & 3 != 0 { 0 } else { at }])
}

/// The instruction that a number stands for; its operand is put into memory.
pub fn decode(number: u64, memory: &mut Memory) -> (Instruction, Cpu) {
    let pick = (number >> 8) as usize;
    let pointer = POINTERS[pick % POINTERS.len()];
    memory.write(Gpa(OPERAND), &pointer.to_le_bytes()).unwrap();
    memory.write(Gpa(OPERAND + 8), &[0; 8]).unwrap();
    let fault = (number >> 32) & 31 == 0;
    let operand = if fault { Err(Exception::ss(0)) } else { Ok(OPERAND) };
    let (field, value) = write_of(number);
    let in_memory = number >> 24 & 7 == 0;
    let place = if in_memory { Place::Memory(operand) } else { Place::Register(3) };
    let instruction = match number & 31 {
        0 => Instruction::Vmxon { pointer: operand },
        1 if number >> 28 & 15 == 0 => Instruction::Vmxoff,
        2 => Instruction::Vmclear { pointer: operand },
        3..=6 => Instruction::Vmptrld { pointer: operand },
        7 => Instruction::Vmptrst { to: operand },
        8..=13 => Instruction::Vmread { field, to: place },
        14..=19 => {
            if in_memory {
                memory.write(Gpa(OPERAND), &value.to_le_bytes()).unwrap();
            }
            Instruction::Vmwrite { field, from: place, value }
        }
        20..=22 => Instruction::Vmlaunch,
        23..=27 => Instruction::Vmresume,
        28 => {
            memory
                .write(Gpa(OPERAND), &[0x5eu64, 0x18, 0x1e, 0x7f][pick & 3].to_le_bytes())
                .unwrap();
            Instruction::Invept { kind: number >> 16 & 3, descriptor: operand }
        }
        29 => {
            let vpid: u64 = [0, 1, 2, 0x1_0000][pick & 3];
            memory.write(Gpa(OPERAND), &vpid.to_le_bytes()).unwrap();
            let address: u64 = if number >> 28 & 1 != 0 { 1 << 60 } else { 0x1000 };
            memory.write(Gpa(OPERAND + 8), &address.to_le_bytes()).unwrap();
            Instruction::Invvpid { kind: number >> 16 & 7, descriptor: operand }
        }
        _ => Instruction::Vmread { field, to: place },
    };
    (instruction, cpu(number))
}

/// A store of L1 into a region that is not current: its revision is broken or mended.
pub fn poke(number: u64) -> Option<(u64, u32)> {
    if number & 31 != 31 {
        return None;
    }
    let at = 0x2000 + (number >> 8 & 3) * 0x1000;
    let word = [0x11e5_7ed0, 0x11e5_7ed0, 0x91e5_7ed0, 1][(number >> 16) as usize & 3];
    Some((at, word))
}
