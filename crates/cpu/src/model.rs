//! A scripted CPU for tests: every VMRUN plays the next step of a script, which writes the exit
//! into the control block as the hardware would.
//!
//! It keeps apart whose state is loaded where VMRUN leaves it alone: VMSAVE, VMLOAD, WRMSR and the
//! selector loads move it, and whatever lets the host's kernel run asserts that its own is there.

use crate::{Cpu, Selectors, SpecCtrl};
use backend::Gprs;
use std::collections::{HashMap, VecDeque};
use x86::{Hpa, vmcb::Vmcb};

/// One step of a script: what the guest does until its next exit.
pub type Step = Box<dyn FnMut(&mut Vmcb, &mut Gprs) + Send>;

const FS_BASE: u32 = 0xc000_0100;
const GS_BASE: u32 = 0xc000_0101;
const KERNEL_GS_BASE: u32 = 0xc000_0102;
/// The MSRs that VMSAVE and VMLOAD move.
const MOVED: [u32; 10] = [
    0xc000_0081,
    0xc000_0082,
    0xc000_0083,
    0xc000_0084,
    KERNEL_GS_BASE,
    FS_BASE,
    GS_BASE,
    0x174,
    0x175,
    0x176,
];
const TASK_STATE: u16 = 0x40;

/// The state that VMSAVE and VMLOAD move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    msrs: [u64; MOVED.len()],
    /// FS, GS, LDTR.
    pub selectors: Selectors,
    /// The selector in TR.
    pub task: u16,
}

impl Moved {
    /// Values that no one else has: `salt` tells them apart.
    fn made_up(salt: u64) -> Self {
        let n = salt as u16;
        Self {
            msrs: core::array::from_fn(|i| (salt << 8) | i as u64),
            selectors: Selectors { fs: n | 3, gs: n | 7, ldt: n & !7 },
            task: n & !7,
        }
    }

    fn slot(&mut self, msr: u32) -> Option<&mut u64> {
        let at = MOVED.iter().position(|m| *m == msr)?;
        self.msrs.get_mut(at)
    }
}

/// The scripted CPU.
pub struct Model {
    script: VecDeque<Step>,
    /// The event that the last VMRUN injected, as the control block has it; 0: none.
    pub injected: u64,
    /// MSRs that hold a value.
    pub msrs: HashMap<u32, u64>,
    /// The time-stamp counter.
    pub tsc: u64,
    /// Every read advances it by so much.
    pub tsc_step: u64,
    /// XCR0.
    pub xcr0: u64,
    /// DR0 to DR7.
    pub debug_regs: [u64; 8],
    /// Global interrupt flag.
    pub gif: bool,
    /// Where the last VMLOAD came from.
    pub loaded: Option<Hpa>,
    /// What is loaded of the state that VMSAVE and VMLOAD move.
    pub moved: Moved,
    /// What it is while the host runs.
    pub host: Moved,
    pages: HashMap<Hpa, Moved>,
    /// What CPUID answers: zeros, if not set.
    pub cpuid: Option<fn(u32, u32) -> [u32; 4]>,
    /// VMX.
    pub vmx: crate::model_vmx::VmxModel,
}

impl Default for Model {
    fn default() -> Self {
        let host = Moved { task: TASK_STATE, ..Moved::made_up(0xffff_8000) };
        Self {
            script: VecDeque::new(),
            injected: 0,
            msrs: HashMap::new(),
            tsc: 0,
            tsc_step: 1,
            xcr0: 0,
            debug_regs: [0, 0, 0, 0, 0, 0, 0xffff_0ff0, 0x400],
            gif: true,
            loaded: None,
            moved: host,
            host,
            pages: HashMap::new(),
            cpuid: None,
            vmx: Default::default(),
        }
    }
}

impl Model {
    /// Adds a step to the end of the script.
    pub fn then(&mut self, step: impl FnMut(&mut Vmcb, &mut Gprs) + Send + 'static) -> &mut Self {
        self.script.push_back(Box::new(step));
        self
    }

