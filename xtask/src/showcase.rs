//! `make run`: the main job, shown. Sets everything up, measures VM exits on both modules, boots a Linux guest on both, and prints the
//! figures side by side.

use crate::options::Options;
use crate::progress::Step;
use crate::report::{new_table, number, ratio};
use crate::{bench, boot};
use anyhow::Result;
use comfy_table::{Cell, CellAlignment};
use gannet_lab::{Event, Layout, Module};
use std::time::Instant;

/// Runs it all; whether all went well.
pub fn run(layout: &Layout, options: &Options) -> Result<bool> {
    let started = Instant::now();
    let modules = bench::modules(layout, options);
    let tools = bench::prepare(layout, options)?;
    let comparison = bench::measure(layout, options, &tools, &modules)?;
    if let Some(path) = &options.json {
        comparison.write(path)?;
    }
    println!(
        "machine {}: QEMU's software emulator; its time-stamp counter counts instructions; \
         host kernel {}",
        options.machine.name(),
        layout.release(options.kernel)?
    );
    println!("{}", comparison.table());
    println!("Operations are those of the whole machine; a guest's own instruction is among them.");
    let mut well = comparison.print_remarks();
    well &= boots(layout, options, &tools, &modules);
    println!(
        "{} in {:.0} s",
        if well { "done" } else { "INCOMPLETE" },
        started.elapsed().as_secs_f64()
    );
    Ok(well)
}

/// Boots on every module at once and prints the table of boots.
fn boots(layout: &Layout, options: &Options, tools: &bench::Tools, modules: &[Module]) -> bool {
    let step = Step::start(layout, &format!("booting a Linux guest on {}", options.kernel));
    let runs: Vec<_> = std::thread::scope(|scope| {
        let step = &step;
        let threads: Vec<_> = modules
            .iter()
            .map(|module| {
                scope.spawn(move || {
                    let mut say = |event: Event<'_>| {
                        if let Event::Line(line) = event {
                            step.say(&format!("{}: {line}", module.name()));
                        }
                    };
                    boot::measure(layout, options, tools, *module, &mut say)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().ok()).collect()
    });
    step.done();
    let mut well = modules.contains(&Module::Gannet);
    let mut ticks = Vec::new();
    for (module, run) in modules.iter().zip(runs) {
        match run {
            Some(Ok((report, faults))) => {
                ticks.push(report.ticks_to_marker);
                for line in faults {
                    println!("{}: the host's log has: {line}", module.name());
                    well = false;
                }
            }
            Some(Err(error)) => {
                println!("Linux boot on {}: {error:#}", module.name());
                well = false;
                ticks.push(None);
            }
            None => {
                well = false;
                ticks.push(None);
            }
        }
    }
    let (stock, gannet) = (ticks.first().copied().flatten(), ticks.get(1).copied().flatten());
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
