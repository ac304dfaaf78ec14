//! What only some CPUs can do, as objects that are there or not.
//!
//! A backend whose CPUs never have an ability names [`Absent`] as its type and returns `None`, so that what
//! the run loop does with the object is not compiled at all. Where it depends on the CPU or the VM,
//! the object says so itself.

use x86::{
    Gpa, Vector,
    apic::{Interrupts, VectorWords},
};

/// An ability that is not there. There is no value of it, so nothing of it can be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absent {}

/// A local APIC in x2APIC mode that the hardware serves: it delivers what is requested when priorities
/// allow it, and the guest changes its task priority, ends interrupts and sends some to itself without an
/// exit.
pub trait ServedApic {
    /// Whether this CPU can serve an APIC.
    fn can_serve(&self) -> bool;
    /// Whether the hardware has the state, from [`serve`](Self::serve) to [`take_back`](Self::take_back).
    fn is_serving(&self) -> bool;
    /// Whether the hardware has nothing to do with the APIC: [`stop`](Self::stop) would change nothing.
    fn is_stopped(&self) -> bool;
    /// From the next entry on the hardware serves the APIC, beginning with `state`. An exit
    /// ([`Exit::Eoi`](crate::Exit::Eoi)) tells of the end of those of `reported`. Replaces an offer.
    fn serve(&mut self, state: &Interrupts, reported: &VectorWords);
    /// More is requested of the APIC, and what is reported may have changed.
    fn request(&mut self, vectors: &VectorWords, reported: &VectorWords);
    /// Sets what a register of the APIC shows; reads of it do not exit.
    fn show(&mut self, offset: u32, value: u32);
    /// Whether an interrupt waits that the APIC would deliver: one of its own, or `more`.
    fn interrupt_waits(&self, more: Option<Vector>) -> bool;
    /// Takes the state back. Before the next entry comes [`serve`](Self::serve) or [`stop`](Self::stop).
    fn take_back(&mut self) -> Interrupts;
    /// The hardware, of which the state was taken back or which never had it, serves the APIC no
    /// longer.
    fn stop(&mut self);
}

/// The end of the guest's run at a time ([`Exit::Deadline`](crate::Exit::Deadline)).
pub trait DeadlineWatch {
    /// Whether this CPU can end this guest's run at a time.
    fn can_watch(&self) -> bool;
    /// The guest's run ends when its TSC has reached `deadline`, or sooner; 0: at no time. Instead of an
    /// entry at a time that has passed there is the exit alone.
    fn watch(&mut self, deadline: u64);
    /// Arms the watch between [`load`](crate::WorldSwitch::load) and [`unload`](crate::WorldSwitch::unload), for a
    /// deadline that is not 0 and lies ahead of `now`, the guest's TSC. The next entry need not look at
    /// the TSC.
    fn watch_from(&mut self, deadline: u64, now: u64);
    /// Whether the time has come.
    fn is_due(&mut self) -> bool;
}

/// The CPU's log of guest-physical pages that it makes dirty in the TDP tables.
pub trait PageLog {
    /// Has the CPU log, or not. Only asked for where such tables are made (`mmu::Format::logs`).
    fn set_logging(&mut self, on: bool);
    /// Takes what was logged since the last call. Between [`load`](crate::WorldSwitch::load) and
    /// [`unload`](crate::WorldSwitch::unload), with the host's segment state.
    fn take_logged(&mut self, each: impl FnMut(Gpa));
}

/// The four PDPTEs that PAE paging goes on with, as registers. They are set wherever the architecture loads
/// them and the hardware does not.
pub trait PdpteRegisters {
    /// The four PDPTEs.
    fn entries(&self) -> [u64; 4];
    /// Sets the four PDPTEs.
    fn set_entries(&mut self, entries: [u64; 4]);
}

// Here and below no body does nothing by mistake: the empty match holds because no value exists,
// and the compiler drops the calls.
impl ServedApic for Absent {
    fn can_serve(&self) -> bool {
        match *self {}
    }
    fn is_serving(&self) -> bool {
        match *self {}
    }
    fn is_stopped(&self) -> bool {
        match *self {}
    }
    fn serve(&mut self, _: &Interrupts, _: &VectorWords) {
        match *self {}
    }
    fn request(&mut self, _: &VectorWords, _: &VectorWords) {
        match *self {}
    }
    fn show(&mut self, _: u32, _: u32) {
        match *self {}
    }
    fn interrupt_waits(&self, _: Option<Vector>) -> bool {
        match *self {}
    }
    fn take_back(&mut self) -> Interrupts {
        match *self {}
    }
    fn stop(&mut self) {
        match *self {}
    }
}

impl DeadlineWatch for Absent {
    fn can_watch(&self) -> bool {
        match *self {}
    }
    fn watch(&mut self, _: u64) {
        match *self {}
    }
    fn watch_from(&mut self, _: u64, _: u64) {
        match *self {}
    }
    fn is_due(&mut self) -> bool {
        match *self {}
    }
}

impl PageLog for Absent {
    fn set_logging(&mut self, _: bool) {
        match *self {}
    }
    fn take_logged(&mut self, _: impl FnMut(Gpa)) {
        match *self {}
    }
}

impl PdpteRegisters for Absent {
    fn entries(&self) -> [u64; 4] {
        match *self {}
    }
    fn set_entries(&mut self, _: [u64; 4]) {
        match *self {}
    }
}
