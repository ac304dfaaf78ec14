//! Whether lists, bits and counts agree, for tests.

use core::sync::atomic::Ordering;

use x86::Gfn;

use super::arena::{
    MOST_LISTED, MOST_PARENTS, Node, PageId, ShadowPage, Standing, index_of, node, page_of,
};
use super::tables::frame_of;
use super::{ShadowMmu, State};
use crate::source::{P, PS, U, W};

macro_rules! ensure {
    ($condition:expr, $($what:tt)*) => {
        if !$condition {
            return Err(alloc::format!($($what)*));
        }
    };
}

impl ShadowMmu {
    /// Checks all that the pages promise each other, and how many references vCPUs hold in all.
    /// An error names what is wrong.
    pub fn audit(&self) -> Result<u64, alloc::string::String> {
        let guard = self.lock.lock();
        let state: &State = &guard;
        let (mut references, mut used, mut nodes) = (0, 0, 0);
        for id in 1..state.arena.numbers() {
            if let Some(page) = state.arena.used_page(id) {
                used += 1;
                references += u64::from(page.roots.get());
                nodes += audit_page(state, id, page)?;
            }
        }
        ensure!(used == state.arena.used(), "{used} pages in use, {} counted", state.arena.used());
        let mut listed = 0;
        let mut wrong = None;
        state.frames.for_chunks(Gfn(0), Gfn(u64::MAX), |chunk, first, end| {
            let lists = (first..end).map(|gfn| (chunk.head(Gfn(gfn)), Gfn(gfn), false));
            for (head, gfn, large) in lists.chain([(chunk.large.get(), Gfn(first & !511), true)]) {
                match audit_list(state, head, gfn, large) {
                    // The large ones of a chunk that two slots share are seen in each.
                    Ok(count) => listed += count,
                    Err(what) => wrong = Some(what),
                }
            }
        });
        if let Some(what) = wrong {
            return Err(what);
        }
        ensure!(listed == nodes, "{listed} leaves in lists, {nodes} in pages");
        Ok(references)
    }

    /// Pages in the longest of the chains by which they are found.
    pub fn longest_chain(&self) -> usize {
        self.lock.lock().arena.longest_chain()
    }

    /// As if so many walks over pages had taken place.
    pub fn skip_walks(&self, count: u64) {
        let guard = self.lock.lock();
        guard.walk.set(guard.walk.get().wrapping_add(count));
    }

    /// Whether the guest's writes to a frame are caught.
    pub fn is_protected(&self, gfn: Gfn) -> bool {
        let guard = self.lock.lock();
        guard.frames.chunk(gfn).is_some_and(|chunk| chunk.is_protected(gfn))
    }
}

/// Checks a page, and returns its number of leaves.
fn audit_page(
    state: &State,
    id: PageId,
    page: &ShadowPage,
) -> Result<usize, alloc::string::String> {
    let (gfn, role) = (page.gfn.get(), page.role.get());
    let name = alloc::format!("page {id} of {gfn:?} {role:?}");
    ensure!(state.arena.find(gfn, role) == Some(id), "{name} is not the one found");
    let mut leaves = 0;
    for index in 0..512 {
        let spte = page.spte(index).load(Ordering::Relaxed);
        ensure!(
            // An EPT leaf may allow fetching alone.
            (spte & (P | W | U) != 0) == page.present.has(index),
            "{name}[{index}] is {spte:#x}, but present says {}",
            page.present.has(index)
        );
        ensure!(
            page.present.has(index) || !page.linked.has(index) && !page.below.has(index),
            "{name}[{index}] has bits though nothing is there"
        );
        if page.present.has(index) && !page.is_link(index) {
            ensure!(page.kid(index) == 0, "{name}[{index}] is a leaf, and leads to a page");
            leaves += 1;
            let frame = frame_of(page, index);
            let left_out = if role.level() > 1 {
                role.leaves_out_of_large(frame)
            } else {
                role.leaves_out(frame)
            };
            ensure!(!left_out, "{name}[{index}] leads to what is left out");
            ensure!((spte & PS != 0) == (role.level() > 1), "{name}[{index}] has a wrong size");
        } else if page.present.has(index) {
            let kid = page.kid(index);
            let below = state.arena.used_page(kid);
            let Some(below) = below else {
                return Err(alloc::format!("{name}[{index}] leads to {kid}, which is not in use"));
            };
            ensure!(below.role.get().level() + 1 == role.level(), "{name}[{index}] skips a level");
            ensure!(
                spte & crate::format::ADDRESS == below.hpa().0,
                "{name}[{index}] leads elsewhere"
            );
            ensure!(
                !below.is_doubtful() || page.below.has(index),
                "{name}[{index}] hides a doubtful page"
            );
            let mut parent = below.parents.get();
            while parent != 0 && parent != node(id, index) {
                parent = state.arena.next(parent);
            }
            ensure!(parent != 0, "{name}[{index}] is no parent of {kid}");
        }
    }
    let next = |node: &Node| Some(state.arena.next(*node)).filter(|node| *node != 0);
    let first = Some(page.parents.get()).filter(|node| *node != 0);
    let count = core::iter::successors(first, next).count();
    ensure!(count as u32 == page.parent_count.get(), "{name} has {count} parents, not as counted");
    ensure!(page.parent_count.get() <= MOST_PARENTS, "{name} has too many parents");
    let (mut among, mut listed) = (false, 0);
    state.arena.for_table(gfn, |other, _| {
        listed += 1;
        among |= other == id;
    });
    ensure!(listed <= MOST_LISTED, "{listed} pages are listed of the frame of {name}");
    ensure!(among == page.is_listed(), "{name} is not listed as it says");
    ensure!(
        matches!(page.standing.get(), Standing::Unsync) || role.is_direct() || among,
        "{name} relies on protection, but no write finds it"
    );
    if page.standing.get() == Standing::Synced && !role.is_direct() {
        let protected = state.frames.chunk(gfn).is_some_and(|chunk| chunk.is_protected(gfn));
        ensure!(protected, "{name} is in sync, but its table not protected");
    }
    Ok(leaves)
}

/// Checks the leaves of a frame, and returns their number.
fn audit_list(
    state: &State,
    head: u32,
    gfn: Gfn,
    large: bool,
) -> Result<usize, alloc::string::String> {
    let (mut at, mut count) = (head, 0);
    while at != 0 {
        count += 1;
        let Some(page) = state.arena.used_page(page_of(at)) else {
            return Err(alloc::format!("a leaf of {gfn:?} in page {}", page_of(at)));
        };
        let index = index_of(at);
        ensure!(
            page.present.has(index) && !page.is_link(index),
            "a list of {gfn:?} leads to no leaf"
        );
        ensure!(
            (page.role.get().level() > 1) == large && frame_of(page, index) == gfn,
            "a leaf of {:?} in the list of {gfn:?}",
            frame_of(page, index)
        );
        let protected = state.frames.chunk(gfn).is_some_and(|chunk| {
            if large { chunk.protected.get() != 0 } else { chunk.is_protected(gfn) }
        });
        let writable = page.spte(index).load(Ordering::Relaxed) & W != 0;
        ensure!(!protected || !writable, "{gfn:?} is protected, and writable");
        at = state.arena.next(at);
    }
    Ok(count)
}
