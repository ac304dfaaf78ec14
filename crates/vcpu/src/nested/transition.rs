//! From L1 to L2 and back.

use backend::{
    Backend, Claim, Executed, Exit, FlushTold, Level, MonitorTrap, Nested, Nesting, Sleep,
    TellFlush,
};
use host::gup::fault_in;
use mmu::Section;
use stats::VcpuCount;
use vm::memory::FaultAccess;
use vm::vcpu_shared::{MpState, VcpuShared};
use x86::{Cr0, Cr0Write, Cr4, Dr6, Efer, Exception, Rflags};

use super::memory::{Mapped, Whole};
use crate::{
    Rare, Vcpu,
    apic::stop_serving_apic,
    exits::{code::CodeState as _, table::stays},
    run::{
        events::Outer,
        outcome::{Break, Next, Outcome},
        user_exit::{ERROR_EMULATION, ErrorData},
    },
};

/// Whether a hypervisor's instruction is executed with the address behind it known.
fn needs_next_rip<B: Nesting>(_: &B) -> bool {
    <B::Nested as Nested>::NEEDS_NEXT_RIP
}

/// Whether exceptions of L2's may be ours whatever L1 asks for.
#[inline]
fn may_own_exceptions(rare: &Rare) -> bool {
    rare.debug.control != 0 || rare.detects_split_locks
}

/// What hears of each instruction of L2's, where the instruction set has that.
fn monitor_trap<B: Backend>(b: &B) -> Option<&<B::Nested as Nested>::MonitorTrap> {
    b.nested().and_then(Nested::monitor_trap)
}

/// Whether L1 is owed an exit behind an instruction of L2's.
pub(crate) fn owes_trap(b: &impl Backend) -> bool {
    monitor_trap(b).is_some_and(MonitorTrap::owes_trap)
}

/// Whether that exit goes before all other events.
pub(super) fn owes_first(b: &impl Backend) -> bool {
    monitor_trap(b).is_some_and(MonitorTrap::owes_first)
}

/// Whether guests of the guest's may run with these registers.
pub(crate) fn is_virtualization_on(b: &impl Backend, efer: Efer, cr4: Cr4) -> bool {
    b.nested().is_some_and(|nested| nested.is_on(efer, cr4))
}

/// L1 does not sleep because L2 has halted.
#[inline]
fn end_halt_of_l2(shared: &VcpuShared) {
    if matches!(shared.mp_state(), MpState::Halted | MpState::InitReceived) {
        shared.set_mp_state(MpState::Runnable);
    }
}

impl<B: Backend> Vcpu<B> {
    /// An instruction for hypervisors, inside the loop.
    pub(crate) fn answer_virtualization(&mut self, s: Section<'_>) -> Next {
        // Without EFER.SVME each of them is #UD, before anything else of it is looked at.
        if self.b.nested().is_none_or(|nested| !nested.is_enabled()) {
            return self.answer_by(Exception::ud());
        }
        if self.rare.debug.is_in_hardware() {
            return Next::Leave;
        }
        let mut next = 0;
        if needs_next_rip(&self.b) {
            // L1 lowers its task priority without an exit. Once L2 runs, it is found in another block.
            self.sync_priority();
            // SVM keeps where L1 goes on in its block, at VMRUN itself.
            let Some(rip) = self.next_rip(s) else { return Next::Leave };
            next = rip;
        }
        if let Some(exception) = self.entry_fault() {
            return self.answer_by(exception);
        }
        let Some(nested) = self.b.nested_mut() else { return Next::Leave };
        let l1 = Mapped::new(&self.mmu.memory, &self.rare.last_pages, s);
        let done = nested.execute(&mut self.gprs, next, &l1);
        let entered = matches!(done, Executed::Entered | Executed::EnteredOffering);
        let next = if needs_next_rip(&self.b) {
            self.executed(done, next)
        } else {
            self.executed_here(done, s)
        };
        // An INIT that the entry lets through is taken outside.
        if entered && next == Next::Again { self.nested_root_in_loop(s) } else { next }
    }

    /// Goes on after what was done inside the loop, where the CPU tells how long an instruction is.
    fn executed_here(&mut self, done: Executed, s: Section<'_>) -> Next {
        // Only all of L1's memory lets an instruction open something.
        debug_assert!(done != Executed::Opened);
        let mut next = 0;
        if matches!(done, Executed::Retired | Executed::Switched | Executed::Offering) {
            let Some(rip) = self.next_rip(s) else { return Next::Leave };
            next = rip;
        }
        self.executed(done, next)
    }

