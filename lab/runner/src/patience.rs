//! How long a machine is waited for: as long as its console moves, within a generous limit. A fixed time would end machines that are
//! merely slow beside other work.

use crate::{Emulator, Kernel, Machine};
use std::cell::Cell;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a machine is waited for, by its own [`Clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Ends a machine whose console has shown nothing for so long.
    pub quiet: Duration,
    /// Ends a machine that has run for so long, whatever its console shows: a loop that prints ends, too.
    pub longest: Duration,
}

impl Patience {
    /// What suits a machine whose command prints what it does. Bochs is several times as slow as QEMU.
    pub fn of(machine: Machine) -> Self {
        let (quiet, longest) = match machine.emulator() {
            Emulator::Qemu => (120, 3600),
            Emulator::Bochs => (300, 4 * 3600),
        };
        Self { quiet: Duration::from_secs(quiet), longest: Duration::from_secs(longest) }
    }

    /// The same for a kernel that is slow itself.
    pub fn on(self, kernel: Kernel) -> Self {
        let times = kernel.slowness();
        Self { quiet: self.quiet * times, longest: self.longest * times }
    }

    /// Patience for a command that may be silent for so many seconds.
    pub fn with_quiet(self, seconds: u64) -> Self {
        let quiet = Duration::from_secs(seconds);
        Self { quiet, longest: self.longest.max(quiet) }
    }
}

/// Why a machine is waited for no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenUp {
    /// Its console showed nothing for so long.
    Quiet(Duration),
    /// It ran for so long without coming to its end.
    Longest(Duration),
}

impl fmt::Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GivenUp::Quiet(limit) => {
                write!(f, "nothing came on the machine's console for {} s", limit.as_secs())
            }
            GivenUp::Longest(limit) => {
                write!(f, "the machine did not finish within {} s", limit.as_secs())
            }
        }
    }
}

/// Waits with patience. All times are those of the machine's [`Clock`].
#[derive(Debug)]
pub struct Watch {
    patience: Patience,
    heard: Duration,
}

impl Watch {
    /// Begins to wait, at time 0.
    pub fn new(patience: Patience) -> Self {
        Self { patience, heard: Duration::ZERO }
    }

    /// Notes that the console showed something.
    pub fn heard(&mut self, now: Duration) {
        self.heard = self.heard.max(now);
    }

    /// How long the machine may still be silent, or why it is given up.
    pub fn left(&self, now: Duration) -> Result<Duration, GivenUp> {
        let Patience { quiet, longest } = self.patience;
        let of_all = longest.saturating_sub(now);
        let of_quiet = self.heard.saturating_add(quiet).saturating_sub(now);
        if of_all.is_zero() {
            Err(GivenUp::Longest(longest))
        } else if of_quiet.is_zero() {
            Err(GivenUp::Quiet(quiet))
        } else {
            Ok(of_all.min(of_quiet))
        }
    }
}

/// The time that a machine had: since its start, less what its emulator waited for a CPU of this machine while others had them all.
pub struct Clock {
    started: Instant,
    emulator: u32,
    /// The longest wait that was seen: its thread may have ended since.
    waited: Cell<Duration>,
}

impl Clock {
    /// Starts with an emulator, given by its process.
    pub fn start(emulator: u32) -> Self {
        Self { started: Instant::now(), emulator, waited: Cell::default() }
    }

    /// The machine's time.
    pub fn now(&self) -> Duration {
        let waited = waited(Path::new(&format!("/proc/{}/task", self.emulator)));
        self.waited.set(self.waited.get().max(waited));
        self.started.elapsed().saturating_sub(self.waited.get())
    }

    /// Wall time.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

/// How long the thread that waited most has waited for a CPU. Kernels that do not tell (no CONFIG_SCHED_INFO) give 0.
fn waited(tasks: &Path) -> Duration {
    let of = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        // Nanoseconds on a CPU, nanoseconds in its queue, number of slices (Linux: Documentation/scheduler/sched-stats.rst).
        text.split_whitespace().nth(1)?.parse().ok()
    };
    let threads = std::fs::read_dir(tasks).into_iter().flatten().flatten();
    Duration::from_nanos(threads.filter_map(of).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const PATIENCE: Patience = Patience { quiet: s(10), longest: s(100) };

    #[test]
    fn a_silent_machine_is_given_up() {
        let watch = Watch::new(PATIENCE);
        assert_eq!(watch.left(s(0)), Ok(s(10)));
        assert_eq!(watch.left(s(9)), Ok(s(1)));
        assert_eq!(watch.left(s(10)), Err(GivenUp::Quiet(s(10))));
    }

    #[test]
    fn a_slow_machine_that_shows_something_is_not() {
        let mut watch = Watch::new(PATIENCE);
        for now in (9..90).step_by(9) {
            assert_eq!(watch.left(s(now)), Ok(s(1)), "at {now}");
            watch.heard(s(now));
        }
        assert_eq!(watch.left(s(90)), Ok(s(1)));
    }

    #[test]
    fn a_machine_that_prints_for_ever_ends() {
        let mut watch = Watch::new(PATIENCE);
        watch.heard(s(99));
        assert_eq!(watch.left(s(99)), Ok(s(1)));
        watch.heard(s(100));
        assert_eq!(watch.left(s(100)), Err(GivenUp::Longest(s(100))));
    }

    #[test]
    fn a_command_may_be_silent_for_longer_than_others() {
        let patience = PATIENCE.with_quiet(300);
        assert_eq!(patience, Patience { quiet: s(300), longest: s(300) });
        assert_eq!(PATIENCE.with_quiet(2), Patience { quiet: s(2), longest: s(100) });
    }

    #[test]
    fn what_a_thread_waited_for_a_cpu_is_read() {
        let folder = std::env::temp_dir().join(format!("gannet-lab-{}", std::process::id()));
        for (thread, line) in [("1", "9 2000000000 7\n"), ("2", "99 1 7\n"), ("3", "cut")] {
            std::fs::create_dir_all(folder.join(thread)).unwrap();
            std::fs::write(folder.join(thread).join("schedstat"), line).unwrap();
        }
        let found = waited(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, s(2));
        assert_eq!(waited(&folder), s(0), "a process that is gone, a kernel that does not tell");
    }

    #[test]
    fn the_machines_time_does_not_outrun_the_wall() {
        let clock = Clock::start(std::process::id());
        let now = clock.now();
        assert!(now <= clock.elapsed());
    }
}
