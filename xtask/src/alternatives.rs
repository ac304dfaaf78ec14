//! The alternatives of a kernel module: places that the kernel patches by what it decided for this CPU, and the number of the feature
//! that each waits for. Which feature a mitigation waits for changes from kernel to kernel, so Gannet's is compared with stock KVM's.

use anyhow::{Context, Result};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget};
use std::collections::BTreeSet;
use std::path::Path;

/// Where in an entry the feature's number lies, behind the two offsets of the original and the replacement.
const FEATURE: usize = 8;

/// The features at whose word the module executes VERW, which empties the CPU's buffers. Errors when the file is no module.
pub fn verw(path: &Path) -> Result<BTreeSet<u16>> {
    let data = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let file = ElfFile64::<object::Endianness>::parse(&*data)?;
    let section = file.section_by_name(".altinstructions").context("no alternatives")?;
    let table = section.data()?;
    let target = |relocation: &object::Relocation| -> Option<&[u8]> {
        let RelocationTarget::Symbol(index) = relocation.target() else { return None };
        let symbol = file.symbol_by_index(index).ok()?;
        let section = file.section_by_index(symbol.section_index()?).ok()?;
        let at = symbol.address().checked_add_signed(relocation.addend())?;
        section.data().ok()?.get(usize::try_from(at).ok()?..)
    };
    let mut relocations: Vec<_> = section.relocations().collect();
    relocations.sort_by_key(|(at, _)| *at);
    let mut found = BTreeSet::new();
    // Two relocations an entry. Entries have grown, but begin the same and end with the two lengths.
    let size = match relocations.get(2) {
        Some((second, _)) => usize::try_from(*second)?,
        None => table.len(),
    };
    for pair in relocations.chunks_exact(2) {
        let entry = table.get(usize::try_from(pair[0].0)?..).and_then(|e| e.get(..size));
        let entry = entry.context("the last alternative is cut off")?;
        let [original, replacement] = [entry[size - 2], entry[size - 1]].map(usize::from);
        // Put in, or skipped by a jump that goes away.
        let put_in = replacement != 0 && target(&pair[1].1).is_some_and(is_verw);
        let behind = target(&pair[0].1).and_then(|code| code.get(original..));
        if put_in || replacement == 0 && behind.is_some_and(is_verw) {
            found.insert(u16::from_le_bytes([entry[FEATURE], entry[FEATURE + 1]]));
        }
    }
    Ok(found)
}

/// VERW of a word in memory: `0F 00 /5`.
fn is_verw(code: &[u8]) -> bool {
    matches!(code, [0x0f, 0x00, modrm, ..] if modrm >> 3 & 7 == 5 && *modrm < 0xc0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verw_is_told_from_its_neighbours() {
        assert!(is_verw(&[0x0f, 0x00, 0x2d, 0, 0, 0, 0]));
        assert!(!is_verw(&[0x0f, 0x00, 0x25, 0, 0, 0, 0]), "VERR");
        assert!(!is_verw(&[0x0f, 0x00, 0xe8]), "of a register");
        assert!(!is_verw(&[0x0f, 0x01, 0x2d]) && !is_verw(&[0x0f]));
    }
}
