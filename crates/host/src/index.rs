//! Indices that a guest or a VMM controls. A CPU that guesses a bounds check wrong goes on with the
//! index as it is, and what it loads then can be found out by others (Spectre v1). So the index is
//! masked by data, not by a branch: an index that lies outside becomes 0 before it is used, in
//! speculation too.

use number::Number;

/// All ones if `index` is below `len`, else 0. The compiler knows nothing of how that comes about, so
/// that it cannot make a branch of it, or leave it out behind a check of its own.
#[inline(always)]
#[must_use]
pub fn mask_below(index: usize, len: usize) -> usize {
    let mask: usize;
    // SAFETY: two instructions on registers: the carry of index - len, and that spread over a word.
    // No memory, no stack; the flags are clobbered, as is the default.
    unsafe {
        core::arch::asm!(
            "cmp {index}, {len}",
            "sbb {mask}, {mask}",
            index = in(reg) index,
            len = in(reg) len,
            mask = lateout(reg) mask,
            options(pure, nomem, nostack),
        );
    }
    mask
}

/// The number itself, which nobody else can see: an index comes out of it masked, or not at all.
mod number {
    use super::mask_below;

    #[derive(Clone, Copy, Debug)]
    #[repr(transparent)]
    pub(super) struct Number(usize);

    impl Number {
        #[inline(always)]
        pub(super) const fn new(number: usize) -> Self {
            Self(number)
        }

        #[inline(always)]
        pub(super) fn is_below(self, len: usize) -> bool {
            self.0 < len
        }

        /// The number, or 0 where it is not below `len`.
        #[inline(always)]
        pub(super) fn masked(self, len: usize) -> usize {
            self.0 & mask_below(self.0, len)
        }
    }
}

/// An index that a guest or a VMM chose. It can be used in one way only: masked by the length of what
/// it goes into. There is no way back to the number.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct GuestIndex(Number);

impl GuestIndex {
    /// The number that was chosen. What does not fit into a word lies outside of every table.
    #[inline(always)]
    pub const fn new(number: u64) -> Self {
        Self(Number::new(number as usize))
    }

    /// The index into a table of so many, `None` outside of it.
    #[inline(always)]
    pub fn below(self, len: usize) -> Option<usize> {
        // The compare decides; the mask binds what the CPU guesses past it.
        if self.0.is_below(len) { Some(self.0.masked(len)) } else { None }
    }

    /// What lies there in `table`.
    #[inline(always)]
    pub fn of<T>(self, table: &[T]) -> Option<&T> {
        // Masked by the same length, so the check in get() cannot fail.
        table.get(self.below(table.len())?)
    }

    /// The element at the index, to be changed; `None` where [`Self::of`] gives none.
    #[inline(always)]
    pub fn of_mut<T>(self, table: &mut [T]) -> Option<&mut T> {
        let index = self.below(table.len())?;
        table.get_mut(index)
    }
}

macro_rules! from {
    ($($int:ty),*) => { $(
        impl From<$int> for GuestIndex {
            #[inline(always)]
            fn from(number: $int) -> Self {
                Self(Number::new(number as usize))
            }
        }
    )* };
}
from!(u8, u16, u32, u64, usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_all_or_nothing() {
        for len in [0, 1, 2, 24, 4096, usize::MAX] {
            for index in [0, 1, 2, 23, 24, 25, 4095, 4096, 1 << 32, usize::MAX - 1, usize::MAX] {
                let expected = if index < len { usize::MAX } else { 0 };
                assert_eq!(mask_below(index, len), expected, "{index} below {len}");
            }
        }
    }

    /// As a CPU computes it that has guessed the compare wrong.
    #[test]
    fn past_the_compare_an_index_from_outside_is_0() {
        for (number, len, masked) in [(2, 3, 2), (3, 3, 0), (usize::MAX, 3, 0), (0, 0, 0)] {
            assert_eq!(Number::new(number).masked(len), masked, "{number} below {len}");
        }
    }

    #[test]
    fn what_lies_outside_is_not_there() {
        let mut table = [10, 11, 12];
        assert_eq!(GuestIndex::from(2u32).of(&table), Some(&12));
        for index in [3, 4, u64::MAX, 1 << 32] {
            assert_eq!(GuestIndex::new(index).of(&table), None);
            assert_eq!(GuestIndex::new(index).of_mut(&mut table), None);
        }
        *GuestIndex::from(0usize).of_mut(&mut table).unwrap() = 5;
        assert_eq!(table, [5, 11, 12]);
        assert_eq!(GuestIndex::from(0u8).of::<u8>(&[]), None);
    }
}
