//! Between L2 and L1: what an exit leaves in the hardware's VMCS, and when it has to be fetched.

use x86::vmcs::place;
use x86::vmcs::{EntryControls, Group, Groups, ProcControls2, Shadow, event, field};

use super::{Instruction, Level, Machine, Place};
use crate::checks::guest::activity_state;
use crate::leave::{self, Exit, Known, Report};
use crate::{EntryFailure, GuestMemory};

/// Groups whose fields are in the hardware's VMCS as L1 is to read them.
const PLAIN: Groups = Groups::of(Group::Segments).union(Groups::of(Group::Sysenter));

const CR3: u64 = field::GUEST_CR3.encoding() as u64;

impl Machine {
    /// L2 runs: a state was restored.
    pub(crate) fn enter_l2(&mut self) {
        self.level = Level::L2;
    }

    /// L2 exits to L1: saves the hot part of its state and the report.
    pub fn leave(
        &mut self,
        exit: &impl Exit,
        report: &Report,
        known: &Known,
        memory: &impl GuestMemory,
    ) {
        // VMCS12 first: what is written into L1's memory below comes out of it.
        let rights = !self.mirror.leaves_ss_rights();
        let differ = leave::save(&mut self.vmcs12, exit, report, known, (self.l1_efer, rights));
        self.touch(differ);
        // They differ where L2 has changed its mode, which an EFER that was not saved may not say.
        self.unchecked = self.unchecked.union(differ.common(Groups::of(Group::ControlRegisters)));
        self.mirror.due = true;
        // All of REST, whether or not L2 has changed it: to find out would be the VMREADs that are to be spared.
        self.behind = leave::REST;
        self.alone = None;
        if self.owes != 0 {
            self.pay(exit, known, memory);
        }
        self.entered_behind = Groups::NONE;
        // For the next entry: whether its checks may rely on those of before.
        self.vm86 = self.vmcs12.get(field::GUEST_RFLAGS) & x86::Rflags::VM.bits() != 0;
        self.level = Level::L1;
        self.run_pending = false;
        self.launching = false;
        // A pending event of L2's is of the run that is over.
        self.forget_pending();
    }

    /// L2's run has ended: what of L1's memory goes by it is written.
    #[cold]
    fn pay(&mut self, exit: &impl Exit, known: &Known, memory: &impl GuestMemory) {
        self.store_shadow(memory);
        if self.is_enlightened() {
            // L1 reads all of it in the page.
            leave::save_rest(&mut self.vmcs12, exit, known, leave::REST);
            self.store_left(memory);
        }
    }

    /// L1 is owed no exit of L2's, and L2 no interrupt, once L2 runs no more.
    pub(super) fn forget_pending(&mut self) {
        self.trap_pending = false;
        self.fall_pending = false;
        self.interrupt_pending = false;
    }

    /// Saves all of L2's state while L2 runs, for KVM_GET_NESTED_STATE. The hardware's VMCS stays what counts.
    pub fn save_running(&mut self, exit: &impl Exit, known: &Known) {
        let mode = Groups::of(Group::ControlRegisters);
        let differ = leave::save_state(&mut self.vmcs12, exit, known, self.l1_efer).common(mode);
        // As by an exit: the one that comes finds the mode in VMCS12 already.
        self.touch(differ);
        self.unchecked = self.unchecked.union(differ);
        leave::save_rest(&mut self.vmcs12, exit, known, leave::REST);
    }

    /// An SMI: VMX operation is put aside until RSM (SDM vol. 3C §32.14.1). L2's state has been saved before;
    /// L1 sees no exit.
    pub fn put_aside(&mut self) {
        // `save_running` has saved all: nothing is behind that RSM would have to fetch.
        self.entered_behind = Groups::NONE;
        self.smm.guest_mode = self.level == Level::L2;
        self.smm.vmxon = self.vmxon.is_some();
        self.level = Level::L1;
        // RSM composes vmcs02 from scratch: SMM may have changed anything of L1's meanwhile.
        self.touch_all();
    }

