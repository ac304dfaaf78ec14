//! Where a field lies in the VMCS12, and what follows from the table of fields: an index by
//! encoding, the bitmaps of a shadow VMCS, the lists of what it holds.
//!
//! The VMCS12 is the memory image of a VMCS that a guest's hypervisor has made. Its layout is that
//! of KVM's `struct vmcs12`, because KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE carry it.

use super::field::TABLE;
use super::group::{Group, Groups, Place, Shadow};
use crate::Direction;

/// The revision of the VMCS12's layout, which a VMCS region begins with.
pub const VMCS12_REVISION: u32 = 0x11e5_7ed0;

/// Bytes of the image that hold fields, rounded up to whole words of eight.
pub const VMCS12_BYTES: usize = 1024;

/// Bytes of a bitmap of VMREAD or VMWRITE exits (SDM vol. 3C §25.6.15).
pub const BITMAP_BYTES: usize = 4096;

/// Bits of an encoding that a field of ours can have set; bit 0 asks for the upper half of a 64-bit
/// field (SDM vol. 3C §25.11.2).
const ENCODING: u64 = 0x6c3f;
/// Bits of the index of a field in the table by encoding.
const SLOTS: usize = 512;

/// Where an encoding stands in the table: width, area and the lowest five bits of the index.
const fn slot(encoding: u64) -> usize {
    // Width, type and five bits of index: no field of the table has more, as is asserted below.
    ((encoding >> 13 & 3) << 7 | (encoding >> 10 & 3) << 5 | encoding >> 1 & 31) as usize
}

/// Every place by its encoding's slot.
static PLACES: [Option<Place>; SLOTS] = {
    let mut places = [None; SLOTS];
    let mut i = 0;
    while i < TABLE.len() {
        let (encoding, place) = TABLE[i];
        assert!(encoding as u64 & !ENCODING == 0);
        if let Some(place) = place {
            let width = encoding >> 13 & 3;
            let size = if width == 0 { 2 } else { 4 << (width & 1) };
            // Forty bytes are the header of `struct vmcs12`, which has no fields.
            assert!(place.offset % size == 0 && place.offset >= 40);
            assert!((place.offset + size) as usize <= VMCS12_BYTES);
            places[slot(encoding as u64)] = Some(place);
        }
        i += 1;
    }
    places
};

/// A field of the VMCS12 as VMREAD and VMWRITE name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// The field's place.
    pub place: Place,
    /// The bits that the access reaches, as they lie in the field.
    pub mask: u64,
    /// How far those bits lie above bit 0: 32 for the upper half of a 64-bit field.
    pub shift: u32,
    /// The field lies in the read-only data area.
    pub read_only: bool,
}

/// The field of the VMCS12 with an encoding, if there is one. The table has as many places as its
/// index has values, so that a guess of the CPU stays within it too.
#[inline]
pub fn find(encoding: u64) -> Option<Named> {
    // The mask bounds the index for the compiler: L1 chooses the encoding.
    let place = PLACES[slot(encoding) & (SLOTS - 1)]?;
    // Behind the look-up, which drops these bits: an encoding with one of them set names no field.
    if encoding & !ENCODING != 0 {
        return None;
    }
    let high = encoding & 1 != 0;
    let mask = match encoding >> 13 & 3 {
        0 => 0xffff,
        2 => 0xffff_ffff,
        _ => u64::MAX,
    };
    match high {
        false => Some(Named { place, mask, shift: 0, read_only: is_read_only(encoding) }),
        // Only 64-bit fields have an upper half of their own.
        true if encoding >> 13 & 3 == 1 => Some(Named {
            place,
            mask: u64::MAX << 32,
            shift: 32,
            read_only: is_read_only(encoding),
        }),
        true => None,
    }
}

/// Units of two bytes in the image, of which each belongs to one field at most.
pub const UNITS: usize = VMCS12_BYTES / 2;

