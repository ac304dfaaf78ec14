//! Segment registers between the neutral form and the VMCS's.
//!
//! SDM vol. 3C table 25-2 (access rights), §27.3.1.2 (what an entry checks).

use backend::SegmentName;
use x86::{
    segment::{Segment, attr, kind},
    vmcs::{Natural, ReadWrite, access_rights},
};

use crate::fields::{self, Slot};

/// The four fields of a register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) selector: Slot<u16, ReadWrite>,
    pub(crate) base: Slot<Natural, ReadWrite>,
    pub(crate) limit: Slot<u32, ReadWrite>,
    pub(crate) rights: Slot<u32, ReadWrite>,
}

macro_rules! places {
    ($selector:ident, $base:ident, $limit:ident, $rights:ident) => {
        Places {
            selector: fields::$selector,
            base: fields::$base,
            limit: fields::$limit,
            rights: fields::$rights,
        }
    };
}

/// Where a register is kept.
#[inline(always)]
pub(crate) fn places(name: SegmentName) -> Places {
    match name {
        SegmentName::Es => {
            places!(GUEST_ES_SELECTOR, GUEST_ES_BASE, GUEST_ES_LIMIT, GUEST_ES_RIGHTS)
        }
        SegmentName::Cs => {
            places!(GUEST_CS_SELECTOR, GUEST_CS_BASE, GUEST_CS_LIMIT, GUEST_CS_RIGHTS)
        }
        SegmentName::Ss => {
            places!(GUEST_SS_SELECTOR, GUEST_SS_BASE, GUEST_SS_LIMIT, GUEST_SS_RIGHTS)
        }
        SegmentName::Ds => {
            places!(GUEST_DS_SELECTOR, GUEST_DS_BASE, GUEST_DS_LIMIT, GUEST_DS_RIGHTS)
        }
        SegmentName::Fs => {
            places!(GUEST_FS_SELECTOR, GUEST_FS_BASE, GUEST_FS_LIMIT, GUEST_FS_RIGHTS)
        }
        SegmentName::Gs => {
            places!(GUEST_GS_SELECTOR, GUEST_GS_BASE, GUEST_GS_LIMIT, GUEST_GS_RIGHTS)
        }
        SegmentName::Ldtr => {
            places!(GUEST_LDTR_SELECTOR, GUEST_LDTR_BASE, GUEST_LDTR_LIMIT, GUEST_LDTR_RIGHTS)
        }
        SegmentName::Tr => {
            places!(GUEST_TR_SELECTOR, GUEST_TR_BASE, GUEST_TR_LIMIT, GUEST_TR_RIGHTS)
        }
    }
}

/// Attributes from access rights. A register that cannot be used is one that is not present.
#[inline]
pub fn attributes(rights: u32) -> u16 {
    // Bits 15:12 of the rights are attributes 11:8.
    let high = (rights >> access_rights::HIGH_SHIFT) as u16 & (attr::ALL & !0xff);
    let bits = (rights & access_rights::LOW) as u16 | high;
    // KVM_GET_SREGS shows it as not present.
    if rights & access_rights::UNUSABLE != 0 { bits & !attr::P } else { bits }
}

/// Access rights from attributes.
#[inline]
pub fn rights(attributes: u16) -> u32 {
    let bits = u32::from(attributes & attr::ALL);
    // What is not present cannot be used: the VMCS has a bit of its own for it.
    let low = bits & access_rights::LOW;
    let high = (bits & !access_rights::LOW) << access_rights::HIGH_SHIFT;
    let unusable = if attributes & attr::P == 0 { access_rights::UNUSABLE } else { 0 };
    low | high | unusable
}

/// A register's access rights as an entry takes them: what is set may come from a VMM that never
/// ran on this hardware.
///
/// Code and data must be marked accessed. TR must be there and busy, a 64-bit or 32-bit task state,
/// or in a guest outside IA-32e mode a 16-bit one.
pub fn rights_for(name: SegmentName, segment: &Segment, long_mode: bool) -> u32 {
    const ACCESSED: u16 = 1;
    match name {
        SegmentName::Ldtr => rights(segment.attr),
        SegmentName::Tr => {
            // Available becomes busy: TR is loaded, and an entry refuses another.
            let kind = match segment.kind() {
                kind::TSS16_AVAILABLE | kind::TSS16_BUSY if !long_mode && segment.is_present() => {
                    kind::TSS16_BUSY
                }
                _ => kind::TSS_BUSY,
            };
            // DPL, AVL and G stay, the rest is what the kind has.
            let keep = attr::DPL_MASK | attr::AVL | attr::G;
            rights(segment.attr & keep | attr::P | u16::from(kind))
        }
        // Also where the register cannot be used: the bit means nothing then.
        _ => rights(segment.attr | ACCESSED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn attributes_of_a_usable_register_survive(bits in 0u16..=attr::ALL) {
            let present = bits | attr::P;
            prop_assert_eq!(attributes(rights(present)), present);
            prop_assert_eq!(rights(present) & !0xf0ff, 0);
        }

        #[test]
        fn a_register_that_is_not_present_is_unusable_and_keeps_its_level(bits in 0u16..=attr::ALL) {
            let absent = bits & !attr::P;
            let there = rights(absent);
            prop_assert_ne!(there & access_rights::UNUSABLE, 0);
            prop_assert_eq!(attributes(there), absent);
            prop_assert_eq!((there >> 5) & 3, u32::from(bits >> 5) & 3);
        }

        #[test]
        fn an_entry_takes_any_task_register(bits in 0u16..=attr::ALL, long: bool) {
            let segment = Segment { attr: bits, ..Segment::RESET_TR };
            let there = rights_for(SegmentName::Tr, &segment, long);
            let kind = there & 0xf;
            prop_assert!(kind == 11 || (kind == 3 && !long));
            prop_assert_eq!(there & (access_rights::UNUSABLE | 0x10), 0);
            prop_assert_ne!(there & 0x80, 0);
        }
    }

    /// An entry takes a CS with bit 16 set, and has L and D of it (SDM vol. 3C §27.3.2.2): L2's mode is told by them.
    #[test]
    fn an_unusable_cs_keeps_its_mode() {
        for mode in [0, attr::L, attr::DB] {
            let there = rights(0x9b | mode | attr::G) | access_rights::UNUSABLE;
            assert_eq!(attributes(there) & (attr::L | attr::DB), mode);
        }
    }

    #[test]
    fn rights_lie_where_the_manual_puts_them() {
        // 64-bit code: type 11, S, P, L, G.
        let cs = Segment::from_descriptor(0x10, 0x00af_9b00_0000_ffff);
        assert_eq!(rights(cs.attr), 0xa09b);
        assert_eq!(rights_for(SegmentName::Ds, &Segment { attr: 0x92, ..cs }, true), 0x93);
    }
}
