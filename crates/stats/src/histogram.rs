//! Histograms with buckets of doubling width, as KVM has them (KVM API §4.131,
//! KVM_STATS_TYPE_LOG_HIST): bucket 0 holds the value 0, bucket n the values from 2^(n-1) to below
//! 2^n, the last one everything above.

use crate::Counter;

/// Buckets of a histogram.
pub const BUCKETS: usize = 32;

/// The bucket of a value.
#[inline]
pub const fn bucket_of(value: u64) -> usize {
    // The number of significant bits is the bucket, and that of 0 is 0.
    let bits = (u64::BITS - value.leading_zeros()) as usize;
    if bits < BUCKETS { bits } else { BUCKETS - 1 }
}

/// A histogram with one writer.
#[derive(Debug, Default)]
pub struct Histogram([Counter; BUCKETS]);

impl Histogram {
    /// A histogram that counted nothing.
    pub const fn new() -> Self {
        Self([const { Counter::new() }; BUCKETS])
    }

    /// Counts a value.
    #[inline]
    pub fn count(&self, value: u64) {
        // Always in range; the check spares a panic on the way of an exit.
        if let Some(bucket) = self.0.get(bucket_of(value)) {
            bucket.add(1);
        }
    }

    /// How many values fell into a bucket; 0 for one that does not exist.
    pub fn bucket(&self, n: usize) -> u64 {
        self.0.get(n).map_or(0, Counter::get)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_double_and_the_last_takes_the_rest() {
        assert_eq!([0, 1, 2, 3, 4, 7, 8].map(bucket_of), [0, 1, 2, 2, 3, 3, 4]);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        let histogram = Histogram::new();
        histogram.count(u64::MAX);
        histogram.count(1 << 40);
        assert_eq!((histogram.bucket(BUCKETS - 1), histogram.bucket(BUCKETS)), (2, 0));
    }

    proptest! {
        #[test]
        fn a_value_lies_within_the_bounds_of_its_bucket(value: u64) {
            let n = bucket_of(value);
            let low = if n == 0 { 0 } else { 1u64 << (n - 1) };
            prop_assert!(value >= low);
            prop_assert!(n == BUCKETS - 1 || value < 1 << n);
        }
    }
}
