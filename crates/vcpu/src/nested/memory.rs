//! L1's memory, as what is done for a guest's hypervisor sees it.

use backend::{L1Memory, Outside};
use mmu::View;
use vm::memory::VmMemory;
use x86::Gpa;

/// What of L1's memory the TDP tables map now: inside the loop.
pub(super) struct Mapped<'a> {
    memory: &'a VmMemory,
    view: View<'a>,
}

impl<'a> Mapped<'a> {
    /// The memory behind `view`.
    #[inline]
    pub(super) fn new(memory: &'a VmMemory, view: View<'a>) -> Self {
        Self { memory, view }
    }
}

impl L1Memory for Mapped<'_> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        if self.memory.read_irqs_off(&self.view, at, into) { Ok(()) } else { Err(Outside) }
    }

    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        if self.memory.write_irqs_off(&self.view, at, from) { Ok(()) } else { Err(Outside) }
    }

    fn is_final(&self) -> bool {
        false
    }
}

/// All of L1's memory, by way of the VMM's mapping: outside the loop. May sleep.
pub(super) struct Whole<'a>(pub &'a VmMemory);

impl L1Memory for Whole<'_> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        self.0.read(at, into).map_err(|_| Outside)
    }

    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        self.0.write(at, from).map_err(|_| Outside)
    }

    fn is_final(&self) -> bool {
        true
    }
}
