//! What the mechanisms must reach (`lab/mechanisms.toml`), held against what was measured: met, not met, or not measured and why.

use super::basis::{Change, Page};
use super::plan::{Kind, PAGES, Rule, TOGGLES, paged};
use super::results::{Figures, Run};

/// One limit, what was found, and whether it is met; `None` where something that it needs was not measured.
pub type Limit<'a> = (&'a str, String, Option<bool>);

/// How a limit stands in words, for page and console.
pub fn verdict(met: Option<bool>) -> &'static str {
    met.map_or("not measured", |met| if met { "met" } else { "**not met**" })
}

/// Those of the machine, in the order of the mechanisms.
pub fn limits<'a>(page: &Page<'a>) -> Vec<Limit<'a>> {
    let on = page.results.machine().name();
    let here = |rule: &&Rule| rule.machine.as_ref().is_none_or(|machine| machine == on);
    let judge = |rule: &'a Rule| {
        let judge = Judge { page, rule };
        let found = judge.judge().map(|(found, met)| (found, Some(met)));
        let (found, met) = found.unwrap_or_else(|| (judge.reason(), None));
        (&*rule.what, found, met)
    };
    page.papers.plan.limits.iter().filter(here).map(judge).collect()
}

/// A figure of a workload, or what is made of figures of a toggle, by its name.
type Value<'a> = &'a dyn Fn(&str) -> Option<f64>;

struct Judge<'a> {
    page: &'a Page<'a>,
    rule: &'a Rule,
}

