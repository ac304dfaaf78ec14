//! Reading and writing guest-physical memory on behalf of the guest or of a device.
//!
//! Two ways: through the VMM's mapping, which may sleep and runs in the VMM's address space; and
//! through the TDP tables with interrupts off, which reaches only what the guest itself could
//! reach without a fault.

use host::user;
use mmu::tdp::page_of;
use mmu::walk::{GuestMemory, Swap};
use mmu::{MemSlot, Section, View};
use x86::Gpa;

use super::{MemoryError, VmMemory};

/// Splits `length` bytes at `gpa` into stretches that one slot holds: calls
/// `each(slot, gpa, offset, bytes)` for each.
fn stretches(
    memory: &VmMemory,
    gpa: Gpa,
    length: usize,
    most: impl Fn(Gpa) -> usize,
    mut each: impl FnMut(&MemSlot, Gpa, usize, usize) -> Result<(), MemoryError>,
) -> Result<(), MemoryError> {
    let slots = memory.slots();
    let mut done = 0;
    // The end of a slot is no end of the access: two slots may lie side by side.
    while done < length {
        // The guest or the VMM chooses address and length; the sum may wrap.
        let at = gpa.0.checked_add(done as u64).map(Gpa).ok_or(MemoryError::Unbacked)?;
        let slot = slots.find(at.gfn()).ok_or(MemoryError::Unbacked)?;
        let left = slot.end().gpa().0.wrapping_sub(at.0);
        // The slot's end, the access's, or what the caller takes at once: whichever comes first.
        let bytes = usize::try_from(left).unwrap_or(usize::MAX).min(length - done).min(most(at));
        each(slot, at, done, bytes)?;
        done += bytes;
    }
    Ok(())
}

fn to_page_end(gpa: Gpa) -> usize {
    0x1000 - gpa.page_offset()
}

fn host_address(slot: &MemSlot, gpa: Gpa) -> x86::Hva {
    x86::Hva(slot.hva_of(gpa.gfn()).0 | gpa.page_offset() as u64)
}

