//! The entry whose absence L1 was told of: made when L1 enters L2 again, and not by a second fault.
//!
//! L1 makes its own entry and flushes nothing, for an absent one is in no TLB. So L2 would fault once more, only to have
//! that entry found. A CPU may read L1's tables whenever L2 runs and keep what it finds as long as L1 flushes nothing. Of the
//! way to this address it keeps nothing from before, so that each of L1's entries on it is looked at as it is now. Like what is
//! made ahead of a fault, this sets no flag of L1's and replaces nothing.

use super::super::State;
use super::super::arena::PageId;
use super::roots::{Awaited, NestedRoots};
use crate::grant::Grant;
use crate::nested::NestedAccess;
use crate::nested::rules::Reading;
use crate::source::index_at;
use crate::table::View;

impl State {
    /// Does what [`super::super::ShadowGuard::nested_awaited`] tells.
    pub(super) fn nested_awaited(&self, view: &View<'_>, roots: &NestedRoots) {
        // Taken, whatever comes of it: L2 that needs it finds out by a fault.
        let Some(Awaited { page, access }) = roots.take_awaited() else { return };
        // Under another root L1's tables are others, and say nothing of this access.
        if roots.start(self.counters.number()) == Some(page) {
            let _ = self.nested_arrived(view, page, &access);
        }
    }

    /// `None`: L1's entry is not there, or it takes a fault to follow it.
    fn nested_arrived(&self, view: &View<'_>, top: PageId, access: &NestedAccess) -> Option<()> {
        // A violation ends what a CPU keeps of the way to its address (SDM vol. 3C §29.4.3.1): L1 may have changed the
        // upper entries without a flush.
        let (id, index) = (self.nested_way(view, top, access.gpa)?, index_at(access.gpa, 1));
        let page = self.arena.page(id);
        // To replace an entry takes a flush.
        if page.present.has(index) {
            return None;
        }
        let entry = view.load_u64(&self.table_of(view, id)?, index << 3)?;
        let role = page.role.get();
        let Reading::Leaf(grant) = role.read(entry) else { return None };
        let grant = role.grant().and(grant);
        // L2 has not done the access yet, and may never do it: flags that it would set are left to it.
        let flags = role.accessed() | if access.write { role.dirty() } else { 0 };
        if entry & flags != flags || !access.passes(role, grant) {
            return None;
        }
        // Clean: the first write has to fault, for it sets the bit.
        let clean = entry & role.dirty() != role.dirty();
        let grant = if clean { grant.without(Grant::W) } else { grant };
        let gfn = role.leaf_frame(entry, index);
        let found = self.frame_at(view, gfn, role, access).ok()?;
        // Not accessed: the CPU marks our entry when L2 uses it.
        let spte = self.leaf(found.known, grant);
        self.put_new(id, index, found.gfn, found.chunk, spte, entry);
        self.count_ahead(1);
        Some(())
    }
}
