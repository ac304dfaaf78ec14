//! Where things lie in the memory of a measuring guest, and how guest and VMM speak to each other.

use guest_machine::memory::PAGE;
use guest_machine::page_tables::IDENTITY_MAP_BYTES;

pub const GDT: u64 = 0x1000;
pub const IDT: u64 = 0x2000;
pub const SECOND_ROOT: u64 = 0x3000;
pub const ROOT: u64 = 0x4000;
/// The handlers of all vectors.
pub const INTERRUPTS: u64 = 0xc000;
pub const PROGRAM: u64 = 0x10000;
/// Six pages for a guest that is a hypervisor itself: its control block, what the CPU keeps of it, permission maps, another block.
pub const NESTED: u64 = 0x13000;
/// One page per vCPU. Its first 8 bytes count the interrupts taken.
pub const MAILBOXES: u64 = 0x19000;
/// One page per vCPU.
pub const STACKS: u64 = 0x1c000;
/// 8 bytes per sample, up to the end of memory.
pub const RESULTS: u64 = 0x20000;

/// Beyond all memory of the guest, below the devices: what the `page_fault` workload touches.
pub const FRESH_MEMORY: u64 = 0x4000_0000;
/// Its first pages, for the tables that a guest which is a hypervisor has for its guest: a root, a page-directory-pointer
/// table, two page directories and 512 page tables.
pub const NESTED_TABLES: u64 = (4 + 512) * PAGE;
/// Pages of which a paged workload touches some after each switch, unless it touches all.
pub const WORKING_SET: u64 = 8;
/// The most pages that a paged workload maps: what its tables' entries cover, with room for the tables.
pub const MOST_PAGES: u64 = 100_000;

/// A guest-physical address that nothing serves.
pub const NOTHING: u64 = 0xd000_0000;

/// The vector that workloads with interrupts use.
pub const VECTOR: u8 = 0x40;

/// A write to this port says that the program has ended.
pub const PORT_DONE: u16 = 0xf4;
/// A write to this port, twice before the counted pass and once after, has the module's statistics read.
pub const PORT_COUNT: u16 = 0xf7;
/// A write to this port says that the vector in AL came unasked.
pub const PORT_FAULT: u16 = 0xf5;

const _: () = assert!(ROOT + IDENTITY_MAP_BYTES <= INTERRUPTS);
const _: () = assert!(NESTED + 6 * PAGE <= MAILBOXES);

/// The mailbox of vCPU `id`.
pub fn mailbox(id: u32) -> u64 {
    MAILBOXES + u64::from(id) * PAGE
}

/// The initial stack pointer of vCPU `id`.
pub fn stack_top(id: u32) -> u64 {
    STACKS + u64::from(id) * PAGE + PAGE
}
