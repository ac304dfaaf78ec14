//! `make mechanisms`: every mechanism with its switch off and on, and stock KVM beside, on each emulated machine or the one that is named;
//! the results as JSON, and from that alone a page and its plots. `FROM=file` writes page and plots anew from an earlier run's JSON.

mod cost;
mod limits;
mod measure;
mod page;
mod plan;
mod plots;
mod results;

use crate::options::Options;
use crate::report::write_whole;
use anyhow::{Context, Result, bail};
use gannet_lab::{KERNELS, Layout, MACHINES};
use plan::Papers;
use results::All;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Where what stands in the tree is.
const FOLDER: &str = "docs/results";
const JSON: &str = "mechanisms.json";

/// Measures, or reads what was measured, and writes everything; whether every limit is met.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    if !MACHINES.contains(&options.machine()) {
        bail!("MACHINE={}: the mechanisms have limits on amd and intel", options.machine().name());
    }
    let started = Instant::now();
    let folder = destination(layout, options);
    let papers = Arc::new(Papers::read()?);
    let all = match &options.from {
        Some(path) => All::read(path)?,
        None => {
            let all = measure::measure(layout, &papers.plan, options)?;
            let json = serde_json::to_string_pretty(&all)? + "\n";
            write_whole(options.json.as_deref().unwrap_or(&folder.join(JSON)), &json)?;
            all
        }
    };
    let (documents, well) = evaluate(&papers, all)?;
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
        "" => layout.root.join(FOLDER),
        other => layout.out.join(format!("mechanisms{other}")),
    }
}

/// The page and its plots, by the names of their files. Prints the limits of each machine; whether all of them are met.
fn evaluate(papers: &Arc<Papers>, all: All) -> Result<(BTreeMap<String, String>, bool)> {
    let (mut written, mut text, mut well) = (BTreeMap::new(), String::new(), true);
    for results in all.machines {
        let limits = limits::limits(papers, &results);
        println!("machine {}:", results.machine);
        for (what, found, met) in &limits {
            println!("{:12}  {what}: {found}", limits::verdict(*met));
            well &= *met == Some(true);
        }
        for run in &results.runs {
            for remark in &run.remarks {
                println!("{} {}: {remark}", run.module, run.parameters);
                well = false;
            }
        }
        let toggle = papers.plan.words(&results.machine)?.get("toggle").context("no toggle")?;
        let plots = plots::plots(&results, toggle)?;
        text += &page::text(papers, &Arc::new(results), &limits, &plots, text.is_empty())?;
        written.extend(plots);
    }
    well &= !text.is_empty();
    written.insert("mechanisms.md".to_owned(), text.trim_end().to_owned() + "\n");
    Ok((written, well))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plan::tests::papers;

    #[test]
    fn the_page_in_the_tree_is_what_its_json_gives() {
        let folder = Layout::find().unwrap().root.join(FOLDER);
        let all = All::read(&folder.join(JSON)).unwrap();
        for (name, text) in evaluate(&Arc::new(papers()), all).unwrap().0 {
            let found = std::fs::read_to_string(folder.join(&name)).unwrap_or_default();
            assert!(found == text, "docs/results/{name}: make mechanisms FROM=docs/results/{JSON}");
        }
    }
}
