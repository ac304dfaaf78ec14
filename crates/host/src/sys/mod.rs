//! The border to the kernel: one set of functions, `gnt_*`, implemented twice.
//!
//! [`kernel`] declares the C functions of `linux/glue/`; [`std_port`] implements the same names on
//! the standard library. Structs that cross the border are `repr(C)` and asserted on both sides.

use core::any::TypeId;
use core::ffi::{c_char, c_void};

#[cfg(target_os = "none")]
mod kernel;
#[cfg(target_os = "none")]
pub(crate) use kernel::*;

#[cfg(not(target_os = "none"))]
pub mod std_port;
#[cfg(not(target_os = "none"))]
pub(crate) use std_port::sys::*;

pub(crate) type TimerFn = unsafe extern "C" fn(*mut c_void) -> u64;

/// What a notifier calls: `struct gnt_notifier_calls`.
#[repr(C)]
pub(crate) struct NotifierCalls {
    pub invalidate_start: unsafe extern "C" fn(*mut c_void, u64, u64, i32),
    pub invalidate_end: unsafe extern "C" fn(*mut c_void, u64, u64),
    pub clear_young: unsafe extern "C" fn(*mut c_void, u64, u64) -> i32,
    pub test_young: unsafe extern "C" fn(*mut c_void, u64, u64) -> i32,
    pub release: unsafe extern "C" fn(*mut c_void),
}
const _: () = assert!(size_of::<NotifierCalls>() == 40);

/// What a watched eventfd calls: `struct gnt_watch_calls`.
#[repr(C)]
pub(crate) struct WatchCalls {
    pub fired: unsafe extern "C" fn(*mut c_void),
    pub hung_up: unsafe extern "C" fn(*mut c_void),
}
const _: () = assert!(size_of::<WatchCalls>() == 16);

/// What a file in debugfs calls: `struct gnt_debug_calls`.
#[repr(C)]
pub(crate) struct DebugCalls {
    pub name: unsafe extern "C" fn(u32) -> *const c_char,
    pub show: unsafe extern "C" fn(*mut c_void, u32, *mut SeqRaw),
    pub value: unsafe extern "C" fn(*mut c_void, u32) -> u64,
    pub release: unsafe extern "C" fn(*mut c_void),
    pub files: u32,
    pub totals: u32,
}
const _: () = assert!(size_of::<DebugCalls>() == 40);

/// What a file descriptor calls: `struct gnt_file_calls`.
#[repr(C)]
pub(crate) struct FileCalls {
    pub ioctl: unsafe extern "C" fn(*mut c_void, u32, u64, i32) -> i64,
    pub page: unsafe extern "C" fn(*mut c_void, u64) -> u64,
    pub release: unsafe extern "C" fn(*mut c_void),
    pub read: unsafe extern "C" fn(*mut c_void, u64, u64, u64) -> i64,
    pub mappable: u64,
    pub readable: u64,
    /// Which Rust type the object is; C does not look at it.
    pub kind: TypeId,
}
const _: () = assert!(size_of::<FileCalls>() == 64);
