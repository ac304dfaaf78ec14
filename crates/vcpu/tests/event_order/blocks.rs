//! The two vendors' blocks, and their vCPUs.

use std::sync::{Arc, PoisonError};

use backend::{Backend, Event, Gprs, ShadowBy};
use cpu::ModelVmcs;
use gannet_vcpu::Vcpu;
use host::KBox;
use svm::{Svm, inject as svm_inject};
use vm::VmRef;
use vmx::{Vmx, inject as vmx_inject};
use x86::{
    Cr0, Dr6, Rflags, Vector,
    vmcb::{self, ExitCode, Intercept3, Vmcb, vintr},
    vmcs::{ExitReason, ProcControls, field, interruptibility},
};

use crate::{
    hardware::{Block, Boundary, Exit, Shared},
    rig::{self, Cpu, Machine, vmx as vmx_rig},
};

/// A page that is memory, and may have to be mapped.
const PAGE: u64 = 0x5000;
/// An MSR that there is not.
const NO_MSR: u64 = 0xdead_beef;

/// A vendor.
pub trait Vendor {
    type Backend: Backend;
    /// An entry refuses the shadow of STI with RFLAGS.IF clear.
    const STI_NEEDS_FLAG: bool;
    /// A vCPU without a local APIC of ours, alone in its VM.
    fn vcpu(&self) -> (KBox<Vcpu<Self::Backend>>, VmRef);
    /// The CPU's next steps, so many, are the guest's.
    fn steps(vcpu: &mut Vcpu<Self::Backend>, guest: &Shared, steps: usize);
    /// Steps that were not played.
    fn steps_left(vcpu: &mut Vcpu<Self::Backend>) -> usize;
    /// Whether the place behind an instruction that user space gives is kept.
    fn returns_behind(&self) -> bool;
}

/// An AMD CPU.
#[derive(Clone, Copy)]
pub struct Amd {
    pub nrip_save: bool,
    /// With virtual NMIs.
    pub vnmi: bool,
}

/// An Intel CPU.
#[derive(Clone, Copy)]
pub struct Intel;

impl Vendor for Amd {
    type Backend = Svm<Cpu>;
    const STI_NEEDS_FLAG: bool = false;

    fn vcpu(&self) -> (KBox<Vcpu<Svm<Cpu>>>, VmRef) {
        let features =
            svm::Features { nrip_save: self.nrip_save, vnmi: self.vnmi, ..rig::features() };
        let machine = Machine { irqchip: false, features, ..Machine::default() };
        let vm = rig::vm(&machine);
        (rig::add_vcpu(&machine, &vm, 0), vm)
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

    fn returns_behind(&self) -> bool {
        self.nrip_save
    }
}

impl Vendor for Intel {
    type Backend = Vmx<Cpu>;
    const STI_NEEDS_FLAG: bool = true;

    fn vcpu(&self) -> (KBox<Vcpu<Vmx<Cpu>>>, VmRef) {
        vmx_rig::vcpu_without_apic(vmx_rig::features(), rig::offered(true))
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

    fn returns_behind(&self) -> bool {
        true
    }
}

/// AMD's.
pub struct Svms<'a>(pub &'a mut Vmcb, pub &'a mut Gprs);

impl Svms<'_> {
    fn has_virtual_nmis(&self) -> bool {
        self.0.control.int_ctl & vintr::NMI_ENABLE != 0
    }

    fn open(&self) -> bool {
        self.rflags().contains(Rflags::IF) && self.shadow().is_none()
    }
}

impl Block for Svms<'_> {
    const NMI_WAITS_BEHIND_STI: bool = false;

