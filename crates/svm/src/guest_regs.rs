//! The paging registers of a guest whose page tables the hardware never sees (`npt=0`), and what the hardware
//! has in their place.
//!
//! The guest's CR0, CR3, CR4 and EFER are kept here; the control block holds what makes the hardware
//! walk the shadow tables: paging with PAE, no-execute and write protection on always, CR3 at the
//! shadow root. Without long mode a guest runs on PAE tables, in real mode too ("paged real mode",
//! APM vol. 2 §15.19).

use backend::{CR0_CD_NW, ControlRegs};
use x86::{Cr0, Cr4, Efer, vmcb::Save};

/// Bits of CR0 that the guest may write without an exit.
const CR0_OWNED: u64 = Cr0::TS.union(Cr0::MP).bits();

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
        self.cr0 & Cr0::PG.bits() != 0
    }

    fn is_long(&self) -> bool {
        self.efer & Efer::LMA.bits() != 0
    }

    /// CR0 for the hardware.
    pub(crate) fn cr0_hardware(&self) -> u64 {
        (self.cr0 & !CR0_CD_NW) | Cr0::PG.bits() | Cr0::WP.bits()
    }

    /// CR4 for the hardware. PCIDs and protection keys stay out of the shadow tables; without paging
    /// every page is a user page, which SMEP and SMAP would forbid the supervisor.
    pub(crate) fn cr4_hardware(&self) -> u64 {
        let mut off = Cr4::PCIDE.bits() | Cr4::PKE.bits();
        if !self.pages() {
            off |= Cr4::SMEP.bits() | Cr4::SMAP.bits();
        }
        if !self.is_long() {
            off |= Cr4::LA57.bits();
        }
        (self.cr4 & !off) | Cr4::PAE.bits()
    }

    /// EFER for the hardware: long mode only once it is active.
    pub(crate) fn efer_hardware(&self) -> u64 {
        let off = if self.is_long() { 0 } else { Efer::LME.bits() };
        (self.efer & !off) | Efer::NXE.bits() | Efer::SVME.bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PE: u64 = Cr0::PE.bits();
    const ET: u64 = Cr0::ET.bits();

    #[test]
    fn the_hardware_always_pages_and_write_protects() {
        let real = GuestRegs { cr0: ET | CR0_CD_NW, ..GuestRegs::default() };
        assert_eq!(real.cr0_hardware(), ET | Cr0::PG.bits() | Cr0::WP.bits());
        assert_eq!(real.cr4_hardware(), Cr4::PAE.bits());
        assert_eq!(real.efer_hardware(), Efer::NXE.bits() | Efer::SVME.bits());
        let without_wp = GuestRegs { cr0: PE | Cr0::PG.bits(), cr4: Cr4::SMEP.bits(), ..real };
        assert_eq!(without_wp.cr0_hardware(), PE | Cr0::PG.bits() | Cr0::WP.bits());
        assert_eq!(without_wp.cr4_hardware(), Cr4::PAE.bits() | Cr4::SMEP.bits());
    }

    #[test]
    fn supervisor_protections_are_off_without_paging() {
        let cr4 =
            Cr4::SMEP.bits() | Cr4::SMAP.bits() | Cr4::PKE.bits() | Cr4::PCIDE.bits() | (1 << 9);
        let regs = GuestRegs { cr0: PE, cr4, ..GuestRegs::default() };
        assert_eq!(regs.cr4_hardware(), Cr4::PAE.bits() | (1 << 9));
        let paging = GuestRegs { cr0: PE | Cr0::PG.bits(), ..regs };
        assert_eq!(
            paging.cr4_hardware(),
            Cr4::PAE.bits() | Cr4::SMEP.bits() | Cr4::SMAP.bits() | (1 << 9)
        );
    }

    #[test]
    fn long_mode_is_the_hardwares_only_once_it_is_active() {
        let enabled =
            GuestRegs { efer: Efer::LME.bits(), cr4: Cr4::LA57.bits(), ..GuestRegs::default() };
        assert_eq!(enabled.efer_hardware(), Efer::NXE.bits() | Efer::SVME.bits());
        assert_eq!(enabled.cr4_hardware(), Cr4::PAE.bits());
        let active = GuestRegs {
            cr0: PE | Cr0::PG.bits(),
            efer: Efer::LME.bits() | Efer::LMA.bits(),
            ..enabled
        };
        assert_eq!(
            active.efer_hardware(),
            Efer::LME.bits() | Efer::LMA.bits() | Efer::NXE.bits() | Efer::SVME.bits()
        );
        assert_eq!(active.cr4_hardware(), Cr4::PAE.bits() | Cr4::LA57.bits());
    }
}
