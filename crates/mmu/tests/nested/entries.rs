//! What entries begin with, and how accesses are told of.

use gannet_mmu::NestedAccess;

use super::reference::{Access, Kind};

/// What every entry of the beginning has: all rights, used and written, write-back.
pub fn full(kind: &Kind) -> u64 {
    match kind {
        Kind::Npt { .. } => 0x67,
        Kind::Ept { .. } => 0x307,
    }
}

/// A leaf's memory type, where it has one.
pub fn page(kind: &Kind) -> u64 {
    full(kind) | if matches!(kind, Kind::Ept { .. }) { 6 << 3 } else { 0 }
}

/// Levels of the hardware's tables: as many, or one more.
pub fn levels(kind: &Kind, more: bool) -> u8 {
    match kind {
        Kind::Npt { five, .. } => {
            if *five || more {
                5
            } else {
                4
            }
        }
        Kind::Ept { .. } => 4,
    }
}

/// How the software is told of an access, as the hardware would.
pub fn told(kind: &Kind, gpa: u64, access: &Access) -> NestedAccess {
    kind.tables(1).fault(match kind {
        Kind::Npt { .. } => NestedAccess::npf(kind.told(access), gpa),
        Kind::Ept { .. } => NestedAccess::violation(kind.told(access), gpa),
    })
}
