//! The VMCS's content as the run loop sees it: [`Backend`] for [`Vmx`].
//!
//! What the guest owns is not intercepted: CR3, CR8 (by the TPR shadow), INVLPG, INVPCID, RDTSC, and
//! the bits of CR0 and CR4 that [`crate::controls`] tells of.

use backend::{
    Answer, Backend, ControlRegs, Event, Exit, FewerExits, Gprs, GuestLimits, NmiWindow, NotMine,
    Paging, RSP, SegmentName, TSC_RATIO_ONE, scale_tsc,
};
use cpu::Cpu;
use x86::{
    Dr6, Dr7, Gpa, Hpa, Vector,
    apic::{Interrupts, VectorWords},
    msr,
    segment::{DescriptorTable, Segment},
    vmcs::{EntryControls, ExitReason, ProcControls, ProcControls2},
};

use crate::{
    apicv::Serving,
    controls::{CORE_RESIDENCY, LIVE, TSC},
    enter::{Vmx, attention},
    exits, fields, inject,
    page_log::PageLog,
    segments,
    speculation::SPECULATION,
};

const CR0_ET: u64 = 1 << 4;
/// What VMX fixes to 1, but not for a guest that may run without paging and protection.
const CR0_PG_PE: u64 = (1 << 31) | 1;
const CR4_UMIP: u64 = x86::Cr4::UMIP.bits();
const CR4_OSXSAVE: u64 = 1 << 18;
const EFER_LMA: u64 = 1 << 10;
/// Fractional bits that the TSC multiplier has more than our ratio.
const MULTIPLIER_SHIFT: u32 = 48 - 32;
/// DEBUGCTL: record branches; single-step on branches.
const DEBUGCTL_LBR: u64 = 1 << 0;
const DEBUGCTL_BTF: u64 = 1 << 1;

impl<C: Cpu> Backend for Vmx<C> {
    const SETTLES: bool = true;
    const LOADS_PDPTES: bool = true;
    const KEEPS_STATE_AT_SHUTDOWN: bool = true;
    const WATCHES_DEADLINES: bool = true;

    fn settled(&self, here: usize) -> bool {
        self.vmcs.may_run_on(here)
    }

    fn settle(&mut self) {
        self.vmcs.clear_elsewhere();
    }

    fn load(&mut self, here: usize) {
        self.load_state(here);
    }

    fn unload(&mut self, to_user: bool) {
        self.unload_state(to_user);
    }

    /// The kernel may fault on an address of its own; CR2 is the guest's.
    fn host_segments(&mut self) {
        self.cr2 = self.cpu.cr2();
    }

    fn guest_segments(&mut self) {
        self.cpu.set_cr2(self.cr2);
    }

    fn begin_run(&mut self) {
        self.new_run();
    }

    #[inline]
    fn enter(&mut self, gprs: &mut Gprs) {
        self.enter_and_exit(gprs);
    }

    #[inline]
    fn complete(&mut self, gprs: &mut Gprs) {
        gprs.0[RSP] = self.get(fields::GUEST_RSP);
    }

    fn exit(&self) -> Exit {
        self.decode()
    }

