//! The inner loop's two ends and its turns: into the guest, and what the guest was left for.
//!
//! The whole loop runs with interrupts off: with external-interrupt exiting a pending one ends the
//! guest's run, stays pending, and is taken by the host after the loop. A VM exit loads the host's
//! segment registers, so kernel calls are possible inside the loop as they are. What VM entry and
//! exit leave alone, CR2, KERNEL_GS_BASE, the SYSCALL MSRs, XCR0 and the like, stays the guest's
//! until the loop is left.
//!
//! Outside the loop the VMCS need not be current. What is set is noted and written at the next
//! entry; what is asked for and not known is read with interrupts off, after a VMPTRLD if need be.
//!
//! SDM vol. 3C chapters 25 to 28.

use core::sync::atomic::Ordering::Relaxed;

use backend::{Answer, Exit, Exits, Gprs, Injection, Onward, RSP, Registers, Turn, WorldSwitch};
use cpu::{Cpu, VmxSwitch};
use host::hostcpu;
use x86::{
    Rflags, msr,
    segment::attr,
    vmcs::{ENTRY_FAILURE, ExitReason, event, field, invept},
};

use crate::{
    apic_page::Serving,
    exits, fields,
    host_registers::HostThread,
    mitigations,
    paging::INVALID_STATE,
    state::{NmiBehind, Offer, Vmx, attention},
};

impl<C: Cpu> WorldSwitch for Vmx<C> {
    fn may_run_on(&self, here: usize) -> bool {
        // The other VMCS too: an exchange in the loop loads it here.
        // The other one has nothing of a guest that never was a hypervisor: its CPU need not be asked.
        self.vmcs.may_run_on(here)
            && (!self.beside || self.nested.as_ref().is_none_or(|n| n.may_run_on(here)))
    }

    fn release_elsewhere(&mut self) {
        // Interrupts are on here: the other CPU is waited for.
        self.vmcs.clear_elsewhere();
        if let Some(n) = &self.nested {
            n.clear_elsewhere();
        }
    }

    fn begin_run(&mut self) {
        // Once a run: within KVM_RUN the thread's bases do not change, nor its selectors but for those of a local table.
        *self.host = HostThread::read(&mut self.cpu);
    }

