//! Behaviour by example: a guest that pages as guests do.

use std::sync::atomic::Ordering::Relaxed;

use gannet_mmu::tdp::FlushRemote;
use gannet_mmu::{AddressSpace, PagingContext, RootOutcome, Tlb};
use host::page::Pages;
use x86::exception::pf;
use x86::{Cr0, Cr4, Efer, Exception, Gfn, Gpa};

use super::hardware::{self, Access};
use super::machine::{LARGE, Machine, Refused, long_mode};

const READ: Access = Access { write: false, fetch: false, user: false, ac: false };
const WRITE: Access = Access { write: true, ..READ };
const FETCH: Access = Access { fetch: true, ..READ };
const USER: Access = Access { user: true, ..READ };
const USER_WRITE: Access = Access { user: true, ..WRITE };
const FULL: u64 = 0x67;
const NX: u64 = 1 << 63;

/// Tables in frames 1 to 4 map frame n at page n; the pages of frames 16 to 31 are plain memory.
/// Address 2 MiB on is the large page at LARGE.
fn machine() -> Machine {
    let machine = Machine::new(2);
    for gfn in 1..4 {
        machine.poke(gfn, 0, (gfn + 1) << 12 | FULL);
    }
    machine.poke(3, 1, LARGE << 12 | FULL | 1 << 7);
    (0..32).for_each(|n| machine.poke(4, n, (n as u64) << 12 | FULL));
    machine.switch(0, true);
    machine
}

fn page(n: u64) -> u64 {
    n << 12
}

fn pfn(machine: &Machine, gfn: u64) -> u64 {
    machine.tdp.mapper().lookup(Gfn(gfn)).unwrap().pfn.0
}

/// Faults that an access takes, which is granted.
fn cost(machine: &Machine, vcpu: usize, va: u64, access: Access) -> u64 {
    let before = machine.faults.get();
    machine.access(vcpu, va, access).unwrap();
    machine.faults.get() - before
}

#[test]
fn a_page_costs_one_fault_and_its_used_neighbours_none() {
    let machine = machine();
    (16..32).for_each(|n| assert!(machine.find_frame(n, true)));
    machine.access(0, page(16), READ).unwrap();
    assert_eq!(cost(&machine, 0, page(17), WRITE), 0);
    assert_eq!(cost(&machine, 0, page(24), READ), 1);
    // Those that the guest has not used keep their accessed bit clear until it does.
    machine.poke(4, 33, 17 << 12 | 7);
    machine.poke(4, 34, 18 << 12 | 7);
    machine.access(0, page(33), READ).unwrap();
    assert_eq!((machine.peek(4, 33), machine.peek(4, 34)), (17 << 12 | 0x27, 18 << 12 | 7));
}

#[test]
fn accessed_bits_are_set_on_the_way_and_the_dirty_bit_by_the_first_write() {
    let machine = machine();
    for (gfn, index) in [(1, 0), (2, 0), (3, 0), (4, 16)] {
        machine.poke(gfn, index, machine.peek(gfn, index) & !0x60);
    }
    machine.access(0, page(16), READ).unwrap();
    for (gfn, index) in [(1, 0), (2, 0), (3, 0), (4, 16)] {
        assert_eq!(machine.peek(gfn, index) & 0x60, 0x20, "{gfn}");
    }
    let reached = machine.access(0, page(16), READ).unwrap();
    assert!(!reached.writable);
    assert_eq!(cost(&machine, 0, page(16), WRITE), 1);
    assert_eq!(machine.peek(4, 16) & 0x60, 0x60);
}

#[test]
fn a_guests_own_faults_have_its_own_codes() {
    let machine = machine();
    machine.poke(4, 40, 0);
    machine.poke(4, 41, 16 << 12 | 0x63);
    machine.poke(4, 42, 16 << 12 | 0x65);
    machine.poke(4, 43, 16 << 12 | FULL | NX);
    machine.poke(4, 44, 16 << 12 | FULL | 1 << 45);
    let expect = |n: u64, access, bits| {
        let refused = machine.access(0, page(n), access);
        let exception = Exception::pf(page(n), Access::code(&access, bits));
        assert_eq!(refused, Err(Refused::Guest(exception)), "{n}");
    };
    expect(40, WRITE, 0);
    expect(41, USER, pf::PRESENT);
    expect(42, WRITE, pf::PRESENT);
    expect(43, FETCH, pf::PRESENT);
    expect(44, READ, pf::PRESENT | pf::RSVD);
    machine.access(0, page(42), USER).unwrap();
}

