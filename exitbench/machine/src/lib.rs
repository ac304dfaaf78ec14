//! The machine that a small guest starts in, without a way through real mode: page tables, descriptors and special registers of 64-bit
//! mode, in guest memory of whatever kind. exitbench measures in it and boots Linux from it, labtests asks its questions in it.
//!
//! Nothing here speaks to `/dev/kvm`. exitbench does that by kvm-ioctls, as real monitors do; labtests by bare ioctls, wrong ones
//! among them, which is what it is there for.
#![forbid(unsafe_code)]

pub mod descriptors;
pub mod long_mode;
pub mod memory;
pub mod page_tables;
