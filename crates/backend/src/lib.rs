//! The border between the run loop and a hardware backend: what floor 5 asks of SVM or VMX.
//!
//! [`Backend`] is implemented once per instruction set and the run loop is monomorphised over it,
//! so nothing on the exit path is an indirect call. [`Exit`] is the neutral form of an exit.
#![no_std]
#![forbid(unsafe_code)]

pub mod exit;

pub use exit::{CrAccess, Event, Exit, IoExit, PageFault, TaskSource, TaskSwitchExit, TdpFault};

use x86::{
    Gpa, Hpa, Vector,
    apic::{Interrupts, VectorWords},
    segment::{DescriptorTable, Segment},
};

/// The general registers in encoding order: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Gprs(pub [u64; 16]);

/// Index of RAX in [`Gprs`].
pub const RAX: usize = 0;
/// Index of RCX.
pub const RCX: usize = 1;
/// Index of RDX.
pub const RDX: usize = 2;
/// Index of RBX.
pub const RBX: usize = 3;
/// Index of RSP.
pub const RSP: usize = 4;
/// Index of RSI.
pub const RSI: usize = 6;
/// Index of RDI.
pub const RDI: usize = 7;

/// CR0.ET, which is always set.
const CR0_ET: u64 = 1 << 4;
/// CR0.CD and CR0.NW: caching disabled.
pub const CR0_CD_NW: u64 = (1 << 30) | (1 << 29);

/// The ratio of a guest's TSC that runs as fast as the host's; ratios have 32 fractional bits.
pub const TSC_RATIO_ONE: u64 = 1 << 32;

/// The host's TSC by a ratio, as CPUs scale it.
#[inline(always)]
pub fn scale_tsc(host: u64, ratio: u64) -> u64 {
    if ratio == TSC_RATIO_ONE {
        return host;
    }
    ((u128::from(host) * u128::from(ratio)) >> 32) as u64
}

/// A segment register, in encoding order, then LDTR and TR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum SegmentName {
    Es,
    Cs,
    Ss,
    Ds,
    Fs,
    Gs,
    Ldtr,
    Tr,
}

/// The control registers and EFER as the guest sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ControlRegs {
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
}

/// What a guest may do without an exit, derived from its CPUID by the run loop.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestLimits {
    /// CR4 bits that its CPUID offers.
    pub cr4_allowed: u64,
    /// SPEC_CTRL exists for it, on this CPU too.
    pub spec_ctrl: bool,
    /// PRED_CMD exists for it, on this CPU too.
    pub pred_cmd: bool,
    /// FLUSH_CMD exists for it, on this CPU too.
    pub flush_cmd: bool,
    /// RDTSCP or RDPID exists for it: TSC_AUX is live.
    pub tsc_aux: bool,
    /// XSAVE exists for it.
    pub xsave: bool,
    /// INVPCID exists for it.
    pub invpcid: bool,
}

/// Exits that a VMM gives up for guests that have their CPUs to themselves
/// (KVM_CAP_X86_DISABLE_EXITS).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FewerExits {
    /// MONITOR and MWAIT are the guest's.
    pub mwait: bool,
    /// HLT is: the guest's run goes on, without instructions, until an interrupt comes.
    pub hlt: bool,
    /// Loops of PAUSE are not left.
    pub pause: bool,
    /// The guest reads how long its core was in which C-state.
    pub cstate: bool,
}

/// How a guest's addresses are translated, and what of it the run loop wants to see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Paging {
    /// The hardware walks shadow tables and not TDP ones: page faults, INVLPG and the paging
    /// registers exit.
    pub shadow: bool,
    /// Every write of CR0 and CR4 that changes how paging entries are read exits, whoever could own
    /// the registers.
    pub watch_roles: bool,
}

/// The refusal of an MSR that the backend does not own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotMine;

/// Who answers exits. Its methods are inlined into [`Backend::dispatch`]. `S`: what proves to it that it is
/// inside the loop.
pub trait Answer<B, S: Copy> {
    /// The backend whose exits it answers.
    fn backend(&self) -> &B;
    /// Answers an exit of a frequent kind. `Some`: the loop is to be left for this.
    fn frequent(&mut self, section: S, exit: Exit) -> Option<Exit>;
    /// Answers any exit.
    fn rare(&mut self, section: S, exit: Exit) -> Option<Exit>;
}

