//! The page `docs/results/mechanisms.md`: `lab/mechanisms.md.in` with its words and tables put in, made from the results, the cost model and
//! the published figures alone. The same give the same page.

use super::basis::{Change, Page};
use super::cost::{Cycles, Model};
use super::limits::{self, Verdict};
use super::plan::{PAGES, TOGGLES, fill, paged};
use super::plots;
use super::results::{Figures, Found};
use anyhow::{Context, Result, bail};
use gannet_lab::classify::KINDS;
use std::cmp::Reverse;

/// A row of a table: what it is, whose it is, with what parameters.
struct Side<'a> {
    title: &'a str,
    module: &'a str,
    parameters: &'a str,
}

/// A directive's first words, and the sides behind it: `WORDS; TITLE: MODULE PARAMETERS; …`.
fn sides(text: &str) -> Result<(&str, Vec<Side<'_>>)> {
    let (first, rest) = text.split_once("; ").context("sides are wanted")?;
    let side = |text| {
        let (title, run) = str::split_once(text, ": ").context("a side without its run")?;
        let (module, parameters) = run.split_once(' ').unwrap_or((run, ""));
        Ok(Side { title, module, parameters })
    };
    Ok((first, rest.split("; ").map(side).collect::<Result<_>>()?))
}

/// What the page says of all machines: what stands in the template before `@@`.
pub fn head(template: &str, model: &Model) -> Result<String> {
    let founded = |name: &str| {
        let at = ["measured", "derived", "ranges"].iter().position(|known| *known == name)?;
        Some(model.founded[at].to_string())
    };
    fill(template.split("@@\n").next().unwrap_or_default(), &founded)
}

