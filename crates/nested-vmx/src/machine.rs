//! L1's VMX state and the instructions that change it, in the order of the manual's pseudo-code
//! (SDM vol. 3C §31.3).

mod access;
mod composed;
pub mod enlightened;
mod entry;
mod function;
mod invalidate;
mod mirror;
mod region;
mod transition;

use x86::vmcs::{Group, Groups, InstructionError, ProcControls2};
use x86::{Cr0, Exception, Gpa, Rflags};

pub use composed::Composed;
pub use enlightened::Told;
pub use entry::{Entered, EntryBy, PendingEntry};
pub use function::Switch;
pub use invalidate::Invalidation;
pub use mirror::Closed;

use crate::checks::{Limits, is_fixed};
use crate::{Capabilities, Fail, GuestMemory, Vmcs12};

/// Why an operand in L1's linear memory cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The access faults.
    Fault(Exception),
    /// Only user space has memory there.
    Outside,
}

impl From<Stop> for Fail {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Fault(exception) => Self::Fault(exception),
            Stop::Outside => Self::Outside,
        }
    }
}

/// The vCPU on which L1 runs: its memory, by physical and by linear address.
pub trait L1: GuestMemory {
    /// Reads at a linear address as the program that runs does.
    fn read_linear(&mut self, at: u64, into: &mut [u8]) -> Result<(), Stop>;
    /// Writes at a linear address as the program that runs does.
    fn write_linear(&mut self, at: u64, from: &[u8]) -> Result<(), Stop>;
}

/// Registers that decide whether an instruction may be executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// CR0.
    pub cr0: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER.LMA.
    pub long_mode: bool,
    /// CS.L, for a vCPU in long mode.
    pub is_64_bit: bool,
    /// RFLAGS.VM.
    pub vm86: bool,
    /// Current privilege level.
    pub cpl: u8,
    /// Events are blocked by MOV SS.
    pub blocked_by_mov_ss: bool,
    /// IA32_FEATURE_CONTROL.
    pub feature_control: u64,
}

impl Cpu {
    /// Whether a VMX instruction is no invalid opcode by what the processor's mode says.
    fn is_mode_right(&self) -> bool {
        // Real mode and virtual-8086 mode have none of these instructions, nor has 32-bit code in IA-32e mode.
        self.cr0 & x86::Cr0::PE.bits() != 0 && !self.vm86 && (!self.long_mode || self.is_64_bit)
    }
}

/// An operand's linear address, or the fault that its segment makes of it. The fault is taken only when the
/// instruction comes to read the operand.
pub type Address = Result<u64, Exception>;

/// First operand of VMREAD and VMWRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A general register.
    Register(u8),
    /// Memory.
    Memory(Address),
}

/// An instruction of VMX, with its operands decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named as the instructions and their operands.
pub enum Instruction {
    Vmxon { pointer: Address },
    Vmxoff,
    Vmclear { pointer: Address },
    Vmptrld { pointer: Address },
    Vmptrst { to: Address },
    Vmread { field: u64, to: Place },
    Vmwrite { field: u64, from: Place, value: u64 },
    Vmlaunch,
    Vmresume,
    Invept { kind: u64, descriptor: Address },
    Invvpid { kind: u64, descriptor: Address },
}

/// What follows an instruction that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The next instruction.
    Next,
    /// A register gets a value: VMREAD. It is the whole register.
    Register(u8, u64),
    /// Translations are dropped.
    Invalidate(Invalidation),
    /// L2 is to be entered: the host state is good, the guest's is not checked yet.
    Enter(PendingEntry),
}

/// Which of the two levels runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// The guest, or its hypervisor.
    #[default]
    L1,
    /// The guest of the guest's hypervisor.
    L2,
}

