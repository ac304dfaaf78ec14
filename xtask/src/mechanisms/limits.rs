//! What the mechanisms must reach (`lab/mechanisms.toml`), held against what was measured: met, not met, or not measured and why.

use super::plan::{PAGES, Papers, Rule, TOGGLES, engine, paged};
use super::results::{Figures, NOT_RUN, Results, Run};
use anyhow::{Context, Result, bail, ensure};
use gannet_lab::Module::{Gannet, Stock};
use minijinja::{context, value::Serde};
use std::collections::BTreeMap;

/// One limit, what was found, and whether it is met; `None` where something that it needs was not measured.
pub type Limit<'a> = (&'a str, String, Option<bool>);

/// How a limit stands in words, for page and console.
pub fn verdict(met: Option<bool>) -> &'static str {
    met.map_or("not measured", |met| if met { "met" } else { "**not met**" })
}

/// Those of the machine, in the order of the mechanisms.
pub fn limits<'a>(papers: &'a Papers, results: &Results) -> Vec<Limit<'a>> {
    let here = |rule: &&Rule| rule.machine.as_ref().is_none_or(|on| *on == results.machine);
    let judge = |rule: &'a Rule| {
        let Rule { off, on, what, .. } = rule;
        let runs = [(Gannet, off), (Gannet, on), (Stock, on)].map(|(module, at)| module.with(at));
        match (Judge { papers, results, rule, runs }).judge() {
            Ok((found, met)) => (&**what, found, Some(met)),
            Err(reason) => (&**what, format!("{reason:#}"), None),
        }
    };
    papers.plan.limits.iter().filter(here).map(judge).collect()
}

struct Judge<'a> {
    papers: &'a Papers,
    results: &'a Results,
    rule: &'a Rule,
    /// What is compared: Gannet's runs with the mechanism off and on, and stock KVM's.
    runs: [String; 3],
}

impl Judge<'_> {
    /// What was found, and whether the limit holds; it fails where something is missing.
    fn judge(&self) -> Result<(String, bool)> {
        match (&*self.rule.kind, &*self.rule.name) {
            ("cpuid", _) => self.cpuid(),
            (_, "") => self.toggles(),
            (_, name) if name.contains(' ') => self.several(name),
            (_, name) => self.one(name).map(|(found, met, _)| (found, met)),
        }
    }

    /// Each of several workloads, with spaces between their names: all must meet the limit, and each says what was found.
    fn several(&self, names: &str) -> Result<(String, bool)> {
        let (mut found, mut met) = (Vec::new(), true);
        for name in names.split(' ') {
            let (text, holds, _) = self.one(name).with_context(|| name.to_owned())?;
            found.push(format!("{name} {text}"));
            met &= holds;
        }
        Ok((found.join(", "), met))
    }

    /// The same for one workload or task, as the limit's kind says, and the value that is held against the limit.
    fn one(&self, name: &str) -> Result<(String, bool, f64)> {
        let Rule { kind, figure, low, least, most, .. } = self.rule;
        let template = self.papers.plan.kinds.get(kind).context("no such kind")?;
        let engine = engine();
        let template = engine.template_from_str(template)?;
        let value = |run, figure| {
            let value = self.papers.model.value(self.results.figures(run, name)?, figure);
            value.map_or(Err(NOT_RUN), |[_, taken, _]| Ok(taken))
        };
        let [off, on, stock] = &self.runs;
        let words = [
            ("before", value(off, figure)),
            ("after", value(on, figure)),
            ("low", value(on, low)),
            ("stock", value(stock, figure)),
            ("spread", self.spread(on, name)),
        ];
        let needed = template.undeclared_variables(false);
        let needed = words.iter().filter(|(word, _)| needed.contains(*word));
        let missing = needed.filter_map(|(_, value)| value.err());
        if let Some(reason) = missing.min_by_key(|reason| *reason == NOT_RUN) {
            bail!("{reason}");
        }
        let words = BTreeMap::from(words.map(|(word, value)| (word, value.ok())));
        let cpus = Serde(&self.papers.model.cpus);
        let rendered = template.render_captured(context! { figure, cpus, ..Serde(words) })?;
        let value = rendered.state().lookup("value").context("a kind without a value")?;
        let value = f64::try_from(value)?;
        let met = least.is_none_or(|least| value >= least) && most.is_none_or(|most| value <= most);
        Ok((rendered.output().to_owned(), met, value))
    }

    /// Every workload and every task of a Linux guest on Gannet whose run did not switch the cache off.
    fn cpuid(&self) -> Result<(String, bool)> {
        let cached =
            |run: &&Run| run.module() == Gannet && !run.parameters.contains("xstate_cache=0");
        let (mut workloads, mut guests, mut executed) = (0, 0, Vec::new());
        for run in self.results.runs.iter().filter(cached) {
            for (name, figures) in run.workloads.iter().chain(&run.guests) {
                let Some(cpuids) = figures.get("host.cpuid") else { continue };
                let guest = run.guests.contains_key(name);
                *if guest { &mut guests } else { &mut workloads } += 1;
                if cpuids > 0.0 {
                    executed.push(format!("{name} ({}): {cpuids:.2}", run.parameters));
                }
            }
        }
        ensure!(workloads > 0, NOT_RUN);
        let clean = format!("0 in {workloads} workloads and {guests} tasks of Linux guests");
        Ok(if executed.is_empty() { (clean, true) } else { (executed.join(", "), false) })
    }

    /// The host's own over all numbers of pages, and the median over those of which as many are touched: whichever varies more.
    /// The host's own is a mean, which one interrupt of the host's in a few hundred rounds moves by a tenth: where one fell
    /// in, the median alone is asked.
    fn spread(&self, run: &str, name: &str) -> Result<f64, &str> {
        let toggle = name.split('[').next().unwrap_or_default();
        let figures = PAGES.map(|pages| self.results.figures(run, &paged(toggle, pages, 8)));
        let figures: Vec<&Figures> = figures.into_iter().collect::<Result<_, _>>()?;
        let undisturbed = figures.iter().filter(|f| !f.exits.contains_key("interrupt"));
        let own = undisturbed.filter_map(|f| f.get("host.instructions")).collect();
        let medians = figures.iter().skip(1).filter_map(|f| f.get("median")).collect();
        Ok(greatest_over_least(own)?.max(greatest_over_least(medians)?))
    }

    /// Each of the toggles that stock KVM is left for, or each of those that it is not, as the guest owns their bits: what is worst at any
    /// number of pages.
    fn toggles(&self) -> Result<(String, bool)> {
        // What was not counted is not taken for a bit of the guest's own.
        let wanted = |toggle: &&&str| {
            let stock = |pages| self.results.figures(&self.runs[2], &paged(toggle, pages, 8));
            let exitless = |pages| stock(pages).is_ok_and(|f| f.get("exits") == Some(0.0));
            PAGES.into_iter().all(exitless) == self.rule.free
        };
        let (mut found, mut met) = (Vec::new(), true);
        for toggle in TOGGLES[..4].iter().filter(wanted) {
            let all = PAGES.iter().map(|pages| self.one(&paged(toggle, *pages, 8)));
            let all = all.collect::<Result<Vec<_>>>()?;
            let worst = all.into_iter().max_by(|(.., a), (.., b)| a.total_cmp(b));
            let (text, holds, _) = worst.context(NOT_RUN)?;
            found.push(format!("{toggle} {text}"));
            met &= holds;
        }
        ensure!(!found.is_empty(), NOT_RUN);
        Ok((found.join(", "), met))
    }
}

