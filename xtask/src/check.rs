//! Checks of a linked `gannet.ko`, run as tests: what the module loader accepts, what the kernel's mitigations need, and the bounds
//! that the design sets.

use crate::disassembly::{Image, Line};
use crate::switch_check;
use crate::symbols::{allowed, exported};
use crate::tally::Tally;
use gannet_lab::{Kernel, Layout, MACHINES};
use iced_x86::{Mnemonic, OpKind, Register};
use object::elf;
use std::collections::{BTreeMap, BTreeSet};

/// What `apply_relocate_add` of both kernels handles.
const RELOCATIONS: [u32; 7] = [
    elf::R_X86_64_NONE,
    elf::R_X86_64_64,
    elf::R_X86_64_32,
    elf::R_X86_64_32S,
    elf::R_X86_64_PC32,
    elf::R_X86_64_PLT32,
    elf::R_X86_64_PC64,
];
const TEXT_LIMIT: u64 = 13 << 17; // 1.625 MiB
const FRAME_LIMIT: u64 = 1024;

/// Runs every check over the built modules of one kernel.
pub fn run(layout: &Layout, kernel: Kernel, tally: &mut Tally) {
    let file = layout.gannet_module(kernel);
    let image = match Image::read(&file) {
        Ok(image) => image,
        Err(error) => return tally.record(&name(kernel, "is readable"), Err(format!("{error:#}"))),
    };
    let checks: [(&str, Result<(), String>); 16] = [
        ("holds the one Rust object", core(layout, kernel, &image)),
        ("has vendors' modules that take no more than they may", vendors(layout, kernel)),
        ("has only relocations the loader accepts", relocations(&image)),
        ("uses no x87, MMX or SSE", vectors(&image)),
        ("imports only allowed and exported symbols", symbols(layout, kernel, &image, "kvm")),
        ("leaves every return to the kernel's thunk", returns(&image)),
        ("leaves every indirect branch to a thunk", indirect_branches(&image)),
        ("keeps stack frames under 1 KiB", frames(&image)),
        ("keeps its text under 1.625 MiB", text_size(&image)),
        ("documents every parameter", parameters(&image)),
        ("keeps its Rust code where no probe can be", probes(&image)),
        ("empties buffers at the kernel's word, as stock KVM does", buffers(layout, kernel)),
        ("has no access of per-CPU data in its Rust code", per_cpu_data(&image)),
        ("has none in SVM's world switch", switch_check::uses_no_per_cpu_data(layout, kernel)),
        (
            "has in SVM's world switch what stock KVM has against leaks",
            switch_check::does_what_stock_does(layout, kernel),
        ),
        (
            "has the IBPB behind exits that the kernel may choose",
            switch_check::has_the_ibpb(layout, kernel),
        ),
    ];
    for (title, result) in checks {
        tally.record(&name(kernel, title), result);
    }
}

fn name(kernel: Kernel, title: &str) -> String {
    let file = if kernel.wants_kvms_names() { "kvm.ko" } else { "gannet.ko" };
    format!("{file} for {kernel} {title}")
}

/// Fails with the first findings and their number.
fn none_of(mut findings: Vec<String>) -> Result<(), String> {
    if findings.is_empty() {
        return Ok(());
    }
    let count = findings.len();
    findings.truncate(12);
    if count > findings.len() {
        findings.push(format!("… {count} in all"));
    }
    Err(findings.join("\n"))
}

fn relocations(image: &Image) -> Result<(), String> {
    let bad = image.relocations.iter().filter(|r| !RELOCATIONS.contains(&r.kind));
    none_of(bad.map(|r| format!("type {} to {} in {}", r.kind, r.symbol, r.section)).collect())
}

fn vectors(image: &Image) -> Result<(), String> {
    let bad = image.lines.iter().filter(|l| l.touches_vector_or_x87());
    none_of(bad.map(|l| format!("{} in {}", l.instruction, image.locate(l))).collect())
}

fn read(path: std::path::PathBuf) -> Result<String, String> {
    std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
}

