//! Guests that run guests of their own by SVM: the second control block, and the rules of [`nested_svm`] applied.
//!
//! L1's block is that of an ordinary guest. L2's is made at L1's first VMRUN and kept from then on, so that a VMRUN
//! of the same guest changes in it what L1 has changed and no more. While L2 runs the two change places: the block
//! that runs is always [`Svm::block`], and what acts on it acts on L2.
//!
//! What VMRUN leaves alone (FS, GS, TR, LDTR, the SYSCALL and SYSENTER MSRs, KernelGSBase) is in the CPU inside the
//! loop, where changing the block does not touch it; outside it lies in the block that runs, and goes over with
//! the change.
//!
//! Our own intercepts are those of L1's block, whoever runs; L2's block has them and those that L1 wants.

mod instructions;
mod leave;
mod paging;
mod run;
mod saved;
mod smm;
#[cfg(test)]
mod tests;
mod window;

use core::cell::Cell;

use backend::{Absent, Claim, Event, Executed, Gate, Gprs, L1Memory, Level, Nested, RCX, Waiting};
use cpu::Cpu;
use host::KBox;
use nested_svm::{
    Offered,
    gif::{self, Pending, Situation},
    leave::Undelivered,
    merge,
    reflect::{self, Exit},
};
use x86::{
    Cr0, Cr0Write, Cr4, Direction, Efer, Gpa, Hpa, Rflags, Vector,
    exception::{Exceptions, vector},
    vmcb::{Clean, Control, ExitCode, Intercept3, Intercept4, VIRTUAL_VMLOAD, event, vintr},
};

use crate::{
    block::ControlBlock,
    inject,
    l2::State,
    state::{Step, Svm},
};

/// L1's memory, which remembers whether some of it could not be had.
struct Seen<'a, M> {
    memory: &'a M,
    // In a cell: the trait that reads is shared, for the rules only look.
    missing: Cell<bool>,
}

impl<'a, M: L1Memory> Seen<'a, M> {
    fn new(memory: &'a M) -> Self {
        Self { memory, missing: Cell::new(false) }
    }
}

impl<M: L1Memory> nested_svm::L1Memory for Seen<'_, M> {
    #[inline]
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), nested_svm::Outside> {
        self.memory.read(at, into).map_err(|_| {
            // Apart from the error: the rules may have an answer for a page that is not there,
            // which is only true if it is gone for good.
            self.missing.set(true);
            nested_svm::Outside
        })
    }

    #[inline]
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), nested_svm::Outside> {
        self.memory.write(at, from).map_err(|_| nested_svm::Outside)
    }

    #[inline]
    fn page(&self, at: Gpa, direction: Direction) -> Option<&nested_svm::Words> {
        self.memory.page(at, direction)
    }
}

impl<C: Cpu> Svm<C> {
    /// The control block that L1 runs with, whoever runs now.
    #[inline(always)]
    pub(crate) fn block_of_l1(&mut self) -> &mut ControlBlock {
        if self.level == Level::L1 { &mut self.block } else { self.block_below_l2() }
    }

    #[cold]
    #[inline(never)]
    fn block_below_l2(&mut self) -> &mut ControlBlock {
        match &mut self.nested {
            Some(state) => &mut state.other,
            None => &mut self.block,
        }
    }

    /// The control area of L1's block.
    #[inline]
    pub(crate) fn control_of_l1(&self) -> &Control {
        match &self.nested {
            Some(state) if self.level == Level::L2 => &state.other.vmcb().control,
            _ => &self.block.vmcb().control,
        }
    }

