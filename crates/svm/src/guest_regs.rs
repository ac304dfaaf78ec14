//! The paging registers of a guest whose page tables the hardware never sees (`npt=0`), and what the hardware
//! has in their place.
//!
//! The guest's CR0, CR3, CR4 and EFER are kept here; the control block holds what makes the hardware
//! walk the shadow tables: paging with PAE, no-execute and write protection on always, CR3 at the
//! shadow root. Without long mode a guest runs on PAE tables, in real mode too ("paged real mode",
//! APM vol. 2 §15.19).

use backend::ControlRegs;
use x86::{Cr0, Cr4, Efer, vmcb::Save};

/// Bits of CR0 that the guest may write without an exit.
const CR0_OWNED: Cr0 = Cr0::TS.union(Cr0::MP);

/// The registers as the guest sees them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GuestRegs {
    pub(crate) cr0: Cr0,
    pub(crate) cr3: u64,
    pub(crate) cr4: Cr4,
    pub(crate) efer: Efer,
}

impl GuestRegs {
    #[inline]
    pub(crate) fn control(&self, save: &Save) -> ControlRegs {
        ControlRegs {
            // TS and MP are changed without an exit: the block has the newest.
            cr0: (self.cr0 - CR0_OWNED) | (Cr0::from_bits_retain(save.cr0) & CR0_OWNED),
            cr2: save.cr2,
            cr3: self.cr3,
            cr4: self.cr4,
            efer: self.efer,
        }
    }

    fn pages(&self) -> bool {
        self.cr0.contains(Cr0::PG)
    }

    fn is_long(&self) -> bool {
        self.efer.is_long()
    }

    /// CR0 for the hardware.
    pub(crate) fn cr0_hardware(&self) -> Cr0 {
        // WP always: a supervisor's write to a page that shadow tables protect has to fault.
        // Caching stays on: CD in the hardware would have the guest run uncached.
        (self.cr0 - Cr0::CD_NW) | Cr0::PG | Cr0::WP
    }

    /// CR4 for the hardware. PCIDs and protection keys stay out of the shadow tables; without paging
    /// every page is a user page, which SMEP and SMAP would forbid the supervisor.
    pub(crate) fn cr4_hardware(&self) -> Cr4 {
        let mut off = Cr4::PCIDE | Cr4::PKE;
        if !self.pages() {
            off |= Cr4::SMEP | Cr4::SMAP;
        }
        // Five levels exist in long mode alone: PAE tables have three.
        if !self.is_long() {
            off |= Cr4::LA57;
        }
        // Shadow entries have eight bytes in every mode.
        (self.cr4 - off) | Cr4::PAE
    }

    /// EFER for the hardware: long mode only once it is active.
    pub(crate) fn efer_hardware(&self) -> Efer {
        let off = if self.is_long() { Efer::empty() } else { Efer::LME };
        // NXE and SVME always: shadow entries have NX, and VMRUN refuses a block without SVME.
        (self.efer - off) | Efer::NXE | Efer::SVME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PE: Cr0 = Cr0::PE;
    const ET: Cr0 = Cr0::ET;

    #[test]
    fn the_hardware_always_pages_and_write_protects() {
        let real = GuestRegs { cr0: ET | Cr0::CD_NW, ..GuestRegs::default() };
        assert_eq!(real.cr0_hardware(), ET | Cr0::PG | Cr0::WP);
        assert_eq!(real.cr4_hardware(), Cr4::PAE);
        assert_eq!(real.efer_hardware(), Efer::NXE | Efer::SVME);
        let without_wp = GuestRegs { cr0: PE | Cr0::PG, cr4: Cr4::SMEP, ..real };
        assert_eq!(without_wp.cr0_hardware(), PE | Cr0::PG | Cr0::WP);
        assert_eq!(without_wp.cr4_hardware(), Cr4::PAE | Cr4::SMEP);
    }

    #[test]
    fn supervisor_protections_are_off_without_paging() {
        let cr4 = Cr4::SMEP | Cr4::SMAP | Cr4::PKE | Cr4::PCIDE | Cr4::OSFXSR;
        let regs = GuestRegs { cr0: PE, cr4, ..GuestRegs::default() };
        assert_eq!(regs.cr4_hardware(), Cr4::PAE | Cr4::OSFXSR);
        let paging = GuestRegs { cr0: PE | Cr0::PG, ..regs };
        assert_eq!(paging.cr4_hardware(), Cr4::PAE | Cr4::SMEP | Cr4::SMAP | Cr4::OSFXSR);
    }

    #[test]
    fn long_mode_is_the_hardwares_only_once_it_is_active() {
        let enabled = GuestRegs { efer: Efer::LME, cr4: Cr4::LA57, ..GuestRegs::default() };
        assert_eq!(enabled.efer_hardware(), Efer::NXE | Efer::SVME);
        assert_eq!(enabled.cr4_hardware(), Cr4::PAE);
        let active = GuestRegs { cr0: PE | Cr0::PG, efer: Efer::LME | Efer::LMA, ..enabled };
        assert_eq!(active.efer_hardware(), Efer::LME | Efer::LMA | Efer::NXE | Efer::SVME);
        assert_eq!(active.cr4_hardware(), Cr4::PAE | Cr4::LA57);
    }
}
