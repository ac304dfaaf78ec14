//! Runs each test in a process of its own, so that one that hangs or dies costs one line and no
//! more, and everything it opened is gone before the next begins.

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

use crate::options::Options;
use crate::outcome::{Outcome, Trouble};

/// After so many seconds, on a slow kernel as many times more, a test is taken for hung, unless `LABTESTS_PATIENCE` says
/// after how many.
const PATIENCE: u64 = 60;
/// How many times as long as written all waiting may last: `LABTESTS_SLOW`, for a kernel that is slow itself.
pub fn slowness() -> u32 {
    static TIMES: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let asked = || std::env::var("LABTESTS_SLOW").ok()?.parse().ok();
    *TIMES.get_or_init(|| asked().unwrap_or(1))
}

/// How long a killed process may need to leave the kernel.
const MERCY: Duration = Duration::from_secs(5);

/// One test.
#[derive(Clone, Copy)]
pub struct Test {
    /// The file it stands in.
    pub group: &'static str,
    /// The behaviour it shows.
    pub name: &'static str,
    /// The test itself.
    pub run: fn() -> Outcome,
}

impl Test {
    /// Group and name.
    pub fn full_name(&self) -> String {
        format!("{}::{}", self.group, self.name)
    }
}

/// A [`Test`] of the function's name.
macro_rules! tests {
    ($group:literal: $($name:ident),* $(,)?) => {
        /// The tests of this group.
        pub const TESTS: &[crate::runner::Test] = &[$(
            crate::runner::Test { group: $group, name: stringify!($name), run: $name },
        )*];
    };
}
pub(crate) use tests;

/// How many tests ended how.
#[derive(Debug, Default)]
pub struct Tally {
    pub passed: u32,
    pub failed: u32,
    pub skipped: u32,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Runs `tests` one after the other and prints a line for each.
pub fn run(tests: impl Iterator<Item = Test>, options: &Options) -> Tally {
    let mut tally = Tally::default();
    for test in tests {
        let name = test.full_name();
        let start = Instant::now();
        let outcome = in_a_process(test.run);
        let time = match options.times {
            true => format!(" ({} ms)", start.elapsed().as_millis()),
            false => String::new(),
        };
        match outcome {
            Ok(()) => {
                tally.passed += 1;
                println!("ok {name}{time}");
            }
            Err(Trouble::Failed(reason)) => {
                tally.failed += 1;
                let word = if options.tap { "not ok" } else { "FAIL" };
                println!("{word} {name}: {reason}{time}");
            }
            Err(Trouble::Skipped(reason)) => {
                tally.skipped += 1;
                println!("skip {name}: {reason}{time}");
            }
        }
        let _ = std::io::stdout().flush();
    }
    tally
}

/// Runs `test` in a child process and waits for its word.
fn in_a_process(test: fn() -> Outcome) -> Outcome {
    let mut ends = [0; 2];
    // SAFETY: the array has room for both ends.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
        return Err(Trouble::Failed("no pipe".into()));
    }
    // SAFETY: the pipe is ours.
    let (mut from_child, mut to_parent) =
        unsafe { (std::fs::File::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1])) };
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // A group of its own, so that nothing that the test started outlives it.
        // SAFETY: no pointers.
        unsafe { libc::setpgid(0, 0) };
        let word = match test() {
            Ok(()) => "p".to_owned(),
            Err(Trouble::Failed(reason)) => format!("f{reason}"),
            Err(Trouble::Skipped(reason)) => format!("s{reason}"),
        };
        let _ = to_parent.write_all(word.as_bytes());
        // SAFETY: ends this process; the kernel frees what it holds, as after any VMM.
        unsafe { libc::_exit(0) };
    }
    drop(to_parent);
    if child < 0 {
        return Err(Trouble::Failed("no process".into()));
    }
    let asked = std::env::var("LABTESTS_PATIENCE").ok().and_then(|text| text.parse().ok());
    let patience = Duration::from_secs(asked.unwrap_or(PATIENCE * u64::from(slowness())));
    let ended = await_end(child, patience);
    // SAFETY: the group of our child, which perhaps is gone.
    unsafe { libc::kill(-child, libc::SIGKILL) };
    let status = match ended {
        Some(status) => status,
        None if await_end(child, MERCY).is_some() => {
            return Err(Trouble::Failed(format!("expected an end got none within {patience:?}")));
        }
        None => {
            return Err(Trouble::Failed(format!(
                "expected an end got none within {patience:?}, nor by SIGKILL"
            )));
        }
    };
    let mut word = String::new();
    let _ = from_child.read_to_string(&mut word);
    match word.split_at_checked(1) {
        Some(("p", _)) => Ok(()),
        Some(("s", reason)) => Err(Trouble::Skipped(reason.into())),
        Some((_, reason)) => Err(Trouble::Failed(reason.replace('\n', "; "))),
        None if libc::WIFSIGNALED(status) => {
            Err(Trouble::Failed(format!("expected a word got signal {}", libc::WTERMSIG(status))))
        }
        None => Err(Trouble::Failed(format!("expected a word got wait status {status:#x}"))),
    }
}

/// Waits for `child` to end; its wait status.
pub fn await_end(child: libc::pid_t, patience: Duration) -> Option<i32> {
    let (start, patience) = (Instant::now(), patience * slowness());
    loop {
        let mut status = 0;
        // SAFETY: the status has a place.
        if unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == child {
            return Some(status);
        }
        if start.elapsed() > patience {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