/// L1's VMX state. It holds 2 KiB of images and lives in a box.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The capability MSRs.
    pub capabilities: Capabilities,
    /// The VMXON region, in VMX operation.
    vmxon: Option<Gpa>,
    /// The current VMCS.
    current: Option<Gpa>,
    /// Who runs.
    level: Level,
    /// The private copy of the current VMCS.
    vmcs12: Vmcs12,
    /// The private copy of the shadow VMCS that serves L2, while L2 runs.
    shadow12: Vmcs12,
    /// What the end of L2's run writes to L1's memory.
    owes: u8,
    /// What the hardware's VMCS may hold otherwise than the VMCS12 says.
    dirty: Groups,
    /// What L1 has changed since it was last checked.
    unchecked: Groups,
    /// Counts how often what VMCSs are composed and checked by has changed, for all of them; never 0.
    rules: u64,
    /// L1's EFER by which that of L2 was composed last, where an entry does not load it.
    l1_efer: u64,
    /// What an exit has left in the hardware's VMCS and the VMCS12 does not have yet.
    behind: Groups,
    /// What was behind when L2 was entered last, until it has left: it still is if the entry fails.
    entered_behind: Groups,
    /// The one field of what is behind that was fetched by itself since the exit.
    alone: Option<u16>,
    /// The shadow VMCS that serves L1.
    mirror: mirror::Mirror,
    /// What an exit loads as L1's segments may be other than [`Machine::take_host_change`] was told last.
    host_changed: bool,
    /// RFLAGS.VM when L2 was last left.
    vm86: bool,
    /// An entry was executed and the hardware has not run L2 since.
    pub run_pending: bool,
    /// That entry is a VMLAUNCH.
    launching: bool,
    /// A monitor-trap exit is owed to L1.
    pub trap_pending: bool,
    /// L2 was entered with a priority below the threshold: that exit is owed to L1.
    pub fall_pending: bool,
    /// A virtual interrupt of L1's waits for L2.
    pub interrupt_pending: bool,
    /// What SMM has put aside.
    pub smm: Smm,
    /// L1's use of enlightened VMCSs.
    enlightened: enlightened::Enlightened,
}

/// VMX state that an SMI puts aside until RSM (SDM vol. 3C §32.14).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Smm {
    /// The vCPU was in VMX operation.
    pub vmxon: bool,
    /// L2 ran.
    pub guest_mode: bool,
}

impl Machine {
    /// Outside VMX operation, and nothing is offered. A constant, so that one that lies on the heap is copied
    /// from here and not by way of a stack.
    pub const OUTSIDE: Self = Self {
        capabilities: Capabilities::NONE,
        vmxon: None,
        current: None,
        level: Level::L1,
        vmcs12: Vmcs12::ZERO,
        shadow12: Vmcs12::ZERO,
        owes: 0,
        dirty: Groups::ALL,
        unchecked: Groups::ALL,
        rules: 1,
        l1_efer: 0,
        behind: Groups::NONE,
        entered_behind: Groups::NONE,
        alone: None,
        mirror: mirror::Mirror::UNKNOWN,
        host_changed: true,
        vm86: false,
        run_pending: false,
        launching: false,
        trap_pending: false,
        fall_pending: false,
        interrupt_pending: false,
        smm: Smm { vmxon: false, guest_mode: false },
        enlightened: enlightened::Enlightened::NONE,
    };

    /// Outside VMX operation.
    pub fn new(capabilities: Capabilities) -> Self {
        let mut new = Self::OUTSIDE;
        new.capabilities = capabilities;
        new
    }

    /// Sets what is offered, before the first instruction.
    pub fn offer(&mut self, capabilities: Capabilities) {
        self.capabilities = capabilities;
    }

    /// Whether the vCPU is in VMX operation.
    pub fn is_in_operation(&self) -> bool {
        // In SMM L1 is outside VMX operation, although RSM takes it up again: the region is kept.
        self.vmxon.is_some() && !self.smm.vmxon
    }

    /// Whether the vCPU is in VMX operation, or will be behind RSM: what L1's state was checked by does not change then.
    pub fn is_on_or_aside(&self) -> bool {
        self.vmxon.is_some()
    }

