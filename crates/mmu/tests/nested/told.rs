//! What L1 was told of, at the next entry of L2.

use std::sync::atomic::Ordering;

use gannet_mmu::nested::Part;
use gannet_mmu::walk::AccessKind;
use x86::Gpa;

use super::entries::{full, page};
use super::hardware::Reached;
use super::machine::{LARGE, Machine, Refused, SMALL, ept, npt};
use super::reference::{Access, Apic, Kind, No};

const GPA: u64 = 20 << 12;

/// Tables in frames 1 to 4, of which the last maps frame 30 at its own address; L1 has heard that nothing is at `GPA`.
fn told(kind: Kind, logs: bool, access: &Access) -> Machine {
    let machine = Machine::new(2, kind, 4, logs);
    for gfn in 1..4 {
        machine.poke(gfn, 0, (gfn + 1) << 12 | full(&kind));
    }
    machine.poke(4, 30, 30 << 12 | page(&kind));
    machine.enter(0);
    // The way down is made by another access, and the frame is in the tree: L1 has filled it.
    machine.access(0, 30 << 12, &Access::READ).unwrap();
    assert!(machine.find_frame(20, true));
    assert!(matches!(machine.access(0, GPA, access), Err(Refused::L1(_))));
    machine
}

fn look(machine: &Machine) -> Option<Reached> {
    let root = machine.vcpus[0].borrow().roots.current().unwrap();
    machine.hardware.look(&root, GPA, None)
}

/// L1 makes the entry, without these bits, and enters L2.
fn made_without(machine: &Machine, without: u64) -> Option<Reached> {
    let kind = machine.vcpus[0].borrow().kind;
    let entry = (GPA | page(&kind)) & !without;
    machine.poke(4, 20, entry);
    machine.enter(0);
    assert_eq!(machine.peek(4, 20), entry, "a flag was set for an access that was not made");
    machine.check(0, GPA);
    machine.check_host(&[GPA]);
    machine.audit();
    look(machine)
}

/// What happens between what L1 was told and the entry leaves the entry to a fault, which finds it.
fn not_made_after(between: impl Fn(&Machine, Kind)) {
    for kind in [npt(), ept()] {
        let machine = told(kind, false, &Access::WRITE);
        machine.poke(4, 20, GPA | page(&kind));
        between(&machine, kind);
        machine.enter(0);
        assert_eq!(look(&machine), None, "{kind:?}");
        machine.check_host(&[GPA]);
        machine.audit();
    }
}

/// Bits of accessed and dirty flags.
fn flags(kind: &Kind) -> [u64; 2] {
    match kind {
        Kind::Npt { .. } => [1 << 5, 1 << 6],
        Kind::Ept { .. } => [1 << 8, 1 << 9],
    }
}

#[test]
fn l2_needs_no_second_fault() {
    for kind in [npt(), ept()] {
        for access in [Access::READ, Access::WRITE, Access::FETCH] {
            let machine = told(kind, false, &access);
            let ahead = || machine.shadow.counters().ahead.load(Ordering::Relaxed);
            let before = ahead();
            let found = made_without(&machine, 0).expect("it was made at the entry");
            assert_eq!(found.pfn, machine.pages[20].hpa().0 >> 12);
            assert!(found.read && found.write && found.fetch && ahead() == before + 1);
            // Once: what L1 takes away after that is gone for good.
            machine.poke(4, 20, 0);
            machine.flush(0);
            machine.poke(4, 20, GPA | page(&kind));
            machine.enter(0);
            assert_eq!(look(&machine), None);
        }
    }
}

#[test]
fn without_flags_of_l1s_it_is_made_as_well() {
    let Kind::Ept { execute_only, pages_2m, pages_1g, width, apic, .. } = ept() else { return };
    let kind = Kind::Ept { flags: false, execute_only, pages_2m, pages_1g, width, apic };
    let found = made_without(&told(kind, false, &Access::WRITE), 3 << 8);
    assert!(found.is_some_and(|page| page.write));
}

#[test]
fn what_would_set_a_flag_is_left_to_the_access() {
    for kind in [npt(), ept()] {
        let [accessed, dirty] = flags(&kind);
        for access in [Access::READ, Access::WRITE] {
            assert_eq!(made_without(&told(kind, false, &access), accessed), None);
        }
        assert_eq!(made_without(&told(kind, false, &Access::WRITE), dirty), None);
        let clean = made_without(&told(kind, false, &Access::READ), dirty).unwrap();
        assert!(!clean.write, "written unseen");
    }
}

