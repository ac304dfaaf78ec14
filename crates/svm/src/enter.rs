//! The inner loop's two ends and its turns: into the guest, and what the guest was left for.
//!
//! Host state goes by VMSAVE and VMLOAD: one VMSAVE of the host per run (not per exit), one VMLOAD
//! of it when the loop is left. While the loop runs, FS, GS, TR, LDTR and the SYSCALL and SYSENTER
//! MSRs stay the guest's, because between CLGI and STGI nothing of the host runs that would need
//! its own: an interrupt, NMI or machine check waits for STGI. So a handler inside the loop costs
//! no VMLOAD and no VMSAVE. Handlers that must call the kernel ask for
//! [`host_segments`](WorldSwitch::host_segments) first.
//!
//! APM vol. 2 §15.5 (VMRUN), §15.5.2 (VMSAVE, VMLOAD), §15.17 (GIF).

use core::sync::atomic::Ordering::Relaxed;

use backend::{Answer, Exit, Exits, Gprs, Onward, TSC_RATIO_ONE, Turn, WorldSwitch};
use cpu::{Cpu, SpecCtrl};
use host::{hostcpu, irq};
use x86::{
    msr,
    vmcb::{Clean, ExitCode},
};

use crate::{
    exits,
    host_state::HostState,
    percpu::{PerCpu, Saving},
    state::Svm,
};

impl<C: Cpu> Svm<C> {
    /// Takes user space's DS and ES of a local table out of the registers, which the kernel leaves alone.
    #[cold]
    #[inline(never)]
    fn empty_data_selectors(&mut self) {
        const LOCAL: u16 = 1 << 2;
        let (ds, es) = self.cpu.data_selectors();
        if (ds | es) & LOCAL != 0 {
            self.cold.data_selectors = (ds, es);
            self.cpu.load_data_selectors(0, 0);
        }
    }
}

impl<C: Cpu> WorldSwitch for Svm<C> {
    /// A VMCB is memory: what a CPU may hold of it, another does not need.
    #[inline(always)]
    fn may_run_on(&self, _here: usize) -> bool {
        true
    }

    /// No CPU holds it.
    #[inline(always)]
    fn release_elsewhere(&mut self) {}

    /// The host's state in the save area is not this thread's any more.
    fn begin_run(&mut self) {
        self.saving = Saving::NONE;
    }

    fn load(&mut self, at: usize) {
        let Some(here) = self.block.arrive(at).filter(|here| !here.is_absent()) else {
            // The entry goes the rare way, and does not take place.
            return self.block.request_flush();
        };
        // Another guest may have trained the predictors that this one's branches would use.
        if here.last_vcpu.load(Relaxed) != self.id {
            here.last_vcpu.store(self.id, Relaxed);
            // The CPU's VMCB cache is tagged by physical address, and another vCPU ran here.
            if hostcpu::ibpb_on_switch() {
                self.cpu.wrmsr(msr::PRED_CMD, 1);
                hostcpu::refill_return_stack();
            }
        }
        // A kernel call, so before the segments are the guest's, and with RCU watching.
        if self.virt_ssbd {
            irq::guest_paused(|| hostcpu::guest_ssbd(true));
        }
        if self.features.xsave {
            self.load_extended();
        }
        self.loaded = true;
        if self.debug.owned() {
            self.load_debug_regs();
        }
        // The CPU's own value is kept per CPU: the kernel writes it once, so that no RDMSR is
        // needed here.
        self.tsc_aux.enter(here.tsc_aux.load(Relaxed));
        self.sync_tsc_aux();
        // Most guests run at the host's rate, and the MSR stays as it is.
        if self.scales {
            self.cpu.wrmsr(msr::TSC_RATIO, self.cold.tsc.ratio_here);
        }
        // VMRUN exchanges DEBUGCTL for a guest that records branches alone (APM vol. 2 §15.23): any other would step from branch
        // to branch, or trap at a bus lock, as the host does.
        let debugctl = hostcpu::host_debugctl();
        if debugctl != 0 {
            self.cold.host_debugctl = debugctl;
            self.cpu.wrmsr(msr::DEBUGCTL, 0);
        }
        if !self.features.v_spec_ctrl && self.features.spec_ctrl {
            self.spec = SpecCtrl { guest: self.spec_ctrl, host: hostcpu::host_spec_ctrl() };
        }
        // An exit reads them again from the tables that are there then, which are the guest's (APM vol. 2 §15.5.1): they have to be
        // of the GDT.
        let has_ldt = hostcpu::uses_ldt();
        if has_ldt {
            self.empty_data_selectors();
        }
        // From here to STGI no NMI comes, which would need the host's GS base and TR.
        self.cpu.clgi();
        // A process that has an LDT may change it under this thread; then what was saved is stale.
        if self.saving != here.last_saving(at) || has_ldt {
            self.saving = here.next_saving(at);
            self.save_host(here);
        }
        // Behind the host's VMSAVE: from here on these registers are the guest's.
        self.cpu.vmload(self.block.hpa());
        // With GIF clear no interrupt is taken here; IF lets one end the guest's run.
        self.cpu.sti();
    }

    /// Nothing to do: all registers come with the exit.
    #[inline(always)]
    fn complete(&mut self, _gprs: &mut Gprs) {}

