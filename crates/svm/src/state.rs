//! The control block's content as the run loop sees it: [`Backend`] for [`Svm`].
//!
//! What the guest owns under TDP is not intercepted: CR0 (unless it has caching
//! disabled, see [`Svm::set_cr0`]), CR3, CR8, INVLPG, INVPCID, RDTSC, and CR4 when the guest's
//! CPUID offers every CR4 bit that this CPU knows; CR0 and CR4 not where the run loop has to see
//! changes of the guest's paging ([`Paging::watch_roles`]).
//!
//! CR0 and CR4 are the guest's only on CPUs with NRIP save. Those without are the first with SVM,
//! and QEMU's emulation, which takes reserved bits that a CPU refuses: there writes exit, to be
//! checked here.

use backend::{
    Answer, Backend, CR0_CD_NW, ControlRegs, Event, Exit, FewerExits, Gprs, GuestLimits, NmiWindow,
    NotMine, Paging, SegmentName, TSC_RATIO_ONE, scale_tsc,
};
use cpu::Cpu;
use x86::{
    Dr6, Dr7, Hpa, Vector, msr,
    segment::{DescriptorTable, Segment},
    vmcb::{self, Clean, ExitCode, Intercept3, Intercept4, VmcbSegment, vintr},
};

use crate::inject::Step;
use crate::{
    enter::Svm,
    exits,
    inject::{self, Virq},
    percpu,
};

const CR4_OSXSAVE: u64 = 1 << 18;
const EFER_SVME: u64 = 1 << 12;

/// MSRs whose guest value is live in hardware while the guest runs: VMLOAD and VMSAVE move them.
const LIVE: [u32; 10] = [
    msr::STAR,
    msr::LSTAR,
    msr::CSTAR,
    msr::SYSCALL_MASK,
    msr::FS_BASE,
    msr::GS_BASE,
    msr::KERNEL_GS_BASE,
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
];

fn index(name: SegmentName) -> usize {
    match name {
        SegmentName::Es => vmcb::SEG_ES,
        SegmentName::Cs => vmcb::SEG_CS,
        SegmentName::Ss => vmcb::SEG_SS,
        SegmentName::Ds => vmcb::SEG_DS,
        SegmentName::Fs => vmcb::SEG_FS,
        SegmentName::Gs => vmcb::SEG_GS,
        SegmentName::Ldtr => vmcb::SEG_LDTR,
        SegmentName::Tr => vmcb::SEG_TR,
    }
}

fn table(segment: &VmcbSegment) -> DescriptorTable {
    DescriptorTable { base: segment.base, limit: segment.limit as u16 }
}

impl<C: Cpu> Svm<C> {
    pub(crate) fn init_control(&mut self) {
        let (msrpm, iopm) = (self.block.msr_map.hpa().0, percpu::io_map().0);
        for msr in LIVE {
            self.block.msr_map.intercept(msr, false, false);
        }
        let features = self.features;
        let control = &mut self.vmcb_mut(Clean::ALL).control;
        control.iopm_base_pa = iopm;
        control.msrpm_base_pa = msrpm;
        control.np_ctl = vmcb::NP_ENABLE;
        control.int_ctl = vintr::INTR_MASKING;
        if features.vnmi {
            control.int_ctl |= vintr::NMI_ENABLE;
        }
        // #AC and #DB loops would hold the CPU for ever without an exit; a machine check is the
        // host's.
        // #UD: a guest may make its hypercalls with VMCALL.
        control.intercepts[2] = (1 << 1) | (1 << 6) | (1 << 17) | (1 << 18);
        control.intercepts[3] = (Intercept3::INTR
            | Intercept3::NMI
            | Intercept3::SMI
            | Intercept3::INIT
            | Intercept3::RDPMC
            | Intercept3::CPUID
            | Intercept3::RSM
            | Intercept3::INVD
            | Intercept3::HLT
            | Intercept3::INVLPGA
            | Intercept3::IOIO
            | Intercept3::MSR
            | Intercept3::TASK_SWITCH
            | Intercept3::FERR_FREEZE
            | Intercept3::SHUTDOWN)
            .bits();
        if features.pause_filter {
            control.intercepts[3] |= Intercept3::PAUSE.bits();
            control.pause_filter_count = 3000;
            control.pause_filter_thresh = 128;
        }
        control.intercepts[4] = (Intercept4::VMRUN
            | Intercept4::VMMCALL
            | Intercept4::VMLOAD
            | Intercept4::VMSAVE
            | Intercept4::STGI
            | Intercept4::CLGI
            | Intercept4::SKINIT
            | Intercept4::RDTSCP
            | Intercept4::WBINVD
            | Intercept4::MONITOR
            | Intercept4::MWAIT
            | Intercept4::XSETBV
            | Intercept4::RDPRU)
            .bits();
        // INVLPGB, MCOMMIT and TLBSYNC reach beyond this guest's ASID; INVPCID stays with the guest unless
        // its CPUID lacks it.
        control.intercepts[5] = (1 << 0) | (1 << 1) | (1 << 3) | (1 << 4);
        self.vmcb_mut(Clean::ALL).save.g_pat = msr::PAT_RESET;
        self.intercept_debug_regs();
        self.reset(false);
    }

