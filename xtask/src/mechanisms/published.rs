//! Published before/after figures, from `lab/published.toml`, and what the cost model predicts for them.

use super::cost::{Cycles, Model};
use anyhow::{Context, Result};
use serde::Deserialize;
use std::path::Path;

/// A figure before a change and after it.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Change {
    pub before: f64,
    pub after: f64,
}

impl Change {
    /// Both in words: small counts with two digits.
    pub fn text(self) -> String {
        let digits = if self.before < 100.0 { 2 } else { 0 };
        format!("{:.digits$} → {:.digits$}", self.before, self.after)
    }

    /// By how much of it the change lowered it: 0.39 for 39 %.
    pub fn saving(self) -> f64 {
        if self.before > 0.0 { 1.0 - self.after / self.before } else { 0.0 }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostState {
    pub source: String,
    pub cpu: String,
    pub before: f64,
    pub after: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoundTrip {
    pub name: String,
    pub cpu: String,
    pub before: f64,
    pub after: f64,
    /// CPUIDs of one pass.
    components: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nested {
    pub source: String,
    pub name: String,
    pub before: [f64; 2],
    pub after: [f64; 2],
    exit: [f64; 2],
    components: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xstate {
    pub source: String,
    passes: f64,
    #[serde(rename = "case")]
    pub cases: Vec<RoundTrip>,
    pub nested: Nested,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LazyDeadline {
    pub source: String,
    pub exits: Change,
    pub msr_write_exits: Change,
    pub deadline_writes: Change,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootCase {
    pub name: String,
    pub before: f64,
    pub after: f64,
    /// The parameters of the runs that stand beside it.
    pub stock: String,
    pub gannet_off: Option<String>,
    pub gannet_on: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Roots {
    pub source: String,
    #[serde(rename = "case")]
    pub cases: Vec<RootCase>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exit {
    pub workload: String,
    pub cycles: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exits {
    pub source: String,
    pub cpu: String,
    pub cases: Vec<Exit>,
}

/// Everything of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    pub host_state: HostState,
    pub xstate: Xstate,
    pub lazy_deadline: LazyDeadline,
    pub roots: Roots,
    pub exits: Exits,
}

impl Published {
    /// Reads the file of a checkout.
    pub fn read(root: &Path) -> Result<Self> {
        let path = root.join("lab/published.toml");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        toml::from_str(&text).context("lab/published.toml")
    }
}

impl Xstate {
    /// What a round trip saves according to the model: the CPUIDs that it no longer executes.
    pub fn predicted(&self, case: &RoundTrip, model: &Model) -> Cycles {
        model.cost("cpuid", &case.cpu) * (case.components * self.passes)
    }

    /// The same where each CPUID is an exit to the hypervisor below.
    pub fn predicted_nested(&self) -> Cycles {
        let [low, high] = self.nested.exit;
        let exit = Cycles { low, taken: f64::midpoint(low, high), high };
        exit * (self.nested.components * self.passes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_in_the_tree_is_read_whole() {
        let root = gannet_lab::Layout::find().unwrap().root;
        let (published, model) = (Published::read(&root).unwrap(), Model::read(&root).unwrap());
        let deadline = published.lazy_deadline.deadline_writes.saving();
        assert!((deadline - 0.975).abs() < 0.001, "{deadline}");
        let skylake = &published.xstate.cases[0];
        let predicted = published.xstate.predicted(skylake, &model);
        assert_eq!(predicted.taken, 14.0 * 318.0);
        assert!(published.exits.cases.iter().all(|case| case.cycles > 0.0));
        assert!(model.cpus.iter().any(|cpu| cpu.key == published.host_state.cpu));
    }
}
