//! Sections and withdrawals under `loom`: a look at tables without a lock, beside whoever unlinks a table,
//! flushes and frees it. The functions of the mode are those that run in the kernel.

// One thread, whose stacks loom changes by itself: nothing that a sanitizer could follow.
#![cfg(not(sanitized))]

use core::sync::atomic::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};

use gannet_vm::kick::{KickState, Word};
use loom::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::*},
};
use loom::thread;

struct Modelled(AtomicU32);

impl Word for Modelled {
    fn new(value: u32) -> Self {
        Self(AtomicU32::new(value))
    }

    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.0.swap(value, order)
    }

    fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        self.0.fetch_or(bits, order)
    }
}

const CPU: u32 = 5;

/// Who looks has interrupts off, and its mode says so.
const ENTERED: u32 = 0;
/// Interrupts are off and nothing else: what `lazy_deadline` did once.
const INTERRUPTS_OFF: u32 = 1;
/// The look begins before the mode is set.
const LOOKED_BEFORE: u32 = 2;

struct Model {
    state: KickState<Modelled>,
    /// The entry that leads to the table; 0 when it is unlinked.
    entry: AtomicU32,
    freed: AtomicU32,
    /// Interrupts are off on the vCPU's CPU.
    irqs_off: AtomicU32,
}

impl Model {
    fn look<const HOW: u32>(&self) {
        self.irqs_off.store(1, SeqCst);
        let early = (HOW == LOOKED_BEFORE).then(|| self.entry.load(Acquire));
        if HOW != INTERRUPTS_OFF {
            assert!(self.state.enter(CPU));
        }
        if early.unwrap_or_else(|| self.entry.load(Acquire)) != 0 {
            assert_eq!(self.freed.load(Acquire), 0, "a table is followed that was freed");
        }
        if HOW != INTERRUPTS_OFF {
            self.state.leave();
        }
        self.irqs_off.store(0, SeqCst);
    }

    /// `WriteTree::finish` with `Vm::flush_remote`.
    fn withdraw(&self) {
        self.entry.store(0, Release);
        self.state.request(1);
        if let Some(cpu) = self.state.running_on() {
            assert_eq!(cpu, CPU);
            // The interrupt is taken when that CPU has interrupts on.
            while self.irqs_off.load(SeqCst) != 0 {
                thread::yield_now();
            }
        }
        self.freed.store(1, Release);
    }
}

fn beside_each_other<const HOW: u32>() {
    loom::model(|| {
        let model = Arc::new(Model {
            state: KickState::new(0),
            entry: AtomicU32::new(1),
            freed: AtomicU32::new(0),
            irqs_off: AtomicU32::new(0),
        });
        let vcpu = model.clone();
        let vcpu = thread::spawn(move || vcpu.look::<HOW>());
        model.withdraw();
        vcpu.join().unwrap();
    });
}

#[test]
fn nothing_is_freed_under_a_section() {
    beside_each_other::<ENTERED>();
}

#[test]
fn interrupts_that_are_off_are_not_waited_for() {
    let checked = catch_unwind(AssertUnwindSafe(beside_each_other::<INTERRUPTS_OFF>));
    assert!(checked.is_err(), "the model would not notice a look outside of a section");
}

#[test]
fn a_look_that_begins_before_the_mode_is_set_is_not_waited_for() {
    let checked = catch_unwind(AssertUnwindSafe(beside_each_other::<LOOKED_BEFORE>));
    assert!(checked.is_err(), "the model would not notice a look that begins too early");
}
