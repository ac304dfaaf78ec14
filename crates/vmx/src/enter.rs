//! One virtual CPU under VMX, and the world switch.
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

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use backend::{FewerExits, Gprs, GuestLimits, Paging, RSP, TSC_RATIO_ONE};
use cpu::{Cpu, VmxSwitch};
use guest_live::{DebugRegs, Exchanged, Extended, Has, LiveDr6, SyscallMsrs};
use host::{KBox, NoMemory, hostcpu, warn};
use x86::{
    msr,
    vmcs::{
        ENTRY_FAILURE, ReadWrite, event,
        field::{self, Width},
        invept,
    },
};

use crate::{
    apicv::{ApicPage, Serving},
    exits,
    features::Features,
    fields::{self, Slot},
    host_state::HostThread,
    inject::Offer,
    mitigations,
    page_log::PageLog,
    paging::INVALID_STATE,
    preemption_timer::Watched,
    speculation::SPECULATION,
    vmcs::{self, Vmcs},
};

/// What the next entry has to do beside entering, as bits: usually nothing.
pub(crate) mod attention {
    /// Forget the translations of this guest's linear addresses.
    pub const FLUSH: u16 = 1 << 0;
    /// Forget everything that was made from its TDP tables.
    pub const FLUSH_TDP: u16 = 1 << 4;
    /// An interrupt is offered.
    pub const OFFER: u16 = 1 << 1;
    /// An event is injected: the exit takes it out of the VMCS.
    pub const INJECT: u16 = 1 << 2;
    /// VMX is off on this CPU: do not enter.
    pub const OFF: u16 = 1 << 3;
    /// An interrupt waits that the CPU delivers by itself, and the shadow of STI may be over.
    pub const SHADOW: u16 = 1 << 7;
    /// Flush the L1 data cache.
    pub const FLUSH_L1D: u16 = 1 << 5;
    /// A deadline is watched, or is so no more and the CPU's timer has yet to be told.
    pub const TIMER: u16 = 1 << 6;
    /// The CPU's timer was set for the next entry already.
    pub const TIMER_SET: u16 = 1 << 8;
    /// The guest is in a mode that the CPU does not run: do not enter.
    pub const INTERPRET: u16 = 1 << 9;

    const ALL: [u16; 10] =
        [FLUSH, FLUSH_TDP, OFFER, INJECT, OFF, SHADOW, FLUSH_L1D, TIMER, TIMER_SET, INTERPRET];
    // No two are the same bit.
    const _: () = {
        let (mut seen, mut at) = (0, 0);
        while at < ALL.len() {
            assert!(seen & ALL[at] == 0);
            seen |= ALL[at];
            at += 1;
        }
    };
}

/// What no exit that stays in the loop looks at. On the heap, so that a vCPU that is being made fits
/// on a stack.
#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) id: u64,
    pub(crate) host_debugctl: u64,
    /// Counters of the host are stopped.
    pub(crate) perf_stopped: bool,
    pub(crate) cstar: u64,
    pub(crate) debug: DebugRegs,
    pub(crate) dr6: LiveDr6,
    pub(crate) extended: Extended,
    /// Exits that the VMM gave up.
    pub(crate) fewer: FewerExits,
    /// The guest has written SPEC_CTRL something other than zero since its reset.
    pub(crate) spec_ctrl_used: bool,
    /// Reads and writes of [`SPECULATION`] that the VMM's filter denies.
    pub(crate) speculation_denied: [(bool, bool); SPECULATION.len()],
}

impl Cold {
    /// Out of line, for the stack.
    #[inline(never)]
    fn new(features: &Features) -> Result<KBox<Self>, NoMemory> {
        let has = Has { xsaves: features.xsaves, pku: features.pku };
        KBox::new(Self {
            id: IDS.fetch_add(1, Relaxed),
            host_debugctl: 0,
            perf_stopped: false,
            cstar: 0,
            debug: DebugRegs::default(),
            dr6: LiveDr6::default(),
            extended: Extended::new(has, hostcpu::host_xss()),
            fewer: FewerExits::default(),
            spec_ctrl_used: false,
            speculation_denied: [(false, false); SPECULATION.len()],
        })
    }
}

