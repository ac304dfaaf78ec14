//! The Rust half of the kernel module: the entry points that `linux/glue` calls, the heap, and the
//! end of a panic. Outside the kernel this crate is empty.
#![cfg_attr(target_os = "none", no_std)]

#[cfg(target_os = "none")]
mod chosen;
#[cfg(target_os = "none")]
mod entry;
#[cfg(target_os = "none")]
mod heap;
#[cfg(target_os = "none")]
mod machine;
#[cfg(target_os = "none")]
mod panic;
