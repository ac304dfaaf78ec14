//! vCPUs in threads of their own, and how to get them back.

use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use crate::outcome::{Outcome, fail};

/// A thread that signals can be sent to, once it has said who it is.
pub struct Target(AtomicI32);

impl Target {
    /// Nobody yet.
    pub const fn new() -> Self {
        Self(AtomicI32::new(0))
    }

    /// The calling thread is the one.
    pub fn is_me(&self) {
        // SAFETY: no arguments.
        self.0.store(unsafe { libc::gettid() }, Ordering::SeqCst);
    }

    /// The thread's id; waits until it has one.
    pub fn id(&self) -> i32 {
        loop {
            match self.0.load(Ordering::SeqCst) {
                0 => std::thread::yield_now(),
                id => return id,
            }
        }
    }

    /// Sends the thread SIGUSR1, which interrupts it and does nothing.
    pub fn kick(&self) {
        prepare();
        // SAFETY: no pointers; an id that is gone gives ESRCH.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.id(), libc::SIGUSR1) };
    }

    /// Waits until the thread sleeps in the kernel; whether it does within a second.
    pub fn sleeps(&self) -> bool {
        within(Duration::from_secs(1), || self.state() == Some('S'))
    }

    /// The state letter of `/proc`.
    pub fn state(&self) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", self.id())).ok()?;
        stat.rsplit(") ").next()?.chars().next()
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// Makes SIGUSR1 harmless.
pub fn prepare() {
    static ONCE: Once = Once::new();
    // SAFETY: a handler that does nothing, without SA_RESTART, so that it interrupts.
    ONCE.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    });
}

/// Looks at `condition` until it holds or the time is over.
pub fn within(time: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let (start, time) = (Instant::now(), time * crate::runner::slowness());
    while !condition() {
        if start.elapsed() > time {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}

/// [`within`] ten seconds, or the test fails.
pub fn eventually(what: &str, condition: impl FnMut() -> bool) -> Outcome {
    match within(Duration::from_secs(10), condition) {
        true => Ok(()),
        false => fail(format!("expected that {what} got nothing within 10 s")),
    }
}
