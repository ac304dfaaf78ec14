//! The vCPU's state as a VMM reads and writes it between runs: registers, events, extended state.
//!
//! Everything is checked before anything is set.

use backend::{Backend, Event, SegmentName, ShadowBy};
use msr::By;
use x86::{
    Cr0, Cr4, Efer, Exception, Rflags, Vector,
    segment::{DescriptorTable, Segment},
};

use vm::vcpu_shared::{MpState, Request, VcpuShared};

use crate::{
    Vcpu,
    exits::code::CodeState as _,
    nested::{events::tell_activity, paging::probe_of_l2, transition::is_virtualization_on},
    run::{
        events::{Events, Outer},
        given::Given,
    },
    state::smm::SavedSmi,
};

/// A value that this vCPU cannot have; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalid;

/// General registers, RIP and RFLAGS, as KVM_GET_REGS gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Regs {
    /// In encoding order: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub gpr: [u64; 16],
    /// RIP.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: Rflags,
}

/// Segments and system registers, as KVM_GET_SREGS gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Sregs {
    pub cs: Segment,
    pub ds: Segment,
    pub es: Segment,
    pub fs: Segment,
    pub gs: Segment,
    pub ss: Segment,
    pub tr: Segment,
    pub ldt: Segment,
    pub gdt: DescriptorTable,
    pub idt: DescriptorTable,
    pub cr0: Cr0,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: Cr4,
    pub cr8: u64,
    pub efer: Efer,
    pub apic_base: u64,
    /// The four entries at the top of PAE paging, where the backend has them as registers; `None` to
    /// have them loaded from memory.
    pub pdptes: Option<[u64; 4]>,
}

/// What waits for the guest, as KVM_GET_VCPU_EVENTS tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SavedEvents {
    pub exception: Option<Exception>,
    pub exception_injected: bool,
    pub interrupt: Option<Vector>,
    pub interrupt_soft: bool,
    pub interrupt_shadow: bool,
    pub shadow_by: ShadowBy,
    pub nmi_injected: bool,
    pub nmi_pending: u32,
    pub nmi_masked: bool,
    pub sipi_vector: u32,
    pub triple_fault: bool,
    pub smi: SavedSmi,
}

/// Which of those fields of [`SavedEvents`] KVM_SET_VCPU_EVENTS gives that it may leave out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // Named as the fields.
pub struct GivenEvents {
    pub interrupt_shadow: bool,
    pub nmi_pending: bool,
    pub triple_fault: bool,
}

const SEGMENTS: [SegmentName; 8] = [
    SegmentName::Cs,
    SegmentName::Ds,
    SegmentName::Es,
    SegmentName::Fs,
    SegmentName::Gs,
    SegmentName::Ss,
    SegmentName::Tr,
    SegmentName::Ldtr,
];

impl Sregs {
    fn segments(&self) -> [Segment; 8] {
        [self.cs, self.ds, self.es, self.fs, self.gs, self.ss, self.tr, self.ldt]
    }

    /// Whether the control registers fit each other (KVM API §4.12 says EINVAL where not).
    fn is_valid(&self, cr4_allowed: Cr4, maxphyaddr: u8) -> bool {
        let Self { cr0, cr4, efer, .. } = *self;
        if efer.contains(Efer::LME) && cr0.contains(Cr0::PG) {
            let reserved = u64::MAX.checked_shl(maxphyaddr.min(52).into()).unwrap_or(0);
            if !cr4.contains(Cr4::PAE) || !efer.is_long() || self.cr3 & reserved != 0 {
                return false;
            }
        } else if efer.is_long() || self.cs.is_long() {
            return false;
        }
        cr4_allowed.contains(cr4) && cr0.bits() & Cr0::HIGH == 0 && cr0.is_consistent()
    }
}

impl Events {
    /// The interrupt that the VMM gave, where no local APIC of ours has to take it first.
    fn own_external(&self, shared: &VcpuShared) -> Option<Vector> {
        if shared.in_kernel_apic { None } else { self.external }
    }

    /// Forgets the interrupt of a VMM with its own PIC, where no local APIC of ours has to take it first.
    fn forget_interrupt(&mut self, shared: &VcpuShared) {
        if !shared.in_kernel_apic {
            self.external = None;
            if matches!(self.again, Some(Event::Interrupt(_) | Event::Software(_))) {
                self.again = None;
            }
        }
    }
}

