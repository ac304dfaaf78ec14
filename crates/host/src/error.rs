//! The ways in which a service of the kernel can refuse. `kvm-abi` maps them to errno.

use core::fmt;

/// The kernel has no memory to give (`-ENOMEM`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory;

/// A signal ended the wait (`-EINTR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted;

/// User memory is not there, or not with the access asked for (`-EFAULT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// A file descriptor that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadFd {
    /// The descriptor is not open (`-EBADF`).
    Closed,
    /// The descriptor is open, but its file is of another kind (`-EINVAL`).
    WrongKind,
}

macro_rules! message {
    ($ty:ty, $text:literal) => {
        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($text)
            }
        }
        impl core::error::Error for $ty {}
    };
}

message!(NoMemory, "out of memory");
message!(Interrupted, "interrupted by a signal");
message!(Fault, "bad user address");
message!(BadFd, "bad file descriptor");

impl From<alloc::collections::TryReserveError> for NoMemory {
    fn from(_: alloc::collections::TryReserveError) -> Self {
        NoMemory
    }
}
