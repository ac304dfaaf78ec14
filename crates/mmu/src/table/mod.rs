//! Page-table pages owned by a tree, and what may be done with them in safe code.
//!
//! The one module of this crate with `unsafe`. What it holds together:
//!
//! - An entry with the `TABLE` bit points to a page that the tree owns. Only [`Table::link`] writes
//!   such entries, and safe code can neither forge one nor overwrite one.
//! - A table is reached with the tree's lock held ([`ReadTree`], [`WriteTree`]) or in a section that
//!   withdrawals wait for ([`View`], [`Section`]). It is freed by [`WriteTree::finish`] alone: after unlinking it, with the lock
//!   held for writing, and after [`FlushRemote`] has seen every CPU that might run guest code or a
//!   section with interrupts off.
//! - A frame that a leaf names is read through the direct map only by [`View`], under the same rule:
//!   the page is given back to the host only after that flush.
//!
//! So the soundness of this module rests on promises made outside of it, each by a word `unsafe` there:
//! that of [`FlushRemote`], and that of [`Section::assume`], without which there is no [`View`]. That a
//! leaf names a frame of the VMM's follows from [`host::gup::HostPage`], which nothing else makes; that it
//! is withdrawn in time is the MMU notifier's protocol (`vm::memory`).
#![allow(unsafe_code)]

mod cache;
mod section;
mod view;

pub use cache::{Run, TableCache, TablePage};
pub use section::Section;
pub use view::{GuestPage, Trail, View};

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};

use host::arc::Arc;
use host::error::NoMemory;
use host::page::{Page, table_at};
use host::sync::{ReadGuard, RwSpinLock, WriteGuard};
use stats::{VmCount, VmStats};
use x86::{Gfn, Hpa};

use crate::format::{ADDRESS, Format, REMOVED, SPLIT_FOR_FETCH, TABLE};

/// Makes all CPUs forget translations.
///
/// # Safety
/// When `flush_remote` returns, every CPU that ran this VM's guest code, or was in a [`Section`] of one of
/// its vCPUs, has left it since the call began; and no vCPU enters the guest again without having its
/// TLB entries flushed. Tables and pages are given back on the strength of that.
pub unsafe trait FlushRemote {
    /// See the trait. Called with the MMU lock held for writing: it may wait for interrupts to be
    /// acknowledged, but must not sleep.
    fn flush_remote(&self);

    /// Page-modification logging is wanted from now on, or no longer. When this returns with `on`,
    /// no vCPU writes guest memory any more without it. Only for trees that say so
    /// ([`Format::logs`]). May sleep.
    fn log_pages(&self, _on: bool) {}

    /// The guest is about to reach memory of a device of the host's. When this returns, no vCPU enters the guest any more that does not
    /// know. May sleep.
    fn note_device(&self) {}

    /// What vCPUs have logged until now is handed to their memory. May sleep.
    fn gather_log(&self) {}
}

// SAFETY: passes on to what keeps the promise.
unsafe impl<F: FlushRemote + ?Sized> FlushRemote for &F {
    fn flush_remote(&self) {
        (**self).flush_remote();
    }

    fn log_pages(&self, on: bool) {
        (**self).log_pages(on);
    }

    fn note_device(&self) {
        (**self).note_device();
    }

    fn gather_log(&self) {
        (**self).gather_log();
    }
}

/// One count for all trees, so that no generation is ever met twice: not in another tree, and not after any
/// number of trees. 0 is none's.
static GENERATIONS: AtomicU64 = AtomicU64::new(0);

fn next_generation() -> u64 {
    GENERATIONS.fetch_add(1, Ordering::SeqCst).wrapping_add(1)
}

/// What an entry holds.
#[derive(Clone, Copy, Debug)]
pub enum Entry<'t> {
    /// A pointer to the next table.
    Table(Table<'t>),
    /// A leaf, or nothing (0).
    Word(u64),
}

/// A table of 512 entries, alive as long as `'t`.
#[derive(Clone, Copy, Debug)]
pub struct Table<'t> {
    words: &'t [AtomicU64; 512],
    level: u8,
    /// Bits of an entry that are the address.
    address: u64,
}

impl<'t> Table<'t> {
    /// 1 for a table of 4 KiB leaves, up to 4 or 5 for the root.
    #[inline]
    pub fn level(&self) -> u8 {
        self.level
    }

    /// The index of the entry that translates `gfn`.
    #[inline]
    pub fn index(&self, gfn: Gfn) -> usize {
        ((gfn.0 >> shift(self.level)) & 511) as usize
    }

