//! VMX for guests that are hypervisors: the hooks of [`nested_vmx`], whose rules are pure, to this CPU.
//!
//! vmcs01 is the VMCS with which L1 runs, vmcs02 the one with which L2 does. The one that runs is the vCPU's;
//! the other lies here, and the two change places. So every other part of this backend acts on the level that
//! runs and knows nothing of it, but for what L1 asks of L2 in words that L0 changes too ([`kept::OfL1`]).
//!
//! SDM vol. 3C chapters 24 to 31.

mod access;
#[cfg(test)]
mod aside_tests;
mod capabilities;
#[cfg(test)]
mod count_tests;
mod enlightened;
#[cfg(test)]
mod enlightened_tests;
mod enter;
#[cfg(test)]
mod exit_tests;
mod exit_tsc;
mod gate;
mod host_tables;
mod instruction;
pub(crate) mod kept;
#[cfg(test)]
mod kept_words_tests;
mod leave;
mod list;
#[cfg(test)]
mod list_tests;
mod priority;
#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod round_trip_tests;
mod saved;
mod seconds;
mod shadow;
#[cfg(test)]
mod sleep_tests;
mod smm;
mod switch;
mod tables;
mod timer;
mod turns;
#[cfg(test)]
mod twin_tests;
#[cfg(test)]
mod two_tests;

use backend::{
    Claim, Enlightenment, Event, Executed, FlushTold, Gate, Gprs, Injection, L1Memory, Level,
    ListMsr, Nesting, Outside, Registers as _, Sleep, TellFlush, Waiting,
};
use cpu::Cpu;
use host::KBox;
use nested_vmx::{
    checks::guest::activity_state, events, leave::Report, machine, merge::time::Deadline,
    virtual_interrupts,
};
use x86::vmcs::{ExitReason, PinControls, ProcControls, event, field};
use x86::{Cr0, Cr4, Dr6, Efer, Gpa, Rflags, Vector};

use crate::{
    fields,
    permission::MsrMap,
    state::{Vmx, attention},
};
use kept::Nested;

impl<C: Cpu> Nesting for Vmx<C> {
    type Nested = Self;

    #[inline(always)]
    fn nested(&self) -> Option<&Self> {
        self.nested.is_some().then_some(self)
    }

    #[inline(always)]
    fn nested_mut(&mut self) -> Option<&mut Self> {
        if self.nested.is_some() { Some(self) } else { None }
    }
}

impl<C: Cpu> Vmx<C> {
    /// Which MSRs exit of L1, whichever level runs.
    #[inline]
    pub(crate) fn msr_map(&self) -> &MsrMap {
        match &self.nested {
            // L1's VMCS lies beside while L2 runs.
            Some(n) if self.cold.of_l1.runs => &n.other.msr_map,
            _ => &self.vmcs.msr_map,
        }
    }

    /// Whether the guest is in VMX operation.
    #[inline]
    pub(crate) fn is_hypervisor(&self) -> bool {
        self.nested.as_ref().is_some_and(|n| n.machine.vmxon().is_some())
    }

    /// What belongs to nesting, of a guest in VMX operation. Without CR4.VMXE it is in none any more: the VMM has set
    /// other registers.
    fn in_operation(&self) -> Option<&Nested> {
        let on = |n: &&KBox<Nested>| n.machine.is_in_operation() && self.cr4.contains(Cr4::VMXE);
        // An L2 keeps CR4.VMXE set: the checks of its entry see to that.
        self.nested.as_ref().filter(on).map(|n| &**n)
    }

    /// Whether L2 was entered with an INT1 of L1's, whose delivery may have to be begun again.
    #[cold]
    pub(crate) fn injects_int1_for_l1(&self) -> bool {
        let is_int1 = event::VALID | event::PRIVILEGED_SOFT_EXCEPTION;
        self.cold.of_l1.runs
            && self.nested.as_ref().is_some_and(|n| {
                let information = n.machine.vmcs12().get(field::ENTRY_INTERRUPTION);
                information & (event::VALID | event::TYPE) == is_int1
            })
    }

    /// L1 is reset: it is in VMX operation no more.
    pub(crate) fn leave_operation(&mut self) {
        if let Some(n) = self.nested.as_mut().filter(|n| n.machine.vmxon().is_some()) {
            n.machine.reset();
            n.timer = None;
        }
    }

