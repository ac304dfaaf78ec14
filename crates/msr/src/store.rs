//! The MSRs whose whole life is a value: read, checked, kept, and now and then told to others.
//!
//! Rules follow SDM vol. 4 and APM vol. 2 as far as guests depend on them, and KVM where a manual
//! would have the guest see a machine that this one is not.
//!
//! Why rows and macros instead of two long matches: reading, writing, reset, the lists that KVM tells and the page
//! `docs/msrs.md` come from the same row. As five lists they drift apart, and an MSR that is saved but refused when it is
//! restored breaks a migration long after the change.
//!
//! Why the VMM may set what the guest does not have: on the other side of a migration the order is the VMM's, and MSRs
//! may come before CPUID. The guest's own access is asked for its CPUID each time.

use x86::Reset;

use crate::effect::Effect;
use crate::mce::{MachineChecks, SUPPORTED, SUPPORTED_BY_INTEL, Statuses};
use crate::mtrr::Mtrrs;
use crate::{By, GuestFacts, HostMsrs, McReport, McVerdict, NoMemory, Refused, lists};
use x86::msr::*;

/// MISC_ENABLE after reset: neither branch-trace storage nor precise sampling exists.
const MISC_ENABLE_RESET: u64 = misc_enable::BTS_UNAVAILABLE | misc_enable::PEBS_UNAVAILABLE;
/// TSC_RATIO of 1.0, in 8.32 fixed point (APM vol. 2 §15.30.5).
const TSC_RATIO_ONE: u64 = 1 << 32;

/// Who accesses which MSR.
#[derive(Clone, Copy)]
struct Access<'a> {
    index: u32,
    by: By,
    facts: &'a GuestFacts,
}

impl Access<'_> {
    const fn is_vmm(&self) -> bool {
        matches!(self.by, By::Vmm)
    }
}

type Written = Result<Effect, Refused>;

// A refusal before anything is stored: a WRMSR that faults has no effect.
fn require(allowed: bool) -> Result<(), Refused> {
    if allowed { Ok(()) } else { Err(Refused) }
}

/// The column "power-up": the value.
macro_rules! power_up {
    ([$value:expr $(, reset)?]) => {
        $value
    };
}

/// The column "power-up": what a reset does.
macro_rules! reset {
    ($slot:expr, [$value:expr, reset]) => {
        $slot = $value
    };
    ($slot:expr, [$value:expr]) => {};
}

/// The column "read". `$store` is the store, `$access` who reads, `$slot` the MSR's slot.
macro_rules! on_read {
    ($store:ident $access:ident $slot:tt [refused]) => {
        Err(Refused)
    };
    ($store:ident $access:ident $slot:tt [by $rule:ident]) => {
        $store.$rule($access)
    };
    ($store:ident $access:ident $slot:tt [by $rule:ident if $exists:ident]) => {
        if $store.$exists($access) { $store.$rule($access) } else { Err(Refused) }
    };
    ($store:ident $access:ident $slot:tt [value]) => {
        Ok($store.slots.$slot)
    };
    ($store:ident $access:ident $slot:tt [value if $exists:ident]) => {
        if $store.$exists($access) { Ok($store.slots.$slot) } else { Err(Refused) }
    };
    ($store:ident $access:ident $slot:tt [$value:tt if $exists:ident]) => {
        if $store.$exists($access) { Ok($value) } else { Err(Refused) }
    };
    ($store:ident $access:ident $slot:tt [$value:expr]) => {
        Ok($value)
    };
}

