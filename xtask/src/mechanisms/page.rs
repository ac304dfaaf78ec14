//! The page `docs/results/mechanisms.md`: `lab/mechanisms.md.in`, rendered for each machine with what was measured on it, the cost model and
//! the published figures alone. The same give the same page.

use super::limits::{Limit, verdict};
use super::plan::{Papers, TOGGLES, engine};
use super::results::{Figures, Results};
use anyhow::Result;
use gannet_lab::classify::{KINDS, Kind};
use minijinja::{context, value::Serde};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The part of a machine, with the page's head before the `first`. Of the words, those of `lab/mechanisms.toml` are the machine's own.
pub fn text(
    papers: &Arc<Papers>,
    results: &Arc<Results>,
    limits: &[Limit<'_>],
    plots: &BTreeMap<String, String>,
    first: bool,
) -> Result<String> {
    let mut engine = engine();
    let (of, on) = (Arc::clone(papers), Arc::clone(results));
    engine.add_function("value", move |figure: &str, name: &str, run: &str| {
        of.model.value(on.figures(run, name).ok()?, figure).map(Vec::from)
    });
    let on = Arc::clone(results);
    engine.add_function("figures", move |name: &str, run: &str| {
        Serde(on.figures(run, name).cloned().unwrap_or_else(Figures::without))
    });
    engine.add_function("verdict", verdict);
    let words = context! {
        first,
        plots => Serde(plots),
        machine => &results.machine,
        release => &results.release,
        runs => Serde(&results.runs),
        prefix => results.prefix(),
        limits => Serde(limits),
        kinds => KINDS.map(Kind::name),
        toggles => TOGGLES,
        model => Serde(&papers.model),
        published => Serde(&papers.published),
        ..Serde(papers.plan.words(&results.machine)?)
    };
    Ok(engine.render_str(papers.template, words)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mechanisms::limits::limits;
    use crate::mechanisms::plan::tests::papers;
    use crate::mechanisms::results::tests::results;
    use gannet_lab::Machine;

    /// The part of a machine of which nothing is known.
    fn nothing(machine: Machine) -> String {
        let (papers, results) = (Arc::new(papers()), Arc::new(results(machine.name(), &[])));
        let limits = limits(&papers, &results);
        let plots = [("cr0_wp.svg".to_owned(), String::new())].into();
        text(&papers, &results, &limits, &plots, false).unwrap()
    }

    #[test]
    fn a_page_without_any_figure_says_so_everywhere() {
        for machine in gannet_lab::MACHINES {
            let text = nothing(machine);
            assert!(text.contains("not available: not run"));
            assert!(text.matches("| not run | not measured |").count() >= 10);
            assert!(!text.contains("| met |") && !text.contains("**not met**"));
        }
        let (amd, intel) = (nothing(Machine::Amd), nothing(Machine::Intel));
        assert!(amd.contains("4600") && amd.contains("46754"), "what was published stays");
        assert!(amd.contains("cr0_wp.svg") && !amd.contains("timer_exits.svg"));
        assert!(intel.contains("11650") && !intel.contains("npt=0") && !intel.contains("Zen"));
        assert!(!intel.contains("cr0_wp.svg"), "a plot of the other machine");
    }

    #[test]
    fn every_row_of_a_table_has_as_many_cells_as_its_head() {
        let mut columns = None;
        for line in gannet_lab::MACHINES.map(nothing).concat().lines() {
            let cells = line.replace("\\|", "").matches('|').count();
            match (line.starts_with('|'), columns) {
                (true, Some(wanted)) => assert_eq!(cells, wanted, "{line}"),
                (true, None) => columns = Some(cells),
                _ => columns = None,
            }
        }
    }
}
