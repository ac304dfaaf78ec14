//! Counts tests and says which failed.

use std::io::IsTerminal;

/// How much of a reason is shown.
const LINES: usize = 60;

/// How one test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    /// With the reason.
    Failed(String),
    /// Could not be run here, with the reason.
    Skipped(String),
}

impl From<Result<(), String>> for Verdict {
    fn from(result: Result<(), String>) -> Self {
        result.map_or_else(Verdict::Failed, |()| Verdict::Passed)
    }
}

/// What was run and how it ended.
#[derive(Default)]
pub struct Tally {
    pub passed: u64,
    /// Each with how its reason begins: the end of a log is what is looked at first, and at times all there is of it.
    pub failed: Vec<String>,
    pub skipped: Vec<String>,
}

impl Tally {
    /// Records one test by name; a failure comes with its reason.
    pub fn record(&mut self, name: &str, verdict: impl Into<Verdict>) {
        let (green, red, plain) = colours();
        match verdict.into() {
            Verdict::Skipped(reason) => self.skip(name, &reason),
            Verdict::Passed => {
                self.passed += 1;
                println!("{green}ok{plain}    {name}");
            }
            Verdict::Failed(reason) => {
                println!("{red}FAIL{plain}  {name}");
                for line in reason.lines().take(LINES) {
                    println!("      {line}");
                }
                if reason.lines().nth(LINES).is_some() {
                    println!("      …");
                }
                self.failed.push(format!("{name}: {}", beginning(&reason)));
            }
        }
    }

    /// Records what could not be run here, and why.
    pub fn skip(&mut self, name: &str, reason: &str) {
        println!("skip  {name}: {reason}");
        self.skipped.push(name.to_owned());
    }

    /// Prints the end and says whether all is well.
    pub fn finish(&self) -> bool {
        println!();
        for name in &self.failed {
            println!("failed: {name}");
        }
        if !self.skipped.is_empty() {
            println!("{} skipped", self.skipped.len());
        }
        println!("{} passed, {} failed", self.passed, self.failed.len());
        self.failed.is_empty() && self.passed > 0
    }
}

/// How a reason begins.
fn beginning(reason: &str) -> String {
    reason.lines().next().unwrap_or_default().chars().take(160).collect()
}

fn colours() -> (&'static str, &'static str, &'static str) {
    if std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        ("\x1b[32m", "\x1b[31m", "\x1b[0m")
    } else {
        ("", "", "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_is_told_with_how_its_reason_begins() {
        let mut tally = Tally::default();
        tally.record("a", Ok(()));
        tally.record("b", Err(format!("{}\nthe rest", "x".repeat(200))));
        assert_eq!(tally.failed, [format!("b: {}", "x".repeat(160))]);
        assert!(!tally.finish());
    }
}
