//! What to run: a job's machine, kernel, module, files and command, and the initramfs that carries them.

use crate::{Archive, Emulator, Kernel, Layout, MACHINES, Machine, Patience};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Which hypervisor the machine's kernel loads before the command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Module {
    /// None: the command may load one itself, from `/modules`.
    None,
    /// The kernel's own kvm, with kvm-amd or kvm-intel.
    Stock,
    /// Gannet, which must have been built: gannet.ko or, where the kernel wants it so, kvm.ko and the vendor's.
    Gannet,
}

impl Module {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Module::None => "none",
            Module::Stock => "stock",
            Module::Gannet => "gannet",
        }
    }

    /// The name with the module's parameters, if there are any.
    pub fn with(self, parameters: &str) -> String {
        format!("{} {parameters}", self.name()).trim_end().to_owned()
    }
}

/// One run of a machine.
#[derive(Clone, Debug)]
pub struct Job {
    /// Which machine.
    pub machine: Machine,
    /// The host's kernel.
    pub kernel: Kernel,
    /// The module loaded before the command.
    pub module: Module,
    /// Parameters of that module, such as `npt=0 keep_roots=0`; each goes to the one of its modules that has it, or to the one that
    /// it names, as `kvm.tdp_mmu=0` does. A
    /// parameter that the module does not have counts as refused: [`Outcome::loaded`](crate::Outcome::loaded) is `Some(false)`.
    pub parameters: String,
    /// Files of this machine and where they go. All are executable there.
    pub files: Vec<(PathBuf, String)>,
    /// Further files by content.
    pub texts: Vec<(String, Vec<u8>)>,
    /// A shell script. What it leaves as files in `/out` comes back.
    pub command: String,
    /// The host's CPUs. More than one runs, but not as surely as one: the emulator then loses a wake-up now and then.
    pub cpus: u32,
    /// The host's memory in MiB.
    pub memory: u32,
    /// The processor, in the emulator's words.
    pub processor: String,
    /// Firmware has locked VMX away (IA32_FEATURE_CONTROL); `intel` only.
    pub vmx_locked: bool,
    /// Let the time-stamp counter count instructions, repeatably, at a third of the speed.
    pub counting: bool,
    /// The plugin of the machine's emulator, to count operations between markers.
    pub plugin: Option<PathBuf>,
    /// More for the host kernel's command line.
    pub append: String,
    /// When the machine is given up and the run fails.
    pub patience: Patience,
}

impl Job {
    /// A job on one CPU with the kernel's usual memory, no counting, the patience of machine and kernel.
    pub fn new(machine: Machine, kernel: Kernel, module: Module, command: &str) -> Self {
        Self {
            machine,
            kernel,
            module,
            parameters: String::new(),
            files: Vec::new(),
            texts: Vec::new(),
            command: command.to_owned(),
            cpus: 1,
            memory: kernel.memory(),
            processor: machine.processor().to_owned(),
            vmx_locked: false,
            counting: false,
            plugin: None,
            append: kernel.arguments().to_owned(),
            patience: Patience::of(machine).on(kernel),
        }
    }

    /// Adds a file of this machine at a path in the machine.
    pub fn file(mut self, source: impl AsRef<Path>, path: &str) -> Self {
        self.files.push((source.as_ref().to_path_buf(), path.to_owned()));
        self
    }

    /// Whether its CPUs wake each other now and then (docs/lab.md): where the emulator loses interrupts, and nobody counts.
    fn has_pulse(&self) -> bool {
        self.machine.emulator() == Emulator::Qemu && self.cpus > 1 && !self.counting
    }

    /// The initramfs: busybox, every module of the lab for this kernel, the job's files, settings and command.
    pub fn initramfs(&self, layout: &Layout) -> Result<Vec<u8>> {
        let mut archive = Archive::new();
        archive.file("bin/busybox", &layout.busybox())?;
        archive.link("bin/sh", "busybox");
        archive.text("init", include_str!("../../host-init.sh"));
        for folder in ["proc", "sys", "tmp", "out"] {
            archive.folder(folder);
        }
        let stock = self.machine.stock_module();
        let mut modules = Vec::new();
        match self.module {
            Module::None => {}
            Module::Stock => load_order(layout, self.kernel, stock, &mut modules)?,
            Module::Gannet => {}
        }
        // The debug kernel's kvm-amd.ko does without: it has no encrypted guests.
        let ccp = (self.machine.has_svm() && self.kernel != Kernel::Debug).then_some("ccp");
        for name in ["irqbypass", "kvm", stock, "msr", "cpuid"].into_iter().chain(ccp) {
            let source = layout.stock_module(self.kernel, name);
            archive.file(&format!("modules/{name}.ko"), &source)?;
        }
        let chosen = self.module == Module::Gannet;
        let mut ours = BTreeMap::new();
        for machine in MACHINES {
            let of_machine = layout.gannet_modules(self.kernel, machine);
            if chosen && machine.stock_module() == stock {
                modules.extend(of_machine.iter().map(|(name, _)| name.clone()));
            }
            ours.extend(of_machine);
        }
        for (name, file) in ours {
            if file.is_file() {
                archive.file(&format!("modules/{name}.ko"), &file)?;
            } else if chosen {
                bail!("{} has not been built (make module)", file.display());
            }
        }
        if self.machine.emulator() == Emulator::Bochs {
            archive.file("bin/debug-port", &layout.out.join("bochs/debug-port"))?;
        }
        let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
        let settings = format!(
            "MODULES={}\nPARAMETERS={}\nPULSE={}\n",
            quoted(&modules.join(" ")),
            quoted(&self.parameters),
            if self.has_pulse() { "1" } else { "" }
        );
        archive.text("job/settings", settings);
        archive.text("job/command", self.command.as_bytes());
        for (source, path) in &self.files {
            archive.file(path, source)?;
        }
        for (path, content) in &self.texts {
            archive.text(path, content.clone());
        }
        Ok(archive.bytes())
    }
}

/// Appends a stock module's dependencies, then the module, as its `modinfo` names them.
fn load_order(layout: &Layout, kernel: Kernel, name: &str, order: &mut Vec<String>) -> Result<()> {
    if order.iter().any(|n| n == name) {
        return Ok(());
    }
    let file = layout.stock_module(kernel, name);
    let image = std::fs::read(&file)
        .with_context(|| format!("{name} for kernel {kernel} is missing: {}", file.display()))?;
    for dependency in dependencies(&image) {
        load_order(layout, kernel, &dependency, order)?;
    }
    order.push(name.to_owned());
    Ok(())
}

/// The modules that a module needs, from its `depends=` string.
fn dependencies(image: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = image.windows(KEY.len()).position(|w| w == KEY) else { return Vec::new() };
    let value = image.get(at + KEY.len()..).unwrap_or_default();
    let value = value.split(|b| *b == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(value);
    text.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_modinfo() {
        let image = b"\x7fELF..license=GPL\0depends=kvm,ccp\0retpoline=Y\0";
        assert_eq!(dependencies(image), ["kvm", "ccp"]);
        assert!(dependencies(b"..\0depends=\0..").is_empty());
        assert!(dependencies(b"nothing").is_empty());
    }
}
