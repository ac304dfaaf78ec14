//! What the mechanisms must reach (`lab/mechanisms.toml`), held against what was measured: met, not met, or not measured and why.

use super::basis::{Change, Page};
use super::plan::{Kind, PAGES, Rule, TOGGLES, paged};
use super::results::Figures;

/// How a limit stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Met,
    NotMet,
    /// Something it needs was not measured.
    Open,
}

/// One limit, what was found, how it stands.
pub type Limit = (String, String, Verdict);

/// Those of the machine, in the order of the mechanisms.
pub fn limits(page: &Page<'_>) -> Vec<Limit> {
    let here = |rule: &&Rule| rule.machine.as_ref().is_none_or(|m| *m == page.on().name());
    let judge = |rule: &Rule| {
        let (found, verdict) = match (Judge { page, rule }).judge() {
            Some((found, true)) => (found, Verdict::Met),
            Some((found, false)) => (found, Verdict::NotMet),
            None => (Judge { page, rule }.reason(), Verdict::Open),
        };
        (rule.what.clone(), found, verdict)
    };
    page.plan.limits.iter().filter(here).map(judge).collect()
}

struct Judge<'a> {
    page: &'a Page<'a>,
    rule: &'a Rule,
}

impl Judge<'_> {
    fn holds(&self, value: f64) -> bool {
        let Rule { least, most, .. } = self.rule;
        least.is_none_or(|least| value >= least) && most.is_none_or(|most| value <= most)
    }

    /// What was found, and whether it holds; `None` where something is missing.
    fn judge(&self) -> Option<(String, bool)> {
        let Rule { kind, name, off, on, reasons, .. } = self.rule;
        let results = self.page.results;
        let figures = |parameters| results.figures("gannet", parameters, name);
        match kind {
            Kind::Msrs => {
                let count = figures(on)?.host("rdmsr")? + figures(on)?.host("wrmsr")?;
                Some((format!("{count:.0}"), self.holds(count)))
            }
            Kind::Price => {
                let price = |at| Some(self.page.model.price(figures(at)?, self.page.cpu())?.taken);
                let saving = Change { before: price(off)?, after: price(on)? }.saving();
                let cpu = self.page.model.name(self.page.cpu());
                Some((format!("{:.1} % on {cpu}", saving * 100.0), self.holds(saving)))
            }
            Kind::Cpuid => self.cpuid(),
            Kind::Exits => {
                let change = self.page.exits(name, off, reasons)?;
                let found = format!("{} (−{:.2} %)", change.text(), change.saving() * 100.0);
                Some((found, self.holds(change.saving())))
            }
            Kind::Figure => {
                let told = |at| results.task("gannet", at, name)?.figures.get(&self.rule.figure);
                let (before, after) = (told(off)?, told(on)?);
                Some((format!("{before} → {after}"), self.holds(after / before)))
            }
            Kind::Flat => self.toggles(true, 3, &|toggle| self.spread(toggle)),
            Kind::Toggles => self.toggles(true, 3, &|toggle| {
                let median = |module, n| Some(self.at(module, toggle, n)?.median as f64);
                most(|n| Some(median("gannet", n)? / median("stock", n)?))
            }),
            Kind::Tables => self.toggles(true, 1, &|toggle| most(|n| self.tables_moved(toggle, n))),
            Kind::Free => self.toggles(false, 1, &|toggle| self.exits_of("gannet", toggle)),
            Kind::Task => {
                let of = |module| Some(results.task(module, on, name)?.instructions as f64);
                let (stock, gannet) = (of("stock")?, of("gannet")?);
                let ratio = gannet / stock.max(1.0);
                Some((format!("{ratio:.3} ({gannet:.0} of {stock:.0})"), self.holds(ratio)))
            }
        }
    }

    /// Why something is missing.
    fn reason(&self) -> String {
        let Rule { name, off, on, .. } = self.rule;
        let first = paged(TOGGLES[0], 1);
        let name = if name.is_empty() { &first } else { name };
        let reason = |module, at| self.page.results.reason(module, at, name);
        let all = [reason("gannet", off), reason("gannet", on), reason("stock", on)];
        all.into_iter().find(|reason| reason != "not run").unwrap_or_else(|| "not run".to_owned())
    }

    /// Every workload and every task of a Linux guest on Gannet whose run did not switch the cache off.
    fn cpuid(&self) -> Option<(String, bool)> {
        let (mut counted, mut guests, mut offenders) = (0, 0, Vec::new());
        let runs = self.page.results.runs.iter().filter(|run| run.module == "gannet");
        for run in runs.filter(|run| !run.parameters.contains("xstate_cache=0")) {
            let counts =
                run.workloads.iter().filter_map(|(name, f)| Some((name, f.get()?.host("cpuid")?)));
            for (name, cpuids) in counts {
                counted += 1;
                if cpuids > 0.0 {
                    offenders.push(format!("{name} ({}): {cpuids:.2}", run.parameters));
                }
            }
            for (name, task) in run.guests.iter().filter_map(|(name, t)| Some((name, t.get()?))) {
                guests += u32::from(!task.host.is_empty());
                let cpuids = task.host.get("cpuid").copied().unwrap_or(0);
                if cpuids > 0 {
                    offenders.push(format!("{name} ({}): {cpuids} in all", run.parameters));
                }
            }
        }
        let clean = format!("0 in {counted} workloads and {guests} tasks of Linux guests");
        let found = if offenders.is_empty() { clean } else { offenders.join(", ") };
        (counted > 0).then_some((found, offenders.is_empty()))
    }

    fn at(&self, module: &str, toggle: &str, pages: u64) -> Option<&Figures> {
        self.page.results.figures(module, &self.rule.on, &paged(toggle, pages))
    }

    /// The most exits of a toggle at any number of pages.
    fn exits_of(&self, module: &str, toggle: &str) -> Option<f64> {
        most(|n| self.at(module, toggle, n)?.all_exits())
    }

    /// The host's own over all numbers of pages, and the median over those of which as many are touched: whichever varies more.
    /// The host's own is a mean, which one interrupt of the host's in a few hundred rounds moves by a tenth: where one fell
    /// in, the median alone is asked.
    fn spread(&self, toggle: &str) -> Option<f64> {
        let of = |pages: &[u64], cost: &dyn Fn(&Figures) -> Option<f64>| {
            let figures = pages.iter().map(|n| self.at("gannet", toggle, *n));
            let figures: Vec<_> = figures.collect::<Option<_>>()?;
            let costs: Vec<f64> = figures.into_iter().filter_map(cost).collect();
            let least = costs.iter().copied().fold(f64::MAX, f64::min);
            let enough = costs.len() >= 2 && least > 0.0;
            enough.then(|| costs.iter().copied().fold(0.0, f64::max) / least)
        };
        let undisturbed = |figures: &&Figures| !figures.exits.contains_key("interrupt");
        let own = |f: &Figures| Some(f).filter(undisturbed)?.host("instructions");
        Some(of(&PAGES, &own)?.max(of(&PAGES[1..], &|figures| Some(figures.median as f64))?))
    }

    fn tables_moved(&self, toggle: &str, pages: u64) -> Option<f64> {
        let statistics = &self.at("gannet", toggle, pages)?.statistics;
        // A module without any statistics tells nothing; one with them that has not moved any table tells none.
        let sum = |name: &str| statistics.get(name).copied().unwrap_or(0.0);
        (!statistics.is_empty())
            .then(|| sum("vm.page_tables_allocated") + sum("vm.page_tables_freed"))
    }

    /// A value for each of the toggles that stock KVM is left for, or for each of those that it is not, as the guest owns their bits.
    fn toggles(
        &self,
        exit: bool,
        digits: usize,
        value: &dyn Fn(&str) -> Option<f64>,
    ) -> Option<(String, bool)> {
        // What was not counted is not taken for a bit of the guest's own.
        let exits = |toggle: &&&str| (self.exits_of("stock", toggle) != Some(0.0)) == exit;
        let found = TOGGLES[..4].iter().filter(exits).map(|toggle| Some((toggle, value(toggle)?)));
        let found: Vec<_> = found.collect::<Option<_>>()?;
        let text: Vec<_> = found.iter().map(|(t, n)| format!("{t} {n:.digits$}")).collect();
        let holds = found.iter().all(|(_, n)| self.holds(*n));
        (!found.is_empty()).then(|| (text.join(", "), holds))
    }
}

