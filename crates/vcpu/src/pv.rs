//! The paravirtual services of a vCPU: clock, steal time, PV EOI, hypercalls.
//!
//! Pages in guest memory are reached through the VMM's mapping, outside the inner loop. A page
//! that cannot be reached is skipped: the guest asked for it, and only the guest loses by it.

use backend::{Backend, RAX, RBX, RCX, RDX, RSI};
use cpuid::GuestCpuid;
use host::{clock, task};
use mmu::Section;
use msr::By;
use pv::{
    PvEoi, Shared, SharedTake, StealTime,
    clock::{ClockPage, Scale, WallClock},
    error::HypercallError,
    hypercall::{self, ClockPairing, Hypercall, Registers},
    msr::{AsyncPf, PvMsr},
    take_flush,
};
use vm::{
    VmRef,
    irq::Irqchip,
    memory::{MemoryError, VmMemory},
    vcpu_shared::Request,
};
use x86::{
    Exception, Gpa, Vector,
    cpuid::{Feature, feature},
    msr as number,
};
use zerocopy::IntoBytes;

use crate::{
    Vcpu, exits::code::CodeState as _, hyperv::HyperV, run::outcome::Next, state::msrs::Refused,
};

/// A structure in guest memory.
pub(crate) struct GuestPage<'a> {
    pub(crate) memory: &'a VmMemory,
    pub(crate) at: Gpa,
}

impl<'a> GuestPage<'a> {
    /// The structure at `at` in the memory of `vm`.
    fn of(vm: &'a VmRef, at: Gpa) -> Self {
        Self { memory: vm.memory(), at }
    }
}

impl Shared for GuestPage<'_> {
    type Error = MemoryError;
    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.read(Gpa(self.at.0.wrapping_add(offset as u64)), data)
    }
    fn write(&self, offset: usize, data: &[u8]) -> Result<(), MemoryError> {
        self.memory.write(Gpa(self.at.0.wrapping_add(offset as u64)), data)
    }
}

impl SharedTake for GuestPage<'_> {
    fn take(&self, offset: usize) -> Result<u8, MemoryError> {
        let at = Gpa(self.at.0.wrapping_add(offset as u64));
        let mut old = [0];
        loop {
            self.memory.read(at, &mut old)?;
            let [byte] = old;
            // Another vCPU changes it once at most: from preempted to a flush that is wanted.
            if byte == 0 || self.memory.cmpxchg(at, 1, byte.into(), 0)? {
                return Ok(byte);
            }
            // A guest that changes it without end keeps nobody but itself.
            task::cond_resched();
            if task::handle_work().is_err() {
                return Err(MemoryError::Interrupted);
            }
        }
    }
}

/// Receivers of one hypercall's IPI that are served with interrupts off.
const IPIS_IN_LOOP: usize = 16;

/// What a vCPU's guest has switched on.
#[derive(Clone, Copy, Debug, Default)]
pub struct PvState {
    clock_page: Option<Gpa>,
    steal: StealTime,
    eoi: PvEoi,
    stopped: bool,
    // As written, for RDMSR and KVM_GET_MSRS.
    wall_clock_msr: u64,
    system_time_msr: u64,
    steal_msr: u64,
    eoi_msr: u64,
    poll_off: bool,
    async_pf_msr: u64,
    async_pf_vector_msr: u64,
    /// What of Hyper-V's interface is used.
    pub(crate) hyperv: HyperV,
    /// What the guest's CPUID does not offer is refused (KVM_CAP_ENFORCE_PV_FEATURE_CPUID).
    pub(crate) enforced: bool,
}

impl PvState {
    /// INIT: nothing is written any more into pages that a kernel before had.
    pub(crate) fn forget_pages(&mut self) {
        // Hyper-V's MSRs outlast INIT, and what the VMM has switched on is the VMM's: as stock KVM has it.
        let Self { wall_clock_msr, poll_off, hyperv, enforced, .. } = *self;
        *self = Self { wall_clock_msr, poll_off, hyperv, enforced, ..Self::default() };
    }

    /// KVM_KVMCLOCK_CTRL. False without a clock page.
    pub(crate) fn mark_stopped(&mut self) -> bool {
        self.stopped = self.clock_page.is_some();
        self.stopped
    }

