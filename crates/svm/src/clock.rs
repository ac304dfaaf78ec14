//! The guest's TSC.

use backend::{Absent, Clock, TSC_RATIO_ONE, scale_tsc};
use cpu::Cpu;

use crate::state::Svm;

impl<C: Cpu> Clock for Svm<C> {
    type Deadline = Absent;

    fn host_tsc(&mut self) -> u64 {
        self.cpu.rdtsc()
    }

    fn set_tsc(&mut self, offset: u64, ratio: u64) {
        self.tsc_ratio = if self.features.tsc_ratio { ratio } else { TSC_RATIO_ONE };
        self.tsc_offset = offset;
        self.follow_tsc_offset();
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
