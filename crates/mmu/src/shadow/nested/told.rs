//! What L1 is told of is forgotten, and looked for when L1 enters L2 again.
//!
//! A violation ends what a CPU keeps of the translation of its address (SDM vol. 3C §29.4.3.1): L1 may make other entries on the
//! way to it without a flush. So what the pages keep of it goes at once. Pages are shared, though, and a TLB is not: another vCPU
//! may fill in what L1's tables say still, and change soon, before this one runs again. So the address is looked at once more at the
//! next entry by that root, and what stands there stays if L1's tables say it then.
//!
//! Mostly nothing stands there, and L1 has made its entry. L2 would fault once more, only to have that found. A CPU may read
//! L1's tables whenever L2 runs and keep what it finds as long as L1 flushes nothing. So the entry is made, by L1's of now. Like
//! what is made ahead of a fault, this sets no flag of L1's.

use super::super::State;
use super::super::arena::PageId;
use crate::grant::Grant;
use crate::nested::NestedAccess;
use crate::nested::rules::Reading;
use crate::source::index_at;
use crate::table::View;

/// What becomes of what stands at the end of an address's way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It goes, whatever L1 says by now.
    Goes,
    /// It stays, if L1's entries say it now and need no flag set.
    StaysIfSaid,
}

impl State {
    /// Drops what the pages keep of an address's translation: the first link that is not what L1's entry says now, or what stands
    /// at the end of the way. Whether anything went. What CPUs keep is theirs, and the frame is known to the tree: a withdrawal
    /// flushes, whatever stands here.
    #[inline(never)]
    pub(super) fn drop_way(&self, view: &View<'_>, top: PageId, gpa: u64, end: End) -> bool {
        let (mut id, mut page, mut used) = (top, self.arena.page(top), true);
        // Beyond the reach of the tables nothing is kept, and the index is that of a lower address.
        if gpa >> page.role.get().reach() != 0 {
            return false;
        }
        loop {
            let role = page.role.get();
            let level = role.level();
            let index = index_at(gpa, level);
            let entry = self
                .table_of(view, id)
                .and_then(|table| view.load_u64(&table, role.nested_offset(index)));
            // A flag that L1 has taken back is to be set by the next access.
            used &= entry.is_some_and(|entry| entry & role.accessed() == role.accessed());
            let kid = if level > 1 { page.kid(index) } else { 0 };
            // A large page, or one in parts, is L1's last entry.
            if kid == 0 || self.arena.page(kid).role.get().is_direct() {
                let said = used && entry == Some(page.copy(index));
                let goes = page.present.has(index) && !(said && end == End::StaysIfSaid);
                if goes {
                    self.drop_entry(id, index);
                }
                return goes;
            }
            // What it leads to counts, and not each bit: to link it anew is to look at all that is below.
            let leads = |entry| match role.read(entry) {
                Reading::Table(grant) => {
                    let (to, below) = (self.arena.page(kid), role.nested_below(index, grant));
                    to.gfn.get() == role.table_frame(entry) && to.role.get() == below
                }
                _ => false,
            };
            if !entry.is_some_and(leads) {
                self.drop_entry(id, index);
                return true;
            }
            (id, page) = (kid, self.arena.page(kid));
        }
    }

    /// L2 is entered by the root of page `top`, and L1 was told of an access since it was last. Whether anything went.
    #[inline(never)]
    pub(super) fn nested_told(&self, view: &View<'_>, top: PageId, access: &NestedAccess) -> bool {
        if self.arena.page(top).role.get().is_direct() {
            return false;
        }
        let gpa = access.gpa;
        let Some(id) = self.nested_way(view, top, gpa) else {
            return self.drop_way(view, top, gpa, End::StaysIfSaid);
        };
        let (page, index) = (self.arena.page(id), index_at(gpa, 1));
        let (role, table) = (page.role.get(), self.table_of(view, id));
        let entry = table.and_then(|table| view.load_u64(&table, index << 3));
        let stood = page.present.has(index);
        if stood {
            let used = |entry| entry & role.accessed() == role.accessed();
            if entry.is_some_and(|entry| entry == page.copy(index) && used(entry)) {
                return false;
            }
            self.drop_entry(id, index);
        }
        if let Some(entry) = entry {
            let _ = self.nested_arrived(view, id, entry, access);
        }
        stood
    }

    /// Makes what L1's `entry` in the table of page `id`, of the lowest level, says now, where nothing stands. `None`: it takes a
    /// fault to follow it.
    fn nested_arrived(
        &self,
        view: &View<'_>,
        id: PageId,
        entry: u64,
        access: &NestedAccess,
    ) -> Option<()> {
        let (role, index) = (self.arena.page(id).role.get(), index_at(access.gpa, 1));
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
