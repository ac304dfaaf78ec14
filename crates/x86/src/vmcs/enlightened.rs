//! The enlightened VMCS of Hyper-V, version 1: a page in which a guest's hypervisor describes its guest without
//! VMREAD and VMWRITE (Hypervisor Top-Level Functional Specification, "Nested virtualization"). Which fields it
//! carries and where stands in the table of fields; here is what follows from that, and what lies beside them.

use super::field::{CARRIED, TABLE};
pub use super::group::{Clean, Enlightened};
use super::group::{Group, Place, Shadow};
use super::place::Served;

/// The version of the page, which it begins with.
pub const VERSION: u32 = 1;
/// Bytes of the page that mean something.
pub const BYTES: usize = 1024;

/// Bytes of the page at which what is no field of a VMCS lies.
pub mod at {
    /// The clean fields: a bit says that L1 has changed nothing of the group since the last entry.
    pub const CLEAN: usize = 824;
    /// Which enlightenments L1 uses with this guest.
    pub const CONTROL: usize = 836;
    /// The number of the vCPU that L2 is, in L1's count.
    pub const VP_ID: usize = 840;
    /// The number of the VM that L2 is, in L1's count.
    pub const VM_ID: usize = 848;
    /// Where L1's partition assist page lies.
    pub const PARTITION_ASSIST: usize = 856;
}

/// Bits of the enlightenments control.
pub mod control {
    /// L0 carries out L2's hypercalls that flush translations.
    pub const DIRECT_FLUSH: u32 = 1 << 0;
    /// L1 says by the clean fields whether it has changed its MSR bitmap.
    pub const MSR_BITMAP: u32 = 1 << 1;
}

/// Groups of which there is a bit, and the one that is never clean.
pub const GROUPS: usize = Clean::Always as usize + 1;

/// The word of clean fields with all of them clean.
pub const ALL_CLEAN: u32 = 0xffff;

/// A field that the page carries: where the VMCS12 has it, and where the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// The field in the VMCS12.
    pub field: Served,
    /// The byte of the page.
    pub offset: u16,
}

impl Line {
    const NONE: Self = Self {
        field: Served {
            encoding: 0,
            place: Place { offset: 0, group: Group::Exit, shadow: Shadow::No },
            mask: 0,
        },
        offset: 0,
    };

    const fn at(index: usize) -> Option<(Self, Enlightened)> {
        let (encoding, place) = TABLE[index];
        let (Some(place), Some(carried)) = (place, CARRIED[index].1) else { return None };
        let mask = mask(encoding);
        assert!((carried.offset as usize).is_multiple_of(width(encoding)));
        assert!(carried.offset as usize + width(encoding) <= BYTES);
        let field = Served { encoding, place, mask };
        Some((Self { field, offset: carried.offset }, carried))
    }
}

const fn mask(encoding: u16) -> u64 {
    match encoding >> 13 & 3 {
        0 => 0xffff,
        2 => 0xffff_ffff,
        _ => u64::MAX,
    }
}

const fn width(encoding: u16) -> usize {
    match encoding >> 13 & 3 {
        0 => 2,
        2 => 4,
        _ => 8,
    }
}

const fn count(written: bool) -> usize {
    let (mut n, mut i) = (0, 0);
    while i < TABLE.len() {
        if let Some((_, carried)) = Line::at(i) {
            n += if written { carried.is_written } else { !matches!(carried.clean, Clean::Report) }
                as usize;
        }
        i += 1;
    }
    n
}

/// How many fields an entry reads.
pub const READ: usize = count(false);
/// How many fields an exit writes.
pub const WRITTEN: usize = count(true);

/// The fields that an entry reads, by their clean groups.
pub static READ_LINES: [Line; READ] = READ_TABLE.0;
/// Where each group begins in [`READ_LINES`], and the end of the last.
pub const STARTS: [u8; GROUPS + 1] = READ_TABLE.1;

