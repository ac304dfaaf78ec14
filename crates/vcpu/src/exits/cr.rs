//! Control registers: what is intercepted of them, checked as the architecture does.
//!
//! APM vol. 2 §3.1 (registers), §14.1.3 and §15.8.1 (intercepts).

use backend::{Backend, CrAccess, RAX, RCX, RDX};
use emulate::CodeSize;
use mmu::Section;
use x86::Exception;

use crate::{
    Vcpu, exits::code::wrap, paging::shadow::is_pae, run::events::Outer, run::inner::Next,
};

const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const CR0_NW: u64 = 1 << 29;
const CR0_CD: u64 = 1 << 30;
const CR0_ET: u64 = 1 << 4;
const CR0_KNOWN: u64 = 0xe005_003f;
const CR4_PAE: u64 = 1 << 5;
const CR4_PSE: u64 = 1 << 4;
const CR4_PGE: u64 = 1 << 7;
const CR4_SMEP: u64 = 1 << 20;
const CR4_PCIDE: u64 = 1 << 17;
const CR4_OSXSAVE: u64 = 1 << 18;
const CR4_PKE: u64 = 1 << 22;
const CR4_LA57: u64 = 1 << 12;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// Whether a write of CR4 empties the TLB, global translations too: a change of PSE, PAE, PGE or
/// PCIDE, and SMEP going on (APM vol. 2 §5.5.2, SDM vol. 3A §4.10.4.1).
fn flushes(old: u64, new: u64) -> bool {
    let changed = old ^ new;
    changed & (CR4_PSE | CR4_PAE | CR4_PGE | CR4_PCIDE) != 0 || changed & new & CR4_SMEP != 0
}

impl<B: Backend> Vcpu<B> {
    /// A control-register access inside the loop.
    pub(crate) fn answer_cr(&mut self, s: Section<'_>, access: CrAccess) -> Next {
        let size = self.code_size();
        let (cr, gpr, next) = match (access.gpr, self.b.next_rip()) {
            (Some(gpr), Some(next)) => (access.cr, gpr, next),
            _ => {
                // CLTS and LMSW go to the emulator.
                let Some(insn) = self.system_move_here(s, size) else { return Next::Leave };
                // What lies there now may be another instruction than the one that made the exit: the
                // emulator sees to that, and to what the program may do.
                if insn.debug || insn.write != access.write || self.b.cpl() != 0 {
                    return Next::Leave;
                }
                let next = wrap(size, self.b.rip().wrapping_add(u64::from(insn.length)));
                (insn.register, insn.gpr, next)
            }
        };
        let done = if access.write {
            let value = self.gpr(gpr);
            let long = size == CodeSize::Bits64;
            let value = if long { value } else { value & 0xffff_ffff };
            if !long
                && (B::LOADS_PDPTES || self.roots.is_shadow())
                && !self.fetch_pdptes(s, cr, value)
            {
                return Next::Leave;
            }
            self.write_cr(cr, value)
        } else {
            self.read_cr_into(cr, gpr)
        };
        match done {
            Ok(()) => self.retire(next),
            Err(exception) => self.raise(exception),
        }
        if self.events.outer.has(Outer::SET_TPR) { Next::Done } else { self.settle_in_loop(s) }
    }

    /// The MOV of a control register at RIP.
    #[inline]
    fn system_move_here(&mut self, s: Section<'_>, size: CodeSize) -> Option<emulate::SystemMove> {
        if let Some(code) = self.known_code(s, size)
            && let Some(insn) = emulate::common_system_move(code, size)
        {
            return Some(insn);
        }
        let (bytes, len) = self.fetch_here(s, size)?;
        emulate::system_move(bytes.get(..usize::from(len))?, size)
    }

    fn read_cr_into(&mut self, cr: u8, gpr: u8) -> Result<(), Exception> {
        let value = self.read_cr_value(cr)?;
        if let Some(slot) = self.gprs.0.get_mut(usize::from(gpr & 15)) {
            *slot = value;
        }
        Ok(())
    }

    /// MOV from a control register.
    pub(crate) fn read_cr_value(&mut self, cr: u8) -> Result<u64, Exception> {
        let c = self.b.control();
        Ok(match cr {
            0 => c.cr0,
            2 => c.cr2,
            3 => c.cr3,
            4 => c.cr4,
            8 => self.b.cr8().into(),
            _ => return Err(Exception::ud()),
        })
    }

