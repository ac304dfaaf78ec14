//! Every place in the sources that indexes by a number that was converted for it, `table[n as usize]` or
//! `table.get(usize::from(n))`, is listed with the reason why a guest or a VMM does not choose that
//! number. What they choose is a [`host::GuestIndex`], which is masked (ADR 39). A new place fails here
//! until it is one or the other.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const LIST: &str = include_str!("indices.list");

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let for_tests = name.contains("test") || name.starts_with("model") || name == "std_port";
        if for_tests || name == "target" {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

/// Whether the text in these brackets is a converted number, and no range.
fn is_converted(index: &str) -> bool {
    (index.contains("as usize") || index.contains("usize::from(")) && !index.contains("..")
}

/// What stands between an opening bracket and its closing one, at each place where `open` stands.
fn arguments<'a>(line: &'a str, open: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for (at, _) in line.match_indices(open) {
        let rest = &line[at + open.len()..];
        let mut depth = 1;
        for (end, byte) in rest.bytes().enumerate() {
            match byte {
                b'(' | b'[' => depth += 1,
                b')' | b']' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                found.push(&rest[..end]);
                break;
            }
        }
    }
    found
}

/// The lines of a source that index by a converted number.
fn places(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    let mut found = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        let gets = arguments(line, ".get(").into_iter().chain(arguments(line, ".get_mut("));
        // An array's type or value is no index: an index follows a name or a closing bracket.
        let indexed = arguments(line, "[").into_iter().filter(|index| {
            let at = index.as_ptr().addr() - line.as_ptr().addr();
            at >= 2 && {
                let before = line.as_bytes()[at - 2];
                before.is_ascii_alphanumeric() || matches!(before, b'_' | b')' | b']')
            }
        });
        if gets.chain(indexed).any(is_converted) {
            found.push(line.to_string());
        }
    }
    found
}

#[test]
fn every_index_is_masked_or_listed_with_its_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut found = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let name = file.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        for place in places(&text) {
            found.insert(format!("{name} | {place}"));
        }
    }
    let mut listed = BTreeSet::new();
    for line in LIST.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let mut parts = line.rsplitn(2, " | ");
        let (reason, place) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        assert!(!reason.is_empty() && !place.is_empty(), "no reason: {line}");
        listed.insert(place.to_string());
    }
    let new: Vec<_> = found.difference(&listed).collect();
    assert!(new.is_empty(), "indices that are neither masked nor listed:\n{}", join(&new));
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(gone.is_empty(), "listed, but not there any more:\n{}", join(&gone));
}

fn join(lines: &[&String]) -> String {
    lines.iter().map(|line| line.as_str()).collect::<Vec<_>>().join("\n")
}

#[test]
fn planted_indices_are_found() {
    let planted = "let a = table.get(gsi as usize);\n\
                   let b = &self.pins[usize::from(pin)];\n\
                   let c = vcpus.get_mut((id >> 4) as usize)?;\n";
    assert_eq!(places(planted).len(), 3);
    let harmless = "let a = [0; N as usize];\n\
                    let b = GuestIndex::from(gsi).of(&table);\n\
                    // table[gsi as usize]\n\
                    let c = bytes.get(..usize::from(len));\n\
                    let d = table.get(at);\n\
                    #[cfg(test)]\nmod tests { fn f() { t[gsi as usize]; } }";
    assert_eq!(places(harmless), Vec::<String>::new());
}
