//! Instruction emulation for what the hardware hands back half done: MMIO accesses, string port
//! I/O and gaps in real mode; and instruction lengths for CPUs that do not report them.
//!
//! Decoding is a pure function of the instruction bytes ([`decode`], cached by [`DecodeCache`]);
//! execution asks everything of a vCPU through [`Machine`]. Nothing here allocates after
//! [`warm_up`].
//!
//! # The replay protocol
//! Registers, flags and RIP change only when an instruction, or one iteration of a REP string
//! instruction, is complete. When an access needs an answer from user space, [`Machine`] returns
//! [`Stop::NeedUser`], the vCPU leaves, stores the answer in its replay log, and calls [`emulate`]
//! again from the start. The same accesses are then asked for in the same order: those that the log
//! knows are answered from it (reads) or skipped (writes). The log ends at [`Machine::commit`] and
//! when [`emulate`] returns anything but `NeedUser` or `Retry`.
#![no_std]
#![forbid(unsafe_code)]

mod alu;
mod bcd;
mod cause;
mod decode;
mod descriptor;
mod exchange;
mod execute;
mod flow;
mod length;
mod machine;
mod operand;
mod port;
mod privilege;
mod register;
mod stack;
mod string;
mod system;
mod task;
mod translation;
mod x87;

pub use cause::Cause;
pub use decode::{DecodeCache, DecodeError, Decoded, Extend, Fetched, SimpleMmio, decode, warm_up};
pub use execute::{Completion, Outcome, deliver, emulate, interpret};
pub use flow::Outside;
pub use length::{SystemMove, common_length, common_system_move, length, system_move};
pub use machine::{Access, CodeSize, Machine, SegReg, Segment, Stop, Table};
pub use port::PortAccess;
pub use register::RegRef;
pub use string::{ITERATIONS_PER_CALL, STRING_RUN_BYTES};
pub use task::{Source, Switched, TaskSwitch, switch_task};
pub use translation::{Invlpg, invlpg};
