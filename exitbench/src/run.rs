//! `exitbench run`: every workload in rounds, so that whatever slowly changes on the host meets all of them alike.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;

use crate::bench::machine::Passes;
use crate::bench::runner::{self, Repetition, Settings};
use crate::bench::workload::{Mapped, Workload};
use crate::bench::{nested, workloads};
use crate::cli::{RunArguments, Touch};
use crate::output::{print, show, show_progress};
use crate::report::{self, Entry, Measurement, Missing, Report};
use crate::vmm::hypervisor::{self, Hypervisor};
use crate::vmm::{affinity, signal};
use crate::{host, table};

/// One workload, and what came of it so far.
struct Series {
    workload: &'static Workload,
    mapped: Option<Mapped>,
    samples: Vec<Vec<u64>>,
    statistics: BTreeMap<String, u64>,
    /// Why there will be no more samples.
    end: Option<Missing>,
}

/// `exitbench list`.
pub fn list() -> Result<bool> {
    let mut table = table::new(&["workload", "one operation"]);
    for workload in workloads::ALL.iter().chain(nested::ALL) {
        table.add_row([workload.name, workload.about]);
    }
    print(&table)?;
    Ok(true)
}

/// `exitbench run`; whether nothing failed.
pub fn command(arguments: &RunArguments) -> Result<bool> {
    let mut all = chosen(arguments)?;
    affinity::check(&arguments.cpu)?;
    arguments.json.as_deref().map_or(Ok(()), report::try_place)?;
    let hypervisor = Hypervisor::open(&arguments.device.device)?;
    signal::prepare()?;
    if let Some(first) = arguments.cpu.first() {
        affinity::pin(*first)?;
    }
    let settings = Settings {
        passes: Passes {
            warm_up: arguments.warm_up,
            iterations: arguments.iterations,
            marker_iterations: arguments.marker_iterations,
        },
        pinned: &arguments.cpu,
        timeout: Duration::from_secs(arguments.timeout),
        lazy_timer: arguments.lazy_timer,
    };
    rounds(arguments.repetitions(), &mut all, settings, |series, settings| {
        runner::run(&hypervisor, series.workload, series.mapped, settings)
    });
    let report = Report {
        host: Some(host::facts(&hypervisor)),
        settings: Some(told(arguments)),
        workloads: all.into_iter().map(|series| series.entry(arguments)).collect(),
        ..Report::new(
            arguments.device.unit,
            arguments.device.module(),
            hypervisor::kernel_release(),
        )
    };
    show(&report, arguments.json.as_deref())
}

/// Runs every workload once in each round. The first has the counted passes, so that the markers come in the order of the workloads. One
/// that could not run, or failed, is not tried again.
fn rounds(
    repetitions: u64,
    all: &mut [Series],
    settings: Settings<'_>,
    mut run: impl FnMut(&Series, Settings<'_>) -> Result<Repetition, Missing>,
) {
    let number = all.len();
    for round in 1..=repetitions {
        let mut settings = settings;
        if round > 1 {
            settings.passes.marker_iterations = 0;
        }
        for (at, series) in all.iter_mut().enumerate().filter(|(_, series)| series.end.is_none()) {
            show_progress(
                &series.progress((at + 1, number), (round, repetitions)),
                at == 0 || round == 1,
            );
            match run(series, settings) {
                Ok(Repetition { samples, statistics }) => {
                    series.samples.push(samples);
                    series.statistics.extend(statistics);
                }
                Err(end) => series.end = Some(end),
            }
        }
    }
    show_progress("", false);
}

impl Series {
    fn progress(&self, (at, number): (usize, usize), (round, rounds): (u64, u64)) -> String {
        let pages = self.mapped.map_or(String::new(), |m| format!(" with {} pages", m.pages));
        let round = match rounds {
            1 => String::new(),
            _ => format!(", repetition {round} of {rounds}"),
        };
        format!("[{at}/{number}] {}{pages}{round}", self.workload.name)
    }

    fn entry(self, arguments: &RunArguments) -> Entry {
        let name = match self.mapped {
            None => self.workload.name.to_string(),
            Some(Mapped { pages, touched }) => format!("{}[{pages},{touched}]", self.workload.name),
        };
        let repetitions = self.samples.len();
        let outcome = match (self.end, Measurement::of(self.samples)) {
            (Some(Missing::Failed(failed)), _) if repetitions > 0 => {
                Err(Missing::Failed(format!("in repetition {}: {failed}", repetitions + 1)))
            }
            (Some(end), _) => Err(end),
            (None, None) => Err(Missing::Failed("it left no samples".into())),
            (None, Some(mut measured)) => {
                measured.markers = arguments.marker_iterations > 0;
                measured.marker_iterations = arguments.marker_iterations;
                measured.statistics = self.statistics;
                if arguments.no_samples {
                    measured.samples.clear();
                }
                Ok(measured)
            }
        };
        Entry { name, outcome }
    }
}

/// Every workload that was asked for, once or once for each number of pages.
fn chosen(arguments: &RunArguments) -> Result<Vec<Series>> {
    let names = arguments.names();
    let of = |workload: &'static Workload, mapped| Series {
        workload,
        mapped,
        samples: Vec::new(),
        statistics: BTreeMap::new(),
        end: None,
    };
    if arguments.pages.is_empty() {
        let plain = workloads::choose(names, workloads::ALL)?;
        return Ok(plain.into_iter().map(|workload| of(workload, None)).collect());
    }
    let paged = workloads::choose(names, workloads::PAGED)?;
    let mapped = |pages: &u64| Some(Mapped::new(*pages, arguments.touch == Touch::All));
    let all = paged.into_iter().flat_map(|w| arguments.pages.iter().map(move |n| of(w, mapped(n))));
    Ok(all.collect())
}

