//! The two vendors' vCPUs, and what a hypervisor does on them.

use std::sync::{Arc, PoisonError, atomic::Ordering};

use backend::{Backend, Event, RAX, RCX};
use gannet_vcpu::{By, Vcpu};
use host::{KBox, page::Pages};
use mmu::Region;
use nested_vmx::{
    Vmcs12,
    saved::{HEADER, Header, IMAGE},
};
use svm::{Svm, inject as svm_inject};
use vm::VmRef;
use vmx::{Vmx, inject as vmx_inject};
use x86::{
    Cr0, Cr4, Efer, Rflags, Segment, msr,
    vmcb::{ExitCode, Intercept3, vintr},
    vmcs::{ExitReason, event, field, place::VMCS12_REVISION},
};
use zerocopy::FromBytes as _;

use crate::{
    blocks::{Svms, Vmxs},
    guest::{L2, Levels, Shared},
    hardware::{Block as _, Exit},
    levels::{Kind, Why},
    rig::{self, Cpu, Machine, nested, nested_vmx as vmx_nested, vmx as vmx_rig},
};

/// Where L1 begins.
pub const L1: u64 = 0x1000_0000;
/// An MSR that there is not, within what maps of MSRs tell of.
const NO_MSR: u64 = 0x1ff0;
/// Zeros: L1 asks for no MSR.
const MSR_MAP: u64 = 0x2_0000;
const VMXON: u64 = 0x6000;
const VMCS: u64 = 0x7000;

/// A vendor.
pub trait Vendor: Copy {
    type Backend: Backend;
    const KIND: Kind;
    /// Whether the CPU has virtual NMIs that L1 is not offered.
    fn vnmi(&self) -> bool;
    /// A vCPU without a local APIC of ours, alone in its VM, that has seen nothing.
    fn vcpu(&self, memory: &Pages) -> (KBox<Vcpu<Self::Backend>>, VmRef);
    /// L1 begins. `hears`: it asks for interrupts and NMIs.
    fn begin(&self, vcpu: &mut Vcpu<Self::Backend>, memory: &Pages, hears: bool);
    /// The CPU's next steps, so many, are the guest's.
    fn steps(vcpu: &mut Vcpu<Self::Backend>, guest: &Shared, steps: usize);
    /// Steps that were not played.
    fn steps_left(vcpu: &mut Vcpu<Self::Backend>) -> usize;
    /// What L1's block says of the last exit, and whether it says of an event that was not delivered.
    fn told(vcpu: &mut Vcpu<Self::Backend>, memory: &Pages) -> (Option<Why>, bool);
}

/// An AMD CPU.
#[derive(Clone, Copy, Debug)]
pub struct Amd {
    /// With virtual NMIs.
    pub vnmi: bool,
}

/// An Intel CPU.
#[derive(Clone, Copy, Debug)]
pub struct Intel;

fn put(memory: &Pages, at: u64, value: u64) {
    memory.words()[at as usize / 8].store(value, Ordering::Relaxed);
}

fn get(memory: &Pages, at: u64) -> u64 {
    memory.words()[at as usize / 8].load(Ordering::Relaxed)
}

fn add_memory(vm: &VmRef, memory: &Pages) {
    let region = Region { slot: 0, flags: 0, gpa: 0, size: 64 << 12, hva: memory.hpa().0 };
    vm.memory().set_region(&region, &***vm).unwrap();
}

/// The state as user space saves it.
pub fn state<B: Backend>(vcpu: &mut Vcpu<B>) -> Vec<u8> {
    let mut state = vec![0; vcpu.nested_state_size().unwrap()];
    vcpu.nested_state(&mut state).unwrap();
    state
}

impl Vendor for Amd {
    type Backend = Svm<Cpu>;
    const KIND: Kind = Kind::Svm;

    fn vnmi(&self) -> bool {
        self.vnmi
    }

    fn vcpu(&self, memory: &Pages) -> (KBox<Vcpu<Svm<Cpu>>>, VmRef) {
        let features = svm::Features { vnmi: self.vnmi, ..rig::features() };
        let machine = Machine { irqchip: false, nested: true, features, ..Machine::default() };
        let vm = rig::vm(&machine);
        add_memory(&vm, memory);
        let mut vcpu = rig::add_vcpu(&machine, &vm, 0);
        vcpu.write_msr(msr::VM_HSAVE_PA, nested::KEPT, By::Vmm).unwrap();
        (vcpu, vm)
    }

