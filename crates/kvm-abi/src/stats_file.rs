//! The binary statistics file of a VM or a vCPU (KVM API §4.131, KVM_GET_STATS_FD): a header, the
//! id string, descriptors, data, each behind the other, to be read at any offset.
//!
//! Every part is a multiple of 8 bytes, so the file is a row of 64-bit words, and a read makes the
//! words that it covers: nothing is kept per file.

use core::fmt::Write;

use stats::table::{self, Desc, OfVcpu, OfVm};

/// Bytes of a name, as the header says.
pub const NAME_BYTES: usize = 48;
const HEADER_WORDS: usize = 3;
const NAME_WORDS: usize = NAME_BYTES / 8;
const DESC_WORDS: usize = 2 + NAME_WORDS;
/// Words made at a time, on the stack.
const CHUNK: usize = 32;

/// The id string: `kvm-PID` for a VM, `kvm-PID/vcpu-ID` for a vCPU; NUL-padded.
#[derive(Clone, Copy, Debug)]
pub struct Id([u8; NAME_BYTES]);

impl Id {
    /// Of a VM, or one of its vCPUs, made by thread `tid`.
    pub fn new(tid: u32, vcpu: Option<u32>) -> Self {
        let mut id = Cut { bytes: [0; NAME_BYTES], len: 0 };
        // Two numbers of ten digits fit.
        let _ = write!(id, "kvm-{tid}");
        if let Some(vcpu) = vcpu {
            let _ = write!(id, "/vcpu-{vcpu}");
        }
        Self(id.bytes)
    }

    fn word(&self, n: usize) -> u64 {
        word_of(&self.0, n)
    }
}

/// Writes into an array and ends before its last byte.
struct Cut {
    bytes: [u8; NAME_BYTES],
    len: usize,
}

impl Write for Cut {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for byte in text.bytes() {
            // One byte is kept: a reader expects a NUL at the end.
            if self.len + 1 >= NAME_BYTES {
                return Err(core::fmt::Error);
            }
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = byte;
            }
            self.len += 1;
        }
        Ok(())
    }
}

/// Bytes `8 * n` to `8 * n + 7`, zero where there are none.
fn word_of(bytes: &[u8], n: usize) -> u64 {
    let mut word = [0; 8];
    for (to, from) in word.iter_mut().zip(bytes.iter().skip(n.saturating_mul(8))) {
        *to = *from;
    }
    u64::from_le_bytes(word)
}

/// Where the values of a file come from.
pub trait Values {
    /// Where the words of one statistic come from.
    type Source: 'static;
    /// The statistics that the file has.
    fn table(&self) -> &'static [Desc<Self::Source>];
    /// Word `n` of one of them, now.
    fn word(&self, source: &Self::Source, n: usize) -> u64;
}

/// Bytes of the whole file.
pub fn len<V: Values>(values: &V) -> u64 {
    let table = values.table();
    let words = HEADER_WORDS + NAME_WORDS + table.len() * DESC_WORDS + table::words(table);
    words as u64 * 8
}

/// Word `at` of the file; 0 behind its end.
fn word<V: Values>(values: &V, id: &Id, at: usize) -> u64 {
    let table = values.table();
    // Parts follow each other without gaps: subtracting walks through them.
    if at < HEADER_WORDS {
        return header_word(table.len(), at);
    }
    let at = at - HEADER_WORDS;
    if at < NAME_WORDS {
        return id.word(at);
    }
    let at = at - NAME_WORDS;
    if let Some(desc) = host::GuestIndex::from(at / DESC_WORDS).of(table) {
        return desc_word(desc, at % DESC_WORDS);
    }
    // Not below 0: the index lies behind the descriptors.
    let at = at - table.len() * DESC_WORDS;
    table::find(table, at).map_or(0, |(desc, n)| values.word(&desc.source, n))
}

const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

/// A word of `struct kvm_stats_header`.
fn header_word(count: usize, at: usize) -> u64 {
    const FLAGS: u32 = 0;
    let id = HEADER_WORDS * 8;
    let descs = id + NAME_BYTES;
    let data = descs + count * DESC_WORDS * 8;
    match at {
        0 => pair(FLAGS, NAME_BYTES as u32),
        1 => pair(count as u32, id as u32),
        _ => pair(descs as u32, data as u32),
    }
}

/// struct kvm_stats_desc with its name.
fn desc_word<S>(desc: &Desc<S>, at: usize) -> u64 {
    const BUCKET_SIZE: u32 = 0;
    match at {
        0 => {
            // The unit is the second, times a power of ten.
            let exponent: i16 = if desc.unit == stats::Unit::Nanoseconds { -9 } else { 0 };
            let size = desc.words() as u32;
            pair(desc.kind as u32 | desc.unit as u32, u32::from(exponent as u16) | size << 16)
        }
        // Offsets count from the data block. Bucket sizes are of linear histograms, of which there
        // is none.
        1 => pair(desc.first.wrapping_mul(8), BUCKET_SIZE),
        _ => word_of(desc.name.to_bytes(), at - 2),
    }
}

