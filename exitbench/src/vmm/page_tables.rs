//! Page tables that map the first 4 GiB of a guest one to one, in 2 MiB pages of supervisor,
//! writable, executable memory: all that a guest needs to be in long mode (SDM vol. 3A §4.5).
//! And the way back: where a guest-virtual address lies, for reports of failures.

use anyhow::{Context, Result};
use vm_memory::{Bytes, GuestAddress};

use super::memory::{GuestMemory, PAGE};

/// Bytes that [`write_identity_map`] fills: a PML4, a PDPT and four page directories.
pub const IDENTITY_MAP_BYTES: u64 = 6 * PAGE;

/// Present, writable, accessed and dirty, so that the CPU never has to write into the tables.
const TABLE: u64 = 0x23;
const LARGE_PAGE: u64 = 0xe3;
const SMALL_PAGE: u64 = 0x63;
const GIB: u64 = 1 << 30;
const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// Writes the tables at guest-physical `base`, page aligned. `base` is then a valid CR3.
pub fn write_identity_map(memory: &GuestMemory, base: u64) -> Result<()> {
    let pdpt = base + PAGE;
    write_root(memory, base, pdpt)?;
    for gib in 0..4 {
        let directory = pdpt + PAGE + gib * PAGE;
        write_entry(memory, pdpt + gib * 8, directory | TABLE)?;
        for index in 0..GIB / LARGE_PAGE_BYTES {
            let page = gib * GIB + index * LARGE_PAGE_BYTES;
            write_entry(memory, directory + index * 8, page | LARGE_PAGE)?;
        }
    }
    Ok(())
}

/// Writes one more root at `root`, which shares the tables of the map at `base`.
pub fn write_second_root(memory: &GuestMemory, root: u64, base: u64) -> Result<()> {
    write_root(memory, root, base + PAGE)
}

/// Maps `pages` pages of 4 KiB from `address`, a multiple of 2 MiB below 4 GiB, one to one in the map at `base`: by an entry each, in
/// tables that lie in `memory` directly above the pages. Returns the bytes of those tables.
pub fn write_small_pages(
    directories: &GuestMemory,
    base: u64,
    memory: &GuestMemory,
    address: u64,
    pages: u64,
) -> Result<u64> {
    let first_table = address + pages * PAGE;
    for page in 0..pages {
        let at = address + page * PAGE;
        let table = first_table + page / 512 * PAGE;
        if page % 512 == 0 {
            let directory = base + (2 + at / GIB) * PAGE;
            write_entry(directories, directory + at % GIB / LARGE_PAGE_BYTES * 8, table | TABLE)?;
        }
        write_entry(memory, table + page % 512 * 8, at | SMALL_PAGE)?;
    }
    Ok(small_page_tables(pages) * PAGE)
}

/// Tables that hold the entries of so many pages.
pub fn small_page_tables(pages: u64) -> u64 {
    pages.div_ceil(512)
}

/// Translates a guest-virtual address by the four-level tables at `cr3`. `None` where nothing is
/// mapped, or a table lies outside of memory.
pub fn translate(memory: &GuestMemory, cr3: u64, address: u64) -> Option<u64> {
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

fn write_root(memory: &GuestMemory, root: u64, pdpt: u64) -> Result<()> {
    write_entry(memory, root, pdpt | TABLE)
}

fn write_entry(memory: &GuestMemory, address: u64, entry: u64) -> Result<()> {
    memory
        .write_obj(entry, GuestAddress(address))
        .with_context(|| format!("no guest memory for a page table entry at {address:#x}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmm::memory::{Backing, map};

    #[test]
    fn both_roots_map_four_gib_one_to_one_and_no_more() {
        let memory = map(&[(GuestAddress(0), 1 << 20)], Backing::Default).unwrap();
        write_identity_map(&memory, 0x3000).unwrap();
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
        let low = map(&[(GuestAddress(0), 1 << 20)], Backing::Default).unwrap();
        let bytes = ((pages + small_page_tables(pages)) * PAGE) as usize;
        let high = map(&[(GuestAddress(address), bytes)], Backing::Default).unwrap();
        write_identity_map(&low, 0x3000).unwrap();
        assert_eq!(write_small_pages(&low, 0x3000, &high, address, pages).unwrap(), 2 * PAGE);
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
        let memory = map(&[(GuestAddress(0), 1 << 20)], Backing::Default).unwrap();
        assert!(write_identity_map(&memory, 1 << 20).is_err());
    }
}
