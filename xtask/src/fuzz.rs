//! `make fuzz`: libFuzzer over the targets of `fuzz/`, under AddressSanitizer, and what came of it.

use crate::module::follow;
use crate::options::Options;
use crate::progress::Step;
use crate::report::new_table;
use anyhow::{Context, Result, bail};
use comfy_table::{CellAlignment, Table};
use gannet_lab::Layout;
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// What is built with a sanitizer is not what build scripts and macros are built for, though the CPU is the same.
pub(crate) const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// How a program gets a sanitizer's library, of the LLVM that the compiler has.
pub(crate) fn runtime(layout: &Layout, library: &str) -> [String; 4] {
    let runtimes = layout.out.join("fuzz/lib");
    [
        "-Zexternal-clangrt".to_owned(),
        // It has to be the program's first.
        "-Zpre-link-arg=-Wl,--no-as-needed".to_owned(),
        format!("-Zpre-link-arg={}/libclang_rt.{library}-x86_64.so", runtimes.display()),
        format!("-Clink-arg=-Wl,-rpath,{}", runtimes.display()),
    ]
}

/// What the compiler is told: counters on every edge and the operands of compares for libFuzzer, checks of every access for
/// AddressSanitizer. Both runtimes come from the LLVM that the compiler has (docs/adr/0060-fuzzing-by-the-compilers-own-llvm.md).
fn rustflags(layout: &Layout) -> String {
    let fuzzer = layout.out.join("fuzz/lib/libclang_rt.fuzzer-x86_64.a");
    let mut flags = vec!["-Cpasses=sancov-module".to_owned()];
    for pass in ["level=4", "inline-8bit-counters", "pc-table", "trace-compares"] {
        flags.push(format!("-Cllvm-args=-sanitizer-coverage-{pass}"));
    }
    flags.push("-Zsanitizer=address".to_owned());
    flags.extend(runtime(layout, "asan"));
    flags.push("-Clink-arg=-Wl,--whole-archive".to_owned());
    flags.push(format!("-Clink-arg={}", fuzzer.display()));
    for argument in ["-Wl,--no-whole-archive", "-l:libstdc++.so.6", "-lm", "-lc"] {
        flags.push(format!("-Clink-arg={argument}"));
    }
    flags.join("\u{1f}")
}

/// Builds the program; its path.
fn build(layout: &Layout) -> Result<PathBuf> {
    let mut cargo = layout.cargo("cargo-fuzz");
    cargo.args(["build", "-p", "gannet-fuzz", "--features", "engine", "--bin", "fuzz"]);
    cargo.args(["--profile", "fuzz", "--target", TRIPLE, "--locked"]);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", rustflags(layout));
    let step = Step::start(layout, "building the fuzzers");
    let built = follow(&mut cargo, &step);
    step.done();
    built?;
    Ok(layout.out.join("cargo-fuzz").join(TRIPLE).join("fuzz/fuzz"))
}

/// One target's run.
#[derive(Debug, Default)]
struct Run {
    name: String,
    executions: u64,
    per_second: u64,
    edges: u64,
    inputs: usize,
    /// Inputs on which the target panicked, a sanitizer spoke, or that did not end.
    findings: Vec<PathBuf>,
    /// The last words of a run that found something or did not end well.
    words: String,
    ended_well: bool,
}

/// The number behind a word of libFuzzer's output, in the last line that has it.
fn number(text: &str, word: &str) -> u64 {
    let behind = text.rfind(word).map(|at| text[at + word.len()..].trim_start());
    let digits = behind.map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    digits.flatten().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// The files of a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
}

/// A target of the program: its name, and how long an input may be.
type Target = (String, String);