    #[inline]
    fn word(&self, index: usize) -> &'t AtomicU64 {
        // The mask keeps the index in range, for the compiler too.
        &self.words[index & 511]
    }

    /// What stands at `index` (taken modulo 512).
    #[inline]
    pub fn entry(&self, index: usize) -> Entry<'t> {
        // Acquire: what link() stored in the table before is seen by who follows the pointer.
        let word = self.word(index).load(Ordering::Acquire);
        if word & (TABLE | REMOVED) == 0 {
            return Entry::Word(word);
        }
        // A table that waits for its flush is gone for whoever comes now.
        if word & REMOVED != 0 {
            return Entry::Word(0);
        }
        // SAFETY: TABLE entries are written by link() alone, from an owned page; it is not freed
        // while 't lasts (see the module's head).
        let words = unsafe { table_at(Hpa(word & self.address)) };
        Entry::Table(Table { words, level: self.level.wrapping_sub(1), address: self.address })
    }

    /// The lowest table from here down to `level` that translates `gfn`.
    #[inline]
    pub fn descend(self, gfn: Gfn, level: u8) -> Table<'t> {
        let mut table = self;
        let mut rest = gfn.0 >> shift(table.level);
        while table.level > level {
            // Acquire: what the table holds is seen by who follows the pointer.
            let word = table.word(rest as usize).load(Ordering::Acquire);
            if word & (TABLE | REMOVED) != TABLE {
                break;
            }
            // SAFETY: TABLE entries are written by link() alone, from an owned page, which outlasts this
            // walk.
            table.words = unsafe { table_at(Hpa(word & table.address)) };
            table.level -= 1;
            rest = gfn.0 >> shift(table.level);
        }
        table
    }

    /// Puts leaf `new` where leaf or nothing `old` stands. `false`: it has changed meanwhile.
    #[inline]
    pub fn replace(&self, index: usize, old: u64, new: u64) -> bool {
        // Safe code can neither forge an entry that owns a table nor lose one.
        (old | new) & (TABLE | REMOVED) == 0
            && self
                .word(index)
                .compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    /// Hangs an empty table where leaf or nothing `old` stands. `bits`: its permissions.
    /// The page comes back when the entry has changed meanwhile.
    pub fn link(
        &self,
        index: usize,
        old: u64,
        page: TablePage,
        bits: u64,
    ) -> Result<(), TablePage> {
        // Leaves of the last level have nothing below, and an entry with a table would lose it.
        if self.level <= 1 || old & (TABLE | REMOVED) != 0 {
            return Err(page);
        }
        let hpa = page.0.hpa();
        // Without REMOVED, whatever the caller says: the entry is alive.
        let new = (hpa.0 & self.address) | (bits & !(self.address | REMOVED)) | TABLE;
        // Release: who follows the pointer has to see the table as it was filled.
        match self.word(index).compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => {
                // Owned by the entry from here on; drop_table() takes it back.
                page.0.into_hpa();
                Ok(())
            }
            Err(_) => Err(page),
        }
    }

    /// Unlinks the table at an entry, so that [`WriteTree::finish`] frees it. `true` when there was
    /// one. With the lock held for writing: nobody links meanwhile.
    pub(crate) fn unlink(&self, index: usize) -> bool {
        let word = self.word(index);
        // Only the hardware writes beside us: its accessed bit may be lost in an entry that goes.
        let entry = word.load(Ordering::Relaxed);
        let linked = entry & TABLE != 0;
        if linked {
            // The address inverted: an entry that is not present names a frame to a CPU with L1TF all the
            // same, and what lies there is the host's.
            let kept = entry & SPLIT_FOR_FETCH;
            word.store((!entry & self.address) | kept | REMOVED, Ordering::Release);
        }
        linked
    }

    /// The physical address in an entry, without the encryption bit.
    #[inline]
    pub fn address_of(&self, entry: u64) -> Hpa {
        Hpa(entry & self.address)
    }

    /// Like [`Table::link`], with a table whose 512 entries are leaves that `leaf` gives. Returns
    /// whether the table was hung; the page is spent in either case.
    pub fn link_filled(
        &self,
        index: usize,
        old: u64,
        page: TablePage,
        bits: u64,
        leaf: impl Fn(u64) -> u64,
    ) -> bool {
        for (n, word) in (0u64..).zip(page.0.table()) {
            // Nobody else sees the page yet; link() publishes it with release order.
            word.store(leaf(n) & !(TABLE | REMOVED), Ordering::Relaxed);
        }
        // On failure the page is freed, not reused: it is not empty any more.
        self.link(index, old, page, bits).is_ok()
    }
}

