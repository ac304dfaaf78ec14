//! A VM's statistics for whoever reads them: its own counters, those of its shadow pages, and its
//! vCPUs'. Shared apart from the VM, so that a reader keeps nothing alive but these.

use core::sync::atomic::Ordering::Relaxed;

use host::{Arc, NoMemory};
use mmu::shadow::Counters;
use stats::{VmCount, VmStats, table::OfVm};

use crate::{memory::VmMemory, vcpus::VcpuTable};

/// See the module.
pub struct VmStatistics {
    counts: Arc<VmStats>,
    shadow: [Option<Arc<Counters>>; 2],
    vcpus: Arc<VcpuTable>,
}

impl VmStatistics {
    /// Of a VM with these two memories, which count in one place, and these vCPUs.
    pub(crate) fn new(
        memories: [&VmMemory; 2],
        vcpus: &Arc<VcpuTable>,
    ) -> Result<Arc<Self>, NoMemory> {
        let [memory, _] = memories;
        Arc::new(Self {
            counts: memory.stats().clone(),
            shadow: memories.map(|memory| Some(memory.shadow()?.shared_counters().clone())),
            vcpus: vcpus.clone(),
        })
    }

    /// The VM's own counters.
    #[inline]
    pub fn counts(&self) -> &VmStats {
        &self.counts
    }

    /// Word `n` of a statistic.
    pub fn word(&self, source: &OfVm, n: usize) -> u64 {
        let vcpus = self.vcpus.iter().map(|vcpu| &*vcpu.stats);
        let value = source.word(&self.counts, vcpus, n);
        // Shadow pages count for the VM alone: sums over vCPUs are whole.
        let OfVm::Count(what) = source else { return value };
        // Both memories: a page counts for the VM, whichever address space it is of.
        let shadow = self.shadow.iter().flatten().map(|counters| of_shadow(counters, *what));
        shadow.fold(value, u64::wrapping_add)
    }
}

/// What shadow paging adds to a count.
fn of_shadow(shadow: &Counters, what: VmCount) -> u64 {
    let counter = match what {
        // Put to use and taken out of use: where its memory comes from is no matter.
        VmCount::PageTablesAllocated | VmCount::MmuCacheMiss => &shadow.created,
        VmCount::PageTablesFreed | VmCount::MmuShadowZapped => &shadow.zapped,
        VmCount::MmuRecycled => &shadow.recycled,
        VmCount::MmuPteWrite => &shadow.unsynced,
        VmCount::MmuUnsync => &shadow.unsync,
        VmCount::MmuShadowPages => {
            // Read in this order: a page that goes meanwhile is no page too few.
            let zapped = shadow.zapped.load(Relaxed);
            return shadow.created.load(Relaxed).saturating_sub(zapped);
        }
        _ => return 0,
    };
    counter.load(Relaxed)
}

impl core::fmt::Debug for VmStatistics {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "VmStatistics({} vCPUs)", self.vcpus.count())
    }
}
