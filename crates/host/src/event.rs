//! Eventfds: signalling one (ioeventfd, resample) and hearing from one (irqfd).
//!
//! Why a watch is called by the one who signals, and no thread is woken for it: an interrupt from a device of the VMM's is
//! then on its way before its write() returns. The price is the context: interrupts are off, and the eventfd's
//! lock is held, so no lock may be taken under which an eventfd is signalled.

use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::ops::Deref;

use crate::arc::Arc;
use crate::error::{BadFd, NoMemory};
use crate::sys::{self, WatchCalls};

/// An eventfd that can be signalled; keeps the counter alive after the fd is closed.
#[derive(Debug)]
pub struct EventFd {
    context: *mut sys::EventFdRaw,
}

// SAFETY: the kernel's eventfd_ctx is reference-counted and locks itself.
unsafe impl Send for EventFd {}
// SAFETY: the kernel's functions on an eventfd_ctx may be called by many CPUs at once.
unsafe impl Sync for EventFd {}

impl EventFd {
    /// The eventfd behind descriptor `fd` of the current task.
    pub fn get(fd: i32) -> Result<Self, BadFd> {
        let context = sys::gnt_eventfd_get(fd);
        match () {
            () if !context.is_null() => Ok(Self { context }),
            () if sys::gnt_fd_is_open(fd) != 0 => Err(BadFd::WrongKind),
            () => Err(BadFd::Closed),
        }
    }

    /// Adds `count`, which is 1 unless a test wants otherwise, to the counter. From any context.
    /// (Kernels from 6.8 on add 1 for any count that is not 0.)
    pub fn signal(&self, count: u64) {
        // SAFETY: the reference is held.
        unsafe { sys::gnt_eventfd_signal(self.context, count) }
    }

    /// Whether both are the same eventfd.
    pub fn same(&self, other: &Self) -> bool {
        self.context == other.context
    }
}

impl Drop for EventFd {
    fn drop(&mut self) {
        // SAFETY: the reference is this value's own, and dropped once.
        unsafe { sys::gnt_eventfd_put(self.context) }
    }
}

/// What to do when a watched eventfd is signalled.
pub trait EventHandler: Send + Sync {
    /// The counter was signalled, and has been set to 0. Called with interrupts off and the
    /// eventfd's lock held: must not sleep nor signal the same eventfd.
    fn fired(&self);
    /// The last descriptor was closed. Same context; must not drop the [`Watch`] here.
    fn hung_up(&self);
}

const EBADF: i32 = -9;
const EBUSY: i32 = -16;

/// Why an eventfd cannot be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchError {
    /// Not an eventfd.
    BadFd(BadFd),
    /// Somebody else hears of it first, whom newer kernels give it to alone.
    Busy,
    /// There is no memory for it (`-ENOMEM`).
    NoMemory,
}

impl From<NoMemory> for WatchError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// A `T` that hears of an eventfd's signals until it is dropped.
#[repr(C)]
pub struct Watch<T: EventHandler> {
    watch: UnsafeCell<sys::WatchRaw>,
    value: T,
}

// SAFETY: the raw watch is only touched when attaching and detaching.
unsafe impl<T: EventHandler> Send for Watch<T> {}
// SAFETY: a reference to a Watch gives &T, which may be shared (EventHandler is Sync), and the eventfd's address.
unsafe impl<T: EventHandler> Sync for Watch<T> {}

struct Calls<T>(core::marker::PhantomData<T>);

impl<T: EventHandler> Calls<T> {
    const TABLE: WatchCalls = WatchCalls { fired: fired::<T>, hung_up: hung_up::<T> };
}

