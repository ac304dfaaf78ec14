//! Performs the runs of `lab/mechanisms.toml`, two at a time, and gathers what they found. Each counts instructions, so neither disturbs
//! the other.

use super::results::{All, Figures, Numbers, Results, Run};
use crate::bench::{Entry, Report, Tools};
use crate::boot::BootReport;
use crate::options::Options;
use crate::progress::{Step, two_at_a_time};
use anyhow::Result;
use gannet_lab::{Counts, Event, Job, Layout, Machine, Outcome, guest};

/// A line with which the machine's command announces part number N.
const PART: &str = "MECHANISMS-PART ";

/// A line by which a guest's task tells a figure of its own: its name and the number.
const FIGURE: &str = "GANNET-FIGURE ";

/// How often a machine is tried at most: QEMU aborts now and then, or loses an event of a guest's (docs/lab.md).
const ATTEMPTS: u32 = 3;

/// One of the lab's machines, with what its runs need.
pub struct Place {
    pub options: Options,
    pub tools: Tools,
    pub runs: Vec<Run>,
}

/// Runs them all, those of the last place first: Bochs takes longest. A machine that fails is a run with a remark; only a lab that does
/// not work at all is an error.
pub fn measure(layout: &Layout, places: &[Place]) -> Result<All> {
    let mut queue = Vec::new();
    for place in places.iter().rev() {
        for run in &place.runs {
            queue.push((run, job(layout, place, run)?));
        }
    }
    let step = Step::start(layout, "measuring mechanisms");
    let found = two_at_a_time(&step, queue, |say, (run, job)| {
        let title = format!("{} {}", job.machine.name(), job.module.with(&job.parameters));
        say(title.clone());
        let found = run_one(layout, run, &job, &mut |event| {
            let (Event::Line(text) | Event::Pending(text)) = event;
            if text.starts_with('[') && text.contains("] ") && !text.contains('.') {
                say(format!("{title}: {text}"));
            }
        });
        (job.machine, found)
    });
    step.done();
    let results = |Place { options, .. }: &Place| {
        let own = found.iter().filter(|(on, _)| *on == options.machine());
        let runs = own.map(|(_, run)| run.clone()).collect();
        let (machine, release) = (options.machine().name(), layout.release(options.kernel)?);
        Ok(Results { machine: machine.to_owned(), release, runs })
    };
    Ok(All { machines: places.iter().map(results).collect::<Result<_>>()? })
}

