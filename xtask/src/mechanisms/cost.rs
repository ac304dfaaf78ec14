//! The cost model: what counted operations cost in cycles on real processors, from `lab/cost-model.toml`. What it gives is always modelled,
//! never measured, and always a range with something taken in it.

use super::results::Figures;
use anyhow::{Context, Result, bail};
use gannet_lab::Machine;
use gannet_lab::classify::KINDS;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::{Add, Mul, Sub};
use std::path::Path;

/// Cycles: the least, what is taken, the most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cycles {
    pub low: f64,
    pub taken: f64,
    pub high: f64,
}

/// A processor of the model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    pub key: String,
    pub name: String,
    vendor: Vendor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Vendor {
    Amd,
    Intel,
}

impl Cpu {
    /// Whether what is counted on this machine of the lab happens on such a processor.
    pub fn is_of(&self, machine: Machine) -> bool {
        match machine {
            Machine::Amd => self.vendor == Vendor::Amd,
            Machine::Intel => self.vendor == Vendor::Intel,
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ipc {
    low: f64,
    taken: f64,
    high: f64,
}

/// How well founded a cost is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Measured,
    Derived,
    Range,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
enum Given {
    One(f64),
    Range([f64; 2]),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    operation: String,
    cpus: Vec<String>,
    cycles: Given,
    kind: Kind,
    source: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    ipc: Ipc,
    cpu: Vec<Cpu>,
    cost: Vec<Entry>,
}

/// The whole model, complete: every kind of operation has a cost on every processor, but for those of VMX, which only Intel's execute.
#[derive(Debug)]
pub struct Model {
    ipc: Ipc,
    pub cpus: Vec<Cpu>,
    costs: BTreeMap<(String, String), Cycles>,
    /// Entries by how well founded they are: measured, derived, ranges.
    pub founded: [usize; 3],
}

impl Model {
    /// Reads the file of a checkout.
    pub fn read(root: &Path) -> Result<Self> {
        let path = root.join("lab/cost-model.toml");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Self::parse(&text).context("lab/cost-model.toml")
    }

    fn parse(text: &str) -> Result<Self> {
        let file: File = toml::from_str(text)?;
        let mut model =
            Self { ipc: file.ipc, cpus: file.cpu, costs: BTreeMap::new(), founded: [0; 3] };
        for entry in file.cost {
            let Entry { operation, cpus, cycles, kind, source } = entry;
            if !KINDS.iter().any(|known| known.name() == operation) {
                bail!("{operation}: the plugin does not count that");
            }
            if source.is_empty() {
                bail!("{operation}: no source");
            }
            for cpu in cpus {
                if !model.cpus.iter().any(|known| known.key == cpu) {
                    bail!("{operation}: no such processor: {cpu}");
                }
                model.founded[kind as usize] += 1;
                let key = (operation.clone(), cpu.clone());
                if model.costs.insert(key, cycles.into()).is_some() {
                    bail!("{operation} on {cpu} stands there twice");
                }
            }
        }
        for kind in KINDS {
            for cpu in model.cpus.iter().filter(|cpu| !kind.is_vmx() || cpu.is_of(Machine::Intel)) {
                if !model.costs.contains_key(&(kind.name().to_owned(), cpu.key.clone())) {
                    bail!("{} on {}: no cost", kind.name(), cpu.key);
                }
            }
        }
        Ok(model)
    }

    /// A processor's name.
    pub fn name<'a>(&'a self, cpu: &'a str) -> &'a str {
        self.cpus.iter().find(|known| known.key == cpu).map_or(cpu, |known| &known.name)
    }

    /// One operation's cost; none for what the model does not know.
    pub fn cost(&self, operation: &str, cpu: &str) -> Cycles {
        self.costs.get(&(operation.to_owned(), cpu.to_owned())).copied().unwrap_or_default()
    }

    /// What so many instructions cost that are no operations of the model.
    pub fn plain(&self, instructions: f64) -> Cycles {
        let Ipc { low, taken, high } = self.ipc;
        Cycles { low: instructions / high, taken: instructions / taken, high: instructions / low }
    }

    /// What one operation of a workload costs: `None` when its operations were not counted.
    pub fn price(&self, figures: &Figures, cpu: &str) -> Option<Cycles> {
        if figures.host.is_empty() {
            return None;
        }
        let counted =
            KINDS.iter().filter_map(|kind| Some((kind.name(), figures.host(kind.name())?)));
        let (mut sum, mut operations) = (Cycles::default(), 0.0);
        for (name, count) in counted {
            sum = sum + self.cost(name, cpu) * count;
            operations += count;
        }
        Some(sum + self.plain((figures.median as f64 - operations).max(0.0)))
    }
}

impl From<Given> for Cycles {
    fn from(given: Given) -> Self {
        let (low, high) = match given {
            Given::One(cycles) => (cycles, cycles),
            Given::Range([low, high]) => (low, high),
        };
        Self { low, taken: f64::midpoint(low, high), high }
    }
}

impl Add for Cycles {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let Self { low, taken, high } = other;
        Self { low: self.low + low, taken: self.taken + taken, high: self.high + high }
    }
}

impl Sub for Cycles {
    type Output = Self;

    /// The ends of a difference: the same operation costs the same on both sides, so they are those of either side.
    fn sub(self, other: Self) -> Self {
        let Self { low, taken, high } = other;
        Self { low: self.low - low, taken: self.taken - taken, high: self.high - high }
    }
}

impl Mul<f64> for Cycles {
    type Output = Self;

    fn mul(self, by: f64) -> Self {
        Self { low: self.low * by, taken: self.taken * by, high: self.high * by }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        Model::read(&gannet_lab::Layout::find().unwrap().root).unwrap()
    }

    #[test]
    fn the_model_in_the_tree_is_complete_and_every_entry_has_a_source() {
        let model = model();
        let vmx = KINDS.into_iter().filter(|kind| kind.is_vmx()).count();
        let intel = model.cpus.iter().filter(|cpu| cpu.is_of(Machine::Intel)).count();
        let entries = (KINDS.len() - vmx) * model.cpus.len() + vmx * intel;
        assert_eq!(model.founded.iter().sum::<usize>(), entries);
        assert_eq!(model.cost("rdtsc", "zen2").taken, 37.0);
        assert_eq!(model.cost("vmresume", "skylake-sp").taken, 676.0);
    }

    #[test]
    fn an_entry_that_names_nothing_is_refused() {
        let text = include_str!("../../../lab/cost-model.toml");
        for (from, to) in [
            ("operation = \"rdmsr\"", "operation = \"rdmsrr\""),
            ("cpus = [\"skylake-sp\"]", "cpus = [\"sky\"]"),
            ("source = \"InstLatx64\"", "source = \"\""),
            ("kind = \"range\"", "kind = \"guess\""),
        ] {
            assert!(text.contains(from));
            assert!(Model::parse(&text.replacen(from, to, 1)).is_err(), "{to}");
        }
    }

    #[test]
    fn a_price_is_operations_and_plain_instructions() {
        let host = [("rdmsr".to_owned(), 2.0), ("cli".to_owned(), 0.01)];
        let figures = Figures { median: 302, host: host.into(), ..Figures::default() };
        let priced = model().price(&figures, "zen2").unwrap();
        assert_eq!(priced.taken, 2.0 * 80.0 + 300.0 / 1.5, "the stray CLI is no operation");
        assert!(priced.low < priced.taken && priced.taken < priced.high);
        assert!(model().price(&Figures::default(), "zen2").is_none(), "nothing was counted");
    }
}
