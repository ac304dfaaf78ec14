//! The guest's registers in the VMCS.

use backend::{ControlRegisters, ControlRegs, PdpteRegisters, Registers, SegmentName, ShadowBy};
use cpu::Cpu;
use x86::{
    Cr0, Cr4, Efer, Rflags,
    segment::{DescriptorTable, Segment},
    vmcs::{EntryControls, Group, Groups},
};

use crate::{fields, segments, state::Vmx};

impl<C: Cpu> Vmx<C> {
    /// Something else than an interrupt ends the guest's HLT. Where HLT does not exit, the CPU halts the
    /// guest again at an entry, and refuses one with an exception (SDM vol. 3C §27.3.1.5).
    #[inline]
    // Only where HLT does not exit can the field be other than active.
    pub(crate) fn end_halt(&self) {
        if self.cold.fewer.hlt {
            self.set(fields::GUEST_ACTIVITY, 0);
        }
    }

    /// CR0 as the level that runs reads it: in L2 what is L1's own is as L1 shows it.
    #[inline]
    fn seen_cr0(&self, value: Cr0) -> Cr0 {
        let of_l1 = self.cold.of_l1.cr0;
        if of_l1.is_empty() {
            return value;
        }
        // L2 reads L1's read shadow there (SDM vol. 3C §26.3).
        (value - of_l1) | Cr0::from_bits_retain(self.get(fields::CR0_SHADOW)) & of_l1
    }

    /// CR4 as the level that runs reads it.
    #[inline]
    fn seen_cr4(&self, value: Cr4) -> Cr4 {
        let of_l1 = self.cold.of_l1.cr4;
        if of_l1.is_empty() {
            return value;
        }
        (value - of_l1) | Cr4::from_bits_retain(self.get(fields::CR4_SHADOW)) & of_l1
    }

    pub(crate) fn replace_cr2(&mut self, value: u64) {
        self.cr2 = value;
        // In the loop the register is the guest's: entry and exit leave it alone.
        if self.vmcs.is_loaded() {
            self.cpu.set_cr2(value);
        }
    }
}

impl<C: Cpu> Registers for Vmx<C> {
    #[inline]
    fn rip(&self) -> u64 {
        self.get(fields::GUEST_RIP)
    }

    #[inline]
    fn set_rip(&mut self, rip: u64) {
        // A guest that is moved on is active.
        self.end_halt();
        self.set(fields::GUEST_RIP, rip);
    }

    fn insn_bytes(&self) -> &[u8] {
        &[]
    }

    #[inline]
    fn rflags(&self) -> Rflags {
        Rflags::from_bits_retain(self.get(fields::GUEST_RFLAGS))
    }

    fn set_rflags(&mut self, rflags: Rflags) {
        // Behind the field, which it looks at.
        self.set(fields::GUEST_RFLAGS, rflags.bits());
        self.flags_changed(rflags);
    }

    #[inline]
    fn interrupt_shadow(&self) -> bool {
        self.is_shadowed()
    }

    fn set_interrupt_shadow(&mut self, on: bool) {
        // A halted guest has no shadow.
        if on {
            self.end_halt();
        }
        self.set_shadow(on);
    }

    fn shadow_by(&self) -> ShadowBy {
        self.shadow_kind()
    }

    fn set_interrupt_shadow_by(&mut self, by: ShadowBy) {
        self.end_halt();
        self.set_shadow_by(by);
    }

    #[inline]
    fn cpl(&self) -> u8 {
        // VMX takes CPL from SS's DPL, in real mode too.
        (self.get(fields::GUEST_SS_RIGHTS) >> 5) as u8 & 3
    }

    fn segment(&self, name: SegmentName) -> Segment {
        let places = segments::places(name);
        Segment {
            base: self.get(places.base),
            limit: self.get(places.limit),
            selector: self.get(places.selector),
            attr: segments::attributes(self.get(places.rights)),
        }
    }

