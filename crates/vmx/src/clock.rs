//! The guest's TSC.

use backend::{Clock, TSC_RATIO_ONE, scale_tsc};
use cpu::Cpu;
use x86::vmcs::ProcControls2;

use crate::{fields, state::Vmx};

/// Fractional bits that the TSC multiplier has more than our ratio.
const MULTIPLIER_SHIFT: u32 = 48 - 32;

impl<C: Cpu> Clock for Vmx<C> {
    type Deadline = Self;

    fn host_tsc(&mut self) -> u64 {
        self.cpu.rdtsc()
    }

    fn set_tsc(&mut self, offset: u64, ratio: u64) {
        self.tsc_offset = offset;
        self.set(fields::TSC_OFFSET, offset);
        if self.tsc_ratio != ratio && self.features.tsc_scaling {
            self.tsc_ratio = ratio;
            self.deadline.set_ratio(ratio);
            self.set(fields::TSC_MULTIPLIER, ratio << MULTIPLIER_SHIFT);
            self.change_proc2(ProcControls2::TSC_SCALING, ratio != TSC_RATIO_ONE);
        }
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
