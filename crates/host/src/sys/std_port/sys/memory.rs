//! Pages, and user memory, which is memory of this process.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use x86::Direction;

use crate::sys::std_port::world::World;

pub(crate) fn direct_map_base() -> u64 {
    0
}

fn pages_layout(order: u32) -> Layout {
    let size = 4096usize << order;
    Layout::from_size_align(size, size).expect("order is at most 10")
}

pub(crate) fn gnt_pages_alloc(order: u32) -> u64 {
    super::thread::refuse_in_guest("gnt_pages_alloc");
    // SAFETY: the layout has a size.
    unsafe { alloc_zeroed(pages_layout(order)) as u64 }
}
pub(crate) unsafe fn gnt_pages_free(hpa: u64, order: u32) {
    super::thread::refuse_in_guest("gnt_pages_free");
    // SAFETY: by the contract, allocated with this order.
    unsafe { dealloc(hpa as *mut u8, pages_layout(order)) }
}
pub(crate) fn gnt_page_alloc() -> u64 {
    super::thread::refuse_in_guest("gnt_page_alloc");
    gnt_pages_alloc(0)
}
/// Where a test's memory lies is not to be chosen; its addresses are not truncated either.
pub(crate) fn gnt_page_alloc_low() -> u64 {
    super::thread::refuse_in_guest("gnt_page_alloc_low");
    gnt_pages_alloc(0)
}
pub(crate) unsafe fn gnt_page_free(hpa: u64) {
    super::thread::refuse_in_guest("gnt_page_free");
    // SAFETY: by the contract, allocated as one page.
    unsafe { gnt_pages_free(hpa, 0) }
}

// User memory.

pub(super) fn user_ok(hva: u64, len: u64, direction: Direction) -> bool {
    let Some(end) = hva.checked_add(len) else { return false };
    // As in the kernel: nothing is mapped at null, and the upper half is no user's.
    if hva < 4096 || end > gnt_user_end() {
        return false;
    }
    let world = World::current();
    let state = world.lock();
    let clear = |list: &[(u64, u64)]| list.iter().all(|(s, e)| end <= *s || hva >= *e);
    clear(&state.holes) && (direction == Direction::Read || clear(&state.read_only))
}

pub(crate) fn gnt_user_range_ok(hva: u64, len: u64) -> i32 {
    super::thread::refuse_in_guest("gnt_user_range_ok");
    hva.checked_add(len).is_some_and(|end| end <= gnt_user_end()).into()
}
pub(crate) fn gnt_user_end() -> u64 {
    let bits = if World::current().lock().five_levels { 56 } else { 47 };
    (1 << bits) - 4096
}
pub(crate) unsafe fn gnt_user_read_nofault(to: *mut u8, hva: u64, len: usize) -> i32 {
    super::thread::refuse_in_guest("gnt_user_read_nofault");
    if !user_ok(hva, len as u64, Direction::Read) {
        return -14;
    }
    // SAFETY: user memory of a test is memory of this process.
    unsafe { std::ptr::copy(hva as *const u8, to, len) };
    0
}
pub(crate) unsafe fn gnt_user_write_nofault(hva: u64, from: *const u8, len: usize) -> i32 {
    super::thread::refuse_in_guest("gnt_user_write_nofault");
    if !user_ok(hva, len as u64, Direction::Write) {
        return -14;
    }
    // SAFETY: user memory of a test is memory of this process; `from` is readable by the contract.
    unsafe { std::ptr::copy(from, hva as *mut u8, len) };
    0
}
pub(crate) use gnt_user_read_nofault as gnt_user_read;
pub(crate) use gnt_user_write_nofault as gnt_user_write;
pub(crate) fn gnt_user_clear(hva: u64, len: usize) -> i32 {
    super::thread::refuse_in_guest("gnt_user_clear");
    if !user_ok(hva, len as u64, Direction::Write) {
        return -14;
    }
    // SAFETY: user memory of a test is memory of this process.
    unsafe { std::ptr::write_bytes(hva as *mut u8, 0, len) };
    0
}
pub(crate) fn gnt_user_cmpxchg(hva: u64, size: u32, old: u64, new: u64) -> i32 {
    super::thread::refuse_in_guest("gnt_user_cmpxchg");
    if !user_ok(hva, size.into(), Direction::Write) {
        return -14;
    }
    macro_rules! exchange {
        ($atomic:ty, $int:ty) => {{
            // SAFETY: user memory of a test is memory of this process; the wrapper has seen that it is aligned.
            let word = unsafe { &*(hva as *const $atomic) };
            word.compare_exchange(old as $int, new as $int, Ordering::SeqCst, Ordering::SeqCst)
                .is_err()
                .into()
        }};
    }
    match size {
        1 => exchange!(std::sync::atomic::AtomicU8, u8),
        2 => exchange!(std::sync::atomic::AtomicU16, u16),
        4 => exchange!(AtomicU32, u32),
        _ => exchange!(AtomicU64, u64),
    }
}
