//! Page faults: when they come, with which error code and CR2, and which of several reasons is told
//! (APM vol. 2 §5.6, §8.2.15, §8.4.2).

use crate::kvm::file::System;
use crate::machine::memory::{Memory, PAGE};
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{NXE, Stage, in_each_mode, mark, tag};
use crate::oracle;
use crate::outcome::{Answer, Outcome, equal, skip};
use crate::runner::tests;

tests!("paging_faults":
    five_level_paging_is_offered,
    an_absent_entry_of_any_level_faults,
    a_read_only_entry_of_any_level_refuses_writes,
    a_supervisors_entry_of_any_level_refuses_user_mode,
    an_entry_without_execution_of_any_level_refuses_fetches,
    a_reserved_bit_of_any_level_is_told,
    a_reserved_bit_is_told_before_what_lies_below,
    an_absent_entry_has_no_reserved_bits,
    a_reserved_bit_is_told_rather_than_a_missing_permission,
    nx_is_a_reserved_bit_without_nxe,
    a_large_page_has_reserved_bits_of_its_own,
    a_large_page_at_the_root_is_a_reserved_bit,
    an_access_over_a_page_border_tells_the_second_page,
    what_was_absent_needs_no_flush,
    a_large_page_is_one_page,
    a_large_page_has_its_low_address_bits_from_the_address,
    high_addresses_are_translated,
    pse36_reaches_above_4_gib,
    pse_off_makes_large_entries_tables,
);

fn five_level_paging_is_offered() -> Outcome {
    let mut cpuid = System::open()?.supported_cpuid()?;
    match Paging::offered(&mut cpuid).contains(&Paging::Five) {
        true => Ok(()),
        false => skip("the host has none to offer, so no test here uses it"),
    }
}

/// The six accesses of an address, and what the first five bits of their error code are but for the present bit.
fn accesses(paging: Paging, va: u64) -> [(Operation, u64); 6] {
    let f = if paging.has_nx() { F } else { 0 };
    [
        (read(va + 8), 0),
        (write(va + 16, 1), W),
        (fetch(va), f),
        (read(va + 8).user(), U),
        (write(va + 16, 1).user(), U | W),
        (fetch(va).user(), U | f),
    ]
}

/// CR2 of each of them.
fn addresses(va: u64) -> [u64; 6] {
    [va + 8, va + 16, va, va + 8, va + 16, va]
}

/// What each of them does where nothing is refused.
fn passes(frame: u64) -> [Seen; 6] {
    let number = value(tag(frame));
    [number, DONE, number, number, DONE, number]
}

/// Changes the entry of each level in turn from one that permits all to what `change` makes of it, and expects of
/// the accesses what `refused` says: the error code, or none if it passes.
fn at_each_level(
    change: impl Fn(Paging, u32, u64) -> Option<u64>,
    refused: impl Fn(u64) -> Option<u64>,
) -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        for level in 1..=paging.levels() {
            let at = stage.tree().entry(va, level)?;
            let whole = stage.entry(at);
            let Some(changed) = change(paging, level, whole) else { continue };
            let mut expected = vec![(stage.set_entry(at, changed), DONE), (flush(&stage), DONE)];
            let all = accesses(paging, va).into_iter().zip(addresses(va)).zip(passes(frame));
            for (((operation, error), at), pass) in all {
                expected.push((operation, refused(error).map_or(pass, |error| fault(error, at))));
            }
            expected.extend([(stage.set_entry(at, whole), DONE), (flush(&stage), DONE)]);
            let whole_again = accesses(paging, va).into_iter().zip(passes(frame));
            expected.extend(whole_again.map(|((operation, _), pass)| (operation, pass)));
            stage.expect(&format!("level {level}"), &expected)?;
        }
        Ok(())
    })
}

/// Empties all of the translation caches.
fn flush(stage: &Stage) -> Operation {
    cr3(stage.root)
}

fn an_absent_entry_of_any_level_faults() -> Outcome {
    at_each_level(|_, _, entry| Some(entry & !PRESENT), Some)?;
    at_each_level(|_, _, _| Some(0), Some)
}

/// Whether the level has more than a present bit.
fn has_permissions(paging: Paging, level: u32) -> bool {
    paging.table_flags(level) & WRITABLE != 0 || level == 1
}

