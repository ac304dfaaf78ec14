//! Accessed and dirty bits: set exactly when the architecture says (APM vol. 2 §5.4.2).

use crate::machine::memory::PAGE;
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{CR0, Stage, WP, in_each_mode, tag};
use crate::outcome::{Outcome, equal};
use crate::runner::tests;

tests!("paging_bits":
    a_read_sets_accessed_at_every_level,
    a_write_sets_dirty_at_the_page_only,
    user_mode_sets_them_like_the_kernel,
    a_locked_addition_sets_dirty,
    a_refused_access_leaves_dirty_clear,
    a_write_that_wp_lets_pass_sets_dirty,
    dirty_cleared_and_flushed_is_set_again,
    dirty_cleared_and_flushed_by_cr3_is_set_again,
    accessed_cleared_and_flushed_is_set_again,
    accessed_of_an_upper_level_is_set_again,
    a_large_page_has_one_pair_of_bits,
    two_mappings_of_a_frame_have_bits_of_their_own,
    a_table_under_two_roots_has_one_pair_of_bits,
    other_bits_stay_as_they_were,
    reads_of_many_pages_set_no_bit_of_their_neighbours,
);

/// Bits of the entries from the page's to the root's that the processor sets: accessed and dirty. The top of
/// PAE has none.
fn bits(stage: &Stage, va: u64) -> Outcome<Vec<u64>> {
    let levels = 1..=if stage.paging == Paging::Pae { 2 } else { stage.paging.levels() };
    let bits = |level| Ok(stage.entry(stage.tree().entry(va, level)?) & (ACCESSED | DIRTY));
    levels.map(bits).collect()
}

/// What they are after an access that sets `page` at the page.
fn set(stage: &Stage, page: u64) -> Vec<u64> {
    let levels = if stage.paging == Paging::Pae { 2 } else { stage.paging.levels() };
    let mut all = vec![ACCESSED; levels as usize];
    all[0] = page;
    all
}

/// Does `operation` on a fresh page with these permissions, in each mode, and looks at the bits.
fn after(
    permissions: u64,
    operation: impl Fn(u64) -> Operation,
    expected: impl Fn(&Stage) -> Vec<u64>,
) -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | permissions);
        equal("bits before", bits(&stage, va)?.iter().sum::<u64>(), 0)?;
        let seen = stage.one(operation(va))?;
        equal(&format!("bits after {seen:x?}"), bits(&stage, va)?, expected(&stage))
    })
}

fn a_read_sets_accessed_at_every_level() -> Outcome {
    let read_only = |stage: &Stage| set(stage, ACCESSED);
    after(ALL, |va| read(va + 8), read_only)?;
    after(PRESENT, fetch, read_only)
}

fn a_write_sets_dirty_at_the_page_only() -> Outcome {
    after(ALL, |va| write(va + 16, 1), |stage| set(stage, ACCESSED | DIRTY))
}

fn user_mode_sets_them_like_the_kernel() -> Outcome {
    after(ALL, |va| read(va + 8).user(), |stage| set(stage, ACCESSED))?;
    after(ALL, |va| fetch(va).user(), |stage| set(stage, ACCESSED))?;
    after(ALL, |va| write(va + 16, 1).user(), |stage| set(stage, ACCESSED | DIRTY))
}

fn a_locked_addition_sets_dirty() -> Outcome {
    after(ALL, |va| add(va + 16, 1), |stage| set(stage, ACCESSED | DIRTY))?;
    after(ALL, |va| add(va + 16, 0).user(), |stage| set(stage, ACCESSED | DIRTY))
}

/// Whether the page is dirty after an access that is refused; whether it is accessed is left open.
fn a_refused_access_leaves_dirty_clear() -> Outcome {
    let refused = |permissions, operation: fn(u64) -> Operation, error| {
        in_each_mode(|paging| {
            let (mut stage, va) = (Stage::new(paging)?, paging.at());
            let frame = stage.frame();
            stage.map(va, 1, frame | permissions);
            equal("seen", stage.one(operation(va))?, fault(error, va))?;
            equal("dirty", bits(&stage, va)?[0] & DIRTY, 0)?;
            // Nor by a read after it.
            stage.one(read(va))?;
            equal("dirty after a read", bits(&stage, va)?[0], ACCESSED)
        })
    };
    refused(PRESENT, |va| write(va, 1), P | W)?;
    refused(PRESENT | USER, |va| write(va, 1).user(), P | W | U)?;
    refused(PRESENT | WRITABLE, |va| write(va, 1).user(), P | W | U)
}