/// How the moment is found at which a guest can take an NMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum NmiWindow {
    /// The CPU exits then.
    Exit,
    /// The guest's next instruction is stepped over: [`Backend::settle_step`] has to be called after the
    /// exit, whichever it is.
    Step,
    /// An event is injected first, which would push the flags of a step. An interrupt to this CPU
    /// ends the guest's run as soon as the event is delivered; then it is asked again.
    Kick,
}

/// A hardware backend: one virtual CPU's control block and the world switch.
///
/// Between [`load`](Backend::load) and [`unload`](Backend::unload) interrupts are held off; while
/// the guest's segment state is loaded no per-CPU data of the host may be touched (see
/// [`host_segments`](Backend::host_segments)).
pub trait Backend: Send + Sized {
    /// Whether the control block may be held by another CPU: [`settled`](Backend::settled) and
    /// [`settle`](Backend::settle) are called before the loop.
    const SETTLES: bool = false;
    /// Whether PDPTEs are part of the state: [`set_pdptes`](Backend::set_pdptes) is called wherever
    /// the architecture loads them and the hardware does not.
    const LOADS_PDPTES: bool = false;

    /// Whether the registers after a triple fault are what they were before it.
    const KEEPS_STATE_AT_SHUTDOWN: bool = false;

    /// Whether it may be able to end the guest's run at a time.
    const WATCHES_DEADLINES: bool = false;

    /// With interrupts off: whether this CPU, number `here`, may take the control block.
    fn settled(&self, _here: usize) -> bool {
        true
    }
    /// With interrupts on: makes that so, unless the task moves again.
    fn settle(&mut self) {}
    /// The loop is about to be left: completes what of the general registers was not read yet.
    #[inline(always)]
    fn complete(&mut self, _gprs: &mut Gprs) {}

    /// Enters the inner loop on this CPU, number `here`: host state saved, guest state loaded, no interrupts.
    fn load(&mut self, here: usize);
    /// Leaves the inner loop: the reverse. Interrupts are still disabled. `to_user`: most likely the
    /// thread returns to user space for this exit, so that nothing is gained by putting off what the
    /// host needs only there.
    fn unload(&mut self, to_user: bool);
    /// Makes kernel calls possible without leaving the loop: loads the host's segment state.
    fn host_segments(&mut self);
    /// Undoes [`host_segments`](Backend::host_segments).
    fn guest_segments(&mut self);
    /// A new KVM_RUN begins on this thread.
    fn begin_run(&mut self);
    /// Runs the guest until its next exit.
    fn enter(&mut self, gprs: &mut Gprs);
    /// The exit that ended the last [`enter`](Backend::enter).
    fn exit(&self) -> Exit;
    /// Has `answer` answer the exit that ended the last [`enter`](Backend::enter): a frequent kind
    /// from a place of its own, so that the exit itself is never put together there.
    fn dispatch<S: Copy, A: Answer<Self, S>>(answer: &mut A, section: S) -> Option<Exit>;
    /// Raw exit code and information, for reports.
    fn exit_raw(&self) -> [u64; 3];
    /// Whether the last exit interrupted the delivery of an event.
    fn was_delivering(&self) -> bool;
    /// What the hardware says of the last exit, for tracing: code, two words of information, the
    /// event whose delivery it interrupted and that event's error code.
    fn exit_record(&self) -> (u64, [u64; 2], u32, u32);
    /// The event whose delivery the last exit interrupted; it must be injected again.
    fn interrupted_delivery(&self) -> Option<Event>;
    /// It was dealt with: there is none any more.
    fn forget_interrupted_delivery(&mut self);

    /// RIP.
    fn rip(&self) -> u64;
    /// Sets RIP and leaves the interrupt shadow alone.
    fn set_rip(&mut self, rip: u64);
    /// Moves RIP past an instruction that was handled and ends the interrupt shadow.
    fn retire(&mut self, next_rip: u64);
    /// RIP after the exiting instruction where the CPU tells, else `None`.
    fn next_rip(&self) -> Option<u64>;
    /// Instruction bytes where the CPU gives them (decode assists), else empty.
    fn insn_bytes(&self) -> &[u8];
    /// RFLAGS.
    fn rflags(&self) -> u64;
    /// Sets RFLAGS.
    fn set_rflags(&mut self, rflags: u64);
    /// Whether STI or MOV SS holds interrupts off for one instruction.
    fn interrupt_shadow(&self) -> bool;
    /// Sets or clears it.
    fn set_interrupt_shadow(&mut self, on: bool);
    /// Current privilege level.
    fn cpl(&self) -> u8;

