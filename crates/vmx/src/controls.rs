//! The VMCS's controls: what exits, and what of CR0 and CR4 the guest owns ([`Owned`]).

use backend::{
    Backend, ControlRegisters, DebuggerWants, FewerExits, GuestLimits, PdpteRegisters, Permissions,
};
use cpu::Cpu;
use x86::{
    Cr0, Cr4, Directions, Reset,
    exception::Exceptions,
    msr,
    vmcs::{PinControls, ProcControls, ProcControls2, field},
};

use crate::{
    fields,
    msrs::CORE_RESIDENCY,
    owned::Owned,
    page_log::PageLog,
    permission::{LISTED, LIVE, SPECULATION, TSC},
    state::Vmx,
};

/// PAUSE-loop exiting: cycles between two PAUSEs of one loop, and of a loop that is too long; what
/// the manual suggests and others use.
const PLE: (u32, u32) = (128, 4096);

impl<C: Cpu> Vmx<C> {
    pub(crate) fn init_control(&mut self) {
        self.pass_live_msrs();
        let features = *self.features;
        // What the CPU fixes, with what every guest starts with ([`Features::read`](crate::Features)).
        self.set(fields::PIN_CONTROLS, features.pin.base.bits());
        self.set(fields::PROC_CONTROLS, features.primary.base.bits());
        self.set(fields::PROC_CONTROLS2, features.secondary.base.bits());
        self.set(fields::EXIT_CONTROLS, features.exit.base.bits());
        self.set(fields::ENTRY_CONTROLS, features.entry.base.bits());
        // What the guest may not keep to itself: it would stop the machine, or is emulated.
        self.set(fields::EXCEPTION_BITMAP, Exceptions::ALWAYS.bits());
        // With both 0 the bit of #PF in the bitmap decides alone (SDM vol. 3C §25.6.3).
        self.set(fields::PAGE_FAULT_MASK, 0);
        self.set(fields::PAGE_FAULT_MATCH, 0);
        self.set(fields::TPR_THRESHOLD, 0);
        self.set(fields::ENTRY_INTERRUPTION, 0);
        self.set(fields::TSC_OFFSET, 0);
        // An entry loads it: the host's own must not stay for the guest.
        self.set(fields::GUEST_DEBUGCTL, 0);
        self.set(fields::GUEST_PAT, msr::PAT_RESET);
        if self.features.ept {
            // An entry of a guest with PAE paging checks them (SDM vol. 3C §27.3.1.6).
            self.set_entries([0; 4]);
        }
        // The index counts down: 511 is an empty log (§29.3.6).
        if self.page_log.is_some() {
            self.set(fields::PML_INDEX, PageLog::EMPTY);
        }
        // Registers last: what they are written to follows from the controls.
        self.reset(Reset::PowerUp);
    }

    /// Writes those fields of [`Vmx::write_constants`] that not every CPU has.
    ///
    /// [`Vmx::write_constants`]: crate::Vmx
    pub(crate) fn write_optional_constants(&self) {
        let secondary = self.features.secondary.base;
        // Fields that a CPU does not have fail at VMWRITE, and the failure would be counted as a mistake of ours.
        if secondary.contains(ProcControls2::PAUSE_LOOP) {
            let (gap, window) = PLE;
            self.cpu.vmwrite(field::PLE_GAP.encoding(), gap.into());
            self.cpu.vmwrite(field::PLE_WINDOW.encoding(), window.into());
        }
        if self.features.pin.base.contains(PinControls::PREEMPTION_TIMER) {
            // The control is on for good: without a deadline the guest runs for the longest time.
            self.cpu.vmwrite(field::PREEMPTION_TIMER.encoding(), u32::MAX.into());
        }
        if secondary.contains(ProcControls2::ENCLS) {
            // Every leaf of ENCLS exits: guests have no SGX.
            self.cpu.vmwrite(field::ENCLS_EXIT_BITMAP.encoding(), u64::MAX);
        }
        if let Some(log) = &self.page_log {
            // Written once: the page is the vCPU's for life, and both of its VMCSs log into it.
            self.cpu.vmwrite(field::PML_ADDRESS.encoding(), log.hpa().0);
        }
        let may = x86::vmcs::capability::Allowed(self.features.nested_host.secondary).may();
        // By what the CPU may do: what a VMM will offer its L1 is not known yet.
        if self.features.nested && may & ProcControls2::VMFUNC.bits() != 0 {
            // Every VM function of L2's exits.
            self.cpu.vmwrite(field::VM_FUNCTION_CONTROLS.encoding(), 0);
        }
        if secondary.contains(ProcControls2::XSAVES) {
            // XSAVES and XRSTORS work on what IA32_XSS allows, and nothing of that has to be seen.
            self.cpu.vmwrite(field::XSS_EXIT_BITMAP.encoding(), 0);
        }
    }

