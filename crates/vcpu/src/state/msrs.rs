//! RDMSR and WRMSR: which floor an MSR belongs to, and what a write asks for beside its value.

use backend::{Backend, Nested, RCX};
use cpuid::GuestCpuid;
use host::KBox;
use irqchip::lapic::BaseRules;
use mmu::Section;
use msr::{By, Class, Effect, MsrStore};
use stats::VcpuCount;
use vm::{time::ScaledTsc, vcpu_shared::Request};
use x86::msr::{
    APIC_BASE, DEBUGCTL, EFER, FEATURE_CONTROL, LAST_BRANCH_FROM, LAST_INT_TO, MISC_ENABLE, PAT,
    PLATFORM_INFO, SPEC_CTRL, TSC, TSC_ADJUST, TSC_AUX, TSC_DEADLINE, VM_CR, XSS, debugctl, vm_cr,
};
use x86::{Direction, Efer, Exception, cpuid::feature};

use crate::{Vcpu, run::events::Outer, run::outcome::Next};

/// The MSR does not exist for this guest, or does not take the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// A vCPU's MSRs as far as they are values in memory, and who may reach them.
#[derive(Debug)]
pub(crate) struct Msrs {
    /// The values.
    pub store: KBox<MsrStore>,
    /// The VM has a filter, which lies in [`Rare`](crate::Rare).
    pub filtered: bool,
    /// CPUID outside CPL 0 faults (MISC_FEATURES_ENABLES).
    pub cpuid_faults: bool,
}

impl Msrs {
    /// EFER.SVME cannot be set while VM_CR says so.
    pub(crate) fn follow_vm_cr(&self, cpuid: &mut GuestCpuid) {
        if self.store.is_svm_disabled() {
            cpuid.disable_svm();
        }
    }
}

/// Reads an MSR that the backend keeps.
fn read_backend_msr(
    b: &mut impl Backend,
    cpuid: &GuestCpuid,
    index: u32,
    by: By,
) -> Result<u64, Refused> {
    match index {
        TSC => {
            let tsc = b.host_tsc();
            // User space reads L1's, whoever runs.
            let of_l2 = b.nested().filter(|_| by == By::Guest).and_then(|n| n.tsc_of_l2(tsc));
            Ok(of_l2.unwrap_or_else(|| b.guest_tsc(tsc)))
        }
        EFER => Ok(b.control().efer.bits()),
        TSC_AUX if by == By::Guest && !cpuid.has_tsc_aux() => Err(Refused),
        XSS if by == By::Guest && !cpuid.has(feature::XSAVES) => Err(Refused),
        SPEC_CTRL if by == By::Guest && !cpuid.has_spec_ctrl() => Err(Refused),
        // Nothing is recorded where the backend does not know them.
        LAST_BRANCH_FROM..=LAST_INT_TO => Ok(b.msr(index).unwrap_or(0)),
        _ => b.msr(index).map_err(|_| Refused),
    }
}

impl<B: Backend> Vcpu<B> {
    /// RDMSR inside the loop.
    pub(crate) fn answer_rdmsr(&mut self, s: Section<'_>) -> Next {
        /// The one register whose value needs the kernel's clock.
        const TIMER_CURRENT: u32 = x86::msr::x2apic(x86::apic::reg::TIMER_CURRENT);
        let index = self.gprs.0[RCX] as u32;
        // Any RDMSR may be of the APIC's, and the class is told only later.
        if !self.collect_pv_eoi(s) {
            return Next::Leave;
        }
        // The VMM may want to hear of it, which is outside.
        if self.msr_denied(index, Direction::Read) {
            return Next::Leave;
        }
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        let (value, then) = match index {
            TIMER_CURRENT => self.with_kernel(|v| v.read_msr(index, By::Guest)),
            _ => (self.read_msr(index, By::Guest), Next::Again),
        };
        match value {
            Ok(value) => {
                self.gprs.set_edx_eax(value);
                self.retire(next);
            }
            Err(Refused) => return self.msr_refused(),
        }
        then
    }

