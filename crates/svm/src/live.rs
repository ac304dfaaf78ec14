//! Guest registers that are live in the hardware while the loop runs, beside those that VMRUN and VMLOAD
//! exchange: debug registers, extended state, TSC_AUX. What they are is [`guest_live`]'s; when they are
//! exchanged, and what the guest may see of them, is said here.

use backend::LiveRegisters;
use cpu::Cpu;
use x86::{Cr4, Dr6, Dr7, vmcb::Clean};

use crate::state::Svm;

impl<C: Cpu> Svm<C> {
    #[cold]
    #[inline(never)]
    pub(crate) fn load_debug_regs(&mut self) {
        self.debug.load(&mut self.cpu);
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn save_debug_regs(&mut self) {
        let dr7 = Dr7::new(self.vmcb().save.dr7);
        self.debug.save(&mut self.cpu, dr7);
        // What is saved is no more in the CPU: the guest's next access has to exit.
        self.intercept_debug_regs();
    }

    /// Whether the guest can see XCR0: only with CR4.OSXSAVE, whose writes exit while it is clear.
    #[inline(always)]
    fn sees_xcr0(&mut self) -> bool {
        let seen = self.features.xsave
            && Cr4::from_bits_retain(self.vmcb().save.cr4).contains(Cr4::OSXSAVE);
        if !seen {
            // A guest that owns CR4 has cleared OSXSAVE without an exit. When it sets it again, that has
            // to be seen.
            self.update_cr4_intercept();
        }
        seen
    }

    #[inline]
    pub(crate) fn load_extended(&mut self) {
        self.extended.begin_load(&mut self.cpu);
        let sees_xcr0 = self.sees_xcr0();
        self.extended.sync(&mut self.cpu, sees_xcr0);
    }

    /// Brings XCR0 and IA32_XSS to what the guest is to see, when one of them or CR4.OSXSAVE changes
    /// inside the loop.
    pub(crate) fn sync_extended(&mut self) {
        // Outside the loop the next load does it.
        if self.extended.is_loaded() {
            let sees_xcr0 = self.sees_xcr0();
            self.extended.sync(&mut self.cpu, sees_xcr0);
        }
    }

    /// Brings TSC_AUX to the guest's value.
    #[inline]
    pub(crate) fn sync_tsc_aux(&mut self) {
        // Outside of the loop the CPU has the host's.
        if self.loaded && self.features.rdtscp {
            self.tsc_aux.sync(&mut self.cpu);
        }
    }
}

impl<C: Cpu> LiveRegisters for Svm<C> {
    fn debug_regs(&self) -> [u64; 6] {
        let save = &self.vmcb().save;
        let [a, b, c, d] = self.debug.addresses();
        [a, b, c, d, save.dr6, save.dr7]
    }

    fn set_debug_regs(&mut self, regs: [u64; 6]) {
        let [a, b, c, d, dr6, dr7] = regs;
        self.debug.set_addresses([a, b, c, d]);
        let dr7 = Dr7::new(dr7);
        let save = &mut self.vmcb_mut(Clean::DR).save;
        (save.dr6, save.dr7) = (Dr6::new(dr6).bits(), dr7.bits());
        // They have to be in the CPU at the next entry. Others are loaded when the guest touches one.
        if dr7.has_breakpoints() {
            self.own_debug_regs();
        }
    }

    fn own_debug_regs(&mut self) {
        if self.debug.give() {
            self.intercept_debug_regs();
            if self.loaded {
                self.load_debug_regs();
            }
        }
    }

    fn watch_debug_regs(&mut self, on: bool) {
        self.debug.watch(on);
        self.intercept_debug_regs();
    }

    fn xcr0(&self) -> u64 {
        self.extended.xcr0()
    }

    fn set_xcr0(&mut self, value: u64) {
        self.extended.set_xcr0(value);
        self.sync_extended();
    }

    fn xss(&self) -> u64 {
        self.extended.xss()
    }

    fn set_xss(&mut self, value: u64) {
        self.extended.set_xss(value);
        self.sync_extended();
    }

    fn pkru(&self) -> u32 {
        self.extended.pkru()
    }

    fn set_pkru(&mut self, value: u32) {
        self.extended.set_pkru(value);
    }
}
