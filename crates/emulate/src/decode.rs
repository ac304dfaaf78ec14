//! Instruction bytes to [`Decoded`]: iced-x86's instruction plus the precomputed form of the
//! simplest MMIO accesses. Pure: the result depends on the bytes and the code size alone, so RIP
//! is added only at execution. Hence [`DecodeCache`] needs no translation and no generation to
//! invalidate: an entry is valid for ever, only the bytes must be those at RIP now.
//!
//! Why a decoder of others and not our own: x86 has more corners than an emulator has tests, and what decides is
//! that this decoder and the guest's CPU agree on where an instruction ends ([`crate::length`] is the exception,
//! and is tested against the decoder).
//!
//! Why simple accesses have a form of their own: nearly all device accesses are a MOV. For those the register, the
//! size and the extension are all that is left to know once the fault has told the address, so that neither operands
//! nor the guest's tables have to be looked at again.
//!
//! Why twelve bits of the address are enough to trust the fault's: paging keeps them. If they agree, the access
//! begins where the fault says. If not, it began on the page before and crossed into this one, which no single
//! device access is. A segment's base is part of them: who does not know it must not trust the beginning of a page.

use crate::{
    machine::{CodeSize, SegReg},
    register::{RegRef, segment_of, sign_extend, size_mask},
};
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// The longest instruction, in bytes (SDM vol. 2A §2.3.11).
pub(crate) const MAX_LENGTH: usize = 15;

/// Why bytes did not decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// The instruction continues past the given bytes: fetch the next page.
    Truncated,
    /// Longer than 15 bytes: #GP(0).
    TooLong,
    /// No instruction that the decoder knows, or LOCK where it may not stand: #UD on hardware.
    Invalid,
}

/// How a narrow load fills its wider destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extend {
    /// The sizes are the same.
    None,
    /// The rest becomes zero: MOVZX.
    Zero,
    /// The rest becomes the sign: MOVSX, MOVSXD.
    Sign,
}

/// A memory access of the simplest kind. When a TDP fault names the guest-physical address, no
/// page walk is needed to complete it, and flags are not touched. The fault names the first byte
/// that faulted, which is the access's first byte only if [`Decoded::page_offset`] says so: an
/// access that crosses pages is for [`crate::emulate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimpleMmio {
    /// Memory to register; `dest.size` is the destination's size.
    Load {
        /// Bytes read from memory: 1, 2, 4 or 8.
        size: u8,
        /// The register that is written.
        dest: RegRef,
        /// How the value fills the destination.
        extend: Extend,
    },
    /// Register to memory.
    StoreReg {
        /// Bytes written: 1, 2, 4 or 8.
        size: u8,
        /// Source, of the same size.
        src: RegRef,
    },
    /// Constant to memory.
    StoreImm {
        /// Bytes written: 1, 2, 4 or 8.
        size: u8,
        /// The constant, sign-extended where the encoding does so.
        value: u64,
    },
}

impl SimpleMmio {
    /// For a load: the whole destination register after `value` (the `size` bytes read, little
    /// endian) arrived, given the register's old content. `None` for stores.
    #[inline]
    pub const fn loaded(self, old: u64, value: u64) -> Option<u64> {
        match self {
            Self::Load { size, dest, extend } => {
                let value = match extend {
                    Extend::Sign => sign_extend(value, size),
                    _ => value & size_mask(size),
                };
                Some(dest.insert(old, value))
            }
            _ => None,
        }
    }
}

/// The parts of a memory operand's address that its low 12 bits depend on.
#[derive(Clone, Copy, Debug)]
struct Address {
    /// Register index, [`Address::RIP`] or [`Address::NONE`].
    base: u8,
    /// Register index or [`Address::NONE`].
    index: u8,
    /// log2 of the index's factor.
    scale: u8,
    /// `None` where the segment's base is always 0.
    segment: Option<SegReg>,
    /// Displacement modulo 64 KiB.
    displacement: u16,
}

