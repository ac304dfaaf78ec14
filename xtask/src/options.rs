//! The command line: commands, and options as the Makefile passes its variables. An empty value counts as not given.

use clap::{Args, Parser, Subcommand};
use gannet_lab::{Kernel, MACHINES, Machine, Module};
use std::path::PathBuf;

/// The developer's commands of Gannet, as `make` calls them: `make bench JSON=f` is `xtask bench --json f`.
#[derive(Debug, Parser)]
#[command(name = "xtask", arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Set up, boot a Linux guest and measure every kind of VM exit, on each emulated machine, on stock KVM and on Gannet
    Run(Options),
    /// Format, lints, unit tests, module checks, lab tests; ends with `N passed, N failed`
    Test(Options),
    /// The measurements alone, written as JSON
    Bench(Options),
    /// Every mechanism with its switch off and on, and stock KVM beside: docs/results
    Mechanisms(Options),
    /// What stock KVM and Gannet offer on each emulated machine with each kernel: docs/results
    Matrix(Options),
    /// Boot a Linux guest and stream its console; 0 when its user space answered
    Boot(Options),
    /// A shell command in one machine, with all test programs there; 0 when it ended with 0
    Try(Options),
    /// Build gannet.ko
    Module(Options),
    /// The lab's tests on a debug kernel, whose log has to stay clean; the first time builds that kernel
    Harden(Options),
    /// Coverage-guided fuzzing of the Rust core on this machine, each target with an oracle; 0 when nothing was found
    Fuzz(Options),
    /// Unit tests under AddressSanitizer and ThreadSanitizer; 0 when all passed and neither spoke
    Sanitize(Options),
    /// Build the Debian package gannet-dkms
    Deb,
    /// What a kernel no longer exports of that which the modules take, or restricts; 0 when nothing is gone
    Symbols(Options),
    /// Fetch and unpack everything; the other commands fetch what they need
    Setup,
}

/// The options of all commands; each is for those where it means something.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The host's kernel: 6.12, 6.1, 7.3 or 6.12-debug
    #[arg(long, default_value_t = Kernel::V6_12)]
    pub kernel: Kernel,
    /// The emulated machine, amd, intel or amd-nrip: what runs on each of the first two then runs on that one alone
    #[arg(long)]
    machine: Option<Machine>,
    /// Whose /dev/kvm there is (boot, try): gannet, stock, or none, where the command loads a module itself
    #[arg(long, default_value = "gannet", value_parser = module)]
    pub module: Module,
    /// That module's parameters (boot, try), or Gannet's (bench)
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    pub parameters: String,
    /// The stock module's parameters (bench)
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    pub stock_parameters: String,
    /// What the KVM of a Linux guest loads with that is a hypervisor (bench)
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    pub l1_parameters: String,
    /// The guest's CPUs (boot)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: u32,
    /// The host's CPUs (boot, try)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub host_cpus: u32,
    /// The file that the figures are written to (run, bench, mechanisms)
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// A folder for exitbench's own report of each module, with repetitions, such as `exitbench compare` takes (bench)
    #[arg(long)]
    pub reports: Option<PathBuf>,
    /// A Module.symvers of another kernel's headers (symbols)
    #[arg(long)]
    pub symvers: Option<PathBuf>,
    /// An earlier run's JSON, in place of a run (mechanisms)
    #[arg(long)]
    pub from: Option<PathBuf>,
    /// The workloads to run, with commas between; all when empty (run, bench); the targets (fuzz); address or thread (sanitize)
    #[arg(long, default_value = "")]
    pub only: String,
    /// What runs in the machine (try)
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    pub command: String,
    /// What the processor has besides, such as +la57, or another model of it (try)
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    pub processor: String,
    /// How long the machine's console may be silent (try); how long each target is fuzzed (fuzz)
    #[arg(long)]
    pub seconds: Option<u64>,
    /// Programs of the user's own that the machine has besides, with spaces between (try)
    #[arg(long, default_value = "")]
    pub programs: String,
    /// The tests to run: source, unit, module, lab, or lab: and part of a lab test's name; all when empty (test). Part of a lab test's name (harden)
    #[arg(long, default_value = "")]
    pub filter: String,
}