    /// Why L1 may not enter L2 now, if that is what it is about: in system-management mode there is no L2 (#UD), and the
    /// CPU has to have a page for L1's state where it may keep that (#GP), as on stock KVM.
    #[inline]
    fn entry_fault(&self) -> Option<Exception> {
        let needs_area = <B::Nested as Nested>::NEEDS_SAVE_AREA;
        let has_area = !needs_area || self.msrs.store.vm_hsave_pa() != 0;
        if has_area && !self.smm.active || !self.b.nested().is_some_and(Nested::enters) {
            return None;
        }
        Some(if has_area { Exception::ud() } else { Exception::gp(0) })
    }

    /// Executes an instruction for hypervisors outside the loop, where all of L1's memory can be had.
    pub(crate) fn slow_virtualization(&mut self) -> Outcome {
        // First, for it may fault, and nothing is executed then.
        let next = self.slow_next_rip()?;
        if let Some(exception) = self.entry_fault() {
            self.raise(exception);
            return Ok(());
        }
        self.map_missed();
        let Some(nested) = self.b.nested() else { return Ok(()) };
        // The operand is translated for the level that executes, by its registers of before.
        let paging = nested.has_memory_operand().then(|| self.b.paging_context(&self.cpuid));
        let feature_control = self.msrs.store.feature_control();
        // From VMXON on the hardware serves L1's local APIC no longer.
        self.gather_interrupts();
        if self.b.served_apic().is_some() {
            stop_serving_apic(&mut self.b);
        }
        let tables = self.mmu.l1_tables();
        let Some(nested) = self.b.nested_mut() else { return Ok(()) };
        nested.set_feature_control(feature_control);
        let done = self.across_levels(|v| {
            let l1 = Whole::new(&v.mmu.memory, paging).through(tables);
            let done = v.b.nested_mut()?.execute(&mut v.gprs, next, &l1);
            Some((done, l1.refused()))
        });
        match done {
            // L2's operand lies where L1's tables refuse: an exit for L1, not a fault.
            Some((_, Some((at, fault, linear)))) => self.note_refused(at, fault, Some(linear)),
            Some((Executed::NoPage, None)) => {
                return Err(self.no_block());
            }
            Some((done, None)) => {
                let _ = self.executed(done, next);
            }
            None => {}
        }
        Ok(())
    }

    /// An instruction for hypervisors names a block that is no memory. As on stock KVM: it is the VMM's doing that none is
    /// there.
    #[cold]
    pub(crate) fn no_block(&mut self) -> Break {
        self.rare.internal_error(ERROR_EMULATION, ErrorData::default())
    }

    /// Maps a page that the loop has looked for in vain and that L1 itself may never touch: else each entry came here, as
    /// after a restore.
    #[cold]
    fn map_missed(&mut self) {
        let Some(gpa) = self.b.nested_mut().and_then(Nested::take_missed) else { return };
        let access = FaultAccess { gpa, write: false, exec: false, present: false };
        let (memory, tables) = (&self.mmu.memory, &mut self.mmu.tables);
        // What could not be mapped is missed again.
        let _ = memory.fault(tables, &access, &**self.vm, fault_in);
    }

    /// Whether the last exit, #GP in no delivery, is that of a hypervisor's instruction.
    pub(crate) fn is_for_instruction(&mut self) -> bool {
        if self.b.nested().is_none_or(|nested| !nested.is_enabled()) {
            return false;
        }
        let mut code = [0; 15];
        // The bytes say which instruction, the backend whether its fault was for the address alone.
        let len = self.read_code(&mut code).unwrap_or(0);
        let code = code.get(..len).unwrap_or(&[]);
        self.b
            .nested_mut()
            .is_some_and(|nested| nested.takes_fault_for_instruction(&self.gprs, code))
    }

    /// That instruction: L1's, or L2's, which L1 hears of.
    pub(crate) fn virtualization_behind_fault(&mut self) -> Outcome {
        if self.pending.after_exit.is_nested() {
            return self.reflect_outside();
        }
        self.slow_virtualization()
    }

