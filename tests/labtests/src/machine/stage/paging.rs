//! The four formats of page tables, and tables in a guest's memory (APM vol. 2 §5.2, §5.3).

use crate::kvm::file::CpuidTable;
use crate::machine::memory::{Memory, PAGE};
use crate::outcome::{Outcome, fail};

/// Entry: present.
pub const PRESENT: u64 = 1;
/// Entry: writable.
pub const WRITABLE: u64 = 2;
/// Entry: for user mode.
pub const USER: u64 = 4;
/// Entry: accessed.
pub const ACCESSED: u64 = 0x20;
/// Entry: dirty.
pub const DIRTY: u64 = 0x40;
/// Entry of an upper level: a page, not a table.
pub const LARGE: u64 = 0x80;
/// Entry of a page: global.
pub const GLOBAL: u64 = 0x100;
/// Entry: not for instruction fetches.
pub const NX: u64 = 1 << 63;
/// Present, writable, user.
pub const ALL: u64 = PRESENT | WRITABLE | USER;

/// A format of page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// 32-bit entries, 4 KiB and 4 MiB pages.
    Legacy,
    /// 64-bit entries under four of the top level.
    Pae,
    /// 64-bit mode.
    Four,
    /// 64-bit mode with CR4.LA57.
    Five,
}

impl Paging {
    /// The paging modes that a guest of this host can use.
    pub fn offered(cpuid: &mut CpuidTable) -> Vec<Self> {
        let la57 = cpuid.find(7, 0).is_some_and(|leaf| leaf.ecx >> 16 & 1 != 0);
        let mut all = vec![Self::Legacy, Self::Pae, Self::Four];
        all.extend(la57.then_some(Self::Five));
        all
    }

    /// Whether the guest is in 64-bit mode.
    pub fn is_wide(self) -> bool {
        matches!(self, Self::Four | Self::Five)
    }

    /// The level of the root.
    pub fn levels(self) -> u32 {
        match self {
            Self::Legacy => 2,
            Self::Pae => 3,
            Self::Four => 4,
            Self::Five => 5,
        }
    }

    /// Bytes of an entry.
    pub fn entry_bytes(self) -> u64 {
        if self == Self::Legacy { 4 } else { 8 }
    }

    /// Bytes that an entry of this level maps.
    pub fn span(self, level: u32) -> u64 {
        let bits = if self == Self::Legacy { 10 } else { 9 };
        PAGE << (bits * (level - 1))
    }

    /// Where an address's entry lies in a table of this level.
    pub fn offset(self, va: u64, level: u32) -> u64 {
        let entries = match (self, level) {
            (Self::Pae, 3) => 4,
            (Self::Legacy, _) => 1024,
            _ => 512,
        };
        va / self.span(level) % entries * self.entry_bytes()
    }

    /// Where tests map what they look at: under an entry of its own at every level.
    pub fn at(self) -> u64 {
        match self {
            Self::Legacy | Self::Pae => 0x4000_0000,
            Self::Four => 5 << 39 | 0x4000_0000,
            Self::Five => 3 << 48 | 5 << 39 | 0x4000_0000,
        }
    }

    /// Whether there are entries with NX.
    pub fn has_nx(self) -> bool {
        self != Self::Legacy
    }

    /// What an entry that leads to a table has at most: the top of PAE knows only "present".
    pub fn table_flags(self, level: u32) -> u64 {
        if self == Self::Pae && level == 3 { PRESENT } else { ALL }
    }

    /// The address in an entry that leads to a table or a 4 KiB page.
    pub fn target(self, entry: u64) -> u64 {
        entry & if self == Self::Legacy { 0xffff_f000 } else { 0x000f_ffff_ffff_f000 }
    }

    /// Reads an entry.
    pub fn get(self, memory: &Memory, entry: u64) -> u64 {
        let word = memory.read(entry & !7);
        match self {
            Self::Legacy => word >> (entry % 8 * 8) & 0xffff_ffff,
            _ => word,
        }
    }

    /// Writes an entry, from outside of the guest.
    pub fn put(self, memory: &Memory, entry: u64, value: u64) {
        let bytes = self.entry_bytes() as usize;
        memory.write_bytes(entry, &value.to_le_bytes()[..bytes]);
    }
}

/// Pages for page tables, taken one after the other.
#[derive(Debug)]
pub struct Pool {
    next: u64,
    end: u64,
}

impl Pool {
    /// The pages of `[next, end)`.
    pub fn new(next: u64, end: u64) -> Self {
        Self { next, end }
    }

    /// One page, which is zero if nobody used it before.
    pub fn page(&mut self) -> u64 {
        assert!(self.next < self.end, "the pool of pages is empty");
        self.next += PAGE;
        self.next - PAGE
    }

    /// `count` pages that begin at a multiple of their size.
    pub fn aligned(&mut self, bytes: u64) -> u64 {
        let at = self.next.next_multiple_of(bytes);
        assert!(at + bytes <= self.end, "the pool of pages is empty");
        self.next = at + bytes;
        at
    }
}

/// A tree of tables in a guest's memory, seen and changed from outside.
#[derive(Clone, Copy)]
pub struct Tree<'a> {
    pub paging: Paging,
    pub root: u64,
    pub memory: &'a Memory,
}

impl Tree<'_> {
    /// Where the entry of this level for `va` lies; fails if no table leads there.
    pub fn entry(&self, va: u64, level: u32) -> Outcome<u64> {
        let mut table = self.root;
        for upper in (level + 1..=self.paging.levels()).rev() {
            let entry = self.paging.get(self.memory, table + self.paging.offset(va, upper));
            if entry & PRESENT == 0 {
                return fail(format!("no table of level {} for {va:#x}", upper - 1));
            }
            table = self.paging.target(entry);
        }
        Ok(table + self.paging.offset(va, level))
    }

    /// Where the entry of this level for `va` lies, with tables made where there are none. Their entries
    /// permit all.
    pub fn make(&self, pool: &mut Pool, va: u64, level: u32) -> u64 {
        let mut table = self.root;
        for upper in (level + 1..=self.paging.levels()).rev() {
            let at = table + self.paging.offset(va, upper);
            let mut entry = self.paging.get(self.memory, at);
            if entry & PRESENT == 0 {
                entry = pool.page() | self.paging.table_flags(upper);
                self.paging.put(self.memory, at, entry);
            }
            table = self.paging.target(entry);
        }
        table + self.paging.offset(va, level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_split_as_the_formats_say() {
        assert_eq!(Paging::Legacy.offset(0x4000_1000, 2), 0x100 * 4);
        assert_eq!(Paging::Legacy.offset(0x4000_1000, 1), 4);
        assert_eq!(Paging::Pae.offset(0xc000_0000, 3), 3 * 8);
        assert_eq!(Paging::Four.offset(0xffff_8000_0020_3000, 4), 256 * 8);
        assert_eq!(Paging::Four.offset(0xffff_8000_0020_3000, 2), 8);
        assert_eq!(Paging::Five.offset(0xff00_0000_0000_0000, 5), 256 * 8);
        assert_eq!(Paging::Legacy.span(2), 4 << 20);
        assert_eq!(Paging::Pae.span(2), 2 << 20);
    }
}
