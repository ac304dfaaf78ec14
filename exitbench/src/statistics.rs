//! What a series of samples comes down to: the least, the middle and the greatest.
//! The runner calls this once per workload, after the warm-up samples are dropped.

/// Minimum, median and maximum of a series, in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    pub min: u64,
    pub median: u64,
    pub max: u64,
}

/// Summarises `samples`, in any order. `None` when there are none.
///
/// The median of an even number of samples is the mean of the two in the middle, rounded down.
pub fn summarise(samples: &[u64]) -> Option<Summary> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let (&min, &max) = (sorted.first()?, sorted.last()?);
    let upper = *sorted.get(sorted.len() / 2)?;
    let median = if sorted.len().is_multiple_of(2) {
        let lower = *sorted.get(sorted.len() / 2 - 1)?;
        lower + (upper - lower) / 2
    } else {
        upper
    };
    Some(Summary { min, median, max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_samples_have_no_summary() {
        assert_eq!(summarise(&[]), None);
    }

    #[test]
    fn an_odd_series_has_its_middle_sample_as_median() {
        assert_eq!(summarise(&[9, 1, 5]), Some(Summary { min: 1, median: 5, max: 9 }));
    }

    #[test]
    fn an_even_series_has_the_mean_of_its_two_middle_samples() {
        assert_eq!(summarise(&[10, 1, 4, 7]), Some(Summary { min: 1, median: 5, max: 10 }));
    }

    #[test]
    fn the_mean_of_huge_samples_does_not_overflow() {
        let summary = summarise(&[u64::MAX, u64::MAX - 2]).unwrap();
        assert_eq!(summary.median, u64::MAX - 1);
    }

    #[test]
    fn one_outlier_moves_the_maximum_alone() {
        let mut samples = vec![100; 99];
        samples.push(1_000_000);
        assert_eq!(summarise(&samples), Some(Summary { min: 100, median: 100, max: 1_000_000 }));
    }
}
