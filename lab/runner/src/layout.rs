//! Where things are: the checkout, `target/lab` under it, and each kernel's image, headers and modules.

use crate::Machine;
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

/// A kernel series of the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Debian 12's own.
    V6_1,
    /// The current long-term series, built for Debian 12.
    V6_12,
    /// The newest, built for Debian 13.
    V7_3,
    /// 6.12 built here from Debian's source, small, with everything on that finds faults (`lab/debug.config`).
    Debug,
}

/// All kernels of Debian's, the default first.
pub const KERNELS: [Kernel; 3] = [Kernel::V6_12, Kernel::V6_1, Kernel::V7_3];

/// Those on which Gannet is a module of its own name, which can lie beside the stock ones.
pub const BY_OWN_NAME: [Kernel; 2] = [Kernel::V6_12, Kernel::V6_1];

impl Kernel {
    /// The series as users write it.
    pub fn series(self) -> &'static str {
        match self {
            Kernel::V6_1 => "6.1",
            Kernel::V6_12 => "6.12",
            Kernel::V7_3 => "7.3",
            Kernel::Debug => "6.12-debug",
        }
    }

    /// Whether the kernel gives what a hypervisor needs to KVM's module names alone.
    pub fn wants_kvms_names(self) -> bool {
        self == Kernel::V7_3
    }

    /// How many MiB the machine has: the debug kernel keeps an eighth for its own records, and what was freed for a while.
    pub fn memory(self) -> u32 {
        if self == Kernel::Debug { 2048 } else { 1024 }
    }

    /// More for its command line: the debug kernel fills freed pages, and looks at them when they are taken again.
    pub fn arguments(self) -> &'static str {
        if self == Kernel::Debug { "page_poison=1" } else { "" }
    }

    /// How many times as long as Debian's kernel it may be silent.
    pub fn slowness(self) -> u32 {
        if self == Kernel::Debug { 10 } else { 1 }
    }

    /// What Kbuild is told besides. The compiler is Debian 12's, whichever the kernel was built with: what that has beyond it is
    /// taken away (docs/adr/0055-a-kernel-from-the-next-debian.md).
    pub fn build_settings(self) -> &'static [&'static str] {
        match self {
            Kernel::V6_1 | Kernel::V6_12 | Kernel::Debug => &[],
            Kernel::V7_3 => &["CC=gcc-12", "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT="],
        }
    }

    /// The group of `lab/packages.txt` it comes from.
    pub fn group(self) -> String {
        format!("kernel-{}", self.series())
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.series())
    }
}

impl FromStr for Kernel {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match KERNELS.into_iter().chain([Kernel::Debug]).find(|k| k.series() == text) {
            Some(kernel) => Ok(kernel),
            None => bail!("KERNEL={text}: the lab has 6.12, 6.1, 7.3 and 6.12-debug"),
        }
    }
}

/// The checkout and the lab's folder in it.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The checkout.
    pub root: PathBuf,
    /// `target/lab`
    pub out: PathBuf,
}

