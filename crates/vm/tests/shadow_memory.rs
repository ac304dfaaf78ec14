//! A VM's memory on shadow pages: what the tree loses the shadow pages lose, by notifier, slot, dirty
//! log and release, also while vCPUs fault and run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gannet_vm::memory::shadow::Caller;
use gannet_vm::memory::{FaultAccess, MemoryError, ShadowOutcome, VmMemory};
use gannet_vm::vcpu_shared::{Request, VcpuShared};
use gannet_vm::vcpus::VcpuTable;
use host::gup::fault_in;
use host::page::Pages;
use host::std_port::test;
use irqchip::lapic::CpuRole;
use mmu::tdp::FlushRemote;
use mmu::{
    AddressSpace, Format, PagingContext, Region, RegionLimits, Root, ShadowFault, ShadowRoots,
    TableCache, Tlb,
};
use x86::{Cr0, Cr4, Efer, Exception, Gfn, Gpa, Hva};

const LOG: u32 = 1;
const READONLY: u32 = 2;
/// Frames of the slot: 16 to 79; the tables are in 16 to 19 and map 64 frames from 16 on at 0.
const FIRST: u64 = 16;
const WRITE: u32 = 2;

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
}

/// A vCPU.
struct Runner {
    cpu: usize,
    roots: ShadowRoots,
    cache: TableCache,
    root: Root,
}

fn context() -> PagingContext {
    PagingContext {
        cr0: Cr0::PG | Cr0::WP | Cr0::PE,
        cr3: FIRST << 12,
        cr4: Cr4::PAE,
        efer: Efer::LME | Efer::LMA | Efer::NXE,
        maxphyaddr: 40,
        ..PagingContext::default()
    }
}

/// The leaf entry that the hardware finds.
fn walk(root: &Root, va: u64) -> Option<u64> {
    let mut at = root.cr3.0;
    for level in (1..=4u32).rev() {
        let index = va >> (3 + 9 * level) & 511;
        // SAFETY: in the std port a physical address is one of this process; tables live as long as
        // the memory under test.
        let word = unsafe { &*((at + index * 8) as *const AtomicU64) };
        let entry = word.load(Ordering::Acquire);
        if entry & 1 == 0 || level == 1 {
            return (entry & 1 != 0).then_some(entry);
        }
        at = entry & 0x000f_ffff_ffff_f000;
    }
    None
}

impl Bench {
    fn new(flags: u32) -> Self {
        let bench = Self {
            user: Pages::zeroed(6).unwrap(),
            memory: VmMemory::with_shadow(Format::npt(4, 0), RegionLimits::default()).unwrap(),
            cpus: Cpus::default(),
        };
        bench.set(bench.region(flags & !READONLY));
        for gfn in FIRST..FIRST + 3 {
            bench.entry(gfn, 0, (gfn + 1) << 12 | 0x67);
        }
        (0..64).for_each(|n| bench.entry(19, n, (FIRST + n) << 12 | 0x67));
        if flags & READONLY != 0 {
            bench.set(Region { size: 0, ..bench.region(0) });
            bench.set(bench.region(flags));
        }
        bench
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
        let mut roots = ShadowRoots::new().unwrap();
        let memory = &self.memory;
        let root = memory.shadow_switch(
            self.cpus.by(cpu),
            &mut roots,
            &context(),
            &[0; 4],
            AddressSpace::Main,
            Tlb::Flushed,
        );
        Runner { roots, cache: TableCache::new(), root: root.unwrap(), cpu }
    }

    fn fault(&self, runner: &mut Runner, n: u64, code: u32) -> ShadowOutcome {
        let Runner { roots, cache, cpu, .. } = runner;
        self.memory.shadow_fault(self.cpus.by(*cpu), cache, roots, &context(), n << 12 | 8, code)
    }

    fn log(&self) -> u64 {
        self.memory.dirty_log(3, true, &self.cpus, |words| Ok(words[0])).unwrap()
    }

    fn settle(&self, runner: &mut Runner) {
        self.memory.shadow().unwrap().set_calm(1);
        self.memory.shadow_flush(self.cpus.vcpu(0), &mut runner.roots);
        self.memory.shadow_settle(self.cpus.by(0));
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.memory.shadow().unwrap().audit().unwrap();
        }
    }
}

