//! Guest page walks: each rule by name, and random tables against a second walker written from the
//! manual's tables instead of from the first one.

#[path = "walk/reference.rs"]
mod reference;

use gannet_mmu::walk::{AccessKind, probe};
use gannet_mmu::{Access, PagingContext, Translation, WalkError, translate};
use proptest::prelude::*;
use reference::{Case, Memory, agree};
use x86::exception::pf;
use x86::{Cr0, Cr4, Efer, Exception, Gpa};

const P: u64 = 1;
const W: u64 = 2;
const U: u64 = 4;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;
const SMEP: Cr4 = Cr4::SMEP;
const SMAP: Cr4 = Cr4::SMAP;
const PKE: Cr4 = Cr4::PKE;

fn long_mode() -> PagingContext {
    PagingContext {
        cr0: Cr0::PG | Cr0::WP | Cr0::PE,
        cr3: 0x1000,
        cr4: Cr4::PAE,
        efer: Efer::LME | Efer::LMA | Efer::NXE,
        maxphyaddr: 40,
        gbpages: true,
        ..PagingContext::default()
    }
}

/// VA 0x40_0000_1000 (and its page) through tables at 0x1000, 0x2000, 0x3000, 0x4000.
const VA: u64 = 0x40_0000_1abc;

fn four_levels(leaf: u64) -> Memory {
    let memory = Memory::default();
    memory.set(0x1000, 0x2000 | P | W | U);
    memory.set(0x2000 + 8 * 256, 0x3000 | P | W | U);
    memory.set(0x3000, 0x4000 | P | W | U);
    memory.set(0x4008, leaf);
    memory
}

fn fault(code: u32) -> Result<Translation, WalkError<()>> {
    Err(WalkError::Fault(Exception::pf(VA, code)))
}

fn gpa(found: Result<Translation, WalkError<()>>) -> u64 {
    found.unwrap().gpa.0
}

#[test]
fn a_write_sets_accessed_on_the_way_and_dirty_at_the_end() {
    let memory = four_levels(0x9000 | P | W | U);
    assert_eq!(gpa(translate(&memory, &long_mode(), VA, Access::READ)), 0x9abc);
    assert_eq!((memory.get(0x1000) & (A | D), memory.get(0x4008) & (A | D)), (A, A));
    assert_eq!(gpa(translate(&memory, &long_mode(), VA, Access::WRITE)), 0x9abc);
    assert_eq!((memory.get(0x3000) & (A | D), memory.get(0x4008) & (A | D)), (A, A | D));
}

#[test]
fn a_probe_and_a_refused_access_leave_the_tables_alone() {
    let memory = four_levels(0x9000 | P | U);
    let before = memory.cells.clone();
    assert_eq!(gpa(probe(&memory, &long_mode(), VA, Access::READ)), 0x9abc);
    assert_eq!(translate(&memory, &long_mode(), VA, Access::WRITE), fault(pf::PRESENT | pf::WRITE));
    assert_eq!(memory.cells, before);
}

#[test]
fn tables_in_rom_are_walked_as_they_are() {
    let mut memory = four_levels(0x9000 | P | W | U);
    memory.rom = vec![1, 2, 3, 4];
    let before = memory.cells.clone();
    assert_eq!(gpa(translate(&memory, &long_mode(), VA, Access::WRITE)), 0x9abc);
    assert_eq!(memory.cells, before);
}

#[test]
fn a_table_that_is_not_there_is_told_apart_from_a_fault() {
    let mut memory = four_levels(0x9000 | P | W | U);
    memory.holes = vec![3];
    let found = translate(&memory, &long_mode(), VA, Access::READ);
    assert_eq!(found, Err(WalkError::Memory { gpa: Gpa(0x3000), error: () }));
}

#[test]
fn an_entry_changed_by_another_cpu_is_walked_again() {
    let memory = four_levels(0x9000 | P | W | U);
    memory.race.replace(Some((0x4008, 0xa000 | P | W | U)));
    assert_eq!(gpa(translate(&memory, &long_mode(), VA, Access::WRITE)), 0xaabc);
    assert_eq!(memory.get(0x4008), 0xa000 | P | W | U | A | D);
}

