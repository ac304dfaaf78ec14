//! Control registers: what is intercepted of them, checked as the architecture does.
//!
//! APM vol. 2 §3.1 (registers), §14.1.3 and §15.8.1 (intercepts).

use backend::{Backend, ControlRegs, CrAccess, Nested, RAX, RCX, RDX};
use emulate::{CodeSize, SystemMove};
use mmu::{Section, Tlb};
use msr::By;
use x86::{Cr0, Cr4, Efer, Exception};

use crate::{
    Vcpu,
    exits::code::{CodeState as _, wrap},
    nested::transition::is_virtualization_on,
    paging::Mmu,
    paging::pdptes::is_pae,
    run::events::Outer,
    run::outcome::Next,
};

/// Whether a write of CR4 empties the TLB, global translations too: a change of PSE, PAE, PGE or
/// PCIDE, and SMEP going on (APM vol. 2 §5.5.2, SDM vol. 3A §4.10.4.1).
fn flushes(old: Cr4, new: Cr4) -> bool {
    let changed = old ^ new;
    changed.intersects(Cr4::PSE | Cr4::PAE | Cr4::PGE | Cr4::PCIDE)
        // As on hardware, where SMEP that goes off leaves translations that allow less than they
        // might.
        || (changed & new).contains(Cr4::SMEP)
}

/// What MOV from control register `cr` reads.
pub(crate) fn read_cr(b: &impl Backend, cr: u8) -> Result<u64, Exception> {
    let c = b.control();
    Ok(match cr {
        0 => c.cr0.bits(),
        2 => c.cr2,
        3 => c.cr3,
        4 => c.cr4.bits(),
        8 => b.cr8().into(),
        _ => return Err(Exception::ud()),
    })
}

impl Mmu {
    /// Sets EFER to what the guest has written in place of `old`.
    #[inline(always)]
    fn put_efer(&mut self, b: &mut impl Backend, new: Efer, old: Efer) {
        // LMA is read-only for the guest.
        let new = (new - Efer::LMA) | (old & Efer::LMA);
        // No flush: translations that were made without NXE have no NX, and those with it forbid
        // no less than the reserved bit would.
        b.set_efer(new);
        self.note_role(b);
    }
}

impl<B: Backend> Vcpu<B> {
    /// A control-register access inside the loop.
    pub(crate) fn answer_cr(&mut self, s: Section<'_>, access: CrAccess) -> Next {
        // The exit tells the instruction that was executed. What lies at RIP by now may be another.
        if let (Some(gpr), Some(next)) = (access.gpr, self.b.next_rip()) {
            return self.access_cr(s, access, gpr, next, |v| v.b.is_64bit_code());
        }
        let size = self.b.code_size();
        if let Some(code) = self.known_code(s, size)
            && let Some(insn) = emulate::common_system_move(code, size)
        {
            return self.move_cr(s, access, &insn, size);
        }
        self.answer_cr_of_any(s, access, size)
    }

    /// A control-register access by an instruction that was not executed lately, or that has prefixes.
    #[cold]
    #[inline(never)]
    fn answer_cr_of_any(&mut self, s: Section<'_>, access: CrAccess, size: CodeSize) -> Next {
        // CLTS and LMSW go to the emulator.
        let Some((bytes, len)) = self.fetch_here(s, size) else { return Next::Leave };
        let code = bytes.get(..usize::from(len)).unwrap_or(&[]);
        match emulate::system_move(code, size) {
            Some(insn) => self.move_cr(s, access, &insn, size),
            None => Next::Leave,
        }
    }

    /// The access by the MOV that lies at RIP now. That may be another instruction than the one that made the exit: the
    /// emulator sees to that, and to what the program may do.
    #[inline(always)]
    fn move_cr(
        &mut self,
        s: Section<'_>,
        access: CrAccess,
        insn: &SystemMove,
        size: CodeSize,
    ) -> Next {
        // A program would be refused by the CPU; that its bytes have changed since must not let it
        // in.
        if insn.debug || insn.write != access.write || self.b.cpl() != 0 {
            return Next::Leave;
        }
        // L1 was asked about that register alone.
        if self.pending.after_exit.is_nested() && insn.register != access.cr {
            return Next::Leave;
        }
        let next = wrap(size, self.b.rip().wrapping_add(u64::from(insn.length)));
        let long = size == CodeSize::Bits64;
        // The number is the decoded one, which may differ from the exit's: both are CPL 0's to
        // access.
        let access = CrAccess { cr: insn.register, ..access };
        self.access_cr(s, access, insn.gpr, next, |_| long)
    }

