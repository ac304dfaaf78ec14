//! Writes an initramfs: a cpio archive in the `newc` format (Linux: Documentation/driver-api/early-userspace/buffer-format.rst).

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const SYMLINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

struct Entry {
    mode: u32,
    device: (u32, u32),
    content: Vec<u8>,
}

/// An initramfs being put together. Folders above an entry are made on their own.
#[derive(Default)]
pub struct Archive {
    // Sorted by path, so that a folder comes before what lies in it and equal contents give equal archives.
    entries: BTreeMap<String, Entry>,
}

impl Archive {
    /// An archive with nothing but `/dev/console`, which the kernel opens before `/init` runs.
    pub fn new() -> Self {
        let mut archive = Self::default();
        archive.insert("dev/console", CHARACTER_DEVICE, (5, 1), Vec::new());
        archive
    }

    /// Adds an executable file with this content.
    pub fn text(&mut self, path: &str, content: impl Into<Vec<u8>>) {
        self.insert(path, PROGRAM, (0, 0), content.into());
    }

    /// Adds a file of this machine.
    pub fn file(&mut self, path: &str, source: &Path) -> Result<()> {
        let content =
            std::fs::read(source).with_context(|| format!("reading {}", source.display()))?;
        self.text(path, content);
        Ok(())
    }

    /// Adds everything in a folder of this machine, symbolic links as they are.
    pub fn tree(&mut self, path: &str, source: &Path) -> Result<()> {
        let folder = std::fs::read_dir(source);
        for entry in folder.with_context(|| format!("reading {}", source.display()))? {
            let entry = entry?;
            let target = format!("{path}/{}", entry.file_name().to_string_lossy());
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.tree(&target, &entry.path())?;
            } else if kind.is_symlink() {
                let to = std::fs::read_link(entry.path())?;
                self.link(&target, &to.to_string_lossy());
            } else {
                self.file(&target, &entry.path())?;
            }
        }
        Ok(())
    }

    /// Adds an empty folder.
    pub fn folder(&mut self, path: &str) {
        self.insert(path, DIRECTORY, (0, 0), Vec::new());
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, to: &str) {
        self.insert(path, SYMLINK, (0, 0), to.as_bytes().to_vec());
    }

    fn insert(&mut self, path: &str, mode: u32, device: (u32, u32), content: Vec<u8>) {
        let path = path.trim_start_matches('/').to_owned();
        let parents: Vec<String> =
            path.match_indices('/').map(|(at, _)| path[..at].to_owned()).collect();
        for parent in parents {
            let folder = || Entry { mode: DIRECTORY, device: (0, 0), content: Vec::new() };
            self.entries.entry(parent).or_insert_with(folder);
        }
        self.entries.insert(path, Entry { mode, device, content });
    }

    /// The archive's bytes. Ends with the trailer, padded to 512 bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, (path, entry)) in self.entries.iter().enumerate() {
            append(&mut out, number as u32 + 1, path, entry);
        }
        let trailer = Entry { mode: 0, device: (0, 0), content: Vec::new() };
        append(&mut out, 0, "TRAILER!!!", &trailer);
        out.resize(out.len().next_multiple_of(512), 0);
        out
    }
}

fn append(out: &mut Vec<u8>, inode: u32, path: &str, entry: &Entry) {
    let links = if entry.mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
    let fields = [
        inode,
        entry.mode,
        0, // uid
        0, // gid
        links,
        0, // mtime: none, so that equal contents give equal archives
        entry.content.len() as u32,
        0, // device that holds the file
        0,
        entry.device.0,
        entry.device.1,
        path.len() as u32 + 1,
        0, // no checksum in this format
    ];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    out.extend_from_slice(path.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(&entry.content);
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the archive back: path, mode, content.
    fn read(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut at = 0;
        let mut found = Vec::new();
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + 8 * n..at + 14 + 8 * n]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name) = (field(1), field(6) as usize, field(11) as usize);
            let path = String::from_utf8(bytes[at + 110..at + 110 + name - 1].to_vec()).unwrap();
            let data = (at + 110 + name).next_multiple_of(4);
            if path == "TRAILER!!!" {
                return found;
            }
            found.push((path, mode, bytes[data..data + size].to_vec()));
            at = (data + size).next_multiple_of(4);
        }
    }

    #[test]
    fn folders_come_before_what_lies_in_them() {
        let mut archive = Archive::new();
        archive.text("/a/b/c", "x");
        archive.link("a/l", "b/c");
        let entries = read(&archive.bytes());
        let paths: Vec<&str> = entries.iter().map(|e| e.0.as_str()).collect();
        assert_eq!(paths, ["a", "a/b", "a/b/c", "a/l", "dev", "dev/console"]);
        assert_eq!(entries[0].1, DIRECTORY);
        assert_eq!(entries[2].2, b"x");
    }

    #[test]
    fn equal_contents_give_equal_archives() {
        let build = |order: [&str; 2]| {
            let mut archive = Archive::new();
            order.iter().for_each(|path| archive.text(path, *path));
            archive.bytes()
        };
        assert_eq!(build(["one", "two"]), build(["two", "one"]));
    }

    proptest::proptest! {
        #[test]
        fn every_content_survives(content in proptest::collection::vec(0u8.., 0..600)) {
            let mut archive = Archive::new();
            archive.text("f", content.clone()); // sorts last, after dev/console
            let bytes = archive.bytes();
            proptest::prop_assert_eq!(bytes.len() % 512, 0);
            let entries = read(&bytes);
            proptest::prop_assert_eq!(&entries.last().unwrap().2, &content);
        }
    }
}
