//! Write-protecting guest tables that have not changed for a while, so that flushes pass them by.
//!
//! In two steps with a flush of all CPUs between: until that, some TLB may still allow a write. So a
//! page counts as in doubt until it was compared once more after the flush. The first write to the
//! table makes it doubtful again, and ever longer to wait.

use x86::Gfn;

use super::State;
use super::arena::{PageId, ShadowPage, Standing};
use super::counters::{add, count};
use crate::table::View;

/// Tables that wait at most.
pub(super) const QUEUE: usize = 32;

impl State {
    /// A page's table is worth protecting.
    pub(super) fn enqueue(&self, id: PageId, page: &ShadowPage) {
        // A full queue drops the wish, and the next comparison tries again.
        if let Some(place) = self.queue.get(self.queued.get()) {
            place.set(id);
            self.queued.set(self.queued.get() + 1);
            page.queued.set(true);
        }
    }

    /// Protects what waits. Whether anything was: then all CPUs must be flushed, and
    /// [`State::settle_end`] called.
    pub(super) fn settle_begin(&self) -> bool {
        if self.settling.get() != 0 {
            // Another vCPU is at it, and its flush may have begun.
            return false;
        }
        self.pressing.set(0);
        let waiting = self.queued.replace(0);
        for place in self.queue.iter().take(waiting) {
            let Some(page) = self.arena.used_page(place.get()) else { continue };
            // It may have been retired and used anew since: then it does not wait any more.
            if page.queued.replace(false) && page.standing.get() == Standing::Unsync {
                self.protect_table(page.gfn.get());
            }
        }
        self.settling.get() != 0
    }

    fn protect_table(&self, gfn: Gfn) {
        let Some(chunk) = self.frames.chunk(gfn) else { return };
        // Protected before its leaves: a leaf that is made from here on is read-only already.
        chunk.set_protected(gfn, true);
        self.protect_list(chunk.head(gfn));
        // Small leaves come in place of large ones, as they are used.
        while chunk.large.get() != 0 {
            self.drop_node(chunk.large.get());
        }
        self.arena.for_table(gfn, |id, page| {
            let place = self.settling_pages.get(self.settling.get());
            // More pages of one frame than there are places stay in doubt, as those do that are not listed, which
            // costs comparing and nothing else.
            if page.standing.get() == Standing::Unsync
                && let Some(place) = place
            {
                place.set(id);
                self.settling.set(self.settling.get() + 1);
                page.standing.set(Standing::Settling);
                add(&self.counters.unsync, -1);
            }
        });
    }

    /// After the flush: what nobody wrote meanwhile says what its table says.
    pub(super) fn settle_end(&self, view: &View<'_>) {
        let settling = self.settling.replace(0);
        for place in self.settling_pages.iter().take(settling) {
            let id = place.get();
            let Some(page) = self.arena.used_page(id) else { continue };
            // It was written since, or retired: somebody else has decided about it.
            if page.standing.get() != Standing::Settling {
                continue;
            }
            // Its slot may have gone and come back since: then nothing keeps the guest from writing.
            let chunk = self.frames.chunk(page.gfn.get());
            let protected = chunk.is_some_and(|chunk| chunk.is_protected(page.gfn.get()));
            // What was written between the protection and the flush is found here; afterwards
            // nobody writes unnoticed.
            if protected && self.compare_last(view, id) {
                page.standing.set(Standing::Synced);
                count(&self.counters.settled);
            } else {
                page.standing.set(Standing::Unsync);
                add(&self.counters.unsync, 1);
            }
        }
    }
}
