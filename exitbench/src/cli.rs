//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench::layout::MOST_PAGES;
use crate::report::Unit;

/// What Linux gets unless told otherwise: a serial console, reset by keyboard controller, and no
/// probing of what this VMM does not have.
pub const COMMAND_LINE: &str = "console=ttyS0 reboot=k panic=-1 nokaslr acpi=off pci=off tsc=reliable no_timer_check \
     random.trust_cpu=on 8250.nr_uarts=1 i8042.noaux i8042.nokbd";

/// The line by which the lab's guests say that their user space runs.
pub const MARKER: &str = "GANNET-GUEST-USERSPACE";

#[derive(Debug, Parser)]
#[command(
    name = "exitbench",
    version,
    about = "What each kind of VM exit costs, on any /dev/kvm",
    long_about = "What each kind of VM exit costs, on any /dev/kvm: the stock module or Gannet, \
                  with VT-x or SVM, on hardware or in an emulator.\n\n\
                  It brings its own small VMM and its own guest programs. Each workload runs in a \
                  fresh VM: a guest in 64-bit mode reads the time stamp counter before and after \
                  each operation, and the VMM reports the least, the middle and the greatest \
                  difference. Nothing is subtracted; `nothing` shows what the measuring itself \
                  costs.",
    after_help = "Examples:\n  \
                  exitbench run                              every workload, as a table\n  \
                  exitbench run cpuid rdmsr --json out.json  two of them, as JSON too\n  \
                  exitbench compare stock.json gannet.json   side by side, with ratios\n  \
                  exitbench boot --kernel vmlinux --initrd initrd.cpio --cpus 2"
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
    /// Compare two JSON reports: medians side by side and their ratio, B over A
    Compare {
        /// Report of the first run
        #[arg(value_name = "A.json")]
        first: PathBuf,
        /// Report of the second run
        #[arg(value_name = "B.json")]
        second: PathBuf,
    },
    /// Boot a Linux guest and stream its console; exit 0 if its user space answered
    Boot(BootArguments),
    /// Boot a Linux guest that is a hypervisor by its own KVM, and run workloads in its guests
    NestedLinux(NestedLinuxArguments),
}

/// Which of the mapped pages a guest writes to after each switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Touch {
    /// A fixed number, spread evenly
    Few,
    /// Every one
    All,
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

