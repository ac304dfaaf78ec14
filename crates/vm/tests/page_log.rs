//! The dirty log where the CPU itself logs the pages that it makes dirty: such a CPU, as far as a test
//! has it write.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gannet_vm::memory::{DirtyLogError, FaultAccess, FaultOutcome, VmMemory};
use host::gup::fault_in;
use host::page::Pages;
use mmu::{EptSupport, FlushRemote, Format, Region, RegionLimits, TableCache};
use proptest::prelude::*;
use x86::Gpa;

/// A CPU in the guest: dirty translations that it remembers, and its log.
#[derive(Default)]
struct Cpu {
    root: u64,
    logging: bool,
    tlb: BTreeSet<u64>,
    log: Vec<u64>,
}

impl Cpu {
    /// The word that maps `gfn`, if any.
    fn word(&self, gfn: u64) -> Option<&'static AtomicU64> {
        let mut table = self.root;
        for level in (1..=4).rev() {
            let at = table + (gfn >> (9 * (level - 1)) & 511) * 8;
            // SAFETY: a table of the tree, which nobody changes meanwhile.
            let word = unsafe { &*(at as *const AtomicU64) };
            let entry = word.load(Ordering::Relaxed);
            if entry & 7 == 0 {
                return None;
            }
            if level == 1 || entry & 1 << 7 != 0 {
                return Some(word);
            }
            table = entry & 0x000f_ffff_ffff_f000;
        }
        None
    }

    /// Whether a write goes through.
    fn write(&mut self, gfn: u64) -> bool {
        if self.tlb.contains(&gfn) {
            return true;
        }
        let Some(word) = self.word(gfn) else { return false };
        if word.load(Ordering::Relaxed) & 2 == 0 {
            return false;
        }
        // Read, write; accessed, dirty.
        if word.fetch_or(3 << 8, Ordering::Relaxed) & 1 << 9 == 0 && self.logging {
            self.log.push(gfn);
        }
        self.tlb.insert(gfn);
        true
    }
}

/// What was asked of the vCPUs, and one of them.
#[derive(Default)]
struct Calls {
    cpu: Mutex<Cpu>,
    /// Writes that the guest makes while the log is asked for: after it has left once, and before
    /// the flush. Those that would fault wait.
    late: Mutex<[Vec<u64>; 2]>,
    written: Mutex<BTreeSet<u64>>,
    flushes: AtomicU64,
    on: AtomicBool,
    turned: AtomicU64,
    gathered: AtomicU64,
}

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Calls {
    fn flush_remote(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.write_late(1);
        self.cpu.lock().unwrap().tlb.clear();
    }

    fn log_pages(&self, on: bool) {
        assert_ne!(self.on.swap(on, Ordering::Relaxed), on);
        self.cpu.lock().unwrap().logging = on;
        self.turned.fetch_add(1, Ordering::Relaxed);
    }

    fn gather_log(&self) {
        self.gathered.fetch_add(1, Ordering::Relaxed);
        self.write_late(0);
    }
}

impl Calls {
    fn write_late(&self, when: usize) {
        let mut cpu = self.cpu.lock().unwrap();
        for gfn in self.late.lock().unwrap()[when].drain(..) {
            if cpu.write(gfn) {
                self.written.lock().unwrap().insert(gfn);
            }
        }
    }
}

const LOG: u32 = 1;

/// The CPU, and memory with one slot: 128 pages at guest frame 16, in the slot number 3.
struct Machine {
    user: Pages,
    memory: VmMemory,
    calls: Calls,
    cache: TableCache,
}

const LOGGING: Format = Format::ept(EptSupport {
    pages_2m: true,
    pages_1g: true,
    accessed_dirty: true,
    page_log: true,
});

impl Machine {
    fn new(flags: u32) -> Self {
        Self::of(LOGGING, flags)
    }

    fn of(format: Format, flags: u32) -> Self {
        let machine = Self {
            user: Pages::zeroed(7).unwrap(),
            memory: VmMemory::new(format, RegionLimits::default()).unwrap(),
            calls: Calls::default(),
            cache: TableCache::new(),
        };
        machine.calls.cpu.lock().unwrap().root = machine.memory.tdp_root().0;
        machine.set(machine.region(flags));
        machine
    }

