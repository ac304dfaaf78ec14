//! Memslots: which guest frames are backed by which host-virtual addresses.
//!
//! [`MemSlots`] is an immutable table, sorted by guest frame. A change builds a new table from the
//! former one, which the VM publishes whole, so that readers need no lock. The rules and refusals
//! of KVM_SET_USER_MEMORY_REGION (KVM API §4.35) are in [`MemSlots::change`].

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use host::GuestIndex;
use host::arc::Arc;
use host::boxed::KBox;
use host::error::NoMemory;
use x86::{Gfn, Gpa, Hva};

use crate::dirty::DirtyBitmap;

/// Slots that user space may use (`KVM_CAP_NR_MEMSLOTS`).
pub const USER_SLOTS: u32 = 32764;
/// Pages that one slot may have: one less than 2^31.
pub const MAX_PAGES: u64 = (1 << 31) - 1;

/// `KVM_MEM_LOG_DIRTY_PAGES` and `KVM_MEM_READONLY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotFlags(u32);

impl SlotFlags {
    /// Writes to the slot are logged.
    pub const LOG_DIRTY: Self = Self(1 << 0);
    /// Guest writes become MMIO exits.
    pub const READONLY: Self = Self(1 << 1);

    /// From the UAPI's bits; `None` when an unknown one is set.
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !(Self::LOG_DIRTY.0 | Self::READONLY.0) == 0 { Some(Self(bits)) } else { None }
    }

    /// The UAPI's bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether all bits of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One memslot: `npages` guest frames from `base`, backed by user memory from `hva`.
#[derive(Clone, Debug)]
pub struct MemSlot {
    /// The VMM's number for it, below [`USER_SLOTS`].
    pub id: u16,
    /// Dirty logging, read-only.
    pub flags: SlotFlags,
    /// First guest frame.
    pub base: Gfn,
    /// Number of 4 KiB pages, at least 1.
    pub npages: u64,
    /// First host-virtual address.
    pub hva: Hva,
    /// Generation of the table in which the slot last changed.
    pub generation: u64,
    /// The dirty log, when `LOG_DIRTY` is set.
    pub dirty: Option<Arc<DirtyBitmap>>,
}

impl MemSlot {
    /// The frame behind the last one.
    #[inline]
    pub fn end(&self) -> Gfn {
        Gfn(self.base.0.wrapping_add(self.npages))
    }

    /// Whether the frame lies in the slot.
    #[inline]
    pub fn contains(&self, gfn: Gfn) -> bool {
        gfn.0.wrapping_sub(self.base.0) < self.npages
    }

    /// Index of a frame within the slot. Meaningful for frames that lie in it.
    #[inline]
    pub fn index(&self, gfn: Gfn) -> u64 {
        gfn.0.wrapping_sub(self.base.0)
    }

    /// Host-virtual address of a frame of the slot.
    #[inline]
    pub fn hva_of(&self, gfn: Gfn) -> Hva {
        let page = GuestIndex::new(self.index(gfn)).below(self.npages as usize).unwrap_or(0);
        Hva(self.hva.0.wrapping_add((page as u64) << 12))
    }

    /// Whether guest writes are refused.
    #[inline]
    pub fn is_readonly(&self) -> bool {
        self.flags.contains(SlotFlags::READONLY)
    }

    /// Marks a frame of the slot dirty, if the slot logs.
    #[inline]
    pub fn mark_dirty(&self, gfn: Gfn) {
        if let Some(dirty) = &self.dirty {
            dirty.mark(self.index(gfn));
        }
    }

    /// The frames `first..end` of this slot that the host range `start..end` backs.
    pub fn frames_of(&self, start: Hva, end: Hva) -> Option<(Gfn, Gfn)> {
        let bytes = self.npages << 12;
        let from = start.0.saturating_sub(self.hva.0).min(bytes);
        let to = end.0.saturating_sub(self.hva.0).min(bytes);
        if from >= to {
            return None;
        }
        let first = self.base.0.wrapping_add(from >> 12);
        Some((Gfn(first), Gfn(self.base.0.wrapping_add(to.div_ceil(4096)))))
    }

    /// The largest level (1 to 3) at which the slot can map `gfn` by one entry: guest and host
    /// address agree modulo the page size, and the whole page lies in the slot.
    #[inline]
    pub fn max_level(&self, gfn: Gfn, at_most: u8) -> u8 {
        let mut level = at_most.clamp(1, 3);
        while level > 1 {
            let pages = 1u64 << (9 * (u32::from(level) - 1));
            let first = gfn.0 & !(pages - 1);
            let skew = (self.base.0 ^ (self.hva.0 >> 12)) & (pages - 1);
            if skew == 0 && first >= self.base.0 && first.wrapping_add(pages) <= self.end().0 {
                break;
            }
            level -= 1;
        }
        level
    }
}

