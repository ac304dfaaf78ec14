//! Shadow pages by number, by guest frame and role, and by age.
//!
//! A page's fields are cells: all of it is reached with the shadow lock held. Numbers begin at 1, and
//! page 0 stands for none. An entry is known as a node: 512 times its page's number plus its index.
//!
//! Why numbers and not pointers: a link leads up and down, and pages go in any order. With pointers each of these
//! would be `unsafe` or a reference count; a number is checked where it is used, and two of them fit into the 64
//! bits that an entry has beside it. That is what bounds their count ([`MOST_PAGES`]).
//!
//! Why two kinds of chains: a write to a table asks for all pages of its frame, and walks them with interrupts off. A
//! frame has roles without end, though: a hypervisor chooses frames to be left out, a VMM the address widths of vCPUs. So
//! those that are ever asked for by their frame alone lie in its own chain, [`MOST_LISTED`] at most; all others, in
//! chains by frame and role, and nobody relies on being told of writes for them.
//!
//! Why a page that is given up is retired first: another CPU may hold its address in a paging-structure cache until
//! it is flushed. If it became another table before that, the CPU would read the new entries as the old table's.

use alloc::vec::Vec;
use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};

use host::boxed::KBox;
use host::error::NoMemory;
use host::page::Page;
use x86::{Gfn, Hpa};

use crate::role::Role;
use crate::table::GuestPage;

/// The number of a page; 0 for none.
pub(super) type PageId = u32;
/// An entry: 512 × page + index; 0 for none.
pub(super) type Node = u32;

/// More pages than this have no nodes.
const MOST_PAGES: usize = 1 << 22;

/// Links that lead to one page at most. Whoever looks at a page's parents holds the lock, often with
/// interrupts off, and a guest can make half a million links to one table with a thousand others. Few in
/// debug builds, so that tests come to the end of it.
pub(super) const MOST_PARENTS: u32 = if cfg!(debug_assertions) { 6 } else { 1 << 12 };

/// Pages of one frame that a write to its table finds, at most. Whoever looks for them has interrupts off, perhaps. As
/// many as the vCPUs of a usual guest have roles for a table, several times over: two or three of rights, times those of
/// CR0.WP. Few in debug builds, so that tests come to the end of it.
pub(super) const MOST_LISTED: usize = if cfg!(debug_assertions) { 3 } else { 64 };

#[inline]
pub(super) const fn node(page: PageId, index: usize) -> Node {
    // `page` is below 2^22 (MOST_PAGES), so that a node has 31 bits.
    (page << 9) | (index as u32 & 511)
}

#[inline]
pub(super) const fn page_of(node: Node) -> PageId {
    node >> 9
}

#[inline]
pub(super) const fn index_of(node: Node) -> usize {
    (node & 511) as usize
}

/// Where a page stands towards its guest table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The page shadows nothing and may be taken.
    Free,
    /// Shadows nothing, but some CPU may remember that it did.
    Retired,
    /// The guest may write the table unnoticed. Direct pages are not of this kind.
    Unsync,
    /// Write-protected, but some CPU may still be able to write.
    Settling,
    /// The guest cannot write the table unnoticed; the page says what the table says.
    Synced,
}

/// One bit for each of 512 entries.
#[derive(Debug)]
pub(super) struct Bits([Cell<u64>; 8]);

impl Bits {
    fn new() -> Self {
        Self([const { Cell::new(0) }; 8])
    }

    #[inline]
    pub(super) fn has(&self, index: usize) -> bool {
        // Masked for the compiler: no check that could panic remains.
        self.0[(index >> 6) & 7].get() & (1 << (index & 63)) != 0
    }

    #[inline]
    pub(super) fn set(&self, index: usize) {
        let word = &self.0[(index >> 6) & 7];
        word.set(word.get() | 1 << (index & 63));
    }

    #[inline]
    pub(super) fn clear(&self, index: usize) {
        let word = &self.0[(index >> 6) & 7];
        word.set(word.get() & !(1 << (index & 63)));
    }

