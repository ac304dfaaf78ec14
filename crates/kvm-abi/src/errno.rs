//! The errno values that a command of ours can return, and the one place where errors of the floors
//! below become them.
//!
//! The kernel's entry point returns [`Errno::code`]. Sources: KVM API §4, errno(3).

use ::vcpu::state::registers::Invalid;
use ::vm::irq::{IoEventError, IrqError, IrqFdError, ZoneError};
use ::vm::memory::DirtyLogError;
use ::vm::vcpus::AddError;
use backend::Unrestorable;
use host::notifier::RegisterError;
use host::{BadFd, Fault, Interrupted, NoMemory};
use irqchip::RoutingError;
use mmu::SlotError;

/// Why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[allow(clippy::upper_case_acronyms, reason = "the names of errno(3)")]
pub enum Errno {
    /// Operation not permitted.
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
    /// Nothing to do yet: try again.
    EAGAIN = 11,
    /// There is no memory.
    ENOMEM = 12,
    /// A user pointer does not point to memory.
    EFAULT = 14,
    /// What is asked for is in use.
    EBUSY = 16,
    /// What is to be made exists already.
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
    /// There is no room for more.
    ENOSPC = 28,
    /// Operation not supported.
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
            // What else can fail in making a file is memory.
            _ => Errno::ENOMEM,
        }
    }
}

impl From<Unrestorable> for Errno {
    fn from(why: Unrestorable) -> Self {
        match why {
            Unrestorable::Invalid => Errno::EINVAL,
            // The bytes that it lacks could not be read: stock KVM fails in its copy then.
            Unrestorable::Missing => Errno::EFAULT,
            Unrestorable::NoMemory => Errno::ENOMEM,
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

impl From<RegisterError> for Errno {
    fn from(error: RegisterError) -> Self {
        match error {
            RegisterError::NoMemory => Errno::ENOMEM,
            // VMMs make the VM again after this errno alone.
            RegisterError::Interrupted => Errno::EINTR,
        }
    }
}

impl From<BadFd> for Errno {
    fn from(error: BadFd) -> Self {
        match error {
            BadFd::Closed => Errno::EBADF,
            // As the kernel's eventfd_ctx_fdget() has it.
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

impl From<SlotError> for Errno {
    fn from(error: SlotError) -> Self {
        match error {
            SlotError::Overlaps => Errno::EEXIST,
            SlotError::NoMemory => Errno::ENOMEM,
            // Stock KVM tells an overlap apart and nothing else (KVM API §4.35).
            SlotError::UnknownFlag
            | SlotError::Unaligned
            | SlotError::NotUserRange
            | SlotError::SlotId
            | SlotError::AddressSpace
            | SlotError::Wraps
            | SlotError::TooLarge
            | SlotError::BeyondGuestPhysical
            | SlotError::Absent
            | SlotError::Immutable => Errno::EINVAL,
        }
    }
}

impl From<DirtyLogError> for Errno {
    fn from(error: DirtyLogError) -> Self {
        match error {
            DirtyLogError::Invalid => Errno::EINVAL,
            DirtyLogError::NoLog => Errno::ENOENT,
            DirtyLogError::Fault => Errno::EFAULT,
        }
    }
}

impl From<IrqError> for Errno {
    fn from(error: IrqError) -> Self {
        match error {
            IrqError::Exists => Errno::EEXIST,
            IrqError::Missing => Errno::ENXIO,
            IrqError::NoMemory => Errno::ENOMEM,
        }
    }
}

impl From<RoutingError> for Errno {
    fn from(error: RoutingError) -> Self {
        match error {
            RoutingError::Invalid => Errno::EINVAL,
            RoutingError::NoMemory => Errno::ENOMEM,
        }
    }
}

impl From<IrqFdError> for Errno {
    fn from(error: IrqFdError) -> Self {
        match error {
            IrqFdError::Busy => Errno::EBUSY,
            IrqFdError::Full => Errno::ENOSPC,
            IrqFdError::BadFd(fd) => fd.into(),
            IrqFdError::NoMemory => Errno::ENOMEM,
        }
    }
}

impl From<ZoneError> for Errno {
    fn from(error: ZoneError) -> Self {
        match error {
            ZoneError::Full => Errno::ENOSPC,
            ZoneError::NoMemory => Errno::ENOMEM,
        }
    }
}

impl From<IoEventError> for Errno {
    fn from(error: IoEventError) -> Self {
        match error {
            IoEventError::Invalid => Errno::EINVAL,
            IoEventError::Exists => Errno::EEXIST,
            IoEventError::NotFound => Errno::ENOENT,
            IoEventError::Full => Errno::ENOSPC,
            IoEventError::BadFd(fd) => fd.into(),
            IoEventError::NoMemory => Errno::ENOMEM,
        }
    }
}

impl From<cpuid::Error> for Errno {
    fn from(error: cpuid::Error) -> Self {
        match error {
            cpuid::Error::TooMany => Errno::E2BIG,
            cpuid::Error::Invalid => Errno::EINVAL,
            cpuid::Error::NoMemory => Errno::ENOMEM,
        }
    }
}

impl From<AddError> for Errno {
    fn from(error: AddError) -> Self {
        match error {
            // EINVAL as from stock KVM, though descriptors and memory have errno of their own.
            AddError::TooMany => Errno::EINVAL,
            AddError::NoMemory => Errno::ENOMEM,
        }
    }
}

impl From<Invalid> for Errno {
    fn from(_: Invalid) -> Self {
        Errno::EINVAL
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

    #[test]
    fn only_an_overlap_is_eexist() {
        assert_eq!(Errno::from(SlotError::Overlaps), Errno::EEXIST);
        assert_eq!(Errno::from(SlotError::Immutable), Errno::EINVAL);
        assert_eq!(Errno::from(SlotError::NoMemory), Errno::ENOMEM);
    }
}