    /// The VMXON region, in VMX operation or while SMM has put it aside.
    pub fn vmxon(&self) -> Option<Gpa> {
        self.vmxon
    }

    /// The current VMCS.
    pub fn current(&self) -> Option<Gpa> {
        self.current
    }

    /// The level that runs now.
    #[inline]
    pub fn level(&self) -> Level {
        self.level
    }

    /// The private copy of the current VMCS.
    #[inline]
    pub fn vmcs12(&self) -> &Vmcs12 {
        &self.vmcs12
    }

    /// The current VMCS12, to be filled after an exit. What is changed there is not made dirty: it is what the
    /// hardware's VMCS holds already.
    #[inline]
    pub fn vmcs12_mut(&mut self) -> &mut Vmcs12 {
        &mut self.vmcs12
    }

    /// What the hardware's VMCS may hold otherwise than the VMCS12 says.
    #[inline]
    pub fn dirty(&self) -> Groups {
        self.dirty
    }

    /// L0 has changed something of its own that these groups are composed from.
    #[inline]
    pub fn touch(&mut self, groups: Groups) {
        self.dirty = self.dirty.union(groups);
    }

    /// As [`touch`](Self::touch), of each VMCS that was composed.
    #[cold]
    pub fn touch_each(&mut self, groups: Groups) {
        self.touch(groups);
        self.change_rules();
    }

    /// L1's EFER at an entry, before the groups are composed: L1 changes it without VMWRITE, and an L2 whose entry does not load EFER
    /// has it.
    #[inline]
    pub fn note_l1_efer(&mut self, efer: u64) {
        if self.l1_efer != efer {
            self.l1_efer = efer;
            self.touch(Groups::of(Group::Msrs));
        }
    }

    /// Nothing is taken for composed or checked, of whatever VMCS: CPUID or the capabilities have changed, or L1 is not who it was.
    pub fn touch_all(&mut self) {
        self.touch_whole();
        self.change_rules();
    }

    fn change_rules(&mut self) {
        self.rules = self.rules.wrapping_add(1).max(1);
    }

    /// Nothing is taken for composed or checked of the hardware's VMCS that L2 is entered with next: it is another one, has other
    /// words, or dirty tracking is off.
    pub fn touch_whole(&mut self) {
        self.dirty = Groups::ALL;
        self.unchecked = Groups::ALL;
        self.host_changed = true;
    }

    /// Whether L1's segments after an exit ([`crate::leave::host::segments`]) may be other than those when this was
    /// asked last.
    #[inline]
    pub fn take_host_change(&mut self) -> bool {
        core::mem::take(&mut self.host_changed)
    }

    /// The capability MSRs by which an entry is checked.
    pub fn checked_by(&self) -> Capabilities {
        // What an enlightened VMCS has no field for is refused in any VMCS of an L1 that is offered them, as stock KVM does.
        if self.may_be_enlightened() { self.capabilities.enlightened() } else { self.capabilities }
    }

    /// Whether VMX operation lets the level that runs load this CR0 (SDM vol. 3C §24.8, §26.3). An L2 with EPT may
    /// be let go without protection and paging.
    pub fn takes_cr0(&self, value: u64) -> bool {
        let mut ones = self.capabilities.cr0_fixed0;
        if self.level == Level::L2
            && self.vmcs12.secondary().contains(ProcControls2::UNRESTRICTED_GUEST)
        {
            ones &= !(Cr0::PE | Cr0::PG).bits();
        }
        // Outside VMX operation every value is taken: VMXON looks at them then.
        !self.is_in_operation() || is_fixed(value, ones, self.capabilities.cr0_fixed1)
    }

    /// Whether VMX operation lets the level that runs load this CR4.
    pub fn takes_cr4(&self, value: u64) -> bool {
        let c = &self.capabilities;
        !self.is_in_operation() || is_fixed(value, c.cr4_fixed0, c.cr4_fixed1)
    }

