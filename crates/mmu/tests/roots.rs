//! The cache of previous roots, and which register bits make another root.

use gannet_mmu::roots::{PREVIOUS, ResetBits, RootCache, RootKey};
use gannet_mmu::{AddressSpace, PagingContext, Role};
use proptest::prelude::*;
use x86::{Cr0, Cr4, Efer};

const PG: Cr0 = Cr0::PG;
const WP: Cr0 = Cr0::WP;
const PSE: Cr4 = Cr4::PSE;
const PAE: Cr4 = Cr4::PAE;
const PGE: Cr4 = Cr4::PGE;
const LA57: Cr4 = Cr4::LA57;
const SMEP: Cr4 = Cr4::SMEP;
const SMAP: Cr4 = Cr4::SMAP;
const LMA: Efer = Efer::LMA;
const NXE: Efer = Efer::NXE;
/// Nothing set in CR4, nothing in EFER.
const NO: (Cr4, Efer) = (Cr4::empty(), Efer::empty());

fn context(cr0: Cr0, cr4: Cr4, efer: Efer) -> PagingContext {
    PagingContext { cr0, cr4, efer, ..PagingContext::default() }
}

fn role(cr0: Cr0, cr4: Cr4, efer: Efer) -> Role {
    Role::of(&context(cr0, cr4, efer), AddressSpace::Main)
}

fn key(base: u64) -> RootKey {
    RootKey { base, role: Role::default() }
}

#[test]
fn a_root_is_found_again_by_its_base_and_role() {
    let mut cache = RootCache::new();
    let other = RootKey { base: 1, role: role(PG | WP, PAE, LMA) };
    assert_eq!(cache.insert(key(1), 'a'), None);
    assert_eq!(cache.insert(key(2), 'b'), None);
    assert_eq!(cache.insert(other, 'c'), None);
    assert_eq!(cache.switch(key(1)), Some(&'a'));
    assert_eq!(cache.switch(key(2)), Some(&'b'));
    assert_eq!(cache.switch(other), Some(&'c'));
    assert_eq!(cache.switch(key(3)), None);
    // A miss leaves what was current.
    assert_eq!((cache.current(), cache.key()), (Some(&'c'), Some(other)));
}

#[test]
fn the_root_that_was_longest_unused_goes() {
    let mut cache = RootCache::new();
    for n in 0..=PREVIOUS as u64 {
        assert_eq!(cache.insert(key(n), n), None);
    }
    // 0 is used again, so 1 is the oldest.
    assert_eq!(cache.switch(key(0)), Some(&0));
    assert_eq!(cache.insert(key(9), 9), Some(1));
    assert_eq!(cache.switch(key(0)), Some(&0));
}

#[test]
fn unloading_gives_every_root_back() {
    let mut cache = RootCache::new();
    for n in 0..3 {
        cache.insert(key(n), n);
    }
    let mut back: Vec<_> = core::iter::from_fn(|| cache.take()).collect();
    back.sort();
    assert_eq!(back, [0, 1, 2]);
    assert_eq!(cache.current(), None);
    assert_eq!(cache.switch(key(1)), None);
}

#[test]
fn single_roots_are_taken_out_where_they_stand() {
    let mut cache = RootCache::new();
    for n in 0..4 {
        cache.insert(key(n), n);
    }
    assert_eq!(cache.take_if(|_, root| root % 2 == 1), Some(3));
    assert_eq!(cache.take_if(|_, root| root % 2 == 1), Some(1));
    assert_eq!(cache.take_if(|_, root| root % 2 == 1), None);
    assert_eq!(cache.previous().copied().collect::<Vec<_>>(), [2, 0]);
    assert_eq!(cache.switch(key(2)), Some(&2));
}

#[test]
fn each_bit_that_changes_an_entrys_meaning_makes_another_root() {
    let long = (PG | WP, PAE, LMA | NXE);
    let of = |(cr0, cr4, efer)| role(cr0, cr4, efer);
    let base = of(long);
    assert_ne!(base, role(PG, PAE, LMA | NXE), "WP");
    assert_ne!(base, role(PG | WP, PAE, LMA), "NXE");
    assert_ne!(base, role(PG | WP, PAE | LA57, LMA | NXE), "LA57");
    assert_ne!(base, role(PG | WP, PAE, NXE), "LMA");
    assert_ne!(base, role(WP, PAE, NXE), "PG");
    assert_ne!(role(PG, NO.0, NO.1), role(PG, PSE, NO.1), "PSE");
    assert_ne!(role(PG, NO.0, NO.1), role(PG, PAE, NO.1), "PAE");
    assert_ne!(role(PG, PAE, LMA), role(PG, PAE | SMEP, LMA), "SMEP without WP");
    assert_ne!(role(PG, PAE, LMA), role(PG, PAE | SMAP, LMA), "SMAP without WP");
    let smm = Role::of(&context(PG | WP, PAE, LMA | NXE), AddressSpace::Smm);
    assert_ne!(base, smm, "SMM");
    assert!(smm.space() == AddressSpace::Smm && base.space() == AddressSpace::Main);
    assert_ne!(Role::tdp(AddressSpace::Smm), Role::tdp(AddressSpace::Main));
}

#[test]
fn bits_without_meaning_keep_the_root() {
    let base = role(PG | WP, PAE, LMA | NXE);
    for cr4 in [PGE, PSE, SMEP, SMAP, SMEP | SMAP] {
        assert_eq!(base, role(PG | WP, PAE | cr4, LMA | NXE), "{cr4:?}");
    }
    for (cr4, efer) in [(PAE, NXE), (PSE, NO.1), (SMEP, NO.1), (LA57, NO.1)] {
        assert_eq!(role(Cr0::empty(), NO.0, NO.1), role(WP, cr4, efer), "without paging");
    }
    // Four-byte entries have no NX.
    assert_eq!(role(PG, NO.0, NXE), role(PG, NO.0, NO.1));
}

#[test]
fn the_old_way_resets_on_every_paging_bit() {
    let base = ResetBits::of(PG | WP, PAE, LMA);
    let other = Cr0::PE | Cr0::MP | Cr0::TS | Cr0::NE;
    assert_eq!(base, ResetBits::of(PG | WP | other, PAE | Cr4::OSXSAVE, LMA | Efer::SCE));
    for (cr0, cr4, efer) in
        [(PG, PAE, LMA), (PG | WP, PAE | PGE, LMA), (PG | WP, PAE | SMEP, LMA), (PG | WP, PAE, NXE)]
    {
        assert_ne!(base, ResetBits::of(cr0, cr4, efer));
    }
}

proptest! {
    /// Against a plain list of the most recently used.
    #[test]
    fn the_cache_is_a_list_of_the_most_recently_used(bases in prop::collection::vec(0u64..8, 0..200)) {
        let mut cache = RootCache::new();
        let mut list: Vec<u64> = Vec::new();
        for base in bases {
            let hit = cache.switch(key(base)).copied();
            let known = list.iter().position(|b| *b == base);
            prop_assert_eq!(hit, known.map(|_| base));
            match known {
                Some(at) => {
                    list.remove(at);
                }
                None => {
                    let gone = cache.insert(key(base), base);
                    prop_assert_eq!(gone, (list.len() > PREVIOUS).then(|| list.pop().unwrap()));
                }
            }
            list.insert(0, base);
            prop_assert_eq!(cache.key(), Some(key(base)));
            prop_assert_eq!(cache.previous().copied().collect::<Vec<_>>(), &list[1..]);
        }
    }
}
