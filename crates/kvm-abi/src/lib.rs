//! The `/dev/kvm` interface: turns bytes from user space into calls, and nothing else.
//!
//! The commands and capabilities stand in two tables, `table.rs`; [`rows`] has them as values.
//! [`uapi`] holds the numbers and structures, [`caps`] what KVM_CHECK_EXTENSION answers, [`errno`]
//! the one mapping from errors to errno, [`run_page`] the page shared with a vCPU's VMM,
//! [`dispatch`] the commands of the three kinds of files, [`bind`] what they do to VMs and vCPUs.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

#[macro_use]
mod table;

pub mod bind;
pub mod caps;
pub mod dispatch;
pub mod errno;
pub mod exit;
pub mod rows;
pub mod run_page;
pub mod stats_file;
pub mod uapi;
pub mod user;

pub use errno::Errno;