    /// 64 of them.
    #[inline]
    pub(super) fn word(&self, n: usize) -> u64 {
        self.0[n & 7].get()
    }

    #[inline]
    pub(super) fn any(&self) -> bool {
        self.0.iter().fold(0, |all, word| all | word.get()) != 0
    }
}

/// A shadow page.
#[derive(Debug)]
pub(super) struct ShadowPage {
    /// The hardware's entries.
    sptes: Page,
    /// The guest entries that they were made from; unused by direct pages.
    copies: Page,
    /// Of each present entry: bits 31:0 the next node of its list, bits 63:32 the one before.
    links: Page,
    /// Of each link: the page it leads to.
    kids: Vec<Cell<PageId>>,
    pub(super) gfn: Cell<Gfn>,
    pub(super) role: Cell<Role>,
    pub(super) standing: Cell<Standing>,
    /// Entries that are there.
    pub(super) present: Bits,
    /// Of them, those that lead to other pages.
    pub(super) linked: Bits,
    /// Links below which some page is not [`Standing::Synced`].
    pub(super) below: Bits,
    /// The guest table's page, as found last.
    pub(super) guest: Cell<GuestPage>,
    /// The first link that leads here.
    pub(super) parents: Cell<Node>,
    /// How many do: at most [`MOST_PARENTS`].
    pub(super) parent_count: Cell<u32>,
    /// References from vCPUs' roots.
    pub(super) roots: Cell<u32>,
    /// Entries compared since the last change, roughly.
    pub(super) calm: Cell<u32>,
    /// How often the table was protected in vain.
    pub(super) patience: Cell<u8>,
    /// Waits to be settled.
    pub(super) queued: Cell<bool>,
    /// The walk that looked here last. Of 64 bits: were a number met twice, a page that was seen in the walk of before
    /// would be passed by, and what is stale in it outlive a flush.
    pub(super) seen: Cell<u64>,
    /// Lies in its frame's own chain, where a write to its table finds it. What does not is never settled.
    listed: Cell<bool>,
    /// Next in its hash chain, or in the list of free or retired pages.
    next: Cell<PageId>,
    older: Cell<PageId>,
    newer: Cell<PageId>,
}

impl ShadowPage {
    /// An empty page. Allocates.
    pub(super) fn new() -> Result<Self, NoMemory> {
        let mut kids = Vec::new();
        kids.try_reserve_exact(512)?;
        kids.resize_with(512, || Cell::new(0));
        Ok(Self {
            sptes: Page::zeroed()?,
            copies: Page::zeroed()?,
            links: Page::zeroed()?,
            kids,
            gfn: Cell::new(Gfn(0)),
            role: Cell::new(Role::default()),
            standing: Cell::new(Standing::Free),
            present: Bits::new(),
            linked: Bits::new(),
            below: Bits::new(),
            guest: Cell::new(GuestPage::NONE),
            parents: Cell::new(0),
            parent_count: Cell::new(0),
            roots: Cell::new(0),
            calm: Cell::new(0),
            patience: Cell::new(0),
            queued: Cell::new(false),
            seen: Cell::new(0),
            listed: Cell::new(false),
            next: Cell::new(0),
            older: Cell::new(0),
            newer: Cell::new(0),
        })
    }

    /// The hardware table's address.
    #[inline]
    pub(super) fn hpa(&self) -> Hpa {
        self.sptes.hpa()
    }

    /// The hardware's entry.
    #[inline]
    pub(super) fn spte(&self, index: usize) -> &AtomicU64 {
        &self.sptes.table()[index & 511]
    }

