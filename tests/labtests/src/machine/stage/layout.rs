//! Where things lie in a stage's memory. All of it is mapped one to one for the kernel.

use crate::machine::memory::PAGE;

/// The guest's memory.
pub const MEMORY_BYTES: u64 = 16 << 20;
/// One task state segment per vCPU, in one page.
pub const TSS: u64 = 0x3000;
/// Bytes from one task state segment to the next.
pub const TSS_BYTES: u64 = 0x80;
/// The top of each vCPU's stack holds the address of its operations.
pub const STACK_TOPS: u64 = 0x1_cff0;
/// What user mode executes.
pub const USER_TEXT: u64 = 0x3_0000;
/// The top of user mode's stack.
#[cfg(test)]
pub const USER_STACK: u64 = 0x3_1ff0;
/// The operations of the first vCPU, and [`LIST_BYTES`] on those of the second.
pub const OPERATIONS: u64 = 0x4_0000;
/// Bytes of one vCPU's operations.
pub const LIST_BYTES: u64 = 0x4_0000;
/// What a shootdown's handler flushes; behind it what it answers, and what it is to answer.
pub const SHOOTDOWN: u64 = 0xe100;
/// From here on page tables are taken, up to [`FRAMES`].
pub const TABLES: u64 = 0x20_0000;
/// From here on data frames are taken, up to the end.
pub const FRAMES: u64 = 0x80_0000;

/// The top of a vCPU's stack.
pub fn stack_top(vcpu: usize) -> u64 {
    STACK_TOPS + vcpu as u64 * PAGE
}

/// Where a vCPU's operations begin.
pub fn list(vcpu: usize) -> u64 {
    OPERATIONS + vcpu as u64 * LIST_BYTES
}
