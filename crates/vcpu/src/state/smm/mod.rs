//! System-management mode: SMIs, the way in, RSM, and what a VMM sees of it (APM vol. 2 §10).
//!
//! In the mode the vCPU sees the VM's other address space, in which a VMM has put SMRAM over what
//! lies there otherwise. Nothing asks on an exit whether the mode is on: the vCPU holds the
//! memory that it sees, and entry and RSM, which happen outside the inner loop, change it.

mod area;

use backend::{Backend, Gate, Nested, SegmentName, Waiting};
use cpuid::GuestCpuid;
use host::smp;
use mmu::AddressSpace;
use vm::vcpu_shared::{MpState, Request};
use x86::{
    Cr0, Cr4, Dr7, Efer, Exception, Gpa, Rflags,
    cpuid::feature,
    segment::{DescriptorTable, Segment, attr, kind},
};

use super::{debug::Debug, msrs::Msrs};
use crate::{
    Vcpu,
    nested::gate::gate_of,
    run::events::{Events, Outer},
    run::outcome::Outcome,
    run::user_exit::UserExit,
};
use area::Area;
pub(crate) use area::SavedCpu;

/// Where the handler begins, from SMBASE.
const HANDLER: u64 = 0x8000;

/// The order of [`SavedCpu::segments`].
const SEGMENTS: [SegmentName; 8] = [
    SegmentName::Es,
    SegmentName::Cs,
    SegmentName::Ss,
    SegmentName::Ds,
    SegmentName::Fs,
    SegmentName::Gs,
    SegmentName::Ldtr,
    SegmentName::Tr,
];

/// A segment in the handler: 4 GiB of data from 0 (APM vol. 2 §10.3.3). CS is of that type too, as
/// KVM has it.
const FLAT: Segment = Segment {
    base: 0,
    limit: u32::MAX,
    selector: 0,
    attr: attr::P | attr::S | attr::G | kind::DATA_RW_ACCESSED as u16,
};

/// What a vCPU knows of system-management mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Smm {
    /// The vCPU is in it.
    pub active: bool,
    /// NMIs were masked already when it was entered: RSM leaves them so.
    pub inside_nmi: bool,
    /// An SMI waits, or in the mode one for its end.
    pub pending: bool,
    /// An INIT waits: for the end of the mode, or until a guest that is a hypervisor lets it in.
    pub latched_init: bool,
}

/// Where the vCPU's state is saved while it is in the mode.
fn save_area(msrs: &Msrs) -> Gpa {
    Gpa(msrs.store.smbase().wrapping_add(area::OFFSET))
}

impl Smm {
    /// Has an SMI that waits be looked at before the next entry, but in the mode, and while a VMM's debugger holds it back.
    pub(crate) fn show_pending(&self, events: &mut Events, debug: &Debug) {
        let shown = self.pending && !self.active && !debug.blocks_events();
        events.outer.set(Outer::SMI, shown);
    }

    /// Whose memory the vCPU sees.
    #[inline]
    pub(crate) const fn space(&self) -> AddressSpace {
        AddressSpace::smm_if(self.active)
    }
}

/// The SMI part of KVM_GET_VCPU_EVENTS, neutral.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SavedSmi {
    pub smm: bool,
    pub pending: bool,
    pub inside_nmi: bool,
    pub latched_init: bool,
}

impl Events {
    /// An event goes into the guest before an SMI: has the vCPU leave the guest as soon as that is
    /// delivered. Interrupts are off. Inside the loop no kernel function may be called, and no SMI is seen: it leaves first.
    #[inline]
    pub(crate) fn hurry_smi(&self) {
        if self.outer.has(Outer::SMI) {
            leave_soon();
        }
    }
}

impl SavedCpu {
    /// Whether the control and debug registers are such as MOV would take.
    fn is_a_state(&self, b: &impl Backend, cpuid: &GuestCpuid) -> bool {
        let efer = self.efer.unwrap_or_else(|| b.control().efer) - Efer::LMA;
        let long = self.cr0.contains(Cr0::PG) && efer.contains(Efer::LME);
        let address = 1u64.checked_shl(cpuid.maxphyaddr().min(52).into()).unwrap_or(0);
        (self.dr6 | self.dr7 | self.cr0.bits()) >> 32 == 0
            && self.cr0.is_consistent()
            && self.cr3 < address
            && cpuid.cr4_allowed().contains(self.cr4)
            && (!long || self.cr4.contains(Cr4::PAE))
            && (long || !self.cr4.contains(Cr4::PCIDE))
            && cpuid.efer_allowed().contains(efer)
    }
}

