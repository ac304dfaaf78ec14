//! The developer's commands, behind `make`: set up the lab, build the module, check it, run it on emulated machines and measure it.

mod attempt;
mod bench;
mod boot;
mod check;
mod disassembly;
mod guest;
mod labtest;
mod mechanisms;
mod module;
mod options;
mod progress;
mod report;
mod showcase;
mod tally;
mod test;

use anyhow::{Result, bail};
use gannet_lab::{KERNELS, Layout};
use options::Options;
use std::process::ExitCode;

const HELP: &str = "\
Gannet: a hypervisor for Linux, as a module behind /dev/kvm

  make run                 set up, boot a Linux guest and measure every kind of VM exit on an emulated AMD
                           and an emulated Intel machine, on stock KVM and on Gannet, and print both side by side
  make test                format, lints, unit tests, module checks, lab tests; ends with `N passed, N failed`
  make bench  JSON=path    the measurements alone, written as JSON
  make mechanisms          every mechanism with its switch off and on, and stock KVM beside: docs/results
  make boot   CPUS=2       boot a Linux guest on Gannet and stream its console; 0 when its user space answered
  make try    COMMAND=…    a shell command in one machine, with all test programs there; 0 when it ended with 0
  make module              build gannet.ko
  make setup               fetch and unpack everything (the other commands fetch what they need)
  make clean               remove what was built and unpacked; downloads stay in the cache folder
  make help                this text

Variables, for every command where they mean something:
  KERNEL=6.12 | 6.1        the host's kernel (default 6.12)
  MACHINE=amd | intel      the emulated machine
  CPUS=N                   the guest's CPUs (boot)
  HOST_CPUS=N              the host's (boot, try)
  MODULE=gannet | stock    whose /dev/kvm there is (boot, try; default gannet); none: the command loads one (try)
  PARAMETERS=npt=0         that module's parameters (boot, try), or Gannet's (bench; STOCK_PARAMETERS for stock)
  PROCESSOR=+la57          what the processor has besides, or another model of it; SECONDS=600: how long
                           its console may be silent (try)
  FROM=file                page and plots from an earlier run's JSON (mechanisms)
  ONLY=name,name           these workloads alone (bench, run)
  GANNET_CACHE=folder      where downloads are kept (default ~/.cache/gannet)
";

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
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_else(|| "help".to_owned());
    let options = Options::parse(arguments)?;
    let layout = Layout::find()?;
    match command.as_str() {
        "run" => showcase::run(&layout, &options),
        "test" => test::run(&layout, &options),
        "bench" => bench::command(&layout, &options),
        "mechanisms" => mechanisms::command(&layout, &options),
        "boot" => boot::command(&layout, &options),
        "try" => attempt::command(&layout, &options),
        "module" => module::command(&layout, &options),
        "setup" => {
            let kernels = KERNELS.map(|k| k.group());
            layout.ensure(&["toolchain", "qemu", "bochs", "busybox"])?;
            layout.ensure(&kernels)?;
            Ok(true)
        }
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(true)
        }
        other => bail!("no such command: {other} (try help)"),
    }
}
