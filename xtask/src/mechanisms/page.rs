//! The page `docs/results/mechanisms.md`, made from the results, the cost model and the published figures alone: the same three give the
//! same page.

use super::cost::{Cycles, Model};
use super::limits::{self, Verdict};
use super::plots;
use super::published::{Change, Published};
use super::results::{Figures, Results};
use gannet_lab::Machine;
use gannet_lab::classify::KINDS;
use std::fmt::Write;

/// What a machine's part of the page is made from.
pub struct Page<'a> {
    pub results: &'a Results,
    pub model: &'a Model,
    pub published: &'a Published,
    /// Files of plots that there are.
    pub plots: &'a [String],
}

/// A row of a table of one workload: what it is, whose it is, with what parameters.
pub(super) type Side = (&'static str, &'static str, &'static str);

/// What the page says of all machines.
pub fn head(model: &Model) -> String {
    let [measured, derived, ranges] = model.founded;
    format!(
        "# The mechanisms, measured\n\n\
         Written by `make mechanisms` from `mechanisms.json`; not edited by hand. One part for each machine of [the lab](../lab.md).\n\n\
         - **Instructions** are those of host and guest per operation, counted by the time-stamp counter: measured.\n\
         - **Operations** are what the host executed per operation, counted by the emulator's plugin: measured. A guest's own\n  \
           instruction is not among them, and is priced as a plain one.\n\
         - **Modelled cycles** are instructions and operations priced by [the cost model](../../lab/cost-model.toml): {measured} of\n  \
           its entries measured by somebody on real processors, {derived} derived from such, {ranges} ranges. In parentheses the\n  \
           least and the most that its ranges allow. They are no measurement of anything.\n\
         - **Published** figures are other people's, of other machines ([sources](../../lab/published.toml)).\n\n"
    )
}

impl Page<'_> {
    /// All of the machine's part.
    pub fn text(&self) -> String {
        let mut page = String::new();
        self.introduction(&mut page);
        self.limits(&mut page);
        self.host_state(&mut page);
        self.xstate(&mut page);
        self.nested(&mut page);
        self.deadline(&mut page);
        self.roots(&mut page);
        self.whole_exits(&mut page);
        self.remarks(&mut page);
        page
    }

    fn introduction(&self, page: &mut String) {
        let on = self.results.machine();
        let _ = write!(
            page,
            "## Machine `{}`\n\n{}, host kernel {}. ",
            on.name(),
            on.emulator(),
            self.results.release
        );
        *page += match on {
            Machine::Amd => {
                "The emulated processor saves no next RIP and gives no decode assists, so that\n\
                 instructions are read and decoded at each exit, by both modules; a real one of the last ten years does that itself.\n\n"
            }
            Machine::Intel => {
                "The emulated processor tells the length of an instruction\n\
                 that exits, as real ones do. It does some ten million instructions a second: the Linux guest's tasks are shorter here.\n\n"
            }
        };
    }

    fn limits(&self, page: &mut String) {
        let all = limits::limits(self.results, self.model, self.published);
        let rows = all.iter().map(|limit| {
            let verdict = match limit.verdict {
                Verdict::Met => "met",
                Verdict::NotMet => "**not met**",
                Verdict::Open => "not measured",
            };
            vec![limit.what.clone(), limit.found.clone(), verdict.to_owned()]
        });
        *page += "### Limits\n\n";
        table(page, &["limit", "found", ""], rows);
    }

    /// Instructions, operations and modelled cycles of one workload, for each of these sides.
    pub(super) fn sides(&self, page: &mut String, workload: &str, sides: &[Side]) {
        let on = self.results.machine();
        let own: Vec<_> = self.model.cpus.iter().filter(|cpu| cpu.is_of(on)).collect();
        let mut titles =
            vec![workload.to_owned(), "instructions".into(), "operations of the host".into()];
        titles.extend(own.iter().map(|cpu| format!("modelled cycles, {}", cpu.name)));
        let rows = sides.iter().map(|(title, module, parameters)| {
            let mut row = vec![(*title).to_owned()];
            match self.results.figures(module, parameters, workload) {
                Some(figures) => {
                    row.push(figures.median.to_string());
                    row.push(operations(figures));
                    row.extend(own.iter().map(|cpu| priced(self.model.price(figures, &cpu.key))));
                }
                None => {
                    let reason = self.results.reason(module, parameters, workload);
                    row.push(format!("not available: {reason}"));
                    row.resize(titles.len(), String::new());
                }
            }
            row
        });
        let rows: Vec<_> = rows.collect();
        table(page, &titles.iter().map(String::as_str).collect::<Vec<_>>(), rows);
    }

    /// A task of the Linux guest, on each of these sides.
    pub(super) fn tasks(&self, page: &mut String, name: &str, sides: &[Side]) {
        let rows = sides.iter().map(|(title, module, parameters)| {
            let mut row = vec![(*title).to_owned()];
            match self.results.task(module, parameters, name) {
                Some(task) => {
                    row.push(task.instructions.to_string());
                    row.push(task.exits.values().sum::<u64>().to_string());
                    let mut exits: Vec<_> = task.exits.iter().collect();
                    exits.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
                    let most = exits.iter().take(5).map(|(reason, n)| format!("{n} {reason}"));
                    row.push(most.collect::<Vec<_>>().join(", "));
                    let told = task.figures.iter().map(|(name, n)| format!("{name} {n}"));
                    row.push(told.collect::<Vec<_>>().join(", "));
                }
                None => {
                    let reason = self.results.reason(module, parameters, name);
                    row.push(format!("not available: {reason}"));
                    row.resize(5, String::new());
                }
            }
            row
        });
        let rows: Vec<_> = rows.collect();
        table(
            page,
            &[name, "instructions", "exits", "most of them", "the guest's own figures"],
            rows,
        );
    }

    pub(super) fn plot(&self, page: &mut String, name: &str, title: &str) {
        let file = plots::file(self.results.machine(), name);
        if self.plots.contains(&file) {
            let _ = write!(page, "![{title}]({file})\n\n");
        }
    }

    /// The processor whose prices stand alone in a table: the one of the published figures, or Intel's first.
    pub(super) fn one_cpu(&self) -> &str {
        match self.results.machine() {
            Machine::Amd => &self.published.host_state.cpu,
            Machine::Intel => &self.published.exits.cpu,
        }
    }

    fn remarks(&self, page: &mut String) {
        let mut rows = Vec::new();
        for run in &self.results.runs {
            let name = format!("{} {}", run.module, run.parameters);
            let name = name.trim_end();
            for remark in run.refused.iter().chain(&run.remarks) {
                rows.push(vec![
                    name.to_owned(),
                    remark.lines().next().unwrap_or_default().to_owned(),
                ]);
            }
            for (workload, found) in &run.workloads {
                if let super::results::Workload::Missing { missing } = found {
                    let reason = missing.lines().next().unwrap_or_default();
                    rows.push(vec![name.to_owned(), format!("{workload}: {reason}")]);
                }
            }
            for (task, found) in &run.guests {
                if let super::results::Guest::Missing { missing } = found {
                    let reason = missing.lines().next().unwrap_or_default();
                    rows.push(vec![name.to_owned(), format!("{task}: {reason}")]);
                }
            }
        }
        if !rows.is_empty() {
            *page += "### What was not measured\n\n";
            table(page, &["run", "reason"], rows);
        }
    }
}

