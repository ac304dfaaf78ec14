//! A scripted CPU for tests: every VMRUN plays the next step of a script, which writes the exit
//! into the control block as the hardware would.

use crate::{Cpu, SpecCtrl};
use backend::Gprs;
use std::collections::{HashMap, VecDeque};
use x86::{Hpa, vmcb::Vmcb};

/// One step of a script: what the guest does until its next exit.
pub type Step = Box<dyn FnMut(&mut Vmcb, &mut Gprs) + Send>;

/// The scripted CPU.
#[derive(Default)]
pub struct Model {
    script: VecDeque<Step>,
    /// MSRs that hold a value.
    pub msrs: HashMap<u32, u64>,
    /// The time-stamp counter; every read advances it by one.
    pub tsc: u64,
    /// XCR0.
    pub xcr0: u64,
    /// Global interrupt flag.
    pub gif: bool,
    /// Where the last VMLOAD came from.
    pub loaded: Option<Hpa>,
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
}

impl Cpu for Model {
    fn rdmsr(&mut self, msr: u32) -> u64 {
        self.msrs.get(&msr).copied().unwrap_or(0)
    }
    fn wrmsr(&mut self, msr: u32, value: u64) {
        self.msrs.insert(msr, value);
    }
    fn cpuid(&mut self, _leaf: u32, _subleaf: u32) -> [u32; 4] {
        [0; 4]
    }
    fn rdtsc(&mut self) -> u64 {
        self.tsc += 1;
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
    fn debug_reg(&mut self, _n: u8) -> u64 {
        0
    }
    fn set_debug_reg(&mut self, _n: u8, _value: u64) {}
    fn cr4(&mut self) -> u64 {
        0
    }
    fn clgi(&mut self) {
        self.gif = false;
    }
    fn stgi(&mut self) {
        self.gif = true;
    }
    fn sti(&mut self) {}
    fn cli(&mut self) {}
    fn vmload(&mut self, state: Hpa) {
        self.loaded = Some(state);
    }
    fn vmsave(&mut self, _state: Hpa) {}
    fn vmrun(&mut self, vmcb: &mut Vmcb, _at: Hpa, gprs: &mut Gprs, _spec: SpecCtrl) {
        assert!(!self.gif, "VMRUN with GIF set");
        let mut step = self.script.pop_front().expect("the script has ended");
        vmcb.control.event_inj = 0;
        vmcb.control.exit_int_info = 0;
        step(vmcb, gprs);
    }
}
