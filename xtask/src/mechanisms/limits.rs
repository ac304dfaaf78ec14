//! What the mechanisms must reach, held against what was measured: met, not met, or not measured and why.

use super::cost::Model;
use super::machines::{FORKS, PAGES, PINGPONG, TIMER, TOGGLES};
use super::published::{Change, Published};
use super::results::{Figures, Guest, Results, Workload};
use gannet_lab::Machine;

/// How a limit stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Met,
    NotMet,
    /// Something it needs was not measured.
    Open,
}

/// One limit.
#[derive(Clone, Debug)]
pub struct Limit {
    pub what: String,
    pub found: String,
    pub verdict: Verdict,
}

/// The published savings of the lazy TSC deadline, as they are quoted: TSC-deadline writes and exits.
const FEWER_WRITES: f64 = 0.975;
const FEWER_EXITS: f64 = 0.54;

/// Flat: the dearest number of pages costs at most this much more than the cheapest.
const FLAT: f64 = 1.02;

fn limit(what: impl Into<String>, found: impl Into<String>, holds: bool) -> Limit {
    let verdict = if holds { Verdict::Met } else { Verdict::NotMet };
    Limit { what: what.into(), found: found.into(), verdict }
}

fn open(what: impl Into<String>, reason: impl Into<String>) -> Limit {
    Limit { what: what.into(), found: reason.into(), verdict: Verdict::Open }
}

/// Those of the machine, in the order of the mechanisms: host state is kept so on AMD CPUs alone, and only there is shadow paging.
pub fn limits(results: &Results, model: &Model, published: &Published) -> Vec<Limit> {
    let mut all = Vec::new();
    if results.machine() == Machine::Amd {
        all.extend(host_state(results, model, published));
    }
    all.push(cpuid(results));
    all.extend(deadline(results));
    match results.machine() {
        Machine::Amd => {
            all.extend(roots(results, "", 0.15));
            all.extend(roots(results, "npt=0", 0.20));
            all.push(forks(results));
        }
        // Stock KVM's exits are shorter there, as it need not decode instructions.
        Machine::Intel => all.extend(roots(results, "", 0.25)),
    }
    all
}

fn host_state(results: &Results, model: &Model, published: &Published) -> Vec<Limit> {
    let few = "hlt_loop: no RDMSR or WRMSR per iteration with host_state=vmsave";
    let many = "hlt_loop: at least 10 RDMSR and WRMSR per iteration with host_state=msr";
    let wanted = Change { before: published.host_state.before, after: published.host_state.after };
    let saved = format!(
        "hlt_loop: the modelled saving is at least the published {:.0} %",
        wanted.saving() * 100.0
    );
    let msrs = |figures: &Figures| Some(figures.host("rdmsr")? + figures.host("wrmsr")?);
    let off = results.figures("gannet", "host_state=msr", "hlt_loop");
    let on = results.figures("gannet", "", "hlt_loop");
    let (Some(off), Some(on)) = (off, on) else {
        let reason = results.reason("gannet", "host_state=msr", "hlt_loop");
        return [few, many, &saved].map(|what| open(what, reason.clone())).into();
    };
    let count = |what: &str, figures, holds: fn(f64) -> bool| match msrs(figures) {
        Some(n) => limit(what, format!("{n:.0}"), holds(n)),
        None => open(what, "operations were not counted"),
    };
    let cpu = &published.host_state.cpu;
    let saving = match (model.price(off, cpu), model.price(on, cpu)) {
        (Some(off), Some(on)) => {
            let saving = Change { before: off.taken, after: on.taken }.saving();
            let found = format!("{:.1} % on {}", saving * 100.0, model.name(cpu));
            limit(saved, found, saving >= wanted.saving())
        }
        _ => open(saved, "operations were not counted"),
    };
    vec![count(many, off, |n| n >= 10.0), count(few, on, |n| n == 0.0), saving]
}

