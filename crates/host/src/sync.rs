//! Locks: a sleeping mutex and two spinning ones. Each is a word or two, may move while it is
//! unlocked, and is free of allocation.
//!
//! The spinning locks are the kernel's own queued locks (paravirtual slow paths included); the
//! mutex is a word that sleeps on the kernel's hashed wait queues.
//!
//! Why not the kernel's own `struct mutex` and `spinlock_t`: their size and their fields depend on the kernel's
//! configuration, and some hold pointers to themselves. A Rust value moves, and the module is built for two kernels.
//! The architecture's words under them are the same everywhere, zero when free, and hold no pointers. The price is
//! that lockdep does not see them unless it is told, which builds for a debug kernel do ([`crate::lockdep`], ADR 13).
//!
//! Why [`SpinLock`] turns interrupts off always, though not every user is called from one: a holder that is
//! interrupted by a handler which wants the same lock never ends. Forgetting that in one place is a hang in
//! a thousand boots; the flags are restored by the guard for a few cycles.
//!
//! Why [`RwSpinLock`] does not: it is held while thousands of entries are withdrawn. No handler may take it then;
//! the notifier and faults come in process context.
//!
//! Why guards cannot go to another thread: what they undo (preemption, the interrupt flag) belongs to the CPU
//! that took the lock. Why there is no poisoning: nothing panics under a lock here, since a panic is a BUG.

use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use crate::error::Interrupted;
use crate::lockdep::{Class, Taken};
use crate::sys;

const FREE: u32 = 0;
const HELD: u32 = 1;

/// Forbids sending a guard to another thread: what it undoes belongs to this one.
type NotSend = PhantomData<*const ()>;

/// A mutex that sleeps. Process context only.
pub struct Mutex<T> {
    /// 0 free, 1 held, 2 held and somebody may sleep.
    word: AtomicU32,
    class: Class,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives one thread at a time access.
unsafe impl<T: Send> Send for Mutex<T> {}
// SAFETY: the lock gives one thread at a time access: a shared mutex sends its T from thread to thread.
unsafe impl<T: Send> Sync for Mutex<T> {}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    #[track_caller]
    pub const fn new(value: T) -> Self {
        Self { word: AtomicU32::new(FREE), class: Class::here(), value: UnsafeCell::new(value) }
    }

    fn take(&self) -> bool {
        self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes the lock, however long that takes.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        sys::might_sleep();
        self.class.acquire(Taken::Asleep);
        // Free in nearly all cases, and then no function of the kernel's is called.
        if !self.take() {
            sys::gnt_mutex_lock_slow(&self.word);
        }
        MutexGuard { mutex: self, _here: PhantomData }
    }

    /// Takes the lock, or gives up when a fatal signal arrives.
    pub fn lock_killable(&self) -> Result<MutexGuard<'_, T>, Interrupted> {
        sys::might_sleep();
        self.class.acquire(Taken::Asleep);
        if !self.take() && sys::gnt_mutex_lock_killable_slow(&self.word) != 0 {
            // Told to lockdep before it was had, so it is taken back.
            self.class.release();
            return Err(Interrupted);
        }
        Ok(MutexGuard { mutex: self, _here: PhantomData })
    }

    /// Takes the lock if it is free now.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.take().then(|| {
            // Told only when it was had: an attempt waits for nobody and makes no order.
            self.class.acquire(Taken::Tried);
            MutexGuard { mutex: self, _here: PhantomData }
        })
    }

    /// The value, without locking: the borrow is unique.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// Gives up the lock for the value in it.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }
}

impl<T> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mutex")
    }
}

impl<T: Default> Default for Mutex<T> {
    #[track_caller]
    fn default() -> Self {
        Self::new(T::default())
    }
}

/// The mutex is held while this lives.
#[must_use]
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    _here: NotSend,
}