    /// Lets the guest's accesses of debug registers exit, or not, as it owns them or not.
    pub(crate) fn intercept_debug_regs(&mut self) {
        let on = self.debug.exits();
        self.vmcb_mut(Clean::INTERCEPTS).control.intercepts[1] = if on { 0x00ff_00ff } else { 0 };
    }

    pub(crate) fn intercept_cr(&mut self, mask: u32, on: bool) {
        if (self.vmcb().control.intercepts[0] & mask == mask) == on {
            return;
        }
        let word = &mut self.vmcb_mut(Clean::INTERCEPTS).control.intercepts[0];
        *word = if on { *word | mask } else { *word & !mask };
    }

    /// CR4 belongs to the guest when it may set every bit that the CPU would let it set, and XCR0
    /// is live: while CR4.OSXSAVE is clear the guest cannot see XCR0, so it is not loaded, and the
    /// write that sets the bit must be seen.
    pub(crate) fn update_cr4_intercept(&mut self) {
        let all = self.features.cr4_known & !self.limits.cr4_allowed == 0;
        let xcr0_live = !self.limits.xsave || self.vmcb().save.cr4 & CR4_OSXSAVE != 0;
        let owned = !self.paging.shadow
            && all
            && xcr0_live
            && self.features.nrip_save
            && !self.paging.watch_roles;
        self.intercept_cr(1 << (16 + 4), !owned);
    }

    pub(crate) fn update_passthrough(&mut self) {
        let spec = self.features.v_spec_ctrl && self.limits.spec_ctrl;
        self.block.msr_map.intercept(msr::SPEC_CTRL, !spec, !spec);
        self.block.msr_map.intercept(msr::PRED_CMD, true, !self.limits.pred_cmd);
        self.block.msr_map.intercept(msr::TSC_AUX, !self.limits.tsc_aux, true);
        let (rdtscp, invpcid) = (self.limits.tsc_aux, self.limits.invpcid && !self.paging.shadow);
        let control = &mut self.vmcb_mut(Clean::INTERCEPTS | Clean::PERM_MAP).control;
        let bit = Intercept4::RDTSCP.bits();
        control.intercepts[4] = (control.intercepts[4] & !bit) | if rdtscp { 0 } else { bit };
        control.intercepts[5] = (control.intercepts[5] & !4) | if invpcid { 0 } else { 4 };
    }
}

impl<C: Cpu> Backend for Svm<C> {
    fn load(&mut self, here: usize) {
        self.load_state(here);
    }

    fn unload(&mut self, _to_user: bool) {
        self.unload_state();
    }

    fn host_segments(&mut self) {
        self.host_segment_state();
    }

    fn guest_segments(&mut self) {
        self.guest_segment_state();
    }

    fn begin_run(&mut self) {
        self.new_run();
    }

    #[inline]
    fn enter(&mut self, gprs: &mut Gprs) {
        self.switch(gprs);
    }

    fn exit(&self) -> Exit {
        exits::decode(&self.vmcb().control, self.features.decode_assists)
    }

