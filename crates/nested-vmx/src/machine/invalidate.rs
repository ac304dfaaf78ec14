//! INVEPT and INVVPID.

use x86::reg::is_canonical;
use x86::vmcs::{InstructionError, invept, invvpid};

use super::{Address, L1, Machine, Then};
use crate::Fail;
use crate::checks::{Limits, controls};

/// Which translations are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// Those of one EPT pointer.
    Ept(u64),
    /// Those of all EPT pointers.
    AllEpt,
    /// Those of one linear address in one VPID.
    Address {
        /// The VPID.
        vpid: u16,
        /// The linear address.
        address: u64,
    },
    /// Those of one VPID.
    Vpid(u16),
    /// Those of one VPID that are not global.
    NonGlobal(u16),
    /// Those of all VPIDs but 0.
    AllVpids,
}

/// The 128-bit descriptor in an operand.
fn descriptor(operand: Address, l1: &mut impl L1) -> Result<(u64, u64), Fail> {
    let mut bytes = [0; 16];
    l1.read_linear(operand?, &mut bytes)?;
    let both = u128::from_le_bytes(bytes);
    // Little-endian: the first eight bytes are the EPT pointer or the VPID.
    Ok((both as u64, (both >> 64) as u64))
}

const WRONG: Fail = Fail::Valid(InstructionError::InvalidInvalidation);

impl Machine {
    pub(super) fn invept(
        &mut self,
        kind: u64,
        operand: Address,
        limits: &Limits,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        let c = &self.capabilities;
        // A kind that is not offered fails before memory is touched, as in stock KVM.
        let supported = match kind {
            invept::SINGLE => c.ept_vpid.invept_single(),
            invept::ALL => c.ept_vpid.invept_all(),
            _ => false,
        };
        if !supported {
            return Err(WRONG);
        }
        // Bits 127:64 are reserved for INVEPT; the manual's pseudo-code does not look at them, nor does this.
        let (eptp, _) = descriptor(operand, l1)?;
        // All kinds read the descriptor: it may fault, although nothing in it is used.
        if kind == invept::ALL {
            return Ok(Then::Invalidate(Invalidation::AllEpt));
        }
        // A pointer with which an entry would fail names no translations (SDM vol. 3C chapter 31, INVEPT).
        if !controls::is_ept_pointer(eptp, c, limits) {
            return Err(WRONG);
        }
        Ok(Then::Invalidate(Invalidation::Ept(eptp)))
    }

    pub(super) fn invvpid(
        &mut self,
        kind: u64,
        operand: Address,
        limits: &Limits,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        // Bits 43:40 of the capability are the four kinds.
        let kinds = self.capabilities.ept_vpid.0 >> 40;
        if kind > invvpid::SINGLE_NON_GLOBAL || kinds & 1 << (kind & 3) == 0 {
            return Err(WRONG);
        }
        let (first, address) = descriptor(operand, l1)?;
        if first >> 16 != 0 {
            return Err(WRONG);
        }
        // Bits 63:16 are reserved, for every kind.
        let vpid = first as u16;
        if kind != invvpid::ALL && vpid == 0 {
            return Err(WRONG);
        }
        let what = match kind {
            invvpid::ADDRESS if !is_canonical(address, limits.linear_bits) => return Err(WRONG),
            invvpid::ADDRESS => Invalidation::Address { vpid, address },
            invvpid::SINGLE => Invalidation::Vpid(vpid),
            // The caller drops global ones along: to flush too much is never wrong.
            invvpid::SINGLE_NON_GLOBAL => Invalidation::NonGlobal(vpid),
            _ => Invalidation::AllVpids,
        };
        Ok(Then::Invalidate(what))
    }
}
