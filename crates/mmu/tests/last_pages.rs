//! The pages that were looked at last: known without a walk until they are withdrawn or protected.

mod mapped;
mod section;

use std::sync::atomic::Ordering::Relaxed;

use gannet_mmu::tdp::{FlushRemote, Thoroughness, Wanted};
use gannet_mmu::{EptSupport, Format, LastPages, Tdp};
use host::page::Page;
use section::section;
use x86::{Direction, Gfn, Gpa};

struct Nobody;
// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Nobody {
    fn flush_remote(&self) {}
}

const AT: Gpa = Gpa(0x5678);
const GFN: Gfn = Gfn(5);

/// A page whose words are `value`, mapped at [`GFN`].
fn map(tdp: &Tdp<()>, value: u64) -> Page {
    map_at(tdp, GFN, value)
}

fn map_at(tdp: &Tdp<()>, gfn: Gfn, value: u64) -> Page {
    let page = Page::zeroed().unwrap();
    page.table().iter().for_each(|word| word.store(value, Relaxed));
    mapped::map(tdp, gfn, &page, Direction::Write);
    page
}

/// Whether the page is known without a walk, and what is found there: a word, and whether the guest could write it.
fn look(tdp: &Tdp<()>, last: &LastPages, at: Gpa) -> (bool, Option<(u64, bool)>) {
    section(|s| {
        let view = tdp.view(s);
        let known = last.known(&view, at).is_some();
        let found = last
            .find(&view, at)
            .map(|page| (view.load_u64(&page, at.page_offset()).unwrap(), page.is_writable()));
        (known, found)
    })
}

#[test]
fn the_last_page_is_known_until_it_is_withdrawn() {
    let (tdp, last) = (Tdp::new(Format::npt(4, 0), ()).unwrap(), LastPages::new());
    assert_eq!(look(&tdp, &last, AT), (false, None));
    let _one = map(&tdp, 1);
    assert_eq!(look(&tdp, &last, AT), (false, Some((1, true))));
    assert_eq!(look(&tdp, &last, AT), (true, Some((1, true))));
    // Another page of the guest's, of which there is none: the last one stays.
    assert_eq!(look(&tdp, &last, Gpa(0x6678)), (false, None));
    assert_eq!(look(&tdp, &last, AT), (true, Some((1, true))));
    tdp.zapper().zap(GFN, Gfn(GFN.0 + 1), Thoroughness::Leaves, &Nobody);
    assert_eq!(look(&tdp, &last, AT), (false, None));
    let _two = map(&tdp, 2);
    assert_eq!(look(&tdp, &last, AT), (false, Some((2, true))));
}

#[test]
fn two_pages_are_known_and_the_older_goes() {
    let (tdp, last) = (Tdp::new(Format::npt(4, 0), ()).unwrap(), LastPages::new());
    let at = |n: u64| Gpa(n << 12 | 8);
    let _pages: Vec<Page> = (5..8).map(|n| map_at(&tdp, Gfn(n), n)).collect();
    for (n, known) in
        [(5, false), (6, false), (5, true), (6, true), (7, false), (6, true), (5, false), (7, true)]
    {
        assert_eq!(look(&tdp, &last, at(n)), (known, Some((n, true))), "{n}");
    }
}

#[test]
fn a_page_whose_writes_are_watched_is_written_no_more() {
    let logging = EptSupport { accessed_dirty: true, page_log: true, ..EptSupport::default() };
    for format in [Format::npt(4, 0), Format::ept(logging)] {
        let (tdp, last) = (Tdp::new(format, ()).unwrap(), LastPages::new());
        let _page = map(&tdp, 1);
        assert_eq!(look(&tdp, &last, AT).1, Some((1, true)));
        let mut zapper = tdp.zapper();
        assert!(zapper.watch_writes(GFN, Gfn(GFN.0 + 1)));
        zapper.flush(&Nobody);
        drop(zapper);
        assert_eq!(look(&tdp, &last, AT), (false, Some((1, false))));
    }
}

/// A fault of the guest's gives write access back, in the same generation. Who reads needs no new look, and the other page stays.
#[test]
fn a_page_that_may_be_written_again_is_looked_at_again_for_a_write() {
    let logging = EptSupport { accessed_dirty: true, page_log: true, ..EptSupport::default() };
    for format in [Format::npt(4, 0), Format::ept(logging)] {
        let (tdp, last) = (Tdp::new(format, ()).unwrap(), LastPages::new());
        let other = Gpa(0x6678);
        let _pages = [map(&tdp, 1), map_at(&tdp, other.gfn(), 2)];
        let mut zapper = tdp.zapper();
        assert!(zapper.watch_writes(GFN, Gfn(GFN.0 + 1)));
        zapper.flush(&Nobody);
        drop(zapper);
        let to_write = |at: Gpa| {
            section(|s| last.find_to_write(&tdp.view(s), at).map(|page| page.is_writable()))
        };
        assert_eq!(look(&tdp, &last, other), (false, Some((2, true))));
        assert_eq!(look(&tdp, &last, AT), (false, Some((1, false))));
        assert_eq!(to_write(AT), Some(false));
        assert!(tdp.mapper().restore_access(GFN, Wanted { write: true, fetch: false }));
        assert_eq!(look(&tdp, &last, AT), (true, Some((1, false))));
        assert_eq!(to_write(AT), Some(true));
        // Kept from now on, beside the other one.
        assert_eq!(look(&tdp, &last, AT), (true, Some((1, true))));
        assert_eq!(look(&tdp, &last, other), (true, Some((2, true))));
        assert_eq!(to_write(Gpa(0x9000)), None);
    }
}

#[test]
fn what_is_known_of_one_memory_is_nothing_of_another() {
    let tdps = [(); 2].map(|()| Tdp::new(Format::npt(4, 0), ()).unwrap());
    let last = LastPages::new();
    let _pages = [map(&tdps[0], 1), map(&tdps[1], 2)];
    for (tdp, value, known) in
        [(&tdps[0], 1, false), (&tdps[1], 2, false), (&tdps[0], 1, true), (&tdps[1], 2, true)]
    {
        assert_eq!(look(tdp, &last, AT), (known, Some((value, true))));
    }
}
