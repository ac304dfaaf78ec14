//! When a change of the tables has to be seen: after INVLPG of the address, after a load of CR3 where the page is not
//! global, after CR4.PGE or CR0.PG changed; and the address spaces that CR3 chooses (APM vol. 2 §5.5).

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::memory::PAGE;
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{CR0, PG, PGE, Stage, in_each_mode, tag};
use crate::outcome::{Answer, Outcome, equal, holds};
use crate::runner::tests;

tests!("paging_flushes":
    a_change_is_seen_after_invlpg,
    a_change_is_seen_after_a_load_of_cr3,
    a_removed_permission_is_seen_after_invlpg,
    a_changed_entry_of_any_level_is_seen_after_a_flush,
    without_a_flush_the_old_or_the_new_is_seen,
    a_global_page_is_seen_after_invlpg_or_pge,
    a_page_that_is_no_longer_global_goes_with_cr3,
    turning_paging_off_and_on_flushes,
    paging_off_shows_physical_memory,
    an_address_space_shows_its_own_pages,
    hundreds_of_address_spaces_show_their_own_pages,
    few_pages_for_shadows_are_enough,
    an_address_space_that_dies_leaves_nothing_behind,
    a_permission_differs_between_address_spaces,
);

/// What each mode makes of it: two frames, one mapped.
fn ping_pong(flush: impl Fn(&Stage, u64) -> Operation) -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL);
        let mut expected = Vec::new();
        for round in 0..60 {
            let frame = frames[round % 2];
            expected.extend([
                (stage.set_entry(at, frame | ALL), DONE),
                (flush(&stage, va), DONE),
                (read(va + 8), value(tag(frame))),
                (fetch(va).user(), value(tag(frame))),
                (write(va + 16 + round as u64 * 8, 1), DONE),
            ]);
        }
        stage.expect("changed", &expected)?;
        for round in 0..60_u64 {
            let written = |frame| stage.memory().read_bytes(frame + 16 + round * 8, 1)[0];
            let (there, other) = (frames[round as usize % 2], frames[(round as usize + 1) % 2]);
            equal("where the writes went", (written(there), written(other)), (1, 0))?;
        }
        Ok(())
    })
}

fn a_change_is_seen_after_invlpg() -> Outcome {
    ping_pong(|_, va| invlpg(va + 0x123))
}

fn a_change_is_seen_after_a_load_of_cr3() -> Outcome {
    ping_pong(|stage, _| cr3(stage.root))
}

fn a_removed_permission_is_seen_after_invlpg() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, frame | ALL);
        let number = value(tag(frame));
        let mut expected = Vec::new();
        for _ in 0..10 {
            expected.extend([
                (stage.set_entry(at, frame | ALL), DONE),
                (write(va + 16, 1).user(), DONE),
                (fetch(va).user(), number),
                (stage.set_entry(at, frame | PRESENT | USER), DONE),
                (invlpg(va), DONE),
                (write(va + 16, 1), fault(P | W, va + 16)),
                (read(va + 8).user(), number),
                (stage.set_entry(at, frame | PRESENT), DONE),
                (invlpg(va), DONE),
                (read(va + 8).user(), fault(P | U, va + 8)),
                (read(va + 8), number),
                (stage.set_entry(at, frame), DONE),
                (invlpg(va), DONE),
                (read(va + 8), fault(0, va + 8)),
            ]);
            if paging.has_nx() {
                expected.extend([
                    (stage.set_entry(at, frame | ALL), DONE),
                    (fetch(va), number),
                    (stage.set_entry(at, frame | ALL | NX), DONE),
                    (invlpg(va), DONE),
                    (fetch(va), fault(P | F, va)),
                    (write(va + 16, 1), DONE),
                    (stage.set_entry(at, 0), DONE),
                    (invlpg(va), DONE),
                ]);
            }
        }
        stage.expect("taken away", &expected)
    })
}

