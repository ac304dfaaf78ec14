//! [`emulate`]: one instruction from start to commit. The groups whose operands are plain are
//! here; exchanges, the stack, strings and system registers have their own files.
//!
//! SDM vol. 2, APM vol. 3 for each instruction.
//!
//! Why nothing is committed before the end: a source is read, an answer of user space may be needed for it, a
//! destination faults. If flags or a register had changed by then, the guest's handler would see half an instruction,
//! and the second attempt would do that half twice. A store that user space has
//! carried out cannot be taken back, so the log of answers knows it, and it is not made again.
//!
//! Why [`emulate`] does less than [`interpret`]: a CPU exits for some instructions only. Any other at RIP was put
//! there after the exit, by another vCPU, and is for the CPU, which checks what it executes (ADR 41).
//! [`interpret`] is for guests in a state that the CPU cannot run at all: there is nobody to give it back to.
//!
//! Why string instructions stop between iterations: one REP may move gigabytes. Interrupts are looked at in between,
//! as on a real CPU, which is why the registers have to be right after each one.

use iced_x86::{ConditionCode, Instruction, Mnemonic, OpKind};
use x86::{Exception, Rflags};

use crate::alu::{self, Begin, BitChange, DoubleShift, Shift};
use crate::decode::Decoded;
use crate::machine::{Access, CodeSize, Machine, SegReg, Stop, Table};
use crate::operand::{Lock, Run, Scope};
use crate::register::{RegRef, segment_of, size_mask};
use crate::system::Aligned;

/// How far emulation came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The instruction is complete.
    Done,
    /// Some iterations of a REP string instruction are complete and more remain; RIP is still at
    /// the instruction. Look for interrupts, then enter the guest or emulate again.
    Continue,
}

/// The state to commit after [`emulate`]; general registers are set already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// RIP after the instruction.
    pub rip: u64,
    /// New RFLAGS; RF is clear once the instruction is complete, and set before. A set TF is the caller's to
    /// turn into #DB, after an iteration too.
    pub rflags: Rflags,
    /// Interrupts are held off until after the next instruction (MOV SS, POP SS).
    pub interrupt_shadow: bool,
    /// Complete, or between two iterations.
    pub outcome: Outcome,
}

/// Executes `insn` on `m`. See the crate's documentation for the replay protocol.
///
/// # Errors
/// [`Stop`] says why the instruction did not complete. Iterations of a REP string instruction that
/// completed before have set their registers and called [`Machine::commit`]; nothing else changed.
pub fn emulate<M: Machine>(m: &mut M, insn: &Decoded) -> Result<Completion, Stop> {
    run(m, insn, Scope::Exits)
}

/// Executes `insn` on `m` like [`emulate`], and the instructions too that no exit is made for: those of a
/// guest in a state that the CPU cannot run.
///
/// # Errors
/// As [`emulate`].
pub fn interpret<M: Machine>(m: &mut M, insn: &Decoded) -> Result<Completion, Stop> {
    run(m, insn, Scope::All)
}

/// Has a guest in real mode take an event of `vector` at its RIP.
///
/// # Errors
/// [`Stop`]; nothing has changed then but memory below the stack pointer.
pub fn deliver<M: Machine>(m: &mut M, vector: u8) -> Result<Completion, Stop> {
    let (size, flags, rip) = (m.code_size(), m.rflags(), m.rip());
    let insn = Instruction::default();
    let interrupt_shadow = false;
    let mut run =
        Run { m, insn: &insn, size, flags, next_rip: rip, interrupt_shadow, scope: Scope::All };
    run.interrupt(vector, rip)?;
    Ok(Completion {
        rip: run.next_rip,
        rflags: run.flags,
        interrupt_shadow: false,
        outcome: Outcome::Done,
    })
}

