//! The page `docs/results/mechanisms.md`, made from the results, the cost model and the published figures alone: the same three give the
//! same page.

use super::cost::{Cycles, Model};
use super::limits::{self, Verdict, paged};
use super::machines::{FORKS, PAGES, PINGPONG, TIMER, TOGGLES};
use super::published::{Change, Published};
use super::results::{Figures, Results};
use gannet_lab::classify::KINDS;
use std::fmt::Write;

/// What a page is made from.
pub struct Page<'a> {
    pub results: &'a Results,
    pub model: &'a Model,
    pub published: &'a Published,
    /// Files of plots that there are.
    pub plots: Vec<&'static str>,
}

/// A row of a table of one workload: what it is, whose it is, with what parameters.
type Side = (&'static str, &'static str, &'static str);

impl Page<'_> {
    /// The whole page.
    pub fn text(&self) -> String {
        let mut page = String::new();
        self.head(&mut page);
        self.limits(&mut page);
        self.host_state(&mut page);
        self.xstate(&mut page);
        page += "## 3. Nested VMX: vmcs02 prepared from what changed\n\n\
                 For a machine with VT-x: the lab's machine has SVM, so there is nothing to measure here.\n\n";
        self.deadline(&mut page);
        self.roots(&mut page);
        self.whole_exits(&mut page);
        self.remarks(&mut page);
        page.truncate(page.trim_end().len());
        page + "\n"
    }

    fn head(&self, page: &mut String) {
        let [measured, derived, ranges] = self.model.founded;
        let _ = write!(
            page,
            "# The mechanisms, measured\n\n\
             Written by `make mechanisms` from `mechanisms.json`; not edited by hand. Machine `{}` ([the lab](../lab.md)): QEMU's\n\
             software emulator, host kernel {}.\n\n\
             - **Instructions** are those of host and guest per operation, counted by the time-stamp counter: measured.\n\
             - **Operations** are what the host executed per operation, counted by the emulator's plugin: measured. A guest's own\n  \
               instruction is not among them.\n\
             - **Modelled cycles** are instructions and operations priced by [the cost model](../../lab/cost-model.toml): {measured} of\n  \
               its entries measured by somebody on real processors, {derived} derived from such, {ranges} ranges. In parentheses the\n  \
               least and the most that its ranges allow. They are no measurement of anything.\n\
             - **Published** figures are other people's, of other machines ([sources](../../lab/published.toml)).\n\n\
             The emulated processor saves no next RIP and gives no decode assists, so that instructions are read and decoded at each\n\
             exit, by both modules; a real one of the last ten years does that itself.\n\n",
            self.results.machine, self.results.release
        );
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
        *page += "## Limits\n\n";
        table(page, &["limit", "found", ""], rows);
    }

    /// Instructions, operations and modelled cycles of one workload, for each of these sides.
    fn sides(&self, page: &mut String, workload: &str, sides: &[Side]) {
        let zens: Vec<_> =
            self.model.cpus.iter().filter(|cpu| cpu.key.starts_with("zen")).collect();
        let mut titles =
            vec![workload.to_owned(), "instructions".into(), "operations of the host".into()];
        titles.extend(zens.iter().map(|cpu| format!("modelled cycles, {}", cpu.name)));
        let rows = sides.iter().map(|(title, module, parameters)| {
            let mut row = vec![(*title).to_owned()];
            match self.results.figures(module, parameters, workload) {
                Some(figures) => {
                    row.push(figures.median.to_string());
                    row.push(operations(figures));
                    row.extend(zens.iter().map(|cpu| priced(self.model.price(figures, &cpu.key))));
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

    fn host_state(&self, page: &mut String) {
        let published = &self.published.host_state;
        let wanted = Change { before: published.before, after: published.after };
        let _ = write!(
            page,
            "## 1. Host state by VMSAVE and VMLOAD\n\n\
             Switch `host_state=vmsave|msr`, workload `hlt_loop`.\n\n\
             Published: {:.0} → {:.0} cycles (−{:.0} %). {}.\n\n",
            wanted.before,
            wanted.after,
            wanted.saving() * 100.0,
            published.source
        );
        let sides = [
            ("stock KVM", "stock", ""),
            ("Gannet, `host_state=msr`", "gannet", "host_state=msr"),
            ("Gannet, `host_state=vmsave`", "gannet", ""),
        ];
        self.sides(page, "hlt_loop", &sides);
        let price = |side: &Side| {
            self.model.price(self.results.figures(side.1, side.2, "hlt_loop")?, &published.cpu)
        };
        let mut rows = vec![vec![
            "published, measured".to_owned(),
            whole(wanted.before),
            whole(wanted.after),
            percent(wanted),
        ]];
        if let (Some(off), Some(on)) = (price(&sides[1]), price(&sides[2])) {
            let change = Change { before: off.taken, after: on.taken };
            rows.push(vec![
                "Gannet, modelled".into(),
                priced(Some(off)),
                priced(Some(on)),
                percent(change),
            ]);
        }
        if let Some(stock) = price(&sides[0]) {
            rows.push(vec![
                "stock KVM, which has the change, modelled".into(),
                String::new(),
                priced(Some(stock)),
                String::new(),
            ]);
        }
        let _ = write!(
            page,
            "The model beside the published figures, {}:\n\n",
            self.model.name(&published.cpu)
        );
        table(page, &["cycles per iteration", "before", "after", ""], rows);
    }

    fn xstate(&self, page: &mut String) {
        let published = &self.published.xstate;
        let _ = write!(
            page,
            "## 2. The XSTATE layout read once\n\n\
             Switch `xstate_cache=1|0`, workloads `cpuid`, `xsetbv`, `cr4_osxsave`. A nested `cpuid` needs nested SVM, which Gannet does\n\
             not offer.\n\n"
        );
        for workload in ["cpuid", "xsetbv", "cr4_osxsave"] {
            let sides = [
                ("stock KVM", "stock", ""),
                ("Gannet, `xstate_cache=0`", "gannet", "xstate_cache=0"),
                ("Gannet, `xstate_cache=1`", "gannet", ""),
            ];
            self.sides(page, workload, &sides);
        }
        let _ = write!(
            page,
            "Published: {}. The model's prediction is the price of the CPUIDs that a round trip no longer\n\
             executes, and nothing else.\n\n",
            published.source
        );
        let mut rows: Vec<Vec<String>> = Vec::new();
        for case in &published.cases {
            let predicted = published.predicted(case, self.model);
            rows.push(vec![
                case.name.clone(),
                format!("{:.0} → {:.0}", case.before, case.after),
                whole(case.before - case.after),
                priced(Some(predicted)),
            ]);
        }
        let nested = &published.nested;
        let [before, after] =
            [nested.before, nested.after].map(|[low, high]| f64::midpoint(low, high));
        rows.push(vec![
            nested.name.clone(),
            format!(
                "{:.0}…{:.0} → {:.0}…{:.0}",
                nested.before[0], nested.before[1], nested.after[0], nested.after[1]
            ),
            whole(before - after),
            priced(Some(published.predicted_nested())),
        ]);
        table(
            page,
            &[
                "round trip, cycles",
                "published before → after",
                "saved",
                "saving predicted by the model",
            ],
            rows,
        );
        let _ = write!(page, "The last row: {}.\n\n", nested.source);
    }

    fn deadline(&self, page: &mut String) {
        let published = &self.published.lazy_deadline;
        let _ = write!(
            page,
            "## 4. Lazy TSC deadline\n\n\
             Switch `lazy_tscdeadline=1|0`, workload `{TIMER}` and the Linux guest's task `{PINGPONG}`. Published: {}.\n\n",
            published.source
        );
        let measured = |change: Option<Change>| match change {
            Some(change) => {
                let text = format!("{:.2} → {:.2}", change.before, change.after);
                [text, percent(change)]
            }
            None => ["not available".to_owned(), String::new()],
        };
        let count = |change: Change| {
            [format!("{:.0} → {:.0}", change.before, change.after), percent(change)]
        };
        let mut rows = Vec::new();
        for (name, theirs, reason) in [
            ("exits", published.exits, ""),
            ("MSR-write exits", published.msr_write_exits, "wrmsr"),
            ("TSC-deadline writes", published.deadline_writes, "wrmsr_tsc_deadline"),
        ] {
            let mut row = vec![name.to_owned()];
            row.extend(count(theirs));
            row.extend(measured(limits::deadline_exits(self.results, reason)));
            row.extend(measured(limits::pingpong_exits(self.results, reason)));
            rows.push(row);
        }
        let rearm = format!("{TIMER}, per operation");
        table(page, &["", "published", "", &rearm, "", PINGPONG, ""], rows);
        let sides = [
            ("stock KVM", "stock", ""),
            ("Gannet, `lazy_tscdeadline=0`", "gannet", "lazy_tscdeadline=0"),
            ("Gannet, `lazy_tscdeadline=1`", "gannet", ""),
        ];
        self.sides(page, TIMER, &sides);
        self.tasks(page, PINGPONG, &sides);
        self.plot(page, "timer_exits.svg", "Exits by reason of the timer workloads");
    }

    /// A task of the Linux guest, on each of these sides.
    fn tasks(&self, page: &mut String, name: &str, sides: &[Side]) {
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

    fn roots(&self, page: &mut String) {
        let published = &self.published.roots;
        let _ = write!(
            page,
            "## 5. Roots kept across role changes\n\n\
             Switch `keep_roots=1|0`, with nested paging and without (`npt=0`). One operation is a pair of switches; after each of the two\n\
             the guest writes to 8 of its pages, or to all.\n\n\
             Published: {}.\n\n",
            published.source
        );
        let rows = published.cases.iter().map(|case| {
            let change = Change { before: case.before, after: case.after };
            vec![case.name.clone(), whole(case.before), whole(case.after), percent(change)]
        });
        table(page, &["published, cycles per toggle", "before", "after", ""], rows);
        for (paging, npt, off) in [
            ("nested paging", "", "keep_roots=0"),
            ("shadow paging", "npt=0", "npt=0 keep_roots=0"),
        ] {
            let sides = [
                ("stock KVM", "stock", npt),
                ("Gannet, `keep_roots=0`", "gannet", off),
                ("Gannet, `keep_roots=1`", "gannet", npt),
            ];
            self.growth(page, paging, &sides);
            self.tables_moved(page, paging, &sides);
            let cpu = &self.published.host_state.cpu;
            let mut rows = Vec::new();
            for toggle in TOGGLES {
                let price = |side: &Side, n: u64| {
                    let figures = self.results.figures(side.1, side.2, &paged(toggle, n))?;
                    self.model.price(figures, cpu).map(|pair| pair * 0.5)
                };
                let mut row = vec![toggle.to_owned()];
                for side in &sides {
                    row.push(priced(price(side, 1)));
                    row.push(priced(price(side, 10_000)));
                }
                rows.push(row);
            }
            let mut titles = vec!["toggle".to_owned()];
            for (title, ..) in &sides {
                titles.extend([format!("{title}, 1 page"), "10000 pages".to_owned()]);
            }
            let _ = write!(
                page,
                "Modelled cycles per toggle (half a pair), {}, {paging}:\n\n",
                self.model.name(cpu)
            );
            table(page, &titles.iter().map(String::as_str).collect::<Vec<_>>(), rows);
        }
        self.plot(page, "cr0_wp.svg", "Cost of a CR0.WP toggle against mapped pages, few touched");
        self.plot(
            page,
            "cr0_wp_all.svg",
            "Cost of a CR0.WP toggle against mapped pages, all touched",
        );
        *page += "The Linux guest with 200 processes, one after the other:\n\n";
        let sides =
            [("stock KVM, `npt=0`", "stock", "npt=0"), ("Gannet, `npt=0`", "gannet", "npt=0")];
        self.tasks(page, FORKS, &sides);
    }

    /// Instructions per pair as the tables grow, for each toggle and side, few pages and all.
    fn growth(&self, page: &mut String, paging: &str, sides: &[Side]) {
        let mut titles = vec!["toggle".to_owned(), "touched".into(), "".into()];
        titles.extend(PAGES.map(|n| format!("{n} page{}", if n == 1 { "" } else { "s" })));
        let mut rows = Vec::new();
        let mut add = |toggle: &str, touched: &str, name: &dyn Fn(u64) -> String| {
            for (title, module, parameters) in sides {
                let cells = PAGES.map(|n| {
                    let figures = self.results.figures(module, parameters, &name(n));
                    figures.map_or_else(String::new, |f| f.median.to_string())
                });
                let mut row = vec![toggle.to_owned(), touched.to_owned(), (*title).to_owned()];
                if cells.iter().all(String::is_empty) {
                    let reason = self.results.reason(module, parameters, &name(1));
                    row.push(format!("not available: {reason}"));
                    row.resize(titles.len(), String::new());
                } else {
                    row.extend(cells);
                }
                rows.push(row);
            }
        };
        for toggle in TOGGLES {
            add(toggle, "8", &|n| paged(toggle, n));
        }
        add("cr0_wp", "all", &|n| format!("cr0_wp[{n},{n}]"));
        let _ = write!(page, "Instructions per pair, {paging}:\n\n");
        table(page, &titles.iter().map(String::as_str).collect::<Vec<_>>(), rows);
    }

    /// What became of page tables at 10,000 pages, by the modules' own statistics.
    fn tables_moved(&self, page: &mut String, paging: &str, sides: &[Side]) {
        let names = [
            ("vm.page_tables_allocated", "tables allocated"),
            ("vm.page_tables_freed", "tables freed"),
            ("vm.mmu_cache_miss", "mmu_cache_miss"),
            ("vm.mmu_shadow_zapped", "mmu_shadow_zapped"),
            ("vcpu.pf_fixed", "pf_fixed"),
            ("vcpu.tlb_flush", "tlb_flush"),
            ("vcpu.exits", "exits"),
        ];
        let mut titles = vec!["toggle", ""];
        titles.extend(names.iter().map(|(_, title)| *title));
        let mut rows = Vec::new();
        for toggle in TOGGLES {
            for (title, module, parameters) in sides {
                let Some(figures) =
                    self.results.figures(module, parameters, &paged(toggle, 10_000))
                else {
                    continue;
                };
                let mut row = vec![toggle.to_owned(), (*title).to_owned()];
                // Only Gannet counts its page tables; what a module does not count is left empty, not nought.
                let told = |name: &str| {
                    !figures.statistics.is_empty()
                        && (*module == "gannet" || !name.starts_with("vm.page_tables"))
                };
                row.extend(names.iter().map(|(name, _)| match told(name) {
                    true => short(figures.statistics.get(*name).copied().unwrap_or(0.0)),
                    false => String::new(),
                }));
                rows.push(row);
            }
        }
        let _ = write!(
            page,
            "Per pair with 10,000 pages, {paging}, by the modules' own statistics (empty: the module does not tell):\n\n"
        );
        table(page, &titles, rows);
    }

    fn whole_exits(&self, page: &mut String) {
        let published = &self.published.exits;
        let rows = published.cases.iter().map(|case| {
            let figures = self.results.figures("stock", "", &case.workload);
            let price = figures.and_then(|figures| self.model.price(figures, &published.cpu));
            vec![case.workload.clone(), whole(case.cycles), priced(price)]
        });
        let _ = write!(
            page,
            "## The model against whole exits\n\n\
             How far the model is off where nothing was changed: published figures of whole exits beside what the model makes of stock\n\
             KVM's counts in the lab. {}, on {}. The lab's are without mitigations, with the world switch of SVM, and with the decoding\n\
             that the emulated processor forces.\n\n",
            published.source,
            self.model.name(&published.cpu)
        );
        table(page, &["exit, cycles", "published", "modelled from the lab's counts"], rows);
    }

    fn plot(&self, page: &mut String, file: &str, title: &str) {
        if self.plots.contains(&file) {
            let _ = write!(page, "![{title}]({file})\n\n");
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
            *page += "## What was not measured\n\n";
            table(page, &["run", "reason"], rows);
        }
    }
}

/// A table with its first line and a blank one after it.
fn table(page: &mut String, titles: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
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
fn short(count: f64) -> String {
    if (count - count.round()).abs() < 0.05 { format!("{count:.0}") } else { format!("{count:.1}") }
}

fn whole(value: f64) -> String {
    format!("{value:.0}")
}

fn percent(change: Change) -> String {
    let saving = change.saving() * 100.0;
    if saving >= 0.0 { format!("−{saving:.1} %") } else { format!("+{:.1} %", -saving) }
}

fn priced(cycles: Option<Cycles>) -> String {
    cycles.map_or_else(String::new, |c| format!("{:.0} ({:.0}–{:.0})", c.taken, c.low, c.high))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(results: &Results) -> String {
        let root = gannet_lab::Layout::find().unwrap().root;
        let (model, published) = (Model::read(&root).unwrap(), Published::read(&root).unwrap());
        Page { results, model: &model, published: &published, plots: vec!["cr0_wp.svg"] }.text()
    }

    #[test]
    fn a_page_without_any_figure_says_so_everywhere() {
        let text = page(&Results::default());
        assert!(text.contains("not available: not run"));
        assert!(!text.contains("| met |") && !text.contains("**not met**"));
        assert!(text.contains("4600") && text.contains("46754"), "what was published stays");
        assert!(text.contains("cr0_wp.svg") && !text.contains("timer_exits.svg"));
    }

    #[test]
    fn every_row_of_a_table_has_as_many_cells_as_its_head() {
        let text = page(&Results::default());
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