    #[inline(always)]
    fn dispatch<S: Copy, A: Answer<Self, S>>(answer: &mut A, section: S) -> Option<Exit> {
        let code = ExitCode(answer.backend().vmcb().control.exit_code);
        match code {
            ExitCode::Intr => answer.frequent(section, Exit::Interrupt),
            ExitCode::Cpuid => answer.frequent(section, Exit::Cpuid),
            ExitCode::Msr if answer.backend().vmcb().control.exit_info_1 & 1 == 0 => {
                answer.frequent(section, Exit::Rdmsr)
            }
            ExitCode::Msr => answer.frequent(section, Exit::Wrmsr),
            ExitCode::Npf => {
                let exit = exits::npf(&answer.backend().vmcb().control);
                answer.frequent(section, exit)
            }
            ExitCode::Ioio => {
                let exit = exits::io(&answer.backend().vmcb().control);
                answer.frequent(section, exit)
            }
            ExitCode::Hlt => answer.frequent(section, Exit::Hlt),
            ExitCode::Vmmcall => answer.frequent(section, Exit::Hypercall),
            // With shadow paging these are most exits.
            exits::PAGE_FAULT => {
                let exit = exits::page_fault(&answer.backend().vmcb().control);
                answer.frequent(section, exit)
            }
            _ if code.0 < exits::END_OF_CR || code == ExitCode::Cr0SelWrite => {
                let exit = exits::cr_access(answer.backend());
                answer.frequent(section, exit)
            }
            _ => {
                let exit = answer.backend().exit();
                answer.rare(section, exit)
            }
        }
    }

    fn exit_raw(&self) -> [u64; 3] {
        let c = &self.vmcb().control;
        [c.exit_code, c.exit_info_1, c.exit_info_2]
    }

    #[inline]
    fn was_delivering(&self) -> bool {
        self.vmcb().control.exit_int_info & vmcb::event::VALID != 0
    }

    fn exit_record(&self) -> (u64, [u64; 2], u32, u32) {
        let c = &self.vmcb().control;
        let (event, error) = (c.exit_int_info as u32, (c.exit_int_info >> 32) as u32);
        (c.exit_code, [c.exit_info_1, c.exit_info_2], event, error)
    }

    fn interrupted_delivery(&self) -> Option<Event> {
        inject::decode(self.vmcb().control.exit_int_info)
    }

    fn forget_interrupted_delivery(&mut self) {
        self.vmcb_mut(Clean::empty()).control.exit_int_info = 0;
    }

    #[inline]
    fn rip(&self) -> u64 {
        self.vmcb().save.rip
    }

    #[inline]
    fn set_rip(&mut self, rip: u64) {
        self.vmcb_mut(Clean::empty()).save.rip = rip;
    }

    #[inline]
    fn retire(&mut self, next_rip: u64) {
        let block = self.vmcb_mut(Clean::empty());
        block.save.rip = next_rip;
        block.control.int_state = 0;
    }

    #[inline]
    fn next_rip(&self) -> Option<u64> {
        self.features.nrip_save.then_some(self.vmcb().control.next_rip)
    }

    fn insn_bytes(&self) -> &[u8] {
        if !self.features.decode_assists {
            return &[];
        }
        let control = &self.vmcb().control;
        control.insn_bytes.get(..usize::from(control.insn_len & 15)).unwrap_or(&[])
    }

    #[inline]
    fn rflags(&self) -> u64 {
        self.vmcb().save.rflags
    }

    fn set_rflags(&mut self, rflags: u64) {
        self.vmcb_mut(Clean::empty()).save.rflags = rflags;
    }

    #[inline]
    fn interrupt_shadow(&self) -> bool {
        self.vmcb().control.int_state & vmcb::INT_SHADOW != 0
    }

    fn set_interrupt_shadow(&mut self, on: bool) {
        let state = &mut self.vmcb_mut(Clean::empty()).control.int_state;
        *state = (*state & !vmcb::INT_SHADOW) | u64::from(on);
    }

    #[inline]
    fn cpl(&self) -> u8 {
        self.vmcb().save.cpl
    }

    #[inline]
    fn segment(&self, name: SegmentName) -> Segment {
        let s = self.vmcb().save.segments.get(index(name)).copied().unwrap_or_default();
        Segment { base: s.base, limit: s.limit, selector: s.selector, attr: s.attrib }
    }

    fn set_segment(&mut self, name: SegmentName, value: Segment) {
        let save = &mut self.vmcb_mut(Clean::SEG).save;
        if let Some(slot) = save.segments.get_mut(index(name)) {
            *slot = VmcbSegment {
                selector: value.selector,
                attrib: value.attr,
                limit: value.limit,
                base: value.base,
            };
        }
        if name == SegmentName::Ss {
            save.cpl = value.dpl();
        }
    }

    fn gdtr(&self) -> DescriptorTable {
        table(&self.vmcb().save.segments[vmcb::SEG_GDTR])
    }