    fn gpr(&self, index: u8) -> u64 {
        self.gprs.0.get(usize::from(index & 15)).copied().unwrap_or(0)
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
                self.recheck = true;
                Ok(())
            }
            8 => Err(Exception::gp(0)),
            _ => Err(Exception::ud()),
        }
    }

    fn write_cr0(&mut self, value: u64) -> Result<(), Exception> {
        let c = self.b.control();
        if value >> 32 != 0 {
            return Err(Exception::gp(0));
        }
        let value = (value & CR0_KNOWN) | CR0_ET;
        let pg = value & CR0_PG != 0;
        if (pg && value & CR0_PE == 0) || (value & CR0_NW != 0 && value & CR0_CD == 0) {
            return Err(Exception::gp(0));
        }
        let was_pg = c.cr0 & CR0_PG != 0;
        let to_long = pg && !was_pg && c.efer & EFER_LME != 0;
        if (value ^ c.cr0) & (CR0_PG | CR0_CD | CR0_NW) != 0
            && !to_long
            && is_pae(value, c.cr4, c.efer)
        {
            self.load_pdptes(c.cr3)?;
        }
        if pg && !was_pg && c.efer & EFER_LME != 0 {
            let cs = self.b.segment(backend::SegmentName::Cs);
            if c.cr4 & CR4_PAE == 0 || cs.is_long() {
                return Err(Exception::gp(0));
            }
            self.b.set_efer(c.efer | EFER_LMA);
        }
        if !pg && was_pg {
            if c.efer & EFER_LMA != 0 && self.code_size() == CodeSize::Bits64
                || c.cr4 & CR4_PCIDE != 0
            {
                return Err(Exception::gp(0));
            }
            self.b.set_efer(c.efer & !EFER_LMA);
        }
        self.b.set_cr0(value);
        if pg != was_pg {
            self.flush_guest_tlb();
        }
        self.note_role();
        Ok(())
    }

    fn write_cr3(&mut self, value: u64) -> Result<(), Exception> {
        let c = self.b.control();
        let mut keep = false;
        if c.efer & EFER_LMA != 0 {
            // Bit 63 with PCIDs says "keep the TLB" and is not stored.
            let tagged = c.cr4 & CR4_PCIDE != 0;
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
            self.b.set_cr3(value & 0xffff_ffff);
        }
        self.cr3_loaded(keep);
        Ok(())
    }

    fn write_cr4(&mut self, value: u64) -> Result<(), Exception> {
        let c = self.b.control();
        let long = c.efer & EFER_LMA != 0;
        let changed = value ^ c.cr4;
        if value & !self.cpuid.cr4_allowed().bits() != 0
            || (long && (value & CR4_PAE == 0 || changed & CR4_LA57 != 0))
            || (changed & value & CR4_PCIDE != 0 && (!long || c.cr3 & 0xfff != 0))
        {
            return Err(Exception::gp(0));
        }
        if !long
            && changed & (CR4_PSE | CR4_PAE | CR4_PGE | CR4_SMEP) != 0
            && is_pae(c.cr0, value, c.efer)
        {
            self.load_pdptes(c.cr3)?;
        }
        self.b.set_cr4(value);
        if changed & (CR4_OSXSAVE | CR4_PKE) != 0 {
            self.cpuid_inputs_changed();
        }
        if flushes(c.cr4, value) {
            self.flush_guest_tlb();
        }
        // PGE alone is in no role.
        if changed != CR4_PGE || !self.roots.keeps() {
            self.note_role();
        }
        Ok(())
    }

    /// WRMSR EFER.
    pub(crate) fn write_efer(&mut self, value: u64, from_host: bool) -> Result<(), Exception> {
        let c = self.b.control();
        let allowed = self.cpuid.efer_allowed().bits() | EFER_LMA;
        if value & !allowed != 0 {
            return Err(Exception::gp(0));
        }
        let paging = c.cr0 & CR0_PG != 0;
        if !from_host && paging && (value ^ c.efer) & EFER_LME != 0 {
            return Err(Exception::gp(0));
        }
        // LMA is read-only for the guest.
        let value = (value & !EFER_LMA) | (c.efer & EFER_LMA);
        // No flush: translations that were made without NXE have no NX, and those with it forbid
        // no less than the reserved bit would.
        self.b.set_efer(value);
        self.note_role();
        Ok(())
    }

    /// XSETBV.
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
        let [rax, rcx, rdx] = [RAX, RCX, RDX].map(|i| self.gprs.0[i]);
        let value = (rdx << 32) | (rax & 0xffff_ffff);
        let valid = self.b.cpl() == 0
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
        for bit in [CR4_PSE, CR4_PAE, CR4_PGE, CR4_PCIDE] {
            assert!(flushes(0, bit) && flushes(bit, 0), "{bit:#x}");
        }
        assert!(flushes(0, CR4_SMEP) && !flushes(CR4_SMEP, 0));
        // SMAP, PKE, OSXSAVE, TSD.
        for bit in [1 << 21, 1 << 22, 1 << 18, 1 << 2] {
            assert!(!flushes(0, bit) && !flushes(bit, 0), "{bit:#x}");
        }
    }
}
