//! Behaviour of a VM's memory, against the std port of `host`, where a frame's address is its
//! user address.

extern crate std;

mod ownership;

use alloc::vec;
use alloc::vec::Vec;
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};

use host::error::Fault;
use host::gup::{GupError, HostPage, fault_in};
use host::page::Pages;
use host::std_port::test;
use irqchip::lapic::CpuRole;
use mmu::tdp::Leaf;
use mmu::{EptSupport, Format, PagingContext, Region, RegionLimits, SlotError, TableCache};
use stats::VmCount;
use x86::{Cr0, Cr4, Direction, Efer, Gfn, Gpa, Hva, Pfn};

use crate::mode::tests::{Flushes, Told};
use crate::vcpu_shared::VcpuShared;

use super::{DirtyLogError, FaultAccess, FaultOutcome, MemoryError, VmMemory};

/// A VM with one slot: 64 pages at guest frame 16, in the slot number 3.
struct Bench {
    user: Pages,
    memory: VmMemory,
    flushes: Flushes,
    cache: TableCache,
}

const LOG: u32 = 1;
const READONLY: u32 = 2;

fn empty() -> VmMemory {
    VmMemory::new(Format::npt(4, 0), RegionLimits::default()).unwrap()
}

impl Bench {
    fn new(flags: u32) -> Self {
        Self::over(empty(), flags)
    }

    fn over(memory: VmMemory, flags: u32) -> Self {
        let user = Pages::zeroed(6).unwrap();
        let bench = Self { user, memory, flushes: Flushes::default(), cache: TableCache::new() };
        bench.set(bench.region(flags)).unwrap();
        bench
    }

    fn region(&self, flags: u32) -> Region {
        Region { slot: 3, flags, gpa: 16 << 12, size: 64 << 12, hva: self.user.hpa().0 }
    }

    fn set(&self, region: Region) -> Result<(), SlotError> {
        self.memory.set_region(&region, &self.flushes)
    }

    fn hva(&self, gfn: u64) -> Hva {
        Hva(self.user.hpa().0 + ((gfn - 16) << 12))
    }

    fn access(gfn: u64, write: bool, present: bool) -> FaultAccess {
        FaultAccess { gpa: Gpa(gfn << 12 | 8), write, exec: false, present }
    }

    fn fault(&mut self, gfn: u64, write: bool) -> FaultOutcome {
        let present = self.leaf(gfn).is_some();
        let access = Self::access(gfn, write, present);
        self.memory.fault(&mut self.cache, &access, &self.flushes, fault_in)
    }

    /// A fault for which `gup` stands in for the host.
    fn fault_by(
        &mut self,
        gfn: u64,
        write: bool,
        gup: impl FnOnce(&VmMemory, Hva) -> Result<HostPage, GupError>,
    ) -> FaultOutcome {
        let (memory, access) = (&self.memory, Self::access(gfn, write, false));
        memory.fault(&mut self.cache, &access, &self.flushes, |hva, _, _| gup(memory, hva))
    }

    /// A read of a page that the host has write-protected.
    fn read_fault_of_read_only(&mut self, gfn: u64) {
        let page = |hva: Hva| test::host_page(hva.0 >> 12, 1, false);
        let outcome = self.fault_by(gfn, false, |_, hva| Ok(page(hva)));
        assert_eq!(outcome, FaultOutcome::Mapped);
    }

    fn leaf(&self, gfn: u64) -> Option<Leaf> {
        self.memory.tdp.mapper().lookup(Gfn(gfn))
    }

    fn mapped(&self, gfn: u64) -> Option<(u64, bool)> {
        self.leaf(gfn).map(|l| (l.pfn.0 << 12, l.writable))
    }

    fn log(&self) -> u64 {
        self.memory.dirty_log(3, true, &self.flushes, |words| Ok(words[0])).unwrap()
    }
}

fn host_page(hva: Hva, level: u8) -> HostPage {
    test::host_page(hva.0 >> 12, level, true)
}

#[test]
fn a_first_touch_maps_the_page_and_the_tables_serve_the_next() {
    let mut bench = Bench::new(0);
    assert_eq!(bench.fault(20, false), FaultOutcome::Mapped);
    // Writable at once, though it was read: the write costs no second fault.
    assert_eq!(bench.mapped(20), Some((bench.hva(20).0, true)));
    assert!(bench.cache.is_empty());
    assert_eq!(bench.fault(21, true), FaultOutcome::Mapped);
    assert!(bench.cache.is_empty());
    assert_eq!(bench.flushes.take(), 0);
}

#[test]
fn what_no_slot_backs_is_mmio() {
    let mut bench = Bench::new(0);
    for gfn in [0, 15, 80, 1 << 30, u64::MAX >> 12] {
        assert_eq!(bench.fault(gfn, true), FaultOutcome::Mmio);
    }
}

