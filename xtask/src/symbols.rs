//! What the modules take from a kernel, held against what it exports: as a check of those that were built, and as `make symbols` of a
//! kernel that Gannet was never built for.

use crate::options::Options;
use anyhow::{Context, Result};
use gannet_lab::{KERNELS, Kernel, Layout};
use std::collections::{BTreeMap, BTreeSet};

/// What a `Module.symvers` says is exported, and to which modules alone, if so.
pub fn exported(symvers: &str) -> BTreeMap<&str, Option<&str>> {
    let row = |line| {
        let mut fields = str::split(line, '\t');
        let symbol = fields.nth(1)?;
        Some((symbol, fields.nth(2).and_then(|to| to.strip_prefix("module:"))))
    };
    symvers.lines().filter_map(row).collect()
}

/// The symbols of `lab/allowed-symbols.txt` for one kernel: a line is a symbol, or a symbol and the series it is for.
pub fn allowed(list: &str, kernel: Kernel) -> BTreeSet<&str> {
    list.lines()
        .filter_map(|line| {
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let symbol = words.next()?;
            let mut series = words.peekable();
            let every = series.peek().is_none();
            (every || series.any(|series| series == kernel.series())).then_some(symbol)
        })
        .collect()
}

/// `make symbols`: what of that which the newest kernel's modules take is gone from a kernel, or restricted there. Whether nothing is
/// gone.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    let file = match &options.symvers {
        Some(file) => file.clone(),
        None => {
            layout.ensure(&[options.kernel.group()])?;
            layout.headers(options.kernel).join("Module.symvers")
        }
    };
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let list = std::fs::read_to_string(layout.root.join("lab/allowed-symbols.txt"))?;
    let (lines, gone) = compare(&list, &text);
    for line in lines {
        println!("{line}");
    }
    Ok(gone == 0)
}

/// The lines of the answer, and how many symbols are gone.
fn compare(list: &str, symvers: &str) -> (Vec<String>, usize) {
    let newest = KERNELS.into_iter().max().unwrap_or(KERNELS[0]);
    let (taken, exported) = (allowed(list, newest), exported(symvers));
    let (mut gone, mut restricted) = (Vec::new(), Vec::new());
    for symbol in &taken {
        match exported.get(symbol) {
            None => gone.push(format!("gone        {symbol:<36}{}", near(symbol, &exported))),
            Some(Some(names)) => restricted.push(format!("restricted  {symbol:<36}to {names}")),
            Some(None) => {}
        }
    }
    let count = gone.len();
    let sum = format!(
        "{} symbols that {newest} is asked for: {count} gone, {} restricted",
        taken.len(),
        restricted.len()
    );
    gone.append(&mut restricted);
    gone.push(sum);
    (gone, count)
}

/// Exports that may have taken the place of one: those that begin like it.
fn near(symbol: &str, exported: &BTreeMap<&str, Option<&str>>) -> String {
    let core = symbol.trim_start_matches('_');
    let mut begin = core;
    while begin.len() > 3 {
        let found = exported.keys().filter(|name| name.trim_start_matches('_').starts_with(begin));
        let found: Vec<&str> = found.take(5).copied().collect();
        if !found.is_empty() {
            return format!("perhaps {}", found.join(", "));
        }
        begin = begin.rsplit_once('_').map_or("", |(head, _)| head);
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYMVERS: &str = "0x0\tkfree\tvmlinux\tEXPORT_SYMBOL\t\n\
                           0x0\tcr4\tvmlinux\tEXPORT_SYMBOL_GPL\tmodule:kvm,kvm-amd\n\
                           0x0\tktime_get_snapshot_id\tvmlinux\tEXPORT_SYMBOL_GPL\t\n\
                           0x0\tfoo\tfs/foo\tEXPORT_SYMBOL_GPL\tFOO\n";

    #[test]
    fn the_list_of_symbols_knows_series_and_comments() {
        let list = "# all\nkfree\nmmu_notifier 6.12 7.3 # renamed\n\n__kmalloc 6.1\n";
        let of = |kernel| allowed(list, kernel).into_iter().collect::<Vec<_>>();
        assert_eq!(of(Kernel::V6_12), ["kfree", "mmu_notifier"]);
        assert_eq!(of(Kernel::V7_3), of(Kernel::V6_12));
        assert_eq!(of(Kernel::V6_1), ["__kmalloc", "kfree"]);
    }

    #[test]
    fn an_export_to_named_modules_is_told_from_one_to_all() {
        let exported = exported(SYMVERS);
        assert_eq!(exported.get("kfree"), Some(&None));
        assert_eq!(exported.get("cr4"), Some(&Some("kvm,kvm-amd")));
        assert_eq!(exported.get("foo"), Some(&None));
        assert_eq!(exported.get("bar"), None);
    }

    #[test]
    fn what_is_gone_comes_with_what_may_have_taken_its_place() {
        let list = "kfree\ncr4\nktime_get_snapshot\n__kmalloc 6.1\nno_such\n";
        let (lines, gone) = compare(list, SYMVERS);
        assert_eq!(gone, 2);
        assert!(lines[0].starts_with("gone        ktime_get_snapshot "));
        assert!(lines[0].ends_with("perhaps ktime_get_snapshot_id"));
        assert_eq!(lines[1].trim_end(), "gone        no_such");
        assert!(lines[2].starts_with("restricted  cr4") && lines[2].ends_with("to kvm,kvm-amd"));
        assert_eq!(lines[3], "4 symbols that 7.3 is asked for: 2 gone, 1 restricted");
    }
}
