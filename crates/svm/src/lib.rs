//! The SVM backend: control block, permission maps, ASIDs, world switch, exit decoding.
//!
//! APM vol. 2 chapter 15. `unsafe` lives in [`block`] alone, where the VMCB is a page that
//! hardware shares, and in [`percpu::tear_down`].
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;

pub mod block;
mod branches;
mod clock;
mod controls;
mod enter;
pub mod exits;
pub mod features;
mod guest_regs;
pub mod host_state;
pub mod inject;
mod l2;
mod live;
mod msrs;
mod nested;
mod paging;
pub mod percpu;
pub mod permission;
mod registers;
pub mod state;

pub use block::ControlBlock;
pub use features::{Features, Unusable};
pub use host_state::HostState;
pub use percpu::rescue_host;
pub use state::Svm;
