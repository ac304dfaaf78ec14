//! The TDP root as vCPUs hold it.
//!
//! All vCPUs share one tree. When the last of them unloads it, its tables are freed, and faults build
//! them again: what `keep_roots=0` costs.

use core::sync::atomic::Ordering;

use mmu::tdp::FlushRemote;
use x86::Hpa;

use super::VmMemory;

impl VmMemory {
    /// The TDP root, held by one more vCPU.
    pub fn hold_tdp_root(&self) -> Hpa {
        // Counted before the address is given: the last to leave must see this one.
        self.root_users.fetch_add(1, Ordering::AcqRel);
        self.tdp_root()
    }

    /// A vCPU unloads the TDP root. The last one takes the tables with it.
    pub fn unload_tdp_root(&self, flush: &(impl FlushRemote + ?Sized)) {
        if self.leave_tdp_root() {
            self.release(flush);
        }
    }

    /// A vCPU that holds the TDP root is gone. Whether it was the last.
    pub fn leave_tdp_root(&self) -> bool {
        // Whoever brings it to zero frees: the exchange lets only one vCPU see that.
        self.root_users.fetch_sub(1, Ordering::AcqRel) == 1
    }
}
