//! What a machine's part of the page `docs/results/mechanisms.md` is made from, and what both the page and the limits ask of it.

use super::cost::{Cycles, Model};
use super::plan::Plan;
use super::results::Results;
use gannet_lab::Machine;

/// What a machine's part of the page is made from.
pub struct Page<'a> {
    pub plan: &'a Plan,
    pub results: &'a Results,
    pub model: &'a Model,
    pub published: &'a toml::Table,
    /// Files of plots that there are.
    pub plots: &'a [String],
}

/// A figure before a change and after it.
#[derive(Clone, Copy, Debug)]
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
        if saving >= 0.0 { format!("−{saving:.1} %") } else { format!("+{:.1} %", -saving) }
    }
}

impl<'a> Page<'a> {
    pub fn on(&self) -> Machine {
        self.results.machine()
    }

    /// The processor whose prices stand alone in a table.
    pub fn cpu(&self) -> &'a str {
        self.plan.word(self.on(), "cpu").unwrap_or_default()
    }

    /// Cycles of a workload on a processor.
    pub fn price(
        &self,
        workload: &str,
        module: &str,
        parameters: &str,
        cpu: &str,
    ) -> Option<Cycles> {
        self.model.price(self.results.figures(module, parameters, workload)?, cpu)
    }

    /// Gannet's exits without a mechanism and with it, for the reasons whose names begin so.
    pub fn exits(&self, name: &str, off: &str, reasons: &str) -> Option<Change> {
        let of = |parameters| {
            let exits = self.results.exits("gannet", parameters, name)?;
            let counted = exits.iter().filter(|(reason, _)| reason.starts_with(reasons));
            Some(counted.fold(0.0, |sum, (_, count)| sum + count))
        };
        Some(Change { before: of(off)?, after: of("")? })
    }
}
