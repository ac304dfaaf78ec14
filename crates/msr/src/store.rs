//! The MSRs whose whole life is a value: read, checked, kept, and now and then told to others.
//!
//! Rules follow SDM vol. 4 and APM vol. 2 as far as guests depend on them, and KVM where a manual
//! would have the guest see a machine that this one is not.

use crate::mce::MachineChecks;
use crate::mtrr::Mtrrs;
use crate::{GuestFacts, HostMsrs, McReport, McVerdict, NoMemory, Refused, lists};
use x86::msr::*;

/// What a write asks of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// TSC_ADJUST moved by `delta`: so must the TSC offset. Only of a guest's write.
    TscAdjusted {
        /// Ticks.
        delta: i64,
    },
    /// The guest asked for an indirect-branch prediction barrier.
    PredictionBarrier,
    /// The guest asked for an L1 data-cache flush.
    FlushL1d,
    /// A memory-type range changed.
    MtrrChanged,
    /// MISC_ENABLE's MONITOR bit changed: see `GuestCpuid::set_mwait`.
    MonitorChanged {
        /// MONITOR is to be offered.
        on: bool,
    },
    /// VIRT_SPEC_CTRL was written: whether the guest runs without speculative store bypass.
    VirtSsbd {
        /// It does.
        on: bool,
    },
    /// CPUID faulting was switched: with it on, CPUID outside CPL 0 raises #GP.
    CpuidFaulting {
        /// The new state.
        on: bool,
    },
}

/// MISC_ENABLE after reset: neither branch-trace storage nor precise sampling exists.
const MISC_ENABLE_RESET: u64 = misc_enable::BTS_UNAVAILABLE | misc_enable::PEBS_UNAVAILABLE;
/// TSC_RATIO of 1.0, in 8.32 fixed point (APM vol. 2 §15.30.5).
const TSC_RATIO_ONE: u64 = 1 << 32;
/// Microcode revisions that a guest sees until its VMM says otherwise: those of KVM, new enough that
/// no guest knows an erratum for them.
const UCODE_REV_AMD: u64 = 0x0100_0065;
const UCODE_REV_INTEL: u64 = 0x1_0000_0000;

/// State of the MSRs of [`crate::Class::Store`], one per vCPU.
#[derive(Clone, Debug)]
pub struct MsrStore {
    tsc_adjust: u64,
    misc_enable: u64,
    hwcr: u64,
    arch_capabilities: u64,
    ucode_rev: u64,
    platform_info: u64,
    misc_features: u64,
    feature_control: u64,
    power_ctl: u64,
    smbase: u64,
    smi_count: u64,
    de_cfg: u64,
    host_de_cfg: u64,
    host_amd: bool,
    vm_cr: u64,
    vm_hsave_pa: u64,
    osvw_length: u64,
    osvw_status: u64,
    virt_spec_ctrl: u64,
    mtrrs: Mtrrs,
    machine_checks: MachineChecks,
}

impl MsrStore {
    /// The state after power-up on this host.
    pub fn new(host: &HostMsrs) -> Result<Self, NoMemory> {
        Ok(Self {
            tsc_adjust: 0,
            misc_enable: MISC_ENABLE_RESET,
            hwcr: 0,
            arch_capabilities: host.arch_capabilities,
            ucode_rev: if host.amd { UCODE_REV_AMD } else { UCODE_REV_INTEL },
            // It is emulated in software, so every guest has it.
            platform_info: cpuid_faulting::PLATFORM_INFO,
            misc_features: 0,
            feature_control: 0,
            power_ctl: 0,
            smbase: 0x3_0000,
            smi_count: 0,
            de_cfg: 0,
            host_de_cfg: host.de_cfg & de_cfg::LFENCE_SERIALIZE,
            host_amd: host.amd,
            vm_cr: 0,
            vm_hsave_pa: 0,
            // Three known workarounds, none of which a guest has to apply.
            osvw_length: 3,
            osvw_status: 0,
            virt_spec_ctrl: 0,
            mtrrs: Mtrrs::default(),
            machine_checks: MachineChecks::new(!host.amd)?,
        })
    }

    /// What INIT and reset change: little, since INIT keeps MSRs (SDM vol. 3A table 9-1).
    pub fn reset(&mut self, init: bool) {
        if !init {
            self.misc_enable = MISC_ENABLE_RESET;
            self.smbase = 0x3_0000;
            self.misc_features = 0;
            self.hwcr = 0;
        }
    }

