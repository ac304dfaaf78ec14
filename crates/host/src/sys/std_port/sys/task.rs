//! The task that a thread is: its sleep, its signals, and whether its CPU is wanted.

use std::sync::atomic::{AtomicBool, Ordering};

use super::lock::{WOKEN, nap};
use super::thread::{IN_GUEST, IRQS_ON, NEXT_ID, RESCHED, RUN_DELAY, SIGNAL, refuse_in_guest};

#[derive(Debug)]
pub(crate) struct WaiterRaw(AtomicBool);
impl WaiterRaw {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }
}
pub(crate) unsafe fn gnt_waiter_enter(_: *mut WaiterRaw) {}
pub(crate) unsafe fn gnt_waiter_prepare(w: *mut WaiterRaw) {
    refuse_in_guest("gnt_waiter_prepare");
    // SAFETY: w lives by the contract.
    unsafe { &*w }.0.store(true, Ordering::SeqCst);
}
pub(crate) unsafe fn gnt_waiter_finish(w: *mut WaiterRaw) {
    refuse_in_guest("gnt_waiter_finish");
    // SAFETY: w lives by the contract.
    unsafe { &*w }.0.store(false, Ordering::SeqCst);
}
pub(crate) unsafe fn gnt_waiter_sleep(_: *mut WaiterRaw) {
    refuse_in_guest("gnt_waiter_sleep");
    nap();
}
pub(crate) unsafe fn gnt_waiter_wake(w: *mut WaiterRaw) -> i32 {
    refuse_in_guest("gnt_waiter_wake");
    // SAFETY: w lives by the contract.
    let slept = unsafe { &*w }.0.load(Ordering::SeqCst);
    WOKEN.1.notify_all();
    slept.into()
}
pub(crate) fn gnt_may_poll() -> i32 {
    refuse_in_guest("gnt_may_poll");
    // The test clock does not move by itself: polling would never end.
    0
}
pub(crate) fn gnt_work_pending() -> i32 {
    refuse_in_guest("gnt_work_pending");
    (SIGNAL.get() || RESCHED.get()).into()
}
pub(crate) fn gnt_handle_work() -> i32 {
    refuse_in_guest("gnt_handle_work");
    RESCHED.set(false);
    if SIGNAL.get() { -4 } else { 0 }
}
pub(crate) fn gnt_signal_pending() -> i32 {
    refuse_in_guest("gnt_signal_pending");
    SIGNAL.get().into()
}
pub(crate) fn gnt_need_resched() -> i32 {
    refuse_in_guest("gnt_need_resched");
    RESCHED.get().into()
}
pub(crate) fn gnt_cond_resched() {
    refuse_in_guest("gnt_cond_resched");
    RESCHED.set(false);
}
pub(crate) fn gnt_run_delay_ns() -> u64 {
    refuse_in_guest("gnt_run_delay_ns");
    RUN_DELAY.get()
}
pub(crate) fn gnt_current_tid() -> u32 {
    refuse_in_guest("gnt_current_tid");
    thread_local!(static TID: u32 = NEXT_ID.fetch_add(1, Ordering::Relaxed) as u32);
    TID.with(|t| *t)
}
pub(crate) fn gnt_sigmask_set(mask: u64) {
    refuse_in_guest("gnt_sigmask_set");
    let never = crate::task::SignalSet::UNBLOCKABLE;
    assert!(mask & never == 0, "a mask that no task may have: {mask:#x}");
}
pub(crate) fn gnt_sigmask_restore() {}
pub(crate) fn gnt_guest_enter() {
    assert!(!IRQS_ON.get(), "the guest is entered with interrupts off");
    IN_GUEST.set(true);
}
pub(crate) fn gnt_guest_exit(_interrupted: bool) {
    assert!(!IRQS_ON.get(), "the guest is left with interrupts off");
    IN_GUEST.set(false);
}
pub(crate) fn gnt_guest_time_end() {
    assert!(!IRQS_ON.get(), "guest time ends with interrupts off");
}
pub(crate) fn gnt_guest_pause() {
    gnt_guest_exit(false);
}
pub(crate) fn gnt_guest_resume() {
    gnt_guest_enter();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::std_port::test::on_another_cpu;

    #[test]
    fn the_kernel_is_not_called_while_the_guest_runs() {
        let waiter = WaiterRaw::new();
        // SAFETY: it lives.
        let wakes = || unsafe { gnt_waiter_wake((&raw const waiter).cast_mut()) };
        IRQS_ON.set(false);
        gnt_guest_enter();
        assert_eq!(on_another_cpu(wakes), 0);
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(wakes));
        gnt_guest_exit(false);
        IRQS_ON.set(true);
        assert!(refused.is_err());
        assert_eq!(wakes(), 0);
    }
}
