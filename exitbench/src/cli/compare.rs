//! The options of `exitbench compare` and `exitbench plot`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(
    after_help = "A repetition's median of A stands against that of the same repetition of B: p is the two-sided \
                  p-value of the sign test over these pairs, adjusted by Holm's method for the number of \
                  workloads. Below --alpha the word is `faster` or `slower`, for B; else `no difference shown`. \
                  With too few repetitions to show anything it is `not tested`.\n\n\
                  The exit status is 0, or 1 if --fail-above is given and a workload of B is slower by more than that \
                  (shown by the test, or not tested), or failed in B and was measured in A. A limit below 1 is \
                  asked of every workload, shown or not."
)]
pub struct CompareArguments {
    /// Report of the first run
    #[arg(value_name = "A.json")]
    pub first: PathBuf,
    /// Report of the second run
    #[arg(value_name = "B.json")]
    pub second: PathBuf,
    /// Exit with 1 if a workload of B costs more than this many times what it costs in A, such as 1.01; below 1, if it does not
    /// cost so much less
    #[arg(long, value_name = "RATIO", value_parser = ratio)]
    pub fail_above: Option<f64>,
    /// How unlikely by chance a difference must be to be called one
    #[arg(long, value_name = "P", default_value_t = 0.05, value_parser = probability)]
    pub alpha: f64,
    /// Write Markdown
    #[arg(long)]
    pub markdown: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "A bar is the median of the repetitions' medians; the thin line on it reaches from their first \
                  quartile to their third. Of two or more reports each workload is drawn as a multiple of the \
                  first report's; of one, or with --absolute, on a logarithmic axis in the reports' unit."
)]
pub struct PlotArguments {
    /// Reports, each a bar for each workload
    #[arg(value_name = "A.json", required = true, num_args = 1..=8)]
    pub reports: Vec<PathBuf>,
    /// The SVG file; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Draw ticks or instructions rather than multiples of the first report
    #[arg(long)]
    pub absolute: bool,
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if ratio.is_finite() && ratio > 0.0 => Ok(ratio),
        _ => Err("a number above 0 is wanted, such as 1.01".to_owned()),
    }
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(p) if p > 0.0 && p < 1.0 => Ok(p),
        _ => Err("a number between 0 and 1 is wanted, such as 0.05".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use clap::Parser;

    fn taken(words: &str) -> bool {
        Cli::try_parse_from(["exitbench"].into_iter().chain(words.split(' '))).is_ok()
    }

    #[test]
    fn limits_are_numbers_that_mean_something() {
        assert!(taken("compare a b --fail-above 1.01 --alpha 0.01"));
        for wrong in
            ["--fail-above 0", "--fail-above nan", "--fail-above x", "--alpha 1", "--alpha 0"]
        {
            assert!(!taken(&format!("compare a b {wrong}")), "{wrong}");
        }
        assert!(!taken("compare a"));
    }

    #[test]
    fn a_plot_needs_reports_and_a_place() {
        assert!(taken("plot a -o b") && taken("plot a b c --output x"));
        assert!(!taken("plot -o b") && !taken("plot a b"));
    }
}
