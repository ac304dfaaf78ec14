//! `exitbench nested-linux`: the guest is a Linux kernel with its own KVM (L1), in which exitbench is the VMM of the guests that
//! are measured (L2). What comes back is what that exitbench reports.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::boot::session::Boot;
use crate::cli::{COMMAND_LINE, NestedLinuxArguments};
use crate::output::show;
use crate::report::{Entry, Measurement, Missing, Report};
use crate::vmm::hypervisor::{self, Hypervisor};

/// The lines of the console between which a report of L1's stands.
const BEGIN: &str = "GANNET-REPORT-BEGIN";
const END: &str = "GANNET-REPORT-END";
/// L1's last line (`lab/hypervisor-init.sh`).
const DONE: &str = "GANNET-L1-DONE";
/// What the names of the workloads begin with.
const PREFIX: &str = "nested_linux_";
/// The one that boots a Linux guest as L2.
pub const BOOT: &str = "boot";

/// What L1's `exitbench boot` reports, as far as it is read here.
#[derive(Deserialize)]
struct Booted {
    ticks_to_marker: Option<u64>,
    end: String,
}

/// Boots L1, has it run the workloads, and shows what it reports; whether nothing failed.
pub fn command(arguments: &NestedLinuxArguments) -> Result<bool> {
    let hypervisor = Hypervisor::open(&arguments.device.device)?;
    let report = run(arguments, &hypervisor)?;
    show(&report, arguments.json.as_deref())
}

fn run(arguments: &NestedLinuxArguments, hypervisor: &Hypervisor) -> Result<Report> {
    let boot = Boot {
        kernel: arguments.kernel.clone(),
        initrd: arguments.initrd.clone(),
        cpus: arguments.cpus,
        memory: arguments.memory,
        command_line: command_line(arguments)?,
        from: String::new(),
        expect: DONE.into(),
        stop_at_marker: true,
        timeout: Duration::from_secs(arguments.timeout),
    };
    let ended = boot.run(hypervisor)?;
    if !ended.marker_seen {
        let reason = ended.end.err().unwrap_or_else(|| "it reset itself".into());
        bail!("the guest that is a hypervisor did not come to its end: {}", reason.trim_end());
    }
    let workloads = entries(&ended.console, wants_boot(arguments))?;
    let (unit, module) = (arguments.device.unit, arguments.device.module());
    Ok(Report { workloads, ..Report::new(unit, module, hypervisor::kernel_release()) })
}

fn wants_boot(arguments: &NestedLinuxArguments) -> bool {
    arguments.workloads.iter().any(|name| name == BOOT)
}

/// The command that runs the workloads, on one CPU of several with what it says kept off the console that they share.
fn run_on(cpu: Option<u32>, workloads: &str, arguments: &NestedLinuxArguments) -> String {
    let held = cpu.map(|cpu| format!(" --cpu {cpu}")).unwrap_or_default();
    let quiet = cpu.map(|cpu| format!(" >/tmp/said{cpu} 2>&1")).unwrap_or_default();
    format!(
        "exitbench run {workloads} --iterations {} --marker-iterations {} --repetitions 1 --no-samples{held} \
         --json /tmp/report{}{quiet}",
        arguments.iterations,
        arguments.marker_iterations,
        cpu.unwrap_or(0)
    )
}

/// L1's kernel command line: the parameters of its KVM, and the shell command that measures.
fn command_line(arguments: &NestedLinuxArguments) -> Result<String> {
    let plain: Vec<&str> =
        arguments.workloads.iter().map(String::as_str).filter(|name| *name != BOOT).collect();
    let mut steps = Vec::new();
    if !plain.is_empty() {
        let runs = |cpu| run_on(cpu, &plain.join(" "), arguments);
        match arguments.cpus {
            1 => steps.push(runs(None)),
            cpus => {
                let all: Vec<String> = (0..cpus).map(|cpu| runs(Some(cpu)) + " &").collect();
                steps.push(all.join(" ") + " wait");
            }
        }
        for cpu in 0..arguments.cpus {
            let report = format!("cat /tmp/report{cpu} || cat /tmp/said{cpu}");
            steps.push(format!("echo {BEGIN}; {report}; echo {END}"));
        }
    }
    if wants_boot(arguments) {
        steps.push(
            "exitbench boot --kernel /guest/vmlinux --initrd /guest/initramfs --memory 160 \
             --append 'quiet mitigations=off' --stop-at-marker --report /tmp/boot"
                .into(),
        );
        steps.push(format!("echo {BEGIN}; cat /tmp/boot; echo {END}"));
    }
    if steps.is_empty() {
        bail!("no workload is named");
    }
    let (kvm, command) = (&arguments.kvm, steps.join("; "));
    let module = arguments.l1_module.as_deref().unwrap_or_default();
    if [kvm, module, &command].iter().any(|text| text.contains('"')) {
        bail!("neither parameters nor names may hold a quotation mark");
    }
    Ok(format!(
        "{COMMAND_LINE} quiet mitigations=off gannet.module=\"{module}\" gannet.kvm=\"{kvm}\" \
         gannet.command=\"{command}\""
    ))
}

