//! The cost model: what counted operations cost in cycles on real processors, from `lab/cost-model.toml`. What it gives is always modelled,
//! never measured, and always a range with something taken in it.

use super::results::Figures;
use anyhow::{Context, Result, ensure};
use gannet_lab::Machine;
use gannet_lab::classify::KINDS;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::{Add, Mul};
use std::path::Path;

/// Cycles: the least, what is taken, the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(from = "Given")]
pub struct Cycles {
    pub low: f64,
    pub taken: f64,
    pub high: f64,
}

/// Cycles as a file has them; of a range the middle is taken.
#[derive(Deserialize)]
#[serde(untagged)]
enum Given {
    One(f64),
    Range([f64; 2]),
    All { low: f64, taken: f64, high: f64 },
}

impl From<Given> for Cycles {
    fn from(given: Given) -> Self {
        let (low, taken, high) = match given {
            Given::One(cycles) => (cycles, cycles, cycles),
            Given::Range([low, high]) => (low, f64::midpoint(low, high), high),
            Given::All { low, taken, high } => (low, taken, high),
        };
        Self { low, taken, high }
    }
}

/// A processor of the model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    pub key: String,
    pub name: String,
    vendor: String,
}

impl Cpu {
    /// Whether what is counted on this machine of the lab happens on such a processor.
    pub fn is_of(&self, machine: Machine) -> bool {
        self.vendor == machine.name()
    }
}

/// How well founded a cost is.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Measured,
    Derived,
    Range,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    operation: String,
    cpus: Vec<String>,
    cycles: Cycles,
    kind: Kind,
    source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    ipc: Cycles,
    cpu: Vec<Cpu>,
    cost: Vec<Entry>,
}

/// The whole model, complete: every kind of operation has a cost on every processor, but for those of VMX, which only Intel's execute.
#[derive(Debug)]
pub struct Model {
    ipc: Cycles,
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
        let File { ipc, cpu: cpus, cost } = toml::from_str(text)?;
        let mut model = Self { ipc, cpus, costs: BTreeMap::new(), founded: [0; 3] };
        for Entry { operation, cpus, cycles, kind, source } in cost {
            let counted = KINDS.iter().any(|known| known.name() == operation);
            ensure!(counted, "{operation}: the plugin does not count that");
            ensure!(!source.is_empty(), "{operation}: no source");
            for cpu in cpus {
                let known = model.cpus.iter().any(|known| known.key == cpu);
                ensure!(known, "{operation}: no such processor: {cpu}");
                model.founded[kind as usize] += 1;
                let before = model.costs.insert((operation.clone(), cpu.clone()), cycles);
                ensure!(before.is_none(), "{operation} on {cpu} stands there twice");
            }
        }
        for kind in KINDS {
            for cpu in model.cpus.iter().filter(|cpu| !kind.is_vmx() || cpu.is_of(Machine::Intel)) {
                let key = (kind.name().to_owned(), cpu.key.clone());
                ensure!(model.costs.contains_key(&key), "{key:?}: no cost");
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

    /// What one operation of a workload costs: `None` when its operations were not counted.
    pub fn price(&self, figures: &Figures, cpu: &str) -> Option<Cycles> {
        let (mut sum, mut operations) = (Cycles::default(), 0.0);
        for name in KINDS.iter().map(|kind| kind.name()) {
            let count = figures.host(name)?;
            sum = sum + self.cost(name, cpu) * count;
            operations += count;
        }
        let plain = (figures.median as f64 - operations).max(0.0);
        let Cycles { low, taken, high } = self.ipc;
        Some(sum + Cycles { low: plain / high, taken: plain / taken, high: plain / low })
    }
}

impl Add for Cycles {
    type Output = Self;

    fn add(self, Self { low, taken, high }: Self) -> Self {
        Self { low: self.low + low, taken: self.taken + taken, high: self.high + high }
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