#[test]
fn write_protect_binds_the_supervisor_only_with_cr0_wp() {
    let memory = four_levels(0x9000 | P | U);
    let wp = long_mode();
    let no_wp = PagingContext { cr0: Cr0::PG | Cr0::PE, ..wp };
    assert_eq!(gpa(translate(&memory, &no_wp, VA, Access::WRITE)), 0x9abc);
    let user = PagingContext { cpl: 3, ..no_wp };
    let code = pf::PRESENT | pf::WRITE | pf::USER;
    assert_eq!(translate(&memory, &user, VA, Access::WRITE), fault(code));
}

#[test]
fn user_mode_is_kept_out_of_supervisor_pages_but_implicit_accesses_are_not() {
    let memory = four_levels(0x9000 | P | W);
    let user = PagingContext { cpl: 3, ..long_mode() };
    assert_eq!(translate(&memory, &user, VA, Access::READ), fault(pf::PRESENT | pf::USER));
    let implicit = Access { implicit: true, ..Access::READ };
    assert_eq!(gpa(translate(&memory, &user, VA, implicit)), 0x9abc);
}

#[test]
fn smep_and_smap_keep_the_supervisor_out_of_user_pages() {
    let memory = four_levels(0x9000 | P | W | U);
    let context = PagingContext { cr4: Cr4::PAE | SMEP | SMAP, ..long_mode() };
    assert_eq!(translate(&memory, &context, VA, Access::FETCH), fault(pf::PRESENT | pf::FETCH));
    assert_eq!(translate(&memory, &context, VA, Access::READ), fault(pf::PRESENT));
    let ac = PagingContext { rflags_ac: true, ..context };
    assert_eq!(gpa(translate(&memory, &ac, VA, Access::READ)), 0x9abc);
    // AC excuses neither a fetch nor an implicit access.
    assert_eq!(translate(&memory, &ac, VA, Access::FETCH), fault(pf::PRESENT | pf::FETCH));
    let implicit = Access { implicit: true, ..Access::READ };
    assert_eq!(translate(&memory, &ac, VA, implicit), fault(pf::PRESENT));
}

#[test]
fn the_fetch_bit_is_told_only_where_something_forbids_fetching() {
    let memory = four_levels(0);
    assert_eq!(translate(&memory, &long_mode(), VA, Access::FETCH), fault(pf::FETCH));
    let plain = PagingContext { efer: Efer::LME | Efer::LMA, ..long_mode() };
    assert_eq!(translate(&memory, &plain, VA, Access::FETCH), fault(0));
    let smep = PagingContext { cr4: Cr4::PAE | SMEP, ..plain };
    assert_eq!(translate(&memory, &smep, VA, Access::FETCH), fault(pf::FETCH));
}

#[test]
fn nx_at_any_level_forbids_fetching_and_is_reserved_without_nxe() {
    let memory = four_levels(0x9000 | P | W | U);
    memory.set(0x2000 + 8 * 256, 0x3000 | P | W | U | NX);
    let context = long_mode();
    assert_eq!(translate(&memory, &context, VA, Access::FETCH), fault(pf::PRESENT | pf::FETCH));
    assert_eq!(gpa(translate(&memory, &context, VA, Access::READ)), 0x9abc);
    let plain = PagingContext { efer: Efer::LME | Efer::LMA, ..context };
    assert_eq!(translate(&memory, &plain, VA, Access::READ), fault(pf::PRESENT | pf::RSVD));
}

#[test]
fn protection_keys_bind_data_accesses_to_user_pages() {
    let memory = four_levels(0x9000 | P | W | U | 5 << 59);
    let keys = |pkru| PagingContext { cr4: Cr4::PAE | PKE, pkru, ..long_mode() };
    let denied = pf::PRESENT | pf::PK;
    assert_eq!(translate(&memory, &keys(1 << 10), VA, Access::READ), fault(denied));
    assert_eq!(translate(&memory, &keys(2 << 10), VA, Access::WRITE), fault(denied | pf::WRITE));
    assert_eq!(gpa(translate(&memory, &keys(2 << 10), VA, Access::READ)), 0x9abc);
    assert_eq!(gpa(translate(&memory, &keys(1 << 10), VA, Access::FETCH)), 0x9abc);
    assert_eq!(gpa(translate(&memory, &keys(!(3 << 10)), VA, Access::WRITE)), 0x9abc);
    // A write-disabled key does not bind the supervisor without CR0.WP.
    let no_wp = PagingContext { cr0: Cr0::PG | Cr0::PE, ..keys(2 << 10) };
    assert_eq!(gpa(translate(&memory, &no_wp, VA, Access::WRITE)), 0x9abc);
    let supervisor = four_levels(0x9000 | P | W | 5 << 59);
    assert_eq!(gpa(translate(&supervisor, &keys(3 << 10), VA, Access::WRITE)), 0x9abc);
}