    /// The guest entry behind it.
    #[inline]
    pub(super) fn copy(&self, index: usize) -> u64 {
        // Relaxed: the shadow lock orders whoever comes here. A page is made of atomic words for
        // those that the hardware walks.
        self.copies.table()[index & 511].load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn set_copy(&self, index: usize, entry: u64) {
        self.copies.table()[index & 511].store(entry, Ordering::Relaxed);
    }

    /// All copies, for comparing many.
    #[inline]
    pub(super) fn copies(&self) -> &[AtomicU64; 512] {
        self.copies.table()
    }

    /// The page that a link leads to; 0 for a leaf.
    #[inline]
    pub(super) fn kid(&self, index: usize) -> PageId {
        self.kids.get(index & 511).map_or(0, Cell::get)
    }

    #[inline]
    pub(super) fn set_kid(&self, index: usize, kid: PageId) {
        if let Some(place) = self.kids.get(index & 511) {
            place.set(kid);
        }
    }

    /// Whether a write to its table finds the page.
    #[inline]
    pub(super) fn is_listed(&self) -> bool {
        self.listed.get()
    }

    /// Whether an entry is a link to another page.
    #[inline]
    pub(super) fn is_link(&self, index: usize) -> bool {
        self.linked.has(index)
    }

    /// Whether the page, or something below it, may differ from the guest's tables.
    #[inline]
    pub(super) fn is_doubtful(&self) -> bool {
        matches!(self.standing.get(), Standing::Unsync | Standing::Settling) || self.below.any()
    }

    #[inline]
    fn links(&self, index: usize) -> &AtomicU64 {
        &self.links.table()[index & 511]
    }
}

/// The logarithm of [`CHAINS`].
const CHAIN_BITS: u32 = 13;
/// Chains of the hash table.
const CHAINS: usize = 1 << CHAIN_BITS;

/// All shadow pages of a VM.
#[derive(Debug)]
pub(super) struct Arena {
    /// By number; the first is page 0, and stays empty.
    pages: Vec<Option<KBox<ShadowPage>>>,
    /// What is read where a number leads nowhere.
    none: KBox<ShadowPage>,
    chains: Vec<Cell<PageId>>,
    /// What spreads pages over the chains: odd, and unknown to the guest, which chooses the frames of its tables, and
    /// a part of their roles, and could put them all into one chain.
    keys: [u64; 2],
    free: Cell<PageId>,
    free_count: Cell<PageId>,
    retired: Cell<PageId>,
    retired_count: Cell<PageId>,
    oldest: Cell<PageId>,
    newest: Cell<PageId>,
    /// Pages that shadow something.
    used: Cell<PageId>,
    /// No place below this one is vacant.
    vacant: PageId,
}

impl Arena {
    /// No pages. `keys`: unknown to the guest.
    pub(super) fn new(keys: [u64; 2]) -> Result<Self, NoMemory> {
        let mut chains = Vec::new();
        chains.try_reserve_exact(CHAINS)?;
        chains.resize_with(CHAINS, || Cell::new(0));
        Ok(Self {
            pages: Vec::new(),
            none: KBox::new(ShadowPage::new()?)?,
            chains,
            // Odd, or the highest bits of frame and role would be lost in the products.
            keys: keys.map(|key| key | 1),
            free: Cell::new(0),
            free_count: Cell::new(0),
            retired: Cell::new(0),
            retired_count: Cell::new(0),
            oldest: Cell::new(0),
            newest: Cell::new(0),
            used: Cell::new(0),
            vacant: 1,
        })
    }

    /// The chain that the listed pages of a frame are in.
    #[inline]
    fn chain_of(&self, gfn: Gfn) -> &Cell<PageId> {
        self.chain_by(gfn, 0)
    }

    /// The chain that the other pages of a frame in a role are in.
    #[inline]
    fn chain_of_role(&self, gfn: Gfn, role: Role) -> &Cell<PageId> {
        self.chain_by(gfn, role.bits())
    }

    #[inline]
    fn chain_by(&self, gfn: Gfn, bits: u64) -> &Cell<PageId> {
        let [first, second] = self.keys;
        let sum = gfn.0.wrapping_mul(first).wrapping_add(bits.wrapping_mul(second));
        // The upper half over the lower one, and a second product: of a sum alone, frames or roles at equal distances
        // would go into a few chains under some keys.
        let spread = (sum ^ sum >> 32).wrapping_mul(first);
        // There are as many as CHAIN_BITS can tell apart.
        self.chains.get((spread >> (64 - CHAIN_BITS)) as usize).unwrap_or(&self.none.next)
    }