fn module(name: &str) -> Result<Module, String> {
    let all = [Module::Gannet, Module::Stock, Module::None];
    let found = all.into_iter().find(|module| module.name() == name);
    found.ok_or_else(|| format!("MODULE={name}: gannet, stock or none"))
}

/// The arguments without the options whose value is empty: variables of make that nobody set.
fn given(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    for argument in arguments {
        if argument.is_empty() && kept.last().is_some_and(|name| name.starts_with("--")) {
            kept.pop();
        } else {
            kept.push(argument);
        }
    }
    kept
}

impl Cli {
    /// Reads arguments, the program's name first.
    pub fn read(arguments: impl Iterator<Item = String>) -> Result<Self, clap::Error> {
        Self::try_parse_from(given(arguments))
    }
}

impl Options {
    /// The machine for what runs on one.
    pub fn machine(&self) -> Machine {
        self.machine.unwrap_or(MACHINES[0])
    }

    /// Whether the user named the machine.
    pub fn machine_named(&self) -> bool {
        self.machine.is_some()
    }

    /// The same options on a machine.
    pub fn on(&self, machine: Machine) -> Options {
        Options { machine: Some(machine), ..self.clone() }
    }

    /// The options for each machine that need not be named, or for the one that the user named.
    pub fn for_machines(&self) -> Vec<Options> {
        match self.machine {
            Some(machine) => vec![self.on(machine)],
            None => MACHINES.map(|machine| self.on(machine)).into(),
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use clap::CommandFactory;

    /// The options of a command line.
    pub fn parse(words: &[&str]) -> Result<Options, clap::Error> {
        let line = ["xtask", "test"].iter().chain(words);
        match Cli::read(line.map(|word| (*word).to_owned()))?.command {
            Command::Test(options) => Ok(options),
            _ => unreachable!("the line says test"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_of_the_makefile_is_understood_with_its_options() {
        let root = gannet_lab::Layout::find().unwrap().root;
        let makefile = std::fs::read_to_string(root.join("Makefile")).unwrap().replace("\\\n", "");
        let lines: Vec<&str> =
            makefile.lines().filter_map(|line| line.trim().strip_prefix("$(XTASK) ")).collect();
        assert_eq!(lines.len(), 14);
        for line in lines {
            // Every value is a variable; here none is set.
            let options = line.split_whitespace().filter(|word| word.starts_with("--"));
            let command = line.split_whitespace().take(1);
            let words = ["xtask"].into_iter().chain(command).chain(options.flat_map(|o| [o, ""]));
            let words = words.map(str::to_owned);
            Cli::read(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn empty_variables_leave_the_defaults() {
        let options = parse(&["--kernel", "", "--cpus", "", "--json", ""]).unwrap();
        assert_eq!((options.kernel, options.cpus), (Kernel::V6_12, 1));
        assert!(options.json.is_none() && options.module == Module::Gannet);
    }

    #[test]
    fn what_looks_like_an_option_may_be_a_value() {
        let options = parse(&["--processor", "-la57", "--command", "--x"]).unwrap();
        assert_eq!((options.processor.as_str(), options.command.as_str()), ("-la57", "--x"));
    }

    #[test]
    fn what_runs_on_each_machine_runs_on_the_named_one_alone() {
        let machines = |words: &[&str]| {
            let options = parse(words).unwrap().for_machines();
            options.iter().map(Options::machine).collect::<Vec<_>>()
        };
        assert_eq!(machines(&["--machine", ""]), MACHINES);
        assert_eq!(machines(&["--machine", "intel"]), [Machine::Intel]);
        assert_eq!(machines(&["--machine", "amd"]), [Machine::Amd]);
        assert_eq!(machines(&["--machine", "amd-nrip"]), [Machine::AmdNrip]);
    }

    #[test]
    fn nonsense_is_refused_with_the_users_own_name_for_it() {
        for (words, name) in [
            (["--cpus", "0"], "<CPUS>"),
            (["--cpus", "x"], "<CPUS>"),
            (["--kernel", "7"], "KERNEL=7"),
            (["--machine", "arm"], "MACHINE=arm"),
            (["--module", "xen"], "MODULE=xen"),
        ] {
            let error = parse(&words).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        assert!(parse(&["--json"]).is_err() && parse(&["--fliter", "x"]).is_err());
    }
}