impl Address {
    const NONE: u8 = 0xff;
    const RIP: u8 = 16;

    fn of(insn: &Instruction, size: CodeSize) -> Self {
        let register = |register| match register {
            Register::RIP | Register::EIP => Self::RIP,
            _ => RegRef::of(register).map_or(Self::NONE, |register| register.index),
        };
        // In 64-bit mode the bases of the others are taken for 0, whatever their registers hold
        // (SDM vol. 1 §3.4.2.1).
        let segment = segment_of(insn.memory_segment()).filter(|segment| {
            size != CodeSize::Bits64 || matches!(segment, SegReg::Fs | SegReg::Gs)
        });
        Self {
            base: register(insn.memory_base()),
            index: register(insn.memory_index()),
            // 1, 2, 4 or 8: as a shift it is computed faster than as a factor.
            scale: insn.memory_index_scale().trailing_zeros() as u8,
            segment,
            // Of the displacement only what reaches the low 12 bits is kept; it makes the cached
            // form small.
            displacement: insn.memory_displacement64() as u16,
        }
    }
}

/// A decoded instruction, free to copy.
#[derive(Clone, Copy, Debug)]
pub struct Decoded {
    pub(crate) insn: Instruction,
    simple: Option<SimpleMmio>,
    address: Address,
}

impl Decoded {
    /// Length in bytes, 1 to 15.
    #[inline]
    pub const fn len(&self) -> u8 {
        self.insn.len() as u8
    }

    /// Never true; here because [`Self::len`] is.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// The access in its simplest form, if it has one.
    #[inline]
    pub const fn simple_mmio(&self) -> Option<SimpleMmio> {
        self.simple
    }

    /// Bits 11:0 of the linear address of a [`SimpleMmio`] access. When they equal those of the
    /// faulting guest-physical address and `size` bytes fit the page, the access lies there as a
    /// whole. `gpr` gives a register by index, `base` a segment's base (asked only where it can
    /// be other than 0), `rip` is the instruction's.
    #[inline(always)]
    pub fn page_offset(
        &self,
        gpr: impl Fn(usize) -> u64,
        rip: u64,
        base: impl FnOnce(SegReg) -> u64,
    ) -> u16 {
        // Truncation to the address size does not reach the low 12 bits.
        let a = &self.address;
        let mut at = u64::from(a.displacement);
        match a.base {
            Address::NONE => {}
            // Decoded with the instruction at 0: the displacement includes its length.
            Address::RIP => at = at.wrapping_add(rip),
            n => at = at.wrapping_add(gpr(usize::from(n))),
        }
        if a.index != Address::NONE {
            // The mask bounds the shift: no check is left in the compiled code.
            at = at.wrapping_add(gpr(usize::from(a.index)) << (a.scale & 3));
        }
        if let Some(segment) = a.segment {
            at = at.wrapping_add(base(segment));
        }
        (at & 0xfff) as u16
    }
}

/// Builds the decoder's tables, which allocates (infallibly, inside iced-x86). To be called once
/// when the module is loaded; after that nothing in this crate allocates.
pub fn warm_up() {
    // One mode does: the tables are shared by all.
    let _ = decode(&[0x90], CodeSize::Bits64);
}