#[test]
fn a_readonly_slot_is_read_and_its_writes_are_mmio() {
    let mut bench = Bench::new(READONLY);
    assert_eq!(bench.fault(16, true), FaultOutcome::ReadonlyWrite);
    assert_eq!(bench.fault(16, false), FaultOutcome::Mapped);
    assert_eq!(bench.mapped(16), Some((bench.hva(16).0, false)));
    assert_eq!(bench.fault(16, true), FaultOutcome::ReadonlyWrite);
    assert_eq!(bench.memory.write(Gpa(16 << 12), b"x"), Err(MemoryError::ReadOnly));
    let swap = bench.memory.cmpxchg(Gpa(16 << 12), 8, 0, 1);
    assert_eq!(swap, Err(MemoryError::ReadOnly));
}

#[test]
fn a_page_that_the_host_maps_readonly_becomes_writable_by_another_fault() {
    let mut bench = Bench::new(0);
    let guard = test::protect(bench.hva(30), 4096);
    assert_eq!(bench.fault(30, false), FaultOutcome::Mapped);
    assert_eq!(bench.mapped(30), Some((bench.hva(30).0, false)));
    assert_eq!(bench.fault(30, true), FaultOutcome::Error(MemoryError::Fault));
    drop(guard);
    assert_eq!(bench.fault(30, true), FaultOutcome::Mapped);
    assert_eq!(bench.mapped(30), Some((bench.hva(30).0, true)));
}

#[test]
fn each_refusal_of_the_host_has_its_outcome() {
    let mut bench = Bench::new(0);
    let hole = test::unmap(bench.hva(40), 4096);
    assert_eq!(bench.fault(40, false), FaultOutcome::Error(MemoryError::Fault));
    drop(hole);
    let mut by = |error| bench.fault_by(40, false, |_, _| Err(error));
    assert_eq!(by(GupError::Again), FaultOutcome::Retry);
    assert_eq!(by(GupError::HwPoison), FaultOutcome::Retry);
    assert_eq!(by(GupError::Interrupted), FaultOutcome::Error(MemoryError::Interrupted));
    // The thread is told of broken memory by a signal.
    assert_eq!(test::take_poisoned(), [bench.hva(40).0]);
    test::set_signal_pending(false);
    assert!(bench.leaf(40).is_none());
}

#[test]
fn vcpus_hear_of_a_devices_memory_before_it_is_mapped() {
    let mut bench = Bench::new(0);
    let mut told = |gfn| {
        let (told, access) = (Cell::new(None), Bench::access(gfn, false, false));
        let look = Told(|| told.set(Some(bench.memory.tdp.mapper().lookup(Gfn(gfn)).is_some())));
        let outcome = bench.memory.fault(&mut bench.cache, &access, &look, fault_in);
        assert_eq!(outcome, FaultOutcome::Mapped);
        told.get()
    };
    assert_eq!(told(17), None, "memory");
    test::make_device(Hva(bench.user.hpa().0 + (2 << 12)));
    assert_eq!(told(18), Some(false));
}

#[test]
fn a_fault_is_taken_again_when_an_invalidation_ran_since_the_host_was_asked() {
    let mut bench = Bench::new(0);
    let outcome = bench.fault_by(20, true, |memory, hva| {
        let page = host_page(hva, 1);
        memory.invalidate_start(hva, Hva(hva.0 + 4096), true, &Flushes::default());
        memory.invalidate_end(hva, Hva(hva.0 + 4096));
        Ok(page)
    });
    assert_eq!((outcome, bench.leaf(20)), (FaultOutcome::Retry, None));
    assert_eq!(bench.fault(20, true), FaultOutcome::Mapped);
}

#[test]
fn no_translation_is_made_while_its_invalidation_runs_but_others_are() {
    let mut bench = Bench::new(0);
    let (hva, end) = (bench.hva(20), bench.hva(21));
    bench.memory.invalidate_start(hva, end, true, &bench.flushes);
    assert_eq!(bench.fault(20, false), FaultOutcome::Retry);
    assert_eq!(bench.fault(19, false), FaultOutcome::Mapped);
    assert_eq!(bench.fault(21, false), FaultOutcome::Mapped);
    // Another one, nested: the range of both is refused until both have ended.
    bench.memory.invalidate_start(bench.hva(24), bench.hva(25), true, &bench.flushes);
    assert_eq!(bench.fault(22, false), FaultOutcome::Retry);
    bench.memory.invalidate_end(hva, end);
    assert_eq!(bench.fault(24, false), FaultOutcome::Retry);
    bench.memory.invalidate_end(bench.hva(24), bench.hva(25));
    assert_eq!(bench.fault(24, false), FaultOutcome::Mapped);
    assert_eq!(bench.fault(20, false), FaultOutcome::Mapped);
}