#[test]
fn what_the_entry_forbids_is_l1s_to_hear_again() {
    for kind in [npt(), ept()] {
        assert_eq!(made_without(&told(kind, false, &Access::WRITE), 2), None);
        assert!(!made_without(&told(kind, false, &Access::READ), 2).unwrap().write);
    }
    // Broken: a memory type that there is not.
    let machine = told(ept(), false, &Access::READ);
    machine.poke(4, 20, (GPA | page(&ept())) & !(7 << 3) | 7 << 3);
    machine.enter(0);
    assert_eq!(look(&machine), None);
}

#[test]
fn nothing_is_made_after_a_flush() {
    not_made_after(|machine, _| machine.vcpus[0].borrow_mut().roots.flush());
    not_made_after(|machine, _| machine.vcpus[0].borrow_mut().roots.flush_of(1 << 12 | 0x1e));
}

/// What a CPU keeps of the way to an address ends with the violation there (SDM vol. 3C §29.4.3.1): L1 may change the upper
/// entries without a flush.
#[test]
fn nothing_is_made_by_a_way_that_l1_has_changed() {
    // It leads elsewhere.
    not_made_after(|machine, kind| machine.poke(3, 0, 5 << 12 | full(&kind)));
    // It grants no writing any more.
    not_made_after(|machine, kind| machine.poke(3, 0, (4 << 12 | full(&kind)) & !2));
    // The access is to set its flag again.
    not_made_after(|machine, kind| {
        machine.poke(3, 0, (4 << 12 | full(&kind)) & !flags(&kind)[0]);
    });
    // It is gone.
    not_made_after(|machine, _| machine.poke(2, 0, 0));
}

/// L2 runs with other tables, and L1 flushes those: what it was told of is looked for by the root that it was under.
#[test]
fn it_is_made_behind_another_root() {
    for kind in [npt(), ept()] {
        let machine = told(kind, false, &Access::WRITE);
        machine.poke(4, 20, GPA | page(&kind));
        machine.poke(5, 0, 2 << 12 | full(&kind));
        machine.vcpus[0].borrow_mut().root = 5;
        machine.enter(0);
        assert_eq!(look(&machine), None, "under the other root");
        machine.vcpus[0].borrow_mut().roots.flush_of(5 << 12 | 0x1e);
        machine.vcpus[0].borrow_mut().root = 1;
        machine.enter(0);
        assert!(look(&machine).is_some(), "{kind:?}");
        machine.check(0, GPA);
        machine.audit();
    }
}

#[test]
fn nothing_is_made_after_roots_were_given_up() {
    not_made_after(|machine, _| {
        let vcpu = &mut *machine.vcpus[0].borrow_mut();
        assert!(machine.shadow.lock().nested_release(&mut vcpu.roots));
    });
}

#[test]
fn nothing_is_made_of_a_frame_that_is_gone() {
    not_made_after(|machine, _| machine.withdraw(20, 21));
    not_made_after(|machine, _| machine.migrate(20, SMALL as usize + 1));
    // A slot that goes, with the frame that L1's new entry names.
    not_made_after(|machine, kind| {
        assert!(machine.find_frame(40, true));
        machine.poke(4, 20, 40 << 12 | page(&kind));
        machine.toggle_slot(false);
    });
    // A frame that nothing has brought into the tree.
    not_made_after(|machine, kind| machine.poke(4, 20, (LARGE + 9) << 12 | page(&kind)));
}

#[test]
fn nothing_is_made_where_the_table_is_gone() {
    not_made_after(|machine, _| machine.withdraw(4, 5));
    // Its slot, with the page that was made from it.
    for kind in [npt(), ept()] {
        let machine = told(kind, false, &Access::WRITE);
        machine.poke(33, 20, 0);
        machine.poke(3, 0, 33 << 12 | full(&kind));
        machine.flush(0);
        machine.poke(33, 30, 30 << 12 | page(&kind));
        machine.access(0, 30 << 12, &Access::READ).unwrap();
        assert!(matches!(machine.access(0, GPA, &Access::READ), Err(Refused::L1(_))));
        machine.poke(33, 20, GPA | page(&kind));
        machine.toggle_slot(false);
        machine.enter(0);
        assert_eq!(look(&machine), None);
        machine.audit();
    }
}

#[test]
fn a_write_of_which_the_dirty_log_would_not_hear_is_not_let_through() {
    for logs in [false, true] {
        let machine = told(ept(), logs, &Access::WRITE);
        machine.write_protect(20);
        assert_eq!(made_without(&machine, 0), None, "a write faults, and is noted");
        let machine = told(ept(), logs, &Access::READ);
        machine.write_protect(20);
        assert!(!made_without(&machine, 0).unwrap().write);
    }
}