/// Decodes the first instruction of `bytes`, of which at most 15 are looked at.
///
/// # Errors
/// See [`DecodeError`].
pub fn decode(bytes: &[u8], size: CodeSize) -> Result<Decoded, DecodeError> {
    // What lies behind the fifteenth byte does not belong to any instruction, and must not decide
    // about one.
    let bytes = bytes.get(..MAX_LENGTH).unwrap_or(bytes);
    if bytes.is_empty() {
        return Err(DecodeError::Truncated);
    }
    let bitness = match size {
        CodeSize::Bits16 => 16,
        CodeSize::Bits32 => 32,
        CodeSize::Bits64 => 64,
    };
    // At address 0, see `Address`. No options: what only one vendor's older CPUs know stays
    // unknown.
    let mut decoder = Decoder::new(bitness, bytes, DecoderOptions::NONE);
    let mut insn = Instruction::default();
    decoder.decode_out(&mut insn);
    match decoder.last_error() {
        DecoderError::None => {
            Ok(Decoded { simple: simple(&insn), address: Address::of(&insn, size), insn })
        }
        DecoderError::NoMoreBytes => Err(DecodeError::Truncated),
        // The decoder calls an instruction invalid that wants a 16th byte; it has read all 15 then.
        _ if insn.len() >= MAX_LENGTH => Err(DecodeError::TooLong),
        _ => Err(DecodeError::Invalid),
    }
}

/// An immediate operand as the instruction uses it, extended to 64 bits.
pub(crate) fn immediate(insn: &Instruction, kind: OpKind) -> Option<u64> {
    Some(match kind {
        OpKind::Immediate8 => u64::from(insn.immediate8()),
        OpKind::Immediate16 => u64::from(insn.immediate16()),
        OpKind::Immediate32 => u64::from(insn.immediate32()),
        OpKind::Immediate64 => insn.immediate64(),
        OpKind::Immediate8to16 => insn.immediate8to16() as u64,
        OpKind::Immediate8to32 => insn.immediate8to32() as u64,
        OpKind::Immediate8to64 => insn.immediate8to64() as u64,
        OpKind::Immediate32to64 => insn.immediate32to64() as u64,
        _ => return None,
    })
}

fn simple(insn: &Instruction) -> Option<SimpleMmio> {
    let extend = match insn.mnemonic() {
        Mnemonic::Mov => Extend::None,
        Mnemonic::Movzx => Extend::Zero,
        Mnemonic::Movsx | Mnemonic::Movsxd => Extend::Sign,
        _ => return None,
    };
    // Vectors and far pointers have other sizes, and are no simple access.
    let size = match insn.memory_size().size() {
        size @ (1 | 2 | 4 | 8) => size as u8,
        _ => return None,
    };
    match (insn.op0_kind(), insn.op1_kind()) {
        (OpKind::Register, OpKind::Memory) => {
            let dest = RegRef::of(insn.op0_register())?;
            Some(SimpleMmio::Load { size, dest, extend })
        }
        (OpKind::Memory, OpKind::Register) => {
            // Control, debug and vector registers are none of the general ones: not simple.
            let src = RegRef::of(insn.op1_register())?;
            // A store of a segment register has a source of another size, or none here.
            (src.size == size).then_some(SimpleMmio::StoreReg { size, src })
        }
        (OpKind::Memory, kind) => {
            let value = immediate(insn, kind)?;
            Some(SimpleMmio::StoreImm { size, value: value & size_mask(size) })
        }
        _ => None,
    }
}

/// Up to 15 instruction bytes with their number and the code size, packed so that two words
/// compare them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    low: u64,
    /// Bytes 8 to 14; the top byte holds the count (bits 7:4) and the code size (bits 1:0).
    high: u64,
}

impl Fetched {
    /// Packs the first 15 of `bytes`.
    #[inline]
    pub fn new(bytes: &[u8], size: CodeSize) -> Self {
        // Full windows are the rule, and loads of a fixed size need no call to memcpy.
        if let Some(window) = bytes.first_chunk::<16>() {
            return Self::from_words(u128::from_le_bytes(*window), 15, size);
        }
        if let (Some(low), Some(high)) = (bytes.first_chunk::<8>(), bytes.last_chunk::<8>())
            && bytes.len() == MAX_LENGTH
        {
            // The two loads overlap in one byte, which is shifted out.
            let high = u64::from_le_bytes(*high) >> 8;
            let words = u128::from(u64::from_le_bytes(*low)) | u128::from(high) << 64;
            return Self::from_words(words, 15, size);
        }
        // A short window lies at the end of a page: rare, so byte by byte.
        let mut words = 0;
        for byte in bytes.iter().rev() {
            words = words << 8 | u128::from(*byte);
        }
        Self::from_words(words, bytes.len() as u8, size)
    }

