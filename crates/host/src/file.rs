//! Files of our own: the descriptors that stand for a VM and for a vCPU.
//!
//! A file owns its object. The kernel's file operations (`linux/glue/fops.c`) call back through a
//! table of functions made here for the object's type, so no pointer is cast by hand anywhere.

use core::any::TypeId;
use core::ffi::c_void;
use core::marker::PhantomData;

use crate::arc::Arc;
use crate::page::Page;
use crate::sys::{self, FileCalls};

/// How wide the pointers are that a caller puts into structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointers {
    /// The pointers of a 32-bit process, in fields of 64: the upper half is whatever lay there.
    Bits32,
    /// The pointers of a 64-bit process.
    Bits64,
}

impl Pointers {
    /// The address in a field.
    pub const fn of(self, field: u64) -> u64 {
        match self {
            Self::Bits32 => field & 0xffff_ffff,
            Self::Bits64 => field,
        }
    }
}

/// An object that user space holds by a file descriptor.
pub trait FileObject: Send + Sync + Sized + 'static {
    /// The name shown in `/proc/PID/fd`: `kvm-vm`, `kvm-vcpu`. NUL-terminated.
    const NAME: &'static core::ffi::CStr;
    /// An ioctl: the number and argument as user space gave them.
    /// Returns the ioctl's value, or a negative errno. Process context of any task.
    fn ioctl(this: &Arc<Self>, command: u32, argument: u64, caller: Pointers) -> i64;
    /// The page that a mapping of the file shows at page offset `offset`, one that the object owns. `None`:
    /// SIGBUS.
    fn mmap_page(&self, _offset: u64) -> Option<&Page> {
        None
    }
    /// Reads `len` bytes from `offset` on into user memory at `buffer`: how many were read, or a
    /// negative errno. Process context of any task.
    fn read(&self, _offset: u64, _buffer: u64, _len: u64) -> i64 {
        0
    }
    /// Whether the file is one to be read, at any offset, and nothing else.
    const READABLE: bool = false;
    /// Whether the file can be mapped at all.
    const MAPPABLE: bool = false;
    /// The last descriptor (and mapping) is gone; the file's share of the object follows.
    fn released(&self) {}
}

struct Calls<T>(PhantomData<T>);

impl<T: FileObject> Calls<T> {
    const TABLE: FileCalls = FileCalls {
        ioctl: ioctl::<T>,
        page: page::<T>,
        release: release::<T>,
        read: read::<T>,
        mappable: T::MAPPABLE as u64,
        readable: T::READABLE as u64,
        kind: TypeId::of::<T>(),
    };
}

/// A file that user space cannot see yet; dropping it undoes everything.
#[must_use]
#[derive(Debug)]
pub struct NewFile {
    file: *mut sys::FileRaw,
    fd: i32,
    _here: PhantomData<*const ()>,
}

impl NewFile {
    /// Makes a file for `object` and reserves a descriptor (close-on-exec; read-write, or for
    /// reading only). `number`
    /// is appended to the name as `:number` (vCPUs). On failure a positive errno: EMFILE, ENFILE, ENOMEM.
    pub fn new<T: FileObject>(object: Arc<T>, number: Option<u32>) -> Result<Self, i32> {
        let mut fd = -1;
        let raw = object.into_raw().cast_mut().cast::<c_void>();
        // A VM's file has no number: C adds none for -1.
        let number = number.map_or(-1, i64::from);
        // SAFETY: the file takes the ownership over; the table is made for T.
        let file = unsafe {
            sys::gnt_file_new(T::NAME.as_ptr(), number, &Calls::<T>::TABLE, raw, &mut fd)
        };
        if file.is_null() {
            // SAFETY: the file was not made, so the ownership is still ours.
            drop(unsafe { Arc::from_raw(raw.cast::<T>()) });
            // C returns the errno in the descriptor's place.
            return Err(fd.saturating_neg());
        }
        Ok(Self { file, fd, _here: PhantomData })
    }

    /// The number that [`NewFile::install`] will return.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// Shows the file to user space. From here on other threads may use it, and close it.
    pub fn install(self) -> i32 {
        // Dropping it would undo what is now user space's.
        let this = core::mem::ManuallyDrop::new(self);
        // SAFETY: made by new(), installed once.
        unsafe { sys::gnt_file_install(this.file, this.fd) };
        this.fd
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // SAFETY: made by new() and never installed.
        unsafe { sys::gnt_file_cancel(self.file, self.fd) }
    }
}

