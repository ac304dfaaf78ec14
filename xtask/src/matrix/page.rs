//! The page of the matrix, in Markdown.

use super::Column;
use super::rows::{self, Row};
use std::collections::BTreeMap;
use std::fmt::Write;

const HEAD: &str = "\
# What is offered: machine × kernel × feature

Written by `make matrix`, whole; nothing here is by hand. Each emulated machine ([lab](../lab.md)) was booted with each of Debian's kernels, once on stock KVM and
once on Gannet, both without parameters, and `exitbench features` asked `/dev/kvm` there. That a module offers something does not say that it was tested: what was
stands in [README](README.md), what Gannet has not, and what happens instead, in [limits](../limits.md). An emulated CPU lacks what real ones have, for both modules.

A cell: `both`, `stock` or `Gannet` for who offers it, with its value if that is not 1; a value alone is that of both; – is nobody.
";

/// The whole page.
pub fn write(columns: &[Column]) -> String {
    let mut page = HEAD.to_owned();
    page += &uses(columns);
    let capabilities = rows::capabilities(columns);
    page += &section(
        columns,
        "Capabilities",
        "KVM_CHECK_EXTENSION of the device, by names without `KVM_CAP_`. DISABLE_QUIRKS2 and the like are masks of bits, in decimal.",
        &capabilities,
        Folded::AllAlike,
    );
    page += &section(
        columns,
        "Parameters",
        "What `/sys/module/*/parameters` has of the loaded modules, with the values that they chose themselves.",
        &rows::parameters(columns),
        Folded::AllAlike,
    );
    let about =
        "Bits, by leaf and subleaf as in the manuals, in which the modules differ on any machine.";
    page += &section(columns, "CPUID", about, &rows::cpuid(columns), Folded::NotDiffering);
    let about = "Bits in which the modules differ on any machine. `refused`: it is listed, and cannot be read.";
    page += &section(
        columns,
        "Feature MSRs",
        about,
        &rows::feature_msrs(columns),
        Folded::NotDiffering,
    );
    let about = "KVM_GET_MSR_INDEX_LIST: what a VMM saves and restores, where the modules differ on any machine.";
    page += &section(
        columns,
        "MSRs of a vCPU's state",
        about,
        &rows::msrs(columns),
        Folded::NotDiffering,
    );
    page
}

/// Which rows are told in a line below the table rather than in it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Folded {
    /// Those that say the same in every column.
    AllAlike,
    /// Those, and those in which the modules agree are counted alone.
    NotDiffering,
}

/// What Gannet says of itself when it is loaded; columns that say the same are together.
fn uses(columns: &[Column]) -> String {
    let mut page =
        "\n## What Gannet uses\n\nIn its own words, from the host's log at loading:\n\n".to_owned();
    let mut said: Vec<(&[String], Vec<String>)> = Vec::new();
    for column in columns {
        let name = format!("{} {}", column.machine, column.kernel);
        match said.iter_mut().find(|(log, _)| *log == column.gannet.log) {
            Some((_, names)) => names.push(name),
            None => said.push((&column.gannet.log, vec![name])),
        }
    }
    for (log, names) in said {
        let _ = writeln!(page, "- {}: `{}`", names.join(", "), log.join("`; `"));
    }
    page
}

fn section(columns: &[Column], title: &str, about: &str, rows: &[Row], fold: Folded) -> String {
    let mut page = format!("\n## {title}\n\n{about}\n");
    let agreed = rows.iter().filter(|row| !row.differs()).count();
    let told: Vec<&Row> =
        rows.iter().filter(|row| fold == Folded::AllAlike || row.differs()).collect();
    let (alike, own): (Vec<&Row>, Vec<&Row>) = told.into_iter().partition(|row| row.is_alike());
    if !own.is_empty() {
        page += &table(columns, &own);
    }
    let mut folded: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for row in alike {
        // What all agree on needs no value but the name, where it is only there or not.
        let text = row.cells.first().map_or("–", String::as_str);
        let (group, name) = match text.split_once(' ') {
            _ if text == "both" || text == "stock" || text == "Gannet" => (text, row.name.clone()),
            Some(("stock", value)) if !text.contains(',') => {
                ("stock", format!("{} {value}", row.name))
            }
            Some(("Gannet", value)) => ("Gannet", format!("{} {value}", row.name)),
            Some(_) => ("each its own", format!("{} ({text})", row.name)),
            None => ("both", format!("{} {text}", row.name)),
        };
        folded.entry(group).or_default().push(name);
    }
    for (group, names) in folded {
        let _ = writeln!(page, "\nAlike everywhere, {group}: {}.", names.join(", "));
    }
    if fold == Folded::NotDiffering {
        let _ = writeln!(page, "\nIn {agreed} others that any machine has both agree.");
    }
    page
}

fn table(columns: &[Column], rows: &[&Row]) -> String {
    let heads: Vec<String> =
        columns.iter().map(|column| format!("{} {}", column.machine, column.kernel)).collect();
    let mut table = format!("\n| | {} |\n|---|{}\n", heads.join(" | "), "---|".repeat(heads.len()));
    for row in rows {
        let _ = writeln!(table, "| {} | {} |", row.name, row.cells.join(" | "));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::Features;
    use super::*;

    fn offers(capabilities: &[(&str, i64)]) -> Features {
        let named = |(name, value): &(&str, i64)| (format!("KVM_CAP_{name}"), *value);
        Features { capabilities: capabilities.iter().map(named).collect(), ..Features::default() }
    }

    fn columns() -> Vec<Column> {
        let stock = offers(&[("HLT", 1), ("XEN_HVM", 1), ("NR_VCPUS", 710), ("SMM", 1)]);
        let old = offers(&[("HLT", 1), ("NR_VCPUS", 710)]);
        let new = offers(&[("HLT", 1), ("NR_VCPUS", 710), ("SMM", 1)]);
        let gannet = |log: &str, features| Features { log: vec![log.to_owned()], ..features };
        vec![
            Column {
                machine: "amd".into(),
                kernel: "6.1".into(),
                stock: stock.clone(),
                gannet: gannet("SVM with TDP", old),
            },
            Column {
                machine: "amd".into(),
                kernel: "6.12".into(),
                stock,
                gannet: gannet("SVM with TDP", new),
            },
        ]
    }

    #[test]
    fn a_row_that_differs_between_machines_is_in_the_table_and_others_are_folded() {
        let page = write(&columns());
        assert!(page.contains("| | amd 6.1 | amd 6.12 |\n|---|---|---|\n| SMM | stock | both |\n"));
        assert!(page.contains("\nAlike everywhere, both: HLT, NR_VCPUS 710.\n"));
        assert!(page.contains("\nAlike everywhere, stock: XEN_HVM.\n"));
        assert!(page.contains("- amd 6.1, amd 6.12: `SVM with TDP`\n"));
    }

    #[test]
    fn bits_in_which_the_modules_agree_are_counted_alone() {
        let mut columns = columns();
        columns[0].stock.cpuid.insert("0x00000001.0.ecx".into(), "0x00000003".into());
        columns[0].gannet.cpuid.insert("0x00000001.0.ecx".into(), "0x00000001".into());
        let page = write(&columns);
        assert!(page.contains("| CPUID.1.0:ECX[01] | stock | – |"));
        assert!(!page.contains("ECX[00]") && page.contains("In 1 others that any machine has"));
    }
}
