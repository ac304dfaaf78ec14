//! What a test says in the end, and the expectations that lead there.

use std::fmt::{self, Debug, Display};

/// Why a test did not pass.
#[derive(Debug)]
pub enum Trouble {
    /// Something is not as expected.
    Failed(String),
    /// The test cannot be done on this host.
    Skipped(String),
}

/// Passed with a value, or not.
pub type Outcome<T = ()> = Result<T, Trouble>;

/// An errno.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

/// What an ioctl answers.
pub type Reply = Result<i32, Errno>;

impl Errno {
    /// The calling thread's errno.
    pub fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or_default())
    }
}

impl Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = match self.0 {
            libc::EPERM => "EPERM",
            libc::ENOENT => "ENOENT",
            libc::EINTR => "EINTR",
            libc::EIO => "EIO",
            libc::ENXIO => "ENXIO",
            libc::E2BIG => "E2BIG",
            libc::EBADF => "EBADF",
            libc::EAGAIN => "EAGAIN",
            libc::ENOMEM => "ENOMEM",
            libc::EFAULT => "EFAULT",
            libc::EBUSY => "EBUSY",
            libc::EEXIST => "EEXIST",
            libc::ENODEV => "ENODEV",
            libc::EINVAL => "EINVAL",
            libc::ENOTTY => "ENOTTY",
            libc::ENOSPC => "ENOSPC",
            libc::ENOSYS => "ENOSYS",
            libc::EOPNOTSUPP => "EOPNOTSUPP",
            other => return write!(f, "errno {other}"),
        };
        f.write_str(name)
    }
}

impl Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        Debug::fmt(self, f)
    }
}

/// The test fails for this reason.
pub fn fail<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Trouble::Failed(reason.into()))
}

/// The test has nothing to say on this host.
pub fn skip<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Trouble::Skipped(reason.into()))
}

/// `got` is `expected`.
pub fn equal<T: PartialEq + Debug>(what: &str, got: T, expected: T) -> Outcome {
    if got == expected {
        return Ok(());
    }
    fail(format!("{what}: expected {expected:x?} got {got:x?}"))
}

/// `got` is one of `expected`: for what the versions of the oracle do differently.
pub fn one_of<T: PartialEq + Debug>(what: &str, got: T, expected: &[T]) -> Outcome {
    if expected.contains(&got) {
        return Ok(());
    }
    fail(format!("{what}: expected one of {expected:x?} got {got:x?}"))
}

/// `holds`; `expected` says in words what, `got` what was found.
pub fn holds(expected: &str, holds: bool, got: impl Debug) -> Outcome {
    if holds {
        return Ok(());
    }
    fail(format!("expected {expected} got {got:x?}"))
}

/// Expectations on the answer of a system call.
pub trait Answer<T> {
    /// The call succeeded; its value.
    fn granted(self, what: &str) -> Outcome<T>;
    /// The call failed with `errno`.
    fn refused(self, what: &str, errno: i32) -> Outcome;
}

impl<T: Debug> Answer<T> for Result<T, Errno> {
    fn granted(self, what: &str) -> Outcome<T> {
        self.or_else(|errno| fail(format!("{what}: expected success got {errno}")))
    }

    fn refused(self, what: &str, errno: i32) -> Outcome {
        let expected = Errno(errno);
        match self {
            Err(got) if got == expected => Ok(()),
            Err(got) => fail(format!("{what}: expected {expected} got {got}")),
            Ok(got) => fail(format!("{what}: expected {expected} got success ({got:x?})")),
        }
    }
}
