//! `exitbench compare`: two reports side by side, with the ratio of their medians and whether it is more than noise.
//! Reports in different units do not compare and are refused.

use std::path::Path;

use anyhow::{Result, bail};

use crate::cli::CompareArguments;
use crate::output::print;
use crate::report::{Measure, Report};

mod show;
mod verdict;

use verdict::{Row, Side};

/// Two reports side by side.
struct Comparison {
    /// What each report is of.
    about: [String; 2],
    measure: Measure,
    rows: Vec<Row>,
    alpha: f64,
    /// What both reports tell of their hosts and settings, and tell differently: name, first, second.
    differing: Vec<[String; 3]>,
}

/// `exitbench compare`; whether nothing is slower than is allowed.
pub fn command(arguments: &CompareArguments) -> Result<bool> {
    let paths = [&arguments.first, &arguments.second];
    let reports = [Report::read(paths[0])?, Report::read(paths[1])?];
    let comparison = Comparison::of(&reports, paths.map(|path| path.as_path()), arguments.alpha)?;
    let text = if arguments.markdown { comparison.markdown() } else { comparison.text() };
    print(&text)?;
    for row in &comparison.rows {
        if let Some(text) = missing(row) {
            eprintln!("{text}");
        }
    }
    let Some(limit) = arguments.fail_above else { return Ok(true) };
    let beyond: Vec<String> =
        comparison.rows.iter().filter_map(|row| verdict::beyond(row, limit)).collect();
    beyond.iter().for_each(|text| eprintln!("exitbench: {text}"));
    Ok(beyond.is_empty())
}

impl Comparison {
    fn of(reports: &[Report; 2], paths: [&Path; 2], alpha: f64) -> Result<Self> {
        let measure = Measure::common(reports)?;
        let rows = verdict::rows(reports, &measure, alpha);
        if rows.iter().all(|row| row.verdict.is_none()) {
            bail!("the reports do not compare: no workload was measured in both");
        }
        Ok(Self {
            about: [0, 1].map(|index| about(&reports[index], paths[index])),
            measure,
            rows,
            alpha,
            differing: differing(reports),
        })
    }
}

/// What a report is of, in one line.
fn about(report: &Report, path: &Path) -> String {
    let name = path
        .file_name()
        .map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into());
    let mut words = vec![report.module.clone()];
    if let Some(host) = &report.host {
        if !host.module_version.is_empty() {
            words.push(host.module_version.clone());
        }
        words.push(format!(
            "on {}",
            if host.cpu.is_empty() { "a CPU without a name" } else { &host.cpu }
        ));
    }
    if !report.kernel.is_empty() {
        words.push(format!("under {}", report.kernel));
    }
    let settings = report.settings.as_ref();
    let repetitions = settings.map(|s| format!(", {} × {} samples", s.repetitions, s.iterations));
    format!("{name}: {}{}", words.join(" "), repetitions.unwrap_or_default())
}

fn differing(reports: &[Report; 2]) -> Vec<[String; 3]> {
    let (first, second) = (reports[0].facts(), reports[1].facts());
    let both = first.into_iter().filter_map(|(name, a)| {
        let b = second.get(&name)?.clone();
        (a != b).then_some([name, a, b])
    });
    both.collect()
}

