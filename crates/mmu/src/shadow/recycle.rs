//! Pages for the inner loop to use: allocated while the VM may have more, else taken from what was
//! made longest ago and nobody refers to.

use alloc::vec::Vec;

use host::boxed::KBox;
use host::error::NoMemory;

use super::arena::ShadowPage;
use super::counters::{add, count};
use super::{ShadowMmu, State};
use crate::tdp::FlushRemote;

/// Pages made free at once, so that the inner loop is not left for each.
const STOCK: usize = 8;
/// Pages taken back with one flush.
const BATCH: usize = 32;

impl State {
    /// Takes up to `count` old pages out of use: those that nothing leads to first. How many.
    fn recycle(&self, count_wanted: usize) -> usize {
        let mut taken = 0;
        // First those that nothing leads to: giving them up takes no entry that a guest uses.
        for orphans in [true, false] {
            // Those in use are renewed as they are passed, so that the oldest are others next time.
            for _ in 0..self.arena.used().min(if orphans { 4 * BATCH } else { usize::MAX }) {
                if taken == count_wanted {
                    return taken;
                }
                let id = self.arena.oldest();
                let Some(page) = self.arena.used_page(id) else { return taken };
                let referred = page.roots.get() != 0 || (orphans && page.parents.get() != 0);
                if referred {
                    // Looked at again only after all others, so that one scan does not turn in a
                    // circle.
                    self.arena.renew(id);
                    continue;
                }
                self.zap(id);
                count(&self.counters.recycled);
                taken += 1;
            }
        }
        taken
    }
}

/// What [`ShadowMmu::reserve`] does next.
enum Step {
    Done,
    Flush(u32),
    Room(usize),
    Allocate,
    /// There are no more numbers for pages, and vCPUs hold all that there are.
    Full,
}

impl ShadowMmu {
    fn next_step(&self, want: usize) -> Step {
        let guard = self.lock.lock();
        let arena = &guard.arena;
        if arena.free_count() >= want {
            return Step::Done;
        }
        // A flush that is owed already comes before new memory: it gives pages back without taking
        // any.
        if arena.retired_count() != 0 {
            return Step::Flush(arena.take_retired());
        }
        // A batch at least: the flush that follows costs the same for one page and for many.
        if (arena.held() as u64 >= guard.limit || arena.is_full())
            && guard.recycle(BATCH.max(want)) != 0
        {
            return Step::Flush(arena.take_retired());
        }
        match arena.lacks_room() {
            _ if arena.is_full() => Step::Full,
            Some(places) => Step::Room(places),
            None => Step::Allocate,
        }
    }

    pub(super) fn reserve_pages(
        &self,
        count: usize,
        flush: &(impl FlushRemote + ?Sized),
    ) -> Result<(), NoMemory> {
        let want = count.max(STOCK);
        loop {
            match self.next_step(want) {
                Step::Done => return Ok(()),
                Step::Full => return Err(NoMemory),
                Step::Flush(list) => {
                    // Not with the lock held: its holder waits for no other CPU.
                    flush.flush_remote();
                    self.lock.lock().arena.free_all(list);
                }
                Step::Room(places) => {
                    let mut room = Vec::new();
                    room.try_reserve_exact(places)?;
                    self.lock.lock().arena.add_room(&mut room);
                }
                Step::Allocate => {
                    let page = KBox::new(ShadowPage::new()?)?;
                    let mut guard = self.lock.lock();
                    // Refused where another vCPU took the last room: the page is freed behind the
                    // lock, and the loop looks again.
                    let refused = guard.arena.add(page);
                    add(&guard.counters.allocated, i64::from(refused.is_none()));
                    drop(guard);
                }
            }
        }
    }

    pub(super) fn shrink_to(&self, limit: u64, flush: &(impl FlushRemote + ?Sized)) {
        self.lock.lock().limit = limit;
        loop {
            let guard = self.lock.lock();
            let arena = &guard.arena;
            let surplus = (arena.held() as u64).saturating_sub(limit);
            let surplus = usize::try_from(surplus).unwrap_or(usize::MAX);
            if arena.free_count() < surplus.min(BATCH) {
                // In batches: between two flushes the lock is free for the inner loops.
                guard.recycle(surplus.min(BATCH));
            }
            let list = arena.take_retired();
            drop(guard);
            if list != 0 {
                flush.flush_remote();
                self.lock.lock().arena.free_all(list);
            }
            let page = if surplus == 0 { None } else { self.lock.lock().arena.shrink() };
            if page.is_none() {
                return;
            }
            host::task::cond_resched();
        }
    }
}
