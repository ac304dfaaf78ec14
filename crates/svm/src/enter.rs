//! The inner loop's two ends and the world switch between them.
//!
//! Host state goes by VMSAVE and VMLOAD: one VMSAVE of the host per run (not per exit), one VMLOAD
//! of it when the loop is left. While the loop runs, FS, GS, TR, LDTR and the SYSCALL and SYSENTER
//! MSRs stay the guest's, because between CLGI and STGI nothing of the host runs that would need
//! its own: an interrupt, NMI or machine check waits for STGI. So a handler inside the loop costs
//! no VMLOAD and no VMSAVE. Handlers that must call the kernel ask for
//! [`host_segments`](backend::Backend::host_segments) first.
//!
//! APM vol. 2 §15.5 (VMRUN), §15.5.2 (VMSAVE, VMLOAD), §15.17 (GIF).

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use backend::{Gprs, GuestLimits, Paging, TSC_RATIO_ONE};
use cpu::{Cpu, SpecCtrl};
use guest_live::{DebugRegs, Exchanged, Extended, Has};
use host::{NoMemory, hostcpu};
use x86::{
    msr,
    vmcb::{Clean, Vmcb},
};

use crate::{block::ControlBlock, features::Features, paging::GuestRegs};

/// One virtual CPU under SVM.
#[derive(Debug)]
pub struct Svm<C: Cpu> {
    pub(crate) block: ControlBlock,
    pub(crate) cpu: C,
    pub(crate) features: Features,
    /// Number of the current run; the host's save area is tagged with it.
    run: u64,
    runs: u32,
    id: u64,
    pub(crate) limits: GuestLimits,
    pub(crate) extended: Extended,
    pub(crate) debug: DebugRegs,
    pub(crate) tsc_aux: Exchanged<{ msr::TSC_AUX }>,
    pub(crate) spec_ctrl: u64,
    /// The guest asked for SSBD by VIRT_SPEC_CTRL; the kernel knows how this CPU does it.
    pub(crate) virt_ssbd: bool,
    pub(crate) tsc_ratio: u64,
    /// Between load and unload: what is written here goes to the hardware at once.
    pub(crate) loaded: bool,
    pub(crate) spec: SpecCtrl,
    pub(crate) nmi: crate::inject::NmiState,
    pub(crate) virq: crate::inject::Virq,
    /// CR8 is intercepted always.
    pub(crate) cr8_exits: bool,
    /// The hardware sees CR0.CD and CR0.NW, after all.
    pub(crate) shows_cache_disable: bool,
    /// CR0.CD and CR0.NW as the guest set them; the hardware sees them clear.
    pub(crate) cr0_hidden: u32,
    pub(crate) guest_debug: (bool, bool),
    pub(crate) paging: Paging,
    /// The paging registers under shadow paging.
    pub(crate) guest: GuestRegs,
}

static IDS: AtomicU64 = AtomicU64::new(1);

impl<C: Cpu> Svm<C> {
    /// A vCPU in its power-up state.
    #[inline(never)]
    pub fn new(cpu: C, features: Features) -> Result<Self, NoMemory> {
        let mut this = Self {
            block: ControlBlock::new()?,
            cpu,
            features,
            run: 0,
            runs: 0,
            id: IDS.fetch_add(1, Relaxed),
            limits: GuestLimits::default(),
            extended: Extended::new(
                Has { xsaves: features.xsaves, pku: features.pku },
                hostcpu::host_xss(),
            ),
            debug: DebugRegs::default(),
            tsc_aux: Exchanged::default(),
            spec_ctrl: 0,
            virt_ssbd: false,
            tsc_ratio: TSC_RATIO_ONE,
            loaded: false,
            spec: SpecCtrl::default(),
            nmi: crate::inject::NmiState::default(),
            virq: crate::inject::Virq::Off,
            cr8_exits: false,
            shows_cache_disable: false,
            cr0_hidden: 0,
            guest_debug: (false, false),
            paging: Paging::default(),
            guest: GuestRegs::default(),
        };
        this.init_control();
        Ok(this)
    }

    /// A new KVM_RUN begins: the host's state in the save area is not this thread's any more.
    pub(crate) fn new_run(&mut self) {
        self.runs = self.runs.wrapping_add(1);
        self.run = (self.id << 32) | u64::from(self.runs);
    }

