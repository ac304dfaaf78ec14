//! Who owns each frame: slot changes, invalidations and faults in every order, against a plain model.
//!
//! The host has pages, each with a frame. When the start of an invalidation has returned, the frames
//! of its range belong to somebody else, and no translation may name one from then on. What sleeps is
//! stopped where it sleeps: a fault while it asks the host, a slot change while it waits for such a fault. So a
//! test goes step by step through an interleaving that the kernel's scheduler would seldom choose.

extern crate std;

use alloc::vec::Vec;
use std::sync::{
    Mutex,
    mpsc::{Sender, channel},
};
use std::thread::{Scope, ScopedJoinHandle};

use host::gup::HostPage;
use host::std_port::{World, test};
use mmu::{Format, Region, RegionLimits, TableCache};
use proptest::prelude::*;
use x86::{Gfn, Gpa, Hva};

use super::super::{FaultAccess, FaultOutcome, VmMemory};
use super::{Flushes, host_page};

/// Pages of the VMM that back slots.
const PAGES: usize = 8;
/// Guest frames that slots may cover.
const FRAMES: u64 = 24;
const HVA: u64 = 0x7000_0000;

/// The host's side: the frame behind each page of the VMM. A frame that was given back is never used
/// again, so that whoever names one is wrong.
struct Host {
    frames: Mutex<([u64; PAGES], u64)>,
}

impl Host {
    fn new() -> Self {
        Self { frames: Mutex::new((core::array::from_fn(|n| 100 + n as u64), 1000)) }
    }

    fn page(&self, hva: Hva) -> HostPage {
        let frame = self.frames.lock().unwrap().0[((hva.0 - HVA) >> 12) as usize];
        host_page(Hva(frame << 12), 1)
    }

    fn give_back(&self, first: usize, count: usize) {
        let (frames, next) = &mut *self.frames.lock().unwrap();
        for frame in frames.iter_mut().skip(first).take(count) {
            *next += 1;
            *frame = *next;
        }
    }

    fn owns(&self, frame: u64) -> bool {
        self.frames.lock().unwrap().0.contains(&frame)
    }
}

struct Vm {
    memory: VmMemory,
    host: Host,
    flushes: Flushes,
    world: World,
}

/// A fault that has asked the host and does not get on.
struct Stopped<'s> {
    go: Sender<()>,
    done: ScopedJoinHandle<'s, FaultOutcome>,
}

/// A slot change that may wait for such faults.
struct Changing<'s>(ScopedJoinHandle<'s, ()>);

impl Vm {
    fn new(shadow: bool) -> Self {
        let (format, limits) = (Format::npt(4, 0), RegionLimits::default());
        let memory = if shadow {
            VmMemory::with_shadow(format, limits).unwrap()
        } else {
            VmMemory::new(format, limits).unwrap()
        };
        Self { memory, host: Host::new(), flushes: Flushes::default(), world: test::clock() }
    }

    fn access(gfn: u64) -> FaultAccess {
        FaultAccess { gpa: Gpa(gfn << 12), write: true, exec: false, present: false }
    }

    fn fault(&self, gfn: u64) -> FaultOutcome {
        let mut cache = TableCache::new();
        let access = Self::access(gfn);
        self.memory.fault(&mut cache, &access, &self.flushes, |hva, _, _| Ok(self.host.page(hva)))
    }

    /// A fault that stops where `gup` sleeps: on a userfaultfd page, if the VMM likes. `None`: it needed
    /// no page.
    fn begin_fault<'s>(&'s self, s: &'s Scope<'s, '_>, gfn: u64) -> Option<Stopped<'s>> {
        let (go, wait) = channel();
        let (asked, at) = channel();
        let done = s.spawn(move || {
            test::adopt(&self.world);
            let mut cache = TableCache::new();
            let asked = asked;
            self.memory.fault(&mut cache, &Self::access(gfn), &self.flushes, |hva, _, _| {
                let page = self.host.page(hva);
                asked.send(()).unwrap();
                let _: Result<(), _> = wait.recv();
                Ok(page)
            })
        });
        at.recv().is_ok().then_some(Stopped { go, done })
    }

    /// Slot `id` to `gpa`, or away. Returns when that is done or waits for a stopped fault.
    fn begin_change<'s>(&'s self, s: &'s Scope<'s, '_>, region: Region) -> Changing<'s> {
        let done = s.spawn(move || {
            test::adopt(&self.world);
            let _ = self.memory.set_region(&region, &self.flushes);
        });
        while !done.is_finished() && test::srcu_waiters() == 0 {
            std::thread::yield_now();
        }
        Changing(done)
    }

    fn invalidate(&self, first: usize, count: usize) {
        let start = Hva(HVA + ((first as u64) << 12));
        let end = Hva(start.0 + ((count as u64) << 12));
        self.memory.invalidate_start(start, end, true, &self.flushes);
        self.host.give_back(first, count);
        self.check("after an invalidation has begun");
        self.memory.invalidate_end(start, end);
    }

    /// No translation names a frame that was given back.
    fn check(&self, when: &str) {
        let mapper = self.memory.tdp.mapper();
        for gfn in 0..FRAMES {
            if let Some(leaf) = mapper.lookup(Gfn(gfn)) {
                assert!(self.host.owns(leaf.pfn.0), "{when}: frame {gfn:#x} is somebody else's");
            }
        }
    }
}