#[test]
fn addresses_beyond_the_guests_width_are_reserved() {
    let memory = four_levels(1 << 40 | P | W | U);
    assert_eq!(translate(&memory, &long_mode(), VA, Access::READ), fault(pf::PRESENT | pf::RSVD));
    let wide = PagingContext { maxphyaddr: 41, ..long_mode() };
    assert_eq!(gpa(translate(&memory, &wide, VA, Access::READ)), 1 << 40 | 0xabc);
}

#[test]
fn large_pages_of_long_mode_have_their_size_and_reserved_bits() {
    let memory = four_levels(0);
    memory.set(0x3000, 0x0080_0000 | PS | P | W | U);
    let found = translate(&memory, &long_mode(), VA, Access::READ).unwrap();
    assert_eq!((found.gpa.0, found.page_shift), (0x0080_1abc, 21));
    memory.set(0x3000, 0x0080_2000 | PS | P | W | U);
    assert_eq!(translate(&memory, &long_mode(), VA, Access::READ), fault(pf::PRESENT | pf::RSVD));
    memory.set(0x2000 + 8 * 256, 0xc000_0000 | PS | P | W | U);
    let found = translate(&memory, &long_mode(), VA, Access::READ).unwrap();
    assert_eq!((found.gpa.0, found.page_shift), (0xc000_1abc, 30));
    let without = PagingContext { gbpages: false, ..long_mode() };
    assert_eq!(translate(&memory, &without, VA, Access::READ), fault(pf::PRESENT | pf::RSVD));
    memory.set(0x1000, 0x2000 | PS | P | W | U);
    assert_eq!(translate(&memory, &long_mode(), VA, Access::READ), fault(pf::PRESENT | pf::RSVD));
}

#[test]
fn canonical_depends_on_the_number_of_levels() {
    let memory = four_levels(0);
    let high = 1 << 47;
    let found = translate(&memory, &long_mode(), high, Access::READ);
    assert_eq!(found, Err(WalkError::NonCanonical));
    let five = PagingContext { cr4: Cr4::PAE | Cr4::LA57, cr3: 0x8000, ..long_mode() };
    memory.set(0x8000, 0x1000 | P | W | U);
    memory.set(0x1000 + 8 * 256, 0x2000 | P | W | U);
    memory.set(0x2000, 0x40000000 | PS | P | W | U);
    assert_eq!(gpa(translate(&memory, &five, high | 0x123, Access::READ)), 0x4000_0123);
    let found = translate(&memory, &five, 1 << 56, Access::READ);
    assert_eq!(found, Err(WalkError::NonCanonical));
}

#[test]
fn pae_walks_four_pdptes_that_grant_nothing_and_reserve_much() {
    let memory = Memory::default();
    let context = PagingContext { efer: Efer::NXE, cr3: 0x1020, ..long_mode() };
    memory.set(0x1020 + 8, 0x2000 | P);
    memory.set(0x2000, 0x3000 | P | W | U);
    memory.set(0x3000, 0x9000 | P | W | U);
    let user = PagingContext { cpl: 3, ..context };
    assert_eq!(gpa(translate(&memory, &user, 0x4000_0123, Access::WRITE)), 0x9123);
    assert_eq!(memory.get(0x1028), 0x2000 | P);
    // Bits above 31 of the address do not take part.
    assert_eq!(gpa(translate(&memory, &user, 0xf_4000_0123, Access::WRITE)), 0x9123);
    memory.set(0x1028, 0x2000 | P | W);
    let found = translate(&memory, &context, 0x4000_0000, Access::READ);
    let code = pf::PRESENT | pf::RSVD;
    assert_eq!(found, Err(WalkError::Fault(Exception::pf(0x4000_0000, code))));
}

