//! L1's permission maps: which ports and MSRs of L2 exit to it (APM vol. 2 §15.10.1, §15.11).
//!
//! L2 runs under an MSR map of L0's making: an MSR is open only if it is so in both L0's map for L1 and L1's map
//! for L2. L0 opens a dozen MSRs, which lie in a few words; only those words of L1's map are looked at, at every
//! entry, since L1 may change its map without a word (clean bits tell of its address alone). The I/O map of L0 is
//! all ones: every port exits, and L1's map is asked then.

use x86::{Direction, Gpa, addr::PAGE_SIZE, vmcb::ioio};

use crate::{L1Memory, Outside};

/// Words of an MSR map.
pub const MSRPM_WORDS: usize = 0x2000 / 8;

/// Where the two bits of an MSR are: the byte in the map, and the shift in it. `None`: the MSR is in no map and
/// always exits.
pub const fn msr_bits(msr: u32) -> Option<(u64, u32)> {
    let (range, first) = match msr {
        0..=0x1fff => (0, 0),
        0xc000_0000..=0xc000_1fff => (0x800, 0xc000_0000),
        // Two bits to an MSR, four MSRs to a byte: 8192 MSRs are 2 KiB.
        0xc001_0000..=0xc001_1fff => (0x1000, 0xc001_0000),
        _ => return None,
    };
    let index = msr - first;
    Some((range + (index / 4) as u64, (index % 4) * 2))
}

/// Whether L1 wants to hear of an access of `msr`. A map that is not memory hears of all.
pub fn msr_exits(memory: &impl L1Memory, map: u64, msr: u32, direction: Direction) -> bool {
    // An MSR in none of the three ranges always exits (APM vol. 2 §15.11).
    let Some((byte, shift)) = msr_bits(msr) else { return true };
    let mut bits = [0];
    // The CPU ignores the low bits of the address (APM vol. 2 §15.10.1).
    let base = map & !(PAGE_SIZE - 1);
    match memory.read(Gpa(base.wrapping_add(byte)), &mut bits) {
        Ok(()) => bits[0] >> (shift + direction as u32) & 1 != 0,
        // Closed rather than open: L1 may hear of one exit too many.
        Err(Outside) => true,
    }
}

/// Whether L1 wants to hear of an access of ports, as EXITINFO1 tells it. An access of `n` bytes looks at `n` bits.
pub fn port_exits(memory: &impl L1Memory, map: u64, info: u64) -> bool {
    // EXITINFO1 has a bit for each size, and the address sizes above them.
    let port = (info >> ioio::PORT_SHIFT) & 0xffff;
    let size = (info >> ioio::SIZE_SHIFT) & 7;
    let bits = match size {
        1 => 1,
        2 => 3,
        // Four bytes, and whatever no CPU tells: more ports are looked at rather than fewer.
        _ => 0xf_u16,
    };
    let mut bytes = [0; 2];
    let base = map & !(PAGE_SIZE - 1);
    // Four bits from a bit number of at most 7: two bytes hold them.
    match memory.read(Gpa(base.wrapping_add(port / 8)), &mut bytes) {
        // From port FFFDh on an access may look at the third page, which the map has for that.
        Ok(()) => (u16::from_le_bytes(bytes) >> (port % 8)) & bits != 0,
        Err(Outside) => true,
    }
}

/// The words of L0's MSR map in which an MSR is open, and what they hold.
#[derive(Clone, Copy, Debug)]
pub struct OpenWords<const N: usize> {
    words: [(u16, u64); N],
    count: usize,
}

impl<const N: usize> OpenWords<N> {
    /// Of a map of which each word is asked for by its number. `None`: more than `N` have an open MSR.
    pub fn of(mut word: impl FnMut(usize) -> u64) -> Option<Self> {
        let mut open = Self { words: [(0, u64::MAX); N], count: 0 };
        // Once, and not at each entry.
        for at in 0..MSRPM_WORDS {
            let value = word(at);
            // A word of ones has nothing open: L1's word cannot close more.
            if value != u64::MAX {
                // More open words than there is room for is a mistake of ours, found when the map is made.
                *open.words.get_mut(open.count)? = (at as u16, value);
                open.count += 1;
            }
        }
        Some(open)
    }

    /// Each word with its number.
    pub fn each(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.words.iter().take(self.count).map(|(at, value)| (usize::from(*at), *value))
    }

