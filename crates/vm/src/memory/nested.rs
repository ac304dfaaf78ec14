//! Nested paging's side of a VM's memory: shadow pages for guests of a guest that is a hypervisor, beside the
//! TDP tables.
//!
//! They are made when nested paging is first asked for. From then on they lose what the tree loses, as those
//! of shadow paging do. Each function here does what the [`mmu::ShadowGuard`] function of the same name does,
//! however long that takes. All may sleep.

use host::boxed::KBox;
use host::error::NoMemory;
use host::gup::fault_in;
use mmu::shadow::NestedFrame;
use mmu::tdp::FlushRemote;
use mmu::{
    L1Fault, NestedAccess, NestedFault, NestedRoot, NestedRoots, NestedSwitch, ShadowMmu,
    TableCache, Tables,
};
use x86::Gpa;

use super::shadow::{Caller, ROUNDS, pages};
use super::{FaultAccess, FaultOutcome, MemoryError, VmMemory};

/// What became of a fault of L2's on its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NestedOutcome {
    /// The fault is fixed: enter again.
    Fixed {
        /// This vCPU's translations of L2 are to be flushed first.
        replaced: bool,
    },
    /// L1's tables refuse.
    L1(L1Fault),
    /// No slot there: emulate the access, to this L1-physical address.
    Mmio(Gpa),
    /// A write to a read-only slot: emulate the access as MMIO.
    ReadonlyWrite(Gpa),
    /// The host was changing its mind: let L2 fault again.
    Retry,
    /// Not to be mapped.
    Error(MemoryError),
}

impl VmMemory {
    /// Makes the shadow pages for guests of the guest, if there are none. Not for hardware that is given shadow
    /// tables: nested paging is not offered there.
    pub fn prepare_nested(&self, flush: &(impl FlushRemote + ?Sized)) -> Result<(), NoMemory> {
        // Two kinds of pages derived from one tree would need two withdrawals: nesting is not
        // offered there.
        if self.shadow.is_some() {
            return Err(NoMemory);
        }
        // Asked first: all callers but one find the pages made.
        if self.nested.get().is_some() {
            return Ok(());
        }
        let made: KBox<ShadowMmu> = pages(*self.tdp.format())?;
        // Within KVM_RUN: who holds the lock may be copying a log to memory that a VMM answers for when it likes. A task
        // that is to be killed does not wait for that, and hears no answer.
        let held = self.slots_lock.lock_killable().map_err(|_| NoMemory)?;
        // A withdrawal holds the lock from the tree's leaf to the flush: it is over before these pages are
        // there to be filled, or it finds them.
        let zapper = self.tdp.zapper();
        let other = self.nested.set_box(made);
        drop(zapper);
        // Behind the lock: the box that lost to another vCPU's is freed here, and freeing is not
        // for a spin lock.
        drop(other);
        self.adapt_shadow_limit(flush);
        drop(held);
        Ok(())
    }

    /// The shadow pages for guests of the guest, once they are made.
    #[inline]
    pub fn nested(&self) -> Option<&ShadowMmu> {
        self.nested.get()
    }

    /// [`mmu::ShadowGuard::nested_switch`], to the end. An error also where there are no pages, or where L1's
    /// tables cannot be served. With the root: whether this vCPU's translations of L2 are to be flushed.
    pub fn nested_switch<F: FlushRemote + ?Sized>(
        &self,
        by: Caller<'_, F>,
        roots: &mut NestedRoots,
        tables: &Tables,
    ) -> Result<(NestedRoot, bool), MemoryError> {
        let nested = self.nested().ok_or(MemoryError::NoMemory)?;
        loop {
            let outcome = self
                .on_shadow(by.vcpu, nested, |view, guard| guard.nested_switch(view, roots, tables));
            match outcome {
                NestedSwitch::Ready { root, replaced } => return Ok((root, replaced)),
                // Outside of the section: this allocates, and may throw pages away and flush.
                NestedSwitch::NeedPages(count) => nested.reserve(count, by.flush)?,
                NestedSwitch::Refused => return Err(MemoryError::Fault),
            }
        }
    }

