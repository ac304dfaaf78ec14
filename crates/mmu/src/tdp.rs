//! The TDP tables of a VM: mapping, withdrawing, write protection, ageing, lookup.
//!
//! Faults on different pages run in parallel: [`Mapper`] holds the MMU lock for reading and installs
//! entries by compare-and-exchange. [`Zapper`] holds it for writing. [`lookup`] and [`page_of`] need
//! no lock, with interrupts off. Large pages are split by filling a table with what the large leaf
//! said, so that no access is lost; they come back after the range was withdrawn.
//!
//! Where the format splits at fetches ([`Format::splits_at_fetch`]), a large leaf cannot be executed. A
//! large page is then in no CPU's instruction TLB, and no flush is needed when it is split.
//!
//! How the dirty log learns of writes is the format's: a leaf is made read-only, and the fault tells;
//! or, where the CPU logs pages by itself, a small leaf is made clean, and the CPU's log tells. Then
//! every small leaf of a slot that logs is clean, or marked in the bitmap, or in some CPU's log.
//!
//! Why faults may race: the first touch of a page is the commonest slow exit, and a guest that boots with many
//! vCPUs makes millions of them. Two vCPUs that touch one page find the same frame, because an invalidation that
//! could change it makes both start again. The loser of the compare-and-exchange finds what it wanted. With the
//! lock held for writing instead, they would take turns.
//!
//! Why a large page is never taken away to be split: without a translation, all the other vCPUs would fault on its
//! 512 pages at once, and whether they had been written would be forgotten.
//!
//! Why withdrawing needs the lock for writing: what it unlinks is freed after one flush. An entry that somebody
//! adds meanwhile, below a table that goes, would be lost, or be used after it was freed.

mod withdraw;

use host::arc::Arc;
use host::error::NoMemory;
use host::gup::HostFrame;
use stats::{VmCount, VmStats};
use x86::{Direction, Gfn, Gpa, Hpa, Pfn};

use crate::format::{
    Format, HOST_WRITABLE, LeafBits, NO_DIRECT_MAP, SPLIT_FOR_FETCH, WRITABLE, is_exec, is_present,
    shrink,
};
pub use crate::table::FlushRemote;
use crate::table::{
    Entry, GuestPage, ReadTree, Section, Table, TableCache, TablePage, Tree, View, shift,
};
pub use withdraw::{Thoroughness, Zapper};

/// Level of tables whose entries map 4 KiB.
pub const LEVEL_4K: u8 = 1;
/// Level of tables whose entries map 2 MiB.
pub const LEVEL_2M: u8 = 2;
/// Level of tables whose entries map 1 GiB.
pub const LEVEL_1G: u8 = 3;

/// Attempts before a fault is simply taken again: each lost race means that another CPU got on.
const ATTEMPTS: u32 = 16;

/// Pages of 4 KiB in a leaf at `level`.
#[inline]
pub const fn pages_per(level: u8) -> u64 {
    1 << shift(level)
}

/// What a leaf says about one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Host frame of exactly the frame asked for, also within a large page.
    pub pfn: Pfn,
    /// 1 = 4 KiB, 2 = 2 MiB, 3 = 1 GiB.
    pub level: u8,
    /// The guest may write.
    pub writable: bool,
    /// The host's page table allows writing, whatever the dirty log says.
    pub host_writable: bool,
    /// The guest may fetch instructions.
    pub exec: bool,
    /// The frame is ordinary memory in the kernel's direct map.
    pub direct: bool,
    /// Accessed since the bit was last cleared.
    pub accessed: bool,
    /// Written since mapped.
    pub dirty: bool,
}

/// A translation to be installed for one frame.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// Host frame of exactly the guest frame that faulted.
    pub frame: HostFrame,
    /// Largest level to use. Guest frame and host frame agree modulo that page size.
    pub level: u8,
    /// The guest may write now.
    pub writable: bool,
    /// The host allows writing.
    pub host_writable: bool,
    /// The guest may fetch instructions, from a leaf of a size that allows it.
    pub exec: bool,
    /// The fault was a fetch, and a leaf that refuses it is not enough.
    pub fetch: bool,
    /// The level that was possible, where a fetch alone is why `level` is a smaller one; else 0.
    pub refused: u8,
    /// What faulted: by a write the leaf is born dirty. `None`: not a fault, the leaf is born old.
    pub fault: Option<Direction>,
}

