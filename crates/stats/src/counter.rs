//! The two kinds of counters: one writer, or many.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter with one writer at a time, the thread that holds the vCPU; anybody may read it.
///
/// Adding is a plain addition to memory, not a locked one.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// A counter at zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. Only the one writer calls this.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        // Load and store apart: there is one writer, and a reader sees the one value or the other.
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Sets the value.
    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// What the counter has reached.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A counter that any CPU may add to.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SharedCounter(AtomicU64);

impl SharedCounter {
    /// A counter at zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n` to the counter.
    #[inline]
    pub fn add(&self, n: u64) {
        // Relaxed: a count orders nothing, and readers want no more than a number.
        self.0.fetch_add(n, Relaxed);
    }

    /// Takes `n` away, for what counts things that are there now.
    #[inline]
    pub fn sub(&self, n: u64) {
        // Wraps for a moment where another CPU's addition is seen later. Nobody decides by it.
        self.0.fetch_sub(n, Relaxed);
    }

    /// Raises the value to `n` if it is lower: a peak.
    pub fn raise(&self, n: u64) {
        // By one operation: two CPUs may raise it at the same time.
        self.0.fetch_max(n, Relaxed);
    }

    /// What the counter has reached.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_counter_counts_up_and_down_and_keeps_a_peak() {
        let counter = SharedCounter::new();
        counter.add(5);
        counter.sub(2);
        counter.raise(2);
        assert_eq!(counter.get(), 3);
        counter.raise(9);
        assert_eq!(counter.get(), 9);
    }
}
