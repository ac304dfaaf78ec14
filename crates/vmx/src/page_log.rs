//! The page in which the CPU logs what the guest makes dirty (SDM vol. 3 §29.3.6).
//!
//! 512 guest-physical addresses, filled from the end. The VMCS's index names the entry that is
//! written next; below 0 it wraps, and the next page to be logged exits instead, before anything of
//! its write is done.

use core::sync::atomic::Ordering;

use host::error::NoMemory;
use host::page::Page;
use x86::{Gpa, Hpa};

/// A vCPU's log.
#[derive(Debug)]
pub struct PageLog {
    page: Page,
}

impl PageLog {
    /// The index of an empty log.
    pub const EMPTY: u16 = 511;

    /// An empty log.
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self { page: Page::zeroed()? })
    }

    /// Where it lies, for the VMCS.
    pub fn hpa(&self) -> Hpa {
        self.page.hpa()
    }

    /// Hands over what was logged, oldest first. `index` is the VMCS's; the caller then writes
    /// [`PageLog::EMPTY`] there, if it is another.
    pub fn take(&self, index: u16, mut each: impl FnMut(Gpa)) {
        // The index wraps to FFFFh when the log is full: all 512 count.
        let left = if index > Self::EMPTY { 0 } else { usize::from(index) + 1 };
        // From the end: the index counts down.
        for entry in self.page.table().iter().skip(left).rev() {
            each(Gpa(entry.load(Ordering::Relaxed) & !0xfff));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn taken(log: &PageLog, index: u16) -> Vec<u64> {
        let mut all = Vec::new();
        log.take(index, |gpa| all.push(gpa.0));
        all
    }

    /// Logs as the CPU does; false when it exits instead.
    fn store(log: &PageLog, index: &mut u16, gpa: u64) -> bool {
        if *index > 511 {
            return false;
        }
        log.page.table()[usize::from(*index)].store(gpa, Ordering::Relaxed);
        *index = index.wrapping_sub(1);
        true
    }

    #[test]
    fn what_was_logged_is_handed_over_in_its_order() {
        let (log, mut index) = (PageLog::new().unwrap(), PageLog::EMPTY);
        assert_eq!(taken(&log, index), []);
        for gpa in [0x5000, 0x3000, 0x5000] {
            assert!(store(&log, &mut index, gpa));
        }
        assert_eq!((taken(&log, index), index), ([0x5000, 0x3000, 0x5000].to_vec(), 508));
    }

    #[test]
    fn a_full_log_has_512_entries_and_then_exits() {
        let (log, mut index) = (PageLog::new().unwrap(), PageLog::EMPTY);
        let mut n = 0;
        while store(&log, &mut index, n << 12) {
            n += 1;
        }
        assert_eq!((n, index), (512, 0xffff));
        let all = taken(&log, index);
        assert!(all.len() == 512 && all.iter().copied().eq((0..512).map(|n| n << 12)));
    }

    #[test]
    fn an_index_that_no_cpu_writes_is_taken_for_a_full_log() {
        let log = PageLog::new().unwrap();
        assert_eq!(taken(&log, 512).len(), 512);
        assert_eq!(taken(&log, 510).len(), 1);
    }
}
