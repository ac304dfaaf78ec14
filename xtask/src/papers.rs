//! What the project's papers must be: links that lead somewhere, decisions listed in their order, a README of one screen or two.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    gannet_lab::Layout::find().unwrap().root
}

/// Every Markdown file of the checkout.
fn papers(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
            papers(&path, found);
        } else if path.extension().is_some_and(|suffix| suffix == "md") {
            found.push(path);
        }
    }
}

/// The targets of links, without those to the web.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://"))
}

/// The anchors of a text's headings, as the hosts of repositories make them.
fn anchors(text: &str) -> Vec<String> {
    let heading = |line: &str| {
        line.starts_with('#').then(|| line.trim_start_matches('#').trim().to_lowercase())
    };
    let anchor = |heading: String| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    text.lines().filter_map(heading).map(anchor).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut all = Vec::new();
    papers(&root(), &mut all);
    assert!(all.len() > 50);
    for paper in all {
        let text = std::fs::read_to_string(&paper).unwrap();
        for link in links(&text) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { paper.clone() } else { paper.with_file_name(file) };
            assert!(target.exists(), "{}: {link}", paper.display());
            if !anchor.is_empty() {
                let there = anchors(&std::fs::read_to_string(&target).unwrap());
                assert!(there.iter().any(|a| a == anchor), "{}: {link}", paper.display());
            }
        }
    }
}

#[test]
fn decisions_are_listed_in_their_order() {
    let folder = root().join("docs/adr");
    let names = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string());
    let mut names: Vec<String> = names.map(Result::unwrap).filter(|n| n != "README.md").collect();
    names.sort();
    let index = std::fs::read_to_string(folder.join("README.md")).unwrap();
    assert_eq!(links(&index).collect::<Vec<_>>(), names);
}

#[test]
fn the_readme_is_short() {
    let size = std::fs::metadata(root().join("README.md")).unwrap().len();
    assert!(size <= 6000, "{size} bytes: what is long belongs under docs/");
}
