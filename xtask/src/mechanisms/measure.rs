//! Performs the runs of `lab/mechanisms.toml`, two at a time, and gathers what they found. Each counts instructions, so neither disturbs
//! the other.

use super::plan::Queued;
use super::results::{All, Figures, Found, Results, Run, Task};
use crate::bench::{self, Tools};
use crate::boot::BootReport;
use crate::options::Options;
use crate::progress::{Step, two_at_a_time};
use anyhow::Result;
use gannet_lab::{Counts, Event, Job, Layout, Machine, Outcome, guest};
use std::collections::BTreeMap;
use std::sync::Mutex;

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
    pub runs: Vec<Queued>,
}

/// Runs them all, those of the last place first: Bochs takes longest. A machine that fails is a run with a remark; only a lab that does
/// not work at all is an error.
pub fn measure(layout: &Layout, places: &[Place]) -> Result<All> {
    let mut queue = Vec::new();
    for Place { options, tools, runs } in places.iter().rev() {
        for run in runs {
            queue.push((run, job(layout, options, tools, run)?));
        }
    }
    let total = queue.len();
    let step = Step::start(layout, "measuring mechanisms");
    let shown = Mutex::new((0, [const { String::new() }; 2]));
    let say = |worker: usize, text: String, more: usize| {
        if let Ok(mut shown) = shown.lock() {
            shown.0 += more;
            shown.1[worker] = text;
            step.say(&format!("{}/{total} {}", shown.0, shown.1.join("  ")));
        }
    };
    let found = two_at_a_time(queue, |worker, (run, job)| {
        let title = format!("{} {}", job.machine.name(), job.module.with(&job.parameters));
        say(worker, title.clone(), 0);
        let found = run_one(layout, run, &job, &mut |event| {
            let (Event::Line(text) | Event::Pending(text)) = event;
            if text.starts_with('[') && text.contains("] ") && !text.contains('.') {
                say(worker, format!("{title}: {text}"), 0);
            }
        });
        say(worker, String::new(), 1);
        (job.machine, found)
    });
    step.done();
    let mut machines = Vec::new();
    for Place { options, .. } in places {
        let own = found.iter().filter(|(machine, _)| *machine == options.machine());
        machines.push(Results {
            machine: options.machine().name().to_owned(),
            release: layout.release(options.kernel)?,
            runs: join(own.map(|(_, run)| run.clone())),
        });
    }
    Ok(All { machines })
}

/// Runs one machine. One that counts does the same every time, and fails the same way: a later attempt gets a word more on its kernel's
/// command line, which moves everything by some instructions. On Bochs there is nothing to move.
fn run_one(layout: &Layout, of: &Queued, job: &Job, event: &mut dyn FnMut(Event<'_>)) -> Run {
    let attempts = if job.machine == Machine::Amd { ATTEMPTS } else { 1 };
    let mut run = Run::default();
    for number in 1..=attempts {
        let mut job = job.clone();
        if number > 1 {
            job.append = format!("{} attempt={number}", job.append).trim().to_owned();
        }
        run = match gannet_lab::run(layout, &job, event) {
            Ok(outcome) => gather(of, &outcome),
            Err(error) => Run { remarks: vec![format!("{error:#}")], ..empty(of) },
        };
        let missing = run.guests.values().any(|guest| guest.get().is_none());
        if run.refused.is_some() || (run.remarks.is_empty() && !missing) {
            break;
        }
    }
    run
}

/// One run for each module with its parameters, however many machines shared it.
fn join(machines: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for machine in machines {
        let same =
            |run: &&mut Run| run.module == machine.module && run.parameters == machine.parameters;
        match runs.iter_mut().find(same) {
            Some(run) => {
                run.refused = run.refused.take().or(machine.refused);
                run.remarks.extend(machine.remarks);
                run.workloads.extend(machine.workloads);
                run.guests.extend(machine.guests);
            }
            None => runs.push(machine),
        }
    }
    runs
}

/// A part: `bench ARGUMENTS`, or `guest TASK WORDS`.
enum Part<'a> {
    Bench(&'a str),
    Guest(&'a str, &'a str),
}

fn part(text: &str) -> Part<'_> {
    let (kind, rest) = text.split_once(' ').unwrap_or((text, ""));
    let (task, words) = rest.split_once(' ').unwrap_or((rest, ""));
    if kind == "guest" { Part::Guest(task, words) } else { Part::Bench(rest) }
}

