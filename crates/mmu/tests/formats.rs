//! Both formats of TDP tables, read back by walks written from the manuals alone.

mod section;

use host::gup::FrameOf;
use std::sync::atomic::{AtomicU64, Ordering};

use gannet_mmu::tdp::{FlushRemote, Thoroughness, pages_per};
use gannet_mmu::{EptSupport, Format, MapOutcome, Mapping, Marks, TableCache, Tdp};
use host::std_port::test::host_frame;
use proptest::prelude::*;
use section::section;
use x86::{Direction, Gfn, Gpa, Hpa};

const NEW: EptSupport =
    EptSupport { pages_2m: true, pages_1g: true, accessed_dirty: true, page_log: false };
/// Where the CPU logs pages.
const LOGGING: Format = Format::ept(EptSupport { page_log: true, ..NEW });
const NPT: Format = Format::npt(4, 0);
const EPT: Format = Format::ept(NEW);
/// Without accessed and dirty flags.
const OLD_EPT: Format = Format::ept(EptSupport { accessed_dirty: false, ..NEW });

struct Nobody;

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Nobody {
    fn flush_remote(&self) {}
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

/// What a walk ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    pfn: u64,
    level: u8,
    write: bool,
    exec: bool,
    /// EPT memory type and ignore-PAT; NPT: PAT, PCD, PWT.
    memory: u64,
    accessed: bool,
    dirty: bool,
    /// Accessed flags of all tables on the way, or of none.
    tables_accessed: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Walk {
    Found(Found),
    NotPresent,
    /// A reserved bit, or a misconfiguration.
    Bad(u8, u64),
}

fn word(table: Hpa, index: u64) -> &'static AtomicU64 {
    let at = host::page::direct_map(table).cast::<AtomicU64>();
    // SAFETY: a table of a tree that the test holds; the index is below 512.
    unsafe { &*at.add((index & 511) as usize) }
}

/// The word that maps `gfn`.
fn leaf_of(tdp: &Tdp<()>, gfn: u64) -> &'static AtomicU64 {
    let mut table = tdp.root();
    for level in (1..=4u8).rev() {
        let word = word(table, gfn >> (9 * (level - 1)));
        let entry = word.load(Ordering::Relaxed);
        if level == 1 || entry & 1 << 7 != 0 {
            return word;
        }
        table = Hpa(entry & ADDRESS);
    }
    unreachable!()
}

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// SDM vol. 3 §29.3.2 and §29.3.3, without mode-based execute control, with 1 GiB pages.
fn ept_walk(tdp: &Tdp<()>, gfn: u64) -> Walk {
    let (mut table, mut rights, mut tables_accessed) = (tdp.root(), 7, true);
    for level in (1..=4u8).rev() {
        let entry = word(table, gfn >> (9 * (level - 1))).load(Ordering::Relaxed);
        if entry & 7 == 0 {
            return Walk::NotPresent;
        }
        // Write without read; execute alone is allowed by a capability that nothing here relies on.
        if entry & 1 == 0 {
            return Walk::Bad(level, entry);
        }
        rights &= entry;
        let leaf = level == 1 || entry & 1 << 7 != 0;
        if !leaf {
            // Bits 7:3 of an entry that points to a table are reserved.
            if entry & 0xf8 != 0 {
                return Walk::Bad(level, entry);
            }
            tables_accessed &= entry & 1 << 8 != 0;
            table = Hpa(entry & ADDRESS);
            continue;
        }
        let within = pages_per(level) - 1;
        // Reserved: the address below the page's size, bit 7 of PML4; memory types 2, 3 and 7.
        let reserved = (entry & ADDRESS) >> 12 & within;
        if reserved != 0 || level == 4 || matches!(entry >> 3 & 7, 2 | 3 | 7) {
            return Walk::Bad(level, entry);
        }
        // Suppress-#VE and the bits that newer controls give a meaning.
        if entry & (1 << 63 | 0x3f << 57 | 1 << 10) != 0 {
            return Walk::Bad(level, entry);
        }
        return Walk::Found(Found {
            pfn: (entry & ADDRESS) >> 12 | gfn & within,
            level,
            write: rights & 2 != 0,
            exec: rights & 4 != 0,
            memory: entry >> 3 & 0xf,
            accessed: entry & 1 << 8 != 0,
            dirty: entry & 1 << 9 != 0,
            tables_accessed,
        });
    }
    Walk::NotPresent
}

