//! `/dev/kvm` as it is: no wrapper stands between a test and an errno.

pub mod exit;
pub mod failing;
pub mod file;
pub mod ioctl;
pub mod pointer;
pub mod stats;
pub mod vcpu;
