//! TDP tables against a map, in parallel, and when tables are freed.

mod section;

use host::gup::FrameOf;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gannet_mmu::tdp::{FlushRemote, Thoroughness, lookup, page_of, pages_per};
use gannet_mmu::{EptSupport, Format, MapOutcome, Mapping, Marks, TableCache, Tdp, Wanted};
use host::std_port::test::host_frame;
use proptest::prelude::*;
use section::section;
use stats::VmCount;
use x86::{Direction, Gfn, Gpa};

struct Flushes(AtomicU64);

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Flushes {
    fn flush_remote(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Flushes {
    fn new() -> Self {
        Self(AtomicU64::new(0))
    }
    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

const NEW: EptSupport =
    EptSupport { pages_2m: true, pages_1g: true, accessed_dirty: true, page_log: false };
const NPT: Format = Format::npt(4, 0);
const EPT: Format = Format::ept(NEW);
/// Without accessed and dirty flags.
const OLD_EPT: Format = Format::ept(EptSupport { accessed_dirty: false, ..NEW });

fn format() -> impl Strategy<Value = Format> {
    prop_oneof![Just(NPT), Just(EPT), Just(OLD_EPT)]
}

fn tdp(format: Format) -> Tdp<()> {
    Tdp::new(format, ()).unwrap()
}

const WRITE: Wanted = Wanted { write: true, fetch: false };
const FETCH: Wanted = Wanted { write: false, fetch: true };

fn page(pfn: u64) -> Mapping {
    Mapping {
        frame: host_frame(pfn, FrameOf::Memory),
        level: 1,
        writable: true,
        host_writable: true,
        exec: true,
        fetch: false,
        refused: 0,
        fault: Some(Direction::Read),
    }
}

fn map(tdp: &Tdp<()>, gfn: u64, mapping: &Mapping) -> MapOutcome {
    let mut cache = TableCache::new();
    loop {
        match tdp.mapper().map(Gfn(gfn), mapping, &mut cache) {
            MapOutcome::NeedTables(n) => cache.top_up(n).unwrap(),
            done => return done,
        }
    }
}

fn find(tdp: &Tdp<()>, gfn: u64) -> Option<(u64, u8, bool)> {
    tdp.mapper().lookup(Gfn(gfn)).map(|l| (l.pfn.0, l.level, l.writable))
}

/// Bodies that hold for every format.
macro_rules! in_every_format {
    ($($name:ident)*) => {
        mod npt {
            $(#[test] fn $name() { super::$name(super::NPT) })*
        }
        mod ept {
            $(#[test] fn $name() { super::$name(super::EPT) })*
        }
        mod ept_without_accessed_bits {
            $(#[test] fn $name() { super::$name(super::OLD_EPT) })*
        }
    };
}

in_every_format! {
    missing_tables_are_asked_for_by_number
    another_frame_in_the_place_is_a_conflict
    a_second_fault_widens_permissions_and_never_narrows_them
    a_large_page_is_split_without_losing_what_it_maps
    a_giant_page_is_split_in_two_steps
    a_table_in_the_place_of_a_large_page_makes_it_small
    withdrawing_nothing_does_not_flush
    holes_are_stepped_over
    write_protection_by_mask_hits_its_bits_only
    memory_outside_the_direct_map_is_never_read
    faults_on_different_pages_run_in_parallel
    a_lockless_look_survives_tables_being_freed
}

fn missing_tables_are_asked_for_by_number(format: Format) {
    let tdp = tdp(format);
    let mut cache = TableCache::new();
    let mapper = tdp.mapper();
    assert_eq!(mapper.map(Gfn(5), &page(1), &mut cache), MapOutcome::NeedTables(3));
    cache.top_up(2).unwrap();
    assert_eq!(mapper.map(Gfn(5), &page(1), &mut cache), MapOutcome::NeedTables(1));
    cache.top_up(4).unwrap();
    assert_eq!(mapper.map(Gfn(5), &page(1), &mut cache), MapOutcome::Mapped(1));
    assert_eq!((cache.len(), mapper.map(Gfn(6), &page(2), &mut cache)), (3, MapOutcome::Mapped(1)));
    assert_eq!(cache.len(), 3);
}

fn another_frame_in_the_place_is_a_conflict(format: Format) {
    let tdp = tdp(format);
    map(&tdp, 7, &page(70));
    assert_eq!(map(&tdp, 7, &page(71)), MapOutcome::Conflict);
    assert_eq!(find(&tdp, 7), Some((70, 1, true)));
}

fn a_second_fault_widens_permissions_and_never_narrows_them(format: Format) {
    let tdp = tdp(format);
    map(&tdp, 7, &Mapping { writable: false, host_writable: false, ..page(70) });
    assert_eq!(find(&tdp, 7), Some((70, 1, false)));
    map(&tdp, 7, &page(70));
    assert_eq!(find(&tdp, 7), Some((70, 1, true)));
    map(&tdp, 7, &Mapping { writable: false, ..page(70) });
    assert_eq!(find(&tdp, 7), Some((70, 1, true)));
}

#[test]
fn a_frame_beyond_the_tables_is_refused() {
    let tdp = tdp(NPT);
    assert_eq!(map(&tdp, 1 << 36, &page(1)), MapOutcome::Retry);
    assert_eq!(find(&tdp, 1 << 36), None);
    assert_eq!(find(&tdp, 0), None);
    let five = Tdp::new(Format::npt(5, 0), ()).unwrap();
    assert_eq!(map(&five, 1 << 36, &page(1)), MapOutcome::Mapped(1));
    assert_eq!(find(&five, 1 << 36), Some((1, 1, true)));
}

#[test]
fn the_encryption_bit_is_in_every_entry_and_in_no_address() {
    let tdp = Tdp::new(Format::npt(4, 1 << 47), ()).unwrap();
    map(&tdp, 7, &page(70));
    assert_eq!(find(&tdp, 7), Some((70, 1, true)));
    assert_ne!(tdp.root().0 & (1 << 47), 0);
}

fn a_large_page_is_split_without_losing_what_it_maps(format: Format) {
    let (tdp, flushes) = (tdp(format), Flushes::new());
    assert_eq!(map(&tdp, 513, &Mapping { level: 2, ..page(1025) }), MapOutcome::Mapped(2));
    assert_eq!(find(&tdp, 1023), Some((1535, 2, true)));
    assert!(tdp.zapper().watch_writes(Gfn(512), Gfn(513)));
    assert_eq!(find(&tdp, 1023), Some((1535, 2, false)));
    // A write to one page while the log is on.
    assert!(!tdp.mapper().restore_access(Gfn(600), WRITE));
    assert_eq!(map(&tdp, 600, &page(1112)), MapOutcome::Mapped(1));
    assert_eq!(find(&tdp, 600), Some((1112, 1, true)));
    assert_eq!(find(&tdp, 601), Some((1113, 1, false)));
    assert_eq!(find(&tdp, 512), Some((1024, 1, false)));
    assert!(tdp.mapper().restore_access(Gfn(601), WRITE));
    assert_eq!(find(&tdp, 601), Some((1113, 1, true)));
    tdp.zapper().zap(Gfn(512), Gfn(1024), Thoroughness::Leaves, &flushes);
    assert_eq!((find(&tdp, 601), flushes.count()), (None, 1));
    // The table is gone: a large page can take its place.
    assert_eq!(map(&tdp, 513, &Mapping { level: 2, ..page(1025) }), MapOutcome::Mapped(2));
}

fn a_giant_page_is_split_in_two_steps(format: Format) {
    let tdp = tdp(format);
    let giant = Mapping { level: 3, ..page((1 << 18) + 5) };
    assert_eq!(map(&tdp, 5, &giant), MapOutcome::Mapped(3));
    assert!(tdp.zapper().watch_writes(Gfn(5), Gfn(6)));
    assert_eq!(map(&tdp, 5, &page((1 << 18) + 5)), MapOutcome::Mapped(1));
    assert_eq!(find(&tdp, 5), Some(((1 << 18) + 5, 1, true)));
    assert_eq!(find(&tdp, 511), Some(((1 << 18) + 511, 1, false)));
    assert_eq!(find(&tdp, 512), Some(((1 << 18) + 512, 2, false)));
    assert_eq!(find(&tdp, (1 << 18) - 1), Some(((1 << 19) - 1, 2, false)));
}

fn a_table_in_the_place_of_a_large_page_makes_it_small(format: Format) {
    let tdp = tdp(format);
    map(&tdp, 512, &page(1024));
    assert_eq!(map(&tdp, 700, &Mapping { level: 2, ..page(1212) }), MapOutcome::Mapped(1));
    assert_eq!(find(&tdp, 700), Some((1212, 1, true)));
    assert_eq!(find(&tdp, 701), None);
}

const SPLITTING: [Format; 3] =
    [NPT.splitting_at_fetch(), EPT.splitting_at_fetch(), OLD_EPT.splitting_at_fetch()];

/// A fetch, for which `refused` was possible.
fn fetched(pfn: u64, refused: u8) -> Mapping {
    Mapping { fetch: true, refused, ..page(pfn) }
}

fn exec(tdp: &Tdp<()>, gfn: u64) -> Option<(u8, bool)> {
    tdp.mapper().lookup(Gfn(gfn)).map(|l| (l.level, l.exec))
}

fn splits(tdp: &Tdp<()>) -> u64 {
    tdp.stats().of(VmCount::NxLargePageSplits).get()
}

#[test]
fn a_fetch_makes_a_large_page_small_and_no_other() {
    for format in SPLITTING {
        let (tdp, flushes) = (tdp(format), Flushes::new());
        map(&tdp, 513, &Mapping { level: 2, ..page(1025) });
        map(&tdp, 1025, &Mapping { level: 2, ..page(2049) });
        assert_eq!(exec(&tdp, 600), Some((2, false)));
        assert!(tdp.mapper().restore_access(Gfn(600), Wanted::default()));
        assert!(!tdp.mapper().restore_access(Gfn(600), FETCH));
        assert_eq!(map(&tdp, 600, &fetched(1112, 2)), MapOutcome::Mapped(1));
        for gfn in 512..1024 {
            assert_eq!(
                (find(&tdp, gfn), exec(&tdp, gfn).unwrap().1),
                (Some((gfn + 512, 1, true)), true)
            );
        }
        assert!(tdp.mapper().restore_access(Gfn(601), FETCH));
        assert_eq!((exec(&tdp, 1026), splits(&tdp)), (Some((2, false)), 1));
        // It cannot have been in an instruction TLB.
        assert_eq!(flushes.count(), 0);
        // Withdrawn, it is large again when it comes back.
        tdp.zapper().zap(Gfn(512), Gfn(1024), Thoroughness::Leaves, &flushes);
        assert_eq!(splits(&tdp), 0);
        map(&tdp, 513, &Mapping { level: 2, ..page(1025) });
        assert_eq!(exec(&tdp, 513), Some((2, false)));
    }
}

#[test]
fn what_was_small_for_a_fetch_stays_small_for_data() {
    for format in SPLITTING {
        let (tdp, flushes) = (tdp(format), Flushes::new());
        assert_eq!(map(&tdp, 600, &fetched(1112, 3)), MapOutcome::Mapped(1));
        assert_eq!((exec(&tdp, 600), splits(&tdp)), (Some((1, true)), 2));
        assert_eq!(map(&tdp, 513, &Mapping { level: 2, ..page(1025) }), MapOutcome::Mapped(1));
        assert_eq!(exec(&tdp, 513), Some((1, true)));
        // A table that is there for another reason is none of them.
        map(&tdp, 1 << 20, &page(70));
        assert_eq!(splits(&tdp), 2);
        tdp.zapper().zap(Gfn(0), Gfn(1 << 18), Thoroughness::Tables, &flushes);
        assert_eq!(splits(&tdp), 0);
    }
}

#[test]
fn a_fetch_from_a_giant_page_leaves_large_ones_beside_it() {
    for format in SPLITTING {
        let tdp = tdp(format);
        map(&tdp, 5, &Mapping { level: 3, ..page((1 << 18) + 5) });
        assert_eq!(map(&tdp, 600, &fetched((1 << 18) + 600, 3)), MapOutcome::Mapped(1));
        assert_eq!(
            [5, 600, 1023, 1024].map(|gfn| exec(&tdp, gfn).unwrap()),
            [(2, false), (1, true), (1, true), (2, false)]
        );
        assert_eq!(splits(&tdp), 2);
    }
}

#[test]
fn a_fetch_from_a_large_page_that_is_logged_is_served() {
    for format in SPLITTING {
        let tdp = tdp(format);
        map(&tdp, 513, &Mapping { level: 2, ..page(1025) });
        assert!(tdp.zapper().watch_writes(Gfn(512), Gfn(1024)));
        let logged = Mapping { writable: false, ..fetched(1112, 0) };
        assert_eq!(map(&tdp, 600, &logged), MapOutcome::Mapped(1));
        assert_eq!((find(&tdp, 600), exec(&tdp, 600)), (Some((1112, 1, false)), Some((1, true))));
        // The log would have split it anyway.
        assert_eq!(splits(&tdp), 0);
    }
}

#[test]
fn without_the_flaw_large_pages_are_executed() {
    for format in [NPT, EPT, OLD_EPT] {
        let tdp = tdp(format);
        map(&tdp, 513, &Mapping { level: 2, fetch: true, ..page(1025) });
        assert_eq!((exec(&tdp, 600), splits(&tdp)), (Some((2, true)), 0));
    }
}

fn withdrawing_nothing_does_not_flush(format: Format) {
    let (tdp, flushes) = (tdp(format), Flushes::new());
    map(&tdp, 7, &page(70));
    let generation = tdp.generation();
    assert!(!tdp.zapper().zap(Gfn(8), Gfn(512), Thoroughness::Leaves, &flushes));
    assert_eq!((flushes.count(), tdp.generation()), (0, generation));
    assert!(tdp.zapper().zap(Gfn(7), Gfn(8), Thoroughness::Leaves, &flushes));
    assert_eq!(flushes.count(), 1);
    assert!(tdp.generation() > generation);
    // The empty table stays for the next fault, until the slot goes.
    assert!(!tdp.zapper().zap(Gfn(0), Gfn(512), Thoroughness::Leaves, &flushes));
    assert!(tdp.zapper().zap(Gfn(0), Gfn(512), Thoroughness::Tables, &flushes));
    assert_eq!(flushes.count(), 2);
}

fn holes_are_stepped_over(format: Format) {
    let tdp = tdp(format);
    map(&tdp, (5 << 18) + 9, &page(1));
    map(&tdp, 1 << 35, &page(2));
    let next = |from| tdp.zapper().next_mapped(Gfn(from), Gfn(1 << 36)).0;
    assert_eq!(
        (next(0), next((5 << 18) + 100), next(6 << 18)),
        (5 << 18, (5 << 18) + 100, 1 << 35)
    );
    assert_eq!(next((1 << 35) + (1 << 18)), 1 << 36);
}

#[test]
fn age_is_forgotten_once_and_seen_again_after_an_access() {
    for format in [NPT, EPT] {
        let tdp = tdp(format);
        map(&tdp, 7, &page(70));
        map(&tdp, 8, &Mapping { fault: None, ..page(71) });
        let age = |a, b, marks| tdp.mapper().age(Gfn(a), Gfn(b), marks);
        let (kept, cleared) = (Marks::Kept, Marks::Cleared);
        assert!(!age(8, 9, kept));
        assert!(age(0, 512, kept) && age(0, 512, cleared));
        assert!(!age(0, 512, cleared) && !age(7, 8, kept));
        map(&tdp, 7, &page(70));
        assert!(age(7, 8, kept));
    }
}

fn write_protection_by_mask_hits_its_bits_only(format: Format) {
    let tdp = tdp(format);
    (0..64).for_each(|n| _ = map(&tdp, 1000 + n, &page(5000 + n)));
    let mask = 0x8000_0000_0000_f0f1;
    assert!(tdp.zapper().watch_writes_masked(Gfn(1000), mask));
    for n in 0..64 {
        assert_eq!(find(&tdp, 1000 + n).unwrap().2, mask >> n & 1 == 0, "{n}");
    }
    assert!(!tdp.zapper().watch_writes_masked(Gfn(1000), mask));
    assert!(tdp.zapper().watch_writes_masked(Gfn(1000), u64::MAX));
    assert!(!find(&tdp, 1063).unwrap().2);
}

fn memory_outside_the_direct_map_is_never_read(format: Format) {
    let tdp = tdp(format);
    map(&tdp, 7, &Mapping { frame: host_frame(70, FrameOf::Device), ..page(70) });
    section(|s| {
        let view = tdp.view(s);
        assert!(lookup(&view, Gfn(7)).is_some());
        assert!(page_of(&view, Gpa(7 << 12)).is_none());
    });
}

fn faults_on_different_pages_run_in_parallel(format: Format) {
    let tdp = tdp(format);
    std::thread::scope(|s| {
        for thread in 0..4u64 {
            let tdp = &tdp;
            s.spawn(move || {
                // Interleaved, so that the threads race for the same tables.
                for n in 0..4096 {
                    let gfn = (n * 4 + thread) * 7;
                    let mut outcome = MapOutcome::Retry;
                    while outcome == MapOutcome::Retry {
                        outcome = map(tdp, gfn, &page(gfn + 1));
                    }
                    assert_eq!(outcome, MapOutcome::Mapped(1));
                }
            });
        }
    });
    for gfn in (0..4096 * 4).map(|n| n * 7) {
        assert_eq!(find(&tdp, gfn), Some((gfn + 1, 1, true)));
    }
}

/// Stands for the in-guest mark of a vCPU: the flush waits until a look has ended.
struct Waiting<'a> {
    sections: &'a AtomicU64,
}

// SAFETY: waits for the one thread that looks at the tables, by the count that it keeps.
unsafe impl FlushRemote for Waiting<'_> {
    fn flush_remote(&self) {
        // Odd: inside a section. Waits for the one that is under way, if any.
        let seen = self.sections.load(Ordering::SeqCst);
        while seen & 1 == 1 && self.sections.load(Ordering::SeqCst) == seen {
            std::thread::yield_now();
        }
    }
}

fn a_lockless_look_survives_tables_being_freed(format: Format) {
    let (tdp, stop, sections) = (tdp(format), AtomicBool::new(false), AtomicU64::new(0));
    let found = AtomicU64::new(0);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                sections.fetch_add(1, Ordering::SeqCst);
                section(|s| {
                    let view = tdp.view(s);
                    for gfn in (0..4096).step_by(64) {
                        if let Some(leaf) = lookup(&view, Gfn(gfn)) {
                            assert_eq!(leaf.pfn.0, gfn + 0x10000);
                            found.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
                sections.fetch_add(1, Ordering::SeqCst);
            }
        });
        let flush = Waiting { sections: &sections };
        // On a machine with much else to do, the other thread comes late.
        let mut round = 0u64;
        while round < 300 || found.load(Ordering::Relaxed) == 0 {
            for gfn in (0..4096).step_by(64) {
                let level = if round.is_multiple_of(3) && gfn % 512 == 0 { 2 } else { 1 };
                map(&tdp, gfn, &Mapping { level, ..page(gfn + 0x10000) });
            }
            tdp.zapper().zap(Gfn(0), Gfn(4096), Thoroughness::Tables, &flush);
            round += 1;
        }
        (0..4096).step_by(64).for_each(|g| _ = map(&tdp, g, &page(g + 0x10000)));
        std::thread::sleep(std::time::Duration::from_millis(20));
        stop.store(true, Ordering::Relaxed);
    });
}

#[derive(Clone, Debug)]
enum Op {
    Map { gfn: u64, level: u8, writable: bool },
    Zap { first: u64, count: u64, tables: bool },
    Protect { first: u64, count: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    // A window around a 1 GiB border, so that all levels take part.
    let gfn = (1u64 << 18) - 1500..(1u64 << 18) + 1500;
    prop_oneof![
        3 => (gfn.clone(), 1u8..=3, any::<bool>())
            .prop_map(|(gfn, level, writable)| Op::Map { gfn, level, writable }),
        1 => (gfn.clone(), 1u64..1200, any::<bool>())
            .prop_map(|(first, count, tables)| Op::Zap { first, count, tables }),
        1 => (gfn, 1u64..600).prop_map(|(first, count)| Op::Protect { first, count }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// The model holds one entry per frame. A leaf is a set of frames that were mapped by one
    /// call and not split since; zapping or protecting part of it takes the whole.
    #[test]
    fn random_operations_agree_with_a_map(format in format(), ops in prop::collection::vec(op(), 1..60)) {
        let (tdp, flushes) = (tdp(format), Flushes::new());
        // Frame to (first frame of its leaf, leaf level, writable); pfn = gfn + 2^20.
        let mut model: BTreeMap<u64, (u64, u8, bool)> = BTreeMap::new();
        let offset = 1u64 << 20;
        // Leaves may reach further; the model keeps what the checks look at.
        let window = (1u64 << 18) - 2100..(1u64 << 18) + 2100;
        let kept = |first: u64, count: u64| {
            first.max(window.start)..(first + count).min(window.end)
        };
        for op in ops {
            match op {
                Op::Map { gfn, level, writable } => {
                    let outcome = map(&tdp, gfn, &Mapping { level, writable, ..page(gfn + offset) });
                    let MapOutcome::Mapped(got) = outcome else { panic!("{outcome:?}") };
                    match model.get(&gfn).copied() {
                        Some((first, large, w)) if large > level && (w || !writable) => {
                            prop_assert_eq!(got, large);
                            prop_assert!(first <= gfn);
                        }
                        Some((first, large, w)) if large > level => {
                            // Split: smaller leaves with the old permission, then one upgraded.
                            prop_assert_eq!(got, level);
                            for f in kept(first, pages_per(large)) {
                                let mut size = large - 1;
                                while size > level && f & !(pages_per(size) - 1) == gfn & !(pages_per(size) - 1) {
                                    size -= 1;
                                }
                                model.insert(f, (f & !(pages_per(size) - 1), size, w));
                            }
                        }
                        _ => {}
                    }
                    let first = gfn & !(pages_per(got) - 1);
                    let w = writable || model.get(&gfn).is_some_and(|m| m.2);
                    prop_assert!(got <= level || model.contains_key(&gfn));
                    for f in kept(first, pages_per(got)) {
                        model.insert(f, (first, got, w));
                    }
                }
                Op::Zap { first, count, tables } => {
                    let how = if tables { Thoroughness::Tables } else { Thoroughness::Leaves };
                    let before = flushes.count();
                    let any = tdp.zapper().zap(Gfn(first), Gfn(first + count), how, &flushes);
                    prop_assert_eq!(flushes.count() - before, u64::from(any));
                    let hit: BTreeSet<u64> = model.range(first..first + count).map(|(_, m)| m.0).collect();
                    prop_assert!(any || hit.is_empty());
                    model.retain(|_, m| !hit.contains(&m.0));
                }
                Op::Protect { first, count } => {
                    let hit: BTreeSet<u64> = model.range(first..first + count).map(|(_, m)| m.0).collect();
                    let had = model.range(first..first + count).any(|(_, m)| m.2);
                    prop_assert_eq!(tdp.zapper().watch_writes(Gfn(first), Gfn(first + count)), had);
                    model.values_mut().filter(|m| hit.contains(&m.0)).for_each(|m| m.2 = false);
                }
            }
        }
        for gfn in window.clone() {
            let wanted = model.get(&gfn).map(|m| (gfn + offset, m.1, m.2));
            prop_assert_eq!(find(&tdp, gfn), wanted, "frame {:#x}", gfn);
        }
    }
}