/// The settings as the report tells them.
fn told(arguments: &RunArguments) -> report::Settings {
    report::Settings {
        repetitions: arguments.repetitions(),
        iterations: arguments.iterations,
        warm_up: arguments.warm_up,
        pinned: arguments.cpu.clone(),
        lazy_timer: arguments.lazy_timer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn arguments(words: &[&str]) -> RunArguments {
        let line = ["exitbench", "run"].iter().chain(words);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Run(arguments) => arguments,
            _ => panic!("not understood as run"),
        }
    }

    /// Runs `words` with a stand-in for the machine, and gives the entries and which workload ran with how many counted operations.
    fn run(
        words: &[&str],
        mut each: impl FnMut(&Series) -> Result<Repetition, Missing>,
    ) -> (Vec<Entry>, Vec<(&'static str, u64)>) {
        let arguments = arguments(words);
        let mut all = chosen(&arguments).unwrap();
        let passes = Passes { warm_up: 0, iterations: 3, marker_iterations: 100 };
        let settings = Settings { passes, pinned: &[], timeout: Duration::ZERO, lazy_timer: false };
        let mut order = Vec::new();
        rounds(arguments.repetitions(), &mut all, settings, |series, settings| {
            order.push((series.workload.name, settings.passes.marker_iterations));
            each(series)
        });
        (all.into_iter().map(|series| series.entry(&arguments)).collect(), order)
    }

    fn three(series: &Series) -> Repetition {
        let least = series.samples.len() as u64;
        Repetition { samples: vec![least, least + 1, least + 2], statistics: BTreeMap::new() }
    }

    #[test]
    fn workloads_run_in_rounds_of_which_the_first_is_counted() {
        let words = ["--only", "rdmsr,cpuid", "--repetitions", "2"];
        let (entries, order) = run(&words, |series| Ok(three(series)));
        assert_eq!(order, [("cpuid", 100), ("rdmsr", 100), ("cpuid", 0), ("rdmsr", 0)]);
        let Ok(measured) = &entries[0].outcome else { panic!("{entries:?}") };
        assert_eq!((measured.medians.as_slice(), measured.iterations), (&[1, 2][..], 3));
        assert!(measured.markers && measured.samples == [[0, 1, 2], [1, 2, 3]]);
    }

    #[test]
    fn samples_can_be_left_out_and_the_medians_stay() {
        let words = ["cpuid", "--repetitions", "2", "--no-samples"];
        let (entries, _) = run(&words, |series| Ok(three(series)));
        let Ok(measured) = &entries[0].outcome else { panic!("{entries:?}") };
        assert!(measured.samples.is_empty() && measured.medians == [1, 2]);
    }

    #[test]
    fn what_fails_is_not_tried_again_and_says_when_it_failed() {
        let words = ["cpuid", "rdmsr", "--repetitions", "3"];
        let failed = |reason: &str| Missing::Failed(reason.into());
        let (entries, order) =
            run(&words, |series| match (series.workload.name, series.samples.len()) {
                ("cpuid", 1) => Err(failed("timed out")),
                _ => Ok(three(series)),
            });
        assert_eq!(order.iter().filter(|(name, _)| *name == "cpuid").count(), 2);
        assert_eq!(entries[0].outcome, Err(failed("in repetition 2: timed out")));
        assert!(matches!(&entries[1].outcome, Ok(m) if m.medians.len() == 3));
    }

    #[test]
    fn pages_make_workloads_of_their_own() {
        let words = ["cr0_wp", "--pages", "1,10", "--repetitions", "1"];
        let (entries, _) = run(&words, |series| Ok(three(series)));
        let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["cr0_wp[1,1]", "cr0_wp[10,8]"]);
    }
}
