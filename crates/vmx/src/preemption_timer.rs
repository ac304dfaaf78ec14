//! The VMX-preemption timer: ends the guest's run when its TSC reaches a deadline.
//!
//! The CPU loads the timer from the VMCS at every entry, and counts it down while the guest runs, by one
//! whenever bit `shift` of the TSC changes (SDM vol. 3C §26.5.1, appendix A.6). So it is set anew before
//! every entry while a deadline is watched, from the guest's TSC of that moment: an RDTSC and a VMWRITE.
//! Nothing of it is kept that a change of the TSC's offset, of its ratio or of the CPU could make stale.
//! An entry with no deadline watched costs nothing: the control stays on with the longest time, and the
//! exit after that, seconds to minutes later, is answered by entering again.
//!
//! A deadline further away than 32 bits of the timer is met in several such steps.

use backend::TSC_RATIO_ONE;

use crate::features::Features;

/// The longest time.
pub(crate) const LONGEST: u64 = u32::MAX as u64;
/// In the place of a deadline: none.
const NEVER: u64 = u64::MAX;

/// The deadline that is watched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watched {
    /// The last tick of the guest's TSC before it, or [`NEVER`].
    last: u64,
    /// Host ticks in a guest tick, 32.32 fixed point, rounded down.
    scale: u64,
    shift: u8,
    /// Entries in a row that did not take place because it had come.
    pub(crate) not_entered: u8,
}

impl Watched {
    pub(crate) fn new(features: &Features) -> Self {
        let shift = features.preemption_timer.unwrap_or(0) & 31;
        // Without the timer the value is of no use, and not asked for.
        Self { last: NEVER, scale: TSC_RATIO_ONE, shift, not_entered: 0 }
    }

    /// Sets the deadline; 0 for none. Whether it is another one.
    #[inline]
    pub(crate) fn set(&mut self, deadline: u64) -> bool {
        // 0 becomes the value that stands for none.
        let last = deadline.wrapping_sub(1);
        core::mem::replace(&mut self.last, last) != last
    }

    /// Whether there is a deadline.
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.last != NEVER
    }

    /// The guest's TSC ticks at this multiple of the host's rate (32.32 fixed point).
    pub(crate) fn set_ratio(&mut self, ratio: u64) {
        // Rounded down: a time that is found to be too short costs an exit, one that is too long a late deadline.
        self.scale = u64::MAX / ratio.max(1);
    }

    /// Whether there is a deadline.
    #[inline(always)]
    pub(crate) fn is_set(&self) -> bool {
        self.last != NEVER
    }

    /// Whether the deadline has come at `now` of the guest's TSC.
    #[inline]
    pub(crate) fn is_due(&self, now: u64) -> bool {
        // The deadline itself is due.
        now > self.last
    }

    /// What the timer is to be set to for an entry at `now` of the guest's TSC. `None`: the time has
    /// come. Rounding down is met by another exit, which finds that the time has not come; what the
    /// entry itself takes makes that rare.
    #[inline(always)]
    pub(crate) fn ticks(&self, now: u64, scaled: bool) -> Option<u64> {
        self.ticks_until(self.last, now, scaled)
    }

    /// What the timer is to be set to for a deadline whose last tick before it is `last`. `None`: the time has come.
    #[inline]
    pub(crate) fn ticks_until(&self, last: u64, now: u64, scaled: bool) -> Option<u64> {
        let left = last.checked_sub(now)?;
        let left = if scaled { self.host_ticks(left) } else { left };
        // The sum cannot wrap: a deadline that is none is asked for by nobody.
        // One more, since the timer may tick right behind the entry.
        Some(((left >> self.shift) + 1).min(LONGEST))
    }

    #[cold]
    #[inline(never)]
    fn host_ticks(&self, guest: u64) -> u64 {
        // By 128 bits: both are as large as they like.
        let ticks = (u128::from(guest) * u128::from(self.scale)) >> 32;
        // One less than the most, for what is added.
        ticks.min(u128::from(NEVER - 1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(shift: u8) -> Watched {
        Watched::new(&Features { preemption_timer: Some(shift), ..Features::default() })
    }

    #[test]
    fn the_timer_never_rings_a_whole_unit_early_and_never_two_late() {
        for shift in [0, 5, 31] {
            let mut w = watched(shift);
            for (now, deadline) in [(0, 1), (31, 32), (7, 1_000_003), (1 << 40, (1 << 40) + 77)] {
                w.set(deadline);
                let ticks = w.ticks(now, false).unwrap();
                // It rings when the TSC in units has moved on by so many.
                let rings = ((now >> shift) + ticks) << shift;
                assert!(rings + (1 << shift) > deadline, "{shift} {now} {deadline} {rings}");
                assert!(rings <= deadline + (1 << shift), "{shift} {now} {deadline} {rings}");
            }
        }
    }

    #[test]
    fn a_time_that_has_come_sets_nothing_and_none_is_no_time() {
        let mut w = watched(5);
        w.set(100);
        assert_eq!(w.ticks(100, false), None);
        assert_eq!(w.ticks(u64::MAX, false), None);
        assert_eq!(w.ticks(99, false), Some(1));
        assert!(w.set(0) && !w.set(0));
        assert_eq!(w.last, NEVER);
    }

    #[test]
    fn what_is_far_away_is_the_longest_time() {
        for shift in [0, 5, 31] {
            let mut w = watched(shift);
            w.set(u64::MAX);
            assert_eq!(w.ticks(0, false), Some(LONGEST));
            for ratio in [1, TSC_RATIO_ONE / 2, u64::MAX] {
                w.set_ratio(ratio);
                assert!(w.ticks(0, true).unwrap() <= LONGEST, "{shift} {ratio}");
            }
            w.set_ratio(TSC_RATIO_ONE / 3);
            assert_eq!(w.ticks(0, true), Some(LONGEST));
        }
    }

    #[test]
    fn a_guest_of_half_the_rate_waits_twice_the_ticks() {
        let mut w = watched(0);
        w.set_ratio(TSC_RATIO_ONE / 2);
        w.set(1_001);
        let ticks = w.ticks(0, true).unwrap();
        assert!((1_998..=2_001).contains(&ticks), "{ticks}");
        w.set_ratio(2 * TSC_RATIO_ONE);
        let ticks = w.ticks(0, true).unwrap();
        assert!((499..=501).contains(&ticks), "{ticks}");
        w.set_ratio(0);
        assert!(w.ticks(0, true).is_some());
    }
}
