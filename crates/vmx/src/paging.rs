//! The paging registers of a guest whose page tables the CPU never sees (`ept=0`).
//!
//! The guest's CR3 is kept here, its CR0, CR4 and EFER where they are kept with EPT too. The VMCS holds what
//! makes the CPU walk the shadow tables: protection and paging with PAE, no-execute and write protection on
//! always, CR3 at the shadow root. The guest reads CR0 and CR4 from their read shadows.
//!
//! Without EPT there are no unrestricted guests (SDM vol. 3C §27.2.1.1): an entry refuses a guest in real
//! mode, and a guest in protected mode whose segment registers are still those of real mode. Both are
//! told as [`Exit::Refused`](backend::Exit::Refused) and executed in software until an entry is possible
//! again. Real mode is known, and not tried; of the rest the CPU is the judge.

use backend::{ControlRegisters, Paging, Translation};
use cpu::Cpu;
use x86::{
    Cr0, Cr4, Efer, Gpa, Hpa,
    exception::Exceptions,
    vmcs::{ENTRY_FAILURE, ExitReason, ProcControls, ProcControls2},
};

use crate::{
    fields, mitigations,
    page_log::PageLog,
    state::{Vmx, attention},
};

/// What the guest owns under EPT.
const REGISTERS: ProcControls =
    ProcControls::CR3_LOAD.union(ProcControls::CR3_STORE).union(ProcControls::INVLPG);
/// The exit reason of a state that an entry refuses.
pub(crate) const INVALID_STATE: u32 = ENTRY_FAILURE | ExitReason::InvalidGuestState.0 as u32;

/// CR0 for the CPU.
fn hardware_cr0(guest: Cr0) -> Cr0 {
    // Without EPT an entry wants paging and protection on (SDM vol. 3C §27.3.1.1); WP makes shadow pages' protection
    // hold.
    // WP whatever the guest says: who writes with it clear gets a page that allows it.
    (guest - Cr0::CD_NW) | Cr0::PE | Cr0::PG | Cr0::WP
}

/// CR4 for the CPU. PCIDs and protection keys stay out of the shadow tables; without paging every page is a
/// user page, which SMEP and SMAP would forbid the supervisor.
fn hardware_cr4(guest: Cr4, pages: bool, long: bool) -> Cr4 {
    let mut off = Cr4::PCIDE | Cr4::PKE;
    if !pages {
        off |= Cr4::SMEP | Cr4::SMAP;
    }
    // The shadow root has as many levels as the mode: five only in long mode.
    if !long {
        off |= Cr4::LA57;
    }
    // Shadow tables have entries of eight bytes.
    (guest - off) | Cr4::PAE
}

/// EFER for the CPU: long mode only once it is active.
fn hardware_efer(guest: Efer) -> Efer {
    // LME without LMA: an entry would want paging in long mode (§27.3.1.1).
    let off = if guest.is_long() { Efer::empty() } else { Efer::LME };
    // Shadow entries have NX.
    (guest - off) | Efer::NXE
}

impl<C: Cpu> Vmx<C> {
    /// Sets what exits under shadow paging.
    pub(crate) fn watch_paging(&mut self) {
        self.change_proc(REGISTERS, true);
        let exceptions = self.get(fields::EXCEPTION_BITMAP);
        // Each page fault may be one of the shadow tables.
        self.set(fields::EXCEPTION_BITMAP, exceptions | Exceptions::PF.bits());
        // Behind the controls: both write what the CPU has in the guest's place.
        self.set_cr0(self.cr0);
        self.set_efer(self.efer);
    }

    /// CR0 for the VMCS, without what VMX fixes.
    #[inline]
    pub(crate) fn real_cr0(&self, guest: Cr0) -> Cr0 {
        if self.paging.shadow { hardware_cr0(guest) } else { guest - Cr0::CD_NW }
    }

    /// CR4 for the VMCS. Machine checks reach the host whatever the guest says.
    #[inline]
    pub(crate) fn real_cr4(&self, guest: Cr4) -> Cr4 {
        let mut real = guest;
        if self.paging.shadow {
            real = self.shadowed_cr4(guest);
        }
        real |= self.features.cr4_fixed | Cr4::MCE;
        if self.features.umip_by_exits {
            real -= Cr4::UMIP;
        }
        real
    }

    #[cold]
    #[inline(never)]
    fn shadowed_cr4(&self, guest: Cr4) -> Cr4 {
        hardware_cr4(guest, self.cr0.contains(Cr0::PG), self.efer.is_long())
    }

    /// EFER for the VMCS.
    #[inline]
    pub(crate) fn real_efer(&self, guest: Efer) -> Efer {
        if self.paging.shadow { hardware_efer(guest) } else { guest }
    }

    /// After CR0 or EFER changed, which decide about the bits of CR4: the VMCS follows. In real mode an
    /// entry is not tried.
    #[cold]
    #[inline(never)]
    pub(crate) fn paging_mode_changed(&mut self) {
        // SMEP, SMAP and LA57 depend on paging and on long mode.
        self.set(fields::GUEST_CR4, self.real_cr4(self.cr4()).bits());
        if !self.cr0.contains(Cr0::PE) {
            self.attention |= attention::INTERPRET;
        } else {
            self.attention &= !attention::INTERPRET;
        }
    }
}

