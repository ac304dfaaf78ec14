//! Tables that are more than tables: mapped several times, reached through themselves, used at two levels, written in
//! every way that a guest has, and turned from data into tables and back (APM vol. 2 §5.3, §5.5).

use crate::machine::memory::PAGE;
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{Stage, in_each_mode, tag};
use crate::outcome::{Outcome, equal};
use crate::runner::tests;

tests!("paging_tables":
    a_frame_at_many_addresses_has_each_ones_permissions,
    a_frame_in_a_large_page_and_in_small_ones,
    a_table_that_leads_to_itself_shows_its_tables,
    a_directory_is_also_a_table,
    tables_written_through_another_mapping,
    tables_written_by_user_mode,
    tables_written_without_wp,
    tables_written_in_halves,
    tables_written_bytewise,
    tables_copied_by_string_instructions,
    tables_filled_by_string_instructions,
    a_locked_addition_to_an_entry,
    a_write_over_the_border_of_two_entries,
    a_write_over_the_border_of_two_tables,
    a_frame_is_data_and_table_by_turns,
    a_table_that_is_written_as_data_again_and_again,
    one_table_below_many_directories,
    large_and_small_pages_by_turns,
    a_page_maps_its_own_table,
    a_table_is_executed,
    a_walk_through_a_frame_that_is_written_in_the_same_list,
);

fn a_frame_at_many_addresses_has_each_ones_permissions() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let far = va + 3 * paging.span(2);
        stage.map(va, 1, frame | ALL);
        stage.map(va + PAGE, 1, frame | PRESENT);
        stage.map(far, 1, frame | PRESENT | USER);
        stage.map(far + PAGE, 1, frame | PRESENT | WRITABLE);
        let number = value(tag(frame));
        let mut expected = Vec::new();
        for round in 0..10 {
            expected.extend([
                (write(va + 16, round).user(), DONE),
                (read(va + PAGE + 16), value(round)),
                (write(va + PAGE + 16, 0), fault(P | W, va + PAGE + 16)),
                (read(va + PAGE + 8).user(), fault(P | U, va + PAGE + 8)),
                (read(far + 16).user(), value(round)),
                (write(far + 16, 0).user(), fault(P | W | U, far + 16)),
                (write(far + PAGE + 16, round + 1), DONE),
                (fetch(far + PAGE), number),
                (read(far + PAGE + 8).user(), fault(P | U, far + PAGE + 8)),
                (add(va + 16, 1), value(round + 1)),
                // The one-to-one map.
                (read(frame + 16), value(round + 2)),
            ]);
        }
        stage.expect("aliases", &expected)
    })
}

fn a_frame_in_a_large_page_and_in_small_ones() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.large_frame();
        let (large, small) = (va, va + 4 * paging.span(2));
        stage.map(large, 2, frame | ALL);
        let mut expected = Vec::new();
        for page in (0..20).map(|page| page * PAGE) {
            let at = stage.map(small + page, 1, (frame + page) | PRESENT | USER);
            expected.extend([
                (write(large + page + 16, page).user(), DONE),
                (read(small + page + 16), value(page)),
                (write(small + page + 16, 1), fault(P | W, small + page + 16)),
                (stage.set_entry(at, (frame + page) | ALL), DONE),
                (invlpg(small + page), DONE),
                (add(small + page + 16, 1), value(page)),
                (add(large + page + 16, 1), value(page + 1)),
                (read(small + page + 16).user(), value(page + 2)),
            ]);
        }
        stage.expect("large and small", &expected)
    })
}

/// The addresses at which the tables of [`Paging::at`] are seen through an entry of a table of level 2 that leads to
/// that table itself: the first of the region, and the entry that maps `va`.
fn mirror(stage: &mut Stage, va: u64) -> Outcome<(u64, u64)> {
    let paging = stage.paging;
    let at = stage.tree().entry(va, 2)?;
    let directory = at & !(PAGE - 1);
    // The directory's last entry but one.
    let slot = PAGE / paging.entry_bytes() - 2;
    let base = va & !(paging.span(3) - 1);
    let region = base + slot * paging.span(2);
    paging.put(stage.memory(), directory + slot * paging.entry_bytes(), directory | ALL);
    let table = region + paging.offset(va, 2) / paging.entry_bytes() * PAGE;
    Ok((region, table + paging.offset(va, 1)))
}