    /// Reads an MSR of [`crate::Class::Store`]. `from_host` is for KVM_GET_MSRS.
    pub fn read(&self, index: u32, from_host: bool, facts: &GuestFacts) -> Result<u64, Refused> {
        match self.read_known(index, from_host, facts) {
            // A VMM that saves what the list names must be able to.
            Err(Refused) if from_host && lists::SAVED.contains(&index) => Ok(0),
            answer => answer,
        }
    }

    fn read_known(&self, index: u32, from_host: bool, facts: &GuestFacts) -> Result<u64, Refused> {
        let when = |exists: bool, value: u64| if exists { Ok(value) } else { Err(Refused) };
        match index {
            TSC_ADJUST => Ok(self.tsc_adjust),
            MISC_ENABLE => Ok(self.misc_enable),
            HWCR => Ok(self.hwcr),
            UCODE_REV => Ok(self.ucode_rev),
            ARCH_CAPABILITIES => when(from_host || facts.arch_capabilities, self.arch_capabilities),
            PERF_CAPABILITIES => when(from_host || facts.pdcm, 0),
            PLATFORM_INFO => Ok(self.platform_info),
            VIRT_SPEC_CTRL => {
                when(self.host_amd && (from_host || facts.virt_ssbd), self.virt_spec_ctrl)
            }
            MCG_EXT_CTL => {
                let exists = from_host || self.feature_control & feature_control::LMCE != 0;
                when(!self.host_amd && exists, self.machine_checks.ext_ctl())
            }
            MISC_FEATURES_ENABLES => Ok(self.misc_features),
            FEATURE_CONTROL => when(!facts.amd, self.feature_control),
            POWER_CTL => Ok(self.power_ctl),
            SMBASE => when(from_host, self.smbase),
            SMI_COUNT => Ok(self.smi_count),
            // AMD's own, and served there alone.
            DE_CFG => when(self.host_amd, self.de_cfg),
            VM_CR => when(self.host_amd, self.vm_cr),
            VM_HSAVE_PA => Ok(self.vm_hsave_pa),
            TSC_RATIO => when(from_host, TSC_RATIO_ONE),
            OSVW_ID_LENGTH => when(facts.osvw, self.osvw_length),
            OSVW_STATUS => when(facts.osvw, self.osvw_status),
            // Constants that old systems compute clocks from.
            FSB_FREQ => Ok(3),
            EBC_FREQUENCY_ID => Ok(1 << 24),
            PERF_STATUS => Ok(1000 | 4 << 40),
            BBL_CR_CTL3 => Ok(0xbe70_2111),
            K7_CLK_CTL => Ok(0x2000_0000),
            MTRR_CAP | 0x200..=0x26f | MTRR_DEF_TYPE => self.mtrrs.read(index),
            P5_MC_ADDR
            | P5_MC_TYPE
            | MCG_CAP
            | MCG_STATUS
            | MCG_CTL
            | 0x280..=0x29f
            | 0x400..=0x47f => self.machine_checks.read(index, from_host),
            // They exist and say nothing.
            PLATFORM_ID
            | EBL_CR_POWERON
            | PERF_CTL
            | LAST_BRANCH_FROM..=LAST_INT_TO
            | RAPL_POWER_UNIT
            | PKG_ENERGY_STATUS
            | DRAM_ENERGY_STATUS
            | PP0_ENERGY_STATUS
            | PP1_ENERGY_STATUS
            | PERFCTR0
            | 0xc2
            | PERFEVTSEL0
            | 0x187
            | K7_EVNTSEL0..=K7_PERFCTR3
            | SYSCFG
            | NB_CFG
            | HSMP_STATUS
            | FAM10H_MMIO_CONF_BASE
            | SMM_TSEG_ADDR
            | SMM_TSEG_MASK
            | IC_CFG
            | DC_CFG
            | TW_CFG
            | BU_CFG2
            | F15H_EX_CFG => Ok(0),
            // Write-only: PRED_CMD, FLUSH_CMD, UCODE_WRITE, PATCH_LOADER, VM_IGNNE.
            _ => Err(Refused),
        }
    }

    /// Writes an MSR of [`crate::Class::Store`]. `from_host` is for KVM_SET_MSRS.
    pub fn write(
        &mut self,
        index: u32,
        value: u64,
        from_host: bool,
        facts: &GuestFacts,
    ) -> Result<Effect, Refused> {
        match self.write_known(index, value, from_host, facts) {
            // It exists in any case; what refuses zero then is CPUID faulting that is on.
            Err(Refused) if index == PLATFORM_INFO => Err(Refused),
            // KVM lets a VMM restore zero to whatever the list names.
            Err(Refused) if from_host && value == 0 && lists::SAVED.contains(&index) => {
                Ok(Effect::None)
            }
            answer => answer,
        }
    }