/// What a leaf has to allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// It allows writes.
    pub write: bool,
    /// It allows instruction fetches.
    pub fetch: bool,
}

/// What becomes of the marks of use that a look finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// They stay as they are.
    Kept,
    /// They are cleared: the next look finds what was used since.
    Cleared,
}

/// What became of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapOutcome {
    /// The leaf is there, at this level, with at least the permissions asked for.
    Mapped(u8),
    /// How many more table pages are needed; nothing was lost.
    NeedTables(usize),
    /// Another frame is mapped there: withdraw it first.
    Conflict,
    /// Other CPUs were faster, again and again.
    Retry,
}

/// The TDP tables of a VM in format `F`, with `S` under the same lock.
#[derive(Debug)]
pub struct Tdp<S> {
    tree: Tree<S>,
}

impl<S> Tdp<S> {
    /// A tree without translations.
    pub fn new(format: Format, state: S) -> Result<Self, NoMemory> {
        Ok(Self { tree: Tree::new(format, state)? })
    }

    /// What the tables are made for.
    #[inline]
    pub fn format(&self) -> &Format {
        self.tree.format()
    }

    /// Address of the root table: nCR3, or the address part of an EPT pointer.
    pub fn root(&self) -> Hpa {
        self.tree.root()
    }

    /// 4 or 5.
    pub fn levels(&self) -> u8 {
        self.tree.levels()
    }

    /// The first frame that the tables cannot translate.
    pub fn frames(&self) -> u64 {
        1 << (9 * u32::from(self.tree.levels()))
    }

    /// Counts there from now on.
    pub fn count_in(&mut self, stats: Arc<VmStats>) {
        self.tree.count_in(stats);
    }

    /// Grows whenever a translation is withdrawn; never the same for two VMs.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.tree.generation()
    }

    /// Takes the lock for adding translations.
    #[inline]
    pub fn mapper(&self) -> Mapper<'_, S> {
        Mapper { tree: self.tree.read() }
    }

    /// Takes the lock for withdrawing translations.
    pub fn zapper(&self) -> Zapper<'_, S> {
        Zapper { tree: self.tree.write() }
    }

    /// Whether somebody waits for the lock.
    pub fn is_contended(&self) -> bool {
        self.tree.is_contended()
    }

    /// Where tables and leaves are counted.
    pub fn stats(&self) -> &Arc<VmStats> {
        self.tree.stats()
    }

    /// A look at the tables without a lock.
    #[inline]
    pub fn view<'a>(&'a self, section: Section<'a>) -> View<'a> {
        self.tree.view(section)
    }
}

#[inline]
fn pfn_of(entry: u64, table: &Table<'_>, gfn: Gfn) -> Pfn {
    let within = gfn.0 & (pages_per(table.level()) - 1);
    Pfn((table.address_of(entry).0 >> 12) | within)
}

#[inline]
fn decode(format: &Format, entry: u64, table: &Table<'_>, gfn: Gfn) -> Leaf {
    Leaf {
        pfn: pfn_of(entry, table, gfn),
        level: table.level(),
        writable: entry & WRITABLE != 0,
        host_writable: entry & HOST_WRITABLE != 0,
        exec: is_exec(entry),
        direct: entry & NO_DIRECT_MAP == 0,
        accessed: entry & format.accessed() != 0,
        dirty: entry & format.dirty() != 0,
    }
}

#[inline]
fn find(format: &Format, root: Table<'_>, gfn: Gfn) -> Option<Leaf> {
    // A frame beyond the tables would find the translation of another: the index is taken modulo 512.
    if gfn.0 >> shift(root.level() + 1) != 0 {
        return None;
    }
    let table = root.descend(gfn, LEVEL_4K);
    match table.entry(table.index(gfn)) {
        Entry::Word(entry) if is_present(entry) => Some(decode(format, entry, &table, gfn)),
        _ => None,
    }
}

/// The translation of a frame, without any lock.
#[inline]
pub fn lookup(view: &View<'_>, gfn: Gfn) -> Option<Leaf> {
    find(view.format(), view.root(), gfn)
}

