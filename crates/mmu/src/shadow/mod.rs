//! Shadow paging: tables for hardware without TDP, derived from the guest's entries and
//! from the VM's own tree of frames ([`crate::Tdp`]).
//!
//! The tree stays what it is with TDP: the VM's table of guest frames, kept honest by the
//! MMU notifier. Shadow pages are a cache of guest entries on top of it, as a TLB is. What a guest may
//! find stale in a TLB it may find stale here; what the architecture flushes is compared with the
//! guest's tables again ([`ShadowGuard::switch`], [`ShadowGuard::flush`], [`ShadowGuard::invlpg`]).
//! [`nested`] does the same for a guest that is a hypervisor, from its NPT or EPT tables.
//!
//! Why guest tables are not all write-protected: each write to one would exit, and a guest that makes a
//! process writes thousands. A table may change unseen instead (it is *in doubt*), and is compared when the
//! guest flushes. Only a table that was found unchanged several times is protected, so that flushes pass it
//! by: it is *settled*. `settle` names that one act, in its two halves with a flush of all CPUs between.
//!
//! Why a page is known by frame and role: the same guest table means different things under CR0.WP, with
//! NX, or below a read-only entry ([`crate::role`]). A page with another role is another page; so a guest
//! that toggles CR0.WP finds the pages of both sides.
//!
//! Why the tree is asked and not the host: a frame in the tree is one that the notifier will withdraw, and
//! with it every shadow entry that was made from it ([`withdraw`]). So shadow pages hold no reference, and a
//! fault needs no call into the kernel where the tree has the frame.
//!
//! One lock per VM ([`ShadowMmu::try_lock`] with interrupts off and without waiting, or
//! [`ShadowMmu::lock`]). Its holder waits for no other CPU. Lock order: the tree's lock, then this one.
#![forbid(unsafe_code)]

mod ahead;
mod arena;
mod audit;
pub mod counters;
mod entries;
mod fault;
mod frames;
pub mod nested;
mod recycle;
mod roms;
pub mod roots;
mod settle;
mod sync;
mod tables;
mod withdraw;

use alloc::vec::Vec;
use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};

use host::arc::Arc;
use host::boxed::KBox;
use host::error::NoMemory;
use host::trylock::{TryGuard, TryLock};
use x86::{Exception, Gfn, Gpa};

use crate::format::Format;
use crate::role::{AddressSpace, PagingContext};
use crate::table::View;
use crate::tdp::{FlushRemote, Marks};

use arena::{Arena, PageId};
use frames::{Chunk, Frames, Lack, Span};

pub use counters::Counters;
pub use nested::{NestedFault, NestedFrame, NestedRoot, NestedRoots, NestedSwitch};
pub use roots::{Root, ShadowRoots};

/// What the guest's change of its paging registers does to its TLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tlb {
    /// A MOV to CR3 or the like flushes it: what of the root's tree is stale goes.
    Flushed,
    /// A change of CR0.WP, EFER.NXE and so on, or a CR3 load with bit 63 set, leaves it: what is stale goes only if a
    /// flush or INVLPG came since the root was current last.
    Kept,
}

impl Tlb {
    /// Flushed on a condition; kept otherwise.
    #[inline]
    pub const fn flushed_if(condition: bool) -> Self {
        if condition { Self::Flushed } else { Self::Kept }
    }
}

/// What became of a wish for a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootOutcome {
    /// The root is current.
    Ready(Root),
    /// How many more pages are needed ([`ShadowMmu::reserve`]); nothing has changed.
    NeedPages(usize),
}

/// A guest frame that must be in the tree before the guest can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameWanted {
    /// Guest-physical address of the access, or of a paging entry.
    pub gpa: Gpa,
    /// The frame must be writable.
    pub write: bool,
    /// The frame is fetched from.
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
    /// How many more pages are needed ([`ShadowMmu::reserve`]).
    NeedPages(usize),
    /// The access is allowed, but no table can allow it without allowing more: emulate the
    /// instruction.
    Emulate {
        /// Where the access leads.
        gpa: Gpa,
    },
}

/// The shadow pages of a VM.
#[derive(Debug)]
pub struct ShadowMmu {
    lock: TryLock<State>,
    counters: Arc<Counters>,
}

