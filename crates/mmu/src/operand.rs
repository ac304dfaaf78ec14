//! Operands of the guest's instructions with interrupts off: memory that the TDP tables map, through tables of the guest's
//! that need no mark.

use x86::Gpa;

use crate::role::PagingContext;
use crate::table::View;
use crate::tdp::page_of;
use crate::walk::{Access, GuestMemory, Swap, translate};

/// Reads what the guest's program has at linear address `va`, as a load of its does. `false`: not to be had without
/// sleeping or without writing to guest memory, or not in one page, or the load faults; `into` then holds anything.
pub fn load(view: &View<'_>, context: &PagingContext, va: u64, into: &mut [u8]) -> bool {
    let Ok(found) = translate(&Mapped(view), context, va, Access::READ) else { return false };
    let Some(page) = page_of(view, found.gpa) else { return false };
    // What runs into the next page is refused: that is another translation.
    view.copy_from(&page, found.gpa.page_offset(), into)
}

/// The view as a walk's memory. Writes are refused: an entry that was used before has its accessed bit.
struct Mapped<'a>(&'a View<'a>);

impl GuestMemory for Mapped<'_> {
    type Error = ();

    fn read_u64(&self, gpa: Gpa) -> Result<u64, ()> {
        let page = page_of(self.0, gpa).ok_or(())?;
        self.0.load_u64(&page, gpa.page_offset()).ok_or(())
    }

    fn read_u32(&self, gpa: Gpa) -> Result<u32, ()> {
        let page = page_of(self.0, gpa).ok_or(())?;
        self.0.load_u32(&page, gpa.page_offset()).ok_or(())
    }

    fn cmpxchg_u64(&self, _: Gpa, _: u64, _: u64) -> Result<Swap, ()> {
        Err(())
    }

    fn cmpxchg_u32(&self, _: Gpa, _: u32, _: u32) -> Result<Swap, ()> {
        Err(())
    }
}
