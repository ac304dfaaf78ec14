//! A kernel as it lies in memory: the segments of its `vmlinux`, and where PVH enters it (ELF note 18, Xen: docs/misc/pvh.pandoc).

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const LOAD: u32 = 1;
const NOTE: u32 = 4;
const PHYS32_ENTRY: u32 = 18;

/// A kernel laid out flat.
#[derive(Debug, PartialEq, Eq)]
pub struct Image {
    /// Its bytes, from the first segment's to the last's.
    pub file: PathBuf,
    /// Where they belong in physical memory.
    pub start: u64,
    /// The end of what the kernel takes there, more than the file has.
    pub end: u64,
    /// Where PVH enters, in physical memory.
    pub entry: u32,
}

struct Segment {
    kind: u32,
    offset: u64,
    physical: u64,
    in_file: u64,
    in_memory: u64,
}

/// Lays out a `vmlinux` flat in a file beside it, once.
pub fn lay_out(vmlinux: &Path) -> Result<Image> {
    let about = || format!("{}: no kernel that PVH can enter", vmlinux.display());
    let mut source = File::open(vmlinux).with_context(about)?;
    let segments = segments(&mut source).with_context(about)?;
    let loaded = || segments.iter().filter(|s| s.kind == LOAD);
    let start = loaded().map(|s| s.physical).min().with_context(about)?;
    let ends = loaded().map(|s| s.physical.saturating_add(s.in_memory));
    let end = ends.max().with_context(about)?;
    let mut entry = None;
    for note in segments.iter().filter(|s| s.kind == NOTE) {
        entry = entry.or(pvh_entry(&part(&mut source, note)?));
    }
    let entry = entry.with_context(about)?;
    let file = vmlinux.with_extension("flat");
    if !file.is_file() {
        // Two machines may come here at once.
        let unfinished = vmlinux.with_extension(format!("flat-{}", unique()));
        let mut target = File::create(&unfinished)?;
        for segment in loaded() {
            target.seek(SeekFrom::Start(segment.physical - start))?;
            target.write_all(&part(&mut source, segment)?)?;
        }
        std::fs::rename(&unfinished, &file)?;
    }
    Ok(Image { file, start, end, entry })
}

fn unique() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// The program headers of a 64-bit ELF file.
fn segments(source: &mut (impl Read + Seek)) -> Result<Vec<Segment>> {
    let mut header = [0u8; 64];
    source.read_exact(&mut header)?;
    if header.get(..5) != Some(b"\x7fELF\x02") {
        bail!("not a 64-bit ELF file");
    }
    let number = |at: usize, size: usize| little(&header, at, size);
    let (table, size, count) = (number(32, 8)?, number(54, 2)? as usize, number(56, 2)?);
    source.seek(SeekFrom::Start(table))?;
    let mut bytes = vec![0; size.max(56) * count as usize];
    source.read_exact(&mut bytes)?;
    let read = |raw: &[u8]| {
        Ok(Segment {
            kind: little(raw, 0, 4)? as u32,
            offset: little(raw, 8, 8)?,
            physical: little(raw, 24, 8)?,
            in_file: little(raw, 32, 8)?,
            in_memory: little(raw, 40, 8)?,
        })
    };
    bytes.chunks_exact(size.max(56)).map(read).collect()
}

fn part(source: &mut (impl Read + Seek), segment: &Segment) -> Result<Vec<u8>> {
    source.seek(SeekFrom::Start(segment.offset))?;
    let mut bytes = Vec::new();
    source.take(segment.in_file).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The entry that a note of Xen's with type 18 gives.
fn pvh_entry(mut notes: &[u8]) -> Option<u32> {
    while !notes.is_empty() {
        let field = |at| little(notes, at, 4).ok().map(|n| n as usize);
        let (name, size, kind) = (field(0)?, field(4)?, field(8)?);
        let value = 12 + name.checked_next_multiple_of(4)?;
        if kind as u32 == PHYS32_ENTRY && notes.get(12..12 + name)? == b"Xen\0" {
            return little(notes, value, size.clamp(4, 8)).ok()?.try_into().ok();
        }
        notes = notes.get(value.checked_add(size.checked_next_multiple_of(4)?)?..)?;
    }
    None
}

fn little(bytes: &[u8], at: usize, size: usize) -> Result<u64> {
    let field = bytes.get(at..at + size).context("a file that ends too soon")?;
    Ok(field.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn note(kind: u32, value: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for field in [4, value.len() as u32, kind] {
            note.extend_from_slice(&field.to_le_bytes());
        }
        note.extend_from_slice(b"Xen\0");
        note.extend_from_slice(value);
        note.resize(note.len().next_multiple_of(4), 0);
        note
    }

    #[test]
    fn the_entry_stands_in_a_note_among_others() {
        let mut notes = note(5, b"linux-");
        assert_eq!(pvh_entry(&notes), None);
        notes.extend(note(PHYS32_ENTRY, &0x0100_0a30_u64.to_le_bytes()));
        assert_eq!(pvh_entry(&notes), Some(0x0100_0a30));
        assert_eq!(pvh_entry(&notes[..notes.len() - 9]), None, "cut short");
    }

    #[test]
    fn what_is_no_elf_file_is_refused() {
        assert!(segments(&mut Cursor::new([0; 100])).is_err());
        assert!(segments(&mut Cursor::new(b"\x7fELF\x02")).is_err());
    }
}
