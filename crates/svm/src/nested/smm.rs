//! System-management mode that begins while L2 runs, and RSM back into L2.
//!
//! Block 01 holds L1's state while L2 runs, and the handler runs on it. So L1's state goes where stock KVM keeps it: into
//! the page that VM_HSAVE_PA names, laid out as the save area of a block from 400h on, where a saved machine finds it. What
//! L2's block in L1's memory holds beside L2's general state, which is in SMRAM, is what a VMEXIT writes there.
//!
//! All of it is L1's memory and may hold anything when it is read back: it is checked as VMRUN and as a saved state are.

use core::mem::offset_of;

use backend::{ControlRegisters, Executed, Gprs, L1Memory, Level, Outside, RAX, RSP};
use cpu::Cpu;
use host::KBox;
use nested_svm::{checks, leave::Undelivered, reflect::Exit, saved};
use x86::{
    Cr0, Cr4, Efer, Gpa,
    vmcb::{Clean, ExitCode, Save, Vmcb},
};
use zerocopy::IntoBytes;

use crate::state::Svm;

/// Where in that page L1's state begins.
const KEPT_AT: u64 = offset_of!(Vmcb, save) as u64;

const _: () = assert!(KEPT_AT == 0x400 && size_of::<Save>() <= 0xc00);

impl<C: Cpu> Svm<C> {
    /// Ends L2's run for the mode. Where L2's block lies; `None`: L1 runs.
    #[cold]
    #[inline(never)]
    pub(super) fn put_l2_aside(
        &mut self,
        gprs: &mut Gprs,
        kept: Gpa,
        l1: &impl L1Memory,
    ) -> Result<Option<Gpa>, Outside> {
        let Some(state) = self.nested.as_ref().filter(|_| self.level == Level::L2) else {
            return Ok(None);
        };
        // Before the run of L2 ends, after which the copy may be another block's.
        let at = state.v12.at();
        let exit = Exit::plain(ExitCode::Software);
        // As at a VMEXIT: what L2's block has beside the general registers goes to L1's memory.
        if self.leave(gprs, &exit, Undelivered::default(), l1) != Executed::Left {
            return Err(Outside);
        }
        // As L1 sees it: the block lacks what is hidden.
        let cr0 = self.vmcb().save.cr0 | u64::from(self.cr0_hidden);
        let save = &self.vmcb().save;
        let (before, behind) = save.as_bytes().split_at(offset_of!(Save, cr0));
        let behind = behind.get(size_of::<u64>()..).unwrap_or(&[]);
        let at_cr0 = kept.0.wrapping_add(KEPT_AT).wrapping_add(before.len() as u64);
        l1.write(Gpa(kept.0.wrapping_add(KEPT_AT)), before)?;
        l1.write(Gpa(at_cr0), &cr0.to_le_bytes())?;
        l1.write(Gpa(at_cr0.wrapping_add(size_of::<u64>() as u64)), behind)?;
        // L1's firmware may change the block before RSM.
        if let Some(state) = &mut self.nested {
            state.v12.forget();
        }
        Ok(Some(at))
    }

    /// L2 of the block at `at` runs again, with L1's state as it was kept.
    #[cold]
    #[inline(never)]
    pub(super) fn take_l2_back(
        &mut self,
        gprs: &mut Gprs,
        kept: Gpa,
        at: Gpa,
        l1: &impl L1Memory,
    ) -> bool {
        // VMRUN is L1's: its block is the one that runs.
        if self.level != Level::L1 {
            return false;
        }
        let Ok(mut page) = KBox::<Vmcb>::zeroed() else { return false };
        if l1.read(Gpa(kept.0.wrapping_add(KEPT_AT)), page.save.as_mut_bytes()).is_err()
            || !checks::can_run_vmrun(&page.save)
            || checks::save(&page.save, &self.cold.offered, Clean::ALL).is_err()
            || !self.cold.offered.is_address(at.0)
            || at.page_offset() != 0
        {
            return false;
        }
        saved::take_host(&page.save, self.vmcb_mut(Clean::ALL));
        let save = &page.save;
        // Through the setters: what exits and what is live follows from these registers.
        let (cr0, mut efer) = (Cr0::from_bits_retain(save.cr0), Efer::from_bits_retain(save.efer));
        // Long mode is one of paging. L1 writes the page while it is kept.
        efer.set(Efer::LMA, efer.contains(Efer::LMA) && cr0.contains(Cr0::PG));
        self.set_efer(efer);
        self.set_cr0(cr0);
        // Written already: only what follows from a change is left to be done.
        self.vmcb_mut(Clean::CR).save.cr4 = 0;
        self.set_cr4(Cr4::from_bits_retain(save.cr4));
        // Paging was set behind the CPU's back, without what a MOV to CR3 flushes.
        self.block.request_flush();
        (gprs.0[RAX], gprs.0[RSP]) = (save.rax, save.rsp);
        // Where L1 goes on behind VMRUN, which has been done once.
        self.vmrun(gprs, at, save.rip, l1) == Executed::Entered
    }
}