#[derive(Debug, Args)]
#[command(
    after_help = "Workloads run in the order of `list`, whatever the order here. One that the \
                  machine cannot run is skipped with the reason; one that fails does not stop the \
                  others, but the exit status is then 1.\n\n\
                  After the measured pass each workload runs the bare operation \
                  --marker-iterations times between two marker instructions (nopl \
                  0x01544e47(%rax), nopl 0x02544e47(%rax)), so that an emulator's plugin can \
                  count what one operation performs."
)]
pub struct RunArguments {
    /// Names of workloads, see `list`
    #[arg(value_name = "WORKLOAD")]
    pub workloads: Vec<String>,
    /// Write the figures as JSON; `-` is standard output, without the table
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Run workloads as a guest that maps this many pages of 4 KiB one by one, for each of the numbers: the role toggles and
    /// cr3_switch, or those named. After each of its two switches the guest writes to some of the pages
    #[arg(long, value_name = "N,N", value_delimiter = ',',
          value_parser = clap::value_parser!(u64).range(1..=MOST_PAGES))]
    pub pages: Vec<u64>,
    /// Which pages: a fixed number of them, 8, or all
    #[arg(long, value_enum, default_value_t = Touch::Few, requires = "pages")]
    pub touch: Touch,
    /// Samples before those that count
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u64).range(0..=200_000))]
    pub warm_up: u64,
    /// Samples per workload
    #[arg(long, value_name = "N", default_value_t = 500,
          value_parser = clap::value_parser!(u64).range(1..=200_000))]
    pub iterations: u64,
    /// Operations between the markers; 0 leaves the markers out
    #[arg(long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u64).range(0..=200_000))]
    pub marker_iterations: u64,
    /// Have the guest of `timer_rearm` use the lazy TSC deadline where its CPUID offers it
    #[arg(long)]
    pub lazy_timer: bool,
    /// Seconds after which a workload has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u64,
    #[command(flatten)]
    pub device: DeviceArguments,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The guest has its kernel's interrupt controllers and timer, a serial port at \
                  0x3f8 and an MP table that lists its CPUs. It ends the VM by a reset through \
                  port 0x64 (reboot=k)."
)]
pub struct BootArguments {
    /// An ELF vmlinux or a bzImage
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// An initramfs
    #[arg(long, value_name = "FILE")]
    pub initrd: PathBuf,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// Memory
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub memory: u64,
    /// Replaces the whole kernel command line
    #[arg(long, value_name = "TEXT", default_value = COMMAND_LINE)]
    pub cmdline: String,
    /// Adds to the kernel command line
    #[arg(long, value_name = "TEXT")]
    pub append: Option<String>,
    /// Exit 0 if this came on the console before the VM ended
    #[arg(long, value_name = "TEXT", default_value = MARKER)]
    pub expect: String,
    /// Count from this text on the console to the expected one, too: `ticks_between` of the
    /// report, and what an emulator's plugin counts
    #[arg(long, value_name = "TEXT")]
    pub from: Option<String>,
    /// End the VM as soon as the expected text has come
    #[arg(long)]
    pub stop_at_marker: bool,
    /// Print ticks from VM start to the expected text, as JSON, to FILE or standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub report: Option<PathBuf>,
    /// Seconds after which the VM is ended
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub timeout: u64,
    #[command(flatten)]
    pub device: DeviceArguments,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The initramfs loads KVM and runs what the kernel command line says, as the lab's \
                  does (lab/hypervisor-init.sh). Its console is streamed; the report comes over it."
)]
pub struct NestedLinuxArguments {
    /// Names of workloads, see `list`, and `boot`: a Linux guest, to its user space
    #[arg(value_name = "WORKLOAD", default_value = "cpuid")]
    pub workloads: Vec<String>,
    /// The hypervisor's kernel: an ELF vmlinux or a bzImage
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// Its initramfs
    #[arg(long, value_name = "FILE")]
    pub initrd: PathBuf,
    /// Parameters of its kvm-amd or kvm-intel, such as npt=0
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub kvm: String,
    /// Another module of the initramfs in their place, such as gannet
    #[arg(long, value_name = "NAME")]
    pub l1_module: Option<String>,
    /// Its memory
    #[arg(long, value_name = "MIB", default_value_t = 384)]
    pub memory: u64,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Samples per workload
    #[arg(long, value_name = "N", default_value_t = 200,
          value_parser = clap::value_parser!(u64).range(1..=200_000))]
    pub iterations: u64,
    /// Operations between the markers; 0 leaves the markers out
    #[arg(long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u64).range(0..=200_000))]
    pub marker_iterations: u64,
    /// Seconds after which the hypervisor is ended
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    pub timeout: u64,
    #[command(flatten)]
    pub device: DeviceArguments,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn run_takes_workloads_and_options_in_any_order() {
        let line = ["exitbench", "run", "cpuid", "--iterations", "300", "rdmsr", "--json", "f"];
        let Command::Run(run) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not understood as run");
        };
        assert_eq!(run.workloads, ["cpuid", "rdmsr"]);
        assert_eq!((run.iterations, run.json), (300, Some("f".into())));
    }

    #[test]
    fn pages_are_a_list_and_what_is_touched_needs_them() {
        let run = |words: &[&str]| {
            let line = ["exitbench", "run"].iter().chain(words);
            match Cli::try_parse_from(line).map(|cli| cli.command) {
                Ok(Command::Run(run)) => Some((run.pages, run.touch)),
                _ => None,
            }
        };
        assert_eq!(run(&["--pages", "1,10000"]), Some((vec![1, 10_000], Touch::Few)));
        assert_eq!(run(&["--pages", "9", "--touch", "all"]), Some((vec![9], Touch::All)));
        assert_eq!(run(&["--touch", "all"]), None);
        assert_eq!(run(&["--pages", "0"]), None);
    }

    #[test]
    fn no_iterations_are_refused() {
        assert!(Cli::try_parse_from(["exitbench", "run", "--iterations", "0"]).is_err());
    }

    #[test]
    fn a_report_without_a_file_goes_to_standard_output() {
        let line = ["exitbench", "boot", "--kernel", "k", "--initrd", "i", "--report"];
        let Command::Boot(boot) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not understood as boot");
        };
        assert_eq!(boot.report, Some("-".into()));
    }
}
