//! Statistics files. Each holds what is counted and nothing else of the VM, so that it can be read after the VM's own files are
//! gone, and a monitor that keeps it keeps no page tables, eventfds or address space. It knows no ioctl, and may be handed to
//! a monitor.

use core::ffi::CStr;

use ::stats::VcpuStats;
use ::vm::{statistics::VmStatistics, vcpu_shared::SharedVcpu};
use host::file::Pointers;
use host::{
    Arc,
    file::{FileObject, NewFile},
    user,
};
use x86::Hva;

use crate::errno::Errno;
use crate::stats_file::{Id, OfOneVcpu, OfOneVm, Values, read};

/// The statistics of a VM.
struct VmStatsFile {
    statistics: Arc<VmStatistics>,
    id: Id,
}

/// The statistics of a vCPU.
struct VcpuStatsFile {
    stats: Arc<VcpuStats>,
    id: Id,
}

fn read_to_user<V: Values>(values: &V, id: &Id, offset: u64, buffer: u64, len: u64) -> i64 {
    let copied = read(values, id, offset, len, |at, bytes| {
        // The sum does not wrap: read(2) has checked that the whole buffer is user space.
        user::write(Hva(buffer.wrapping_add(at)), bytes).map_err(Errno::from)
    });
    match copied {
        Ok(bytes) => bytes as i64,
        // What was copied before a fault is not told, as on stock KVM: the reader has to begin
        // anew.
        Err(errno) => errno.code(),
    }
}

impl FileObject for VmStatsFile {
    const NAME: &'static CStr = c"kvm-vm-stats";
    const READABLE: bool = true;

    // A monitor that holds this file must not reach the VM by it.
    fn ioctl(_: &Arc<Self>, _: u32, _: u64, _: Pointers) -> i64 {
        Errno::ENOTTY.code()
    }

    fn read(&self, offset: u64, buffer: u64, len: u64) -> i64 {
        read_to_user(&OfOneVm(&self.statistics), &self.id, offset, buffer, len)
    }
}

impl FileObject for VcpuStatsFile {
    const NAME: &'static CStr = c"kvm-vcpu-stats";
    const READABLE: bool = true;

    fn ioctl(_: &Arc<Self>, _: u32, _: u64, _: Pointers) -> i64 {
        Errno::ENOTTY.code()
    }

    fn read(&self, offset: u64, buffer: u64, len: u64) -> i64 {
        read_to_user(&OfOneVcpu(&self.stats), &self.id, offset, buffer, len)
    }
}

/// KVM_GET_STATS_FD on a VM; the id string names the thread `tid` that made the VM.
#[cold]
#[inline(never)]
pub(super) fn of_vm(statistics: &Arc<VmStatistics>, tid: u32) -> Result<i32, Errno> {
    // Each call makes a file: the process's limit of descriptors is the only one, as on stock KVM.
    let file = Arc::new(VmStatsFile { statistics: statistics.clone(), id: Id::new(tid, None) })?;
    Ok(NewFile::new(file, None).map_err(Errno::from_file)?.install())
}

/// KVM_GET_STATS_FD on a vCPU.
#[cold]
#[inline(never)]
pub(super) fn of_vcpu(vcpu: &SharedVcpu, tid: u32) -> Result<i32, Errno> {
    // The vCPU's own id names the file, as that of its vCPU file.
    let (id, number) = (Id::new(tid, Some(vcpu.id)), vcpu.id);
    let file = Arc::new(VcpuStatsFile { stats: vcpu.stats.clone(), id })?;
    Ok(NewFile::new(file, Some(number)).map_err(Errno::from_file)?.install())
}
