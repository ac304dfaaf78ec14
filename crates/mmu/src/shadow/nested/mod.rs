//! Shadow pages for a guest of the guest's (L2): the hardware's NPT or EPT tables, derived from those of the
//! hypervisor in the guest (L1) and from the VM's tree.
//!
//! L1's tables may be written at will, and are never write-protected: what L2 may find stale in a TLB it may
//! find stale here. What flushes L2's translations ([`NestedRoots::flush`]: INVEPT, TLB_CONTROL of VMCB12) makes
//! the next [`ShadowGuard::nested_switch`] compare the root's pages with L1's tables. Pages are found by
//! frame and role, both; no role of L1's tables is one of a guest's own.

mod fault;
mod large;
mod roots;
mod sync;
mod told;

use x86::{Gpa, Hpa};

use super::{ShadowGuard, ShadowMmu};
use crate::nested::{L1Fault, NestedAccess, Tables};
use crate::role::Role;
use crate::table::View;

pub use roots::NestedRoots;

/// A root of L2's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedRoot {
    /// nCR3 (encryption bit included), or the address bits of the EPT pointer.
    pub hpa: Hpa,
    /// How L1's tables are read.
    pub role: Role,
}

/// What became of a wish for a root of L2's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NestedSwitch {
    /// The root is current, and no staler than L2's translations may be.
    Ready {
        /// What the hardware is given for L2.
        root: NestedRoot,
        /// This vCPU's translations of L2 are to be flushed, under whatever root, once the hardware has this one.
        replaced: bool,
    },
    /// How many more pages are needed ([`super::ShadowMmu::reserve`]); nothing has changed.
    NeedPages(usize),
    /// L1's tables have more levels than the hardware's; or the roots are of another memory.
    Refused,
}

/// A frame of L1's that must be in the tree before L2 can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedFrame {
    /// L1-physical address of the access, or of an entry of L1's tables.
    pub gpa: Gpa,
    /// The frame must be writable.
    pub write: bool,
    /// The frame is fetched from.
    pub exec: bool,
    /// L1's entries let the frame be written without another fault of theirs, which would set a dirty flag: it counts
    /// as written when it is first touched, as every frame does that is mapped while writes are logged.
    pub dirties: bool,
    /// An entry of L1's tables is wanted, not what L2 accesses: where nothing backs it, L1 hears
    /// this.
    pub table: Option<L1Fault>,
}

/// What became of a fault of L2's on its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NestedFault {
    /// The pages allow the access now: enter again.
    Fixed {
        /// Something else stood there: this vCPU's translations of L2 are to be flushed first.
        replaced: bool,
    },
    /// L1's tables refuse.
    L1(L1Fault),
    /// A frame must be found outside.
    NeedFrame(NestedFrame),
    /// How many more pages are needed ([`super::ShadowMmu::reserve`]).
    NeedPages(usize),
}

impl ShadowMmu {
    /// The current root, if that is the one for `tables`, of these pages, and L2's translations were not flushed, nor L1 told of
    /// a fault, since it was looked at: what a switch would give, without the lock. A root that is held stays where it is.
    #[inline]
    pub fn nested_current(&self, roots: &NestedRoots, tables: &Tables) -> Option<NestedRoot> {
        roots.settled(self.counters.number(), tables)
    }
}

impl ShadowGuard<'_> {
    /// Makes the root for `tables` current: before each entry to L2. The hardware's own TLB is the caller's.
    pub fn nested_switch(
        &mut self,
        view: &View<'_>,
        roots: &mut NestedRoots,
        tables: &Tables,
    ) -> NestedSwitch {
        self.state.nested_switch(view, roots, tables)
    }

    /// A fault of the hardware's on the current root.
    pub fn nested_fault(
        &mut self,
        view: &View<'_>,
        roots: &NestedRoots,
        access: &NestedAccess,
    ) -> NestedFault {
        self.state.nested_fault(view, roots, access)
    }

    /// Lets go of all roots: before `roots` is dropped, and when what CPUID or the VMX capabilities say
    /// changes. `false`: they are of another memory, which must be asked.
    #[must_use = "roots of another memory are held still"]
    pub fn nested_release(&mut self, roots: &mut NestedRoots) -> bool {
        self.state.nested_release(roots)
    }
}
