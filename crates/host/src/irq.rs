//! Interrupts on this CPU, and the kernel's accounting of time spent in the guest.

use crate::sys;

/// Turns interrupts off. No nesting: the run loop knows what it does.
#[inline]
pub fn disable() {
    sys::irq_disable();
}

/// Turns interrupts on.
#[inline]
pub fn enable() {
    sys::irq_enable();
}

/// Takes what interrupts are pending, with interrupts off before and after.
#[inline]
pub fn window() {
    sys::irq_window();
}

/// Whether interrupts are on.
#[inline]
pub fn enabled() -> bool {
    sys::irq_enabled()
}

/// Tells the kernel that this CPU is about to run the guest (interrupts off): RCU stops waiting
/// for it, time is accounted as guest time. Until [`guest_exit`] only code that needs no RCU and
/// no tracing may run: the entry, and handlers that touch nothing of the kernel's.
#[inline]
pub fn guest_enter() {
    sys::gnt_guest_enter();
}

/// The CPU is the kernel's again (interrupts still off). `interrupted`: an interrupt ended the guest's
/// run, a tick perhaps, and guest time goes on until [`guest_time_end`]. Else it ends here.
#[inline]
pub fn guest_exit(interrupted: bool) {
    sys::gnt_guest_exit(interrupted);
}

/// Guest time ends (interrupts off): after the interrupt that ended the guest's run was taken, so that a
/// tick is accounted as the guest's.
#[inline]
pub fn guest_time_end() {
    sys::gnt_guest_time_end();
}

/// Between [`guest_enter`] and [`guest_exit`]: a handler is about to call the kernel.
#[inline]
pub fn guest_pause() {
    sys::gnt_guest_pause();
}

/// Undoes [`guest_pause`].
#[inline]
pub fn guest_resume() {
    sys::gnt_guest_resume();
}
