//! What the hardware walks: the root that fits the guest's registers, and shadow paging.

pub(crate) mod pdptes;
pub(crate) mod roots;
pub(crate) mod shadow;

use backend::{Backend, PageLog};
use host::{Arc, KBox};
use mmu::{TableCache, Tables};
use vm::memory::VmMemory;

use crate::nested::paging::Stage;

/// The memory that a vCPU's guest sees, and what the hardware walks to reach it.
pub(crate) struct Mmu {
    /// Guest memory as the vCPU sees it now; what the VM shows it in system-management mode is
    /// another.
    pub(crate) memory: Arc<VmMemory>,
    /// Which root the vCPU runs on.
    pub(crate) roots: roots::Roots,
    /// Shadow paging; `None` with TDP.
    pub(crate) shadow: Option<KBox<shadow::Shadow>>,
    /// Tables of L1's for its guest, once there were some.
    pub(crate) stage: Option<KBox<Stage>>,
    /// Pages for TDP tables, topped up outside locks.
    pub(crate) tables: KBox<TableCache>,
}

impl Mmu {
    /// Shadow paging, the memory that it is made from, and pages for tables; `None` with TDP.
    #[inline(always)]
    pub(crate) fn shadowed(
        &mut self,
    ) -> Option<(&mut KBox<shadow::Shadow>, &Arc<VmMemory>, &mut TableCache)> {
        Some((self.shadow.as_mut()?, &self.memory, &mut self.tables))
    }

    /// L1's tables for its guest, L1's memory, the vCPU's roots, and pages for tables; `None` if there were none of
    /// L1's.
    #[inline(always)]
    pub(crate) fn staged(
        &mut self,
    ) -> Option<(&mut Stage, &Arc<VmMemory>, &mut roots::Roots, &mut TableCache)> {
        Some((self.stage.as_deref_mut()?, &self.memory, &mut self.roots, &mut self.tables))
    }

    /// L1's tables that L2 runs with.
    #[inline]
    pub(crate) fn l1_tables(&self) -> Option<Tables> {
        self.stage.as_ref().and_then(|stage| stage.tables)
    }

    /// Whether L1's tables have refused something that L1 has not heard of.
    #[cold]
    pub(crate) fn has_refused(&self) -> bool {
        self.stage.as_ref().is_some_and(|stage| stage.refused.is_some())
    }

    /// What L1's tables have refused last is not accessed after all.
    #[cold]
    pub(crate) fn forget_refusal(&mut self) {
        if let Some(stage) = &mut self.stage {
            stage.refused = None;
        }
    }

    /// Hands over what the CPU logged of written pages. Before the mode says that the guest was left:
    /// who then looks at the dirty log finds it all there.
    #[cold]
    #[inline(never)]
    pub(crate) fn take_page_log<B: Backend>(&self, b: &mut B) {
        b.host_segments();
        if let Some(log) = b.page_log() {
            log.take_logged(|gpa| self.memory.note_logged(gpa));
        }
        b.guest_segments();
    }
}
