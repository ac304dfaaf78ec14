//! The VM's table of vCPUs: filled while vCPUs are made, read without a lock ever after.

use core::sync::atomic::{AtomicU32, Ordering};

use alloc::vec::Vec;
use host::{NoMemory, once::Once, smp};

use crate::vcpu_shared::{Request, SharedVcpu};

/// Most vCPUs of a VM (KVM_CAP_MAX_VCPUS).
pub const MAX_VCPUS: usize = 1024;
/// vCPU ids are below this (KVM_CAP_MAX_VCPU_ID).
pub const MAX_VCPU_ID: u32 = 4096;

/// Why a vCPU could not be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddError {
    /// There are enough.
    TooMany,
    /// `-ENOMEM`.
    NoMemory,
}

/// The table.
pub struct VcpuTable {
    slots: Vec<Once<SharedVcpu>>,
    count: AtomicU32,
}

impl VcpuTable {
    /// An empty table.
    pub fn new() -> Result<Self, NoMemory> {
        let mut slots = Vec::new();
        slots.try_reserve_exact(MAX_VCPUS).map_err(|_| NoMemory)?;
        slots.resize_with(MAX_VCPUS, Once::new);
        Ok(Self { slots, count: AtomicU32::new(0) })
    }

    /// Adds a vCPU at place `index`, which is the present count. The VM's lock is held.
    pub fn add(&self, vcpu: SharedVcpu) -> Result<(), AddError> {
        let index = self.count.load(Ordering::Relaxed);
        let slot = self.slots.get(index as usize).ok_or(AddError::TooMany)?;
        slot.set(vcpu).map_err(|_| AddError::NoMemory)?;
        self.count.store(index + 1, Ordering::Release);
        Ok(())
    }

    /// How many there are.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// The vCPU at a place.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&SharedVcpu> {
        self.slots.get(index)?.get()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &SharedVcpu> {
        let count = self.count() as usize;
        self.slots.iter().take(count).filter_map(Once::get)
    }

    /// The vCPU with this id.
    pub fn by_id(&self, id: u32) -> Option<&SharedVcpu> {
        // Ids are usually given in order.
        if let Some(vcpu) = self.get(id as usize)
            && vcpu.id == id
        {
            return Some(vcpu);
        }
        self.iter().find(|v| v.id == id)
    }

    /// Makes a request to all and kicks them.
    pub fn request_all(&self, request: Request) {
        for vcpu in self.iter() {
            vcpu.request_and_kick(request);
        }
    }

    /// Makes a request to all and returns when none is in the guest any more that has not seen it.
    /// Whether there is a vCPU that was asked to leave the guest.
    pub fn request_all_and_wait(&self, request: Request) -> bool {
        for vcpu in self.iter() {
            vcpu.request(request);
        }
        self.leave_guest()
    }

    /// Returns when every vCPU that is in the guest now has left it once. Whether there was one.
    pub fn leave_guest(&self) -> bool {
        let mut any = false;
        smp::sync_cpus(self.iter().filter_map(|v| v.running_on()).inspect(|_| any = true));
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu_shared::VcpuShared;

    #[test]
    fn vcpus_are_found_by_id_whatever_their_order() {
        let table = VcpuTable::new().unwrap();
        for (index, id) in [3, 0, 7].into_iter().enumerate() {
            table.add(VcpuShared::new(id, index as u32, index == 0, true).unwrap()).unwrap();
        }
        assert_eq!(table.count(), 3);
        assert_eq!(table.by_id(7).unwrap().index, 2);
        assert_eq!(table.by_id(3).unwrap().index, 0);
        assert!(table.by_id(1).is_none());
        table.request_all(Request::FlushTlb);
        assert!(table.iter().all(|v| v.has_requests()));
    }
}
