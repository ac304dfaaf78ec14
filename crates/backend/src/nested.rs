//! A guest that is a hypervisor itself: L0 is this hypervisor, L1 its guest, L2 the guest of that one.
//!
//! The backend has a control block for each of the two and knows which is current. Every other part of the
//! border acts on the current one, so that the run loop serves L2 as it serves L1. What the loop asks beside is
//! here: what an instruction of L1's does, whose an exit of L2's is, and where an event goes.
//!
//! Nothing here sleeps. L1's memory is behind [`L1Memory`]: inside the loop what can be had there, outside all of
//! it. Who finds a page missing inside has changed nothing, and says [`Executed::Outside`].

use x86::{Cr0, Cr0Write, Cr4, Efer, Exception, Gpa, Vector};

use crate::{
    Event, Gprs, NestedPaging, NestedState, Sleep,
    ability::Absent,
    l1::{Executed, L1Memory, ListMsr, Outside},
};

/// Which of the two runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// The guest.
    #[default]
    L1,
    /// The guest's guest.
    L2,
}

/// Whose an exit of L2 is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Ours: it is answered as L1's exits are, and L2 goes on.
    L0,
    /// L1 asked for it.
    L1,
    /// An exception that L1 asked for: it is ours if we asked for it too, for the VMM's debugger or for the host.
    Exception,
    /// A write of CR0, which is L1's if it changes more than L1 leaves to L2: asked with the value
    /// ([`Nested::claims_cr0`]).
    ByValue,
    /// Ours, and an instruction that works on a page of L1's: the backend executes it ([`Nested::execute_for_l2`]).
    Instruction,
}

/// An event that waits for the guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Waiting {
    /// An interrupt of L1's local APIC or PIC; its vector, where it was acknowledged for L1
    /// ([`Nested::acknowledges`]).
    Interrupt(Option<Vector>),
    /// An NMI.
    Nmi,
    /// A system-management interrupt.
    Smi,
    /// An INIT.
    Init,
    /// An exception that the current instruction makes.
    Exception(Exception),
    /// The exit behind each instruction that L1 asked for: one has retired here.
    MonitorTrap,
    /// A triple fault that was found outside the CPU: the emulator made it, or user space.
    TripleFault,
}

/// Where an event goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// To the level that runs, by that level's own rules.
    Deliver,
    /// L2's run ends ([`Nested::exit_to_l1`]).
    ExitToL1,
    /// Nowhere yet.
    Hold,
    /// Nowhere yet: L2 itself keeps interrupts off. An interrupt window says when that is over.
    Window,
    /// Nowhere yet: L2 is to be entered first, and left again at once.
    AfterEntry,
}

/// What L1 may do with an enlightened control block, which it writes and reads in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enlightenment {
    /// The VMM has switched them on.
    pub enabled: bool,
    /// L1's CPUID names the interface.
    pub shown: bool,
    /// L2's hypercalls that flush translations are carried out here if L1 asks for that.
    pub direct_flush: bool,
    /// The page in which L1 names it.
    pub assist: Option<Gpa>,
}

/// How far [`Nested::tell_flush`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TellFlush {
    /// L1 is asked if it wants to hear of the flush. L2 runs on.
    Ask,
    /// L2's run ends with the news, if L1 wants to hear of it.
    Tell,
}

/// Whether L1 is to hear that translations were flushed for L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushTold {
    /// L1 cannot be asked: where it answers is no memory.
    Nowhere,
    /// It is not.
    No,
    /// It is.
    Yes(Executed),
}

/// What a backend does for guests that are hypervisors.
pub trait Nested: NestedPaging + NestedState {
    /// Whether [`execute`](Self::execute) has to know where L1 goes on.
    const NEEDS_NEXT_RIP: bool;
    /// Whether an entry asks for a page in which the CPU may keep L1's state (VM_HSAVE_PA).
    const NEEDS_SAVE_AREA: bool;
    /// The exit behind each instruction of L2's.
    type MonitorTrap: MonitorTrap;
    /// An L2 that sleeps by its control block.
    type Asleep: Asleep;