/// The object behind descriptor `fd` of the current task, if it is one of type `T`.
pub fn get<T: FileObject>(fd: i32) -> Option<Arc<T>> {
    let mut object = core::ptr::null_mut();
    let mut calls = core::ptr::null();
    // Referenced from here on: another thread may close the descriptor.
    let file = sys::gnt_file_get(fd, &mut calls, &mut object);
    if file.is_null() {
        return None;
    }
    // SAFETY: the file is one of ours and referenced until gnt_file_put: its table is one of those
    // made here, and names the type of the object of which it holds an ownership.
    unsafe {
        // The type first: a descriptor of another kind of ours has a table of its own.
        let same: bool = (*calls).kind == TypeId::of::<T>();
        let arc = same.then(|| Arc::clone_from_raw(object.cast::<T>()));
        // Behind the clone: until then the file alone keeps the object.
        sys::gnt_file_put(file);
        arc
    }
}

/// # Safety
/// `object` is the raw form of an ownership that the file holds; so for the functions below.
unsafe extern "C" fn ioctl<T: FileObject>(
    object: *mut c_void,
    command: u32,
    argument: u64,
    compat: i32,
) -> i64 {
    // Not dropped: the file keeps its ownership.
    // SAFETY: the file is open during the call; its ownership is borrowed, not taken.
    let arc = core::mem::ManuallyDrop::new(unsafe { Arc::from_raw(object.cast::<T>()) });
    let caller = if compat != 0 { Pointers::Bits32 } else { Pointers::Bits64 };
    T::ioctl(&arc, command, argument, caller)
}
unsafe extern "C" fn page<T: FileObject>(object: *mut c_void, offset: u64) -> u64 {
    // SAFETY: the file is open during the call.
    unsafe { &*object.cast::<T>() }.mmap_page(offset).map_or(0, |page| page.hpa().0)
}
unsafe extern "C" fn read<T: FileObject>(
    object: *mut c_void,
    offset: u64,
    buffer: u64,
    len: u64,
) -> i64 {
    // SAFETY: the file is open during the call.
    unsafe { &*object.cast::<T>() }.read(offset, buffer, len)
}
unsafe extern "C" fn release<T: FileObject>(object: *mut c_void) {
    // SAFETY: the file's ownership is taken back, once.
    let arc = unsafe { Arc::from_raw(object.cast::<T>()) };
    // Before the ownership goes: what is told to the object needs it alive.
    arc.released();
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::std_port::test;

    struct Thing(AtomicU32);

    impl FileObject for Thing {
        const NAME: &'static core::ffi::CStr = c"thing";
        fn ioctl(this: &Arc<Self>, command: u32, argument: u64, _: Pointers) -> i64 {
            this.0.fetch_add(command, Ordering::Relaxed);
            argument as i64
        }
        fn released(&self) {
            self.0.store(0, Ordering::Relaxed);
        }
    }
    struct Other;
    impl FileObject for Other {
        const NAME: &'static core::ffi::CStr = c"other";
        fn ioctl(_: &Arc<Self>, _: u32, _: u64, _: Pointers) -> i64 {
            -25
        }
    }

    #[test]
    fn a_file_owns_its_object_until_it_is_closed() {
        let thing = Arc::new(Thing(AtomicU32::new(0))).unwrap();
        let fd = NewFile::new(thing.clone(), Some(3)).unwrap().install();
        assert_eq!(test::ioctl(fd, 5, 77), 77);
        assert_eq!((thing.0.load(Ordering::Relaxed), thing.owners()), (5, 2));
        assert!(get::<Other>(fd).is_none());
        assert!(Arc::ptr_eq(&get::<Thing>(fd).unwrap(), &thing));
        test::close(fd);
        assert_eq!((thing.0.load(Ordering::Relaxed), thing.owners()), (0, 1));
    }

    #[test]
    fn a_file_that_is_not_installed_leaves_nothing_behind() {
        let thing = Arc::new(Thing(AtomicU32::new(0))).unwrap();
        drop(NewFile::new(thing.clone(), None).unwrap());
        assert_eq!(thing.owners(), 1);
    }
}
