//! The alternatives of a kernel module: places that the kernel patches by what it decided for this CPU, and the number of the feature
//! that each waits for. Which feature a mitigation waits for changes from kernel to kernel, so Gannet's is compared with stock KVM's.

use anyhow::{Context, Result};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionIndex};
use std::collections::BTreeSet;
use std::path::Path;

/// Where in an entry the feature's number lies, behind the two offsets of the original and the replacement.
const FEATURE: usize = 8;

/// One alternative.
struct Entry<'d> {
    /// Where what is replaced begins.
    original: Place,
    /// The code from there on, and the replacement's.
    code: &'d [u8],
    replacement: &'d [u8],
    replaced_by: Option<Place>,
    feature: u16,
    /// How long the two are.
    lengths: [usize; 2],
}

/// A section's index and an offset in it.
type Place = (usize, u64);

/// The features at whose word the module executes VERW, which empties the CPU's buffers. Errors when the file is no module.
pub fn verw(path: &Path) -> Result<BTreeSet<u16>> {
    let data = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let file = ElfFile64::<object::Endianness>::parse(&*data)?;
    let mut found = BTreeSet::new();
    for entry in entries(&file)? {
        let [original, replacement] = entry.lengths;
        // Put in, or skipped by a jump that goes away.
        let put_in = replacement != 0 && is_verw(entry.replacement);
        let behind = entry.code.get(original..);
        if put_in || replacement == 0 && behind.is_some_and(is_verw) {
            found.insert(entry.feature);
        }
    }
    Ok(found)
}

/// The features of the alternatives within one function, in the order of their places. Errors when the file has no such function.
pub fn within(path: &Path, function: &str) -> Result<Vec<u16>> {
    let data = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let file = ElfFile64::<object::Endianness>::parse(&*data)?;
    let symbol = file.symbols().find(|s| s.name() == Ok(function) && s.is_definition());
    let symbol = symbol.with_context(|| format!("{} has no {function}", path.display()))?;
    let section = symbol.section_index().context("a function in no section")?.0;
    let bytes = symbol.address()..symbol.address() + symbol.size();
    let mut found: Vec<_> = entries(&file)?
        .into_iter()
        .filter(|entry| entry.original.0 == section && bytes.contains(&entry.original.1))
        .map(|entry| (entry.original.1, entry.feature))
        .collect();
    found.sort_by_key(|(at, _)| *at);
    Ok(found.into_iter().map(|(_, feature)| feature).collect())
}

/// An alternative that puts in a jump.
pub struct Jump {
    pub feature: u16,
    /// Where it goes, and what lies behind that which is replaced: offsets in one section.
    pub to: u64,
    pub back: u64,
    /// That section.
    pub code: Vec<u8>,
}

/// The alternatives within one function that wait for one of these features. Errors when one puts in anything but a jump into the
/// function's section.
pub fn jumps(path: &Path, function: &str, features: &[u16]) -> Result<Vec<Jump>> {
    let data = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let file = ElfFile64::<object::Endianness>::parse(&*data)?;
    let symbol = file.symbols().find(|s| s.name() == Ok(function) && s.is_definition());
    let symbol = symbol.with_context(|| format!("{} has no {function}", path.display()))?;
    let section = symbol.section_index().context("a function in no section")?;
    let bytes = symbol.address()..symbol.address() + symbol.size();
    let code = file.section_by_index(section)?.data()?;
    let waits = |e: &Entry<'_>| {
        e.original.0 == section.0 && bytes.contains(&e.original.1) && features.contains(&e.feature)
    };
    let jump = |entry: Entry<'_>| {
        let (at, [original, replacement]) = (entry.replaced_by, entry.lengths);
        let jumps = replacement == JUMP && entry.replacement.first() == Some(&0xe9);
        let to = at.filter(|_| jumps).and_then(|at| target_of_jump(&file, at));
        let (_, to) = to.filter(|to| to.0 == section.0).with_context(|| {
            format!("for feature {} is put in what is no jump within it", entry.feature)
        })?;
        let back = entry.original.1 + original as u64;
        Ok(Jump { feature: entry.feature, to, back, code: code.to_vec() })
    };
    entries(&file)?.into_iter().filter(waits).map(jump).collect()
}

/// `E9`, and a distance of 32 bits.
const JUMP: usize = 5;

/// Where the jump at a place goes: into another section, so by a relocation.
fn target_of_jump(file: &ElfFile64<'_, object::Endianness>, at: Place) -> Option<Place> {
    let section = file.section_by_index(SectionIndex(at.0)).ok()?;
    let (_, relocation) = section.relocations().find(|(offset, _)| *offset == at.1 + 1)?;
    let RelocationTarget::Symbol(index) = relocation.target() else { return None };
    let symbol = file.symbol_by_index(index).ok()?;
    // The distance is from behind its own four bytes.
    let to = symbol.address().checked_add_signed(relocation.addend() + 4)?;
    Some((symbol.section_index()?.0, to))
}

fn entries<'d>(file: &ElfFile64<'d, object::Endianness>) -> Result<Vec<Entry<'d>>> {
    let section = file.section_by_name(".altinstructions").context("no alternatives")?;
    let table = section.data()?;
    let target = |relocation: &object::Relocation| -> Option<(Place, &'d [u8])> {
        let RelocationTarget::Symbol(index) = relocation.target() else { return None };
        let symbol = file.symbol_by_index(index).ok()?;
        let index = symbol.section_index()?;
        let at = symbol.address().checked_add_signed(relocation.addend())?;
        let data = file.section_by_index(index).ok()?.data().ok()?;
        Some(((index.0, at), data.get(usize::try_from(at).ok()?..)?))
    };
    let mut relocations: Vec<_> = section.relocations().collect();
    relocations.sort_by_key(|(at, _)| *at);
    // Two relocations an entry. Entries have grown, but begin the same and end with the two lengths.
    let size = match relocations.get(2) {
        Some((second, _)) => usize::try_from(*second)?,
        None => table.len(),
    };
    let mut found = Vec::new();
    for pair in relocations.chunks_exact(2) {
        let entry = table.get(usize::try_from(pair[0].0)?..).and_then(|e| e.get(..size));
        let entry = entry.context("the last alternative is cut off")?;
        let (original, code) = target(&pair[0].1).context("an alternative of nothing")?;
        // An empty one may lie where no section goes on.
        let replacement = target(&pair[1].1);
        found.push(Entry {
            original,
            code,
            replacement: replacement.map_or(&[], |(_, code)| code),
            replaced_by: replacement.map(|(at, _)| at),
            feature: u16::from_le_bytes([entry[FEATURE], entry[FEATURE + 1]]),
            lengths: [entry[size - 2], entry[size - 1]].map(usize::from),
        });
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
