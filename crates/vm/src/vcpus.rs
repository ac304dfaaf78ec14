//! The VM's table of vCPUs: filled while vCPUs are made, read without a lock ever after.
//!
//! Why without a lock: an interrupt handler looks a vCPU up here, and a lock that it may take would have to spin with
//! interrupts off for everybody. A vCPU never goes before its VM does, so a place that is filled stays as it is.
//!
//! Why in parts: there may be 4096 vCPUs and four times as many ids, and most VMs have a handful.

use core::sync::atomic::{
    AtomicU16, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use alloc::vec::Vec;
use host::{Arc, GuestIndex, NoMemory, once::Once, smp, steps};
use irqchip::lapic::IdCensus;

use crate::vcpu_shared::{Request, SharedVcpu};

/// Most vCPUs of a VM (KVM_CAP_MAX_VCPUS).
pub const MAX_VCPUS: usize = 4096;
/// vCPU ids are below this (KVM_CAP_MAX_VCPU_ID): topologies leave gaps.
pub const MAX_VCPU_ID: u32 = 4 * MAX_VCPUS as u32;

/// vCPUs whose places are made at once.
const SLOTS: usize = 64;
/// Ids whose places are noted at once.
const IDS: usize = 256;

type Slots = [Once<SharedVcpu>; SLOTS];
/// The place of each id, plus one; 0: nobody has it.
type Places = [AtomicU16; IDS];

/// Why a vCPU could not be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddError {
    /// There are enough, or the id is none.
    TooMany,
    /// There is no memory for it (`-ENOMEM`).
    NoMemory,
}

impl From<NoMemory> for AddError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// The table. Its parts are made when the first vCPU needs them.
pub struct VcpuTable {
    slots: Vec<Once<Slots>>,
    places: Vec<Once<Places>>,
    count: AtomicU32,
    pub(crate) census: Arc<IdCensus>,
}

/// `count` empty places.
fn empty<T>(count: usize) -> Result<Vec<Once<T>>, NoMemory> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(|_| NoMemory)?;
    list.resize_with(count, Once::new);
    Ok(list)
}

/// The part of a list, made if it is not there.
#[inline(never)]
fn part<T>(list: &[Once<T>], index: usize, make: fn() -> T) -> Result<&T, AddError> {
    let part = GuestIndex::from(index).of(list).ok_or(AddError::TooMany)?;
    // The VM's lock is held: nobody else makes it in between.
    if part.get().is_none() {
        part.set(make())?;
    }
    part.get().ok_or(AddError::NoMemory)
}

impl VcpuTable {
    /// An empty table.
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self {
            slots: empty(MAX_VCPUS / SLOTS)?,
            places: empty(MAX_VCPU_ID as usize / IDS)?,
            count: AtomicU32::new(0),
            census: Arc::new(IdCensus::default())?,
        })
    }

    /// Adds a vCPU at place `index`, which is the present count. The VM's lock is held.
    pub fn add(&self, vcpu: SharedVcpu) -> Result<(), AddError> {
        // Relaxed: with the VM's lock held nobody else counts.
        let index = self.count.load(Relaxed);
        let (id, at) = (vcpu.id as usize, index as usize);
        let slots = part(&self.slots, at / SLOTS, || [const { Once::new() }; SLOTS])?;
        let places = part(&self.places, id / IDS, || [const { AtomicU16::new(0) }; IDS])?;
        // Before it is found: a message must not be sent by an id that the census does not know of.
        vcpu.lapic.join(&self.census)?;
        slots[at % SLOTS].set(vcpu)?;
        // After the slot, and the id after both: whoever finds a number or an id finds the vCPU.
        self.count.store(index + 1, Release);
        // 4,096 places: one more than the last fits 16 bits.
        places[id % IDS].store(index as u16 + 1, Release);
        Ok(())
    }

    /// How many there are.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Who among them answers to another id than its own.
    #[inline]
    pub fn census(&self) -> &IdCensus {
        &self.census
    }

    /// The vCPU at a place.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&SharedVcpu> {
        GuestIndex::from(index / SLOTS).of(&self.slots)?.get()?[index % SLOTS].get()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &SharedVcpu> {
        // Parts are filled in order: behind the first that is missing there is no vCPU.
        let slots = self.slots.iter().map_while(Once::get).flatten();
        steps::each(slots.take(self.count() as usize).filter_map(Once::get))
    }

    /// The vCPU with this id.
    #[inline]
    pub fn by_id(&self, id: u32) -> Option<&SharedVcpu> {
        let id = id as usize;
        // The id is the guest's: masked, not only compared (ADR 39).
        let places = GuestIndex::from(id / IDS).of(&self.places)?.get()?;
        self.get(usize::from(places[id % IDS].load(Acquire)).checked_sub(1)?)
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
        // All requests before the first wait: the IPIs then go out together, and CPUs leave the
        // guest in parallel.
        for vcpu in self.iter() {
            vcpu.request(request);
        }
        self.leave_guest()
    }

    /// Returns when every vCPU that is in the guest now has left it once. Whether there was one.
    pub fn leave_guest(&self) -> bool {
        let mut any = false;
        // An iterator that writes the modes one by one: a vCPU that enters behind the look finds
        // the request.
        smp::sync_cpus(self.iter().filter_map(|v| v.running_on()).inspect(|_| any = true));
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu_shared::VcpuShared;
    use irqchip::lapic::CpuRole;

    #[test]
    fn all_vcpus_with_gaps_between_their_ids_are_found() {
        let table = VcpuTable::new().unwrap();
        for index in 0..MAX_VCPUS as u32 {
            table
                .add(VcpuShared::new(4 * index + 3, index, CpuRole::Application, true).unwrap())
                .unwrap();
        }
        assert!((0..MAX_VCPUS as u32).all(|i| table.by_id(4 * i + 3).unwrap().index == i));
        assert!(table.iter().enumerate().all(|(i, v)| v.index as usize == i));
        assert_eq!(table.iter().count(), MAX_VCPUS);
        let more = VcpuShared::new(0, 0, CpuRole::Application, true).unwrap();
        assert_eq!(table.add(more), Err(AddError::TooMany));
        let table = VcpuTable::new().unwrap();
        let beyond = VcpuShared::new(MAX_VCPU_ID, 0, CpuRole::Application, true).unwrap();
        assert_eq!(table.add(beyond), Err(AddError::TooMany));
    }

    #[test]
    fn vcpus_are_found_by_id_whatever_their_order() {
        let table = VcpuTable::new().unwrap();
        for (index, id) in [3, 0, 7].into_iter().enumerate() {
            table
                .add(
                    VcpuShared::new(id, index as u32, CpuRole::bootstrap_if(index == 0), true)
                        .unwrap(),
                )
                .unwrap();
        }
        assert_eq!(table.count(), 3);
        assert_eq!(table.by_id(7).unwrap().index, 2);
        assert_eq!(table.by_id(3).unwrap().index, 0);
        assert!(table.by_id(1).is_none());
        table
            .add(VcpuShared::new(MAX_VCPU_ID - 1, 3, CpuRole::Application, true).unwrap())
            .unwrap();
        assert_eq!(table.by_id(MAX_VCPU_ID - 1).unwrap().index, 3);
        for nobody in [MAX_VCPU_ID - 2, MAX_VCPU_ID, MAX_VCPU_ID + 3, u32::MAX] {
            assert!(table.by_id(nobody).is_none());
        }
        table.request_all(Request::FlushTlb);
        assert!(table.iter().all(|v| v.has_requests()));
    }
}