    /// The access, behind which the guest goes on at `next`. `is_long`: whether it executes 64-bit code.
    #[inline(always)]
    fn access_cr(
        &mut self,
        s: Section<'_>,
        access: CrAccess,
        gpr: u8,
        next: u64,
        is_long: impl FnOnce(&Self) -> bool,
    ) -> Next {
        let CrAccess { cr, write, .. } = access;
        let done = if write {
            let value = self.gprs.get(gpr.into());
            let long = is_long(self);
            // Outside 64-bit code a register has 32 bits: what long mode left above them is not
            // part of the value.
            let value = if long { value } else { value & 0xffff_ffff };
            // PDPTEs are read from guest memory, which may have to be waited for: found out before anything was
            // written.
            if !long
                && (self.b.pdptes().is_some() || self.mmu.roots.is_shadow())
                && !self.mmu.fetch_pdptes(&self.b, s, cr, value)
            {
                return Next::Leave;
            }
            let done = self.write_cr(cr, value);
            if !long {
                self.mmu.forget_fetched_pdptes();
            }
            done
        } else {
            self.read_cr_into(cr, gpr)
        };
        // Only a completed access retires: a fault leaves RIP at the instruction.
        match done {
            Ok(()) => self.retire(next),
            Err(exception) => self.raise(exception),
        }
        // The VMM may have an interrupt that goes before the next instruction.
        if self.events.outer.has(Outer::SET_TPR) { Next::Done } else { self.switch_root_in_loop(s) }
    }

    fn read_cr_into(&mut self, cr: u8, gpr: u8) -> Result<(), Exception> {
        let value = read_cr(&self.b, cr)?;
        // The number is of guest bytes: masked, so that it cannot name more than the register file
        // has.
        if let Some(slot) = self.gprs.0.get_mut(usize::from(gpr & 15)) {
            *slot = value;
        }
        Ok(())
    }

    /// MOV to a control register by the guest.
    pub(crate) fn write_cr(&mut self, cr: u8, value: u64) -> Result<(), Exception> {
        match cr {
            0 => self.write_cr0(value),
            2 => {
                self.b.set_cr2(value);
                Ok(())
            }
            3 => self.write_cr3(value),
            4 => self.write_cr4(value),
            8 if value <= 15 => {
                // The VMM's local APIC may have an interrupt that the priority held back.
                if !self.shared.in_kernel_apic && value < self.b.cr8().into() {
                    self.events.outer.set(Outer::SET_TPR, true);
                }
                self.b.set_cr8(value as u8);
                self.pending.raise();
                Ok(())
            }
            8 => Err(Exception::gp(0)),
            _ => Err(Exception::ud()),
        }
    }

