//! One access through tables with a few bits changed at random: the shadow pages, the walk in software and the
//! reference say the same of it, and leave the same accessed and dirty bits.

use gannet_mmu::nested::walk::{StageError, translate};
use proptest::prelude::*;

use super::entries::{full, levels, page, told};
use super::machine::{LARGE, Machine, Refused};
use super::reference::{Access, Apic, Kind, No};

pub fn kind() -> impl Strategy<Value = Kind> {
    let bits = prop::array::uniform5(any::<bool>());
    let width = prop::sample::select(vec![36u8, 40, 48, 52]);
    // What is mapped most, in small pages and in large ones; what nothing maps; and what has no place.
    let frames = vec![16, 30, 31, LARGE, LARGE + 7, LARGE + 16, LARGE + 513, 100, 0xffff_fffe];
    let frame = prop::option::of(prop::sample::select(frames));
    let apic = (frame, 0u8..4).prop_map(|(frame, n)| Apic { frame, flat: n == 0 });
    (bits, width, apic).prop_map(|([ept, a, b, c, five], width, apic)| {
        if ept {
            let flat = apic.flat && apic.frame.is_some();
            let apic = Apic { flat, ..apic };
            // Accessed and dirty flags by the bit that NPT takes for five levels.
            let flags = five && !flat;
            Kind::Ept { flags, execute_only: a, pages_2m: b, pages_1g: c, width, apic }
        } else {
            Kind::Npt { five, nx: a, gbpages: b, amd: c, width, pae: None }
        }
    })
}

/// As [`kind`], or tables of an L1 in PAE paging.
fn kind_or_pae() -> impl Strategy<Value = Kind> {
    (kind(), 0u64..128, 0..3).prop_map(|(kind, n, pae)| match kind {
        Kind::Npt { nx, gbpages, amd, width, .. } if pae == 0 => {
            Kind::Npt { five: false, nx, gbpages, amd, width, pae: Some(n << 5) }
        }
        kind => kind,
    })
}

/// What an entry of a level has that leads to a table.
fn link(kind: &Kind, level: u64) -> u64 {
    if level == 3 && kind.levels() == 3 { 1 } else { full(kind) }
}

pub fn access(n: usize) -> Access {
    Access::ALL[n % 4]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]
    #[test]
    fn an_entry_means_the_same_to_all_three(
        kind in kind_or_pae(),
        more in any::<bool>(),
        logs in any::<bool>(),
        large in any::<bool>(),
        depth in 0u64..5,
        bits in prop::collection::vec(0u32..64, 0..4),
        kind_of_access in 0usize..4,
        again in 0usize..4,
    ) {
        let machine = Machine::new(1, kind, levels(&kind, more), logs);
        let top = u64::from(kind.levels());
        let first = |gfn| if gfn == 1 { kind.offset() >> 3 } else { 0 };
        // Frames 1 to `top` hold a table each; the last one maps frame 16 at 16, or its parent a large page.
        let last = if large { top - 1 } else { top };
        for gfn in 1..last {
            machine.poke(gfn, first(gfn), (gfn + 1) << 12 | link(&kind, top + 1 - gfn));
        }
        let gpa = 16 << 12 | 0x123;
        let (index, leaf) = if large {
            (0, LARGE << 12 | 1 << 7 | page(&kind))
        } else {
            (16, 16 << 12 | page(&kind))
        };
        machine.poke(last, index, leaf);
        let gfn = 1 + depth % last;
        let index_in = |gfn| if gfn == last { index } else { first(gfn) };
        let index = index_in(gfn);
        let flips = bits.iter().fold(0, |all, bit| all ^ 1u64 << bit);
        machine.poke(gfn, index, machine.peek(gfn, index) ^ flips);
        machine.enter(0);
        for n in [kind_of_access, again] {
            let access = access(n);
            let expected = machine.reference(0, gpa, &access);
            let entries = || (1..=top).map(|gfn| machine.peek(gfn, index_in(gfn)))
                .chain([machine.peek(last, 16)]).collect::<Vec<_>>();
            let before = entries();
            let tables = kind.tables(1);
            let soft = translate(&machine, &tables, &told(&kind, gpa, &access));
            let after_soft = entries();
            // Once more from the beginning, by the shadow pages.
            for (gfn, was) in (1..=top).zip(&before) {
                machine.poke(gfn, index_in(gfn), *was);
            }
            machine.flush(0);
            let shadow = machine.access(0, gpa, &access);
            match expected {
                Ok(found) => {
                    prop_assert_eq!(soft.map(|stage| stage.gpa.0), Ok(found.gpa));
                    match shadow {
                        Ok(_) => prop_assert!(machine.may_reach(0, gpa, &access, shadow.unwrap().pfn)),
                        Err(Refused::Mmio(at)) => prop_assert_eq!(at.0, found.gpa),
                        other => prop_assert!(false, "{:?}", other),
                    }
                    let settled = machine.reference(0, gpa, &access).unwrap();
                    if shadow.is_ok() {
                        prop_assert!(settled.accessed && (!access.write || settled.dirty));
                        prop_assert_eq!(entries(), after_soft);
                    }
                    machine.check(0, gpa);
                }
                Err(No::L1(fault)) => {
                    let at = x86::Gpa(gpa);
                    prop_assert_eq!(soft, Err(StageError::L1 { gpa: at, fault }));
                    prop_assert_eq!(shadow, Err(Refused::L1(fault)));
                    prop_assert_eq!(entries(), before);
                }
                Err(No::Unreadable(at)) => {
                    let memory = StageError::Memory { gpa: x86::Gpa(at), error: () };
                    prop_assert_eq!(soft, Err(memory));
                    let refused = matches!(shadow, Err(Refused::NoTable(_)));
                    prop_assert!(refused, "{:?}", shadow);
                }
            }
        }
        machine.audit();
    }
}
