//! `make try`: one command in one machine, with its console streamed, for work on the module.

use crate::options::Options;
use crate::{guest, labtest, module};
use anyhow::{Result, bail};
use gannet_lab::{Event, Job, Layout, Module};
use std::path::PathBuf;

/// Builds what the machine needs, runs the command there, and says whether it ended with 0 and left the host's log clean.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    if options.command.is_empty() {
        bail!("COMMAND='labtests --filter cpuid': what is to run in the machine?");
    }
    layout.ensure(&["toolchain", options.machine().group(), "busybox"])?;
    layout.ensure(&[options.kernel.group(), gannet_lab::guest::KERNEL.group()])?;
    if options.module != Module::Stock {
        module::build(layout, options.kernel)?;
    }
    for (folder, kernel) in labtest::GUESTS {
        if options.command.contains(&format!("/{folder}/")) {
            if folder == "guest-c" {
                layout.ensure(&["tcc"])?;
            }
            guest::build(layout, kernel)?;
        }
    }
    let mut job = Job::new(options.machine(), options.kernel, options.module, &options.command);
    labtest::with_programs(layout, &mut job)?;
    for program in options.programs.split_whitespace().map(PathBuf::from) {
        let Some(name) = program.file_name().filter(|_| program.is_file()) else {
            bail!("PROGRAMS: {} is no file", program.display());
        };
        let place = format!("bin/{}", name.to_string_lossy());
        job.files.push((program, place));
    }
    job.parameters.clone_from(&options.parameters);
    job.cpus = options.host_cpus;
    for word in options.processor.split_whitespace() {
        labtest::choose_processor(&mut job, word);
    }
    if let Some(seconds) = options.seconds {
        job.patience = job.patience.with_quiet(seconds);
    }
    let outcome = gannet_lab::run(layout, &job, &mut |event| {
        if let Event::Line(line) = event {
            println!("{line}");
        }
    })?;
    if let Some(reason) = outcome.refusal() {
        println!("the module did not load: {reason}");
    }
    let faults = outcome.faults();
    for line in &faults {
        println!("the host's log has: {line}");
    }
    let took = outcome.took.as_secs_f64();
    match outcome.status {
        Some(status) => println!("status {status} ({took:.1} s)"),
        None => println!("the machine did not come to its end ({took:.1} s)"),
    }
    Ok(outcome.succeeded() && faults.is_empty())
}
