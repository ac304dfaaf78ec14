//! The loop's two ends: what of the host and of the guest VM entry and exit leave alone.
//!
//! Each register is written only where the two differ. What belongs to the thread is read once a
//! run, what belongs to the CPU once, when the vCPU arrives there.

use core::sync::atomic::Ordering::Relaxed;

use cpu::{Cpu, Selectors, VmxSwitch};
use host::hostcpu;
use x86::{
    msr,
    vmcs::{EntryControls, ExitReason},
};

use crate::{
    enter::{Vmx, attention},
    exits, fields, mitigations,
    percpu::PerCpu,
};

const CR4_VMXE: u64 = 1 << 13;

/// What of the host's state belongs to the thread that runs the vCPU, as it was when the run began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostThread {
    pub(crate) fs_base: u64,
    pub(crate) user_gs_base: u64,
    selectors: Selectors,
    ds: u16,
    es: u16,
}

impl<C: Cpu> Vmx<C> {
    /// A new KVM_RUN begins on this thread.
    pub(crate) fn new_run(&mut self) {
        let (ds, es) = self.cpu.data_selectors();
        *self.host = HostThread {
            fs_base: self.cpu.rdmsr(msr::FS_BASE),
            user_gs_base: self.cpu.rdmsr(msr::KERNEL_GS_BASE),
            selectors: self.cpu.selectors(),
            ds,
            es,
        };
    }

    /// The vCPU runs on a CPU where it did not run last.
    #[cold]
    #[inline(never)]
    fn arrive(&mut self, at: usize, here: &'static PerCpu) {
        self.vmcs.arrive(at, here);
        // What this vCPU left behind here may be older than a flush since.
        self.attention |= attention::FLUSH | attention::FLUSH_TDP;
        let host = here.constants();
        self.set(fields::HOST_CR0, self.cpu.cr0());
        self.set(fields::HOST_CS_SELECTOR, host.tables.cs);
        self.set(fields::HOST_SS_SELECTOR, host.tables.ss);
        self.set(fields::HOST_TR_SELECTOR, host.tables.tr);
        self.set(fields::HOST_TR_BASE, host.tables.task);
        self.set(fields::HOST_GDTR_BASE, host.tables.gdt);
        self.set(fields::HOST_IDTR_BASE, host.tables.idt);
        let gs_base = self.cpu.rdmsr(msr::GS_BASE);
        self.set(fields::HOST_GS_BASE, gs_base);
        self.set(fields::HOST_SYSENTER_CS, host.sysenter_cs as u32);
        self.set(fields::HOST_SYSENTER_ESP, host.sysenter_esp);
        self.set(fields::HOST_SYSENTER_EIP, host.sysenter_eip);
        self.set(fields::HOST_PAT, host.pat);
        self.set(fields::HOST_EFER, host.efer);
    }

    /// Takes what the loop needs of this physical CPU and loads the guest's state.
    pub(crate) fn load_state(&mut self, at: usize) {
        let here = self.vmcs.find(at);
        let cr4 = self.cpu.cr4_now();
        let Some(here) = here.filter(|_| cr4 & CR4_VMXE != 0) else {
            self.attention |= attention::OFF;
            return;
        };
        if !self.vmcs.has_host_of(at, here) {
            self.arrive(at, here);
        }
        if !self.vmcs.has_vpid_of(here) {
            self.attention |= attention::FLUSH;
        }
        // It was set for an entry that did not take place.
        self.attention &= !attention::TIMER_SET;
        if self.vmcs.make_current(&self.cpu, here) {
            self.write_constants();
        }
        self.switch.flags &= !VmxSwitch::LAUNCHED;
        if self.vmcs.launched.get() {
            self.switch.flags |= VmxSwitch::LAUNCHED;
        }
        // A process that has an LDT may change it under this thread.
        if hostcpu::uses_ldt() {
            self.host.selectors = self.cpu.selectors();
        }
        self.set(fields::HOST_CR4, cr4);
        self.set(fields::HOST_CR3, self.cpu.cr3());
        self.set(fields::HOST_FS_BASE, self.host.fs_base);
        self.vmcs.load(&self.cpu);
        if here.last_vcpu.load(Relaxed) != self.cold.id {
            here.last_vcpu.store(self.cold.id, Relaxed);
            if hostcpu::ibpb_on_switch() {
                self.cpu.wrmsr(msr::PRED_CMD, 1);
            }
        }
        if self.extended {
            self.load_extended();
        }
        if self.cold.debug.owned() {
            self.load_debug_regs();
        }
        self.sync_tsc_aux();
        self.sync_syscall();
        self.kernel_gs_base.enter(self.host.user_gs_base);
        self.kernel_gs_base.sync(&mut self.cpu);
        self.cold.host_debugctl = self.cpu.rdmsr(msr::DEBUGCTL);
        if self.features.spec_ctrl {
            self.switch.host_spec_ctrl = hostcpu::host_spec_ctrl();
        }
        self.stop_counters();
        self.cpu.set_cr2(self.cr2);
        if mitigations::flush_wanted() {
            self.attention |= attention::FLUSH_L1D;
        }
    }

