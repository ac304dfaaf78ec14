//! The command line.

/// How to call this program.
pub const USAGE: &str = "usage: labtests [--list] [--filter SUBSTRING]... [--skip SUBSTRING]... [--tap] [--times] \
     [--failing] | --save PATH | --resume PATH | --count | --clocks";

/// What the caller wants.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Only name the tests.
    pub list: bool,
    /// Only tests whose name contains one of these; all if there are none.
    pub filters: Vec<String>,
    /// No tests whose name contains one of these.
    pub skips: Vec<String>,
    /// Failures as `not ok NAME: …`.
    pub tap: bool,
    /// Each line with the milliseconds that its test took.
    pub times: bool,
    /// Each call is made to fail at every point before it is made.
    pub failing: bool,
    /// No tests: save guests whose guests run into files that begin so.
    pub save: Option<String>,
    /// No tests: let guests run on that were saved there.
    pub resume: Option<String>,
    /// No tests: a guest that counts for ever.
    pub count: bool,
    /// No tests: a program that looks at the clocks for ever.
    pub clocks: bool,
}

impl Options {
    /// Whether a test of this name is to run.
    pub fn choose(&self, name: &str) -> bool {
        let within = |parts: &[String]| parts.iter().any(|part| name.contains(part.as_str()));
        (self.filters.is_empty() || within(&self.filters)) && !within(&self.skips)
    }

    /// The first filter that chooses none of the tests: most likely they have another name by now.
    pub fn idle_filter(&self, names: impl Iterator<Item = String> + Clone) -> Option<&str> {
        let idle = |part: &&String| !names.clone().any(|name| name.contains(part.as_str()));
        self.filters.iter().find(idle).map(String::as_str)
    }
}

/// Reads the arguments after the program's name.
pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options::default();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--list" => options.list = true,
            "--tap" => options.tap = true,
            "--count" => options.count = true,
            "--clocks" => options.clocks = true,
            "--times" => options.times = true,
            "--failing" => options.failing = true,
            "--save" => options.save = Some(arguments.next().ok_or("--save wants a path")?),
            "--resume" => options.resume = Some(arguments.next().ok_or("--resume wants a path")?),
            "--filter" => {
                options.filters.push(arguments.next().ok_or("--filter wants a substring")?);
            }
            "--skip" => options.skips.push(arguments.next().ok_or("--skip wants a substring")?),
            other => return Err(format!("unknown argument {other}")),
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Options, String> {
        parse(arguments.iter().map(|&argument| argument.to_owned()))
    }

    #[test]
    fn a_filter_is_taken_with_its_substring() {
        let options = parsed(&["--filter", "slots", "--list"]).unwrap();
        let filters = vec!["slots".to_owned()];
        assert_eq!(options, Options { list: true, filters, ..Options::default() });
    }

    #[test]
    fn what_runs_without_end_is_no_test() {
        assert_eq!(parsed(&["--count"]), Ok(Options { count: true, ..Options::default() }));
        assert_eq!(parsed(&["--clocks"]), Ok(Options { clocks: true, ..Options::default() }));
    }

    #[test]
    fn calls_fail_only_if_that_was_asked_for() {
        assert!(parsed(&["--tap", "--failing"]).unwrap().failing);
        assert!(!parsed(&["--tap"]).unwrap().failing);
    }

    #[test]
    fn several_filters_and_skips_choose_together() {
        let line = ["--filter", "slots", "--filter", "smm", "--skip", "paging_"];
        let options = parsed(&line).unwrap();
        let chosen = |name| options.choose(name);
        assert!(chosen("slots::a") && chosen("smm::b"));
        assert!(!chosen("mmio::c") && !chosen("paging_smm::d"));
        assert!(Options::default().choose("anything"));
    }

    #[test]
    fn a_filter_that_chooses_nothing_is_found() {
        let options = parsed(&["--filter", "slots", "--filter", "slotz"]).unwrap();
        let names = ["slots::a".to_owned(), "smm::b".to_owned()];
        assert_eq!(options.idle_filter(names.iter().cloned()), Some("slotz"));
        assert_eq!(Options::default().idle_filter(names.into_iter()), None);
    }

    #[test]
    fn what_is_unknown_or_incomplete_is_refused() {
        assert!(parsed(&["--filter"]).is_err());
        assert!(parsed(&["--fliter", "x"]).is_err());
    }
}
