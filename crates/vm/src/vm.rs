//! The VM object that its file, its vCPUs and the kernel's notices share.

use core::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Acquire, Relaxed},
};

use host::{
    Arc, NoMemory, clock,
    notifier::{InvalidateHandler, RegisterError, WithNotifier},
    sync::{Mutex, SpinGuard, SpinLock},
};
use mmu::{AddressSpace, RegionLimits};
pub use mmu::{EptSupport, Format};
use pv::{
    ClockData, HostTime,
    clock::{ClockSample, Scale},
};
use stats::VmStats;
use x86::Hva;

use crate::{
    debug::DebugDirs,
    device_reach::DeviceReach,
    irq::VmIrq,
    memory::VmMemory,
    msr_filter::MsrFilter,
    settings::Settings,
    statistics::VmStatistics,
    time::{Round, ScaledTsc, Time, TscMatch, host_time},
    vcpu_shared::{Request, SharedVcpu},
    vcpus::{AddError, MAX_VCPU_ID, VcpuTable},
};

/// A VM as everybody holds it.
pub type VmRef = Arc<WithNotifier<Vm>>;

/// What the module knows of the host that a new VM needs.
#[derive(Clone, Copy, Debug)]
pub struct HostLimits {
    /// What the TDP tables are made for.
    pub tables: Format,
    /// Physical address bits.
    pub maxphyaddr: u8,
    /// Longest halt polling, ns.
    pub halt_poll_ns: u64,
    /// How guest addresses are translated.
    pub paging: Paging,
}

/// The module's parameters on paging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging {
    /// The hardware walks TDP tables. Without, it walks shadow tables.
    pub tdp: bool,
    /// A vCPU keeps its page-table roots when its paging mode changes. Without, it behaves as KVM
    /// once did: it unloads them all.
    pub keep_roots: bool,
}

impl Default for Paging {
    fn default() -> Self {
        Self { tdp: true, keep_roots: true }
    }
}

/// A virtual machine.
pub struct Vm {
    /// What debugfs shows; goes first.
    pub debug: DebugDirs,
    statistics: Arc<VmStatistics>,
    memory: Arc<VmMemory>,
    /// What the guest sees in system-management mode: address space 1.
    smm_memory: Arc<VmMemory>,
    vcpus: Arc<VcpuTable>,
    irq: VmIrq,
    time: SpinLock<Time>,
    /// Held while vCPUs and interrupt controllers are made.
    pub making: Mutex<()>,
    /// What the VMM has set.
    pub settings: Settings,
    /// How guest addresses are translated.
    pub paging: Paging,
    /// Whether the guest reaches memory of a device of the host's ([`Request::Device`] tells of it).
    pub device_reach: DeviceReach,
    /// Memories with a slot for which vCPUs log the pages they write.
    page_log_users: AtomicU32,
    msr_filter: Mutex<Option<Arc<MsrFilter>>>,
    dead: AtomicBool,
}

impl Vm {
    /// A VM of the calling process.
    ///
    /// # Errors
    /// All of [`RegisterError`].
    pub fn new(limits: &HostLimits) -> Result<VmRef, RegisterError> {
        WithNotifier::new(Self::unwatched(limits)?)
    }

    /// The VM, of which the host's memory management knows nothing yet. Apart, for its frame.
    #[inline(never)]
    fn unwatched(limits: &HostLimits) -> Result<Self, NoMemory> {
        let settings = Settings::default();
        // What a vCPU runs at unless the VMM says otherwise: the host's rate.
        settings.tsc_khz.store(clock::tsc_khz(), Relaxed);
        settings.halt_poll_ns.store(limits.halt_poll_ns, Relaxed);
        settings.max_vcpu_id.store(MAX_VCPU_ID, Relaxed);
        // The default of KVM_SET_IDENTITY_MAP_ADDR (KVM API §4.40).
        settings.identity_map.store(0xfffb_c000, Relaxed);
        let vcpus = Arc::new(VcpuTable::new()?)?;
        let (memory, smm_memory) = memories(limits)?;
        Ok(Self {
            debug: DebugDirs::default(),
            statistics: VmStatistics::new([&memory, &smm_memory], &vcpus)?,
            memory,
            smm_memory,
            irq: VmIrq::new(vcpus.clone())?,
            vcpus,
            time: SpinLock::new(Time::new()?),
            making: Mutex::new(()),
            settings,
            paging: limits.paging,
            device_reach: DeviceReach::default(),
            page_log_users: AtomicU32::new(0),
            msr_filter: Mutex::new(None),
            dead: AtomicBool::new(false),
        })
    }

    /// Guest memory as it is outside system-management mode: address space 0.
    #[inline]
    pub fn memory(&self) -> &VmMemory {
        &self.memory
    }

    /// Guest memory as a vCPU sees it that is in this address space. The vCPU keeps it.
    #[inline]
    pub fn memory_in(&self, space: AddressSpace) -> &Arc<VmMemory> {
        match space {
            AddressSpace::Main => &self.memory,
            AddressSpace::Smm => &self.smm_memory,
        }
    }

