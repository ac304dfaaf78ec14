//! The developer's commands, behind `make`: set up the lab, build the module, check it, run it on emulated machines and measure it.

mod again;
mod alternatives;
mod attempt;
mod bench;
mod boot;
mod check;
mod disassembly;
mod fuzz;
mod guest;
mod harden;
mod labtest;
mod matrix;
mod mechanisms;
mod module;
mod options;
mod package;
#[cfg(test)]
mod papers;
mod progress;
mod report;
mod sanitize;
mod showcase;
mod sources;
mod switch_check;
mod symbols;
mod tally;
mod test;
mod tools;

use anyhow::Result;
use gannet_lab::{KERNELS, Kernel, Layout};
use options::{Cli, Command};
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the command's purpose was met.
fn run() -> Result<bool> {
    // Help and a wrong line end here.
    let cli = Cli::read(std::env::args()).unwrap_or_else(|error| error.exit());
    let layout = Layout::find()?;
    match cli.command {
        Command::Run(options) => showcase::run(&layout, &options),
        Command::Test(options) => test::run(&layout, &options),
        Command::Bench(options) => bench::command(&layout, &options),
        Command::Mechanisms(options) => mechanisms::command(&layout, &options),
        Command::Matrix(options) => matrix::command(&layout, &options),
        Command::Boot(options) => boot::command(&layout, &options),
        Command::Try(options) => attempt::command(&layout, &options),
        Command::Module(options) => module::command(&layout, &options),
        Command::Harden(options) => harden::run(&layout, &options),
        Command::Fuzz(options) => fuzz::run(&layout, &options),
        Command::Sanitize(options) => sanitize::run(&layout, &options),
        Command::Deb => package::command(&layout),
        Command::Symbols(options) => symbols::command(&layout, &options),
        Command::Setup => {
            layout.ensure(&["toolchain", "qemu", "bochs", "busybox"])?;
            layout.ensure(&KERNELS.map(Kernel::group))?;
            Ok(true)
        }
    }
}
