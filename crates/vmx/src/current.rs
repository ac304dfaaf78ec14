//! On which CPU a VMCS is active, and how it gets to another.
//!
//! A CPU may keep parts of a VMCS that was loaded there until it is told to write them back: VMCLEAR
//! on that CPU comes before VMPTRLD on another (SDM vol. 3C §25.11.1).

use cpu::Cpu;
use host::{irq, smp};
use x86::{
    Hpa,
    vmcs::{
        Field, ReadWrite,
        field::{self, Width},
    },
};

use crate::{
    enter::Vmx,
    percpu::{self, PerCpu},
};

const CR4_VMXE: u64 = 1 << 13;

/// Clears the VMCS at `vmcs` on the CPU this runs on, asked by the one that wants to have it.
extern "C" fn clear_here(vmcs: u64) {
    if let Some(here) = percpu::of(smp::cpu_id()) {
        here.clear(&cpu::Native, Hpa(vmcs));
    }
}

impl<C: Cpu> Vmx<C> {
    /// Reads a field outside the loop, where the task may be anywhere by now.
    #[cold]
    #[inline(never)]
    pub(crate) fn read_outside(&self, encoding: u32) -> u64 {
        if !self.initialised.get() {
            return 0;
        }
        loop {
            let off = irq::enabled().then(irq::disable);
            let here = percpu::of(smp::cpu_id()).filter(|_| self.is_settled(smp::cpu_id()));
            if let Some(here) = here {
                // With VMX off, on the way to a reboot, nothing can be read.
                let on = self.cpu.cr4_now() & CR4_VMXE != 0;
                if on {
                    self.make_current(here);
                }
                return if on { self.cpu.vmread(encoding) } else { 0 };
            }
            let Some(off) = off else { return 0 };
            irq::enable(off);
            self.clear_elsewhere();
        }
    }

    /// Whether the VMCS is active on CPU `here` or on none. Interrupts are off.
    #[inline]
    pub(crate) fn is_settled(&self, here: usize) -> bool {
        self.active_on.get().is_none_or(|at| at == here)
    }

    /// Has the CPU on which the VMCS is active clear it. Interrupts are on.
    #[cold]
    #[inline(never)]
    pub(crate) fn clear_elsewhere(&self) {
        if let Some(at) = self.active_on.take() {
            // One that went offline has cleared it then.
            smp::run_on(at, clear_here, self.vmcs.hpa().0);
        }
    }

    /// Makes the VMCS current on this CPU, on which it is active or may be.
    #[inline]
    pub(crate) fn make_current(&self, here: &PerCpu) {
        if !here.is_current(self.vmcs.hpa()) || self.active_in.get() != here.generation() {
            self.switch_vmcs(here);
        }
    }

    #[inline(never)]
    fn switch_vmcs(&self, here: &PerCpu) {
        let at = smp::cpu_id();
        let vmcs = self.vmcs.hpa();
        if self.active_on.get() != Some(at) || self.active_in.get() != here.generation() {
            if !self.initialised.get() {
                // What the page holds besides the revision is for the CPU to make.
                self.cpu.vmclear(vmcs);
            }
            self.launched.set(false);
            self.unnoted.set(!here.note_active(vmcs));
            self.active_on.set(Some(at));
            self.active_in.set(here.generation());
        }
        self.cpu.vmptrld(vmcs);
        here.set_current(vmcs);
        if !self.initialised.replace(true) {
            self.write_constants();
        }
    }

    fn write<W: Width>(&self, field: Field<W, ReadWrite>, value: W::Value) {
        self.cpu.vmwrite(field.encoding(), value.into());
    }

    /// The fields that have one value as long as the VMCS lives.
    fn write_constants(&self) {
        self.write(field::VMCS_LINK, u64::MAX);
        self.write(field::MSR_BITMAP, self.msr_map.hpa().0);
        self.write(field::VIRTUAL_APIC_ADDR, self.apic_page.hpa().0);
        self.write(field::PAGE_FAULT_MASK, 0);
        self.write(field::PAGE_FAULT_MATCH, 0);
        self.write(field::CR3_TARGET_COUNT, 0);
        self.write(field::EXIT_MSR_STORE_COUNT, 0);
        self.write(field::EXIT_MSR_LOAD_COUNT, 0);
        self.write(field::ENTRY_MSR_LOAD_COUNT, 0);
        self.write(field::GUEST_ACTIVITY, 0);
        self.write(field::HOST_RIP, self.cpu.vmx_exit_address());
        // The kernel runs with null selectors; what user space has is loaded when the loop is left.
        self.write(field::HOST_DS_SELECTOR, 0);
        self.write(field::HOST_ES_SELECTOR, 0);
        self.write(field::HOST_FS_SELECTOR, 0);
        self.write(field::HOST_GS_SELECTOR, 0);
        self.write_optional_constants();
    }
}
