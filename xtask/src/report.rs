//! Figures of both modules side by side: the JSON of `make bench` and the table of `make run`.

use anyhow::{Context, Result};
use comfy_table::{Attribute, Cell, CellAlignment, Color, ContentArrangement, Table};
use gannet_lab::Module;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::Path;

/// One workload on one module.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    pub min: u64,
    pub median: u64,
    pub max: u64,
    /// Per operation of the workload, by kind of instruction, in all of the machine: host and guest.
    pub ops: BTreeMap<String, f64>,
}

impl Figures {
    /// Of one sample.
    pub fn of(median: u64) -> Self {
        Self { min: median, median, max: median, ops: BTreeMap::new() }
    }
}

/// One module's figures.
#[derive(Debug, Default)]
pub struct Side {
    pub workloads: Vec<(String, Result<Figures, String>)>,
    /// Lines of the host's log that tell of a fault.
    pub faults: Vec<String>,
    pub remarks: Vec<String>,
}

/// One workload on both modules.
#[derive(Debug, Serialize)]
pub struct Row {
    pub name: String,
    pub stock: Option<Figures>,
    pub gannet: Option<Figures>,
    /// Gannet's median over stock's.
    pub ratio: Option<f64>,
    /// Why figures are missing.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub missing: BTreeMap<&'static str, String>,
}

/// A measurement of both modules.
#[derive(Debug, Serialize)]
pub struct Comparison {
    pub machine: String,
    pub kernel: String,
    pub unit: String,
    pub workloads: Vec<Row>,
    #[serde(skip)]
    remarks: Vec<String>,
    #[serde(skip)]
    measured: Vec<Module>,
}

/// What the table shows of the operations, in this order.
const SHOWN: [&str; 22] = [
    "vmrun",
    "vmload",
    "vmsave",
    "stgi",
    "clgi",
    "vmlaunch",
    "vmresume",
    "vmread",
    "vmwrite",
    "vmptrld",
    "vmclear",
    "invept",
    "invvpid",
    "rdmsr",
    "wrmsr",
    "cpuid",
    "mov_from_cr",
    "mov_to_cr",
    "mov_to_cr3",
    "xgetbv",
    "xsetbv",
    "locked",
];

impl Comparison {
    /// An empty one.
    pub fn new(machine: &str, kernel: &str) -> Self {
        Self {
            machine: machine.to_owned(),
            kernel: kernel.to_owned(),
            unit: String::new(),
            workloads: Vec::new(),
            remarks: Vec::new(),
            measured: Vec::new(),
        }
    }

    /// Adds one module's figures.
    pub fn add(&mut self, module: Module, side: &Side) {
        self.measured.push(module);
        for text in &side.remarks {
            self.remarks.push(format!("{}: {text}", module.name()));
        }
        for line in &side.faults {
            self.remarks.push(format!("{}: the host's log has: {line}", module.name()));
        }
        for (name, result) in &side.workloads {
            let known = self.workloads.iter().position(|row| row.name == *name);
            let at = known.unwrap_or_else(|| {
                let (name, missing) = (name.clone(), BTreeMap::new());
                self.workloads.push(Row { name, stock: None, gannet: None, ratio: None, missing });
                self.workloads.len() - 1
            });
            let row = &mut self.workloads[at];
            match result {
                Ok(figures) if module == Module::Gannet => row.gannet = Some(figures.clone()),
                Ok(figures) => row.stock = Some(figures.clone()),
                Err(reason) => drop(row.missing.insert(module.name(), reason.clone())),
            }
            if let (Some(stock), Some(gannet)) = (&row.stock, &row.gannet) {
                let ratio = gannet.median as f64 / stock.median.max(1) as f64;
                row.ratio = Some((ratio * 1000.0).round() / 1000.0);
            }
        }
    }

    /// Notes that a module could not be measured at all.
    pub fn not_measured(&mut self, module: Module, error: &anyhow::Error) {
        self.remarks.push(format!("{}: not measured: {error:#}", module.name()));
    }