fn targets(layout: &Layout, program: &Path) -> Result<Vec<Target>> {
    let output = layout.tool(program).env("GANNET_FUZZ_LIST", "1").output()?;
    let text = String::from_utf8(output.stdout)?;
    let words = text.lines().filter_map(|line| line.split_once(' '));
    let targets: Vec<Target> =
        words.map(|(name, longest)| (name.to_owned(), longest.to_owned())).collect();
    // A program that the loader refuses lists nothing, and of nothing all would end well.
    if !output.status.success() || targets.is_empty() {
        bail!("the fuzzers do not start: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(targets)
}

fn command(layout: &Layout, program: &Path, name: &str) -> Command {
    let mut command = layout.tool(program);
    command.current_dir(&layout.root).env("GANNET_FUZZ_TARGET", name).stdin(Stdio::null());
    command.env("RUST_BACKTRACE", "1");
    command
}

fn run_target(layout: &Layout, program: &Path, target: &Target, seconds: u64) -> Result<Run> {
    let (name, longest) = target;
    let found = layout.out.join("fuzz-findings").join(name);
    let grown = layout.out.join("fuzz-corpus").join(name);
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&grown)?;
    let before = files(&found);
    let mut fuzz = command(layout, program, name);
    fuzz.arg(format!("-max_total_time={seconds}")).arg(format!("-max_len={longest}"));
    fuzz.arg(format!("-artifact_prefix={}/", found.display()));
    fuzz.args(["-print_final_stats=1", "-timeout=60", "-rss_limit_mb=4096", "-reload=0"]);
    fuzz.arg(&grown).arg(layout.root.join("fuzz/corpus").join(name));
    let output = fuzz.stdout(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = text.lines().collect();
    let mut findings = files(&found);
    findings.retain(|file| !before.contains(file));
    Ok(Run {
        name: name.clone(),
        executions: number(&text, "stat::number_of_executed_units:"),
        per_second: number(&text, "stat::average_exec_per_sec:"),
        edges: number(&text, " cov:"),
        inputs: files(&grown).len(),
        findings,
        words: lines[lines.len().saturating_sub(60)..].join("\n"),
        ended_well: output.status.success(),
    })
}

/// By crate: edges that the targets' inputs reach, and all there are.
type Coverage = BTreeMap<String, [usize; 2]>;

/// The crate whose file a source line is in.
fn crate_of(file: &str) -> Option<&str> {
    let (_, rest) = file.split_once("crates/")?;
    let (name, rest) = rest.split_once('/')?;
    rest.starts_with("src/").then_some(name)
}

/// Runs every input of the targets once more, and says by crate which edges they reach.
fn coverage(layout: &Layout, program: &Path, targets: &[Target]) -> Result<Coverage> {
    let mut reached: BTreeMap<String, bool> = BTreeMap::new();
    for (name, _) in targets {
        let folders =
            [layout.root.join("fuzz/corpus").join(name), layout.out.join("fuzz-corpus").join(name)];
        let folders = folders.map(|folder| folder.display().to_string()).join(":");
        let output = command(layout, program, name).env("GANNET_FUZZ_EDGES", folders).output()?;
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Some((address, hit)) = line.split_once(' ') else { continue };
            *reached.entry(address.to_owned()).or_default() |= hit == "1";
        }
    }
    let list = layout.out.join("fuzz-edges");
    let mut file = fs::File::create(&list)?;
    for address in reached.keys() {
        writeln!(file, "{address}")?;
    }
    let mut lines = layout.tool("addr2line");
    lines.arg("-e").arg(program).stdin(fs::File::open(&list)?);
    let output = lines.output().context("addr2line")?;
    let mut coverage = Coverage::new();
    for (line, hit) in String::from_utf8_lossy(&output.stdout).lines().zip(reached.values()) {
        if let Some(name) = crate_of(line) {
            let [of, all] = coverage.entry(name.to_owned()).or_default();
            *of += usize::from(*hit);
            *all += 1;
        }
    }
    Ok(coverage)
}

/// Fuzzes every target that ONLY names, or each, for SECONDS; whether nothing was found.
pub fn run(layout: &Layout, options: &Options) -> Result<bool> {
    layout.ensure(&["toolchain", "fuzz"])?;
    let program = build(layout)?;
    let seconds = options.seconds.unwrap_or(60);
    let mut chosen = targets(layout, &program)?;
    if !options.only.is_empty() {
        for name in options.only.split(',') {
            if !chosen.iter().any(|(known, _)| known == name) {
                let known: Vec<&str> = chosen.iter().map(|(name, _)| name.as_str()).collect();
                bail!("ONLY={name}: there are {}", known.join(", "));
            }
        }
        chosen.retain(|(name, _)| options.only.split(',').any(|only| only == name));
    }
    let (waiting, done) = (Mutex::new(VecDeque::from(chosen.clone())), Mutex::new(Vec::new()));
    let step = Step::start(layout, &format!("fuzzing {} targets, {seconds} s each", chosen.len()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(target) = next else { break };
                    let run = run_target(layout, &program, &target, seconds);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push(run);
                }
            });
        }
    });
    step.done();
    let mut runs = done
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .into_iter()
        .collect::<Result<Vec<Run>>>()?;
    let place = |run: &Run| chosen.iter().position(|(name, _)| *name == run.name);
    runs.sort_by_key(place);
    println!("{}", table(&runs));
    let step = Step::start(layout, "which edges of which crate");
    let coverage = coverage(layout, &program, &chosen)?;
    step.done();
    println!("{}", by_crate(&coverage));
    for run in runs.iter().filter(|run| !run.ended_well || !run.findings.is_empty()) {
        println!("\n{}:\n{}", run.name, run.words);
        for finding in &run.findings {
            println!("\nreproducer: {}", finding.display());
            let (name, program) = (&run.name, program.display());
            println!("replay: GANNET_FUZZ_TARGET={name} {program} {}", finding.display());
        }
    }
    Ok(runs.iter().all(|run| run.ended_well && run.findings.is_empty()))
}

