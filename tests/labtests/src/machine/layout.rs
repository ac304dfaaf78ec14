//! Where things lie in a guest's memory, and how guest and test speak to each other. `code.rs` gives
//! the names to the guests' assembly.

/// 6 entries.
pub const GDT: u64 = 0x1000;
/// 256 gates.
pub const IDT: u64 = 0x2000;
/// The task state segment, for guests that leave privilege level 0.
pub const TSS: u64 = 0x3000;
/// The page tables: six pages from here.
pub const ROOT: u64 = 0x4000;
/// A page table with 4 KiB pages, for guests that ask for one.
pub const SMALL_TABLE: u64 = 0xa000;
/// The handlers of all vectors.
pub const HANDLERS: u64 = 0xc000;
/// What guest and test tell each other.
pub const MAILBOX: u64 = 0xe000;
/// Where the code of a test begins. A guest in real mode has it as the base of its CS.
pub const PROGRAM: u64 = 0x1_0000;
/// One page of stack per vCPU.
pub const STACKS: u64 = 0x1_c000;
/// From here on memory is free.
pub const FREE: u64 = 0x2_0000;
/// A guest's memory, if it asks for no other.
pub const MEMORY_BYTES: u64 = 0x20_0000;

/// A guest-physical address that nothing serves.
pub const NOWHERE: u64 = 0xd000_0000;

/// A write here says that the guest has ended well.
pub const PORT_DONE: u16 = 0xf4;
/// A write here says that an exception came unasked.
pub const PORT_FAULT: u16 = 0xf5;
/// A write here says that the guest has come to some point.
pub const PORT_MARK: u16 = 0xf6;

/// Where the next exception continues; 0: nowhere.
pub const RESUME: u64 = MAILBOX;
/// Exceptions so far.
pub const FAULTS: u64 = MAILBOX + 0x08;
/// The last exception's vector.
pub const VECTOR: u64 = MAILBOX + 0x10;
/// The last exception's error code, or 0.
pub const ERROR: u64 = MAILBOX + 0x18;
/// RIP in the last exception's frame.
pub const FRAME_RIP: u64 = MAILBOX + 0x20;
/// CR2 at that time.
pub const FRAME_CR2: u64 = MAILBOX + 0x28;
/// DR6 at that time, if it was #DB.
pub const FRAME_DR6: u64 = MAILBOX + 0x30;
/// How interrupts end: 0 not at all, 1 at the xAPIC, 2 at the x2APIC.
pub const EOI_MODE: u64 = MAILBOX + 0x38;
/// What the test tells the guest.
pub const ARGUMENT: u64 = MAILBOX + 0x40;
/// 1 where VMCALL is the CPU's hypercall, 0 where VMMCALL is.
pub const IS_INTEL: u64 = MAILBOX + 0x48;
/// Interrupts that were not in service.
pub const DUPLICATES: u64 = MAILBOX + 0x80;
/// 8 bytes each, for the test to look at.
pub const RESULT: u64 = MAILBOX + 0x100;
/// 8 bytes per vector: how often it came.
pub const COUNTS: u64 = MAILBOX + 0x800;
/// 8 bytes per vector: a handler of the test's own, or 0.
pub const HOOKS: u64 = MAILBOX + 0x1000;