    /// The exit behind each instruction of L2's, if L1 may ask for one.
    fn monitor_trap(&self) -> Option<&Self::MonitorTrap>;
    /// The exit behind each instruction of L2's, to owe it.
    fn monitor_trap_mut(&mut self) -> Option<&mut Self::MonitorTrap>;
    /// An L2 that sleeps by its control block, where control blocks say that.
    fn asleep(&self) -> Option<&Self::Asleep>;
    /// An L2 that sleeps by its control block, to wake it.
    fn asleep_mut(&mut self) -> Option<&mut Self::Asleep>;

    /// Which level runs.
    fn level(&self) -> Level;
    /// Whether these registers leave the instruction set on by which L1 runs guests: EFER.SVME, CR4.VMXE.
    fn is_on(&self, efer: Efer, cr4: Cr4) -> bool;
    /// Whether L1 has turned the instructions on. Else each raises #UD, whatever it is.
    fn is_enabled(&self) -> bool;
    /// Whether that instruction enters L2, or begins the operation in which one can be entered.
    fn enters(&self) -> bool;
    /// Whether that instruction has an operand in L1's linear memory.
    fn has_memory_operand(&self) -> bool;
    /// Sets IA32_FEATURE_CONTROL, for an instruction that looks at it.
    fn set_feature_control(&mut self, value: u64);
    /// What a write of CR0 by the level that runs makes of it: in L2 the bits that are L1's own stay. `None`: the
    /// operation that the processor is in refuses the value (#GP).
    fn cr0_of_write(&self, value: Cr0) -> Option<Cr0>;
    /// What a write of CR4 by the level that runs makes of it; see [`cr0_of_write`](Self::cr0_of_write).
    fn cr4_of_write(&self, value: Cr4) -> Option<Cr4>;
    /// Whether the operation that the processor is in allows L1 these registers, whatever it has now.
    fn allows(&self, _cr0: Cr0, _cr4: Cr4) -> bool {
        // SVM is on or off by EFER, and asks nothing else.
        true
    }
    /// Executes the instruction that made [`Exit::Virtualization`](crate::Exit::Virtualization), behind which L1
    /// goes on at `next_rip`.
    fn execute(&mut self, gprs: &mut Gprs, next_rip: u64, l1: &impl L1Memory) -> Executed;
    /// Whose the last exit of L2 is.
    ///
    /// # Errors
    /// L1's memory cannot be had here.
    fn claims(&mut self, gprs: &Gprs, l1: &impl L1Memory) -> Result<Claim, Outside>;
    /// Executes the instruction that the last exit of L2 is for ([`Claim::Instruction`]). L2 goes on behind it
    /// ([`Executed::Retired`]), or its run has ended behind it ([`Executed::Left`]).
    fn execute_for_l2(&mut self, gprs: &mut Gprs, l1: &impl L1Memory) -> Executed;
    /// Whether L1 is to hear of the write of CR0 that the last exit of L2 is for, after all. The exit is L1's then.
    fn claims_cr0(&mut self, new: Cr0, by: Cr0Write) -> bool;
    /// Whether the last exit interrupted the delivery of an event that L1 injected and that else an instruction
    /// makes. No instruction stands for it at RIP: it is injected again.
    fn repeats_injection(&mut self) -> bool;
    /// Whether the event that is prepared is one that L1 injects, by an entry that has not run L2 yet. Its kind and
    /// its length are whole only there.
    fn injects_for_l1(&self) -> bool;
    /// RIP is now that at which what is prepared goes in: a VMM may have set it behind the state that has the event.
    fn settle_rip(&mut self) {}
    /// Nothing is to be injected again: what was known of such an event beyond its neutral form is of none.
    fn forget_repeated(&mut self) {}
    /// The last exit is #GP in no delivery, and `code` lies at RIP. Some CPUs refuse an instruction of L1's for an address that means
    /// something to the host alone, before they look whether it exits. True: it is such an instruction, and the last
    /// exit is the instruction's from now on.
    fn takes_fault_for_instruction(&mut self, gprs: &Gprs, code: &[u8]) -> bool;
    /// System-management mode begins. L2's run, if it runs, ends without an exit that L1 asked for, and so does the
    /// operation that the instruction set puts aside. `kept`: where L1 has its state kept meanwhile. Where L1 describes
    /// L2, if that is part of the save area.
    ///
    /// # Errors
    /// L1's memory is not there.
    fn enter_smm(
        &mut self,
        gprs: &mut Gprs,
        kept: Gpa,
        l1: &impl L1Memory,
    ) -> Result<Option<Gpa>, Outside>;
    /// System-management mode ends, and what was put aside goes on. `l2`: from the save area. False: it cannot.
    fn leave_smm(
        &mut self,
        gprs: &mut Gprs,
        kept: Gpa,
        l2: Option<Gpa>,
        l1: &impl L1Memory,
    ) -> bool;
    /// Ends L2's run with its last exit, which is L1's.
    fn reflect(&mut self, gprs: &mut Gprs, l1: &impl L1Memory) -> Executed;
    /// Ends L2's run with a hypercall to L1: L2 has made it by the other vendor's instruction, and the last exit is for
    /// the #UD of that. `None`: L1 asks for none, so that it stays #UD.
    fn hypercall(&mut self, gprs: &mut Gprs, next_rip: u64, l1: &impl L1Memory)
    -> Option<Executed>;
    /// Whether events have to be asked where they go: L2 runs, or L1 holds its own back.
    fn is_gated(&self) -> bool;
    /// Where an event goes.
    fn gate(&self, waiting: &Waiting) -> Gate;
    /// Whether L1 hears of the interrupts of its machine while L2 runs, by exits: L2 takes none of them.
    fn hears_interrupts(&self) -> bool;
    /// Whether an interrupt that L2 is taking may be one that L1 has given it. What is kept of L1's last entry tells.
    fn may_have_injected(&self, vector: Vector) -> bool;
    /// Whether an event that ends L2's run is taken from where it waits, so that L1 hears of it by the exit alone.
    fn acknowledges(&self, waiting: &Waiting) -> bool;
    /// Ends L2's run with an exit for an event. `undelivered`: the event that L2 was to take first.
    fn exit_to_l1(
        &mut self,
        gprs: &mut Gprs,
        waiting: &Waiting,
        undelivered: Option<Event>,
        l1: &impl L1Memory,
    ) -> Executed;
    /// The last exit is for an instruction that loads or stores a table register. True: L1 has executed it, it
    /// exited for the sake of what an exit of L2 loads alone, does so no more, and is to be executed again.
    fn stops_watching_tables(&mut self) -> bool;
    /// Whether a virtual interrupt of L1's waits for L2, which is given it by [`take_interrupt`](Self::take_interrupt).
    fn offers_interrupt(&self) -> bool {
        // SVM keeps such an interrupt in the control block (V_IRQ), where the CPU finds it by itself.
        false
    }
    /// Takes that interrupt, to be injected at once. `None`: there is none any more.
    ///
    /// # Errors
    /// L1's memory cannot be had here; nothing has changed.
    fn take_interrupt(&mut self, _l1: &impl L1Memory) -> Result<Option<Vector>, Outside> {
        Ok(None)
    }
    /// An interrupt of L1's local APIC was acknowledged while L2 runs. True: it was the notification of interrupts that L1
    /// has posted for L2, is over, and ends no run.
    ///
    /// # Errors
    /// L1's memory cannot be had here; nothing has changed.
    fn posts(&mut self, _vector: Vector, _l1: &impl L1Memory) -> Result<bool, Outside> {
        // SVM's counterpart is AVIC, which L1 is not offered.
        Ok(false)
    }
    // Of the two only VMX has an enlightened control block here.
    /// Says what L1 may do with an enlightened control block.
    fn enlighten(&mut self, _by: Enlightenment) {}
    /// Behind [`Executed::Flushes`], outside the loop: whether L1 can be asked if it wants to hear of the flush. To tell
    /// it ends L2's run, if it does.
    fn tell_flush(&mut self, _gprs: &mut Gprs, _how: TellFlush, _l1: &impl L1Memory) -> FlushTold {
        FlushTold::No
    }
    /// A page of L1's that an instruction did not find inside the loop, though nothing else may ever touch it: to be mapped
    /// outside.
    fn take_missed(&mut self) -> Option<Gpa> {
        None
    }
    /// What L1 reads of an MSR that describes this instruction set and that has this value.
    fn value_for_l1(&self, _index: u32, value: u64) -> u64 {
        // SVM describes itself by CPUID, and not by MSRs.
        value
    }
    /// Whether the task priority that the current block holds is a priority of L2's alone.
    fn has_own_priority(&self) -> bool;
    /// The TSC of L2 when the host's is `host`. `None`: L1 runs.
    fn tsc_of_l2(&self, host: u64) -> Option<u64>;
    // SVM's control block has no lists of MSRs.
    /// Whether lists of L1's wait for the vCPU: [`next_list_msr`](Self::next_list_msr) is to be called until nothing is left.
    fn has_list_msrs(&self) -> bool {
        false
    }
    /// Goes on with lists of L1's, up to the MSR that comes next of those that the vCPU has.
    fn next_list_msr(&mut self, _l1: &impl L1Memory) -> Option<ListMsr> {
        None
    }
    /// That MSR cannot be done, and no more of them are asked for. True: the entry of L2 fails at it, as soon as
    /// [`fail_at_list`](Self::fail_at_list) is called. False: L1 cannot go on.
    fn refuse_list_msr(&mut self) -> bool {
        false
    }
    /// Has the entry of L2 fail whose list was refused, if there is one.
    fn fail_at_list(&mut self, _gprs: &mut Gprs, _l1: &impl L1Memory) -> Option<Executed> {
        None
    }
    // Only VMX has a timer that counts while L2 runs (SDM vol. 3C §26.5.1).
    /// The guest has written L1's TSC, which is this much later: a timer of L1's counts on as it did.
    fn follow_tsc_write(&mut self, _delta: u64) {}
    // Under VMX the ratio is a field of the control block (SDM vol. 3C §25.6.5).
    /// Sets the ratio by which L2's TSC is made from L1's, where L1 gives it by an MSR.
    fn set_tsc_ratio_of_l2(&mut self, _ratio: u64) {}
    /// Whether L2 would not sleep in HLT, though no event waits for it here: L1 has given it a virtual interrupt, or
    /// waits for the moment at which it takes one.
    fn keeps_awake(&self) -> bool;
    /// Sets the task priority of L1, while L2 has one of its own.
    fn set_l1_priority(&mut self, cr8: u8);
    /// L1 runs from now on, and nothing is written: INIT, reset, state that user space sets.
    fn abandon(&mut self, gprs: &mut Gprs);
}

