//! The dirty bitmap of a memslot: one bit per 4 KiB page, set by faults and by our own writes.
//!
//! Bits are set with the MMU lock held for reading (or by user copies) and taken with it held for
//! writing, so that "bit taken" and "page write-protected" happen as one (KVM API §4.8).

use alloc::vec::Vec;

use host::GuestIndex;
use host::error::NoMemory;
use host::sync::{Mutex, MutexGuard};

use crate::atomic::{AtomicU64, Ordering, fence};

/// One bit per page of a memslot, in words of 64.
#[derive(Debug)]
pub struct DirtyBitmap {
    words: Vec<AtomicU64>,
}

impl DirtyBitmap {
    /// A bitmap for `npages` pages, all clean.
    pub fn new(npages: u64) -> Result<Self, NoMemory> {
        // Fallible: the VMM chooses the size, and 2^31 pages are 256 MiB of bits.
        let count = usize::try_from(npages.div_ceil(64)).map_err(|_| NoMemory)?;
        let mut words = Vec::new();
        words.try_reserve_exact(count)?;
        words.resize_with(count, || AtomicU64::new(0));
        Ok(Self { words })
    }

    /// Marks the page `index` pages into the slot. Out of range: nothing.
    #[inline]
    pub fn mark(&self, index: u64) {
        if let Some(word) = self.word(index) {
            let bit = 1 << (index & 63);
            // Who takes the log sees the page as it was written, or the bit is still to be set: without the fence the
            // write could come after the look at a bit that is taken in between.
            fence(Ordering::SeqCst);
            // A page that is dirty already is the common case: do not take the line for writing.
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    /// Marks all pages of the bit mask `bits` in word `word_index`.
    pub fn mark_word(&self, word_index: usize, bits: u64) {
        if let Some(word) = GuestIndex::from(word_index).of(&self.words) {
            word.fetch_or(bits, Ordering::Relaxed);
        }
    }

    /// Whether the page is marked.
    pub fn is_marked(&self, index: u64) -> bool {
        self.word(index).is_some_and(|w| w.load(Ordering::Relaxed) & (1 << (index & 63)) != 0)
    }

    /// Takes a word: returns its bits and leaves it clean.
    pub fn take(&self, word_index: usize) -> u64 {
        match GuestIndex::from(word_index).of(&self.words) {
            // Mostly clean words: a load is cheaper than a locked exchange.
            // SeqCst: who takes looks at the page after that, and not before; see `mark`.
            // Exchanged, not loaded and cleared: a bit that is set in between stays for the next
            // time.
            Some(word) if word.load(Ordering::Relaxed) != 0 => word.swap(0, Ordering::SeqCst),
            _ => 0,
        }
    }

    /// Clears the bits of `mask` in a word and returns those of them that were set.
    pub fn take_masked(&self, word_index: usize, mask: u64) -> u64 {
        match GuestIndex::from(word_index).of(&self.words) {
            // A caller that takes nothing must not pull the line over for writing.
            Some(word) if mask != 0 => word.fetch_and(!mask, Ordering::SeqCst) & mask,
            _ => 0,
        }
    }

    /// A word as it is.
    pub fn peek(&self, word_index: usize) -> u64 {
        GuestIndex::from(word_index).of(&self.words).map_or(0, |w| w.load(Ordering::Relaxed))
    }

    /// Number of 64-bit words.
    pub fn words(&self) -> usize {
        self.words.len()
    }

    #[inline]
    fn word(&self, index: u64) -> Option<&AtomicU64> {
        GuestIndex::new(index >> 6).of(&self.words)
    }
}

/// The dirty log of a memslot: its bitmap, and room for as many words on their way to user space or from there.
///
/// Why the room is there from the beginning: a VMM in the middle of a migration has no answer to a log that cannot be had for lack
/// of memory, and cannot give back the bits that were taken by then. Stock KVM has both halves from the beginning, too.
#[derive(Debug)]
pub struct DirtyLog {
    bitmap: DirtyBitmap,
    copy: Mutex<Vec<u64>>,
}

impl DirtyLog {
    /// A log for `npages` pages, all clean.
    pub fn new(npages: u64) -> Result<Self, NoMemory> {
        let bitmap = DirtyBitmap::new(npages)?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(bitmap.words())?;
        copy.resize(bitmap.words(), 0);
        Ok(Self { bitmap, copy: Mutex::new(copy) })
    }

    /// Room for a copy of the bitmap, which has as many words. What lies there is of the time before. Sleeps.
    pub fn copy(&self) -> MutexGuard<'_, Vec<u64>> {
        self.copy.lock()
    }
}

impl core::ops::Deref for DirtyLog {
    type Target = DirtyBitmap;
    #[inline]
    fn deref(&self) -> &DirtyBitmap {
        &self.bitmap
    }
}

/// The steps by which a log begins anew: what CPUs have logged until now is gathered, bits are taken and their pages watched,
/// and CPUs that still write by older translations are flushed. `take`: whether that is needed.
pub fn begin_anew(gather: impl FnOnce(), take: impl FnOnce() -> bool, flush: impl FnOnce()) {
    gather();
    if take() {
        flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_word_is_clean_afterwards() {
        let map = DirtyBitmap::new(65).unwrap();
        map.mark(0);
        map.mark(64);
        map.mark(65 + 64);
        assert_eq!((map.words(), map.is_marked(64), map.is_marked(1)), (2, true, false));
        assert_eq!((map.take(0), map.take(0), map.take(1), map.take(9)), (1, 0, 1, 0));
    }

    #[test]
    fn a_log_has_room_for_a_copy_of_its_bitmap() {
        for pages in [1, 64, 65, 32_769] {
            let log = DirtyLog::new(pages).unwrap();
            assert_eq!(log.copy().len(), log.words());
        }
    }

    #[test]
    fn a_masked_take_leaves_the_other_bits() {
        let map = DirtyBitmap::new(64).unwrap();
        map.mark_word(0, 0b1110);
        assert_eq!(map.take_masked(0, 0b0110), 0b0110);
        assert_eq!(map.peek(0), 0b1000);
    }
}
