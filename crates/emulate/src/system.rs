//! System registers as operands (MOV to and from CR and DR, SMSW, LMSW, CLTS) and the vector moves
//! that memory copies are made of.
//!
//! SDM vol. 2, MOV—Move to/from Control Registers; APM vol. 2 §3.1.

use iced_x86::{OpKind, Register};
use x86::{Cr0, Cr4, Exception};

use crate::machine::{Access, Machine, Stop};
use crate::operand::{Place, Run, to_page_end};
use crate::register::RegRef;
use crate::x87::STATUS_ERROR;

/// What LMSW may change; PE it can only set.
const LMSW: Cr0 = Cr0::PE.union(Cr0::MP).union(Cr0::EM).union(Cr0::TS);

enum System {
    Control(u8),
    Debug(u8),
}

fn system_of(register: Register) -> Option<System> {
    let n = register as u32;
    let in_run = |first: Register| n.checked_sub(first as u32).filter(|n| *n < 16);
    in_run(Register::CR0)
        .map(|n| System::Control(n as u8))
        .or_else(|| in_run(Register::DR0).map(|n| System::Debug(n as u8)))
}

fn xmm_of(register: Register) -> Option<u8> {
    let n = (register as u32).checked_sub(Register::XMM0 as u32)?;
    (n < 16).then_some(n as u8)
}

fn mm_of(register: Register) -> Option<u8> {
    let n = (register as u32).checked_sub(Register::MM0 as u32)?;
    (n < 8).then_some(n as u8)
}

/// What an SSE instruction wants of the address of its operand in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aligned {
    /// Any address will do.
    Any,
    /// A multiple of 16; #GP otherwise.
    To16,
}