impl Judge<'_> {
    fn holds(&self, value: f64) -> bool {
        let Rule { least, most, .. } = self.rule;
        least.is_none_or(|least| value >= least) && most.is_none_or(|most| value <= most)
    }

    /// The limit's figure of a workload.
    fn value(&self, module: &str, parameters: &str, name: &str) -> Option<f64> {
        Some(self.page.value(module, parameters, name, &self.rule.figure)?[1])
    }

    /// What was found, and whether it holds; `None` where something is missing.
    fn judge(&self) -> Option<(String, bool)> {
        let Rule { kind, name, figure, off, on, .. } = self.rule;
        let change = || self.page.change(name, figure, off, on);
        let ours = |name: &str| self.value("gannet", on, name);
        let stock = |name: &str| self.value("stock", on, name);
        let (found, value) = match kind {
            Kind::Value => (format!("{:.0}", ours(name)?), ours(name)?),
            Kind::Saving => {
                let (saving, cpu) = (change()?.saving(), self.page.model_of(figure));
                (format!("{:.1} % on {cpu}", saving * 100.0), saving)
            }
            Kind::Fewer => {
                let saving = change()?.saving();
                (format!("{} (−{:.2} %)", change()?.text(), saving * 100.0), saving)
            }
            Kind::Less => (change()?.text(), change()?.before - change()?.after),
            Kind::Ratio => {
                let Change { before, after } = change()?;
                let Some(figure) = &self.rule.low else {
                    return Some((format!("{before} → {after}"), self.holds(after / before)));
                };
                let [_, low, _] = self.page.value("gannet", on, name, figure)?;
                (
                    format!("{before} → {after}, of which the sample says at least {low}"),
                    low / before,
                )
            }
            Kind::Stock => {
                let (ours, stock) = (ours(name)?, stock(name)?);
                let ratio = ours / stock.max(1.0);
                (format!("{ratio:.3} ({ours:.0} of {stock:.0})"), ratio)
            }
            Kind::Cpuid => return self.cpuid(),
            Kind::Flat => return self.toggles(true, 3, &|toggle| self.spread(toggle)),
            Kind::Toggles => {
                let ratio = |name: &str| Some(ours(name)? / stock(name)?);
                return self.toggles(true, 3, &|toggle| most(toggle, &ratio));
            }
            Kind::Each => return self.toggles(true, 1, &|toggle| most(toggle, &ours)),
            Kind::Free => return self.toggles(false, 1, &|toggle| most(toggle, &ours)),
        };
        Some((found, self.holds(value)))
    }

    /// Why something is missing.
    fn reason(&self) -> String {
        let Rule { name, off, on, .. } = self.rule;
        let first = paged(TOGGLES[0], 1);
        let name = if name.is_empty() { &first } else { name };
        let sides = [("gannet", off), ("gannet", on), ("stock", on)];
        let mut all =
            sides.map(|(module, at)| self.page.results.reason(module, at, name)).into_iter();
        all.find(|reason| *reason != "not run").unwrap_or("not run").to_owned()
    }

    /// Every workload and every task of a Linux guest on Gannet whose run did not switch the cache off.
    fn cpuid(&self) -> Option<(String, bool)> {
        let (mut counted, mut offenders) = ([0, 0], Vec::new());
        let cached =
            |run: &&Run| run.module == "gannet" && !run.parameters.contains("xstate_cache=0");
        for run in self.page.results.runs.iter().filter(cached) {
            for (found, counted) in [&run.workloads, &run.guests].into_iter().zip(&mut counted) {
                for (name, figures) in found {
                    let Some(cpuids) = figures.get("host.cpuid") else { continue };
                    *counted += 1;
                    if cpuids > 0.0 {
                        offenders.push(format!("{name} ({}): {cpuids:.2}", run.parameters));
                    }
                }
            }
        }
        let [workloads, guests] = counted;
        let clean = format!("0 in {workloads} workloads and {guests} tasks of Linux guests");
        let found = if offenders.is_empty() { clean } else { offenders.join(", ") };
        (workloads > 0).then_some((found, offenders.is_empty()))
    }

    /// The host's own over all numbers of pages, and the median over those of which as many are touched: whichever varies more.
    /// The host's own is a mean, which one interrupt of the host's in a few hundred rounds moves by a tenth: where one fell
    /// in, the median alone is asked.
    fn spread(&self, toggle: &str) -> Option<f64> {
        let of = |pages: &[u64], cost: &dyn Fn(&Figures) -> Option<f64>| {
            let at = |n| self.page.results.figures("gannet", &self.rule.on, &paged(toggle, n));
            let figures: Vec<_> = pages.iter().map(|n| at(*n)).collect::<Option<_>>()?;
            let costs: Vec<f64> = figures.into_iter().filter_map(cost).collect();
            let least = costs.iter().copied().fold(f64::MAX, f64::min);
            let enough = costs.len() >= 2 && least > 0.0;
            enough.then(|| costs.iter().copied().fold(0.0, f64::max) / least)
        };
        let undisturbed = |figures: &&Figures| !figures.exits.contains_key("interrupt");
        let own = |f: &Figures| Some(f).filter(undisturbed)?.get("host.instructions");
        Some(of(&PAGES, &own)?.max(of(&PAGES[1..], &|figures| figures.get("median"))?))
    }

    /// A value for each of the toggles that stock KVM is left for, or for each of those that it is not, as the guest owns their bits.
    fn toggles(&self, exit: bool, digits: usize, value: Value<'_>) -> Option<(String, bool)> {
        let exits = |name: &str| Some(self.page.value("stock", &self.rule.on, name, "exits")?[1]);
        // What was not counted is not taken for a bit of the guest's own.
        let wanted = |toggle: &&&str| (most(toggle, &exits) != Some(0.0)) == exit;
        let found = TOGGLES[..4].iter().filter(wanted).map(|toggle| Some((toggle, value(toggle)?)));
        let found: Vec<_> = found.collect::<Option<_>>()?;
        let text: Vec<_> = found.iter().map(|(t, n)| format!("{t} {n:.digits$}")).collect();
        let holds = found.iter().all(|(_, n)| self.holds(*n));
        (!found.is_empty()).then(|| (text.join(", "), holds))
    }
}

