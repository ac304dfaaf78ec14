//! The hypervisor behind `/dev/kvm`: opening it, what it can do, and which module it is.

use std::path::Path;

use anyhow::{Context, Result, bail};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

/// The only version of the interface there is (KVM API §4.1).
const API_VERSION: i32 = 12;

/// Modules by which /dev/kvm may be served. Ours stands first: where both are present, the stock
/// one is merely loaded beside it.
pub const MODULES: [&str; 4] = ["gannet", "kvm_amd", "kvm_intel", "kvm"];

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
        let kvm = Kvm::new_with_path(path)
            .map_err(|error| anyhow::anyhow!("{}", refusal(&name.to_string(), error.errno())))?;
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

    /// How many thousand ticks a guest's time stamp counter makes in a second, as far as the module tells.
    pub fn tsc_khz(&self) -> Option<u64> {
        if !self.has(Cap::GetTscKhz) {
            return None;
        }
        let vcpu = self.kvm.create_vm().ok()?.create_vcpu(0).ok()?;
        vcpu.get_tsc_khz().ok().map(u64::from).filter(|khz| *khz > 0)
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

/// Why the device does not open, and what to do about it.
fn refusal(name: &str, errno: i32) -> String {
    match errno {
        libc::ENOENT => format!(
            "{name} does not exist: load kvm_amd, kvm_intel or gannet; if it does not load, switch virtualization on in the \
             firmware, or nesting where this machine is itself a guest"
        ),
        libc::EACCES | libc::EPERM => format!(
            "{name} is not permitted to this user: become root, or a member of the device's group (`ls -l {name}`), \
             mostly `kvm`"
        ),
        libc::ENODEV | libc::ENXIO => {
            format!("{name} has no driver behind it: load kvm_amd, kvm_intel or gannet")
        }
        libc::EBUSY => format!("{name} is busy: another hypervisor has the CPU's virtualization"),
        _ => format!("cannot open {name}: {}", std::io::Error::from_raw_os_error(errno)),
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

    fn refused(device: &str) -> String {
        match Hypervisor::open(Path::new(device)) {
            Ok(_) => panic!("{device} was accepted"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_missing_device_is_explained() {
        assert!(refused("/nonexistent/kvm").contains("does not exist"));
    }

    #[test]
    fn another_device_is_no_kvm() {
        assert!(refused("/dev/null").contains("not a KVM device"));
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let said = |errno| refusal("/dev/kvm", errno);
        assert!(said(libc::EACCES).contains("member of the device's group"));
        assert!(said(libc::ENODEV).contains("no driver"));
        assert!(said(libc::EBUSY).contains("another hypervisor"));
        assert!(said(libc::EIO).contains("Input/output error"));
    }
}