impl<M: Machine> Run<'_, M> {
    pub(crate) fn mov_to_system(&mut self, to: Register) -> Result<(), Stop> {
        let to = system_of(to).ok_or(Stop::Unsupported)?;
        // Before the operand: registers alone, but #GP comes before what the new value would raise.
        self.privileged()?;
        let value = self.value(1)?;
        match to {
            System::Control(n) => self.m.write_cr(n, value),
            System::Debug(n) => self.m.write_dr(n, value),
        }
    }

    pub(crate) fn mov_from_system(&mut self, from: Register) -> Result<(), Stop> {
        let from = system_of(from).ok_or(Stop::Unsupported)?;
        self.privileged()?;
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        let value = match from {
            System::Control(n) => self.m.read_cr(n)?,
            System::Debug(n) => self.m.read_dr(n)?,
        };
        self.set_reg(to, value);
        Ok(())
    }

    pub(crate) fn smsw(&mut self) -> Result<(), Stop> {
        self.umip()?;
        let to = self.place(0, Access::Store)?;
        let value = self.m.cr0().bits();
        self.store(to, value)
    }

    pub(crate) fn lmsw(&mut self) -> Result<(), Stop> {
        self.privileged()?;
        let value = Cr0::from_bits_retain(self.value(0)?) & LMSW;
        let cr0 = self.m.cr0();
        // LMSW cannot leave protected mode.
        let new = (cr0 - LMSW) | value | (cr0 & Cr0::PE);
        // By a way of its own: an SVM hypervisor may ask for LMSW apart from MOV.
        self.m.lmsw(new.bits())
    }

    pub(crate) fn clts(&mut self) -> Result<(), Stop> {
        self.privileged()?;
        let cr0 = self.m.cr0();
        self.m.write_cr(0, (cr0 - Cr0::TS).bits())
    }

    /// SSE moves of `size` bytes between XMM and memory or another register.
    pub(crate) fn vector_move(&mut self, size: u8, aligned: Aligned) -> Result<(), Stop> {
        let (op0, op1) = (self.insn.op0_kind(), self.insn.op1_kind());
        let to = xmm_of(self.insn.op0_register());
        let from = xmm_of(self.insn.op1_register());
        let cr0 = self.m.cr0();
        // First: the mnemonics are shared, and the checks differ.
        if let Some(done) = self.mmx_move(size)? {
            return Ok(done);
        }
        match (op0, op1, to, from) {
            (OpKind::Register, OpKind::Memory, Some(to), _) => {
                // #UD and #NM before the memory operand is looked at.
                self.vector_usable(cr0)?;
                let at = self.vector_place(size, aligned, Access::Load)?;
                let value = self.vector_load(at, size)?;
                self.m.set_xmm(to, value)
            }
            (OpKind::Memory, OpKind::Register, _, Some(from)) => {
                self.vector_usable(cr0)?;
                let value = self.m.xmm(from)?;
                let at = self.vector_place(size, aligned, Access::Store)?;
                self.vector_store(at, size, value)
            }
            _ => Err(Stop::Unsupported),
        }
    }

    /// MMX moves between a register and memory; `None` for all others.
    fn mmx_move(&mut self, size: u8) -> Result<Option<()>, Stop> {
        match (self.insn.op0_kind(), self.insn.op1_kind()) {
            (OpKind::Register, OpKind::Memory) => {
                let Some(to) = mm_of(self.insn.op0_register()) else { return Ok(None) };
                self.mmx_usable()?;
                let at = self.vector_place(size, Aligned::Any, Access::Load)?;
                let value = self.read(at, size, Access::Load)?;
                self.m.set_mm(to, value)?;
            }
            (OpKind::Memory, OpKind::Register) => {
                let Some(from) = mm_of(self.insn.op1_register()) else { return Ok(None) };
                self.mmx_usable()?;
                let at = self.vector_place(size, Aligned::Any, Access::Store)?;
                // A look at the register puts the x87 unit into MMX's state, which a fault does not.
                self.probe(at, size.into())?;
                let value = self.m.mm(from)?;
                self.write(at, size, value, Access::Store)?;
            }
            _ => return Ok(None),
        }
        Ok(Some(()))
    }

    fn mmx_usable(&mut self) -> Result<(), Stop> {
        let cr0 = self.m.cr0();
        if cr0.contains(Cr0::EM) {
            return Err(Stop::Fault(Exception::ud()));
        }
        if cr0.contains(Cr0::TS) {
            return Err(Stop::Fault(Exception::nm()));
        }
        // An exception of the x87 unit that waits comes before a fault of the operand (SDM vol. 3A table 6-2).
        let [_, status] = self.m.x87_words()?;
        if status & STATUS_ERROR != 0 { Err(Stop::Fault(Exception::mf())) } else { Ok(()) }
    }

    fn vector_usable(&self, cr0: Cr0) -> Result<(), Stop> {
        // In the manual's order: #UD goes before #NM.
        if cr0.contains(Cr0::EM) || !self.m.cr4().contains(Cr4::OSFXSR) {
            return Err(Stop::Fault(Exception::ud()));
        }
        if cr0.contains(Cr0::TS) {
            return Err(Stop::Fault(Exception::nm()));
        }
        Ok(())
    }

    pub(crate) fn vector_place(
        &self,
        size: u8,
        aligned: Aligned,
        how: Access,
    ) -> Result<u64, Stop> {
        let Place::Mem { at, .. } = self.memory(size, 0, 0, how)? else {
            return Err(Stop::Unsupported);
        };
        // #GP, also where AC is set: alignment is the instruction's own.
        if aligned == Aligned::To16 && at & 15 != 0 {
            return Err(Stop::Fault(Exception::gp(0)));
        }
        Ok(at)
    }

    pub(crate) fn vector_load(&mut self, at: u64, size: u8) -> Result<u128, Stop> {
        let low = self.read(at, size.min(8), Access::Load)?;
        if size <= 8 {
            return Ok(u128::from(low));
        }
        let high = self.read(self.after(at, 8), 8, Access::Load)?;
        Ok(u128::from(low) | u128::from(high) << 64)
    }

    fn vector_store(&mut self, at: u64, size: u8, value: u128) -> Result<(), Stop> {
        // Both pages first: 16 bytes are two writes here, and none may be made if one cannot.
        if size > 8 && usize::from(size) > to_page_end(at) {
            self.probe(at, usize::from(size))?;
        }
        self.write(at, size.min(8), value as u64, Access::Store)?;
        if size > 8 {
            self.write(self.after(at, 8), 8, (value >> 64) as u64, Access::Store)?;
        }
        Ok(())
    }
}
