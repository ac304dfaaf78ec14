//! Which page-table root the vCPU runs on, and when another one is due.
//!
//! TDP tables do not depend on what the guest writes to CR0, CR4 and EFER: with `keep_roots=1`
//! such a write costs the flush that the architecture demands, or nothing. Shadow tables do depend on
//! them: there another root is looked up ([`crate::paging::shadow`]). `keep_roots=0` behaves as
//! KVM did before: every change of a bit that has to do with paging unloads all roots of the vCPU,
//! and the last one that holds a root takes its tables with it.

use super::Mmu;
use backend::Backend;
use host::{KBox, NoMemory};
use mmu::roots::{ResetBits, RootCache, RootKey};
use mmu::{AddressSpace, Role, Section};
use x86::{Cr4, Hpa};

use crate::{Vcpu, run::outcome::Next};

bitflags::bitflags! {
    /// For what a change of the role matters.
    #[derive(Clone, Copy, Debug)]
    struct Watch: u8 {
        /// Shadow paging: another root is looked up.
        const SHADOW = 1 << 0;
        /// `keep_roots=0`: the roots are unloaded.
        const UNLOAD = 1 << 1;
    }
}

/// The roots of a vCPU.
#[derive(Debug)]
pub(crate) struct Roots {
    /// Something changed: look before the next entry.
    due: bool,
    /// All are to be unloaded first.
    unload: bool,
    watch: Watch,
    /// What the registers made of the role at the last look, under shadow paging: its lower half.
    role: u32,
    /// The registers at the last look, with `keep_roots=0`.
    seen: ResetBits,
    cache: KBox<RootCache<Hpa>>,
}

impl Roots {
    pub(crate) fn new(paging: vm::vm::Paging) -> Result<Self, NoMemory> {
        let mut watch = Watch::empty();
        watch.set(Watch::SHADOW, !paging.tdp);
        watch.set(Watch::UNLOAD, !paging.keep_roots);
        Ok(Self {
            due: true,
            unload: false,
            watch,
            seen: ResetBits::default(),
            role: 0,
            cache: KBox::new(RootCache::new())?,
        })
    }

    /// What the backend has to show of paging.
    pub(crate) fn paging(&self) -> backend::Paging {
        backend::Paging { shadow: self.is_shadow(), watch_roles: self.unloads() }
    }

    /// Whether the root has to be looked at before the guest may be entered.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.due
    }

    pub(crate) fn set_due(&mut self) {
        self.due = true;
    }

    /// The root of L2's, which was due, is there; what else is due stays so.
    pub(crate) fn nested_found(&mut self) {
        // L2's root alone was found: roots that are to be unloaded are still due.
        self.due = self.unload;
    }

    #[inline]
    pub(crate) fn is_shadow(&self) -> bool {
        self.watch.contains(Watch::SHADOW)
    }

    #[inline]
    fn unloads(&self) -> bool {
        self.watch.contains(Watch::UNLOAD)
    }
}

impl Mmu {
    /// CR0, CR4 or EFER was written, by the guest or by user space.
    #[inline]
    pub(crate) fn note_role(&mut self, b: &impl Backend) {
        if !self.roots.watch.is_empty() {
            self.look_at_role(b);
        }
    }

    /// As [`Self::note_role`], after a write that `changed` these bits of CR4: CR4.PGE is in no role.
    #[inline]
    pub(crate) fn note_role_of_cr4(&mut self, b: &impl Backend, changed: Cr4) {
        if !self.roots.watch.is_empty() && (changed != Cr4::PGE || self.roots.unloads()) {
            self.look_at_role(b);
        }
    }

    #[inline(never)]
    fn look_at_role(&mut self, b: &impl Backend) {
        let c = b.control();
        if self.roots.is_shadow() {
            let role = Role::of_registers(c.cr0, c.cr4, c.efer).bits() as u32;
            // The same role means the same root: nothing is looked up.
            if core::mem::replace(&mut self.roots.role, role) != role {
                self.want_root();
            }
        }
        if self.roots.unloads() {
            let now = ResetBits::of(c.cr0, c.cr4, c.efer);
            if core::mem::replace(&mut self.roots.seen, now) != now {
                self.unload_roots();
            }
        }
    }

    /// All roots are unloaded before the next entry.
    pub(crate) fn unload_roots(&mut self) {
        self.roots.unload = true;
        self.roots.due = true;
    }
}

impl<B: Backend> Vcpu<B> {
    /// Inside the loop, after an instruction that may have changed which root is due.
    #[inline]
    pub(crate) fn switch_root_in_loop(&mut self, s: Section<'_>) -> Next {
        if self.mmu.roots.due { self.switch_due_root(s) } else { Next::Again }
    }

    fn switch_due_root(&mut self, s: Section<'_>) -> Next {
        // To unload frees tables, for which others' flushes are waited for.
        if !self.mmu.roots.is_shadow() || self.mmu.roots.unload || !self.shadow_work_in_loop(s) {
            return Next::Done;
        }
        self.mmu.roots.due = false;
        Next::Again
    }

    /// Gives the backend the root that is due.
    #[inline(never)]
    pub(crate) fn switch_root(&mut self) -> Result<(), NoMemory> {
        // First, so that the root below is a new one.
        if core::mem::take(&mut self.mmu.roots.unload) {
            self.drop_roots();
        }
        if self.mmu.roots.is_shadow() {
            self.shadow_work()?;
            self.mmu.roots.due = false;
            return Ok(());
        }
        self.mmu.roots.due = false;
        let key = RootKey { base: 0, role: Role::tdp(self.smm.space()) };
        let root = match self.mmu.roots.cache.switch(key) {
            Some(root) => *root,
            None => {
                let root = self.mmu.memory.hold_tdp_root();
                // Two address spaces: nothing is ever driven out.
                self.mmu.roots.cache.insert(key, root);
                root
            }
        };
        // Before the nested root: an L2 without tables of L1's runs on this one too.
        self.b.set_tdp_root(root);
        self.switch_nested_root()
    }

    /// The vCPU sees the memory of the other mode from now on.
    pub(crate) fn memory_changed(&mut self) {
        self.mmu.roots.due = true;
        self.shadow_memory_changed();
    }

    fn drop_roots(&mut self) {
        self.drop_shadow_roots();
        for space in AddressSpace::ALL {
            while self.mmu.roots.cache.take_if(|key, _| key.role.space() == space).is_some() {
                self.vm.memory_in(space).unload_tdp_root(&**self.vm);
            }
        }
    }
}

impl<B: Backend> Drop for Vcpu<B> {
    fn drop(&mut self) {
        // A file of statistics may hold what is shared for longer: its timer would go on.
        self.shared.cancel();
        self.drop_shadow_roots();
        self.drop_nested_roots();
        for space in AddressSpace::ALL {
            while self.mmu.roots.cache.take_if(|key, _| key.role.space() == space).is_some() {
                self.vm.memory_in(space).leave_tdp_root();
            }
        }
    }
}