/// The column "write". `$store` is the store, `$access` who writes, `$value` what, `$slot` the MSR's slot.
macro_rules! on_write {
    ($store:ident $access:ident $value:ident $slot:tt [refused]) => {
        Err(Refused)
    };
    ($store:ident $access:ident $value:ident $slot:tt [ignored]) => {
        Ok(Effect::None)
    };
    ($store:ident $access:ident $value:ident $slot:tt [zero]) => {
        if $value == 0 { Ok(Effect::None) } else { Err(Refused) }
    };
    ($store:ident $access:ident $value:ident $slot:tt [any]) => {{
        $store.slots.$slot = $value;
        Ok(Effect::None)
    }};
    ($store:ident $access:ident $value:ident $slot:tt [by $rule:ident]) => {
        $store.$rule($value, $access)
    };
    ($store:ident $access:ident $value:ident $slot:tt [by $rule:ident if $exists:ident]) => {
        if $store.$exists($access) { $store.$rule($value, $access) } else { Err(Refused) }
    };
    ($store:ident $access:ident $value:ident $slot:tt [$what:ident if $exists:ident]) => {
        if $store.$exists($access) {
            on_write!($store $access $value $slot [$what])
        } else {
            Err(Refused)
        }
    };
}

macro_rules! store {
    (
        ($host:ident)
        Backend $_b:literal { $($b:ident $b_saved:tt $b_check:tt $b_note:literal;)* }
        Pv $_p:literal { $($p:ident $p_saved:tt $p_note:literal;)* }
        HyperV $_h:literal { $($h:ident $h_saved:tt $h_note:literal;)* }
        Kept $_k:literal { $(
            $k:ident $k_saved:tt $k_up:tt $k_read:tt $k_write:tt $k_note:literal;
        )* }
        Outside $_o:literal { $(
            $o:ident $o_saved:tt $o_up:tt $o_read:tt $o_write:tt $o_note:literal;
        )* }
        Fixed $_f:literal { $(
            $f:tt $(..= $f_last:tt)? [$($f_saved:tt)*] $f_read:tt $f_write:tt $f_note:literal;
        )* }
        Apic $_a:literal { $($a:ident $a_saved:tt $a_note:literal;)* }
    ) => {
        /// The values that are kept, each under the name of its MSR.
        #[derive(Clone, Debug)]
        #[allow(non_snake_case, reason = "a slot bears the name of its MSR")]
        struct Slots {
            $($k: u64,)*
            $($o: u64,)*
        }

        impl Slots {
            /// The values at power-up.
            fn new($host: &HostMsrs) -> Self {
                Self { $($k: power_up!($k_up),)* $($o: power_up!($o_up),)* }
            }

            /// Puts back what a reset does not keep.
            fn reset(&mut self) {
                $(reset!(self.$k, $k_up);)*
                $(reset!(self.$o, $o_up);)*
            }
        }

        // One copy for guest and VMM: a match of some hundred arms.
        #[inline(never)]
        fn read_known(store: &MsrStore, access: Access<'_>) -> Result<u64, Refused> {
            match access.index {
                $($k => on_read!(store access $k $k_read),)*
                $($o => on_read!(store access $o $o_read),)*
                $($f $(..= $f_last)? => on_read!(store access $f $f_read),)*
                _ => Err(Refused),
            }
        }

        #[inline(never)]
        fn write_known(store: &mut MsrStore, value: u64, access: Access<'_>) -> Written {
            match access.index {
                $($k => on_write!(store access value $k $k_write),)*
                $($o => on_write!(store access value $o $o_write),)*
                $($f $(..= $f_last)? => on_write!(store access value $f $f_write),)*
                _ => Err(Refused),
            }
        }
    };
}

msrs!(store);

/// State of the MSRs of [`crate::Class::Store`] and [`crate::Class::Outside`], one per vCPU.
#[derive(Clone, Debug)]
pub struct MsrStore {
    slots: Slots,
    host_de_cfg: u64,
    host_amd: bool,
    mtrrs: Mtrrs,
    machine_checks: MachineChecks,
}

impl MsrStore {
    /// The state after power-up on this host.
    pub fn new(host: &HostMsrs) -> Result<Self, NoMemory> {
        Ok(Self {
            slots: Slots::new(host),
            // Only this bit: the others of DE_CFG are the host's own workarounds.
            host_de_cfg: host.de_cfg & de_cfg::LFENCE_SERIALIZE,
            host_amd: host.amd,
            mtrrs: Mtrrs::default(),
            machine_checks: MachineChecks::new(Self::supported_mcg_cap(host.amd))?,
        })
    }

