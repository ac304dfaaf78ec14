//! The names, kinds and order of all statistics, and where their words come from.
//!
//! First those of KVM, in its order, with its names, kinds and units (KVM API §4.131); then
//! Gannet's own. A statistic of KVM for something that is not done here stays 0: readers expect the
//! name.

use core::ffi::CStr;

use crate::reason::{ALL, REASONS, Reason};
use crate::vcpu::HaltHistogram;
use crate::{BUCKETS, VcpuCount, VcpuStats, VmCount, VmStats};

/// What a statistic's value means (KVM_STATS_TYPE_*).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// A value that only grows.
    Cumulative = 0,
    /// How something is now.
    Instant = 1,
    /// The greatest value there was.
    Peak = 2,
    /// A histogram with buckets of doubling width.
    LogHistogram = 4,
}

/// What it is measured in (KVM_STATS_UNIT_*).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Unit {
    /// A number of things, without a unit.
    None = 0,
    /// Nanoseconds: seconds with exponent -9.
    Nanoseconds = 2 << 4,
    /// Cycles of the TSC.
    Cycles = 3 << 4,
    /// 0 or 1.
    Boolean = 4 << 4,
}

/// Where the words of a vCPU's statistic come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfVcpu {
    /// Nothing of the kind is done here.
    Zero,
    /// A count of the vCPU's.
    Count(VcpuCount),
    /// A histogram of halting.
    Halt(HaltHistogram),
    /// All exits, whatever their reason.
    Exits,
    /// Exits by a reason.
    By(Reason),
    /// Hypercalls, whatever exit they came as.
    Hypercalls,
    /// Page faults on shadow tables, and TDP faults that were looked at outside the loop.
    PageFaults,
    /// Exits by a reason that were answered in the inner loop.
    Answered(Reason),
    /// Cycles from exit to re-entry.
    Cycles(Reason),
}

/// Where the words of a VM's statistic come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfVm {
    /// Nothing of the kind is done here.
    Zero,
    /// A count of the VM.
    Count(VmCount),
    /// The sum over its vCPUs.
    Sum(OfVcpu),
}

/// A statistic: `S` says where its words come from.
#[derive(Clone, Copy, Debug)]
pub struct Desc<S: 'static> {
    /// The statistic's name, below 48 bytes.
    pub name: &'static CStr,
    /// What the value means.
    pub kind: Kind,
    /// What it is measured in.
    pub unit: Unit,
    /// Where the statistic's numbers come from.
    pub source: S,
    /// The first of its words among all.
    pub first: u32,
}

impl<S> Desc<S> {
    /// Words of 64 bits.
    pub const fn words(&self) -> usize {
        match self.kind {
            Kind::LogHistogram => BUCKETS,
            Kind::Cumulative | Kind::Instant | Kind::Peak => 1,
        }
    }
}

const fn with<S>(name: &'static CStr, kind: Kind, unit: Unit, source: S) -> Desc<S> {
    Desc { name, kind, unit, source, first: 0 }
}

const fn count<S>(name: &'static CStr, source: S) -> Desc<S> {
    with(name, Kind::Cumulative, Unit::None, source)
}

const fn halted(name: &'static CStr, which: HaltHistogram) -> Desc<OfVcpu> {
    with(name, Kind::LogHistogram, Unit::Nanoseconds, OfVcpu::Halt(which))
}

const fn of(name: &'static CStr, what: VcpuCount) -> Desc<OfVcpu> {
    count(name, OfVcpu::Count(what))
}

const fn nanoseconds(name: &'static CStr, what: VcpuCount) -> Desc<OfVcpu> {
    with(name, Kind::Cumulative, Unit::Nanoseconds, OfVcpu::Count(what))
}

