//! Rust's heap: kmalloc, or vmalloc for what is large, charged to the current task's cgroup.
//!
//! May sleep, like everything that allocates here: never under a spinning lock nor with interrupts
//! off.
//!
//! Tables that a library makes once and never frees (the instruction decoder's) would be lost at
//! every unload. [`while_keeping`] gives them one stretch of memory of their own, which
//! [`release_kept`] frees whole.

use core::alloc::{GlobalAlloc, Layout};
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::Relaxed};

use host::NoMemory;

unsafe extern "C" {
    fn gnt_alloc(size: usize, align: usize, zero: i32) -> *mut c_void;
    fn gnt_free(pointer: *mut c_void);
}

/// Bytes for what is never freed: the decoder's tables take 364 KiB, and some room that grows on
/// the way to them.
const KEPT_BYTES: usize = 448 << 10;

/// Memory that is handed out from one end and taken back only as a whole.
struct Kept {
    base: AtomicPtr<u8>,
    used: AtomicUsize,
    /// Whether new allocations come from here. Set by the loading task alone, while no other runs
    /// code of ours.
    open: AtomicBool,
}

static KEPT: Kept = Kept {
    base: AtomicPtr::new(null_mut()),
    used: AtomicUsize::new(0),
    open: AtomicBool::new(false),
};

impl Kept {
    /// Offset of `pointer` in the stretch, if it lies there.
    #[inline]
    fn offset_of(&self, pointer: *mut u8) -> Option<usize> {
        let base = self.base.load(Relaxed);
        let offset = pointer.addr().wrapping_sub(base.addr());
        (!base.is_null() && offset < KEPT_BYTES).then_some(offset)
    }

    fn take(&self, layout: Layout) -> Option<*mut u8> {
        let base = self.base.load(Relaxed);
        let from = self.used.load(Relaxed).checked_next_multiple_of(layout.align())?;
        let end = from.checked_add(layout.size())?;
        if base.is_null() || layout.align() > 4096 || end > KEPT_BYTES {
            return None;
        }
        self.used.store(end, Relaxed);
        Some(base.wrapping_add(from))
    }

    /// Takes `pointer` back if nothing was handed out after it.
    fn give_back(&self, offset: usize, layout: Layout) {
        let end = offset.wrapping_add(layout.size());
        // Given back in another order a piece is lost until the stretch goes whole.
        let _ = self.used.compare_exchange(end, offset, Relaxed, Relaxed);
    }
}

/// Runs `f`, whose allocations live until [`release_kept`], before anything else of the module runs. At every
/// start after the first it has run: what it made is still there.
pub fn while_keeping(f: impl FnOnce()) -> Result<(), NoMemory> {
    if !KEPT.base.load(Relaxed).is_null() {
        return Ok(());
    }
    // SAFETY: any size and alignment is taken or refused.
    let base = unsafe { gnt_alloc(KEPT_BYTES, 4096, 1) };
    if base.is_null() {
        return Err(NoMemory);
    }
    KEPT.used.store(0, Relaxed);
    KEPT.base.store(base.cast(), Relaxed);
    KEPT.open.store(true, Relaxed);
    f();
    KEPT.open.store(false, Relaxed);
    Ok(())
}

/// Frees what [`while_keeping`] kept.
///
/// # Safety
/// Nothing that was allocated meanwhile is used any more.
pub unsafe fn release_kept() {
    let base = KEPT.base.swap(null_mut(), Relaxed);
    // SAFETY: it came from gnt_alloc and goes once; null is taken.
    unsafe { gnt_free(base.cast()) }
}

struct Kernel;

#[global_allocator]
static KERNEL: Kernel = Kernel;

// SAFETY: gnt_alloc returns null or memory of at least that size and alignment that nobody else
// uses until gnt_free; the kept stretch is handed out piece by piece, each piece once.
unsafe impl GlobalAlloc for Kernel {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if KEPT.open.load(Relaxed)
            && let Some(pointer) = KEPT.take(layout)
        {
            return pointer;
        }
        // SAFETY: any size and alignment is taken or refused.
        unsafe { gnt_alloc(layout.size(), layout.align(), 0).cast() }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if KEPT.open.load(Relaxed)
            && let Some(pointer) = KEPT.take(layout)
        {
            // SAFETY: handed out just now, for layout.size() bytes; it may have been used before.
            unsafe { pointer.write_bytes(0, layout.size()) };
            return pointer;
        }
        // SAFETY: any size and alignment is taken or refused.
        unsafe { gnt_alloc(layout.size(), layout.align(), 1).cast() }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if let Some(offset) = KEPT.offset_of(pointer) {
            KEPT.give_back(offset, layout);
            return;
        }
        // SAFETY: by the trait's contract it came from alloc and goes once.
        unsafe { gnt_free(pointer.cast()) }
    }
}
