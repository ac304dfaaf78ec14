//! The guest's registers in the VMCB.

use backend::{Absent, ControlRegisters, ControlRegs, Registers, SegmentName};
use cpu::Cpu;
use x86::{
    Cr0, Cr4, Efer, Rflags,
    segment::{DescriptorTable, Segment},
    vmcb::{self, Clean, InterceptCr, VmcbSegment, vintr},
};

use crate::state::Svm;

fn index(name: SegmentName) -> usize {
    match name {
        SegmentName::Es => vmcb::SEG_ES,
        SegmentName::Cs => vmcb::SEG_CS,
        SegmentName::Ss => vmcb::SEG_SS,
        SegmentName::Ds => vmcb::SEG_DS,
        SegmentName::Fs => vmcb::SEG_FS,
        SegmentName::Gs => vmcb::SEG_GS,
        SegmentName::Ldtr => vmcb::SEG_LDTR,
        SegmentName::Tr => vmcb::SEG_TR,
    }
}

fn table(segment: &VmcbSegment) -> DescriptorTable {
    // The block has 32 bits of limit, of which these registers have sixteen.
    DescriptorTable { base: segment.base, limit: segment.limit as u16 }
}

impl<C: Cpu> Registers for Svm<C> {
    #[inline]
    fn rip(&self) -> u64 {
        self.vmcb().save.rip
    }

    #[inline]
    fn set_rip(&mut self, rip: u64) {
        // No clean bit is about RIP, RFLAGS or the interrupt shadow: an entry always reads them (APM vol. 2 §15.15.3).
        self.vmcb_mut(Clean::empty()).save.rip = rip;
    }

    fn insn_bytes(&self) -> &[u8] {
        if !self.features.decode_assists {
            return &[];
        }
        let control = &self.vmcb().control;
        // The CPU writes 15 at most; the mask bounds a field that hardware writes.
        control.insn_bytes.get(..usize::from(control.insn_len & 15)).unwrap_or(&[])
    }

    #[inline]
    fn rflags(&self) -> Rflags {
        Rflags::from_bits_retain(self.vmcb().save.rflags)
    }

    fn set_rflags(&mut self, rflags: Rflags) {
        self.vmcb_mut(Clean::empty()).save.rflags = rflags.bits();
    }

    #[inline]
    fn interrupt_shadow(&self) -> bool {
        self.vmcb().control.int_state & vmcb::INT_SHADOW != 0
    }

    fn set_interrupt_shadow(&mut self, on: bool) {
        let state = &mut self.vmcb_mut(Clean::empty()).control.int_state;
        *state = (*state & !vmcb::INT_SHADOW) | u64::from(on);
    }

    #[inline]
    fn cpl(&self) -> u8 {
        self.vmcb().save.cpl
    }

    #[inline]
    fn segment(&self, name: SegmentName) -> Segment {
        let s = self.vmcb().save.segments.get(index(name)).copied().unwrap_or_default();
        Segment { base: s.base, limit: s.limit, selector: s.selector, attr: s.attrib }
    }

    fn set_segment(&mut self, name: SegmentName, value: Segment) {
        let save = &mut self.vmcb_mut(Clean::SEG).save;
        if let Some(slot) = save.segments.get_mut(index(name)) {
            *slot = VmcbSegment {
                selector: value.selector,
                attrib: value.attr,
                limit: value.limit,
                base: value.base,
            };
        }
        if name == SegmentName::Ss {
            // The CPU takes CPL from this field, not from SS (APM vol. 2 §15.5.1).
            save.cpl = value.dpl();
        }
    }

    #[inline(always)]
    fn code_attributes(&self) -> u16 {
        self.segment(SegmentName::Cs).attr
    }

    fn gdtr(&self) -> DescriptorTable {
        table(&self.vmcb().save.segments[vmcb::SEG_GDTR])
    }

    fn set_gdtr(&mut self, value: DescriptorTable) {
        let slot = &mut self.vmcb_mut(Clean::DT).save.segments[vmcb::SEG_GDTR];
        (slot.base, slot.limit) = (value.base, value.limit.into());
    }

    fn idtr(&self) -> DescriptorTable {
        table(&self.vmcb().save.segments[vmcb::SEG_IDTR])
    }

    fn set_idtr(&mut self, value: DescriptorTable) {
        let slot = &mut self.vmcb_mut(Clean::DT).save.segments[vmcb::SEG_IDTR];
        (slot.base, slot.limit) = (value.base, value.limit.into());
    }
}

impl<C: Cpu> ControlRegisters for Svm<C> {
    type Pdptes = Absent;