/// The greatest at any number of pages; `None` where one is missing.
fn most(toggle: &str, value: Value<'_>) -> Option<f64> {
    let all = PAGES.iter().map(|n| value(&paged(toggle, *n)));
    Some(all.collect::<Option<Vec<_>>>()?.into_iter().fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mechanisms::page::tests::papers;
    use serde_json::{Value, json};

    /// How the limit stands whose words have this part, on a machine with these runs.
    fn verdict(machine: &str, runs: &[Value], part: &str) -> Option<bool> {
        let results = json!({"machine": machine, "release": "", "runs": runs});
        let (papers, results) = (papers(), serde_json::from_value(results).unwrap());
        let all = limits(&Page { papers: &papers, results: &results, plots: &[] });
        all.iter().find(|(what, ..)| what.contains(part)).unwrap().2
    }

    fn run(module: &str, parameters: &str, workloads: Value) -> Value {
        json!({"module": module, "parameters": parameters, "workloads": workloads})
    }

    /// Toggles at every number of pages.
    fn toggled(module: &str, toggles: &[&str], figures: impl Fn(u64) -> Value) -> Value {
        let all = toggles.iter().flat_map(|t| PAGES.map(|n| (paged(t, n), figures(n))));
        run(module, "", all.collect())
    }

    #[test]
    fn bits_that_stock_kvm_leaves_to_the_guest_must_not_exit() {
        let verdict = |stock: f64, gannet: f64| {
            let toggled = |module, exits: f64| {
                let figures = json!({"host": {"instructions": 0.0}, "exits": {"write_cr": exits}});
                toggled(module, &["cr0_wp"], |_| figures.clone())
            };
            let runs = [toggled("stock", stock), toggled("gannet", gannet)];
            verdict("intel", &runs, "leaves to the guest")
        };
        assert_eq!(verdict(0.0, 0.0), Some(true));
        assert_eq!(verdict(0.0, 2.0), Some(false));
        assert_eq!(verdict(2.0, 2.0), None, "stock KVM leaves none to the guest");
    }

    #[test]
    fn an_interrupt_of_the_hosts_is_no_cost_of_a_page() {
        let judged = |interrupt: &str, grown: f64| {
            let figures = |n| {
                let (own, reason) =
                    if n == PAGES[2] { (900.0 + grown, interrupt) } else { (900.0, "other") };
                let exits = json!({"write_cr": 2.0, reason: 0.01});
                json!({"median": 900, "host": {"instructions": own}, "exits": exits})
            };
            let runs = ["stock", "gannet"].map(|module| toggled(module, &TOGGLES, figures));
            verdict("amd", &runs, "TDP: toggles flat")
        };
        assert_eq!(judged("other", 0.0), Some(true));
        assert_eq!(judged("other", 200.0), Some(false));
        assert_eq!(judged("interrupt", 200.0), Some(true));
    }

    #[test]
    fn host_state_is_judged_by_its_msrs() {
        let one = |host: Value| json!({"hlt_loop": {"median": 2000, "host": host}});
        let off = one(json!({"rdmsr": 7.0, "wrmsr": 7.0, "vmrun": 1.0}));
        let on = run("gannet", "", one(json!({"vmrun": 1.0})));
        let runs = [on, run("gannet", "host_state=msr", off)];
        assert_eq!(verdict("amd", &runs, "at least 10 RDMSR"), Some(true));
        assert_eq!(verdict("amd", &runs, "no RDMSR"), Some(true));
        let saving = verdict("amd", &runs, "modelled saving");
        assert_eq!(saving, Some(false), "14 MSRs are not 39 %");
    }

    #[test]
    fn one_host_cpuid_anywhere_is_too_many() {
        let verdict = |parameters, count: f64| {
            let run = run("gannet", parameters, json!({"xsetbv": {"host": {"cpuid": count}}}));
            verdict("amd", &[run], "no host CPUID")
        };
        assert_eq!(verdict("", 0.0), Some(true));
        assert_eq!(verdict("npt=0", 2.0), Some(false));
        assert_eq!(verdict("xstate_cache=0", 2.0), None);
    }
}
