//! Guest registers that are live in the hardware while the loop runs, beside those that VM entry and
//! exit switch: debug registers, extended state, TSC_AUX, the SYSCALL MSRs, KERNEL_GS_BASE.

use cpu::Cpu;
use x86::{Dr6, Dr7, msr};

use crate::{enter::Vmx, fields};

/// The SYSCALL MSRs that the guest has live in long mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SyscallMsrs {
    pub star: u64,
    pub lstar: u64,
    pub mask: u64,
}

impl<C: Cpu> Vmx<C> {
    /// Gives the guest DR0 to DR3 and DR6 of the hardware.
    #[cold]
    #[inline(never)]
    pub(crate) fn load_debug_regs(&mut self) {
        // The host's breakpoints must not hit at the guest's addresses until the entry loads DR7.
        self.cpu.set_debug_reg(7, 0);
        for (n, value) in self.cold.dr.into_iter().enumerate() {
            self.cpu.set_debug_reg(n as u8, value);
        }
        self.cpu.set_debug_reg(6, self.dr6.bits());
    }

    /// Takes them back. The guest keeps them, to be loaded with the next run, while a breakpoint
    /// of its is enabled.
    #[cold]
    #[inline(never)]
    pub(crate) fn save_debug_regs(&mut self) {
        for n in 0..4u8 {
            let value = self.cpu.debug_reg(n);
            if let Some(slot) = self.cold.dr.get_mut(usize::from(n)) {
                *slot = value;
            }
        }
        self.dr6 = Dr6::new(self.cpu.debug_reg(6));
        self.cpu.set_debug_reg(6, Dr6::RESET.bits());
        self.dr_owned = self.dr7().has_breakpoints();
        self.intercept_debug_regs(!self.dr_owned);
    }

    /// The guest uses its debug registers: they are its own from now on.
    pub(crate) fn give_debug_regs(&mut self) {
        if self.dr_owned {
            return;
        }
        self.dr_owned = true;
        self.intercept_debug_regs(false);
        if self.vmcs.is_loaded() {
            self.load_debug_regs();
        }
    }

    /// Sets DR6, in the hardware too where the guest owns it.
    pub(crate) fn set_dr6(&mut self, value: Dr6) {
        self.dr6 = value;
        if self.vmcs.is_loaded() && self.dr_owned {
            self.cpu.set_debug_reg(6, value.bits());
        }
    }

    pub(crate) fn dr7(&self) -> Dr7 {
        Dr7::new(self.get(fields::GUEST_DR7))
    }

    /// An entry refuses a DR7 with an upper half.
    pub(crate) fn set_dr7(&mut self, value: Dr7) {
        self.set(fields::GUEST_DR7, value.bits());
    }

    /// Whether the guest can see XCR0: only with CR4.OSXSAVE, whose writes exit.
    fn sees_xcr0(&self) -> bool {
        self.limits.xsave && self.cr4 & (1 << 18) != 0
    }

    /// Exchanges the host's extended state for the guest's, where the two may differ.
    #[inline(never)]
    pub(crate) fn load_extended(&mut self) {
        if self.cold.host_xcr0 == 0 {
            self.cold.host_xcr0 = self.cpu.xcr0();
        }
        self.cold.live_xcr0 = self.cold.host_xcr0;
        self.cold.live_xss = self.cold.host_xss;
        self.extended = self.extended_differs();
        self.write_extended();
        if self.features.pku {
            self.cold.host_pkru = self.cpu.pkru();
            if self.pkru != self.cold.host_pkru {
                self.cpu.set_pkru(self.pkru);
            }
        }
    }

    /// XCR0 as the guest runs with it.
    fn shown_xcr0(&self) -> u64 {
        if self.sees_xcr0() { self.xcr0 } else { self.cold.host_xcr0 }
    }