    /// Does something with what belongs to nesting and with the vCPU.
    #[inline(always)]
    fn with_nested<R>(&mut self, f: impl FnOnce(&mut Self, &mut Nested) -> R) -> Option<R> {
        // Taken out for the call, so that both can be changed. It is put back whatever comes of it.
        let mut n = self.nested.take()?;
        let result = f(self, &mut n);
        self.nested = Some(n);
        Some(result)
    }
}

impl<C: Cpu> backend::Nested for Vmx<C> {
    const NEEDS_NEXT_RIP: bool = false;
    const NEEDS_SAVE_AREA: bool = false;
    type MonitorTrap = Self;
    type Asleep = Self;

    fn monitor_trap(&self) -> Option<&Self> {
        Some(self)
    }

    fn monitor_trap_mut(&mut self) -> Option<&mut Self> {
        Some(self)
    }

    fn asleep(&self) -> Option<&Self> {
        Some(self)
    }

    fn asleep_mut(&mut self) -> Option<&mut Self> {
        Some(self)
    }

    #[inline]
    fn level(&self) -> Level {
        // The word that every other part asks, and not the machine's own level: it changes with the controls.
        if self.cold.of_l1.runs { Level::L2 } else { Level::L1 }
    }

    fn is_on(&self, _efer: Efer, cr4: Cr4) -> bool {
        cr4.contains(Cr4::VMXE)
    }

    /// Asked with the instruction, which needs no decoding here.
    fn is_enabled(&self) -> bool {
        true
    }

    /// Masks and shadows of CR0 tell before the value is known.
    fn claims_cr0(&mut self, _: x86::Cr0, _: x86::Cr0Write) -> bool {
        false
    }

    /// L1's is in its VMCS until L2 exits. Where L2 has made the same by itself meanwhile, that is injected as well instead of
    /// being executed again: with its length it comes to the same.
    fn repeats_injection(&mut self) -> bool {
        let of_l1 = |n: &KBox<Nested>| n.machine.vmcs12().get(field::ENTRY_INTERRUPTION);
        let asked = self.nested.as_ref().map_or(0, of_l1);
        let injected = self.cold.of_l1.injected;
        let told = self.get(fields::IDT_VECTORING);
        // By type and vector: INT 1 and INT1 have one vector, and what L1 injects as an exception has no length.
        let is_told = |word: u32| (word ^ told) & (event::VALID | event::TYPE | event::VECTOR) == 0;
        let is_l1s = told & event::VALID != 0 && (is_told(asked) || is_told(injected));
        if self.cold.of_l1.runs {
            let of_l1 = &mut self.cold.of_l1;
            // Its length is that of this exit.
            (of_l1.repeated, of_l1.length) = (if is_l1s { told & event::WHOLE } else { 0 }, 0);
        }
        is_l1s
    }

    fn forget_repeated(&mut self) {
        (self.cold.of_l1.repeated, self.cold.of_l1.length) = (0, 0);
    }

    fn has_list_msrs(&self) -> bool {
        self.nested.as_ref().is_some_and(|n| n.lists.wait())
    }

    fn next_list_msr(&mut self, l1: &impl L1Memory) -> Option<ListMsr> {
        self.with_nested(|this, n| this.next_of_lists(n, l1)).flatten()
    }

    fn refuse_list_msr(&mut self) -> bool {
        let runs = self.cold.of_l1.runs;
        self.nested.as_mut().is_some_and(|n| n.lists.refuse(runs))
    }

    fn fail_at_list(&mut self, gprs: &mut Gprs, l1: &impl L1Memory) -> Option<Executed> {
        self.with_nested(|this, n| this.fail_refused(n, gprs, l1)).flatten()
    }

    fn follow_tsc_write(&mut self, delta: u64) {
        if self.cold.of_l1.runs
            && let Some(n) = &mut self.nested
            && let Some(deadline) = &mut n.timer
        {
            // The deadline is a time of L1's TSC: it moves along, so that the timer counts as it did.
            *deadline = deadline.moved(delta);
            self.cold.of_l1.timer = deadline.tsc().max(1);
            self.attention |= attention::TIMER;
        }
    }

    fn tsc_of_l2(&self, host: u64) -> Option<u64> {
        self.cold.of_l1.runs.then(|| self.current_tsc().at(host))
    }

