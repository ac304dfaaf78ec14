//! Branch records: DEBUGCTL with the last branch and the last exception, where the CPU virtualises them (APM vol. 2
//! §15.23).
//!
//! The CPU takes them from the block and puts them back there while the block says so, which costs each VMRUN; so it
//! does while the guest has recording on. Else DEBUGCTL is what the guest wrote, and the records stay as they were.
//!
//! **Whose records.** An L2 whose block asks for records of its own has them in block 02. Any other shares L1's: they lie
//! in the block that runs while recording is on, else in L1's.
//!
//! BTF is not given to a guest: a step of ours, by TF, would pass over instructions without a branch.

use backend::Level;
use cpu::Cpu;
use nested_svm::merge;
use x86::{
    msr::{self, debugctl},
    vmcb::{Clean, Control, Save, VIRTUAL_LBR},
};

use crate::state::Svm;

/// Whether a block has the CPU record branches.
const fn records(control: &Control) -> bool {
    control.virt_ext & VIRTUAL_LBR != 0
}

fn set_records(control: &mut Control, on: bool) {
    control.virt_ext = control.virt_ext & !VIRTUAL_LBR | if on { VIRTUAL_LBR } else { 0 };
}

/// The record that an MSR holds.
fn record(save: &mut Save, index: u32) -> Option<&mut u64> {
    Some(match index {
        msr::LAST_BRANCH_FROM => &mut save.br_from,
        msr::LAST_BRANCH_TO => &mut save.br_to,
        msr::LAST_INT_FROM => &mut save.last_excp_from,
        msr::LAST_INT_TO => &mut save.last_excp_to,
        _ => return None,
    })
}

impl<C: Cpu> Svm<C> {
    /// Whether L2, which runs or is about to, has records of its own.
    fn l2_has_records(&self) -> bool {
        let own = |control| merge::has_branch_records(control, &self.cold.offered);
        self.nested.as_ref().is_some_and(|state| own(state.v12.control()))
    }

    /// A record of branches.
    pub(crate) fn branch_record(&self, index: u32) -> u64 {
        let l1 = match &self.nested {
            Some(state) if self.level == Level::L2 => &state.other,
            _ => &self.block,
        };
        // While recording is on they lie in the block that runs; see the module's head.
        let block = if records(&self.vmcb().control) { &self.block } else { l1 };
        let save = &block.vmcb().save;
        match index {
            msr::LAST_BRANCH_FROM => save.br_from,
            msr::LAST_BRANCH_TO => save.br_to,
            msr::LAST_INT_FROM => save.last_excp_from,
            _ => save.last_excp_to,
        }
    }

    /// Writes a record of branches where [`branch_record`](Self::branch_record) finds it. False: the CPU has none.
    #[cold]
    #[inline(never)]
    pub(crate) fn set_branch_record(&mut self, index: u32, value: u64) -> bool {
        if !self.features.lbr {
            return false;
        }
        let here = records(&self.vmcb().control);
        let block = if here { &mut self.block } else { self.block_of_l1() };
        if let Some(place) = record(&mut block.vmcb_mut(Clean::LBR).save, index) {
            *place = value;
        }
        true
    }

    /// DEBUGCTL of the level that runs.
    #[cold]
    #[inline(never)]
    pub(crate) fn set_debugctl(&mut self, value: u64) {
        // Nothing is recorded: the value is kept for the guest to read, where stock KVM forgets it.
        if !self.features.lbr {
            self.vmcb_mut(Clean::LBR).save.dbgctl = value;
            return;
        }
        let value = value & debugctl::LBR;
        self.vmcb_mut(Clean::LBR).save.dbgctl = value;
        let (was, own) = (records(&self.vmcb().control), self.l2_has_records());
        // L2's own records are kept as long as its block asks for them, whatever DEBUGCTL says.
        let on = value & debugctl::LBR != 0 || (self.level == Level::L2 && own);
        // Nothing moves: the records stay where they are.
        if on == was {
            return;
        }
        if let Some(state) = self.nested.as_mut().filter(|_| self.level == Level::L2) {
            let dbgctl = self.block.vmcb().save.dbgctl;
            let (of_l2, of_l1) = (&mut self.block, &mut state.other);
            let (from, to) = if on { (of_l1, of_l2) } else { (of_l2, of_l1) };
            merge::copy_branch_records(&mut to.vmcb_mut(Clean::LBR).save, &from.vmcb().save);
            // The copy has brought the other level's DEBUGCTL along.
            self.block.vmcb_mut(Clean::LBR).save.dbgctl = dbgctl;
        }
        set_records(&mut self.vmcb_mut(Clean::LBR).control, on);
    }

    /// Another level is about to run: takes over to its block what both have.
    pub(crate) fn carry_branch_records(&mut self) {
        let own = self.l2_has_records();
        let Some(state) = &mut self.nested else { return };
        let (from, to) = (self.block.vmcb(), &mut state.other);
        if own {
            // Block 02's are those of L1's block for it; L1's stay where they are.
            return;
        }
        let on = records(&from.control);
        let same = on == records(&to.vmcb().control) && from.save.dbgctl == to.vmcb().save.dbgctl;
        // The usual case: nobody records, and no block is marked.
        if !on && same {
            return;
        }
        let block = to.vmcb_mut(Clean::LBR);
        set_records(&mut block.control, on);
        if on {
            merge::copy_branch_records(&mut block.save, &from.save);
        } else {
            block.save.dbgctl = from.save.dbgctl;
        }
    }

    /// What L1 had in a saved state, where L2 has records of its own. Those that were set before are L2's. L1's block
    /// runs.
    pub(crate) fn restore_branch_records(&mut self, of_l1: &Save) {
        if !self.features.lbr || !self.l2_has_records() {
            return;
        }
        let block = self.vmcb_mut(Clean::LBR);
        merge::copy_branch_records(&mut block.save, of_l1);
        // As when L1 wrote DEBUGCTL.
        set_records(&mut block.control, block.save.dbgctl != 0);
    }
}
