//! What the port keeps of each thread: whether its interrupts are on, its CPU, its signals.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::std_port::world::World;

thread_local! {
    /// Steps since this thread's interrupts went off, and the most that there ever were.
    pub(crate) static STEPS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    pub(crate) static SIGNAL: Cell<bool> = const { Cell::new(false) };
    pub(crate) static RESCHED: Cell<bool> = const { Cell::new(false) };
    pub(crate) static CPU: Cell<u32> = const { Cell::new(0) };
    pub(crate) static LDT: Cell<bool> = const { Cell::new(false) };
    pub(crate) static GUEST_SSBD: Cell<u32> = const { Cell::new(0) };
    pub(crate) static USER_RETURN: Cell<Option<u32>> = const { Cell::new(Some(0)) };
    pub(crate) static RUN_DELAY: Cell<u64> = const { Cell::new(0) };
    pub(super) static IRQS_ON: Cell<bool> = const { Cell::new(true) };
    /// The number of this thread's stretch with interrupts off.
    pub(super) static IRQS_OFF_AS: Cell<u64> = const { Cell::new(0) };
    /// The kernel takes the thread for its guest: RCU does not watch, and per-CPU data may be the guest's.
    pub(crate) static IN_GUEST: Cell<bool> = const { Cell::new(false) };
    pub(super) static PREEMPT_OFF: Cell<u32> = const { Cell::new(0) };
}

/// The next number for whatever wants one of its own.
pub(super) static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Turns interrupts on or off for this thread: one that has them off holds up who waits for its CPU, as
/// [`gnt_sync_end`] does.
pub(crate) fn set_irqs(on: bool) -> bool {
    // The longest stretch stays; only the running count begins anew.
    if on {
        STEPS.set((0, STEPS.get().1));
    }
    let were_on = IRQS_ON.replace(on);
    if were_on != on {
        let world = World::current();
        let mut state = world.lock();
        if on {
            state.irqs_off.remove(&IRQS_OFF_AS.take());
        } else {
            // A number for each stretch, so that a wait ends with this one and not with a later.
            let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
            IRQS_OFF_AS.set(id);
            state.irqs_off.insert(id, CPU.get());
        }
    }
    were_on
}

/// Refuses what the kernel cannot do meanwhile: nearly all. A CPU's number, clocks, facts and the kernel's words that a world
/// switch reads are asked of what is no per-CPU data.
pub(crate) fn refuse_in_guest(what: &str) {
    // A test that has failed there gives back what it holds.
    let allowed = !IN_GUEST.get() || std::thread::panicking();
    assert!(allowed, "{what} while the guest runs, outside of guest_paused");
}

pub(crate) fn might_sleep() {
    let atomic = !IRQS_ON.get() || PREEMPT_OFF.get() != 0;
    // A panic on the way out must not hide the first.
    assert!(!atomic || std::thread::panicking(), "sleeps in atomic context");
}

/// One step of [`crate::steps`], a lock or a signal; it counts while interrupts are off.
pub(crate) fn step() {
    if !IRQS_ON.get() {
        let (now, most) = STEPS.get();
        STEPS.set((now + 1, most.max(now + 1)));
    }
}

pub(crate) fn irq_window() {
    assert!(!IRQS_ON.get(), "a window is opened where interrupts are off");
}
pub(crate) fn irq_disable() {
    assert!(set_irqs(false), "interrupts are turned off twice");
}
pub(crate) fn irq_enable() {
    set_irqs(true);
}
pub(crate) fn irq_enabled() -> bool {
    IRQS_ON.get()
}
