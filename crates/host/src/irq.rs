//! Interrupts on this CPU, and the kernel's accounting of time spent in the guest.
//!
//! What must come in pairs is a value: interrupts are off as long as [`Off`] lives, and the kernel thinks
//! of this CPU as the guest's as long as [`InGuest`] does.

use core::marker::PhantomData;

use crate::{smp, sys};

/// Interrupts are off on this CPU until this is dropped. It stays on its CPU, and there is one at a
/// time: interrupts are on when it is made.
#[must_use]
#[derive(Debug)]
pub struct Off {
    /// Where; asked once, as asking the kernel is a call.
    cpu: usize,
    _here: PhantomData<*const ()>,
}

impl Off {
    /// The CPU on which interrupts are off.
    #[inline(always)]
    pub fn cpu(&self) -> usize {
        self.cpu
    }
}

impl Drop for Off {
    #[inline(always)]
    fn drop(&mut self) {
        sys::irq_enable();
    }
}

/// Turns interrupts off, which are on.
#[inline(always)]
pub fn disable() -> Off {
    // On before, by contract: the guard turns them on again without asking.
    sys::irq_disable();
    // The number is asked for last: before, the task could still move.
    Off { cpu: smp::cpu_id(), _here: PhantomData }
}

/// Turns interrupts on.
#[inline(always)]
pub fn enable(off: Off) {
    drop(off);
}

/// Does `work` with interrupts off, whether they are on or off before.
#[inline]
pub fn undisturbed<T>(work: impl FnOnce() -> T) -> T {
    let off = enabled().then(disable);
    let result = work();
    drop(off);
    result
}

/// Takes what interrupts are pending, with interrupts off before and after.
#[inline]
pub fn window(off: &mut Off) {
    sys::irq_window();
    // While interrupts were on the task may have moved.
    off.cpu = smp::cpu_id();
}

/// Whether interrupts are on.
#[inline]
pub fn enabled() -> bool {
    sys::irq_enabled()
}

/// RCU does not wait for this CPU, and its time is the guest's, until [`guest_exit`].
#[must_use]
#[derive(Debug)]
pub struct InGuest {
    _here: PhantomData<*const ()>,
}

/// Tells the kernel that this CPU is about to run the guest (interrupts off): RCU stops waiting
/// for it, time is accounted as guest time. Until [`guest_exit`] only code that needs no RCU and
/// no tracing may run: the entry, and handlers that touch nothing of the kernel's.
#[inline]
pub fn guest_enter() -> InGuest {
    sys::gnt_guest_enter();
    InGuest { _here: PhantomData }
}

/// The CPU is the kernel's again (interrupts still off). `interrupted`: an interrupt ended the guest's
/// run, a tick perhaps, and guest time goes on until [`guest_time_end`]. Else it ends here.
#[inline]
pub fn guest_exit(_guest: InGuest, interrupted: bool) {
    sys::gnt_guest_exit(interrupted);
}

/// Guest time ends (interrupts off): after the interrupt that ended the guest's run was taken, so that a
/// tick is accounted as the guest's.
#[inline]
pub fn guest_time_end() {
    sys::gnt_guest_time_end();
}

/// Between [`guest_enter`] and [`guest_exit`]: calls the kernel in `work`.
#[inline]
pub fn guest_paused<T>(work: impl FnOnce() -> T) -> T {
    sys::gnt_guest_pause();
    let result = work();
    sys::gnt_guest_resume();
    result
}
