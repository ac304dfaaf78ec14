//! A spinning lock with a side that never waits: for state that vCPUs touch with interrupts off.
//!
//! [`TryLock::try_lock`] is one compare-and-exchange without a call into the kernel, so it may be used
//! while the guest's segments are loaded. [`TryLock::lock`] queues fairly behind the kernel's own lock
//! and keeps preemption off; it then waits for at most one holder that came by the other side. Whoever
//! holds the lock must not wait for another CPU (no remote TLB flush): then both sides may be used with
//! interrupts on or off. Not for interrupt handlers.

use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::sync::{RwSpinLock, WriteGuard};

/// See the module.
pub struct TryLock<T> {
    held: AtomicBool,
    queue: RwSpinLock<()>,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives one CPU at a time access.
unsafe impl<T: Send> Send for TryLock<T> {}
// SAFETY: the lock gives one CPU at a time access: a shared lock sends its T from CPU to CPU.
unsafe impl<T: Send> Sync for TryLock<T> {}

impl<T> TryLock<T> {
    /// An unlocked lock.
    #[track_caller]
    pub const fn new(value: T) -> Self {
        Self {
            held: AtomicBool::new(false),
            queue: RwSpinLock::new(()),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    fn take(&self) -> bool {
        // Acquire: what the last holder did is seen.
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes the lock if it is free now. With preemption off already (interrupts off).
    #[inline]
    pub fn try_lock(&self) -> Option<TryGuard<'_, T>> {
        self.take().then(|| TryGuard { lock: self, _queue: None, _here: PhantomData })
    }

    /// Takes the lock, however long that takes.
    pub fn lock(&self) -> TryGuard<'_, T> {
        // Queued first: of those that wait one alone looks at the word.
        let queue = self.queue.write();
        while !self.take() {
            core::hint::spin_loop();
        }
        TryGuard { lock: self, _queue: Some(queue), _here: PhantomData }
    }

    /// The value, without locking: the borrow is unique.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T> fmt::Debug for TryLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TryLock")
    }
}

/// The lock is held while this lives.
#[must_use]
pub struct TryGuard<'a, T> {
    lock: &'a TryLock<T>,
    /// Dropped after the lock is free (fields go after `drop`).
    _queue: Option<WriteGuard<'a, ()>>,
    _here: PhantomData<*const ()>,
}

impl<T> Deref for TryGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for TryGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held for one owner, and the guard is borrowed uniquely.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for TryGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Before the queue's lock: its next one finds the word free.
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_lock_refuses_and_a_free_one_does_not() {
        let lock = TryLock::new(1);
        let guard = lock.lock();
        assert!(lock.try_lock().is_none());
        assert!(lock.try_lock().is_none(), "an attempt that failed has unlocked it");
        drop(guard);
        let guard = lock.try_lock().unwrap();
        assert!(lock.try_lock().is_none());
        drop(guard);
        assert_eq!(*lock.lock(), 1);
    }

    #[test]
    fn both_sides_let_one_thread_in() {
        let count = TryLock::new(0u64);
        let add = |mut guard: TryGuard<'_, u64>| {
            let seen = *guard;
            core::hint::spin_loop();
            *guard = seen + 1;
        };
        std::thread::scope(|s| {
            for n in 0..4 {
                let (count, add) = (&count, &add);
                s.spawn(move || {
                    let mut done = 0;
                    while done < 10_000 {
                        if n & 1 == 0 {
                            add(count.lock());
                            done += 1;
                        } else if let Some(guard) = count.try_lock() {
                            add(guard);
                            done += 1;
                        }
                    }
                });
            }
        });
        assert_eq!(*count.lock(), 40_000);
    }
}