#[test]
fn a_large_page_is_not_mapped_over_an_invalidation_of_a_part_of_it() {
    let mut bench = large();
    let part = Hva(LARGE + 5 * 4096);
    bench.memory.invalidate_start(part, Hva(part.0 + 4096), true, &bench.flushes);
    let outcome = bench.fault_by(512, false, |_, hva| Ok(host_page(hva, 2)));
    assert_eq!((outcome, bench.leaf(512)), (FaultOutcome::Retry, None));
    let outcome = bench.fault_by(512, false, |_, hva| Ok(host_page(hva, 1)));
    assert_eq!(outcome, FaultOutcome::Mapped);
}

#[test]
fn an_invalidation_withdraws_its_pages_and_flushes_once_if_there_were_any() {
    let mut bench = Bench::new(0);
    (16..80).for_each(|gfn| assert_eq!(bench.fault(gfn, true), FaultOutcome::Mapped));
    let generation = bench.memory.generation();
    bench.memory.invalidate_start(bench.hva(20), bench.hva(30), true, &bench.flushes);
    assert_eq!(bench.flushes.take(), 1);
    assert!(bench.memory.generation() > generation);
    bench.memory.invalidate_start(bench.hva(20), bench.hva(30), true, &bench.flushes);
    bench.memory.invalidate_start(Hva(0), Hva(4096), true, &bench.flushes);
    assert_eq!(bench.flushes.take(), 0);
    for gfn in 16..80 {
        assert_eq!(bench.leaf(gfn).is_some(), !(20..30).contains(&gfn));
    }
}

#[test]
fn an_invalidation_that_may_not_sleep_does_not_give_up_the_cpu() {
    let mut bench = Bench::new(0);
    let (hva, end) = (bench.hva(20), bench.hva(21));
    for may_block in [false, true] {
        assert_eq!(bench.fault(20, true), FaultOutcome::Mapped);
        test::set_need_resched(true);
        bench.memory.invalidate_start(hva, end, may_block, &bench.flushes);
        assert_eq!((bench.flushes.take(), bench.leaf(20)), (1, None));
        assert_eq!(host::task::need_resched(), !may_block);
        bench.memory.invalidate_end(hva, end);
    }
}

/// Else what the guest wrote is lost when the host writes the page back, or lets go of it as clean.
#[test]
fn the_host_hears_of_each_page_that_the_guest_may_write_to() {
    let mut bench = Bench::new(0);
    test::take_dirtied();
    let pages = |gfns: &[u64]| gfns.iter().map(|gfn| bench.hva(*gfn).0 >> 12).collect::<Vec<_>>();
    let (read, ahead) = (pages(&[20]), pages(&[30, 31, 32, 33]));
    assert_eq!(bench.fault(20, false), FaultOutcome::Mapped);
    assert_eq!(test::take_dirtied(), read);
    // What is mapped ahead by the second fault in a row, too.
    assert_eq!(
        (bench.fault(30, true), bench.fault(31, true)),
        (FaultOutcome::Mapped, FaultOutcome::Mapped)
    );
    assert!(bench.leaf(33).is_some());
    assert_eq!(test::take_dirtied(), ahead);
    bench.read_fault_of_read_only(40);
    let mut bench = Bench::new(READONLY);
    for gfn in 20..24 {
        assert_eq!(bench.fault(gfn, false), FaultOutcome::Mapped);
    }
    assert_eq!(test::take_dirtied(), []);
}

#[test]
fn memory_that_backs_two_slots_is_withdrawn_from_both() {
    let mut bench = Bench::new(0);
    bench.set(Region { slot: 4, gpa: 1 << 30, ..bench.region(0) }).unwrap();
    let alias = (1 << 18) + 4;
    let (access, hva) = (Bench::access(alias, true, false), bench.hva(20));
    assert_eq!(
        bench.memory.fault(&mut bench.cache, &access, &bench.flushes, fault_in),
        FaultOutcome::Mapped
    );
    assert_eq!(bench.fault(20, true), FaultOutcome::Mapped);
    assert_eq!(bench.mapped(alias), bench.mapped(20));
    assert!(bench.memory.test_young(hva, Hva(hva.0 + 1)));
    bench.memory.invalidate_start(hva, Hva(hva.0 + 4096), false, &bench.flushes);
    assert!(bench.leaf(alias).is_none() && bench.leaf(20).is_none());
}

#[test]
fn a_slot_that_goes_or_moves_takes_its_translations_along() {
    let mut bench = Bench::new(0);
    bench.fault(20, true);
    bench.set(Region { gpa: 17 << 12, ..bench.region(0) }).unwrap();
    assert_eq!((bench.leaf(20), bench.flushes.take()), (None, 1));
    bench.fault(20, true);
    assert_eq!(bench.mapped(20), Some((bench.hva(19).0, true)));
    bench.set(Region { size: 0, ..bench.region(0) }).unwrap();
    assert_eq!((bench.leaf(20), bench.flushes.take()), (None, 1));
    assert_eq!(bench.fault(20, true), FaultOutcome::Mmio);
    assert_eq!(bench.set(Region { size: 0, ..bench.region(0) }), Err(SlotError::Absent));
}