/// The greatest at any number of pages; `None` where one is missing.
fn most(value: impl FnMut(u64) -> Option<f64>) -> Option<f64> {
    let all: Option<Vec<f64>> = PAGES.into_iter().map(value).collect();
    Some(all?.into_iter().fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mechanisms::page::tests::{Papers, results};
    use crate::mechanisms::results::{Found, Run};
    use gannet_lab::Machine;
    use std::collections::BTreeMap;

    fn figures(median: u64, host: &[(&str, f64)]) -> Found<Figures> {
        let host = host.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        Found::Measured(Box::new(Figures { median, host, ..Figures::default() }))
    }

    fn run(parameters: &str, workloads: BTreeMap<String, Found<Figures>>) -> Run {
        let (module, parameters) = ("gannet".to_owned(), parameters.to_owned());
        Run { module, parameters, workloads, ..Run::default() }
    }

    fn judge(machine: Machine, runs: Vec<Run>) -> Vec<Limit> {
        limits(&Papers::read().page(&results(machine, runs)))
    }

    fn verdict(all: &[Limit], part: &str) -> Verdict {
        all.iter().find(|(what, ..)| what.contains(part)).unwrap().2
    }

    #[test]
    fn nothing_measured_is_open_everywhere() {
        for machine in gannet_lab::MACHINES {
            let all = judge(machine, Vec::new());
            assert!(all.len() >= 10);
            assert!(all.iter().all(|(.., verdict)| *verdict == Verdict::Open), "{all:#?}");
        }
    }

    #[test]
    fn bits_that_stock_kvm_leaves_to_the_guest_must_not_exit() {
        let toggled = |module: &str, exits: f64| {
            let one = |toggle: &str, n: u64| {
                let host = BTreeMap::from([("instructions".to_owned(), 0.0)]);
                let exits = BTreeMap::from([("write_cr".to_owned(), exits)]);
                let figures = Figures { host, exits, ..Figures::default() };
                (paged(toggle, n), Found::Measured(Box::new(figures)))
            };
            let all = PAGES.iter().map(|n| one("cr0_wp", *n)).collect();
            Run { module: module.into(), ..run("", all) }
        };
        let verdict = |stock, gannet| {
            let runs = vec![toggled("stock", stock), toggled("gannet", gannet)];
            verdict(&judge(Machine::Intel, runs), "leaves to the guest")
        };
        assert_eq!(verdict(0.0, 0.0), Verdict::Met);
        assert_eq!(verdict(0.0, 2.0), Verdict::NotMet);
        assert_eq!(verdict(2.0, 2.0), Verdict::Open, "stock KVM leaves none to the guest");
    }

    #[test]
    fn an_interrupt_of_the_hosts_is_no_cost_of_a_page() {
        let judged = |disturbed: bool, grown: f64| {
            let one = |module: &str| {
                let row = |n: u64| {
                    let extra = if n == PAGES[2] { grown } else { 0.0 };
                    let host = BTreeMap::from([("instructions".to_owned(), 900.0 + extra)]);
                    let mut exits = BTreeMap::from([("write_cr".to_owned(), 2.0)]);
                    if disturbed && n == PAGES[2] {
                        exits.insert("interrupt".to_owned(), 0.01);
                    }
                    let figures = Figures { median: 900, host, exits, ..Figures::default() };
                    Found::Measured(Box::new(figures))
                };
                let of = |toggle| PAGES.iter().map(move |n| (paged(toggle, *n), row(*n)));
                let all = TOGGLES[..4].iter().flat_map(|toggle| of(toggle)).collect();
                Run { module: module.into(), ..run("", all) }
            };
            let all = judge(Machine::Amd, vec![one("stock"), one("gannet")]);
            verdict(&all, "TDP: toggles flat")
        };
        assert_eq!(judged(false, 0.0), Verdict::Met);
        assert_eq!(judged(false, 200.0), Verdict::NotMet);
        assert_eq!(judged(true, 200.0), Verdict::Met);
    }

    #[test]
    fn host_state_is_judged_by_its_msrs() {
        let one = |host| BTreeMap::from([("hlt_loop".to_owned(), figures(2000, host))]);
        let off = [("rdmsr", 7.0), ("wrmsr", 7.0), ("vmrun", 1.0)];
        let runs = vec![run("", one(&[("vmrun", 1.0)])), run("host_state=msr", one(&off))];
        let all = judge(Machine::Amd, runs);
        assert_eq!((all[0].2, all[1].2), (Verdict::Met, Verdict::Met));
        assert_eq!(all[2].2, Verdict::NotMet, "14 MSRs are not 39 %: {}", all[2].1);
    }

    #[test]
    fn one_host_cpuid_anywhere_is_too_many() {
        let workload = |n| BTreeMap::from([("xsetbv".to_owned(), figures(9, &[("cpuid", n)]))]);
        let verdict = |run| verdict(&judge(Machine::Amd, vec![run]), "no host CPUID");
        assert_eq!(verdict(run("", workload(0.0))), Verdict::Met);
        assert_eq!(verdict(run("npt=0", workload(2.0))), Verdict::NotMet);
        assert_eq!(verdict(run("xstate_cache=0", workload(2.0))), Verdict::Open);
    }
}