    /// Whether vCPUs log the pages they write ([`Request::PageLog`] tells of a change).
    pub fn wants_page_log(&self) -> bool {
        self.page_log_users.load(Acquire) != 0
    }

    /// Memories with a slot for which vCPUs log the pages they write.
    pub(crate) fn page_log_users(&self) -> &AtomicU32 {
        &self.page_log_users
    }

    /// The vCPUs of the VM.
    #[inline]
    pub fn vcpus(&self) -> &VcpuTable {
        &self.vcpus
    }

    /// Interrupt controllers, routes, eventfds.
    #[inline]
    pub fn irq(&self) -> &VmIrq {
        &self.irq
    }

    /// What the VM counts beside its vCPUs.
    pub fn stats(&self) -> &VmStats {
        self.statistics.counts()
    }

    /// All that is counted.
    pub fn statistics(&self) -> &Arc<VmStatistics> {
        &self.statistics
    }

    /// Adds a vCPU. [`Vm::making`] is held.
    pub fn add_vcpu(&self, vcpu: SharedVcpu) -> Result<(), AddError> {
        self.vcpus.add(vcpu)?;
        // Only now: a member of the round that is no vCPU yet, or never is, would stand in for one that has left it.
        self.set_tsc(TscMatch::count_new_vcpu);
        Ok(())
    }

    /// Whether the VMM's address space is gone, or the VM was killed.
    pub fn is_dead(&self) -> bool {
        // Relaxed: whoever was asked to look sees it by the request, the others a little later.
        self.dead.load(Relaxed)
    }

    /// The guest is in a state that no machine has: none of its vCPUs runs again, and whatever is
    /// asked of the VM fails with `-EIO`.
    pub fn kill(&self) {
        // Before the requests: a vCPU that is asked has to find it dead.
        self.dead.store(true, Relaxed);
        self.vcpus.request_all(Request::Dead);
    }

    /// KVM_X86_SET_MSR_FILTER: all vCPUs follow it from their next entry on.
    pub fn set_msr_filter(&self, filter: MsrFilter) -> Result<(), NoMemory> {
        // A filter that denies nothing costs a look at each access, so none is kept.
        let new = if filter.restricts() { Some(Arc::new(filter)?) } else { None };
        // The mutex is let go before vCPUs are asked: they take it to look.
        let old = core::mem::replace(&mut *self.msr_filter.lock(), new);
        self.vcpus.request_all(Request::MsrFilter);
        // Freed last, and without the mutex: a vCPU may still be walking it by its own reference.
        drop(old);
        Ok(())
    }

    /// The filter of MSRs, if there is one.
    pub fn msr_filter(&self) -> Option<Arc<MsrFilter>> {
        // A reference: the filter is walked without the mutex, and may be replaced meanwhile.
        self.msr_filter.lock().clone()
    }

    /// TSC frequency of new vCPUs.
    pub fn tsc_khz(&self) -> u32 {
        self.settings.tsc_khz.load(Relaxed)
    }

    /// Longest halt polling.
    pub fn halt_poll_ns(&self) -> u64 {
        self.settings.halt_poll_ns.load(Relaxed)
    }

    /// Time as the host has it now.
    fn current_time(&self) -> SpinGuard<'_, Time> {
        let mut time = self.time.lock();
        let source = clock::source_generation();
        // Another clock source, or a sleep of the host's, means another relation of TSC and time: what was published
        // by the old one is over.
        if time.source != source {
            time.source = source;
            time.clock.resample(&host_time());
        }
        time
    }

    /// What a vCPU publishes as its clock page; `guest_tsc` turns a host TSC into the vCPU's.
    pub fn clock_sample(&self, scale: Scale, guest_tsc: impl FnOnce(u64) -> u64) -> ClockSample {
        let time = self.current_time();
        let sample = time.clock.sample(scale, guest_tsc, || {
            let now = clock::snapshot();
            (host_time(), now.tsc)
        });
        // A guest that is told so reads the clock of all vCPUs by one page.
        ClockSample { stable: sample.stable && time.in_step(), ..sample }
    }

    /// The guest's clock now, and the host's.
    pub fn clock_now(&self) -> (u64, HostTime) {
        let now = host_time();
        (self.time.lock().clock.now(&now), now)
    }

    /// The clock as KVM_GET_CLOCK tells it (KVM API §4.29).
    pub fn clock_data(&self) -> ClockData {
        let time = self.current_time();
        let data = time.clock.get(&host_time());
        // As on stock KVM the flags go together.
        if time.in_step() { data } else { ClockData { clock: data.clock, ..ClockData::default() } }
    }

    /// KVM_SET_CLOCK: the clock shows `clock` now, or showed it at host real time `realtime`.
    pub fn set_clock(&self, clock: u64, realtime: Option<u64>) {
        self.time.lock().clock.set(clock, realtime, &host_time());
        // Behind the change: a vCPU that serves the request reads the clock.
        self.vcpus.request_all(Request::Clock);
    }

    /// A vCPU's TSC is set. Whether all of them are one the clock pages say.
    fn set_tsc<R>(&self, set: impl FnOnce(&mut TscMatch) -> R) -> R {
        let (result, changed) = {
            let mut time = self.time.lock();
            (set(time.tsc()), time.follow_tscs(self.vcpus.count()))
        };
        if changed {
            // Behind the change: a vCPU that serves the request finds it.
            self.vcpus.request_all(Request::Clock);
        }
        result
    }

    /// The TSC offset of a new vCPU of frequency `khz`, which [`add_vcpu`](Self::add_vcpu) makes one of the others.
    /// [`Vm::making`] is held from here to there.
    pub fn new_vcpu_tsc_offset(&self, host: ScaledTsc, khz: u32, mine: &mut Round) -> u64 {
        self.time.lock().tsc().new_vcpu_offset(host, khz, mine)
    }

    /// The offset for a VMM's write of a vCPU's TSC.
    pub fn match_tsc(&self, value: u64, host: ScaledTsc, khz: u32, mine: &mut Round) -> u64 {
        self.set_tsc(|tsc| tsc.match_write(value, host, khz, mine))
    }

    /// The VMM has set the offset of a vCPU's TSC: the others follow.
    pub fn note_tsc_offset(&self, offset: u64, host: ScaledTsc, khz: u32, mine: &mut Round) {
        self.set_tsc(|tsc| tsc.note_offset(offset, host, khz, mine));
    }

    /// A vCPU's TSC is of another rate than before, by the VMM's choice.
    pub fn leave_tsc_round(&self, mine: &mut Round) {
        self.set_tsc(|tsc| tsc.leave(mine));
    }
}

