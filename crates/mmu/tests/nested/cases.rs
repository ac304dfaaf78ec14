//! Cases by hand.

use gannet_mmu::nested::Part;
use gannet_mmu::nested::walk::{LinearError, SecondStage, StageError, translate, translate_linear};
use gannet_mmu::walk::{Access as Linear, AccessKind, GuestMemory};
use gannet_mmu::{
    L1Fault, NestedAccess, NestedFault, NestedRoots, NestedSwitch, PagingContext, Tables,
};
use x86::{Cr0, Cr4, Efer, Gfn, Gpa};

use super::entries::{full, page};
use super::machine::{LARGE, Machine, Refused, SMALL, ept, npt};
use super::reference::{Access, Apic, Kind};

/// Tables in frames 1 to 4, in which the address 0x1000 × n leads to frame n, for n from 8 to 63.
fn plain(kind: Kind, logs: bool) -> Machine {
    let machine = Machine::new(2, kind, 4, logs);
    for gfn in 1..4 {
        machine.poke(gfn, 0, (gfn + 1) << 12 | full(&kind));
    }
    for gfn in 8..SMALL {
        machine.poke(4, gfn, gfn << 12 | page(&kind));
    }
    machine.enter(0);
    machine.enter(1);
    machine
}

fn both() -> [Kind; 2] {
    [npt(), ept()]
}

#[test]
fn a_frame_met_as_table_and_as_page_of_a_large_page_goes_with_its_slot() {
    // CVE-2026-53359: one frame is shadowed directly, as the first of a large page's small parts, and
    // indirectly, as a table; then its slot goes.
    for kind in both() {
        let machine = plain(kind, false);
        let large = 1 << 7;
        // Frame 0 and what follows, as a large page over small frames: shadowed directly, from frame 0 on.
        machine.poke(3, 1, large | page(&kind));
        // Frame 0 is a table, too, of the same level; it maps frame 40.
        machine.poke(3, 2, full(&kind));
        machine.poke(0, 40, 40 << 12 | page(&kind));
        // And frame 33 is a table in the slot that goes, and a page in the large one.
        machine.poke(3, 3, 33 << 12 | full(&kind));
        machine.poke(33, 5, 45 << 12 | page(&kind));
        let at = |pde: u64, pte: u64| pde << 21 | pte << 12;
        let gpas = [at(1, 33), at(1, 40), at(1, 9), at(2, 40), at(3, 5)];
        let leads = [33, 40, 9, 40, 45];
        for n in 0..2 {
            machine.flush(n);
            for (gpa, gfn) in gpas.into_iter().zip(leads) {
                let page = machine.access(n, gpa, &Access::WRITE).unwrap();
                assert_eq!(page.pfn, machine.pages[gfn].hpa().0 >> 12, "{gpa:#x}");
            }
        }
        machine.audit();
        machine.toggle_slot(false);
        machine.check_host(&gpas);
        machine.audit();
        let gone = machine.access(0, gpas[1], &Access::READ);
        assert_eq!(gone, Err(Refused::Mmio(Gpa(40 << 12))));
        assert!(matches!(machine.access(0, gpas[4], &Access::READ), Err(Refused::NoTable(_))));
        assert!(machine.access(1, gpas[2], &Access::READ).is_ok());
        machine.check_host(&gpas);
        // It comes back, with other content: nothing of what was there is met again.
        machine.toggle_slot(false);
        machine.poke(33, 5, 46 << 12 | page(&kind));
        machine.flush(0);
        let page = machine.access(0, gpas[4], &Access::READ).unwrap();
        assert_eq!(page.pfn, machine.pages[46].hpa().0 >> 12);
        machine.check_host(&gpas);
    }
}

