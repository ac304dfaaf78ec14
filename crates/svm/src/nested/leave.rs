//! From L2's block back to L1's.

use backend::{Event, Executed, Gprs, Injection, L1Memory, Level, RAX, RSP};
use cpu::Cpu;
use nested_svm::{
    leave::{self, Undelivered},
    reflect::{self, Exit},
};
use x86::{
    Cr4,
    vmcb::{Clean, ExitCode, NP_ENABLE, SEG_FS, SEG_GS, SEG_LDTR, SEG_TR, Save, vintr},
};

use super::Seen;
use crate::{
    inject,
    state::{Svm, Virq},
};

/// Copies what VMRUN and a VMEXIT leave alone.
pub(super) fn copy_unswitched(to: &mut Save, from: &Save) {
    for index in [SEG_FS, SEG_GS, SEG_LDTR, SEG_TR] {
        if let (Some(to), Some(from)) = (to.segments.get_mut(index), from.segments.get(index)) {
            *to = *from;
        }
    }
    (to.star, to.lstar, to.cstar, to.sfmask) = (from.star, from.lstar, from.cstar, from.sfmask);
    to.kernel_gs_base = from.kernel_gs_base;
    to.sysenter_cs = from.sysenter_cs;
    to.sysenter_esp = from.sysenter_esp;
    to.sysenter_eip = from.sysenter_eip;
}

impl<C: Cpu> Svm<C> {
    /// Ends L2's run with `exit`: L1's block in its memory is written first, so that nothing has happened if that
    /// cannot be.
    #[inline(never)]
    pub(super) fn leave(
        &mut self,
        gprs: &mut Gprs,
        exit: &Exit,
        undelivered: Undelivered,
        l1: &impl L1Memory,
    ) -> Executed {
        // V_IRQ goes back to what L1 had there, before the block is told to L1.
        self.set_window_of_l2(false);
        let hidden = u64::from(self.cr0_hidden);
        // What the loop keeps apart from the block: RAX and RSP.
        let save = &mut self.vmcb_mut(Clean::empty()).save;
        save.rax = gprs.0[RAX];
        save.rsp = gprs.0[RSP];
        let Some(state) = &self.nested else { return Executed::Shutdown };
        let from = self.block.vmcb();
        // Any other exit than the refusal of an entry has L1's event, or what became of it.
        let entered = exit.code != ExitCode::Invalid || !state.entry_pending;
        let left = leave::Left { from, cr0_hidden: hidden, exit, undelivered, entered };
        if leave::write(&Seen::new(l1), &state.v12, &left, &self.cold.offered).is_err() {
            if !l1.is_final() {
                return Executed::Outside;
            }
            // L2 cannot go on: the shutdown that follows is L1's.
            self.return_to_l1(gprs);
            // Nothing is clean in a block that did not hear of the exit.
            if let Some(state) = &mut self.nested {
                state.v12.forget();
            }
            return Executed::Shutdown;
        }
        if exit.code == ExitCode::Invalid {
            self.forget_refused();
        }
        if inject::decode(undelivered.info) == Some(Event::Nmi) {
            // L1's to inject again. L2's own mask is in its block.
            self.nmi_not_delivered();
        }
        self.return_to_l1(gprs);
        Executed::Left
    }

    /// The CPU has refused L2's block: what it and we hold of it is no state of a guest, and nothing of it stays.
    #[cold]
    #[inline(never)]
    fn forget_refused(&mut self) {
        self.block.mark(Clean::ALL);
        if let Some(state) = &mut self.nested {
            state.v12.forget();
        }
    }

    /// L1 runs from now on, with GIF clear.
    pub(super) fn return_to_l1(&mut self, gprs: &mut Gprs) {
        if self.level == Level::L1 {
            return;
        }
        self.set_window_of_l2(false);
        let Some(state) = &self.nested else { return };
        let control = state.v12.control();
        let own_pat = control.np_ctl & NP_ENABLE != 0;
        // A mask of L1's own has stayed where it is, whatever L2's block shows.
        let mask = if reflect::keeps_nmi_mask(control) { 0 } else { vintr::NMI_MASK };
        // V_TPR without V_INTR_MASKING is L1's task priority, which L2 may have changed.
        let own_priority = control.int_ctl & vintr::INTR_MASKING != 0;
        let shared = mask | if own_priority { 0 } else { vintr::TPR_MASK };
        let l2 = self.block.vmcb();
        let (pat, int_ctl, cr4) = (l2.save.g_pat, l2.control.int_ctl, l2.save.cr4);
        let cr2 = l2.save.cr2;
        // Behind what is read of L2's block above, which is another from here on.
        self.change_block();
        self.level = Level::L1;
        // A VMEXIT clears GIF (APM vol. 2 §15.6).
        self.gif.clear();
        // Gathered, so that a block of which little has changed stays mostly clean.
        let mut stale = Clean::empty();
        let block = self.vmcb_mut(Clean::empty());
        // With nested paging of L1's the PAT was L2's own.
        if !own_pat && block.save.g_pat != pat {
            block.save.g_pat = pat;
            stale |= Clean::NPT;
        }
        // No VMEXIT loads CR2 (APM vol. 2 §15.6): L1 finds L2's.
        if block.save.cr2 != cr2 {
            block.save.cr2 = cr2;
            stale |= Clean::CR2;
        }
        if (block.control.int_ctl ^ int_ctl) & shared != 0 {
            block.control.int_ctl = (block.control.int_ctl & !shared) | (int_ctl & shared);
            stale |= Clean::INTR;
        }
        leave::to_l1(block);
        gprs.0[RAX] = block.save.rax;
        gprs.0[RSP] = block.save.rsp;
        let changed = block.save.cr4 ^ cr4;
        self.block.mark(stale | Clean::DR | Clean::CR | Clean::INTR);
        // What L1 was offered before VMRUN was put back, and nothing stands for it here.
        self.set_virq(Virq::Off);
        if changed & Cr4::OSXSAVE.bits() != 0 {
            self.sync_extended();
        }
        // Whether CR0 exits follows from what is hidden of the level that runs.
        if self.cr0_hidden != 0 {
            let cr0 = backend::ControlRegisters::cr0(self);
            backend::ControlRegisters::set_cr0(self, cr0);
        }
    }
}