/// KVM's statistics of a vCPU on x86.
const KVM_VCPU: [Desc<OfVcpu>; 45] = {
    use VcpuCount::*;
    [
        of(c"halt_successful_poll", HaltSuccessfulPoll),
        of(c"halt_attempted_poll", HaltAttemptedPoll),
        of(c"halt_poll_invalid", HaltPollInvalid),
        of(c"halt_wakeup", HaltWakeup),
        nanoseconds(c"halt_poll_success_ns", HaltPollSuccessNs),
        nanoseconds(c"halt_poll_fail_ns", HaltPollFailNs),
        nanoseconds(c"halt_wait_ns", HaltWaitNs),
        halted(c"halt_poll_success_hist", HaltHistogram::PollSuccess),
        halted(c"halt_poll_fail_hist", HaltHistogram::PollFail),
        halted(c"halt_wait_hist", HaltHistogram::Wait),
        with(c"blocking", Kind::Instant, Unit::Boolean, OfVcpu::Count(Blocking)),
        count(c"pf_taken", OfVcpu::PageFaults),
        of(c"pf_fixed", PfFixed),
        of(c"pf_emulate", PfEmulate),
        of(c"pf_spurious", PfSpurious),
        of(c"pf_fast", PfFast),
        of(c"pf_mmio_spte_created", PfMmioSpteCreated),
        of(c"pf_guest", PfGuest),
        of(c"tlb_flush", TlbFlush),
        count(c"invlpg", OfVcpu::By(Reason::Invlpg)),
        count(c"exits", OfVcpu::Exits),
        count(c"io_exits", OfVcpu::By(Reason::Io)),
        of(c"mmio_exits", MmioExits),
        of(c"signal_exits", SignalExits),
        count(c"irq_window_exits", OfVcpu::By(Reason::InterruptWindow)),
        // Both kinds of window have this reason: the IRET that SVM intercepts, and the exit of VMX.
        count(c"nmi_window_exits", OfVcpu::By(Reason::Iret)),
        // KVM's name for something that its caller does here: readers find it, and it stays 0.
        count(c"l1d_flush", OfVcpu::Zero),
        count(c"halt_exits", OfVcpu::By(Reason::Hlt)),
        of(c"request_irq_exits", RequestIrqExits),
        count(c"irq_exits", OfVcpu::By(Reason::Interrupt)),
        of(c"host_state_reload", HostStateReload),
        // Once per KVM_RUN.
        of(c"fpu_reload", UserExits),
        of(c"insn_emulation", InsnEmulation),
        of(c"insn_emulation_fail", InsnEmulationFail),
        count(c"hypercalls", OfVcpu::Hypercalls),
        of(c"irq_injections", IrqInjections),
        of(c"nmi_injections", NmiInjections),
        of(c"req_event", ReqEvent),
        of(c"nested_run", NestedRun),
        count(c"directed_yield_attempted", OfVcpu::Zero),
        count(c"directed_yield_successful", OfVcpu::Zero),
        count(c"preemption_reported", OfVcpu::Zero),
        count(c"preemption_other", OfVcpu::Zero),
        with(c"guest_mode", Kind::Instant, Unit::Boolean, OfVcpu::Count(GuestMode)),
        count(c"notify_window_exits", OfVcpu::Zero),
    ]
};

/// Gannet's own counts of a vCPU.
const OWN_VCPU: [Desc<OfVcpu>; 3] = [
    of(c"user_exits", VcpuCount::UserExits),
    of(c"tsc_deadline_writes", VcpuCount::TscDeadlineWrites),
    of(c"cpuid_updates", VcpuCount::CpuidUpdates),
];

const fn here(name: &'static CStr, what: VmCount) -> Desc<OfVm> {
    count(name, OfVm::Count(what))
}

const fn now(name: &'static CStr, what: VmCount) -> Desc<OfVm> {
    with(name, Kind::Instant, Unit::None, OfVm::Count(what))
}

const fn peak(name: &'static CStr, what: VmCount) -> Desc<OfVm> {
    with(name, Kind::Peak, Unit::None, OfVm::Count(what))
}