#[test]
fn what_l1_takes_away_stays_until_its_flush_and_no_longer() {
    for kind in both() {
        let machine = plain(kind, false);
        let gpa = 20 << 12;
        let reach = |n| {
            // Not what the CPU keeps: the shadow pages are asked.
            machine.forget(n);
            machine.access(n, gpa, &Access::WRITE).map(|page| page.pfn)
        };
        let pfn = |gfn: usize| machine.pages[gfn].hpa().0 >> 12;
        assert_eq!((reach(0), reach(1)), (Ok(pfn(20)), Ok(pfn(20))));
        machine.poke(4, 20, 21 << 12 | page(&kind));
        assert_eq!(reach(0), Ok(pfn(20)), "stale, as a TLB may be");
        machine.flush(0);
        assert_eq!(reach(0), Ok(pfn(21)));
        // The other's flush of another root does not count; of this root it does.
        machine.poke(4, 20, 22 << 12 | page(&kind));
        machine.vcpus[1].borrow_mut().roots.flush_of(9 << 12);
        machine.enter(1);
        assert_eq!(reach(1), Ok(pfn(21)));
        machine.vcpus[1].borrow_mut().roots.flush_of(1 << 12 | 0x5e);
        machine.enter(1);
        assert_eq!(reach(1), Ok(pfn(22)));
    }
}

#[test]
fn a_fault_goes_by_l1s_tables_of_now_on_a_way_that_is_there_already() {
    for kind in both() {
        let machine = plain(kind, false);
        let reach = |gpa| machine.access(0, gpa, &Access::WRITE).map(|page| page.pfn);
        let pfn = |gfn: usize| machine.pages[gfn].hpa().0 >> 12;
        assert_eq!(reach(20 << 12), Ok(pfn(20)));
        // Nothing is mapped at 70. Another table takes the place of the last one, then of the one above, without a flush.
        assert!(matches!(reach(70 << 12), Err(Refused::L1(_))));
        machine.poke(40, 70, 33 << 12 | page(&kind));
        machine.poke(3, 0, 40 << 12 | full(&kind));
        assert_eq!(reach(70 << 12), Ok(pfn(33)));
        assert!(matches!(reach(71 << 12), Err(Refused::L1(_))));
        machine.poke(41, 0, 42 << 12 | full(&kind));
        machine.poke(42, 71, 34 << 12 | page(&kind));
        machine.poke(2, 0, 41 << 12 | full(&kind));
        assert_eq!(reach(71 << 12), Ok(pfn(34)));
        // An entry on the way forbids what it allowed.
        machine.poke(2, 0, 41 << 12 | full(&kind) & !2);
        assert!(matches!(reach(72 << 12), Err(Refused::L1(_))));
        machine.poke(42, 72, 35 << 12 | page(&kind));
        assert!(matches!(reach(72 << 12), Err(Refused::L1(_))));
        machine.audit();
    }
}

#[test]
fn what_l1_marks_clean_or_unused_is_marked_again_when_it_is_used() {
    for kind in both() {
        let machine = plain(kind, false);
        let (accessed, dirty) = match kind {
            Kind::Npt { .. } => (1 << 5, 1 << 6),
            Kind::Ept { .. } => (1 << 8, 1 << 9),
        };
        // A small page; a large one over small frames, for which a page of small leaves stands; a large one.
        let large = 1 << 7 | page(&kind);
        machine.poke(3, 1, large);
        machine.poke(3, 2, LARGE << 12 | large);
        for (gpa, table, index) in
            [(20 << 12, 4, 20), (1 << 21 | 9 << 12, 3, 1), (2 << 21 | 7 << 12, 3, 2)]
        {
            let look = || {
                let root = machine.vcpus[0].borrow().roots.current().unwrap();
                machine.hardware.look(&root, gpa, None)
            };
            let entry = machine.peek(table, index);
            assert!(machine.access(0, gpa, &Access::WRITE).unwrap().write);
            machine.poke(table, index, entry & !dirty);
            machine.flush(0);
            assert!(!look().is_some_and(|page| page.write), "{gpa:#x} is written unseen");
            machine.access(0, gpa, &Access::READ).unwrap();
            assert_eq!(machine.peek(table, index), entry & !dirty);
            machine.access(0, gpa, &Access::WRITE).unwrap();
            assert_eq!(machine.peek(table, index), entry);
            machine.poke(table, index, entry & !accessed);
            machine.flush(0);
            assert_eq!(look(), None, "{gpa:#x} is used unseen");
            machine.access(0, gpa, &Access::READ).unwrap();
            assert_eq!(machine.peek(table, index), entry);
        }
    }
}

