//! What `make mechanisms` finds, as `docs/results/mechanisms.json` holds it: for each machine one run per module and parameters, each with
//! its workloads and its tasks of Linux guests. Figures of workloads are per operation; nothing here is modelled.

use anyhow::Context;
use gannet_lab::{MACHINES, Module};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Numbers by name.
pub type Numbers = BTreeMap<String, f64>;

/// Everything that was measured.
#[derive(Default, Serialize, Deserialize)]
pub struct All {
    pub machines: Vec<Results>,
}

/// What was measured on one machine.
#[derive(Default, Serialize, Deserialize)]
pub struct Results {
    pub machine: String,
    /// The host kernel's full release.
    pub release: String,
    pub runs: Vec<Run>,
}

/// One machine with one module, as the plan has it and then with what was found.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// `stock` or `gannet`.
    pub module: String,
    /// As given at load.
    #[serde(default)]
    pub parameters: String,
    /// What the plan has it do: `run ARGUMENTS` or `guest TASK WORDS`.
    #[serde(default, skip_serializing)]
    pub parts: Vec<String>,
    /// Why the module did not load, in its own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// What went wrong otherwise: faults in the host's log, counts that do not match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub workloads: BTreeMap<String, Figures>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub guests: BTreeMap<String, Figures>,
}

/// Figures of one operation of a workload, or of a task from its first line to its last.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    /// Why there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// Instructions of host and guest, by the time-stamp counter: `min`, `median` and `max` of a workload's `iterations`, with the
    /// measuring frame, or a task's `instructions`.
    #[serde(flatten)]
    pub ticks: BTreeMap<String, u64>,
    /// What the host executed, by kind, and `instructions`; from a pass of its own, and empty if that could not be counted.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub host: Numbers,
    /// Times that the guest was left, by reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub exits: Numbers,
    /// What the module's own statistics grew by.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub statistics: Numbers,
    /// Figures that the task printed itself.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub figures: Numbers,
}

/// Why there are no figures of what nobody measured.
pub const NOT_RUN: &str = "not run";

/// An operation below this is a stray one of the host's timer tick, and none of the exit.
const STRAY: f64 = 0.05;

impl All {
    /// Reads the file that an earlier run wrote.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let read = || anyhow::Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?);
        read().with_context(|| format!("{}: run make mechanisms first", path.display()))
    }
}

impl Results {
    /// How the names of the machine's plots begin.
    pub fn prefix(&self) -> String {
        let first = self.machine == MACHINES[0].name();
        if first { String::new() } else { format!("{}-", self.machine) }
    }

    /// The figures of a workload or a task in a run, by the run's title, or why there are none. Several runs may share a title.
    pub fn figures(&self, run: &str, name: &str) -> Result<&Figures, &str> {
        let mut reason = NOT_RUN;
        for run in self.runs.iter().filter(|of| of.title() == run) {
            match (run.workloads.get(name).or_else(|| run.guests.get(name)), &run.refused) {
                (Some(Figures { missing: Some(why), .. }), _) | (None, Some(why)) => reason = why,
                (Some(figures), _) => return Ok(figures),
                (None, None) => {}
            }
        }
        Err(reason.lines().next().unwrap_or_default())
    }
}

impl Run {
    /// The module as the lab knows it.
    pub fn module(&self) -> Module {
        if self.module == Module::Stock.name() { Module::Stock } else { Module::Gannet }
    }

    /// The module with its parameters, as page and plots name a run: `gannet npt=0`.
    pub fn title(&self) -> String {
        self.module().with(&self.parameters)
    }
}

impl Figures {
    /// What was not measured, for this reason.
    pub fn without(reason: impl Into<String>) -> Self {
        Self { missing: Some(reason.into()), ..Self::default() }
    }

    /// A figure, or the sum of several: `median`, `instructions`, `host.rdmsr+host.wrmsr`, `statistics.vm.exits`, `figures.rate`, and
    /// `exits.wrmsr` for exits whose reasons begin so. Stray ones count as none; `None` where nothing was counted.
    pub fn get(&self, name: &str) -> Option<f64> {
        let or_none = |count: Option<&f64>| count.copied().unwrap_or(0.0);
        let counted =
            |sum: f64| (!self.host.is_empty()).then_some(if sum < STRAY { 0.0 } else { sum });
        let one = |name: &str| match name.split_once('.').unwrap_or((name, "")) {
            ("host", key) => counted(or_none(self.host.get(key))),
            ("exits", key) => {
                counted(self.exits.iter().filter(|(r, _)| r.starts_with(key)).map(|e| e.1).sum())
            }
            ("statistics", _) if self.statistics.is_empty() => None,
            ("statistics", key) => Some(or_none(self.statistics.get(key))),
            ("figures", key) => self.figures.get(key).copied(),
            (ticks, _) => Some(*self.ticks.get(ticks)? as f64),
        };
        name.split('+').map(one).sum()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::mechanisms::plan::{PAGES, paged};
    use serde_json::{Value, json};

    /// What a machine's runs gave.
    pub fn results(machine: &str, runs: &[Value]) -> Results {
        let results = json!({"machine": machine, "release": "6.12", "runs": runs});
        serde_json::from_value(results).unwrap()
    }

    pub fn run(module: &str, parameters: &str, workloads: Value) -> Value {
        json!({"module": module, "parameters": parameters, "workloads": workloads})
    }

    /// Toggles at every number of pages.
    pub fn toggled(module: &str, toggles: &[&str], figures: impl Fn(u64) -> Value) -> Value {
        let all = toggles.iter().flat_map(|t| PAGES.map(|n| (paged(t, n, 8), figures(n))));
        run(module, "", all.collect())
    }

    #[test]
    fn what_is_missing_says_why() {
        let figures = json!({"min": 1, "median": 2, "max": 3, "iterations": 9,
            "host": {"vmrun": 1.0, "rdmsr": 0.01}});
        let workloads = json!({"cpuid": figures, "timer": {"missing": "no such workload"}});
        let refused = json!({"module": "gannet", "parameters": "npt=0",
            "refused": "gannet: npt=0 is not implemented"});
        let results = results("amd", &[refused, run("gannet", "", workloads)]);
        let reason = |run, name| results.figures(run, name).err().unwrap();
        assert!(reason("gannet npt=0", "cpuid").contains("not implemented"));
        assert_eq!(reason("gannet", "timer"), "no such workload");
        assert_eq!(reason("stock", "timer"), "not run");
        let again = serde_json::to_value(&results).unwrap();
        let again: Results = serde_json::from_value(again).unwrap();
        let cpuid = again.figures("gannet", "cpuid").unwrap();
        let found = ["host.rdmsr", "host.vmrun+median", "statistics.vm.x"].map(|n| cpuid.get(n));
        assert_eq!(found, [Some(0.0), Some(3.0), None]);
    }
}