    fn region(&self, flags: u32) -> Region {
        Region { slot: 3, flags, gpa: 16 << 12, size: 128 << 12, hva: self.user.hpa().0 }
    }

    fn set(&self, region: Region) {
        self.memory.set_region(&region, &self.calls).unwrap();
    }

    fn fault(&mut self, gfn: u64, write: bool) {
        let present = self.calls.cpu.lock().unwrap().word(gfn).is_some();
        let access = FaultAccess { gpa: Gpa(gfn << 12 | 8), write, exec: false, present };
        let outcome = self.memory.fault(&mut self.cache, &access, &self.calls, fault_in);
        assert_eq!(outcome, FaultOutcome::Mapped);
    }

    fn log_bits(&self) -> u64 {
        self.memory.dirty_log(3, true, &self.calls, |words| Ok(words[0])).unwrap()
    }

    fn take_flushes(&self) -> u64 {
        self.calls.flushes.swap(0, Ordering::Relaxed)
    }

    /// The guest writes to a page, by faults until it can. How many.
    fn write(&mut self, gfn: u64) -> u32 {
        for faults in 0..4 {
            if self.calls.cpu.lock().unwrap().write(gfn) {
                self.calls.written.lock().unwrap().insert(gfn);
                return faults;
            }
            self.fault(gfn, true);
        }
        panic!("frame {gfn} stays read-only");
    }

    fn logged(&self) -> Vec<u64> {
        self.calls.cpu.lock().unwrap().log.clone()
    }

    /// The vCPU leaves the guest.
    fn leave(&mut self) {
        let log = std::mem::take(&mut self.calls.cpu.lock().unwrap().log);
        log.into_iter().for_each(|gfn| self.memory.note_logged(Gpa(gfn << 12)));
    }

    fn dirty(&mut self) -> u64 {
        self.leave();
        self.log_bits()
    }
}

#[test]
fn where_the_cpu_logs_writes_are_told_without_a_fault() {
    let mut cpu = Machine::new(0);
    assert_eq!((cpu.write(17), cpu.write(17), cpu.write(18)), (1, 0, 1));
    assert!(cpu.logged().is_empty());
    cpu.set(cpu.region(LOG));
    assert_eq!(cpu.take_flushes(), 1, "dirty pages became clean");
    assert_eq!(cpu.dirty(), 0);
    assert_eq!((cpu.write(17), cpu.write(18), cpu.write(17)), (0, 0, 0));
    assert_eq!((cpu.dirty(), cpu.take_flushes()), (0b110, 1));
    assert_eq!((cpu.dirty(), cpu.take_flushes()), (0, 0));
    assert_eq!(cpu.write(18), 0);
    assert_eq!(cpu.dirty(), 0b100);
    // A page that was only read is writable, counts as written, and its first write is logged.
    cpu.fault(30, false);
    assert_eq!(cpu.dirty(), 1 << 14);
    assert_eq!(cpu.write(30), 0);
    assert_eq!(cpu.dirty(), 1 << 14);
    // A first write tells by its fault, and once.
    assert_eq!(cpu.write(31), 1);
    assert_eq!((cpu.dirty(), cpu.dirty()), (1 << 15, 0));
}

#[test]
fn a_page_logged_before_and_written_after_the_bits_were_taken_is_told_again() {
    let mut cpu = Machine::new(LOG);
    cpu.write(20);
    cpu.dirty();
    cpu.write(20);
    // Taken while the CPU still has it in its log.
    assert_eq!(cpu.log_bits(), 0);
    assert_eq!(cpu.write(20), 0);
    assert_eq!(cpu.dirty(), 1 << 4);
    assert_eq!(cpu.dirty(), 0);
    cpu.write(20);
    assert_eq!(cpu.dirty(), 1 << 4);
}

