//! Descriptors and page tables of a 64-bit guest, where this machine has them.

pub use guest_machine::long_mode::{CR0, CR4, EFER};
use guest_machine::long_mode::{Tables, special_registers};
use guest_machine::memory::NoMemory;
use guest_machine::{descriptors, page_tables};
use kvm_bindings::kvm_sregs;

use super::handlers;
use super::layout::{GDT, HANDLERS, IDT, ROOT, SMALL_TABLE, TSS};
use super::memory::{Memory, PAGE};
use crate::outcome::{Outcome, Trouble};

/// Writes GDT (whose last two entries are user mode's, 0x33 and 0x3b), TSS, IDT, the handlers, and page tables that map the first 4 GiB one to one.
pub fn write(memory: &Memory) -> Outcome {
    let tables = || {
        descriptors::write_gdt(memory, GDT, TSS)?;
        descriptors::write_idt(memory, IDT, handlers::entry)?;
        page_tables::write_identity_map(memory, ROOT, page_tables::TABLE_FOR_USERS)
    };
    tables().map_err(|error: NoMemory| Trouble::Failed(error.to_string()))?;
    // The stack of privilege level 0 grows down from the task state segment's page.
    memory.write_bytes(TSS + 4, &(TSS + PAGE).to_le_bytes());
    // No map of permitted ports: it would begin behind the segment's limit.
    memory.write_bytes(TSS + 0x66, &0x68_u16.to_le_bytes());
    memory.write_bytes(HANDLERS, handlers::code());
    Ok(())
}

/// Maps the first 2 MiB by 4 KiB pages instead, so that a test can change one of them.
pub fn split_first_large_page(memory: &Memory) {
    for index in 0..512 {
        memory.write(SMALL_TABLE + index * 8, (index * PAGE) | page_tables::SMALL_PAGE);
    }
    memory.write(ROOT + 2 * PAGE, SMALL_TABLE | page_tables::TABLE_FOR_USERS);
}

/// The entry of a 4 KiB page in the first 2 MiB, after [`split_first_large_page`].
pub fn small_entry(gva: u64) -> u64 {
    SMALL_TABLE + gva / PAGE * 8
}

/// The special registers of 64-bit mode over these tables.
pub fn long_mode(sregs: kvm_sregs) -> kvm_sregs {
    let tables = Tables { root: ROOT, gdt: GDT, idt: Some(IDT), task: TSS };
    special_registers(sregs, tables, EFER)
}
