//! The statistics file of a VM or a vCPU (KVM API §4.131, KVM_GET_STATS_FD).

use std::os::fd::{AsRawFd, OwnedFd};

use super::file::{Commands, own};
use super::ioctl;
use crate::outcome::{Answer, Errno, Outcome, fail};

/// A statistic as it is described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    pub name: String,
    /// KVM_STATS_TYPE_*, KVM_STATS_UNIT_* and KVM_STATS_BASE_* in one.
    pub flags: u32,
    pub exponent: i16,
    /// Words.
    pub size: u16,
    /// Bytes from the first value on.
    pub offset: u32,
    pub bucket_size: u32,
}

/// The header: flags, bytes of a name, number of statistics, where id, descriptors and data begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub flags: u32,
    pub name_size: u32,
    pub count: u32,
    pub id: u32,
    pub descriptors: u32,
    pub data: u32,
}

/// An open file.
pub struct Stats(pub OwnedFd);

/// Bytes that no file of the kind has.
const MOST: usize = 1 << 20;
const HEADER: usize = 24;
const DESCRIPTOR: usize = 16;

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes(b.try_into().expect("four bytes")))
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

impl Stats {
    /// The statistics file of a VM or a vCPU.
    pub fn of(file: &impl Commands) -> Outcome<Self> {
        Ok(Self(own(file.call(ioctl::GET_STATS_FD, 0).granted("KVM_GET_STATS_FD")?)))
    }

    /// `pread` into `buffer`.
    pub fn read(&self, offset: i64, buffer: &mut [u8]) -> Result<usize, Errno> {
        // SAFETY: the buffer is writable for its length.
        let read = unsafe {
            libc::pread(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), offset)
        };
        usize::try_from(read).map_err(|_| Errno::last())
    }

    /// The whole file.
    pub fn whole(&self) -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; MOST];
        let read = self.read(0, &mut bytes).granted("reading a statistics file")?;
        bytes.truncate(read);
        Ok(bytes)
    }

    /// The file's header.
    pub fn header(&self) -> Outcome<Header> {
        let bytes = self.whole()?;
        let [flags, name_size, count, id, descriptors, data] =
            [0, 4, 8, 12, 16, 20].map(|at| number(&bytes, at));
        if bytes.len() < HEADER {
            return fail("a statistics file without header");
        }
        Ok(Header { flags, name_size, count, id, descriptors, data })
    }

    /// The string that names the VM or vCPU.
    pub fn id(&self) -> Outcome<String> {
        let (bytes, header) = (self.whole()?, self.header()?);
        Ok(text(bytes.get(header.id as usize..).unwrap_or(&[])))
    }

    /// The file's descriptors, one for each statistic.
    pub fn described(&self) -> Outcome<Vec<Described>> {
        let (bytes, header) = (self.whole()?, self.header()?);
        let size = DESCRIPTOR + header.name_size as usize;
        let one = |n: usize| {
            let at = header.descriptors as usize + n * size;
            let part = bytes.get(at..at + size)?;
            Some(Described {
                name: text(&part[DESCRIPTOR..]),
                flags: number(part, 0),
                exponent: number(part, 4) as i16,
                size: (number(part, 4) >> 16) as u16,
                offset: number(part, 8),
                bucket_size: number(part, 12),
            })
        };
        match (0..header.count as usize).map(one).collect() {
            Some(all) => Ok(all),
            None => fail("the descriptors reach behind the end of the file"),
        }
    }

    /// The first word of a statistic.
    pub fn value(&self, name: &str) -> Outcome<u64> {
        match self.value_if_any(name)? {
            Some(value) => Ok(value),
            None => fail(format!("no statistic {name}")),
        }
    }

    /// The first word of a statistic that may not be there.
    pub fn value_if_any(&self, name: &str) -> Outcome<Option<u64>> {
        let header = self.header()?;
        let Some(found) = self.described()?.into_iter().find(|d| d.name == name) else {
            return Ok(None);
        };
        let mut word = [0; 8];
        let at = i64::from(header.data) + i64::from(found.offset);
        crate::outcome::equal("bytes of a value", self.read(at, &mut word).granted(name)?, 8)?;
        Ok(Some(u64::from_le_bytes(word)))
    }
}
