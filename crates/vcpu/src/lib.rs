//! A virtual CPU: the run loop and the handlers of its exits, generic over the backend.
//!
//! [`run`] is the outer loop, preemptible, where a vCPU sleeps and leaves for user space.
//! [`inner`] is the inner loop, where interrupts are off and the cheap exits are answered without
//! ever leaving it. What they share is [`Vcpu`].
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod apic;
mod exits;
mod hyperv;
mod nested;
mod observe;
mod paging;
pub mod pv;
pub mod run;
pub mod state;
mod time;

pub use msr::By;
pub use run::user_exit::{ErrorData, RunInput, RunOutput, UserExit};
pub use state::registers::{Regs, Sregs};
pub use time::tsc::is_close;

use backend::{Backend, Gprs};
use cpuid::{GuestCpuid, Supported};
use host::{Arc, KBox, NoMemory, fpu::GuestFpu};
use mmu::{AddressSpace, CodeFetch, TableCache};
use msr::{HostMsrs, MsrStore};
use stats::VcpuStats;
use vm::{VmRef, msr_filter::MsrFilter, settings::quirk, vcpu_shared::SharedVcpu};
use x86::{Reset, Vector};

/// A virtual CPU. Owned by whoever holds its mutex: one thread at a time.
pub struct Vcpu<B: Backend> {
    // What the inner loop touches comes first.
    pub(crate) b: B,
    pub(crate) gprs: Gprs,
    pub(crate) pending: run::pending::Pending,
    /// The CPU logs written pages.
    pub(crate) page_log: bool,
    pub(crate) device: exits::device::Device,
    pub(crate) msrs: state::msrs::Msrs,
    pub(crate) events: run::events::Events,
    pub(crate) time: time::Time,
    /// What is counted: also in `shared`, here without the way through it.
    pub(crate) stats: Arc<VcpuStats>,
    pub(crate) code: exits::code::Code,
    pub(crate) mmu: paging::Mmu,
    pub(crate) shared: SharedVcpu,
    pub(crate) vm: VmRef,
    pub(crate) cpuid: KBox<GuestCpuid>,
    pub(crate) rare: KBox<Rare>,
    /// What an observed vCPU has yet to tell.
    pub(crate) observation: KBox<observe::Observation>,
    pub(crate) fpu: KBox<GuestFpu>,
    pub(crate) pv: KBox<pv::PvState>,
    pub(crate) smm: state::smm::Smm,
}

/// What is looked at once in a run, or less.
#[derive(Debug)]
pub(crate) struct Rare {
    /// The pages of a guest's hypervisor that were looked at last.
    pub last_pages: mmu::LastPages,
    /// What this host can offer.
    pub offered: Offered,
    /// The kernel makes the CPU raise #AC for split locks. It is not asked where the guest's GS base may be loaded.
    pub detects_split_locks: bool,
    /// KVM_RUN was called before.
    pub has_run: bool,
    /// No guest was entered since the nested state was set: the times in that one are of a TSC that is still to come.
    pub nested_restored: bool,
    /// What of the events user space has given.
    pub given: run::given::Given,
    /// Where system-management mode was entered, which is where a pending debug exception that was put aside belongs.
    pub rip_of_smi: u64,
    /// Signals to be blocked during KVM_RUN.
    pub signal_mask: Option<host::task::SignalSet>,
    /// Which MSRs the guest may access.
    pub msr_filter: Option<Arc<MsrFilter>>,
    /// The guest was told that its processor keeps a hypervisor's branch predictions from its guests.
    pub keeps_l2_apart: bool,
    /// Wakes an L2 that halts.
    pub nested_wake: Option<nested::wake::WakeTimer>,
    /// PDPTEs of a restored L2 are loaded before its entry.
    pub pdptes_due: bool,
    /// What the VMM debugs in the guest.
    pub debug: state::debug::Debug,
    /// The vector of whose end the VMM's I/O APIC is to hear.
    pub ended: Vector,
    /// Turns of the loop that may not have reached the boundary of an instruction.
    pub stalls: run::events::Stalls,
    /// What accompanies the last internal error.
    pub error: run::user_exit::ErrorData,
    /// The TSC that the guest has.
    pub tsc: time::tsc::Tsc,
    /// With which others it was set.
    pub tsc_round: vm::time::Round,
    /// Of which of the host's clocks, and since which of its sleeps, that follows.
    pub clock_source: u32,
}