impl<B: Backend> Vcpu<B> {
    /// Reads the general registers (KVM_GET_REGS).
    pub fn regs(&self) -> Regs {
        Regs { gpr: self.gprs.0, rip: self.b.rip(), rflags: self.rare.debug.rflags(&self.b) }
    }

    /// KVM_SET_REGS. Drops a pending exception, as an instruction that jumps away would.
    pub fn set_regs(&mut self, regs: &Regs) {
        // A VMM may write back what it has read while it serves an access: the access goes on. One
        // that jumps away abandons it.
        if regs.rip != self.b.rip() {
            self.device.user_io.forget();
        }
        self.gprs.0 = regs.gpr;
        self.b.set_rip(regs.rip);
        // A trap of before. That of an L2 came with its state, which VMMs set first.
        if !self.pending.after_exit.is_nested() {
            self.b.drop_pending_debug();
        }
        self.rare.debug.set_rflags(&mut self.b, regs.rflags | Rflags::FIXED);
        // It was a fault of the instruction that RIP has left.
        self.events.exception = None;
        self.pending.raise();
    }

    /// Reads segments and system registers (KVM_GET_SREGS).
    pub fn sregs(&self) -> Sregs {
        let s = |n| self.b.segment(n);
        let c = self.b.control();
        Sregs {
            cs: s(SegmentName::Cs),
            ds: s(SegmentName::Ds),
            es: s(SegmentName::Es),
            fs: s(SegmentName::Fs),
            gs: s(SegmentName::Gs),
            ss: s(SegmentName::Ss),
            tr: s(SegmentName::Tr),
            ldt: s(SegmentName::Ldtr),
            gdt: self.b.gdtr(),
            idt: self.b.idtr(),
            cr0: c.cr0,
            cr2: c.cr2,
            cr3: c.cr3,
            cr4: c.cr4,
            cr8: self.priority_shown().into(),
            efer: c.efer,
            apic_base: self.shared.lapic.base(),
            pdptes: self.mmu.own_pdptes(&self.b),
        }
    }

    /// KVM_SET_SREGS. `interrupt`: a vector that a VMM with its own PIC has pending.
    pub fn set_sregs(&mut self, s: &Sregs, interrupt: Option<Vector>) -> Result<(), Invalid> {
        // A VMM gives LMA as it has read it. Whether it fits the other registers is checked below.
        let efer_allowed = self.cpuid.efer_allowed() | Efer::LMA;
        if !s.is_valid(self.cpuid.cr4_allowed(), self.cpuid.maxphyaddr())
            || !efer_allowed.contains(s.efer)
        {
            return Err(Invalid);
        }
        // The last that can be refused.
        if s.apic_base != self.shared.lapic.base() {
            self.set_apic_base(s.apic_base, By::Vmm).map_err(|_| Invalid)?;
        }
        // Before any register is set: those of the level that runs are.
        if !is_virtualization_on(&self.b, s.efer, s.cr4) {
            self.abandon_l2_for_user();
        }
        self.put_sregs(s);
        if let Some(vector) = interrupt {
            self.put_back_interrupt(vector);
        }
        // A bootstrap processor in real mode at the reset vector has just been reset
        // (older VMMs tell no MP state).
        if self.shared.lapic.base() & irqchip::lapic::base::BSP != 0
            && self.b.rip() == 0xfff0
            && (s.cs.selector, s.cs.base) == (0xf000, 0xffff_0000)
            && !s.cr0.contains(Cr0::PE)
        {
            self.set_mp_state(MpState::Runnable);
        }
        self.pending.raise();
        Ok(())
    }