    /// What our own intercepts changed to has L2's block follow, which runs.
    #[cold]
    #[inline(never)]
    pub(crate) fn merge_intercepts(&mut self) {
        let Some(state) = &self.nested else { return };
        // Which map L2 runs on was decided at VMRUN.
        let l0 = self.l0(state, Hpa(self.vmcb().control.msrpm_base_pa));
        let mut words = merge::intercepts(&l0, state.v12.control(), &self.cold.offered);
        let [_, _, _, third, fourth, _] = &mut words;
        // The merge knows nothing of our window, and would close it.
        if state.window.is_some() {
            *third |= Intercept3::VINTR.bits();
        }
        // The features are those of VMRUN, and what is offered may have changed since.
        *fourth |= merge::must_exit(&self.vmcb().control).bits();
        self.vmcb_mut(Clean::INTERCEPTS).control.intercepts = words;
    }

    /// What we want of L2's block. L1's block is `state.other`, or runs.
    fn l0(&self, state: &State, msrpm: Hpa) -> merge::L0 {
        let l1 = if self.level == Level::L2 { &state.other } else { &self.block }.vmcb();
        let control = &l1.control;
        merge::L0 {
            // Of L1's block, in which our own are kept whoever runs.
            intercepts: control.intercepts,
            tsc_offset: self.cold.tsc.offset,
            iopm: Hpa(control.iopm_base_pa),
            msrpm,
            root: Some(if paging::has_tables(state.v12.control()) {
                state.root
            } else {
                Hpa(control.ncr3)
            }),
            pat: l1.save.g_pat,
            pause: (control.pause_filter_thresh, control.pause_filter_count),
            l1_interrupts: state.l1_interrupts,
        }
    }

    /// Our own MSR map has changed. What is open now for L2 is found at the next VMRUN; until then all exit.
    pub(crate) fn forget_open_msrs(&mut self) {
        if let Some(state) = &mut self.nested {
            state.open = None;
            if self.level == Level::L2 {
                // Until the next VMRUN it would let through what was just forbidden.
                self.block.msr_map.close();
                self.block.mark(Clean::PERM_MAP);
            }
        }
    }

    /// The guest's CPUID has changed.
    pub(crate) fn follow_offered(&mut self) {
        use x86::cpuid::feature as f;
        let features = self.cold.limits.svm_features;
        let has = |feature: x86::cpuid::Feature| features & feature.mask() != 0;
        self.cold.offered = Offered {
            physical_bits: self.cold.limits.maxphyaddr,
            flush_by_asid: has(f::FLUSH_BY_ASID),
            npt: has(f::NPT),
            nrip_save: has(f::NRIPS),
            decode_assists: has(f::DECODE_ASSISTS),
            pause_filter: has(f::PAUSE_FILTER),
            pause_threshold: has(f::PAUSE_THRESHOLD),
            // Both: a VMM may show what this CPU has not, and then L2 would run without it.
            vgif: has(f::VGIF) && self.features.vgif,
            virtual_vmload: has(f::V_VMSAVE_VMLOAD) && self.features.v_vmload,
            wide_sysenter: self.cold.limits.wide_sysenter,
            lbr: has(f::LBRV) && self.features.lbr,
            vnmi: has(f::VNMI) && self.features.vnmi,
            cr4: self.cold.limits.cr4_allowed.bits(),
            efer: self.cold.limits.efer_allowed,
        };
    }

    /// The root of the TDP tables has changed: L2 runs on it as well, unless L1 has tables of its own for it.
    pub(crate) fn follow_tdp_root(&mut self, root: Hpa) {
        let on_root = |state: &KBox<State>| !paging::has_tables(state.v12.control());
        if self.level == Level::L2 && self.nested.as_ref().is_some_and(on_root) {
            self.vmcb_mut(Clean::NPT).control.ncr3 = root.0;
            self.block.request_flush();
        }
    }

    /// What the TDP tables hold has become less.
    pub(crate) fn flush_other_block(&mut self) {
        if let Some(state) = &mut self.nested {
            state.other.request_flush();
        }
    }