    /// Pages in the longest chain, for tests.
    pub(super) fn longest_chain(&self) -> usize {
        let length = |chain: &Cell<PageId>| {
            let next = |id: &PageId| Some(self.page(*id).next.get()).filter(|id| *id != 0);
            core::iter::successors(Some(chain.get()).filter(|id| *id != 0), next).count()
        };
        self.chains.iter().map(length).max().unwrap_or(0)
    }

    /// A page by number.
    #[inline]
    pub(super) fn page(&self, id: PageId) -> &ShadowPage {
        match self.pages.get(id as usize) {
            Some(Some(page)) => page,
            _ => {
                // A number that leads nowhere is a bug of ours. It reads an empty page: a panic
                // with interrupts off would take the host along.
                debug_assert!(false, "page {id} is none");
                &self.none
            }
        }
    }

    /// Pages that can be put to use at once.
    #[inline]
    pub(super) fn free_count(&self) -> usize {
        self.free_count.get() as usize
    }

    pub(super) fn retired_count(&self) -> usize {
        self.retired_count.get() as usize
    }

    /// Pages that shadow something.
    pub(super) fn used(&self) -> usize {
        self.used.get() as usize
    }

    /// Pages that memory was allocated for.
    pub(super) fn held(&self) -> usize {
        (self.used.get() + self.free_count.get() + self.retired_count.get()) as usize
    }

    /// Numbers given out so far, one more than the greatest.
    pub(super) fn numbers(&self) -> u32 {
        self.pages.len() as u32
    }

    /// The page of a number, if it shadows something.
    pub(super) fn used_page(&self, id: PageId) -> Option<&ShadowPage> {
        let page = self.pages.get(id as usize)?.as_deref()?;
        (!matches!(page.standing.get(), Standing::Free | Standing::Retired)).then_some(page)
    }

    // Growing, outside the inner loop.

    /// Whether as many pages are held as have numbers: then [`Arena::add`] refuses for good.
    pub(super) fn is_full(&self) -> bool {
        self.held() >= MOST_PAGES - 1
    }

    /// Whether [`Arena::add`] has room; else so many places are wanted.
    pub(super) fn lacks_room(&self) -> Option<usize> {
        // Doubled each time: the list is moved with the lock held, so it must be moved seldom.
        (self.pages.len() == self.pages.capacity()).then(|| self.pages.len().max(32) * 2)
    }

    /// Takes over a longer list, empty so far. The old one comes back in it, for the caller to free.
    pub(super) fn add_room(&mut self, room: &mut Vec<Option<KBox<ShadowPage>>>) {
        if room.capacity() > self.pages.len() {
            // Nothing is allocated here: the room was compared, and `append` moves.
            room.append(&mut self.pages);
            core::mem::swap(room, &mut self.pages);
        }
    }

    /// Adds a free page. It comes back when there is no room for it.
    pub(super) fn add(&mut self, page: KBox<ShadowPage>) -> Option<KBox<ShadowPage>> {
        // Page 0 is none.
        if self.pages.is_empty() && self.pages.capacity() > 0 {
            self.pages.push(None);
        }
        // Pages go one by one and come in batches, so a search from the front would be quadratic.
        let from = self.vacant as usize;
        let mut rest = self.pages.iter().skip(from);
        let id = match rest.position(Option::is_none).map(|n| n + from) {
            Some(id) => id,
            None if self.pages.len() < self.pages.capacity().min(MOST_PAGES) => {
                self.pages.push(None);
                self.pages.len() - 1
            }
            None => return Some(page),
        };
        if let Some(place) = self.pages.get_mut(id) {
            *place = Some(page);
            self.vacant = id as PageId + 1;
            self.put_free(id as PageId);
        }
        None
    }

    /// Takes a free page out altogether, for the caller to drop.
    pub(super) fn shrink(&mut self) -> Option<KBox<ShadowPage>> {
        let id = self.free.get();
        let next = self.used_or_not(id)?.next.get();
        // No flush: a free page is new, or was flushed for when it left the retired ones.
        self.free.set(next);
        self.free_count.set(self.free_count.get().saturating_sub(1));
        self.vacant = self.vacant.min(id);
        self.pages.get_mut(id as usize)?.take()
    }

