//! Checks of the sources themselves: files of a crate that need each other in a ring, dependencies that a crate
//! declares and does not use, docs of a word or two, more C than there may be, and C that
//! lacks words whose lack no test can see.

mod arrows;
mod circles;
mod dependencies;
mod docs;
mod glue;
mod modules;
mod wording;

use crate::tally::Tally;
use anyhow::{Context as _, Result, anyhow};
use std::fs;
use std::path::{Path, PathBuf};

/// Runs the checks over every crate of the workspace at `root`.
pub fn run(root: &Path, tally: &mut Tally) {
    tally.record("no files of a crate need each other in a ring", judge(root, circles::check));
    tally.record("every declared dependency is used", judge(root, dependencies::check));
    tally.record("docs say what their object is", judge(root, docs::check));
    tally.record("the C is no longer than it may be", judge(root, glue::check));
    tally.record("the C glue says what no test can see", judge(root, wording::check));
}

fn judge(root: &Path, check: fn(&Path, &[PathBuf]) -> Result<Vec<String>>) -> Result<(), String> {
    let findings = members(root).and_then(|crates| check(root, &crates));
    match findings {
        Ok(findings) if findings.is_empty() => Ok(()),
        Ok(findings) => Err(findings.join("\n")),
        Err(error) => Err(format!("{error:#}")),
    }
}

/// The folders of the workspace's crates.
fn members(root: &Path) -> Result<Vec<PathBuf>> {
    let manifest = manifest(root)?;
    let patterns = manifest
        .get("workspace")
        .and_then(|workspace| workspace.get("members"))
        .and_then(toml::Value::as_array)
        .ok_or_else(|| anyhow!("Cargo.toml names no members"))?;
    let mut crates = Vec::new();
    for pattern in patterns.iter().filter_map(toml::Value::as_str) {
        match pattern.strip_suffix("/*") {
            Some(folder) => {
                for entry in fs::read_dir(root.join(folder))? {
                    crates.push(entry?.path());
                }
            }
            None => crates.push(root.join(pattern)),
        }
    }
    crates.retain(|folder| folder.join("Cargo.toml").is_file());
    crates.sort();
    Ok(crates)
}

/// The Cargo.toml of a folder.
fn manifest(folder: &Path) -> Result<toml::Table> {
    let path = folder.join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    text.parse().with_context(|| path.display().to_string())
}

/// A path as it is shown: from the workspace's root.
fn shown(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_passes() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        assert_eq!(judge(&root, circles::check), Ok(()));
        assert_eq!(judge(&root, dependencies::check), Ok(()));
        assert_eq!(judge(&root, docs::check), Ok(()));
        assert_eq!(judge(&root, glue::check), Ok(()));
        assert_eq!(judge(&root, wording::check), Ok(()));
    }

    #[test]
    fn the_workspace_is_found() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let crates = members(&root).unwrap();
        assert!(crates.contains(&root.join("xtask")) && crates.contains(&root.join("crates/x86")));
    }
}
