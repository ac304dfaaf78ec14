//! A VM's memory under TDP with tables for a guest's guest beside: what the tree loses they lose, by notifier,
//! slot, dirty log and release, also while they are being made and while vCPUs fault and run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gannet_vm::memory::shadow::Caller;
use gannet_vm::memory::{MemoryError, NestedOutcome, VmMemory};
use gannet_vm::vcpu_shared::{Request, VcpuShared};
use gannet_vm::vcpus::VcpuTable;
use host::page::Pages;
use host::std_port::test;
use irqchip::lapic::CpuRole;
use mmu::shadow::NestedFrame;
use mmu::tdp::FlushRemote;
use mmu::{
    EptOffer, EptSupport, Format, L1Fault, NestedAccess, NestedFault, NestedRoot, NestedRoots,
    PagingContext, Region, RegionLimits, TableCache, Tables,
};
use x86::{Cr0, Cr4, Efer, Gpa, Hva};

const LOG: u32 = 1;
const READONLY: u32 = 2;
/// Frames of the slot: 16 to 79; L1's tables are in 16 to 19 and map 64 frames from 16 on at 0.
const FIRST: u64 = 16;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The vCPUs, and the flush that waits for those in a section, as a VM's does.
struct Cpus {
    vcpus: VcpuTable,
    flushes: AtomicU64,
}

impl Default for Cpus {
    fn default() -> Self {
        let vcpus = VcpuTable::new().unwrap();
        for id in 0..3 {
            vcpus
                .add(VcpuShared::new(id, id, CpuRole::bootstrap_if(id == 0), true).unwrap())
                .unwrap();
        }
        Self { vcpus, flushes: AtomicU64::new(0) }
    }
}

impl Cpus {
    fn vcpu(&self, cpu: usize) -> &VcpuShared {
        self.vcpus.get(cpu).unwrap()
    }

    fn by(&self, cpu: usize) -> Caller<'_, Self> {
        Caller { vcpu: self.vcpu(cpu), flush: self }
    }
}

// SAFETY: waits for the vCPUs in the table, and the tests look with no others.
unsafe impl FlushRemote for Cpus {
    fn flush_remote(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.vcpus.request_all_and_wait(Request::FlushTlb);
    }
}

/// A flush of [`Cpus`]' before which somebody looks: what a CPU may find that has not been interrupted yet, and what it may
/// still do.
struct AtTheFlush<'a, F>(&'a Cpus, F);

// SAFETY: as `Cpus`; the look has ended before the flush begins.
unsafe impl<F: Fn()> FlushRemote for AtTheFlush<'_, F> {
    fn flush_remote(&self) {
        (self.1)();
        self.0.flush_remote();
    }
}

struct Bench {
    user: Pages,
    memory: VmMemory,
    cpus: Cpus,
    ept: bool,
}

/// A vCPU.
struct Runner {
    cpu: usize,
    roots: NestedRoots,
    cache: TableCache,
    root: NestedRoot,
}

/// The leaf entry that the hardware finds.
fn walk(root: &NestedRoot, gpa: u64) -> Option<u64> {
    let mut at = root.hpa.0;
    for level in (1..=4u32).rev() {
        let index = gpa >> (3 + 9 * level) & 511;
        // SAFETY: in the std port a physical address is one of this process; tables live as long as
        // the memory under test.
        let word = unsafe { &*((at + index * 8) as *const AtomicU64) };
        let entry = word.load(Ordering::Acquire);
        if entry & 1 == 0 || level == 1 {
            return (entry & 1 != 0).then_some(entry);
        }
        at = entry & ADDRESS;
    }
    None
}

impl Bench {
    /// `ept`: on a CPU that logs pages. Without: NPT.
    fn new(ept: bool, flags: u32) -> Self {
        let support = EptSupport {
            accessed_dirty: true,
            page_log: true,
            pages_2m: true,
            ..EptSupport::default()
        };
        let format = if ept { Format::ept(support) } else { Format::npt(4, 0) };
        let bench = Self {
            user: Pages::zeroed(6).unwrap(),
            memory: VmMemory::new(format, RegionLimits::default()).unwrap(),
            cpus: Cpus::default(),
            ept,
        };
        bench.set(bench.region(flags & !READONLY));
        for gfn in FIRST..FIRST + 3 {
            bench.entry(gfn, 0, (gfn + 1) << 12 | bench.full());
        }
        (0..64).for_each(|n| bench.entry(19, n, bench.leaf(n)));
        if flags & READONLY != 0 {
            bench.set(Region { size: 0, ..bench.region(0) });
            bench.set(bench.region(flags));
        }
        bench
    }