    fn load(&mut self, at: usize) {
        let here = self.vmcs.find(at);
        let cr4 = self.cpu.cr4_now();
        // VMX goes off at a crash, or with its CPU: an instruction of it would fault then.
        let Some(here) = here.filter(|here| here.is_on_by(cr4)) else {
            self.attention |= attention::OFF;
            return;
        };
        // Before VMPTRLD: the fields are noted, and written with all others.
        // The host's state is of a CPU, and of one time that VMX was on there.
        if !self.vmcs.has_host_of(at, here) {
            self.arrive(at, here);
        }
        // The vCPU, not the VMCS: one of its two may have stayed here while the other ran elsewhere.
        if self.cold.last_at != at {
            self.forget_at(at);
        }
        // VPIDs are a CPU's own: one of elsewhere names what is somebody else's here.
        if !self.vmcs.has_vpid_of(here) {
            self.attention |= attention::FLUSH;
        }
        if self.beside
            && let Some(n) = &mut self.nested
        {
            // Both VMCSs need the thread's words; the other one gets them when it is loaded in the loop.
            n.has_host = false;
            n.exit_tsc.forget();
            if n.may_use_shadow() && !self.cold.of_l1.runs {
                self.ready_shadow(at, here);
            }
        }
        // It was set for an entry that did not take place.
        self.attention &= !attention::TIMER_SET;
        // Once in a VMCS's life: what never changes is not in the cache.
        if self.vmcs.make_current(&self.cpu, here) {
            self.write_constants();
        }
        // VMRESUME and VMLAUNCH fail each in the other's place (SDM vol. 3C §27.1).
        self.switch.flags &= !VmxSwitch::LAUNCHED;
        if self.vmcs.launched.get() {
            self.switch.flags |= VmxSwitch::LAUNCHED;
        }
        // An exit loads no LDTR and makes DS and ES null: what the process has is put back behind the loop.
        // A process that has an LDT may change it under this thread, by an interrupt; the kernel empties then what names
        // a descriptor that has gone. From here on interrupts are off.
        if hostcpu::uses_ldt() {
            self.host.read_selectors(&mut self.cpu);
        }
        // An exit loads it: what the kernel has changed of CR4 meanwhile must not be undone.
        self.set(fields::HOST_CR4, cr4.bits());
        // The thread's memory map, with a PCID that may be another at each entry of the loop.
        self.set(fields::HOST_CR3, self.cpu.cr3());
        self.set(fields::HOST_FS_BASE, self.host.fs_base);
        // Behind the host's fields: those that changed are written in one go.
        self.vmcs.load(&self.cpu);
        // Another guest may have trained the predictors that this one's branches would use.
        // Predictors know no VMCS: between two vCPUs of one VM they are flushed, too, as in stock KVM.
        if here.last_vcpu.load(Relaxed) != self.cold.id {
            here.last_vcpu.store(self.cold.id, Relaxed);
            self.forget_told();
            if hostcpu::ibpb_on_switch() {
                self.cpu.wrmsr(msr::PRED_CMD, 1);
            }
        }
        if self.extended {
            self.load_extended();
        }
        if self.cold.debug.owned() {
            self.load_debug_regs();
        }
        self.sync_tsc_aux();
        self.sync_syscall();
        // SWAPGS changes the guest's without an exit: it is live, and read back at the end.
        self.kernel_gs_base.enter(self.host.user_gs_base);
        self.kernel_gs_base.sync(&mut self.cpu);
        // An exit clears DEBUGCTL (SDM vol. 3C §28.5.1), and the host may trace branches.
        // The host's value is read each time: perf and ptrace change it.
        self.cold.host_debugctl = self.cpu.rdmsr(msr::DEBUGCTL);
        if self.features.spec_ctrl {
            self.switch.host_spec_ctrl = hostcpu::host_spec_ctrl();
        }
        self.stop_counters();
        // Last of the registers: a fault in kernel code would overwrite it.
        self.cpu.set_cr2(self.cr2);
        if mitigations::flush_wanted() {
            self.attention |= attention::FLUSH_L1D;
        }
    }

    #[inline]
    fn complete(&mut self, gprs: &mut Gprs) {
        gprs.0[RSP] = self.get(fields::GUEST_RSP);
    }

    fn unload(&mut self, onward: Onward) {
        if self.attention & attention::OFF != 0 {
            self.attention &= !attention::OFF;
            return;
        }
        // While VMREAD still reaches the VMCS.
        self.know_for_outside();
        // A fault of the kernel's would overwrite it from here on.
        self.cr2 = self.cpu.cr2();
        self.vmcs.launched.set(self.switch.flags & VmxSwitch::LAUNCHED != 0);
        self.kernel_gs_base.read_back(&mut self.cpu);
        // Before the selectors are loaded: see `load_host_selectors`.
        self.kernel_gs_base.leave(&mut self.cpu, self.host.user_gs_base);
        // Before anything of the kernel's may use XSAVE.
        if self.cold.extended.is_loaded() {
            self.unload_extended();
        }
        if self.cold.debug.owned() {
            self.save_debug_regs();
        }
        // Counters run again before the host's work is counted.
        if self.cold.perf_stopped {
            hostcpu::perf_leave();
        }
        self.vmcs.unload();
        // An exit leaves DR7 and DEBUGCTL disabled; a host that uses them gets them back.
        if self.cold.host_debugctl != 0 {
            self.cpu.wrmsr(msr::DEBUGCTL, self.cold.host_debugctl);
        }
        // An exit leaves DR7 without breakpoints and the GDT's limit at 64 KiB (§28.5): the kernel has others.
        hostcpu::left_vmx();
        if let Some(here) = self.vmcs.here() {
            // Before all that could fault: from here on the ways into the kernel are the kernel's, or somebody sees to that.
            match onward {
                Onward::ToGuest => here.user_return.left(&mut self.cpu),
                Onward::ToUser => here.user_return.left_for_user(&mut self.cpu),
            }
        }
        // Behind KERNEL_GS_BASE, and before interrupts: the kernel's own GS is in place all the time.
        self.restore_selectors();
        if let Some(here) = self.vmcs.here() {
            // Last: nothing may be read of it any more.
            self.vmcs.give_up_unnoted(&self.cpu, here);
        }
    }

