//! A VM's guest-physical memory: memslots, TDP tables, and the protocol with the host's memory
//! management that keeps both honest.
//!
//! Locks, outermost first: `slots_lock` (who changes slots), the slots' read section, the MMU lock
//! inside `tdp`. Nothing is pinned: a translation holds from its fault until the MMU notifier
//! withdraws it ([`invalidate`]). The vCPUs call [`VmMemory::fault`]; devices and the run loop read
//! and write guest memory through [`access`], with interrupts off through [`VmMemory::view`].
//!
//! Why nothing is pinned: a pinned page cannot be swapped out, moved, merged with its like or collapsed into a
//! large one. The price is the protocol in [`fault`] and [`invalidate`]: if a
//! translation outlived the host's own, the guest would write into memory that is somebody else's by then.
//!
//! Why slots are published whole, under SRCU: a fault may sleep for a page of the host's while it holds the slots
//! that it saw. Whoever changes them waits for such faults and then withdraws, so nothing comes back that was
//! withdrawn. With a lock the slowest page of the host would hold up every fault of every other vCPU.
//!
//! Why long withdrawals go in stretches: the MMU lock is held for writing, and all vCPUs that fault wait for it.
#![forbid(unsafe_code)]

pub mod access;
pub mod dirty_log;
pub mod fault;
pub mod invalidate;
mod nested;
mod roots;
pub mod shadow;
#[cfg(test)]
mod tests;
mod under_way;

use core::sync::atomic::{AtomicBool, AtomicU32};

use host::arc::Arc;
use host::boxed::KBox;
use host::error::NoMemory;
use host::once::Once;
use host::srcu::{Srcu, SrcuGuard};
use host::sync::Mutex;
use host::task;
use mmu::slots::{Change, Published, change_in_order};
use mmu::tdp::{FlushRemote, Tdp, Thoroughness};
use mmu::{
    Format, MemSlot, MemSlots, Region, RegionLimits, ShadowMmu, SlotError, SlotFlags, TableCache,
};
use stats::VmStats;
use x86::{Gfn, Gpa, Hpa, Hva};

pub use dirty_log::DirtyLogError;
pub use fault::{FaultAccess, FaultOutcome};
pub use nested::NestedOutcome;
pub use shadow::ShadowOutcome;
use under_way::{Ended, Invalidations};

/// Why guest memory cannot be reached. `kvm-abi` maps it to errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryError {
    /// No memslot there: MMIO.
    Unbacked,
    /// A write to a read-only slot: MMIO too.
    ReadOnly,
    /// The VMM's address space has nothing there (`-EFAULT`).
    Fault,
    /// A signal came first (`-EINTR`).
    Interrupted,
    /// There is no memory for it (`-ENOMEM`).
    NoMemory,
}

impl From<NoMemory> for MemoryError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

impl From<host::error::Fault> for MemoryError {
    fn from(_: host::error::Fault) -> Self {
        Self::Fault
    }
}

/// Frames that are zapped with the lock held once, before others get their turn.
const ZAP_STRETCH: u64 = 1 << 18;

/// The memory of a VM.
pub struct VmMemory {
    slots: Srcu<MemSlots>,
    slots_lock: Mutex<()>,
    limits: RegionLimits,
    /// A fault that spans the end of an invalidation is taken again.
    ended: Ended,
    tdp: Tdp<Invalidations>,
    /// Shadow pages, when the hardware is not given the TDP tables.
    shadow: Option<KBox<ShadowMmu>>,
    /// Shadow pages for guests of the guest, when it is given the TDP tables and has asked for nested paging.
    /// Filled under the MMU lock.
    nested: Once<ShadowMmu>,
    /// vCPUs that hold the TDP root.
    root_users: AtomicU32,
    /// The VMM has said how many shadow pages there may be.
    shadow_limited: AtomicBool,
    /// The vCPUs were asked to log pages, for a slot of this memory. Under `slots_lock`.
    logs_pages: AtomicBool,
}