    fn full(&self) -> u64 {
        if self.ept { 0x307 } else { 0x67 }
    }

    fn leaf(&self, n: u64) -> u64 {
        (FIRST + n) << 12 | self.full() | if self.ept { 6 << 3 } else { 0 }
    }

    fn tables(&self) -> Tables {
        if self.ept {
            let offer = EptOffer { maxphyaddr: 40, ..EptOffer::default() };
            return Tables::ept(FIRST << 12 | 0x5e, &offer);
        }
        let l1 = PagingContext {
            cr0: Cr0::PG | Cr0::PE,
            cr4: Cr4::PAE,
            efer: Efer::LMA | Efer::LME,
            maxphyaddr: 40,
            ..PagingContext::default()
        };
        Tables::npt(FIRST << 12, &l1).unwrap()
    }

    fn region(&self, flags: u32) -> Region {
        Region { slot: 3, flags, gpa: FIRST << 12, size: 64 << 12, hva: self.user.hpa().0 }
    }

    fn set(&self, region: Region) {
        self.memory.set_region(&region, &self.cpus).unwrap();
    }

    fn entry(&self, gfn: u64, n: u64, value: u64) {
        self.memory.write(Gpa((gfn << 12) + n * 8), &value.to_le_bytes()).unwrap();
    }

    fn word(&self, gfn: u64, n: usize) -> u64 {
        self.user.words()[(gfn - FIRST) as usize * 512 + n].load(Ordering::Relaxed)
    }

    fn hva(&self, n: u64) -> Hva {
        Hva(self.user.hpa().0 + (n << 12))
    }

    fn runner(&self) -> Runner {
        self.runner_on(0)
    }

    fn runner_on(&self, cpu: usize) -> Runner {
        let mut roots = NestedRoots::new();
        self.memory.prepare_nested(&self.cpus).unwrap();
        let root = self.memory.nested_switch(self.cpus.by(cpu), &mut roots, &self.tables());
        Runner { roots, cache: TableCache::new(), root: root.unwrap().0, cpu }
    }

    fn told(&self, n: u64, write: bool) -> NestedAccess {
        let at = n << 12 | 8;
        if self.ept {
            NestedAccess::violation(3 << 7 | if write { 2 } else { 1 }, at)
        } else {
            NestedAccess::npf(1 << 32 | 4 | u64::from(write) << 1, at)
        }
    }

    fn fault(&self, runner: &mut Runner, n: u64, write: bool) -> NestedOutcome {
        self.fault_lacking(runner, n, write, None)
    }

    fn fault_lacking(
        &self,
        runner: &mut Runner,
        n: u64,
        write: bool,
        missing: Option<&NestedFrame>,
    ) -> NestedOutcome {
        let Runner { roots, cache, cpu, .. } = runner;
        let (by, access) = (self.cpus.by(*cpu), self.told(n, write));
        self.memory.nested_fault(by, cache, roots, &access, missing)
    }

    fn release(&self, mut runner: Runner) {
        assert!(self.memory.nested_release(&mut runner.roots));
    }

    fn log(&self) -> u64 {
        self.memory.dirty_log(3, true, &self.cpus, |words| Ok(words[0])).unwrap()
    }

    fn absent(&self, write: bool) -> NestedOutcome {
        let bits = if write { 2 } else { 0 };
        NestedOutcome::L1(if self.ept {
            L1Fault::Violation { qualification: 3 << 7 | bits.max(1) }
        } else {
            L1Fault::Npf { info: 1 << 32 | 4 | bits }
        })
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking()
            && let Some(nested) = self.memory.nested()
        {
            assert_eq!(nested.audit(), Ok(0));
        }
    }
}

const FIXED: NestedOutcome = NestedOutcome::Fixed { replaced: false };