    /// Sets the registers, which were found good; but for the APIC base.
    pub(crate) fn put_sregs(&mut self, s: &Sregs) {
        // The VMM has set registers meanwhile, and gives the entries or has them loaded by these.
        self.rare.pdptes_due = false;
        for (name, value) in SEGMENTS.into_iter().zip(s.segments()) {
            self.b.set_segment(name, value);
        }
        // An SS that is not usable still carries the CPL.
        self.b.set_gdtr(s.gdt);
        self.b.set_idtr(s.idt);
        self.b.set_efer(s.efer);
        self.follow_gate();
        self.b.set_cr0(s.cr0);
        self.b.set_cr2(s.cr2);
        self.b.set_cr3(s.cr3);
        self.b.set_cr4(s.cr4);
        self.cpuid_inputs_changed();
        // Stock KVM leaves the priority as it is if it is given none.
        if s.cr8 <= 15 {
            self.set_priority_shown(s.cr8 as u8);
        }
        self.b.flush_tlb();
        self.mmu.note_role(&self.b);
        // Behind all registers: roots and PDPTEs follow from them together.
        self.registers_replaced();
        // Behind the registers, which have loaded them from memory.
        if let Some(entries) = s.pdptes {
            self.give_pdptes(entries);
        }
    }

    /// The interrupt that is being injected, for KVM_GET_SREGS' bitmap.
    pub fn interrupt_in_injection(&self) -> Option<Vector> {
        match self.events.again {
            Some(Event::Interrupt(vector)) => Some(vector),
            _ => self.events.own_external(&self.shared),
        }
    }

    /// Collects what waits for the guest (KVM_GET_VCPU_EVENTS).
    pub fn saved_events(&mut self) -> SavedEvents {
        let (exception, exception_injected) = match (self.events.again, self.events.exception) {
            (Some(Event::Exception(e)), _) => (Some(e), true),
            (_, e) => (e, false),
        };
        let (interrupt, interrupt_soft) = match self.events.again {
            Some(Event::Interrupt(v)) => (Some(v), false),
            Some(Event::Software(v)) => (Some(v), true),
            _ => (self.events.own_external(&self.shared), false),
        };
        SavedEvents {
            exception,
            exception_injected,
            interrupt,
            interrupt_soft,
            interrupt_shadow: self.b.interrupt_shadow(),
            shadow_by: self.b.shadow_by(),
            nmi_injected: self.events.again == Some(Event::Nmi),
            nmi_pending: self.shared.nmis(),
            nmi_masked: self.b.nmi_masked_for_l1(),
            sipi_vector: 0,
            triple_fault: self.events.outer.has(Outer::TRIPLE_FAULT),
            smi: self.saved_smi(),
        }
    }

    /// KVM_SET_VCPU_EVENTS. What is not `given` stays as it is.
    pub fn restore_events(&mut self, e: &SavedEvents, given: GivenEvents) {
        // One of KVM_INTERRUPT's that waits is told of as one that is injected: given back, it is the one that waits. So is one that is told of
        // beside what is injected, for one is injected at a time.
        let is_own = !self.shared.in_kernel_apic && !e.interrupt_soft;
        let waited = !matches!(self.events.again, Some(Event::Interrupt(_) | Event::Software(_)))
            && self.events.own_external(&self.shared) == e.interrupt;
        let beside = e.exception.is_some() && e.exception_injected || e.nmi_injected;
        let waits = is_own && (waited || beside);
        // What waited belongs to the state that is replaced.
        self.events.again = None;
        self.events.exception = None;
        if !self.shared.in_kernel_apic {
            self.events.external = if waits { e.interrupt } else { None };
        }
        match e.exception {
            Some(x) if e.exception_injected => self.events.again = Some(Event::Exception(x)),
            x => self.events.exception = x,
        }
        // One is injected at a time: an exception goes first, then an NMI.
        if e.nmi_injected && self.events.again.is_none() {
            self.events.again = Some(Event::Nmi);
        }
        if let Some(vector) = e.interrupt
            && self.events.again.is_none()
            && !waits
        {
            let event =
                if e.interrupt_soft { Event::Software(vector) } else { Event::Interrupt(vector) };
            self.events.again = Some(event);
        }
        self.rare.given = Given {
            again: self.events.again.is_some(),
            exception: self.events.exception.is_some(),
            all: true,
        };
        self.b.set_nmi_masked_for_l1(e.nmi_masked);
        if given.nmi_pending {
            self.shared.set_nmis(e.nmi_pending);
        }
        // One that stays is set again: a #DB that goes leaves a step pending, without which no CPU enters a guest that
        // steps in a shadow.
        let shadow = match given.interrupt_shadow {
            true => Some((e.interrupt_shadow, e.shadow_by)),
            false => self.b.interrupt_shadow().then(|| (true, self.b.shadow_by())),
        };
        match shadow {
            Some((true, by)) => self.b.set_interrupt_shadow_by(by),
            Some((false, _)) => self.b.set_interrupt_shadow(false),
            None => {}
        }
        if given.triple_fault {
            self.events.outer.set(Outer::TRIPLE_FAULT, e.triple_fault);
        }
        // Before the next entry: see `settle_injection`.
        self.shared.request(Request::Event);
    }

