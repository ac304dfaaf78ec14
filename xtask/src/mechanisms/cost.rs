//! The cost model: what counted operations cost in cycles on real processors, from `lab/cost-model.toml`. What it gives is always modelled,
//! never measured, and always a range with something taken in it.

use super::results::Figures;
use anyhow::{Result, ensure};
use gannet_lab::Machine;
use gannet_lab::classify::KINDS;
use serde::{Deserialize, Deserializer, Serialize, de::Error};

/// Cycles: the least, what is taken, the most.
pub type Cycles = [f64; 3];

/// Cycles as a file has them, `[figure]` or `[low, high]`; of a range the middle is taken.
fn cycles<'de, D: Deserializer<'de>>(file: D) -> Result<Cycles, D::Error> {
    match Vec::deserialize(file)?[..] {
        [one] => Ok([one; 3]),
        [low, high] => Ok([low, f64::midpoint(low, high), high]),
        _ => Err(D::Error::custom("cycles are [figure] or [low, high]")),
    }
}

/// A processor of the model.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    key: String,
    name: String,
    vendor: String,
}

/// How well founded a cost is.
const FOUNDED: [&str; 3] = ["measured", "derived", "range"];

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    operation: String,
    cpus: Vec<String>,
    #[serde(deserialize_with = "cycles")]
    cycles: Cycles,
    kind: String,
    source: String,
}

/// The whole model, complete: every kind of operation has a cost on every processor, but for those of VMX, which only Intel's execute.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    ipc: Cycles,
    #[serde(rename = "cpu")]
    pub cpus: Vec<Cpu>,
    #[serde(rename = "cost")]
    entries: Vec<Entry>,
}

impl Model {
    /// Whether it is complete, every entry names what there is, and none stands there twice.
    pub fn check(&self) -> Result<()> {
        let (mut wanted, mut found) = (Vec::new(), Vec::new());
        for Cpu { key, vendor, .. } in &self.cpus {
            let own = KINDS.iter().filter(|kind| !kind.is_vmx() || vendor == Machine::Intel.name());
            wanted.extend(own.map(|kind| (kind.name(), &**key)));
        }
        for Entry { operation, cpus, source, kind, .. } in &self.entries {
            ensure!(!source.is_empty() && FOUNDED.contains(&&**kind), "{operation}: source, kind");
            found.extend(cpus.iter().map(|cpu| (&**operation, &**cpu)));
        }
        wanted.sort_unstable();
        found.sort_unstable();
        let differs = found.iter().zip(&wanted).find(|(found, wanted)| found != wanted);
        ensure!(found == wanted, "cost model: too much or too little at {differs:?}");
        Ok(())
    }

    /// A figure of a workload or a task by its name ([`Figures::get`]), or what it costs on a processor: `cycles.zen2`.
    pub fn value(&self, figures: &Figures, name: &str) -> Option<Cycles> {
        match name.strip_prefix("cycles.") {
            Some(cpu) => self.price(figures, cpu),
            None => Some([figures.get(name)?; 3]),
        }
    }

    /// One operation's cost; none for what the model does not know.
    fn cost(&self, operation: &str, cpu: &str) -> Cycles {
        let mut of = self.entries.iter().filter(|entry| entry.operation == operation);
        of.find(|entry| entry.cpus.iter().any(|c| c == cpu)).map_or([0.0; 3], |entry| entry.cycles)
    }

    /// What one operation of a workload costs: `None` when its operations were not counted.
    fn price(&self, figures: &Figures, cpu: &str) -> Option<Cycles> {
        let (mut sum, mut plain) = ([0.0; 3], figures.get("median")?);
        for name in KINDS.iter().map(|kind| kind.name()) {
            let count = figures.get(&format!("host.{name}"))?;
            let cost = self.cost(name, cpu);
            sum = std::array::from_fn(|end| sum[end] + cost[end] * count);
            plain -= count;
        }
        // The more instructions per cycle, the fewer cycles.
        Some(std::array::from_fn(|end| sum[end] + plain.max(0.0) / self.ipc[2 - end]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = include_str!("../../../lab/cost-model.toml");

    fn model(text: &str) -> Result<Model> {
        let model: Model = toml::from_str(text)?;
        model.check().map(|()| model)
    }

    #[test]
    fn the_model_in_the_tree_is_complete_and_an_entry_that_names_nothing_is_refused() {
        let model = model(TEXT).unwrap();
        assert_eq!(model.cost("rdtsc", "zen2")[1], 37.0);
        assert_eq!(model.cost("vmresume", "skylake-sp")[1], 676.0);
        for (from, to) in [
            ("operation = \"rdmsr\"", "operation = \"rdmsrr\""),
            ("cpus = [\"skylake-sp\"]", "cpus = [\"sky\"]"),
            ("source = \"InstLatx64\"", "source = \"\""),
            ("kind = \"range\"", "kind = \"guess\""),
        ] {
            assert!(TEXT.contains(from));
            assert!(self::model(&TEXT.replacen(from, to, 1)).is_err(), "{to}");
        }
    }

    #[test]
    fn a_price_is_operations_and_plain_instructions() {
        let host = [("rdmsr".to_owned(), 2.0), ("cli".to_owned(), 0.01)].into();
        let ticks = [("median".to_owned(), 302)].into();
        let figures = Figures { ticks, host, ..Figures::default() };
        let [low, taken, high] = model(TEXT).unwrap().price(&figures, "zen2").unwrap();
        assert_eq!(taken, 2.0 * 80.0 + 300.0 / 1.5, "the stray CLI is no operation");
        assert!(low < taken && taken < high);
        assert!(model(TEXT).unwrap().price(&Figures::default(), "zen2").is_none());
    }
}
