//! The interrupt window of L2, for an interrupt of L1's machine that L1 leaves to L2.
//!
//! V_IRQ of L2's block is L1's to use. While a window of ours is open it stands for that, and what L1 had there
//! comes back when the window is closed.

use cpu::Cpu;
use x86::vmcb::{Clean, vintr};

use crate::state::Svm;

/// What says whether the virtual interrupt can be taken, and that it waits.
const BITS: u32 = vintr::IRQ | vintr::IGN_TPR | (0xf << vintr::PRIO_SHIFT);

impl<C: Cpu> Svm<C> {
    /// Opens the window of L2, which runs, or closes it.
    pub(crate) fn set_window_of_l2(&mut self, on: bool) {
        if self.nested.as_ref().is_some_and(|state| state.window.is_some() != on) {
            self.change_window_of_l2();
        }
    }

    #[cold]
    #[inline(never)]
    fn change_window_of_l2(&mut self) {
        let Some(state) = &mut self.nested else { return };
        // V_IRQ of L1's may have been taken meanwhile; priority and V_IGN_TPR are as L1 set them.
        let own = state.v12.control().int_ctl & (BITS - vintr::IRQ);
        let control = &mut self.block.vmcb_mut(Clean::INTR).control;
        match state.window.take() {
            None => {
                state.window = Some(control.int_ctl & vintr::IRQ != 0);
                // The highest priority, and V_TPR ignored: only IF and the shadow decide.
                control.int_ctl |= BITS;
            }
            Some(waited) => {
                let irq = if waited { vintr::IRQ } else { 0 };
                control.int_ctl = (control.int_ctl & !BITS) | own | irq;
            }
        }
        self.merge_intercepts();
    }
}
