//! The three kinds of files, and how to speak to them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use kvm_bindings::*;

use super::{failing, ioctl};
use crate::outcome::{Answer, Errno, Outcome, Reply, fail, skip};

/// A file that takes ioctls.
pub trait Commands {
    /// The file's descriptor.
    fn descriptor(&self) -> RawFd;

    /// A command with a number, or an address, as it is.
    fn call(&self, request: u64, argument: u64) -> Reply {
        // SAFETY: whether the kernel treats the argument well is what is being tested; wrong
        // addresses are for the kernel to refuse.
        let once = || unsafe { libc::ioctl(self.descriptor(), request, argument) };
        let answer = failing::at_every_point(request & 0xff, once);
        if answer < 0 { Err(Errno::last()) } else { Ok(answer) }
    }

    /// A command that reads `value`.
    fn send<T>(&self, request: u64, value: &T) -> Reply {
        self.call(request, std::ptr::from_ref(value) as u64)
    }

    /// A command that reads and writes `value`.
    fn exchange<T>(&self, request: u64, value: &mut T) -> Reply {
        self.call(request, std::ptr::from_mut(value) as u64)
    }

    /// A command that answers with a `T`.
    fn receive<T: Plain>(&self, request: u64) -> Result<T, Errno> {
        // SAFETY: `Plain` types may be all zeroes.
        let mut value: T = unsafe { std::mem::zeroed() };
        self.exchange(request, &mut value)?;
        Ok(value)
    }
}

/// Types of which every bit pattern is a value.
///
/// # Safety
/// As said.
pub unsafe trait Plain {}

macro_rules! plain {
    ($($name:ty),*) => { $(
        // SAFETY: integers and arrays of them.
        unsafe impl Plain for $name {}
    )* };
}
plain!(
    u64,
    kvm_regs,
    kvm_sregs,
    kvm_sregs2,
    kvm_fpu,
    kvm_lapic_state,
    kvm_mp_state,
    kvm_vcpu_events,
    kvm_debugregs,
    kvm_xsave,
    kvm_xcrs,
    kvm_clock_data,
    kvm_pit_state2
);

/// `/dev/kvm`.
pub struct System(OwnedFd);

impl Commands for System {
    fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl System {
    /// Opens /dev/kvm.
    pub fn open() -> Outcome<Self> {
        // SAFETY: a string that ends in a zero.
        let once = || unsafe { libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        let fd = failing::at_every_point(failing::OPEN, once);
        if fd < 0 {
            return fail(format!("cannot open /dev/kvm: {}", Errno::last()));
        }
        Ok(Self(own(fd)))
    }

    /// KVM_CHECK_EXTENSION.
    pub fn extension(&self, capability: u32) -> i32 {
        self.call(ioctl::CHECK_EXTENSION, capability.into()).unwrap_or(0)
    }

    /// Skips the test unless `capability` is there.
    pub fn require(&self, capability: u32, name: &str) -> Outcome {
        match self.extension(capability) {
            0 => skip(format!("no {name}")),
            _ => Ok(()),
        }
    }

    /// A VM of the only type.
    pub fn create_vm(&self) -> Outcome<Vm> {
        let fd = self.call(ioctl::CREATE_VM, 0).granted("KVM_CREATE_VM")?;
        let run_bytes = self.call(ioctl::GET_VCPU_MMAP_SIZE, 0).granted("mmap size")?;
        Ok(Vm { fd: own(fd), run_bytes: run_bytes as usize })
    }

    /// KVM_GET_SUPPORTED_CPUID.
    pub fn supported_cpuid(&self) -> Outcome<Box<CpuidTable>> {
        let mut table = CpuidTable::empty();
        self.exchange(ioctl::GET_SUPPORTED_CPUID, &mut *table).granted("supported CPUID")?;
        Ok(table)
    }
}

/// A VM.
pub struct Vm {
    fd: OwnedFd,
    /// Bytes of a vCPU's shared pages.
    pub run_bytes: usize,
}

impl Commands for Vm {
    fn descriptor(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Vm {
    /// KVM_SET_USER_MEMORY_REGION.
    pub fn set_slot(&self, slot: u32, flags: u32, gpa: u64, bytes: u64, hva: u64) -> Reply {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: gpa,
            memory_size: bytes,
            userspace_addr: hva,
        };
        self.send(ioctl::SET_USER_MEMORY_REGION, &region)
    }

    /// KVM_ENABLE_CAP of KVM_CAP_SPLIT_IRQCHIP with so many routes for the VMM's I/O APIC.
    pub fn split_irqchip(&self, routes: u64) -> Reply {
        let mut cap = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
        cap.args[0] = routes;
        self.send(ioctl::ENABLE_CAP, &cap)
    }

    /// KVM_IRQ_LINE.
    pub fn irq_line(&self, gsi: u32, level: u32) -> Reply {
        let mut line = kvm_irq_level::default();
        line.__bindgen_anon_1.irq = gsi;
        line.level = level;
        self.send(ioctl::IRQ_LINE, &line)
    }
}

/// Takes a descriptor that a system call just gave us.
pub fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Entries that a [`CpuidTable`] has room for.
pub const CPUID_ENTRIES: usize = 256;

/// `struct kvm_cpuid2` with room.
#[repr(C)]
#[derive(Clone)]
pub struct CpuidTable {
    pub nent: u32,
    pub padding: u32,
    pub entries: [kvm_cpuid_entry2; CPUID_ENTRIES],
}

impl CpuidTable {
    /// All room, no entry.
    pub fn empty() -> Box<Self> {
        let entries = [kvm_cpuid_entry2::default(); CPUID_ENTRIES];
        Box::new(Self { nent: CPUID_ENTRIES as u32, padding: 0, entries })
    }

    /// The entries that the table has.
    pub fn used(&mut self) -> &mut [kvm_cpuid_entry2] {
        let used = (self.nent as usize).min(CPUID_ENTRIES);
        &mut self.entries[..used]
    }

    /// The entry of a leaf.
    pub fn find(&mut self, function: u32, index: u32) -> Option<&mut kvm_cpuid_entry2> {
        self.used().iter_mut().find(|entry| entry.function == function && entry.index == index)
    }
}

/// Entries that an [`MsrTable`] has room for.
pub const MSR_ENTRIES: usize = 64;

/// `struct kvm_msrs` with room.
#[repr(C)]
#[derive(Clone)]
pub struct MsrTable {
    pub nmsrs: u32,
    pub pad: u32,
    pub entries: [kvm_msr_entry; MSR_ENTRIES],
}

impl MsrTable {
    /// One entry per pair of index and value.
    pub fn of(list: &[(u32, u64)]) -> Self {
        let mut entries = [kvm_msr_entry::default(); MSR_ENTRIES];
        for (entry, &(index, data)) in entries.iter_mut().zip(list) {
            *entry = kvm_msr_entry { index, data, ..Default::default() };
        }
        Self { nmsrs: list.len() as u32, pad: 0, entries }
    }
}
