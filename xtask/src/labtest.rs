//! Tests that run in a machine: those of the lab itself, and the programs that `lab/tests.list` names.
//!
//! A line of the list is `name | machines | kernels | modules | cpus | silence | command`, with `all` or a list with commas for machines
//! (`amd,intel`), kernels (`6.12,6.1`) and modules (`stock,gannet,none`). A module's parameters follow its name: `stock npt=0,gannet
//! npt=0 keep_roots=0`; `all npt=0` is both. After the number of CPUs comes what they have besides (`+la57`, on `amd`) or another
//! model (`core2_penryn_t9600`, on `intel`), or `vmx-locked`: firmware has locked VMX away, or a word for the host kernel's command line
//! (`mitigations=auto`, which undoes the lab's `mitigations=off`). `silence` is `-`, or for how many seconds the
//! command may print nothing (`gannet_lab::Patience`). The programs of the packages under `tests/` are in `/bin` of the machine, and so is
//! exitbench; the guest's kernel and initramfs are `/guest/vmlinux` and `/guest/initramfs` where the command names them, those of a
//! guest with the older kernel `/guest-6.1/vmlinux` and `/guest-6.1/initramfs`. A command reports `ok NAME`, `not ok NAME: reason` or
//! `skip NAME: reason` on lines of their own and ends with 0; afterwards the host's log must be clean.

use crate::progress::Step;
use crate::tally::{Tally, Verdict};
use crate::tools::Tools;
use crate::{boot, options::Options};
use anyhow::{Context, Result, bail};
use gannet_lab::{
    BY_OWN_NAME, Emulator, Job, Kernel, Layout, MACHINES, Machine, Module, Outcome, guest, programs,
};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Mutex, mpsc};
use std::time::Instant;

/// What a machine's outcome means.
type Judge = Box<dyn Fn(&Outcome) -> Vec<(String, Verdict)> + Send>;

/// One machine to run, and what to make of its outcome.
pub struct LabTest {
    name: String,
    job: Job,
    judge: Judge,
    /// Whether warnings in the host's log are a failure of their own.
    clean_log: bool,
}

impl LabTest {
    /// What it shows.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn test(
    name: String,
    job: Job,
    judge: impl Fn(&Outcome) -> Result<(), String> + Send + 'static,
) -> LabTest {
    let title = name.clone();
    let judge = Box::new(move |outcome: &Outcome| vec![(title.clone(), judge(outcome).into())]);
    LabTest { name, job, judge, clean_log: true }
}

fn expect(holds: bool, outcome: &Outcome) -> Result<(), String> {
    if holds {
        return Ok(());
    }
    let status = outcome.status.map_or("no answer".to_owned(), |status| format!("status {status}"));
    Err(format!("{status}; the console ends with:\n{}", outcome.tail(20)))
}

/// The kernel, and the machine where it is not the first one.
fn under(options: &Options, kernel: Kernel) -> String {
    match options.machine() {
        Machine::Amd => kernel.to_string(),
        other => format!("{kernel} on {}", other.name()),
    }
}

/// The machine itself: the stock module loads, a command's status and files come back.
pub fn machine_runs(options: &Options, kernel: Kernel) -> LabTest {
    let command = "test -c /dev/kvm && uname -r >/out/release && exit 7";
    let job = Job::new(options.machine(), kernel, Module::Stock, command);
    let title = format!("lab: kernel {} runs the stock module", under(options, kernel));
    test(title, job, move |outcome| {
        let release = outcome.files.get("release").map(Vec::as_slice).unwrap_or_default();
        let right = release.starts_with(kernel.series().as_bytes());
        expect(right && outcome.loaded == Some(true) && outcome.status == Some(7), outcome)
    })
}

/// A Linux guest boots to its user space.
pub fn boots(
    layout: &Layout,
    options: &Options,
    tools: &Tools,
    kernel: Kernel,
    module: Module,
    cpus: u32,
) -> Result<LabTest> {
    let mut job = boot::job(layout, options, tools, module, cpus, boot::Kind::PLAIN)?;
    job.kernel = kernel;
    let name = format!(
        "lab: a Linux guest with {cpus} CPU{} boots on {} under {}",
        if cpus == 1 { "" } else { "s" },
        module.name(),
        under(options, kernel)
    );
    Ok(test(name, job, boot::judge))
}

