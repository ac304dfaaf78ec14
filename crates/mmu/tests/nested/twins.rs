//! For each rule that safety rests on, a twin that breaks it: the checks of these tests see it. And the same
//! with the rule kept.

use gannet_mmu::EptOffer;

use super::entries::{full, page};
use super::machine::{Machine, ept};
use super::reference::{Access, Kind};

const GPA: u64 = 20 << 12;

/// Tables in frames 1 to 4; frame 20 is reached at its own address, for writing.
fn reached() -> Machine {
    let (machine, kind) = (Machine::new(1, ept(), 4, false), ept());
    for gfn in 1..4 {
        machine.poke(gfn, 0, (gfn + 1) << 12 | full(&kind));
    }
    machine.poke(4, 20, GPA | page(&kind));
    machine.enter(0);
    machine.access(0, GPA, &Access::WRITE).unwrap();
    machine
}

/// What the shadow pages are not told of; then the checks.
fn untold(change: impl FnOnce(&Machine)) {
    let machine = reached();
    machine.told.set(false);
    change(&machine);
    machine.check_host(&[GPA]);
}

fn told(change: impl FnOnce(&Machine)) {
    let machine = reached();
    change(&machine);
    machine.check_host(&[GPA]);
}

#[test]
#[should_panic(expected = "withdrawn")]
fn a_withdrawal_that_does_not_reach_them_is_seen() {
    untold(|machine| machine.withdraw(20, 21));
}

#[test]
fn a_withdrawal_reaches_them() {
    told(|machine| machine.withdraw(20, 21));
}

#[test]
#[should_panic(expected = "may write")]
fn a_write_protection_that_does_not_reach_them_is_seen() {
    untold(|machine| machine.write_protect(20));
}

#[test]
fn a_write_protection_reaches_them() {
    told(|machine| machine.write_protect(20));
}

#[test]
#[should_panic(expected = "is granted")]
fn a_flush_that_compares_nothing_is_seen() {
    let machine = reached();
    machine.poke(4, 20, 0);
    machine.check(0, GPA);
}

#[test]
fn a_flush_compares() {
    let machine = reached();
    machine.poke(4, 20, 0);
    machine.flush(0);
    machine.check(0, GPA);
}

/// The tables are used without accessed and dirty flags, and then by an EPT pointer that has them. `by_role`:
/// its root is looked up.
fn with_and_without_flags(by_role: bool) {
    let machine = Machine::new(1, ept(), 4, false);
    let Kind::Ept { execute_only, pages_2m, pages_1g, width, apic, .. } = ept() else { return };
    let without = Kind::Ept { flags: false, execute_only, pages_2m, pages_1g, width, apic };
    for gfn in 1..4 {
        machine.poke(gfn, 0, (gfn + 1) << 12 | 7);
    }
    machine.poke(4, 20, GPA | 6 << 3 | 7);
    machine.vcpus[0].borrow_mut().kind = without;
    machine.enter(0);
    machine.access(0, GPA, &Access::WRITE).unwrap();
    machine.vcpus[0].borrow_mut().kind = ept();
    if by_role {
        machine.enter(0);
    }
    machine.check(0, GPA);
}

#[test]
#[should_panic(expected = "unseen by L1")]
fn a_root_found_by_its_frame_alone_is_seen() {
    with_and_without_flags(false);
}

#[test]
fn a_root_is_found_by_frame_and_role() {
    with_and_without_flags(true);
    // As is what L1's CPU has of EPT.
    let offer = EptOffer { maxphyaddr: 40, pages_2m: true, pages_1g: true, execute_only: true };
    let tables = |offer: &EptOffer| gannet_mmu::Tables::ept(0x101e, offer);
    assert_ne!(tables(&offer), tables(&EptOffer { execute_only: false, ..offer }));
}
