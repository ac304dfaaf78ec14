//! The stack: PUSH, POP, near CALL, JMP and RET.
//!
//! SDM vol. 1 §6.2: the stack's address size is 64 bits in 64-bit mode and SS.B elsewhere.

use iced_x86::{Code, OpKind};

use crate::decode::{RegRef, size_mask};
use crate::machine::{Access, Machine, SegReg, Segment, Stop};
use crate::operand::{Run, segment_of};

const RSP: usize = 4;

impl<M: Machine> Run<'_, M> {
    /// Bytes of the stack pointer: 2, 4 or 8.
    fn stack_size(&self) -> u8 {
        if self.long() {
            8
        } else if self.m.segment(SegReg::Ss).has(Segment::BIG) {
            4
        } else {
            2
        }
    }

    fn set_stack_pointer(&mut self, value: u64) {
        self.set_reg(RegRef { index: RSP as u8, size: self.stack_size(), high8: false }, value);
    }

    /// Writes `size` bytes below the stack pointer, then moves it.
    fn push(&mut self, value: u64, size: u8) -> Result<(), Stop> {
        let top = self.m.gpr(RSP).wrapping_sub(u64::from(size)) & size_mask(self.stack_size());
        let at = self.linear(SegReg::Ss, top, size, Access::Store)?;
        self.write(at, size, value, Access::Store)?;
        self.set_stack_pointer(top);
        Ok(())
    }

    /// The value at the stack pointer, which stays.
    fn peek(&mut self, size: u8) -> Result<u64, Stop> {
        let top = self.m.gpr(RSP) & size_mask(self.stack_size());
        let at = self.linear(SegReg::Ss, top, size, Access::Load)?;
        self.read(at, size, Access::Load)
    }

    fn pop_bytes(&mut self, count: u64) {
        let top = self.m.gpr(RSP).wrapping_add(count);
        self.set_stack_pointer(top);
    }

    /// The operand's bytes on the stack.
    fn stack_operand_size(&self) -> Result<u8, Stop> {
        match self.insn.stack_pointer_increment().unsigned_abs() {
            size @ (2 | 4 | 8) => Ok(size as u8),
            _ => Err(Stop::Unsupported),
        }
    }

    pub(crate) fn push_operand(&mut self) -> Result<(), Stop> {
        let size = self.stack_operand_size()?;
        let value = match segment_of(self.insn.op0_register()) {
            Some(segment) if self.insn.op0_kind() == OpKind::Register => {
                u64::from(self.m.segment(segment).selector)
            }
            _ => self.value(0)?,
        };
        self.push(value, size)
    }

    pub(crate) fn pop_operand(&mut self) -> Result<(), Stop> {
        let size = self.stack_operand_size()?;
        let value = self.peek(size)?;
        if self.insn.op0_kind() == OpKind::Memory {
            // An address based on RSP is computed after the pop (SDM vol. 2B, POP).
            let to = self.memory(size, u64::from(size), 0, Access::Store)?;
            self.store(to, value)?;
            self.pop_bytes(u64::from(size));
            return Ok(());
        }
        let register = self.insn.op0_register();
        if let Some(segment) = segment_of(register) {
            self.load_segment(segment, value as u16)?;
            self.pop_bytes(u64::from(size));
            return Ok(());
        }
        let to = RegRef::of(register).ok_or(Stop::Unsupported)?;
        self.pop_bytes(u64::from(size));
        // POP RSP: the popped value wins.
        self.set_reg(to, value);
        Ok(())
    }

    /// MOV and POP to a segment register; loading SS holds interrupts off for one instruction.
    pub(crate) fn load_segment(&mut self, segment: SegReg, selector: u16) -> Result<(), Stop> {
        self.m.load_segment(segment, selector)?;
        self.interrupt_shadow = segment == SegReg::Ss;
        Ok(())
    }

    /// The target of an indirect near branch and its size.
    fn near_target(&mut self) -> Result<(u64, u8), Stop> {
        // Far pointers have sizes of 4, 6 and 10 bytes; their codes tell them from near ones.
        let near = matches!(
            self.insn.code(),
            Code::Call_rm16
                | Code::Call_rm32
                | Code::Call_rm64
                | Code::Jmp_rm16
                | Code::Jmp_rm32
                | Code::Jmp_rm64
        );
        if !near {
            return Err(Stop::Unsupported);
        }
        let place = self.place(0, Access::Load)?;
        Ok((self.load(place)?, place.size()))
    }

    pub(crate) fn call(&mut self) -> Result<(), Stop> {
        let back = self.next_rip;
        let (target, size) = self.near_target()?;
        self.branch(target, size)?;
        self.push(back, size)
    }

    pub(crate) fn jmp(&mut self) -> Result<(), Stop> {
        let (target, size) = self.near_target()?;
        self.branch(target, size)
    }

    pub(crate) fn ret(&mut self) -> Result<(), Stop> {
        let size = match self.insn.code() {
            Code::Retnw | Code::Retnw_imm16 => 2,
            Code::Retnd | Code::Retnd_imm16 => 4,
            Code::Retnq | Code::Retnq_imm16 => 8,
            _ => return Err(Stop::Unsupported),
        };
        let released = match self.insn.op0_kind() {
            OpKind::Immediate16 if self.insn.op_count() == 1 => self.insn.immediate16(),
            _ => 0,
        };
        let target = self.peek(size)?;
        self.branch(target, size)?;
        self.pop_bytes(u64::from(size).wrapping_add(u64::from(released)));
        Ok(())
    }
}
