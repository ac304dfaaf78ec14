//! One virtual CPU under VMX: what belongs to it and to none of its VMCSs.

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use backend::{
    Backend, FewerExits, GuestLimits, Injection, Paging, TSC_RATIO_ONE, reset_registers,
};
use cpu::{Cpu, VmxSwitch};
use guest_live::{DebugRegs, Exchanged, Extended, Has, LiveDr6, SyscallMsrs};
use host::{KBox, NoMemory, hostcpu, warn};
use x86::{
    Cr0, Cr4, Directions, Efer, Reset, Rflags, Vector, msr,
    vmcs::{
        ReadWrite,
        field::{self, Width},
    },
};

use crate::{
    apic_page::{ApicPage, Serving},
    features::Features,
    fields::{self, Slot},
    host_registers::HostThread,
    host_words::TableWatch,
    nested::kept::{Nested, OfL1, OtherMsrs},
    owned::Owned,
    page_log::PageLog,
    permission::{LISTED, SPECULATION},
    preemption_timer::Watched,
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
    /// Clear the CPU's buffers, at each entry from now on.
    pub const CLEAR: u16 = 1 << 10;
    /// A shadow that was given as STI's stands as MOV SS's, for interrupts are off: until the entry it is STI's again when
    /// they come on.
    pub const STI_GIVEN: u16 = 1 << 11;

    const ALL: [u16; 12] = [
        FLUSH, FLUSH_TDP, OFFER, INJECT, OFF, SHADOW, FLUSH_L1D, TIMER, TIMER_SET, INTERPRET,
        CLEAR, STI_GIVEN,
    ];
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

/// An interrupt that the guest is to take as soon as it can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) vector: Option<Vector>,
    /// It was injected at the last entry.
    pub(crate) taken: bool,
}

/// What no exit that stays in the loop looks at. On the heap, so that a vCPU that is being made fits
/// on a stack.
#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) id: u64,
    /// The CPU on which the vCPU was last, whichever of its VMCSs ran.
    pub(crate) last_at: usize,
    /// The guest's CR3, and what the CPU has in its place, under shadow paging.
    pub(crate) shadowed_cr3: u64,
    pub(crate) shadow_root: u64,
    pub(crate) host_debugctl: u64,
    /// Counters of the host are stopped.
    pub(crate) perf_stopped: bool,
    pub(crate) cstar: u64,
    pub(crate) debug: DebugRegs,
    pub(crate) dr6: LiveDr6,
    /// RFLAGS.TF is a debugger's.
    pub(crate) debugger_steps: bool,
    pub(crate) extended: Extended,
    pub(crate) limits: GuestLimits,
    /// Exits that the VMM gave up.
    pub(crate) fewer: FewerExits,
    /// The guest has written SPEC_CTRL something other than zero since its reset.
    pub(crate) spec_ctrl_used: bool,
    /// Reads and writes of [`SPECULATION`] that the VMM's filter denies.
    pub(crate) speculation_denied: [Directions; SPECULATION.len()],
    /// What L1 asks of L2 while that runs.
    pub(crate) of_l1: OfL1,
    /// Reads and writes of [`LISTED`] that the VMM's filter denies.
    pub(crate) listed_denied: [Directions; LISTED.len()],
    /// L1's table registers between two exits of L2.
    pub(crate) tables: TableWatch,
    /// PAT, DEBUGCTL and EFER of an L2 that system-management mode has put aside.
    pub(crate) aside: Option<OtherMsrs>,
    /// The vCPU's words of L1 while L2 runs: vmcs01, which lies beside, is entered with what follows from them.
    pub(crate) words_of_l1: (Cr0, Cr4, Efer),
    /// What was pending of a debug exception at an SMI, and is again behind RSM.
    pub(crate) debug_aside: u64,
}

impl Cold {
    /// Out of line, for the stack.
    #[inline(never)]
    fn new(features: &Features) -> Result<KBox<Self>, NoMemory> {
        let has = Has { xsaves: features.xsaves, pku: features.pku };
        KBox::new(Self {
            // Unique for the host's life: an address may be another vCPU's later.
            id: IDS.fetch_add(1, Relaxed),
            // No CPU: the first run is an arrival.
            last_at: usize::MAX,
            shadowed_cr3: 0,
            shadow_root: 0,
            host_debugctl: 0,
            perf_stopped: false,
            cstar: 0,
            debug: DebugRegs::default(),
            dr6: LiveDr6::default(),
            debugger_steps: false,
            extended: Extended::new(has, hostcpu::host_xss()),
            limits: GuestLimits::default(),
            fewer: FewerExits::default(),
            spec_ctrl_used: false,
            speculation_denied: [Directions::empty(); SPECULATION.len()],
            of_l1: OfL1::default(),
            listed_denied: [Directions::empty(); LISTED.len()],
            tables: TableWatch::default(),
            aside: None,
            words_of_l1: (Cr0::empty(), Cr4::empty(), Efer::empty()),
            debug_aside: 0,
        })
    }
}

