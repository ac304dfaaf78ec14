//! Nothing allocates after `warm_up`: the exit path may not.

mod machine;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use gannet_emulate::{CodeSize, DecodeCache, Fetched, decode, emulate, length, warm_up};
use machine::{RBX, RCX, RDI, RSI, RSP, TestMachine};

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        BYTES.set(BYTES.get() + layout.size());
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

#[test]
fn only_warming_up_allocates() {
    warm_up();
    println!("warming up: {} allocations, {} bytes in all", COUNT.get(), BYTES.get());
    let mut m = TestMachine::long();
    let mut cache = DecodeCache::new();
    let before = COUNT.get();
    for first in 0..=255u8 {
        for second in 0..=255u8 {
            for size in [CodeSize::Bits16, CodeSize::Bits32, CodeSize::Bits64] {
                let bytes = [first, second, 0x03, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
                let _ = length(&bytes, size);
                let _ = cache.get(Fetched::new(&bytes, size));
                let _ = decode(&bytes, size);
            }
        }
    }
    // One of each group, on RAM: the test's device and ports would allocate.
    let mut done = 0;
    for code in [
        &[0x8b, 0x03][..],
        &[0x01, 0x03],
        &[0xf0, 0x0f, 0xc1, 0x03],
        &[0xd1, 0x23],
        &[0x0f, 0xbb, 0x03],
        &[0xf7, 0x23],
        &[0xff, 0x33],
        &[0x8f, 0x03],
        &[0x0f, 0x10, 0x03],
        &[0xf3, 0xa5],
    ] {
        for register in [RBX, RSI, RDI, RSP] {
            m.gpr[register] = 0x2000;
        }
        m.gpr[RCX] = 3;
        if let Ok(decoded) = decode(code, CodeSize::Bits64) {
            m.start();
            done += usize::from(emulate(&mut m, &decoded).is_ok());
        }
    }
    assert_eq!(done, 10);
    assert_eq!(COUNT.get(), before);
}
