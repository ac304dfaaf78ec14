//! Memslots against a naive model, and each refusal of KVM_SET_USER_MEMORY_REGION.

use gannet_mmu::slots::{MAX_PAGES, Published, USER_SLOTS};
use gannet_mmu::{MemSlots, Region, RegionLimits, SlotError};
use host::boxed::KBox;
use host::srcu::Srcu;
use proptest::prelude::*;
use x86::{Gfn, Gpa, Hva};

const MIB: u64 = 1 << 20;

fn limits() -> RegionLimits {
    RegionLimits { frames: 1 << 28, ..RegionLimits::default() }
}

fn region(slot: u32, gpa: u64, size: u64, hva: u64) -> Region {
    Region { slot, flags: 0, gpa, size, hva }
}

/// A VM's slots, and what left them.
struct Slots(Srcu<MemSlots>);

impl Slots {
    fn new() -> Self {
        Self(Srcu::new(KBox::new(MemSlots::new()).unwrap()).unwrap())
    }

    fn one() -> Self {
        let slots = Self::new();
        slots.set(&region(1, MIB, MIB, 0x10_0000_0000)).unwrap();
        slots
    }

    fn set(&self, region: &Region) -> Result<Published, SlotError> {
        let change = self.0.read().change(region, &limits())?;
        Ok(change.publish(&self.0, |old| {
            let there = self.0.read();
            assert!(there.by_id(old.id).unwrap().leaving, "seen by all as leaving");
            assert_eq!(there.find(old.base).unwrap().id, old.id);
            let mut met = false;
            there.backed_by(old.hva, Hva(old.hva.0 + 1), |slot| met |= slot.id == old.id);
            assert!(met, "whoever takes memory back finds it");
        }))
    }
}

#[test]
fn each_bad_region_has_its_refusal() {
    let slots = Slots::one();
    let slots = slots.0.read();
    let good = region(2, 4 * MIB, MIB, 0x20_0000_0000);
    let cases = [
        (Region { flags: 1 << 2, ..good }, SlotError::UnknownFlag),
        (Region { size: 4097, ..good }, SlotError::Unaligned),
        (Region { gpa: 1, ..good }, SlotError::Unaligned),
        (Region { hva: 0x800, ..good }, SlotError::Unaligned),
        (Region { hva: !0xfff, ..good }, SlotError::NotUserRange),
        (Region { hva: 1 << 63, ..good }, SlotError::NotUserRange),
        (Region { hva: 0x7fff_ffff_f000 - 4096, ..good }, SlotError::NotUserRange),
        (Region { slot: 1 << 16, ..good }, SlotError::AddressSpace),
        (Region { slot: USER_SLOTS, ..good }, SlotError::SlotId),
        (Region { slot: 0xffff, ..good }, SlotError::SlotId),
        (Region { gpa: !0xfff, size: 0x2000, ..good }, SlotError::Wraps),
        (Region { size: (MAX_PAGES + 1) << 12, hva: 0, ..good }, SlotError::TooLarge),
        (Region { gpa: 1 << 40, ..good }, SlotError::BeyondGuestPhysical),
        (Region { gpa: (1 << 40) - 4096, ..good }, SlotError::BeyondGuestPhysical),
        (Region { size: 0, ..good }, SlotError::Absent),
        (region(1, MIB, 2 * MIB, 0x10_0000_0000), SlotError::Immutable),
        (region(1, MIB, MIB, 0x11_0000_0000), SlotError::Immutable),
        (Region { flags: 2, ..region(1, MIB, MIB, 0x10_0000_0000) }, SlotError::Immutable),
        (Region { gpa: 2 * MIB - 4096, ..good }, SlotError::Overlaps),
        (Region { gpa: 0, size: MIB + 4096, ..good }, SlotError::Overlaps),
        (Region { gpa: 0, size: 8 * MIB, ..good }, SlotError::Overlaps),
        (Region { gpa: MIB + 4096, size: 4096, ..good }, SlotError::Overlaps),
    ];
    for (bad, why) in cases {
        assert_eq!(slots.change(&bad, &limits()).err(), Some(why), "{bad:x?}");
    }
    assert!(slots.change(&good, &limits()).is_ok());
    assert_eq!(slots.len(), 1);
}

