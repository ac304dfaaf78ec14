//! The functions of `linux/glue/` on the standard library: same names, same contracts.
//!
//! Calls that could sleep panic when made with interrupts off or a spinning lock held, so that a
//! plain test finds what lockdep would.
#![allow(clippy::missing_safety_doc, reason = "the contracts are those of sys::kernel")]

mod cpu;
mod debug;
mod eventfd;
mod facts;
mod file;
mod fpu;
mod frames;
mod lock;
mod memory;
pub(crate) mod order;
mod task;
mod thread;
mod timer;

pub(crate) use cpu::*;
pub(crate) use debug::*;
pub(crate) use eventfd::*;
pub(crate) use facts::*;
pub(crate) use file::*;
pub(crate) use fpu::*;
pub(crate) use frames::*;
pub(crate) use lock::*;
pub(crate) use memory::*;
pub(crate) use task::*;
pub(crate) use thread::*;
pub(crate) use timer::*;
