//! Performs the runs of `lab/mechanisms.toml`, two at a time, and gathers what they found. Each counts instructions, so neither disturbs
//! the other.

use super::plan::{Plan, engine};
use super::results::{All, Figures, Numbers, Results, Run};
use crate::again;
use crate::bench::{Entry, Report};
use crate::boot::BootReport;
use crate::module;
use crate::options::Options;
use crate::progress::{Step, two_at_a_time};
use crate::tools::{self, Tools};
use anyhow::Result;
use gannet_lab::{Counts, Event, Job, Layout, Outcome, guest, untimed};
use minijinja::{context, value::Serde};

/// The line before a part of the machine's command begins so, and ends with the part's number.
const PART: &str = "MECHANISMS-PART ";

/// Performs all runs, those of the last machine first: Bochs takes longest. A machine that fails is a run with a remark; only a lab that
/// does not work at all is an error.
pub fn measure(layout: &Layout, plan: &Plan, options: &Options) -> Result<All> {
    let (mut all, mut places, mut queue) = (All::default(), Vec::new(), Vec::new());
    for options in options.for_machines() {
        let tools = tools::prepare(layout, &options)?;
        let (on, release) = (options.machine(), layout.release(options.kernel)?);
        places.push((tools, options));
        all.machines.push(Results { machine: on.name().to_owned(), release, runs: plan.runs(on)? });
    }
    module::build(layout, options.kernel)?;
    crate::guest::build(layout, guest::KERNEL)?;
    for (place, results) in places.iter().zip(&mut all.machines).rev() {
        for run in &mut results.runs {
            queue.push((job(layout, plan, place, run)?, run));
        }
    }
    let step = Step::start(layout, "measuring mechanisms");
    two_at_a_time(&step, queue, |say, (job, run)| {
        let title = format!("{} {}", job.machine.name(), run.title());
        say(title.clone());
        *run = run_one(layout, run, job, &mut |event| {
            let (Event::Line(text) | Event::Pending(text)) = event;
            if text.starts_with('[') && text.contains("] ") && !text.contains('.') {
                say(format!("{title}: {text}"));
            }
        });
    });
    step.done();
    Ok(all)
}

