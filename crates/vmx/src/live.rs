//! Guest registers that are live in the hardware while the loop runs, beside those that VM entry and
//! exit exchange: debug registers, extended state, TSC_AUX, the SYSCALL MSRs, KERNEL_GS_BASE. What they
//! are is [`guest_live`]'s; when they are exchanged, and what the guest may see of them, is said here.

use backend::LiveRegisters;
use cpu::Cpu;
use x86::{Cr4, Dr6, Dr7, Efer};

use crate::{fields, state::Vmx};

impl<C: Cpu> Vmx<C> {
    #[cold]
    #[inline(never)]
    pub(crate) fn load_debug_regs(&mut self) {
        self.cold.debug.load(&mut self.cpu);
        self.cold.dr6.load(&mut self.cpu);
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn save_debug_regs(&mut self) {
        // DR7 is in the VMCS: which addresses are enabled decides what has to be saved.
        let dr7 = self.dr7();
        self.cold.debug.save(&mut self.cpu, dr7);
        self.cold.dr6.save(&mut self.cpu);
        // The next access exits again, so that a guest that does not use them does not pay for them.
        self.intercept_debug_regs();
    }

    /// The guest's DR6, out of the hardware where the guest owns it: it may have written it since the loop was entered.
    pub(crate) fn dr6(&mut self) -> Dr6 {
        if self.vmcs.is_loaded() && self.cold.debug.owned() {
            self.cold.dr6.save(&mut self.cpu);
        }
        self.cold.dr6.get()
    }

    /// Sets DR6, in the hardware too where the guest owns it.
    pub(crate) fn set_dr6(&mut self, value: Dr6) {
        self.cold.dr6.set(value);
        // DR6 is no field of the VMCS: it is live from its first use.
        if self.vmcs.is_loaded() && self.cold.debug.owned() {
            self.cold.dr6.load(&mut self.cpu);
        }
    }

    /// The guest's DR7.
    pub(crate) fn dr7(&self) -> Dr7 {
        Dr7::new(self.get(fields::GUEST_DR7))
    }

    /// Sets the guest's DR7. An entry refuses one with an upper half.
    pub(crate) fn set_dr7(&mut self, value: Dr7) {
        self.set(fields::GUEST_DR7, value.bits());
    }

    /// Whether the guest can see XCR0: only with CR4.OSXSAVE, whose writes exit.
    fn sees_xcr0(&self) -> bool {
        self.features.xsave && self.cr4.contains(Cr4::OSXSAVE)
    }

    /// Exchanges the host's extended state for the guest's, where the two may differ.
    #[inline(never)]
    pub(crate) fn load_extended(&mut self) {
        let sees_xcr0 = self.sees_xcr0();
        self.cold.extended.load(&mut self.cpu, sees_xcr0);
        self.extended = self.cold.extended.may_differ(sees_xcr0);
    }

    /// Brings XCR0, IA32_XSS and PKRU back to what the host has.
    #[inline(never)]
    pub(crate) fn unload_extended(&mut self) {
        // Before anything of the kernel's may use them.
        self.cold.extended.unload(&mut self.cpu);
    }

    /// One of the guest's values has changed, or what it sees of them, perhaps inside the loop.
    pub(crate) fn sync_extended(&mut self) {
        if !self.features.xsave {
            return;
        }
        let sees_xcr0 = self.sees_xcr0();
        let extended = &mut self.cold.extended;
        if extended.is_loaded() {
            extended.sync(&mut self.cpu, sees_xcr0);
        } else if self.vmcs.is_loaded() && extended.may_differ(sees_xcr0) {
            // It became another inside the loop: from here on it is exchanged.
            return self.load_extended();
        }
        self.extended = self.cold.extended.may_differ(sees_xcr0);
    }

    /// Brings TSC_AUX to the guest's value.
    #[inline]
    pub(crate) fn sync_tsc_aux(&mut self) {
        // Outside the loop the value is kept: the next load lends it.
        if self.vmcs.is_loaded()
            && self.features.rdtscp
            && let Some(here) = self.vmcs.here()
        {
            // Lent, not exchanged: it goes back when the thread returns to user space, which alone reads it.
            here.user_return.lend_tsc_aux(&mut self.cpu, self.tsc_aux);
        }
    }

    /// Loads the guest's SYSCALL MSRs where it can use them. Until then another's stay, and the
    /// guest does not see them, for reads exit.
    #[inline]
    pub(crate) fn sync_syscall(&mut self) {
        const SCE_LMA: Efer = Efer::SCE.union(Efer::LMA);
        if self.vmcs.is_loaded()
            // Outside of long mode, or without SCE, SYSCALL is undefined and the values are of no use.
            && self.efer.contains(SCE_LMA)
            && let Some(here) = self.vmcs.here()
        {
            here.user_return.lend_syscall(&mut self.cpu, self.syscall);
        }
    }

    /// Sets the guest's KERNEL_GS_BASE.
    pub(crate) fn set_kernel_gs_base(&mut self, value: u64) {
        // What is set is compared with what the CPU holds, and SWAPGS may have changed that.
        self.kernel_gs_base_now();
        self.kernel_gs_base.set(value);
        if self.vmcs.is_loaded() {
            self.kernel_gs_base.sync(&mut self.cpu);
        }
    }

    /// KERNEL_GS_BASE, which SWAPGS changes while the guest runs.
    pub(crate) fn kernel_gs_base_now(&mut self) -> u64 {
        if self.vmcs.is_loaded() {
            self.kernel_gs_base.read_back(&mut self.cpu);
        }
        self.kernel_gs_base.get()
    }
}

impl<C: Cpu> LiveRegisters for Vmx<C> {
    fn debug_regs(&self) -> [u64; 6] {
        let [a, b, c, d] = self.cold.debug.addresses();
        [a, b, c, d, self.cold.dr6.get().bits(), self.dr7().bits()]
    }

    fn set_debug_regs(&mut self, regs: [u64; 6]) {
        let [a, b, c, d, dr6, dr7] = regs;
        self.cold.debug.set_addresses([a, b, c, d]);
        let dr7 = Dr7::new(dr7);
        self.set_dr6(Dr6::new(dr6));
        self.set_dr7(dr7);
        // They have to be in the CPU at the next entry. Others are loaded when the guest touches one.
        if dr7.has_breakpoints() {
            self.own_debug_regs();
        }
    }

    fn own_debug_regs(&mut self) {
        // Once: a guest that has them already loses nothing by asking.
        if self.cold.debug.give() {
            self.intercept_debug_regs();
            if self.vmcs.is_loaded() {
                self.load_debug_regs();
            }
        }
    }

    fn watch_debug_regs(&mut self, on: bool) {
        self.cold.debug.watch(on);
        self.intercept_debug_regs();
    }

    fn xcr0(&self) -> u64 {
        self.cold.extended.xcr0()
    }

    fn set_xcr0(&mut self, value: u64) {
        // Bits that the host does not have were refused before.
        self.cold.extended.set_xcr0(value);
        self.sync_extended();
    }

    fn xss(&self) -> u64 {
        self.cold.extended.xss()
    }

    fn set_xss(&mut self, value: u64) {
        self.cold.extended.set_xss(value);
        self.sync_extended();
    }

    fn pkru(&self) -> u32 {
        self.cold.extended.pkru()
    }

    fn set_pkru(&mut self, value: u32) {
        self.cold.extended.set_pkru(value);
    }
}