fn both(test: impl Fn(bool)) {
    [false, true].into_iter().for_each(test);
}

#[test]
fn a_fault_finds_tables_frames_and_pages_by_itself() {
    both(|ept| {
        let bench = Bench::new(ept, 0);
        let mut runner = bench.runner();
        assert_eq!(bench.fault(&mut runner, 20, true), FIXED);
        let leaf = walk(&runner.root, 20 << 12).unwrap();
        assert_eq!(leaf & (ADDRESS | 2), bench.hva(20).0 | 2);
        assert_eq!(bench.fault(&mut runner, 100, true), bench.absent(true));
        bench.release(runner);
    });
}

#[test]
fn a_frame_that_was_missing_is_brought_and_decides_nothing() {
    both(|ept| {
        let bench = Bench::new(ept, 0);
        let mut runner = bench.runner();
        assert_eq!(bench.fault(&mut runner, 20, true), FIXED);
        // The right one; none of a slot's, by a table and without; another's.
        for (n, gpa) in [(21, (FIRST + 21) << 12), (22, 0x7000_0000), (23, (FIRST + 40) << 12)] {
            for table in [None, Some(L1Fault::Misconfiguration)] {
                let missing =
                    NestedFrame { gpa: Gpa(gpa), write: true, exec: false, dirties: false, table };
                assert_eq!(bench.fault_lacking(&mut runner, n, true, Some(&missing)), FIXED);
                let leaf = walk(&runner.root, n << 12).unwrap();
                assert_eq!(leaf & (ADDRESS | 2), bench.hva(n).0 | 2);
            }
        }
        let missing = NestedFrame {
            gpa: Gpa(FIRST << 12),
            write: true,
            exec: false,
            dirties: false,
            table: None,
        };
        let refused = bench.fault_lacking(&mut runner, 100, true, Some(&missing));
        assert_eq!(refused, bench.absent(true));
        bench.release(runner);
    });
}

#[test]
fn what_no_slot_backs_is_mmio_and_a_table_there_is_l1s_fault() {
    both(|ept| {
        let bench = Bench::new(ept, 0);
        bench.entry(19, 200, 0x7000_0000 | bench.leaf(0) & 0xfff);
        bench.entry(18, 1, 0x7000_0000 | bench.full());
        let mut runner = bench.runner();
        assert_eq!(bench.fault(&mut runner, 200, false), NestedOutcome::Mmio(Gpa(0x7000_0008)));
        assert_eq!(bench.fault(&mut runner, 512, false), bench.absent(false));
        bench.release(runner);
    });
}

/// L1's entry leads to a table that is no memory; L1 is told of it, and mends it without a flush. What the pages have of before
/// goes before L2 runs.
#[test]
fn what_l1_was_told_for_want_of_a_table_is_looked_at_again() {
    both(|ept| {
        let bench = Bench::new(ept, 0);
        let mut runner = bench.runner();
        let switch = |runner: &mut Runner| {
            bench.memory.nested_switch(bench.cpus.by(0), &mut runner.roots, &bench.tables())
        };
        assert_eq!(bench.fault(&mut runner, 20, false), FIXED);
        bench.entry(18, 0, 0x7000_0000 | bench.full());
        assert_eq!(bench.fault(&mut runner, 20, true), bench.absent(true));
        bench.entry(FIRST + 40, 20, bench.leaf(30));
        bench.entry(18, 0, (FIRST + 40) << 12 | bench.full());
        assert_eq!(switch(&mut runner).map(|(_, replaced)| replaced), Ok(true));
        assert_eq!(walk(&runner.root, 20 << 12), None);
        assert_eq!(switch(&mut runner).map(|(_, replaced)| replaced), Ok(false));
        bench.release(runner);
    });
}

