//! /dev/kvm: what the host can offer, and making VMs.

use alloc::vec::Vec;
use core::marker::PhantomData;

use ::vm::Vm;
use host::{Arc, file::NewFile};

use super::{Host, MakeBackend, VmFile, convert};
use crate::caps::Offer;
use crate::dispatch::{MsrRefused, SystemOps};
use crate::errno::Errno;
use crate::uapi::cpuid::KvmCpuidEntry2;

/// The device, for the length of one command.
#[derive(Clone, Copy, Debug)]
pub struct SystemHandle<M> {
    host: &'static Host,
    make: PhantomData<M>,
}

impl<M: MakeBackend> SystemHandle<M> {
    /// The device on this host.
    pub const fn new(host: &'static Host) -> Self {
        Self { host, make: PhantomData }
    }
}

impl<M: MakeBackend> SystemOps for SystemHandle<M> {
    fn offer(&self) -> &Offer {
        &self.host.offer
    }

    fn create_vm(&self) -> Result<i32, Errno> {
        // The parameter may have been changed since the module was loaded.
        let limits =
            ::vm::vm::HostLimits { halt_poll_ns: host::params::halt_poll_ns(), ..self.host.limits };
        let file = Arc::new(VmFile::<M>::new(Vm::new(&limits)?, self.host))?;
        let new = NewFile::new(file.clone(), None).map_err(Errno::from_file)?;
        // Installed last: from then on another thread of the VMM may use the descriptor, and close
        // it.
        file.show_in_debugfs(new.fd());
        Ok(new.install())
    }

    fn supported_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        // One table for all who ask, made at load: no CPUID is executed here.
        convert::cpuid_table(self.host.offered.cpuid.entries())
    }

    fn hyperv_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        // Of /dev/kvm what could be; a vCPU tells what it was given.
        convert::hyperv_table(&self.host.offer, cpuid::ENLIGHTENED_VERSIONS)
    }

    fn emulated_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        convert::cpuid_table(cpuid::EMULATED)
    }

    fn msr_indices(&self) -> Result<Vec<u32>, Errno> {
        collect(msr::lists::saved(self.host.offered.msrs))
    }

    fn feature_msr_indices(&self) -> Result<Vec<u32>, Errno> {
        collect(msr::lists::features(self.host.offered.msrs))
    }

    fn feature_msr(&self, index: u32) -> Result<u64, MsrRefused> {
        self.host.offered.msrs.feature(index).ok_or(MsrRefused)
    }
}

fn collect(indices: impl Iterator<Item = u32>) -> Result<Vec<u32>, Errno> {
    let mut list = Vec::new();
    for index in indices {
        // One at a time: how many of the table this host has is known only at its end.
        list.try_reserve(1)?;
        list.push(index);
    }
    Ok(list)
}