/// What is said of a workload that not both reports measured.
fn missing(row: &Row) -> Option<String> {
    let why = |side: &Side| match side {
        Side::Measured { .. } => None,
        Side::Skipped(reason) => Some(format!("skipped: {reason}")),
        Side::Failed(reason) => Some(format!("failed: {reason}")),
        Side::Absent => Some("it is not in the report".to_owned()),
    };
    let name = &row.name;
    match row.sides.each_ref().map(why) {
        [None, None] => None,
        [Some(a), Some(b)] if a == b => Some(format!("{name} in both: {a}")),
        [Some(a), Some(b)] => Some(format!("{name} in A: {a}\n{name} in B: {b}")),
        [Some(a), None] => Some(format!("{name} in A: {a}")),
        [None, Some(b)] => Some(format!("{name} in B: {b}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{measured, report};
    use crate::report::{Entry, Host, Missing, Settings, Unit};

    fn reports() -> [Report; 2] {
        let skipped = Err(Missing::Skipped("no SVM".into()));
        let nested = Entry { name: "nested_cpuid".into(), outcome: skipped };
        let neither = Entry { name: "xsetbv".into(), ..nested.clone() };
        let first = vec![
            measured("cpuid", &[2000; 9]),
            measured("rdmsr", &[10; 9]),
            nested,
            neither.clone(),
        ];
        let second = vec![measured("cpuid", &[500; 9]), measured("ipi", &[10; 9]), neither];
        let host = |cpu: &str| Host { cpu: cpu.into(), cpus: 4, ..Host::default() };
        let settings = Settings { repetitions: 9, iterations: 1, ..Settings::default() };
        let [first, second] = [first, second].map(|workloads| Report {
            settings: Some(settings.clone()),
            ..report(Unit::Tsc, workloads)
        });
        [
            Report { host: Some(host("EPYC 1")), ..first },
            Report { host: Some(host("EPYC 2")), module: "gannet".into(), ..second },
        ]
    }

    fn compared(reports: &[Report; 2]) -> Result<Comparison> {
        Comparison::of(reports, [Path::new("x/a.json"), Path::new("b.json")], 0.05)
    }

    #[test]
    fn the_markdown_is_the_agreed_one() {
        let expected = "\
- A: a.json: kvm_amd on EPYC 1 under 6.12, 9 × 1 samples
- B: b.json: gannet on EPYC 2 under 6.12, 9 × 1 samples

| workload | A | spread | B | spread | ratio | p | B is |
|---|---:|---:|---:|---:|---:|---:|---|
| cpuid | 2000 | 0.0 % | 500 | 0.0 % | 0.250× | 0.0039 | faster |
| rdmsr | 10 | 0.0 % | not in it |  | – | – | – |
| nested_cpuid | skipped |  | not in it |  | – | – | – |
| xsetbv | skipped |  | skipped |  | – | – | – |
| ipi | not in it |  | 10 | 0.0 % | – | – | – |

medians in TSC ticks; p of a sign test over the repetitions, adjusted for 1 workload

not every report tells its TSC's frequency: on one host ticks compare, on two perhaps not

| what differs | A | B |
|---|---|---|
| cpu | EPYC 1 | EPYC 2 |";
        assert_eq!(compared(&reports()).unwrap().markdown(), expected);
    }

    #[test]
    fn the_table_shows_the_same() {
        let text = compared(&reports()).unwrap().text();
        for expected in ["A: a.json", "2000", "500", "0.250×", "0.0039", "faster", "EPYC 2"] {
            assert!(text.contains(expected), "{expected} is missing in\n{text}");
        }
    }

    #[test]
    fn what_one_report_lacks_is_told() {
        let comparison = compared(&reports()).unwrap();
        let told: Vec<String> = comparison.rows.iter().filter_map(missing).collect();
        let expected = [
            "rdmsr in B: it is not in the report",
            "nested_cpuid in A: skipped: no SVM\nnested_cpuid in B: it is not in the report",
            "xsetbv in both: skipped: no SVM",
            "ipi in A: it is not in the report",
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn reports_without_a_common_workload_do_not_compare() {
        let [first, mut second] = reports();
        second.workloads.remove(0);
        let error = compared(&[first, second]).err().unwrap().to_string();
        assert!(error.contains("no workload was measured in both"), "{error}");
    }

    #[test]
    fn reports_of_before_the_samples_are_shown_and_not_tested() {
        let old = |cost| Report {
            format: 1,
            exitbench: None,
            ..report(Unit::Tsc, vec![measured("cpuid", &[cost])])
        };
        let text = compared(&[old(10), old(5)]).unwrap().text();
        assert!(text.contains("0.500×") && text.contains("not tested: so few"), "{text}");
    }
}