/// The guest page behind an address, to be read (and written, where the guest itself could)
/// within the view's section. `None`: not mapped, or not ordinary memory.
#[inline]
pub fn page_of(view: &View<'_>, gpa: Gpa) -> Option<GuestPage> {
    let leaf = lookup(view, gpa.gfn())?;
    // A write of ours sets no dirty bit, so it is no use to a log that lives by them.
    let writable = leaf.writable && (leaf.dirty || !view.format().logs());
    // Device memory is left out: reading it may have effects, and it is not in the kernel's direct map.
    leaf.direct.then(|| view.page(leaf.pfn.hpa(), writable))
}

/// Calls `each(table, index, entry, first frame of the leaf)` for every present leaf that reaches
/// into `first..end`.
fn for_each_leaf(
    table: Table<'_>,
    first: u64,
    end: u64,
    each: &mut impl FnMut(&Table<'_>, usize, u64, Gfn),
) {
    let span = pages_per(table.level());
    let mut gfn = first;
    while gfn < end {
        let begin = gfn & !(span - 1);
        let next = begin.wrapping_add(span);
        let index = table.index(Gfn(gfn));
        match table.entry(index) {
            Entry::Table(child) => for_each_leaf(child, gfn, end.min(next), each),
            Entry::Word(entry) if is_present(entry) => each(&table, index, entry, Gfn(begin)),
            Entry::Word(_) => {}
        }
        gfn = next;
    }
}

/// The tables with the lock held for reading.
pub struct Mapper<'a, S> {
    tree: ReadTree<'a, S>,
}

