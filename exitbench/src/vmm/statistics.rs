//! What the module itself counts: the statistics of a VM and of its vCPUs as KVM_GET_STATS_FD gives them (KVM API §4.133). A module
//! or a kernel without them leaves nothing to read, which is no error.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};
use kvm_bindings::KVM_CAP_BINARY_STATS_FD;
use kvm_ioctls::{VcpuFd, VmFd};

use super::hypervisor::Hypervisor;

/// `_IO(0xae, 0xce)`
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;
/// Bytes of `struct kvm_stats_header`.
const HEADER: usize = 24;
/// Bytes of `struct kvm_stats_desc` without the name.
const DESCRIPTOR: usize = 16;
/// More of anything than a module has.
const MOST: usize = 65_536;
/// The type that the flags of a descriptor hold in their low four bits: a sum that only grows.
const CUMULATIVE: u32 = 0;

/// Sums by name, as `vm.NAME` and `vcpu.NAME`, the latter over all vCPUs.
pub type Sums = BTreeMap<String, u64>;

/// The statistics of one VM.
pub struct Statistics {
    sources: Vec<Source>,
}

/// The file of one VM or vCPU.
struct Source {
    file: File,
    /// Name and offset of each sum.
    sums: Vec<(String, u64)>,
}

impl Statistics {
    /// Opens those of a VM and its vCPUs.
    pub fn open(hypervisor: &Hypervisor, vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self> {
        if hypervisor.kvm.check_extension_raw(KVM_CAP_BINARY_STATS_FD.into()) <= 0 {
            return Ok(Self { sources: Vec::new() });
        }
        let mut sources = vec![Source::open(vm.as_raw_fd(), "vm")?];
        for vcpu in vcpus {
            sources.push(Source::open(vcpu.as_raw_fd(), "vcpu")?);
        }
        Ok(Self { sources })
    }

    /// Takes them from the machine, which does without.
    pub fn take(&mut self) -> Self {
        Self { sources: std::mem::take(&mut self.sources) }
    }

    /// Reads every sum.
    pub fn read(&self) -> Result<Sums> {
        let mut all = Sums::new();
        for source in &self.sources {
            for (name, offset) in &source.sums {
                let mut value = [0; 8];
                source.file.read_exact_at(&mut value, *offset).context("statistics end early")?;
                let sum = all.entry(name.clone()).or_default();
                *sum = sum.wrapping_add(u64::from_le_bytes(value));
            }
        }
        Ok(all)
    }
}

/// What has grown, by how much.
pub fn growth(before: &Sums, after: &Sums) -> Sums {
    let grown = |(name, value): (&String, &u64)| {
        let by = value.wrapping_sub(before.get(name).copied().unwrap_or(0));
        (by != 0).then(|| (name.clone(), by))
    };
    after.iter().filter_map(grown).collect()
}

impl Source {
    fn open(device: RawFd, kind: &str) -> Result<Self> {
        // SAFETY: the request takes no argument and gives a new file descriptor or -1.
        let fd = unsafe { libc::ioctl(device, KVM_GET_STATS_FD) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error()).context("KVM_GET_STATS_FD failed");
        }
        // SAFETY: the descriptor is new and ours.
        let file = unsafe { File::from_raw_fd(fd) };
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0).context("statistics without a header")?;
        let field = |index: usize| word(&header, index * 4).unwrap_or(0) as usize;
        let (name_size, count, descriptors) = (field(1), field(2), field(4));
        if name_size > MOST || count > MOST {
            bail!("statistics with {count} names of {name_size} bytes");
        }
        let mut bytes = vec![0; count * (DESCRIPTOR + name_size)];
        file.read_exact_at(&mut bytes, descriptors as u64).context("statistics without names")?;
        let sums = sums(&bytes, name_size, field(5) as u64, kind);
        Ok(Self { file, sums })
    }
}

/// The single sums among the descriptors; histograms and values of the moment are left out.
fn sums(descriptors: &[u8], name_size: usize, data: u64, kind: &str) -> Vec<(String, u64)> {
    let one = |bytes: &[u8]| {
        let (flags, shape) = (word(bytes, 0)?, word(bytes, 4)?);
        let (size, offset) = (shape >> 16, word(bytes, 8)?);
        let name = bytes.get(DESCRIPTOR..)?.split(|b| *b == 0).next()?;
        let name = format!("{kind}.{}", String::from_utf8_lossy(name));
        (flags & 0xf == CUMULATIVE && size == 1).then(|| (name, data + u64::from(offset)))
    };
    descriptors.chunks_exact(DESCRIPTOR + name_size).filter_map(one).collect()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(flags: u32, size: u32, offset: u32, name: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        for value in [flags, size << 16, offset, 0] {
            bytes.extend(value.to_le_bytes());
        }
        let mut padded = name.as_bytes().to_vec();
        padded.resize(48, 0);
        bytes.extend(padded);
        bytes
    }

    #[test]
    fn single_sums_are_found_by_name() {
        let bytes = [
            descriptor(0, 1, 0, "exits"),
            descriptor(1, 1, 8, "blocking"),
            descriptor(4, 32, 16, "halt_wait_hist"),
            descriptor(0x10, 1, 272, "halt_poll_success_ns"),
        ]
        .concat();
        let found = sums(&bytes, 48, 1000, "vcpu");
        let expected = [("vcpu.exits", 1000), ("vcpu.halt_poll_success_ns", 1272)];
        assert_eq!(found, expected.map(|(name, offset)| (name.to_owned(), offset)));
    }

    #[test]
    fn only_what_has_grown_is_told() {
        let sums = |exits| Sums::from([("a".to_owned(), 3), ("exits".to_owned(), exits)]);
        assert_eq!(growth(&sums(5), &sums(9)), Sums::from([("exits".to_owned(), 4)]));
    }
}
