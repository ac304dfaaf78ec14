//! `make test`: everything that can fail, from fast to slow, with one line per test and the count at the end.

use crate::options::Options;
use crate::progress::Step;
use crate::tally::Tally;
use crate::{check, guest, labtest, module, sources, tools};
use anyhow::Result;
use gannet_lab::{BY_OWN_NAME, KERNELS, Kernel, Layout, Machine, Module};
use std::process::{Command, Stdio};

/// Runs every test; whether all passed.
pub fn run(layout: &Layout, options: &Options) -> Result<bool> {
    let mut tally = Tally::default();
    let groups = ["toolchain", "busybox", "tcc"];
    layout.ensure(&groups)?;
    layout.ensure(&KERNELS.map(Kernel::group))?;
    let group = options.filter.split(':').next().unwrap_or_default();
    let chosen = |name: &str| name.contains(group);
    if chosen("source") {
        source(layout, &mut tally);
    }
    if chosen("unit") {
        unit_tests(layout, &mut tally);
    }
    let mut built = Vec::new();
    for kernel in KERNELS {
        let name = format!("gannet.ko for {kernel} builds");
        match module::build(layout, kernel) {
            Ok(_) => {
                built.push(kernel);
                if chosen("module") {
                    tally.record(&name, Ok(()));
                    check::run(layout, kernel, &mut tally);
                }
            }
            Err(error) => tally.record(&name, Err(format!("{error:#}"))),
        }
    }
    for kernel in BY_OWN_NAME {
        let built = guest::build(layout, kernel).map_err(|error| format!("{error:#}"));
        if chosen("module") || (chosen("lab") && built.is_err()) {
            tally.record(&format!("the guest's module and program for {kernel} build"), built);
        }
    }
    if chosen("lab") {
        lab(layout, options, &built, &mut tally)?;
    }
    Ok(tally.finish())
}

/// Format, lints, licences.
fn source(layout: &Layout, tally: &mut Tally) {
    sources::run(&layout.root, tally);
    let cargo = || layout.cargo("cargo");
    let mut fmt = cargo();
    fmt.args(["fmt", "--all", "--", "--check", "--color", "never"]);
    tally.record("sources are formatted", quiet(layout, "checking the format", &mut fmt));

    let mut clippy = cargo();
    clippy.args([
        "clippy",
        "--workspace",
        "--exclude",
        "gannet-module",
        "--all-targets",
        "--locked",
    ]);
    clippy.args(["--quiet", "--", "-Dwarnings"]);
    tally.record("clippy has nothing to say", quiet(layout, "running clippy", &mut clippy));

    let mut clippy = layout.cargo("cargo-kernel-clippy");
    clippy.args(["clippy", "-p", "gannet-module", "--locked", "--quiet"]);
    clippy.args(["--target", "x86_64-unknown-none", "--config", "linux/cargo-config.toml"]);
    clippy.args(["--", "-Dwarnings"]);
    let result = quiet(layout, "running clippy on the module", &mut clippy);
    tally.record("clippy has nothing to say about the module's crate", result);

    let found = Command::new("cargo-deny")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success());
    if found {
        let mut deny = layout.tool("cargo-deny");
        deny.current_dir(&layout.root).args(["check", "licenses", "bans", "sources"]);
        let result = quiet(layout, "checking dependencies", &mut deny);
        tally.record("dependencies keep deny.toml's rules", result);
    } else {
        tally.skip("dependencies keep deny.toml's rules", "there is no cargo-deny here");
    }
}

/// `cargo test` of every crate, with each test counted.
fn unit_tests(layout: &Layout, tally: &mut Tally) {
    let mut cargo = layout.cargo("cargo");
    cargo.args(["test", "--workspace", "--exclude", "gannet-module"]);
    run_unit_tests(layout, "unit tests", cargo, tally);
}