impl Layout {
    /// Finds the checkout from where this program was built.
    pub fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .context("the lab's crate has left its place in the checkout")?;
        Self::at(root)
    }

    /// The layout of a given checkout. Fails where the folder is none.
    pub fn at(root: &Path) -> Result<Self> {
        if !root.join("lab/packages.txt").is_file() {
            bail!("{} is not a checkout of Gannet", root.display());
        }
        Ok(Self { root: root.to_path_buf(), out: root.join("target/lab") })
    }

    /// Makes sure of groups of `lab/packages.txt`; a fraction of a second when they are there.
    pub fn ensure<S: AsRef<OsStr>>(&self, groups: &[S]) -> Result<()> {
        let script = self.root.join("lab/bootstrap.sh");
        let status = self.tool("/bin/sh").arg(script).args(groups).status()?;
        if !status.success() {
            bail!("the set-up did not finish (see above); run the command again to resume");
        }
        Ok(())
    }

    /// A program of the lab: `cargo`, `rustc`, `qemu`, …
    pub fn program(&self, name: &str) -> PathBuf {
        self.out.join("bin").join(name)
    }

    /// The static busybox.
    pub fn busybox(&self) -> PathBuf {
        self.out.join("busybox/bin/busybox")
    }

    /// A kernel's folder.
    pub fn kernel(&self, kernel: Kernel) -> PathBuf {
        self.out.join("kernel").join(kernel.series())
    }

    /// The uncompressed kernel image, bootable through PVH.
    pub fn vmlinux(&self, kernel: Kernel) -> PathBuf {
        self.kernel(kernel).join("vmlinux")
    }

    /// `KDIR` for modules out of the kernel's tree.
    pub fn headers(&self, kernel: Kernel) -> PathBuf {
        self.kernel(kernel).join("headers")
    }

    /// A module of the stock kernel.
    pub fn stock_module(&self, kernel: Kernel, name: &str) -> PathBuf {
        self.kernel(kernel).join("modules").join(format!("{name}.ko"))
    }

    /// The folder in which Gannet's modules are built.
    pub fn module_build(&self, kernel: Kernel) -> PathBuf {
        self.out.join("module").join(kernel.series())
    }

    /// Gannet's module: the one that holds the Rust.
    pub fn gannet_module(&self, kernel: Kernel) -> PathBuf {
        let name = if kernel.wants_kvms_names() { "kvm.ko" } else { "gannet.ko" };
        self.module_build(kernel).join(name)
    }

    /// All of Gannet's modules, in the order of loading on a machine, by their names in it below `/modules`.
    pub fn gannet_modules(&self, kernel: Kernel, machine: Machine) -> Vec<(String, PathBuf)> {
        if !kernel.wants_kvms_names() {
            return vec![("gannet".to_owned(), self.gannet_module(kernel))];
        }
        let file = |name: &str| self.module_build(kernel).join(format!("{name}.ko"));
        let names = ["kvm", machine.stock_module()];
        names.map(|name| (format!("gannet/{name}"), file(name))).into()
    }

    /// The linked Rust, which the module of every kernel of Debian's takes as it is. The debug kernel has one of its own, in which
    /// accesses and locks are told to it.
    pub fn core(&self, kernel: Kernel) -> PathBuf {
        self.out.join(if kernel == Kernel::Debug { "module/core-debug.o" } else { "module/core.o" })
    }

    /// The kernel's full release, such as `6.1.0-56-amd64`.
    pub fn release(&self, kernel: Kernel) -> Result<String> {
        let file = self.kernel(kernel).join("release");
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("{}: kernel {kernel} is not set up", file.display()))?;
        Ok(text.trim().to_owned())
    }

    /// A command without what our own callers put into the environment: make's flags and variables, the private toolchain's
    /// libraries, rustup's and cargo's settings of an outer run.
    pub fn tool<S: AsRef<OsStr>>(&self, program: S) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            let Some(text) = name.to_str() else { continue };
            let from_make =
                matches!(text, "MAKEFLAGS" | "MAKELEVEL" | "MFLAGS" | "MAKEOVERRIDES" | "MACHINE")
                    || matches!(text, "KERNEL" | "CPUS" | "JSON" | "V" | "O" | "M" | "C" | "W");
            let from_cargo = text.starts_with("CARGO_PKG_")
                || text.starts_with("CARGO_BIN_")
                || matches!(text, "CARGO" | "CARGO_MANIFEST_DIR" | "CARGO_MANIFEST_PATH")
                || matches!(text, "RUSTC" | "RUSTDOC" | "RUSTFMT" | "RUSTC_BOOTSTRAP")
                || matches!(text, "RUSTUP_TOOLCHAIN" | "RUST_RECURSION_COUNT" | "RUSTFLAGS")
                || matches!(text, "CARGO_ENCODED_RUSTFLAGS" | "CARGO_BUILD_TARGET")
                || matches!(text, "CARGO_TARGET_DIR" | "LD_LIBRARY_PATH");
            if from_make || from_cargo {
                command.env_remove(&name);
            }
        }
        command
    }

    /// The lab's own cargo, building under `target/lab/<folder>`, run from the checkout.
    pub fn cargo(&self, folder: &str) -> Command {
        let mut command = self.tool(self.program("cargo"));
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", self.out.join(folder));
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_kernel_is_refused_by_name() {
        let error = "5.10".parse::<Kernel>().unwrap_err().to_string();
        assert!(error.contains("5.10") && error.contains("6.12"), "{error}");
        assert_eq!("6.1".parse::<Kernel>().unwrap(), Kernel::V6_1);
        assert_eq!("6.12-debug".parse::<Kernel>().unwrap(), Kernel::Debug);
    }

    #[test]
    fn kvms_names_come_core_first_and_beside_the_stock_ones() {
        let layout = Layout::find().unwrap();
        let names = |kernel| {
            let modules = layout.gannet_modules(kernel, Machine::Intel).into_iter();
            modules.map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(Kernel::V6_1), ["gannet"]);
        assert_eq!(names(Kernel::V7_3), ["gannet/kvm", "gannet/kvm-intel"]);
    }

    #[test]
    fn the_checkout_is_found_from_the_crate() {
        let layout = Layout::find().unwrap();
        assert!(layout.root.join("lab/bootstrap.sh").is_file());
        assert!(Layout::at(Path::new("/")).is_err());
    }

    #[test]
    fn variables_of_an_outer_make_do_not_reach_tools() {
        let layout = Layout::find().unwrap();
        // The variables are those of this test's own run: cargo sets CARGO_MANIFEST_DIR.
        let output = layout.tool("env").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(!text.lines().any(|l| l.starts_with("CARGO_MANIFEST_DIR=")), "{text}");
    }
}