// SAFETY: sharing the guard shares &T only.
unsafe impl<T: Sync> Sync for MutexGuard<'_, T> {}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        // Before the word is free, as the kernel's own locks tell lockdep.
        self.mutex.class.release();
        // A full barrier either way: the waker must see a sleeper that saw the lock held.
        if self.mutex.word.swap(FREE, Ordering::SeqCst) != HELD {
            sys::gnt_mutex_wake(&self.mutex.word);
        }
    }
}

/// A spin lock that also keeps interrupts off on this CPU: usable from timers and wait queues.
pub struct SpinLock<T> {
    /// The kernel's `arch_spinlock_t`.
    word: AtomicU32,
    class: Class,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives one CPU at a time access.
unsafe impl<T: Send> Send for SpinLock<T> {}
// SAFETY: the lock gives one CPU at a time access: a shared lock sends its T from CPU to CPU.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    /// An unlocked lock.
    #[track_caller]
    pub const fn new(value: T) -> Self {
        Self { word: AtomicU32::new(0), class: Class::here(), value: UnsafeCell::new(value) }
    }

    /// Spins until the lock is taken. Interrupts stay off until the guard goes; guards must be
    /// dropped in the reverse order of taking.
    pub fn lock(&self) -> SpinGuard<'_, T> {
        // SAFETY: the word is a zero-initialised arch_spinlock_t, borrowed for the guard's life.
        let flags = unsafe { sys::gnt_spin_lock_irqsave(&self.word) };
        // Behind the kernel's function, which has turned interrupts off: lockdep is told how locks are held.
        self.class.acquire(Taken::Alone);
        SpinGuard { lock: self, flags, _here: PhantomData }
    }

    /// The value, without locking: the borrow is unique.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T> fmt::Debug for SpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SpinLock")
    }
}

/// The spin lock is held, with interrupts off, while this lives.
#[must_use]
pub struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
    flags: usize,
    _here: NotSend,
}

impl<T> Drop for SpinGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.class.release();
        // SAFETY: taken by this guard, with these flags.
        unsafe { sys::gnt_spin_unlock_irqrestore(&self.lock.word, self.flags) }
    }
}

/// The kernel's `arch_rwlock_t`: readers count and a wait lock, zero when free.
#[repr(C, align(8))]
pub(crate) struct RwWords(pub(crate) [AtomicU32; 2]);

/// Many readers or one writer; spins, with preemption off. Not for interrupt handlers.
pub struct RwSpinLock<T> {
    words: RwWords,
    class: Class,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives either one writer or many readers access.
unsafe impl<T: Send> Send for RwSpinLock<T> {}
// SAFETY: one writer at a time, so T is sent from CPU to CPU; readers share &T.
unsafe impl<T: Send + Sync> Sync for RwSpinLock<T> {}

impl<T> RwSpinLock<T> {
    /// An unlocked lock.
    #[track_caller]
    pub const fn new(value: T) -> Self {
        Self {
            words: RwWords([AtomicU32::new(0), AtomicU32::new(0)]),
            class: Class::here(),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock for reading, spinning while a writer has it.
    pub fn read(&self) -> ReadGuard<'_, T> {
        // SAFETY: a zero-initialised arch_rwlock_t, borrowed for the guard's life.
        unsafe { sys::gnt_read_lock(&self.words) };
        self.class.acquire(Taken::Shared);
        ReadGuard { lock: self, _here: PhantomData }
    }

    /// Takes the lock for writing, spinning while anybody has it.
    pub fn write(&self) -> WriteGuard<'_, T> {
        // SAFETY: a zero-initialised arch_rwlock_t, borrowed for the guard's life.
        unsafe { sys::gnt_write_lock(&self.words) };
        self.class.acquire(Taken::Alone);
        WriteGuard { lock: self, _here: PhantomData }
    }

    /// Whether somebody waits for the lock: a long walk may let them in and start again.
    pub fn is_contended(&self) -> bool {
        // SAFETY: an arch_rwlock_t, only looked at.
        unsafe { sys::gnt_rwlock_is_contended(&self.words) != 0 }
    }

