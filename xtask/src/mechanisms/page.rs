//! The page `docs/results/mechanisms.md`: `lab/mechanisms.md.in` with its words and tables put in, made from the results, the cost model and
//! the published figures alone. The same give the same page.

use super::basis::{Change, Page};
use super::cost::{Cycles, cycles};
use super::limits::{self, Limit};
use super::plan::{Papers, fill};
use super::plots;
use anyhow::{Context, Result, bail};
use gannet_lab::classify::KINDS;

/// What the template may ask for of a workload or a task.
const FIGURES: &str =
    "median instructions exits host statistics cycles half operations reasons told";

/// What the page says of all machines: what stands in the template before `@@`.
pub fn head(Papers { template, model, .. }: &Papers) -> Result<String> {
    fill(template.split("@@\n").next().unwrap_or_default(), &mut |kind| model.founded(kind))
}

impl Page<'_> {
    /// All of the machine's part: what stands in the template behind `@@`, lines between `@amd` or `@intel` and the next of the like for
    /// that machine alone.
    pub fn text(&self) -> Result<String> {
        let (mut page, mut here) = (String::new(), true);
        for line in self.papers.template.split("@@\n").nth(1).unwrap_or_default().lines() {
            let filled = |text| fill(text, &mut |words| self.word(words));
            match line.strip_prefix('@').map(|block| block.split_once(' ').unwrap_or((block, ""))) {
                Some(("both", _)) => here = true,
                Some((machine @ ("amd" | "intel"), _)) => here = machine == self.results.machine,
                _ if !here => {}
                Some((name, rest)) => {
                    page += &self.block(name, &filled(rest)?).context(line.to_owned())?;
                }
                None => page += &(filled(line)? + "\n"),
            }
        }
        Ok(page)
    }

    /// What stands in the template as `{words}`: a word, or a function and its arguments. What was not measured leaves nothing.
    fn word(&self, words: &str) -> Option<String> {
        let args: Vec<&str> = words.split(' ').collect();
        let (word, detail) = args[0].split_once('.').unwrap_or((args[0], ""));
        let change = || self.change(args.get(2)?, args.get(1)?, args.get(3)?, "");
        Some(match (word, args.len()) {
            ("release", 1) => self.results.release.clone(),
            // A source, or a figure before and after, or how much less that is.
            ("source", 1) => self.papers.published.get(detail)?.get("source")?.as_str()?.into(),
            ("published", 1) => self.published(detail)?.map(span).join(" → "),
            ("difference" | "saving", 1) => {
                let [before, after] = self.published(detail)?.map(|cycles| cycles[1]);
                let change = Change { before, after };
                if word == "saving" { change.percent() } else { format!("{:.0}", before - after) }
            }
            // So many CPUIDs, at what each costs.
            ("cpuids", 2) => {
                let many: f64 = args[1].parse().ok()?;
                priced(self.papers.model.cost("cpuid", detail).map(|each| each * many))
            }
            // A figure of a workload or a task with a mechanism off and on, or how much less that is.
            ("change", 4) => change().map_or_else(|| "not available".to_owned(), Change::text),
            ("less", 4) => change().map_or_else(String::new, Change::percent),
            (_, 1) => self.papers.plan.word(self.results.machine(), word)?.to_owned(),
            (word, 2..) if FIGURES.split(' ').any(|figure| figure == word) => {
                self.figure(args[0], args[1], args[2], &args[3..].join(" ")).unwrap_or_default()
            }
            _ => return None,
        })
    }

    /// What was measured of a workload or a task, of a module with parameters.
    fn figure(&self, word: &str, name: &str, module: &str, at: &str) -> Option<String> {
        let figures = self.results.figures(module, at, name)?;
        let model = &self.papers.model;
        Some(match word.split_once('.').unwrap_or((word, "")) {
            ("cycles", cpu) => priced(model.price(figures, cpu)?),
            // Of one of a pair.
            ("half", cpu) => priced(model.price(figures, cpu)?.map(|cycles| cycles * 0.5)),
            // The host's, in the order of their kinds.
            ("operations", _) => {
                let count = |name| figures.get(&format!("host.{name}")).filter(|n| *n > 0.0);
                let part = |name| Some(format!("{} {name}", short(count(name)?)));
                KINDS.iter().filter_map(|kind| part(kind.name())).collect::<Vec<_>>().join(", ")
            }
            // Most of a task's exits, and what it told itself.
            ("reasons", _) => {
                let mut exits: Vec<_> = figures.exits.iter().collect();
                exits.sort_by(|(_, one), (_, other)| other.total_cmp(one));
                exits.iter().take(5).map(|(r, n)| format!("{n} {r}")).collect::<Vec<_>>().join(", ")
            }
            ("told", _) => {
                let told = figures.figures.iter().map(|(name, n)| format!("{name} {n}"));
                told.collect::<Vec<_>>().join(", ")
            }
            // Only Gannet counts its page tables; what a module does not count is left empty, not nought.
            ("statistics", table) if module != "gannet" && table.contains("page_table") => {
                return None;
            }
            _ => short(figures.get(word)?),
        })
    }

    /// A published figure before and after, by its place in the file: `xstate.0` is the first case there.
    fn published(&self, place: &str) -> Option<[Cycles; 2]> {
        let (chapter, case) = place.split_once('.')?;
        let cases = self.papers.published.get(chapter)?.get("case")?;
        let case = cases.get(case.parse::<usize>().ok()?)?;
        Some([cycles(case.get("before")?.clone()).ok()?, cycles(case.get("after")?.clone()).ok()?])
    }

    fn block(&self, name: &str, rest: &str) -> Result<String> {
        Ok(match name {
            "limits" => self.limits(),
            "rows" => self.rows(rest)?,
            "plot" => {
                let (plot, title) = rest.split_once("; ").context("a title is wanted")?;
                let file = plots::file(self.results.machine(), plot);
                let there = self.plots.contains(&file);
                if there { format!("![{title}]({file})\n\n") } else { String::new() }
            }
            "remarks" => self.remarks(),
            _ => bail!("no such block"),
        })
    }

    /// `ROW NAME …; TITLE: MODULE PARAMETERS; …`: for each name and each run a row, as `rows` in the plan words it. A run that was not
    /// made says why; a row without any figure is left out.
    fn rows(&self, text: &str) -> Result<String> {
        let mut sides = text.split("; ").map(|side| side.split_once(": ").unwrap_or(("", side)));
        let (_, names) = sides.next().unwrap_or_default();
        let (row, names) = names.split_once(' ').context("a row and names are wanted")?;
        let mut row = self.papers.plan.rows.get(row).context("no such row")?.clone();
        for (word, text) in self.papers.plan.words.get(&self.results.machine).into_iter().flatten()
        {
            row = row.replace(&format!("${word}"), text);
        }
        let (names, sides): (Vec<_>, Vec<_>) = (names.split(' ').collect(), sides.collect());
        let mut rows = String::new();
        for (name, (title, run)) in
            names.iter().flat_map(|name| sides.iter().map(move |s| (name, s)))
        {
            let row = row.replace("$name", name).replace("$run", run).replace("$title", title);
            rows += &self.row(&row, run)?;
        }
        Ok(rows)
    }

    /// One of them, with everything put in but its figures.
    fn row(&self, row: &str, run: &str) -> Result<String> {
        let (module, at) = run.split_once(' ').unwrap_or((run, ""));
        let (head, cells) = row.split_once('{').unwrap_or_default();
        let first = cells.split(' ').nth(1).context("a row without figures")?;
        if self.results.figures(module, at, first).is_none() {
            let reason = escaped(self.results.reason(module, at, first));
            let rest = " | ".repeat(cells.matches(" | ").count());
            return Ok(format!("| {head}not available: {reason}{rest} |\n"));
        }
        let mut found = false;
        let filled = fill(row, &mut |words| {
            let word = self.word(words)?;
            found |= !word.is_empty();
            Some(word)
        })?;
        Ok(if found { format!("| {filled} |\n") } else { String::new() })
    }

    fn limits(&self) -> String {
        let row = |(what, found, met): Limit<'_>| {
            format!("| {what} | {} | {} |\n", escaped(&found), limits::verdict(met))
        };
        limits::limits(self).into_iter().map(row).collect()
    }

    fn remarks(&self) -> String {
        let mut rows = String::new();
        for run in &self.results.runs {
            let name = format!("{} {}", run.module, run.parameters);
            let remarks = run.refused.iter().chain(&run.remarks).cloned();
            let named = run.workloads.iter().chain(&run.guests);
            let missing =
                named.filter_map(|(name, f)| Some(format!("{name}: {}", f.missing.as_ref()?)));
            for remark in remarks.chain(missing) {
                let first = escaped(remark.lines().next().unwrap_or_default());
                rows += &format!("| {} | {first} |\n", name.trim_end());
            }
        }
        let head = "### What was not measured\n\n| run | reason |\n|---|---|\n";
        if rows.is_empty() { rows } else { format!("{head}{rows}\n") }
    }
}

