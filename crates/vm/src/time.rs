//! What all vCPUs of a VM share of time: the clock behind kvmclock, and the matching of TSCs that
//! a VMM writes one vCPU after the other.

use core::num::NonZeroU32;

use host::clock;
use pv::{HostTime, VmClock};

/// The host's clocks now.
pub fn host_time() -> HostTime {
    let now = clock::snapshot();
    HostTime {
        // Only where the host's own time is the TSC's: else the two drift apart from the next
        // moment on.
        tsc: now.tsc_based().then_some(now.tsc),
        monotonic_ns: now.monotonic_ns,
        boot_ns: now.boot_ns,
        raw_ns: now.raw_ns,
        real_ns: now.real_ns,
    }
}

/// Time state behind the VM's lock.
#[derive(Clone, Copy, Debug)]
pub struct Time {
    /// The guest's clock.
    pub clock: VmClock,
    /// The host's clock source when the clock was last sampled.
    pub source: u32,
    tsc: TscMatch,
}

impl Time {
    /// A clock that starts at zero now.
    pub fn new() -> Self {
        Self {
            clock: VmClock::new(&host_time()),
            source: clock::source_generation(),
            tsc: TscMatch::default(),
        }
    }

    /// The offsets of the TSCs.
    pub fn tsc(&mut self) -> &mut TscMatch {
        &mut self.tsc
    }
}

impl Default for Time {
    fn default() -> Self {
        Self::new()
    }
}

/// The host's TSC as a vCPU sees it, scaled to its frequency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaledTsc {
    /// Its value.
    pub now: u64,
    /// By how much all sleeps of the host have put it back, which the offsets of vCPUs make up for.
    pub lost: u64,
}

/// A VMM's write of a vCPU's TSC.
#[derive(Clone, Copy, Debug)]
struct Write {
    value: u64,
    /// The host's TSC then, scaled.
    at: u64,
    /// The vCPU's frequency, kHz.
    khz: NonZeroU32,
    /// By which of the host's clocks, and since which of its sleeps.
    source: u32,
}

impl Write {
    fn offset(&self) -> u64 {
        self.value.wrapping_sub(self.at)
    }
}

/// Keeps the TSCs of a VM's vCPUs in step.
#[derive(Clone, Copy, Debug, Default)]
pub struct TscMatch {
    /// The last TSC write of a VMM.
    last_write: Option<Write>,
    /// Offset that new vCPUs of a frequency get: the first one's, or what a VMM has set since.
    first_offset: Option<Offset>,
}

// A VM is made on the stack, where there is room for no more.
const _: () = assert!(size_of::<TscMatch>() <= 48);

/// A TSC's offset, which means something at one frequency alone.
#[derive(Clone, Copy, Debug)]
struct Offset {
    ticks: u64,
    /// What the host's TSC had lost when it was made.
    lost: u64,
    /// Its frequency in kHz.
    khz: NonZeroU32,
}

impl TscMatch {
    /// The TSC offset of a new vCPU: zero guest TSC at the first one's making, and the same offset
    /// for the others, so that they run in step.
    pub fn new_vcpu_offset(&mut self, host: ScaledTsc, khz: u32) -> u64 {
        let khz = NonZeroU32::new(khz).unwrap_or(NonZeroU32::MIN);
        let first = self.first_offset.filter(|first| first.khz == khz);
        let first =
            first.unwrap_or(Offset { ticks: host.now.wrapping_neg(), lost: host.lost, khz });
        self.first_offset = Some(first);
        // The first one's has followed the host's sleeps since.
        first.ticks.wrapping_add(host.lost.wrapping_sub(first.lost))
    }