#[test]
fn the_frame_that_is_left_out_stays_out() {
    let Kind::Ept { flags, execute_only, pages_2m, pages_1g, width, .. } = ept() else { return };
    let apic = Apic { frame: Some(20), ..Apic::default() };
    let kind = Kind::Ept { flags, execute_only, pages_2m, pages_1g, width, apic };
    assert_eq!(made_without(&told(kind, false, &Access::READ), 0), None);
}

/// Another vCPU that runs on the same pages was faster.
#[test]
fn what_another_vcpu_has_made_stays() {
    for kind in [npt(), ept()] {
        let machine = told(kind, false, &Access::READ);
        machine.poke(4, 20, GPA | page(&kind));
        machine.enter(1);
        machine.access(1, GPA, &Access::WRITE).unwrap();
        let before = look(&machine);
        // It would be gone if the CPU had to forget.
        machine.access(0, 30 << 12, &Access::READ).unwrap();
        machine.enter(0);
        assert_eq!(look(&machine), before);
        assert!(machine.keeps(0, 30 << 12), "{kind:?}");
        machine.audit();
    }
}

/// What another vCPU fills in, on the same pages, between what L1 was told and its change, goes before L2 runs where it was told; the
/// other may go by what it has found, as by a TLB.
fn filled_in_by_another(fills: impl Fn(&Machine, Kind), changes: impl Fn(&Machine, Kind)) {
    for kind in kinds() {
        let machine = told_of_a_write(kind);
        machine.enter(1);
        assert!(matches!(machine.access(0, GPA, &Access::WRITE), Err(Refused::L1(_))));
        fills(&machine, kind);
        let found = machine.access(1, GPA, &Access::READ).unwrap();
        changes(&machine, kind);
        machine.enter(0);
        machine.check(0, GPA);
        let now = machine.reference(0, GPA, &Access::READ);
        match machine.access(0, GPA, &Access::READ) {
            Ok(page) => assert_eq!(page.pfn, machine.pages[30].hpa().0 >> 12, "{kind:?}"),
            Err(Refused::L1(fault)) => assert_eq!(now, Err(No::L1(fault)), "{kind:?}"),
            Err(other) => panic!("{kind:?}: {other:?}"),
        }
        assert_eq!(machine.access(1, GPA, &Access::READ), Ok(found), "{kind:?}");
        machine.check_host(&[GPA]);
        machine.audit();
    }
}

#[test]
fn what_another_vcpu_fills_in_does_not_outlast_l1s_change() {
    let nothing = |_: &Machine, _| {};
    let elsewhere = |machine: &Machine, kind| machine.poke(4, 20, 30 << 12 | page(&kind));
    // The entry of before, and one that L1 made for a while.
    filled_in_by_another(nothing, elsewhere);
    filled_in_by_another(|machine, kind| machine.poke(4, 20, 31 << 12 | page(&kind)), elsewhere);
    // It leads elsewhere in steps, is gone, or an upper one is.
    filled_in_by_another(nothing, |machine, kind| {
        machine.poke(5, 20, 30 << 12 | page(&kind));
        machine.poke(3, 0, 5 << 12 | full(&kind));
    });
    filled_in_by_another(nothing, |machine, _| machine.poke(4, 20, 0));
    filled_in_by_another(nothing, |machine, _| machine.poke(3, 0, 0));
    filled_in_by_another(nothing, |machine, _| machine.poke(2, 0, 0));
    // It is a large page's now.
    filled_in_by_another(nothing, |machine, kind| {
        machine.poke(5, 20, 30 << 12 | page(&kind));
        machine.poke(7, 0, 5 << 12 | full(&kind));
        machine.poke(2, 0, 7 << 12 | full(&kind));
    });
}

/// A flag that L1 takes back is set by the next access.
#[test]
fn a_flag_that_l1_takes_back_behind_a_violation_is_set_anew() {
    for kind in [npt(), ept()] {
        for (gfn, index) in [(4, 20), (3, 0), (2, 0)] {
            let machine = told_of_a_write(kind);
            machine.enter(1);
            assert!(matches!(machine.access(0, GPA, &Access::WRITE), Err(Refused::L1(_))));
            machine.access(1, GPA, &Access::READ).unwrap();
            let [accessed, _] = flags(&kind);
            machine.poke(gfn, index, machine.peek(gfn, index) & !accessed);
            machine.enter(0);
            machine.access(0, GPA, &Access::READ).unwrap();
            assert_ne!(machine.peek(gfn, index) & accessed, 0, "{kind:?} {gfn}");
        }
    }
}

