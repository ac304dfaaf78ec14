//! KVM_RUN: the outer loop. Preemptible; here a vCPU finishes what user space answered, sleeps,
//! takes requests and signals, and leaves.

pub(crate) mod after_exit;
pub(crate) mod events;
pub(crate) mod given;
pub(crate) mod inner;
pub(crate) mod outcome;
pub(crate) mod pending;
pub mod user_exit;

use backend::{Backend, Exit, PageLog};
use host::task::{self, Blocked, Sleeper, WaitTimes};
use host::trace;
use irqchip::lapic::{Expiry, Lint0, base};
use stats::{VcpuCount, vcpu::HaltHistogram};
use vm::{
    settings::quirk,
    vcpu_shared::{MpState, Request},
};
use x86::{Reset, Rflags};

use crate::{
    Rare, Vcpu,
    exits::code::CodeState as _,
    nested::events::tell_activity,
    run::events::{Outer, Waits, interrupts_open},
    run::outcome::{Break, Left, Other, Outcome},
    run::user_exit::{ErrorData, RunInput, RunOutput, UserExit},
};

/// A vCPU that has nothing to do.
struct Waiting<'a, B: Backend> {
    vcpu: &'a mut Vcpu<B>,
    /// By HLT, so that interrupts wake it.
    halted: bool,
    /// It looks for a while before it falls asleep.
    polls: bool,
    /// The CPU watched its deadline before it fell asleep.
    hv_timer: bool,
}

impl<B: Backend> Sleeper for Waiting<'_, B> {
    fn is_ready(&mut self) -> bool {
        if self.halted {
            // The CPU's timer counts only while the guest runs, and no host timer is armed before the thread sleeps.
            self.vcpu.expire_while_polling();
        }
        // Not of halted ones alone: a vCPU that waits for a SIPI has to hear that its VM is dead.
        self.vcpu.shared.has_requests()
            || (self.halted
                && (self.vcpu.ends_halt()
                    || self.vcpu.nested_timer_is_due()
                    || self.vcpu.is_kicked_awake()))
            || self.vcpu.shared.has_init_sipi()
    }

    fn falls_asleep(&mut self) {
        // Not before the thread polls: a halt that polling ends has armed nothing.
        self.hv_timer = self.halted && self.vcpu.switch_to_sw_timer();
        if self.halted {
            self.vcpu.arm_nested_wake();
        }
        self.vcpu.shared.stats.set(VcpuCount::Blocking, 1);
    }

    /// The CPU watches the deadline again, and a halt is counted.
    fn ends(&mut self, how: Blocked, times: WaitTimes) {
        let vcpu = &mut *self.vcpu;
        let slept = matches!(how, Blocked::Slept | Blocked::Signal);
        if slept {
            vcpu.stats.set(VcpuCount::Blocking, 0);
        }
        if self.hv_timer {
            // Asked for and not remembered: it may have been written or have expired during the sleep.
            match vcpu.shared.lapic.switch_to_hv_timer() {
                Expiry::Never => {}
                next => vcpu.arm_hv_timer(next, None),
            }
        }
        if !self.halted {
            return;
        }
        vcpu.rare.disarm_nested_wake();
        let stats = &vcpu.stats;
        let add = |what, which, ns| {
            stats.add(what, ns);
            stats.halt(which).count(ns);
        };
        if self.polls {
            stats.count(VcpuCount::HaltAttemptedPoll);
            if slept {
                add(VcpuCount::HaltPollFailNs, HaltHistogram::PollFail, times.polled_ns);
            } else {
                stats.count(VcpuCount::HaltSuccessfulPoll);
                add(VcpuCount::HaltPollSuccessNs, HaltHistogram::PollSuccess, times.polled_ns);
            }
        }
        if slept {
            add(VcpuCount::HaltWaitNs, HaltHistogram::Wait, times.slept_ns);
        }
        if how == Blocked::Slept {
            stats.count(VcpuCount::HaltWakeup);
        }
    }
}

