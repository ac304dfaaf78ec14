//! What the project's papers must be: links that lead somewhere, decisions listed in their order, a README of one screen or two.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    gannet_lab::Layout::find().unwrap().root
}

/// Every file of the checkout.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name());
        if !path.is_dir() {
            found.push(path);
        } else if name != "target" && !name.to_string_lossy().starts_with('.') {
            files(&path, found);
        }
    }
}

/// Every Markdown file of the checkout.
fn papers() -> Vec<PathBuf> {
    let mut all = Vec::new();
    files(&root(), &mut all);
    all.retain(|file| file.extension().is_some_and(|suffix| suffix == "md"));
    assert!(all.len() > 50);
    all
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
    for paper in papers() {
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

/// Whether a word in backticks names a file or folder from the root on, or a source file by the end of its path.
fn names_a_file(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let top = word
        .split_once('/')
        .is_some_and(|(top, _)| !["", "target"].contains(&top) && root().join(top).is_dir());
    let source = [".rs", ".S", ".c", ".h", ".toml", ".sh", ".list", ".in"];
    word.chars().all(plain)
        && (top || source.iter().any(|end| word.len() > 2 && word.ends_with(end)))
}

#[test]
fn every_file_that_is_named_exists() {
    let mut all = Vec::new();
    files(&root(), &mut all);
    for paper in papers().iter().filter(|paper| !paper.ends_with("CHANGELOG.md")) {
        let text = std::fs::read_to_string(paper).unwrap();
        for word in text.split('`').skip(1).step_by(2).filter(|word| names_a_file(word)) {
            let there = root().join(word).exists() || all.iter().any(|file| file.ends_with(word));
            assert!(there, "{}: `{word}`", paper.display());
        }
    }
}

#[test]
fn the_walks_name_functions_that_exist() {
    let text = std::fs::read_to_string(root().join("docs/walks.md")).unwrap();
    let mut steps = 0;
    for line in text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", number, what, file, ""] = cells[..] else { continue };
        if number.parse::<u32>().is_ok() {
            let folder = if file.starts_with("linux/") { root() } else { root().join("crates") };
            let name = what.split('`').nth(1).and_then(|path| path.rsplit("::").next()).unwrap();
            let code = std::fs::read_to_string(folder.join(file)).unwrap();
            let there = code.contains(&format!("fn {name}"))
                || file.ends_with(".c") && code.contains(&format!(" {name}("));
            assert!(there, "docs/walks.md: {what} is not in {file}");
            steps += 1;
        }
    }
    assert!(steps > 60);
}

/// The floors of the crates: rows of the table in ARCHITECTURE.md. `backend` stands beside them.
fn floors(text: &str) -> Vec<(&str, Option<u32>)> {
    let mut floors = Vec::new();
    for line in text.lines() {
        let mut cells = line.split('|').skip(1).map(str::trim);
        let (floor, crates) = (cells.next().unwrap_or(""), cells.next().unwrap_or(""));
        let names = crates.split('`').filter_map(|name| name.strip_prefix("crates/"));
        floors.extend(names.map(|name| (name, floor.parse().ok())));
    }
    floors
}

#[test]
fn no_crate_needs_a_floor_above_it() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let floors = floors(&text);
    let of = |name: &str| floors.iter().find(|(known, _)| *known == name).map(|(_, floor)| *floor);
    for entry in std::fs::read_dir(root().join("crates")).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        let own = of(&name).unwrap_or_else(|| panic!("ARCHITECTURE.md has no floor for {name}"));
        let manifest = std::fs::read_to_string(entry.path().join("Cargo.toml")).unwrap();
        let manifest: toml::Table = manifest.parse().unwrap();
        for (needed, _) in manifest["dependencies"].as_table().unwrap_or(&toml::Table::new()) {
            let needed = needed.strip_prefix("gannet-").unwrap_or(needed);
            let Some(floor) = of(needed) else { continue };
            let above = own.zip(floor).is_some_and(|(own, floor)| floor > own);
            assert!(!above, "{name} needs {needed}, which is above it");
            assert!(name != "backend" || needed == "x86", "backend needs {needed}");
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
    // Two tables of results: AMD CPUs with NRIP save and without differ too much for one.
    assert!(size <= 7000, "{size} bytes: what is long belongs under docs/");
}
