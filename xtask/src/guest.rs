//! Builds what runs inside the lab's Linux guests, from `guest/`: the module that uses the lazy TSC deadline, by Kbuild against the
//! guest kernel's headers, and the static program that measures it.

use crate::module::{copy_sources, follow};
use crate::progress::Step;
use anyhow::{Context, Result, bail};
use gannet_lab::{Kernel, Layout, guest};

/// Builds both for one kernel, into [`guest::programs`].
pub fn build(layout: &Layout, kernel: Kernel) -> Result<()> {
    layout.ensure(&[kernel.group()])?;
    let (sources, folder) = (layout.root.join("guest"), guest::programs(layout, kernel));
    copy_sources(&sources.join("lazy-tscdeadline"), &folder)?;
    let step = Step::start(layout, &format!("building the guest's programs for {kernel}"));

    let mut make = layout.tool("make");
    make.arg("-C").arg(layout.headers(kernel)).arg(format!("M={}", folder.display()));
    // As for gannet.ko: no BTF.
    make.args(["PAHOLE=true", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]);
    follow(&mut make, &step).with_context(|| format!("the guest's module, for {kernel}"))?;
    if !folder.join(guest::LAZY_MODULE).is_file() {
        bail!("the build of guest/lazy-tscdeadline left no {}", guest::LAZY_MODULE);
    }

    let mut compiler = layout.tool("cc");
    compiler.args(["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-o"]);
    compiler.arg(folder.join(guest::PINGPONG)).arg(sources.join("pingpong/pingpong.c"));
    follow(&mut compiler, &step).context("guest/pingpong does not build")?;
    step.done();
    Ok(())
}
