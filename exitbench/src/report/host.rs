//! What a report tells of the machine that it was taken on, and of how it was taken.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Facts of the host, as far as they are known there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// The CPU's model name.
    pub cpu: String,
    /// Family, model and stepping.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpu_signature: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub microcode: String,
    /// How many CPUs are online.
    pub cpus: u64,
    /// Who made the machine and what it is called.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub machine: String,
    /// Whether the host is itself a guest, so that each of its exits may cost exits of its own.
    pub under_hypervisor: bool,
    /// Whether the module lets guests have guests.
    pub guests_may_nest: bool,
    /// The version that the module says, where it says one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub module_version: String,
    /// The checksum of the module's source, where the kernel was built to tell it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub module_source: String,
    /// How many thousand ticks the guest's time stamp counter makes in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tsc_khz: Option<u64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub clock_source: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub smt: String,
    /// How the CPU's frequency is chosen.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub governor: String,
    /// The kernel's build, by its own words.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kernel_build: String,
    /// What the kernel does about each weakness of the CPU.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub mitigations: BTreeMap<String, String>,
    /// The modules' parameters, as `kvm_amd.npt`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
}

/// How a run was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Times that each workload ran, in a fresh VM each.
    pub repetitions: u64,
    /// Samples of each repetition that count.
    pub iterations: u64,
    /// Samples of each repetition before those.
    pub warm_up: u64,
    /// The host's CPUs on which the vCPUs were held; empty: on any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pinned: Vec<usize>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lazy_timer: bool,
}
