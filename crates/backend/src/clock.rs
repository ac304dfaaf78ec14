//! The guest's TSC, and the end of its run at a time of it.

use crate::ability::DeadlineWatch;

/// The ratio of a guest's TSC that runs as fast as the host's; ratios have 32 fractional bits.
pub const TSC_RATIO_ONE: u64 = 1 << 32;

/// The host's TSC by a ratio, as CPUs scale it.
#[inline(always)]
pub fn scale_tsc(host: u64, ratio: u64) -> u64 {
    // Nearly every guest, on nearly every exit with a deadline.
    if ratio == TSC_RATIO_ONE {
        return host;
    }
    ((u128::from(host) * u128::from(ratio)) >> 32) as u64
}

/// One ratio by another: that of a TSC which is made from a scaled one. No more than a CPU takes.
#[must_use]
pub fn compose_ratios(outer: u64, inner: u64) -> u64 {
    const LARGEST: u128 = 0xff_ffff_ffff;
    // A VMM may ask for more than a CPU can do: the fastest that it can.
    ((u128::from(outer) * u128::from(inner)) >> 32).min(LARGEST) as u64
}

/// What is added to a TSC, as one that is made from it by a ratio has it. It may be negative.
#[must_use]
pub fn scale_offset(offset: u64, ratio: u64) -> u64 {
    // By size and sign: as an unsigned number a small negative one would be scaled to another large one.
    let size = scale_tsc((offset as i64).unsigned_abs(), ratio);
    if (offset as i64) < 0 { size.wrapping_neg() } else { size }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_compose_and_offsets_scale() {
        const HALF: u64 = TSC_RATIO_ONE / 2;
        assert_eq!(compose_ratios(3 << 32, HALF), TSC_RATIO_ONE + HALF);
        assert_eq!(compose_ratios(TSC_RATIO_ONE, 7), 7);
        assert_eq!(compose_ratios(0xff_ffff_ffff, 2 << 32), 0xff_ffff_ffff, "no CPU takes more");
        assert_eq!(scale_offset(5, TSC_RATIO_ONE), 5);
        assert_eq!(scale_offset(-5_i64 as u64, TSC_RATIO_ONE), -5_i64 as u64);
        assert_eq!(scale_offset(-10_i64 as u64, HALF), -5_i64 as u64);
        assert_eq!(scale_offset(i64::MIN as u64, TSC_RATIO_ONE), i64::MIN as u64);
    }
}
