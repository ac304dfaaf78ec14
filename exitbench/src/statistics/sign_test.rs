//! The sign test: two series in pairs, and whether one is below the other more often than a fair coin would have it. It takes
//! nothing for granted about how the noise is distributed, only that one pair does not depend on another.

use std::cmp::Ordering;

/// How many pairs went which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignTest {
    /// Pairs whose second is less.
    pub below: u64,
    /// Pairs whose second is greater.
    pub above: u64,
    /// Pairs of equals: they say nothing, and are left out.
    pub equal: u64,
}

impl SignTest {
    /// Counts the signs of `pairs`.
    pub fn of(pairs: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut test = Self::default();
        for (first, second) in pairs {
            match second.total_cmp(&first) {
                Ordering::Less => test.below += 1,
                Ordering::Greater => test.above += 1,
                Ordering::Equal => test.equal += 1,
            }
        }
        test
    }

    /// Every pair, equals among them.
    pub fn pairs(&self) -> u64 {
        self.below + self.above + self.equal
    }

    /// The exact two-sided p-value: how likely so many pairs, or more, go the same way if neither way is likelier.
    pub fn p(&self) -> f64 {
        (2.0 * tail(self.below + self.above, self.below.min(self.above))).min(1.0)
    }
}

/// The least p-value that `pairs` pairs can have: that of all of them going one way.
pub fn least_p(pairs: u64) -> f64 {
    SignTest { below: pairs, ..SignTest::default() }.p()
}

/// The probability of at most `most` heads in `coins` throws. In logarithms, since 2 to the power of `-coins` may be too small.
fn tail(coins: u64, most: u64) -> f64 {
    let mut term = -(coins as f64) * std::f64::consts::LN_2;
    let mut sum = 0.0;
    for heads in 0..=most {
        sum += term.exp();
        term += ((coins - heads) as f64).ln() - ((heads + 1) as f64).ln();
    }
    sum
}

/// The p-values of several tests, each adjusted for being one of so many by Holm's method: among all that are then below 0.05, the chance that
/// any is there by luck is below 0.05.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|a, b| p[*a].total_cmp(&p[*b]));
    let mut adjusted = vec![1.0; p.len()];
    let mut greatest = 0.0f64;
    for (rank, index) in order.into_iter().enumerate() {
        greatest = greatest.max((p.len() - rank) as f64 * p[index]).min(1.0);
        adjusted[index] = greatest;
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn p(below: u64, above: u64) -> f64 {
        SignTest { below, above, equal: 0 }.p()
    }

    /// From tables of the binomial distribution with probability one half.
    #[test]
    fn the_p_value_is_that_of_the_tables() {
        let known = [
            (0, 0, 1.0),
            (1, 0, 1.0),
            (5, 0, 0.0625),
            (6, 0, 0.03125),
            (8, 0, 0.007_812_5),
            (9, 1, 0.021_484_375),
            (8, 2, 0.109_375),
            (5, 5, 1.0),
            (12, 3, 0.035_156_25),
            (15, 5, 0.041_389_465_332_031_25),
            (18, 7, 0.043_285_250_663_757_324),
        ];
        for (below, above, expected) in known {
            assert!((p(below, above) - expected).abs() < 1e-12, "{below} {above}");
        }
    }

    #[test]
    fn the_least_p_value_is_that_of_all_pairs_going_one_way() {
        assert!((least_p(11) - 0.000_976_562_5).abs() < 1e-15);
        assert_eq!(least_p(0), 1.0);
    }

    #[test]
    fn many_thousands_of_pairs_neither_overflow_nor_vanish() {
        assert!(p(50_000, 50_000) > 0.99);
        assert!(p(100_000, 0) == 0.0);
        assert!((0.01..0.1).contains(&p(50_300, 49_700)));
    }

    #[test]
    fn equals_are_left_out() {
        let test = SignTest::of([(1.0, 2.0), (3.0, 3.0), (5.0, 4.0), (1.0, 2.0)]);
        assert_eq!(test, SignTest { below: 1, above: 2, equal: 1 });
        assert_eq!((test.p(), test.pairs()), (1.0, 4));
        assert_eq!(SignTest::of([(3.0, 3.0); 99]).p(), 1.0);
    }

    #[test]
    fn holm_multiplies_by_what_is_left() {
        let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(close(&holm(&[0.01, 0.04, 0.03, 0.005]), &[0.03, 0.06, 0.06, 0.02]));
        assert!(close(&holm(&[0.9, 0.8]), &[1.0, 1.0]));
        assert!(holm(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn a_p_value_is_a_probability_and_the_same_from_either_side(a in 0u64..300, b in 0u64..300) {
            prop_assert!((0.0..=1.0).contains(&p(a, b)));
            prop_assert_eq!(p(a, b), p(b, a));
        }

        #[test]
        fn one_more_pair_that_goes_with_the_many_makes_it_less(a in 0u64..100, b in 0u64..100) {
            prop_assume!(a > b);
            prop_assert!(p(a + 1, b) <= p(a, b) + 1e-12);
        }

        #[test]
        fn all_probabilities_together_are_one(coins in 0u64..200) {
            prop_assert!((tail(coins, coins) - 1.0).abs() < 1e-9);
        }

        #[test]
        fn swapping_the_series_swaps_the_signs(pairs in prop::collection::vec((0u32..9, 0u32..9), 0..40)) {
            let pairs = || pairs.iter().map(|(a, b)| (f64::from(*a), f64::from(*b)));
            let (one, other) = (SignTest::of(pairs()), SignTest::of(pairs().map(|(a, b)| (b, a))));
            prop_assert_eq!((one.below, one.above), (other.above, other.below));
            prop_assert_eq!(one.p(), other.p());
        }

        #[test]
        fn adjusting_keeps_the_order_and_only_raises(p in prop::collection::vec(0.0f64..=1.0, 0..40)) {
            let adjusted = holm(&p);
            for (i, one) in p.iter().enumerate() {
                prop_assert!(adjusted[i] >= *one && adjusted[i] <= 1.0);
                prop_assert!(adjusted[i] <= (one * p.len() as f64).min(1.0) + 1e-12);
                for (j, other) in p.iter().enumerate() {
                    prop_assert!(one > other || adjusted[i] <= adjusted[j]);
                }
            }
        }
    }
}