/// The greatest of some costs over the least; one alone says nothing.
fn greatest_over_least(mut costs: Vec<f64>) -> Result<f64, &'static str> {
    costs.sort_by(f64::total_cmp);
    match costs[..] {
        [least, .., most] if least > 0.0 => Ok(most / least),
        _ => Err(NOT_RUN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mechanisms::plan::tests::papers;
    use crate::mechanisms::results::tests::{results, run, toggled};
    use serde_json::{Value, json};

    /// How the limit stands whose words have this part, on a machine with these runs.
    fn verdict(machine: &str, runs: &[Value], part: &str) -> Option<bool> {
        let (papers, results) = (papers(), results(machine, runs));
        let all = limits(&papers, &results);
        all.iter().find(|(what, ..)| what.contains(part)).unwrap().2
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
    fn each_of_several_workloads_has_to_meet_a_limit() {
        let trip = |name: &str| format!("nested_{name}");
        let names = ["cpuid", "vmcall", "hlt", "wrmsr", "pio", "entry"].map(trip);
        let judged = |last: Option<f64>| {
            let host = |name: &String| match last {
                Some(count) if *name == names[5] => json!({"vmread": 20.0, "vmwrite": count}),
                None if *name == names[5] => json!({}),
                _ => json!({"vmread": 20.0, "vmwrite": 20.0}),
            };
            let all = names.iter().map(|name| (name.clone(), json!({"host": host(name)})));
            verdict("intel", &[run("gannet", "", all.collect())], "at most 40 VMREADs")
        };
        assert_eq!(judged(Some(20.0)), Some(true));
        assert_eq!(judged(Some(21.0)), Some(false));
        assert_eq!(judged(None), None, "one was not counted");
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

    #[test]
    fn a_kind_that_names_nothing_is_refused() {
        let (mut papers, results) = (papers(), results("amd", &[]));
        papers.plan.kinds.insert("value".to_owned(), "{% set value = 1 %}{{ beofre }}".to_owned());
        let (_, found, met) = limits(&papers, &results).remove(0);
        assert!(found.contains("undefined") && met.is_none(), "{found}");
    }
}
