//! The VMCS's controls: what exits and what the guest owns.
//!
//! Of CR0 the guest owns TS and WP, of CR4 the bits that only it is concerned with, as far as its
//! CPUID offers them; the other bits it reads from a shadow without an exit, and a write that
//! changes one exits. WP and PGE are not the guest's where the run loop has to see changes of how
//! paging entries are read ([`Paging::watch_roles`](backend::Paging::watch_roles)).

use backend::{Backend, GuestLimits};
use cpu::Cpu;
use x86::{
    msr,
    segment::attr,
    vmcs::{PinControls, ProcControls, ProcControls2, field},
};

use crate::{enter::Vmx, fields, page_log::PageLog};

const CR0_TS: u64 = 1 << 3;
const CR0_WP: u64 = 1 << 16;
const CR4_PGE: u64 = 1 << 7;
/// CR4 bits that a guest may own: PVI, TSD, DE, PGE, PCE, OSFXSR, OSXMMEXCPT, FSGSBASE.
const CR4_OWNABLE: u64 =
    (1 << 1) | (1 << 2) | (1 << 3) | CR4_PGE | (1 << 8) | (1 << 9) | (1 << 10) | (1 << 16);
const EFER_LMA: u64 = 1 << 10;
pub(crate) const TSC: u32 = 0x10;
/// PAUSE-loop exiting: cycles between two PAUSEs of one loop, and of a loop that is too long; what
/// the manual suggests and others use.
const PLE: (u32, u32) = (128, 4096);

/// MSRs whose guest value is live in hardware while the guest runs.
pub(crate) const LIVE: [u32; 6] = [
    msr::FS_BASE,
    msr::GS_BASE,
    msr::KERNEL_GS_BASE,
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
];

/// How long the core was in C1, C3, C6 and C7: what a guest reads that may use them.
pub(crate) const CORE_RESIDENCY: [u32; 4] = [0x660, 0x3fc, 0x3fd, 0x3fe];

impl<C: Cpu> Vmx<C> {
    pub(crate) fn init_control(&mut self) {
        self.pass_live_msrs();
        let features = *self.features;
        self.set(fields::PIN_CONTROLS, features.pin.base.bits());
        self.set(fields::PROC_CONTROLS, features.primary.base.bits());
        self.set(fields::PROC_CONTROLS2, features.secondary.base.bits());
        self.set(fields::EXIT_CONTROLS, features.exit.base.bits());
        self.set(fields::ENTRY_CONTROLS, features.entry.base.bits());
        // #AC and #DB loops would hold the CPU for ever without an exit; a machine check is the
        // host's. #UD: a guest may make its hypercalls with VMMCALL.
        self.set(fields::EXCEPTION_BITMAP, (1 << 1) | (1 << 6) | (1 << 17) | (1 << 18));
        self.set(fields::TPR_THRESHOLD, 0);
        self.set(fields::ENTRY_INTERRUPTION, 0);
        self.set(fields::TSC_OFFSET, 0);
        self.set(fields::GUEST_DEBUGCTL, 0);
        self.set(fields::GUEST_PAT, msr::PAT_RESET);
        if self.features.ept {
            self.set_pdpte_fields([0; 4]);
        }
        if self.page_log.is_some() {
            self.set(fields::PML_INDEX, PageLog::EMPTY);
        }
        self.reset(false);
    }

    pub(crate) fn pass_live_msrs(&self) {
        for msr in LIVE {
            self.vmcs.msr_map.intercept(msr, false, false);
        }
        self.vmcs.msr_map.intercept(TSC, false, true);
        if self.cold.fewer.cstate {
            for msr in CORE_RESIDENCY {
                self.vmcs.msr_map.intercept(msr, false, true);
            }
        }
    }

    /// Something else than an interrupt ends the guest's HLT. Where HLT does not exit, the CPU halts the
    /// guest again at an entry, and refuses one with an exception (SDM vol. 3C §27.3.1.5).
    #[inline]
    pub(crate) fn end_halt(&self) {
        if self.cold.fewer.hlt {
            self.set(fields::GUEST_ACTIVITY, 0);
        }
    }

    /// Those fields of [`Vmx::write_constants`] that not every CPU has.
    ///
    /// [`Vmx::write_constants`]: crate::Vmx
    pub(crate) fn write_optional_constants(&self) {
        let secondary = self.features.secondary.base;
        if secondary.contains(ProcControls2::PAUSE_LOOP) {
            let (gap, window) = PLE;
            self.cpu.vmwrite(field::PLE_GAP.encoding(), gap.into());
            self.cpu.vmwrite(field::PLE_WINDOW.encoding(), window.into());
        }
        if self.features.pin.base.contains(PinControls::PREEMPTION_TIMER) {
            self.cpu.vmwrite(field::PREEMPTION_TIMER.encoding(), u32::MAX.into());
        }
        if secondary.contains(ProcControls2::ENCLS) {
            self.cpu.vmwrite(field::ENCLS_EXIT_BITMAP.encoding(), u64::MAX);
        }
        if let Some(log) = &self.page_log {
            self.cpu.vmwrite(field::PML_ADDRESS.encoding(), log.hpa().0);
        }
        if secondary.contains(ProcControls2::XSAVES) {
            self.cpu.vmwrite(field::XSS_EXIT_BITMAP.encoding(), 0);
        }
    }

