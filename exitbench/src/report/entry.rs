//! One workload of a report, and its form in JSON: a flat object with figures, or with `skipped`, or with `failed`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::statistics::{Summary, summarise};

/// One workload of a report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub struct Entry {
    pub name: String,
    /// Its figures, or why there are none.
    pub outcome: Result<Measurement, Missing>,
}

/// Why a workload has no figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It cannot run on this machine, for this reason.
    Skipped(String),
    /// It should have run and did not.
    Failed(String),
}

/// Figures of one operation, in the report's unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    pub summary: Figures,
    /// The quartiles of all samples; nobody knows them of a report that leaves the samples out.
    pub quartiles: Option<[u64; 2]>,
    /// The median of each repetition, in their order; at least one.
    pub medians: Vec<u64>,
    /// What each repetition measured, in its order, warm-up not counted; empty where the report leaves it out.
    pub samples: Vec<Vec<u64>>,
    /// How many samples each repetition has.
    pub iterations: u64,
    /// Whether a counted pass between two marker instructions followed the measured one of the first repetition.
    pub markers: bool,
    /// Operations in that pass.
    pub marker_iterations: u64,
    /// By how much the module's own statistics grew in that pass.
    pub statistics: BTreeMap<String, u64>,
}

/// The three figures by which a workload is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// The least of all samples.
    pub min: u64,
    /// The median of the repetitions' medians.
    pub median: u64,
    /// The greatest of all samples.
    pub max: u64,
}

impl Measurement {
    /// The figures of `samples`, one series for each repetition; `None` where one of them, or all, is empty.
    pub fn of(samples: Vec<Vec<u64>>) -> Option<Self> {
        let summaries: Option<Vec<Summary>> = samples.iter().map(|one| summarise(one)).collect();
        let medians: Vec<u64> = summaries?.iter().map(|summary| summary.median).collect();
        let all = summarise(&samples.concat())?;
        let median = summarise(&medians)?.median;
        Some(Self {
            summary: Figures { min: all.min, median, max: all.max },
            quartiles: Some([all.lower, all.upper]),
            iterations: samples.first()?.len() as u64,
            medians,
            samples,
            markers: false,
            marker_iterations: 0,
            statistics: BTreeMap::new(),
        })
    }

    /// How far the middle half of all samples lies apart, as a part of the median.
    pub fn within(&self) -> Option<f64> {
        let [lower, upper] = self.quartiles?;
        Some(upper.saturating_sub(lower) as f64 / self.summary.median.max(1) as f64)
    }

    /// The repetitions' medians as one series; `None` where there is one alone.
    pub fn repetitions(&self) -> Option<Summary> {
        summarise(&self.medians).filter(|_| self.medians.len() > 1)
    }
}

/// An entry as its JSON has it. Who wrote it may have left out anything.
#[derive(Serialize, Deserialize)]
struct Fields {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    min: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    median: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    iterations: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quartiles: Option<[u64; 2]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    markers: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    marker_iterations: Option<u64>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    statistics: BTreeMap<String, u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    medians: Vec<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    samples: Vec<Vec<u64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

impl TryFrom<Fields> for Entry {
    type Error = String;

    fn try_from(fields: Fields) -> Result<Self, String> {
        let name = fields.name.clone();
        let outcome = match (&fields.failed, &fields.skipped) {
            (Some(failed), _) => Err(Missing::Failed(failed.clone())),
            (_, Some(skipped)) => Err(Missing::Skipped(skipped.clone())),
            _ => Ok(fields.measurement()?),
        };
        Ok(Self { name, outcome })
    }
}

impl Fields {
    /// The samples' own figures where there are samples, what is told where there are none.
    fn measurement(self) -> Result<Measurement, String> {
        let name = &self.name;
        let median = summarise(&self.medians).map(|summary| summary.median).or(self.median);
        let mut measured = match (self.min, median, self.max) {
            _ if !self.samples.is_empty() => Measurement::of(self.samples)
                .ok_or_else(|| format!("`{name}` has a repetition without samples"))?,
            (Some(min), Some(median), Some(max)) if min <= median && median <= max => Measurement {
                summary: Figures { min, median, max },
                quartiles: self.quartiles,
                medians: if self.medians.is_empty() { vec![median] } else { self.medians },
                samples: Vec::new(),
                iterations: self.iterations.unwrap_or(0),
                markers: false,
                marker_iterations: 0,
                statistics: BTreeMap::new(),
            },
            (Some(_), Some(_), Some(_)) => {
                return Err(format!("the figures of `{name}` are not in their order"));
            }
            _ => return Err(format!("`{name}` has neither figures nor a reason why not")),
        };
        measured.markers = self.markers.unwrap_or(false);
        measured.marker_iterations = self.marker_iterations.unwrap_or(0);
        measured.statistics = self.statistics;
        Ok(measured)
    }