/// What this host can offer its guests, found out at load.
#[derive(Clone, Copy, Debug)]
pub struct Offered {
    /// CPUID.
    pub cpuid: &'static Supported,
    /// MSRs.
    pub msrs: &'static HostMsrs,
}

/// The parts of a vCPU that lie in memory of their own: the vCPU itself has to fit on the stack once.
struct Parts {
    observation: KBox<observe::Observation>,
    rare: KBox<Rare>,
    roots: paging::roots::Roots,
    shadow: Option<KBox<paging::shadow::Shadow>>,
    tables: KBox<TableCache>,
    code: exits::code::Code,
    cpuid: KBox<GuestCpuid>,
    store: KBox<MsrStore>,
    fpu: KBox<GuestFpu>,
    user_io: exits::device::user_io::UserIo,
    pv: KBox<pv::PvState>,
}

/// Moves what `make` makes to the heap, in a stack frame of its own.
#[inline(never)]
pub(crate) fn boxed<T>(make: impl FnOnce() -> T) -> Result<KBox<T>, NoMemory> {
    KBox::new(make())
}

/// From a constant, so that it is copied from there and not by way of the stack.
#[inline(never)]
pub(crate) fn code_fetch() -> Result<KBox<CodeFetch>, NoMemory> {
    const EMPTY: CodeFetch = CodeFetch::new();
    KBox::new(EMPTY)
}

#[inline(never)]
fn msr_store(offered: &Offered) -> Result<KBox<MsrStore>, NoMemory> {
    KBox::new(MsrStore::new(offered.msrs).map_err(|_| NoMemory)?)
}

impl<B: Backend> Vcpu<B> {
    /// A vCPU on a fresh backend.
    pub fn new(
        b: B,
        shared: SharedVcpu,
        vm: VmRef,
        offered: Offered,
    ) -> Result<KBox<Self>, NoMemory> {
        Self::on(KBox::new(b)?, shared, vm, offered)
    }

    /// A vCPU on a fresh backend that lies on no stack.
    pub fn on(
        b: KBox<B>,
        shared: SharedVcpu,
        vm: VmRef,
        offered: Offered,
    ) -> Result<KBox<Self>, NoMemory> {
        let mut this = Self::assemble(b, shared, vm, offered)?;
        // Before the registers are reset: what exits, and where CR0, CR3 and CR4 are kept, follows from it.
        let paging = this.mmu.roots.paging();
        this.b.set_paging(paging);
        this.reset_registers(Reset::PowerUp);
        // KVM starts a guest's TSC at zero when its vCPU is made. The offset is in the guest's ticks, of a rate that the
        // VMM may have chosen for the whole VM (KVM API §4.55): the ratio comes first.
        let (host, ratio) = (this.b.host_tsc(), this.rare.tsc.ratio);
        this.b.set_tsc(0, ratio);
        // Without an offset yet.
        let host = this.scaled_tsc(host);
        let Self { vm, rare, .. } = &mut *this;
        let offset = vm.new_vcpu_tsc_offset(host, rare.tsc.khz, &mut rare.tsc_round);
        this.rare.tsc.offset = offset;
        this.put_tsc();
        this.follow_fewer_exits();
        // A vCPU that never gets a CPUID has to be in force as well: all that exists for nobody exits.
        this.apply_cpuid();
        time::init_timer(&this.b, &this.shared.lapic);
        Ok(this)
    }