    /// WRMSR inside the loop.
    pub(crate) fn answer_wrmsr(&mut self, s: Section<'_>) -> Next {
        let index = self.gprs.0[RCX] as u32;
        if !self.collect_pv_eoi(s) {
            return Next::Leave;
        }
        // What guests write most often.
        if index == TSC_DEADLINE {
            return self.wrmsr_deadline(s);
        }
        let class = msr::classify(index);
        // No filter is asked: KVM_X86_SET_MSR_FILTER leaves the x2APIC's MSRs alone.
        if class == Class::X2Apic {
            return self.wrmsr_x2apic(s, index);
        }
        if self.msr_denied(index, Direction::Write) {
            return Next::Leave;
        }
        match class {
            // These write guest memory, or what depends on them is not the loop's.
            Class::X2Apic | Class::Apic | Class::Pv | Class::HyperV | Class::Outside => Next::Leave,
            class @ (Class::Backend | Class::Store | Class::Unknown) => {
                let Some(next) = self.next_rip(s) else { return Next::Leave };
                let value = self.gprs.edx_eax();
                let written = match class {
                    Class::Store => self.write_stored_msr(index, value, By::Guest),
                    Class::Backend => self.write_backend_msr(index, value, By::Guest),
                    Class::Apic
                    | Class::X2Apic
                    | Class::Pv
                    | Class::HyperV
                    | Class::Outside
                    | Class::Unknown => Err(Refused),
                };
                match written {
                    Ok(()) => self.retire(next),
                    Err(Refused) => return self.msr_refused(),
                }
                // The clock's page follows the TSC, and is written outside.
                if matches!(index, TSC | TSC_ADJUST) && self.shared.has_requests() {
                    return Next::Done;
                }
                // EFER.NXE is in the role of shadow pages.
                self.switch_root_in_loop(s)
            }
        }
    }

    #[inline(always)]
    fn wrmsr_deadline(&mut self, s: Section<'_>) -> Next {
        if self.msr_denied(TSC_DEADLINE, Direction::Write) {
            return Next::Leave;
        }
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        // As on stock KVM CPUID is not asked: without the timer's mode, which CPUID does decide, nothing comes of it.
        let value = self.gprs.edx_eax();
        self.stats.count(VcpuCount::TscDeadlineWrites);
        // Before the timer is armed, which may leave the loop: WRMSR must not be executed twice.
        self.retire(next);
        self.write_deadline_in_loop(s, value)
    }

    #[inline]
    fn wrmsr_x2apic(&mut self, s: Section<'_>, index: u32) -> Next {
        if !self.shared.in_kernel_apic {
            return Next::Leave;
        }
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        // Before the write: it is compared with the priority that the guest has set without an exit.
        self.before_x2apic_write(index);
        let value = self.gprs.edx_eax();
        match self.shared.lapic.write_x2(index, value) {
            Ok(effect) => {
                self.after_x2apic_write(index);
                self.retire(next);
                self.effect_in_loop(effect)
            }
            Err(_) => self.msr_refused(),
        }
    }

    /// RDMSR outside the loop.
    pub(crate) fn do_rdmsr(&mut self) -> Result<(), Exception> {
        let index = self.gprs.0[RCX] as u32;
        let value = self.read_msr(index, By::Guest).map_err(|_| Exception::gp(0))?;
        self.gprs.set_edx_eax(value);
        Ok(())
    }

    /// WRMSR outside the loop.
    pub(crate) fn do_wrmsr(&mut self) -> Result<(), Exception> {
        let (index, value) = (self.gprs.0[RCX] as u32, self.gprs.edx_eax());
        if msr::classify(index) == Class::X2Apic && self.shared.in_kernel_apic {
            self.before_x2apic_write(index);
            let effect = self.shared.lapic.write_x2(index, value).map_err(|_| Exception::gp(0))?;
            self.after_x2apic_write(index);
            self.effect(effect);
            return Ok(());
        }
        self.write_msr(index, value, By::Guest).map_err(|_| Exception::gp(0))
    }