/// Runs a `cargo test` to its end, with each test counted.
pub(crate) fn run_unit_tests(layout: &Layout, title: &str, mut cargo: Command, tally: &mut Tally) {
    cargo.args(["--locked", "--no-fail-fast"]).env("RUST_BACKTRACE", "0");
    let step = Step::start(layout, title);
    let output = cargo.stdin(Stdio::null()).output();
    step.done();
    let output = match output {
        Ok(output) => output,
        Err(error) => return tally.record(title, Err(error.to_string())),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let (passed, failed) = count(&text);
    tally.passed += passed;
    println!("ok    {passed} {title}");
    for name in &failed {
        tally.record(name, Err(failure_text(&text, name)));
    }
    if !output.status.success() && failed.is_empty() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let errors: Vec<&str> = errors.lines().filter(|l| !l.contains("Compiling")).collect();
        let last = errors[errors.len().saturating_sub(60)..].join("\n");
        tally.record(&format!("{title} build and end"), Err(last));
    }
}

/// Reads the output of test programs: how many passed, and the names of those that failed.
fn count(text: &str) -> (u64, Vec<String>) {
    let (mut passed, mut failed) = (0, Vec::new());
    for line in text.lines().filter_map(|l| l.strip_prefix("test ")) {
        if line.ends_with("... ok") {
            passed += 1;
        } else if let Some(name) = line.strip_suffix(" ... FAILED") {
            failed.push(name.to_owned());
        }
    }
    (passed, failed)
}

/// What a failed test wrote.
fn failure_text(text: &str, name: &str) -> String {
    let head = format!("---- {name} stdout ----");
    let after = text.split(&head).nth(1).unwrap_or_default();
    after
        .split("\n----")
        .next()
        .unwrap_or_default()
        .trim()
        .lines()
        .take(20)
        .collect::<Vec<_>>()
        .join("\n")
}

fn quiet(layout: &Layout, title: &str, command: &mut Command) -> Result<(), String> {
    let step = Step::start(layout, title);
    let result = module::follow(command, &step).map_err(|e| format!("{e:#}"));
    step.done();
    result
}

/// Lab tests: the machines with the stock module as a check of the lab itself, then Gannet's.
fn lab(layout: &Layout, options: &Options, built: &[Kernel], tally: &mut Tally) -> Result<()> {
    let mut tests = Vec::new();
    // What the list has for a machine that has to be named runs without being named, too.
    if !options.machine_named() {
        let options = options.on(Machine::AmdNrip);
        tests.push(labtest::counts_operations(&options, &tools::prepare(layout, &options)?));
        labtest::from_list(layout, &options, built, "tests.list", &mut tests)?;
    }
    // The longest first: those of Bochs.
    for options in options.for_machines().iter().rev() {
        let tools = tools::prepare(layout, options)?;
        for kernel in BY_OWN_NAME {
            tests.push(labtest::machine_runs(options, kernel));
            tests.push(labtest::boots(layout, options, &tools, kernel, Module::Stock, 1)?);
            if !built.contains(&kernel) {
                continue;
            }
            for cpus in [1, 2] {
                let module = Module::Gannet;
                tests.push(labtest::boots(layout, options, &tools, kernel, module, cpus)?);
            }
            tests.push(labtest::loads_and_unloads(options, kernel));
            tests.push(labtest::refuses_beside_stock(options, kernel));
            if options.machine() == Machine::Amd {
                tests.push(labtest::refuses_without_svm(options, kernel));
            }
        }
        let (newest, module) = (Kernel::V7_3, Module::Gannet);
        if built.contains(&newest) {
            tests.push(labtest::boots(layout, options, &tools, newest, module, 1)?);
        }
        tests.push(labtest::counts_operations(options, &tools));
        labtest::from_list(layout, options, built, "tests.list", &mut tests)?;
    }
    if let Some((_, part)) = options.filter.split_once(':') {
        tests.retain(|test| test.name().contains(part));
    }
    labtest::run_all(layout, tests, tally);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
running 3 tests
test a::works ... ok
test src/lib.rs - f (line 3) ... ok
test b::breaks ... FAILED

failures:

---- b::breaks stdout ----

thread 'b::breaks' panicked at src/lib.rs:9:5:
no luck

failures:
    b::breaks

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn tests_are_counted_from_their_lines() {
        let (passed, failed) = count(OUTPUT);
        assert_eq!((passed, failed.as_slice()), (2, &["b::breaks".to_owned()][..]));
        assert!(failure_text(OUTPUT, "b::breaks").contains("no luck"));
    }
}
