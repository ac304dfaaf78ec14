//! Page tables and leaves are counted as they come and go.

use gannet_mmu::tdp::{FlushRemote, Thoroughness};
use gannet_mmu::{Format, MapOutcome, Mapping, TableCache, Tdp};
use host::gup::FrameOf;
use host::std_port::test::host_frame;
use stats::VmCount;
use x86::{Direction, Gfn};

struct Nobody;

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Nobody {
    fn flush_remote(&self) {}
}

fn map(tdp: &Tdp<()>, gfn: u64, level: u8) {
    let mapping = Mapping {
        frame: host_frame(gfn + 512, FrameOf::Memory),
        level,
        writable: true,
        host_writable: true,
        exec: true,
        fetch: false,
        refused: 0,
        fault: Some(Direction::Write),
    };
    let mut cache = TableCache::new();
    loop {
        match tdp.mapper().map(Gfn(gfn), &mapping, &mut cache) {
            MapOutcome::NeedTables(n) => cache.top_up(n).unwrap(),
            MapOutcome::Mapped(_) => return,
            other => panic!("{other:?}"),
        }
    }
}

fn counted(tdp: &Tdp<()>) -> [u64; 4] {
    let of = |what| tdp.stats().of(what).get();
    [
        of(VmCount::PageTablesAllocated),
        of(VmCount::PageTablesFreed),
        of(VmCount::Pages4k),
        of(VmCount::Pages2m),
    ]
}

#[test]
fn tables_and_leaves_are_counted_when_they_come_and_go() {
    let tdp = Tdp::new(Format::npt(4, 0), ()).unwrap();
    assert_eq!(counted(&tdp), [1, 0, 0, 0]);
    map(&tdp, 3, 1);
    map(&tdp, 3, 1);
    assert_eq!(counted(&tdp), [4, 0, 1, 0]);
    map(&tdp, 512, 2);
    assert_eq!(counted(&tdp), [4, 0, 1, 1]);
    // The large leaf serves.
    map(&tdp, 513, 1);
    assert_eq!(counted(&tdp)[1..], [0, 1, 1]);
    tdp.zapper().zap(Gfn(3), Gfn(4), Thoroughness::Leaves, &Nobody);
    assert_eq!(counted(&tdp), [4, 0, 0, 1]);
    tdp.zapper().zap(Gfn(0), Gfn(1 << 36), Thoroughness::Tables, &Nobody);
    assert_eq!(counted(&tdp), [4, 3, 0, 0]);
}

#[test]
fn a_split_large_leaf_becomes_512_small_ones() {
    let tdp = Tdp::new(Format::npt(4, 0), ()).unwrap();
    map(&tdp, 512, 2);
    assert_eq!(counted(&tdp), [3, 0, 0, 1]);
    // A write that the large leaf does not allow, and that is allowed for one small page.
    tdp.zapper().watch_writes(Gfn(512), Gfn(1024));
    map(&tdp, 600, 1);
    assert_eq!(counted(&tdp), [4, 0, 512, 0]);
}