    /// Writes the JSON.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_whole(path, &(serde_json::to_string_pretty(self)? + "\n"))
    }

    /// The table, in colour when standard output is a terminal.
    pub fn table(&self) -> Table {
        let unit = self.unit.as_str();
        let title = |text: &str| Cell::new(text).add_attribute(Attribute::Bold);
        let mut table = new_table();
        table.set_header(vec![
            title("VM exit"),
            title(&format!("stock KVM\n{unit}")),
            title(&format!("Gannet\n{unit}")),
            title("ratio"),
            title("privileged operations each, stock KVM"),
            title("privileged operations each, Gannet"),
        ]);
        for row in &self.workloads {
            let median = |side: &Option<Figures>, module: Module| match side {
                Some(figures) => number(figures.median),
                None => Cell::new(self.reason(row, module)).fg(Color::DarkGrey),
            };
            let ops = |side: &Option<Figures>| {
                Cell::new(side.as_ref().map_or(String::new(), |f| shown_ops(&f.ops)))
            };
            table.add_row(vec![
                Cell::new(&row.name),
                median(&row.stock, Module::Stock).set_alignment(CellAlignment::Right),
                median(&row.gannet, Module::Gannet).set_alignment(CellAlignment::Right),
                ratio(row.ratio).set_alignment(CellAlignment::Right),
                ops(&row.stock),
                ops(&row.gannet),
            ]);
        }
        table
    }

    fn reason(&self, row: &Row, module: Module) -> &'static str {
        match row.missing.get(module.name()) {
            Some(reason) if reason.starts_with("skipped") => "skipped",
            Some(_) => "failed",
            None if self.measured.contains(&module) => "",
            None => "none",
        }
    }

    /// Prints why figures are missing and what the host's log complained of. Whether all is well.
    pub fn print_remarks(&self) -> bool {
        for row in &self.workloads {
            for (module, reason) in &row.missing {
                println!("{} on {module}: {reason}", row.name);
            }
        }
        for remark in &self.remarks {
            println!("{remark}");
        }
        let failed = |row: &Row| row.missing.values().any(|r| !r.starts_with("skipped"));
        self.remarks.is_empty()
            && self.measured.contains(&Module::Gannet)
            && !self.workloads.iter().any(failed)
    }
}

/// A table in the house's style.
pub fn new_table() -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    let terminal = std::io::stdout().is_terminal();
    // Some terminals do not tell their width, or tell 0.
    if !terminal || table.width().is_none_or(|width| width < 60) {
        table.set_width(140);
    }
    if terminal && std::env::var_os("NO_COLOR").is_none() {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table
}

/// A whole number with thin groups of three.
pub fn number(value: u64) -> Cell {
    let digits = value.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    Cell::new(text)
}

/// A ratio: green where Gannet is well below stock, yellow where it is not above, red where it is.
pub fn ratio(value: Option<f64>) -> Cell {
    let Some(value) = value else { return Cell::new("") };
    let colour = match value {
        v if v <= 0.6 => Color::Green,
        v if v <= 1.0 => Color::Yellow,
        _ => Color::Red,
    };
    Cell::new(format!("{value:.2}×")).fg(colour)
}

fn shown_ops(ops: &BTreeMap<String, f64>) -> String {
    let part = |name: &&str| {
        let count = *ops.get(*name)?;
        // A stray timer tick of the host in a hundred iterations is not an operation of the exit.
        (count >= 0.05).then(|| match count.fract() == 0.0 {
            true => format!("{count:.0} {name}"),
            false => format!("{count:.1} {name}"),
        })
    };
    SHOWN.iter().filter_map(part).collect::<Vec<_>>().join(", ")
}

/// Writes a file by way of a temporary one, so that a reader never sees half of it.
pub fn write_whole(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, text).with_context(|| format!("writing {}", path.display()))?;
    std::fs::rename(&temporary, path).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(median: u64) -> Side {
        let ops = BTreeMap::from([("vmrun".to_owned(), 1.0), ("rdmsr".to_owned(), 0.01)]);
        let figures = Figures { min: 1, median, max: 9, ops };
        Side { workloads: vec![("cpuid".to_owned(), Ok(figures))], ..Side::default() }
    }

    #[test]
    fn the_ratio_is_gannets_median_over_stocks() {
        let mut both = Comparison::new("amd", "6.12");
        both.add(Module::Stock, &side(2000));
        both.add(Module::Gannet, &side(300));
        let json = serde_json::to_value(&both).unwrap();
        assert_eq!(json["workloads"][0]["ratio"], 0.15);
        assert_eq!(json["workloads"][0]["gannet"]["median"], 300);
        assert_eq!(json["workloads"][0]["stock"]["ops"]["vmrun"], 1.0);
        assert!(both.print_remarks());
    }

    #[test]
    fn one_module_alone_is_shown_and_not_well() {
        let mut one = Comparison::new("amd", "6.12");
        one.add(Module::Stock, &side(2000));
        assert!(!one.print_remarks());
        let text = one.table().to_string();
        assert!(text.contains("none") && text.contains("1 vmrun"), "{text}");
        assert!(!text.contains("rdmsr"), "a stray one is not shown: {text}");
    }
}