    fn unload(&mut self, _: Onward) {
        // What was not loaded has changed nothing, and interrupts are still off.
        let Some(here) = self.block.here().filter(|_| self.loaded) else { return };
        // For an entry that did not take place.
        self.disarm_step();
        // STGI would have a pending interrupt taken here. The caller takes it, once the mode says that the guest was
        // left.
        self.cpu.cli();
        // What the guest has changed of these registers without an exit.
        self.cpu.vmsave(self.block.hpa());
        match self.features.host_state {
            HostState::Vmsave => {
                // Before STGI: the NMI that may wait needs TR and GS base.
                self.cpu.vmload(here.host_save());
                self.cpu.stgi();
            }
            HostState::Msr => {
                here.registers.restore_kernel(&mut self.cpu);
                self.cpu.stgi();
                here.registers.restore_user(&mut self.cpu);
            }
        }
        if self.scales {
            self.cpu.wrmsr(msr::TSC_RATIO, TSC_RATIO_ONE);
        }
        // Behind VMSAVE: what changes now goes to the block, and the next load takes it from there.
        self.loaded = false;
        self.tsc_aux.leave(&mut self.cpu, here.tsc_aux.load(Relaxed));
        if self.features.xsave {
            self.extended.unload(&mut self.cpu);
        }
        // Before the host's are loaded over them.
        if self.debug.owned() {
            self.save_debug_regs();
        }
        // VMEXIT leaves DR7 disabled; a host with breakpoints gets them back.
        hostcpu::restore_debug_regs();
        if self.cold.data_selectors != (0, 0) {
            let (ds, es) = core::mem::take(&mut self.cold.data_selectors);
            self.cpu.load_data_selectors(ds, es);
        }
        if self.cold.host_debugctl != 0 {
            let debugctl = core::mem::take(&mut self.cold.host_debugctl);
            self.cpu.wrmsr(msr::DEBUGCTL, debugctl);
        }
        if self.virt_ssbd {
            irq::guest_paused(|| hostcpu::guest_ssbd(false));
        }
    }

    fn host_segments(&mut self) {
        let Some(here) = self.block.here() else { return };
        // IF is set in the loop, and kernel code would believe that interrupts are on.
        self.cpu.cli();
        self.cpu.vmsave(self.block.hpa());
        match self.features.host_state {
            HostState::Vmsave => self.cpu.vmload(here.host_save()),
            HostState::Msr => here.registers.restore_kernel(&mut self.cpu),
        }
    }

    fn guest_segments(&mut self) {
        self.cpu.vmload(self.block.hpa());
        self.cpu.sti();
    }
}

impl<C: Cpu> Turn for Svm<C> {
    #[inline]
    fn enter(&mut self, gprs: &mut Gprs) {
        // One look for both: a flush that is owed, and an ASID of an older generation.
        if self.block.wants_flush() {
            return self.enter_flushing(gprs);
        }
        self.block.enter(&mut self.cpu, gprs, self.spec);
    }

    #[inline(always)]
    fn dispatch<S: Copy, A: Answer<Self, S>>(answer: &mut A, section: S) -> Option<A::Left> {
        let code = answer.backend().raw();
        match code {
            ExitCode::Intr => answer.frequent(section, Exit::Interrupt),
            ExitCode::Cpuid => answer.frequent(section, Exit::Cpuid),
            // Two exits with one code: each gets a place of its own.
            ExitCode::Msr if answer.backend().vmcb().control.exit_info_1 & 1 == 0 => {
                answer.frequent(section, Exit::Rdmsr)
            }
            ExitCode::Msr => answer.frequent(section, Exit::Wrmsr),
            ExitCode::Npf => {
                let exit = exits::npf(&answer.backend().vmcb().control);
                answer.frequent(section, exit)
            }
            ExitCode::Ioio => {
                let exit = exits::io(&answer.backend().vmcb().control);
                answer.frequent(section, exit)
            }
            ExitCode::Hlt => answer.frequent(section, Exit::Hlt),
            ExitCode::Vmmcall => answer.frequent(section, Exit::Hypercall),
            // With shadow paging these are most exits.
            ExitCode::ExcpPf => {
                let exit = exits::page_fault(&answer.backend().vmcb().control);
                answer.frequent(section, exit)
            }
            // Control registers have the lowest codes: one comparison for all of them.
            _ if code.0 <= exits::LAST_OF_CR || code == ExitCode::Cr0SelWrite => {
                let exit = exits::cr_access(answer.backend());
                answer.frequent(section, exit)
            }
            _ => {
                let exit = answer.backend().exit();
                answer.rare(section, exit)
            }
        }
    }

    #[inline]
    fn next_rip(&self) -> Option<u64> {
        // Without it the instruction's length is found by its bytes.
        self.features.nrip_save.then_some(self.vmcb().control.next_rip)
    }

    #[inline]
    fn retire(&mut self, next_rip: u64) {
        let block = self.vmcb_mut(Clean::empty());
        block.save.rip = next_rip;
        // The instruction has retired, and its shadow with it.
        block.control.int_state = 0;
    }
}

impl<C: Cpu> Svm<C> {
    /// Saves the host's registers, before the guest's are loaded.
    #[inline]
    pub(crate) fn save_host(&mut self, here: &PerCpu) {
        let by_msr = self.features.host_state == HostState::Msr;
        here.registers.hold_it.store(by_msr, Relaxed);
        match self.features.host_state {
            HostState::Vmsave => self.cpu.vmsave(here.host_save()),
            HostState::Msr => here.registers.save(&mut self.cpu),
        }
    }
}