    /// What INIT and reset change: little, since INIT keeps MSRs (SDM vol. 3A table 9-1).
    pub fn reset(&mut self, reset: Reset) {
        match reset {
            Reset::PowerUp => self.slots.reset(),
            // A guest must find its TSC and its microcode where it left them.
            Reset::Init => {}
        }
    }

    /// Reads an MSR of the store. `from_host` is for KVM_GET_MSRS.
    #[inline]
    pub fn read(&self, index: u32, by: By, facts: &GuestFacts) -> Result<u64, Refused> {
        // Apart, so that the guest's way, which the inner loop takes, is a call less deep.
        if by == By::Vmm {
            return self.read_for_vmm(index, facts);
        }
        read_known(self, Access { index, by: By::Guest, facts })
    }

    #[inline(never)]
    fn read_for_vmm(&self, index: u32, facts: &GuestFacts) -> Result<u64, Refused> {
        match read_known(self, Access { index, by: By::Vmm, facts }) {
            // A VMM that saves what the list names must be able to.
            Err(Refused) if lists::SAVED.contains(&index) => Ok(0),
            answer => answer,
        }
    }

    /// Writes an MSR of the store. `from_host` is for KVM_SET_MSRS.
    #[inline]
    pub fn write(
        &mut self,
        index: u32,
        value: u64,
        by: By,
        facts: &GuestFacts,
    ) -> Result<Effect, Refused> {
        if by == By::Vmm {
            return self.write_for_vmm(index, value, facts);
        }
        write_known(self, value, Access { index, by: By::Guest, facts })
    }

    #[inline(never)]
    fn write_for_vmm(&mut self, index: u32, value: u64, facts: &GuestFacts) -> Written {
        match write_known(self, value, Access { index, by: By::Vmm, facts }) {
            // It exists in any case; what refuses zero then is CPUID faulting that is on.
            Err(Refused) if index == PLATFORM_INFO => Err(Refused),
            // KVM lets a VMM restore zero to whatever the list names.
            Err(Refused) if value == 0 && lists::SAVED.contains(&index) => Ok(Effect::None),
            answer => answer,
        }
    }
}

/// Conditions of the table: where an MSR exists.
impl MsrStore {
    fn vmm(&self, access: Access<'_>) -> bool {
        access.is_vmm()
    }

    fn intel(&self, access: Access<'_>) -> bool {
        // By the guest's vendor: what its CPUID says decides which MSRs it looks for.
        !access.facts.amd
    }

    fn amd_host(&self, _: Access<'_>) -> bool {
        self.host_amd
    }

    fn arch_capabilities(&self, access: Access<'_>) -> bool {
        access.is_vmm() || access.facts.arch_capabilities
    }

    fn pdcm(&self, access: Access<'_>) -> bool {
        access.is_vmm() || access.facts.pdcm
    }

    fn osvw(&self, access: Access<'_>) -> bool {
        // For a VMM, too, as in stock KVM: without the feature nobody has them.
        access.facts.osvw
    }

    fn virt_ssbd(&self, access: Access<'_>) -> bool {
        // By the host's: the register is shown as this CPU has it.
        self.host_amd && (access.is_vmm() || access.facts.virt_ssbd)
    }

    fn local_machine_checks(&self, access: Access<'_>) -> bool {
        let on = self.slots.FEATURE_CONTROL & feature_control::LMCE != 0;
        // The guest has to ask for them in FEATURE_CONTROL first: without that a write is #GP.
        !self.host_amd && (access.is_vmm() || on)
    }
}

/// Rules of the table. Those of many rows are out of line, so that there is one copy of each.
impl MsrStore {
    #[inline(never)]
    fn read_mtrr(&self, access: Access<'_>) -> Result<u64, Refused> {
        self.mtrrs.read(access.index)
    }

    #[inline(never)]
    fn write_mtrr(&mut self, value: u64, access: Access<'_>) -> Written {
        self.mtrrs.write(access.index, value, access.facts.maxphyaddr)?;
        Ok(Effect::MtrrChanged)
    }

    #[inline(never)]
    fn read_machine_checks(&self, access: Access<'_>) -> Result<u64, Refused> {
        self.machine_checks.read(access.index, access.by)
    }