/// KVM's statistics of a VM on x86.
const KVM_VM: [Desc<OfVm>; 16] = {
    use VmCount::*;
    [
        here(c"remote_tlb_flush", RemoteTlbFlush),
        here(c"remote_tlb_flush_requests", RemoteTlbFlushRequests),
        here(c"mmu_shadow_zapped", MmuShadowZapped),
        here(c"mmu_pte_write", MmuPteWrite),
        here(c"mmu_pde_zapped", MmuPdeZapped),
        here(c"mmu_flooded", MmuFlooded),
        here(c"mmu_recycled", MmuRecycled),
        here(c"mmu_cache_miss", MmuCacheMiss),
        now(c"mmu_unsync", MmuUnsync),
        // Kernel 7.3 has it; those before have no such name.
        now(c"mmu_shadow_pages", MmuShadowPages),
        now(c"pages_4k", Pages4k),
        now(c"pages_2m", Pages2m),
        now(c"pages_1g", Pages1g),
        now(c"nx_lpage_splits", NxLargePageSplits),
        peak(c"max_mmu_rmap_size", MaxRmapSize),
        peak(c"max_mmu_page_hash_collisions", MaxHashCollisions),
    ]
};

/// Gannet's own counts of a VM.
const OWN_VM: [Desc<OfVm>; 2] = [
    here(c"page_tables_allocated", VmCount::PageTablesAllocated),
    here(c"page_tables_freed", VmCount::PageTablesFreed),
];

/// Statistics of a vCPU.
pub const VCPU_STATS: usize = KVM_VCPU.len() + OWN_VCPU.len() + 3 * REASONS;
/// Statistics of a VM: its own, and the sums of what its vCPUs count beyond KVM's names.
pub const VM_STATS: usize = KVM_VM.len() + OWN_VM.len() + 1 + OWN_VCPU.len() + 3 * REASONS;

/// Of a vCPU's, so many of the first are counted as such, and not by reason.
pub const VCPU_COUNTED: usize = KVM_VCPU.len() + OWN_VCPU.len();
/// Of a VM's, so many of the first are its own, and not sums over its vCPUs.
pub const VM_COUNTED: usize = KVM_VM.len() + OWN_VM.len();

/// The statistics of a vCPU.
pub static VCPU: [Desc<OfVcpu>; VCPU_STATS] = {
    // Made when the crate is compiled: the first word of each is a running sum.
    let mut all = [count(c"", OfVcpu::Zero); VCPU_STATS];
    let mut at = 0;
    // The first word of each is known when the crate is compiled, so a reader searches and adds
    // nothing.
    while at < VCPU_STATS {
        all[at] = vcpu_desc(at);
        if at != 0 {
            all[at].first = all[at - 1].first + all[at - 1].words() as u32;
        }
        at += 1;
    }
    all
};

/// The statistics of a VM.
pub static VM: [Desc<OfVm>; VM_STATS] = {
    let mut all = [count(c"", OfVm::Zero); VM_STATS];
    let mut at = 0;
    while at < VM_STATS {
        all[at] = vm_desc(at);
        if at != 0 {
            all[at].first = all[at - 1].first + all[at - 1].words() as u32;
        }
        at += 1;
    }
    all
};

/// Place `at` among a vCPU's: KVM's, our own, then three for each reason.
const fn vcpu_desc(at: usize) -> Desc<OfVcpu> {
    if at < KVM_VCPU.len() {
        return KVM_VCPU[at];
    }
    own_vcpu_desc(at - KVM_VCPU.len())
}

const fn own_vcpu_desc(at: usize) -> Desc<OfVcpu> {
    if at < OWN_VCPU.len() {
        return OWN_VCPU[at];
    }
    let at = at - OWN_VCPU.len();
    // Three blocks, each in the order of the reasons: a reader finds one of a kind side by side.
    let reason = ALL[at % REASONS];
    match at / REASONS {
        0 => count(reason.exits_name(), OfVcpu::By(reason)),
        1 => count(reason.answered_name(), OfVcpu::Answered(reason)),
        _ => {
            let source = OfVcpu::Cycles(reason);
            with(reason.cycles_name(), Kind::LogHistogram, Unit::Cycles, source)
        }
    }
}

