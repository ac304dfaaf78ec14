//! L1, the guest that is a hypervisor, as what is done for it sees it: its memory, and what a step of it comes to.

use core::sync::atomic::AtomicU64;

use x86::{Direction, Exception, Gpa};

/// An address is not memory of L1's, or its memory cannot be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside;

/// L1's memory, by its guest-physical addresses.
pub trait L1Memory {
    /// Reads `into.len()` bytes at `at`, each byte once.
    ///
    /// # Errors
    /// Not all of it can be had; `into` then holds anything.
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside>;
    /// Writes `from` at `at`.
    ///
    /// # Errors
    /// Not all of it can be written; any part of it may have been.
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside>;
    /// Replaces eight bytes, aligned, if they are `old`. Whether they were.
    ///
    /// # Errors
    /// They cannot be had here, or not be written.
    fn exchange(&self, _at: Gpa, _old: u64, _new: u64) -> Result<bool, Outside> {
        // Not by reading and writing: another vCPU may change the word in between.
        Err(Outside)
    }
    /// The page that begins at `at`, to be read in place, and to be written too if that is the direction. `None`: it can be had by
    /// copies alone.
    fn page(&self, _at: Gpa, _direction: Direction) -> Option<&[AtomicU64; 512]> {
        None
    }
    /// Where L1's own tables put a linear address of L1's, for an access with the rights of a program at CPL 0.
    ///
    /// # Errors
    /// The access faults, or a table cannot be had here.
    fn translate(&self, linear: u64, direction: Direction) -> Result<Gpa, Reach>;
    /// Whether what cannot be had here can nowhere be had: outside the loop.
    fn is_final(&self) -> bool;
}

/// Why a linear address has no place in L1's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The access faults.
    Fault(Exception),
    /// A table or the page cannot be had here.
    Outside,
}

/// An MSR in a list of L1's that the vCPU has and not the instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListMsr {
    /// Its index.
    pub index: u32,
    /// What is done with it.
    pub act: ListAct,
}

/// What a list does with an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListAct {
    /// It is loaded with this.
    Load(u64),
    /// It is stored here.
    Store(Gpa),
    /// It cannot be loaded.
    Fail,
}

/// What L2 does instead of running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// It has halted.
    Halt,
    /// It waits for a start-up IPI.
    WaitForSipi,
}

/// What came of an instruction of L1's, or of the end of L2's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Executed {
    /// The instruction is done; the guest goes on behind it.
    Retired,
    /// The instruction is done, and L2 goes on with other tables of L1's.
    Switched,
    /// The instruction is done, and opens L1 for what may have waited.
    Opened,
    /// The instruction is done, and closes L1 for what may have been offered.
    Closed,
    /// The instruction faults.
    Fault(Exception),
    /// L2 runs from now on.
    Entered,
    /// L2 runs from now on, and its run ends as soon as it was entered.
    EnteredOwing,
    /// L2 runs from now on, and a virtual interrupt of L1's waits for it ([`crate::Nested::take_interrupt`]).
    EnteredOffering,
    /// The instruction is done, and a virtual interrupt of L1's waits for L2.
    Offering,
    /// L2 is what the vCPU is from now on, and does not run.
    Asleep(Sleep),
    /// L1 runs from now on, behind the exit that it sees.
    Left,
    /// L1's memory cannot be had here; nothing has happened.
    Outside,
    /// L2 has made a hypercall that asks for a flush of translations, which is not L1's but the vCPU's to carry out; nothing
    /// has happened.
    Flushes,
    /// A page that the entry names is no memory, which the VMM has to know; nothing has happened.
    NoPage,
    /// L1 cannot go on: where it wants to hear of L2's exit is no memory.
    Shutdown,
}
