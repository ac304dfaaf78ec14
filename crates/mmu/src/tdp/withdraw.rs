//! Withdrawing translations and watching for writes, with the tree's lock held for writing.

use x86::Gfn;

use super::{LEVEL_1G, LEVEL_4K, Leaf, find, for_each_leaf, pages_per};
use crate::format::WRITABLE;
use crate::table::{Entry, FlushRemote, Table, WriteTree};

/// The tables with the lock held for writing.
pub struct Zapper<'a, S> {
    pub(super) tree: WriteTree<'a, S>,
}

/// How thoroughly a range is withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thoroughness {
    /// Leaves, and tables that held some: what an invalidation needs.
    Leaves,
    /// Empty tables too, so that large pages can take their place: a slot goes.
    Tables,
}

impl<S> Zapper<'_, S> {
    /// What is kept under the lock.
    #[inline]
    pub fn state_mut(&mut self) -> &mut S {
        self.tree.state_mut()
    }

    /// The translation of a frame.
    pub fn lookup(&self, gfn: Gfn) -> Option<Leaf> {
        find(self.tree.format(), self.tree.root(), gfn)
    }

    /// Withdraws all translations that reach into `first..end`, flushes if there were any, and
    /// frees tables that the range covers whole. Returns whether there were any.
    pub fn zap(
        &mut self,
        first: Gfn,
        end: Gfn,
        how: Thoroughness,
        flush: &(impl FlushRemote + ?Sized),
    ) -> bool {
        // Indices are taken modulo 512: beyond the tables the walk would begin again at the first frame.
        let end = Gfn(end.0.min(pages_per(self.tree.root().level() + 1)));
        let mut done = Zapped::default();
        zap_below(self.tree.root(), first.0, end.0, how, &mut done);
        // Counted before the flush: the leaves are gone, whoever may have them in a TLB still.
        for (level, count) in (LEVEL_4K..).zip(done.count) {
            self.tree.stats().unmapped(level, count);
        }
        if done.tables {
            self.tree.note_unlinked();
        }
        let any = done.leaves || done.tables;
        // Where nothing was mapped no CPU can have cached anything, so nobody is interrupted.
        if any {
            self.tree.finish(flush, first, end);
        }
        any
    }

    /// The first frame of `first..end` below which the upper levels hold anything; `end` if none.
    /// Lets a long walk step over holes; exact to 1 GiB only.
    pub fn next_mapped(&self, first: Gfn, end: Gfn) -> Gfn {
        next_below(self.tree.root(), first.0, end.0).map_or(end, Gfn)
    }

    /// Ends a round of [`Zapper::watch_writes`]: bumps the generation and flushes.
    pub fn flush(&mut self, flush: &(impl FlushRemote + ?Sized)) {
        // No range: write protection unlinks no table, so there is nothing to sweep.
        self.tree.finish(flush, Gfn(0), Gfn(0));
    }

    /// Makes the next write through every leaf that reaches into `first..end` be noticed: takes write
    /// access from it, or makes it clean where the CPU logs pages and the leaf is small. Returns
    /// whether anything was changed: then the caller must flush, with this lock or after, before it
    /// relies on it.
    pub fn watch_writes(&mut self, first: Gfn, end: Gfn) -> bool {
        let (mut any, format) = (false, self.tree.format());
        let small = if format.logs() { format.dirty() } else { WRITABLE };
        for_each_leaf(self.tree.root(), first.0, end.0, &mut |table, index, entry, _| {
            // A large leaf always loses its write access: the CPU's log names 4 KiB pages, and which of the 512 was written
            // is what the VMM asks.
            let bit = if table.level() == LEVEL_4K { small } else { WRITABLE };
            any |= take_bit(table, index, entry, bit);
        });
        any
    }

    /// Makes the next write through the leaves of the pages `base + n` be noticed, as
    /// [`Self::watch_writes`] does, for every bit `n` of `mask`.
    pub fn watch_writes_masked(&mut self, base: Gfn, mask: u64) -> bool {
        let (mut any, mut rest) = (false, mask);
        while rest != 0 {
            // Runs of set bits: dirty pages come in clusters.
            let skip = rest.trailing_zeros();
            let run = (rest >> skip).trailing_ones();
            let first = base.0.wrapping_add(u64::from(skip));
            any |= self.watch_writes(Gfn(first), Gfn(first.wrapping_add(u64::from(run))));
            rest &= !(u64::MAX.checked_shr(64 - run).unwrap_or(0) << skip);
        }
        any
    }
}

fn next_below(table: Table<'_>, first: u64, end: u64) -> Option<u64> {
    let span = pages_per(table.level());
    let mut gfn = first;
    while gfn < end {
        let next = (gfn & !(span - 1)).wrapping_add(span);
        match table.entry(table.index(Gfn(gfn))) {
            // Below 1 GiB the walk that follows is short; looking further would only be done twice.
            Entry::Table(child) if table.level() > LEVEL_1G => {
                if let Some(found) = next_below(child, gfn, end.min(next)) {
                    return Some(found);
                }
            }
            Entry::Word(0) => {}
            _ => return Some(gfn),
        }
        gfn = next;
    }
    None
}

#[derive(Default)]
struct Zapped {
    leaves: bool,
    tables: bool,
    /// Leaves per level.
    count: [u64; LEVEL_1G as usize],
}

/// Withdraws what is below `table`; returns nothing by itself, `done` gathers.
fn zap_below(table: Table<'_>, first: u64, end: u64, how: Thoroughness, done: &mut Zapped) {
    let span = pages_per(table.level());
    let mut gfn = first;
    while gfn < end {
        let begin = gfn & !(span - 1);
        let next = begin.wrapping_add(span);
        let index = table.index(Gfn(gfn));
        match table.entry(index) {
            Entry::Table(child) => {
                // The counts go on; the flags begin anew, for they decide whether this table held
                // anything.
                let mut below = Zapped { count: done.count, ..Zapped::default() };
                zap_below(child, gfn, end.min(next), how, &mut below);
                // A table that also serves frames outside of the range stays, whatever is empty in it.
                let whole = gfn == begin && next <= end;
                // A table that was empty before stays: it spares the next fault an allocation. A slot that goes takes its tables along.
                let held = below.leaves || below.tables || how == Thoroughness::Tables;
                if whole && held {
                    below.tables |= table.unlink(index);
                }
                done.count = below.count;
                done.leaves |= below.leaves;
                done.tables |= below.tables;
            }
            Entry::Word(0) => {}
            Entry::Word(entry) => {
                let mut entry = entry;
                // The hardware may set accessed and dirty bits meanwhile.
                while !table.replace(index, entry, 0) {
                    match table.entry(index) {
                        Entry::Word(now) if now != 0 => entry = now,
                        _ => break,
                    }
                }
                done.leaves = true;
                if let Some(count) = done.count.get_mut(usize::from(table.level().wrapping_sub(1)))
                {
                    *count += 1;
                }
            }
        }
        gfn = next;
    }
}

fn take_bit(table: &Table<'_>, index: usize, entry: u64, bit: u64) -> bool {
    let mut entry = entry;
    while entry & bit != 0 {
        if table.replace(index, entry, entry & !bit) {
            return true;
        }
        // The CPU has set another bit of the leaf: what stands there now is tried.
        match table.entry(index) {
            Entry::Word(now) => entry = now,
            Entry::Table(_) => break,
        }
    }
    false
}
