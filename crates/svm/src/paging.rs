//! The paging registers of a guest whose page tables the hardware never sees (`npt=0`).
//!
//! The guest's CR0, CR3, CR4 and EFER are kept here; the control block holds what makes the hardware
//! walk the shadow tables: paging with PAE, no-execute and write protection on always, CR3 at the
//! shadow root. Without long mode a guest runs on PAE tables, in real mode too ("paged real mode",
//! APM vol. 2 §15.19).
//!
//! Reads of CR0 and CR4 exit only while the hardware's value is another than the guest's (and those of
//! CR0 always without NRIP save: see [`Svm::renew_hardware`]). CR0.TS and
//! CR0.MP are the guest's own where the CPU can tell writes of them from others.

use backend::{Absent, CR0_CD_NW, ControlRegs, Paging, Translation};
use cpu::Cpu;
use x86::{
    Hpa,
    vmcb::{Clean, Intercept3, Save},
};

use crate::state::Svm;

const CR0_MP: u64 = 1 << 1;
const CR0_TS: u64 = 1 << 3;
const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const CR4_PCIDE: u64 = 1 << 17;
const CR4_OSXSAVE: u64 = 1 << 18;
const CR4_SMEP: u64 = 1 << 20;
const CR4_SMAP: u64 = 1 << 21;
const CR4_PKE: u64 = 1 << 22;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const EFER_NXE: u64 = 1 << 11;
const EFER_SVME: u64 = 1 << 12;

/// Bits of CR0 that the guest may write without an exit.
const CR0_OWNED: u64 = CR0_TS | CR0_MP;
/// #PF in the exception intercepts.
const PAGE_FAULT: u32 = 1 << 14;
/// Reads and writes of CR3, writes of CR4.
const CR_ALWAYS: u32 = (1 << 3) | (1 << (16 + 3)) | (1 << (16 + 4));
const CR0_READ: u32 = 1 << 0;
const CR4_READ: u32 = 1 << 4;
const CR0_WRITE: u32 = 1 << 16;

/// The registers as the guest sees them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GuestRegs {
    pub(crate) cr0: u64,
    pub(crate) cr3: u64,
    pub(crate) cr4: u64,
    pub(crate) efer: u64,
}

impl GuestRegs {
    #[inline]
    pub(crate) fn control(&self, save: &Save) -> ControlRegs {
        ControlRegs {
            cr0: (self.cr0 & !CR0_OWNED) | (save.cr0 & CR0_OWNED),
            cr2: save.cr2,
            cr3: self.cr3,
            cr4: self.cr4,
            efer: self.efer,
        }
    }

    fn pages(&self) -> bool {
        self.cr0 & CR0_PG != 0
    }

    fn is_long(&self) -> bool {
        self.efer & EFER_LMA != 0
    }

    /// CR0 for the hardware.
    fn cr0_hardware(&self) -> u64 {
        (self.cr0 & !CR0_CD_NW) | CR0_PG | CR0_WP
    }

    /// CR4 for the hardware. PCIDs and protection keys stay out of the shadow tables; without paging
    /// every page is a user page, which SMEP and SMAP would forbid the supervisor.
    fn cr4_hardware(&self) -> u64 {
        let mut off = CR4_PCIDE | CR4_PKE;
        if !self.pages() {
            off |= CR4_SMEP | CR4_SMAP;
        }
        if !self.is_long() {
            off |= CR4_LA57;
        }
        (self.cr4 & !off) | CR4_PAE
    }

    /// EFER for the hardware: long mode only once it is active.
    fn efer_hardware(&self) -> u64 {
        let off = if self.is_long() { 0 } else { EFER_LME };
        (self.efer & !off) | EFER_NXE | EFER_SVME
    }
}

impl<C: Cpu> Svm<C> {
    /// Sets what exits under shadow paging, and what does not.
    pub(crate) fn watch_paging(&mut self) {
        let selective = Intercept3::CR0_SEL_WRITE.bits();
        let invlpg = Intercept3::INVLPG.bits();
        let control = &mut self.vmcb_mut(Clean::INTERCEPTS | Clean::NPT).control;
        control.np_ctl = 0;
        control.intercepts[0] |= CR_ALWAYS;
        control.intercepts[2] |= PAGE_FAULT;
        control.intercepts[3] |= selective | invlpg;
        self.update_passthrough();
        self.renew_cr0();
        self.renew_efer();
        self.renew_cr4();
    }

    /// After the guest's CR0 changed: brings the hardware's in line.
    pub(crate) fn renew_cr0(&mut self) {
        let (guest, nrip) = (self.guest, self.features.nrip_save);
        let cr0 = match self.shows_cache_disable {
            true => guest.cr0_hardware() | guest.cr0 & CR0_CD_NW,
            false => guest.cr0_hardware(),
        };
        self.vmcb_mut(Clean::CR).save.cr0 = cr0;
        // QEMU's emulation takes the intercept of CR0 for that of CR3, CR4 and CR8 as well; the
        // instruction is decoded there, so what is read is known all the same.
        self.intercept_cr(CR0_READ, cr0 != guest.cr0 || !nrip);
        self.intercept_cr(CR0_WRITE, !nrip || guest.cr0 & CR0_CD_NW != 0);
        self.follow();
    }

