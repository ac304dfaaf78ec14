//! The figures of one run: what `run --json` writes, and `compare` and `plot` read.
//! A workload is measured, skipped (it cannot run there, and why) or failed (it should have run).

use std::collections::BTreeMap;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

mod entry;
mod file;
mod host;
mod layout;
mod measure;

pub use entry::{Entry, Figures, Measurement, Missing};
pub use file::{try_place, write};
pub use host::{Host, Settings};
pub use measure::Measure;

/// The form of the JSON that this exitbench writes. Before it was numbered there were neither samples nor the host's facts.
pub const FORMAT: u32 = 2;

/// What a sample counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Ticks of the time stamp counter
    Tsc,
    /// Executed instructions: an emulator whose time stamp counter counts them
    Instructions,
}

impl Unit {
    /// The words for a table's head.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Tsc => "TSC ticks",
            Self::Instructions => "instructions",
        }
    }
}

/// All figures of one run on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The form of what follows: [`FORMAT`], or 1 where none is told.
    #[serde(default = "unnumbered")]
    pub format: u32,
    /// The version of the exitbench that measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exitbench: Option<String>,
    pub unit: Unit,
    /// The kernel module behind /dev/kvm: `kvm_amd`, `kvm_intel`, `gannet`, …
    pub module: String,
    /// The host's kernel release.
    #[serde(default)]
    pub kernel: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<Settings>,
    /// In the order in which they ran, which is the order of the markers an emulator sees.
    pub workloads: Vec<Entry>,
}

fn unnumbered() -> u32 {
    1
}

impl Report {
    /// A report of this exitbench's, without workloads yet.
    pub fn new(unit: Unit, module: String, kernel: String) -> Self {
        Self {
            format: FORMAT,
            exitbench: Some(env!("CARGO_PKG_VERSION").to_owned()),
            unit,
            module,
            kernel,
            host: None,
            settings: None,
            workloads: Vec::new(),
        }
    }

    /// How many workloads failed.
    pub fn failures(&self) -> usize {
        self.workloads.iter().filter(|w| matches!(w.outcome, Err(Missing::Failed(_)))).count()
    }

    /// What became of the workload called `name`, if it is there.
    pub fn outcome(&self, name: &str) -> Option<&Result<Measurement, Missing>> {
        self.workloads.iter().find(|entry| entry.name == name).map(|entry| &entry.outcome)
    }

    /// The figures of the workload called `name`, if it was measured.
    pub fn measurement(&self, name: &str) -> Option<&Measurement> {
        self.outcome(name)?.as_ref().ok()
    }

    /// What is told of the host and of how it was measured, by name.
    pub fn facts(&self) -> BTreeMap<String, String> {
        let mut facts = BTreeMap::new();
        if !self.kernel.is_empty() {
            facts.insert("kernel".to_owned(), self.kernel.clone());
        }
        if let Some(version) = &self.exitbench {
            facts.insert("exitbench".to_owned(), version.clone());
        }
        for part in [flat(&self.host), flat(&self.settings)] {
            facts.extend(part);
        }
        facts
    }
}

/// The fields of a struct as words, those of a map in it by `map.field`.
fn flat(part: &impl Serialize) -> BTreeMap<String, String> {
    let mut flat = BTreeMap::new();
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(part) else { return flat };
    for (name, value) in fields {
        match value {
            serde_json::Value::Object(map) => {
                let inner = map.into_iter().map(|(key, value)| (format!("{name}.{key}"), value));
                flat.extend(inner.map(|(key, value)| (key, words(&value))));
            }
            value => drop(flat.insert(name, words(&value))),
        }
    }
    flat
}

fn words(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A measured workload, for tests, with a repetition of one sample for each of `medians`.
    pub fn measured(name: &str, medians: &[u64]) -> Entry {
        let samples = medians.iter().map(|median| vec![*median]).collect();
        let outcome = Ok(Measurement::of(samples).unwrap());
        Entry { name: name.into(), outcome }
    }

    /// A report for tests.
    pub fn report(unit: Unit, workloads: Vec<Entry>) -> Report {
        Report { workloads, ..Report::new(unit, "kvm_amd".into(), "6.12".into()) }
    }

    #[test]
    fn a_skipped_workload_is_no_failure_and_has_no_figures() {
        let skipped = Err(Missing::Skipped("no XSAVE".into()));
        let failed = Err(Missing::Failed("timed out".into()));
        let entry = |name: &str, outcome| Entry { name: name.into(), outcome };
        let all = vec![measured("cpuid", &[2]), entry("xsetbv", skipped), entry("ipi", failed)];
        let report = report(Unit::Tsc, all);
        assert_eq!(report.failures(), 1);
        assert!(report.measurement("xsetbv").is_none());
        assert_eq!(report.measurement("cpuid").unwrap().summary.median, 2);
    }

    #[test]
    fn facts_are_flat_and_in_words() {
        let mut report = report(Unit::Tsc, vec![]);
        assert_eq!(report.facts()["kernel"], "6.12");
        let mut host = Host { cpus: 4, ..Host::default() };
        host.mitigations.insert("l1tf".into(), "Not affected".into());
        report.host = Some(host);
        report.settings = Some(Settings { pinned: vec![2, 3], ..Settings::default() });
        let facts = report.facts();
        assert_eq!((facts["cpus"].as_str(), facts["pinned"].as_str()), ("4", "[2,3]"));
        assert_eq!(facts["mitigations.l1tf"], "Not affected");
    }
}