impl Rare {
    /// What KVM_RUN returns for an error of this kind; `data` is what accompanies it.
    #[cold]
    #[inline(never)]
    pub(crate) fn internal_error(&mut self, suberror: u32, data: ErrorData) -> Break {
        self.error = data;
        UserExit::InternalError { suberror }.into()
    }
}

impl<B: Backend> Vcpu<B> {
    /// Runs the guest until user space is needed.
    pub fn run(&mut self, input: &RunInput) -> UserExit {
        // One look for the whole call: what is told of its beginning is told of its end.
        let watch = trace::observed();
        if watch.any() {
            self.observe_call(input, watch);
        }
        // Before the first sleep. A VMM kicks by a signal that it has blocked outside of KVM_RUN (KVM_SET_SIGNAL_MASK).
        let _mask = task::with_sigmask(self.rare.signal_mask);
        if let Err(Break::ToUser(exit)) = self.wait_for_start(input) {
            return exit;
        }
        if let Some(cr8) = input.cr8 {
            self.set_priority_shown(cr8);
        }
        self.fpu.load();
        self.b.begin_run();
        let exit = self.run_until_exit(input);
        self.rare.has_run = true;
        // User space may not come back for long, and a device waits for this end of interrupt.
        if self.events.outer.has(Outer::OWING) {
            self.events.tell_resamplers(&self.vm);
        }
        self.fpu.put();
        // KVM_GET_LAPIC and KVM_SET_LAPIC may come next. They see the priority that the guest set without an exit, and
        // an offered vector in the IRR again.
        self.sync_priority();
        self.withdraw_offer();
        self.stats.count(VcpuCount::UserExits);
        if let Some(what) = exit.counted_as() {
            self.stats.count(what);
        }
        if watch.any() {
            self.observation.observe_return(&self.device, &exit, watch);
        }
        exit
    }

    /// Completes what user space was asked for, and runs the guest.
    #[inline(always)]
    fn run_until_exit(&mut self, input: &RunInput) -> UserExit {
        // Before `immediate_exit` is looked at: a VMM sets that to have an access completed and nothing else executed,
        // so that the state can be saved (KVM API §5).
        if let Err(Break::ToUser(exit)) = self.complete_user_io(input) {
            return exit;
        }
        if input.immediate_exit {
            // As on stock KVM the step over what was completed is told, and not at a later call.
            return self.take_step().unwrap_or(UserExit::Immediate);
        }
        self.run_loop(input)
    }

    /// What a return from [`Vcpu::run`] shows beside the reason.
    #[inline]
    pub fn run_output(&self) -> RunOutput {
        if self.pending.gated {
            let (ready, cr8) = self.run_output_gated();
            return self.output(ready, cr8);
        }
        // With a PIC in the kernel KVM_INTERRUPT is refused, so there is nothing to be ready for.
        let ready = self.vm.irq().has_pic()
            || interrupts_open(&self.b) && self.events.has_room_for_external(&self.shared);
        self.output(ready, self.b.cr8())
    }

    /// Where L1 has a say in it: whether user space may inject an interrupt, and the task priority.
    #[cold]
    #[inline(never)]
    fn run_output_gated(&self) -> (bool, u8) {
        (self.vm.irq().has_pic() || self.ready_for_injection(), self.priority_shown())
    }

    #[inline(always)]
    fn output(&self, ready: bool, cr8: u8) -> RunOutput {
        RunOutput {
            ready_for_interrupt_injection: ready,
            if_flag: self.b.rflags().contains(Rflags::IF),
            cr8: cr8.into(),
            apic_base: self.shared.lapic.base(),
            smm: self.smm.active,
        }
    }

    /// What accompanies the last [`UserExit::InternalError`].
    pub fn error_data(&self) -> &ErrorData {
        &self.rare.error
    }

    /// An application processor sleeps until it is started.
    fn wait_for_start(&mut self, input: &RunInput) -> Outcome {
        if self.shared.mp_state() != MpState::Uninitialized {
            return Ok(());
        }
        if input.immediate_exit {
            return Err(UserExit::Immediate.into());
        }
        let shared = self.shared.clone();
        // Nothing else wakes it: interrupts and NMIs are for a processor that was started.
        let blocked = shared.waiter.block(|| shared.has_init_sipi(), 0);
        if blocked == Blocked::Signal {
            return Err(UserExit::Intr.into());
        }
        self.take_start_signals();
        // As on stock KVM, KVM_RUN returns once more before a started processor runs.
        Err(UserExit::Again.into())
    }