    /// Steps that were not played yet.
    pub fn steps_left(&self) -> usize {
        self.script.len()
    }

    /// The kernel can run: its per-CPU data and its stacks are found.
    fn assert_kernel_can_run(&mut self, what: &str) {
        let (mut host, mut now) = (self.host, self.moved);
        assert_eq!(now.slot(GS_BASE), host.slot(GS_BASE), "{what} with the guest's GS base");
        assert_eq!(now.task, host.task, "{what} with the guest's task register");
    }
}

impl Cpu for Model {
    fn rdmsr(&mut self, msr: u32) -> u64 {
        if let Some(value) = self.moved.slot(msr) {
            return *value;
        }
        self.msrs.get(&msr).copied().unwrap_or(0)
    }
    fn wrmsr(&mut self, msr: u32, value: u64) {
        match self.moved.slot(msr) {
            Some(slot) => *slot = value,
            None => {
                self.msrs.insert(msr, value);
            }
        }
    }
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.cpuid.map_or([0; 4], |cpuid| cpuid(leaf, subleaf))
    }
    fn rdtsc(&mut self) -> u64 {
        self.tsc += self.tsc_step;
        self.tsc
    }
    fn xcr0(&mut self) -> u64 {
        self.xcr0
    }
    fn set_xcr0(&mut self, value: u64) {
        self.xcr0 = value;
    }
    fn pkru(&mut self) -> u32 {
        0
    }
    fn set_pkru(&mut self, _value: u32) {}
    fn debug_reg(&mut self, n: u8) -> u64 {
        self.debug_regs.get(usize::from(n)).copied().unwrap_or(0)
    }
    fn set_debug_reg(&mut self, n: u8, value: u64) {
        if let Some(reg) = self.debug_regs.get_mut(usize::from(n)) {
            *reg = value;
        }
    }
    fn cr4(&mut self) -> u64 {
        0
    }
    fn clgi(&mut self) {
        self.gif = false;
    }
    fn stgi(&mut self) {
        self.assert_kernel_can_run("STGI");
        self.gif = true;
    }
    fn sti(&mut self) {}
    fn cli(&mut self) {}
    fn vmload(&mut self, state: Hpa) {
        self.loaded = Some(state);
        self.moved = self.pages.get(&state).copied().unwrap_or(Moved::made_up(state.0));
    }
    fn vmsave(&mut self, state: Hpa) {
        self.pages.insert(state, self.moved);
    }
    fn selectors(&mut self) -> Selectors {
        self.moved.selectors
    }
    fn load_selectors(&mut self, selectors: Selectors) {
        assert!(self.gif, "selectors loaded with GIF clear");
        self.assert_kernel_can_run("selectors loaded");
        // An NMI between the two SWAPGS around the load of GS would find this.
        let (mut host, mut now) = (self.host, self.moved);
        assert_eq!(now.slot(KERNEL_GS_BASE), host.slot(KERNEL_GS_BASE), "the guest's, swapped in");
        self.moved.selectors = selectors;
        // The bases of the descriptors.
        self.wrmsr(FS_BASE, 0);
        self.wrmsr(KERNEL_GS_BASE, 0);
    }
    fn load_task_register(&mut self) {
        let (mut host, mut now) = (self.host, self.moved);
        assert_eq!(now.slot(GS_BASE), host.slot(GS_BASE), "kernel code with the guest's GS base");
        self.moved.task = TASK_STATE;
    }
    fn vmrun(&mut self, vmcb: &mut Vmcb, _at: Hpa, gprs: &mut Gprs, _spec: SpecCtrl) {
        assert!(!self.gif, "VMRUN with GIF set");
        let mut step = self.script.pop_front().expect("the script has ended");
        self.injected = core::mem::take(&mut vmcb.control.event_inj);
        vmcb.control.exit_int_info = 0;
        step(vmcb, gprs);
    }
}