    /// With a window of L1's open the entry that follows ends at once, if L2 takes such events.
    fn keeps_awake(&self) -> bool {
        // What L2 cannot take yet does not keep it awake: the window opens when it can.
        let windows = ProcControls::from_bits_retain(self.cold.of_l1.primary);
        windows.contains(ProcControls::INTERRUPT_WINDOW) && self.rflags().contains(Rflags::IF)
            || windows.contains(ProcControls::NMI_WINDOW) && !self.nmi_masked()
            || backend::Nested::offers_interrupt(self) && self.rflags().contains(Rflags::IF)
    }

    fn hears_interrupts(&self) -> bool {
        self.nested.as_ref().is_some_and(|n| {
            self.cold.of_l1.runs
                && n.machine.vmcs12().pin().contains(PinControls::EXTERNAL_INTERRUPT)
        })
    }

    fn may_have_injected(&self, vector: Vector) -> bool {
        self.nested.as_ref().is_some_and(|n| {
            let v = n.machine.vmcs12();
            let word = v.get(field::ENTRY_INTERRUPTION) & (event::TYPE | event::VECTOR);
            // A virtual interrupt is in service from its delivery on (SDM vol. 3C §30.2.2).
            let serves = v.get(field::GUEST_INTERRUPT_STATUS) >> 8 == u16::from(vector.0);
            word == event::INTR | u32::from(vector.0) || virtual_interrupts::are_on(v) && serves
        })
    }

    fn injects_for_l1(&self) -> bool {
        Injection::injecting(self)
            // Of an entry that has not run: afterwards what is injected is L0's own.
            && self.nested.as_ref().is_some_and(|n| {
                let information = n.machine.vmcs12().get(field::ENTRY_INTERRUPTION);
                n.machine.run_pending && information & event::VALID != 0 && self.cold.of_l1.runs
            })
    }

    fn enters(&self) -> bool {
        matches!(
            self.exit_reason(),
            ExitReason::Vmlaunch | ExitReason::Vmresume | ExitReason::Vmxon
        )
    }

    fn has_memory_operand(&self) -> bool {
        self.has_operand_in_memory()
    }

    fn set_feature_control(&mut self, value: u64) {
        if let Some(n) = &mut self.nested {
            n.feature_control = value;
        }
    }

    fn cr0_of_write(&self, value: Cr0) -> Option<Cr0> {
        // Outside VMX operation any value that the CPU takes is good.
        let Some(n) = self.in_operation() else { return Some(value) };
        let of_l1 = self.cold.of_l1.cr0;
        // Bits that L1 owns keep their value whatever L2 writes: a write that differs from the shadow there has gone to
        // L1 (SDM vol. 3C §26.3).
        let new = (value - of_l1) | self.cr0 & of_l1;
        n.machine.takes_cr0(new.bits()).then_some(new)
    }

    fn cr4_of_write(&self, value: Cr4) -> Option<Cr4> {
        let Some(n) = self.in_operation() else { return Some(value) };
        let of_l1 = self.cold.of_l1.cr4;
        // As with CR0.
        let new = (value - of_l1) | self.cr4 & of_l1;
        n.machine.takes_cr4(new.bits()).then_some(new)
    }

    fn allows(&self, cr0: Cr0, cr4: Cr4) -> bool {
        let allows =
            |n: &KBox<Nested>| n.machine.takes_cr0(cr0.bits()) && n.machine.takes_cr4(cr4.bits());
        self.nested.as_ref().is_none_or(allows)
    }

    fn enlighten(&mut self, by: Enlightenment) {
        // Both ways: without a VP assist page there is no enlightened VMCS either.
        self.with_nested(|this, n| {
            n.machine.enlighten(by.enabled, by.shown, by.direct_flush, by.assist);
            n.msrs_kept = None;
            // While L2 runs, the load of vmcs01 that looks at this comes behind L1's next entry.
            if this.cold.of_l1.runs && n.machine.asks_assist_page() {
                this.end_service(n);
            }
        });
    }

    fn tell_flush(&mut self, gprs: &mut Gprs, how: TellFlush, l1: &impl L1Memory) -> FlushTold {
        self.with_nested(|this, n| this.tell_flush_of(n, gprs, how, l1)).unwrap_or(FlushTold::No)
    }

