//! Accesses of table registers that exit for UMIP: what the CPU tells of them (SDM vol. 3C §28.2.1, §28.2.5, tables 28-10
//! and 28-11).

use backend::{Gprs, Registers, SegmentName, TableAccess};
use cpu::Cpu;
use nested_vmx::operand::Information;
use x86::segment::attr;
use x86::vmcs::ExitReason;
use x86::{Direction, Gva};

use crate::{fields, state::Vmx};

/// Identities of LGDT and LLDT, and of LIDT, in the instruction information.
const LGDT: u8 = 2;
const LIDT: u8 = 3;
const LLDT: u8 = 2;
/// Those of SLDT and STR.
const SLDT: u8 = 0;
const STR: u8 = 1;

impl<C: Cpu> Vmx<C> {
    /// See [`backend::Exits::table_access`].
    pub(crate) fn decode_table_access(&self, gprs: &Gprs) -> Option<TableAccess> {
        // Compatibility mode has segments' limits and shorter operands. The CPU makes #GP of these loads above level 0, and of the
        // stores the emulator does, by UMIP.
        if !self.is_long() || self.code_attributes() & attr::L == 0 || self.cpl() != 0 {
            return None;
        }
        let information = Information(self.get(fields::INSTRUCTION_INFO));
        // What faults is told by the emulator, in the order of its checks.
        let at = |length| self.operand(gprs, length, Direction::Read).ok().map(Gva);
        match (self.exit_reason(), information.identity()) {
            // Ten bytes in 64-bit mode, whatever the operand size.
            (ExitReason::GdtrIdtr, LGDT) => at(10).map(TableAccess::Gdtr),
            (ExitReason::GdtrIdtr, LIDT) => at(10).map(TableAccess::Idtr),
            (ExitReason::LdtrTr, LLDT) if information.is_register() => {
                let register = usize::from(information.register1());
                Some(TableAccess::Ldtr(gprs.get(register) as u16))
            }
            (ExitReason::LdtrTr, SLDT | STR) if information.is_register() => {
                let is_tr = information.identity() == STR;
                let of = if is_tr { SegmentName::Tr } else { SegmentName::Ldtr };
                Some(TableAccess::Stored { of, register: information.register1() })
            }
            (ExitReason::LdtrTr, LLDT) => at(2).map(TableAccess::LdtrFrom),
            _ => None,
        }
    }
}