    /// INIT and SIPI.
    pub(crate) fn take_start_signals(&mut self) {
        let (init, sipi) = self.shared.take_init_sipi();
        // The entry comes first: one whose list is refused has left nobody who waits.
        if self.l2_waits_for_sipi() && !self.fail_at_list() {
            return self.start_l2(sipi);
        }
        if self.smm.active || (init && self.holds_init()) {
            // INIT waits for the end of the mode, or for its hypervisor; a SIPI is lost.
            self.smm.latched_init |= init;
            return;
        }
        if init {
            let bsp = self.reset_by_init();
            // A bootstrap processor waits for no SIPI: it goes on at the reset vector (SDM vol. 3A §9.4).
            self.shared.set_mp_state(if bsp { MpState::Runnable } else { MpState::InitReceived });
        }
        // A SIPI that finds nobody waiting is lost. The usual sequence sends two, and the second one finds the CPU
        // running.
        if let Some(page) = sipi
            && self.shared.mp_state() == MpState::InitReceived
        {
            // Limit and attributes stay as INIT left them (SDM vol. 3A §9.4).
            let mut cs = self.b.segment(backend::SegmentName::Cs);
            cs.selector = u16::from(page.0) << 8;
            cs.base = u64::from(page.0) << 12;
            self.b.set_segment(backend::SegmentName::Cs, cs);
            self.b.set_rip(0);
            self.shared.set_mp_state(MpState::Runnable);
        }
    }

    /// Resets registers and local APIC as INIT does. Whether it is the bootstrap processor's.
    pub(crate) fn reset_by_init(&mut self) -> bool {
        // Requests and what is in service may lie with the hardware, and would come back from there after the
        // reset.
        self.gather_interrupts();
        self.reset_registers(Reset::Init);
        self.forget_lazy_deadline();
        self.pv.forget_pages();
        let _ = self.shared.take_unhalt();
        let bsp = self.shared.lapic.base() & base::BSP != 0;
        // As stock KVM has it a bootstrap processor's LINT0 stays open to the PIC. A CPU masks it at INIT.
        let enabled = bsp && self.vm.settings.has_quirk(quirk::LINT0_REENABLED);
        let lint0 = if enabled { Lint0::ExtInt } else { Lint0::Masked };
        self.shared.lapic.init(lint0);
        self.vm.irq().apic_changed();
        self.address_changed();
        self.publish_priority();
        bsp
    }

    fn run_loop(&mut self, input: &RunInput) -> UserExit {
        // With our PIC KVM_INTERRUPT is refused, so there is no moment to wait for.
        self.pending.window_wanted = input.request_interrupt_window && !self.vm.irq().has_pic();
        if self.pending.window_wanted {
            self.pending.raise();
        }
        loop {
            if let Err(Break::ToUser(exit)) = self.run_once() {
                return exit;
            }
        }
    }

    /// Enters the guest, unless something else is to be done first, and handles what it is left for.
    #[inline(always)]
    fn run_once(&mut self) -> Outcome {
        self.before_entry()?;
        match self.enter_guest() {
            None => {
                // With a signal the VMM has the word; for a reschedule alone the loop goes on.
                if task::handle_work().is_err() {
                    // User space may save the state now, and what is prepared for an entry is no part of it.
                    let own = !self.shared.in_kernel_apic && !self.pending.after_exit.is_nested();
                    let waits = if own { Waits::Anew } else { Waits::First };
                    self.events.take_back_injection(&mut self.b, waits);
                    // VMRUN prepares its event without a look for others, and what is taken back is looked for.
                    self.pending.raise();
                    return Err(UserExit::Intr.into());
                }
                Ok(())
            }
            Some(Left::Other(Other::Quietly) | Left::Exit(Exit::Interrupt)) => {
                // What it says of stalled turns is for the loop, which was left anyway.
                let _ = self.keep_interrupted_delivery();
                // Before anybody looks at the local APIC: the guest may have ended an interrupt there by its flag.
                self.take_pv_eoi();
                Ok(())
            }
            Some(Left::Other(Other::Reflect)) => {
                // An interrupted delivery is not kept yet: if the exit is L1's, L1 has to hear of it.
                self.take_pv_eoi();
                self.reflect_outside()
            }
            Some(Left::Exit(ref exit)) => {
                let _ = self.keep_interrupted_delivery();
                self.take_pv_eoi();
                self.handle(exit)
            }
        }
    }