#[test]
fn a_root_that_was_away_during_a_flush_is_looked_at_before_its_use() {
    for kind in both() {
        let machine = plain(kind, false);
        let gpa = 20 << 12;
        machine.access(0, gpa, &Access::READ).unwrap();
        machine.poke(5, 0, 2 << 12 | full(&kind));
        machine.vcpus[0].borrow_mut().root = 5;
        machine.enter(0);
        machine.poke(4, 20, 0);
        machine.flush(0);
        machine.vcpus[0].borrow_mut().root = 1;
        machine.enter(0);
        machine.check(0, gpa);
        assert!(matches!(machine.access(0, gpa, &Access::READ), Err(Refused::L1(_))));
    }
}

#[test]
fn without_flags_ept_writes_need_no_bits_and_walks_are_reads() {
    let Kind::Ept { execute_only, pages_2m, pages_1g, width, apic, .. } = ept() else {
        unreachable!()
    };
    let kind = Kind::Ept { flags: false, execute_only, pages_2m, pages_1g, width, apic };
    let machine = plain(kind, false);
    machine.poke(4, 20, 20 << 12 | 6 << 3 | 3);
    machine.poke(4, 21, 21 << 12 | 6 << 3 | 1);
    assert!(machine.access(0, 20 << 12, &Access::WRITE).unwrap().write);
    assert!(machine.access(0, 21 << 12, &Access::TABLE).is_ok());
    assert_eq!(machine.peek(4, 20), 20 << 12 | 6 << 3 | 3, "no bit is set");
    assert!(!kind.tables(1).tracks_ept() && ept().tables(1).tracks_ept());
    // With flags the walk is a write, and the entry does not allow it.
    let machine = plain(ept(), false);
    machine.poke(4, 21, 21 << 12 | 6 << 3 | 1);
    let refused = machine.access(0, 21 << 12, &Access::TABLE);
    let qualification = 1 << 7 | 1 << 3 | 3;
    assert_eq!(refused, Err(Refused::L1(L1Fault::Violation { qualification })));
}

#[test]
fn what_can_only_be_fetched_is_not_read() {
    let machine = plain(ept(), false);
    machine.poke(4, 20, 20 << 12 | 3 << 8 | 6 << 3 | 4);
    let page = machine.access(0, 20 << 12, &Access::FETCH).unwrap();
    assert!(page.fetch && !page.read && !page.write);
    let refused = machine.access(0, 20 << 12, &Access::READ);
    let qualification = 3 << 7 | 4 << 3 | 1;
    assert_eq!(refused, Err(Refused::L1(L1Fault::Violation { qualification })));
}

#[test]
fn a_large_page_of_both_is_one_entry_and_goes_whole() {
    for kind in both() {
        let machine = plain(kind, false);
        machine.poke(3, 1, LARGE << 12 | 1 << 7 | page(&kind));
        let gpa = 1 << 21 | 7 << 12;
        assert_eq!(machine.access(0, gpa, &Access::WRITE).unwrap().level, 2);
        machine.withdraw(LARGE + 99, LARGE + 100);
        machine.check_host(&[gpa, 1 << 21, 1 << 21 | 99 << 12]);
        machine.audit();
    }
}