    fn begin(&self, vcpu: &mut Vcpu<Svm<Cpu>>, memory: &Pages, hears: bool) {
        let mut sregs = vcpu.sregs();
        (sregs.cr0, sregs.cr3) = (Cr0::from_bits_retain(0x8001_0033), nested::L1_ROOT);
        (sregs.cr4, sregs.efer) = (Cr4::PAE, Efer::LME | Efer::LMA | Efer::SVME);
        sregs.cs.attr = 0x29b;
        vcpu.set_sregs(&sregs, None).unwrap();
        let mut regs = vcpu.regs();
        (regs.rip, regs.rflags) = (L1, Rflags::FIXED);
        vcpu.set_regs(&regs);
        let asked = Intercept3::INTR | Intercept3::NMI;
        let (third, int_ctl) = if hears { (asked.bits(), vintr::INTR_MASKING) } else { (0, 0) };
        for (at, value) in [
            // The third word is the upper half; of the fourth VMRUN and VMMCALL.
            (0x08, u64::from(third) << 32),
            (0x10, 1 | 1 << 1),
            (0x58, 1),
            (0x60, int_ctl.into()),
            (0x410, 0xffff_ffff_0a9b_0010),
            (0x4d0, (Efer::LME | Efer::LMA | Efer::SVME).bits()),
            (0x548, Cr4::PAE.bits()),
            (0x550, 0x2000),
            (0x558, 0x8001_0033),
            (0x560, 0x400),
            (0x568, 0xffff_0ff0),
            (0x570, 2),
            (0x578, L2),
            (0x5d8, 0x3f00),
            (0x668, 0x0007_0406_0007_0406),
        ] {
            put(memory, nested::BLOCK + at, value);
        }
    }

    fn steps(vcpu: &mut Vcpu<Svm<Cpu>>, guest: &Shared, steps: usize) {
        for _ in 0..steps {
            let guest = Arc::clone(guest);
            vcpu.backend().cpu().inner().then(move |vmcb, gprs| {
                guest.lock().unwrap_or_else(PoisonError::into_inner).run(&mut Svms(vmcb, gprs));
            });
        }
    }

    fn steps_left(vcpu: &mut Vcpu<Svm<Cpu>>) -> usize {
        vcpu.backend().cpu().inner().steps_left()
    }

    fn told(_: &mut Vcpu<Svm<Cpu>>, memory: &Pages) -> (Option<Why>, bool) {
        let why = match ExitCode(get(memory, nested::BLOCK + 0x70)) {
            ExitCode::Intr => Some(Why::Interrupt),
            ExitCode::Nmi => Some(Why::Nmi),
            ExitCode::Vmmcall => Some(Why::Call),
            _ => None,
        };
        (why, get(memory, nested::BLOCK + 0x88) >> 31 & 1 != 0)
    }
}

fn vmcs12(hears: bool) -> Vmcs12 {
    let mut v = vmx_nested::vmcs12();
    v.set(field::GUEST_RIP, L2);
    v.set(field::GUEST_RFLAGS, 2);
    let asked = 1 | 1 << 3;
    let pin = v.get(field::PIN_CONTROLS) & !asked;
    v.set(field::PIN_CONTROLS, pin | if hears { asked } else { 0 });
    v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) | 1 << 28);
    v.set(field::MSR_BITMAP, MSR_MAP);
    v
}

impl Vendor for Intel {
    type Backend = Vmx<Cpu>;
    const KIND: Kind = Kind::Vmx;

    fn vnmi(&self) -> bool {
        false
    }

    fn vcpu(&self, memory: &Pages) -> (KBox<Vcpu<Vmx<Cpu>>>, VmRef) {
        // VMWRITEs exit, so that the steps here can make them.
        let features = vmx::Features { shadow_vmcs: false, ..vmx_nested::features() };
        let (mut vcpu, vm) = vmx_rig::vcpu_without_apic(features, vmx_nested::offered());
        add_memory(&vm, memory);
        vcpu.backend().cpu().inner().vmx.writes_read_only = true;
        (vcpu, vm)
    }

