//! `Once`: a place that is filled at most once and then read without a lock.
//!
//! For tables that live as long as the module or the VM: per-CPU state, the list of vCPUs.

use core::{
    fmt,
    marker::PhantomData,
    mem::ManuallyDrop,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::{boxed::KBox, error::NoMemory};

/// A slot for one `T`.
pub struct Once<T> {
    value: AtomicPtr<T>,
    owns: PhantomData<T>,
}

// SAFETY: a Once hands out `&T` to any thread and drops the T on one: T must be both.
unsafe impl<T: Send + Sync> Sync for Once<T> {}
// SAFETY: the T goes where the Once goes, and may be dropped and shared there: T is both.
unsafe impl<T: Send> Send for Once<T> {}

impl<T> Once<T> {
    /// An empty slot.
    pub const fn new() -> Self {
        Self { value: AtomicPtr::new(ptr::null_mut()), owns: PhantomData }
    }

    /// Fills the slot. A slot that is full stays as it is, and `value` is dropped.
    pub fn set(&self, value: T) -> Result<(), NoMemory> {
        drop(self.set_box(KBox::new(value)?));
        Ok(())
    }

    /// Fills the slot without allocating or freeing, for a caller that holds a spin lock. A slot that is full
    /// stays as it is, and the box comes back.
    pub fn set_box(&self, value: KBox<T>) -> Option<KBox<T>> {
        // Not dropped: once the slot has taken it, it is the slot's.
        let new = ManuallyDrop::new(value);
        let raw = ptr::from_ref::<T>(&new).cast_mut();
        // Acquire on failure too: who lost reads what the other has put there.
        let done =
            self.value.compare_exchange(ptr::null_mut(), raw, Ordering::AcqRel, Ordering::Acquire);
        done.is_err().then(|| ManuallyDrop::into_inner(new))
    }

    /// What it holds.
    #[inline]
    pub fn get(&self) -> Option<&T> {
        // Acquire: the value is seen as it was before it was published.
        // SAFETY: a non-null pointer came from set() and lives until drop or clear().
        unsafe { self.value.load(Ordering::Acquire).as_ref() }
    }

    /// Empties the slot.
    ///
    /// # Safety
    /// No reference that [`Once::get`] gave out is used any more.
    pub unsafe fn clear(&self) {
        // Exchanged, so that two that clear free it once.
        let raw = self.value.swap(ptr::null_mut(), Ordering::AcqRel);
        if !raw.is_null() {
            // SAFETY: it came from a KBox in set() and is taken back once, by the swap.
            drop(unsafe { KBox::from_raw(raw) });
        }
    }
}

impl<T> Default for Once<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Drop for Once<T> {
    fn drop(&mut self) {
        // SAFETY: `&mut self`: nobody holds a reference.
        unsafe { self.clear() }
    }
}

impl<T: fmt::Debug> fmt::Debug for Once<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Once").field(&self.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_stays() {
        let once = Once::new();
        assert_eq!(once.get(), None);
        once.set(1).unwrap();
        once.set(2).unwrap();
        assert_eq!(once.get(), Some(&1));
    }
}