#[test]
fn a_log_by_dirty_bits_hears_of_each_write() {
    let machine = plain(ept(), true);
    let gpa = 20 << 12;
    assert!(!machine.access(0, gpa, &Access::READ).unwrap().write, "not before it is dirty");
    assert!(machine.access(0, gpa, &Access::WRITE).unwrap().write);
    assert!(machine.tdp.mapper().lookup(Gfn(20)).unwrap().dirty);
    machine.write_protect(20);
    machine.check_host(&[gpa]);
    let leaf = machine.tdp.mapper().lookup(Gfn(20)).unwrap();
    assert!(leaf.writable && !leaf.dirty);
    machine.access(0, gpa, &Access::WRITE).unwrap();
    assert!(machine.tdp.mapper().lookup(Gfn(20)).unwrap().dirty);
    // L1's own tables are written, too, when bits are set in them.
    machine.write_protect(4);
    machine.poke(4, 21, 21 << 12 | 6 << 3 | 7);
    machine.access(0, 21 << 12, &Access::READ).unwrap();
    assert!(machine.tdp.mapper().lookup(Gfn(4)).unwrap().dirty);
}

#[test]
fn a_hardware_level_more_is_bridged_and_one_less_refused() {
    let machine = Machine::new(1, npt(), 5, false);
    for gfn in 1..4 {
        machine.poke(gfn, 0, (gfn + 1) << 12 | full(&npt()));
    }
    machine.poke(4, 20, 20 << 12 | page(&npt()));
    let root = machine.enter(0);
    assert!(machine.access(0, 20 << 12, &Access::READ).is_ok());
    assert!(matches!(machine.access(0, 1 << 48, &Access::READ), Err(Refused::L1(_))));
    // The slots go, and with them the page of the root: the bridge stays.
    machine.withdraw(0, 32);
    machine.shadow.forget_slot(Gfn(0), Gfn(32));
    assert_eq!(machine.enter(0), root);
    assert!(machine.access(0, 20 << 12, &Access::READ).is_ok());
    let five = Kind::Npt { five: true, nx: true, gbpages: true, amd: true, width: 40, pae: None };
    let machine = plain(npt(), false);
    let refused = machine.with_view(|view| {
        machine.shadow.lock().nested_switch(view, &mut NestedRoots::new(), &five.tables(1))
    });
    assert_eq!(refused, NestedSwitch::Refused);
}

#[test]
fn an_l1_without_entries_of_8_bytes_is_not_served() {
    let l1 = PagingContext { cr0: Cr0::PG | Cr0::PE, ..PagingContext::default() };
    assert_eq!(Tables::npt(0x1000, &l1), None);
    let unpaged = PagingContext { cr0: Cr0::PE, cr4: Cr4::PAE, ..l1 };
    assert_eq!(Tables::npt(0x1000, &unpaged), None);
    assert!(Tables::npt(0x1000, &PagingContext { cr4: Cr4::PAE, ..l1 }).is_some());
}

/// L1 is in PAE paging: its CR3 ends at 4 GiB, its guests' tables don't.
#[test]
fn pdptes_may_lie_beyond_4_gib() {
    let pae = PagingContext {
        cr0: Cr0::PG | Cr0::PE,
        cr4: Cr4::PAE,
        maxphyaddr: 40,
        ..PagingContext::default()
    };
    let at = |ncr3| Tables::npt(ncr3, &pae).unwrap();
    let far = at(3 << 32 | 0x1fe0);
    assert!(far.has_root(3 << 32 | 0x1fe0) && !far.has_root(0x1fe0));
    assert_ne!(far, at(0x1fe0));
    // Neither what is no part of the address, nor what is above the CPU's, changes anything.
    assert_eq!(far, at(1 << 63 | 1 << 41 | 3 << 32 | 0x1fff));
}

