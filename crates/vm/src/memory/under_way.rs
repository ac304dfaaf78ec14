//! What a fault asks of invalidations: whether one is under way in its range, and whether one has ended since it looked
//! ([`super::fault`], [`super::invalidate`]).

use x86::Hva;

use crate::atomic::{AtomicU64, Ordering};

/// Counts ended invalidations.
#[derive(Debug, Default)]
pub struct Ended(AtomicU64);

impl Ended {
    /// How many have ended. Before the host's table is looked at.
    #[inline]
    pub fn now(&self) -> u64 {
        // Acquire: what the host had changed until then is seen by the look.
        self.0.load(Ordering::Acquire)
    }
}

/// The invalidations that are under way. Kept under the MMU lock.
#[derive(Debug, Default)]
pub struct Invalidations {
    /// How many invalidations run.
    running: u64,
    /// A range that covers all of them.
    start: u64,
    end: u64,
}

impl Invalidations {
    /// Whether an invalidation under way may touch `start..end`.
    #[inline]
    pub fn touch(&self, start: Hva, end: Hva) -> bool {
        self.running != 0 && start.0 < self.end && self.start < end.0
    }

    /// One begins. With the lock held for writing.
    pub fn begin(&mut self, start: Hva, end: Hva) {
        if self.running == 0 {
            (self.start, self.end) = (start.0, end.0);
        } else {
            self.start = self.start.min(start.0);
            self.end = self.end.max(end.0);
        }
        self.running = self.running.saturating_add(1);
    }

    /// One ends. With the lock held for writing, so that a fault sees the count as it was and the range, or neither.
    pub fn finish(&mut self, ended: &Ended) {
        ended.0.fetch_add(1, Ordering::Release);
        // Saturating: an end without its start must not make the count huge.
        self.running = self.running.saturating_sub(1);
    }

    /// Whether a fault may not install in `start..end` what it found in the host's table after it had read `seen` of
    /// [`Ended::now`]. With the lock held, at least for reading.
    #[inline]
    pub fn refuse(&self, start: Hva, end: Hva, ended: &Ended, seen: u64) -> bool {
        self.touch(start, end) || ended.now() != seen
    }
}
