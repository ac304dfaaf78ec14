//! The MSRs that lie in the VMCS or in hardware.

use backend::{LiveRegisters, Msrs, NotMine};
use cpu::Cpu;
use x86::{Directions, msr};

use crate::{
    fields,
    permission::{LIVE, TSC},
    state::Vmx,
};

/// How long the core was in C1, C3, C6 and C7: what a guest reads that may use them.
pub(crate) const CORE_RESIDENCY: [u32; 4] = [0x660, 0x3fc, 0x3fd, 0x3fe];

/// What SYSENTER loads.
const SYSENTER: [u32; 3] = [msr::SYSENTER_CS, msr::SYSENTER_ESP, msr::SYSENTER_EIP];

impl<C: Cpu> Vmx<C> {
    // No exit is needed: an entry and an exit exchange them, the loop's ends KERNEL_GS_BASE.
    pub(crate) fn pass_live_msrs(&self) {
        for msr in LIVE {
            self.msr_map().intercept(msr, Directions::empty());
        }
        // Behind LIVE, which opens their writes, too.
        self.watch_sysenter();
        // Reads pass, with the offset; writes move it, and TSC_ADJUST.
        self.msr_map().intercept(TSC, Directions::WRITES);
        // Each entry loads it from the field, which is all that the guest reads. Writes are masked. KVM in a guest reads
        // it before each of its entries.
        self.msr_map().intercept(msr::DEBUGCTL, Directions::WRITES);
        if self.cold.fewer.cstate {
            for msr in CORE_RESIDENCY {
                self.msr_map().intercept(msr, Directions::WRITES);
            }
        }
    }

    /// A guest that may be a hypervisor has its writes of the SYSENTER MSRs exit: an exit of L2 loads them, and
    /// need not write what nobody has changed. They are written once, when a kernel starts.
    pub(crate) fn watch_sysenter(&self) {
        for msr in SYSENTER {
            self.msr_map().intercept(msr, Directions::WRITES.when(self.watches_sysenter()));
        }
    }

    /// Whether L1's writes of the SYSENTER MSRs exit.
    #[inline]
    // Whether nesting is offered at all is the module's; whether this guest may is its CPUID's.
    pub(crate) fn watches_sysenter(&self) -> bool {
        self.features.nested && self.cold.limits.vmx
    }
}

