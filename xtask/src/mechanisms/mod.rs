//! `make mechanisms`: every mechanism with its switch off and on, and stock KVM beside, on each emulated machine or the one that is named;
//! the results as JSON, and from that alone a page and its plots. `FROM=file` writes page and plots anew from an earlier run's JSON.

mod basis;
mod cost;
mod limits;
mod measure;
mod page;
mod plan;
mod plots;
mod results;

use crate::bench;
use crate::options::Options;
use crate::report::write_whole;
use crate::{guest, module};
use anyhow::Result;
use basis::Page;
use gannet_lab::{KERNELS, Layout};
use measure::Place;
use plan::Papers;
use results::All;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

const JSON: &str = "mechanisms.json";
const PAGE: &str = "mechanisms.md";

/// Measures, or reads what was measured, and writes everything; whether every limit is met.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    let started = Instant::now();
    let folder = destination(layout, options);
    let papers = Papers::read(&layout.root)?;
    let all = match &options.from {
        Some(path) => All::read(path)?,
        None => {
            let mut places = Vec::new();
            for options in options.for_machines() {
                let tools = bench::prepare(layout, &options)?;
                let runs = papers.plan.runs(options.machine())?;
                places.push(Place { options, tools, runs });
            }
            module::build(layout, options.kernel)?;
            guest::build(layout, gannet_lab::guest::KERNEL)?;
            let all = measure::measure(layout, &places)?;
            let json = serde_json::to_string_pretty(&all)? + "\n";
            write_whole(options.json.as_deref().unwrap_or(&folder.join(JSON)), &json)?;
            all
        }
    };
    let (documents, well) = evaluate(&papers, &all)?;
    for (name, text) in &documents {
        write_whole(&folder.join(name), text)?;
        println!("{}", folder.join(name).display());
    }
    let end = if well { "done" } else { "done, with limits that are not met or not measured" };
    println!("{end} in {:.0} s", started.elapsed().as_secs_f64());
    Ok(well)
}

/// What stands in the tree is of the default kernel and of every machine; anything else goes elsewhere.
fn destination(layout: &Layout, options: &Options) -> PathBuf {
    let kernel = (options.kernel != KERNELS[0]).then(|| format!("-{}", options.kernel));
    let machine = options.machine_named().then(|| format!("-{}", options.machine().name()));
    match kernel.into_iter().chain(machine).collect::<String>().as_str() {
        "" => folder(&layout.root),
        other => layout.out.join(format!("mechanisms{other}")),
    }
}

fn folder(root: &Path) -> PathBuf {
    root.join("docs/results")
}

/// The page and its plots, by the names of their files. Prints the limits of each machine; whether all of them are met.
fn evaluate(papers: &Papers, all: &All) -> Result<(BTreeMap<String, String>, bool)> {
    let mut written = BTreeMap::new();
    for results in &all.machines {
        let toggle = papers.plan.word(results.machine(), "toggle").unwrap_or_default();
        written.extend(plots::plots(results, toggle)?);
    }
    let plots: Vec<String> = written.keys().cloned().collect();
    let mut text = page::head(papers)?;
    let mut well = !all.machines.is_empty();
    for results in &all.machines {
        let page = Page { papers, results, plots: &plots };
        text += &page.text()?;
        println!("machine {}:", results.machine);
        for (what, found, met) in limits::limits(&page) {
            println!("{:12}  {what}: {found}", limits::verdict(met));
            well &= met == Some(true);
        }
        for run in &results.runs {
            for remark in &run.remarks {
                println!("{} {}: {remark}", run.module, run.parameters);
                well = false;
            }
        }
    }
    written.insert(PAGE.to_owned(), text.trim_end().to_owned() + "\n");
    Ok((written, well))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_the_tree_is_what_its_json_gives() {
        let root = Layout::find().unwrap().root;
        let all = All::read(&folder(&root).join(JSON)).unwrap();
        for (name, text) in evaluate(&Papers::read(&root).unwrap(), &all).unwrap().0 {
            let found = std::fs::read_to_string(folder(&root).join(&name)).unwrap_or_default();
            assert!(found == text, "docs/results/{name}: make mechanisms FROM=docs/results/{JSON}");
        }
    }
}
