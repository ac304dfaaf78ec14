//! The inner loop: inject, enter, look at the exit, answer it and enter again, with interrupts off
//! from beginning to end.
//!
//! Why there is a second loop inside KVM_RUN's. Most exits are answered in a few hundred instructions:
//! CPUID, an MSR, a control register, a write to the local APIC. Around such an answer the way out to the
//! preemptible kernel and back is dearer than the answer: the host's segments, FPU and XCR0 go in, the
//! guest's come back, and everything is asked that might have changed meanwhile. So the guest's state
//! stays loaded here, and an answer costs the world switch and itself.
//!
//! Why nothing is looked at between two entries: no request, no signal, no `need_resched`. Whatever
//! becomes pending comes with an IPI or a timer interrupt while the mode is `InGuest`
//! ([`vm::vcpu_shared`]), interrupts are off, and so it ends the next entry at once (docs/adr/0005). It
//! does that at the boundary of an instruction; turns that may not reach one are bounded
//! ([`Stalls`](crate::run::events::Stalls)). Two things are pending without an interrupt: what the answer
//! itself made so, which it says by [`Pending::raise`](crate::run::pending::Pending::raise), and what
//! a call into the kernel left, a kick of the vCPU by itself among it, for which [`Vcpu::with_kernel`] looks.
//!
//! What may not be done here, for that reason: allocate, sleep, fault, execute CPUID, write an MSR with
//! the value that it has, call through a pointer. Each has its budget in `tests/budget.rs`. Guest memory
//! is read by way of the tables that are there ([`mmu::View`]); a page that is missing, an instruction
//! that has to be emulated, a device of the VMM's are left to [`handle`](Vcpu::handle), outside. An
//! answer that finds in the middle that it cannot go on has changed nothing yet, and says
//! [`Next::Leave`].
//!
//! Which exit is whose is in [`table`](crate::exits::table). The backend compares the exit's code and
//! calls [`Answer::frequent`] with a constant, so that the answer is compiled into the place of that
//! comparison; that is why the handlers of frequent exits are inlined and the others are not.

use backend::{Backend, Exit, Onward};
use cpuid::DynamicInputs;
use host::{irq, task, trace};
use mmu::Section;
use stats::VcpuCount;
use vm::vcpu_shared::{SharedVcpu, VcpuShared};
use x86::{Cr4, Dr6, Exception, Rflags};

use crate::{
    Vcpu,
    exits::device::Device,
    run::{
        events::{KernelCalls, Outer},
        given::{Given, Settled},
        outcome::{Left, Next, Other},
        pending::Pending,
    },
    state::debug::Debug,
};

/// The machine state that CPUID shows.
#[inline]
pub(crate) fn dynamic_inputs(b: &impl Backend, shared: &SharedVcpu) -> DynamicInputs {
    let cr4 = b.cr4_shown();
    DynamicInputs {
        cr4_osxsave: cr4.contains(Cr4::OSXSAVE),
        cr4_pke: cr4.contains(Cr4::PKE),
        apic_enabled: shared.lapic.enabled(),
        xcr0: b.xcr0(),
        xss: b.xss(),
    }
}

/// Whether the loop is left for an exit that most likely ends KVM_RUN.
#[inline]
fn onward(left: &Left, device: &Device, shared: &VcpuShared) -> Onward {
    // A wrong guess costs a few writes of lent MSRs, and nothing else.
    let ends = match left {
        Left::Exit(Exit::Io(_)) => true,
        // The loop decodes an access to the page of the last device access, and that most likely is
        // one as well.
        Left::Exit(Exit::TdpFault(_)) => device.seen.is_decoded(),
        // A VMM whose local APIC is its own hears of every HLT.
        Left::Exit(Exit::Hlt) => !shared.in_kernel_apic,
        _ => false,
    };
    if ends { Onward::ToUser } else { Onward::ToGuest }
}

/// Turns interrupts off on a CPU that holds the control block, or can: has the one that does give
/// it up.
#[inline]
fn disable_interrupts(b: &mut impl Backend) -> irq::Off {
    loop {
        let off = irq::disable();
        if b.may_run_on(off.cpu()) {
            return off;
        }
        // That CPU has to answer an IPI. Two that wait for each other with interrupts off would do so for ever.
        irq::enable(off);
        b.release_elsewhere();
    }
}

