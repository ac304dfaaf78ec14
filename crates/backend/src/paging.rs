//! How a guest's addresses are translated.

use x86::Hpa;

use crate::ability::PageLog;

/// How a guest's addresses are translated, and what of it the run loop wants to see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Paging {
    /// The hardware walks shadow tables and not TDP ones: page faults, INVLPG and the paging
    /// registers exit.
    pub shadow: bool,
    /// Every write of CR0 and CR4 that changes how paging entries are read exits, whoever could own
    /// the registers.
    pub watch_roles: bool,
}

/// Roots of tables, and what the CPU remembers of them.
pub trait Translation {
    /// The CPU's log of written pages.
    type PageLog: PageLog;

    /// Sets how addresses are translated. Before the first entry, and before the registers are
    /// set.
    fn set_paging(&mut self, paging: Paging);
    /// Sets the root of the shadow tables.
    fn set_shadow_root(&mut self, root: Hpa);
    /// Sets the TDP root. If it is another one than before, what the CPU remembers of it
    /// is forgotten before the next entry: its tables may have changed while it was away, or belong
    /// to another VM than when the page was a root last.
    fn set_tdp_root(&mut self, root: Hpa);
    /// Forgets all translations of this guest's linear addresses before the next entry.
    fn flush_tlb(&mut self);
    /// TDP translations were withdrawn or narrowed: forgets, before the next entry, all that was
    /// made from them, guest-physical addresses as well as linear ones. Not called for what is new or
    /// wider: a CPU that finds the old state faults, and finds the new one then.
    ///
    /// It reaches this CPU alone. A vCPU that goes to another CPU than it ran on last finds there
    /// what it left behind, from before any flush since: the backend forgets that by itself.
    fn flush_tdp(&mut self);
    /// The guest reaches memory of a device of the host's from now on: entries clear what such memory leaks on CPUs where it does.
    fn reaches_device(&mut self) {}
    /// The CPU's log of written pages, where this CPU has one.
    fn page_log(&mut self) -> Option<&mut Self::PageLog>;
}