#[test]
fn a_stale_translation_met_by_a_fault_is_withdrawn() {
    let mut bench = Bench::new(0);
    bench.fault(20, false);
    let other = bench.hva(50);
    let outcome = bench.fault_by(20, false, |_, _| Ok(host_page(other, 1)));
    assert_eq!((outcome, bench.flushes.take()), (FaultOutcome::Retry, 1));
    let outcome = bench.fault_by(20, false, |_, _| Ok(host_page(other, 1)));
    assert_eq!((outcome, bench.mapped(20)), (FaultOutcome::Mapped, Some((other.0, true))));
}

#[test]
fn the_dirty_log_tells_each_write_once_and_each_round() {
    let mut bench = Bench::new(0);
    bench.fault(17, true);
    bench.set(bench.region(LOG)).unwrap();
    // Switched on while mapped: protected and flushed before the call returned.
    assert_eq!((bench.mapped(17), bench.flushes.take()), (Some((bench.hva(17).0, false)), 1));
    assert_eq!((bench.log(), bench.flushes.take()), (0, 0));
    // The host is not asked again for a page that only the log protects.
    let access = Bench::access(17, true, true);
    let asked = Cell::new(false);
    let outcome = bench.memory.fault(&mut bench.cache, &access, &bench.flushes, |_, _, _| {
        asked.set(true);
        Err(GupError::Fault)
    });
    assert_eq!((outcome, asked.get()), (FaultOutcome::Mapped, false));
    // Writable, and so in the log; read-only where it is so for the host.
    bench.fault(18, false);
    assert_eq!(bench.mapped(18), Some((bench.hva(18).0, true)));
    bench.read_fault_of_read_only(20);
    assert_eq!(bench.mapped(20), Some((bench.hva(20).0, false)));
    bench.fault(19, true);
    bench.memory.write(Gpa(21 << 12 | 4090), &[1; 10]).unwrap();
    assert_eq!((bench.log(), bench.flushes.take()), (0b110_1110, 1));
    assert_eq!(bench.mapped(18), Some((bench.hva(18).0, false)));
    assert_eq!((bench.log(), bench.flushes.take()), (0, 0));
    bench.fault(19, true);
    assert_eq!(bench.memory.cmpxchg(Gpa(16 << 12), 4, 0, 1), Ok(true));
    assert_eq!(bench.memory.cmpxchg(Gpa(31 << 12), 4, 7, 1), Ok(false));
    assert_eq!(bench.log(), 0b1001);
}

#[test]
fn a_write_that_comes_to_a_fault_is_in_the_log_as_far_as_it_went() {
    let bench = Bench::new(LOG);
    let hole = test::unmap(bench.hva(19), 4096);
    let written = bench.memory.write(Gpa(17 << 12 | 4090), &[1; 4096 + 12]);
    assert_eq!(written, Err(MemoryError::Fault));
    assert_eq!(bench.log(), 0b110);
    drop(hole);
}

#[test]
fn a_log_that_is_kept_is_cleared_page_by_page() {
    let mut bench = Bench::new(LOG);
    (16..24).for_each(|gfn| _ = bench.fault(gfn, true));
    let peek = |bench: &Bench| {
        bench.memory.dirty_log(3, false, &bench.flushes, |words| Ok(words[0])).unwrap()
    };
    assert_eq!((peek(&bench), peek(&bench), bench.flushes.take()), (0xff, 0xff, 0));
    let clear = |first, count, mask: &[u64]| {
        let read = |to: &mut [u64]| {
            to.copy_from_slice(mask);
            Ok(())
        };
        bench.memory.clear_dirty_log(3, first, count, &bench.flushes, read)
    };
    assert_eq!(clear(0, 64, &[0b1100]), Ok(()));
    assert_eq!((peek(&bench), bench.flushes.take()), (0xf3, 1));
    assert!(!bench.mapped(18).unwrap().1 && bench.mapped(17).unwrap().1);
    for (first, count, words) in [(1, 63, 1), (0, 65, 2), (0, 5, 1), (128, 0, 0), (!63, 64, 1)] {
        assert_eq!(clear(first, count, &vec![1; words]), Err(DirtyLogError::Invalid));
    }
    assert_eq!(clear(64, 0, &[]), Ok(()));
    // What cannot be read clears nothing.
    let unread = bench.memory.clear_dirty_log(3, 0, 64, &bench.flushes, |_| Err(Fault));
    assert_eq!((unread, peek(&bench)), (Err(DirtyLogError::Fault), 0xf3));
    let get = |slot| bench.memory.dirty_log(slot, true, &bench.flushes, |_| Ok(()));
    assert_eq!(get(4), Err(DirtyLogError::NoLog));
    assert_eq!(get(40_000), Err(DirtyLogError::Invalid));
    bench.set(bench.region(0)).unwrap();
    assert_eq!(get(3), Err(DirtyLogError::NoLog));
    // Without the log a page is writable again by a fault like any other.
    assert!(bench.leaf(18).is_none());
}

