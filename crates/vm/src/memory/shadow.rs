//! Shadow paging's side of a VM's memory: what the inner loop could not do with interrupts off.
//!
//! Each function here does what the [`mmu::ShadowGuard`] function of the same name does, however long
//! that takes: it allocates pages, finds frames, waits for the lock. All may sleep. `vcpu` is the one whose
//! thread calls: what is looked at without the tree's lock is looked at in a section of its own.
//!
//! Why it sleeps here and not in the loop: the shadow lock is tried there and not waited for, and memory is not allocated
//! with interrupts off. So the loop gives up early, and what it lacked is brought here, after which the guest faults again
//! and finds it. The second attempt is short.

use core::sync::atomic::Ordering;

use host::boxed::KBox;
use host::error::NoMemory;
use host::gup::fault_in;
use mmu::shadow::LEAST_PAGES;
use mmu::tdp::{FlushRemote, Zapper, pages_per};
use mmu::{
    AddressSpace, Format, FrameWanted, Marks, MemSlot, MemSlots, PagingContext, RegionLimits, Root,
    RootOutcome, ShadowFault, ShadowGuard, ShadowMmu, ShadowRoots, TableCache, Tlb, View,
};
use x86::{Exception, Gfn, Gpa};

use super::under_way::Invalidations;
use super::{FaultAccess, FaultOutcome, MemoryError, VmMemory};
use crate::mode::WithdrawFirst;
use crate::vcpu_shared::VcpuShared;

/// What became of a page fault on shadow tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShadowOutcome {
    /// The fault is fixed: enter again.
    Fixed,
    /// The guest's own exception.
    Guest(Exception),
    /// No slot there: emulate the access.
    Mmio(Gpa),
    /// A write to a read-only slot: emulate the access as MMIO.
    ReadonlyWrite(Gpa),
    /// Emulate the access; there is memory.
    Emulate(Gpa),
    /// The host was changing its mind: let the guest fault again.
    Retry,
    /// Not to be mapped.
    Error(MemoryError),
}

/// On whose behalf something is done that looks at tables and may withdraw some.
#[derive(Clone, Copy)]
pub struct Caller<'a, F: ?Sized> {
    /// The vCPU whose thread this is; outside the inner loop.
    pub vcpu: &'a VcpuShared,
    /// What makes all vCPUs of the VM forget translations.
    pub flush: &'a F,
}

/// No shadow pages. Out of line: they are large, and move to the heap from here.
#[inline(never)]
pub(super) fn pages(format: Format) -> Result<KBox<ShadowMmu>, NoMemory> {
    KBox::new(ShadowMmu::new(format)?)
}

/// Faults on the way of one access: every level's table, the page, and as many again.
pub(super) const ROUNDS: u32 = 16;

impl VmMemory {
    /// Like [`VmMemory::new`], for hardware that is given shadow tables (`npt=0`).
    pub fn with_shadow(format: Format, limits: RegionLimits) -> Result<Self, NoMemory> {
        // Always the ordinary format, of four levels: what the hardware walks here is what a
        // guest's own tables are.
        let shadow = Some(pages(Format::npt(4, format.encryption()))?);
        Ok(Self { shadow, ..Self::new(format, limits)? })
    }

    /// The shadow pages; `None` with TDP.
    #[inline]
    pub fn shadow(&self) -> Option<&ShadowMmu> {
        self.shadow.as_deref()
    }

    /// The pages that are derived from the tree's leaves, and lose what they lose: shadow pages, or those for
    /// guests of the guest. For withdrawals, under the MMU lock.
    #[inline]
    pub(super) fn derived(&self) -> Option<&ShadowMmu> {
        self.shadow.as_deref().or_else(|| self.nested.get())
    }

    /// [`mmu::ShadowGuard::switch`], to the end.
    pub fn shadow_switch<F: FlushRemote + ?Sized>(
        &self,
        by: Caller<'_, F>,
        roots: &mut ShadowRoots,
        context: &PagingContext,
        pdptes: &[u64; 4],
        space: AddressSpace,
        tlb: Tlb,
    ) -> Result<Root, NoMemory> {
        let shadow = self.shadow.as_ref().ok_or(NoMemory)?;
        loop {
            let outcome = self.on_shadow(by.vcpu, shadow, |view, guard| {
                guard.switch(view, roots, context, pdptes, space, tlb)
            });
            match outcome {
                RootOutcome::Ready(root) => return Ok(root),
                // Outside of the section: this allocates, and may throw pages away and flush.
                RootOutcome::NeedPages(count) => shadow.reserve(count, by.flush)?,
            }
        }
    }

    /// Flushes as [`mmu::ShadowGuard::flush`] tells.
    pub fn shadow_flush(&self, vcpu: &VcpuShared, roots: &mut ShadowRoots) {
        if let Some(shadow) = &self.shadow {
            self.on_shadow(vcpu, shadow, |view, guard| guard.flush(view, roots));
        }
    }