fn table(runs: &[Run]) -> Table {
    let mut table = new_table();
    table.set_header(["target", "executions", "per second", "edges", "inputs", "findings"]);
    for run in runs {
        let numbers = [run.executions, run.per_second, run.edges, run.inputs as u64];
        let numbers = numbers.into_iter().chain([run.findings.len() as u64]);
        table.add_row([run.name.clone()].into_iter().chain(numbers.map(|n| n.to_string())));
    }
    align(&mut table);
    table
}

fn by_crate(coverage: &Coverage) -> Table {
    let mut table = new_table();
    table.set_header(["crate", "edges reached", "of", "percent"]);
    for (name, [reached, all]) in coverage {
        let percent = (reached * 100 / all.max(&1)).to_string();
        table.add_row([name.clone(), reached.to_string(), all.to_string(), percent]);
    }
    align(&mut table);
    table
}

fn align(table: &mut Table) {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_numbers_of_a_run_are_read() {
        let text = "#2 INITED cov: 5 ft: 5\n#31 NEW    cov: 18 ft: 8\nstat::number_of_executed_units: 24286931\n";
        assert_eq!(number(text, " cov:"), 18);
        assert_eq!(number(text, "stat::number_of_executed_units:"), 24_286_931);
        assert_eq!(number("", " cov:"), 0);
    }

    #[test]
    fn a_line_belongs_to_the_crate_whose_source_it_is() {
        assert_eq!(crate_of("/x/crates/mmu/src/walk.rs:12"), Some("mmu"));
        assert_eq!(crate_of("/x/crates/mmu/tests/walk/reference.rs:12"), None);
        assert_eq!(crate_of("??:0"), None);
    }

    #[test]
    fn every_target_has_a_corpus_and_every_corpus_a_target() {
        let root = Layout::find().unwrap().root;
        let source = fs::read_to_string(root.join("fuzz/src/lib.rs")).unwrap();
        let folders = files(&root.join("fuzz/corpus"));
        assert_eq!(folders.len(), source.matches("Target { name:").count());
        for folder in folders {
            let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
            assert!(source.contains(&format!("name: \"{name}\"")), "{name}");
            assert!(!files(&folder).is_empty(), "{name}");
        }
    }
}
