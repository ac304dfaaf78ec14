//! The commands' options: `--name value`, as the Makefile passes its variables. An empty value counts as not given.

use anyhow::{Context, Result, bail};
use gannet_lab::{Kernel, MACHINES, Machine, Module};
use std::path::PathBuf;

/// Every option of every command.
#[derive(Clone, Debug)]
pub struct Options {
    pub kernel: Kernel,
    pub machine: Machine,
    /// Whether the user named the machine: what runs on each of them then runs on that one alone.
    pub machine_named: bool,
    pub module: Module,
    /// Gannet's parameters, or the module's that was chosen.
    pub parameters: String,
    /// The stock module's, where both run.
    pub stock_parameters: String,
    /// The guest's CPUs.
    pub cpus: u32,
    /// The host's CPUs.
    pub host_cpus: u32,
    pub json: Option<PathBuf>,
    /// An earlier run's JSON, in place of a run.
    pub from: Option<PathBuf>,
    /// The workloads to run; all when empty.
    pub only: Vec<String>,
    /// What runs in a machine by hand, on which processor, and how long its console may be silent.
    pub command: String,
    pub processor: String,
    pub seconds: Option<u64>,
    /// Programs of the user's own that such a machine has besides.
    pub programs: Vec<PathBuf>,
    /// The tests to run: `source`, `unit`, `module`, `lab`, or `lab:` and part of a lab test's name; all when empty.
    pub filter: String,
}

impl Options {
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Options {
            kernel: Kernel::V6_12,
            machine: Machine::Amd,
            machine_named: false,
            module: Module::Gannet,
            parameters: String::new(),
            stock_parameters: String::new(),
            cpus: 1,
            host_cpus: 1,
            json: None,
            from: None,
            only: Vec::new(),
            command: String::new(),
            processor: String::new(),
            seconds: None,
            programs: Vec::new(),
            filter: String::new(),
        };
        while let Some(name) = arguments.next() {
            let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
            if value.is_empty() {
                continue;
            }
            match name.as_str() {
                "--kernel" => options.kernel = value.parse()?,
                "--machine" => {
                    options.machine = value.parse()?;
                    options.machine_named = true;
                }
                "--module" => {
                    options.module = match value.as_str() {
                        "gannet" => Module::Gannet,
                        "stock" => Module::Stock,
                        "none" => Module::None,
                        _ => bail!("MODULE={value}: gannet, stock or none"),
                    }
                }
                "--parameters" => options.parameters = value,
                "--stock-parameters" => options.stock_parameters = value,
                "--cpus" => options.cpus = count("CPUS", &value)?,
                "--host-cpus" => options.host_cpus = count("HOST_CPUS", &value)?,
                "--json" => options.json = Some(value.into()),
                "--from" => options.from = Some(value.into()),
                "--only" => options.only = value.split(',').map(|n| n.trim().to_owned()).collect(),
                "--command" => options.command = value,
                "--processor" => options.processor = value,
                "--seconds" => options.seconds = Some(value.parse().context("SECONDS")?),
                "--programs" => {
                    options.programs = value.split_whitespace().map(PathBuf::from).collect()
                }
                "--filter" => options.filter = value,
                _ => bail!("no such option: {name}"),
            }
        }
        Ok(options)
    }

    /// The same for each machine that runs unasked, or for the one that the user named.
    pub fn for_machines(&self) -> Vec<Options> {
        if self.machine_named {
            return vec![self.clone()];
        }
        let on = |machine| Options { machine, ..self.clone() };
        UNASKED.into_iter().map(on).collect()
    }
}

/// The machines on which both modules run everything.
const UNASKED: [Machine; 2] = MACHINES;

fn count(name: &str, value: &str) -> Result<u32> {
    let number = value.parse().ok().filter(|n| (1..=64).contains(n));
    number.with_context(|| format!("{name}={value}: a number from 1 to 64 is wanted"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options> {
        Options::parse(words.iter().map(|w| (*w).to_owned()))
    }

    #[test]
    fn empty_variables_leave_the_defaults() {
        let options = parse(&["--kernel", "", "--cpus", "", "--json", ""]).unwrap();
        assert_eq!((options.kernel, options.cpus), (Kernel::V6_12, 1));
        assert!(options.json.is_none());
    }

    #[test]
    fn what_runs_on_each_machine_runs_on_the_named_one_alone() {
        let machines = |words: &[&str]| {
            let options = parse(words).unwrap().for_machines();
            options.iter().map(|o| o.machine).collect::<Vec<_>>()
        };
        assert_eq!(machines(&["--machine", ""]), UNASKED);
        assert_eq!(machines(&["--machine", "intel"]), [Machine::Intel]);
        assert_eq!(machines(&["--machine", "amd"]), [Machine::Amd]);
    }

    #[test]
    fn nonsense_is_refused_with_the_users_own_name_for_it() {
        for (words, name) in [
            (["--cpus", "0"], "CPUS=0"),
            (["--cpus", "x"], "CPUS=x"),
            (["--kernel", "7"], "KERNEL=7"),
            (["--machine", "arm"], "MACHINE=arm"),
            (["--module", "xen"], "MODULE=xen"),
        ] {
            let error = format!("{:#}", parse(&words).unwrap_err());
            assert!(error.contains(name), "{error}");
        }
        assert!(parse(&["--json"]).is_err());
    }
}