/// gannet.ko comes and goes many times.
pub fn loads_and_unloads(options: &Options, kernel: Kernel) -> LabTest {
    let command = "for i in 1 2 3 4 5 6 7 8 9 10; do insmod /modules/gannet.ko || exit 1; \
                   test -c /dev/kvm || exit 2; rmmod gannet || exit 3; test -e /dev/kvm && exit 4; echo $i; done; true";
    let job = Job::new(options.machine(), kernel, Module::None, command);
    let title =
        format!("lab: gannet.ko loads and unloads ten times under {}", under(options, kernel));
    test(title, job, |outcome| expect(outcome.succeeded(), outcome))
}

/// gannet.ko leaves SVM and VMX to whom they belong.
pub fn refuses_beside_stock(options: &Options, kernel: Kernel) -> LabTest {
    let command = "insmod /modules/gannet.ko && exit 9; dmesg | grep -i gannet >/out/reason";
    let job = Job::new(options.machine(), kernel, Module::Stock, command);
    let title =
        format!("lab: gannet.ko refuses beside the stock module under {}", under(options, kernel));
    test(title, job, |outcome| {
        expect(outcome.succeeded() && outcome.files.contains_key("reason"), outcome)
    })
}

/// gannet.ko says why it does not load where there is no SVM.
pub fn refuses_without_svm(options: &Options, kernel: Kernel) -> LabTest {
    let command = "insmod /modules/gannet.ko && exit 9; dmesg | grep -i 'gannet.*SVM' && exit 0";
    let mut job = Job::new(options.machine(), kernel, Module::None, command);
    job.processor = "EPYC,-svm,-npt,+x2apic".to_owned();
    test(format!("lab: gannet.ko refuses without SVM under {kernel}"), job, |outcome| {
        expect(outcome.succeeded(), outcome)
    })
}

/// The emulator's plugin counts what a known exit path does: one VMRUN or VMRESUME per CPUID exit on the stock module.
pub fn counts_operations(options: &Options, tools: &Tools) -> LabTest {
    let command = "exitbench run cpuid --unit instructions --iterations 50";
    let mut job = Job::new(options.machine(), Kernel::V6_12, Module::Stock, command)
        .file(&tools.exitbench, "bin/exitbench");
    job.counting = true;
    job.plugin = Some(tools.plugin.clone());
    // What an exit of the stock module takes besides, and what it never executes on that vendor's CPUs.
    let (entry, besides, never) = if options.machine().has_svm() {
        ("vmrun", "vmload", "vmresume")
    } else {
        ("vmresume", "vmread", "vmrun")
    };
    let (entry_named, machine) = (entry.to_uppercase(), options.machine().name());
    let name = format!("lab: the plugin counts one {entry_named} per exit on {machine}");
    test(name, job, move |outcome| {
        let count = |name: &str| {
            outcome.counts.first().and_then(|c| c.get(name)).copied().unwrap_or_default()
        };
        // The guest's CPUIDs are the guest's, each ends a stretch of it, and the host executes none.
        let told = count("cpuid") == 100 && count("exit.cpuid") == 100 && count("host.cpuid") == 0;
        // A hundred exits, and perhaps a few of the host's own interrupts.
        let entered = (100..110).contains(&count(entry)) && count(never) == 0;
        if outcome.counts.len() == 1 && told && entered && count(besides) >= 2 * 100 {
            Ok(())
        } else {
            Err(format!("{:?}", outcome.counts))
        }
    })
}

/// Every program of the tests, and exitbench.
fn all_programs(layout: &Layout) -> Result<Vec<(PathBuf, String)>> {
    let mut files = test_programs(layout)?;
    let exitbench = programs::build_static(layout, "exitbench")?.join("exitbench");
    files.push((exitbench, "bin/exitbench".to_owned()));
    Ok(files)
}

/// The folders in a machine that hold a Linux guest, and its kernel.
pub const GUESTS: [(&str, Kernel); 5] = [
    ("guest", guest::KERNEL),
    ("guest-6.1", Kernel::V6_1),
    ("guest-c", guest::KERNEL),
    ("guest-kvm", guest::KERNEL),
    ("guest-kvm-linux", guest::KERNEL),
];