    /// Sets or clears primary processor-based controls.
    pub(crate) fn change_proc(&self, bits: ProcControls, on: bool) {
        let old = self.get(fields::PROC_CONTROLS);
        let new = if on { old | bits.bits() } else { old & !bits.bits() };
        self.set(fields::PROC_CONTROLS, new);
    }

    /// Sets or clears secondary processor-based controls.
    pub(crate) fn change_proc2(&self, bits: ProcControls2, on: bool) {
        let old = self.get(fields::PROC_CONTROLS2);
        let new = if on { old | bits.bits() } else { old & !bits.bits() };
        self.set(fields::PROC_CONTROLS2, new);
    }

    /// SGDT, SIDT, SLDT and STR exit, as do the loads: UMIP on CPUs without it.
    #[cold]
    #[inline(never)]
    pub(crate) fn watch_tables(&self, on: bool) {
        self.change_proc2(ProcControls2::DESCRIPTOR_TABLES, on);
    }

    /// Lets the guest's accesses of debug registers exit, or not, as it owns them or not.
    pub(crate) fn intercept_debug_regs(&mut self) {
        self.change_proc(ProcControls::MOV_DR, self.cold.debug.exits());
    }

    /// CR0 bits that the guest owns.
    pub(crate) fn owned_cr0(&self) -> u64 {
        if self.paging.watch_roles || self.paging.shadow { CR0_TS } else { CR0_TS | CR0_WP }
    }

    /// CR4 bits that the guest owns.
    pub(crate) fn owned_cr4(&self) -> u64 {
        let all = CR4_OWNABLE & self.limits.cr4_allowed;
        if self.paging.watch_roles || self.paging.shadow { all & !CR4_PGE } else { all }
    }

    pub(crate) fn cr0_now(&self) -> u64 {
        let owned = self.owned_cr0();
        (self.cr0 & !owned) | (self.get(fields::GUEST_CR0) & owned)
    }

    pub(crate) fn cr4_now(&self) -> u64 {
        let owned = self.owned_cr4();
        (self.cr4 & !owned) | (self.get(fields::GUEST_CR4) & owned)
    }

    /// Who owns which bits of CR0 and CR4 has changed, by `change`.
    pub(crate) fn change_ownership(&mut self, change: impl FnOnce(&mut Self)) {
        let (cr0, cr4) = (self.cr0_now(), self.cr4_now());
        change(self);
        self.set(fields::CR0_MASK, !self.owned_cr0());
        self.set(fields::CR4_MASK, !self.owned_cr4());
        self.set_cr0(cr0);
        self.set_cr4(cr4);
    }

    pub(crate) fn update_passthrough(&mut self) {
        let GuestLimits { tsc_aux, invpcid, xsave, .. } = self.limits;
        let features = *self.features;
        self.vmcs.msr_map.intercept(msr::TSC_AUX, !(tsc_aux && features.rdtscp), true);
        self.pass_speculation();
        if features.rdtscp {
            self.change_proc2(ProcControls2::RDTSCP, tsc_aux);
        }
        if features.invpcid {
            self.change_proc2(ProcControls2::INVPCID, invpcid);
        }
        if features.xsaves {
            self.change_proc2(ProcControls2::XSAVES, xsave);
        }
    }

    pub(crate) fn set_pdpte_fields(&mut self, [a, b, c, d]: [u64; 4]) {
        self.set(fields::GUEST_PDPTE0, a);
        self.set(fields::GUEST_PDPTE1, b);
        self.set(fields::GUEST_PDPTE2, c);
        self.set(fields::GUEST_PDPTE3, d);
    }

    pub(crate) fn replace_cr2(&mut self, value: u64) {
        self.cr2 = value;
        if self.vmcs.is_loaded() {
            self.cpu.set_cr2(value);
        }
    }

    /// RIP behind the exiting instruction.
    #[inline(always)]
    pub(crate) fn rip_after(&self) -> u64 {
        let rip = self.get(fields::GUEST_RIP);
        let next = rip.wrapping_add(u64::from(self.get(fields::INSTRUCTION_LENGTH)));
        if (rip ^ next) >> 32 != 0 { self.wrapped(next) } else { next }
    }

    /// Outside 64-bit code RIP has 32 bits.
    #[cold]
    #[inline(never)]
    fn wrapped(&self, next: u64) -> u64 {
        let long = self.efer & EFER_LMA != 0 && self.code_attributes() & attr::L != 0;
        if long { next } else { next & 0xffff_ffff }
    }
}