impl<S> Mapper<'_, S> {
    /// What is kept under the lock.
    #[inline]
    pub fn state(&self) -> &S {
        self.tree.state()
    }

    /// The translation of a frame.
    pub fn lookup(&self, gfn: Gfn) -> Option<Leaf> {
        find(self.tree.format(), self.tree.root(), gfn)
    }

    fn in_range(&self, gfn: Gfn) -> bool {
        gfn.0 >> shift(self.tree.root().level() + 1) == 0
    }

    /// Installs a translation, or widens the permissions of the one that is there.
    ///
    /// Missing tables are taken from `cache`. A large leaf where a smaller one is asked for is
    /// split; a table where a large leaf is asked for stays, and the leaf becomes smaller.
    /// That the frame is still the VMM's is the caller's to know: no invalidation ran since it was found.
    pub fn map(&self, gfn: Gfn, mapping: &Mapping, cache: &mut TableCache) -> MapOutcome {
        if !self.in_range(gfn) {
            // No slot reaches beyond the tables, or this would be retried for ever.
            return MapOutcome::Retry;
        }
        // After the first faults nearly all tables are there, so no loop is needed to come down.
        let table = self.tree.root().descend(gfn, mapping.level);
        // The first touch of a small page.
        if table.level() == LEVEL_4K {
            let index = table.index(gfn);
            // Only an entry of 0 is filled here. A leaf to be widened or a table is for
            // map_below().
            if table.replace(index, 0, self.leaf(gfn, LEVEL_4K, mapping)) {
                // Almost every fault of a guest that starts is this one; it costs one exchange.
                self.tree.stats().mapped(LEVEL_4K, 1);
                return MapOutcome::Mapped(LEVEL_4K);
            }
        }
        self.map_below(table, gfn, mapping, cache)
    }

    /// [`Mapper::map`] from `table` on down, whatever stands there.
    #[inline(never)]
    fn map_below(
        &self,
        mut table: Table<'_>,
        gfn: Gfn,
        mapping: &Mapping,
        cache: &mut TableCache,
    ) -> MapOutcome {
        let mut attempts = 0;
        while attempts < ATTEMPTS {
            let index = table.index(gfn);
            let old = match table.entry(index) {
                Entry::Table(next) => {
                    // Going down is no lost race; the depth bounds it.
                    table = next;
                    continue;
                }
                Entry::Word(old) => old,
            };
            if is_present(old) && pfn_of(old, &table, gfn) != mapping.frame.pfn() {
                // Two frames for one page at once, on two CPUs, until a flush: the old one is withdrawn first.
                return MapOutcome::Conflict;
            }
            if table.level() > mapping.level {
                // A large leaf that allows the access already stays: another vCPU's fault made it.
                if is_present(old) && satisfies(old, mapping) {
                    return MapOutcome::Mapped(table.level());
                }
                let Some(page) = cache.take() else {
                    // Allocating may sleep, and a lock is held. The caller gives it up, fills its cache and comes again.
                    return MapOutcome::NeedTables(usize::from(table.level() - mapping.level));
                };
                // The size is refused for a fetch alone. The entry keeps that, so that freeing the
                // table takes the split out of the statistics again.
                let refused = table.level() <= mapping.refused;
                let bits =
                    self.tree.format().table_bits() | if refused { SPLIT_FOR_FETCH } else { 0 };
                if is_present(old) {
                    self.split_leaf(&table, index, old, page, bits);
                } else {
                    match table.link(index, old, page, bits) {
                        Ok(()) => self.note_linked(refused),
                        // Another CPU linked a table first. Ours is empty still, and the next round
                        // goes into theirs.
                        Err(page) => cache.put(page),
                    }
                }
            } else {
                let new = self.leaf(gfn, table.level(), mapping);
                // What was granted before stays granted, and the hardware's bits are kept.
                let wanted = if is_present(old) { old | (new & self.widening()) } else { new };
                if wanted == old || table.replace(index, old, wanted) {
                    // Only the exchange that filled an empty entry counts a page; widening adds
                    // none.
                    if !is_present(old) {
                        self.tree.stats().mapped(table.level(), 1);
                    }
                    return MapOutcome::Mapped(table.level());
                }
            }
            attempts += 1;
        }
        MapOutcome::Retry
    }

    /// Makes the large leaves that reach into `first..end` small, as far as `cache` has tables. Where to go
    /// on with more of them; `None`: none is left.
    pub fn split_large(&self, first: Gfn, end: Gfn, cache: &mut TableCache) -> Option<Gfn> {
        let mut gfn = first;
        while gfn.0 < end.0 && self.in_range(gfn) {
            let table = self.tree.root().descend(gfn, LEVEL_4K);
            let mut span = pages_per(table.level());
            if table.level() == LEVEL_4K {
                // A table of small leaves has nothing to split; what could be large begins behind
                // it.
                span = pages_per(LEVEL_2M);
            } else if let Entry::Word(old) = table.entry(table.index(gfn))
                && is_present(old)
            {
                // Allocating may sleep and the lock is held, so the caller goes on from here with
                // more.
                let Some(page) = cache.take() else { return Some(gfn) };
                // If another CPU was faster, what stands there now is looked at again.
                self.split_leaf(
                    &table,
                    table.index(gfn),
                    old,
                    page,
                    self.tree.format().table_bits(),
                );
                continue;
            }
            gfn = Gfn((gfn.0 | (span - 1)).wrapping_add(1));
        }
        None
    }

    /// Puts a table of its parts in the place of the large leaf `old`. Whether that was still there.
    fn split_leaf(
        &self,
        table: &Table<'_>,
        index: usize,
        old: u64,
        page: TablePage,
        bits: u64,
    ) -> bool {
        let below = table.level() - 1;
        let small = self.split(shrink(old, below), below);
        let step = pages_per(below) << 12;
        // One exchange hangs the filled table. An accessed or dirty bit that the CPU sets meanwhile
        // makes it fail, so none is lost.
        let linked = table.link_filled(index, old, page, bits, |n| small.wrapping_add(n * step));
        if linked {
            self.note_linked(bits & SPLIT_FOR_FETCH != 0);
            self.tree.stats().unmapped(table.level(), 1);
            self.tree.stats().mapped(below, pages_per(2));
        }
        linked
    }

    fn note_linked(&self, refused: bool) {
        self.tree.stats().of(VmCount::PageTablesAllocated).add(1);
        if refused {
            self.tree.stats().of(VmCount::NxLargePageSplits).add(1);
        }
    }

    #[inline]
    fn leaf(&self, gfn: Gfn, level: u8, mapping: &Mapping) -> u64 {
        // A table may have forced a smaller leaf than the mapping's: the frame is then exact.
        let within = gfn.0 & (pages_per(level) - 1);
        let first = Pfn(mapping.frame.pfn().0.wrapping_sub(within)).hpa();
        let bits = LeafBits {
            writable: mapping.writable,
            exec: mapping.exec,
            direct: mapping.frame.is_memory(),
            // What is mapped ahead was not used: the host's ageing has to find it old.
            accessed: mapping.fault.is_some(),
            dirty: mapping.fault == Some(Direction::Write) && mapping.writable,
        };
        let host = if mapping.host_writable { HOST_WRITABLE } else { 0 };
        self.tree.format().leaf(first, level, bits) | host
    }

    /// What the parts of a large leaf say, of which `small` is one, after it was split.
    ///
    /// If the log took write access from the large leaf, its small parts need not fault one by one
    /// where the CPU logs pages. While the large leaf can still be written, its translation may be
    /// in some TLB as dirty: then whoever starts the log must see something to flush.
    fn split(&self, small: u64, level: u8) -> u64 {
        let format = self.tree.format();
        let small = format.part(small, level);
        let watched = small & (WRITABLE | HOST_WRITABLE) == HOST_WRITABLE;
        // The bit in the parts must say what the log has: clean, so that the CPU logs the first
        // write.
        if format.logs() && level == LEVEL_4K && watched {
            (small | WRITABLE) & !format.dirty()
        } else {
            small
        }
    }

    /// Bits that a second mapping of the same frame may add to a leaf.
    #[inline]
    fn widening(&self) -> u64 {
        self.written() | HOST_WRITABLE
    }

    /// What a leaf that is written now has.
    #[inline]
    fn written(&self) -> u64 {
        let format = self.tree.format();
        WRITABLE | format.accessed() | format.dirty()
    }

    /// Gives back write access that only the dirty log took away, without asking the host again.
    ///
    /// `true`: the leaf is there, 4 KiB, and now allows the access; for a write the caller marks
    /// the page dirty before it lets the lock go. `false`: the long way, also for a fetch from a leaf
    /// that does not allow it.
    pub fn restore_access(&self, gfn: Gfn, wanted: Wanted) -> bool {
        // As in map(): indices begin anew behind the tables.
        if !self.in_range(gfn) {
            return false;
        }
        let (mut table, format) = (self.tree.root(), self.tree.format());
        for _ in 0..ATTEMPTS {
            let index = table.index(gfn);
            match table.entry(index) {
                Entry::Table(next) => table = next,
                Entry::Word(old) => {
                    // A large leaf that may not be executed has to be split, which takes tables:
                    // the long way.
                    if !is_present(old) || (wanted.fetch && !is_exec(old)) {
                        return false;
                    }
                    // Present, and no write: another CPU was faster, or the translation that
                    // faulted was a stale one.
                    if !wanted.write {
                        return true;
                    }
                    if old & WRITABLE != 0 {
                        // A write through a leaf of shadow pages, which sets no dirty bit here.
                        let noted = old | self.written();
                        if !format.logs() || old == noted || table.replace(index, old, noted) {
                            return true;
                        }
                        continue;
                    }
                    // A large page becomes small before it may be written again: the log is by 4
                    // KiB.
                    if old & HOST_WRITABLE == 0 || table.level() > LEVEL_4K {
                        return false;
                    }
                    if table.replace(index, old, old | self.written()) {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Whether any page of `first..end` was accessed.
    ///
    /// No flush follows: a stale TLB entry only makes a page look older than it is.
    /// Only where the CPU sets accessed bits ([`Format::tracks`]): see [`Mapper::is_mapped`].
    pub fn age(&self, first: Gfn, end: Gfn, marks: Marks) -> bool {
        let (mut young, bit) = (false, self.tree.format().accessed());
        for_each_leaf(self.tree.root(), first.0, end.0, &mut |table, index, entry, _| {
            if entry & bit != 0 {
                young = true;
                if marks == Marks::Cleared {
                    // Losing the race means that it was accessed again: it stays young.
                    table.replace(index, entry, entry & !bit);
                }
            }
        });
        young
    }

    /// Whether any page of `first..end` is mapped. Where the CPU has no accessed bits, a page is
    /// young as long as it is, and ageing withdraws it.
    pub fn is_mapped(&self, first: Gfn, end: Gfn) -> bool {
        let mut any = false;
        for_each_leaf(self.tree.root(), first.0, end.0, &mut |_, _, _, _| any = true);
        // Ageing then has to withdraw, which its caller does: no flag tells what was used.
        any
    }
}

fn satisfies(entry: u64, mapping: &Mapping) -> bool {
    (!mapping.writable || entry & WRITABLE != 0) && (!mapping.fetch || is_exec(entry))
}
