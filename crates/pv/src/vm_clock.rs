//! The VM's clock behind kvmclock: an offset from the host's, one host instant from which the pages
//! of all vCPUs are computed, and KVM_GET_CLOCK and KVM_SET_CLOCK (KVM API §4.29, §4.30).

use crate::clock::{ClockSample, Scale};

/// Flags of `struct kvm_clock_data`.
pub mod flags {
    /// The clocks of all vCPUs agree.
    pub const TSC_STABLE: u32 = 1 << 1;
    /// `realtime` is valid.
    pub const REALTIME: u32 = 1 << 2;
    /// `host_tsc` is valid.
    pub const HOST_TSC: u32 = 1 << 3;
    /// All that KVM_SET_CLOCK takes.
    pub const VALID: u32 = TSC_STABLE | REALTIME | HOST_TSC;
}

/// The host's clocks, read at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTime {
    /// The TSC; `None` when the host does not keep time by it.
    pub tsc: Option<u64>,
    /// The host's CLOCK_MONOTONIC in nanoseconds.
    pub monotonic_ns: u64,
    /// The host's CLOCK_BOOTTIME in nanoseconds.
    pub boot_ns: u64,
    /// The host's CLOCK_MONOTONIC_RAW in nanoseconds.
    pub raw_ns: u64,
    /// CLOCK_REALTIME, ns since 1970.
    pub real_ns: u64,
}

impl HostTime {
    /// The time line that guests follow: it runs at the TSC's own rate, which no NTP slews, for
    /// the guest scales the TSC by a constant; and it has run while the host slept.
    pub const fn base_ns(&self) -> u64 {
        let slept = self.boot_ns.wrapping_sub(self.monotonic_ns);
        self.raw_ns.wrapping_add(slept)
    }
}

/// What KVM_GET_CLOCK gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockData {
    /// The guest's clock, ns.
    pub clock: u64,
    /// What holds of the data: [`flags`].
    pub flags: u32,
    /// Host CLOCK_REALTIME at `clock`.
    pub realtime: u64,
    /// Host TSC at `clock`.
    pub host_tsc: u64,
}

/// The clock of one VM. Behind a lock of the VM's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmClock {
    /// Guest time minus host time, wrapping.
    offset_ns: u64,
    /// The instant all pages are computed from, when the host keeps time by the TSC.
    master: Option<Master>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Master {
    host_tsc: u64,
    base_ns: u64,
}

impl VmClock {
    /// A clock that shows zero now.
    pub const fn new(now: &HostTime) -> Self {
        // Wrapping here and below: a VMM may set any time.
        let mut clock = Self { offset_ns: now.base_ns().wrapping_neg(), master: None };
        clock.resample(now);
        clock
    }

    /// Takes a new instant to compute pages from: at creation, when the host's clock source
    /// changed, and after the host slept, which a change of its generation tells. All pages are to be published again.
    pub const fn resample(&mut self, now: &HostTime) {
        self.master = match now.tsc {
            Some(host_tsc) => Some(Master { host_tsc, base_ns: now.base_ns() }),
            None => None,
        };
    }

    /// The guest's clock.
    pub const fn now(&self, host: &HostTime) -> u64 {
        host.base_ns().wrapping_add(self.offset_ns)
    }

    /// Whether all pages come from one instant.
    pub const fn stable(&self) -> bool {
        self.master.is_some()
    }

    /// What to publish on a vCPU. `guest_tsc` turns a host TSC into that vCPU's; `now` gives the
    /// host's clocks and a TSC read with them and is asked only when there is no common instant.
    pub fn sample(
        &self,
        scale: Scale,
        guest_tsc: impl FnOnce(u64) -> u64,
        now: impl FnOnce() -> (HostTime, u64),
    ) -> ClockSample {
        // The common instant first: pages made at two instants would differ by the error of the
        // rate.
        let (host_tsc, base_ns) = match self.master {
            Some(master) => (master.host_tsc, master.base_ns),
            None => {
                let (host, tsc) = now();
                (tsc, host.base_ns())
            }
        };
        ClockSample {
            guest_tsc: guest_tsc(host_tsc),
            system_time: base_ns.wrapping_add(self.offset_ns),
            scale,
            stable: self.stable(),
        }
    }