/// Adds the guests that the job's command names.
fn add_guests(layout: &Layout, job: &mut Job) -> Result<()> {
    for (folder, kernel) in GUESTS {
        if !job.command.contains(&format!("/{folder}/")) {
            continue;
        }
        let initramfs = match folder {
            "guest-c" => guest::initramfs_with_compiler(layout)?,
            "guest-kvm" | "guest-kvm-linux" => {
                let exitbench = programs::build_static(layout, "exitbench")?.join("exitbench");
                guest::initramfs_of_hypervisor(layout, &exitbench, folder == "guest-kvm-linux")?
            }
            _ => guest::initramfs_with_programs(layout, kernel)?,
        };
        job.files.push((layout.vmlinux(kernel), format!("{folder}/vmlinux")));
        job.texts.push((format!("{folder}/initramfs"), initramfs));
    }
    Ok(())
}

/// Gives a job of the user's own what those of the list find in the machine.
pub fn with_programs(layout: &Layout, job: &mut Job) -> Result<()> {
    job.files.extend(all_programs(layout)?);
    add_guests(layout, job)
}

/// What the processor has besides, or has not, or another model, or what firmware has done to it, or a word for the host kernel's
/// command line.
pub fn choose_processor(job: &mut Job, feature: &str) {
    match feature {
        "vmx-locked" => job.vmx_locked = true,
        _ if feature.starts_with(['+', '-']) => job.processor.push_str(&format!(",{feature}")),
        _ if feature.contains('=') => job.append = format!("{} {feature}", job.append),
        _ => job.processor = feature.to_owned(),
    }
}

/// Adds the tests that a list of the folder `lab` names.
pub fn from_list(
    layout: &Layout,
    options: &Options,
    built: &[Kernel],
    name: &str,
    tests: &mut Vec<LabTest>,
) -> Result<()> {
    let list = std::fs::read_to_string(layout.root.join("lab").join(name))
        .with_context(|| format!("lab/{name}"))?;
    let files = all_programs(layout)?;
    for (number, line) in list.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let entry = entry(line).with_context(|| format!("lab/{name}:{}", number + 1))?;
        if !entry.machines.contains(&options.machine()) {
            continue;
        }
        for kernel in entry.kernels {
            for (module, parameters) in &entry.modules {
                if *module != Module::Stock && !built.contains(&kernel) {
                    continue;
                }
                let mut job = Job::new(options.machine(), kernel, *module, &entry.command);
                job.parameters.clone_from(parameters);
                job.files.extend(files.iter().cloned());
                add_guests(layout, &mut job)?;
                for feature in &entry.features {
                    choose_processor(&mut job, feature);
                }
                job.cpus = entry.cpus;
                if let Some(seconds) = entry.quiet {
                    job.patience = job.patience.with_quiet(seconds);
                }
                let place = under(options, kernel);
                let name = format!("{} on {} under {place}", entry.name, module.with(parameters));
                let title = name.clone();
                let judge = Box::new(move |outcome: &Outcome| judge_lines(&title, outcome));
                // The stock module warns of exits that Bochs makes in its own way; the answers are what counts.
                let clean_log = !(*module == Module::Stock && options.machine() == Machine::Intel);
                tests.push(LabTest { name, job, judge, clean_log });
            }
        }
    }
    Ok(())
}

struct Entry {
    name: String,
    machines: Vec<Machine>,
    kernels: Vec<Kernel>,
    /// With the parameters of each.
    modules: Vec<(Module, String)>,
    cpus: u32,
    /// What the host's CPUs have besides or, without a sign, are, in the emulator's words.
    features: Vec<String>,
    /// How many seconds the command may be silent, where that is longer than the machine's own patience.
    quiet: Option<u64>,
    command: String,
}

