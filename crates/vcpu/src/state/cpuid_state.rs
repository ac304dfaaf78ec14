//! What follows from the guest's CPUID and from the machine state that CPUID shows.
//!
//! What follows from the table alone is derived when a table is set. The bits that follow CR4, XCR0,
//! IA32_XSS and the APIC base are computed when somebody looks (a CPUID exit, KVM_GET_CPUID2) and only
//! if one of them has changed; a write of such a register does nothing. With `xstate_cache=0` it is
//! as it was in stock KVM before it kept the layout of the XSAVE area: every write computes them at
//! once, and executes CPUID for each component of each format.

use backend::{Backend, GuestLimits, Nested, NestedState};
use stats::VcpuCount;
use vm::irq::Irqchip;
use x86::cpuid::{Vendor, feature};

use crate::{Vcpu, run::inner::dynamic_inputs};

impl<B: Backend> Vcpu<B> {
    /// CR4, XCR0, IA32_XSS, the APIC base or MISC_ENABLE was written.
    #[inline]
    pub(crate) fn cpuid_inputs_changed(&mut self) {
        // With the table the answer is made when it is asked for; nothing is done here.
        if self.cpuid.is_uncached() {
            self.refresh_without_table();
        }
    }

    #[cold]
    #[inline(never)]
    fn refresh_without_table(&mut self) {
        let inputs = dynamic_inputs(&self.b, &self.shared);
        let b = &mut self.b;
        self.cpuid.refresh_with(&inputs, |leaf, subleaf| b.host_cpuid(leaf, subleaf));
        self.count_cpuid_updates();
    }

    pub(crate) fn count_cpuid_updates(&self) {
        self.stats.set(VcpuCount::CpuidUpdates, self.cpuid.updates());
    }

    /// KVM_SET_CPUID2. After the vCPU has run, and while a restored L2 is to run, be it behind RSM, only the same content
    /// is taken.
    pub fn set_cpuid(&mut self, entries: &[cpuid::Entry]) -> Result<(), cpuid::Error> {
        // HLT exits of a vCPU that is there already, but its CPUID goes by the VM: as stock KVM has it.
        let before = self.cpuid.set_hlt_in_guest(self.vm.settings.gives_up_hlt_exits());
        let fixed = self.rare.has_run
            || self.pending.after_exit.is_nested()
            || self.b.nested().is_some_and(NestedState::has_l2_aside);
        let done = self.cpuid.set(entries, self.rare.offered.cpuid, fixed);
        if done.is_err() {
            self.cpuid.set_hlt_in_guest(before);
        }
        if done? {
            self.follow_misc_enable();
            self.apply_cpuid();
            // Walks were made by the reserved bits of before.
            self.code.fetch.forget();
            self.cpuid_inputs_changed();
        }
        // Which bits of an entry are reserved depends on it.
        self.mmu.unload_roots();
        Ok(())
    }

    /// The guest's CPUID as it was set, with its dynamic bits as they are now.
    pub fn cpuid_entries(&mut self) -> &[cpuid::Entry] {
        self.cpuid_inputs_changed();
        let inputs = dynamic_inputs(&self.b, &self.shared);
        let _computed = self.cpuid.entries(&inputs);
        self.count_cpuid_updates();
        self.cpuid.entries(&inputs)
    }

    /// MISC_ENABLE's MONITOR bit is in CPUID's place where the VMM asked for that.
    pub(crate) fn follow_misc_enable(&mut self) {
        if self.vm.settings.monitor_follows_misc_enable() {
            self.cpuid.set_mwait(Some(self.msrs.store.offers_mwait()));
        }
    }

    /// Whether MONITOR and MWAIT raise #UD.
    #[cold]
    #[inline(never)]
    pub(crate) fn mwait_is_undefined(&self) -> bool {
        !self.vm.settings.mwait_never_faults() && !self.cpuid.has_monitor()
    }

    /// Derives what a new table lets the guest do.
    pub(crate) fn apply_cpuid(&mut self) {
        // First, for it takes SVM out of the table that the limits are made of.
        self.msrs.follow_vm_cr(&mut self.cpuid);
        let c = &self.cpuid;
        let f = |feature| c.has(feature);
        let limits = GuestLimits {
            cr4_allowed: c.cr4_allowed(),
            spec_ctrl: c.has_spec_ctrl(),
            pred_cmd: c.has_pred_cmd(),
            flush_cmd: c.msr_facts().flush_l1d,
            tsc_aux: f(feature::RDTSCP) || f(feature::RDPID),
            xsave: f(feature::XSAVE),
            invpcid: f(feature::INVPCID),
            rdrand: f(feature::RDRAND),
            rdseed: f(feature::RDSEED),
            vmx: f(feature::VMX),
            rtm: f(feature::RTM) && self.rare.offered.cpuid.has(feature::RTM),
            wide_sysenter: matches!(c.vendor(), Vendor::Intel | Vendor::Centaur),
            efer_allowed: c.efer_allowed().bits(),
            maxphyaddr: c.maxphyaddr(),
            svm_features: c.svm_features(),
        };
        self.rare.keeps_l2_apart = c.keeps_guests_apart();
        let ratio = self.msrs.store.tsc_ratio_of_l2(c.msr_facts());
        self.b.set_limits(limits);
        if let Some(nested) = self.b.nested_mut() {
            nested.set_tsc_ratio_of_l2(ratio);
        }
        self.set_apic_features();
        // `set_limits` has opened what the filter closes.
        if self.msrs.filtered {
            self.rare.apply_msr_filter(&mut self.b);
        }
        self.follow_enlightenment();
        // The timer may have lost its deadline mode.
        self.time.lazy.doubt();
    }

    /// What CPUID and MCG_CAP say of the local APIC.
    pub(crate) fn set_apic_features(&mut self) {
        let has = |feature| self.cpuid.has(feature);
        self.shared.lapic.set_features(irqchip::lapic::Features {
            tsc_deadline: has(feature::TSC_DEADLINE),
            // The I/O APIC in the kernel has no register for it.
            directed_eoi: has(feature::X2APIC) && self.vm.irq().kind() == Irqchip::Split,
            cmci: self.msrs.store.has_cmci(),
        });
    }
}