    /// The value, without locking: the borrow is unique.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T> fmt::Debug for RwSpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RwSpinLock")
    }
}

/// Shared access while this lives.
#[must_use]
pub struct ReadGuard<'a, T> {
    lock: &'a RwSpinLock<T>,
    _here: NotSend,
}

impl<T> Drop for ReadGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.class.release();
        // SAFETY: taken by this guard.
        unsafe { sys::gnt_read_unlock(&self.lock.words) }
    }
}

/// Unique access while this lives.
#[must_use]
pub struct WriteGuard<'a, T> {
    lock: &'a RwSpinLock<T>,
    _here: NotSend,
}

impl<T> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.class.release();
        // SAFETY: taken by this guard.
        unsafe { sys::gnt_write_unlock(&self.lock.words) }
    }
}

macro_rules! shared_access {
    ($guard:ident, $field:ident) => {
        impl<T> Deref for $guard<'_, T> {
            type Target = T;
            #[inline]
            fn deref(&self) -> &T {
                // SAFETY: the lock is held.
                unsafe { &*self.$field.value.get() }
            }
        }
    };
}
macro_rules! unique_access {
    ($guard:ident, $field:ident) => {
        shared_access!($guard, $field);
        impl<T> DerefMut for $guard<'_, T> {
            #[inline]
            fn deref_mut(&mut self) -> &mut T {
                // SAFETY: the lock is held for one owner, and the guard is borrowed uniquely.
                unsafe { &mut *self.$field.value.get() }
            }
        }
    };
}
unique_access!(MutexGuard, mutex);
unique_access!(SpinGuard, lock);
shared_access!(ReadGuard, lock);
unique_access!(WriteGuard, lock);

#[cfg(test)]
mod tests {
    use super::*;

    fn hammer(add: impl Fn() + Sync) {
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..10_000).for_each(|_| add()));
            }
        });
    }

    #[test]
    fn a_mutex_lets_one_thread_in() {
        let count = Mutex::new(0u64);
        hammer(|| {
            let mut guard = count.lock();
            let seen = *guard;
            core::hint::spin_loop();
            *guard = seen + 1;
        });
        assert_eq!(*count.lock(), 40_000);
    }

    #[test]
    fn a_held_mutex_cannot_be_taken_again_and_killable_waits_for_it() {
        let lock = Mutex::new(1);
        let guard = lock.lock();
        assert!(lock.try_lock().is_none());
        assert!(lock.try_lock().is_none(), "an attempt that failed has unlocked it");
        drop(guard);
        assert_eq!(*lock.lock_killable().unwrap(), 1);
    }

    #[test]
    fn a_spin_lock_lets_one_thread_in_and_keeps_interrupts_off() {
        let count = SpinLock::new(0u64);
        hammer(|| *count.lock() += 1);
        let guard = count.lock();
        assert!(!crate::irq::enabled());
        assert_eq!(*guard, 40_000);
        drop(guard);
        assert!(crate::irq::enabled());
    }

    #[test]
    fn readers_share_and_a_writer_is_alone() {
        let pair = &RwSpinLock::new((0u64, 0u64));
        let first = pair.read();
        std::thread::scope(|s| {
            let seen = *first;
            s.spawn(move || assert_eq!(*pair.read(), seen));
        });
        drop(first);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..5_000 {
                        let mut guard = pair.write();
                        guard.0 += 1;
                        guard.1 += 1;
                    }
                });
                s.spawn(|| {
                    for _ in 0..5_000 {
                        let guard = pair.read();
                        assert_eq!(guard.0, guard.1);
                    }
                });
            }
        });
        assert_eq!(*pair.read(), (10_000, 10_000));
    }

    #[test]
    #[should_panic(expected = "sleeps in atomic context")]
    fn taking_a_mutex_under_a_spin_lock_is_caught() {
        let (spin, mutex) = (SpinLock::new(()), Mutex::new(()));
        let _spin = spin.lock();
        let _mutex = mutex.lock();
    }
}