/// Where the large test slot pretends to be; it is never touched.
const LARGE: u64 = 0x10_0000_0000;

/// 1,024 frames from 512 on, in 2 MiB pages.
fn large() -> Bench {
    let bench = Bench::new(0);
    let region = Region { slot: 5, flags: 0, gpa: 512 << 12, size: 1024 << 12, hva: LARGE };
    bench.set(region).unwrap();
    bench
}

#[test]
fn a_large_host_page_is_mapped_whole_where_slot_and_frame_allow() {
    let mut bench = large();
    let outcome = bench.fault_by(700, false, |_, hva| Ok(host_page(hva, 2)));
    assert_eq!(outcome, FaultOutcome::Mapped);
    let level = |b: &Bench, gfn| b.leaf(gfn).map(|l| (l.pfn.0, l.level));
    assert_eq!(level(&bench, 512), Some((LARGE >> 12, 2)));
    assert_eq!(level(&bench, 1023), Some(((LARGE >> 12) + 511, 2)));
    // A 1 GiB page is used as far as the slot reaches.
    bench.fault_by(1024, false, |_, hva| Ok(host_page(hva, 3)));
    assert_eq!(level(&bench, 1535), Some(((LARGE >> 12) + 1023, 2)));
    // The small slot is not aligned with its memory.
    bench.fault_by(20, false, |_, hva| Ok(host_page(hva, 2)));
    assert_eq!(bench.leaf(20).map(|l| l.level), Some(1));
    // Invalidating one small page withdraws the whole leaf.
    let part = Hva(LARGE + 4096);
    bench.memory.invalidate_start(part, Hva(part.0 + 1), true, &bench.flushes);
    bench.memory.invalidate_end(part, Hva(part.0 + 1));
    assert_eq!((level(&bench, 512), level(&bench, 1023)), (None, None));
    // Memory that is large in address but not in frame stays small.
    let skewed = |_: &VmMemory, hva: Hva| Ok(test::host_page((hva.0 >> 12) + 1, 2, true));
    bench.fault_by(512, false, skewed);
    assert_eq!(level(&bench, 512), Some(((LARGE >> 12) + 1, 1)));
}

#[test]
fn the_dirty_log_splits_large_pages_and_they_come_back_after_it() {
    let mut bench = large();
    bench.fault_by(700, true, |_, hva| Ok(host_page(hva, 2)));
    let log = Region { slot: 5, flags: LOG, gpa: 512 << 12, size: 1024 << 12, hva: LARGE };
    bench.set(log).unwrap();
    // The log makes them small, not the guest's faults: the host need not be asked again.
    assert_eq!(bench.leaf(700).map(|l| (l.level, l.writable)), Some((1, false)));
    let access = Bench::access(700, true, true);
    let outcome = bench
        .memory
        .fault(&mut bench.cache, &access, &bench.flushes, |_, _, _| Err(GupError::Fault));
    assert_eq!(outcome, FaultOutcome::Mapped);
    assert_eq!(bench.leaf(700).map(|l| (l.level, l.writable)), Some((1, true)));
    assert_eq!(bench.leaf(701).map(|l| (l.level, l.writable)), Some((1, false)));
    let bits = bench.memory.dirty_log(5, true, &bench.flushes, |words| Ok(words.to_vec())).unwrap();
    let marked: Vec<usize> = (0..1024).filter(|n| bits[n / 64] >> (n % 64) & 1 == 1).collect();
    assert_eq!((marked, bits.len()), (vec![700 - 512], 16));
    bench.set(Region { flags: 0, ..log }).unwrap();
    bench.fault_by(700, true, |_, hva| Ok(host_page(hva, 2)));
    assert_eq!(bench.leaf(701).map(|l| (l.level, l.writable)), Some((2, true)));
}

#[test]
fn the_dirty_log_of_gigabytes_is_switched_on_by_one_flush_wherever_pages_are_mapped() {
    for mapped in [3, (1 << 18) + 3] {
        let mut bench = Bench::new(0);
        let region = Region { slot: 5, flags: 0, gpa: 1 << 30, size: 2 << 30, hva: LARGE };
        bench.set(region).unwrap();
        let gfn = (1 << 18) + mapped;
        bench.fault_by(gfn, true, |_, hva| Ok(host_page(hva, 1)));
        bench.set(Region { flags: LOG, ..region }).unwrap();
        assert_eq!((bench.flushes.take(), bench.mapped(gfn).unwrap().1), (1, false));
    }
}