/// L1 is in PAE paging: 128 places for PDPTEs in a frame are as many roots, which share what is below them.
#[test]
fn pdptes_of_one_frame_are_told_apart() {
    let at = |pae| Kind::Npt {
        five: false,
        nx: true,
        gbpages: true,
        amd: true,
        width: 40,
        pae: Some(pae),
    };
    for levels in [4, 5] {
        let machine = Machine::new(2, at(0), levels, false);
        machine.vcpus[1].borrow_mut().kind = at(0xfe0);
        // Frame 2 is a table of the second level; the third gigabyte is mapped by either, at another frame.
        machine.poke(1, 2, 2 << 12 | 1);
        machine.poke(1, 0xfe0 / 8 + 2, 3 << 12 | 1);
        for (table, last, frame) in [(2, 4, 30), (3, 5, 31)] {
            machine.poke(table, 0, last << 12 | 0x67);
            machine.poke(last, 7, frame << 12 | 0x67);
        }
        let gpa = 2 << 30 | 7 << 12;
        for (n, frame) in [(0, 30), (1, 31)] {
            machine.enter(n);
            assert_eq!(machine.reference(n, gpa, &Access::WRITE).unwrap().gpa >> 12, frame);
            assert!(machine.access(n, gpa, &Access::WRITE).is_ok());
            machine.check(n, gpa);
            // The fifth gigabyte is not the first.
            let beyond = machine.access(n, gpa | 1 << 32, &Access::READ);
            assert!(matches!(beyond, Err(Refused::L1(_))), "{beyond:?}");
        }
        // A PDPTE goes: it is found by the next flush.
        machine.poke(1, 2, 0);
        machine.flush(0);
        assert!(machine.access(0, gpa, &Access::READ).is_err());
        machine.flush(1);
        assert!(machine.access(1, gpa, &Access::READ).is_ok());
        machine.audit();
    }
}

#[test]
fn roots_of_another_memory_are_neither_used_nor_let_go() {
    let (one, other) = (plain(npt(), false), plain(npt(), false));
    let roots = &mut one.vcpus[0].borrow_mut().roots;
    let held = one.audit();
    let tables = npt().tables(1);
    let refused = other.with_view(|view| other.shadow.lock().nested_switch(view, roots, &tables));
    assert_eq!(refused, NestedSwitch::Refused);
    assert!(!other.shadow.lock().nested_release(roots));
    assert_eq!((one.audit(), other.audit()), (held, held));
    assert!(roots.current().is_some() && !roots.is_empty());
    assert!(one.shadow.lock().nested_release(roots) && roots.is_empty());
}

/// L2's own tables: in L2's frames 8 to 11, which are L1's frames 8 to 11; its page 0x5000 is frame 30.
fn with_l2(kind: Kind) -> (Machine, PagingContext) {
    let machine = plain(kind, false);
    for gfn in 8..11 {
        machine.poke(gfn, 0, (gfn + 1) << 12 | 0x67);
    }
    machine.poke(11, 5, 30 << 12 | 0x67);
    let context = PagingContext {
        cr0: Cr0::PG | Cr0::WP | Cr0::PE,
        cr3: 8 << 12,
        cr4: Cr4::PAE,
        efer: Efer::LMA | Efer::LME,
        maxphyaddr: 40,
        ..PagingContext::default()
    };
    (machine, context)
}

#[test]
fn a_linear_address_goes_through_both() {
    for kind in both() {
        let (machine, l2) = with_l2(kind);
        let tables = kind.tables(1);
        let go = |access| translate_linear(&machine, &tables, &l2, 0x5123, access);
        machine.poke(4, 30, 31 << 12 | page(&kind));
        assert_eq!(go(Linear::WRITE).unwrap().gpa, Gpa(31 << 12 | 0x123));
        // L2's own refusal.
        let refused = translate_linear(&machine, &tables, &l2, 0x6000, Linear::READ);
        assert!(matches!(refused, Err(LinearError::L2(_))), "{refused:?}");
        // L1's, of the page and of a table.
        machine.poke(4, 30, 0);
        let (told_page, told_table) = match kind {
            Kind::Npt { .. } => (1 << 32 | 4, 1 << 33 | 6),
            Kind::Ept { .. } => (3 << 7 | 1, 1 << 7 | 3),
        };
        let fault = |told| match kind {
            Kind::Npt { .. } => L1Fault::Npf { info: told },
            Kind::Ept { .. } => L1Fault::Violation { qualification: told },
        };
        let wanted =
            |gpa, told| LinearError::Stage(StageError::L1 { gpa: Gpa(gpa), fault: fault(told) });
        assert_eq!(go(Linear::READ), Err(wanted(30 << 12 | 0x123, told_page)));
        machine.poke(4, 10, 0);
        assert_eq!(go(Linear::READ), Err(wanted(10 << 12, told_table)));
        assert_eq!(
            SecondStage::physical(&machine, tables).read_u64(Gpa(11 << 12 | 5 << 3)),
            Ok(30 << 12 | 0x67)
        );
    }
}