fn a_table_that_leads_to_itself_shows_its_tables() -> Outcome {
    in_each_mode(|paging| {
        if paging == Paging::Legacy {
            return Ok(());
        }
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL);
        let (_, mirrored) = mirror(&mut stage, va)?;
        let mut expected = vec![(read(va + 8), value(tag(frames[0])))];
        for round in 1..20 {
            let entry = frames[round % 2] | ALL | ACCESSED | DIRTY;
            expected.extend([
                (stage.set_entry(mirrored, entry), DONE),
                (invlpg(va), DONE),
                (read(va + 8).user(), value(tag(frames[round % 2]))),
                (read(mirrored), value(entry & word(paging))),
                (write(va + 16, 1), DONE),
            ]);
        }
        stage.expect("through itself", &expected)?;
        equal("the entry in its place", stage.entry(at), frames[1] | ALL | ACCESSED | DIRTY)
    })
}

/// The bits of a guest's word.
fn word(paging: Paging) -> u64 {
    if paging.is_wide() { u64::MAX } else { 0xffff_ffff }
}

fn a_directory_is_also_a_table() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        let at = stage.tree().entry(va, 2)?;
        let (directory, entry) = (at & !(PAGE - 1), stage.entry(at));
        // Below another entry of the directory, the directory as a table of pages: its entries' tables.
        let other = va + 6 * paging.span(2);
        let link = stage.place_of(other, 2);
        let seen_at = other + paging.offset(va, 2) / paging.entry_bytes() * PAGE;
        let second = stage.tables.page();
        let offset = paging.offset(va, 1);
        let twin = stage.frame();
        paging.put(stage.memory(), second + offset, twin | ALL);
        let mut expected = vec![(read(va + 8), value(tag(frame)))];
        for round in 0..12 {
            let (table, shown) =
                if round % 2 == 0 { (second, twin) } else { (paging.target(entry), frame) };
            let leaf = shown | ALL | ACCESSED | DIRTY;
            expected.extend([
                (stage.set_entry(link, directory | ALL), DONE),
                // The table of `va` as a page.
                (stage.set_entry(at, table | ALL | ACCESSED), DONE),
                (invlpg(va), DONE),
                (invlpg(seen_at), DONE),
                (stage.set_entry(seen_at + offset, leaf), DONE),
                (invlpg(va), DONE),
                (read(va + 8).user(), value(tag(shown))),
                (read(seen_at + offset), value(leaf & word(paging))),
                (stage.set_entry(link, 0), DONE),
                (invlpg(seen_at), DONE),
                (read(seen_at), fault(0, seen_at)),
            ]);
        }
        stage.expect("two levels", &expected)
    })
}

/// A stage with a table mapped at another address: the address of the entry there, its place, and two frames.
fn with_window(paging: Paging, window_flags: u64) -> Outcome<(Stage, u64, u64, u64, [u64; 2])> {
    let (mut stage, va) = (Stage::new(paging)?, paging.at());
    let frames = [stage.frame(), stage.frame()];
    let at = stage.map(va, 1, frames[0] | ALL);
    let window = va + 2 * paging.span(2);
    stage.map(window, 1, at & !(PAGE - 1) | window_flags);
    Ok((stage, va, window + at % PAGE, at, frames))
}

/// Changes the entry with these operations for each value, and looks.
fn changed_by(
    stage: &Stage,
    va: u64,
    frames: [u64; 2],
    write_entry: impl Fn(u64) -> Vec<Operation>,
) -> Outcome {
    let mut expected = Vec::new();
    for round in 0..30 {
        let frame = frames[round % 2];
        expected.extend(write_entry(frame | ALL).into_iter().map(|step| (step, DONE)));
        expected.extend([
            (invlpg(va), DONE),
            (read(va + 8), value(tag(frame))),
            (write(va + 16, round as u64).user(), DONE),
        ]);
        if round % 3 == 0 {
            expected.extend(write_entry(0).into_iter().map(|step| (step, DONE)));
            expected.extend([(invlpg(va), DONE), (read(va), fault(0, va))]);
        }
    }
    stage.expect("changed", &expected)
}