fn a_read_only_entry_of_any_level_refuses_writes() -> Outcome {
    let change = |paging, level, entry| has_permissions(paging, level).then_some(entry & !WRITABLE);
    at_each_level(change, |error| (error & W != 0).then_some(error | P))
}

fn a_supervisors_entry_of_any_level_refuses_user_mode() -> Outcome {
    let change = |paging, level, entry| has_permissions(paging, level).then_some(entry & !USER);
    at_each_level(change, |error| (error & U != 0).then_some(error | P))
}

fn an_entry_without_execution_of_any_level_refuses_fetches() -> Outcome {
    let change = |paging: Paging, level, entry| {
        (paging.has_nx() && has_permissions(paging, level)).then_some(entry | NX)
    };
    at_each_level(change, |error| (error & F != 0).then_some(error | P))
}

/// An address bit that no processor of today has, where the entries have room for one.
const BEYOND: u64 = 1 << 51;

fn with_reserved_bit(paging: Paging, level: u32, entry: u64) -> Option<u64> {
    (paging.has_nx() && has_permissions(paging, level)).then_some(entry | BEYOND)
}

fn a_reserved_bit_of_any_level_is_told() -> Outcome {
    at_each_level(with_reserved_bit, |error| Some(error | P | RSVD))
}

/// The entries of [`va`] in a stage whose entries have reserved bits, from the page's up.
fn reserved(test: impl Fn(&Stage, &[u64]) -> Outcome) -> Outcome {
    in_each_mode(|paging| {
        if !paging.has_nx() {
            return Ok(());
        }
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        let levels = 1..paging.levels() + u32::from(paging.is_wide());
        let entries: Outcome<Vec<u64>> =
            levels.map(|level| stage.tree().entry(va, level)).collect();
        test(&stage, &entries?)
    })
}

fn a_reserved_bit_is_told_before_what_lies_below() -> Outcome {
    reserved(|stage, entries| {
        let va = stage.paging.at();
        for (below, above) in entries.iter().zip(&entries[1..]) {
            let (lower, upper) = (stage.entry(*below), stage.entry(*above));
            stage.expect(
                "reserved above absent",
                &[
                    (stage.set_entry(*below, 0), DONE),
                    (stage.set_entry(*above, upper | BEYOND), DONE),
                    (flush(stage), DONE),
                    (read(va), fault(P | RSVD, va)),
                    (stage.set_entry(*above, 0), DONE),
                    (stage.set_entry(*below, lower | BEYOND), DONE),
                    (flush(stage), DONE),
                    (read(va), fault(0, va)),
                    (stage.set_entry(*below, lower), DONE),
                    (stage.set_entry(*above, upper), DONE),
                    (flush(stage), DONE),
                ],
            )?;
        }
        Ok(())
    })
}

fn an_absent_entry_has_no_reserved_bits() -> Outcome {
    let change = |paging, level, entry| {
        with_reserved_bit(paging, level, entry).map(|entry| (entry | NX | LARGE) & !PRESENT)
    };
    at_each_level(change, Some)
}

fn a_reserved_bit_is_told_rather_than_a_missing_permission() -> Outcome {
    let change = |paging, level, entry| {
        with_reserved_bit(paging, level, entry).map(|entry| (entry | NX) & !(WRITABLE | USER))
    };
    at_each_level(change, |error| Some(error | P | RSVD))
}

fn nx_is_a_reserved_bit_without_nxe() -> Outcome {
    oracle::not_of_stock_shadow_paging("its pages do not know EFER.NXE")?;
    reserved(|stage, entries| {
        let va = stage.paging.at();
        for at in entries {
            let whole = stage.entry(*at);
            let nx = P | RSVD;
            let number = value(tag(stage.paging.target(stage.entry(entries[0]))));
            stage.expect(
                "NX with and without NXE",
                &[
                    (stage.set_entry(*at, whole | NX), DONE),
                    (flush(stage), DONE),
                    (read(va + 8), number),
                    (fetch(va), fault(P | F, va)),
                    (efer(stage.efer() & !NXE), DONE),
                    (flush(stage), DONE),
                    (read(va + 8), fault(nx, va + 8)),
                    (write(va + 16, 1), fault(nx | W, va + 16)),
                    // Without NXE and SMEP nothing tells fetches from reads.
                    (fetch(va), fault(nx, va)),
                    (read(va + 8).user(), fault(nx | U, va + 8)),
                    (efer(stage.efer()), DONE),
                    (flush(stage), DONE),
                    (read(va + 8), number),
                    (fetch(va), fault(P | F, va)),
                    (stage.set_entry(*at, whole), DONE),
                    (flush(stage), DONE),
                    (fetch(va), number),
                ],
            )?;
        }
        Ok(())
    })
}