/// How a long withdrawal goes on from stretch to stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// Others may run in between: it may sleep.
    Yields,
    /// At once, without a pause.
    Through,
}

impl VmMemory {
    /// No slots, no translations. `format`: of the TDP tables.
    pub fn new(format: Format, limits: RegionLimits) -> Result<Self, NoMemory> {
        let tdp = Tdp::new(format, Invalidations::default())?;
        Ok(Self::over(tdp, Srcu::new(KBox::new(MemSlots::new())?)?, None, limits))
    }

    /// A memory without slots on the heap. `shadow`: for hardware that is given shadow tables. `with`: another
    /// memory of the VM, which counts for both.
    #[inline(never)]
    pub fn shared(
        format: Format,
        limits: RegionLimits,
        shadow: bool,
        with: Option<&Arc<Self>>,
    ) -> Result<Arc<Self>, NoMemory> {
        let mut tdp = Tdp::new(format, Invalidations::default())?;
        // One VM, one set of counters: user space knows of no two trees.
        if let Some(other) = with {
            tdp.count_in(other.stats().clone());
        }
        let slots = Srcu::new(KBox::new(MemSlots::new())?)?;
        let shadow =
            if shadow { Some(shadow::pages(Format::npt(4, format.encryption()))?) } else { None };
        Arc::new(Self::over(tdp, slots, shadow, limits))
    }

    fn over(
        tdp: Tdp<Invalidations>,
        slots: Srcu<MemSlots>,
        shadow: Option<KBox<ShadowMmu>>,
        limits: RegionLimits,
    ) -> Self {
        // A slot beyond the tables could never be mapped, and its faults would be retried for ever.
        let frames = limits.frames.min(tdp.frames());
        Self {
            slots,
            slots_lock: Mutex::new(()),
            limits: RegionLimits { frames, ..limits },
            ended: Ended::default(),
            tdp,
            shadow,
            nested: Once::new(),
            root_users: AtomicU32::new(0),
            shadow_limited: AtomicBool::new(false),
            logs_pages: AtomicBool::new(false),
        }
    }

    /// Address of the TDP root table.
    pub fn tdp_root(&self) -> Hpa {
        self.tdp.root()
    }

    /// Where page tables and leaves are counted.
    pub fn stats(&self) -> &Arc<VmStats> {
        self.tdp.stats()
    }