/// Every workload and every task of a Linux guest on Gannet whose run did not switch the cache off.
fn cpuid(results: &Results) -> Limit {
    let what = "no host CPUID per guest exit, in every workload with the cache on";
    let (mut counted, mut guests, mut offenders) = (0, 0, Vec::new());
    let runs = results.runs.iter().filter(|run| run.module == "gannet");
    for run in runs.filter(|run| !run.parameters.contains("xstate_cache=0")) {
        for (name, workload) in &run.workloads {
            let Workload::Measured(figures) = workload else { continue };
            let Some(cpuids) = figures.host("cpuid") else { continue };
            counted += 1;
            if cpuids > 0.0 {
                offenders.push(format!("{name} ({}): {cpuids:.2}", run.parameters));
            }
        }
        for (name, guest) in &run.guests {
            let Guest::Ran(task) = guest else { continue };
            guests += u32::from(!task.host.is_empty());
            let cpuids = task.host.get("cpuid").copied().unwrap_or(0);
            if cpuids > 0 {
                let exits: u64 = task.exits.values().sum();
                offenders.push(format!("{name} ({}): {cpuids} in {exits} exits", run.parameters));
            }
        }
    }
    match (counted, offenders.is_empty()) {
        (0, _) => open(what, "operations were not counted"),
        (_, true) => limit(
            what,
            format!("0 in {counted} workloads and {guests} tasks of Linux guests"),
            true,
        ),
        _ => limit(what, offenders.join(", "), false),
    }
}

/// Exits without the mechanism and with it, for the reasons whose names begin so.
pub fn deadline_exits(results: &Results, reasons: &str) -> Option<Change> {
    let of = |parameters| {
        let figures = results.figures("gannet", parameters, TIMER)?;
        let counted = figures.exits.iter().filter(|(reason, _)| reason.starts_with(reasons));
        (!figures.host.is_empty()).then(|| counted.fold(0.0, |sum, (_, count)| sum + count))
    };
    Some(Change { before: of("lazy_tscdeadline=0")?, after: of("")? })
}

/// The same of the Linux guest's task.
pub fn pingpong_exits(results: &Results, reasons: &str) -> Option<Change> {
    let of = |parameters| {
        let task = results.task("gannet", parameters, PINGPONG)?;
        let counted = task.exits.iter().filter(|(reason, _)| reason.starts_with(reasons));
        (!task.exits.is_empty()).then(|| counted.fold(0.0, |sum, (_, count)| sum + *count as f64))
    };
    Some(Change { before: of("lazy_tscdeadline=0")?, after: of("")? })
}

fn deadline(results: &Results) -> Vec<Limit> {
    let mut all = Vec::new();
    let why = |name| {
        let off = results.reason("gannet", "lazy_tscdeadline=0", name);
        if off == "not run" { results.reason("gannet", "", name) } else { off }
    };
    let found = |change: Change| format!("{} (−{:.2} %)", change.text(), change.saving() * 100.0);
    type Exits = fn(&Results, &str) -> Option<Change>;
    let sources: [(&str, Exits); 2] = [(TIMER, deadline_exits), (PINGPONG, pingpong_exits)];
    for (name, exits) in sources {
        for (text, reason, least) in [
            ("TSC-deadline writes", "wrmsr_tsc_deadline", FEWER_WRITES),
            ("exits", "", FEWER_EXITS),
        ] {
            let what = format!("{name}: {text} down by at least {:.1} %", least * 100.0);
            all.push(match exits(results, reason) {
                Some(change) => limit(what, found(change), change.saving() >= least),
                None => open(what, why(name)),
            });
        }
    }
    let pair = |name: &str| {
        let of =
            |parameters| results.task("gannet", parameters, PINGPONG)?.figures.get(name).copied();
        Some(Change { before: of("lazy_tscdeadline=0")?, after: of("")? })
    };
    // Ten sleeps are beyond it on either machine: two runs of the same side differ by as much.
    let not_worse: fn(Change) -> bool = |c| c.after <= c.before * 1.02;
    let late = match results.machine() {
        Machine::Amd => (
            "latency_999",
            "pingpong: timer latency at the 99.9th percentile not worse (2 %)",
            not_worse,
        ),
        Machine::Intel => (
            "latency_990",
            "pingpong: timer latency at the 99th percentile not worse (2 %)",
            not_worse,
        ),
    };
    for (name, what, holds) in [
        (
            "round_trips_per_second",
            "pingpong: throughput not lower",
            (|c: Change| c.after >= c.before) as fn(Change) -> bool,
        ),
        late,
    ] {
        all.push(match pair(name) {
            Some(change) => {
                limit(what, format!("{} → {}", change.before, change.after), holds(change))
            }
            None => open(what, why(PINGPONG)),
        });
    }
    all
}

/// A toggle at a number of pages, with a fixed number of them touched.
pub fn paged(toggle: &str, pages: u64) -> String {
    format!("{toggle}[{pages},{}]", pages.min(8))
}

