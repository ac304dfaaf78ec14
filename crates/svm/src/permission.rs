//! The I/O and MSR permission maps (APM vol. 2 §15.10.1, §15.11).
//!
//! One I/O map serves all guests: every port exits. The MSR map is per vCPU, because which MSRs
//! may be live depends on the guest's CPUID.

use core::sync::atomic::Ordering;
use host::{NoMemory, page::Pages};
use x86::{Directions, Hpa};

/// The I/O permission map: 12 KiB of ones.
#[derive(Debug)]
pub struct IoMap(Pages);

impl IoMap {
    /// A map under which every port exits.
    pub fn all() -> Result<Self, NoMemory> {
        // Four pages, of which the map is three: it has to lie in one piece.
        let pages = Pages::zeroed(2)?;
        // Ones to the end: an access of several bytes at the last port looks at bits behind it.
        pages.words().iter().for_each(|w| w.store(u64::MAX, Ordering::Relaxed));
        Ok(Self(pages))
    }

    /// Physical address, for the control block.
    pub fn hpa(&self) -> Hpa {
        self.0.hpa()
    }
}

/// The MSR permission map: 8 KiB, two bits an MSR (read, write).
#[derive(Debug)]
pub struct MsrMap(Pages);

impl MsrMap {
    /// A map under which every MSR exits.
    pub fn all() -> Result<Self, NoMemory> {
        let pages = Pages::zeroed(1)?;
        pages.words().iter().for_each(|w| w.store(u64::MAX, Ordering::Relaxed));
        Ok(Self(pages))
    }

    /// Physical address, for the control block.
    pub fn hpa(&self) -> Hpa {
        self.0.hpa()
    }

    /// Has every MSR exit.
    pub fn close(&self) {
        self.0.words().iter().for_each(|w| w.store(u64::MAX, Ordering::Relaxed));
    }

    /// The word of this number.
    pub fn word(&self, at: usize) -> u64 {
        self.0.words().get(at).map_or(u64::MAX, |word| word.load(Ordering::Relaxed))
    }

    /// Sets the word of this number.
    pub fn set_word(&self, at: usize, value: u64) {
        if let Some(word) = self.0.words().get(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Bit number of the read bit of `msr`, or `None` for an MSR outside the three mapped ranges
    /// (those always exit).
    fn bit(msr: u32) -> Option<usize> {
        let (range, first) = match msr {
            0..=0x1fff => (0, 0),
            0xc000_0000..=0xc000_1fff => (1, 0xc000_0000),
            0xc001_0000..=0xc001_1fff => (2, 0xc001_0000),
            _ => return None,
        };
        // Two bits an MSR, in ranges of 2 KiB (APM vol. 2 §15.11).
        Some(range * 0x4000 + (msr - first) as usize * 2)
    }

    /// Sets which accesses of `msr` exit.
    pub fn intercept(&self, msr: u32, exits: Directions) {
        let Some(bit) = Self::bit(msr) else { return };
        let Some(word) = self.0.words().get(bit / 64) else { return };
        let shift = bit % 64;
        let bits = u64::from(exits.bits());
        let old = word.load(Ordering::Relaxed);
        word.store((old & !(3 << shift)) | (bits << shift), Ordering::Relaxed);
    }

    /// Which accesses of `msr` exit.
    pub fn intercepted(&self, msr: u32) -> Directions {
        let word = Self::bit(msr).and_then(|b| Some((self.0.words().get(b / 64)?, b % 64)));
        match word {
            Some((word, shift)) => {
                Directions::from_bits_truncate((word.load(Ordering::Relaxed) >> shift) as u8)
            }
            // An MSR without bits always exits.
            None => Directions::all(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_msr_bit_is_where_the_manual_puts_it() {
        // APM vol. 2 §15.11: offsets 0x000, 0x800, 0x1000 of the map.
        assert_eq!(MsrMap::bit(0), Some(0));
        assert_eq!(MsrMap::bit(0xc000_0000), Some(0x800 * 8));
        assert_eq!(MsrMap::bit(0xc001_0000), Some(0x1000 * 8));
        assert_eq!(MsrMap::bit(0x4000_0000), None);
    }

    #[test]
    fn only_the_named_msr_changes() {
        let map = MsrMap::all().unwrap();
        map.intercept(0xc000_0102, Directions::empty());
        assert_eq!(map.intercepted(0xc000_0102), Directions::empty());
        assert_eq!(map.intercepted(0xc000_0101), Directions::all());
        assert_eq!(map.intercepted(0xc000_0103), Directions::all());
        assert_eq!(map.intercepted(0x4000_0102), Directions::all());
        map.intercept(0xc000_0102, Directions::WRITES);
        assert_eq!(map.intercepted(0xc000_0102), Directions::WRITES);
    }
}