    /// Reads an MSR; `by` the VMM: for KVM_GET_MSRS, which asks no questions of CPUID.
    pub fn read_msr(&mut self, index: u32, by: By) -> Result<u64, Refused> {
        match msr::classify(index) {
            Class::Backend => read_backend_msr(&mut self.b, &self.cpuid, index, by),
            Class::X2Apic => {
                if !self.shared.in_kernel_apic {
                    return Err(Refused);
                }
                self.before_x2apic_read(index);
                self.shared.lapic.read_x2(index, host::clock::monotonic_ns).map_err(|_| Refused)
            }
            Class::Apic => match index {
                APIC_BASE => Ok(self.shared.lapic.base()),
                TSC_DEADLINE if by == By::Vmm => Ok(self.newest_deadline()),
                TSC_DEADLINE => Ok(self.shared.lapic.tsc_deadline()),
                _ => Err(Refused),
            },
            Class::Pv => self.read_pv_msr(index, by),
            Class::HyperV => self.read_hyperv_msr(index, by),
            Class::Store
                if index == PLATFORM_INFO
                    && by == By::Guest
                    && self.vm.settings.hides_platform_info() =>
            {
                Err(Refused)
            }
            Class::Store | Class::Outside => {
                self.msrs.store.read(index, by, self.cpuid.msr_facts()).map_err(|_| Refused)
            }
            // The backend's own last: the capability MSRs of VMX follow the vCPU's CPUID, which no table knows.
            Class::Unknown => {
                let value = self.b.msr(index).map_err(|_| Refused)?;
                let nested = self.b.nested().filter(|_| by == By::Guest);
                Ok(nested.map_or(value, |nested| nested.value_for_l1(index, value)))
            }
        }
    }

    /// Writes an MSR; `by` the VMM: for KVM_SET_MSRS.
    pub fn write_msr(&mut self, index: u32, value: u64, by: By) -> Result<(), Refused> {
        match msr::classify(index) {
            Class::Backend => self.write_backend_msr(index, value, by),
            Class::X2Apic => {
                if !self.shared.in_kernel_apic {
                    return Err(Refused);
                }
                // What the CPU serves is taken back first: the write has to find all of it.
                self.gather_interrupts();
                let effect = self.shared.lapic.write_x2(index, value).map_err(|_| Refused)?;
                self.effect(effect);
                // A VMM that ends an interrupt need not run the vCPU again.
                if by == By::Vmm && self.events.outer.has(Outer::OWING) {
                    self.events.tell_resamplers(&self.vm);
                }
                Ok(())
            }
            Class::Apic => match index {
                APIC_BASE => self.set_apic_base(value, by).map_err(|_| Refused),
                TSC_DEADLINE => {
                    if by == By::Guest {
                        self.stats.count(VcpuCount::TscDeadlineWrites);
                    }
                    self.write_deadline(value, by);
                    Ok(())
                }
                _ => Err(Refused),
            },
            Class::Pv => self.write_pv_msr(index, value, by),
            Class::HyperV => self.write_hyperv_msr(index, value, by),
            Class::Outside if index == VM_CR => self.write_vm_cr(value, by),
            Class::Store | Class::Outside => {
                self.write_stored_msr(index, value, by)?;
                if by == By::Vmm && index == FEATURE_CONTROL && value == 0 {
                    self.end_vmx_operation();
                }
                Ok(())
            }
            // Capability MSRs of VMX are read-only for a guest; a VMM sets what its guest is told.
            Class::Unknown if by == By::Vmm => self.b.set_msr(index, value).map_err(|_| Refused),
            Class::Unknown => Err(Refused),
        }
    }

    #[inline(always)]
    fn write_stored_msr(&mut self, index: u32, value: u64, by: By) -> Result<(), Refused> {
        if index == MISC_ENABLE {
            return self.write_misc_enable(value, by);
        }
        let effect = self.msrs.store.write(index, value, by, self.cpuid.msr_facts());
        self.store_effect(effect.map_err(|_| Refused)?);
        Ok(())
    }