/// Runs one machine, again if something of it is missing.
fn run_one(layout: &Layout, of: &Run, job: Job, event: &mut dyn FnMut(Event<'_>)) -> Run {
    let run = |job: &Job| match gannet_lab::run(layout, job, event) {
        Ok(outcome) => gather(of, &outcome),
        Err(error) => Run { remarks: vec![format!("{error:#}")], ..of.clone() },
    };
    let well = |run: &Run| {
        let missing = run.guests.values().any(|guest| guest.missing.is_some());
        run.refused.is_some() || (run.remarks.is_empty() && !missing)
    };
    again::until_well(job, run, well).0
}

/// The task of a part that is `guest TASK WORDS`.
fn task(part: &str) -> Option<&str> {
    part.strip_prefix("guest ")?.split(' ').next()
}

fn job(layout: &Layout, plan: &Plan, (tools, on): &(Tools, Options), run: &Run) -> Result<Job> {
    let mut job = tools.job(on, run.module(), &run.parameters, &command(plan, run)?);
    if run.parts.iter().any(|part| task(part).is_some()) {
        job = job.file(layout.vmlinux(guest::KERNEL), "guest/vmlinux");
        let initramfs = guest::initramfs_with_programs(layout, guest::KERNEL)?;
        job.texts.push(("guest/initramfs".to_owned(), initramfs));
    }
    Ok(job)
}

fn command(plan: &Plan, run: &Run) -> Result<String> {
    let parts = Serde(&run.parts);
    let words = context! { parts, mark => PART, module => &run.module, append => guest::APPEND };
    Ok(engine().render_str(&plan.script, words)?)
}

/// Reads what a machine left. The records of the plugin come in the order of what they count.
fn gather(of: &Run, outcome: &Outcome) -> Run {
    let mut run = Run { refused: outcome.refusal(), ..of.clone() };
    if run.refused.is_some() {
        return run;
    }
    run.remarks.extend(outcome.faults().into_iter().map(|line| untimed(line).to_owned()));
    if outcome.status.is_none() {
        run.remarks.push(format!("the machine ended early:\n{}", outcome.tail(15)));
    }
    // What was counted, and how many times.
    let mut counted = Vec::new();
    for (number, part) in of.parts.iter().enumerate() {
        let file = outcome.files.get(&number.to_string()).map_or(&[][..], Vec::as_slice);
        let console = console(number, outcome);
        // Why a part left nothing: what it said last.
        let said = |line: &&&str| line.starts_with("exitbench: ") || line.starts_with("error: ");
        let last = console.iter().rfind(said).unwrap_or(&"it left no report");
        if let Some(task) = task(part) {
            let figures = match serde_json::from_slice(file) {
                Ok(BootReport { ticks_between: Some(instructions), .. }) => {
                    counted.push((task.to_owned(), 1));
                    let ticks = [("instructions".to_owned(), instructions)].into();
                    Figures { ticks, figures: told(&console), ..Figures::default() }
                }
                Ok(BootReport { end, .. }) => {
                    Figures::without(format!("the task did not end: {end}"))
                }
                Err(_) => Figures::without(*last),
            };
            run.guests.insert(task.to_owned(), figures);
        } else if let Ok(Report { workloads, .. }) = serde_json::from_slice(file) {
            let marked = workloads.iter().filter(|entry| entry.markers);
            counted.extend(marked.map(|e| (e.name.clone(), e.marker_iterations.max(1))));
            run.workloads.extend(workloads.iter().map(|e| (e.name.clone(), workload(e))));
        } else {
            let names = part.split(' ').skip(1).take_while(|word| !word.starts_with('-'));
            run.workloads.extend(names.map(|name| (name.to_owned(), Figures::without(*last))));
        }
    }
    let (expected, seen) = (counted.len(), outcome.counts.len());
    if expected != seen {
        // Nobody knows which belongs to which.
        run.remarks
            .push(format!("operations are left out: {expected} counts expected, {seen} seen"));
        return run;
    }
    for ((name, per), record) in counted.into_iter().zip(&outcome.counts) {
        let figures = run.workloads.get_mut(&name).or_else(|| run.guests.get_mut(&name));
        if let Some(figures) = figures.filter(|figures| figures.missing.is_none()) {
            (figures.host, figures.exits) =
                (numbers(record, "host.", per), numbers(record, "exit.", per));
        }
    }
    run
}

/// What the console shows of one part.
fn console(number: usize, outcome: &Outcome) -> Vec<&str> {
    let head = format!("{PART}{number}");
    let lines = outcome.console.lines().skip_while(|line| *line != head).skip(1);
    lines.take_while(|line| !line.starts_with(PART)).collect()
}

/// A task's own figures, from its lines `GANNET-FIGURE NAME NUMBER`.
fn told(console: &[&str]) -> Numbers {
    let figure = |line: &&str| {
        let (name, value) = line.split_once("GANNET-FIGURE ")?.1.trim().split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    };
    console.iter().filter_map(figure).collect()
}

fn workload(entry: &Entry) -> Figures {
    entry.ticks().map_or_else(Figures::without, |[min, median, max]| {
        let ticks =
            [("min", min), ("median", median), ("max", max), ("iterations", entry.iterations)];
        let ticks = ticks.map(|(name, n)| (name.to_owned(), n)).into();
        let statistics = numbers(&entry.statistics, "", entry.marker_iterations.max(1));
        Figures { ticks, statistics, ..Figures::default() }
    })
}

/// Those of a record's counts whose names begin so, without that, and without what did not happen, each of so many operations;
/// `instructions` stays also where there were none, which tells a count of nothing from no count.
fn numbers(record: &Counts, prefix: &str, per: u64) -> Numbers {
    let part = |(name, count): (&String, &u64)| {
        let name = name.strip_prefix(prefix)?.to_owned();
        let each = (*count as f64 / per as f64 * 1000.0).round() / 1000.0;
        (*count > 0 || name == "instructions").then_some((name, each))
    };
    record.iter().filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(change: impl Fn(&mut Outcome)) -> Run {
        let parts = ["run cpuid --iterations 9", "run timer --iterations 9", "guest forks"];
        let (module, parameters) = ("gannet".to_owned(), "npt=0".to_owned());
        let parts = parts.map(str::to_owned).into();
        let queued = Run { module, parameters, parts, ..Run::default() };
        let json = r#"{"unit":"instructions","workloads":[{"name":"cpuid","min":1,"median":2,
            "max":3,"iterations":9,"markers":true,"marker_iterations":2,"statistics":{"vm.x":2}}]}"#;
        let boot = r#"{"ticks_between":77,"end":"reset"}"#;
        let count = |pairs: &[(&str, u64)]| {
            pairs.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect::<Counts>()
        };
        let first = count(&[("rdmsr", 4), ("host.rdmsr", 2), ("host.cpuid", 0), ("exit.cpuid", 2)]);
        let console = "MECHANISMS-PART 0\n[1/1] cpuid\nMECHANISMS-PART 1\nexitbench: no such workload\n\
                       MECHANISMS-PART 2\nGANNET-FIGURE rate 2.5\n";
        let mut outcome = Outcome {
            loaded: Some(true),
            status: Some(0),
            console: console.into(),
            files: [("0".to_owned(), json.into()), ("2".to_owned(), boot.into())].into(),
            counts: vec![first, count(&[("host.cpuid", 5)])],
            ..Outcome::default()
        };
        change(&mut outcome);
        gather(&queued, &outcome)
    }

    #[test]
    fn what_a_machine_left_goes_to_its_workloads() {
        let run = gathered(|_| {});
        let (cpuid, task) = (&run.workloads["cpuid"], &run.guests["forks"]);
        assert_eq!(cpuid.host, Numbers::from([("rdmsr".to_owned(), 1.0)]));
        assert_eq!((cpuid.exits["cpuid"], cpuid.statistics["vm.x"]), (1.0, 1.0));
        let missing = run.workloads["timer"].missing.as_deref();
        assert_eq!(missing, Some("exitbench: no such workload"));
        assert_eq!((task.get("instructions"), task.host["cpuid"]), (Some(77.0), 5.0));
        assert_eq!(task.figures["rate"], 2.5);
        assert!(run.remarks.is_empty() && run.refused.is_none());
    }

    #[test]
    fn counts_that_do_not_match_are_not_attributed_and_a_refusal_leaves_its_reason_alone() {
        let run = gathered(|outcome| drop(outcome.counts.pop()));
        assert!(run.workloads["cpuid"].host.is_empty() && run.remarks.len() == 1);
        let run = gathered(|outcome| {
            outcome.loaded = Some(false);
            outcome.dmesg = "[ 1.0] gannet: npt=0 is not implemented".to_owned();
        });
        assert_eq!(run.refused.as_deref(), Some("gannet: npt=0 is not implemented"));
        assert!(run.workloads.is_empty() && run.guests.is_empty());
    }

    #[test]
    fn a_machine_performs_its_parts_one_after_the_other() {
        let plan = crate::mechanisms::plan::tests::papers().plan;
        let parts = ["run cpuid --iterations 9".to_owned(), "guest forks gannet.x=1".to_owned()];
        let run = Run { module: "stock".to_owned(), parts: parts.into(), ..Run::default() };
        let command = command(&plan, &run).unwrap();
        let [part, run, task, boot, end] = command.lines().collect::<Vec<_>>()[..] else {
            panic!()
        };
        assert_eq!([part, task, end], ["echo MECHANISMS-PART 0", "echo MECHANISMS-PART 1", "true"]);
        assert!(
            run.starts_with(
                "exitbench run cpuid --iterations 9 --unit instructions --module stock"
            )
        );
        assert!(boot.contains("gannet.task=forks gannet.x=1' --from GANNET-FORKS-BEGIN"));
    }
}
