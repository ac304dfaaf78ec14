//! The second translation of a guest's guest: L1's NPT or EPT tables, which lead from L2's physical addresses to
//! L1's. The backend knows where they are and how a fault on them is told; who walks them is above.

use x86::vmcs::ApicAccess;
use x86::{Cr0, Cr4, Efer, Gfn, Gpa, Gva, Hpa};

use crate::{Event, Executed, Gprs, L1Memory, ability::Absent};

/// L1's tables for L2's physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L1Tables {
    /// NPT tables: nCR3, and the registers of L1's that say how they are read.
    Npt {
        /// nCR3.
        ncr3: u64,
        /// CR0 of L1.
        cr0: Cr0,
        /// CR4 of L1.
        cr4: Cr4,
        /// EFER of L1.
        efer: Efer,
    },
    /// EPT tables: the EPT pointer, which was checked, and what of EPT L1 was offered.
    Ept {
        /// The EPT pointer.
        pointer: u64,
        /// Pages of 2 MiB.
        pages_2m: bool,
        /// Pages of 1 GiB.
        pages_1g: bool,
        /// Execute-only translations.
        execute_only: bool,
        /// The frame of L1's that stands for the local APIC of L2 ([`TablesRefuse::ApicAccess`]).
        apic: Option<Gfn>,
        /// L1 has each page noted that L2 makes dirty ([`NestedPaging::log_dirty`]).
        logs: bool,
    },
    /// No tables, but a frame of L1's that stands for the local APIC of L2.
    Flat {
        /// That frame.
        apic: Gfn,
    },
}

/// A fault of L2's in the translation of its physical addresses, as the hardware tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NestedPageFault {
    /// #VMEXIT(NPF).
    Npf {
        /// EXITINFO1.
        info: u64,
        /// EXITINFO2: the address.
        gpa: u64,
    },
    /// An EPT violation.
    Violation {
        /// The exit qualification.
        qualification: u64,
        /// The guest-physical address.
        gpa: u64,
    },
}

/// What L1 hears of an access of L2's that its tables refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TablesRefuse {
    /// #VMEXIT(NPF) with this EXITINFO1.
    Npf(u64),
    /// An EPT violation.
    Violation {
        /// The exit qualification.
        qualification: u64,
        /// Where an access in software was. `None`: the exit tells it.
        linear: Option<Gva>,
    },
    /// An EPT misconfiguration.
    Misconfiguration,
    /// Nothing: the access goes to the frame that stands for L2's local APIC.
    ApicAccess {
        /// The access.
        access: ApicAccess,
        /// Bytes of the instruction; 0 where none is known, as of a delivery.
        length: u8,
    },
    /// Nothing: the access makes a page dirty, and L1's log of those is full.
    LogFull,
}

/// What L1 has flushed of L2's translations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum L1Flush {
    /// Nothing.
    #[default]
    None,
    /// All.
    All,
    /// What was made through one EPT pointer (INVEPT of a single context).
    Of(u64),
}

/// What a backend does for L1s that have tables of their own for L2. Without any: L2's physical addresses are L1's.
pub trait NestedPaging {
    /// L1's tables that L2 runs with. `None`: L1 runs, or L2 without such tables.
    fn l1_tables(&self) -> Option<L1Tables> {
        // As for an L1 without such tables: no fault and no refusal comes up then.
        None
    }

    /// Sets what the hardware walks for L2, which runs with L1's tables; flushes L2's translations if that is another
    /// root than before. `tracks`: the EPT pointer has accessed and dirty flags.
    fn set_nested_root(&mut self, _root: Hpa, _tracks: bool) {}

    /// Has the next entry forget L2's translations. L2 runs.
    fn flush_nested(&mut self) {}

    /// The fault that the last exit of L2 told, if it was one on that root.
    fn nested_page_fault(&self) -> Option<NestedPageFault> {
        None
    }

    /// Ends L2's run since L1's tables refuse an access to `at`, which is L2-physical. `undelivered`: the event in
    /// whose delivery that was.
    fn refuse(
        &mut self,
        _gprs: &mut Gprs,
        _at: Gpa,
        _why: TablesRefuse,
        _undelivered: Option<Event>,
        _l1: &impl L1Memory,
    ) -> Executed {
        Executed::Shutdown
    }

    /// Whether L1 leaves such an access to its virtual-APIC page, if it is a plain one of four bytes.
    fn serves_apic_access(&self, _access: ApicAccess) -> bool {
        false
    }

    /// Carries such an access out on that page. `store`: what is written. `next`: where L2 goes on behind the
    /// instruction. What was read.
    ///
    /// # Errors
    /// What became of L2 instead of going on behind the instruction.
    fn do_apic_access(
        &mut self,
        _gprs: &mut Gprs,
        _offset: u16,
        _store: Option<u32>,
        _next: u64,
        _l1: &impl L1Memory,
    ) -> Result<u32, Executed> {
        Err(Executed::Shutdown)
    }

    /// Notes in L1's log that L2 makes a page dirty, before its flag is set. False: the log is full. Outside alone.
    fn log_dirty(&mut self, _at: Gpa, _l1: &impl L1Memory) -> bool {
        // No log: nothing is ever full.
        true
    }

    /// Takes what L1 has flushed since this was called last.
    fn take_l1_flush(&mut self) -> L1Flush {
        L1Flush::None
    }
}

impl NestedPaging for Absent {}