fn a_large_page_has_reserved_bits_of_its_own() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.large_frame();
        let at = stage.map(va, 2, frame | ALL);
        let whole = stage.entry(at);
        // Below a large page's address, above the PAT bit.
        let bit = if paging == Paging::Legacy { 21 } else { 13 };
        stage.expect(
            "a bit below the address",
            &[
                (read(va + 8), value(tag(frame))),
                (stage.set_entry(at, whole | 1 << bit), DONE),
                (flush(&stage), DONE),
                (read(va + 8), fault(P | RSVD, va + 8)),
                (write(va + PAGE, 1).user(), fault(P | RSVD | W | U, va + PAGE)),
                // PAT, global, and what software may use are not reserved.
                (stage.set_entry(at, whole | 0xe00 | GLOBAL | 1 << 12), DONE),
                (flush(&stage), DONE),
                (read(va + 8), value(tag(frame))),
            ],
        )
    })
}

fn a_large_page_at_the_root_is_a_reserved_bit() -> Outcome {
    in_each_mode(|paging| {
        if !paging.is_wide() {
            return Ok(());
        }
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        for level in 4..=paging.levels() {
            let at = stage.tree().entry(va, level)?;
            // An alias of the table, with an entry of its own.
            let elsewhere = va + paging.span(level);
            let twin = stage.place_of(elsewhere, level);
            let entry = stage.entry(at);
            stage.expect(
                &format!("level {level}"),
                &[
                    (stage.set_entry(twin, entry), DONE),
                    (read(elsewhere + 8), value(tag(frame))),
                    (stage.set_entry(twin, entry | LARGE), DONE),
                    (invlpg(elsewhere), DONE),
                    (read(elsewhere + 8), fault(P | RSVD, elsewhere + 8)),
                    (stage.set_entry(twin, 0), DONE),
                    (invlpg(elsewhere), DONE),
                    (read(elsewhere + 8), fault(0, elsewhere + 8)),
                ],
            )?;
        }
        Ok(())
    })
}

fn an_access_over_a_page_border_tells_the_second_page() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let (first, second) = (stage.frame(), stage.frame());
        stage.map(va, 1, first | ALL);
        let at = stage.map(va + PAGE, 1, 0);
        let border = va + PAGE;
        stage.expect(
            "over the border",
            &[
                (read(border - 2), fault(0, border)),
                (write(border - 2, 1), fault(W, border)),
                (write(border - 2, 1).user(), fault(U | W, border)),
                (stage.set_entry(at, second | PRESENT), DONE),
                (write(border - 2, 1), fault(P | W, border)),
                (read(border - 2).user(), fault(P | U, border)),
                (stage.set_entry(at, second | ALL), DONE),
                (write(border - 2, 0x1122_3344), DONE),
                (read(border - 2), value(0x1122_3344)),
            ],
        )?;
        let halves =
            (stage.memory().read(first + PAGE - 8) >> 48, stage.memory().read(second) & 0xffff);
        equal("the halves in their frames", halves, (0x3344, 0x1122))
    })
}

fn what_was_absent_needs_no_flush() -> Outcome {
    in_each_mode(|paging| {
        for level in 1..=paging.levels() {
            if paging == Paging::Pae && level == 3 {
                // The four entries of the top are registers of the processor, loaded with CR3.
                continue;
            }
            let (mut stage, va) = (Stage::new(paging)?, paging.at());
            let frame = stage.frame();
            stage.map(va, 1, frame | ALL);
            let at = stage.tree().entry(va, level)?;
            let entry = stage.entry(at);
            paging.put(stage.memory(), at, 0);
            stage.expect(
                &format!("level {level}"),
                &[
                    (read(va + 8), fault(0, va + 8)),
                    (write(va + 16, 3), fault(W, va + 16)),
                    (stage.set_entry(at, entry), DONE),
                    (write(va + 16, 3), DONE),
                    (read(va + 8), value(tag(frame))),
                    (read(va + 16).user(), value(3)),
                ],
            )?;
        }
        Ok(())
    })
}