    fn injected(&self) -> Option<Event> {
        svm_inject::decode(self.0.control.event_inj)
    }
    fn rip(&self) -> u64 {
        self.0.save.rip
    }
    fn set_rip(&mut self, rip: u64) {
        self.0.save.rip = rip;
    }
    fn rflags(&self) -> Rflags {
        Rflags::from_bits_retain(self.0.save.rflags)
    }
    fn set_rflags(&mut self, rflags: Rflags) {
        self.0.save.rflags = rflags.bits();
    }
    fn shadow(&self) -> Option<ShadowBy> {
        (self.0.control.int_state & vmcb::INT_SHADOW != 0).then_some(ShadowBy::Unknown)
    }
    fn set_shadow(&mut self, by: Option<ShadowBy>) {
        let other = self.0.control.int_state & !vmcb::INT_SHADOW;
        self.0.control.int_state = other | by.map_or(0, |_| vmcb::INT_SHADOW);
    }
    fn iret_is_watched(&self) -> bool {
        !self.has_virtual_nmis()
    }
    fn nmi_masked(&self) -> Option<bool> {
        let masked = self.0.control.int_ctl & vintr::NMI_MASK != 0;
        self.has_virtual_nmis().then_some(masked)
    }
    fn set_nmi_masked(&mut self, on: bool) {
        if self.has_virtual_nmis() {
            let bit = if on { vintr::NMI_MASK } else { 0 };
            self.0.control.int_ctl = self.0.control.int_ctl & !vintr::NMI_MASK | bit;
        }
    }
    fn return_address(&self, event: Event) -> u64 {
        // EVENTINJ of INT n, INT3 and INTO pushes it (APM vol. 2 §15.20).
        match event {
            Event::Software(_) => self.0.control.next_rip,
            Event::Exception(e) if matches!(e.vector.0, 3 | 4) => self.0.control.next_rip,
            _ => self.0.save.rip,
        }
    }
    fn has_window(&self) -> bool {
        self.0.control.intercepts[3] & Intercept3::VINTR.bits() != 0
    }
    fn boundary(&mut self) -> Boundary {
        let control = &self.0.control;
        if control.int_ctl & vintr::IRQ == 0 || !self.open() {
            return Boundary::Nothing;
        }
        if control.intercepts[3] & Intercept3::VINTR.bits() != 0 {
            self.0.control.exit_code = ExitCode::Vintr.0;
            return Boundary::Exits;
        }
        let vector = Vector(control.int_vector as u8);
        self.0.control.int_ctl &= !vintr::IRQ;
        Boundary::Takes(Event::Interrupt(vector))
    }
    fn exits_at_iret(&mut self) -> bool {
        let exits = self.0.control.intercepts[3] & Intercept3::IRET.bits() != 0;
        if exits {
            self.0.control.exit_code = ExitCode::Iret.0;
        }
        exits
    }
    fn steps(&mut self) {
        self.0.save.dr6 |= Dr6::BS;
        self.0.control.exit_code = ExitCode::ExcpDb.0;
    }
    fn exit(&mut self, exit: Exit) {
        let Self(vmcb, gprs) = self;
        let control = &mut vmcb.control;
        (control.exit_info_1, control.next_rip) = (0, vmcb.save.rip + 2);
        let code = match exit {
            Exit::Cpuid => ExitCode::Cpuid.0,
            Exit::Rdmsr => {
                gprs.0[1] = NO_MSR;
                ExitCode::Msr.0
            }
            Exit::HostInterrupt => ExitCode::Intr.0,
            Exit::Page(during) => {
                (control.exit_info_1, control.exit_info_2) = (1 << 32 | 2, PAGE);
                control.next_rip = 0;
                control.exit_int_info = during.map_or(0, svm_inject::encode);
                ExitCode::Npf.0
            }
            Exit::Unknown => 0x3ff,
        };
        vmcb.control.exit_code = code;
    }
}

/// Intel's.
pub struct Vmxs<'a>(pub &'a mut ModelVmcs, pub &'a mut Gprs);

impl Vmxs<'_> {
    fn state(&self) -> u32 {
        self.0.get(field::GUEST_INTERRUPTIBILITY)
    }

    fn leave(&mut self, reason: ExitReason) {
        vmx_rig::exit(reason)(self.0, self.1);
    }
}

