//! Measures what each kind of VM exit costs: runs exitbench on stock KVM and on Gannet, in two machines that differ in nothing else,
//! side by side on this machine's CPUs. Both count instructions, so neither disturbs the other's figures.

use crate::boot;
use crate::options::Options;
use crate::progress::Step;
use crate::report::{Comparison, Figures, Side, write_whole};
use crate::tools::{Tools, modules, prepare};
use anyhow::{Context, Result, bail};
use gannet_lab::{Counts, Event, Layout, Machine, Module, guest};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// What exitbench writes, as far as it is read here.
#[derive(Deserialize)]
pub struct Report {
    pub unit: String,
    pub workloads: Vec<Entry>,
}

/// One workload of it.
#[derive(Deserialize)]
pub struct Entry {
    pub name: String,
    pub min: Option<u64>,
    pub median: Option<u64>,
    pub max: Option<u64>,
    #[serde(default)]
    pub iterations: u64,
    #[serde(default)]
    pub markers: bool,
    #[serde(default)]
    pub marker_iterations: u64,
    #[serde(default)]
    pub statistics: BTreeMap<String, u64>,
    pub skipped: Option<String>,
    pub failed: Option<String>,
}

impl Entry {
    /// The least, the median and the greatest, or why there are none.
    pub fn ticks(&self) -> Result<[u64; 3], String> {
        match (self.min, self.median, self.max, &self.failed, &self.skipped) {
            (Some(min), Some(median), Some(max), ..) => Ok([min, median, max]),
            (.., Some(reason), _) => Err(format!("failed: {reason}")),
            (.., Some(reason)) => Err(format!("skipped: {reason}")),
            _ => Err("no figures".to_owned()),
        }
    }
}

/// `make bench`: measures and writes the JSON.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    let tools = prepare(layout, options)?;
    let modules = modules(layout, options);
    let comparison = measure(layout, options, &tools, &modules)?;
    if let Some(path) = &options.json {
        comparison.write(path)?;
    }
    println!("{}", comparison.table());
    Ok(comparison.print_remarks())
}

/// Measures on each module at once and joins the figures.
pub fn measure(
    layout: &Layout,
    options: &Options,
    tools: &Tools,
    modules: &[Module],
) -> Result<Comparison> {
    let step = Step::start(
        layout,
        &format!("measuring VM exits on {}, {}", options.machine().name(), options.kernel),
    );
    let shown = Mutex::new(vec![String::new(); modules.len()]);
    let say = |index: usize, module: Module, event: Event<'_>| {
        let (Event::Line(text) | Event::Pending(text)) = event;
        if let (true, Ok(mut shown)) = (text.starts_with('['), shown.lock()) {
            shown[index] = format!("{}: {text}", module.name());
            step.say(&shown.join("  "));
        }
    };
    let sides: Vec<Result<(String, Side)>> = std::thread::scope(|scope| {
        let runs: Vec<_> = modules
            .iter()
            .enumerate()
            .map(|(index, module)| {
                let say = &say;
                scope.spawn(move || {
                    one_side(layout, options, tools, *module, &mut |e| say(index, *module, e))
                })
            })
            .collect();
        let failed = || anyhow::anyhow!("a measuring thread panicked");
        runs.into_iter().map(|run| run.join().unwrap_or_else(|_| Err(failed()))).collect()
    });
    step.done();
    let mut comparison = Comparison::new(options.machine().name(), options.kernel.series());
    for (module, side) in modules.iter().zip(sides) {
        match side {
            Ok((unit, side)) => {
                comparison.unit = unit;
                comparison.add(*module, &side);
            }
            Err(error) => comparison.not_measured(*module, &error),
        }
    }
    Ok(comparison)
}