#[test]
fn a_paging_entry_of_l2s_is_not_fetched() {
    // Whatever the walk is for, and whether L1's entry for it may be fetched or not.
    let machine = plain(npt(), false);
    machine.poke(4, 20, 1 << 63 | 20 << 12 | 0x67);
    let told = NestedAccess::npf(1 << 33 | 1 << 4 | 6, 20 << 12);
    let vcpu = machine.vcpus[0].borrow();
    (1..5).chain([20]).for_each(|gfn| assert!(machine.find_frame(gfn, true)));
    machine.shadow.reserve(8, &machine).unwrap();
    let fault =
        machine.with_view(|view| machine.shadow.lock().nested_fault(view, &vcpu.roots, &told));
    assert_eq!(fault, NestedFault::Fixed { replaced: false });
}

#[test]
fn what_the_hardware_told_goes_on_to_l1() {
    let machine = plain(ept(), false);
    machine.poke(4, 20, 0);
    // Both read and write, NMIs unblocked by IRET; the rights are those of L1's entries.
    let access = NestedAccess::violation(0x1000 | 1 << 7 | 7 << 3 | 3, 20 << 12);
    let vcpu = machine.vcpus[0].borrow();
    let fault = |access: &NestedAccess| {
        machine.with_view(|view| machine.shadow.lock().nested_fault(view, &vcpu.roots, access))
    };
    // The tables are not in the VM's tree yet.
    let NestedFault::NeedFrame(wanted) = fault(&access) else { panic!() };
    assert!(wanted.table.is_some());
    (1..5).for_each(|gfn| assert!(machine.find_frame(gfn, true)));
    let qualification = 0x1000 | 1 << 7 | 3;
    assert_eq!(fault(&access), NestedFault::L1(L1Fault::Violation { qualification }));
    assert_eq!(access, NestedAccess::violation(qualification, 20 << 12));
}

#[test]
fn a_frame_that_is_left_out_is_no_memory_of_l2s_and_stays_that_of_others() {
    let with = without_frame;
    // A small frame, and one in the midst of a large page of the host's.
    for (frame, neighbours) in [(9, [8, 10]), (LARGE + 9, [LARGE + 8, LARGE + 511])] {
        for flat in [false, true] {
            let machine = plain(with(frame, flat), false);
            machine.poke(3, 1, (LARGE << 12) | 1 << 7 | page(&ept()));
            let gpa = |gfn: u64| match gfn {
                LARGE.. if !flat => 1 << 21 | (gfn - LARGE) << 12,
                _ => gfn << 12,
            };
            for gfn in neighbours {
                machine.access(0, gpa(gfn), &Access::WRITE).unwrap();
            }
            for access in [Access::READ, Access::WRITE, Access::FETCH] {
                let refused = machine.access(0, gpa(frame) | 0x80, &access);
                let Err(Refused::L1(L1Fault::ApicAccess(told))) = refused else {
                    panic!("{refused:?}")
                };
                assert_eq!((told.offset, told.linear), (0x80, true));
                assert_eq!((told.write, told.fetch), (access.write, access.fetch));
            }
            machine.audit();
            // Another vCPU, with the same tables and another frame.
            machine.vcpus[1].borrow_mut().kind = with(neighbours[0], flat);
            machine.enter(1);
            machine.access(1, gpa(frame), &Access::WRITE).unwrap();
            assert!(machine.access(1, gpa(neighbours[0]), &Access::READ).is_err());
            assert!(machine.access(0, gpa(frame), &Access::READ).is_err());
            machine.access(0, gpa(neighbours[0]), &Access::READ).unwrap();
            machine.audit();
        }
    }
}

