//! The stack: PUSH, POP, near CALL, JMP and RET.
//!
//! SDM vol. 1 §6.2: the stack's address size is 64 bits in 64-bit mode and SS.B elsewhere.

use iced_x86::{Code, OpKind};

use crate::descriptor::Branch;
use crate::machine::{Access, Machine, SegReg, Segment, Stop};
use crate::operand::Run;
use crate::register::{RegRef, segment_of, size_mask};

const RSP: usize = 4;
const RBP: usize = 5;

impl<M: Machine> Run<'_, M> {
    /// Bytes of the stack pointer: 2, 4 or 8.
    pub(crate) fn stack_size(&self) -> u8 {
        if self.long() {
            8
        } else if self.m.segment(SegReg::Ss).has(Segment::BIG) {
            4
        } else {
            2
        }
    }

    pub(crate) fn set_stack_pointer(&mut self, value: u64) {
        self.set_reg(RegRef { index: RSP as u8, size: self.stack_size(), high8: false }, value);
    }

    /// Writes `size` bytes below the stack pointer, then moves it.
    pub(crate) fn push(&mut self, value: u64, size: u8) -> Result<(), Stop> {
        // The address before the pointer moves: a push that faults leaves RSP.
        let top = self.m.gpr(RSP).wrapping_sub(u64::from(size)) & size_mask(self.stack_size());
        let at = self.linear(SegReg::Ss, top, size, Access::Store)?;
        self.write(at, size, value, Access::Store)?;
        self.set_stack_pointer(top);
        Ok(())
    }

    /// The value at the stack pointer, which stays.
    fn peek(&mut self, size: u8) -> Result<u64, Stop> {
        self.peek_at(0, size)
    }

    /// The value `by` bytes above the stack pointer.
    pub(crate) fn peek_at(&mut self, by: u64, size: u8) -> Result<u64, Stop> {
        let top = self.m.gpr(RSP).wrapping_add(by) & size_mask(self.stack_size());
        let at = self.linear(SegReg::Ss, top, size, Access::Load)?;
        self.read(at, size, Access::Load)
    }

    pub(crate) fn pop_bytes(&mut self, count: u64) {
        let top = self.m.gpr(RSP).wrapping_add(count);
        self.set_stack_pointer(top);
    }

    /// The operand's bytes on the stack.
    fn stack_operand_size(&self) -> Result<u8, Stop> {
        let bytes = match self.insn.code() {
            Code::Enterw_imm16_imm8 => 2,
            Code::Enterd_imm16_imm8 => 4,
            Code::Enterq_imm16_imm8 => 8,
            _ => self.insn.stack_pointer_increment().unsigned_abs(),
        };
        match bytes {
            size @ (2 | 4 | 8) => Ok(size as u8),
            _ => Err(Stop::Unsupported),
        }
    }

    pub(crate) fn push_operand(&mut self) -> Result<(), Stop> {
        let size = self.stack_operand_size()?;
        // A segment's selector is pushed as a word of the operand's size, its upper part 0.
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
            // The pointer moves last: the store may fault or wait for user space.
            self.pop_bytes(u64::from(size));
            return Ok(());
        }
        let register = self.insn.op0_register();
        if let Some(segment) = segment_of(register) {
            // POP SS moves the stack pointer of the old stack's size.
            let top = self.m.gpr(RSP).wrapping_add(size.into());
            // Taken before the load, which may give SS another size.
            let pointer = RegRef { index: RSP as u8, size: self.stack_size(), high8: false };
            self.load_segment(segment, value as u16)?;
            self.set_reg(pointer, top);
            return Ok(());
        }
        let to = RegRef::of(register).ok_or(Stop::Unsupported)?;
        self.pop_bytes(u64::from(size));
        // POP RSP: the popped value wins.
        self.set_reg(to, value);
        Ok(())
    }

    /// ENTER: SDM vol. 2A. Up to 31 frame pointers are copied; registers change at the end.
    pub(crate) fn enter(&mut self) -> Result<(), Stop> {
        let size = self.stack_operand_size()?;
        // The level is taken modulo 32 (SDM vol. 2A, ENTER).
        let (allocated, level) = (self.insn.immediate16(), self.insn.immediate8_2nd() & 31);
        let mask = size_mask(self.stack_size());
        let step = u64::from(size);
        let frame = RegRef { index: RBP as u8, size, high8: false };
        let mut top = self.m.gpr(RSP).wrapping_sub(step) & mask;
        let last = top.wrapping_sub(u64::from(level).wrapping_mul(step)) & mask;
        let end = last.wrapping_sub(allocated.into()) & mask;
        // The program could not write below the new stack pointer: known now, not at the next push, and before a device has
        // a store. From above, as the stores are: a stack that grows by its guard page does so page by page.
        for offset in [top, last, end] {
            let at = self.linear(SegReg::Ss, offset, size, Access::Store)?;
            self.probe(at, size.into())?;
        }
        let value = self.reg(frame);
        self.store_on_stack(top, value, size)?;
        let new_frame = top;
        let mut from = self.m.gpr(RBP);
        for n in 0..level {
            let value = if n.wrapping_add(1) < level {
                from = from.wrapping_sub(step) & mask;
                let at = self.linear(SegReg::Ss, from, size, Access::Load)?;
                self.read(at, size, Access::Load)?
            } else {
                new_frame
            };
            top = top.wrapping_sub(step) & mask;
            self.store_on_stack(top, value, size)?;
        }
        // All stores are made: a replay after user space's answer finds the registers as they were.
        self.set_reg(frame, new_frame);
        self.set_stack_pointer(end);
        Ok(())
    }

    fn store_on_stack(&mut self, offset: u64, value: u64, size: u8) -> Result<(), Stop> {
        let at = self.linear(SegReg::Ss, offset, size, Access::Store)?;
        self.write(at, size, value, Access::Store)
    }

    /// LEAVE: the stack pointer is the frame's, then the frame's is popped.
    pub(crate) fn leave(&mut self) -> Result<(), Stop> {
        let size = self.leave_size();
        let offset = self.m.gpr(RBP) & size_mask(self.stack_size());
        let at = self.linear(SegReg::Ss, offset, size, Access::Load)?;
        let frame = self.read(at, size, Access::Load)?;
        // Behind the read of the old frame: a fault leaves both registers.
        self.set_stack_pointer(offset.wrapping_add(size.into()));
        self.set_reg(RegRef { index: RBP as u8, size, high8: false }, frame);
        Ok(())
    }

    fn leave_size(&self) -> u8 {
        match self.insn.code() {
            Code::Leavew => 2,
            Code::Leaved => 4,
            _ => 8,
        }
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
        if self.insn.is_call_far_indirect() {
            return self.far(Branch::Call);
        }
        let back = self.next_rip;
        let (target, size) = self.near_target()?;
        // Checked before the push, as in flow: a target out of reach leaves the stack.
        self.branch(target, size)?;
        self.push(back, size)
    }

    pub(crate) fn jmp(&mut self) -> Result<(), Stop> {
        if self.insn.is_jmp_far_indirect() {
            return self.far(Branch::Jmp);
        }
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