impl VmMemory {
    /// Reads guest memory, across pages and slots. May sleep. On error `into` holds anything.
    pub fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        stretches(
            self,
            gpa,
            into.len(),
            |_| usize::MAX,
            |slot, at, done, bytes| {
                let part = into.get_mut(done..done + bytes).ok_or(MemoryError::Fault)?;
                Ok(user::read(host_address(slot, at), part)?)
            },
        )
    }

    /// Reads guest memory that lies within one page. May sleep.
    pub fn read_in_page(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        let slots = self.slots();
        // Slots and their pages meet at page bounds, so that one look-up is enough here.
        let slot = slots.find(gpa.gfn()).ok_or(MemoryError::Unbacked)?;
        Ok(user::read(host_address(slot, gpa), into)?)
    }

    /// Writes guest memory, across pages and slots, and marks it dirty. May sleep. On error a part
    /// may have been written.
    pub fn write(&self, gpa: Gpa, from: &[u8]) -> Result<(), MemoryError> {
        // Page by page, so that what was written before a fault is marked.
        stretches(self, gpa, from.len(), to_page_end, |slot, at, done, bytes| {
            // Asked here: user space may well be able to write there, and the guest not.
            if slot.is_readonly() {
                return Err(MemoryError::ReadOnly);
            }
            let part = from.get(done..done + bytes).ok_or(MemoryError::Fault)?;
            user::write(host_address(slot, at), part)?;
            // Marked after the write: a log that is taken between a mark and the write would lose
            // the page.
            mark(slot, at, bytes);
            self.note_shadow_write(at, bytes);
            Ok(())
        })
    }

    /// Atomically replaces `old` by `new` in `size` bytes (1, 2, 4, 8, naturally aligned) of guest
    /// memory, and marks it dirty. Whether `old` stood there. May sleep.
    pub fn cmpxchg(&self, gpa: Gpa, size: usize, old: u64, new: u64) -> Result<bool, MemoryError> {
        let slots = self.slots();
        let slot = slots.find(gpa.gfn()).ok_or(MemoryError::Unbacked)?;
        // Asked of the slot: the VMM's mapping may well be writable.
        if slot.is_readonly() {
            return Err(MemoryError::ReadOnly);
        }
        // By the VMM's mapping, so that the kernel brings the page and breaks a shared one.
        let swapped = user::cmpxchg(host_address(slot, gpa), size, old, new)?;
        if swapped {
            // Only what was exchanged is a write; a failed exchange leaves the page as it was.
            slot.mark_dirty(gpa.gfn());
            self.note_shadow_write(gpa, size);
        }
        Ok(swapped)
    }

    /// The TDP tables as seen in this section: for [`mmu::CodeFetch`] and the functions below.
    #[inline]
    pub fn view<'a>(&'a self, section: Section<'a>) -> View<'a> {
        self.tdp.view(section)
    }

    /// Whether there are shadow pages, which have to hear of what is written.
    #[inline]
    pub fn has_shadow(&self) -> bool {
        self.shadow.is_some()
    }

    /// Reads guest memory with interrupts off, without locks. `false`: not mapped in the TDP
    /// tables, or not ordinary memory; `into` then holds anything.
    pub fn read_irqs_off(&self, view: &View<'_>, gpa: Gpa, into: &mut [u8]) -> bool {
        let mut rest = into;
        let mut at = gpa;
        while !rest.is_empty() {
            let bytes = rest.len().min(4096 - at.page_offset());
            let (part, behind) = rest.split_at_mut(bytes);
            // Page by page: the tables say nothing of the next one.
            let Some(page) = page_of(view, at) else { return false };
            if !view.copy_from(&page, at.page_offset(), part) {
                return false;
            }
            rest = behind;
            at = Gpa(at.0.wrapping_add(bytes as u64));
        }
        true
    }

    /// Writes guest memory with interrupts off, without locks: only where the guest itself could
    /// write now, so that the page is dirty already for the log and for the host. `false`: not so, or
    /// somebody works on the shadow pages; a part may have been written when the range crosses a
    /// page.
    pub fn write_irqs_off(&self, view: &View<'_>, gpa: Gpa, from: &[u8]) -> bool {
        // Held from before the write to the note: in between, a settled table would count as
        // unchanged.
        let mut guard = None;
        // Tried and not waited for: interrupts are off, and its holder may have much to do.
        if let Some(shadow) = &self.shadow {
            guard = shadow.try_lock();
            if guard.is_none() {
                return false;
            }
        }
        let mut rest = from;
        let mut at = gpa;
        while !rest.is_empty() {
            let bytes = rest.len().min(4096 - at.page_offset());
            let (part, behind) = rest.split_at(bytes);
            let Some(page) = page_of(view, at) else { return false };
            if !view.copy_to(&page, at.page_offset(), part) {
                return false;
            }
            if let Some(guard) = &mut guard {
                guard.note_write(at.gfn());
            }
            rest = behind;
            at = Gpa(at.0.wrapping_add(bytes as u64));
        }
        true
    }
}

fn mark(slot: &MemSlot, gpa: Gpa, bytes: usize) {
    // Of no bytes there is no last one: the subtraction below would wrap.
    if slot.dirty.is_none() || bytes == 0 {
        return;
    }
    let last = gpa.0.saturating_add(bytes as u64 - 1) >> 12;
    for gfn in gpa.gfn().0..=last {
        slot.mark_dirty(x86::Gfn(gfn));
    }
}

/// Guest memory for walks that may sleep.
impl GuestMemory for VmMemory {
    type Error = MemoryError;

    fn read_u64(&self, gpa: Gpa) -> Result<u64, MemoryError> {
        let mut bytes = [0; 8];
        self.read_in_page(gpa, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn read_u32(&self, gpa: Gpa) -> Result<u32, MemoryError> {
        let mut bytes = [0; 4];
        self.read_in_page(gpa, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn cmpxchg_u64(&self, gpa: Gpa, old: u64, new: u64) -> Result<Swap, MemoryError> {
        swap(self.cmpxchg(gpa, 8, old, new))
    }

    fn cmpxchg_u32(&self, gpa: Gpa, old: u32, new: u32) -> Result<Swap, MemoryError> {
        swap(self.cmpxchg(gpa, 4, old.into(), new.into()))
    }
}

fn swap(result: Result<bool, MemoryError>) -> Result<Swap, MemoryError> {
    match result {
        Ok(true) => Ok(Swap::Done),
        Ok(false) => Ok(Swap::Changed),
        Err(MemoryError::ReadOnly) => Ok(Swap::ReadOnly),
        Err(error) => Err(error),
    }
}
