//! The errno values that a command of ours can return, and the one place where errors of the floors
//! below become them.
//!
//! The kernel's entry point returns [`Errno::code`]. Sources: KVM API §4, errno(3).

use host::{BadFd, Fault, Interrupted, NoMemory};

/// Why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[allow(clippy::upper_case_acronyms, reason = "the names of errno(3)")]
pub enum Errno {
    /// Not permitted.
    EPERM = 1,
    /// No such thing.
    ENOENT = 2,
    /// A signal is pending.
    EINTR = 4,
    /// The caller's address space is not the VM's, or the VM is dead.
    EIO = 5,
    /// The device that is asked for does not exist.
    ENXIO = 6,
    /// More entries than there is room for.
    E2BIG = 7,
    /// Not a file descriptor of the right kind.
    EBADF = 9,
    /// Try again.
    EAGAIN = 11,
    /// No memory.
    ENOMEM = 12,
    /// A user pointer does not point to memory.
    EFAULT = 14,
    /// In use.
    EBUSY = 16,
    /// Exists already.
    EEXIST = 17,
    /// No such device.
    ENODEV = 19,
    /// A value that is not allowed.
    EINVAL = 22,
    /// The system's table of open files is full.
    ENFILE = 23,
    /// The process's table of open files is full.
    EMFILE = 24,
    /// Not a command of this file.
    ENOTTY = 25,
    /// No room.
    ENOSPC = 28,
    /// Not supported.
    EOPNOTSUPP = 95,
    /// The page is poisoned.
    EHWPOISON = 133,
}

impl Errno {
    /// What an ioctl of the kernel returns: the negative number.
    pub const fn code(self) -> i64 {
        -(self as i64)
    }

    /// From a positive errno of the host's `file` service.
    pub const fn from_file(errno: i32) -> Self {
        match errno {
            23 => Errno::ENFILE,
            24 => Errno::EMFILE,
            _ => Errno::ENOMEM,
        }
    }
}

impl From<Fault> for Errno {
    fn from(_: Fault) -> Self {
        Errno::EFAULT
    }
}

impl From<NoMemory> for Errno {
    fn from(_: NoMemory) -> Self {
        Errno::ENOMEM
    }
}

impl From<Interrupted> for Errno {
    fn from(_: Interrupted) -> Self {
        Errno::EINTR
    }
}

impl From<BadFd> for Errno {
    fn from(error: BadFd) -> Self {
        match error {
            BadFd::Closed => Errno::EBADF,
            BadFd::WrongKind => Errno::EINVAL,
        }
    }
}

impl From<alloc::collections::TryReserveError> for Errno {
    fn from(_: alloc::collections::TryReserveError) -> Self {
        Errno::ENOMEM
    }
}

impl From<zerocopy::AllocError> for Errno {
    fn from(_: zerocopy::AllocError) -> Self {
        Errno::ENOMEM
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_returned_as_the_negative_number() {
        assert_eq!(Errno::ENOTTY.code(), -25);
        assert_eq!(Errno::from(Fault).code(), -14);
        assert_eq!(Errno::from(NoMemory).code(), -12);
        assert_eq!(Errno::from(Interrupted).code(), -4);
        assert_eq!(Errno::from_file(24).code(), -24);
    }
}