#[test]
fn l1s_tables_in_rom_are_read_and_writes_to_rom_are_told() {
    both(|ept| {
        let bench = Bench::new(ept, READONLY);
        // A clean entry that was never used: in ROM it stays so.
        let clean = bench.leaf(21) & !if ept { 0x300 } else { 0x60 };
        bench.user.words()[3 * 512 + 21].store(clean, Ordering::Relaxed);
        let mut runner = bench.runner();
        assert_eq!(bench.fault(&mut runner, 21, false), FIXED);
        assert_eq!(bench.word(19, 21), clean);
        assert_eq!(walk(&runner.root, 21 << 12).unwrap() & 2, 0);
        let told = NestedOutcome::ReadonlyWrite(Gpa((FIRST + 21) << 12 | 8));
        assert_eq!(bench.fault(&mut runner, 21, true), told);
        bench.release(runner);
    });
}

#[test]
fn an_invalidation_withdraws_the_leaf() {
    both(|ept| {
        let bench = Bench::new(ept, 0);
        let mut runner = bench.runner();
        bench.fault(&mut runner, 20, true);
        let flushes = bench.cpus.flushes.load(Ordering::Relaxed);
        bench.memory.invalidate_start(bench.hva(20), bench.hva(21), true, &bench.cpus);
        assert_eq!(walk(&runner.root, 20 << 12), None);
        assert_eq!(bench.cpus.flushes.load(Ordering::Relaxed), flushes + 1);
        assert_eq!(bench.fault(&mut runner, 20, false), NestedOutcome::Retry);
        bench.memory.invalidate_end(bench.hva(20), bench.hva(21));
        assert_eq!(bench.fault(&mut runner, 20, false), FIXED);
        // A table of L1's goes, and comes back: it is found again.
        bench.memory.invalidate_start(bench.hva(3), bench.hva(4), true, &bench.cpus);
        bench.memory.invalidate_end(bench.hva(3), bench.hva(4));
        assert!(matches!(bench.fault(&mut runner, 50, false), NestedOutcome::Fixed { .. }));
        bench.release(runner);
    });
}

/// The frame may be somebody else's as soon as the last flush is over.
#[test]
fn leaves_are_gone_or_read_only_before_the_flush() {
    both(|ept| {
        let bench = Bench::new(ept, LOG);
        let mut runner = bench.runner();
        bench.fault(&mut runner, 20, true);
        let (leaf, flushed) = (|| walk(&runner.root, 20 << 12), AtomicU64::new(0));
        let look = AtTheFlush(&bench.cpus, || {
            flushed.fetch_add(1, Ordering::Relaxed);
            assert_eq!(leaf().unwrap() & 2, 0);
        });
        bench.memory.dirty_log(3, true, &look, |_| Ok(())).unwrap();
        let look = AtTheFlush(&bench.cpus, || {
            flushed.fetch_add(1, Ordering::Relaxed);
            assert_eq!(leaf(), None);
        });
        bench.memory.invalidate_start(bench.hva(20), bench.hva(21), true, &look);
        bench.memory.invalidate_end(bench.hva(20), bench.hva(21));
        assert_eq!(flushed.load(Ordering::Relaxed), 2);
        bench.release(runner);
    });
}

#[test]
fn a_new_round_of_the_dirty_log_catches_the_next_write() {
    both(|ept| {
        let bench = Bench::new(ept, LOG);
        let mut runner = bench.runner();
        assert_eq!(bench.fault(&mut runner, 20, true), FIXED);
        assert_eq!(bench.log() & 1 << 20, 1 << 20);
        assert_eq!(walk(&runner.root, 20 << 12).unwrap() & 2, 0);
        assert_eq!(bench.log() & 1 << 20, 0);
        assert_eq!(bench.fault(&mut runner, 20, true), FIXED);
        assert_eq!(walk(&runner.root, 20 << 12).unwrap() & 2, 2);
        let clear = bench.memory.clear_dirty_log(3, 0, 64, &bench.cpus, |mask| {
            mask[0] = 1 << 20;
            Ok(())
        });
        assert_eq!((clear, walk(&runner.root, 20 << 12).unwrap() & 2), (Ok(()), 0));
        // Accessed bits that a fault sets in L1's tables are writes, too.
        let unused = bench.leaf(30) & !if ept { 0x300 } else { 0x60 };
        bench.user.words()[3 * 512 + 30].store(unused, Ordering::Relaxed);
        bench.log();
        assert_eq!(bench.fault(&mut runner, 30, false), FIXED);
        assert_eq!(bench.log() & 0xf, 1 << 3);
        bench.release(runner);
    });
}