/// The workloads of the reports on the console, one for each of L1's CPUs, a boot's being the last.
fn entries(console: &str, boot: bool) -> Result<Vec<Entry>> {
    let mut reports = reports(console);
    let booted = if boot { reports.pop() } else { None };
    let mut found = Vec::new();
    let several = reports.len() > 1;
    for (cpu, text) in reports.iter().enumerate() {
        let report: Report = serde_json::from_str(text).context("what L1's exitbench reports")?;
        found.extend(report.workloads.into_iter().map(|mut entry| {
            if several {
                entry.name += &format!("_cpu{cpu}");
            }
            entry
        }));
    }
    if boot {
        let text = booted.context("L1 reports no boot")?;
        let booted: Booted = serde_json::from_str(&text).context("L1's report of a boot")?;
        let outcome = match booted.ticks_to_marker {
            Some(ticks) => {
                let measured = Measurement::of(vec![vec![ticks]]);
                Ok(measured.context("a boot is one sample")?)
            }
            None => Err(Missing::Failed(booted.end)),
        };
        found.push(Entry { name: BOOT.into(), outcome });
    }
    if found.is_empty() {
        bail!("L1's exitbench reports nothing");
    }
    for entry in &mut found {
        entry.name.insert_str(0, PREFIX);
        // The module's statistics there are those of L1's KVM.
        if let Ok(measured) = &mut entry.outcome {
            measured.statistics.clear();
        }
    }
    Ok(found)
}

/// The texts between the lines that enclose reports.
fn reports(console: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut inside = false;
    for line in console.lines().map(str::trim_end) {
        match line {
            BEGIN => {
                inside = true;
                found.push(String::new());
            }
            END => inside = false,
            _ if inside => {
                if let Some(text) = found.last_mut() {
                    text.push_str(line);
                    text.push('\n');
                }
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn arguments(words: &[&str]) -> NestedLinuxArguments {
        let line = ["exitbench", "nested-linux", "--kernel", "k", "--initrd", "i"];
        match Cli::try_parse_from(line.iter().chain(words)).unwrap().command {
            Command::NestedLinux(arguments) => arguments,
            _ => panic!("not understood as nested-linux"),
        }
    }

    const CONSOLE: &str = "Linux\r\nGANNET-REPORT-BEGIN\r\n{\"unit\": \"instructions\", \"module\": \"kvm_amd\",\r\n \
        \"workloads\": [{\"name\": \"cpuid\", \"min\": 1, \"median\": 2, \"max\": 3, \"iterations\": 9,\r\n \
        \"markers\": true, \"marker_iterations\": 5, \"statistics\": {\"vcpu.exits\": 5}}]}\r\nGANNET-REPORT-END\r\n";

    #[test]
    fn the_report_on_the_console_is_the_report() {
        let found = entries(CONSOLE, false).unwrap();
        let Ok(measured) = &found[0].outcome else { panic!("no figures") };
        assert_eq!((found[0].name.as_str(), measured.summary.median), ("nested_linux_cpuid", 2));
        assert!(measured.markers && measured.statistics.is_empty());
        assert!(entries("nothing\n", false).is_err());
    }

    #[test]
    fn each_cpu_has_a_report() {
        let found = entries(&CONSOLE.repeat(2), false).unwrap();
        let names: Vec<&str> = found.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["nested_linux_cpuid_cpu0", "nested_linux_cpuid_cpu1"]);
        let line = command_line(&arguments(&["cpuid", "--cpus", "2"])).unwrap();
        assert!(line.contains(" --cpu 0 --json /tmp/report0 >/tmp/said0 2>&1 & exitbench run "));
        assert!(line.contains(" --cpu 1 --json /tmp/report1 >/tmp/said1 2>&1 & wait; echo "));
        assert!(line.contains("; cat /tmp/report1 || cat /tmp/said1; "));
    }

    #[test]
    fn a_boot_that_failed_says_why() {
        let boot = "GANNET-REPORT-BEGIN\n{\"ticks_to_marker\": TICKS, \"end\": \"why\"}\nGANNET-REPORT-END\n";
        let console = |ticks| CONSOLE.to_owned() + &boot.replace("TICKS", ticks);
        let found = entries(&console("77"), true).unwrap();
        assert!(matches!(&found[1].outcome, Ok(m) if m.summary.median == 77));
        assert_eq!(found[1].name, "nested_linux_boot");
        let found = entries(&console("null"), true).unwrap();
        assert!(matches!(&found[1].outcome, Err(Missing::Failed(failed)) if failed == "why"));
    }

    #[test]
    fn the_command_line_has_parameters_and_workloads() {
        let line = command_line(&arguments(&["cpuid", "boot", "--kvm", "npt=0"])).unwrap();
        assert!(line.contains(
            "gannet.module=\"\" gannet.kvm=\"npt=0\" gannet.command=\"exitbench run cpuid --iter"
        ));
        assert!(line.contains("exitbench boot --kernel /guest/vmlinux"));
        assert!(command_line(&arguments(&["a\"b"])).is_err());
        let line = command_line(&arguments(&["--l1-module", "gannet"])).unwrap();
        assert!(line.contains("gannet.module=\"gannet\" "));
    }
}
