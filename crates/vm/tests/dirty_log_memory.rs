//! A dirty log that is switched on needs no more memory: a VMM in the middle of a migration has no answer to ENOMEM.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use gannet_vm::memory::VmMemory;
use host::Fault;
use mmu::{FlushRemote, Format, Region, RegionLimits};
use x86::Gfn;

thread_local! {
    /// Bytes that this thread has allocated, a page or more at a time: the port's locks keep lists of their own.
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= 4096 {
            BYTES.set(BYTES.get() + layout.size());
        }
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Nobody;

// SAFETY: there is no vCPU.
unsafe impl FlushRemote for Nobody {
    fn flush_remote(&self) {}
}

/// More than a stretch of the bitmap, and no whole number of words.
const PAGES: u64 = 100_001;
const FIRST: u64 = 16;

#[test]
fn a_log_that_is_on_needs_no_more_memory() {
    let memory = VmMemory::new(Format::npt(4, 0), RegionLimits::default()).unwrap();
    let region =
        Region { slot: 3, flags: 1, gpa: FIRST << 12, size: PAGES << 12, hva: 0x10_0000_0000 };
    memory.set_region(&region, &Nobody).unwrap();
    let written = [0, 63, 32_768, PAGES - 1];
    let mark = || {
        let slots = memory.slots();
        let slot = slots.by_id(3).unwrap();
        written.iter().for_each(|n| slot.mark_dirty(Gfn(FIRST + n)));
    };
    let words = PAGES.div_ceil(64) as usize;
    let ours = |bits: &[u64]| {
        let whole = bits.len() == words;
        let each = written.iter().all(|n| bits[(n / 64) as usize] >> (n % 64) & 1 != 0);
        let count: u32 = bits.iter().map(|word| word.count_ones()).sum();
        Ok((whole, each, count))
    };
    mark();
    let before = BYTES.get();
    // Shown, and shown again: nothing is taken.
    for _ in 0..2 {
        assert_eq!(memory.dirty_log(3, false, &Nobody, ours), Ok((true, true, 4)));
    }
    assert_eq!(memory.dirty_log(3, true, &Nobody, ours), Ok((true, true, 4)));
    assert_eq!(memory.dirty_log(3, true, &Nobody, ours).map(|seen| seen.2), Ok(0));
    mark();
    let none = memory.clear_dirty_log(3, 0, PAGES, &Nobody, |mask| {
        assert_eq!(mask.len(), words);
        mask.fill(u64::MAX);
        Err(Fault)
    });
    assert!(none.is_err());
    let all = memory.clear_dirty_log(3, 32_768, PAGES - 32_768, &Nobody, |mask| {
        mask.fill(u64::MAX);
        Ok(())
    });
    assert_eq!(all, Ok(()));
    let left = memory.dirty_log(3, true, &Nobody, |bits| Ok((bits[0], bits[512], bits[words - 1])));
    assert_eq!(left, Ok((1 | 1 << 63, 0, 0)));
    assert_eq!(BYTES.get() - before, 0);
}