    /// Grows whenever a translation is withdrawn; never the same for two VMs.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.tdp.generation()
    }

    /// The slots of this moment.
    #[inline]
    pub fn slots(&self) -> SrcuGuard<'_, MemSlots> {
        self.slots.read()
    }

    /// Host-virtual address of a guest frame.
    pub fn hva_of(&self, gfn: Gfn) -> Option<Hva> {
        self.slots().hva_of(Gpa(gfn.0 << 12))
    }

    /// KVM_SET_USER_MEMORY_REGION (KVM API §4.35): creates, deletes or moves a slot, or switches its
    /// dirty log. On error nothing has changed. Sleeps.
    pub fn set_region(
        &self,
        region: &Region,
        flush: &(impl FlushRemote + ?Sized),
    ) -> Result<(), SlotError> {
        // One change at a time: a table is made from the one before.
        let _held = self.slots_lock.lock();
        let change = self.slots().change(region, &self.limits)?;
        // VMMs set regions that are there already; those cost no grace period.
        if change.is_nothing() {
            return Ok(());
        }
        // Once publish() returns, no fault that saw the old slots is under way; so nothing that is
        // withdrawn after it can come back.
        let publish = |change: Change| {
            change.publish(&self.slots, |old| {
                self.zap_slot(old, flush);
                self.forget_shadow_of(old);
            })
        };
        change_in_order(
            change.logs(),
            |on| self.log_pages(on, flush),
            || publish(change),
            |published| {
                // Only the log was switched: the frames behind the slot are the same as before.
                if let Published::Flags(old, new) = published {
                    if new.flags.contains(SlotFlags::LOG_DIRTY) {
                        self.watch_slot(&old, flush);
                    } else {
                        // Large pages come back with the next faults.
                        self.zap_slot(&old, flush);
                    }
                }
            },
        );
        // The limit goes by the memory that there is now.
        self.adapt_shadow_limit(flush);
        Ok(())
    }

    /// Withdraws all translations: the address space dies, or the VM does. May sleep: slots that show one piece of the VMM's
    /// memory again and again make as many translations as their owner likes.
    pub fn release(&self, flush: &(impl FlushRemote + ?Sized)) {
        self.zap(Gfn(0), Gfn(self.tdp.frames()), Thoroughness::Tables, flush, Pace::Yields);
    }

    fn zap_slot(&self, slot: &MemSlot, flush: &(impl FlushRemote + ?Sized)) {
        self.zap(slot.base, slot.end(), Thoroughness::Tables, flush, Pace::Yields);
    }

    /// Withdraws the frames `first..end` stretch by stretch.
    fn zap(
        &self,
        first: Gfn,
        end: Gfn,
        how: Thoroughness,
        flush: &(impl FlushRemote + ?Sized),
        pace: Pace,
    ) {
        // Beyond the tables indices begin anew, and the first frames would be withdrawn.
        let end = end.0.min(self.tdp.frames());
        let mut at = first.0;
        while at < end {
            // Whatever is mapped beyond the next hole in the upper levels comes with it.
            let mut zapper = self.tdp.zapper();
            at = zapper.next_mapped(Gfn(at), Gfn(end)).0;
            // A stretch is a gigabyte and ends at a multiple of it: no leaf is cut in two.
            let stop = (at | (ZAP_STRETCH - 1)).saturating_add(1).min(end);
            if at < stop {
                let flush = self.before(&zapper, Gfn(at), Gfn(stop), flush);
                zapper.zap(Gfn(at), Gfn(stop), how, &flush);
            }
            drop(zapper);
            at = stop;
            // The MMU notifier may forbid sleep, and then all of it is done at once.
            if pace == Pace::Yields {
                task::cond_resched();
            }
        }
    }

    /// Makes large pages of the slot small, so that the guest need not fault for it page by page. Where
    /// memory is short, it does.
    fn split_slot(&self, slot: &MemSlot) {
        let (mut cache, mut at, end) = (TableCache::new(), slot.base.0, slot.end().0);
        while at < end {
            let stop = (at | (ZAP_STRETCH - 1)).saturating_add(1).min(end);
            let rest = self.tdp.mapper().split_large(Gfn(at), Gfn(stop), &mut cache);
            at = rest.map_or(stop, |next| next.0);
            // Without memory the leaves stay large and lose their write access whole; the guest's
            // faults split them.
            if rest.is_some() && cache.top_up(TableCache::MOST).is_err() {
                return;
            }
            task::cond_resched();
        }
    }

    fn watch_slot(&self, slot: &MemSlot, flush: &(impl FlushRemote + ?Sized)) {
        // Small first: where the CPU logs, a small leaf is watched by its dirty bit, and a large
        // one would lose its write access.
        self.split_slot(slot);
        let (mut at, end) = (slot.base.0, slot.end().0);
        let mut any = false;
        while at < end {
            let stop = (at | (ZAP_STRETCH - 1)).saturating_add(1).min(end);
            let mut zapper = self.tdp.zapper();
            any |= zapper.watch_writes(Gfn(at), Gfn(stop));
            self.protect_shadow(Gfn(at), Gfn(stop));
            drop(zapper);
            at = stop;
            task::cond_resched();
        }
        // One flush at the end: until it is done nobody relies on the log, for the ioctl has not
        // returned.
        if any {
            self.tdp.zapper().flush(flush);
        }
    }
}