    fn begin(&self, vcpu: &mut Vcpu<Vmx<Cpu>>, memory: &Pages, hears: bool) {
        let mut sregs = vcpu.sregs();
        (sregs.cr0, sregs.cr3) = (Cr0::from_bits_retain(0x8005_0033), 0x1000);
        (sregs.cr4, sregs.efer) = (Cr4::PAE | Cr4::VMXE, Efer::LME | Efer::LMA | Efer::SCE);
        sregs.cs = Segment { base: 0, limit: u32::MAX, selector: 8, attr: 0xa9b };
        sregs.ss = Segment { base: 0, limit: u32::MAX, selector: 16, attr: 0xc93 };
        vcpu.set_sregs(&sregs, None).unwrap();
        let mut regs = vcpu.regs();
        (regs.rip, regs.rflags) = (L1, Rflags::FIXED);
        vcpu.set_regs(&regs);
        let header = Header {
            flags: 0,
            format: 0,
            size: (HEADER + IMAGE) as u32,
            vmxon_pa: VMXON,
            vmcs12_pa: VMCS,
            smm_flags: 0,
            pad: 0,
            vmx_flags: 0,
            preemption_timer_deadline: 0,
            reserved: [0; 11],
        };
        put(memory, VMXON, VMCS12_REVISION.into());
        put(memory, VMCS, VMCS12_REVISION.into());
        vcpu.set_nested_state(&vmx_nested::state_of(&header, &vmcs12(hears))).unwrap();
    }

    fn steps(vcpu: &mut Vcpu<Vmx<Cpu>>, guest: &Shared, steps: usize) {
        for _ in 0..steps {
            let guest = Arc::clone(guest);
            vcpu.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
                guest.lock().unwrap_or_else(PoisonError::into_inner).run(&mut Vmxs(vmcs, gprs));
            });
        }
    }

    fn steps_left(vcpu: &mut Vcpu<Vmx<Cpu>>) -> usize {
        vcpu.backend().cpu().inner().vmx.steps_left()
    }

    fn told(vcpu: &mut Vcpu<Vmx<Cpu>>, _: &Pages) -> (Option<Why>, bool) {
        let v = Vmcs12::read_from_prefix(&state(vcpu)[HEADER..]).unwrap().0;
        let why = match ExitReason::of(v.get(field::EXIT_REASON)) {
            ExitReason::ExternalInterrupt => Some(Why::Interrupt),
            ExitReason::ExceptionOrNmi => Some(Why::Nmi),
            ExitReason::Vmcall => Some(Why::Call),
            _ => None,
        };
        (why, v.get(field::IDT_VECTORING) & event::VALID != 0)
    }
}

fn svm_exit(b: &mut Svms<'_>, code: ExitCode) {
    rig::exit(code)(b.0, b.1);
}

impl Levels for Svms<'_> {
    const HOST_RIP: u64 = 0;
    const CPUID_IS_OURS: bool = true;
    const MOV_SS_KEEPS_OUT: bool = false;
    const HAS_GIF: bool = true;

    fn reads_no_msr(&mut self) {
        self.exit(Exit::Rdmsr);
        self.1.0[RCX] = NO_MSR;
    }
    fn enters(&mut self, _: bool) {
        svm_exit(self, ExitCode::Vmrun);
        (self.0.save.rax, self.1.0[RAX]) = (nested::BLOCK, nested::BLOCK);
    }
    fn calls(&mut self) {
        svm_exit(self, ExitCode::Vmmcall);
    }
    fn sets_gif(&mut self, on: bool) {
        svm_exit(self, if on { ExitCode::Stgi } else { ExitCode::Clgi });
    }
    fn prepares(&mut self, event: Event, memory: &Pages) -> bool {
        put(memory, nested::BLOCK + 0xa8, svm_inject::encode(event));
        false
    }
}

fn vmx_exit(b: &mut Vmxs<'_>, reason: ExitReason) {
    vmx_rig::exit(reason)(b.0, b.1);
}

impl Levels for Vmxs<'_> {
    const HOST_RIP: u64 = vmx_nested::L1_RIP;
    const CPUID_IS_OURS: bool = false;
    const MOV_SS_KEEPS_OUT: bool = true;
    const HAS_GIF: bool = false;

    fn reads_no_msr(&mut self) {
        self.exit(Exit::Rdmsr);
        self.1.0[RCX] = NO_MSR;
    }
    fn enters(&mut self, launched: bool) {
        vmx_exit(self, if launched { ExitReason::Vmresume } else { ExitReason::Vmlaunch });
    }
    fn calls(&mut self) {
        vmx_exit(self, ExitReason::Vmcall);
    }
    fn sets_gif(&mut self, _: bool) {
        panic!("VMX has no GIF");
    }
    /// VMWRITE, with the value in RAX and the encoding in RCX.
    fn prepares(&mut self, event: Event, _: &Pages) -> bool {
        vmx_exit(self, ExitReason::Vmwrite);
        self.0.set(field::INSTRUCTION_INFO, 1 << 10 | 1 << 28);
        let word = vmx_inject::encode(event, Cr0::PE);
        self.1.0[RAX] = word.into();
        self.1.0[RCX] = field::ENTRY_INTERRUPTION.encoding().into();
        true
    }
}