/// Bits that a frame number is shifted by for a level's index.
#[inline]
pub const fn shift(level: u8) -> u32 {
    9 * (level as u32).saturating_sub(1)
}

/// The part of a tree that needs no lock.
#[derive(Debug)]
pub(crate) struct Trunk {
    /// Counts withdrawals; see [`View`].
    generation: AtomicU64,
    root: Page,
    format: Format,
}

impl Trunk {
    #[inline]
    fn top(&self) -> Table<'_> {
        Table {
            words: self.root.table(),
            level: self.format.levels(),
            address: ADDRESS & !self.format.encryption(),
        }
    }
}

/// A tree of tables with its lock. `S` is what the tree's user keeps under the same lock.
#[derive(Debug)]
pub struct Tree<S> {
    trunk: Trunk,
    lock: RwSpinLock<S>,
    stats: Arc<VmStats>,
}

impl<S> Tree<S> {
    /// An empty tree.
    pub fn new(format: Format, state: S) -> Result<Self, NoMemory> {
        let trunk =
            Trunk { generation: AtomicU64::new(next_generation()), root: Page::zeroed()?, format };
        let stats = Arc::new(VmStats::new())?;
        // The root, which no link counts.
        stats.of(VmCount::PageTablesAllocated).add(1);
        Ok(Self { trunk, lock: RwSpinLock::new(state), stats })
    }

    /// The root's address, as the hardware wants it (encryption bit included).
    pub fn root(&self) -> Hpa {
        Hpa(self.trunk.root.hpa().0 | self.trunk.format.encryption())
    }

    /// Number of levels.
    pub fn levels(&self) -> u8 {
        self.trunk.format.levels()
    }

    /// What its entries are made for.
    #[inline]
    pub fn format(&self) -> &Format {
        &self.trunk.format
    }

    /// Where tables and leaves are counted.
    pub fn stats(&self) -> &Arc<VmStats> {
        &self.stats
    }

    /// Counts there from now on; the root table, which is there as long as the tree, is left out.
    pub fn count_in(&mut self, stats: Arc<VmStats>) {
        self.stats = stats;
    }

    /// Grows with every withdrawal of a translation.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.trunk.generation.load(Ordering::Acquire)
    }

    /// With the lock held for reading: entries may be added.
    #[inline]
    pub fn read(&self) -> ReadTree<'_, S> {
        ReadTree { tree: self, guard: self.lock.read() }
    }

    /// With the lock held for writing: entries may be withdrawn.
    pub fn write(&self) -> WriteTree<'_, S> {
        WriteTree { tree: self, guard: self.lock.write(), unlinked: false }
    }

    /// Whether somebody waits for the lock.
    pub fn is_contended(&self) -> bool {
        self.lock.is_contended()
    }

    /// A look without the lock, in a section that withdrawals wait for.
    #[inline]
    pub fn view<'a>(&'a self, _section: Section<'a>) -> View<'a> {
        // On SVM the global interrupt flag keeps interrupts off in the loop, of which the kernel's own flag knows nothing.
        #[cfg(not(target_os = "none"))]
        debug_assert!(!host::irq::enabled(), "a view needs interrupts off");
        View::new(self.generation(), &self.trunk)
    }
}

impl<S> Drop for Tree<S> {
    fn drop(&mut self) {
        let top = self.trunk.top();
        for word in top.words {
            let entry = word.swap(0, Ordering::Relaxed);
            if entry & (TABLE | REMOVED) != 0 {
                // SAFETY: owned by the entry, which is gone; the unique borrow excludes all users.
                unsafe { drop_table(entry, top.level - 1, top.address) };
            }
        }
    }
}

/// The tree with its lock held for reading.
pub struct ReadTree<'a, S> {
    tree: &'a Tree<S>,
    guard: ReadGuard<'a, S>,
}

impl<S> ReadTree<'_, S> {
    /// The root table.
    #[inline]
    pub fn root(&self) -> Table<'_> {
        self.tree.trunk.top()
    }

    /// Where tables and leaves are counted.
    #[inline]
    pub fn stats(&self) -> &VmStats {
        &self.tree.stats
    }

    /// What is kept under the lock.
    #[inline]
    pub fn state(&self) -> &S {
        &self.guard
    }

    /// What the entries are made for.
    #[inline]
    pub fn format(&self) -> &Format {
        &self.tree.trunk.format
    }
}

/// The tree with its lock held for writing.
pub struct WriteTree<'a, S> {
    tree: &'a Tree<S>,
    guard: WriteGuard<'a, S>,
    unlinked: bool,
}

