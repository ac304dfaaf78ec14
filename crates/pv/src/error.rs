//! What a guest is told of a hypercall that fails. `hypercalls.rst`.

/// Why a hypercall fails; the guest sees the negative of the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HypercallError {
    /// KVM_EPERM: not from CPL 0.
    NotPrivileged = 1,
    /// KVM_EFAULT: memory cannot be reached.
    Fault = 14,
    /// An argument is invalid: KVM_EINVAL.
    Invalid = 22,
    /// KVM_EOPNOTSUPP: known, but not possible on this host.
    NotSupported = 95,
    /// KVM_ENOSYS: unknown or not offered.
    NoSuchCall = 1000,
}