#[test]
fn logging_is_on_while_a_slot_logs_and_asked_for_once() {
    let mut cpu = Machine::new(0);
    let turned = |cpu: &Machine| {
        let calls = &cpu.calls;
        (calls.turned.load(Ordering::Relaxed), calls.on.load(Ordering::Relaxed))
    };
    assert_eq!(turned(&cpu), (0, false));
    let other = Pages::zeroed(0).unwrap();
    let other = |flags, size| Region { slot: 4, flags, gpa: 1 << 30, size, hva: other.hpa().0 };
    cpu.set(other(LOG, 4096));
    assert_eq!(turned(&cpu), (1, true));
    cpu.set(cpu.region(LOG));
    cpu.set(other(LOG, 4096));
    cpu.set(other(LOG, 0));
    assert_eq!(turned(&cpu), (1, true));
    cpu.write(20);
    cpu.set(cpu.region(0));
    assert_eq!(turned(&cpu), (2, false));
    // What was logged for a slot that logs no more is forgotten.
    cpu.leave();
    let log = cpu.memory.dirty_log(3, true, &cpu.calls, |_| Ok(()));
    assert_eq!(log, Err(DirtyLogError::NoLog));
}

#[test]
fn a_dirty_log_makes_the_cpus_hand_over_what_they_logged() {
    let cpu = Machine::new(LOG);
    let gathered = || cpu.calls.gathered.load(Ordering::Relaxed);
    let (memory, flushes) = (&cpu.memory, &cpu.calls);
    memory.dirty_log(3, true, flushes, |_| Ok(())).unwrap();
    assert_eq!(gathered(), 1);
    memory.dirty_log(3, false, flushes, |_| Ok(())).unwrap();
    memory
        .clear_dirty_log(3, 0, 64, flushes, |mask| {
            mask[0] = 0;
            Ok(())
        })
        .unwrap();
    assert_eq!(gathered(), 3);
    assert!(memory.dirty_log(9, true, flushes, |_| Ok(())).is_err());
    assert_eq!(gathered(), 3);
    let amd = Machine::of(Format::npt(4, 0), LOG);
    amd.log_bits();
    assert_eq!(amd.calls.gathered.load(Ordering::Relaxed), 0);
    assert_eq!(amd.calls.turned.load(Ordering::Relaxed), 0);
}

#[test]
fn a_page_that_the_cpu_logs_outside_every_slot_is_nothing() {
    let cpu = Machine::new(LOG);
    for gpa in [0, 15 << 12, 144 << 12, !0xfff] {
        cpu.memory.note_logged(Gpa(gpa));
    }
    assert_eq!(cpu.log_bits(), 0);
}

#[test]
fn clearing_part_of_the_log_watches_that_part_alone() {
    let mut cpu = Machine::new(LOG);
    (16..24).for_each(|gfn| _ = cpu.write(gfn));
    cpu.leave();
    cpu.memory
        .clear_dirty_log(3, 0, 64, &cpu.calls, |mask| {
            mask[0] = 0b11;
            Ok(())
        })
        .unwrap();
    let peek =
        |cpu: &Machine| cpu.memory.dirty_log(3, false, &cpu.calls, |words| Ok(words[0])).unwrap();
    assert_eq!(peek(&cpu), 0b1111_1100);
    (16..24).for_each(|gfn| _ = cpu.write(gfn));
    assert_eq!(cpu.logged(), [16, 17]);
    cpu.leave();
    assert_eq!(peek(&cpu), 0b1111_1111);
}