/// What the lock protects.
#[derive(Debug)]
struct State {
    arena: Arena,
    frames: Frames,
    counters: Arc<Counters>,
    /// How the entries are spelled that the hardware walks.
    /// On the heap: the state is made on a stack once.
    format: KBox<Format>,
    /// Pages that the VM may have.
    limit: u64,
    /// Entries found unchanged that make a table worth protecting.
    calm: u32,
    /// The number of this walk over pages; see [`arena::ShadowPage::seen`].
    walk: Cell<u64>,
    /// Entries that it may still compare.
    budget: Cell<u32>,
    /// Pages whose tables are worth protecting, and how many.
    queue: [Cell<PageId>; settle::QUEUE],
    queued: Cell<usize>,
    /// Comparisons that those cost since.
    pressing: Cell<u32>,
    /// Pages whose tables were protected before the flush, and how many.
    settling_pages: [Cell<PageId>; settle::QUEUE],
    settling: Cell<usize>,
}

// From 1: 0 stands for pages of nobody's.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Pages that a VM may have at least, and before its memory is known (KVM API §4.44).
pub const LEAST_PAGES: u64 = 64;

impl ShadowMmu {
    /// No pages. `format`: that of the entries that the hardware walks.
    pub fn new(format: Format) -> Result<Self, NoMemory> {
        let counters = Arc::new(Counters::default())?;
        let format = KBox::new(format)?;
        // Relaxed: only that no two numbers are equal matters.
        counters.number.store(NUMBERS.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        let state = State {
            arena: Arena::new([host::random::word(), host::random::word()])?,
            frames: Frames::default(),
            counters: counters.clone(),
            format,
            limit: LEAST_PAGES,
            calm: sync::CALM,
            walk: Cell::new(0),
            budget: Cell::new(0),
            queue: [const { Cell::new(0) }; settle::QUEUE],
            queued: Cell::new(0),
            pressing: Cell::new(0),
            settling_pages: [const { Cell::new(0) }; settle::QUEUE],
            settling: Cell::new(0),
        };
        Ok(Self { lock: TryLock::new(state), counters })
    }

    /// The pages, if nobody else works on them now. Interrupts are off; calls nothing of the
    /// kernel's.
    #[inline]
    pub fn try_lock(&self) -> Option<ShadowGuard<'_>> {
        let state = self.lock.try_lock()?;
        Some(ShadowGuard { state })
    }

    /// The pages, however long that takes. Preemption stays off while the guard lives.
    pub fn lock(&self) -> ShadowGuard<'_> {
        ShadowGuard { state: self.lock.lock() }
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What happened so far, to be kept.
    pub fn shared_counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Makes sure that at least `count` pages are free: takes back old ones once the VM has as many
    /// as it may, or allocates. May sleep; flushes when pages are taken back.
    pub fn reserve(
        &self,
        count: usize,
        flush: &(impl FlushRemote + ?Sized),
    ) -> Result<(), NoMemory> {
        self.reserve_pages(count, flush)
    }

    /// Makes it possible to note leaves of frame `gfn`, which is in the tree now and lies in the slot
    /// of the frames `first..end`. May sleep.
    pub fn prepare(&self, gfn: Gfn, first: Gfn, end: Gfn) -> Result<(), NoMemory> {
        loop {
            // The lock is let go between the steps, for allocating sleeps; so each begins with a
            // new look.
            // A short look: what is allocated below may be refused then, and comes back.
            let lack = self.lock.lock().frames.lacks(gfn);
            match lack {
                Lack::Nothing => return Ok(()),
                Lack::Span(count) => {
                    let span = Span::new(first, end)?;
                    let mut room = Vec::new();
                    room.try_reserve_exact(count)?;
                    let refused = self.lock.lock().frames.add_span(span, &mut room);
                    if refused.is_some() {
                        // The span of a slot that was there before is on its way out.
                        return Ok(());
                    }
                }
                Lack::Chunk => {
                    let chunk = KBox::new(Chunk::new()?)?;
                    let refused = self.lock.lock().frames.add_chunk(gfn, chunk);
                    // What comes back is a chunk too many: another vCPU was faster.
                    drop(refused);
                }
            }
        }
    }

    /// Write-protects guest tables that have not changed for a while, so that flushes need not look
    /// at them. Worth a call outside the loop when [`ShadowGuard::wants_settling`] says so.
    /// [`ShadowGuard::settle_end`] completes it; `true`: it must be called, after a flush of all
    /// CPUs.
    pub fn settle_begin(&self) -> bool {
        self.lock.lock().settle_begin()
    }

    /// How many entries a flush must find unchanged before their table is worth protecting.
    pub fn set_calm(&self, entries: u32) {
        // Set by tests: the VM keeps what `sync` begins with.
        self.lock.lock().calm = entries;
    }

    /// Pages the VM may have (KVM_SET_NR_MMU_PAGES).
    pub fn limit(&self) -> u64 {
        self.lock.lock().limit
    }