#[test]
fn a_fault_finds_tables_frames_and_pages_by_itself() {
    let bench = Bench::new(0);
    let mut runner = bench.runner();
    assert_eq!(bench.fault(&mut runner, 20, WRITE), ShadowOutcome::Fixed);
    let leaf = walk(&runner.root, 20 << 12).unwrap();
    assert_eq!(leaf & 0x000f_ffff_ffff_f002, bench.hva(20).0 | 2);
    // The guest's own fault, with its address and code.
    let refused = ShadowOutcome::Guest(Exception::pf(100 << 12 | 8, WRITE));
    assert_eq!(bench.fault(&mut runner, 100, WRITE), refused);
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn what_no_slot_backs_is_mmio_and_a_table_there_is_a_page_fault() {
    let bench = Bench::new(0);
    bench.entry(19, 200, 0x7000_0067);
    bench.entry(18, 1, 0x7000_0067);
    let mut runner = bench.runner();
    let mmio = ShadowOutcome::Mmio(Gpa(0x7000_0008));
    assert_eq!(bench.fault(&mut runner, 200, 0), mmio);
    let refused = ShadowOutcome::Guest(Exception::pf(512 << 12 | 8, 0));
    assert_eq!(bench.fault(&mut runner, 512, 0), refused);
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn tables_and_frames_in_rom_are_read_and_writes_to_them_are_told() {
    let bench = Bench::new(READONLY);
    // A clean entry that was never used: in ROM it stays so.
    let words = bench.user.words();
    words[3 * 512 + 21].store((FIRST + 21) << 12 | 7, Ordering::Relaxed);
    let mut runner = bench.runner();
    assert_eq!(bench.fault(&mut runner, 21, 0), ShadowOutcome::Fixed);
    assert_eq!(bench.word(19, 21), (FIRST + 21) << 12 | 7);
    assert_eq!(walk(&runner.root, 21 << 12).unwrap() & 2, 0);
    let told = ShadowOutcome::ReadonlyWrite(Gpa((FIRST + 21) << 12 | 8));
    assert_eq!(bench.fault(&mut runner, 21, WRITE), told);
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn an_invalidation_withdraws_the_leaf_and_forgets_that_a_table_was_in_order() {
    let bench = Bench::new(0);
    let mut runner = bench.runner();
    bench.fault(&mut runner, 20, WRITE);
    bench.settle(&mut runner);
    let shadow = bench.memory.shadow().unwrap();
    assert!(shadow.is_protected(Gfn(19)));
    bench.memory.invalidate_start(bench.hva(20), bench.hva(21), true, &bench.cpus);
    assert_eq!(walk(&runner.root, 20 << 12), None);
    assert_eq!(bench.fault(&mut runner, 20, 0), ShadowOutcome::Retry);
    bench.memory.invalidate_end(bench.hva(20), bench.hva(21));
    assert_eq!(bench.fault(&mut runner, 20, 0), ShadowOutcome::Fixed);
    // The table itself goes, and comes back with something else in it.
    bench.memory.invalidate_start(bench.hva(3), bench.hva(4), true, &bench.cpus);
    assert!(!shadow.is_protected(Gfn(19)));
    bench.user.words()[3 * 512 + 20].store(0, Ordering::Relaxed);
    bench.memory.invalidate_end(bench.hva(3), bench.hva(4));
    bench.memory.shadow_flush(bench.cpus.vcpu(0), &mut runner.roots);
    assert_eq!(walk(&runner.root, 20 << 12), None);
    bench.memory.shadow_release(&mut runner.roots);
}

/// The frame may be somebody else's as soon as the last flush is over.
#[test]
fn leaves_are_gone_or_read_only_before_the_flush() {
    let bench = Bench::new(LOG);
    let mut runner = bench.runner();
    bench.fault(&mut runner, 20, WRITE);
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
    bench.memory.shadow_release(&mut runner.roots);
}

/// A table is protected; until every CPU has flushed, one of them may write to it unseen.
#[test]
fn what_is_written_to_a_table_until_the_flush_that_settles_it_counts() {
    let bench = Bench::new(0);
    let mut runner = bench.runner();
    bench.fault(&mut runner, 20, WRITE);
    bench.memory.shadow().unwrap().set_calm(1);
    bench.memory.shadow_flush(bench.cpus.vcpu(0), &mut runner.roots);
    let flushes = bench.cpus.flushes.load(Ordering::Relaxed);
    let look = AtTheFlush(&bench.cpus, || {
        assert!(bench.memory.shadow().unwrap().is_protected(Gfn(19)));
        bench.user.words()[3 * 512 + 20].store(0, Ordering::Relaxed);
    });
    bench.memory.shadow_settle(Caller { vcpu: bench.cpus.vcpu(0), flush: &look });
    assert_eq!(bench.cpus.flushes.load(Ordering::Relaxed), flushes + 1);
    bench.memory.shadow_flush(bench.cpus.vcpu(0), &mut runner.roots);
    assert_eq!(walk(&runner.root, 20 << 12), None);
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn a_new_round_of_the_dirty_log_catches_the_next_write() {
    let bench = Bench::new(LOG);
    let mut runner = bench.runner();
    assert_eq!(bench.fault(&mut runner, 20, WRITE), ShadowOutcome::Fixed);
    assert_eq!(bench.log() & 1 << 20, 1 << 20);
    assert_eq!(walk(&runner.root, 20 << 12).unwrap() & 2, 0);
    assert_eq!(bench.log() & 1 << 20, 0);
    assert_eq!(bench.fault(&mut runner, 20, WRITE), ShadowOutcome::Fixed);
    assert_eq!(walk(&runner.root, 20 << 12).unwrap() & 2, 2);
    let clear = bench.memory.clear_dirty_log(3, 0, 64, &bench.cpus, |mask| {
        mask[0] = 1 << 20;
        Ok(())
    });
    assert_eq!((clear, walk(&runner.root, 20 << 12).unwrap() & 2), (Ok(()), 0));
    // Accessed bits that a fault sets are writes, too.
    bench.user.words()[3 * 512 + 30].store((FIRST + 30) << 12 | 7, Ordering::Relaxed);
    bench.log();
    assert_eq!(bench.fault(&mut runner, 30, 0), ShadowOutcome::Fixed);
    assert_eq!(bench.log() & 0xf, 1 << 3);
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn switching_the_dirty_log_on_protects_what_was_writable() {
    let bench = Bench::new(0);
    let mut runner = bench.runner();
    bench.fault(&mut runner, 20, WRITE);
    bench.set(bench.region(LOG));
    assert_eq!(walk(&runner.root, 20 << 12).unwrap() & 2, 0);
    bench.set(bench.region(0));
    assert_eq!(walk(&runner.root, 20 << 12), None);
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn a_slot_that_goes_takes_its_leaves_and_the_pages_made_from_its_tables() {
    let bench = Bench::new(0);
    let mut runner = bench.runner();
    bench.fault(&mut runner, 20, WRITE);
    bench.settle(&mut runner);
    let pages = || bench.memory.shadow().unwrap().counters().pages.load(Ordering::Relaxed);
    assert_eq!(pages(), 4);
    bench.set(Region { size: 0, ..bench.region(0) });
    // The vCPU holds its root; the rest is gone.
    assert_eq!(pages(), 1);
    assert_eq!(walk(&runner.root, 20 << 12), None);
    let refused = ShadowOutcome::Guest(Exception::pf(20 << 12 | 8, 0));
    assert_eq!(bench.fault(&mut runner, 20, 0), refused);
    // Other memory in its place, of other content.
    bench.user.words()[3 * 512 + 20].store((FIRST + 33) << 12 | 0x67, Ordering::Relaxed);
    bench.set(bench.region(0));
    assert_eq!(bench.fault(&mut runner, 20, 0), ShadowOutcome::Fixed);
    let leaf = walk(&runner.root, 20 << 12).unwrap();
    assert_eq!(leaf & 0x000f_ffff_ffff_f000, bench.hva(33).0);
    // A slot that moves leaves nothing behind.
    bench.set(Region { gpa: 300 << 12, ..bench.region(0) });
    assert_eq!(walk(&runner.root, 20 << 12), None);
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn age_is_what_the_hardware_noted_in_the_shadow_tables() {
    let bench = Bench::new(0);
    let mut runner = bench.runner();
    bench.fault(&mut runner, 20, 0);
    let (start, end) = (bench.hva(20), bench.hva(21));
    assert!(bench.memory.clear_young(start, end, &bench.cpus));
    assert!(!bench.memory.test_young(start, end));
    let mut at = runner.root.cr3.0;
    for shift in [39, 30, 21, 12] {
        // SAFETY: as in walk().
        let word = unsafe { &*((at + ((20u64 << 12) >> shift & 511) * 8) as *const AtomicU64) };
        // The hardware sets the accessed bit.
        at = word.fetch_or(1 << 5, Ordering::Relaxed) & 0x000f_ffff_ffff_f000;
    }
    assert!(bench.memory.test_young(start, end));
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn a_write_of_the_hypervisors_to_a_protected_table_is_seen_at_the_next_flush() {
    let bench = Bench::new(0);
    let mut runner = bench.runner();
    bench.fault(&mut runner, 20, WRITE);
    for by in 0..3 {
        bench.settle(&mut runner);
        let shadow = bench.memory.shadow().unwrap();
        assert!(shadow.is_protected(Gfn(19)), "{by}");
        let (gpa, old) = (Gpa(19 << 12 | 20 << 3), bench.word(19, 20));
        let new = (FIRST + 40 + by) << 12 | 0x67;
        match by {
            0 => bench.memory.write(gpa, &new.to_le_bytes()).unwrap(),
            1 => assert!(bench.memory.cmpxchg(gpa, 8, old, new).unwrap()),
            _ => {
                bench.memory.fault(
                    &mut runner.cache,
                    &FaultAccess { gpa, write: true, exec: false, present: false },
                    &bench.cpus,
                    fault_in,
                );
                bench.cpus.vcpu(0).in_section(|s| {
                    let view = bench.memory.view(s);
                    // While somebody works on the shadow pages there is no writing.
                    let held = shadow.lock();
                    assert!(!bench.memory.write_irqs_off(&view, gpa, &new.to_le_bytes()));
                    drop(held);
                    assert!(bench.memory.write_irqs_off(&view, gpa, &new.to_le_bytes()));
                });
            }
        }
        assert!(!shadow.is_protected(Gfn(19)), "{by}");
        bench.memory.shadow_flush(bench.cpus.vcpu(0), &mut runner.roots);
        assert_eq!(walk(&runner.root, 20 << 12), None, "{by}");
        bench.fault(&mut runner, 20, WRITE);
        let leaf = walk(&runner.root, 20 << 12).unwrap();
        assert_eq!(leaf & 0x000f_ffff_ffff_f000, bench.hva(40 + by).0);
    }
    bench.memory.shadow_release(&mut runner.roots);
}

#[test]
fn the_limit_follows_the_memory_until_the_vmm_sets_one() {
    let bench = Bench::new(0);
    let shadow = bench.memory.shadow().unwrap();
    assert_eq!(shadow.limit(), 64);
    let region = Region { slot: 4, flags: 0, gpa: 1 << 32, size: 50_000 << 12, hva: 1 << 40 };
    bench.set(region);
    assert_eq!(shadow.limit(), (50_000 + 64) / 50);
    bench.memory.set_shadow_limit(77, &bench.cpus);
    bench.set(Region { size: 0, ..region });
    assert_eq!(shadow.limit(), 77);
}

#[test]
fn a_vm_without_shadow_pages_refuses_quietly() {
    let memory: VmMemory = VmMemory::new(Format::npt(4, 0), RegionLimits::default()).unwrap();
    let (mut roots, cpus) = (ShadowRoots::new().unwrap(), Cpus::default());
    assert!(memory.shadow().is_none());
    assert!(
        memory
            .shadow_switch(
                cpus.by(0),
                &mut roots,
                &context(),
                &[0; 4],
                AddressSpace::Main,
                Tlb::Flushed
            )
            .is_err()
    );
    let mut cache = TableCache::new();
    let outcome = memory.shadow_fault(cpus.by(0), &mut cache, &mut roots, &context(), 0, 0);
    assert_eq!(outcome, ShadowOutcome::Retry);
    memory.shadow_settle(cpus.by(0));
    memory.set_shadow_limit(64, &cpus);
    memory.shadow_release(&mut roots);
    assert_eq!(memory.read(Gpa(0), &mut [0]), Err(MemoryError::Unbacked));
}

/// While the host has a page back, no vCPU reaches it: neither by a table nor by a fault that began
/// before.
#[test]
fn nothing_withdrawn_is_reached_while_vcpus_run_and_fault() {
    let bench = Bench::new(0);
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
                let shadow = bench.memory.shadow().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    n = n.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let (page, code) = (4 + (n >> 33) % 60, (n >> 40) as u32 & WRITE);
                    let at = page << 12 | 8;
                    let fixed = bench.cpus.vcpu(cpu).in_section(|s| {
                        if let Some(leaf) = walk(&runner.root, at)
                            && (code == 0 || leaf & 2 != 0)
                        {
                            let place = (leaf & 0x000f_ffff_ffff_f000) - bench.user.hpa().0;
                            assert_eq!(place >> 12, page);
                            assert!(!taken[page as usize].load(Ordering::SeqCst), "{page}");
                            seen.fetch_add(1, Ordering::Relaxed);
                            return true;
                        }
                        let view = bench.memory.view(s);
                        let fault = shadow.try_lock().map(|mut guard| {
                            guard.fault(&view, &runner.roots, &context(), at, code)
                        });
                        fault == Some(ShadowFault::Fixed)
                    });
                    if !fixed {
                        bench.fault(&mut runner, page, code);
                    }
                    match n >> 50 & 63 {
                        0 => bench.memory.shadow_flush(bench.cpus.vcpu(cpu), &mut runner.roots),
                        1 => {
                            bench.memory.shadow_invlpg(bench.cpus.vcpu(cpu), &mut runner.roots, at)
                        }
                        2 => bench.memory.shadow_settle(bench.cpus.by(cpu)),
                        3 => bench.memory.set_shadow_limit(n >> 60, &bench.cpus),
                        _ => {}
                    }
                }
                bench.memory.shadow_release(&mut runner.roots);
            });
        }
        bench.memory.shadow().unwrap().set_calm(8);
        let mut round = 0u64;
        // Until both have run for a while between the invalidations.
        while round < 300 || seen.iter().any(|n| n.load(Ordering::Relaxed) < 500) {
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
    assert_eq!(bench.memory.shadow().unwrap().audit(), Ok(0));
}