    /// Whether the guest's extended state may be another than the host's. PKRU may always be.
    fn extended_differs(&self) -> bool {
        self.features.pku
            || self.shown_xcr0() != self.cold.host_xcr0
            || (self.features.xsaves && self.xss != self.cold.host_xss)
    }

    /// One of the guest's values has changed, perhaps inside the loop.
    pub(crate) fn sync_extended(&mut self) {
        if !self.features.xsave {
            return;
        }
        if self.cold.live_xcr0 != 0 {
            self.write_extended();
        } else if self.cold.host_xcr0 != 0 && self.extended_differs() && self.vmcs.is_loaded() {
            return self.load_extended();
        }
        self.extended = self.cold.host_xcr0 == 0 || self.extended_differs();
    }

    /// Brings XCR0 and IA32_XSS to what the guest is to see.
    fn write_extended(&mut self) {
        let xcr0 = self.shown_xcr0();
        if xcr0 != self.cold.live_xcr0 {
            self.cold.live_xcr0 = xcr0;
            self.cpu.set_xcr0(xcr0);
        }
        if self.features.xsaves && self.xss != self.cold.live_xss {
            self.cold.live_xss = self.xss;
            self.cpu.wrmsr(msr::XSS, self.xss);
        }
    }

    /// Brings XCR0 and IA32_XSS back to what the host has.
    #[inline(never)]
    pub(crate) fn unload_extended(&mut self) {
        if self.cold.live_xcr0 != self.cold.host_xcr0 {
            self.cpu.set_xcr0(self.cold.host_xcr0);
        }
        self.cold.live_xcr0 = 0;
        if self.cold.live_xss != self.cold.host_xss {
            self.cpu.wrmsr(msr::XSS, self.cold.host_xss);
        }
        if self.features.pku {
            self.pkru = self.cpu.pkru();
            if self.pkru != self.cold.host_pkru {
                self.cpu.set_pkru(self.cold.host_pkru);
            }
        }
    }

    /// Brings TSC_AUX to the guest's value.
    #[inline]
    pub(crate) fn sync_tsc_aux(&mut self) {
        if self.vmcs.is_loaded()
            && self.features.rdtscp
            && let Some(here) = self.vmcs.here()
        {
            let lent = &here.user_return;
            lent.lend(&mut self.cpu, &lent.tsc_aux, self.tsc_aux);
        }
    }

    /// Loads the guest's SYSCALL MSRs where it can use them. Until then another's stay, and the
    /// guest does not see them, for reads exit.
    #[inline]
    pub(crate) fn sync_syscall(&mut self) {
        const SCE_LMA: u64 = 1 | 1 << 10;
        if self.vmcs.is_loaded()
            && self.efer & SCE_LMA == SCE_LMA
            && let Some(here) = self.vmcs.here()
        {
            let (lent, want) = (&here.user_return, self.syscall);
            lent.lend(&mut self.cpu, &lent.star, want.star);
            lent.lend(&mut self.cpu, &lent.lstar, want.lstar);
            lent.lend(&mut self.cpu, &lent.mask, want.mask);
        }
    }

    /// Brings KERNEL_GS_BASE to the guest's value.
    #[inline]
    pub(crate) fn sync_kernel_gs_base(&mut self) {
        if self.vmcs.is_loaded() && self.kernel_gs_base != self.cold.live_gs_base {
            self.cold.live_gs_base = self.kernel_gs_base;
            self.cpu.wrmsr(msr::KERNEL_GS_BASE, self.kernel_gs_base);
        }
    }

    /// KERNEL_GS_BASE, which SWAPGS changes while the guest runs.
    pub(crate) fn kernel_gs_base_now(&mut self) -> u64 {
        if self.vmcs.is_loaded() {
            self.kernel_gs_base = self.cpu.rdmsr(msr::KERNEL_GS_BASE);
            self.cold.live_gs_base = self.kernel_gs_base;
        }
        self.kernel_gs_base
    }
}