fn run<M: Machine>(m: &mut M, insn: &Decoded, scope: Scope) -> Result<Completion, Stop> {
    let size = m.code_size();
    let flags = m.rflags();
    let rip = m.rip();
    let next = rip.wrapping_add(u64::from(insn.len()));
    // RIP has 32 bits outside of 64-bit mode, and wraps there.
    let next_rip = if size == CodeSize::Bits64 { next } else { next & 0xffff_ffff };
    let interrupt_shadow = false;
    let mut run = Run { m, insn: &insn.insn, size, flags, next_rip, interrupt_shadow, scope };
    // Apart: they alone can be done in part.
    let outcome = if insn.insn.is_string_instruction() {
        run.string()?
    } else {
        run.execute()?;
        Outcome::Done
    };
    Ok(match outcome {
        Outcome::Done => Completion {
            rip: run.next_rip,
            // RF holds for one instruction (SDM vol. 3B §17.3.1.1).
            rflags: run.flags - Rflags::RF,
            interrupt_shadow: run.interrupt_shadow,
            outcome,
        },
        Outcome::Continue => {
            // Not complete. What comes between two iterations finds RF set, so that a breakpoint before the instruction is
            // not met again (SDM vol. 3B §18.3.1.1).
            let rflags = run.flags | Rflags::RF;
            Completion { rip, rflags, interrupt_shadow: false, outcome }
        }
    })
}

