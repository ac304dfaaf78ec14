//! What all vCPUs of a VM share of time: the clock behind kvmclock, and the matching of TSCs that
//! a VMM writes one vCPU after the other.

use core::num::NonZeroU32;

use host::{KBox, NoMemory, clock};
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
#[derive(Debug)]
pub struct Time {
    /// The guest's clock.
    pub clock: VmClock,
    /// The host's clock source when the clock was last sampled.
    pub source: u32,
    // Not in place: a VM is made on the stack.
    tsc: KBox<TscMatch>,
    /// All vCPUs have one TSC, as their clock pages say.
    in_step: bool,
}

impl Time {
    /// A clock that starts at zero now.
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self {
            clock: VmClock::new(&host_time()),
            source: clock::source_generation(),
            tsc: KBox::make(TscMatch::new)?,
            in_step: true,
        })
    }

    /// Whether the TSCs of all vCPUs are one: only then a guest may read the clock by any vCPU's page.
    pub fn in_step(&self) -> bool {
        self.in_step
    }

    /// After a change of one of `vcpus` TSCs: whether what the clock pages say of them has changed.
    pub fn follow_tscs(&mut self, vcpus: u32) -> bool {
        let in_step = self.tsc.members >= vcpus;
        core::mem::replace(&mut self.in_step, in_step) != in_step
    }

    /// The offsets of the TSCs.
    pub fn tsc(&mut self) -> &mut TscMatch {
        &mut self.tsc
    }
}

/// The host's TSC as a vCPU sees it, scaled to its frequency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaledTsc {
    /// The TSC's value, at the vCPU's frequency.
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

/// Of which round of settings, in which vCPUs are given one TSC, a vCPU's is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round(u64);