    /// L1's TSC has changed, and L2's with it.
    #[inline(always)]
    pub(crate) fn follow_tsc_offset(&mut self) {
        if self.level == Level::L1 {
            // The offset is of the clean bit of the intercepts (APM vol. 2 §15.15.3).
            self.vmcb_mut(Clean::INTERCEPTS).control.tsc_offset = self.tsc_offset;
        } else {
            self.follow_tsc_offset_in_l2();
        }
    }

    #[cold]
    #[inline(never)]
    fn follow_tsc_offset_in_l2(&mut self) {
        // Both blocks: L1's is entered next without another look at the clock.
        let offset = self.tsc_offset;
        self.block_of_l1().vmcb_mut(Clean::INTERCEPTS).control.tsc_offset = offset;
        if let Some(state) = &self.nested {
            let offset = self.cold.tsc.offset.wrapping_add(state.v12.control().tsc_offset);
            self.vmcb_mut(Clean::INTERCEPTS).control.tsc_offset = offset;
        }
    }

    /// EFER.SVME as the guest sees it has changed, to what `shown` tells. Without it L1 has no GIF that it
    /// could have cleared.
    #[cold]
    #[inline(never)]
    pub(crate) fn svme_changed(&mut self, shown: u64) {
        self.efer_shown = shown;
        self.follow_virtual_vmload();
        self.follow_fault_intercept();
        // L2's EFER says nothing of L1's.
        if self.level == Level::L1 && shown & Efer::SVME.bits() == 0 {
            self.gif.set();
        }
    }

    /// While L1 has SVM on, the CPU carries out its VMLOAD and VMSAVE through the TDP tables, if it can; outside of
    /// 64-bit mode they exit all the same (APM vol. 2 §15.33.1). Those of L2 mean addresses of L1's, and exit unless the CPU takes them through L1's tables.
    pub(crate) fn follow_virtual_vmload(&mut self) {
        if !self.features.v_vmload {
            return;
        }
        let bits = (Intercept4::VMLOAD | Intercept4::VMSAVE).bits();
        // Where SYSENTER's MSRs are wider than the CPU's, the CPU moves half of them.
        let on = self.efer_shown & Efer::SVME.bits() != 0 && !self.cold.limits.wide_sysenter;
        self.change_intercepts(|[.., fourth, _]| {
            *fourth = *fourth & !bits | if on { 0 } else { bits };
        });
        let control = &mut self.block_of_l1().vmcb_mut(Clean::ALL).control;
        control.virt_ext = control.virt_ext & !VIRTUAL_VMLOAD | if on { VIRTUAL_VMLOAD } else { 0 };
    }

    /// While L1 has SVM on, #GP exits where the CPU may make one of VMRUN, VMLOAD or VMSAVE before it looks whether that
    /// exits: the address is L1's, and one that the CPU keeps for itself is nothing special there.
    fn follow_fault_intercept(&mut self) {
        // Such a CPU asks for the intercept first (CPUID Fn8000_000A EDX[28]).
        if self.features.svme_addr_check {
            return;
        }
        let (bit, on) = (Exceptions::GP.bits(), self.efer_shown & Efer::SVME.bits() != 0);
        self.change_intercepts(|[_, _, word, ..]| {
            *word = *word & !bit | if on { bit } else { 0 };
        });
    }

    /// Whether L2's #GP may be that of [`follow_fault_intercept`](Self::follow_fault_intercept): one with error code 0, in no
    /// delivery.
    #[cold]
    #[inline(never)]
    fn may_be_for_address(&self, exit: &Exit) -> bool {
        !self.features.svme_addr_check
            && exit.info_1 as u32 == 0
            && self.vmcb().control.exit_int_info & event::VALID == 0
    }

    /// Whether L2 runs and L1's mask of virtual NMIs stays in block 01: see [`reflect::keeps_nmi_mask`].
    pub(crate) fn l1_keeps_its_nmi_mask(&self) -> bool {
        let keeps = |s: &KBox<State>| reflect::keeps_nmi_mask(s.v12.control());
        self.features.vnmi && self.level == Level::L2 && self.nested.as_ref().is_some_and(keeps)
    }