    /// Sets or clears primary processor-based controls.
    pub(crate) fn change_proc(&self, bits: ProcControls, on: bool) {
        let old = self.get(fields::PROC_CONTROLS);
        self.set(fields::PROC_CONTROLS, self.proc_with(old, bits, on));
    }

    /// The primary controls `old` with those set or cleared.
    #[inline]
    fn proc_with(&self, old: u32, bits: ProcControls, on: bool) -> u32 {
        // L1's wish for L2 stays when L0's own is over.
        let kept = self.cold.of_l1.primary & bits.bits();
        if on { old | bits.bits() } else { old & !bits.bits() | kept }
    }

    /// Sets or clears secondary processor-based controls.
    pub(crate) fn change_proc2(&self, bits: ProcControls2, on: bool) {
        let old = self.get(fields::PROC_CONTROLS2);
        // Only what is really in the VMCS is kept: controls that L0 carries out itself are not in that word.
        let kept = self.cold.of_l1.secondary & bits.bits();
        let new = if on { old | bits.bits() } else { old & !bits.bits() | kept };
        self.set(fields::PROC_CONTROLS2, new);
    }

    /// SGDT, SIDT, SLDT and STR exit, as do the loads: UMIP on CPUs without it.
    #[cold]
    #[inline(never)]
    pub(crate) fn watch_tables(&self, on: bool) {
        // L2's instructions do not concern what vmcs01 knows of L1.
        // While L2 runs the word is L2's, where the watch means nothing.
        let watched = self.cold.tables.watches() && !self.cold.of_l1.runs;
        self.change_proc2(ProcControls2::DESCRIPTOR_TABLES, on || watched);
    }

    /// Lets the guest's accesses of debug registers exit, or not, as it owns them or not.
    pub(crate) fn intercept_debug_regs(&mut self) {
        // The guest's first access exits, so that the registers are loaded for those who use them.
        self.change_proc(ProcControls::MOV_DR, self.cold.debug.exits());
    }

    /// Whether [`intercept_debug_regs`](Self::intercept_debug_regs) would change nothing.
    #[inline]
    pub(crate) fn has_debug_regs_as_wanted(&self) -> bool {
        let old = self.get(fields::PROC_CONTROLS);
        self.proc_with(old, ProcControls::MOV_DR, self.cold.debug.exits()) == old
    }

    /// CR0 bits that the guest owns.
    #[inline(always)]
    pub(crate) fn owned_cr0(&self) -> Cr0 {
        self.owned.cr0
    }

    /// CR4 bits that the guest owns.
    #[inline(always)]
    pub(crate) fn owned_cr4(&self) -> Cr4 {
        self.owned.cr4
    }

    /// Makes anew what the level that runs owns: what L0 leaves it, and in L2 L1 too.
    pub(crate) fn own(&mut self) {
        let Owned { cr0, cr4 } = Owned::of(self.paging, &self.cold.limits);
        // Bits of L1's are not L2's to change without an exit, whoever owned them before.
        self.owned = Owned { cr0: cr0 - self.cold.of_l1.cr0, cr4: cr4 - self.cold.of_l1.cr4 };
    }

    /// Who owns which bits of CR0 and CR4 has changed, by `change`.
    pub(crate) fn change_ownership(&mut self, change: impl FnOnce(&mut Self)) {
        // As seen by the guest, read by the ownership of before: the bits are in other places behind.
        let (cr0, cr4) = (self.cr0(), self.cr4());
        change(self);
        self.own();
        // A mask has ones for what the guest does not own (§25.6.6).
        self.set(fields::CR0_MASK, !self.owned_cr0().bits());
        self.set(fields::CR4_MASK, !self.owned_cr4().bits());
        // Written back in the new place: what was in the register goes to the shadow, or the other way round.
        self.set_cr0(cr0);
        self.set_cr4(cr4);
    }

