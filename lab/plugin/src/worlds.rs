//! Which of a CPU's counts are its guest's. The CPU is in its guest from the end of VMRUN to the #VMEXIT, which lands on the instruction
//! behind that VMRUN in the same physical memory; whatever else is executed is the host's. A guest's counts are the difference of the
//! counters between the two, so nothing is counted twice or left out.

use crate::COUNTERS;

/// One CPU's share.
#[derive(Clone, Copy)]
pub struct Worlds {
    /// The counters when the guest was entered; `None` in the host.
    entered: Option<[u64; COUNTERS]>,
    /// What guests executed in all the stretches that have ended.
    guest: [u64; COUNTERS],
}

impl Worlds {
    pub const NEW: Self = Self { entered: None, guest: [0; COUNTERS] };

    /// VMRUN is about to take effect, and `now` holds it already.
    pub fn enter(&mut self, now: [u64; COUNTERS]) {
        self.entered = Some(now);
    }

    /// The host is back. Whether it was away.
    pub fn leave(&mut self, now: &[u64; COUNTERS]) -> bool {
        let Some(entered) = self.entered.take() else { return false };
        for (sum, (now, then)) in self.guest.iter_mut().zip(now.iter().zip(entered)) {
            *sum += now.saturating_sub(then);
        }
        true
    }

    /// What guests have executed up to now.
    pub fn guest(&self, now: &[u64; COUNTERS]) -> [u64; COUNTERS] {
        let mut copy = *self;
        copy.leave(now);
        copy.guest
    }
}
