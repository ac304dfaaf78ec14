//! Performs the runs of `machines.rs`, two at a time, and gathers what they found. Each counts instructions, so neither disturbs the other.

use super::machines::{Machine, Part};
use super::results::{All, Figures, Guest, Results, Run, Task, Workload};
use crate::bench::{self, Tools};
use crate::options::Options;
use crate::progress::Step;
use anyhow::Result;
use gannet_lab::{Counts, Event, Job, Layout, Machine as On, Outcome, guest};
use serde::Deserialize;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

/// Machines that run at once.
const AT_ONCE: usize = 2;

/// A line with which the machine's command announces part number N.
const PART: &str = "MECHANISMS-PART ";

/// A line by which a guest's task tells a figure of its own: its name and the number.
const FIGURE: &str = "GANNET-FIGURE ";

/// What `exitbench boot --report` writes, as far as it is read here.
#[derive(Deserialize)]
struct BootReport {
    ticks_between: Option<u64>,
    end: String,
}

/// One of the lab's machines, with what its runs need.
pub struct Place {
    pub options: Options,
    pub tools: Tools,
    pub machines: Vec<Machine>,
}

/// One run in the queue: its number, the number of its place, what it does.
struct Queued<'a> {
    number: usize,
    place: usize,
    machine: &'a Machine,
    job: Job,
}

/// Runs them all, those of the last place first: Bochs takes longest. A machine that fails is a run with a remark; only a lab that does
/// not work at all is an error.
pub fn measure(layout: &Layout, places: &[Place]) -> Result<All> {
    let mut queue = VecDeque::new();
    for (place, Place { options, tools, machines }) in places.iter().enumerate().rev() {
        for machine in machines {
            let job = job(layout, options, tools, machine)?;
            queue.push_back(Queued { number: queue.len(), place, machine, job });
        }
    }
    let total = queue.len();
    let names: Vec<&str> = places.iter().map(|place| place.options.machine().name()).collect();
    let kernel = places.first().map_or(String::new(), |place| place.options.kernel.to_string());
    let step =
        Step::start(layout, &format!("measuring mechanisms on {}, {kernel}", names.join(" and ")));
    let queue = Mutex::new(queue);
    let shown = Mutex::new(Shown { lines: [const { String::new() }; AT_ONCE], done: 0 });
    let runs = Mutex::new(Vec::new());
    let say = |worker: usize, text: String, done: usize| {
        if let Ok(mut shown) = shown.lock() {
            shown.lines[worker] = text;
            shown.done += done;
            step.say(&format!("{}/{total} {}", shown.done, shown.lines.join("  ")));
        }
    };
    std::thread::scope(|scope| {
        for worker in 0..AT_ONCE {
            let (queue, runs, say) = (&queue, &runs, &say);
            scope.spawn(move || {
                let next = || queue.lock().ok()?.pop_front();
                while let Some(Queued { number, place, machine, job }) = next() {
                    let title = format!("{} {}", job.machine.name(), machine.title());
                    say(worker, title.clone(), 0);
                    let mut event = |event: Event<'_>| {
                        let (Event::Line(text) | Event::Pending(text)) = event;
                        if text.starts_with('[') && text.contains("] ") && !text.contains('.') {
                            say(worker, format!("{title}: {text}"), 0);
                        }
                    };
                    // QEMU aborts now and then, or loses an event of a guest's (docs/lab.md). Bochs does the same every time.
                    let attempts = if job.machine == On::Amd { ATTEMPTS } else { 1 };
                    let mut run = attempt(layout, machine, &job, 1, &mut event);
                    for attempted in 2..=attempts {
                        if !is_incomplete(&run) {
                            break;
                        }
                        run = attempt(layout, machine, &job, attempted, &mut event);
                    }
                    if let Ok(mut runs) = runs.lock() {
                        runs.push((number, place, run));
                    }
                    say(worker, String::new(), 1);
                }
            });
        }
    });
    step.done();
    let mut runs = runs.into_inner().unwrap_or_default();
    runs.sort_by_key(|(number, ..)| *number);
    let mut machines = Vec::new();
    for (place, Place { options, .. }) in places.iter().enumerate() {
        let own = runs.iter().filter(|(_, of, _)| *of == place);
        machines.push(Results {
            machine: options.machine().name().to_owned(),
            release: layout.release(options.kernel)?,
            runs: join(own.map(|(.., run)| run.clone())),
        });
    }
    Ok(All { machines })
}

