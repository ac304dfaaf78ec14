//! The guest's code as the loop looks at it: its size, its bytes at RIP, and where the next instruction
//! begins on CPUs that do not tell.

use backend::{Backend, SegmentName};
use emulate::CodeSize;
use mmu::Section;
use mmu::fetch::CodeMode;
use x86::{Cr0, Efer, Rflags, segment::attr};

use crate::Vcpu;

impl<B: Backend> Vcpu<B> {
    /// Operand and address size of the code segment.
    #[inline]
    pub(crate) fn code_size(&self) -> CodeSize {
        let cs = self.b.code_attributes();
        if self.b.efer() & Efer::LMA.bits() != 0 && cs & attr::L != 0 {
            CodeSize::Bits64
        } else if self.b.cr0() & Cr0::PE.bits() != 0
            && self.b.rflags() & Rflags::VM.bits() == 0
            && cs & attr::DB != 0
        {
            CodeSize::Bits32
        } else {
            CodeSize::Bits16
        }
    }

    /// Linear address of RIP.
    #[inline]
    pub(crate) fn linear_rip(&self) -> u64 {
        self.linear_rip_in(self.code_size())
    }

    #[inline(always)]
    fn linear_rip_in(&self, size: CodeSize) -> u64 {
        let rip = self.b.rip();
        match size {
            CodeSize::Bits64 => rip,
            _ => self.b.segment(SegmentName::Cs).base.wrapping_add(rip) & 0xffff_ffff,
        }
    }

    /// RIP within the code segment's width.
    #[inline]
    pub(crate) fn wrap_rip(&self, rip: u64) -> u64 {
        wrap(self.code_size(), rip)
    }

    /// What a fetch is translated by.
    #[inline(always)]
    fn code_mode(&self) -> CodeMode {
        let c = self.b.control();
        CodeMode { cr0: c.cr0, cr3: c.cr3, cr4: c.cr4, efer: c.efer, cpl: self.b.cpl() }
    }

    /// The eight bytes at RIP, if the page they are in was fetched from before and they all lie in it.
    #[inline(always)]
    pub(crate) fn known_code(&self, s: Section<'_>, size: CodeSize) -> Option<u64> {
        let (rip, mode) = (self.linear_rip_in(size), self.code_mode());
        let view = self.memory.view(s);
        self.fetch.first_bytes(&mode, rip, &view)
    }

    /// Instruction bytes at RIP without sleeping: for the loop. `size`: the code segment's.
    #[inline]
    pub(crate) fn fetch_here(&mut self, s: Section<'_>, size: CodeSize) -> Option<([u8; 16], u8)> {
        let (rip, mode) = (self.linear_rip_in(size), self.code_mode());
        let view = self.memory.view(s);
        let code = match self.fetch.hit(&mode, rip, &view) {
            Some(code) => code,
            None => {
                let context = self.paging();
                self.fetch.fetch(&context, rip, &view)?
            }
        };
        Some((code.bytes, code.len.min(15) as u8))
    }

    /// RIP of the next instruction: from the CPU, or by decoding what lies at RIP.
    #[inline]
    pub(crate) fn next_rip(&mut self, s: Section<'_>) -> Option<u64> {
        match self.b.next_rip() {
            Some(rip) => Some(rip),
            None => self.decode_next_rip(s),
        }
    }

    /// Every exit of such a CPU comes here, and nearly all with code that was fetched before and an
    /// instruction of few bytes.
    #[inline(never)]
    fn decode_next_rip(&mut self, s: Section<'_>) -> Option<u64> {
        let size = self.code_size();
        if let Some(code) = self.known_code(s, size)
            && let Some(length) = emulate::common_length(code, size)
        {
            return Some(wrap(size, self.b.rip().wrapping_add(u64::from(length))));
        }
        self.decode_next_rip_of_any(s)
    }

    #[cold]
    #[inline(never)]
    fn decode_next_rip_of_any(&mut self, s: Section<'_>) -> Option<u64> {
        let size = self.code_size();
        let (bytes, len) = self.fetch_here(s, size)?;
        let length = emulate::length(bytes.get(..usize::from(len))?, size)?;
        Some(wrap(size, self.b.rip().wrapping_add(u64::from(length))))
    }
}

/// `rip` within the width of a code segment.
#[inline(always)]
pub(crate) fn wrap(size: CodeSize, rip: u64) -> u64 {
    match size {
        CodeSize::Bits64 => rip,
        _ => rip & 0xffff_ffff,
    }
}
