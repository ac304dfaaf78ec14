//! A scripted CPU for tests: every VMRUN plays the next step of a script, which writes the exit
//! into the control block as the hardware would.
//!
//! It keeps apart whose state is loaded where VMRUN leaves it alone: VMSAVE, VMLOAD, WRMSR and the
//! selector loads move it, and whatever lets the host's kernel run asserts that its own is there.
//!
//! It refuses every operand that a real CPU would fault on ([`crate::legal`]): a test that merely comes
//! past such a write ends there.

pub mod vmx;

use crate::{
    Cpu, Selectors, SpecCtrl,
    legal::{self, Limits, demand},
};
use backend::Gprs;
use std::collections::{HashMap, VecDeque};
use x86::{
    Cr4, Efer, Hpa,
    msr::{
        CSTAR, EFER, FS_BASE, GS_BASE, KERNEL_GS_BASE, LSTAR, STAR, SYSCALL_MASK, SYSENTER_CS,
        SYSENTER_EIP, SYSENTER_ESP,
    },
    vmcb::{Vmcb, event},
};

/// One step of a script: what the guest does until its next exit.
pub type Step = Box<dyn FnMut(&mut Vmcb, &mut Gprs) + Send>;

/// The MSRs that VMSAVE and VMLOAD move.
const MOVED: [u32; 10] = [
    STAR,
    LSTAR,
    CSTAR,
    SYSCALL_MASK,
    KERNEL_GS_BASE,
    FS_BASE,
    GS_BASE,
    SYSENTER_CS,
    SYSENTER_ESP,
    SYSENTER_EIP,
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
            msrs: core::array::from_fn(|i| {
                let value = (salt << 8) | i as u64;
                if MOVED[i] == SYSCALL_MASK { value & 0xffff_ffff } else { value }
            }),
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
    played: usize,
    /// What an entry is to inject, by the number of its step.
    to_inject: Vec<(usize, u64)>,
    /// The event that the last VMRUN injected, as the control block has it; 0: none.
    pub injected: u64,
    /// TSC_RATIO of each VMRUN.
    pub ratios: Vec<u64>,
    /// MSRs that hold a value.
    pub msrs: HashMap<u32, u64>,
    /// The time-stamp counter.
    pub tsc: u64,
    /// Every read advances it by so much.
    pub tsc_step: u64,
    /// XCR0.
    pub xcr0: u64,
    /// PKRU.
    pub pkru: u32,
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
    /// Entries in a row that each ended in the delivery of an event, in one stay of interrupts off.
    held_off: u32,
    /// By control block: what the CPU keeps of it.
    kept: HashMap<Hpa, legal::Kept>,
    /// By ASID: the control block under which its translations were made.
    asids: HashMap<u32, Hpa>,
    /// What of operands this CPU takes.
    pub limits: Limits,
    /// VMX.
    pub vmx: vmx::VmxModel,
}