    /// Whether the guest has a clock page.
    pub(crate) fn has_clock_page(&self) -> bool {
        self.clock_page.is_some()
    }

    /// Whether the guest may use a service: its CPUID offers it, or nobody asks.
    fn allows(&self, cpuid: &GuestCpuid, service: Feature) -> bool {
        !self.enforced || cpuid.has(service)
    }

    /// Whether the MSR is one of a service that the guest may use.
    fn allows_msr(&self, cpuid: &GuestCpuid, index: u32) -> bool {
        let service = match index {
            number::KVM_WALL_CLOCK | number::KVM_SYSTEM_TIME => feature::KVM_CLOCKSOURCE,
            number::KVM_WALL_CLOCK_NEW | number::KVM_SYSTEM_TIME_NEW => feature::KVM_CLOCKSOURCE2,
            number::KVM_STEAL_TIME => feature::KVM_STEAL_TIME,
            number::KVM_PV_EOI_EN => feature::KVM_PV_EOI,
            number::KVM_POLL_CONTROL => feature::KVM_POLL_CONTROL,
            number::KVM_LAZY_TSC_DEADLINE => feature::KVM_LAZY_TSC_DEADLINE,
            number::KVM_ASYNC_PF_EN => feature::KVM_ASYNC_PF,
            number::KVM_ASYNC_PF_INT | number::KVM_ASYNC_PF_ACK => feature::KVM_ASYNC_PF_INT,
            _ => return true,
        };
        self.allows(cpuid, service)
    }

    /// Whether the guest polls itself when it halts (MSR_KVM_POLL_CONTROL).
    pub(crate) fn guest_polls(&self) -> bool {
        self.poll_off
    }
}

/// Publishes the time at which the VM began, for the clock that counts from there.
fn publish_wall_clock(vm: &VmRef, at: Gpa) {
    let (guest_ns, host) = vm.clock_now();
    let _ = WallClock::publish(&GuestPage::of(vm, at), host.real_ns, guest_ns);
}

impl<B: Backend> Vcpu<B> {
    /// Publishes the clock page, if the guest has one.
    pub(crate) fn publish_clock(&mut self) {
        let Some(at) = self.pv.clock_page else { return };
        let sample =
            self.vm.clock_sample(Scale::from_khz(self.rare.tsc.khz), |host| self.b.guest_tsc(host));
        let stopped = core::mem::take(&mut self.pv.stopped);
        let _ = ClockPage::publish(&GuestPage::of(&self.vm, at), &sample, stopped);
    }

    /// The steal time's page is another one ([`Request::StealTime`]): the guest may come from a host that has vCPUs leave flushes of
    /// others' TLBs to it.
    #[cold]
    #[inline(never)]
    pub(crate) fn take_pv_flush(&mut self) {
        let Some(at) = self.pv.steal.page() else { return };
        if take_flush(&GuestPage::of(&self.vm, at)) != Ok(true) {
            return;
        }
        self.mmu.flush_guest_tlb(&mut self.b);
        if !self.mmu.roots.is_shadow() {
            // L1's and L2's: which of them was to be flushed nobody says.
            self.b.flush_tdp();
        }
    }

    /// Before every entry from the outer loop: the lazy deadline's page, and steal time.
    #[inline]
    pub(crate) fn before_entry_pv(&mut self) {
        self.sync_lazy_deadline();
        if self.pv.steal.page().is_none() {
            return;
        }
        let delay = task::run_delay_ns();
        if self.pv.steal.outdated(delay)
            && let Some(at) = self.pv.steal.page()
        {
            let mut steal = self.pv.steal;
            let _ = steal.update(&GuestPage::of(&self.vm, at), delay);
            self.pv.steal = steal;
        }
    }

    /// Offers the guest to leave its EOI to a flag in memory: of `vector`, which is being offered,
    /// or of what is in service. Interrupts are off, so the flag is written only where its page is mapped.
    #[inline]
    pub(crate) fn offer_pv_eoi(&mut self, s: Section<'_>, vector: Option<Vector>) {
        if let Some(at) = self.pv.eoi.flag() {
            self.offer_pv_eoi_at(s, at, vector);
        }
    }