fn region(id: u32, gfn: u64, first: u64, pages: u64, flags: u32) -> Region {
    Region { slot: id, flags, gpa: gfn << 12, size: pages << 12, hva: HVA + (first << 12) }
}

fn finish(stopped: Stopped<'_>) -> FaultOutcome {
    let _ = stopped.go.send(());
    stopped.done.join().unwrap()
}

/// What was shown once: one slot's deletion waits for a fault on another slot, and the memory behind the
/// first is unmapped meanwhile.
fn leaves_while_its_memory_goes(gone: Region) {
    for shadow in [false, true] {
        let vm = &Vm::new(shadow);
        let (a, b) = (region(0, 0, 0, 2, 0), region(1, 4, 2, 4, 0));
        vm.memory.set_region(&a, &vm.flushes).unwrap();
        vm.memory.set_region(&b, &vm.flushes).unwrap();
        (4..8).for_each(|gfn| assert_eq!(vm.fault(gfn), FaultOutcome::Mapped));
        std::thread::scope(|s| {
            let stopped = vm.begin_fault(s, 0).unwrap();
            let change = vm.begin_change(s, gone);
            assert!(!change.0.is_finished(), "it waits for the fault");
            vm.invalidate(2, 4);
            // Neither memory nor a device, as long as it is on its way out.
            assert_eq!(vm.fault(5), FaultOutcome::Retry);
            vm.check("after a fault on the slot that leaves");
            // An invalidation ended since it asked.
            assert_eq!(finish(stopped), FaultOutcome::Retry);
            change.0.join().unwrap();
        });
        assert_eq!(vm.fault(4), FaultOutcome::Mmio);
        vm.check("at the end");
    }
}

#[test]
fn memory_that_goes_while_its_slot_is_deleted_is_not_reached() {
    leaves_while_its_memory_goes(region(1, 4, 2, 0, 0));
}

#[test]
fn memory_that_goes_while_its_slot_moves_is_not_reached() {
    leaves_while_its_memory_goes(region(1, 16, 2, 4, 0));
}

#[derive(Clone, Debug)]
enum Step {
    /// A fault of a vCPU that nothing stops.
    Fault(u64),
    BeginFault(u64),
    EndFault(usize),
    /// Slot, guest frame, first page, pages (0: it goes), flags.
    Change(u32, u64, u64, u64, u32),
    /// First page, pages.
    Invalidate(usize, usize),
    Young(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let change = (0u32..3, 0..FRAMES - 4, 0u64..5, 0u64..4, 0u32..2);
    prop_oneof![
        4 => (0..FRAMES).prop_map(Step::Fault),
        2 => (0..FRAMES).prop_map(Step::BeginFault),
        1 => (0usize..4).prop_map(Step::EndFault),
        4 => change.prop_map(|(id, gfn, page, pages, log)| Step::Change(id, gfn, page, pages, log)),
        3 => (0usize..PAGES, 1usize..5).prop_map(|(n, count)| Step::Invalidate(n, count)),
        1 => (0usize..PAGES).prop_map(Step::Young),
    ]
}

fn run(steps: &[Step], shadow: bool) {
    let vm = &Vm::new(shadow);
    std::thread::scope(|s| {
        let (mut stopped, mut changing) = (Vec::new(), None::<Changing<'_>>);
        for step in steps {
            match *step {
                Step::Fault(gfn) => _ = vm.fault(gfn),
                Step::BeginFault(gfn) if stopped.len() < 3 => {
                    stopped.extend(vm.begin_fault(s, gfn))
                }
                Step::EndFault(n) if n < stopped.len() => _ = finish(stopped.swap_remove(n)),
                Step::Change(id, gfn, page, pages, log)
                    if changing.as_ref().is_none_or(|c| c.0.is_finished()) =>
                {
                    // Of a slot that exists only place and log can change.
                    let there = vm.memory.slots().by_id(id as u16).cloned();
                    let region = match there {
                        Some(old) if pages != 0 => Region {
                            hva: old.hva.0,
                            size: old.npages << 12,
                            ..region(id, gfn, page, pages, log)
                        },
                        _ => region(id, gfn, page, pages, log),
                    };
                    changing = Some(vm.begin_change(s, region));
                }
                Step::Invalidate(first, count) => vm.invalidate(first, count.min(PAGES - first)),
                Step::Young(n) => {
                    let start = HVA + ((n as u64) << 12);
                    vm.memory.clear_young(Hva(start), Hva(start + 4096), &vm.flushes);
                }
                _ => {}
            }
            vm.check("after a step");
        }
        for fault in stopped {
            let _ = finish(fault);
        }
        if let Some(change) = changing {
            change.0.join().unwrap();
        }
    });
    vm.check("at the end");
    let slots = vm.memory.slots();
    assert!(slots.iter().all(|slot| !slot.leaving), "nothing is for ever on its way out");
    for gfn in 0..FRAMES {
        let mapped = vm.memory.tdp.mapper().lookup(Gfn(gfn)).is_some();
        assert!(!mapped || slots.find(Gfn(gfn)).is_some(), "{gfn:#x} is mapped without a slot");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_translation_outlives_the_frame_it_names(
        steps in prop::collection::vec(step(), 1..40), shadow in any::<bool>()
    ) {
        run(&steps, shadow);
    }
}
