//! The order of locks, looked after by a machine: in the kernel by its lockdep, in a build for it (feature `lockdep`), elsewhere by
//! the std port, in every test.
//!
//! Why a lock's class is the place in the source where it is made: so lockdep does it for the kernel's own, and two locks that are
//! made in one place have one purpose. Why the kernel's production builds have none: a class is a word in every lock, and two calls
//! for each time that it is taken.
//!
//! What is not seen: [`crate::trylock::TryLock::try_lock`], which never waits, and may run on the guest's GS base, where no kernel
//! function may be called.

#[cfg(any(feature = "lockdep", not(target_os = "none")))]
use core::panic::Location;

/// How a lock is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Taken {
    /// Alone; the taker waits, spinning.
    Alone = 0,
    /// Beside other readers.
    Shared = 1,
    /// Alone; the taker sleeps meanwhile.
    Asleep = 4,
    /// Alone, if it was free: nobody waited. Others sleep for it.
    Tried = 6,
}

/// What locks that are made in one place have in common.
#[derive(Clone, Copy)]
pub(crate) struct Class {
    #[cfg(any(feature = "lockdep", not(target_os = "none")))]
    made_at: &'static Location<'static>,
}

impl Class {
    /// The class of a lock that is made by the caller of the caller.
    #[track_caller]
    pub(crate) const fn here() -> Self {
        Self {
            #[cfg(any(feature = "lockdep", not(target_os = "none")))]
            made_at: Location::caller(),
        }
    }
}

#[cfg(all(not(feature = "lockdep"), target_os = "none"))]
impl Class {
    /// A lock of this class is about to be taken, or was.
    #[inline(always)]
    pub(crate) fn acquire(&self, _: Taken) {}

    /// The lock is about to be given up.
    #[inline(always)]
    pub(crate) fn release(&self) {}
}

#[cfg(all(feature = "lockdep", target_os = "none"))]
impl Class {
    /// A lock of this class is about to be taken, or was. The kernel warns where the order is one in which CPUs may wait for each other.
    pub(crate) fn acquire(&self, how: Taken) {
        let (file, line) = (self.made_at.file(), self.made_at.line());
        // SAFETY: file and length are those of a string that lives as long as the module.
        unsafe { crate::sys::gnt_lockdep_acquire(file.as_ptr(), file.len(), line, how as u32) }
    }

    /// The lock is about to be given up.
    pub(crate) fn release(&self) {
        let (file, line) = (self.made_at.file(), self.made_at.line());
        // SAFETY: file and length are those of a string that lives as long as the module.
        unsafe { crate::sys::gnt_lockdep_release(file.as_ptr(), file.len(), line) }
    }
}

#[cfg(not(target_os = "none"))]
impl Class {
    /// A lock of this class is about to be taken, or was. Panics where the order is one in which threads may wait for each other.
    pub(crate) fn acquire(&self, how: Taken) {
        crate::sys::order::acquire(self.made_at, how);
    }

    /// The lock is about to be given up.
    pub(crate) fn release(&self) {
        crate::sys::order::release(self.made_at);
    }
}

#[cfg(test)]
mod tests {
    use crate::sync::{Mutex, RwSpinLock, SpinLock};
    use crate::trylock::TryLock;

    #[test]
    #[should_panic(expected = "waits in a circle")]
    fn two_locks_taken_in_both_orders_are_caught() {
        let (a, b) = (Mutex::new(()), SpinLock::new(()));
        {
            let _a = a.lock();
            let _b = b.lock();
        }
        let (a, b) = (RwSpinLock::new(()), SpinLock::new(()));
        {
            let _b = b.lock();
            let _a = a.read();
        }
        let _a = a.write();
        let _b = b.lock();
    }

    #[test]
    #[should_panic(expected = "waits in a circle")]
    fn a_circle_of_three_is_caught() {
        let (a, b, c) = (SpinLock::new(()), SpinLock::new(()), TryLock::new(()));
        let pair = |one: &dyn Fn(&mut dyn FnMut()), two: &dyn Fn()| one(&mut || two());
        pair(
            &|then| {
                let _held = a.lock();
                then()
            },
            &|| drop(b.lock()),
        );
        pair(
            &|then| {
                let _held = b.lock();
                then()
            },
            &|| drop(c.lock()),
        );
        pair(
            &|then| {
                let _held = c.lock();
                then()
            },
            &|| drop(a.lock()),
        );
    }

    #[test]
    #[should_panic(expected = "waits in a circle")]
    fn a_lock_that_was_tried_does_not_hide_the_one_before() {
        let (a, b, c) = (Mutex::new(()), Mutex::new(()), Mutex::new(()));
        {
            let _a = a.lock();
            let _b = b.try_lock().unwrap();
            let _c = c.lock();
        }
        let _c = c.lock();
        let _a = a.lock();
    }

    #[test]
    #[should_panic(expected = "two locks of one class")]
    fn two_of_a_kind_are_caught() {
        let pair = [(); 2].map(|()| SpinLock::new(()));
        let _one = pair[0].lock();
        let _two = pair[1].lock();
    }

    #[test]
    fn an_attempt_waits_for_nobody_and_a_lock_given_up_is_forgotten() {
        let (a, b) = (Mutex::new(()), Mutex::new(()));
        {
            let _a = a.lock();
            let _b = b.lock();
        }
        let guard = b.lock();
        assert!(a.try_lock().is_some());
        drop(guard);
        let first = a.lock();
        let second = b.lock();
        drop(first);
        drop(second);
        drop(b.lock());
    }
}