/// How often a machine is tried at most.
const ATTEMPTS: u32 = 3;

/// Runs one machine. A machine that counts does the same every time, and fails the same way: a later attempt gets a word more on its
/// kernel's command line, which moves everything by some instructions.
fn attempt(
    layout: &Layout,
    machine: &Machine,
    job: &Job,
    number: u32,
    event: &mut dyn FnMut(Event<'_>),
) -> Run {
    let mut job = job.clone();
    if number > 1 {
        job.append = format!("{} attempt={number}", job.append).trim().to_owned();
    }
    match gannet_lab::run(layout, &job, event) {
        Ok(outcome) => gather(machine, &outcome),
        Err(error) => failed(machine, format!("{error:#}")),
    }
}

/// Whether a run lacks what another attempt may bring.
fn is_incomplete(run: &Run) -> bool {
    let missing = |guest: &Guest| matches!(guest, Guest::Missing { .. });
    run.refused.is_none() && (!run.remarks.is_empty() || run.guests.values().any(missing))
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

/// What the progress display shows.
struct Shown {
    lines: [String; AT_ONCE],
    done: usize,
}

fn job(layout: &Layout, options: &Options, tools: &Tools, machine: &Machine) -> Result<Job> {
    let name = machine.module.name();
    let mut command = String::new();
    let mut guests = false;
    for (number, part) in machine.parts.iter().enumerate() {
        command += &format!("echo {PART}{number}\n");
        command += &match part {
            Part::Bench(arguments) => format!(
                "exitbench run {arguments} --unit instructions --module {name} --json /out/{number}\n"
            ),
            Part::Guest { task, more, from, to } => {
                guests = true;
                format!(
                    "exitbench boot --timeout 120 --kernel /guest/vmlinux --initrd /guest/initramfs --append \
                     '{} gannet.task={task} {more}' --from {from} --expect {to} --unit instructions \
                     --module {name} --report /out/{number}\n",
                    guest::APPEND
                )
            }
        };
    }
    command += "true\n";
    let mut job = Job::new(options.machine(), options.kernel, machine.module, &command)
        .file(&tools.exitbench, "bin/exitbench");
    job.parameters = machine.parameters.to_owned();
    if guests {
        job.files.push((layout.vmlinux(guest::KERNEL), "guest/vmlinux".to_owned()));
        let initramfs = guest::initramfs_with_programs(layout, guest::KERNEL)?;
        job.texts.push(("guest/initramfs".to_owned(), initramfs));
    }
    job.counting = true;
    job.plugin = Some(tools.plugin.clone());
    Ok(job)
}

fn empty(machine: &Machine) -> Run {
    Run {
        module: machine.module.name().to_owned(),
        parameters: machine.parameters.to_owned(),
        ..Run::default()
    }
}

fn failed(machine: &Machine, reason: String) -> Run {
    let mut run = empty(machine);
    run.remarks.push(reason);
    run
}

/// Reads what a machine left.
fn gather(machine: &Machine, outcome: &Outcome) -> Run {
    let mut run = empty(machine);
    run.refused = outcome.refusal();
    if run.refused.is_some() {
        return run;
    }
    run.remarks.extend(outcome.faults().into_iter().map(without_time));
    if outcome.status.is_none() {
        run.remarks.push(format!("the machine ended early:\n{}", outcome.tail(15)));
    }
    let parts: Vec<Found> = (0..machine.parts.len())
        .map(|number| find(&machine.parts[number], number, outcome))
        .collect();
    let marked: usize = parts.iter().map(Found::records).sum();
    if marked != outcome.counts.len() {
        let seen = outcome.counts.len();
        run.remarks.push(format!("operations are left out: {marked} counts expected, {seen} seen"));
    }
    let mut records = outcome.counts.iter().filter(|_| marked == outcome.counts.len());
    for found in parts {
        match found {
            Found::Bench(entries) => {
                for entry in entries {
                    let record = if entry.markers { records.next() } else { None };
                    run.workloads.insert(entry.name.clone(), workload(entry, record));
                }
            }
            Found::Guest(name, Ok((instructions, figures))) => {
                let record = records.next();
                let task = Task {
                    instructions,
                    host: record.map(|r| part_of(r, "host.")).unwrap_or_default(),
                    exits: record.map(|r| part_of(r, "exit.")).unwrap_or_default(),
                    figures,
                };
                run.guests.insert(name, Guest::Ran(Box::new(task)));
            }
            Found::Guest(name, Err(missing)) => {
                run.guests.insert(name, Guest::Missing { missing });
            }
            Found::Nothing(names, missing) => {
                for name in names {
                    run.workloads.insert(name, Workload::Missing { missing: missing.clone() });
                }
            }
        }
    }
    run
}

/// What one part left.
enum Found {
    Bench(Vec<bench::Entry>),
    Guest(String, Result<(u64, BTreeMap<String, f64>), String>),
    /// Names of workloads, and why there is no report.
    Nothing(Vec<String>, String),
}

impl Found {
    /// How many records of the plugin belong to it.
    fn records(&self) -> usize {
        match self {
            Found::Bench(entries) => entries.iter().filter(|entry| entry.markers).count(),
            Found::Guest(_, Ok(_)) => 1,
            _ => 0,
        }
    }
}

fn find(part: &Part, number: usize, outcome: &Outcome) -> Found {
    let file = outcome.files.get(&number.to_string());
    match part {
        Part::Bench(arguments) => {
            match file.and_then(|json| serde_json::from_slice::<bench::Report>(json).ok()) {
                Some(report) => Found::Bench(report.workloads),
                None => {
                    let names = arguments.split(' ').take_while(|word| !word.starts_with('-'));
                    let names = names.filter(|name| !name.is_empty()).map(str::to_owned).collect();
                    Found::Nothing(names, complaint(number, outcome))
                }
            }
        }
        Part::Guest { task, .. } => {
            let report = file.and_then(|json| serde_json::from_slice::<BootReport>(json).ok());
            let found = match report {
                Some(BootReport { ticks_between: Some(ticks), .. }) => {
                    Ok((ticks, told(console(number, outcome))))
                }
                Some(BootReport { end, .. }) => Err(format!("the task did not end: {end}")),
                None => Err(complaint(number, outcome)),
            };
            Found::Guest((*task).to_owned(), found)
        }
    }
}

/// What the console shows of one part.
fn console(number: usize, outcome: &Outcome) -> impl Iterator<Item = &str> {
    let head = format!("{PART}{number}");
    let lines = outcome.console.lines().skip_while(move |line| *line != head).skip(1);
    lines.take_while(|line| !line.starts_with(PART))
}

/// Why a part left nothing: what it said last.
fn complaint(number: usize, outcome: &Outcome) -> String {
    let said = |line: &&str| line.starts_with("exitbench: ") || line.starts_with("error: ");
    let line = console(number, outcome).filter(said).last();
    line.unwrap_or("it left no report").to_owned()
}

fn told<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeMap<String, f64> {
    let figure = |line: &str| {
        let (name, value) = line.split_once(FIGURE)?.1.trim().split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    };
    lines.filter_map(figure).collect()
}

fn workload(entry: bench::Entry, record: Option<&Counts>) -> Workload {
    let (Some(min), Some(median), Some(max)) = (entry.min, entry.median, entry.max) else {
        let missing = match (entry.failed, entry.skipped) {
            (Some(reason), _) => format!("failed: {reason}"),
            (None, Some(reason)) => format!("skipped: {reason}"),
            (None, None) => "no figures".to_owned(),
        };
        return Workload::Missing { missing };
    };
    let per = entry.marker_iterations.max(1) as f64;
    let each = |counts: BTreeMap<String, u64>| -> BTreeMap<String, f64> {
        let one =
            |(name, count): (String, u64)| (name, (count as f64 / per * 1000.0).round() / 1000.0);
        counts.into_iter().map(one).collect()
    };
    Workload::Measured(Box::new(Figures {
        min,
        median,
        max,
        iterations: entry.iterations,
        host: record.map(|r| each(part_of(r, "host."))).unwrap_or_default(),
        exits: record.map(|r| each(part_of(r, "exit."))).unwrap_or_default(),
        statistics: each(entry.statistics),
    }))
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

/// A line of the kernel's log without its time stamp, so that the same complaint reads the same.
fn without_time(line: &str) -> String {
    line.split_once("] ").map_or(line, |(_, text)| text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gannet_lab::Module;

    fn machine() -> Machine {
        let guest = Part::Guest { task: "forks", more: "", from: "A", to: "B" };
        let parts = vec![
            Part::Bench("cpuid --iterations 9".into()),
            Part::Bench("timer --iterations 9".into()),
            guest,
        ];
        Machine { module: Module::Gannet, parameters: "npt=0", parts }
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
            console: "MECHANISMS-PART 0\nMECHANISMS-PART 1\nexitbench: no such workload\n\
                      MECHANISMS-PART 2\nGANNET-FIGURE rate 2.5\n"
                .into(),
            files: files.into_iter().collect(),
            counts: vec![first, count(&[("host.cpuid", 5)])],
            ..Outcome::default()
        }
    }

    #[test]
    fn what_a_machine_left_goes_to_its_workloads() {
        let run = gather(&machine(), &outcome());
        let Workload::Measured(cpuid) = &run.workloads["cpuid"] else { panic!("no figures") };
        assert_eq!(cpuid.host, BTreeMap::from([("rdmsr".to_owned(), 1.0)]));
        assert_eq!((cpuid.exits["cpuid"], cpuid.statistics["vm.x"]), (1.0, 1.0));
        let Workload::Missing { missing } = &run.workloads["timer"] else { panic!("figures") };
        assert_eq!(missing, "exitbench: no such workload");
        let Guest::Ran(task) = &run.guests["forks"] else { panic!("no task") };
        assert_eq!((task.instructions, task.host["cpuid"]), (77, 5));
        assert_eq!(task.figures["rate"], 2.5);
        assert!(run.remarks.is_empty() && run.refused.is_none());
    }

    #[test]
    fn machines_that_share_a_module_and_its_parameters_are_one_run() {
        let one = gather(&machine(), &outcome());
        let mut other = one.clone();
        other.workloads.clear();
        other.guests.insert("pingpong".into(), Guest::Missing { missing: "no".into() });
        let runs = join([one, other].into_iter());
        assert_eq!((runs.len(), runs[0].workloads.len(), runs[0].guests.len()), (1, 2, 2));
    }

    #[test]
    fn counts_that_do_not_match_are_not_attributed() {
        let mut outcome = outcome();
        outcome.counts.pop();
        let run = gather(&machine(), &outcome);
        let Workload::Measured(cpuid) = &run.workloads["cpuid"] else { panic!("no figures") };
        assert!(cpuid.host.is_empty() && run.remarks.len() == 1);
    }

    #[test]
    fn a_module_that_refuses_leaves_its_reason_and_nothing_else() {
        let dmesg = "[ 1.0] gannet: npt=0 is not implemented".to_owned();
        let outcome = Outcome { loaded: Some(false), dmesg, ..outcome() };
        let run = gather(&machine(), &outcome);
        assert_eq!(run.refused.as_deref(), Some("gannet: npt=0 is not implemented"));
        assert!(run.workloads.is_empty() && run.guests.is_empty());
    }
}