    fn take_missed(&mut self) -> Option<Gpa> {
        self.nested.as_mut()?.missed.take()
    }

    fn value_for_l1(&self, index: u32, value: u64) -> u64 {
        Self::value_for_l1(self, index, value)
    }

    fn offers_interrupt(&self) -> bool {
        // Only of an L2 that runs: the flag may be set by an entry that failed since.
        self.cold.of_l1.runs && self.nested.as_ref().is_some_and(|n| n.machine.interrupt_pending)
    }

    fn take_interrupt(&mut self, l1: &impl L1Memory) -> Result<Option<Vector>, Outside> {
        self.with_nested(|_, n| Self::deliver_virtual(n, l1)).unwrap_or(Ok(None))
    }

    fn posts(&mut self, vector: Vector, l1: &impl L1Memory) -> Result<bool, Outside> {
        self.with_nested(|_, n| Self::post_virtual(n, vector, l1)).unwrap_or(Ok(false))
    }

    fn execute(&mut self, gprs: &mut Gprs, _next_rip: u64, l1: &impl L1Memory) -> Executed {
        self.with_nested(|this, n| this.execute_instruction(n, gprs, l1))
            .unwrap_or(Executed::Fault(x86::Exception::ud()))
    }

    fn claims(&mut self, gprs: &Gprs, l1: &impl L1Memory) -> Result<Claim, Outside> {
        self.with_nested(|this, n| this.claims_of(n, gprs, l1)).unwrap_or(Ok(Claim::L0))
    }

    fn reflect(&mut self, gprs: &mut Gprs, l1: &impl L1Memory) -> Executed {
        // No machine to reflect to: the vCPU cannot go on.
        self.with_nested(|this, n| this.reflect_exit(n, gprs, l1)).unwrap_or(Executed::Shutdown)
    }

    fn enter_smm(
        &mut self,
        gprs: &mut Gprs,
        _: Gpa,
        l1: &impl L1Memory,
    ) -> Result<Option<Gpa>, Outside> {
        // Nothing is kept in SMM's state-save area: VMCS12 has it all.
        self.with_nested(|this, n| this.put_aside(n, gprs, l1));
        Ok(None)
    }

    fn leave_smm(&mut self, gprs: &mut Gprs, _: Gpa, _: Option<Gpa>, l1: &impl L1Memory) -> bool {
        self.with_nested(|this, n| this.take_back(n, gprs, l1));
        // Always true: what was put aside was good when it was.
        true
    }

    fn execute_for_l2(&mut self, gprs: &mut Gprs, l1: &impl L1Memory) -> Executed {
        let switches = self.exit_reason() == ExitReason::Vmfunc;
        self.with_nested(|this, n| {
            if switches {
                this.switch_by_function(n, gprs, l1)
            } else {
                this.move_priority(n, gprs, l1)
            }
        })
        .unwrap_or(Executed::Shutdown)
    }

    /// CPUs with VMX ask first whether an instruction exits.
    fn takes_fault_for_instruction(&mut self, _: &Gprs, _: &[u8]) -> bool {
        false
    }

    /// VMMCALL of L2 stays undefined, as on stock KVM.
    fn hypercall(&mut self, _: &mut Gprs, _: u64, _: &impl L1Memory) -> Option<Executed> {
        None
    }

    fn gate(&self, waiting: &Waiting) -> Gate {
        match &self.nested {
            // By the machine's level: in SMM L2 is put aside, and events are SMM's.
            Some(n) if n.machine.level() == machine::Level::L2 => self.gate_of(n, waiting),
            // VMX root operation blocks INIT (SDM vol. 3C §24.8).
            Some(_) if *waiting == Waiting::Init && self.in_operation().is_some() => Gate::Hold,
            _ => Gate::Deliver,
        }
    }

    fn is_gated(&self) -> bool {
        self.cold.of_l1.runs
    }

    fn acknowledges(&self, waiting: &Waiting) -> bool {
        let asks = |n: &KBox<Nested>| nested_vmx::events::acknowledges(n.machine.vmcs12());
        // What was acknowledged is L1's now: it must not come a second time.
        match waiting {
            Waiting::Interrupt(_) => self.nested.as_ref().is_some_and(asks),
            // With the exit L1 has had them.
            Waiting::Nmi | Waiting::Init => true,
            Waiting::Smi | Waiting::Exception(_) | Waiting::MonitorTrap | Waiting::TripleFault => {
                false
            }
        }
    }

