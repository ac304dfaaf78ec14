//! The facts of the host that a report tells, as /proc and /sys have them. What is not to be had there is left out.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::report::Host;
use crate::vmm::cpuid::{Features, Topology, of_guest};
use crate::vmm::hypervisor::{Hypervisor, MODULES};

/// The facts of this machine. To be asked for behind the measuring: it makes a VM of its own for the TSC's frequency.
pub fn facts(hypervisor: &Hypervisor) -> Host {
    let guest = Features::of(&of_guest(hypervisor, true, Topology { apic_id: 0, vcpus: 1 }));
    Host {
        guests_may_nest: guest.svm || guest.vmx,
        tsc_khz: hypervisor.tsc_khz(),
        ..below(Path::new("/"))
    }
}

/// What the files below `root` tell.
fn below(root: &Path) -> Host {
    let line = |path: &str| line(&root.join(path)).unwrap_or_default();
    let cpuinfo = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let cpu = first_cpu(&cpuinfo);
    let of_cpu = |name: &str| cpu.get(name).cloned().unwrap_or_default();
    let dmi = "sys/class/dmi/id";
    let cpu0 = "sys/devices/system/cpu";
    Host {
        cpu: of_cpu("model name"),
        cpu_signature: joined(&["cpu family", "model", "stepping"].map(of_cpu), "/"),
        microcode: of_cpu("microcode"),
        cpus: online(&line(&format!("{cpu0}/online"))),
        machine: joined(&["sys_vendor", "product_name"].map(|f| line(&format!("{dmi}/{f}"))), " "),
        under_hypervisor: of_cpu("flags").split(' ').any(|flag| flag == "hypervisor"),
        module_version: of_module(root, "version"),
        module_source: of_module(root, "srcversion"),
        clock_source: line("sys/devices/system/clocksource/clocksource0/current_clocksource"),
        smt: line(&format!("{cpu0}/smt/control")),
        governor: joined(
            &["driver", "governor"].map(|f| line(&format!("{cpu0}/cpu0/cpufreq/scaling_{f}"))),
            ", ",
        ),
        kernel_build: line("proc/sys/kernel/version"),
        mitigations: files(&root.join(cpu0).join("vulnerabilities")),
        parameters: parameters(root),
        ..Host::default()
    }
}

/// Those of the words that say something.
fn joined(words: &[String], between: &str) -> String {
    let told: Vec<&str> =
        words.iter().map(String::as_str).filter(|word| !word.is_empty()).collect();
    told.join(between)
}

/// The first line of a small file, if it can be read and says anything.
fn line(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().next()?.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

/// Every small file of a folder by its name.
fn files(folder: &Path) -> BTreeMap<String, String> {
    let Ok(entries) = fs::read_dir(folder) else { return BTreeMap::new() };
    let fact =
        |path: PathBuf| Some((path.file_name()?.to_string_lossy().into_owned(), line(&path)?));
    entries.filter_map(|entry| fact(entry.ok()?.path())).collect()
}

/// What /proc/cpuinfo tells of the first CPU, by name.
fn first_cpu(text: &str) -> BTreeMap<&str, String> {
    let field = |line: &'_ str| line.split_once(':').map(|(_, value)| value.trim().to_owned());
    let block = text.lines().take_while(|line| !line.trim().is_empty());
    block.filter_map(|line| Some((line.split(':').next()?.trim(), field(line)?))).collect()
}

/// How many CPUs a list such as `0-3,8` has.
fn online(list: &str) -> u64 {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        Some((last + 1).saturating_sub(first))
    };
    list.split(',').filter_map(range).sum()
}

/// What the first of KVM's modules says of itself that says anything.
fn of_module(root: &Path, file: &str) -> String {
    let of = |name: &&str| line(&root.join("sys/module").join(name).join(file));
    MODULES.iter().find_map(of).unwrap_or_default()
}

fn parameters(root: &Path) -> BTreeMap<String, String> {
    let of = |name: &&'static str| {
        let found = files(&root.join("sys/module").join(name).join("parameters"));
        let name = *name;
        found.into_iter().map(move |(key, value)| (format!("{name}.{key}"), value))
    };
    MODULES.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with these files, removed with its value.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root =
                std::env::temp_dir().join(format!("exitbench-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const CPUINFO: &str = "processor\t: 0\ncpu family\t: 23\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7B12\n\
        stepping\t: 2\nmicrocode\t: 0x1000065\nflags\t\t: fpu svm hypervisor lm\n\n\
        processor\t: 1\nmodel name\t: other\n";

    #[test]
    fn the_facts_are_those_of_the_files() {
        let root = Root::new(
            "facts",
            &[
                ("proc/cpuinfo", CPUINFO),
                ("proc/sys/kernel/version", "#1 SMP Debian\n"),
                ("sys/devices/system/cpu/online", "0-3,8\n"),
                ("sys/devices/system/cpu/vulnerabilities/l1tf", "Not affected\n"),
                (
                    "sys/devices/system/cpu/vulnerabilities/retbleed",
                    "Mitigation: untrained return thunk\n",
                ),
                ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
                ("sys/class/dmi/id/sys_vendor", "QEMU\n"),
                ("sys/class/dmi/id/product_name", "Standard PC\n"),
                ("sys/module/kvm/srcversion", "ABCDEF\n"),
                ("sys/module/kvm_amd/parameters/npt", "Y\n"),
                ("sys/module/kvm/parameters/halt_poll_ns", "200000\n"),
            ],
        );
        let host = below(&root.0);
        assert_eq!((host.cpu.as_str(), host.cpu_signature.as_str()), ("AMD EPYC 7B12", "23/1/2"));
        assert_eq!((host.cpus, host.under_hypervisor), (5, true));
        assert_eq!(
            (host.machine.as_str(), host.governor.as_str()),
            ("QEMU Standard PC", "performance")
        );
        assert_eq!(host.mitigations.len(), 2);
        assert_eq!((host.module_version.as_str(), host.module_source.as_str()), ("", "ABCDEF"));
        assert_eq!(host.parameters["kvm_amd.npt"], "Y");
        assert_eq!(host.parameters["kvm.halt_poll_ns"], "200000");
    }

    #[test]
    fn a_machine_that_tells_nothing_has_no_facts() {
        let host = below(Path::new("/nonexistent"));
        assert_eq!(host, Host::default());
    }

    #[test]
    fn lists_of_cpus_are_counted() {
        for (list, count) in
            [("0", 1), ("0-1", 2), ("0-3,8,10-11", 7), ("", 0), ("3-1", 0), ("x", 0)]
        {
            assert_eq!(online(list), count, "{list}");
        }
    }
}