    /// Executes an instruction of L1. When L2 runs, only VMREAD and VMWRITE come here, and only those that L1
    /// lets a shadow VMCS serve; everything else of L2 is an exit to L1.
    pub fn execute(
        &mut self,
        instruction: Instruction,
        cpu: &Cpu,
        limits: &Limits,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        let result = self.perform(instruction, cpu, limits, l1);
        // VMfailValid writes the error's number into the VMCS; all other ends of an instruction write nothing of it.
        if let Err(Fail::Valid(error)) = result {
            return Err(self.fail(error, l1));
        }
        result
    }

    /// VMLAUNCH or VMRESUME: what [`execute`](Self::execute) does, and nothing of the others.
    #[inline]
    pub fn execute_entry(
        &mut self,
        by: EntryBy,
        cpu: &Cpu,
        limits: &Limits,
        memory: &impl GuestMemory,
    ) -> Result<PendingEntry, Fail> {
        // #UD goes before the check of privilege: a program that is not the kernel learns by it that VMX is off.
        if !self.is_in_operation() || !cpu.is_mode_right() {
            return Err(Fail::Fault(Exception::ud()));
        }
        if cpu.cpl > 0 {
            return Err(Fail::Fault(Exception::gp(0)));
        }
        self.enter(by, cpu, limits, memory)
    }

    /// An entry has failed, and that is final: the VMCS is told the number. Not part of the entry itself: where a page
    /// of L1's was only missing, the same entry may yet succeed outside the loop.
    pub fn refuse_entry(&mut self, fail: Fail, memory: &impl GuestMemory) -> Fail {
        match fail {
            Fail::Valid(error) => self.fail(error, memory),
            fail => fail,
        }
    }

    fn perform(
        &mut self,
        instruction: Instruction,
        cpu: &Cpu,
        limits: &Limits,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        // VMXON is the one instruction that means something outside VMX operation.
        if let Instruction::Vmxon { pointer } = instruction {
            return self.vmxon_instruction(pointer, cpu, limits, l1);
        }
        if !self.is_in_operation() || !cpu.is_mode_right() {
            return Err(Fail::Fault(Exception::ud()));
        }
        // An instruction that is not offered is undefined at any privilege.
        self.is_offered(instruction)?;
        // Behind the exits of L2: where a shadow VMCS serves it, privilege is asked as in L1.
        if cpu.cpl > 0 {
            return Err(Fail::Fault(Exception::gp(0)));
        }
        match instruction {
            Instruction::Vmread { field, to } => self.vmread(field, to, cpu, l1),
            Instruction::Vmwrite { field, from, value } => {
                self.vmwrite(field, from, value, cpu, l1)
            }
            Instruction::Vmresume => {
                self.enter(EntryBy::Vmresume, cpu, limits, l1).map(Then::Enter)
            }
            Instruction::Vmlaunch => {
                self.enter(EntryBy::Vmlaunch, cpu, limits, l1).map(Then::Enter)
            }
            Instruction::Vmptrld { pointer } => self.vmptrld(pointer, limits, l1),
            Instruction::Vmclear { pointer } => self.vmclear(pointer, limits, l1),
            Instruction::Vmptrst { to } => self.vmptrst(to, l1),
            Instruction::Invept { kind, descriptor } => self.invept(kind, descriptor, limits, l1),
            Instruction::Invvpid { kind, descriptor } => self.invvpid(kind, descriptor, limits, l1),
            Instruction::Vmxoff => self.vmxoff(l1),
            // Listed all the same: no wildcard hides a new instruction.
            // Was executed above.
            Instruction::Vmxon { .. } => Err(Fail::Fault(Exception::ud())),
        }
    }