/// An exit behind each instruction of L2's, for which L1 may ask (SDM vol. 3C §26.5.2).
pub trait MonitorTrap {
    /// Whether L1 asked for it.
    fn traps_each(&self) -> bool;
    /// An instruction of L2's has retired here: the exit behind it is owed, until L2's run ends or its state is saved.
    fn owe_trap(&mut self);
    /// Whether such an exit is owed.
    fn owes_trap(&self) -> bool;
    // A priority below L1's threshold (SDM vol. 3C §27.7.7), which is told by the same way.
    /// Whether what is owed goes before all other events, an INIT among them.
    fn owes_first(&self) -> bool;
    /// A debug trap of L2's comes together with that exit: L2 takes it when it is entered again. `bits` are those of DR6.
    fn keep_debug_trap(&mut self, bits: u64);
}

/// L2 sleeps because its control block says so (SDM vol. 3C §25.4.2), and a timer of L1's ends that.
pub trait Asleep {
    /// Says what L2 does, for the next exit that L1 sees for an event, or for its saved state: it sleeps, or it runs.
    fn set_activity(&mut self, sleeps: Option<Sleep>);
    /// Ends the run of an L2 that waits for a start-up IPI, with that.
    fn exit_for_sipi(&mut self, gprs: &mut Gprs, page: Vector, l1: &impl L1Memory) -> Executed;
    /// Ends the run of an L2 that has halted, with the timer of L1's that has run down.
    fn exit_for_timer(&mut self, gprs: &mut Gprs, l1: &impl L1Memory) -> Executed;
    /// When L2's run ends by a timer of L1's, on L1's TSC, whether L2 halts or not.
    fn wakes_at(&self) -> Option<u64>;
}