impl<M: Machine> Run<'_, M> {
    fn execute(&mut self) -> Result<(), Stop> {
        use Mnemonic as I;
        // Only where nobody else can execute them; see the file's head.
        if self.scope == Scope::All && self.flow()? {
            return Ok(());
        }
        match self.insn.mnemonic() {
            I::Mov => self.mov(),
            I::Movnti | I::Movzx => self.copy(|value, _| value),
            I::Movsx | I::Movsxd => self.copy(Self::signed),
            I::Movbe => self.copy(|value, size| match size {
                2 => u64::from((value as u16).swap_bytes()),
                4 => u64::from((value as u32).swap_bytes()),
                _ => value.swap_bytes(),
            }),
            I::Lea => self.lea(),
            I::Xlatb => self.xlat(),

            I::Add => self.binary(Rflags::STATUS, |s, a, b, _| alu::add(s, a, b, false)),
            I::Adc => {
                self.binary(Rflags::STATUS, |s, a, b, f| alu::add(s, a, b, f.contains(Rflags::CF)))
            }
            I::Sub => self.binary(Rflags::STATUS, |s, a, b, _| alu::sub(s, a, b, false)),
            I::Sbb => {
                self.binary(Rflags::STATUS, |s, a, b, f| alu::sub(s, a, b, f.contains(Rflags::CF)))
            }
            I::And => self.binary(Rflags::STATUS, |s, a, b, _| alu::logic(s, a & b)),
            I::Or => self.binary(Rflags::STATUS, |s, a, b, _| alu::logic(s, a | b)),
            I::Xor => self.binary(Rflags::STATUS, |s, a, b, _| alu::logic(s, a ^ b)),
            I::Cmp => self.compare(|s, a, b| alu::sub(s, a, b, false)),
            I::Test => self.compare(|s, a, b| alu::logic(s, a & b)),
            // INC and DEC leave the carry, for loops of multi-word arithmetic.
            I::Inc => self.unary(Rflags::STATUS - Rflags::CF, |s, a| alu::add(s, a, 1, false)),
            I::Dec => self.unary(Rflags::STATUS - Rflags::CF, |s, a| alu::sub(s, a, 1, false)),
            I::Neg => self.unary(Rflags::STATUS, |s, a| alu::sub(s, 0, a, false)),
            I::Not => self.unary(Rflags::empty(), |_, a| (!a, Rflags::empty())),

            I::Rol => self.shift(Shift::Rol),
            I::Ror => self.shift(Shift::Ror),
            I::Rcl => self.shift(Shift::Rcl),
            I::Rcr => self.shift(Shift::Rcr),
            I::Shl | I::Sal => self.shift(Shift::Shl),
            I::Shr => self.shift(Shift::Shr),
            I::Sar => self.shift(Shift::Sar),
            I::Shld => self.double_shift(DoubleShift::Left),
            I::Shrd => self.double_shift(DoubleShift::Right),

            I::Bt => self.bit_test(None),
            I::Bts => self.bit_test(Some(BitChange::Set)),
            I::Btr => self.bit_test(Some(BitChange::Reset)),
            I::Btc => self.bit_test(Some(BitChange::Complement)),
            I::Bsf => self.bit_scan(Begin::Lowest),
            I::Bsr => self.bit_scan(Begin::Highest),
            I::Tzcnt => self.count(|s, a, f| {
                let result = alu::count_zeros(s, a, Begin::Lowest);
                (result, alu::zero_count_flags(s, a, result, f))
            }),
            I::Lzcnt => self.count(|s, a, f| {
                let result = alu::count_zeros(s, a, Begin::Highest);
                (result, alu::zero_count_flags(s, a, result, f))
            }),
            I::Popcnt => self.count(|s, a, f| {
                let a = a & size_mask(s);
                let zero = if a == 0 { Rflags::ZF } else { Rflags::empty() };
                (u64::from(a.count_ones()), (f - Rflags::STATUS) | zero)
            }),

            I::Mul => self.widening_multiply(alu::mul),
            I::Imul => self.imul(),
            I::Div => self.divide(alu::div),
            I::Idiv => self.divide(alu::idiv),

            I::Xchg => self.xchg(),
            I::Xadd => self.xadd(),
            I::Cmpxchg => self.cmpxchg(),
            I::Cmpxchg8b => self.cmpxchg_pair(4),
            I::Cmpxchg16b => self.cmpxchg_pair(8),

            I::Push => self.push_operand(),
            I::Pop => self.pop_operand(),
            I::Call => self.call(),
            I::Jmp => self.jmp(),
            I::Ret => self.ret(),
            I::Retf => self.far_return(),
            I::Enter => self.enter(),
            I::Leave => self.leave(),

            I::Lldt => self.load_system(SegReg::Ldtr),
            I::Ltr => self.load_system(SegReg::Tr),
            I::Sldt => self.store_system(SegReg::Ldtr),
            I::Str => self.store_system(SegReg::Tr),
            I::Lgdt => self.load_table(Table::Global),
            I::Lidt => self.load_table(Table::Interrupt),
            I::Sgdt => self.store_table(Table::Global),
            I::Sidt => self.store_table(Table::Interrupt),

            I::In => self.port_in(),
            I::Out => self.port_out(),

            // Hints; they do not fault on what they name.
            I::Nop | I::Prefetch | I::Prefetchw | I::Prefetchwt1 => Ok(()),
            I::Prefetchnta | I::Prefetcht0 | I::Prefetcht1 | I::Prefetcht2 => Ok(()),
            // A device has no cache lines, and RAM stays coherent.
            I::Clflush | I::Clflushopt | I::Clwb | I::Cldemote => Ok(()),

            I::Smsw => self.smsw(),
            I::Lmsw => self.lmsw(),
            I::Clts => self.clts(),
            I::Invlpg => self.invlpg(),
            I::Invpcid => self.invpcid(),

            I::Movups | I::Movupd | I::Movdqu | I::Lddqu => self.vector_move(16, Aligned::Any),
            I::Movaps | I::Movapd | I::Movdqa => self.vector_move(16, Aligned::To16),
            I::Movntps | I::Movntpd | I::Movntdq | I::Movntdqa => {
                self.vector_move(16, Aligned::To16)
            }
            I::Movntq => self.vector_move(8, Aligned::Any),
            I::Movd => self.vector_move(4, Aligned::Any),
            I::Movq => self.vector_move(8, Aligned::Any),

            _ => match self.insn.condition_code() {
                ConditionCode::None => Err(Stop::Unsupported),
                code => self.conditional((code as u8).wrapping_sub(ConditionCode::o as u8)),
            },
        }
    }

    fn mov(&mut self) -> Result<(), Stop> {
        let (to, from) = (self.insn.op0_register(), self.insn.op1_register());
        if self.insn.op0_kind() == OpKind::Register && RegRef::of(to).is_none() {
            return match segment_of(to) {
                Some(segment) => {
                    let selector = self.selector_operand()?;
                    self.load_segment(segment, selector)
                }
                None => self.mov_to_system(to),
            };
        }
        if self.insn.op1_kind() == OpKind::Register && RegRef::of(from).is_none() {
            return match segment_of(from) {
                Some(segment) => {
                    let to = self.place(0, Access::Store)?;
                    let selector = u64::from(self.m.segment(segment).selector);
                    self.store(to, selector)
                }
                None => self.mov_from_system(from),
            };
        }
        self.copy(|value, _| value)
    }

    /// Operand 0 becomes operand 1, converted from its size.
    fn copy(&mut self, convert: impl Fn(u64, u8) -> u64) -> Result<(), Stop> {
        // The source first, and whole: a load that waits for user space must find the destination
        // unchanged.
        if self.insn.op1_kind() == OpKind::Memory {
            let from = self.place(1, Access::Load)?;
            let value = self.load(from)?;
            let to = self.place(0, Access::Store)?;
            return self.store(to, convert(value, from.size()));
        }
        let to = self.place(0, Access::Store)?;
        let size = match self.insn.op1_kind() {
            OpKind::Register => self.place(1, Access::Load)?.size(),
            _ => to.size(),
        };
        let value = self.value(1)?;
        self.store(to, convert(value, size))
    }

    fn lea(&mut self) -> Result<(), Stop> {
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        // No segment and no check: an address is computed, and nothing is accessed.
        let offset = self.effective_offset(0, 0);
        self.set_reg(to, offset);
        Ok(())
    }

    fn xlat(&mut self) -> Result<(), Stop> {
        let from = self.memory(1, 0, 0, Access::Load)?;
        let value = self.load(from)?;
        self.set_reg(RegRef { index: 0, size: 1, high8: false }, value);
        Ok(())
    }

    fn binary(
        &mut self,
        mask: Rflags,
        operation: impl Fn(u8, u64, u64, Rflags) -> alu::Flagged,
    ) -> Result<(), Stop> {
        let b = match self.insn.op1_kind() {
            OpKind::Memory => {
                let from = self.place(1, Access::Load)?;
                self.load(from)?
            }
            _ => self.value(1)?,
        };
        // The place is asked for after the source was read: it faults as a write, and the source's
        // fault comes first.
        let to = self.place(0, Access::Modify)?;
        let (size, flags) = (to.size(), self.flags);
        let a = self.modify(to, Lock::IfPrefixed, |a| operation(size, a, b, flags).0)?;
        // Computed again from what was replaced: another CPU may have changed it between the first
        // read and a locked exchange.
        self.set_flags(mask, operation(size, a, b, flags).1);
        Ok(())
    }

    fn compare(&mut self, operation: impl Fn(u8, u64, u64) -> alu::Flagged) -> Result<(), Stop> {
        let first = self.place(0, Access::Load)?;
        let a = self.load(first)?;
        // The first operand is read before: a CMP whose both operands lie in memory there is not.
        let b = self.value(1)?;
        self.set_flags(Rflags::STATUS, operation(first.size(), a, b).1);
        Ok(())
    }

    fn unary(
        &mut self,
        mask: Rflags,
        operation: impl Fn(u8, u64) -> alu::Flagged,
    ) -> Result<(), Stop> {
        let to = self.place(0, Access::Modify)?;
        let size = to.size();
        let a = self.modify(to, Lock::IfPrefixed, |a| operation(size, a).0)?;
        self.set_flags(mask, operation(size, a).1);
        Ok(())
    }

    fn shift(&mut self, kind: Shift) -> Result<(), Stop> {
        let count = self.value(1)? as u8;
        let to = self.place(0, Access::Modify)?;
        let (size, flags) = (to.size(), self.flags);
        let a = self.modify(to, Lock::IfPrefixed, |a| alu::shift(kind, size, a, count, flags).0)?;
        // From what was replaced, as in binary().
        self.flags = alu::shift(kind, size, a, count, flags).1;
        Ok(())
    }

    fn double_shift(&mut self, kind: DoubleShift) -> Result<(), Stop> {
        let fill = self.value(1)?;
        let count = self.value(2)? as u8;
        let to = self.place(0, Access::Modify)?;
        let (size, flags) = (to.size(), self.flags);
        let operation = |a| alu::double_shift(kind, size, a, fill, count, flags);
        let a = self.modify(to, Lock::IfPrefixed, |a| operation(a).0)?;
        self.flags = operation(a).1;
        Ok(())
    }

    fn bit_test(&mut self, change: Option<BitChange>) -> Result<(), Stop> {
        let how = if change.is_some() { Access::Modify } else { Access::Load };
        let offset = self.value(1)?;
        let to = match (self.insn.op0_kind(), self.insn.op1_kind()) {
            (OpKind::Memory, OpKind::Register) => {
                // A register's offset reaches beyond the operand, to both sides.
                let size = self.memory_bytes()?;
                // The index of the operand-sized element, rounded towards minus infinity.
                let element =
                    (Self::signed(offset, size) as i64) >> size.trailing_zeros().wrapping_add(3);
                self.memory(size, 0, element.wrapping_mul(i64::from(size)) as u64, how)?
            }
            _ => self.place(0, how)?,
        };
        let size = to.size();
        let a = match change {
            Some(change) => {
                self.modify(to, Lock::IfPrefixed, |a| alu::bit_change(size, a, offset, change))?
            }
            None => self.load(to)?,
        };
        self.flags = alu::bit_test(size, a, offset, self.flags);
        Ok(())
    }

    /// BSF and BSR.
    fn bit_scan(&mut self, begin: Begin) -> Result<(), Stop> {
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        let source = self.value(1)? & size_mask(to.size);
        if source == 0 {
            // The destination keeps its value (APM vol. 3, BSF).
            self.set_flags(Rflags::ZF, Rflags::ZF);
            return Ok(());
        }
        let found = match begin {
            Begin::Highest => 63 ^ source.leading_zeros(),
            Begin::Lowest => source.trailing_zeros(),
        };
        self.set_flags(Rflags::ZF, Rflags::empty());
        self.set_reg(to, u64::from(found));
        Ok(())
    }

    fn count(&mut self, operation: impl Fn(u8, u64, Rflags) -> alu::Flagged) -> Result<(), Stop> {
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        let source = self.value(1)?;
        let (result, flags) = operation(to.size, source, self.flags);
        self.set_reg(to, result);
        self.flags = flags;
        Ok(())
    }

    /// The accumulator's low and high half for operands of `size` bytes: AL and AH, or rAX and rDX.
    fn halves(size: u8) -> (RegRef, RegRef) {
        let low = RegRef { index: 0, size, high8: false };
        match size {
            1 => (low, RegRef { index: 0, size, high8: true }),
            _ => (low, RegRef { index: 2, size, high8: false }),
        }
    }

    fn widening_multiply(
        &mut self,
        operation: impl Fn(u8, u64, u64) -> (u64, u64, Rflags),
    ) -> Result<(), Stop> {
        let from = self.place(0, Access::Load)?;
        let b = self.load(from)?;
        let (low, high) = Self::halves(from.size());
        let (low_value, high_value, flags) = operation(from.size(), self.reg(low), b);
        self.set_reg(low, low_value);
        self.set_reg(high, high_value);
        self.set_flags(Rflags::CF | Rflags::OF, flags);
        Ok(())
    }

    fn imul(&mut self) -> Result<(), Stop> {
        let operands = self.insn.op_count();
        if operands == 1 {
            return self.widening_multiply(alu::imul);
        }
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        let b = self.value(1)?;
        let a = if operands == 2 { self.reg(to) } else { self.value(2)? };
        let (low, _, flags) = alu::imul(to.size, a, b);
        self.set_reg(to, low);
        self.set_flags(Rflags::CF | Rflags::OF, flags);
        Ok(())
    }

    fn divide(
        &mut self,
        operation: impl Fn(u8, u64, u64, u64) -> Option<(u64, u64)>,
    ) -> Result<(), Stop> {
        let from = self.place(0, Access::Load)?;
        let divisor = self.load(from)?;
        let (low, high) = Self::halves(from.size());
        // Nothing was written before: #DE finds both registers as they were.
        let (quotient, remainder) = operation(from.size(), self.reg(high), self.reg(low), divisor)
            .ok_or(Stop::Fault(Exception::de()))?;
        self.set_reg(low, quotient);
        self.set_reg(high, remainder);
        Ok(())
    }

    /// SETcc and CMOVcc; conditional jumps touch no memory and are not emulated.
    fn conditional(&mut self, code: u8) -> Result<(), Stop> {
        let holds = alu::condition(code, self.flags);
        if self.insn.op_count() == 1 {
            if matches!(
                self.insn.op0_kind(),
                OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
            ) {
                return Err(Stop::Unsupported);
            }
            let to = self.place(0, Access::Store)?;
            return self.store(to, u64::from(holds));
        }
        // The source is read and a 32-bit destination's upper half cleared in any case.
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        // A CMOV whose condition fails faults all the same (SDM vol. 2A, CMOVcc).
        let value = self.value(1)?;
        // Written in any case: with 32-bit operands the upper half is cleared even so.
        let value = if holds { value } else { self.reg(to) };
        self.set_reg(to, value);
        Ok(())
    }
}
