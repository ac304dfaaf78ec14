//! A memslot that leaves, under `loom`: beside a fault on it and beside the host that takes its memory back.
//! The order of the steps is that of `mmu::slots::leave_in_order`, which the kernel runs.

// One thread, whose stacks loom changes by itself: nothing that a sanitizer could follow.
#![cfg(not(sanitized))]

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::sync::{
    Arc, Mutex,
    atomic::{AtomicU32, Ordering::*},
};
use loom::thread;
use mmu::slots::leave_in_order;

/// The published table says of the slot that it is there, on its way out, or gone.
const THERE: u32 = 0;
const LEAVING: u32 = 1;
const GONE: u32 = 2;

/// What the MMU lock protects.
#[derive(Default)]
struct Mmu {
    /// A translation of the slot's page.
    mapped: bool,
    invalidating: bool,
    ended: u32,
}

/// Exchanges stand for the full barriers of SRCU, which `loom` has none of.
struct Model {
    published: AtomicU32,
    /// A fault is in its read section.
    reading: AtomicU32,
    mmu: Mutex<Mmu>,
}

impl Model {
    fn fault(&self) {
        self.reading.swap(1, AcqRel);
        if self.published.fetch_or(0, AcqRel) == THERE {
            let ended = self.mmu.lock().unwrap().ended;
            // The host is asked here, which may sleep.
            thread::yield_now();
            let mut mmu = self.mmu.lock().unwrap();
            if !mmu.invalidating && mmu.ended == ended {
                mmu.mapped = true;
            }
        }
        self.reading.swap(0, AcqRel);
    }

    /// The host takes the page behind the slot, which is its own again when the start has returned.
    fn invalidate(&self) {
        self.mmu.lock().unwrap().invalidating = true;
        if self.published.load(Acquire) != GONE {
            self.mmu.lock().unwrap().mapped = false;
        }
        let taken = self.mmu.lock().unwrap().mapped;
        assert!(!taken, "the guest reaches a page that was taken back");
        let mut mmu = self.mmu.lock().unwrap();
        mmu.ended += 1;
        mmu.invalidating = false;
    }

    fn publish(&self, table: u32) {
        self.published.swap(table, AcqRel);
        while self.reading.fetch_or(0, AcqRel) != 0 {
            thread::yield_now();
        }
    }

    fn withdraw(&self) {
        self.mmu.lock().unwrap().mapped = false;
    }
}

fn all_at_once(leave: fn(&Model)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let model = Arc::new(Model {
            published: AtomicU32::new(THERE),
            reading: AtomicU32::new(0),
            mmu: Mutex::new(Mmu { mapped: true, ..Mmu::default() }),
        });
        let (a, b) = (model.clone(), model.clone());
        let fault = thread::spawn(move || a.fault());
        let host = thread::spawn(move || b.invalidate());
        leave(&model);
        fault.join().unwrap();
        host.join().unwrap();
        assert!(!model.mmu.lock().unwrap().mapped, "mapped without a slot");
    });
}

#[test]
fn memory_that_is_taken_back_while_its_slot_leaves_is_not_reached() {
    all_at_once(|model| {
        leave_in_order(LEAVING, GONE, |table| model.publish(table), || model.withdraw());
    });
}

fn fails(leave: fn(&Model)) -> bool {
    catch_unwind(AssertUnwindSafe(|| all_at_once(leave))).is_err()
}

#[test]
fn a_slot_that_is_gone_before_its_translations_are_is_found_out() {
    // As it was up to 0.4.0.
    assert!(fails(|model| {
        model.publish(GONE);
        model.withdraw();
    }));
}

#[test]
fn a_slot_whose_translations_go_before_anybody_knows_is_found_out() {
    assert!(fails(|model| {
        model.withdraw();
        model.publish(GONE);
    }));
}