#[test]
fn what_the_guest_takes_away_may_be_used_until_it_flushes() {
    let machine = machine();
    machine.access(0, page(16), WRITE).unwrap();
    machine.access(0, page(17), WRITE).unwrap();
    machine.poke(4, 16, 0);
    machine.poke(4, 17, 17 << 12 | FULL & !2);
    assert_eq!(cost(&machine, 0, page(16), WRITE), 0);
    machine.invlpg(0, page(16));
    let gone = machine.access(0, page(16), WRITE);
    assert_eq!(gone, Err(Refused::Guest(Exception::pf(page(16), pf::WRITE))));
    assert_eq!(cost(&machine, 0, page(17), WRITE), 0);
    machine.switch(0, true);
    assert_eq!(cost(&machine, 0, page(17), READ), 0);
    assert!(machine.access(0, page(17), WRITE).is_err());
}

#[test]
fn what_the_guest_newly_allows_needs_no_flush() {
    let machine = machine();
    machine.poke(4, 16, 16 << 12 | 0x65);
    assert!(machine.access(0, page(16), WRITE).is_err());
    machine.access(0, page(16), READ).unwrap();
    machine.poke(4, 16, 16 << 12 | FULL);
    machine.access(0, page(16), WRITE).unwrap();
    machine.poke(4, 50, 0);
    assert!(machine.access(0, page(50), READ).is_err());
    machine.poke(4, 50, 20 << 12 | FULL);
    machine.access(0, page(50), READ).unwrap();
}

#[test]
fn invlpg_in_a_large_page_drops_all_of_it() {
    let machine = machine();
    let (near, far) = (2 << 20, (2 << 20) + page(300));
    let reached = machine.access(0, near, WRITE).unwrap();
    assert_eq!((reached.level, cost(&machine, 0, far, WRITE)), (2, 0));
    machine.poke(3, 1, 0);
    machine.invlpg(0, far);
    assert!(machine.access(0, near, READ).is_err());
}

#[test]
fn a_large_page_over_small_frames_is_made_of_small_ones() {
    let machine = machine();
    machine.poke(3, 2, FULL | 1 << 7);
    let at = |n| (4 << 20) + page(n);
    let reached = machine.access(0, at(20), WRITE).unwrap();
    assert_eq!((reached.level, reached.pfn), (1, pfn(&machine, 20)));
    // A clean one is not writable anywhere until it is written.
    machine.poke(3, 3, FULL & !0x40 | 1 << 7);
    let at = |n| (6 << 20) + page(n);
    assert!(!machine.access(0, at(20), READ).unwrap().writable);
    machine.access(0, at(21), WRITE).unwrap();
    assert_eq!(machine.peek(3, 3) & 0x40, 0x40);
    assert!(machine.access(0, at(20), WRITE).unwrap().writable);
    // The guest takes the dirty bit away: the next write sets it again.
    machine.poke(3, 3, FULL & !0x40 | 1 << 7);
    machine.flush(0);
    assert!(!machine.access(0, at(20), READ).unwrap().writable);
    machine.access(0, at(20), WRITE).unwrap();
    assert_eq!(machine.peek(3, 3) & 0x40, 0x40);
}

#[test]
fn a_settled_table_costs_nothing_to_flush_and_its_first_write_is_noticed() {
    let machine = machine();
    machine.shadow.set_calm(1);
    machine.access(0, page(4), WRITE).unwrap();
    machine.access(0, page(16), WRITE).unwrap();
    machine.flush(0);
    machine.settle();
    (1..=4).for_each(|gfn| assert!(machine.shadow.is_protected(Gfn(gfn)), "{gfn}"));
    let counters = machine.shadow.counters();
    let compared = counters.compared.load(Relaxed);
    (0..10).for_each(|_| machine.flush(0));
    machine.switch(0, true);
    assert_eq!(counters.compared.load(Relaxed), compared);
    // Through the guest's own mapping of its table.
    assert!(!hardware::look(&machine.switch(0, false), page(4)).unwrap().writable);
    assert_eq!(cost(&machine, 0, page(4), WRITE), 1);
    assert!(!machine.shadow.is_protected(Gfn(4)));
    assert_eq!(cost(&machine, 0, page(4), WRITE), 0);
    let word = pfn(&machine, 4) << 12 | 16 << 3;
    let found = machine.pages.iter().find(|p| p.hpa().0 >> 12 == word >> 12).unwrap();
    found.table()[16].store(0, Relaxed);
    machine.flush(0);
    assert!(machine.access(0, page(16), READ).is_err());
    assert_eq!(counters.unsynced.load(Relaxed), 1);
}