    fn set_segment(&mut self, name: SegmentName, value: Segment) {
        if matches!(name, SegmentName::Tr | SegmentName::Ldtr) {
            self.cold.tables.touched();
        }
        let places = segments::places(name);
        let long = self.efer.is_long();
        self.set(places.selector, value.selector);
        self.set(places.base, value.base);
        self.set(places.limit, value.limit);
        // A guest's guest was entered with a TR that its hypervisor answers for. One that is of no use is not mended:
        // the entry fails, and L1 hears of a shutdown.
        let broken = self.cold.of_l1.runs && name == SegmentName::Tr && !value.is_present();
        let rights = if broken {
            segments::rights(value.attr)
        } else {
            segments::rights_for(name, &value, long)
        };
        self.set(places.rights, rights);
    }

    #[inline]
    fn code_attributes(&self) -> u16 {
        segments::attributes(self.get(fields::GUEST_CS_RIGHTS))
    }

    fn gdtr(&self) -> DescriptorTable {
        let (base, limit) = (self.get(fields::GUEST_GDTR_BASE), self.get(fields::GUEST_GDTR_LIMIT));
        // The field has 32 bits.
        DescriptorTable { base, limit: limit as u16 }
    }

    fn set_gdtr(&mut self, value: DescriptorTable) {
        self.cold.tables.touched();
        self.set(fields::GUEST_GDTR_BASE, value.base);
        self.set(fields::GUEST_GDTR_LIMIT, value.limit.into());
    }

    fn idtr(&self) -> DescriptorTable {
        let (base, limit) = (self.get(fields::GUEST_IDTR_BASE), self.get(fields::GUEST_IDTR_LIMIT));
        DescriptorTable { base, limit: limit as u16 }
    }

    fn set_idtr(&mut self, value: DescriptorTable) {
        self.cold.tables.touched();
        self.set(fields::GUEST_IDTR_BASE, value.base);
        self.set(fields::GUEST_IDTR_LIMIT, value.limit.into());
    }
}

impl<C: Cpu> ControlRegisters for Vmx<C> {
    type Pdptes = Self;

    fn control(&self) -> ControlRegs {
        ControlRegs {
            cr0: self.cr0(),
            cr2: if self.vmcs.is_loaded() { self.cpu.cr2() } else { self.cr2 },
            cr3: if self.paging.shadow {
                self.cold.shadowed_cr3
            } else {
                self.get(fields::GUEST_CR3)
            },
            cr4: self.cr4(),
            efer: self.efer,
        }
    }

    #[inline]
    fn cr0(&self) -> Cr0 {
        let owned = self.owned_cr0();
        // The guest changes its own bits without an exit: the VMCS has the newest.
        (self.cr0 - owned) | (Cr0::from_bits_retain(self.get(fields::GUEST_CR0)) & owned)
    }

    #[inline]
    fn cr4(&self) -> Cr4 {
        let owned = self.owned_cr4();
        (self.cr4 - owned) | (Cr4::from_bits_retain(self.get(fields::GUEST_CR4)) & owned)
    }

    /// OSXSAVE and PKE are never the guest's own.
    #[inline]
    fn cr4_shown(&self) -> Cr4 {
        self.cr4
    }

    #[inline]
    fn efer(&self) -> Efer {
        self.efer
    }

    /// Whether the guest has caching disabled is for it alone to see: an entry does not load CD and
    /// NW.
    fn set_cr0(&mut self, value: Cr0) {
        // What is L1's own in L2 stays what L1 made it, whatever L2 sees.
        let whole = (value - self.cold.of_l1.cr0) | self.cr0 & self.cold.of_l1.cr0;
        let changed = core::mem::replace(&mut self.cr0, whole) ^ whole;
        // L2 begins with those of L1's.
        if changed.intersects(Cr0::CD_NW)
            && let Some(n) = &mut self.nested
        {
            n.machine.touch_each(Groups::of(Group::ControlRegisters));
        }
        // VMX fixes them to 1, but not for a guest that may run without paging and protection.
        let fixed = self.features.cr0_fixed - Cr0::PG_PE;
        self.set(fields::CR0_SHADOW, self.seen_cr0(value).bits());
        // L0's fixed bits are ones in the register, and not in what is read.
        self.set(fields::GUEST_CR0, (self.real_cr0(self.cr0) | fixed | Cr0::ET).bits());
        // A guest in real mode is not entered at all then.
        if self.paging.shadow {
            self.paging_mode_changed();
        }
    }