    fn write_cr0(&mut self, value: u64) -> Result<(), Exception> {
        let c = self.b.control();
        // Reserved, and #GP in 64-bit code (SDM vol. 3A §2.5). Of other code the upper half was cut off.
        if value >> 32 != 0 {
            return Err(Exception::gp(0));
        }
        // Reserved bits of the lower half are dropped, and ET is always one.
        let mut new = Cr0::from_bits_truncate(value) | Cr0::ET;
        // In VMX operation a bit that is fixed to 1 cannot be cleared (SDM vol. 3D appendix A.7).
        if let Some(nested) = self.b.nested() {
            new = nested.cr0_of_write(new).ok_or(Exception::gp(0))?;
        }
        if !new.is_consistent() {
            return Err(Exception::gp(0));
        }
        let ControlRegs { cr0: old, cr4, efer, .. } = c;
        let (was_pg, pg) = (old.contains(Cr0::PG), new.contains(Cr0::PG));
        let to_long = pg && !was_pg && efer.contains(Efer::LME);
        // A change of one of these loads the PDPTEs anew, and bad ones refuse the write (SDM vol. 3A §4.4.1).
        // Not for a switch to long mode: there CR3 names a table of four levels and no PDPTEs are
        // loaded.
        if (new ^ old).intersects(Cr0::PG | Cr0::CD_NW) && !to_long && is_pae(new, cr4, efer) {
            self.load_pdptes(c.cr3)?;
        }
        if to_long {
            let cs = self.b.segment(backend::SegmentName::Cs);
            // Long mode begins in compatibility mode: CS.L set is #GP (SDM vol. 2B, MOV to control registers).
            if !cr4.contains(Cr4::PAE) || cs.is_long() {
                return Err(Exception::gp(0));
            }
            // LMA follows at once: what is asked below, and the entry itself, take EFER and CR0 for
            // one state.
            self.b.set_efer(efer | Efer::LMA);
        }
        if !pg && was_pg {
            // 64-bit code cannot turn paging off, and PCIDs mean nothing without (SDM vol. 2B, MOV to control
            // registers).
            if efer.is_long() && self.b.is_64bit_code() || cr4.contains(Cr4::PCIDE) {
                return Err(Exception::gp(0));
            }
            self.b.set_efer(efer - Efer::LMA);
        }
        self.b.set_cr0(new);
        // SDM vol. 3A §4.10.4.1.
        if pg != was_pg {
            self.mmu.flush_guest_tlb(&mut self.b);
        }
        self.mmu.note_role(&self.b);
        Ok(())
    }

    fn write_cr3(&mut self, value: u64) -> Result<(), Exception> {
        let c = self.b.control();
        let mut keep = false;
        if c.efer.is_long() {
            // Bit 63 with PCIDs says "keep the TLB" and is not stored.
            let tagged = c.cr4.contains(Cr4::PCIDE);
            // Without PCIDE bit 63 is reserved like the others, and is refused below.
            keep = tagged && value >> 63 != 0;
            let value = if tagged { value & !(1 << 63) } else { value };
            if value >> self.cpuid.maxphyaddr().min(52) != 0 {
                return Err(Exception::gp(0));
            }
            self.b.set_cr3(value);
        } else {
            if is_pae(c.cr0, c.cr4, c.efer) {
                self.load_pdptes(value)?;
            }
            // CR3 has 32 bits outside long mode, though the register here is wider.
            self.b.set_cr3(value & 0xffff_ffff);
        }
        self.mmu.cr3_loaded(&mut self.b, Tlb::flushed_if(!keep));
        Ok(())
    }

    fn write_cr4(&mut self, value: u64) -> Result<(), Exception> {
        let (efer, old) = (self.b.efer(), self.b.cr4());
        let (long, mut new) = (efer.is_long(), Cr4::from_bits_retain(value));
        if let Some(nested) = self.b.nested() {
            new = nested.cr4_of_write(new).ok_or(Exception::gp(0))?;
        }
        let changed = new ^ old;
        if !self.cpuid.cr4_allowed().contains(new)
            // There is no VMX operation within the mode but what it has put aside (SDM vol. 3C §32.14.4).
            || (self.smm.active && new.contains(Cr4::VMXE))
            // Neither may change under long mode: the tables in use would get another depth.
            || (long && (!new.contains(Cr4::PAE) || changed.contains(Cr4::LA57)))
            // CR3's low bits become a tag: they have to be 0 when PCIDs are turned on (SDM vol. 2B).
            || ((changed & new).contains(Cr4::PCIDE)
                && (!long || self.b.control().cr3 & 0xfff != 0))
        {
            return Err(Exception::gp(0));
        }
        // As for CR0: a change of one of these loads the PDPTEs anew, and bad ones refuse the
        // write.
        if !long && changed.intersects(Cr4::PSE | Cr4::PAE | Cr4::PGE | Cr4::SMEP) {
            let c = self.b.control();
            if is_pae(c.cr0, new, efer) {
                self.load_pdptes(c.cr3)?;
            }
        }
        // Behind all that can refuse: a write that faults has changed nothing.
        self.b.set_cr4(new);
        // CPUID shows these two bits of CR4.
        if changed.intersects(Cr4::OSXSAVE | Cr4::PKE) {
            self.cpuid_inputs_changed();
        }
        if flushes(old, new) {
            self.mmu.flush_guest_tlb(&mut self.b);
        }
        // PGE alone is in no role.
        self.mmu.note_role_of_cr4(&self.b, changed);
        Ok(())
    }

