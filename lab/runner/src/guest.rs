//! The Linux guest: an unmodified Debian kernel and a small initramfs of busybox whose `init` says that user space answers.

use crate::{Archive, Kernel, Layout};
use anyhow::Result;
use std::path::{Path, PathBuf};

/// What the guest's init prints first; the rest of the line is `cpus=N kernel=RELEASE`.
pub const MARKER: &str = "GANNET-GUEST-USERSPACE";

/// The guest's kernel: the same for every host, so that boots can be compared.
pub const KERNEL: Kernel = Kernel::V6_12;

/// What the lab adds to the kernel command line that `exitbench boot` brings.
pub const APPEND: &str = "mitigations=off";

/// The guest's module for the lazy TSC deadline, as it is built from `guest/`.
pub const LAZY_MODULE: &str = "lazy_tscdeadline.ko";

/// The guest's task of two tasks that answer each other.
pub const PINGPONG: &str = "pingpong";

/// The folder of what is built from `guest/` for a guest's kernel.
pub fn programs(layout: &Layout, kernel: Kernel) -> PathBuf {
    layout.out.join("guest").join(kernel.series())
}

/// The guest's initramfs.
pub fn initramfs(layout: &Layout) -> Result<Vec<u8>> {
    Ok(busybox(layout)?.bytes())
}

/// The same with what is built from `guest/`, which has to be there.
pub fn initramfs_with_programs(layout: &Layout, kernel: Kernel) -> Result<Vec<u8>> {
    let folder = programs(layout, kernel);
    let mut archive = busybox(layout)?;
    archive.file(&format!("bin/{PINGPONG}"), &folder.join(PINGPONG))?;
    archive.file(&format!("lib/{LAZY_MODULE}"), &folder.join(LAZY_MODULE))?;
    Ok(archive.bytes())
}

/// The same with a C compiler, the C library and a program to build.
pub fn initramfs_with_compiler(layout: &Layout) -> Result<Vec<u8>> {
    let mut archive = busybox(layout)?;
    archive.tree("", &layout.out.join("tcc"))?;
    archive.text("src/program.c", include_str!("../../guest-program.c"));
    Ok(archive.bytes())
}

/// The initramfs of a guest that is a hypervisor (L1): its kernel's own KVM and, if it was built, gannet.ko; exitbench as its VMM and, if
/// asked for, a kernel and an initramfs for its guest (L2).
pub fn initramfs_of_hypervisor(layout: &Layout, exitbench: &Path, linux: bool) -> Result<Vec<u8>> {
    let mut archive = busybox(layout)?;
    archive.text("init", include_str!("../../hypervisor-init.sh"));
    archive.file("bin/exitbench", exitbench)?;
    for name in ["irqbypass", "kvm", "ccp", "kvm-amd", "kvm-intel"] {
        archive.file(&format!("modules/{name}.ko"), &layout.stock_module(KERNEL, name))?;
    }
    let gannet = layout.gannet_module(KERNEL);
    if gannet.is_file() {
        archive.file("modules/gannet.ko", &gannet)?;
    }
    if linux {
        archive.file("guest/vmlinux", &layout.vmlinux(KERNEL))?;
        archive.text("guest/initramfs", initramfs(layout)?);
    }
    Ok(archive.bytes())
}

fn busybox(layout: &Layout) -> Result<Archive> {
    let mut archive = Archive::new();
    archive.file("bin/busybox", &layout.busybox())?;
    archive.link("bin/sh", "busybox");
    archive.text("init", include_str!("../../guest-init.sh"));
    for folder in ["proc", "sys", "tmp"] {
        archive.folder(folder);
    }
    Ok(archive)
}