/// Those of eight bytes.
pub const UNITS_OF_WORD: usize = 4;

/// The groups of the fields at each unit.
pub const fn groups_by_unit() -> [Groups; UNITS] {
    let (mut groups, mut i) = ([Groups::NONE; UNITS], 0);
    while i < TABLE.len() {
        let (encoding, place) = TABLE[i];
        if let Some(place) = place {
            // 16, 64 and 32 bits; a natural width is kept in 64.
            let units = match encoding >> 13 & 3 {
                0 => 1,
                2 => 2,
                _ => 4,
            };
            let mut n = 0;
            while n < units {
                groups[(place.offset as usize / 2 + n) & (UNITS - 1)].add(place.group);
                n += 1;
            }
        }
        i += 1;
    }
    groups
}

/// Every field that has a place, by its encoding.
pub fn every() -> impl Iterator<Item = (u32, Place)> {
    TABLE.iter().filter_map(|(encoding, place)| Some((u32::from(*encoding), (*place)?)))
}

/// The place of a field that has one.
#[inline]
pub const fn place(encoding: u32) -> Option<Place> {
    PLACES[slot(encoding as u64) & (SLOTS - 1)]
}

/// Whether an encoding names a field of the read-only data area.
const fn is_read_only(encoding: u64) -> bool {
    encoding >> 10 & 3 == 1
}

/// The greatest index of a field of the VMCS12, as bits 9:1 of IA32_VMX_VMCS_ENUM report it
/// (SDM vol. 3C §A.9).
pub const MAX_INDEX: u64 = {
    let mut greatest = 0;
    let mut i = 0;
    while i < TABLE.len() {
        let (encoding, place) = TABLE[i];
        let index = (encoding >> 1 & 0x1ff) as u64;
        if place.is_some() && index > greatest {
            greatest = index;
        }
        i += 1;
    }
    greatest
};

/// A field that a shadow VMCS holds: where the VMCS12 has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// What VMREAD and VMWRITE take.
    pub encoding: u16,
    /// The field's place.
    pub place: Place,
    /// The bits that the field has.
    pub mask: u64,
}

impl Served {
    const NONE: Self = Self {
        encoding: 0,
        place: Place { offset: 0, group: Group::Exit, shadow: Shadow::No },
        mask: 0,
    };
}

/// Whether a shadow VMCS holds a field, as one of those that L1 writes there or as one of those that it only reads.
const fn is_held_for(direction: Direction, place: Option<Place>) -> bool {
    match place {
        Some(Place { shadow: Shadow::Read, .. }) => !direction.is_write(),
        Some(Place { shadow: Shadow::ReadWrite, .. }) => direction.is_write(),
        Some(Place { shadow: Shadow::No, .. }) | None => false,
    }
}

const fn count(direction: Direction) -> usize {
    let (mut n, mut i) = (0, 0);
    while i < TABLE.len() {
        n += is_held_for(direction, TABLE[i].1) as usize;
        i += 1;
    }
    n
}

/// Fields of a shadow VMCS that L1 writes there.
pub const WRITTEN: usize = count(Direction::Write);
/// Fields of a shadow VMCS.
pub const SERVED: usize = WRITTEN + count(Direction::Read);

/// Fields that a shadow VMCS holds: what is copied into it after L2 has run. Those that L1 writes there come first:
/// they are copied out of it before L2 runs.
pub static SHADOWED: [Served; SERVED] = {
    let (mut list, mut n, mut i) = ([Served::NONE; SERVED], 0, 0);
    // Twice through the table: first what L1 writes, then what it only reads.
    while i < 2 * TABLE.len() {
        let (encoding, place) = TABLE[i % TABLE.len()];
        if let Some(place) = place
            && is_held_for(Direction::write_if(i < TABLE.len()), Some(place))
        {
            let mask = match encoding >> 13 & 3 {
                0 => 0xffff,
                2 => 0xffff_ffff,
                _ => u64::MAX,
            };
            list[n] = Served { encoding, place, mask };
            n += 1;
        }
        i += 1;
    }
    list
};