    fn control(&self) -> ControlRegs {
        let save = &self.vmcb().save;
        if self.paging.shadow {
            return self.guest.control(save);
        }
        ControlRegs {
            // The guest reads what it wrote.
            cr0: Cr0::from_bits_retain(save.cr0 | u64::from(self.cr0_hidden)),
            cr2: save.cr2,
            cr3: save.cr3,
            cr4: Cr4::from_bits_retain(save.cr4),
            efer: Efer::from_bits_retain(save.efer & self.efer_shown),
        }
    }

    #[inline(always)]
    fn cr0(&self) -> Cr0 {
        self.control().cr0
    }

    #[inline(always)]
    fn cr4(&self) -> Cr4 {
        if self.paging.shadow {
            return self.guest.cr4;
        }
        Cr4::from_bits_retain(self.vmcb().save.cr4)
    }

    #[inline(always)]
    fn cr4_shown(&self) -> Cr4 {
        self.cr4()
    }

    #[inline(always)]
    fn efer(&self) -> Efer {
        if self.paging.shadow {
            return self.guest.efer;
        }
        Efer::from_bits_retain(self.vmcb().save.efer & self.efer_shown)
    }

    /// CR0.CD and CR0.NW are kept from the hardware: firmware leaves them set for long, and with
    /// CD the whole guest would run uncached. CR0 is intercepted only while the guest has one set.
    fn set_cr0(&mut self, value: Cr0) {
        if self.paging.shadow {
            self.guest.cr0 = value;
            return self.renew_cr0();
        }
        // A VMM has asked for it (KVM_X86_QUIRK_CD_NW_CLEARED off).
        let hidden = if self.shows_cache_disable { Cr0::empty() } else { value & Cr0::CD_NW };
        self.cr0_hidden = hidden.bits() as u32;
        self.vmcb_mut(Clean::CR).save.cr0 = (value - hidden).bits();
        let both = InterceptCr::READ_CR0 | InterceptCr::WRITE_CR0;
        let wanted = match hidden.is_empty() {
            false => both,
            true if self.features.nrip_save => InterceptCr::empty(),
            // Without NRIP save bits are checked here that the emulation takes.
            true => InterceptCr::WRITE_CR0,
        };
        self.set_cr_intercepts(both, wanted);
    }

    fn set_cr2(&mut self, value: u64) {
        self.vmcb_mut(Clean::CR2).save.cr2 = value;
    }

    fn set_cr3(&mut self, value: u64) {
        if self.paging.shadow {
            self.guest.cr3 = value;
            return;
        }
        self.vmcb_mut(Clean::CR).save.cr3 = value;
    }

    fn set_cr4(&mut self, value: Cr4) {
        if self.paging.shadow {
            self.guest.cr4 = value;
            return self.renew_cr4();
        }
        let save = &mut self.vmcb_mut(Clean::CR).save;
        let changed =
            Cr4::from_bits_retain(core::mem::replace(&mut save.cr4, value.bits())) ^ value;
        // Whether XCR0 is live, and whether CR4's writes have to be seen, follows from it.
        if changed.contains(Cr4::OSXSAVE) {
            self.update_cr4_intercept();
            self.sync_extended();
        }
    }

    #[inline(always)]
    fn set_efer(&mut self, value: Efer) {
        if self.paging.shadow {
            self.guest.efer = value;
            return self.renew_efer();
        }
        let shown = !Efer::SVME.bits() | (value & Efer::SVME).bits();
        if shown != self.efer_shown {
            self.svme_changed(shown);
        }
        // VMRUN refuses a block without SVME (APM vol. 2 §15.5.1), whatever the guest has.
        self.vmcb_mut(Clean::CR).save.efer = (value | Efer::SVME).bits();
    }

    #[inline]
    fn cr8(&self) -> u8 {
        (self.vmcb().control.int_ctl & vintr::TPR_MASK) as u8
    }

    #[inline]
    fn set_cr8(&mut self, value: u8) {
        let old = self.vmcb().control.int_ctl;
        let new = (old & !vintr::TPR_MASK) | (u32::from(value) & vintr::TPR_MASK);
        // A write would have the CPU read the group anew.
        if new != old {
            self.vmcb_mut(Clean::INTR).control.int_ctl = new;
        }
    }

    fn hide_cache_disable(&mut self, hide: bool) {
        self.shows_cache_disable = !hide;
    }

    /// The hardware loads them from memory itself.
    #[inline(always)]
    fn pdptes(&self) -> Option<&Absent> {
        None
    }

    #[inline(always)]
    fn pdptes_mut(&mut self) -> Option<&mut Absent> {
        None
    }
}
