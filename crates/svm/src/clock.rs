//! The guest's TSC, and that of its guest.
//!
//! L2's TSC is made from L1's by a ratio that L1 gives in TSC_RATIO and an offset in its block (APM vol. 2 §15.30.5). The
//! CPU makes it from the host's at once: both ratios in one, and L1's offset scaled by L2's.

use backend::{Absent, Clock, Level, TSC_RATIO_ONE, compose_ratios, scale_offset, scale_tsc};
use cpu::Cpu;
use x86::msr;

use crate::state::Svm;

impl<C: Cpu> Svm<C> {
    /// L1's TSC or L2's ratio has changed.
    fn renew_tsc(&mut self) {
        // L2's ratio scales L1's TSC as a whole, with what was added to it.
        self.cold.tsc.offset = scale_offset(self.tsc_offset, self.cold.tsc.ratio_of_l2);
        self.follow_carried();
        self.follow_tsc_offset();
        self.change_ratio(self.level);
    }

    /// Whether something goes over with the level. Kept as one word, since each change of level asks for it.
    pub(crate) fn follow_carried(&mut self) {
        self.carries = self.features.lbr
            || self.cold.tsc.ratio_of_l2 != TSC_RATIO_ONE
            || self.cold.nmi.iret_at.is_some();
    }

    /// What the CPU scales the host's TSC by for a level.
    fn ratio_of(&self, level: Level) -> u64 {
        match level {
            Level::L2 if self.cold.tsc.ratio_of_l2 != TSC_RATIO_ONE => {
                compose_ratios(self.tsc_ratio, self.cold.tsc.ratio_of_l2)
            }
            // The composition is spared where L2's ratio is one.
            _ => self.tsc_ratio,
        }
    }

    /// A level runs from now on.
    pub(crate) fn change_ratio(&mut self, level: Level) {
        let ratio = self.ratio_of(level);
        // A write of an MSR is what is spared here.
        if ratio != self.cold.tsc.ratio_here {
            self.cold.tsc.ratio_here = ratio;
            self.scales = ratio != TSC_RATIO_ONE;
            // Else the loop's beginning writes it.
            if self.loaded {
                self.cpu.wrmsr(msr::TSC_RATIO, ratio);
            }
        }
    }

    /// Sets the ratio by which L2's TSC is made from L1's.
    pub(crate) fn set_ratio_of_l2(&mut self, ratio: u64) {
        // A VMM may have one from a CPU that has the MSR.
        if self.features.tsc_ratio {
            self.cold.tsc.ratio_of_l2 = ratio;
            self.renew_tsc();
        }
    }

    /// L2's TSC, to which L1's block adds this.
    pub(crate) fn tsc_below(&self, host: u64, offset: u64) -> u64 {
        scale_tsc(host, self.ratio_of(Level::L2))
            // Offsets wrap: a guest's TSC may begin at 0 however far the host's has come.
            .wrapping_add(self.cold.tsc.offset)
            .wrapping_add(offset)
    }
}

impl<C: Cpu> Clock for Svm<C> {
    type Deadline = Absent;

    fn host_tsc(&mut self) -> u64 {
        self.cpu.rdtsc()
    }

    fn set_tsc(&mut self, offset: u64, ratio: u64) {
        // Without the MSR the TSC runs as the host's, whatever was asked for.
        self.tsc_ratio = if self.features.tsc_ratio { ratio } else { TSC_RATIO_ONE };
        self.tsc_offset = offset;
        self.renew_tsc();
    }

    #[inline]
    fn guest_tsc(&self, host: u64) -> u64 {
        scale_tsc(host, self.tsc_ratio).wrapping_add(self.tsc_offset)
    }

    #[inline(always)]
    fn deadline(&self) -> Option<&Absent> {
        None
    }

    #[inline(always)]
    fn deadline_mut(&mut self) -> Option<&mut Absent> {
        None
    }
}