    pub(crate) fn update_passthrough(&mut self) {
        let GuestLimits { tsc_aux, invpcid, xsave, .. } = self.cold.limits;
        let features = *self.features;
        // Its writes exit: the value is lent to the CPU, and has to be known.
        self.msr_map().intercept(
            // Reads need no exit: the value is in the CPU while the guest runs.
            msr::TSC_AUX,
            Directions::READS.when(!(tsc_aux && features.rdtscp)) | Directions::WRITES,
        );
        self.watch_sysenter();
        self.pass_speculation();
        // Without the control the instruction is #UD: a guest that was not offered it has to get that.
        for (there, control, offered) in [
            (features.rdtscp, ProcControls2::RDTSCP, tsc_aux),
            (features.invpcid, ProcControls2::INVPCID, invpcid),
            (features.xsaves, ProcControls2::XSAVES, xsave),
        ] {
            if there {
                self.offer(control, offered);
            }
        }
    }

    /// Offers the guest what a control stands for, or not. Whether L2 has it is L1's to say alone.
    fn offer(&self, control: ProcControls2, offered: bool) {
        if !self.cold.of_l1.runs {
            self.change_proc2(control, offered);
        }
        self.behind_l2(|cpu, vmcs01| {
            vmcs01.change_proc2(cpu, control, offered);
        });
    }
}

impl<C: Cpu> Permissions for Vmx<C> {
    fn set_limits(&mut self, limits: GuestLimits) {
        self.change_ownership(|this| this.cold.limits = limits);
        self.update_passthrough();
        self.sync_extended();
        // Behind the limits: they say whether the guest may be a hypervisor.
        self.follow_nesting();
        // Last: the map of L1 has changed, from which L2's was made.
        self.close_msrs_of_l2();
    }

    fn set_msr_filter(&mut self, denied: impl Fn(u32) -> Directions) {
        // The filter of before may have closed them: everything is made anew.
        // Open first, then the filter: a filter can only close.
        self.pass_live_msrs();
        // Kept, for whoever opens these later by another rule, and for L1's lists, which are asked in no map.
        self.cold.speculation_denied = SPECULATION.map(&denied);
        self.cold.listed_denied = LISTED.map(&denied);
        self.update_passthrough();
        let residency = self.cold.fewer.cstate.then_some(CORE_RESIDENCY).into_iter().flatten();
        for msr in LIVE.into_iter().chain([TSC, msr::TSC_AUX, msr::DEBUGCTL]).chain(residency) {
            // With what exits anyway: a filter that allows does not open.
            let exits = self.msr_map().intercepted(msr);
            self.msr_map().intercept(msr, exits | denied(msr));
        }
        // vmcs02's map was made from this one.
        self.close_msrs_of_l2();
    }

    fn give_up_exits(&mut self, exits: FewerExits) {
        self.cold.fewer = exits;
        let when = |given_up, bits| if given_up { bits } else { ProcControls::empty() };
        let waits = when(exits.mwait, ProcControls::MWAIT | ProcControls::MONITOR);
        // Off for good: what a VMM has given up it does not take back.
        self.change_proc(when(exits.hlt, ProcControls::HLT) | waits, false);
        if exits.pause {
            self.change_proc2(ProcControls2::PAUSE_LOOP, false);
        }
        // Residency counters pass with the C-states, and only then.
        self.pass_live_msrs();
    }

    fn set_guest_debug(&mut self, asked: DebuggerWants) {
        // Before the pending step is matched: it is looked at there.
        self.cold.debugger_steps = asked.steps;
        self.match_pending_step();
        let bit = Exceptions::BP.bits();
        let old = self.get(fields::EXCEPTION_BITMAP) & !bit;
        // L2's #BP may be L1's to hear of.
        let kept = self.cold.of_l1.exceptions & bit;
        let wanted = if asked.breakpoints { bit } else { 0 };
        self.set(fields::EXCEPTION_BITMAP, old | kept | wanted);
        // vmcs01 has no wish of L1's: there the bit is the debugger's alone.
        self.behind_l2(|cpu, vmcs01| {
            let old = vmcs01.get(cpu, fields::EXCEPTION_BITMAP) & !bit;
            vmcs01.set(cpu, fields::EXCEPTION_BITMAP, old | wanted);
        });
    }
}
