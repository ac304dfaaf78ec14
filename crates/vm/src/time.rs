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
        // One alone is in step with itself, whatever its rate.
        let in_step = vcpus <= 1 || self.tsc.members >= vcpus;
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
    /// The offset that the vCPU got.
    offset: Offset,
}

/// Of which round of settings, in which vCPUs are given one TSC, a vCPU's is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round(u64);

/// Keeps the TSCs of a VM's vCPUs in step.
#[derive(Clone, Copy, Debug, Default)]
pub struct TscMatch {
    /// Which round it is, how many vCPUs have its TSC, and the last number that a round has got.
    round: u64,
    members: u32,
    rounds: u64,
    /// Of the vCPU in the making: there is one at a time.
    coming: Option<(Round, Offset)>,
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

impl Offset {
    /// What it is by now: it has followed the host's sleeps since it was made.
    fn now(&self, host: ScaledTsc) -> u64 {
        self.ticks.wrapping_add(host.lost.wrapping_sub(self.lost))
    }
}

impl TscMatch {
    #[inline(never)]
    fn new() -> Self {
        Self::default()
    }

    /// The TSC offset of a new vCPU: zero guest TSC at the first one's making, and the same offset
    /// for the others, so that they run in step. It has it from [`count_new_vcpu`](Self::count_new_vcpu) on:
    /// until then its making may fail, and nobody else is to notice.
    pub fn new_vcpu_offset(&mut self, host: ScaledTsc, khz: u32, mine: &mut Round) -> u64 {
        let khz = NonZeroU32::new(khz).unwrap_or(NonZeroU32::MIN);
        let (round, ticks) = match self.offset_now(host, khz) {
            Some(offset) => (self.round, offset),
            None => (self.next_round(), host.now.wrapping_neg()),
        };
        *mine = Round(round);
        self.coming = Some((*mine, Offset { ticks, lost: host.lost, khz }));
        ticks
    }

    /// The vCPU that was given an offset last counts as one from now on.
    pub fn count_new_vcpu(&mut self) {
        let Some((Round(mine), offset)) = self.coming.take() else { return };
        if mine > self.round {
            self.begin(mine, offset);
        }
        // Not if a VMM's write has begun another one meanwhile.
        if mine == self.round {
            self.members = self.members.saturating_add(1);
        }
    }

    /// The offset for a VMM's write of `value` at host TSC `host`. A write within a second
    /// of what an earlier write to another vCPU has become by now is the same write meant for
    /// this one: the offsets match (KVM does so since TSCs are set one by one).
    pub fn match_write(&mut self, value: u64, host: ScaledTsc, khz: u32, mine: &mut Round) -> u64 {
        // An offset is in ticks of the guest's: one that was made for another rate means nothing here.
        let khz = NonZeroU32::new(khz).unwrap_or(NonZeroU32::MIN);
        // Before anybody has written, too: what the making of vCPUs has given them is one TSC.
        if value == 0
            && self.last_write.is_none()
            && let Some(offset) = self.offset_now(host, khz)
        {
            self.note(0, offset, host, khz, mine);
            return offset;
        }
        if let Some(last) = self.last_write.filter(|last| last.offset.khz == khz) {
            // Guest ticks since the last write: both times are scaled to the guest's rate.
            let expected = last.value.wrapping_add(host.now.wrapping_sub(last.at));
            let difference = value.wrapping_sub(expected) as i64;
            // A VMM restores its vCPUs within this time; two values further apart are meant to
            // differ.
            let second = i64::from(khz.get()).saturating_mul(1000);
            // As on stock KVM what was written before the host's TSC began anew is not compared with. A sleep alone,
            // or another clock of the host's, is nothing to the TSC.
            let is_same = last.offset.lost == host.lost && difference.saturating_abs() < second;
            // A write of 0 is how VMMs reset TSCs, one vCPU after the other; stock KVM takes it for
            // a wish to be in step, too, however long ago the others were written.
            if value == 0 || is_same {
                let offset = last.offset.now(host);
                // From each write on there is another second for the next.
                self.note(value, offset, host, khz, mine);
                return offset;
            }
        }
        let offset = value.wrapping_sub(host.now);
        // The first of a round.
        self.note(value, offset, host, khz, mine);
        offset
    }