    /// The kernel may fault on an address of its own; CR2 is the guest's.
    fn host_segments(&mut self) {
        // Of what an exit leaves the guest's this is what kernel code may change.
        self.cr2 = self.cpu.cr2();
    }

    fn guest_segments(&mut self) {
        self.cpu.set_cr2(self.cr2);
    }
}

impl<C: Cpu> Vmx<C> {
    /// Brings RSP, which a handler may have set, to the VMCS. Not known: nobody has looked at it since the exit, so it is the guest's
    /// own.
    #[inline(always)]
    pub(crate) fn put_rsp(&self, gprs: &Gprs) {
        if let Some(rsp) = self.vmcs.fields.get(fields::GUEST_RSP)
            && rsp != gprs.0[RSP]
        {
            self.set(fields::GUEST_RSP, gprs.0[RSP]);
        }
    }
}

impl<C: Cpu> Turn for Vmx<C> {
    #[inline]
    fn enter(&mut self, gprs: &mut Gprs) {
        self.put_rsp(gprs);
        // One comparison in nearly every entry.
        if self.attention != 0 {
            // Alone in most entries of a guest with a deadline: the cold function is not called for it.
            // Its own condition first: a deadline that has come makes the rest superfluous.
            if self.attention & attention::TIMER != 0 && !self.ensure_timer() {
                return self.exit_for_deadline();
            }
            // Behind the timer: nothing is done for an entry that does not take place.
            if self.attention & !attention::TIMER != 0 && !self.attend() {
                return self.refuse();
            }
        }
        let entered = self.cpu.vmx_enter(gprs, &mut self.switch);
        // All of the changing group by one store. Also where the entry failed: the fields are read again, once.
        self.vmcs.fields.forget();
        // The guest has run: what the VMCS says counts again.
        self.shadow_over.set(false);
        if !entered {
            return self.refuse();
        }
        // Not by the cache, which has just forgotten it: this read is always needed.
        let raw = self.cpu.vmread(fields::EXIT_REASON.encoding());
        self.vmcs.fields.learn(fields::EXIT_REASON, raw);
        let reason = raw as u32;
        // An entry that failed late has launched nothing, and injected nothing (SDM vol. 3C §27.8).
        if reason & ENTRY_FAILURE == 0 {
            self.switch.flags |= VmxSwitch::LAUNCHED;
            if self.attention & attention::INJECT != 0 {
                self.end_injection();
            }
        }
        // RSP is in the VMCS: the world switch neither loads nor saves it.
        if exits::needs_rsp(reason) {
            self.look_after_exit(reason, gprs);
        }
    }

    #[inline(always)]
    // Straight from the kept word: no look-up whether it is known.
    fn dispatch<S: Copy, A: Answer<Self, S>>(answer: &mut A, section: S) -> Option<A::Left> {
        let reason = answer.backend().raw();
        // An entry that failed has bits that no reason has.
        let Ok(reason) = u16::try_from(reason) else {
            let exit = answer.backend().exit();
            return answer.rare(section, exit);
        };
        match ExitReason(reason) {
            ExitReason::ExternalInterrupt => answer.frequent(section, Exit::Interrupt),
            ExitReason::Cpuid => answer.frequent(section, Exit::Cpuid),
            ExitReason::Wrmsr => answer.frequent(section, Exit::Wrmsr),
            ExitReason::Rdmsr => answer.frequent(section, Exit::Rdmsr),
            ExitReason::EptViolation => {
                let exit = answer.backend().ept_violation();
                answer.frequent(section, exit)
            }
            ExitReason::Io => {
                let exit = answer.backend().io();
                answer.frequent(section, exit)
            }
            ExitReason::Hlt => answer.frequent(section, Exit::Hlt),
            ExitReason::Vmcall => answer.frequent(section, Exit::Hypercall),
            ExitReason::PreemptionTimer => answer.frequent(section, Exit::Deadline),
            ExitReason::CrAccess => {
                let exit = answer.backend().cr_access();
                answer.frequent(section, exit)
            }
            _ => {
                let exit = answer.backend().exit();
                answer.rare(section, exit)
            }
        }
    }

