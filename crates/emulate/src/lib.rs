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
mod cause;
mod decode;
mod decode_cache;
mod descriptor;
mod exchange;
mod execute;
mod flow;
mod length;
mod machine;
mod operand;
mod privilege;
mod stack;
mod string;
mod system;
mod task;
mod translation;

pub use cause::Cause;
pub use decode::{CodeSize, DecodeError, Decoded, Extend, RegRef, SimpleMmio, decode, warm_up};
pub use decode_cache::{DecodeCache, Fetched};
pub use execute::{Completion, Outcome, deliver, emulate, interpret};
pub use flow::Outside;
pub use length::{SystemMove, common_length, common_system_move, length, system_move};
pub use machine::{Access, Machine, SegReg, Segment, Stop, Table};
pub use privilege::PortAccess;
pub use string::{ITERATIONS_PER_CALL, STRING_RUN_BYTES};
pub use task::{Source, Switched, TaskSwitch, switch_task};
pub use translation::{Invlpg, invlpg};

/// The RFLAGS bits that the emulator reads or writes (SDM vol. 1 §3.4.3).
pub mod rflags {
    /// Carry.
    pub const CF: u64 = 1 << 0;
    /// Parity of the low byte.
    pub const PF: u64 = 1 << 2;
    /// Carry out of bit 3.
    pub const AF: u64 = 1 << 4;
    /// Zero.
    pub const ZF: u64 = 1 << 6;
    /// Sign.
    pub const SF: u64 = 1 << 7;
    /// Trap after each instruction.
    pub const TF: u64 = 1 << 8;
    /// Direction of string instructions.
    pub const DF: u64 = 1 << 10;
    /// Signed overflow.
    pub const OF: u64 = 1 << 11;
    /// Resume flag: cleared when an instruction completes.
    pub const RF: u64 = 1 << 16;
    /// Virtual-8086 mode.
    pub const VM: u64 = 1 << 17;
    /// Alignment check.
    pub const AC: u64 = 1 << 18;
    /// The six status flags.
    pub const STATUS: u64 = CF | PF | AF | ZF | SF | OF;
}