    #[inline(never)]
    fn offer_pv_eoi_at(&mut self, s: Section<'_>, at: Gpa, vector: Option<Vector>) {
        // One flag, one interrupt: a second offer would take the first one's end for its own.
        if !self.shared.in_kernel_apic || self.pending.pv_eoi_offered {
            return;
        }
        let lapic = &self.shared.lapic;
        let possible = match vector {
            Some(vector) => lapic.pv_eoi_possible(vector),
            None => lapic.pv_eoi_candidate().is_some(),
        };
        if !possible {
            return;
        }
        // Not the memory of system-management mode: the pages of the guest's kernel lie in the other.
        let view = self.vm.memory().view(s);
        let page = MappedPage { memory: self.vm.memory(), view: &view, at };
        let mut eoi = self.pv.eoi;
        let offered = eoi.offer(&page).is_ok();
        self.pv.eoi = eoi;
        self.pending.pv_eoi_offered = offered;
    }

    /// Collects an offered PV EOI inside the loop, before the APIC is looked at. False when the flag's page cannot be
    /// reached here: the loop is to be left.
    #[inline]
    pub(crate) fn collect_pv_eoi(&mut self, s: Section<'_>) -> bool {
        !self.pending.pv_eoi_offered || self.collect_offered_pv_eoi(s)
    }

    #[inline(never)]
    fn collect_offered_pv_eoi(&mut self, s: Section<'_>) -> bool {
        let Some(at) = self.pv.eoi.flag() else { return false };
        let view = self.vm.memory().view(s);
        let mut eoi = self.pv.eoi;
        let Ok(ended) = eoi.collect(&MappedPage { memory: self.vm.memory(), view: &view, at })
        else {
            return false;
        };
        self.pv.eoi = eoi;
        self.pending.pv_eoi_offered = false;
        if ended {
            // It was offered for an interrupt whose end only the local APIC has to hear of.
            let effect = self.shared.lapic.eoi();
            // Not answered here, the loop is left: what it asked of the kernel is done.
            return self.effect_in_loop(effect) == Next::Again;
        }
        true
    }

    /// After the loop was left: whether the guest has ended the interrupt by the flag.
    #[inline]
    pub(crate) fn take_pv_eoi(&mut self) {
        if self.pending.pv_eoi_offered {
            self.take_offered_pv_eoi();
        }
    }

    #[inline(never)]
    fn take_offered_pv_eoi(&mut self) {
        // First: whatever comes of the page, the offer is over.
        self.pending.pv_eoi_offered = false;
        let Some(at) = self.pv.eoi.flag() else { return };
        let mut eoi = self.pv.eoi;
        // A page that is gone leaves the interrupt in service: the guest ends it by the APIC.
        let ended = eoi.collect(&GuestPage::of(&self.vm, at)).unwrap_or(false);
        self.pv.eoi = eoi;
        if ended {
            let effect = self.shared.lapic.eoi();
            self.effect(effect);
        }
    }

    // Out of line: in line it needs registers that every RDMSR in the loop would save.
    #[inline(never)]
    pub(crate) fn read_pv_msr(&self, index: u32, by: By) -> Result<u64, Refused> {
        if !self.pv.allows_msr(&self.cpuid, index) {
            // A VMM that saves what the list names must be able to.
            let saved = by == By::Vmm && msr::lists::SAVED.contains(&index);
            return if saved { Ok(0) } else { Err(Refused) };
        }
        Ok(match index {
            number::KVM_WALL_CLOCK | number::KVM_WALL_CLOCK_NEW => self.pv.wall_clock_msr,
            number::KVM_SYSTEM_TIME | number::KVM_SYSTEM_TIME_NEW => self.pv.system_time_msr,
            number::KVM_STEAL_TIME => self.pv.steal_msr,
            number::KVM_PV_EOI_EN => self.pv.eoi_msr,
            number::KVM_POLL_CONTROL => u64::from(!self.pv.poll_off),
            number::KVM_LAZY_TSC_DEADLINE => self.time.read_lazy_deadline_msr(&self.cpuid, by)?,
            number::KVM_ASYNC_PF_EN => self.pv.async_pf_msr,
            number::KVM_ASYNC_PF_INT => self.pv.async_pf_vector_msr,
            number::KVM_ASYNC_PF_ACK => 0,
            _ => return Err(Refused),
        })
    }

