//! The capability MSRs that L1 sees, and what of VMX is done for it.

use backend::GuestLimits;
use cpu::Cpu;
use nested_vmx::Capabilities;
use nested_vmx::capabilities::{Host, Offer, Refused};
use x86::vmcs::capability::{FEATURE_CONTROL, VMX_BASIC};
use x86::vmcs::{EntryControls, ExitControls, PinControls, ProcControls2};

use super::kept::Nested;
use crate::{features::Features, state::Vmx};

/// How many capability MSRs there are, from VMX_BASIC to VMX_VMFUNC.
const VMX_MSRS: usize = 18;

/// What is offered: nothing for which the hardware would use a page of L1's by itself, or that needs a counter beside
/// those of L0. The virtual-APIC page L0 uses, at each access of L2's that L1 leaves to it.
const OFFER: Offer = Offer {
    pin: Offer::WHOLE.pin,
    primary: Offer::WHOLE.primary,
    secondary: ProcControls2::EPT
        .union(ProcControls2::UNRESTRICTED_GUEST)
        .union(ProcControls2::DESCRIPTOR_TABLES)
        .union(ProcControls2::RDTSCP)
        .union(ProcControls2::VPID)
        .union(ProcControls2::WBINVD)
        .union(ProcControls2::RDRAND)
        .union(ProcControls2::INVPCID)
        .union(ProcControls2::RDSEED)
        .union(ProcControls2::SHADOW_VMCS)
        .union(ProcControls2::VMFUNC)
        .union(ProcControls2::XSAVES)
        .union(ProcControls2::VIRTUALIZE_APIC_ACCESSES)
        .union(ProcControls2::VIRTUALIZE_X2APIC)
        .union(ProcControls2::APIC_REGISTERS)
        .union(ProcControls2::VIRTUAL_INTERRUPTS)
        .union(ProcControls2::PML)
        .union(ProcControls2::TSC_SCALING),
    exit: Offer::WHOLE.exit.difference(ExitControls::LOAD_PERF_GLOBAL_CTRL),
    entry: Offer::WHOLE.entry.difference(EntryControls::LOAD_PERF_GLOBAL_CTRL),
    ept_vpid: Offer::WHOLE.ept_vpid,
    // The vCPU waits in them for L2.
    activity: Offer::WHOLE.activity,
};

/// What is offered on this CPU. L1's preemption timer is counted by the CPU's.
fn offer(features: &Features) -> Offer {
    // Another CPU counts for nobody: without a timer in hardware L1 is offered none.
    let mut offer = OFFER;
    if features.preemption_timer.is_none() {
        offer.pin.remove(PinControls::PREEMPTION_TIMER);
        offer.exit.remove(ExitControls::SAVE_PREEMPTION_TIMER);
    }
    if !features.xsaves {
        // The bitmap of XSAVES is a field that a CPU without it does not have.
        offer.secondary.remove(ProcControls2::XSAVES);
    }
    // By default where stock KVM offers it: a guest that was saved there finds the same.
    if !features.nested_virtual_interrupts {
        offer.pin.remove(PinControls::POSTED_INTERRUPTS);
        offer.secondary.remove(ProcControls2::VIRTUAL_INTERRUPTS);
    }
    offer
}

/// What a vCPU with these limits is shown on this CPU.
pub(crate) fn whole(features: &Features, limits: &GuestLimits) -> Capabilities {
    // L1 may set in VMX operation what its CPUID offers.
    // CR4's bits follow from CPUID and not from the host: a bit that L1 was not offered it must not set.
    let host = Host { cr4_fixed1: limits.cr4_allowed.bits(), ..features.nested_host };
    let mut offer = offer(features);
    // L1 cannot give its guest instructions that it does not have itself, nor have them exit: without XSAVE it has no IA32_XSS,
    // without RDTSCP and RDPID no TSC_AUX.
    for (there, control) in [
        (limits.xsave, ProcControls2::XSAVES),
        (limits.tsc_aux, ProcControls2::RDTSCP),
        (limits.invpcid, ProcControls2::INVPCID),
        (limits.rdrand, ProcControls2::RDRAND),
        (limits.rdseed, ProcControls2::RDSEED),
    ] {
        if !there {
            offer.secondary.remove(control);
        }
    }
    Capabilities::compute(&host, &offer)
}