/// One virtual CPU under VMX.
#[derive(Debug)]
pub struct Vmx<C: Cpu> {
    pub(crate) cpu: C,
    pub(crate) vmcs: Vmcs,
    /// [`attention`].
    pub(crate) attention: u16,
    /// An instruction was retired in software since the exit: what the VMCS says of the shadow of
    /// STI and MOV SS is over.
    pub(crate) shadow_over: Cell<bool>,
    /// An NMI waits for what comes behind the shadow of STI, by the interrupt window.
    pub(crate) nmi_behind_sti: bool,
    /// The VM-instruction error of an entry that failed without an exit.
    pub(crate) refused: u32,
    pub(crate) switch: VmxSwitch,
    pub(crate) offer: Offer,
    pub(crate) deadline: Watched,
    pub(crate) features: KBox<Features>,
    pub(crate) apic_page: ApicPage,
    /// Whether the CPU serves the local APIC.
    pub(crate) serving: Serving,
    /// Where the CPU has one.
    pub(crate) page_log: Option<PageLog>,
    pub(crate) cr2: u64,
    /// The guest's CR3, and what the CPU has in its place, under shadow paging.
    pub(crate) shadowed_cr3: u64,
    pub(crate) shadow_root: u64,
    pub(crate) cr0: u64,
    pub(crate) cr4: u64,
    pub(crate) efer: u64,
    pub(crate) syscall: SyscallMsrs,
    pub(crate) kernel_gs_base: Exchanged<{ msr::KERNEL_GS_BASE }>,
    pub(crate) limits: GuestLimits,
    pub(crate) paging: Paging,
    /// The host's extended state may have to be exchanged for the guest's.
    pub(crate) extended: bool,
    pub(crate) tsc_aux: u64,
    pub(crate) tsc_offset: u64,
    pub(crate) tsc_ratio: u64,
    pub(crate) host: KBox<HostThread>,
    pub(crate) cold: KBox<Cold>,
}

static IDS: AtomicU64 = AtomicU64::new(1);

impl<C: Cpu> Vmx<C> {
    /// A vCPU in its power-up state.
    #[inline(never)]
    pub fn new(cpu: C, features: Features) -> Result<Self, NoMemory> {
        let mut this = Self {
            cpu,
            vmcs: Vmcs::new(features.revision)?,
            attention: attention::FLUSH | attention::FLUSH_TDP,
            shadow_over: Cell::new(false),
            nmi_behind_sti: false,
            refused: 0,
            switch: VmxSwitch::default(),
            offer: Offer::default(),
            deadline: Watched::new(&features),
            features: KBox::new(features)?,
            apic_page: ApicPage::new()?,
            serving: Serving::No,
            page_log: if features.pml { Some(PageLog::new()?) } else { None },
            cr2: 0,
            shadowed_cr3: 0,
            shadow_root: 0,
            cr0: 0,
            cr4: 0,
            efer: 0,
            syscall: SyscallMsrs::default(),
            kernel_gs_base: Exchanged::default(),
            limits: GuestLimits::default(),
            paging: Paging::default(),
            extended: features.xsave,
            tsc_aux: 0,
            tsc_offset: 0,
            tsc_ratio: TSC_RATIO_ONE,
            host: KBox::new(HostThread::default())?,
            cold: Cold::new(&features)?,
        };
        this.init_control();
        Ok(this)
    }

    /// The privileged operations, for the counts in tests.
    pub fn cpu(&mut self) -> &mut C {
        &mut self.cpu
    }

    /// Reads a field of the VMCS.
    #[inline(always)]
    pub(crate) fn get<W: Width, A>(&self, slot: Slot<W, A>) -> W::Value {
        self.vmcs.get(&self.cpu, slot)
    }

    /// Sets a field of the VMCS.
    #[inline(always)]
    pub(crate) fn set<W: Width>(&self, slot: Slot<W, ReadWrite>, value: W::Value) {
        self.vmcs.set(&self.cpu, slot, value);
    }

    /// What of the VMCS never changes: written when it is current for the first time.
    #[cold]
    pub(crate) fn write_constants(&self) {
        self.vmcs.write_constants(&self.cpu);
        vmcs::write(&self.cpu, field::VIRTUAL_APIC_ADDR, self.apic_page.hpa().0);
        self.write_optional_constants();
    }

    /// Makes what was made from its TDP tables be forgotten, whatever the VPID.
    #[inline(never)]
    fn forget_tdp(&mut self) {
        if self.features.invept_single {
            self.cpu.invept(invept::SINGLE, self.get(fields::EPT_POINTER));
        } else {
            self.cpu.invept(invept::ALL, 0);
        }
    }