    fn set_gdtr(&mut self, value: DescriptorTable) {
        let slot = &mut self.vmcb_mut(Clean::DT).save.segments[vmcb::SEG_GDTR];
        (slot.base, slot.limit) = (value.base, value.limit.into());
    }

    fn idtr(&self) -> DescriptorTable {
        table(&self.vmcb().save.segments[vmcb::SEG_IDTR])
    }

    fn set_idtr(&mut self, value: DescriptorTable) {
        let slot = &mut self.vmcb_mut(Clean::DT).save.segments[vmcb::SEG_IDTR];
        (slot.base, slot.limit) = (value.base, value.limit.into());
    }

    fn control(&self) -> ControlRegs {
        let save = &self.vmcb().save;
        if self.paging.shadow {
            return self.guest.control(save);
        }
        ControlRegs {
            cr0: save.cr0 | self.hidden_cr0(),
            cr2: save.cr2,
            cr3: save.cr3,
            cr4: save.cr4,
            efer: save.efer & !EFER_SVME,
        }
    }

    /// CR0.CD and CR0.NW are kept from the hardware: firmware leaves them set for long, and with
    /// CD the whole guest would run uncached. CR0 is intercepted only while the guest has one set.
    fn set_cr0(&mut self, value: u64) {
        if self.paging.shadow {
            self.guest.cr0 = value;
            return self.renew_cr0();
        }
        let hidden = if self.shows_cache_disable { 0 } else { value & CR0_CD_NW };
        self.cr0_hidden = hidden as u32;
        self.vmcb_mut(Clean::CR).save.cr0 = value & !hidden;
        self.intercept_cr(1, hidden != 0);
        self.intercept_cr(1 << 16, hidden != 0 || !self.features.nrip_save);
    }

    fn set_cr2(&mut self, value: u64) {
        self.vmcb_mut(Clean::CR2).save.cr2 = value;
    }

    fn set_cr3(&mut self, value: u64) {
        if self.paging.shadow {
            self.guest.cr3 = value;
            return;
        }
        self.vmcb_mut(Clean::CR).save.cr3 = value;
    }

    fn set_cr4(&mut self, value: u64) {
        if self.paging.shadow {
            self.guest.cr4 = value;
            return self.renew_cr4();
        }
        let save = &mut self.vmcb_mut(Clean::CR).save;
        let changed = core::mem::replace(&mut save.cr4, value) ^ value;
        if changed & CR4_OSXSAVE != 0 {
            self.update_cr4_intercept();
            self.sync_extended();
        }
    }

    fn set_efer(&mut self, value: u64) {
        if self.paging.shadow {
            self.guest.efer = value;
            return self.renew_efer();
        }
        self.vmcb_mut(Clean::CR).save.efer = value | EFER_SVME;
    }

    #[inline]
    fn cr8(&self) -> u8 {
        (self.vmcb().control.int_ctl & vintr::TPR_MASK) as u8
    }

    #[inline]
    fn set_cr8(&mut self, value: u8) {
        let old = self.vmcb().control.int_ctl;
        let new = (old & !vintr::TPR_MASK) | (u32::from(value) & vintr::TPR_MASK);
        if new != old {
            self.vmcb_mut(Clean::INTR).control.int_ctl = new;
        }
    }

    fn debug_regs(&self) -> [u64; 6] {
        let save = &self.vmcb().save;
        let [a, b, c, d] = self.debug.addresses();
        [a, b, c, d, save.dr6, save.dr7]
    }

    fn set_debug_regs(&mut self, regs: [u64; 6]) {
        let [a, b, c, d, dr6, dr7] = regs;
        self.debug.set_addresses([a, b, c, d]);
        let dr7 = Dr7::new(dr7);
        let save = &mut self.vmcb_mut(Clean::DR).save;
        (save.dr6, save.dr7) = (Dr6::new(dr6).bits(), dr7.bits());
        if dr7.has_breakpoints() {
            self.own_debug_regs();
        }
    }

    fn own_debug_regs(&mut self) {
        self.give_debug_regs();
    }

    fn watch_debug_regs(&mut self, on: bool) {
        self.debug.watch(on);
        self.intercept_debug_regs();
    }

    fn xcr0(&self) -> u64 {
        self.extended.xcr0()
    }

    fn set_xcr0(&mut self, value: u64) {
        self.extended.set_xcr0(value);
        self.sync_extended();
    }

    fn xss(&self) -> u64 {
        self.extended.xss()
    }

