//! The MMU notifier's side: the host changes the VMM's address space and our translations follow.
//!
//! While an invalidation runs, faults on its range are refused; when it ends, a count goes up, so
//! that a fault that had asked the host before that is taken again (the mmu-notifier protocol).
//!
//! Why one range stands for all that run: a list would need memory, and none may be had here. A fault that is
//! refused though its page is in no range is only taken again. The range grows while any invalidation runs and
//! begins anew with the next, so it is never too small.
//!
//! Why the count goes up at the end and not at the beginning: a fault that reads the host's table while an
//! invalidation runs is refused by the range; one that read it before the end may hold what the host has just
//! taken away, and has to see another count.

use mmu::tdp::{FlushRemote, Thoroughness};
use mmu::{Marks, MemSlots};
use x86::{Gfn, Hva};

use super::{Pace, VmMemory};

/// Calls `each` for the frames that the host range backs, slot by slot. A slot that leaves is among them
/// until nothing of it is mapped.
fn frames_behind(slots: &MemSlots, start: Hva, end: Hva, mut each: impl FnMut(Gfn, Gfn)) {
    slots.backed_by(start, end, |slot| {
        if let Some((first, behind)) = slot.frames_of(start, end) {
            each(first, behind);
        }
    });
}

impl VmMemory {
    /// The host is about to change `start..end`: when this returns no translation of it is left,
    /// in the tables or in any TLB, and none is made until [`VmMemory::invalidate_end`].
    pub fn invalidate_start(
        &self,
        start: Hva,
        end: Hva,
        may_block: bool,
        flush: &(impl FlushRemote + ?Sized),
    ) {
        // First refuse new ones, then withdraw the old. The slots are looked at afterwards, so
        // that a slot created meanwhile is either seen here or its faults see the refusal.
        self.tdp.zapper().state_mut().begin(start, end);
        let slots = self.slots();
        // The OOM reaper forbids sleep, and then a long range is done in one go.
        let pace = if may_block { Pace::Yields } else { Pace::Through };
        frames_behind(&slots, start, end, |first, behind| {
            self.zap(first, behind, Thoroughness::Leaves, flush, pace);
        });
    }

    /// The host's change of `start..end` is done.
    pub fn invalidate_end(&self, _start: Hva, _end: Hva) {
        // Both under the lock for writing: a fault that holds it for reading sees the count as it
        // was and the range still running, or both changes.
        let mut zapper = self.tdp.zapper();
        zapper.state_mut().finish(&self.ended);
    }

    /// Whether pages of `start..end` were accessed by the guest; forgets it.
    pub fn clear_young(&self, start: Hva, end: Hva, flush: &(impl FlushRemote + ?Sized)) -> bool {
        // The CPU's flags are cleared without a flush: at worst a page looks old that was used a
        // moment ago.
        if self.tdp.format().tracks() {
            return self.age(start, end, Marks::Cleared);
        }
        // Seen again when it is mapped again.
        // A CPU without accessed flags tells nothing of use, so what is mapped counts as used and
        // goes.
        let slots = self.slots();
        let mut young = false;
        frames_behind(&slots, start, end, |first, behind| {
            if self.tdp.mapper().is_mapped(first, behind) {
                young = true;
                self.zap(first, behind, Thoroughness::Leaves, flush, Pace::Through);
            }
        });
        young
    }

    /// Whether pages of `start..end` were accessed by the guest since that was last forgotten.
    pub fn test_young(&self, start: Hva, end: Hva) -> bool {
        if self.tdp.format().tracks() {
            return self.age(start, end, Marks::Kept);
        }
        let slots = self.slots();
        let mut young = false;
        frames_behind(&slots, start, end, |first, behind| {
            young = young || self.tdp.mapper().is_mapped(first, behind);
        });
        young
    }

    fn age(&self, start: Hva, end: Hva, marks: Marks) -> bool {
        let slots = self.slots();
        let mut young = false;
        frames_behind(&slots, start, end, |first, behind| {
            // To clear, every slot has to be visited; to ask, the first young page answers.
            if marks == Marks::Cleared || !young {
                young |= self.tdp.mapper().age(first, behind, marks);
                young |= self.age_shadow(first, behind, marks);
            }
        });
        young
    }
}
