//! The VMCB's intercepts: what exits and what the guest owns.
//!
//! What the guest owns under TDP is not intercepted: CR0 (unless it has caching disabled, see
//! [`set_cr0`](backend::ControlRegisters::set_cr0)), CR3, CR8, INVLPG, INVPCID, RDTSC, and CR4 when the
//! guest's CPUID offers every CR4 bit that this CPU knows; CR0 and CR4 not where the run loop has to see
//! changes of the guest's paging ([`Paging::watch_roles`](backend::Paging::watch_roles)).
//!
//! CR0 and CR4 are the guest's only on CPUs with NRIP save. Those without are the first with SVM,
//! and QEMU's emulation, which takes reserved bits that a CPU refuses: there writes exit, to be
//! checked here.

use backend::{Backend, DebuggerWants, FewerExits, GuestLimits, Level, Permissions};
use cpu::Cpu;
use x86::{
    Cr4, Directions, Reset,
    exception::Exceptions,
    msr,
    vmcb::{self, Clean, Intercept3, Intercept4, Intercept5, InterceptCr, InterceptDr, vintr},
};

use crate::{msrs::LIVE, percpu, state::Svm};

impl<C: Cpu> Svm<C> {
    pub(crate) fn init_control(&mut self) {
        let (msrpm, iopm) = (self.block.msr_map.hpa().0, percpu::io_map().0);
        // VMLOAD and VMSAVE exchange these: an access needs no exit to be kept from the host.
        for msr in LIVE {
            self.block.msr_map.intercept(msr, Directions::empty());
        }
        let features = self.features;
        let control = &mut self.vmcb_mut(Clean::ALL).control;
        control.iopm_base_pa = iopm;
        control.msrpm_base_pa = msrpm;
        // Shadow paging clears it again (`watch_paging`).
        control.np_ctl = vmcb::NP_ENABLE;
        // With it the host's IF, and not the guest's, lets a physical interrupt end the guest's run (APM vol. 2
        // §15.21.1).
        control.int_ctl = vintr::INTR_MASKING;
        if features.vnmi {
            control.int_ctl |= vintr::NMI_ENABLE;
        }
        control.intercepts[2] = Exceptions::ALWAYS.bits();
        // The first four are the host's: taken by the guest, they would be lost to it.
        control.intercepts[3] = (Intercept3::INTR
            | Intercept3::NMI
            | Intercept3::SMI
            | Intercept3::INIT
            // The counters are the host's.
            | Intercept3::RDPMC
            | Intercept3::CPUID
            | Intercept3::RSM
            // INVD drops what the cache alone has, the host's memory too.
            | Intercept3::INVD
            | Intercept3::HLT
            // It names an ASID, which the guest must not choose.
            | Intercept3::INVLPGA
            | Intercept3::IOIO
            | Intercept3::MSR
            | Intercept3::TASK_SWITCH
            | Intercept3::FERR_FREEZE
            // Else a triple fault of the guest's shuts the processor down.
            | Intercept3::SHUTDOWN)
            .bits();
        if features.pause_filter {
            control.intercepts[3] |= Intercept3::PAUSE.bits();
            // Stock KVM's default.
            control.pause_filter_count = 3000;
            control.pause_filter_thresh = 128;
        }
        // VMRUN is refused if its own intercept is clear (APM vol. 2 §15.5.1).
        control.intercepts[4] = (Intercept4::VMRUN
            | Intercept4::VMMCALL
            // Their operand is a host-physical address for the CPU.
            | Intercept4::VMLOAD
            | Intercept4::VMSAVE
            // GIF is the host's: with it the guest could hold off its interrupts and NMIs.
            | Intercept4::STGI
            | Intercept4::CLGI
            | Intercept4::SKINIT
            | Intercept4::RDTSCP
            // It would write back and empty the host's caches.
            | Intercept4::WBINVD
            | Intercept4::MONITOR
            | Intercept4::MWAIT
            // XCR0 is live in the CPU while the guest runs, and has to be known.
            | Intercept4::XSETBV
            // It tells of the host's counters.
            | Intercept4::RDPRU)
            .bits();
        // INVLPGB, MCOMMIT and TLBSYNC reach beyond this guest's ASID; INVPCID stays with the guest unless
        // its CPUID lacks it.
        control.intercepts[5] = (Intercept5::INVLPGB
            | Intercept5::INVLPGB_ILLEGAL
            | Intercept5::MCOMMIT
            | Intercept5::TLBSYNC)
            .bits();
        self.vmcb_mut(Clean::ALL).save.g_pat = msr::PAT_RESET;
        self.intercept_debug_regs();
        // Last: a reset changes intercepts that have to be there.
        self.reset(Reset::PowerUp);
    }

    /// Lets the guest's accesses of debug registers exit, or not, as it owns them or not.
    pub(crate) fn intercept_debug_regs(&mut self) {
        let on = self.debug.exits();
        let word = if on { InterceptDr::all() } else { InterceptDr::empty() };
        self.change_intercepts(|words| words[1] = word.bits());
    }

    /// Changes what exits for our own sake, whichever level runs.
    #[inline]
    pub(crate) fn change_intercepts(&mut self, change: impl FnOnce(&mut [u32; 6])) {
        change(&mut self.block_of_l1().vmcb_mut(Clean::INTERCEPTS).control.intercepts);
        if self.level == Level::L2 {
            self.merge_intercepts();
        }
    }

    #[inline(always)]
    pub(crate) fn intercept_cr(&mut self, access: InterceptCr, on: bool) {
        self.set_cr_intercepts(access, if on { access } else { InterceptCr::empty() });
    }

