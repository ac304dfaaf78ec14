//! `make mechanisms`: every mechanism with its switch off and on, and stock KVM beside, on each emulated machine or the one that is named;
//! the results as JSON, and from that alone a page and its plots. `FROM=file` writes page and plots anew from an earlier run's JSON.

mod chapters;
mod cost;
mod limits;
mod machines;
mod measure;
mod page;
mod plots;
mod published;
mod results;

use crate::bench;
use crate::options::Options;
use crate::report::write_whole;
use crate::{guest, module};
use anyhow::Result;
use cost::Model;
use gannet_lab::{KERNELS, Layout};
use limits::Verdict;
use measure::Place;
use page::Page;
use published::Published;
use results::{All, Results};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

const JSON: &str = "mechanisms.json";
const PAGE: &str = "mechanisms.md";

/// Measures, or reads what was measured, and writes everything; whether every limit is met.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    let started = Instant::now();
    let folder = destination(layout, options);
    let all = match &options.from {
        Some(path) => All::read(path)?,
        None => {
            let mut places = Vec::new();
            for options in options.for_machines() {
                let tools = bench::prepare(layout, &options)?;
                let machines = machines::machines(options.machine());
                places.push(Place { options, tools, machines });
            }
            module::build(layout, options.kernel)?;
            guest::build(layout, gannet_lab::guest::KERNEL)?;
            let all = measure::measure(layout, &places)?;
            let json = serde_json::to_string_pretty(&all)? + "\n";
            write_whole(options.json.as_deref().unwrap_or(&folder.join(JSON)), &json)?;
            all
        }
    };
    let written = documents(&layout.root, &all)?;
    for (name, text) in &written {
        write_whole(&folder.join(name), text)?;
        println!("{}", folder.join(name).display());
    }
    let mut well = !all.machines.is_empty();
    for results in &all.machines {
        well &= print_limits(layout, results)?;
    }
    println!(
        "{} in {:.0} s",
        if well { "done" } else { "done, with limits that are not met or not measured" },
        started.elapsed().as_secs_f64()
    );
    Ok(well)
}

/// What stands in the tree is of the default kernel and of every machine; anything else goes elsewhere.
fn destination(layout: &Layout, options: &Options) -> PathBuf {
    let mut name = "mechanisms".to_owned();
    if options.kernel != KERNELS[0] {
        let _ = write!(name, "-{}", options.kernel);
    }
    if options.machine_named() {
        let _ = write!(name, "-{}", options.machine().name());
    }
    if name == "mechanisms" { folder(&layout.root) } else { layout.out.join(name) }
}

fn folder(root: &Path) -> PathBuf {
    root.join("docs/results")
}

/// The page and its plots, by the names of their files.
fn documents(root: &Path, all: &All) -> Result<BTreeMap<String, String>> {
    let (model, published) = (Model::read(root)?, Published::read(root)?);
    let mut written = BTreeMap::new();
    for results in &all.machines {
        written.extend(plots::plots(results)?);
    }
    let plots: Vec<String> = written.keys().cloned().collect();
    let mut page = page::head(&model);
    for results in &all.machines {
        page += &Page { results, model: &model, published: &published, plots: &plots }.text();
    }
    page.truncate(page.trim_end().len());
    written.insert(PAGE.to_owned(), page + "\n");
    Ok(written)
}

fn print_limits(layout: &Layout, results: &Results) -> Result<bool> {
    let (model, published) = (Model::read(&layout.root)?, Published::read(&layout.root)?);
    let mut well = true;
    println!("machine {}:", results.machine);
    for limit in limits::limits(results, &model, &published) {
        let verdict = match limit.verdict {
            Verdict::Met => "met         ",
            Verdict::NotMet => "NOT MET     ",
            Verdict::Open => "not measured",
        };
        well &= limit.verdict == Verdict::Met;
        println!("{verdict}  {}: {}", limit.what, limit.found);
    }
    for run in &results.runs {
        for remark in &run.remarks {
            println!("{} {}: {remark}", run.module, run.parameters);
            well = false;
        }
    }
    Ok(well)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_the_tree_is_what_its_json_gives() {
        let root = Layout::find().unwrap().root;
        let folder = folder(&root);
        let json = folder.join(JSON);
        if !json.is_file() {
            assert!(!folder.join(PAGE).exists(), "a page without the results it was made from");
            return;
        }
        for (name, text) in documents(&root, &All::read(&json).unwrap()).unwrap() {
            let found = std::fs::read_to_string(folder.join(&name)).unwrap_or_default();
            assert!(found == text, "docs/results/{name}: make mechanisms FROM=docs/results/{JSON}");
        }
    }
}