/// `struct kvm_userspace_memory_region`, as numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Bits 15:0 the slot's id, bits 31:16 the address space, which must be 0.
    pub slot: u32,
    /// Bits of [`SlotFlags`].
    pub flags: u32,
    /// First guest-physical address.
    pub gpa: u64,
    /// Bytes; 0 deletes the slot.
    pub size: u64,
    /// First host-virtual address.
    pub hva: u64,
}

/// What the machine and the kernel allow a memslot to span.
#[derive(Clone, Copy, Debug)]
pub struct RegionLimits {
    /// The first frame that the guest can never address (2^(MAXPHYADDR-12)).
    pub frames: u64,
    /// The first host-virtual address that is not user space (`TASK_SIZE_MAX`).
    pub user_end: u64,
}

impl Default for RegionLimits {
    fn default() -> Self {
        Self { frames: 1 << 40, user_end: 0x7fff_ffff_f000 }
    }
}

/// Why a memory region is refused. All are `-EINVAL` but for those named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotError {
    /// A flag that is not known.
    UnknownFlag,
    /// Size or address is not a multiple of 4096.
    Unaligned,
    /// The host range is not in user space.
    NotUserRange,
    /// The slot number is not below [`USER_SLOTS`].
    SlotId,
    /// Another address space than 0.
    AddressSpace,
    /// The guest range wraps around.
    Wraps,
    /// More than [`MAX_PAGES`] pages, in the slot or so many in all that counting them wraps.
    TooLarge,
    /// The range reaches beyond the guest's physical address width.
    BeyondGuestPhysical,
    /// Deletion of a slot that is not there.
    Absent,
    /// Size, host address or READONLY of a slot that exists cannot change.
    Immutable,
    /// The range overlaps another slot (`-EEXIST`).
    Overlaps,
    /// `-ENOMEM`.
    NoMemory,
}

impl From<NoMemory> for SlotError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// What a region asks for, with the new table where there is one.
#[derive(Debug)]
pub enum Change {
    /// The region describes what is there already.
    Nothing,
    /// A slot is new.
    Create(KBox<MemSlots>),
    /// A slot goes.
    Delete(KBox<MemSlots>, MemSlot),
    /// A slot moves in guest-physical space; the old one is given.
    Move(KBox<MemSlots>, MemSlot),
    /// The dirty log is switched on or off; the old and the new slot are given.
    Flags(KBox<MemSlots>, MemSlot, MemSlot),
}

/// All memslots of a VM at one moment, sorted by guest frame, never overlapping.
#[derive(Debug, Default)]
pub struct MemSlots {
    slots: Vec<MemSlot>,
    /// Index of the slot of the last lookup: the next one is mostly there too.
    hint: AtomicU32,
    generation: u64,
    /// Least and one past the greatest host-virtual address of all slots.
    hva_span: (u64, u64),
}

impl MemSlots {
    /// No slots.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts the changes that led to this table.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// All slots by rising guest frame.
    pub fn iter(&self) -> core::slice::Iter<'_, MemSlot> {
        self.slots.iter()
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The slot that holds a frame.
    #[inline]
    pub fn find(&self, gfn: Gfn) -> Option<&MemSlot> {
        let hint = self.hint.load(Ordering::Relaxed) as usize;
        match self.slots.get(hint) {
            Some(slot) if slot.contains(gfn) => Some(slot),
            _ => self.search(gfn),
        }
    }

    #[inline(never)]
    fn search(&self, gfn: Gfn) -> Option<&MemSlot> {
        let index = self.slots.partition_point(|s| s.base <= gfn).checked_sub(1)?;
        let slot = self.slots.get(index).filter(|s| s.contains(gfn))?;
        self.hint.store(index as u32, Ordering::Relaxed);
        Some(slot)
    }

    /// The slot with a number.
    pub fn by_id(&self, id: u16) -> Option<&MemSlot> {
        self.slots.iter().find(|s| s.id == id)
    }

    /// Host-virtual address that backs a guest-physical one.
    pub fn hva_of(&self, gpa: Gpa) -> Option<Hva> {
        let slot = self.find(gpa.gfn())?;
        Some(Hva(slot.hva_of(gpa.gfn()).0 | gpa.page_offset() as u64))
    }