impl<T: EventHandler> Watch<T> {
    /// Starts hearing from `event`, which descriptor `fd` of the current task names. A counter that is set already
    /// calls [`EventHandler::fired`] before this returns.
    ///
    /// # Errors
    /// [`WatchError::BadFd`] with [`BadFd::Closed`] also where the descriptor names another eventfd by now: what the
    /// caller has found out about `event` is not true of that one.
    #[allow(clippy::new_ret_no_self, reason = "the kernel links the watch: it may not move")]
    pub fn new(fd: i32, event: &EventFd, value: T) -> Result<Arc<Self>, WatchError> {
        let raw = UnsafeCell::new(sys::WatchRaw::new());
        let arc = Arc::new(Self { watch: raw, value })?;
        // The value's own address, which is fixed from here on: C hands it back with each call.
        let context = (&raw const arc.value).cast_mut().cast::<c_void>();
        let (watch, calls) = (arc.watch.get(), &Calls::<T>::TABLE);
        // SAFETY: the watch will not move again, and Drop detaches it before the value goes.
        match unsafe { sys::gnt_watch_attach(watch, fd, event.context, calls, context) } {
            0 => Ok(arc),
            // The kernel's errno: numbers are all that crosses the border.
            EBADF => Err(WatchError::BadFd(BadFd::Closed)),
            EBUSY => Err(WatchError::Busy),
            _ => Err(WatchError::BadFd(BadFd::WrongKind)),
        }
    }

    /// Whether this watches the eventfd of `other`.
    pub fn watches(&self, other: &EventFd) -> bool {
        // SAFETY: attached by new().
        unsafe { sys::gnt_watch_context(self.watch.get()) == other.context }
    }
}

impl<T: EventHandler> Drop for Watch<T> {
    fn drop(&mut self) {
        // SAFETY: zeroed or attached by new(); one that never attached is left alone.
        unsafe { sys::gnt_watch_detach(self.watch.get()) }
    }
}

impl<T: EventHandler> Deref for Watch<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

/// # Safety
/// `context` is the value of an attached `Watch<T>`; so for the function below.
unsafe extern "C" fn fired<T: EventHandler>(context: *mut c_void) {
    // SAFETY: Watch::drop detaches before the value goes.
    unsafe { &*context.cast::<T>() }.fired();
}
unsafe extern "C" fn hung_up<T: EventHandler>(context: *mut c_void) {
    // SAFETY: Watch::drop detaches before the value goes.
    unsafe { &*context.cast::<T>() }.hung_up();
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::std_port::test;

    #[derive(Default)]
    struct Heard {
        fired: AtomicU32,
        hung_up: AtomicU32,
    }

    impl EventHandler for Heard {
        fn fired(&self) {
            self.fired.fetch_add(1, Ordering::Relaxed);
        }
        fn hung_up(&self) {
            self.hung_up.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_watch_hears_each_signal_until_it_is_dropped() {
        let fd = test::eventfd();
        let event = EventFd::get(fd).unwrap();
        event.signal(1);
        assert_eq!(test::eventfd_read(fd), 1);
        let watch = Watch::new(fd, &event, Heard::default()).unwrap();
        assert!(watch.watches(&event));
        event.signal(1);
        event.signal(1);
        assert_eq!(watch.fired.load(Ordering::Relaxed), 2);
        test::eventfd_close(fd);
        assert_eq!(watch.hung_up.load(Ordering::Relaxed), 1);
        drop(watch);
        event.signal(3);
    }

    #[test]
    fn a_counter_that_is_set_fires_when_the_watch_begins() {
        let fd = test::eventfd();
        let event = EventFd::get(fd).unwrap();
        event.signal(1);
        let watch = Watch::new(fd, &event, Heard::default()).unwrap();
        assert_eq!(watch.fired.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_descriptor_that_is_no_eventfd_is_refused() {
        assert_eq!(EventFd::get(-1).unwrap_err(), BadFd::Closed);
        let event = EventFd::get(test::eventfd()).unwrap();
        let refused = Watch::new(-1, &event, Heard::default()).err();
        assert_eq!(refused, Some(WatchError::BadFd(BadFd::Closed)));
    }

    #[test]
    fn a_descriptor_that_names_another_eventfd_by_now_is_refused() {
        let (fd, other) = (test::eventfd(), test::eventfd());
        let (event, another) = (EventFd::get(fd).unwrap(), EventFd::get(other).unwrap());
        another.signal(1);
        let refused = Watch::new(other, &event, Heard::default()).err();
        assert_eq!(refused, Some(WatchError::BadFd(BadFd::Closed)));
        // Nobody hears of either.
        event.signal(1);
        assert_eq!([fd, other].map(test::eventfd_read), [1, 1]);
    }
}