    /// The VMM has set a vCPU's TSC at host TSC `host`, by an offset of its choice: writes to other vCPUs are
    /// compared with it, and vCPUs to come follow it.
    pub fn note_offset(&mut self, offset: u64, host: ScaledTsc, khz: u32, mine: &mut Round) {
        let khz = NonZeroU32::new(khz).unwrap_or(NonZeroU32::MIN);
        self.note(host.now.wrapping_add(offset), offset, host, khz, mine);
    }

    /// A vCPU's TSC runs at another rate from now on, or from another value.
    pub fn leave(&mut self, mine: &mut Round) {
        if mine.0 != 0 && mine.0 == self.round {
            self.members = self.members.saturating_sub(1);
        }
        *mine = Round::default();
    }

    /// A VMM has written `value`, which has given a vCPU this offset.
    fn note(&mut self, value: u64, ticks: u64, host: ScaledTsc, khz: NonZeroU32, mine: &mut Round) {
        let offset = Offset { ticks, lost: host.lost, khz };
        self.last_write = Some(Write { value, at: host.now, offset });
        self.join(offset, host, mine);
    }

    /// The offset of this round by now.
    fn offset_now(&self, host: ScaledTsc, khz: NonZeroU32) -> Option<u64> {
        Some(self.first_offset.filter(|first| first.khz == khz)?.now(host))
    }

    /// A vCPU has this offset from now on: that of the round, or the first of another one.
    fn join(&mut self, offset: Offset, host: ScaledTsc, mine: &mut Round) {
        if self.offset_now(host, offset.khz) != Some(offset.ticks) {
            let round = self.next_round();
            self.begin(round, offset);
        }
        if mine.0 != self.round {
            mine.0 = self.round;
            self.members = self.members.saturating_add(1);
        }
    }

    fn next_round(&mut self) -> u64 {
        self.rounds += 1;
        self.rounds
    }

