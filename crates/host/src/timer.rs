//! One-shot timers on the monotonic clock, fired from the hard interrupt.
//!
//! A timer lives in the same allocation as what it serves ([`WithTimer`]), and dropping that
//! allocation first cancels the timer and waits for a handler under way: hence no callback ever
//! sees freed memory, and none needs a reference count.
//!
//! Why from the hard interrupt: the handler makes an interrupt pending and kicks a vCPU, no more. In a softirq it would wait behind whatever
//! network or disk has to do there, and the guest would see that as a timer that is late.

use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::ops::Deref;

use crate::arc::Arc;
use crate::error::NoMemory;
use crate::sys;

/// What a timer does when it expires.
pub trait TimerHandler: Send + Sync {
    /// Called in hard interrupt context, interrupts off. `Some(t)` arms the timer anew for the
    /// absolute monotonic time `t` in ns. Must not start or cancel the timer itself, and must not
    /// drop the last owner of the [`WithTimer`].
    fn expired(&self) -> Option<u64>;
}

/// A `T` with a timer of its own. Always inside an [`Arc`], since the kernel links the timer.
#[repr(C)]
pub struct WithTimer<T: TimerHandler> {
    timer: UnsafeCell<sys::TimerRaw>,
    value: T,
}

// SAFETY: the raw timer is only touched by functions that lock it; T: TimerHandler is Sync.
unsafe impl<T: TimerHandler> Send for WithTimer<T> {}
// SAFETY: a reference gives &T, which is Sync, and calls functions that lock the raw timer.
unsafe impl<T: TimerHandler> Sync for WithTimer<T> {}

impl<T: TimerHandler> WithTimer<T> {
    /// A timer that is not armed.
    #[allow(clippy::new_ret_no_self, reason = "the kernel links the timer: it may not move")]
    pub fn new(value: T) -> Result<Arc<Self>, NoMemory> {
        let arc = Arc::new(Self { timer: UnsafeCell::new(sys::TimerRaw::new()), value })?;
        // The value's own address, which is fixed from here on: C hands it back when the timer
        // fires.
        let context = (&raw const arc.value).cast_mut().cast::<c_void>();
        // SAFETY: the timer will not move again, and Drop cancels it before the value goes.
        unsafe { sys::gnt_timer_init(arc.timer.get(), expired::<T>, context) };
        Ok(arc)
    }

    /// Arms the timer for `at`, absolute CLOCK_MONOTONIC time in ns, in place of any earlier
    /// arming. A time that has passed fires at once (from an interrupt, not from here).
    pub fn start(&self, at: u64) {
        // SAFETY: initialised by new(); the kernel locks its timer base.
        unsafe { sys::gnt_timer_start(self.timer.get(), at) }
    }

    /// Disarms and waits for a handler that is running. Not from the handler.
    /// Returns whether the timer was armed.
    pub fn cancel(&self) -> bool {
        // SAFETY: initialised by new(); the kernel locks its timer base.
        unsafe { sys::gnt_timer_cancel(self.timer.get()) != 0 }
    }

    /// Disarms unless the handler is running: `None` then, else whether the timer was armed.
    pub fn try_cancel(&self) -> Option<bool> {
        // SAFETY: initialised by new(); the kernel locks its timer base.
        match unsafe { sys::gnt_timer_try_cancel(self.timer.get()) } {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

/// 0 means: do not rearm.
///
/// # Safety
/// `context` is the value of a live `WithTimer<T>`.
unsafe extern "C" fn expired<T: TimerHandler>(context: *mut c_void) -> u64 {
    // SAFETY: WithTimer::drop cancels before the value goes.
    unsafe { &*context.cast::<T>() }.expired().unwrap_or(0)
}

impl<T: TimerHandler> Drop for WithTimer<T> {
    fn drop(&mut self) {
        // Before the fields go: it waits for a handler that is running.
        self.cancel();
    }
}

impl<T: TimerHandler> Deref for WithTimer<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::std_port::test::clock;

    #[derive(Default)]
    struct Count {
        fired: AtomicU64,
        period: u64,
    }

    impl TimerHandler for Count {
        fn expired(&self) -> Option<u64> {
            self.fired.fetch_add(1, Ordering::Relaxed);
            (self.period != 0).then(|| crate::clock::monotonic_ns() + self.period)
        }
    }

    fn fired(timer: &WithTimer<Count>) -> u64 {
        timer.fired.load(Ordering::Relaxed)
    }

    #[test]
    fn a_timer_fires_once_when_its_time_has_come() {
        let timer = WithTimer::new(Count::default()).unwrap();
        timer.start(crate::clock::monotonic_ns() + 100);
        clock().advance(99);
        assert_eq!(fired(&timer), 0);
        clock().advance(1);
        clock().advance(1000);
        assert_eq!(fired(&timer), 1);
    }

    #[test]
    fn a_handler_can_arm_its_timer_anew() {
        let timer = WithTimer::new(Count { period: 10, ..Count::default() }).unwrap();
        timer.start(crate::clock::monotonic_ns() + 10);
        clock().advance(55);
        assert_eq!(fired(&timer), 5);
        assert!(timer.cancel());
        clock().advance(100);
        assert_eq!(fired(&timer), 5);
    }

    #[test]
    fn the_last_start_wins_and_a_dropped_timer_never_fires() {
        let timer = WithTimer::new(Count::default()).unwrap();
        let now = crate::clock::monotonic_ns();
        timer.start(now + 10);
        timer.start(now + 50);
        clock().advance(20);
        assert_eq!(fired(&timer), 0);
        assert_eq!(timer.try_cancel(), Some(true));
        assert_eq!(timer.try_cancel(), Some(false));
        timer.start(now + 30);
        drop(timer);
        clock().advance(100);
    }
}
