//! The host's registers that VM entry and exit leave alone, and those that an exit loads from the VMCS.
//!
//! Each register is written only where the two differ. What belongs to the thread is read once a
//! run, what belongs to the CPU once, when the vCPU arrives there.

use cpu::Cpu;
use host::hostcpu;
use x86::{msr, vmcs::EntryControls};

use crate::{
    fields,
    host_registers::HostThread,
    percpu::PerCpu,
    state::{Vmx, attention},
};

impl<C: Cpu> Vmx<C> {
    /// The vCPU comes to CPU `at` from another. What it left behind there may be older than a flush since: that
    /// was done where the vCPU was.
    ///
    /// This is owed by the vCPU, not by a VMCS. A VMCS may come back to the CPU on which it ran last while the vCPU
    /// was elsewhere with the other one.
    #[cold]
    #[inline(never)]
    pub(crate) fn forget_at(&mut self, at: usize) {
        self.cold.last_at = at;
        // The tag, not the translations: a fresh VPID has none, and costs no INVVPID of another CPU's.
        self.vmcs.drop_vpid();
        // All: which of them ran when the vCPU was here last is not known.
        if let Some(n) = &mut self.nested {
            n.drop_vpids();
        }
        // TDP translations, too: what was flushed where the vCPU was is still here.
        self.attention |= attention::FLUSH;
        self.flush_all_roots();
    }

    /// The VMCS runs on a CPU where it did not run last, or that was off meanwhile.
    #[cold]
    #[inline(never)]
    pub(crate) fn arrive(&mut self, at: usize, here: &'static PerCpu) {
        self.vmcs.arrive(at, here);
        // A CPU that was off may hold what is older than a flush since.
        self.attention |= attention::FLUSH | attention::FLUSH_TDP;
        let host = here.constants();
        // The kernel's CR0 is the same as long as the CPU is online.
        self.set(fields::HOST_CR0, self.cpu.cr0().bits());
        self.set(fields::HOST_CS_SELECTOR, host.tables.cs);
        self.set(fields::HOST_SS_SELECTOR, host.tables.ss);
        self.set(fields::HOST_TR_SELECTOR, host.tables.tr);
        self.set(fields::HOST_TR_BASE, host.tables.task);
        self.set(fields::HOST_GDTR_BASE, host.tables.gdt);
        self.set(fields::HOST_IDTR_BASE, host.tables.idt);
        // Constant as long as the CPU is online: per-CPU data.
        let gs_base = self.cpu.rdmsr(msr::GS_BASE);
        // Behind the selectors: an exit loads the base, and no descriptor.
        self.set(fields::HOST_GS_BASE, gs_base);
        self.set(fields::HOST_SYSENTER_CS, host.sysenter_cs as u32);
        self.set(fields::HOST_SYSENTER_ESP, host.sysenter_esp);
        self.set(fields::HOST_SYSENTER_EIP, host.sysenter_eip);
        // EFER and PAT of the host do not change while the CPU is online.
        self.set(fields::HOST_PAT, host.pat);
        self.set(fields::HOST_EFER, host.efer);
    }

    /// Counters of the host that are not to count a guest. Between two entries an NMI of perf's may start
    /// them again, so an entry loads the value itself where the CPU can.
    #[inline]
    pub(crate) fn stop_counters(&mut self) {
        // At each beginning of the loop: what perf counts may have changed.
        let wanted = hostcpu::perf_enter();
        if wanted.is_some() || self.cold.perf_stopped {
            // Also to switch it off again, once perf has nothing more to stop.
            self.load_counters(wanted);
        }
    }

    #[cold]
    #[inline(never)]
    fn load_counters(&mut self, wanted: Option<u64>) {
        self.cold.perf_stopped = wanted.is_some();
        let bit = EntryControls::LOAD_PERF_GLOBAL_CTRL;
        if !self.features.entry.may.contains(bit) {
            return;
        }
        if let Some(value) = wanted {
            self.set(fields::GUEST_PERF_GLOBAL_CTRL, value);
        }
        let controls = self.get(fields::ENTRY_CONTROLS) & !bit.bits();
        let load = if wanted.is_some() { bit.bits() } else { 0 };
        self.set(fields::ENTRY_CONTROLS, controls | load);
        // The level that does not run now may do so before the loop is left.
        let Some(n) = &self.nested else { return };
        // Another vmcs02 has the bit as it was when that was composed, and is entered in no loop but one that begins later.
        for vmcs in n.others() {
            // The value of this loop: it is loaded by whichever VMCS is entered.
            if let Some(value) = wanted {
                vmcs.set(&self.cpu, fields::GUEST_PERF_GLOBAL_CTRL, value);
            }
            // Where nothing is known of the other word it is composed before it is used.
            if let Some(word) = vmcs.fields.get(fields::ENTRY_CONTROLS) {
                vmcs.set(&self.cpu, fields::ENTRY_CONTROLS, word & !bit.bits() | load);
            }
        }
    }

    /// User space's selectors, where it has any: a VM exit loads null ones, and clears LDTR.
    #[inline]
    pub(crate) fn restore_selectors(&mut self) {
        let HostThread { fs_base, user_gs_base, selectors: s, ds, es } = *self.host;
        // A 64-bit process has null selectors: nothing is loaded for it.
        if s.fs | s.gs | s.ldt | ds | es != 0 {
            self.load_host_selectors(fs_base, user_gs_base, ds, es);
        }
    }

    /// KERNEL_GS_BASE is user space's already, so that an NMI between the two SWAPGS around the load
    /// of GS finds nothing of the guest's.
    #[cold]
    #[inline(never)]
    fn load_host_selectors(&mut self, fs_base: u64, user_gs_base: u64, ds: u16, es: u16) {
        // Before the bases: a selector's load overwrites FS_BASE.
        self.cpu.load_selectors(self.host.selectors);
        self.cpu.load_data_selectors(ds, es);
        // The thread's bases last: each load of a selector has overwritten one.
        self.cpu.wrmsr(msr::FS_BASE, fs_base);
        self.cpu.wrmsr(msr::KERNEL_GS_BASE, user_gs_base);
    }
}
