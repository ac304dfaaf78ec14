//! The look of every table that exitbench prints, and the table of one run.
//! Colours appear on a terminal only, and never where `NO_COLOR` is set.

use comfy_table::{Cell, CellAlignment, Color, ContentArrangement, Table, presets};

use crate::report::{Entry, Outcome, Report};

/// An empty table with these column heads.
pub fn new(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(heads);
    if std::env::var_os("NO_COLOR").is_some() {
        table.force_no_tty();
    }
    table
}

/// The table that `run` prints.
pub fn of_run(report: &Report) -> Table {
    let mut table = new(&["workload", "min", "median", "max", "iterations"]);
    for entry in &report.workloads {
        let name = Cell::new(&entry.name);
        let cells = match &entry.outcome {
            Outcome::Measured(m) => [m.min, m.median, m.max, m.iterations]
                .map(|f| Cell::new(f).set_alignment(CellAlignment::Right)),
            Outcome::Skipped { .. } => word("skipped", Color::DarkGrey),
            Outcome::Failed { .. } => word("FAILED", Color::Red),
        };
        table.add_row([name].into_iter().chain(cells));
    }
    table
}

/// Why workloads of the run have no figures, one text each.
pub fn reasons(report: &Report) -> Vec<String> {
    let reason = |entry: &Entry| match &entry.outcome {
        Outcome::Measured(_) => None,
        Outcome::Skipped { skipped } => Some(format!("{}: not supported: {skipped}", entry.name)),
        Outcome::Failed { failed } => Some(format!("{}: failed: {failed}", entry.name)),
    };
    report.workloads.iter().filter_map(reason).collect()
}

fn word(word: &str, color: Color) -> [Cell; 4] {
    let cell = |text: &str| Cell::new(text).set_alignment(CellAlignment::Right);
    [cell(""), cell(word).fg(color), cell(""), cell("")]
}