    /// An object with nothing but a name.
    fn named(name: String) -> Self {
        Self {
            name,
            min: None,
            median: None,
            max: None,
            iterations: None,
            quartiles: None,
            markers: None,
            marker_iterations: None,
            statistics: BTreeMap::new(),
            medians: Vec::new(),
            samples: Vec::new(),
            skipped: None,
            failed: None,
        }
    }
}

impl From<Entry> for Fields {
    fn from(entry: Entry) -> Self {
        let named = Self::named(entry.name);
        match entry.outcome {
            Err(Missing::Skipped(skipped)) => Self { skipped: Some(skipped), ..named },
            Err(Missing::Failed(failed)) => Self { failed: Some(failed), ..named },
            Ok(measured) => Self {
                min: Some(measured.summary.min),
                median: Some(measured.summary.median),
                max: Some(measured.summary.max),
                iterations: Some(measured.iterations),
                quartiles: measured.quartiles,
                markers: Some(measured.markers),
                marker_iterations: Some(measured.marker_iterations),
                statistics: measured.statistics,
                medians: measured.medians,
                samples: measured.samples,
                ..named
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(json: &str) -> Result<Entry, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    fn figures(json: &str) -> Measurement {
        match read(json).unwrap().outcome {
            Ok(measured) => measured,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_median_is_that_of_the_repetitions_and_the_range_that_of_all_samples() {
        let measured = Measurement::of(vec![vec![1, 5, 5], vec![6, 6, 90], vec![5, 7, 7]]).unwrap();
        assert_eq!(measured.summary, Figures { min: 1, median: 6, max: 90 });
        assert_eq!(measured.medians, [5, 6, 7]);
        assert_eq!(measured.quartiles, Some([5, 7]));
        assert_eq!(measured.repetitions().unwrap().max, 7);
        assert!(Measurement::of(vec![]).is_none());
        assert!(Measurement::of(vec![vec![1], vec![]]).is_none());
    }

    #[test]
    fn one_repetition_has_no_spread_between_repetitions() {
        let measured = Measurement::of(vec![vec![90, 100, 110]]).unwrap();
        assert_eq!(measured.repetitions(), None);
        assert_eq!(measured.within(), Some(0.1));
    }

    #[test]
    fn an_entry_of_before_the_samples_is_read() {
        let old = figures(
            r#"{"name": "cpuid", "min": 1, "median": 2, "max": 3, "iterations": 500, "markers": true,
                "marker_iterations": 100, "statistics": {"vcpu.exits": 100}}"#,
        );
        assert_eq!((old.summary.median, old.iterations, old.medians), (2, 500, vec![2]));
        assert!(old.markers && old.marker_iterations == 100 && old.statistics["vcpu.exits"] == 100);
        assert_eq!(old.quartiles, None);
    }

    #[test]
    fn figures_without_samples_keep_the_repetitions_medians() {
        let entry =
            figures(r#"{"name": "cpuid", "min": 1, "median": 9, "max": 9, "medians": [2, 2, 3]}"#);
        assert_eq!((entry.summary.median, entry.medians), (2, vec![2, 2, 3]));
    }

    #[test]
    fn samples_count_and_not_what_is_told_of_them() {
        let entry = figures(
            r#"{"name": "cpuid", "min": 0, "median": 0, "max": 0, "samples": [[4, 5, 6], [5, 6, 7]]}"#,
        );
        assert_eq!(entry.summary, Figures { min: 4, median: 5, max: 7 });
        assert_eq!(entry.medians, [5, 6]);
    }

    #[test]
    fn an_entry_that_means_nothing_says_what_is_wrong_with_it() {
        let wrong = [
            (r#"{"name": "cpuid"}"#, "neither figures nor a reason"),
            (r#"{"name": "cpuid", "min": 1, "median": 2}"#, "neither figures nor a reason"),
            (r#"{"name": "cpuid", "min": 3, "median": 2, "max": 9}"#, "not in their order"),
            (r#"{"name": "cpuid", "samples": [[1], []]}"#, "a repetition without samples"),
            (r#"{"name": "cpuid", "samples": [[-1]]}"#, "invalid value"),
            (r#"{"min": 1, "median": 2, "max": 3}"#, "missing field `name`"),
        ];
        for (json, expected) in wrong {
            let error = read(json).unwrap_err();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }

    proptest! {
        #[test]
        fn an_entry_survives_its_json_form(
            samples in prop::collection::vec(prop::collection::vec(any::<u64>(), 1..9), 1..9),
            keep in any::<bool>()
        ) {
            let mut measured = Measurement::of(samples).unwrap();
            if !keep {
                measured.samples.clear();
            }
            let entry = Entry { name: "cpuid".into(), outcome: Ok(measured) };
            let text = serde_json::to_string(&entry).unwrap();
            prop_assert_eq!(read(&text).unwrap(), entry);
        }
    }
}