impl Default for Model {
    fn default() -> Self {
        let host = Moved { task: TASK_STATE, ..Moved::made_up(0xffff_8000) };
        Self {
            script: VecDeque::new(),
            played: 0,
            to_inject: Vec::new(),
            injected: 0,
            ratios: Vec::new(),
            msrs: HashMap::new(),
            tsc: 0,
            tsc_step: 1,
            xcr0: 0,
            pkru: 0,
            debug_regs: [0, 0, 0, 0, 0, 0, 0xffff_0ff0, 0x400],
            gif: true,
            loaded: None,
            moved: host,
            host,
            pages: HashMap::new(),
            cpuid: None,
            held_off: 0,
            kept: HashMap::new(),
            asids: HashMap::new(),
            limits: Limits::default(),
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

    /// The entry that plays the next step to be added injects this, in EVENTINJ's format.
    pub fn injects(&mut self, event: u64) -> &mut Self {
        self.to_inject.push((self.played + self.script.len(), event));
        self
    }

    /// Steps that were not played yet.
    pub fn steps_left(&self) -> usize {
        self.script.len()
    }

    /// An entry has ended, inside the delivery of an event or not. A pending interrupt of the host ends a
    /// guest's run at the boundary of an instruction: where the guest reaches none, the loop has to
    /// be left now and then.
    pub(crate) fn entry_ended(&mut self, in_delivery: bool) {
        const MOST: u32 = 64;
        self.held_off = if in_delivery { self.held_off + 1 } else { 0 };
        assert!(self.held_off <= MOST, "interrupted deliveries without end hold off the host");
    }

    /// The host takes its interrupts.
    fn interrupts_taken(&mut self) {
        self.held_off = 0;
    }

    /// What SYSCALL of the guest's leads to is not the host's.
    fn demand_own_syscall(&mut self, efer: u64) {
        let (mut host, mut now) = (self.host, self.moved);
        if let (Some(now), Some(host)) = (now.slot(LSTAR), host.slot(LSTAR)) {
            demand(format_args!("entry"), legal::syscall(efer, *now, *host));
        }
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
        demand(format_args!("RDMSR {msr:#x}"), legal::rdmsr(msr));
        if msr == x86::msr::DEBUGCTL {
            // Read where VMX's loop begins, and nowhere else.
            self.interrupts_taken();
        }
        if let Some(value) = self.moved.slot(msr) {
            return *value;
        }
        self.msrs.get(&msr).copied().unwrap_or(0)
    }
    fn wrmsr(&mut self, msr: u32, value: u64) {
        let legal = legal::wrmsr(msr, value, &self.limits);
        demand(format_args!("WRMSR {msr:#x} of {value:#x}"), legal);
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
        demand(format_args!("XSETBV of {value:#x}"), legal::xcr0(value, &self.limits));
        self.xcr0 = value;
    }
    fn pkru(&mut self) -> u32 {
        self.pkru
    }
    fn set_pkru(&mut self, value: u32) {
        self.pkru = value;
    }
    fn debug_reg(&mut self, n: u8) -> u64 {
        demand(format_args!("MOV from DR{n}"), legal::debug_register(n, 0));
        self.debug_regs.get(usize::from(n)).copied().unwrap_or(0)
    }
    fn set_debug_reg(&mut self, n: u8, value: u64) {
        demand(format_args!("MOV of {value:#x} to DR{n}"), legal::debug_register(n, value));
        if let Some(reg) = self.debug_regs.get_mut(usize::from(n)) {
            *reg = value;
        }
    }
    fn cr4(&mut self) -> Cr4 {
        Cr4::empty()
    }
    fn svm_on(&mut self) -> bool {
        let efer = self.msrs.entry(EFER).or_default();
        let free = *efer & Efer::SVME.bits() == 0;
        *efer |= Efer::SVME.bits();
        free
    }
    fn svm_off(&mut self) {
        assert!(self.gif, "SVM is switched off with GIF clear");
        *self.msrs.entry(EFER).or_default() &= !Efer::SVME.bits();
    }
    fn clgi(&mut self) {
        self.gif = false;
    }
    fn stgi(&mut self) {
        self.assert_kernel_can_run("STGI");
        self.gif = true;
        self.interrupts_taken();
    }
    fn sti(&mut self) {
        assert!(!self.gif, "STI with GIF set: the host's interrupts would come");
    }
    fn cli(&mut self) {}
    fn vmload(&mut self, state: Hpa) {
        demand(format_args!("VMLOAD {:#x}", state.0), legal::page(state, &self.limits));
        self.loaded = Some(state);
        self.moved = self.pages.get(&state).copied().unwrap_or(Moved::made_up(state.0));
    }
    fn vmsave(&mut self, state: Hpa) {
        demand(format_args!("VMSAVE {:#x}", state.0), legal::page(state, &self.limits));
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
    fn vmrun(&mut self, vmcb: &mut Vmcb, at: Hpa, gprs: &mut Gprs, spec: SpecCtrl) {
        assert!(!self.gif, "VMRUN with GIF set");
        demand(format_args!("VMRUN {:#x}", at.0), legal::page(at, &self.limits));
        demand(format_args!("VMRUN"), legal::vmrun(vmcb));
        // An exit reads these descriptors again, with the guest's LDTR.
        let local = (self.vmx.data.0 | self.vmx.data.1) & 4 != 0;
        assert!(!local || self.vmx.data_is_null, "DS or ES of a local table");
        // Without virtualized records it is not exchanged.
        let debugctl = self.msrs.get(&x86::msr::DEBUGCTL).copied().unwrap_or(0);
        assert!(
            debugctl == 0 || vmcb.control.virt_ext & 1 != 0,
            "the guest runs with the host's DEBUGCTL"
        );
        self.demand_own_syscall(vmcb.save.efer);
        if let Some(kept) = self.kept.remove(&at) {
            demand(format_args!("VMRUN {:#x}", at.0), kept.vmrun(vmcb));
        }
        for value in [spec.guest, spec.host] {
            let legal = legal::wrmsr(x86::msr::SPEC_CTRL, value, &self.limits);
            demand(format_args!("SPEC_CTRL of {value:#x}"), legal);
        }
        let mut step = self.script.pop_front().expect("the script has ended");
        self.ratios.push(self.msrs.get(&x86::msr::TSC_RATIO).copied().unwrap_or(1 << 32));
        // Without the valid bit it is nothing, whatever is left of an earlier one.
        let word = vmcb.control.event_inj;
        self.injected = if word & event::VALID != 0 { word } else { 0 };
        for (_, event) in self.to_inject.iter().filter(|(step, _)| *step == self.played) {
            assert_eq!(self.injected, *event, "the injected event");
        }
        self.played += 1;
        vmcb.control.exit_int_info = 0;
        let (asid, command) = (vmcb.control.asid, vmcb.control.tlb_ctl);
        step(vmcb, gprs);
        // An entry that is refused executes no command, makes no translations and takes no event (APM vol. 3, VMRUN).
        if vmcb.control.exit_code as u32 != u32::MAX {
            vmcb.control.event_inj &= !event::VALID;
            match command {
                1 => self.asids.clear(),
                3 => drop(self.asids.remove(&asid)),
                _ => {}
            }
            self.kept.insert(at, legal::Kept::of(vmcb));
            let owner = *self.asids.entry(asid).or_insert(at);
            assert_eq!(owner, at, "entry with ASID {asid}, which has another block's translations");
        }
        self.entry_ended(vmcb.control.exit_int_info & event::VALID != 0);
    }
}