/// A cell's text: a bar within begins no other cell.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

/// A count per operation: whole where it is one, else with one digit.
fn short(count: f64) -> String {
    if (count - count.round()).abs() < 0.05 { format!("{count:.0}") } else { format!("{count:.1}") }
}

/// A figure, or both ends of a range.
fn span([low, taken, high]: Cycles) -> String {
    if low == high { format!("{taken:.0}") } else { format!("{low:.0}…{high:.0}") }
}

fn priced([low, taken, high]: Cycles) -> String {
    format!("{taken:.0} ({low:.0}–{high:.0})")
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::mechanisms::results::{Results, Run};
    use gannet_lab::Machine;

    /// What stands in the tree.
    pub fn papers() -> Papers {
        Papers::read(&gannet_lab::Layout::find().unwrap().root).unwrap()
    }

    pub fn results(machine: Machine, runs: Vec<Run>) -> Results {
        Results { machine: machine.name().into(), release: "6.12".into(), runs }
    }

    /// The part of a machine of which nothing is known.
    fn nothing(machine: Machine) -> String {
        let (papers, results) = (papers(), results(machine, Vec::new()));
        let plots = ["cr0_wp.svg".to_owned()];
        Page { papers: &papers, results: &results, plots: &plots }.text().unwrap()
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
