//! Calls that are made to fail at one point after the other, by the kernel's fault injection: `labtests --failing`.
//!
//! A number in `/proc/thread-self/fail-nth` makes the so-manieth allocation, or copy from or to user space, that the thread does from
//! then on fail. Each call of a test is made with the numbers 1, 2, 3 … until one is not reached; only that call's answer is the
//! test's. So whatever the test asks is asked of a file that has just refused the same call at every point, and a call that leaves
//! something half done behind, or says what no refusal of memory is, fails the test.

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::outcome::Errno;

/// Beyond so many points a call is made without a fault: it would not come to an end.
const POINTS: u32 = 2000;

/// Counts of all processes of this program: in memory that they share.
pub struct Counts {
    /// Calls that were refused by injection.
    pub refused: AtomicU32,
    /// Calls that were granted in spite of it.
    pub granted: AtomicU32,
    /// The latest point of a call that was reached.
    pub most: AtomicU32,
    /// Where a command begins, by its number: after a point whose fault was survived, so that those behind it have their turn.
    pub first: [AtomicU32; 0x102],
}

/// Opening of the device, and mapping of a vCPU's pages, as numbers beside those of the commands.
pub const OPEN: u64 = 0x100;
pub const MAP: u64 = 0x101;

impl Counts {
    /// Whether there was any.
    pub fn any(&self) -> bool {
        self.refused.load(Ordering::Relaxed) > 0
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [refused, granted, most] =
            [&self.refused, &self.granted, &self.most].map(|count| count.load(Ordering::Relaxed));
        write!(f, "{refused} calls refused by injection, {granted} granted, {most} points at most")
    }
}

static COUNTS: OnceLock<&'static Counts> = OnceLock::new();

thread_local! {
    /// The thread's own file, and whose it is: after a fork it is another's.
    static FILE: RefCell<Option<(i32, File)>> = const { RefCell::new(None) };
}

/// Switches the kernel's fault injection on for this process and its children; why not, where that cannot be.
pub fn begin() -> Result<&'static Counts, String> {
    let debugfs = "/sys/kernel/debug";
    for (file, value) in [
        // Allocations that may sleep as well, and single pages; nothing of it in the log.
        ("failslab/ignore-gfp-wait", "N"),
        ("failslab/verbose", "0"),
        ("fail_page_alloc/ignore-gfp-wait", "N"),
        ("fail_page_alloc/ignore-gfp-highmem", "N"),
        ("fail_page_alloc/min-order", "0"),
        ("fail_page_alloc/verbose", "0"),
        ("fail_usercopy/verbose", "0"),
    ] {
        let path = format!("{debugfs}/{file}");
        std::fs::write(&path, value).map_err(|error| format!("{path}: {error}"))?;
    }
    // SAFETY: a new mapping, zeroed, which is never given back; `Counts` may be all zeroes.
    let counts = unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            size_of::<Counts>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page == libc::MAP_FAILED {
            return Err(format!("no shared memory: {}", Errno::last()));
        }
        &*page.cast::<Counts>()
    };
    Ok(COUNTS.get_or_init(|| counts))
}

/// Writes the number for the calling thread.
fn set(nth: u32) -> bool {
    with_file(|file| file.write_at(nth.to_string().as_bytes(), 0).is_ok()).unwrap_or(false)
}

/// How much of the number is left: 0 when the fault has been injected.
fn left() -> Option<u32> {
    with_file(|file| {
        let mut text = [0; 16];
        let bytes = file.read_at(&mut text, 0).ok()?;
        std::str::from_utf8(text.get(..bytes)?).ok()?.trim().parse().ok()
    })?
}

fn with_file<T>(work: impl FnOnce(&File) -> T) -> Option<T> {
    // SAFETY: no arguments.
    let thread = unsafe { libc::gettid() };
    FILE.with_borrow_mut(|kept| {
        if kept.as_ref().is_none_or(|(whose, _)| *whose != thread) {
            let mut options = std::fs::OpenOptions::new();
            let file = options.read(true).write(true).open("/proc/thread-self/fail-nth").ok()?;
            *kept = Some((thread, file));
        }
        kept.as_ref().map(|(_, file)| work(file))
    })
}

/// The answer of `call`, a command of that number, when it is not made to fail, after it was at every point; or, where it was granted
/// in spite of a fault, that answer. An errno that no lack of memory has is an answer, too.
pub fn at_every_point(number: u64, mut call: impl FnMut() -> i32) -> i32 {
    let Some(counts) = COUNTS.get() else { return call() };
    let first = &counts.first[number as usize % counts.first.len()];
    for nth in first.load(Ordering::Relaxed).max(1)..POINTS {
        if !set(nth) {
            break;
        }
        let answer = call();
        let errno = Errno::last();
        let injected = left() == Some(0);
        set(0);
        if injected {
            let count = if answer < 0 { &counts.refused } else { &counts.granted };
            count.fetch_add(1, Ordering::Relaxed);
            counts.most.fetch_max(nth, Ordering::Relaxed);
        }
        if answer >= 0 || !injected || ![libc::ENOMEM, libc::EFAULT].contains(&errno.0) {
            first.store(if injected { nth + 1 } else { 1 }, Ordering::Relaxed);
            // SAFETY: the calling thread's own errno, which the files above have changed.
            unsafe { *libc::__errno_location() = errno.0 };
            return answer;
        }
    }
    first.store(1, Ordering::Relaxed);
    call()
}
