//! The kick protocol under `loom`: every interleaving that the memory model allows of a vCPU that
//! enters the guest and senders that make events pending. The functions checked are those that run
//! in the kernel; only their words are loom's.

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

/// A word of loom's. `RMW = false` is the failing twin: its exchange is a load and a store.
struct Modelled<const RMW: bool>(AtomicU32);

impl<const RMW: bool> Word for Modelled<RMW> {
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
        if RMW {
            return self.0.swap(value, order);
        }
        let old = self.0.load(Acquire);
        self.0.store(value, Release);
        old
    }

    fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        self.0.fetch_or(bits, order)
    }
}

/// One vCPU and the interrupt line of the CPU it runs on.
struct Model<const RMW: bool> {
    state: KickState<Modelled<RMW>>,
    /// An IPI waits to be taken.
    ipi: AtomicU32,
    /// Events that are no requests, like an interrupt in the IRR: one bit each.
    events: AtomicU32,
}

/// The vCPU's CPU.
const CPU: u32 = 5;

impl<const RMW: bool> Model<RMW> {
    fn new() -> Arc<Self> {
        let (ipi, events) = (AtomicU32::new(0), AtomicU32::new(0));
        Arc::new(Self { state: KickState::new(0), ipi, events })
    }

    fn interrupt(&self, cpu: Option<u32>) {
        if let Some(cpu) = cpu {
            assert_eq!(cpu, CPU, "the IPI goes where the vCPU is");
            self.ipi.swap(1, AcqRel);
        }
    }

    fn send_event(&self, bit: u32) {
        self.events.fetch_or(bit, Release);
        self.interrupt(self.state.kick());
    }

    fn send_request(&self, bit: u32) {
        self.state.request(bit);
        self.interrupt(self.state.kick());
    }

    /// Runs the vCPU until it is in the guest and no IPI has come; returns what it has seen.
    fn run(&self) -> u32 {
        let mut seen = 0;
        loop {
            assert!(self.state.enter(CPU));
            let events = self.events.load(Acquire) & !seen;
            let looked = self.state.take_requests() | events;
            seen |= looked;
            // In the guest an IPI ends the run; what it was sent for is looked at before the next.
            if looked == 0 && self.ipi.swap(0, AcqRel) == 0 {
                return seen;
            }
            self.state.leave();
        }
    }

    /// The vCPU stays in the guest: everything was seen, or an IPI is about to end its run.
    fn check(&self, seen: u32, sent: u32) {
        let pending = self.ipi.load(Acquire) != 0;
        assert!(seen == sent || pending, "lost: {:#x} of {sent:#x}", sent & !seen);
    }
}

/// Every interleaving with at most this many preemptions: seconds instead of minutes, and the
/// failing twin fails with fewer.
const PREEMPTIONS: usize = 4;

fn two_senders<const RMW: bool>() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(|| {
        let model = Model::<RMW>::new();
        let (a, b) = (model.clone(), model.clone());
        let a = thread::spawn(move || a.send_event(1));
        let b = thread::spawn(move || b.send_request(2));
        let seen = model.run();
        a.join().unwrap();
        b.join().unwrap();
        model.check(seen, 3);
    });
}

#[test]
fn whatever_two_senders_make_pending_is_seen_or_ends_the_guests_run() {
    two_senders::<true>();
}

#[test]
fn without_the_exchange_of_the_mode_something_is_lost() {
    let checked = catch_unwind(AssertUnwindSafe(two_senders::<false>));
    assert!(checked.is_err(), "the model would not notice a lost wake-up");
}

/// `request_all_and_wait`: the sender waits for the CPU it is told, or the vCPU has the request.
#[test]
fn who_waits_for_the_named_cpu_has_waited_for_the_guest() {
    loom::model(|| {
        let model = Model::<true>::new();
        let vcpu = model.clone();
        let vcpu = thread::spawn(move || {
            assert!(vcpu.state.enter(CPU));
            // The guest runs now, unless the request was seen.
            !vcpu.state.has_requests()
        });
        model.state.request(1);
        let named = model.state.running_on();
        let runs_unaware = vcpu.join().unwrap();
        assert!(!runs_unaware || named == Some(CPU));
    });
}

/// A vCPU that makes something pending for itself while it is in the guest's mode, beside a sender. `LOOKS`: it asks
/// afterwards whether it was kicked, and leaves.
fn kicks_itself<const LOOKS: bool>() {
    loom::model(|| {
        let model = Model::<true>::new();
        let sender = model.clone();
        assert!(model.state.enter(CPU));
        let sender = thread::spawn(move || sender.send_event(2));
        model.events.fetch_or(1, Release);
        // To its own CPU no IPI is sent.
        let _ = model.state.kick();
        let seen = if LOOKS && model.state.is_kicked() {
            model.state.leave();
            model.run()
        } else {
            // It has seen its own, and is in the guest again.
            1
        };
        sender.join().unwrap();
        model.check(seen, 3);
    });
}

#[test]
fn a_vcpu_that_kicks_itself_and_leaves_hears_of_others() {
    kicks_itself::<true>();
}

#[test]
fn a_vcpu_that_kicks_itself_and_stays_loses_what_others_send() {
    assert!(catch_unwind(AssertUnwindSafe(kicks_itself::<false>)).is_err());
}