    #[inline(always)]
    fn dispatch<S: Copy, A: Answer<Self, S>>(answer: &mut A, section: S) -> Option<Exit> {
        // Read by the exit itself.
        let reason = answer.backend().vmcs.fields.last(fields::EXIT_REASON);
        // An entry that failed has bits that no reason has.
        let Ok(reason) = u16::try_from(reason) else {
            let exit = answer.backend().decode();
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
                let exit = answer.backend().decode();
                answer.rare(section, exit)
            }
        }
    }

    fn exit_raw(&self) -> [u64; 3] {
        let reason = match self.get(fields::EXIT_REASON) {
            exits::NOT_ENTERED => self.refused,
            reason => reason,
        };
        let qualification = self.get(fields::EXIT_QUALIFICATION);
        [reason.into(), qualification, self.get(fields::GUEST_PHYSICAL_ADDRESS)]
    }

    #[inline]
    fn was_delivering(&self) -> bool {
        exits::may_be_inside_delivery(self.get(fields::EXIT_REASON))
            && self.get(fields::IDT_VECTORING) & x86::vmcs::event::VALID != 0
    }

    fn exit_record(&self) -> (u64, [u64; 2], u32, u32) {
        let reason = self.get(fields::EXIT_REASON);
        let vectoring =
            if self.was_delivering() { u64::from(self.get(fields::IDT_VECTORING)) } else { 0 };
        let info = [self.get(fields::EXIT_QUALIFICATION), vectoring];
        let event = self.get(fields::EXIT_INTERRUPTION);
        (reason.into(), info, event, self.get(fields::EXIT_ERROR_CODE))
    }

    fn interrupted_delivery(&self) -> Option<Event> {
        if !self.was_delivering() {
            return None;
        }
        let info = self.get(fields::IDT_VECTORING);
        inject::decode(info, self.get(fields::IDT_VECTORING_ERROR))
    }

    fn forget_interrupted_delivery(&mut self) {
        self.vmcs.fields.learn(fields::IDT_VECTORING, 0);
    }

    #[inline]
    fn rip(&self) -> u64 {
        self.get(fields::GUEST_RIP)
    }

    #[inline]
    fn set_rip(&mut self, rip: u64) {
        self.end_halt();
        self.set(fields::GUEST_RIP, rip);
    }

    #[inline]
    fn retire(&mut self, next_rip: u64) {
        self.set(fields::GUEST_RIP, next_rip);
        self.shadow_over.set(true);
        if self.serving != Serving::No {
            self.attend_to_requests();
        }
    }

    #[inline]
    fn next_rip(&self) -> Option<u64> {
        Some(self.rip_after())
    }

    fn insn_bytes(&self) -> &[u8] {
        &[]
    }

    #[inline]
    fn rflags(&self) -> u64 {
        self.get(fields::GUEST_RFLAGS)
    }

    fn set_rflags(&mut self, rflags: u64) {
        self.set(fields::GUEST_RFLAGS, rflags);
        self.flags_changed(rflags);
    }

    #[inline]
    fn interrupt_shadow(&self) -> bool {
        self.is_shadowed()
    }

    fn set_interrupt_shadow(&mut self, on: bool) {
        if on {
            self.end_halt();
        }
        self.set_shadow(on);
    }

    #[inline]
    fn cpl(&self) -> u8 {
        (self.get(fields::GUEST_SS_RIGHTS) >> 5) as u8 & 3
    }

    fn segment(&self, name: SegmentName) -> Segment {
        let places = segments::places(name);
        Segment {
            base: self.get(places.base),
            limit: self.get(places.limit),
            selector: self.get(places.selector),
            attr: segments::attributes(self.get(places.rights)),
        }
    }

    #[inline]
    fn code_attributes(&self) -> u16 {
        segments::attributes(self.get(fields::GUEST_CS_RIGHTS))
    }

    fn set_segment(&mut self, name: SegmentName, value: Segment) {
        let places = segments::places(name);
        let long = self.efer & EFER_LMA != 0;
        self.set(places.selector, value.selector);
        self.set(places.base, value.base);
        self.set(places.limit, value.limit);
        self.set(places.rights, segments::rights_for(name, &value, long));
    }

    fn gdtr(&self) -> DescriptorTable {
        let (base, limit) = (self.get(fields::GUEST_GDTR_BASE), self.get(fields::GUEST_GDTR_LIMIT));
        DescriptorTable { base, limit: limit as u16 }
    }

    fn set_gdtr(&mut self, value: DescriptorTable) {
        self.set(fields::GUEST_GDTR_BASE, value.base);
        self.set(fields::GUEST_GDTR_LIMIT, value.limit.into());
    }

    fn idtr(&self) -> DescriptorTable {
        let (base, limit) = (self.get(fields::GUEST_IDTR_BASE), self.get(fields::GUEST_IDTR_LIMIT));
        DescriptorTable { base, limit: limit as u16 }
    }

    fn set_idtr(&mut self, value: DescriptorTable) {
        self.set(fields::GUEST_IDTR_BASE, value.base);
        self.set(fields::GUEST_IDTR_LIMIT, value.limit.into());
    }

    fn control(&self) -> ControlRegs {
        ControlRegs {
            cr0: self.cr0_now(),
            cr2: if self.vmcs.is_loaded() { self.cpu.cr2() } else { self.cr2 },
            cr3: if self.paging.shadow { self.shadowed_cr3 } else { self.get(fields::GUEST_CR3) },
            cr4: self.cr4_now(),
            efer: self.efer,
        }
    }

    #[inline]
    fn cr0(&self) -> u64 {
        self.cr0_now()
    }

    #[inline]
    fn cr4(&self) -> u64 {
        self.cr4_now()
    }

    /// OSXSAVE and PKE are never the guest's own.
    #[inline]
    fn cr4_shown(&self) -> u64 {
        self.cr4
    }

    #[inline]
    fn efer(&self) -> u64 {
        self.efer
    }

    /// Whether the guest has caching disabled is for it alone to see: an entry does not load CD and
    /// NW.
    fn set_cr0(&mut self, value: u64) {
        self.cr0 = value;
        let fixed = self.features.cr0_fixed & !CR0_PG_PE;
        self.set(fields::CR0_SHADOW, value);
        self.set(fields::GUEST_CR0, self.real_cr0(value) | fixed | CR0_ET);
        if self.paging.shadow {
            self.paging_mode_changed();
        }
    }

    fn set_cr2(&mut self, value: u64) {
        self.replace_cr2(value);
    }

    fn set_cr3(&mut self, value: u64) {
        if self.paging.shadow {
            self.shadowed_cr3 = value;
            return;
        }
        self.set(fields::GUEST_CR3, value);
    }

    /// Where the CPU has no UMIP, the instructions
    /// that it is about exit while the guest has it set: all but SMSW, which no control makes exit.
    #[inline(always)]
    fn set_cr4(&mut self, value: u64) {
        let changed = core::mem::replace(&mut self.cr4, value) ^ value;
        let real = self.real_cr4(value);
        if self.features.umip_by_exits && changed & CR4_UMIP != 0 {
            self.watch_tables(value & CR4_UMIP != 0);
        }
        self.set(fields::CR4_SHADOW, value);
        self.set(fields::GUEST_CR4, real);
        if changed & CR4_OSXSAVE != 0 {
            self.sync_extended();
        }
    }

    fn set_efer(&mut self, value: u64) {
        self.efer = value;
        self.set(fields::GUEST_EFER, self.real_efer(value));
        if self.paging.shadow {
            self.paging_mode_changed();
        }
        let long = value & EFER_LMA != 0;
        let bit = EntryControls::IA32E_GUEST.bits();
        let controls = self.get(fields::ENTRY_CONTROLS);
        self.set(fields::ENTRY_CONTROLS, if long { controls | bit } else { controls & !bit });
        if long {
            // A 16-bit task state is none there.
            let tr = self.segment(SegmentName::Tr);
            self.set(fields::GUEST_TR_RIGHTS, segments::rights_for(SegmentName::Tr, &tr, true));
        }
        self.sync_syscall();
    }

    fn set_pdptes(&mut self, entries: [u64; 4]) {
        self.set_pdpte_fields(entries);
    }

    fn pdptes(&self) -> [u64; 4] {
        [
            self.get(fields::GUEST_PDPTE0),
            self.get(fields::GUEST_PDPTE1),
            self.get(fields::GUEST_PDPTE2),
            self.get(fields::GUEST_PDPTE3),
        ]
    }

    #[inline]
    fn cr8(&self) -> u8 {
        self.apic_page.tpr() >> 4
    }

    #[inline]
    fn set_cr8(&mut self, value: u8) {
        let value = value & 0xf;
        self.apic_page.set_tpr(value << 4);
        // An entry refuses a threshold above the priority.
        if self.get(fields::TPR_THRESHOLD) > value.into() {
            self.set(fields::TPR_THRESHOLD, value.into());
        }
    }

    fn debug_regs(&self) -> [u64; 6] {
        let [a, b, c, d] = self.cold.debug.addresses();
        [a, b, c, d, self.cold.dr6.get().bits(), self.dr7().bits()]
    }

    fn set_debug_regs(&mut self, regs: [u64; 6]) {
        let [a, b, c, d, dr6, dr7] = regs;
        self.cold.debug.set_addresses([a, b, c, d]);
        let dr7 = Dr7::new(dr7);
        self.set_dr6(Dr6::new(dr6));
        self.set_dr7(dr7);
        if dr7.has_breakpoints() {
            self.own_debug_regs();
        }
    }

    fn own_debug_regs(&mut self) {
        self.give_debug_regs();
    }

    fn watch_debug_regs(&mut self, on: bool) {
        self.cold.debug.watch(on);
        self.intercept_debug_regs();
    }

    fn xcr0(&self) -> u64 {
        self.cold.extended.xcr0()
    }

    fn set_xcr0(&mut self, value: u64) {
        self.cold.extended.set_xcr0(value);
        self.sync_extended();
    }

    fn xss(&self) -> u64 {
        self.cold.extended.xss()
    }

    fn set_xss(&mut self, value: u64) {
        self.cold.extended.set_xss(value);
        self.sync_extended();
    }

    fn pkru(&self) -> u32 {
        self.cold.extended.pkru()
    }

    fn set_pkru(&mut self, value: u32) {
        self.cold.extended.set_pkru(value);
    }

    fn msr(&self, index: u32) -> Result<u64, NotMine> {
        Ok(match index {
            msr::STAR => self.syscall.star,
            msr::LSTAR => self.syscall.lstar,
            msr::SYSCALL_MASK => self.syscall.mask,
            msr::CSTAR => self.cold.cstar,
            msr::KERNEL_GS_BASE => self.kernel_gs_base.get(),
            msr::FS_BASE => self.get(fields::GUEST_FS_BASE),
            msr::GS_BASE => self.get(fields::GUEST_GS_BASE),
            msr::SYSENTER_CS => self.get(fields::GUEST_SYSENTER_CS).into(),
            msr::SYSENTER_ESP => self.get(fields::GUEST_SYSENTER_ESP),
            msr::SYSENTER_EIP => self.get(fields::GUEST_SYSENTER_EIP),
            msr::PAT => self.get(fields::GUEST_PAT),
            msr::DEBUGCTL => self.get(fields::GUEST_DEBUGCTL),
            msr::TSC_AUX => self.tsc_aux,
            msr::XSS => self.cold.extended.xss(),
            msr::SPEC_CTRL => self.spec_ctrl(),
            _ => return Err(NotMine),
        })
    }

    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), NotMine> {
        // Where the CPU or an entry would refuse it. A VMM may have told the guest of wider addresses
        // than this CPU has.
        let value = match index {
            msr::LSTAR
            | msr::KERNEL_GS_BASE
            | msr::FS_BASE
            | msr::GS_BASE
            | msr::SYSENTER_ESP
            | msr::SYSENTER_EIP => self.features.canonical(value),
            // RFLAGS has nothing up there.
            msr::SYSCALL_MASK => value & 0xffff_ffff,
            // Last branches are not virtualized; as in stock KVM both bits vanish.
            msr::DEBUGCTL => value & !(DEBUGCTL_LBR | DEBUGCTL_BTF),
            _ => value,
        };
        match index {
            msr::TSC_AUX => {
                self.tsc_aux = value;
                self.sync_tsc_aux();
            }
            msr::XSS => self.set_xss(value),
            msr::SPEC_CTRL => self.set_spec_ctrl(value),
            msr::PAT => self.set(fields::GUEST_PAT, value),
            msr::DEBUGCTL => self.set(fields::GUEST_DEBUGCTL, value),
            msr::STAR | msr::LSTAR | msr::SYSCALL_MASK => {
                match index {
                    msr::STAR => self.syscall.star = value,
                    msr::LSTAR => self.syscall.lstar = value,
                    _ => self.syscall.mask = value,
                }
                self.sync_syscall();
            }
            msr::CSTAR => self.cold.cstar = value,
            msr::KERNEL_GS_BASE => self.set_kernel_gs_base(value),
            msr::FS_BASE => self.set(fields::GUEST_FS_BASE, value),
            msr::GS_BASE => self.set(fields::GUEST_GS_BASE, value),
            msr::SYSENTER_CS => self.set(fields::GUEST_SYSENTER_CS, value as u32),
            msr::SYSENTER_ESP => self.set(fields::GUEST_SYSENTER_ESP, value),
            msr::SYSENTER_EIP => self.set(fields::GUEST_SYSENTER_EIP, value),
            _ => return Err(NotMine),
        }
        Ok(())
    }

    fn host_cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.cpu.cpuid(leaf, subleaf)
    }

    fn host_tsc(&mut self) -> u64 {
        self.cpu.rdtsc()
    }

    fn prediction_barrier(&mut self) {
        self.cpu.wrmsr(msr::PRED_CMD, 1);
    }

    fn set_tsc(&mut self, offset: u64, ratio: u64) {
        self.tsc_offset = offset;
        self.set(fields::TSC_OFFSET, offset);
        if self.tsc_ratio != ratio && self.features.tsc_scaling {
            self.tsc_ratio = ratio;
            self.deadline.set_ratio(ratio);
            self.set(fields::TSC_MULTIPLIER, ratio << MULTIPLIER_SHIFT);
            self.change_proc2(ProcControls2::TSC_SCALING, ratio != TSC_RATIO_ONE);
        }
    }

    #[inline]
    fn guest_tsc(&self, host: u64) -> u64 {
        scale_tsc(host, self.tsc_ratio).wrapping_add(self.tsc_offset)
    }

    #[inline]
    fn watches_deadlines(&self) -> bool {
        // A guest that waits by MWAIT may be in a C-state in which the timer stands (SDM vol. 3C
        // §26.5.1).
        self.features.preemption_timer.is_some() && !self.cold.fewer.mwait
    }

    #[inline]
    fn watch_deadline(&mut self, deadline: u64) {
        if self.deadline.set(deadline) {
            self.attention |= attention::TIMER;
        }
    }

    #[inline]
    fn watch_deadline_from(&mut self, deadline: u64, now: u64) {
        self.watch_from(deadline, now);
    }

    #[inline]
    fn deadline_due(&mut self) -> bool {
        self.is_deadline_due()
    }

    fn set_msr_filter(&mut self, denied: impl Fn(u32) -> (bool, bool)) {
        self.pass_live_msrs();
        self.cold.speculation_denied = SPECULATION.map(&denied);
        self.update_passthrough();
        let residency = self.cold.fewer.cstate.then_some(CORE_RESIDENCY).into_iter().flatten();
        for msr in LIVE.into_iter().chain([TSC, msr::TSC_AUX]).chain(residency) {
            let ((read, write), filter) = (self.vmcs.msr_map.intercepted(msr), denied(msr));
            self.vmcs.msr_map.intercept(msr, read | filter.0, write | filter.1);
        }
    }

    fn give_up_exits(&mut self, exits: FewerExits) {
        self.cold.fewer = exits;
        let when = |given_up, bits| if given_up { bits } else { ProcControls::empty() };
        let waits = when(exits.mwait, ProcControls::MWAIT | ProcControls::MONITOR);
        self.change_proc(when(exits.hlt, ProcControls::HLT) | waits, false);
        if exits.pause {
            self.change_proc2(ProcControls2::PAUSE_LOOP, false);
        }
        self.pass_live_msrs();
    }

    fn set_limits(&mut self, limits: GuestLimits) {
        self.change_ownership(|this| this.limits = limits);
        self.update_passthrough();
        self.sync_extended();
    }

    fn set_paging(&mut self, paging: Paging) {
        self.change_ownership(|this| this.paging = paging);
        if paging.shadow {
            self.watch_paging();
        }
    }

    fn set_shadow_root(&mut self, root: Hpa) {
        self.load_shadow_root(root);
    }

    fn set_tdp_root(&mut self, root: Hpa) {
        let pointer = self.features.ept_pointer(root.0);
        if self.vmcs.fields.get(fields::EPT_POINTER) != Some(pointer) {
            self.set(fields::EPT_POINTER, pointer);
            self.attention |= attention::FLUSH_TDP;
        }
    }

    fn flush_tlb(&mut self) {
        self.attention |= attention::FLUSH;
    }

    fn flush_tdp(&mut self) {
        self.attention |= if self.paging.shadow { attention::FLUSH } else { attention::FLUSH_TDP };
    }

    fn is_interpreted(&self) -> bool {
        Self::is_interpreted(self)
    }

    fn set_page_log(&mut self, on: bool) {
        if self.page_log.is_some() {
            self.change_proc2(ProcControls2::PML, on);
        }
    }

    fn take_page_log(&mut self, each: impl FnMut(Gpa)) {
        let Some(log) = &self.page_log else { return };
        log.take(self.get(fields::PML_INDEX), each);
        self.set(fields::PML_INDEX, PageLog::EMPTY);
    }

    fn inject(&mut self, event: Event) {
        self.inject_event(event);
    }

    #[inline]
    fn injecting(&self) -> bool {
        self.is_injecting()
    }

    fn cancel_injection(&mut self) -> Option<Event> {
        self.take_injection()
    }

    fn offer_interrupt(&mut self, vector: Option<Vector>) {
        self.set_offer(vector);
    }

    #[inline]
    fn offer_taken(&mut self) -> bool {
        self.take_taken()
    }

    fn set_interrupt_window(&mut self, on: bool) {
        if self.get(fields::EXIT_REASON) == u32::from(ExitReason::InterruptWindow.0) {
            // This was it.
            self.nmi_behind_sti = false;
        }
        self.set_offer(None);
        self.open_window(on);
    }

    fn set_cr8_intercept(&mut self, _on: bool) {}

    fn exit_on_cr8_writes(&mut self) {
        self.change_proc(ProcControls::CR8_LOAD, true);
    }

    /// The priority is looked at when an interrupt is offered, and an offer does not outlive a look:
    /// only its fall below what waits has to be seen.
    fn watch_priority(&mut self, _offered: bool, waiting: Option<Vector>) {
        let threshold = waiting.map_or(0, |v| v.0 >> 4).min(self.cr8());
        self.set(fields::TPR_THRESHOLD, threshold.into());
    }

    const SERVES_APIC: bool = true;

    #[inline]
    fn can_serve_apic(&self) -> bool {
        self.features.apicv
    }

    fn serve_apic(&mut self, state: &Interrupts, reported: &VectorWords) {
        self.begin_serving(state, reported);
    }

    #[inline]
    fn serves_apic(&self) -> bool {
        self.serving == Serving::Yes
    }

    fn request_interrupts(&mut self, vectors: &VectorWords, reported: &VectorWords) {
        self.request_served(vectors, reported);
    }

    fn show_apic_register(&mut self, offset: u32, value: u32) {
        self.apic_page.set(offset, value);
    }

    fn served_interrupt_waits(&self, more: Option<Vector>) -> bool {
        self.served_waits(more)
    }

    fn take_apic(&mut self) -> Interrupts {
        self.serving = Serving::TakenBack;
        self.apic_page.take()
    }

    fn stop_serving_apic(&mut self) {
        self.end_serving();
    }

    fn nmi_allowed(&self) -> bool {
        !self.is_nmi_masked() && !self.is_shadowed()
    }

    fn set_nmi_window(&mut self) -> NmiWindow {
        // While STI blocks, a CPU may take the exit at once, before any instruction and any interrupt of
        // the host's, and at the next entry again (SDM vol. 3C §26.2). Interrupts are enabled behind it.
        self.nmi_behind_sti = !self.is_nmi_masked() && self.is_behind_sti();
        if self.nmi_behind_sti {
            self.open_window(true);
        } else {
            self.open_nmi_window(true);
        }
        NmiWindow::Exit
    }

    fn nmi_masked(&self) -> bool {
        self.is_nmi_masked()
    }

    fn set_nmi_masked(&mut self, on: bool) {
        self.mask_nmi(on);
    }

    /// The window is open.
    fn iret_begun(&mut self) {
        self.open_nmi_window(false);
    }

    fn own_single_step(&mut self) -> bool {
        false
    }

    fn set_guest_debug(&mut self, breakpoints: bool, _debug: bool) {
        let old = self.get(fields::EXCEPTION_BITMAP) & !(1 << 3);
        self.set(fields::EXCEPTION_BITMAP, old | (u32::from(breakpoints) << 3));
    }

    fn reset(&mut self, init: bool) {
        self.set(fields::CR0_MASK, !self.owned_cr0());
        self.set(fields::CR4_MASK, !self.owned_cr4());
        self.reset_registers(init);
        self.end_halt();
        self.set(fields::GUEST_RIP, 0xfff0);
        self.set(fields::GUEST_RSP, 0);
        self.set(fields::GUEST_RFLAGS, 2);
        self.shadow_over.set(false);
        self.set(fields::GUEST_INTERRUPTIBILITY, 0);
        self.set(fields::GUEST_PENDING_DEBUG, 0);
        if !init {
            self.set(fields::GUEST_SYSENTER_CS, 0);
            self.set(fields::GUEST_SYSENTER_ESP, 0);
            self.set(fields::GUEST_SYSENTER_EIP, 0);
            self.cold.extended.set_xcr0(1);
            self.cold.extended.set_xss(0);
        }
        self.reset_spec_ctrl();
        let _ = self.take_injection();
        self.set_offer(None);
        self.open_nmi_window(false);
        self.attention |= attention::FLUSH;
    }
}