    /// The offset for a VMM's write of `value` at host TSC `host`. A write within a second
    /// of what an earlier write to another vCPU has become by now is the same write meant for
    /// this one: the offsets match (KVM does so since TSCs are set one by one).
    pub fn match_write(&mut self, value: u64, host: ScaledTsc, khz: u32) -> u64 {
        // An offset is in ticks of the guest's: one that was made for another rate means nothing here.
        let khz = NonZeroU32::new(khz).unwrap_or(NonZeroU32::MIN);
        // A write before the host slept is of another round, and so on stock KVM if its TSC began anew.
        let source = clock::source_generation();
        let is_comparable = |last: &Write| last.khz == khz && last.source == source;
        if let Some(last) = self.last_write.filter(is_comparable) {
            // Guest ticks since the last write: both times are scaled to the guest's rate.
            let expected = last.value.wrapping_add(host.now.wrapping_sub(last.at));
            let difference = value.wrapping_sub(expected) as i64;
            // A VMM restores its vCPUs within this time; two values further apart are meant to
            // differ.
            let second = i64::from(khz.get()).saturating_mul(1000);
            // A write of 0 is how VMMs reset TSCs, one vCPU after the other; stock KVM takes it for
            // a wish to be in step, too.
            if value == 0 || difference.saturating_abs() < second {
                return last.offset();
            }
        }
        let offset = value.wrapping_sub(host.now);
        // The first of a round.
        self.note(offset, host, khz);
        offset
    }

    /// The VMM has set a vCPU's TSC at host TSC `host`, by an offset of its choice: writes to other vCPUs are
    /// compared with it, and vCPUs to come follow it.
    pub fn note_offset(&mut self, offset: u64, host: ScaledTsc, khz: u32) {
        self.note(offset, host, NonZeroU32::new(khz).unwrap_or(NonZeroU32::MIN));
    }

    fn note(&mut self, offset: u64, host: ScaledTsc, khz: NonZeroU32) {
        let (value, source) = (host.now.wrapping_add(offset), clock::source_generation());
        self.last_write = Some(Write { value, at: host.now, khz, source });
        self.first_offset = Some(Offset { ticks: offset, lost: host.lost, khz });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(now: u64) -> ScaledTsc {
        ScaledTsc { now, lost: 0 }
    }

    #[test]
    fn writes_in_a_row_give_the_same_offset() {
        let mut t = TscMatch::default();
        let khz = 1_000_000;
        let first = t.match_write(5_000_000, at(1_000), khz);
        assert_eq!(first, 4_999_000);
        assert_eq!(t.match_write(5_000_000, at(90_000), khz), first);
        let far = t.match_write(5_000_000_000_000, at(90_000), khz);
        assert_ne!(far, first);
    }

    #[test]
    fn a_write_to_a_vcpu_of_another_frequency_is_one_of_its_own() {
        let mut t = TscMatch::default();
        t.match_write(5_000_000, at(1_000), 1_000_000);
        assert_eq!(t.match_write(0, at(90_000), 2_000_000), 90_000u64.wrapping_neg());
        assert_eq!(t.match_write(0, at(91_000), 2_000_000), 90_000u64.wrapping_neg());
    }

    #[test]
    fn an_offset_that_is_set_is_a_write_of_the_tsc() {
        let mut t = TscMatch::default();
        t.new_vcpu_offset(at(100), 7);
        t.note_offset(5_000, at(1_000), 7);
        assert_eq!(t.new_vcpu_offset(at(9_000), 7), 5_000);
        assert_eq!(
            t.match_write(6_100, at(1_050), 7),
            5_000,
            "within a second of what it is by now"
        );
        t.note_offset(9, at(1_000), 8);
        assert_eq!(t.match_write(0, at(2_000), 7), 2_000u64.wrapping_neg(), "another frequency");
    }

    #[test]
    fn all_new_vcpus_have_the_first_ones_offset() {
        let mut t = TscMatch::default();
        let first = t.new_vcpu_offset(at(100), 7);
        assert_eq!(first, 100u64.wrapping_neg());
        assert_eq!(t.new_vcpu_offset(at(900), 7), first);
        // The VMM has chosen another frequency since.
        assert_eq!(t.new_vcpu_offset(at(900), 8), 900u64.wrapping_neg());
    }

    #[test]
    fn over_a_sleep_of_the_host_new_vcpus_follow_and_writes_are_forgotten() {
        let mut t = TscMatch::default();
        let khz = 1_000_000;
        let first = t.match_write(5_000_000, at(900_000), khz);
        host::std_port::test::clock().sleep(1_000, 800_000);
        let awake = ScaledTsc { now: 100, lost: 800_000 };
        assert_eq!(t.new_vcpu_offset(awake, khz), first.wrapping_add(800_000));
        // Within a second of what the write has become, were it not for the sleep.
        assert_eq!(t.match_write(5_000_000, awake, khz), 4_999_900);
        assert_eq!(t.new_vcpu_offset(awake, khz), 4_999_900);
    }
}
