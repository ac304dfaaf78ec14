//! What `make mechanisms` finds, as `docs/results/mechanisms.json` holds it: for each machine one run per module and parameters, each with
//! its workloads and its tasks of Linux guests. Figures of workloads are per operation; nothing here is modelled.

use anyhow::Context;
use gannet_lab::{MACHINES, Machine, Module};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Numbers by name.
pub type Numbers = BTreeMap<String, f64>;

/// Everything that was measured.
#[derive(Serialize, Deserialize)]
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
    /// What the plan has it do: `bench ARGUMENTS` or `guest TASK WORDS`.
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

/// An operation below this is a stray one of the host's timer tick, and none of the exit.
const STRAY: f64 = 0.05;

impl All {
    /// Reads the file that an earlier run wrote.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{}: run make mechanisms first", path.display()))?;
        let all: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is not of make mechanisms", path.display()))?;
        for results in &all.machines {
            results.machine.parse::<Machine>().with_context(|| path.display().to_string())?;
        }
        Ok(all)
    }
}

impl Results {
    /// The machine; what names none counts as the first.
    pub fn machine(&self) -> Machine {
        self.machine.parse().unwrap_or(MACHINES[0])
    }

    /// What there is of a module with these parameters: several runs may have shared them.
    fn runs(&self, module: &str, parameters: &str) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(move |run| run.module == module && run.parameters == parameters)
    }

    /// The figures of a workload or a task.
    pub fn figures(&self, module: &str, parameters: &str, name: &str) -> Option<&Figures> {
        let found = self.runs(module, parameters).find_map(|run| run.named(name));
        found.filter(|figures| figures.missing.is_none())
    }

    /// Why a workload or a task has no figures, in one line.
    pub fn reason<'a>(&'a self, module: &str, parameters: &str, name: &str) -> &'a str {
        let named = |run: &'a Run| match run.named(name) {
            Some(figures) => figures.missing.as_deref(),
            None => run.refused.as_deref(),
        };
        let reason = self.runs(module, parameters).find_map(named);
        reason.and_then(|reason| reason.lines().next()).unwrap_or("not run")
    }
}

impl Run {
    /// The module as the lab knows it.
    pub fn module(&self) -> Module {
        if self.module == Module::Stock.name() { Module::Stock } else { Module::Gannet }
    }

    fn named(&self, name: &str) -> Option<&Figures> {
        self.workloads.get(name).or_else(|| self.guests.get(name))
    }
}

impl Figures {
    /// What was not measured, for this reason.
    pub fn without(reason: String) -> Self {
        Self { missing: Some(reason), ..Self::default() }
    }

    /// A figure, or the sum of several: `median`, `instructions`, `host.rdmsr+host.wrmsr`, `statistics.vm.exits`, `figures.rate`, and
    /// `exits.wrmsr` for exits whose reasons begin so. Stray ones count as none; `None` where nothing was counted.
    pub fn get(&self, name: &str) -> Option<f64> {
        let one = |name: &str| {
            let (part, key) = name.split_once('.').unwrap_or((name, ""));
            let sum = match part {
                "host" => self.host.get(key).copied().unwrap_or(0.0),
                "exits" => self.exits.iter().filter(|(r, _)| r.starts_with(key)).map(|e| e.1).sum(),
                "statistics" if self.statistics.is_empty() => return None,
                "statistics" => return Some(self.statistics.get(key).copied().unwrap_or(0.0)),
                "figures" => return self.figures.get(key).copied(),
                _ => return Some(*self.ticks.get(part)? as f64),
            };
            (!self.host.is_empty()).then_some(if sum < STRAY { 0.0 } else { sum })
        };
        name.split('+').map(one).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_says_why() {
        let text = r#"{"machine":"amd","release":"6.12","runs":[
            {"module":"gannet","parameters":"npt=0","refused":"gannet: npt=0 is not implemented"},
            {"module":"gannet","parameters":"","workloads":{
                "cpuid":{"min":1,"median":2,"max":3,"iterations":9,"host":{"vmrun":1.0,"rdmsr":0.01}},
                "timer":{"missing":"no such workload"}}}]}"#;
        let results: Results = serde_json::from_str(text).unwrap();
        assert!(results.reason("gannet", "npt=0", "cpuid").contains("not implemented"));
        assert_eq!(results.reason("gannet", "", "timer"), "no such workload");
        assert_eq!(results.reason("stock", "", "timer"), "not run");
        let again = serde_json::to_value(&results).unwrap();
        let again: Results = serde_json::from_value(again).unwrap();
        let cpuid = again.figures("gannet", "", "cpuid").unwrap();
        let found = ["host.rdmsr", "host.vmrun+median", "statistics.vm.x"].map(|n| cpuid.get(n));
        assert_eq!(found, [Some(0.0), Some(3.0), None]);
    }
}
