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
    fn tables_outside_of_memory_are_refused() {
        let memory = map(&[(GuestAddress(0), 1 << 20)], Backing::Default).unwrap();
        assert!(write_identity_map(&memory, 1 << 20).is_err());
    }
}
