//! Instructions of table registers, which exit where CR4.UMIP is made by exits, and while the loads of a guest's
//! hypervisor are watched.
//!
//! A hypervisor executes LGDT and SLDT, and perhaps LLDT, at many of its guest's exits. Inside the loop they are answered by what the
//! CPU tells of the instruction that exited: 64-bit code at CPL 0, a table that lies in one page which is there, a null selector, a
//! store into a register. Whatever else it is, a fault too, is emulated outside.
//!
//! A byte of code is looked at for the stores alone, whose operand size is not told, and only where the register has bits that the size
//! decides about.

use backend::{Backend, Nested, SegmentName, TableAccess};
use emulate::{Cause, CodeSize};
use mmu::{PagingContext, Section, operand};
use x86::{
    Gva,
    segment::{DescriptorTable, Segment},
};

use crate::{
    Vcpu,
    exits::code::CodeState as _,
    run::outcome::{Next, Outcome},
};

/// A REX prefix without any bit, that which makes an operand one of 64 bits, and that which belongs to the register.
const REX: u8 = 0x40;
const REX_W: u8 = 8;
const REX_B: u8 = 1;
/// The prefix that makes an operand one of 16 bits.
const OPERAND_SIZE: u8 = 0x66;

impl<B: Backend> Vcpu<B> {
    /// An instruction that loads or stores a table register, inside the loop.
    #[cold]
    #[inline(never)]
    pub(crate) fn answer_table_access(&mut self, s: Section<'_>) -> Next {
        if self.stops_watching_tables() {
            return Next::Again;
        }
        // Nothing has happened yet: outside it begins anew.
        let Some(next) = self.access_table(s) else { return Next::Leave };
        self.retire(next);
        Next::Again
    }

    /// An instruction that loads or stores a table register, outside.
    pub(crate) fn table_access(&mut self, cause: Cause) -> Outcome {
        if self.stops_watching_tables() {
            return Ok(());
        }
        self.emulate_here(cause)
    }

    /// Whether the exit was for the watch alone, which is over: the instruction is executed again.
    fn stops_watching_tables(&mut self) -> bool {
        self.b.nested_mut().is_some_and(Nested::stops_watching_tables)
    }

    /// Loads or stores a table register and says where the guest goes on. `None`: nothing was done.
    fn access_table(&mut self, s: Section<'_>) -> Option<u64> {
        // L2's memory lies behind tables of L1's.
        if self.pending.after_exit.is_nested() {
            return None;
        }
        let access = self.b.table_access(&self.gprs)?;
        let next = self.next_rip(s)?;
        match access {
            TableAccess::Gdtr(at) => {
                let table = self.table_at(s, at)?;
                self.b.set_gdtr(table);
            }
            TableAccess::Idtr(at) => {
                let table = self.table_at(s, at)?;
                self.b.set_idtr(table);
            }
            TableAccess::Ldtr(selector) => self.load_null_ldtr(selector)?,
            TableAccess::LdtrFrom(at) => {
                let context = self.b.paging_context(&self.cpuid);
                let selector = self.operand_at(s, &context, at)?;
                self.load_null_ldtr(u16::from_le_bytes(selector))?;
            }
            TableAccess::Stored { of, register } => {
                let length = next.wrapping_sub(self.b.rip());
                self.store_selector(s, of, register, length)?;
            }
        }
        Some(next)
    }

    /// Limit and base at this address, if they may be loaded.
    fn table_at(&self, s: Section<'_>, at: Gva) -> Option<DescriptorTable> {
        let context = self.b.paging_context(&self.cpuid);
        let [l, m, a, b, c, d, e, f, g, h] = self.operand_at(s, &context, at)?;
        let limit = u16::from_le_bytes([l, m]);
        let base = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        context.is_canonical(base).then_some(DescriptorTable { base, limit })
    }

    /// Bytes of an instruction's operand, in one page that is there.
    fn operand_at<const N: usize>(
        &self,
        s: Section<'_>,
        context: &PagingContext,
        at: Gva,
    ) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let loaded = operand::load(&self.mmu.memory.view(s), context, at.0, &mut bytes);
        loaded.then_some(bytes)
    }

    /// LLDT of a null selector. Any other names a descriptor in memory.
    fn load_null_ldtr(&mut self, selector: u16) -> Option<()> {
        // Without its RPL.
        if selector & !3 != 0 {
            return None;
        }
        let none = Segment { selector, base: 0, limit: 0, attr: 0 };
        self.b.set_segment(SegmentName::Ldtr, none);
        Some(())
    }

    /// SLDT and STR into a general register, by an instruction of this length. With an operand of 16 bits the others stay; with 32 or 64
    /// they become zero.
    fn store_selector(
        &mut self,
        s: Section<'_>,
        of: SegmentName,
        register: u8,
        length: u64,
    ) -> Option<()> {
        // Sixteen registers.
        let at = usize::from(register) & 15;
        let old = self.gprs.0[at];
        // Where they are zero it comes to the same.
        let keeps = old & !0xffff != 0 && self.stores_16_bits(s, of, register, length)?;
        let kept = if keeps { old & !0xffff } else { 0 };
        self.gprs.0[at] = kept | u64::from(self.b.segment(of).selector);
        Some(())
    }

    /// Whether what lies at RIP is such an instruction with an operand of 16 bits. `None`: it is another by now, or is not to be had.
    #[inline(never)]
    fn stores_16_bits(
        &mut self,
        s: Section<'_>,
        of: SegmentName,
        register: u8,
        length: u64,
    ) -> Option<bool> {
        let (bytes, len) = self.fetch_here(s, CodeSize::Bits64)?;
        let code = bytes.get(..usize::from(len))?.get(..usize::try_from(length).ok()?)?;
        // Whatever stands before the opcode are prefixes: it exited as this instruction.
        let (prefixes, opcode) = code.split_last_chunk::<3>()?;
        // REX counts right before the opcode alone.
        let rex = prefixes.last().copied().filter(|byte| byte & 0xf0 == REX).unwrap_or(REX);
        let extension = if of == SegmentName::Tr { 1 << 3 } else { 0 };
        let expected = [0x0f, 0, 0xc0 | extension | register & 7];
        // See ADR 41: what is done is what made the exit.
        if *opcode != expected || (rex & REX_B != 0) != (register & 8 != 0) {
            return None;
        }
        Some(rex & REX_W == 0 && prefixes.contains(&OPERAND_SIZE))
    }
}
