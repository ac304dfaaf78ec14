//! Reports as files: reading one says what is wrong with it, writing one leaves a whole file or none.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::error::Category;
use serde_json::{Serializer, Value};

use super::layout::Layout;
use super::{FORMAT, Report};

impl Report {
    /// Reads a report that [`Report::write`] wrote, of this exitbench or an older one.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
        Self::parse(&text).with_context(|| format!("cannot use {name}"))
    }

    /// Reads a report's text.
    pub fn parse(text: &str) -> Result<Self> {
        if text.trim().is_empty() {
            bail!("it is empty");
        }
        let value: Value = serde_json::from_str(text).map_err(|error| match error.classify() {
            Category::Eof => anyhow::anyhow!("it is cut off: {error}"),
            _ => anyhow::anyhow!("it is no JSON: {error}"),
        })?;
        refuse_others(&value)?;
        serde_json::from_value(value).context("it is not a report of `exitbench run`")
    }

    /// The report's JSON.
    pub fn text(&self) -> Result<String> {
        let mut text = Vec::new();
        self.serialize(&mut Serializer::with_formatter(&mut text, Layout::default()))?;
        text.push(b'\n');
        Ok(String::from_utf8(text)?)
    }

    /// Writes the report to `path`; `-` is standard output.
    pub fn write(&self, path: &Path) -> Result<()> {
        write(path, &self.text()?)
    }
}

/// Says of what is JSON and something else what it is.
fn refuse_others(value: &Value) -> Result<()> {
    let has = |key: &str| value.get(key).is_some();
    if has("ticks_to_marker") {
        bail!("it is what `exitbench boot` reports, not `exitbench run`");
    }
    if has("machine") && has("workloads") {
        bail!("it is the lab's own summary of two modules, not a report of `exitbench run`");
    }
    match value.get("format").map(Value::as_u64) {
        Some(Some(format)) if format > FORMAT.into() => {
            bail!("its format is {format}, and this exitbench knows {FORMAT}: a newer one wrote it")
        }
        Some(None) => bail!("its format is not a number"),
        _ => Ok(()),
    }
}

/// Fails where [`write`] to `path` would: to be asked before the work that is to be written.
pub fn try_place(path: &Path) -> Result<()> {
    if path.is_dir() {
        bail!("cannot write {}: it is a folder", path.display());
    }
    if path == Path::new("-") || path.exists() && !path.is_file() {
        return Ok(());
    }
    let (what, beside) = (|| format!("cannot write {}", path.display()), beside(path));
    fs::write(&beside, "").with_context(what)?;
    fs::remove_file(&beside).with_context(what)
}

fn beside(path: &Path) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    beside.into()
}

