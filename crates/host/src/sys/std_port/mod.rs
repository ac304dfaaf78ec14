//! The kernel's services on the standard library, for `cargo test`.
//!
//! Host-physical addresses are plain addresses of this process, and so is user memory. Time stands
//! still until a test advances it. Each test thread has a [`World`] of its own (clock, notifiers,
//! holes in user memory); a thread that a test spawns shares it by [`test::adopt`].

pub(crate) mod sys;
pub mod test;
mod world;

pub use world::{TEST_EPOCH_NS, World};
