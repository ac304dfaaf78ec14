//! What a flush of L2's translations means for an EPT entry of L1's that has changed. NPT's entries are the
//! ordinary format's, and compared as a guest's own.

use core::sync::atomic::Ordering;

use super::super::State;
use super::super::arena::ShadowPage;
use super::super::counters::count;
use crate::format::ADDRESS;
use crate::grant::Grant;
use crate::nested::rules::Reading;
use crate::role::Role;
use crate::source::W;

/// What of an entry made from `copy` may stay when L1's says `now`.
enum Keep {
    Nothing,
    All,
    /// All but the right to write.
    Readable,
}

fn keep(role: Role, is_link: bool, copy: u64, now: u64) -> Keep {
    // A link that became a leaf, or the other way round, leads elsewhere: nothing of it can stay.
    let ((Reading::Leaf(had), Reading::Leaf(has)) | (Reading::Table(had), Reading::Table(has))) =
        (role.read(copy), role.read(now))
    else {
        return Keep::Nothing;
    };
    // A flag that L1 has cleared must be set again by the next access, so that has to fault.
    let lost = copy & !now;
    if lost & role.accessed() != 0 || (copy ^ now) & ADDRESS != 0 {
        return Keep::Nothing;
    }
    if is_link {
        // Below a large page that is not dirty nothing is writable.
        let page = matches!(role.read(now), Reading::Leaf(_));
        let dirty = if page { role.dirty() } else { 0 };
        let same = had == has && (copy ^ now) & dirty == 0;
        return if same { Keep::All } else { Keep::Nothing };
    }
    let gone = had.without(has);
    if gone.has(Grant::U) || gone.has(Grant::X) {
        // The rights to read and to fetch go with the entry. That to write can be taken from it as
        // it stands.
        Keep::Nothing
    } else if gone.has(Grant::W) || lost & role.dirty() != 0 {
        Keep::Readable
    } else {
        Keep::All
    }
}

impl State {
    /// L1's entry behind an entry is no longer what it was: takes away what it took away.
    #[inline(never)]
    pub(in super::super) fn reconcile_ept(
        &self,
        page: &ShadowPage,
        index: usize,
        copy: u64,
        now: u64,
    ) {
        match keep(page.role.get(), page.is_link(index), copy, now) {
            Keep::Nothing => {
                count(&self.counters.dropped);
                self.drop_present(page, index);
                return;
            }
            Keep::Readable => {
                // Locked: the CPU may set A and D in the entry meanwhile.
                page.spte(index).fetch_and(!W, Ordering::AcqRel);
            }
            Keep::All => {}
        }
        page.set_copy(index, now);
    }
}
