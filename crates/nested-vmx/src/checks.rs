//! The checks of a VM entry, in the manual's order (SDM vol. 3C §27.2 to §27.4). Each names the rule that
//! was broken; what the instruction or the exit says follows from which part it is in.

pub mod controls;
pub mod guest;
pub mod guest_rules;
pub mod host;
pub mod lists;
pub(crate) mod segments;

use x86::Efer;
use x86::reg::is_canonical;

/// What the vCPU's CPUID and state say about values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Width of physical addresses.
    pub physical_bits: u8,
    /// Width of linear addresses: 48, or 57 with five-level paging.
    pub linear_bits: u32,
    /// EFER bits that the vCPU has.
    pub efer: u64,
    /// PERF_GLOBAL_CTRL bits that the vCPU has.
    pub perf_global_ctrl: u64,
    /// DEBUGCTL bits that the vCPU has.
    pub debugctl: u64,
    /// The vCPU is in long mode now: L1 is.
    pub long_mode: bool,
    /// The vCPU is in SMM.
    pub smm: bool,
    /// The local APIC is in x2APIC mode.
    pub x2apic: bool,
}

impl Limits {
    fn is_canonical(&self, address: u64) -> bool {
        is_canonical(address, self.linear_bits)
    }
}

/// Whether a control register has the bits that are fixed (SDM vol. 3C §A.7, §A.8).
pub(crate) fn is_fixed(value: u64, ones: u64, may: u64) -> bool {
    // FIXED0 has 1 where a bit must be 1, FIXED1 has 0 where it must be 0.
    value & ones == ones && value & !may == 0
}

/// Turns a rule into a result.
fn rule<R>(holds: bool, broken: R) -> Result<(), R> {
    if holds { Ok(()) } else { Err(broken) }
}

/// Whether every byte of a PAT is a memory type (SDM vol. 3A table 12-10).
pub fn is_pat(pat: u64) -> bool {
    // 2 and 3 are reserved, as is everything above 7.
    pat.to_le_bytes().iter().all(|kind| matches!(kind, 0 | 1 | 4 | 5 | 6 | 7))
}

/// Whether EFER may be loaded and its LMA and LME are as told; `lme` is not compared if `None`.
fn is_efer(efer: u64, limits: &Limits, lma: bool, lme: Option<bool>) -> bool {
    // LMA is compared, though WRMSR does not set it: an entry and an exit load the word as it is.
    let has = |bit: Efer| efer & bit.bits() != 0;
    efer & !limits.efer == 0 && has(Efer::LMA) == lma && lme.is_none_or(|l| has(Efer::LME) == l)
}

#[cfg(test)]
#[path = "checks_tests.rs"]
mod tests;
