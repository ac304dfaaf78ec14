//! VMLAUNCH and VMRESUME, up to the point where L2 runs or the entry has failed.

use x86::vmcs::{EntryControls, Group, Groups, InstructionError, field};

use super::{Cpu, Level, Machine};
use crate::checks::{self, Limits};
use crate::outcome::EntryFailure;
use crate::{Fail, GuestMemory, priority};

/// The two instructions that enter L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryBy {
    /// VMLAUNCH wants a VMCS that is clear, which becomes a launched one when the entry succeeds.
    Vmlaunch,
    /// VMRESUME wants a launched one.
    Vmresume,
}

/// An entry whose controls and host state are good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingEntry {
    /// The instruction that enters.
    pub by: EntryBy,
}

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entered {
    /// Nothing was done: these groups are to be composed or checked, and the VMCS12 does not have what L2 left of
    /// them. They have to be fetched ([`Machine::fetch`]) before the entry goes on.
    Fetch(Groups),
    /// L2 can run once the hardware's VMCS is composed from these groups.
    L2(Groups),
    /// L1 sees an exit: [`crate::leave::entry_failed`].
    Failed(EntryFailure),
}

impl Machine {
    pub(super) fn enter(
        &mut self,
        by: EntryBy,
        cpu: &Cpu,
        limits: &Limits,
        memory: &impl GuestMemory,
    ) -> Result<PendingEntry, Fail> {
        // What fails from here on has no launch state that would have to be taken back.
        self.launching = false;
        // A shadow VMCS cannot be entered (SDM vol. 3C §25.10).
        if (self.current.is_none() || self.vmcs12.is_shadow()) && !self.is_enlightened() {
            return Err(Fail::Invalid);
        }
        // The order is the manual's: current VMCS, MOV SS, launch state, controls, host state (§27.1). Stock KVM has it so.
        if cpu.blocked_by_mov_ss {
            return Err(Fail::Valid(InstructionError::EntryBlockedByMovSs));
        }
        match (by, self.vmcs12.is_launched()) {
            (EntryBy::Vmlaunch, true) => {
                return Err(Fail::Valid(InstructionError::VmlaunchNotClear));
            }
            (EntryBy::Vmresume, false) => {
                return Err(Fail::Valid(InstructionError::VmresumeNotLaunched));
            }
            (EntryBy::Vmlaunch, false) | (EntryBy::Vmresume, true) => {}
        }
        // Controls before the host state: the first that fails names the error, 7 or 8.
        self.check_controls(limits, memory)
            .map_err(|_| Fail::Valid(InstructionError::InvalidControls))?;
        self.check_host(limits).map_err(|_| Fail::Valid(InstructionError::InvalidHostState))?;
        // Up to here nothing has changed: what fails before is VMfail, what fails behind is an exit.
        Ok(PendingEntry { by })
    }

    /// Checks the control fields that L1 has changed since they were checked last.
    fn check_controls(
        &self,
        limits: &Limits,
        memory: &impl GuestMemory,
    ) -> Result<(), checks::controls::Broken> {
        // A hypervisor changes two fields or three between two entries: what was good and is the same is still good.
        let changed = self.unchecked.meets(CONTROLS);
        if changed {
            self.check_all_controls(limits)?;
        } else if self.unchecked.has(Group::Injection) {
            // The injection is new at many entries, and asks for no other field but CR0 and the secondary controls.
            checks::controls::check_injection(&self.vmcs12, &self.capabilities)?;
        }
        // L1's memory is looked at each time: it changes without VMWRITE.
        priority::check(&self.vmcs12, changed, memory)
    }

    #[cold]
    #[inline(never)]
    fn check_all_controls(&self, limits: &Limits) -> Result<(), checks::controls::Broken> {
        // Without them there is nothing to be taken away, and no copy of the capabilities is made.
        if self.may_be_enlightened() {
            return checks::controls::check(&self.vmcs12, &self.checked_by(), limits);
        }
        checks::controls::check(&self.vmcs12, &self.capabilities, limits)
    }

    /// Checks the host-state fields if L1 has changed one since, and that they fit the mode of L1.
    fn check_host(&self, limits: &Limits) -> Result<(), checks::host::Broken> {
        // Controls too: they say which host fields are loaded.
        let host = Groups::of(Group::Host).union(Groups::of(Group::Controls));
        if self.unchecked.meets(host) {
            checks::host::check(&self.vmcs12, &self.capabilities, limits)
        } else {
            checks::host::address_space(&self.vmcs12, limits)
        }
    }

