//! What a series of samples comes down to: the least, the quartiles and the greatest.

/// The five numbers of a series, in the unit of its samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    pub min: u64,
    /// A quarter of the samples is not above it.
    pub lower: u64,
    pub median: u64,
    /// A quarter of the samples is not below it.
    pub upper: u64,
    pub max: u64,
}

/// Summarises `samples`, in any order. `None` when there are none.
///
/// Where a quartile falls between two samples it is on the straight line between them, rounded down; so the median of an
/// even number of samples is the mean of the two in the middle.
pub fn summarise(samples: &[u64]) -> Option<Summary> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let quartile = |n| quartile(&sorted, n);
    Some(Summary {
        min: quartile(0)?,
        lower: quartile(1)?,
        median: quartile(2)?,
        upper: quartile(3)?,
        max: quartile(4)?,
    })
}

/// The `n`-th of the five numbers of a sorted series.
fn quartile(sorted: &[u64], n: usize) -> Option<u64> {
    let place = sorted.len().checked_sub(1)? * n;
    let (at, between) = (place / 4, place % 4);
    let below = *sorted.get(at)?;
    let above = sorted.get(at + 1).copied().unwrap_or(below);
    let step = u128::from(above - below) * between as u128 / 4;
    Some(below + step as u64)
}

impl Summary {
    /// The interquartile range as a part of the median: how far apart the middle half of the samples lies.
    pub fn spread(&self) -> f64 {
        (self.upper - self.lower) as f64 / self.median.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn no_samples_have_no_summary() {
        assert_eq!(summarise(&[]), None);
    }

    #[test]
    fn one_sample_is_all_of_its_summary() {
        let one = Summary { min: 7, lower: 7, median: 7, upper: 7, max: 7 };
        assert_eq!(summarise(&[7]), Some(one));
        assert_eq!(one.spread(), 0.0);
    }

    #[test]
    fn an_odd_series_has_its_middle_sample_as_median() {
        let summary = Summary { min: 1, lower: 3, median: 5, upper: 7, max: 9 };
        assert_eq!(summarise(&[9, 1, 5]), Some(summary));
    }

    #[test]
    fn an_even_series_has_the_mean_of_its_two_middle_samples() {
        let summary = Summary { min: 1, lower: 3, median: 5, upper: 7, max: 10 };
        assert_eq!(summarise(&[10, 1, 4, 7]), Some(summary));
    }

    #[test]
    fn the_mean_of_huge_samples_does_not_overflow() {
        let summary = summarise(&[u64::MAX, u64::MAX - 2]).unwrap();
        assert_eq!(summary.median, u64::MAX - 1);
        assert_eq!(summarise(&[0, u64::MAX]).unwrap().upper, u64::MAX / 4 * 3 + 2);
    }

    #[test]
    fn one_outlier_moves_the_maximum_alone() {
        let mut samples = vec![100; 99];
        samples.push(1_000_000);
        let summary = summarise(&samples).unwrap();
        assert_eq!((summary.lower, summary.upper, summary.max), (100, 100, 1_000_000));
        assert_eq!(summary.spread(), 0.0);
    }

    #[test]
    fn the_spread_is_a_part_of_the_median() {
        assert_eq!(summarise(&[90, 100, 110]).unwrap().spread(), 0.1);
    }

    proptest! {
        #[test]
        fn the_five_numbers_are_in_order(samples in prop::collection::vec(any::<u64>(), 1..60)) {
            let s = summarise(&samples).unwrap();
            prop_assert!(s.min <= s.lower && s.lower <= s.median);
            prop_assert!(s.median <= s.upper && s.upper <= s.max);
            prop_assert_eq!(Some(&s.min), samples.iter().min());
            prop_assert_eq!(Some(&s.max), samples.iter().max());
        }

        #[test]
        fn half_of_the_samples_lie_on_each_side(samples in prop::collection::vec(0u64..50, 1..60)) {
            let s = summarise(&samples).unwrap();
            let count = |test: &dyn Fn(u64) -> bool| samples.iter().filter(|n| test(**n)).count();
            prop_assert!(count(&|n| n <= s.median) * 2 >= samples.len());
            prop_assert!(count(&|n| n > s.median) * 2 <= samples.len());
        }

        #[test]
        fn the_order_does_not_matter(samples in prop::collection::vec(any::<u64>(), 1..60)) {
            let turned: Vec<u64> = samples.iter().rev().copied().collect();
            prop_assert_eq!(summarise(&samples), summarise(&turned));
        }
    }
}