    /// RSM: VMX operation goes on. Tells whether L2 does, with the state that was saved.
    pub fn take_back(&mut self) -> bool {
        let resumes = self.smm.guest_mode;
        // Taken whole: flags of a mode that is left would refuse VMXON.
        self.smm = super::Smm::default();
        if resumes {
            self.level = Level::L2;
        }
        resumes
    }

    /// An entry has failed behind the point of no return: L1 sees an exit, L2 has not run.
    pub fn fail_entry(&mut self, failure: EntryFailure) {
        // A VMLAUNCH that fails leaves the VMCS clear, whoever found out.
        if core::mem::take(&mut self.launching) {
            // The hardware has found what the checks here had not.
            self.vmcs12.set_launched(false);
        }
        leave::entry_failed(&mut self.vmcs12, failure);
        // L2 has not run: what VMCS12 lacked it lacks still, and the hardware's VMCS has it.
        let lacked = core::mem::replace(&mut self.entered_behind, Groups::NONE);
        self.behind = self.behind.union(lacked);
        self.alone = None;
        self.mirror.due = true;
        self.level = Level::L1;
        self.run_pending = false;
        self.forget_pending();
        // The hardware's VMCS may be half composed.
        self.touch_whole();
    }

    /// Groups that the VMCS12 does not have yet since an exit. All of them are fetched before the state is
    /// saved or the hardware's VMCS is given up.
    #[inline]
    pub fn behind(&self) -> Groups {
        self.behind
    }

    /// Groups that have to be fetched ([`Self::fetch`]) before an instruction is executed.
    #[inline]
    pub fn needs(&self, instruction: &Instruction) -> Groups {
        // Nearly always: a hypervisor that asked once has all of it.
        if self.behind.is_empty() {
            return Groups::NONE;
        }
        match *instruction {
            Instruction::Vmread { field, .. } if self.is_alone(field) => Groups::NONE,
            Instruction::Vmread { field, .. } => self.behind_field(field, Shadow::Read),
            Instruction::Vmwrite { field, from: Place::Register(_), value }
                if self.is_alone(field) && self.holds(field, value) =>
            {
                Groups::NONE
            }
            Instruction::Vmwrite { field, .. } => self.behind_field(field, Shadow::ReadWrite),
            Instruction::Vmlaunch | Instruction::Vmresume => self.behind_entry(),
            // These write the VMCS into L1's memory, or make another the current one.
            Instruction::Vmclear { .. } | Instruction::Vmptrld { .. } | Instruction::Vmxoff => {
                self.behind
            }
            Instruction::Vmxon { .. }
            | Instruction::Vmptrst { .. }
            | Instruction::Invept { .. }
            | Instruction::Invvpid { .. } => Groups::NONE,
        }
    }

    /// The field that an instruction asks for, if it can be fetched by itself ([`Self::put_alone`]) and not with its group: the
    /// first since the exit, in a group whose fields the hardware has as L1 is to read them. `needs` is [`Self::needs`] of it.
    pub fn asks_one(&self, instruction: &Instruction, needs: Groups) -> Option<u16> {
        // An L1 that asks for a second one emulates, and will ask for more.
        if self.alone.is_some() || needs.is_empty() {
            return None;
        }
        // VMWRITE has a value of its own, mostly another: that takes the group.
        let Instruction::Vmread { field, .. } = *instruction else { return None };
        // CR0 and CR4 are put together of several.
        let is_plain = needs.without(PLAIN).is_empty() || field == CR3;
        u16::try_from(field).ok().filter(|_| is_plain)
    }

