//! exitbench as its user calls it: exit statuses, what goes to which output, and the page of results that its own commands made.
//! Nothing here opens a `/dev/kvm`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn exitbench(words: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exitbench"));
    command.args(words).current_dir(folder).env_remove("EXITBENCH_UNIT").output().unwrap()
}

fn status(words: &[&str], folder: &Path) -> i32 {
    exitbench(words, folder).status.code().unwrap()
}

/// Standard output, or standard error, as text.
fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A folder with reports of nine repetitions, removed with its value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("exitbench-tool-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let folder = Self(folder);
        folder.add("a.json", &report("tsc", &[("cpuid", 1000), ("rdmsr", 500)]));
        folder.add("b.json", &report("tsc", &[("cpuid", 1020), ("rdmsr", 500)]));
        folder
    }

    fn add(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn report(unit: &str, workloads: &[(&str, u64)]) -> String {
    let entry = |(name, cost): &(&str, u64)| {
        let samples = vec![format!("[{cost}, {cost}, {}]", cost + 1); 9].join(", ");
        format!(r#"{{"name": "{name}", "samples": [{samples}]}}"#)
    };
    let workloads: Vec<String> = workloads.iter().map(entry).collect();
    format!(
        r#"{{"format": 2, "unit": "{unit}", "module": "kvm_amd", "workloads": [{}]}}"#,
        workloads.join(", ")
    )
}

#[test]
fn a_comparison_is_told_on_standard_output_and_ends_with_0() {
    let folder = Folder::new("told");
    let output = exitbench(&["compare", "a.json", "b.json"], &folder.0);
    assert_eq!(output.status.code(), Some(0));
    let shown = text(&output.stdout);
    assert!(shown.contains("slower") && shown.contains("no difference shown"), "{shown}");
    assert!(shown.contains("1.020×") && shown.contains("0.0078"), "{shown}");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn a_limit_that_is_crossed_ends_with_1() {
    let folder = Folder::new("limit");
    let compare =
        |limit| exitbench(&["compare", "a.json", "b.json", "--fail-above", limit], &folder.0);
    assert_eq!(compare("1.03").status.code(), Some(0));
    let crossed = compare("1.01");
    assert_eq!(crossed.status.code(), Some(1));
    assert!(text(&crossed.stderr).contains("cpuid: 1.020×, and 1.01× is allowed"));
    assert_eq!(status(&["compare", "b.json", "a.json", "--fail-above", "1.01"], &folder.0), 0);
}

#[test]
fn a_workload_that_is_missing_in_one_report_is_told() {
    let folder = Folder::new("missing");
    folder.add("c.json", &report("tsc", &[("cpuid", 1)]));
    let output = exitbench(&["compare", "a.json", "c.json"], &folder.0);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr), "rdmsr in B: it is not in the report\n");
}

#[test]
fn what_cannot_be_worked_on_ends_with_2_and_says_why() {
    let folder = Folder::new("trouble");
    folder.add("cut.json", &report("tsc", &[("cpuid", 1)])[..90]);
    folder.add("counted.json", &report("instructions", &[("cpuid", 1)]));
    folder.add("other.json", &report("tsc", &[("ipi", 1)]));
    let wrong: [(&[&str], &str); 11] = [
        (&["compare", "a.json", "cut.json"], "cut.json: it is cut off"),
        (&["compare", "a.json", "none.json"], "cannot read none.json"),
        (&["compare", "a.json", "counted.json"], "one counts TSC ticks, another instructions"),
        (&["compare", "a.json", "other.json"], "no workload was measured in both"),
        (&["compare", "a.json", "b.json", "--fail-above", "0"], "--fail-above"),
        (&["plot", "a.json", "counted.json", "-o", "x.svg"], "do not compare"),
        (&["plot", "a.json", "-o", "no/such/x.svg"], "cannot write no/such/x.svg"),
        (&["run", "cpuid", "--device", "none"], "none does not exist"),
        (&["features", "--device", "none"], "none does not exist"),
        (&["run", "--device", "none", "--json", "no/such.json"], "cannot write no/such.json"),
        (&["run", "cpuidd", "--device", "none"], "no workload called `cpuidd`"),
    ];
    for (words, expected) in wrong {
        let output = exitbench(words, &folder.0);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(text(&output.stderr).contains(expected), "{words:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "", "{words:?}");
    }
}

#[test]
fn a_cpu_that_is_not_there_is_refused_before_anything_runs() {
    let output = exitbench(&["run", "--device", "none", "--cpu", "1000000"], Path::new("/"));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("no CPU 1000000"));
}

#[test]
fn a_plot_is_a_whole_file_or_none() {
    let folder = Folder::new("plot");
    assert_eq!(status(&["plot", "a.json", "b.json", "-o", "x.svg"], &folder.0), 0);
    let svg = fs::read_to_string(folder.0.join("x.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    let output = exitbench(&["plot", "a.json", "b.json", "-o", "-"], &folder.0);
    assert_eq!(text(&output.stdout), svg);
}

#[test]
fn the_manual_page_is_one() {
    let output = exitbench(&["man"], Path::new("/"));
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("\n.TH exitbench 1"));
}

/// The page says which commands made it: these.
#[test]
fn the_page_of_results_is_what_the_commands_make_of_its_reports() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/results");
    let page = fs::read_to_string(results.join("side-by-side.md")).unwrap();
    let reports = ["side-by-side/amd-stock.json", "side-by-side/amd-gannet.json"];
    let compared = exitbench(&[&["compare", "--markdown"], &reports[..]].concat(), &results);
    assert!(page.contains(text(&compared.stdout).trim_end()), "{}", text(&compared.stdout));
    let drawn = exitbench(&[&["plot", "-o", "-"], &reports[..]].concat(), &results);
    assert_eq!(text(&drawn.stdout), fs::read_to_string(results.join("side-by-side.svg")).unwrap());
}
