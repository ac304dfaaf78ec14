//! `make mechanisms`: every mechanism with its switch off and on, and stock KVM beside, on emulated machines; the results as JSON, and from
//! that alone a page and its plots. `FROM=file` writes page and plots anew from an earlier run's JSON.

mod chapters;
mod cost;
mod limits;
mod machines;
mod measure;
mod page;
mod plots;
mod published;
mod results;

use crate::bench::{self, write_whole};
use crate::options::Options;
use crate::{guest, module};
use anyhow::Result;
use cost::Model;
use gannet_lab::{KERNELS, Layout};
use limits::Verdict;
use page::Page;
use published::Published;
use results::Results;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

const JSON: &str = "mechanisms.json";
const PAGE: &str = "mechanisms.md";

/// Measures, or reads what was measured, and writes everything; whether every limit is met.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    let started = Instant::now();
    // What stands in the tree is of the default kernel.
    let folder = match options.kernel == KERNELS[0] {
        true => folder(&layout.root),
        false => layout.out.join(format!("mechanisms-{}", options.kernel)),
    };
    let results = match &options.from {
        Some(path) => Results::read(path)?,
        None => {
            let tools = bench::prepare(layout, options)?;
            module::build(layout, options.kernel)?;
            guest::build(layout, gannet_lab::guest::KERNEL)?;
            let results = measure::measure(layout, options, &tools, &machines::machines())?;
            let json = serde_json::to_string_pretty(&results)? + "\n";
            write_whole(options.json.as_deref().unwrap_or(&folder.join(JSON)), &json)?;
            results
        }
    };
    let written = documents(&layout.root, &results)?;
    for (name, text) in &written {
        write_whole(&folder.join(name), text)?;
        println!("{}", folder.join(name).display());
    }
    let well = print_limits(layout, &results)?;
    println!(
        "{} in {:.0} s",
        if well { "done" } else { "done, with limits that are not met or not measured" },
        started.elapsed().as_secs_f64()
    );
    Ok(well)
}

fn folder(root: &Path) -> PathBuf {
    root.join("docs/results")
}

/// The page and its plots, by the names of their files.
fn documents(root: &Path, results: &Results) -> Result<BTreeMap<String, String>> {
    let (model, published) = (Model::read(root)?, Published::read(root)?);
    let plots = plots::plots(results)?;
    let names = plots.keys().copied().collect();
    let page = Page { results, model: &model, published: &published, plots: names }.text();
    let plots = plots.into_iter().map(|(name, svg)| (name.to_owned(), svg));
    Ok(plots.chain([(PAGE.to_owned(), page)]).collect())
}

fn print_limits(layout: &Layout, results: &Results) -> Result<bool> {
    let (model, published) = (Model::read(&layout.root)?, Published::read(&layout.root)?);
    let mut well = true;
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
        for (name, text) in documents(&root, &Results::read(&json).unwrap()).unwrap() {
            let found = std::fs::read_to_string(folder.join(&name)).unwrap_or_default();
            assert!(found == text, "docs/results/{name}: make mechanisms FROM=docs/results/{JSON}");
        }
    }
}