fn a_large_page_is_one_page() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.large_frame();
        let span = paging.span(2);
        let at = stage.map(va, 2, frame | ALL);
        let mut expected = Vec::new();
        for offset in (0..span).step_by(37 * PAGE as usize) {
            expected.push((read(va + offset + 8), value(tag(frame + offset))));
            expected.push((fetch(va + offset).user(), value(tag(frame + offset))));
        }
        expected.push((read(va + span), fault(0, va + span)));
        // One INVLPG anywhere in it is enough.
        expected.push((stage.set_entry(at, 0), DONE));
        expected.push((invlpg(va + 5 * PAGE), DONE));
        for offset in (0..span).step_by(37 * PAGE as usize) {
            expected.push((write(va + offset, 1), fault(W, va + offset)));
        }
        stage.expect("large", &expected)
    })
}

fn a_large_page_has_its_low_address_bits_from_the_address() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.large_frame();
        stage.map(va, 2, frame | ALL);
        let (span, last) = (paging.span(2), paging.span(2) - 8);
        stage.expect(
            "the ends",
            &[
                (write(va + last, 0x77), DONE),
                (write(va + span / 2 + 0x128, 0x88).user(), DONE),
                (add(va + last, 1), value(0x77)),
            ],
        )?;
        equal("the last word", stage.memory().read(frame + last), 0x78)?;
        equal("in the middle", stage.memory().read(frame + span / 2 + 0x128), 0x88)
    })
}

fn high_addresses_are_translated() -> Outcome {
    in_each_mode(|paging| {
        let addresses: &[u64] = match paging {
            Paging::Legacy | Paging::Pae => &[0xffff_f000, 0xc000_0000, 0x8000_0000, 0x7fff_f000],
            Paging::Four => &[0x7fff_ffff_f000, 0xffff_8000_0000_0000, u64::MAX << 12],
            Paging::Five => &[
                0x00ff_ffff_ffff_f000,
                0xff00_0000_0000_0000,
                0x0001_0000_0000_0000,
                0xffff_8000_0000_0000,
                u64::MAX << 12,
            ],
        };
        let mut stage = Stage::new(paging)?;
        let mut expected = Vec::new();
        for va in addresses {
            let frame = stage.frame();
            stage.map(*va, 1, frame | ALL);
            expected.push((read(va + 8), value(tag(frame))));
            expected.push((fetch(*va).user(), value(tag(frame))));
        }
        stage.expect("high", &expected)
    })
}

fn pse36_reaches_above_4_gib() -> Outcome {
    let (mut stage, va) = (Stage::new(Paging::Legacy)?, Paging::Legacy.at());
    let memory = Memory::new(4 << 20)?;
    let gpa = 3 << 32;
    stage.guest.vm.set_slot(1, 0, gpa, memory.bytes(), memory.hva()).granted("slot")?;
    mark(&memory, 5 * PAGE, 0x36);
    stage.map(va, 2, (gpa >> 32) << 13 | ALL);
    stage.expect(
        "above 4 GiB",
        &[
            (read(va + 5 * PAGE + 8), value(0x36)),
            (fetch(va + 5 * PAGE), value(0x36)),
            (write(va + (4 << 20) - 8, 0x99).user(), DONE),
        ],
    )?;
    equal("the last word", memory.read((4 << 20) - 8), 0x99)
}

fn pse_off_makes_large_entries_tables() -> Outcome {
    oracle::not_of_stock_shadow_paging("its pages do not know CR4.PSE")?;
    let (mut stage, va) = (Stage::new(Paging::Legacy)?, Paging::Legacy.at());
    let (large, small) = (stage.large_frame(), stage.frame());
    stage.map(va, 2, large | ALL);
    // The same entry as a table: the large frame's first page.
    stage.memory().write(large, small | ALL);
    // What follows must itself not live in large pages: the first 4 MiB do not.
    stage.expect(
        "with PSE, and without",
        &[
            (read(va), value(small & 0xffff_ffff | ALL)),
            (cr4(0), DONE),
            (flush(&stage), DONE),
            (read(va + 8), value(tag(small))),
            (cr4(stage.cr4()), DONE),
            (flush(&stage), DONE),
            (read(va + 8 * PAGE + 8), value(tag(large + 8 * PAGE))),
        ],
    )
}