impl Block for Vmxs<'_> {
    const NMI_WAITS_BEHIND_STI: bool = true;

    fn injected(&self) -> Option<Event> {
        let info = self.0.get(field::ENTRY_INTERRUPTION);
        vmx_inject::decode(info, self.0.get(field::ENTRY_ERROR_CODE))
    }
    fn rip(&self) -> u64 {
        self.0.get(field::GUEST_RIP)
    }
    fn set_rip(&mut self, rip: u64) {
        self.0.set(field::GUEST_RIP, rip);
    }
    fn rflags(&self) -> Rflags {
        Rflags::from_bits_retain(self.0.get(field::GUEST_RFLAGS))
    }
    fn set_rflags(&mut self, rflags: Rflags) {
        self.0.set(field::GUEST_RFLAGS, rflags.bits());
    }
    fn shadow(&self) -> Option<ShadowBy> {
        let by = |bit, by| (self.state() & bit != 0).then_some(by);
        let sti = by(interruptibility::STI, ShadowBy::Sti);
        sti.or(by(interruptibility::MOV_SS, ShadowBy::MovSs))
    }
    fn set_shadow(&mut self, by: Option<ShadowBy>) {
        let bit = match by {
            None => 0,
            Some(ShadowBy::MovSs) => interruptibility::MOV_SS,
            Some(_) => interruptibility::STI,
        };
        let other = self.state() & !(interruptibility::STI | interruptibility::MOV_SS);
        self.0.set(field::GUEST_INTERRUPTIBILITY, other | bit);
    }
    fn iret_is_watched(&self) -> bool {
        false
    }
    fn nmi_masked(&self) -> Option<bool> {
        Some(self.state() & interruptibility::NMI != 0)
    }
    fn set_nmi_masked(&mut self, on: bool) {
        let bit = if on { interruptibility::NMI } else { 0 };
        self.0.set(field::GUEST_INTERRUPTIBILITY, self.state() & !interruptibility::NMI | bit);
    }
    fn return_address(&self, event: Event) -> u64 {
        let by_instruction = match event {
            Event::Software(_) => true,
            Event::Exception(e) => matches!(e.vector.0, 3 | 4),
            _ => false,
        };
        let length = u64::from(self.0.get(field::ENTRY_INSTRUCTION_LENGTH));
        self.rip() + if by_instruction { length } else { 0 }
    }
    fn has_window(&self) -> bool {
        let controls = ProcControls::from_bits_retain(self.0.get(field::PROC_CONTROLS));
        controls.intersects(ProcControls::NMI_WINDOW | ProcControls::INTERRUPT_WINDOW)
    }
    fn boundary(&mut self) -> Boundary {
        let controls = ProcControls::from_bits_retain(self.0.get(field::PROC_CONTROLS));
        let state = self.state();
        let nmi_open = state & (interruptibility::NMI | interruptibility::MOV_SS) == 0;
        let open = self.rflags().contains(Rflags::IF) && self.shadow().is_none();
        let reason = if controls.contains(ProcControls::NMI_WINDOW) && nmi_open {
            ExitReason::NmiWindow
        } else if controls.contains(ProcControls::INTERRUPT_WINDOW) && open {
            ExitReason::InterruptWindow
        } else {
            return Boundary::Nothing;
        };
        self.leave(reason);
        Boundary::Exits
    }
    fn exits_at_iret(&mut self) -> bool {
        false
    }
    fn steps(&mut self) {
        panic!("nobody steps the guest");
    }
    fn exit(&mut self, exit: Exit) {
        match exit {
            Exit::Cpuid => self.leave(ExitReason::Cpuid),
            Exit::Rdmsr => {
                self.1.0[1] = NO_MSR;
                self.leave(ExitReason::Rdmsr);
            }
            Exit::HostInterrupt => self.leave(ExitReason::ExternalInterrupt),
            Exit::Page(during) => {
                self.leave(ExitReason::EptViolation);
                self.0.set(field::GUEST_PHYSICAL_ADDRESS, PAGE);
                self.0.set(field::EXIT_QUALIFICATION, 2);
                let Some(during) = during else { return };
                let cr0 = Cr0::from_bits_retain(self.0.get(field::GUEST_CR0));
                self.0.set(field::IDT_VECTORING, vmx_inject::encode(during, cr0));
                if let Event::Exception(e) = during {
                    self.0.set(field::IDT_VECTORING_ERROR, e.error_code.unwrap_or(0));
                }
            }
            Exit::Unknown => self.leave(ExitReason(69)),
        }
    }
}