    pub(crate) fn write_pv_msr(&mut self, index: u32, value: u64, by: By) -> Result<(), Refused> {
        if !self.pv.allows_msr(&self.cpuid, index) {
            let restored = by == By::Vmm && value == 0 && msr::lists::SAVED.contains(&index);
            return if restored { Ok(()) } else { Err(Refused) };
        }
        let Some(Ok(write)) = PvMsr::write(index, value) else { return Err(Refused) };
        match write {
            PvMsr::WallClock(at) => {
                self.pv.wall_clock_msr = value;
                if let Some(at) = at {
                    publish_wall_clock(&self.vm, at);
                }
            }
            PvMsr::SystemTime(at) => {
                self.pv.system_time_msr = value;
                self.pv.clock_page = at;
                // A VMM restores MSRs before memory.
                match by {
                    By::Guest => self.publish_clock(),
                    By::Vmm => self.shared.request(Request::Clock),
                }
            }
            PvMsr::StealTime(at) => {
                self.pv.steal_msr = value;
                self.pv.steal.configure(at, task::run_delay_ns());
                // A VMM restores MSRs before memory: at the next entry.
                self.shared.request(Request::StealTime);
                // The guest is to see a valid page at once; a VMM restores MSRs before memory.
                if let Some(at) = at
                    && by == By::Guest
                {
                    let mut steal = self.pv.steal;
                    let _ = steal.update(&GuestPage::of(&self.vm, at), task::run_delay_ns());
                    self.pv.steal = steal;
                }
            }
            PvMsr::PvEoi(flag) => {
                // Before the flag moves: what stands in the old one is still an end.
                self.take_pv_eoi();
                self.pv.eoi_msr = value;
                self.pv.eoi.configure(flag);
            }
            PvMsr::HaltPolling(on) => self.pv.poll_off = !on,
            // They are told by the local APIC, which is the VMM's then.
            PvMsr::AsyncPf(AsyncPf::Ack) => {}
            PvMsr::AsyncPf(_) if value != 0 && self.vm.irq().kind() == Irqchip::None => {
                return Err(Refused);
            }
            PvMsr::AsyncPf(AsyncPf::Enable) => self.pv.async_pf_msr = value,
            PvMsr::AsyncPf(AsyncPf::Vector) => self.pv.async_pf_vector_msr = value,
            PvMsr::LazyDeadline(_) => self.write_lazy_deadline_msr(value, by)?,
        }
        Ok(())
    }

    #[inline]
    fn decode_hypercall(&self) -> (Result<Hypercall, HypercallError>, bool) {
        let long = self.b.is_64bit_code();
        let [rax, rbx, rcx, rdx, rsi] = [RAX, RBX, RCX, RDX, RSI].map(|i| self.gprs.get(i));
        let regs = Registers { rax, rbx, rcx, rdx, rsi };
        let call = Hypercall::decode(&regs, long, self.b.cpl(), u32::MAX);
        let allowed = match &call {
            Ok(Hypercall::KickCpu { .. }) => self.pv.allows(&self.cpuid, feature::KVM_PV_UNHALT),
            Ok(Hypercall::SendIpi(_)) => self.pv.allows(&self.cpuid, feature::KVM_PV_SEND_IPI),
            Ok(Hypercall::SchedYield { .. }) => {
                self.pv.allows(&self.cpuid, feature::KVM_PV_SCHED_YIELD)
            }
            Ok(Hypercall::VapicPollIrq | Hypercall::ClockPairing { .. }) | Err(_) => true,
        };
        (if allowed { call } else { Err(HypercallError::NoSuchCall) }, long)
    }

    /// A hypercall inside the loop: those that need nothing of the kernel but an IPI.
    pub(crate) fn answer_hypercall(&mut self, s: Section<'_>) -> Next {
        if self.calls_hyperv() {
            return self.answer_hyperv_call(s);
        }
        let long = self.b.is_64bit_code();
        // The number alone, before anything is decoded: a call that nobody knows needs no operand.
        let number = self.gprs.0[RAX];
        if Hypercall::is_known(if long { number } else { u64::from(number as u32) }) {
            return self.answer_known_hypercall(s);
        }
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        let error = if self.b.cpl() != 0 {
            HypercallError::NotPrivileged
        } else {
            HypercallError::NoSuchCall
        };
        self.gprs.0[RAX] = hypercall::answer(Err(error), long);
        self.retire(next);
        Next::Again
    }