#[test]
fn a_write_while_a_table_settles_keeps_it_in_doubt() {
    let machine = machine();
    machine.shadow.set_calm(1);
    machine.access(0, page(4), WRITE).unwrap();
    machine.access(0, page(16), WRITE).unwrap();
    machine.flush(0);
    assert!(machine.shadow.settle_begin());
    assert!(!machine.shadow.settle_begin(), "one at a time");
    machine.access(0, page(4), WRITE).unwrap();
    machine.with_view(|view| machine.shadow.lock().settle_end(view));
    assert!(!machine.shadow.is_protected(Gfn(4)) && machine.shadow.is_protected(Gfn(3)));
    machine.audit();
}

/// One table below entries of all rights is as many pages, more than a write to it finds: the others are looked at by
/// each flush.
#[test]
fn a_write_to_a_table_in_many_roles_is_noticed_in_all_of_them() {
    let machine = machine();
    machine.shadow.set_calm(1);
    let ways = 8..16;
    let read = |n: usize| machine.access(0, (n as u64) << 21 | page(16), READ);
    for n in ways.clone() {
        let bits = [1 << 1, 1 << 2, NX].iter().enumerate();
        let taken = bits.fold(0, |all, (i, bit)| if n >> i & 1 != 0 { all | bit } else { all });
        machine.poke(3, n, 4 << 12 | FULL & !(taken & 6) | taken & NX);
    }
    machine.access(0, page(4), WRITE).unwrap();
    assert!(ways.clone().all(|n| read(n).is_ok()));
    for round in 0..3 {
        machine.flush(0);
        machine.settle();
        assert!(machine.shadow.is_protected(Gfn(4)));
        machine.audit();
        assert!(ways.clone().all(|n| read(n).is_ok()));
        // Through the guest's mapping of the table: it is noticed once, in all pages.
        machine.access(0, page(4), WRITE).unwrap();
        assert!(!machine.shadow.is_protected(Gfn(4)));
        machine.audit();
        machine.poke(4, 16, 0);
        machine.flush(0);
        for n in ways.clone() {
            assert!(read(n).is_err(), "{n} in round {round}");
        }
        machine.poke(4, 16, 16 << 12 | FULL);
        assert!(ways.clone().all(|n| read(n).is_ok()));
        // Having been protected in vain, it waits longer.
        (0..200).for_each(|_| machine.flush(0));
    }
}

/// A flush looks at a page however many flushes came since the last one that did.
#[test]
fn a_page_that_was_seen_long_ago_is_looked_at_again() {
    let machine = machine();
    machine.access(0, page(16), WRITE).unwrap();
    machine.flush(0);
    machine.poke(4, 16, 0);
    machine.shadow.skip_walks((1 << 32) - 1);
    machine.flush(0);
    assert!(machine.access(0, page(16), WRITE).is_err());
}

