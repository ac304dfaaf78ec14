//! What no exit is made for: branches, flags, interrupts. A guest needs them of the emulator only in a
//! state that the CPU cannot run, which is real mode and the way out of it under VMX without
//! unrestricted guests: see [`interpret`](crate::interpret).
//!
//! SDM vol. 2 for each instruction; vol. 3B §22.1.4 (interrupts in real mode).

use iced_x86::{Code, ConditionCode, Mnemonic, OpKind};
use x86::{Exception, Rflags};

use crate::alu;
use crate::decode::Decoded;
use crate::descriptor::Branch;
use crate::machine::{Machine, SegReg, Stop, Table};
use crate::operand::Run;
use crate::register::{RegRef, sign_extend, size_mask};

const RSP: usize = 4;
/// What LAHF and SAHF move.
const IN_AH: Rflags = Rflags::STATUS.difference(Rflags::OF);

/// An instruction that only the vCPU can execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Outside {
    Cpuid,
    Rdmsr,
    Wrmsr,
    Rdtsc,
    Hlt,
    Hypercall,
    /// WBINVD, WBNOINVD and INVD, which do nothing here and are privileged.
    Nothing,
    /// PAUSE, which anybody may execute.
    Pause,
    Xsetbv,
    Rsm,
    /// UD2 and its like.
    Undefined,
}

impl Decoded {
    /// What it is, if the emulator has no part in it.
    pub fn outside(&self) -> Option<Outside> {
        use Mnemonic as I;
        Some(match self.insn.mnemonic() {
            I::Cpuid => Outside::Cpuid,
            I::Rdmsr => Outside::Rdmsr,
            I::Wrmsr => Outside::Wrmsr,
            I::Rdtsc => Outside::Rdtsc,
            I::Hlt => Outside::Hlt,
            I::Vmcall | I::Vmmcall => Outside::Hypercall,
            I::Wbinvd | I::Wbnoinvd | I::Invd => Outside::Nothing,
            I::Pause => Outside::Pause,
            I::Xsetbv => Outside::Xsetbv,
            I::Rsm => Outside::Rsm,
            I::Ud0 | I::Ud1 | I::Ud2 => Outside::Undefined,
            _ => return None,
        })
    }

    /// Whether the instruction is the one that holds interrupts off and no trap of a single step: STI.
    pub fn is_sti(&self) -> bool {
        self.insn.mnemonic() == Mnemonic::Sti
    }

    /// Whether the instruction is one that enters a handler, which clears TF and takes the trap of its own step away.
    pub fn is_software_interrupt(&self) -> bool {
        matches!(self.insn.mnemonic(), Mnemonic::Int | Mnemonic::Int3 | Mnemonic::Into)
    }

    /// Whether the instruction ends the handling of an NMI.
    pub fn is_iret(&self) -> bool {
        matches!(self.insn.mnemonic(), Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq)
    }
}

