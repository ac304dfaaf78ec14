//! Ioeventfds: a guest's write to an address signals an eventfd instead of leaving to the VMM.
//! KVM API §4.59.
//!
//! The table is replaced whole when it changes; a vCPU that exits looks it up without a lock.
//!
//! Why ours at all, when the VMM would see the write anyway: a device's thread in the VMM is woken by the eventfd while
//! the guest goes on. Leaving to user space would stop the vCPU until KVM_RUN is called again, for the same news.

use core::sync::atomic::{AtomicU64, Ordering::*};

use alloc::vec::Vec;
use host::{Arc, BadFd, KBox, NoMemory, event::EventFd, srcu::Srcu, sync::Mutex};

/// Most ioeventfds in each address space. Stock KVM has no limit: there they do not count among the devices of its
/// bus. Here each change copies the table, and a bound keeps a VMM's cost to itself.
pub const MAX_IOEVENTFDS: usize = 8192;

/// Most ioeventfds of one address, which differ in the value that they wait for: a look-up walks them with interrupts off.
pub const MAX_AT_ADDRESS: usize = 1000;

/// An address space that a guest writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// The address is one of guest-physical memory.
    Memory,
    /// The address is an I/O port's.
    Port,
}

/// What is written for an eventfd to be signalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoEvent {
    /// Whether memory or ports are written.
    pub space: Space,
    /// First byte of the write.
    pub address: u64,
    /// The write's length: 1, 2, 4 or 8; 0 for any.
    pub len: u32,
    /// The value, `None` for any.
    pub datamatch: Option<u64>,
}

/// Why an ioeventfd is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEventError {
    /// A length that does not exist, a range that wraps, a value to match without a length.
    Invalid,
    /// A write could match this and one that is there.
    Exists,
    /// There is no such ioeventfd.
    NotFound,
    /// There are [`MAX_IOEVENTFDS`], or [`MAX_AT_ADDRESS`] of them at the address.
    Full,
    /// The descriptor is no eventfd.
    BadFd(BadFd),
    /// There is no memory for it (`-ENOMEM`).
    NoMemory,
}

impl From<BadFd> for IoEventError {
    fn from(error: BadFd) -> Self {
        Self::BadFd(error)
    }
}

impl From<NoMemory> for IoEventError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

struct Entry {
    what: IoEvent,
    event: Arc<EventFd>,
}

impl Entry {
    fn copy(&self) -> Self {
        // The eventfd is shared: a vCPU may be signalling it by the old table.
        Self { what: self.what, event: self.event.clone() }
    }
}

impl IoEvent {
    fn valid(&self) -> bool {
        matches!(self.len, 0 | 1 | 2 | 4 | 8)
            && self.address.checked_add(u64::from(self.len)).is_some()
            && !(self.len == 0 && self.datamatch.is_some())
    }

    /// Whether one write could match both.
    fn clashes(&self, other: &Self) -> bool {
        // Two that no single write could match are allowed: a device has one per value.
        let same_value = match (self.datamatch, other.datamatch) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        // The length counts too: writes of different lengths are different news.
        self.address == other.address
            && (self.len == 0 || other.len == 0 || (self.len == other.len && same_value))
    }

    #[inline]
    fn matches(&self, len: u32, value: u64) -> bool {
        if self.len == 0 {
            return true;
        }
        // A value wider than the write is that of none, as on stock KVM.
        let mask = u64::MAX >> 64u32.saturating_sub(self.len * 8).min(63);
        self.len == len && self.datamatch.is_none_or(|wanted| wanted == value & mask)
    }
}

/// Both address spaces, each sorted by address.
#[derive(Default)]
struct Table {
    memory: Vec<Entry>,
    port: Vec<Entry>,
}

impl Table {
    fn space(&self, space: Space) -> &Vec<Entry> {
        match space {
            Space::Memory => &self.memory,
            Space::Port => &self.port,
        }
    }

    fn space_mut(&mut self, space: Space) -> &mut Vec<Entry> {
        match space {
            Space::Memory => &mut self.memory,
            Space::Port => &mut self.port,
        }
    }

    /// A copy with room for `more` in each space.
    fn copy(&self, more: usize) -> Result<Self, NoMemory> {
        let mut new = Self::default();
        for space in [Space::Memory, Space::Port] {
            let (from, to) = (self.space(space), new.space_mut(space));
            to.try_reserve_exact(from.len() + more).map_err(|_| NoMemory)?;
            // Both spaces, though one changes: a table is published whole.
            to.extend(from.iter().map(Entry::copy));
        }
        Ok(new)
    }
}

/// Filter bits of others who wait for a guest's writes.
#[derive(Default)]
struct Others {
    memory: u64,
    port: u64,
}

impl Others {
    fn of(&mut self, space: Space) -> &mut u64 {
        match space {
            Space::Memory => &mut self.memory,
            Space::Port => &mut self.port,
        }
    }
}

/// The ioeventfds of a VM.
pub struct IoEventFds {
    table: Srcu<Table>,
    /// Serialises those who change the table, and holds what else is in the filters.
    changing: Mutex<Others>,
    /// A bit for every address that may be in the table, or that others wait for: most writes are
    /// dismissed by one load.
    port_filter: AtomicU64,
    memory_filter: AtomicU64,
}

