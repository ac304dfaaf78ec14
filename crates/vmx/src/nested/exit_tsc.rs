//! The TSC at an exit of L2 whose list of MSRs L1 has stored.
//!
//! A CPU stores it within the exit, and software that compares it with what its guest has read last may expect that (SDM vol.
//! 3C §28.4). So the hardware stores it here, by a list of one entry that vmcs02 has while L1's VMCS has a list.

use core::sync::atomic::Ordering::Relaxed;

use host::{NoMemory, page::Page};
use x86::{Hpa, msr};

/// How far the hardware's time may lie before the one that software reads, to be that of the same exit.
const NEAR: u64 = 1 << 14;

#[derive(Debug)]
pub(crate) struct ExitTsc {
    /// The hardware's list.
    page: Page,
    /// What software has read right behind the exit; 0: nothing.
    noted: u64,
}

impl ExitTsc {
    pub(crate) fn new() -> Result<Self, NoMemory> {
        let page = Page::zeroed()?;
        if let Some(index) = page.table().first() {
            index.store(msr::TSC.into(), Relaxed);
        }
        Ok(Self { page, noted: 0 })
    }

    pub(crate) fn hpa(&self) -> Hpa {
        self.page.hpa()
    }

    /// Software looks at the TSC for an exit. `again`: perhaps it has before, for the same one.
    pub(crate) fn note(&mut self, now: u64, again: bool) {
        if !again || self.noted == 0 {
            self.noted = now;
        }
    }

    /// L2 is entered. An exit for which it does not run, or an event that ends its run later, must not get the time of an
    /// exit before this.
    #[inline]
    pub(crate) fn begin(&mut self) {
        if let Some(word) = self.page.table().get(1) {
            word.store(0, Relaxed);
        }
    }

    /// What was noted was for an exit that did not come to its end.
    #[inline]
    pub(crate) fn forget(&mut self) {
        self.noted = 0;
    }

    /// The host's TSC at the exit that ends now, which was noted.
    pub(crate) fn take(&mut self) -> u64 {
        let noted = core::mem::take(&mut self.noted);
        let stored = self.page.table().get(1).map_or(0, |word| word.load(Relaxed));
        // It may be of an exit long ago, where an event ends L2's run. And an emulator (Bochs) stores what L2 reads.
        let counts = stored != 0 && noted.wrapping_sub(stored) < NEAR;
        if counts { stored } else { noted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl ExitTsc {
        /// What the hardware does at an exit.
        pub(crate) fn store(&mut self, tsc: u64) {
            self.page.table()[1].store(tsc, Relaxed);
        }
    }

    fn with(stored: u64) -> ExitTsc {
        let mut tsc = ExitTsc::new().unwrap();
        tsc.store(stored);
        tsc
    }

    #[test]
    fn the_hardwares_time_counts_if_it_is_of_this_exit() {
        const NOW: u64 = 1 << 40;
        for (stored, taken) in [
            (NOW - 900, NOW - 900),
            (NOW, NOW),
            // Of an exit before, of an L2 with an offset, of no exit.
            (NOW - NEAR, NOW),
            (NOW + 1, NOW),
            (NOW + (1 << 50), NOW),
            (0, NOW),
        ] {
            let mut tsc = with(stored);
            tsc.note(NOW, false);
            assert_eq!(tsc.take(), taken, "{stored:#x}");
        }
    }

    #[test]
    fn the_time_of_an_exit_before_the_entry_does_not_count() {
        let mut tsc = with(99_500);
        tsc.begin();
        tsc.note(100_000, false);
        assert_eq!(tsc.take(), 100_000);
    }

    #[test]
    fn what_was_noted_inside_counts_outside() {
        let mut tsc = with(0);
        tsc.note(100_000, false);
        tsc.note(900_000, true);
        assert_eq!(tsc.take(), 100_000);
        // Another exit; one that came to nothing; one that is outside alone.
        tsc.note(1_000_000, true);
        assert_eq!(tsc.take(), 1_000_000);
        tsc.note(2_000_000, false);
        tsc.note(3_000_000, false);
        assert_eq!(tsc.take(), 3_000_000);
        tsc.note(4_000_000, false);
        tsc.forget();
        tsc.note(5_000_000, true);
        assert_eq!(tsc.take(), 5_000_000);
    }
}
