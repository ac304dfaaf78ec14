//! Dependencies that a crate declares and never names.

use super::{manifest, shown};
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// Where a crate's own code is, and where the code is for which `[dev-dependencies]` are there as well.
const CODE: [&str; 2] = ["src", "build.rs"];
const TESTS: [&str; 5] = ["src", "build.rs", "tests", "benches", "examples"];

/// The dependencies of every crate that it does not use.
pub fn check(root: &Path, crates: &[PathBuf]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for folder in crates {
        let manifest = manifest(folder)?;
        for (table, places) in [("dependencies", &CODE[..]), ("dev-dependencies", &TESTS[..])] {
            let mut text = String::new();
            for place in places {
                gather(&folder.join(place), &mut text)?;
            }
            let declared = declared(&manifest, table);
            let unused = declared.into_iter().filter(|name| !names(&text, &name.replace('-', "_")));
            findings.extend(unused.map(|name| {
                format!("{}/Cargo.toml: {name} of [{table}] is not used", shown(root, folder))
            }));
        }
    }
    Ok(findings)
}

/// The names in a table of dependencies, those for some targets alone included.
fn declared(manifest: &toml::Table, table: &str) -> Vec<String> {
    let of = |part: &toml::Table| {
        let names = part.get(table).and_then(toml::Value::as_table).map(|t| t.keys().cloned());
        names.into_iter().flatten().collect::<Vec<_>>()
    };
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    let targets = targets.into_iter().flat_map(|t| t.values()).filter_map(toml::Value::as_table);
    let mut declared = of(manifest);
    declared.extend(targets.flat_map(of));
    declared
}

/// Adds the Rust code of a file or a folder, comments left out.
fn gather(path: &Path, text: &mut String) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            gather(&entry?.path(), text)?;
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") && path.is_file() {
        for line in fs::read_to_string(path)?.lines() {
            text.push_str(line.split("//").next().unwrap_or_default());
            text.push('\n');
        }
    }
    Ok(())
}

/// Whether `text` has `name::`, or imports `name` as a whole.
fn names(text: &str, name: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(name).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + name.len()..]);
        let alone = !before.ends_with(is_word) && !after.starts_with(is_word);
        let imported = ["use ", "crate ", "use ::"].iter().any(|word| before.ends_with(word));
        alone && (after.trim_start().starts_with("::") || imported)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_counts_as_a_path_or_an_import() {
        assert!(names("fn f(x: a_b::C)", "a_b") && names("use a_b;", "a_b"));
        assert!(names("extern crate a_b;", "a_b"));
        assert!(!names("fn f(a_b: u8) {}", "a_b") && !names("xa_b::C", "a_b"));
    }

    #[test]
    fn dependencies_of_targets_count() {
        let manifest = "[dependencies]\na = '1'\n[target.'cfg(loom)'.dependencies]\nb-c = '1'";
        assert_eq!(declared(&manifest.parse().unwrap(), "dependencies"), ["a", "b-c"]);
        assert_eq!(declared(&manifest.parse().unwrap(), "dev-dependencies"), [""; 0]);
    }
}