impl<C: Cpu> Msrs for Vmx<C> {
    fn msr(&self, index: u32) -> Result<u64, NotMine> {
        Ok(match index {
            msr::STAR => self.syscall.star,
            msr::LSTAR => self.syscall.lstar,
            msr::SYSCALL_MASK => self.syscall.mask,
            msr::CSTAR => self.cold.cstar,
            // SWAPGS changes it without an exit, and it is read back when the loop is left. Of all others the VMCS or this
            // vCPU has the value.
            msr::KERNEL_GS_BASE if self.vmcs.is_loaded() => return Err(NotMine),
            msr::KERNEL_GS_BASE => self.kernel_gs_base.get(),
            msr::FS_BASE => self.get(fields::GUEST_FS_BASE),
            msr::GS_BASE => self.get(fields::GUEST_GS_BASE),
            msr::SYSENTER_CS => self.get(fields::GUEST_SYSENTER_CS).into(),
            msr::SYSENTER_ESP => self.get(fields::GUEST_SYSENTER_ESP),
            msr::SYSENTER_EIP => self.get(fields::GUEST_SYSENTER_EIP),
            msr::PAT => self.get(fields::GUEST_PAT),
            msr::DEBUGCTL => self.get(fields::GUEST_DEBUGCTL),
            msr::TSC_AUX => self.tsc_aux,
            msr::XSS => self.cold.extended.xss(),
            // SPEC_CTRL is the world switch's: it has read the newest behind the exit.
            msr::SPEC_CTRL => self.spec_ctrl(),
            // Asked last: the capability MSRs of VMX are read rarely.
            _ => return self.nested_msr_value(index).ok_or(NotMine),
        })
    }

    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), NotMine> {
        // Where the CPU or an entry would refuse it. A VMM may have told the guest of wider addresses
        // than this CPU has.
        // Sign-extended, not refused: whoever sets it has checked it by what the guest was told.
        let value = match index {
            // CSTAR is where an emulated SYSCALL goes.
            msr::LSTAR
            | msr::CSTAR
            | msr::KERNEL_GS_BASE
            | msr::FS_BASE
            | msr::GS_BASE
            | msr::SYSENTER_ESP
            | msr::SYSENTER_EIP => self.features.canonical(value),
            // RFLAGS has nothing up there.
            msr::SYSCALL_MASK => value & 0xffff_ffff,
            // A debugger's steps over instructions would become steps over branches.
            // Last branches are not virtualized; as in stock KVM both bits vanish.
            msr::DEBUGCTL => value & !(msr::debugctl::LBR | msr::debugctl::BTF),
            _ => value,
        };
        match index {
            msr::TSC_AUX => {
                self.tsc_aux = value;
                // Lent to the CPU at once where the loop runs: the guest reads it without an exit.
                self.sync_tsc_aux();
            }
            msr::XSS => self.set_xss(value),
            msr::SPEC_CTRL => self.set_spec_ctrl(value),
            msr::PAT => self.set(fields::GUEST_PAT, value),
            msr::DEBUGCTL => self.set(fields::GUEST_DEBUGCTL, value),
            msr::STAR | msr::LSTAR | msr::SYSCALL_MASK => {
                match index {
                    msr::STAR => self.syscall.star = value,
                    msr::LSTAR => self.syscall.lstar = value,
                    _ => self.syscall.mask = value,
                }
                // All three are lent together: the CPU may have another guest's.
                self.sync_syscall();
            }
            msr::CSTAR => self.cold.cstar = value,
            msr::KERNEL_GS_BASE => self.set_kernel_gs_base(value),
            msr::FS_BASE => self.set(fields::GUEST_FS_BASE, value),
            msr::GS_BASE => self.set(fields::GUEST_GS_BASE, value),
            msr::SYSENTER_CS | msr::SYSENTER_ESP | msr::SYSENTER_EIP => {
                // An exit of L2 loads them anew where somebody has set one.
                self.cold.tables.touched();
                match index {
                    msr::SYSENTER_CS => self.set(fields::GUEST_SYSENTER_CS, value as u32),
                    msr::SYSENTER_ESP => self.set(fields::GUEST_SYSENTER_ESP, value),
                    _ => self.set(fields::GUEST_SYSENTER_EIP, value),
                }
            }
            _ => return self.set_nested_msr_value(index, value).map_err(|_| NotMine),
        }
        Ok(())
    }

    fn prediction_barrier(&mut self) {
        // Not kept: the command has no value.
        self.cpu.wrmsr(msr::PRED_CMD, 1);
    }

    fn host_cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.cpu.cpuid(leaf, subleaf)
    }

    /// VIRT_SPEC_CTRL is an MSR of AMD's.
    fn set_virt_ssbd(&mut self, _on: bool) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::Features;
    use backend::Permissions as _;
    use cpu::Model;
    use msr::debugctl::{BTF, LBR, RTM};

    #[test]
    fn debugging_of_transactions_is_kept_and_records_of_branches_are_not() {
        let mut vmx = Vmx::new(Model::default(), Features::default()).unwrap();
        vmx.set_msr(msr::DEBUGCTL, LBR | BTF | RTM).unwrap();
        assert_eq!(vmx.msr(msr::DEBUGCTL), Ok(RTM));
    }

    #[test]
    fn debugctl_is_read_without_an_exit_unless_a_filter_denies_it() {
        let mut vmx = Vmx::new(Model::default(), Features::default()).unwrap();
        let exits = |vmx: &Vmx<Model>| vmx.msr_map().intercepted(msr::DEBUGCTL);
        vmx.set_msr_filter(|_| Directions::empty());
        assert_eq!(exits(&vmx), Directions::WRITES);
        vmx.set_msr_filter(|index| Directions::READS.when(index == msr::DEBUGCTL));
        assert_eq!(exits(&vmx), Directions::all());
        vmx.set_msr_filter(|_| Directions::empty());
        assert_eq!(exits(&vmx), Directions::WRITES);
    }
}