#[test]
fn a_large_page_gives_way_where_a_table_in_it_is_protected() {
    let machine = machine();
    // Memory that is one large page for the host too, with a table in its first frame.
    let memory = Pages::zeroed(10).unwrap();
    let skip = (memory.hpa().0 >> 12).next_multiple_of(512) - (memory.hpa().0 >> 12);
    let first = (memory.hpa().0 >> 12) + skip;
    let table = |n: u64| &memory.words()[(skip * 512 + n) as usize];
    machine.back_large(4096, first);
    machine.poke(3, 5, 4096 << 12 | FULL | 1 << 7);
    machine.poke(3, 6, 4096 << 12 | FULL);
    table(0).store(16 << 12 | FULL, Relaxed);
    let (window, through) = (5 << 21, 6 << 21);
    machine.shadow.set_calm(1);
    assert_eq!(machine.access(0, window, WRITE).unwrap().level, 2);
    machine.access(0, through, WRITE).unwrap();
    machine.flush(0);
    machine.settle();
    // Protected: the large leaf that could write it is gone, and does not come back.
    assert!(machine.shadow.is_protected(Gfn(4096)));
    machine.audit();
    let reached = machine.access(0, window + page(3), WRITE).unwrap();
    assert_eq!((reached.level, reached.pfn), (1, first + 3));
    assert!(!machine.access(0, window, READ).unwrap().writable);
    assert!(machine.shadow.is_protected(Gfn(4096)));
    // The first write to the table is let through and noticed.
    machine.access(0, window, WRITE).unwrap();
    assert!(!machine.shadow.is_protected(Gfn(4096)));
    table(0).store(0, Relaxed);
    machine.flush(0);
    assert!(machine.access(0, through, READ).is_err());
    machine.withdraw(4096, 4096 + 512);
    machine.audit();
}

#[test]
fn with_write_protection_off_the_supervisor_writes_readonly_user_pages_alone() {
    let machine = machine();
    let context =
        PagingContext { cr0: Cr0::PG | Cr0::PE, cr4: long_mode().cr4 | Cr4::SMEP, ..long_mode() };
    machine.vcpus[0].borrow_mut().context = context;
    let root = machine.switch(0, true);
    machine.poke(4, 16, 16 << 12 | 0x65);
    machine.access(0, page(16), WRITE).unwrap();
    let found = hardware::look(&root, page(16)).unwrap();
    // The supervisor's, and not to be executed under SMEP.
    assert_eq!((found.writable, found.user, found.exec), (true, false, false));
    machine.access(0, page(16), USER).unwrap();
    let found = hardware::look(&root, page(16)).unwrap();
    assert_eq!((found.writable, found.user, found.exec), (false, true, true));
    assert!(machine.access(0, page(16), USER_WRITE).is_err());
    machine.access(0, page(16), WRITE).unwrap();
    // With SMAP no entry can say it.
    machine.vcpus[0].borrow_mut().context.cr4 |= Cr4::SMAP;
    machine.switch(0, true);
    let write = machine.access(0, page(16), Access { ac: true, ..WRITE });
    assert_eq!(write, Err(Refused::Emulate(Gpa(page(16)))));
    let refused = Exception::pf(page(16), pf::PRESENT | pf::WRITE);
    assert_eq!(machine.access(0, page(16), WRITE), Err(Refused::Guest(refused)));
}

#[test]
fn a_role_that_comes_back_finds_its_pages() {
    let machine = machine();
    for n in 16..32 {
        machine.access(0, page(n), WRITE).unwrap();
    }
    let off = PagingContext { cr0: Cr0::PG | Cr0::PE, ..long_mode() };
    let toggle = |context| {
        machine.vcpus[0].borrow_mut().context = context;
        machine.switch(0, false);
    };
    let first = machine.switch(0, false).cr3;
    toggle(off);
    machine.access(0, page(16), WRITE).unwrap();
    assert_ne!(machine.switch(0, false).cr3, first);
    let created = machine.shadow.counters().created.load(Relaxed);
    for _ in 0..10 {
        toggle(long_mode());
        assert_eq!(machine.switch(0, false).cr3, first);
        assert_eq!(cost(&machine, 0, page(17), WRITE), 0);
        toggle(off);
        assert_eq!(cost(&machine, 0, page(16), WRITE), 0);
    }
    assert_eq!(machine.shadow.counters().created.load(Relaxed), created);
}

#[test]
fn a_root_that_was_away_during_a_flush_is_looked_at_before_it_is_used() {
    let machine = machine();
    // Another address space with tables of its own: no shadow page is shared.
    for (gfn, below) in [(6, 5), (5, 7), (7, 8)] {
        machine.poke(gfn, 0, below << 12 | FULL);
    }
    machine.poke(8, 16, 17 << 12 | FULL);
    machine.access(0, page(16), WRITE).unwrap();
    machine.vcpus[0].borrow_mut().context.cr3 = 0x6000;
    machine.switch(0, false);
    machine.access(0, page(16), WRITE).unwrap();
    machine.poke(4, 16, 0);
    machine.invlpg(0, page(16));
    machine.vcpus[0].borrow_mut().context.cr3 = 0x1000;
    machine.switch(0, false);
    assert!(machine.access(0, page(16), READ).is_err());
}