#[test]
fn a_first_read_counts_as_a_write_where_l1_lets_the_page_be_written_unseen() {
    both(|ept| {
        let bench = Bench::new(ept, LOG);
        let (dirty, writable) = if ept { (0x200, 2) } else { (0x40, 2) };
        bench.user.words()[3 * 512 + 21].store(bench.leaf(21) & !dirty, Ordering::Relaxed);
        bench.user.words()[3 * 512 + 22].store(bench.leaf(22) & !writable, Ordering::Relaxed);
        let mut runner = bench.runner();
        bench.log();
        // Dirty in L1's tables already, clean there, and not to be written.
        for (n, logged) in [(20, 1), (21, 0), (22, 0)] {
            assert_eq!(bench.fault(&mut runner, n, false), FIXED);
            assert_eq!((n, bench.log() >> n & 1), (n, logged));
        }
        // What only the log protects is read without an entry in it, as on stock KVM.
        assert_eq!(bench.fault(&mut runner, 20, false), FIXED);
        assert_eq!(bench.log() >> 20 & 1, 0);
        bench.release(runner);
    });
}

#[test]
fn switching_the_dirty_log_on_protects_what_was_writable() {
    both(|ept| {
        let bench = Bench::new(ept, 0);
        let mut runner = bench.runner();
        bench.fault(&mut runner, 20, true);
        bench.set(bench.region(LOG));
        assert_eq!(walk(&runner.root, 20 << 12).unwrap() & 2, 0);
        bench.set(bench.region(0));
        assert_eq!(walk(&runner.root, 20 << 12), None);
        bench.release(runner);
    });
}

#[test]
fn a_slot_that_goes_takes_its_leaves_and_the_pages_made_from_its_tables() {
    both(|ept| {
        let bench = Bench::new(ept, 0);
        let mut runner = bench.runner();
        bench.fault(&mut runner, 20, true);
        let pages = || bench.memory.nested().unwrap().counters().pages.load(Ordering::Relaxed);
        assert_eq!(pages(), 4);
        bench.set(Region { size: 0, ..bench.region(0) });
        // The vCPU holds its root; the rest is gone.
        assert_eq!(pages(), 1);
        assert_eq!(walk(&runner.root, 20 << 12), None);
        assert_eq!(bench.fault(&mut runner, 20, false), bench.absent(false));
        // Other memory in its place, of other content.
        bench.user.words()[3 * 512 + 20].store(bench.leaf(33), Ordering::Relaxed);
        bench.set(bench.region(0));
        assert!(matches!(bench.fault(&mut runner, 20, false), NestedOutcome::Fixed { .. }));
        assert_eq!(walk(&runner.root, 20 << 12).unwrap() & ADDRESS, bench.hva(33).0);
        bench.release(runner);
    });
}

#[test]
fn unloading_l1s_root_takes_l2s_leaves() {
    let bench = Bench::new(false, 0);
    bench.memory.hold_tdp_root();
    let mut runner = bench.runner();
    bench.fault(&mut runner, 20, true);
    bench.memory.unload_tdp_root(&bench.cpus);
    assert_eq!(walk(&runner.root, 20 << 12), None);
    bench.release(runner);
}

#[test]
fn pages_are_made_once_and_not_for_shadow_paging() {
    let bench = Bench::new(false, 0);
    assert!(bench.memory.nested().is_none());
    let mut roots = NestedRoots::new();
    let early = bench.memory.nested_switch(bench.cpus.by(0), &mut roots, &bench.tables());
    assert_eq!(early, Err(MemoryError::NoMemory));
    assert!(bench.memory.nested_release(&mut roots));
    // Those of another memory are held there, whether this one has pages or not.
    let other = Bench::new(true, 0);
    other.memory.prepare_nested(&other.cpus).unwrap();
    let by = other.cpus.by(0);
    other.memory.nested_switch(by, &mut roots, &other.tables()).unwrap();
    assert!(!bench.memory.nested_release(&mut roots) && !roots.is_empty());
    assert!(other.memory.nested_release(&mut roots) && roots.is_empty());
    bench.memory.prepare_nested(&bench.cpus).unwrap();
    let made = core::ptr::from_ref(bench.memory.nested().unwrap());
    bench.memory.prepare_nested(&bench.cpus).unwrap();
    assert_eq!(core::ptr::from_ref(bench.memory.nested().unwrap()), made);
    let limit = || bench.memory.nested().unwrap().limit();
    assert_eq!(limit(), 64);
    let region = Region { slot: 4, flags: 0, gpa: 1 << 32, size: 50_000 << 12, hva: 1 << 40 };
    bench.set(region);
    assert_eq!(limit(), (50_000 + 64) / 50);
    let shadow = VmMemory::with_shadow(Format::npt(4, 0), RegionLimits::default()).unwrap();
    assert!(shadow.prepare_nested(&bench.cpus).is_err() && shadow.nested().is_none());
}

