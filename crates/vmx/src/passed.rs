//! The MSRs that L2 has without an exit: those that L1's map gives it, of those that L0 gives L1.
//!
//! L1 can write to its map at any time, without an exit, so what counts of it is read at each of its entries. A hypervisor in
//! earnest has one, and what is read here is paid on every way back to its guest. So it is read by words, the ten that can
//! matter, and compared with those of the entry before; made byte by byte, MSR by MSR, it was 2,400 instructions of a round trip of 8,400.
//! L0's own map says how often it was changed, and is not read again as long as it was not.

use x86::msr;

use crate::permission::{Changes, LIVE, MsrMap, SPECULATION, TSC};

/// MSRs that L0 may let a guest have without an exit.
pub(crate) const PASSED: [u32; 11] = {
    let [a, b, c, d, e, f] = LIVE;
    let [spec, pred, flush] = SPECULATION;
    [a, b, c, d, e, f, TSC, msr::TSC_AUX, spec, pred, flush]
};

/// Words of a map that have bits of reads of those; as many have bits of writes.
const COUNT: usize = 5;

/// Those words: where each lies, and its bits.
const WORDS: [(usize, u64); COUNT] = {
    // Eleven MSRs lie in five words of reads, and in as many of writes.
    let mut words = [(0, 0); COUNT];
    let (mut used, mut at) = (0, 0);
    while at < PASSED.len() {
        // A panic of the compiler's, never of the kernel's.
        let Some((place, bit)) = MsrMap::place(PASSED[at]) else { panic!() };
        let mut found = 0;
        while found < used && words[found].0 != place {
            found += 1;
        }
        if found == used {
            words[found].0 = place;
            used += 1;
        }
        words[found].1 |= 1 << bit;
        at += 1;
    }
    assert!(used == COUNT);
    words
};

/// What of them is without an exit: bits of reads, then bits of writes.
#[derive(Clone, Copy, Debug, Default, Eq)]
pub(crate) struct Passed {
    reads: [u64; COUNT],
    writes: [u64; COUNT],
}

impl PartialEq for Passed {
    /// Word by word, in straight code: derived, it would be two calls of the kernel's memcmp at each entry of L2.
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        let differing = |one: &[u64; COUNT], two: &[u64; COUNT]| {
            one.iter().zip(two).fold(0, |all, (a, b)| all | (a ^ b))
        };
        differing(&self.reads, &other.reads) | differing(&self.writes, &other.writes) == 0
    }
}

impl Passed {
    /// By the map whose words `word` gives.
    #[inline(always)]
    pub(crate) fn of(word: impl Fn(usize) -> u64) -> Self {
        // A bit of the map is 1 for an exit: free is its complement.
        let free = |quarters| WORDS.map(|(at, bits)| !word(at.wrapping_add(quarters)) & bits);
        Self { reads: free(0), writes: free(MsrMap::WRITES) }
    }

    /// Whether the map whose words `word` gives says this.
    #[inline(always)]
    fn is_of(&self, word: impl Fn(usize) -> u64) -> bool {
        // Free is the complement: each bit of the two differs, where they say the same.
        let differing = |free: &[u64; COUNT], quarters| {
            WORDS.iter().zip(free).fold(0, |all, ((at, bits), free)| {
                all | (!(word(at.wrapping_add(quarters)) ^ free) & bits)
            })
        };
        differing(&self.reads, 0) | differing(&self.writes, MsrMap::WRITES) == 0
    }

    /// Of those, what L0's own `map` gives L1.
    #[inline]
    pub(crate) fn within(self, map: &MsrMap) -> Self {
        let own = Self::of(|at| map.word(at));
        let both = |one: [u64; COUNT], other: [u64; COUNT]| {
            // Zeroes for a word that is none: nothing passes.
            core::array::from_fn(|at| one.get(at).unwrap_or(&0) & other.get(at).unwrap_or(&0))
        };
        Self { reads: both(self.reads, own.reads), writes: both(self.writes, own.writes) }
    }

    /// Has `map` give just these.
    #[cold]
    #[inline(never)]
    fn set(&self, map: &MsrMap) {
        for (((at, bits), reads), writes) in WORDS.iter().zip(self.reads).zip(self.writes) {
            // Bits of other MSRs stay: they exit.
            map.set_word(*at, *bits, !reads);
            map.set_word(at.wrapping_add(MsrMap::WRITES), *bits, !writes);
        }
    }
}

