//! The log of pages that L2 makes dirty, which L1 asks for beside accessed and dirty flags in its EPT tables.
//!
//! SDM vol. 3C §29.3.3.2 (the flags), §29.3.6 (page-modification logging).

use super::nested_vmx::{self, EXIT_CPUID, EXITED, L2_CODE, fails, launch};
use super::nested_vmx_ept::{TABLE, prepared, program};
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::FREE;
use crate::oracle::is_stock;
use crate::outcome::{Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx_log":
    what_l2_makes_dirty_is_logged_once,
    a_flag_that_l1_clears_without_invept_is_logged_again,
    a_full_log_is_an_exit_before_the_store,
    what_is_carried_out_for_l2_is_logged_too,
    flags_without_a_log_are_set_alone,
    the_log_needs_tables_and_a_page,
);

const LOG: u64 = FREE + 0x1_0000;
/// Pages that nobody has written; each test takes others of them.
const CLEAN: u64 = FREE + 0x2_0000;
const ENTRIES: u64 = 512;
const UNUSED: u64 = u64::MAX;
const DIRTY: u64 = 1 << 9;

const EXIT_FULL: u64 = 62;
const FLAGS: u64 = 1 << 6;
const PAGE_LOG: u64 = 1 << 17;

guest_code!(
    // Reads the third page from R8 on; stores R9 into the first, twice, and into the second.
    stores,
    64,
    "mov 0x2000(%r8), %rax",
    "mov %r9, (%r8)",
    "mov %r9, 8(%r8)",
    "mov %r9, 0x1000(%r8)",
    "cpuid",
    "hlt",
);

guest_code!(
    // A byte from a port of L1's platform to where R8 points.
    inputs,
    64,
    "mov %r8, %rdi",
    "mov $0x21, %edx",
    "insb",
    "cpuid",
    "hlt",
);

struct L1 {
    guest: Guest,
    fields: Vec<(u64, u64)>,
}

impl L1 {
    /// One that forgets all translations by EPT before it launches.
    fn new(l2: &[u8]) -> Outcome<Self> {
        Self::with(program(), l2)
    }

    fn with(program: &[u8], l2: &[u8]) -> Outcome<Self> {
        let (guest, [primary, secondary, pointer]) = prepared(program)?;
        if guest.vcpu().msr(0x48c)?.unwrap_or(0) >> 21 & 1 == 0 {
            return skip("no accessed and dirty flags in VMX_EPT_VPID_CAP");
        }
        if guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 32 & PAGE_LOG == 0 {
            return skip("no page-modification logging in VMX_PROCBASED_CTLS2");
        }
        guest.memory.write_bytes(L2_CODE, l2);
        let fields = vec![
            primary,
            (secondary.0, secondary.1 | PAGE_LOG),
            (pointer.0, pointer.1 | FLAGS),
            (0x200e, LOG),
            (0x812, ENTRIES - 1),
        ];
        Ok(Self { guest, fields })
    }

    /// The exit that L1 sees of an L2 that stores from this page on, with an empty log in which this entry is next.
    fn exit(&mut self, page: u64, index: u64) -> Outcome<u64> {
        for entry in 0..ENTRIES {
            self.guest.memory.write(LOG + 8 * entry, UNUSED);
        }
        let mut regs = self.guest.vcpu().regs()?;
        (regs.r8, regs.r9) = (page, 0x1234);
        self.guest.vcpu().set_regs(&regs)?;
        self.fields[4].1 = index;
        launch(&self.guest, &self.fields)?;
        equal("an exit", self.guest.result(0), EXITED)?;
        Ok(self.guest.result(1))
    }

    /// How often the log has a page.
    fn times(&self, page: u64) -> usize {
        self.log().iter().filter(|entry| **entry == page).count()
    }

    /// What was logged, the first entry first.
    fn log(&self) -> Vec<u64> {
        let entries = (0..ENTRIES).rev().map(|n| self.guest.memory.read(LOG + 8 * n));
        entries.filter(|entry| *entry != UNUSED).collect()
    }

    fn is_dirty(&self, page: u64) -> bool {
        self.guest.memory.read(TABLE + (page >> 12) * 8) & DIRTY != 0
    }
}