/// One module's figures, and their unit.
pub fn one_side(
    layout: &Layout,
    options: &Options,
    tools: &Tools,
    module: Module,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<(String, Side)> {
    let (boots, others): (Vec<&str>, Vec<&str>) =
        options.only.split(',').partition(|name| *name == LINUX_BOOT);
    let mut options = options.clone();
    options.only = others.join(",");
    let (mut unit, mut side) = ("instructions".to_owned(), Side::default());
    if !others.is_empty() {
        (unit, side) = exitbench(layout, &options, tools, module, on_event)?;
    }
    if !boots.is_empty() {
        linux_boot(layout, options, tools, module, on_event, &mut side)?;
    }
    Ok((unit, side))
}

/// A Linux guest of the module's own, in a machine of its own as the hypervisor is in one.
fn linux_boot(
    layout: &Layout,
    mut options: Options,
    tools: &Tools,
    module: Module,
    on_event: &mut dyn FnMut(Event<'_>),
    side: &mut Side,
) -> Result<()> {
    if module == Module::Stock {
        options.parameters.clone_from(&options.stock_parameters);
    }
    let kind = boot::Kind::AS_NESTED;
    let (report, faults) = boot::measure_kind(layout, &options, tools, module, kind, on_event)?;
    let ticks = report.ticks_to_marker.context("the guest's user space did not answer")?;
    side.workloads.push((LINUX_BOOT.to_owned(), Ok(Figures::of(ticks))));
    side.faults.extend(faults);
    if let Some(added) = added_by_nesting(&side.workloads) {
        side.workloads.push((ADDED_BY_NESTING.to_owned(), Ok(Figures::of(added))));
    }
    Ok(())
}

/// What a boot takes more as a guest's guest, if both were measured.
fn added_by_nesting(workloads: &[(String, Result<Figures, String>)]) -> Option<u64> {
    let of = |wanted: &str| {
        let found = workloads.iter().find(|(name, _)| name == wanted);
        Some(found?.1.as_ref().ok()?.median)
    };
    of(NESTED_LINUX_BOOT)?.checked_sub(of(LINUX_BOOT)?)
}

/// The workloads that exitbench has, or a Linux guest's exitbench.
fn exitbench(
    layout: &Layout,
    options: &Options,
    tools: &Tools,
    module: Module,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<(String, Side)> {
    let (nested, plain): (Vec<&str>, Vec<&str>) =
        options.only.split(',').partition(|name| name.starts_with(NESTED_LINUX));
    let mut commands = Vec::new();
    if !plain.is_empty() {
        // Reports that are kept are for `exitbench compare`, which wants repetitions.
        let how = match options.reports {
            Some(_) => "--repetitions 15 --iterations 30",
            None => "--no-samples",
        };
        commands.push(format!(
            "exitbench run {} {how} --unit instructions --module {} --json /out/report.json",
            plain.join(" "),
            module.name()
        ));
    }
    if !nested.is_empty() {
        commands.push(nested_linux(options, &nested, module));
    }
    let parameters = match module {
        Module::Stock => &options.stock_parameters,
        _ => &options.parameters,
    };
    let mut job = tools.job(options, module, parameters, &commands.join("; "));
    if !nested.is_empty() {
        let linux = nested.contains(&NESTED_LINUX_BOOT);
        let initramfs = guest::initramfs_of_hypervisor(layout, &tools.exitbench, linux)?;
        job = job.file(layout.vmlinux(guest::KERNEL), "guest/vmlinux");
        job.texts.push(("guest/initramfs".to_owned(), initramfs));
    }
    let outcome = gannet_lab::run(layout, &job, on_event)?;
    let faults: Vec<String> = outcome.faults().into_iter().map(str::to_owned).collect();
    if let Some(reason) = outcome.refusal() {
        bail!("the module did not load: {reason}");
    }
    let mut entries = Vec::new();
    let mut unit = None;
    let wanted = [(!plain.is_empty(), "report.json"), (!nested.is_empty(), "nested.json")];
    for (_, name) in wanted.into_iter().filter(|(wanted, _)| *wanted) {
        let Some(json) = outcome.files.get(name) else {
            bail!("exitbench left no report; the console ends with:\n{}", outcome.tail(20));
        };
        let report: Report = serde_json::from_slice(json).context("exitbench's report")?;
        if let (Some(folder), "report.json") = (&options.reports, name) {
            let file = format!("{}-{}.json", options.machine().name(), module.name());
            write_whole(&folder.join(file), std::str::from_utf8(json)?)?;
        }
        entries.extend(report.workloads);
        unit = Some(report.unit);
    }
    let mut side = join(entries, &outcome.counts);
    side.faults = faults;
    Ok((unit.unwrap_or_default(), side))
}

/// What the workloads' names begin with that run in the guest of a Linux guest with its own KVM.
const NESTED_LINUX: &str = "nested_linux_";
/// The one of them that is a Linux guest.
const NESTED_LINUX_BOOT: &str = "nested_linux_boot";
/// The same guest without a hypervisor between.
const LINUX_BOOT: &str = "linux_boot";
/// The difference of the two.
const ADDED_BY_NESTING: &str = "nested_linux_boot_adds";

/// The command for those. On AMD that KVM is without nested paging if nothing else is asked for: with it a Linux guest of its own
/// does not get up on stock KVM in the emulator, and there would be nothing to compare.
fn nested_linux(options: &Options, names: &[&str], module: Module) -> String {
    let names: Vec<&str> = names.iter().filter_map(|n| n.strip_prefix(NESTED_LINUX)).collect();
    let kvm = match (options.machine(), &*options.l1_parameters) {
        (Machine::Amd, "") => " --kvm npt=0".to_owned(),
        (Machine::Intel | Machine::AmdNrip, "") => String::new(),
        (_, parameters) => format!(" --kvm '{parameters}'"),
    };
    format!(
        "exitbench nested-linux {} --kernel /guest/vmlinux --initrd /guest/initramfs{kvm} \
         --unit instructions --module {} --json /out/nested.json",
        names.join(" "),
        module.name()
    )
}

/// Joins figures and operation counts. The records come in the order of the workloads that had markers.
fn join(entries: Vec<Entry>, counts: &[Counts]) -> Side {
    let marked = entries.iter().filter(|e| e.markers).count();
    let mut side = Side::default();
    if marked != counts.len() {
        side.remarks.push(format!(
            "operations are left out: {marked} workloads had markers, but the emulator saw {} pairs",
            counts.len()
        ));
    }
    let mut records = counts.iter().filter(|_| marked == counts.len()).peekable();
    for entry in entries {
        let result = entry.ticks().map(|[min, median, max]| {
            let mut figures = Figures { min, median, max, ..Figures::default() };
            if let Some(record) = records.next_if(|_| entry.markers) {
                let per = entry.marker_iterations.max(1) as f64;
                let each = |(name, count): (&String, &u64)| {
                    (name.clone(), (*count as f64 / per * 100.0).round() / 100.0)
                };
                figures.ops = record.iter().map(each).collect();
            }
            figures
        });
        side.workloads.push((entry.name, result));
    }
    side
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(json: &str) -> Vec<Entry> {
        serde_json::from_str(json).unwrap()
    }

    const THREE: &str = r#"[
        {"name":"nothing","min":1,"median":2,"max":3,"iterations":9,"markers":false,"marker_iterations":0},
        {"name":"xsetbv","skipped":"no XSAVE"},
        {"name":"cpuid","min":10,"median":20,"max":30,"iterations":9,"markers":true,"marker_iterations":100}]"#;

    #[test]
    fn records_go_to_the_workloads_that_had_markers() {
        let counts = [Counts::from([("vmrun".to_owned(), 100), ("rdmsr".to_owned(), 150)])];
        let side = join(entries(THREE), &counts);
        let cpuid = side.workloads[2].1.as_ref().unwrap();
        assert_eq!((cpuid.ops["vmrun"], cpuid.ops["rdmsr"]), (1.0, 1.5));
        assert!(side.workloads[0].1.as_ref().unwrap().ops.is_empty());
        assert!(side.workloads[1].1.as_ref().unwrap_err().contains("no XSAVE"));
        assert!(side.remarks.is_empty());
    }

    #[test]
    fn what_nesting_adds_needs_both_boots() {
        let boot = |name: &str, ticks| (name.to_owned(), Ok(Figures::of(ticks)));
        let (plain, nested) = (boot(LINUX_BOOT, 1600), boot(NESTED_LINUX_BOOT, 1811));
        assert_eq!(added_by_nesting(&[nested.clone(), plain.clone()]), Some(211));
        assert_eq!(added_by_nesting(std::slice::from_ref(&nested)), None);
        let failed = (LINUX_BOOT.to_owned(), Err("failed".to_owned()));
        assert_eq!(added_by_nesting(&[nested, failed]), None);
    }

    #[test]
    fn records_that_do_not_match_are_not_attributed() {
        let side = join(entries(THREE), &[]);
        assert!(side.workloads[2].1.as_ref().unwrap().ops.is_empty());
        assert_eq!(side.remarks.len(), 1);
    }
}