/// L1 logs what L2 makes dirty: an access that is to set the flag is told before, by the pages and by the walk, and no flag
/// is set; once it is, nothing is told.
#[test]
fn a_flag_that_is_to_be_logged_is_not_set_before() {
    const DIRTY: u64 = 1 << 9;
    let (small, large) = ((4, 9, 9 << 12), (3, 1, 1 << 21 | 9 << 12));
    for (table, index, gpa) in [small, large] {
        let machine = plain(ept(), false);
        machine.poke(3, 1, (LARGE << 12) | 1 << 7 | page(&ept()));
        machine.poke(table, index, machine.peek(table, index) & !DIRTY);
        let tables = ept().tables(1).logging(true);
        let fault = |qualification| {
            let told = tables.fault(NestedAccess::violation(qualification, gpa));
            machine.with_view(|view| {
                let roots = &machine.vcpus[0].borrow().roots;
                machine.shadow.lock().nested_fault(view, roots, &told)
            })
        };
        let is_dirty = || machine.peek(table, index) & DIRTY != 0;
        machine.access(0, gpa, &Access::READ).unwrap();
        let frame = if table == 4 { 9 } else { LARGE + 9 };
        assert!(machine.find_frame(frame, true));
        for _ in 0..2 {
            assert_eq!(fault(3 << 7 | 2), NestedFault::L1(L1Fault::Unlogged));
            assert!(!is_dirty());
        }
        let walk = |logs| {
            let tables = tables.logging(logs);
            let access = tables.access(Gpa(gpa), AccessKind::Write, Part::Page);
            translate(&machine, &tables, &access).map(|stage| stage.gpa)
        };
        let unlogged = StageError::L1 { gpa: Gpa(gpa), fault: L1Fault::Unlogged };
        assert_eq!(walk(true), Err(unlogged));
        assert!(!is_dirty());
        assert!(walk(false).is_ok() && is_dirty());
        assert!(walk(true).is_ok());
        assert!(matches!(fault(3 << 7 | 2), NestedFault::Fixed { .. }));
        machine.access(0, gpa, &Access::WRITE).unwrap();
        machine.audit();
    }
}

/// L1 logs, and its table of leaves is ROM: the flag cannot be set, nothing is logged, and the write is done.
#[test]
fn a_flag_in_rom_is_not_to_be_logged() {
    let machine = plain(ept(), false);
    let gpa = 9 << 12;
    machine.poke(4, 9, machine.peek(4, 9) & !(1 << 9));
    machine.access(0, gpa, &Access::READ).unwrap();
    assert!(machine.find_frame(9, true));
    machine.withdraw(4, 5);
    machine.rom.set(1 << 4);
    let tables = ept().tables(1).logging(true);
    let told = tables.fault(NestedAccess::violation(3 << 7 | 2, gpa));
    let fault = || {
        machine.with_view(|view| {
            let roots = &machine.vcpus[0].borrow().roots;
            machine.shadow.lock().nested_fault(view, roots, &told)
        })
    };
    machine.find_frame(4, false);
    let NestedFault::NeedFrame(frame) = fault() else { panic!("{:?}", fault()) };
    assert!(frame.write && frame.gpa.gfn().0 == 4);
    machine.vcpus[0].borrow_mut().roots.note_rom(frame.gpa.gfn(), machine.tdp.generation());
    assert!(machine.find_frame(9, true));
    assert!(matches!(fault(), NestedFault::Fixed { .. }), "{:?}", fault());
}