fn tables_written_through_another_mapping() -> Outcome {
    in_each_mode(|paging| {
        let (stage, va, window, _, frames) = with_window(paging, ALL)?;
        changed_by(&stage, va, frames, |entry| vec![stage.set_entry(window, entry)])
    })
}

fn tables_written_by_user_mode() -> Outcome {
    in_each_mode(|paging| {
        let (stage, va, window, _, frames) = with_window(paging, ALL)?;
        let wide = paging.is_wide();
        changed_by(&stage, va, frames, |entry| match (paging, wide) {
            (Paging::Legacy, _) | (_, true) => vec![write(window, entry).user()],
            _ => vec![write(window + 4, entry >> 32).user(), write(window, entry).user()],
        })
    })
}

fn tables_written_without_wp() -> Outcome {
    use crate::machine::stage::{CR0, WP};
    in_each_mode(|paging| {
        let (stage, va, window, _, frames) = with_window(paging, PRESENT | USER)?;
        stage.expect(
            "with WP",
            &[(write(window, 0), fault(P | W, window)), (cr0(CR0 & !WP), DONE)],
        )?;
        changed_by(&stage, va, frames, |entry| vec![stage.set_entry(window, entry)])?;
        stage.expect("with WP", &[(cr0(CR0), DONE), (write(window, 0), fault(P | W, window))])
    })
}

fn tables_written_in_halves() -> Outcome {
    in_each_mode(|paging| {
        if paging != Paging::Pae {
            return Ok(());
        }
        let (stage, va, _, at, frames) = with_window(paging, ALL)?;
        changed_by(&stage, va, frames, |entry| match entry {
            0 => vec![write(at, 0), write(at + 4, 0)],
            _ => vec![write(at + 4, entry >> 32), write(at, entry)],
        })?;
        // NX lies in the upper half.
        let mut expected = Vec::new();
        for _ in 0..6 {
            expected.extend([
                (write(at + 4, 1 << 31), DONE),
                (invlpg(va), DONE),
                (fetch(va), fault(P | F, va)),
                (write(at + 4, 0), DONE),
                (invlpg(va), DONE),
                (fetch(va), value(tag(frames[1]))),
            ]);
        }
        let frame = frames[1] | ALL;
        stage.expect("start", &[(stage.set_entry(at, frame), DONE)])?;
        stage.expect("halves", &expected)
    })
}

fn tables_written_bytewise() -> Outcome {
    in_each_mode(|paging| {
        let (stage, va, window, _, frames) = with_window(paging, ALL)?;
        changed_by(&stage, va, frames, |entry| {
            let bytes = 0..paging.entry_bytes();
            // The byte with the present bit comes last when there will be one, and first when not.
            let mut steps: Vec<Operation> =
                bytes.map(|byte| write_byte(window + byte, entry >> (byte * 8) & 0xff)).collect();
            if entry != 0 {
                steps.reverse();
            }
            steps
        })
    })
}

fn tables_copied_by_string_instructions() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let table = stage.place_of(va, 1) & !(PAGE - 1);
        let images = [stage.tables.page(), stage.tables.page()];
        let mut shown = [Vec::new(), Vec::new()];
        for (image, shown) in images.iter().zip(&mut shown) {
            for page in 0..8 {
                let frame = stage.frame();
                let offset = paging.offset(va + page * PAGE, 1);
                paging.put(stage.memory(), image + offset, frame | ALL);
                shown.push(frame);
            }
        }
        let mut expected = Vec::new();
        for round in 0..12 {
            expected.push((copy(table, images[round % 2]), DONE));
            expected.push((cr3(stage.root), DONE));
            for (page, frame) in shown[round % 2].iter().enumerate() {
                let at = va + page as u64 * PAGE;
                expected.push((read(at + 8), value(tag(*frame))));
                expected.push((write(at + 16, 1).user(), DONE));
            }
        }
        stage.expect("copied", &expected)
    })
}

