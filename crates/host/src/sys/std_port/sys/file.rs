//! Files with objects of ours behind them.

use std::ffi::{CStr, c_char, c_void};

use crate::sys::FileCalls;
use crate::sys::std_port::world::{Context, descriptors};

pub(crate) struct FileRaw(&'static FileCalls, Context);

pub(crate) unsafe fn gnt_file_new(
    name: *const c_char,
    _: i64,
    calls: &'static FileCalls,
    object: *mut c_void,
    fd: *mut i32,
) -> *mut FileRaw {
    super::thread::refuse_in_guest("gnt_file_new");
    // SAFETY: a NUL-terminated name, and fd is writable.
    unsafe {
        assert!(!CStr::from_ptr(name).is_empty());
        let mut all = descriptors();
        all.next += 1;
        fd.write(all.next);
    }
    Box::into_raw(Box::new(FileRaw(calls, Context(object))))
}
pub(crate) unsafe fn gnt_file_install(file: *mut FileRaw, fd: i32) {
    super::thread::refuse_in_guest("gnt_file_install");
    // SAFETY: made by gnt_file_new, taken once.
    let file = unsafe { Box::from_raw(file) };
    descriptors().files.insert(fd, (file.0, file.1));
}
pub(crate) unsafe fn gnt_file_cancel(file: *mut FileRaw, _: i32) {
    super::thread::refuse_in_guest("gnt_file_cancel");
    // SAFETY: made by gnt_file_new, taken once; the object is released as the kernel does when the file goes.
    unsafe {
        let file = Box::from_raw(file);
        (file.0.release)(file.1.0);
    }
}
pub(crate) fn gnt_file_get(
    fd: i32,
    calls: &mut *const FileCalls,
    object: &mut *mut c_void,
) -> *mut FileRaw {
    let Some(file) = descriptors().files.get(&fd).copied() else { return std::ptr::null_mut() };
    *calls = file.0;
    *object = file.1.0;
    std::ptr::NonNull::dangling().as_ptr()
}
pub(crate) unsafe fn gnt_file_put(_: *mut FileRaw) {}
