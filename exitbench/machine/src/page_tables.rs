//! Page tables that map the first 4 GiB of a guest one to one, in 2 MiB pages of supervisor, writable, executable memory: all that a
//! guest needs to be in long mode (SDM vol. 3A §4.5). And the way back: where a guest-virtual address lies, for reports of failures.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::memory::{GuestBytes, NoMemory, PAGE};

/// Bytes that [`write_identity_map`] fills: a PML4, a PDPT and four page directories.
pub const IDENTITY_MAP_BYTES: u64 = 6 * PAGE;

/// Flags of an entry that points to a table: present, writable, accessed, so that the CPU never has to write into the tables.
pub const TABLE: u64 = 0x23;
/// The same for a guest whose tests make some of the pages user mode's, and dirty.
pub const TABLE_FOR_USERS: u64 = 0x67;
/// Flags of a 2 MiB page: present, writable, accessed, dirty.
pub const LARGE_PAGE: u64 = 0xe3;
/// Flags of a 4 KiB page.
pub const SMALL_PAGE: u64 = 0x63;
const GIB: u64 = 1 << 30;
const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// Writes the tables at guest-physical `base`, page aligned, with these flags for tables. `base` is then a valid CR3.
pub fn write_identity_map(memory: &impl GuestBytes, base: u64, table: u64) -> Result<(), NoMemory> {
    let pdpt = base + PAGE;
    memory.put_words(base, &[pdpt | table])?;
    let directories: [u64; 4] = std::array::from_fn(|gib| pdpt + (1 + gib as u64) * PAGE);
    memory.put_words(pdpt, &directories.map(|directory| directory | table))?;
    for (gib, directory) in (0..).zip(directories) {
        let pages = (0..GIB / LARGE_PAGE_BYTES).map(|index| gib * GIB + index * LARGE_PAGE_BYTES);
        let entries: Vec<u64> = pages.map(|page| page | LARGE_PAGE).collect();
        memory.put_words(directory, &entries)?;
    }
    Ok(())
}

/// Writes one more root at `root`, which shares the tables of the map at `base`.
pub fn write_second_root(memory: &impl GuestBytes, root: u64, base: u64) -> Result<(), NoMemory> {
    memory.put_words(root, &[(base + PAGE) | TABLE])
}

/// Maps `pages` pages of 4 KiB from `address`, a multiple of 2 MiB below 4 GiB, one to one in the map at `base`: by an entry each, in
/// tables that lie in `memory` directly above the pages.
pub fn write_small_pages(
    directories: &impl GuestBytes,
    base: u64,
    memory: &impl GuestBytes,
    address: u64,
    pages: u64,
) -> Result<(), NoMemory> {
    for index in 0..small_page_tables(pages) {
        let (first, table) = (index * 512, address + (pages + index) * PAGE);
        let at = address + first * PAGE;
        let directory = base + (2 + at / GIB) * PAGE;
        directories.put_words(directory + at % GIB / LARGE_PAGE_BYTES * 8, &[table | TABLE])?;
        let own = first..pages.min(first + 512);
        let entries: Vec<u64> = own.map(|page| (address + page * PAGE) | SMALL_PAGE).collect();
        memory.put_words(table, &entries)?;
    }
    Ok(())
}

/// Tables that hold the entries of so many pages.
pub fn small_page_tables(pages: u64) -> u64 {
    pages.div_ceil(512)
}

/// Translates a guest-virtual address by the four-level tables at `cr3`. `None` where nothing is mapped, or a table lies outside of
/// memory.
pub fn translate(memory: &GuestMemoryMmap<()>, cr3: u64, address: u64) -> Option<u64> {
    const FRAME: u64 = 0x000f_ffff_ffff_f000;
    const PRESENT: u64 = 1;
    const PAGE_SIZE: u64 = 0x80;
    let mut table = cr3 & FRAME;
    for shift in [39, 30, 21, 12] {
        let index = address >> shift & 0x1ff;
        let entry: u64 = memory.read_obj(GuestAddress(table + index * 8)).ok()?;
        if entry & PRESENT == 0 {
            return None;
        }
        table = entry & FRAME;
        if shift == 12 || shift != 39 && entry & PAGE_SIZE != 0 {
            let offset = (1 << shift) - 1;
            return Some((table & !offset) | (address & offset));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(address: u64, bytes: u64) -> GuestMemoryMmap<()> {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(address), bytes as usize)]).unwrap()
    }

    #[test]
    fn both_roots_map_four_gib_one_to_one_and_no_more() {
        let memory = map(0, 1 << 20);
        write_identity_map(&memory, 0x3000, TABLE).unwrap();
        write_second_root(&memory, 0x2000, 0x3000).unwrap();
        for root in [0x2000, 0x3000] {
            for address in [0, 0x1234, 0x4000_0000, 0xfee0_0030, 0xffff_ffff] {
                assert_eq!(translate(&memory, root, address), Some(address));
            }
            assert_eq!(translate(&memory, root, 1 << 39), None);
            assert_eq!(translate(&memory, root, 1 << 32), None);
        }
    }

    #[test]
    fn small_pages_replace_large_ones_where_they_are_and_nowhere_else() {
        let (address, pages) = (0x4000_0000, 700);
        let low = map(0, 1 << 20);
        let high = map(address, (pages + small_page_tables(pages)) * PAGE);
        write_identity_map(&low, 0x3000, TABLE).unwrap();
        write_small_pages(&low, 0x3000, &high, address, pages).unwrap();
        // The walk reads both memories: the upper levels below, the tables above.
        let directory: u64 = low.read_obj(GuestAddress(0x3000 + 3 * PAGE)).unwrap();
        assert_eq!(directory, (address + pages * PAGE) | TABLE);
        let last: u64 =
            high.read_obj(GuestAddress(address + pages * PAGE + PAGE + 187 * 8)).unwrap();
        assert_eq!(last, (address + 699 * PAGE) | SMALL_PAGE);
        assert_eq!(translate(&low, 0x3000, address + (4 << 20)), Some(address + (4 << 20)));
    }

    #[test]
    fn tables_outside_of_memory_are_refused() {
        assert!(write_identity_map(&map(0, 1 << 20), 1 << 20, TABLE).is_err());
    }
}
