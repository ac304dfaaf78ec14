//! The figures of one run and their JSON form, which `run --json` writes and `compare` reads.
//! A workload is measured, skipped (it cannot run there, and why) or failed (it should have run).

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

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
    /// The word for a table's head.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Tsc => "TSC ticks",
            Self::Instructions => "instructions",
        }
    }
}

/// All figures of one run on one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub unit: Unit,
    /// The kernel module behind /dev/kvm: `kvm_amd`, `kvm_intel`, `gannet`, …
    pub module: String,
    /// The host's kernel release.
    #[serde(default)]
    pub kernel: String,
    /// In the order in which they ran, which is the order of the markers an emulator sees.
    pub workloads: Vec<Entry>,
}

/// One workload of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub name: String,
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What became of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Outcome {
    Measured(Measurement),
    /// Cannot run on this machine, for this reason.
    Skipped {
        skipped: String,
    },
    /// Should have run and did not.
    Failed {
        failed: String,
    },
}

/// Figures of one operation, in the report's unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measurement {
    pub min: u64,
    pub median: u64,
    pub max: u64,
    /// Samples behind the three figures, warm-up not counted.
    pub iterations: u64,
    /// Whether a counted pass between two marker instructions followed the measured one.
    pub markers: bool,
    /// Operations in that pass.
    pub marker_iterations: u64,
    /// By how much the module's own statistics grew in that pass.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub statistics: BTreeMap<String, u64>,
}

impl Report {
    /// Reads a report that [`Report::write`] wrote.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("cannot read the report {}", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{} is not a report of exitbench", path.display()))
    }

    /// Writes the report to `path`; `-` is standard output.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        if path == Path::new("-") {
            let written = io::stdout().write_all(text.as_bytes());
            return written.context("cannot write to standard output");
        }
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// How many workloads failed.
    pub fn failures(&self) -> usize {
        self.workloads.iter().filter(|w| matches!(w.outcome, Outcome::Failed { .. })).count()
    }

    /// The figures of the workload called `name`, if it was measured.
    pub fn measurement(&self, name: &str) -> Option<&Measurement> {
        self.workloads.iter().find_map(|entry| match &entry.outcome {
            Outcome::Measured(measurement) if entry.name == name => Some(measurement),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let measured = Measurement {
            min: 1,
            median: 2,
            max: 3,
            iterations: 500,
            markers: true,
            marker_iterations: 100,
            statistics: BTreeMap::from([("vcpu.exits".into(), 100)]),
        };
        Report {
            unit: Unit::Instructions,
            module: "gannet".into(),
            kernel: "6.12".into(),
            workloads: vec![
                Entry { name: "cpuid".into(), outcome: Outcome::Measured(measured) },
                Entry {
                    name: "xsetbv".into(),
                    outcome: Outcome::Skipped { skipped: "no XSAVE".into() },
                },
                Entry {
                    name: "ipi".into(),
                    outcome: Outcome::Failed { failed: "timed out".into() },
                },
            ],
        }
    }

    #[test]
    fn a_report_survives_its_json_form() {
        let text = serde_json::to_string(&report()).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report());
    }

    #[test]
    fn the_json_has_the_agreed_names() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["unit"], "instructions");
        assert_eq!(json["module"], "gannet");
        assert_eq!(json["workloads"][0]["name"], "cpuid");
        assert_eq!(json["workloads"][0]["median"], 2);
        assert_eq!(json["workloads"][0]["markers"], true);
        assert_eq!(json["workloads"][0]["marker_iterations"], 100);
        assert_eq!(json["workloads"][1]["skipped"], "no XSAVE");
        assert_eq!(json["workloads"][2]["failed"], "timed out");
    }

    #[test]
    fn a_skipped_workload_is_no_failure_and_has_no_figures() {
        assert_eq!(report().failures(), 1);
        assert!(report().measurement("xsetbv").is_none());
        assert_eq!(report().measurement("cpuid").unwrap().median, 2);
    }

    #[test]
    fn a_file_that_is_no_report_is_named_in_the_error() {
        let error = Report::read(Path::new("/dev/null")).unwrap_err();
        assert!(error.to_string().contains("/dev/null"));
    }
}