#[test]
fn a_large_page_that_another_vcpu_fills_in_does_not_outlast_l1s_change() {
    for kind in kinds() {
        // In one piece, or in small ones: over small frames.
        for frame in [LARGE, 0] {
            let machine = told(kind, false, &Access::READ);
            let at = 1 << 21 | GPA;
            machine.poke(3, 1, (frame << 12 | page(&kind) | 1 << 7) & !2);
            for gfn in [LARGE, LARGE + 20] {
                assert!(machine.find_frame(gfn, true));
            }
            machine.enter(0);
            machine.enter(1);
            assert!(matches!(machine.access(0, at, &Access::WRITE), Err(Refused::L1(_))));
            machine.access(1, at, &Access::READ).unwrap();
            machine.poke(3, 1, 0);
            machine.enter(0);
            assert!(
                matches!(machine.access(0, at, &Access::READ), Err(Refused::L1(_))),
                "{kind:?}"
            );
            machine.audit();
        }
    }
}

/// L1 was told of two addresses under one root, of which L2 was entered behind none: both are looked at.
#[test]
fn two_addresses_are_looked_at() {
    for kind in kinds() {
        let machine = told_of_a_write(kind);
        machine.enter(1);
        let tables = kind.tables(1);
        for gpa in [GPA, 30 << 12] {
            // As of accesses in software.
            let access = tables.access(Gpa(gpa), AccessKind::Write, Part::Page);
            machine.vcpus[0].borrow().roots.tell(&tables, &access);
        }
        machine.poke(4, 20, 0);
        machine.poke(4, 30, 0);
        machine.enter(0);
        machine.check(0, GPA);
        machine.check(0, 30 << 12);
    }
}

/// One EPT pointer's tables under two roles, as where two of L2's vCPUs have local APICs in different modes: a CPU knows what it keeps by
/// the address of L1's root alone.
#[test]
fn another_root_of_the_same_tables_is_looked_at_too() {
    let Kind::Ept { flags, execute_only, pages_2m, pages_1g, width, .. } = ept() else { return };
    let apic = Apic { frame: Some(33), ..Apic::default() };
    let other = Kind::Ept { flags, execute_only, pages_2m, pages_1g, width, apic };
    let machine = told_of_a_write(ept());
    let by = |kind| {
        machine.vcpus[0].borrow_mut().kind = kind;
        machine.enter(0);
    };
    by(other);
    machine.access(0, GPA, &Access::READ).unwrap();
    by(ept());
    assert!(matches!(machine.access(0, GPA, &Access::WRITE), Err(Refused::L1(_))));
    machine.poke(4, 20, 30 << 12 | page(&ept()));
    by(other);
    // Nor does the CPU keep it, whose fault was under another root.
    let page = machine.access(0, GPA, &Access::READ).unwrap();
    assert_eq!(page.pfn, machine.pages[30].hpa().0 >> 12);
    assert_eq!(look(&machine).unwrap().pfn, page.pfn);
}

/// As that, and the vCPU comes to have so many roots that this one is given up and made anew.
#[test]
fn another_root_that_is_given_up_owes_its_flush() {
    let Kind::Ept { flags, execute_only, pages_2m, pages_1g, width, .. } = ept() else { return };
    let leaving_out = |frame| {
        let apic = Apic { frame: Some(frame), ..Apic::default() };
        Kind::Ept { flags, execute_only, pages_2m, pages_1g, width, apic }
    };
    let machine = told_of_a_write(ept());
    let by = |kind| {
        machine.vcpus[0].borrow_mut().kind = kind;
        machine.enter(0);
    };
    by(leaving_out(33));
    machine.access(0, GPA, &Access::READ).unwrap();
    by(ept());
    assert!(matches!(machine.access(0, GPA, &Access::WRITE), Err(Refused::L1(_))));
    machine.poke(4, 20, 30 << 12 | page(&ept()));
    // Made behind what L1 was told: they know nothing of it.
    (34..38).for_each(|frame| by(leaving_out(frame)));
    by(leaving_out(33));
    let page = machine.access(0, GPA, &Access::READ).unwrap();
    assert_eq!(page.pfn, machine.pages[30].hpa().0 >> 12);
}

/// L2 has read through a read-only entry, and L1 is told of its write. L1 changes what it likes, and flushes nothing: a violation has
/// ended what a CPU keeps of the address.
fn told_of_a_write(kind: Kind) -> Machine {
    let machine = told(kind, false, &Access::READ);
    machine.poke(4, 20, (GPA | page(&kind)) & !2);
    machine.enter(0);
    assert!(machine.find_frame(30, true));
    machine.access(0, GPA, &Access::READ).unwrap();
    assert_eq!(look(&machine).unwrap().pfn, machine.pages[20].hpa().0 >> 12);
    machine
}

