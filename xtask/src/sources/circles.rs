//! Files of a crate that need each other in a ring: none can be read, changed or moved without the others.

use super::{arrows, modules, shown};
use anyhow::Result;
use arrows::Arrows;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Circles that are known, each by the folder of its sources and its files: shorter, please.
const KNOWN: &[(&str, &[&str])] = &[];

/// The circles of every crate that are not known, and those known that are gone.
pub fn check(root: &Path, crates: &[PathBuf]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    let mut met = BTreeSet::new();
    for src in crates.iter().map(|folder| folder.join("src")) {
        let arrows = arrows::of(&modules::read(&src)?);
        for circle in circles(&arrows) {
            let of_src = KNOWN.iter().position(|(known, files)| {
                src == root.join(known)
                    && circle.iter().all(|file| files.iter().any(|name| *file == src.join(name)))
            });
            match of_src {
                Some(known) => _ = met.insert(known),
                None => findings.push(describe(&shown(root, &src), &src, &circle, &arrows)),
            }
        }
    }
    let gone = KNOWN.iter().enumerate().filter(|(known, _)| !met.contains(known));
    findings.extend(gone.map(|(_, (src, files))| {
        format!("{src}: {} are no circle any more: take them out of KNOWN", files.join(", "))
    }));
    Ok(findings)
}

/// The sets of files of which each needs, by way of others, each.
fn circles(arrows: &Arrows) -> Vec<BTreeSet<PathBuf>> {
    let mut circles: Vec<BTreeSet<PathBuf>> = Vec::new();
    for file in arrows.keys() {
        if circles.iter().any(|circle| circle.contains(file)) {
            continue;
        }
        let needed = needed_by(arrows, file);
        if needed.contains(file) {
            let back = |other: &&PathBuf| needed_by(arrows, other).contains(file);
            circles.push(needed.iter().filter(back).cloned().collect());
        }
    }
    circles
}

/// The files that one needs, directly or by way of others.
fn needed_by(arrows: &Arrows, file: &PathBuf) -> BTreeSet<PathBuf> {
    let mut needed = BTreeSet::new();
    let mut ahead = vec![file];
    while let Some(file) = ahead.pop() {
        for next in arrows.get(file).into_iter().flat_map(|needs| needs.keys()) {
            if needed.insert(next.clone()) {
                ahead.push(next);
            }
        }
    }
    needed
}

fn describe(title: &str, src: &Path, circle: &BTreeSet<PathBuf>, arrows: &Arrows) -> String {
    let mut text = format!("{title}: a circle of {} files", circle.len());
    for file in circle {
        let needs = arrows.get(file).into_iter().flatten().filter(|(to, _)| circle.contains(*to));
        for (to, names) in needs {
            let names: Vec<_> = names.iter().map(String::as_str).take(3).collect();
            let (file, to) = (shown(src, file), shown(src, to));
            text += &format!("\n  {file} needs {to} for {}", names.join(", "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let here = std::thread::current().name().unwrap_or_default().replace("::", "-");
        let root = std::env::temp_dir().join(format!("gannet-{}-{here}", std::process::id()));
        for (name, text) in files {
            let path = root.join("src").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let found = check(&root, std::slice::from_ref(&root)).unwrap();
        fs::remove_dir_all(&root).unwrap();
        found.into_iter().filter(|text| text.starts_with("src:")).collect()
    }

    #[test]
    fn two_files_that_import_from_each_other_are_a_circle() {
        let found = found(&[
            ("lib.rs", "mod a; mod b; pub use a::A;"),
            ("a.rs", "use crate::b::{B, C}; pub struct A(B, C);"),
            ("b.rs", "pub struct C; pub struct B(Option<Box<super::a::A>>);"),
        ]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("a.rs needs b.rs for crate::b::B, crate::b::C"), "{}", found[0]);
        assert!(found[0].contains("b.rs needs a.rs for super::a::A"), "{}", found[0]);
    }

    #[test]
    fn what_a_root_hands_on_is_its_definers() {
        let found = found(&[
            ("lib.rs", "mod a; mod b; pub use a::A; pub use b::*; pub struct Root;"),
            ("a.rs", "use crate::{Root, B}; pub struct A(B, Root);"),
            ("b.rs", "pub struct B(Option<Box<crate::A>>);"),
        ]);
        assert_eq!(found.len(), 1);
        assert!(!found[0].contains("lib.rs"), "{}", found[0]);
    }

    #[test]
    fn a_module_with_its_own_and_tests_are_no_circle() {
        let found = found(&[
            ("lib.rs", "mod a; #[cfg(test)] mod tests; use a::A; pub struct Root(A);"),
            ("a/mod.rs", "mod inner; use inner::I; pub struct A(I); pub struct Part;"),
            (
                "a/inner.rs",
                "pub struct I(super::Part); #[cfg(test)] mod tests { use crate::Root; }",
            ),
        ]);
        assert_eq!(found, [""; 0]);
    }
}