    /// [`mmu::ShadowGuard::nested_fault`], to the end: finds the frames and pages that it lacks. `cache` is the
    /// vCPU's own. `missing`: a frame that was missing inside the loop, which is brought at once; what it comes to is not
    /// believed, as L1's tables may say something else by now. Runs in the VMM's address space.
    pub fn nested_fault<F: FlushRemote + ?Sized>(
        &self,
        by: Caller<'_, F>,
        cache: &mut TableCache,
        roots: &mut NestedRoots,
        access: &NestedAccess,
        missing: Option<&NestedFrame>,
    ) -> NestedOutcome {
        let Some(nested) = self.nested() else {
            return NestedOutcome::Error(MemoryError::NoMemory);
        };
        if let Some(missing) = missing {
            let _ = self.find_nested(nested, cache, roots, missing, by.flush);
        }
        // L1 can change its tables without end. Then L2 faults again, and the vCPU looks at its
        // requests between.
        for _ in 0..ROUNDS {
            let outcome = self
                .on_shadow(by.vcpu, nested, |view, guard| guard.nested_fault(view, roots, access));
            match outcome {
                NestedFault::Fixed { replaced } => return NestedOutcome::Fixed { replaced },
                NestedFault::L1(fault) => return NestedOutcome::L1(fault),
                NestedFault::NeedPages(count) => {
                    if nested.reserve(count, by.flush).is_err() {
                        return NestedOutcome::Error(MemoryError::NoMemory);
                    }
                }
                NestedFault::NeedFrame(wanted) => {
                    if let Some(outcome) = self.find_nested(nested, cache, roots, &wanted, by.flush)
                    {
                        // It looked as if a table led on: nothing was told yet.
                        if let NestedOutcome::L1(_) = outcome {
                            roots.tell_of_fault(access);
                        }
                        return outcome;
                    }
                }
            }
        }
        NestedOutcome::Retry
    }

    /// Brings a frame of L1's into the tree. `None`: it is there.
    fn find_nested(
        &self,
        nested: &ShadowMmu,
        cache: &mut TableCache,
        roots: &mut NestedRoots,
        wanted: &NestedFrame,
        flush: &(impl FlushRemote + ?Sized),
    ) -> Option<NestedOutcome> {
        let NestedFrame { gpa, write, exec, dirties, table } = *wanted;
        // "Present" is what only the log protects: a frame that is first touched counts as written.
        let access = FaultAccess { gpa, write, exec, present: write || !dirties };
        // Before the look: a change of the slots behind it makes the note void.
        let generation = self.generation();
        // As long as these slots are held, what is prepared for one of them is not forgotten.
        let slots = self.slots();
        match (self.fault(cache, &access, flush, fault_in), table) {
            (FaultOutcome::Mapped, table) => {
                match self.prepare_frame(nested, &slots, gpa, table.is_some()) {
                    Ok(()) => None,
                    Err(None) => Some(NestedOutcome::Retry),
                    Err(Some(error)) => Some(NestedOutcome::Error(error)),
                }
            }
            (FaultOutcome::Mmio, Some(fault)) => Some(NestedOutcome::L1(fault)),
            (FaultOutcome::Mmio, None) => Some(NestedOutcome::Mmio(gpa)),
            // A table in a ROM is read as it is; noted, so that the next walk leaves its flags
            // alone.
            (FaultOutcome::ReadonlyWrite, Some(_)) => {
                roots.note_rom(gpa.gfn(), generation);
                None
            }
            (FaultOutcome::ReadonlyWrite, None) => Some(NestedOutcome::ReadonlyWrite(gpa)),
            (FaultOutcome::Retry, _) => Some(NestedOutcome::Retry),
            (FaultOutcome::Error(error), _) => Some(NestedOutcome::Error(error)),
        }
    }

    /// Lets go of a vCPU's roots. `false`: they are of another memory, which must be asked.
    #[must_use = "roots of another memory are held still"]
    pub fn nested_release(&self, roots: &mut NestedRoots) -> bool {
        match self.nested() {
            Some(nested) => nested.lock().nested_release(roots),
            // Without pages it has no roots; another memory may.
            None => roots.is_empty(),
        }
    }
}