/// A bitmap that lets VMREAD or VMWRITE of some fields exit (SDM vol. 3C §25.6.15): bit clear, the
/// shadow VMCS serves it. `has` tells which fields the CPU's own VMCS has.
pub fn fill_bitmap(
    bitmap: &mut [u8; BITMAP_BYTES],
    direction: Direction,
    has: impl Fn(u16) -> bool,
) {
    // All exits at first: a field that only the VMCS12 has is none for the CPU.
    bitmap.fill(0xff);
    let served = match direction {
        Direction::Read => SERVED,
        Direction::Write => WRITTEN,
    };
    for &Served { encoding, .. } in SHADOWED.iter().take(served) {
        // The CPU would refuse the field without an exit, though L1 was offered it.
        if !has(encoding) {
            continue;
        }
        for (at, bits) in accesses(encoding) {
            bitmap[at & (BITMAP_BYTES - 1)] &= !bits;
        }
    }
}

/// The bytes of such a bitmap in which a field has bits, and the bits.
pub fn accesses(encoding: u16) -> impl Iterator<Item = (usize, u8)> {
    // A 64-bit field has an encoding for its upper half, too (SDM vol. 3C §25.11.2).
    let halves = if encoding >> 13 & 3 == 1 { 2 } else { 1 };
    (encoding..encoding + halves).map(|access| (usize::from(access >> 3), 1 << (access & 7)))
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::super::field;
    use super::*;

    #[test]
    fn every_field_is_found_by_its_encoding_and_nothing_else_is() {
        for encoding in 0..=u64::from(u16::MAX) {
            let line = TABLE.iter().find(|(e, _)| u64::from(*e) == encoding & !1);
            let halves = encoding & 1 == 0 || encoding >> 13 & 3 == 1;
            let expected = line.and_then(|(_, p)| *p).filter(|_| halves);
            assert_eq!(find(encoding).map(|f| f.place), expected, "{encoding:#x}");
            assert_eq!(find(encoding | 1 << 32), None);
        }
    }

    #[test]
    fn no_two_fields_share_a_byte() {
        let mut bytes = [0u16; VMCS12_BYTES];
        for (encoding, place) in TABLE {
            let Some(place) = place else { continue };
            let size = [2, 8, 4, 8][usize::from(encoding >> 13 & 3)];
            for byte in &mut bytes[usize::from(place.offset)..][..size] {
                assert_eq!(*byte, 0, "{encoding:#x}");
                *byte = *encoding;
            }
        }
    }

    #[test]
    fn a_bitmap_is_clear_where_the_shadow_serves() {
        let mut reads = [0; BITMAP_BYTES];
        fill_bitmap(&mut reads, Direction::Read, |_| true);
        let mut writes = [0; BITMAP_BYTES];
        fill_bitmap(&mut writes, Direction::Write, |e| e != 0x681e);
        let clear = |b: &[u8], e: u32| b[e as usize / 8] & 1 << (e % 8) == 0;
        assert!(clear(&reads, field::EXIT_REASON.encoding()));
        assert!(!clear(&writes, field::EXIT_REASON.encoding()));
        assert!(clear(&reads, field::GUEST_PHYSICAL_ADDRESS.encoding() | 1));
        assert!(clear(&reads, 0x681e) && !clear(&writes, 0x681e));
        let zeros = |b: &[u8]| b.iter().map(|x| x.count_zeros()).sum::<u32>() as usize;
        assert_eq!(zeros(&reads), SERVED + 1);
        assert_eq!(zeros(&writes), WRITTEN - 1);
    }

    #[test]
    fn the_greatest_index_is_that_of_the_tsc_multiplier() {
        assert_eq!(MAX_INDEX, 25);
    }
}