fn what_l2_makes_dirty_is_logged_once() -> Outcome {
    let mut l1 = L1::new(stores())?;
    equal("exit", l1.exit(CLEAN, ENTRIES - 1)?, EXIT_CPUID)?;
    let logged = [0, 1, 2].map(|n| l1.times(CLEAN + n * 0x1000));
    equal("two are written, one is read", logged, [1, 1, 0])?;
    let log = l1.log();
    let of_both = |entry: &&u64| **entry == CLEAN || **entry == CLEAN + 0x1000;
    let order: Vec<u64> = log.iter().filter(of_both).copied().collect();
    equal("their order", order, vec![CLEAN, CLEAN + 0x1000])?;
    equal("addresses of pages", log.iter().any(|entry| entry & 0xfff != 0), false)?;
    let dirty = [0, 1, 2].map(|n| l1.is_dirty(CLEAN + n * 0x1000));
    equal("dirty flags", dirty, [true, true, false])?;
    // They are dirty already.
    equal("exit", l1.exit(CLEAN, ENTRIES - 1)?, EXIT_CPUID)?;
    equal("nothing more", l1.log(), vec![])
}

/// Without a VPID an entry forgets what was made of the tables: their flags count as L1 has left them.
fn a_flag_that_l1_clears_without_invept_is_logged_again() -> Outcome {
    if is_stock() {
        return skip("stock KVM sees L1's stores to its tables, and not a VMM's");
    }
    let mut l1 = L1::with(nested_vmx::program(), stores())?;
    let page = CLEAN + 0x2_0000;
    for round in 0..3 {
        equal("exit", l1.exit(page, ENTRIES - 1)?, EXIT_CPUID)?;
        equal(&format!("logged, round {round}"), l1.times(page), 1)?;
        equal("dirty", l1.is_dirty(page), true)?;
        let entry = TABLE + (page >> 12) * 8;
        let clean = l1.guest.memory.read(entry) & !DIRTY;
        l1.guest.memory.write(entry, clean);
    }
    Ok(())
}

fn a_full_log_is_an_exit_before_the_store() -> Outcome {
    let mut l1 = L1::new(stores())?;
    // L2's own tables are dirty from here on.
    equal("exit", l1.exit(CLEAN, ENTRIES - 1)?, EXIT_CPUID)?;
    let page = CLEAN + 0x8000;
    for index in [0xffff, ENTRIES, 0x8000] {
        equal("full", l1.exit(page, index)?, EXIT_FULL)?;
        equal("not stored", (l1.guest.memory.read(page), l1.is_dirty(page)), (0, false))?;
        equal("the log", l1.log(), vec![])?;
    }
    equal("full at the second page", l1.exit(page, 0)?, EXIT_FULL)?;
    equal("the log", (l1.log(), l1.guest.memory.read(LOG)), (vec![page], page))?;
    let stored = [page, page + 0x1000].map(|page| l1.guest.memory.read(page));
    equal("stored", stored, [0x1234, 0])?;
    equal("room again", l1.exit(page, 7)?, EXIT_CPUID)?;
    equal("the log", (l1.log(), l1.times(page + 0x1000)), (vec![page + 0x1000], 1))
}

fn what_is_carried_out_for_l2_is_logged_too() -> Outcome {
    let mut l1 = L1::new(inputs())?;
    let page = CLEAN + 0x1_0000;
    equal("exit", l1.exit(page + 0x123, ENTRIES - 1)?, EXIT_CPUID)?;
    equal("logged", (l1.times(page), l1.is_dirty(page)), (1, true))?;
    if is_stock() {
        return skip("stock KVM warns of a log that is full where it carries something out");
    }
    let page = page + 0x1000;
    equal("full", l1.exit(page, 0xffff)?, EXIT_FULL)?;
    equal("not dirty", l1.is_dirty(page), false)
}

fn flags_without_a_log_are_set_alone() -> Outcome {
    let mut l1 = L1::new(stores())?;
    l1.fields[1].1 &= !PAGE_LOG;
    let page = CLEAN + 0x1_8000;
    equal("exit", l1.exit(page, ENTRIES - 1)?, EXIT_CPUID)?;
    equal("the log", (l1.log(), l1.is_dirty(page)), (vec![], true))
}

fn the_log_needs_tables_and_a_page() -> Outcome {
    let l1 = L1::new(stores())?;
    let [primary, secondary, pointer, log, index] = l1.fields[..] else { return Ok(()) };
    let good = [primary, secondary, pointer, log, index];
    for (what, at, field) in [
        ("without tables", 1, (secondary.0, PAGE_LOG)),
        ("an unaligned log", 3, (log.0, LOG + 8)),
        ("a log beyond physical addresses", 3, (log.0, 1 << 60)),
    ] {
        let mut bad = good;
        bad[at] = field;
        fails(&l1.guest, what, &bad, 7)?;
    }
    Ok(())
}