impl Features {
    /// The capability MSRs that a guest with all that this CPU offers would see, in their order.
    pub fn nested_capabilities(&self) -> [u64; VMX_MSRS] {
        let all = Capabilities::compute(&self.nested_host, &offer(self));
        let mut values = [0; VMX_MSRS];
        for (value, index) in values.iter_mut().zip(VMX_BASIC..) {
            *value = all.read(index).unwrap_or(0);
        }
        values
    }
}

impl<C: Cpu> Vmx<C> {
    /// The guest's CPUID has changed: whether it may be a hypervisor. Without memory for that it is none.
    pub(crate) fn follow_nesting(&mut self) {
        if !self.cold.limits.vmx || !self.features.nested {
            // While L2 runs its VMCS is in use: the VMM has asked for something that no CPU does.
            if !self.cold.of_l1.runs
                && let Some(mut n) = self.nested.take_if(|n| !n.machine.smm.guest_mode)
            {
                // The shadow VMCS first: vmcs01 must not name a page that is freed.
                self.drop_shadow(&mut n);
                // Its page must not be written after it is freed.
                n.clear_elsewhere();
            }
            return;
        }
        let whole = whole(&self.features, &self.cold.limits);
        match &mut self.nested {
            Some(n) if !n.machine.is_on_or_aside() => {
                let old = core::mem::replace(&mut *n.whole, whole);
                // What the VMM has taken away stays away: these two alone follow from CPUID.
                n.machine.capabilities.cr4_fixed1 = whole.cr4_fixed1;
                n.machine.capabilities.follow_secondary(&old, &whole);
                // What was composed and checked was so by other capabilities.
                n.machine.touch_all();
            }
            // VMX operation goes on with what it was begun with, be it behind RSM.
            Some(_) => {}
            // No memory is no error of the VMM's call: the guest finds that it has no VMX.
            none @ None => *none = Nested::new(&self.features, &whole).ok(),
        }
    }

    /// A capability MSR, or IA32_FEATURE_CONTROL. `None`: it is none, or the guest may be no hypervisor.
    pub(crate) fn nested_msr_value(&self, index: u32) -> Option<u64> {
        let n = self.nested.as_ref()?;
        match index {
            FEATURE_CONTROL => Some(n.feature_control),
            _ => n.machine.capabilities.read(index),
        }
    }

    /// What L1 reads of a capability MSR that has this value.
    pub(super) fn value_for_l1(&self, index: u32, value: u64) -> u64 {
        match &self.nested {
            // L1 reads less than the VMM: a VMM that migrates the guest needs the whole.
            Some(n) if n.machine.may_be_enlightened() => {
                n.machine.capabilities.enlightened().read(index).unwrap_or(value)
            }
            _ => value,
        }
    }

    /// Sets a capability MSR, as a VMM does, or IA32_FEATURE_CONTROL.
    pub(crate) fn set_nested_msr_value(&mut self, index: u32, value: u64) -> Result<(), Refused> {
        let Some(n) = &mut self.nested else { return Err(Refused::Unknown) };
        if index == FEATURE_CONTROL {
            // Checked by whoever knows the MSR's rules; here it is kept for VMXON.
            n.feature_control = value;
            return Ok(());
        }
        // What L1 has checked its VMCS against does not change under it.
        let running = n.machine.is_on_or_aside();
        let whole = *n.whole;
        n.machine.capabilities.restrict(&whole, index, value, running)?;
        n.machine.touch_all();
        Ok(())
    }
}