    /// Right after an exit of L2, inside the loop: gives it to L1, if it is L1's. `None`: it is ours.
    #[inline]
    pub(crate) fn reflect_in_loop(&mut self, s: Section<'_>) -> Option<Next> {
        let l1 = Mapped::new(&self.mmu.memory, &self.rare.last_pages, s);
        let claim = self.b.nested_mut()?.claims(&self.gprs, &l1);
        let is_ours = matches!(claim, Ok(Claim::L0 | Claim::Instruction));
        if self.rare.debug.is_in_hardware() || is_ours && self.traps_each() {
            // What L1, or the debugger, has to hear of behind an instruction is found out there.
            let stays = claim == Ok(Claim::L0) && stays(&self.b.exit());
            return if stays { None } else { Some(Next::Leave) };
        }
        let nested = self.b.nested_mut()?;
        match claim {
            Ok(Claim::L0) => self.answer_nested_fault(s),
            // Its value is found out by the emulator.
            Ok(Claim::ByValue) => Some(Next::Leave),
            Ok(Claim::Instruction) => {
                let done = nested.execute_for_l2(&mut self.gprs, &l1);
                match self.executed_here(done, s) {
                    Next::Again if done == Executed::Switched => Some(self.nested_root_in_loop(s)),
                    next => Some(next),
                }
            }
            // Whose it is is found out there.
            Ok(Claim::Exception) if may_own_exceptions(&self.rare) => Some(Next::Leave),
            Ok(Claim::L1 | Claim::Exception) => {
                let done = nested.reflect(&mut self.gprs, &l1);
                Some(self.executed(done, 0))
            }
            // Pages of L1's maps are missing: outside the question is asked anew.
            Err(_) => Some(Next::Leave),
        }
    }

    /// Gives the last exit of L2 to L1, or handles it, outside the loop.
    #[cold]
    #[inline(never)]
    pub(crate) fn reflect_outside(&mut self) -> Outcome {
        let Some(nested) = self.b.nested_mut() else { return Ok(()) };
        let l1 = Whole::new(&self.mmu.memory, None);
        // Asked anew: pages may have been missing in the loop, where the answer was none.
        let claim = nested.claims(&self.gprs, &l1);
        let is_l1s = match claim {
            Ok(Claim::L1) => true,
            Ok(Claim::Exception) => !self.owns_exception(),
            Ok(Claim::L0 | Claim::ByValue | Claim::Instruction) | Err(_) => false,
        };
        if is_l1s {
            return self.reflect_here();
        }
        if claim == Ok(Claim::Instruction) {
            return self.owing_trap(Self::execute_for_l2_outside);
        }
        if let Some(outcome) = self.owing_trap(Self::nested_fault_outside) {
            return outcome;
        }
        // Before the event is taken out of it: a task gate is told from CALL by that.
        let exit = self.b.exit();
        // The exit is ours. Had it been L1's, L1 would have got the event with it.
        let _ = self.keep_interrupted_delivery();
        let handled = self.owing_trap(|v| v.handle(&exit));
        // Behind the emulator, which has made of the exit one of L1's where the value says so.
        if claim == Ok(Claim::ByValue) {
            self.reflect_by_value();
        }
        handled
    }

    /// Ends L2's run with its last exit, or does what that is for and L1 has left to us.
    fn reflect_here(&mut self) -> Outcome {
        let done = self.across_levels(|v| {
            let l1 = Whole::new(&v.mmu.memory, None);
            Some(v.b.nested_mut()?.reflect(&mut v.gprs, &l1))
        });
        match done {
            Some(Executed::Flushes) => return self.owing_trap(Self::flush_for_l2),
            Some(done) => self.go_on_after(done),
            None => {}
        }
        Ok(())
    }

    /// Goes on outside the loop after L2's run has ended.
    pub(crate) fn go_on_after(&mut self, done: Executed) {
        let _ = self.executed(done, 0);
    }

    /// Asks whether L1 wants to hear of a flush for L2, and ends L2's run if it is told.
    pub(crate) fn tell_flush(&mut self, how: TellFlush) -> FlushTold {
        self.across_levels(|v| {
            let l1 = Whole::new(&v.mmu.memory, None);
            v.b.nested_mut()
                .map_or(FlushTold::No, |nested| nested.tell_flush(&mut v.gprs, how, &l1))
        })
    }

    /// Executes the instruction that the last exit of L2 is for, with all of L1's memory.
    fn execute_for_l2_outside(&mut self) -> Outcome {
        let next = self.slow_next_rip()?;
        let done = self.across_levels(|v| {
            let l1 = Whole::new(&v.mmu.memory, None);
            Some(v.b.nested_mut()?.execute_for_l2(&mut v.gprs, &l1))
        });
        if let Some(done) = done {
            let _ = self.executed(done, next);
        }
        Ok(())
    }

