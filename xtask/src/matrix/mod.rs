//! `make matrix`: what stock KVM and Gannet offer on each emulated machine with each kernel, as they say it themselves
//! (`exitbench features`), in one page: docs/results/matrix.md.

mod names;
mod page;
mod rows;

use crate::again::until_well;
use crate::options::Options;
use crate::report::write_whole;
use crate::{module, progress};
use anyhow::{Context, Result, bail};
use gannet_lab::{Job, Kernel, Layout, Machine, Module, programs};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

const PAGE: &str = "docs/results/matrix.md";
const MACHINES: [Machine; 3] = [Machine::Amd, Machine::AmdNrip, Machine::Intel];
/// The oldest first.
const ORDER: [Kernel; 3] = [Kernel::V6_1, Kernel::V6_12, Kernel::V7_3];

/// What `exitbench features --json` writes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Features {
    capabilities: BTreeMap<String, i64>,
    cpuid: BTreeMap<String, String>,
    feature_msrs: BTreeMap<String, String>,
    msrs: BTreeSet<String>,
    parameters: BTreeMap<String, String>,
    /// What the module wrote into the host's log of what it uses.
    #[serde(default)]
    log: Vec<String>,
}

/// One machine with one kernel, asked twice.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Column {
    machine: String,
    kernel: String,
    stock: Features,
    gannet: Features,
}

/// Boots every machine with every kernel, once for each module, and writes the page; `FROM=file` writes it anew from what an earlier run
/// was answered.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    if options.machine_named() {
        bail!("the matrix is of all machines: leave MACHINE out");
    }
    let columns: Vec<Column> = match &options.from {
        Some(path) => {
            let text = std::fs::read(path).with_context(|| path.display().to_string())?;
            serde_json::from_slice(&text).with_context(|| path.display().to_string())?
        }
        None => {
            let columns = ask_all(layout)?;
            let place = options.json.clone().unwrap_or_else(|| layout.out.join("matrix.json"));
            write_whole(&place, &serde_json::to_string(&columns)?)?;
            columns
        }
    };
    let place = layout.root.join(PAGE);
    write_whole(&place, &page::write(&columns))?;
    println!("{}", place.display());
    Ok(true)
}

fn ask_all(layout: &Layout) -> Result<Vec<Column>> {
    layout.ensure(&["toolchain", "qemu", "bochs", "busybox"])?;
    layout.ensure(&ORDER.map(Kernel::group))?;
    let exitbench = programs::build_static(layout, "exitbench")?.join("exitbench");
    for kernel in ORDER {
        module::build(layout, kernel)?;
    }
    let mut columns = Vec::new();
    for machine in MACHINES {
        for kernel in ORDER {
            let asked = |module: Module| {
                let title = format!("{} {kernel} {}", machine.name(), module.name());
                let step = progress::Step::start(layout, &title);
                let found = ask(layout, &exitbench, machine, kernel, module);
                drop(step);
                found.with_context(|| title)
            };
            let (stock, gannet) = (asked(Module::Stock)?, asked(Module::Gannet)?);
            columns.push(Column {
                machine: machine.name().to_owned(),
                kernel: kernel.series().to_owned(),
                stock,
                gannet,
            });
        }
    }
    Ok(columns)
}

/// What one module offers in one machine.
fn ask(
    layout: &Layout,
    exitbench: &std::path::Path,
    machine: Machine,
    kernel: Kernel,
    module: Module,
) -> Result<Features> {
    let job = Job::new(machine, kernel, module, "exitbench features --json >/out/features")
        .file(exitbench, "bin/exitbench");
    let run = |job: &Job| gannet_lab::run(layout, job, &mut |_| {});
    let well = |outcome: &Result<gannet_lab::Outcome>| {
        outcome.as_ref().is_ok_and(gannet_lab::Outcome::succeeded)
    };
    let outcome = until_well(job, run, well).0?;
    if let Some(reason) = outcome.refusal() {
        bail!("the module did not load: {reason}");
    }
    let Some(text) = outcome.files.get("features").filter(|_| outcome.succeeded()) else {
        bail!("exitbench features did not end well:\n{}", outcome.tail(10));
    };
    let mut features: Features =
        serde_json::from_slice(text).context("exitbench features wrote no JSON")?;
    if module == Module::Gannet {
        features.log = said(&outcome.dmesg);
    }
    Ok(features)
}

/// What Gannet says of the CPU, and of what it uses of it.
fn said(log: &str) -> Vec<String> {
    let lines = log.lines().map(gannet_lab::untimed);
    let own = lines.filter_map(|line| line.split_once(": ").map(|(_, text)| text));
    let uses = |text: &&str| {
        ["SVM with ", "VMX with ", "mitigations: "].iter().any(|start| text.starts_with(start))
    };
    own.filter(uses).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_log_what_gannet_uses_is_told() {
        let log = "[    3.39] gannet-lab: the job starts\n[ 3.4] kvm: loading out-of-tree module taints kernel.\n\
                   [    7.76] kvm: VMX with TDP: EPT, VPID\n[ 7.77] gannet: mitigations: VERW no\n";
        assert_eq!(said(log), ["VMX with TDP: EPT, VPID", "mitigations: VERW no"]);
    }

    #[test]
    fn what_exitbench_writes_is_read() {
        let text = r#"{"module": "kvm_amd", "kernel": "6.12", "cpu": "EPYC", "capabilities": {"KVM_CAP_HLT": 1}, "cpuid": {},
            "feature_msrs": {"0x0000008b": "0x1"}, "msrs": ["0x00000010"], "parameters": {"kvm_amd.npt": "Y"}}"#;
        let features: Features = serde_json::from_str(text).unwrap();
        assert_eq!(features.capabilities["KVM_CAP_HLT"], 1);
        assert_eq!(features.parameters["kvm_amd.npt"], "Y");
    }
}