    /// The clock as KVM_GET_CLOCK tells it (KVM API §4.29).
    pub const fn get(&self, now: &HostTime) -> ClockData {
        let mut data = ClockData { clock: self.now(now), flags: 0, realtime: 0, host_tsc: 0 };
        // The flags promise that all three readings are of one instant.
        if let (Some(_), Some(tsc)) = (&self.master, now.tsc) {
            data.flags = flags::VALID;
            data.realtime = now.real_ns;
            data.host_tsc = tsc;
        }
        data
    }

    /// KVM_SET_CLOCK: the clock shows `clock` now, or, with `realtime`, showed it at that host
    /// real time, so that the time of a migration is not lost. A real time in the future counts as
    /// now. Pages are to be published again.
    pub const fn set(&mut self, clock: u64, realtime: Option<u64>, now: &HostTime) {
        let elapsed = match realtime {
            // Stock KVM does not set a clock back by this either.
            Some(then) => now.real_ns.saturating_sub(then),
            None => 0,
        };
        // Wrapping: the VMM chooses the time freely, and only differences matter.
        self.offset_ns = clock.wrapping_add(elapsed).wrapping_sub(now.base_ns());
        // The common instant has to be of the new offset's moment, or pages of two vCPUs would not
        // agree.
        self.resample(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(ns: u64) -> HostTime {
        HostTime {
            tsc: Some(ns * 2),
            monotonic_ns: ns,
            boot_ns: ns + 100,
            raw_ns: ns,
            real_ns: 1_700_000_000_000_000_000 + ns,
        }
    }

    #[test]
    fn a_new_vm_starts_at_zero_and_runs_through_the_hosts_sleep() {
        let clock = VmClock::new(&host(1000));
        assert_eq!(clock.now(&host(1000)), 0);
        assert_eq!(clock.now(&host(1500)), 500);
        let slept = HostTime { boot_ns: host(1500).boot_ns + 7, ..host(1500) };
        assert_eq!(clock.now(&slept), 507);
    }

    #[test]
    fn all_vcpus_are_given_the_same_instant() {
        let clock = VmClock::new(&host(1000));
        let scale = Scale::from_khz(2_000_000);
        let sample = |offset| clock.sample(scale, |tsc| tsc + offset, || unreachable!());
        assert_eq!(sample(0).system_time, sample(5).system_time);
        assert_eq!(sample(5).guest_tsc, sample(0).guest_tsc + 5);
        assert!(sample(0).stable);
    }

    #[test]
    fn without_a_tsc_clock_each_sample_is_of_its_moment_and_not_stable() {
        let mut clock = VmClock::new(&host(1000));
        let blind = HostTime { tsc: None, ..host(3000) };
        clock.resample(&blind);
        let sample = clock.sample(Scale::from_khz(2_000_000), |tsc| tsc, || (blind, 77));
        assert_eq!((sample.guest_tsc, sample.system_time, sample.stable), (77, 2000, false));
        assert_eq!(clock.get(&blind).flags, 0);
    }

    #[test]
    fn migration_with_realtime_counts_the_time_on_the_way() {
        let source = VmClock::new(&host(1000));
        let saved = source.get(&host(5000));
        assert_eq!((saved.clock, saved.flags), (4000, flags::VALID));
        let mut target = VmClock::new(&host(1));
        // 300 ns later, on a host that booted at another time.
        let arrival = HostTime { real_ns: saved.realtime + 300, ..host(90) };
        target.set(saved.clock, Some(saved.realtime), &arrival);
        assert_eq!(target.now(&arrival), 4300);
        target.set(saved.clock, None, &arrival);
        assert_eq!(target.now(&arrival), 4000);
        target.set(saved.clock, Some(arrival.real_ns + 9), &arrival);
        assert_eq!(target.now(&arrival), 4000);
    }
}
