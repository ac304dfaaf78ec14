//! Getting a vCPU thread out of KVM_RUN: a signal whose handler does nothing interrupts the ioctl,
//! which then returns EINTR.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

/// Between two attempts: a signal that arrives just before KVM_RUN interrupts nothing.
const AGAIN: Duration = Duration::from_millis(5);
/// After so many attempts the thread is taken for stuck inside the kernel.
const ATTEMPTS: u32 = 1000;

extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Makes the signal of [`stop`] harmless. To be called once, before the first vCPU thread.
pub fn prepare() -> Result<()> {
    register_signal_handler(SIGRTMIN(), ignore).context("cannot install the signal handler")
}

/// Ends vCPU threads that look at `stopping` whenever KVM_RUN returns. `false` when one of them
/// did not come out of the kernel: it must not be joined.
pub fn stop<T>(stopping: &AtomicBool, threads: &[JoinHandle<T>]) -> bool {
    stopping.store(true, Ordering::SeqCst);
    for _ in 0..ATTEMPTS {
        let mut running = threads.iter().filter(|thread| !thread.is_finished()).peekable();
        if running.peek().is_none() {
            return true;
        }
        running.for_each(|thread| {
            // A thread that ended just now cannot be signalled, and need not.
            let _ = thread.kill(SIGRTMIN());
        });
        thread::sleep(AGAIN);
    }
    false
}
