//! Shadow paging: tables for hardware without nested paging, derived from the guest's entries and
//! from the VM's own tree of frames ([`crate::Tdp`]).
//!
//! The tree stays what it is with nested paging: the VM's table of guest frames, kept honest by the
//! MMU notifier. Shadow pages are a cache of guest entries on top of it, as a TLB is. What a guest may
//! find stale in a TLB it may find stale here; what the architecture flushes is compared with the
//! guest's tables again ([`ShadowGuard::switch`], [`ShadowGuard::flush`], [`ShadowGuard::invlpg`]).
//!
//! One lock per VM ([`ShadowMmu::try_lock`] with interrupts off and without waiting, or
//! [`ShadowMmu::lock`]). Its holder waits for no other CPU. Lock order: the tree's lock, then this one.
#![forbid(unsafe_code)]

pub mod counters;
pub mod role;
pub mod roots;

use core::marker::PhantomData;

use host::error::NoMemory;
use host::trylock::{TryGuard, TryLock};
use x86::{Exception, Gfn, Gpa};

use crate::format::{Npt, PteFormat};
use crate::table::View;
use crate::tdp::FlushRemote;
use crate::walk::PagingContext;

pub use counters::Counters;
pub use role::Role;
pub use roots::{Root, ShadowRoots};

/// What became of a wish for a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootOutcome {
    /// It is current.
    Ready(Root),
    /// So many more pages are needed ([`ShadowMmu::reserve`]); nothing has changed.
    NeedPages(usize),
}

/// A guest frame that must be in the tree before the guest can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameWanted {
    /// Guest-physical address of the access, or of a paging entry.
    pub gpa: Gpa,
    /// It must be writable.
    pub write: bool,
    /// It is fetched from.
    pub exec: bool,
    /// A paging entry is wanted, not what the guest accesses: where nothing backs it, the guest
    /// gets this.
    pub table: Option<Exception>,
}

/// What became of a page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShadowFault {
    /// The shadow tables allow the access now: enter again.
    Fixed,
    /// The guest's tables refuse: its own exception.
    Guest(Exception),
    /// A frame must be found outside (`VmMemory::shadow_fault`).
    NeedFrame(FrameWanted),
    /// So many more pages are needed ([`ShadowMmu::reserve`]).
    NeedPages(usize),
    /// The access is allowed, but no table can allow it without allowing more: emulate the
    /// instruction.
    Emulate {
        /// Where the access leads.
        gpa: Gpa,
    },
}

/// The shadow pages of a VM. `F` is the format of the tree that they follow.
#[derive(Debug)]
pub struct ShadowMmu<F = Npt> {
    lock: TryLock<State>,
    counters: Counters,
    format: PhantomData<F>,
}

#[derive(Debug)]
struct State;

impl<F: PteFormat> ShadowMmu<F> {
    /// No pages. `encryption`: the host's SME bit, or 0.
    pub fn new(encryption: u64) -> Result<Self, NoMemory> {
        let _ = encryption;
        Ok(Self { lock: TryLock::new(State), counters: Counters::default(), format: PhantomData })
    }

    /// The pages, if nobody else works on them now. Interrupts are off; calls nothing of the
    /// kernel's.
    #[inline]
    pub fn try_lock(&self) -> Option<ShadowGuard<'_, F>> {
        let state = self.lock.try_lock()?;
        Some(ShadowGuard { state, counters: &self.counters, format: PhantomData })
    }

    /// The pages, however long that takes. Preemption stays off while the guard lives.
    pub fn lock(&self) -> ShadowGuard<'_, F> {
        ShadowGuard { state: self.lock.lock(), counters: &self.counters, format: PhantomData }
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Makes sure that at least `count` pages are free: takes back old ones once the VM has as many
    /// as it may, or allocates. May sleep; flushes when pages are taken back.
    pub fn reserve(
        &self,
        count: usize,
        flush: &(impl FlushRemote + ?Sized),
    ) -> Result<(), NoMemory> {
        let _ = (count, flush);
        Ok(())
    }

    /// Write-protects guest tables that have not changed for a while, so that flushes need not look
    /// at them. Worth a call outside the loop when [`ShadowGuard::wants_settling`] says so.
    pub fn settle(&self, flush: &(impl FlushRemote + ?Sized)) {
        let _ = flush;
    }

    /// Pages the VM may have (KVM_SET_NR_MMU_PAGES).
    pub fn limit(&self) -> u64 {
        0
    }

    /// Sets that, and gives back what is too much. May sleep.
    pub fn set_limit(&self, pages: u64, flush: &(impl FlushRemote + ?Sized)) {
        let _ = (pages, flush);
    }
}

/// The shadow pages with their lock held. Every function is for a section with interrupts off in
/// which `view` was made, and allocates nothing.
pub struct ShadowGuard<'a, F = Npt> {
    state: TryGuard<'a, State>,
    counters: &'a Counters,
    format: PhantomData<F>,
}

impl<F: PteFormat> ShadowGuard<'_, F> {
    /// Makes the root for `context` (CR0, CR3, CR4, EFER) current.
    ///
    /// `flush`: this is a MOV to CR3 or the like that flushes the TLB: what of the root's tree is
    /// stale goes. Without: a change of CR0.WP, EFER.NXE and so on, or a CR3 load with bit 63 set:
    /// what is stale goes only if a flush or INVLPG came since the root was current last.
    /// The hardware's own TLB is the caller's, in either case.
    /// `pdptes`: what PAE paging loaded; ignored without. `smm`: in system-management mode.
    pub fn switch(
        &mut self,
        view: &View<'_>,
        roots: &mut ShadowRoots,
        context: &PagingContext,
        pdptes: &[u64; 4],
        smm: bool,
        flush: bool,
    ) -> RootOutcome {
        let _ = (&self.state, self.counters, view, roots, context, pdptes, smm, flush);
        RootOutcome::NeedPages(1)
    }

    /// The guest flushed its TLB, or a part larger than one page (CR4.PGE, INVPCID, INVLPGA, a
    /// hypercall): what is stale in the current tree goes now, in the others before their next use.
    pub fn flush(&mut self, view: &View<'_>, roots: &mut ShadowRoots) {
        let _ = (view, roots);
    }

    /// The guest executed INVLPG on `va`.
    pub fn invlpg(&mut self, view: &View<'_>, roots: &mut ShadowRoots, va: u64) {
        let _ = (view, roots, va);
    }

    /// A #PF that the hardware took on the shadow tables, at `va` with error code `code`.
    /// `context` is the one of the last [`ShadowGuard::switch`], with today's RFLAGS.AC and CPL.
    pub fn fault(
        &mut self,
        view: &View<'_>,
        roots: &mut ShadowRoots,
        context: &PagingContext,
        va: u64,
        code: u32,
    ) -> ShadowFault {
        let _ = (view, roots, context, va, code);
        ShadowFault::NeedPages(1)
    }

    /// Guest frame `gfn` was written by the emulator or by the hypervisor itself. Call it after the
    /// write.
    pub fn note_write(&mut self, gfn: Gfn) {
        let _ = gfn;
    }

    /// Lets go of all roots but the current one: `keep_roots=0`, or something changed that no role
    /// knows (CPUID).
    pub fn forget_previous(&mut self, roots: &mut ShadowRoots) {
        let _ = roots;
    }

    /// Lets go of all roots. Before `roots` is dropped.
    pub fn release(&mut self, roots: &mut ShadowRoots) {
        let _ = roots;
    }

    /// Whether [`ShadowMmu::settle`] has something to do.
    #[inline]
    pub fn wants_settling(&self) -> bool {
        false
    }
}
