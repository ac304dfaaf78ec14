//! `Srcu`: a value that many read without locking while one replaces it whole.
//!
//! Memslots and interrupt routes live in one: readers may sleep, and a writer waits until nobody
//! can see the old value any more.
//!
//! Why the sleepable kind of RCU: a reader that looks up a slot may then sleep until the host has read a page from the
//! disk. Why the old value is handed back and not freed here: it can be large, and what is in it may want locks; the
//! writer drops it where it likes. Why a writer must hold no guard: it would wait for itself.

use core::ops::Deref;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::boxed::KBox;
use crate::error::NoMemory;
use crate::sys;

/// A published `T` with sleepable read-side sections (the kernel's SRCU).
pub struct Srcu<T> {
    current: AtomicPtr<T>,
    domain: *mut sys::SrcuRaw,
}

// SAFETY: readers share &T; replacing moves whole boxes between threads.
unsafe impl<T: Send + Sync> Send for Srcu<T> {}
// SAFETY: readers on any thread share &T, and what is replaced comes out where it was replaced: T is both.
unsafe impl<T: Send + Sync> Sync for Srcu<T> {}

impl<T> Srcu<T> {
    /// Publishes `first` as the value that readers find.
    pub fn new(first: KBox<T>) -> Result<Self, NoMemory> {
        let domain = sys::gnt_srcu_new();
        if domain.is_null() {
            return Err(NoMemory);
        }
        Ok(Self { current: AtomicPtr::new(first.into_raw()), domain })
    }

    /// The value of this moment; it stays as it is while the guard lives. A writer waits for all
    /// guards, so drop them before sleeping for long.
    pub fn read(&self) -> SrcuGuard<'_, T> {
        // SAFETY: the domain lives as long as self.
        // Entered before the pointer is read: a writer that came between would not wait for this
        // reader.
        let index = unsafe { sys::gnt_srcu_read_lock(self.domain) };
        let value = self.current.load(Ordering::Acquire);
        SrcuGuard { srcu: self, value, index }
    }

    /// Publishes `new`, waits until no reader holds the old value, and returns that.
    ///
    /// Writers exclude each other by a lock of their own. Sleeps; never call it with a guard held.
    pub fn replace(&self, new: KBox<T>) -> KBox<T> {
        sys::might_sleep();
        // Published before the wait: readers that come from here on see the new value, and are not
        // waited for.
        let old = self.current.swap(new.into_raw(), Ordering::AcqRel);
        // SAFETY: the domain lives as long as self.
        unsafe { sys::gnt_srcu_synchronize(self.domain) };
        // SAFETY: old came from into_raw, and nobody reads it any more.
        unsafe { KBox::from_raw(old) }
    }

    /// Waits until no reader of this moment is left. Sleeps; never call it with a guard held.
    pub fn wait(&self) {
        sys::might_sleep();
        // SAFETY: the domain lives as long as self.
        unsafe { sys::gnt_srcu_synchronize(self.domain) };
    }

    /// The value, when the borrow is unique.
    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: published pointers come from KBox::into_raw; no reader exists.
        unsafe { &mut **self.current.get_mut() }
    }
}

impl<T> Drop for Srcu<T> {
    fn drop(&mut self) {
        // SAFETY: guards borrow self, so no reader is left; both are freed once.
        unsafe {
            sys::gnt_srcu_free(self.domain);
            drop(KBox::from_raw(*self.current.get_mut()));
        }
    }
}

/// A read-side section.
#[must_use]
pub struct SrcuGuard<'a, T> {
    srcu: &'a Srcu<T>,
    value: *const T,
    index: i32,
}

impl<T> Deref for SrcuGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the section keeps the value published at its start alive.
        unsafe { &*self.value }
    }
}

impl<T> Drop for SrcuGuard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: entered by this guard, with this index.
        unsafe { sys::gnt_srcu_read_unlock(self.srcu.domain, self.index) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_keeps_what_it_saw_until_it_leaves() {
        let srcu = Srcu::new(KBox::new(vec![1u64; 64]).unwrap()).unwrap();
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..2_000 {
                        let seen = srcu.read();
                        let first = seen[0];
                        std::thread::yield_now();
                        assert!(seen.iter().all(|w| *w == first));
                    }
                });
            }
            s.spawn(|| {
                for round in 2..200 {
                    let mut old = srcu.replace(KBox::new(vec![round; 64]).unwrap());
                    old.fill(u64::MAX);
                }
            });
        });
        assert_eq!(srcu.read()[0], 199);
    }
}
