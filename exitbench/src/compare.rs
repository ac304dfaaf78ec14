//! `exitbench compare`: two reports side by side, with the ratio of their medians.
//! Reports in different units do not compare and are refused.

use anyhow::{Result, bail};
use comfy_table::{Cell, Color, Table};

use crate::report::{Entry, Outcome, Report};
use crate::table;

/// A ratio within this distance of one is neither better nor worse.
const INDIFFERENT: f64 = 0.05;

/// One line of the comparison.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    name: String,
    first: String,
    second: String,
    /// Second median over first; `None` unless both were measured.
    ratio: Option<f64>,
}

/// The table that `compare` prints: medians, in the unit of both reports.
pub fn compare(first: &Report, second: &Report) -> Result<Table> {
    let rows = rows(first, second)?;
    let (mut head_a, mut head_b) = (first.module.clone(), second.module.clone());
    if head_a == head_b {
        head_a += " (A)";
        head_b += " (B)";
    }
    let mut table = table::of_figures(&["workload", &head_a, &head_b, "ratio"]);
    for row in rows {
        table.add_row([
            Cell::new(row.name),
            Cell::new(row.first),
            Cell::new(row.second),
            ratio_cell(row.ratio),
        ]);
    }
    Ok(table)
}

fn rows(first: &Report, second: &Report) -> Result<Vec<Row>> {
    if first.unit != second.unit {
        bail!(
            "the reports do not compare: one counts {}, the other {}",
            first.unit.describe(),
            second.unit.describe()
        );
    }
    let only_second =
        second.workloads.iter().filter(|w| !first.workloads.iter().any(|v| v.name == w.name));
    Ok(first.workloads.iter().chain(only_second).map(|w| row(&w.name, first, second)).collect())
}

fn row(name: &str, first: &Report, second: &Report) -> Row {
    let ratio = match (first.measurement(name), second.measurement(name)) {
        (Some(a), Some(b)) if a.median != 0 => Some(b.median as f64 / a.median as f64),
        _ => None,
    };
    Row { name: name.into(), first: figure(first, name), second: figure(second, name), ratio }
}

fn figure(report: &Report, name: &str) -> String {
    match report.workloads.iter().find(|entry| entry.name == name) {
        None => "–".into(),
        Some(Entry { outcome: Outcome::Measured(m), .. }) => m.median.to_string(),
        Some(Entry { outcome: Outcome::Skipped { .. }, .. }) => "skipped".into(),
        Some(Entry { outcome: Outcome::Failed { .. }, .. }) => "failed".into(),
    }
}

fn ratio_cell(ratio: Option<f64>) -> Cell {
    let Some(ratio) = ratio else { return Cell::new("–") };
    let cell = Cell::new(format!("{ratio:.2}×"));
    if ratio < 1.0 - INDIFFERENT {
        cell.fg(Color::Green)
    } else if ratio > 1.0 + INDIFFERENT {
        cell.fg(Color::Red)
    } else {
        cell
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Measurement, Unit};

    fn measured(name: &str, median: u64) -> Entry {
        let outcome = Outcome::Measured(Measurement {
            min: median,
            median,
            max: median,
            iterations: 1,
            markers: false,
            marker_iterations: 0,
            statistics: Default::default(),
        });
        Entry { name: name.into(), outcome }
    }

    fn report(unit: Unit, workloads: Vec<Entry>) -> Report {
        Report { unit, module: "kvm_amd".into(), kernel: String::new(), workloads }
    }

    #[test]
    fn the_ratio_is_second_over_first() {
        let a = report(Unit::Tsc, vec![measured("cpuid", 2000)]);
        let b = report(Unit::Tsc, vec![measured("cpuid", 500)]);
        assert_eq!(rows(&a, &b).unwrap()[0].ratio, Some(0.25));
    }

    #[test]
    fn workloads_of_either_report_have_a_row() {
        let a = report(Unit::Tsc, vec![measured("cpuid", 1), measured("nothing", 0)]);
        let b = report(
            Unit::Tsc,
            vec![
                measured("ipi", 1),
                Entry { name: "cpuid".into(), outcome: Outcome::Failed { failed: "x".into() } },
            ],
        );
        let rows = rows(&a, &b).unwrap();
        let names: Vec<_> = rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["cpuid", "nothing", "ipi"]);
        assert!(rows.iter().all(|r| r.ratio.is_none()));
        assert_eq!(rows[0].second, "failed");
        assert_eq!(rows[2].first, "–");
    }

    #[test]
    fn different_units_do_not_compare() {
        let a = report(Unit::Tsc, vec![]);
        let b = report(Unit::Instructions, vec![]);
        assert!(compare(&a, &b).unwrap_err().to_string().contains("do not compare"));
    }

    #[test]
    fn the_table_shows_both_medians_and_the_ratio() {
        let a = report(Unit::Tsc, vec![measured("cpuid", 2000)]);
        let b = report(Unit::Tsc, vec![measured("cpuid", 500)]);
        let text = compare(&a, &b).unwrap().to_string();
        for expected in ["kvm_amd (A)", "kvm_amd (B)", "2000", "500", "0.25×"] {
            assert!(text.contains(expected), "{expected} is missing in\n{text}");
        }
    }
}