fn a_changed_entry_of_any_level_is_seen_after_a_flush() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        // A twin tree at the next address of each level, to take the entries from.
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        for level in 2..=paging.levels() {
            let twin_va = va + paging.span(level);
            let twin_frame = stage.frame();
            stage.map(twin_va, 1, twin_frame | ALL);
            let at = stage.tree().entry(va, level)?;
            let twin = stage.entry(stage.tree().entry(twin_va, level)?);
            let entry = stage.entry(at);
            let by_invlpg = paging != Paging::Pae || level < 3;
            let mut expected = Vec::new();
            for round in 0..12 {
                let flush = match by_invlpg && round / 2 % 2 == 0 {
                    true => invlpg(va),
                    false => cr3(stage.root),
                };
                let (entry, frame) =
                    if round % 2 == 0 { (twin, twin_frame) } else { (entry, frame) };
                expected.extend([
                    (stage.set_entry(at, entry), DONE),
                    (flush, DONE),
                    (read(va + 8), value(tag(frame))),
                    (write(va + 16, round).user(), DONE),
                    (read(twin_va + 8), value(tag(twin_frame))),
                ]);
            }
            stage.expect(&format!("level {level}"), &expected)?;
        }
        Ok(())
    })
}

fn without_a_flush_the_old_or_the_new_is_seen() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL);
        for round in 0..20 {
            let (old, new) = (frames[round % 2], frames[(round + 1) % 2]);
            let list = [
                read(va + 8),
                stage.set_entry(at, new | ALL),
                read(va + 8),
                fetch(va).user(),
                invlpg(va),
                read(va + 8),
            ];
            let seen = stage.run(&list)?;
            let either = [value(tag(old)), value(tag(new))];
            equal("before", seen[0], either[0])?;
            let both = either.contains(&seen[2]) && either.contains(&seen[3]);
            holds("the old or the new", both, (seen[2], seen[3]))?;
            equal("after", seen[5], either[1])?;
        }
        Ok(())
    })
}

fn a_global_page_is_seen_after_invlpg_or_pge() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL | GLOBAL);
        let (other, with) = (stage.light_root(), stage.cr4() | PGE);
        let shared = stage.entry(stage.tree().entry(va, 2)?);
        let twin = stage.place_in(other, va, 2);
        paging.put(stage.memory(), twin, shared);
        stage.one(stage.switch_cr4(with))?;
        for round in 0..12 {
            let (old, new) = (frames[round % 2], frames[(round + 1) % 2]);
            let mut list = vec![read(va + 8), stage.set_entry(at, new | ALL | GLOBAL)];
            list.extend([cr3(other), read(va + 8), cr3(stage.root), write(va + 16, 1)]);
            match round % 3 {
                0 => list.push(invlpg(va)),
                1 => list.extend([stage.switch_cr4(with & !PGE), stage.switch_cr4(with)]),
                // Once is enough.
                _ => list.push(stage.switch_cr4(with & !PGE)),
            }
            list.push(read(va + 8));
            list.push(stage.switch_cr4(with));
            list.push(read(va + 8).user());
            let seen = stage.run(&list)?;
            equal("before", seen[0], value(tag(old)))?;
            holds("old or new", [value(tag(old)), value(tag(new))].contains(&seen[3]), seen[3])?;
            let after: Vec<Seen> = seen[6..].iter().copied().filter(|seen| *seen != DONE).collect();
            equal("after", after, vec![value(tag(new)); 2])?;
        }
        Ok(())
    })
}

fn a_page_that_is_no_longer_global_goes_with_cr3() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL | GLOBAL);
        let mut expected = vec![(stage.switch_cr4(stage.cr4() | PGE), DONE)];
        for round in 0..10 {
            let (old, new) = (frames[round % 2], frames[(round + 1) % 2]);
            expected.extend([
                (stage.set_entry(at, old | ALL | GLOBAL), DONE),
                (invlpg(va), DONE),
                (read(va + 8), value(tag(old))),
                (stage.set_entry(at, old | ALL), DONE),
                (invlpg(va), DONE),
                (read(va + 8).user(), value(tag(old))),
                (stage.set_entry(at, new | ALL), DONE),
                (cr3(stage.root), DONE),
                (read(va + 8), value(tag(new))),
            ]);
        }
        stage.expect("global and not", &expected)
    })
}

