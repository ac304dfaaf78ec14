//! The decode cache: instruction bytes to their decoding, without a translation or a generation to
//! invalidate. Decoding is a pure function of the bytes and the code size, so an entry is valid
//! for ever; only the bytes must be those at RIP now.

use crate::decode::{DecodeError, Decoded, MAX_LENGTH, decode};
use crate::machine::CodeSize;

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
            let high = u64::from_le_bytes(*high) >> 8;
            let words = u128::from(u64::from_le_bytes(*low)) | u128::from(high) << 64;
            return Self::from_words(words, 15, size);
        }
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

    fn decode(self) -> Result<Decoded, DecodeError> {
        let words = u128::from(self.low) | u128::from(self.high) << 64;
        let bytes = words.to_le_bytes();
        decode(bytes.get(..usize::from(self.tag() >> 4)).unwrap_or(&[]), self.size())
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
            None => self.fill(bytes),
        }
    }

    #[cold]
    fn fill(&mut self, bytes: Fetched) -> Result<Decoded, DecodeError> {
        let decoded = bytes.decode()?;
        let slot = bytes.slot();
        if let (Some(key), Some(entry)) = (self.keys.get_mut(slot), self.decoded.get_mut(slot)) {
            *key = bytes;
            *entry = Some(decoded);
        }
        Ok(decoded)
    }
}