    #[cold]
    #[inline(never)]
    fn answer_hyperv_call(&mut self, s: Section<'_>) -> Next {
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        match self.do_hyperv_call() {
            Ok(()) => self.retire(next),
            Err(exception) => return self.answer_by(exception),
        }
        Next::Again
    }

    #[inline(never)]
    fn answer_known_hypercall(&mut self, s: Section<'_>) -> Next {
        let (call, long) = self.decode_hypercall();
        let done = match &call {
            Err(_) | Ok(Hypercall::VapicPollIrq) => true,
            Ok(Hypercall::KickCpu { .. } | Hypercall::SchedYield { .. }) => false,
            // Each receiver may cost an IPI: more are sent with interrupts on.
            Ok(Hypercall::SendIpi(ipi)) if ipi.apic_ids().count() <= IPIS_IN_LOOP => false,
            Ok(Hypercall::SendIpi(_) | Hypercall::ClockPairing { .. }) => return Next::Leave,
        };
        // Before the call is made: it must not be made twice.
        let Some(next) = self.next_rip(s) else { return Next::Leave };
        let (answer, then) = match call {
            Err(error) => (Err(error), Next::Again),
            Ok(_) if done => (Ok(0), Next::Again),
            // Whether somebody wants this CPU is looked at after every call of the kernel.
            Ok(Hypercall::SchedYield { .. }) => self.with_kernel(|_| Ok(0)),
            Ok(call) => self.with_kernel(|v| v.call(call)),
        };
        self.gprs.0[RAX] = hypercall::answer(answer, long);
        self.retire(next);
        then
    }

    /// A hypercall outside the loop.
    pub(crate) fn do_hypercall(&mut self) -> Result<(), Exception> {
        if self.calls_hyperv() {
            return self.do_hyperv_call();
        }
        let (call, long) = self.decode_hypercall();
        let answer = call.and_then(|call| self.call(call));
        self.gprs.0[RAX] = hypercall::answer(answer, long);
        Ok(())
    }

    fn call(&mut self, call: Hypercall) -> Result<u64, HypercallError> {
        match call {
            Hypercall::VapicPollIrq => Ok(0),
            Hypercall::KickCpu { apic_id } => {
                // The guest names any id. None of that number is no error, as on stock KVM.
                if let Some(vcpu) = self.vm.vcpus().by_id(apic_id) {
                    vcpu.unhalt();
                }
                Ok(0)
            }
            Hypercall::SchedYield { .. } => {
                task::cond_resched();
                Ok(0)
            }
            Hypercall::SendIpi(ipi) => Ok(self.vm.irq().send_pv_ipi(&ipi)),
            Hypercall::ClockPairing { address } => {
                let now = clock::snapshot();
                // A clock that does not come from the TSC has no pair of the two.
                if !now.tsc_based() {
                    return Err(HypercallError::NotSupported);
                }
                let pairing = ClockPairing::new(now.real_ns, self.b.guest_tsc(now.tsc));
                GuestPage::of(&self.vm, address)
                    .write(0, pairing.as_bytes())
                    .map_err(|_| HypercallError::Fault)?;
                Ok(0)
            }
        }
    }
}

/// Guest memory is not mapped in the TDP tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotMapped;

/// A structure in guest memory as it is mapped in the TDP tables, with interrupts off.
pub(crate) struct MappedPage<'a> {
    pub(crate) memory: &'a VmMemory,
    pub(crate) view: &'a mmu::View<'a>,
    pub(crate) at: Gpa,
}

impl Shared for MappedPage<'_> {
    type Error = NotMapped;
    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), Self::Error> {
        let at = Gpa(self.at.0.wrapping_add(offset as u64));
        if self.memory.read_irqs_off(self.view, at, data) { Ok(()) } else { Err(NotMapped) }
    }
    fn write(&self, offset: usize, data: &[u8]) -> Result<(), Self::Error> {
        let at = Gpa(self.at.0.wrapping_add(offset as u64));
        if self.memory.write_irqs_off(self.view, at, data) { Ok(()) } else { Err(NotMapped) }
    }
}
