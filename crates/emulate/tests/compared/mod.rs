//! Random instructions on random state, run by the emulator and by the real CPU.
#![allow(dead_code)]

pub mod templates;

use gannet_emulate::{CodeSize, Outcome, Stop, decode, emulate};
use iced_x86::{Decoder, DecoderOptions, Instruction};
use x86::Rflags;

use super::machine::{RCX, RSP, TestMachine};
use super::native_cpu::{NativeCpu, State};
use super::undefined;

pub const STATUS: u64 = Rflags::STATUS.bits();
pub const DF: u64 = Rflags::DF.bits();

/// Bytes that were given, and xorshift64* behind them: the same sequence on every run, so that a failure repeats.
pub struct Random {
    state: u64,
    given: Vec<u8>,
    at: usize,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { state: seed, given: Vec::new(), at: 0 }
    }
    /// What a fuzzer chose comes first.
    pub fn of(given: &[u8]) -> Self {
        Self { state: 1, given: given.to_vec(), at: 0 }
    }
    fn take(&mut self, count: usize) -> Option<u64> {
        let bytes = self.given.get(self.at..self.at + count)?;
        self.at += count;
        Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }
    pub fn next(&mut self) -> u64 {
        if let Some(given) = self.take(8) {
            return given;
        }
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        match self.take(if n <= 256 { 1 } else { 2 }) {
            Some(given) => given % n,
            None => (self.next() >> 8) % n,
        }
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    /// Random bits, often those at which arithmetic turns.
    pub fn value(&mut self) -> u64 {
        const EDGES: [u64; 8] =
            [0, 1, 0x7f, 0x80, 0x7fff_ffff, 0x8000_0000, u64::MAX >> 1, 1 << 63];
        match self.below(6) {
            0 => EDGES[self.below(8) as usize],
            1 => EDGES[self.below(8) as usize].wrapping_neg(),
            2 => self.below(300),
            _ => self.next(),
        }
    }
}

/// How an instruction's operands are encoded.
#[derive(Clone, Copy, PartialEq)]
pub enum Form {
    /// ModRM with a random register in `reg`.
    Reg,
    /// ModRM with this opcode extension.
    Ext(u8),
    /// ModRM, register and memory; the register is a bit offset into memory.
    Bits,
    /// Like `Ext`, memory only.
    Memory(u8),
    /// Like `Reg`, memory only.
    RegMemory,
}

/// Opcode map prefix and opcode, form, immediate bytes (9 = operand size up to 4), whether LOCK is
/// legal with a memory destination, and the mandatory prefix.
pub struct Template {
    pub opcode: &'static [u8],
    pub form: Form,
    pub immediate: u8,
    pub lock: bool,
    pub mandatory: u8,
    /// 66 and REX.W choose the operand size.
    pub sized: bool,
}

/// A template without a mandatory prefix.
pub const fn t(opcode: &'static [u8], form: Form, immediate: u8, lock: bool) -> Template {
    Template { opcode, form, immediate, lock, mandatory: 0, sized: true }
}

pub struct Made {
    pub bytes: Vec<u8>,
    pub state: State,
}

/// Encodes `template` with random operands and sets up registers such that memory operands lie in
/// the data area. `None` when the random choices do not fit together.
pub fn make(
    random: &mut Random,
    template: &Template,
    cpu: &NativeCpu,
    memory: bool,
) -> Option<Made> {
    let mut state = State::default();
    for gpr in &mut state.gpr {
        *gpr = random.value();
    }
    for xmm in &mut state.xmm {
        *xmm = u128::from(random.next()) << 64 | u128::from(random.next());
    }
    state.rflags = 2 | (random.next() & STATUS);

    let narrow = template.sized && random.one_in(3);
    let wide = template.sized && random.one_in(3);
    let operand: u64 = if wide {
        8
    } else if narrow {
        2
    } else {
        4
    };
    let address32 = memory && random.one_in(5);
    let mut prefixes = Vec::new();
    if memory && template.lock && random.one_in(3) {
        prefixes.push(0xf0);
    }
    if narrow {
        prefixes.push(0x66);
    }
    if address32 {
        prefixes.push(0x67);
    }
    if template.mandatory != 0 {
        prefixes.push(template.mandatory);
    }
    let reg = match template.form {
        Form::Ext(n) | Form::Memory(n) => n,
        _ => random.below(16) as u8,
    };
    let mut rex = 0x40 | if wide { 8 } else { 0 } | ((reg >> 3) << 2);
    let mut after = Vec::new();
    let mut rip_relative = None;
    // 16-byte aligned in a quarter of the cases, anywhere otherwise, also across the pages.
    let mut target = cpu.data() + 512 + random.below(0x2000 - 1024);
    let locks = prefixes.contains(&0xf0) || matches!(template.opcode, [0x86 | 0x87]);
    if locks || random.one_in(4) {
        // A lock across two cache lines is slow on some hosts and SIGBUS on others.
        target &= !15;
    }
    if !memory {
        let rm = random.below(16) as u8;
        if rm == RSP as u8 || reg == RSP as u8 {
            return None;
        }
        rex |= rm >> 3;
        after.push(0xc0 | (reg & 7) << 3 | rm & 7);
    } else {
        let base = random.below(16) as u8;
        let displacement = if random.one_in(2) {
            random.below(256) as u8 as i8 as i32
        } else {
            random.next() as i32
        };
        let short = i8::try_from(displacement).is_ok();
        let mode = if short { 0x40 } else { 0x80 };
        let mut offset = displacement as i64 as u64;
        if template.form == Form::Bits {
            // A bit offset of some bytes to either side, garbage above the operand's width.
            let bits = random.below(4000).wrapping_sub(2000);
            let mask = if operand == 8 { u64::MAX } else { (1 << (operand * 8)) - 1 };
            state.gpr[usize::from(reg)] = (bits & mask) | (random.next() & !mask);
        }
        if random.one_in(8) {
            // [rip + disp32]
            after.push((reg & 7) << 3 | 5);
            rip_relative = Some(after.len());
            after.extend_from_slice(&[0; 4]);
        } else if random.one_in(2) || base & 7 == 4 {
            // [base + index * scale + disp]
            let index = random.below(16) as u8;
            let scale = random.below(4) as u8;
            if index == base || template.form == Form::Bits && (base == reg || index == reg) {
                return None;
            }
            rex |= base >> 3 | (index >> 3) << 1;
            after.push(mode | (reg & 7) << 3 | 4);
            after.push(scale << 6 | (index & 7) << 3 | base & 7);
            if index != 4 {
                offset = offset.wrapping_add(state.gpr[usize::from(index)] << scale);
            }
            state.gpr[usize::from(base)] = target.wrapping_sub(offset);
        } else {
            if template.form == Form::Bits && base == reg {
                return None;
            }
            rex |= base >> 3;
            after.push(mode | (reg & 7) << 3 | base & 7);
            state.gpr[usize::from(base)] = target.wrapping_sub(offset);
        }
        if address32 && rip_relative.is_none() {
            // The upper half must not matter.
            let b = if after[0] & 7 == 4 {
                after[1] & 7 | (rex & 1) << 3
            } else {
                after[0] & 7 | (rex & 1) << 3
            };
            let b = usize::from(b);
            state.gpr[b] = (state.gpr[b] & 0xffff_ffff) | random.next() << 32;
        }
        if rip_relative.is_none() {
            if short {
                after.push(displacement as u8);
            } else {
                after.extend_from_slice(&displacement.to_le_bytes());
            }
        }
    }
    let immediate = match template.immediate {
        9 => operand.min(4) as usize,
        n => usize::from(n),
    };
    let value = random.value().to_le_bytes();
    let mut bytes = prefixes;
    if rex != 0x40 || random.one_in(4) {
        bytes.push(rex);
    }
    bytes.extend_from_slice(template.opcode);
    let head = bytes.len();
    bytes.extend_from_slice(&after);
    bytes.extend_from_slice(&value[..immediate]);
    if let Some(at) = rip_relative {
        // The instruction ends where the epilogue starts.
        let relative = target.wrapping_sub(cpu.end_of_instruction()) as u32;
        bytes[head + at..head + at + 4].copy_from_slice(&relative.to_le_bytes());
    }
    Some(Made { bytes, state })
}

