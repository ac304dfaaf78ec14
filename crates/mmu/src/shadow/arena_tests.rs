//! Chains of shadow pages.

use super::*;

use crate::grant::Grant;
use crate::nested::Tables;
use crate::role::{AddressSpace, EptOffer, PagingContext};
use x86::{Cr0, Cr4, Efer};

fn arena(keys: [u64; 2], pages: usize) -> Arena {
    let mut arena = Arena::new(keys).unwrap();
    arena.add_room(&mut Vec::with_capacity(pages + 1));
    for _ in 0..pages {
        assert!(arena.add(KBox::new(ShadowPage::new().unwrap()).unwrap()).is_none());
    }
    arena
}

const PAGES: usize = 256;

/// The longest chain that pages make under the arena's keys. All of them are free again afterwards.
fn longest_of(arena: &Arena, pages: impl Iterator<Item = (u64, Role)>) -> usize {
    let mut made = Vec::new();
    for (gfn, role) in pages.take(PAGES) {
        let id = arena.create(Gfn(gfn), role).unwrap();
        assert_eq!(arena.find(Gfn(gfn), role), Some(id));
        let mut listed = 0;
        arena.for_table(Gfn(gfn), |_, _| listed += 1);
        assert!(listed <= MOST_LISTED);
        made.push(id);
    }
    assert_eq!(arena.used(), PAGES);
    let longest = arena.longest_chain();
    made.into_iter().for_each(|id| arena.retire(id));
    assert_eq!(arena.longest_chain(), 0, "each is found in the chain that it was put into");
    arena.free_all(arena.take_retired());
    longest
}

/// How many of 50 pairs of keys make a chain longer than what one frame may add, and a few.
fn bad_keys<I: Iterator<Item = (u64, Role)>>(pages: impl Fn() -> I) -> usize {
    let mut arena = arena([1, 1], PAGES);
    let bad = |_: &i32| {
        arena.keys = [(); 2].map(|()| host::random::word() | 1);
        longest_of(&arena, pages()) > MOST_LISTED + 12
    };
    (0..50).filter(bad).count()
}

/// The role of a root of a guest's own, by its address width.
fn own_of(width: u8) -> Role {
    let long = PagingContext {
        cr0: Cr0::PG | Cr0::WP,
        cr4: Cr4::PAE,
        efer: Efer::LMA,
        maxphyaddr: width,
        ..PagingContext::default()
    };
    Role::of(&long, AddressSpace::Main)
}

/// A guest that knows the keys has all its tables in one chain. Without them the same frames, and those at
/// equal distances, are spread.
#[test]
fn chains_stay_short_for_frames_that_were_chosen_for_other_keys() {
    const KNOWN: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93];
    for role in [nested(40, Some(7)), own_of(40)] {
        let arena = Arena::new(KNOWN).unwrap();
        let chain = |gfn| {
            let listed = arena.chain_of(Gfn(gfn));
            if role.may_settle() { listed } else { arena.chain_of_role(Gfn(gfn), role) }
        };
        let first = core::ptr::from_ref(chain(0));
        let chosen: Vec<_> = (0..1 << 22).filter(|gfn| core::ptr::eq(chain(*gfn), first)).collect();
        let chosen = || chosen.iter().map(|gfn| (*gfn, role));
        assert_eq!(longest_of(&self::arena(KNOWN, PAGES), chosen()), PAGES);
        assert_eq!(bad_keys(chosen), 0);
        for distance in [1, 1 << 9, 1 << 18, 0x1357] {
            let bad = bad_keys(|| (0u64..).map(|n| (n * distance, role)));
            assert_eq!(bad, 0, "keys at distance {distance:#x}");
        }
    }
}

/// The role of a table of L1's EPT tables.
fn nested(width: u8, hole: Option<u64>) -> Role {
    let tables = Tables::ept(0x1000, &EptOffer { maxphyaddr: width, ..EptOffer::default() });
    match hole {
        Some(hole) => tables.role.without_frame(Gfn(hole)).unwrap(),
        None => tables.role,
    }
}

/// One frame in roles without end, all of them held by vCPUs or not: frames that L1 leaves out, at any distance;
/// address widths of vCPUs, in tables of all levels, of L1's or of the guest's own.
#[test]
fn a_frame_in_many_roles_is_in_many_chains() {
    for distance in [1, 2, 512, 1 << 20, 0x1357] {
        let left_out = || (0..).map(|n| (7, nested(40, Some(n * distance % u64::from(u32::MAX)))));
        let bad = bad_keys(left_out);
        assert_eq!(bad, 0, "keys where frames at distance {distance:#x} are left out");
    }
    let ways = [false, true].map(|ept| {
        let of_width = move |width: u8| if ept { nested(width, None) } else { own_of(width) };
        let roles = move |width| (1..5).map(move |level| (7, of_width(width).at_level(level)));
        bad_keys(|| (0..64).flat_map(roles))
    });
    assert_eq!(ways, [0; 2], "keys for widths");
}

/// Pages that found their frame's chain full are found all the same when it is no longer.
#[test]
fn pages_beyond_the_frames_own_chain_stay_found() {
    let arena = arena([1, 3], PAGES);
    let roles = || (0..64).map(own_of);
    let made: Vec<_> = roles().map_while(|role| arena.create(Gfn(7), role)).collect();
    let listed = made.iter().filter(|id| arena.page(**id).is_listed()).count();
    assert_eq!((made.len(), listed), (64, MOST_LISTED));
    let (first, rest) = made.split_at(MOST_LISTED);
    first.iter().for_each(|id| arena.retire(*id));
    let found: Vec<_> = roles().filter_map(|role| arena.find(Gfn(7), role)).collect();
    assert_eq!(found, rest);
    // There is room again.
    let again = arena.create(Gfn(7), own_of(0)).unwrap();
    assert!(arena.page(again).is_listed());
    // What is made from no table of the guest's own asks for no place in it.
    assert!(!own_of(0).direct_below(Grant::ALL).may_settle());
    assert!(!nested(40, None).may_settle() && own_of(0).may_settle());
}

/// A place that was given back is found again, and no other twice.
#[test]
fn vacant_places_are_filled() {
    let mut arena = arena([1, 1], 8);
    let given_back: Vec<_> = (0..3).map_while(|_| arena.shrink()).collect();
    assert_eq!(given_back.len(), 3);
    for page in given_back {
        assert!(arena.add(page).is_none());
    }
    assert_eq!((arena.free_count(), arena.numbers()), (8, 9));
    let ids: Vec<_> = (0..8).map_while(|n| arena.create(Gfn(n), Role::default())).collect();
    let mut unique = ids.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), 8);
    assert!(ids.iter().all(|id| (1..9).contains(id)));
}