/// The modes in which paging can be turned off without leaving 64-bit mode.
fn in_narrow_modes(test: impl Fn(Paging) -> Outcome) -> Outcome {
    in_each_mode(|paging| if paging.is_wide() { Ok(()) } else { test(paging) })
}

fn turning_paging_off_and_on_flushes() -> Outcome {
    in_narrow_modes(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL | GLOBAL);
        let mut expected = vec![(stage.switch_cr4(stage.cr4() | PGE), DONE)];
        for round in 0..10 {
            let new = frames[(round + 1) % 2];
            expected.push((read(va + 8), value(tag(frames[round % 2]))));
            expected.push((cr0(CR0 & !PG), DONE));
            expected.push((stage.set_entry(at, new | ALL | GLOBAL), DONE));
            expected.extend(stage.clean_tops().into_iter().map(|step| (step, DONE)));
            expected.push((cr0(CR0), DONE));
            expected.push((read(va + 8), value(tag(new))));
            expected.push((fetch(va).user(), value(tag(new))));
        }
        stage.expect("off and on", &expected)
    })
}

fn paging_off_shows_physical_memory() -> Outcome {
    in_narrow_modes(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let (frame, other) = (stage.frame(), stage.frame());
        stage.map(va, 1, frame | ALL);
        // A page of the one-to-one map that is not one to one.
        let page = 0x3_8000;
        stage.map(page, 1, other | ALL);
        stage.mark_frame(page);
        let mut expected = Vec::new();
        for _ in 0..4 {
            expected.extend([
                (read(page + 8), value(tag(other))),
                (write(page + 16, 5), DONE),
                (cr0(CR0 & !PG), DONE),
                (read(page + 8), value(tag(page))),
                (write(page + 16, 6), DONE),
                (read(frame + 8), value(tag(frame))),
                (fetch(other), value(tag(other))),
            ]);
            expected.extend(stage.clean_tops().into_iter().map(|step| (step, DONE)));
            expected.extend([(cr0(CR0), DONE), (read(page + 16), value(5))]);
        }
        stage.expect("off and on", &expected)
    })
}

fn an_address_space_shows_its_own_pages() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame(), stage.frame()];
        let roots = [stage.root, stage.light_root(), stage.light_root()];
        stage.map_in(roots[0], va, 1, frames[0] | ALL);
        stage.map_in(roots[1], va, 1, frames[1] | ALL);
        // The third has it somewhere else.
        stage.map_in(roots[2], va + PAGE, 1, frames[2] | ALL);
        let mut expected = Vec::new();
        for round in 0..30 {
            expected.extend([
                (cr3(roots[0]), DONE),
                (read(va + 8), value(tag(frames[0]))),
                (cr3(roots[1]), DONE),
                (read(va + 8).user(), value(tag(frames[1]))),
                (write(va + 16, round), DONE),
                (cr3(roots[2]), DONE),
                (read(va + 8), fault(0, va + 8)),
                (fetch(va + PAGE), value(tag(frames[2]))),
            ]);
        }
        stage.expect("three", &expected)
    })
}