fn a_write_that_wp_lets_pass_sets_dirty() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | PRESENT | USER);
        stage.expect(
            "without WP",
            &[
                (read(va + 8), value(tag(frame))),
                (cr0(CR0 & !WP), DONE),
                (write(va + 16, 7), DONE),
                (cr0(CR0), DONE),
            ],
        )?;
        equal("bits", bits(&stage, va)?[0], ACCESSED | DIRTY)?;
        equal("memory", stage.memory().read(frame + 16) & 0xffff_ffff, 7)
    })
}

/// A page that was written, whose bits then are cleared in the way of `clear`, and written or read again.
fn cleared(
    cleared_bits: u64,
    flush: impl Fn(&Stage, u64) -> Operation,
    again: impl Fn(u64) -> Operation,
    expected: u64,
) -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, frame | ALL);
        for round in 0..4 {
            stage.run(&[write(va + 16, round), write(va + 24, round).user()])?;
            let entry = stage.entry(at);
            equal("bits of a written page", entry & (ACCESSED | DIRTY), ACCESSED | DIRTY)?;
            let list =
                [stage.set_entry(at, entry & !cleared_bits), flush(&stage, va), again(va + 32)];
            equal("the last step", stage.run(&list)?[1], DONE)?;
            equal(&format!("bits, round {round}"), bits(&stage, va)?[0], expected)?;
        }
        Ok(())
    })
}

fn dirty_cleared_and_flushed_is_set_again() -> Outcome {
    let flush = |_: &Stage, va| invlpg(va);
    cleared(DIRTY, flush, |va| write(va, 1), ACCESSED | DIRTY)?;
    cleared(DIRTY, flush, |va| write(va, 1).user(), ACCESSED | DIRTY)?;
    cleared(DIRTY, flush, |va| add(va, 1), ACCESSED | DIRTY)?;
    cleared(DIRTY, flush, read, ACCESSED)
}

fn dirty_cleared_and_flushed_by_cr3_is_set_again() -> Outcome {
    let flush = |stage: &Stage, _| cr3(stage.root);
    cleared(DIRTY, flush, |va| write(va, 1), ACCESSED | DIRTY)?;
    cleared(ACCESSED | DIRTY, flush, |va| write(va, 1).user(), ACCESSED | DIRTY)?;
    cleared(ACCESSED | DIRTY, flush, read, ACCESSED)
}

fn accessed_cleared_and_flushed_is_set_again() -> Outcome {
    let flush = |_: &Stage, va| invlpg(va);
    cleared(ACCESSED, flush, read, ACCESSED | DIRTY)?;
    cleared(ACCESSED | DIRTY, flush, read, ACCESSED)?;
    cleared(ACCESSED | DIRTY, flush, |va| read(va).user(), ACCESSED)
}

fn accessed_of_an_upper_level_is_set_again() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        let levels = if paging == Paging::Pae { 2 } else { paging.levels() };
        for level in 2..=levels {
            let at = stage.tree().entry(va, level)?;
            stage.run(&[write(va, 1)])?;
            let entry = stage.entry(at);
            equal("accessed", entry & (ACCESSED | DIRTY), ACCESSED)?;
            let list =
                [stage.set_entry(at, entry & !ACCESSED), cr3(stage.root), read(va + 8).user()];
            equal("read", stage.run(&list)?[2], value(tag(frame)))?;
            equal(&format!("accessed again, level {level}"), stage.entry(at), entry)?;
        }
        Ok(())
    })
}