    /// Does something for L2, behind which L1 is owed an exit if an instruction has retired and L1 asked for that.
    pub(crate) fn owing_trap<R>(&mut self, does: impl FnOnce(&mut Self) -> R) -> R {
        if !self.traps_each() {
            return does(self);
        }
        // An instruction has retired if RIP moved. What faults or waits for user space leaves it.
        let before = self.b.rip();
        let done = does(self);
        if self.pending.after_exit.is_nested() && self.b.rip() != before {
            self.owe_trap();
        }
        done
    }

    /// Whether L2 runs, and L1 is to hear of each of its instructions.
    pub(crate) fn traps_each(&self) -> bool {
        self.pending.after_exit.is_nested()
            && monitor_trap(&self.b).is_some_and(MonitorTrap::traps_each)
    }

    /// L1 is owed an exit behind what L2 has just done.
    pub(crate) fn owe_trap(&mut self) {
        if let Some(trap) = self.b.nested_mut().and_then(Nested::monitor_trap_mut) {
            trap.owe_trap();
            self.events.outer.set(Outer::NESTED, true);
            self.pending.raise();
        }
    }

    /// Whether the last exit of L2 is an exception that we asked for: the VMM's debugger, or this host, which takes
    /// locked accesses of two cache lines for faults. L1 knows of neither and would give them to its guest.
    #[cold]
    #[inline(never)]
    fn owns_exception(&self) -> bool {
        may_own_exceptions(&self.rare)
            && matches!(self.b.exit(), Exit::Exception(e) if self.is_for_us(e))
    }

    /// L1 hears of a hypercall that L2 made by the other vendor's instruction. False: it asks for none.
    pub(crate) fn gives_hypercall_to_l1(&mut self, next: u64) -> bool {
        let done = self.across_levels(|v| {
            let l1 = Whole::new(&v.mmu.memory, None);
            v.b.nested_mut()?.hypercall(&mut v.gprs, next, &l1)
        });
        let Some(done) = done else { return false };
        let _ = self.executed(done, 0);
        true
    }

    /// The emulator has found the value that L2 writes to CR0: L1 hears of it, or L2 goes on.
    fn reflect_by_value(&mut self) {
        let Some(nested) = self.b.nested_mut() else { return };
        let l1 = Whole::new(&self.mmu.memory, None);
        if nested.claims(&self.gprs, &l1) == Ok(Claim::L1) {
            let _ = self.reflect_here();
        }
    }

    /// Whether L1 is to hear of a write of CR0 that the emulator is about to carry out for L2.
    pub(crate) fn gives_cr0_to_l1(&mut self, value: u64, by: Cr0Write) -> bool {
        let new = Cr0::from_bits_truncate(value) | Cr0::ET;
        // What #GP answers is no exit.
        self.pending.after_exit.is_nested()
            && value >> 32 == 0
            && new.is_consistent()
            && self.b.nested_mut().is_some_and(|nested| nested.claims_cr0(new, by))
    }

    /// L1 single-steps over its VMRUN, which has ended. VMX clears RFLAGS.
    fn step_over_entry(&mut self) {
        // The debugger's step uses the same flag, and is told to the VMM by its own way.
        if self.b.rflags().contains(Rflags::TF) && !self.rare.debug.single_step {
            self.raise(Exception::db(Dr6::BS));
        }
    }