/// A kind of EPT tables without flags that leaves one frame out.
fn without_frame(frame: u64, flat: bool) -> Kind {
    let Kind::Ept { execute_only, pages_2m, pages_1g, width, .. } = ept() else { unreachable!() };
    let apic = Apic { frame: Some(frame), flat };
    Kind::Ept { flags: false, execute_only, pages_2m, pages_1g, width, apic }
}

/// L1's upper entry leads to other tables, one of which is shadowed in many roles already: however often the fault is
/// taken again, the vCPU hears that another entry stood there.
#[test]
fn what_is_replaced_is_told_where_a_table_has_many_pages() {
    (16..40).for_each(replace_above_a_table_in_roles);
}

fn replace_above_a_table_in_roles(roles: u64) {
    let machine = plain(without_frame(100, false), false);
    let kind = ept();
    // Another way down: 5, 6, 7. Frame 10 is a root by which frame 6 is reached, too.
    for (from, to) in [(5, 6), (6, 7), (10, 11), (11, 6)] {
        machine.poke(from, 0, to << 12 | full(&kind));
    }
    machine.poke(7, 12, 12 << 12 | page(&kind));
    let gpa = 12 << 12;
    machine.vcpus[1].borrow_mut().root = 10;
    for frame in 101..101 + roles {
        machine.vcpus[1].borrow_mut().kind = without_frame(frame, false);
        machine.enter(1);
        machine.access(1, gpa, &Access::WRITE).unwrap();
    }
    machine.access(0, gpa, &Access::WRITE).unwrap();
    machine.poke(1, 0, 5 << 12 | full(&kind));
    let vcpu = machine.vcpus[0].borrow();
    let told = vcpu.kind.tables(1).fault(NestedAccess::violation(5 << 3 | 2, gpa));
    let fault =
        || machine.with_view(|view| machine.shadow.lock().nested_fault(view, &vcpu.roots, &told));
    let mut again = 0..20;
    let replaced = loop {
        assert!(again.next().is_some());
        match fault() {
            NestedFault::Fixed { replaced } => break replaced,
            NestedFault::NeedPages(count) => machine.shadow.reserve(count, &machine).unwrap(),
            NestedFault::NeedFrame(frame) => {
                assert!(machine.find_frame(frame.gpa.gfn().0, true));
            }
            NestedFault::L1(fault) => panic!("{fault:?}"),
        }
    };
    assert!(replaced, "{roles} roles: the link of the root led elsewhere before");
    machine.audit();
}

/// L1 leaves out one frame after the other, or each of its vCPUs another. Each makes other pages of the same tables: they
/// lie in no long chain, and those that nobody runs with go in time.
#[test]
fn pages_that_leave_out_other_frames_do_not_pile_up() {
    let pages = |machine: &Machine| {
        machine.shadow.counters().pages.load(std::sync::atomic::Ordering::Relaxed)
    };
    for flat in [false, true] {
        let machine = plain(without_frame(100, flat), false);
        machine.shadow.set_limit(600, &machine);
        for frame in 100..400 {
            machine.vcpus[0].borrow_mut().kind = without_frame(frame, flat);
            machine.enter(0);
            machine.access(0, 9 << 12, &Access::WRITE).unwrap();
            if frame % 50 == 0 {
                machine.audit();
            }
        }
        assert!((400..=600).contains(&pages(&machine)), "{} pages", pages(&machine));
        assert!(machine.shadow.longest_chain() < 24);
        machine.access(1, 9 << 12, &Access::WRITE).unwrap();

        let machine = Machine::new(300, without_frame(100, flat), 4, false);
        for n in 0..300 {
            machine.vcpus[n].borrow_mut().kind = without_frame(100 + n as u64, flat);
            machine.enter(n);
        }
        assert_eq!((machine.audit(), pages(&machine)), (300, 300));
        assert!(machine.shadow.longest_chain() < 24);
    }
}