    /// Whether any slot may be backed by the host range. Quick; may err towards `true`.
    #[inline]
    pub fn may_back(&self, start: Hva, end: Hva) -> bool {
        start.0 < self.hva_span.1 && self.hva_span.0 < end.0
    }

    /// What `region` asks for (KVM API §4.35). Nothing is changed; a table to publish comes back.
    pub fn change(&self, region: &Region, limits: &RegionLimits) -> Result<Change, SlotError> {
        let flags = SlotFlags::from_bits(region.flags).ok_or(SlotError::UnknownFlag)?;
        if (region.size | region.gpa | region.hva) & 0xfff != 0 {
            return Err(SlotError::Unaligned);
        }
        let hva_end = region.hva.checked_add(region.size).ok_or(SlotError::NotUserRange)?;
        if hva_end > limits.user_end {
            return Err(SlotError::NotUserRange);
        }
        if region.slot >> 16 != 0 {
            return Err(SlotError::AddressSpace);
        }
        if region.slot >= USER_SLOTS {
            return Err(SlotError::SlotId);
        }
        if region.gpa.checked_add(region.size).is_none() {
            return Err(SlotError::Wraps);
        }
        let npages = region.size >> 12;
        if npages > MAX_PAGES {
            return Err(SlotError::TooLarge);
        }
        let id = region.slot as u16;
        let old = self.by_id(id);
        if npages == 0 {
            let old = old.ok_or(SlotError::Absent)?;
            return Ok(Change::Delete(self.with(Some(id), None)?, old.clone()));
        }

        let mut new = MemSlot {
            id,
            flags,
            base: Gpa(region.gpa).gfn(),
            npages,
            hva: Hva(region.hva),
            generation: self.generation.wrapping_add(1),
            dirty: None,
        };
        if let Some(old) = old {
            let readonly = |s: &MemSlot| s.flags.contains(SlotFlags::READONLY);
            if old.hva != new.hva || old.npages != npages || readonly(old) != readonly(&new) {
                return Err(SlotError::Immutable);
            }
            if old.base == new.base && old.flags == flags {
                return Ok(Change::Nothing);
            }
        }
        let stays = old.is_some_and(|o| o.base == new.base);
        if !stays {
            if new.end().0 > limits.frames {
                return Err(SlotError::BeyondGuestPhysical);
            }
            if self.overlaps(&new) {
                return Err(SlotError::Overlaps);
            }
        }
        if flags.contains(SlotFlags::LOG_DIRTY) {
            new.dirty = match old.and_then(|o| o.dirty.clone()) {
                Some(log) => Some(log),
                None => Some(Arc::new(DirtyBitmap::new(npages)?)?),
            };
        }
        Ok(match old {
            None => Change::Create(self.with(None, Some(new))?),
            Some(old) if stays => {
                Change::Flags(self.with(Some(id), Some(new.clone()))?, old.clone(), new)
            }
            Some(old) => Change::Move(self.with(Some(id), Some(new))?, old.clone()),
        })
    }

    fn overlaps(&self, new: &MemSlot) -> bool {
        // Sorted and disjoint: only slots that begin before the new one's end can reach into it,
        // and of those only the last two matter (one of them may be the slot that moves).
        let begin_before = self.slots.partition_point(|s| s.base < new.end());
        self.slots
            .iter()
            .take(begin_before)
            .rev()
            .filter(|s| s.id != new.id)
            .take(1)
            .any(|s| s.end() > new.base)
    }

    /// This table without the slot `remove` and with `add`.
    fn with(&self, remove: Option<u16>, add: Option<MemSlot>) -> Result<KBox<Self>, NoMemory> {
        let mut slots = Vec::new();
        slots.try_reserve_exact(self.slots.len().saturating_add(1))?;
        slots.extend(self.slots.iter().filter(|s| Some(s.id) != remove).cloned());
        if let Some(new) = add {
            let at = slots.partition_point(|s: &MemSlot| s.base < new.base);
            slots.insert(at, new);
        }
        let low = slots.iter().map(|s| s.hva.0).min().unwrap_or(0);
        let high = slots.iter().map(|s| s.hva.0.wrapping_add(s.npages << 12)).max().unwrap_or(0);
        KBox::new(Self {
            slots,
            hint: AtomicU32::new(0),
            generation: self.generation.wrapping_add(1),
            hva_span: (low, high),
        })
    }
}