fn kinds() -> [Kind; 3] {
    let Kind::Ept { execute_only, pages_2m, pages_1g, width, apic, .. } = ept() else {
        unreachable!()
    };
    [npt(), ept(), Kind::Ept { flags: false, execute_only, pages_2m, pages_1g, width, apic }]
}

#[test]
fn what_l1_maps_elsewhere_behind_a_violation_is_seen() {
    for kind in kinds() {
        // The entry was absent meanwhile, or lacked a right.
        for meanwhile in [Some(0), None] {
            let machine = told_of_a_write(kind);
            if let Some(entry) = meanwhile {
                machine.poke(4, 20, entry);
            }
            assert!(matches!(machine.access(0, GPA, &Access::WRITE), Err(Refused::L1(_))));
            machine.poke(4, 20, 30 << 12 | page(&kind));
            machine.enter(0);
            machine.access(0, GPA, &Access::READ).unwrap();
            assert_eq!(look(&machine).unwrap().pfn, machine.pages[30].hpa().0 >> 12, "{kind:?}");
            machine.check(0, GPA);
            machine.audit();
        }
    }
}

#[test]
fn what_l1_takes_away_behind_a_violation_is_gone() {
    for kind in kinds() {
        let machine = told_of_a_write(kind);
        assert!(matches!(machine.access(0, GPA, &Access::WRITE), Err(Refused::L1(_))));
        machine.poke(4, 20, 0);
        machine.enter(0);
        assert!(matches!(machine.access(0, GPA, &Access::READ), Err(Refused::L1(_))), "{kind:?}");
        machine.audit();
    }
}

/// Table 4 is reached by another address, too, and filled there; L1 has put table 5 in its place for this one.
#[test]
fn a_table_that_l1_has_replaced_before_a_violation_is_not_gone_through() {
    for kind in kinds() {
        let machine = told(kind, false, &Access::READ);
        assert!(machine.find_frame(31, true));
        machine.poke(5, 20, 0);
        machine.poke(3, 0, 5 << 12 | full(&kind));
        assert!(matches!(machine.access(0, GPA, &Access::READ), Err(Refused::L1(_))));
        machine.poke(5, 20, 31 << 12 | page(&kind));
        machine.poke(4, 20, 20 << 12 | page(&kind));
        machine.poke(3, 1, 4 << 12 | full(&kind));
        machine.enter(0);
        machine.access(0, 1 << 21 | GPA, &Access::READ).unwrap();
        machine.access(0, GPA, &Access::READ).unwrap();
        assert_eq!(look(&machine).unwrap().pfn, machine.pages[31].hpa().0 >> 12, "{kind:?}");
        machine.audit();
    }
}

#[test]
fn a_large_page_that_l1_takes_away_behind_a_violation_is_gone() {
    for kind in kinds() {
        let machine = told(kind, false, &Access::READ);
        let large = LARGE << 12 | page(&kind) | 1 << 7;
        machine.poke(3, 1, large & !2);
        for gfn in [LARGE, LARGE + 20] {
            assert!(machine.find_frame(gfn, true));
        }
        machine.enter(0);
        let at = 1 << 21 | GPA;
        machine.access(0, at, &Access::READ).unwrap();
        assert!(matches!(machine.access(0, at, &Access::WRITE), Err(Refused::L1(_))));
        machine.poke(3, 1, 0);
        machine.enter(0);
        assert!(matches!(machine.access(0, at, &Access::READ), Err(Refused::L1(_))), "{kind:?}");
        machine.audit();
    }
}

/// A bit that means nothing, or a flag that L1 takes back: what is below stays, for to link it anew is to look at all of it.
#[test]
fn a_link_that_leads_where_it_led_stays() {
    for kind in kinds() {
        for changed in [1 << 11, flags(&kind)[0]] {
            let machine = told_of_a_write(kind);
            machine.poke(3, 0, (4 << 12 | full(&kind)) ^ changed);
            assert!(matches!(machine.access(0, GPA, &Access::WRITE), Err(Refused::L1(_))));
            assert_eq!(look(&machine), None);
            let root = machine.vcpus[0].borrow().roots.current().unwrap();
            let beside = machine.hardware.look(&root, 30 << 12, None);
            assert!(beside.is_some(), "{kind:?} {changed:#x}");
            machine.audit();
        }
    }
}