fn tables_filled_by_string_instructions() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, frame | ALL);
        let far = va + 9 * PAGE;
        let mut expected = Vec::new();
        for _ in 0..6 {
            expected.extend([
                (stage.set_entry(at, frame | ALL), DONE),
                (read(va + 8), value(tag(frame))),
                (fill(at & !(PAGE - 1), 0), DONE),
                (cr3(stage.root), DONE),
                (read(va + 8), fault(0, va + 8)),
                (read(far), fault(0, far)),
            ]);
            if paging == Paging::Legacy {
                // All entries the same.
                expected.extend([
                    (fill(at & !(PAGE - 1), frame | ALL), DONE),
                    (read(va + 8), value(tag(frame))),
                    (read(far + 8).user(), value(tag(frame))),
                    (write(va + 1023 * PAGE + 16, 1), DONE),
                    (fill(at & !(PAGE - 1), 0), DONE),
                    (cr3(stage.root), DONE),
                    (read(far), fault(0, far)),
                ]);
            }
        }
        stage.expect("filled", &expected)
    })
}

fn a_locked_addition_to_an_entry() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames: Vec<u64> = (0..20).map(|_| stage.frame()).collect();
        let at = stage.map(va, 1, frames[0] | ALL | ACCESSED | DIRTY);
        let mut expected = vec![(read(va + 8), value(tag(frames[0])))];
        for pair in frames.windows(2) {
            expected.extend([
                (add(at, PAGE), value(pair[0] | ALL | ACCESSED | DIRTY)),
                (invlpg(va), DONE),
                (read(va + 8).user(), value(tag(pair[1]))),
            ]);
        }
        stage.expect("added", &expected)
    })
}

fn a_write_over_the_border_of_two_entries() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let bytes = paging.entry_bytes();
        let first = stage.map(va, 1, frames[0] | ALL);
        let second = stage.map(va + PAGE, 1, frames[1] | ALL);
        let half = bytes / 2 * 8;
        let low = (1_u64 << half) - 1;
        // The upper half of the first entry, as it is, and the lower half of the second.
        let both = |entry: u64| (frames[0] | ALL) >> half | (entry & low) << half;
        let mut expected = Vec::new();
        for _ in 0..6 {
            expected.extend([
                (stage.set_entry(first, frames[0] | ALL | ACCESSED | DIRTY), DONE),
                (read(va + 8), value(tag(frames[0]))),
                (read(va + PAGE + 8), value(tag(frames[1]))),
            ]);
            if bytes == 8 && !paging.is_wide() {
                // A word is half an entry there.
                expected.extend([(write(second - 2, 0), DONE)]);
            } else {
                expected.extend([(write(second - bytes / 2, both(0)), DONE)]);
            }
            expected.extend([
                (invlpg(va + PAGE), DONE),
                (read(va + PAGE + 8), fault(0, va + PAGE + 8)),
                (read(va + 8), value(tag(frames[0]))),
                (stage.set_entry(second, frames[1] | ALL), DONE),
                (invlpg(va + PAGE), DONE),
                (write(va + PAGE + 16, 1).user(), DONE),
            ]);
        }
        stage.expect("over the border", &expected)
    })
}

fn a_write_over_the_border_of_two_tables() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let span = paging.span(2);
        let frames = [stage.frame(), stage.frame()];
        let (low, high) = (va + span - PAGE, va + span);
        let last = stage.map(low, 1, frames[0] | ALL);
        let first = stage.map(high, 1, frames[1] | ALL);
        // The two tables follow each other in memory.
        equal("neighbours", first, last + paging.entry_bytes())?;
        let mut expected = Vec::new();
        for _ in 0..6 {
            expected.extend([
                (read(low + 8), value(tag(frames[0]))),
                (read(high + 8), value(tag(frames[1]))),
                // Two bytes of each: the last entry's upper ones are zero.
                (write(first - 2, 0), DONE),
                (cr3(stage.root), DONE),
                (read(high + 8), fault(0, high + 8)),
                (
                    read(low + 8),
                    match paging {
                        // There they are the upper half of its address.
                        Paging::Legacy => value(0),
                        _ => value(tag(frames[0])),
                    },
                ),
                (stage.set_entry(last, frames[0] | ALL), DONE),
                (stage.set_entry(first, frames[1] | ALL), DONE),
                (cr3(stage.root), DONE),
            ]);
        }
        if paging == Paging::Legacy {
            // What lies at the frame's address without its upper half.
            let low_frame = frames[0] & 0xffff;
            stage.memory().write(low_frame + 8, 0);
        }
        stage.expect("over the border", &expected)
    })
}