    /// After the guest's EFER changed.
    pub(crate) fn renew_efer(&mut self) {
        self.vmcb_mut(Clean::CR).save.efer = self.guest.efer_hardware();
        self.follow();
    }

    /// Paging and long mode decide which bits of the guest's CR4 the hardware may have.
    #[inline]
    fn follow(&mut self) {
        if self.vmcb().save.cr4 != self.guest.cr4_hardware() {
            self.renew_cr4();
        }
    }

    /// After the guest's CR4 changed.
    pub(crate) fn renew_cr4(&mut self) {
        let guest = self.guest;
        let cr4 = guest.cr4_hardware();
        let save = &mut self.vmcb_mut(Clean::CR).save;
        let changed = core::mem::replace(&mut save.cr4, cr4) ^ cr4;
        self.intercept_cr(CR4_READ, cr4 != guest.cr4);
        if changed & CR4_OSXSAVE != 0 {
            self.sync_extended();
        }
    }
}

impl<C: Cpu> Translation for Svm<C> {
    type PageLog = Absent;

    fn set_paging(&mut self, paging: Paging) {
        self.paging = paging;
        if paging.shadow {
            return self.watch_paging();
        }
        let word = &mut self.vmcb_mut(Clean::INTERCEPTS).control.intercepts[3];
        // With this the guest keeps CR0.TS and CR0.MP to itself.
        let selective = Intercept3::CR0_SEL_WRITE.bits();
        *word = (*word & !selective) | if paging.watch_roles { selective } else { 0 };
        self.update_cr4_intercept();
    }

    fn set_shadow_root(&mut self, root: Hpa) {
        if self.vmcb().save.cr3 != root.0 {
            self.vmcb_mut(Clean::CR).save.cr3 = root.0;
            self.block.request_flush();
        }
    }

    fn set_tdp_root(&mut self, root: Hpa) {
        if self.vmcb().control.ncr3 != root.0 {
            self.vmcb_mut(Clean::NPT).control.ncr3 = root.0;
            self.block.request_flush();
        }
    }

    fn flush_tlb(&mut self) {
        self.block.request_flush();
    }

    fn flush_tdp(&mut self) {
        self.block.request_flush();
    }

    /// Written pages are found by write protection.
    #[inline(always)]
    fn page_log(&mut self) -> Option<&mut Absent> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PE: u64 = 1;
    const ET: u64 = 1 << 4;

    #[test]
    fn the_hardware_always_pages_and_write_protects() {
        let real = GuestRegs { cr0: ET | CR0_CD_NW, ..GuestRegs::default() };
        assert_eq!(real.cr0_hardware(), ET | CR0_PG | CR0_WP);
        assert_eq!(real.cr4_hardware(), CR4_PAE);
        assert_eq!(real.efer_hardware(), EFER_NXE | EFER_SVME);
        let without_wp = GuestRegs { cr0: PE | CR0_PG, cr4: CR4_SMEP, ..real };
        assert_eq!(without_wp.cr0_hardware(), PE | CR0_PG | CR0_WP);
        assert_eq!(without_wp.cr4_hardware(), CR4_PAE | CR4_SMEP);
    }

    #[test]
    fn supervisor_protections_are_off_without_paging() {
        let cr4 = CR4_SMEP | CR4_SMAP | CR4_PKE | CR4_PCIDE | (1 << 9);
        let regs = GuestRegs { cr0: PE, cr4, ..GuestRegs::default() };
        assert_eq!(regs.cr4_hardware(), CR4_PAE | (1 << 9));
        let paging = GuestRegs { cr0: PE | CR0_PG, ..regs };
        assert_eq!(paging.cr4_hardware(), CR4_PAE | CR4_SMEP | CR4_SMAP | (1 << 9));
    }

    #[test]
    fn long_mode_is_the_hardwares_only_once_it_is_active() {
        let enabled = GuestRegs { efer: EFER_LME, cr4: CR4_LA57, ..GuestRegs::default() };
        assert_eq!(enabled.efer_hardware(), EFER_NXE | EFER_SVME);
        assert_eq!(enabled.cr4_hardware(), CR4_PAE);
        let active = GuestRegs { cr0: PE | CR0_PG, efer: EFER_LME | EFER_LMA, ..enabled };
        assert_eq!(active.efer_hardware(), EFER_LME | EFER_LMA | EFER_NXE | EFER_SVME);
        assert_eq!(active.cr4_hardware(), CR4_PAE | CR4_LA57);
    }
}