    #[inline(never)]
    fn write_machine_checks(&mut self, value: u64, access: Access<'_>) -> Written {
        // AMD's way to test a handler: the guest writes the status that it wants to find.
        let by_hwcr = access.facts.amd && self.slots.HWCR & hwcr::MC_STATUS_WR_EN != 0;
        let status = if by_hwcr { Statuses::Writable } else { Statuses::Clearable };
        self.machine_checks.write(access.index, value, access.by, status)?;
        Ok(Effect::None)
    }

    fn read_mcg_ext_ctl(&self, _: Access<'_>) -> Result<u64, Refused> {
        Ok(self.machine_checks.ext_ctl())
    }

    fn write_mcg_ext_ctl(&mut self, value: u64, _: Access<'_>) -> Written {
        self.machine_checks.set_ext_ctl(value)?;
        Ok(Effect::None)
    }

    fn write_pred_cmd(&mut self, value: u64, access: Access<'_>) -> Written {
        let (vmm, facts) = (access.is_vmm(), access.facts);
        let allowed = if vmm { facts.host_pred_cmd } else { facts.pred_cmd };
        // Without any bit the MSR does not exist for a guest, not even for a write of zero.
        let exists = allowed != 0 || vmm;
        require(exists && value & !u64::from(allowed) == 0)?;
        // A barrier on behalf of a VMM would be for its own thread; nothing to do.
        Ok(if value != 0 && !vmm { Effect::PredictionBarrier } else { Effect::None })
    }

    fn write_flush_cmd(&mut self, value: u64, access: Access<'_>) -> Written {
        let (vmm, facts) = (access.is_vmm(), access.facts);
        let exists = if vmm { facts.host_flush_l1d } else { facts.flush_l1d };
        require(exists && value & !flush_cmd::L1D == 0)?;
        Ok(if value != 0 && !vmm { Effect::FlushL1d } else { Effect::None })
    }

    fn write_tsc_adjust(&mut self, value: u64, access: Access<'_>) -> Written {
        if !access.facts.tsc_adjust {
            // As in KVM: without the feature the write vanishes.
            return Ok(Effect::None);
        }
        // Wrapping, as the register does.
        let delta = value.wrapping_sub(self.slots.TSC_ADJUST) as i64;
        // Before the effect is told: a guest may read it back at once.
        self.slots.TSC_ADJUST = value;
        // A VMM restores TSC and TSC_ADJUST one by one; only a guest's write moves the TSC.
        Ok(if access.is_vmm() { Effect::None } else { Effect::TscAdjusted { delta } })
    }

    fn write_misc_enable(&mut self, value: u64, access: Access<'_>) -> Written {
        let mut value = value;
        let old = self.slots.MISC_ENABLE;
        if !access.is_vmm() {
            require((old ^ value) & MISC_ENABLE_RESET == 0)?;
            // Read-only for the guest, and silently so: it says whether there is a PMU.
            value = value & !misc_enable::PERFMON | old & misc_enable::PERFMON;
        }
        let monitor_changes = (old ^ value) & misc_enable::MWAIT != 0;
        // For a VMM as well, as in stock KVM: the bit is MONITOR's, which came with SSE3.
        require(!monitor_changes || access.facts.sse3)?;
        self.slots.MISC_ENABLE = value;
        let on = value & misc_enable::MWAIT != 0;
        Ok(if monitor_changes { Effect::MonitorChanged { on } } else { Effect::None })
    }

    fn write_misc_features(&mut self, value: u64, _: Access<'_>) -> Written {
        let on = value & cpuid_faulting::ENABLE != 0;
        let exists = self.slots.PLATFORM_INFO & cpuid_faulting::PLATFORM_INFO != 0;
        // Switching off is always allowed: a VMM restores 0 before it restores PLATFORM_INFO.
        require(value & !cpuid_faulting::ENABLE == 0 && (exists || !on))?;
        self.slots.MISC_FEATURES_ENABLES = value;
        Ok(Effect::CpuidFaulting { on })
    }

