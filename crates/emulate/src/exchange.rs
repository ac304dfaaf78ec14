//! XCHG, XADD and the CMPXCHG family.
//!
//! An unequal CMPXCHG writes the old value back on hardware; here it writes nothing, which no one
//! but a device could tell, and the destination is still checked as written.

use iced_x86::OpKind;
use x86::{Exception, Gva, Rflags};

use crate::alu;
use crate::machine::{Access, Machine, Stop};
use crate::operand::{Lock, Place, Run, crosses_page};
use crate::register::{RegRef, size_mask};

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RBX: usize = 3;

impl<M: Machine> Run<'_, M> {
    pub(crate) fn xchg(&mut self) -> Result<(), Stop> {
        // The memory operand is encoded first; with two registers the order does not matter.
        let to = self.place(0, Access::Modify)?;
        let with = RegRef::of(self.insn.op1_register()).ok_or(Stop::Unsupported)?;
        let new = self.reg(with);
        // XCHG with memory locks without the prefix.
        // Memory before the register: a fault leaves both.
        let old = self.modify(to, Lock::Always, |_| new)?;
        self.set_reg(with, old);
        Ok(())
    }

    pub(crate) fn xadd(&mut self) -> Result<(), Stop> {
        let to = self.place(0, Access::Modify)?;
        let with = RegRef::of(self.insn.op1_register()).ok_or(Stop::Unsupported)?;
        let (size, b) = (to.size(), self.reg(with));
        let sum = |a| alu::add(size, a, b, false);
        let a = match to {
            // The sum wins when both operands are one register, so it is written last.
            Place::Reg(reg) => {
                let a = self.reg(reg);
                self.set_reg(with, a);
                self.set_reg(reg, sum(a).0);
                a
            }
            Place::Mem { .. } => {
                let a = self.modify(to, Lock::IfPrefixed, |a| sum(a).0)?;
                self.set_reg(with, a);
                a
            }
        };
        self.set_flags(Rflags::STATUS, sum(a).1);
        Ok(())
    }

    pub(crate) fn cmpxchg(&mut self) -> Result<(), Stop> {
        let to = self.place(0, Access::Modify)?;
        let with = RegRef::of(self.insn.op1_register()).ok_or(Stop::Unsupported)?;
        let accumulator = RegRef { index: 0, size: to.size(), high8: false };
        let (expected, new) = (self.reg(accumulator), self.reg(with));
        let old = self.modify_if_equal(to, expected, new)?;
        // All the flags of a CMP, not ZF alone (SDM vol. 2A, CMPXCHG).
        let flags = alu::sub(to.size(), expected, old, false).1;
        if !flags.contains(Rflags::ZF) {
            self.set_reg(accumulator, old);
        }
        self.set_flags(Rflags::STATUS, flags);
        Ok(())
    }

    /// Like [`Run::modify`], but writes only when the old value is `expected`.
    fn modify_if_equal(&mut self, to: Place, expected: u64, new: u64) -> Result<u64, Stop> {
        let Place::Mem { at, size } = to else {
            let change = |old| if old == expected { new } else { old };
            let old = self.load(to)?;
            // An unequal 32-bit CMPXCHG leaves its register destination whole.
            return if old == expected {
                self.modify(to, Lock::IfPrefixed, change)
            } else {
                Ok(old)
            };
        };
        // A lock across pages is not atomic here, as in modify().
        let locked = self.insn.has_lock_prefix() && !crosses_page(at, usize::from(size));
        // Before the compare: an unequal one faults as a write, too (SDM vol. 2A, CMPXCHG).
        self.probe(at, usize::from(size))?;
        for _ in 0..crate::operand::LOCK_TRIES {
            let old = self.read(at, size, Access::Modify)?;
            // Before the lock is tried: an unequal one writes nothing here.
            if old != expected {
                return Ok(old);
            }
            if !locked {
                self.write(at, size, new, Access::Modify)?;
                return Ok(old);
            }
            if self.exchange(at, size, old, new)? {
                return Ok(old);
            }
        }
        Err(Stop::Retry)
    }

    /// CMPXCHG8B (`half` = 4) and CMPXCHG16B (`half` = 8).
    pub(crate) fn cmpxchg_pair(&mut self, half: u8) -> Result<(), Stop> {
        if self.insn.op0_kind() != OpKind::Memory {
            return Err(Stop::Unsupported);
        }
        let size = half.wrapping_mul(2);
        let Place::Mem { at, .. } = self.memory(size, 0, 0, Access::Modify)? else {
            return Err(Stop::Unsupported);
        };
        // #GP, and no #AC: the alignment is the instruction's own (SDM vol. 2A,
        // CMPXCHG8B/CMPXCHG16B).
        if half == 8 && at & 15 != 0 {
            return Err(Stop::Fault(Exception::gp(0)));
        }
        let bits = u32::from(half).wrapping_mul(8);
        let mask = size_mask(half);
        let join = |high: u64, low: u64| {
            u128::from(high & mask).wrapping_shl(bits) | u128::from(low & mask)
        };
        // Taken before the loop: the registers change only behind it.
        let expected = join(self.m.gpr(RDX), self.m.gpr(RAX));
        let new = join(self.m.gpr(RCX), self.m.gpr(RBX));
        // It faults as a write whatever the comparison says, and before a device is read.
        self.probe(at, usize::from(size))?;
        let locked = self.insn.has_lock_prefix() && !crosses_page(at, usize::from(size));
        for _ in 0..crate::operand::LOCK_TRIES {
            let low = self.read(at, half, Access::Modify)?;
            let upper_at = self.after(at, usize::from(half));
            let high = self.read(upper_at, half, Access::Modify)?;
            let old = join(high, low);
            let replacement = if old == expected { new } else { old };
            if locked && half == 8 && old != expected {
                // The machine stores sixteen bytes plainly: what another CPU stored meanwhile would be undone.
                if !self.m.is_writable_ram(Gva(at), usize::from(size))? {
                    return Err(Stop::Unsupported);
                }
                if self.read(at, half, Access::Modify)? != low {
                    continue;
                }
            } else if locked {
                // The halves were read apart: replacing the pair, be it by itself, proves that
                // they belong together.
                let (old_bytes, new_bytes) = (old.to_le_bytes(), replacement.to_le_bytes());
                let size = usize::from(size);
                let (Some(from), Some(to)) = (old_bytes.get(..size), new_bytes.get(..size)) else {
                    return Err(Stop::Unsupported);
                };
                if !self.m.cmpxchg(Gva(at), from, to)? {
                    continue;
                }
            } else if old == expected {
                // One access where it fits one, so that both sides of a page border are checked
                // before either is written; 16 bytes are aligned and cross none.
                self.write(at, size.min(8), new as u64, Access::Modify)?;
                if half == 8 {
                    self.write(upper_at, half, new.wrapping_shr(bits) as u64, Access::Modify)?;
                }
            }
            if old == expected {
                // The other flags stay: this one changes ZF alone.
                self.set_flags(Rflags::ZF, Rflags::ZF);
            } else {
                self.set_flags(Rflags::ZF, Rflags::empty());
                self.set_reg(RegRef { index: RAX as u8, size: half, high8: false }, low);
                self.set_reg(RegRef { index: RDX as u8, size: half, high8: false }, high);
            }
            return Ok(());
        }
        Err(Stop::Retry)
    }
}
