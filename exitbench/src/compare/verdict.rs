//! Two reports, workload by workload: how much more the second costs, and whether that is more than noise.

use crate::report::{Measure, Measurement, Missing, Report};
use crate::statistics::{SignTest, holm, least_p};

/// One line of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub name: String,
    pub sides: [Side; 2],
    /// Second median over first; `None` unless both were measured and the first is not 0.
    pub ratio: Option<f64>,
    /// `None` unless both were measured.
    pub verdict: Option<Verdict>,
}

/// What one report has of a workload.
#[derive(Clone, Debug, PartialEq)]
pub enum Side {
    Measured {
        median: f64,
        /// The interquartile range of the repetitions' medians, as a part of the median.
        spread: Option<f64>,
    },
    Skipped(String),
    Failed(String),
    Absent,
}

/// What the sign test says of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// With the adjusted p-value.
    Faster(f64),
    /// With the adjusted p-value.
    Slower(f64),
    /// With the adjusted p-value.
    NoDifference(f64),
    /// Even if all repetitions agreed, they would be too few to show anything.
    NotTested,
}

impl Verdict {
    /// The word for the second report.
    pub fn word(self) -> &'static str {
        match self {
            Self::Faster(_) => "faster",
            Self::Slower(_) => "slower",
            Self::NoDifference(_) => "no difference shown",
            Self::NotTested => "not tested",
        }
    }

    /// The p-value, adjusted for the number of workloads.
    pub fn p(self) -> Option<f64> {
        match self {
            Self::Faster(p) | Self::Slower(p) | Self::NoDifference(p) => Some(p),
            Self::NotTested => None,
        }
    }
}

/// Every workload of either report, in the order of the first.
pub fn rows(reports: &[Report; 2], measure: &Measure, alpha: f64) -> Vec<Row> {
    let [first, second] = reports;
    let only_second = second.workloads.iter().filter(|w| first.outcome(&w.name).is_none());
    let names: Vec<&str> =
        first.workloads.iter().chain(only_second).map(|w| w.name.as_str()).collect();
    let signs: Vec<Option<SignTest>> =
        names.iter().map(|name| signs(reports, measure, name)).collect();
    let tests: Vec<f64> = signs.iter().flatten().map(SignTest::p).collect();
    let number = tests.len() as f64;
    let mut adjusted = holm(&tests).into_iter();
    let mut rows = Vec::new();
    for (name, signs) in names.into_iter().zip(signs) {
        let sides = [0, 1].map(|index| side(&reports[index], measure, index, name));
        let ratio = ratio(&sides);
        let tested = signs.zip(signs.and_then(|_| adjusted.next()));
        let verdict = tested
            .map(|(signs, p)| verdict(signs, p, ratio, least_p(signs.pairs()) * number, alpha));
        rows.push(Row { name: name.to_owned(), sides, ratio, verdict });
    }
    rows
}

/// A repetition of the first report against the same one of the second; `None` unless both measured the workload.
fn signs(reports: &[Report; 2], measure: &Measure, name: &str) -> Option<SignTest> {
    let [first, second] = [&reports[0], &reports[1]].map(|report| report.measurement(name));
    let medians = |measured: &Measurement, index: usize| -> Vec<f64> {
        measured.medians.iter().map(|median| measure.of(index, *median)).collect()
    };
    Some(SignTest::of(medians(first?, 0).into_iter().zip(medians(second?, 1))))
}

/// `reachable` is the least p-value, adjusted, that so many repetitions can have. Which way most pairs go and which way the medians differ
/// must agree.
fn verdict(signs: SignTest, p: f64, ratio: Option<f64>, reachable: f64, alpha: f64) -> Verdict {
    if reachable >= alpha {
        return Verdict::NotTested;
    }
    match ratio {
        Some(ratio) if p < alpha && signs.below > signs.above && ratio < 1.0 => Verdict::Faster(p),
        Some(ratio) if p < alpha && signs.above > signs.below && ratio > 1.0 => Verdict::Slower(p),
        _ => Verdict::NoDifference(p),
    }
}

