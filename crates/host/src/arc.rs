//! `Arc`: a shared owner whose allocation can fail. No weak references.
//!
//! A file of the kernel keeps one as its `private_data` (`into_raw` / `from_raw`).

use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering, fence};

use crate::boxed::{allocate, release};
use crate::error::NoMemory;

/// More owners than this can only be a leak; the count saturates there and the object lives on.
const SATURATED: usize = isize::MAX as usize;

#[repr(C)]
struct Shared<T> {
    owners: AtomicUsize,
    value: T,
}

/// A reference-counted `T` on the kernel's heap.
pub struct Arc<T> {
    shared: NonNull<Shared<T>>,
}

// SAFETY: Arc hands out &T on any thread and drops T on any thread.
unsafe impl<T: Send + Sync> Send for Arc<T> {}
// SAFETY: a reference to an Arc gives &T to any thread, and a clone that may drop the T there.
unsafe impl<T: Send + Sync> Sync for Arc<T> {}

impl<T> Arc<T> {
    /// Moves `value` to the heap with one owner.
    pub fn new(value: T) -> Result<Self, NoMemory> {
        let shared = allocate::<Shared<T>>(false)?;
        let at = shared.as_ptr();
        // Field by field: a large value is copied once, and never lies on the stack as a Shared.
        // SAFETY: freshly allocated for a Shared<T>, of which these are all fields.
        unsafe {
            (&raw mut (*at).owners).write(AtomicUsize::new(1));
            (&raw mut (*at).value).write(value);
        }
        Ok(Self { shared })
    }

    /// Makes a value in its place on the heap, with one owner: a large one never lies on the stack.
    #[inline]
    pub fn make(make: impl FnOnce() -> T) -> Result<Self, NoMemory> {
        let shared = allocate::<Shared<T>>(false)?;
        let at = shared.as_ptr();
        // SAFETY: freshly allocated for a Shared<T>, of which these are all fields; `make` may not touch them.
        unsafe {
            (&raw mut (*at).owners).write(AtomicUsize::new(1));
            (&raw mut (*at).value).write(make());
        }
        Ok(Self { shared })
    }

    /// Whether both are owners of the same object.
    pub fn ptr_eq(a: &Self, b: &Self) -> bool {
        a.shared == b.shared
    }

    /// The object's address, good for comparing and for [`Arc::from_raw`].
    pub fn as_ptr(&self) -> *const T {
        // SAFETY: the allocation lives; only the address of the field is taken.
        unsafe { &raw const (*self.shared.as_ptr()).value }
    }

    /// Gives up this ownership without dropping; [`Arc::from_raw`] takes it back.
    pub fn into_raw(self) -> *const T {
        // Forgotten, so that the count keeps this owner.
        ManuallyDrop::new(self).as_ptr()
    }

    /// # Safety
    /// `ptr` came from [`Arc::into_raw`] (or `as_ptr` of an owner given up) of the same `T`, and
    /// each ownership is taken back once.
    pub unsafe fn from_raw(ptr: *const T) -> Self {
        // The offset and not a cast: the value's alignment decides where it lies behind the count.
        let offset = core::mem::offset_of!(Shared<T>, value);
        // SAFETY: the value lies at that offset in its Shared.
        let shared = unsafe { ptr.byte_sub(offset) }.cast::<Shared<T>>().cast_mut();
        // SAFETY: derived from a live allocation.
        Self { shared: unsafe { NonNull::new_unchecked(shared) } }
    }

    /// # Safety
    /// `ptr` is the address of a live `Arc`'s object, as [`Arc::as_ptr`] gives.
    pub unsafe fn clone_from_raw(ptr: *const T) -> Self {
        // SAFETY: passed on; ManuallyDrop keeps the borrowed ownership untouched.
        let borrowed = ManuallyDrop::new(unsafe { Self::from_raw(ptr) });
        Self::clone(&borrowed)
    }

    /// Number of owners at this moment; only good for tests and diagnostics.
    pub fn owners(&self) -> usize {
        self.inner().owners.load(Ordering::Relaxed)
    }

    /// The value, if this is the only owner.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        // Pairs with the Release of the owner who went last: what that one did with the value is
        // done.
        if self.inner().owners.load(Ordering::Acquire) != 1 {
            return None;
        }
        // SAFETY: the only owner, borrowed uniquely; no weak references exist.
        Some(unsafe { &mut (*self.shared.as_ptr()).value })
    }

    #[inline]
    fn inner(&self) -> &Shared<T> {
        // SAFETY: this owner keeps the allocation alive.
        unsafe { self.shared.as_ref() }
    }
}

impl<T> Clone for Arc<T> {
    fn clone(&self) -> Self {
        // Relaxed: who clones is an owner already, and orders nothing by it.
        let before = self.inner().owners.fetch_add(1, Ordering::Relaxed);
        // Others may go past the mark between the two steps. There are not as many CPUs as would
        // reach the wrap.
        if before >= SATURATED {
            self.inner().owners.store(SATURATED, Ordering::Relaxed);
        }
        Self { shared: self.shared }
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        let owners = &self.inner().owners;
        // Release here and the fence below: whatever an owner did with the value comes before its
        // drop.
        if owners.load(Ordering::Relaxed) >= SATURATED
            || owners.fetch_sub(1, Ordering::Release) != 1
        {
            return;
        }
        // Pairs with the Release of every other owner's drop.
        fence(Ordering::Acquire);
        // SAFETY: the last owner is gone: the value and its memory go here, once.
        unsafe {
            core::ptr::drop_in_place(&raw mut (*self.shared.as_ptr()).value);
            release(self.shared);
        }
    }
}

impl<T> Deref for Arc<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.inner().value
    }
}

impl<T: fmt::Debug> fmt::Debug for Arc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_owner_drops_the_value() {
        let counted = std::sync::Arc::new(());
        let first = Arc::new(counted.clone()).unwrap();
        let second = first.clone();
        assert!(Arc::ptr_eq(&first, &second));
        drop(first);
        assert_eq!(std::sync::Arc::strong_count(&counted), 2);
        drop(second);
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
    }

    #[test]
    fn a_raw_pointer_round_trips_whatever_the_alignment() {
        #[repr(align(128))]
        struct Wide(u8);
        let arc = Arc::new(Wide(7)).unwrap();
        let raw = arc.into_raw();
        // SAFETY: raw came from into_raw just now.
        let clone = unsafe { Arc::clone_from_raw(raw) };
        // SAFETY: raw's own ownership is taken back once.
        let arc = unsafe { Arc::from_raw(raw) };
        assert_eq!((arc.0, clone.0, arc.owners()), (7, 7, 2));
    }

    #[test]
    fn a_shared_value_cannot_be_borrowed_uniquely() {
        let mut arc = Arc::new(1).unwrap();
        let other = arc.clone();
        assert!(arc.get_mut().is_none());
        drop(other);
        *arc.get_mut().unwrap() = 2;
        assert_eq!(*arc, 2);
    }
}