    #[inline]
    fn next_rip(&self) -> Option<u64> {
        let (rip, length) =
            // An exit by an instruction tells its length (SDM vol. 3C §28.2.5).
            self.vmcs.get_both(&self.cpu, fields::GUEST_RIP, fields::INSTRUCTION_LENGTH);
        let next = rip.wrapping_add(u64::from(length));
        // Only a next RIP beyond 4 GiB asks for the mode of the code.
        Some(if (rip ^ next) >> 32 != 0 { self.wrapped(next) } else { next })
    }

    #[inline]
    fn retire(&mut self, next_rip: u64) {
        // The field has the shadow of before the instruction: that it is over is noted, and spares a VMWRITE.
        self.set(fields::GUEST_RIP, next_rip);
        self.shadow_over.set(true);
        if self.serving != Serving::No {
            self.attend_to_requests();
        }
    }
}

impl<C: Cpu> Vmx<C> {
    /// Outside 64-bit code RIP has 32 bits.
    #[cold]
    #[inline(never)]
    fn wrapped(&self, next: u64) -> u64 {
        // CS.L in IA-32e mode alone: else RIP wraps at 32 bits.
        let long = self.efer.is_long() && self.code_attributes() & attr::L != 0;
        if long { next } else { next & 0xffff_ffff }
    }

    /// Makes what was made from its TDP tables be forgotten, whatever the VPID.
    #[inline(never)]
    fn forget_tdp(&mut self) {
        // Combined translations go by the EPT pointer: which VPID they are under does not matter (§29.4.3.1).
        if self.features.invept_single {
            self.cpu.invept(invept::SINGLE, self.get(fields::EPT_POINTER));
            // L1 and L2 may both have translations from before.
            if let Some(other) = self.other_root() {
                self.cpu.invept(invept::SINGLE, other);
            }
        } else {
            // Where single contexts cannot be named, all go.
            self.cpu.invept(invept::ALL, 0);
        }
    }

    /// Another vCPU ran here. The CPU knows guest-physical translations by the root alone, which two vCPUs may have in common:
    /// if L1 was told of an access and has not entered L2 since, the other one may have filled in what this one is to forget.
    #[cold]
    #[inline(never)]
    fn forget_told(&mut self) {
        let l2_runs = self.cold.of_l1.runs;
        if self.nested.as_mut().is_some_and(|n| n.owes_told(l2_runs)) {
            self.flush_all_roots();
        }
    }