    /// Whether L2 runs without virtual NMIs, though L1 has them, and L1 intercepts NMIs: what masks its NMIs L1 keeps.
    pub(crate) fn l2_has_no_nmi_mask(&self) -> bool {
        let own = |s: &KBox<State>| merge::has_virtual_nmi(s.v12.control());
        self.l1_keeps_its_nmi_mask() && !self.nested.as_ref().is_some_and(own)
    }

    /// A shutdown of L2's is L1's if it asks for that, and else the processor's.
    fn gate_of_shutdown(&self) -> Gate {
        // Without the intercept a triple fault of L2's shuts L1's processor down.
        let asks = |s: &KBox<State>| reflect::intercepts(s.v12.control(), ExitCode::Shutdown);
        let exits = self.level == Level::L2 && self.nested.as_ref().is_some_and(asks);
        if exits { Gate::ExitToL1 } else { Gate::Deliver }
    }

    /// Whether what the block is to inject is L1's alone, which has it in its own block.
    fn injects_for_nobody_else(&self) -> bool {
        let of_l1 =
            |s: &KBox<State>| s.entry_pending && s.v12.control().event_inj & event::VALID != 0;
        self.nested.as_ref().is_some_and(of_l1)
    }

    /// The last exit of L2. An exit for an MSR tells which by RCX.
    fn last_exit(&self, gprs: &Gprs) -> Exit {
        let control = &self.vmcb().control;
        let code = match ExitCode(control.exit_code) {
            // The emulator writes VMEXIT_INVALID with 32 bits.
            ExitCode(0xffff_ffff) => ExitCode::Invalid,
            code => code,
        };
        let info_2 = if code == ExitCode::Msr { gprs.0[RCX] } else { control.exit_info_2 };
        Exit { code, info_1: control.exit_info_1, info_2 }
    }
}

impl<C: Cpu> Nested for Svm<C> {
    const NEEDS_NEXT_RIP: bool = true;
    const NEEDS_SAVE_AREA: bool = true;
    type MonitorTrap = Absent;
    type Asleep = Absent;

    fn monitor_trap(&self) -> Option<&Absent> {
        None
    }

    fn monitor_trap_mut(&mut self) -> Option<&mut Absent> {
        None
    }

    fn asleep(&self) -> Option<&Absent> {
        None
    }

    fn asleep_mut(&mut self) -> Option<&mut Absent> {
        None
    }

    /// No exit of L2's is claimed as one for that ([`Claim::Instruction`]).
    fn execute_for_l2(&mut self, _: &mut Gprs, _: &impl L1Memory) -> Executed {
        Executed::Shutdown
    }

    /// The table registers are L1's own, which no exit loads.
    fn stops_watching_tables(&mut self) -> bool {
        false
    }

    #[inline(always)]
    fn level(&self) -> Level {
        self.level
    }

    fn is_on(&self, efer: Efer, _cr4: Cr4) -> bool {
        efer.contains(Efer::SVME)
    }

    #[inline]
    fn is_enabled(&self) -> bool {
        Efer::from_bits_retain(self.vmcb().save.efer & self.efer_shown).contains(Efer::SVME)
    }

    /// Operands are physical addresses.
    fn cr0_of_write(&self, value: Cr0) -> Option<Cr0> {
        Some(value)
    }

    fn cr4_of_write(&self, value: Cr4) -> Option<Cr4> {
        Some(value)
    }

    /// Operands are physical addresses.
    fn enters(&self) -> bool {
        ExitCode(self.vmcb().control.exit_code) == ExitCode::Vmrun
    }

    fn has_memory_operand(&self) -> bool {
        false
    }

    /// SVM has VM_CR instead, which L1 cannot write.
    fn set_feature_control(&mut self, _value: u64) {}

    fn execute(&mut self, gprs: &mut Gprs, next_rip: u64, l1: &impl L1Memory) -> Executed {
        self.execute_instruction(gprs, next_rip, l1)
    }

