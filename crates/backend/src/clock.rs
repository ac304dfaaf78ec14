//! The guest's TSC, and the end of its run at a time of it.

use crate::ability::DeadlineWatch;

/// The ratio of a guest's TSC that runs as fast as the host's; ratios have 32 fractional bits.
pub const TSC_RATIO_ONE: u64 = 1 << 32;

/// The host's TSC by a ratio, as CPUs scale it.
#[inline(always)]
pub fn scale_tsc(host: u64, ratio: u64) -> u64 {
    if ratio == TSC_RATIO_ONE {
        return host;
    }
    ((u128::from(host) * u128::from(ratio)) >> 32) as u64
}

/// The guest's TSC: what is added to the host's, and its ratio.
pub trait Clock {
    /// What ends the guest's run at a time.
    type Deadline: DeadlineWatch;

    /// The host's TSC now.
    fn host_tsc(&mut self) -> u64;
    /// Sets what is added to the host's TSC and the ratio it is scaled by (32.32 fixed point).
    fn set_tsc(&mut self, offset: u64, ratio: u64);
    /// The guest's TSC for a host TSC.
    fn guest_tsc(&self, host: u64) -> u64;
    /// The watch over a deadline, where CPUs of this kind may have one.
    fn deadline(&self) -> Option<&Self::Deadline>;
    /// The watch over a deadline, to be set.
    fn deadline_mut(&mut self) -> Option<&mut Self::Deadline>;
}
