//! Builds `gannet.ko`: the Rust floors as a static library for a kernel target, linked into one object for all kernels, then Kbuild
//! over the C glue of `linux/` for each, in a folder under `target/lab`, so that the sources stay as they are. Where the kernel wants
//! KVM's names, `kvm.ko`, `kvm-amd.ko` and `kvm-intel.ko` are built instead.

use crate::check;
use crate::options::Options;
use crate::progress::Step;
use crate::tally::Tally;
use anyhow::{Context, Result, bail};
use gannet_lab::{Kernel, Layout};
use std::fs;
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// `make module`: builds and checks the module of one kernel.
pub fn command(layout: &Layout, options: &Options) -> Result<bool> {
    let kernel = options.kernel;
    let module = build(layout, kernel)?;
    let mut tally = Tally::default();
    check::run(layout, kernel, &mut tally);
    println!("{}", module.display());
    Ok(tally.finish())
}

/// Builds the module and returns its place.
pub fn build(layout: &Layout, kernel: Kernel) -> Result<PathBuf> {
    layout.ensure(&["toolchain".to_owned(), kernel.group()])?;
    let kbuild = layout.root.join("linux/Kbuild");
    if !kbuild.is_file() {
        bail!("gannet.ko cannot be built yet: there is no linux/Kbuild in this checkout");
    }
    let core = build_core(layout, kernel).context("gannet.ko does not build: its Rust part")?;
    let folder = layout.module_build(kernel);
    copy_sources(&layout.root.join("linux"), &folder)?;
    let step = Step::start(layout, &format!("linking gannet.ko for {kernel}"));
    let mut make = layout.tool("make");
    make.arg("-C").arg(layout.headers(kernel)).arg(format!("M={}", folder.display()));
    make.arg(format!("GANNET_CORE={}", core.display()));
    make.arg(format!("GANNET_NAME={}", if kernel.wants_kvms_names() { "kvm" } else { "gannet" }));
    make.args(kernel.build_settings());
    make.arg(concat!("GANNET_VERSION=", env!("CARGO_PKG_VERSION")));
    // The headers of 6.12 ask for pahole to add BTF, which nothing here reads.
    make.args(["PAHOLE=true", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]);
    follow(&mut make, &step).with_context(|| format!("gannet.ko does not build for {kernel}"))?;
    step.done();
    let module = layout.gannet_module(kernel);
    if !module.is_file() {
        bail!("the build of linux/ left no {}", module.display());
    }
    Ok(module)
}

/// Builds the Rust static library with `core` and `alloc` from source, and links it into one object: the same for all kernels but the
/// debug kernel, which is told of every access and lock.
pub fn build_core(layout: &Layout, kernel: Kernel) -> Result<PathBuf> {
    let debug = kernel == Kernel::Debug;
    let folder = if debug { "cargo-kernel-debug" } else { "cargo-kernel" };
    let mut cargo = layout.cargo(folder);
    cargo.args(["build", "--release", "--locked", "-p", "gannet-module"]);
    cargo.args(["--target", "x86_64-unknown-none", "--config", "linux/cargo-config.toml"]);
    if debug {
        cargo.args(["--config", "linux/cargo-config-debug.toml", "--features", "lockdep"]);
    }
    let step = Step::start(layout, "compiling the module's Rust");
    follow(&mut cargo, &step)?;
    let library = layout.out.join(folder).join("x86_64-unknown-none/release/libgannet_module.a");
    let (script, core) = (layout.root.join("linux/link-core.sh"), layout.core(kernel));
    // Cargo brings an older library back where a setting is what it was before: newer than it says nothing.
    let time = |path: &Path| path.metadata().and_then(|file| file.modified()).ok();
    let made_from =
        [&library, &script, &layout.root.join("linux/merge.lds")].map(|file| time(file));
    let (stamp, wanted) = (core.with_extension("from"), format!("{made_from:?}"));
    if !core.is_file() || fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
        fs::create_dir_all(core.parent().unwrap_or(&layout.out))?;
        let unfinished = core.with_extension("new");
        follow(layout.tool("sh").arg(&script).arg(&library).arg(&unfinished), &step)?;
        fs::rename(&unfinished, &core)?;
        fs::write(&stamp, wanted)?;
    }
    step.done();
    Ok(core)
}

/// Runs a command with its latest line beside the progress, and everything it said in the error when it fails.
pub fn follow(command: &mut Command, step: &Step) -> Result<()> {
    let shown = format!("{:?}", command.get_program());
    // Both streams into one pipe, so that the order stays.
    let (reader, writer) = std::io::pipe()?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .spawn()
        .with_context(|| format!("starting {shown}"))?;
    // The command still holds the pipe's writing ends; replace them, or reading would not end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut said = Vec::new();
    for line in BufReader::new(reader).lines() {
        let line = line?;
        step.say(&line);
        said.push(line);
    }
    let status = child.wait()?;
    if !status.success() {
        let marks = |l: &&String| !l.trim_start().starts_with("Compiling ");
        let text: Vec<&str> = said.iter().filter(marks).map(String::as_str).collect();
        let from = if std::io::stderr().is_terminal() { text.len().saturating_sub(80) } else { 0 };
        bail!("{shown} ended with {status}:\n{}", text[from..].join("\n"));
    }
    Ok(())
}

/// Copies what Kbuild reads, and only what has changed, so that nothing is compiled again without need. The Rust crate stays out.
pub fn copy_sources(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            if !source.join("Cargo.toml").exists() {
                copy_sources(&source, &target)?;
            }
            continue;
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        let wanted = matches!(name.as_str(), "Kbuild" | "Makefile")
            || matches!(source.extension().and_then(|e| e.to_str()), Some("c" | "h" | "S" | "lds"));
        if wanted && fs::read(&target).ok() != Some(fs::read(&source)?) {
            fs::copy(&source, &target)?;
        }
    }
    Ok(())
}
