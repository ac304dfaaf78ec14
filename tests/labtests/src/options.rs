//! The command line.

/// How to call this program.
pub const USAGE: &str = "usage: labtests [--list] [--filter SUBSTRING] [--tap] [--times]";

/// What the caller wants.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Only name the tests.
    pub list: bool,
    /// Only tests whose name contains this.
    pub filter: String,
    /// Failures as `not ok NAME: …`.
    pub tap: bool,
    /// Each line with the milliseconds that its test took.
    pub times: bool,
}

/// Reads the arguments after the program's name.
pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options::default();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--list" => options.list = true,
            "--tap" => options.tap = true,
            "--times" => options.times = true,
            "--filter" => {
                options.filter = arguments.next().ok_or("--filter wants a substring")?;
            }
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
        assert_eq!(options, Options { list: true, filter: "slots".into(), ..Options::default() });
    }

    #[test]
    fn what_is_unknown_or_incomplete_is_refused() {
        assert!(parsed(&["--filter"]).is_err());
        assert!(parsed(&["--fliter", "x"]).is_err());
    }
}
