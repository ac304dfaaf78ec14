//! `KBox`: a heap allocation that can fail.
//!
//! `alloc::boxed::Box` aborts when memory runs out; a kernel must answer `-ENOMEM`. The memory
//! comes from the global allocator, in the module kmalloc or, for large objects, vmalloc.

use alloc::alloc::{alloc, alloc_zeroed, dealloc};
use core::alloc::Layout;
use core::fmt;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

use crate::error::NoMemory;

/// An owned `T` on the kernel's heap.
pub struct KBox<T> {
    ptr: NonNull<T>,
}

// SAFETY: KBox owns its T like Box does.
unsafe impl<T: Send> Send for KBox<T> {}
// SAFETY: a reference to a KBox gives &T and nothing else.
unsafe impl<T: Sync> Sync for KBox<T> {}

pub(crate) fn allocate<T>(zeroed: bool) -> Result<NonNull<T>, NoMemory> {
    let layout = Layout::new::<T>();
    if layout.size() == 0 {
        // The allocator must not be asked for nothing; a dangling pointer is never read then.
        return Ok(NonNull::dangling());
    }
    // SAFETY: the layout has a size.
    let raw = unsafe { if zeroed { alloc_zeroed(layout) } else { alloc(layout) } };
    NonNull::new(raw.cast()).ok_or(NoMemory)
}

/// # Safety
/// `ptr` came from [`allocate`] for the same `T`, whose value has been dropped or moved out.
pub(crate) unsafe fn release<T>(ptr: NonNull<T>) {
    let layout = Layout::new::<T>();
    if layout.size() != 0 {
        // SAFETY: by the contract of this function.
        unsafe { dealloc(ptr.as_ptr().cast(), layout) }
    }
}

/// Out of line: of a reference that came as an argument the compiler knows that it may hand it on to
/// `make` as the place of what that returns.
#[inline(never)]
fn fill<T>(place: &mut MaybeUninit<T>, make: impl FnOnce() -> T) {
    place.write(make());
}

impl<T> KBox<T> {
    /// Moves `value` to the heap.
    pub fn new(value: T) -> Result<Self, NoMemory> {
        let ptr = allocate::<T>(false)?;
        // SAFETY: freshly allocated for a T.
        unsafe { ptr.as_ptr().write(value) };
        Ok(Self { ptr })
    }

    /// The value that `make` makes, made once there is memory for it. If `make` is one call of a
    /// function that is not inlined, that builds the value where it stays: it lies on no stack.
    pub fn make(make: impl FnOnce() -> T) -> Result<Self, NoMemory> {
        let mut memory = Self::uninit()?;
        fill(&mut memory, make);
        // SAFETY: written just now.
        Ok(unsafe { KBox::from_raw(memory.into_raw().cast()) })
    }

    /// All bytes zero, without a copy on the stack: for large structs.
    pub fn zeroed() -> Result<Self, NoMemory>
    where
        T: zerocopy::FromZeros,
    {
        Ok(Self { ptr: allocate::<T>(true)? })
    }

    /// Uninitialised memory, to be filled in place.
    pub fn uninit() -> Result<KBox<MaybeUninit<T>>, NoMemory> {
        Ok(KBox { ptr: allocate::<MaybeUninit<T>>(false)? })
    }

    /// Gives up ownership; [`KBox::from_raw`] takes it back.
    pub fn into_raw(self) -> *mut T {
        ManuallyDrop::new(self).ptr.as_ptr()
    }

    /// # Safety
    /// `ptr` came from [`KBox::into_raw`] and is taken back once.
    pub unsafe fn from_raw(ptr: *mut T) -> Self {
        // SAFETY: into_raw never returns null.
        Self { ptr: unsafe { NonNull::new_unchecked(ptr) } }
    }

    /// Moves the value out and frees the allocation.
    pub fn into_inner(self) -> T {
        // Forgotten first: its Drop would free what is being moved out.
        let ptr = ManuallyDrop::new(self).ptr;
        // SAFETY: the box owned the value and is forgotten; the memory is freed once.
        unsafe {
            let value = ptr.as_ptr().read();
            release(ptr);
            value
        }
    }
}

impl<T> Drop for KBox<T> {
    fn drop(&mut self) {
        // SAFETY: the box owns the value and the memory, and both go here, once.
        unsafe {
            core::ptr::drop_in_place(self.ptr.as_ptr());
            release(self.ptr);
        }
    }
}

impl<T> Deref for KBox<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: owned and initialised.
        unsafe { self.ptr.as_ref() }
    }
}

impl<T> DerefMut for KBox<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: owned and initialised, borrowed uniquely.
        unsafe { self.ptr.as_mut() }
    }
}

impl<T: fmt::Debug> fmt::Debug for KBox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_drops_its_value_once() {
        let counted = std::sync::Arc::new(());
        let boxed = KBox::new(counted.clone()).unwrap();
        assert_eq!(std::sync::Arc::strong_count(&counted), 2);
        drop(boxed);
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
    }

    #[test]
    fn into_inner_moves_the_value_out() {
        let boxed = KBox::new(String::from("gannet")).unwrap();
        assert_eq!(boxed.into_inner(), "gannet");
    }

    #[test]
    fn a_zeroed_box_is_zero_and_needs_no_stack() {
        let boxed = KBox::<[u64; 1 << 20]>::zeroed().unwrap();
        assert!(boxed.iter().all(|w| *w == 0));
    }

    #[test]
    fn a_box_of_nothing_needs_no_memory() {
        drop(KBox::new(()).unwrap());
    }
}
