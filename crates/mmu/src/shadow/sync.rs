//! What a guest's flush means here: entries whose guest entry has changed since go.
//!
//! Only pages whose table the guest may have written unnoticed are looked at, and of them only the
//! entries that are there. What the guest's entry newly allows is left to the next fault.
//!
//! Why an entry that allows more now is left alone: a CPU may keep the stricter translation in its TLB as well, and
//! faults then. What allows less has to go, for that is what the guest flushed for.
//!
//! Why the work of one flush is bounded: a guest can link one table a thousand times and then flush by INVLPG in a loop,
//! perhaps with interrupts off in the host. Cutting links off is always right: it is what a smaller cache would have done.

use core::sync::atomic::Ordering;

use super::State;
use super::arena::{PageId, ShadowPage, Standing};
use super::counters::{add, count};
use super::tables::load;
use crate::format::ADDRESS;
use crate::source::{A, D, NX, P, PS, U, W, index_at, same_link};
use crate::table::View;

/// Entries that one flush compares at most. What it does not get to it cuts off: links to pages that
/// it has not looked at are dropped, and made again by faults.
const BUDGET: u32 = 1 << 16;

/// A table that stayed the same while so many entries were compared is worth protecting: about as
/// much work as the fault that its next write costs.
pub(super) const CALM: u32 = 400;

/// Compared entries of tables that wait to be protected, after which it becomes urgent.
const PRESSING: u32 = 1000;

/// What looking at a page costs beside its entries, in entries.
const VISIT: u32 = 8;

/// Which entries of a page a flush looks at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// Every entry, leaves too.
    All,
    /// Links: what a paging-structure cache holds.
    Links,
}

impl State {
    /// Begins a walk over pages: each is looked at once, however many links lead to it.
    fn begin_walk(&self) {
        // From 1 on: 0 is what a new page has seen. At a thousand million walks a second the last number is met after
        // 500 years.
        self.walk.set(self.walk.get().wrapping_add(1));
        self.budget.set(BUDGET);
    }

    /// The walk has done so much: an entry that goes costs no less than one that is compared.
    fn charge(&self, entries: u32) {
        self.budget.set(self.budget.get().saturating_sub(entries));
    }

    /// All that is below a page, and the page itself, say what the guest's tables say.
    pub(super) fn sync(&self, view: &View<'_>, id: PageId) {
        if self.arena.page(id).is_doubtful() {
            self.begin_walk();
            self.sync_below(view, id, Look::All);
        }
    }

    /// The links of the upper levels say what the guest's tables say.
    pub(super) fn sync_links(&self, view: &View<'_>, id: PageId) {
        if self.arena.page(id).is_doubtful() {
            self.begin_walk();
            self.sync_below(view, id, Look::Links);
        }
    }

    /// As deep as there are levels.
    fn sync_below(&self, view: &View<'_>, id: PageId, look: Look) {
        let page = self.arena.page(id);
        page.seen.set(self.walk.get());
        // A page without entries costs the way to it.
        self.charge(VISIT);
        if page.standing.get() != Standing::Synced {
            self.compare(view, id, page, look);
        }
        // Below level 2 there are leaves alone, and INVLPG of one address leaves those of the
        // others.
        if look == Look::Links && page.role.get().level() <= 2 {
            return;
        }
        for n in 0..8 {
            let mut rest = page.below.word(n);
            while rest != 0 {
                let index = n << 6 | rest.trailing_zeros() as usize;
                rest &= rest.wrapping_sub(1);
                let kid = page.kid(index);
                // A page below many links is looked at once in a walk: a guest can lead a thousand
                // links to one table.
                if self.arena.page(kid).seen.get() != self.walk.get() {
                    if self.budget.get() == 0 {
                        self.drop_entry(id, index);
                        continue;
                    }
                    self.sync_below(view, kid, look);
                }
                if !self.arena.page(kid).is_doubtful() {
                    page.below.clear(index);
                }
            }
        }
    }