    /// Whether an exception waits to be injected.
    pub fn exception_pending(&self) -> bool {
        self.events.exception.is_some() || matches!(self.events.again, Some(Event::Exception(_)))
    }

    /// KVM_GET_MP_STATE; takes pending start signals first.
    pub fn mp_state(&mut self) -> MpState {
        // A VMM that saves the state must not find a processor waiting whose SIPI has come.
        if self.shared.has_init_sipi() {
            self.take_start_signals();
        }
        // Nor one halted that was woken: nobody would wake it on the other host.
        if self.shared.mp_state() == MpState::Halted && self.is_kicked_awake() {
            let _ = self.shared.take_unhalt();
            self.shared.set_mp_state(MpState::Runnable);
        }
        self.shared.mp_state()
    }

    /// Sets whether the vCPU runs, halts or waits to be started (KVM_SET_MP_STATE).
    pub fn set_mp_state(&mut self, state: MpState) {
        self.shared.set_mp_state(state);
        // The state is the VMM's word, and no kick of before counts for it.
        let _ = self.shared.take_unhalt();
        tell_activity(&mut self.b, self.shared.mp_state());
        // KVM_RUN looks at the state anew, whatever it slept for.
        self.shared.request(Request::Event);
    }

    /// A VMM gives back the interrupt that KVM_GET_SREGS told it of: as if it had been injected before.
    fn put_back_interrupt(&mut self, vector: Vector) {
        // One that waits still is that one, or is replaced: there is one at a time.
        if self.events.own_external(&self.shared) != Some(vector) {
            self.events.forget_interrupt(&self.shared);
            match self.events.again {
                // One is injected at a time, and that goes first.
                Some(_) if !self.shared.in_kernel_apic => self.events.external = Some(vector),
                Some(Event::Exception(_) | Event::Nmi) => {}
                _ => {
                    self.events.again = Some(Event::Interrupt(vector));
                    self.rare.given.again = true;
                }
            }
            self.shared.request(Request::Event);
        }
    }

    /// Takes an interrupt from a VMM with its own PIC (KVM_INTERRUPT), in place of one that it gave before; a local APIC
    /// of ours has to take that first.
    pub fn queue_interrupt(&mut self, vector: Vector) -> Result<(), Invalid> {
        self.events.forget_interrupt(&self.shared);
        if self.events.external.is_some() {
            return Err(Invalid);
        }
        self.events.external = Some(vector);
        self.pending.raise();
        Ok(())
    }

    /// Makes an NMI pending for the guest (KVM_NMI).
    pub fn queue_nmi(&mut self) {
        self.shared.add_nmi();
    }

    /// Signals to be blocked during KVM_RUN.
    pub fn set_signal_mask(&mut self, mask: Option<u64>) {
        self.rare.signal_mask = mask.map(host::task::SignalSet::from_user);
    }

    /// The guest's XCR0, for KVM_GET_XCRS.
    pub fn xcr0(&self) -> u64 {
        self.b.xcr0()
    }

    /// Sets XCR0 as XSETBV would.
    pub fn set_xcr0(&mut self, value: u64) -> Result<(), Invalid> {
        if !xstate::xcr0_valid(value, self.cpuid.xcr0_allowed()) {
            return Err(Invalid);
        }
        self.b.set_xcr0(value);
        self.cpuid_inputs_changed();
        Ok(())
    }

    /// Bytes of the XSAVE area.
    pub fn xsave_size(&self) -> usize {
        self.fpu.uabi_size().max(4096)
    }

