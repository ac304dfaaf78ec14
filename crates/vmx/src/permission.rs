//! The MSR bitmap (SDM vol. 3C §25.6.9): 4 KiB, a quarter each for reads and writes of the low and
//! of the high MSRs. Ports need none, for every access exits.

use core::{cell::Cell, sync::atomic::Ordering};

use host::{KBox, NoMemory, page::Page};
use x86::{Directions, Hpa, msr};

/// One vCPU's bitmap: which MSRs may be live depends on the guest's CPUID.
#[derive(Debug)]
// One word: a map changes places with its VMCS at each exit of a guest's guest.
pub struct MsrMap(KBox<Counted>);

#[derive(Debug)]
struct Counted {
    page: Page,
    changes: Cell<Changes>,
}

/// How often a map was changed: what follows from it is as it was as long as this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changes(u64);

/// MSRs that lists of L1's may name and that a VMM's filter may deny.
pub(crate) const LISTED: [u32; 17] = [
    msr::TSC,
    msr::STAR,
    msr::LSTAR,
    msr::CSTAR,
    msr::SYSCALL_MASK,
    msr::KERNEL_GS_BASE,
    msr::FS_BASE,
    msr::GS_BASE,
    msr::TSC_AUX,
    msr::PAT,
    msr::EFER,
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
    msr::DEBUGCTL,
    msr::XSS,
    msr::SPEC_CTRL,
];

/// IA32_TIME_STAMP_COUNTER.
pub(crate) const TSC: u32 = msr::TSC;

/// MSRs whose guest value is live in hardware while the guest runs.
pub(crate) const LIVE: [u32; 6] = [
    msr::FS_BASE,
    msr::GS_BASE,
    msr::KERNEL_GS_BASE,
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
];

/// MSRs against speculation: whether their accesses exit depends on more than the guest's CPUID.
pub(crate) const SPECULATION: [u32; 3] = [msr::SPEC_CTRL, msr::PRED_CMD, msr::FLUSH_CMD];

/// Words in a quarter.
const QUARTER: usize = 128;

impl MsrMap {
    /// A map under which every MSR exits.
    pub fn all() -> Result<Self, NoMemory> {
        let page = Page::zeroed()?;
        // Ones are exits: a new MSR is the hypervisor's until somebody opens it.
        page.table().iter().for_each(|w| w.store(u64::MAX, Ordering::Relaxed));
        Ok(Self(KBox::new(Counted { page, changes: Cell::new(Changes(0)) })?))
    }

    /// Physical address, for the VMCS.
    pub fn hpa(&self) -> Hpa {
        self.0.page.hpa()
    }

    /// Word and bit of the reads of `msr`; those of its writes lie two quarters on. `None` for an
    /// MSR outside the two ranges: those always exit.
    pub(crate) const fn place(msr: u32) -> Option<(usize, u32)> {
        let (quarter, number) = match msr {
            0..=0x1fff => (0, msr),
            0xc000_0000..=0xc000_1fff => (1, msr & 0x1fff),
            _ => return None,
        };
        Some((quarter * QUARTER + number as usize / 64, number % 64))
    }

    /// How often it was changed.
    #[inline]
    pub(crate) fn changes(&self) -> Changes {
        self.0.changes.get()
    }

    /// Stores a word. Nobody runs on this map while it is changed, or the CPU sees a word of before or of behind.
    fn store(&self, at: usize, value: u64) {
        if let Some(word) = self.0.page.table().get(at) {
            word.store(value, Ordering::Relaxed);
            // The one place that stores: no change is missed.
            self.0.changes.set(Changes(self.0.changes.get().0.wrapping_add(1)));
        }
    }

    /// How far on the words of writes lie.
    pub(crate) const WRITES: usize = 2 * QUARTER;

    /// A word; ones beyond the map.
    #[inline]
    // Beyond the map is nothing that passes.
    pub(crate) fn word(&self, at: usize) -> u64 {
        self.0.page.table().get(at).map_or(u64::MAX, |word| word.load(Ordering::Relaxed))
    }

    /// Has these `bits` of a word be those of `value`.
    pub(crate) fn set_word(&self, at: usize, bits: u64, value: u64) {
        self.store(at, (self.word(at) & !bits) | (value & bits));
    }

    /// Sets which accesses of `msr` exit.
    pub fn intercept(&self, msr: u32, exits: Directions) {
        // Such an MSR exits in any case: there is nothing to set.
        let Some((word, bit)) = Self::place(msr) else { return };
        for (at, way) in [(word, Directions::READS), (word + Self::WRITES, Directions::WRITES)] {
            let old = self.word(at);
            self.store(at, if exits.contains(way) { old | 1 << bit } else { old & !(1 << bit) });
        }
    }

    /// Which accesses of `msr` exit.
    pub fn intercepted(&self, msr: u32) -> Directions {
        let Some((word, bit)) = Self::place(msr) else { return Directions::all() };
        let exits = |word: usize| self.word(word) & (1 << bit) != 0;
        Directions::READS.when(exits(word)) | Directions::WRITES.when(exits(word + Self::WRITES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_msr_bit_is_where_the_manual_puts_it() {
        // Offsets 0, 1024, 2048 and 3072 of the page.
        assert_eq!(MsrMap::place(0), Some((0, 0)));
        assert_eq!(MsrMap::place(0xc000_0080), Some((1024 / 8 + 2, 0)));
        assert_eq!(MsrMap::place(0x4000_0000), None);
        let map = MsrMap::all().unwrap();
        map.intercept(0x10, Directions::READS);
        assert_eq!(map.0.page.table()[2048 / 8].load(Ordering::Relaxed), !(1 << 0x10));
    }

    #[test]
    fn only_the_named_msr_changes() {
        let map = MsrMap::all().unwrap();
        map.intercept(0xc000_0102, Directions::empty());
        assert_eq!(map.intercepted(0xc000_0102), Directions::empty());
        assert_eq!(map.intercepted(0xc000_0101), Directions::all());
        assert_eq!(map.intercepted(0xc000_0103), Directions::all());
        assert_eq!(map.intercepted(0x102), Directions::all());
        assert_eq!(map.intercepted(0xc001_0102), Directions::all());
        map.intercept(0xc000_0102, Directions::WRITES);
        assert_eq!(map.intercepted(0xc000_0102), Directions::WRITES);
    }
    #[test]
    fn each_change_is_counted() {
        let map = MsrMap::all().unwrap();
        let before = map.changes();
        map.intercept(0xc000_0102, Directions::WRITES);
        let behind = map.changes();
        assert_ne!(before, behind);
        map.set_word(0, 1, 0);
        assert_ne!(behind, map.changes());
        // An MSR that no map has.
        let behind = map.changes();
        map.intercept(0x4000_0000, Directions::empty());
        assert_eq!((map.word(0), behind), (!1, map.changes()));
    }
}
