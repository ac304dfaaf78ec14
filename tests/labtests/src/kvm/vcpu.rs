//! A vCPU file and its shared pages.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use kvm_bindings::*;

use super::exit::Exit;
use super::file::{Commands, CpuidTable, MsrTable, Vm, own};
use super::{failing, ioctl};
use crate::outcome::{Answer, Errno, Outcome, fail};

/// A vCPU.
pub struct Vcpu {
    fd: OwnedFd,
    shared: NonNull<kvm_run>,
    bytes: usize,
}

// SAFETY: the shared pages are accessed as memory that others change: by raw pointers, volatile.
unsafe impl Send for Vcpu {}
// SAFETY: no reference into the shared pages is ever made: a `&Vcpu` reads and writes them volatile.
unsafe impl Sync for Vcpu {}

impl Vm {
    /// Creates vCPU `id` and maps its shared pages.
    pub fn create_vcpu(&self, id: u64) -> Outcome<Vcpu> {
        let fd = self.call(ioctl::CREATE_VCPU, id).granted("KVM_CREATE_VCPU")?;
        Vcpu::map(own(fd), self.run_bytes)
    }
}

impl Commands for Vcpu {
    fn descriptor(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and nobody keeps a reference into it.
        unsafe { libc::munmap(self.shared.as_ptr().cast(), self.bytes) };
    }
}

impl Vcpu {
    /// Maps the shared pages of `fd`.
    pub fn map(fd: OwnedFd, bytes: usize) -> Outcome<Self> {
        let mut shared = libc::MAP_FAILED;
        failing::at_every_point(failing::MAP, || {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping.
            shared = unsafe {
                libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, fd.as_raw_fd(), 0)
            };
            if shared == libc::MAP_FAILED { -1 } else { 0 }
        });
        match NonNull::new(shared.cast()) {
            Some(shared) if shared.as_ptr() as usize != usize::MAX => {
                Ok(Self { fd, shared, bytes })
            }
            _ => fail(format!("cannot map kvm_run: {}", Errno::last())),
        }
    }

    /// The shared page, for its fields.
    pub fn page(&self) -> *mut kvm_run {
        self.shared.as_ptr()
    }

    /// KVM_RUN; what it ended with.
    pub fn run(&self) -> Result<Exit, Errno> {
        self.call(ioctl::RUN, 0)?;
        // SAFETY: the pages are mapped, and KVM_RUN has returned.
        Ok(unsafe { Exit::read(self.shared.as_ptr()) })
    }

    /// `kvm_run.immediate_exit`.
    pub fn set_immediate_exit(&self, value: u8) {
        // SAFETY: a field of the mapped page.
        unsafe { (&raw mut (*self.page()).immediate_exit).write_volatile(value) };
    }

    /// `kvm_run.request_interrupt_window`.
    pub fn request_interrupt_window(&self, value: u8) {
        // SAFETY: a field of the mapped page.
        unsafe { (&raw mut (*self.page()).request_interrupt_window).write_volatile(value) };
    }

    /// `kvm_run.ready_for_interrupt_injection`.
    pub fn ready_for_interrupt(&self) -> bool {
        // SAFETY: a field of the mapped page.
        unsafe { (&raw const (*self.page()).ready_for_interrupt_injection).read_volatile() != 0 }
    }

    /// Gives the bytes that the last exit, a port or memory read, asks for.
    pub fn answer(&self, bytes: &[u8]) {
        // SAFETY: the fields of an exit that just happened; data lies inside of the mapping.
        unsafe {
            let page = self.page();
            let target = match (*page).exit_reason {
                KVM_EXIT_MMIO => (&raw mut (*page).__bindgen_anon_1.mmio.data).cast::<u8>(),
                _ => page.cast::<u8>().add((*page).__bindgen_anon_1.io.data_offset as usize),
            };
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
    }

    /// KVM_GET_REGS.
    pub fn regs(&self) -> Outcome<kvm_regs> {
        self.receive(ioctl::GET_REGS).granted("KVM_GET_REGS")
    }

    /// KVM_SET_REGS.
    pub fn set_regs(&self, regs: &kvm_regs) -> Outcome {
        self.send(ioctl::SET_REGS, regs).granted("KVM_SET_REGS").map(drop)
    }

    /// KVM_GET_SREGS.
    pub fn sregs(&self) -> Outcome<kvm_sregs> {
        self.receive(ioctl::GET_SREGS).granted("KVM_GET_SREGS")
    }

    /// KVM_SET_SREGS.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Outcome {
        self.send(ioctl::SET_SREGS, sregs).granted("KVM_SET_SREGS").map(drop)
    }

    /// KVM_SET_CPUID2.
    pub fn set_cpuid(&self, table: &CpuidTable) -> Outcome {
        self.send(ioctl::SET_CPUID2, table).granted("KVM_SET_CPUID2").map(drop)
    }

    /// One MSR. `None` when KVM does not give it.
    pub fn msr(&self, index: u32) -> Outcome<Option<u64>> {
        let mut table = MsrTable::of(&[(index, 0)]);
        let read = self.exchange(ioctl::GET_MSRS, &mut table).granted("KVM_GET_MSRS")?;
        Ok((read == 1).then_some(table.entries[0].data))
    }

    /// Sets one MSR; whether KVM took it.
    pub fn set_msr(&self, index: u32, value: u64) -> Outcome<bool> {
        let table = MsrTable::of(&[(index, value)]);
        Ok(self.send(ioctl::SET_MSRS, &table).granted("KVM_SET_MSRS")? == 1)
    }

    /// KVM_CAP_HYPERV_ENLIGHTENED_VMCS: which versions there are.
    pub fn enable_enlightened_vmcs(&self) -> Result<u16, Errno> {
        let mut versions = 0u16;
        let mut cap = kvm_enable_cap { cap: KVM_CAP_HYPERV_ENLIGHTENED_VMCS, ..Default::default() };
        cap.args[0] = std::ptr::from_mut(&mut versions) as u64;
        self.send(ioctl::ENABLE_CAP, &cap).map(|_| versions)
    }
}