/// Reads up to `len` bytes from `offset` on and gives them to `put`, piece by piece, each with its
/// offset within what is read. Returns how many bytes were given; 0 at the end of the file.
pub fn read<V: Values, E>(
    values: &V,
    id: &Id,
    offset: u64,
    len: u64,
    mut put: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<u64, E> {
    // Offset and length are the reader's, up to 2^64.
    let end = self::len(values).min(offset.saturating_add(len));
    let mut at = offset;
    while at < end {
        // A read may begin within a word, so its word is made whole.
        let first = at / 8;
        let mut bytes = [0u8; CHUNK * 8];
        // Words behind the end are made as 0 and cut off below.
        for (n, place) in (first as usize..).zip(bytes.chunks_exact_mut(8)) {
            place.copy_from_slice(&word(values, id, n).to_le_bytes());
        }
        let skip = (at - first * 8) as usize;
        let upto = (bytes.len() as u64).min(end - first * 8) as usize;
        let piece = bytes.get(skip..upto).unwrap_or(&[]);
        // Cannot be, for `at` is before the end; a loop that does not advance would never end.
        if piece.is_empty() {
            break;
        }
        put(at - offset, piece)?;
        at += piece.len() as u64;
        // The length is the reader's, and each word is computed.
        host::task::cond_resched();
    }
    Ok(at.saturating_sub(offset))
}

/// A vCPU's statistics.
#[derive(Debug)]
pub struct OfOneVcpu<'a>(pub &'a stats::VcpuStats);

impl Values for OfOneVcpu<'_> {
    type Source = OfVcpu;

    fn table(&self) -> &'static [Desc<OfVcpu>] {
        &table::VCPU
    }

    fn word(&self, source: &OfVcpu, n: usize) -> u64 {
        source.word(self.0, n)
    }
}

/// A VM's statistics.
#[derive(Debug)]
pub struct OfOneVm<'a>(pub &'a vm::statistics::VmStatistics);

impl Values for OfOneVm<'_> {
    type Source = OfVm;

    fn table(&self) -> &'static [Desc<OfVm>] {
        &table::VM
    }

    fn word(&self, source: &OfVm, n: usize) -> u64 {
        self.0.word(source, n)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use proptest::prelude::*;
    use stats::{Reason, VcpuStats};

    use super::*;

    fn part(stats: &VcpuStats, offset: u64, len: u64) -> Vec<u8> {
        let mut all = Vec::new();
        let got = read(&OfOneVcpu(stats), &Id::new(77, Some(3)), offset, len, |at, bytes| {
            assert_eq!(at, all.len() as u64);
            all.extend_from_slice(bytes);
            Ok::<(), ()>(())
        });
        assert_eq!(got, Ok(all.len() as u64));
        all
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn the_parts_lie_where_the_header_says() {
        let stats = VcpuStats::new();
        for _ in 0..3 {
            stats.exit(Reason::Hlt);
        }
        let all = part(&stats, 0, u64::MAX);
        assert_eq!(all.len() as u64, len(&OfOneVcpu(&stats)));
        let [flags, name, count, id, descs, data] =
            [0, 4, 8, 12, 16, 20].map(|at| u32_at(&all, at));
        assert_eq!((flags, name, count), (0, 48, table::VCPU.len() as u32));
        assert!(all[id as usize..].starts_with(b"kvm-77/vcpu-3\0"));
        let halts = (0..count as usize)
            .map(|n| descs as usize + n * 64)
            .find(|at| all[at + 16..].starts_with(b"halt_exits\0"))
            .unwrap();
        let value = data + u32_at(&all, halts + 8);
        assert_eq!(u32_at(&all, value as usize), 3);
    }

    #[test]
    fn behind_the_end_there_is_nothing() {
        let stats = VcpuStats::new();
        let end = len(&OfOneVcpu(&stats));
        assert_eq!(part(&stats, end - 1, 100).len(), 1);
        for offset in [end, end + 1, u64::MAX] {
            assert!(part(&stats, offset, u64::MAX).is_empty());
        }
        assert!(part(&stats, 0, 0).is_empty());
    }

    #[test]
    fn an_id_that_is_too_long_is_cut_and_ends() {
        let Id(bytes) = Id::new(u32::MAX, Some(u32::MAX));
        assert!(bytes.starts_with(b"kvm-4294967295/vcpu-4294967295\0"));
    }

    proptest! {
        #[test]
        fn any_part_is_that_part_of_the_whole(offset in 0u64..20_000, len in 0u64..2_000) {
            let stats = VcpuStats::new();
            stats.exit(Reason::Cpuid);
            let all = part(&stats, 0, u64::MAX);
            let from = (offset as usize).min(all.len());
            let to = (from + len as usize).min(all.len());
            prop_assert_eq!(&part(&stats, offset, len)[..], &all[from..to]);
        }
    }
}
