//! The options of `exitbench run`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::DeviceArguments;
use crate::bench::layout::MOST_PAGES;
use crate::report::Unit;

/// Repetitions where the clock is a real one: enough to show a difference of one workload among all by a sign test, even if two
/// of the repetitions are disturbed.
const REPETITIONS: u64 = 15;

/// Which of the mapped pages a guest writes to after each switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Touch {
    /// A fixed number, spread evenly
    Few,
    /// Every one
    All,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Every repetition runs each workload once, in a fresh VM, in the order of `list`, whatever the \
                  order here. A workload that the machine cannot run is skipped with the reason; one that \
                  fails does not stop the others, but the exit status is then 1.\n\n\
                  After the measured pass of the first repetition each workload runs the bare operation \
                  --marker-iterations times between two marker instructions (nopl \
                  0x01544e47(%rax), nopl 0x02544e47(%rax)), so that an emulator's plugin can \
                  count what one operation performs."
)]
pub struct RunArguments {
    /// Names of workloads, see `list`; without any, all but those of nested virtualization
    #[arg(value_name = "WORKLOAD")]
    pub workloads: Vec<String>,
    /// Names of workloads with commas between, in place of WORKLOAD
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',', conflicts_with = "workloads")]
    pub only: Vec<String>,
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
    /// Times that each workload runs, in a fresh VM each [default: 15; 1 where the unit is instructions]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub repetitions: Option<u64>,
    /// The host's CPU to hold the vCPU on, or two, one for each vCPU of a workload that has two
    #[arg(long, value_name = "CPU,CPU", value_delimiter = ',')]
    pub cpu: Vec<usize>,
    /// Samples of each repetition before those that count: caches and page tables are filled then
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u64).range(0..=200_000))]
    pub warm_up: u64,
    /// Samples of each repetition
    #[arg(long, value_name = "N", default_value_t = 500,
          value_parser = clap::value_parser!(u64).range(1..=200_000))]
    pub iterations: u64,
    /// Operations between the markers; 0 leaves the markers out
    #[arg(long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u64).range(0..=200_000))]
    pub marker_iterations: u64,
    /// Leave the samples out of the JSON; the median of each repetition stays
    #[arg(long)]
    pub no_samples: bool,
    /// Have the guest of `timer_rearm` use the lazy TSC deadline where its CPUID offers it
    #[arg(long)]
    pub lazy_timer: bool,
    /// Seconds after which a repetition of a workload has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u64,
    #[command(flatten)]
    pub device: DeviceArguments,
}

impl RunArguments {
    /// The names of the workloads that were asked for; none if all are wanted.
    pub fn names(&self) -> &[String] {
        if self.only.is_empty() { &self.workloads } else { &self.only }
    }

    /// How many times each workload runs. Where instructions are counted there is no noise that would take more than one.
    pub fn repetitions(&self) -> u64 {
        let without = || if self.device.unit == Unit::Tsc { REPETITIONS } else { 1 };
        self.repetitions.unwrap_or_else(without)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, Command};
    use super::*;
    use clap::Parser;

    fn run(words: &[&str]) -> Option<RunArguments> {
        let line = ["exitbench", "run"].iter().chain(words);
        match Cli::try_parse_from(line).map(|cli| cli.command) {
            Ok(Command::Run(run)) => Some(run),
            _ => None,
        }
    }

    #[test]
    fn run_takes_workloads_and_options_in_any_order() {
        let run = run(&["cpuid", "--iterations", "300", "rdmsr", "--json", "f"]).unwrap();
        assert_eq!(run.names(), ["cpuid", "rdmsr"]);
        assert_eq!((run.iterations, run.json), (300, Some("f".into())));
    }

    #[test]
    fn workloads_are_named_in_one_way_or_the_other() {
        assert_eq!(run(&["--only", "cpuid,rdmsr"]).unwrap().names(), ["cpuid", "rdmsr"]);
        assert!(run(&["ipi", "--only", "cpuid"]).is_none());
        assert!(run(&[]).unwrap().names().is_empty());
    }

    #[test]
    fn pages_are_a_list_and_what_is_touched_needs_them() {
        let pages = |words| run(words).map(|run| (run.pages, run.touch));
        assert_eq!(pages(&["--pages", "1,10000"]), Some((vec![1, 10_000], Touch::Few)));
        assert_eq!(pages(&["--pages", "9", "--touch", "all"]), Some((vec![9], Touch::All)));
        assert_eq!(pages(&["--touch", "all"]), None);
        assert_eq!(pages(&["--pages", "0"]), None);
    }

    #[test]
    fn cpus_are_a_list_of_numbers() {
        assert_eq!(run(&["--cpu", "2,3"]).unwrap().cpu, [2, 3]);
        assert!(run(&["--cpu", "all"]).is_none());
        assert!(run(&["--cpu", "-1"]).is_none());
    }

    #[test]
    fn nothing_is_measured_no_times() {
        assert!(run(&["--iterations", "0"]).is_none());
        assert!(run(&["--repetitions", "0"]).is_none());
    }

    #[test]
    fn a_clock_with_noise_takes_more_than_one_repetition() {
        let repetitions = |words| run(words).unwrap().repetitions();
        assert_eq!(repetitions(&["--unit", "tsc"]), REPETITIONS);
        assert_eq!(repetitions(&["--unit", "instructions"]), 1);
        assert_eq!(repetitions(&["--unit", "instructions", "--repetitions", "7"]), 7);
    }
}