    /// Whether a CPU with L1's capabilities has the instruction.
    fn is_offered(&self, instruction: Instruction) -> Result<(), Fail> {
        let offered = match instruction {
            Instruction::Invept { .. } => self.capabilities.ept_vpid.invept(),
            Instruction::Invvpid { .. } => self.capabilities.ept_vpid.invvpid(),
            Instruction::Vmxon { .. }
            | Instruction::Vmxoff
            | Instruction::Vmclear { .. }
            | Instruction::Vmptrld { .. }
            | Instruction::Vmptrst { .. }
            | Instruction::Vmread { .. }
            | Instruction::Vmwrite { .. }
            | Instruction::Vmlaunch
            | Instruction::Vmresume => true,
        };
        if offered { Ok(()) } else { Err(Fail::Fault(Exception::ud())) }
    }

    /// VMfail: with a current VMCS its error field says why.
    #[cold]
    #[inline(never)]
    fn fail(&mut self, error: InstructionError, memory: &impl GuestMemory) -> Fail {
        // Without a VMCS there is no field for the number: CF is all that is told (§31.2).
        if self.current.is_none() && !self.is_enlightened() {
            return Fail::Invalid;
        }
        self.vmcs12.set(x86::vmcs::field::INSTRUCTION_ERROR, error.number());
        // VMREAD of this field exits always, so the shadow VMCS has nothing to be told.
        self.store_error(memory);
        Fail::Valid(error)
    }

    /// RFLAGS that L1 sees after an instruction, if it completed.
    pub fn rflags(result: &Result<Then, Fail>, before: Rflags) -> Option<Rflags> {
        match result {
            // RFLAGS at the exit that follows are the host's of L1's VMCS.
            // An entry changes them only if it fails.
            Ok(Then::Enter(_)) => None,
            Ok(Then::Next | Then::Register(..) | Then::Invalidate(_)) => {
                Some(crate::outcome::success(before))
            }
            Err(fail) => fail.rflags(before),
        }
    }

    /// INIT or reset: VMX operation ends, nothing is written back (SDM vol. 3C §24.8).
    pub fn reset(&mut self) {
        // The regions in L1's memory keep what they have: how much of a VMCS was written back before, no CPU says.
        self.set_regions(None, None);
        // L1 begins anew, and so does what is made for it.
        self.touch_all();
        self.level = Level::L1;
        self.run_pending = false;
        self.entered_behind = Groups::NONE;
        self.forget_pending();
        // RSM is to find nothing that it would take up again.
        self.smm = Smm::default();
        // An enlightened VMCS is released with the regions; the shadow VMCS of L2 is not written behind a reset.
        self.owes &= !enlightened::owes::SHADOW;
    }

    pub(crate) fn set_regions(&mut self, vmxon: Option<Gpa>, current: Option<Gpa>) {
        self.vmxon = vmxon;
        self.current = current;
        // What vmcs02 has of L2 belongs to a VMCS that is no longer current.
        self.behind = Groups::NONE;
        self.entered_behind = Groups::NONE;
        self.alone = None;
        // What L1 has written into the hardware's shadow VMCS was for the VMCS that goes. Who wants it takes it before.
        self.mirror.drop_writes();
        self.release_enlightened();
        // vmcs02 was composed of another VMCS12: no group may be taken for composed, or for checked. Whoever knows of what it was
        // says so behind this ([`Self::take_up`]).
        self.touch_whole();
    }

    pub(crate) fn images(&mut self) -> (&mut Vmcs12, &mut Vmcs12) {
        (&mut self.vmcs12, &mut self.shadow12)
    }

    /// The shadow VMCS in L1's memory may be another than the private copy.
    pub(crate) fn owe_shadow(&mut self) {
        // Restored with a state: L1's memory may have come without it.
        if self.vmcs12.shadow_pointer().is_some() {
            self.owes |= enlightened::owes::SHADOW;
        }
    }

    /// The private copy of the shadow VMCS that serves L2.
    pub fn shadow12(&self) -> &Vmcs12 {
        &self.shadow12
    }
}

#[cfg(test)]
mod tests;
