//! What a VMCS of the hardware's was composed of when its VMCS12 ceased to be the current one: an entry that uses it again composes and
//! checks what differs.
//!
//! Whose VMCS12 that was does not count. What counts is what was read from L1's memory, whoever has written it: each of its
//! fields is compared.

use x86::vmcs::place::{self, UNITS, UNITS_OF_WORD};
use x86::vmcs::{Group, Groups};

use super::Machine;
use crate::Vmcs12;

/// See the module.
#[derive(Debug)]
pub struct Composed {
    image: Vmcs12,
    dirty: Groups,
    unchecked: Groups,
    l1_efer: u64,
    vm86: bool,
    host_changed: bool,
    /// [`Machine::rules`] by which it was composed and checked; 0: by none.
    rules: u64,
}

/// What a unit of two bytes of the image belongs to, and what is composed anew when a field there changes.
static GROUPS: [Groups; UNITS] = {
    let (mut groups, mut at) = (place::groups_by_unit(), 0);
    while at < FOLLOWED.len() {
        let encoding = FOLLOWED[at];
        let Some(place) = place::place(encoding) else { panic!() };
        // Words of four bytes.
        let unit = place.offset as usize / 2;
        groups[unit] = groups[unit].union(crate::merge::follows(encoding));
        groups[unit + 1] = groups[unit + 1].union(crate::merge::follows(encoding));
        at += 1;
    }
    groups
};

/// Fields from which something of another group follows.
const FOLLOWED: [u32; 3] = [
    x86::vmcs::field::ENTRY_CONTROLS.encoding(),
    x86::vmcs::field::PROC_CONTROLS.encoding(),
    x86::vmcs::field::PROC_CONTROLS2.encoding(),
];

/// Words that are compared at once. They divide the image.
const AT_ONCE: usize = 8;
const _: () = assert!(UNITS.is_multiple_of(AT_ONCE * UNITS_OF_WORD));

impl Composed {
    /// Of nothing: whoever takes it up composes and checks all.
    pub const NOTHING: Self = Self {
        image: Vmcs12::ZERO,
        dirty: Groups::ALL,
        unchecked: Groups::ALL,
        l1_efer: 0,
        vm86: false,
        host_changed: true,
        rules: 0,
    };
}

impl Vmcs12 {
    /// The groups of fields that differ, and those that follow from them.
    fn differs(&self, other: &Self) -> Groups {
        let mut groups = Groups::NONE;
        let (one, _) = self.words().as_chunks::<AT_ONCE>();
        let (two, _) = other.words().as_chunks::<AT_ONCE>();
        let (units, _) = GROUPS.as_chunks::<{ AT_ONCE * UNITS_OF_WORD }>();
        for ((one, two), units) in one.iter().zip(two).zip(units) {
            // Most are what they were: many words by one branch.
            let both = one.iter().zip(two);
            if both.clone().fold(0, |all, (one, two)| all | (one ^ two)) == 0 {
                continue;
            }
            for ((one, two), units) in both.zip(units.as_chunks::<UNITS_OF_WORD>().0) {
                let mut left = one ^ two;
                for unit in units {
                    if left & 0xffff != 0 {
                        groups = groups.union(*unit);
                    }
                    left >>= 16;
                }
            }
        }
        groups
    }
}

impl Machine {
    /// Before another VMCS becomes the current one: what the hardware's VMCS is composed of. Nothing may be [`behind`](Self::behind).
    pub fn set_down(&self, into: &mut Composed) {
        debug_assert!(self.behind.is_empty());
        into.image.clone_from(&self.vmcs12);
        (into.dirty, into.unchecked) = (self.dirty, self.unchecked);
        (into.vm86, into.host_changed) = (self.vm86, self.host_changed);
        into.l1_efer = self.l1_efer;
        // What is not fetched is not in the image.
        into.rules = if self.behind.is_empty() { self.rules } else { 0 };
    }

    /// Behind the VMPTRLD: the hardware's VMCS is `of` from now on. What differs from the VMCS12 that was read is dirty. `left`
    /// was set down before.
    pub fn take_up(&mut self, of: &Composed, left: &Composed) {
        if of.rules == self.rules {
            let differ = self.vmcs12.differs(&of.image);
            self.dirty = of.dirty.union(differ);
            self.unchecked = of.unchecked.union(differ);
            self.vm86 = of.vm86;
            self.l1_efer = of.l1_efer;
        }
        // What an exit loads was made of the one that was current before.
        if left.rules == self.rules {
            let host = Groups::of(Group::Host).union(Groups::of(Group::Controls));
            self.host_changed = left.host_changed || self.vmcs12.differs(&left.image).meets(host);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::vmcs::field;

    #[test]
    fn a_field_that_differs_tells_its_group() {
        for (encoding, place) in place::every() {
            let (one, mut two) = (Vmcs12::new(), Vmcs12::new());
            assert!(one.differs(&two).is_empty());
            let named = place::find(encoding.into()).unwrap();
            for bit in 0..64 {
                let value = 1 << bit & named.mask;
                if value != 0 {
                    two.write(encoding.into(), named, value);
                    let rights = one == two;
                    assert!(rights || one.differs(&two).has(place.group), "{encoding:x}, {bit}");
                    assert!(
                        rights
                            || crate::merge::follows(encoding)
                                .without(one.differs(&two))
                                .is_empty()
                    );
                }
            }
        }
    }

    #[test]
    fn what_was_composed_by_other_rules_counts_for_nothing() {
        let mut m = Machine::new(crate::Capabilities::NONE);
        let mut down = Composed::NOTHING;
        (m.dirty, m.unchecked, m.host_changed) = (Groups::NONE, Groups::NONE, false);
        m.set_down(&mut down);
        m.touch_whole();
        m.take_up(&down, &down);
        assert!(m.dirty.is_empty() && m.unchecked.is_empty() && !m.host_changed);
        m.vmcs12.set(field::HOST_RSP, 5);
        m.take_up(&down, &down);
        assert_eq!((m.dirty, m.unchecked), (Groups::of(Group::Host), Groups::of(Group::Host)));
        assert!(m.host_changed);
        m.touch_all();
        m.take_up(&down, &down);
        assert_eq!((m.dirty, m.unchecked), (Groups::ALL, Groups::ALL));
        assert!(m.host_changed);
    }
    #[test]
    fn what_was_composed_by_another_efer_of_l1s_is_composed_again() {
        let mut m = Machine::new(crate::Capabilities::NONE);
        let mut down = Composed::NOTHING;
        m.note_l1_efer(0xd01);
        m.dirty = Groups::NONE;
        m.set_down(&mut down);
        // Another VMCS is entered with L1's new one.
        m.touch_whole();
        m.note_l1_efer(0x500);
        m.take_up(&down, &down);
        assert_eq!(m.dirty, Groups::NONE);
        m.note_l1_efer(0x500);
        assert_eq!(m.dirty, Groups::of(Group::Msrs));
    }
}
