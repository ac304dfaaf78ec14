//! The guest's TSC, and the deadline on it that the CPU's timer watches.

use backend::{Clock, DeadlineWatch, TSC_RATIO_ONE, scale_tsc};
use cpu::Cpu;
use x86::vmcs::{ExitReason, ProcControls2, field};

use crate::{
    fields,
    preemption_timer::LONGEST,
    state::{Vmx, attention},
};

/// Fractional bits that the TSC multiplier has more than our ratio.
const MULTIPLIER_SHIFT: u32 = 48 - 32;

impl<C: Cpu> Clock for Vmx<C> {
    type Deadline = Self;

    fn host_tsc(&mut self) -> u64 {
        self.cpu.rdtsc()
    }

    fn set_tsc(&mut self, offset: u64, ratio: u64) {
        self.tsc_offset = offset;
        // Without it the ratio stays 1, whatever was asked for.
        if self.tsc_ratio != ratio && self.features.tsc_scaling {
            self.set_tsc_ratio(ratio);
        }
        // The VMCS that is loaded is L2's: L1's offset goes into the other one.
        if self.cold.of_l1.runs {
            return self.move_tsc_behind_l2();
        }
        self.set(fields::TSC_OFFSET, offset);
    }

    #[inline]
    fn guest_tsc(&self, host: u64) -> u64 {
        scale_tsc(host, self.tsc_ratio).wrapping_add(self.tsc_offset)
    }

    #[inline(always)]
    fn deadline(&self) -> Option<&Self> {
        Some(self)
    }

    #[inline(always)]
    fn deadline_mut(&mut self) -> Option<&mut Self> {
        Some(self)
    }
}

impl<C: Cpu> Vmx<C> {
    #[cold]
    #[inline(never)]
    fn set_tsc_ratio(&mut self, ratio: u64) {
        self.tsc_ratio = ratio;
        // The deadline is a time of the guest's TSC: how far away it is goes by the ratio.
        self.deadline.set_ratio(ratio);
        let (multiplier, scales) = (ratio << MULTIPLIER_SHIFT, ratio != TSC_RATIO_ONE);
        // With an L2 that has a TSC of its own this is not L1's.
        self.set(fields::TSC_MULTIPLIER, self.current_tsc().multiplier);
        // Off at the ratio 1: a CPU that does not multiply is quicker at RDTSC.
        self.change_proc2(ProcControls2::TSC_SCALING, scales);
        self.behind_l2(|cpu, vmcs01| {
            vmcs01.set(cpu, fields::TSC_MULTIPLIER, multiplier);
            vmcs01.change_proc2(cpu, ProcControls2::TSC_SCALING, scales);
        });
    }

    /// The offset in both VMCSs, while L2 runs.
    #[cold]
    #[inline(never)]
    fn move_tsc_behind_l2(&self) {
        self.behind_l2(|cpu, vmcs01| vmcs01.set(cpu, fields::TSC_OFFSET, self.tsc_offset));
        self.set(fields::TSC_OFFSET, self.current_tsc().offset);
    }

    pub(crate) fn guest_tsc_now(&mut self) -> u64 {
        let host = self.cpu.rdtsc();
        self.guest_tsc(host)
    }

    /// Right before an entry: sees that the CPU's timer is set. False: the time has come.
    #[inline(always)]
    pub(crate) fn ensure_timer(&mut self) -> bool {
        // With VMX off nothing is written.
        // It was set by the handler that read the TSC a moment ago.
        if self.attention & (attention::TIMER_SET | attention::OFF) == 0 {
            return self.set_preemption_timer();
        }
        self.attention &= !attention::TIMER_SET;
        true
    }

    #[inline(never)]
    fn set_preemption_timer(&mut self) -> bool {
        let ticks = if self.cold.of_l1.timer != 0 {
            self.ticks_of_both()
        } else if !self.deadline.is_set() {
            // No deadline any more: the longest time, written once, and the bit goes.
            self.attention &= !attention::TIMER;
            LONGEST
        } else {
            let now = self.guest_tsc_now();
            match self.deadline.ticks(now, self.tsc_ratio != TSC_RATIO_ONE) {
                Some(ticks) => ticks,
                // L2 is entered all the same: what the entry injects is delivered first, and an exit that comes of it
                // comes before the one for the timer.
                None if self.cold.of_l1.runs => 0,
                // The guest is not entered for nothing: the deadline is answered in the loop.
                None => return false,
            }
        };
        // An entry takes place: the count of those that did not begins anew.
        self.deadline.not_entered = 0;
        self.cpu.vmwrite(field::PREEMPTION_TIMER.encoding(), ticks);
        true
    }

    /// What the timer is to be set to for an L2 with a timer of L1's: 0 if one of the two times has come.
    #[cold]
    #[inline(never)]
    fn ticks_of_both(&mut self) -> u64 {
        let now = self.guest_tsc_now();
        let scaled = self.tsc_ratio != TSC_RATIO_ONE;
        // The last tick before: it has come when the TSC is beyond that.
        let of_l1 = self.cold.of_l1.timer.wrapping_sub(1);
        // L1's time has come: the entry ends at once, behind what it injects.
        let of_l1 = self.deadline.ticks_until(of_l1, now, scaled).unwrap_or(0);
        if !self.deadline.is_set() {
            return of_l1;
        }
        // Whichever comes first ends the run; which of them it was the TSC tells behind the exit.
        self.deadline.ticks(now, scaled).unwrap_or(0).min(of_l1)
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
        // As if the CPU had told it: what reads the reason does not know of entries that did not take place.
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
        // Set without a comparison: who calls has read the TSC, and writes the timer anyway.
        self.deadline.set(deadline);
        // L1's timer may come before.
        let is_alone = self.cold.of_l1.timer == 0;
        let scaled = self.tsc_ratio != TSC_RATIO_ONE;
        let ticks = if is_alone { self.deadline.ticks(now, scaled) } else { None };
        let Some(ticks) = ticks else {
            self.attention |= attention::TIMER;
            return;
        };
        // Not by the cache: the CPU counts, and the field has no value that would be known.
        self.cpu.vmwrite(field::PREEMPTION_TIMER.encoding(), ticks);
        // Set for this very entry: `ensure_timer` does not read the TSC again.
        self.attention |= attention::TIMER | attention::TIMER_SET;
    }

    #[inline]
    fn is_due(&mut self) -> bool {
        // No RDTSC for a guest without a deadline.
        if !self.deadline.is_set() {
            return false;
        }
        let now = self.guest_tsc_now();
        self.deadline.is_due(now)
    }
}