    /// What an entry does that is more than usual. False: it does not take place.
    #[cold]
    #[inline(never)]
    fn attend(&mut self) -> bool {
        // Before anything is changed: an entry that does not take place leaves its work for the next.
        if self.attention & (attention::OFF | attention::INTERPRET) != 0 {
            return false;
        }
        // Linear translations first, then those of the tables: either order would do, since the guest does not run.
        if self.attention & attention::FLUSH != 0 {
            self.attention &= !attention::FLUSH;
            self.vmcs.forget_translations(&self.cpu, &self.features);
        }
        if self.attention & attention::FLUSH_TDP != 0 {
            self.attention &= !attention::FLUSH_TDP;
            // Without EPT the bit stands for nothing: `flush_tdp` asks for the other one there.
            if self.features.ept {
                self.forget_tdp();
            }
        }
        if self.attention & attention::OFFER != 0
            && let Some(vector) = self.offer.vector
        {
            if self.nmi_behind != NmiBehind::Nothing {
                // What the VMCS says of a shadow that is over would keep the window shut.
                self.clear_ended_shadow();
            }
            // Injected where the guest can take it at this entry; else the window tells when it can.
            // As an entry demands of an injected interrupt (SDM vol. 3C §27.3.1.4, §27.3.1.5).
            let open =
                // An event of its own goes first: an entry injects one.
                !self.injecting()
                    && self.rflags().contains(Rflags::IF)
                    && !self.is_shadowed()
                    // An NMI goes first, which the window is opened for as well.
                    && self.nmi_behind == NmiBehind::Nothing;
            if open {
                // What the field says of a shadow that is over would have the entry refused.
                self.clear_ended_shadow();
                self.offer = Offer { vector: None, taken: true };
                self.attention = (self.attention & !attention::OFFER) | attention::INJECT;
                let info = event::VALID | event::INTR | u32::from(vector.0);
                self.set(fields::ENTRY_INTERRUPTION, info);
            }
            // Closed again where it is injected now: a window without a purpose ends each run at once.
            self.open_window(!open);
        }
        // Behind the offer, which ends the shadow itself where it can.
        if self.attention & attention::SHADOW != 0 {
            self.end_shadow_for_request();
        }
        // The guest makes its own shadows from here on.
        self.attention &= !attention::STI_GIVEN;
        // The last of all: what is loaded after it can leak.
        if self.attention & attention::FLUSH_L1D != 0 && mitigations::flush_before_entry() {
            self.attention &= !attention::FLUSH_L1D;
        }
        if self.attention & attention::CLEAR != 0 {
            self.cpu.verw();
        }
        true
    }

    /// The valid bit of what was injected is clear after an exit (SDM vol. 3C §28.2).
    #[cold]
    #[inline(never)]
    // Only in the cache: the CPU has cleared the bit already.
    fn end_injection(&mut self) {
        self.attention &= !attention::INJECT;
        let injected = self.get(fields::ENTRY_INTERRUPTION);
        self.vmcs.fields.learn(fields::ENTRY_INTERRUPTION, u64::from(injected & !event::VALID));
    }

    /// After the exits that are not plain instructions.
    #[inline(never)]
    fn look_after_exit(&mut self, reason: u32, gprs: &mut Gprs) {
        gprs.0[RSP] = self.get(fields::GUEST_RSP);
        // A failed entry has no exit's fields: what they hold is of the exit before.
        if reason & ENTRY_FAILURE == 0 {
            self.take_exit_events(reason);
        }
    }

    /// The entry failed without an exit, or could not be tried: nothing of the guest has changed.
    #[cold]
    #[inline(never)]
    // As the CPU would say it: who decodes the exit need not know that nothing was tried.
    fn refuse(&mut self) {
        if self.attention & (attention::OFF | attention::INTERPRET) == attention::INTERPRET {
            return self.vmcs.fields.learn(fields::EXIT_REASON, INVALID_STATE.into());
        }
        // With VMX off there is no VMCS to ask.
        self.refused = if self.vmcs.is_loaded() {
            self.cpu.vmread(field::INSTRUCTION_ERROR.encoding()) as u32
        } else {
            0
        };
        // A reason that no CPU has.
        self.vmcs.fields.learn(fields::EXIT_REASON, u64::from(exits::NOT_ENTERED));
    }

    /// Reads what the outer loop asks for after nearly every exit: outside, a read costs ten times as
    /// much.
    #[inline]
    fn know_for_outside(&self) {
        // In the loop it is a VMREAD; outside it is a VMPTRLD at worst.
        let reason = self.get(fields::EXIT_REASON);
        // RIP is known only if somebody has decoded: then it was a device's address.
        if reason == u32::from(ExitReason::EptViolation.0)
            && self.vmcs.fields.get(fields::GUEST_RIP).is_none()
        {
            // Memory, then, and not a device: the table is filled, and that is all.
            return;
        }
        // IF, for whoever looks whether an interrupt can be taken.
        let _ = self.get(fields::GUEST_RFLAGS);
        if reason == u32::from(ExitReason::Io.0) {
            let _ = self.get(fields::GUEST_RIP);
            let _ = self.get(fields::INSTRUCTION_LENGTH);
        } else if exits::may_be_inside_delivery(reason) {
            let _ = self.get(fields::IDT_VECTORING);
        }
    }
}