/// The two address spaces. Apart, for the frame of [`Vm::new`].
#[inline(never)]
fn memories(limits: &HostLimits) -> Result<(Arc<VmMemory>, Arc<VmMemory>), NoMemory> {
    // CPUID's number, which a hypervisor below may have made up: cut, so that the shift is one.
    let frames = 1u64 << limits.maxphyaddr.clamp(32, 52).saturating_sub(12);
    // The host's own, which has more of it with five-level paging.
    let region = RegionLimits { frames, user_end: host::user::end().0 };
    let shadow = !limits.paging.tdp;
    let make = |with| VmMemory::shared(limits.tables, region, shadow, with);
    let memory = make(None)?;
    let smm_memory = make(Some(&memory))?;
    Ok((memory, smm_memory))
}

impl InvalidateHandler for Vm {
    fn invalidate_start(&self, start: Hva, end: Hva, may_block: bool) {
        self.memory.invalidate_start(start, end, may_block, self);
        // Both address spaces map memory of the VMM's, each by slots of its own: either may have the page.
        self.smm_memory.invalidate_start(start, end, may_block, self);
    }

    fn invalidate_end(&self, start: Hva, end: Hva) {
        self.memory.invalidate_end(start, end);
        self.smm_memory.invalidate_end(start, end);
    }

    fn clear_young(&self, start: Hva, end: Hva) -> bool {
        // Both, whatever the first says: each is to be cleared.
        self.memory.clear_young(start, end, self) | self.smm_memory.clear_young(start, end, self)
    }

    fn test_young(&self, start: Hva, end: Hva) -> bool {
        // The second only if the first says no: asking clears nothing.
        self.memory.test_young(start, end) || self.smm_memory.test_young(start, end)
    }

    fn release(&self) {
        // First: no vCPU enters a guest again whose memory goes.
        self.kill();
        self.memory.release(self);
        self.smm_memory.release(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{FaultAccess, FaultOutcome};
    use host::gup::fault_in;
    use host::page::Pages;
    use host::std_port::test;
    use mmu::{Region, TableCache};
    use x86::Gpa;

    #[test]
    fn both_address_spaces_lose_what_the_host_takes_back_and_do_not_sleep_where_it_may_not() {
        let limits = HostLimits {
            tables: Format::npt(4, 0),
            maxphyaddr: 48,
            halt_poll_ns: 0,
            paging: Paging::default(),
        };
        let (vm, user) = (Vm::new(&limits).unwrap(), Pages::zeroed(0).unwrap());
        let (start, end) = (Hva(user.hpa().0), Hva(user.hpa().0 + 4096));
        let spaces = [AddressSpace::Main, AddressSpace::Smm].map(|space| vm.memory_in(space));
        let (mut cache, flush) = (TableCache::new(), &**vm);
        for memory in spaces {
            let region = Region { slot: 3, flags: 0, gpa: 16 << 12, size: 4096, hva: start.0 };
            memory.set_region(&region, flush).unwrap();
            let access =
                FaultAccess { gpa: Gpa(16 << 12), write: true, exec: false, present: false };
            let outcome = memory.fault(&mut cache, &access, flush, fault_in);
            assert_eq!((outcome, memory.test_young(start, end)), (FaultOutcome::Mapped, true));
        }
        test::set_need_resched(true);
        test::invalidate_without_sleep(start, end, || {
            assert_eq!(spaces.map(|memory| memory.test_young(start, end)), [false; 2]);
        });
        assert!(host::task::need_resched());
        test::set_need_resched(false);
    }
}