    fn claims(&mut self, gprs: &Gprs, l1: &impl L1Memory) -> Result<Claim, backend::Outside> {
        let exit = self.last_exit(gprs);
        let steps = self.cold.nmi.step == Step::Trapped;
        let Some(state) = &mut self.nested else { return Ok(Claim::L0) };
        // What the CPU refuses to enter it has not entered.
        if exit.code != ExitCode::Invalid {
            state.entry_pending = false;
        }
        // Delivered, or L2 has gone on: an exit in its delivery would name it.
        if let Some(of_l1) = state.injected
            && !of_l1.is(self.block.vmcb().control.exit_int_info)
        {
            state.injected = None;
        }
        // It is our window. L1 has not seen V_IRQ set.
        if exit.code == ExitCode::Vintr && state.window.is_some() {
            return Ok(Claim::L0);
        }
        let seen = Seen::new(l1);
        // By the copy of L1's block: what L1 writes there while L2 runs counts at the next VMRUN.
        let claim = reflect::claims(state.v12.control(), &self.cold.offered, &exit, &seen);
        // The question is asked again outside of the loop, where a page can be brought in.
        if seen.missing.get() && !l1.is_final() {
            return Err(backend::Outside);
        }
        Ok(match claim {
            reflect::Claim::L0 => Claim::L0,
            // The step was ours.
            reflect::Claim::L1 if exit.code == ExitCode::ExcpDb && steps => Claim::L0,
            // Perhaps of an instruction that exits: what it is not is raised again, and is L1's.
            reflect::Claim::L1
                if exit.code == ExitCode::ExcpGp && self.may_be_for_address(&exit) =>
            {
                Claim::L0
            }
            reflect::Claim::L1 if exit.code.is_exception() => Claim::Exception,
            reflect::Claim::L1 => Claim::L1,
            reflect::Claim::ByValue => Claim::ByValue,
        })
    }

    /// The exit becomes the one that L1 asked for.
    fn claims_cr0(&mut self, new: Cr0, by: Cr0Write) -> bool {
        let control = &self.vmcb().control;
        let Some(state) = self.nested.as_ref().filter(|_| self.level == Level::L2) else {
            return false;
        };
        // About any other exit L1 was asked already.
        if control.exit_code != ExitCode::WriteCr0.0 {
            return false;
        }
        let old = backend::ControlRegisters::cr0(self);
        let Some(exit) = reflect::cr0_write(state.v12.control(), old, new, by) else {
            return false;
        };
        self.vmcb_mut(Clean::empty()).control.exit_code = exit.code.0;
        true
    }

    fn takes_fault_for_instruction(&mut self, gprs: &Gprs, code: &[u8]) -> bool {
        self.takes_fault(gprs, code)
    }

    fn enter_smm(
        &mut self,
        gprs: &mut Gprs,
        kept: Gpa,
        l1: &impl L1Memory,
    ) -> Result<Option<Gpa>, backend::Outside> {
        self.put_l2_aside(gprs, kept, l1)
    }

    fn leave_smm(
        &mut self,
        gprs: &mut Gprs,
        kept: Gpa,
        l2: Option<Gpa>,
        l1: &impl L1Memory,
    ) -> bool {
        l2.is_none_or(|at| self.take_l2_back(gprs, kept, at, l1))
    }

    /// EVENTINJ says all of an event that its neutral form says.
    fn injects_for_l1(&self) -> bool {
        false
    }

    fn settle_rip(&mut self) {
        if self.level == Level::L2 {
            let _ = self.note_injection(self.block.vmcb().control.event_inj);
        }
    }

