//! exitbench: what each kind of VM exit costs, on any `/dev/kvm`.

mod bench;
mod boot;
mod cli;
mod compare;
mod nested_linux;
mod report;
mod statistics;
mod table;
mod vmm;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;

use bench::machine::Passes;
use bench::runner::{self, Settings};
use bench::workload::{Mapped, Workload};
use bench::{nested, workloads};
use boot::session::{Boot, BootReport};
use cli::{
    BootArguments, Cli, Command, DeviceArguments, NestedLinuxArguments, RunArguments, Touch,
};
use report::Report;
use vmm::hypervisor::{self, Hypervisor};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::List => list(),
        Command::Run(arguments) => run(arguments),
        Command::Compare { first, second } => compare(&first, &second),
        Command::Boot(arguments) => boot(arguments),
        Command::NestedLinux(arguments) => nested_linux(arguments),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("exitbench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn list() -> Result<bool> {
    let mut table = table::new(&["workload", "one operation"]);
    for workload in workloads::ALL.iter().chain(nested::ALL) {
        table.add_row([workload.name, workload.about]);
    }
    print(&table)?;
    Ok(true)
}

fn run(arguments: RunArguments) -> Result<bool> {
    let chosen = runs(&arguments)?;
    let hypervisor = Hypervisor::open(&arguments.device.device)?;
    vmm::signal::prepare()?;
    let settings = Settings {
        passes: Passes {
            warm_up: arguments.warm_up,
            iterations: arguments.iterations,
            marker_iterations: arguments.marker_iterations,
        },
        timeout: Duration::from_secs(arguments.timeout),
        lazy_timer: arguments.lazy_timer,
    };
    let mut report = Report {
        unit: arguments.device.unit,
        module: module(&arguments.device),
        kernel: hypervisor::kernel_release(),
        workloads: Vec::new(),
    };
    for (done, (workload, mapped)) in chosen.iter().enumerate() {
        let pages = mapped.map_or(String::new(), |m| format!(" with {} pages", m.pages));
        show_progress(&format!("[{}/{}] {}{pages}", done + 1, chosen.len(), workload.name));
        let entry = runner::run(&hypervisor, workload, *mapped, settings);
        show_progress("");
        report.workloads.push(entry);
    }
    show(&report, arguments.json.as_deref())
}

/// Writes the report where it was asked for, and shows it as a table; whether nothing failed.
fn show(report: &Report, json: Option<&Path>) -> Result<bool> {
    if let Some(path) = json {
        report.write(path)?;
    }
    if json != Some(Path::new("-")) {
        print(&table::of_run(report))?;
        print(&format!("in {}, on {}", report.unit.describe(), report.module))?;
    }
    for reason in table::reasons(report) {
        eprintln!("{reason}");
    }
    Ok(report.failures() == 0)
}

fn nested_linux(arguments: NestedLinuxArguments) -> Result<bool> {
    let hypervisor = Hypervisor::open(&arguments.device.device)?;
    let report = nested_linux::run(&arguments, &hypervisor, module(&arguments.device))?;
    show(&report, arguments.json.as_deref())
}

/// Every workload that was asked for, once or once for each number of pages.
fn runs(arguments: &RunArguments) -> Result<Vec<(&'static Workload, Option<Mapped>)>> {
    if arguments.pages.is_empty() {
        let plain = workloads::choose(&arguments.workloads, workloads::ALL)?;
        return Ok(plain.into_iter().map(|workload| (workload, None)).collect());
    }
    let paged = workloads::choose(&arguments.workloads, workloads::PAGED)?;
    let mapped = |pages: &u64| Some(Mapped::new(*pages, arguments.touch == Touch::All));
    let runs = paged.into_iter().flat_map(|w| arguments.pages.iter().map(move |n| (w, mapped(n))));
    Ok(runs.collect())
}

fn compare(first: &Path, second: &Path) -> Result<bool> {
    let (first, second) = (Report::read(first)?, Report::read(second)?);
    print(&compare::compare(&first, &second)?)?;
    print(&format!("medians in {}", first.unit.describe()))?;
    Ok(true)
}

fn boot(arguments: BootArguments) -> Result<bool> {
    let command_line = match &arguments.append {
        Some(more) => format!("{} {more}", arguments.cmdline),
        None => arguments.cmdline.clone(),
    };
    let boot = Boot {
        kernel: arguments.kernel,
        initrd: arguments.initrd,
        cpus: arguments.cpus,
        memory: arguments.memory,
        command_line,
        from: arguments.from.unwrap_or_default(),
        expect: arguments.expect,
        stop_at_marker: arguments.stop_at_marker,
        timeout: Duration::from_secs(arguments.timeout),
    };
    let hypervisor = Hypervisor::open(&arguments.device.device)?;
    let ended = boot.run(&hypervisor)?;
    if let Some(path) = &arguments.report {
        let report = BootReport {
            unit: arguments.device.unit,
            module: module(&arguments.device),
            cpus: boot.cpus,
            ticks_to_marker: ended.ticks_to_marker,
            ticks_between: ended.ticks_between,
            end: match &ended.end {
                Ok(end) => (*end).to_string(),
                Err(reason) => reason.lines().next().unwrap_or_default().to_string(),
            },
        };
        write_boot_report(&report, path)?;
    }
    if let Err(reason) = &ended.end {
        eprintln!("exitbench: the VM ended: {}", reason.trim_end());
    }
    if !ended.marker_seen {
        eprintln!("exitbench: `{}` did not come on the console", boot.expect);
    }
    Ok(ended.marker_seen)
}

fn write_boot_report(report: &BootReport, path: &Path) -> Result<()> {
    let text = serde_json::to_string(report)?;
    if path == Path::new("-") {
        return print(&text);
    }
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

fn module(arguments: &DeviceArguments) -> String {
    arguments.module.clone().unwrap_or_else(hypervisor::module_name)
}

/// An error, unlike with `println!`, when the reader of a pipe has gone.
fn print(text: &dyn std::fmt::Display) -> Result<()> {
    writeln!(std::io::stdout(), "{text}").context("cannot write to standard output")
}

/// One line on a terminal, replaced by the next; a line each elsewhere, so that whoever waits sees that something happens.
fn show_progress(text: &str) {
    let mut errors = std::io::stderr();
    // Progress that cannot be shown is not worth failing for.
    let _ = if errors.is_terminal() {
        write!(errors, "\r\x1b[K{text}").and_then(|()| errors.flush())
    } else if text.is_empty() {
        Ok(())
    } else {
        writeln!(errors, "{text}")
    };
}