/// The most exits of a toggle at any number of pages; `None` where one was not counted.
fn exits_of(results: &Results, module: &str, parameters: &str, toggle: &str) -> Option<f64> {
    let exits = |n| results.figures(module, parameters, &paged(toggle, n))?.all_exits();
    let all: Option<Vec<f64>> = PAGES.into_iter().map(exits).collect();
    all.map(|all| all.into_iter().fold(0.0, f64::max))
}

/// The toggles that stock KVM is left for, and those that it is not, as the guest owns their bits.
fn by_exits(results: &Results, parameters: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    TOGGLES[..4].iter().partition(|toggle| {
        // What was not counted is not taken for a bit of the guest's own.
        exits_of(results, "stock", parameters, toggle) != Some(0.0)
    })
}

fn roots(results: &Results, parameters: &str, most: f64) -> Vec<Limit> {
    let paging = if parameters.is_empty() { "TDP" } else { "shadow paging" };
    let (toggles, free) = by_exits(results, parameters);
    let at =
        |module, toggle: &str, pages| results.figures(module, parameters, &paged(toggle, pages));
    let (mut flat, mut ratios, mut tables) = (Vec::new(), Vec::new(), Vec::new());
    for toggle in &toggles {
        // The host's own over all numbers of pages, and the median over those of which as many are touched: whichever varies more.
        let host = PAGES.iter().map(|n| at("gannet", toggle, *n)?.host("instructions"));
        let median = PAGES[1..].iter().map(|n| Some(at("gannet", toggle, *n)?.median as f64));
        let spread = |costs: Option<Vec<f64>>| {
            let costs = costs?;
            let least = costs.iter().copied().fold(f64::MAX, f64::min);
            (least > 0.0).then(|| costs.iter().copied().fold(0.0, f64::max) / least)
        };
        flat.push(spread(host.collect()).zip(spread(median.collect())).map(|(a, b)| a.max(b)));
        let ratio = |n: &u64| {
            Some(at("gannet", toggle, *n)?.median as f64 / at("stock", toggle, *n)?.median as f64)
        };
        let all: Option<Vec<f64>> = PAGES.iter().map(ratio).collect();
        ratios.push(all.map(|all| all.into_iter().fold(0.0, f64::max)));
        let moved = |n: &u64| {
            let statistics = &at("gannet", toggle, *n)?.statistics;
            // A module without any statistics tells nothing; one with them that has not moved any table tells none.
            let sum = |name: &str| statistics.get(name).copied().unwrap_or(0.0);
            (!statistics.is_empty())
                .then(|| sum("vm.page_tables_allocated") + sum("vm.page_tables_freed"))
        };
        let all: Option<Vec<f64>> = PAGES.iter().map(moved).collect();
        tables.push(all.map(|all| all.into_iter().fold(0.0, f64::max)));
    }
    let reason = || results.reason("gannet", parameters, &paged(TOGGLES[0], 1));
    let judge =
        |what: String, found: Vec<Option<f64>>, digits: usize, holds: &dyn Fn(f64) -> bool| {
            match found.iter().copied().collect::<Option<Vec<f64>>>() {
                Some(found) if !found.is_empty() => {
                    let named = toggles.iter().zip(&found);
                    let text: Vec<String> =
                        named.map(|(t, n)| format!("{t} {n:.digits$}")).collect();
                    limit(what, text.join(", "), found.iter().all(|n| holds(*n)))
                }
                _ => open(what, reason()),
            }
        };
    let own = (!free.is_empty()).then(|| {
        let what = format!("{paging}: no exit for bits that stock KVM leaves to the guest");
        let exits = free.iter().map(|t| Some((*t, exits_of(results, "gannet", parameters, t)?)));
        match exits.collect::<Option<Vec<_>>>() {
            Some(found) => {
                let text: Vec<_> = found.iter().map(|(t, n)| format!("{t} {n:.1}")).collect();
                limit(what, text.join(", "), found.iter().all(|(_, n)| *n == 0.0))
            }
            None => open(what, reason()),
        }
    });
    let mut all = vec![
        judge(
            format!("{paging}: toggles flat from 1 to 10,000 pages (greatest over least)"),
            flat,
            3,
            &|n| n <= FLAT,
        ),
        judge(format!("{paging}: toggles at most {most:.2}× of stock"), ratios, 3, &|n| n <= most),
        judge(
            format!("{paging}: no page-table page freed or allocated per toggle"),
            tables,
            1,
            &|n| n == 0.0,
        ),
    ];
    all.extend(own);
    all
}