    fn write_known(
        &mut self,
        index: u32,
        value: u64,
        from_host: bool,
        facts: &GuestFacts,
    ) -> Result<Effect, Refused> {
        let require = |allowed: bool| if allowed { Ok(()) } else { Err(Refused) };
        match index {
            TSC_ADJUST => return Ok(self.write_tsc_adjust(value, from_host, facts)),
            MISC_ENABLE => return self.write_misc_enable(value, from_host, facts),
            PRED_CMD => {
                let allowed = if from_host { facts.host_pred_cmd } else { facts.pred_cmd };
                // Without any bit the MSR does not exist for a guest, not even for a write of zero.
                let exists = allowed != 0 || from_host;
                require(exists && value & !u64::from(allowed) == 0)?;
                // A barrier on behalf of a VMM would be for its own thread; nothing to do.
                let asked = value != 0 && !from_host;
                return Ok(if asked { Effect::PredictionBarrier } else { Effect::None });
            }
            FLUSH_CMD => {
                let exists = if from_host { facts.host_flush_l1d } else { facts.flush_l1d };
                require(exists && value & !flush_cmd::L1D == 0)?;
                let asked = value != 0 && !from_host;
                return Ok(if asked { Effect::FlushL1d } else { Effect::None });
            }
            MISC_FEATURES_ENABLES => {
                let faulting = value & cpuid_faulting::ENABLE != 0;
                let exists = self.platform_info & cpuid_faulting::PLATFORM_INFO != 0;
                require(value & !cpuid_faulting::ENABLE == 0 && (exists || !faulting))?;
                self.misc_features = value;
                return Ok(Effect::CpuidFaulting { on: faulting });
            }
            0x200..=0x26f | MTRR_DEF_TYPE => {
                self.mtrrs.write(index, value, facts.maxphyaddr)?;
                return Ok(Effect::MtrrChanged);
            }
            MCG_STATUS | MCG_CTL | 0x280..=0x29f | 0x400..=0x47f => {
                let status_writable = facts.amd && self.hwcr & hwcr::MC_STATUS_WR_EN != 0;
                self.machine_checks.write(index, value, from_host, status_writable)?;
            }
            HWCR => {
                // Switches for hardware that does not exist here are taken and forgotten.
                let ignored = hwcr::FFDIS | hwcr::IGNNE_EM | hwcr::TLB_CACHE_DIS;
                let kept = hwcr::MC_STATUS_WR_EN | hwcr::TSC_FREQ_SEL;
                require(value & !(ignored | kept) == 0)?;
                self.hwcr = value & kept;
            }
            // A guest's update is ignored, so that it does not try again for ever.
            UCODE_REV if !from_host => {}
            UCODE_REV => self.ucode_rev = value,
            ARCH_CAPABILITIES => {
                require(from_host)?;
                self.arch_capabilities = value;
            }
            PERF_CAPABILITIES => require(from_host && value == 0)?,
            VIRT_SPEC_CTRL => {
                require(self.host_amd && (from_host || facts.virt_ssbd))?;
                require(value & !spec_ctrl::SSBD == 0)?;
                self.virt_spec_ctrl = value;
                return Ok(Effect::VirtSsbd { on: value != 0 });
            }
            MCG_EXT_CTL => {
                let exists = from_host || self.feature_control & feature_control::LMCE != 0;
                require(!self.host_amd && exists)?;
                self.machine_checks.set_ext_ctl(value)?;
            }
            PLATFORM_INFO => {
                let drops_faulting = value & cpuid_faulting::PLATFORM_INFO == 0
                    && self.misc_features & cpuid_faulting::ENABLE != 0;
                require(from_host && !drops_faulting)?;
                self.platform_info = value;
            }
            FEATURE_CONTROL => {
                let locked = self.feature_control & feature_control::LOCK != 0;
                let known = match from_host {
                    true => feature_control::KNOWN,
                    false if self.machine_checks.has_local() => {
                        feature_control::LOCK | feature_control::LMCE
                    }
                    false => feature_control::LOCK,
                };
                require(!facts.amd && (from_host || !locked) && value & !known == 0)?;
                self.feature_control = value;
            }
            POWER_CTL => self.power_ctl = value,
            SMBASE => {
                require(from_host)?;
                self.smbase = value;
            }
            SMI_COUNT => {
                require(from_host)?;
                self.smi_count = value;
            }
            DE_CFG => {
                require(self.host_amd)?;
                // What LFENCE does is the host's choice; a guest may only state it.
                let stated = value == self.host_de_cfg;
                require(value & !self.host_de_cfg == 0 && (from_host || stated))?;
                self.de_cfg = value;
            }
            VM_CR => {
                require(self.host_amd)?;
                self.write_vm_cr(value)?;
            }
            VM_HSAVE_PA => {
                let above = if facts.maxphyaddr >= 64 { 0 } else { u64::MAX << facts.maxphyaddr };
                require(from_host || value & (0xfff | above) == 0)?;
                self.vm_hsave_pa = value & !0xfff;
            }
            // Not virtualized: only its constant value; a VMM may also write zero.
            TSC_RATIO => require(from_host && matches!(value, 0 | TSC_RATIO_ONE))?,
            OSVW_ID_LENGTH => {
                require(facts.osvw)?;
                self.osvw_length = value;
            }
            OSVW_STATUS => {
                require(facts.osvw)?;
                self.osvw_status = value;
            }
            FAM10H_MMIO_CONF_BASE => require(value == 0)?,
            // Taken and forgotten: counters that count nothing, and hardware switches.
            PERFCTR0
            | 0xc2
            | PERFEVTSEL0
            | 0x187
            | K7_EVNTSEL0..=K7_PERFCTR3
            | UCODE_WRITE
            | PATCH_LOADER
            | NB_CFG
            | K7_CLK_CTL
            | BBL_CR_CTL3
            | VM_IGNNE
            | DC_CFG
            | TW_CFG
            | BU_CFG2
            | F15H_EX_CFG => {}
            _ => return Err(Refused),
        }
        Ok(Effect::None)
    }

