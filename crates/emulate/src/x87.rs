//! What firmware does to the x87 unit before it trusts it: FNINIT, FNSTCW, FNSTSW, and WAIT. Nothing is computed; x87 arithmetic is
//! not emulated at all. For [`interpret`](crate::interpret) alone.
//!
//! SDM vol. 2 for each instruction; vol. 3A §2.5 on which bits of CR0 make them #NM.

use iced_x86::Mnemonic;
use x86::{Cr0, Exception};

use crate::machine::{Access, Machine, Stop};
use crate::operand::Run;

/// An unmasked exception waits.
pub(crate) const STATUS_ERROR: u16 = 1 << 7;

impl<M: Machine> Run<'_, M> {
    /// Executes the instruction, if it is one of these.
    pub(crate) fn x87(&mut self) -> Result<bool, Stop> {
        let mnemonic = self.insn.mnemonic();
        let waits = mnemonic == Mnemonic::Wait;
        if !waits && !matches!(mnemonic, Mnemonic::Fninit | Mnemonic::Fnstcw | Mnemonic::Fnstsw) {
            return Ok(false);
        }
        // WAIT asks for MP and TS together, the others for EM or TS (SDM vol. 3A table 2-2).
        let forbidden = if waits { Cr0::MP | Cr0::TS } else { Cr0::EM };
        let cr0 = self.m.cr0();
        if cr0.contains(forbidden) || !waits && cr0.contains(Cr0::TS) {
            return Err(Stop::Fault(Exception::nm()));
        }
        match mnemonic {
            Mnemonic::Fninit => self.m.x87_init()?,
            Mnemonic::Wait => {
                let [_, status] = self.m.x87_words()?;
                if status & STATUS_ERROR != 0 {
                    return Err(Stop::Fault(Exception::mf()));
                }
            }
            _ => {
                // The destination before the unit is asked: a segment fault needs no state.
                let to = self.place(0, Access::Store)?;
                let [control, status] = self.m.x87_words()?;
                let word = if mnemonic == Mnemonic::Fnstcw { control } else { status };
                self.store(to, word.into())?;
            }
        }
        Ok(true)
    }
}
