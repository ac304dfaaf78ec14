//! Shadow paging's side of a VM's memory: what the inner loop could not do with interrupts off.
//!
//! Each function here does what the [`mmu::ShadowGuard`] function of the same name does, however long
//! that takes: it allocates pages, finds frames, waits for the lock. All may sleep.

use host::error::NoMemory;
use host::irq;
use mmu::tdp::FlushRemote;
use mmu::{
    FrameWanted, PagingContext, PteFormat, RegionLimits, Root, RootOutcome, ShadowFault, ShadowMmu,
    ShadowRoots, TableCache,
};
use x86::{Exception, Gpa};

use super::{FaultAccess, FaultOutcome, MemoryError, VmMemory};

/// What became of a page fault on shadow tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShadowOutcome {
    /// Enter again.
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

/// Faults on the way of one access: every level's table, the page, and as many again.
const ROUNDS: u32 = 16;

impl<F: PteFormat> VmMemory<F> {
    /// Like [`VmMemory::new`], for hardware that is given shadow tables (`npt=0`).
    pub fn with_shadow(
        levels: u8,
        encryption: u64,
        limits: RegionLimits,
    ) -> Result<Self, NoMemory> {
        let shadow = Some(ShadowMmu::new(encryption)?);
        Ok(Self { shadow, ..Self::new(levels, encryption, limits)? })
    }

    /// The shadow pages; `None` with nested paging.
    #[inline]
    pub fn shadow(&self) -> Option<&ShadowMmu<F>> {
        self.shadow.as_ref()
    }

    /// [`mmu::ShadowGuard::switch`], to the end.
    pub fn shadow_switch(
        &self,
        roots: &mut ShadowRoots,
        context: &PagingContext,
        pdptes: &[u64; 4],
        smm: bool,
        flushes: bool,
        flush: &(impl FlushRemote + ?Sized),
    ) -> Result<Root, NoMemory> {
        let shadow = self.shadow.as_ref().ok_or(NoMemory)?;
        loop {
            let outcome = self
                .with_view(|view| shadow.lock().switch(view, roots, context, pdptes, smm, flushes));
            match outcome {
                RootOutcome::Ready(root) => return Ok(root),
                RootOutcome::NeedPages(count) => shadow.reserve(count, flush)?,
            }
        }
    }

    /// [`mmu::ShadowGuard::flush`].
    pub fn shadow_flush(&self, roots: &mut ShadowRoots) {
        if let Some(shadow) = &self.shadow {
            self.with_view(|view| shadow.lock().flush(view, roots));
        }
    }

    /// [`mmu::ShadowGuard::invlpg`].
    pub fn shadow_invlpg(&self, roots: &mut ShadowRoots, va: u64) {
        if let Some(shadow) = &self.shadow {
            self.with_view(|view| shadow.lock().invlpg(view, roots, va));
        }
    }

    /// [`mmu::ShadowGuard::fault`], to the end: finds the frames and pages that it lacks.
    /// `cache` is the vCPU's own. Runs in the VMM's address space.
    pub fn shadow_fault(
        &self,
        cache: &mut TableCache,
        roots: &mut ShadowRoots,
        context: &PagingContext,
        va: u64,
        code: u32,
        flush: &(impl FlushRemote + ?Sized),
    ) -> ShadowOutcome {
        let Some(shadow) = &self.shadow else { return ShadowOutcome::Retry };
        for _ in 0..ROUNDS {
            let outcome =
                self.with_view(|view| shadow.lock().fault(view, roots, context, va, code));
            match outcome {
                ShadowFault::Fixed => return ShadowOutcome::Fixed,
                ShadowFault::Guest(exception) => return ShadowOutcome::Guest(exception),
                ShadowFault::Emulate { gpa } => return ShadowOutcome::Emulate(gpa),
                ShadowFault::NeedPages(count) => {
                    if shadow.reserve(count, flush).is_err() {
                        return ShadowOutcome::Error(MemoryError::NoMemory);
                    }
                }
                ShadowFault::NeedFrame(wanted) => {
                    if let Some(outcome) = self.find_frame(cache, &wanted, flush) {
                        return outcome;
                    }
                }
            }
        }
        ShadowOutcome::Retry
    }

    /// Brings a frame into the tree. `None`: it is there.
    fn find_frame(
        &self,
        cache: &mut TableCache,
        wanted: &FrameWanted,
        flush: &(impl FlushRemote + ?Sized),
    ) -> Option<ShadowOutcome> {
        let FrameWanted { gpa, write, exec, table } = *wanted;
        let access = FaultAccess { gpa, write, exec, present: true };
        match (self.fault(cache, &access, flush), table) {
            (FaultOutcome::Mapped, _) => None,
            (FaultOutcome::Mmio, Some(exception)) => Some(ShadowOutcome::Guest(exception)),
            (FaultOutcome::Mmio, None) => Some(ShadowOutcome::Mmio(gpa)),
            // Of a table in ROM the accessed bits stay as they are.
            (FaultOutcome::ReadonlyWrite, _) => Some(ShadowOutcome::ReadonlyWrite(gpa)),
            (FaultOutcome::Retry, _) => Some(ShadowOutcome::Retry),
            (FaultOutcome::Error(error), _) => Some(ShadowOutcome::Error(error)),
        }
    }

    /// [`ShadowMmu::settle`]: outside the loop, when [`mmu::ShadowGuard::wants_settling`] says so.
    pub fn shadow_settle(&self, flush: &(impl FlushRemote + ?Sized)) {
        if let Some(shadow) = &self.shadow {
            shadow.settle(flush);
        }
    }

    /// Lets go of a vCPU's roots.
    pub fn shadow_release(&self, roots: &mut ShadowRoots) {
        if let Some(shadow) = &self.shadow {
            shadow.lock().release(roots);
        }
    }

    /// KVM_SET_NR_MMU_PAGES (KVM API §4.44). Without effect under nested paging.
    pub fn set_shadow_limit(&self, pages: u64, flush: &(impl FlushRemote + ?Sized)) {
        if let Some(shadow) = &self.shadow {
            shadow.set_limit(pages, flush);
        }
    }

    /// Calls `work` in a section with interrupts off.
    fn with_view<T>(&self, work: impl FnOnce(&mmu::View<'_>) -> T) -> T {
        irq::disable();
        let result = work(&self.view());
        irq::enable();
        result
    }
}
