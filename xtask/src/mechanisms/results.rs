//! What `make mechanisms` finds, as `docs/results/mechanisms.json` holds it: for each machine one run per module and parameters, each with
//! its workloads and Linux guests. Figures are per operation of the workload; nothing here is modelled.

use anyhow::{Context, Result};
use gannet_lab::{MACHINES, Machine};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Everything that was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct All {
    pub machines: Vec<Results>,
}

/// What was measured on one machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Results {
    pub machine: String,
    /// The host kernel's full release.
    pub release: String,
    pub runs: Vec<Run>,
}

/// One machine with one module.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// `stock` or `gannet`.
    pub module: String,
    /// As given at load.
    pub parameters: String,
    /// Why the module did not load, in its own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// What went wrong otherwise: faults in the host's log, counts that do not match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub workloads: BTreeMap<String, Found<Figures>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub guests: BTreeMap<String, Found<Task>>,
}

/// What was measured, or why it was not.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Found<T> {
    Measured(Box<T>),
    Missing { missing: String },
}

impl<T> Found<T> {
    /// The figures.
    pub fn get(&self) -> Option<&T> {
        match self {
            Found::Measured(found) => Some(found),
            Found::Missing { .. } => None,
        }
    }

    /// Why there are none, in one line.
    pub fn missing(&self) -> Option<&str> {
        match self {
            Found::Measured(_) => None,
            Found::Missing { missing } => Some(missing.lines().next().unwrap_or_default()),
        }
    }
}

/// Figures of one operation of a workload of exitbench.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Instructions of host and guest by the time-stamp counter, with the measuring frame.
    pub min: u64,
    pub median: u64,
    pub max: u64,
    pub iterations: u64,
    /// What the host executed, by kind, and `instructions`; from a pass of its own, and empty if that could not be counted.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub host: BTreeMap<String, f64>,
    /// Times that the guest was left, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub exits: BTreeMap<String, f64>,
    /// What the module's own statistics grew by.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub statistics: BTreeMap<String, f64>,
}

/// What a task of the Linux guest took, from its first line to its last.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Task {
    /// Instructions of host and guest, by the time-stamp counter.
    pub instructions: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub host: BTreeMap<String, u64>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub exits: BTreeMap<String, u64>,
    /// Figures that the guest printed itself.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub figures: BTreeMap<String, f64>,
}

/// An operation below this is a stray one of the host's timer tick, and none of the exit.
pub const STRAY: f64 = 0.05;

impl All {
    /// Reads the file that an earlier run wrote.
    pub fn read(path: &Path) -> Result<Self> {
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

    fn run(&self, module: &str, parameters: &str) -> Option<&Run> {
        self.runs.iter().find(|run| run.module == module && run.parameters == parameters)
    }

    /// The figures of a workload.
    pub fn figures(&self, module: &str, parameters: &str, workload: &str) -> Option<&Figures> {
        self.run(module, parameters)?.workloads.get(workload)?.get()
    }

    /// A guest's task.
    pub fn task(&self, module: &str, parameters: &str, task: &str) -> Option<&Task> {
        self.run(module, parameters)?.guests.get(task)?.get()
    }

    /// Exits by reason of a workload, per operation, or of a whole task; `None` when they were not counted.
    pub fn exits(
        &self,
        module: &str,
        parameters: &str,
        name: &str,
    ) -> Option<BTreeMap<String, f64>> {
        let workload = self.figures(module, parameters, name).filter(|f| !f.host.is_empty());
        let task = || self.task(module, parameters, name).filter(|t| !t.exits.is_empty());
        let of_task = |t: &Task| t.exits.iter().map(|(r, n)| (r.clone(), *n as f64)).collect();
        workload.map(|figures| figures.exits.clone()).or_else(|| task().map(of_task))
    }

    /// Why a workload or a guest's task has no figures.
    pub fn reason(&self, module: &str, parameters: &str, name: &str) -> String {
        let not_run = || "not run".to_owned();
        let Some(run) = self.run(module, parameters) else { return not_run() };
        let workload = run.workloads.get(name).and_then(Found::missing);
        let missing = || workload.or_else(|| run.guests.get(name)?.missing()).map(str::to_owned);
        run.refused.clone().or_else(missing).unwrap_or_else(not_run)
    }
}

impl Figures {
    /// How often the guest was left; `None` when nothing was counted.
    pub fn all_exits(&self) -> Option<f64> {
        let sum: f64 = self.exits.values().sum();
        (!self.host.is_empty()).then_some(if sum < STRAY { 0.0 } else { sum })
    }

    /// How often the host executed operations of this kind; stray ones count as none. `None` when nothing was counted.
    pub fn host(&self, kind: &str) -> Option<f64> {
        let count = self.host.get(kind).copied().filter(|count| *count >= STRAY);
        (!self.host.is_empty()).then(|| count.unwrap_or(0.0))
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
        let cpuid = results.figures("gannet", "", "cpuid").unwrap();
        assert_eq!((cpuid.host("rdmsr"), cpuid.host("vmrun")), (Some(0.0), Some(1.0)));
        let again: Results =
            serde_json::from_value(serde_json::to_value(&results).unwrap()).unwrap();
        assert_eq!(again.runs.len(), 2);
    }
}