/// `count` address spaces with a page of their own each, visited over and over.
fn spaces(count: u64, prepare: impl Fn(&Stage) -> Outcome) -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        prepare(&stage)?;
        let mut spaces = Vec::new();
        for index in 0..count {
            let (root, frame) = (stage.light_root(), stage.frame());
            let own = va + index % 7 * PAGE;
            stage.map_in(root, own, 1, frame | ALL);
            spaces.push((root, frame, own));
        }
        let mut expected = Vec::new();
        for round in 0..4 {
            for index in 0..count {
                // In order, backwards, and in leaps.
                let index = match round {
                    0 | 3 => index,
                    1 => count - 1 - index,
                    _ => index * 89 % count,
                };
                let (root, frame, own) = spaces[index as usize];
                let neighbour = va + (index + 1) % 7 * PAGE;
                expected.extend([
                    (cr3(root), DONE),
                    (read(own + 8), value(tag(frame))),
                    (add(own + 16, 1).user(), value(round)),
                ]);
                if round == 1 {
                    expected.push((read(neighbour), fault(0, neighbour)));
                }
            }
        }
        stage.expect("spaces", &expected)?;
        for (_, frame, _) in &spaces {
            equal("visits", stage.memory().read(frame + 16) & 0xffff_ffff, 4)?;
        }
        Ok(())
    })
}

fn hundreds_of_address_spaces_show_their_own_pages() -> Outcome {
    spaces(240, |_| Ok(()))
}

fn few_pages_for_shadows_are_enough() -> Outcome {
    spaces(120, |stage| {
        stage.guest.vm.call(ioctl::SET_NR_MMU_PAGES, 64).granted("KVM_SET_NR_MMU_PAGES").map(drop)
    })
}

fn an_address_space_that_dies_leaves_nothing_behind() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        // A page that is a table of another level in each life.
        let pages: Vec<u64> = (0..5).map(|_| stage.tables.page()).collect();
        let home = stage.root;
        let light = stage.light_root();
        let first: Vec<u64> =
            (0..16).map(|index| stage.entry(light + index * paging.entry_bytes())).collect();
        for life in 0..20 {
            let frame = stage.frame();
            let page = |index: usize| pages[(index + life) % pages.len()];
            let levels = paging.levels();
            // The root, which in PAE has only four entries, stays apart there.
            let root = if paging == Paging::Pae { light } else { page(0) };
            let mut expected = vec![(cr3(home), DONE)];
            expected.extend(pages.iter().map(|page| (fill(*page, 0), DONE)));
            if paging != Paging::Pae {
                let entries = first.iter().enumerate().filter(|(_, entry)| **entry != 0);
                expected.extend(entries.map(|(index, entry)| {
                    (stage.set_entry(root + index as u64 * paging.entry_bytes(), *entry), DONE)
                }));
            }
            let mut table = root;
            for level in (2..=levels).rev() {
                let next = page((levels - level + 1) as usize);
                let at = table + paging.offset(va, level);
                expected.push((stage.set_entry(at, next | paging.table_flags(level)), DONE));
                table = next;
            }
            expected.extend([
                (stage.set_entry(table + paging.offset(va, 1), frame | ALL), DONE),
                (cr3(root), DONE),
                (read(va + 8), value(tag(frame))),
                (read(va + PAGE), fault(0, va + PAGE)),
                (fetch(va).user(), value(tag(frame))),
                (write(va + 16, life as u64).user(), DONE),
            ]);
            stage.expect(&format!("life {life}"), &expected)?;
        }
        Ok(())
    })
}

fn a_permission_differs_between_address_spaces() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        // The same table below a directory entry that permits less.
        let directory = stage.entry(stage.tree().entry(va, 2)?);
        let narrow = stage.light_root();
        let at = stage.place_in(narrow, va, 2);
        paging.put(stage.memory(), at, directory & !(WRITABLE | USER));
        let number = value(tag(frame));
        let mut expected = Vec::new();
        for round in 0..10 {
            expected.extend([
                (cr3(stage.root), DONE),
                (write(va + 16, round).user(), DONE),
                (cr3(narrow), DONE),
                (read(va + 8), number),
                (write(va + 16, 99), fault(P | W, va + 16)),
                (read(va + 8).user(), fault(P | U, va + 8)),
                (cr3(stage.root), DONE),
                (read(va + 16), value(round)),
            ]);
        }
        stage.expect("one table, two permissions", &expected)
    })
}