impl<S> WriteTree<'_, S> {
    /// The root table.
    #[inline]
    pub fn root(&self) -> Table<'_> {
        self.tree.trunk.top()
    }

    /// Where tables and leaves are counted.
    #[inline]
    pub fn stats(&self) -> &VmStats {
        &self.tree.stats
    }

    /// What the entries are made for.
    #[inline]
    pub fn format(&self) -> &Format {
        &self.tree.trunk.format
    }

    /// What is kept under the lock.
    #[inline]
    pub fn state_mut(&mut self) -> &mut S {
        &mut self.guard
    }

    /// Tells that tables were unlinked since the last [`WriteTree::finish`].
    pub fn note_unlinked(&mut self) {
        self.unlinked = true;
    }

    /// Ends a withdrawal of entries among the frames `first..end`: bumps the generation, flushes,
    /// and frees the tables unlinked there.
    pub fn finish(&mut self, flush: &(impl FlushRemote + ?Sized), first: Gfn, end: Gfn) {
        // After the entries changed and before the flush: who reads the old generation with
        // interrupts off is waited for by the flush.
        // The lock is held for writing: nobody else stores.
        self.tree.trunk.generation.store(next_generation(), Ordering::SeqCst);
        flush.flush_remote();
        // Only what was unlinked makes a second walk of the range worth its time.
        if self.unlinked {
            self.unlinked = false;
            // SAFETY: flushed; the lock is held for writing, and the unique borrow of the guard
            // shows that no Table reached through it is alive.
            let freed = unsafe { sweep(self.tree.trunk.top(), first.0, end.0) };
            self.tree.stats.of(VmCount::PageTablesFreed).add(freed.tables);
            self.tree.stats.of(VmCount::NxLargePageSplits).sub(freed.splits);
        }
    }
}

/// What was freed: tables, and how many of them stood for a large page because of a fetch.
#[derive(Clone, Copy, Debug, Default)]
struct Freed {
    tables: u64,
    splits: u64,
}

impl Freed {
    /// The table that `entry` owned.
    fn table(entry: u64) -> Self {
        Self { tables: 1, splits: u64::from(entry & SPLIT_FOR_FETCH != 0) }
    }
}

impl core::ops::AddAssign for Freed {
    fn add_assign(&mut self, more: Self) {
        self.tables = self.tables.wrapping_add(more.tables);
        self.splits = self.splits.wrapping_add(more.splits);
    }
}

/// Frees the unlinked tables among the frames `first..end` below `table`. Returns what.
///
/// # Safety
/// No other reference to tables of the tree exists, and a flush came after unlinking.
unsafe fn sweep(table: Table<'_>, first: u64, end: u64) -> Freed {
    let mut freed = Freed::default();
    // Entries of the last level own no tables.
    if table.level <= 1 {
        return freed;
    }
    let span = 1u64 << shift(table.level);
    let mut gfn = first;
    while gfn < end {
        let next = (gfn | (span - 1)).wrapping_add(1);
        let index = table.index(Gfn(gfn));
        let word = table.word(index);
        let entry = word.load(Ordering::Relaxed);
        if entry & REMOVED != 0 {
            // The entry first: it must not name a page that is free.
            word.store(0, Ordering::Release);
            // SAFETY: owned by the entry, which is gone; nobody else refers to it.
            freed += unsafe { drop_table(entry, table.level - 1, table.address) };
        } else if let Entry::Table(child) = table.entry(index) {
            // SAFETY: the child is a table of this tree, which nobody else refers to, by the contract.
            freed += unsafe { sweep(child, gfn, end.min(next)) };
        }
        gfn = next;
    }
    freed
}

/// The page of the table that an entry owns, linked or unlinked.
fn owned(entry: u64, address: u64) -> Hpa {
    Hpa(if entry & REMOVED != 0 { !entry } else { entry } & address)
}

/// Frees the table of `level` that `entry` owned and those below it. Returns what.
///
/// # Safety
/// The table was linked by the entry, which is gone, and nobody refers to it.
unsafe fn drop_table(entry: u64, level: u8, address: u64) -> Freed {
    let mut freed = Freed::table(entry);
    // SAFETY: link() gave the page up to the entry; it is taken back once.
    let page = unsafe { Page::from_hpa(owned(entry, address)) };
    if level > 1 {
        for word in page.table() {
            let entry = word.load(Ordering::Relaxed);
            if entry & (TABLE | REMOVED) != 0 {
                // SAFETY: the table was linked by an entry of one that is gone, so nobody refers to it.
                freed += unsafe { drop_table(entry, level - 1, address) };
            }
        }
    }
    freed
}

/// Forbids sending to another thread: interrupts are off on this CPU alone.
type NotSend = PhantomData<*const ()>;