    /// Doubts guest tables as [`mmu::ShadowGuard::note_writes`] tells.
    pub fn shadow_doubt(&self) {
        if let Some(shadow) = &self.shadow {
            shadow.lock().note_writes();
        }
    }

    /// Invalidates as [`mmu::ShadowGuard::invlpg`] tells.
    pub fn shadow_invlpg(&self, vcpu: &VcpuShared, roots: &mut ShadowRoots, va: u64) {
        if let Some(shadow) = &self.shadow {
            self.on_shadow(vcpu, shadow, |view, guard| guard.invlpg(view, roots, va));
        }
    }

    /// [`mmu::ShadowGuard::fault`], to the end: finds the frames and pages that it lacks.
    /// `cache` is the vCPU's own. Runs in the VMM's address space.
    pub fn shadow_fault<F: FlushRemote + ?Sized>(
        &self,
        by: Caller<'_, F>,
        cache: &mut TableCache,
        roots: &mut ShadowRoots,
        context: &PagingContext,
        va: u64,
        code: u32,
    ) -> ShadowOutcome {
        let Some(shadow) = &self.shadow else { return ShadowOutcome::Retry };
        // The guest can change its tables without end. Then it faults again, and the vCPU looks at
        // its requests between.
        for _ in 0..ROUNDS {
            let outcome = self.on_shadow(by.vcpu, shadow, |view, guard| {
                guard.fault(view, roots, context, va, code)
            });
            match outcome {
                ShadowFault::Fixed => return ShadowOutcome::Fixed,
                ShadowFault::Guest(exception) => return ShadowOutcome::Guest(exception),
                ShadowFault::Emulate { gpa } => return ShadowOutcome::Emulate(gpa),
                ShadowFault::NeedPages(count) => {
                    if shadow.reserve(count, by.flush).is_err() {
                        return ShadowOutcome::Error(MemoryError::NoMemory);
                    }
                }
                ShadowFault::NeedFrame(wanted) => {
                    if let Some(outcome) = self.find_frame(cache, roots, &wanted, by.flush) {
                        return outcome;
                    }
                }
            }
        }
        ShadowOutcome::Retry
    }

    /// Does `work` on the shadow pages in a section of the vCPU's. The lock is waited for outside of it, with
    /// interrupts on: who holds it may have much to do.
    pub(super) fn on_shadow<T>(
        &self,
        vcpu: &VcpuShared,
        shadow: &ShadowMmu,
        mut work: impl FnMut(&View<'_>, &mut ShadowGuard<'_>) -> T,
    ) -> T {
        loop {
            let done = vcpu.in_section(|s| {
                let mut guard = shadow.try_lock()?;
                Some(work(&self.view(s), &mut guard))
            });
            match done {
                Some(done) => return done,
                None => drop(shadow.lock()),
            }
        }
    }

    /// Brings a frame into the tree. `None`: it is there.
    fn find_frame(
        &self,
        cache: &mut TableCache,
        roots: &mut ShadowRoots,
        wanted: &FrameWanted,
        flush: &(impl FlushRemote + ?Sized),
    ) -> Option<ShadowOutcome> {
        // As a fault on a present entry: one that only the log made read-only is given back without
        // asking the host.
        let FrameWanted { gpa, write, exec, table } = *wanted;
        let access = FaultAccess { gpa, write, exec, present: true };
        // Before the look: a change of the slots behind it makes the note void.
        let generation = self.generation();
        // As long as these slots are held, what is prepared for one of them is not forgotten.
        let slots = self.slots();
        match (self.fault(cache, &access, flush, fault_in), table) {
            (FaultOutcome::Mapped, table) => {
                let shadow = self.shadow.as_ref()?;
                self.prepare_frame(shadow, &slots, gpa, table.is_some()).err().map(
                    |why| match why {
                        None => ShadowOutcome::Retry,
                        Some(error) => ShadowOutcome::Error(error),
                    },
                )
            }
            // A table in no slot reads as nothing: the guest has its #PF.
            (FaultOutcome::Mmio, Some(exception)) => Some(ShadowOutcome::Guest(exception)),
            (FaultOutcome::Mmio, None) => Some(ShadowOutcome::Mmio(gpa)),
            (FaultOutcome::ReadonlyWrite, Some(_)) => {
                roots.note_rom(gpa.gfn(), generation);
                None
            }
            (FaultOutcome::ReadonlyWrite, None) => Some(ShadowOutcome::ReadonlyWrite(gpa)),
            (FaultOutcome::Retry, _) => Some(ShadowOutcome::Retry),
            (FaultOutcome::Error(error), _) => Some(ShadowOutcome::Error(error)),
        }
    }