    /// Sets how many pages there may be, and gives back what is too much. May sleep.
    pub fn set_limit(&self, pages: u64, flush: &(impl FlushRemote + ?Sized)) {
        self.shrink_to(pages, flush);
    }

    /// The tree has withdrawn the frames `first..end`: drops their leaves. Before the flush.
    pub fn withdraw(&self, first: Gfn, end: Gfn) {
        self.lock.lock().withdraw(first, end);
    }

    /// The tree has taken write access from the frames `first..end`: so do their leaves. Before the
    /// flush. Whether any had it.
    pub fn write_protect(&self, first: Gfn, end: Gfn) -> bool {
        self.lock.lock().write_protect(first, end)
    }

    /// Whether the hardware used any of the frames `first..end`.
    pub fn age(&self, first: Gfn, end: Gfn, marks: Marks) -> bool {
        self.lock.lock().age(first, end, marks)
    }

    /// The slot of the frames `first..end` is gone and withdrawn: so go the pages made from tables in
    /// it, and what was known of its frames. May sleep.
    pub fn forget_slot(&self, first: Gfn, end: Gfn) {
        let mut next = Some(1);
        // In stretches, the lock let go between them: the inner loop only tries to take it, and
        // would be left each time.
        while let Some(from) = next {
            next = self.lock.lock().forget(first, end, from);
            host::task::cond_resched();
        }
        // Last: dropping an entry looks its frame's chunk up.
        let span = self.lock.lock().frames.remove_span(first);
        drop(span);
    }
}

/// The shadow pages with their lock held. Every function is for a section with interrupts off in
/// which `view` was made, and allocates nothing.
pub struct ShadowGuard<'a> {
    state: TryGuard<'a, State>,
}

impl ShadowGuard<'_> {
    /// Makes the root for `context` (CR0, CR3, CR4, EFER) current.
    ///
    /// The hardware's own TLB is the caller's, in either case of [`Tlb`].
    /// `pdptes`: what PAE paging loaded; ignored without.
    pub fn switch(
        &mut self,
        view: &View<'_>,
        roots: &mut ShadowRoots,
        context: &PagingContext,
        pdptes: &[u64; 4],
        space: AddressSpace,
        tlb: Tlb,
    ) -> RootOutcome {
        self.state.switch(view, roots, context, pdptes, space, tlb)
    }

    /// The guest flushed its TLB, or a part larger than one page (CR4.PGE, INVPCID, INVLPGA, a
    /// hypercall): what is stale in the current tree goes now, in the others before their next use.
    pub fn flush(&mut self, view: &View<'_>, roots: &mut ShadowRoots) {
        self.state.flush(view, roots);
    }

    /// The guest executed INVLPG on `va`.
    pub fn invlpg(&mut self, view: &View<'_>, roots: &mut ShadowRoots, va: u64) {
        self.state.invlpg(view, roots, va);
    }

    /// A #PF that the hardware took on the shadow tables, at `va` with error code `code`.
    /// `context` is the one of the last [`ShadowGuard::switch`], with today's RFLAGS.AC and CPL.
    pub fn fault(
        &mut self,
        view: &View<'_>,
        roots: &ShadowRoots,
        context: &PagingContext,
        va: u64,
        code: u32,
    ) -> ShadowFault {
        self.state.fault(view, roots, context, va, code)
    }

    /// Guest frame `gfn` was written by the emulator or by the hypervisor itself. Call it after the
    /// write.
    pub fn note_write(&mut self, gfn: Gfn) {
        self.state.unsync_table(gfn);
    }

    /// Any guest frame may have been written without notice: the next flushes look at every table.
    pub fn note_writes(&mut self) {
        self.state.unsync_all();
    }

    /// Lets go of all roots but the current one: `keep_roots=0`.
    pub fn forget_previous(&mut self, roots: &mut ShadowRoots) {
        self.state.forget_previous(roots);
    }

    /// Lets go of all roots: before `roots` is dropped, and when something changed that decides what
    /// entries mean but is in no register (CPUID).
    pub fn release(&mut self, roots: &mut ShadowRoots) {
        self.state.release(roots);
    }

    /// Whether [`ShadowMmu::settle_begin`] has something to do that is worth leaving the loop.
    #[inline]
    pub fn wants_settling(&self) -> bool {
        self.state.wants_settling()
    }

    /// Completes what [`ShadowMmu::settle_begin`] began, after all CPUs were flushed.
    pub fn settle_end(&mut self, view: &View<'_>) {
        self.state.settle_end(view);
    }
}
