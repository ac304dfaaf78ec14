//! exitbench: what each kind of VM exit costs, on any `/dev/kvm`.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("exitbench measures VMs of x86-64 on Linux: it builds there alone");

mod bench;
mod boot;
mod cli;
mod compare;
mod features;
mod host;
mod man;
mod nested_linux;
mod output;
mod plot;
mod report;
mod run;
mod statistics;
mod table;
mod vmm;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

/// There was nothing to work on, as when the command line is wrong.
const TROUBLE: u8 = 2;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::List => run::list(),
        Command::Run(arguments) => run::command(&arguments),
        Command::Compare(arguments) => compare::command(&arguments),
        Command::Plot(arguments) => plot::command(&arguments),
        Command::Boot(arguments) => boot::command(arguments),
        Command::NestedLinux(arguments) => nested_linux::command(&arguments),
        Command::Features(arguments) => features::command(&arguments),
        Command::Man => man::command(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("exitbench: {error:#}");
            ExitCode::from(TROUBLE)
        }
    }
}
