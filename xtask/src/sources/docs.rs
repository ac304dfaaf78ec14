//! Docs that say next to nothing: who meets an item alone, as an editor shows it, learns what it is from the first line.

use super::shown;
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// The fewest words of a doc comment.
const WORDS: usize = 3;

/// Crates whose docs are not there yet: fewer, please.
const LATER: [&str; 7] = ["vcpu", "backend", "svm", "vmx", "nested-svm", "nested-vmx", "cpu"];

/// The doc comments of every crate of the module that have too few words.
pub fn check(root: &Path, crates: &[PathBuf]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for folder in crates.iter().filter(|folder| folder.starts_with(root.join("crates"))) {
        if !LATER.iter().any(|later| folder.ends_with(later)) {
            look(root, &folder.join("src"), &mut findings)?;
        }
    }
    Ok(findings)
}

fn look(root: &Path, path: &Path, findings: &mut Vec<String>) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            look(root, &entry?.path(), findings)?;
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        let text = fs::read_to_string(path)?;
        let short = short(&text).into_iter();
        findings.extend(short.map(|(line, doc)| format!("{}:{line}: {doc}", shown(root, path))));
    }
    Ok(())
}

/// The doc comments of a text with too few words, by their first lines.
fn short(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut doc) = (Vec::new(), Vec::new());
    for (number, line) in (1..).zip(text.lines().chain([""])) {
        match line.trim_start().strip_prefix("///") {
            Some(words) => doc.extend(words.split_whitespace()),
            None => {
                if !doc.is_empty() && doc.len() < WORDS {
                    found.push((number - 1, doc.join(" ")));
                }
                doc.clear();
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_of_two_words_is_found_and_lines_of_one_comment_count_together() {
        let text =
            "/// The value.\nfn a() {}\n/// Two\n/// lines here.\nfn b() {}\n// Plain.\n/// INIT.";
        assert_eq!(short(text), [(1, "The value.".to_owned()), (7, "INIT.".to_owned())]);
    }
}