/// What a map of vmcs02 gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Map {
    /// It is to be made again.
    Unknown,
    /// Nothing.
    Closed,
    /// What both let pass.
    Open(Both),
}

/// What an open map was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Both {
    of_l1: Passed,
    of_l0: Changes,
}

impl Map {
    /// Whether it was made from what L1's map says, whose words `word` gives, and from L0's own map `of_l0` as that is now.
    #[inline(always)]
    pub(crate) fn is_of(&self, word: impl Fn(usize) -> u64, of_l0: &MsrMap) -> bool {
        matches!(self, Self::Open(both) if both.of_l0 == of_l0.changes() && both.of_l1.is_of(word))
    }

    /// Has `map` give what is left of `of_l1` within L0's own map, unless it does.
    #[inline(never)]
    pub(crate) fn open(&mut self, of_l1: Passed, of_l0: &MsrMap, map: &MsrMap) {
        let wanted = Self::Open(Both { of_l1, of_l0: of_l0.changes() });
        if *self != wanted {
            *self = wanted;
            of_l1.within(of_l0).set(map);
        }
    }

    /// Has `map` give nothing, unless it does.
    #[inline]
    pub(crate) fn close(&mut self, map: &MsrMap) {
        if *self != Self::Closed {
            *self = Self::Closed;
            Passed::default().set(map);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use x86::Directions;

    fn map(intercepted: u32) -> MsrMap {
        let map = MsrMap::all().unwrap();
        for (at, index) in PASSED.into_iter().enumerate() {
            map.intercept(index, Directions::from_bits_truncate((intercepted >> (2 * at)) as u8));
        }
        map
    }

    fn passed(map: &MsrMap) -> Passed {
        Passed::of(|at| map.word(at))
    }

    proptest! {
        #[test]
        fn an_access_is_without_an_exit_if_both_let_it(l1: u32, l0: u32, before: u32) {
            let (l1, l0, l2) = (map(l1), map(l0), map(before));
            // What is no bit of these stays.
            l2.intercept(0x11, Directions::WRITES);
            passed(&l1).within(&l0).set(&l2);
            for index in PASSED {
                let both = l1.intercepted(index) | l0.intercepted(index);
                prop_assert_eq!(l2.intercepted(index), both, "{:#x}", index);
            }
            prop_assert_eq!(l2.intercepted(0x11), Directions::WRITES);
            prop_assert_eq!(l2.intercepted(0xc000_0080), Directions::all());
            Passed::default().set(&l2);
            prop_assert!(PASSED.iter().all(|index| l2.intercepted(*index) == Directions::all()));
        }

        #[test]
        fn an_open_map_follows_either_of_the_two(l1: u32, l0: u32, index in 0..11usize, how in 0u8..4) {
            let (l1, l0, l2) = (map(l1), map(l0), map(u32::MAX));
            let mut kept = Map::Unknown;
            let follows = |kept: &Map| kept.is_of(|at| l1.word(at), &l0);
            prop_assert!(!follows(&kept));
            kept.open(passed(&l1), &l0, &l2);
            prop_assert!(follows(&kept));
            // One that does not matter.
            l1.intercept(0x11, Directions::empty());
            prop_assert!(follows(&kept));
            let (index, how) = (PASSED[index], Directions::from_bits_truncate(how));
            let same = l1.intercepted(index) == how;
            l1.intercept(index, how);
            prop_assert_eq!(follows(&kept), same);
            kept.open(passed(&l1), &l0, &l2);
            prop_assert_eq!(l2.intercepted(index), how | l0.intercepted(index));
            l0.intercept(index, !how);
            prop_assert!(!follows(&kept));
            kept.open(passed(&l1), &l0, &l2);
            prop_assert!(follows(&kept));
            prop_assert_eq!(l2.intercepted(index), Directions::all());
            kept.close(&l2);
            prop_assert!(!follows(&kept));
            prop_assert!(PASSED.iter().all(|index| l2.intercepted(*index) == Directions::all()));
        }
    }
}