/// Guests that are hypervisors, where CPUs of this kind may have them.
pub trait Nesting {
    /// What is done for them.
    type Nested: Nested;

    /// What is done for them.
    fn nested(&self) -> Option<&Self::Nested>;
    /// What is done for them, to do it.
    fn nested_mut(&mut self) -> Option<&mut Self::Nested>;
}

// SVM has neither: no exit behind each instruction, and no activity state.
impl MonitorTrap for Absent {
    fn traps_each(&self) -> bool {
        match *self {}
    }
    fn owe_trap(&mut self) {
        match *self {}
    }
    fn owes_trap(&self) -> bool {
        match *self {}
    }
    fn owes_first(&self) -> bool {
        match *self {}
    }
    fn keep_debug_trap(&mut self, _: u64) {
        match *self {}
    }
}

impl Asleep for Absent {
    fn set_activity(&mut self, _: Option<Sleep>) {
        match *self {}
    }
    fn exit_for_sipi(&mut self, _: &mut Gprs, _: Vector, _: &impl L1Memory) -> Executed {
        match *self {}
    }
    fn exit_for_timer(&mut self, _: &mut Gprs, _: &impl L1Memory) -> Executed {
        match *self {}
    }
    fn wakes_at(&self) -> Option<u64> {
        match *self {}
    }
}