/// Runs one case both ways. False when the emulator stops (and the CPU was not asked).
pub fn compare(cpu: &mut NativeCpu, random: &mut Random, made: &Made) -> bool {
    let mut ram = vec![0u8; cpu.data_len()];
    for word in ram.chunks_exact_mut(8) {
        word.copy_from_slice(&random.value().to_le_bytes());
    }
    compare_on(cpu, &made.bytes, &made.state, ram)
}

pub fn decoded_alone(bytes: &[u8]) -> Instruction {
    Decoder::new(64, bytes, DecoderOptions::NONE).decode()
}

pub fn compare_on(cpu: &mut NativeCpu, bytes: &[u8], state: &State, ram: Vec<u8>) -> bool {
    let insn = decoded_alone(bytes);
    // Only BSF and BSR ask, and their flags tell: ZF is the one that is defined.
    let undefined = undefined::after(&insn, state.gpr[RCX] as u8, false);
    if undefined.all {
        return false;
    }
    let mut m = TestMachine::new(CodeSize::Bits64, cpu.data(), 0);
    m.gpr = state.gpr;
    m.xmm = state.xmm;
    m.rflags = state.rflags;
    m.rip = cpu.end_of_instruction() - bytes.len() as u64;
    m.cpl = 3;
    m.ram = ram.clone();
    let decoded = decode(bytes, CodeSize::Bits64)
        .unwrap_or_else(|error| panic!("{bytes:02x?} does not decode: {error:?}"));
    assert_eq!(usize::from(decoded.len()), bytes.len(), "{bytes:02x?}");
    let done = loop {
        match emulate(&mut m, &decoded) {
            Ok(done) => {
                m.rflags = done.rflags.bits();
                if done.outcome == Outcome::Done {
                    break done;
                }
            }
            Err(Stop::Fault(_)) => return false,
            Err(stop) => panic!("{bytes:02x?}: {stop:?}"),
        }
    };
    let (native, native_ram) = cpu.run(bytes, state, &ram);
    let zero = native.rflags & Rflags::ZF.bits() != 0;
    let undefined = undefined::after(&insn, state.gpr[RCX] as u8, zero);
    let context = || format!("{bytes:02x?} {:?} from {state:x?}", insn.code());
    assert_eq!(done.rip, cpu.end_of_instruction(), "RIP after {}", context());
    let skipped = undefined.destination.then(|| insn.op0_register().number());
    for n in 0..16 {
        if skipped != Some(n) {
            assert_eq!(
                m.gpr[n],
                native.gpr[n],
                "register {n} (emulated, native) after {}",
                context()
            );
        }
        assert_eq!(m.xmm[n], native.xmm[n], "xmm {n} (emulated, native) after {}", context());
    }
    for (n, (a, b)) in m.ram.iter().zip(&native_ram).enumerate() {
        assert_eq!(a, b, "memory byte {n} (emulated, native) after {}", context());
    }
    let mask = (STATUS | DF) & !undefined.flags.bits();
    assert_eq!(
        done.rflags.bits() & mask,
        native.rflags & mask,
        "flags (emulated, native) differ in {:#x} after {}",
        (done.rflags.bits() ^ native.rflags) & mask,
        context()
    );
    true
}