fn job(layout: &Layout, options: &Options, tools: &Tools, run: &Queued) -> Result<Job> {
    let mut command = String::new();
    for (number, text) in run.parts.iter().enumerate() {
        let how = format!("--unit instructions --module {}", run.module);
        let what = match part(text) {
            Part::Bench(arguments) => format!("run {arguments} {how} --json /out/{number}"),
            Part::Guest(task, words) => format!(
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
    if run.parts.iter().any(|text| matches!(part(text), Part::Guest(..))) {
        job.files.push((layout.vmlinux(guest::KERNEL), "guest/vmlinux".to_owned()));
        let initramfs = guest::initramfs_with_programs(layout, guest::KERNEL)?;
        job.texts.push(("guest/initramfs".to_owned(), initramfs));
    }
    job.counting = true;
    job.plugin = Some(tools.plugin.clone());
    Ok(job)
}

fn empty(of: &Queued) -> Run {
    Run { module: of.module.clone(), parameters: of.parameters.clone(), ..Run::default() }
}

/// Reads what a machine left. The records of the plugin come in the order of what they count.
fn gather(of: &Queued, outcome: &Outcome) -> Run {
    let mut run = empty(of);
    run.refused = outcome.refusal();
    if run.refused.is_some() {
        return run;
    }
    // Without its time stamp, so that the same complaint reads the same.
    let complaint = |line: &str| line.split_once("] ").map_or(line, |(_, text)| text).to_owned();
    run.remarks.extend(outcome.faults().into_iter().map(complaint));
    if outcome.status.is_none() {
        run.remarks.push(format!("the machine ended early:\n{}", outcome.tail(15)));
    }
    let mut records = outcome.counts.iter();
    let mut expected = 0;
    let mut record = || {
        expected += 1;
        records.next()
    };
    for (number, text) in of.parts.iter().enumerate() {
        let file = outcome.files.get(&number.to_string()).map_or(&[][..], Vec::as_slice);
        let none = || Found::Missing { missing: console(number, outcome).complaint() };
        match part(text) {
            Part::Bench(arguments) => match serde_json::from_slice::<bench::Report>(file) {
                Ok(report) => run.workloads.extend(report.workloads.into_iter().map(|entry| {
                    let record = if entry.markers { record() } else { None };
                    (entry.name.clone(), workload(entry, record))
                })),
                Err(_) => {
                    let names = arguments.split(' ').take_while(|word| !word.starts_with('-'));
                    run.workloads.extend(names.map(|name| (name.to_owned(), none())));
                }
            },
            Part::Guest(task, _) => {
                let found = match serde_json::from_slice::<BootReport>(file) {
                    Ok(BootReport { ticks_between: Some(instructions), .. }) => {
                        let record = record();
                        let part = |prefix| record.map(|r| part_of(r, prefix)).unwrap_or_default();
                        let (host, exits) = (part("host."), part("exit."));
                        let figures = console(number, outcome).figures();
                        Found::Measured(Box::new(Task { instructions, host, exits, figures }))
                    }
                    Ok(BootReport { end, .. }) => {
                        Found::Missing { missing: format!("the task did not end: {end}") }
                    }
                    Err(_) => Found::Missing { missing: console(number, outcome).complaint() },
                };
                run.guests.insert(task.to_owned(), found);
            }
        }
    }
    let seen = outcome.counts.len();
    if expected != seen {
        run.remarks
            .push(format!("operations are left out: {expected} counts expected, {seen} seen"));
        // Nobody knows which belongs to which.
        for figures in run.workloads.values_mut() {
            if let Found::Measured(figures) = figures {
                (figures.host, figures.exits) = Default::default();
            }
        }
        for task in run.guests.values_mut() {
            if let Found::Measured(task) = task {
                (task.host, task.exits) = Default::default();
            }
        }
    }
    run
}

/// What the console shows of one part.
struct Shown<'a>(Vec<&'a str>);

fn console(number: usize, outcome: &Outcome) -> Shown<'_> {
    let head = format!("{PART}{number}");
    let lines = outcome.console.lines().skip_while(|line| *line != head).skip(1);
    Shown(lines.take_while(|line| !line.starts_with(PART)).collect())
}

impl Shown<'_> {
    /// Why a part left nothing: what it said last.
    fn complaint(&self) -> String {
        let said = |line: &&&str| line.starts_with("exitbench: ") || line.starts_with("error: ");
        self.0.iter().rfind(said).unwrap_or(&"it left no report").to_string()
    }

    fn figures(&self) -> BTreeMap<String, f64> {
        let figure = |line: &&str| {
            let (name, value) = line.split_once(FIGURE)?.1.trim().split_once(' ')?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        };
        self.0.iter().filter_map(figure).collect()
    }
}