    /// Whether all of the guest's state has to be checked again. L2 itself cannot bring it out of order.
    pub(super) fn checks_whole_guest(&self) -> bool {
        // RFLAGS.VM decides which rules segments have, and L2 changes it without an exit.
        let vm86 = self.vmcs12.get(field::GUEST_RFLAGS) & x86::Rflags::VM.bits() != 0;
        self.unchecked.meets(GUEST) || vm86 != self.vm86 || self.may_load_pdptes()
    }

    /// Whether L2's PDPTEs may come from a table in L1's memory. Every entry loads them (SDM vol. 3C §27.3.2.4), and L1
    /// changes them with neither VMWRITE nor a clean field. Whether L2 is in PAE paging is not looked at: its control
    /// registers may not be fetched yet.
    fn may_load_pdptes(&self) -> bool {
        !self.vmcs12.entry().contains(EntryControls::IA32E_GUEST) && !self.vmcs12.has_ept()
    }

    /// The second half of an entry: the guest's state is checked, and L2 is what runs from here on. MSRs are
    /// loaded by the caller, step by step ([`crate::leave::host::entry_loads`]).
    pub fn finish_entry(&mut self, limits: &Limits, memory: &impl GuestMemory) -> Entered {
        // Composing or checking what VMCS12 does not have would be done on values of before L2 ran.
        if self.dirty.meets(self.behind) {
            return Entered::Fetch(self.behind);
        }
        // The whole capabilities, with an enlightened VMCS too: the guest's rules ask for none that such a VMCS lacks.
        let (v, c) = (&self.vmcs12, &self.capabilities);
        let checked = if self.checks_whole_guest() {
            // By the words they are composed or not: where one has changed the fields may hold those of another mode, or
            // those that an L2 without EPT had by its CR3.
            if self.dirty.has(Group::Controls) && checks::guest::is_pae(v) {
                self.dirty.add(Group::ControlRegisters);
            }
            checks::guest::check(v, c, limits, self.current, memory)
        } else {
            checks::guest::check_flow(v, c, limits)
                .and_then(|()| checks::guest::link(v, limits, self.current, memory))
                .map(|()| None)
        };
        match checked {
            // Nothing has changed but VMCS12: vmcs01 is still what runs.
            Err(broken) => return Entered::Failed(broken.exit()),
            // What was checked is what L2 runs with, whatever the table holds now.
            Ok(Some([first, second, third, fourth])) => {
                self.vmcs12.set(field::GUEST_PDPTE0, first);
                self.vmcs12.set(field::GUEST_PDPTE1, second);
                self.vmcs12.set(field::GUEST_PDPTE2, third);
                self.vmcs12.set(field::GUEST_PDPTE3, fourth);
                self.dirty.add(Group::ControlRegisters);
            }
            Ok(None) => {}
        }
        // Behind the checks: the link pointer is good, and its region is read once.
        self.load_shadow(memory);
        self.level = Level::L2;
        // Until the hardware has entered L2 no event ends its run: see [`crate::events`].
        self.run_pending = true;
        Entered::L2(self.dirty)
    }

    /// The entry could not be finished for want of L1's memory: the instruction will be executed again. L1 runs.
    pub fn withdraw_entry(&mut self) {
        // Checks and composition are made again by the instruction that comes: nothing of them is kept.
        self.level = Level::L1;
        self.run_pending = false;
    }

    /// L2's MSRs are loaded and the hardware's VMCS holds what the VMCS12 says: the entry has succeeded.
    pub fn entered(&mut self, entry: PendingEntry) {
        // Only now: a VMLAUNCH that fails leaves the VMCS clear.
        self.launching = entry.by == EntryBy::Vmlaunch;
        if self.launching {
            self.vmcs12.set_launched(true);
        }
        // vmcs02 is VMCS12's from here on; what L1 changes behind is added anew.
        self.dirty = Groups::NONE;
        self.unchecked = Groups::NONE;
        // Until L2 has run vmcs02 still has what was not fetched: an entry that fails gives it back.
        self.entered_behind = core::mem::replace(&mut self.behind, Groups::NONE);
    }
}

const fn groups<const N: usize>(list: [Group; N]) -> Groups {
    let (mut set, mut i) = (Groups::NONE, 0);
    while i < N {
        set.add(list[i]);
        i += 1;
    }
    set
}

/// Groups that the checks of control fields look at, but for the injection.
// Injection and flow are looked at on their own, at each entry.
const CONTROLS: Groups = groups([
    Group::Controls,
    Group::Bitmaps,
    Group::Translation,
    Group::Time,
    Group::Apic,
    Group::MsrLists,
]);

/// Groups that the checks of the guest's state look at, but for its flow and the injection.
// Controls and translation decide which rules hold; the bitmaps have the link pointer.
const GUEST: Groups = groups([
    Group::Controls,
    Group::Bitmaps,
    Group::Translation,
    Group::Segments,
    Group::ControlRegisters,
    Group::Sysenter,
    Group::Msrs,
]);