#[test]
fn faults_in_order_map_ahead_what_the_host_has() {
    let mut bench = Bench::new(0);
    let hole = test::unmap(bench.hva(60), 4096);
    let mut faults = Vec::new();
    for gfn in 16..60 {
        if bench.leaf(gfn).is_none() {
            faults.push(gfn);
            assert_eq!(bench.fault(gfn, true), FaultOutcome::Mapped);
        }
        assert_eq!(bench.mapped(gfn), Some((bench.hva(gfn).0, true)));
    }
    // One, then two, four, eight and sixteen ahead, up to the hole.
    assert_eq!(faults, [16, 17, 20, 25, 34, 51]);
    assert_eq!(bench.leaf(60), None);
    drop(hole);
    // What was mapped ahead counts as untouched, and a page here and there maps itself alone.
    assert!(!bench.memory.test_young(bench.hva(52), bench.hva(59)));
    assert_eq!(bench.fault(62, true), FaultOutcome::Mapped);
    assert_eq!((bench.leaf(61), bench.leaf(63)), (None, None));
}

#[test]
fn nothing_is_mapped_ahead_into_an_invalidation_or_past_the_slot() {
    let mut bench = Bench::new(0);
    let (start, end) = (bench.hva(19), bench.hva(20));
    bench.memory.invalidate_start(start, end, true, &bench.flushes);
    bench.fault(16, true);
    bench.fault(17, true);
    assert_eq!((bench.leaf(18), bench.leaf(19)), (None, None));
    bench.memory.invalidate_end(start, end);
    for gfn in 77..80 {
        assert_eq!(bench.fault(gfn, true), FaultOutcome::Mapped);
    }
    assert_eq!(bench.leaf(80), None);
}

#[test]
fn age_is_reported_for_the_host_range() {
    let mut bench = Bench::new(0);
    bench.fault(20, false);
    let (hva, end) = (bench.hva(20), bench.hva(21));
    assert!(!bench.memory.test_young(bench.hva(21), bench.hva(79)));
    assert!(
        bench.memory.test_young(hva, end) && bench.memory.clear_young(hva, end, &bench.flushes)
    );
    assert!(
        !bench.memory.test_young(hva, end)
            && !bench.memory.clear_young(Hva(0), Hva(!0), &bench.flushes)
    );
    assert_eq!(bench.flushes.take(), 0);
}

#[test]
fn without_accessed_flags_a_page_ages_by_being_withdrawn() {
    // EPT of a CPU from before it had them.
    let format = Format::ept(EptSupport { pages_2m: true, ..EptSupport::default() });
    let mut bench = Bench::over(VmMemory::new(format, RegionLimits::default()).unwrap(), 0);
    bench.fault(20, false);
    let (hva, end) = (bench.hva(20), bench.hva(21));
    let flushes = &bench.flushes;
    assert!(!bench.memory.test_young(bench.hva(30), bench.hva(79)));
    assert!(bench.memory.test_young(hva, end) && bench.memory.test_young(hva, end));
    assert_eq!((flushes.take(), bench.memory.clear_young(hva, end, flushes)), (0, true));
    assert_eq!((flushes.take(), bench.leaf(20)), (1, None));
    assert!(!bench.memory.clear_young(hva, end, flushes));
    assert_eq!(flushes.take(), 0);
    bench.fault(20, false);
    assert!(bench.memory.test_young(hva, end));
}

#[test]
fn a_large_host_page_is_mapped_as_large_as_the_cpu_allows() {
    for (pages_2m, pages_1g, wanted) in [(false, false, 1), (true, false, 2), (true, true, 3)] {
        let format =
            Format::ept(EptSupport { pages_2m, pages_1g, accessed_dirty: true, page_log: true });
        let memory = VmMemory::new(format, RegionLimits::default()).unwrap();
        let region = Region { slot: 3, flags: 0, gpa: 1 << 30, size: 1 << 31, hva: 1 << 40 };
        let (flushes, mut cache) = (Flushes::default(), TableCache::new());
        memory.set_region(&region, &flushes).unwrap();
        let access = Bench::access((1 << 18) + 777, true, false);
        let outcome = memory.fault(&mut cache, &access, &flushes, |hva, direction, _| {
            assert_eq!((hva, direction), (Hva((1 << 40) + (777 << 12)), Direction::Write));
            Ok(test::host_page((5 << 18) + 777, 3, true))
        });
        assert_eq!(outcome, FaultOutcome::Mapped);
        let leaf = memory.tdp.mapper().lookup(Gfn((1 << 18) + 777)).unwrap();
        assert_eq!((leaf.level, leaf.pfn), (wanted, Pfn((5 << 18) + 777)));
    }
}