    fn begin(&mut self, round: u64, offset: Offset) {
        (self.round, self.members, self.first_offset) = (round, 0, Some(offset));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(now: u64) -> ScaledTsc {
        ScaledTsc { now, lost: 0 }
    }

    /// The offset of a vCPU whose making comes to an end.
    fn made(t: &mut TscMatch, host: ScaledTsc, khz: u32) -> u64 {
        let offset = t.new_vcpu_offset(host, khz, &mut Round::default());
        t.count_new_vcpu();
        offset
    }

    #[test]
    fn each_write_of_a_value_leaves_another_second_for_the_next() {
        let mut t = TscMatch::default();
        let khz = 1_000_000;
        let mut write = |now| t.match_write(5_000, at(now), khz, &mut Round::default());
        let first = write(0);
        assert_eq!([write(700_000_000), write(1_400_000_000)], [first; 2]);
        assert_ne!(write(2_500_000_000), first, "more than a second");
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
        made(&mut t, at(100), 7);
        t.note_offset(5_000, at(1_000), 7, &mut Round::default());
        assert_eq!(made(&mut t, at(9_000), 7), 5_000);
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
        // The first one's making comes to nothing.
        t.new_vcpu_offset(at(50), 7, &mut Round::default());
        let first = made(&mut t, at(100), 7);
        assert_eq!(first, 100u64.wrapping_neg());
        assert_eq!(made(&mut t, at(900), 7), first);
        // The VMM has chosen another frequency since.
        assert_eq!(made(&mut t, at(900), 8), 900u64.wrapping_neg());
    }

    #[test]
    fn over_a_sleep_of_the_host_new_vcpus_follow_and_writes_are_forgotten() {
        let mut t = TscMatch::default();
        let khz = 1_000_000;
        let first = t.match_write(5_000_000, at(900_000), khz, &mut Round::default());
        host::std_port::test::clock().sleep(1_000, 800_000);
        let awake = ScaledTsc { now: 100, lost: 800_000 };
        assert_eq!(made(&mut t, awake, khz), first.wrapping_add(800_000));
        // A vCPU that is plugged in is to be in step with the others.
        let mut zero = t;
        for _ in 0..2 {
            let offset = zero.match_write(0, awake, khz, &mut Round::default());
            assert_eq!(offset, first.wrapping_add(800_000));
        }
        assert_eq!(made(&mut zero, awake, khz), first.wrapping_add(800_000));
        // Within a second of what the write has become, were it not for the sleep.
        assert_eq!(t.match_write(5_000_000, awake, khz, &mut Round::default()), 4_999_900);
        assert_eq!(made(&mut t, awake, khz), 4_999_900);
    }

    #[test]
    fn a_sleep_that_the_tsc_survives_is_nothing_to_writes() {
        let mut t = TscMatch::default();
        let khz = 1_000_000;
        let first = t.match_write(5_000_000, at(900_000), khz, &mut Round::default());
        host::std_port::test::clock().sleep(1_000, 0);
        assert_eq!(t.match_write(5_000_000, at(950_000), khz, &mut Round::default()), first);
    }

    #[test]
    fn vcpus_are_in_step_if_all_are_of_one_round() {
        let (mut time, mut rounds) = (Time::new().unwrap(), [Round::default(); 2]);
        let host = clock::snapshot();
        let at = |n: u64| ScaledTsc { now: host.tsc + n, lost: 0 };
        let khz = 1_000_000;
        let [a, b] = &mut rounds;
        time.tsc().new_vcpu_offset(at(1), khz, a);
        time.tsc().count_new_vcpu();
        assert!(!time.follow_tscs(1) && time.in_step());
        time.tsc().new_vcpu_offset(at(2), khz, b);
        time.tsc().count_new_vcpu();
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
        // One in the making counts when it is one, which it may never be.
        let mut c = Round::default();
        time.tsc().note_offset(88, at(7), khz, b);
        assert!(time.follow_tscs(2) && !time.in_step());
        for _ in 0..2 {
            assert_eq!(time.tsc().new_vcpu_offset(at(7), khz, &mut c), 88);
            assert!(!time.follow_tscs(2) && !time.in_step());
        }
        time.tsc().new_vcpu_offset(at(7), 2 * khz, &mut Round::default());
        time.tsc().note_offset(88, at(7), khz, a);
        assert!(time.follow_tscs(2) && time.in_step(), "not for a rate that is nobody's");
        time.tsc().new_vcpu_offset(at(7), khz, &mut c);
        assert!(!time.follow_tscs(2) && time.in_step());
        // It is found already.
        assert!(time.follow_tscs(3) && !time.in_step());
        time.tsc().count_new_vcpu();
        assert!(time.follow_tscs(3) && time.in_step());
        time.tsc().count_new_vcpu();
        time.tsc().leave(&mut c);
        assert!(time.follow_tscs(3) && !time.in_step(), "once");
        time.tsc().note_offset(77, at(7), khz, b);
        time.tsc().note_offset(77, at(7), khz, a);
        assert!(time.follow_tscs(2) && time.in_step());
        // Another rate, and back.
        time.tsc().leave(a);
        time.tsc().leave(a);
        assert!(time.follow_tscs(2) && !time.in_step());
        time.tsc().note_offset(77, at(8), khz, a);
        assert!(time.follow_tscs(2) && time.in_step());
    }

    #[test]
    fn the_first_write_of_0_is_one_of_a_vcpu_in_step() {
        let mut t = TscMatch::default();
        let (mut a, mut b) = (Round::default(), Round::default());
        let first = t.new_vcpu_offset(at(1000), 1_000_000, &mut a);
        t.count_new_vcpu();
        t.new_vcpu_offset(at(2000), 1_000_000, &mut b);
        t.count_new_vcpu();
        assert_eq!(t.match_write(0, at(60_000_000_000), 1_000_000, &mut b), first);
        assert_eq!(t.members, 2);
    }

    #[test]
    fn a_vcpu_alone_is_in_step() {
        let mut time = Time::new().unwrap();
        let mut a = Round::default();
        time.tsc().new_vcpu_offset(at(1000), 1_000_000, &mut a);
        time.tsc().count_new_vcpu();
        assert!(!time.follow_tscs(1) && time.in_step());
        // KVM_SET_TSC_KHZ.
        time.tsc().leave(&mut a);
        assert!(!time.follow_tscs(1) && time.in_step());
    }
}