/// What an interrupt waited for has come: it is looked for again, and the window closed.
pub(crate) fn answer_interrupt_window(b: &mut impl Backend, pending: &mut Pending) -> Next {
    // Left open it would exit at every instruction from now on.
    b.set_interrupt_window(false);
    pending.raise();
    // A VMM with its own PIC may be waiting for just this.
    if pending.window_wanted { Next::Done } else { Next::Again }
}

/// What an NMI waited for has come, or begins.
pub(crate) fn answer_nmi_window(b: &mut impl Backend, pending: &mut Pending) -> Next {
    b.iret_begun();
    pending.raise();
    Next::Again
}

/// An access of a debug register is executed again, with the guest's registers in place; unless
/// the VMM uses them.
#[cold]
pub(crate) fn answer_debug_reg(b: &mut impl Backend, debug: &Debug) -> Next {
    if debug.control != 0 {
        return Next::Leave;
    }
    b.own_debug_regs();
    Next::Again
}

impl<B: Backend> Vcpu<B> {
    /// Runs the guest until an exit has to be handled outside. `None`: something was pending before the
    /// first entry.
    pub(crate) fn enter_guest(&mut self) -> Option<Left> {
        let off = disable_interrupts(&mut self.b);
        // The mode first, then the look. The other way round a request that comes between the two is not seen, and
        // nobody sends an IPI for it ([`vm::kick`]).
        let entered = self.shared.enter_mode(off);
        // Signals and `need_resched` too: what came before interrupts went off has no interrupt
        // left to tell of it.
        if self.shared.has_requests() || task::work_pending() {
            irq::enable(self.shared.leave_mode(entered));
            return None;
        }
        // Guest memory may be looked at from here on: who withdraws translations waits for the
        // mode.
        let s = entered.section();
        // Not before: a KVM_RUN that enters nobody settles nothing, for the rest of a restore may come behind it.
        if (self.rare.given.any() || self.rare.nested_restored)
            && self.settle_given() == Settled::SmiIsNext
        {
            irq::enable(self.shared.leave_mode(entered));
            return None;
        }
        // Interrupts that arrived until now are in the IRR; later ones come with an IPI.
        if self.pending.is_raised()
            || self.shared.lapic.maybe_pending()
            || self.vm.irq().extint_pending()
        {
            if !self.inject_pending(s, KernelCalls::Allowed) {
                irq::enable(self.shared.leave_mode(entered));
                return None;
            }
            // An end of interrupt that the PIC makes by itself may have kicked this very vCPU, which no IPI tells, and
            // which would mute the kicks of others; or woken a thread for this CPU. The run ends at its first
            // instruction, and all is looked at.
            if self.shared.is_kicked() || task::work_pending() {
                host::smp::kick(entered.cpu());
            }
        }
        // Behind the injection: the flag is offered for the vector that goes in now.
        self.offer_pv_eoi(s, self.pending.after_exit.offered());
        // A softirq may have borrowed the registers since the run began.
        host::fpu::ensure_in_registers();
        // RCU and time accounting use per-CPU data, so before the guest's segments are loaded.
        let in_guest = irq::guest_enter();
        // Behind the last call of the kernel's. Under SVM nothing of the host's may run from here to `unload`, not even
        // an NMI.
        self.b.load(entered.cpu());
        self.time.forget_clock();
        // Interrupts were on until a moment ago, which is all that the bound is for.
        self.rare.stalls.forget();
        // A KVM_RUN that enters no guest is none: the rest of a restore may still come behind it.
        self.rare.nested_restored = false;
        self.rare.given = Given::default();
        self.device.seen.forget_decoded();
        // A change of this interrupts every CPU, so it need not be read again inside.
        let watch = trace::observed();
        let left = if watch.any() && !self.begin_observation(watch) {
            Left::Other(Other::Quietly)
        } else {
            self.loop_until_left(s)
        };
        // Before the mode changes: who collects the dirty log waits for that, and has to find these
        // pages.
        if self.page_log {
            self.mmu.take_page_log(&mut self.b);
        }
        // The control block is still loaded: under VMX a read of it costs ten times as much outside.
        self.b.complete(&mut self.gprs);
        self.b.unload(onward(&left, &self.device, &self.shared));
        self.stats.count(VcpuCount::HostStateReload);
        // Only now: whoever withdraws translations waits for the mode, and until here guest memory was looked at by
        // them.
        let mut off = self.shared.leave_mode(entered);
        irq::guest_exit(in_guest, left.is_handled());
        if matches!(left, Left::Exit(Exit::MachineCheck)) {
            // With interrupts off, on the CPU that was hit.
            host::hostcpu::machine_check();
        }
        if left.is_handled() {
            // An interrupt is taken here; a tick among them counts as the guest's time.
            irq::window(&mut off);
            irq::guest_time_end();
        }
        irq::enable(off);
        if watch.any() {
            self.end_observation(&left);
        }
        Some(left)
    }