    fn used_or_not(&self, id: PageId) -> Option<&ShadowPage> {
        self.pages.get(id as usize)?.as_deref()
    }

    fn put_free(&self, id: PageId) {
        let page = self.page(id);
        page.standing.set(Standing::Free);
        page.next.set(self.free.replace(id));
        self.free_count.set(self.free_count.get() + 1);
    }

    /// All retired pages as a list, to be flushed for and then given to [`Arena::free_all`].
    pub(super) fn take_retired(&self) -> PageId {
        self.retired_count.set(0);
        // The list is the caller's alone from here on. What is retired while it flushes waits for
        // another flush.
        self.retired.replace(0)
    }

    /// Makes the pages of a list free that [`Arena::take_retired`] gave.
    pub(super) fn free_all(&self, list: PageId) {
        let mut id = list;
        while id != 0 {
            let next = self.page(id).next.get();
            self.put_free(id);
            id = next;
        }
    }

    // Use.

    /// The page that shadows a frame in a role.
    #[inline]
    pub(super) fn find(&self, gfn: Gfn, role: Role) -> Option<PageId> {
        // Most of those that may be listed are.
        if role.may_settle()
            && let Some(id) = self.find_in(self.chain_of(gfn), gfn, role)
        {
            return Some(id);
        }
        self.find_in(self.chain_of_role(gfn, role), gfn, role)
    }

    #[inline]
    fn find_in(&self, chain: &Cell<PageId>, gfn: Gfn, role: Role) -> Option<PageId> {
        let mut id = chain.get();
        while id != 0 {
            let page = self.page(id);
            if page.gfn.get() == gfn && page.role.get() == role {
                return Some(id);
            }
            id = page.next.get();
        }
        None
    }

    /// Calls `each` for the listed pages made from the guest table in a frame: [`MOST_LISTED`] at most.
    pub(super) fn for_table(&self, gfn: Gfn, mut each: impl FnMut(PageId, &ShadowPage)) {
        let mut id = self.chain_of(gfn).get();
        while id != 0 {
            let page = self.page(id);
            // Read before the call, which may take the page out of the chain.
            let next = page.next.get();
            // Pages of other frames, and those of some frame and role, may be in the chain by chance.
            if page.gfn.get() == gfn && page.listed.get() {
                each(id, page);
            }
            id = next;
        }
    }

    /// Puts a free page to use. `None`: there is none.
    pub(super) fn create(&self, gfn: Gfn, role: Role) -> Option<PageId> {
        let id = self.free.get();
        if id == 0 {
            return None;
        }
        let page = self.page(id);
        self.free.set(page.next.get());
        self.free_count.set(self.free_count.get().saturating_sub(1));
        self.used.set(self.used.get() + 1);
        debug_assert!(!page.present.any() && page.parents.get() == 0 && page.roots.get() == 0);
        page.gfn.set(gfn);
        page.role.set(role);
        let direct = role.is_direct();
        // Never born protected: some TLB may still allow a write of the table.
        page.standing.set(if direct { Standing::Synced } else { Standing::Unsync });
        // Asked anew: what the page last found was of another frame.
        page.guest.set(GuestPage::NONE);
        page.calm.set(0);
        page.patience.set(0);
        page.queued.set(false);
        page.seen.set(0);
        let mut listed = 0;
        if role.may_settle() {
            self.for_table(gfn, |_, _| listed += 1);
        }
        // Whoever comes late stays in doubt for good, which costs comparing and nothing else.
        page.listed.set(role.may_settle() && listed < MOST_LISTED);
        page.next.set(self.chain_with(page).replace(id));
        self.push_newest(id);
        Some(id)
    }

