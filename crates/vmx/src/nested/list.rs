//! MSRs in lists of L1's that the vCPU has and not this backend: they wait for it, in the order of the lists, until it has
//! done what L1's entry or L2's exit was (SDM vol. 3C §27.4, §28.4, §28.6).

use backend::{ListAct, ListMsr};

/// Most of them for one entry or exit.
const MOST: usize = 24;

/// One that waits.
#[derive(Clone, Copy, Debug)]
struct Entry {
    msr: ListMsr,
    /// Its number in an entry's list, from 1; 0 in an exit's.
    number: u32,
}

/// Those that wait.
#[derive(Debug)]
pub(crate) struct Waiting {
    entries: [Entry; MOST],
    count: usize,
    /// The next one.
    at: usize,
    /// The number of the one at which an entry of L2 fails; 0: it does not.
    failed: u32,
}

impl Waiting {
    /// None does. A constant: it is copied to the heap from here.
    pub(crate) const NONE: Self = Self {
        entries: [Entry { msr: ListMsr { index: 0, act: ListAct::Load(0) }, number: 0 }; MOST],
        count: 0,
        at: 0,
        failed: 0,
    };

    /// One more.
    pub(crate) fn push(&mut self, msr: ListMsr, number: u32) -> Result<(), ()> {
        // All were taken: the places are free again.
        if self.at >= self.count {
            (self.at, self.count) = (0, 0);
        }
        // L1 names as many as it likes: more than fit fail its entry, or its exit.
        let place = self.entries.get_mut(self.count).ok_or(())?;
        *place = Entry { msr, number };
        self.count += 1;
        Ok(())
    }

    /// Takes the next one.
    pub(crate) fn take(&mut self) -> Option<ListMsr> {
        if self.at >= self.count {
            return None;
        }
        let msr = self.entries.get(self.at)?.msr;
        self.at += 1;
        Some(msr)
    }

    /// The one that was taken last cannot be done, and the others are not. Whether the entry fails, of an L2 that `runs`.
    pub(crate) fn refuse(&mut self, runs: bool) -> bool {
        let taken = self.at.checked_sub(1).and_then(|at| self.entries.get(at));
        // An exit's list has no numbers: it fails as a whole.
        let number = taken.map_or(0, |entry| entry.number);
        self.count = 0;
        // 0 is no entry's number.
        self.failed = if runs { number } else { 0 };
        self.failed != 0
    }

    /// Takes the number at which an entry fails.
    pub(crate) fn take_failed(&mut self) -> u32 {
        core::mem::take(&mut self.failed)
    }

    /// Nothing waits any more.
    pub(crate) fn forget(&mut self) {
        (self.at, self.count, self.failed) = (0, 0, 0);
    }
}