    /// Goes on after what was done for L1. `next`: where an instruction that has retired goes on.
    pub(super) fn executed(&mut self, done: Executed, next: u64) -> Next {
        // Read before: what is done below may let it in.
        let held = self.smm.latched_init;
        match done {
            Executed::Entered => self.cross_down(),
            Executed::EnteredOwing => {
                self.cross_down();
                self.events.outer.set(Outer::NESTED, true);
                self.pending.raise();
                // What is owed is given outside, before L2 runs.
                return Next::Done;
            }
            Executed::EnteredOffering => {
                self.cross_down();
                self.pending.offered_by_l1 = true;
                self.pending.raise();
            }
            Executed::Offering => {
                self.retire(next);
                self.pending.offered_by_l1 = true;
                self.pending.raise();
            }
            Executed::Asleep(sleep) => {
                // All that follows acts on L2's block, though L2 does not run.
                self.level_changed();
                self.shared.set_mp_state(match sleep {
                    Sleep::Halt => MpState::Halted,
                    Sleep::WaitForSipi => MpState::InitReceived,
                });
                return Next::Done;
            }
            Executed::Left => {
                // They are L2's, and not L1's: L1 has in the exit what was not delivered, and the exception is of an
                // instruction that is executed again. What L1 had begun to take went in before it could execute
                // anything, VMRUN that is refused among it.
                (self.events.again, self.events.exception) = (None, None);
                if self.rare.keeps_l2_apart {
                    // Before L1 runs: L1 was told that its guests cannot steer its branches.
                    self.b.prediction_barrier();
                }
                self.cross();
                end_halt_of_l2(&self.shared);
                if needs_next_rip(&self.b) {
                    self.step_over_entry();
                }
            }
            Executed::Retired => self.retire(next),
            Executed::Switched => {
                self.retire(next);
                self.follow_l1_tables();
            }
            Executed::Opened | Executed::Closed => {
                self.retire(next);
                self.follow_gate();
                // GIF or VMX operation has changed, so that what was held may go now.
                self.pending.raise();
            }
            Executed::Fault(exception) => self.raise(exception),
            Executed::Outside | Executed::NoPage | Executed::Flushes => return Next::Leave,
            Executed::Shutdown => {
                self.level_changed();
                end_halt_of_l2(&self.shared);
                self.events.outer.set(Outer::TRIPLE_FAULT, true);
                self.pending.raise();
            }
        }
        // An INIT that may be taken now is taken outside.
        if held && !self.smm.latched_init { Next::Done } else { Next::Again }
    }

    /// The other level runs from now on, by an entry or an exit, which is what happens all the time: events are looked
    /// at if there is one. A window that a control block has open from its last run costs an exit at most.
    #[inline]
    fn cross(&mut self) {
        // Nearly always nothing waits, and the look at events is spared twice a round trip.
        let waits = !self.is_quiet() || self.events.again.is_some();
        self.follow_level();
        self.pending.raise_if(waits);
    }

    /// L2 runs from now on.
    #[inline]
    fn cross_down(&mut self) {
        self.stats.count(VcpuCount::NestedRun);
        self.cross();
    }

    /// The other level runs from now on, by whatever act.
    pub(crate) fn level_changed(&mut self) {
        self.follow_level();
        self.pending.offered_by_l1 = self.b.nested().is_some_and(Nested::offers_interrupt);
        self.pending.raise();
    }

    /// What follows from the level that runs, but for what follows from the control block by itself.
    fn follow_level(&mut self) {
        // What L1's block had of it is gone.
        self.pending.put_back_offer(&self.shared);
        self.follow_gate();
        self.stats.set(VcpuCount::GuestMode, self.pending.after_exit.is_nested().into());
        self.follow_l1_tables();
        self.cpuid_inputs_changed();
    }

    /// L1 runs, whatever ran: the guest is reset, or gets other registers from user space.
    pub(crate) fn abandon_l2(&mut self) {
        if !self.pending.after_exit.is_nested() {
            return;
        }
        self.across_levels(|v| {
            if let Some(nested) = v.b.nested_mut() {
                nested.abandon(&mut v.gprs);
            }
        });
        // They were L2's: L1 has not begun to take them.
        (self.events.again, self.events.exception) = (None, None);
        self.level_changed();
        end_halt_of_l2(&self.shared);
    }

    /// L1 runs, whatever ran, since user space takes SVM or VMX from it. Registers that user space has set before
    /// stay: those that a VMEXIT would load are no more L1's than L2's.
    pub(crate) fn abandon_l2_for_user(&mut self) {
        if !self.pending.after_exit.is_nested() {
            return;
        }
        // As in the saved-state path: abandoning L2 loads L1's registers over them.
        let (gprs, rip, rflags) = (self.gprs.0, self.b.rip(), self.b.rflags());
        self.abandon_l2();
        self.gprs.0 = gprs;
        self.b.set_rip(rip);
        self.b.set_rflags(rflags);
    }

    /// Notes which level runs, and whether events are asked where they go.
    pub(crate) fn follow_gate(&mut self) {
        let Some(nested) = self.b.nested() else { return };
        let l2 = nested.level() == Level::L2;
        let gated = nested.is_gated();
        // Both words are read at every entry or exit, so that they are kept and not asked for.
        self.pending.after_exit.set_nested(l2);
        self.pending.gated = gated;
        // Each change of level or of GIF may be what it has waited for.
        if self.smm.latched_init {
            self.release_init();
        }
    }
}