    fn set_xss(&mut self, value: u64) {
        self.extended.set_xss(value);
        self.sync_extended();
    }

    fn pkru(&self) -> u32 {
        self.extended.pkru()
    }

    fn set_pkru(&mut self, value: u32) {
        self.extended.set_pkru(value);
    }

    fn msr(&self, index: u32) -> Result<u64, NotMine> {
        let save = &self.vmcb().save;
        Ok(match index {
            msr::STAR => save.star,
            msr::LSTAR => save.lstar,
            msr::CSTAR => save.cstar,
            msr::SYSCALL_MASK => save.sfmask,
            msr::KERNEL_GS_BASE => save.kernel_gs_base,
            msr::FS_BASE => save.segments[vmcb::SEG_FS].base,
            msr::GS_BASE => save.segments[vmcb::SEG_GS].base,
            msr::SYSENTER_CS => save.sysenter_cs,
            msr::SYSENTER_ESP => save.sysenter_esp,
            msr::SYSENTER_EIP => save.sysenter_eip,
            msr::PAT => save.g_pat,
            msr::DEBUGCTL => save.dbgctl,
            msr::TSC_AUX => self.tsc_aux.get(),
            msr::XSS => self.extended.xss(),
            msr::SPEC_CTRL if self.features.v_spec_ctrl => save.spec_ctrl,
            msr::SPEC_CTRL => self.spec_ctrl,
            msr::VIRT_SPEC_CTRL => 0,
            _ => return Err(NotMine),
        })
    }

    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), NotMine> {
        match index {
            msr::TSC_AUX => {
                self.tsc_aux.set(value);
                self.sync_tsc_aux();
            }
            msr::XSS => self.set_xss(value),
            msr::SPEC_CTRL if !self.features.v_spec_ctrl => {
                self.spec_ctrl = value;
                self.spec.guest = value;
            }
            msr::PAT => self.vmcb_mut(Clean::NPT).save.g_pat = value,
            msr::DEBUGCTL => self.vmcb_mut(Clean::LBR).save.dbgctl = value,
            _ => {
                let save = &mut self.vmcb_mut(Clean::empty()).save;
                let slot = match index {
                    msr::STAR => &mut save.star,
                    msr::LSTAR => &mut save.lstar,
                    msr::CSTAR => &mut save.cstar,
                    msr::SYSCALL_MASK => &mut save.sfmask,
                    msr::KERNEL_GS_BASE => &mut save.kernel_gs_base,
                    msr::FS_BASE => &mut save.segments[vmcb::SEG_FS].base,
                    msr::GS_BASE => &mut save.segments[vmcb::SEG_GS].base,
                    msr::SYSENTER_CS => &mut save.sysenter_cs,
                    msr::SYSENTER_ESP => &mut save.sysenter_esp,
                    msr::SYSENTER_EIP => &mut save.sysenter_eip,
                    msr::SPEC_CTRL => &mut save.spec_ctrl,
                    _ => return Err(NotMine),
                };
                *slot = value;
            }
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
        self.barrier();
    }

    fn set_tsc(&mut self, offset: u64, ratio: u64) {
        self.tsc_ratio = if self.features.tsc_ratio { ratio } else { TSC_RATIO_ONE };
        self.vmcb_mut(Clean::INTERCEPTS).control.tsc_offset = offset;
    }

    #[inline]
    fn guest_tsc(&self, host: u64) -> u64 {
        scale_tsc(host, self.tsc_ratio).wrapping_add(self.vmcb().control.tsc_offset)
    }

    fn set_msr_filter(&mut self, denied: impl Fn(u32) -> (bool, bool)) {
        for msr in LIVE {
            self.block.msr_map.intercept(msr, false, false);
        }
        self.update_passthrough();
        for msr in LIVE.into_iter().chain([msr::SPEC_CTRL, msr::PRED_CMD, msr::TSC_AUX]) {
            let ((read, write), filter) = (self.block.msr_map.intercepted(msr), denied(msr));
            self.block.msr_map.intercept(msr, read | filter.0, write | filter.1);
        }
    }

    fn give_up_exits(&mut self, exits: FewerExits) {
        let when = |given_up, bits: u32| if given_up { bits } else { 0 };
        let control = &mut self.vmcb_mut(Clean::INTERCEPTS).control;
        control.intercepts[3] &= !(when(exits.hlt, Intercept3::HLT.bits())
            | when(exits.pause, Intercept3::PAUSE.bits()));
        let mwait = Intercept4::MONITOR | Intercept4::MWAIT;
        control.intercepts[4] &= !when(exits.mwait, mwait.bits());
    }

    fn set_virt_ssbd(&mut self, on: bool) {
        self.virt_ssbd = on;
    }

    fn set_limits(&mut self, limits: GuestLimits) {
        self.limits = limits;
        self.update_passthrough();
        self.update_cr4_intercept();
    }

    fn set_paging(&mut self, paging: Paging) {
        self.paging = paging;
        if paging.shadow {
            return self.watch_paging();
        }
        let word = &mut self.vmcb_mut(Clean::INTERCEPTS).control.intercepts[3];
        // With this the guest keeps CR0.TS and CR0.MP to itself.
        let selective = Intercept3::CR0_SEL_WRITE.bits();
        *word = (*word & !selective) | if paging.watch_roles { selective } else { 0 };
        self.update_cr4_intercept();
    }

    fn set_shadow_root(&mut self, root: Hpa) {
        self.load_shadow_root(root);
    }

    fn set_tdp_root(&mut self, root: Hpa) {
        if self.vmcb().control.ncr3 != root.0 {
            self.vmcb_mut(Clean::NPT).control.ncr3 = root.0;
            self.block.request_flush();
        }
    }

    fn flush_tlb(&mut self) {
        self.block.request_flush();
    }

    fn inject(&mut self, event: Event) {
        self.inject_event(event);
    }

    #[inline]
    fn injecting(&self) -> bool {
        self.vmcb().control.event_inj & vmcb::event::VALID != 0
    }

    fn cancel_injection(&mut self) -> Option<Event> {
        self.take_injection()
    }

    fn offer_interrupt(&mut self, vector: Option<Vector>) {
        self.set_virq(vector.map_or(Virq::Off, Virq::Offer));
    }

    #[inline]
    fn offer_taken(&mut self) -> bool {
        self.virq_taken()
    }

    fn set_interrupt_window(&mut self, on: bool) {
        self.set_virq(if on { Virq::Window } else { Virq::Off });
    }

    fn set_cr8_intercept(&mut self, on: bool) {
        self.intercept_cr(1 << (16 + 8), on || self.cr8_exits);
    }

    fn hide_cache_disable(&mut self, hide: bool) {
        self.shows_cache_disable = !hide;
    }

    fn exit_on_cr8_writes(&mut self) {
        self.cr8_exits = true;
        self.set_cr8_intercept(true);
    }

    fn nmi_allowed(&self) -> bool {
        !self.is_nmi_masked() && !self.interrupt_shadow()
    }

    fn set_nmi_window(&mut self) -> NmiWindow {
        self.open_nmi_window()
    }

    fn settle_step(&mut self) {
        self.end_single_step();
    }

    fn nmi_masked(&self) -> bool {
        self.is_nmi_masked()
    }

    fn set_nmi_masked(&mut self, on: bool) {
        self.mask_nmi(on);
    }

    fn iret_begun(&mut self) {
        self.begin_iret();
    }

    fn own_single_step(&mut self) -> bool {
        core::mem::take(&mut self.nmi.step) == Step::Trapped
    }

    fn set_guest_debug(&mut self, breakpoints: bool, debug: bool) {
        self.guest_debug = (breakpoints, debug);
        let word = &mut self.vmcb_mut(Clean::INTERCEPTS).control.intercepts[2];
        *word = (*word & !(1 << 3)) | (u32::from(breakpoints) << 3);
    }

    fn reset(&mut self, init: bool) {
        self.reset_registers(init);
        let block = self.vmcb_mut(Clean::ALL);
        block.save.rip = 0xfff0;
        block.save.rflags = 2;
        block.save.rsp = 0;
        block.save.cpl = 0;
        block.control.int_state = 0;
        block.control.event_inj = 0;
        if !init {
            block.save.sysenter_cs = 0;
            block.save.sysenter_esp = 0;
            block.save.sysenter_eip = 0;
            self.extended.set_xcr0(1);
            self.extended.set_xss(0);
        }
        // As in stock KVM by INIT, too.
        let _ = self.set_msr(msr::SPEC_CTRL, 0);
        self.set_virq(Virq::Off);
        self.mask_nmi(false);
        self.block.request_flush();
    }
}

impl<C: Cpu> Svm<C> {
    fn hidden_cr0(&self) -> u64 {
        self.cr0_hidden.into()
    }
}
