//! Directories in debugfs, `/sys/kernel/debug/kvm`, whose files are made when they are read.
//!
//! A directory owns a share of its object. Dropping it waits for readers and refuses later ones, so
//! a file that somebody still holds open shows nothing any more. Where there is no debugfs, there
//! is no directory.

use core::ffi::{CStr, c_char, c_void};
use core::fmt;
use core::marker::PhantomData;

use crate::arc::Arc;
use crate::sys::{self, DebugCalls};

/// What a directory shows. Its functions run in process context of any task and may sleep.
pub trait DebugObject: Send + Sync + Sized + 'static {
    /// How many files there are.
    const FILES: u32;
    /// How many files, the first of them, show one number each.
    const NUMBERS: u32;
    /// The name of a file.
    fn name(file: u32) -> &'static CStr;
    /// The number that one of the first files shows.
    fn value(&self, file: u32) -> u64;
    /// The text that one of the others shows.
    fn show(&self, file: u32, to: &mut Text<'_>);
}

/// A text that grows in the reader's buffer. Writing never fails: what does not fit is made again
/// in a larger one.
#[derive(Debug)]
pub struct Text<'a> {
    raw: *mut sys::SeqRaw,
    here: PhantomData<&'a mut ()>,
}

impl Text<'_> {
    /// # Safety
    /// `raw` is the kernel's file that is being read, for as long as the result lives.
    pub unsafe fn of_raw(raw: *mut c_void) -> Self {
        Self { raw: raw.cast(), here: PhantomData }
    }
}

impl fmt::Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // SAFETY: the file is being read as long as this lives; the text is readable.
        unsafe { sys::gnt_seq_write(self.raw, text.as_ptr(), text.len()) };
        Ok(())
    }
}

struct Calls<T>(PhantomData<T>);

impl<T: DebugObject> Calls<T> {
    const TABLE: DebugCalls = DebugCalls {
        name: name::<T>,
        show: show::<T>,
        value: value::<T>,
        release: release::<T>,
        files: T::FILES,
        totals: T::NUMBERS,
    };
}

/// A directory. It goes before the one that it lies in.
#[derive(Debug)]
pub struct DebugDir {
    raw: *mut sys::DebugDirRaw,
    /// Dropped after this one was removed.
    _parent: Option<Arc<Self>>,
}

// SAFETY: the kernel's functions on it lock for themselves.
unsafe impl Send for DebugDir {}
// SAFETY: a reference to a DebugDir only names it as a parent, and the kernel's functions lock for themselves.
unsafe impl Sync for DebugDir {}

impl DebugDir {
    /// A directory for `object`, in that of the module or in `parent`, which stays as long.
    /// `None`: there is no debugfs, no memory, or the name is taken.
    pub fn new<T: DebugObject>(
        name: &CStr,
        parent: Option<&Arc<Self>>,
        object: Arc<T>,
    ) -> Option<Self> {
        let object = object.into_raw().cast_mut().cast::<c_void>();
        let above = parent.map_or(core::ptr::null_mut(), |dir| dir.raw);
        // SAFETY: the name is NUL-terminated, the parent alive, the table made for the object's type.
        let raw = unsafe { sys::gnt_debug_add(name.as_ptr(), above, &Calls::<T>::TABLE, object) };
        if raw.is_null() {
            // SAFETY: the share was not taken.
            drop(unsafe { Arc::from_raw(object.cast::<T>().cast_const()) });
            return None;
        }
        Some(Self { raw, _parent: parent.cloned() })
    }
}

impl Drop for DebugDir {
    fn drop(&mut self) {
        // SAFETY: made by new(), removed once.
        unsafe { sys::gnt_debug_remove(self.raw) }
    }
}

/// The table by which C adds up the numbers of all objects of this type.
pub fn totals<T: DebugObject>() -> *const c_void {
    // The table lives as long as the module, for C keeps its address.
    let table: &'static DebugCalls = &Calls::<T>::TABLE;
    core::ptr::from_ref(table).cast()
}

unsafe extern "C" fn name<T: DebugObject>(file: u32) -> *const c_char {
    T::name(file).as_ptr()
}

/// # Safety
/// `object` is a share that the directory holds, and `to` is being read; so for those below.
unsafe extern "C" fn show<T: DebugObject>(object: *mut c_void, file: u32, to: *mut sys::SeqRaw) {
    // SAFETY: the directory holds a share while its files are read.
    let object = unsafe { &*object.cast::<T>() };
    let mut text = Text { raw: to, here: PhantomData };
    // A number is written here, so that no object has to know how.
    if file < T::NUMBERS {
        let _ = fmt::Write::write_fmt(&mut text, format_args!("{}\n", object.value(file)));
    } else {
        object.show(file, &mut text);
    }
}
unsafe extern "C" fn value<T: DebugObject>(object: *mut c_void, file: u32) -> u64 {
    // SAFETY: the directory holds a share while its files are read.
    unsafe { &*object.cast::<T>() }.value(file)
}
unsafe extern "C" fn release<T: DebugObject>(object: *mut c_void) {
    // SAFETY: the directory's share, given back once.
    drop(unsafe { Arc::from_raw(object.cast::<T>().cast_const()) });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::std_port::test;
    use core::fmt::Write;

    struct Thing(u64);

    impl DebugObject for Thing {
        const FILES: u32 = 2;
        const NUMBERS: u32 = 1;
        fn name(file: u32) -> &'static CStr {
            if file == 0 { c"number" } else { c"text" }
        }
        fn value(&self, _: u32) -> u64 {
            self.0
        }
        fn show(&self, _: u32, to: &mut Text<'_>) {
            let _ = write!(to, "a {} in words", self.0);
        }
    }

    #[test]
    fn a_directory_shows_its_object_and_gives_it_back() {
        let thing = Arc::new(Thing(7)).unwrap();
        let outer = Arc::new(DebugDir::new(c"1-2", None, thing.clone()).unwrap()).unwrap();
        let inner = DebugDir::new(c"vcpu0", Some(&outer), thing.clone()).unwrap();
        assert_eq!(thing.owners(), 3);
        assert_eq!(test::debug_file("1-2/number").as_deref(), Some("7\n"));
        assert_eq!(test::debug_file("1-2/vcpu0/text").as_deref(), Some("a 7 in words"));
        drop(outer);
        // The outer one stays as long as the inner one.
        assert_eq!(test::debug_file("1-2/number").as_deref(), Some("7\n"));
        drop(inner);
        assert_eq!(test::debug_file("1-2/vcpu0/text"), None);
        assert_eq!((thing.owners(), test::debug_file("1-2/number")), (1, None));
    }

    #[test]
    fn a_name_that_is_taken_leaves_the_object_alone() {
        let thing = Arc::new(Thing(0)).unwrap();
        let first = DebugDir::new(c"3-4", None, thing.clone());
        assert!(DebugDir::new(c"3-4", None, thing.clone()).is_none());
        assert_eq!(thing.owners(), 2);
        drop(first);
    }
}