/// A table with its first line and a blank one after it.
pub(super) fn table(
    page: &mut String,
    titles: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
) {
    let clean = |cell: &str| cell.replace('|', "\\|");
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    *page += &line(titles.iter().map(|title| clean(title)).collect());
    *page += &format!("|{}\n", "---|".repeat(titles.len()));
    for row in rows {
        *page += &line(row.iter().map(|cell| clean(cell)).collect());
    }
    page.push('\n');
}

/// The host's operations, in the order of their kinds.
fn operations(figures: &Figures) -> String {
    let part = |name: &str| {
        let count = figures.host(name).filter(|count| *count > 0.0)?;
        Some(format!("{} {name}", short(count)))
    };
    KINDS.iter().filter_map(|kind| part(kind.name())).collect::<Vec<_>>().join(", ")
}

/// A count per operation: whole where it is one, else with one digit.
pub(super) fn short(count: f64) -> String {
    if (count - count.round()).abs() < 0.05 { format!("{count:.0}") } else { format!("{count:.1}") }
}

pub(super) fn whole(value: f64) -> String {
    format!("{value:.0}")
}

pub(super) fn percent(change: Change) -> String {
    let saving = change.saving() * 100.0;
    if saving >= 0.0 { format!("−{saving:.1} %") } else { format!("+{:.1} %", -saving) }
}

pub(super) fn priced(cycles: Option<Cycles>) -> String {
    cycles.map_or_else(String::new, |c| format!("{:.0} ({:.0}–{:.0})", c.taken, c.low, c.high))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(results: &Results) -> String {
        let root = gannet_lab::Layout::find().unwrap().root;
        let (model, published) = (Model::read(&root).unwrap(), Published::read(&root).unwrap());
        let plots = ["cr0_wp.svg".to_owned()];
        let text = Page { results, model: &model, published: &published, plots: &plots }.text();
        head(&model) + &text
    }

    /// A machine of which nothing is known.
    fn nothing(machine: Machine) -> Results {
        Results { machine: machine.name().into(), ..Results::default() }
    }

    #[test]
    fn a_page_without_any_figure_says_so_everywhere() {
        for machine in gannet_lab::MACHINES {
            let text = page(&nothing(machine));
            assert!(text.contains("not available: not run"));
            assert!(!text.contains("| met |") && !text.contains("**not met**"));
        }
        let text = page(&nothing(Machine::Amd));
        assert!(text.contains("4600") && text.contains("46754"), "what was published stays");
        assert!(text.contains("cr0_wp.svg") && !text.contains("timer_exits.svg"));
        let text = page(&nothing(Machine::Intel));
        assert!(
            text.contains("11650") && !text.contains("npt=0") && !text.contains("Zen"),
            "{text}"
        );
        assert!(!text.contains("cr0_wp.svg"), "a plot of the other machine");
    }

    #[test]
    fn every_row_of_a_table_has_as_many_cells_as_its_head() {
        let text = gannet_lab::MACHINES.map(|machine| page(&nothing(machine))).concat();
        let mut columns = None;
        for line in text.lines() {
            let cells = line.replace("\\|", "").matches('|').count();
            match (line.starts_with('|'), columns) {
                (true, Some(wanted)) => assert_eq!(cells, wanted, "{line}"),
                (true, None) => columns = Some(cells),
                _ => columns = None,
            }
        }
    }
}
