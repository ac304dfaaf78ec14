//! The look of every table that exitbench prints, and the table of one run.
//! Colours appear on a terminal only, and never where `NO_COLOR` is set.

use comfy_table::{Cell, CellAlignment, Color, LineStyle, Table, TableStyle};

use crate::report::{Entry, Outcome, Report};

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

/// The table that `run` prints.
pub fn of_run(report: &Report) -> Table {
    let mut table = of_figures(&["workload", "min", "median", "max", "iterations"]);
    for entry in &report.workloads {
        let name = Cell::new(&entry.name);
        let cells = match &entry.outcome {
            Outcome::Measured(m) => [m.min, m.median, m.max, m.iterations].map(Cell::new),
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
    [Cell::new(""), Cell::new(word).fg(color), Cell::new(""), Cell::new("")]
}