impl<B: Backend> Vcpu<B> {
    /// Makes a system-management interrupt pending (KVM_SMI).
    pub fn queue_smi(&mut self) {
        self.shared.request(Request::Smi);
    }

    /// An SMI arrived. Those that arrive while one waits are one with it.
    pub(crate) fn smi_arrived(&mut self) {
        self.set_smi_pending(true);
        // It may end the run of a guest's guest.
        self.pending.raise_if(self.pending.gated);
    }

    fn set_smi_pending(&mut self, pending: bool) {
        self.smm.pending = pending;
        self.smm.show_pending(&mut self.events, &self.rare.debug);
    }

    /// Takes the SMI that waits, if the vCPU is between two instructions. Else what is on its way
    /// into the guest goes first, see [`Events::hurry_smi`].
    pub(crate) fn take_smi(&mut self) -> Outcome {
        let busy = self.b.injecting()
            || self.events.again.is_some()
            || self.events.exception.is_some()
            || self.pending.gated && gate_of(&self.b, Waiting::Smi) != Gate::Deliver
            // One that waits for a SIPI takes none; the SMI stays pending.
            || !matches!(self.shared.mp_state(), MpState::Runnable | MpState::Halted);
        if busy || !self.events.outer.has(Outer::SMI) {
            return Ok(());
        }
        // RSM goes on behind a HLT, as in KVM.
        self.shared.set_mp_state(MpState::Runnable);
        self.set_smi_pending(false);
        self.msrs.store.count_smi();
        match self.enter_smm() {
            Ok(()) => Ok(()),
            Err(NoSaveArea) => {
                self.vm.kill();
                Err(UserExit::Dead.into())
            }
        }
    }

    /// The vCPU sees the other memory from now on.
    fn set_smm(&mut self, active: bool) {
        self.smm.active = active;
        if !active {
            self.smm.inside_nmi = false;
        }
        self.mmu.memory = self.vm.memory_in(self.smm.space()).clone();
        self.memory_changed();
        self.b.flush_tlb();
        // A device's page may be SMRAM there, and the other way round.
        self.device.seen = Default::default();
        self.device.user_io.log.forget();
        self.pending.raise();
        if !active && core::mem::take(&mut self.smm.latched_init) {
            self.shared.set_init(true);
        }
        self.set_smi_pending(self.smm.pending);
    }

    /// Power-up, INIT and shutdown end the mode; what waited is gone.
    pub(crate) fn reset_smm(&mut self) {
        if self.smm.active {
            self.smm.latched_init = false;
            self.set_smm(false);
        }
        self.set_smi_pending(false);
    }

    /// Saves the state and begins the handler (APM vol. 2 §10.3).
    fn enter_smm(&mut self) -> Result<(), NoSaveArea> {
        // A step of ours towards an NMI is none of the guest's state.
        self.b.own_single_step();
        // L1's: what L2 has of its own goes into its saved state with it.
        let inside_nmi = self.b.nmi_masked_for_l1();
        self.set_smm_after_saving()?;
        self.smm.inside_nmi = self.b.nmi_masked_behind_l2(inside_nmi);
        // SMM begins with NMIs masked (APM vol. 2 §10.3.3). RSM goes by `inside_nmi`, which says what they were.
        self.b.set_nmi_masked(true);
        self.begin_handler();
        Ok(())
    }

    #[inline(never)]
    fn set_smm_after_saving(&mut self) -> Result<(), NoSaveArea> {
        let mut area = [0; area::SIZE];
        self.save_into(&mut area)?;
        // The registers are those of before; the area is SMRAM, which is seen in the mode alone.
        self.set_smm(true);
        self.mmu.memory.write(save_area(&self.msrs), &area).map_err(|_| NoSaveArea)
    }

    #[inline(never)]
    fn save_into(&mut self, area: &mut Area) -> Result<(), NoSaveArea> {
        let mut cpu = self.saved_cpu();
        self.rare.rip_of_smi = cpu.rip;
        let long = self.cpuid.has(feature::LM);
        if !long && self.has_l2_that_needs_the_area() {
            // The map without long mode has no place for where L1 describes L2. Stock KVM gives the VM up, too.
            return Err(NoSaveArea);
        }
        cpu.guest = self.put_l2_aside()?;
        if long {
            area::store64(&cpu, area);
        } else {
            area::store32(&cpu, area);
        }
        Ok(())
    }