    /// Compares the entries of a page with the guest's.
    fn compare(&self, view: &View<'_>, id: PageId, page: &ShadowPage, look: Look) {
        let role = page.role.get();
        let Some(table) = self.table_of(view, id) else {
            // The table is not there to be compared with. A leaf is as a TLB entry that the flush
            // takes; a link may lead anywhere.
            self.charge((0..8).map(|n| page.present.word(n).count_ones()).sum());
            self.clear(id);
            return;
        };
        let (mut compared, mut changed) = (0, false);
        // 32-bit tables have two of our entries for one of theirs, and PDPTEs are no whole page:
        // each entry is found by its offset.
        if role.is_narrow() || role.is_of_pdptes() {
            for n in 0..8 {
                let mut rest = of_interest(page, n, look);
                compared += rest.count_ones();
                while rest != 0 {
                    let index = n << 6 | rest.trailing_zeros() as usize;
                    rest &= rest.wrapping_sub(1);
                    let (copy, now) =
                        (page.copy(index), load(view, &table, role, role.offset(index)));
                    if now != Some(copy) {
                        changed = true;
                        self.reconcile(page, index, copy, now.unwrap_or(0));
                    }
                }
            }
        } else if let Some(words) = view.words(&table) {
            let copies = page.copies();
            for n in 0..8 {
                let mut rest = of_interest(page, n, look);
                while rest != 0 {
                    // Masked for the compiler: both arrays have 512 words.
                    let index = (n << 6 | rest.trailing_zeros() as usize) & 511;
                    rest &= rest.wrapping_sub(1);
                    compared += 1;
                    let copy = copies[index].load(Ordering::Relaxed);
                    let now = words[index].load(Ordering::Relaxed);
                    if now != copy {
                        changed = true;
                        self.reconcile(page, index, copy, now);
                    }
                }
            }
        }
        count(&self.counters.compared);
        self.charge(compared);
        if changed {
            page.calm.set(0);
        } else {
            self.note_calm(id, page, compared + 4);
        }
    }

    /// A table was found as it was.
    fn note_calm(&self, id: PageId, page: &ShadowPage, work: u32) {
        let calm = page.calm.get().saturating_add(work);
        page.calm.set(calm);
        if page.queued.get() {
            self.pressing.set(self.pressing.get().saturating_add(work));
        } else if calm >> page.patience.get() >= self.calm
            && page.standing.get() == Standing::Unsync
            && page.is_listed()
        {
            self.enqueue(id, page);
        }
    }

    /// Whether settling is worth leaving the inner loop.
    #[inline]
    pub(super) fn wants_settling(&self) -> bool {
        self.pressing.get() >= PRESSING
    }

    /// The guest entry behind an entry is no longer what it was: takes away what it took away.
    fn reconcile(&self, page: &ShadowPage, index: usize, copy: u64, now: u64) {
        if page.role.get().is_ept() {
            self.reconcile_ept(page, index, copy, now);
            return;
        }
        if now & P == 0 {
            count(&self.counters.dropped);
            self.drop_present(page, index);
            return;
        }
        let (lost, changed) = (copy & !now, copy ^ now);
        // An A that the guest has cleared takes the entry along, or the next access would not set
        // it again.
        let keep = if page.is_link(index) {
            lost & A == 0 && same_link(copy, now)
        } else {
            let size = if page.role.get().level() > 1 { PS } else { 0 };
            // More than before may be allowed to fewer: a user page is not the supervisor's under
            // SMEP and SMAP.
            lost & A == 0 && changed & (ADDRESS | U | NX | size) == 0
        };
        let role = page.role.get();
        if !keep || now & role.reserved(role.is_leaf(now)) != 0 {
            count(&self.counters.dropped);
            self.drop_present(page, index);
            return;
        }
        // Write access goes with D too: a write through the hardware's entry would set no dirty bit in the guest's, so it has
        // to fault, and the walk sets it.
        if lost & (W | D) != 0 && !page.is_link(index) {
            page.spte(index).fetch_and(!W, Ordering::AcqRel);
        }
        page.set_copy(index, now);
    }

    /// INVLPG: what leads to `va`, and the links of the upper levels.
    pub(super) fn sync_address(&self, view: &View<'_>, top: PageId, va: u64) {
        // INVLPG drops the paging-structure caches of all addresses (SDM vol. 3A §4.10.4.1), so all
        // links are looked at.
        self.sync_links(view, top);
        let mut id = top;
        loop {
            let page = self.arena.page(id);
            let role = page.role.get();
            let index = index_at(va, role.level());
            if !page.present.has(index) {
                return;
            }
            // Links were looked at above, but for those of the last level but one.
            if page.standing.get() != Standing::Synced {
                let now = self
                    .table_of(view, id)
                    .and_then(|table| load(view, &table, role, role.offset(index)))
                    .unwrap_or(0);
                let copy = page.copy(index);
                if now != copy {
                    self.reconcile(page, index, copy, now);
                }
            }
            if !page.is_link(index) {
                return;
            }
            id = page.kid(index);
        }
    }

    /// Compares a page whose table nobody can write any more, for the last time. `false`: its
    /// table cannot be looked at.
    pub(super) fn compare_last(&self, view: &View<'_>, id: PageId) -> bool {
        let page = self.arena.page(id);
        let there = self.table_of(view, id).is_some();
        self.compare(view, id, page, Look::All);
        there
    }

    pub(super) fn count_ahead(&self, entries: u32) {
        if entries != 0 {
            add(&self.counters.ahead, entries.into());
        }
    }
}

#[inline]
fn of_interest(page: &ShadowPage, n: usize, look: Look) -> u64 {
    let present = page.present.word(n);
    match look {
        Look::All => present,
        Look::Links => present & page.linked.word(n),
    }
}