    fn repeats_injection(&mut self) -> bool {
        let block = self.block.vmcb();
        let (info, rip) = (block.control.exit_int_info, block.save.rip);
        let of_l1 = self.nested.as_ref().and_then(|state| state.injected);
        // An INT n of L2's own at the same place would look alike, but its RIP is at the instruction.
        let Some(of_l1) = of_l1.filter(|l1| l1.is(info) && l1.rip == Some(rip)) else {
            return false;
        };
        // The exit has overwritten it, and the CPU pushes it for such an event (APM vol. 2 §15.20).
        self.vmcb_mut(Clean::empty()).control.next_rip = of_l1.next_rip;
        true
    }

    fn reflect(&mut self, gprs: &mut Gprs, l1: &impl L1Memory) -> Executed {
        let mut exit = self.last_exit(gprs);
        if exit.code == ExitCode::Msr {
            // RCX was put there for the question alone.
            exit.info_2 = 0;
        }
        let control = &self.vmcb().control;
        let undelivered = match exit.code {
            ExitCode::Invalid if self.injects_for_nobody_else() => None,
            // What we were to inject is as little delivered: L1 hears of it, for nobody else would give it back.
            ExitCode::Invalid => inject::decode(control.event_inj),
            _ => inject::decode(control.exit_int_info),
        };
        let info = undelivered.map_or(0, inject::encode);
        self.leave(gprs, &exit, Undelivered { info }, l1)
    }

    fn hypercall(
        &mut self,
        gprs: &mut Gprs,
        next_rip: u64,
        l1: &impl L1Memory,
    ) -> Option<Executed> {
        let asks = |s: &KBox<State>| reflect::intercepts(s.v12.control(), ExitCode::Vmmcall);
        self.nested.as_ref().filter(|state| asks(state))?;
        self.vmcb_mut(Clean::empty()).control.next_rip = next_rip;
        Some(self.leave(gprs, &Exit::plain(ExitCode::Vmmcall), Undelivered::default(), l1))
    }

    #[inline]
    fn is_gated(&self) -> bool {
        self.level == Level::L2 || !self.gif.is_set()
    }

    fn gate(&self, waiting: &Waiting) -> Gate {
        let pending = match waiting {
            Waiting::Interrupt(_) => Pending::Interrupt,
            Waiting::Nmi => Pending::Nmi,
            Waiting::Smi => Pending::Smi,
            Waiting::Init => Pending::Init,
            Waiting::Exception(e) => Pending::Exception(*e),
            // SVM has no such exit.
            Waiting::MonitorTrap => return Gate::Hold,
            Waiting::TripleFault => return self.gate_of_shutdown(),
        };
        let Some(state) = self.nested.as_ref().filter(|_| self.level == Level::L2) else {
            // An exception is the running instruction's, and does not wait for GIF.
            let held = !self.gif.is_set() && !matches!(waiting, Waiting::Exception(_));
            return if held { Gate::Hold } else { Gate::Deliver };
        };
        let rflags = Rflags::from_bits_retain(self.vmcb().save.rflags);
        let situation = Situation {
            level: nested_svm::Level::L2,
            gif: self.gif,
            entry_pending: state.entry_pending,
            control: state.v12.control(),
            rflags,
            // L1's are in its block: with V_INTR_MASKING they decide about its interrupts.
            l1_rflags: Rflags::from_bits_retain(state.other.vmcb().save.rflags),
        };
        match situation.gate(&pending) {
            gif::Gate::Deliver => Gate::Deliver,
            gif::Gate::ExitToL1(_) => Gate::ExitToL1,
            gif::Gate::Hold => Gate::Hold,
            gif::Gate::Window => Gate::Window,
            gif::Gate::AfterEntry => Gate::AfterEntry,
        }
    }

    fn hears_interrupts(&self) -> bool {
        let hears = |s: &KBox<State>| reflect::intercepts(s.v12.control(), ExitCode::Intr);
        self.level == Level::L2 && self.nested.as_ref().is_some_and(hears)
    }

