//! Memslots: which guest frames are backed by which host-virtual addresses.
//!
//! [`MemSlots`] is an immutable table. A change builds a new table from the former one, with which it
//! shares nearly all, and the VM publishes it whole, so that readers need no lock. The rules and refusals
//! of KVM_SET_USER_MEMORY_REGION (KVM API §4.35) are in [`MemSlots::change`].
//!
//! Whoever withdraws translations because the host wants its memory back finds them by the published
//! table. So a slot has to be in it for as long as there may be a translation of it: one that leaves is
//! marked first, and taken out when its translations are gone. [`Change::publish`] is the only way to
//! publish a table that a change made, and keeps that order.

mod index;

use host::GuestIndex;
use host::arc::Arc;
use host::boxed::KBox;
use host::error::NoMemory;
use host::srcu::Srcu;
use x86::{Gfn, Gpa, Hva};

use index::Index;
pub use index::Iter;

use crate::dirty::DirtyLog;

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
    /// The slot is on its way out: what is mapped of it is being withdrawn, and nothing more may be mapped.
    pub leaving: bool,
    /// The dirty log, when `LOG_DIRTY` is set.
    pub dirty: Option<Arc<DirtyLog>>,
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
        // Masked as well as compared: the frame is the guest's, and the CPU guesses past a compare.
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
        // The range is the host's and may reach beyond the slot on either side, so it is cut to it.
        let bytes = self.npages << 12;
        let from = start.0.saturating_sub(self.hva.0).min(bytes);
        let to = end.0.saturating_sub(self.hva.0).min(bytes);
        if from >= to {
            return None;
        }
        // A page that is touched in part counts whole: the host takes back pages, not bytes.
        let first = self.base.0.wrapping_add(from >> 12);
        Some((Gfn(first), Gfn(self.base.0.wrapping_add(to.div_ceil(4096)))))
    }

    /// The largest level (1 to 3) at which the slot can map `gfn` by one entry: guest and host
    /// address agree modulo the page size, and the whole page lies in the slot.
    #[inline]
    pub fn max_level(&self, gfn: Gfn, at_most: u8) -> u8 {
        let mut level = at_most.clamp(1, 3);
        while level > 1 {
            // The host maps a large page only where its own address is aligned. So both addresses
            // must have the same place within a large page, as stock KVM asks too.
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
    /// There is no memory for it (`-ENOMEM`).
    NoMemory,
}

impl From<NoMemory> for SlotError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// What a region asks for, ready to be published.
#[derive(Debug)]
pub struct Change(Kind);

#[derive(Debug)]
enum Kind {
    Nothing,
    Create(KBox<MemSlots>),
    /// A slot goes, or moves in guest-physical space: the table in which it is marked, and the one after.
    Leave(KBox<MemSlots>, KBox<MemSlots>, Arc<MemSlot>),
    Flags(KBox<MemSlots>, Arc<MemSlot>, Arc<MemSlot>),
}

/// What was published.
#[derive(Debug)]
pub enum Published {
    /// The region described what was there already.
    Nothing,
    /// A slot is new.
    Created,
    /// The slot is gone, or stands elsewhere; nothing of it is mapped where it was.
    Left(Arc<MemSlot>),
    /// The dirty log was switched on or off: the old and the new slot.
    Flags(Arc<MemSlot>, Arc<MemSlot>),
}

/// The steps by which something leaves a table that others find it by: seen by all as leaving, then
/// withdrawn, then gone. `publish` returns when nobody reads the table before any more.
pub fn leave_in_order<T>(marked: T, after: T, mut publish: impl FnMut(T), withdraw: impl FnOnce()) {
    publish(marked);
    // Nobody maps anything of it from here on, and who takes memory back finds it still.
    withdraw();
    publish(after);
}

/// The steps of a change of slots, of which some are logged after it, or none. The CPUs' logs are on before the first page
/// that only they watch, and off after the last; and `settle`, which watches pages or gives them free, comes when nobody maps
/// by what was published before.
pub fn change_in_order<P>(
    logs: bool,
    mut log_pages: impl FnMut(bool),
    publish: impl FnOnce() -> P,
    settle: impl FnOnce(P),
) {
    if logs {
        log_pages(true);
    }
    settle(publish());
    if !logs {
        log_pages(false);
    }
}

impl Change {
    /// Whether the region describes what is there already.
    pub fn is_nothing(&self) -> bool {
        matches!(self.0, Kind::Nothing)
    }

    /// Whether any slot has a dirty log after the change.
    pub fn logs(&self) -> bool {
        match &self.0 {
            Kind::Nothing => false,
            Kind::Create(table) | Kind::Leave(_, table, _) | Kind::Flags(table, ..) => table.logs(),
        }
    }

    /// Publishes the change in `slots`, the table from which it was made. `withdraw` withdraws all
    /// translations of a slot that leaves. When this returns no fault that saw the slots before is under
    /// way. Sleeps; writers exclude each other.
    pub fn publish(self, slots: &Srcu<MemSlots>, withdraw: impl FnOnce(&MemSlot)) -> Published {
        let publish = |table| drop(slots.replace(table));
        match self.0 {
            Kind::Nothing => Published::Nothing,
            Kind::Create(table) => {
                publish(table);
                Published::Created
            }
            Kind::Leave(marked, after, old) => {
                leave_in_order(marked, after, publish, || withdraw(&old));
                Published::Left(old)
            }
            Kind::Flags(table, old, new) => {
                publish(table);
                Published::Flags(old, new)
            }
        }
    }
}

/// All memslots of a VM at one moment, never overlapping.
#[derive(Clone, Debug, Default)]
pub struct MemSlots {
    by_gfn: Index,
    /// Slots may share host memory.
    by_hva: Index,
    by_id: Index,
    len: usize,
    pages: u64,
    logging: usize,
}

impl MemSlots {
    /// A table without slots.
    pub fn new() -> Self {
        Self::default()
    }

    /// All slots by rising guest frame.
    pub fn iter(&self) -> Iter<'_> {
        self.by_gfn.iter()
    }

    /// Pages of all slots together.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether any slot has a dirty log.
    pub fn logs(&self) -> bool {
        self.logging != 0
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The slot that holds a frame.
    #[inline]
    pub fn find(&self, gfn: Gfn) -> Option<&MemSlot> {
        self.by_gfn.covering(gfn.0)
    }

    /// The slot with a number.
    pub fn by_id(&self, id: u16) -> Option<&MemSlot> {
        self.shared(id).map(|slot| &**slot)
    }

    fn shared(&self, id: u16) -> Option<&Arc<MemSlot>> {
        self.by_id.at((id.into(), 0))
    }

    /// Calls `each` for every slot that the host range `start..end` backs, in part or whole. The one
    /// frame or many may be met in several slots.
    pub fn backed_by(&self, start: Hva, end: Hva, each: impl FnMut(&MemSlot)) {
        self.by_hva.overlapping(start.0, end.0, each);
    }

    /// Host-virtual address that backs a guest-physical one.
    pub fn hva_of(&self, gpa: Gpa) -> Option<Hva> {
        let slot = self.find(gpa.gfn())?;
        Some(Hva(slot.hva_of(gpa.gfn()).0 | gpa.page_offset() as u64))
    }

    /// What `region` asks for (KVM API §4.35). Nothing is changed until it is published.
    pub fn change(&self, region: &Region, limits: &RegionLimits) -> Result<Change, SlotError> {
        let flags = SlotFlags::from_bits(region.flags).ok_or(SlotError::UnknownFlag)?;
        // Tables map pages: of half a page the other half would be given too.
        if (region.size | region.gpa | region.hva) & 0xfff != 0 {
            return Err(SlotError::Unaligned);
        }
        // What a slot gives is used as a user address later without another look at its end.
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
        // Asked before anybody computes the end, which wraps.
        if region.gpa.checked_add(region.size).is_none() {
            return Err(SlotError::Wraps);
        }
        let npages = region.size >> 12;
        // Stock KVM's limit: its bitmap functions count bits in an int.
        if npages > MAX_PAGES {
            return Err(SlotError::TooLarge);
        }
        let id = region.slot as u16;
        let old = self.shared(id);
        // A size of 0 deletes. The other fields were checked all the same, as in stock KVM.
        if npages == 0 {
            let old = old.ok_or(SlotError::Absent)?;
            return self.leave(old, self.without(old)?);
        }

        let mut new = MemSlot {
            id,
            flags,
            base: Gpa(region.gpa).gfn(),
            npages,
            hva: Hva(region.hva),
            leaving: false,
            dirty: None,
        };
        if let Some(old) = old {
            // What vCPUs may have mapped cannot change in place: stock KVM refuses it too, and a
            // VMM deletes and creates.
            if old.hva != new.hva || old.npages != npages || old.is_readonly() != new.is_readonly()
            {
                return Err(SlotError::Immutable);
            }
            // A VMM that repeats itself pays for no grace period and no flush.
            if old.base == new.base && old.flags == flags {
                return Ok(Change(Kind::Nothing));
            }
        }
        // A slot that only changes its flags keeps its frames, so there is nothing new to overlap.
        let stays = old.is_some_and(|o| o.base == new.base);
        if !stays {
            if new.end().0 > limits.frames {
                return Err(SlotError::BeyondGuestPhysical);
            }
            // A slot that moves may overlap the place where it was: it is gone from there when it
            // arrives.
            if self.overlaps(&new) {
                return Err(SlotError::Overlaps);
            }
        }
        if flags.contains(SlotFlags::LOG_DIRTY) {
            // A slot that moves keeps its log: the VMM has not asked for those pages yet.
            new.dirty = match old.and_then(|o| o.dirty.clone()) {
                Some(log) => Some(log),
                // Allocated before anything is published, so that ENOMEM leaves the slots as they
                // were.
                None => Some(Arc::new(DirtyLog::new(npages)?)?),
            };
        }
        let new = Arc::new(new)?;
        match old {
            None => Ok(Change(Kind::Create(KBox::new(self.with(&new)?)?))),
            Some(old) if stays => {
                // One publication is enough: frames and host addresses stay, and what is mapped
                // stays right.
                let table = self.without(old)?.with(&new)?;
                Ok(Change(Kind::Flags(KBox::new(table)?, old.clone(), new)))
            }
            Some(old) => self.leave(old, self.without(old)?.with(&new)?),
        }
    }

    /// `old` leaves, and the table is `after` then.
    fn leave(&self, old: &Arc<MemSlot>, after: Self) -> Result<Change, SlotError> {
        // A copy is marked: readers of the table before hold the old one.
        let marked = Arc::new(MemSlot { leaving: true, ..MemSlot::clone(old) })?;
        let marked = self.without(old)?.with(&marked)?;
        Ok(Change(Kind::Leave(KBox::new(marked)?, KBox::new(after)?, old.clone())))
    }

    fn overlaps(&self, new: &MemSlot) -> bool {
        let mut any = false;
        // At most two: the slot that moves, and one that is in the way, or none.
        self.by_gfn.overlapping(new.base.0, new.end().0, |slot| any |= slot.id != new.id);
        any
    }

    /// The table with one slot more.
    fn with(&self, slot: &Arc<MemSlot>) -> Result<Self, NoMemory> {
        let hva_end = slot.hva.0.wrapping_add(slot.npages << 12);
        Ok(Self {
            by_gfn: self.by_gfn.with((slot.base.0, 0), slot.end().0, slot)?,
            by_hva: self.by_hva.with((slot.hva.0, slot.id), hva_end, slot)?,
            by_id: self.by_id.with((slot.id.into(), 0), 0, slot)?,
            len: self.len.wrapping_add(1),
            pages: self.pages.wrapping_add(slot.npages),
            logging: self.logging.wrapping_add(slot.dirty.is_some().into()),
        })
    }

    /// The table without one of its slots.
    fn without(&self, slot: &MemSlot) -> Result<Self, NoMemory> {
        Ok(Self {
            by_gfn: self.by_gfn.without((slot.base.0, 0))?,
            by_hva: self.by_hva.without((slot.hva.0, slot.id))?,
            by_id: self.by_id.without((slot.id.into(), 0))?,
            len: self.len.wrapping_sub(1),
            pages: self.pages.wrapping_sub(slot.npages),
            logging: self.logging.wrapping_sub(slot.dirty.is_some().into()),
        })
    }
}