    /// Makes it possible to note leaves of a frame that is in the tree now, or that it holds a table. An error
    /// says why not; without one, the fault is to be taken again.
    pub(super) fn prepare_frame(
        &self,
        shadow: &ShadowMmu,
        slots: &MemSlots,
        gpa: Gpa,
        is_table: bool,
    ) -> Result<(), Option<MemoryError>> {
        let gfn = gpa.gfn();
        // One that leaves was met in the table after: nothing is prepared for it any more.
        let slot = slots.find(gfn).filter(|slot| !slot.leaving).ok_or(None)?;
        shadow.prepare(gfn, slot.base, slot.end()).map_err(|error| Some(error.into()))?;
        // Guest tables in device memory are not followed.
        // No leaf: withdrawn again meanwhile. The fault finds that out by itself.
        let direct = self.tdp.mapper().lookup(gfn).is_none_or(|leaf| leaf.direct);
        if is_table && !direct { Err(Some(MemoryError::Fault)) } else { Ok(()) }
    }

    /// Protects guest tables that have not changed for a while: outside the loop, when
    /// [`mmu::ShadowGuard::wants_settling`] says so.
    pub fn shadow_settle<F: FlushRemote + ?Sized>(&self, by: Caller<'_, F>) {
        if let Some(shadow) = &self.shadow
            && shadow.settle_begin()
        {
            // Between the halves every CPU flushes: until then some TLB may let a protected table
            // be written.
            by.flush.flush_remote();
            self.on_shadow(by.vcpu, shadow, |view, guard| guard.settle_end(view));
        }
    }

    /// Lets go of a vCPU's roots.
    pub fn shadow_release(&self, roots: &mut ShadowRoots) {
        if let Some(shadow) = &self.shadow {
            shadow.lock().release(roots);
        }
    }

    /// KVM_SET_NR_MMU_PAGES (KVM API §4.44). Without effect under TDP until nested paging is asked for.
    pub fn set_shadow_limit(&self, pages: u64, flush: &(impl FlushRemote + ?Sized)) {
        // A change of slots that has looked whether the VMM has spoken must not come behind what it said.
        let _held = self.slots_lock.lock();
        if let Some(shadow) = self.derived() {
            // From here on the number of slots changes nothing: the VMM has spoken.
            self.shadow_limited.store(true, Ordering::Relaxed);
            shadow.set_limit(pages, flush);
        }
    }

    /// Without a limit of the VMM's: pages for one in fifty of the guest's frames, as KVM has it.
    /// The slots' lock is held.
    pub(super) fn adapt_shadow_limit(&self, flush: &(impl FlushRemote + ?Sized)) {
        let Some(shadow) = self.derived() else { return };
        if self.shadow_limited.load(Ordering::Relaxed) {
            return;
        }
        // Under the lock of the slots, so that no other change comes between.
        let limit = (self.slots().pages() / 50).max(LEAST_PAGES);
        if limit != shadow.limit() {
            shadow.set_limit(limit, flush);
        }
    }

    /// A slot is gone and its frames are withdrawn.
    pub(super) fn forget_shadow_of(&self, slot: &MemSlot) {
        if let Some(shadow) = self.derived() {
            shadow.forget_slot(slot.base, slot.end());
        }
    }

    /// The tree has taken write access from `first..end`, and its lock is still held.
    pub(super) fn protect_shadow(&self, first: Gfn, end: Gfn) {
        if let Some(shadow) = self.derived() {
            shadow.write_protect(first, end);
        }
    }

    pub(super) fn age_shadow(&self, first: Gfn, end: Gfn, marks: Marks) -> bool {
        self.derived().is_some_and(|shadow| shadow.age(first, end, marks))
    }

    /// Guest memory was written by somebody else than the guest.
    pub(super) fn note_shadow_write(&self, gpa: Gpa, bytes: usize) {
        // Not of nested paging: those pages are as stale as a TLB until L1 flushes (ADR 53).
        let Some(shadow) = &self.shadow else { return };
        // Of no bytes there is no last one.
        if bytes != 0 {
            let last = gpa.0.saturating_add(bytes as u64 - 1) >> 12;
            let mut guard = shadow.lock();
            (gpa.gfn().0..=last).for_each(|gfn| guard.note_write(Gfn(gfn)));
        }
    }

    /// What flushes after the tree has withdrawn `first..end`: the shadow pages' leaves go before.
    pub(super) fn before<'a, R: FlushRemote + ?Sized>(
        &'a self,
        zapper: &Zapper<'_, Invalidations>,
        first: Gfn,
        end: Gfn,
        flush: &'a R,
    ) -> WithdrawFirst<'a, impl Fn() + use<'a, R>, R> {
        let shadow = self.derived();
        let (mut first, mut end) = (first, end);
        if shadow.is_some() {
            // Large leaves go whole, and later withdrawals find nothing of them: so must what was
            // derived from them.
            let pages = |gfn| zapper.lookup(gfn).map_or(1, |leaf| pages_per(leaf.level));
            let last = Gfn(end.0.saturating_sub(1));
            first = Gfn(first.0 & !(pages(first) - 1));
            end = Gfn((last.0 | (pages(last) - 1)).saturating_add(1));
        }
        let withdraw = move || {
            if let Some(shadow) = shadow {
                shadow.withdraw(first, end);
            }
        };
        WithdrawFirst { withdraw, flush }
    }
}