/// Runs one machine. One that counts does the same every time, and fails the same way: a later attempt gets a word more on its kernel's
/// command line, which moves everything by some instructions. On Bochs there is nothing to move.
fn run_one(layout: &Layout, of: &Run, job: &Job, event: &mut dyn FnMut(Event<'_>)) -> Run {
    let attempts = if job.machine == Machine::Amd { ATTEMPTS } else { 1 };
    let mut run = of.clone();
    for number in 1..=attempts {
        let mut job = job.clone();
        if number > 1 {
            job.append = format!("{} attempt={number}", job.append).trim().to_owned();
        }
        run = match gannet_lab::run(layout, &job, event) {
            Ok(outcome) => gather(of, &outcome),
            Err(error) => Run { remarks: vec![format!("{error:#}")], ..of.clone() },
        };
        let missing = run.guests.values().any(|guest| guest.missing.is_some());
        if run.refused.is_some() || (run.remarks.is_empty() && !missing) {
            break;
        }
    }
    run
}

/// The task and the words of a part that is `guest TASK WORDS`.
fn task(part: &str) -> Option<(&str, &str)> {
    let rest = part.strip_prefix("guest ")?;
    Some(rest.split_once(' ').unwrap_or((rest, "")))
}

fn job(layout: &Layout, Place { options, tools, .. }: &Place, run: &Run) -> Result<Job> {
    let mut command = String::new();
    for (number, part) in run.parts.iter().enumerate() {
        let how = format!("--unit instructions --module {}", run.module);
        let what = match task(part) {
            None => {
                let run = part.replacen("bench", "run", 1);
                format!("{run} {how} --no-samples --json /out/{number}")
            }
            Some((task, words)) => format!(
                "boot --timeout 120 --kernel /guest/vmlinux --initrd /guest/initramfs --append \
                 '{} gannet.task={task} {words}' --from GANNET-{1}-BEGIN --expect GANNET-{1}-END {how} \
                 --report /out/{number}",
                guest::APPEND,
                task.to_uppercase()
            ),
        };
        command += &format!("echo {PART}{number}\nexitbench {what}\n");
    }
    command += "true\n";
    let mut job = Job::new(options.machine(), options.kernel, run.module(), &command)
        .file(&tools.exitbench, "bin/exitbench");
    job.parameters.clone_from(&run.parameters);
    if run.parts.iter().any(|part| task(part).is_some()) {
        job.files.push((layout.vmlinux(guest::KERNEL), "guest/vmlinux".to_owned()));
        let initramfs = guest::initramfs_with_programs(layout, guest::KERNEL)?;
        job.texts.push(("guest/initramfs".to_owned(), initramfs));
    }
    job.counting = true;
    job.plugin = Some(tools.plugin.clone());
    Ok(job)
}

/// Reads what a machine left. The records of the plugin come in the order of what they count.
fn gather(of: &Run, outcome: &Outcome) -> Run {
    let mut run = Run { refused: outcome.refusal(), ..of.clone() };
    if run.refused.is_some() {
        return run;
    }
    // Without its time stamp, so that the same complaint reads the same.
    let complaint = |line: &str| line.split_once("] ").map_or(line, |(_, text)| text).to_owned();
    run.remarks.extend(outcome.faults().into_iter().map(complaint));
    if outcome.status.is_none() {
        run.remarks.push(format!("the machine ended early:\n{}", outcome.tail(15)));
    }
    // What was counted, and how many times.
    let mut counted = Vec::new();
    for (number, part) in of.parts.iter().enumerate() {
        let file = outcome.files.get(&number.to_string()).map_or(&[][..], Vec::as_slice);
        let console = console(number, outcome);
        if let Some((task, _)) = task(part) {
            let figures = match serde_json::from_slice(file) {
                Ok(BootReport { ticks_between: Some(instructions), .. }) => {
                    counted.push((task.to_owned(), 1));
                    let ticks = [("instructions".to_owned(), instructions)].into();
                    Figures { ticks, figures: told(&console), ..Figures::default() }
                }
                Ok(BootReport { end, .. }) => {
                    Figures::without(format!("the task did not end: {end}"))
                }
                Err(_) => Figures::without(said_last(&console)),
            };
            run.guests.insert(task.to_owned(), figures);
        } else if let Ok(Report { workloads, .. }) = serde_json::from_slice(file) {
            let marked = workloads.iter().filter(|entry| entry.markers);
            counted.extend(marked.map(|e| (e.name.clone(), e.marker_iterations.max(1))));
            run.workloads
                .extend(workloads.iter().map(|entry| (entry.name.clone(), workload(entry))));
        } else {
            let names = part.split(' ').skip(1).take_while(|word| !word.starts_with('-'));
            let none = |name: &str| (name.to_owned(), Figures::without(said_last(&console)));
            run.workloads.extend(names.map(none));
        }
    }
    let (expected, seen) = (counted.len(), outcome.counts.len());
    if expected != seen {
        // Nobody knows which belongs to which.
        let remark = format!("operations are left out: {expected} counts expected, {seen} seen");
        run.remarks.push(remark);
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

/// Why a part left nothing: what it said last.
fn said_last(console: &[&str]) -> String {
    let said = |line: &&&str| line.starts_with("exitbench: ") || line.starts_with("error: ");
    console.iter().rfind(said).unwrap_or(&"it left no report").to_string()
}

/// A task's own figures.
fn told(console: &[&str]) -> Numbers {
    let figure = |line: &&str| {
        let (name, value) = line.split_once(FIGURE)?.1.trim().split_once(' ')?;
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
        let parts = ["bench cpuid --iterations 9", "bench timer --iterations 9", "guest forks"];
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
}
