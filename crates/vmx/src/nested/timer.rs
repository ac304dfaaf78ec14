//! L1's preemption timer, which ends L2's run: one more deadline on L1's TSC, beside that of the local APIC.
//!
//! The CPU's own timer counts for both ([`crate::preemption_timer`]). A time that has come is a timer of 0: the hardware
//! leaves L2 behind what the entry injects and before its first instruction (SDM vol. 3C §27.7.4).

use cpu::Cpu;
use nested_vmx::merge::time::Deadline;
use x86::vmcs::ExitControls;

use super::kept::Nested;
use crate::state::{Vmx, attention};

impl<C: Cpu> Vmx<C> {
    /// L2 begins to run with a timer, or goes on with one that was restored.
    #[cold]
    #[inline(never)]
    pub(super) fn start_timer(&mut self, n: &mut Nested) {
        let now = self.guest_tsc_now();
        // One that was restored has a deadline already.
        let deadline = n.timer.unwrap_or_else(|| Deadline::start(n.machine.vmcs12(), now));
        n.timer = Some(deadline);
        // 0 stands for none.
        self.cold.of_l1.timer = deadline.tsc().max(1);
        self.attention |= attention::TIMER;
    }

    /// L2 runs no more, and [`super::kept::OfL1`] is L1's again. The CPU's timer is set anew.
    #[inline]
    pub(super) fn stop_timer(&mut self, n: &mut Nested) {
        if n.timer.take().is_some() {
            self.attention |= attention::TIMER;
        }
    }

    /// Whether the timer has run down.
    #[cold]
    #[inline(never)]
    pub(super) fn timer_is_due(&mut self) -> bool {
        // On L1's TSC, which both levels' times are told in.
        let now = self.guest_tsc_now();
        now >= self.cold.of_l1.timer
    }

    /// What is left of the timer, where L1 has it saved.
    #[inline]
    pub(super) fn timer_left(&mut self, n: &Nested) -> u32 {
        match n.timer {
            Some(deadline)
                if n.machine.vmcs12().exit().contains(ExitControls::SAVE_PREEMPTION_TIMER) =>
            {
                deadline.left(self.guest_tsc_now())
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
#[path = "timer_tests.rs"]
mod tests;