/// What `modinfo` calls the module's Rust is that of the one object that was linked for all kernels.
fn core(layout: &Layout, kernel: Kernel, image: &Image) -> Result<(), String> {
    let output = std::process::Command::new("sha256sum").arg(layout.core(kernel)).output();
    let output = output.map_err(|e| format!("sha256sum: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let wanted = text.split_whitespace().next().unwrap_or_default();
    let told = image.modinfo.iter().find_map(|m| m.strip_prefix("gannet_core="));
    if told == Some(wanted) { Ok(()) } else { Err(format!("{told:?} is not {wanted}")) }
}

/// VERW waits for the features that it waits for in the stock modules of the same kernel.
fn buffers(layout: &Layout, kernel: Kernel) -> Result<(), String> {
    let words = |path: std::path::PathBuf| {
        crate::alternatives::verw(&path).map_err(|error| format!("{error:#}"))
    };
    let mut stock = BTreeSet::new();
    for machine in MACHINES {
        stock.extend(words(layout.stock_module(kernel, machine.stock_module()))?);
    }
    let own = words(layout.gannet_module(kernel))?;
    let same = own == stock && !own.is_empty();
    if same { Ok(()) } else { Err(format!("features {own:#x?}, stock KVM {stock:#x?}")) }
}

/// The modules beside the one with the Rust: what they import, and their parameters.
fn vendors(layout: &Layout, kernel: Kernel) -> Result<(), String> {
    for machine in MACHINES {
        for (name, file) in layout.gannet_modules(kernel, machine).iter().skip(1) {
            let image = Image::read(file).map_err(|error| format!("{error:#}"))?;
            let own = name.rsplit('/').next().unwrap_or_default();
            symbols(layout, kernel, &image, own).map_err(|why| format!("{own}: {why}"))?;
            parameters(&image).map_err(|why| format!("{own}: {why}"))?;
        }
    }
    Ok(())
}

/// `own`: what the module is called, where the kernel asks.
fn symbols(layout: &Layout, kernel: Kernel, image: &Image, own: &str) -> Result<(), String> {
    let list = read(layout.root.join("lab/allowed-symbols.txt"))?;
    let allowed = allowed(&list, kernel);
    let symvers = read(layout.headers(kernel).join("Module.symvers"))?;
    let exported = exported(&symvers);
    none_of(
        image
            .undefined
            .iter()
            .filter_map(|symbol| {
                let symbol = symbol.as_str();
                // What the vendor's module has of ours.
                let constants = symbol.starts_with("gnt_constant_");
                let parameters = matches!(
                    symbol,
                    "gnt_l1d_ops" | "gnt_use_ops" | "gnt_use_number_ops" | "gnt_bool_number_ops"
                );
                let ours = matches!(symbol, "gnt_start" | "gnt_stop") || parameters || constants;
                if ours && own != "kvm" {
                    return None;
                }
                if !allowed.contains(symbol) {
                    return Some(format!("{symbol} is not in lab/allowed-symbols.txt"));
                }
                match exported.get(symbol) {
                    None => Some(format!("{symbol} is not exported by the kernel")),
                    Some(Some(names)) if !names.split(',').any(|name| name == own) => {
                        Some(format!("{symbol} is exported to {names} alone"))
                    }
                    Some(_) => None,
                }
            })
            .collect(),
    )
}

/// Whether a function is Rust's, by its name.
fn is_rust(name: &str) -> bool {
    name.contains("::")
}

/// A probe is an exception, and in the loop of SVM the GS base is the guest's.
fn probes(image: &Image) -> Result<(), String> {
    const NOT_PROBED: &str = ".noinstr.text";
    let rust: Vec<_> = image.functions_of().filter(|(name, _)| is_rust(name)).collect();
    if rust.is_empty() {
        return Err("there is no Rust function".to_owned());
    }
    let bad = rust.into_iter().filter(|(_, section)| *section != NOT_PROBED);
    none_of(bad.map(|(name, section)| format!("{name} is in {section}")).collect())
}

fn per_cpu_data(image: &Image) -> Result<(), String> {
    let bad = image.lines.iter().filter(|line| {
        let instruction = &line.instruction;
        let memory = (0..instruction.op_count()).any(|n| instruction.op_kind(n) == OpKind::Memory);
        memory && instruction.memory_segment() == Register::GS
    });
    let bad = bad.filter(|line| image.function(line).is_some_and(is_rust));
    none_of(bad.map(|l| format!("{} in {}", l.instruction, image.locate(l))).collect())
}

fn returns(image: &Image) -> Result<(), String> {
    let judge = |line: &Line| {
        if line.is_return() {
            Some(format!("bare return in {}", image.locate(line)))
        } else if line.branches_to("__x86_return_thunk")
            && !image.return_sites.contains(&line.place)
        {
            Some(format!("return that the kernel cannot patch in {}", image.locate(line)))
        } else {
            None
        }
    };
    none_of(image.lines.iter().filter_map(judge).collect())
}

fn indirect_branches(image: &Image) -> Result<(), String> {
    let judge = |line: &Line| {
        // The kernel replaces calls through its paravirt table by direct ones before the module runs.
        let paravirt = line.symbol.as_deref() == Some("pv_ops");
        if line.is_indirect_branch() && !paravirt {
            Some(format!("{} in {}", line.instruction, image.locate(line)))
        } else if line.branches_to("__x86_indirect_thunk_")
            && !image.retpoline_sites.contains(&line.place)
        {
            Some(format!("thunk that the kernel cannot patch in {}", image.locate(line)))
        } else {
            None
        }
    };
    none_of(image.lines.iter().filter_map(judge).collect())
}

/// The largest frame of each function: what it subtracts from the stack pointer, and its pushes before that.
fn frames(image: &Image) -> Result<(), String> {
    let mut pushes: BTreeMap<usize, u64> = BTreeMap::new();
    let mut largest: BTreeMap<usize, u64> = BTreeMap::new();
    for line in &image.lines {
        let Some(function) = line.function else { continue };
        if line.instruction.mnemonic() == Mnemonic::Push && !largest.contains_key(&function) {
            *pushes.entry(function).or_default() += 8;
        }
        let by = line.lowers_stack_by();
        if by > 0 {
            let frame = by + pushes.get(&function).copied().unwrap_or(0);
            let known = largest.entry(function).or_default();
            *known = frame.max(*known);
        }
    }
    let bad = largest.iter().filter(|(_, frame)| **frame >= FRAME_LIMIT);
    none_of(bad.map(|(f, frame)| format!("{frame} bytes in {}", image.functions[*f])).collect())
}

fn text_size(image: &Image) -> Result<(), String> {
    if image.text_bytes < TEXT_LIMIT { Ok(()) } else { Err(format!("{} bytes", image.text_bytes)) }
}

/// Every `parmtype=NAME:TYPE` has its `parm=NAME:TEXT`, which `modinfo` shows.
fn parameters(image: &Image) -> Result<(), String> {
    let names = |key: &str| -> BTreeSet<String> {
        let values = image.modinfo.iter().filter_map(|m| m.strip_prefix(key));
        values.filter_map(|v| Some(v.split_once(':')?.0.to_owned())).collect()
    };
    let described = names("parm=");
    none_of(names("parmtype=").into_iter().filter(|n| !described.contains(n)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stock module is a known good module of the same kernel, and KVM's instruction emulator a known user of SSE and x87.
    #[test]
    fn the_stock_module_passes_where_it_must_and_fails_where_it_must() {
        let layout = Layout::find().unwrap();
        for kernel in gannet_lab::KERNELS {
            let file = layout.stock_module(kernel, "kvm");
            if !file.exists() {
                eprintln!("kernel {kernel} is not set up: not checked");
                continue;
            }
            let image = Image::read(&file).unwrap();
            assert_eq!(relocations(&image), Ok(()));
            assert_eq!(returns(&image), Ok(()));
            assert_eq!(indirect_branches(&image), Ok(()));
            assert!(vectors(&image).is_err());
            let vector = |l: &&Line| l.touches_vector_or_x87();
            let found: Vec<String> =
                image.lines.iter().filter(vector).map(|l| l.instruction.to_string()).collect();
            assert!(found.iter().any(|l| l.contains("xmm")) && found.iter().any(|l| l == "fninit"));
            assert!(image.lines.iter().any(|l| l.branches_to("__x86_return_thunk")));
            assert!(image.modinfo.iter().any(|m| m == "license=GPL"));
        }
    }
}
