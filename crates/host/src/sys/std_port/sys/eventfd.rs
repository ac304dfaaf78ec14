//! Eventfds, and who watches them.

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::thread::{NEXT_ID, set_irqs, step};
use crate::sys::WatchCalls;
use crate::sys::std_port::world::{Context, Event, descriptors};

pub(crate) type EventFdRaw = Event;

pub(crate) fn signal(event: &Event, count: u64) {
    let mut state = event.state.lock().unwrap_or_else(PoisonError::into_inner);
    // The kernel gives a signal to who watches and leaves the counter at 0.
    if state.watches.is_empty() {
        state.count = state.count.saturating_add(count);
        return;
    }
    // In the kernel a watch is called under the eventfd's lock, with interrupts off.
    let irqs_were_on = set_irqs(false);
    for (_, calls, context) in &state.watches {
        // SAFETY: attached; detaching takes the lock held here.
        unsafe { (calls.fired)(context.0) }
    }
    set_irqs(irqs_were_on);
}
pub(crate) fn gnt_fd_is_open(_fd: i32) -> i32 {
    super::thread::refuse_in_guest("gnt_fd_is_open");
    0
}
pub(crate) fn gnt_eventfd_get(fd: i32) -> *mut EventFdRaw {
    super::thread::refuse_in_guest("gnt_eventfd_get");
    let event = descriptors().events.get(&fd).cloned();
    event.map_or(std::ptr::null_mut(), |e| Arc::into_raw(e).cast_mut())
}
pub(crate) unsafe fn gnt_eventfd_put(e: *mut EventFdRaw) {
    super::thread::refuse_in_guest("gnt_eventfd_put");
    // SAFETY: one reference of gnt_eventfd_get is given back.
    drop(unsafe { Arc::from_raw(e.cast_const()) });
}
pub(crate) unsafe fn gnt_eventfd_signal(e: *mut EventFdRaw, count: u64) {
    super::thread::refuse_in_guest("gnt_eventfd_signal");
    step();
    // SAFETY: the reference is held.
    signal(unsafe { &*e }, count);
}

pub(crate) struct WatchRaw(Option<(Arc<Event>, u64)>);
impl WatchRaw {
    pub(crate) const fn new() -> Self {
        Self(None)
    }
}
pub(crate) unsafe fn gnt_watch_attach(
    w: *mut WatchRaw,
    fd: i32,
    expected: *const EventFdRaw,
    calls: &'static WatchCalls,
    context: *mut c_void,
) -> i32 {
    super::thread::refuse_in_guest("gnt_watch_attach");
    let found = descriptors().events.get(&fd).cloned();
    let Some(event) = found.filter(|event| Arc::as_ptr(event) == expected) else { return -9 };
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let mut state = event.state.lock().unwrap_or_else(PoisonError::into_inner);
    state.watches.push((id, calls, Context(context)));
    if state.count != 0 {
        // SAFETY: attached just now.
        unsafe { (calls.fired)(context) }
    }
    drop(state);
    // SAFETY: w is the owner's storage.
    unsafe { (*w).0 = Some((event, id)) };
    0
}
pub(crate) unsafe fn gnt_watch_detach(w: *mut WatchRaw) {
    super::thread::refuse_in_guest("gnt_watch_detach");
    // SAFETY: w is the owner's storage.
    if let Some((event, id)) = unsafe { (*w).0.take() } {
        event.state.lock().unwrap_or_else(PoisonError::into_inner).watches.retain(|x| x.0 != id);
    }
}
pub(crate) unsafe fn gnt_watch_context(w: *const WatchRaw) -> *mut EventFdRaw {
    super::thread::refuse_in_guest("gnt_watch_context");
    // SAFETY: w is the owner's storage.
    let raw = unsafe { &*w };
    raw.0.as_ref().map_or(std::ptr::null_mut(), |x| Arc::as_ptr(&x.0).cast_mut())
}