    /// A segment register.
    fn segment(&self, name: SegmentName) -> Segment;
    /// Sets a segment register; with SS, also the CPL.
    fn set_segment(&mut self, name: SegmentName, value: Segment);
    /// GDTR.
    fn gdtr(&self) -> DescriptorTable;
    /// Sets GDTR.
    fn set_gdtr(&mut self, value: DescriptorTable);
    /// IDTR.
    fn idtr(&self) -> DescriptorTable;
    /// Sets IDTR.
    fn set_idtr(&mut self, value: DescriptorTable);

    /// Control registers and EFER.
    fn control(&self) -> ControlRegs;
    /// CR0 alone.
    #[inline(always)]
    fn cr0(&self) -> u64 {
        self.control().cr0
    }
    /// CR4 alone.
    #[inline(always)]
    fn cr4(&self) -> u64 {
        self.control().cr4
    }
    /// CR4 as far as CPUID shows it: OSXSAVE and PKE.
    #[inline(always)]
    fn cr4_shown(&self) -> u64 {
        self.control().cr4
    }
    /// EFER alone.
    #[inline(always)]
    fn efer(&self) -> u64 {
        self.control().efer
    }
    /// Attributes of CS alone.
    #[inline(always)]
    fn code_attributes(&self) -> u16 {
        self.segment(SegmentName::Cs).attr
    }
    /// Sets the four PDPTEs that PAE paging goes on with.
    fn set_pdptes(&mut self, _entries: [u64; 4]) {}
    /// The PDPTEs, where they are part of the state.
    fn pdptes(&self) -> [u64; 4] {
        [0; 4]
    }
    /// Sets CR0.
    fn set_cr0(&mut self, value: u64);
    /// Sets CR2.
    fn set_cr2(&mut self, value: u64);
    /// Sets CR3.
    fn set_cr3(&mut self, value: u64);
    /// Sets CR4.
    fn set_cr4(&mut self, value: u64);
    /// Sets EFER.
    fn set_efer(&mut self, value: u64);
    /// Task priority as the hardware holds it, 0 to 15.
    fn cr8(&self) -> u8;
    /// Sets it.
    fn set_cr8(&mut self, value: u8);

    /// DR0 to DR3, DR6, DR7.
    fn debug_regs(&self) -> [u64; 6];
    /// Sets them.
    fn set_debug_regs(&mut self, regs: [u64; 6]);
    /// The guest touched a debug register: lets it own them until the loop is left, or longer
    /// where it has a breakpoint.
    fn own_debug_regs(&mut self);
    /// The guest's access to its debug registers exits, though the hardware's hold something.
    fn watch_debug_regs(&mut self, on: bool);

    /// XCR0.
    fn xcr0(&self) -> u64;
    /// Sets XCR0; the value was validated.
    fn set_xcr0(&mut self, value: u64);
    /// IA32_XSS.
    fn xss(&self) -> u64;
    /// Sets IA32_XSS; the value was validated.
    fn set_xss(&mut self, value: u64);
    /// PKRU.
    fn pkru(&self) -> u32;
    /// Sets PKRU.
    fn set_pkru(&mut self, value: u32);

