//! NPT tables of L1's: the root that L2's block has, faults on it, and what L1 hears of them.

use core::mem::take;

use backend::{
    Event, Executed, Gprs, L1Flush, L1Memory, L1Tables, Level, NestedPageFault, NestedPaging,
    TablesRefuse,
};
use cpu::Cpu;
use nested_svm::{leave::Undelivered, reflect::Exit};
use x86::{
    Cr0, Cr4, Efer, Gpa, Hpa,
    exception::pf,
    vmcb::{Clean, Control, ExitCode, NP_ENABLE},
};

use crate::{inject, l2::State, state::Svm};

/// Whether L1 asks for tables of its own.
pub(super) fn has_tables(control: &Control) -> bool {
    control.np_ctl & NP_ENABLE != 0
}

impl<C: Cpu> Svm<C> {
    /// What L2 is known by while it runs with tables of L1's.
    fn with_tables(&self) -> Option<&State> {
        let state = self.nested.as_ref().filter(|_| self.level == Level::L2)?;
        has_tables(state.v12.control()).then_some(&**state)
    }

    /// What of EXITINFO1 L1 is told: of a fetch where it has EFER.NXE or CR4.SMEP (APM vol. 2 §8.4.2, §15.25.6).
    fn told(&self, info_1: u64) -> u64 {
        let forbids = self.nested.as_ref().is_some_and(|state| {
            let l1 = &state.other.vmcb().save;
            Cr4::from_bits_retain(l1.cr4).contains(Cr4::SMEP)
                || Efer::from_bits_retain(l1.efer).contains(Efer::NXE)
        });
        if forbids { info_1 } else { info_1 & !u64::from(pf::FETCH) }
    }

    /// L1 flushes L2's translations.
    pub(super) fn flush_l2(&mut self) {
        if let Some(state) = &mut self.nested {
            state.flushed = true;
        }
    }
}

impl<C: Cpu> NestedPaging for Svm<C> {
    fn l1_tables(&self) -> Option<L1Tables> {
        let state = self.with_tables()?;
        // L1's paging mode decides how its tables are read.
        let l1 = &state.other.vmcb().save;
        Some(L1Tables::Npt {
            ncr3: state.v12.control().ncr3,
            cr0: Cr0::from_bits_retain(l1.cr0),
            cr4: Cr4::from_bits_retain(l1.cr4),
            efer: Efer::from_bits_retain(l1.efer),
        })
    }

    fn set_nested_root(&mut self, root: Hpa, _tracks: bool) {
        let Some(state) = self.nested.as_mut().filter(|_| self.level == Level::L2) else { return };
        // Kept for block 02's next run, whichever root that has then.
        state.root = root;
        if self.block.vmcb().control.ncr3 != root.0 {
            self.block.vmcb_mut(Clean::NPT).control.ncr3 = root.0;
            // What lies under L2's ASID was made of other tables.
            self.block.request_flush();
        }
    }

    fn flush_nested(&mut self) {
        if self.level == Level::L2 {
            self.block.request_flush();
        }
    }

    fn nested_page_fault(&self) -> Option<NestedPageFault> {
        let control = &self.vmcb().control;
        let is_npf = ExitCode(control.exit_code) == ExitCode::Npf;
        (is_npf && self.with_tables().is_some())
            .then_some(NestedPageFault::Npf { info: control.exit_info_1, gpa: control.exit_info_2 })
    }

    fn refuse(
        &mut self,
        gprs: &mut Gprs,
        at: Gpa,
        why: TablesRefuse,
        undelivered: Option<Event>,
        l1: &impl L1Memory,
    ) -> Executed {
        // EPT's refusals are Intel's.
        let TablesRefuse::Npf(info_1) = why else { return Executed::Shutdown };
        let exit = Exit { code: ExitCode::Npf, info_1: self.told(info_1), info_2: at.0 };
        let info = undelivered.map_or(0, inject::encode);
        self.leave(gprs, &exit, Undelivered { info }, l1)
    }

    fn take_l1_flush(&mut self) -> L1Flush {
        let flushed = self.nested.as_mut().is_some_and(|state| take(&mut state.flushed));
        if flushed { L1Flush::All } else { L1Flush::None }
    }
}
