//! Notices of changes to the VMM's address space (the kernel's MMU notifier).
//!
//! Like a timer, the notifier lives in the allocation of what it serves, and dropping that first
//! unregisters, which waits until no notice is under way.

use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::ops::Deref;

use x86::Hva;

use crate::arc::Arc;
use crate::error::NoMemory;
use crate::sys::{self, NotifierCalls};

/// Why a notifier was not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterError {
    /// There is no memory for it (`-ENOMEM`).
    NoMemory,
    /// A signal is pending: the kernel gives up the wait for the locks of all mappings (`-EINTR`).
    Interrupted,
}

impl From<NoMemory> for RegisterError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// What to do when the address space changes. All ranges are `start..end`, page-aligned.
///
/// The handlers run while the memory manager holds locks: they must not fault user memory in,
/// allocate, or take a lock under which either is done.
pub trait InvalidateHandler: Send + Sync {
    /// Translations of the range must be gone when this returns, and none may be made until the
    /// matching [`InvalidateHandler::invalidate_end`]. Calls nest and overlap.
    fn invalidate_start(&self, start: Hva, end: Hva, may_block: bool);
    /// New translations of the range may be made again.
    fn invalidate_end(&self, start: Hva, end: Hva);
    /// Clears the accessed state of the range; returns whether it was set anywhere.
    fn clear_young(&self, start: Hva, end: Hva) -> bool;
    /// Whether the range has been accessed since it was last cleared.
    fn test_young(&self, start: Hva, end: Hva) -> bool;
    /// The address space dies: drop every translation and make no more.
    fn release(&self);
}

/// A `T` that hears of changes to the address space of the task that made it.
#[repr(C)]
pub struct WithNotifier<T: InvalidateHandler> {
    notifier: UnsafeCell<sys::NotifierRaw>,
    value: T,
}

// SAFETY: the raw notifier is only touched when registering and unregistering.
unsafe impl<T: InvalidateHandler> Send for WithNotifier<T> {}
// SAFETY: a reference gives &T, which may be shared (InvalidateHandler is Sync), and reads the raw notifier.
unsafe impl<T: InvalidateHandler> Sync for WithNotifier<T> {}

/// What the kernel answers when a signal ended the registration.
const EINTR: i32 = -4;

struct Calls<T>(core::marker::PhantomData<T>);

impl<T: InvalidateHandler> Calls<T> {
    const TABLE: NotifierCalls = NotifierCalls {
        invalidate_start: start::<T>,
        invalidate_end: end::<T>,
        clear_young: clear_young::<T>,
        test_young: test_young::<T>,
        release: release::<T>,
    };
}

impl<T: InvalidateHandler> WithNotifier<T> {
    /// Registers for the current task's address space, which is kept alive (its `mm_struct`, not
    /// its mappings) as long as this.
    ///
    /// # Errors
    /// All of [`RegisterError`]; the value is dropped then. VMMs try again after an interruption and after nothing else.
    #[allow(clippy::new_ret_no_self, reason = "the kernel links the notifier: it may not move")]
    pub fn new(value: T) -> Result<Arc<Self>, RegisterError> {
        let raw = UnsafeCell::new(sys::NotifierRaw::new());
        let arc = Arc::new(Self { notifier: raw, value })?;
        // The value's own address, which is fixed from here on: C hands it back with each notice.
        let context = (&raw const arc.value).cast_mut().cast::<c_void>();
        // SAFETY: the notifier will not move again, and Drop unregisters it before the value goes.
        match unsafe { sys::gnt_notifier_register(arc.notifier.get(), &Calls::<T>::TABLE, context) }
        {
            0 => Ok(arc),
            EINTR => Err(RegisterError::Interrupted),
            _ => Err(RegisterError::NoMemory),
        }
    }

    /// Whether the current task lives in the address space that this serves.
    pub fn is_current_mm(&self) -> bool {
        // SAFETY: initialised by new().
        unsafe { sys::gnt_notifier_is_current(self.notifier.get()) != 0 }
    }
}

impl<T: InvalidateHandler> Drop for WithNotifier<T> {
    fn drop(&mut self) {
        // SAFETY: zeroed or registered by new(); a notifier that never registered is left alone.
        unsafe { sys::gnt_notifier_unregister(self.notifier.get()) }
    }
}

