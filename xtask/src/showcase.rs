//! `make run`: the main job, shown. Sets everything up, measures VM exits on both modules, boots a Linux guest on both, on each of the
//! machines, and prints the figures side by side. Two machines run at a time; all of them count instructions, so that none disturbs
//! another's figures.

use crate::options::Options;
use crate::progress::{Step, two_at_a_time};
use crate::report::{Comparison, Side, new_table, number, ratio};
use crate::{bench, boot, tools};
use anyhow::Result;
use comfy_table::{Cell, CellAlignment};
use gannet_lab::{Event, Layout, Machine, Module};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// One run of a machine.
#[derive(Clone, Copy)]
struct Task<'a> {
    options: &'a Options,
    tools: &'a tools::Tools,
    module: Module,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Measure,
    Boot,
}

/// What came of it.
enum Found {
    Figures(Result<(String, Side)>),
    Boot(boot::Measured),
}

/// Runs it all; whether all went well.
pub fn run(layout: &Layout, options: &Options) -> Result<bool> {
    let started = Instant::now();
    let modules = tools::modules(layout, options);
    let machines = options.for_machines();
    let tools = machines.iter().map(|options| tools::prepare(layout, options));
    let tools: Vec<tools::Tools> = tools.collect::<Result<_>>()?;
    let results = run_tasks(layout, tasks(&machines, &tools, &modules));
    let mut well = true;
    for options in &machines {
        println!(
            "machine {}: {}; its time-stamp counter counts instructions; host kernel {}",
            options.machine().name(),
            options.machine().emulator(),
            layout.release(options.kernel)?
        );
        let mut comparison = Comparison::new(options.machine().name(), options.kernel.series());
        let mut boots = Vec::new();
        let own = results.iter().filter(|(task, _)| task.options.machine() == options.machine());
        for (task, found) in own {
            match found {
                Found::Figures(Ok((unit, side))) => {
                    comparison.unit.clone_from(unit);
                    comparison.add(task.module, side);
                }
                Found::Figures(Err(error)) => comparison.not_measured(task.module, error),
                Found::Boot(result) => boots.push((task.module, result)),
            }
        }
        if let Some(path) = &options.json {
            comparison.write(&json_path(path, options.machine(), machines.len()))?;
        }
        println!("{}", comparison.table());
        println!(
            "Operations are those of the whole machine; a guest's own instruction is among them."
        );
        well &= comparison.print_remarks();
        well &= print_boots(&modules, &boots);
    }
    println!(
        "{} in {:.0} s",
        if well { "done" } else { "INCOMPLETE" },
        started.elapsed().as_secs_f64()
    );
    Ok(well)
}

/// `f.json` for one machine, `f-amd.json` and `f-intel.json` for two.
fn json_path(path: &Path, machine: Machine, machines: usize) -> PathBuf {
    if machines == 1 {
        return path.to_owned();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let suffix = path.extension().map_or(String::new(), |s| format!(".{}", s.to_string_lossy()));
    path.with_file_name(format!("{stem}-{}{suffix}", machine.name()))
}

/// The longest first: Bochs takes several times as long as QEMU.
fn tasks<'a>(
    machines: &'a [Options],
    tools: &'a [tools::Tools],
    modules: &[Module],
) -> Vec<Task<'a>> {
    let mut tasks = Vec::new();
    for (options, tools) in machines.iter().zip(tools).rev() {
        for kind in [Kind::Boot, Kind::Measure] {
            let task = |module: &Module| Task { options, tools, module: *module, kind };
            tasks.extend(modules.iter().map(task));
        }
    }
    tasks
}

/// Runs two at a time.
fn run_tasks<'a>(layout: &Layout, tasks: Vec<Task<'a>>) -> Vec<(Task<'a>, Found)> {
    let step = Step::start(layout, &title(&tasks));
    let mut results = two_at_a_time(&step, tasks, |say, task: Task<'a>| {
        let name = format!("{} {}", task.options.machine().name(), task.module.name());
        let found = run_one(layout, task, &mut |event| {
            let (Event::Line(text) | Event::Pending(text)) = event;
            let text: String = text.chars().take(40).collect();
            say(format!("{name}: {text}"));
        });
        (task, found)
    });
    step.done();
    results.sort_by_key(|(task, _)| task.module != Module::Stock);
    results
}

fn title(tasks: &[Task<'_>]) -> String {
    let mut names: Vec<&str> = tasks.iter().map(|task| task.options.machine().name()).collect();
    names.dedup();
    names.reverse();
    let kernel = tasks.first().map_or(String::new(), |task| task.options.kernel.to_string());
    format!("measuring VM exits and booting Linux guests on {}, {kernel}", names.join(" and "))
}

fn run_one(layout: &Layout, task: Task<'_>, say: &mut dyn FnMut(Event<'_>)) -> Found {
    let Task { options, tools, module, kind } = task;
    match kind {
        Kind::Measure => Found::Figures(bench::one_side(layout, options, tools, module, say)),
        Kind::Boot => Found::Boot(boot::measure(layout, options, tools, module, say)),
    }
}

/// Prints the table of boots; whether all went well.
fn print_boots(modules: &[Module], boots: &[(Module, &boot::Measured)]) -> bool {
    let mut well = modules.contains(&Module::Gannet) && boots.len() == modules.len();
    let mut ticks = [None; 2];
    for (module, result) in boots {
        match result {
            Ok((report, faults)) => {
                ticks[usize::from(*module == Module::Gannet)] = report.ticks_to_marker;
                if report.attempt > 1 {
                    let name = module.name();
                    println!("Linux boot on {name}: attempt {} (docs/lab.md)", report.attempt);
                }
                for line in faults {
                    println!("{}: the host's log has: {line}", module.name());
                    well = false;
                }
            }
            Err(error) => {
                println!("Linux boot on {}: {error:#}", module.name());
                well = false;
            }
        }
    }
    let [stock, gannet] = ticks;
    let cell = |t: Option<u64>| {
        t.map_or_else(|| Cell::new("no"), number).set_alignment(CellAlignment::Right)
    };
    let mut table = new_table();
    table.set_header(["Linux guest", "stock KVM\ninstructions", "Gannet\ninstructions", "ratio"]);
    let of = stock.zip(gannet).map(|(s, g)| g as f64 / s.max(1) as f64);
    table.add_row(vec![
        Cell::new("from the VM's start to its user space, 1 vCPU"),
        cell(stock),
        cell(gannet),
        ratio(of),
    ]);
    println!("{table}");
    well
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_machines_write_two_files() {
        let path = |count| json_path(Path::new("d/f.json"), Machine::Intel, count);
        assert_eq!(path(1), Path::new("d/f.json"));
        assert_eq!(path(2), Path::new("d/f-intel.json"));
    }

    #[test]
    fn every_machine_measures_and_boots_each_module() {
        let options = crate::options::tests::parse(&[]).unwrap().for_machines();
        let none = || tools::Tools { exitbench: PathBuf::new(), plugin: PathBuf::new() };
        let tools = [none(), none()];
        let tasks = tasks(&options, &tools, &[Module::Stock, Module::Gannet]);
        assert_eq!(tasks.len(), 8);
        assert!(tasks.first().is_some_and(|task| task.options.machine() == Machine::Intel));
    }
}
