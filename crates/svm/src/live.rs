//! Guest registers that are live in the hardware while the loop runs, beside those that VMRUN and VMLOAD
//! exchange: debug registers, extended state, TSC_AUX. What they are is [`guest_live`]'s; when they are
//! exchanged, and what the guest may see of them, is said here.

use cpu::Cpu;
use x86::{Cr4, Dr7};

use crate::enter::Svm;

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
        self.intercept_debug_regs();
    }

    /// The guest uses its debug registers: they are its own from now on.
    pub(crate) fn give_debug_regs(&mut self) {
        if self.debug.give() {
            self.intercept_debug_regs();
            if self.loaded {
                self.load_debug_regs();
            }
        }
    }

    /// Whether the guest can see XCR0: only with CR4.OSXSAVE, whose writes exit while it is clear.
    #[inline(always)]
    fn sees_xcr0(&mut self) -> bool {
        let seen = self.limits.xsave && self.vmcb().save.cr4 & Cr4::OSXSAVE.bits() != 0;
        if !seen {
            // A guest that owns CR4 has cleared OSXSAVE without an exit. When it sets it again, that has
            // to be seen.
            self.update_cr4_intercept();
        }
        seen
    }

    #[inline]
    pub(crate) fn load_extended(&mut self) {
        let sees_xcr0 = self.sees_xcr0();
        self.extended.load(&mut self.cpu, sees_xcr0);
    }

    /// Brings XCR0 and IA32_XSS to what the guest is to see, when one of them or CR4.OSXSAVE changes
    /// inside the loop.
    pub(crate) fn sync_extended(&mut self) {
        if self.extended.is_loaded() {
            let sees_xcr0 = self.sees_xcr0();
            self.extended.sync(&mut self.cpu, sees_xcr0);
        }
    }

    /// Brings TSC_AUX to the guest's value.
    #[inline]
    pub(crate) fn sync_tsc_aux(&mut self) {
        if self.loaded && self.features.rdtscp {
            self.tsc_aux.sync(&mut self.cpu);
        }
    }
}
