//! Coalesced writes: what a guest writes into a zone is put into a ring that user space reads when it
//! likes, and the guest goes on. KVM API §4.116.
//!
//! The table of zones is replaced whole when it changes, like that of ioeventfds, in whose filter the
//! zones are as well.

use core::sync::atomic::Ordering::*;

use alloc::vec::Vec;
use host::{
    GuestIndex, KBox, NoMemory,
    page::Page,
    srcu::Srcu,
    sync::{Mutex, SpinLock},
};

use super::{Space, ioeventfd::filter_bit};

/// Most zones in each address space.
pub const MAX_ZONES: usize = 1000;

/// Words of 32 bits in front of the ring's entries, and in each of them: the address in two, the
/// length, the space, the data in two.
const HEAD: usize = 2;
const ENTRY: usize = 6;
/// Entries of the ring; one of them is always free.
pub const RING_ENTRIES: u32 = ((1024 - HEAD) / ENTRY) as u32;

/// Where a guest's writes are coalesced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Which address space.
    pub space: Space,
    /// The zone's first byte.
    pub address: u64,
    /// The zone's length in bytes.
    pub len: u32,
}

/// Why a zone is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneError {
    /// There are [`MAX_ZONES`].
    Full,
    /// There is no memory for it (`-ENOMEM`).
    NoMemory,
}

impl From<NoMemory> for ZoneError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

impl Zone {
    /// Whether these bytes lie in it. In a zone that wraps nothing does.
    fn covers(&self, address: u64, len: u64) -> bool {
        // Wrapping counts as outside: the VMM chooses the zone's end and the guest the write's, and
        // neither may reach around 2^64.
        let end = self.address.checked_add(self.len.into());
        let last = address.checked_add(len);
        address >= self.address && last.is_some_and(|last| end.is_some_and(|end| last <= end))
    }

    /// Filter bits of the addresses at which a write into it may begin.
    fn filter_bits(&self) -> u64 {
        // 64 bytes or more meet every bit of the filter, and a VMM may name a zone of 4 GiB: no
        // loop over its length.
        if self.len >= 64 {
            return u64::MAX;
        }
        (0..u64::from(self.len)).fold(0, |b, at| b | filter_bit(self.address.wrapping_add(at)))
    }
}

/// The zones of a VM and its ring.
pub struct Coalesced {
    zones: Srcu<Vec<Zone>>,
    /// Serialises those who change the zones. Taken before the ioeventfds' own.
    changing: Mutex<()>,
    /// `struct kvm_coalesced_mmio_ring`. User space may write anything into it at any time.
    ring: Page,
    /// Held while an entry is appended.
    appending: SpinLock<()>,
}

impl Coalesced {
    /// No zones, and an empty ring.
    pub(super) fn new() -> Result<Self, NoMemory> {
        Ok(Self {
            zones: Srcu::new(KBox::new(Vec::new())?)?,
            changing: Mutex::new(()),
            ring: Page::zeroed()?,
            appending: SpinLock::new(()),
        })
    }

    /// The page of the ring, which user space maps.
    pub fn page(&self) -> &Page {
        &self.ring
    }

    /// Adds a zone; the same may be there several times. `filter` is told, for each space, the filter
    /// bits of all zones. Process context.
    pub(super) fn register(
        &self,
        zone: Zone,
        filter: impl Fn(Space, u64),
    ) -> Result<(), ZoneError> {
        let _changing = self.changing.lock();
        // Built beside the old one: until it is published nothing has changed, and a lack of memory
        // changes nothing.
        let mut new = Vec::new();
        {
            let zones = self.zones.read();
            // As stock KVM bounds its bus, since each write walks the zones.
            if zones.iter().filter(|z| z.space == zone.space).count() >= MAX_ZONES {
                return Err(ZoneError::Full);
            }
            new.try_reserve_exact(zones.len() + 1).map_err(|_| NoMemory)?;
            new.extend(zones.iter().copied());
        }
        new.push(zone);
        Ok(self.publish(new, filter)?)
    }

    /// Removes every zone that covers `range`. No write is appended for it any more when this returns.
    pub(super) fn unregister(
        &self,
        range: Zone,
        filter: impl Fn(Space, u64),
    ) -> Result<(), NoMemory> {
        // As in stock KVM: a zone goes when the range lies in it, whole.
        let goes = |z: &Zone| z.space == range.space && z.covers(range.address, range.len.into());
        let _changing = self.changing.lock();
        let mut new = Vec::new();
        {
            let zones = self.zones.read();
            if !zones.iter().any(goes) {
                return Ok(());
            }
            new.try_reserve_exact(zones.len()).map_err(|_| NoMemory)?;
            new.extend(zones.iter().filter(|z| !goes(z)).copied());
        }
        self.publish(new, filter)
    }

    fn publish(&self, zones: Vec<Zone>, filter: impl Fn(Space, u64)) -> Result<(), NoMemory> {
        let zones = KBox::new(zones)?;
        // The filter first, as for ioeventfds: a bit too many costs a look-up, one too few would
        // lose a write.
        for space in [Space::Memory, Space::Port] {
            let of_space = zones.iter().filter(|z| z.space == space);
            filter(space, of_space.fold(0, |b, z| b | z.filter_bits()));
        }
        drop(self.zones.replace(zones));
        Ok(())
    }

    /// A guest's write of at most 8 bytes. False when it lies in no zone or finds no room.
    pub(super) fn append(&self, space: Space, address: u64, data: &[u8]) -> bool {
        let len = data.len() as u64;
        // The ring's entry has eight bytes of data.
        if len > 8 {
            return false;
        }
        // No vCPU appends for a zone that has gone: the section ends after the entry is there.
        let zones = self.zones.read();
        zones.iter().any(|z| z.space == space && z.covers(address, len))
            && self.push(space, address, data)
    }

    fn push(&self, space: Space, address: u64, data: &[u8]) -> bool {
        let [first, last, entries @ ..] = self.ring.half_words();
        let _appending = self.appending.lock();
        // Both are user space's to spoil.
        let (from, to) = (first.load(Acquire), last.load(Relaxed));
        if from >= RING_ENTRIES {
            return false;
        }
        let Some(place) = GuestIndex::from(to).below(RING_ENTRIES as usize) else { return false };
        // `to` is below RING_ENTRIES here, so this cannot overflow.
        let next = (to + 1) % RING_ENTRIES;
        // Full: the write goes to user space, which empties the ring on its way.
        if next == from {
            return false;
        }
        let mut bytes = [0; 8];
        // Bytes behind a short write are zero, not what the last entry left there.
        for (out, byte) in bytes.iter_mut().zip(data) {
            *out = *byte;
        }
        let value = u64::from_le_bytes(bytes);
        let words = [
            address as u32,
            (address >> 32) as u32,
            data.len() as u32,
            u32::from(space == Space::Port),
            value as u32,
            (value >> 32) as u32,
        ];
        for (out, word) in entries.iter().skip(place * ENTRY).zip(words) {
            out.store(word, Relaxed);
        }
        // The entry before the index that shows it.
        last.store(next, Release);
        true
    }
}

#[cfg(test)]
mod tests;
