//! Frames of user memory, and who hears that its mapping changes.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use x86::Direction;

use super::memory::user_ok;
use super::thread::{NEXT_ID, SIGNAL};
use crate::gup::RawHostPage;
use crate::sys::NotifierCalls;
use crate::sys::std_port::world::{Context, World};

pub(crate) unsafe fn gnt_fault_in(hva: u64, write: i32, _: i32, out: *mut RawHostPage) -> i32 {
    super::thread::refuse_in_guest("gnt_fault_in");
    let (page, direction) = (hva & !4095, Direction::write_if(write != 0));
    if !user_ok(page.max(hva & !15), 16, direction) {
        return 1;
    }
    let writable = (direction.is_write() || user_ok(hva & !15, 16, Direction::Write)).into();
    let pfn = hva >> 12;
    let refcounted = (!World::current().lock().devices.contains(&pfn)).into();
    let raw = RawHostPage { pfn, writable, refcounted, level: 1, ..Default::default() };
    // SAFETY: out is writable by the contract.
    unsafe { out.write(raw) };
    0
}
pub(crate) fn gnt_signal_poisoned(hva: u64) {
    super::thread::refuse_in_guest("gnt_signal_poisoned");
    SIGNAL.set(true);
    World::current().lock().poisoned.push(hva);
}
pub(crate) fn gnt_hva_level(_: u64) -> i32 {
    super::thread::refuse_in_guest("gnt_hva_level");
    1
}
/// No frame is found with a reference here; a test may make one up.
pub(crate) unsafe fn gnt_page_put(pfn: u64) {
    World::current().lock().put.push(pfn);
}
pub(crate) unsafe fn gnt_page_set_dirty(pfn: u64) {
    World::current().lock().dirtied.insert(pfn);
}
pub(crate) unsafe fn gnt_page_set_accessed(_: u64) {}

pub(crate) struct NotifierRaw(Option<(World, u64)>);
impl NotifierRaw {
    pub(crate) const fn new() -> Self {
        Self(None)
    }
}
pub(crate) unsafe fn gnt_notifier_register(
    n: *mut NotifierRaw,
    calls: &'static NotifierCalls,
    context: *mut c_void,
) -> i32 {
    // As the kernel's mm_take_all_locks(): with a signal pending it does not begin.
    if SIGNAL.get() {
        return -4;
    }
    super::thread::refuse_in_guest("gnt_notifier_register");
    let (world, id) = (World::current(), NEXT_ID.fetch_add(1, Ordering::Relaxed));
    world.lock().notifiers.push((id, calls, Context(context)));
    // SAFETY: n is the owner's storage.
    unsafe { (*n).0 = Some((world, id)) };
    0
}
pub(crate) unsafe fn gnt_notifier_unregister(n: *mut NotifierRaw) {
    super::thread::refuse_in_guest("gnt_notifier_unregister");
    // SAFETY: n is the owner's storage.
    if let Some((world, id)) = unsafe { (*n).0.take() } {
        world.lock().notifiers.retain(|r| r.0 != id);
    }
}
pub(crate) unsafe fn gnt_notifier_is_current(n: *const NotifierRaw) -> i32 {
    super::thread::refuse_in_guest("gnt_notifier_is_current");
    // SAFETY: n is the owner's storage.
    let raw = unsafe { &*n };
    raw.0.as_ref().is_some_and(|r| Arc::ptr_eq(&r.0.state, &World::current().state)).into()
}