/// While the host has a page back, L2 reaches it on no vCPU: neither by a table nor by a fault that began
/// before, nor by tables that are made just then.
#[test]
fn nothing_withdrawn_is_reached_while_l2_runs_and_faults() {
    both(|ept| (0..4).for_each(|_| run_and_withdraw(ept)));
}

fn run_and_withdraw(ept: bool) {
    let bench = Bench::new(ept, 0);
    let taken: [AtomicBool; 64] = [const { AtomicBool::new(false) }; 64];
    let (bench, taken, stop) = (&bench, &taken, &AtomicBool::new(false));
    let seen: &[AtomicU64; 2] = &[const { AtomicU64::new(0) }; 2];
    let world = &test::clock();
    // The thread that withdraws is on a CPU of its own.
    test::set_cpu(2);
    std::thread::scope(|s| {
        for (cpu, seen) in seen.iter().enumerate() {
            s.spawn(move || {
                test::adopt(world);
                test::set_cpu(cpu);
                let (mut runner, mut n) = (bench.runner_on(cpu), cpu as u64);
                let nested = bench.memory.nested().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    n = n.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let (page, write) = (4 + (n >> 33) % 60, n >> 40 & 1 != 0);
                    let at = page << 12 | 8;
                    let fixed = bench.cpus.vcpu(cpu).in_section(|s| {
                        if let Some(leaf) = walk(&runner.root, at)
                            && (!write || leaf & 2 != 0)
                        {
                            let place = (leaf & ADDRESS) - bench.user.hpa().0;
                            assert_eq!(place >> 12, page);
                            assert!(!taken[page as usize].load(Ordering::SeqCst), "{page}");
                            seen.fetch_add(1, Ordering::Relaxed);
                            return true;
                        }
                        let view = bench.memory.view(s);
                        let fault = nested.try_lock().map(|mut guard| {
                            guard.nested_fault(&view, &runner.roots, &bench.told(page, write))
                        });
                        matches!(fault, Some(NestedFault::Fixed { .. }))
                    });
                    if !fixed {
                        bench.fault(&mut runner, page, write);
                    }
                    let (by, tables) = (bench.cpus.by(cpu), bench.tables());
                    match n >> 50 & 63 {
                        0 => {
                            runner.roots.flush();
                            bench.memory.nested_switch(by, &mut runner.roots, &tables).unwrap();
                        }
                        1 => bench.memory.set_shadow_limit(n >> 60, &bench.cpus),
                        _ => {}
                    }
                }
                bench.release(runner);
            });
        }
        let mut round = 0u64;
        // Until both have run for a while between the invalidations.
        while round < 100 || seen.iter().any(|n| n.load(Ordering::Relaxed) < 150) {
            round += 1;
            assert!(round < 1 << 22, "{seen:?}");
            let first = 4 + round * 7 % 57;
            let count = 1 + round % 3;
            let (start, end) = (bench.hva(first), bench.hva(first + count));
            bench.memory.invalidate_start(start, end, true, &bench.cpus);
            let mine = &taken[first as usize..(first + count) as usize];
            mine.iter().for_each(|t| t.store(true, Ordering::SeqCst));
            std::thread::yield_now();
            mine.iter().for_each(|t| t.store(false, Ordering::SeqCst));
            bench.memory.invalidate_end(start, end);
            if round.is_multiple_of(16) {
                bench.set(bench.region(LOG));
                bench.log();
                bench.set(bench.region(0));
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
