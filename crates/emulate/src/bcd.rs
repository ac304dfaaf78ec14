//! Decimal arithmetic: AAA, AAD, AAM, AAS, DAA, DAS, and SALC, which is in no manual. Real-mode programs know them, 64-bit code does
//! not; like all that no exit is made for, they are executed for [`interpret`](crate::interpret) alone.
//!
//! SDM vol. 2, each instruction's operation. Flags that it leaves undefined are as processors set them: by the result in AL.

use iced_x86::Mnemonic;
use x86::{Exception, Rflags};

use crate::alu;
use crate::machine::{Machine, Stop};
use crate::operand::Run;
use crate::register::RegRef;

const AL: RegRef = RegRef { index: 0, size: 1, high8: false };
const AX: RegRef = RegRef { index: 0, size: 2, high8: false };

impl<M: Machine> Run<'_, M> {
    /// Executes the instruction, if it is one of these.
    pub(crate) fn decimal(&mut self) -> Result<bool, Stop> {
        match self.insn.mnemonic() {
            Mnemonic::Daa => self.adjust_packed(u8::wrapping_add),
            Mnemonic::Das => self.adjust_packed(u8::wrapping_sub),
            Mnemonic::Aaa => self.adjust_digit(0x106, u16::wrapping_add),
            Mnemonic::Aas => self.adjust_digit(0x106, u16::wrapping_sub),
            Mnemonic::Aam => self.split_digits()?,
            Mnemonic::Aad => self.join_digits(),
            Mnemonic::Salc => {
                let all = if self.flags.contains(Rflags::CF) { 0xff } else { 0 };
                self.set_reg(AL, all);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// AL, and the flags that follow from it; carries are the caller's.
    fn set_al(&mut self, al: u8, carries: Rflags) {
        self.set_reg(AL, al.into());
        self.set_flags(Rflags::STATUS, alu::logic(1, al.into()).1 | carries);
    }

    /// DAA and DAS: two digits in AL.
    fn adjust_packed(&mut self, adjust: fn(u8, u8) -> u8) {
        let al = self.reg(AL) as u8;
        // Both from the value before: the first correction must not decide about the second.
        let low = al & 0xf > 9 || self.flags.contains(Rflags::AF);
        let high = al > 0x99 || self.flags.contains(Rflags::CF);
        let by = if low { 6 } else { 0 } + if high { 0x60 } else { 0 };
        let mut carries = Rflags::empty();
        carries.set(Rflags::AF, low);
        // A subtraction may borrow by its lower digit alone (SDM vol. 2, DAS).
        let borrows = low && self.insn.mnemonic() == Mnemonic::Das && al < 6;
        carries.set(Rflags::CF, high || borrows);
        self.set_al(adjust(al, by), carries);
    }

    /// AAA and AAS: one digit in AL, with its carry to AH.
    fn adjust_digit(&mut self, by: u16, adjust: fn(u16, u16) -> u16) {
        let ax = self.reg(AX) as u16;
        // AF, as the digit alone tells nothing of a carry that came out of it.
        let carried = ax & 0xf > 9 || self.flags.contains(Rflags::AF);
        // AX as a whole, so that the carry of AL reaches AH (SDM vol. 2A, AAA).
        let adjusted = if carried { adjust(ax, by) } else { ax } & 0xff0f;
        self.set_reg(AX, adjusted.into());
        let carries = if carried { Rflags::AF | Rflags::CF } else { Rflags::empty() };
        self.set_al(adjusted as u8, carries);
    }

    /// AAM: AL by its base, which is 10 unless a program has it otherwise.
    fn split_digits(&mut self) -> Result<(), Stop> {
        let (al, base) = (self.reg(AL) as u8, self.insn.immediate8());
        // The base is the program's: AAM 0 is #DE (SDM vol. 2A, AAM).
        let digits = al.checked_div(base).zip(al.checked_rem(base));
        let (high, low) = digits.ok_or(Stop::Fault(Exception::de()))?;
        self.set_reg(AX, u64::from(u16::from_le_bytes([low, high])));
        self.set_al(low, Rflags::empty());
        Ok(())
    }

    /// AAD: the reverse.
    fn join_digits(&mut self) {
        let [low, high] = (self.reg(AX) as u16).to_le_bytes();
        let al = low.wrapping_add(high.wrapping_mul(self.insn.immediate8()));
        // AH becomes 0.
        self.set_reg(AX, al.into());
        self.set_al(al, Rflags::empty());
    }
}
