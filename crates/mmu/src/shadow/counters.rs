//! What the shadow pages of a VM went through, for statistics.

use core::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts since the VM was made; `pages` and `unsync` are what is there now.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }
    };
}
counters! {
    /// Pages that shadow something now.
    pages,
    /// Pages that the guest may write behind our back now.
    unsync,
    /// Pages put to use.
    created,
    /// Pages of memory allocated for shadow pages.
    allocated,
    /// Pages taken out of use.
    zapped,
    /// Pages taken out of use because others were needed.
    recycled,
    /// Guest tables that became writable by being written.
    unsynced,
    /// Guest tables write-protected because they did not change.
    settled,
    /// Comparisons of a page with the guest's table.
    compared,
    /// Entries dropped because the guest's had changed.
    dropped,
    /// Faults that were fixed.
    fixed,
    /// Faults that were the guest's own.
    reflected,
    /// Entries made ahead of their use.
    ahead,
    /// Roots found among a vCPU's own.
    roots_kept,
    /// Roots looked up or made.
    roots_made,
    /// No count: tells these pages from another VM's, or another memory's, with the lock and without. Never 0.
    number,
}

impl Counters {
    /// What tells these pages from others.
    #[inline]
    pub(super) fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }
}

/// Adds one to a counter, which is written under the shadow lock, read any time, so no locked instruction.
#[inline]
pub(super) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

/// Adds `n`, which may be negative.
#[inline]
pub(super) fn add(counter: &AtomicU64, n: i64) {
    let now = counter.load(Ordering::Relaxed);
    counter.store(now.wrapping_add_signed(n), Ordering::Relaxed);
}