#[test]
fn the_last_frame_of_the_guest_can_be_backed() {
    let last = region(0, (1 << 40) - 4096, 4096, 0);
    assert!(MemSlots::new().change(&last, &limits()).is_ok());
}

#[test]
fn the_same_region_again_changes_nothing() {
    let same = region(1, MIB, MIB, 0x10_0000_0000);
    let slots = Slots::one();
    assert!(slots.0.read().change(&same, &limits()).unwrap().is_nothing());
    assert!(matches!(slots.set(&same), Ok(Published::Nothing)));
}

#[test]
fn a_slot_may_move_onto_its_own_former_place() {
    let moved = region(1, MIB + 4096, MIB, 0x10_0000_0000);
    let slots = Slots::one();
    let Ok(Published::Left(old)) = slots.set(&moved) else { panic!() };
    let slots = slots.0.read();
    assert_eq!((old.base, slots.len()), (Gfn(256), 1));
    assert!(slots.find(Gfn(256)).is_none());
    assert_eq!(slots.hva_of(Gpa(MIB + 4096 + 5)), Some(Hva(0x10_0000_0005)));
}

#[test]
fn a_dirty_log_lives_on_when_its_slot_moves_and_starts_clean_when_switched_on_again() {
    let log = Region { flags: 1, ..region(1, MIB, MIB, 0x10_0000_0000) };
    let slots = Slots::one();
    let Ok(Published::Flags(old, new)) = slots.set(&log) else { panic!() };
    assert!(old.dirty.is_none() && new.dirty.is_some() && slots.0.read().logs());
    let marked =
        |gfn: u64, n| slots.0.read().find(Gfn(gfn)).unwrap().dirty.as_ref().unwrap().is_marked(n);
    slots.0.read().find(Gfn(256)).unwrap().mark_dirty(Gfn(257));
    slots.set(&Region { gpa: 0, ..log }).unwrap();
    assert!(marked(0, 1));
    slots.set(&Region { gpa: 0, flags: 0, ..log }).unwrap();
    assert!(!slots.0.read().logs());
    slots.set(&Region { gpa: 0, ..log }).unwrap();
    assert!(!marked(0, 1));
}

#[test]
fn a_large_page_needs_equal_skew_and_room() {
    let slot = |gpa, size, hva| {
        let slots = Slots::new();
        slots.set(&region(0, gpa, size, hva)).unwrap();
        slots.0.read().iter().next().unwrap().clone()
    };
    let aligned = slot(2 * MIB, 4 * MIB, 0x4000_0000);
    assert_eq!(aligned.max_level(Gfn(512), 3), 2);
    assert_eq!(aligned.max_level(Gfn(512 + 1023), 3), 2);
    assert_eq!(aligned.max_level(Gfn(512), 1), 1);
    let skewed = slot(2 * MIB, 4 * MIB, 0x4000_1000);
    assert_eq!(skewed.max_level(Gfn(512), 3), 1);
    let ragged = slot(MIB, 4 * MIB, 0x4010_0000);
    assert_eq!(ragged.max_level(Gfn(256), 3), 1);
    assert_eq!(ragged.max_level(Gfn(512), 3), 2);
    assert_eq!(ragged.max_level(Gfn(1024 + 255), 3), 1);
    let giant = slot(1 << 30, 1 << 30, 1 << 30);
    assert_eq!(giant.max_level(Gfn(1 << 18), 3), 3);
}

#[test]
fn frames_behind_a_host_range_are_cut_to_the_slot() {
    let slots = Slots::one();
    let slots = slots.0.read();
    let slot = slots.iter().next().unwrap();
    let frames = |a, b| slot.frames_of(Hva(a), Hva(b)).map(|(a, b)| (a.0, b.0));
    assert_eq!(frames(0, u64::MAX), Some((256, 512)));
    assert_eq!(frames(0x10_0000_1000, 0x10_0000_3000), Some((257, 259)));
    assert_eq!(frames(0x10_0000_1800, 0x10_0000_1801), Some((257, 258)));
    assert_eq!(frames(0, 0x10_0000_0000), None);
    assert_eq!(frames(0x10_0010_0000, u64::MAX), None);
    let backed = |a, b| {
        let mut ids = Vec::new();
        slots.backed_by(Hva(a), Hva(b), |slot| ids.push(slot.id));
        ids
    };
    assert_eq!(backed(0, 0x10_0000_0000), []);
    assert_eq!(backed(0x10_000f_f000, u64::MAX), [1]);
}