    /// Everything to be looked at before the guest may be entered.
    fn before_entry(&mut self) -> Outcome {
        // It may ask for the clock. The host may have come to keep time by another one while the VMM waits for KVM_RUN.
        self.follow_host_clock();
        // First, since each of them may change what is looked at below.
        if self.shared.has_requests() {
            self.take_requests()?;
        }
        if self.events.outer.any() {
            self.leave_with_event()?;
        }
        // Before a sleep: what wakes a halted guest may be the very interrupt that the VMM waits to give.
        if self.pending.window_wanted && self.ready_for_injection() {
            self.pending.window_wanted = false;
            return Err(UserExit::IrqWindowOpen.into());
        }
        if self.shared.mp_state() != MpState::Runnable {
            self.sleep()?;
            // An SMI may have ended the sleep, and is taken before the guest goes on.
            if self.events.outer.any() {
                self.leave_with_event()?;
            }
        }
        self.settle_shadow();
        // As late as possible: everything above may change the registers that the root follows from.
        if self.mmu.roots.is_due() && self.switch_root().is_err() {
            return Err(UserExit::MemoryFault { flags: 0, gpa: 0, size: 0 }.into());
        }
        // Last, so that the time the thread waited in here is told as stolen.
        self.before_entry_pv();
        Ok(())
    }

    /// Does what [`Outer`] tells of.
    #[cold]
    #[inline(never)]
    fn leave_with_event(&mut self) -> Outcome {
        // Before all returns below.
        if self.events.outer.has(Outer::OWING) {
            self.events.tell_resamplers(&self.vm);
        }
        // Before what may end L2's run. Not taken: what is left to be restored is tried again.
        if self.events.outer.has(Outer::NESTED) {
            self.finish_restore()?;
        }
        if self.events.outer.take(Outer::TRIPLE_FAULT) && !self.gives_triple_fault_to_l1() {
            return Err(UserExit::Shutdown.into());
        }
        if let Some(stepped) = self.take_step() {
            return Err(stepped.into());
        }
        if self.events.outer.take(Outer::NESTED) {
            self.end_l2_outside();
        }
        if self.events.outer.take(Outer::EOI) {
            return Err(UserExit::IoapicEoi { vector: self.rare.ended.0 }.into());
        }
        if self.events.outer.take(Outer::SET_TPR) {
            return Err(UserExit::SetTpr.into());
        }
        self.take_smi()
    }

    /// The step that the VMM has made over an instruction that was carried out here.
    #[cold]
    #[inline(never)]
    fn take_step(&mut self) -> Option<UserExit> {
        if !self.events.outer.take(Outer::STEPPED) {
            return None;
        }
        let [.., dr7] = self.b.debug_regs();
        let pc = self.b.linear_rip();
        // DR6.BS with the bits that are always set.
        Some(UserExit::Debug { exception: 1, pc, dr6: 0xffff_4ff0, dr7 })
    }

    /// Whether another vCPU has woken this one from its HLT, or spares it the next, whatever interrupts it lets in
    /// (KVM_HC_KICK_CPU). It is L1 that asks for that: L2's halt goes on.
    pub(crate) fn is_kicked_awake(&self) -> bool {
        self.shared.is_unhalted() && !self.pending.after_exit.is_nested()
    }

