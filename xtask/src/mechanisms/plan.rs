//! What runs, what must come of it, and what was published of the like: `lab/mechanisms.toml` and `lab/published.toml`.

use anyhow::{Context, Result};
use gannet_lab::{Machine, Module};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::Path;

/// Numbers of pages that the guest maps for the role toggles.
pub const PAGES: [u64; 5] = [1, 10, 100, 1000, 10_000];

/// The role toggles and the switch of CR3, each at every number of pages.
pub const TOGGLES: [&str; 5] = ["cr0_wp", "cr4_pge", "cr4_smep", "efer_nx", "cr3_switch"];

/// The workload of a toggle at a number of pages, with 8 of them touched.
pub fn paged(toggle: &str, pages: u64) -> String {
    format!("{toggle}[{pages},{}]", pages.min(8))
}

/// The whole of `lab/mechanisms.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    words: BTreeMap<String, BTreeMap<String, String>>,
    parts: BTreeMap<String, Vec<String>>,
    runs: BTreeMap<String, Vec<Queued>>,
    #[serde(rename = "limit")]
    pub limits: Vec<Rule>,
}

/// One run of a machine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Queued {
    pub module: String,
    #[serde(default)]
    pub parameters: String,
    /// As [`Plan::runs`] gives them, with the words put in: `bench ARGUMENTS` or `guest TASK WORDS`.
    pub parts: Vec<String>,
}

/// A limit.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    pub what: String,
    /// The machine that it is for; both without.
    pub machine: Option<String>,
    pub kind: Kind,
    /// A workload or a task.
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub figure: String,
    #[serde(default)]
    pub reasons: String,
    #[serde(default)]
    pub off: String,
    #[serde(default)]
    pub on: String,
    pub least: Option<f64>,
    pub most: Option<f64>,
}

/// What a limit is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// RDMSRs and WRMSRs of the host.
    Msrs,
    /// The part of the modelled cycles that is saved.
    Price,
    /// CPUIDs of the host, anywhere.
    Cpuid,
    /// The part of the exits that is saved, of those whose reasons begin so.
    Exits,
    /// A figure of the guest's own, over the same with the mechanism off.
    Figure,
    /// Of toggles that exit on stock KVM: the greatest cost of any number of pages over the least.
    Flat,
    /// Toggles of a role: the cost over stock KVM's.
    Toggles,
    /// Toggles of a role: page tables allocated and freed.
    Tables,
    /// Exits of the other toggles.
    Free,
    /// Instructions of a task, over stock KVM's.
    Task,
}

impl Plan {
    /// Reads the file of a checkout.
    pub fn read(root: &Path) -> Result<Self> {
        read(root, "lab/mechanisms.toml")
    }

    /// A machine's word.
    pub fn word(&self, on: Machine, name: &str) -> Option<&str> {
        self.words.get(on.name())?.get(name).map(String::as_str)
    }

    /// A machine's runs, with their parts as commands.
    pub fn runs(&self, on: Machine) -> Result<Vec<Queued>> {
        let mut runs = self.runs.get(on.name()).cloned().unwrap_or_default();
        for run in &mut runs {
            let mut parts = Vec::new();
            for name in &run.parts {
                for part in self.parts.get(name).with_context(|| format!("no such part: {name}"))? {
                    parts.push(fill(part, &|word| self.word(on, word).map(str::to_owned))?);
                }
            }
            run.parts = parts;
        }
        Ok(runs)
    }
}

impl Queued {
    /// The module as the lab knows it.
    pub fn module(&self) -> Module {
        if self.module == Module::Stock.name() { Module::Stock } else { Module::Gannet }
    }
}

/// Reads the published before/after figures of a checkout.
pub fn published(root: &Path) -> Result<toml::Table> {
    read(root, "lab/published.toml")
}

fn read<T: DeserializeOwned>(root: &Path, name: &str) -> Result<T> {
    let text = std::fs::read_to_string(root.join(name)).with_context(|| name.to_owned())?;
    toml::from_str(&text).with_context(|| name.to_owned())
}

/// Puts what `word` gives in place of each `{name}`.
pub fn fill(text: &str, word: &dyn Fn(&str) -> Option<String>) -> Result<String> {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('{') {
        let (name, tail) = after.split_once('}').context("a { without its }")?;
        filled += before;
        filled += &word(name).with_context(|| format!("{{{name}}} stands for nothing"))?;
        rest = tail;
    }
    Ok(filled + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_measured_twice_under_the_same_parameters() {
        let plan = Plan::read(&gannet_lab::Layout::find().unwrap().root).unwrap();
        for on in gannet_lab::MACHINES {
            let runs = plan.runs(on).unwrap();
            let parts = runs.iter().flat_map(|run| {
                run.parts.iter().map(move |part| (&run.module, &run.parameters, part))
            });
            let mut all: Vec<_> = parts.collect();
            let count = all.len();
            all.sort();
            all.dedup();
            assert!(count > 10 && all.len() == count);
            assert!(plan.runs.contains_key(on.name()) && plan.words.contains_key(on.name()));
        }
    }

    #[test]
    fn a_word_that_stands_for_nothing_is_refused() {
        let word = |name: &str| (name == "a").then(|| "b".to_owned());
        assert_eq!(fill("x {a} y", &word).unwrap(), "x b y");
        assert!(fill("{c}", &word).is_err() && fill("{a", &word).is_err());
    }
}
