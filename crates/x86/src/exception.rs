//! Exceptions as values: vector, error code, and the payload that goes to CR2 or DR6.
//!
//! SDM vol. 3A §6.15, APM vol. 2 §8.2.

use bitflags::bitflags;

use crate::Vector;

bitflags! {
    /// Exceptions that exit, a bit each at the place of its vector: SVM's intercept vector 2 (APM vol. 2 §15.12)
    /// and VMX's exception bitmap (SDM vol. 3C §25.6.3).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Exceptions: u32 {
        /// The debug exception, #DB.
        const DB = 1 << vector::DB;
        /// The breakpoint exception, #BP.
        const BP = 1 << vector::BP;
        /// The invalid-opcode exception, #UD.
        const UD = 1 << vector::UD;
        /// The general-protection fault, #GP.
        const GP = 1 << vector::GP;
        /// The page fault, #PF.
        const PF = 1 << vector::PF;
        /// The alignment check, #AC.
        const AC = 1 << vector::AC;
        /// The machine check, #MC.
        const MC = 1 << vector::MC;
    }
}

impl Exceptions {
    /// What exits for every guest: #AC and #DB, whose loops would hold the CPU for ever without an exit; a
    /// machine check, which is the host's; #UD, for a guest may make its hypercalls with the other vendor's
    /// instruction.
    // One set for both vendors: what a guest may do to the host by an exception does not depend on
    // the CPU.
    pub const ALWAYS: Self = Self::DB.union(Self::UD).union(Self::AC).union(Self::MC);
}

/// Vectors of exceptions.
pub mod vector {
    /// The debug exception, #DB.
    pub const DB: u8 = 1;
    /// The breakpoint exception, #BP, of INT3.
    pub const BP: u8 = 3;
    /// #UD, invalid opcode.
    pub const UD: u8 = 6;
    /// #DF, double fault.
    pub const DF: u8 = 8;
    /// #GP, general protection.
    pub const GP: u8 = 13;
    /// #PF, page fault.
    pub const PF: u8 = 14;
    /// #AC, alignment check.
    pub const AC: u8 = 17;
    /// #MC, machine check.
    pub const MC: u8 = 18;
}

/// An exception to be delivered to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Vector 0 to 31.
    pub vector: Vector,
    /// Error code, for the vectors that push one.
    // No error code is not a code of 0: the two leave different stacks.
    pub error_code: Option<u32>,
    /// CR2 for #PF, DR6 bits for #DB.
    // Apart from the registers until the exception is delivered: a nested hypervisor that
    // intercepts it must find them as they were.
    pub payload: Option<u64>,
}

/// Page-fault error-code bits (SDM vol. 3A §4.7).
pub mod pf {
    /// The page was present: a protection violation.
    pub const PRESENT: u32 = 1 << 0;
    /// The access was a write.
    pub const WRITE: u32 = 1 << 1;
    /// The access was made with CPL 3.
    // By the access and not by the CPL alone: the CPU reads its own tables as a supervisor at CPL
    // 3, too.
    pub const USER: u32 = 1 << 2;
    /// A reserved bit was set in a paging entry.
    // Only with PRESENT: an entry that is not present has no reserved bits.
    pub const RSVD: u32 = 1 << 3;
    /// The access was an instruction fetch.
    pub const FETCH: u32 = 1 << 4;
    /// The access was refused by a protection key.
    pub const PK: u32 = 1 << 5;
}

impl Exception {
    const fn plain(vector: u8) -> Self {
        Self { vector: Vector(vector), error_code: None, payload: None }
    }
    const fn with_code(vector: u8, code: u32) -> Self {
        Self { vector: Vector(vector), error_code: Some(code), payload: None }
    }
    /// #DE, divide error.
    pub const fn de() -> Self {
        Self::plain(0)
    }
    /// #DB with the DR6 bits that it reports.
    pub const fn db(dr6: u64) -> Self {
        // Always a payload, be it 0: DR6 changes with each #DB, for breakpoints of before are
        // forgotten.
        Self { vector: Vector(1), error_code: None, payload: Some(dr6) }
    }
    /// #UD, invalid opcode.
    pub const fn ud() -> Self {
        Self::plain(6)
    }
    /// #NM, device not available.
    pub const fn nm() -> Self {
        Self::plain(7)
    }
    /// #DF, double fault.
    pub const fn df() -> Self {
        // The code is always zero (SDM vol. 3A §6.15).
        Self::with_code(8, 0)
    }
    /// #TS, invalid TSS.
    pub const fn ts(code: u32) -> Self {
        Self::with_code(10, code)
    }
    /// #NP, segment not present.
    pub const fn np(code: u32) -> Self {
        Self::with_code(11, code)
    }
    /// #SS, stack fault.
    pub const fn ss(code: u32) -> Self {
        Self::with_code(12, code)
    }
    /// #GP, general protection.
    pub const fn gp(code: u32) -> Self {
        Self::with_code(13, code)
    }
    /// #PF at `addr` with the bits of [`pf`].
    pub const fn pf(addr: u64, code: u32) -> Self {
        // CR2 is written when the fault is delivered, and not when it is found.
        Self { vector: Vector(14), error_code: Some(code), payload: Some(addr) }
    }
    /// #MF, x87 floating-point error.
    pub const fn mf() -> Self {
        Self::plain(16)
    }
    /// #AC, alignment check.
    pub const fn ac() -> Self {
        // The same.
        Self::with_code(17, 0)
    }
}