#[test]
fn pae_uses_the_pdptes_that_were_loaded() {
    let machine = machine();
    let context = PagingContext { efer: Efer::NXE, ..long_mode() };
    machine.poke(1, 0, 3 << 12 | 1);
    machine.poke(1, 3, 3 << 12 | 1);
    machine.vcpus[0].borrow_mut().context = context;
    let root = machine.switch(0, true);
    assert_eq!(root.levels, 3);
    machine.access(0, page(16), WRITE).unwrap();
    machine.access(0, 3 << 30 | page(16), WRITE).unwrap();
    assert!(machine.access(0, 1 << 30 | page(16), WRITE).is_err());
    machine.poke(1, 0, 0);
    machine.poke(1, 1, 3 << 12 | 1);
    machine.flush(0);
    machine.access(0, page(17), WRITE).unwrap();
    assert!(machine.access(0, 1 << 30 | page(16), WRITE).is_err());
    machine.switch(0, true);
    assert!(machine.access(0, page(17), WRITE).is_err());
    machine.access(0, 1 << 30 | page(16), WRITE).unwrap();
}

#[test]
fn a_table_of_1024_entries_has_two_halves_and_a_directory_four_quarters() {
    let machine = machine();
    let context = PagingContext { cr4: Cr4::PSE, efer: Efer::empty(), ..long_mode() };
    machine.vcpus[0].borrow_mut().context = context;
    for (index, value) in [(0, 2), (300, 2), (600, 5), (1023, 2)] {
        machine.poke32(1, index, value << 12 | 0x67);
    }
    for (index, value) in [(3, 16), (515, 17)] {
        machine.poke32(2, index, value << 12 | 0x67);
        machine.poke32(5, index, (value + 2) << 12 | 0x67);
    }
    machine.poke32(1, 700, 1024 << 12 | 0xe7);
    machine.switch(0, true);
    for pde in [0u64, 300, 1023, 600] {
        let (low, high) = (pde << 22 | page(3), pde << 22 | page(515));
        let more = if pde == 600 { 2 } else { 0 };
        assert_eq!(machine.access(0, low, WRITE).unwrap().pfn, pfn(&machine, 16 + more));
        assert_eq!(machine.access(0, high, WRITE).unwrap().pfn, pfn(&machine, 17 + more));
    }
    // 4 MiB are two large pages.
    for half in [0, 1u64] {
        let reached = machine.access(0, 700 << 22 | half << 21, WRITE).unwrap();
        let gfn = 1024 + half * 512;
        assert_eq!((reached.pfn, reached.level), (pfn(&machine, gfn), 2));
    }
}

#[test]
fn a_guest_that_does_not_page_reaches_what_the_host_has() {
    let machine = machine();
    machine.vcpus[0].borrow_mut().context =
        PagingContext { cr0: Cr0::PE, efer: Efer::empty(), ..long_mode() };
    let root = machine.switch(0, true);
    assert_eq!(root.levels, 3);
    assert_eq!(machine.access(0, page(9), WRITE).unwrap().pfn, pfn(&machine, 9));
    assert_eq!(machine.access(0, page(LARGE + 3), WRITE).unwrap().level, 2);
    let mmio = machine.access(0, 0xfee0_0030, READ);
    assert_eq!(mmio, Err(Refused::Mmio(Gpa(0xfee0_0030))));
    machine.withdraw(9, 10);
    assert_eq!(hardware::look(&root, page(9)), None);
}