/// Keeps the TSCs of a VM's vCPUs in step.
#[derive(Clone, Copy, Debug, Default)]
pub struct TscMatch {
    /// Which round it is, and how many vCPUs have its TSC.
    round: u64,
    members: u32,
    /// The last TSC write of a VMM.
    last_write: Option<Write>,
    /// Offset that new vCPUs of a frequency get: the first one's, or what a VMM has set since.
    first_offset: Option<Offset>,
}

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
    #[inline(never)]
    fn new() -> Self {
        Self::default()
    }

    /// The TSC offset of a new vCPU: zero guest TSC at the first one's making, and the same offset
    /// for the others, so that they run in step.
    pub fn new_vcpu_offset(&mut self, host: ScaledTsc, khz: u32, mine: &mut Round) -> u64 {
        let khz = NonZeroU32::new(khz).unwrap_or(NonZeroU32::MIN);
        let offset = self.offset_now(host, khz).unwrap_or(host.now.wrapping_neg());
        self.join(offset, host, khz, mine);
        offset
    }

    /// The offset for a VMM's write of `value` at host TSC `host`. A write within a second
    /// of what an earlier write to another vCPU has become by now is the same write meant for
    /// this one: the offsets match (KVM does so since TSCs are set one by one).
    pub fn match_write(&mut self, value: u64, host: ScaledTsc, khz: u32, mine: &mut Round) -> u64 {
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
                self.join(last.offset(), host, khz, mine);
                return last.offset();
            }
        }
        let offset = value.wrapping_sub(host.now);
        // The first of a round.
        self.note(offset, host, khz, mine);
        offset
    }

    /// The VMM has set a vCPU's TSC at host TSC `host`, by an offset of its choice: writes to other vCPUs are
    /// compared with it, and vCPUs to come follow it.
    pub fn note_offset(&mut self, offset: u64, host: ScaledTsc, khz: u32, mine: &mut Round) {
        self.note(offset, host, NonZeroU32::new(khz).unwrap_or(NonZeroU32::MIN), mine);
    }

    /// A vCPU's TSC runs at another rate from now on, or from another value.
    pub fn leave(&mut self, mine: &mut Round) {
        if mine.0 != 0 && mine.0 == self.round {
            self.members = self.members.saturating_sub(1);
        }
        *mine = Round::default();
    }

    fn note(&mut self, offset: u64, host: ScaledTsc, khz: NonZeroU32, mine: &mut Round) {
        let (value, source) = (host.now.wrapping_add(offset), clock::source_generation());
        self.last_write = Some(Write { value, at: host.now, khz, source });
        self.join(offset, host, khz, mine);
    }

    /// The offset of this round by now: it has followed the host's sleeps since it was made.
    fn offset_now(&self, host: ScaledTsc, khz: NonZeroU32) -> Option<u64> {
        let first = self.first_offset.filter(|first| first.khz == khz)?;
        Some(first.ticks.wrapping_add(host.lost.wrapping_sub(first.lost)))
    }

    /// A vCPU has this offset from now on: that of the round, or the first of another one.
    fn join(&mut self, offset: u64, host: ScaledTsc, khz: NonZeroU32, mine: &mut Round) {
        if self.offset_now(host, khz) != Some(offset) {
            self.first_offset = Some(Offset { ticks: offset, lost: host.lost, khz });
            self.round += 1;
            self.members = 0;
        }
        if mine.0 != self.round {
            mine.0 = self.round;
            self.members = self.members.saturating_add(1);
        }
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
        let first = t.match_write(5_000_000, at(1_000), khz, &mut Round::default());
        assert_eq!(first, 4_999_000);
        assert_eq!(t.match_write(5_000_000, at(90_000), khz, &mut Round::default()), first);
        let far = t.match_write(5_000_000_000_000, at(90_000), khz, &mut Round::default());
        assert_ne!(far, first);
    }

    #[test]
    fn a_write_to_a_vcpu_of_another_frequency_is_one_of_its_own() {
        let mut t = TscMatch::default();
        t.match_write(5_000_000, at(1_000), 1_000_000, &mut Round::default());
        assert_eq!(
            t.match_write(0, at(90_000), 2_000_000, &mut Round::default()),
            90_000u64.wrapping_neg()
        );
        assert_eq!(
            t.match_write(0, at(91_000), 2_000_000, &mut Round::default()),
            90_000u64.wrapping_neg()
        );
    }

    #[test]
    fn an_offset_that_is_set_is_a_write_of_the_tsc() {
        let mut t = TscMatch::default();
        t.new_vcpu_offset(at(100), 7, &mut Round::default());
        t.note_offset(5_000, at(1_000), 7, &mut Round::default());
        assert_eq!(t.new_vcpu_offset(at(9_000), 7, &mut Round::default()), 5_000);
        assert_eq!(
            t.match_write(6_100, at(1_050), 7, &mut Round::default()),
            5_000,
            "within a second of what it is by now"
        );
        t.note_offset(9, at(1_000), 8, &mut Round::default());
        assert_eq!(
            t.match_write(0, at(2_000), 7, &mut Round::default()),
            2_000u64.wrapping_neg(),
            "another frequency"
        );
    }

    #[test]
    fn all_new_vcpus_have_the_first_ones_offset() {
        let mut t = TscMatch::default();
        let first = t.new_vcpu_offset(at(100), 7, &mut Round::default());
        assert_eq!(first, 100u64.wrapping_neg());
        assert_eq!(t.new_vcpu_offset(at(900), 7, &mut Round::default()), first);
        // The VMM has chosen another frequency since.
        assert_eq!(t.new_vcpu_offset(at(900), 8, &mut Round::default()), 900u64.wrapping_neg());
    }

    #[test]
    fn over_a_sleep_of_the_host_new_vcpus_follow_and_writes_are_forgotten() {
        let mut t = TscMatch::default();
        let khz = 1_000_000;
        let first = t.match_write(5_000_000, at(900_000), khz, &mut Round::default());
        host::std_port::test::clock().sleep(1_000, 800_000);
        let awake = ScaledTsc { now: 100, lost: 800_000 };
        assert_eq!(
            t.new_vcpu_offset(awake, khz, &mut Round::default()),
            first.wrapping_add(800_000)
        );
        // Within a second of what the write has become, were it not for the sleep.
        assert_eq!(t.match_write(5_000_000, awake, khz, &mut Round::default()), 4_999_900);
        assert_eq!(t.new_vcpu_offset(awake, khz, &mut Round::default()), 4_999_900);
    }

    #[test]
    fn vcpus_are_in_step_if_all_are_of_one_round() {
        let (mut time, mut rounds) = (Time::new().unwrap(), [Round::default(); 2]);
        let host = clock::snapshot();
        let at = |n: u64| ScaledTsc { now: host.tsc + n, lost: 0 };
        let khz = 1_000_000;
        let [a, b] = &mut rounds;
        time.tsc().new_vcpu_offset(at(1), khz, a);
        assert!(!time.follow_tscs(1) && time.in_step());
        time.tsc().new_vcpu_offset(at(2), khz, b);
        assert!(!time.follow_tscs(2) && time.in_step());
        // A VMM sets one after the other.
        time.tsc().match_write(1 << 50, at(3), khz, a);
        assert!(time.follow_tscs(2) && !time.in_step());
        time.tsc().match_write(1 << 50, at(4), khz, b);
        assert!(time.follow_tscs(2) && time.in_step());
        time.tsc().match_write(1 << 50, at(5), khz, b);
        assert!(!time.follow_tscs(2), "once more the same");
        time.tsc().note_offset(77, at(6), khz, b);
        assert!(time.follow_tscs(2) && !time.in_step());
        time.tsc().note_offset(77, at(7), khz, a);
        assert!(time.follow_tscs(2) && time.in_step());
        // Another rate, and back.
        time.tsc().leave(a);
        time.tsc().leave(a);
        assert!(time.follow_tscs(2) && !time.in_step());
        time.tsc().note_offset(77, at(8), khz, a);
        assert!(time.follow_tscs(2) && time.in_step());
    }
}