    /// Makes a vCPU: its parts, then all of it in its place. What is large is made in a function of its own, so
    /// that no stack frame holds two of them.
    #[inline(never)]
    fn assemble(
        b: KBox<B>,
        shared: SharedVcpu,
        vm: VmRef,
        offered: Offered,
    ) -> Result<KBox<Self>, NoMemory> {
        let parts = Parts {
            observation: KBox::new(observe::Observation::default())?,
            rare: KBox::new(Rare {
                last_pages: mmu::LastPages::new(),
                offered,
                detects_split_locks: host::hostcpu::detects_split_locks(),
                has_run: false,
                nested_restored: false,
                given: run::given::Given::default(),
                rip_of_smi: 0,
                signal_mask: None,
                msr_filter: None,
                keeps_l2_apart: false,
                nested_wake: None,
                pdptes_due: false,
                debug: state::debug::Debug::default(),
                ended: Vector(0),
                stalls: run::events::Stalls::default(),
                error: ErrorData::default(),
                tsc: time::tsc::Tsc::of(vm.tsc_khz()),
                tsc_round: vm::time::Round::default(),
                clock_source: host::clock::source_generation(),
            })?,
            roots: paging::roots::Roots::new(vm.paging)?,
            shadow: if vm.paging.tdp { None } else { Some(paging::shadow::Shadow::new()?) },
            tables: boxed(TableCache::new)?,
            code: exits::code::Code::new()?,
            cpuid: boxed(|| GuestCpuid::new(offered.cpuid))?,
            store: msr_store(&offered)?,
            fpu: KBox::new(GuestFpu::alloc()?)?,
            user_io: exits::device::user_io::UserIo::new()?,
            pv: boxed(pv::PvState::default)?,
        };
        KBox::make(|| Self::place(b, shared, vm, parts))
    }

    #[inline(never)]
    fn place(b: KBox<B>, shared: SharedVcpu, vm: VmRef, parts: Parts) -> Self {
        // Outside of system-management mode, as at power-up.
        let memory = vm.memory_in(AddressSpace::Main).clone();
        Self {
            b: b.into_inner(),
            gprs: Gprs::default(),
            pending: run::pending::Pending::default(),
            page_log: false,
            device: exits::device::Device {
                seen: exits::device::DeviceSeen::default(),
                user_io: parts.user_io,
                io_data: [0; 8],
            },
            msrs: state::msrs::Msrs { store: parts.store, filtered: false, cpuid_faults: false },
            events: run::events::Events::default(),
            time: time::Time::default(),
            stats: shared.stats.clone(),
            code: parts.code,
            mmu: paging::Mmu {
                memory,
                roots: parts.roots,
                shadow: parts.shadow,
                stage: None,
                tables: parts.tables,
            },
            shared,
            vm,
            cpuid: parts.cpuid,
            rare: parts.rare,
            observation: parts.observation,
            fpu: parts.fpu,
            pv: parts.pv,
            smm: state::smm::Smm::default(),
        }
    }

    /// The half that other CPUs touch.
    pub fn shared(&self) -> &SharedVcpu {
        &self.shared
    }

    /// Bytes for the port I/O page: what the guest writes, or what user space answers.
    pub fn io_data(&mut self) -> &mut [u8; 8] {
        &mut self.device.io_data
    }

    /// The backend that runs the vCPU.
    pub fn backend(&mut self) -> &mut B {
        &mut self.b
    }

    /// Registers after INIT or power-up.
    pub(crate) fn reset_registers(&mut self, reset: Reset) {
        // First: all that follows acts on the control block that runs, which has to be L1's.
        self.abandon_l2();
        self.b.hide_cache_disable(self.vm.settings.has_quirk(quirk::CD_NW_CLEARED));
        self.b.reset(reset);
        // A VMM with a local APIC of its own hears of each change of CR8 (KVM_EXIT_SET_TPR).
        if !self.shared.in_kernel_apic {
            self.b.exit_on_cr8_writes();
        }
        self.rare.debug.regs_reset(&mut self.b);
        self.gprs = Gprs::default();
        // RDX holds the processor signature.
        let signature = self.cpuid.signature();
        self.gprs.0[backend::RDX] = u64::from(if signature == 0 { 0x600 } else { signature });
        // What waits for the local APIC waits on.
        let external = self.events.external.filter(|_| self.shared.in_kernel_apic);
        let outer = self.events.outer.survivors();
        self.events = run::events::Events { external, outer, ..run::events::Events::default() };
        self.reset_smm();
        // As on stock KVM: an NMI that has come before is not for whatever starts now.
        self.shared.set_nmis(0);
        self.pending.after_exit.set_offered(None);
        // An answer that comes after the reset belongs to no instruction any more.
        self.device.user_io.forget();
        self.publish_priority();
        self.cpuid_inputs_changed();
        self.mmu.note_role(&self.b);
        self.registers_replaced();
        // The reset has set GIF.
        self.follow_gate();
        self.pending.raise();
    }
}