fn entry(line: &str) -> Result<Entry> {
    let fields: Vec<&str> = line.splitn(7, '|').map(str::trim).collect();
    let [name, machines, kernels, modules, cpus, quiet, command] = fields[..] else {
        bail!("seven fields separated by | are wanted: {line}");
    };
    let machines = match machines {
        "all" => MACHINES.to_vec(),
        some => some.split(',').map(|m| m.trim().parse()).collect::<Result<_>>()?,
    };
    let kernels = match kernels {
        "all" => BY_OWN_NAME.to_vec(),
        some => some.split(',').map(|k| k.trim().parse()).collect::<Result<_>>()?,
    };
    let mut loaded = Vec::new();
    for one in modules.split(',') {
        let mut words = one.split_whitespace();
        let chosen = match words.next().unwrap_or_default() {
            "all" => vec![Module::Stock, Module::Gannet],
            "stock" => vec![Module::Stock],
            "gannet" => vec![Module::Gannet],
            "none" => vec![Module::None],
            other => bail!("no such module: {other}"),
        };
        let parameters = words.collect::<Vec<_>>().join(" ");
        loaded.extend(chosen.into_iter().map(|module| (module, parameters.clone())));
    }
    let modules = loaded;
    let mut words = cpus.split_whitespace();
    let cpus = words.next().unwrap_or_default().parse()?;
    let features = words.map(str::to_owned).collect();
    let quiet = match quiet {
        "-" => None,
        seconds => Some(seconds.parse()?),
    };
    let (name, command) = (name.into(), command.into());
    Ok(Entry { name, machines, kernels, modules, cpus, features, quiet, command })
}

/// The programs of every package under `tests/`, and their places in the machine.
fn test_programs(layout: &Layout) -> Result<Vec<(PathBuf, String)>> {
    let mut programs = Vec::new();
    let Ok(folders) = std::fs::read_dir(layout.root.join("tests")) else { return Ok(programs) };
    for folder in folders {
        let Ok(manifest) = std::fs::read_to_string(folder?.path().join("Cargo.toml")) else {
            continue;
        };
        // The package's name comes first; those of its programs follow, where they differ from it.
        let name = |line: &str| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == "name").then(|| value.trim().trim_matches('"').to_owned())
        };
        let names: Vec<String> = manifest.lines().filter_map(name).collect();
        let Some(package) = names.first() else { continue };
        let built = programs::build_static(layout, package)?;
        let places = names.iter().map(|name| (built.join(name), format!("bin/{name}")));
        programs.extend(places.filter(|(path, _)| path.is_file()));
    }
    Ok(programs)
}

/// Reads `ok`, `not ok` and `skip` lines.
fn judge_lines(title: &str, outcome: &Outcome) -> Vec<(String, Verdict)> {
    let mut found = Vec::new();
    for line in outcome.console.lines() {
        let split = |rest: &str| {
            let (name, reason) = rest.split_once(": ").unwrap_or((rest, ""));
            (format!("{title}: {name}"), reason.to_owned())
        };
        if let Some(name) = line.strip_prefix("ok ") {
            found.push((format!("{title}: {name}"), Verdict::Passed));
        } else if let Some((name, reason)) = line.strip_prefix("not ok ").map(split) {
            found.push((name, Verdict::Failed(reason)));
        } else if let Some((name, reason)) = line.strip_prefix("skip ").map(split) {
            found.push((name, Verdict::Skipped(reason)));
        }
    }
    let failed = found.iter().any(|(_, verdict)| matches!(verdict, Verdict::Failed(_)));
    if !failed && !outcome.succeeded() {
        let refusal = outcome.refusal().map(|r| format!("{r}\n")).unwrap_or_default();
        let reason = format!("{refusal}status {:?}; {}", outcome.status, outcome.tail(20));
        found.push((format!("{title}: ends well"), Verdict::Failed(reason)));
    } else if found.is_empty() {
        found.push((title.to_owned(), Verdict::Passed));
    }
    found
}

