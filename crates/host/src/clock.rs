//! The host's clocks, and one reading of several at the same instant for the guest's clock page.

use crate::sys;

/// CLOCK_MONOTONIC in ns. With interrupts off too.
#[inline]
pub fn monotonic_ns() -> u64 {
    sys::gnt_monotonic_ns()
}

/// CLOCK_BOOTTIME in ns: monotonic time that also runs while the machine sleeps.
pub fn boottime_ns() -> u64 {
    sys::gnt_boottime_ns()
}

/// CLOCK_REALTIME in ns since 1970.
pub fn realtime_ns() -> u64 {
    sys::gnt_realtime_ns()
}

/// The host's TSC frequency in kHz.
pub fn tsc_khz() -> u32 {
    sys::gnt_tsc_khz()
}

/// Whether the TSC runs at one rate on all CPUs and through all idle states.
pub fn tsc_is_stable() -> bool {
    sys::gnt_tsc_is_stable() != 0
}

/// Several clocks read at one instant; `struct gnt_clock_snapshot` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The TSC (only when `tsc_based`).
    pub tsc: u64,
    /// The host's CLOCK_MONOTONIC in nanoseconds.
    pub monotonic_ns: u64,
    /// The host's CLOCK_BOOTTIME in nanoseconds.
    pub boot_ns: u64,
    /// CLOCK_MONOTONIC_RAW, ns: no NTP slewing.
    pub raw_ns: u64,
    /// The host's CLOCK_REALTIME in nanoseconds.
    pub real_ns: u64,
    tsc_based: u64,
}
const _: () = assert!(size_of::<Snapshot>() == 48);

impl Snapshot {
    /// The host keeps time by the TSC, so `tsc` and the clocks belong to one instant.
    pub fn tsc_based(&self) -> bool {
        self.tsc_based != 0
    }

    /// Used by the std port.
    #[cfg(not(target_os = "none"))]
    pub(crate) fn of_test(now: u64, slept: u64, lost: u64) -> Self {
        Self {
            tsc: now.wrapping_sub(lost),
            monotonic_ns: now,
            boot_ns: now + slept,
            raw_ns: now,
            real_ns: now + slept + sys::std_port::TEST_EPOCH_NS,
            tsc_based: 1,
        }
    }
}

/// Reads the clocks together.
pub fn snapshot() -> Snapshot {
    let mut out = Snapshot::default();
    sys::gnt_clock_snapshot(&mut out);
    out
}

/// A number that changes when the host's clocksource starts or stops being the TSC, and when the host has slept: clock
/// pages of guests must then be made anew, and [`tsc_lost`] be looked at.
#[inline]
pub fn source_generation() -> u32 {
    sys::gnt_clock_generation()
}

/// By how many ticks all sleeps of the host have put its TSC back, for it begins anew where power was off. It changes while
/// no task runs.
pub fn tsc_lost() -> u64 {
    sys::gnt_tsc_lost()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::std_port::test::clock;

    #[test]
    fn the_test_clock_stands_still_until_it_is_advanced() {
        let before = snapshot();
        assert_eq!(before, snapshot());
        clock().advance(1_000);
        assert_eq!(monotonic_ns(), before.monotonic_ns + 1_000);
        assert!(before.tsc_based() && realtime_ns() > boottime_ns());
    }

    #[test]
    fn a_test_can_send_its_host_to_sleep() {
        let (before, generation) = (snapshot(), source_generation());
        clock().sleep(5_000, 300);
        let after = snapshot();
        assert_ne!(source_generation(), generation);
        assert_eq!((tsc_lost(), after.tsc), (300, before.tsc - 300));
        assert_eq!(after.monotonic_ns, before.monotonic_ns);
        assert_eq!(
            (after.boot_ns, boottime_ns()),
            (before.boot_ns + 5_000, before.boot_ns + 5_000)
        );
    }
}
