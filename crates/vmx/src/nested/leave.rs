//! L2's run ends: what it left goes into the VMCS12, and L1 goes on behind its entry.

use backend::{
    Claim, ControlRegisters, Executed, Gprs, Injection, L1Memory, Msrs, Outside, PdpteRegisters,
    RSP, Registers, SegmentName,
};
use cpu::Cpu;
use nested_vmx::leave::Report;
use nested_vmx::leave::host::{self, Kept, Registers as HostState};
use nested_vmx::merge::{self, Flush, Transition};
use nested_vmx::reflect::{self, Wants};
use nested_vmx::{EntryFailure, GuestMemory, checks::guest::activity_state};
use x86::vmcs::{ENTRY_FAILURE, ExitReason, ProcControls, ProcControls2, field, interruptibility};
use x86::{Cr0, Cr4, Direction, Efer, Gpa, msr};

use super::{
    access::{Block, Memory},
    kept::{Nested, OfL1},
    list::By,
};
use crate::{
    fields,
    host_words::Sysenter,
    permission::LISTED,
    state::{NmiBehind, Offer, Vmx, attention},
};

impl<C: Cpu> Vmx<C> {
    /// Whose the last exit of L2 is.
    pub(super) fn claims_of<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &Gprs,
        l1: &M,
    ) -> Result<Claim, Outside> {
        // With bit 31: a failed entry is no exit of L2's.
        let reason = self.get(fields::EXIT_REASON);
        if reason & ENTRY_FAILURE != 0 {
            // The hardware has found what was checked here not to be good: L1's doing, as far as it goes.
            // Other failures are not L1's: vmcs02 has no lists, and a machine check is the host's.
            let invalid = reason == ENTRY_FAILURE | u32::from(ExitReason::InvalidGuestState.0);
            return Ok(if invalid { Claim::L1 } else { Claim::L0 });
        }
        // It was entered, whatever came of it.
        // Behind the question: a failed entry is still pending.
        n.machine.run_pending = false;
        if reason == u32::from(ExitReason::PreemptionTimer.0)
            && n.timer.is_some()
            // The CPU's timer counts for the local APIC's deadline too: which one it was the TSC tells.
            && self.timer_is_due()
        {
            return Ok(Claim::L1);
        }
        let memory = Memory::new(l1);
        // What the VMM's debugger asked for is looked for by whoever hears that L1 claims it.
        let wants = Wants { page_faults: false, debug: 0 };
        let block = Block { cpu: &self.cpu, vmcs: &self.vmcs };
        let claim = reflect::claim(n.machine.vmcs12(), &block, &gprs.0, &wants, &memory);
        // Nothing is changed when memory is missed: the exit is looked at again outside.
        if memory.has_missed() {
            return Err(Outside);
        }
        Ok(match claim {
            reflect::Claim::L0 => Claim::L0,
            // An exception may be the VMM's debugger's: who asks further is told that it is one.
            reflect::Claim::L1 if reason == u32::from(ExitReason::ExceptionOrNmi.0) => {
                Claim::Exception
            }
            reflect::Claim::L1 => Claim::L1,
            reflect::Claim::Priority(_) | reflect::Claim::Function => Claim::Instruction,
        })
    }

    /// Ends L2's run with its last exit.
    pub(super) fn reflect_exit<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        l1: &M,
    ) -> Executed {
        let memory = Memory::new(l1);
        if self.get(fields::EXIT_REASON) & ENTRY_FAILURE != 0 {
            if !n.machine.run_pending {
                // No entry of L1's: user space has given L2 a state that no CPU runs.
                // The valid bit stays behind such a failure: the next entry would inject what is lost.
                self.drop_injection();
                let report = Report::plain(ExitReason::TripleFault, 0);
                return self.leave_l2(n, gprs, &report, &memory);
            }
            // The hardware's qualification: it knows which rule it was.
            let qualification = self.get(fields::EXIT_QUALIFICATION);
            let failure = EntryFailure { qualification, ..EntryFailure::GUEST };
            return self.fail_loaded_entry(n, gprs, failure, &memory);
        }
        let report = Report::of(&Block { cpu: &self.cpu, vmcs: &self.vmcs });
        self.leave_l2(n, gprs, &report, &memory)
    }

    /// Whether L2's run needs L1's memory to end.
    #[inline]
    fn needs_memory(n: &Nested) -> bool {
        let stores = n.machine.vmcs12().get(field::EXIT_MSR_STORE_COUNT) != 0;
        stores || n.machine.owes_memory() || n.needs_memory_to_leave()
    }

    /// Whether L2's run can end here: what it needs of L1's memory can be had.
    #[inline]
    pub(super) fn may_leave<M: L1Memory>(n: &Nested, memory: &Memory<'_, M>) -> bool {
        !Self::needs_memory(n) || Self::reaches_memory(n, memory)
    }

    /// Whether what L2's run needs of L1's memory to end can be had: the enlightened VMCS alone, where not all of it can.
    #[cold]
    fn reaches_memory<M: L1Memory>(n: &Nested, memory: &Memory<'_, M>) -> bool {
        let stores = n.machine.vmcs12().get(field::EXIT_MSR_STORE_COUNT) != 0;
        // Whole, or enough: the page of an enlightened VMCS is written, and nothing else.
        memory.is_whole()
            || !stores && !n.needs_memory_to_leave() && n.machine.reaches_enlightened(memory)
    }

    /// Before L2's run ends that needs L1's memory for it: what comes of its exit instead.
    #[cold]
    #[inline(never)]
    fn instead_of_leaving<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &Gprs,
        report: &Report,
        memory: &Memory<'_, M>,
    ) -> Option<Executed> {
        // Before the memory is looked for: L0 carries the call out, and L2 does not leave at all.
        if self.is_flush_for_l2(n, gprs, report) {
            return Some(Executed::Flushes);
        }
        // Here is as near to the exit as software comes: where memory is missing, the list is stored much later.
        n.exit_tsc.note(self.cpu.rdtsc(), memory.is_whole());
        (!Self::reaches_memory(n, memory)).then_some(Executed::Outside)
    }

    /// L2's run ends with what L1 is told.
    pub(super) fn leave_l2<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        report: &Report,
        memory: &Memory<'_, M>,
    ) -> Executed {
        // Nearly always false: neither lists nor a page.
        if Self::needs_memory(n)
            && let Some(done) = self.instead_of_leaving(n, gprs, report, memory)
        {
            return done;
        }
        let stores = n.machine.vmcs12().get(field::EXIT_MSR_STORE_COUNT) != 0;
        // Before VMCS12 changes: the list is of L2's state (SDM vol. 3C §28.4). In the loop there is none any more.
        if memory.is_whole() && stores && self.store_msr_list(n, memory).is_err() {
            n.lists.forget();
            // A VMX abort (§28.7), which stock KVM makes a triple fault of, too.
            return Executed::Shutdown;
        }
        // A handler may have set it since.
        self.put_rsp(gprs);
        // L1 is not told of a shadow that is over since L0 has executed the instruction in it.
        self.clear_ended_shadow();
        // Before `of_l1` goes: the deadline is L2's.
        let left = self.timer_left(n);
        let block = Block { cpu: &self.cpu, vmcs: &self.vmcs };
        let mut known = Self::known(&block, self.efer.bits());
        known.preemption_timer = left;
        known.activity = self.activity_of_l2(n, report.activity);
        n.machine.leave(&block, report, &known, memory);
        // vmcs02 has them in parts only: the bits of L0's own are not in it.
        n.made.kept_by_l0 = Some((self.cr0, self.cr4));
        // An offer to L2 was of L1's virtual interrupt, or of one that L1 does not intercept.
        self.set_offer_none();
        let kept = Kept { cr0: self.cr0.bits(), efer: self.efer.bits() };
        // Behind `leave`, which has written what L1 is to read there; before vmcs01 is loaded.
        self.give_shadow(n);
        // From here on controls are changed for L1.
        self.cold.of_l1 = OfL1::default();
        self.own();
        // Behind all reads of vmcs02.
        self.exchange(n);
        self.stop_timer(n);
        // The type decides: an exception of vector 2 is no NMI.
        let is_nmi = report.interruption & x86::vmcs::event::TYPE == x86::vmcs::event::NMI;
        self.load_host(n, gprs, kept, report.reason, is_nmi, memory)
    }

    /// L2's activity state, of which L0 knows `told`.
    #[inline]
    pub(super) fn activity_of_l2(&self, n: &Nested, told: u32) -> u32 {
        // L0 does not sleep for an L2 whose HLT does not exit: the CPU's own field tells.
        let by_cpu =
            !n.made.l0.primary.contains(ProcControls::HLT) && told == activity_state::ACTIVE;
        if by_cpu { self.get(fields::GUEST_ACTIVITY) } else { told }
    }

    /// An entry that was refused before L2 ran: vmcs01 is still the vCPU's.
    pub(super) fn fail_entry<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        failure: EntryFailure,
        memory: &Memory<'_, M>,
    ) -> Executed {
        if n.machine.is_enlightened() && !memory.is_whole() {
            // It is told in L1's memory, and nothing has happened yet.
            return Executed::Outside;
        }
        // L1 goes on in the loop with another state: what follows from it goes into the CPU.
        self.bring_back(n);
        n.machine.fail_entry(failure);
        n.machine.store_enlightened(memory);
        let kept = Kept { cr0: self.cr0.bits(), efer: self.efer.bits() };
        self.load_host(n, gprs, kept, failure.reason, false, memory)
    }

    /// An entry that the hardware refused, or whose list of MSRs cannot be loaded: vmcs02 is the vCPU's.
    pub(super) fn fail_loaded_entry<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        failure: EntryFailure,
        memory: &Memory<'_, M>,
    ) -> Executed {
        let needs = n.needs_memory_to_leave() || n.machine.is_enlightened();
        if needs && !memory.is_whole() {
            return Executed::Outside;
        }
        // What was to be injected was not, and what was to be loaded is not.
        self.drop_injection();
        n.lists.forget();
        // CR0 of L2 as far as an exit keeps it: it has been loaded.
        let kept = Kept { cr0: self.cr0.bits(), efer: self.efer.bits() };
        n.machine.fail_entry(failure);
        n.machine.store_enlightened(memory);
        self.give_shadow(n);
        self.cold.of_l1 = OfL1::default();
        self.own();
        self.exchange(n);
        self.stop_timer(n);
        self.load_host(n, gprs, kept, failure.reason, false, memory)
    }

    /// Has the entry of L2 fail whose list the vCPU has refused, if there is one. L2 has not run.
    pub(super) fn fail_refused<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        l1: &M,
    ) -> Option<Executed> {
        let number = n.lists.take_failed();
        // Taken first: the number is of one entry, whatever comes of it.
        if number == 0 || !self.cold.of_l1.runs {
            return None;
        }
        Some(self.fail_loaded_entry(n, gprs, EntryFailure::msr(number), &Memory::new(l1)))
    }

    /// L1 goes on with the state that its VMCS names. vmcs01 is the vCPU's.
    fn load_host<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        kept: Kept,
        reason: ExitReason,
        is_nmi: bool,
        memory: &Memory<'_, M>,
    ) -> Executed {
        let v = n.machine.vmcs12();
        let state = host::registers(v, kept, reason, is_nmi);
        // Without VPIDs an entry and an exit flush what they come from (SDM vol. 3C §29.4.3.1).
        let flush = merge::flush(v, n.made.last_vpid, Transition::Exit);
        // For the level that goes on: the flush is done at its entry.
        if flush != Flush::None {
            self.attention |= attention::FLUSH;
        }
        // L2's, for what has to be done where the two differ.
        let (cr4, efer) = (self.cr4, self.efer);
        self.load_host_controls(&state);
        self.load_host_segments(n);
        gprs.0[RSP] = state.rsp;
        // In the array too: the world switch does not load it, handlers look there.
        self.set(fields::GUEST_RSP, state.rsp);
        self.set(fields::GUEST_RIP, state.rip);
        self.set(fields::GUEST_RFLAGS, state.rflags);
        // An exit leaves blocking of NMIs as it is, but for an NMI's own (SDM vol. 3C §28.5.5).
        let of_entry = self.get(fields::GUEST_INTERRUPTIBILITY);
        if of_entry & !interruptibility::NMI != 0 {
            // L1 has entered behind STI, with a step pending there if it steps. Nothing pends behind an exit (§28.5.5).
            self.set(fields::GUEST_PENDING_DEBUG, 0);
        }
        let nmi = of_entry & interruptibility::NMI;
        let blocks = if state.blocks_nmis { interruptibility::NMI } else { 0 };
        self.set(fields::GUEST_INTERRUPTIBILITY, nmi | blocks);
        // SDM vol. 3C §28.5.1: 400h, and DEBUGCTL 0.
        self.set(fields::GUEST_DR7, state.dr7);
        self.set(fields::GUEST_DEBUGCTL, state.debugctl);
        if let Some(pat) = state.pat {
            self.set(fields::GUEST_PAT, pat);
        }
        // Behind CR4, EFER and DR7, which it compares.
        self.after_level_change(cr4, efer);
        // Behind CR3 and CR4. A bad entry is a VMX abort (SDM vol. 3C §28.5.4).
        if state.loads_pdptes && !self.load_host_pdptes(state.cr3, memory) {
            return Executed::Shutdown;
        }
        // Last, as the manual has it (SDM vol. 3C §28.6).
        if n.machine.vmcs12().get(field::EXIT_MSR_LOAD_COUNT) != 0
            && self.load_host_msr_list(n, memory).is_err()
        {
            return Executed::Shutdown;
        }
        Executed::Left
    }

    fn load_host_controls(&mut self, state: &HostState) {
        self.cr4 = Cr4::from_bits_retain(state.cr4);
        self.efer = Efer::from_bits_retain(state.efer);
        self.set_cr0(Cr0::from_bits_retain(state.cr0));
        if self.features.umip_by_exits {
            let wanted = self.cr4.contains(Cr4::UMIP) || self.cold.tables.watches();
            let word = ProcControls2::from_bits_retain(self.get(fields::PROC_CONTROLS2));
            if word.contains(ProcControls2::DESCRIPTOR_TABLES) != wanted {
                self.watch_tables(wanted);
            }
        }
        // Not by `set_cr4`: what follows from a change is done in `after_level_change`.
        self.set(fields::CR4_SHADOW, state.cr4);
        self.set(fields::GUEST_CR4, self.real_cr4(self.cr4).bits());
        self.set(fields::GUEST_CR3, state.cr3);
        // vmcs01 has L1's EFER of before, which mostly is the same: then nothing is done.
        if self.get(fields::GUEST_EFER) != self.real_efer(self.efer).bits() {
            self.set_efer(self.efer);
        }
    }

    fn load_host_segments(&mut self, n: &mut Nested) {
        let changed = n.machine.take_host_change();
        if changed {
            let v = n.machine.vmcs12();
            let sysenter = Sysenter {
                cs: v.get(field::HOST_SYSENTER_CS),
                // SYSENTER along with the segments: they change with the same group.
                esp: v.get(field::HOST_SYSENTER_ESP),
                eip: v.get(field::HOST_SYSENTER_EIP),
            };
            n.host.make(&host::segments(v), sysenter);
        }
        // Written past the cache, which knows nothing of what L1 has loaded since: a comparison would cost a read each.
        if self.vmcs.is_loaded() {
            n.host.write_segments(&self.cpu, &self.vmcs);
            self.load_host_tables(&n.host, changed);
            return;
        }
        // Outside the loop nothing can be written past the cache: each register by its own rules.
        let s = host::segments(n.machine.vmcs12());
        for (name, segment) in [
            (SegmentName::Es, s.es),
            (SegmentName::Cs, s.cs),
            (SegmentName::Ss, s.ss),
            (SegmentName::Ds, s.ds),
            (SegmentName::Fs, s.fs),
            (SegmentName::Gs, s.gs),
            (SegmentName::Ldtr, s.ldtr),
            (SegmentName::Tr, s.tr),
        ] {
            self.set_segment(name, segment);
        }
        self.set_gdtr(s.gdtr);
        self.set_idtr(s.idtr);
        n.host.set_sysenter(&self.cpu, &self.vmcs);
    }

    /// The four PDPTEs of an L1 with PAE paging. False: one is bad, or there is no memory.
    #[cold]
    #[inline(never)]
    fn load_host_pdptes<M: L1Memory>(&mut self, cr3: u64, memory: &Memory<'_, M>) -> bool {
        // Bits 2:1 and 8:5 (SDM vol. 3A table 4-8).
        const RESERVED: u64 = 0x1e6;
        // Only of entries that are present: the others are ignored whole.
        let limit = u64::MAX.checked_shl(u32::from(self.cold.limits.maxphyaddr)).unwrap_or(0);
        let mut entries = [0; 4];
        for (at, entry) in entries.iter_mut().enumerate() {
            let Ok(value) = memory.read_u64(Gpa((cr3 & 0xffff_ffe0) + 8 * at as u64)) else {
                return false;
            };
            if value & 1 != 0 && value & (RESERVED | limit) != 0 {
                return false;
            }
            *entry = value;
        }
        self.set_entries(entries);
        true
    }

    #[cold]
    #[inline(never)]
    fn load_host_msr_list<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        memory: &Memory<'_, M>,
    ) -> Result<(), ()> {
        // Not read before all is stored: both lists may lie in one place.
        if n.lists.load(By::Exit) {
            return Ok(());
        }
        self.load_list(n, memory).map_err(|_| n.lists.forget())
    }

    #[cold]
    #[inline(never)]
    fn store_msr_list<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        memory: &Memory<'_, M>,
    ) -> Result<(), ()> {
        // What an entry's list left is of that entry.
        n.lists.forget();
        // The list is carried out by L1's CPU, which knows of no offset of L2's.
        let tsc = self.tsc_of_l1().at(n.exit_tsc.take());
        let list = host::stores(n.machine.vmcs12(), &n.machine.capabilities);
        let limits = self.nested_limits();
        let mut done = 0;
        while let Some(step) = list.store(done, &limits, memory) {
            let step = step.map_err(|_| ())?;
            // The filter of the VMM's holds for lists as it does for RDMSR.
            if self.denies_in_list(step.msr, Direction::Read) {
                return Err(());
            }
            let value = match step.msr {
                // Live in the CPU inside the loop.
                msr::KERNEL_GS_BASE => self.kernel_gs_base_now(),
                // The guest's whole word: the field has what the hardware needs.
                msr::EFER => self.efer.bits(),
                crate::permission::TSC => tsc,
                // As RDMSR has it.
                msr::TSC_AUX if !self.cold.limits.tsc_aux => return Err(()),
                // What is not kept here the vCPU has, and stores it before L1 runs. It stores as well what an exit leaves alone
                // and not each guest has: it asks CPUID, and the whole filter.
                index => match self.msr(index) {
                    Ok(value)
                        if LISTED.contains(&index)
                            && !matches!(index, msr::XSS | msr::SPEC_CTRL) =>
                    {
                        value
                    }
                    _ => {
                        n.lists.store(index, step.slot)?;
                        done = done.wrapping_add(1);
                        continue;
                    }
                },
            };
            // The value alone: the entry's number and reserved word stay L1's.
            memory.write(step.slot, &value.to_le_bytes()).map_err(|_| ())?;
            done = done.wrapping_add(1);
        }
        Ok(())
    }

    /// Nothing of what was offered to L2 is left in its VMCS.
    #[inline]
    fn set_offer_none(&mut self) {
        // Two comparisons where nothing was offered, which is nearly always.
        let window = ProcControls::INTERRUPT_WINDOW.bits();
        let as_l1_has_it =
            (self.get(fields::PROC_CONTROLS) ^ self.cold.of_l1.primary) & window == 0;
        let nothing = self.offer == Offer::default() && self.attention & attention::OFFER == 0;
        if !(nothing && as_l1_has_it) || self.nmi_behind == NmiBehind::Sti {
            self.withdraw_from_l2();
        }
    }

    #[cold]
    #[inline(never)]
    fn withdraw_from_l2(&mut self) {
        self.offer_interrupt(None);
        if self.nmi_behind == NmiBehind::Sti {
            self.nmi_behind = NmiBehind::Nothing;
            self.open_window(false);
        }
    }
}