/// APM vol. 2 §15.25.5: a user access to long-mode tables, with NXE.
fn npt_walk(tdp: &Tdp<()>, gfn: u64) -> Walk {
    let (mut table, mut rights, mut no_exec, mut tables_accessed) = (tdp.root(), 7, 0, true);
    for level in (1..=4u8).rev() {
        let entry = word(table, gfn >> (9 * (level - 1))).load(Ordering::Relaxed);
        if entry & 1 == 0 {
            return Walk::NotPresent;
        }
        if level == 4 && entry & 1 << 7 != 0 {
            return Walk::Bad(level, entry);
        }
        rights &= entry;
        no_exec |= entry >> 63;
        if level > 1 && entry & 1 << 7 == 0 {
            tables_accessed &= entry & 1 << 5 != 0;
            table = Hpa(entry & ADDRESS);
            continue;
        }
        let within = pages_per(level) - 1;
        // A supervisor page faults, and so do address bits below the page's size.
        if rights & 4 == 0 || (entry & ADDRESS) >> 12 & within != 0 {
            return Walk::Bad(level, entry);
        }
        return Walk::Found(Found {
            pfn: (entry & ADDRESS) >> 12 | gfn & within,
            level,
            write: rights & 2 != 0,
            exec: no_exec == 0,
            memory: entry >> 3 & 3 | if level == 1 { entry >> 7 & 1 } else { entry >> 12 & 1 },
            accessed: entry & 1 << 5 != 0,
            dirty: entry & 1 << 6 != 0,
            tables_accessed,
        });
    }
    Walk::NotPresent
}

fn walk(tdp: &Tdp<()>, gfn: u64) -> Walk {
    if *tdp.format() == NPT { npt_walk(tdp, gfn) } else { ept_walk(tdp, gfn) }
}

fn found(tdp: &Tdp<()>, gfn: u64) -> Found {
    match walk(tdp, gfn) {
        Walk::Found(found) => found,
        other => panic!("{gfn:#x}: {other:x?}"),
    }
}

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

/// Write-back (6) that ignores the guest's PAT.
const EPT_RAM: u64 = 6 | 1 << 3;

