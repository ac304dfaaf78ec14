//! Tests of `/dev/kvm` as a VMM and its guests see it. Run as root on any host: the stock module is
//! the oracle, Gannet has to do the same.
//!
//! Prints one line per test, `ok NAME`, `FAIL NAME: expected … got …` or `skip NAME: reason`, then
//! `N passed, N failed, N skipped`; the exit code is 0 if and only if none failed.

mod counting;
mod groups;
mod kvm;
mod machine;
mod objects;
mod options;
mod oracle;
mod outcome;
mod runner;

use std::process::ExitCode;

fn main() -> ExitCode {
    let options = match options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            eprintln!("labtests: {message}\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    let file = options.save.as_deref().map(|path| ("save", groups::nested_state::save(path)));
    let file = file.or_else(|| {
        options.resume.as_deref().map(|path| ("resume", groups::nested_state::resume(path)))
    });
    let file = file.or_else(|| options.count.then(|| ("count", counting::count())));
    let file = file.or_else(|| options.clocks.then(|| ("clocks", counting::clocks())));
    if let Some((what, outcome)) = file {
        return match outcome {
            Ok(()) => {
                println!("ok {what}");
                ExitCode::SUCCESS
            }
            Err(trouble) => {
                println!("not ok {what}: {trouble:?}");
                ExitCode::FAILURE
            }
        };
    }
    let chosen = groups::all().filter(|test| options.choose(&test.full_name()));
    if options.list {
        chosen.for_each(|test| println!("{}", test.full_name()));
        return ExitCode::SUCCESS;
    }
    if let Some(filter) = options.idle_filter(groups::all().map(|test| test.full_name())) {
        println!("not ok labtests: no test is named like {filter}");
        return ExitCode::from(2);
    }
    let failing = match options.failing.then(kvm::failing::begin).transpose() {
        Ok(counts) => counts,
        Err(reason) => {
            println!("not ok labtests: no fault injection: {reason}");
            return ExitCode::from(2);
        }
    };
    let tally = runner::run(chosen, &options);
    println!("{tally}");
    if let Some(counts) = failing {
        println!("{counts}");
        if !counts.any() {
            println!("not ok labtests: no call was made to fail");
            return ExitCode::FAILURE;
        }
    }
    if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
