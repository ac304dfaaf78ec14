//! A fault that maps a page of the host's beside the MMU notifier, which takes it away.

use gannet_models::{
    atomic::{AtomicU32, Ordering::*},
    explore, fails_with,
    under_way::{Ended, Invalidations},
};
use loom::{
    sync::{Arc, RwLock},
    thread,
};
use x86::Hva;

const PAGE: (Hva, Hva) = (Hva(0x5000), Hva(0x6000));
/// Beside the page: what one range that stands for all covers, too.
const OTHER: (Hva, Hva) = (Hva(0x9000), Hva(0xa000));

#[derive(Default)]
struct Model {
    /// The MMU lock.
    lock: RwLock<Invalidations>,
    ended: Ended,
    /// The host has a frame there.
    frame: AtomicU32,
    /// The tree has it.
    mapped: AtomicU32,
}

/// What a fault asks before it maps.
type Refusal = fn(&Invalidations, &Ended, u64) -> bool;

fn as_written(running: &Invalidations, ended: &Ended, seen: u64) -> bool {
    running.refuse(PAGE.0, PAGE.1, ended, seen)
}

impl Model {
    /// `VmMemory::fault` and `install`.
    fn fault(&self, refuses: Refusal) {
        let seen = self.ended.now();
        self.look_and_map(|running| refuses(running, &self.ended, seen));
    }

    fn look_and_map(&self, refuses: impl FnOnce(&Invalidations) -> bool) {
        if self.frame.load(Acquire) == 0 {
            return;
        }
        let running = self.lock.read().unwrap();
        if !refuses(&running) {
            self.mapped.store(1, Release);
        }
    }

    /// `VmMemory::invalidate_start`, the host's change, `VmMemory::invalidate_end`.
    fn invalidate(&self, (start, end): (Hva, Hva)) {
        self.lock.write().unwrap().begin(start, end);
        if start == PAGE.0 {
            self.withdraw();
            self.frame.store(0, Release);
            assert_eq!(self.mapped.load(Acquire), 0, "reached: a page that was taken back");
        }
        self.lock.write().unwrap().finish(&self.ended);
    }

    fn withdraw(&self) {
        let _lock = self.lock.write().unwrap();
        self.mapped.store(0, Release);
    }
}

/// The host takes the page back, by `invalidate`, and a second invalidation runs beside it.
fn beside_the_host(fault: impl Fn(&Model) + Clone + Send + Sync + 'static, invalidate: fn(&Model)) {
    explore(3, move || {
        let model = Arc::new(Model::default());
        model.frame.store(1, Relaxed);
        let (a, b) = (model.clone(), model.clone());
        let fault = fault.clone();
        let fault = thread::spawn(move || fault(&a));
        let host = thread::spawn(move || invalidate(&b));
        model.invalidate(OTHER);
        fault.join().unwrap();
        host.join().unwrap();
        assert_eq!(model.mapped.load(Acquire), 0, "reached: a page that was taken back");
    });
}

#[test]
fn a_page_that_is_taken_back_is_not_mapped_by_a_fault_beside_it() {
    beside_the_host(|model| model.fault(as_written), |model| model.invalidate(PAGE));
}

fn fails(fault: impl Fn(&Model) + Clone + Send + Sync + 'static, invalidate: fn(&Model)) -> bool {
    fails_with("reached", || beside_the_host(fault, invalidate))
}

#[test]
fn a_fault_that_asks_for_the_range_alone_or_for_the_count_alone_is_found_out() {
    let range: Refusal = |running, _, _| running.touch(PAGE.0, PAGE.1);
    let count: Refusal = |_, ended, seen| ended.now() != seen;
    assert!(fails(move |model| model.fault(range), |model| model.invalidate(PAGE)));
    assert!(fails(move |model| model.fault(count), |model| model.invalidate(PAGE)));
}

#[test]
fn a_count_that_is_noted_after_the_look_is_found_out() {
    assert!(fails(
        |model| {
            model.look_and_map(|running| as_written(running, &model.ended, model.ended.now()));
        },
        |model| model.invalidate(PAGE),
    ));
}

#[test]
fn a_host_that_withdraws_before_it_refuses_is_found_out() {
    assert!(fails(
        |model| model.fault(as_written),
        |model| {
            model.withdraw();
            model.lock.write().unwrap().begin(PAGE.0, PAGE.1);
            model.frame.store(0, Release);
            model.lock.write().unwrap().finish(&model.ended);
        },
    ));
}