impl<M: Machine> Run<'_, M> {
    /// Executes the instruction, if it is one of these.
    pub(crate) fn flow(&mut self) -> Result<bool, Stop> {
        use Mnemonic as I;
        match self.insn.mnemonic() {
            I::Jmp => return self.direct(Branch::Jmp),
            I::Call => return self.direct(Branch::Call),
            I::Loop | I::Loope | I::Loopne => self.count_down()?,
            I::Jcxz => self.jump_if_zero(2)?,
            I::Jecxz => self.jump_if_zero(4)?,
            I::Jrcxz => self.jump_if_zero(8)?,
            I::Clc => self.flags -= Rflags::CF,
            I::Stc => self.flags |= Rflags::CF,
            I::Cmc => self.flags ^= Rflags::CF,
            I::Cld => self.flags -= Rflags::DF,
            I::Std => self.flags |= Rflags::DF,
            I::Cli => {
                self.check_iopl()?;
                self.flags -= Rflags::IF;
            }
            I::Sti => {
                self.check_iopl()?;
                // Only an STI that turns interrupts on holds them off for one instruction (SDM vol.
                // 2B, STI).
                self.interrupt_shadow = !self.flags.contains(Rflags::IF);
                self.flags |= Rflags::IF;
            }
            I::Lahf => self.set_reg(AH, ((self.flags & IN_AH) | Rflags::FIXED).bits()),
            I::Sahf => self.set_flags(IN_AH, Rflags::from_bits_retain(self.reg(AH))),
            I::Pushf | I::Pushfd | I::Pushfq => self.push_flags()?,
            I::Popf | I::Popfd | I::Popfq => self.pop_flags()?,
            I::Pusha => self.push_all(2)?,
            I::Pushad => self.push_all(4)?,
            I::Popa => self.pop_all(2)?,
            I::Popad => self.pop_all(4)?,
            I::Lds => self.load_pointer(SegReg::Ds)?,
            I::Les => self.load_pointer(SegReg::Es)?,
            I::Lfs => self.load_pointer(SegReg::Fs)?,
            I::Lgs => self.load_pointer(SegReg::Gs)?,
            I::Lss => self.load_pointer(SegReg::Ss)?,
            I::Cbw => self.widen(1),
            I::Cwde => self.widen(2),
            I::Cdqe => self.widen(4),
            I::Cwd => self.spread(2),
            I::Cdq => self.spread(4),
            I::Cqo => self.spread(8),
            I::Bswap => self.swap_bytes()?,
            I::Int => self.software_interrupt(self.insn.immediate8())?,
            I::Int3 => self.software_interrupt(3)?,
            I::Into if self.flags.contains(Rflags::OF) => self.software_interrupt(4)?,
            I::Into => {}
            I::Iret => self.interrupt_return(2)?,
            I::Iretd => self.interrupt_return(4)?,
            _ => return Ok(self.decimal()? || self.x87()? || self.conditional_jump()?),
        }
        Ok(true)
    }

    /// The target of a branch that the instruction itself names, and its size.
    fn direct_target(&self) -> Option<(u64, u8)> {
        // Decoded with the instruction at 0: what is there is relative to RIP.
        let (offset, size) = match self.insn.op0_kind() {
            OpKind::NearBranch16 => (u64::from(self.insn.near_branch16()), 2),
            OpKind::NearBranch32 => (u64::from(self.insn.near_branch32()), 4),
            OpKind::NearBranch64 => (self.insn.near_branch64(), 8),
            _ => return None,
        };
        Some((self.m.rip().wrapping_add(offset), size))
    }

    fn direct(&mut self, kind: Branch) -> Result<bool, Stop> {
        if let Some((target, size)) = self.direct_target() {
            let back = self.next_rip;
            // Checked before the push: a CALL whose target is out of reach leaves the stack as it
            // is.
            self.branch(target, size)?;
            if kind == Branch::Call {
                self.push(back, size)?;
            }
            return Ok(true);
        }
        let (offset, size) = match self.insn.op0_kind() {
            OpKind::FarBranch16 => (u64::from(self.insn.far_branch16()), 2),
            OpKind::FarBranch32 => (u64::from(self.insn.far_branch32()), 4),
            _ => return Ok(false),
        };
        self.far_transfer(self.insn.far_branch_selector(), offset, size, kind)?;
        Ok(true)
    }

    fn conditional_jump(&mut self) -> Result<bool, Stop> {
        let code = self.insn.condition_code();
        let Some((target, size)) = self.direct_target() else { return Ok(false) };
        if code == ConditionCode::None {
            return Ok(false);
        }
        let code = (code as u8).wrapping_sub(ConditionCode::o as u8);
        if alu::condition(code, self.flags) {
            self.branch(target, size)?;
        }
        Ok(true)
    }

    fn counter(size: u8) -> RegRef {
        RegRef { index: 1, size, high8: false }
    }

    fn jump_if_zero(&mut self, size: u8) -> Result<(), Stop> {
        let Some((target, width)) = self.direct_target() else { return Err(Stop::Unsupported) };
        if self.reg(Self::counter(size)) == 0 { self.branch(target, width) } else { Ok(()) }
    }

    /// LOOP, LOOPE and LOOPNE.
    fn count_down(&mut self) -> Result<(), Stop> {
        let size = match self.insn.code() {
            Code::Loop_rel8_16_CX
            | Code::Loop_rel8_32_CX
            | Code::Loope_rel8_16_CX
            | Code::Loope_rel8_32_CX
            | Code::Loopne_rel8_16_CX
            | Code::Loopne_rel8_32_CX => 2,
            Code::Loop_rel8_16_RCX
            | Code::Loop_rel8_64_RCX
            | Code::Loope_rel8_16_RCX
            | Code::Loope_rel8_64_RCX
            | Code::Loopne_rel8_16_RCX
            | Code::Loopne_rel8_64_RCX => 8,
            _ => 4,
        };
        let Some((target, width)) = self.direct_target() else { return Err(Stop::Unsupported) };
        let counter = Self::counter(size);
        // No flag changes: LOOP is not a DEC.
        let left = self.reg(counter).wrapping_sub(1) & size_mask(size);
        let zero = self.flags.contains(Rflags::ZF);
        let goes_on = match self.insn.mnemonic() {
            Mnemonic::Loope => zero,
            Mnemonic::Loopne => !zero,
            _ => true,
        };
        if left != 0 && goes_on {
            self.branch(target, width)?;
        }
        // After the branch was checked: LOOP with a target out of reach leaves the counter.
        self.set_reg(counter, left);
        Ok(())
    }

    /// CLI, STI: #GP(0) for a program without the right to do that.
    fn check_iopl(&self) -> Result<(), Stop> {
        if self.v86() {
            return Err(Stop::Unsupported);
        }
        // By this instruction's flags: nothing has changed them yet.
        let allowed = self.flags.iopl();
        if self.real() || self.m.cpl() <= allowed {
            Ok(())
        } else {
            Err(Stop::Fault(Exception::gp(0)))
        }
    }

    fn push_flags(&mut self) -> Result<(), Stop> {
        if self.v86() {
            return Err(Stop::Unsupported);
        }
        let size = self.insn.stack_pointer_increment().unsigned_abs() as u8;
        // RF and VM are never seen on the stack (SDM vol. 2B, PUSHF).
        self.push((self.flags - (Rflags::VM | Rflags::RF)).bits(), size)
    }

    fn pop_flags(&mut self) -> Result<(), Stop> {
        if self.v86() {
            return Err(Stop::Unsupported);
        }
        let size = self.insn.stack_pointer_increment().unsigned_abs() as u8;
        // Read before anything changes: the stack's fault must find flags and pointer as they were.
        let new = self.peek_at(0, size)?;
        self.replace_flags(Rflags::from_bits_retain(new), size);
        self.pop_bytes(size.into());
        Ok(())
    }

    /// The flags that a program may change with POPF or IRET, as far as `size` bytes reach.
    fn replace_flags(&mut self, new: Rflags, size: u8) {
        let mut mask =
            Rflags::STATUS | Rflags::TF | Rflags::DF | Rflags::NT | Rflags::AC | Rflags::ID;
        let (cpl, allowed) = (self.m.cpl(), self.flags.iopl());
        // IOPL is for level 0, and IF for a level that IOPL allows: other bits are kept without a
        // fault (SDM vol. 2B, POPF).
        if self.real() || cpl == 0 {
            mask |= Rflags::IOPL;
        }
        if self.real() || cpl <= allowed {
            mask |= Rflags::IF;
        }
        self.set_flags(mask & Rflags::from_bits_retain(size_mask(size)), new);
    }

    /// Does what pushes several words: the stack pointer is as before where it fails.
    fn all_or_nothing(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        // The pointer alone is put back: what was written below it is nobody's.
        let top = self.m.gpr(RSP);
        work(self).inspect_err(|_| self.m.set_gpr(RSP, top))
    }

    fn push_all(&mut self, size: u8) -> Result<(), Stop> {
        // Taken before the first push: what is pushed of the stack pointer is its value before.
        let values: [u64; 8] = core::array::from_fn(|n| self.m.gpr(n));
        self.all_or_nothing(|run| {
            // EAX first, EDI last (SDM vol. 2B, PUSHA).
            values.iter().try_for_each(|value| run.push(value & size_mask(size), size))
        })
    }

    fn pop_all(&mut self, size: u8) -> Result<(), Stop> {
        let mut values = [0; 8];
        for (n, value) in (0u64..).zip(values.iter_mut()) {
            *value = self.peek_at(n.wrapping_mul(size.into()), size)?;
        }
        self.pop_bytes(u64::from(size).wrapping_mul(8));
        // From EDI up to EAX; what was pushed of the stack pointer is left alone.
        for (n, value) in (0u8..).zip(values).filter(|(n, _)| *n != 3) {
            self.set_reg(RegRef { index: 7 - n, size, high8: false }, value);
        }
        Ok(())
    }

    /// LDS and its like: a segment register and a general one from memory.
    fn load_pointer(&mut self, segment: SegReg) -> Result<(), Stop> {
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        let (selector, offset) = self.far_pointer(to.size)?;
        // The segment first: it may fault, and the general register must not have changed then.
        self.load_segment(segment, selector)?;
        // LSS loads both at once, so no interrupt has to be held off between the two.
        self.interrupt_shadow = false;
        self.set_reg(to, offset);
        Ok(())
    }

    /// CBW and its like: the accumulator of `size` bytes, extended to twice as many.
    fn widen(&mut self, size: u8) {
        let from = RegRef { index: 0, size, high8: false };
        let value = sign_extend(self.reg(from), size);
        self.set_reg(RegRef { size: size.wrapping_mul(2), ..from }, value);
    }

    /// CWD and its like: the accumulator's sign in every bit of rDX.
    fn spread(&mut self, size: u8) {
        let from = RegRef { index: 0, size, high8: false };
        let sign = (sign_extend(self.reg(from), size) as i64 >> 63) as u64;
        self.set_reg(RegRef { index: 2, ..from }, sign);
    }

    fn swap_bytes(&mut self) -> Result<(), Stop> {
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        let value = self.reg(to);
        match to.size {
            4 => self.set_reg(to, u64::from((value as u32).swap_bytes())),
            8 => self.set_reg(to, value.swap_bytes()),
            // Undefined, and left to whoever wants it.
            _ => return Err(Stop::Unsupported),
        }
        Ok(())
    }

    fn software_interrupt(&mut self, vector: u8) -> Result<(), Stop> {
        self.interrupt(vector, self.next_rip)
    }

    /// Goes to the handler of `vector` in real mode, which returns to `back`.
    pub(crate) fn interrupt(&mut self, vector: u8, back: u64) -> Result<(), Stop> {
        if !self.real() {
            return Err(Stop::Unsupported);
        }
        let table = self.m.table(Table::Interrupt);
        let at = u16::from(vector).wrapping_mul(4);
        // The table may be short: an entry beyond it is #GP in real mode as well (SDM vol. 3B
        // §22.1.4).
        if at.wrapping_add(3) > table.limit {
            return Err(Stop::Fault(Exception::gp(0)));
        }
        let mut entry = [0; 4];
        self.read_system(table.base, at.into(), &mut entry)?;
        let [a, b, c, d] = entry;
        let (offset, selector) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        let cs = u64::from(self.m.segment(SegReg::Cs).selector);
        let flags = self.flags.bits() & 0xffff;
        // All three words or none: a handler that returns needs them all.
        self.all_or_nothing(|run| {
            run.push(flags, 2)?;
            run.push(cs, 2)?;
            run.push(back & 0xffff, 2)
        })?;
        // Base and selector alone: real mode looks at no descriptor.
        let target = self.paragraphs(SegReg::Cs, selector);
        self.m.set_segment(SegReg::Cs, target);
        // What the handler starts with; RF is for the instruction that was interrupted.
        self.flags -= Rflags::IF | Rflags::TF | Rflags::AC | Rflags::RF;
        self.next_rip = offset.into();
        Ok(())
    }

    /// IRET in real mode.
    fn interrupt_return(&mut self, size: u8) -> Result<(), Stop> {
        if !self.real() {
            return Err(Stop::Unsupported);
        }
        let step = u64::from(size);
        let offset = self.peek_at(0, size)?;
        let selector = self.peek_at(step, size)? as u16;
        let flags = self.peek_at(step.wrapping_mul(2), size)?;
        // Before the stack pointer and the flags: it may be #GP for the offset.
        self.branch_to(selector, offset)?;
        self.pop_bytes(step.wrapping_mul(3));
        self.replace_flags(Rflags::from_bits_retain(flags), size);
        Ok(())
    }

    /// CS and RIP of real mode.
    fn branch_to(&mut self, selector: u16, offset: u64) -> Result<(), Stop> {
        let target = self.paragraphs(SegReg::Cs, selector);
        if offset > u64::from(target.limit) {
            return Err(Stop::Fault(Exception::gp(0)));
        }
        self.m.set_segment(SegReg::Cs, target);
        self.next_rip = offset;
        Ok(())
    }
}

const AH: RegRef = RegRef { index: 0, size: 1, high8: true };
