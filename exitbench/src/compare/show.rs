//! How a comparison is shown: a table on a terminal, or Markdown.

use std::fmt::Write;

use comfy_table::{Cell, Color};

use super::Comparison;
use super::verdict::{Row, Side, Verdict};
use crate::table;

const HEADS: [&str; 8] = ["workload", "A", "spread", "B", "spread", "ratio", "p", "B is"];
const FACTS: [&str; 3] = ["what differs", "A", "B"];

impl Comparison {
    /// The comparison for a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for about in self.sides() {
            text += &format!("{about}\n");
        }
        let mut figures = table::of_figures(&HEADS);
        for row in &self.rows {
            let mut cells = self.cells(row).map(Cell::new);
            if let (Some(colour), [.., word]) = (colour(row), &mut cells) {
                *word = std::mem::replace(word, Cell::new("")).fg(colour);
            }
            figures.add_row(cells);
        }
        text += &figures.to_string();
        for note in self.notes() {
            text += &format!("\n{note}");
        }
        if !self.differing.is_empty() {
            let mut facts = table::new(&FACTS);
            for fact in &self.differing {
                facts.add_row(fact);
            }
            text += &format!("\n{facts}");
        }
        text
    }

    /// The comparison for a document.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for about in self.sides() {
            text += &format!("- {about}\n");
        }
        text += &markdown(&HEADS, self.rows.iter().map(|row| self.cells(row)), true);
        for note in self.notes() {
            text += &format!("\n{note}\n");
        }
        if !self.differing.is_empty() {
            text += &markdown(&FACTS, self.differing.iter().cloned(), false);
        }
        text.trim_end().to_owned()
    }

    fn sides(&self) -> impl Iterator<Item = String> {
        ["A", "B"].into_iter().zip(&self.about).map(|(letter, about)| format!("{letter}: {about}"))
    }

    fn cells(&self, row: &Row) -> [String; 8] {
        let median = |side: &Side| match side {
            Side::Measured { median, .. } => self.measure.show(*median),
            Side::Skipped(_) => "skipped".into(),
            Side::Failed(_) => "failed".into(),
            Side::Absent => "not in it".into(),
        };
        let spread = |side: &Side| match side {
            Side::Measured { spread, .. } => table::percent(*spread),
            _ => String::new(),
        };
        let [first, second] = &row.sides;
        let dash = || "–".to_owned();
        [
            row.name.clone(),
            median(first),
            spread(first),
            median(second),
            spread(second),
            row.ratio.map_or_else(dash, |ratio| format!("{ratio:.3}×")),
            row.verdict.and_then(Verdict::p).map_or_else(dash, p),
            row.verdict.map_or_else(dash, |verdict| verdict.word().to_owned()),
        ]
    }

    /// What the table does not say by itself.
    fn notes(&self) -> Vec<String> {
        let tested = self.rows.iter().filter(|row| row.verdict.is_some()).count();
        let mut notes = vec![format!(
            "medians in {}; p of a sign test over the repetitions, adjusted for {tested} workload{}",
            self.measure.unit,
            if tested == 1 { "" } else { "s" }
        )];
        notes.extend(self.measure.note.clone());
        if self.rows.iter().any(|row| row.verdict == Some(Verdict::NotTested)) {
            notes.push(format!(
                "not tested: so few repetitions cannot show a difference at p < {}, even if all agree",
                self.alpha
            ));
        }
        notes
    }
}

/// A p-value; below what anybody asks for it is not told exactly.
fn p(p: f64) -> String {
    if p < 0.0001 { "<0.0001".to_owned() } else { format!("{p:.4}") }
}

fn colour(row: &Row) -> Option<Color> {
    match row.verdict? {
        Verdict::Faster(_) => Some(Color::Green),
        Verdict::Slower(_) => Some(Color::Red),
        Verdict::NoDifference(_) | Verdict::NotTested => None,
    }
}

/// A table between empty lines; figures are on the right.
fn markdown<const N: usize>(
    heads: &[&str; N],
    rows: impl Iterator<Item = [String; N]>,
    figures: bool,
) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let escaped = |cell: String| cell.replace('|', "\\|").replace('\n', " ");
    let mut text = String::from("\n");
    text += &line(&heads.map(str::to_owned));
    let rule = |column: usize| if figures && (1..N - 1).contains(&column) { "---:" } else { "---" };
    // Writing to a string does not fail.
    let _ = writeln!(text, "|{}|", (0..N).map(rule).collect::<Vec<_>>().join("|"));
    for row in rows {
        text += &line(&row.map(escaped));
    }
    text
}
