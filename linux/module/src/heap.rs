//! Rust's heap: kmalloc, or vmalloc for what is large, charged to the current task's cgroup.
//!
//! May sleep, like everything that allocates here: never under a spinning lock nor with interrupts
//! off.

use core::alloc::{GlobalAlloc, Layout};
use core::ffi::c_void;

unsafe extern "C" {
    fn gnt_alloc(size: usize, align: usize, zero: i32) -> *mut c_void;
    fn gnt_free(pointer: *mut c_void);
}

struct Kernel;

#[global_allocator]
static KERNEL: Kernel = Kernel;

// SAFETY: gnt_alloc returns null or memory of at least that size and alignment that nobody else
// uses until gnt_free.
unsafe impl GlobalAlloc for Kernel {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size and alignment is taken or refused.
        unsafe { gnt_alloc(layout.size(), layout.align(), 0).cast() }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe { gnt_alloc(layout.size(), layout.align(), 1).cast() }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, _: Layout) {
        // SAFETY: by the trait's contract it came from alloc and goes once.
        unsafe { gnt_free(pointer.cast()) }
    }
}