const READ_TABLE: ([Line; READ], [u8; GROUPS + 1]) = {
    // By groups, so that a clean one is a slice to leave out.
    let (mut lines, mut starts) = ([Line::NONE; READ], [0; GROUPS + 1]);
    let (mut n, mut group) = (0, 0);
    while group < GROUPS {
        starts[group] = n as u8;
        let mut i = 0;
        while i < TABLE.len() {
            if let Some((line, carried)) = Line::at(i)
                && carried.clean as usize == group
            {
                lines[n] = line;
                n += 1;
            }
            i += 1;
        }
        group += 1;
    }
    starts[GROUPS] = n as u8;
    (lines, starts)
};

/// The fields that an exit writes.
pub static WRITTEN_LINES: [Line; WRITTEN] = WRITTEN_TABLE;

/// Bytes that lie one behind the other and that an exit writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first of them.
    pub offset: u16,
    /// Bytes from there to where a field that is not written begins.
    pub bytes: u16,
}

/// Which words of four bytes an exit writes; of those that hold two fields it writes both.
const WORDS: [bool; BYTES / 4] = {
    let (mut words, mut halves, mut i) = ([false; BYTES / 4], [0u8; BYTES / 4], 0);
    while i < WRITTEN {
        let line = WRITTEN_TABLE[i];
        let (first, bytes) = (line.offset as usize, width(line.field.encoding));
        halves[first / 4] += if bytes == 2 { 1 } else { 2 };
        words[first / 4] = true;
        if bytes == 8 {
            halves[first / 4 + 1] += 2;
            words[first / 4 + 1] = true;
        }
        i += 1;
    }
    i = 0;
    while i < BYTES / 4 {
        // Of a word that is written in part the rest would be overwritten, too.
        assert!(halves[i] == 0 || halves[i] == 2);
        i += 1;
    }
    words
};

const WRITTEN_TABLE: [Line; WRITTEN] = {
    let (mut lines, mut n, mut i) = ([Line::NONE; WRITTEN], 0, 0);
    while i < TABLE.len() {
        if let Some((line, carried)) = Line::at(i)
            && carried.is_written
        {
            lines[n] = line;
            n += 1;
        }
        i += 1;
    }
    lines
};

/// The next run at or behind a word: a single word, or whole words of eight bytes, which can be written as such.
const fn run_from(mut word: usize) -> Option<(Run, usize)> {
    while word < BYTES / 4 && !WORDS[word] {
        word += 1;
    }
    if word == BYTES / 4 {
        return None;
    }
    let mut end = word + 1;
    // From an aligned word on, whole pairs: they can be written eight bytes at once.
    if word.is_multiple_of(2) {
        end = word;
        while end + 1 < BYTES / 4 && WORDS[end] && WORDS[end + 1] {
            end += 2;
        }
        // A pair of which only the first half is written: four bytes alone.
        if end == word {
            end = word + 1;
        }
    }
    Some((Run { offset: (word * 4) as u16, bytes: ((end - word) * 4) as u16 }, end))
}

// Counted first, because the length of an array has to be known before its content.
const RUN_COUNT: usize = {
    let (mut n, mut word) = (0, 0);
    while let Some((_, end)) = run_from(word) {
        n += 1;
        word = end;
    }
    n
};

/// What an exit writes, in pieces that are written at once.
pub static RUNS: [Run; RUN_COUNT] = {
    let (mut runs, mut n, mut word) = ([Run { offset: 0, bytes: 0 }; RUN_COUNT], 0, 0);
    while let Some((run, end)) = run_from(word) {
        runs[n] = run;
        n += 1;
        word = end;
    }
    runs
};

/// Where the page has a field, and how many bytes of it, by the field's encoding.
pub fn find(encoding: u64) -> Option<(u16, usize)> {
    // Searched: asked for failed entries, and for VMREAD and VMWRITE, which this page is there to spare.
    let carried = CARRIED.iter().find(|(e, _)| u64::from(*e) == encoding)?;
    carried.1.map(|place| (place.offset, width(carried.0)))
}