    #[inline(never)]
    fn saved_cpu(&self) -> SavedCpu {
        let c = self.b.control();
        let [.., dr6, dr7] = self.debug_regs();
        SavedCpu {
            gpr: self.gprs.0,
            rip: self.b.rip(),
            rflags: self.rare.debug.rflags(&self.b),
            dr6,
            dr7,
            cr0: c.cr0,
            cr3: c.cr3,
            cr4: c.cr4,
            efer: Some(c.efer),
            smbase: self.msrs.store.smbase(),
            shadow: self.b.interrupt_shadow().then(|| self.b.shadow_by()),
            segments: SEGMENTS.map(|name| self.b.segment(name)),
            gdtr: self.b.gdtr(),
            idtr: self.b.idtr(),
            guest: None,
        }
    }

    /// The state in which a handler begins (APM vol. 2 §10.3.3).
    fn begin_handler(&mut self) {
        self.rare.debug.set_rflags(&mut self.b, Rflags::FIXED);
        self.b.set_rip(HANDLER);
        self.b.set_interrupt_shadow(false);
        // Behind MOV SS a watchpoint waits for the next instruction, which is the handler's first: it has no IDT. That of L2 is
        // kept with L2.
        self.b.put_debug_aside();
        let cr0 = self.b.control().cr0;
        self.b.set_cr0(cr0 - (Cr0::PE | Cr0::EM | Cr0::TS | Cr0::PG));
        self.b.set_cr4(Cr4::empty());
        if self.cpuid.has(feature::LM) {
            self.b.set_efer(Efer::empty());
        }
        self.b.set_idtr(DescriptorTable { base: 0, limit: 0 });
        let [a, b, c, d, dr6, _] = self.debug_regs();
        let regs = [a, b, c, d, dr6, Dr7::RESET.bits()];
        self.rare.debug.set_regs(&mut self.b, regs);
        let smbase = self.msrs.store.smbase();
        let cs = Segment { base: smbase, selector: (smbase >> 4) as u16, ..FLAT };
        for name in SEGMENTS.into_iter().take(6) {
            self.b.set_segment(name, if name == SegmentName::Cs { cs } else { FLAT });
        }
        self.control_changed();
    }

    /// CR0, CR3, CR4 and EFER were set.
    fn control_changed(&mut self) {
        self.b.flush_tlb();
        self.cpuid_inputs_changed();
        self.mmu.note_role(&self.b);
        self.pending.raise();
    }

    /// RSM: #UD outside the mode; else back to what the save area says, or into shutdown where that
    /// is no state of a CPU (APM vol. 2 §10.3.4, vol. 3 "RSM").
    pub(crate) fn resume_from_smm(&mut self) {
        if !self.smm.active {
            self.raise(Exception::ud());
            return;
        }
        if !self.resume_from_save_area() {
            self.events.outer.set(Outer::TRIPLE_FAULT, true);
        }
        self.pending.raise();
    }

    #[inline(never)]
    fn resume_from_save_area(&mut self) -> bool {
        // A guest that the handler has made itself ends with the handler: what follows is L1's, on its own block.
        self.abandon_l2();
        let mut area = [0; area::SIZE];
        if self.mmu.memory.read(save_area(&self.msrs), &mut area).is_err() {
            return false;
        }
        if !self.smm.inside_nmi {
            self.b.set_nmi_masked(false);
        }
        self.set_smm(false);
        self.restore_from(&area)
    }

    #[inline(never)]
    fn restore_from(&mut self, area: &Area) -> bool {
        let mut cpu = SavedCpu::default();
        if self.cpuid.has(feature::LM) {
            area::load64(area, &mut cpu);
        } else {
            area::load32(area, &mut cpu);
        }
        // Before an L2 is taken back, which has its own. That of the handler is gone with it, and so is one of an instruction
        // at which RSM does not go on: another state may have been given in the mode.
        if cpu.rip == self.rare.rip_of_smi {
            self.b.take_debug_back();
        } else {
            self.b.drop_pending_debug();
        }
        // The handler chooses all of it, and whoever else of the guest may write SMRAM.
        if !cpu.is_a_state(&self.b, &self.cpuid) || !self.take_l2_back(&cpu) {
            return false;
        }
        self.restore_cpu(&cpu);
        let loaded = self.reload_own_pdptes();
        if !loaded {
            // It is RSM that fails: the shutdown is L1's, no exit of L2's.
            self.abandon_l2();
        }
        loaded
    }

