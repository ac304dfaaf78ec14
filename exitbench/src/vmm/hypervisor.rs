//! The hypervisor behind `/dev/kvm`: opening it, what it can do, and which module it is.

use std::path::Path;

use anyhow::{Context, Result, bail};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

/// The only version of the interface there is (KVM API §4.1).
const API_VERSION: i32 = 12;

/// Modules by which /dev/kvm may be served. Ours stands first: where both are present, the stock
/// one is merely loaded beside it.
const MODULES: [&str; 4] = ["gannet", "kvm_amd", "kvm_intel", "kvm"];

/// Who makes the CPU, as far as the guest must care: which hypercall instruction is native.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    Intel,
    Amd,
}

/// An open `/dev/kvm`.
pub struct Hypervisor {
    pub kvm: Kvm,
    /// What KVM_GET_SUPPORTED_CPUID answers.
    pub supported_cpuid: CpuId,
}

impl Hypervisor {
    /// Opens the device and checks that it speaks the interface.
    pub fn open(device: &Path) -> Result<Self> {
        let name = device.display();
        let path = std::ffi::CString::new(device.as_os_str().as_encoded_bytes())
            .with_context(|| format!("{name} is no path"))?;
        let kvm = Kvm::new_with_path(path).map_err(|error| match error.errno() {
            libc::ENOENT => anyhow::anyhow!(
                "{name} does not exist: is a KVM module loaded, and virtualization enabled?"
            ),
            libc::EACCES | libc::EPERM => anyhow::anyhow!(
                "{name} is not permitted to this user: become root or join the device's group"
            ),
            libc::ENODEV | libc::ENXIO => anyhow::anyhow!("{name} has no driver behind it"),
            _ => anyhow::anyhow!("cannot open {name}: {error}"),
        })?;
        match kvm.get_api_version() {
            API_VERSION => {}
            -1 => bail!("{name} is not a KVM device"),
            other => bail!("{name} speaks version {other} of the interface, not {API_VERSION}"),
        }
        let supported_cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .context("KVM_GET_SUPPORTED_CPUID failed")?;
        Ok(Self { kvm, supported_cpuid })
    }

    /// Whether KVM_CHECK_EXTENSION knows `capability`.
    pub fn has(&self, capability: Cap) -> bool {
        self.kvm.check_extension(capability)
    }

    /// The CPU's vendor, by CPUID leaf 0.
    pub fn vendor(&self) -> Vendor {
        let leaf = self.supported_cpuid.as_slice().iter().find(|entry| entry.function == 0);
        match leaf.map(|leaf| leaf.ebx.to_le_bytes()) {
            Some([b'A', b'u', b't', b'h'] | [b'H', b'y', b'g', b'o']) => Vendor::Amd,
            _ => Vendor::Intel,
        }
    }
}

/// The name of the loaded module that serves `/dev/kvm`, or `unknown`. Gannet's under KVM's names has a version, which the stock one
/// has not.
pub fn module_name() -> String {
    if Path::new("/sys/module/kvm/version").is_file() {
        return MODULES[0].to_string();
    }
    let loaded = |name: &&&str| Path::new("/sys/module").join(name).is_dir();
    MODULES.iter().find(loaded).map_or("unknown", |name| name).to_string()
}

/// The host's kernel release, or nothing where `/proc` is not mounted.
pub fn kernel_release() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(device: &str) -> String {
        match Hypervisor::open(Path::new(device)) {
            Ok(_) => panic!("{device} was accepted"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_missing_device_is_explained() {
        assert!(refusal("/nonexistent/kvm").contains("does not exist"));
    }

    #[test]
    fn another_device_is_no_kvm() {
        assert!(refusal("/dev/null").contains("not a KVM device"));
    }
}
