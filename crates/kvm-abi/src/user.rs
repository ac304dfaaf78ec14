//! Typed copies between user memory and the structures of [`crate::uapi`].
//!
//! Everything is copied once into memory of ours before it is looked at, so user space cannot
//! change a value after it was checked. Whatever is larger than a few hundred bytes lives on the
//! heap, since a kernel stack is small.

use alloc::boxed::Box;

use host::user;
use x86::Hva;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::errno::Errno;

/// A structure from user memory. `EFAULT` where that is not there.
#[inline]
pub fn read<T: FromBytes + IntoBytes>(addr: u64) -> Result<T, Errno> {
    let mut value = T::new_zeroed();
    user::read(Hva(addr), value.as_mut_bytes())?;
    Ok(value)
}

/// Like [`read`], onto the heap.
pub fn read_boxed<T: FromBytes + IntoBytes>(addr: u64) -> Result<Box<T>, Errno> {
    let mut value = T::new_box_zeroed()?;
    user::read(Hva(addr), value.as_mut_bytes())?;
    Ok(value)
}

/// An array of `count` structures from user memory, onto the heap. The caller has bounded `count`.
pub fn read_array<T>(addr: u64, count: usize) -> Result<Box<[T]>, Errno>
where
    T: FromBytes + IntoBytes + KnownLayout<PointerMetadata = ()>,
{
    // Zeroed and then copied over: no uninitialised memory is ever a value, even if the copy ends
    // early.
    let mut values = <[T]>::new_box_zeroed_with_elems(count)?;
    // An empty array may have any pointer: VMMs pass null.
    if count != 0 {
        user::read(Hva(addr), values.as_mut_bytes())?;
    }
    Ok(values)
}

/// Puts a structure, or an array of them, into user memory.
#[inline]
pub fn write<T: IntoBytes + Immutable + ?Sized>(addr: u64, value: &T) -> Result<(), Errno> {
    let bytes = value.as_bytes();
    // As with read_array(): an empty list goes to any pointer.
    if !bytes.is_empty() {
        user::write(Hva(addr), bytes)?;
    }
    Ok(())
}

/// The largest structure that lies on the stack while a command is served.
const ON_STACK: usize = 256;

/// Copies in a structure and hands it on. Out of line, so that no stack frame holds the structures of
/// all commands.
#[inline(never)]
pub fn takes<T: FromBytes + IntoBytes>(
    addr: u64,
    then: impl FnOnce(&T) -> Result<(), Errno>,
) -> Result<(), Errno> {
    // Known when compiled: each type has one of the two ways.
    if size_of::<T>() > ON_STACK {
        return then(&*read_boxed::<T>(addr)?);
    }
    then(&read(addr)?)
}

/// Copies out the structure that `make` makes. Out of line for the same reason.
#[inline(never)]
pub fn gives<T: IntoBytes + Immutable>(addr: u64, make: impl FnOnce() -> T) -> Result<(), Errno> {
    write(addr, &make())
}

/// The address of the array behind a head of type `T` at `addr`.
pub fn after<T>(addr: u64) -> Result<u64, Errno> {
    // A pointer near 2^64 must not come out at the bottom of the address space.
    addr.checked_add(size_of::<T>() as u64).ok_or(Errno::EFAULT)
}