#[test]
fn pages_are_taken_back_at_the_limit_and_those_of_current_roots_are_not() {
    let machine = machine();
    machine.shadow.set_limit(8, &machine);
    // One table after the other; all map the same pages.
    for n in 5..15 {
        machine.poke(3, n, (n as u64) << 12 | FULL);
        machine.poke(n as u64, 0, 16 << 12 | FULL);
    }
    for round in 0..3 {
        for n in 5..15u64 {
            machine.access(0, n << 21, WRITE).unwrap();
            assert!(machine.audit() > 0, "{round}");
        }
    }
    let counters = machine.shadow.counters();
    assert!(counters.recycled.load(Relaxed) > 20);
    assert!(counters.pages.load(Relaxed) <= 16, "{counters:?}");
    assert!(machine.flushes.load(Relaxed) < counters.recycled.load(Relaxed));
}

/// What another vCPU finds while pages are taken back: it may be on its way into a page that a CPU has not forgotten yet.
struct Beside<'a, F>(&'a Machine, F);

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl<F: Fn()> FlushRemote for Beside<'_, F> {
    fn flush_remote(&self) {
        (self.1)();
        self.0.flush_remote();
    }
}

#[test]
fn pages_that_are_taken_back_are_free_only_behind_the_flush() {
    let machine = machine();
    machine.shadow.set_limit(8, &machine);
    let root = |n: u64| {
        let vcpu = &mut *machine.vcpus[1].borrow_mut();
        let context = PagingContext { cr3: page(n), ..long_mode() };
        machine.with_view(|view| {
            let mut guard = machine.shadow.lock();
            guard.switch(view, &mut vcpu.roots, &context, &[0; 4], AddressSpace::Main, Tlb::Kept)
        })
    };
    // Roots one after the other, each of a table of its own, until no page is free.
    let exhaust = |from: u64| {
        let refused = (from..from + 64).find(|n| root(*n) == RootOutcome::NeedPages(1));
        refused.expect("pages without end")
    };
    let first = exhaust(32);
    let flushes = machine.flushes.load(Relaxed);
    let look = Beside(&machine, || assert_eq!(root(first), RootOutcome::NeedPages(1)));
    machine.shadow.reserve(1, &look).unwrap();
    assert_eq!(machine.flushes.load(Relaxed), flushes + 1);
    // The same where the VMM takes pages away.
    let second = exhaust(first);
    assert!(second > first);
    let look = Beside(&machine, || assert_eq!(root(second), RootOutcome::NeedPages(1)));
    machine.shadow.set_limit(3, &look);
    assert_eq!(machine.flushes.load(Relaxed), flushes + 2);
    machine.shadow.lock().release(&mut machine.vcpus[1].borrow_mut().roots);
}

#[test]
fn a_lower_limit_gives_memory_back() {
    let machine = machine();
    for n in 5..30 {
        machine.poke(3, n, 5 << 12 | FULL);
        machine.poke(2, n, 3 << 12 | FULL);
        machine.access(0, (n as u64) << 30, READ).ok();
    }
    machine.shadow.set_limit(3, &machine);
    assert!(machine.shadow.counters().pages.load(Relaxed) <= 3);
    machine.access(0, page(16), READ).unwrap();
}

#[test]
fn tables_that_map_themselves_everywhere_are_looked_at_once() {
    let machine = machine();
    // Every entry of every level leads to the table itself.
    (0..512).for_each(|n| machine.poke(7, n, 7 << 12 | FULL));
    machine.vcpus[0].borrow_mut().context.cr3 = 0x7000;
    machine.switch(0, true);
    for n in [0u64, 1, 5, 77, 200] {
        for m in 0..8 {
            let va = n << 39 | m << 30 | n << 21 | m << 12;
            machine.access(0, va, WRITE).unwrap();
        }
    }
    let before = machine.shadow.counters().compared.load(Relaxed);
    machine.flush(0);
    // A page for each level.
    assert!(machine.shadow.counters().compared.load(Relaxed) - before <= 4);
    machine.poke(7, 5, 0);
    machine.flush(0);
    assert!(machine.access(0, 5 << 39, READ).is_err());
    machine.audit();
}

#[test]
fn vcpus_share_pages_and_each_flushes_for_itself() {
    let machine = machine();
    machine.switch(1, true);
    machine.access(0, page(16), WRITE).unwrap();
    assert_eq!(cost(&machine, 1, page(16), WRITE), 0);
    assert_eq!(machine.audit(), 2);
    machine.shadow.lock().release(&mut machine.vcpus[0].borrow_mut().roots);
    assert_eq!(machine.audit(), 1);
    machine.switch(0, false);
}