impl<T: InvalidateHandler> Deref for WithNotifier<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

/// # Safety
/// `context` is the value of a registered `WithNotifier<T>`; so for the functions below.
unsafe extern "C" fn start<T: InvalidateHandler>(c: *mut c_void, start: u64, end: u64, block: i32) {
    // SAFETY: WithNotifier::drop unregisters before the value goes.
    unsafe { &*c.cast::<T>() }.invalidate_start(Hva(start), Hva(end), block != 0);
}
unsafe extern "C" fn end<T: InvalidateHandler>(c: *mut c_void, start: u64, end: u64) {
    // SAFETY: WithNotifier::drop unregisters before the value goes.
    unsafe { &*c.cast::<T>() }.invalidate_end(Hva(start), Hva(end));
}
unsafe extern "C" fn clear_young<T: InvalidateHandler>(
    c: *mut c_void,
    start: u64,
    end: u64,
) -> i32 {
    // SAFETY: WithNotifier::drop unregisters before the value goes.
    unsafe { &*c.cast::<T>() }.clear_young(Hva(start), Hva(end)).into()
}
unsafe extern "C" fn test_young<T: InvalidateHandler>(c: *mut c_void, start: u64, end: u64) -> i32 {
    // SAFETY: WithNotifier::drop unregisters before the value goes.
    unsafe { &*c.cast::<T>() }.test_young(Hva(start), Hva(end)).into()
}
unsafe extern "C" fn release<T: InvalidateHandler>(c: *mut c_void) {
    // SAFETY: WithNotifier::drop unregisters before the value goes.
    unsafe { &*c.cast::<T>() }.release();
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::std_port::test;

    #[derive(Default)]
    struct Seen(AtomicU64, AtomicU64, AtomicU64);

    impl InvalidateHandler for Seen {
        fn invalidate_start(&self, start: Hva, end: Hva, may_block: bool) {
            self.0.fetch_add(end.0 - start.0, Ordering::Relaxed);
            self.2.fetch_add(may_block.into(), Ordering::Relaxed);
        }
        fn invalidate_end(&self, start: Hva, end: Hva) {
            self.1.fetch_add(end.0 - start.0, Ordering::Relaxed);
        }
        fn clear_young(&self, _: Hva, _: Hva) -> bool {
            true
        }
        fn test_young(&self, _: Hva, _: Hva) -> bool {
            false
        }
        fn release(&self) {}
    }

    #[test]
    fn a_notice_reaches_the_handler_until_it_is_dropped() {
        let seen = WithNotifier::new(Seen::default()).unwrap();
        assert!(seen.is_current_mm());
        test::invalidate(Hva(0x1000), Hva(0x3000), || {
            assert_eq!(seen.0.load(Ordering::Relaxed), 0x2000);
            assert_eq!(seen.1.load(Ordering::Relaxed), 0);
        });
        assert_eq!(seen.1.load(Ordering::Relaxed), 0x2000);
        test::invalidate_without_sleep(Hva(0x1000), Hva(0x3000), || {});
        assert_eq!(seen.2.load(Ordering::Relaxed), 1, "who may not sleep is told so");
        drop(seen);
        test::invalidate(Hva(0x1000), Hva(0x3000), || {});
    }

    #[test]
    fn a_signal_ends_the_registration_and_leaves_nothing_behind() {
        let owner = Arc::new(()).unwrap();
        struct Owning(#[allow(dead_code, reason = "its drop is what counts")] Arc<()>);
        impl InvalidateHandler for Owning {
            fn invalidate_start(&self, _: Hva, _: Hva, _: bool) {
                unreachable!("never registered");
            }
            fn invalidate_end(&self, _: Hva, _: Hva) {}
            fn clear_young(&self, _: Hva, _: Hva) -> bool {
                false
            }
            fn test_young(&self, _: Hva, _: Hva) -> bool {
                false
            }
            fn release(&self) {}
        }
        test::set_signal_pending(true);
        let refused = WithNotifier::new(Owning(owner.clone())).err();
        test::set_signal_pending(false);
        assert_eq!((refused, owner.owners()), (Some(RegisterError::Interrupted), 1));
        test::invalidate(Hva(0x1000), Hva(0x3000), || {});
        WithNotifier::new(Owning(owner.clone())).unwrap();
        assert_eq!(owner.owners(), 1);
    }
}