    /// The VMCB.
    #[inline]
    pub fn vmcb(&self) -> &Vmcb {
        self.block.vmcb()
    }

    /// The VMCB, to be changed; `stale` names what the CPU must read anew.
    #[inline]
    pub(crate) fn vmcb_mut(&mut self, stale: Clean) -> &mut Vmcb {
        self.block.vmcb_mut(stale)
    }

    /// The privileged operations, for the counts in tests.
    pub fn cpu(&mut self) -> &mut C {
        &mut self.cpu
    }

    /// Takes what the loop needs of this physical CPU and loads the guest's state.
    pub(crate) fn load_state(&mut self, at: usize) {
        let Some(here) = self.block.arrive(at) else { return };
        if here.last_vcpu.load(Relaxed) != self.id {
            here.last_vcpu.store(self.id, Relaxed);
            // The CPU's VMCB cache is tagged by physical address, and another vCPU ran here.
            if hostcpu::ibpb_on_switch() {
                self.cpu.wrmsr(msr::PRED_CMD, 1);
            }
        }
        if self.virt_ssbd {
            hostcpu::guest_ssbd(true);
        }
        if self.features.xsave {
            self.load_extended();
        }
        self.loaded = true;
        if self.debug.owned() {
            self.load_debug_regs();
        }
        self.tsc_aux.enter(here.tsc_aux.load(Relaxed));
        self.sync_tsc_aux();
        if self.tsc_ratio != TSC_RATIO_ONE {
            self.cpu.wrmsr(msr::TSC_RATIO, self.tsc_ratio);
        }
        if !self.features.v_spec_ctrl && self.features.spec_ctrl {
            self.spec = SpecCtrl { guest: self.spec_ctrl, host: hostcpu::host_spec_ctrl() };
        }
        self.cpu.clgi();
        // A process that has an LDT may change it under this thread; then what was saved is stale.
        if here.saved_for.load(Relaxed) != self.run || hostcpu::uses_ldt() {
            here.saved_for.store(self.run, Relaxed);
            self.save_host(here);
        }
        self.cpu.vmload(self.block.hpa());
        // With GIF clear no interrupt is taken here; IF lets one end the guest's run.
        self.cpu.sti();
    }

    /// IBPB for the guest.
    pub(crate) fn barrier(&mut self) {
        self.cpu.wrmsr(msr::PRED_CMD, 1);
    }

    /// The reverse of [`Svm::load_state`].
    pub(crate) fn unload_state(&mut self) {
        let Some(here) = self.block.here() else { return };
        // For an entry that did not take place.
        self.disarm_step();
        self.cpu.cli();
        self.cpu.vmsave(self.block.hpa());
        self.restore_kernel(here);
        self.cpu.stgi();
        self.restore_user(here);
        if self.tsc_ratio != TSC_RATIO_ONE {
            self.cpu.wrmsr(msr::TSC_RATIO, TSC_RATIO_ONE);
        }
        self.loaded = false;
        self.tsc_aux.leave(&mut self.cpu, here.tsc_aux.load(Relaxed));
        if self.features.xsave {
            self.extended.unload(&mut self.cpu);
        }
        if self.debug.owned() {
            self.save_debug_regs();
        }
        // VMEXIT leaves DR7 disabled; a host with breakpoints gets them back.
        hostcpu::restore_debug_regs();
        if self.virt_ssbd {
            hostcpu::guest_ssbd(false);
        }
    }

    /// Loads the host's segment state inside the loop, for a handler that calls the kernel.
    pub(crate) fn host_segment_state(&mut self) {
        let Some(here) = self.block.here() else { return };
        self.cpu.cli();
        self.cpu.vmsave(self.block.hpa());
        self.restore_kernel(here);
    }

    /// Loads the guest's again.
    pub(crate) fn guest_segment_state(&mut self) {
        self.cpu.vmload(self.block.hpa());
        self.cpu.sti();
    }

    /// The world switch.
    #[inline]
    pub(crate) fn switch(&mut self, gprs: &mut Gprs) {
        self.block.enter(&mut self.cpu, gprs, self.spec, &self.features);
    }
}