/// One flush is for all words of the bitmap, whichever of them had a bit.
#[test]
fn a_page_of_any_word_is_flushed_for() {
    let bits = |cpu: &mut Machine| {
        cpu.leave();
        cpu.memory.dirty_log(3, true, &cpu.calls, |words| Ok([words[0], words[1]])).unwrap()
    };
    for (format, again) in [(LOGGING, 0), (Format::npt(4, 0), 1)] {
        for (gfn, told) in [(20, [1 << 4, 0]), (20 + 64, [0, 1 << 4])] {
            let mut cpu = Machine::of(format, LOG);
            cpu.write(gfn);
            assert_eq!((bits(&mut cpu), cpu.take_flushes()), (told, 1));
            // By a CPU that has forgotten its translation: the write is seen.
            assert_eq!((cpu.write(gfn), bits(&mut cpu)), (again, told));
            cpu.write(gfn);
            cpu.take_flushes();
            cpu.leave();
            let all = |mask: &mut [u64]| {
                mask.fill(u64::MAX);
                Ok(())
            };
            cpu.memory.clear_dirty_log(3, 0, 128, &cpu.calls, all).unwrap();
            assert_eq!(cpu.take_flushes(), 1);
            assert_eq!((cpu.write(gfn), bits(&mut cpu)), (again, told));
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(u64),
    Read(u64),
    Leave,
    /// The log is asked for, and what the guest writes meanwhile.
    Take(Vec<u64>, Vec<u64>),
    /// Part of it is cleared (manual protection).
    Clear(u64, Vec<u64>, Vec<u64>),
    Log(bool),
}

fn op() -> impl Strategy<Value = Op> {
    let gfn = || 16u64..32;
    let some = move || prop::collection::vec(gfn(), 0..4);
    prop_oneof![
        6 => gfn().prop_map(Op::Write),
        1 => gfn().prop_map(Op::Read),
        1 => Just(Op::Leave),
        2 => (some(), some()).prop_map(|(a, b)| Op::Take(a, b)),
        2 => (any::<u64>(), some(), some()).prop_map(|(mask, a, b)| Op::Clear(mask, a, b)),
        1 => any::<bool>().prop_map(Op::Log),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// A page written before the log is asked for is in the answer; one written meanwhile is in it
    /// or in the next. `Log` begins anew: what was written before does not count.
    #[test]
    fn no_write_is_lost(
        format in prop_oneof![
            Just(LOGGING),
            Just(Format::npt(4, 0)),
            Just(Format::ept(EptSupport { accessed_dirty: true, ..EptSupport::default() })),
        ],
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut cpu = Machine::of(format, LOG);
        let mut on = true;
        let take = |cpu: &Machine| std::mem::take(&mut *cpu.calls.written.lock().unwrap());
        let put = |cpu: &Machine, left| cpu.calls.written.lock().unwrap().extend::<BTreeSet<u64>>(left);
        for op in ops {
            match op {
                Op::Write(gfn) => _ = cpu.write(gfn),
                Op::Read(gfn) => cpu.fault(gfn, false),
                Op::Leave => cpu.leave(),
                Op::Take(..) | Op::Clear(..) if !on => {}
                Op::Take(a, b) => {
                    cpu.leave();
                    let before = take(&cpu);
                    *cpu.calls.late.lock().unwrap() = [a, b];
                    let bits = cpu.log_bits();
                    *cpu.calls.late.lock().unwrap() = Default::default();
                    for gfn in before {
                        prop_assert!(bits >> (gfn - 16) & 1 != 0, "{gfn} is missing in {bits:#x}");
                    }
                    let late = take(&cpu);
                    put(&cpu, late.into_iter().filter(|g| bits >> (g - 16) & 1 == 0).collect());
                }
                Op::Clear(mask, a, b) => {
                    // As a VMM does: look, then clear what it saw, then read those pages.
                    cpu.leave();
                    let before = take(&cpu);
                    let seen = cpu.memory.dirty_log(3, false, &cpu.calls, |words| Ok(words[0])).unwrap();
                    for gfn in &before {
                        prop_assert!(seen >> (gfn - 16) & 1 != 0, "{gfn} is missing in {seen:#x}");
                    }
                    let mask = mask & seen;
                    *cpu.calls.late.lock().unwrap() = [a, b];
                    let read = |to: &mut [u64]| { to[0] = mask; Ok(()) };
                    cpu.memory.clear_dirty_log(3, 0, 64, &cpu.calls, read).unwrap();
                    *cpu.calls.late.lock().unwrap() = Default::default();
                    let late = take(&cpu);
                    let rest = before.into_iter().chain(late);
                    put(&cpu, rest.filter(|g| mask >> (g - 16) & 1 == 0).collect());
                }
                Op::Log(now) => {
                    cpu.set(cpu.region(if now { LOG } else { 0 }));
                    if now != on {
                        take(&cpu);
                    }
                    on = now;
                }
            }
        }
        if on {
            cpu.leave();
            let bits = cpu.log_bits();
            for gfn in take(&cpu) {
                prop_assert!(bits >> (gfn - 16) & 1 != 0, "{gfn} is missing in {bits:#x}");
            }
        }
    }
}