/// Writes a text to `path`, by way of a file beside it; `-` is standard output.
pub fn write(path: &Path, text: &str) -> Result<()> {
    if path == Path::new("-") {
        let written = io::stdout().write_all(text.as_bytes());
        return written.context("cannot write to standard output");
    }
    let what = || format!("cannot write {}", path.display());
    // What exists and is no file, such as /dev/stdout, cannot be replaced.
    if path.exists() && !path.is_file() {
        return fs::write(path, text).with_context(what);
    }
    let beside = beside(path);
    fs::write(&beside, text).with_context(what)?;
    fs::rename(&beside, path).with_context(what)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{measured, report};
    use super::super::{Entry, Host, Missing, Settings, Unit};
    use super::*;

    fn sample() -> Report {
        let mut report = report(Unit::Instructions, vec![measured("cpuid", &[3, 1, 2])]);
        report.exitbench = Some("0.5.0".into());
        let entry = |name: &str, outcome| Entry { name: name.into(), outcome };
        report.workloads.extend([
            entry("xsetbv", Err(Missing::Skipped("no XSAVE".into()))),
            entry("ipi", Err(Missing::Failed("timed out".into()))),
        ]);
        let cpu = "AMD EPYC Processor".into();
        report.host = Some(Host { cpu, cpus: 1, under_hypervisor: true, ..Host::default() });
        let asked = Settings { repetitions: 3, iterations: 1, warm_up: 20, ..Settings::default() };
        report.settings = Some(asked);
        report
    }

    /// The form that others read: a change of it is a change of FORMAT, or an addition.
    const GOLDEN: &str = r#"{
  "format": 2,
  "exitbench": "0.5.0",
  "unit": "instructions",
  "module": "kvm_amd",
  "kernel": "6.12",
  "host": {
    "cpu": "AMD EPYC Processor",
    "cpus": 1,
    "under_hypervisor": true,
    "guests_may_nest": false
  },
  "settings": {
    "repetitions": 3,
    "iterations": 1,
    "warm_up": 20
  },
  "workloads": [
    {
      "name": "cpuid",
      "min": 1,
      "median": 2,
      "max": 3,
      "iterations": 1,
      "quartiles": [1,2],
      "markers": false,
      "marker_iterations": 0,
      "medians": [3,1,2],
      "samples": [
        [3],
        [1],
        [2]
      ]
    },
    {
      "name": "xsetbv",
      "skipped": "no XSAVE"
    },
    {
      "name": "ipi",
      "failed": "timed out"
    }
  ]
}
"#;

    #[test]
    fn the_json_is_the_agreed_one() {
        assert_eq!(sample().text().unwrap(), GOLDEN);
        assert_eq!(Report::parse(GOLDEN).unwrap(), sample());
    }

    /// As exitbench wrote it up to 0.4.
    #[test]
    fn a_report_of_before_the_formats_were_numbered_is_read() {
        let old = r#"{"unit": "tsc", "module": "gannet", "kernel": "6.12.117", "workloads": [
            {"name": "cpuid", "min": 1, "median": 2, "max": 3, "iterations": 500, "markers": true,
             "marker_iterations": 100},
            {"name": "xsetbv", "skipped": "the guest's CPUID lacks XSAVE"}]}"#;
        let report = Report::parse(old).unwrap();
        assert_eq!((report.format, report.host.as_ref()), (1, None));
        assert_eq!(report.measurement("cpuid").unwrap().medians, [2]);
    }

    #[test]
    fn what_is_no_report_says_what_it_is() {
        let error = |text: &str| format!("{:#}", Report::parse(text).unwrap_err());
        let wrong = [
            ("", "empty"),
            (&GOLDEN[..GOLDEN.len() / 2], "cut off"),
            ("{\"unit\": \"tsc\",}", "no JSON"),
            ("cpuid 2936", "no JSON"),
            ("[]", "not a report of `exitbench run`"),
            (r#"{"unit": "tsc"}"#, "missing field `module`"),
            (r#"{"unit": "hours", "module": "x", "workloads": []}"#, "unknown variant `hours`"),
            (r#"{"unit": "tsc", "module": "x", "workloads": [{"name": "a"}]}"#, "neither figures"),
            (r#"{"format": 3, "unit": "tsc"}"#, "a newer one wrote it"),
            (r#"{"format": "two"}"#, "format is not a number"),
            (
                r#"{"unit": "tsc", "module": "x", "cpus": 1, "ticks_to_marker": 5}"#,
                "exitbench boot",
            ),
            (r#"{"machine": "amd", "kernel": "6.12", "unit": "", "workloads": []}"#, "summary"),
        ];
        for (text, expected) in wrong {
            assert!(error(text).contains(expected), "{text}: {}", error(text));
        }
    }

    #[test]
    fn every_beginning_of_a_report_is_cut_off() {
        let end = GOLDEN.trim_end().len();
        for at in 1..end {
            let error = format!("{:#}", Report::parse(&GOLDEN[..at]).unwrap_err());
            assert!(error.contains("cut off"), "{at}: {error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        for path in ["/dev/null", "/nonexistent/report.json", "/"] {
            let error = Report::read(Path::new(path)).unwrap_err();
            assert!(error.to_string().contains(path));
        }
    }

    #[test]
    fn a_written_report_is_read_again_and_nothing_is_left_beside_it() {
        let folder = std::env::temp_dir().join(format!("exitbench-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.json");
        for _ in 0..2 {
            sample().write(&path).unwrap();
            assert_eq!(Report::read(&path).unwrap(), sample());
        }
        try_place(&folder.join("b.json")).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert!(try_place(&folder.join("no/such/folder")).is_err());
        assert!(try_place(&folder).unwrap_err().to_string().contains("it is a folder"));
        try_place(Path::new("/dev/null")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert!(sample().write(&folder.join("no/such/folder")).is_err());
    }
}