fn side(report: &Report, measure: &Measure, index: usize, name: &str) -> Side {
    match report.outcome(name) {
        None => Side::Absent,
        Some(Err(Missing::Skipped(skipped))) => Side::Skipped(skipped.clone()),
        Some(Err(Missing::Failed(failed))) => Side::Failed(failed.clone()),
        Some(Ok(measured)) => Side::Measured {
            median: measure.of(index, measured.summary.median),
            spread: measured.repetitions().map(|summary| summary.spread()),
        },
    }
}

fn ratio(sides: &[Side; 2]) -> Option<f64> {
    match sides {
        [Side::Measured { median: a, .. }, Side::Measured { median: b, .. }] if *a > 0.0 => {
            Some(b / a)
        }
        _ => None,
    }
}

/// Why a row does not pass where no workload may cost more than `limit` times as much as before. What was not tested for noise counts as it
/// stands: a limit that lets pass what it could not judge is none.
pub fn beyond(row: &Row, limit: f64) -> Option<String> {
    let name = &row.name;
    match (&row.sides, row.ratio, row.verdict) {
        ([Side::Measured { .. }, Side::Failed(reason)], ..) => {
            Some(format!("{name}: failed in B: {}", reason.lines().next().unwrap_or_default()))
        }
        (_, Some(ratio), Some(Verdict::NotTested)) if ratio > limit => Some(format!(
            "{name}: {ratio:.3}×, and {limit}× is allowed (not tested for noise: too few repetitions)"
        )),
        // A limit below 1 wants a gain, which a difference that is not shown is not.
        (_, Some(ratio), Some(verdict))
            if ratio > limit && (limit < 1.0 || matches!(verdict, Verdict::Slower(_))) =>
        {
            Some(format!("{name}: {ratio:.3}×, and {limit}× is allowed"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{measured, report};
    use crate::report::{Entry, Unit};
    use proptest::prelude::*;

    fn compared(first: Vec<Entry>, second: Vec<Entry>) -> Vec<Row> {
        let reports = [report(Unit::Tsc, first), report(Unit::Tsc, second)];
        rows(&reports, &Measure::common(&reports).unwrap(), 0.05)
    }

    /// One workload of so many repetitions, the first series against the second.
    fn one(first: &[u64], second: &[u64]) -> Row {
        compared(vec![measured("cpuid", first)], vec![measured("cpuid", second)]).remove(0)
    }

    /// The word and the p-value, to a few digits.
    fn told(row: &Row) -> (&'static str, Option<String>) {
        let verdict = row.verdict.unwrap();
        (verdict.word(), verdict.p().map(|p| format!("{p:.6}")))
    }

    fn failed(name: &str) -> Entry {
        Entry { name: name.into(), outcome: Err(Missing::Failed("timed out".into())) }
    }

    #[test]
    fn the_ratio_is_second_over_first() {
        assert_eq!(one(&[2000], &[500]).ratio, Some(0.25));
        assert_eq!(one(&[0], &[500]).ratio, None);
    }

    #[test]
    fn workloads_of_either_report_have_a_row() {
        let first = vec![measured("cpuid", &[1]), measured("nothing", &[5])];
        let rows = compared(first, vec![measured("ipi", &[1]), failed("cpuid")]);
        let names: Vec<_> = rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["cpuid", "nothing", "ipi"]);
        assert!(rows.iter().all(|r| r.ratio.is_none() && r.verdict.is_none()));
        assert_eq!(rows[0].sides[1], Side::Failed("timed out".into()));
        assert_eq!(rows[2].sides[0], Side::Absent);
    }

    #[test]
    fn what_all_repetitions_agree_on_is_shown() {
        let (low, high) = ([10, 11, 12, 10, 11, 12], [20, 21, 22, 20, 21, 22]);
        assert_eq!(told(&one(&low, &high)), ("slower", Some("0.031250".into())));
        assert_eq!(told(&one(&high, &low)), ("faster", Some("0.031250".into())));
    }

    #[test]
    fn what_some_repetitions_deny_is_not_shown() {
        let row = one(&[10, 11, 12, 10, 11, 12], &[11, 12, 13, 11, 12, 11]);
        assert_eq!(told(&row), ("no difference shown", Some("0.218750".into())));
        assert_eq!(one(&[5; 20], &[5; 20]).verdict, Some(Verdict::NoDifference(1.0)));
    }

    #[test]
    fn too_few_repetitions_show_nothing() {
        assert_eq!(one(&[10; 5], &[20; 5]).verdict, Some(Verdict::NotTested));
        assert_eq!(one(&[10; 1], &[20; 9]).verdict, Some(Verdict::NotTested));
    }

    #[test]
    fn each_of_many_workloads_must_show_more() {
        let all = |cost: u64| {
            (0..26).map(|n| measured(&format!("w{n}"), &[cost; 10])).collect::<Vec<_>>()
        };
        assert_eq!(compared(all(10), all(20))[0].verdict, Some(Verdict::NotTested));
        let one = |cost| vec![measured("w0", &[cost; 10])];
        assert!(matches!(compared(one(10), one(20))[0].verdict, Some(Verdict::Slower(_))));
    }

    #[test]
    fn a_direction_that_the_medians_deny_is_not_called_one() {
        let signs = SignTest { below: 30, above: 0, equal: 0 };
        assert_eq!(verdict(signs, 0.001, Some(1.2), 0.0, 0.05), Verdict::NoDifference(0.001));
        assert_eq!(verdict(signs, 0.001, None, 0.0, 0.05), Verdict::NoDifference(0.001));
        assert_eq!(verdict(signs, 0.001, Some(0.8), 0.0, 0.05), Verdict::Faster(0.001));
    }

    #[test]
    fn a_limit_stops_what_is_slower_and_what_cannot_be_judged() {
        let stopped = |row: &Row| beyond(row, 1.01);
        assert!(stopped(&one(&[100; 9], &[103; 9])).unwrap().contains("1.030×"));
        assert_eq!(stopped(&one(&[100; 9], &[101; 9])), None);
        assert_eq!(stopped(&one(&[100; 9], &[50; 9])), None);
        assert!(stopped(&one(&[100], &[103])).unwrap().contains("too few"));
        let half = one(&[100; 9], &[50; 9]);
        assert!(beyond(&half, 0.4).is_some() && beyond(&half, 0.6).is_none());
        assert!(beyond(&one(&[100; 9], &[100; 9]), 0.6).is_some());
        let noisy = one(&[100, 90, 100, 90, 100, 90], &[90, 104, 104, 104, 90, 104]);
        assert!(noisy.ratio.unwrap() > 1.01 && stopped(&noisy).is_none(), "{noisy:?}");
        let row = &compared(vec![measured("cpuid", &[1])], vec![failed("cpuid")])[0];
        assert!(stopped(row).unwrap().contains("failed in B"));
    }

    proptest! {
        #[test]
        fn from_the_other_side_faster_is_slower(
            first in prop::collection::vec(1u64..30, 1..24),
            second in prop::collection::vec(1u64..30, 1..24)
        ) {
            let mirrored = match one(&second, &first).verdict.unwrap() {
                Verdict::Faster(p) => Verdict::Slower(p),
                Verdict::Slower(p) => Verdict::Faster(p),
                same => same,
            };
            prop_assert_eq!(one(&first, &second).verdict.unwrap(), mirrored);
        }

        #[test]
        fn a_report_beside_itself_differs_in_nothing(medians in prop::collection::vec(1u64..1000, 6..40)) {
            let row = one(&medians, &medians);
            prop_assert_eq!((row.ratio, row.verdict), (Some(1.0), Some(Verdict::NoDifference(1.0))));
        }
    }
}