    /// EFER is written while L2 runs. Whether the value pulls L1's processor from under it, which ends the
    /// write as well.
    #[cold]
    #[inline(never)]
    fn efer_ends_l2(&mut self, new: Efer, by: By) -> bool {
        let c = self.b.control();
        if is_virtualization_on(&self.b, new, c.cr4) {
            return false;
        }
        if by == By::Vmm {
            // What follows is about L1's registers.
            self.abandon_l2_for_user();
            return false;
        }
        if (new ^ c.efer).contains(Efer::LME) && c.cr0.contains(Cr0::PG) {
            // It is refused.
            return false;
        }
        self.events.outer.set(Outer::TRIPLE_FAULT, true);
        self.pending.raise();
        true
    }

    /// Writes EFER, by WRMSR or for the VMM.
    pub(crate) fn write_efer(&mut self, value: u64, by: By) -> Result<(), Exception> {
        let new = Efer::from_bits_retain(value);
        // LMA is allowed in the value, since a guest writes back what it has read, and ignored
        // below.
        if !(self.cpuid.efer_allowed() | Efer::LMA).contains(new) {
            return Err(Exception::gp(0));
        }
        if self.pending.after_exit.is_nested() && self.efer_ends_l2(new, by) {
            return Ok(());
        }
        let old = self.b.efer();
        let changed = new ^ old;
        if changed.intersects(Efer::LME | Efer::SVME) {
            return self.switch_mode(new, old, by);
        }
        self.mmu.put_efer(&mut self.b, new, old);
        Ok(())
    }

    /// LME or SVME changes too.
    #[cold]
    #[inline(never)]
    fn switch_mode(&mut self, new: Efer, old: Efer, by: By) -> Result<(), Exception> {
        let changed = new ^ old;
        // A VMM restores CR0 and EFER in the order that it likes.
        if by == By::Guest && changed.contains(Efer::LME) && self.b.cr0().contains(Cr0::PG) {
            return Err(Exception::gp(0));
        }
        self.mmu.put_efer(&mut self.b, new, old);
        if changed.contains(Efer::SVME) {
            // Without SVM there is no GIF to hold events back.
            self.follow_gate();
        }
        Ok(())
    }

    /// Answers XSETBV inside the loop.
    pub(crate) fn answer_xsetbv(&mut self, s: Section<'_>) -> Next {
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        match self.do_xsetbv() {
            Ok(()) => self.retire(next),
            Err(exception) => self.raise(exception),
        }
        Next::Again
    }

    #[inline(always)]
    pub(crate) fn do_xsetbv(&mut self) -> Result<(), Exception> {
        // A CPU whose intercept comes first asks nothing (an emulated SVM).
        if !self.b.cr4_shown().contains(Cr4::OSXSAVE) {
            return Err(Exception::ud());
        }
        let [rax, rcx, rdx] = [RAX, RCX, RDX].map(|i| self.gprs.0[i]);
        let value = (rdx << 32) | (rax & 0xffff_ffff);
        let valid = self.b.cpl() == 0
            // XCR0 is the only register that XSETBV writes.
            && rcx as u32 == 0
            && xstate::xcr0_valid(value, self.cpuid.xcr0_allowed());
        if !valid {
            return Err(Exception::gp(0));
        }
        self.b.set_xcr0(value);
        self.cpuid_inputs_changed();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cr4_empties_the_tlb_where_the_architecture_says_so_and_only_there() {
        let none = Cr4::empty();
        for bit in [Cr4::PSE, Cr4::PAE, Cr4::PGE, Cr4::PCIDE] {
            assert!(flushes(none, bit) && flushes(bit, none), "{bit:?}");
        }
        assert!(flushes(none, Cr4::SMEP) && !flushes(Cr4::SMEP, none));
        for bit in [Cr4::SMAP, Cr4::PKE, Cr4::OSXSAVE, Cr4::TSD] {
            assert!(!flushes(none, bit) && !flushes(bit, none), "{bit:?}");
        }
    }
}
