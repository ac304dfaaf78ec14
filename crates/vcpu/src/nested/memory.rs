//! L1's memory, as what is done for a guest's hypervisor sees it.

use core::{cell::Cell, sync::atomic::AtomicU64};

use backend::{L1Memory, Outside, Reach};
use mmu::nested::walk::{LinearError, StageError, translate_linear};
use mmu::{
    L1Fault, LastPages, PagingContext, Section, Tables, View, WalkError, table::GuestPage,
    translate, walk,
};
use vm::memory::VmMemory;
use x86::{Direction, Exception, Gpa, Gva};

/// What of L1's memory the TDP tables map now: inside the loop.
pub(super) struct Mapped<'a> {
    memory: &'a VmMemory,
    view: View<'a>,
    last: &'a LastPages,
}

impl<'a> Mapped<'a> {
    /// The memory that the vCPU sees in this section.
    #[inline]
    pub(super) fn new(memory: &'a VmMemory, last: &'a LastPages, s: Section<'a>) -> Self {
        Self { memory, view: memory.view(s), last }
    }

    /// The page at `at`.
    #[inline]
    fn find(&self, at: Gpa) -> Option<GuestPage> {
        self.last.find(&self.view, at)
    }

    /// The page at `at`, for a write in the section.
    #[inline]
    fn find_to_write(&self, at: Gpa) -> Option<GuestPage> {
        // Shadow pages may be made of what is written: outside the write is told to them.
        if self.memory.has_shadow() { None } else { self.last.find_to_write(&self.view, at) }
    }
}

impl L1Memory for Mapped<'_> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        // No page, no guess: the same is done outside, where it may be waited for.
        let page = self.find(at).ok_or(Outside)?;
        // What crosses a page goes another way.
        // The page that was found is good for the whole section: what lies in the tables stays there until its end.
        let read = self.view.copy_from(&page, at.page_offset(), into)
            || self.memory.read_irqs_off(&self.view, at, into);
        if read { Ok(()) } else { Err(Outside) }
    }

    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        let page = self.find_to_write(at).ok_or(Outside)?;
        let written = self.view.copy_to(&page, at.page_offset(), from)
            || self.memory.write_irqs_off(&self.view, at, from);
        if written { Ok(()) } else { Err(Outside) }
    }

    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside> {
        // Words of the page that the tables map, and not the VMM's mapping: the exchange may not
        // fault here.
        let words = self.page(at, Direction::Write).ok_or(Outside)?;
        let word = words.get((at.0 >> 3 & 511) as usize).ok_or(Outside)?;
        let order = core::sync::atomic::Ordering::AcqRel;
        Ok(word.compare_exchange(old, new, order, core::sync::atomic::Ordering::Relaxed).is_ok())
    }

    #[inline]
    fn page(&self, at: Gpa, direction: Direction) -> Option<&[AtomicU64; 512]> {
        let page = match direction {
            Direction::Read => self.find(at)?,
            // An entry that is read-only for the dirty log has to fault, so that the page is logged.
            Direction::Write => self.find_to_write(at).filter(GuestPage::is_writable)?,
        };
        self.view.words(&page)
    }

    /// No table of the guest's is walked here.
    fn translate(&self, _: u64, _: Direction) -> Result<Gpa, Reach> {
        // A walk may meet a page that is missing, and an operand of L1's is rare.
        Err(Reach::Outside)
    }

    fn is_final(&self) -> bool {
        false
    }
}

/// All of L1's memory, by way of the VMM's mapping: outside the loop. May sleep.
pub(super) struct Whole<'a> {
    memory: &'a VmMemory,
    /// How the level that runs addresses memory, for an operand there.
    paging: Option<PagingContext>,
    /// L1's tables, which L2's addresses go through.
    tables: Option<Tables>,
    /// An address of L2's that those refuse, physical and linear.
    refused: Cell<Option<(Gpa, L1Fault, Gva)>>,
}

impl<'a> Whole<'a> {
    /// The memory, with the linear addresses of `paging`.
    pub(super) fn new(memory: &'a VmMemory, paging: Option<PagingContext>) -> Self {
        Self { memory, paging, tables: None, refused: Cell::new(None) }
    }

    /// The memory for an operand of L2's, whose addresses go through `tables` of L1's as well.
    pub(super) fn through(self, tables: Option<Tables>) -> Self {
        Self { tables, ..self }
    }

    /// The address of L2's that L1's tables refused: nothing may be kept of what was done.
    pub(super) fn refused(&self) -> Option<(Gpa, L1Fault, Gva)> {
        self.refused.get()
    }

    /// A linear address of L2's, through both translations.
    #[cold]
    fn translate_through(
        &self,
        tables: &Tables,
        paging: &PagingContext,
        linear: u64,
        access: walk::Access,
    ) -> Result<Gpa, Reach> {
        match translate_linear(self.memory, tables, paging, linear, access) {
            Ok(found) => Ok(found.gpa),
            Err(LinearError::L2(exception)) => Err(Reach::Fault(exception)),
            Err(LinearError::NonCanonical) => Err(Reach::Fault(Exception::gp(0))),
            Err(LinearError::Stage(StageError::L1 { gpa, fault })) => {
                // An error alone would be a fault of L1's: the caller looks here first.
                // Linear as well, because an exit for EPT tells both.
                self.refused.set(Some((gpa, fault, Gva(paging.linear(linear)))));
                Err(Reach::Outside)
            }
            Err(LinearError::Stage(StageError::Memory { .. })) => Err(Reach::Outside),
        }
    }
}

impl L1Memory for Whole<'_> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        self.memory.read(at, into).map_err(|_| Outside)
    }

    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        self.memory.write(at, from).map_err(|_| Outside)
    }

    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside> {
        self.memory.cmpxchg(at, 8, old, new).map_err(|_| Outside)
    }

    fn translate(&self, linear: u64, direction: Direction) -> Result<Gpa, Reach> {
        let Some(paging) = &self.paging else { return Err(Reach::Outside) };
        let access = walk::Access::from(direction);
        if let Some(tables) = &self.tables {
            return self.translate_through(tables, paging, linear, access);
        }
        // The level's own tables alone: L1 executes, and its addresses are the VM's.
        match translate(self.memory, paging, linear, access) {
            Ok(found) => Ok(found.gpa),
            Err(WalkError::Fault(exception)) => Err(Reach::Fault(exception)),
            Err(WalkError::NonCanonical) => Err(Reach::Fault(Exception::gp(0))),
            Err(WalkError::Memory { .. }) => Err(Reach::Outside),
        }
    }

    fn is_final(&self) -> bool {
        true
    }
}
