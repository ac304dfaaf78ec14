//! The handlers of exits, by what the guest did. Most have two halves: one that answers inside the inner
//! loop, and one outside of it, where a page may be missing or user space be asked.

pub(crate) mod code;
pub(crate) mod cr;
pub(crate) mod device;
pub(crate) mod emulation;
mod interpret;
mod machine;
pub(crate) mod msr_exits;
pub(crate) mod slow;
mod syscall;
pub(crate) mod table;
pub(crate) mod tables;
pub(crate) mod task;
