//! What runs, what must come of it, and what was published of the like: `lab/mechanisms.toml` and `lab/published.toml`.

use super::cost::Model;
use super::results::Run;
use anyhow::{Context, Result};
use gannet_lab::Machine;
use minijinja::{
    Environment, UndefinedBehavior, escape_formatter, syntax::SyntaxConfig, value::Serde,
};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Numbers of pages that the guest maps for the role toggles.
pub const PAGES: [u64; 5] = [1, 10, 100, 1000, 10_000];

/// The role toggles and the switch of CR3, each at every number of pages.
pub const TOGGLES: [&str; 5] = ["cr0_wp", "cr4_pge", "cr4_smep", "efer_nx", "cr3_switch"];

/// The workload of a toggle at a number of pages, of which at most so many are touched.
pub fn paged(toggle: &str, pages: u64, touched: u64) -> String {
    format!("{toggle}[{pages},{}]", pages.min(touched))
}

/// What page and limits are made from beside the results, as a checkout has it.
pub struct Papers {
    pub plan: Plan,
    pub model: Model,
    /// Published figures before and after a change.
    pub published: toml::Table,
    /// The page, before it is rendered.
    pub template: &'static str,
}

impl Papers {
    /// Reads the files.
    pub fn read() -> Result<Self> {
        let papers = Self {
            plan: toml::from_str(include_str!("../../../lab/mechanisms.toml"))?,
            model: toml::from_str(include_str!("../../../lab/cost-model.toml"))?,
            published: toml::from_str(include_str!("../../../lab/published.toml"))?,
            template: include_str!("../../../lab/mechanisms.md.in"),
        };
        papers.model.check()?;
        Ok(papers)
    }
}

/// The whole of `lab/mechanisms.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The command of a machine.
    pub script: String,
    /// By machine.
    words: BTreeMap<String, BTreeMap<String, String>>,
    parts: BTreeMap<String, Vec<String>>,
    runs: BTreeMap<String, Vec<Run>>,
    /// How each kind of limit is judged: a template that sets `value` and gives what was found in words.
    pub kinds: BTreeMap<String, String>,
    #[serde(rename = "limit")]
    pub limits: Vec<Rule>,
}

/// A limit.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    pub what: String,
    /// The machine that it is for; both without.
    pub machine: Option<String>,
    /// One of the plan's kinds, or `cpuid`.
    pub kind: String,
    /// A workload or a task; all toggles of a role without.
    pub name: String,
    /// Of the toggles those that stock KVM is not left for, in place of those that it is.
    pub free: bool,
    /// A figure by its name ([`Model::value`]).
    pub figure: String,
    /// The figure of the side with the mechanism, where it is another: the least that what was sampled may be.
    pub low: String,
    pub off: String,
    pub on: String,
    pub least: Option<f64>,
    pub most: Option<f64>,
}

impl Plan {
    /// A machine's words.
    pub fn words(&self, on: &str) -> Result<&BTreeMap<String, String>> {
        self.words.get(on).with_context(|| format!("no words for {on}"))
    }

    /// A machine's runs, with their parts as commands and nothing found yet.
    pub fn runs(&self, on: Machine) -> Result<Vec<Run>> {
        let (engine, words) = (engine(), self.words(on.name())?);
        let mut runs = self.runs.get(on.name()).cloned().unwrap_or_default();
        for run in &mut runs {
            let named = |name| self.parts.get(name).with_context(|| format!("no part {name}"));
            let parts = run.parts.iter().map(named).collect::<Result<Vec<_>>>()?;
            let fill = |part: &String| engine.render_str(part, Serde(words));
            run.parts = parts.into_iter().flatten().map(fill).collect::<Result<_, _>>()?;
        }
        Ok(runs)
    }
}

/// The language of the templates. A word that stands for nothing is an error, and a number is written as Rust does.
pub fn engine() -> Environment<'static> {
    let mut engine = Environment::new();
    engine.set_undefined_behavior(UndefinedBehavior::Strict);
    engine.set_syntax(SyntaxConfig::builder().trim_blocks(true).build().unwrap_or_default());
    engine.set_formatter(|out, state, value| match f64::try_from(value.clone()) {
        Ok(number) => Ok(write!(out, "{number}")?),
        Err(_) => escape_formatter(out, state, value),
    });
    engine.add_function("change", |before: f64, after: f64| {
        let digits = if before < 100.0 { 2 } else { 0 };
        format!("{before:.digits$} → {after:.digits$}")
    });
    engine
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// What stands in the tree.
    pub fn papers() -> Papers {
        Papers::read().unwrap()
    }

    #[test]
    fn nothing_is_measured_twice_under_the_same_parameters() {
        let plan = papers().plan;
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
        let words = BTreeMap::from([("a".to_owned(), "b".to_owned())]);
        let filled = |text| engine().render_str(text, Serde(&words));
        assert_eq!(filled("x {{ a }} y").unwrap(), "x b y");
        assert!(filled("{{ c }}").is_err() && filled("{{ a").is_err());
    }
}