#[test]
fn a_fetch_from_a_large_page_gets_a_small_one_where_the_cpu_has_the_flaw() {
    for (pages_2m, pages_1g, level) in [(false, false, 1), (true, false, 2), (true, true, 3)] {
        let cpu = EptSupport { pages_2m, pages_1g, accessed_dirty: true, page_log: false };
        let format = Format::ept(cpu).splitting_at_fetch();
        let memory = VmMemory::new(format, RegionLimits::default()).unwrap();
        let region = Region { slot: 3, flags: 0, gpa: 1 << 30, size: 1 << 31, hva: 1 << 40 };
        let (flushes, mut cache) = (Flushes::default(), TableCache::new());
        memory.set_region(&region, &flushes).unwrap();
        let mut fault = |memory: &VmMemory, within: u64, exec: bool, present: bool| {
            let access = FaultAccess { exec, ..Bench::access((1 << 18) + within, false, present) };
            let page = test::host_page((5 << 18) + within, 3, true);
            memory.fault(&mut cache, &access, &flushes, |_, _, _| Ok(page))
        };
        let leaf = |within: u64| {
            let leaf = memory.tdp.mapper().lookup(Gfn((1 << 18) + within)).unwrap();
            assert_eq!((leaf.pfn, leaf.writable), (Pfn((5 << 18) + within), true));
            (leaf.level, leaf.exec)
        };
        let splits = || memory.tdp.stats().of(VmCount::NxLargePageSplits).get();
        assert_eq!(fault(&memory, 777, false, false), FaultOutcome::Mapped);
        assert_eq!(leaf(777), (level, level == 1));
        assert_eq!(fault(&memory, 778, true, level > 1), FaultOutcome::Mapped);
        assert_eq!((leaf(777), leaf(778)), ((1, true), (1, true)));
        assert_eq!(splits(), u64::from(level) - 1);
        // Another vCPU that faulted at the same time.
        assert_eq!(fault(&memory, 778, true, true), FaultOutcome::Mapped);
        assert_eq!((leaf(778), splits()), ((1, true), u64::from(level) - 1));
        // While pages are logged it is the log that makes them small.
        assert_eq!(fault(&memory, (1 << 18) + 5, false, false), FaultOutcome::Mapped);
        memory.set_region(&Region { flags: LOG, ..region }, &flushes).unwrap();
        assert_eq!(fault(&memory, (1 << 18) + 6, true, level > 1), FaultOutcome::Mapped);
        let fetched = memory.tdp.mapper().lookup(Gfn((2 << 18) + 6)).unwrap();
        assert_eq!((fetched.level, fetched.exec, fetched.writable), (1, true, level == 1));
        assert_eq!(splits(), u64::from(level) - 1);
    }
}

#[test]
fn guest_memory_is_read_and_written_across_pages_and_slots() {
    let bench = Bench::new(0);
    let next = Pages::zeroed(0).unwrap();
    let region = Region { slot: 4, flags: 0, gpa: 80 << 12, size: 4096, hva: next.hpa().0 };
    bench.set(region).unwrap();
    let data: Vec<u8> = (0..10_000).map(|n| n as u8).collect();
    let at = Gpa((81 << 12) - 10_000);
    bench.memory.write(at, &data).unwrap();
    let mut back = vec![0; 10_000];
    bench.memory.read(at, &mut back).unwrap();
    assert_eq!(back, data);
    assert_eq!(next.bytes()[4095].load(Ordering::Relaxed), 9_999u64 as u8);
    let memory = &bench.memory;
    assert_eq!(memory.read(Gpa((81 << 12) - 1), &mut [0; 2]), Err(MemoryError::Unbacked));
    assert_eq!(memory.read(Gpa(u64::MAX), &mut [0; 2]), Err(MemoryError::Unbacked));
    assert_eq!(memory.write(Gpa(0), &[0]), Err(MemoryError::Unbacked));
    assert_eq!(memory.read(Gpa(0), &mut []), Ok(()));
    let hole = test::unmap(bench.hva(20), 1);
    assert_eq!(memory.read(Gpa(20 << 12), &mut [0]), Err(MemoryError::Fault));
    drop(hole);
    assert_eq!(memory.hva_of(Gfn(20)), Some(bench.hva(20)));
    assert_eq!(memory.hva_of(Gfn(81)), None);
}

