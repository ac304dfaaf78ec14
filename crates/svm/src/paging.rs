//! What paging makes exit: shadow paging (`npt=0`), with the registers of [`GuestRegs`](crate::guest_regs), and TDP.
//!
//! Reads of CR0 and CR4 exit only while the hardware's value is another than the guest's (and those of
//! CR0 always without NRIP save: see [`Svm::renew_cr0`]). CR0.TS and
//! CR0.MP are the guest's own where the CPU can tell writes of them from others.

use backend::{Absent, Gprs, Paging, Translation};
use cpu::Cpu;
use x86::{
    Cr0, Cr4, Hpa,
    exception::Exceptions,
    vmcb::{Clean, Intercept3, InterceptCr},
};

use crate::state::Svm;

/// Reads and writes of CR3, writes of CR4.
const CR_ALWAYS: InterceptCr =
    InterceptCr::READ_CR3.union(InterceptCr::WRITE_CR3).union(InterceptCr::WRITE_CR4);

impl<C: Cpu> Svm<C> {
    /// Sets what exits under shadow paging, and what does not.
    pub(crate) fn watch_paging(&mut self) {
        let selective = Intercept3::CR0_SEL_WRITE.bits();
        let invlpg = Intercept3::INVLPG.bits();
        self.vmcb_mut(Clean::NPT).control.np_ctl = 0;
        self.change_intercepts(|words| {
            words[0] |= CR_ALWAYS.bits();
            // Each page fault may be one of the shadow tables.
            words[2] |= Exceptions::PF.bits();
            words[3] |= selective | invlpg;
        });
        // INVPCID is not the guest's any more.
        self.update_passthrough();
        self.renew_cr0();
        self.renew_efer();
        self.renew_cr4();
    }

    /// After the guest's CR0 changed: brings the hardware's in line.
    pub(crate) fn renew_cr0(&mut self) {
        let (guest, nrip) = (self.guest, self.features.nrip_save);
        let cr0 = match self.shows_cache_disable {
            true => guest.cr0_hardware() | guest.cr0 & Cr0::CD_NW,
            false => guest.cr0_hardware(),
        };
        self.vmcb_mut(Clean::CR).save.cr0 = cr0.bits();
        // QEMU's emulation takes the intercept of CR0 for that of CR3, CR4 and CR8 as well; the
        // instruction is decoded there, so what is read is known all the same.
        self.intercept_cr(InterceptCr::READ_CR0, cr0 != guest.cr0 || !nrip);
        self.intercept_cr(InterceptCr::WRITE_CR0, !nrip || guest.cr0.intersects(Cr0::CD_NW));
        self.follow();
    }

    /// After the guest's EFER changed.
    pub(crate) fn renew_efer(&mut self) {
        self.vmcb_mut(Clean::CR).save.efer = self.guest.efer_hardware().bits();
        self.follow();
    }

    /// Paging and long mode decide which bits of the guest's CR4 the hardware may have.
    #[inline]
    fn follow(&mut self) {
        // A change of paging or mode often changes nothing of CR4.
        if self.vmcb().save.cr4 != self.guest.cr4_hardware().bits() {
            self.renew_cr4();
        }
    }

    /// After the guest's CR4 changed.
    pub(crate) fn renew_cr4(&mut self) {
        let guest = self.guest;
        let cr4 = guest.cr4_hardware();
        let save = &mut self.vmcb_mut(Clean::CR).save;
        let changed = Cr4::from_bits_retain(core::mem::replace(&mut save.cr4, cr4.bits())) ^ cr4;
        self.intercept_cr(InterceptCr::READ_CR4, cr4 != guest.cr4);
        if changed.contains(Cr4::OSXSAVE) {
            self.sync_extended();
        }
    }
}

impl<C: Cpu> Svm<C> {
    /// Out of line with all of `self`: a pointer to the control block alone would be kept in a register
    /// for the whole loop, and the block be reached through that.
    #[cold]
    #[inline(never)]
    pub(crate) fn enter_flushing(&mut self, gprs: &mut Gprs) {
        // SVM is off on this CPU: what user space hears is an entry that the CPU has refused.
        if !self.loaded {
            return self.block.refuse();
        }
        self.block.enter_flushing(&self.features, &mut self.cpu, gprs, self.spec);
    }
}

impl<C: Cpu> Translation for Svm<C> {
    type PageLog = Absent;

    fn set_paging(&mut self, paging: Paging) {
        self.paging = paging;
        if paging.shadow {
            return self.watch_paging();
        }
        // With this the guest keeps CR0.TS and CR0.MP to itself.
        let selective = Intercept3::CR0_SEL_WRITE.bits();
        let bits = if paging.watch_roles { selective } else { 0 };
        self.change_intercepts(|words| words[3] = (words[3] & !selective) | bits);
        self.update_cr4_intercept();
    }

    fn set_shadow_root(&mut self, root: Hpa) {
        if self.vmcb().save.cr3 != root.0 {
            self.vmcb_mut(Clean::CR).save.cr3 = root.0;
            self.block.request_flush();
        }
    }

    fn set_tdp_root(&mut self, root: Hpa) {
        if self.control_of_l1().ncr3 != root.0 {
            let block = self.block_of_l1();
            block.vmcb_mut(Clean::NPT).control.ncr3 = root.0;
            block.request_flush();
            // L2's block takes the root over when it runs, and has translations of the one before.
            self.flush_other_block();
            self.follow_tdp_root(root);
        }
    }

    fn flush_tlb(&mut self) {
        // L1's linear addresses alone, or L2's: each has its own ASID.
        self.block.request_flush();
    }

    fn flush_tdp(&mut self) {
        self.block.request_flush();
        // Both have translations made from these tables.
        self.flush_other_block();
    }

    /// Written pages are found by write protection.
    #[inline(always)]
    fn page_log(&mut self) -> Option<&mut Absent> {
        None
    }
}
