//! The current task: sleeping and waking, work that waits for it, its signals.

use core::cell::UnsafeCell;

use crate::error::{Interrupted, NoMemory};
use crate::sys;

/// How a [`Waiter::block`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// The condition held at the first look.
    AtOnce,
    /// The condition came to hold while polling.
    Polled,
    /// The task slept, and the condition held when it woke.
    Slept,
    /// A signal is pending; the condition does not hold.
    Signal,
}

/// How long a [`Waiter::wait`] polled and slept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitTimes {
    /// Nanoseconds spent polling.
    pub polled_ns: u64,
    /// How many nanoseconds the task slept.
    pub slept_ns: u64,
}

/// What a [`Waiter::wait`] waits for.
pub trait Sleeper {
    /// Whether what is waited for has come. Called while the task is marked sleeping: it must not sleep itself.
    fn is_ready(&mut self) -> bool;
    /// The polling is over, and the task is about to sleep.
    fn falls_asleep(&mut self) {}
    /// The wait is over.
    fn ends(&mut self, _how: Blocked, _times: WaitTimes) {}
}

/// A condition alone.
struct Until<F>(F);

impl<F: FnMut() -> bool> Sleeper for Until<F> {
    fn is_ready(&mut self) -> bool {
        self.0()
    }
}

/// Where one task sleeps until another, or an interrupt, wakes it. For one sleeper at a time.
#[derive(Debug)]
#[repr(transparent)]
pub struct Waiter {
    raw: UnsafeCell<sys::WaiterRaw>,
}

// SAFETY: the kernel's rcuwait is made for wakers on any CPU.
unsafe impl Send for Waiter {}
// SAFETY: one task sleeps on it at a time (`block` is called by its owner), wakers may be many.
unsafe impl Sync for Waiter {}

impl Waiter {
    /// A waiter on which nobody sleeps.
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self { raw: UnsafeCell::new(sys::WaiterRaw::new()) })
    }

    /// Waits until `cond` holds: first polls for up to `poll_ns` (unless another task wants the
    /// CPU), then sleeps. Returns when `cond` holds or a signal is pending.
    ///
    /// `cond` is called while the task is marked sleeping: it must not sleep itself. A waker makes
    /// the condition true before it calls [`Waiter::wake`]. Only one task may block at a time;
    /// a vCPU's thread, which holds the vCPU's mutex, is that one.
    pub fn block(&self, cond: impl FnMut() -> bool, poll_ns: u64) -> Blocked {
        self.wait(&mut Until(cond), poll_ns)
    }

    /// Like [`Waiter::block`], and tells the sleeper what becomes of it.
    pub fn wait(&self, sleeper: &mut impl Sleeper, poll_ns: u64) -> Blocked {
        let mut times = WaitTimes::default();
        let ended = 'wait: {
            // Before the clock is read: a wait that is over already costs nothing more.
            if sleeper.is_ready() {
                break 'wait Blocked::AtOnce;
            }
            sys::might_sleep();
            let began = crate::clock::monotonic_ns();
            // Going to sleep and being woken costs more than most waits of a guest in HLT last.
            if poll_ns != 0 && poll(sleeper, began, poll_ns, &mut times) {
                break 'wait Blocked::Polled;
            }
            sleeper.falls_asleep();
            let raw = self.raw.get();
            // SAFETY: the raw waiter lives as long as self; prepare and finish pair up here.
            let ended = unsafe {
                sys::gnt_waiter_enter(raw);
                let ended = loop {
                    // Marked sleeping first, looked second: a waker that comes between undoes the mark, and the sleep returns at
                    // once. The other way round its call would be lost.
                    sys::gnt_waiter_prepare(raw);
                    if sleeper.is_ready() {
                        break Blocked::Slept;
                    }
                    // The condition before the signal: what has come is taken, and the signal is
                    // looked at again before the guest is entered.
                    if signal_pending() {
                        break Blocked::Signal;
                    }
                    sys::gnt_waiter_sleep(raw);
                };
                sys::gnt_waiter_finish(raw);
                ended
            };
            let all = crate::clock::monotonic_ns().saturating_sub(began);
            times.slept_ns = all.saturating_sub(times.polled_ns);
            ended
        };
        sleeper.ends(ended, times);
        ended
    }

    /// Wakes the sleeper, if there is one. From any context, hard interrupts too.
    /// Returns whether somebody slept.
    pub fn wake(&self) -> bool {
        // SAFETY: the raw waiter lives as long as self.
        unsafe { sys::gnt_waiter_wake(self.raw.get()) != 0 }
    }
}

