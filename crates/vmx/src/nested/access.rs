//! A VMCS and L1's memory in the form in which the pure rules ask for them.

use core::{cell::Cell, sync::atomic::AtomicU64};

use backend::{L1Memory, Reach};
use cpu::Cpu;
use nested_vmx::machine::Stop;
use nested_vmx::{GuestMemory, Outside, leave, machine, merge};
use x86::vmcs::ReadWrite;
use x86::vmcs::field::{Field, Width};
use x86::{Direction, Exception, Gpa};

use crate::{fields, vmcs::Vmcs};

/// A VMCS, loaded or not.
pub(crate) struct Block<'a, C> {
    pub(crate) cpu: &'a C,
    pub(crate) vmcs: &'a Vmcs,
}

impl<C: Cpu> merge::Fields for Block<'_, C> {
    /// What the cache has no place for is written once, with the constants: no lists of MSRs, no link, the
    /// VMCS's own map of MSRs. The preemption timer is set by whoever watches a deadline.
    #[inline(always)]
    fn set<W: Width>(&mut self, field: Field<W, ReadWrite>, value: W::Value) {
        // Slots are looked up by constants: nothing of it is left in the code.
        if let Some(slot) = fields::slot(field) {
            self.vmcs.set(self.cpu, slot, value);
        }
    }
}

/// A VMCS to which a field is written whatever it has.
pub(crate) struct Blind<'a, C>(pub(crate) Block<'a, C>);

impl<C: Cpu> merge::Fields for Blind<'_, C> {
    fn set<W: Width>(&mut self, field: Field<W, ReadWrite>, value: W::Value) {
        if let Some(slot) = fields::slot(field) {
            // With `nested_dirty_tracking=0` alone: the cost of not knowing.
            self.0.vmcs.set_again(self.0.cpu, slot, value);
        }
    }
}

impl<C: Cpu> leave::Exit for Block<'_, C> {
    #[inline(always)]
    fn get<W: Width, A>(&self, field: Field<W, A>) -> W::Value {
        match fields::slot(field) {
            Some(slot) => self.vmcs.get(self.cpu, slot),
            // Fields that nobody asks for twice have no place: they are read each time.
            None => W::from_raw(self.read(field.encoding())),
        }
    }

    #[inline(always)]
    fn get_rarely<W: Width, A>(&self, field: Field<W, A>) -> W::Value {
        match fields::slot(field) {
            Some(slot) => self.vmcs.get_rarely(self.cpu, slot),
            None => self.get(field),
        }
    }
}

impl<C: Cpu> Block<'_, C> {
    #[cold]
    #[inline(never)]
    fn read(&self, encoding: u32) -> u64 {
        // In the loop the VMCS is current; outside it may be on another CPU.
        if self.vmcs.is_loaded() {
            self.cpu.vmread(encoding)
        } else {
            self.vmcs.read_outside(self.cpu, encoding)
        }
    }
}

/// L1's memory, and whether something of it was missing that can be had elsewhere.
pub(crate) struct Memory<'a, M> {
    memory: &'a M,
    missed: Cell<bool>,
}

impl<'a, M: L1Memory> Memory<'a, M> {
    pub(crate) fn new(memory: &'a M) -> Self {
        Self { memory, missed: Cell::new(false) }
    }

    /// Whether what was done has to be done again outside the loop: a page could not be had here. Nothing may
    /// be kept of it then.
    pub(crate) fn has_missed(&self) -> bool {
        // The rules ask by one call for many words, and may go on behind one that is missing: whoever called looks
        // here.
        self.missed.get()
    }

    /// Whether all of L1's memory can be had here.
    pub(crate) fn is_whole(&self) -> bool {
        self.memory.is_final()
    }

    pub(crate) fn miss(&self) -> Outside {
        // Outside, what is not there is nowhere: that is an answer, and not a reason to try again.
        // Once set, it stays: the rules may have gone on behind what was missing.
        self.missed.set(self.missed.get() | !self.memory.is_final());
        Outside
    }

    /// The page at `at`, to be read in place; `None`: by copies alone.
    #[inline]
    pub(crate) fn page(&self, at: Gpa) -> Option<&[AtomicU64; 512]> {
        self.memory.page(at, Direction::Read)
    }

    /// Does something to the bytes at a linear address, page by page.
    fn each_page(
        &self,
        at: u64,
        length: usize,
        direction: Direction,
        mut each: impl FnMut(Gpa, usize, usize) -> Result<(), backend::Outside>,
    ) -> Result<(), Stop> {
        let mut done = 0;
        while done < length {
            let here = at.wrapping_add(done as u64);
            // Two pages that lie side by side for L1 may lie anywhere.
            let part = (4096 - (here & 0xfff) as usize).min(length.wrapping_sub(done));
            // Translated at each page, with the rights of whoever executes: the second may fault where the first did not.
            let gpa = self.memory.translate(here, direction).map_err(|reach| match reach {
                Reach::Fault(exception) => Stop::Fault(exception),
                Reach::Outside => {
                    // Told as missing: outside the page is brought in, or is known to be nowhere.
                    self.miss();
                    Stop::Outside
                }
            })?;
            each(gpa, done, part).map_err(|_| {
                self.miss();
                Stop::Outside
            })?;
            done = done.wrapping_add(part);
        }
        Ok(())
    }
}

impl<M: L1Memory> GuestMemory for Memory<'_, M> {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        self.memory.read(at, into).map_err(|_| self.miss())
    }

    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        self.memory.write(at, from).map_err(|_| self.miss())
    }

    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside> {
        self.memory.exchange(at, old, new).map_err(|_| self.miss())
    }
}

impl<M: L1Memory> machine::L1 for Memory<'_, M> {
    fn read_linear(&mut self, at: u64, into: &mut [u8]) -> Result<(), Stop> {
        self.each_page(at, into.len(), Direction::Read, |gpa, from, length| {
            let end = from.wrapping_add(length);
            self.memory.read(gpa, into.get_mut(from..end).unwrap_or_default())
        })
    }

    fn write_linear(&mut self, at: u64, bytes: &[u8]) -> Result<(), Stop> {
        self.each_page(at, bytes.len(), Direction::Write, |gpa, from, length| {
            let end = from.wrapping_add(length);
            self.memory.write(gpa, bytes.get(from..end).unwrap_or_default())
        })
    }
}

/// What a page fault tells in the exit qualification, a debug exception too.
pub(crate) fn qualification(exception: &Exception) -> u64 {
    // #PF has its address there, #DB its bits; all other exceptions have 0.
    exception.payload.unwrap_or(0)
}
