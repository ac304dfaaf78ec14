//! Timers, on a clock that a test moves.

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::lock::nap;
use super::thread::{NEXT_ID, set_irqs};
use crate::sys::TimerFn;
use crate::sys::std_port::world::{Armed, Context, World};

#[derive(Default)]
struct TimerState {
    id: u64,
    context: Option<(TimerFn, Context)>,
    /// The world on whose clock the timer was last started.
    world: Option<World>,
}
pub(crate) struct TimerRaw(Mutex<TimerState>);
impl TimerRaw {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(TimerState { id: 0, context: None, world: None }))
    }
    fn state(&self) -> MutexGuard<'_, TimerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
pub(crate) unsafe fn gnt_timer_init(t: *mut TimerRaw, expired: TimerFn, context: *mut c_void) {
    super::thread::refuse_in_guest("gnt_timer_init");
    // SAFETY: t lives by the contract.
    let mut state = unsafe { &*t }.state();
    state.id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    state.context = Some((expired, Context(context)));
}
pub(crate) unsafe fn gnt_timer_start(t: *mut TimerRaw, at: u64) {
    super::thread::refuse_in_guest("gnt_timer_start");
    // SAFETY: t lives by the contract.
    let mut state = unsafe { &*t }.state();
    let Some((expired, context)) = state.context else { return };
    // It may be on the clock of another world, where a test has moved it.
    if let Some(old) = state.world.take() {
        old.lock().armed.remove(&state.id);
    }
    let world = World::current();
    world.lock().armed.insert(state.id, Armed { at, expired, context });
    state.world = Some(world);
}
pub(crate) unsafe fn gnt_timer_try_cancel(t: *mut TimerRaw) -> i32 {
    super::thread::refuse_in_guest("gnt_timer_try_cancel");
    // SAFETY: t lives by the contract.
    let state = unsafe { &*t }.state();
    let Some(world) = &state.world else { return 0 };
    let mut inside = world.lock();
    // A handler that runs cannot be cancelled; who waits for its end asks again.
    if inside.firing.contains(&state.id) {
        return -1;
    }
    inside.armed.remove(&state.id).is_some().into()
}
pub(crate) unsafe fn gnt_timer_cancel(t: *mut TimerRaw) -> i32 {
    super::thread::refuse_in_guest("gnt_timer_cancel");
    loop {
        // SAFETY: t lives by the contract.
        match unsafe { gnt_timer_try_cancel(t) } {
            -1 => nap(),
            armed => return armed,
        }
    }
}

impl World {
    /// Lets `ns` pass: timers that come due fire in order, each at its own time, on this thread
    /// and with interrupts off.
    pub fn advance(&self, ns: u64) {
        let until = self.now().saturating_add(ns);
        loop {
            let mut state = self.lock();
            let due = state.armed.iter().map(|(id, a)| (a.at, *id)).min();
            let Some((at, id)) = due.filter(|(at, _)| *at <= until) else {
                state.now = state.now.max(until);
                return;
            };
            let Some(armed) = state.armed.remove(&id) else { continue };
            state.now = state.now.max(at);
            state.firing.push(id);
            drop(state);
            // As the kernel calls it: a handler that would sleep is found.
            let irqs_were_on = set_irqs(false);
            // SAFETY: cancel waits for `firing`, and the owner cancels before it goes.
            let again = unsafe { (armed.expired)(armed.context.0) };
            set_irqs(irqs_were_on);
            let mut state = self.lock();
            // From here on a cancel need not wait.
            state.firing.retain(|f| *f != id);
            if again != 0 {
                state.armed.insert(id, Armed { at: again, ..armed });
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Lets time pass up to the next armed timer and fires it. Returns whether there was one.
    pub fn advance_to_next_timer(&self) -> bool {
        let (now, next) = {
            let state = self.lock();
            (state.now, state.armed.values().map(|a| a.at).min())
        };
        let Some(at) = next else { return false };
        self.advance(at.saturating_sub(now));
        true
    }
}