    /// SVMDIS and EFER.SVME exclude each other (APM vol. 2 §15.30.1).
    fn write_vm_cr(&mut self, value: u64, by: By) -> Result<(), Refused> {
        if value & vm_cr::SVMDIS != 0 && self.b.efer().contains(Efer::SVME) {
            return Err(Refused);
        }
        self.write_stored_msr(VM_CR, value, by)?;
        self.msrs.follow_vm_cr(&mut self.cpuid);
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn write_misc_enable(&mut self, value: u64, by: By) -> Result<(), Refused> {
        let mut facts = *self.cpuid.msr_facts();
        // What needs SSE3 is that CPUID follows.
        facts.sse3 |= !self.vm.settings.monitor_follows_misc_enable();
        let effect = self.msrs.store.write(MISC_ENABLE, value, by, &facts).map_err(|_| Refused)?;
        self.store_effect(effect);
        Ok(())
    }

    fn store_effect(&mut self, effect: Effect) {
        match effect {
            // The store tells of a guest's write alone.
            Effect::TscAdjusted { delta } => self.move_tsc(delta),
            Effect::PredictionBarrier => self.b.prediction_barrier(),
            Effect::MonitorChanged { .. } => {
                self.follow_misc_enable();
                self.cpuid_inputs_changed();
            }
            Effect::VirtSsbd { on } => self.b.set_virt_ssbd(on),
            Effect::TscRatioOfL2 { ratio } => {
                if let Some(nested) = self.b.nested_mut() {
                    nested.set_tsc_ratio_of_l2(ratio);
                }
            }
            Effect::CpuidFaulting { on } => self.msrs.cpuid_faults = on,
            // Memory types come from the guest's PAT alone under TDP.
            Effect::MtrrChanged => {}
            // Stock KVM lets a guest flush its L1 data cache; here the command is taken and forgotten.
            Effect::FlushL1d => {}
            Effect::None => {}
        }
    }

    /// The guest has written its TSC, which is this much later.
    #[cold]
    pub(crate) fn follow_tsc_write(&mut self, delta: u64) {
        self.msrs.store.adjust_tsc(delta as i64);
        self.move_tsc(delta as i64);
    }

    fn move_tsc(&mut self, delta: i64) {
        self.rare.tsc.offset = self.rare.tsc.offset.wrapping_add(delta as u64);
        self.put_tsc();
        if let Some(nested) = self.b.nested_mut() {
            nested.follow_tsc_write(delta as u64);
        }
        self.tsc_changed();
        // The page says what the clock is at a time of the TSC, and that is another time now.
        if self.pv.has_clock_page() {
            self.shared.request(Request::Clock);
        }
    }

    fn write_backend_msr(&mut self, index: u32, value: u64, by: By) -> Result<(), Refused> {
        match index {
            EFER => self.write_efer(value, by).map_err(|_| Refused),
            TSC => {
                if by == By::Vmm {
                    // A VMM sets TSC_ADJUST for itself: its write of the TSC does not move that
                    // along.
                    self.set_guest_tsc(value);
                } else {
                    let now = self.b.host_tsc();
                    // A guest's write moves TSC_ADJUST along (SDM vol. 3B §17.17.3).
                    self.follow_tsc_write(value.wrapping_sub(self.b.guest_tsc(now)));
                }
                Ok(())
            }
            PAT if !msr::pat_is_valid(value) => Err(Refused),
            TSC_AUX if by == By::Guest && !self.cpuid.has_tsc_aux() => Err(Refused),
            // AMD's CPUs ignore the upper half and read it as zero; Intel's refuse it.
            TSC_AUX if value >> 32 != 0 && !self.cpuid.vendor().is_amd_like() => Err(Refused),
            TSC_AUX => self.b.set_msr(index, u64::from(value as u32)).map_err(|_| Refused),
            // What a guest was not offered does not exist for it, not even for a write of zero.
            XSS if by == By::Guest && !self.cpuid.has(feature::XSAVES) => Err(Refused),
            XSS if value & !self.cpuid.xss_allowed() != 0 => Err(Refused),
            SPEC_CTRL if by == By::Guest && !self.cpuid.has_spec_ctrl() => Err(Refused),
            SPEC_CTRL if !msr::spec_ctrl_is_valid(value, self.cpuid.msr_facts(), by) => {
                Err(Refused)
            }
            DEBUGCTL => self.write_debugctl(value),
            // The CPU writes them.
            LAST_BRANCH_FROM..=LAST_INT_TO if by == By::Guest => Err(Refused),
            // Where there are none they are 0, and a VMM writes back what it has read.
            LAST_BRANCH_FROM..=LAST_INT_TO => {
                self.b.set_msr(index, value).or(if value == 0 { Ok(()) } else { Err(Refused) })
            }
            _ => {
                // A CPU refuses one that is not canonical, and so would an entry.
                if msr::holds_address(index) && !self.cpuid.is_canonical(value) {
                    return Err(Refused);
                }
                self.b.set_msr(index, value).map_err(|_| Refused)?;
                if index == XSS {
                    self.cpuid_inputs_changed();
                }
                Ok(())
            }
        }
    }

    fn write_debugctl(&mut self, value: u64) -> Result<(), Refused> {
        // What pins showed on AMD's first CPUs, and later ones mean by other things or nothing.
        let ignored = if self.cpuid.vendor().is_amd_like() { debugctl::PINS } else { 0 };
        let value = value & !ignored;
        let rtm = feature::RTM;
        let regions = self.cpuid.has(rtm) && self.rare.offered.cpuid.has(rtm);
        let known = debugctl::LBR | debugctl::BTF | if regions { debugctl::RTM } else { 0 };
        if value & !known != 0 {
            return Err(Refused);
        }
        self.b.set_msr(DEBUGCTL, value).map_err(|_| Refused)
    }

    /// KVM_SET_MSRS of the TSC. Writes that a VMM makes to all vCPUs one after another are meant
    /// to give them the same TSC.
    fn set_guest_tsc(&mut self, value: u64) {
        let host = self.scaled_tsc_now();
        let offset = self.vm.match_tsc(value, host, self.rare.tsc.khz, &mut self.rare.tsc_round);
        self.set_tsc_offset_by_vmm(offset);
        self.shared.request(Request::Clock);
    }

    /// The host's TSC now, at the guest's rate, without an offset.
    pub(crate) fn scaled_tsc_now(&mut self) -> ScaledTsc {
        let now = self.b.host_tsc();
        self.scaled_tsc(now)
    }

    /// The VMM sets what is added to the host's TSC. A timer of L1's for L2 runs on as it did; one that was restored is a
    /// time of the TSC that is set behind it.
    pub(crate) fn set_tsc_offset_by_vmm(&mut self, offset: u64) {
        let delta = offset.wrapping_sub(core::mem::replace(&mut self.rare.tsc.offset, offset));
        self.put_tsc();
        if !self.rare.nested_restored
            && let Some(nested) = self.b.nested_mut()
        {
            nested.follow_tsc_write(delta);
        }
        self.tsc_changed();
    }

    pub(crate) fn set_apic_base(&mut self, value: u64, by: By) -> Result<(), Refused> {
        let rules = BaseRules {
            maxphyaddr: self.cpuid.maxphyaddr(),
            x2apic: self.cpuid.has(feature::X2APIC),
            host: by == By::Vmm,
        };
        if !self.shared.in_kernel_apic {
            // The registers are the VMM's, and CPUID follows the value all the same.
            self.shared.lapic.keep_base(value, rules).map_err(|_| Refused)?;
            self.cpuid_inputs_changed();
            return Ok(());
        }
        // A change of mode ends what the hardware serves, and moves the registers.
        self.gather_interrupts();
        let change = self.shared.lapic.set_base(value, rules).map_err(|_| Refused)?;
        self.cpuid_inputs_changed();
        if change.mode {
            self.time.lazy.doubt();
            self.vm.irq().apic_changed();
            self.address_changed();
            self.pending.raise();
        }
        Ok(())
    }
}