    fn may_have_injected(&self, vector: Vector) -> bool {
        let Some(state) = self.nested.as_ref() else { return false };
        let control = state.v12.control();
        // By its block, whatever became of the valid bit; or as a virtual interrupt.
        let word = event::INTR | u64::from(vector.0);
        control.event_inj & (event::TYPE | event::VECTOR) == word
            || vector.0 != 0 && control.int_vector == u32::from(vector.0)
    }

    /// An event that SVM intercepts stays where it waits, until L1 sets GIF.
    fn acknowledges(&self, _: &Waiting) -> bool {
        false
    }

    fn exit_to_l1(
        &mut self,
        gprs: &mut Gprs,
        waiting: &Waiting,
        undelivered: Option<Event>,
        l1: &impl L1Memory,
    ) -> Executed {
        if let Waiting::Exception(e) = waiting
            && e.vector.0 == vector::DB
            && let Some(bits) = e.payload
        {
            // The interception comes behind what a debug exception leaves in its registers.
            self.after_debug_exception(bits);
        }
        let exit = match waiting {
            Waiting::Interrupt(_) => Exit::plain(ExitCode::Intr),
            Waiting::Nmi => Exit::plain(ExitCode::Nmi),
            Waiting::Smi => Exit::plain(ExitCode::Smi),
            Waiting::Init => Exit::plain(ExitCode::Init),
            Waiting::Exception(e) => Exit::of_exception(e),
            Waiting::MonitorTrap | Waiting::TripleFault => Exit::plain(ExitCode::Shutdown),
        };
        let info = undelivered.map_or(0, inject::encode);
        self.leave(gprs, &exit, Undelivered { info }, l1)
    }

    fn has_own_priority(&self) -> bool {
        let masking = |state: &KBox<State>| state.v12.control().int_ctl & vintr::INTR_MASKING != 0;
        self.level == Level::L2 && self.nested.as_ref().is_some_and(masking)
    }

    fn tsc_of_l2(&self, host: u64) -> Option<u64> {
        let state = self.nested.as_ref().filter(|_| self.level == Level::L2)?;
        Some(self.tsc_below(host, state.v12.control().tsc_offset))
    }

    fn set_tsc_ratio_of_l2(&mut self, ratio: u64) {
        self.set_ratio_of_l2(ratio);
    }

    fn keeps_awake(&self) -> bool {
        let Some(state) = self.nested.as_ref().filter(|_| self.level == Level::L2) else {
            return false;
        };
        let block = self.block.vmcb();
        let int_ctl = block.control.int_ctl & (vintr::IRQ | vintr::IGN_TPR | vintr::TPR_MASK);
        let priority = block.control.int_ctl >> vintr::PRIO_SHIFT & 15;
        // With a window of ours V_IRQ is ours.
        let given = state.window.is_none() && int_ctl & vintr::IRQ != 0;
        let passes = int_ctl & vintr::IGN_TPR != 0 || priority > int_ctl & vintr::TPR_MASK;
        let gif = block.control.int_ctl & (vintr::GIF | vintr::GIF_ENABLE) != vintr::GIF_ENABLE;
        let interrupt = given && passes && block.save.rflags & Rflags::IF.bits() != 0;
        let nmi = merge::has_virtual_nmi(state.v12.control())
            && block.control.int_ctl & (vintr::NMI | vintr::NMI_MASK) == vintr::NMI;
        gif && (interrupt || nmi)
    }

    fn set_l1_priority(&mut self, cr8: u8) {
        let control = &mut self.block_of_l1().vmcb_mut(Clean::INTR).control;
        control.int_ctl = (control.int_ctl & !vintr::TPR_MASK) | (u32::from(cr8) & vintr::TPR_MASK);
    }

    fn abandon(&mut self, gprs: &mut Gprs) {
        self.return_to_l1(gprs);
        // INIT and reset set GIF (APM vol. 2 §15.17).
        self.gif.set();
        if let Some(state) = &mut self.nested {
            // What L1 has in memory may be changed by the time that it runs again.
            state.v12.forget();
        }
    }
}
