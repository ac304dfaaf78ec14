//! What the commands write to the terminal.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result};

use crate::report::Report;
use crate::table;

/// Writes a line. An error, unlike with `println!`, when the reader of a pipe has gone.
pub fn print(text: &dyn Display) -> Result<()> {
    writeln!(io::stdout(), "{text}").context("cannot write to standard output")
}

/// Writes the report where it was asked for, and shows it as a table; whether nothing failed.
pub fn show(report: &Report, json: Option<&Path>) -> Result<bool> {
    if let Some(path) = json {
        report.write(path)?;
    }
    if json != Some(Path::new("-")) {
        print(&table::of_run(report))?;
        print(&format!("in {}, on {}", report.unit.describe(), report.module))?;
    }
    for reason in table::reasons(report) {
        eprintln!("{reason}");
    }
    Ok(report.failures() == 0)
}

/// One line on a terminal, replaced by the next. Elsewhere a line for each text that is worth one, so that whoever waits sees that
/// something happens.
pub fn show_progress(text: &str, worth_a_line: bool) {
    let mut errors = io::stderr();
    // Progress that cannot be shown is not worth failing for.
    let _ = if errors.is_terminal() {
        write!(errors, "\r\x1b[K{text}").and_then(|()| errors.flush())
    } else if worth_a_line {
        writeln!(errors, "{text}")
    } else {
        Ok(())
    };
}