/// The filter bit of an address.
#[inline]
pub(super) const fn filter_bit(address: u64) -> u64 {
    // Devices' registers differ in the low bits, devices in those above.
    1 << ((address ^ address >> 6 ^ address >> 12) & 63)
}

impl IoEventFds {
    /// A list without any ioeventfd.
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self {
            table: Srcu::new(KBox::new(Table::default())?)?,
            changing: Mutex::new(Others::default()),
            port_filter: AtomicU64::new(0),
            memory_filter: AtomicU64::new(0),
        })
    }

    fn filter(&self, space: Space) -> &AtomicU64 {
        match space {
            Space::Memory => &self.memory_filter,
            Space::Port => &self.port_filter,
        }
    }

    fn publish(&self, table: Table, others: &mut Others) -> Result<(), NoMemory> {
        let table = KBox::new(table)?;
        // The filter first: a bit too many costs a look-up, one too few would lose a write.
        for space in [Space::Memory, Space::Port] {
            self.set_filter(space, &table, *others.of(space));
        }
        drop(self.table.replace(table));
        Ok(())
    }

    fn set_filter(&self, space: Space, table: &Table, others: u64) {
        let bits = table.space(space).iter().fold(others, |b, e| b | filter_bit(e.what.address));
        // Release: who sees the bits sees what the table was before, and looks under SRCU for what
        // it is.
        self.filter(space).store(bits, Release);
    }

    /// Lets writes with these filter bits pass too, in place of those that were said before.
    pub(super) fn set_others(&self, space: Space, bits: u64) {
        let mut others = self.changing.lock();
        *others.of(space) = bits;
        self.set_filter(space, &self.table.read(), bits);
    }

    /// Adds an ioeventfd. Process context.
    ///
    /// # Errors
    /// All of [`IoEventError`] but `NotFound`.
    pub fn assign(&self, what: IoEvent, fd: i32) -> Result<(), IoEventError> {
        if !what.valid() {
            return Err(IoEventError::Invalid);
        }
        // First, as in stock KVM: a bad descriptor goes before EEXIST and ENOSPC.
        let event = Arc::new(EventFd::get(fd)?)?;
        let mut others = self.changing.lock();
        let mut new = {
            let table = self.table.read();
            let present = table.space(what.space);
            if present.iter().any(|e| e.what.clashes(&what)) {
                return Err(IoEventError::Exists);
            }
            // A bound for the copy of the table at each change. Stock KVM has none but the
            // descriptors.
            let there = present.iter().filter(|e| e.what.address == what.address).count();
            if present.len() >= MAX_IOEVENTFDS || there >= MAX_AT_ADDRESS {
                return Err(IoEventError::Full);
            }
            table.copy(1)?
        };
        let entries = new.space_mut(what.space);
        // Sorted, so that an address is found by thirteen compares among eight thousand.
        let place = entries.partition_point(|e| e.what.address <= what.address);
        entries.insert(place, Entry { what, event });
        Ok(self.publish(new, &mut others)?)
    }

    /// Removes the one with the same eventfd, address, length and value.
    ///
    /// # Errors
    /// `NotFound`, `BadFd`, `NoMemory`.
    pub fn deassign(&self, what: IoEvent, fd: i32) -> Result<(), IoEventError> {
        let event = EventFd::get(fd)?;
        let mut others = self.changing.lock();
        let mut new = self.table.read().copy(0)?;
        let entries = new.space_mut(what.space);
        // The same eventfd, whatever the number of the descriptor.
        let found = entries.iter().position(|e| e.what == what && e.event.same(&event));
        entries.remove(found.ok_or(IoEventError::NotFound)?);
        Ok(self.publish(new, &mut others)?)
    }

    /// Whether a write to this address may signal or be waited for by others: one load, for the exit
    /// path.
    #[inline]
    pub fn may_match(&self, space: Space, address: u64) -> bool {
        // Relaxed: a write that races with the ioctl may count as before it or after.
        self.filter(space).load(Relaxed) & filter_bit(address) != 0
    }

    /// A guest's write: signals the eventfd that it matches. True when there was one.
    #[inline]
    pub fn signal(&self, space: Space, address: u64, len: u32, value: u64) -> bool {
        self.may_match(space, address) && self.look_up(space, address, len, value)
    }

    fn look_up(&self, space: Space, address: u64, len: u32, value: u64) -> bool {
        let table = self.table.read();
        let entries = table.space(space);
        // Several with one address and different values stand side by side.
        let first = entries.partition_point(|e| e.what.address < address);
        let found = entries
            .iter()
            .skip(first)
            .take_while(|e| e.what.address == address)
            .find(|e| e.what.matches(len, value));
        match found {
            Some(entry) => {
                entry.event.signal(1);
                true
            }
            None => false,
        }
    }

    /// A guest's OUT.
    #[inline]
    pub fn signal_pio(&self, port: u16, len: u32, value: u32) -> bool {
        self.signal(Space::Port, u64::from(port), len, u64::from(value))
    }

    /// A guest's store of `data` (1 to 8 bytes).
    #[inline]
    pub fn signal_mmio(&self, address: u64, data: &[u8]) -> bool {
        if !self.may_match(Space::Memory, address) {
            return false;
        }
        // Little endian, as the guest stored it.
        let value = data.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
        self.look_up(Space::Memory, address, data.len() as u32, value)
    }
}
