//! What the hypervisor needs of a kernel, as safe Rust: pages, locks, timers, wake-ups, user
//! memory, eventfds, clocks, files.
//!
//! The port is chosen at link time. In the kernel (`target_os = "none"`) every service is an
//! `extern "C"` function `gnt_*` of `linux/glue/`; elsewhere [`std_port`] implements the same
//! functions on the standard library, so that all floors above run in a plain `cargo test`.
#![cfg_attr(target_os = "none", no_std)]

extern crate alloc;

pub mod arc;
pub mod boxed;
pub mod clock;
pub mod debugfs;
pub mod error;
pub mod event;
pub mod file;
pub mod fpu;
pub mod gup;
pub mod hostcpu;
pub mod index;
pub mod irq;
mod lockdep;
pub mod log;
pub mod mitigation;
pub mod notifier;
pub mod once;
pub mod page;
pub mod params;
pub mod random;
pub mod smp;
pub mod srcu;
pub mod steps;
pub mod sync;
mod sys;
pub mod task;
pub mod timer;
pub mod trace;
pub mod trylock;
pub mod user;

#[cfg(not(target_os = "none"))]
pub use sys::std_port;

pub use arc::Arc;
pub use boxed::KBox;
pub use error::{BadFd, Fault, Interrupted, NoMemory};
pub use index::GuestIndex;
