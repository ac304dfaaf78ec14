//! What is so at the moment of a flush: withdrawn already for who comes by then, and no page given back yet.

mod mapped;
mod section;

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use gannet_mmu::tdp::{FlushRemote, Thoroughness};
use gannet_mmu::{CodeFetch, CodeMode, EptSupport, Format, PagingContext, Tdp};
use host::page::Page;
use section::section;
use x86::{Direction, Gfn};

/// Looks around when it is to flush.
struct AtTheFlush<F>(F);

// SAFETY: nothing looks at the tables without a lock beside this thread, whose looks have ended when it returns.
unsafe impl<F: Fn()> FlushRemote for AtTheFlush<F> {
    fn flush_remote(&self) {
        (self.0)();
    }
}

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The frame that all is about.
const GFN: u64 = 8;

fn formats() -> [Format; 2] {
    let cpu = EptSupport { pages_2m: true, pages_1g: true, accessed_dirty: true, page_log: false };
    [Format::npt(4, 0), Format::ept(cpu)]
}

/// A tree in which a page is mapped at [`GFN`].
fn tree(format: Format, page: &Page) -> Tdp<()> {
    let tdp = Tdp::new(format, ()).unwrap();
    mapped::map(&tdp, Gfn(GFN), page, Direction::Read);
    tdp
}

/// The word that stands in the table of `level` on the way to [`GFN`].
fn word(tdp: &Tdp<()>, level: u32) -> u64 {
    let mut at = tdp.root().0;
    for above in (level..=4).rev() {
        // SAFETY: a table of the tree, which no other thread changes, is not freed before its flush is over.
        let word = unsafe { &*((at + (GFN >> (9 * (above - 1)) & 511) * 8) as *const AtomicU64) };
        at = word.load(Ordering::Relaxed) & if above == level { u64::MAX } else { ADDRESS };
    }
    at
}

/// Who begins a section while the flush is under way is not waited for: it has to find the new generation.
#[test]
fn a_trail_is_worth_nothing_before_the_page_is_given_back() {
    for format in formats() {
        let page = Page::zeroed().unwrap();
        let tdp = tree(format, &page);
        let context = PagingContext { maxphyaddr: 40, ..PagingContext::default() };
        let (mut fetch, rip) = (CodeFetch::new(), GFN << 12 | 16);
        assert!(section(|s| fetch.fetch(&context, rip, &tdp.view(s))).is_some());
        let hit = || {
            let mode = CodeMode { cr0: context.cr0, efer: context.efer, ..CodeMode::default() };
            section(|s| fetch.first_bytes(&mode, rip, &tdp.view(s)))
        };
        let (generation, flushed) = (tdp.generation(), Cell::new(false));
        assert!(hit().is_some());
        let look = AtTheFlush(|| {
            flushed.set(true);
            assert!(tdp.generation() > generation);
            assert_eq!(hit(), None);
        });
        tdp.zapper().zap(Gfn(GFN), Gfn(GFN + 1), Thoroughness::Leaves, &look);
        assert!(flushed.get());
    }
}

/// A CPU with L1TF reads from the frame that an entry names although it is not present. A table that waits for its flush
/// will be the host's again, and must be named by none.
#[test]
fn an_entry_whose_table_waits_for_the_flush_names_no_frame() {
    for format in formats() {
        let page = Page::zeroed().unwrap();
        let tdp = tree(format, &page);
        let (table, flushed) = (word(&tdp, 2) & ADDRESS, Cell::new(false));
        assert_ne!(table, 0);
        let look = AtTheFlush(|| {
            flushed.set(true);
            let left = word(&tdp, 2);
            assert_eq!(left & 7, 0, "present");
            assert_eq!(left & ADDRESS, !table & ADDRESS);
        });
        tdp.zapper().zap(Gfn(0), Gfn(512), Thoroughness::Tables, &look);
        assert!(flushed.get());
        assert_eq!(word(&tdp, 2), 0);
    }
}