fn a_large_page_has_one_pair_of_bits() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.large_frame();
        let at = stage.map(va, 2, frame | ALL);
        let (whole, last) = (stage.entry(at), va + paging.span(2) - PAGE);
        for _ in 0..3 {
            stage.run(&[read(va + 8), read(last + 8).user()])?;
            equal("after reads", stage.entry(at), whole | ACCESSED)?;
            stage.run(&[write(last + 16, 1).user()])?;
            equal("after a write", stage.entry(at), whole | ACCESSED | DIRTY)?;
            stage.run(&[stage.set_entry(at, whole | ACCESSED), invlpg(va)])?;
            stage.run(&[read(last + 8)])?;
            equal("cleared, and read", stage.entry(at), whole | ACCESSED)?;
            stage.run(&[write(va + 3 * PAGE + 16, 1)])?;
            equal("and written elsewhere", stage.entry(at), whole | ACCESSED | DIRTY)?;
            stage.run(&[stage.set_entry(at, whole), invlpg(last)])?;
        }
        Ok(())
    })
}

fn two_mappings_of_a_frame_have_bits_of_their_own() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let other = va + 5 * PAGE;
        let (first, second) = (stage.map(va, 1, frame | ALL), stage.map(other, 1, frame | ALL));
        stage.expect("write the first", &[(write(va + 16, 5), DONE)])?;
        equal("first", stage.entry(first) & 0x60, ACCESSED | DIRTY)?;
        equal("second", stage.entry(second) & 0x60, 0)?;
        stage.expect("read the second", &[(read(other + 16), value(5))])?;
        equal("second", stage.entry(second) & 0x60, ACCESSED)?;
        stage.expect(
            "write the second",
            &[(write(other + 16, 6).user(), DONE), (read(va + 16), value(6))],
        )?;
        equal("second", stage.entry(second) & 0x60, ACCESSED | DIRTY)
    })
}

fn a_table_under_two_roots_has_one_pair_of_bits() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, frame | ALL);
        let (first, second) = (stage.root, stage.new_root());
        // The second root's directory leads to the first one's table.
        let directory = stage.entry(stage.tree().entry(va, 2)?);
        let upper = stage.place_in(second, va, 2);
        paging.put(stage.memory(), upper, directory);
        stage.expect(
            "read by the second",
            &[(cr3(second), DONE), (read(va + 8), value(tag(frame)))],
        )?;
        equal("bits", stage.entry(at) & 0x60, ACCESSED)?;
        stage.expect("write by the first", &[(cr3(first), DONE), (write(va + 16, 1), DONE)])?;
        equal("bits", stage.entry(at) & 0x60, ACCESSED | DIRTY)?;
        let clean = stage.entry(at) & !DIRTY;
        stage.expect(
            "clear, and write by the second",
            &[
                (stage.set_entry(at, clean), DONE),
                (invlpg(va), DONE),
                (cr3(second), DONE),
                (write(va + 16, 2).user(), DONE),
            ],
        )?;
        equal("bits", stage.entry(at) & 0x60, ACCESSED | DIRTY)
    })
}

fn other_bits_stay_as_they_were() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        // Write-through, uncached, global, and the bits for software.
        let high = if paging.is_wide() { 0x7ff << 52 } else { 0 };
        let entry = frame | ALL | 0x18 | GLOBAL | 0xe00 | high;
        let at = stage.map(va, 1, entry);
        stage.expect("use", &[(read(va + 8), value(tag(frame))), (write(va + 16, 1), DONE)])?;
        equal("entry", stage.entry(at), entry | ACCESSED | DIRTY)
    })
}

fn reads_of_many_pages_set_no_bit_of_their_neighbours() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let (mut places, mut list) = (Vec::new(), Vec::new());
        for page in 0..200 {
            let frame = stage.frame();
            places.push(stage.map(va + page * PAGE, 1, frame | ALL));
            match page % 5 {
                1 => list.push(read(va + page * PAGE)),
                3 => list.push(write(va + page * PAGE, 1).user()),
                _ => {}
            }
        }
        stage.run(&list)?;
        for (page, at) in places.iter().enumerate() {
            let expected = match page % 5 {
                1 => ACCESSED,
                3 => ACCESSED | DIRTY,
                _ => 0,
            };
            equal(&format!("page {page}"), stage.entry(*at) & 0x60, expected)?;
        }
        Ok(())
    })
}