#[test]
fn two_levels_of_32_bit_paging_and_pse36() {
    let memory = Memory::default();
    let context = PagingContext {
        efer: Efer::empty(),
        cr4: Cr4::PSE,
        cr3: 0x1000,
        maxphyaddr: 38,
        ..long_mode()
    };
    memory.set32(0x1004, 0x2000 | 7);
    memory.set32(0x2004, 0x9000 | 7);
    assert_eq!(gpa(translate(&memory, &context, 0x40_1abc, Access::WRITE)), 0x9abc);
    assert_eq!((memory.cell(0x1004), memory.cell(0x2004)), (0x2027, 0x9067));
    // 4 MiB page with address bits 37:32 in bits 18:13.
    memory.set32(0x1004, 0x0040_0000 | 0x3f << 13 | 0x80 | 7);
    let found = translate(&memory, &context, 0x7f_fabc, Access::WRITE).unwrap();
    assert_eq!((found.gpa.0, found.page_shift), (0x3f << 32 | 0x7f_fabc, 22));
    for reserved in [19, 20, 21] {
        memory.set32(0x1004, 0x0040_0000 | 1 << reserved | 0x80 | 7);
        let found = translate(&memory, &context, 0x40_0000, Access::READ);
        let code = pf::PRESENT | pf::RSVD;
        assert_eq!(found, Err(WalkError::Fault(Exception::pf(0x40_0000, code))));
    }
    // Without CR4.PSE bit 7 means nothing.
    memory.set32(0x1004, 0x2000 | 0x80 | 7);
    let without = PagingContext { cr4: Cr4::empty(), ..context };
    assert_eq!(gpa(translate(&memory, &without, 0x40_1abc, Access::WRITE)), 0x9abc);
}

#[test]
fn without_paging_an_address_is_physical() {
    let off = PagingContext::default();
    assert_eq!(gpa(translate(&Memory::default(), &off, 0x1_0000_1234, Access::WRITE)), 0x1234);
}

/// Entries that lead somewhere more often than not, with a bit flipped now and then.
fn entry() -> impl Strategy<Value = u64> {
    let flags = prop_oneof![
        4 => Just(P | W | U),
        1 => Just(P | W),
        1 => Just(P | U),
        1 => Just(P | W | U | PS),
        1 => Just(P | W | U | NX),
        1 => Just(P),
        1 => Just(0),
    ];
    let flip = prop_oneof![3 => Just(0u64), 1 => (0u32..64).prop_map(|b| 1 << b)];
    (0u64..8, flags, flip, 0u64..16).prop_map(|(page, flags, flip, key)| {
        // With PS the low address bits would be reserved: use a large base then.
        let base = if flags & PS != 0 { page << 30 } else { page << 12 };
        (base | flags | if page & 1 == 1 { key << 59 } else { 0 }) ^ flip
    })
}

fn context() -> impl Strategy<Value = PagingContext> {
    let mode = prop_oneof![Just(0u8), Just(1), Just(2), Just(3)];
    let bits = any::<u16>();
    (mode, bits, any::<u32>(), prop_oneof![Just(36u8), Just(40), Just(48), Just(52)], 0u64..8)
        .prop_map(|(mode, bits, pkru, maxphyaddr, root)| {
            let on = |n: u32, value: u64| if bits >> n & 1 == 1 { value } else { 0 };
            let cr4 = on(0, SMEP.bits()) | on(1, SMAP.bits()) | on(2, PKE.bits()) | on(3, 1 << 4);
            let wide = [Cr4::empty(), Cr4::PAE, Cr4::PAE, Cr4::PAE | Cr4::LA57][usize::from(mode)];
            let long = if mode > 1 { Efer::LMA | Efer::LME } else { Efer::empty() };
            PagingContext {
                cr0: Cr0::PG | Cr0::PE | Cr0::from_bits_retain(on(4, 1 << 16)),
                cr3: root << 12,
                cr4: Cr4::from_bits_retain(cr4) | wide,
                efer: Efer::from_bits_retain(on(5, 1 << 11)) | long,
                rflags_ac: on(6, 1) == 1,
                cpl: on(7, 3) as u8,
                pkru: if on(8, 1) == 1 { pkru } else { 0 },
                maxphyaddr,
                gbpages: on(9, 1) == 1,
                amd: on(10, 1) == 1,
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6_000))]
    #[test]
    fn random_tables_agree_with_the_reference(
        entries in prop::collection::vec(entry(), 8 * 4),
        context in context(),
        // Two choices for each level's index: pages are filled at indexes 0 and 1 and at the ends.
        index in prop::array::uniform5(0u64..4),
        offset in 0u64..4096,
        kind in prop_oneof![
            Just(AccessKind::Read), Just(AccessKind::Write), Just(AccessKind::Fetch)
        ],
        implicit in prop::bool::weighted(0.2),
    ) {
        agree(&Case { entries, context, index, offset, kind, implicit });
    }
}