    #[inline]
    fn loop_until_left(&mut self, s: Section<'_>) -> Left {
        loop {
            debug_assert!(self.follows_l1_tables(), "L2 without the root of its tables");
            self.b.enter(&mut self.gprs);
            let left = 'answered: {
                // Whatever has a say before an exit gets its neutral form is one bit of this word.
                if self.pending.after_exit.any() {
                    if !self.pending.after_exit.is_looked_at() {
                        self.note_taken();
                    } else if let Some(next) = self.look_at_exit(s) {
                        break 'answered next.left_reflecting();
                    }
                }
                B::dispatch(self, s)
            };
            if let Some(left) = left {
                return left;
            }
            // An answer that cannot be injected here was given all the same.
            if self.pending.is_raised() && !self.inject_in_loop(s) {
                // The attempt took what was raised. It is looked for again outside.
                self.pending.raise();
                return Left::Other(Other::Quietly);
            }
        }
    }

    /// Right after an exit that is looked at. What became of it, unless it is to be answered as any other.
    #[cold]
    #[inline(never)]
    fn look_at_exit(&mut self, s: Section<'_>) -> Option<Next> {
        if self.pending.after_exit.is_observed() {
            self.observe_exit(s);
        } else {
            self.note_taken();
        }
        if self.pending.after_exit.is_nested() { self.reflect_in_loop(s) } else { None }
    }

    /// Prepares what an answer made deliverable. False: it is for the outer loop.
    #[inline]
    fn inject_in_loop(&mut self, s: Section<'_>) -> bool {
        if self.events.outer.any() {
            return self.observe_answer(s);
        }
        !self.mmu.is_unsettled() && self.inject_answer(s)
    }

    /// Injects what an answer made deliverable, with nothing else that waits.
    #[inline(always)]
    pub(crate) fn inject_answer(&mut self, s: Section<'_>) -> bool {
        // What the guest has ended by its flag would hold a lower interrupt back.
        if !self.collect_pv_eoi(s) || !self.inject_pending(s, KernelCalls::Forbidden) {
            return false;
        }
        self.offer_pv_eoi(s, self.pending.after_exit.offered());
        true
    }

    /// Runs `f` with the host's segment state, so that it may call the kernel, and looks at what
    /// such a call may have left without an interrupt.
    #[inline]
    pub(crate) fn with_kernel<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> (R, Next) {
        self.b.host_segments();
        // With the host's segments in place: RCU uses per-CPU data.
        let done = irq::guest_paused(|| {
            let result = f(self);
            // What the vCPU makes pending for itself sends no IPI, and would mute the kicks of others.
            let leaves = task::work_pending() || self.shared.is_kicked();
            (result, if leaves { Next::Done } else { Next::Again })
        });
        self.b.guest_segments();
        done
    }

    /// RIP of the next instruction: from the CPU, or by decoding what lies at RIP.
    #[inline]
    pub(crate) fn next_rip(&mut self, s: Section<'_>) -> Option<u64> {
        match self.b.next_rip() {
            Some(rip) => Some(rip),
            None => self.decode_next_rip(s),
        }
    }

    /// Moves past a handled instruction. A guest that single-steps gets its #DB.
    #[inline]
    pub(crate) fn retire(&mut self, next_rip: u64) {
        self.b.retire(next_rip);
        let rflags = self.b.rflags();
        // An instruction that completes clears RF (SDM vol. 3B §18.3.1.1). Nearly no guest has either flag set.
        if rflags.intersects(Rflags::TF | Rflags::RF) {
            self.retire_flags(rflags);
        }
    }

    #[cold]
    #[inline(never)]
    fn retire_flags(&mut self, rflags: Rflags) {
        self.b.set_rflags(rflags - Rflags::RF);
        if rflags.contains(Rflags::TF) {
            if self.rare.debug.single_step {
                // The VMM's step, not the guest's.
                self.events.outer.set(Outer::STEPPED, true);
                self.pending.raise();
            } else {
                self.raise(Exception::db(Dr6::BS));
            }
        }
    }

    pub(crate) fn answer_cpuid(&mut self, s: Section<'_>) -> Next {
        // The CPU exits before it would fault, so the fault is made here.
        if self.msrs.cpuid_faults && self.b.cpl() != 0 {
            self.raise(x86::Exception::gp(0));
            return Next::Again;
        }
        // Where the bytes cannot be had nothing was done yet; outside, the same begins anew with the VMM's mapping.
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        self.do_cpuid();
        self.retire(next);
        Next::Again
    }

    /// Executes CPUID on the guest's registers; RIP stays.
    #[inline]
    pub(crate) fn do_cpuid(&mut self) {
        let leaf = self.gprs.0[backend::RAX] as u32;
        let subleaf = self.gprs.0[backend::RCX] as u32;
        let (b, shared) = (&self.b, &self.shared);
        let hit = self.cpuid.hit(leaf, subleaf, || dynamic_inputs(b, shared));
        let [a, b, c, d] = match hit {
            Some(answer) => answer,
            None => self.look_up_cpuid(leaf, subleaf),
        };
        self.gprs.0[backend::RAX] = a.into();
        self.gprs.0[backend::RBX] = b.into();
        self.gprs.0[backend::RCX] = c.into();
        self.gprs.0[backend::RDX] = d.into();
    }

    /// A CPUID exit whose answer is not at hand.
    #[cold]
    #[inline(never)]
    fn look_up_cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let inputs = dynamic_inputs(&self.b, &self.shared);
        self.cpuid_inputs_changed();
        let answer = self.cpuid.lookup(leaf, subleaf, &inputs);
        self.count_cpuid_updates();
        answer
    }

    #[inline(always)]
    pub(crate) fn answer_nothing(&mut self, s: Section<'_>) -> Next {
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        self.retire(next);
        Next::Again
    }

    /// An instruction that ends in a fault.
    #[cold]
    #[inline(never)]
    pub(crate) fn answer_by(&mut self, exception: Exception) -> Next {
        self.raise(exception);
        Next::Again
    }

    /// MONITOR and MWAIT do nothing: a wait may end at any time (SDM vol. 2B "MWAIT").
    #[cold]
    pub(crate) fn answer_mwait(&mut self, s: Section<'_>) -> Next {
        if self.mwait_is_undefined() {
            self.raise(x86::Exception::ud());
            return Next::Again;
        }
        self.answer_nothing(s)
    }

    /// HLT with an interrupt pending goes on at once; else the vCPU sleeps outside, its instruction
    /// retired here, where that is cheap.
    pub(crate) fn answer_hlt(&mut self, s: Section<'_>) -> Next {
        // An interrupt that the flag has ended may let in the one that ends this halt.
        if !self.collect_pv_eoi(s) {
            return Next::Leave;
        }
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        // HLT has retired when it waits: the handler of what wakes the guest returns behind it.
        self.retire(next);
        self.pending.hlt_retired = true;
        let l2 = self.pending.after_exit.is_nested();
        // What wakes an L2, and who hears that it halts, is asked outside.
        if !self.shared.in_kernel_apic || !self.b.rflags().contains(Rflags::IF) || l2 {
            return Next::Leave;
        }
        self.sync_priority();
        if !self.interrupt_waits() {
            return Next::Leave;
        }
        self.pending.hlt_retired = false;
        self.pending.raise();
        Next::Again
    }
}
