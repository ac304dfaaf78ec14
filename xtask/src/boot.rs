//! Boots the lab's Linux guest on a module: with its console streamed, or measured to the first line of its user space.

use crate::options::Options;
use crate::tools::Tools;
use crate::{again, module, tools};
use anyhow::{Context, Result, bail};
use gannet_lab::{Emulator, Event, Job, Layout, Module, Outcome, guest};
use serde::Deserialize;

/// How a measured boot went.
#[derive(Clone, Debug, Deserialize)]
pub struct BootReport {
    /// From the start of the VM to its user space; `None` when that never answered.
    pub ticks_to_marker: Option<u64>,
    /// From one line on its console to another.
    pub ticks_between: Option<u64>,
    /// How the VM ended, in words.
    pub end: String,
    /// Which attempt of the machine this was, from 1; exitbench does not know.
    #[serde(skip)]
    pub attempt: u32,
}

/// A measured boot, and the lines of the host's log that tell of a fault.
pub type Measured = Result<(BootReport, Vec<String>)>;

/// `make boot`: streams the guest's console; whether its user space answered.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    if options.module == Module::None {
        bail!("MODULE=none: a guest needs gannet or stock");
    }
    if options.module == Module::Gannet {
        module::build(layout, options.kernel)?;
    }
    let tools = tools::prepare(layout, options)?;
    let job = job(layout, options, &tools, options.module, options.cpus, Kind::PLAIN)?;
    let mut print = |event: Event<'_>| {
        if let Event::Line(line) = event {
            println!("{line}");
        }
    };
    let outcome = gannet_lab::run(layout, &job, &mut print)?;
    if let Some(reason) = outcome.refusal() {
        println!("{reason}");
    }
    let faults = outcome.faults();
    for line in &faults {
        println!("the host's log has: {line}");
    }
    let answered = answered(&outcome);
    println!(
        "{} on {}, kernel {}, {} vCPU{}: the guest's user space {} ({:.1} s)",
        if answered { "ok" } else { "FAIL" },
        options.module.with(&options.parameters),
        layout.release(options.kernel)?,
        options.cpus,
        if options.cpus == 1 { "" } else { "s" },
        if answered { "answered" } else { "did not answer" },
        outcome.took.as_secs_f64()
    );
    Ok(answered && faults.is_empty())
}

/// What a boot has besides.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// On the guest's kernel command line.
    pub append: &'static str,
    /// On exitbench's own command line.
    pub more: &'static str,
}

impl Kind {
    /// Nothing but the lab's own.
    pub const PLAIN: Self = Self { append: guest::APPEND, more: "" };
    /// That of a guest's guest (`exitbench nested-linux boot`), which can be compared with it.
    pub const AS_NESTED: Self =
        Self { append: "quiet mitigations=off", more: "--memory 160 --stop-at-marker" };
}

/// A job that boots the guest under exitbench.
pub fn job(
    layout: &Layout,
    options: &Options,
    tools: &Tools,
    module: Module,
    cpus: u32,
    kind: Kind,
) -> Result<Job> {
    let command = format!(
        "exitbench boot --kernel /guest/vmlinux --initrd /guest/initramfs --cpus {cpus} \
         --append '{}' --module {} {}",
        kind.append,
        module.name(),
        kind.more
    );
    let mut job = Job::new(options.machine(), options.kernel, module, &command)
        .file(&tools.exitbench, "bin/exitbench")
        .file(layout.vmlinux(guest::KERNEL), "guest/vmlinux");
    job.texts.push(("guest/initramfs".to_owned(), guest::initramfs(layout)?));
    job.cpus = options.host_cpus;
    job.parameters.clone_from(&options.parameters);
    Ok(job)
}

/// How long a measured boot's console may be silent on QEMU, in seconds. A boot as a whole takes half of that there; one that an event
/// got lost of is soon tried again.
const QUIET_ON_QEMU: u64 = 60;

/// Boots with one CPU and counts instructions up to user space; again if user space does not answer.
pub fn measure(
    layout: &Layout,
    options: &Options,
    tools: &Tools,
    module: Module,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Measured {
    measure_kind(layout, options, tools, module, Kind::PLAIN, on_event)
}

/// The same with another kind of boot.
pub fn measure_kind(
    layout: &Layout,
    options: &Options,
    tools: &Tools,
    module: Module,
    kind: Kind,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Measured {
    let mut job = job(layout, options, tools, module, 1, kind)?;
    job.command += " --unit instructions --report /out/boot.json";
    job.counting = true;
    if job.machine.emulator() == Emulator::Qemu {
        job.patience = job.patience.with_quiet(QUIET_ON_QEMU);
    }
    let run = |job: &Job| gannet_lab::run(layout, job, on_event);
    let well = |outcome: &Result<Outcome>| {
        outcome.as_ref().is_ok_and(|outcome| outcome.refusal().is_some() || read(outcome).is_ok())
    };
    let (outcome, attempt) = again::until_well(job, run, well);
    let outcome = outcome?;
    let faults = outcome.faults().into_iter().map(str::to_owned).collect();
    Ok((BootReport { attempt, ..read(&outcome)? }, faults))
}

/// The report of a machine that booted, or why there is none.
fn read(outcome: &Outcome) -> Result<BootReport> {
    if let Some(reason) = outcome.refusal() {
        bail!("the module did not load: {reason}");
    }
    let Some(json) = outcome.files.get("boot.json") else {
        bail!("the boot left no report; the console ends with:\n{}", outcome.tail(20));
    };
    let report: BootReport = serde_json::from_slice(json).context("exitbench's boot report")?;
    if report.ticks_to_marker.is_none() {
        bail!("user space did not answer ({}); it ends with:\n{}", report.end, outcome.tail(20));
    }
    Ok(report)
}

/// Whether the guest's user space answered and exitbench ended well.
pub fn answered(outcome: &Outcome) -> bool {
    outcome.succeeded() && outcome.console.contains(guest::MARKER)
}

/// Whether a boot's outcome is what it should be.
pub fn judge(outcome: &Outcome) -> Result<(), String> {
    if answered(outcome) {
        Ok(())
    } else {
        Err(format!(
            "the guest's user space did not answer; the console ends with:\n{}",
            outcome.tail(25)
        ))
    }
}
