//! The rows of the matrix: a name, and for each column what either module offers.

use super::names::named;
use super::{Column, Features};
use std::collections::{BTreeMap, BTreeSet};

/// A name with the cells of all columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub name: String,
    pub cells: Vec<String>,
}

impl Row {
    /// Whether every column says the same.
    pub fn is_alike(&self) -> bool {
        self.cells.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// Whether the modules differ anywhere.
    pub fn differs(&self) -> bool {
        self.cells.iter().any(|cell| cell.contains("stock") || cell.contains("Gannet"))
    }
}

/// What a cell says of two modules. The value of what is only there or not is 1, and is left out.
pub fn cell(stock: Option<&str>, gannet: Option<&str>) -> String {
    let only = |who: &str, value: &str| match value {
        "1" => who.to_owned(),
        other => format!("{who} {other}"),
    };
    match (stock, gannet) {
        (None, None) => "–".to_owned(),
        (Some("1"), Some("1")) => "both".to_owned(),
        (Some(stock), Some(gannet)) if stock == gannet => stock.to_owned(),
        (Some(stock), None) => only("stock", stock),
        (None, Some(gannet)) => only("Gannet", gannet),
        (Some(stock), Some(gannet)) => format!("stock {stock}, Gannet {gannet}"),
    }
}

/// A row for each name that any module has in any column.
fn rows(columns: &[Column], facts: impl Fn(&Features) -> BTreeMap<String, String>) -> Vec<Row> {
    let found: Vec<_> =
        columns.iter().map(|column| (facts(&column.stock), facts(&column.gannet))).collect();
    let all = found.iter().flat_map(|(stock, gannet)| stock.keys().chain(gannet.keys()));
    let names: BTreeSet<String> = all.cloned().collect();
    let row = |name: String| {
        let cells = found.iter().map(|(stock, gannet)| {
            cell(stock.get(&name).map(String::as_str), gannet.get(&name).map(String::as_str))
        });
        Row { cells: cells.collect(), name }
    };
    names.into_iter().map(row).collect()
}

/// Without the prefix that all have.
pub fn capabilities(columns: &[Column]) -> Vec<Row> {
    rows(columns, |features| {
        let one = |(name, value): (&String, &i64)| {
            (name.trim_start_matches("KVM_CAP_").to_owned(), value.to_string())
        };
        features.capabilities.iter().map(one).collect()
    })
}

/// By the parameter's own name: which of the modules has it differs.
pub fn parameters(columns: &[Column]) -> Vec<Row> {
    rows(columns, |features| {
        let one = |(name, value): (&String, &String)| {
            (name.rsplit('.').next().unwrap_or(name).to_owned(), value.clone())
        };
        features.parameters.iter().map(one).collect()
    })
}

/// Each bit of CPUID's features that is set, and the registers that are sizes and numbers as a whole.
pub fn cpuid(columns: &[Column]) -> Vec<Row> {
    rows(columns, |features| {
        let one = |(place, value): (&String, &String)| {
            let place = leaf(place);
            if is_of_bits(&place) { bits(&place, value) } else { vec![(place, value.clone())] }
        };
        features.cpuid.iter().flat_map(one).collect()
    })
}

/// Whether each bit of the register stands for a feature of its own.
fn is_of_bits(leaf: &str) -> bool {
    const WHOLE: [&str; 2] = ["CPUID.7.0:EAX", "CPUID.80000021.0:EBX"];
    const BITS: [&str; 12] = [
        "CPUID.1.0:ECX",
        "CPUID.1.0:EDX",
        "CPUID.6.0:EAX",
        "CPUID.7.",
        "CPUID.D.1:EAX",
        "CPUID.40000001.0:EAX",
        "CPUID.80000001.0:ECX",
        "CPUID.80000001.0:EDX",
        "CPUID.80000007.0:EDX",
        "CPUID.80000008.0:EBX",
        "CPUID.8000000A.0:EDX",
        "CPUID.80000021.0:E",
    ];
    !WHOLE.contains(&leaf) && BITS.iter().any(|start| leaf.starts_with(start))
}

/// Each bit of the feature MSRs that is set; one that cannot be read is told as such.
pub fn feature_msrs(columns: &[Column]) -> Vec<Row> {
    rows(columns, |features| {
        let one = |(index, value): (&String, &String)| match value.as_str() {
            "refused" => vec![(format!("{} refused", msr(index)), "1".to_owned())],
            value => bits(&msr(index), value),
        };
        features.feature_msrs.iter().flat_map(one).collect()
    })
}

/// The MSRs of a vCPU's state.
pub fn msrs(columns: &[Column]) -> Vec<Row> {
    rows(columns, |features| {
        features.msrs.iter().map(|index| (named(&msr(index)), "1".to_owned())).collect()
    })
}

/// `0x00000007.1.eax` as manuals write it: `CPUID.7.1:EAX`.
fn leaf(place: &str) -> String {
    let mut parts = place.split('.');
    let mut part = || parts.next().unwrap_or_default();
    let (function, index, register) = (part(), part(), part());
    let function = u32::from_str_radix(function.trim_start_matches("0x"), 16).unwrap_or(0);
    format!("CPUID.{function:X}.{index}:{}", register.to_uppercase())
}

fn msr(index: &str) -> String {
    let number = u32::from_str_radix(index.trim_start_matches("0x"), 16).unwrap_or(0);
    format!("MSR {number:X}")
}

fn bits(place: &str, value: &str) -> Vec<(String, String)> {
    let value = u64::from_str_radix(value.trim_start_matches("0x"), 16).unwrap_or(0);
    let set = (0..64).filter(|bit| value >> bit & 1 != 0);
    set.map(|bit| (named(&format!("{place}[{bit:02}]")), "1".to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_says_who_offers_what() {
        assert_eq!(cell(Some("1"), Some("1")), "both");
        assert_eq!(cell(Some("1"), None), "stock");
        assert_eq!(cell(None, Some("1")), "Gannet");
        assert_eq!(cell(None, None), "–");
        assert_eq!(cell(Some("Y"), Some("Y")), "Y");
        assert_eq!(cell(Some("15"), Some("3")), "stock 15, Gannet 3");
        assert_eq!(cell(None, Some("3")), "Gannet 3");
    }

    #[test]
    fn names_are_those_of_the_manuals() {
        assert_eq!(leaf("0x00000007.1.eax"), "CPUID.7.1:EAX");
        assert_eq!(leaf("0x80000001.0.ecx"), "CPUID.80000001.0:ECX");
        assert_eq!(msr("0x0000048b"), "MSR 48B");
    }

    #[test]
    fn registers_of_features_are_told_by_bits_and_others_whole() {
        assert!(is_of_bits("CPUID.7.1:EDX") && is_of_bits("CPUID.80000021.0:ECX"));
        assert!(!is_of_bits("CPUID.7.0:EAX") && !is_of_bits("CPUID.80000005.0:EAX"));
        let mut column = Column {
            machine: "amd".into(),
            kernel: "6.1".into(),
            stock: Features::default(),
            gannet: Features::default(),
        };
        column.gannet.cpuid.insert("0x80000008.0.eax".into(), "0x00283030".into());
        column.stock.cpuid.insert("0x80000008.0.eax".into(), "0x00003030".into());
        let rows = cpuid(&[column]);
        let cells = vec!["stock 0x00003030, Gannet 0x00283030".to_owned()];
        assert_eq!(rows, [Row { name: "CPUID.80000008.0:EAX".into(), cells }]);
    }

    #[test]
    fn a_bit_that_is_set_has_a_name() {
        let one = |bit: &str| (bit.to_owned(), "1".to_owned());
        assert_eq!(bits("X", "0x8000000000000005"), ["X[00]", "X[02]", "X[63]"].map(one));
    }

    #[test]
    fn modules_name_the_same_parameter_in_modules_of_different_names() {
        let with = |name: &str| Features {
            parameters: BTreeMap::from([(name.to_owned(), "Y".to_owned())]),
            ..Features::default()
        };
        let column = Column {
            machine: "amd".into(),
            kernel: "6.12".into(),
            stock: with("kvm_amd.npt"),
            gannet: with("gannet.npt"),
        };
        let rows = parameters(&[column]);
        assert_eq!(rows, [Row { name: "npt".into(), cells: vec!["Y".into()] }]);
        assert!(rows[0].is_alike() && !rows[0].differs());
    }
}
