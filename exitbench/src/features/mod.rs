//! `exitbench features`: what `/dev/kvm` offers here, as the module itself says it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use kvm_bindings::{Msrs, kvm_cpuid_entry2, kvm_msr_entry};
use serde::Serialize;

use crate::cli::FeaturesArguments;
use crate::host;
use crate::output::print;
use crate::vmm::hypervisor::{self, Hypervisor};

mod names;

/// All that was asked. Names are sorted, so that two of them compare line by line.
#[derive(Debug, Serialize)]
struct Features {
    module: String,
    kernel: String,
    cpu: String,
    /// KVM_CHECK_EXTENSION of the device, where it is not 0.
    capabilities: BTreeMap<String, i32>,
    /// KVM_GET_SUPPORTED_CPUID: `leaf.subleaf.register`, in hexadecimal.
    cpuid: BTreeMap<String, String>,
    /// The feature MSRs and their values (KVM_GET_MSR_FEATURE_INDEX_LIST).
    feature_msrs: BTreeMap<String, String>,
    /// The MSRs that a vCPU's state has (KVM_GET_MSR_INDEX_LIST).
    msrs: BTreeSet<String>,
    /// The parameters of the loaded modules.
    parameters: BTreeMap<String, String>,
}

/// `exitbench features`.
pub fn command(arguments: &FeaturesArguments) -> Result<bool> {
    let hypervisor = Hypervisor::open(&arguments.device)?;
    let features = ask(&hypervisor)?;
    if arguments.json {
        let text = serde_json::to_string_pretty(&features).context("what was asked is no JSON")?;
        print(&text)?;
    } else {
        print(&features.lines().join("\n"))?;
    }
    Ok(true)
}

fn ask(hypervisor: &Hypervisor) -> Result<Features> {
    let kvm = &hypervisor.kvm;
    let capability = |number| kvm.check_extension_raw(u64::from(number));
    let list = kvm.get_msr_index_list().context("KVM_GET_MSR_INDEX_LIST failed")?;
    let host = host::facts(hypervisor);
    Ok(Features {
        module: hypervisor::module_name(),
        kernel: hypervisor::kernel_release(),
        cpu: host.cpu,
        capabilities: capabilities(capability),
        cpuid: cpuid(hypervisor.supported_cpuid.as_slice()),
        feature_msrs: feature_msrs(hypervisor)?,
        msrs: list.as_slice().iter().map(|index| hexadecimal(*index)).collect(),
        parameters: host.parameters,
    })
}

/// Asks for every number; what is refused is not offered.
fn capabilities(ask: impl Fn(u32) -> i32) -> BTreeMap<String, i32> {
    let numbers = 0..names::NUMBERS;
    let offered = numbers.map(|number| (names::of(number), ask(number)));
    offered.filter(|(_, answer)| *answer > 0).collect()
}

fn cpuid(entries: &[kvm_cpuid_entry2]) -> BTreeMap<String, String> {
    let registers = |entry: &kvm_cpuid_entry2| {
        let place = format!("{:#010x}.{}", entry.function, entry.index);
        let four = [("eax", entry.eax), ("ebx", entry.ebx), ("ecx", entry.ecx), ("edx", entry.edx)];
        four.map(|(register, value)| (format!("{place}.{register}"), hexadecimal(value)))
    };
    entries.iter().flat_map(registers).collect()
}

/// One at a time: the kernel stops at the first that it cannot tell.
fn feature_msrs(hypervisor: &Hypervisor) -> Result<BTreeMap<String, String>> {
    let kvm = &hypervisor.kvm;
    let list = kvm.get_msr_feature_index_list().context("KVM_GET_MSR_FEATURE_INDEX_LIST failed")?;
    let mut all = BTreeMap::new();
    for index in list.as_slice().iter().copied() {
        let entry = kvm_msr_entry { index, ..Default::default() };
        let mut one = Msrs::from_entries(&[entry]).context("a list of one MSR")?;
        let value = match kvm.get_msrs(&mut one) {
            Ok(1) => one.as_slice().first().map(|entry| format!("{:#x}", entry.data)),
            _ => None,
        };
        all.insert(hexadecimal(index), value.unwrap_or_else(|| "refused".to_owned()));
    }
    Ok(all)
}

/// Of one width, so that names sort as numbers do.
fn hexadecimal(value: u32) -> String {
    format!("{value:#010x}")
}

impl Features {
    /// One line each, the kind first, as grep likes it.
    fn lines(&self) -> Vec<String> {
        let head = [("module", &self.module), ("kernel", &self.kernel), ("cpu", &self.cpu)];
        let head = head.into_iter().map(|(name, value)| format!("{name} {value}"));
        let capabilities = self.capabilities.iter().map(|(name, value)| format!("{name} {value}"));
        let kind = |kind: &'static str, all: &BTreeMap<String, String>| {
            all.iter().map(|(name, value)| format!("{kind} {name} {value}")).collect::<Vec<_>>()
        };
        head.chain(capabilities)
            .chain(kind("cpuid", &self.cpuid))
            .chain(kind("feature-msr", &self.feature_msrs))
            .chain(self.msrs.iter().map(|index| format!("msr {index}")))
            .chain(kind("parameter", &self.parameters))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_or_zero_is_no_capability() {
        let answer = |number| match number {
            0 => 1,
            9 => 710,
            44 => -1,
            300 => 2,
            _ => 0,
        };
        let found = capabilities(answer);
        let expected = [("KVM_CAP_300", 2), ("KVM_CAP_IRQCHIP", 1), ("KVM_CAP_NR_VCPUS", 710)];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value)).into());
    }

    #[test]
    fn cpuid_is_told_register_by_register() {
        let entry = kvm_cpuid_entry2 { function: 7, index: 1, eax: 0x10, ..Default::default() };
        let found = cpuid(&[entry]);
        assert_eq!(found.len(), 4);
        assert_eq!(found["0x00000007.1.eax"], "0x00000010");
        assert_eq!(found["0x00000007.1.edx"], "0x00000000");
    }

    #[test]
    fn every_fact_has_a_line_of_its_kind() {
        let one = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        let features = Features {
            module: "gannet".into(),
            kernel: "6.12".into(),
            cpu: "EPYC".into(),
            capabilities: BTreeMap::from([("KVM_CAP_IRQCHIP".to_owned(), 1)]),
            cpuid: one("0x00000001.0.ecx", "0x80000000"),
            feature_msrs: one("0x0000008b", "0x1"),
            msrs: BTreeSet::from(["0x00000010".to_owned()]),
            parameters: one("gannet.npt", "Y"),
        };
        let lines = features.lines();
        assert_eq!(lines.len(), 8);
        for line in [
            "module gannet",
            "KVM_CAP_IRQCHIP 1",
            "cpuid 0x00000001.0.ecx 0x80000000",
            "feature-msr 0x0000008b 0x1",
            "msr 0x00000010",
            "parameter gannet.npt Y",
        ] {
            assert!(lines.iter().any(|l| l == line), "{line}");
        }
    }
}