/// Runs them, two at a time, and records each when it has ended.
pub fn run_all(layout: &Layout, tests: Vec<LabTest>, tally: &mut Tally) {
    let total = tests.len();
    let step = Step::start(layout, "lab tests");
    let queue: Mutex<VecDeque<LabTest>> = Mutex::new(tests.into());
    let next = || queue.lock().ok()?.pop_front();
    let mut ended = 0;
    std::thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..2 {
            let sender = sender.clone();
            let (next, step) = (&next, &step);
            scope.spawn(move || {
                while let Some(test) = next() {
                    step.say(&test.name);
                    let began = Instant::now();
                    let records = run_twice_if_need_be(layout, &test);
                    if sender.send((test.name, began.elapsed(), records)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (name, took, records) in results {
            ended += 1;
            step.beside(|| {
                println!("{ended:>3} of {total}: {name}, {} s", took.as_secs());
                for (name, verdict) in records {
                    tally.record(&name, verdict);
                }
            });
        }
    });
    step.done();
    if ended != total {
        tally.record("lab tests end", Err(format!("{ended} of {total} did")));
    }
}

/// The emulator delivers an interrupt twice now and then, to stock KVM's guests as to ours (docs/lab.md).
/// So a machine with a few failures is run again, and what passes there has passed; the first try is
/// told. Warnings in the host's log are never forgiven, and neither is what fails as often as it is run.
const FORGIVEN: usize = 3;

/// How often a machine is run at most. Stock KVM is asked once more: what is shown there is that a test asks for what KVM
/// does, and one time is enough for that.
fn attempts(module: Module) -> usize {
    if module == Module::Stock { 3 } else { 2 }
}

fn run_twice_if_need_be(layout: &Layout, test: &LabTest) -> Vec<(String, Verdict)> {
    let mut first = run_one(layout, test);
    // Of a machine that did not come to its end nothing is known but that: its records are those of the next. The abort is
    // the emulator's own, with either module and on every kernel (docs/lab.md).
    if let Some(why) = abort_of_emulator(&first) {
        println!("note  {}: the emulator aborted, run again: {why}", test.name);
        first = run_one(layout, test);
    }
    let failed = |records: &[(String, Verdict)]| {
        records.iter().filter(|(_, v)| matches!(v, Verdict::Failed(_))).count()
    };
    // Bochs does the same every time.
    let repeats = test.job.machine.emulator() == Emulator::Bochs;
    if repeats || !(1..=FORGIVEN).contains(&failed(&first)) {
        return first;
    }
    let mut settled = first;
    for _ in 1..attempts(test.job.module) {
        if failed(&settled) != 0 {
            settled = settle(settled, &run_one(layout, test));
        }
    }
    settled
}

/// The words with which QEMU aborts now and then, whatever it runs.
const ABORT: &str = "assertion failed: (bql_locked())";

/// Why the run of these records is no answer: its one record is that the emulator aborted.
fn abort_of_emulator(records: &[(String, Verdict)]) -> Option<&str> {
    match records {
        [(_, Verdict::Failed(reason))] if reason.contains(ABORT) => Some(reason),
        _ => None,
    }
}

/// How the record ends of a log that is not clean.
const CLEAN_LOG: &str = ": the host's log is clean";

/// The records of a first run, with the failures that a second run did not repeat.
fn settle(first: Vec<(String, Verdict)>, second: &[(String, Verdict)]) -> Vec<(String, Verdict)> {
    for (name, verdict) in second {
        if let Verdict::Failed(reason) = verdict {
            println!("note  {name}: failed when run again: {reason}");
        }
    }
    let passed = |name: &str| second.iter().any(|(n, v)| n == name && matches!(v, Verdict::Passed));
    // Of a clean log there is no record.
    let new = |(name, _): &&(String, Verdict)| {
        name.ends_with(CLEAN_LOG) && !first.iter().any(|(n, _)| n == name)
    };
    let new: Vec<_> = second.iter().filter(new).cloned().collect();
    let settled = first.into_iter().map(|(name, verdict)| match verdict {
        Verdict::Failed(reason) if passed(&name) => {
            println!("note  {name}: failed once, then passed: {reason}");
            (name, Verdict::Passed)
        }
        verdict => (name, verdict),
    });
    settled.chain(new).collect()
}

fn run_one(layout: &Layout, test: &LabTest) -> Vec<(String, Verdict)> {
    let outcome = match gannet_lab::run(layout, &test.job, &mut |_| {}) {
        Ok(outcome) => outcome,
        Err(error) => return vec![(test.name.clone(), Verdict::Failed(format!("{error:#}")))],
    };
    let mut records = (test.judge)(&outcome);
    let faults = outcome.faults();
    if test.clean_log && !faults.is_empty() {
        let name = format!("{}{CLEAN_LOG}", test.name);
        records.push((name, Verdict::Failed(faults.join("\n"))));
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_list_is_read() {
        let entry =
            entry("ioctls | amd | all | stock,gannet | 2 | - | errno-tests --all | cat").unwrap();
        assert_eq!(entry.machines, [Machine::Amd]);
        assert_eq!(entry.kernels, BY_OWN_NAME);
        let plain = String::new;
        assert_eq!(entry.modules, [(Module::Stock, plain()), (Module::Gannet, plain())]);
        assert_eq!((entry.cpus, entry.quiet), (2, None));
        assert_eq!(entry.command, "errno-tests --all | cat");
        assert!(super::entry("too | few").is_err());
        let quiet = |text: &str| super::entry(&format!("t | all | all | all | 1 | {text} | true"));
        assert_eq!(quiet("600").unwrap().quiet, Some(600));
        assert!(quiet("long").is_err());
    }

    #[test]
    fn an_abort_of_the_emulator_is_no_answer_and_all_else_is() {
        let failed = |reason: &str| ("t".to_owned(), Verdict::Failed(reason.to_owned()));
        let aborted = failed("signal: 6 (SIGABRT): ERROR: assertion failed: (bql_locked())");
        assert!(abort_of_emulator(std::slice::from_ref(&aborted)).is_some());
        assert!(abort_of_emulator(&[failed("signal: 6 (SIGABRT): another")]).is_none());
        assert!(abort_of_emulator(&[("a".to_owned(), Verdict::Passed), aborted]).is_none());
        assert!(abort_of_emulator(&[]).is_none());
    }

    #[test]
    fn parameters_follow_the_name_of_their_module() {
        let modules = |text: &str| {
            entry(&format!("t | all | all | {text} | 1 | 60 | true")).map(|entry| entry.modules)
        };
        let shadow = || "npt=0".to_owned();
        let both = vec![(Module::Stock, shadow()), (Module::Gannet, shadow())];
        assert_eq!(modules("all npt=0").unwrap(), both);
        let more = (Module::Gannet, "npt=0 keep_roots=0".to_owned());
        assert_eq!(
            modules("stock npt=0, gannet npt=0  keep_roots=0").unwrap(),
            [both[0].clone(), more]
        );
        assert!(modules("npt=0").is_err());
    }

    #[test]
    fn a_word_with_an_equals_sign_is_the_kernels() {
        let mut job = Job::new(Machine::Amd, Kernel::V6_12, Module::Gannet, "true");
        let (processor, append) = (job.processor.clone(), job.append.clone());
        choose_processor(&mut job, "mitigations=auto");
        choose_processor(&mut job, "+la57");
        assert_eq!(job.append, format!("{append} mitigations=auto"));
        assert_eq!(job.processor, format!("{processor},+la57"));
    }

    #[test]
    fn reported_lines_become_tests() {
        let outcome = Outcome {
            console: "ok one\nnoise\nnot ok two: EINVAL\nskip three: no\n".into(),
            status: Some(1),
            ..Outcome::default()
        };
        let records = judge_lines("t", &outcome);
        assert_eq!(records.len(), 3);
        assert_eq!(records[1], ("t: two".into(), Verdict::Failed("EINVAL".into())));
        assert_eq!(records[2], ("t: three".into(), Verdict::Skipped("no".into())));
    }

    #[test]
    fn what_fails_twice_or_is_not_repeated_stays_a_failure() {
        let failed = || Verdict::Failed("x".into());
        let first = vec![
            ("a".to_owned(), failed()),
            ("b".to_owned(), failed()),
            ("log".to_owned(), failed()),
            ("c".to_owned(), Verdict::Passed),
        ];
        let second = vec![
            ("a".to_owned(), Verdict::Passed),
            ("b".to_owned(), failed()),
            ("ends well".to_owned(), failed()),
            (format!("t{CLEAN_LOG}"), failed()),
        ];
        let settled = settle(first, &second);
        let verdicts: Vec<&Verdict> = settled.iter().map(|(_, v)| v).collect();
        let (passed, failed) = (&Verdict::Passed, &failed());
        assert_eq!(verdicts, [passed, failed, failed, passed, failed]);
    }

    #[test]
    fn a_program_that_dies_silently_is_a_failure() {
        let outcome = Outcome { console: "ok one\n".into(), ..Outcome::default() };
        let records = judge_lines("t", &outcome);
        assert!(records.iter().any(|(_, v)| matches!(v, Verdict::Failed(_))));
    }
}