/// The shadow behind which an NMI waits that nothing else holds: no interrupt goes before it there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum NmiBehind {
    /// None.
    #[default]
    Nothing,
    /// That of STI, whose end the interrupt window tells.
    Sti,
    /// That of MOV SS, whose end the NMI window tells.
    MovSs,
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
    /// An NMI waits for what comes behind a shadow, and no mask holds it.
    pub(crate) nmi_behind: NmiBehind,
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
    pub(crate) cr0: Cr0,
    pub(crate) cr4: Cr4,
    pub(crate) efer: Efer,
    pub(crate) syscall: SyscallMsrs,
    pub(crate) kernel_gs_base: Exchanged<{ msr::KERNEL_GS_BASE }>,
    pub(crate) paging: Paging,
    /// What follows from `limits` and `paging`.
    pub(crate) owned: Owned,
    /// The host's extended state may have to be exchanged for the guest's.
    pub(crate) extended: bool,
    pub(crate) tsc_aux: u64,
    pub(crate) tsc_offset: u64,
    pub(crate) tsc_ratio: u64,
    pub(crate) host: KBox<HostThread>,
    pub(crate) cold: KBox<Cold>,
    /// The guest has executed an instruction of VMX's, or user space has set such a state: from then on other VMCSs than
    /// the vCPU's own may be active. Most guests that may be hypervisors are none.
    pub(crate) beside: bool,
    /// The guest may be a hypervisor.
    pub(crate) nested: Option<KBox<Nested>>,
}

static IDS: AtomicU64 = AtomicU64::new(1);

impl<C: Cpu> Vmx<C> {
    /// A vCPU in its power-up state.
    #[inline(never)]
    pub fn new(cpu: C, features: Features) -> Result<Self, NoMemory> {
        let mut this = Self {
            cpu,
            vmcs: Vmcs::new(features.revision)?,
            // Whatever the CPU has of this VPID or of these tables is of before.
            attention: attention::FLUSH | attention::FLUSH_TDP,
            shadow_over: Cell::new(false),
            nmi_behind: NmiBehind::Nothing,
            refused: 0,
            switch: VmxSwitch::default(),
            offer: Offer::default(),
            deadline: Watched::new(&features),
            features: KBox::new(features)?,
            apic_page: ApicPage::new()?,
            serving: Serving::No,
            page_log: if features.pml { Some(PageLog::new()?) } else { None },
            cr2: 0,
            cr0: Cr0::empty(),
            cr4: Cr4::empty(),
            efer: Efer::empty(),
            syscall: SyscallMsrs::default(),
            kernel_gs_base: Exchanged::default(),
            paging: Paging::default(),
            owned: Owned::of(Paging::default(), &GuestLimits::default()),
            // Until somebody has set XCR0 it is not known whether the two differ.
            extended: features.xsave,
            tsc_aux: 0,
            tsc_offset: 0,
            tsc_ratio: TSC_RATIO_ONE,
            host: KBox::new(HostThread::default())?,
            cold: Cold::new(&features)?,
            beside: false,
            nested: None,
        };
        // Before anybody runs it: what is set is noted, and written at the first load.
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

    /// Sets a field of the VMCS by a call.
    pub(crate) fn set_rarely<W: Width>(&self, slot: Slot<W, ReadWrite>, value: W::Value) {
        self.vmcs.set_rarely(&self.cpu, slot, value);
    }

    /// What of the VMCS never changes: written when it is current for the first time.
    #[cold]
    pub(crate) fn write_constants(&self) {
        self.vmcs.write_constants(&self.cpu);
        // Behind the VMCS's own: this page is the vCPU's, and both of its VMCSs name it.
        vmcs::write(&self.cpu, field::VIRTUAL_APIC_ADDR, self.apic_page.hpa().0);
        self.write_optional_constants();
    }
}

impl<C: Cpu> Backend for Vmx<C> {
    fn reset(&mut self, reset: Reset) {
        // Before the registers, which are written by who owns which bit.
        self.set_rarely(fields::CR0_MASK, !self.owned_cr0().bits());
        self.set_rarely(fields::CR4_MASK, !self.owned_cr4().bits());
        // VMX operation goes before the registers are set: its rules would refuse their reset values.
        self.leave_operation();
        reset_registers(self, reset);
        // A halted guest that is reset runs.
        self.end_halt();
        self.set_rarely(fields::GUEST_RIP, 0xfff0);
        self.set_rarely(fields::GUEST_RSP, 0);
        self.set_rarely(fields::GUEST_RFLAGS, Rflags::RESET.bits());
        self.shadow_over.set(false);
        self.set_rarely(fields::GUEST_INTERRUPTIBILITY, 0);
        // A trap of before the reset must not come behind its first instruction.
        self.set_rarely(fields::GUEST_PENDING_DEBUG, 0);
        self.cold.debug_aside = 0;
        // INIT leaves these as they are (SDM vol. 3A table 10-1).
        if reset == Reset::PowerUp {
            self.set_rarely(fields::GUEST_SYSENTER_CS, 0);
            self.set_rarely(fields::GUEST_SYSENTER_ESP, 0);
            self.set_rarely(fields::GUEST_SYSENTER_EIP, 0);
            self.cold.extended.set_xcr0(1);
            self.cold.extended.set_xss(0);
        }
        self.reset_spec_ctrl();
        // Nothing that was on its way into the guest outlasts a reset.
        let _ = self.cancel_injection();
        self.offer_interrupt(None);
        self.open_nmi_window(false);
        // A reset guest's tables are others.
        self.attention |= attention::FLUSH;
    }
}

impl<C: Cpu> Drop for Vmx<C> {
    fn drop(&mut self) {
        // The page must not be written after it is freed.
        self.vmcs.clear_elsewhere();
        // The second and the third VMCS of a guest that was a hypervisor.
        if let Some(n) = &self.nested {
            n.clear_elsewhere();
        }
        report_failures();
    }
}

/// Says when VMX instructions have failed since the last time: each is a bug of this module's.
fn report_failures() {
    // Counted by the instructions themselves, in the world switch's crate.
    static REPORTED: AtomicU64 = AtomicU64::new(0);
    let failures = cpu::vmx::failures();
    if REPORTED.swap(failures, Relaxed) != failures {
        warn!("BUG: {failures} VMX instructions have failed");
    }
}