    /// Tells `set` what each word of L2's map is: what neither L0 nor L1 closes stays open. All other words are
    /// ones.
    ///
    /// # Errors
    /// A word of L1's map is not memory; those are closed then.
    pub fn merge(
        &self,
        memory: &impl L1Memory,
        map: u64,
        mut set: impl FnMut(usize, u64),
    ) -> Result<(), Outside> {
        let base = map & !(PAGE_SIZE - 1);
        let mut merged = Ok(());
        for (at, mine) in self.each() {
            let mut bytes = [0; 8];
            let theirs = match memory.read(Gpa(base.wrapping_add(at as u64 * 8)), &mut bytes) {
                // Any word of L1's counts as it is read: it may be another at the next entry.
                Ok(()) => u64::from_le_bytes(bytes),
                Err(Outside) => {
                    // The rest is merged nonetheless: words left as they are would be of an L1 map of before.
                    merged = Err(Outside);
                    u64::MAX
                }
            };
            set(at, mine | theirs);
        }
        merged
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::{vec, vec::Vec};

    struct Map(Vec<u8>);

    const BASE: u64 = 0x5000;

    impl L1Memory for Map {
        fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
            let from = at.0.checked_sub(BASE).ok_or(Outside)? as usize;
            into.copy_from_slice(self.0.get(from..from + into.len()).ok_or(Outside)?);
            Ok(())
        }
        fn write(&self, _: Gpa, _: &[u8]) -> Result<(), Outside> {
            Err(Outside)
        }
    }

    #[test]
    fn an_msr_is_where_the_manual_puts_it() {
        assert_eq!(msr_bits(0), Some((0, 0)));
        assert_eq!(msr_bits(3), Some((0, 6)));
        assert_eq!(msr_bits(0x1fff), Some((0x7ff, 6)));
        assert_eq!(msr_bits(0xc000_0102), Some((0x840, 4)));
        assert_eq!(msr_bits(0xc001_0000), Some((0x1000, 0)));
        assert_eq!(msr_bits(0x2000), None);
        assert_eq!(msr_bits(0x4000_0000), None);
    }

    #[test]
    fn reads_and_writes_have_bits_of_their_own() {
        let mut map = Map(vec![0; 0x2000]);
        map.0[0x840] = 1 << 5;
        assert!(!msr_exits(&map, BASE, 0xc000_0102, Direction::Read));
        assert!(msr_exits(&map, BASE, 0xc000_0102, Direction::Write));
        assert!(
            msr_exits(&map, BASE | 0xfff, 0xc000_0102, Direction::Write),
            "the low bits are ignored"
        );
        assert!(msr_exits(&map, BASE, 0x8000_0000, Direction::Read), "in no map");
        assert!(msr_exits(&map, 0x10_0000, 0xc000_0102, Direction::Read), "no memory");
    }

    #[test]
    fn an_access_of_four_ports_looks_at_four_bits() {
        let mut map = Map(vec![0; 0x3000]);
        map.0[0x61 / 8] = 1 << (0x61 % 8);
        let info = |port: u64, size: u64| (port << 16) | (size << 4);
        assert!(port_exits(&map, BASE, info(0x61, 1)));
        assert!(port_exits(&map, BASE, info(0x60, 2)));
        assert!(port_exits(&map, BASE, info(0x5e, 4)));
        assert!(!port_exits(&map, BASE, info(0x5f, 2)));
        assert!(!port_exits(&map, BASE, info(0x62, 4)));
        // The last port and what comes behind it.
        map.0[0x2000] = 1;
        assert!(port_exits(&map, BASE, info(0xffff, 2)));
    }

    #[test]
    fn what_either_closes_is_closed() {
        let word = |at| if at == 0x108 { !0xff } else { u64::MAX };
        let open = OpenWords::<4>::of(word).unwrap();
        let mut theirs = Map(vec![0; 0x2000]);
        theirs.0[0x108 * 8] = 0x0c;
        let mut merged = Vec::new();
        assert_eq!(open.merge(&theirs, BASE, |at, value| merged.push((at, value))), Ok(()));
        assert_eq!(merged, [(0x108, !0xff | 0x0c)]);
        merged.clear();
        let missing = open.merge(&theirs, 0, |at, value| merged.push((at, value)));
        assert_eq!(missing, Err(Outside));
        assert_eq!(merged, [(0x108, u64::MAX)]);
    }

    #[test]
    fn more_open_words_than_there_is_room_are_refused() {
        assert!(OpenWords::<2>::of(|at| if at < 3 { 0 } else { u64::MAX }).is_none());
    }
}
