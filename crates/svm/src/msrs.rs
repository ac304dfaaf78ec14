//! The MSRs that lie in the VMCB or in hardware.

use backend::{LiveRegisters, Msrs, NotMine};
use cpu::Cpu;
use x86::{
    msr,
    vmcb::{self, Clean},
};

use crate::state::Svm;

/// MSRs whose guest value is live in hardware while the guest runs: VMLOAD and VMSAVE move them.
pub(crate) const LIVE: [u32; 10] = [
    msr::STAR,
    msr::LSTAR,
    msr::CSTAR,
    msr::SYSCALL_MASK,
    msr::FS_BASE,
    msr::GS_BASE,
    msr::KERNEL_GS_BASE,
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
];

/// What every CPU keeps of SYSENTER_ESP and SYSENTER_EIP.
pub(crate) const LOW: u64 = u32::MAX as u64;

impl<C: Cpu> Svm<C> {
    /// SYSENTER_ESP or SYSENTER_EIP as the guest knows it, of which the block has `kept`.
    pub(crate) fn sysenter(&self, kept: u64, high: u64) -> u64 {
        if self.cold.limits.wide_sysenter { kept & LOW | high } else { kept }
    }
}

impl<C: Cpu> Msrs for Svm<C> {
    fn msr(&self, index: u32) -> Result<u64, NotMine> {
        let save = &self.vmcb().save;
        let [esp_high, eip_high] = self.cold.sysenter_high;
        Ok(match index {
            // [`LIVE`], by its ranges: the block has what the last VMSAVE left. They exit where the guest must not have them
            // by itself, be it by its make or by a map of L1's.
            msr::SYSENTER_CS..=msr::SYSENTER_EIP
            | msr::STAR..=msr::SYSCALL_MASK
            | msr::FS_BASE..=msr::KERNEL_GS_BASE
                if self.loaded =>
            {
                return Err(NotMine);
            }
            msr::STAR => save.star,
            msr::LSTAR => save.lstar,
            msr::CSTAR => save.cstar,
            msr::SYSCALL_MASK => save.sfmask,
            msr::KERNEL_GS_BASE => save.kernel_gs_base,
            msr::FS_BASE => save.segments[vmcb::SEG_FS].base,
            msr::GS_BASE => save.segments[vmcb::SEG_GS].base,
            msr::SYSENTER_CS => save.sysenter_cs,
            msr::SYSENTER_ESP => self.sysenter(save.sysenter_esp, esp_high),
            msr::SYSENTER_EIP => self.sysenter(save.sysenter_eip, eip_high),
            msr::PAT => save.g_pat,
            msr::DEBUGCTL => save.dbgctl,
            msr::LAST_BRANCH_FROM | msr::LAST_BRANCH_TO | msr::LAST_INT_FROM | msr::LAST_INT_TO => {
                self.branch_record(index)
            }
            // Not from the block, which has no place for it: VMRUN leaves TSC_AUX alone.
            msr::TSC_AUX => self.tsc_aux.get(),
            msr::XSS => self.extended.xss(),
            msr::SPEC_CTRL if self.features.v_spec_ctrl => save.spec_ctrl,
            msr::SPEC_CTRL => self.spec_ctrl,
            // Kept by the store: the block has no place for it.
            msr::VIRT_SPEC_CTRL => 0,
            _ => return Err(NotMine),
        })
    }

    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), NotMine> {
        match index {
            msr::TSC_AUX => {
                self.tsc_aux.set(value);
                self.sync_tsc_aux();
            }
            msr::XSS => self.set_xss(value),
            msr::SPEC_CTRL if !self.features.v_spec_ctrl => {
                self.spec_ctrl = value;
                // The world switch loads it at the next entry.
                self.spec.guest = value;
            }
            // The PAT is of the clean bit of nested paging (APM vol. 2 §15.15).
            msr::PAT => self.vmcb_mut(Clean::NPT).save.g_pat = value,
            msr::DEBUGCTL => self.set_debugctl(value),
            msr::LAST_BRANCH_FROM | msr::LAST_BRANCH_TO | msr::LAST_INT_FROM | msr::LAST_INT_TO => {
                return if self.set_branch_record(index, value) { Ok(()) } else { Err(NotMine) };
            }
            // [`LIVE`] are what is left: the next VMSAVE would overwrite them.
            _ if self.loaded && index != msr::SPEC_CTRL => return Err(NotMine),
            _ => {
                match (index, &mut self.cold.sysenter_high) {
                    (msr::SYSENTER_ESP, [high, _]) | (msr::SYSENTER_EIP, [_, high]) => {
                        *high = value & !LOW;
                    }
                    _ => {}
                }
                // VMLOAD reads these from memory each time: no clean bit is about them.
                let save = &mut self.vmcb_mut(Clean::empty()).save;
                let slot = match index {
                    msr::STAR => &mut save.star,
                    msr::LSTAR => &mut save.lstar,
                    msr::CSTAR => &mut save.cstar,
                    msr::SYSCALL_MASK => &mut save.sfmask,
                    msr::KERNEL_GS_BASE => &mut save.kernel_gs_base,
                    msr::FS_BASE => &mut save.segments[vmcb::SEG_FS].base,
                    msr::GS_BASE => &mut save.segments[vmcb::SEG_GS].base,
                    msr::SYSENTER_CS => &mut save.sysenter_cs,
                    msr::SYSENTER_ESP => &mut save.sysenter_esp,
                    msr::SYSENTER_EIP => &mut save.sysenter_eip,
                    msr::SPEC_CTRL => &mut save.spec_ctrl,
                    _ => return Err(NotMine),
                };
                *slot = value;
            }
        }
        Ok(())
    }

    fn prediction_barrier(&mut self) {
        // At once: the guest's next branch must find it done.
        self.cpu.wrmsr(msr::PRED_CMD, 1);
    }

    fn set_virt_ssbd(&mut self, on: bool) {
        self.virt_ssbd = on;
    }

    fn host_cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.cpu.cpuid(leaf, subleaf)
    }
}