    fn set_cr2(&mut self, value: u64) {
        self.replace_cr2(value);
    }

    fn set_cr3(&mut self, value: u64) {
        if self.paging.shadow {
            self.cold.shadowed_cr3 = value;
            return;
        }
        self.set(fields::GUEST_CR3, value);
    }

    /// Where the CPU has no UMIP, the instructions
    /// that it is about exit while the guest has it set: all but SMSW, which no control makes exit.
    #[inline(always)]
    fn set_cr4(&mut self, value: Cr4) {
        // As with CR0.
        let whole = (value - self.cold.of_l1.cr4) | self.cr4 & self.cold.of_l1.cr4;
        let changed = core::mem::replace(&mut self.cr4, whole) ^ whole;
        let real = self.real_cr4(whole);
        // By the guest's own word, before the bit is taken out of the register.
        if self.features.umip_by_exits && changed.contains(Cr4::UMIP) {
            self.watch_tables(value.contains(Cr4::UMIP));
        }
        self.set(fields::CR4_SHADOW, self.seen_cr4(value).bits());
        self.set(fields::GUEST_CR4, real.bits());
        if changed.contains(Cr4::OSXSAVE) {
            self.sync_extended();
        }
    }

    fn set_efer(&mut self, value: Efer) {
        self.efer = value;
        // Under shadow paging the CPU has another: NXE is on, LME as the mode is.
        self.set(fields::GUEST_EFER, self.real_efer(value).bits());
        let long = value.is_long();
        let bit = EntryControls::IA32E_GUEST.bits();
        let old = self.get(fields::ENTRY_CONTROLS);
        let controls = if long { old | bit } else { old & !bit };
        // An entry wants EFER.LMA and the control alike (SDM vol. 3C §27.3.1.1).
        if controls != old {
            self.set(fields::ENTRY_CONTROLS, controls);
            if long && !self.cold.of_l1.runs {
                // A 16-bit task state is none there.
                let tr = self.segment(SegmentName::Tr);
                let rights = segments::rights_for(SegmentName::Tr, &tr, true);
                self.set(fields::GUEST_TR_RIGHTS, rights);
            }
        }
        // Only a change of mode matters here: the MSRs are lent where SYSCALL works.
        self.sync_syscall();
        if self.paging.shadow {
            self.paging_mode_changed();
        }
    }

    #[inline]
    fn cr8(&self) -> u8 {
        // The guest writes CR8 to this page, without an exit.
        // Bits 7:4 are the class, which CR8 is.
        self.apic_page.tpr() >> 4
    }

    #[inline]
    fn set_cr8(&mut self, value: u8) {
        // Four bits: all else would be #GP for the guest, and is a VMM's here.
        let value = value & 0xf;
        self.apic_page.set_tpr(value << 4);
        // An entry refuses a threshold above the priority.
        if self.get(fields::TPR_THRESHOLD) > value.into() {
            self.set(fields::TPR_THRESHOLD, value.into());
        }
        // That of L1 too, whose priority an L2 writes to that has none of its own.
        if self.cold.of_l1.runs {
            self.lower_threshold_of_l1(value);
        }
    }

    /// An entry does not load CD and NW, and a guest's memory types do not follow them.
    fn hide_cache_disable(&mut self, _hide: bool) {}

    #[inline(always)]
    fn pdptes(&self) -> Option<&Self> {
        Some(self)
    }

    #[inline(always)]
    fn pdptes_mut(&mut self) -> Option<&mut Self> {
        Some(self)
    }
}

impl<C: Cpu> PdpteRegisters for Vmx<C> {
    fn entries(&self) -> [u64; 4] {
        [
            self.get(fields::GUEST_PDPTE0),
            self.get(fields::GUEST_PDPTE1),
            self.get(fields::GUEST_PDPTE2),
            self.get(fields::GUEST_PDPTE3),
        ]
    }

    fn set_entries(&mut self, [a, b, c, d]: [u64; 4]) {
        // Written whether or not PAE paging is on: an entry without it ignores them.
        self.set(fields::GUEST_PDPTE0, a);
        self.set(fields::GUEST_PDPTE1, b);
        self.set(fields::GUEST_PDPTE2, c);
        self.set(fields::GUEST_PDPTE3, d);
    }
}