    /// Packs `count` bytes (15 count at most) that stand in `words` in memory order, as two 8-byte
    /// loads give them.
    #[inline]
    pub const fn from_words(words: u128, count: u8, size: CodeSize) -> Self {
        let (words, count) = if count >= MAX_LENGTH as u8 {
            (words & (u128::MAX >> 8), MAX_LENGTH as u8)
        } else {
            (words & ((1u128 << (count as u32 * 8)) - 1), count)
        };
        // Count and size are part of the key: the same bytes mean other things in another mode, or
        // cut short by a page.
        let tag = ((count << 4) | size as u8) as u64;
        Self { low: words as u64, high: (words >> 64) as u64 | tag << 56 }
    }

    const fn tag(self) -> u8 {
        (self.high >> 56) as u8
    }

    /// The code size that they are decoded for.
    pub const fn size(self) -> CodeSize {
        match self.tag() & 3 {
            0 => CodeSize::Bits16,
            1 => CodeSize::Bits32,
            _ => CodeSize::Bits64,
        }
    }

    #[inline]
    const fn bytes(self) -> [u8; 16] {
        (self.low as u128 | (self.high as u128) << 64).to_le_bytes()
    }

    #[inline]
    const fn slot(self) -> usize {
        // One multiplication spreads all 15 bytes over the top bits.
        let mixed = (self.low ^ self.high.rotate_left(23)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> (64 - SLOT_BITS)) as usize
    }
}

const SLOT_BITS: u32 = 3;
const SLOTS: usize = 1 << SLOT_BITS;

/// Eight decoded instructions, direct-mapped by their bytes. One per vCPU, no lock.
#[derive(Clone, Debug)]
pub struct DecodeCache {
    keys: [Fetched; SLOTS],
    decoded: [Option<Decoded>; SLOTS],
}

impl Default for DecodeCache {
    fn default() -> Self {
        Self::new()
    }
}

impl DecodeCache {
    /// An empty cache.
    pub const fn new() -> Self {
        // A key of zero bytes never equals a fetched one that decodes.
        Self { keys: [Fetched { low: 0, high: 0 }; SLOTS], decoded: [None; SLOTS] }
    }

    /// The decoding of `bytes` if the cache has it: two compares.
    #[inline]
    pub fn lookup(&self, bytes: Fetched) -> Option<&Decoded> {
        let slot = bytes.slot();
        // Whole bytes are compared, never a hash: another vCPU may have changed the code since, and
        // the guest chooses it.
        if *self.keys.get(slot)? != bytes {
            return None;
        }
        self.decoded.get(slot)?.as_ref()
    }

    /// The decoding of `bytes`, decoded and remembered if it is new.
    ///
    /// # Errors
    /// See [`DecodeError`]; errors are not remembered.
    #[inline]
    pub fn get(&mut self, bytes: Fetched) -> Result<Decoded, DecodeError> {
        match self.lookup(bytes) {
            Some(decoded) => Ok(*decoded),
            // Out of line: the decoder is large, and the hit is what the inner loop pays for.
            None => self.fill(bytes),
        }
    }

    #[cold]
    fn fill(&mut self, bytes: Fetched) -> Result<Decoded, DecodeError> {
        let all = bytes.bytes();
        let decoded =
            decode(all.get(..usize::from(bytes.tag() >> 4)).unwrap_or(&[]), bytes.size())?;
        let slot = bytes.slot();
        if let (Some(key), Some(entry)) = (self.keys.get_mut(slot), self.decoded.get_mut(slot)) {
            // Both or neither: a key without its decoding would answer for another instruction.
            *key = bytes;
            *entry = Some(decoded);
        }
        Ok(decoded)
    }
}
