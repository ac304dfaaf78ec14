//! One virtual CPU under SVM: what belongs to it and to none of its control blocks.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use backend::{
    Backend, GuestLimits, Injection, Level, Msrs, Nesting, Paging, TSC_RATIO_ONE, reset_registers,
};
use cpu::{Cpu, SpecCtrl};
use guest_live::{DebugRegs, Exchanged, Extended, Has};
use host::{KBox, NoMemory, hostcpu};
use nested_svm::{Offered, gif::Gif};
use x86::{
    Efer, Reset, Rflags, Vector, msr,
    vmcb::{Clean, Vmcb},
};

use crate::{
    block::ControlBlock,
    features::Features,
    guest_regs::GuestRegs,
    l2::{State, TscBelow},
    percpu::Saving,
};

/// What is known of the guest's NMI handling on CPUs without virtual NMIs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NmiState {
    /// An NMI is being handled; IRET is intercepted.
    pub masked: bool,
    /// The handler's IRET has begun at this RIP; the mask falls when it has retired.
    pub iret_at: Option<u64>,
    /// The single step of ours.
    pub step: Step,
}

/// A single step of ours over the guest's next instruction, behind which an NMI may be taken. It is armed
/// for one entry and over with the exit, whichever that is: nobody else sees its flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Step {
    /// There is none.
    #[default]
    Off,
    /// TF and RF are set. What the guest itself had set of them.
    Armed {
        /// The guest's TF.
        tf: bool,
        /// The guest's RF.
        rf: bool,
        /// The guest's DR6.BS, which no processor clears.
        bs: bool,
    },
    /// The exit was the #DB of the step, and of nothing else.
    Trapped,
}

/// What V_IRQ stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Virq {
    /// Nothing: it is clear.
    #[default]
    Off,
    /// An exit as soon as an interrupt can be taken.
    Window,
    /// This interrupt, to be taken without an exit.
    Offer(Vector),
}

/// What is looked at once in a run of the loop, or less. Apart, since a vCPU is moved by way of the stack once.
#[derive(Debug, Default)]
pub(crate) struct Cold {
    pub(crate) limits: GuestLimits,
    /// The upper halves of SYSENTER_ESP and SYSENTER_EIP, which the CPU drops.
    pub(crate) sysenter_high: [u64; 2],
    pub(crate) nmi: NmiState,
    /// What L1's processor offers it.
    pub(crate) offered: Offered,
    pub(crate) tsc: TscBelow,
    /// DS and ES of a thread that has descriptors of a local table there; null ones are in the CPU while the guest runs.
    pub(crate) data_selectors: (u16, u16),
    /// The host's DEBUGCTL, in whose place 0 is in the CPU while the guest runs.
    pub(crate) host_debugctl: u64,
}

/// One virtual CPU under SVM.
#[derive(Debug)]
pub struct Svm<C: Cpu> {
    pub(crate) block: ControlBlock,
    pub(crate) cpu: C,
    pub(crate) features: Features,
    /// Where and when the host's state of this run was saved last.
    pub(crate) saving: Saving,
    pub(crate) id: u64,
    pub(crate) extended: Extended,
    pub(crate) debug: DebugRegs,
    pub(crate) tsc_aux: Exchanged<{ msr::TSC_AUX }>,
    pub(crate) spec_ctrl: u64,
    /// The guest asked for SSBD by VIRT_SPEC_CTRL; the kernel knows how this CPU does it.
    pub(crate) virt_ssbd: bool,
    pub(crate) tsc_ratio: u64,
    /// The CPU scales the TSC of the level that runs.
    pub(crate) scales: bool,
    /// Between load and unload: what is written here goes to the hardware at once.
    pub(crate) loaded: bool,
    pub(crate) spec: SpecCtrl,
    pub(crate) virq: Virq,
    /// CR8 is intercepted always.
    pub(crate) cr8_exits: bool,
    /// The hardware sees CR0.CD and CR0.NW, after all.
    pub(crate) shows_cache_disable: bool,
    /// CR0.CD and CR0.NW as the guest set them; the hardware sees them clear.
    pub(crate) cr0_hidden: u32,
    pub(crate) paging: Paging,
    /// The paging registers under shadow paging.
    pub(crate) guest: GuestRegs,
    /// The bits of EFER that the guest sees as they are: all but SVME, unless it has set that.
    pub(crate) efer_shown: u64,
    /// Added to the host's TSC for L1.
    pub(crate) tsc_offset: u64,
    /// A level's records of branches or its TSC ratio go over, or change, with the level, or an IRET waits to retire.
    pub(crate) carries: bool,
    /// Whose the block is.
    pub(crate) level: Level,
    pub(crate) cold: KBox<Cold>,
    /// L1's global interrupt flag.
    pub(crate) gif: Gif,
    /// What is known of L1's guest, from its first VMRUN on.
    pub(crate) nested: Option<KBox<State>>,
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
            saving: Saving::NONE,
            // From 1, and never used twice: a CPU that remembers a vCPU which is gone takes no new
            // one for it.
            id: IDS.fetch_add(1, Relaxed),
            extended: Extended::new(
                Has { xsaves: features.xsaves, pku: features.pku },
                hostcpu::host_xss(),
            ),
            debug: DebugRegs::default(),
            tsc_aux: Exchanged::default(),
            spec_ctrl: 0,
            virt_ssbd: false,
            tsc_ratio: TSC_RATIO_ONE,
            scales: false,
            loaded: false,
            spec: SpecCtrl::default(),
            virq: Virq::Off,
            cr8_exits: false,
            shows_cache_disable: false,
            cr0_hidden: 0,
            paging: Paging::default(),
            guest: GuestRegs::default(),
            efer_shown: !Efer::SVME.bits(),
            tsc_offset: 0,
            carries: features.lbr,
            level: Level::L1,
            cold: KBox::new(Cold::default())?,
            gif: Gif::default(),
            nested: None,
        };
        this.init_control();
        Ok(this)
    }

    /// The VMCB that runs, L1's or L2's.
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
}

impl<C: Cpu> Nesting for Svm<C> {
    type Nested = Self;

    #[inline(always)]
    fn nested(&self) -> Option<&Self> {
        Some(self)
    }

    #[inline(always)]
    fn nested_mut(&mut self) -> Option<&mut Self> {
        Some(self)
    }
}

impl<C: Cpu> Backend for Svm<C> {
    fn reset(&mut self, reset: Reset) {
        // A reset CPU has it set (APM vol. 2 §15.17).
        self.gif.set();
        // By the setters: what exits follows from these registers.
        reset_registers(self, reset);
        let block = self.vmcb_mut(Clean::ALL);
        block.save.rip = 0xfff0;
        block.save.rflags = Rflags::RESET.bits();
        block.save.rsp = 0;
        // Its own field, which follows SS only where that is loaded.
        block.save.cpl = 0;
        block.control.int_state = 0;
        // What was to be injected died with the state it was for.
        block.control.event_inj = 0;
        // INIT leaves these as they are (APM vol. 2 table 14-1).
        if reset == Reset::PowerUp {
            block.save.sysenter_cs = 0;
            block.save.sysenter_esp = 0;
            block.save.sysenter_eip = 0;
            // x87 alone, which XCR0 always has (SDM vol. 1 §13.3).
            self.extended.set_xcr0(1);
            self.extended.set_xss(0);
        }
        // As in stock KVM by INIT, too.
        let _ = self.set_msr(msr::SPEC_CTRL, 0);
        self.set_virq(Virq::Off);
        // An INIT ends the handling of an NMI.
        self.set_nmi_masked(false);
        self.block.request_flush();
    }
}