    /// Counters of the host that are not to count a guest. Between two entries an NMI of perf's may start
    /// them again, so an entry loads the value itself where the CPU can.
    #[inline]
    fn stop_counters(&mut self) {
        let wanted = hostcpu::perf_enter();
        if wanted.is_some() || self.cold.perf_stopped {
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
    }

    /// Loads the host's state again and keeps the guest's: undoes [`Vmx::load_state`].
    pub(crate) fn unload_state(&mut self, to_user: bool) {
        if self.attention & attention::OFF != 0 {
            self.attention &= !attention::OFF;
            return;
        }
        self.know_for_outside();
        self.cr2 = self.cpu.cr2();
        self.vmcs.launched.set(self.switch.flags & VmxSwitch::LAUNCHED != 0);
        self.kernel_gs_base.read_back(&mut self.cpu);
        self.kernel_gs_base.leave(&mut self.cpu, self.host.user_gs_base);
        if self.cold.extended.is_loaded() {
            self.unload_extended();
        }
        if self.cold.debug.owned() {
            self.save_debug_regs();
        }
        if self.cold.perf_stopped {
            hostcpu::perf_leave();
        }
        self.vmcs.unload();
        // An exit leaves DR7 and DEBUGCTL disabled; a host that uses them gets them back.
        if self.cold.host_debugctl != 0 {
            self.cpu.wrmsr(msr::DEBUGCTL, self.cold.host_debugctl);
        }
        hostcpu::left_vmx();
        self.restore_selectors();
        if let Some(here) = self.vmcs.here() {
            here.user_return.left(&mut self.cpu, to_user);
            self.vmcs.give_up_unnoted(&self.cpu, here);
        }
    }

    /// Reads what the outer loop asks for after nearly every exit: outside, a read costs ten times as
    /// much.
    #[inline]
    fn know_for_outside(&self) {
        let reason = self.get(fields::EXIT_REASON);
        if reason == u32::from(ExitReason::EptViolation.0)
            && self.vmcs.fields.get(fields::GUEST_RIP).is_none()
        {
            // Memory, then, and not a device: the table is filled, and that is all.
            return;
        }
        let _ = self.get(fields::GUEST_RFLAGS);
        if reason == u32::from(ExitReason::Io.0) {
            let _ = self.get(fields::GUEST_RIP);
            let _ = self.get(fields::INSTRUCTION_LENGTH);
        } else if exits::may_be_inside_delivery(reason) {
            let _ = self.get(fields::IDT_VECTORING);
        }
    }

    /// User space's selectors, where it has any: a VM exit loads null ones, and clears LDTR.
    #[inline]
    fn restore_selectors(&mut self) {
        let HostThread { fs_base, user_gs_base, selectors: s, ds, es } = *self.host;
        if s.fs | s.gs | s.ldt | ds | es != 0 {
            self.load_host_selectors(fs_base, user_gs_base, ds, es);
        }
    }

    /// KERNEL_GS_BASE is user space's already, so that an NMI between the two SWAPGS around the load
    /// of GS finds nothing of the guest's.
    #[cold]
    #[inline(never)]
    fn load_host_selectors(&mut self, fs_base: u64, user_gs_base: u64, ds: u16, es: u16) {
        self.cpu.load_selectors(self.host.selectors);
        self.cpu.load_data_selectors(ds, es);
        self.cpu.wrmsr(msr::FS_BASE, fs_base);
        self.cpu.wrmsr(msr::KERNEL_GS_BASE, user_gs_base);
    }
}