fn forks(results: &Results) -> Limit {
    let what = "shadow paging: 200 processes at most 0.70× of stock's instructions";
    let of = |module| Some(results.task(module, "npt=0", FORKS)?.instructions as f64);
    match (of("stock"), of("gannet")) {
        (Some(stock), Some(gannet)) => {
            let ratio = gannet / stock.max(1.0);
            limit(what, format!("{ratio:.3} ({gannet:.0} of {stock:.0})"), ratio <= 0.70)
        }
        (None, _) => open(what, format!("stock: {}", results.reason("stock", "npt=0", FORKS))),
        _ => open(what, results.reason("gannet", "npt=0", FORKS)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mechanisms::results::Run;
    use std::collections::BTreeMap;

    fn figures(median: u64, host: &[(&str, f64)]) -> Workload {
        let host = host.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        Workload::Measured(Box::new(Figures { median, host, ..Figures::default() }))
    }

    fn run(parameters: &str, workloads: BTreeMap<String, Workload>) -> Run {
        let (module, parameters) = ("gannet".to_owned(), parameters.to_owned());
        Run { module, parameters, workloads, ..Run::default() }
    }

    fn judge_on(machine: Machine, runs: Vec<Run>) -> Vec<Limit> {
        let root = gannet_lab::Layout::find().unwrap().root;
        let (model, published) = (Model::read(&root).unwrap(), Published::read(&root).unwrap());
        let machine = machine.name().to_owned();
        limits(&Results { machine, runs, ..Results::default() }, &model, &published)
    }

    fn judge(runs: Vec<Run>) -> Vec<Limit> {
        judge_on(Machine::Amd, runs)
    }

    #[test]
    fn nothing_measured_is_open_everywhere() {
        for machine in gannet_lab::MACHINES {
            let all = judge_on(machine, Vec::new());
            assert!(all.len() >= 10);
            assert!(all.iter().all(|limit| limit.verdict == Verdict::Open), "{all:#?}");
        }
    }

    #[test]
    fn bits_that_stock_kvm_leaves_to_the_guest_must_not_exit() {
        let toggled = |module: &str, exits: f64| {
            let one = |n: &u64| {
                let figures = Figures {
                    host: BTreeMap::from([("instructions".to_owned(), 0.0)]),
                    exits: BTreeMap::from([("write_cr".to_owned(), exits)]),
                    ..Figures::default()
                };
                (paged("cr0_wp", *n), Workload::Measured(Box::new(figures)))
            };
            Run { module: module.into(), ..run("", PAGES.iter().map(one).collect()) }
        };
        let verdict = |exits| {
            let all =
                judge_on(Machine::Intel, vec![toggled("stock", 0.0), toggled("gannet", exits)]);
            all.into_iter().find(|l| l.what.contains("leaves to the guest")).map(|l| l.verdict)
        };
        assert_eq!(verdict(0.0), Some(Verdict::Met));
        assert_eq!(verdict(2.0), Some(Verdict::NotMet));
        let all = judge_on(Machine::Intel, vec![toggled("stock", 2.0), toggled("gannet", 2.0)]);
        assert!(!all.iter().any(|limit| limit.what.contains("leaves to the guest")));
    }

    #[test]
    fn host_state_is_judged_by_its_msrs() {
        let one = |host| BTreeMap::from([("hlt_loop".to_owned(), figures(2000, host))]);
        let off = [("rdmsr", 7.0), ("wrmsr", 7.0), ("vmrun", 1.0)];
        let all = judge(vec![run("", one(&[("vmrun", 1.0)])), run("host_state=msr", one(&off))]);
        assert_eq!((all[0].verdict, all[1].verdict), (Verdict::Met, Verdict::Met));
        assert_eq!(all[2].verdict, Verdict::NotMet, "14 MSRs are not 39 %: {}", all[2].found);
    }

    #[test]
    fn one_host_cpuid_anywhere_is_too_many() {
        let workload = |n| BTreeMap::from([("xsetbv".to_owned(), figures(9, &[("cpuid", n)]))]);
        let verdict = |runs| judge(runs)[3].verdict;
        assert_eq!(verdict(vec![run("", workload(0.0))]), Verdict::Met);
        assert_eq!(verdict(vec![run("npt=0", workload(2.0))]), Verdict::NotMet);
        assert_eq!(verdict(vec![run("xstate_cache=0", workload(2.0))]), Verdict::Open);
    }
}
