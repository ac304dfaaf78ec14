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

use backend::{Clock, DeadlineWatch, TSC_RATIO_ONE};
use cpu::Cpu;
use x86::vmcs::{ExitReason, field};

use crate::{
    Features, fields,
    state::{Vmx, attention},
};

/// The longest time.
const LONGEST: u64 = u32::MAX as u64;
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
    not_entered: u8,
}

impl Watched {
    pub(crate) fn new(features: &Features) -> Self {
        let shift = features.preemption_timer.unwrap_or(0) & 31;
        Self { last: NEVER, scale: TSC_RATIO_ONE, shift, not_entered: 0 }
    }

    /// Sets the deadline; 0 for none. Whether it is another one.
    #[inline]
    pub(crate) fn set(&mut self, deadline: u64) -> bool {
        let last = deadline.wrapping_sub(1);
        core::mem::replace(&mut self.last, last) != last
    }

    /// The guest's TSC ticks at this multiple of the host's rate (32.32 fixed point).
    pub(crate) fn set_ratio(&mut self, ratio: u64) {
        self.scale = u64::MAX / ratio.max(1);
    }

    /// What the timer is to be set to for an entry at `now` of the guest's TSC. `None`: the time has
    /// come. Rounding down is met by another exit, which finds that the time has not come; what the
    /// entry itself takes makes that rare.
    #[inline]
    fn ticks(&self, now: u64, scaled: bool) -> Option<u64> {
        let left = self.last.checked_sub(now)?;
        let left = if scaled { self.host_ticks(left) } else { left };
        Some(((left >> self.shift) + 1).min(LONGEST))
    }

    #[cold]
    #[inline(never)]
    fn host_ticks(&self, guest: u64) -> u64 {
        let ticks = (u128::from(guest) * u128::from(self.scale)) >> 32;
        // One less than the most, for what is added.
        ticks.min(u128::from(NEVER - 1)) as u64
    }
}

impl<C: Cpu> Vmx<C> {
    fn guest_tsc_now(&mut self) -> u64 {
        let host = self.cpu.rdtsc();
        self.guest_tsc(host)
    }

    /// Right before an entry: sees that the CPU's timer is set. False: the time has come.
    #[inline(always)]
    pub(crate) fn settle_timer(&mut self) -> bool {
        // With VMX off nothing is written.
        if self.attention & (attention::TIMER_SET | attention::OFF) == 0 {
            return self.set_preemption_timer();
        }
        self.attention &= !attention::TIMER_SET;
        true
    }

    #[inline(never)]
    fn set_preemption_timer(&mut self) -> bool {
        let ticks = if self.deadline.last == NEVER {
            self.attention &= !attention::TIMER;
            LONGEST
        } else {
            let now = self.guest_tsc_now();
            match self.deadline.ticks(now, self.tsc_ratio != TSC_RATIO_ONE) {
                Some(ticks) => ticks,
                None => return false,
            }
        };
        self.deadline.not_entered = 0;
        self.cpu.vmwrite(field::PREEMPTION_TIMER.encoding(), ticks);
        true
    }

    /// Instead of an entry that would end at once. Nothing of the guest has changed since the last
    /// exit, and what that left in the VMCS concerns nobody any more.
    ///
    /// Without an entry no interrupt of the host is seen. After some in a row it is as if one had
    /// come, so that the loop is left; the time is found to have come when it is entered again.
    #[cold]
    #[inline(never)]
    pub(crate) fn exit_for_deadline(&mut self) {
        const MOST: u8 = 16;
        self.deadline.not_entered = self.deadline.not_entered.wrapping_add(1);
        let reason = if self.deadline.not_entered.is_multiple_of(MOST) {
            ExitReason::ExternalInterrupt
        } else {
            ExitReason::PreemptionTimer
        };
        self.vmcs.fields.learn(fields::EXIT_REASON, reason.0.into());
    }
}

impl<C: Cpu> DeadlineWatch for Vmx<C> {
    #[inline]
    fn can_watch(&self) -> bool {
        // A guest that waits by MWAIT may be in a C-state in which the timer stands (SDM vol. 3C
        // §26.5.1).
        self.features.preemption_timer.is_some() && !self.cold.fewer.mwait
    }

    #[inline]
    fn watch(&mut self, deadline: u64) {
        if self.deadline.set(deadline) {
            self.attention |= attention::TIMER;
        }
    }

    /// The VMCS is loaded, and the entry is near.
    #[inline]
    fn watch_from(&mut self, deadline: u64, now: u64) {
        self.deadline.set(deadline);
        self.attention |= attention::TIMER;
        if let Some(ticks) = self.deadline.ticks(now, self.tsc_ratio != TSC_RATIO_ONE) {
            self.cpu.vmwrite(field::PREEMPTION_TIMER.encoding(), ticks);
            self.attention |= attention::TIMER_SET;
        }
    }

    #[inline]
    fn is_due(&mut self) -> bool {
        self.deadline.last != NEVER && self.guest_tsc_now() > self.deadline.last
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