    /// Takes a page out of use. It has no entries, no parents and no references.
    pub(super) fn retire(&self, id: PageId) {
        let page = self.page(id);
        debug_assert!(!page.present.any() && page.parents.get() == 0 && page.roots.get() == 0);
        // Unchained first: nobody may find it by its frame any more.
        self.unchain(id);
        self.unlink_age(id);
        page.standing.set(Standing::Retired);
        page.next.set(self.retired.replace(id));
        self.retired_count.set(self.retired_count.get() + 1);
        self.used.set(self.used.get().saturating_sub(1));
    }

    /// The chain that a page is in, or is to be.
    fn chain_with(&self, page: &ShadowPage) -> &Cell<PageId> {
        match page.gfn.get() {
            gfn if page.listed.get() => self.chain_of(gfn),
            gfn => self.chain_of_role(gfn, page.role.get()),
        }
    }

    fn unchain(&self, id: PageId) {
        let page = self.page(id);
        let mut place = self.chain_with(page);
        while place.get() != 0 {
            if place.get() == id {
                place.set(page.next.get());
                return;
            }
            place = &self.page(place.get()).next;
        }
    }

    // Age.

    fn push_newest(&self, id: PageId) {
        let page = self.page(id);
        let before = self.newest.replace(id);
        page.older.set(before);
        page.newer.set(0);
        if before == 0 {
            self.oldest.set(id);
        } else {
            self.page(before).newer.set(id);
        }
    }

    fn unlink_age(&self, id: PageId) {
        let page = self.page(id);
        let (older, newer) = (page.older.get(), page.newer.get());
        if older == 0 {
            self.oldest.set(newer);
        } else {
            self.page(older).newer.set(newer);
        }
        if newer == 0 {
            self.newest.set(older);
        } else {
            self.page(newer).older.set(older);
        }
    }

    /// The page that was put to use, or renewed, longest ago; 0 for none.
    pub(super) fn oldest(&self) -> PageId {
        self.oldest.get()
    }

    /// Makes a page the newest.
    pub(super) fn renew(&self, id: PageId) {
        self.unlink_age(id);
        self.push_newest(id);
    }

    // Lists of entries.

    #[inline]
    fn links(&self, node: Node) -> &AtomicU64 {
        self.page(page_of(node)).links(index_of(node))
    }

    /// The node behind another in its list.
    #[inline]
    pub(super) fn next(&self, node: Node) -> Node {
        self.links(node).load(Ordering::Relaxed) as u32
    }

    /// Puts an entry, whose node is given, before `head`; it is the head from then on.
    #[inline]
    pub(super) fn push(&self, page: &ShadowPage, node: Node, head: Node) {
        // Stored whole: a head has nobody before it, whatever stood there.
        page.links(index_of(node)).store(u64::from(head), Ordering::Relaxed);
        if head != 0 {
            // The neighbour's other half stays: it is the list's order behind it.
            let links = self.links(head);
            let next = links.load(Ordering::Relaxed) & 0xffff_ffff;
            links.store(next | u64::from(node) << 32, Ordering::Relaxed);
        }
    }

    /// Takes an entry out of its list. `Some(next)`: it was the head, and `next` is.
    #[inline]
    pub(super) fn unlink(&self, page: &ShadowPage, index: usize) -> Option<Node> {
        let links = page.links(index).load(Ordering::Relaxed);
        // Alone in its list: most frames are mapped once, and there are no neighbours to tell.
        if links == 0 {
            return Some(0);
        }
        self.unlink_amid(links)
    }

    /// Closes the gap between the two neighbours in `links`.
    #[inline(never)]
    fn unlink_amid(&self, links: u64) -> Option<Node> {
        let (next, before) = (links as u32, (links >> 32) as u32);
        if next != 0 {
            let links = self.links(next);
            let behind = links.load(Ordering::Relaxed) & 0xffff_ffff;
            links.store(behind | u64::from(before) << 32, Ordering::Relaxed);
        }
        if before == 0 {
            return Some(next);
        }
        let links = self.links(before);
        let front = links.load(Ordering::Relaxed) & !0xffff_ffff;
        links.store(front | u64::from(next), Ordering::Relaxed);
        None
    }
}

#[cfg(test)]
#[path = "arena_tests.rs"]
mod tests;
