//! The chapters of the page: one for each mechanism, and one for the model itself. Each has what was published, stock KVM, Gannet with the
//! switch off and on, and what the model makes of it.

use super::limits::{self, paged};
use super::machines::{FORKS, PAGES, PINGPONG, TIMER, TOGGLES, dear_toggle, ping_pong};
use super::page::{Page, Side, percent, priced, short, table, whole};
use super::plots;
use super::published::Change;
use gannet_lab::Machine;
use std::fmt::Write;

impl Page<'_> {
    pub(super) fn host_state(&self, page: &mut String) {
        if self.results.machine() == Machine::Intel {
            *page += "### 1. Host state by VMSAVE and VMLOAD\n\n\
                      For AMD CPUs alone: VMX restores FS, GS and the SYSENTER MSRs at each exit itself. The SYSCALL MSRs it does not\n\
                      touch; both modules write them one by one, which is what most WRMSRs of `hlt_loop` are.\n\n";
            let sides = [("stock KVM", "stock", ""), ("Gannet", "gannet", "")];
            self.sides(page, "hlt_loop", &sides);
            return;
        }
        let published = &self.published.host_state;
        let wanted = Change { before: published.before, after: published.after };
        let _ = write!(
            page,
            "### 1. Host state by VMSAVE and VMLOAD\n\n\
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

    pub(super) fn xstate(&self, page: &mut String) {
        let published = &self.published.xstate;
        let _ = write!(
            page,
            "### 2. The XSTATE layout read once\n\n\
             Switch `xstate_cache=1|0`, workloads `cpuid`, `xsetbv`, `cr4_osxsave`. A nested `cpuid` needs nested virtualization,\n\
             which Gannet does not offer.\n\n"
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

    pub(super) fn nested(&self, page: &mut String) {
        *page += "### 3. Nested VMX: vmcs02 prepared from what changed\n\n";
        *page += match self.results.machine() {
            Machine::Amd => "For Intel CPUs alone.\n\n",
            Machine::Intel => {
                "Gannet does not offer nested virtualization: there is nothing to measure yet.\n\n"
            }
        };
    }

    pub(super) fn deadline(&self, page: &mut String) {
        let published = &self.published.lazy_deadline;
        let _ = write!(
            page,
            "### 4. Lazy TSC deadline\n\n\
             Switch `lazy_tscdeadline=1|0`, workload `{TIMER}` and the Linux guest's task `{PINGPONG}`. Published: {}.\n\n",
            published.source
        );
        let measured = |change: Option<Change>| match change {
            Some(change) => [change.text(), percent(change)],
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
        let it = ping_pong(self.results.machine());
        let _ = write!(
            page,
            "Latencies are in nanoseconds from a timer's expiry to its sleeper, at the per mille that the name tells: of {} sleeps on\n\
             Gannet, of {} on stock KVM. Exits and instructions are those of {} round trips.\n\n",
            it.sleeps, it.stock_sleeps, it.rounds
        );
        self.plot(page, "timer_exits", "Exits by reason of the timer workloads");
    }

    pub(super) fn roots(&self, page: &mut String) {
        let on = self.results.machine();
        let (switch, own) = match on {
            Machine::Amd => (", with TDP and without (`npt=0`)", ""),
            // As `limits` judges.
            Machine::Intel => (
                "",
                " CR0.WP and CR4.PGE are the\nguest's own on Intel CPUs: their changes exit on neither module, but for `keep_roots=0`, which has to see them.",
            ),
        };
        let _ = write!(
            page,
            "### 5. Roots kept across role changes\n\n\
             Switch `keep_roots=1|0`{switch}. One operation is a pair of switches; after each of the two\n\
             the guest writes to 8 of its pages, or to all.{own}\n\n\
             Published: {}.\n\n",
            self.published.roots.source
        );
        self.published_roots(page);
        let every = [("TDP", "", "keep_roots=0"), ("shadow paging", "npt=0", "npt=0 keep_roots=0")];
        let measured = if on == Machine::Amd { &every[..] } else { &every[..1] };
        for (paging, npt, off) in measured {
            let sides = [
                ("stock KVM", "stock", *npt),
                ("Gannet, `keep_roots=0`", "gannet", *off),
                ("Gannet, `keep_roots=1`", "gannet", *npt),
            ];
            self.growth(page, paging, &sides);
            self.tables_moved(page, paging, &sides);
            self.modelled(page, paging, &sides);
        }
        let toggle = dear_toggle(on);
        let bit = plots::bit(toggle);
        let title = format!("Cost of a toggle of {bit} against mapped pages");
        self.plot(page, toggle, &format!("{title}, few touched"));
        self.plot(page, &format!("{toggle}_all"), &format!("{title}, all touched"));
        if on == Machine::Amd {
            *page += "The Linux guest with 200 processes, one after the other:\n\n";
            let sides =
                [("stock KVM, `npt=0`", "stock", "npt=0"), ("Gannet, `npt=0`", "gannet", "npt=0")];
            self.tasks(page, FORKS, &sides);
        }
    }

    /// The published cases that there are runs for on this machine, beside what the model makes of those.
    fn published_roots(&self, page: &mut String) {
        let published = &self.published.roots;
        let cpu = self.one_cpu();
        let price = |module: &str, parameters: &str| {
            let figures = self.results.figures(module, parameters, &paged("cr0_wp", 1))?;
            self.model.price(figures, cpu).map(|pair| pair * 0.5)
        };
        // The other kinds of paging are those of `amd`.
        let here = |stock: &str| self.results.machine() == Machine::Amd || stock.is_empty();
        let rows = published.cases.iter().filter(|case| here(&case.stock)).map(|case| {
            let change = Change { before: case.before, after: case.after };
            let (off, on) = (&case.gannet_off, &case.gannet_on);
            // Of Gannet there is one kind of TDP tables.
            let (off, on) = (
                off.as_ref().and_then(|p| price("gannet", p)),
                on.as_ref().and_then(|p| price("gannet", p)),
            );
            vec![
                case.name.clone(),
                format!("{:.0} → {:.0}", case.before, case.after),
                percent(change),
                priced(price("stock", &case.stock)),
                priced(off),
                priced(on),
            ]
        });
        let titles = [
            "cycles per toggle of CR0.WP",
            "published",
            "",
            "stock KVM, which has the change, modelled",
            "Gannet, `keep_roots=0`, modelled",
            "Gannet, `keep_roots=1`, modelled",
        ];
        let name = self.model.name(cpu);
        let _ = write!(page, "The model beside the published figures, {name}, 1 page mapped:\n\n");
        table(page, &titles, rows);
    }

    /// Modelled cycles of every toggle, at the least and the most pages.
    fn modelled(&self, page: &mut String, paging: &str, sides: &[Side]) {
        let cpu = self.one_cpu();
        let mut rows = Vec::new();
        for toggle in TOGGLES {
            let price = |side: &Side, n: u64| {
                let figures = self.results.figures(side.1, side.2, &paged(toggle, n))?;
                self.model.price(figures, cpu).map(|pair| pair * 0.5)
            };
            let mut row = vec![toggle.to_owned()];
            for side in sides {
                row.push(priced(price(side, 1)));
                row.push(priced(price(side, 10_000)));
            }
            rows.push(row);
        }
        let mut titles = vec!["toggle".to_owned()];
        for (title, ..) in sides {
            titles.extend([format!("{title}, 1 page"), "10000 pages".to_owned()]);
        }
        let name = self.model.name(cpu);
        let _ = write!(page, "Modelled cycles per toggle (half a pair), {name}, {paging}:\n\n");
        table(page, &titles.iter().map(String::as_str).collect::<Vec<_>>(), rows);
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
        let dear = dear_toggle(self.results.machine());
        add(dear, "all", &|n| format!("{dear}[{n},{n}]"));
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
                let figures = self.results.figures(module, parameters, &paged(toggle, 10_000));
                // A guest that is never left moves nothing.
                let Some(figures) = figures.filter(|f| !f.statistics.is_empty()) else { continue };
                let mut row = vec![toggle.to_owned(), (*title).to_owned()];
                // Only Gannet counts its page tables; what a module does not count is left empty, not nought.
                let told = |name: &str| *module == "gannet" || !name.starts_with("vm.page_tables");
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

    pub(super) fn whole_exits(&self, page: &mut String) {
        let published = &self.published.exits;
        let rows = published.cases.iter().map(|case| {
            let figures = self.results.figures("stock", "", &case.workload);
            let price = figures.and_then(|figures| self.model.price(figures, &published.cpu));
            vec![case.workload.clone(), whole(case.cycles), priced(price)]
        });
        let _ = write!(
            page,
            "### The model against whole exits\n\n\
             How far the model is off where nothing was changed: published figures of whole exits beside what the model makes of stock\n\
             KVM's counts in the lab. {}, on {}. The lab's are without mitigations{}.\n\n",
            published.source,
            self.model.name(&published.cpu),
            match self.results.machine() {
                Machine::Amd =>
                    ", with the world switch of\nSVM, and with the decoding that the emulated processor forces",
                Machine::Intel => "",
            }
        );
        table(page, &["exit, cycles", "published", "modelled from the lab's counts"], rows);
    }
}