impl Nested for Absent {
    const NEEDS_NEXT_RIP: bool = false;
    const NEEDS_SAVE_AREA: bool = false;
    type MonitorTrap = Self;
    type Asleep = Self;

    fn monitor_trap(&self) -> Option<&Self> {
        match *self {}
    }
    fn monitor_trap_mut(&mut self) -> Option<&mut Self> {
        match *self {}
    }
    fn asleep(&self) -> Option<&Self> {
        match *self {}
    }
    fn asleep_mut(&mut self) -> Option<&mut Self> {
        match *self {}
    }
    fn execute_for_l2(&mut self, _: &mut Gprs, _: &impl L1Memory) -> Executed {
        match *self {}
    }
    fn takes_fault_for_instruction(&mut self, _: &Gprs, _: &[u8]) -> bool {
        match *self {}
    }
    fn stops_watching_tables(&mut self) -> bool {
        match *self {}
    }
    fn level(&self) -> Level {
        match *self {}
    }
    fn is_on(&self, _: Efer, _: Cr4) -> bool {
        match *self {}
    }
    fn is_enabled(&self) -> bool {
        match *self {}
    }
    fn claims_cr0(&mut self, _: Cr0, _: Cr0Write) -> bool {
        match *self {}
    }
    fn repeats_injection(&mut self) -> bool {
        match *self {}
    }
    fn injects_for_l1(&self) -> bool {
        match *self {}
    }
    fn enters(&self) -> bool {
        match *self {}
    }
    fn has_memory_operand(&self) -> bool {
        match *self {}
    }
    fn set_feature_control(&mut self, _: u64) {
        match *self {}
    }
    fn cr0_of_write(&self, _: Cr0) -> Option<Cr0> {
        match *self {}
    }
    fn cr4_of_write(&self, _: Cr4) -> Option<Cr4> {
        match *self {}
    }
    fn execute(&mut self, _: &mut Gprs, _: u64, _: &impl L1Memory) -> Executed {
        match *self {}
    }
    fn claims(&mut self, _: &Gprs, _: &impl L1Memory) -> Result<Claim, Outside> {
        match *self {}
    }
    fn enter_smm(
        &mut self,
        _: &mut Gprs,
        _: Gpa,
        _: &impl L1Memory,
    ) -> Result<Option<Gpa>, Outside> {
        match *self {}
    }
    fn leave_smm(&mut self, _: &mut Gprs, _: Gpa, _: Option<Gpa>, _: &impl L1Memory) -> bool {
        match *self {}
    }
    fn reflect(&mut self, _: &mut Gprs, _: &impl L1Memory) -> Executed {
        match *self {}
    }
    fn hypercall(&mut self, _: &mut Gprs, _: u64, _: &impl L1Memory) -> Option<Executed> {
        match *self {}
    }
    fn is_gated(&self) -> bool {
        match *self {}
    }
    fn gate(&self, _: &Waiting) -> Gate {
        match *self {}
    }
    fn hears_interrupts(&self) -> bool {
        match *self {}
    }
    fn may_have_injected(&self, _: Vector) -> bool {
        match *self {}
    }
    fn acknowledges(&self, _: &Waiting) -> bool {
        match *self {}
    }
    fn exit_to_l1(
        &mut self,
        _: &mut Gprs,
        _: &Waiting,
        _: Option<Event>,
        _: &impl L1Memory,
    ) -> Executed {
        match *self {}
    }
    fn has_own_priority(&self) -> bool {
        match *self {}
    }
    fn tsc_of_l2(&self, _: u64) -> Option<u64> {
        match *self {}
    }
    fn keeps_awake(&self) -> bool {
        match *self {}
    }
    fn set_l1_priority(&mut self, _: u8) {
        match *self {}
    }
    fn abandon(&mut self, _: &mut Gprs) {
        match *self {}
    }
}