    fn exit_to_l1(
        &mut self,
        gprs: &mut Gprs,
        waiting: &Waiting,
        undelivered: Option<Event>,
        l1: &impl L1Memory,
    ) -> Executed {
        self.with_nested(|this, n| this.exit_for_event(n, gprs, waiting, undelivered, l1))
            .unwrap_or(Executed::Shutdown)
    }

    fn stops_watching_tables(&mut self) -> bool {
        self.stop_watching_tables()
    }

    /// The priority that the CPU keeps is L1's local APIC's, whoever runs: with a TPR shadow L2's lies in L1's memory.
    fn has_own_priority(&self) -> bool {
        false
    }

    fn set_l1_priority(&mut self, _cr8: u8) {}

    fn abandon(&mut self, _gprs: &mut Gprs) {
        self.with_nested(Self::abandon_l2);
    }
}

impl<C: Cpu> backend::MonitorTrap for Vmx<C> {
    fn traps_each(&self) -> bool {
        let of_l1 = ProcControls::from_bits_retain(self.cold.of_l1.primary);
        of_l1.contains(ProcControls::MONITOR_TRAP)
    }

    fn owe_trap(&mut self) {
        if let Some(n) = &mut self.nested {
            // Both are one exit behind an instruction: L1's windows and timer are looked at elsewhere.
            n.machine.trap_pending = true;
        }
    }

    fn owes_trap(&self) -> bool {
        let owes = |n: &KBox<Nested>| n.machine.trap_pending || n.machine.fall_pending;
        self.cold.of_l1.runs && self.nested.as_ref().is_some_and(owes)
    }

    fn owes_first(&self) -> bool {
        self.nested.as_ref().is_some_and(|n| n.machine.fall_pending)
    }

    /// Bit 12 says that an enabled breakpoint was met (SDM vol. 3C table 25-4).
    fn keep_debug_trap(&mut self, bits: u64) {
        const STEP: u64 = Dr6::BS;
        // B3 to B0 and BS lie where DR6 has them.
        const BREAKPOINTS: u64 = 0xf;
        const ENABLED: u64 = 1 << 12;
        let met = bits & BREAKPOINTS;
        let pending = bits & STEP | met | if met != 0 { ENABLED } else { 0 };
        // Added: a step and a breakpoint of one instruction are one exception.
        let now = self.get(fields::GUEST_PENDING_DEBUG);
        self.set(fields::GUEST_PENDING_DEBUG, now | pending);
    }
}

impl<C: Cpu> backend::Asleep for Vmx<C> {
    fn set_activity(&mut self, sleeps: Option<Sleep>) {
        // L2 that is to fall has executed nothing: it is in the state that its entry has left it in.
        let runs = |n: &&mut KBox<Nested>| self.cold.of_l1.runs && !n.machine.fall_pending;
        if let Some(n) = self.nested.as_mut().filter(runs) {
            // vmcs02 says active all the time: it is VMCS12 that L1 reads.
            let state = match sleeps {
                None => activity_state::ACTIVE,
                Some(Sleep::Halt) => activity_state::HLT,
                Some(Sleep::WaitForSipi) => activity_state::WAIT_FOR_SIPI,
            };
            n.machine.vmcs12_mut().set(field::GUEST_ACTIVITY, state);
        }
    }

    fn exit_for_sipi(&mut self, gprs: &mut Gprs, page: Vector, l1: &impl L1Memory) -> Executed {
        let report = events::report(events::Event::Sipi(page.0), None);
        self.with_nested(|this, n| this.exit_asleep(n, gprs, report, l1))
            .unwrap_or(Executed::Shutdown)
    }

    fn exit_for_timer(&mut self, gprs: &mut Gprs, l1: &impl L1Memory) -> Executed {
        let report = Report::plain(ExitReason::PreemptionTimer, 0);
        self.with_nested(|this, n| this.exit_asleep(n, gprs, report, l1))
            .unwrap_or(Executed::Shutdown)
    }

    fn wakes_at(&self) -> Option<u64> {
        // The deadline alone: whether L2 sleeps the caller knows.
        self.nested.as_ref().and_then(|n| n.timer).map(Deadline::tsc)
    }
}
