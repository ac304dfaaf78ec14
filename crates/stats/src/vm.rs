//! The counters of a VM that no vCPU owns: its page tables and its flushes. Added to from any CPU.

use crate::SharedCounter;

macro_rules! counts {
    ($($(#[$doc:meta])* $variant:ident,)*) => {
        /// What is counted per VM.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum VmCount {
            $($(#[$doc])* $variant,)*
        }
        /// How many counts there are.
        pub const VM_COUNTS: usize = [$(VmCount::$variant,)*].len();
    };
}

counts! {
    /// Flushes that reached a vCPU in the guest.
    RemoteTlbFlush,
    /// Flushes asked for.
    RemoteTlbFlushRequests,
    /// Shadow pages that were thrown away.
    MmuShadowZapped,
    /// Writes to shadowed guest page tables that were caught.
    MmuPteWrite,
    /// Upper entries zapped by such a write.
    MmuPdeZapped,
    /// Shadow pages thrown away because the guest writes to them all the time.
    MmuFlooded,
    /// Shadow pages thrown away to make room.
    MmuRecycled,
    /// Shadow pages made because none with this frame and role was there.
    MmuCacheMiss,
    /// Shadow pages that are out of step with the guest's table now.
    MmuUnsync,
    /// Shadow pages that there are now.
    MmuShadowPages,
    /// 4 KiB leaves that are mapped now.
    Pages4k,
    /// 2 MiB leaves.
    Pages2m,
    /// 1 GiB leaves.
    Pages1g,
    /// Page tables that stand where a large page would, were it not for an instruction fetch.
    NxLargePageSplits,
    /// Most leaves that mapped one frame.
    MaxRmapSize,
    /// Most shadow pages found in one place of the hash table before the right one.
    MaxHashCollisions,
    /// Pages that became page tables, TDP or shadow, roots included.
    PageTablesAllocated,
    /// Pages of page tables that were given back.
    PageTablesFreed,
}

/// A VM's own counters.
#[derive(Debug)]
pub struct VmStats([SharedCounter; VM_COUNTS]);

impl Default for VmStats {
    fn default() -> Self {
        Self::new()
    }
}

impl VmStats {
    /// Statistics that are all zero.
    pub const fn new() -> Self {
        Self([const { SharedCounter::new() }; VM_COUNTS])
    }

    /// One of the counters.
    #[inline(always)]
    pub fn of(&self, what: VmCount) -> &SharedCounter {
        // One place per variant: the index is in range for every value of the enum.
        &self.0[what as usize]
    }

    /// Leaves of a level (1: 4 KiB, 2: 2 MiB, 3: 1 GiB) came; others are not counted.
    #[inline]
    pub fn mapped(&self, level: u8, leaves: u64) {
        if let Some(counter) = self.pages(level) {
            counter.add(leaves);
        }
    }

    /// Leaves of a level went.
    #[inline]
    pub fn unmapped(&self, level: u8, leaves: u64) {
        // A withdrawal that found nothing of this size costs no locked instruction.
        if leaves != 0
            && let Some(counter) = self.pages(level)
        {
            counter.sub(leaves);
        }
    }

    #[inline(always)]
    fn pages(&self, level: u8) -> Option<&SharedCounter> {
        match level {
            1 => Some(self.of(VmCount::Pages4k)),
            2 => Some(self.of(VmCount::Pages2m)),
            3 => Some(self.of(VmCount::Pages1g)),
            _ => None,
        }
    }
}