    /// Takes the field that [`Self::asks_one`] named, as the hardware's VMCS has it. Its group stays behind, so that the
    /// instruction may need it all the same: a VMWRITE of another value does.
    pub fn put_alone(&mut self, encoding: u16, value: u64) {
        if let Some(named) = place::find(encoding.into()) {
            self.vmcs12.put(named, value);
            self.alone = Some(encoding);
        }
    }

    fn is_alone(&self, field: u64) -> bool {
        self.alone.is_some_and(|alone| u64::from(alone) == field)
    }

    /// Whether a field has this value already, however much of it the mode writes.
    fn holds(&self, field: u64, value: u64) -> bool {
        // Of 32-bit code the lower half counts, and what this instruction's code is is not known here.
        let same = |value| place::find(field).is_some_and(|named| self.vmcs12.read(named) == value);
        same(value) && same(u64::from(value as u32))
    }

    /// What a shadow VMCS serves an exit has saved already, or only L1 changes.
    fn behind_field(&self, encoding: u64, served: Shadow) -> Groups {
        // An encoding that is none fetches nothing: the instruction fails by itself. Of the register the lower half is looked at: outside
        // of 64-bit mode it is all that counts, and within it the upper half only makes the instruction fail.
        let Some(named) = place::find(u64::from(encoding as u32)) else { return Groups::NONE };
        let group = Groups::of(named.place.group);
        let hot = match (named.place.shadow, served) {
            (Shadow::ReadWrite, _) | (Shadow::Read, Shadow::Read) => true,
            (Shadow::No, _) | (Shadow::Read, Shadow::No | Shadow::ReadWrite) => false,
        };
        // But for what L1 did not read of late.
        let hot = hot && !self.mirror.leaves(named);
        if hot || !self.behind.meets(group) { Groups::NONE } else { group }
    }

    /// Groups that have to be fetched before an entry.
    #[inline]
    pub fn needs_to_enter(&self) -> Groups {
        if self.behind.is_empty() { Groups::NONE } else { self.behind_entry() }
    }

    fn behind_entry(&self) -> Groups {
        let information = self.vmcs12.get(field::ENTRY_INTERRUPTION);
        // Whether an exception pushes an error code is a matter of CR0.PE.
        let by_mode = information & event::VALID != 0
            && information & event::TYPE == event::EXCEPTION
            && self.vmcs12.secondary().contains(ProcControls2::UNRESTRICTED_GUEST);
        // Checks and composition look at whole groups: one that is behind would be looked at as it was before L2 ran.
        if self.checks_whole_guest()
            || by_mode
            || self.asks_control_registers()
            || self.asks_ss_rights()
            || self.dirty.meets(self.behind)
        {
            return self.behind;
        }
        Groups::NONE
    }

    /// Whether what an entry always looks at depends on CR0, which L2 may have changed itself: virtual-8086 mode
    /// needs CR0.PE, and an EFER that the entry does not load follows CR0.PG.
    fn asks_control_registers(&self) -> bool {
        let entry = self.vmcs12.entry();
        let vm86 = self.vmcs12.get(field::GUEST_RFLAGS) & x86::Rflags::VM.bits() != 0;
        let efer_is_told = entry.intersects(EntryControls::LOAD_EFER | EntryControls::IA32E_GUEST);
        vm86 || !efer_is_told && self.dirty.has(Group::Msrs)
    }

    /// Whether an entry looks at the rights of SS, which the exit before may have left: HLT is an instruction of CPL 0.
    fn asks_ss_rights(&self) -> bool {
        self.mirror.leaves_ss_rights()
            && self.vmcs12.get(field::GUEST_ACTIVITY) == activity_state::HLT
    }

    /// Fetches groups from the hardware's VMCS in which an exit has left them.
    pub fn fetch(&mut self, exit: &impl Exit, known: &Known, groups: Groups) {
        leave::save_rest(&mut self.vmcs12, exit, known, groups);
        // Only these: what is fetched is written by L1 from now on, and must not be fetched again.
        self.behind = self.behind.without(groups);
    }
}
