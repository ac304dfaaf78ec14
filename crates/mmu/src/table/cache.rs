//! What a vCPU's faults keep from one to the next: empty pages held ready, so that a fault allocates
//! before it takes the MMU lock; and whether the faults run through memory in order.

use host::error::NoMemory;
use host::page::Page;
use x86::Gfn;

/// An empty page that can become a table.
#[derive(Debug)]
pub struct TablePage(pub(super) Page);

/// Pages for tables, kept per vCPU. One fault needs at most four.
#[derive(Debug, Default)]
pub struct TableCache {
    pages: [Option<TablePage>; TableCache::MOST],
    count: usize,
    run: Run,
}

impl TableCache {
    /// Levels below the root at most.
    pub const MOST: usize = 4;

    /// A cache that holds nothing.
    pub const fn new() -> Self {
        Self { pages: [const { None }; Self::MOST], count: 0, run: Run::new() }
    }

    /// Number of pages held.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The run of faults in order.
    pub fn run(&mut self) -> &mut Run {
        &mut self.run
    }

    /// Allocates until at least `count` pages (at most [`TableCache::MOST`]) are held. May sleep.
    pub fn top_up(&mut self, count: usize) -> Result<(), NoMemory> {
        while self.count < count.min(Self::MOST) {
            // Zeroed: each entry has to be absent before the table can be reached.
            let page = TablePage(Page::zeroed()?);
            self.put(page);
        }
        Ok(())
    }

    /// Takes a page out.
    pub fn take(&mut self) -> Option<TablePage> {
        self.count = self.count.checked_sub(1)?;
        self.pages.get_mut(self.count)?.take()
    }

    /// Puts an unused page back.
    pub fn put(&mut self, page: TablePage) {
        if let Some(place) = self.pages.get_mut(self.count) {
            *place = Some(page);
            self.count += 1;
        }
    }
}

/// A run of faults through consecutive frames: then the next ones are mapped ahead, if the host
/// has them. Faults here and there cost nothing more.
#[derive(Debug)]
pub struct Run {
    next: u64,
    /// Frames mapped ahead last time.
    ahead: u32,
    /// Faults to come for which nothing is tried.
    pause: u32,
    /// Attempts in a row for which the host had nothing.
    misses: u32,
}

impl Default for Run {
    fn default() -> Self {
        Self::new()
    }
}

impl Run {
    /// Frames mapped ahead at most.
    pub const MOST: u32 = 16;

    const fn new() -> Self {
        Self { next: u64::MAX, ahead: 0, pause: 0, misses: 0 }
    }

    /// How many frames behind `gfn`, which faulted, to map ahead.
    #[inline]
    pub fn wish(&mut self, gfn: Gfn) -> u32 {
        // Noted whatever comes of it: any two faults in order begin a run.
        let expected = core::mem::replace(&mut self.next, gfn.0.wrapping_add(1));
        if expected != gfn.0 {
            self.ahead = 0;
            return 0;
        }
        if self.pause != 0 {
            self.pause -= 1;
            return 0;
        }
        // Doubled while it goes well: a run that ends early has wasted little.
        (self.ahead * 2).clamp(2, Self::MOST)
    }

    /// Whether the host probably has nothing at `gfn` yet: it goes on with a run, behind which there was
    /// nothing the last time it was tried.
    #[inline]
    pub fn is_fresh(&self, gfn: Gfn) -> bool {
        self.misses != 0 && self.next == gfn.0
    }

    /// Of what [`Run::wish`] wanted behind `gfn`, `mapped` were there.
    pub fn mapped(&mut self, gfn: Gfn, mapped: u32) {
        // What was mapped ahead does not fault, so the run goes on behind it.
        self.next = gfn.0.wrapping_add(1).wrapping_add(u64::from(mapped));
        self.ahead = mapped.min(Self::MOST);
        // Memory that the host itself has yet to fill: try ever more rarely.
        self.misses = if mapped == 0 { (self.misses + 1).min(6) } else { 0 };
        self.pause = if mapped == 0 { 1 << self.misses } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_the_host_has_yet_to_fill_is_expected_to_be_missing_in_a_run_and_there_alone() {
        let mut run = Run::new();
        assert!(!run.is_fresh(Gfn(0)));
        assert_eq!(run.wish(Gfn(10)), 0);
        // The second fault in a row looks behind, and finds nothing.
        assert_eq!(run.wish(Gfn(11)), 2);
        run.mapped(Gfn(11), 0);
        assert!(run.is_fresh(Gfn(12)) && !run.is_fresh(Gfn(13)) && !run.is_fresh(Gfn(11)));
        // Found again: nothing is taken for missing any more.
        while run.wish(Gfn(run.next)) == 0 {}
        let at = Gfn(run.next.wrapping_sub(1));
        run.mapped(at, 2);
        assert!(!run.is_fresh(Gfn(run.next)));
    }
}