    fn write_platform_info(&mut self, value: u64, _: Access<'_>) -> Written {
        // Faulting that is on must not lose the bit by which the guest knows of it.
        require(value & cpuid_faulting::PLATFORM_INFO != 0 || !self.cpuid_faulting())?;
        self.slots.PLATFORM_INFO = value;
        Ok(Effect::None)
    }

    fn write_feature_control(&mut self, value: u64, access: Access<'_>) -> Written {
        let locked = self.slots.FEATURE_CONTROL & feature_control::LOCK != 0;
        let known = match access.is_vmm() {
            true => feature_control::KNOWN,
            false => {
                let lmce = self.machine_checks.has_local();
                let vmx = access.facts.vmx;
                feature_control::LOCK
                    | if lmce { feature_control::LMCE } else { 0 }
                    | if vmx { feature_control::VMX_OUTSIDE_SMX } else { 0 }
            }
        };
        // The lock binds the guest: a VMM restores a locked value, and clears it at a reset.
        require((access.is_vmm() || !locked) && value & !known == 0)?;
        self.slots.FEATURE_CONTROL = value;
        Ok(Effect::None)
    }

    fn write_ucode_rev(&mut self, value: u64, access: Access<'_>) -> Written {
        // A guest writes 0, has CPUID load the revision and reads it (SDM vol. 3A, "Determining the
        // Signature"): its zero is not kept.
        if access.is_vmm() {
            self.slots.UCODE_REV = value;
        }
        Ok(Effect::None)
    }

    fn write_hwcr(&mut self, value: u64, _: Access<'_>) -> Written {
        // Switches for hardware that does not exist here are taken and forgotten.
        let ignored = hwcr::FFDIS | hwcr::IGNNE_EM | hwcr::TLB_CACHE_DIS;
        let kept = hwcr::MC_STATUS_WR_EN | hwcr::TSC_FREQ_SEL;
        // Unknown bits are refused: a switch that a guest believes in must not be lost.
        require(value & !(ignored | kept) == 0)?;
        self.slots.HWCR = value & kept;
        Ok(Effect::None)
    }

    fn write_de_cfg(&mut self, value: u64, access: Access<'_>) -> Written {
        // What LFENCE does is the host's choice; a guest may only state it.
        let stated = value == self.host_de_cfg;
        require(value & !self.host_de_cfg == 0 && (access.is_vmm() || stated))?;
        self.slots.DE_CFG = value;
        Ok(Effect::None)
    }

    /// Once SVM_DISABLE is set, it and the lock stay (APM vol. 2 §15.30.1).
    fn write_vm_cr(&mut self, value: u64, _: Access<'_>) -> Written {
        use vm_cr::{DIS_A20M, DPD, LOCK, R_INIT, SVMDIS};
        const KNOWN: u64 = DPD | R_INIT | DIS_A20M | LOCK | SVMDIS;
        require(value & !KNOWN == 0)?;
        let old = self.slots.VM_CR;
        // Otherwise a guest's kernel could not rely on what its firmware has switched off.
        let fixed = if old & SVMDIS != 0 { LOCK | SVMDIS } else { 0 };
        self.slots.VM_CR = old & fixed | value & !fixed;
        Ok(Effect::None)
    }

    /// Whether VM_CR keeps EFER.SVME from being set.
    pub fn is_svm_disabled(&self) -> bool {
        self.slots.VM_CR & vm_cr::SVMDIS != 0
    }

    fn write_vm_hsave_pa(&mut self, value: u64, access: Access<'_>) -> Written {
        let width = access.facts.maxphyaddr;
        let above = if width >= 64 { 0 } else { u64::MAX << width };
        // MSRs may be restored before the CPUID that tells the width.
        require(access.is_vmm() || value & (0xfff | above) == 0)?;
        // Cut for a VMM, as in stock KVM, whose older versions let guests write anything.
        self.slots.VM_HSAVE_PA = value & !0xfff;
        Ok(Effect::None)
    }

    /// The ratio of L2's TSC to L1's that is in force for a guest with these features.
    pub fn tsc_ratio_of_l2(&self, facts: &GuestFacts) -> u64 {
        // A VMM may have set one while CPUID had the MSR. Without it the guest could neither see nor change it.
        if facts.tsc_ratio { self.slots.TSC_RATIO } else { TSC_RATIO_ONE }
    }