/// Place `at` among a VM's: KVM's, our own, then the sums over its vCPUs.
const fn vm_desc(at: usize) -> Desc<OfVm> {
    if at < KVM_VM.len() {
        return KVM_VM[at];
    }
    let at = at - KVM_VM.len();
    if at < OWN_VM.len() {
        return OWN_VM[at];
    }
    let at = at - OWN_VM.len();
    // KVM has the name for a vCPU. The sum of a VM stands before our own.
    if at == 0 {
        return count(c"exits", OfVm::Sum(OfVcpu::Exits));
    }
    let own = own_vcpu_desc(at - 1);
    Desc { name: own.name, kind: own.kind, unit: own.unit, source: OfVm::Sum(own.source), first: 0 }
}

/// Words of all values.
pub fn words<S>(table: &[Desc<S>]) -> usize {
    table.last().map_or(0, |last| last.first as usize + last.words())
}

/// The statistic that has word `at` of all, and which of its words that is.
pub fn find<S>(table: &[Desc<S>], at: usize) -> Option<(&Desc<S>, usize)> {
    // Sorted, since `first` is a running sum.
    let behind = table.partition_point(|desc| desc.first as usize <= at);
    let desc = table.get(behind.checked_sub(1)?)?;
    // The word lies in the last statistic that begins at it or before it.
    let within = at - desc.first as usize;
    (within < desc.words()).then_some((desc, within))
}

impl OfVcpu {
    /// Word `n` of the statistic.
    pub fn word(&self, stats: &VcpuStats, n: usize) -> u64 {
        match *self {
            Self::Zero => 0,
            Self::Count(what) => stats.get(what),
            Self::Halt(which) => stats.halt(which).bucket(n),
            Self::Exits => stats.exits(),
            Self::By(reason) => stats.exits_by(reason),
            // A guest may use the other vendor's instruction, which exits as #UD.
            Self::Hypercalls => {
                stats.exits_by(Reason::Hypercall).wrapping_add(stats.get(VcpuCount::HypercallsByUd))
            }
            Self::PageFaults => {
                stats.exits_by(Reason::PageFault).wrapping_add(stats.get(VcpuCount::PfTaken))
            }
            Self::Answered(reason) => stats.answered_by(reason),
            Self::Cycles(reason) => stats.cycles_bucket(reason, n),
        }
    }
}

impl OfVm {
    /// Word `n` of the statistic of a VM with these vCPUs.
    pub fn word<'a>(
        &self,
        stats: &VmStats,
        vcpus: impl Iterator<Item = &'a VcpuStats>,
        n: usize,
    ) -> u64 {
        match self {
            Self::Zero => 0,
            Self::Count(what) => stats.of(*what).get(),
            // Wrapping: a sum of counters wraps as a counter does.
            Self::Sum(source) => vcpus.map(|v| source.word(v, n)).fold(0, u64::wrapping_add),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;
    use std::collections::HashSet;

    fn consistent<S>(table: &[Desc<S>]) {
        let mut names = HashSet::new();
        let mut next = 0;
        for desc in table {
            let name = desc.name.to_str().unwrap();
            assert!(!name.is_empty() && name.len() < 48, "{name}");
            assert!(names.insert(name), "{name} twice");
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
            );
            assert_eq!(desc.first as usize, next, "{name}");
            for n in 0..desc.words() {
                let (found, within) = find(table, next + n).unwrap();
                assert_eq!((found.name, within), (desc.name, n));
            }
            next += desc.words();
        }
        assert_eq!(words(table), next);
        assert!(find(table, next).is_none() && find(table, usize::MAX).is_none());
    }

    #[test]
    fn every_word_belongs_to_one_statistic_and_names_are_unique() {
        consistent(&VCPU);
        consistent(&VM);
    }

    #[test]
    fn a_vm_shows_the_sum_of_its_vcpus() {
        let (a, b) = (VcpuStats::new(), VcpuStats::new());
        a.exit(Reason::Cpuid);
        b.exit(Reason::Cpuid);
        b.exit(Reason::Hlt);
        let value = |name: &CStr| {
            let desc = VM.iter().find(|d| d.name == name).unwrap();
            desc.source.word(&VmStats::new(), [&a, &b].into_iter(), 0)
        };
        assert_eq!([c"exits", c"exits_cpuid", c"answered_hlt"].map(value), [3, 2, 1]);
    }
}
