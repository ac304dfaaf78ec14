//! How an instruction of L1, or a VM entry, ends.

use x86::vmcs::{ExitReason, InstructionError};
use x86::{Exception, Rflags};

use crate::Outside;

/// Why an instruction did not succeed (SDM vol. 3C §31.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fail {
    /// VMfailInvalid: there is no current VMCS.
    Invalid,
    /// VMfailValid with the number that the VM-instruction error field has now.
    Valid(InstructionError),
    /// The instruction faults.
    Fault(Exception),
    /// The operand lies where only user space has memory.
    Outside,
}

impl From<Exception> for Fail {
    fn from(exception: Exception) -> Self {
        // An instruction that faults, or waits for user space, leaves all flags alone.
        Self::Fault(exception)
    }
}

impl From<Outside> for Fail {
    fn from(_: Outside) -> Self {
        Self::Outside
    }
}

const STATUS: Rflags = Rflags::CF
    .union(Rflags::PF)
    .union(Rflags::AF)
    .union(Rflags::ZF)
    .union(Rflags::SF)
    .union(Rflags::OF);

impl Fail {
    // VMfailInvalid sets CF, VMfailValid ZF; all others of the six are cleared by both (§31.2).
    /// RFLAGS after the instruction; `None` if it does not complete.
    pub fn rflags(self, before: Rflags) -> Option<Rflags> {
        match self {
            Self::Invalid => Some(before.difference(STATUS) | Rflags::CF),
            Self::Valid(_) => Some(before.difference(STATUS) | Rflags::ZF),
            Self::Fault(_) | Self::Outside => None,
        }
    }
}

/// RFLAGS after an instruction that succeeded (VMsucceed).
pub fn success(before: Rflags) -> Rflags {
    before.difference(STATUS)
}

/// A VM entry that failed after the host state was checked: L1 sees an exit, with bit 31 of the reason set
/// (SDM vol. 3C §27.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryFailure {
    /// Basic reason: 33, 34 or 41.
    pub reason: ExitReason,
    /// Exit qualification.
    pub qualification: u64,
}

impl EntryFailure {
    /// Invalid guest state, with the qualification of most rules.
    pub const GUEST: Self = Self { reason: ExitReason::InvalidGuestState, qualification: 0 };
    /// The PDPTEs cannot be loaded.
    // Which rules have a number of their own is the manual's choice (§27.8).
    pub const PDPTE: Self = Self { qualification: 2, ..Self::GUEST };
    /// The VMCS link pointer is invalid.
    pub const LINK: Self = Self { qualification: 4, ..Self::GUEST };

    /// An entry of the MSR list, counted from 1, cannot be loaded.
    pub const fn msr(number: u32) -> Self {
        Self { reason: ExitReason::MsrLoading, qualification: number as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_say_how_an_instruction_ended() {
        let all = STATUS | Rflags::FIXED | Rflags::IF;
        assert_eq!(success(all), Rflags::FIXED | Rflags::IF);
        assert_eq!(Fail::Invalid.rflags(all), Some(Rflags::FIXED | Rflags::IF | Rflags::CF));
        let valid = Fail::Valid(InstructionError::InvalidControls).rflags(all);
        assert_eq!(valid, Some(Rflags::FIXED | Rflags::IF | Rflags::ZF));
        assert_eq!(Fail::Fault(Exception::ud()).rflags(all), None);
    }
}
