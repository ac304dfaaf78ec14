//! A page of memory in a tree, as a fault maps it.

use gannet_mmu::{MapOutcome, Mapping, TableCache, Tdp};
use host::gup::FrameOf;
use host::page::Page;
use host::std_port::test::host_frame;
use x86::{Direction, Gfn};

/// Maps `page` at `gfn`, writable, by a fault of `direction`.
pub fn map(tdp: &Tdp<()>, gfn: Gfn, page: &Page, direction: Direction) {
    let mapping = Mapping {
        frame: host_frame(page.hpa().pfn().0, FrameOf::Memory),
        level: 1,
        writable: true,
        host_writable: true,
        exec: true,
        fetch: false,
        refused: 0,
        fault: Some(direction),
    };
    let mut cache = TableCache::new();
    cache.top_up(4).unwrap();
    assert_eq!(tdp.mapper().map(gfn, &mapping, &mut cache), MapOutcome::Mapped(1));
}