    fn restore_cpu(&mut self, cpu: &SavedCpu) {
        if self.cpuid.has(feature::LM) {
            self.gprs.0 = cpu.gpr;
        } else {
            for (to, from) in self.gprs.0.iter_mut().zip(cpu.gpr).take(8) {
                *to = from;
            }
        }
        let rflags = Rflags::from_bits_truncate(cpu.rflags.bits());
        self.rare.debug.set_rflags(&mut self.b, rflags | Rflags::FIXED);
        self.b.set_rip(cpu.rip);
        let [a, b, c, d, ..] = self.debug_regs();
        self.set_debug_regs([a, b, c, d, cpu.dr6, cpu.dr7]);
        self.msrs.store.set_smbase(cpu.smbase);
        if let Some(efer) = cpu.efer {
            let long = cpu.cr0.contains(Cr0::PG) && efer.contains(Efer::LME);
            // LMA is what PG and LME make of it, whatever the area says.
            let lma = if long { Efer::LMA } else { Efer::empty() };
            self.b.set_efer((efer - Efer::LMA) | lma);
        }
        self.b.set_cr0(Cr0::from_bits_truncate(cpu.cr0.bits()) | Cr0::ET);
        self.b.set_cr3(cpu.cr3);
        self.b.set_cr4(cpu.cr4);
        for (name, segment) in SEGMENTS.into_iter().zip(cpu.segments) {
            self.b.set_segment(name, segment);
        }
        self.b.set_gdtr(cpu.gdtr);
        self.b.set_idtr(cpu.idtr);
        // Behind RFLAGS, which say what STI's may be.
        match cpu.shadow {
            Some(by) => self.b.set_interrupt_shadow_by(by),
            None => self.b.set_interrupt_shadow(false),
        }
        self.control_changed();
        if self.rare.debug.single_step {
            self.events.outer.set(Outer::STEPPED, true);
        }
    }

    /// What KVM_GET_VCPU_EVENTS tells of system-management mode.
    pub(crate) fn saved_smi(&mut self) -> SavedSmi {
        if self.shared.take_request(Request::Smi) {
            self.smi_arrived();
        }
        SavedSmi {
            smm: self.smm.active,
            pending: self.smm.pending,
            inside_nmi: self.smm.inside_nmi,
            latched_init: self.shared.in_kernel_apic
                && (self.smm.latched_init || self.shared.has_init()),
        }
    }

    /// KVM_SET_VCPU_EVENTS with its SMM flag.
    pub fn restore_smi(&mut self, smi: &SavedSmi) {
        // An SMI that another vCPU has sent since the VMM asked for the state is none of that state: its request stays.
        if self.shared.in_kernel_apic {
            self.smm.latched_init = false;
            self.shared.set_init(smi.latched_init);
        }
        if self.smm.active != smi.smm {
            // Its memory would be another, and RSM would load L1's registers into it.
            self.leave_l2_with_its_registers();
            // What the mode puts aside is gone with it, as on stock KVM.
            self.end_vmx_operation();
            // Nothing pends, and nothing is aside.
            self.b.drop_pending_debug();
            self.b.put_debug_aside();
            self.set_smm(smi.smm);
        }
        // Outside of the mode nobody would clear it.
        self.smm.inside_nmi = smi.smm && smi.inside_nmi;
        self.set_smi_pending(smi.pending);
        self.pending.raise();
    }

    /// Whether a VMM may not ask for the wait for a SIPI: an INIT would be held back, or an SMI goes
    /// before it. L1 holds INIT back in VMX root operation, or with GIF clear. An L2 that cannot wait for one by
    /// itself runs, and not what a SIPI would start.
    pub fn holds_init_back(&mut self) -> bool {
        let smi = self.saved_smi();
        let by_l1 = if self.pending.after_exit.is_nested() {
            self.b.nested().is_some_and(|nested| nested.asleep().is_none())
        } else {
            gate_of(&self.b, Waiting::Init) == Gate::Hold
        };
        smi.smm || smi.pending || by_l1
    }
}

/// Has the next entry on this CPU end at once, by an IPI to itself.
#[cold]
#[inline(never)]
fn leave_soon() {
    smp::kick(smp::cpu_id());
}

/// The save area is not in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoSaveArea;