    /// What an entry does that is more than usual. False: it does not take place.
    #[cold]
    #[inline(never)]
    fn attend(&mut self) -> bool {
        if self.attention & (attention::OFF | attention::INTERPRET) != 0 {
            return false;
        }
        if self.attention & attention::FLUSH != 0 {
            self.attention &= !attention::FLUSH;
            self.vmcs.forget_translations(&self.cpu, &self.features);
        }
        if self.attention & attention::FLUSH_TDP != 0 {
            self.attention &= !attention::FLUSH_TDP;
            if self.features.ept {
                self.forget_tdp();
            }
        }
        if self.attention & attention::OFFER != 0 {
            self.make_offer();
        }
        if self.attention & attention::SHADOW != 0 {
            self.end_shadow_for_request();
        }
        // The last of all: what is loaded after it can leak.
        if self.attention & attention::FLUSH_L1D != 0 && mitigations::flush_before_entry() {
            self.attention &= !attention::FLUSH_L1D;
        }
        true
    }

    /// The world switch.
    #[inline]
    pub(crate) fn enter_and_exit(&mut self, gprs: &mut Gprs) {
        // Not known: nobody has looked at it since the exit, so it is the guest's own.
        if let Some(rsp) = self.vmcs.fields.get(fields::GUEST_RSP)
            && rsp != gprs.0[RSP]
        {
            self.set(fields::GUEST_RSP, gprs.0[RSP]);
        }
        if self.attention != 0 {
            if self.attention & attention::TIMER != 0 && !self.settle_timer() {
                return self.exit_for_deadline();
            }
            if self.attention & !attention::TIMER != 0 && !self.attend() {
                return self.refuse();
            }
        }
        let entered = self.cpu.vmx_enter(gprs, &mut self.switch);
        self.vmcs.fields.forget();
        self.shadow_over.set(false);
        if !entered {
            return self.refuse();
        }
        let raw = self.cpu.vmread(fields::EXIT_REASON.encoding());
        self.vmcs.fields.learn(fields::EXIT_REASON, raw);
        let reason = raw as u32;
        // An entry that failed late has launched nothing, and injected nothing (SDM vol. 3C §27.8).
        if reason & ENTRY_FAILURE == 0 {
            self.switch.flags |= VmxSwitch::LAUNCHED;
            if self.attention & attention::INJECT != 0 {
                self.settle_injection();
            }
        }
        if exits::needs_rsp(reason) {
            self.look_after_exit(reason, gprs);
        }
    }

    /// The valid bit of what was injected is clear after an exit (SDM vol. 3C §28.2).
    #[cold]
    #[inline(never)]
    fn settle_injection(&mut self) {
        self.attention &= !attention::INJECT;
        let injected = self.get(fields::ENTRY_INTERRUPTION);
        self.vmcs.fields.learn(fields::ENTRY_INTERRUPTION, u64::from(injected & !event::VALID));
    }

    /// After the exits that are not plain instructions.
    #[inline(never)]
    fn look_after_exit(&mut self, reason: u32, gprs: &mut Gprs) {
        gprs.0[RSP] = self.get(fields::GUEST_RSP);
        if reason & ENTRY_FAILURE == 0 {
            self.take_exit_events(reason);
        }
    }

    /// The entry failed without an exit, or could not be tried: nothing of the guest has changed.
    #[cold]
    #[inline(never)]
    fn refuse(&mut self) {
        if self.attention & (attention::OFF | attention::INTERPRET) == attention::INTERPRET {
            return self.vmcs.fields.learn(fields::EXIT_REASON, INVALID_STATE.into());
        }
        self.refused = if self.vmcs.is_loaded() {
            self.cpu.vmread(field::INSTRUCTION_ERROR.encoding()) as u32
        } else {
            0
        };
        self.vmcs.fields.learn(fields::EXIT_REASON, u64::from(exits::NOT_ENTERED));
    }
}

impl<C: Cpu> Drop for Vmx<C> {
    fn drop(&mut self) {
        // The page must not be written after it is freed.
        self.vmcs.clear_elsewhere();
        report_failures();
    }
}

/// Says when VMX instructions have failed since the last time: each is a bug of this module's.
fn report_failures() {
    static REPORTED: AtomicU64 = AtomicU64::new(0);
    let failures = cpu::vmx::failures();
    if REPORTED.swap(failures, Relaxed) != failures {
        warn!("BUG: {failures} VMX instructions have failed");
    }
}
