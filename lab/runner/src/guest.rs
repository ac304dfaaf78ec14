//! The Linux guest: an unmodified Debian kernel and a small initramfs of busybox whose `init` says that user space answers.

use crate::{Archive, Kernel, Layout};
use anyhow::Result;

/// What the guest's init prints first; the rest of the line is `cpus=N kernel=RELEASE`.
pub const MARKER: &str = "GANNET-GUEST-USERSPACE";

/// The guest's kernel: the same for every host, so that boots can be compared.
pub const KERNEL: Kernel = Kernel::V6_12;

/// What the lab adds to the kernel command line that `exitbench boot` brings.
pub const APPEND: &str = "mitigations=off";

/// The guest's initramfs.
pub fn initramfs(layout: &Layout) -> Result<Vec<u8>> {
    let mut archive = Archive::new();
    archive.file("bin/busybox", &layout.busybox())?;
    archive.link("bin/sh", "busybox");
    archive.text("init", include_str!("../../guest-init.sh"));
    for folder in ["proc", "sys", "tmp"] {
        archive.folder(folder);
    }
    Ok(archive.bytes())
}
