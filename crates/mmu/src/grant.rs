//! What paging entries allow, the guest's and ours alike.

/// What the entries on the way allow, as in an entry's own bits: W is bit 1, U is bit 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant(u8);

impl Grant {
    /// Writes are granted.
    pub const W: Self = Self(1 << 1);
    /// Accesses from CPL 3 are granted.
    pub const U: Self = Self(1 << 2);
    /// Instruction fetches are granted.
    pub const X: Self = Self(1 << 0);
    /// Everything is granted.
    pub const ALL: Self = Self(7);

    /// What a guest entry allows. Without NX in the mode its bit is reserved, so never set here.
    #[inline]
    pub const fn of(entry: u64) -> Self {
        // W and U stay at their places and NX comes down to bit 0, so that collecting rights over
        // the levels is one AND.
        Self((entry & 6) as u8 | ((entry >> 63) ^ 1) as u8)
    }

    /// What an EPT entry allows. [`Grant::U`] is the right to read.
    #[inline]
    pub const fn of_ept(entry: u64) -> Self {
        // One bit each to the place that the ordinary format has it at, so that all else works on
        // both.
        let [read, write, fetch] = [entry as u8 & 1, entry as u8 >> 1 & 1, entry as u8 >> 2 & 1];
        Self(read << 2 | write << 1 | fetch)
    }

    /// What it allows, as an EPT entry's bits 2:0.
    #[inline]
    pub const fn as_ept(self) -> u64 {
        let word = self.0 as u64;
        (word & 1) << 2 | word & 2 | word >> 2 & 1
    }

    /// What both allow.
    #[inline]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// This grant without what `other` has.
    #[inline]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// This grant with what `other` has.
    #[inline]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` is allowed.
    #[inline]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The place of its spelling in a table of all eight.
    #[inline]
    pub const fn index(self) -> usize {
        (self.0 & 7) as usize
    }

    /// The one of that place.
    pub const fn from_index(index: usize) -> Self {
        Self(index as u8 & 7)
    }

    /// As far as an entry is writable.
    #[inline]
    pub(crate) const fn within_writable(self, entry: u64) -> Self {
        Self(self.0 & (entry as u8 | !Self::W.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ept_rights_go_there_and_back() {
        for bits in 0..8 {
            assert_eq!(Grant::of_ept(bits).as_ept(), bits);
        }
        assert!(Grant::of_ept(1).has(Grant::U) && Grant::of_ept(4).has(Grant::X));
    }
}