/// Looks for up to `poll_ns`, from `began` on, whether `sleeper` need not sleep; but no longer when another
/// task wants the CPU.
fn poll(sleeper: &mut impl Sleeper, began: u64, poll_ns: u64, times: &mut WaitTimes) -> bool {
    while sys::gnt_may_poll() != 0 {
        // Looked at before the time: a poll that is over at once has still looked.
        let done = sleeper.is_ready();
        times.polled_ns = crate::clock::monotonic_ns().saturating_sub(began);
        if done {
            return true;
        }
        // Leaves the core's other hardware thread its share.
        core::hint::spin_loop();
        if times.polled_ns >= poll_ns {
            break;
        }
    }
    false
}

/// Whether the task must leave for a signal, a reschedule or task work before it may enter the
/// guest. Interrupts are off, so that nothing can come between the answer and the entry.
#[inline]
pub fn work_pending() -> bool {
    sys::gnt_work_pending() != 0
}

/// Does what [`work_pending`] announced. Interrupts on.
pub fn handle_work() -> Result<(), Interrupted> {
    sys::might_sleep();
    if sys::gnt_handle_work() == 0 { Ok(()) } else { Err(Interrupted) }
}

/// Whether a signal waits for this task.
#[inline]
pub fn signal_pending() -> bool {
    sys::gnt_signal_pending() != 0
}

/// Whether another task wants this CPU.
#[inline]
pub fn need_resched() -> bool {
    sys::gnt_need_resched() != 0
}

/// Lets another task run if one wants to.
pub fn cond_resched() {
    sys::might_sleep();
    sys::gnt_cond_resched();
}

/// How long the current task has waited for a CPU in its life, in ns: steal time.
pub fn run_delay_ns() -> u64 {
    sys::gnt_run_delay_ns()
}

/// The current task's thread id. Only good for comparing and for messages.
pub fn current_tid() -> u32 {
    sys::gnt_current_tid()
}

/// Signals that a task may block: never SIGKILL or SIGSTOP, with which its owner and the host's
/// administrator end it, whatever it asks for. There is no other way to a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalSet(u64);

impl SignalSet {
    const SIGKILL: u64 = 1 << 8;
    const SIGSTOP: u64 = 1 << 18;
    /// What the mask of a task never has.
    pub(crate) const UNBLOCKABLE: u64 = Self::SIGKILL | Self::SIGSTOP;

    /// The set that user space gives (bit n = signal n + 1), without those that nobody may block.
    pub const fn from_user(bits: u64) -> Self {
        Self(bits & !Self::UNBLOCKABLE)
    }

    /// The set's bits: bit n is signal n + 1.
    pub const fn bits(self) -> u64 {
        self.0
    }
}

/// While this lives the task's signal mask is the one given (`KVM_SET_SIGNAL_MASK`).
#[must_use]
#[derive(Debug)]
pub struct Sigmask {
    active: bool,
    _here: core::marker::PhantomData<*const ()>,
}

/// Blocks the signals of `mask` and no others while the guard lives; `None` does nothing.
pub fn with_sigmask(mask: Option<SignalSet>) -> Sigmask {
    if let Some(SignalSet(mask)) = mask {
        sys::gnt_sigmask_set(mask);
    }
    Sigmask { active: mask.is_some(), _here: core::marker::PhantomData }
}

impl Drop for Sigmask {
    fn drop(&mut self) {
        if self.active {
            sys::gnt_sigmask_restore();
        }
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::std_port::test;

    #[test]
    fn no_mask_holds_what_ends_a_task() {
        for bits in [u64::MAX, 1 << 8, 1 << 18, 0x4_0100] {
            assert_eq!(SignalSet::from_user(bits).bits(), bits & !0x4_0100);
            drop(with_sigmask(Some(SignalSet::from_user(bits))));
        }
        assert_eq!(SignalSet::from_user(0x20_0000_0010).bits(), 0x20_0000_0010);
    }

    #[test]
    #[should_panic = "a mask that no task may have"]
    fn a_mask_that_blocks_sigkill_is_found() {
        // A planted mistake: a set that did not come from user space by the only way.
        drop(with_sigmask(Some(SignalSet(u64::MAX))));
    }

    #[test]
    fn a_condition_that_holds_needs_no_sleep() {
        assert_eq!(Waiter::new().unwrap().block(|| true, 0), Blocked::AtOnce);
    }

    #[test]
    fn a_sleeper_wakes_when_the_condition_comes_to_hold() {
        let (waiter, ready) = (Waiter::new().unwrap(), AtomicBool::new(false));
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| waiter.block(|| ready.load(Ordering::Acquire), 0));
            std::thread::sleep(std::time::Duration::from_millis(5));
            ready.store(true, Ordering::Release);
            waiter.wake();
            assert_eq!(sleeper.join().unwrap(), Blocked::Slept);
        });
        assert!(!waiter.wake());
    }

    #[test]
    fn a_signal_ends_the_sleep() {
        test::set_signal_pending(true);
        assert_eq!(Waiter::new().unwrap().block(|| false, 0), Blocked::Signal);
        assert!(work_pending());
        assert!(handle_work().is_err());
        test::set_signal_pending(false);
        assert!(!work_pending());
    }
}
