//! What the tests of one thread share: the clock and its timers, the registered notifiers, the
//! holes in user memory, the open files and eventfds.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::clock::Snapshot;

use super::super::{DebugCalls, FileCalls, NotifierCalls, TimerFn, WatchCalls};

/// CLOCK_REALTIME minus CLOCK_MONOTONIC in tests.
pub const TEST_EPOCH_NS: u64 = 1_700_000_000_000_000_000;

/// A raw pointer that the owner of the port keeps valid for as long as it is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Context(pub(crate) *mut c_void);
// SAFETY: the contexts are values that are Sync by the bounds of their wrappers.
unsafe impl Send for Context {}

#[derive(Clone, Copy)]
pub(crate) struct Armed {
    pub(crate) at: u64,
    pub(crate) expired: TimerFn,
    pub(crate) context: Context,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) now: u64,
    /// How often the host has slept, how long in all, and what its TSC has lost by that.
    pub(crate) sleeps: u32,
    pub(crate) slept_ns: u64,
    pub(crate) tsc_lost: u64,
    /// Armed timers by id.
    pub(crate) armed: BTreeMap<u64, Armed>,
    /// Timers whose handler runs now.
    pub(crate) firing: Vec<u64>,
    pub(crate) notifiers: Vec<(u64, &'static NotifierCalls, Context)>,
    pub(crate) holes: Vec<(u64, u64)>,
    pub(crate) read_only: Vec<(u64, u64)>,
    pub(crate) kicks: Vec<usize>,
    pub(crate) log: Vec<String>,
    pub(crate) observed: u32,
    pub(crate) debug: BTreeMap<String, (&'static DebugCalls, Context)>,
    pub(crate) traced: Vec<String>,
    /// Threads with interrupts off: a number for each stretch, and the CPU.
    pub(crate) irqs_off: BTreeMap<u64, u32>,
    /// What CPUs were asked to run something on, and its argument.
    pub(crate) asked: Vec<(usize, u64)>,
    /// Frames of which a reference was given back.
    pub(crate) put: Vec<u64>,
    /// Frames that were said to be dirty.
    pub(crate) dirtied: BTreeSet<u64>,
    /// Where guests met broken memory.
    pub(crate) poisoned: Vec<u64>,
    /// Frames of memory that is a device's.
    pub(crate) devices: Vec<u64>,
    /// The host pages with five levels.
    pub(crate) five_levels: bool,
    /// Threads that wait for the readers of an SRCU domain.
    pub(crate) srcu_waiters: usize,
}

/// The surroundings of a test; see the module's description.
#[derive(Clone)]
pub struct World {
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) changed: Arc<Condvar>,
}

impl World {
    fn new() -> Self {
        let state = State { now: 1_000_000_000, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)), changed: Arc::new(Condvar::new()) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The world of this thread.
    pub fn current() -> Self {
        CURRENT.with(|w| w.borrow().clone())
    }

    pub(crate) fn enter(world: &Self) {
        CURRENT.with(|w| *w.borrow_mut() = world.clone());
    }

    /// CLOCK_MONOTONIC of this world, ns.
    pub fn now(&self) -> u64 {
        self.lock().now
    }

    /// The host sleeps for so long, and its TSC is that many ticks behind when it wakes.
    pub fn sleep(&self, ns: u64, lost: u64) {
        let mut state = self.lock();
        state.sleeps += 1;
        state.slept_ns += ns;
        state.tsc_lost += lost;
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let state = self.lock();
        Snapshot::of_test(state.now, state.slept_ns, state.tsc_lost)
    }

    /// How many timers are armed.
    pub fn armed_timers(&self) -> usize {
        self.lock().armed.len()
    }

    /// When the next timer is due.
    pub fn next_expiry(&self) -> Option<u64> {
        self.lock().armed.values().map(|a| a.at).min()
    }
}

thread_local! {
    static CURRENT: RefCell<World> = RefCell::new(World::new());
}

/// Eventfds and files are shared by all threads, as descriptors are.
#[derive(Default)]
pub(crate) struct Descriptors {
    pub(crate) next: i32,
    pub(crate) events: BTreeMap<i32, Arc<Event>>,
    pub(crate) files: BTreeMap<i32, (&'static FileCalls, Context)>,
}

#[derive(Default)]
pub(crate) struct Event {
    pub(crate) state: Mutex<EventState>,
}

#[derive(Default)]
pub(crate) struct EventState {
    pub(crate) count: u64,
    pub(crate) watches: Vec<(u64, &'static WatchCalls, Context)>,
}

pub(crate) fn descriptors() -> MutexGuard<'static, Descriptors> {
    static ALL: OnceLock<Mutex<Descriptors>> = OnceLock::new();
    let all = ALL.get_or_init(|| Mutex::new(Descriptors { next: 1000, ..Descriptors::default() }));
    all.lock().unwrap_or_else(PoisonError::into_inner)
}