    fn write_tsc_adjust(&mut self, value: u64, from_host: bool, facts: &GuestFacts) -> Effect {
        if !facts.tsc_adjust {
            // As in KVM: without the feature the write vanishes.
            return Effect::None;
        }
        let delta = value.wrapping_sub(self.tsc_adjust) as i64;
        self.tsc_adjust = value;
        // A VMM restores TSC and TSC_ADJUST one by one; only a guest's write moves the TSC.
        if from_host { Effect::None } else { Effect::TscAdjusted { delta } }
    }

    fn write_misc_enable(
        &mut self,
        value: u64,
        from_host: bool,
        facts: &GuestFacts,
    ) -> Result<Effect, Refused> {
        let mut value = value;
        let old = self.misc_enable;
        if !from_host {
            if (old ^ value) & MISC_ENABLE_RESET != 0 {
                return Err(Refused);
            }
            value = value & !misc_enable::PERFMON | old & misc_enable::PERFMON;
        }
        if (old ^ value) & misc_enable::MWAIT == 0 {
            self.misc_enable = value;
            return Ok(Effect::None);
        }
        if !facts.sse3 {
            return Err(Refused);
        }
        self.misc_enable = value;
        Ok(Effect::MonitorChanged { on: value & misc_enable::MWAIT != 0 })
    }

    /// Once SVM_DISABLE is set, it and the lock stay (APM vol. 2 §15.30.1).
    fn write_vm_cr(&mut self, value: u64) -> Result<(), Refused> {
        const KNOWN: u64 = 0x1f;
        if value & !KNOWN != 0 {
            return Err(Refused);
        }
        let fixed = if self.vm_cr & vm_cr::SVMDIS != 0 { vm_cr::LOCK | vm_cr::SVMDIS } else { 0 };
        self.vm_cr = self.vm_cr & fixed | value & !fixed;
        Ok(())
    }

    /// The guest wrote its TSC: TSC_ADJUST moves by as much (SDM vol. 3B §17.17.3).
    pub fn adjust_tsc(&mut self, delta: i64) {
        self.tsc_adjust = self.tsc_adjust.wrapping_add(delta as u64);
    }

    /// TSC_ADJUST.
    pub fn tsc_adjust(&self) -> u64 {
        self.tsc_adjust
    }

    /// Whether CPUID outside CPL 0 must raise #GP.
    #[inline]
    pub fn cpuid_faulting(&self) -> bool {
        self.misc_features & cpuid_faulting::ENABLE != 0
    }

    /// Where the system-management handler and its save area lie.
    pub fn smbase(&self) -> u64 {
        self.smbase
    }

    /// RSM takes the base from the save area.
    pub fn set_smbase(&mut self, value: u64) {
        self.smbase = value;
    }

    /// One more system-management interrupt was taken.
    pub fn count_smi(&mut self) {
        self.smi_count = self.smi_count.wrapping_add(1);
    }

    /// Whether MISC_ENABLE shows MONITOR and MWAIT.
    pub fn offers_mwait(&self) -> bool {
        self.misc_enable & misc_enable::MWAIT != 0
    }

    /// KVM_X86_GET_MCE_CAP_SUPPORTED: MCG_CAP with every bit that may be set, on Intel CPUs or
    /// others.
    pub const fn supported_mcg_cap(intel: bool) -> u64 {
        MachineChecks::supported(intel)
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
