//! KVM_X86_SET_MSR_FILTER (KVM API §4.97): which MSRs a guest may read and write at all, whatever the
//! vCPU would say.

use alloc::vec::Vec;

use host::GuestIndex;
use x86::{Direction, Directions};

/// Consecutive MSRs of a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsrRange {
    /// The first MSR.
    pub base: u32,
    /// How many MSRs.
    pub count: u32,
    /// Accesses that the range decides over.
    pub over: Directions,
    /// A bit per MSR: 1 allows, 0 denies.
    pub bitmap: Vec<u64>,
}

impl MsrRange {
    /// What the range says of an access. `None`: nothing.
    fn says(&self, index: u32, direction: Direction) -> Option<bool> {
        // As in stock KVM, whose range has an end of 32 bits: one that goes to the last number or beyond says nothing.
        let end = self.base.wrapping_add(self.count);
        let concerned = (self.base..end).contains(&index) && self.over.contains(direction.into());
        let at = index.wrapping_sub(self.base);
        // Masked: the number is the guest's, and the range that it is compared with does not bind
        // the CPU's guess.
        let word = GuestIndex::from(at / 64).of(&self.bitmap).copied().unwrap_or(0);
        concerned.then_some(word >> (at % 64) & 1 != 0)
    }
}

/// A filter of MSRs, as KVM_X86_SET_MSR_FILTER made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsrFilter {
    /// What no range says anything of is denied.
    pub default_deny: bool,
    /// The first that says something counts.
    pub ranges: Vec<MsrRange>,
}

impl MsrFilter {
    /// Whether the guest may access an MSR. Those of the x2APIC cannot be filtered.
    pub fn allows(&self, index: u32, direction: Direction) -> bool {
        // The CPU may serve these registers itself (ADR 34), and then nobody asks a filter.
        matches!(index, 0x800..=0x8ff)
            || self
                .ranges
                .iter()
                .find_map(|range| range.says(index, direction))
                .unwrap_or(!self.default_deny)
    }

    /// Which accesses of an MSR the guest may not make.
    pub fn denied(&self, index: u32) -> Directions {
        // For the permission maps, which are made from this when the filter changes.
        let of = |way: Direction| Directions::from(way).when(!self.allows(index, way));
        of(Direction::Read) | of(Direction::Write)
    }

    /// Whether the filter may deny anything.
    pub fn restricts(&self) -> bool {
        self.default_deny || !self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(base: u32, count: u32, over: Directions, word: u64) -> MsrRange {
        MsrRange { base, count, over, bitmap: [word].into() }
    }

    #[test]
    fn a_range_beyond_the_last_number_says_nothing() {
        let filter = MsrFilter {
            default_deny: false,
            ranges: [range(0xffff_fff0, 64, Directions::READS, 0)].into(),
        };
        assert!(filter.allows(0xffff_fff0, Direction::Read));
        assert!(filter.allows(0x10, Direction::Read));
    }

    #[test]
    fn the_first_range_that_concerns_an_access_decides() {
        let ranges =
            [range(0x10, 4, Directions::READS, 0b0101), range(0x10, 8, Directions::all(), 0xff)];
        let filter = MsrFilter { default_deny: true, ranges: ranges.into() };
        assert!(filter.allows(0x10, Direction::Read) && !filter.allows(0x11, Direction::Read));
        assert!(filter.allows(0x11, Direction::Write), "the first is for reads alone");
        assert!(filter.allows(0x14, Direction::Read) && !filter.allows(0x18, Direction::Read));
        assert!(!filter.allows(0xf, Direction::Write));
    }

    #[test]
    fn the_x2apic_is_never_denied_and_nothing_wraps() {
        let ranges = [range(u32::MAX, 64, Directions::all(), 1)];
        let filter = MsrFilter { default_deny: true, ranges: ranges.into() };
        assert!(filter.allows(0x800, Direction::Write) && filter.allows(0x8ff, Direction::Read));
        assert!(
            !filter.allows(u32::MAX, Direction::Write) && !filter.allows(0x900, Direction::Read)
        );
        let ranges = [range(u32::MAX - 1, 1, Directions::all(), 1)];
        let filter = MsrFilter { default_deny: true, ranges: ranges.into() };
        assert!(filter.allows(u32::MAX - 1, Direction::Write));
        assert!(!filter.allows(u32::MAX, Direction::Write) && !filter.allows(0, Direction::Read));
    }

    #[test]
    fn without_ranges_and_denial_it_is_none() {
        let none = MsrFilter { default_deny: false, ranges: Vec::new() };
        assert!(!none.restricts() && none.allows(0xc000_0080, Direction::Write));
    }
}
