//! What runs, what must come of it, and what was published of the like: `lab/mechanisms.toml` and `lab/published.toml`.

use super::cost::Model;
use super::results::Run;
use anyhow::{Context, Result};
use gannet_lab::Machine;
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

/// What page and limits are made from beside the results, as a checkout has it.
pub struct Papers {
    pub plan: Plan,
    pub model: Model,
    /// Published figures before and after a change.
    pub published: toml::Table,
    /// The page before words and figures are put in.
    pub template: String,
}

impl Papers {
    /// Reads the files of a checkout.
    pub fn read(root: &Path) -> Result<Self> {
        let model: Model = parse(root, "lab/cost-model.toml")?;
        model.check()?;
        Ok(Self {
            plan: parse(root, "lab/mechanisms.toml")?,
            model,
            published: parse(root, "lab/published.toml")?,
            template: text(root, "lab/mechanisms.md.in")?,
        })
    }
}

/// The whole of `lab/mechanisms.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// By machine.
    pub words: BTreeMap<String, BTreeMap<String, String>>,
    parts: BTreeMap<String, Vec<String>>,
    runs: BTreeMap<String, Vec<Run>>,
    #[serde(rename = "limit")]
    pub limits: Vec<Rule>,
    /// Rows of the page's tables.
    pub rows: BTreeMap<String, String>,
}

/// A limit.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    pub what: String,
    /// The machine that it is for; both without.
    pub machine: Option<String>,
    pub kind: Kind,
    /// A workload or a task.
    pub name: String,
    /// A figure of it, by its name ([`Page::value`](super::basis::Page::value)).
    pub figure: String,
    /// The figure of the side with the mechanism, where it is another: the least that what was sampled may be.
    pub low: Option<String>,
    pub off: String,
    pub on: String,
    pub least: Option<f64>,
    pub most: Option<f64>,
}

/// How a limit is judged; `lab/mechanisms.toml` says what each means.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    Value,
    Saving,
    Fewer,
    Less,
    Ratio,
    Stock,
    Cpuid,
    Flat,
    Toggles,
    Each,
    Free,
}

impl Plan {
    /// A word of a machine's.
    pub fn word(&self, on: Machine, name: &str) -> Option<&str> {
        self.words.get(on.name())?.get(name).map(String::as_str)
    }

    /// A machine's runs, with their parts as commands and nothing found yet.
    pub fn runs(&self, on: Machine) -> Result<Vec<Run>> {
        let mut runs = self.runs.get(on.name()).cloned().unwrap_or_default();
        for run in &mut runs {
            for name in std::mem::take(&mut run.parts) {
                for part in
                    self.parts.get(&name).with_context(|| format!("no such part: {name}"))?
                {
                    let filled = fill(part, &mut |word| self.word(on, word).map(str::to_owned));
                    run.parts.push(filled?);
                }
            }
        }
        Ok(runs)
    }
}

fn text(root: &Path, name: &'static str) -> Result<String> {
    std::fs::read_to_string(root.join(name)).context(name)
}

fn parse<T: DeserializeOwned>(root: &Path, name: &'static str) -> Result<T> {
    toml::from_str(&text(root, name)?).context(name)
}

/// Puts what `word` gives in place of each `{name}`.
pub fn fill(text: &str, word: &mut dyn FnMut(&str) -> Option<String>) -> Result<String> {
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
        let plan = Papers::read(&gannet_lab::Layout::find().unwrap().root).unwrap().plan;
        for on in gannet_lab::MACHINES {
            let mut all = Vec::new();
            for Run { module, parameters, parts, .. } in plan.runs(on).unwrap() {
                all.extend(parts.into_iter().map(|p| (module.clone(), parameters.clone(), p)));
            }
            let count = all.len();
            all.sort();
            all.dedup();
            assert!(count > 10 && all.len() == count);
        }
    }

    #[test]
    fn a_word_that_stands_for_nothing_is_refused() {
        let filled = |text| fill(text, &mut |name| (name == "a").then(|| "b".to_owned()));
        assert_eq!(filled("x {a} y").unwrap(), "x b y");
        assert!(filled("{c}").is_err() && filled("{a").is_err());
    }
}
