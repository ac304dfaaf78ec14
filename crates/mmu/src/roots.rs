//! The roots that a vCPU keeps: the one it runs on and those it ran on before, each known by the
//! page-table base it stands for and by the role in which the guest used it.
//!
//! A guest that sets CR0.WP, EFER.NXE and so on back and forth, or that loads CR3 by turns, finds
//! its root here. What a root is, the cache does not know: an address under nested paging, a counted
//! reference under shadow paging. It gives back what it drops, for the owner to release.

use crate::walk::PagingContext;

const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
const CR4_PSE: u64 = 1 << 4;
const CR4_PAE: u64 = 1 << 5;
const CR4_PGE: u64 = 1 << 7;
const CR4_LA57: u64 = 1 << 12;
const CR4_SMEP: u64 = 1 << 20;
const CR4_SMAP: u64 = 1 << 21;
const CR4_PKE: u64 = 1 << 22;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const EFER_NXE: u64 = 1 << 11;

/// What decides how a guest's paging entries are read: two roots of one base and of equal role are
/// the same root.
///
/// Bits that mean nothing in the paging mode at hand are left out, so that they cannot keep equal
/// roots apart: without paging nothing counts; SMEP and SMAP forbid the supervisor what an entry
/// allows, and are part of the entry's meaning only while CR0.WP is clear, when user pages may have
/// to be turned into supervisor ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RootRole(u16);

impl RootRole {
    const PAGING: u16 = 1 << 0;
    const LONG: u16 = 1 << 1;
    const PAE: u16 = 1 << 2;
    const LA57: u16 = 1 << 3;
    const PSE: u16 = 1 << 4;
    const WP: u16 = 1 << 5;
    const NX: u16 = 1 << 6;
    const SMEP: u16 = 1 << 7;
    const SMAP: u16 = 1 << 8;
    const SMM: u16 = 1 << 9;

    /// The role under nested paging: the guest's registers mean nothing to nested tables, which
    /// only the address space tells apart.
    #[inline]
    pub const fn nested(smm: bool) -> Self {
        Self(if smm { Self::SMM } else { 0 })
    }

    /// The role of the guest's own tables. `smm`: in system-management mode, which sees other
    /// memory.
    #[inline]
    pub fn shadow(context: &PagingContext, smm: bool) -> Self {
        let mut bits = Self::nested(smm).0;
        let mut set = |on: bool, bit| bits |= if on { bit } else { 0 };
        let (cr0, cr4) = (context.cr0, context.cr4);
        if cr0 & CR0_PG != 0 {
            let wp = cr0 & CR0_WP != 0;
            let (long, pae) = (context.efer & EFER_LMA != 0, cr4 & CR4_PAE != 0);
            set(true, Self::PAGING);
            set(long, Self::LONG);
            set(long && cr4 & CR4_LA57 != 0, Self::LA57);
            set(pae, Self::PAE);
            set(!pae && cr4 & CR4_PSE != 0, Self::PSE);
            set(wp, Self::WP);
            set(pae && context.efer & EFER_NXE != 0, Self::NX);
            set(!wp && cr4 & CR4_SMEP != 0, Self::SMEP);
            set(!wp && cr4 & CR4_SMAP != 0, Self::SMAP);
        }
        Self(bits)
    }

    /// Whether it is that of system-management mode.
    #[inline]
    pub const fn smm(self) -> bool {
        self.0 & Self::SMM != 0
    }
}

/// CR0, CR4 and EFER as far as a change of them once reset a vCPU's whole paging context in KVM
/// (until 5.15 for CR4.PGE, until 6.4 for the others): `keep_roots=0` does the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetBits(u64);

impl ResetBits {
    const CR0: u64 = CR0_PG | CR0_WP;
    const CR4: u64 = CR4_PGE | CR4_PSE | CR4_PAE | CR4_LA57 | CR4_SMEP | CR4_SMAP | CR4_PKE;
    const EFER: u64 = EFER_LME | EFER_LMA | EFER_NXE;

    /// Of these registers.
    #[inline]
    pub const fn of(cr0: u64, cr4: u64, efer: u64) -> Self {
        // No two of these bits lie at the same place in the word.
        Self((cr0 & Self::CR0) | (cr4 & Self::CR4) << 32 | (efer & Self::EFER))
    }
}

const _: () = {
    assert!(ResetBits::CR0 & ResetBits::EFER == 0);
    assert!((ResetBits::CR0 | ResetBits::EFER) >> 32 == 0 && ResetBits::CR4 >> 32 == 0);
};

/// What a root is known by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootKey {
    /// The page-table base: CR3 without its flags and PCID. 0 under nested paging and for a guest
    /// that does not page.
    pub base: u64,
    /// How the guest uses it.
    pub role: RootRole,
}

/// Roots kept beside the current one.
pub const PREVIOUS: usize = 3;

/// A current root and up to [`PREVIOUS`] earlier ones, the latest first.
#[derive(Clone, Debug)]
pub struct RootCache<R> {
    current: Option<(RootKey, R)>,
    previous: [Option<(RootKey, R)>; PREVIOUS],
}

impl<R> Default for RootCache<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R> RootCache<R> {
    /// Holds nothing.
    pub const fn new() -> Self {
        Self { current: None, previous: [const { None }; PREVIOUS] }
    }

    /// The current root.
    #[inline]
    pub fn current(&self) -> Option<&R> {
        self.current.as_ref().map(|(_, root)| root)
    }

    /// What the current root is known by.
    #[inline]
    pub fn key(&self) -> Option<RootKey> {
        self.current.as_ref().map(|(key, _)| *key)
    }

    /// Makes the root of `key` current, if it is kept. The one that was current is kept as the
    /// latest of the previous ones.
    #[inline]
    pub fn switch(&mut self, key: RootKey) -> Option<&R> {
        if self.key() != Some(key) {
            let at = self.previous.iter().position(|kept| is_for(kept, key))?;
            // The places before it move down by one, and what was current takes the first.
            self.previous.get_mut(..=at)?.rotate_right(1);
            let [first, ..] = &mut self.previous;
            core::mem::swap(&mut self.current, first);
        }
        self.current()
    }

    /// Makes a new root current. Gives back a root that had to go.
    pub fn insert(&mut self, key: RootKey, root: R) -> Option<R> {
        let last = self.current.replace((key, root))?;
        self.previous.rotate_right(1);
        let [first, ..] = &mut self.previous;
        first.replace(last).map(|(_, root)| root)
    }

    /// Takes one of the roots out, the current one first; `None` when none is left. So all are
    /// unloaded.
    pub fn take(&mut self) -> Option<R> {
        let all = core::iter::once(&mut self.current).chain(&mut self.previous);
        all.filter_map(Option::take).map(|(_, root)| root).next()
    }

    /// Takes one of the roots out for which `stale` says so.
    pub fn take_if(&mut self, stale: impl Fn(&RootKey, &R) -> bool) -> Option<R> {
        let all = core::iter::once(&mut self.current).chain(&mut self.previous);
        for place in all {
            if place.as_ref().is_some_and(|(key, root)| stale(key, root)) {
                return place.take().map(|(_, root)| root);
            }
        }
        None
    }

    /// The previous roots.
    pub fn previous(&self) -> impl Iterator<Item = &R> {
        self.previous.iter().flatten().map(|(_, root)| root)
    }
}

#[inline]
fn is_for<R>(kept: &Option<(RootKey, R)>, key: RootKey) -> bool {
    matches!(kept, Some((known, _)) if *known == key)
}