impl<C: Cpu> Translation for Vmx<C> {
    type PageLog = Self;

    fn set_paging(&mut self, paging: Paging) {
        // The bits are read by the old way of paging and written by the new one.
        self.change_ownership(|this| this.paging = paging);
        if paging.shadow {
            self.watch_paging();
        }
    }

    fn set_shadow_root(&mut self, root: Hpa) {
        if self.cold.shadow_root != root.0 {
            self.cold.shadow_root = root.0;
            self.set(fields::GUEST_CR3, root.0);
            // What lies under the VPID was made of other tables.
            self.attention |= attention::FLUSH;
        }
    }

    fn set_tdp_root(&mut self, root: Hpa) {
        let pointer = self.features.ept_pointer(root.0);
        // A tree of L1's own: the pointer is for L1, and not for what runs.
        if self.cold.of_l1.runs && self.set_l1_root(pointer) {
            return;
        }
        self.set_ept_pointer(pointer);
    }

    fn flush_tlb(&mut self) {
        self.attention |= attention::FLUSH;
    }

    fn flush_tdp(&mut self) {
        // Without EPT there is no EPT pointer: all translations are under the VPID.
        if self.paging.shadow {
            self.attention |= attention::FLUSH;
        } else {
            self.flush_all_roots();
        }
    }

    fn reaches_device(&mut self) {
        if mitigations::clears_for_devices() {
            self.attention |= attention::CLEAR;
        }
    }

    #[inline]
    fn page_log(&mut self) -> Option<&mut Self> {
        if self.page_log.is_some() { Some(self) } else { None }
    }
}

impl<C: Cpu> Vmx<C> {
    /// What was made from whatever tables is forgotten, of a root that no VMCS has that may be entered now when that comes back.
    pub(crate) fn flush_all_roots(&mut self) {
        self.attention |= attention::FLUSH_TDP;
        if let Some(n) = &mut self.nested {
            n.seconds.owe_flush();
        }
    }

    /// Sets the EPT pointer of the current VMCS.
    #[inline(always)]
    pub(crate) fn set_ept_pointer(&mut self, pointer: u64) {
        if self.vmcs.set_ept_pointer(&self.cpu, pointer) {
            self.attention |= attention::FLUSH_TDP;
        }
    }
}

impl<C: Cpu> backend::PageLog for Vmx<C> {
    fn set_logging(&mut self, on: bool) {
        if self.page_log.is_some() {
            // Both: L1 goes on logging when L2 is left.
            self.behind_l2(|cpu, vmcs01| {
                vmcs01.change_proc2(cpu, ProcControls2::PML, on);
            });
            if self.nested_tables_run() {
                // L2's own physical addresses are of no use in a log. The place in it goes to vmcs01 at the exit.
                if on {
                    self.set(fields::PML_INDEX, PageLog::EMPTY);
                }
                return;
            }
            let was = self.get(fields::PROC_CONTROLS2) & ProcControls2::PML.bits() != 0;
            if on && !was {
                // Another VMCS of this vCPU may have logged since this one did.
                self.set(fields::PML_INDEX, PageLog::EMPTY);
            }
            // Behind the index: the first write may come right away.
            self.change_proc2(ProcControls2::PML, on);
        }
    }

    fn take_logged(&mut self, each: impl FnMut(Gpa)) {
        let Some(log) = &self.page_log else { return };
        // The index is the CPU's: it is read anew after each exit.
        log.take(self.get(fields::PML_INDEX), each);
        // Behind the log, all of which was told.
        self.set(fields::PML_INDEX, PageLog::EMPTY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_always_pages_and_write_protects() {
        let on = Cr0::PE | Cr0::PG | Cr0::WP;
        assert_eq!(hardware_cr0(Cr0::ET | Cr0::CD_NW), Cr0::ET | on);
        assert_eq!(hardware_cr4(Cr4::empty(), false, false), Cr4::PAE);
        assert_eq!(hardware_efer(Efer::empty()), Efer::NXE);
    }

    #[test]
    fn supervisor_protections_are_off_without_paging() {
        let guest = Cr4::SMEP | Cr4::SMAP | Cr4::PKE | Cr4::PCIDE | Cr4::OSFXSR;
        let rest = Cr4::PAE | Cr4::OSFXSR;
        assert_eq!(hardware_cr4(guest, false, false), rest);
        assert_eq!(hardware_cr4(guest, true, false), rest | (Cr4::SMEP | Cr4::SMAP));
    }

    #[test]
    fn long_mode_is_the_cpus_only_once_it_is_active() {
        let (lme, both) = (Efer::LME, (Efer::LME | Efer::LMA));
        assert_eq!(hardware_efer(lme), Efer::NXE);
        assert_eq!(hardware_efer(both), both | Efer::NXE);
        assert_eq!(hardware_cr4(Cr4::LA57, true, false), Cr4::PAE);
    }
}
