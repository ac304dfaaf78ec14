//! Locks that sleep and locks that spin, and SRCU.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::thread::{PREEMPT_OFF, SIGNAL, set_irqs, step};
use crate::sync::RwWords;
use crate::sys::std_port::world::World;

pub(super) static WOKEN: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());

/// Waits a moment, or until somebody is woken.
pub(super) fn nap() {
    let guard = WOKEN.0.lock().unwrap_or_else(PoisonError::into_inner);
    drop(WOKEN.1.wait_timeout(guard, Duration::from_micros(200)));
}

pub(crate) fn gnt_mutex_lock_slow(word: &AtomicU32) {
    super::thread::refuse_in_guest("gnt_mutex_lock_slow");
    // 2 and not 1: whoever holds it has to wake somebody when it goes.
    while word.swap(2, Ordering::Acquire) != 0 {
        nap();
    }
}
pub(crate) fn gnt_mutex_lock_killable_slow(word: &AtomicU32) -> i32 {
    super::thread::refuse_in_guest("gnt_mutex_lock_killable_slow");
    while word.swap(2, Ordering::Acquire) != 0 {
        if SIGNAL.get() {
            return -4;
        }
        nap();
    }
    0
}
pub(crate) fn gnt_mutex_wake(_: &AtomicU32) {
    super::thread::refuse_in_guest("gnt_mutex_wake");
    WOKEN.1.notify_all();
}
pub(crate) unsafe fn gnt_spin_lock_irqsave(word: &AtomicU32) -> usize {
    super::thread::refuse_in_guest("gnt_spin_lock_irqsave");
    // Off before the lock is had, as in the kernel: a handler may want it.
    let irqs_were_on = set_irqs(false);
    step();
    while word.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
        std::thread::yield_now();
    }
    irqs_were_on.into()
}
pub(crate) unsafe fn gnt_spin_unlock_irqrestore(word: &AtomicU32, flags: usize) {
    super::thread::refuse_in_guest("gnt_spin_unlock_irqrestore");
    word.store(0, Ordering::Release);
    set_irqs(flags != 0);
}
pub(crate) unsafe fn gnt_read_lock(words: &RwWords) {
    super::thread::refuse_in_guest("gnt_read_lock");
    PREEMPT_OFF.set(PREEMPT_OFF.get() + 1);
    loop {
        let seen = words.0[0].load(Ordering::Relaxed);
        let next = seen.wrapping_add(1);
        // The writer's mark is no count of readers.
        if seen != u32::MAX
            && words.0[0].compare_exchange(seen, next, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            return;
        }
        std::thread::yield_now();
    }
}
pub(crate) unsafe fn gnt_read_unlock(words: &RwWords) {
    super::thread::refuse_in_guest("gnt_read_unlock");
    words.0[0].fetch_sub(1, Ordering::Release);
    PREEMPT_OFF.set(PREEMPT_OFF.get().saturating_sub(1));
}
pub(crate) unsafe fn gnt_write_lock(words: &RwWords) {
    super::thread::refuse_in_guest("gnt_write_lock");
    PREEMPT_OFF.set(PREEMPT_OFF.get() + 1);
    while words.0[0].compare_exchange(0, u32::MAX, Ordering::Acquire, Ordering::Relaxed).is_err() {
        std::thread::yield_now();
    }
}
pub(crate) unsafe fn gnt_write_unlock(words: &RwWords) {
    super::thread::refuse_in_guest("gnt_write_unlock");
    words.0[0].store(0, Ordering::Release);
    PREEMPT_OFF.set(PREEMPT_OFF.get().saturating_sub(1));
}
pub(crate) unsafe fn gnt_rwlock_is_contended(_: &RwWords) -> i32 {
    super::thread::refuse_in_guest("gnt_rwlock_is_contended");
    0
}

/// Two generations of readers: a writer flips and waits for the old one, twice.
#[derive(Default)]
pub(crate) struct SrcuRaw {
    index: AtomicU32,
    readers: [AtomicU32; 2],
    writer: Mutex<()>,
}
pub(crate) fn gnt_srcu_new() -> *mut SrcuRaw {
    super::thread::refuse_in_guest("gnt_srcu_new");
    Box::into_raw(Box::default())
}
pub(crate) unsafe fn gnt_srcu_free(domain: *mut SrcuRaw) {
    super::thread::refuse_in_guest("gnt_srcu_free");
    // SAFETY: made by gnt_srcu_new, freed once.
    drop(unsafe { Box::from_raw(domain) });
}
/// Where RCU does not watch, too: VMX takes its page log there, with the host's segments.
pub(crate) unsafe fn gnt_srcu_read_lock(domain: *mut SrcuRaw) -> i32 {
    // SAFETY: the domain lives by the contract.
    let domain = unsafe { &*domain };
    let index = domain.index.load(Ordering::SeqCst) & 1;
    domain.readers[index as usize].fetch_add(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    index as i32
}
pub(crate) unsafe fn gnt_srcu_read_unlock(domain: *mut SrcuRaw, index: i32) {
    // SAFETY: the domain lives by the contract.
    unsafe { &*domain }.readers[(index & 1) as usize].fetch_sub(1, Ordering::SeqCst);
}
pub(crate) unsafe fn gnt_srcu_synchronize(domain: *mut SrcuRaw) {
    super::thread::refuse_in_guest("gnt_srcu_synchronize");
    // SAFETY: the domain lives by the contract.
    let domain = unsafe { &*domain };
    let _writer = domain.writer.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::current();
    // Twice: a reader may have read the index before the first flip and count itself behind it.
    for _ in 0..2 {
        fence(Ordering::SeqCst);
        let old = domain.index.fetch_xor(1, Ordering::SeqCst) & 1;
        let waits = || domain.readers[old as usize].load(Ordering::SeqCst) != 0;
        if waits() {
            world.lock().srcu_waiters += 1;
            while waits() {
                std::thread::yield_now();
            }
            world.lock().srcu_waiters -= 1;
        }
    }
}
