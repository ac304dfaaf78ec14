//! What paging entries allow, the guest's and ours alike.

/// What the entries on the way allow, as in an entry's own bits: W is bit 1, U is bit 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant(u8);

impl Grant {
    /// Write.
    pub const W: Self = Self(1 << 1);
    /// User.
    pub const U: Self = Self(1 << 2);
    /// Fetch.
    pub const X: Self = Self(1 << 0);
    /// Everything.
    pub const ALL: Self = Self(7);

    /// What a guest entry allows. Without NX in the mode its bit is reserved, so never set here.
    #[inline]
    pub const fn of(entry: u64) -> Self {
        Self((entry & 6) as u8 | ((entry >> 63) ^ 1) as u8)
    }

    /// What both allow.
    #[inline]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Without `other`.
    #[inline]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// With `other`.
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
