//! What a machine's part of the page `docs/results/mechanisms.md` is made from, and what both the page and the limits ask of it.

use super::cost::Cycles;
use super::plan::Papers;
use super::results::Results;

/// What a machine's part of the page is made from.
pub struct Page<'a> {
    pub papers: &'a Papers,
    pub results: &'a Results,
    /// Files of plots that there are.
    pub plots: &'a [String],
}

/// A figure before a change and after it.
#[derive(Clone, Copy)]
pub struct Change {
    pub before: f64,
    pub after: f64,
}

impl Change {
    /// Both in words: small counts with two digits.
    pub fn text(self) -> String {
        let digits = if self.before < 100.0 { 2 } else { 0 };
        format!("{:.digits$} → {:.digits$}", self.before, self.after)
    }

    /// By how much of it the change lowered it: 0.39 for 39 %.
    pub fn saving(self) -> f64 {
        if self.before > 0.0 { 1.0 - self.after / self.before } else { 0.0 }
    }

    pub fn percent(self) -> String {
        let saving = self.saving() * 100.0;
        format!("{}{:.1} %", if saving >= 0.0 { '−' } else { '+' }, saving.abs())
    }
}

impl<'a> Page<'a> {
    /// A figure of a workload or a task by its name ([`Figures::get`]), or what it costs on a processor: `cycles.zen2`.
    pub fn value(&self, module: &str, at: &str, name: &str, figure: &str) -> Option<Cycles> {
        let figures = self.results.figures(module, at, name)?;
        match figure.strip_prefix("cycles.") {
            Some(cpu) => self.papers.model.price(figures, cpu),
            None => Some([figures.get(figure)?; 3]),
        }
    }

    /// Gannet's figure with one set of parameters, and with another.
    pub fn change(&self, name: &str, figure: &str, off: &str, on: &str) -> Option<Change> {
        let of = |parameters| Some(self.value("gannet", parameters, name, figure)?[1]);
        Some(Change { before: of(off)?, after: of(on)? })
    }

    /// The processor of modelled cycles, in words.
    pub fn model_of(&self, figure: &'a str) -> &'a str {
        self.papers.model.name(figure.trim_start_matches("cycles."))
    }
}