fn a_frame_is_data_and_table_by_turns() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let table = stage.frames.page();
        let link = stage.place_of(va, 2);
        let (offset, other) = (paging.offset(va, 1), va + paging.span(2));
        // As data it is mapped, too.
        stage.map(other, 1, table | ALL);
        let mut expected = Vec::new();
        for round in 0..20 {
            let frame = stage.frame();
            expected.extend([
                // Data: whatever looks like entries must not matter.
                (fill(other, 0x5a5a_5a00 | ALL), DONE),
                (write(other + offset, round).user(), DONE),
                (read(table + offset), value(round)),
                (read(va), fault(0, va)),
                (fill(table, 0), DONE),
                (stage.set_entry(other + offset, frame | ALL), DONE),
                (stage.set_entry(link, table | ALL), DONE),
                (read(va + 8), value(tag(frame))),
                (write(va + 16, round).user(), DONE),
                (stage.set_entry(table + offset, frame | PRESENT), DONE),
                (invlpg(va), DONE),
                (write(va + 16, round), fault(P | W, va + 16)),
                (stage.set_entry(link, 0), DONE),
                (invlpg(va), DONE),
                (read(va), fault(0, va)),
            ]);
        }
        stage.expect("by turns", &expected)
    })
}

fn a_table_that_is_written_as_data_again_and_again() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, frame | ALL);
        let (table, bytes) = (at & !(PAGE - 1), paging.entry_bytes());
        let unused = table + (paging.offset(va, 1) + 100 * bytes) % PAGE;
        let mut expected = vec![(read(va + 8), value(tag(frame)))];
        for round in 0..1000 {
            expected.push((write(unused + round % 50 * bytes, round << 1), DONE));
            if round % 250 == 249 {
                // It is still in use.
                expected.push((read(va + 8).user(), value(tag(frame))));
                expected.push((cr3(stage.root), DONE));
                expected.push((write(va + 16, round), DONE));
            }
        }
        stage.expect("flooded", &expected)?;
        // And now it counts again.
        let next = stage.frame();
        stage.expect(
            "after the flood",
            &[
                (stage.set_entry(at, next | ALL), DONE),
                (invlpg(va), DONE),
                (read(va + 8), value(tag(next))),
            ],
        )
    })
}

fn one_table_below_many_directories() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL);
        let entry = stage.entry(stage.tree().entry(va, 2)?);
        let addresses: Vec<u64> = (0..40).map(|index| va + index * paging.span(2)).collect();
        for other in &addresses[1..] {
            let place = stage.place_of(*other, 2);
            paging.put(stage.memory(), place, entry);
        }
        for round in 0..6 {
            let frame = frames[round % 2];
            let mut expected =
                vec![(stage.set_entry(at, frame | ALL), DONE), (cr3(stage.root), DONE)];
            for address in &addresses {
                expected.push((read(address + 8), value(tag(frame))));
                expected.push((write(address + 16, *address).user(), DONE));
                expected.push((read(va + 16), value(address & word(paging))));
            }
            stage.expect("one table", &expected)?;
        }
        Ok(())
    })
}

fn large_and_small_pages_by_turns() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let (large, small) = (stage.large_frame(), stage.frame());
        let table = stage.map(va + 3 * PAGE, 1, small | ALL) & !(PAGE - 1);
        let at = stage.tree().entry(va, 2)?;
        let mut expected = Vec::new();
        for round in 0..10 {
            expected.extend([
                (stage.set_entry(at, large | ALL | LARGE), DONE),
                (invlpg(va), DONE),
                (invlpg(va + 3 * PAGE), DONE),
                (read(va + 3 * PAGE + 8), value(tag(large + 3 * PAGE))),
                (write(va + 7 * PAGE + 16, round).user(), DONE),
                (stage.set_entry(at, table | ALL), DONE),
                (invlpg(va + 3 * PAGE), DONE),
                (invlpg(va + 7 * PAGE), DONE),
                (read(va + 3 * PAGE + 8).user(), value(tag(small))),
                (read(va + 7 * PAGE), fault(0, va + 7 * PAGE)),
                (write(va + 3 * PAGE + 16, round), DONE),
            ]);
        }
        stage.expect("by turns", &expected)
    })
}