/// Numbers of the hypercalls that flush translations of linear addresses: those that a hypervisor may leave to the one below it
/// by its page (TLFS, "Direct virtual flush").
pub mod flush {
    /// The number of HvCallFlushVirtualAddressSpace: all translations of an address space.
    pub const SPACE: u16 = 0x02;
    /// The number of HvCallFlushVirtualAddressList: those of a list of pages.
    pub const LIST: u16 = 0x03;
    /// The number of HvCallFlushVirtualAddressSpaceEx: `SPACE` on a sparse set of vCPUs.
    pub const SPACE_EX: u16 = 0x13;
    /// The number of HvCallFlushVirtualAddressListEx: `LIST` on a sparse set of vCPUs.
    pub const LIST_EX: u16 = 0x14;

    /// Whether a call is one of them.
    pub const fn is(number: u16) -> bool {
        matches!(number, SPACE | LIST | SPACE_EX | LIST_EX)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::super::field;
    use super::*;

    #[test]
    fn no_two_fields_share_a_byte_of_the_page() {
        let mut bytes = [0u16; BYTES];
        for (encoding, carried) in CARRIED {
            let Some(carried) = carried else { continue };
            for byte in &mut bytes[usize::from(carried.offset)..][..width(*encoding)] {
                assert_eq!(*byte, 0, "{encoding:#x}");
                *byte = *encoding;
            }
        }
        for at in [0, at::CLEAN, at::CONTROL, at::VP_ID, at::VM_ID, at::PARTITION_ASSIST] {
            assert_eq!(bytes[at], 0);
        }
    }

    #[test]
    fn what_is_carried_the_vmcs12_has() {
        for ((encoding, place), (again, carried)) in TABLE.iter().zip(CARRIED) {
            assert_eq!(encoding, again);
            assert!(carried.is_none() || place.is_some(), "{encoding:#x}");
        }
    }

    #[test]
    fn each_group_has_its_lines() {
        let lines = |clean: Clean| {
            let (from, to) = (STARTS[clean as usize], STARTS[clean as usize + 1]);
            &READ_LINES[usize::from(from)..usize::from(to)]
        };
        let of =
            |clean| lines(clean).iter().map(|l| l.field.encoding).collect::<std::vec::Vec<_>>();
        assert_eq!(of(Clean::MsrBitmap), [0x2004]);
        assert_eq!(of(Clean::Basic), [0x4824, 0x681c, 0x6820]);
        assert_eq!(of(Clean::Always), [0x401c, 0x681e]);
        assert_eq!(lines(Clean::Guest2).len(), 8 + 10 + 8 + 10);
        assert!(lines(Clean::Control).is_empty());
        assert_eq!(READ_LINES.len() + 11, CARRIED.iter().filter(|(_, c)| c.is_some()).count());
    }

    #[test]
    fn runs_are_what_an_exit_writes_and_nothing_else() {
        let mut bytes = [false; BYTES];
        for line in &WRITTEN_LINES {
            let at = usize::from(line.offset);
            bytes[at..at + width(line.field.encoding)].fill(true);
        }
        let mut runs = [false; BYTES];
        for run in &RUNS {
            let at = usize::from(run.offset);
            runs[at..at + usize::from(run.bytes)].fill(true);
            assert!(run.bytes == 4 || run.offset % 8 == 0 && run.bytes % 8 == 0);
        }
        assert!(bytes == runs);
        assert!(RUNS.len() < 16);
    }

    #[test]
    fn a_field_is_found_by_its_encoding() {
        assert_eq!(find(field::GUEST_RIP.encoding().into()), Some((816, 8)));
        assert_eq!(find(field::VPID.encoding().into()), Some((632, 2)));
        assert_eq!(find(field::EXIT_REASON.encoding().into()), Some((692, 4)));
        assert_eq!(find(field::PML_INDEX.encoding().into()), None);
        assert_eq!(find(0x1_0000_681e), None);
    }
}