    fn take_requests(&mut self) -> Outcome {
        let requests = self.shared.take_requests();
        let has = |r: Request| requests & r as u32 != 0;
        // A dead VM's guest never runs again: the other requests are of no use.
        if has(Request::Dead) {
            return Err(UserExit::Dead.into());
        }
        if has(Request::FlushTlb) {
            self.stats.count(VcpuCount::TlbFlush);
            // With shadow pages the hardware walks one level of tables and knows no nested
            // translations.
            if self.mmu.roots.is_shadow() {
                self.b.flush_tlb();
            } else {
                self.b.flush_tdp();
            }
        }
        if has(Request::Clock) {
            self.publish_clock();
        }
        if has(Request::Deadline) {
            self.expire_lazy_deadline();
        }
        if has(Request::PageLog) {
            self.page_log = self.vm.wants_page_log();
            if let Some(log) = self.b.page_log() {
                // Nobody but the vCPU's own thread may write its control block.
                log.set_logging(self.page_log);
            }
        }
        if has(Request::Device) && self.vm.device_reach.is_reached() {
            self.b.reaches_device();
        }
        if has(Request::StealTime) {
            self.take_pv_flush();
        }
        if has(Request::MsrFilter) {
            self.follow_msr_filter();
        }
        if has(Request::Smi) {
            self.smi_arrived();
        }
        if has(Request::Routes) {
            self.follow_routes();
        }
        // Who kicks need not say for what: everything is looked for.
        if has(Request::Event) {
            self.stats.count(VcpuCount::ReqEvent);
            self.pending.raise();
            if self.shared.has_init_sipi() {
                self.take_start_signals();
            }
        }
        Ok(())
    }

    /// Sleeps until there is something to do. Out of line: what it keeps in registers would be taken
    /// from the loop.
    #[inline(never)]
    fn sleep(&mut self) -> Outcome {
        loop {
            // One that is held back ends no halt.
            if self.shared.has_init_sipi() {
                self.take_start_signals();
            }
            match self.shared.mp_state() {
                MpState::Runnable => return Ok(()),
                MpState::Halted
                    if self.ends_halt() || self.nested_timer_is_due() || self.is_kicked_awake() =>
                {
                    if self.pending.after_exit.is_nested() && !self.wake_l2() {
                        if self.events.outer.any() {
                            self.leave_with_event()?;
                        }
                        // Notifications may come without end.
                        if task::handle_work().is_err() {
                            return Err(UserExit::Intr.into());
                        }
                        continue;
                    }
                    self.shared.set_mp_state(MpState::Runnable);
                    // As on stock KVM a kick counts for one wake, whatever else has woken the vCPU.
                    if self.is_kicked_awake() {
                        let _ = self.shared.take_unhalt();
                    }
                    // What has ended the halt is yet to be injected.
                    self.pending.raise();
                    return Ok(());
                }
                // L2 was entered to halt: nothing here could wake it.
                MpState::Halted
                    if !self.shared.in_kernel_apic && self.pending.after_exit.is_nested() =>
                {
                    self.shared.set_mp_state(MpState::Runnable);
                    tell_activity(&mut self.b, self.shared.mp_state());
                    return Err(UserExit::Hlt.into());
                }
                MpState::Halted
                | MpState::Uninitialized
                | MpState::InitReceived
                | MpState::SipiReceived => {}
            }
            let halted = self.shared.mp_state() == MpState::Halted;
            // A guest that polls before it halts wants no more of it.
            let may_poll = halted && !self.pv.guest_polls();
            let poll = if may_poll { self.vm.halt_poll_ns() } else { 0 };
            // Whether something ends the halt is asked of the local APIC, which knows only the priority that it was
            // told.
            self.sync_priority();
            let shared = self.shared.clone();
            let polls = poll != 0;
            let mut waiting = Waiting { vcpu: self, halted, polls, hv_timer: false };
            let blocked = shared.waiter.wait(&mut waiting, poll);
            // The state stays halted: the next KVM_RUN sleeps on.
            if blocked == Blocked::Signal {
                return Err(UserExit::Intr.into());
            }
            if self.shared.has_requests() {
                self.take_requests()?;
            }
            // A wait that ends at once has looked at no signal: what ends it may be there again and again.
            if task::handle_work().is_err() {
                return Err(UserExit::Intr.into());
            }
        }
    }
}