    /// The XSAVE area in standard format.
    pub fn xsave(&self, into: &mut [u8]) {
        self.fpu.to_uabi(into, host::fpu::guest_xfeatures(), self.b.pkru());
    }

    /// Sets the XSAVE area.
    pub fn set_xsave(&mut self, from: &[u8]) -> Result<(), Invalid> {
        // As on stock KVM an area without the component leaves PKRU as it is.
        let mut pkru = self.b.pkru();
        let allowed = host::fpu::guest_xfeatures();
        self.fpu.from_uabi(from, allowed, &mut pkru).map_err(|_| Invalid)?;
        self.b.set_pkru(pkru);
        Ok(())
    }

    /// Copies the local APIC's registers, complete (KVM_GET_LAPIC).
    pub fn lapic_page(&mut self, into: &mut [u8; irqchip::lapic::REGISTER_PAGE]) {
        self.gather_interrupts();
        let wide = self.vm.settings.has_wide_apic_ids();
        self.shared.lapic.save(into, wide, host::clock::monotonic_ns());
    }

    /// Sets the local APIC's registers (KVM_SET_LAPIC).
    pub fn set_lapic_page(
        &mut self,
        from: &[u8; irqchip::lapic::REGISTER_PAGE],
    ) -> Result<(), Invalid> {
        self.gather_interrupts();
        let wide = self.vm.settings.has_wide_apic_ids();
        let ran_for_deadlines = self.shared.lapic.tsc_deadline_mode();
        let op = self
            .shared
            .lapic
            .restore(from, wide, host::clock::monotonic_ns())
            .map_err(|_| Invalid)?;
        self.timer_restored(op, ran_for_deadlines);
        self.publish_priority();
        self.vm.irq().apic_changed();
        self.address_changed();
        self.pending.raise();
        Ok(())
    }

    /// TSC frequency of this vCPU.
    pub fn tsc_khz(&self) -> u32 {
        self.rare.tsc.khz
    }

    /// Tells the guest that it was stopped (KVM_KVMCLOCK_CTRL).
    pub fn mark_stopped(&mut self) -> Result<(), Invalid> {
        if self.pv.mark_stopped() {
            self.shared.request(Request::Clock);
            Ok(())
        } else {
            Err(Invalid)
        }
    }

    /// KVM_TRANSLATE: physical address, writable, user-accessible.
    pub fn translate_address(&mut self, linear: u64) -> Option<(u64, bool, bool)> {
        let context = self.b.paging_context(&self.cpuid);
        if let Some(tables) = self.mmu.l1_tables() {
            return probe_of_l2(&self.mmu.memory, &tables, &context, linear);
        }
        if !context.is_paging() {
            // As it is asked for; but the last one is stock KVM's mark of no address.
            return (linear != u64::MAX).then_some((linear, true, true));
        }
        let t = mmu::walk::probe(&*self.mmu.memory, &context, linear, mmu::Access::READ).ok()?;
        Some((t.gpa.0, t.writable, t.user))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long_mode() -> Sregs {
        Sregs {
            cr0: Cr0::PG | Cr0::PE,
            cr4: Cr4::PAE,
            efer: Efer::LME | Efer::LMA,
            ..Sregs::default()
        }
    }

    #[test]
    fn long_mode_needs_pae_and_lma() {
        let ok = long_mode();
        assert!(ok.is_valid(Cr4::PAE, 48));
        assert!(!Sregs { cr4: Cr4::empty(), ..ok }.is_valid(Cr4::PAE, 48));
        assert!(!Sregs { efer: Efer::LME, ..ok }.is_valid(Cr4::PAE, 48));
        assert!(!Sregs { cr3: 1 << 50, ..ok }.is_valid(Cr4::PAE, 48));
        // Of MOV to CR3 alone, which keeps none of it.
        assert!(!Sregs { cr3: 1 << 63, ..ok }.is_valid(Cr4::PAE, 48));
        assert!(!Sregs { cr4: Cr4::PAE | Cr4::VME, ..ok }.is_valid(Cr4::PAE, 48));
        assert!(!Sregs { cr0: Cr0::PG, ..ok }.is_valid(Cr4::PAE, 48));
        assert!(Sregs { cr8: 16, ..ok }.is_valid(Cr4::PAE, 48));
    }
}
