//! `make deb`: the Debian package that has DKMS build Gannet for each installed kernel.

use crate::{module, progress::Step};
use anyhow::{Context, Result};
use gannet_lab::{Kernel, Layout};
use std::process::Stdio;

/// Builds the package, has lintian look at it where there is one, and prints the file. Whether lintian found nothing.
pub fn command(layout: &Layout) -> Result<bool> {
    layout.ensure(&["toolchain"])?;
    let core = module::build_core(layout, Kernel::V6_12)?;
    let version = env!("CARGO_PKG_VERSION");
    let package = layout.out.join(format!("gannet-dkms_{version}_amd64.deb"));
    let step = Step::start(layout, "packing the Debian package");
    let mut script = layout.tool("sh");
    script.arg(layout.root.join("linux/debian/build.sh")).arg(version).arg(&core).arg(&package);
    module::follow(&mut script, &step).context("the package does not build")?;
    step.done();
    println!("{}", package.display());
    let there = layout.tool("lintian").arg("--version").stdout(Stdio::null()).status();
    if !there.is_ok_and(|status| status.success()) {
        eprintln!("lintian is not installed: not checked");
        return Ok(true);
    }
    let found = layout.tool("lintian").arg("--fail-on=error,warning").arg(&package).status()?;
    Ok(found.success())
}