impl<'a> Page<'a> {
    /// All of the machine's part: what stands in the template behind `@@`, lines between `@amd` or `@intel` and the next of the like for
    /// that machine alone.
    pub fn text(&self, template: &str) -> Result<String> {
        let (mut page, mut here) = (String::new(), true);
        for line in template.split("@@\n").nth(1).unwrap_or_default().lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word.strip_prefix('@') {
                Some("both") => here = true,
                Some(machine @ ("amd" | "intel")) => here = machine == self.on().name(),
                _ if !here => {}
                Some(name) => page += &self.table(name, rest).context(line.to_owned())?,
                None => {
                    page += &fill(line, &|name| self.word(name))?;
                    page.push('\n');
                }
            }
        }
        Ok(page)
    }

    /// What stands in the template as `{words}`: a word, or a function and its arguments. What was not measured leaves nothing.
    fn word(&self, words: &str) -> Option<String> {
        let args: Vec<&str> = words.split(' ').collect();
        let published = || self.published(args.get(1)?);
        Some(match *args.first()? {
            "release" => self.results.release.clone(),
            "cpu" => self.model.name(self.cpu()).to_owned(),
            // A source, or a figure before and after, or how much less that is.
            "source" => self.published.get(args[1])?.get("source")?.as_str()?.to_owned(),
            "published" => {
                let [before, after] = published()?;
                format!("{} → {}", span(before), span(after))
            }
            "difference" => {
                let [before, after] = published()?;
                whole(before.taken - after.taken)
            }
            "saving" => {
                let [before, after] = published()?;
                Change { before: before.taken, after: after.taken }.percent()
            }
            // So many CPUIDs on a processor, or each at so many cycles.
            "cpuids" => {
                priced(Some(self.model.cost("cpuid", args.get(2)?) * args[1].parse().ok()?))
            }
            // Cycles on a processor of a workload, of a module with parameters; or half of them, where it is a pair.
            "price" | "half" => {
                let by = if args[0] == "half" { 0.5 } else { 1.0 };
                priced(
                    self.price(args.get(2)?, args.get(3)?, &args[4..].join(" "), args[1])
                        .map(|c| c * by),
                )
            }
            // How much less that is with a mechanism on.
            "cheaper" => {
                let price = |off| Some(self.price(args[2], "gannet", off, args[1])?.taken);
                let change = price(args.get(3)?).zip(price(""));
                change
                    .map_or_else(String::new, |(before, after)| Change { before, after }.percent())
            }
            // Exits of a workload or a task with a mechanism off and on, for reasons that begin so.
            "exits" | "fewer" => {
                let change = self.exits(args.get(1)?, args.get(2)?, args.get(3).unwrap_or(&""));
                match args[0] {
                    "exits" => change.map_or_else(|| "not available".to_owned(), Change::text),
                    _ => change.map_or_else(String::new, Change::percent),
                }
            }
            word => self.plan.word(self.on(), word)?.to_owned(),
        })
    }

    /// A published figure before and after, by its place in the file: `xstate.0` is the first case there.
    fn published(&self, place: &str) -> Option<[Cycles; 2]> {
        let (chapter, case) = place.split_once('.')?;
        let case = self.published.get(chapter)?.get("case")?.get(case.parse::<usize>().ok()?)?;
        let cycles = |name| case.get(name)?.clone().try_into().ok();
        Some([cycles("before")?, cycles("after")?])
    }

    fn table(&self, name: &str, rest: &str) -> Result<String> {
        Ok(match name {
            "limits" => self.limits(),
            "sides" => self.sides(sides(rest)?),
            "tasks" => self.tasks(sides(rest)?),
            "toggles" => {
                let (paging, sides) = sides(rest)?;
                [
                    self.growth(paging, &sides),
                    self.moved(paging, &sides),
                    self.modelled(paging, &sides),
                ]
                .concat()
            }
            "plot" => {
                let (plot, title) = rest.split_once("; ").context("a title is wanted")?;
                let file = plots::file(self.on(), plot);
                let there = self.plots.contains(&file);
                if there { format!("![{title}]({file})\n\n") } else { String::new() }
            }
            "remarks" => self.remarks(),
            _ => bail!("no such table"),
        })
    }

    fn limits(&self) -> String {
        let rows = limits::limits(self).into_iter().map(|(what, found, verdict)| {
            let verdict = match verdict {
                Verdict::Met => "met",
                Verdict::NotMet => "**not met**",
                Verdict::Open => "not measured",
            };
            vec![what, found, verdict.to_owned()]
        });
        table(["limit", "found", ""], rows)
    }

    /// A row for a side: its cells, or why there are none.
    fn row(&self, side: &Side<'_>, name: &str, cells: Option<Vec<String>>) -> Vec<String> {
        let reason = || self.results.reason(side.module, side.parameters, name);
        let cells = cells.unwrap_or_else(|| vec![format!("not available: {}", reason())]);
        [vec![side.title.to_owned()], cells].concat()
    }

    /// Instructions, operations and modelled cycles of one workload.
    fn sides(&self, (workload, sides): (&str, Vec<Side<'_>>)) -> String {
        let own: Vec<_> = self.model.cpus.iter().filter(|cpu| cpu.is_of(self.on())).collect();
        let mut titles = vec![workload.to_owned()];
        titles.extend(["instructions", "operations of the host"].map(str::to_owned));
        titles.extend(own.iter().map(|cpu| format!("modelled cycles, {}", cpu.name)));
        let rows = sides.iter().map(|side| {
            let figures = self.results.figures(side.module, side.parameters, workload);
            let cells = figures.map(|figures| {
                let prices = own.iter().map(|cpu| priced(self.model.price(figures, &cpu.key)));
                [figures.median.to_string(), operations(figures)]
                    .into_iter()
                    .chain(prices)
                    .collect()
            });
            self.row(side, workload, cells)
        });
        table(titles, rows)
    }

    /// A task of the Linux guest.
    fn tasks(&self, (name, sides): (&str, Vec<Side<'_>>)) -> String {
        let rows = sides.iter().map(|side| {
            let task = self.results.task(side.module, side.parameters, name);
            let cells = task.map(|task| {
                let mut exits: Vec<_> = task.exits.iter().collect();
                exits.sort_by_key(|(_, count)| Reverse(**count));
                let most: Vec<_> = exits.iter().take(5).map(|(r, n)| format!("{n} {r}")).collect();
                let told: Vec<_> =
                    task.figures.iter().map(|(name, n)| format!("{name} {n}")).collect();
                let all = task.exits.values().sum::<u64>();
                vec![
                    task.instructions.to_string(),
                    all.to_string(),
                    most.join(", "),
                    told.join(", "),
                ]
            });
            self.row(side, name, cells)
        });
        table([name, "instructions", "exits", "most of them", "the guest's own figures"], rows)
    }

    /// Modelled cycles of every toggle, at the least and the most pages.
    fn modelled(&self, paging: &str, sides: &[Side<'_>]) -> String {
        let rows = TOGGLES.iter().map(|toggle| {
            let price = |side: &Side<'_>, n| {
                let pair = self.price(&paged(toggle, n), side.module, side.parameters, self.cpu());
                priced(pair.map(|pair| pair * 0.5))
            };
            let cells = sides.iter().flat_map(|side| [1, 10_000].map(|n| price(side, n)));
            [(*toggle).to_owned()].into_iter().chain(cells).collect()
        });
        let titles =
            sides.iter().flat_map(|s| [format!("{}, 1 page", s.title), "10000 pages".into()]);
        let table = table(["toggle".to_owned()].into_iter().chain(titles), rows);
        let cpu = self.model.name(self.cpu());
        format!("Modelled cycles per toggle (half a pair), {cpu}, {paging}:\n\n{table}")
    }

    /// Instructions per pair as the tables grow, for each toggle and side, few pages and all.
    fn growth(&self, paging: &str, sides: &[Side<'_>]) -> String {
        let dear = self.plan.word(self.on(), "toggle").unwrap_or_default();
        let few = TOGGLES.iter().map(|toggle| (*toggle, "8"));
        let rows = few.chain([(dear, "all")]).flat_map(|(toggle, touched)| {
            let name = move |n| {
                if touched == "8" { paged(toggle, n) } else { format!("{toggle}[{n},{n}]") }
            };
            sides.iter().map(move |side| {
                let median =
                    |n| Some(self.results.figures(side.module, side.parameters, &name(n))?.median);
                let cells = PAGES.map(|n| median(n).map_or_else(String::new, |m| m.to_string()));
                let cells = Some(cells.to_vec()).filter(|c| c.iter().any(|cell| !cell.is_empty()));
                [vec![toggle.into(), touched.into()], self.row(side, &name(1), cells)].concat()
            })
        });
        let pages = PAGES.map(|n| format!("{n} page{}", if n == 1 { "" } else { "s" }));
        let titles = ["toggle", "touched", ""].map(str::to_owned).into_iter().chain(pages);
        format!("Instructions per pair, {paging}:\n\n{}", table(titles, rows))
    }

    /// What became of page tables at 10,000 pages, by the modules' own statistics.
    fn moved(&self, paging: &str, sides: &[Side<'_>]) -> String {
        const NAMES: [(&str, &str); 7] = [
            ("vm.page_tables_allocated", "tables allocated"),
            ("vm.page_tables_freed", "tables freed"),
            ("vm.mmu_cache_miss", "mmu_cache_miss"),
            ("vm.mmu_shadow_zapped", "mmu_shadow_zapped"),
            ("vcpu.pf_fixed", "pf_fixed"),
            ("vcpu.tlb_flush", "tlb_flush"),
            ("vcpu.exits", "exits"),
        ];
        let mut rows = Vec::new();
        for (toggle, side) in TOGGLES.iter().flat_map(|t| sides.iter().map(move |side| (t, side))) {
            let figures =
                self.results.figures(side.module, side.parameters, &paged(toggle, 10_000));
            // A guest that is never left moves nothing.
            let Some(figures) = figures.filter(|f| !f.statistics.is_empty()) else { continue };
            // Only Gannet counts its page tables; what a module does not count is left empty, not nought.
            let told = |name: &str| side.module == "gannet" || !name.starts_with("vm.page_tables");
            let count = |name: &str| short(figures.statistics.get(name).copied().unwrap_or(0.0));
            let cells = NAMES.map(|(name, _)| if told(name) { count(name) } else { String::new() });
            rows.push([&[(*toggle).to_owned(), side.title.to_owned()], &cells[..]].concat());
        }
        let titles = ["toggle", ""].into_iter().chain(NAMES.map(|(_, title)| title));
        let source = "by the modules' own statistics (empty: the module does not tell)";
        format!("Per pair with 10,000 pages, {paging}, {source}:\n\n{}", table(titles, rows))
    }

    fn remarks(&self) -> String {
        let mut rows = Vec::new();
        for run in &self.results.runs {
            fn missing<T>((name, found): (&String, &Found<T>)) -> Option<String> {
                Some(format!("{name}: {}", found.missing()?))
            }
            let name = format!("{} {}", run.module, run.parameters).trim_end().to_owned();
            let first = |remark: &String| remark.lines().next().unwrap_or_default().to_owned();
            let remarks = run.refused.iter().chain(&run.remarks).map(first);
            let all = remarks.chain(run.workloads.iter().filter_map(missing));
            let all = all.chain(run.guests.iter().filter_map(missing));
            rows.extend(all.map(|remark| vec![name.clone(), remark]));
        }
        let head = "### What was not measured\n\n";
        if rows.is_empty() {
            String::new()
        } else {
            head.to_owned() + &table(["run", "reason"], rows)
        }
    }
}

/// A table with a blank line after it. Rows that are too short are filled up.
fn table<T: Into<String>>(
    titles: impl IntoIterator<Item = T>,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | ").replace("\u{0}", "\\|"));
    let clean = |cells: Vec<String>| cells.into_iter().map(|cell| cell.replace('|', "\u{0}"));
    let titles: Vec<String> = clean(titles.into_iter().map(Into::into).collect()).collect();
    let mut text = format!("{}|{}\n", line(&titles), "---|".repeat(titles.len()));
    for row in rows {
        let mut row: Vec<String> = clean(row).collect();
        row.resize(titles.len(), String::new());
        text += &line(&row);
    }
    text + "\n"
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
fn short(count: f64) -> String {
    if (count - count.round()).abs() < 0.05 { format!("{count:.0}") } else { format!("{count:.1}") }
}

fn whole(value: f64) -> String {
    format!("{value:.0}")
}

/// A figure, or both ends of a range.
fn span(c: Cycles) -> String {
    if c.low == c.high { whole(c.taken) } else { format!("{:.0}…{:.0}", c.low, c.high) }
}

fn priced(cycles: Option<Cycles>) -> String {
    cycles.map_or_else(String::new, |c| format!("{:.0} ({:.0}–{:.0})", c.taken, c.low, c.high))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::mechanisms::plan::Plan;
    use crate::mechanisms::results::Results;
    use crate::mechanisms::{plan, results::Run, template};
    use gannet_lab::Machine;

    /// What stands in the tree.
    pub struct Papers {
        plan: Plan,
        model: Model,
        published: toml::Table,
        plots: Vec<String>,
    }

    impl Papers {
        pub fn read() -> Self {
            let root = gannet_lab::Layout::find().unwrap().root;
            Self {
                plan: Plan::read(&root).unwrap(),
                model: Model::read(&root).unwrap(),
                published: plan::published(&root).unwrap(),
                plots: vec!["cr0_wp.svg".to_owned()],
            }
        }

        pub fn page<'a>(&'a self, results: &'a Results) -> Page<'a> {
            let Self { plan, model, published, plots } = self;
            Page { plan, results, model, published, plots }
        }
    }

    pub fn results(machine: Machine, runs: Vec<Run>) -> Results {
        Results { machine: machine.name().into(), release: "6.12".into(), runs }
    }

    /// The part of a machine of which nothing is known.
    fn nothing(machine: Machine) -> String {
        let template = template(&gannet_lab::Layout::find().unwrap().root).unwrap();
        let papers = Papers::read();
        papers.page(&results(machine, Vec::new())).text(&template).unwrap()
    }

    #[test]
    fn a_page_without_any_figure_says_so_everywhere() {
        for machine in gannet_lab::MACHINES {
            let text = nothing(machine);
            assert!(text.contains("not available: not run"));
            assert!(!text.contains("| met |") && !text.contains("**not met**"));
        }
        let text = nothing(Machine::Amd);
        assert!(text.contains("4600") && text.contains("46754"), "what was published stays");
        assert!(text.contains("cr0_wp.svg") && !text.contains("timer_exits.svg"));
        let text = nothing(Machine::Intel);
        assert!(
            text.contains("11650") && !text.contains("npt=0") && !text.contains("Zen"),
            "{text}"
        );
        assert!(!text.contains("cr0_wp.svg"), "a plot of the other machine");
    }

    #[test]
    fn every_row_of_a_table_has_as_many_cells_as_its_head() {
        let text = gannet_lab::MACHINES.map(nothing).concat();
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

    #[test]
    fn a_bar_within_a_cell_begins_no_other_cell() {
        let text = table(["a|b", ""], [vec!["c|".to_owned()]]);
        assert_eq!(text, "| a\\|b |  |\n|---|---|\n| c\\| |  |\n\n");
    }
}