    /// Reads an MSR that lives in the control block or in hardware.
    fn msr(&self, index: u32) -> Result<u64, NotMine>;
    /// Writes one; the value was validated by the caller.
    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), NotMine>;
    /// The host's CPUID: EAX, EBX, ECX, EDX. Only to measure what it costs not to know them.
    fn host_cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// The host's TSC now.
    fn host_tsc(&mut self) -> u64;
    /// An IBPB that the guest asked for; only where the CPU has PRED_CMD.
    fn prediction_barrier(&mut self);
    /// Sets what is added to the host's TSC and the ratio it is scaled by (32.32 fixed point).
    fn set_tsc(&mut self, offset: u64, ratio: u64);
    /// Guest TSC for a host TSC.
    fn guest_tsc(&self, host: u64) -> u64;

    /// Whether this CPU can end the guest's run at a time ([`Exit::Deadline`]).
    fn watches_deadlines(&self) -> bool {
        false
    }
    /// The guest's run ends when its TSC has reached `deadline`, or sooner; 0: at no time. Instead of an
    /// entry at a time that has passed there is the exit alone.
    #[inline(always)]
    fn watch_deadline(&mut self, _deadline: u64) {}
    /// The same between [`load`](Backend::load) and [`unload`](Backend::unload), of a deadline that is not
    /// 0 and lies ahead of `now`, the guest's TSC. The next entry need not look at the TSC.
    #[inline(always)]
    fn watch_deadline_from(&mut self, _deadline: u64, _now: u64) {}
    /// Whether the time has come.
    #[inline(always)]
    fn deadline_due(&mut self) -> bool {
        false
    }

    /// Makes reads or writes of MSRs exit that the hardware would serve; `denied` says which of the
    /// two. After [`set_limits`](Backend::set_limits) anew.
    fn set_msr_filter(&mut self, denied: impl Fn(u32) -> (bool, bool));
    /// Gives up exits. Once, before the first entry.
    fn give_up_exits(&mut self, exits: FewerExits);
    /// The guest runs without speculative store bypass, by its VIRT_SPEC_CTRL. Outside of
    /// [`load`](Backend::load) and [`unload`](Backend::unload).
    fn set_virt_ssbd(&mut self, _on: bool) {}
    /// Sets what the guest may do without an exit.
    fn set_limits(&mut self, limits: GuestLimits);
    /// Sets how addresses are translated. Before the first entry, and before the registers are
    /// set.
    fn set_paging(&mut self, paging: Paging);
    /// Sets the root of the shadow tables.
    fn set_shadow_root(&mut self, root: Hpa);
    /// Sets the TDP root. If it is another one than before, what the CPU remembers of it
    /// is forgotten before the next entry: its tables may have changed while it was away, or belong
    /// to another VM than when the page was a root last.
    fn set_tdp_root(&mut self, root: Hpa);
    /// Forgets all translations of this guest's linear addresses before the next entry.
    fn flush_tlb(&mut self);
    /// TDP translations were withdrawn or narrowed: forgets, before the next entry, all that was
    /// made from them, guest-physical addresses as well as linear ones. Not called for what is new or
    /// wider: a CPU that finds the old state faults, and finds the new one then.
    ///
    /// It reaches this CPU alone. A vCPU that goes to another CPU than it ran on last finds there
    /// what it left behind, from before any flush since: the backend forgets that by itself.
    fn flush_tdp(&mut self) {
        self.flush_tlb();
    }

    /// After [`Exit::Refused`]: whether the guest is in a state that the CPU cannot run, and is to be executed in
    /// software until an entry is possible.
    fn is_interpreted(&self) -> bool {
        false
    }

    /// Has the CPU log the guest-physical pages that it makes dirty in the TDP tables, or not.
    /// Only asked for where such tables are made (`mmu::Format::logs`).
    fn set_page_log(&mut self, _on: bool) {}
    /// Takes what was logged since the last call. Between [`load`](Backend::load) and
    /// [`unload`](Backend::unload), with the host's segment state.
    fn take_page_log(&mut self, _each: impl FnMut(Gpa)) {}

    /// Injects an event at the next entry.
    fn inject(&mut self, event: Event);
    /// Whether an event waits for the next entry.
    fn injecting(&self) -> bool;
    /// Takes back an event that was to be injected at an entry that did not happen.
    fn cancel_injection(&mut self) -> Option<Event>;
    /// Makes `vector` a virtual interrupt that the guest takes as soon as it can, without an exit;
    /// `None` withdraws it. Replaces a window and an earlier offer.
    fn offer_interrupt(&mut self, vector: Option<Vector>);
    /// After an exit: whether the guest has taken the offered interrupt. True once per offer.
    fn offer_taken(&mut self) -> bool;
    /// Asks for an exit as soon as the guest can take an interrupt. Replaces an offer.
    fn set_interrupt_window(&mut self, on: bool);
    /// Asks for an exit when the guest lowers its priority enough.
    fn set_cr8_intercept(&mut self, on: bool);
    /// Whether CR0.CD and CR0.NW are kept from the hardware, as they are unless this says otherwise. Nothing
    /// where the memory types of guests do not follow them.
    fn hide_cache_disable(&mut self, _hide: bool) {}
    /// Every write of CR8 exits from now on: the local APIC is the VMM's.
    fn exit_on_cr8_writes(&mut self);
    /// Asks for an exit when the guest changes its priority in a way that matters: `offered`, an
    /// interrupt was chosen for the priority of now; `waiting`, one has to wait for a lower one.
    #[inline(always)]
    fn watch_priority(&mut self, offered: bool, waiting: Option<Vector>) {
        self.set_cr8_intercept(offered || waiting.is_some());
    }
    /// Whether a CPU of this kind may serve a local APIC in x2APIC mode by itself: it delivers what
    /// is requested when priorities allow it, and the guest changes its task priority, ends
    /// interrupts and sends some to itself without an exit. Else the methods below are not called.
    const SERVES_APIC: bool = false;
    /// Whether this CPU does.
    #[inline(always)]
    fn can_serve_apic(&self) -> bool {
        false
    }
    /// From the next entry on the hardware serves the APIC, beginning with `state`. An exit
    /// ([`Exit::Eoi`]) tells of the end of those of `reported`. Replaces an offer.
    fn serve_apic(&mut self, _state: &Interrupts, _reported: &VectorWords) {}
    /// Whether it has the state, from [`serve_apic`](Backend::serve_apic) to
    /// [`take_apic`](Backend::take_apic).
    #[inline(always)]
    fn serves_apic(&self) -> bool {
        false
    }
    /// More is requested of the APIC that is served, and what is reported may have changed.
    fn request_interrupts(&mut self, _vectors: &VectorWords, _reported: &VectorWords) {}
    /// What a register of the APIC that is served shows; reads of it do not exit.
    fn show_apic_register(&mut self, _offset: u32, _value: u32) {}
    /// Whether an interrupt waits that the APIC that is served would deliver: one of its own, or
    /// `more`.
    fn served_interrupt_waits(&self, _more: Option<Vector>) -> bool {
        false
    }
    /// Takes the state back. Before the next entry comes [`serve_apic`](Backend::serve_apic) or
    /// [`stop_serving_apic`](Backend::stop_serving_apic).
    fn take_apic(&mut self) -> Interrupts {
        Interrupts::default()
    }
    /// The hardware, of which the state was taken back or which never had it, serves the APIC no
    /// longer.
    fn stop_serving_apic(&mut self) {}
    /// Whether an NMI can be taken now.
    fn nmi_allowed(&self) -> bool;
    /// Asks for an exit as soon as the guest can take an NMI.
    fn set_nmi_window(&mut self) -> NmiWindow;
    /// After the exit behind an entry that [`NmiWindow::Step`] was said for: the guest's flags are its own
    /// again.
    fn settle_step(&mut self) {}
    /// Whether NMIs are masked: one is being handled.
    fn nmi_masked(&self) -> bool;
    /// Sets that.
    fn set_nmi_masked(&mut self, on: bool);
    /// The guest executed IRET while an NMI was being handled.
    fn iret_begun(&mut self);
    /// A #DB exit that was our own single step; true when it was.
    fn own_single_step(&mut self) -> bool;

    /// Which guest-debug exits the VMM asked for: exceptions to intercept.
    fn set_guest_debug(&mut self, breakpoints: bool, debug: bool);

    /// The state after INIT or power-up.
    fn reset(&mut self, init: bool);

    /// The part of it that is the same everywhere: segments, tables, control and debug registers.
    fn reset_registers(&mut self, init: bool) {
        // INIT keeps them (APM vol. 2 table 14-1, SDM vol. 3A table 10-1).
        let caching = if init { self.cr0() & CR0_CD_NW } else { CR0_CD_NW };
        for name in
            [SegmentName::Es, SegmentName::Ss, SegmentName::Ds, SegmentName::Fs, SegmentName::Gs]
        {
            self.set_segment(name, Segment::RESET_DATA);
        }
        self.set_segment(SegmentName::Cs, Segment::RESET_CS);
        self.set_segment(SegmentName::Ldtr, Segment::RESET_LDTR);
        self.set_segment(SegmentName::Tr, Segment::RESET_TR);
        self.set_gdtr(DescriptorTable::RESET);
        self.set_idtr(DescriptorTable::RESET);
        self.set_cr0(CR0_ET | caching);
        self.set_cr2(0);
        self.set_cr3(0);
        self.set_cr4(0);
        self.set_efer(0);
        self.set_debug_regs([0, 0, 0, 0, 0xffff_0ff0, 0x400]);
    }
}
