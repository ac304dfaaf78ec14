//! The look of every table that exitbench prints, and the table of one run.
//! Colours appear on a terminal only, and never where `NO_COLOR` is set.

use comfy_table::{Cell, CellAlignment, Color, LineStyle, Table, TableStyle};

use crate::report::{Entry, Figures, Measurement, Missing, Report};

/// One line above, one below the heads, one at the end.
const STYLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// An empty table with these column heads.
pub fn new(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE);
    table.set_header(heads);
    if std::env::var_os("NO_COLOR").is_some() {
        table.force_no_tty();
    }
    table
}

/// An empty table whose columns after the first hold figures.
pub fn of_figures(heads: &[&str]) -> Table {
    let mut table = new(heads);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The table that `run` prints. `within` and `between` are interquartile ranges as parts of the median: of all samples, and of the
/// repetitions' medians.
pub fn of_run(report: &Report) -> Table {
    let heads = ["workload", "min", "median", "max", "within", "between", "samples"];
    let mut table = of_figures(&heads);
    for entry in &report.workloads {
        let cells = match &entry.outcome {
            Ok(measured) => figures(measured),
            Err(Missing::Skipped(_)) => word("skipped", Color::DarkGrey),
            Err(Missing::Failed(_)) => word("FAILED", Color::Red),
        };
        table.add_row([Cell::new(&entry.name)].into_iter().chain(cells));
    }
    table
}

fn figures(measured: &Measurement) -> [Cell; 6] {
    let Figures { min, median, max } = measured.summary;
    let between = measured.repetitions().map(|summary| summary.spread());
    let samples = match measured.medians.len() {
        1 => measured.iterations.to_string(),
        repetitions => format!("{repetitions} × {}", measured.iterations),
    };
    [
        Cell::new(min),
        Cell::new(median),
        Cell::new(max),
        Cell::new(percent(measured.within())),
        Cell::new(percent(between)),
        Cell::new(samples),
    ]
}

/// A part in percent; a dash where nobody knows it.
pub fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "–".to_owned(), |part| format!("{:.1} %", part * 100.0))
}

/// Why workloads of the run have no figures, one text each.
pub fn reasons(report: &Report) -> Vec<String> {
    let reason = |entry: &Entry| match &entry.outcome {
        Ok(_) => None,
        Err(Missing::Skipped(skipped)) => Some(format!("{}: not supported: {skipped}", entry.name)),
        Err(Missing::Failed(failed)) => Some(format!("{}: failed: {failed}", entry.name)),
    };
    report.workloads.iter().filter_map(reason).collect()
}

fn word(word: &str, color: Color) -> [Cell; 6] {
    ["", word, "", "", "", ""].map(|text| match text {
        "" => Cell::new(""),
        word => Cell::new(word).fg(color),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Unit;
    use crate::report::tests::{measured, report};

    #[test]
    fn a_run_shows_its_figures_and_both_spreads() {
        let skipped = Err(Missing::Skipped("no XSAVE".into()));
        let entry = Entry { name: "xsetbv".into(), outcome: skipped };
        let all = vec![measured("cpuid", &[90, 100, 110]), measured("rdmsr", &[7]), entry];
        let report = report(Unit::Tsc, all);
        let lines = of_run(&report).to_string();
        let words = |name: &str| {
            let line = lines.lines().find(|line| line.contains(name)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(words("cpuid"), "cpuid 90 100 110 10.0 % 10.0 % 3 × 1");
        assert_eq!(words("rdmsr"), "rdmsr 7 7 7 0.0 % – 1");
        assert_eq!(words("xsetbv"), "xsetbv skipped");
        assert_eq!(reasons(&report), ["xsetbv: not supported: no XSAVE"]);
    }
}
