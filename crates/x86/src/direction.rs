//! Which way an access goes: the one word for it from the permission maps to the devices.
//!
//! A fetch is neither: who has to know of it has an enum of three (the walk's).

use bitflags::bitflags;

/// Which way an access of the guest's goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the guest: a load, IN, RDMSR, VMREAD.
    Read = 0,
    /// From the guest: a store, OUT, WRMSR, VMWRITE.
    Write = 1,
}

impl Direction {
    /// Whether the access writes.
    #[inline]
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write)
    }

    /// A write on a condition: a bit of the architecture's words says so. A read otherwise.
    #[inline]
    pub const fn write_if(condition: bool) -> Self {
        if condition { Self::Write } else { Self::Read }
    }
}

bitflags! {
    /// Directions of access: those that exit, or are denied. The bits are those of an MSR in SVM's permission map
    /// (APM vol. 2 §15.11).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Directions: u8 {
        /// Accesses that read.
        const READS = 1;
        /// Accesses that write.
        const WRITES = 2;
    }
}

impl From<Direction> for Directions {
    #[inline]
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::Read => Self::READS,
            Direction::Write => Self::WRITES,
        }
    }
}

impl Directions {
    /// These directions on a condition; none otherwise.
    #[inline]
    pub const fn when(self, condition: bool) -> Self {
        // Nothing, and not everything: a rule whose condition fails says nothing of the access.
        if condition { self } else { Self::empty() }
    }
}
