//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::report::Unit;
use crate::vmm::hypervisor;

mod boot;
mod compare;
mod run;

pub use boot::{BootArguments, COMMAND_LINE, NestedLinuxArguments};
pub use compare::{CompareArguments, PlotArguments};
pub use run::{RunArguments, Touch};

const EXAMPLES: &str = "Examples:
  exitbench run                                every workload, as a table
  exitbench run cpuid rdmsr --json out.json    two of them, as JSON too
  exitbench run --cpu 2,3 --json stock.json    all, held on two CPUs of the host
  exitbench compare stock.json gannet.json     side by side: ratios, and which of them are more than noise
  exitbench plot stock.json gannet.json -o x.svg
  exitbench features >stock.txt                what the module offers, a line for each fact, for diff
  exitbench boot --kernel vmlinux --initrd initrd.cpio --cpus 2

The exit status is 0; 1 if a workload failed, or is slower than `compare --fail-above` allows; 2 if there is nothing to work on: no
/dev/kvm, a file that is no report, reports that do not compare, a wrong option.";

#[derive(Debug, Parser)]
#[command(
    name = "exitbench",
    version,
    about = "What each kind of VM exit costs, on any /dev/kvm",
    long_about = "What each kind of VM exit costs, on any /dev/kvm: the stock module or Gannet, \
                  with VT-x or SVM, on hardware or in an emulator.\n\n\
                  It brings its own small VMM and its own guest programs. Each workload runs in a \
                  fresh VM, several times: a guest in 64-bit mode reads the time stamp counter before \
                  and after each operation. Nothing is subtracted; `nothing` shows what the measuring \
                  itself costs.",
    after_help = EXAMPLES
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the workloads
    List,
    /// Run workloads, all of them by default, and print a table
    Run(RunArguments),
    /// Compare two JSON reports: medians side by side, their ratio, B over A, and whether that is more than noise
    Compare(CompareArguments),
    /// Draw JSON reports as bars, into an SVG file
    Plot(PlotArguments),
    /// Boot a Linux guest and stream its console; exit 0 if its user space answered
    Boot(BootArguments),
    /// Boot a Linux guest that is a hypervisor by its own KVM, and run workloads in its guests
    NestedLinux(NestedLinuxArguments),
    /// Tell what /dev/kvm offers here: capabilities, CPUID, MSRs, the module's parameters
    Features(FeaturesArguments),
    /// Write the manual page, exitbench(1): `exitbench man | man -l -`
    Man,
}

#[derive(Debug, Args)]
#[command(
    after_help = "A line for each fact: `KVM_CAP_NAME value` (of the device; those of value 0 are left out), `cpuid \
                  leaf.subleaf.register value`, `feature-msr index value`, `msr index`, `parameter module.name value`. \
                  Two modules compare by diff."
)]
pub struct FeaturesArguments {
    /// The device
    #[arg(long, value_name = "PATH", default_value = "/dev/kvm")]
    pub device: PathBuf,
    /// Write JSON, one object with the same facts
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DeviceArguments {
    /// The device
    #[arg(long, value_name = "PATH", default_value = "/dev/kvm")]
    pub device: PathBuf,
    /// What the time stamp counter counts here
    #[arg(long, env = "EXITBENCH_UNIT", value_enum, default_value_t = Unit::Tsc)]
    pub unit: Unit,
    /// Name of the module in reports [default: the one that is loaded]
    #[arg(long, value_name = "NAME")]
    pub module: Option<String>,
}

impl DeviceArguments {
    /// The name of the module for reports.
    pub fn module(&self) -> String {
        self.module.clone().unwrap_or_else(hypervisor::module_name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