fn a_page_maps_its_own_table() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, 0);
        let table = at & !(PAGE - 1);
        let other = stage.map(va + PAGE, 1, frame | ALL);
        paging.put(stage.memory(), at, table | ALL);
        // The table lies at `va`, and its entries with it.
        let seen_other = va + other % PAGE;
        let mut expected = Vec::new();
        for round in 0..10 {
            expected.extend([
                (read(va + PAGE + 8), value(tag(frame))),
                (stage.set_entry(seen_other, frame | PRESENT), DONE),
                (invlpg(va + PAGE), DONE),
                (write(va + PAGE + 16, round), fault(P | W, va + PAGE + 16)),
                (stage.set_entry(seen_other, frame | ALL), DONE),
                (write(va + PAGE + 16, round), DONE),
                // Its own entry, to read-only and back through the one-to-one map.
                (stage.set_entry(va + at % PAGE, table | PRESENT | ACCESSED), DONE),
                (invlpg(va), DONE),
                (write(seen_other, 0), fault(P | W, seen_other)),
                (stage.set_entry(at, table | ALL), DONE),
                (invlpg(va), DONE),
            ]);
        }
        stage.expect("its own table", &expected)
    })
}

fn a_table_is_executed() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, frame | ALL);
        let table = at & !(PAGE - 1);
        // Code in the second half, which no address in use reaches, mapped by the table itself.
        let code = 0x800 + paging.offset(va, 1);
        stage.memory().write(table + code, 0xc3 << 40 | 0x1234 << 8 | 0xb8);
        let place = stage.map(va + 5 * PAGE, 1, table | ALL);
        stage.expect(
            "code in a table",
            &[
                (fetch(va + 5 * PAGE + code), value(0x1234)),
                (read(va + 8), value(tag(frame))),
                (stage.set_entry(at, 0), DONE),
                (invlpg(va), DONE),
                (fetch(va + 5 * PAGE + code).user(), value(0x1234)),
                (read(va + 8), fault(0, va + 8)),
                // The code changes itself and its neighbours.
                (write_byte(va + 5 * PAGE + code + 1, 0x35), DONE),
                (fetch(va + 5 * PAGE + code), value(0x1235)),
                (stage.set_entry(va + 5 * PAGE + at % PAGE, frame | ALL), DONE),
                (read(va + 8), value(tag(frame))),
                (fetch(table + code), value(0x1235)),
                (stage.set_entry(place, 0), DONE),
                (invlpg(va + 5 * PAGE), DONE),
                (
                    fetch(va + 5 * PAGE + code),
                    fault(if paging.has_nx() { F } else { 0 }, va + 5 * PAGE + code),
                ),
            ],
        )
    })
}

fn a_walk_through_a_frame_that_is_written_in_the_same_list() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        // Tables are made and used one by one, as a kernel does when a process touches memory.
        let mut expected = Vec::new();
        for index in 0..60 {
            let (frame, table) = (stage.frame(), stage.tables.page());
            let own = va + index * paging.span(2) + index * 5 % 100 * PAGE;
            let link = stage.place_of(own, 2);
            let at = table + paging.offset(own, 1);
            expected.extend([
                (write(own + 16, index).user(), fault(W | U, own + 16)),
                (fill(table, 0), DONE),
                (stage.set_entry(link, table | ALL), DONE),
                (write(own + 16, index).user(), fault(W | U, own + 16)),
                (stage.set_entry(at, frame | PRESENT | USER), DONE),
                (read(own + 8).user(), value(tag(frame))),
                (write(own + 16, index).user(), fault(P | W | U, own + 16)),
                (stage.set_entry(at, frame | ALL), DONE),
                (invlpg(own), DONE),
                (write(own + 16, index).user(), DONE),
            ]);
        }
        stage.expect("on demand", &expected)
    })
}
