//! The roots that a vCPU keeps: the one it runs on and those it ran on before, each known by the
//! page-table base it stands for and by the role in which the guest used it.
//!
//! A guest that sets CR0.WP, EFER.NXE and so on back and forth, or that loads CR3 by turns, finds
//! its root here. What a root is, the cache does not know: an address under TDP, a counted
//! reference under shadow paging. It gives back what it drops, for the owner to release.

use x86::{Cr0, Cr4, Efer};

use crate::role::Role;

/// CR0, CR4 and EFER as far as a change of them once reset a vCPU's whole paging context in KVM
/// (until 5.15 for CR4.PGE, until 6.4 for the others): `keep_roots=0` does the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetBits(u64);

impl ResetBits {
    const CR0: u64 = Cr0::PG.union(Cr0::WP).bits();
    const CR4: u64 = Cr4::PGE
        .union(Cr4::PSE)
        .union(Cr4::PAE)
        .union(Cr4::LA57)
        .union(Cr4::SMEP)
        .union(Cr4::SMAP)
        .union(Cr4::PKE)
        .bits();
    const EFER: u64 = Efer::LME.union(Efer::LMA).union(Efer::NXE).bits();

    /// Of these registers.
    #[inline]
    pub const fn of(cr0: Cr0, cr4: Cr4, efer: Efer) -> Self {
        // No two of these bits lie at the same place in the word.
        let (cr0, cr4, efer) = (cr0.bits(), cr4.bits(), efer.bits());
        Self((cr0 & Self::CR0) | (cr4 & Self::CR4) << 32 | (efer & Self::EFER))
    }
}

const _: () = {
    assert!(ResetBits::CR0 & ResetBits::EFER == 0);
    assert!((ResetBits::CR0 | ResetBits::EFER) >> 32 == 0 && ResetBits::CR4 >> 32 == 0);
};

/// What a root is known by: two roots of one base and of equal role are the same root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootKey {
    /// The page-table base: CR3 without its flags and PCID. 0 under TDP and for a guest
    /// that does not page.
    pub base: u64,
    /// How the guest uses it.
    pub role: Role,
}

/// Roots kept beside the current one.
pub const PREVIOUS: usize = 3;

/// Places for roots.
const PLACES: usize = PREVIOUS + 1;

/// A current root and up to [`PREVIOUS`] earlier ones, the latest first.
///
/// Roots stay where they are; only their order changes.
#[derive(Clone, Debug)]
pub struct RootCache<R> {
    places: [Option<(RootKey, R)>; PLACES],
    order: Order,
}

/// The places in the order of their use, the current one first: a permutation, a byte for each.
#[derive(Clone, Copy, Debug)]
struct Order(u32);

impl Order {
    const START: Self = Self(0x0302_0100);

    /// The place that is `n`-th.
    #[inline]
    const fn place(self, n: usize) -> usize {
        (self.0 >> (8 * (n & 3)) & 3) as usize
    }

    /// The `n`-th becomes the first, and those before it the next.
    #[inline]
    const fn to_front(self, n: usize) -> Self {
        let shift = 8 * (n as u32 & 3);
        let before = self.0 & ((1 << shift) - 1);
        // Two shifts each: for the last place one shift would be by 32, more than the word has.
        let behind = (self.0 >> shift >> 8 << shift) << 8;
        Self(behind | before << 8 | self.place(n) as u32)
    }
}

impl<R> Default for RootCache<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R> RootCache<R> {
    /// A cache that holds nothing.
    pub const fn new() -> Self {
        Self { places: [const { None }; PLACES], order: Order::START }
    }

    #[inline]
    fn nth(&self, n: usize) -> Option<&(RootKey, R)> {
        self.places[self.order.place(n) % PLACES].as_ref()
    }

    /// The current root.
    #[inline]
    pub fn current(&self) -> Option<&R> {
        self.nth(0).map(|(_, root)| root)
    }

    /// What the current root is known by.
    #[inline]
    pub fn key(&self) -> Option<RootKey> {
        self.nth(0).map(|(key, _)| *key)
    }

    /// Makes the root of `key` current, if it is kept. The one that was current is kept as the
    /// latest of the previous ones.
    #[inline]
    pub fn switch(&mut self, key: RootKey) -> Option<&R> {
        // The current root first: most writes of control registers change nothing of the key.
        for n in 0..PLACES {
            if matches!(self.nth(n), Some((known, _)) if *known == key) {
                self.order = self.order.to_front(n);
                return self.current();
            }
        }
        None
    }

    /// Makes a new root current. Gives back a root that had to go.
    pub fn insert(&mut self, key: RootKey, root: R) -> Option<R> {
        // A free place first: a root dropped without need has its pages compared when it is wanted
        // again.
        let free = (0..PLACES).find(|n| self.nth(*n).is_none());
        // Without a free place the root goes that was used longest ago.
        self.order = self.order.to_front(free.unwrap_or(PREVIOUS));
        self.places[self.order.place(0) % PLACES].replace((key, root)).map(|(_, root)| root)
    }

    /// Takes one of the roots out, the current one first; `None` when none is left. So all are
    /// unloaded.
    pub fn take(&mut self) -> Option<R> {
        self.take_if(|_, _| true)
    }

    /// Takes one of the roots out for which `stale` says so.
    pub fn take_if(&mut self, stale: impl Fn(&RootKey, &R) -> bool) -> Option<R> {
        for n in 0..PLACES {
            if self.nth(n).is_some_and(|(key, root)| stale(key, root)) {
                let place = &mut self.places[self.order.place(n) % PLACES];
                // The place keeps its rank: the next insert finds it free wherever it stands.
                return place.take().map(|(_, root)| root);
            }
        }
        None
    }

    /// The previous roots.
    pub fn previous(&self) -> impl Iterator<Item = &R> {
        (1..PLACES).filter_map(|n| self.nth(n)).map(|(_, root)| root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_stays_a_permutation() {
        let mut order = Order::START;
        for n in (0..64).map(|n| n * 7 % 4) {
            let (first, was) = (order.place(n), order);
            order = order.to_front(n);
            assert_eq!(order.place(0), first);
            for behind in n + 1..4 {
                assert_eq!(order.place(behind), was.place(behind));
            }
            for before in 0..n {
                assert_eq!(order.place(before + 1), was.place(before));
            }
        }
    }
}
