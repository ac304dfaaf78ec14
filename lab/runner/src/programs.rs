//! Builds programs of this workspace so that they run in a machine that has no libraries: statically linked.

use crate::{Emulator, Layout, Machine};
use anyhow::{Result, bail};
use std::io::IsTerminal;
use std::path::PathBuf;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds a package's programs and returns the folder that holds them.
pub fn build_static(layout: &Layout, package: &str) -> Result<PathBuf> {
    let folder = "cargo-static";
    let status = layout
        .cargo(folder)
        .args(["build", "--release", "--locked", "--bins", "--target", TARGET, "-p", package])
        .args(quiet(package))
        .env("RUSTFLAGS", "-Ctarget-feature=+crt-static")
        // The release profile is made for the module; a program of the lab is better built quickly.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        .status()?;
    if !status.success() {
        bail!("{package} does not build (see above)");
    }
    Ok(layout.out.join(folder).join(TARGET).join("release"))
}

/// On a terminal cargo shows its own progress; elsewhere one line says what is being built.
fn quiet(what: &str) -> Option<&'static str> {
    if std::io::stderr().is_terminal() {
        return None;
    }
    eprintln!("building {what} …");
    Some("--quiet")
}

/// Builds the plugin of a machine's emulator that counts instructions.
pub fn build_plugin(layout: &Layout, machine: Machine) -> Result<PathBuf> {
    let folder = "cargo-plugin";
    let (package, library) = match machine.emulator() {
        Emulator::Qemu => ("gannet-lab-plugin", "libgannet_lab_plugin.so"),
        Emulator::Bochs => ("gannet-lab-bochs-plugin", "libgannet_lab_bochs_plugin.so"),
    };
    let status = layout
        .cargo(folder)
        .args(["build", "--release", "--locked", "-p", package])
        .args(quiet("the emulator's plugin"))
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .status()?;
    if !status.success() {
        bail!("the emulator's plugin does not build (see above)");
    }
    Ok(layout.out.join(folder).join("release").join(library))
}