/// The model: a plain list of slots, every rule spelled out page by page.
#[derive(Clone, Default)]
struct Naive(Vec<(u32, u64, u64, u64, u32)>);

impl Naive {
    fn apply(&mut self, r: &Region) -> Result<(), SlotError> {
        let (base, npages) = (r.gpa >> 12, r.size >> 12);
        let at = self.0.iter().position(|s| s.0 == r.slot);
        if npages == 0 {
            self.0.remove(at.ok_or(SlotError::Absent)?);
            return Ok(());
        }
        if let Some(at) = at {
            let old = self.0[at];
            if old.2 != npages || old.3 != r.hva || (old.4 ^ r.flags) & 2 != 0 {
                return Err(SlotError::Immutable);
            }
        }
        if at.is_none_or(|at| self.0[at].1 != base) {
            let taken =
                |g: u64| self.0.iter().any(|s| s.0 != r.slot && (s.1..s.1 + s.2).contains(&g));
            if (base..base + npages).any(taken) {
                return Err(SlotError::Overlaps);
            }
        }
        let new = (r.slot, base, npages, r.hva, r.flags);
        match at {
            Some(at) => self.0[at] = new,
            None => self.0.push(new),
        }
        Ok(())
    }

    fn hva(&self, gfn: u64) -> Option<u64> {
        let slot = self.0.iter().find(|s| (s.1..s.1 + s.2).contains(&gfn))?;
        Some(slot.3 + ((gfn - slot.1) << 12))
    }
}

proptest! {
    #[test]
    fn random_changes_agree_with_a_list(
        changes in prop::collection::vec((0u32..6, 0u64..40, 0u64..8, 0u64..3, 0u32..4), 1..60)
    ) {
        let mut naive = Naive::default();
        let slots = Slots::new();
        for (slot, page, pages, hva, flags) in changes {
            let r = Region {
                slot, flags, gpa: page << 12, size: pages << 12, hva: 0x1000_0000 * (hva + 1),
            };
            let wanted = naive.clone().apply(&r);
            let found = slots.set(&r);
            prop_assert_eq!(found.as_ref().err(), wanted.as_ref().err());
            if found.is_ok() {
                naive.apply(&r).unwrap();
            }
            let slots = slots.0.read();
            prop_assert!(slots.iter().all(|slot| !slot.leaving));
            prop_assert_eq!(slots.pages(), naive.0.iter().map(|s| s.2).sum::<u64>());
            prop_assert_eq!(slots.logs(), naive.0.iter().any(|s| s.4 & 1 != 0));
            for at in (1..4).flat_map(|n| (0..9).map(move |page| (0x1000_0000 * n) + (page << 12))) {
                let (start, end): (u64, u64) = (at, at + 0x1000);
                let mut met = Vec::new();
                slots.backed_by(Hva(start), Hva(end), |slot| met.push(u32::from(slot.id)));
                met.sort_unstable();
                let backs = naive.0.iter().filter(|s| s.3 < end && s.3 + (s.2 << 12) > start);
                let mut wanted: Vec<u32> = backs.map(|s| s.0).collect();
                wanted.sort_unstable();
                prop_assert_eq!(met, wanted);
            }
            prop_assert_eq!(slots.len(), naive.0.len());
            prop_assert!(slots.iter().zip(slots.iter().skip(1)).all(|(a, b)| a.end() <= b.base));
            for gfn in (0..50).rev().chain([3, 3, 40, 2]) {
                prop_assert_eq!(slots.hva_of(Gfn(gfn).gpa()).map(|h| h.0), naive.hva(gfn));
            }
        }
    }
}