    fn tsc_ratio(&self, access: Access<'_>) -> bool {
        access.is_vmm() || access.facts.tsc_ratio
    }

    fn write_tsc_ratio(&mut self, value: u64, access: Access<'_>) -> Written {
        if !access.facts.tsc_ratio {
            // QEMU 6.2 writes 0 there.
            require(value == 0 || value == self.slots.TSC_RATIO)?;
            return Ok(Effect::None);
        }
        // Bits 63:40 are reserved (APM vol. 2 §15.30.5).
        require(value >> 40 == 0)?;
        self.slots.TSC_RATIO = value;
        Ok(Effect::TscRatioOfL2 { ratio: value })
    }

    fn write_virt_spec_ctrl(&mut self, value: u64, _: Access<'_>) -> Written {
        require(value & !spec_ctrl::SSBD == 0)?;
        self.slots.VIRT_SPEC_CTRL = value;
        // What the CPU has for it differs by model; whoever enters the guest knows, so only the wish is kept here.
        Ok(Effect::VirtSsbd { on: value != 0 })
    }
}

/// What others ask of the store.
impl MsrStore {
    /// The guest wrote its TSC: TSC_ADJUST moves by as much (SDM vol. 3B §17.17.3).
    pub fn adjust_tsc(&mut self, delta: i64) {
        self.slots.TSC_ADJUST = self.slots.TSC_ADJUST.wrapping_add(delta as u64);
    }

    /// IA32_TSC_ADJUST in TSC ticks.
    pub fn tsc_adjust(&self) -> u64 {
        self.slots.TSC_ADJUST
    }

    /// Whether CPUID outside CPL 0 must raise #GP.
    #[inline]
    pub fn cpuid_faulting(&self) -> bool {
        self.slots.MISC_FEATURES_ENABLES & cpuid_faulting::ENABLE != 0
    }

    /// Where the system-management handler and its save area lie.
    pub fn smbase(&self) -> u64 {
        self.slots.SMBASE
    }

    /// Where a hypervisor on AMD has its own state kept.
    pub fn vm_hsave_pa(&self) -> u64 {
        self.slots.VM_HSAVE_PA
    }

    /// RSM takes the base from the save area.
    pub fn set_smbase(&mut self, value: u64) {
        self.slots.SMBASE = value;
    }

    /// One more system-management interrupt was taken.
    pub fn count_smi(&mut self) {
        self.slots.SMI_COUNT = self.slots.SMI_COUNT.wrapping_add(1);
    }

    /// Whether MISC_ENABLE shows MONITOR and MWAIT.
    pub fn offers_mwait(&self) -> bool {
        self.slots.MISC_ENABLE & misc_enable::MWAIT != 0
    }

    /// KVM_X86_GET_MCE_CAP_SUPPORTED: MCG_CAP with every bit that may be set, on Intel CPUs or
    /// others.
    pub const fn supported_mcg_cap(amd: bool) -> u64 {
        if amd { SUPPORTED } else { SUPPORTED_BY_INTEL }
    }

    /// IA32_FEATURE_CONTROL as the guest sees it.
    pub fn feature_control(&self) -> u64 {
        self.slots.FEATURE_CONTROL
    }

    /// Whether MCG_CAP tells of interrupts for corrected machine checks.
    pub fn has_cmci(&self) -> bool {
        self.machine_checks.has_cmci()
    }

    /// KVM_X86_SETUP_MCE: sets MCG_CAP and enables all banks. Refused: -EINVAL.
    pub fn set_up_mce(&mut self, mcg_cap: u64) -> Result<(), Refused> {
        self.machine_checks.set_up(mcg_cap)
    }

    /// KVM_X86_SET_MCE. Refused: -EINVAL, for a bank that does not exist or a status without its
    /// valid bit.
    pub fn inject_mce(&mut self, report: &McReport, cr4_mce: bool) -> Result<McVerdict, Refused> {
        self.machine_checks.inject(report, cr4_mce)
    }
}