    /// Of `these` accesses lets those of `wanted` exit and no other. While L1 runs, which is nearly always, its
    /// block is the current one, and it mostly says so already.
    #[inline(always)]
    pub(crate) fn set_cr_intercepts(&mut self, these: InterceptCr, wanted: InterceptCr) {
        // An intercept that is written makes the CPU read all of them anew.
        let is_so = self.vmcb().control.intercepts[0] & these.bits() == wanted.bits();
        if self.level == Level::L2 || !is_so {
            self.change_cr_intercepts(these.bits(), wanted.bits());
        }
    }

    #[inline(never)]
    fn change_cr_intercepts(&mut self, these: u32, wanted: u32) {
        if self.level == Level::L2 {
            return self.change_cr_intercepts_of_l1(these, wanted);
        }
        let word = &mut self.vmcb_mut(Clean::INTERCEPTS).control.intercepts[0];
        *word = *word & !these | wanted;
    }

    #[cold]
    #[inline(never)]
    fn change_cr_intercepts_of_l1(&mut self, these: u32, wanted: u32) {
        // L2's words are merged only if one of ours has changed.
        if self.control_of_l1().intercepts[0] & these != wanted {
            self.change_intercepts(|[word, ..]| *word = *word & !these | wanted);
        }
    }

    /// CR4 belongs to the guest when it may set every bit that the CPU would let it set, and XCR0
    /// is live: while CR4.OSXSAVE is clear the guest cannot see XCR0, so it is not loaded, and the
    /// write that sets the bit must be seen.
    pub(crate) fn update_cr4_intercept(&mut self) {
        // Without an exit the CPU checks reserved bits by what it knows itself, and not by the
        // guest's CPUID.
        let all = self.cold.limits.cr4_allowed.contains(self.features.cr4_known);
        let xcr0_live = !self.cold.limits.xsave
            || Cr4::from_bits_retain(self.vmcb().save.cr4).contains(Cr4::OSXSAVE);
        let owned = !self.paging.shadow
            && all
            && xcr0_live
            && self.features.nrip_save
            && !self.paging.watch_roles;
        self.intercept_cr(InterceptCr::WRITE_CR4, !owned);
    }

    pub(crate) fn update_passthrough(&mut self) {
        // Only where the CPU keeps the guest's value apart: else each exit would have to read what
        // the guest has set.
        let spec = self.features.v_spec_ctrl && self.cold.limits.spec_ctrl;
        let limits = self.cold.limits;
        let (reads, writes) = (Directions::READS, Directions::WRITES);
        let block = self.block_of_l1();
        block.msr_map.intercept(msr::SPEC_CTRL, Directions::all().when(!spec));
        // A write holds no state that would have to be exchanged; a read faults.
        block.msr_map.intercept(msr::PRED_CMD, reads | writes.when(!limits.pred_cmd));
        // Its writes have to be known: the value is exchanged at the loop's ends.
        block.msr_map.intercept(msr::TSC_AUX, reads.when(!limits.tsc_aux) | writes);
        for msr in [msr::SYSENTER_ESP, msr::SYSENTER_EIP] {
            block.msr_map.intercept(msr, Directions::all().when(limits.wide_sysenter));
        }
        // The CPU may keep the map as it keeps the block.
        block.mark(Clean::PERM_MAP);
        let (rdtscp, invpcid) = (limits.tsc_aux, limits.invpcid && !self.paging.shadow);
        let (bit, other) = (Intercept4::RDTSCP.bits(), Intercept5::INVPCID.bits());
        self.change_intercepts(|[.., fourth, fifth]| {
            *fourth = (*fourth & !bit) | if rdtscp { 0 } else { bit };
            *fifth = (*fifth & !other) | if invpcid { 0 } else { other };
        });
        // L2's map was made from ours.
        self.forget_open_msrs();
    }
}

impl<C: Cpu> Permissions for Svm<C> {
    fn set_limits(&mut self, limits: GuestLimits) {
        self.cold.limits = limits;
        // First: what L1 is offered decides what the others below give to it.
        self.follow_offered();
        self.update_passthrough();
        self.update_cr4_intercept();
        // The CPU may be another one for a guest that has SVM on already.
        self.follow_virtual_vmload();
    }

    fn set_msr_filter(&mut self, denied: impl Fn(u32) -> Directions) {
        for msr in LIVE {
            self.block_of_l1().msr_map.intercept(msr, Directions::empty());
        }
        self.update_passthrough();
        // Behind `update_passthrough`, which has opened some.
        let map = &self.block_of_l1().msr_map;
        for msr in LIVE.into_iter().chain([msr::SPEC_CTRL, msr::PRED_CMD, msr::TSC_AUX]) {
            map.intercept(msr, map.intercepted(msr) | denied(msr));
        }
    }

    fn give_up_exits(&mut self, exits: FewerExits) {
        let when = |given_up, bits: u32| if given_up { bits } else { 0 };
        let mwait = Intercept4::MONITOR | Intercept4::MWAIT;
        self.change_intercepts(|[.., third, fourth, _]| {
            // Cleared and never set again: what a VMM has given up stays so (KVM API §7.13).
            *third &= !(when(exits.hlt, Intercept3::HLT.bits())
                | when(exits.pause, Intercept3::PAUSE.bits()));
            *fourth &= !when(exits.mwait, mwait.bits());
        });
    }

    fn set_guest_debug(&mut self, wanted: DebuggerWants) {
        self.change_intercepts(|[_, _, word, ..]| {
            let bit = Exceptions::BP.bits();
            *word = (*word & !bit) | if wanted.breakpoints { bit } else { 0 };
        });
    }
}