fn any_mapping() -> impl Strategy<Value = (u64, Mapping)> {
    let fault = prop_oneof![Just(None), Just(Some(Direction::Read)), Just(Some(Direction::Write))];
    let bits = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (0u64..1 << 36, 0u64..1 << 20, 1u8..=3, bits, fault).prop_map(
        |(gfn, large, level, (writable, host, exec, direct), fault)| {
            let of = if direct { FrameOf::Memory } else { FrameOf::Device };
            let frame = host_frame(large << 18 | gfn & ((1 << 18) - 1), of);
            let host_writable = host || writable;
            let (fetch, refused) = (false, 0);
            (gfn, Mapping { frame, level, writable, host_writable, exec, fetch, refused, fault })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn the_hardware_reads_what_was_asked_for_and_so_do_we(
        format in prop_oneof![Just(NPT), Just(EPT), Just(OLD_EPT)],
        (gfn, mapping) in any_mapping(),
    ) {
        let tdp = Tdp::new(format, ()).unwrap();
        prop_assert_eq!(map(&tdp, gfn, &mapping), MapOutcome::Mapped(mapping.level));
        let memory = match (format == NPT, mapping.frame.is_memory()) {
            (true, _) => 0,
            (false, true) => EPT_RAM,
            (false, false) => 0,
        };
        let old = format == OLD_EPT;
        let wanted = Found {
            pfn: mapping.frame.pfn().0,
            level: mapping.level,
            write: mapping.writable,
            exec: mapping.exec,
            memory,
            accessed: mapping.fault.is_some() && !old,
            dirty: mapping.fault == Some(Direction::Write) && mapping.writable && !old,
            tables_accessed: !old,
        };
        prop_assert_eq!(walk(&tdp, gfn), Walk::Found(wanted));
        let ours = tdp.mapper().lookup(Gfn(gfn)).unwrap();
        prop_assert_eq!(
            (ours.pfn.0, ours.level, ours.writable, ours.exec, ours.direct, ours.host_writable),
            (wanted.pfn, wanted.level, wanted.write, wanted.exec, mapping.frame.is_memory(),
             mapping.host_writable)
        );
        prop_assert_eq!((ours.accessed, ours.dirty), (wanted.accessed, wanted.dirty));
        // The frame before the leaf and the one behind it are not mapped.
        let first = gfn & !(pages_per(mapping.level) - 1);
        prop_assert_eq!(walk(&tdp, first.wrapping_sub(1) & ((1 << 36) - 1)), Walk::NotPresent);
        prop_assert_eq!(walk(&tdp, (first + pages_per(mapping.level)) & ((1 << 36) - 1)),
            Walk::NotPresent);
        tdp.zapper().zap(Gfn(gfn), Gfn(gfn + 1), Thoroughness::Leaves, &Nobody);
        prop_assert_eq!(walk(&tdp, gfn), Walk::NotPresent);
    }

    #[test]
    fn the_parts_of_a_split_page_are_valid_and_say_what_it_said(
        format in prop_oneof![Just(NPT), Just(EPT), Just(OLD_EPT)],
        (gfn, mapping) in any_mapping(),
        probe in 0u64..1 << 18,
    ) {
        let tdp = Tdp::new(format, ()).unwrap();
        let mapping = Mapping { writable: true, host_writable: true, ..mapping };
        map(&tdp, gfn, &mapping);
        tdp.zapper().watch_writes(Gfn(gfn), Gfn(gfn + 1));
        let whole = found(&tdp, gfn);
        map(&tdp, gfn, &Mapping { level: 1, fault: None, ..mapping });
        let one = found(&tdp, gfn);
        prop_assert_eq!(one, Found { level: 1, write: true, ..whole });
        let first = gfn & !(pages_per(mapping.level) - 1);
        let other = first | probe & (pages_per(mapping.level) - 1);
        if other != gfn {
            let part = found(&tdp, other);
            let pfn = mapping.frame.pfn().0 + other - gfn;
            prop_assert_eq!(part, Found { pfn, level: part.level, ..whole });
        }
    }
}

#[test]
fn an_entry_of_npt_is_a_user_page() {
    let tdp = Tdp::new(NPT, ()).unwrap();
    map(&tdp, 0x12345, &page(0xabcde));
    let mut table = tdp.root();
    for level in (2..=4u8).rev() {
        let entry = word(table, 0x12345 >> (9 * (level - 1))).load(Ordering::Relaxed);
        // P, W, U, A.
        assert_eq!(entry & 0x8000_0000_0000_0fff, 0b10_0111);
        table = Hpa(entry & ADDRESS);
    }
    // P, W, U, A; no D, no NX, not large.
    let leaf = word(table, 0x145).load(Ordering::Relaxed);
    assert_eq!(leaf & 0x8000_0fff_ffff_ffff, 0xabcd_e000 | 0b10_0111);
}

#[test]
fn an_entry_of_ept_is_write_back_memory() {
    let tdp = Tdp::new(EPT, ()).unwrap();
    map(&tdp, 0x12345, &page(0xabcde));
    let mut table = tdp.root();
    for level in (2..=4u8).rev() {
        let entry = word(table, 0x12345 >> (9 * (level - 1))).load(Ordering::Relaxed);
        // R, W, X, A.
        assert_eq!(entry & 0x8000_0000_0000_0fff, 0x107);
        table = Hpa(entry & ADDRESS);
    }
    // R, W, X, WB, IPAT, A.
    let leaf = word(table, 0x145).load(Ordering::Relaxed);
    assert_eq!(leaf & 0x8000_0fff_ffff_ffff, 0xabcd_e000 | 0x177);
}

#[test]
fn sizes_that_the_cpu_lacks_are_told() {
    assert_eq!((NPT.largest(), EPT.largest()), (3, 3));
    assert_eq!(Format::ept(EptSupport { pages_1g: false, ..NEW }).largest(), 2);
    // 1 GiB without 2 MiB is nothing a CPU has; then neither is used.
    assert_eq!(Format::ept(EptSupport { pages_2m: false, ..NEW }).largest(), 1);
    assert_eq!(Format::ept(EptSupport::default()).largest(), 1);
}

#[test]
fn a_log_without_dirty_flags_is_none() {
    assert!(LOGGING.logs() && !EPT.logs() && !NPT.logs());
    let cpu = EptSupport { accessed_dirty: false, page_log: true, ..NEW };
    assert!(!Format::ept(cpu).logs());
}

#[test]
fn where_the_cpu_logs_a_watched_small_page_is_clean_and_writable() {
    let tdp = Tdp::new(LOGGING, ()).unwrap();
    map(&tdp, 7, &Mapping { fault: Some(Direction::Write), ..page(70) });
    map(&tdp, 8, &Mapping { fault: Some(Direction::Read), ..page(71) });
    assert!(found(&tdp, 7).dirty && !found(&tdp, 8).dirty);
    assert!(tdp.zapper().watch_writes(Gfn(7), Gfn(8)));
    assert_eq!(found(&tdp, 7), Found { pfn: 70, ..found(&tdp, 8) });
    assert!(found(&tdp, 7).write);
    // Nothing changed: no flush.
    assert!(!tdp.zapper().watch_writes(Gfn(0), Gfn(512)));
    // The CPU writes.
    let leaf = leaf_of(&tdp, 8);
    leaf.fetch_or(1 << 9, Ordering::Relaxed);
    assert!(tdp.zapper().watch_writes_masked(Gfn(0), 1 << 8));
    assert!(!found(&tdp, 8).dirty);
}

#[test]
fn where_the_cpu_logs_a_watched_large_page_is_read_only_and_its_parts_are_clean() {
    let tdp = Tdp::new(LOGGING, ()).unwrap();
    let large = Mapping { level: 2, fault: Some(Direction::Write), ..page(1025) };
    map(&tdp, 513, &large);
    assert!(tdp.zapper().watch_writes(Gfn(512), Gfn(1024)));
    assert!(!found(&tdp, 600).write);
    map(&tdp, 600, &Mapping { fault: Some(Direction::Write), ..page(1112) });
    let (written, other) = (found(&tdp, 600), found(&tdp, 601));
    assert_eq!((written.level, written.write, written.dirty), (1, true, true));
    assert_eq!((other.level, other.write, other.dirty), (1, true, false));
    // The parts of one that nobody watches stay as they are: a TLB may have it as dirty.
    let tdp = Tdp::new(LOGGING, ()).unwrap();
    map(&tdp, 513, &large);
    tdp.mapper().lookup(Gfn(513)).unwrap();
    let leaf = leaf_of(&tdp, 513);
    leaf.fetch_and(!2, Ordering::Relaxed);
    // (As a page that the host itself has read-only.)
    leaf.fetch_and(!(1 << 54), Ordering::Relaxed);
    map(&tdp, 600, &Mapping { fault: Some(Direction::Write), ..page(1112) });
    assert_eq!((found(&tdp, 601).write, found(&tdp, 601).dirty), (false, true));
}

#[test]
fn where_the_cpu_logs_a_clean_page_is_not_written_behind_its_back() {
    use gannet_mmu::tdp::page_of;
    let tdp = Tdp::new(LOGGING, ()).unwrap();
    map(&tdp, 7, &page(0));
    let page = host::page::Page::zeroed().unwrap();
    tdp.zapper().zap(Gfn(7), Gfn(8), Thoroughness::Leaves, &Nobody);
    map(
        &tdp,
        7,
        &Mapping { frame: host_frame(page.hpa().0 >> 12, FrameOf::Memory), ..self::page(0) },
    );
    section(|s| {
        let view = tdp.view(s);
        let clean = page_of(&view, Gpa(7 << 12)).unwrap();
        assert!(!view.copy_to(&clean, 0, &[1]));
        leaf_of(&tdp, 7).fetch_or(1 << 9, Ordering::Relaxed);
        let dirty = page_of(&view, Gpa(7 << 12)).unwrap();
        assert!(view.copy_to(&dirty, 0, &[1]));
    });
}

#[test]
fn a_cpu_without_accessed_flags_gets_none() {
    assert!(NPT.tracks() && EPT.tracks() && !OLD_EPT.tracks());
    let tdp = Tdp::new(OLD_EPT, ()).unwrap();
    map(&tdp, 7, &Mapping { fault: Some(Direction::Write), ..page(70) });
    let found = found(&tdp, 7);
    assert!(!found.accessed && !found.dirty && !found.tables_accessed);
    assert!(tdp.mapper().is_mapped(Gfn(0), Gfn(8)));
    assert!(!tdp.mapper().is_mapped(Gfn(8), Gfn(512)));
    assert!(!tdp.mapper().age(Gfn(0), Gfn(512), Marks::Cleared));
}