#[test]
fn with_interrupts_off_memory_is_what_the_guest_could_reach() {
    let mut bench = Bench::new(LOG);
    bench.fault(20, true);
    bench.read_fault_of_read_only(21);
    bench.memory.write(Gpa(20 << 12 | 4092), &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let vcpu = VcpuShared::new(0, 0, CpuRole::Bootstrap, true).unwrap();
    let entered = vcpu.enter_mode(host::irq::disable());
    let (memory, view) = (&bench.memory, bench.memory.view(entered.section()));
    let mut back = [0; 8];
    assert!(memory.read_irqs_off(&view, Gpa(20 << 12 | 4092), &mut back));
    assert_eq!(back, [1, 2, 3, 4, 5, 6, 7, 8]);
    // Frame 21 is mapped for reading only: the log would miss a write.
    assert!(!memory.write_irqs_off(&view, Gpa(21 << 12), &[9]));
    assert!(memory.write_irqs_off(&view, Gpa(20 << 12 | 16), &7u64.to_le_bytes()));
    assert!(memory.read_irqs_off(&view, Gpa(20 << 12 | 16), &mut back));
    assert_eq!(u64::from_le_bytes(back), 7);
    assert!(!memory.read_irqs_off(&view, Gpa(22 << 12), &mut back));
    assert!(!memory.read_irqs_off(&view, Gpa(0), &mut back));
    host::irq::enable(vcpu.leave_mode(entered));
}

#[test]
fn a_walk_reads_tables_through_the_slots() {
    let bench = Bench::new(LOG);
    let entry = |gfn: u64, n: u64, value: u64| {
        bench.memory.write(Gpa((gfn << 12) + n * 8), &value.to_le_bytes()).unwrap();
    };
    (16..19).for_each(|gfn| entry(gfn, 0, (gfn + 1) << 12 | 7));
    entry(19, 5, 40 << 12 | 7);
    let context = PagingContext {
        cr0: Cr0::PG,
        cr3: 16 << 12,
        cr4: Cr4::PAE,
        efer: Efer::LMA,
        maxphyaddr: 46,
        ..PagingContext::default()
    };
    bench.log();
    let found = mmu::translate(&bench.memory, &context, 0x5123, mmu::Access::WRITE).unwrap();
    assert_eq!(found.gpa, Gpa(40 << 12 | 0x123));
    // The accessed bits are the guest's memory: they are logged.
    assert_eq!(bench.log(), 0b1111);
    let far = PagingContext { cr3: 1 << 40, ..context };
    let found = mmu::translate(&bench.memory, &far, 0x5123, mmu::Access::READ);
    let error = MemoryError::Unbacked;
    assert_eq!(found, Err(mmu::WalkError::Memory { gpa: Gpa(1 << 40), error }));
}

#[test]
fn release_leaves_nothing_mapped() {
    let mut bench = large();
    bench.fault(20, true);
    bench.fault_by(700, true, |_, hva| Ok(host_page(hva, 2)));
    // As many translations as somebody likes: others get the CPU in between.
    test::set_need_resched(true);
    bench.memory.release(&bench.flushes);
    assert!(!host::task::need_resched());
    assert!(bench.leaf(20).is_none() && bench.leaf(700).is_none());
    assert_eq!(bench.memory.tdp.zapper().next_mapped(Gfn(0), Gfn(1 << 36)), Gfn(1 << 36));
}

#[test]
fn faults_and_invalidations_in_parallel_leave_no_translation_behind() {
    let bench = Bench::new(0);
    let (memory, stop) = (&bench.memory, AtomicBool::new(false));
    std::thread::scope(|s| {
        for thread in 0..3u64 {
            let stop = &stop;
            s.spawn(move || {
                let (mut cache, mut n, mut mapped) = (TableCache::new(), thread, 0u64);
                while !stop.load(Ordering::Relaxed) {
                    n = n.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let access = Bench::access(16 + (n >> 33) % 64, n >> 40 & 1 == 1, false);
                    match memory.fault(&mut cache, &access, &Flushes::default(), fault_in) {
                        FaultOutcome::Mapped => mapped += 1,
                        outcome => assert_eq!(outcome, FaultOutcome::Retry),
                    }
                }
                assert!(mapped > 0);
            });
        }
        for round in 0..400u64 {
            let first = 16 + round * 7 % 60;
            let (start, end) = (bench.hva(first), bench.hva(first + 1 + round % 4));
            memory.invalidate_start(start, end, true, &bench.flushes);
            for _ in 0..5 {
                for gfn in first..first + 1 + round % 4 {
                    assert!(bench.leaf(gfn).is_none());
                }
                std::thread::yield_now();
            }
            memory.invalidate_end(start, end);
        }
        stop.store(true, Ordering::Relaxed);
    });
    for gfn in 16..80 {
        if let Some((address, _)) = bench.mapped(gfn) {
            assert_eq!(address, bench.hva(gfn).0);
        }
    }
}

#[test]
fn the_last_vcpu_that_unloads_the_root_takes_the_tables_with_it() {
    let mut b = Bench::new(0);
    assert_eq!(b.memory.hold_tdp_root(), b.memory.tdp_root());
    b.memory.hold_tdp_root();
    assert_eq!(b.fault(20, true), FaultOutcome::Mapped);
    b.memory.unload_tdp_root(&b.flushes);
    assert!(b.leaf(20).is_some());
    assert_eq!(b.flushes.take(), 0);
    b.memory.unload_tdp_root(&b.flushes);
    assert!(b.leaf(20).is_none());
    assert_ne!(b.flushes.take(), 0);
    // And again, on the same root.
    b.memory.hold_tdp_root();
    assert_eq!(b.fault(20, true), FaultOutcome::Mapped);
    assert!(b.memory.leave_tdp_root());
    assert!(b.leaf(20).is_some());
}