fn workload(entry: bench::Entry, record: Option<&Counts>) -> Found<Figures> {
    let (Some(min), Some(median), Some(max)) = (entry.min, entry.median, entry.max) else {
        let failed = entry.failed.map(|reason| format!("failed: {reason}"));
        let skipped = entry.skipped.map(|reason| format!("skipped: {reason}"));
        let missing = failed.or(skipped).unwrap_or_else(|| "no figures".to_owned());
        return Found::Missing { missing };
    };
    let per = entry.marker_iterations.max(1) as f64;
    let each = |counts: BTreeMap<String, u64>| -> BTreeMap<String, f64> {
        let one = |(name, n): (String, u64)| (name, (n as f64 / per * 1000.0).round() / 1000.0);
        counts.into_iter().map(one).collect()
    };
    let part = |prefix| record.map(|r| each(part_of(r, prefix))).unwrap_or_default();
    let (host, exits, statistics) = (part("host."), part("exit."), each(entry.statistics));
    let iterations = entry.iterations;
    Found::Measured(Box::new(Figures { min, median, max, iterations, host, exits, statistics }))
}

/// Those of a record's counts whose names begin so, without that, and without what did not happen; `instructions` stays also where
/// there were none, which tells a count of nothing from no count.
fn part_of(record: &Counts, prefix: &str) -> BTreeMap<String, u64> {
    let part = |(name, count): (&String, &u64)| {
        let name = name.strip_prefix(prefix)?.to_owned();
        (*count > 0 || name == "instructions").then_some((name, *count))
    };
    record.iter().filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queued() -> Queued {
        let parts = ["bench cpuid --iterations 9", "bench timer --iterations 9", "guest forks"];
        let (module, parameters) = ("gannet".to_owned(), "npt=0".to_owned());
        Queued { module, parameters, parts: parts.map(str::to_owned).into() }
    }

    fn outcome() -> Outcome {
        let json = r#"{"unit":"instructions","workloads":[{"name":"cpuid","min":1,"median":2,
            "max":3,"iterations":9,"markers":true,"marker_iterations":2,"statistics":{"vm.x":2}}]}"#;
        let boot = r#"{"ticks_between":77,"end":"reset"}"#;
        let files = [("0".to_owned(), json.into()), ("2".to_owned(), boot.into())];
        let count = |pairs: &[(&str, u64)]| {
            pairs.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect::<Counts>()
        };
        let first = count(&[("rdmsr", 4), ("host.rdmsr", 2), ("host.cpuid", 0), ("exit.cpuid", 2)]);
        Outcome {
            loaded: Some(true),
            status: Some(0),
            console:
                "MECHANISMS-PART 0\n[1/1] cpuid\nMECHANISMS-PART 1\nexitbench: no such workload\n\
                      MECHANISMS-PART 2\nGANNET-FIGURE rate 2.5\n"
                    .into(),
            files: files.into_iter().collect(),
            counts: vec![first, count(&[("host.cpuid", 5)])],
            ..Outcome::default()
        }
    }

    #[test]
    fn what_a_machine_left_goes_to_its_workloads() {
        let run = gather(&queued(), &outcome());
        let cpuid = run.workloads["cpuid"].get().unwrap();
        assert_eq!(cpuid.host, BTreeMap::from([("rdmsr".to_owned(), 1.0)]));
        assert_eq!((cpuid.exits["cpuid"], cpuid.statistics["vm.x"]), (1.0, 1.0));
        assert_eq!(run.workloads["timer"].missing(), Some("exitbench: no such workload"));
        let task = run.guests["forks"].get().unwrap();
        assert_eq!((task.instructions, task.host["cpuid"]), (77, 5));
        assert_eq!(task.figures["rate"], 2.5);
        assert!(run.remarks.is_empty() && run.refused.is_none());
    }

    #[test]
    fn machines_that_share_a_module_and_its_parameters_are_one_run() {
        let one = gather(&queued(), &outcome());
        let mut other = one.clone();
        other.workloads.clear();
        other.guests.insert("pingpong".into(), Found::Missing { missing: "no".into() });
        let runs = join([one, other].into_iter());
        assert_eq!((runs.len(), runs[0].workloads.len(), runs[0].guests.len()), (1, 2, 2));
    }

    #[test]
    fn counts_that_do_not_match_are_not_attributed() {
        let mut outcome = outcome();
        outcome.counts.pop();
        let run = gather(&queued(), &outcome);
        assert!(run.workloads["cpuid"].get().unwrap().host.is_empty() && run.remarks.len() == 1);
    }

    #[test]
    fn a_module_that_refuses_leaves_its_reason_and_nothing_else() {
        let dmesg = "[ 1.0] gannet: npt=0 is not implemented".to_owned();
        let outcome = Outcome { loaded: Some(false), dmesg, ..outcome() };
        let run = gather(&queued(), &outcome);
        assert_eq!(run.refused.as_deref(), Some("gannet: npt=0 is not implemented"));
        assert!(run.workloads.is_empty() && run.guests.is_empty());
    }
}
